// Dot products of packed codes with the values of several query rows: out[row][lane] = sum_e code[lane][e]
// value[row][e] for the 16 lanes of a line, tokens (K) or channels (V). The codes are unpacked once for all rows. Two
// kinds of value: int16 with 32-bit sums ("fast"), and fp32 ("exact").
//
// Values are stored [e / 16][row][16], in units: 16 values, or 32 with codes of 1 bit (one word). int16 sums are exact
// as long as 255 * amplitude * number of values < 2^31 (`int16_amplitude`).
//
// No #pragma once: foreach_target.h includes this file once per target.

#if defined(KIVI_CPU_VECTOR_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_DOT_INL_H_
#undef KIVI_CPU_VECTOR_DOT_INL_H_
#else
#define KIVI_CPU_VECTOR_DOT_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/vector_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// Where the words of one dot product are: `runs` records of `units` units each.
struct DotShape {
  int64_t units = 0;
  int64_t runs = 0;
  int64_t word_stride = 0;       // bytes from a word to the next one of the same lane
  int64_t run_code_stride = 0;   // bytes
  int64_t run_value_stride = 0;  // values
};

// Lines of the next page that are still to be prefetched. They are spread over the dot products: in a burst they cost a
// cold cache a quarter more time.
struct Fetch {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;
};

template <int kLines>
HWY_INLINE void fetch_lines(const uint8_t*& next, const uint8_t* end) {
  for (int i = 0; i < kLines; i++) {
    if (next < end) {
      __builtin_prefetch(next, 0, 2);  // into L2: two pages and the buffers do not fit into L1
      next += kLineBytes;
    }
  }
}

using DotFunction = void (*)(const DotShape& shape, const uint8_t* codes, const void* values, Fetch& fetch, float* out);

template <int kBits>
struct Unit {
  static constexpr int kPerWord = 32 / kBits;
  static constexpr int kPairs = 16 / kBits;  // pairs of codes of one word
  static constexpr int kWords = kBits == 1 ? 1 : kBits / 2;
  static constexpr int kSubs = kBits == 1 ? 2 : 1;  // blocks of 16 values
  // Its share of a page, scale and zero of G = 16 included, so that the next page is there in time.
  static constexpr int kFetch = kBits == 1 ? 3 : kBits / 2 + 1;
};

// The largest |value| for sums over `values` numbers; the one below it leaves room for the rounding of the value.
inline int32_t int16_amplitude(int64_t values) {
  const int64_t limit = INT32_MAX / (255 * std::max<int64_t>(values, 1)) - 1;
  return static_cast<int32_t>(std::min<int64_t>(limit, 32767));
}

using AliasedInt32 = int32_t __attribute__((may_alias));

// Pair `pair` of row `row` of a unit, as an offset into its values.
template <int kRows>
constexpr int pair_offset(int pair, int row) {
  return (pair / 8 * kRows + row) * kLine + 2 * kPackedPair[pair % 8];
}

#if HWY_TARGET == HWY_AVX3

// sum += the products of the pairs of int16 in `codes` with the pair at `pair`.
template <bool kVnni>
HWY_INLINE void multiply_pairs(VI& sum, __m512i codes, const int16_t* pair) {
  const auto& both = *reinterpret_cast<const AliasedInt32*>(pair);
  if constexpr (kVnni) {
    // As text, because g++ moves broadcasts out of loops into stack slots.
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(codes), "m"(both));
  } else {
    sum = hn::Add(sum, VI{_mm512_madd_epi16(codes, _mm512_set1_epi32(both))});
    KIVI_KEEP(sum);
  }
}

// Two neighbouring codes are masked in place, at weights 1 and 2^kBits, and have a sum each; one shift for the two. (8
// bits: two sums of weight 1.)
template <int kBits, int kRows, bool kVnni>
HWY_NOINLINE void dot_int16(const DotShape& shape, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                            float* out) {
  using U = Unit<kBits>;
  const auto* values = static_cast<const int16_t*>(value_pointer);
  const uint8_t* next = fetch.next;
  VI low[kRows], high[kRows];
  KIVI_UNROLL
  for (int r = 0; r < kRows; r++) low[r] = high[r] = hn::Zero(DI());
  const __m512i low_mask = _mm512_set1_epi16((1 << kBits) - 1);
  const __m512i high_mask = _mm512_slli_epi16(low_mask, kBits);
  for (int64_t run = 0; run < shape.runs; run++) {
    const uint8_t* word_at = codes + run * shape.run_code_stride;
    const int16_t* value_at = values + run * shape.run_value_stride;
    for (int64_t unit = 0; unit < shape.units; unit++, value_at += U::kSubs * kRows * kLine) {
      fetch_lines<U::kFetch>(next, fetch.end);
      KIVI_UNROLL
      for (int word = 0; word < U::kWords; word++, word_at += shape.word_stride) {
        const __m512i x = _mm512_loadu_si512(word_at);
        KIVI_UNROLL
        for (int two = 0; two < U::kPairs; two += 2) {
          const __m512i y = two == 0 ? x : _mm512_srli_epi16(x, static_cast<unsigned>(kBits * two));
          const __m512i c0 = _mm512_and_si512(y, low_mask);
          const __m512i c1 = kBits == 8 ? _mm512_srli_epi16(x, 8) : _mm512_and_si512(y, high_mask);
          const int pair = word * U::kPairs + two;
          KIVI_UNROLL
          for (int r = 0; r < kRows; r++) {
            multiply_pairs<kVnni>(low[r], c0, value_at + pair_offset<kRows>(pair, r));
            multiply_pairs<kVnni>(high[r], c1, value_at + pair_offset<kRows>(pair + 1, r));
          }
        }
      }
    }
  }
  fetch.next = next;
  KIVI_UNROLL
  for (int r = 0; r < kRows; r++) {
    constexpr int kWeight = kBits == 8 ? 0 : kBits;
    const VI sum = hn::Add(hn::ShiftLeft<kWeight>(low[r]), high[r]);
    store_float(hn::Mul(hn::ConvertTo(DF(), sum), splat(1.0f / (1 << kWeight))), out + r * kLine);
  }
}

#else

// Sum of the products of pairs of int16, in the lane of the pair.
HWY_INLINE VI multiply_pairs(VS codes, VS pairs) {
#if HWY_TARGET == HWY_AVX2
  return VI{_mm256_madd_epi16(codes.raw, pairs.raw)};
#else
  return VI{
      vpaddq_s32(vmull_s16(vget_low_s16(codes.raw), vget_low_s16(pairs.raw)), vmull_high_s16(codes.raw, pairs.raw))};
#endif
}

// Codes are masked in place, so a code at position k of its byte counts 2^(kBits k)-fold: one pass per position, lowest
// first, and a shift of the sums between passes (Horner). The upper byte of a half is reached by loading one byte
// further on, which stays within the record. So few sums live at once and no code is shifted. The sums end
// 2^(8 - kBits)-fold.
template <int kBits, int kRows, bool kVnni = false>
HWY_NOINLINE void dot_int16(const DotShape& shape, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                            float* out) {
  using U = Unit<kBits>;
  constexpr int kPositions = 8 / kBits;
  const auto* values = static_cast<const int16_t*>(value_pointer);
  const uint8_t* next = fetch.next;
  const DS ds;
  const DI di;
  int positions = kPositions;
  asm volatile("" : "+r"(positions));  // a loop, not code for every pass: the op cache is small
  VI sum[kRows][kLineVectors];
  KIVI_UNROLL
  for (int r = 0; r < kRows; r++) {
    KIVI_UNROLL
    for (int v = 0; v < kLineVectors; v++) sum[r][v] = hn::Zero(di);
  }
  VS mask = hn::Set(ds, (1 << kBits) - 1);
  // The lines of a unit, over the passes.
  constexpr int kPassFetch = (U::kFetch + kPositions - 1) / kPositions;
  const uint8_t* const end = fetch.end;
  KIVI_NO_UNROLL
  for (int k = 0; k < positions; k++) {
    const int lines = (k + 1) * U::kFetch / kPositions - k * U::kFetch / kPositions;
    if (k != 0) {
      mask = hn::ShiftLeft < kBits == 8 ? 0 : kBits > (mask);
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) sum[r][v] = hn::ShiftLeft<kBits>(sum[r][v]);
      }
    }
    for (int64_t run = 0; run < shape.runs; run++) {
      const uint8_t* word_at = codes + run * shape.run_code_stride;
      const int16_t* value_at = values + run * shape.run_value_stride + 2 * kPackedPair[k];
      asm volatile("" : "+r"(word_at));  // or g++ keeps all words of all passes in stack slots
      KIVI_NO_UNROLL
      for (int64_t unit = 0; unit < shape.units; unit++, value_at += U::kSubs * kRows * kLine) {
        if (lines > 0) fetch_lines<kPassFetch>(next, end);
        KIVI_UNROLL
        for (int word = 0; word < U::kWords; word++, word_at += shape.word_stride) {
          KIVI_UNROLL
          for (int byte = 0; byte < 2; byte++) {
            VS c[kLineVectors];
            KIVI_UNROLL
            for (int v = 0; v < kLineVectors; v++) {
              const auto* at = reinterpret_cast<const int16_t*>(word_at + v * sizeof(VS) + byte);
              c[v] = hn::And(mask, hn::LoadU(ds, at));
            }
            const int pair = word * U::kPairs + byte * kPositions;  // + k, which is in value_at
            KIVI_UNROLL
            for (int r = 0; r < kRows; r++) {
              const auto& both = *reinterpret_cast<const AliasedInt32*>(value_at + pair_offset<kRows>(pair, r));
              const VS pairs = hn::BitCast(ds, hn::Set(di, both));
              KIVI_UNROLL
              for (int v = 0; v < kLineVectors; v++) {
                sum[r][v] = hn::Add(sum[r][v], multiply_pairs(c[v], pairs));
                KIVI_KEEP(sum[r][v]);
              }
            }
          }
        }
      }
    }
  }
  fetch.next = next;
  KIVI_UNROLL
  for (int r = 0; r < kRows; r++) {
    KIVI_UNROLL
    for (int v = 0; v < kLineVectors; v++) {
      const VF x = hn::Mul(hn::ConvertTo(DF(), sum[r][v]), splat(1.0f / (1 << (8 - kBits))));
      store_float(x, out + r * kLine + v * kLanes);
    }
  }
}

#endif  // HWY_TARGET

// What value e of fp32 has to be multiplied by, because its code is masked in place in its 16-bit half; e modulo 32.
struct Fp32Weights {
  alignas(64) float of[32];
  constexpr explicit Fp32Weights(int bits) : of() {
    for (int e = 0; e < 32; e++) of[e] = 1.0f / static_cast<float>(1 << (bits * (e % (32 / bits) / 2)));
  }
};
inline constexpr Fp32Weights kFp32Weights[4] = {Fp32Weights(1), Fp32Weights(2), Fp32Weights(4), Fp32Weights(8)};
inline const float* fp32_weights(int64_t bits) { return kFp32Weights[bits == 8 ? 3 : bits / 2].of; }

// fp32 sums are taken over code - middle, an integer near the middle of the codes; the caller adds middle * scale to
// zero. The sums then stay as small as their result, and so does their rounding, where zero and the codes' part cancel
// (outlier channels).
constexpr int code_middle(int64_t bits) { return bits == 1 ? 0 : 1 << (bits - 1); }
// Of a whole code, planes included.
constexpr int whole_code_middle(int64_t bits) { return code_middle(plane_bits(bits, 0)); }

template <int kBits, int kRows>
HWY_NOINLINE void dot_fp32(const DotShape& shape, const uint8_t* codes, const void* value_pointer, Fetch& fetch,
                           float* out) {
  using U = Unit<kBits>;
  // Sums in flight: a multiply-add takes 4 cycles, and two may start in each (one with AVX-512).
  constexpr int kSums = kRows * kLineVectors;
  constexpr int kChains = kSums >= 8 ? 1 : kSums >= 2 ? 2 : 4;
  const auto* values = static_cast<const float*>(value_pointer);
  const uint8_t* next = fetch.next;
  const DF df;
  const DU du;
  // One sum over many values is not precise enough: the sums of the units are added up, in registers where there are
  // enough of them, else in `out`.
  constexpr bool kTotalInRegisters = HWY_TARGET == HWY_AVX3;
  bool first = true;
  VF total[kRows][kLineVectors];
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
  for (int64_t run = 0; run < shape.runs; run++) {
    const uint8_t* word_at = codes + run * shape.run_code_stride;
    const float* value_at = values + run * shape.run_value_stride;
    KIVI_NO_UNROLL
    for (int64_t unit = 0; unit < shape.units; unit++, value_at += U::kSubs * kRows * kLine) {
      fetch_lines<U::kFetch>(next, fetch.end);
      KIVI_UNROLL
      for (int word = 0; word < U::kWords; word++, word_at += shape.word_stride) {
        hn::Vec<DU> x[kLineVectors];
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          x[v] = hn::LoadU(du, reinterpret_cast<const uint32_t*>(word_at + v * sizeof(VF)));
        }
        KIVI_UNROLL
        for (int half = 0; half < 2; half++) {
          KIVI_UNROLL
          for (int j = 0; j < U::kPairs; j++) {
            VF c[kLineVectors];
            KIVI_UNROLL
            for (int v = 0; v < kLineVectors; v++) {
              // 2^23 + code in place, as a float; then less 2^23 and the middle in place. Both are exact.
              const auto mask = hn::Set(du, ((1u << kBits) - 1u) << (kBits * j));
              const auto offset = splat(static_cast<float>((1 << 23) + (code_middle(kBits) << (kBits * j))));
              c[v] = hn::Sub(hn::BitCast(df, hn::OrAnd(hn::Set(du, 0x4B000000u), x[v], mask)), offset);
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
          KIVI_UNROLL
          for (int v = 0; v < kLineVectors; v++) x[v] = hn::ShiftRight<16>(x[v]);
        }
      }
      KIVI_UNROLL
      for (int r = 0; r < kRows; r++) {
        KIVI_UNROLL
        for (int v = 0; v < kLineVectors; v++) {
          float* at = out + r * kLine + v * kLanes;
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
    }
  }
  fetch.next = next;
  if constexpr (kTotalInRegisters) {
    KIVI_UNROLL
    for (int r = 0; r < kRows; r++) {
      KIVI_UNROLL
      for (int v = 0; v < kLineVectors; v++) store_float(total[r][v], out + r * kLine + v * kLanes);
    }
  }
}

// The dot product for a width and a number of rows.
template <int kRows>
DotFunction dot_function(int64_t bits, bool exact, bool vnni) {
  if (exact) {
    switch (bits) {
      case 1:
        return dot_fp32<1, kRows>;
      case 2:
        return dot_fp32<2, kRows>;
      case 4:
        return dot_fp32<4, kRows>;
      default:
        return dot_fp32<8, kRows>;
    }
  }
#if HWY_TARGET == HWY_AVX3
  if (vnni) {
    switch (bits) {
      case 1:
        return dot_int16<1, kRows, true>;
      case 2:
        return dot_int16<2, kRows, true>;
      case 4:
        return dot_int16<4, kRows, true>;
      default:
        return dot_int16<8, kRows, true>;
    }
  }
#else
  (void)vnni;
#endif
  switch (bits) {
    case 1:
      return dot_int16<1, kRows, false>;
    case 2:
      return dot_int16<2, kRows, false>;
    case 4:
      return dot_int16<4, kRows, false>;
    default:
      return dot_int16<8, kRows, false>;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
