// Small vector helpers of the attention kernels, written once with Highway and compiled once per instruction set.
// A line of a record is 16 lanes of 32 bits (kivi/format.h): one vector with AVX-512, two with AVX2, four with NEON.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_SIMD_INL_H_
#undef KIVI_CPU_VECTOR_SIMD_INL_H_
#else
#define KIVI_CPU_VECTOR_SIMD_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3
inline constexpr int kLanes = 16;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
inline constexpr int kLine = static_cast<int>(kLineLanes);
inline constexpr int kLineVectors = kLine / kLanes;

using DF = hn::CappedTag<float, kLine>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DS = hn::Repartition<int16_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VS = hn::Vec<DS>;
static_assert(sizeof(VF) == kLanes * sizeof(float), "the lanes of this target");

// Keeps a sum in its register: without it g++ reassociates the sums of a long block and spills them.
#if HWY_TARGET == HWY_AVX3
#define KIVI_KEEP(vector) asm("" : "+v"((vector).raw))
#elif HWY_TARGET == HWY_AVX2
#define KIVI_KEEP(vector) asm("" : "+x"((vector).raw))
#else
#define KIVI_KEEP(vector) asm("" : "+w"((vector).raw))
#endif

// Before every loop over sums: g++ keeps an array in registers only if all loops over it are gone early.
#if HWY_COMPILER_CLANG
#define KIVI_UNROLL _Pragma("unroll")
#define KIVI_NO_UNROLL _Pragma("nounroll")
#else
#define KIVI_UNROLL _Pragma("GCC unroll 32")
#define KIVI_NO_UNROLL _Pragma("GCC unroll 1")
#endif

HWY_INLINE VF splat(float x) { return hn::Set(DF(), x); }
HWY_INLINE VF load_float(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE void store_float(VF x, float* p) { hn::StoreU(x, DF(), p); }

HWY_INLINE VF load_half(const uint16_t* p) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return hn::PromoteTo(DF(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}

// kLanes elements of any type.
template <Element kType>
HWY_INLINE VF load_as_float(const void* array, int64_t i) {
  if constexpr (kType == Element::kFloat32) {
    return load_float(static_cast<const float*>(array) + i);
  } else if constexpr (kType == Element::kFloat16) {
    return load_half(static_cast<const uint16_t*>(array) + i);
  } else {
    const hn::Rebind<uint16_t, DF> dh;
    const auto bits = hn::PromoteTo(DU(), hn::LoadU(dh, static_cast<const uint16_t*>(array) + i));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
  }
}

// `count` < kLanes elements, the other lanes are 0. Nothing beyond them is read.
template <Element kType>
HWY_INLINE VF load_tail(const void* array, int64_t i, int64_t count) {
  alignas(64) uint8_t lanes[kLanes * sizeof(float)] = {};
  const int64_t size = element_bytes(kType);
  const int64_t bytes = (count & (kLanes - 1)) * size;  // the mask is for the compiler's bounds check
  std::memcpy(lanes, static_cast<const uint8_t*>(array) + i * size, static_cast<size_t>(bytes));
  return load_as_float<kType>(lanes, 0);
}

// The larger one; `best` where x is NaN.
HWY_INLINE VF max_number(VF x, VF best) {
#if HWY_ARCH_X86
  return hn::Max(x, best);  // maxps gives its second operand if either is NaN
#else
  return hn::IfThenElse(hn::Gt(x, best), x, best);
#endif
}

// out[i] = x[i] * y[i] rounded to int16, for 16 numbers whose products fit. (If one does not fit, or is NaN, some
// int16.) Pair j (numbers 2j and 2j+1) is stored as pair kPackedPair[j]: AVX2 packs within its 128-bit halves, and to
// leave it so costs only another address when the pairs are read.
#if HWY_TARGET == HWY_AVX2
inline constexpr int kPackedPair[8] = {0, 1, 4, 5, 2, 3, 6, 7};
#else
inline constexpr int kPackedPair[8] = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

#if HWY_TARGET == HWY_AVX3
// Adding 1.5 * 2^23 leaves the rounded product in the low half of the sum.
HWY_INLINE __m512i product_in_low_half(VF x, VF y) {
  return _mm512_castps_si512(_mm512_fmadd_ps(x.raw, y.raw, _mm512_set1_ps(12582912.0f)));
}
// Numbers 0, 2, .. of the first operand of a permutation, then of the second one.
HWY_INLINE __m512i low_halves() {
  return _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32,  //
                          30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
}
#endif

HWY_INLINE void store_products(const VF (&x)[kLineVectors], const VF (&y)[kLineVectors], int16_t* out) {
#if HWY_TARGET == HWY_AVX3
  const __m512i packed = _mm512_permutexvar_epi16(low_halves(), product_in_low_half(x[0], y[0]));
  _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(packed));
#elif HWY_TARGET == HWY_AVX2
  _mm256_store_si256(reinterpret_cast<__m256i*>(out),
                     _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x[0].raw, y[0].raw)),
                                        _mm256_cvtps_epi32(_mm256_mul_ps(x[1].raw, y[1].raw))));
#else
  for (int i = 0; i < 2; i++) {
    const int32x4_t low = vcvtnq_s32_f32(vmulq_f32(x[2 * i].raw, y[2 * i].raw));
    const int32x4_t high = vcvtnq_s32_f32(vmulq_f32(x[2 * i + 1].raw, y[2 * i + 1].raw));
    vst1q_s16(out + 8 * i, vcombine_s16(vqmovn_s32(low), vqmovn_s32(high)));
  }
#endif
}

// store_products for all rows of `x`, side by side in `out`.
template <int kRows>
HWY_INLINE void store_products(const VF (&x)[kRows][kLineVectors], const VF (&y)[kLineVectors], int16_t* out) {
  int r = 0;
#if HWY_TARGET == HWY_AVX3
  KIVI_UNROLL
  for (; r + 2 <= kRows; r += 2) {  // one permutation and one store for two rows
    const __m512i packed = _mm512_permutex2var_epi16(product_in_low_half(x[r][0], y[0]), low_halves(),
                                                     product_in_low_half(x[r + 1][0], y[0]));
    _mm512_storeu_si512(out + r * kLine, packed);
  }
#endif
  KIVI_UNROLL
  for (; r < kRows; r++) store_products(x[r], y, out + r * kLine);
}

// out[i] = sum of the lanes of v[i]. kPadded: out has room for a multiple of four, and some numbers are stored there.
template <bool kPadded = false, int kCount = 0>
HWY_INLINE void sum_lanes(const VF (&v)[kCount], float* out) {
#if HWY_ARCH_X86
  // Four at a time, the last ones with zeros: a vector's lanes are added in one order, whoever its neighbours are.
  KIVI_UNROLL
  for (int i = 0; i < kCount; i += 4) {
    __m256 half[4];
    KIVI_UNROLL
    for (int j = 0; j < 4; j++) {
      if (i + j >= kCount) {
        half[j] = _mm256_setzero_ps();
        continue;
      }
#if HWY_TARGET == HWY_AVX3
      half[j] = _mm256_add_ps(_mm512_castps512_ps256(v[i + j].raw), _mm512_extractf32x8_ps(v[i + j].raw, 1));
#else
      half[j] = v[i + j].raw;
#endif
    }
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    if (kPadded || i + 4 <= kCount) {
      _mm_storeu_ps(out + i, four);
      continue;
    }
    alignas(16) float stored[4];
    _mm_store_ps(stored, four);
    KIVI_UNROLL
    for (int j = 0; j < 4; j++) {
      if (i + j < kCount) out[i + j] = stored[j];
    }
  }
#else
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) out[i] = hn::GetLane(hn::SumOfLanes(DF(), v[i]));
#endif
}

// out[i] = the largest lane of v[i]; no lane is NaN.
template <int kCount>
HWY_INLINE void max_lanes(const VF (&v)[kCount], float* out) {
#if HWY_ARCH_X86
  if constexpr (kCount % 4 == 0) {
    KIVI_UNROLL
    for (int i = 0; i < kCount; i += 4) {
      __m128 quarter[4];
      KIVI_UNROLL
      for (int j = 0; j < 4; j++) {
#if HWY_TARGET == HWY_AVX3
        const __m256 half =
            _mm256_max_ps(_mm512_castps512_ps256(v[i + j].raw), _mm512_extractf32x8_ps(v[i + j].raw, 1));
#else
        const __m256 half = v[i + j].raw;
#endif
        quarter[j] = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
      }
      const __m128 low = _mm_max_ps(_mm_unpacklo_ps(quarter[0], quarter[1]), _mm_unpackhi_ps(quarter[0], quarter[1]));
      const __m128 high = _mm_max_ps(_mm_unpacklo_ps(quarter[2], quarter[3]), _mm_unpackhi_ps(quarter[2], quarter[3]));
      _mm_storeu_ps(out + i, _mm_max_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
    }
    return;
  }
#endif
  for (int i = 0; i < kCount; i++) out[i] = hn::GetLane(hn::MaxOfLanes(DF(), v[i]));
}

// 2^x for vectors side by side: one alone is a chain of some 45 cycles. Degree 5 on [-0.5, 0.5], relative error 3e-7. x
// below -126 gives 2^-126, so that what a row sees never weighs exactly 0. NaN stays NaN if the low 9 bits of its
// payload are 0, which is what hardware makes.
template <int kCount>
HWY_INLINE void exp2_inplace(VF (&x)[kCount]) {
  constexpr float kPoly[6] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 0.24022651f, 0.69314718f, 1.0f};
  VF whole[kCount], p[kCount];
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) {
#if HWY_ARCH_X86
    x[i] = hn::Max(splat(-126.0f), x[i]);  // the order keeps NaN
#else
    x[i] = hn::IfThenElse(hn::Lt(x[i], splat(-126.0f)), splat(-126.0f), x[i]);
#endif
  }
#if HWY_TARGET == HWY_AVX3
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) whole[i] = VF{_mm512_roundscale_ps(x[i].raw, 8)};
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) x[i] = hn::Sub(x[i], whole[i]);
#else
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) whole[i] = hn::Add(x[i], magic);
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) x[i] = hn::Sub(x[i], hn::Sub(whole[i], magic));
#endif
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) p[i] = splat(kPoly[0]);
  KIVI_UNROLL
  for (int k = 1; k < 6; k++) {
    KIVI_UNROLL
    for (int i = 0; i < kCount; i++) p[i] = hn::MulAdd(p[i], x[i], splat(kPoly[k]));
  }
  KIVI_UNROLL
  for (int i = 0; i < kCount; i++) {
#if HWY_TARGET == HWY_AVX3
    x[i] = VF{_mm512_scalef_ps(p[i].raw, whole[i].raw)};
#else
    const VI exponent = hn::ShiftLeft<23>(hn::BitCast(DI(), whole[i]));
    x[i] = hn::BitCast(DF(), hn::Add(hn::BitCast(DI(), p[i]), exponent));
#endif
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
