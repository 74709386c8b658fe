// Attention of a few query rows over the records of one page, straight from the packed codes. Per record (G tokens)
//   score[t] = c + sum_d q'[d] code[t][d],  q' = q * K scale,  c = q . K zero
//   out[d]  += sum_t w[t] code[t][d] + sum_t p[t] V zero[t],  w = p * V scale,  p = 2^(score - maximum of the page)
// "exact": q' and w are fp32. "fast": both are int16, q' with a factor for each row and page, w with one for each page; no
// result of a row depends on the other rows.
//
// Error of "fast" in one score (log2 units): half a step of q' for each channel, a step being max_d |q'[d]| / amplitude,
// so at most sum_d code[d] / 2 * max|q'| / 32767, and about sqrt(D) * 2^-17 * max|q'| * max code in practice.
// (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_PAGES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_PAGES_INL_H_
#undef KIVI_CPU_VECTOR_PAGES_INL_H_
#else
#define KIVI_CPU_VECTOR_PAGES_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/vector_dot-inl.h"
#include "cpu/vector_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// Factors outside of these limits are not worth having: the products are lost in fp32 anyway.
inline constexpr float kTinyBound = 1e-25f;
inline constexpr float kHugeBound = 1e30f;

template <int kRows>
struct Pages {
  Rows<kRows>* rows = nullptr;
  const RecordLayout* layout = nullptr;
  int64_t group_size = 0;
  bool half_scales = true;
  bool exact = false;
  int k_planes = 1, v_planes = 1;
  DotFunction k_dot[2] = {nullptr, nullptr}, v_dot[2] = {nullptr, nullptr};
  DotShape k_shape[2], v_shape[2];
  float amplitude = 0;       // of q'
  int64_t v_subs = 1;        // blocks of 16 values of one record in v_values
  int64_t value_stride = 0;  // floats from the values of one plane to those of the other (exact, 3 bits)
  // Values of fp32 by plane: what undoes the place of the code in its word; index e % 32.
  alignas(64) float k_weight[2][32], v_weight[2][32];
  // In the thread's scratch buffer.
  float* q_scaled = nullptr;   // [kRows][k_padded]: q on the scale of q' (fast)
  float* scale_max = nullptr;  // [k_padded]
  float* k_values = nullptr;   // [planes][k_padded / 16][kRows][16] q' of one record, fp32 or int16
  float* v_values = nullptr;   // [planes][128 or 256 slots / 16][kRows][16] w of one group of channels

  alignas(64) float dot[2][kRows][kLine];  // what the two planes give
  float to_int[kRows], from_int[kRows];    // q -> q' and back
  float c[kRows];

  void begin(const AttentionParams& p, Rows<kRows>* r, bool vnni) {
    rows = r;
    layout = p.layout;
    const Format& f = *p.format;
    group_size = f.group_size;
    half_scales = f.scale_type == ScaleType::kFloat16;
    exact = p.exact;
    amplitude = static_cast<float>(int16_amplitude(f.head_dim));
    k_planes = num_planes(f.k_bits);
    v_planes = num_planes(f.v_bits);
    const bool wide_unit = v_planes == 2 || f.v_bits == 1;
    v_subs = std::max<int64_t>(group_size / kLine, wide_unit ? 2 : 1);
    for (int plane = 0; plane < k_planes; plane++) {
      const int64_t bits = plane_bits(f.k_bits, plane);
      k_dot[plane] = dot_function<kRows>(bits, exact, vnni);
      k_shape[plane] = {units_of(bits, layout->k_channels), 1, kLineBytes, 0, 0};
      for (int e = 0; e < 32; e++) k_weight[plane][e] = fp32_weight(bits, e);
    }
    for (int plane = 0; plane < v_planes; plane++) {
      const int64_t bits = plane_bits(f.v_bits, plane);
      v_dot[plane] = dot_function<kRows>(bits, exact, vnni);
      v_shape[plane] = {units_of(bits, group_size), 0, layout->v_channels / kLine * kLineBytes, layout->bytes,
                        v_subs * kRows * kLine};
      for (int e = 0; e < 32; e++) v_weight[plane][e] = fp32_weight(bits, e);
    }
  }

  static int64_t units_of(int64_t bits, int64_t values) { return ceil_div(values, bits == 1 ? 2 * kLine : kLine); }

  // `tokens` tokens (a multiple of G) from key `first_key` on.
  void page(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    if (!rows->sees_any(first_key, tokens)) return;
    const int64_t count = tokens / group_size;
    if (exact) {
      scores<true>(records, count, fetch);
    } else {
      bound_queries(records, count);
      scores<false>(records, count, fetch);
    }
    const bool all = rows->sees_all(first_key, tokens);
    if (all) {
      rows->template softmax<false>(tokens);
    } else {
      rows->adjust_scores(first_key, tokens);
      rows->template softmax<true>(tokens);
    }
    if (exact) {
      all ? values<true, false>(records, count, fetch) : values<true, true>(records, count, fetch);
    } else {
      all ? values<false, false>(records, count, fetch) : values<false, true>(records, count, fetch);
    }
  }

 private:
  // Vector i of a section of scales or zeros.
  HWY_INLINE VF load_scale(const uint8_t* section, int64_t i) const {
    return half_scales ? load_half(reinterpret_cast<const uint16_t*>(section) + i)
                       : load_float(reinterpret_cast<const float*>(section) + i);
  }

  // The factors that bring q' into int16: one for each row, from the largest |q * scale| of the page.
  void bound_queries(const uint8_t* records, int64_t count) {
    const int64_t channels = layout->k_channels;
    VF bound[kRows];
    for (int r = 0; r < kRows; r++) bound[r] = hn::Zero(DF());
    for (int64_t d = 0; d < channels; d += kLanes) {
      VF s = load_scale(records + layout->k_scale, d);
      for (int64_t i = 1; i < count; i++) s = hn::Max(s, load_scale(records + i * layout->bytes + layout->k_scale, d));
      for (int r = 0; r < kRows; r++) {
        bound[r] = max_number(hn::Abs(hn::Mul(s, load_float(rows->q + r * rows->k_padded + d))), bound[r]);
      }
    }
    for (int r = 0; r < kRows; r++) {
      const float top = max_lane(bound[r]);
      const bool usable = top > kTinyBound && top < kHugeBound;
      to_int[r] = usable ? amplitude / top : 1.0f;
      from_int[r] = usable ? top / amplitude : 1.0f;
      const VF scale = splat(to_int[r]);
      for (int64_t d = 0; d < channels; d += kLanes) {
        store_float(hn::Mul(scale, load_float(rows->q + r * rows->k_padded + d)), q_scaled + r * rows->k_padded + d);
      }
    }
  }

  template <bool kExact>
  void scores(const uint8_t* records, int64_t count, Fetch& fetch) {
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* record = records + i * layout->bytes;
      prepare_keys<kExact>(record);
      for (int64_t t = 0; t < group_size; t += kLine) {
        for (int plane = 0; plane < k_planes; plane++) {
          const uint8_t* codes = record + layout->k_codes[plane] + t / kLine * layout->k_words[plane] * kLineBytes;
          k_dot[plane](k_shape[plane], codes, k_values + (kExact ? plane * value_stride : 0), fetch, dot[plane][0]);
        }
        if (k_planes == 2) add_high_plane();
        for (int r = 0; r < kRows; r++) {
          float* s = rows->score + r * kChunk + i * group_size + t;
          for (int v = 0; v < kLine; v += kLanes) {
            const VF x = load_float(dot[0][r] + v);
            store_float(kExact ? hn::Add(x, splat(c[r])) : hn::MulAdd(x, splat(from_int[r]), splat(c[r])), s + v);
          }
        }
      }
    }
  }

  // q' and c of one record.
  template <bool kExact>
  void prepare_keys(const uint8_t* record) {
    const float* q = kExact ? rows->q : q_scaled;
    const int64_t stride = rows->k_padded;
    auto* int_values = reinterpret_cast<int16_t*>(k_values);
    VF zero_dot[kRows];
    for (int r = 0; r < kRows; r++) zero_dot[r] = hn::Zero(DF());
    for (int64_t d = 0; d < layout->k_channels; d += kLine) {
      VF s[kLineVectors], z[kLineVectors];
      for (int v = 0; v < kLineVectors; v++) {
        s[v] = load_scale(record + layout->k_scale, d + v * kLanes);
        z[v] = load_scale(record + layout->k_zero, d + v * kLanes);
      }
      for (int r = 0; r < kRows; r++) {
        const int64_t at = (d / kLine * kRows + r) * kLine;
        VF x[kLineVectors];
        for (int v = 0; v < kLineVectors; v++) {
          const VF y = load_float(q + r * stride + d + v * kLanes);
          zero_dot[r] = hn::MulAdd(y, z[v], zero_dot[r]);
          x[v] = hn::Mul(y, s[v]);
        }
        if constexpr (kExact) {
          store_weighted(x, k_weight, k_planes, d % 32, k_values + at);
        } else {
          store_int16(x, int_values + at);
        }
      }
    }
    sum_lanes(zero_dot, c);
    for (int r = 0; r < kRows; r++) c[r] = plain_nan(kExact ? c[r] : c[r] * from_int[r]);
  }

  // 16 values of fp32 for each plane.
  HWY_INLINE void store_weighted(const VF (&x)[kLineVectors], const float (&weight)[2][32], int planes, int64_t e,
                                 float* out) const {
    for (int plane = 0; plane < planes; plane++) {
      for (int v = 0; v < kLineVectors; v++) {
        const VF w = load_float(weight[plane] + e + v * kLanes);
        store_float(hn::Mul(x[v], w), out + plane * value_stride + v * kLanes);
      }
    }
  }

  // 3 bits: the high bit counts 4.
  void add_high_plane() {
    for (int r = 0; r < kRows; r++) {
      for (int v = 0; v < kLine; v += kLanes) {
        const VF high = load_float(dot[1][r] + v);
        store_float(hn::MulAdd(high, splat(4.0f), load_float(dot[0][r] + v)), dot[0][r] + v);
      }
    }
  }

  template <bool kExact, bool kMasked>
  void values(const uint8_t* records, int64_t count, Fetch& fetch) {
    float to_weight = 1.0f, from_weight = 1.0f;
    if constexpr (!kExact) {
      const float top = largest_value_scale(records, count);
      const bool usable = top > kTinyBound;
      to_weight = usable ? 32767.0f / top : 0.0f;
      from_weight = usable ? top / 32767.0f : 0.0f;
    }
    const int64_t lines = layout->v_channels / kLine;
    for (int64_t g = 0; g < layout->v_groups; g++) {
      prepare_weights<kExact, kMasked>(records, count, g, to_weight);
      const int64_t last_line = std::min(lines, (g + 1) * (group_size / kLine));
      for (int64_t line = g * (group_size / kLine); line < last_line; line++) {
        for (int plane = 0; plane < v_planes; plane++) {
          v_shape[plane].runs = count;
          const uint8_t* codes = records + layout->v_codes[plane] + line * kLineBytes;
          v_dot[plane](v_shape[plane], codes, v_values + (kExact ? plane * value_stride : 0), fetch, dot[plane][0]);
        }
        if (v_planes == 2) add_high_plane();
        for (int r = 0; r < kRows; r++) {
          const VF f = splat(rows->factor[r] * from_weight);
          float* a = rows->acc + r * rows->v_channels + line * kLine;
          for (int v = 0; v < kLine; v += kLanes) {
            store_float(hn::MulAdd(load_float(dot[0][r] + v), f, load_float(a + v)), a + v);
          }
        }
      }
    }
  }

  float largest_value_scale(const uint8_t* records, int64_t count) const {
    VF top = hn::Zero(DF());
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* section = records + i * layout->bytes + layout->v_scale;
      for (int64_t j = 0; j < layout->v_groups * group_size; j += kLanes) top = hn::Max(top, load_scale(section, j));
    }
    return max_lane(top);
  }

  // w of one group of channels, and the part of its zeros. kMasked: a token that weighs 0 must not give 0 * NaN.
  template <bool kExact, bool kMasked>
  void prepare_weights(const uint8_t* records, int64_t count, int64_t group, float to_weight) {
    auto* int_values = reinterpret_cast<int16_t*>(v_values);
    VF zero_sum[kRows];
    for (int r = 0; r < kRows; r++) zero_sum[r] = hn::Zero(DF());
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* record = records + i * layout->bytes;
      for (int64_t t = 0; t < group_size; t += kLine) {
        VF s[kLineVectors], z[kLineVectors];
        for (int v = 0; v < kLineVectors; v++) {
          s[v] = load_scale(record + layout->v_scale, group * group_size + t + v * kLanes);
          z[v] = load_scale(record + layout->v_zero, group * group_size + t + v * kLanes);
          if constexpr (!kExact) s[v] = hn::Mul(s[v], splat(to_weight));
        }
        for (int r = 0; r < kRows; r++) {
          const int64_t at = ((i * v_subs + t / kLine) * kRows + r) * kLine;
          VF x[kLineVectors];
          for (int v = 0; v < kLineVectors; v++) {
            const VF p = load_float(rows->score + r * kChunk + i * group_size + t + v * kLanes);
            const VF zero = kMasked ? hn::IfThenZeroElse(hn::Eq(p, hn::Zero(DF())), z[v]) : z[v];
            zero_sum[r] = hn::MulAdd(p, zero, zero_sum[r]);
            x[v] = hn::Mul(p, s[v]);
          }
          if constexpr (kExact) {
            store_weighted(x, v_weight, v_planes, t % 32, v_values + at);
          } else {
            store_int16(x, int_values + at);
          }
        }
      }
    }
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
