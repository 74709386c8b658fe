// Quantising written down once more, straight from the definition and sharing nothing with the library but the
// conversion of float16: one group at a time, one code at a time, every bit addressed by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "test_data.h"

namespace kivi::cpu::oracle {

struct Rules {
  int bits;
  ScaleType type;
  RangeSearch search;
  bool symmetric = false, bias = false, gain = false;
};

struct Group {
  float scale = 0, zero = 0;  // stored
  std::vector<int> codes;
  bool fits = true;  // the stored type
};

inline bool is_byte(ScaleType t) { return t == ScaleType::kFloat8 || t == ScaleType::kWidened8; }
inline bool is_wide(ScaleType t) { return t == ScaleType::kWidened || t == ScaleType::kWidened8; }

// The nearest of the numbers (8 + m) * 2^(e - 18) with m below 8, e from 1 to 30, and m * 2^-17; above them Inf.
// Through float16, half to even.
inline float to_float8(float x) {
  const float h = half_to_float(float_to_half(x));
  if (!std::isfinite(h)) return h;
  int exponent;
  std::frexp(h, &exponent);
  const float step = std::ldexp(1.0f, std::max(exponent - 4, -17));
  const float rounded = std::rint(h / step) * step;
  return rounded > 61440.0f ? std::numeric_limits<float>::infinity() : rounded;
}

inline float rounded(float x, ScaleType type, bool* fits) {
  if (type == ScaleType::kFloat32) return x;
  const float h = is_byte(type) ? to_float8(x) : half_to_float(float_to_half(x));
  if (std::isfinite(h)) return h;
  *fits = false;
  return is_wide(type) ? x : h;
}

inline float steps_of_zero(int bits) { return bits == 1 ? 16 : bits == 2 ? 8 : bits == 3 ? 4 : bits == 4 ? 2 : 0.125f; }

inline float scale_for(const Rules& r, float scale, float zero, bool* fits) {
  if (is_byte(r.type) && !r.symmetric) {
    const float least = std::fabs(zero) * (steps_of_zero(r.bits) / 119.5f);
    if (scale < least) scale = least;
  }
  return rounded(scale, r.type, fits);
}

inline float zero_for(const Rules& r, float scale, float zero, bool* fits) {
  if (r.symmetric) return -(scale * (0.5f * static_cast<float>((1 << r.bits) - 1)));
  if (!is_byte(r.type)) return rounded(zero, r.type, fits);
  if (!std::isfinite(to_float8(scale))) return zero;
  if (scale == 0) return 0;
  float steps = std::rint(zero * (1 / scale) * steps_of_zero(r.bits));
  if (steps > 127) steps = 127;
  if (steps < -127) steps = -127;
  if (steps == 0) steps = 0;  // one sign of zero
  return steps * scale / steps_of_zero(r.bits);
}

inline int code_for(float x, float scale, float zero, int top) {
  if (!(scale > 0)) return 0;
  const float position = std::rint((x - zero) / scale);
  if (!(position >= 0)) return 0;  // NaN where the scale is Inf
  return position > static_cast<float>(top) ? top : static_cast<int>(position);
}

// With any option beyond KIVI.
inline int code_by_factor(float x, float scale, float zero, int top) {
  if (!(scale >= std::numeric_limits<float>::min())) return 0;
  const float position = std::rint((x - zero) * (1 / scale));
  if (!(position >= 0)) return 0;  // NaN where the scale is Inf
  return position > static_cast<float>(top) ? top : static_cast<int>(position);
}

inline float value_of(float scale, float zero, int code) {
  const float product = static_cast<float>(code) * scale;
  return zero + product;
}

// The group with the part r of its range. `*error` is its squared error, `*normal` whether it may be corrected and win.
inline Group quantize_part(const std::vector<float>& x, const Rules& rules, float lo, float span, float r, bool* fits,
                           float* error, bool* normal) {
  const float levels = static_cast<float>((1 << rules.bits) - 1), count = static_cast<float>(x.size());
  const float width = span * r, margin = (span - width) * 0.5f;
  Group g;
  float zero = lo + margin;
  if (is_byte(rules.type)) {
    const float middle = lo + span * 0.5f, wanted = width / levels;
    g.scale = scale_for(rules, wanted, middle - wanted * (0.5f * levels), fits);
    zero = middle - g.scale * (0.5f * levels);
  } else {
    g.scale = scale_for(rules, width / levels, zero, fits);
  }
  g.zero = zero_for(rules, g.scale, zero, fits);
  const bool plain = !is_byte(rules.type) && !rules.symmetric && !rules.bias && !rules.gain && rules.search.count == 0;
  for (const float value : x) {
    const int top = (1 << rules.bits) - 1;
    g.codes.push_back(plain ? code_for(value, g.scale, g.zero, top) : code_by_factor(value, g.scale, g.zero, top));
  }
  *normal = g.scale >= std::numeric_limits<float>::min();
  const float factor = *normal ? 1 / g.scale : 0;
  const auto trial_code = [levels](float position) {
    const float c = std::rint(position);
    return c < 0 ? 0 : c > levels ? levels : c;
  };
  if (!rules.gain) {  // what the codes leave: e = x - zero - c * scale
    float sum = 0, square = 0;
    for (const float value : x) {
      const float distance = value - g.zero;
      const float e = std::fma(-g.scale, trial_code(distance * factor), distance);
      sum += e;
      square = std::fma(e, e, square);
    }
    *error = square;
    if (rules.bias && *fits && *normal) {
      const float moved = g.zero + sum * (1 / count);
      bool good = std::isfinite(moved);
      const float stored = zero_for(rules, g.scale, moved, &good);
      const float by = stored - g.zero;
      if (good) *error = square + by * (count * by - 2 * sum);  // sum (e - by)^2
      if (good) g.zero = stored;
    }
    return g;
  }
  float mean = 0, sum = 0, square = 0, c1 = 0, c2 = 0, cx = 0;
  if (!rules.symmetric) {
    for (const float value : x) mean += value;
    mean *= 1 / count;
  }
  for (const float value : x) sum += value - mean, square = std::fma(value - mean, value - mean, square);
  for (const float value : x) {
    const float c = trial_code(std::fma(value - mean, factor, (mean - g.zero) * factor));
    c1 += c, c2 = std::fma(c, c, c2), cx = std::fma(c, value - mean, cx);
  }
  const float middle = rules.symmetric ? 0.5f * levels : c1 * (1 / count);
  const float spread = rules.symmetric ? c2 - levels * c1 + count * (middle * middle) : c2 - c1 * middle;
  const float both = cx - middle * sum;  // sum (c - middle)(x - mean)
  if (*fits && *normal && square / both > 0 && std::isfinite(square / both)) {
    float wanted = square / both;
    if (wanted < 0.5f * g.scale) wanted = 0.5f * g.scale;
    if (wanted > 2.0f * g.scale) wanted = 2.0f * g.scale;
    bool good = true;
    const float scale = scale_for(rules, wanted, mean - wanted * middle, &good);
    const float moved = mean - scale * middle;
    const float stored = zero_for(rules, scale, moved, &good);
    if (good && std::isfinite(moved)) g.scale = scale, g.zero = stored;
  }
  // sum (x - mean - scale (c - middle) + offset)^2
  const float offset = (mean - g.zero) - g.scale * middle;
  *error = square + g.scale * (g.scale * spread - 2 * both) + count * (offset * offset);
  return g;
}

inline Group quantize_group(const std::vector<float>& x, const Rules& rules) {
  Group best;
  best.codes.assign(x.size(), 0);
  float lo = x[0], hi = x[0];
  bool finite = true;
  for (const float value : x) {
    finite = finite && std::isfinite(value);
    if (value < lo) lo = value;
    if (value > hi) hi = value;
  }
  if (rules.symmetric) {
    hi = std::fmax(std::fabs(lo), std::fabs(hi));
    lo = -hi;
  }
  if (!finite || !std::isfinite(hi - lo)) {
    best.zero = std::numeric_limits<float>::quiet_NaN();
    return best;
  }
  if (lo == 0) lo = 0;  // one sign of zero
  const float span = hi - lo == 0 ? 0 : hi - lo;
  std::vector<float> parts = {1.0f};
  for (int64_t i = 0; i < rules.search.count; i++) {
    parts.push_back(static_cast<float>(rules.search.thousandths[i]) / 1000.0f);
  }
  float best_error = 0;
  for (size_t i = 0; i < parts.size(); i++) {
    bool fits = true, normal = true;
    float error = 0;
    Group g = quantize_part(x, rules, lo, span, parts[i], &fits, &error, &normal);
    g.fits = fits || is_wide(rules.type);
    if (i == 0) {
      best = g, best_error = error;
    } else if (fits && normal && error < best_error) {
      g.fits = best.fits;  // the plain range decides what is storable
      best = g, best_error = error;
    }
  }
  return best;
}

// Sets or reads the code of (token, channel) from the words of kivi/format.h: element e of a word of B-bit codes at bit
// B * (e / 2) + 16 * (e % 2); K: words of one token along channels, lines of 16 tokens; V: words of one channel along
// tokens, lines of 16 channels; 3 bits: 2 low bits, then a plane of the high bit.
struct Codes {
  const RecordLayout& layout;
  int bits;
  bool keys;
  int64_t key_class = 0;

  template <class Visit>  // visit(byte, bit in byte, bit of the code)
  void visit(int64_t token, int64_t channel, Visit visit) const {
    for (int b = 0; b < bits; b++) {
      const int plane = bits == 3 && b == 2 ? 1 : 0;
      const int width = bits == 3 ? (plane == 0 ? 2 : 1) : bits;
      const int per_word = 32 / width;
      const int64_t along = keys ? channel : token, across = keys ? token : channel;
      const int64_t word = along / per_word, e = along % per_word, line16 = across / 16, lane = across % 16;
      const int64_t line =
          keys ? line16 * layout.key_classes[key_class].words[plane] + word : word * (layout.v_channels / 16) + line16;
      const int64_t bit = width * (e / 2) + 16 * (e % 2) + (b - 2 * plane);
      visit(
          (keys ? layout.key_classes[key_class].codes[plane] : layout.v_codes[plane]) + line * 64 + lane * 4 + bit / 8,
          bit % 8, b);
    }
  }
  void set(std::vector<uint8_t>* record, int64_t token, int64_t channel, int code) const {
    visit(token, channel, [&](int64_t byte, int64_t bit, int b) {
      auto& at = (*record)[static_cast<size_t>(byte)];
      at = static_cast<uint8_t>(at | (code >> b & 1) << bit);
    });
  }
};

// Scale and zero of group i where the sections begin. zero_at < 0: zeros are not stored.
inline void put_group(std::vector<uint8_t>* record, const RecordLayout& layout, int bits, int64_t scale_at,
                      int64_t zero_at, int64_t i, const Group& g) {
  uint8_t* const scales = record->data() + scale_at;
  uint8_t* const zeros = zero_at < 0 ? nullptr : record->data() + zero_at;
  const bool lost = std::isnan(g.zero);
  if (layout.scale_bytes == 1) {
    uint8_t byte = 255;
    for (int b = 0; !lost && b < 248; b++) {
      if (half_to_float(static_cast<uint16_t>(b << 7)) == g.scale) byte = static_cast<uint8_t>(b);
    }
    scales[i] = byte;
    if (zeros == nullptr) return;
    const float steps = lost || g.scale == 0 ? 0 : g.zero / g.scale * steps_of_zero(bits);
    zeros[i] =
        std::isfinite(steps) ? static_cast<uint8_t>(static_cast<int>(steps)) : uint8_t{0};  // the scale does not fit
    return;
  }
  const float scale = lost && zeros == nullptr ? -std::numeric_limits<float>::quiet_NaN() : g.scale;
  if (layout.scale_bytes == 4) {
    std::memcpy(scales + 4 * i, &scale, 4);
    if (zeros != nullptr) std::memcpy(zeros + 4 * i, &g.zero, 4);
  } else {
    const uint16_t s = float_to_half(scale), z = float_to_half(g.zero);
    std::memcpy(scales + 2 * i, &s, 2);
    if (zeros != nullptr) std::memcpy(zeros + 2 * i, &z, 2);
  }
}

// A row of values times the Hadamard matrix, by its definition in double, rounded: for comparison within rounding.
inline std::vector<double> rotated(const std::vector<double>& row, bool back) {
  size_t n = 1;
  while (row.size() % (2 * n) == 0) n *= 2;
  int k = 0;
  while (size_t{1} << k < n) k++;
  std::vector<double> out(row.size(), 0.0);
  for (size_t i = 0; i < row.size(); i++) {
    for (size_t j = 0; j < n; j++) {
      const size_t shared = (i % n) & j;
      int sign = 1;
      for (size_t b = shared; b != 0; b &= b - 1) sign = -sign;
      out[i] += sign * row[i / n * n + j];
    }
    out[i] = std::ldexp(out[i], back ? -(k / 2) : -((k + 1) / 2));
  }
  return out;
}

// The whole record; `*fits` as encode returns it. `k_back` and `v_back`: what the record stands for, [token][channel].
inline std::vector<uint8_t> encode(const Format& f, const Array& k, int64_t k_stride, const Array& v, int64_t v_stride,
                                   bool* fits, std::vector<float>* k_back, std::vector<float>* v_back,
                                   const int16_t* k_order = nullptr) {
  const RecordLayout layout = record_layout(f);
  std::vector<uint8_t> record(static_cast<size_t>(layout.bytes), 0);
  *fits = true;
  k_back->assign(static_cast<size_t>(f.group_size * f.head_dim), 0);
  v_back->assign(static_cast<size_t>(f.group_size * f.value_head_dim), 0);
  const auto back = [](const Group& g, size_t i) {
    const float product = static_cast<float>(g.codes[i]) * g.scale;
    return g.zero + product;
  };
  int64_t key_class = 0, in_class = 0;
  for (int64_t place = 0; place < f.head_dim; place++, in_class++) {
    if (f.num_key_classes > 0 && in_class == f.key_classes[key_class].channels) key_class++, in_class = 0;
    const int64_t d = k_order == nullptr ? place : k_order[place];
    std::vector<float> x;
    for (int64_t t = 0; t < f.group_size; t++) x.push_back(k.get(t * k_stride + d));
    const int bits = static_cast<int>(f.num_key_classes > 0 ? f.key_classes[key_class].bits : f.k_bits);
    const Group g = quantize_group(x, {bits, f.scale_type, f.k_search, false, f.k_bias_correction, false});
    *fits = *fits && g.fits;
    put_group(&record, layout, bits, layout.k_scale, layout.k_zero, place, g);
    const Codes codes{layout, bits, true, key_class};
    for (int64_t t = 0; t < f.group_size; t++) {
      codes.set(&record, t, in_class, g.codes[static_cast<size_t>(t)]);
      (*k_back)[static_cast<size_t>(t * f.head_dim + d)] = back(g, static_cast<size_t>(t));
    }
  }
  // Where values are rotated, `v` is what the rotation gave (and `v_back` is not rotated back).
  const int64_t per_group = f.v_group_size == 0 ? f.group_size : f.v_group_size;
  for (int64_t t = 0; t < f.group_size; t++) {
    for (int64_t first = 0; first < f.value_head_dim; first += per_group) {
      std::vector<float> x;
      for (int64_t d = first; d < f.value_head_dim && d < first + per_group; d++) x.push_back(v.get(t * v_stride + d));
      const int bits = static_cast<int>(f.v_bits);
      const Group g = quantize_group(x, {bits, f.scale_type, f.v_search, f.v_symmetric, false, f.v_gain_correction});
      *fits = *fits && g.fits;
      put_group(&record, layout, bits, layout.v_scale, f.v_symmetric ? -1 : layout.v_zero,
                first / per_group * f.group_size + t, g);
      const Codes codes{layout, bits, false};
      for (size_t i = 0; i < x.size(); i++) {
        const int64_t d = first + static_cast<int64_t>(i);
        codes.set(&record, t, d, g.codes[i]);
        (*v_back)[static_cast<size_t>(t * f.value_head_dim + d)] = back(g, i);
      }
    }
  }
  return record;
}

}  // namespace kivi::cpu::oracle
