// What the tests of attention share: a softmax in double precision, written with at:: calls, over what the cache gives
// back and the new tokens; inputs; limits.
//
// "exact" must be within 1e-5 for outputs of order 1. "fast" rounds q * scale to int16 (up to head size 256): a score
// is off by some sqrt(D) * max|q * scale| * max code / 32767, and the output by that times the size of the values.
#pragma once

#include <cmath>

#include "tests/limits.h"
#include "tests/ops/support.h"

namespace kivi::test {

inline CacheOptions exact_options(int64_t heads, int64_t dim, int64_t group = 16, int64_t residual = 16,
                                  int64_t sink = 4) {
  CacheOptions o = options_of(heads, dim, group, residual, sink);
  o.precision = "exact";
  return o;
}

struct Result {
  at::Tensor out, lse;  // double
};

// One row of the batch. q [Hq, Lq, D], k [Hkv, n, D], v [Hkv, n, Dv]; the last query stands at the last key. `mask`
// [Hq, Lq, n] or undefined: added.
inline Result reference_row(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
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
inline Result reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& o = {},
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

inline std::vector<int64_t> lengths_of(const KVCache& cache) {
  const at::Tensor n = cache.lengths();
  return {n.const_data_ptr<int64_t>(), n.const_data_ptr<int64_t>() + n.numel()};
}

// What the cache holds is what attends.
inline Result reference(const at::Tensor& q, const KVCache& cache, const AttentionOptions& o = {}) {
  const auto [k, v] = cache.dequantize();
  return reference(q, k, v, o, lengths_of(cache));
}

inline void expect_near(const at::Tensor& got, const at::Tensor& want, double limit, const std::string& what = "") {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const at::Tensor g = got.to(at::kDouble);
  ASSERT_FALSE(g.isnan().any().item<bool>()) << what << ": NaN";
  const at::Tensor infinite = want.isinf();
  ASSERT_TRUE(at::equal(g.masked_select(infinite), want.masked_select(infinite))) << what;
  const at::Tensor difference = (g - want).masked_select(infinite.logical_not()).abs();
  if (difference.numel() > 0) EXPECT_LE(difference.max().item<double>(), limit) << what;
}

inline void expect_attends(const KVCache& cache, const at::Tensor& q, const AttentionOptions& o = {},
                           double limit = limits::kExact, const std::string& what = "") {
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
inline at::Tensor outlier_keys(at::IntArrayRef sizes, uint64_t seed) {
  at::Tensor k = randn(sizes, seed);
  for (int64_t d = 0, i = 0; i < 8 && d < k.size(3); i++, d += std::max<int64_t>(1, k.size(3) / 8)) {
    at::Tensor channel = k.select(3, d);
    channel.add_(0.5).mul_(i % 2 == 0 ? 5.0 : 30.0);
  }
  return k;
}

// Queries of length 1, so that outlier channels do not make the softmax a choice of one key; `spread` scales them.
inline at::Tensor unit_queries(at::IntArrayRef sizes, uint64_t seed, double spread = 1.0) {
  const at::Tensor q = randn(sizes, seed);
  return q / q.norm(2, {-1}, true) * spread;
}

inline double fast_limit(const KVCache& cache, const at::Tensor& q, const at::Tensor& k, double scale) {
  const double levels = static_cast<double>((int64_t{1} << cache.options().k_bits) - 1);
  // The largest |q * scale * K scale|, channel by channel.
  const at::Tensor range = (k.amax({0, 1, 2}) - k.amin({0, 1, 2})) / levels;
  const double largest = (q.to(at::kFloat).abs().amax({0, 1, 2}) * range).max().item<double>() * scale;
  return limits::fast(cache.options().head_dim, cache.options().k_bits, largest);
}

}  // namespace kivi::test
