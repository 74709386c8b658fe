// Attention of a few query rows over exact tokens: the first tokens, the window and the new ones, in float32, float16
// or bfloat16. fp32 arithmetic for both precisions; the rules and the softmax are those of vector_rows-inl.h.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_EXACT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_EXACT_INL_H_
#undef KIVI_CPU_VECTOR_EXACT_INL_H_
#else
#define KIVI_CPU_VECTOR_EXACT_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/vector_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// A run of tokens, channels contiguous.
struct ExactRun {
  const void* k;
  const void* v;
  int64_t k_token_stride, v_token_stride;  // elements
  int64_t first_key, count;
};

template <int kRows, Element kType>
struct ExactKeys {
  Rows<kRows>* rows;
  int64_t k_channels, v_channels;  // D, Dv

  void run(const ExactRun& all) {
    // Chunks are counted from the start of the run, so that a row's sums do not depend on what the other rows see.
    const int64_t unseen = std::max<int64_t>(rows->any_begin - all.first_key, 0);
    const int64_t begin = all.first_key + unseen / kChunk * kChunk;
    const int64_t end = std::min(all.first_key + all.count, rows->any_end);
    for (int64_t first = begin; first < end; first += kChunk) {
      const int64_t count = std::min(kChunk, end - first);
      const int64_t skip = first - all.first_key;
      scores(all, skip, count);
      const int64_t padded = round_up(count, kLine);
      const bool sees_all = rows->sees_all(first, count);
      if (!sees_all) rows->adjust_scores(first, count);
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        std::fill(rows->score + r * kChunk + count, rows->score + r * kChunk + padded, -kInfinity);
      }
      if (sees_all && padded == count) {
        rows->template softmax<false>(padded);
      } else {
        rows->template softmax<true>(padded);
      }
      if (sees_all) {
        values<false>(all.v, skip * all.v_token_stride, all.v_token_stride, count);
      } else {
        values<true>(all.v, skip * all.v_token_stride, all.v_token_stride, count);
      }
    }
  }

 private:
  static constexpr int64_t kAhead = 8;  // tokens whose keys are fetched before they are needed
  // Tokens side by side, and rows: AVX2 has room for 8 sums only.
  static constexpr int kTokens = 4;
  static constexpr int kRowsAtOnce = kLanes == 8 ? (kRows < 2 ? kRows : 2) : (kRows < 4 ? kRows : 4);

  static HWY_INLINE VF load(const void* array, int64_t at, int64_t left) {
    return left >= kLanes ? load_as_float<kType>(array, at) : load_tail<kType>(array, at, left);
  }

  // Scores of tokens [first, first + count) of the run. Fetches the keys that follow and the values of these tokens:
  // cold, exact tokens are the most bytes per token, and what the hardware fetches ahead reaches a third of the
  // bandwidth.
  void scores(const ExactRun& all, int64_t first, int64_t count) {
    const int64_t stride = all.k_token_stride, at = first * stride;
    int64_t t = 0;
    for (; t + kTokens <= count; t += kTokens) {
      if (first + t + kAhead + kTokens <= all.count) fetch_rows(all.k, at + (t + kAhead) * stride, stride, k_channels);
      fetch_rows(all.v, (first + t) * all.v_token_stride, all.v_token_stride, v_channels);
      score_tokens<kTokens>(all.k, at + t * stride, stride, t);
    }
    for (; t < count; t++) score_tokens<1>(all.k, at + t * stride, stride, t);
  }

  static HWY_INLINE void fetch_rows(const void* array, int64_t at, int64_t stride, int64_t channels) {
    const uint8_t* row = static_cast<const uint8_t*>(array) + at * element_bytes(kType);
    for (int i = 0; i < kTokens; i++, row += stride * element_bytes(kType)) {
      for (int64_t b = 0; b < channels * element_bytes(kType); b += kLineBytes) __builtin_prefetch(row + b, 0, 2);
    }
  }

  template <int kCount>
  HWY_INLINE void score_tokens(const void* k, int64_t at, int64_t stride, int64_t t) {
    score_rows<kCount, kRowsAtOnce>(k, at, stride, t, 0);
    if constexpr (kRows > kRowsAtOnce) {
      int r = kRowsAtOnce;
      for (; r + kRowsAtOnce <= kRows; r += kRowsAtOnce) score_rows<kCount, kRowsAtOnce>(k, at, stride, t, r);
      for (; r < kRows; r++) score_rows<kCount, 1>(k, at, stride, t, r);
    }
  }

  // Scores of kCount tokens for kSome rows from `first_row` on.
  template <int kCount, int kSome>
  HWY_INLINE void score_rows(const void* k, int64_t at, int64_t stride, int64_t t, int first_row) {
    VF sum[kSome][kCount];
    KIVI_UNROLL
    for (int r = 0; r < kSome; r++) {
      KIVI_UNROLL
      for (int i = 0; i < kCount; i++) sum[r][i] = hn::Zero(DF());
    }
    const float* q = rows->q + first_row * rows->k_padded;
    for (int64_t d = 0; d < k_channels; d += kLanes) {
      VF key[kCount];
      KIVI_UNROLL
      for (int i = 0; i < kCount; i++) key[i] = load(k, at + i * stride + d, k_channels - d);
      KIVI_UNROLL
      for (int r = 0; r < kSome; r++) {
        const VF x = load_float(q + r * rows->k_padded + d);
        KIVI_UNROLL
        for (int i = 0; i < kCount; i++) sum[r][i] = hn::MulAdd(x, key[i], sum[r][i]);
      }
    }
    KIVI_UNROLL
    for (int r = 0; r < kSome; r++) {
      float* s = rows->score + (first_row + r) * kChunk + t;
      sum_lanes(sum[r], s);
      KIVI_UNROLL
      for (int i = 0; i < kCount; i++) s[i] = plain_nan(s[i]);
    }
  }

  template <bool kMasked>
  void values(const void* v, int64_t at, int64_t stride, int64_t count) {
    int64_t d = 0;
    for (; d + 2 * kLanes <= v_channels; d += 2 * kLanes) add_values<2, kMasked>(v, at + d, stride, count, d);
    for (; d < v_channels; d += kLanes) add_values<1, kMasked>(v, at + d, stride, count, d);
  }

  // kMasked: a token that weighs 0 must not give 0 * NaN.
  template <int kVectors, bool kMasked>
  void add_values(const void* v, int64_t at, int64_t stride, int64_t count, int64_t d) {
    VF sum[kRows][kVectors];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      KIVI_UNROLL
      for (int i = 0; i < kVectors; i++) sum[r][i] = hn::Zero(DF());
    }
    for (int64_t t = 0; t < count; t++) {
      VF value[kVectors];
      KIVI_UNROLL
      for (int i = 0; i < kVectors; i++) value[i] = load(v, at + t * stride + i * kLanes, v_channels - d - i * kLanes);
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        const float weight = rows->score[r * kChunk + t];
        if (kMasked && weight == 0.0f) continue;
        KIVI_UNROLL
        for (int i = 0; i < kVectors; i++) {
          sum[r][i] = hn::MulAdd(value[i], splat(weight), sum[r][i]);
          KIVI_KEEP(sum[r][i]);
        }
      }
    }
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      const VF factor = splat(rows->factor[r]);
      float* a = rows->acc + r * rows->v_channels + d;
      KIVI_UNROLL
      for (int i = 0; i < kVectors; i++) {
        store_float(hn::MulAdd(sum[r][i], factor, load_float(a + i * kLanes)), a + i * kLanes);
      }
    }
  }
};

// The exact tokens of one row of the batch and one kv head.
template <int kRows>
HWY_NOINLINE void exact_keys(const AttentionParams& p, const AttentionItem& item, const KeyRanges& ranges,
                             Rows<kRows>& rows) {
  const Format& f = p.format;
  const auto attend = [&](Element type, const ExactRun& run) HWY_ATTR {
    if (run.count <= 0 || !rows.sees_any(run.first_key, run.count)) return;
    switch (type) {
      case Element::kFloat32:
        return ExactKeys<kRows, Element::kFloat32>{&rows, f.head_dim, f.value_head_dim}.run(run);
      case Element::kFloat16:
        return ExactKeys<kRows, Element::kFloat16>{&rows, f.head_dim, f.value_head_dim}.run(run);
      case Element::kBFloat16:
        return ExactKeys<kRows, Element::kBFloat16>{&rows, f.head_dim, f.value_head_dim}.run(run);
    }
  };
  // Token `slot` of one of the two contiguous stores of `tokens` tokens per head.
  const auto at = [&](const void* array, int64_t tokens, int64_t slot, int64_t channels) HWY_ATTR {
    const int64_t token = (item.batch * f.num_kv_heads + item.kv_head) * tokens + slot;
    return static_cast<const uint8_t*>(array) + token * channels * element_bytes(p.cache_type);
  };
  if (ranges.sink > 0) {
    attend(p.cache_type, {at(p.sink_k, f.sink_length, 0, f.head_dim), at(p.sink_v, f.sink_length, 0, f.value_head_dim),
                          f.head_dim, f.value_head_dim, 0, ranges.sink});
  }
  const int64_t capacity = window_capacity(f);
  for (int64_t token = ranges.window_begin; token < ranges.cached;) {  // at most two runs of the ring
    const int64_t slot = (token - f.sink_length) % capacity;
    const int64_t count = std::min(ranges.cached - token, capacity - slot);
    attend(p.cache_type, {at(p.window_k, capacity, slot, f.head_dim), at(p.window_v, capacity, slot, f.value_head_dim),
                          f.head_dim, f.value_head_dim, token, count});
    token += count;
  }
  if (ranges.fresh > 0) {
    const int64_t size = element_bytes(p.new_type);
    const int64_t k = item.batch * p.new_k_strides[0] + item.kv_head * p.new_k_strides[1];
    const int64_t v = item.batch * p.new_v_strides[0] + item.kv_head * p.new_v_strides[1];
    attend(p.new_type,
           {static_cast<const uint8_t*>(p.new_k) + k * size, static_cast<const uint8_t*>(p.new_v) + v * size,
            p.new_k_strides[2], p.new_v_strides[2], ranges.cached, ranges.fresh});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
