// Dot products of packed codes with the values of several query rows, for lines of 16 lanes, tokens (K) or channels
// (V):
//   sum[row][lane] = sum_e code[lane][e] value[row][e]
// The codes are unpacked once for all rows. Two kinds of value: int16 with 32-bit sums ("fast", vector_dot16-inl.h),
// and fp32 ("exact", vector_dot32-inl.h). This file has what both share.
//
// Values are stored [e / 16][row][16]. A unit is what one step of the loops takes: 16 values, or 32 with codes of 1 and
// 3 bits (one word of 1-bit codes).
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

#include "cpu/vector_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// Where the words of the dot products are: `lines` lines with the same values, `runs` records of `units` units each.
struct DotShape {
  int64_t lines = 0;
  int64_t runs = 0;
  int64_t units = 0;
  int64_t word_stride = 0;           // bytes from a word to the next one of the same lane
  int64_t line_strides[2] = {0, 0};  // bytes from a line to the next one, by plane
  int64_t run_code_stride = 0;       // bytes
  int64_t run_value_stride = 0;      // values
  int64_t high_plane = 0;            // bytes from the low plane to the high one (3 bits)
};

// Where the results go: lines side by side from out[row * row_stride] on.
//   keys    out = sum * factor[row] + constant[row]
//   values  out = sum * factor[row] + out
struct DotResult {
  float* out = nullptr;
  int64_t row_stride = 0;
  const float* factor = nullptr;
  const float* constant = nullptr;
};

// Writes the sums of one line, as fp32, to `out`.
template <bool kKeys, int kRows>
HWY_INLINE void finish_line(const VF (&sum)[kRows][kLineVectors], float weight, const DotResult& result, float* out) {
  KIVI_UNROLL
  for (int r = 0; r < kRows; r++) {
    const VF factor = splat(result.factor[r] * weight);
    float* at = out + r * result.row_stride;
    KIVI_UNROLL
    for (int v = 0; v < kLineVectors; v++) {
      const VF base = kKeys ? splat(result.constant[r]) : load_float(at + v * kLanes);
      store_float(hn::MulAdd(sum[r][v], factor, base), at + v * kLanes);
    }
  }
}

// Lines of the next page that are still to be prefetched, up to `last`, which is fetched again when the others are
// done: that is cheaper than a branch. They are spread over the dot products: in a burst they cost a cold cache a
// quarter more time.
struct Fetch {
  const uint8_t* next = nullptr;
  const uint8_t* last = nullptr;
};

template <int kLines>
HWY_INLINE void fetch_lines(const uint8_t*& next, const uint8_t* last) {
  KIVI_UNROLL
  for (int i = 0; i < kLines; i++) {
    // Into L2: two pages and the buffers do not fit into L1. A few lines beyond the last one do no harm.
    __builtin_prefetch(next + i * kLineBytes, 0, 2);
  }
  next += kLines * kLineBytes;
  next = next < last ? next : last;
}

using DotFunction = void (*)(const DotShape& shape, const uint8_t* codes, const void* values, Fetch& fetch,
                             const DotResult& result);

template <int kBits>
struct Unit {
  static constexpr int kLowBits = kBits == 3 ? 2 : kBits;  // of the first plane
  static constexpr int kPerWord = 32 / kLowBits;
  static constexpr int kPairs = 16 / kLowBits;                    // pairs of codes of one word
  static constexpr int kSubs = kBits == 1 || kBits == 3 ? 2 : 1;  // blocks of 16 values
  static constexpr int kWords = kSubs * kLine / kPerWord;         // of the first plane
  // Its share of a page, scale and zero of G = 16 included, so that the next page is there in time.
  static constexpr int kFetch = kBits == 1 ? 3 : kBits == 3 ? 5 : kBits / 2 + 1;
};

// The steps through all units of a line, as one loop: the runs of V are short.
template <int kBits, int kRows>
struct UnitSteps {
  using U = Unit<kBits>;
  int64_t units, run_units;
  int64_t code_gap, high_gap, run_values;  // beyond the step of a unit, where a run ends
  HWY_INLINE explicit UnitSteps(const DotShape& s)
      : units(s.runs * s.units),
        run_units(s.units),
        code_gap(s.run_code_stride - s.units * U::kWords * s.word_stride),
        high_gap(s.run_code_stride - s.units * s.word_stride),
        run_values(s.run_value_stride - (s.units - 1) * kUnitValues) {}
  static constexpr int64_t kUnitValues = U::kSubs * kRows * kLine;
  HWY_INLINE bool run_ends(int64_t& left) const {
    const bool ends = --left == 0;
    left = ends ? run_units : left;
    return ends;
  }
  HWY_INLINE int64_t values(bool ends) const { return ends ? run_values : kUnitValues; }
};

// Pair `pair` of row `row` of a unit, as an offset into its values.
template <int kRows>
constexpr int pair_offset(int pair, int row) {
  return (pair / 8 * kRows + row) * kLine + 2 * kPackedPair[pair % 8];
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
