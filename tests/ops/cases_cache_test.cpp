// The cases C02 to C05, C08 to C10, C12, C15, C16, C18 and C19 for what kivi::KVCache holds: the inputs of the
// case, scaled to a group of 16 tokens, the smallest, then others of the same kind. What attention makes of it is in
// cases_attention_test.cpp. Left out: what a case says about CUDA.
#include <c10/util/ThreadLocalDebugInfo.h>

#include <random>

#include "tests/ops/cases.h"

namespace kivi::test {
namespace {

std::tuple<at::Tensor, at::Tensor> held(const CacheOptions& o, const at::Tensor& k, const at::Tensor& v) {
  KVCache cache(o);
  cache.append(k, v);
  EXPECT_EQ(cache.quantized_length(), k.size(2));
  return cache.dequantize();
}

// x [1, H, n, D] as keys and as values of a cache that quantises every token.
void expect_held_within_tolerance(const at::Tensor& x, int64_t bits, const std::string& what) {
  const CacheOptions o = case_options(x.size(1), x.size(3), 16, 0, 0, bits, bits);
  const auto [k, v] = held(o, x, x);
  const auto groups = [](const at::Tensor& t, int64_t dim) { return t.unflatten(dim, {t.size(dim) / 16, 16}); };
  EXPECT_TRUE(within_tolerance(groups(k, 2), groups(x, 2), 3, bits, at::kHalf, x.scalar_type())) << what << ": keys";
  EXPECT_TRUE(within_tolerance(groups(v, 3), groups(x, 3), 4, bits, at::kHalf, x.scalar_type())) << what << ": values";
}

// `values` repeated along tokens and along channels, so that every group of keys and of values holds all of them.
at::Tensor in_both_directions(const std::vector<double>& values, at::ScalarType type) {
  const at::Tensor list = floats(values), i = at::arange(16, at::kLong);
  return list.index_select(0, ((i.unsqueeze(0) + i.unsqueeze(1)) % list.numel()).flatten())
      .view({1, 1, 16, 16})
      .to(type);
}

// ---------------------------------------------------------------------------------------------- C02 to C05

TEST(C02_HalfRange, ScalesOfFloat16InTheCache) {
  for (const int64_t bits : kAllBits) {
    const CacheOptions o = case_options(1, 16, 16, 0, 0, bits, bits);
    const at::Tensor wide = in_both_directions({-60000, 60000}, at::kHalf);
    const at::Tensor widest = in_both_directions({-65504, 65504}, at::kHalf);
    if (bits <= 2) {  // 1 bit: the scale 120000 is no float16, so that the cache stores float32 from then on
      const auto [k, v] = held(o, wide, wide);
      EXPECT_TRUE(same_bits(k, wide) && same_bits(v, wide)) << bits;
    }
    const auto [k, v] = held(o, widest, widest);
    EXPECT_TRUE(all_finite(k) && all_finite(v)) << bits;
    EXPECT_LE(max_difference(k, widest), bits == 8 ? 62.0 : 32.0) << bits;
    EXPECT_LE(max_difference(v, widest), bits == 8 ? 62.0 : 32.0) << bits;
    for (const auto& values : std::vector<std::vector<double>>{{1, 1, 1, 1.0009765625},
                                                               {0, 0, 0, std::ldexp(1.0, -24)},
                                                               {0, std::ldexp(1.0, -24), std::ldexp(3.0, -24)},
                                                               {-65504, 65504, 0, 1},
                                                               {65504, 65472},
                                                               {-65504, 3e-5}}) {
      expect_held_within_tolerance(in_both_directions(values, at::kHalf), bits, std::to_string(values.back()));
    }
  }
}

TEST(C02_HalfRange, AnyFiniteFloat16InTheCache) {
  std::mt19937 rng(1);
  at::Tensor x = at::empty({1, 3, 64, 48}, at::kShort);
  for (int64_t i = 0; i < x.numel(); i++) x.mutable_data_ptr<int16_t>()[i] = static_cast<int16_t>(rng());
  x = at::nan_to_num(x.view(at::kHalf), 1.0, 2.0, -3.0);
  for (const int64_t bits : kAllBits) {
    expect_held_within_tolerance(x, bits, "all of float16");
    expect_held_within_tolerance(at::where(x.abs() < 1e-4, x, x.sign() * 1e-5), bits, "subnormal float16");
  }
}

TEST(C03_SmallSpread, InTheCache) {
  const auto expect_exact = [](const std::vector<double>& values, at::ScalarType type, int64_t bits) {
    const at::Tensor x = in_both_directions(values, type);
    const auto [k, v] = held(case_options(1, 16, 16, 0, 0, bits, bits), x, x);
    EXPECT_TRUE(same_bits(k, x) && same_bits(v, x)) << x[0][0][0] << " at " << bits;
  };
  expect_exact({1000, 1000.5, 1001}, at::kHalf, 8);
  expect_exact({300, 302, 304, 306}, at::kBFloat16, 2);
  expect_exact({5, 7}, at::kHalf, 1);
  expect_exact({-1000.5, -1001.5}, at::kFloat, 1);
  for (const double offset : {512.0, -1000.5, 30000.0, -60000.0, 1e6, -1e5}) {
    for (const auto type : kTypes) {
      if (type == at::kHalf && std::abs(offset) > 65000) continue;
      const at::Tensor x = (randn({1, 2, 32, 32}, 2) * 8 + offset).to(type);
      for (const int64_t bits : kAllBits) expect_held_within_tolerance(x, bits, std::to_string(offset));
    }
  }
}

TEST(C04_Subnormals, InTheCache) {
  const auto expect_finite = [](double size) {
    const at::Tensor x = randn({1, 1, 32, 32}, 3).clamp(-1, 1) * size;
    for (const int64_t bits : kAllBits) {
      KVCache cache(case_options(1, 32, 16, 0, 0, bits, bits));
      cache.append(x, x);
      expect_held_within_tolerance(x, bits, std::to_string(size));
      EXPECT_TRUE(all_finite(cache.attend(x.narrow(2, 0, 2)))) << size << " " << bits;
    }
  };
  for (const double size : {1e-7, 1e-20, 1e-39, 3e-45}) expect_finite(size);
  if (!at::globalContext().setFlushDenormal(true)) return;  // no switch on this machine
  for (const double size : {1e-7, 1e-20, 1e-39, 3e-45}) expect_finite(size);
  at::globalContext().setFlushDenormal(false);
}

// A last group of values that is short, every dtype; in the window a value that is not finite spoils itself alone.
TEST(C05_NotFinite, InTheCache) {
  for (const auto type : kTypes) {
    const at::Tensor clean = randn({1, 2, 48, 20}, 4, type);
    for (const int64_t bits : kAllBits) {
      const CacheOptions o = case_options(2, 20, 16, 16, 0, bits, bits);
      const auto [want_k, want_v] = [&] {
        KVCache cache(o);
        cache.append(clean, clean);
        return cache.dequantize();
      }();
      for (const float bad : {kNan, kInf, -kInf}) {
        for (const int64_t token : {0, 15, 16, 31, 32, 47}) {
          at::Tensor x = clean.clone();
          x[0][1][token][19] = bad;
          KVCache once(o), streamed(o);
          once.append(x, x);
          for (int64_t t = 0; t < 48; t++) append_range(streamed, x, x, t, t + 1);
          ASSERT_TRUE(same_state(once.state(), streamed.state())) << type << " " << bits << " " << token;
          at::Tensor k_hit = at::zeros(x.sizes(), at::kBool), v_hit = k_hit.clone();
          const bool in_window = token >= 32;
          k_hit[0][1].narrow(0, in_window ? token : token / 16 * 16, in_window ? 1 : 16).select(1, 19).fill_(true);
          v_hit[0][1][token].narrow(0, in_window ? 19 : 16, in_window ? 1 : 4).fill_(true);
          const auto expect_spoilt = [&](const KVCache& cache) {
            const auto [k, v] = cache.dequantize();
            const int64_t n = cache.length();
            const auto expect = [&](const at::Tensor& got, const at::Tensor& all, const at::Tensor& all_hit) {
              const at::Tensor hit = all_hit.narrow(2, 0, n);
              ASSERT_TRUE(at::equal(got.isfinite(), hit.logical_not())) << type << " " << bits << " " << token;
              ASSERT_TRUE(same_bits(got.masked_fill(hit, 0), all.narrow(2, 0, n).masked_fill(hit, 0)));
            };
            expect(k, want_k, k_hit);
            expect(v, want_v, v_hit);
          };
          expect_spoilt(once);
          once.truncate(20);  // cuts the second group
          expect_spoilt(once);
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- C08 to C10

TEST(C08_Streaming, AFlushQuantisesWholeGroups) {
  const at::Tensor t = at::arange(48, at::kFloat), square = t * t;
  const at::Tensor k = square.view({1, 1, 48, 1}).expand({1, 1, 48, 8}), v = randn({1, 1, 48, 8}, 5);
  KVCache cache(case_options(1, 8, 16, 16));
  for (int64_t i = 0; i < 48; i++) append_range(cache, k, v, i, i + 1);
  ASSERT_EQ(cache.quantized_length(), 32);
  // The scales are 225 / 3 and (961 - 256) / 3.
  const at::Tensor want =
      at::cat({at::round(square.narrow(0, 0, 16) / 75) * 75,
               at::round((square.narrow(0, 16, 16) - 256) / 235) * 235 + 256, square.narrow(0, 32, 16)});
  EXPECT_TRUE(same_bits(std::get<0>(cache.dequantize())[0][0].select(1, 5), want));
  EXPECT_GT(max_difference(want, square), 100.0);  // groups of one token would be exact
}

TEST(C08_Streaming, AnyChunksGiveTheSameBits) {
  const std::vector<std::vector<int64_t>> plans = {
      {160},           std::vector<int64_t>(160, 1), {28, 36, 96}, std::vector<int64_t>(8, 20), {1, 159}, {159, 1},
      {17, 0, 31, 112}};
  for (const auto type : kTypes) {
    const at::Tensor k = randn({2, 2, 160, 12}, 6, type), v = randn({2, 2, 160, 12}, 7, type) * 30;
    for (const auto& [residual, sink] : {std::pair<int64_t, int64_t>{16, 0}, {0, 0}, {33, 5}, {0, 17}}) {
      for (const auto& [k_bits, v_bits] : {std::pair<int64_t, int64_t>{2, 2}, {3, 1}, {8, 4}}) {
        std::optional<KVCache::State> want;
        for (const auto& plan : plans) {
          KVCache cache(case_options(2, 12, 16, residual, sink, k_bits, v_bits));
          int64_t at = 0;
          for (const int64_t count : plan) append_range(cache, k, v, at, at + count), at += count;
          ASSERT_EQ(cache.length(), 160);
          if (!want) want = cache.state();
          EXPECT_TRUE(same_state(cache.state(), *want)) << plan.size() << " chunks, R " << residual;
        }
      }
    }
  }
}

TEST(C09_Residual, CountsAndAttentionAfterAnyChunks) {
  const std::vector<int64_t> late = {4, 52, 8, 124, 4}, odd = {1, 13, 2, 31, 1, 90, 17, 5, 64, 3};
  for (const auto& [group, residual, sink] :
       {std::tuple<int64_t, int64_t, int64_t>{16, 32, 0}, {16, 0, 0}, {16, 7, 4}, {32, 128, 1}}) {
    KVCache ones(case_options(1, 16, group, residual, sink)), counts(case_options(1, 16, group, residual, sink));
    std::vector<int64_t> chunks(33, 12);
    chunks.insert(chunks.end(), late.begin(), late.end());
    chunks.insert(chunks.end(), odd.begin(), odd.end());
    int64_t n = 0;
    for (const int64_t count : chunks) {
      const at::Tensor zero = at::zeros({1, 1, count, 16});
      ones.append(zero, at::ones_like(zero));
      counts.append(zero, at::arange(n, n + count, at::kFloat).view({1, 1, count, 1}).expand_as(zero));
      n += count;
      const int64_t quantised = ones.quantized_length(), exact = n - quantised;
      ASSERT_EQ(ones.length(), n);
      ASSERT_EQ(quantised % group, 0);
      ASSERT_EQ(quantised, std::max<int64_t>(0, n - sink - residual) / group * group);  // K and V alike
      ASSERT_LT(exact, sink + residual + group);
      const at::Tensor q = at::zeros({1, 2, 1, 16});
      ASSERT_LE(max_difference(ones.attend(q), at::ones({1, 2, 1, 16})), 1e-6) << n;
      const double mean = static_cast<double>(n - 1) / 2;
      ASSERT_LE(max_difference(counts.attend(q), at::full({1, 2, 1, 16}, mean)), 1e-6 * (1 + mean)) << n;
    }
  }
  KVCache thousand(case_options(8, 128, 32, 32));
  const at::Tensor x = randn({1, 8, 1000, 128}, 8, at::kHalf);
  for (int64_t t = 0; t < 1000; t += 8) append_range(thousand, x, x, t, t + 8);
  EXPECT_LT(static_cast<double>(thousand.nbytes()), 0.35 * 1000 * 8 * 512);
}

TEST(C10_FullPrecisionTail, AfterAPrefillOfAnyLength) {
  for (const auto type : kTypes) {
    for (const int64_t sink : {0, 4}) {
      for (const int64_t n : {84, 20, 32, 36, 47, 48, 51, 52, 53, 1}) {
        const at::Tensor k = randn({1, 2, n, 16}, 9, type), v = randn({1, 2, n, 16}, 10, type);
        KVCache cache(case_options(2, 16, 16, 32, sink));
        cache.append(k, v);
        const int64_t quantised = std::max<int64_t>(0, n - sink - 32) / 16 * 16, tail = n - sink - quantised;
        ASSERT_EQ(cache.quantized_length(), quantised) << n;
        const auto [kd, vd] = cache.dequantize();
        for (const auto& [got, want] : {std::pair{kd, k}, {vd, v}}) {
          if (tail > 0) EXPECT_TRUE(same_bits(got.narrow(2, n - tail, tail), want.narrow(2, n - tail, tail))) << n;
          const int64_t sinks = std::min(sink, n);
          EXPECT_TRUE(same_bits(got.narrow(2, 0, sinks), want.narrow(2, 0, sinks))) << n;
          if (quantised > 0) EXPECT_GT(max_difference(got, want), 0.0) << n;
        }
        if (n > 1) continue;
        for (int64_t t = 1; t < 32; t++) cache.append(k, v);  // one token, then decoding: exact while R holds
        EXPECT_TRUE(same_bits(std::get<0>(cache.dequantize()), k.expand({1, 2, 32, 16}).contiguous()));
      }
    }
  }
}

// An outlier in token 0 costs its channel's group, unless the sink keeps the token out of it. The default keeps 4.
TEST(C10_FullPrecisionTail, TheSinkKeepsAnOutlierOutOfTheGroups) {
  EXPECT_EQ(CacheOptions().sink_length, 4);
  const at::Tensor k = randn({1, 1, 65, 16}, 11), v = randn({1, 1, 65, 16}, 12);
  for (const double factor : {200.0, -1000.0}) {
    at::Tensor outlier = k.clone();
    outlier[0][0][0][3] = factor;
    const auto keys = [&](const at::Tensor& x, int64_t sink) {
      KVCache cache(case_options(1, 16, 16, 0, sink));
      cache.append(x, v);
      return std::get<0>(cache.dequantize());
    };
    for (const int64_t sink : {1, 4, 17}) {
      const at::Tensor got = keys(outlier, sink), plain = keys(k, sink);
      EXPECT_TRUE(same_bits(got.narrow(2, 0, sink), outlier.narrow(2, 0, sink)));
      EXPECT_TRUE(same_bits(got.narrow(2, sink, 65 - sink), plain.narrow(2, sink, 65 - sink))) << sink;
    }
    const auto error = [&](const at::Tensor& got) {
      return (got - k).narrow(2, 1, 15).select(3, 3).abs().mean().item<double>();
    };
    EXPECT_GT(error(keys(outlier, 0)), 0.5);
    EXPECT_LT(error(keys(k, 0)), 0.4);
  }
}

// ---------------------------------------------------------------------------------------------- C12, C15

TEST(C12_Truncate, LengthMeanAndTheBitsThatAreKept) {
  const at::Tensor t = at::arange(40, at::kFloat).view({1, 1, 40, 1}).expand({1, 1, 40, 16});
  for (const int64_t n : {39, 36, 32, 20, 17, 16, 15, 5, 1, 0, 40, 41, 1000000}) {
    KVCache cache(case_options(1, 16, 16, 16));
    cache.append(t, t);
    const auto [k, v] = cache.dequantize();
    cache.truncate(n);
    const int64_t kept = std::min<int64_t>(n, 40);
    ASSERT_EQ(cache.length(), kept);
    EXPECT_EQ(cache.quantized_length() % 16, 0);
    EXPECT_TRUE(same_bits(std::get<0>(cache.dequantize()), k.narrow(2, 0, kept)));
    EXPECT_TRUE(same_bits(std::get<1>(cache.dequantize()), v.narrow(2, 0, kept)));
    const double mean = kept == 0 ? 0.0 : static_cast<double>(kept - 1) / 2;
    EXPECT_NEAR(cache.attend(at::zeros({1, 1, 1, 16})).max().item<double>(), mean, 1e-5) << n;
    const auto before = cache.state();
    expect_error([&] { cache.truncate(-1); }, {"n ", "-1"});
    EXPECT_TRUE(same_state(cache.state(), before));
  }
}

// The state after a crop is that of a new cache fed what was kept, as soon as both have quantised the same tokens.
TEST(C12_Truncate, GoingOnEqualsANewCacheFedWhatWasKept) {
  for (const auto& [residual, sink, bits] :
       {std::tuple<int64_t, int64_t, int64_t>{16, 0, 2}, {0, 0, 3}, {5, 4, 4}, {0, 1, 1}}) {
    const CacheOptions o = case_options(2, 16, 16, residual, sink, bits, bits);
    const at::Tensor k = randn({2, 2, 90, 16}, 13), v = randn({2, 2, 90, 16}, 14);
    const at::Tensor more_k = randn({2, 2, 140, 16}, 15), more_v = randn({2, 2, 140, 16}, 16);
    for (int64_t n = 0; n <= 90; n += 1 + n % 3) {
      KVCache cropped(o), fresh(o);
      cropped.append(k, v);
      cropped.truncate(n);
      const auto [kept_k, kept_v] = cropped.dequantize();
      fresh.append(kept_k, kept_v);
      for (int64_t at = 0; at < 140; at += 7) {
        append_range(cropped, more_k, more_v, at, at + 7);
        append_range(fresh, more_k, more_v, at, at + 7);
      }
      ASSERT_TRUE(same_state(cropped.state(), fresh.state())) << n << ", R " << residual << ", " << bits << " bits";
    }
  }
}

// Nothing of the first use may show in the second. truncate(0) keeps the batch, reset() forgets it.
TEST(C12_Truncate, ReuseShowsNoOldValue) {
  for (const auto type : kTypes) {
    for (const bool reset : {true, false}) {
      const CacheOptions o = case_options(2, 16, 16, 16, 4);
      KVCache cache(o), fresh(o);
      const at::Tensor big = at::full({2, 2, 300, 16}, 1e4, at::TensorOptions().dtype(type));
      cache.append(big, big);
      const int64_t batch = reset ? 3 : 2;
      const at::Tensor x = randn({batch, 2, 53, 16}, 17, type), y = randn({3, 2, 1, 16}, 18, type);
      if (reset) cache.reset();
      if (!reset) {
        cache.truncate(0);
        expect_error([&] { cache.append(y, y); }, {"k", "batch size 3", "2"});
      }
      cache.append(x, x);
      fresh.append(x, x);
      EXPECT_TRUE(same_state(cache.state(), fresh.state())) << type << " reset " << reset;
      EXPECT_LT(std::get<1>(cache.dequantize()).abs().max().item<double>(), 100.0);
      EXPECT_LT(cache.attend(x.narrow(2, 0, 1)).abs().max().item<double>(), 100.0);
    }
  }
}

TEST(C15_Growth, HeadsRowsAndTokensStayApart) {
  const auto axis = [](int64_t size, int64_t dim) {
    std::vector<int64_t> sizes = {1, 1, 1, 1};
    sizes[static_cast<size_t>(dim)] = size;
    return at::arange(size, at::kFloat).view(sizes);
  };
  for (const int64_t residual : {0, 16}) {
    for (const char* scale_dtype : {"float16", "float32"}) {
      CacheOptions o = case_options(2, 8, 16, residual, 0, 8, 8);
      o.scale_dtype = scale_dtype;
      KVCache cache(o);
      EXPECT_EQ(cache.length(), 0);
      EXPECT_EQ(cache.nbytes(), 0);
      EXPECT_EQ(std::get<0>(cache.dequantize()).numel(), 0);
      for (const int64_t batch : {2, 1, 3, 1}) {
        const at::Tensor k = axis(batch, 0) * 100 + axis(2, 1) * 10 + axis(600, 2) + axis(8, 3) * 0.125, v = -k;
        // s/2 of 15 over 255 levels, and half a unit of a float16 of up to 1024.
        const double limit = o.scale_dtype == "float16" ? 0.03 + 0.26 + 0.02 : 0.0301;
        int64_t n = 0;
        std::vector<int64_t> plan = {16, 16, 16, 1, 1, 1, 1, 4, 4, 4};
        while (n < 600) {
          const int64_t count = plan.empty() ? std::min<int64_t>(67, 600 - n) : plan.front();
          if (!plan.empty()) plan.erase(plan.begin());
          append_range(cache, k, v, n, n + count);
          n += count;
          const auto [kd, vd] = cache.dequantize();
          ASSERT_LT(max_difference(kd, k.narrow(2, 0, n)), limit) << batch << " rows, " << n << " tokens";
          ASSERT_LT(max_difference(vd, v.narrow(2, 0, n)), limit) << batch << " rows, " << n << " tokens";
        }
        cache.reset();
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- C16

class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { live += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live = 0;
};

TEST(C16_Memory, BytesAreThoseOfTheCaseAndThePromptGoes) {
  struct Row {
    int64_t bits;
    const char* scale_dtype;
    int64_t bytes;
  };
  for (const Row& row : {Row{2, "float16", 1212416},
                         {3, "float16", 1441792},
                         {4, "float16", 1671168},
                         {8, "float16", 2588672},
                         {1, "float16", 983040},
                         {2, "float32", 1441792}}) {
    CacheOptions o = case_options(8, 128, 32, 128, 0, row.bits, row.bits);
    o.scale_dtype = row.scale_dtype;
    const auto watch = std::make_shared<LiveBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, watch);
    KVCache cache(o);
    at::Tensor prompt = at::ones({1, 8, 1024, 128}, at::kHalf);
    cache.append(prompt.narrow(2, 0, 1000), prompt.narrow(2, 24, 1000));
    append_range(cache, prompt, prompt, 0, 24);
    prompt = at::Tensor();
    EXPECT_EQ(cache.quantized_length(), 896);
    // Beside the case's bytes: G more slots of the window, the table of 7 pages, two lengths and a flag.
    EXPECT_EQ(cache.nbytes(), row.bytes + 32 * 8 * 512 + 7 * 4 + 8 + 8 + 4) << row.bits << " " << row.scale_dtype;
    EXPECT_EQ(watch->live, cache.nbytes()) << "what is allocated is not what is counted";
  }
}

// ---------------------------------------------------------------------------------------------- C18, C19

TEST(C18_Beyond31Bits, KeysAndValuesWithFarRows) {
  const int64_t stride = (int64_t{1} << 31) + 64;
  const at::Tensor far = at::empty({stride + 70 * 64}, at::kHalf).as_strided({2, 1, 70, 64}, {stride, 4480, 64, 1});
  far.copy_(randn({2, 1, 70, 64}, 19));
  const at::Tensor near = far.contiguous();
  // The far axis as the batch, then as the heads.
  for (const auto& [x, y] : {std::pair{far, near}, {far.transpose(0, 1), near.transpose(0, 1).contiguous()}}) {
    const CacheOptions o = case_options(x.size(1), 64, 32, 5, 1);
    KVCache a(o), b(o);
    append_range(a, x, x, 0, 66), append_range(a, x, x, 66, 70);
    append_range(b, y, y, 0, 70);
    EXPECT_TRUE(same_state(a.state(), b.state()));
  }
}

TEST(C19_Empty, CachesWithoutTokensRowsOrHeads) {
  expect_error([] { KVCache(case_options(2, 0, 16, 0)); }, {"head_dim", "0"});
  for (const int64_t group : {0, -16, 8}) {
    expect_error([=] { KVCache(case_options(2, 16, group, 0)); }, {"group_size", std::to_string(group)});
  }
  KVCache cache(case_options(2, 16, 16, 16, 4));
  EXPECT_EQ(cache.nbytes(), 0);
  EXPECT_EQ(KVCache::from_state(cache.state())->batch_size(), 0);
  expect_error([&] { cache.append(at::empty({1, 0, 8, 16}), at::empty({1, 0, 8, 16})); }, {"k", "head count 0", "2"});
  expect_error([&] { cache.append(at::empty({1, 2, 8, 0}), at::empty({1, 2, 8, 0})); }, {"k", "head size 0", "16"});
  EXPECT_EQ(cache.batch_size(), 0) << "an error began the cache";
  cache.append(at::empty({3, 2, 0, 16}), at::empty({3, 2, 0, 16}));  // begins: batch and dtype are known
  EXPECT_EQ(cache.length(), 0);
  EXPECT_EQ(std::get<0>(cache.dequantize()).sizes(), at::IntArrayRef({3, 2, 0, 16}));
  EXPECT_EQ(KVCache::from_state(cache.state())->batch_size(), 3);
  EXPECT_EQ(cache.attend(randn({3, 4, 2, 16}, 20)).abs().max().item<double>(), 0.0);
  expect_error([&] { cache.append(at::zeros({2, 2, 1, 16}), at::zeros({2, 2, 1, 16})); }, {"k", "batch size 2", "3"});
  const at::Tensor x = randn({3, 2, 70, 16}, 21);
  cache.append(x, x);
  const auto before = cache.state();
  cache.append(x.narrow(2, 70, 0), x.narrow(2, 0, 0));
  cache.append(x, x, longs({0, 0, 0}));
  EXPECT_TRUE(same_state(cache.state(), before));
}

}  // namespace
}  // namespace kivi::test
