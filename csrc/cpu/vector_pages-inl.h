// Attention of a few query rows over the records of one page, straight from the packed codes. Per record (G tokens)
//   score[t] = c + sum_d q'[d] code[t][d],  q' = q * K scale,  c = q . K zero
//   out[d]  += sum_t w[t] code[t][d] + sum_t p[t] V zero[t],  w = p * V scale,  p = 2^(score - maximum of the page)
// "exact": q' and w are fp32. "fast": both are int16, q' with a factor for each row and page, w with one for each page;
// no result of a row depends on the other rows.
//
// Error of "fast": rounding q' puts a score off by about sqrt(D) * max|q'| * (2^k_bits - 1) / 32767 at most, where
// max|q'| is the largest |q * scale * K scale| of the page in natural units, and an output by that times the size of
// the values; the rounding of w adds 5e-5. The test allows half of it. Measured at D = 128 with 8 outlier channels of
// 5x and 30x: 9e-5 for scores up to +-4, 1.5e-3 up to +-15, 5e-3 up to +-40 (rms 8e-4); "exact": 4e-7, 3e-6, 8e-6.
// Above D = 256 the amplitude of int16 is lowered so that 255 * D * amplitude stays below 2^31.
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
  float amplitude = 0;               // of q'
  float k_middle = 0, v_middle = 0;  // what dot_fp32 takes off a code
  int64_t v_subs = 1;                // blocks of 16 values of one record in v_values
  int64_t value_stride = 0;          // floats from the values of one plane to those of the other (exact, 3 bits)
  const float* k_weight[2] = {nullptr, nullptr};  // fp32_weights, by plane
  const float* v_weight[2] = {nullptr, nullptr};
  // In the thread's scratch buffer.
  float* q_scaled = nullptr;   // [kRows][k_padded]: q on the scale of q' (fast)
  float* scale_max = nullptr;  // [k_padded]
  float* k_values = nullptr;   // [planes][k_padded / 16][kRows][16] q' of one record, fp32 or int16
  float* v_values = nullptr;   // [planes][128 or 256 slots / 16][kRows][16] w of one group of channels

  alignas(64) float dot[2][kRows][kLine];  // what the two planes give
  float from_int[kRows];                   // q' -> q (fast)
  float c[kRows];

  void begin(const AttentionParams& p, Rows<kRows>* r, bool vnni) {
    rows = r;
    layout = p.layout;
    const Format& f = *p.format;
    group_size = f.group_size;
    half_scales = f.scale_type == ScaleType::kFloat16;
    exact = p.exact;
    amplitude = static_cast<float>(int16_amplitude(f.head_dim));
    k_middle = static_cast<float>(whole_code_middle(f.k_bits));
    v_middle = static_cast<float>(whole_code_middle(f.v_bits));
    k_planes = num_planes(f.k_bits);
    v_planes = num_planes(f.v_bits);
    const bool wide_unit = v_planes == 2 || f.v_bits == 1;
    v_subs = std::max<int64_t>(group_size / kLine, wide_unit ? 2 : 1);
    for (int plane = 0; plane < k_planes; plane++) {
      const int64_t bits = plane_bits(f.k_bits, plane);
      k_dot[plane] = dot_function<kRows>(bits, exact, vnni);
      k_shape[plane] = {units_of(bits, layout->k_channels), 1, kLineBytes, 0, 0};
      k_weight[plane] = fp32_weights(bits);
    }
    for (int plane = 0; plane < v_planes; plane++) {
      const int64_t bits = plane_bits(f.v_bits, plane);
      v_dot[plane] = dot_function<kRows>(bits, exact, vnni);
      v_shape[plane] = {units_of(bits, group_size), 0, layout->v_channels / kLine * kLineBytes, layout->bytes,
                        v_subs * kRows * kLine};
      v_weight[plane] = fp32_weights(bits);
    }
    // Where a word of 32 codes has 16 values only, the others are 0.
    const size_t values_bytes = static_cast<size_t>(2 * value_stride) * sizeof(float);
    if (layout->k_channels % 32 != 0) std::memset(k_values, 0, values_bytes);
    if (group_size == kLine) std::memset(v_values, 0, values_bytes);
  }

  static int64_t units_of(int64_t bits, int64_t values) { return ceil_div(values, bits == 1 ? 2 * kLine : kLine); }

  // `tokens` tokens (a multiple of G) from key `first_key` on.
  void page(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    if (!rows->sees_any(first_key, tokens)) return;
    if (exact) {
      half_scales ? page_as<true, true>(records, tokens, first_key, fetch)
                  : page_as<true, false>(records, tokens, first_key, fetch);
    } else {
      half_scales ? page_as<false, true>(records, tokens, first_key, fetch)
                  : page_as<false, false>(records, tokens, first_key, fetch);
    }
  }

 private:
  template <bool kExact, bool kHalf>
  HWY_NOINLINE void page_as(const uint8_t* records, int64_t tokens, int64_t first_key, Fetch& fetch) {
    const int64_t count = tokens / group_size;
    if constexpr (!kExact) bound_queries<kHalf>(records, count);
    scores<kExact, kHalf>(records, count, fetch);
    if (rows->sees_all(first_key, tokens)) {
      rows->template softmax<false>(tokens);
      values<kExact, kHalf, false>(records, count, fetch);
    } else {
      rows->adjust_scores(first_key, tokens);
      rows->template softmax<true>(tokens);
      values<kExact, kHalf, true>(records, count, fetch);
    }
  }

  // Vector i of a section of scales or zeros.
  template <bool kHalf>
  static HWY_INLINE VF load_scale(const uint8_t* section, int64_t i) {
    return kHalf ? load_half(reinterpret_cast<const uint16_t*>(section) + i)
                 : load_float(reinterpret_cast<const float*>(section) + i);
  }

  // Vector i of the largest ones of `count` sections of scales. Scales are not negative, so that halves order like
  // integers.
  template <bool kHalf>
  static HWY_INLINE VF largest_scale(const uint8_t* section, int64_t count, int64_t stride, int64_t i) {
    if constexpr (kHalf) {
      const hn::Rebind<uint16_t, DF> dh;
      const hn::Rebind<hwy::float16_t, DF> df16;
      auto top = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(section) + i);
      for (int64_t n = 1; n < count; n++) {
        top = hn::Max(top, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(section + n * stride) + i));
      }
      return hn::PromoteTo(DF(), hn::BitCast(df16, top));
    } else {
      VF top = load_scale<kHalf>(section, i);
      for (int64_t n = 1; n < count; n++) top = hn::Max(top, load_scale<kHalf>(section + n * stride, i));
      return top;
    }
  }

  // The stages below are not inlined, because together they have too many values for the registers, and copy what they
  // need of *this first, because their stores could change it for all the compiler knows.

  // The factors that bring q' into int16: one for each row, from the largest |q * scale| of the page.
  template <bool kHalf>
  HWY_NOINLINE void bound_queries(const uint8_t* records, int64_t count) {
    const int64_t channels = layout->k_channels, stride = layout->bytes, row_stride = rows->k_padded;
    const uint8_t* const section = records + layout->k_scale;
    const float* const q = rows->q;
    float* const out = q_scaled;
    VF bound[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) bound[r] = hn::Zero(DF());
    for (int64_t d = 0; d < channels; d += kLanes) {
      const VF s = largest_scale<kHalf>(section, count, stride, d);
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        bound[r] = max_number(hn::Abs(hn::Mul(s, load_float(q + r * row_stride + d))), bound[r]);
      }
    }
    float top[kRows];
    max_lanes(bound, top);
    VF scale[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      const bool usable = top[r] > kTinyBound && top[r] < kHugeBound;
      const float factor = usable ? amplitude / top[r] : 1.0f;
      from_int[r] = usable ? top[r] / amplitude : 1.0f;
      scale[r] = splat(factor);
    }
    for (int64_t d = 0; d < channels; d += kLanes) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        store_float(hn::Mul(scale[r], load_float(q + r * row_stride + d)), out + r * row_stride + d);
      }
    }
  }

  template <bool kExact, bool kHalf>
  HWY_NOINLINE void scores(const uint8_t* records, int64_t count, Fetch& fetch) {
    const int64_t words_0 = layout->k_words[0] * kLineBytes, words_1 = layout->k_words[1] * kLineBytes;
    float* const score = rows->score;
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* record = records + i * layout->bytes;
      prepare_keys<kExact, kHalf>(record);
      for (int64_t t = 0; t < group_size; t += kLine) {
        const int64_t line = t / kLine;
        k_dot[0](k_shape[0], record + layout->k_codes[0] + line * words_0, k_values, fetch, dot[0][0]);
        if (k_planes == 2) {
          const float* const values = k_values + (kExact ? value_stride : 0);
          k_dot[1](k_shape[1], record + layout->k_codes[1] + line * words_1, values, fetch, dot[1][0]);
          add_high_plane();
        }
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) {
          const VF f = splat(from_int[r]), constant = splat(c[r]);
          float* s = score + r * kChunk + i * group_size + t;
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) {
            const VF x = load_float(dot[0][r] + v * kLanes);
            store_float(kExact ? hn::Add(x, constant) : hn::MulAdd(x, f, constant), s + v * kLanes);
          }
        }
      }
    }
  }

  // q' and c of one record.
  template <bool kExact, bool kHalf>
  HWY_NOINLINE void prepare_keys(const uint8_t* record) {
    const float* const q = kExact ? rows->q : q_scaled;
    const int64_t stride = rows->k_padded, channels = layout->k_channels;
    const uint8_t* const scales = record + layout->k_scale;
    const uint8_t* const zeros = record + layout->k_zero;
    const ValueStore<kExact> store{k_weight[0], k_weight[1], k_values, k_planes == 2 ? value_stride : 0};
    VF zero_dot[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) zero_dot[r] = hn::Zero(DF());
    for (int64_t d = 0; d < channels; d += kLine) {
      VF s[kLineVectors], z[kLineVectors];
      KIVI_UNROLL
      for (int v = 0; v < kLineVectors; v++) {
        s[v] = load_scale<kHalf>(scales, d + v * kLanes);
        z[v] = load_scale<kHalf>(zeros, d + v * kLanes);
        if constexpr (kExact) z[v] = hn::MulAdd(s[v], splat(k_middle), z[v]);
      }
      VF y[kRows][kLineVectors];
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          y[r][v] = load_float(q + r * stride + d + v * kLanes);
          zero_dot[r] = hn::MulAdd(y[r][v], z[v], zero_dot[r]);
        }
      }
      store.put(y, s, d, d / kLine);
    }
    sum_lanes(zero_dot, c);
    for (int r = 0; r < kRows; r++) c[r] = plain_nan(kExact ? c[r] : c[r] * from_int[r]);
  }

  // Puts values x * s where the dot products want them.
  template <bool kExact>
  struct ValueStore {
    const float *weight_0, *weight_1;  // by plane
    float* values;
    int64_t second;  // floats to the values of the second plane; 0: there is none (exact only)

    // Block `block` of 16 values; e: the index of the first one in its record.
    HWY_INLINE void put(const VF (&x)[kRows][kLineVectors], const VF (&s)[kLineVectors], int64_t e,
                        int64_t block) const {
      const int64_t at = block * (kRows * kLine);
      if constexpr (!kExact) {
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) store_products(x[r], s, reinterpret_cast<int16_t*>(values) + at + r * kLine);
      } else {
        put_plane(x, s, weight_0 + e % 32, values + at);
        if (second != 0) put_plane(x, s, weight_1 + e % 32, values + at + second);
      }
    }

    static HWY_INLINE void put_plane(const VF (&x)[kRows][kLineVectors], const VF (&s)[kLineVectors],
                                     const float* weight, float* out) {
      KIVI_UNROLL
      for (int v = 0; v < kLineVectors; v++) {
        const VF factor = hn::Mul(s[v], load_float(weight + v * kLanes));
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) store_float(hn::Mul(x[r][v], factor), out + r * kLine + v * kLanes);
      }
    }
  };

  // 3 bits: the high bit counts 4.
  void add_high_plane() {
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      KIVI_UNROLL
      for (int v = 0; v < kLine; v += kLanes) {
        const VF high = load_float(dot[1][r] + v);
        store_float(hn::MulAdd(high, splat(4.0f), load_float(dot[0][r] + v)), dot[0][r] + v);
      }
    }
  }

  template <bool kExact, bool kHalf, bool kMasked>
  HWY_NOINLINE void values(const uint8_t* records, int64_t count, Fetch& fetch) {
    float to_weight = 1.0f, from_weight = 1.0f;
    if constexpr (!kExact) {
      const float top = largest_value_scale<kHalf>(records, count);
      const bool usable = top > kTinyBound;
      to_weight = usable ? 32767.0f / top : 0.0f;
      from_weight = usable ? top / 32767.0f : 0.0f;
    }
    v_shape[0].runs = v_shape[1].runs = count;
    const int64_t lines = layout->v_channels / kLine, group_lines = group_size / kLine;
    float* const acc = rows->acc;
    for (int64_t g = 0; g < layout->v_groups; g++) {
      prepare_weights<kExact, kHalf, kMasked>(records, count, g, to_weight);
      const int64_t last_line = std::min(lines, (g + 1) * group_lines);
      for (int64_t line = g * group_lines; line < last_line; line++) {
        v_dot[0](v_shape[0], records + layout->v_codes[0] + line * kLineBytes, v_values, fetch, dot[0][0]);
        if (v_planes == 2) {
          const float* const weights = v_values + (kExact ? value_stride : 0);
          v_dot[1](v_shape[1], records + layout->v_codes[1] + line * kLineBytes, weights, fetch, dot[1][0]);
          add_high_plane();
        }
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) {
          const VF f = splat(rows->factor[r] * from_weight);
          float* a = acc + r * rows->v_channels + line * kLine;
          KIVI_UNROLL
          for (int v = 0; v < kLine; v += kLanes) {
            store_float(hn::MulAdd(load_float(dot[0][r] + v), f, load_float(a + v)), a + v);
          }
        }
      }
    }
  }

  template <bool kHalf>
  float largest_value_scale(const uint8_t* records, int64_t count) const {
    const int64_t size = layout->v_groups * group_size, stride = layout->bytes;
    const uint8_t* const section = records + layout->v_scale;
    VF top[1] = {hn::Zero(DF())};
    for (int64_t i = 0; i < size; i += kLanes) {
      top[0] = hn::Max(top[0], largest_scale<kHalf>(section, count, stride, i));
    }
    float result;
    max_lanes(top, &result);
    return result;
  }

  // w of one group of channels, and the part of its zeros. kMasked: a token that weighs 0 must not give 0 * NaN.
  template <bool kExact, bool kHalf, bool kMasked>
  HWY_NOINLINE void prepare_weights(const uint8_t* records, int64_t count, int64_t group, float to_weight) {
    const int64_t size = group_size, stride = layout->bytes, first = group * size, subs = v_subs;
    const uint8_t* scales = records + layout->v_scale;
    const uint8_t* zeros = records + layout->v_zero;
    const float* score = rows->score;
    const ValueStore<kExact> store{v_weight[0], v_weight[1], v_values, v_planes == 2 ? value_stride : 0};
    VF zero_sum[kRows];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) zero_sum[r] = hn::Zero(DF());
    for (int64_t i = 0; i < count; i++, scales += stride, zeros += stride, score += size) {
      for (int64_t t = 0; t < size; t += kLine) {
        VF s[kLineVectors], z[kLineVectors];
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          s[v] = load_scale<kHalf>(scales, first + t + v * kLanes);
          z[v] = load_scale<kHalf>(zeros, first + t + v * kLanes);
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
