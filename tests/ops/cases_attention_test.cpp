// The cases C01, C05, C07, C10, C11, C13, C14, C16 to C19 and C25 for attention over the cache, against a softmax in
// double: the inputs of the case, scaled to a group of 16 tokens, the smallest, then others of the same kind. Left out:
// what a case says about CUDA.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <sys/mman.h>

#include <random>
#include <thread>

#include "tests/ops/cases.h"

namespace kivi::test {
namespace {

// Row i of q [B, Hq, Lq, D] stands at key n - Lq + i of k [B, Hkv, n, D]. `mask` is added, and may be undefined. Looped
// over batch and heads, so that no broadcast can go wrong.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask = {},
                     bool causal = true) {
  const int64_t rows = q.size(2), keys = k.size(2), repeat = q.size(1) / k.size(1);
  at::Tensor out = at::zeros({q.size(0), q.size(1), rows, v.size(3)}, at::kDouble);
  for (int64_t b = 0; b < q.size(0); b++) {
    for (int64_t h = 0; h < q.size(1); h++) {
      const at::Tensor kd = k[b][h / repeat].to(at::kDouble), vd = v[b][h / repeat].to(at::kDouble);
      at::Tensor scores = at::matmul(q[b][h].to(at::kDouble), kd.t()) / std::sqrt(static_cast<double>(q.size(3)));
      if (mask.defined()) scores = scores + mask[b][h].to(at::kDouble);
      if (causal) scores.masked_fill_(at::ones({rows, keys}, at::kBool).triu(keys - rows + 1), -INFINITY);
      out[b][h].copy_(at::matmul(at::nan_to_num(at::softmax(scores, -1), 0.0), vd));
    }
  }
  return out;
}

at::Tensor reference(const at::Tensor& q, const KVCache& cache, const at::Tensor& mask = {}, bool causal = true) {
  const auto [k, v] = cache.dequantize();
  return reference(q, k, v, mask, causal);
}

at::Tensor counting(int64_t first, int64_t last, int64_t dim = 16) {
  return at::arange(first, last, at::kFloat).view({1, 1, last - first, 1}).expand({1, 1, last - first, dim});
}

// ---------------------------------------------------------------------------------------------- C01, C05

TEST(C01_Constants, ZeroKeysAndOnesGiveExactlyOne) {
  for (const char* precision : {"exact", "fast"}) {
    for (const int64_t bits : kAllBits) {
      for (const int64_t n : {1, 16, 17, 63, 64, 100, 160, 1000}) {
        CacheOptions o = case_options(2, 32, 16, 8, 1, bits, bits);
        o.precision = precision;
        KVCache cache(o);
        cache.append(at::zeros({1, 2, n, 32}), at::ones({1, 2, n, 32}));
        for (const at::Tensor& q : {randn({1, 8, 3, 32}, 1), at::zeros({1, 2, 1, 32})}) {
          const at::Tensor out = cache.attend(q).select(2, q.size(2) - 1);
          EXPECT_TRUE(same_bits(out, at::ones_like(out))) << precision << " " << bits << " bits, " << n << " keys";
        }
      }
    }
  }
}

// A key that a query may not see contributes nothing, even if it is NaN: in the window and in quantised groups, among
// the new tokens of a chunk, and in a prefill.
TEST(C05_NotFinite, ReachesOnlyQueriesThatSeeIt) {
  const at::Tensor k = randn({1, 2, 80, 32}, 2), v = randn({1, 2, 80, 32}, 3), q = randn({1, 4, 80, 32}, 4);
  for (const char* precision : {"exact", "fast"}) {
    for (const float bad : {kNan, kInf, -kInf}) {
      for (const int64_t prefix : {60, 3, 0}) {
        CacheOptions o = case_options(2, 32, 16, 8, 0);
        o.precision = precision;
        const int64_t count = 80 - prefix, at = 70;
        at::Tensor bad_v = v.clone(), bad_k = k.clone();
        bad_v[0][1][at].fill_(bad);
        bad_k[0][1][at].fill_(bad);
        const auto run = [&](const at::Tensor& keys, const at::Tensor& values) {
          KVCache cache(o);
          if (prefix > 0) append_range(cache, keys, values, 0, prefix);
          return cache.forward(q.narrow(2, prefix, count), keys.narrow(2, prefix, count),
                               values.narrow(2, prefix, count));
        };
        const at::Tensor want = run(k, v), by_value = run(k, bad_v), by_key = run(bad_k, v);
        const std::string what = std::string(precision) + " prefix " + std::to_string(prefix);
        for (const at::Tensor& got : {by_value, by_key}) {
          // Rows before the token, and the other kv head.
          const bool value = got.is_same(by_value);
          EXPECT_LE(max_difference(got.narrow(2, 0, at - prefix), want.narrow(2, 0, at - prefix)), 1e-5)
              << what << " " << bad << (value ? " in v" : " in k");
          EXPECT_LE(max_difference(got.narrow(1, 0, 2), want.narrow(1, 0, 2)), 1e-5) << what;
        }
        EXPECT_FALSE(by_value[0][2].narrow(0, at - prefix, 80 - at).isfinite().any().item<bool>())
            << what << " " << bad;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- C07

TEST(C07_Widths, AllPairsOnTheGridAreExact) {
  for (const int64_t k_bits : kAllBits) {
    for (const int64_t v_bits : kAllBits) {
      // Channels of K and tokens of V hold both ends of their range in every group; scale 0.5.
      const auto grid = [](int64_t bits, bool along_tokens, int64_t stride) {
        const int64_t levels = int64_t{1} << bits, d = 48;
        const at::Tensor t = at::arange(64, at::kLong).unsqueeze(1), c = at::arange(d, at::kLong).unsqueeze(0);
        at::Tensor codes = (t * stride + c * 3) % levels;
        for (int64_t i = 0; i < (along_tokens ? 64 : d); i += 16) {
          codes.select(along_tokens ? 0 : 1, i).zero_();
          codes.select(along_tokens ? 0 : 1, i + 1).fill_(levels - 1);
        }
        return (codes.to(at::kFloat) * 0.5 - static_cast<double>(levels) / 4).view({1, 1, 64, d});
      };
      const at::Tensor k = grid(k_bits, true, 5), v = grid(v_bits, false, 7);
      for (const int64_t residual : {0, 32}) {
        KVCache cache(case_options(1, 48, 16, residual, 0, k_bits, v_bits));
        cache.append(k, v);
        const auto [kd, vd] = cache.dequantize();
        ASSERT_TRUE(same_bits(kd, k) && same_bits(vd, v)) << k_bits << " " << v_bits;
        const at::Tensor q = randn({1, 4, 2, 48}, 5) * 0.05;
        const double size = 0.5 * static_cast<double>(int64_t{1} << v_bits);  // outputs are as large as the values
        EXPECT_LE(max_difference(cache.attend(q), reference(q, k, v)), 1e-5 * std::max(1.0, size))
            << k_bits << " " << v_bits;
      }
    }
  }
  for (const int64_t bits : {0, 5, 6, 7, 16, -4}) {
    expect_error([=] { KVCache(case_options(1, 48, 16, 0, 0, bits, 2)); }, {"k_bits", std::to_string(bits)});
    expect_error([=] { KVCache(case_options(1, 48, 16, 0, 0, 2, bits)); }, {"v_bits", std::to_string(bits)});
    expect_error([=] { cache_format(1, 48, std::nullopt, 2, bits); }, {"v_bits", std::to_string(bits)});
  }
  // A pool of one pair of widths read as another: the pages have another size, or the pair is mirrored and so is it.
  const auto format = cache_format(1, 64, 32, 4, 2, 16, 0, 0), swapped = cache_format(1, 64, 32, 2, 4, 16, 0, 0);
  const CacheTensors t = make_tensors(format, 1, 1);
  cache_append(t, randn({1, 1, 32, 64}, 6), randn({1, 1, 32, 32}, 7), format);
  expect_error([&] { cache_attention(randn({1, 1, 1, 64}, 8), t, swapped); }, {"pool", "page"});
}

// ---------------------------------------------------------------------------------------------- C10, C11

TEST(C10_SinkLogit, TakesItsShareInEveryPart) {
  for (const char* precision : {"exact", "fast"}) {
    for (const auto& [tokens, residual] : {std::pair<int64_t, int64_t>{3, 16}, {48, 0}, {48, 16}, {200, 5}}) {
      CacheOptions o = case_options(1, 16, 16, residual);
      o.precision = precision;
      KVCache cache(o);
      const at::Tensor k = at::zeros({1, 1, tokens, 16}), v = at::ones({1, 1, tokens, 16}),
                       q = at::zeros({1, 4, 1, 16});
      cache.append(k, v);
      AttentionOptions with;
      with.sinks = floats({0.0, 1.0, -2.0, 5.0});
      const at::Tensor n = at::full({4}, static_cast<double>(tokens), at::kDouble),
                       shares = n / (n + at::exp(with.sinks->to(at::kDouble)));
      EXPECT_LE(max_difference(cache.attend(q, with)[0].squeeze(1), shares.unsqueeze(1).expand({4, 16})), 1e-5)
          << tokens;
      // In a prefill, where nothing is cached yet.
      KVCache empty(o);
      const at::Tensor out = empty.forward(q.expand({1, 4, tokens, 16}), k, v, with);
      EXPECT_LE(max_difference(out[0].select(1, tokens - 1), shares.unsqueeze(1).expand({4, 16})), 1e-5) << tokens;
    }
  }
}

// Keys of any size; values too: a last group of channels may be short.
TEST(C11_HeadSizes, KeysAndValuesOfAnySizeAreQuantised) {
  std::vector<std::pair<int64_t, int64_t>> sizes = {{192, 128}, {576, 512}, {96, 64}, {64, 96}, {40, 72}, {65, 33}};
  for (const int64_t d : {64, 80, 96, 112, 128, 192, 256, 576}) sizes.emplace_back(d, d);
  uint64_t seed = 9;
  for (const auto& [dim, value_dim] : sizes) {
    for (const int64_t group : {16, 32, 64}) {
      CacheOptions o = case_options(1, dim, group, 32);
      o.value_head_dim = value_dim;
      KVCache cache(o);
      const at::Tensor k = randn({2, 1, 32 + 3 * group, dim}, seed++, at::kHalf);
      const at::Tensor v = randn({2, 1, 32 + 3 * group, value_dim}, seed++, at::kHalf);
      cache.append(k, v);
      ASSERT_EQ(cache.quantized_length(), 3 * group);
      // Nothing is kept unquantised: 2 bits of codes and two float16 per group, channels padded to 16, groups to G.
      const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
      const int64_t record = group * (up(dim, 16) + up(value_dim, 16)) / 4 + 4 * up(dim, 16) + 4 * up(value_dim, group);
      EXPECT_LE(cache_page_bytes(cache_format(1, dim, value_dim, 2, 2, group)), 128 / group * (record + 7 * 64))
          << dim << " " << value_dim << " " << group;
      const at::Tensor q = randn({2, 4, 2, dim}, seed++, at::kHalf);
      const at::Tensor out = cache.attend(q);
      ASSERT_EQ(out.sizes(), at::IntArrayRef({2, 4, 2, value_dim}));
      EXPECT_LE(max_difference(out, reference(q, cache)), 2e-3) << dim << " " << value_dim << " " << group;
      for (const int64_t other : {dim - 1, dim + 16}) {
        expect_error(
            [&] {
              cache.attend(randn({2, 4, 1, other}, 1));
            },
            {"q", std::to_string(other), std::to_string(dim)});
      }
      expect_error(
          [&] {
            cache.append(k, randn({2, 1, 3, value_dim + 1}, 1, at::kHalf));
          },
          {"v", std::to_string(value_dim + 1)});
    }
  }
}

// ---------------------------------------------------------------------------------------------- C13

TEST(C13_SeveralQueries, AreAlignedAtTheBottomRight) {
  for (const int64_t cached : {5, 12, 30, 33}) {  // with 3 to 5 more, 32 + 16 tokens are passed inside the chunk
    for (const int64_t residual : {0, 16}) {
      for (const int64_t count : {1, 3, 4, 17}) {
        KVCache by_forward(case_options(1, 16, 16, residual)), by_attend(case_options(1, 16, 16, residual));
        const at::Tensor zero = at::zeros({1, 1, cached, 16}), new_zero = at::zeros({1, 1, count, 16});
        by_forward.append(zero, counting(0, cached));
        by_attend.append(zero, counting(0, cached));
        const at::Tensor out = by_forward.forward(new_zero, new_zero, counting(cached, cached + count));
        by_attend.append(new_zero, counting(cached, cached + count));
        const at::Tensor later = by_attend.attend(new_zero);
        for (int64_t i = 0; i < count; i++) {  // the mean of 0 .. cached + i
          const double want = static_cast<double>(cached + i) / 2;
          EXPECT_NEAR(out[0][0][i][3].item<double>(), want, 1e-5) << cached << " + " << i;
          EXPECT_NEAR(later[0][0][i][3].item<double>(), want, 1e-5) << cached << " + " << i;
        }
      }
    }
  }
  KVCache ones(case_options(1, 16, 16, 4));
  ones.append(at::zeros({1, 1, 12, 16}), at::ones({1, 1, 12, 16}));
  const at::Tensor none = at::zeros({1, 1, 4, 16});
  EXPECT_LE(max_difference(ones.forward(none, none, none)[0][0].select(1, 0),
                           floats({12. / 13, 12. / 14, 12. / 15, 12. / 16})),
            1e-6);
}

// More queries than keys: those that stand before the first key see nothing and give 0.
TEST(C13_SeveralQueries, MoreQueriesThanKeysAndSingleSteps) {
  for (const int64_t keys : {0, 1, 5, 40}) {
    KVCache cache(case_options(1, 16, 16, 4));
    if (keys > 0) cache.append(at::zeros({1, 1, keys, 16}), counting(1, keys + 1));
    const at::Tensor out = cache.attend(at::zeros({1, 2, keys + 3, 16}))[0][1].select(1, 0);
    EXPECT_EQ(out.narrow(0, 0, 3).abs().max().item<double>(), 0.0);
    for (int64_t i = 0; i < keys; i++) EXPECT_NEAR(out[3 + i].item<double>(), 1.0 + static_cast<double>(i) / 2, 1e-5);
  }
  const at::Tensor k = randn({2, 2, 104, 16}, 31), v = randn({2, 2, 104, 16}, 32).clamp(-1, 1),
                   q = randn({2, 4, 4, 16}, 33);
  for (const int64_t cached : {4, 40, 76, 88, 100}) {
    const CacheOptions o = case_options(2, 16, 16, 20, 4);
    KVCache one(o), four(o);
    append_range(one, k, v, 0, cached), append_range(four, k, v, 0, cached);
    const at::Tensor want = one.forward(q, k.narrow(2, cached, 4), v.narrow(2, cached, 4));
    const int64_t before = four.quantized_length();
    for (int64_t i = 0; i < 4; i++) {
      const bool flushed = four.quantized_length() != before;  // then it sees codes where the call saw exact tokens
      const at::Tensor got = four.forward(q.narrow(2, i, 1), k.narrow(2, cached + i, 1), v.narrow(2, cached + i, 1));
      EXPECT_LE(max_difference(got, want.narrow(2, i, 1)), flushed ? 1.0 : 1e-6) << cached << " + " << i;
    }
    EXPECT_TRUE(same_state(one.state(), four.state()));
  }
}

// ---------------------------------------------------------------------------------------------- C14

TEST(C14_Masks, EveryShapeUnderGroupedHeads) {
  for (const int64_t keys : {9, 45, 150}) {
    for (const char* precision : {"exact", "fast"}) {
      CacheOptions o = case_options(2, 16, 16, 4);
      o.precision = precision;
      KVCache cache(o);
      cache.append(randn({2, 2, keys, 16}, 41), randn({2, 2, keys, 16}, 42));
      const at::Tensor q = randn({2, 4, 3, 16}, 43) * 0.25;
      uint64_t seed = 44;
      for (const auto& shape : std::vector<std::vector<int64_t>>{{3, keys},
                                                                 {1, 1, 3, keys},
                                                                 {2, 1, 3, keys},
                                                                 {2, 1, 1, keys},
                                                                 {1, 4, 3, keys},
                                                                 {2, 4, 3, keys},
                                                                 {4, 1, keys}}) {
        const at::Tensor added = randn(shape, seed++), keep = randn(shape, seed++) > -0.5;
        std::vector<int64_t> wide = shape;
        wide.back() += 7;
        const at::Tensor sliced = at::full(wide, kNan).narrow(-1, 3, keys).copy_(added);
        for (const at::Tensor& mask : {added, keep, sliced, added.expand({2, 4, 3, keys})}) {
          for (const bool causal : {true, false}) {
            AttentionOptions with;
            with.attn_mask = mask;
            with.is_causal = causal;
            const at::Tensor plain = mask.scalar_type() == at::kBool
                                         ? at::zeros(shape).masked_fill(mask.logical_not(), -INFINITY)  // True = keep
                                         : mask;
            const at::Tensor want = reference(q, cache, plain.expand({2, 4, 3, keys}), causal);
            EXPECT_LE(max_difference(cache.attend(q, with), want), o.precision == "exact" ? 1e-5 : 5e-4)
                << mask.sizes() << " " << mask.scalar_type() << " causal " << causal << " " << precision;
          }
        }
      }
      const auto bad = [&](const at::Tensor& mask, const std::vector<std::string>& words) {
        AttentionOptions with;
        with.attn_mask = mask;
        expect_error([&] { cache.attend(q, with); }, words);
      };
      bad(at::zeros({2, 3, 3, keys}), {"attn_mask", "[2, 3, 3, "});  // neither heads nor 1
      bad(at::zeros({2, 2, 3, keys}), {"attn_mask", "[2, 2, 3, "});  // heads of K
      bad(at::zeros({3, keys + 1}), {"attn_mask", std::to_string(keys)});
      bad(at::zeros({3, keys}, at::kInt), {"attn_mask", "Int"});
      expect_error([&] { cache.attend(randn({2, 3, 3, 16}, 1)); }, {"q", "head count 3", "2"});
    }
  }
}

// ---------------------------------------------------------------------------------------------- C16 to C19

class LargestAllocation : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    largest = std::max(largest, bytes);
    live += bytes;
    peak = std::max(peak, live);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t largest = 0, live = 0, peak = 0;
};

TEST(C16_Memory, AStepAllocatesItsOutputAlone) {
  for (const auto& [k_bits, v_bits] : {std::pair<int64_t, int64_t>{2, 2}, {8, 3}}) {
    KVCache cache(case_options(8, 128, 32, 128, 0, k_bits, v_bits));
    const at::Tensor prompt = randn({1, 8, 1024, 128}, 51, at::kHalf), q = randn({1, 32, 1, 128}, 52),
                     x = prompt.narrow(2, 0, 1);
    cache.append(prompt, prompt);
    cache.forward(q, x, x);
    const auto watch = std::make_shared<LargestAllocation>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, watch);
    const at::Tensor out = cache.forward(q, x, x);
    EXPECT_LE(watch->largest, 32 * 128 * 4) << "B * Hq * Dv floats";
    EXPECT_LE(watch->peak, 2 * 32 * 128 * 4);
  }
}

TEST(C17_Strides, QueriesMasksAndNewTokens) {
  KVCache cache(case_options(2, 16, 16, 4));
  cache.append(randn({2, 2, 60, 16}, 53), randn({2, 2, 60, 16}, 54));
  for (const at::Tensor& q :
       {randn({2, 3, 4, 16}, 55).transpose(1, 2), randn({2, 4, 3, 33}, 56).slice(3, 1, 33, 2),
        randn({1, 4, 1, 16}, 57).expand({2, 4, 3, 16}), randn({2, 4, 3, 1}, 58).expand({2, 4, 3, 16}),
        randn({2, 4, 3, 16}, 59).flip({3}), randn({2, 4, 18}, 60).unfold(2, 16, 1),
        randn({2, 4, 3, 16}, 61).contiguous(at::MemoryFormat::ChannelsLast)}) {
    const at::Tensor plain = q.contiguous().clone(), k = q.narrow(1, 1, 2), plain_k = k.contiguous().clone();
    EXPECT_TRUE(cache.attend(q).is_contiguous());
    EXPECT_TRUE(same_bits(cache.attend(q), cache.attend(plain)));
    AttentionOptions with;
    with.attn_mask = randn({63, 3}, 62).t();
    const auto a = cache.clone(), b = cache.clone();
    EXPECT_TRUE(same_bits(a->forward(q, k, k.flip({2}), with), b->forward(plain, plain_k, plain_k.flip({2}), with)));
    EXPECT_TRUE(same_state(a->state(), b->state()));
    EXPECT_TRUE(same_bits(q, plain)) << "the input was changed";
  }
}

// Queries, a mask and new tokens whose rows lie more than 2^31 elements apart.
TEST(C18_Beyond31Bits, FarQueriesMasksAndNewTokens) {
  const int64_t stride = (int64_t{1} << 31) + 64;
  const size_t bytes = static_cast<size_t>(stride + 65536) * 4;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << bytes << " bytes of address space";
  const auto far = [&](int64_t offset, const at::Tensor& t) {
    const std::vector<int64_t> strides = {stride, t.stride(1), t.stride(2), t.stride(3)};
    return at::from_blob(static_cast<float*>(memory) + offset, t.sizes(), strides, t.options()).copy_(t);
  };
  KVCache cache(case_options(2, 16, 16, 4));
  cache.append(randn({2, 2, 60, 16}, 63), randn({2, 2, 60, 16}, 64));
  const at::Tensor q = randn({2, 4, 2, 16}, 65), k = randn({2, 2, 2, 16}, 66), mask = randn({2, 4, 2, 62}, 67);
  AttentionOptions near_mask, far_mask;
  near_mask.attn_mask = mask;
  far_mask.attn_mask = far(32768, mask);
  EXPECT_TRUE(same_bits(cache.attend(far(0, q)), cache.attend(q)));
  const auto a = cache.clone(), b = cache.clone();
  EXPECT_TRUE(same_bits(a->forward(far(0, q), far(8192, k), far(16384, k), far_mask), b->forward(q, k, k, near_mask)));
  EXPECT_TRUE(same_state(a->state(), b->state()));
  munmap(memory, bytes);
}

TEST(C19_Empty, NoKeysNoQueriesNoRows) {
  for (const auto type : kTypes) {
    KVCache cache(case_options(2, 16, 16, 4));
    const auto [out, lse] = cache.attend_with_lse(randn({3, 4, 2, 16}, 71, type));
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_EQ(out.abs().max().item<double>(), 0.0);
    EXPECT_TRUE((lse == -INFINITY).all().item<bool>());
    EXPECT_EQ(cache.batch_size(), 0);
    cache.append(randn({2, 2, 60, 16}, 72, type), randn({2, 2, 60, 16}, 73, type));
    EXPECT_EQ(cache.attend(at::empty({2, 4, 0, 16}, type)).sizes(), at::IntArrayRef({2, 4, 0, 16}));
    const at::Tensor none = at::empty({2, 2, 0, 16}, type);
    const auto before = cache.state();
    EXPECT_EQ(cache.forward(at::empty({2, 4, 0, 16}, type), none, none).sizes(), at::IntArrayRef({2, 4, 0, 16}));
    EXPECT_TRUE(same_state(cache.state(), before));
    KVCache no_rows(case_options(2, 16, 16, 4));
    const at::Tensor nobody = at::empty({0, 2, 5, 16}, type);
    EXPECT_EQ(no_rows.forward(at::empty({0, 4, 5, 16}, type), nobody, nobody).sizes(), at::IntArrayRef({0, 4, 5, 16}));
  }
}

// ---------------------------------------------------------------------------------------------- C25

TEST(C25_Threads, CountAndPlaceDoNotMatter) {
  for (const char* precision : {"exact", "fast"}) {
    for (const auto& [batch, kv_heads, heads] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {3, 4, 4}, {1, 4, 32}}) {
      CacheOptions o = case_options(kv_heads, 64, 32, 32, 4);
      o.precision = precision;
      const at::Tensor k = randn({batch, kv_heads, 1000, 64}, 81), v = randn({batch, kv_heads, 1000, 64}, 82);
      for (const int64_t rows : {1, 7}) {
        const at::Tensor q = randn({batch, heads, rows, 64}, 83);
        const auto all = [&] {
          KVCache cache(o);
          append_range(cache, k, v, 0, 900);
          const at::Tensor first = cache.attend(q);
          append_range(cache, k, v, 900, 1000);
          return std::tuple(first, cache.attend(q), cache.state());
        };
        const auto [first, second, state] = all();
        const auto expect_equal = [&, f = first, s = second, st = state](const auto& got, const std::string& what) {
          EXPECT_TRUE(same_bits(std::get<0>(got), f) && same_bits(std::get<1>(got), s)) << what << " " << precision;
          EXPECT_TRUE(same_state(std::get<2>(got), st)) << what;
        };
        for (const int count : {1, 2, 3, 8}) {
          const Threads guard(count);
          expect_equal(all(), std::to_string(count) + " threads");
        }
        std::vector<decltype(all())> inside(4);
        const Threads guard(3);
        at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) inside[static_cast<size_t>(i)] = all();
        });
        for (const auto& got : inside) expect_equal(got, "inside a parallel region");
      }
    }
  }
}

// Save and load, or roll back and append again: the last step gives the same bits while nothing is flushed between.
TEST(C25_Threads, TheSameRequestTwiceGivesTheSameBits) {
  for (const char* precision : {"exact", "fast"}) {
    CacheOptions o = case_options(2, 64, 32, 40, 4);
    o.precision = precision;
    const at::Tensor k = randn({1, 2, 320, 64}, 84), v = randn({1, 2, 320, 64}, 85), q = randn({1, 8, 1, 64}, 86);
    for (const int64_t n : {30, 77, 300, 309}) {
      KVCache cache(o);
      append_range(cache, k, v, 0, n);
      const at::Tensor want = cache.attend(q);
      EXPECT_TRUE(same_bits(KVCache::from_state(cache.state())->attend(q), want)) << n;
      const int64_t quantised = cache.quantized_length();
      cache.truncate(n - 1);
      append_range(cache, k, v, n - 1, n);
      ASSERT_EQ(cache.quantized_length(), quantised);
      EXPECT_TRUE(same_bits(cache.attend(q), want)) << n;
    }
  }
}

}  // namespace
}  // namespace kivi::test
