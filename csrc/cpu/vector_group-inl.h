// Quantising kLanes groups side by side, one in each lane: range, scale and zero, codes. The operations are those of
// the scalar reference, in its order, so that every result is equal to the bit (divisions included; nothing is fused:
// -ffp-contract=off).
// (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_GROUP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_GROUP_INL_H_
#undef KIVI_CPU_VECTOR_GROUP_INL_H_
#else
#define KIVI_CPU_VECTOR_GROUP_INL_H_
#endif

#include <cfloat>
#include <limits>

#include "cpu/half.h"
#include "cpu/reference.h"
#include "cpu/vector_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

using VU = hn::Vec<DU>;
using MF = hn::Mask<DF>;

// Structs of vectors have constructors of their own: g++ gives implied ones no instruction set.

// Extremes of the groups. What min and max make of NaN differs between CPUs; `probe` does not: 0 times NaN or Inf is
// NaN and stays it, 0 times anything else is 0.
struct Range {
  HWY_INLINE Range()  // of nothing
      : lo(splat(std::numeric_limits<float>::infinity())),
        hi(splat(-std::numeric_limits<float>::infinity())),
        probe(splat(0.0f)) {}
  HWY_INLINE Range(VF low, VF high) : lo(low), hi(high), probe(splat(0.0f)) {}
  VF lo, hi, probe;
};

HWY_INLINE void widen(Range& range, VF x) {
  range.lo = hn::Min(range.lo, x);
  range.hi = hn::Max(range.hi, x);
  range.probe = hn::MulAdd(x, splat(0.0f), range.probe);
}

struct Quantizers {
  HWY_INLINE Quantizers() : scale(splat(0.0f)), zero(scale), top(hn::Zero(DU())) {}
  HWY_INLINE Quantizers(VF s, VF z, VU t) : scale(s), zero(z), top(t) {}
  VF scale, zero;
  VU top;  // largest code; 0 where all codes are 0
};

// 1.5 * 2^23: added to a number from 0 to 2^22 it leaves the number, rounded half to even, in the low bits.
HWY_INLINE VF rounding_magic() { return splat(12582912.0f); }

// clamp(rint((x - zero) / scale), 0, levels). Where top is 0 the quotient may be anything, also NaN.
HWY_INLINE VU codes_of(VF x, const Quantizers& q, VF levels) {
  const VF position = hn::Div(hn::Sub(x, q.zero), q.scale);
  const VF clamped = hn::Min(hn::Max(position, splat(0.0f)), levels);
  return hn::And(hn::BitCast(DU(), hn::Add(clamped, rounding_magic())), q.top);
}

HWY_INLINE VF values_of(VU codes, VF scale, VF zero) {
  const VF product = hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), codes)), scale);
  return hn::Add(zero, product);
}

HWY_INLINE VF through_half(VF x) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::PromoteTo(DF(), hn::DemoteTo(dh, x));
}

HWY_INLINE MF is_finite(VF x) { return hn::Le(hn::Abs(x), splat(FLT_MAX)); }

// What the scale type makes of scale and zero; `fits`: both fit float16.
HWY_INLINE void make_stored(ScaleType type, VF& scale, VF& zero, MF& fits) {
  const VF half_scale = through_half(scale), half_zero = through_half(zero);
  const MF scale_fits = is_finite(half_scale), zero_fits = is_finite(half_zero);
  fits = hn::And(scale_fits, zero_fits);
  if (type == ScaleType::kFloat32) return;
  const bool widened = type == ScaleType::kWidened;
  scale = widened ? hn::IfThenElse(scale_fits, half_scale, scale) : half_scale;
  zero = widened ? hn::IfThenElse(zero_fits, half_zero, zero) : half_zero;
}

HWY_INLINE void shrunk(VF lo, VF span, VF shrink, VF levels, VF& scale, VF& zero) {
  const VF width = hn::Mul(span, shrink);
  scale = hn::Div(width, levels);
  const VF margin = hn::Mul(hn::Sub(span, width), splat(0.5f));
  zero = hn::Add(lo, margin);
}

HWY_INLINE VU top_codes(MF finite, VF scale, int bits) {
  const MF used = hn::And(finite, hn::Gt(scale, splat(0.0f)));
  return hn::IfThenElseZero(hn::RebindMask(DU(), used), hn::Set(DU(), (1u << bits) - 1u));
}

// Sum of the squared errors, element after element as the reference adds them.
template <Element kType>
HWY_INLINE VF squared_error(const void* x, int64_t stride, int64_t count, const Quantizers& q, VF levels) {
  VF sum = splat(0.0f);
  for (int64_t i = 0; i < count; i++) {
    const VF value = load_as_float<kType>(x, i * stride);
    const VF error = hn::Sub(value, values_of(codes_of(value, q, levels), q.scale, q.zero));
    const VF square = hn::Mul(error, error);
    sum = hn::Add(sum, square);
  }
  return sum;
}

// What is chosen for groups of one range: the plain range or, with `search`, the best of the shrunk ones. `misfit`
// collects the lanes that a float16 format cannot store. The elements, for the search alone: element i of lane l at x[i
// * stride + l].
struct Chooser {
  ScaleType type;
  bool search;
  int bits;
  VF misfit;

  template <Element kType>
  HWY_INLINE Quantizers choose(const Range& range, const void* x, int64_t stride, int64_t count) {
    const VF levels = splat(static_cast<float>((1 << bits) - 1));
    const VF span = hn::Add(hn::Sub(range.hi, range.lo), splat(0.0f));
    const MF finite = hn::Le(hn::Add(span, range.probe), splat(FLT_MAX));  // false for NaN too
    Quantizers q;
    MF fits;
    shrunk(range.lo, span, splat(1.0f), levels, q.scale, q.zero);
    make_stored(type, q.scale, q.zero, fits);
    if (type == ScaleType::kFloat16) misfit = hn::Or(misfit, hn::VecFromMask(DF(), hn::And(finite, hn::Not(fits))));
    q.top = top_codes(finite, q.scale, bits);
    if (search) search_more<kType>(range.lo, span, levels, finite, x, stride, count, q);
    q.scale = hn::IfThenElseZero(finite, q.scale);
    q.zero = hn::IfThenElse(finite, q.zero, hn::BitCast(DF(), hn::Set(DU(), kFloatNaN)));
    return q;
  }

  template <Element kType>
  HWY_NOINLINE void search_more(VF lo, VF span, VF levels, MF finite, const void* x, int64_t stride, int64_t count,
                                Quantizers& q) {
    VF best = squared_error<kType>(x, stride, count, q, levels);
    for (int i = 1; i < kNumShrinks; i++) {
      Quantizers other;
      MF fits;
      shrunk(lo, span, splat(kShrinks[i]), levels, other.scale, other.zero);
      make_stored(type, other.scale, other.zero, fits);
      other.top = top_codes(finite, other.scale, bits);
      const VF error = squared_error<kType>(x, stride, count, other, levels);
      MF better = hn::Lt(error, best);
      if (type != ScaleType::kFloat32) better = hn::And(better, fits);
      best = hn::IfThenElse(better, error, best);
      q.scale = hn::IfThenElse(better, other.scale, q.scale);
      q.zero = hn::IfThenElse(better, other.zero, q.zero);
      q.top = hn::IfThenElse(hn::RebindMask(DU(), better), other.top, q.top);
    }
  }

  bool all_fit() const { return hn::AllFalse(DF(), hn::MaskFromVec(misfit)); }
};

// kLanes numbers rounded to an element type; in float16 a finite number never becomes infinite.
template <Element kType>
HWY_INLINE void store_rounded(VF x, void* array, int64_t i) {
  if constexpr (kType == Element::kFloat32) {
    store_float(x, static_cast<float*>(array) + i);
  } else if constexpr (kType == Element::kFloat16) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    const VF clamped = hn::Min(hn::Max(x, splat(-65504.0f)), splat(65504.0f));
    const VF kept = hn::IfThenElse(is_finite(x), clamped, x);
    hn::StoreU(hn::DemoteTo(dh, kept), dh, static_cast<hwy::float16_t*>(array) + i);
  } else {
    const hn::Rebind<uint16_t, DF> dh;
    const VU bits = hn::BitCast(DU(), x);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1u));
    const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(DU(), 0x7FFFu))));
    const VU nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(DU(), 0x40u));
    const VU result = hn::IfThenElse(hn::RebindMask(DU(), hn::IsNaN(x)), nan, rounded);
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(DI(), result)), dh, static_cast<uint16_t*>(array) + i);
  }
}

// The first `count` (1 to kLanes) of them, nothing beyond.
template <Element kType>
HWY_INLINE void store_some(VF x, void* array, int64_t i, int64_t count) {
  if (count >= kLanes) return store_rounded<kType>(x, array, i);
  alignas(64) uint8_t lanes[kLanes * sizeof(float)];
  store_rounded<kType>(x, lanes, 0);
  constexpr int64_t kSize = element_bytes(kType);
  std::memcpy(static_cast<uint8_t*>(array) + i * kSize, lanes, static_cast<size_t>((count & (kLanes - 1)) * kSize));
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
