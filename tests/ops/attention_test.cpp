// Attention of kivi::KVCache and kivi::cache_attention against a softmax in double precision: accuracy, several
// queries, what a result may depend on, dtypes. Who sees what is in attention_options_test.cpp. The kernels of each
// instruction set have tests of their own in tests/unit.
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <random>

#include "tests/ops/attention_reference.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- accuracy

TEST(Attention, BothPrecisionsAgainstDoubleWithOutlierChannels) {
  struct Shape {
    int64_t batch, kv_heads, heads, dim, value_dim, tokens, group;
  };
  uint64_t seed = 100;
  for (const Shape& s : {Shape{1, 8, 32, 128, 128, 1000, 32},
                         {2, 1, 4, 80, 80, 300, 16},
                         {1, 2, 2, 64, 64, 700, 64},
                         {1, 1, 8, 192, 128, 500, 128},
                         {1, 3, 3, 33, 20, 200, 16},
                         {1, 1, 2, 576, 512, 300, 64}}) {
    for (const auto& [k_bits, v_bits] : {std::pair{2, 2}, {4, 2}, {8, 8}, {3, 1}, {1, 3}, {4, 4}}) {
      CacheOptions o = exact_options(s.kv_heads, s.dim, s.group, s.group, 4);
      o.value_head_dim = s.value_dim;
      o.k_bits = k_bits;
      o.v_bits = v_bits;
      KVCache exact(o);
      o.precision = "fast";
      KVCache fast(o);
      const at::Tensor k = outlier_keys({s.batch, s.kv_heads, s.tokens, s.dim}, seed++);
      const at::Tensor v = randn({s.batch, s.kv_heads, s.tokens, s.value_dim}, seed++);
      exact.append(k, v);
      fast.append(k, v);
      const std::string what =
          "D " + std::to_string(s.dim) + " bits " + std::to_string(k_bits) + " " + std::to_string(v_bits);
      const double scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
      for (int64_t rows : {1, 3}) {
        const at::Tensor q = unit_queries({s.batch, s.heads, rows, s.dim}, seed++);
        expect_attends(exact, q, {}, limits::kExact, what + " exact");
        const double limit = fast_limit(fast, q, k, scale);
        expect_attends(fast, q, {}, s.dim >= 64 ? std::min(limits::kFastUnitQueries, limit) : limit, what + " fast");
        // Score spreads of some +-40.
        const at::Tensor wide = unit_queries({s.batch, s.heads, rows, s.dim}, seed++, 0.4 * std::sqrt(s.dim));
        expect_attends(exact, wide, {}, limits::kExact, what + " exact, wide");
        expect_attends(fast, wide, {}, fast_limit(fast, wide, k, scale), what + " fast, wide");
      }
    }
  }
}

TEST(Attention, ScoresFarFromZeroNeitherOverflowNorVanish) {
  const at::Tensor k = randn({1, 1, 200, 32}, 131), v = randn({1, 1, 200, 32}, 132);
  KVCache cache(exact_options(1, 32));
  cache.append(k, v);
  for (double spread : {0.0, 1e-20, 40.0, 400.0, 4000.0}) {
    const at::Tensor q = unit_queries({1, 2, 1, 32}, 133, spread);
    const Result want = reference(q, cache);
    expect_near(cache.attend(q), want.out, spread > 40 ? 1e-3 : limits::kExact, std::to_string(spread));
  }
}

// Nothing is quantised yet: torch's own attention says the same.
TEST(Attention, EqualsTorchWhileNothingIsQuantised) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const double limit = type == at::kFloat ? limits::kExact : type == at::kHalf ? 2e-3 : 1.6e-2;
    for (int64_t heads : {2, 8}) {
      const at::Tensor q = randn({2, heads, 60, 64}, 141, type), k = randn({2, 2, 60, 64}, 142, type),
                       v = randn({2, 2, 60, 48}, 143, type);
      const auto torch = [&](const at::Tensor& queries, int64_t keys, bool causal) {
        const auto f = [](const at::Tensor& t) { return t.to(at::kFloat); };
        return at::scaled_dot_product_attention(f(queries), f(k.narrow(2, 0, keys)), f(v.narrow(2, 0, keys)),
                                                std::nullopt, 0.0, causal, std::nullopt, true);
      };
      CacheOptions o = exact_options(2, 64, 32, 64);
      o.value_head_dim = 48;
      for (bool causal : {true, false}) {
        KVCache cache(o);
        AttentionOptions options;
        options.is_causal = causal;
        expect_near(cache.forward(q, k, v, options), torch(q, 60, causal).to(at::kDouble), limit, "prefill");
        expect_near(cache.attend(q.narrow(2, 59, 1)), torch(q.narrow(2, 59, 1), 60, false).to(at::kDouble), limit);
      }
      KVCache step_by_step(o);
      for (int64_t t = 0; t < 60; t++) {
        const at::Tensor out = step_by_step.forward(q.narrow(2, t, 1), k.narrow(2, t, 1), v.narrow(2, t, 1));
        expect_near(out, torch(q.narrow(2, t, 1), t + 1, false).to(at::kDouble), limit, "step " + std::to_string(t));
      }
    }
  }
}

// C07
TEST(Attention, AllPairsOfWidths) {
  const at::Tensor k = randn({1, 2, 100, 48}, 151), v = randn({1, 2, 100, 48}, 152), q = randn({1, 4, 2, 48}, 153);
  for (int64_t k_bits : kAllBits) {
    for (int64_t v_bits : kAllBits) {
      CacheOptions o = exact_options(2, 48);
      o.k_bits = k_bits, o.v_bits = v_bits;
      KVCache cache(o);
      cache.append(k, v);
      expect_attends(cache, q, {}, limits::kExact, std::to_string(k_bits) + " " + std::to_string(v_bits));
    }
  }
}

// C11
TEST(Attention, HeadSizes) {
  uint64_t seed = 160;
  for (int64_t dim : {1, 8, 20, 64, 80, 96, 112, 128, 192, 256, 576}) {
    for (auto type : {at::kFloat, at::kHalf}) {
      KVCache cache(exact_options(1, dim, 32, 32));
      const at::Tensor k = randn({2, 1, 100, dim}, seed++, type), v = randn({2, 1, 100, dim}, seed++, type);
      cache.append(k, v);
      expect_attends(cache, randn({2, 4, 1, dim}, seed++, type), {}, type == at::kFloat ? limits::kExact : 2e-3,
                     std::to_string(dim));
    }
  }
  KVCache cache(exact_options(1, 16));
  cache.append(randn({1, 1, 40, 16}, 1), randn({1, 1, 40, 16}, 2));
  expect_error([&] { cache.attend(randn({1, 1, 1, 17}, 3)); }, {"q", "17", "16"});
}

// C09: each token is seen exactly once at every length.
TEST(Attention, EachTokenIsSeenOnce) {
  for (int64_t residual : {0, 1, 16, 40}) {
    for (int64_t sink : {0, 4}) {
      KVCache cache(exact_options(1, 8, 16, residual, sink));
      for (int64_t n = 1; n <= 400; n++) {
        const at::Tensor v = at::full({1, 1, 1, 8}, n % 2 == 0 ? 1.0 : 0.0);
        cache.append(at::zeros({1, 1, 1, 8}), v);
        const auto [out, lse] = cache.attend_with_lse(at::zeros({1, 2, 1, 8}));
        ASSERT_NEAR(out.max().item<double>(), static_cast<double>(n / 2) / static_cast<double>(n), 1e-6) << n;
        ASSERT_NEAR(lse.max().item<double>(), std::log(static_cast<double>(n)), 1e-6) << n;
      }
    }
  }
}

// C01
TEST(Attention, ZeroKeysAndUnitValuesGiveOne) {
  KVCache cache(exact_options(2, 16, 16, 0, 0));
  cache.append(at::zeros({1, 2, 160, 16}), at::ones({1, 2, 160, 16}));
  const at::Tensor out = cache.attend(randn({1, 4, 2, 16}, 170));
  EXPECT_LE(max_difference(out, at::ones_like(out)), 1e-6);
}

// ---------------------------------------------------------------------------------------------- several queries

// C13
TEST(Attention, QueriesAreAlignedAtTheBottomRight) {
  for (const auto& [cached, appended] : {std::pair<int64_t, int64_t>{5, 3}, {12, 4}, {100, 4}, {35, 3}, {20, 17}}) {
    for (int64_t residual : {0, 16}) {
      KVCache by_forward(exact_options(1, 8, 16, residual, 0)), by_attend(exact_options(1, 8, 16, residual, 0));
      const at::Tensor zero = at::zeros({1, 1, cached, 8}), one = at::ones({1, 1, cached, 8});
      by_forward.append(zero, one);
      by_attend.append(zero, one);
      const at::Tensor new_k = at::zeros({1, 1, appended, 8}), q = at::zeros({1, 1, appended, 8});
      const at::Tensor out = by_forward.forward(q, new_k, new_k);
      by_attend.append(new_k, new_k);
      const at::Tensor later = by_attend.attend(q);
      AttentionOptions all;
      all.is_causal = false;
      const at::Tensor full = by_attend.attend(q, all);
      for (int64_t i = 0; i < appended; i++) {
        const double want = static_cast<double>(cached) / static_cast<double>(cached + i + 1);
        EXPECT_NEAR(out[0][0][i][3].item<double>(), want, 1e-6) << cached << " + " << i;
        EXPECT_NEAR(later[0][0][i][3].item<double>(), want, 1e-6) << cached << " + " << i;
        EXPECT_NEAR(full[0][0][i][3].item<double>(),
                    static_cast<double>(cached) / static_cast<double>(cached + appended), 1e-6);
      }
    }
  }
  KVCache cache(exact_options(1, 8, 16, 0, 0));
  cache.append(at::zeros({1, 1, 5, 8}), at::arange(5, at::kFloat).view({1, 1, 5, 1}).expand({1, 1, 5, 8}));
  const at::Tensor out = cache.forward(at::zeros({1, 1, 3, 8}), at::zeros({1, 1, 3, 8}),
                                       at::arange(5, 8, at::kFloat).view({1, 1, 3, 1}).expand({1, 1, 3, 8}));
  EXPECT_LE(max_difference(out[0][0].select(1, 0), floats({2.5, 3.0, 3.5})), 1e-6);
  // More queries than keys: the first ones stand before every key.
  const at::Tensor early = cache.attend(at::zeros({1, 1, 10, 8}));
  EXPECT_EQ(early[0][0].narrow(0, 0, 2).abs().max().item<double>(), 0.0);
  EXPECT_NEAR(early[0][0][9][0].item<double>(), 3.5, 1e-6);
}

TEST(Attention, OneCallForSeveralTokensEqualsSingleSteps) {
  const at::Tensor k = randn({2, 2, 120, 32}, 181), v = randn({2, 2, 120, 32}, 182), q = randn({2, 6, 120, 32}, 183);
  for (int64_t prefix : {0, 3, 60, 84, 99}) {
    for (int64_t count : {1, 2, 4, 7}) {
      const CacheOptions o = exact_options(2, 32, 16, 32, 4);
      KVCache verify(o), steps(o);
      if (prefix > 0) {
        verify.append(k.narrow(2, 0, prefix), v.narrow(2, 0, prefix));
        steps.append(k.narrow(2, 0, prefix), v.narrow(2, 0, prefix));
      }
      const auto part = [&](const at::Tensor& t, int64_t first, int64_t n) { return t.narrow(2, prefix + first, n); };
      const bool flushes =
          (std::max<int64_t>(0, prefix + count - 1 - 36)) / 16 != std::max<int64_t>(0, prefix - 36) / 16;
      const at::Tensor out = verify.forward(part(q, 0, count), part(k, 0, count), part(v, 0, count));
      std::vector<at::Tensor> single;
      for (int64_t i = 0; i < count; i++) single.push_back(steps.forward(part(q, i, 1), part(k, i, 1), part(v, i, 1)));
      // Values are up to 4. A call on an empty cache is torch's own attention, which sums in another order.
      if (!flushes)
        EXPECT_LE(max_difference(out, at::cat(single, 2)), prefix == 0 ? 1e-5 : 4e-6) << prefix << " + " << count;
      EXPECT_TRUE(same_state(verify.state(), steps.state()));
    }
  }
}

TEST(Attention, ForwardSeesNewTokensExactlyAndTheCacheAsItWas) {
  for (int64_t prefix : {0, 1, 30, 100, 300}) {
    for (int64_t count : {1, 5, 40}) {
      KVCache cache(exact_options(2, 32, 16, 0, 0));
      if (prefix > 0) cache.append(randn({2, 2, prefix, 32}, 184), randn({2, 2, prefix, 32}, 185));
      const at::Tensor k = randn({2, 2, count, 32}, 186), v = randn({2, 2, count, 32}, 187),
                       q = randn({2, 4, count, 32}, 188);
      const auto [kd, vd] = cache.dequantize();
      const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2)) : reference(q, k, v);
      expect_near(cache.forward(q, k, v), want.out, limits::kExact,
                  std::to_string(prefix) + " + " + std::to_string(count));
      EXPECT_EQ(cache.length(), prefix + count);
    }
  }
}

TEST(Attention, ChunkedPrefillEqualsOneForwardWhileAllIsExact) {
  const at::Tensor k = randn({1, 2, 100, 64}, 191), v = randn({1, 2, 100, 64}, 192), q = randn({1, 8, 100, 64}, 193);
  const CacheOptions o = exact_options(2, 64, 32, 128);
  KVCache once(o);
  const at::Tensor want = once.forward(q, k, v);
  for (int64_t chunk : {1, 7, 33, 99}) {
    KVCache cache(o);
    std::vector<at::Tensor> outs;
    for (int64_t t = 0; t < 100; t += chunk) {
      const int64_t n = std::min<int64_t>(chunk, 100 - t);
      outs.push_back(cache.forward(q.narrow(2, t, n), k.narrow(2, t, n), v.narrow(2, t, n)));
    }
    EXPECT_LE(max_difference(at::cat(outs, 2), want), limits::kExact) << chunk;
    EXPECT_TRUE(same_state(cache.state(), once.state()));
  }
}

// ---------------------------------------------------------------------------------------------- independence

// C25 b
TEST(Attention, ThreadCountChangesNothing) {
  for (const auto& [batch, kv_heads] : {std::pair<int64_t, int64_t>{1, 1}, {2, 6}}) {
    for (const char* precision : {"exact", "fast"}) {
      CacheOptions o = exact_options(kv_heads, 64, 32, 32, 4);
      o.precision = precision;
      KVCache cache(o);
      cache.append(randn({batch, kv_heads, 1000, 64}, 251), randn({batch, kv_heads, 1000, 64}, 252));
      for (int64_t rows : {1, 7}) {
        const at::Tensor q = randn({batch, kv_heads * 4, rows, 64}, 253);
        AttentionOptions with_mask;
        with_mask.attn_mask = randn({batch, kv_heads * 4, rows, 1000}, 254);
        at::Tensor want, masked;
        for (int count : {1, 2, 3, 8}) {
          const Threads guard(count);
          const at::Tensor got = cache.attend(q), got_masked = cache.attend(q, with_mask);
          if (!want.defined()) want = got, masked = got_masked;
          EXPECT_TRUE(same_bits(got, want)) << count << " threads, " << rows << " rows, " << precision;
          EXPECT_TRUE(same_bits(got_masked, masked)) << count << " threads, " << rows << " rows, " << precision;
        }
      }
    }
  }
}

TEST(Attention, ThreadCountChangesNothingInAPrefill) {
  for (auto type : {at::kFloat, at::kBFloat16}) {
    for (int64_t heads : {2, 8}) {
      const at::Tensor q = randn({1, heads, 300, 64}, 255, type), k = randn({1, 2, 300, 64}, 256, type),
                       v = randn({1, 2, 300, 64}, 257, type);
      at::Tensor want;
      for (int count : {1, 2, 3, 8}) {
        const Threads guard(count);
        KVCache cache(exact_options(2, 64, 32, 32, 4));
        const at::Tensor got = cache.forward(q, k, v);
        if (!want.defined()) want = got;
        EXPECT_TRUE(same_bits(got, want)) << count << " threads " << type;
      }
    }
  }
}

TEST(Attention, OtherRowsOfTheBatchChangeNothing) {
  for (const char* precision : {"exact", "fast"}) {
    CacheOptions o = exact_options(2, 64, 32, 32, 4);
    o.precision = precision;
    const at::Tensor k = randn({5, 2, 700, 64}, 261), v = randn({5, 2, 700, 64}, 262), q = randn({5, 8, 3, 64}, 263);
    // The others are long, short, empty, and full of NaN.
    at::Tensor bad_k = k.clone();
    bad_k[4].fill_(kNan);
    KVCache batch(o), alone(o);
    batch.append(bad_k, v, longs({700, 400, 3, 0, 200}));
    alone.append(k.narrow(0, 1, 1).narrow(2, 0, 400), v.narrow(0, 1, 1).narrow(2, 0, 400));
    EXPECT_TRUE(same_bits(batch.attend(q)[1], alone.attend(q.narrow(0, 1, 1))[0])) << precision;
    EXPECT_EQ(batch.attend(q)[3].abs().max().item<double>(), 0.0);
    const at::Tensor kn = randn({5, 2, 3, 64}, 264), vn = randn({5, 2, 3, 64}, 265);
    EXPECT_TRUE(same_bits(batch.forward(q, kn, vn)[1],
                          alone.forward(q.narrow(0, 1, 1), kn.narrow(0, 1, 1), vn.narrow(0, 1, 1))[0]));
  }
}

// C25 f
TEST(Attention, TheSameRequestTwiceGivesTheSameBits) {
  CacheOptions o = exact_options(2, 64, 32, 40, 4);
  o.precision = "fast";
  const at::Tensor k = randn({1, 2, 301, 64}, 266), v = randn({1, 2, 301, 64}, 267), q = randn({1, 8, 1, 64}, 268);
  KVCache cache(o);
  cache.append(k.narrow(2, 0, 300), v.narrow(2, 0, 300));
  const auto loaded = KVCache::from_state(cache.state());
  const at::Tensor last_k = k.narrow(2, 300, 1), last_v = v.narrow(2, 300, 1);
  const at::Tensor want = cache.forward(q, last_k, last_v);
  EXPECT_TRUE(same_bits(loaded->forward(q, last_k, last_v), want));
  cache.truncate(300);
  EXPECT_TRUE(same_bits(cache.forward(q, last_k, last_v), want));
}

TEST(Attention, StridedQueriesAndInputsStay) {
  KVCache cache(exact_options(2, 16, 16, 4, 0));
  cache.append(randn({2, 2, 60, 16}, 271), randn({2, 2, 60, 16}, 272));
  const auto before = cache.state();
  for (const at::Tensor& q :
       {randn({2, 3, 4, 16}, 273).transpose(1, 2), randn({2, 4, 3, 32}, 274).slice(3, 0, 32, 2),
        randn({1, 4, 3, 16}, 275).expand({2, 4, 3, 16}), randn({2, 1, 3, 16}, 276).expand({2, 4, 3, 16}),
        randn({2, 4, 3, 1}, 277).expand({2, 4, 3, 16}), randn({2, 4, 9, 16}, 278).narrow(2, 5, 3),
        randn({16, 3, 4, 2}, 279).permute({3, 2, 1, 0})}) {
    const at::Tensor plain = q.contiguous().clone();
    EXPECT_TRUE(same_bits(cache.attend(q), cache.attend(plain)));
    EXPECT_TRUE(same_bits(q, plain));
    const at::Tensor k = q.narrow(1, 0, 2);
    const auto a = cache.clone(), b = cache.clone();
    EXPECT_TRUE(same_bits(a->forward(q, k, k), b->forward(plain, k.contiguous().clone(), k.contiguous().clone())));
    EXPECT_TRUE(same_state(a->state(), b->state()));
  }
  EXPECT_TRUE(same_state(cache.state(), before)) << "attend changed the cache";
}

// ---------------------------------------------------------------------------------------------- dtypes

// C21 a
TEST(Attention, TheQueryMayHaveAnotherDtypeThanTheCache) {
  for (auto cache_type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    KVCache cache(exact_options(2, 32, 16, 8, 4));
    cache.append(randn({1, 2, 100, 32}, 281, cache_type), randn({1, 2, 100, 32}, 282, cache_type));
    for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor q = randn({1, 4, 2, 32}, 283, type);
      // dequantize() rounds to the dtype of the cache, attention does not.
      const auto rounding = [](at::ScalarType t) { return t == at::kFloat ? 1e-5 : t == at::kHalf ? 1e-3 : 8e-3; };
      const double limit = rounding(type) + rounding(cache_type);
      expect_attends(cache, q, {}, limit, std::string(toString(cache_type)) + " " + toString(type));
      const at::Tensor x = randn({1, 2, 2, 32}, 284, cache_type);
      const auto copy = cache.clone();
      EXPECT_EQ(copy->forward(q, x, x).scalar_type(), type);
    }
  }
}

TEST(Attention, NothingCachedGivesZeros) {
  KVCache cache(exact_options(2, 16));
  for (auto type : {at::kFloat, at::kHalf}) {
    const auto [out, lse] = cache.attend_with_lse(randn({3, 4, 2, 16}, 291, type));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({3, 4, 2, 16}));
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_EQ(out.abs().max().item<double>(), 0.0);
    EXPECT_TRUE((lse == -INFINITY).all().item<bool>());
  }
  AttentionOptions o;
  o.sinks = at::full({4}, 2.0);
  EXPECT_TRUE((std::get<1>(cache.attend_with_lse(randn({3, 4, 2, 16}, 292), o)) == 2.0).all().item<bool>());
  EXPECT_EQ(cache.batch_size(), 0) << "attend started the cache";
  EXPECT_EQ(cache.attend(at::empty({2, 4, 0, 16})).sizes(), at::IntArrayRef({2, 4, 0, 16}));
  cache.append(randn({2, 2, 40, 16}, 293), randn({2, 2, 40, 16}, 294));
  EXPECT_EQ(cache.attend(at::empty({2, 4, 0, 16})).sizes(), at::IntArrayRef({2, 4, 0, 16}));
  EXPECT_EQ(cache.forward(at::empty({2, 4, 0, 16}), at::empty({2, 2, 0, 16}), at::empty({2, 2, 0, 16})).numel(), 0);
  cache.truncate(0);
  EXPECT_EQ(cache.attend(randn({2, 4, 1, 16}, 295)).abs().max().item<double>(), 0.0);
}

// C05: NaN reaches those who see it and nobody else.
TEST(Attention, NanReachesWhoSeesItOnly) {
  for (const char* precision : {"exact", "fast"}) {
    CacheOptions o = exact_options(2, 32, 16, 8, 0);
    o.precision = precision;
    const at::Tensor k = randn({1, 2, 60, 32}, 301), v = randn({1, 2, 60, 32}, 302), q = randn({1, 4, 1, 32}, 303);
    KVCache clean(o);
    clean.append(k, v);
    const at::Tensor want = clean.attend(q);
    for (int64_t token : {5, 20, 58}) {  // quantised, quantised, exact
      at::Tensor bad_v = v.clone(), bad_k = k.clone();
      bad_v[0][1][token][3] = kNan;
      KVCache values(o);
      values.append(k, bad_v);
      const at::Tensor out = values.attend(q);
      EXPECT_TRUE(same_bits(out.narrow(1, 0, 2), want.narrow(1, 0, 2))) << "the other kv head";
      EXPECT_TRUE(out.narrow(1, 2, 2).select(3, 3).isnan().all().item<bool>()) << precision << " " << token;
      EXPECT_TRUE(same_bits(out.narrow(1, 2, 2).narrow(3, 16, 16), want.narrow(1, 2, 2).narrow(3, 16, 16)))
          << "the other group of channels";
      bad_k[0][1][token][3] = kNan;
      KVCache keys(o);
      keys.append(bad_k, v);
      const at::Tensor by_key = keys.attend(q);
      EXPECT_TRUE(same_bits(by_key.narrow(1, 0, 2), want.narrow(1, 0, 2)));
      EXPECT_TRUE(by_key.narrow(1, 2, 2).isnan().all().item<bool>()) << precision << " " << token;
      // Who masks the group out, or looks at a window that does not hold it, does not see it.
      AttentionOptions without;
      at::Tensor keep = at::ones({60}, at::kBool);
      keep.narrow(0, token < 48 ? token / 16 * 16 : token, token < 48 ? 16 : 1).fill_(false);
      without.attn_mask = keep;
      EXPECT_LE(max_difference(keys.attend(q, without), clean.attend(q, without)), 1e-6) << precision << " " << token;
      at::Tensor bad_q = q.clone();
      bad_q[0][2][0][0] = kNan;
      const at::Tensor by_query = clean.attend(bad_q);
      EXPECT_TRUE(by_query[0][2].isnan().all().item<bool>());
      EXPECT_TRUE(same_bits(by_query[0][3], want[0][3]));
    }
  }
}

// C21 e
TEST(Attention, AutocastGivesTheAutocastDtypeAndTheValuesOfACast) {
  const at::Tensor q = randn({1, 4, 20, 32}, 311), k = randn({1, 2, 20, 32}, 312), v = randn({1, 2, 20, 32}, 313);
  const auto cast = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  KVCache automatic(exact_options(2, 32)), by_hand(exact_options(2, 32)), started(exact_options(2, 32));
  started.append(k, v);
  const auto started_copy = started.clone();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor out = automatic.forward(q, k, v);
  const at::Tensor next = automatic.forward(q, cast(k), v);  // mixed dtypes are cast
  const at::Tensor kept = started.forward(q, cast(k), cast(v));
  automatic.append(k, v);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_TRUE(same_bits(out, by_hand.forward(cast(q), cast(k), cast(v))));
  EXPECT_TRUE(same_bits(next, by_hand.forward(cast(q), cast(k), cast(v))));
  by_hand.append(cast(k), cast(v));
  EXPECT_TRUE(same_state(automatic.state(), by_hand.state()));
  // A cache that began outside keeps its dtype.
  EXPECT_EQ(kept.scalar_type(), at::kBFloat16);
  started_copy->append(cast(k).to(at::kFloat), cast(v).to(at::kFloat));
  EXPECT_TRUE(same_state(started.state(), started_copy->state()));
}

TEST(Attention, ForwardWithGradientsEqualsTheDetachedOne) {
  const at::Tensor q = randn({1, 4, 20, 32}, 321), k = randn({1, 2, 20, 32}, 322), v = randn({1, 2, 20, 32}, 323);
  const at::Tensor qg = q.clone().requires_grad_(), kg = k.clone().requires_grad_(), vg = v.clone().requires_grad_();
  KVCache plain(exact_options(2, 32)), graph(exact_options(2, 32));
  EXPECT_LE(max_difference(graph.forward(qg, kg, vg), plain.forward(q, k, v)), 1e-6);
  EXPECT_TRUE(same_state(graph.state(), plain.state()));
  const at::Tensor out = graph.forward(qg, kg, vg);
  EXPECT_LE(max_difference(out, plain.forward(q, k, v)), 1e-6);
  expect_error([&] { out.sum().backward(); }, {"kivi::cache_attention"});
}

}  // namespace
}  // namespace kivi::test
