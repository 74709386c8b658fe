// kivi::KVCache: what it holds after appends of any kind, to the bit, and what becomes of values that are hard to
// store. Rows are in cache_rows_test.cpp, memory and modes in cache_memory_test.cpp, the saved form in state_test.cpp.
#include <random>

#include "tests/ops/model.h"

namespace kivi::test {
namespace {

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

}  // namespace
}  // namespace kivi::test
