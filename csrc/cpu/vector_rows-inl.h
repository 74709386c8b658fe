// A few query rows on their way past the keys: what each may see, its softmax so far, and the rules that change a
// score (softcap, ALiBi, mask, limits). Used by the kernels for quantised pages and for exact keys.
// Scores and maxima are in log2 units: natural score times log2(e).
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_ROWS_INL_H_
#undef KIVI_CPU_VECTOR_ROWS_INL_H_
#else
#define KIVI_CPU_VECTOR_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/plan.h"
#include "cpu/vector_rotate-inl.h"
#include "cpu/vector_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kChunk = kPageTokens;  // keys between two updates of the softmax
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kQuietNaN = std::numeric_limits<float>::quiet_NaN();

// NaN with any payload as the NaN that exp2_inplace keeps.
HWY_INLINE float plain_nan(float x) { return x == x ? x : kQuietNaN; }

template <int kRows>
struct Rows {
  const AttentionParams* params = nullptr;
  // In the thread's scratch buffer.
  float* q = nullptr;         // [kRows][k_padded]: q * scale * log2(e), padded with 0
  float* acc = nullptr;       // [kRows][v_channels]: sum of 2^(score - max) * (value without zero)
  float* zero_acc = nullptr;  // [v_groups][kRows][kLanes]: sum of 2^(score - max) * zero, by lane
  float* score = nullptr;     // [kRows][kChunk]: scores of the chunk, then 2^(score - maximum of the chunk)
  int64_t k_padded = 0;       // k_channels rounded up to 32
  int64_t v_channels = 0, v_groups = 0;

  alignas(64) float sum[kRows][kLanes];  // sum of 2^(score - max), by lane
  // Padded to whole vectors; max with -inf.
  static constexpr int kPaddedRows = (kRows + kLanes - 1) / kLanes * kLanes;
  alignas(64) float max[kPaddedRows];
  alignas(64) float factor[kPaddedRows];  // 2^(maximum of the chunk - max)

  SeenKeys seen[kRows];
  int64_t position[kRows];
  float slope[kRows];  // ALiBi, times log2(e)
  const uint8_t* mask[kRows];
  int64_t any_begin = 0, any_end = 0;  // keys that some row may see
  int64_t all_begin = 0, all_end = 0;  // keys that all rows may see
  bool changes_scores = false;         // softcap, ALiBi or mask

  // Takes rows [first, first + kRows) of the item.
  HWY_NOINLINE void begin(const AttentionParams& p, const AttentionItem& item, const KeyRanges& ranges, int64_t first) {
    params = &p;
    changes_scores = p.softcap > 0 || p.alibi_slopes != nullptr || p.mask_type != MaskType::kNone;
    std::fill(max, max + kPaddedRows, -kInfinity);
    any_begin = all_end = INT64_MAX;
    any_end = all_begin = 0;
    for (int r = 0; r < kRows; r++) {
      const QueryRow row = query_row(p, item, first + r);
      const bool exists = row.query < ranges.rows;
      position[r] = query_position(ranges, row.query);
      seen[r] = exists ? seen_keys(p, ranges, position[r]) : SeenKeys{0, 0};
      if (seen[r].begin < seen[r].end) {
        any_begin = std::min(any_begin, seen[r].begin);
        any_end = std::max(any_end, seen[r].end);
      }
      all_begin = std::max(all_begin, seen[r].begin);
      all_end = std::min(all_end, seen[r].end);
      slope[r] =
          p.alibi_slopes != nullptr ? p.alibi_slopes[item.batch * p.alibi_batch_stride + row.head] * kLog2E : 0.0f;
      mask[r] = nullptr;
      if (p.mask_type != MaskType::kNone) {
        const int64_t size = p.mask_type == MaskType::kBool ? 1 : static_cast<int64_t>(sizeof(float));
        const int64_t at =
            item.batch * p.mask_strides[0] + row.head * p.mask_strides[1] + row.query * p.mask_strides[2];
        mask[r] = static_cast<const uint8_t*>(p.mask) + at * size;
      }
      const int64_t at = item.batch * p.q_batch_stride + row.head * p.q_head_stride + row.query * p.q_row_stride;
      load_query(r, at, exists);
      std::memset(sum[r], 0, sizeof sum[r]);
    }
    any_begin = std::min(any_begin, any_end);
    std::memset(acc, 0, static_cast<size_t>(kRows * v_channels) * sizeof(float));
    std::memset(zero_acc, 0, static_cast<size_t>(kRows * v_groups) * kLanes * sizeof(float));
  }

  // Some row sees some of the keys [first, first + count).
  bool sees_any(int64_t first, int64_t count) const { return first < any_end && first + count > any_begin; }
  // All rows see all of them, and their scores are final.
  bool sees_all(int64_t first, int64_t count) const {
    return !changes_scores && first >= all_begin && first + count <= all_end;
  }

  // Applies softcap, ALiBi, mask and limits to the scores of keys [first, first + count). -inf: not seen.
  void adjust_scores(int64_t first, int64_t count) {
    for (int r = 0; r < kRows; r++) {
      float* s = score + r * kChunk;
      if (params->softcap > 0) cap_scores(s, count);
      if (params->alibi_slopes != nullptr) {
        for (int64_t t = 0; t < count; t++) s[t] += slope[r] * static_cast<float>(first + t - position[r]);
      }
      if (params->mask_type == MaskType::kBool) {
        const uint8_t* m = mask[r] + first * params->mask_strides[3];
        for (int64_t t = 0; t < count; t++) {
          if (m[t * params->mask_strides[3]] == 0) s[t] = -kInfinity;
        }
      } else if (params->mask_type == MaskType::kFloat32) {
        const auto* m = reinterpret_cast<const float*>(mask[r]) + first * params->mask_strides[3];
        for (int64_t t = 0; t < count; t++) {
          const float add = m[t * params->mask_strides[3]];
          s[t] = add == -kInfinity ? -kInfinity : plain_nan(s[t] + add * kLog2E);
        }
      }
      for (int64_t t = 0; t < std::min(count, seen[r].begin - first); t++) s[t] = -kInfinity;
      for (int64_t t = std::max<int64_t>(0, seen[r].end - first); t < count; t++) s[t] = -kInfinity;
    }
  }

  // Scores of the chunk to weights p = 2^(score - maximum of the chunk), which keeps small chunks precise; the sums so
  // far are brought to the new maximum. `count` is a multiple of 16. kMasked: scores may be -inf, and weigh exactly 0.
  template <bool kMasked>
  HWY_NOINLINE void softmax(int64_t count) {
    float* const s = score;
    VF top[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) top[r] = splat(-kInfinity);
    for (int64_t t = 0; t < count; t += kLanes) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) top[r] = max_number(load_float(s + r * kChunk + t), top[r]);
    }
    alignas(64) float chunk_max[kPaddedRows];
    std::fill(chunk_max + kRows, chunk_max + kPaddedRows, -kInfinity);
    max_lanes(top, chunk_max);
    VF total[kRows];
    for (int r = 0; r < kRows; r++) {
      const VF reference = splat(chunk_max[r] > -kInfinity ? chunk_max[r] : 0.0f);
      total[r] = hn::Zero(DF());
      int64_t t = 0;
      for (; t + 4 * kLanes <= count; t += 4 * kLanes) weigh<4, kMasked>(s + r * kChunk + t, reference, total[r]);
      for (; t < count; t += kLanes) weigh<1, kMasked>(s + r * kChunk + t, reference, total[r]);
    }
    update_max(chunk_max);
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) store_float(hn::MulAdd(splat(factor[r]), total[r], load_float(sum[r])), sum[r]);
  }

  // What the pages gave comes back from the rotation of their values; before the exact keys, which are not rotated.
  HWY_NOINLINE void rotate_back() {
    float* rows[kRows];
    for (int r = 0; r < kRows; r++) rows[r] = acc + r * v_channels;
    add_zeros(rows);
    std::memset(zero_acc, 0, static_cast<size_t>(kRows * v_groups) * kLanes * sizeof(float));
    for (int r = 0; r < kRows; r++) rotate(rows[r], params->format.value_head_dim, /*back=*/true);
  }

  // The end: out[r] = acc and zeros together, [v_channels] (may be acc itself); total[r] = the sum.
  HWY_NOINLINE void finish(float* const (&out)[kRows], float (&total)[kRows]) const {
    add_zeros(out);
    VF lanes[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) lanes[r] = load_float(sum[r]);
    sum_lanes(lanes, total);
  }

 private:
  HWY_INLINE void add_zeros(float* const (&out)[kRows]) const {
    const int64_t group = params->layout.v_group, channels = v_channels;
    for (int64_t g = 0; g < v_groups; g++) {
      VF lanes[kRows];
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) lanes[r] = load_float(zero_acc + (g * kRows + r) * kLanes);
      float zero[kRows];
      sum_lanes(lanes, zero);
      const int64_t end = std::min(channels, (g + 1) * group);
      for (int r = 0; r < kRows; r++) {
        const float* const a = acc + r * channels;
        const VF z = splat(zero[r]);
        for (int64_t d = g * group; d < end; d += kLanes) store_float(hn::Add(load_float(a + d), z), out[r] + d);
      }
    }
  }

  // A row with NaN or Inf becomes NaN as a whole, so that no part of it has to be looked after.
  void load_query(int r, int64_t at, bool exists) {
    float* row = q + r * k_padded;
    std::memset(row, 0, static_cast<size_t>(k_padded) * sizeof(float));
    if (!exists) return;
    switch (params->q_type) {
      case Element::kFloat32:
        return load_query_as<Element::kFloat32>(row, at);
      case Element::kFloat16:
        return load_query_as<Element::kFloat16>(row, at);
      case Element::kBFloat16:
        return load_query_as<Element::kBFloat16>(row, at);
    }
  }

  template <Element kType>
  void load_query_as(float* row, int64_t at) {
    const int64_t channels = params->format.head_dim;
    const VF scale = splat(params->scale * kLog2E);
    VF bad = hn::Zero(DF());
    for (int64_t d = 0; d < channels; d += kLanes) {
      const int64_t left = channels - d;
      const VF x = hn::Mul(
          scale, left >= kLanes ? load_as_float<kType>(params->q, at + d) : load_tail<kType>(params->q, at + d, left));
      bad = hn::MulAdd(x, hn::Zero(DF()), bad);
      store_float(x, row + d);
    }
    const float sign = hn::GetLane(hn::SumOfLanes(DF(), bad));
    if (sign != 0.0f) std::fill(row, row + channels, kQuietNaN);
  }

  // x -> softcap * tanh(x / softcap). tanh by a series near 0, where (2^y - 1) / (2^y + 1) loses digits.
  void cap_scores(float* s, int64_t count) {
    const VF to_unit = splat(kLn2 / params->softcap), from_unit = splat(params->softcap * kLog2E);
    for (int64_t t = 0; t < count; t += kLanes) {
      const VF x = hn::Mul(load_float(s + t), to_unit);
      const VF xx = hn::Mul(x, x);
      VF series = splat(-1382.0f / 155925.0f);
      series = hn::MulAdd(series, xx, splat(62.0f / 2835.0f));
      series = hn::MulAdd(series, xx, splat(-17.0f / 315.0f));
      series = hn::MulAdd(series, xx, splat(2.0f / 15.0f));
      series = hn::MulAdd(series, xx, splat(-1.0f / 3.0f));
      series = hn::MulAdd(hn::Mul(series, xx), x, x);
      VF power[1] = {hn::Min(hn::Mul(hn::Abs(x), splat(2.0f * kLog2E)), splat(60.0f))};
      exp2_inplace(power);
      const VF one = splat(1.0f);
      const VF far = hn::CopySign(hn::Div(hn::Sub(power[0], one), hn::Add(power[0], one)), x);
      const VF capped = hn::IfThenElse(hn::Gt(hn::Abs(x), splat(0.25f)), far, series);
      store_float(hn::Mul(capped, from_unit), s + t);
    }
  }

  // max, factor, and the sums so far on the new scale.
  void update_max(const float* chunk_max) {
    alignas(64) float shrink[kPaddedRows];
    bool grows = false;
    const VF none = splat(-kInfinity);
    for (int r = 0; r < kPaddedRows; r += kLanes) {
      const VF now = load_float(chunk_max + r), before = load_float(max + r);
      const VF after = hn::Max(now, before);
      const auto sees = hn::Gt(now, none), saw = hn::Gt(before, none);
      VF power[2] = {hn::IfThenElseZero(sees, hn::Sub(now, after)), hn::IfThenElseZero(saw, hn::Sub(before, after))};
      exp2_inplace(power);
      store_float(after, max + r);
      store_float(hn::IfThenElseZero(sees, power[0]), factor + r);
      store_float(power[1], shrink + r);
      grows |= !hn::AllFalse(DF(), hn::And(saw, hn::Gt(after, before)));
    }
    if (!grows) return;
    for (int r = 0; r < kRows; r++) shrink_row(r, splat(shrink[r]));
  }

  void shrink_row(int r, VF by) {
    store_float(hn::Mul(by, load_float(sum[r])), sum[r]);
    float* const begin = acc + r * v_channels;
    const int64_t channels = v_channels, groups = v_groups;
    for (int64_t d = 0; d < channels; d += kLanes) store_float(hn::Mul(by, load_float(begin + d)), begin + d);
    float* const zeros = zero_acc + r * kLanes;
    for (int64_t g = 0; g < groups; g++) {
      float* z = zeros + g * kRows * kLanes;
      store_float(hn::Mul(by, load_float(z)), z);
    }
  }

  template <int kVectors, bool kMasked>
  static HWY_INLINE void weigh(float* s, VF reference, VF& total) {
    VF x[kVectors];
    KIVI_UNROLL
    for (int i = 0; i < kVectors; i++) x[i] = hn::Sub(load_float(s + i * kLanes), reference);
    if constexpr (kMasked) {
      VF p[kVectors];
      KIVI_UNROLL
      for (int i = 0; i < kVectors; i++) p[i] = x[i];
      exp2_inplace(p);
      KIVI_UNROLL
      for (int i = 0; i < kVectors; i++) x[i] = hn::IfThenZeroElse(hn::Eq(x[i], splat(-kInfinity)), p[i]);
    } else {
      exp2_inplace(x);
    }
    KIVI_UNROLL
    for (int i = 0; i < kVectors; i++) {
      store_float(x[i], s + i * kLanes);
      total = hn::Add(total, x[i]);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
