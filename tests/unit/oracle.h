// Quantising written down once more, straight from the definition and sharing nothing with the library but the
// conversion of float16: one group at a time, one code at a time, every bit addressed by itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "test_data.h"

namespace kivi::cpu::oracle {

struct Group {
  float scale = 0;
  float zero = 0;
  std::vector<int> codes;
  bool fits = true;  // the stored type
};

inline float rounded(float x, ScaleType type, bool* fits) {
  if (type == ScaleType::kFloat32) return x;
  const float h = half_to_float(float_to_half(x));
  if (std::isfinite(h)) return h;
  *fits = false;
  return type == ScaleType::kWidened ? x : h;
}

inline Group quantize_group(const std::vector<float>& x, int bits, ScaleType type, bool search) {
  const float levels = static_cast<float>((1 << bits) - 1);
  Group best;
  best.codes.assign(x.size(), 0);
  float lo = x[0], hi = x[0];
  bool finite = true;
  for (const float value : x) {
    finite = finite && std::isfinite(value);
    if (value < lo) lo = value;
    if (value > hi) hi = value;
  }
  if (!finite || !std::isfinite(hi - lo)) {
    best.zero = std::numeric_limits<float>::quiet_NaN();
    return best;
  }
  if (lo == 0) lo = 0;  // one sign of zero
  float best_error = 0;
  for (const float r : {1.0f, 0.98f, 0.96f, 0.94f, 0.92f, 0.90f}) {
    const float width = (hi - lo) * r;
    const float margin = ((hi - lo) - width) * 0.5f;
    bool fits = true;
    Group g;
    g.scale = rounded(width == 0 ? 0 : width / levels, type, &fits);
    g.zero = rounded(lo + margin, type, &fits);
    float error = 0;
    for (const float value : x) {
      int code = 0;
      if (g.scale > 0) {
        const float position = std::rint((value - g.zero) / g.scale);
        code = position < 0 ? 0 : position > levels ? static_cast<int>(levels) : static_cast<int>(position);
      }
      g.codes.push_back(code);
      const float product = static_cast<float>(code) * g.scale;
      const float e = value - (g.zero + product);
      const float square = e * e;
      error += square;
    }
    g.fits = fits || type == ScaleType::kWidened;
    if (r == 1.0f) {
      best = g, best_error = error;
    } else if (fits && error < best_error) {
      g.fits = best.fits;  // the plain range decides what is storable
      best = g, best_error = error;
    }
    if (!search) break;
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

  template <class Visit>  // visit(byte, bit in byte, bit of the code)
  void visit(int64_t token, int64_t channel, Visit visit) const {
    for (int b = 0; b < bits; b++) {
      const int plane = bits == 3 && b == 2 ? 1 : 0;
      const int width = bits == 3 ? (plane == 0 ? 2 : 1) : bits;
      const int per_word = 32 / width;
      const int64_t along = keys ? channel : token, across = keys ? token : channel;
      const int64_t word = along / per_word, e = along % per_word, line16 = across / 16, lane = across % 16;
      const int64_t line = keys ? line16 * layout.k_words[plane] + word : word * (layout.v_channels / 16) + line16;
      const int64_t bit = width * (e / 2) + 16 * (e % 2) + (b - 2 * plane);
      visit((keys ? layout.k_codes[plane] : layout.v_codes[plane]) + line * 64 + lane * 4 + bit / 8, bit % 8, b);
    }
  }
  void set(std::vector<uint8_t>* record, int64_t token, int64_t channel, int code) const {
    visit(token, channel, [&](int64_t byte, int64_t bit, int b) {
      auto& at = (*record)[static_cast<size_t>(byte)];
      at = static_cast<uint8_t>(at | (code >> b & 1) << bit);
    });
  }
};

inline void put_scale(std::vector<uint8_t>* record, const RecordLayout& layout, int64_t section, int64_t i, float x) {
  if (layout.scale_bytes == 4) {
    std::memcpy(record->data() + section + 4 * i, &x, 4);
  } else {
    const uint16_t h = float_to_half(x);
    std::memcpy(record->data() + section + 2 * i, &h, 2);
  }
}

// The whole record; `*fits` as encode returns it. `k_back` and `v_back`: what the record stands for, [token][channel].
inline std::vector<uint8_t> encode(const Format& f, const Array& k, int64_t k_stride, const Array& v, int64_t v_stride,
                                   bool* fits, std::vector<float>* k_back, std::vector<float>* v_back) {
  const RecordLayout layout = record_layout(f);
  std::vector<uint8_t> record(static_cast<size_t>(layout.bytes), 0);
  *fits = true;
  k_back->assign(static_cast<size_t>(f.group_size * f.head_dim), 0);
  v_back->assign(static_cast<size_t>(f.group_size * f.value_head_dim), 0);
  const auto back = [](const Group& g, size_t i) {
    const float product = static_cast<float>(g.codes[i]) * g.scale;
    return g.zero + product;
  };
  for (int64_t d = 0; d < f.head_dim; d++) {
    std::vector<float> x;
    for (int64_t t = 0; t < f.group_size; t++) x.push_back(k.get(t * k_stride + d));
    const Group g = quantize_group(x, static_cast<int>(f.k_bits), f.scale_type, f.range_search);
    *fits = *fits && g.fits;
    put_scale(&record, layout, layout.k_scale, d, g.scale);
    put_scale(&record, layout, layout.k_zero, d, g.zero);
    const Codes codes{layout, static_cast<int>(f.k_bits), true};
    for (int64_t t = 0; t < f.group_size; t++) {
      codes.set(&record, t, d, g.codes[static_cast<size_t>(t)]);
      (*k_back)[static_cast<size_t>(t * f.head_dim + d)] = back(g, static_cast<size_t>(t));
    }
  }
  for (int64_t t = 0; t < f.group_size; t++) {
    for (int64_t first = 0; first < f.value_head_dim; first += f.group_size) {
      std::vector<float> x;
      for (int64_t d = first; d < f.value_head_dim && d < first + f.group_size; d++)
        x.push_back(v.get(t * v_stride + d));
      const Group g = quantize_group(x, static_cast<int>(f.v_bits), f.scale_type, f.range_search);
      *fits = *fits && g.fits;
      put_scale(&record, layout, layout.v_scale, first + t, g.scale);
      put_scale(&record, layout, layout.v_zero, first + t, g.zero);
      const Codes codes{layout, static_cast<int>(f.v_bits), false};
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
