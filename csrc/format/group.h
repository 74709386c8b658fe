// One group of numbers, its range, and how it becomes codes and comes back: what records and
// the dense form share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "format/half.h"
#include "format/host_device.h"
#include "format/params.h"

namespace kivi {

// Numbers `stride` elements apart.
struct Strided {
  const void* data;
  Element type;
  int64_t stride;
  int64_t count;

  KIVI_HOST_DEVICE float operator[](int64_t i) const { return load_element(data, type, i * stride); }
};

// The extremes of a group. Adding +0 makes a span of -0 into +0, so that no bit depends on which of two zeros came
// first; `shrunk` does the same to the zero point.
struct GroupRange {
  float lo = 0, hi = 0;
  float span = 0;
  bool finite = false;  // no NaN, no Inf, and the span does not overflow
};

template <class Numbers>
KIVI_HOST_DEVICE GroupRange group_range(const Numbers& x) {
  GroupRange r;
  float lo = bits_float(kFloatInf);
  float hi = -lo;
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
  KIVI_HOST_DEVICE uint32_t code(float x) const {
    if (!(scale > 0.0f)) return 0;
    const float rounded = std::nearbyint((x - zero) / scale);
    return static_cast<uint32_t>(std::min(std::max(0.0f, rounded), top));  // in this order NaN, of a scale of Inf, is 0
  }

  KIVI_HOST_DEVICE float value(uint32_t code) const {
    const float product = static_cast<float>(code) * scale;
    return zero + product;
  }
};

KIVI_HOST_DEVICE inline Quantizer not_finite(float top) { return {0.0f, bits_float(kFloatNaN), top}; }

KIVI_HOST_DEVICE inline float top_code(int64_t bits) { return static_cast<float>((1 << bits) - 1); }

}  // namespace kivi
