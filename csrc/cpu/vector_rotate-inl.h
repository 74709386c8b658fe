// The rotation of values (kivi/format.h) with vectors; equal to cpu/rotate.h to the bit.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_ROTATE_INL_H_
#undef KIVI_CPU_VECTOR_ROTATE_INL_H_
#else
#define KIVI_CPU_VECTOR_ROTATE_INL_H_
#endif

#include "cpu/half.h"
#include "cpu/rotate.h"
#include "cpu/vector_simd-inl.h"

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

// A block of n >= kLanes channels.
HWY_INLINE void rotate_vectors(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) {
    VF v = cross_lanes<1>(load_float(x + i));
    v = cross_lanes<2>(v);
    if constexpr (kLanes > 4) v = cross_lanes<4>(v);
    if constexpr (kLanes > 8) v = cross_lanes<8>(v);
    store_float(v, x + i);
  }
  for (int64_t distance = kLanes; distance < n; distance *= 2) {
    for (int64_t i = 0; i < n; i += 2 * distance) {
      for (int64_t j = i; j < i + distance; j += kLanes) {
        const VF a = load_float(x + j), b = load_float(x + j + distance);
        store_float(hn::Add(a, b), x + j);
        store_float(hn::Sub(a, b), x + j + distance);
      }
    }
  }
  for (int64_t i = 0; i < n; i += kLanes) store_float(hn::Mul(load_float(x + i), splat(factor)), x + i);
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
