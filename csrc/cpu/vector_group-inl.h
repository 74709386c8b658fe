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
#include "cpu/vector_scales-inl.h"

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

HWY_INLINE MF is_finite(VF x) { return hn::Le(hn::Abs(x), splat(FLT_MAX)); }

HWY_INLINE VU top_codes(MF finite, VF scale, int bits) {
  const MF used = hn::And(finite, hn::Gt(scale, splat(0.0f)));
  return hn::IfThenElseZero(hn::RebindMask(DU(), used), hn::Set(DU(), (1u << bits) - 1u));
}

// How the scale and zero of one side of a record are chosen.
struct GroupRules {
  ScaleType type;
  int bits;
  bool symmetric = false, bias = false, gain = false;
  const RangeSearch* search = nullptr;

  // The range itself in float16 or float32, which needs to look at the elements no more.
  bool plain() const {
    return narrow(type) != ScaleType::kFloat8 && !symmetric && !bias && !gain &&
           (search == nullptr || search->count == 0);
  }
  VF levels() const { return splat(static_cast<float>((1 << bits) - 1)); }
  VF half_levels() const { return splat(0.5f * static_cast<float>((1 << bits) - 1)); }
};

// A quantizer that makes codes, and what is stored of it. They differ after a correction, which keeps the codes.
struct Choice {
  HWY_INLINE Choice() : scale(splat(0.0f)), zero(scale) {}
  Quantizers coder;
  VF scale, zero;
};

// What is chosen for groups of one range. `misfit` collects the lanes that the format cannot store.
struct Chooser {
  HWY_INLINE explicit Chooser(const GroupRules& r) : rules(r), misfit(splat(0.0f)) {}
  GroupRules rules;
  VF misfit;

  bool all_fit() const { return hn::AllFalse(DF(), hn::MaskFromVec(misfit)); }

  // Element i of lane l is at x[i * stride + l]; they are not looked at if the rules are plain.
  template <Element kType>
  HWY_INLINE Choice choose(const Range& range, const void* x, int64_t stride, int64_t count) {
    if (!rules.plain()) {
      Choice choice;
      choose_more<kType>(range, x, stride, count, choice);
      return choice;
    }
    const VF span = hn::Add(hn::Sub(range.hi, range.lo), splat(0.0f));
    const MF finite = hn::Le(hn::Add(span, range.probe), splat(FLT_MAX));  // false for NaN too
    Choice c;
    MF fits = hn::Eq(span, span);
    c.coder.scale = stored_scale(hn::Div(span, rules.levels()), span, fits);
    c.coder.zero = stored_zero(c.coder.scale, hn::Add(range.lo, splat(0.0f)), fits);
    c.coder.top = top_codes(finite, c.coder.scale, rules.bits);
    c.scale = c.coder.scale, c.zero = c.coder.zero;
    finish(finite, fits, c);
    return c;
  }

 private:
  // A candidate, and the lanes in which it fits.
  struct Candidate {
    HWY_INLINE Candidate() : fits(hn::Eq(splat(0.0f), splat(0.0f))) {}
    Choice choice;
    MF fits;
  };

  HWY_INLINE void finish(MF finite, MF fits, Choice& c) {
    if (widened(rules.type) != rules.type) {
      misfit = hn::Or(misfit, hn::VecFromMask(DF(), hn::And(finite, hn::Not(fits))));
    }
    c.scale = hn::IfThenElseZero(finite, c.scale);
    c.zero = hn::IfThenElse(finite, c.zero, hn::BitCast(DF(), hn::Set(DU(), kFloatNaN)));
    c.coder.zero = hn::IfThenElse(finite, c.coder.zero, c.zero);
  }

  // The stored scale of groups whose zeros are to be about `zero`.
  HWY_INLINE VF stored_scale(VF scale, VF zero, MF& fits) const {
    const ScaleType type = narrow(rules.type);
    if (type == ScaleType::kFloat32) return scale;
    if (type == ScaleType::kFloat8 && !rules.symmetric) {
      const VF reach = hn::Mul(hn::Div(hn::Abs(zero), splat(127.5f)), splat(zero_steps(rules.bits)));
      scale = hn::IfThenElse(hn::Lt(scale, reach), reach, scale);
    }
    return rounded_scale(type, scale, fits);
  }

  HWY_INLINE VF rounded_scale(ScaleType type, VF x, MF& fits) const {
    const VF rounded = type == ScaleType::kFloat8 ? through_float8(x) : through_half(x);
    const MF fit = is_finite(rounded);
    fits = hn::And(fits, fit);
    return rules.type == type ? rounded : hn::IfThenElse(fit, rounded, x);
  }

  // The stored zero beside a stored scale.
  HWY_INLINE VF stored_zero(VF scale, VF zero, MF& fits) const {
    if (rules.symmetric) return hn::Neg(hn::Mul(scale, rules.half_levels()));
    const ScaleType type = narrow(rules.type);
    if (type == ScaleType::kFloat32) return zero;
    if (type == ScaleType::kFloat16) return rounded_scale(type, zero, fits);
    const VF per_scale = splat(zero_steps(rules.bits));
    const VF whole = hn::Round(hn::Mul(hn::Div(zero, scale), per_scale));
    const VF steps = hn::Min(hn::Max(whole, splat(-127.0f)), splat(127.0f));
    const VF in_steps = hn::IfThenElseZero(hn::Gt(scale, splat(0.0f)), hn::Div(hn::Mul(steps, scale), per_scale));
    return hn::IfThenElse(is_finite(through_float8(scale)), in_steps, zero);
  }

  // The part `factor` of the range around its middle. For float16 and float32 the zero is the lower end of that; for
  // float8, whose scale may be rounded far, the middle is kept.
  HWY_INLINE void choose_range(VF lo, VF span, MF finite, float factor, Candidate& c) const {
    const VF width = hn::Mul(span, splat(factor)), half = splat(0.5f);
    VF scale = hn::Div(width, rules.levels());
    VF zero = hn::Add(lo, hn::Mul(hn::Sub(span, width), half));
    if (narrow(rules.type) == ScaleType::kFloat8) {
      const VF middle = hn::Add(lo, hn::Mul(span, half));
      scale = stored_scale(scale, hn::Sub(middle, hn::Mul(scale, rules.half_levels())), c.fits);
      zero = hn::Sub(middle, hn::Mul(scale, rules.half_levels()));
    } else {
      scale = stored_scale(scale, zero, c.fits);
    }
    c.choice.coder.scale = c.choice.scale = scale;
    c.choice.coder.zero = c.choice.zero = stored_zero(scale, zero, c.fits);
    c.choice.coder.top = top_codes(finite, scale, rules.bits);
  }

  template <Element kType>
  HWY_INLINE void correct_bias(const void* x, int64_t stride, int64_t count, Candidate& c) const {
    const Quantizers coder = c.choice.coder;
    const VF levels = rules.levels();
    VF sum = splat(0.0f);
    for (int64_t i = 0; i < count; i++) {
      const VF value = load_as_float<kType>(x, i * stride);
      sum = hn::Add(sum, hn::Sub(value, values_of(codes_of(value, coder, levels), coder.scale, coder.zero)));
    }
    MF fits = c.fits;
    const VF moved = hn::Add(c.choice.zero, hn::Div(sum, splat(static_cast<float>(count))));
    const VF zero = stored_zero(c.choice.scale, moved, fits);
    c.choice.zero = hn::IfThenElse(fits, zero, c.choice.zero);
  }

  template <Element kType>
  HWY_INLINE void correct_gain(const void* x, int64_t stride, int64_t count, Candidate& c) const {
    const Quantizers coder = c.choice.coder;
    const VF levels = rules.levels(), number = splat(static_cast<float>(count));
    VF code_mean = rules.half_levels(), x_mean = splat(0.0f);
    if (!rules.symmetric) {
      VF codes = x_mean, sum = x_mean;
      for (int64_t i = 0; i < count; i++) {
        const VF value = load_as_float<kType>(x, i * stride);
        codes = hn::Add(codes, hn::ConvertTo(DF(), hn::BitCast(DI(), codes_of(value, coder, levels))));
        sum = hn::Add(sum, value);
      }
      code_mean = hn::Div(codes, number);
      x_mean = hn::Div(sum, number);
    }
    VF both = splat(0.0f), square = both;
    for (int64_t i = 0; i < count; i++) {
      const VF value = load_as_float<kType>(x, i * stride), dx = hn::Sub(value, x_mean);
      const VF dc = hn::Sub(hn::ConvertTo(DF(), hn::BitCast(DI(), codes_of(value, coder, levels))), code_mean);
      const VF product = hn::Mul(dc, dx), dxdx = hn::Mul(dx, dx);
      both = hn::Add(both, product);
      square = hn::Add(square, dxdx);
    }
    const VF least = hn::Mul(splat(0.5f), c.choice.scale), most = hn::Mul(splat(2.0f), c.choice.scale);
    const VF wanted = hn::Min(hn::Max(hn::Div(square, both), least), most);
    MF fits = hn::And(c.fits, hn::Gt(both, splat(0.0f)));
    const VF scale = stored_scale(wanted, hn::Sub(x_mean, hn::Mul(wanted, code_mean)), fits);
    const VF zero = stored_zero(scale, hn::Sub(x_mean, hn::Mul(scale, code_mean)), fits);
    c.choice.scale = hn::IfThenElse(fits, scale, c.choice.scale);
    c.choice.zero = hn::IfThenElse(fits, zero, c.choice.zero);
  }

  // Sum of the squared errors of what is stored, element after element as the reference adds them.
  template <Element kType>
  HWY_INLINE VF squared_error(const void* x, int64_t stride, int64_t count, const Choice& c) const {
    const VF levels = rules.levels();
    VF sum = splat(0.0f);
    for (int64_t i = 0; i < count; i++) {
      const VF value = load_as_float<kType>(x, i * stride);
      const VF error = hn::Sub(value, values_of(codes_of(value, c.coder, levels), c.scale, c.zero));
      const VF square = hn::Mul(error, error);
      sum = hn::Add(sum, square);
    }
    return sum;
  }

  template <Element kType>
  HWY_NOINLINE void choose_more(Range range, const void* x, int64_t stride, int64_t count, Choice& best) {
    if (rules.symmetric) {
      range.hi = hn::Max(hn::Abs(range.lo), hn::Abs(range.hi));
      range.lo = hn::Neg(range.hi);
    }
    const VF span = hn::Add(hn::Sub(range.hi, range.lo), splat(0.0f));
    const MF finite = hn::Le(hn::Add(span, range.probe), splat(FLT_MAX));
    const auto candidate = [&](float factor) {
      Candidate c;
      choose_range(range.lo, span, finite, factor, c);
      if (rules.bias) correct_bias<kType>(x, stride, count, c);
      if (rules.gain) correct_gain<kType>(x, stride, count, c);
      return c;
    };
    const Candidate plain = candidate(1.0f);
    best = plain.choice;
    if (rules.search != nullptr && rules.search->count > 0) {
      VF least = squared_error<kType>(x, stride, count, best);
      for (int64_t i = 0; i < rules.search->count; i++) {
        const Candidate other = candidate(rules.search->factor(i));
        const VF error = squared_error<kType>(x, stride, count, other.choice);
        const MF better = hn::And(hn::Lt(error, least), other.fits);
        least = hn::IfThenElse(better, error, least);
        best.scale = hn::IfThenElse(better, other.choice.scale, best.scale);
        best.zero = hn::IfThenElse(better, other.choice.zero, best.zero);
        best.coder.scale = hn::IfThenElse(better, other.choice.coder.scale, best.coder.scale);
        best.coder.zero = hn::IfThenElse(better, other.choice.coder.zero, best.coder.zero);
        best.coder.top = hn::IfThenElse(hn::RebindMask(DU(), better), other.choice.coder.top, best.coder.top);
      }
    }
    finish(finite, plain.fits, best);
  }
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
