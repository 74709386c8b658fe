// Attention of a few query rows over the records of one page, straight from the packed codes. Per record (G tokens)
//   score[t] = c + sum_d q'[d] code[t][d],  q' = q * K scale,  c = q . K zero
//   out[d]  += sum_t w[t] code[t][d] + sum_t p[t] V zero[t],  w = p * V scale,  p = 2^(score - maximum of the page)
// "exact": q' and w are fp32. "fast": both are int16, q' with a factor for each row and page, w with one for each page;
// no result of a row depends on the other rows.
//
// Error of "fast": rounding q' puts a score off by about sqrt(D) * max|q'| * (2^k_bits - 1) / 32767 at most, where
// max|q'| is the largest |q * scale * K scale| of the page in natural units, and an output by that times the size of
// the values; the rounding of w adds 5e-5. The tests allow half of it; kernel_bench prints the largest errors at D =
// 128 (max_error: scores up to about +-4, max_error_wide: +-40). Above D = 256 (3 bits: 146) the amplitude of int16 is
// lowered so that the sums stay below 2^31 (vector_dot16-inl.h).
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_PAGES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_PAGES_INL_H_
#undef KIVI_CPU_VECTOR_PAGES_INL_H_
#else
#define KIVI_CPU_VECTOR_PAGES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/vector_dot16-inl.h"
#include "cpu/vector_dot32-inl.h"
#include "cpu/vector_rows-inl.h"
#include "cpu/vector_scales-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// Factors outside of these limits are not worth having: the products are lost in fp32 anyway.
inline constexpr float kTinyBound = 1e-25f;
inline constexpr float kHugeBound = 1e30f;

// The dot product for a width and a number of rows.
template <int kBits, int kRows, bool kKeys>
DotFunction dot_of_width(bool exact, bool vnni) {
#if HWY_TARGET == HWY_AVX3
  if (exact) {
    if constexpr (Fp32Weights::uses_table(kBits)) {
      return dot_table_lines<kBits, kRows, kKeys>;
    } else {
      return dot_fp32<kBits, kRows, kKeys>;
    }
  }
  if (vnni) return dot_int16<kBits, kRows, kKeys, true>;
#else
  (void)vnni;
  if (exact) return dot_fp32<kBits, kRows, kKeys>;
#endif
  return dot_int16<kBits, kRows, kKeys, false>;
}

template <int kRows, bool kKeys>
DotFunction dot_function(int64_t bits, bool exact, bool vnni) {
  switch (bits) {
    case 1:
      return dot_of_width<1, kRows, kKeys>(exact, vnni);
    case 2:
      return dot_of_width<2, kRows, kKeys>(exact, vnni);
    case 3:
      return dot_of_width<3, kRows, kKeys>(exact, vnni);
    case 4:
      return dot_of_width<4, kRows, kKeys>(exact, vnni);
    default:
      return dot_of_width<8, kRows, kKeys>(exact, vnni);
  }
}

template <int kRows>
struct Pages {
  Rows<kRows>* rows = nullptr;
  const RecordLayout* layout = nullptr;
  int64_t group_size = 0;
  ScaleKind scales = ScaleKind::kHalf;
  ZeroRule v_zeros{2};
  bool exact = false;
  // A run of channels of K that share a width: all of them, or a class.
  struct KeyRun {
    DotFunction dot = nullptr;
    DotShape shape;
    int64_t first = 0, channels = 0;  // whole lines
    int64_t codes = 0;                // offset in the record
    float middle = 0;                 // what dot_fp32 takes off a code
    const float* weight = nullptr;    // fp32_weights
    ZeroRule zeros{2};
  };
  KeyRun k_runs[kMaxKeyClasses];
  int64_t num_k_runs = 1;
  DotFunction v_dot = nullptr;
  DotShape v_shape;
  float amplitude = 0;  // of q'
  float v_middle = 0;
  int64_t v_subs = 1;               // blocks of 16 values of one record in v_values
  int64_t value_floats = 0;         // of k_values and v_values
  const float* v_weight = nullptr;  // fp32_weights
  const float* q = nullptr;         // [kRows][k_padded]: the rows' q, in the order of the record
  // In the thread's scratch buffer.
  float* q_ordered = nullptr;  // [kRows][k_padded], with classes of keys
  float* q_scaled = nullptr;   // [kRows][k_padded]: q on the scale of q' (fast)
  float* scale_max = nullptr;  // [k_padded]
  float* k_values = nullptr;   // [k_padded / 16][kRows][16] q' of one record, fp32 or int16
  float* v_values = nullptr;   // [128 or 256 slots / 16][kRows][16] w of one group of channels

  alignas(64) float from_int[Rows<kRows>::kPaddedRows];  // q' -> q (fast; else 1)
  alignas(16) float c[(kRows + 3) / 4 * 4];
  float from_weight[kRows];  // w -> p, and the factor of the row

  void begin(const AttentionParams& p, const AttentionItem& item, Rows<kRows>* r, bool vnni) {
    rows = r;
    layout = &p.layout;
    const Format& f = p.format;
    group_size = f.group_size;
    scales = scale_kind(layout->scale_bytes);
    v_zeros = ZeroRule(f.v_bits, f.v_symmetric);
    exact = p.exact;
    v_middle = static_cast<float>(code_middle(f.v_bits));
    v_subs = std::max<int64_t>(group_size / kLine, wide_unit(f.v_bits) ? 2 : 1);
    num_k_runs = layout->num_key_classes;
    int32_t least_amplitude = INT16_MAX;
    for (int64_t i = 0; i < num_k_runs; i++)
      begin_keys(layout->key_classes[i], i == 0, vnni, k_runs[i], least_amplitude);
    amplitude = static_cast<float>(least_amplitude);
    order_queries(head_order(p, item.batch, item.kv_head));
    v_dot = dot_function<kRows, false>(f.v_bits, exact, vnni);
    v_shape.units = units_of(f.v_bits, group_size);
    v_shape.word_stride = layout->v_channels / kLine * kLineBytes;
    v_shape.line_strides[0] = v_shape.line_strides[1] = kLineBytes;
    v_shape.run_code_stride = layout->bytes;
    v_shape.run_value_stride = v_subs * kRows * kLine;
    v_shape.high_plane = layout->v_codes[1] - layout->v_codes[0];
    v_weight = fp32_weights(f.v_bits);
    std::fill(from_int, from_int + kRows, 1.0f);
    // Where a unit of 32 values has 16 only, the others are 0.
    const size_t values_bytes = static_cast<size_t>(value_floats) * sizeof(float);
    if (layout->k_channels % 32 != 0 || num_k_runs > 1) std::memset(k_values, 0, values_bytes);
    if (group_size == kLine) std::memset(v_values, 0, values_bytes);
  }

  // The first run writes the scores, the others add to them.
  void begin_keys(const KeyClassLayout& k, bool writes, bool vnni, KeyRun& run, int32_t& least_amplitude) const {
    run.dot = writes ? dot_function<kRows, true>(k.bits, exact, vnni) : dot_function<kRows, false>(k.bits, exact, vnni);
    run.first = k.first;
    run.channels = round_up(k.channels, kLine);
    run.codes = k.codes[0];
    run.middle = static_cast<float>(code_middle(k.bits));
    run.weight = fp32_weights(k.bits);
    run.zeros = ZeroRule(k.bits);
    run.shape.lines = group_size / kLine;
    run.shape.runs = 1;
    run.shape.units = units_of(k.bits, run.channels);
    run.shape.word_stride = kLineBytes;
    for (int plane = 0; plane < 2; plane++) run.shape.line_strides[plane] = k.words[plane] * kLineBytes;
    run.shape.high_plane = k.codes[1] - k.codes[0];
    least_amplitude = std::min(least_amplitude, int16_amplitude(k.channels, k.bits));
  }

  // The queries in the order of the record's keys; padding stays 0.
  void order_queries(const int16_t* order) {
    q = rows->q;
    if (order == nullptr) return;
    const int64_t stride = rows->k_padded, dim = rows->params->format.head_dim;
    std::memset(q_ordered, 0, static_cast<size_t>(kRows * stride) * sizeof(float));
    for (int r = 0; r < kRows; r++) {
      for (int64_t i = 0; i < dim; i++) q_ordered[r * stride + i] = rows->q[r * stride + order[i]];
    }
    q = q_ordered;
  }

  static bool wide_unit(int64_t bits) { return bits == 1 || bits == 3; }
  static int64_t units_of(int64_t bits, int64_t values) {
    return ceil_div(values, wide_unit(bits) ? 2 * kLine : kLine);
  }

  // `tokens` tokens (a multiple of G) from key `first_key` on.
  void page(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    if (!rows->sees_any(first_key, tokens)) return;
    if (scales == ScaleKind::kByte) {
      page_of<ScaleKind::kByte>(records, tokens, first_key, fetch);
    } else if (scales == ScaleKind::kHalf) {
      page_of<ScaleKind::kHalf>(records, tokens, first_key, fetch);
    } else {
      page_of<ScaleKind::kFloat>(records, tokens, first_key, fetch);
    }
  }

 private:
  template <ScaleKind kKind>
  HWY_INLINE void page_of(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    exact ? page_as<true, kKind>(records, tokens, first_key, fetch)
          : page_as<false, kKind>(records, tokens, first_key, fetch);
  }

  template <bool kExact, ScaleKind kKind>
  HWY_NOINLINE void page_as(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    const int64_t count = tokens / group_size;
    if constexpr (!kExact) bound_queries<kKind>(records, count);
    scores<kExact, kKind>(records, count, fetch);
    if (rows->sees_all(first_key, tokens)) {
      rows->template softmax<false>(tokens);
      values<kExact, kKind, false>(records, count, fetch);
    } else {
      rows->adjust_scores(first_key, tokens);
      rows->template softmax<true>(tokens);
      values<kExact, kKind, true>(records, count, fetch);
    }
  }

  // Vector i of the largest ones of `count` sections of scales. Scales are not negative, so that bytes and halves order
  // like integers; that of a lost group is a byte of 255 or a negative NaN, and counts as 0.
  template <ScaleKind kKind>
  static HWY_INLINE VF largest_scale(const uint8_t* section, int64_t count, int64_t stride, int64_t i) {
    if constexpr (kKind == ScaleKind::kByte) {
      const auto load = [&](int64_t n) {
        const auto bytes = hn::LoadU(D8(), section + n * stride + i);
        return hn::IfThenZeroElse(hn::Eq(bytes, hn::Set(D8(), 255)), bytes);
      };
      auto top = load(0);
      for (int64_t n = 1; n < count; n++) top = hn::Max(top, load(n));
      return half_value(hn::ShiftLeft<7>(hn::PromoteTo(D16(), top)));
    } else if constexpr (kKind == ScaleKind::kHalf) {
      const hn::Rebind<int16_t, DF> dh;
      auto top = hn::Zero(dh);
      for (int64_t n = 0; n < count; n++) {
        top = hn::Max(top, hn::LoadU(dh, reinterpret_cast<const int16_t*>(section + n * stride) + i));
      }
      return half_value(hn::BitCast(D16(), top));
    } else {
      VF top = hn::Zero(DF());
      for (int64_t n = 0; n < count; n++) top = max_number(load_scale<kKind>(section + n * stride, i), top);
      return top;
    }
  }

  // The stages below are not inlined, because together they have too many values for the registers, and copy what they
  // need of *this first, because their stores could change it for all the compiler knows.

  // The factors that bring q' into int16: one for each row, from the largest |q * scale| of the page.
  template <ScaleKind kKind>
  HWY_NOINLINE void bound_queries(const uint8_t* records, int64_t count) {
    const int64_t channels = layout->k_channels, stride = layout->bytes, row_stride = rows->k_padded;
    const uint8_t* const section = records + layout->k_scale;
    const float* const q_rows = q;
    float* const out = q_scaled;
    VF bound[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) bound[r] = hn::Zero(DF());
    for (int64_t d = 0; d < channels; d += kLanes) {
      const VF s = largest_scale<kKind>(section, count, stride, d);
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        bound[r] = max_number(hn::Abs(hn::Mul(s, load_float(q_rows + r * row_stride + d))), bound[r]);
      }
    }
    alignas(64) float top[Rows<kRows>::kPaddedRows] = {}, to_int[Rows<kRows>::kPaddedRows];
    max_lanes(bound, top);
    for (int r = 0; r < Rows<kRows>::kPaddedRows; r += kLanes) {
      const VF x = load_float(top + r), one = splat(1.0f);
      const auto usable = hn::And(hn::Gt(x, splat(kTinyBound)), hn::Lt(x, splat(kHugeBound)));
      store_float(hn::IfThenElse(usable, hn::Div(splat(amplitude), x), one), to_int + r);
      store_float(hn::IfThenElse(usable, hn::Mul(x, splat(1.0f / amplitude)), one), from_int + r);
    }
    VF scale[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) scale[r] = splat(to_int[r]);
    for (int64_t d = 0; d < channels; d += kLanes) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        store_float(hn::Mul(scale[r], load_float(q_rows + r * row_stride + d)), out + r * row_stride + d);
      }
    }
  }

  template <bool kExact, ScaleKind kKind>
  HWY_NOINLINE void scores(const uint8_t* records, int64_t count, Fetch& fetch) {
    constexpr int64_t kBlockBytes = kRows * kLine * (kExact ? 4 : 2);
    DotResult result{rows->score, kChunk, from_int, c};
    for (int64_t i = 0; i < count; i++, records += layout->bytes, result.out += group_size) {
      prepare_keys<kExact, kKind>(records);
      for (int64_t n = 0; n < num_k_runs; n++) {
        const KeyRun& run = k_runs[n];
        const auto* values = reinterpret_cast<const uint8_t*>(k_values) + run.first / kLine * kBlockBytes;
        run.dot(run.shape, records + run.codes, values, fetch, result);
      }
    }
  }

  // q' and c of one record.
  template <bool kExact, ScaleKind kKind>
  HWY_NOINLINE void prepare_keys(const uint8_t* record) {
    const float* const q_rows = kExact ? q : q_scaled;
    const int64_t stride = rows->k_padded;
    const uint8_t* const scales_at = record + layout->k_scale;
    const uint8_t* const zeros_at = record + layout->k_zero;
    VF zero_dot[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) zero_dot[r] = hn::Zero(DF());
    for (int64_t n = 0; n < num_k_runs; n++) {
      const KeyRun& run = k_runs[n];
      const int64_t first = run.first, end = run.first + run.channels;
      const float middle = run.middle;
      const ZeroRule zero_rule = run.zeros;
      const ValueStore<kExact> store{run.weight, k_values};
      for (int64_t d = first; d < end; d += kLine) {
        VF s[kLineVectors], z[kLineVectors];
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          load_group<kKind, false>(scales_at, zeros_at, zero_rule, d + v * kLanes, s[v], z[v]);
          if constexpr (kExact) z[v] = hn::MulAdd(s[v], splat(middle), z[v]);
        }
        VF y[kRows][kLineVectors];
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) {
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) {
            y[r][v] = load_float(q_rows + r * stride + d + v * kLanes);
            zero_dot[r] = hn::MulAdd(y[r][v], z[v], zero_dot[r]);
          }
        }
        store.put(y, s, d - first, d / kLine);
      }
    }
    sum_lanes<true>(zero_dot, c);
    const hn::FixedTag<float, 4> four;
    KIVI_UNROLL
    for (int r = 0; r < kRows; r += 4) {
      auto x = hn::Load(four, c + r);
      if constexpr (!kExact) x = hn::Mul(x, hn::Load(four, from_int + r));
      hn::Store(hn::IfThenElse(hn::Eq(x, x), x, hn::Set(four, kQuietNaN)), four, c + r);
    }
  }

  // Puts values x * s where the dot products want them.
  template <bool kExact>
  struct ValueStore {
    const float* weight;
    float* values;

    // Block `block` of 16 values; e: the index of the first one in its record.
    HWY_INLINE void put(const VF (&x)[kRows][kLineVectors], const VF (&s)[kLineVectors], int64_t e,
                        int64_t block) const {
      const int64_t at = block * (kRows * kLine);
      if constexpr (!kExact) {
        store_products<kRows>(x, s, reinterpret_cast<int16_t*>(values) + at);
      } else {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          const VF factor = hn::Mul(s[v], load_float(weight + e % 32 + v * kLanes));
          KIVI_UNROLL
          for (int r = 0; r < kRows; r++) store_float(hn::Mul(x[r][v], factor), values + at + r * kLine + v * kLanes);
        }
      }
    }
  };

  template <bool kExact, ScaleKind kKind, bool kMasked>
  HWY_NOINLINE void values(const uint8_t* records, int64_t count, Fetch& fetch) {
    float to_weight = 1.0f, top = 1.0f;
    if constexpr (!kExact) {
      top = largest_value_scale<kKind>(records, count);
      const bool usable = top > kTinyBound;
      to_weight = usable ? 32767.0f / top : 0.0f;
      top = usable ? top / 32767.0f : 0.0f;
    }
    for (int r = 0; r < kRows; r++) from_weight[r] = rows->factor[r] * top;
    const int64_t lines = layout->v_channels / kLine, group_lines = layout->v_group / kLine;
    DotResult result{rows->acc, rows->v_channels, from_weight, nullptr};
    v_shape.runs = count;
    const uint8_t* const codes = records + layout->v_codes[0];
    for (int64_t g = 0; g < layout->v_groups; g++) {
      prepare_weights<kExact, kKind, kMasked>(records, count, g, to_weight);
      const int64_t line = g * group_lines;
      v_shape.lines = std::min(lines - line, group_lines);
      result.out = rows->acc + line * kLine;
      v_dot(v_shape, codes + line * kLineBytes, v_values, fetch, result);
    }
  }

  template <ScaleKind kKind>
  float largest_value_scale(const uint8_t* records, int64_t count) const {
    const int64_t size = layout->v_groups * group_size, stride = layout->bytes;
    const uint8_t* const section = records + layout->v_scale;
    VF top[1] = {hn::Zero(DF())};
    for (int64_t i = 0; i < size; i += kLanes) {
      top[0] = hn::Max(top[0], largest_scale<kKind>(section, count, stride, i));
    }
    float result;
    max_lanes(top, &result);
    return result;
  }

  // w of one group of channels, and the part of its zeros. kMasked: a token that weighs 0 must not give 0 * NaN.
  template <bool kExact, ScaleKind kKind, bool kMasked>
  HWY_NOINLINE void prepare_weights(const uint8_t* records, int64_t count, int64_t group, float to_weight) {
    const int64_t size = group_size, stride = layout->bytes, first = group * size, subs = v_subs;
    const uint8_t* scales = records + layout->v_scale;
    const uint8_t* zeros = records + layout->v_zero;
    const ZeroRule zero_rule = v_zeros;
    const float* score = rows->score;
    const ValueStore<kExact> store{v_weight, v_values};
    VF zero_sum[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) zero_sum[r] = hn::Zero(DF());
    for (int64_t i = 0; i < count; i++, scales += stride, zeros += stride, score += size) {
      for (int64_t t = 0; t < size; t += kLine) {
        VF s[kLineVectors], z[kLineVectors];
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          load_group<kKind>(scales, zeros, zero_rule, first + t + v * kLanes, s[v], z[v]);
          if constexpr (kExact) z[v] = hn::MulAdd(s[v], splat(v_middle), z[v]);
          if constexpr (!kExact) s[v] = hn::Mul(s[v], splat(to_weight));
        }
        VF p[kRows][kLineVectors];
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) {
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) {
            p[r][v] = load_float(score + r * kChunk + t + v * kLanes);
            const VF zero = kMasked ? hn::IfThenZeroElse(hn::Eq(p[r][v], hn::Zero(DF())), z[v]) : z[v];
            zero_sum[r] = hn::MulAdd(p[r][v], zero, zero_sum[r]);
          }
        }
        store.put(p, s, t, i * subs + t / kLine);
      }
    }
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      float* z = rows->zero_acc + (group * kRows + r) * kLanes;
      store_float(hn::MulAdd(splat(rows->factor[r]), zero_sum[r], load_float(z)), z);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
