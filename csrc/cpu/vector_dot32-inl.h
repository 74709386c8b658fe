// Dot products of packed codes with fp32 values. Codes are taken less `code_middle`, an integer near the middle of
// their range, and the caller adds middle * scale to zero: the sums then stay as small as their result, and so does
// their rounding, where zero and the codes' part cancel (outlier channels). For the same reason the sums of some units
// are kept apart and then added up.
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_DOT32_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_DOT32_INL_H_
#undef KIVI_CPU_VECTOR_DOT32_INL_H_
#else
#define KIVI_CPU_VECTOR_DOT32_INL_H_
#endif

#include "cpu/vector_dot-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// What value e of fp32 has to be multiplied by where its code is masked in place in its 16-bit half; e modulo 32.
struct Fp32Weights {
  alignas(64) float of[32];
  constexpr explicit Fp32Weights(int bits) : of() {
    const int low_bits = bits == 3 ? 2 : bits;
    for (int e = 0; e < 32; e++) {
      const int place = low_bits * (e % (32 / low_bits) / 2);
      of[e] = uses_table(bits) || shifts_codes(bits) ? 1.0f : 1.0f / static_cast<float>(1 << place);
    }
  }
  // Where a register holds a table of 16 floats, 1 and 2 bits are looked up.
  static constexpr bool uses_table(int bits) { return HWY_TARGET == HWY_AVX3 && bits <= 2; }
  // Masks and constants for many places in a half need more registers than there are: these codes are shifted instead.
  static constexpr bool shifts_codes(int bits) { return HWY_TARGET != HWY_AVX3 && (bits == 1 || bits == 3); }
};
inline constexpr Fp32Weights kFp32Weights[5] = {Fp32Weights(1), Fp32Weights(2), Fp32Weights(3), Fp32Weights(4),
                                                Fp32Weights(8)};
inline const float* fp32_weights(int64_t bits) { return kFp32Weights[bits == 8 ? 4 : bits - 1].of; }

constexpr int code_middle(int64_t bits) { return bits == 1 ? 0 : 1 << (bits - 1); }

#if HWY_TARGET == HWY_AVX3

// Entry i of a table of sums over 4 / bits codes: what code `part` of index i is, less the middle.
template <int kBits>
struct TablePattern {
  alignas(64) float of[4 / kBits][16];
  constexpr TablePattern() : of() {
    for (int part = 0; part < 4 / kBits; part++) {
      for (int i = 0; i < 16; i++) {
        of[part][i] = static_cast<float>((i >> (kBits * part) & ((1 << kBits) - 1)) - code_middle(kBits));
      }
    }
  }
};
template <int kBits>
inline constexpr TablePattern<kBits> kTablePattern;

// The 4 bits of 4 / bits neighbouring codes are an index into a table of the 16 sums that they can give: a table
// look-up and an addition stand for 2 or 4 multiply-adds, and use other units of the core. A table is made once for two
// lines.
template <int kBits, int kRows, bool kKeys, int kLines>
HWY_INLINE void dot_tables(const DotShape& shape, const uint8_t* codes, const float* values, const uint8_t*& next,
                           const uint8_t* last, const DotResult& result, float* out) {
  using U = Unit<kBits>;
  constexpr int kParts = 4 / kBits;
  const DF df;
  const DU du;
  VF total[kLines][kRows][1], sum[kLines][kRows];
  KIVI_UNROLL
  for (int n = 0; n < kLines; n++) {
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) total[n][r][0] = hn::Zero(df);
  }
  VF pattern[kParts];
  KIVI_UNROLL
  for (int part = 0; part < kParts; part++) pattern[part] = load_float(kTablePattern<kBits>.of[part]);
  const UnitSteps<kBits, kRows> steps(shape);
  const uint8_t* word_at = codes;
  const float* value_at = values;
  int64_t left = shape.units;
  KIVI_NO_UNROLL
  for (int64_t unit = 0; unit < steps.units; unit++) {
    fetch_lines<U::kFetch * kLines>(next, last);
    hn::Vec<DU> x[kLines];
    KIVI_UNROLL
    for (int n = 0; n < kLines; n++) {
      x[n] = hn::LoadU(du, reinterpret_cast<const uint32_t*>(word_at + n * shape.line_strides[0]));
    }
    word_at += shape.word_stride;
    KIVI_UNROLL
    for (int m = 0; m < 8; m++) {
      // Bits 4m .. 4m + 3 of the word: codes of one half, which are every other one.
      const int e = m % 4 * 2 * kParts + m / 4;
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        VF table = hn::Zero(df);
        KIVI_UNROLL
        for (int part = 0; part < kParts; part++) {
          const int at = e + 2 * part;
          const VF value = splat(value_at[(at / kLine * kRows + r) * kLine + at % kLine]);
          table = part == 0 ? hn::Mul(value, pattern[0]) : hn::MulAdd(value, pattern[part], table);
        }
        KIVI_KEEP(table);
        KIVI_UNROLL
        for (int n = 0; n < kLines; n++) {
          const VF found{_mm512_permutexvar_ps(x[n].raw, table.raw)};
          sum[n][r] = m == 0 ? found : hn::Add(sum[n][r], found);
          KIVI_KEEP(sum[n][r]);
        }
      }
      KIVI_UNROLL
      for (int n = 0; n < kLines; n++) x[n] = hn::ShiftRight<4>(x[n]);
    }
    KIVI_UNROLL
    for (int n = 0; n < kLines; n++) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        total[n][r][0] = hn::Add(total[n][r][0], sum[n][r]);
        KIVI_KEEP(total[n][r][0]);
      }
    }
    const bool run_ends = steps.run_ends(left);
    value_at += steps.values(run_ends);
    word_at += run_ends ? steps.code_gap : 0;
  }
  KIVI_UNROLL
  for (int n = 0; n < kLines; n++) finish_line<kKeys, kRows>(total[n], 1.0f, result, out + n * kLine);
}

template <int kBits, int kRows, bool kKeys>
HWY_NOINLINE void dot_table_lines(const DotShape& shape, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                                  const DotResult& result) {
  const auto* values = static_cast<const float*>(value_pointer);
  const uint8_t* next = fetch.next;
  int64_t line = 0;
  for (; line + 2 <= shape.lines; line += 2) {
    dot_tables<kBits, kRows, kKeys, 2>(shape, codes + line * shape.line_strides[0], values, next, fetch.last, result,
                                       result.out + line * kLine);
  }
  if (line < shape.lines) {
    dot_tables<kBits, kRows, kKeys, 1>(shape, codes + line * shape.line_strides[0], values, next, fetch.last, result,
                                       result.out + line * kLine);
  }
  fetch.next = next;
}

#endif  // HWY_TARGET == HWY_AVX3

// Vector v of a line.
HWY_INLINE hn::Vec<DU> load_words(const uint8_t* line, int v) {
  return hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(line) + v * kLanes);
}

// x * 2^shift; shift may be negative.
HWY_INLINE hn::Vec<DU> moved(hn::Vec<DU> x, int shift) {
  return shift >= 0 ? hn::ShiftLeftSame(x, shift) : hn::ShiftRightSame(x, -shift);
}

template <int kBits, int kRows, bool kKeys>
HWY_NOINLINE void dot_fp32(const DotShape& shape, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                           const DotResult& result) {
  using U = Unit<kBits>;
  constexpr int kLow = U::kLowBits;
  constexpr bool kShiftsCodes = Fp32Weights::shifts_codes(kBits);
  // Sums in flight: a multiply-add takes 4 cycles, and two may start in each (one with AVX-512).
  constexpr int kSums = kRows * kLineVectors;
  constexpr int kChains = kSums >= 8 ? 1 : kSums >= 2 ? 2 : 4;
  const uint8_t* next = fetch.next;
  const uint8_t* const last = fetch.last;
  const DF df;
  const DU du;
  const UnitSteps<kBits, kRows> steps(shape);
  // In registers where there are enough of them.
  constexpr bool kTotalInRegisters = HWY_TARGET == HWY_AVX3;
  VF total[kRows][kLineVectors];
  alignas(64) float stored[kRows][kLine] = {};  // written before it is read, which not every compiler sees
  for (int64_t line = 0; line < shape.lines; line++) {
    bool first = true;
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      KIVI_UNROLL
      for (int v = 0; v < kLineVectors; v++) total[r][v] = hn::Zero(df);
    }
    VF sum[kChains][kRows][kLineVectors];
    KIVI_UNROLL
    for (int n = 0; n < kChains; n++) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) sum[n][r][v] = hn::Zero(df);
      }
    }
    const uint8_t* word_at = codes + line * shape.line_strides[0];
    const uint8_t* high_at = codes + line * shape.line_strides[1] + shape.high_plane;
    const auto* value_at = static_cast<const float*>(value_pointer);
    int64_t left = shape.units;
    KIVI_NO_UNROLL
    for (int64_t unit = 0; unit < steps.units; unit++) {
      fetch_lines<U::kFetch>(next, last);
      KIVI_UNROLL
      for (int word = 0; word < U::kWords; word++, word_at += shape.word_stride) {
        KIVI_UNROLL
        for (int half = 0; half < 2; half++) {
          // The high bit of pair j is at bit j + 8 (word % 2) of its half; here at bit j + 2.
          hn::Vec<DU> x[kLineVectors], top[kLineVectors];
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) {
            x[v] = load_words(word_at, v);
            if (half == 1) x[v] = hn::ShiftRight<16>(x[v]);
            if constexpr (kBits == 3) top[v] = moved(load_words(high_at, v), 2 - 8 * (word % 2) - 16 * half);
          }
          KIVI_UNROLL
          for (int j = 0; j < U::kPairs; j++) {
            const int place = kShiftsCodes ? 0 : kLow * j;
            VF c[kLineVectors];
            KIVI_UNROLL
            for (int v = 0; v < kLineVectors; v++) {
              // 2^23 + code in place, as a float; then less 2^23 and the middle in place. Both are exact.
              auto bits = hn::OrAnd(hn::Set(du, 0x4B000000u), x[v], hn::Set(du, ((1u << kLow) - 1u) << place));
              if constexpr (kBits == 3) {
                const auto high = kShiftsCodes ? top[v] : moved(top[v], j);  // from bit j + 2 to 2j + 2
                bits = hn::OrAnd(bits, high, hn::Set(du, 4u << place));
              }
              c[v] =
                  hn::Sub(hn::BitCast(df, bits), splat(static_cast<float>((1 << 23) + (code_middle(kBits) << place))));
              if constexpr (kShiftsCodes) {
                x[v] = hn::ShiftRight<kLow>(x[v]);
                if constexpr (kBits == 3) top[v] = hn::ShiftRight<1>(top[v]);
              }
            }
            const int e = word * U::kPerWord + 2 * j + half;
            KIVI_UNROLL
            for (int r = 0; r < kRows; r++) {
              const VF value = splat(value_at[(e / kLine * kRows + r) * kLine + e % kLine]);
              VF(&s)[kLineVectors] = sum[j % kChains][r];
              KIVI_UNROLL
              for (int v = 0; v < kLineVectors; v++) {
                s[v] = hn::MulAdd(c[v], value, s[v]);
                KIVI_KEEP(s[v]);
              }
            }
          }
        }
      }
      if constexpr (kBits == 3) high_at += shape.word_stride;
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          float* at = stored[r] + v * kLanes;
          VF unit_sum = sum[0][r][v];
          KIVI_UNROLL
          for (int n = 1; n < kChains; n++) unit_sum = hn::Add(unit_sum, sum[n][r][v]);
          if constexpr (kTotalInRegisters) {
            total[r][v] = hn::Add(total[r][v], unit_sum);
          } else {
            store_float(first ? unit_sum : hn::Add(unit_sum, load_float(at)), at);
          }
          KIVI_UNROLL
          for (int n = 0; n < kChains; n++) sum[n][r][v] = hn::Zero(df);
        }
      }
      first = false;
      const bool run_ends = steps.run_ends(left);
      value_at += steps.values(run_ends);
      word_at += run_ends ? steps.code_gap : 0;
      if constexpr (kBits == 3) high_at += run_ends ? steps.high_gap : 0;
    }
    if constexpr (!kTotalInRegisters) {
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) total[r][v] = load_float(stored[r] + v * kLanes);
      }
    }
    finish_line<kKeys, kRows>(total, 1.0f, result, result.out + line * kLine);
  }
  fetch.next = next;
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
