// One group of numbers, its range, and how it becomes codes and comes back: what the scalar kernels for records and for
// the dense form share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/half.h"
#include "cpu/kernels.h"

namespace kivi::cpu {

// Numbers `stride` elements apart.
struct Strided {
  const void* data;
  Element type;
  int64_t stride;
  int64_t count;

  float operator[](int64_t i) const { return load_element(data, type, i * stride); }
};

// The extremes of a group. Adding +0 makes a span of -0 into +0, so that no bit depends on which of two zeros came
// first; `shrunk` does the same to the zero point.
struct GroupRange {
  float lo = 0, hi = 0;
  float span = 0;
  bool finite = false;  // no NaN, no Inf, and the span does not overflow
};

inline GroupRange group_range(const Strided& x) {
  GroupRange r;
  float lo = std::numeric_limits<float>::infinity();
  float hi = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < x.count; i++) {
    const float value = x[i];
    if (!is_finite(value)) return r;
    lo = std::min(lo, value);
    hi = std::max(hi, value);
  }
  const float span = hi - lo;
  if (!is_finite(span)) return r;
  r.lo = lo;
  r.hi = hi;
  r.span = span + 0.0f;
  r.finite = true;
  return r;
}

struct Quantizer {
  float scale = 0;
  float zero = 0;
  float top = 0;  // largest code

  // A scale of 0 (also a subnormal one, if the thread treats those as 0) has code 0. The clamp comes before the
  // conversion.
  uint32_t code(float x) const {
    if (!(scale > 0.0f)) return 0;
    const float rounded = std::nearbyint((x - zero) / scale);
    return static_cast<uint32_t>(std::min(std::max(rounded, 0.0f), top));
  }

  float value(uint32_t code) const {
    const float product = static_cast<float>(code) * scale;
    return zero + product;
  }
};

inline Quantizer not_finite(float top) { return {0.0f, bits_float(kFloatNaN), top}; }

inline float top_code(int64_t bits) { return static_cast<float>((1 << bits) - 1); }

}  // namespace kivi::cpu
