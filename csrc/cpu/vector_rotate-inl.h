// The rotation of values (kivi/format.h) with vectors; equal to cpu/rotate.h to the bit.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_ROTATE_INL_H_
#undef KIVI_CPU_VECTOR_ROTATE_INL_H_
#else
#define KIVI_CPU_VECTOR_ROTATE_INL_H_
#endif

#include "cpu/vector_simd-inl.h"
#include "format/half.h"
#include "format/rotate.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// Sums and differences within a vector: lane i and lane i ^ kDistance. The upper lane becomes lower - upper.
template <int kDistance>
HWY_INLINE VF cross_lanes(VF x) {
  const DU du;
  const VF other = hn::TableLookupLanes(
      x, hn::IndicesFromVec(DF(), hn::BitCast(DI(), hn::Xor(hn::Iota(du, 0), hn::Set(du, kDistance)))));
  const auto upper = hn::TestBit(hn::Iota(du, 0), hn::Set(du, kDistance));
  const VF sign = hn::BitCast(DF(), hn::IfThenElseZero(upper, hn::Set(du, kFloatSign)));
  return hn::Add(other, hn::Xor(x, sign));
}

HWY_INLINE VF rotate_lanes(VF x) {
  x = cross_lanes<1>(x);
  x = cross_lanes<2>(x);
  if constexpr (kLanes > 4) x = cross_lanes<4>(x);
  if constexpr (kLanes > 8) x = cross_lanes<8>(x);
  return x;
}

// A block of kCount vectors that stays in registers.
template <int kCount>
HWY_INLINE void rotate_registers(float* x, float factor) {
  VF v[kCount];
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) v[i] = rotate_lanes(load_float(x + i * kLanes));
  KIVI_UNROLL
  for (int distance = 1; distance < kCount; distance *= 2) {
    KIVI_UNROLL
    for (int i = 0; i < kCount; i++) {
      if ((i & distance) != 0) continue;
      const VF a = v[i], b = v[i + distance];
      v[i] = hn::Add(a, b);
      v[i + distance] = hn::Sub(a, b);
    }
  }
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) store_float(hn::Mul(v[i], splat(factor)), x + i * kLanes);
}

// A block of n >= kLanes channels.
HWY_INLINE void rotate_vectors(float* x, int64_t n, float factor) {
  if (n == 4 * kLanes) return rotate_registers<4>(x, factor);
  if (n == 8 * kLanes) return rotate_registers<8>(x, factor);
  int64_t distance = kLanes;
  if (n > 8 * kLanes) {
    for (int64_t i = 0; i < n; i += 8 * kLanes) rotate_registers<8>(x + i, 1.0f);
    distance = 8 * kLanes;
  } else {
    for (int64_t i = 0; i < n; i += kLanes) store_float(rotate_lanes(load_float(x + i)), x + i);
  }
  for (; distance < n; distance *= 2) {
    const VF last = splat(2 * distance == n ? factor : 1.0f);
    for (int64_t i = 0; i < n; i += 2 * distance) {
      for (int64_t j = i; j < i + distance; j += kLanes) {
        const VF a = load_float(x + j), b = load_float(x + j + distance);
        store_float(hn::Mul(hn::Add(a, b), last), x + j);
        store_float(hn::Mul(hn::Sub(a, b), last), x + j + distance);
      }
    }
  }
  if (n == kLanes) store_float(hn::Mul(load_float(x), splat(factor)), x);
}

// A row of value_head_dim numbers in place.
HWY_NOINLINE inline void rotate(float* row, int64_t value_head_dim, bool back) {
  const int64_t n = rotation_size(value_head_dim);
  if (n < kLanes) return rotate_row(row, value_head_dim, back);
  const float factor = rotation_factor(n, back);
  for (int64_t i = 0; i < value_head_dim; i += n) rotate_vectors(row + i, n, factor);
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
