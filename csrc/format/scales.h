// How scale and zero of a group in a record are chosen, stored and read: the definition (its words are at EncodeParams
// in cpu/kernels.h), used by the scalar kernels as it is and by the CUDA kernels with one thread a group, so that both
// add in the same order. fp32 arithmetic, fused only where fma is written: compiled without contraction. Quantisation:
// KIVI (arXiv 2402.02750), section 3.
//
// Numbers is anything with `count` and operator[] that gives a float.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "format/group.h"
#include "format/half.h"
#include "format/host_device.h"

namespace kivi {

KIVI_HOST_DEVICE inline float through_half(float x) { return half_to_float(float_to_half(x)); }

KIVI_HOST_DEVICE inline float through_float8(float x) { return half_to_float(float8_to_half(float_to_float8(x))); }

KIVI_HOST_DEVICE inline float through_narrow(float x, ScaleType type) {
  return type == ScaleType::kFloat8 ? through_float8(x) : type == ScaleType::kFloat16 ? through_half(x) : x;
}

// How the quantizer of a group is chosen.
struct GroupRules {
  ScaleType type;
  int64_t bits;
  bool symmetric;
  bool bias, gain;
  const RangeSearch* search;

  KIVI_HOST_DEVICE float top() const { return top_code(bits); }
  // The range itself in float16 or float32: what KIVI defines.
  KIVI_HOST_DEVICE bool plain() const {
    return narrow(type) != ScaleType::kFloat8 && !symmetric && !bias && !gain && search->count == 0;
  }
};

// A quantizer that makes codes, and what is stored of it. They differ after a correction, which keeps the codes.
struct Choice {
  Quantizer coder;
  float scale = 0, zero = 0;  // stored
  bool fits = true;           // both fit the type that they are rounded to; always so for float32
};

// 0 for scales so small that 1 / scale might overflow: such groups are neither searched nor corrected, and their codes
// are 0.
KIVI_HOST_DEVICE inline float inverse(float scale) { return scale >= FLT_MIN ? 1.0f / scale : 0.0f; }

// The stored scale of a group whose zero is to be about `zero`.
KIVI_HOST_DEVICE inline float stored_scale(const GroupRules& g, float scale, float zero, bool* fits) {
  const ScaleType type = narrow(g.type);
  if (type == ScaleType::kFloat8 && !g.symmetric) {
    scale = std::max(scale, std::fabs(zero) * (zero_steps(g.bits) / kZeroReach));  // or the zero would be out of reach
  }
  const float rounded = through_narrow(scale, type);
  if (is_finite(rounded)) return rounded;
  *fits = false;
  return g.type == type ? rounded : scale;
}

// The stored zero beside a stored scale.
KIVI_HOST_DEVICE inline float stored_zero(const GroupRules& g, float scale, float zero, bool* fits) {
  if (g.symmetric) return -(scale * (0.5f * g.top()));
  const ScaleType type = narrow(g.type);
  if (type == ScaleType::kFloat32) return zero;
  if (type == ScaleType::kFloat16) {
    const float rounded = through_half(zero);
    if (is_finite(rounded)) return rounded;
    *fits = false;
    return g.type == type ? rounded : zero;
  }
  if (!is_finite(through_float8(scale))) return zero;  // a scale out of range has been reported
  const float steps = std::nearbyint(zero * inverse(scale) * zero_steps(g.bits)) + 0.0f;  // no -0: bytes have none
  return float8_zero(std::min(std::max(steps, -127.0f), 127.0f), scale, g.bits);
}

// The choice for the part `factor` of the range around its middle. For float16 and float32 the zero is the lower end of
// that; for float8, whose scale may be rounded far, the middle is kept.
KIVI_HOST_DEVICE inline Choice choose_range(const GroupRules& g, const GroupRange& range, float factor) {
  Choice c;
  const float width = range.span * factor, top = g.top();
  float scale = width / top;
  float zero = range.lo + (range.span - width) * 0.5f;
  if (narrow(g.type) == ScaleType::kFloat8) {
    const float middle = range.lo + range.span * 0.5f;
    scale = stored_scale(g, scale, middle - scale * (0.5f * top), &c.fits);
    zero = middle - scale * (0.5f * top);
  } else {
    scale = stored_scale(g, scale, zero, &c.fits);
  }
  c.coder = {scale, stored_zero(g, scale, zero, &c.fits), top};
  c.scale = c.coder.scale, c.zero = c.coder.zero;
  return c;
}

KIVI_HOST_DEVICE inline float clamped(float position, float top) {
  return std::nearbyint(std::min(std::max(position, 0.0f), top));
}

KIVI_HOST_DEVICE inline uint32_t code_of(const GroupRules& g, const Quantizer& q, float x) {
  if (g.plain()) return q.code(x);
  const float factor = inverse(q.scale);
  return factor > 0.0f ? static_cast<uint32_t>(clamped((x - q.zero) * factor, g.top())) : 0;
}

// A choice, corrected if that is asked for, with the sum of the squared errors of what is then stored. One look at the
// numbers gives sums from which the correction and the error follow.
struct Trial {
  Choice choice;
  float error = 0;
  bool valid = false;  // fits, and may win the search
};

// Without a correction, or with that of the bias, which moves the zero by the mean error. The sums are those of what
// the codes leave.
template <class Numbers>
KIVI_HOST_DEVICE void measure_rest(const GroupRules& g, const Numbers& x, Trial& t) {
  Choice& c = t.choice;
  const auto count = static_cast<float>(x.count);
  const float factor = inverse(c.scale);
  float sum = 0, square = 0;
  for (int64_t i = 0; i < x.count; i++) {
    const float distance = x[i] - c.zero;
    const float rest = std::fma(-c.scale, clamped(distance * factor, g.top()), distance);
    sum += rest;
    square = std::fma(rest, rest, square);
  }
  t.error = square;
  if (!g.bias || !t.valid) return;
  const float wanted = c.zero + sum * (1.0f / count);
  bool fits = is_finite(wanted);
  const float zero = stored_zero(g, c.scale, wanted, &fits);
  if (!fits) return;
  const float moved = zero - c.zero;
  t.error = square + moved * (count * moved - 2.0f * sum);
  c.zero = zero;
}

// The numbers of a group around their mean; around 0 if V is symmetric.
struct Centred {
  float mean = 0, sum = 0, square = 0;

  template <class Numbers>
  KIVI_HOST_DEVICE Centred(const GroupRules& g, const Numbers& x) {
    if (!g.symmetric) {
      for (int64_t i = 0; i < x.count; i++) mean += x[i];
      mean *= 1.0f / static_cast<float>(x.count);
    }
    for (int64_t i = 0; i < x.count; i++) {
      const float distance = x[i] - mean;
      sum += distance;
      square = std::fma(distance, distance, square);
    }
  }
};

// With the correction of the gain: scale and zero that give the values slope 1 on x, and x's mean; the scale by a
// factor of 2 at most. The sums are those of the codes.
template <class Numbers>
KIVI_HOST_DEVICE void measure_gain(const GroupRules& g, const Numbers& x, const Centred& around, Trial& t) {
  Choice& c = t.choice;
  const auto count = static_cast<float>(x.count);
  const float factor = inverse(c.scale), shift = (around.mean - c.zero) * factor;
  float codes = 0, squares = 0, products = 0;
  for (int64_t i = 0; i < x.count; i++) {
    const float distance = x[i] - around.mean;
    const float code = clamped(std::fma(distance, factor, shift), g.top());
    codes += code;
    squares = std::fma(code, code, squares);
    products = std::fma(code, distance, products);
  }
  // Around the mean of the codes, or the middle one.
  const float middle = g.symmetric ? 0.5f * g.top() : codes * (1.0f / count);
  const float spread = g.symmetric ? squares - g.top() * codes + count * (middle * middle) : squares - codes * middle;
  const float both = products - middle * around.sum;
  const float slope = around.square / both;
  if (t.valid && slope > 0.0f && slope <= FLT_MAX) {
    const float wanted = std::min(std::max(slope, 0.5f * c.scale), 2.0f * c.scale);
    bool fits = true;
    const float scale = stored_scale(g, wanted, around.mean - wanted * middle, &fits);
    const float moved = around.mean - scale * middle;
    const float zero = stored_zero(g, scale, moved, &fits);
    if (fits && is_finite(moved)) c.scale = scale, c.zero = zero;
  }
  const float offset = (around.mean - c.zero) - c.scale * middle;
  t.error = around.square + c.scale * (c.scale * spread - 2.0f * both) + count * (offset * offset);
}

template <class Numbers>
KIVI_HOST_DEVICE Trial try_range(const GroupRules& g, const Numbers& x, const GroupRange& range, const Centred& around,
                                 float factor) {
  Trial t;
  t.choice = choose_range(g, range, factor);
  t.valid = t.choice.fits && t.choice.scale >= FLT_MIN;
  if (g.gain) {
    measure_gain(g, x, around, t);
  } else {
    measure_rest(g, x, t);
  }
  return t;
}

// The range that the codes are to span before any search: around 0 if V is symmetric.
template <class Numbers>
KIVI_HOST_DEVICE GroupRange plain_range(const GroupRules& g, const Numbers& x) {
  const GroupRange range = group_range(x);
  if (!range.finite || !g.symmetric) return range;
  const float reach = std::max(std::fabs(range.lo), std::fabs(range.hi));
  return {-reach, reach, 2.0f * reach, is_finite(2.0f * reach)};
}

// `fits` is false where the format stores less than float32 and the plain range's scale or zero does not fit. In the
// search, a part that does not fit is passed over (unless scales are float32 from the start), so that a widened cache
// chooses what it did before.
template <class Numbers>
KIVI_HOST_DEVICE Choice choose_quantizer(const GroupRules& g, const Numbers& x) {
  const GroupRange range = plain_range(g, x);
  Choice best;
  if (!range.finite) {
    best.zero = bits_float(kFloatNaN);
    return best;
  }
  if (!g.bias && !g.gain && g.search->count == 0) {  // nothing that would look at the numbers
    best = choose_range(g, range, 1.0f);
  } else {
    const Centred around(g, x);
    float least = 0;
    bool fits = true;
    for (int64_t i = -1; i < g.search->count; i++) {  // the plain range first
      const Trial t = try_range(g, x, range, around, i < 0 ? 1.0f : g.search->factor(i));
      if (i < 0) {
        fits = t.choice.fits;
      } else if (!t.valid || !(t.error < least)) {
        continue;
      }
      least = t.error;
      best = t.choice;
    }
    best.fits = fits;
  }
  best.fits = best.fits || widened(g.type) == g.type;
  return best;
}

// What stands for a group that does not fit (choose_quantizer's answer) where nobody can widen the cache: the plain
// range's scale and zero, each replaced by the nearest number that the type has. No search, no correction. Codes are
// those against the stored values, so that numbers out of reach become the outermost ones: finite, and as near as the
// format gets.
template <class Numbers>
KIVI_HOST_DEVICE Choice saturated(const GroupRules& g, const Numbers& x) {
  const GroupRange range = plain_range(g, x);
  const bool bytes = narrow(g.type) == ScaleType::kFloat8;
  const float most = bytes ? kLargestFloat8 : kLargestHalf, top = g.top();
  Choice c;
  float scale = std::min(range.span / top, most), zero = range.lo;
  if (bytes) {
    const float middle = range.lo + range.span * 0.5f;
    scale = std::min(stored_scale(g, scale, middle - scale * (0.5f * top), &c.fits), most);
    zero = middle - scale * (0.5f * top);
  } else {
    scale = stored_scale(g, scale, zero, &c.fits);
    zero = std::min(std::max(zero, -most), most);
  }
  c.coder = {scale, stored_zero(g, scale, zero, &c.fits), top};
  c.scale = c.coder.scale, c.zero = c.coder.zero, c.fits = false;
  return c;
}

// What a format asks of a group of keys, and of one of values.
KIVI_HOST_DEVICE inline GroupRules key_rules(const Format& f) {
  return {f.scale_type, f.k_bits, false, f.k_bias_correction, false, &f.k_search};
}
KIVI_HOST_DEVICE inline GroupRules value_rules(const Format& f) {
  return {f.scale_type, f.v_bits, f.v_symmetric, false, f.v_gain_correction, &f.v_search};
}

// Scale and zero of one group as stored. 255 is the scale of a group of NaN: it comes back as scale 0, zero NaN.
KIVI_HOST_DEVICE inline void store_group(const RecordLayout& layout, int64_t bits, uint8_t* scales, uint8_t* zeros,
                                         int64_t i, const Choice& c) {
  const bool lost = c.zero != c.zero;
  if (layout.scale_bytes == 1) {
    scales[i] = lost ? 255 : float_to_float8(c.scale);
    if (zeros == nullptr) return;
    // Out of range, or NaN, only where the scale does not fit: then the record is thrown away.
    const float steps = c.scale > 0.0f ? c.zero / c.scale * zero_steps(bits) : 0.0f;
    const bool fits = !lost && std::fabs(steps) <= 127.0f;
    reinterpret_cast<int8_t*>(zeros)[i] = fits ? static_cast<int8_t>(steps) : int8_t{0};
  } else {
    const float scale = lost && zeros == nullptr ? bits_float(kLostScale) : c.scale;
    if (layout.scale_bytes == 2) {
      reinterpret_cast<uint16_t*>(scales)[i] = float_to_half(scale);
      if (zeros != nullptr) reinterpret_cast<uint16_t*>(zeros)[i] = float_to_half(c.zero);
    } else {
      reinterpret_cast<float*>(scales)[i] = scale;
      if (zeros != nullptr) reinterpret_cast<float*>(zeros)[i] = c.zero;
    }
  }
}

// zeros: null where V is symmetric.
KIVI_HOST_DEVICE inline Quantizer load_group(const RecordLayout& layout, int64_t bits, const uint8_t* scales,
                                             const uint8_t* zeros, int64_t i) {
  const Element type = layout.scale_bytes == 4 ? Element::kFloat32 : Element::kFloat16;
  float scale = layout.scale_bytes == 1 ? half_to_float(float8_to_half(scales[i])) : load_element(scales, type, i);
  float zero;
  if (zeros == nullptr) {
    zero = -(scale * (0.5f * top_code(bits)));
  } else if (layout.scale_bytes == 1) {
    zero = float8_zero(static_cast<float>(reinterpret_cast<const int8_t*>(zeros)[i]), scale, bits);
  } else {
    zero = load_element(zeros, type, i);
  }
  if (scale != scale) scale = 0.0f, zero = bits_float(kFloatNaN);
  return {scale, zero, 0};
}

}  // namespace kivi
