// Quantising kLanes groups side by side, one in each lane: range, scale and zero, codes. The operations are those of
// the scalar reference, in its order, so that every result is equal to the bit (divisions included; fused only where
// the reference writes fma: -ffp-contract=off).
// (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_GROUP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_GROUP_INL_H_
#undef KIVI_CPU_VECTOR_GROUP_INL_H_
#else
#define KIVI_CPU_VECTOR_GROUP_INL_H_
#endif

#include <algorithm>
#include <cfloat>
#include <limits>

#include "cpu/vector_scales-inl.h"
#include "format/half.h"

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

// What makes codes. `scale` divides; after rules that are not plain it is 1 / scale and multiplies.
struct Quantizers {
  HWY_INLINE Quantizers() : scale(splat(0.0f)), zero(scale), top(hn::Zero(DU())) {}
  HWY_INLINE Quantizers(VF s, VF z, VU t) : scale(s), zero(z), top(t) {}
  VF scale, zero;
  VU top;  // largest code; 0 where all codes are 0
};

// 1.5 * 2^23: added to a number from 0 to 2^22 it leaves the number, rounded half to even, in the low bits.
HWY_INLINE VF rounding_magic() { return splat(12582912.0f); }

// clamp(rint((x - zero) / scale), 0, levels). Where top is 0 the quotient may be anything, also NaN.
template <bool kDivide = true>
HWY_INLINE VU codes_of(VF x, const Quantizers& q, VF levels) {
  const VF distance = hn::Sub(x, q.zero);
  const VF position = kDivide ? hn::Div(distance, q.scale) : hn::Mul(distance, q.scale);
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

  // The range itself in float16 or float32: what KIVI defines.
  bool plain() const {
    return narrow(type) != ScaleType::kFloat8 && !symmetric && !bias && !gain &&
           (search == nullptr || search->count == 0);
  }
  // Whether the choice depends on more than the range.
  bool looks_at_numbers() const { return bias || gain || (search != nullptr && search->count > 0); }
  VF levels() const { return splat(static_cast<float>((1 << bits) - 1)); }
  VF half_levels() const { return splat(0.5f * static_cast<float>((1 << bits) - 1)); }
};

// A quantizer that makes codes, and what is stored of it. They differ after a correction, which keeps the codes.
struct Choice {
  HWY_INLINE Choice() : scale(splat(0.0f)), zero(scale) {}
  Quantizers coder;
  VF scale, zero;
};

// 0 for scales so small that 1 / scale might overflow: such groups are neither searched nor corrected, and their codes
// are 0.
HWY_INLINE VF inverse(VF scale) {
  return hn::IfThenElseZero(hn::Ge(scale, splat(FLT_MIN)), hn::Div(splat(1.0f), scale));
}

// How scale and zero are found for groups of one range. kFloat8: rules.type is that, which is known when compiling.
template <bool kFloat8>
struct ScaleChoice {
  const GroupRules& rules;

  ScaleType stored_type() const { return kFloat8 ? ScaleType::kFloat8 : rules.type; }

  // The numbers of the groups around their means (reference_record.cpp: Centred).
  struct Centred {
    HWY_INLINE Centred() : mean(splat(0.0f)), sum(mean), square(mean) {}
    VF mean, sum, square;
  };

  // A choice, the lanes in which it fits, those in which it may be corrected and win, and its error.
  struct Trial {
    HWY_INLINE Trial() : fits(hn::Eq(splat(0.0f), splat(0.0f))), valid(fits), error(splat(0.0f)) {}
    Choice choice;
    MF fits, valid;
    VF error;
  };

  // The stored scale of groups whose zeros are to be about `zero`.
  HWY_INLINE VF stored_scale(VF scale, VF zero, MF& fits) const {
    const ScaleType type = narrow(stored_type());
    if (type == ScaleType::kFloat32) return scale;
    if (type == ScaleType::kFloat8 && !rules.symmetric) {
      const VF reach = hn::Mul(hn::Abs(zero), splat(zero_steps(rules.bits) / kZeroReach));
      scale = hn::IfThenElse(hn::Lt(scale, reach), reach, scale);
    }
    return rounded_scale(type, scale, fits);
  }

  HWY_INLINE VF rounded_scale(ScaleType type, VF x, MF& fits) const {
    const VF rounded = type == ScaleType::kFloat8 ? through_float8(x) : through_half(x);
    const MF fit = is_finite(rounded);
    fits = hn::And(fits, fit);
    return stored_type() == type ? rounded : hn::IfThenElse(fit, rounded, x);
  }

  // The stored zero beside a stored scale.
  HWY_INLINE VF stored_zero(VF scale, VF zero, MF& fits) const {
    if (rules.symmetric) return hn::Neg(hn::Mul(scale, rules.half_levels()));
    const ScaleType type = narrow(stored_type());
    if (type == ScaleType::kFloat32) return zero;
    if (type == ScaleType::kFloat16) return rounded_scale(type, zero, fits);
    const VF per_scale = splat(zero_steps(rules.bits)), step = splat(1.0f / zero_steps(rules.bits));
    const VF whole = hn::Add(hn::Round(hn::Mul(hn::Mul(zero, inverse(scale)), per_scale)), splat(0.0f));
    const VF steps = hn::Min(hn::Max(whole, splat(-127.0f)), splat(127.0f));
    const VF in_steps = hn::Mul(hn::Mul(steps, scale), step);
    if (stored_type() == type) return in_steps;  // a scale out of range has been reported
    return hn::IfThenElse(is_finite(through_float8(scale)), in_steps, zero);
  }

  // The part `factor` of the range around its middle. For float16 and float32 the zero is the lower end of that; for
  // float8, whose scale may be rounded far, the middle is kept.
  HWY_INLINE void choose_range(VF lo, VF span, MF finite, float factor, Trial& t) const {
    const VF width = hn::Mul(span, splat(factor)), half = splat(0.5f);
    VF scale = hn::Div(width, rules.levels());
    VF zero = hn::Add(lo, hn::Mul(hn::Sub(span, width), half));
    if (narrow(stored_type()) == ScaleType::kFloat8) {
      const VF middle = hn::Add(lo, hn::Mul(span, half));
      scale = stored_scale(scale, hn::Sub(middle, hn::Mul(scale, rules.half_levels())), t.fits);
      zero = hn::Sub(middle, hn::Mul(scale, rules.half_levels()));
    } else {
      scale = stored_scale(scale, zero, t.fits);
    }
    t.choice.coder.scale = t.choice.scale = scale;
    t.choice.coder.zero = t.choice.zero = stored_zero(scale, zero, t.fits);
    t.choice.coder.top = top_codes(finite, scale, rules.bits);
    t.valid = hn::And(t.fits, hn::Ge(scale, splat(FLT_MIN)));
  }

  // Leaves the centred numbers in x.
  HWY_INLINE Centred centre(float* x, int64_t count) const {
    Centred c;
    if (!rules.symmetric) {
      for (int64_t i = 0; i < count; i++) c.mean = hn::Add(c.mean, load_float(x + i * kLanes));
      c.mean = hn::Mul(c.mean, splat(1.0f / static_cast<float>(count)));
    }
    for (int64_t i = 0; i < count; i++) {
      const VF distance = hn::Sub(load_float(x + i * kLanes), c.mean);
      store_float(distance, x + i * kLanes);
      c.sum = hn::Add(c.sum, distance);
      c.square = hn::MulAdd(distance, distance, c.square);
    }
    return c;
  }

  HWY_INLINE VF whole_code(VF position) const {
    return hn::Round(hn::Min(hn::Max(position, splat(0.0f)), rules.levels()));
  }

  // measure_rest and measure_gain of the reference, for trials side by side: one alone is a chain of sums.
  template <bool kBias, int kCount>
  HWY_INLINE void measure_rest(const float* x, int64_t count, Trial (&t)[kCount]) const {
    VF scale[kCount], zero[kCount], factor[kCount], sum[kCount], square[kCount];
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) {
      scale[k] = t[k].choice.scale, zero[k] = t[k].choice.zero, factor[k] = inverse(scale[k]);
      sum[k] = square[k] = splat(0.0f);
    }
    KIVI_NO_UNROLL
    for (int64_t i = 0; i < count; i++) {
      const VF number = load_float(x + i * kLanes);
      KIVI_UNROLL
      for (int k = 0; k < kCount; k++) {
        const VF distance = hn::Sub(number, zero[k]);
        const VF rest = hn::NegMulAdd(scale[k], whole_code(hn::Mul(distance, factor[k])), distance);
        if constexpr (kBias) sum[k] = hn::Add(sum[k], rest);
        square[k] = hn::MulAdd(rest, rest, square[k]);
      }
    }
    const VF number = splat(static_cast<float>(count)), per_number = splat(1.0f / static_cast<float>(count));
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) {
      t[k].error = square[k];
      if constexpr (kBias) {
        Choice& c = t[k].choice;
        const VF wanted = hn::Add(c.zero, hn::Mul(sum[k], per_number));
        MF fits = hn::And(t[k].valid, is_finite(wanted));
        const VF stored = stored_zero(c.scale, wanted, fits);
        const VF moved = hn::Sub(stored, c.zero);
        const VF twice = hn::Mul(splat(2.0f), sum[k]);
        const VF error = hn::Add(square[k], hn::Mul(moved, hn::Sub(hn::Mul(number, moved), twice)));
        t[k].error = hn::IfThenElse(fits, error, square[k]);
        c.zero = hn::IfThenElse(fits, stored, c.zero);
      }
    }
  }

  template <int kCount>
  HWY_INLINE void measure_gain(const float* x, int64_t count, const Centred& centred, Trial (&t)[kCount]) const {
    VF factor[kCount], shift[kCount], codes[kCount], squares[kCount], products[kCount];
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) {
      factor[k] = inverse(t[k].choice.scale);
      shift[k] = hn::Mul(hn::Sub(centred.mean, t[k].choice.zero), factor[k]);
      codes[k] = squares[k] = products[k] = splat(0.0f);
    }
    KIVI_NO_UNROLL
    for (int64_t i = 0; i < count; i++) {
      const VF distance = load_float(x + i * kLanes);
      KIVI_UNROLL
      for (int k = 0; k < kCount; k++) {
        const VF code = whole_code(hn::MulAdd(distance, factor[k], shift[k]));
        codes[k] = hn::Add(codes[k], code);
        squares[k] = hn::MulAdd(code, code, squares[k]);
        products[k] = hn::MulAdd(code, distance, products[k]);
      }
    }
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) correct_gain(count, centred, codes[k], squares[k], products[k], t[k]);
  }

  HWY_INLINE void correct_gain(int64_t count, const Centred& x, VF codes, VF squares, VF products, Trial& t) const {
    Choice& c = t.choice;
    const VF number = splat(static_cast<float>(count));
    VF middle = rules.half_levels(), spread;
    if (rules.symmetric) {
      const VF of_middle = hn::Mul(number, hn::Mul(middle, middle));
      spread = hn::Add(hn::Sub(squares, hn::Mul(rules.levels(), codes)), of_middle);
    } else {
      middle = hn::Mul(codes, splat(1.0f / static_cast<float>(count)));
      spread = hn::Sub(squares, hn::Mul(codes, middle));
    }
    const VF both = hn::Sub(products, hn::Mul(middle, x.sum)), slope = hn::Div(x.square, both);
    const VF least = hn::Mul(splat(0.5f), c.scale), most = hn::Mul(splat(2.0f), c.scale);
    MF fits = hn::And(t.valid, hn::And(hn::Gt(slope, splat(0.0f)), hn::Le(slope, splat(FLT_MAX))));
    const VF wanted = hn::Min(hn::Max(hn::IfThenElse(fits, slope, c.scale), least), most);
    const VF scale = stored_scale(wanted, hn::Sub(x.mean, hn::Mul(wanted, middle)), fits);
    const VF moved = hn::Sub(x.mean, hn::Mul(scale, middle));
    const VF zero = stored_zero(scale, moved, fits);
    fits = hn::And(fits, is_finite(moved));
    c.scale = hn::IfThenElse(fits, scale, c.scale);
    c.zero = hn::IfThenElse(fits, zero, c.zero);
    const VF offset = hn::Sub(hn::Sub(x.mean, c.zero), hn::Mul(c.scale, middle));
    const VF of_scale = hn::Mul(c.scale, hn::Sub(hn::Mul(c.scale, spread), hn::Mul(splat(2.0f), both)));
    t.error = hn::Add(hn::Add(x.square, of_scale), hn::Mul(number, hn::Mul(offset, offset)));
  }

  HWY_INLINE void take_better(const Trial& other, Trial& best) const {
    const MF better = hn::And(hn::Lt(other.error, best.error), other.valid);
    Choice& b = best.choice;
    const Choice& o = other.choice;
    best.error = hn::IfThenElse(better, other.error, best.error);
    b.scale = hn::IfThenElse(better, o.scale, b.scale);
    b.zero = hn::IfThenElse(better, o.zero, b.zero);
    b.coder.scale = hn::IfThenElse(better, o.coder.scale, b.coder.scale);
    b.coder.zero = hn::IfThenElse(better, o.coder.zero, b.coder.zero);
    b.coder.top = hn::IfThenElse(hn::RebindMask(DU(), better), o.coder.top, b.coder.top);
  }

  enum Correction { kNone, kBias, kGain };

  // Trials of parts first to first + kCount - 1 of the range, where part 0 is the whole one; beyond the last one that
  // one again, which changes nothing.
  template <Correction kCorrection, int kCount>
  HWY_INLINE void try_parts(VF lo, VF span, MF finite, const float* x, int64_t count, const Centred& centred,
                            int64_t first, Trial& best) const {
    Trial t[kCount];
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) {
      const int64_t part = std::min(first + k, rules.search->count);
      choose_range(lo, span, finite, part == 0 ? 1.0f : rules.search->factor(part - 1), t[k]);
    }
    if constexpr (kCorrection == kGain) {
      measure_gain(x, count, centred, t);
    } else {
      measure_rest<kCorrection == kBias>(x, count, t);
    }
    if (first == 0) best = t[0];
    KIVI_UNROLL
    for (int k = 0; k < kCount; k++) take_better(t[k], best);
  }

  template <Correction kCorrection>
  HWY_INLINE void search(VF lo, VF span, MF finite, float* x, int64_t count, Trial& best) const {
    constexpr int kTrials = 3;  // with more, AVX2 runs out of registers
    Centred centred;
    if constexpr (kCorrection == kGain) centred = centre(x, count);
    if (rules.search->count == 0) {
      try_parts<kCorrection, 1>(lo, span, finite, x, count, centred, 0, best);
      return;
    }
    if (rules.search->count == 1) {
      try_parts<kCorrection, 2>(lo, span, finite, x, count, centred, 0, best);
      return;
    }
    for (int64_t part = 0; part <= rules.search->count; part += kTrials) {
      try_parts<kCorrection, kTrials>(lo, span, finite, x, count, centred, part, best);
    }
  }

  // x may be changed.
  HWY_NOINLINE void choose(Range range, float* x, int64_t count, MF& finite, Trial& t) const {
    if (rules.symmetric) {
      range.hi = hn::Max(hn::Abs(range.lo), hn::Abs(range.hi));
      range.lo = hn::Neg(range.hi);
    }
    const VF span = hn::Add(hn::Sub(range.hi, range.lo), splat(0.0f));
    finite = hn::Le(hn::Add(span, range.probe), splat(FLT_MAX));
    if (!rules.looks_at_numbers()) {
      choose_range(range.lo, span, finite, 1.0f, t);
    } else if (rules.gain) {
      search<kGain>(range.lo, span, finite, x, count, t);
    } else if (rules.bias) {
      search<kBias>(range.lo, span, finite, x, count, t);
    } else {
      search<kNone>(range.lo, span, finite, x, count, t);
    }
  }
};

// What is chosen for groups of one range. `misfit` collects the lanes that the format cannot store.
struct Chooser {
  HWY_INLINE explicit Chooser(const GroupRules& r) : rules(r), misfit(splat(0.0f)) {}
  GroupRules rules;
  VF misfit;

  bool all_fit() const { return hn::AllFalse(DF(), hn::MaskFromVec(misfit)); }

  // Number i of lane l is x[i * kLanes + l]. They may be changed; if the rules do not look at numbers there are none.
  HWY_INLINE Choice choose(const Range& range, float* x, int64_t count) {
    if (!rules.plain())
      return rules.type == ScaleType::kFloat8 ? choose_more<true>(range, x, count)
                                              : choose_more<false>(range, x, count);
    const ScaleChoice<false> stored{rules};
    const VF span = hn::Add(hn::Sub(range.hi, range.lo), splat(0.0f));
    const MF finite = hn::Le(hn::Add(span, range.probe), splat(FLT_MAX));  // false for NaN too
    Choice c;
    MF fits = hn::Eq(span, span);
    c.coder.scale = stored.stored_scale(hn::Div(span, rules.levels()), span, fits);
    c.coder.zero = stored.stored_zero(c.coder.scale, hn::Add(range.lo, splat(0.0f)), fits);
    c.coder.top = top_codes(finite, c.coder.scale, rules.bits);
    c.scale = c.coder.scale, c.zero = c.coder.zero;
    finish(finite, fits, c);
    return c;
  }

 private:
  template <bool kFloat8>
  HWY_INLINE Choice choose_more(const Range& range, float* x, int64_t count) {
    typename ScaleChoice<kFloat8>::Trial t;
    MF finite = hn::Eq(range.lo, range.lo);
    ScaleChoice<kFloat8>{rules}.choose(range, x, count, finite, t);
    finish(finite, t.fits, t.choice);
    t.choice.coder.scale = inverse(t.choice.coder.scale);
    return t.choice;
  }

  HWY_INLINE void finish(MF finite, MF fits, Choice& c) {
    if (widened(rules.type) != rules.type) {
      misfit = hn::Or(misfit, hn::VecFromMask(DF(), hn::And(finite, hn::Not(fits))));
    }
    c.scale = hn::IfThenElseZero(finite, c.scale);
    c.zero = hn::IfThenElse(finite, c.zero, hn::BitCast(DF(), hn::Set(DU(), kFloatNaN)));
    c.coder.zero = hn::IfThenElse(finite, c.coder.zero, c.zero);
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
