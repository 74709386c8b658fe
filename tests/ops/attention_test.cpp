// Attention of kivi::KVCache and kivi::cache_attention against a softmax in double precision over what the cache gives
// back, plus the new tokens. The kernels of each instruction set have tests of their own in tests/unit; here it is the
// rules: who sees what, which shapes and dtypes, and what a result may depend on.
//
// "exact" must be within 1e-5 for outputs of order 1. "fast" rounds q * scale to int16 (up to head size 256): a score
// is off by some sqrt(D) * max|q * scale| * max code / 32767, and the output by that times the size of the values.
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <random>

#include "tests/ops/support.h"

namespace kivi::test {
namespace {

CacheOptions options_of(int64_t heads, int64_t dim, int64_t group = 16, int64_t residual = 16, int64_t sink = 4) {
  CacheOptions o;
  o.num_kv_heads = heads;
  o.head_dim = dim;
  o.group_size = group;
  o.residual_length = residual;
  o.sink_length = sink;
  o.precision = "exact";
  return o;
}

struct Result {
  at::Tensor out, lse;  // double
};

// One row of the batch. q [Hq, Lq, D], k [Hkv, n, D], v [Hkv, n, Dv]; the last query stands at the last key. `mask`
// [Hq, Lq, n] or undefined: added.
Result reference_row(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                     const AttentionOptions& o, const at::Tensor& slopes) {
  const int64_t heads = q.size(0), rows = q.size(1), keys = k.size(1), repeat = heads / k.size(0);
  const at::Tensor kd = k.to(at::kDouble).repeat_interleave(repeat, 0),
                   vd = v.to(at::kDouble).repeat_interleave(repeat, 0);
  at::Tensor scores = at::matmul(q.to(at::kDouble), kd.transpose(1, 2)) *
                      o.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2))));
  if (o.softcap > 0) scores = at::tanh(scores / o.softcap) * o.softcap;
  const at::Tensor at_key = at::arange(keys, at::kLong).unsqueeze(0);
  const at::Tensor at_query = at::arange(keys - rows, keys, at::kLong).unsqueeze(1);
  if (slopes.defined())
    scores = scores + slopes.to(at::kDouble).view({heads, 1, 1}) * (at_key - at_query).to(at::kDouble);
  if (mask.defined()) scores = scores + mask.to(at::kDouble);
  at::Tensor seen = at::ones({rows, keys}, at::kBool);
  if (o.is_causal) seen = seen.logical_and(at_key <= at_query);
  if (o.window > 0) seen = seen.logical_and(at_key > at_query - o.window);
  scores = scores.masked_fill(seen.logical_not(), -INFINITY);
  if (o.sinks) scores = at::cat({scores, o.sinks->to(at::kDouble).view({heads, 1, 1}).expand({heads, rows, 1})}, 2);
  if (scores.size(2) == 0) {
    return {at::zeros({heads, rows, v.size(2)}, at::kDouble), at::full({heads, rows}, -INFINITY, at::kDouble)};
  }
  const at::Tensor lse = at::logsumexp(scores, {2});
  const at::Tensor weights = at::nan_to_num(at::exp(scores - lse.unsqueeze(2)), 0.0).narrow(2, 0, keys);
  // A key that nobody sees weighs nothing, whatever its value.
  const at::Tensor out = at::matmul(weights, at::where((weights > 0).any(1).unsqueeze(2), vd, at::zeros_like(vd)));
  return {out, lse};
}

// All rows. k and v [B, Hkv, n, ...] hold lengths[b] tokens of row b. The mask is bool or float, broadcastable to [B,
// Hq, Lq, n].
Result reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& o = {},
                 const std::vector<int64_t>& lengths = {}) {
  std::vector<at::Tensor> out, lse;
  at::Tensor mask;
  if (o.attn_mask) {
    mask = *o.attn_mask;
    if (mask.scalar_type() == at::kBool) {
      mask = at::zeros(mask.sizes(), at::kDouble).masked_fill(mask.logical_not(), -INFINITY);
    }
    mask = mask.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
  }
  for (int64_t b = 0; b < q.size(0); b++) {
    const int64_t n = lengths.empty() ? k.size(2) : lengths[static_cast<size_t>(b)];
    const at::Tensor slopes = !o.alibi_slopes              ? at::Tensor()
                              : o.alibi_slopes->dim() == 2 ? (*o.alibi_slopes)[b]
                                                           : *o.alibi_slopes;
    const Result row = reference_row(q[b], k[b].narrow(1, 0, n), v[b].narrow(1, 0, n),
                                     mask.defined() ? mask[b].narrow(2, 0, n) : mask, o, slopes);
    out.push_back(row.out);
    lse.push_back(row.lse);
  }
  return {at::stack(out), at::stack(lse)};
}

std::vector<int64_t> lengths_of(const KVCache& cache) {
  const at::Tensor n = cache.lengths();
  return {n.const_data_ptr<int64_t>(), n.const_data_ptr<int64_t>() + n.numel()};
}

// What the cache holds is what attends.
Result reference(const at::Tensor& q, const KVCache& cache, const AttentionOptions& o = {}) {
  const auto [k, v] = cache.dequantize();
  return reference(q, k, v, o, lengths_of(cache));
}

void expect_near(const at::Tensor& got, const at::Tensor& want, double limit, const std::string& what = "") {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const at::Tensor g = got.to(at::kDouble);
  ASSERT_FALSE(g.isnan().any().item<bool>()) << what << ": NaN";
  const at::Tensor infinite = want.isinf();
  ASSERT_TRUE(at::equal(g.masked_select(infinite), want.masked_select(infinite))) << what;
  const at::Tensor difference = (g - want).masked_select(infinite.logical_not()).abs();
  if (difference.numel() > 0) EXPECT_LE(difference.max().item<double>(), limit) << what;
}

void expect_attends(const KVCache& cache, const at::Tensor& q, const AttentionOptions& o = {}, double limit = 1e-5,
                    const std::string& what = "") {
  const Result want = reference(q, cache, o);
  const auto [out, lse] = cache.attend_with_lse(q, o);
  EXPECT_EQ(out.scalar_type(), q.scalar_type());
  EXPECT_EQ(lse.scalar_type(), at::kFloat);
  EXPECT_TRUE(out.is_contiguous());
  expect_near(out, want.out, limit, what);
  expect_near(lse, want.lse, limit * 5, what + " lse");
  EXPECT_TRUE(same_bits(cache.attend(q, o), out)) << what;
}

// Keys with 8 outlier channels: four of 5x, four of 30x.
at::Tensor outlier_keys(at::IntArrayRef sizes, uint64_t seed) {
  at::Tensor k = randn(sizes, seed);
  for (int64_t d = 0, i = 0; i < 8 && d < k.size(3); i++, d += std::max<int64_t>(1, k.size(3) / 8)) {
    at::Tensor channel = k.select(3, d);
    channel.add_(0.5).mul_(i % 2 == 0 ? 5.0 : 30.0);
  }
  return k;
}

// Queries of length 1, so that outlier channels do not make the softmax a choice of one key; `spread` scales them.
at::Tensor unit_queries(at::IntArrayRef sizes, uint64_t seed, double spread = 1.0) {
  const at::Tensor q = randn(sizes, seed);
  return q / q.norm(2, {-1}, true) * spread;
}

double fast_limit(const KVCache& cache, const at::Tensor& q, const at::Tensor& k, double scale) {
  const auto dim = static_cast<double>(cache.options().head_dim);
  const double levels = static_cast<double>((int64_t{1} << cache.options().k_bits) - 1);
  const double amplitude = std::min(32767.0, 2147483647.0 / (255 * dim));
  // The largest |q * scale * K scale|, channel by channel.
  const at::Tensor range = (k.amax({0, 1, 2}) - k.amin({0, 1, 2})) / levels;
  const double largest = (q.to(at::kFloat).abs().amax({0, 1, 2}) * range).max().item<double>() * scale;
  return 5e-5 + std::sqrt(dim) * largest * levels / amplitude;
}

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
      CacheOptions o = options_of(s.kv_heads, s.dim, s.group, s.group, 4);
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
        expect_attends(exact, q, {}, 1e-5, what + " exact");
        const double limit = fast_limit(fast, q, k, scale);
        expect_attends(fast, q, {}, s.dim >= 64 ? std::min(5e-4, limit) : limit, what + " fast");
        // Score spreads of some +-40.
        const at::Tensor wide = unit_queries({s.batch, s.heads, rows, s.dim}, seed++, 0.4 * std::sqrt(s.dim));
        expect_attends(exact, wide, {}, 1e-5, what + " exact, wide");
        expect_attends(fast, wide, {}, fast_limit(fast, wide, k, scale), what + " fast, wide");
      }
    }
  }
}

TEST(Attention, ScoresFarFromZeroNeitherOverflowNorVanish) {
  const at::Tensor k = randn({1, 1, 200, 32}, 131), v = randn({1, 1, 200, 32}, 132);
  KVCache cache(options_of(1, 32));
  cache.append(k, v);
  for (double spread : {0.0, 1e-20, 40.0, 400.0, 4000.0}) {
    const at::Tensor q = unit_queries({1, 2, 1, 32}, 133, spread);
    const Result want = reference(q, cache);
    expect_near(cache.attend(q), want.out, spread > 40 ? 1e-3 : 1e-5, std::to_string(spread));
  }
}

// Nothing is quantised yet: torch's own attention says the same.
TEST(Attention, EqualsTorchWhileNothingIsQuantised) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const double limit = type == at::kFloat ? 1e-5 : type == at::kHalf ? 2e-3 : 1.6e-2;
    for (int64_t heads : {2, 8}) {
      const at::Tensor q = randn({2, heads, 60, 64}, 141, type), k = randn({2, 2, 60, 64}, 142, type),
                       v = randn({2, 2, 60, 48}, 143, type);
      const auto torch = [&](const at::Tensor& queries, int64_t keys, bool causal) {
        const auto f = [](const at::Tensor& t) { return t.to(at::kFloat); };
        return at::scaled_dot_product_attention(f(queries), f(k.narrow(2, 0, keys)), f(v.narrow(2, 0, keys)),
                                                std::nullopt, 0.0, causal, std::nullopt, true);
      };
      CacheOptions o = options_of(2, 64, 32, 64);
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
      CacheOptions o = options_of(2, 48);
      o.k_bits = k_bits, o.v_bits = v_bits;
      KVCache cache(o);
      cache.append(k, v);
      expect_attends(cache, q, {}, 1e-5, std::to_string(k_bits) + " " + std::to_string(v_bits));
    }
  }
}

// C11
TEST(Attention, HeadSizes) {
  uint64_t seed = 160;
  for (int64_t dim : {1, 8, 20, 64, 80, 96, 112, 128, 192, 256, 576}) {
    for (auto type : {at::kFloat, at::kHalf}) {
      KVCache cache(options_of(1, dim, 32, 32));
      const at::Tensor k = randn({2, 1, 100, dim}, seed++, type), v = randn({2, 1, 100, dim}, seed++, type);
      cache.append(k, v);
      expect_attends(cache, randn({2, 4, 1, dim}, seed++, type), {}, type == at::kFloat ? 1e-5 : 2e-3,
                     std::to_string(dim));
    }
  }
  KVCache cache(options_of(1, 16));
  cache.append(randn({1, 1, 40, 16}, 1), randn({1, 1, 40, 16}, 2));
  expect_error([&] { cache.attend(randn({1, 1, 1, 17}, 3)); }, {"q", "17", "16"});
}

// C09: each token is seen exactly once at every length.
TEST(Attention, EachTokenIsSeenOnce) {
  for (int64_t residual : {0, 1, 16, 40}) {
    for (int64_t sink : {0, 4}) {
      KVCache cache(options_of(1, 8, 16, residual, sink));
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
  KVCache cache(options_of(2, 16, 16, 0, 0));
  cache.append(at::zeros({1, 2, 160, 16}), at::ones({1, 2, 160, 16}));
  const at::Tensor out = cache.attend(randn({1, 4, 2, 16}, 170));
  EXPECT_LE(max_difference(out, at::ones_like(out)), 1e-6);
}

// ---------------------------------------------------------------------------------------------- several queries

// C13
TEST(Attention, QueriesAreAlignedAtTheBottomRight) {
  for (const auto& [cached, appended] : {std::pair<int64_t, int64_t>{5, 3}, {12, 4}, {100, 4}, {35, 3}, {20, 17}}) {
    for (int64_t residual : {0, 16}) {
      KVCache by_forward(options_of(1, 8, 16, residual, 0)), by_attend(options_of(1, 8, 16, residual, 0));
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
  KVCache cache(options_of(1, 8, 16, 0, 0));
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
      const CacheOptions o = options_of(2, 32, 16, 32, 4);
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
      KVCache cache(options_of(2, 32, 16, 0, 0));
      if (prefix > 0) cache.append(randn({2, 2, prefix, 32}, 184), randn({2, 2, prefix, 32}, 185));
      const at::Tensor k = randn({2, 2, count, 32}, 186), v = randn({2, 2, count, 32}, 187),
                       q = randn({2, 4, count, 32}, 188);
      const auto [kd, vd] = cache.dequantize();
      const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2)) : reference(q, k, v);
      expect_near(cache.forward(q, k, v), want.out, 1e-5, std::to_string(prefix) + " + " + std::to_string(count));
      EXPECT_EQ(cache.length(), prefix + count);
    }
  }
}

TEST(Attention, ChunkedPrefillEqualsOneForwardWhileAllIsExact) {
  const at::Tensor k = randn({1, 2, 100, 64}, 191), v = randn({1, 2, 100, 64}, 192), q = randn({1, 8, 100, 64}, 193);
  const CacheOptions o = options_of(2, 64, 32, 128);
  KVCache once(o);
  const at::Tensor want = once.forward(q, k, v);
  for (int64_t chunk : {1, 7, 33, 99}) {
    KVCache cache(o);
    std::vector<at::Tensor> outs;
    for (int64_t t = 0; t < 100; t += chunk) {
      const int64_t n = std::min<int64_t>(chunk, 100 - t);
      outs.push_back(cache.forward(q.narrow(2, t, n), k.narrow(2, t, n), v.narrow(2, t, n)));
    }
    EXPECT_LE(max_difference(at::cat(outs, 2), want), 1e-5) << chunk;
    EXPECT_TRUE(same_state(cache.state(), once.state()));
  }
}

// ---------------------------------------------------------------------------------------------- masks and options

// C14: B = Hkv, so that a mask whose heads were mistaken for rows of the batch would be legal.
class Masks : public ::testing::TestWithParam<int64_t> {};

TEST_P(Masks, EveryShapeTypeAndStride) {
  const int64_t keys = GetParam(), rows = 3;
  KVCache cache(options_of(2, 16, 16, 4, 0));
  cache.append(randn({2, 2, keys, 16}, 201), randn({2, 2, keys, 16}, 202));
  const at::Tensor q = randn({2, 4, rows, 16}, 203);
  uint64_t seed = 204;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{keys},
                                                                             {1},
                                                                             {rows, keys},
                                                                             {rows, 1},
                                                                             {1, keys},
                                                                             {4, rows, keys},
                                                                             {4, 1, 1},
                                                                             {1, 1, rows, keys},
                                                                             {2, 1, rows, keys},
                                                                             {2, 1, 1, keys},
                                                                             {1, 4, rows, keys},
                                                                             {1, 4, 1, keys},
                                                                             {2, 4, rows, keys},
                                                                             {2, 4, 1, 1}}) {
    const at::Tensor additive = randn(shape, seed++) * 2, keep = randn(shape, seed++) > -0.5;
    at::Tensor with_infinities = additive.masked_fill(keep.logical_not(), -INFINITY);
    // The same patterns as views with other strides.
    std::vector<int64_t> wide = shape;
    for (int64_t& n : wide) n = n * 2 + 1;
    at::Tensor sliced = at::full(wide, kNan);
    for (int64_t d = 0; d < sliced.dim(); d++) sliced = sliced.slice(d, 1, 1 + 2 * shape[static_cast<size_t>(d)], 2);
    sliced.copy_(additive);
    at::Tensor expanded = additive;
    if (shape.size() == 4) expanded = additive.expand({2, 4, rows, keys});
    const at::Tensor transposed =
        additive.dim() >= 2 ? additive.transpose(-1, -2).contiguous().transpose(-1, -2) : additive;
    for (const at::Tensor& mask : {additive, keep, with_infinities, sliced, expanded, transposed,
                                   additive.to(at::kHalf), additive.to(at::kBFloat16), keep.expand_as(keep)}) {
      for (bool causal : {true, false}) {
        AttentionOptions o;
        o.attn_mask = mask;
        o.is_causal = causal;
        std::ostringstream what;
        what << mask.scalar_type() << " " << mask.sizes() << " causal " << causal;
        expect_attends(cache, q, o, 1e-5, what.str());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Keys, Masks, ::testing::Values(9, 40, 150),
                         [](const auto& p) { return "K" + std::to_string(p.param); });

TEST(Attention, MasksOfForwardCoverTheCacheAndTheNewTokens) {
  for (int64_t prefix : {0, 20, 60}) {
    KVCache cache(options_of(2, 16, 16, 4, 0));
    if (prefix > 0) cache.append(randn({2, 2, prefix, 16}, 211), randn({2, 2, prefix, 16}, 212));
    const at::Tensor k = randn({2, 2, 5, 16}, 213), v = randn({2, 2, 5, 16}, 214), q = randn({2, 4, 5, 16}, 215);
    AttentionOptions o;
    o.attn_mask = randn({2, 4, 5, prefix + 5}, 216) > -0.7;
    const auto [kd, vd] = cache.dequantize();
    const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2), o) : reference(q, k, v, o);
    expect_near(cache.forward(q, k, v, o), want.out, 1e-5, std::to_string(prefix));
  }
}

TEST(Attention, RowsThatSeeNothingGiveZero) {
  KVCache cache(options_of(2, 16, 16, 4, 0));
  cache.append(randn({1, 2, 60, 16}, 221), randn({1, 2, 60, 16}, 222));
  at::Tensor keep = at::ones({2, 60}, at::kBool);
  keep[0].fill_(false);
  const at::Tensor additive = at::zeros({2, 60}).masked_fill(keep.logical_not(), -INFINITY);
  for (const at::Tensor& mask : {keep, additive}) {
    AttentionOptions o;
    o.attn_mask = mask;
    const auto [out, lse] = cache.attend_with_lse(randn({1, 4, 2, 16}, 223), o);
    EXPECT_EQ(out.select(2, 0).abs().max().item<double>(), 0.0);
    EXPECT_TRUE((lse.select(2, 0) == -INFINITY).all().item<bool>());
    EXPECT_GT(out.select(2, 1).abs().max().item<double>(), 0.0);
    o.sinks = at::ones({4});
    EXPECT_EQ(cache.attend(randn({1, 4, 2, 16}, 223), o).select(2, 0).abs().max().item<double>(), 0.0);
    EXPECT_TRUE(
        (std::get<1>(cache.attend_with_lse(randn({1, 4, 2, 16}, 223), o)).select(2, 0) == 1.0).all().item<bool>());
  }
}

TEST(Attention, SoftcapWindowSinksAlibiAndScale) {
  KVCache cache(options_of(2, 32, 16, 8, 4));
  cache.append(randn({2, 2, 150, 32}, 231), randn({2, 2, 150, 32}, 232));
  std::mt19937 rng(1);
  for (int i = 0; i < 150; i++) {
    AttentionOptions o;
    if (rng() % 2 == 0) o.softcap = 0.5 + static_cast<double>(rng() % 30);
    if (rng() % 2 == 0) o.window = 1 + static_cast<int64_t>(rng() % (rng() % 2 == 0 ? 8 : 160));
    if (rng() % 2 == 0) o.sinks = randn({4}, rng());
    if (rng() % 2 == 0) o.alibi_slopes = (rng() % 2 == 0 ? randn({4}, rng()) : randn({2, 4}, rng())).abs() * 0.1;
    if (rng() % 2 == 0) o.scale = 0.05 + 0.01 * static_cast<double>(rng() % 30);
    if (rng() % 4 == 0) o.attn_mask = randn({2, 4, 1, 150}, rng()) > -0.5;
    o.is_causal = rng() % 4 != 0;
    const int64_t rows = 1 + static_cast<int64_t>(rng() % 5);
    std::ostringstream what;
    what << "softcap " << o.softcap << " window " << o.window << " sinks " << o.sinks.has_value() << " alibi "
         << o.alibi_slopes.has_value() << " causal " << o.is_causal << " rows " << rows;
    expect_attends(cache, randn({2, 4, rows, 32}, rng()), o, 1e-5, what.str());
  }
}

TEST(Attention, OptionsHoldForNewTokensToo) {
  std::mt19937 rng(2);
  for (int i = 0; i < 60; i++) {
    const int64_t prefix = static_cast<int64_t>(rng() % 3) * 37, count = 1 + static_cast<int64_t>(rng() % 20);
    KVCache cache(options_of(2, 24, 16, 8, 4));
    if (prefix > 0) cache.append(randn({2, 2, prefix, 24}, rng()), randn({2, 2, prefix, 24}, rng()));
    AttentionOptions o;
    if (rng() % 2 == 0) o.softcap = 3.0;
    if (rng() % 2 == 0) o.window = 1 + static_cast<int64_t>(rng() % 30);
    if (rng() % 2 == 0) o.sinks = randn({4}, rng());
    if (rng() % 2 == 0) o.alibi_slopes = randn({2, 4}, rng()).abs() * 0.1;
    o.is_causal = rng() % 3 != 0;
    const at::Tensor k = randn({2, 2, count, 24}, rng()), v = randn({2, 2, count, 24}, rng()),
                     q = randn({2, 4, count, 24}, rng());
    const auto [kd, vd] = cache.dequantize();
    const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2), o) : reference(q, k, v, o);
    expect_near(cache.forward(q, k, v, o), want.out, 1e-5, std::to_string(prefix) + " + " + std::to_string(count));
  }
}

// C10 d
TEST(Attention, ALearnedSinkJoinsTheDenominator) {
  for (int64_t tokens : {3, 48}) {
    KVCache cache(options_of(1, 16, 16, 0, 0));
    cache.append(at::zeros({1, 1, tokens, 16}), at::ones({1, 1, tokens, 16}));
    AttentionOptions o;
    o.sinks = at::zeros({2});
    const double want = static_cast<double>(tokens) / static_cast<double>(tokens + 1);
    EXPECT_LE(max_difference(cache.attend(at::zeros({1, 2, 1, 16}), o), at::full({1, 2, 1, 16}, want)), 1e-6);
  }
}

// ---------------------------------------------------------------------------------------------- ragged rows

TEST(Attention, RaggedRowsEqualRowsOfTheirOwn) {
  for (auto type : {at::kFloat, at::kBFloat16}) {
    const CacheOptions o = options_of(2, 24, 16, 8, 4);
    KVCache cache(o);
    std::vector<std::unique_ptr<KVCache>> alone;
    for (int b = 0; b < 4; b++) alone.push_back(std::make_unique<KVCache>(o));
    std::mt19937 rng(3);
    for (int step = 0; step < 30; step++) {
      const int64_t width = step % 5 == 0 ? 40 : 3;
      at::Tensor k = randn({4, 2, width, 24}, rng(), type), v = randn({4, 2, width, 24}, rng(), type);
      at::Tensor q = randn({4, 4, width, 24}, rng(), type);
      std::vector<int64_t> counts;
      for (int64_t b = 0; b < 4; b++) {
        const int64_t count = step == 0 && b == 1 ? 0 : static_cast<int64_t>(rng() % static_cast<uint64_t>(width + 1));
        counts.push_back(count);
        for (const at::Tensor& t : {q, k, v}) t[b].narrow(1, count, width - count).fill_(kNan);
      }
      const at::Tensor out = cache.forward(q, k, v, {}, longs(counts));
      ASSERT_FALSE(out.isnan().any().item<bool>()) << "padding was read";
      for (int64_t b = 0; b < 4; b++) {
        const int64_t n = counts[static_cast<size_t>(b)];
        EXPECT_TRUE((out[b].narrow(1, n, width - n) == 0).all().item<bool>());
        // As wide as the batch, so that both run the same number of query rows.
        const auto mine = [&](const at::Tensor& t) { return t.narrow(0, b, 1); };
        KVCache& row = *alone[static_cast<size_t>(b)];
        const at::Tensor want = row.forward(mine(q), mine(k), mine(v), {}, longs({n}));
        ASSERT_TRUE(same_bits(out[b], want[0])) << "step " << step << " row " << b;
      }
      const at::Tensor q1 = randn({4, 4, 1, 24}, rng(), type);
      const at::Tensor attended = cache.attend(q1);
      expect_near(attended, reference(q1, cache).out, type == at::kFloat ? 1e-5 : 2e-2);
      for (int64_t b = 0; b < 4; b++) {
        ASSERT_TRUE(same_bits(attended[b], alone[static_cast<size_t>(b)]->attend(q1.narrow(0, b, 1))[0]));
      }
    }
    EXPECT_TRUE(cache.lengths().min().item<int64_t>() != cache.length());
  }
}

// How far a batch is padded depends on its other rows, and must not show in a row's bits.
TEST(Attention, PaddingDecidesNothing) {
  const at::Tensor k = randn({1, 2, 1500, 64}, 71), v = randn({1, 2, 1500, 64}, 72);
  const at::Tensor q = randn({1, 8, 64, 64}, 73), nk = randn({1, 2, 64, 64}, 74), nv = randn({1, 2, 64, 64}, 75);
  for (const int64_t window : {0, 700}) {
    for (const int64_t count : {1, 5, 8}) {
      AttentionOptions o;
      o.window = window;
      at::Tensor first;
      for (const int64_t padded : {8, 9, 33, 64}) {
        KVCache cache(2, 64);
        cache.append(k, v);
        const at::Tensor out =
            cache.forward(q.narrow(2, 0, padded), nk.narrow(2, 0, padded), nv.narrow(2, 0, padded), o, longs({count}));
        if (!first.defined()) first = out.narrow(2, 0, count);
        EXPECT_TRUE(same_bits(out.narrow(2, 0, count), first))
            << padded << " of which " << count << ", window " << window;
        EXPECT_EQ(out.narrow(2, count, padded - count).abs().sum().item<float>(), 0);
      }
    }
  }
}

TEST(Attention, MasksOfRaggedRowsCountKeysFromTheFirst) {
  KVCache cache(options_of(2, 16, 16, 4, 0));
  cache.append(randn({3, 2, 70, 16}, 241), randn({3, 2, 70, 16}, 242), longs({70, 9, 33}));
  for (int64_t rows : {1, 2}) {
    AttentionOptions o;
    o.attn_mask = randn({3, 4, rows, 70}, 243) > -0.5;
    expect_attends(cache, randn({3, 4, rows, 16}, 244), o);
    o.attn_mask = randn({3, 4, rows, 70}, 245);
    o.window = 20;
    expect_attends(cache, randn({3, 4, rows, 16}, 244), o);
  }
}

// ---------------------------------------------------------------------------------------------- independence

// C25 b
TEST(Attention, ThreadCountChangesNothing) {
  for (const auto& [batch, kv_heads] : {std::pair<int64_t, int64_t>{1, 1}, {2, 6}}) {
    for (const char* precision : {"exact", "fast"}) {
      CacheOptions o = options_of(kv_heads, 64, 32, 32, 4);
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
        KVCache cache(options_of(2, 64, 32, 32, 4));
        const at::Tensor got = cache.forward(q, k, v);
        if (!want.defined()) want = got;
        EXPECT_TRUE(same_bits(got, want)) << count << " threads " << type;
      }
    }
  }
}

TEST(Attention, OtherRowsOfTheBatchChangeNothing) {
  for (const char* precision : {"exact", "fast"}) {
    CacheOptions o = options_of(2, 64, 32, 32, 4);
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
  CacheOptions o = options_of(2, 64, 32, 40, 4);
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
  KVCache cache(options_of(2, 16, 16, 4, 0));
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
    KVCache cache(options_of(2, 32, 16, 8, 4));
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
  KVCache cache(options_of(2, 16));
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
    CacheOptions o = options_of(2, 32, 16, 8, 0);
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
  KVCache automatic(options_of(2, 32)), by_hand(options_of(2, 32)), started(options_of(2, 32));
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
  KVCache plain(options_of(2, 32)), graph(options_of(2, 32));
  EXPECT_LE(max_difference(graph.forward(qg, kg, vg), plain.forward(q, k, v)), 1e-6);
  EXPECT_TRUE(same_state(graph.state(), plain.state()));
  const at::Tensor out = graph.forward(qg, kg, vg);
  EXPECT_LE(max_difference(out, plain.forward(q, k, v)), 1e-6);
  expect_error([&] { out.sum().backward(); }, {"kivi::cache_attention"});
}

}  // namespace
}  // namespace kivi::test
