// float16 and bfloat16 to float and back, rounding to nearest even, in integer arithmetic: the same on every CPU and in
// every floating-point mode of the thread. NaN stays NaN (made quiet, with the upper bits of its payload, as the
// hardware does).
#pragma once

#include <cstdint>
#include <cstring>

#include "format/host_device.h"
#include "format/params.h"

namespace kivi {

KIVI_HOST_DEVICE inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

KIVI_HOST_DEVICE inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline constexpr uint32_t kFloatSign = 0x80000000u;
inline constexpr uint32_t kFloatInf = 0x7F800000u;
inline constexpr uint32_t kFloatNaN = 0x7FC00000u;
// The scale of a group of NaN that has no zero to say so. Negative, so that it is never the largest scale.
inline constexpr uint32_t kLostScale = 0xFFC00000u;
inline constexpr uint16_t kHalfInf = 0x7C00;
inline constexpr uint16_t kHalfMax = 0x7BFF;  // 65504

inline constexpr float kLargestHalf = 65504.0f;
inline constexpr float kLargestFloat8 = 61440.0f;  // of the 8-bit scales below

KIVI_HOST_DEVICE inline bool is_finite(float x) { return (float_bits(x) & kFloatInf) != kFloatInf; }

KIVI_HOST_DEVICE inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  uint32_t mantissa = h & 1023u;
  if (exponent == 31) {  // Inf, NaN
    return bits_float(sign | kFloatInf | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u));
  }
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
  if (mantissa == 0) return bits_float(sign);
  uint32_t e = 113;  // subnormal: mantissa * 2^-24, a normal float
  for (; (mantissa & 1024u) == 0; e--) mantissa <<= 1;
  return bits_float(sign | e << 23 | (mantissa & 1023u) << 13);
}

KIVI_HOST_DEVICE inline uint16_t float_to_half(float x) {
  const uint32_t u = float_bits(x);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t a = u & ~kFloatSign;
  if (a > kFloatInf) return static_cast<uint16_t>(sign | 0x7E00u | (a >> 13 & 1023u));
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | kHalfInf);  // 65520 and more round to infinity
  if (a >= 0x38800000u) {                                               // 2^-14 and more: a normal half
    const uint32_t r = a - (112u << 23);
    return static_cast<uint16_t>(sign | (r + 0xFFFu + (r >> 13 & 1u)) >> 13);
  }
  const uint32_t exponent = a >> 23;
  if (exponent < 102) return static_cast<uint16_t>(sign);  // below 2^-25
  const uint32_t mantissa = (a & 0x7FFFFFu) | 0x800000u;   // value = mantissa * 2^(exponent - 150)
  const uint32_t shift = 126 - exponent;                   // in units of 2^-24: mantissa >> shift, shift 14 to 24
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t middle = 1u << (shift - 1);
  return static_cast<uint16_t>(sign | (kept + (rest > middle || (rest == middle && (kept & 1u) != 0))));
}

// As float_to_half, but a finite value never becomes infinite: +-65504 instead.
KIVI_HOST_DEVICE inline uint16_t float_to_half_finite(float x) {
  const uint16_t h = float_to_half(x);
  return (h & 0x7FFFu) == kHalfInf && is_finite(x) ? static_cast<uint16_t>((h & 0x8000u) | kHalfMax) : h;
}

// The 8-bit scales of kivi/format.h: the upper byte of a float16 without its sign. x is not negative; NaN becomes 255,
// and what is too large 248, infinity.
KIVI_HOST_DEVICE inline uint8_t float_to_float8(float x) {
  const uint32_t h = float_to_half(x);
  if (h > kHalfInf) return 255;
  return static_cast<uint8_t>((h + 0x3Fu + (h >> 7 & 1u)) >> 7);
}
KIVI_HOST_DEVICE inline uint16_t float8_to_half(uint8_t b) { return static_cast<uint16_t>(b << 7); }

// A zero of `steps` steps beside its scale. Exact: 7 bits times 4.
KIVI_HOST_DEVICE inline float float8_zero(float steps, float scale, int64_t bits) {
  return steps * scale / zero_steps(bits);
}

KIVI_HOST_DEVICE inline float bfloat16_to_float(uint16_t b) { return bits_float(static_cast<uint32_t>(b) << 16); }

KIVI_HOST_DEVICE inline uint16_t float_to_bfloat16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & ~kFloatSign) > kFloatInf) return static_cast<uint16_t>(u >> 16 | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}

// Element `i` of an array of any element type.
KIVI_HOST_DEVICE inline float load_element(const void* array, Element type, int64_t i) {
  if (type == Element::kFloat32) return static_cast<const float*>(array)[i];
  const uint16_t u = static_cast<const uint16_t*>(array)[i];
  return type == Element::kFloat16 ? half_to_float(u) : bfloat16_to_float(u);
}

// Rounds to the type; a finite value that float16 cannot hold becomes +-65504.
KIVI_HOST_DEVICE inline void store_element(void* array, Element type, int64_t i, float x) {
  if (type == Element::kFloat32) {
    static_cast<float*>(array)[i] = x;
  } else {
    static_cast<uint16_t*>(array)[i] = type == Element::kFloat16 ? float_to_half_finite(x) : float_to_bfloat16(x);
  }
}

// `i` elements further on.
KIVI_HOST_DEVICE inline const void* advance(const void* array, Element type, int64_t i) {
  return static_cast<const uint8_t*>(array) + i * element_bytes(type);
}

}  // namespace kivi
