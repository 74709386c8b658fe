// Scales and zeros as records store them (kivi/format.h: ScaleType), kLanes groups at a time.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_SCALES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_SCALES_INL_H_
#undef KIVI_CPU_VECTOR_SCALES_INL_H_
#else
#define KIVI_CPU_VECTOR_SCALES_INL_H_
#endif

#include "cpu/vector_simd-inl.h"
#include "format/half.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

using D16 = hn::Rebind<uint16_t, DF>;  // as many 16-bit lanes as there are floats
using D8 = hn::Rebind<uint8_t, DF>;
using V16 = hn::Vec<D16>;

HWY_INLINE V16 half_bits(VF x) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::BitCast(D16(), hn::DemoteTo(dh, x));
}
HWY_INLINE VF half_value(V16 bits) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::PromoteTo(DF(), hn::BitCast(dh, bits));
}

HWY_INLINE VF through_half(VF x) { return half_value(half_bits(x)); }

// For x >= 0.
HWY_INLINE VF through_float8(VF x) {
  const V16 h = half_bits(x);
  const V16 odd = hn::And(hn::ShiftRight<7>(h), hn::Set(D16(), 1));
  const V16 rounded = hn::Add(hn::Add(h, hn::Set(D16(), 0x3F)), odd);
  return half_value(hn::And(rounded, hn::Set(D16(), 0xFF80)));
}

enum class ScaleKind : uint8_t { kByte, kHalf, kFloat };

inline ScaleKind scale_kind(int64_t bytes) {
  return bytes == 1 ? ScaleKind::kByte : bytes == 2 ? ScaleKind::kHalf : ScaleKind::kFloat;
}

// Numbers i on of a section of scales. A group of NaN is NaN if they are bytes, or if there are no zeros.
template <ScaleKind kKind>
HWY_INLINE VF load_scale(const uint8_t* section, int64_t i) {
  if constexpr (kKind == ScaleKind::kByte) {
    return half_value(hn::ShiftLeft<7>(hn::PromoteTo(D16(), hn::LoadU(D8(), section + i))));
  } else if constexpr (kKind == ScaleKind::kHalf) {
    return load_half(reinterpret_cast<const uint16_t*>(section) + i);
  } else {
    return load_float(reinterpret_cast<const float*>(section) + i);
  }
}

// How zeros are stored beside scales.
struct ZeroRule {
  explicit ZeroRule(int64_t bits, bool has_none = false)
      : symmetric(has_none), step(1.0f / zero_steps(bits)), half_top(-0.5f * static_cast<float>((1 << bits) - 1)) {}
  bool symmetric;
  float step, half_top;  // one step of a byte, and the zero of a symmetric group, in scales
};

// Scales and zeros of the groups i on. A group of NaN is scale 0, zero NaN, however it is stored.
template <ScaleKind kKind, bool kSymmetricToo = true>
HWY_INLINE void load_group(const uint8_t* scales, const uint8_t* zeros, const ZeroRule& rule, int64_t i, VF& scale,
                           VF& zero) {
  scale = load_scale<kKind>(scales, i);
  if (kSymmetricToo && rule.symmetric) {
    zero = hn::Mul(scale, splat(rule.half_top));
  } else if constexpr (kKind == ScaleKind::kByte) {
    const hn::Rebind<int8_t, DF> ds8;
    const VI steps = hn::PromoteTo(DI(), hn::LoadU(ds8, reinterpret_cast<const int8_t*>(zeros) + i));
    zero = hn::Mul(hn::Mul(hn::ConvertTo(DF(), steps), scale), splat(rule.step));
  } else {
    zero = load_scale<kKind>(zeros, i);
    return;
  }
  const auto lost = hn::IsNaN(scale);
  scale = hn::IfThenZeroElse(lost, scale);
  zero = hn::IfThenElse(lost, hn::BitCast(DF(), hn::Set(DU(), kFloatNaN)), zero);
}

// The same for records of any kind.
HWY_INLINE void load_group(ScaleKind kind, const uint8_t* scales, const uint8_t* zeros, const ZeroRule& rule, int64_t i,
                           VF& scale, VF& zero) {
  if (kind == ScaleKind::kByte) {
    load_group<ScaleKind::kByte>(scales, zeros, rule, i, scale, zero);
  } else if (kind == ScaleKind::kHalf) {
    load_group<ScaleKind::kHalf>(scales, zeros, rule, i, scale, zero);
  } else {
    load_group<ScaleKind::kFloat>(scales, zeros, rule, i, scale, zero);
  }
}

HWY_INLINE void store_scale(ScaleKind kind, uint8_t* section, int64_t i, VF x) {
  if (kind == ScaleKind::kHalf) {
    hn::StoreU(half_bits(x), D16(), reinterpret_cast<uint16_t*>(section) + i);
  } else {
    store_float(x, reinterpret_cast<float*>(section) + i);
  }
}

// The inverse of load_group, for numbers that the kind can hold.
HWY_INLINE void store_group(ScaleKind kind, uint8_t* scales, uint8_t* zeros, const ZeroRule& rule, int64_t i, VF scale,
                            VF zero) {
  const auto lost = hn::IsNaN(zero);
  if (kind == ScaleKind::kByte) {
    const hn::Rebind<int8_t, DF> ds8;
    const auto lost_bits = hn::RebindMask(DI(), lost);
    const VI bits = hn::PromoteTo(DI(), hn::ShiftRight<7>(half_bits(scale)));
    hn::StoreU(hn::DemoteTo(D8(), hn::IfThenElse(lost_bits, hn::Set(DI(), 255), bits)), D8(), scales + i);
    if (rule.symmetric) return;
    const VF steps = hn::Mul(hn::Div(zero, scale), splat(1.0f / rule.step));
    const VI whole = hn::ConvertTo(DI(), hn::IfThenElseZero(hn::Gt(scale, splat(0.0f)), steps));
    hn::StoreU(hn::DemoteTo(ds8, whole), ds8, reinterpret_cast<int8_t*>(zeros) + i);
  } else {
    const VF lost_scale = hn::BitCast(DF(), hn::Set(DU(), kLostScale));
    store_scale(kind, scales, i, rule.symmetric ? hn::IfThenElse(lost, lost_scale, scale) : scale);
    if (!rule.symmetric) store_scale(kind, zeros, i, zero);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
