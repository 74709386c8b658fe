// Dot products of packed codes with int16 values and 32-bit sums: vpdpwssd, vpmaddwd + vpaddd, or smlal by instruction
// set. Codes stay where they are in their 16-bit halves and are only masked, so that they count 2^k-fold; the sums make
// up for it. Sums are exact as long as no code counts more than `largest_multiple` and `int16_amplitude` bounds the
// values.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_DOT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_DOT16_INL_H_
#undef KIVI_CPU_VECTOR_DOT16_INL_H_
#else
#define KIVI_CPU_VECTOR_DOT16_INL_H_
#endif

#include "cpu/vector_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// What a masked code is at most, where it stands: 3 << 6, 15 << 4, 255, or 7 << 6.
constexpr int32_t largest_multiple(int64_t bits) { return bits == 3 ? 448 : 255; }

// The largest |value| for sums over `values` numbers; the one below it leaves room for the rounding of the value.
inline int32_t int16_amplitude(int64_t values, int64_t bits) {
  const int64_t limit = INT32_MAX / (largest_multiple(bits) * std::max<int64_t>(values, 1)) - 1;
  return static_cast<int32_t>(std::min<int64_t>(limit, 32767));
}
static_assert(int64_t{448} * 32767 * kPageTokens < INT32_MAX, "weights of a page need no lower amplitude");

using AliasedInt32 = int32_t __attribute__((may_alias));

HWY_INLINE VS load_codes(const uint8_t* at) { return hn::LoadU(DS(), reinterpret_cast<const int16_t*>(at)); }

// x * 2^shift in 16-bit lanes; shift may be negative.
HWY_INLINE VS shifted(VS x, int shift) {
  if (shift >= 0) return hn::ShiftLeftSame(x, shift);
  return hn::BitCast(DS(), hn::ShiftRightSame(hn::BitCast(hn::RebindToUnsigned<DS>(), x), -shift));
}

#if HWY_TARGET == HWY_AVX3

// sums[0] += the products of the pairs of int16 in codes[0] with the pair at `pair`.
template <bool kVnni>
HWY_INLINE void multiply_pairs(VI (&sums)[1], const VS (&codes)[1], const int16_t* pair) {
  const auto& both = *reinterpret_cast<const AliasedInt32*>(pair);
  if constexpr (kVnni) {
    // As text, because g++ moves broadcasts out of loops into stack slots.
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums[0].raw) : "v"(codes[0].raw), "m"(both));
  } else {
    sums[0] = hn::Add(sums[0], VI{_mm512_madd_epi16(codes[0].raw, _mm512_set1_epi32(both))});
    KIVI_KEEP(sums[0]);
  }
}

#else

// sums[v] += the products of the pairs of int16 in codes[v] with the pair at `pair`.
template <bool kVnni>
HWY_INLINE void multiply_pairs(VI (&sums)[kLineVectors], const VS (&codes)[kLineVectors], const int16_t* pair) {
  const VS pairs = hn::BitCast(DS(), hn::Set(DI(), *reinterpret_cast<const AliasedInt32*>(pair)));
  KIVI_UNROLL
  for (int v = 0; v < kLineVectors; v++) {
#if HWY_TARGET == HWY_AVX2
    const VI products{_mm256_madd_epi16(codes[v].raw, pairs.raw)};
#else
    const VI products{vpaddq_s32(vmull_s16(vget_low_s16(codes[v].raw), vget_low_s16(pairs.raw)),
                                 vmull_high_s16(codes[v].raw, pairs.raw))};
#endif
    sums[v] = hn::Add(sums[v], products);
    KIVI_KEEP(sums[v]);
  }
}

#endif

// How the positions of a code in its byte are gone through. `in_place` neighbours are masked where they are and have
// sums of their own; the others follow by shifting the codes, or in another pass over all words, with a shift of the
// sums between passes (Horner).
template <int kBits, int kRows>
struct Positions {
  static constexpr int kAll = 8 / Unit<kBits>::kLowBits;
  // AVX-512 has registers for many sums, and spare units for shifts. Elsewhere 8 sums (NEON: 16) fit.
  static constexpr bool kShifts = HWY_TARGET == HWY_AVX3;
  static constexpr int kRoom = kShifts ? (kRows == 1 ? 4 : 2) : 4 / kRows;
  static constexpr int kInPlace = kRoom >= 4 && kAll >= 4 ? 4 : kRoom >= 2 && kAll >= 2 ? 2 : 1;
  static constexpr int kPasses = kShifts ? 1 : kAll / kInPlace;
  static constexpr int kSteps = kAll / (kInPlace * kPasses);
  // A product takes 4 cycles with AVX-512: 4 sums hide them, if they are there.
  static constexpr int kChains = kShifts && kInPlace * kRows < 4 ? 2 : 1;
};

// The words are read once per byte of their 16-bit halves: the upper one by a load one byte further on, which stays
// within the record, or by a shift. The sums end 2^(8 - bits)-fold. 3 bits: the high bit of the code at position k of
// byte b is at bit k + 4b + 8 (word % 2) of its half of the high plane's word, and joins its low bits, where they are,
// at the next higher bit.
template <int kBits, int kRows, bool kKeys, bool kVnni>
HWY_NOINLINE void dot_int16(const DotShape& where, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                            const DotResult& result) {
  using U = Unit<kBits>;
  using P = Positions<kBits, kRows>;
  constexpr int kLow = U::kLowBits, kInPlace = P::kInPlace, kChains = P::kChains, kPasses = P::kPasses;
  const DotShape shape = where;
  const UnitSteps<kBits, kRows> steps(shape);
  const DS ds;
  const DI di;
  const uint8_t* next = fetch.next;
  const uint8_t* const last = fetch.last;
  int passes = kPasses;
  if constexpr (kPasses > 1) asm volatile("" : "+r"(passes));  // a loop, not code per pass: the op cache is small
  constexpr int kPassFetch = (U::kFetch + kPasses - 1) / kPasses;
  for (int64_t line = 0; line < shape.lines; line++) {
    VI sum[kChains][kInPlace][kRows][kLineVectors];
    KIVI_UNROLL
    for (int n = 0; n < kChains; n++) {
      KIVI_UNROLL
      for (int j = 0; j < kInPlace; j++) {
        KIVI_UNROLL
        for (int r = 0; r < kRows; r++) {
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) sum[n][j][r][v] = hn::Zero(di);
        }
      }
    }
    VS mask[kInPlace], top_mask[kInPlace];
    KIVI_UNROLL
    for (int j = 0; j < kInPlace; j++) {
      mask[j] = hn::Set(ds, static_cast<int16_t>(((1 << kLow) - 1) << (kLow * j)));
      top_mask[j] = hn::Set(ds, static_cast<int16_t>(4 << (2 * j)));
    }
    KIVI_NO_UNROLL
    for (int pass = 0; pass < passes; pass++) {
      // The lines that this pass fetches for a unit.
      const int fetches = (pass + 1) * U::kFetch / kPasses - pass * U::kFetch / kPasses;
      if (pass != 0) {
        constexpr int kShift = kPasses > 1 ? kLow * kInPlace : 0;
        KIVI_UNROLL
        for (int j = 0; j < kInPlace; j++) {
          mask[j] = hn::ShiftLeft<kShift>(mask[j]);
          if constexpr (kBits == 3) top_mask[j] = hn::ShiftLeft<kShift>(top_mask[j]);
          KIVI_UNROLL
          for (int r = 0; r < kRows; r++) {
            KIVI_UNROLL
            for (int v = 0; v < kLineVectors; v++) sum[0][j][r][v] = hn::ShiftLeft<kShift>(sum[0][j][r][v]);
          }
        }
      }
      const uint8_t* word_at = codes + line * shape.line_strides[0];
      const uint8_t* high_at = codes + line * shape.line_strides[1] + shape.high_plane;
      const int16_t* value_at = static_cast<const int16_t*>(value_pointer) + 2 * kPackedPair[pass * kInPlace];
      asm volatile("" : "+r"(word_at));  // or g++ keeps all words of all passes in stack slots
      int64_t left = shape.units;
      KIVI_NO_UNROLL
      for (int64_t unit = 0; unit < steps.units; unit++) {
        if (fetches > 0) fetch_lines<kPassFetch>(next, last);
        KIVI_UNROLL
        for (int word = 0; word < U::kWords; word++, word_at += shape.word_stride) {
          // The word of the next line of channels into L1: the words of one line are too far apart for the hardware.
          if constexpr (!kKeys) __builtin_prefetch(word_at + kLineBytes, 0, 3);
          KIVI_UNROLL
          for (int byte = 0; byte < 2; byte++) {
            KIVI_UNROLL
            for (int step = 0; step < P::kSteps; step++) {
              KIVI_UNROLL
              for (int j = 0; j < kInPlace; j++) {
                const int position = step * kInPlace + j;  // and pass * kInPlace, of the byte
                VS c[kLineVectors];
                KIVI_UNROLL
                for (int v = 0; v < kLineVectors; v++) {
                  const uint8_t* const vector_at = word_at + v * static_cast<int>(sizeof(VS));
                  const uint8_t* const top_at = high_at + v * static_cast<int>(sizeof(VS));
                  if constexpr (P::kShifts) {
                    const int shift = 8 * byte + kLow * kInPlace * step;
                    const VS x = shift == 0 ? load_codes(vector_at) : shifted(load_codes(vector_at), -shift);
                    c[v] = hn::And(x, mask[j]);
                    if constexpr (kBits == 3) {
                      const int from = position + 4 * byte + 8 * (word % 2);
                      c[v] = hn::OrAnd(c[v], shifted(load_codes(top_at), 2 * j + 2 - from), top_mask[j]);
                    }
                  } else {
                    c[v] = hn::And(mask[j], load_codes(vector_at + byte));
                    if constexpr (kBits == 3) {
                      // The upper half of a byte of high bits by a load one byte before.
                      const VS top = load_codes(top_at + word % 2 - byte);
                      const int k = pass * kInPlace + position;
                      c[v] = hn::OrAnd(c[v], shifted(top, byte == 0 ? k + 2 : k - 10), top_mask[j]);
                    }
                  }
                }
                const int pair = word * U::kPairs + byte * P::kAll + position;
                VI(&sums)[kRows][kLineVectors] = sum[(word * 2 + byte) % kChains][j];
                KIVI_UNROLL
                for (int r = 0; r < kRows; r++) {
                  multiply_pairs<kVnni>(sums[r], c, value_at + pair_offset<kRows>(pair, r));
                }
              }
            }
          }
        }
        if constexpr (kBits == 3) high_at += shape.word_stride;
        const bool run_ends = steps.run_ends(left);
        value_at += steps.values(run_ends);
        word_at += run_ends ? steps.code_gap : 0;
        if constexpr (kBits == 3) high_at += run_ends ? steps.high_gap : 0;
      }
    }
    // All sums at the weight of the last position.
    VF total[kRows][kLineVectors];
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      KIVI_UNROLL
      for (int v = 0; v < kLineVectors; v++) {
        VI all = hn::Zero(di);
        KIVI_UNROLL
        for (int j = 0; j < kInPlace; j++) {
          VI one = sum[0][j][r][v];
          KIVI_UNROLL
          for (int n = 1; n < kChains; n++) one = hn::Add(one, sum[n][j][r][v]);
          all = j == 0 ? one : hn::Add(hn::ShiftLeft < kInPlace == 1 ? 0 : kLow > (all), one);
        }
        total[r][v] = hn::ConvertTo(DF(), all);
      }
    }
    constexpr float kWeight = 1.0f / static_cast<float>(1 << (kLow * (kPasses * kInPlace - 1)));
    finish_line<kKeys, kRows>(total, kWeight, result, result.out + line * kLine);
  }
  fetch.next = next;
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
