// kivi::KVCache: what it holds after any sequence of calls, to the bit, and the memory that it takes. Attention is in
// attention_test.cpp, bad arguments are in errors_test.cpp.
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <random>
#include <set>
#include <thread>

#include "tests/ops/model.h"

namespace kivi::test {
namespace {

CacheOptions options_of(int64_t heads, int64_t dim, int64_t group, int64_t residual, int64_t sink, int64_t k_bits = 2,
                        int64_t v_bits = 2) {
  CacheOptions o;
  o.num_kv_heads = heads;
  o.head_dim = dim;
  o.group_size = group;
  o.residual_length = residual;
  o.sink_length = sink;
  o.k_bits = k_bits;
  o.v_bits = v_bits;
  return o;
}

// Tokens [first, last) of both.
void append_range(KVCache& cache, const at::Tensor& k, const at::Tensor& v, int64_t first, int64_t last) {
  cache.append(k.narrow(2, first, last - first), v.narrow(2, first, last - first));
}

// Follows the live and the largest allocations of this thread.
class MemoryWatch : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    live += bytes;
    if (bytes > 0) allocated += bytes, calls++, largest = std::max(largest, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live = 0, allocated = 0, largest = 0, calls = 0;
};

struct Watched {
  std::shared_ptr<MemoryWatch> watch = std::make_shared<MemoryWatch>();
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, watch};
  MemoryWatch* operator->() const { return watch.get(); }
};

// ---------------------------------------------------------------------------------------------- what is held

// C08, C09: one by one, in chunks and at once, for every group size, residual, sink and pair of widths.
class Streaming : public ::testing::TestWithParam<int64_t> {};

TEST_P(Streaming, EqualsChunksAndOneShotToTheBit) {
  const int64_t group = GetParam();
  for (int64_t residual : std::set<int64_t>{0, 1, group - 1, group, 128}) {
    for (int64_t sink : {0, 4}) {
      const int64_t tokens = sink + residual + 2 * group + 5;
      const at::Tensor k = randn({1, 2, tokens, 8}, 1), v = randn({1, 2, tokens, 8}, 2);
      for (int64_t k_bits : kAllBits) {
        for (int64_t v_bits : kAllBits) {
          const CacheOptions o = options_of(2, 8, group, residual, sink, k_bits, v_bits);
          KVCache once(o), streamed(o), chunked(o);
          once.append(k, v);
          for (int64_t t = 0; t < tokens; t++) append_range(streamed, k, v, t, t + 1);
          for (int64_t t = 0, i = 0; t < tokens; i++) {
            const int64_t next = std::min(tokens, t + (i * 7 + 3) % 23);
            append_range(chunked, k, v, t, next);
            t = next;
          }
          const auto state = once.state();
          const std::string what = "R " + std::to_string(residual) + " sink " + std::to_string(sink) + " bits " +
                                   std::to_string(k_bits) + " " + std::to_string(v_bits);
          ASSERT_TRUE(same_state(streamed.state(), state)) << "streamed, " << what;
          ASSERT_TRUE(same_state(chunked.state(), state)) << "chunked, " << what;
          Model model(o, 1, at::kFloat);
          model.append(k, v);
          ASSERT_TRUE(model.matches(once)) << what;
          ASSERT_TRUE(model.matches(streamed)) << what;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(GroupSize, Streaming, ::testing::Values(16, 32, 64, 128),
                         [](const auto& p) { return "G" + std::to_string(p.param); });

TEST(Cache, CountsAtEveryStepFrom0To700Tokens) {
  const at::Tensor k = randn({1, 1, 700, 4}, 3), v = randn({1, 1, 700, 4}, 4);
  for (int64_t group : {16, 32, 64, 128}) {
    for (int64_t residual : std::set<int64_t>{0, 1, group - 1, group, 128}) {
      for (int64_t sink : {0, 4}) {
        KVCache cache(options_of(1, 4, group, residual, sink));
        EXPECT_EQ(cache.length(), 0);
        EXPECT_EQ(cache.quantized_length(), 0);
        for (int64_t n = 1; n <= 700; n++) {
          append_range(cache, k, v, n - 1, n);
          const int64_t want = std::max<int64_t>(0, n - sink - residual) / group * group, exact = n - want;
          ASSERT_EQ(cache.length(), n);
          ASSERT_EQ(cache.quantized_length(), want) << n << " tokens, G " << group << " R " << residual;
          ASSERT_GE(exact, std::min(n, residual));
          ASSERT_LE(exact, sink + residual + group - 1);
        }
      }
    }
  }
}

TEST(Cache, ExactTokensAreExactAtEveryLength) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (int64_t residual : {0, 5, 32}) {
      const at::Tensor k = randn({2, 2, 150, 12}, 5, type), v = randn({2, 2, 150, 12}, 6, type);
      KVCache cache(options_of(2, 12, 16, residual, 4));
      for (int64_t n = 1; n <= 150; n++) {
        append_range(cache, k, v, n - 1, n);
        const auto [kd, vd] = cache.dequantize();
        ASSERT_EQ(kd.scalar_type(), type);
        const int64_t exact = n - 4 - cache.quantized_length(), sinks = std::min<int64_t>(n, 4);
        ASSERT_TRUE(same_bits(kd.narrow(2, 0, sinks), k.narrow(2, 0, sinks)));
        ASSERT_TRUE(same_bits(vd.narrow(2, 0, sinks), v.narrow(2, 0, sinks)));
        if (exact <= 0) continue;
        ASSERT_TRUE(same_bits(kd.narrow(2, n - exact, exact), k.narrow(2, n - exact, exact))) << n;
        ASSERT_TRUE(same_bits(vd.narrow(2, n - exact, exact), v.narrow(2, n - exact, exact))) << n;
      }
    }
  }
}

// C08: a group of one token would keep the keys exact. Scales of K[t] = t^2 over 16 tokens at 2 bits: 75 and 235.
TEST(Cache, KeysAreQuantisedAlongTokens) {
  const at::Tensor t = at::arange(40, at::kFloat);
  const at::Tensor k = (t * t).view({1, 1, 40, 1}).expand({1, 1, 40, 8}), v = at::zeros({1, 1, 40, 8});
  KVCache cache(options_of(1, 8, 16, 4, 0));
  for (int64_t i = 0; i < 40; i++) append_range(cache, k, v, i, i + 1);
  ASSERT_EQ(cache.quantized_length(), 32);
  const auto [kd, vd] = cache.dequantize();
  const at::Tensor channel = kd[0][0].select(1, 3);
  EXPECT_TRUE(
      same_bits(channel.narrow(0, 0, 16), floats({0, 0, 0, 0, 0, 0, 0, 75, 75, 75, 75, 150, 150, 150, 225, 225})));
  EXPECT_TRUE(((channel.narrow(0, 16, 16) - 256.0).remainder(235.0) == 0).all().item<bool>()) << channel;
}

// C07: data on the grid of the codes comes back as it was, for every pair of widths.
TEST(Cache, DataOnTheGridIsExactForAllPairsOfWidths) {
  for (int64_t k_bits : kAllBits) {
    for (int64_t v_bits : kAllBits) {
      const int64_t k_levels = int64_t{1} << k_bits, v_levels = int64_t{1} << v_bits, tokens = 256;
      // Every group of 128 tokens (K) and of 128 channels (V) holds both ends of its grid, and every code at <= 4 bits.
      const at::Tensor tk = at::arange(tokens, at::kLong).unsqueeze(1), dk = at::arange(128, at::kLong).unsqueeze(0);
      at::Tensor kc = (tk * 3 + dk * 5) % k_levels, vc = (tk * 5 + dk * 3) % v_levels;
      for (int64_t at : {0, 128}) kc[at].zero_(), kc[at + 1].fill_(k_levels - 1);
      vc.select(1, 0).zero_();
      vc.select(1, 1).fill_(v_levels - 1);
      const at::Tensor k = (kc.to(at::kFloat) * 0.5 - 3).view({1, 1, tokens, 128}),
                       v = (vc.to(at::kFloat) * 0.25 + 1).view({1, 1, tokens, 128});
      KVCache cache(options_of(1, 128, 128, 0, 0, k_bits, v_bits));
      cache.append(k, v);
      ASSERT_EQ(cache.quantized_length(), tokens);
      const auto [kd, vd] = cache.dequantize();
      EXPECT_TRUE(same_bits(kd, k)) << k_bits << " " << v_bits;
      EXPECT_TRUE(same_bits(vd, v)) << k_bits << " " << v_bits;
    }
  }
}

// C01, C02: constants, the whole range of float16, subnormals.
TEST(Cache, ConstantsAndTheRangeOfFloat16) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (int64_t bits : kAllBits) {
      const CacheOptions o = options_of(1, 16, 16, 0, 0, bits, bits);
      for (double value : {100.0, -9.0, 0.0, -0.0, 0.5, 65504.0, -65504.0}) {
        // A constant is exact if float16, the type of the stored zero, holds it.
        const at::Tensor x = at::full({1, 1, 16, 16}, value, at::TensorOptions().dtype(type));
        if (x.to(at::kFloat).abs().max().item<float>() > 65504.0f) continue;
        KVCache cache(o);
        cache.append(x, x);
        const auto [k, v] = cache.dequantize();
        EXPECT_EQ(max_difference(k, x), 0.0) << value << " at " << bits;
        EXPECT_EQ(max_difference(v, x), 0.0) << value << " at " << bits;
      }
    }
  }
  for (int64_t bits : kAllBits) {
    at::Tensor x = at::zeros({1, 1, 16, 16}, at::kHalf);
    x.slice(2, 0, 16, 2).slice(3, 0, 16, 2).fill_(65504.0);
    x.slice(2, 1, 16, 2).slice(3, 1, 16, 2).fill_(-65504.0);
    KVCache cache(options_of(1, 16, 16, 0, 0, bits, bits));
    cache.append(x, x);
    const auto [k, v] = cache.dequantize();
    EXPECT_TRUE(k.isfinite().all().item<bool>() && v.isfinite().all().item<bool>()) << bits;
  }
}

// C05
TEST(Cache, NanAndInfSpoilTheirOwnGroupsOnly) {
  const at::Tensor clean_k = randn({1, 2, 64, 32}, 7), clean_v = randn({1, 2, 64, 32}, 8);
  for (float bad : {kNan, kInf, -kInf}) {
    for (int64_t token : {0, 7, 15, 16, 31}) {
      for (int64_t bits : {1, 2, 3, 8}) {
        const CacheOptions o = options_of(2, 32, 16, 0, 0, bits, bits);
        at::Tensor k = clean_k.clone(), v = clean_v.clone();
        k[0][1][token][5] = bad;
        v[0][1][token][20] = bad;
        KVCache cache(o), streamed(o);
        cache.append(k, v);
        for (int64_t t = 0; t < 64; t++) append_range(streamed, k, v, t, t + 1);
        Model model(o, 1, at::kFloat);
        model.append(clean_k, clean_v);
        const at::Tensor want_k = model.row(0).k.clone(), want_v = model.row(0).v.clone();
        want_k[1].narrow(0, token / 16 * 16, 16).select(1, 5).fill_(kNan);
        want_v[1][token].narrow(0, 16, 16).fill_(kNan);
        for (KVCache* c : {&cache, &streamed}) {
          const auto [kd, vd] = c->dequantize();
          ASSERT_TRUE(at::equal(kd[0].isnan(), want_k.isnan())) << token << " " << bits;
          ASSERT_TRUE(at::equal(vd[0].isnan(), want_v.isnan())) << token << " " << bits;
          ASSERT_TRUE(same_bits(at::nan_to_num(kd[0]), at::nan_to_num(want_k)));
          ASSERT_TRUE(same_bits(at::nan_to_num(vd[0]), at::nan_to_num(want_v)));
        }
        EXPECT_TRUE(same_state(cache.state(), streamed.state()));
      }
    }
  }
}

// C11
TEST(Cache, AnyHeadSizeAndValuesOfAnotherSize) {
  const std::vector<std::pair<int64_t, int64_t>> sizes = {
      {1, 1},     {7, 5},     {8, 8},     {20, 33},   {64, 64},   {80, 80}, {96, 96}, {112, 112}, {128, 128},
      {192, 192}, {256, 256}, {576, 576}, {192, 128}, {576, 512}, {96, 64}, {64, 96}, {1024, 16}, {16, 1024}};
  uint64_t seed = 10;
  for (const auto& [dim, value_dim] : sizes) {
    for (int64_t group : {16, 32, 64}) {
      for (int64_t bits : {2, 3}) {
        CacheOptions o = options_of(1, dim, group, 6, 1, bits, 5 - bits);
        o.value_head_dim = value_dim;
        const int64_t tokens = 7 + 2 * group;
        const at::Tensor k = randn({2, 1, tokens, dim}, seed++), v = randn({2, 1, tokens, value_dim}, seed++);
        KVCache cache(o);
        append_range(cache, k, v, 0, tokens - 3);
        append_range(cache, k, v, tokens - 3, tokens);
        ASSERT_EQ(cache.quantized_length(), 2 * group);
        Model model(o, 2, at::kFloat);
        model.append(k, v);
        ASSERT_TRUE(model.matches(cache)) << dim << " " << value_dim << " G " << group << " bits " << bits;
      }
    }
  }
}

// C15: values that tell batch, head, token and channel apart; every growth of the pool; reuse with other batch sizes.
TEST(Cache, HeadsAndRowsStayApartAcrossGrowthAndReuse) {
  const auto make = [](int64_t batch, int64_t tokens) {
    const auto axis = [](int64_t n, int64_t dim) {
      std::vector<int64_t> sizes = {1, 1, 1, 1};
      sizes[static_cast<size_t>(dim)] = n;
      return at::arange(n, at::kFloat).view(sizes);
    };
    return (axis(batch, 0) * 100 + axis(2, 1) * 10 + axis(tokens, 2) * 0.01 + axis(8, 3) * 0.125).contiguous();
  };
  for (int64_t residual : {0, 16}) {
    KVCache cache(options_of(2, 8, 16, residual, 0, 8, 8));
    for (int64_t batch : {1, 3, 2, 1}) {
      const at::Tensor k = make(batch, 600), v = -k;
      for (int64_t t = 0, i = 0; t < 600; i++) {
        const int64_t next = std::min<int64_t>(600, t + (i < 20 ? 4 : i % 40 + 1));
        append_range(cache, k, v, t, next);
        t = next;
        if (i % 5 != 0 && t < 600) continue;
        const auto [kd, vd] = cache.dequantize();
        // The stored zero is a float16: half a unit of 0.125. A swap of heads shows 10.
        ASSERT_LT(max_difference(kd, k.narrow(2, 0, t)), 0.08) << "batch " << batch << " length " << t;
        ASSERT_LT(max_difference(vd, v.narrow(2, 0, t)), 0.08) << "batch " << batch << " length " << t;
      }
      cache.reset();
      EXPECT_EQ(cache.length(), 0);
      EXPECT_EQ(cache.batch_size(), 0);
      EXPECT_EQ(cache.nbytes(), 0);
    }
  }
}

TEST(Cache, ResetForgetsBatchDtypeAndValues) {
  const CacheOptions o = options_of(2, 8, 16, 4, 2);
  KVCache cache(o);
  const at::Tensor big = at::full({2, 2, 80, 8}, 1e4);
  cache.append(big, big);
  cache.reset();
  const at::Tensor k = randn({3, 2, 50, 8}, 11, at::kHalf), v = randn({3, 2, 50, 8}, 12, at::kHalf);
  cache.append(k, v);
  KVCache fresh(o);
  fresh.append(k, v);
  EXPECT_TRUE(same_state(cache.state(), fresh.state()));
  EXPECT_LT(std::get<0>(cache.dequantize()).abs().max().item<float>(), 100.0f);
}

TEST(Cache, TwoCachesInterleavedShareNothing) {
  const CacheOptions first = options_of(2, 24, 16, 8, 4), second = options_of(1, 40, 32, 0, 0, 4, 3);
  const at::Tensor k1 = randn({2, 2, 100, 24}, 13), v1 = randn({2, 2, 100, 24}, 14);
  const at::Tensor k2 = randn({1, 1, 100, 40}, 15, at::kBFloat16), v2 = randn({1, 1, 100, 40}, 16, at::kBFloat16);
  KVCache a(first), b(second);
  for (int64_t t = 0; t < 100; t++) append_range(a, k1, v1, t, t + 1), append_range(b, k2, v2, t, t + 1);
  Model ma(first, 2, at::kFloat), mb(second, 1, at::kBFloat16);
  ma.append(k1, v1);
  mb.append(k2, v2);
  EXPECT_TRUE(ma.matches(a));
  EXPECT_TRUE(mb.matches(b));
}

// C17
TEST(Cache, AnyStridesEqualTheContiguousCopyAndInputsStay) {
  for (auto type : {at::kFloat, at::kHalf}) {
    const std::vector<std::pair<const char*, at::Tensor>> views = {
        {"[B, T, H, D]", randn({2, 50, 3, 16}, 17, type).transpose(1, 2)},
        {"every second channel", randn({2, 3, 50, 32}, 18, type).slice(3, 0, 32, 2)},
        {"offset", randn({2, 3, 60, 16}, 19, type).narrow(2, 5, 50)},
        {"expanded heads", randn({2, 1, 50, 16}, 20, type).expand({2, 3, 50, 16})},
        {"expanded batch", randn({1, 3, 50, 16}, 21, type).expand({2, 3, 50, 16})},
        {"expanded channels", randn({2, 3, 50, 1}, 22, type).expand({2, 3, 50, 16})},
        {"expanded tokens", randn({2, 3, 1, 16}, 23, type).expand({2, 3, 50, 16})},
        {"permuted", randn({16, 50, 3, 2}, 24, type).permute({3, 2, 1, 0})},
        {"part of a fused qkv", randn({2, 50, 9, 16}, 25, type).transpose(1, 2).narrow(1, 3, 3)},
        {"channels_last", randn({2, 3, 50, 16}, 26, type).contiguous(at::MemoryFormat::ChannelsLast)},
    };
    for (const auto& [what, view] : views) {
      const at::Tensor plain = view.contiguous().clone();
      KVCache strided(options_of(3, 16, 16, 8, 4)), contiguous(options_of(3, 16, 16, 8, 4));
      append_range(strided, view, view, 0, 45), append_range(strided, view, view, 45, 50);
      append_range(contiguous, plain, plain, 0, 45), append_range(contiguous, plain, plain, 45, 50);
      EXPECT_TRUE(same_state(strided.state(), contiguous.state())) << what;
      EXPECT_TRUE(same_bits(view, plain)) << what << " was changed";
    }
  }
}

// C19
TEST(Cache, EmptyInputs) {
  KVCache cache(options_of(2, 8, 16, 4, 2));
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.nbytes(), 0);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.lengths().numel(), 0);
  EXPECT_EQ(std::get<0>(cache.dequantize()).sizes(), at::IntArrayRef({0, 2, 0, 8}));
  cache.truncate(0);
  cache.truncate(5);
  cache.reset();
  EXPECT_TRUE(same_state(KVCache::from_state(cache.state())->state(), cache.state()));
  cache.append(at::empty({3, 2, 0, 8}), at::empty({3, 2, 0, 8}));
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(cache.batch_size(), 3);
  EXPECT_EQ(std::get<1>(cache.dequantize()).sizes(), at::IntArrayRef({3, 2, 0, 8}));
  expect_error([&] { cache.append(at::zeros({2, 2, 1, 8}), at::zeros({2, 2, 1, 8})); }, {"k", "batch size 2", "3"});
  EXPECT_TRUE(same_state(KVCache::from_state(cache.state())->state(), cache.state()));
  const at::Tensor k = randn({3, 2, 40, 8}, 27);
  cache.append(k, k);
  const auto before = cache.state();
  cache.append(k.narrow(2, 0, 0), k.narrow(2, 0, 0));
  EXPECT_TRUE(same_state(cache.state(), before));

  KVCache no_rows(options_of(2, 8, 16, 4, 2));
  no_rows.append(at::empty({0, 2, 8, 8}), at::empty({0, 2, 8, 8}));
  EXPECT_EQ(no_rows.length(), 0);
  EXPECT_EQ(no_rows.attend(at::empty({0, 4, 1, 8})).sizes(), at::IntArrayRef({0, 4, 1, 8}));
}

// ---------------------------------------------------------------------------------------------- ragged rows

TEST(Cache, RaggedRowsEqualRowsOfTheirOwnAndPaddingIsNeverRead) {
  for (auto type : {at::kFloat, at::kBFloat16}) {
    const CacheOptions o = options_of(2, 20, 16, 8, 3);
    KVCache cache(o);
    std::vector<std::unique_ptr<KVCache>> alone;
    Model model(o, 4, type);
    for (int b = 0; b < 4; b++) alone.push_back(std::make_unique<KVCache>(o));
    std::mt19937 rng(5);
    for (int step = 0; step < 60; step++) {
      const int64_t width = step == 0 ? 50 : static_cast<int64_t>(rng() % 9) + 1;
      at::Tensor k = randn({4, 2, width, 20}, rng(), type), v = randn({4, 2, width, 20}, rng(), type);
      std::vector<int64_t> counts;
      for (int64_t b = 0; b < 4; b++) {
        const int64_t count = static_cast<int64_t>(rng() % static_cast<uint64_t>(width + 1));
        counts.push_back(count);
        k[b].narrow(1, count, width - count).fill_(step % 2 == 0 ? kNan : kInf);
        v[b].narrow(1, count, width - count).fill_(kNan);
        alone[static_cast<size_t>(b)]->append(k.narrow(0, b, 1).narrow(2, 0, count),
                                              v.narrow(0, b, 1).narrow(2, 0, count));
      }
      cache.append(k, v, longs(counts));
      model.append(k, v, counts);
      ASSERT_TRUE(model.matches(cache)) << "step " << step;
      const auto [kd, vd] = cache.dequantize();
      ASSERT_TRUE(kd.isfinite().all().item<bool>() && vd.isfinite().all().item<bool>());
      for (int64_t b = 0; b < 4; b++) {
        const KVCache& row = *alone[static_cast<size_t>(b)];
        const int64_t n = row.length();
        ASSERT_EQ(cache.lengths()[b].item<int64_t>(), n);
        ASSERT_TRUE(same_bits(kd[b].narrow(1, 0, n), std::get<0>(row.dequantize())[0]));
        ASSERT_TRUE(same_bits(vd[b].narrow(1, 0, n), std::get<1>(row.dequantize())[0]));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- truncate and rows

// C12
TEST(Cache, TruncateToEveryLengthThenGoOn) {
  for (int64_t sink : {0, 4}) {
    for (int64_t residual : {0, 5, 16}) {
      const CacheOptions o = options_of(2, 8, 16, residual, sink, 2, 4);
      const at::Tensor k = randn({2, 2, 75, 8}, 31), v = randn({2, 2, 75, 8}, 32);
      const at::Tensor more_k = randn({2, 2, 40, 8}, 33), more_v = randn({2, 2, 40, 8}, 34);
      for (int64_t n = 0; n <= 76; n++) {
        KVCache cache(o);
        Model model(o, 2, at::kFloat);
        cache.append(k, v);
        model.append(k, v);
        const auto [k_before, v_before] = cache.dequantize();
        cache.truncate(n);
        model.truncate(n);
        ASSERT_EQ(cache.length(), std::min<int64_t>(n, 75));
        const auto [kd, vd] = cache.dequantize();
        ASSERT_TRUE(same_bits(kd, k_before.narrow(2, 0, cache.length()))) << "keys kept by " << n;
        ASSERT_TRUE(same_bits(vd, v_before.narrow(2, 0, cache.length()))) << "values kept by " << n;
        ASSERT_TRUE(model.matches(cache)) << n;
        for (int64_t t = 0; t < 40; t += 1 + n % 3 * 6) {
          const int64_t last = std::min<int64_t>(40, t + 1 + n % 3 * 6);
          append_range(cache, more_k, more_v, t, last);
          model.append(more_k.narrow(2, t, last - t), more_v.narrow(2, t, last - t));
        }
        ASSERT_TRUE(model.matches(cache)) << "after going on from " << n;
      }
    }
  }
  KVCache cache(options_of(1, 8, 16, 0, 0));
  expect_error([&] { cache.truncate(-1); }, {"n must not be negative", "-1"});
}

TEST(Cache, TruncateOfRaggedRowsCutsTheLongerOnesOnly) {
  const CacheOptions o = options_of(1, 8, 16, 0, 2);
  const at::Tensor k = randn({3, 1, 60, 8}, 35), v = randn({3, 1, 60, 8}, 36);
  KVCache cache(o);
  Model model(o, 3, at::kFloat);
  cache.append(k, v, longs({60, 10, 41}));
  model.append(k, v, {60, 10, 41});
  cache.truncate(40);
  model.truncate(40);
  EXPECT_TRUE(at::equal(cache.lengths(), longs({40, 10, 40})));
  EXPECT_TRUE(model.matches(cache));
}

TEST(Cache, RolledBackDraftsLeaveTheSameBits) {
  const CacheOptions o = options_of(2, 16, 16, 32, 4);
  const at::Tensor k = randn({1, 2, 200, 16}, 37), v = randn({1, 2, 200, 16}, 38);
  const at::Tensor draft = randn({1, 2, 5, 16}, 39);
  KVCache cache(o), plain(o);
  append_range(cache, k, v, 0, 100);
  append_range(plain, k, v, 0, 100);
  int64_t equal = 0;
  for (int64_t t = 100; t < 200; t++) {
    const bool flushes = plain.quantized_length() != std::max<int64_t>(0, t + 5 - 36) / 16 * 16;
    cache.append(draft, draft);
    cache.truncate(t);
    if (!flushes) {
      ASSERT_TRUE(same_state(cache.state(), plain.state())) << t;
      equal++;
    } else {
      // The draft pushed a group of accepted tokens out of the window: it stays quantised, as a token is quantised
      // once.
      ASSERT_EQ(cache.length(), t);
    }
    append_range(cache, k, v, t, t + 1);
    append_range(plain, k, v, t, t + 1);
  }
  EXPECT_GT(equal, 60);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
}

TEST(Cache, PagesAreReusedAfterTruncate) {
  const at::Tensor k = randn({1, 1, 1500, 16}, 40);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k, k);
  const int64_t bytes = cache.nbytes();
  for (int64_t n : {0, 700, 129, 1499}) {
    cache.truncate(n);
    append_range(cache, k, k, n, 1500);
    EXPECT_EQ(cache.nbytes(), bytes) << n;
  }
}

TEST(Cache, TruncatedPagesServeOtherRows) {
  const at::Tensor k = randn({2, 1, 2048, 16}, 48);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k.narrow(2, 0, 1024), k.narrow(2, 0, 1024));
  const int64_t bytes = cache.nbytes();
  cache.truncate(0);
  cache.append(k, k, longs({2048, 0}));
  // Row 0 needs the pages of both; only the block table may grow.
  EXPECT_LE(cache.nbytes(), bytes + 256);
}

TEST(Cache, RowsShareTheirPagesUntilTheyDiffer) {
  for (int64_t prompt : {40, 133, 300}) {  // the last page partly filled, just begun, and several pages
    const CacheOptions o = options_of(2, 16, 16, 5, 4);
    const at::Tensor k = randn({2, 2, prompt, 16}, 41), v = randn({2, 2, prompt, 16}, 42);
    KVCache cache(o);
    Model model(o, 2, at::kFloat);
    cache.append(k, v);
    model.append(k, v);
    const int64_t pool_bytes = cache_page_bytes(cache_format(2, 16, std::nullopt, 2, 2, 16, 5, 4));
    const int64_t pages = (cache.quantized_length() + 127) / 128 * 2;
    const int64_t rest = cache.nbytes() - pages * pool_bytes;
    cache.repeat_interleave(3);
    model.select({0, 0, 0, 1, 1, 1});
    ASSERT_TRUE(model.matches(cache));
    EXPECT_LE(cache.nbytes(), pages * pool_bytes + 3 * rest) << "repeating copied pages";
    std::mt19937 rng(7);
    for (int step = 0; step < 120; step++) {
      const at::Tensor kn = randn({6, 2, 1, 16}, rng()), vn = randn({6, 2, 1, 16}, rng());
      cache.append(kn, vn);
      model.append(kn, vn);
      if (step % 10 == 3) {
        std::vector<int64_t> rows;
        for (int i = 0; i < 6; i++) rows.push_back(static_cast<int64_t>(rng() % 6));
        cache.reorder(longs(rows));
        model.select(rows);
      }
      ASSERT_TRUE(model.matches(cache)) << "step " << step;
    }
    cache.select(longs({4}));
    model.select({4});
    ASSERT_TRUE(model.matches(cache));
  }
}

TEST(Cache, PagesThatNoRowNamesAreReused) {
  const at::Tensor k = randn({4, 1, 512, 16}, 43);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k, k);
  cache.select(longs({2}));
  const int64_t bytes = cache.nbytes();
  // Three rows' pages are free: room for 1536 more tokens.
  const at::Tensor more = randn({1, 1, 1536, 16}, 44);
  cache.append(more, more);
  EXPECT_LE(cache.nbytes(), bytes + 64) << "the pool grew although it had free pages";
  EXPECT_TRUE(same_bits(std::get<0>(cache.dequantize()).narrow(2, 0, 0), k.narrow(0, 0, 1).narrow(2, 0, 0)));
}

// Any sequence of calls against the model.
TEST(Cache, RandomSequencesOfCallsMatchTheModel) {
  for (uint32_t seed = 0; seed < 24; seed++) {
    std::mt19937 rng(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
    const int64_t groups[] = {16, 32, 64, 128}, residuals[] = {0, 1, 15, 32, 128};
    CacheOptions o = options_of(1 + below(3), 1 + below(24), groups[below(4)], residuals[below(5)], below(2) * 4,
                                kAllBits[static_cast<size_t>(below(5))], kAllBits[static_cast<size_t>(below(5))]);
    o.value_head_dim = 1 + below(40);
    const auto type = seed % 3 == 0 ? at::kFloat : seed % 3 == 1 ? at::kHalf : at::kBFloat16;
    int64_t batch = 1 + below(3);
    auto cache = c10::make_intrusive<KVCache>(o);
    Model model(o, batch, type);
    for (int step = 0; step < 80; step++) {
      const int64_t what = below(10);
      std::string did = "append";
      if (what < 6 || cache->batch_size() == 0) {
        const int64_t count = what < 3 ? 1 : below(what < 5 ? 20 : 150);
        const at::Tensor k = randn({batch, o.num_kv_heads, count, o.head_dim}, rng(), type);
        const at::Tensor v = randn({batch, o.num_kv_heads, count, *o.value_head_dim}, rng(), type);
        std::vector<int64_t> counts;
        for (int64_t b = 0; b < batch; b++) counts.push_back(below(4) == 0 ? below(count + 1) : count);
        if (below(2) == 0) counts.clear();
        cache->append(k, v, counts.empty() ? std::optional<at::Tensor>() : longs(counts));
        model.append(k, v, counts);
      } else if (what == 6) {
        const int64_t n = below(cache->length() + 2);
        did = "truncate " + std::to_string(n);
        cache->truncate(n);
        model.truncate(n);
      } else if (what == 7) {
        std::vector<int64_t> rows;
        const int64_t count = below(3) == 0 ? 1 + below(4) : batch;
        for (int64_t i = 0; i < count; i++) rows.push_back(below(batch));
        did = "select";
        cache->select(longs(rows));
        model.select(rows);
        batch = count;
      } else if (what == 8) {
        did = "clone";
        const auto old = cache;
        cache = old->clone();
        const at::Tensor k = randn({batch, o.num_kv_heads, 40, o.head_dim}, rng(), type);
        const at::Tensor v = randn({batch, o.num_kv_heads, 40, *o.value_head_dim}, rng(), type);
        old->append(k, v);  // must not show in the clone
        old->truncate(3);
      } else {
        did = "save and load";
        cache = KVCache::from_state(cache->state());
      }
      ASSERT_TRUE(model.matches(*cache)) << "seed " << seed << " step " << step << " after " << did;
    }
  }
}

TEST(Cache, CloneSharesNothing) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 200, 16}, 45), v = randn({2, 2, 200, 16}, 46);
  KVCache cache(o);
  append_range(cache, k, v, 0, 150);
  const auto copy = cache.clone();
  const auto before = copy->state();
  EXPECT_TRUE(same_state(before, cache.state()));
  append_range(cache, k, v, 150, 200);
  EXPECT_TRUE(same_state(copy->state(), before));
  const auto grown = cache.state();
  copy->truncate(10);
  copy->append(-k, -v);
  EXPECT_TRUE(same_state(cache.state(), grown));
  EXPECT_EQ(copy->options().group_size, 16);
}

TEST(Cache, ReserveMakesRoomOnce) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 2000, 16}, 47);
  KVCache cache(o), plain(o);
  expect_error([&] { cache.reserve(100); }, {"reserve"});
  append_range(cache, k, k, 0, 1);
  append_range(plain, k, k, 0, 1);
  cache.reserve(2000);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  const int64_t bytes = cache.nbytes();
  {
    const Watched memory;
    for (int64_t t = 1; t < 2000; t++) append_range(cache, k, k, t, t + 1);
    EXPECT_EQ(memory->allocated, 0) << "an append allocated although there was room";
  }
  EXPECT_EQ(cache.nbytes(), bytes);
  append_range(plain, k, k, 1, 2000);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  cache.reserve(5);
  EXPECT_EQ(cache.nbytes(), bytes);
  expect_error([&] { cache.reserve(-1); }, {"tokens", "-1"});
}

// ---------------------------------------------------------------------------------------------- float16's range

// The definition where scale and zero are stored as float16 if they fit and as float32 if they do not.
at::Tensor widened(const at::Tensor& x, int64_t dim, int64_t bits) {
  const double levels = static_cast<double>((int64_t{1} << bits) - 1);
  const at::Tensor lo = x.amin(dim, true), hi = x.amax(dim, true);
  const auto stored = [](const at::Tensor& t) {
    const at::Tensor half = t.to(at::kHalf).to(at::kFloat);
    return at::where(half.isinf(), t, half);
  };
  const at::Tensor scale = stored((hi - lo) / levels), zero = stored(lo);
  return zero + at::round((x - zero) / scale).clamp(0, levels) * scale;
}

TEST(Cache, DataBeyondFloat16sRangeWidensTheScales) {
  struct Case {
    at::ScalarType type;
    double size;
    int64_t bits;
  };
  for (const Case& c :
       {Case{at::kFloat, 1e6, 2}, {at::kBFloat16, 1e6, 4}, {at::kHalf, 60000, 1}, {at::kFloat, 1e30, 8}}) {
    const CacheOptions o = options_of(2, 16, 16, 5, 4, c.bits, c.bits);
    at::Tensor k = randn({2, 2, 140, 16}, 51).clamp(-1, 1), v = randn({2, 2, 140, 16}, 52).clamp(-1, 1);
    // The first groups fit float16; then a few do not, then most fit again. One head of one row only.
    k[1][1].narrow(0, 50, 20).mul_(c.size);
    v[1][1].narrow(0, 60, 4).mul_(c.size);
    k = k.to(c.type), v = v.to(c.type);
    KVCache once(o), streamed(o), chunked(o);
    once.append(k, v);
    for (int64_t t = 0; t < 140; t++) append_range(streamed, k, v, t, t + 1);
    for (int64_t t = 0; t < 140; t += 35) append_range(chunked, k, v, t, t + 35);
    EXPECT_EQ(once.format().scale_type, ScaleType::kWidened);
    ASSERT_TRUE(same_state(streamed.state(), once.state())) << c.type;
    ASSERT_TRUE(same_state(chunked.state(), once.state())) << c.type;
    const auto [kd, vd] = once.dequantize();
    ASSERT_TRUE(kd.isfinite().all().item<bool>() && vd.isfinite().all().item<bool>());
    const int64_t m = once.quantized_length();
    const at::Tensor kf = k.narrow(2, 4, m).to(at::kFloat), vf = v.narrow(2, 4, m).to(at::kFloat);
    const at::Tensor want_k = widened(kf.unflatten(2, {m / 16, 16}), 3, c.bits).reshape(kf.sizes());
    EXPECT_TRUE(same_bits(kd.narrow(2, 4, m), given_back(want_k, c.type))) << c.type << " " << c.size;
    EXPECT_TRUE(same_bits(vd.narrow(2, 4, m), given_back(widened(vf, 3, c.bits), c.type))) << c.type << " " << c.size;
    // It survives saving, and going on; reset starts with float16 again.
    const auto loaded = KVCache::from_state(once.state());
    EXPECT_TRUE(same_state(loaded->state(), once.state()));
    loaded->append(k, v);
    once.append(k, v);
    EXPECT_TRUE(same_state(loaded->state(), once.state()));
    once.reset();
    EXPECT_EQ(once.format().scale_type, ScaleType::kFloat16);
  }
}

TEST(Cache, WideningKeepsRowsThatSharePages) {
  const CacheOptions o = options_of(1, 8, 16, 0, 0);
  const at::Tensor k = randn({1, 1, 40, 8}, 53);
  KVCache cache(o);
  cache.append(k, k);
  const auto [before, unused] = cache.dequantize();
  cache.repeat_interleave(2);
  const at::Tensor more = randn({2, 1, 40, 8}, 54);
  more[1].mul_(1e6);
  cache.append(more, more);
  const auto [kd, vd] = cache.dequantize();
  EXPECT_TRUE(same_bits(kd[0].narrow(1, 0, 32), before[0].narrow(1, 0, 32)));
  EXPECT_TRUE(same_bits(kd[1].narrow(1, 0, 32), before[0].narrow(1, 0, 32)));
  EXPECT_TRUE(kd.isfinite().all().item<bool>());
}

TEST(Cache, Float32Scales) {
  CacheOptions o = options_of(2, 24, 16, 5, 4, 3, 2);
  o.scale_dtype = "float32";
  const at::Tensor k = randn({1, 2, 100, 24}, 55), v = randn({1, 2, 100, 24}, 56) * 1e6;
  KVCache cache(o), streamed(o);
  cache.append(k, v);
  for (int64_t t = 0; t < 100; t++) append_range(streamed, k, v, t, t + 1);
  EXPECT_TRUE(same_state(cache.state(), streamed.state()));
  EXPECT_EQ(cache.format().scale_type, ScaleType::kFloat32);
  const int64_t m = cache.quantized_length();
  const auto [kd, vd] = cache.dequantize();
  EXPECT_TRUE(same_bits(kd.narrow(2, 4, m), definition_keys(k.narrow(2, 4, m), 3, 16, false)));
  EXPECT_TRUE(same_bits(vd.narrow(2, 4, m), definition_values(v.narrow(2, 4, m), 2, 16, false)));
}

TEST(Cache, RangeSearchIsNeverWorseAndStreamsAlike) {
  CacheOptions o = options_of(2, 32, 32, 0, 0);
  const at::Tensor k = randn({1, 2, 128, 32}, 57), v = randn({1, 2, 128, 32}, 58);
  KVCache plain(o);
  o.range_search = true;
  KVCache searched(o), streamed(o);
  plain.append(k, v);
  searched.append(k, v);
  for (int64_t t = 0; t < 128; t++) append_range(streamed, k, v, t, t + 1);
  EXPECT_TRUE(same_state(searched.state(), streamed.state()));
  const auto errors = [&](const KVCache& c) {
    const auto [kd, vd] = c.dequantize();
    return std::pair((kd - k).square().unflatten(2, {4, 32}).sum(3), (vd - v).square().sum(3));
  };
  const auto [k_plain, v_plain] = errors(plain);
  const auto [k_searched, v_searched] = errors(searched);
  EXPECT_TRUE((k_searched <= k_plain * 1.00001).all().item<bool>());
  EXPECT_TRUE((v_searched <= v_plain * 1.00001).all().item<bool>());
  EXPECT_LT(k_searched.sum().item<float>(), 0.95f * k_plain.sum().item<float>());
}

// ---------------------------------------------------------------------------------------------- memory

// C16
TEST(Cache, BytesPerTokenAreTheRecordsAndNothingElse) {
  struct Row {
    int64_t k_bits, v_bits, bytes;
  };
  for (const Row& row : {Row{2, 2, 96}, {4, 2, 128}, {4, 4, 160}, {1, 1, 64}, {3, 3, 128}, {8, 8, 288}}) {
    const CacheOptions o = options_of(8, 128, 32, 128, 0, row.k_bits, row.v_bits);
    const auto bytes_at = [&](int64_t tokens) {
      KVCache cache(o);
      const at::Tensor x = at::zeros({1, 8, tokens, 128}, at::kHalf);
      cache.append(x, x);
      return cache.nbytes();
    };
    // Page by page: 128 tokens and one entry of the table.
    EXPECT_EQ(bytes_at(128 + 640) - bytes_at(128 + 512), 128 * 8 * row.bytes + 4) << row.k_bits << " " << row.v_bits;
    // 896 quantised tokens and the exact window of R + G slots; the rest is 8-byte lengths, the table and a flag.
    EXPECT_EQ(bytes_at(1024), 896 * 8 * row.bytes + 160 * 8 * 512 + 7 * 4 + 8 + 8 + 4);
  }
}

TEST(Cache, NbytesIsWhatIsAllocatedAndThePromptIsReleased) {
  for (auto type : {at::kFloat, at::kHalf}) {
    const Watched memory;
    KVCache cache(options_of(4, 64, 32, 64, 4));
    at::Tensor prompt = at::zeros({2, 4, 3000, 192}, type);
    cache.append(prompt.narrow(3, 0, 64), prompt.narrow(3, 64, 64));
    EXPECT_EQ(prompt.storage().use_count(), 1u);
    prompt = at::Tensor();
    EXPECT_EQ(memory->live, cache.nbytes());
    for (int i = 0; i < 200; i++) {
      const at::Tensor x = at::zeros({2, 4, 1, 64}, type);
      cache.append(x, x);
    }
    EXPECT_EQ(memory->live, cache.nbytes());
    cache.repeat_interleave(2);
    EXPECT_EQ(memory->live, cache.nbytes());
    cache.truncate(100);
    cache.select(longs({3, 0}));
    EXPECT_EQ(memory->live, cache.nbytes());
    const auto copy = cache.clone();
    EXPECT_EQ(memory->live, cache.nbytes() + copy->nbytes());
    cache.reset();
    EXPECT_EQ(memory->live, copy->nbytes());
  }
}

TEST(Cache, NbytesAfter1000TokensIsBelowAThirdOfHalf) {
  const at::Tensor x = randn({1, 8, 1000, 128}, 61, at::kHalf);
  KVCache cache(options_of(8, 128, 32, 32, 4));
  for (int64_t t = 0; t < 1000; t += 10) append_range(cache, x, x, t, t + 10);
  EXPECT_LT(static_cast<double>(cache.nbytes()), 0.35 * 1000 * 8 * 512);
}

TEST(Cache, GrowthCopiesNothingPerStep) {
  KVCache cache(options_of(2, 32, 16, 16, 4));
  const at::Tensor x = randn({1, 2, 1, 32}, 62);
  const Watched memory;
  int64_t steps_that_allocate = 0;
  for (int i = 0; i < 8000; i++) {
    const int64_t calls = memory->calls;
    cache.append(x, x);
    steps_that_allocate += memory->calls != calls;
  }
  EXPECT_LT(steps_that_allocate, 60);
  EXPECT_LT(memory->allocated, 8 * cache.nbytes());
}

TEST(Cache, ADecodeStepAllocatesItsOutputAndNoCopyOfTheCache) {
  KVCache cache(options_of(8, 128, 32, 128, 4));
  const at::Tensor prompt = randn({1, 8, 4096, 128}, 63, at::kHalf);
  cache.append(prompt, prompt);
  const at::Tensor q = randn({1, 32, 1, 128}, 64), x = randn({1, 8, 1, 128}, 65, at::kHalf);
  for (int i = 0; i < 2; i++) {
    const Watched memory;
    cache.forward(q, x, x);
    EXPECT_LE(memory->largest, 2 * 32 * 128 * 4);
  }
}

// ---------------------------------------------------------------------------------------------- modes and threads

// C20
TEST(Cache, WorksAcrossInferenceModeAndNoGrad) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 200, 16}, 71), v = randn({2, 2, 200, 16}, 72);
  const auto steps = [&](KVCache& cache, int which) {
    switch (which) {
      case 0:
        append_range(cache, k, v, 0, 100);
        break;
      case 1:
        append_range(cache, k, v, 100, 190);
        break;
      case 2:
        cache.truncate(120);
        break;
      case 3:
        cache.reorder(longs({1, 0}));
        break;
      case 4:
        append_range(cache, k, v, 120, 170);
        break;
      case 5:
        cache.repeat_interleave(2);
        break;
      default:
        cache.append(k.repeat({2, 1, 1, 1}), v.repeat({2, 1, 1, 1}));
        break;
    }
  };
  KVCache plain(o);
  for (int i = 0; i < 7; i++) steps(plain, i);
  for (int modes = 0; modes < 128; modes += 3) {  // which of the steps run in inference mode
    KVCache cache(o);
    for (int i = 0; i < 7; i++) {
      const c10::InferenceMode mode((modes >> i & 1) != 0);
      steps(cache, i);
    }
    ASSERT_TRUE(same_state(cache.state(), plain.state())) << modes;
  }
  KVCache no_grad(o);
  for (int i = 0; i < 7; i++) {
    const at::NoGradGuard guard;
    steps(no_grad, i);
  }
  EXPECT_TRUE(same_state(no_grad.state(), plain.state()));
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = k.clone();
  }
  KVCache fed(o), want(o);
  fed.append(inference, inference);
  want.append(k, k);
  EXPECT_TRUE(same_state(fed.state(), want.state()));
}

TEST(Cache, RequiresGradIsDetachedAndBackwardRaises) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 100, 16}, 73).requires_grad_(), v = randn({1, 2, 100, 16}, 74).requires_grad_();
  const at::Tensor q = randn({1, 4, 1, 16}, 75).requires_grad_();
  KVCache cache(o), plain(o);
  cache.append(k, v);
  plain.append(k.detach(), v.detach());
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  const KVCache::State held = cache.state();
  for (const at::Tensor& t : std::get<2>(held)) {
    EXPECT_FALSE(t.requires_grad());
    EXPECT_FALSE(t.grad_fn());
  }
  EXPECT_EQ(k.use_count(), 1u);
  const at::Tensor out = cache.attend(q);
  EXPECT_TRUE(same_bits(out, plain.attend(q.detach())));
  expect_error([&] { out.sum().backward(); }, {"kivi::cache_attention"});
  const at::Tensor step = cache.forward(q, k.narrow(2, 0, 1), v.narrow(2, 0, 1));
  expect_error([&] { step.sum().backward(); }, {"kivi::cache_attention"});
  EXPECT_FALSE(q.grad().defined());
  EXPECT_FALSE(k.grad().defined());
}

// C21 b
TEST(Cache, DefaultDtypeChangesNothing) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 100, 16}, 76), v = randn({1, 2, 100, 16}, 77), q = randn({1, 4, 1, 16}, 78);
  KVCache plain(o);
  plain.append(k, v);
  for (auto type : {at::kDouble, at::kHalf}) {
    const DefaultDtype guard(type);
    KVCache cache(o);
    for (int64_t t = 0; t < 100; t++) append_range(cache, k, v, t, t + 1);
    EXPECT_TRUE(same_state(cache.state(), plain.state()));
    EXPECT_TRUE(same_bits(cache.attend(q), plain.attend(q)));
    EXPECT_TRUE(same_state(KVCache::from_state(cache.state())->state(), plain.state()));
  }
}

// C25
TEST(Cache, ThreadCountChangesNothing) {
  const CacheOptions o = options_of(6, 40, 32, 32, 4);
  const at::Tensor k = randn({2, 6, 1000, 40}, 79), v = randn({2, 6, 1000, 40}, 80);
  std::optional<KVCache::State> want;
  for (int count : {1, 2, 3, 8}) {
    const Threads guard(count);
    KVCache cache(o);
    append_range(cache, k, v, 0, 900), append_range(cache, k, v, 900, 1000);
    if (!want) want = cache.state();
    EXPECT_TRUE(same_state(cache.state(), *want)) << count << " threads";
  }
}

TEST(Cache, EachThreadItsOwnCache) {
  const CacheOptions o = options_of(2, 16, 16, 8, 4);
  const auto run = [&](uint64_t seed) {
    KVCache cache(o);
    for (uint64_t i = 0; i < 200; i++) {
      const at::Tensor x = randn({1, 2, 1, 16}, seed * 1000 + i);
      cache.forward(randn({1, 4, 1, 16}, i), x, x);
    }
    return cache.state();
  };
  std::vector<KVCache::State> got(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 8; i++) threads.emplace_back([&, i] { got[i] = run(i); });
  for (std::thread& t : threads) t.join();
  for (size_t i = 0; i < 8; i++) EXPECT_TRUE(same_state(got[i], run(i))) << i;
}

// C18: a batch stride of more than 2^31 elements; only the pages of the two rows are ever touched.
TEST(Cache, StridesBeyond31Bits) {
  const int64_t stride = (int64_t{1} << 31) + 64;
  KVCache far_away(options_of(1, 64, 32, 0, 0)), near_by(options_of(1, 64, 32, 0, 0));
  const at::Tensor big = at::empty({stride + 64 * 64}, at::kHalf);  // 4 GB of address space
  const at::Tensor x = big.as_strided({2, 1, 64, 64}, {stride, 64 * 64, 64, 1});
  x.copy_(randn({2, 1, 64, 64}, 81));
  far_away.append(x, x);
  near_by.append(x.contiguous(), x.contiguous());
  EXPECT_TRUE(same_state(far_away.state(), near_by.state()));
}

// ---------------------------------------------------------------------------------------------- saved form

// C22
TEST(State, RoundTripAndTenMoreTokens) {
  for (int64_t k_bits : kAllBits) {
    for (int64_t v_bits : {2, 3}) {
      const CacheOptions o = options_of(2, 12, 16, 8, 4, k_bits, v_bits);
      for (int64_t tokens : {0, 1, 4, 5, 7, 8, 9, 27, 28, 29, 37, 170}) {
        const at::Tensor k = randn({2, 2, tokens + 10, 12}, 82), v = randn({2, 2, tokens + 10, 12}, 83);
        KVCache cache(o);
        append_range(cache, k, v, 0, tokens);
        const auto loaded = KVCache::from_state(cache.state());
        ASSERT_TRUE(same_state(loaded->state(), cache.state())) << tokens;
        ASSERT_EQ(loaded->length(), tokens);
        for (int64_t t = tokens; t < tokens + 10; t++) {
          append_range(cache, k, v, t, t + 1);
          append_range(*loaded, k, v, t, t + 1);
        }
        ASSERT_TRUE(same_state(loaded->state(), cache.state())) << tokens;
        ASSERT_TRUE(same_bits(std::get<0>(loaded->dequantize()), std::get<0>(cache.dequantize())));
      }
    }
  }
}

TEST(State, RoundTripAfterReorderTruncateAndRaggedRows) {
  CacheOptions o = options_of(2, 12, 16, 8, 4);
  o.precision = "exact";
  o.range_search = true;
  o.value_head_dim = 20;
  const at::Tensor k = randn({3, 2, 300, 12}, 84, at::kHalf), v = randn({3, 2, 300, 20}, 85, at::kHalf);
  KVCache cache(o);
  cache.append(k, v, longs({300, 17, 150}));
  cache.select(longs({0, 2, 2, 1, 0}));
  cache.truncate(141);
  const at::Tensor kn = randn({5, 2, 9, 12}, 86, at::kHalf), vn = randn({5, 2, 9, 20}, 87, at::kHalf);
  cache.append(kn, vn, longs({9, 1, 0, 3, 9}));
  const auto loaded = KVCache::from_state(cache.state());
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
  EXPECT_EQ(loaded->options().precision, "exact");
  EXPECT_TRUE(loaded->options().range_search);
  for (int i = 0; i < 40; i++) {
    cache.append(kn.narrow(2, i % 9, 1), vn.narrow(2, i % 9, 1));
    loaded->append(kn.narrow(2, i % 9, 1), vn.narrow(2, i % 9, 1));
  }
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
}

TEST(State, HoldsWhatIsHeldAndSharesNothing) {
  const at::Tensor k = randn({1, 2, 2000, 32}, 88);
  KVCache cache(options_of(2, 32, 32, 32, 4));
  for (int64_t t = 0; t < 2000; t += 100) append_range(cache, k, k, t, t + 100);
  cache.truncate(300);
  const auto state = cache.state();
  int64_t bytes = 0;
  for (const at::Tensor& t : std::get<2>(state)) bytes += static_cast<int64_t>(t.storage().nbytes());
  EXPECT_LT(bytes, cache.nbytes() / 3);
  const auto loaded = KVCache::from_state(state);
  for (const at::Tensor& t : std::get<2>(state)) t.zero_();
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
}

// Sizes that no other bit width shares.
KVCache::State sample_state() {
  CacheOptions o = options_of(2, 64, 32, 8, 4);
  o.value_head_dim = 48;
  KVCache cache(o);
  cache.append(randn({1, 2, 175, 64}, 89), randn({1, 2, 175, 48}, 90));
  return cache.state();
}

TEST(State, TamperedTensorsAreRefused) {
  const KVCache::State good = sample_state();
  ASSERT_TRUE(same_state(KVCache::from_state(good)->state(), good));
  const size_t count = std::get<2>(good).size();
  ASSERT_EQ(count, 6u);
  for (size_t i = 0; i < count; i++) {
    const at::Tensor t = std::get<2>(good)[i];
    std::vector<at::Tensor> wrong = {at::Tensor(),
                                     t.to(at::kDouble),
                                     t.to(t.scalar_type() == at::kInt ? at::kLong : at::kShort),
                                     t.narrow(0, 0, 0),
                                     at::cat({t, t}, 0),
                                     t.unsqueeze(0),
                                     t.flatten(),
                                     t.narrow(t.dim() - 1, 0, t.size(-1) - 1),
                                     at::empty(t.sizes(), t.options().device(at::kMeta))};
    for (size_t w = 0; w < wrong.size(); w++) {
      KVCache::State bad = good;
      std::get<2>(bad)[i] = wrong[w];
      SCOPED_TRACE("tensor " + std::to_string(i) + ", change " + std::to_string(w));
      expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache"});
    }
    KVCache::State strided = good;
    std::get<2>(strided)[i] = t.transpose(0, t.dim() - 1).contiguous().transpose(0, t.dim() - 1);
    EXPECT_TRUE(same_state(KVCache::from_state(strided)->state(), good)) << "strides of tensor " << i;
  }
  for (size_t keep = 0; keep < count; keep++) {
    KVCache::State bad = good;
    std::get<2>(bad).resize(keep);
    expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache", "tensors"});
  }
  KVCache::State bad = good;
  std::get<2>(bad).push_back(at::zeros({1}));
  expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache", "tensors"});
  for (int32_t page : {-1, 2, 1 << 30}) {
    bad = good;
    std::get<2>(bad)[1] = std::get<2>(good)[1].clone();
    std::get<2>(bad)[1][0][1] = page;
    expect_error([&] { KVCache::from_state(bad); }, {"block_table", std::to_string(page)});
  }
}

TEST(State, TamperedIntegersAreRefused) {
  const KVCache::State good = sample_state();
  const auto& ints = std::get<1>(good);
  ASSERT_EQ(ints.size(), 17u);
  for (size_t i = 0; i < ints.size(); i++) {
    for (int64_t value : {ints[i] + 1, ints[i] - 1, ints[i] + 16, ints[i] * 2 + 3, int64_t{-1000}, int64_t{1} << 62,
                          std::numeric_limits<int64_t>::min()}) {
      if (i == 11 && value > 0 && value < 1000) continue;   // residual_length: another one fits the same tokens
      if (i == 14 && (value == 0 || value == 1)) continue;  // range_search: about groups to come
      if (i == 1 && (value == 0 || value == 1)) continue;   // precision
      KVCache::State bad = good;
      std::get<1>(bad)[i] = value;
      SCOPED_TRACE("integer " + std::to_string(i) + " is " + std::to_string(value));
      expect_error([&] { KVCache::from_state(bad); }, {});
    }
  }
  for (size_t keep = 0; keep < ints.size(); keep++) {
    KVCache::State bad = good;
    std::get<1>(bad).resize(keep);
    expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache"});
  }
  KVCache::State bad = good;
  std::get<0>(bad) = "another class";
  expect_error([&] { KVCache::from_state(bad); }, {"another class", "kivi.KVCache"});
  bad = good;
  std::get<1>(bad)[0] = 2;
  expect_error([&] { KVCache::from_state(bad); }, {"version", "2", "1"});
}

}  // namespace
}  // namespace kivi::test
