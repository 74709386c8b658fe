// How far attention and the quantiser may be off in the tests, in one place: each limit with its reason, and with the
// largest error that tests/NUMBERS.md shows for it over every instruction set (`kivi_error_table` prints that document
// and fails beyond these limits, too). A limit is about twice what was measured, so that another seed passes and a
// kernel that rounds coarser than it should does not; nearer where the tests themselves try many seeds, further off
// where the reason says so. Outputs and values are of order 1 unless it says otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kivi::limits {

// ---------------------------------------------------------------------------------------------- quantiser

// Of K and V, in scales of the group as the definition has them: half of the scale that is stored, which float16 makes
// larger by up to 2^-11. (Codes are taken against what is stored, so that its rounding moves only the ends of the
// range, and those by less than half a scale.) Measured: 0.500.
inline constexpr double kQuantiserInScales = 0.501;

// ---------------------------------------------------------------------------------------------- attention, `exact`

// Scores of order 1: some ten roundings of 2^-24 each. Measured: 1.8e-6 (1 bit, where values are twice as large; the
// other caches 1.0e-6).
inline constexpr double kExact = 4e-6;
// Scores up to +-40, where one rounding of a score is worth 40 * 2^-24 = 2.4e-6 of its weight; soft caps, whose tanh is
// rounded at the size of the cap; ALiBi, whose distances make scores large. Measured: 8.1e-6 (captured, 1 bit).
inline constexpr double kExactScores = 1e-5;
// The same with outlier channels, which push the outputs up to 4.5 and more. Measured: 1.6e-5, and 1.8e-5 over 40 seeds
// of the unit tests.
inline constexpr double kExactWide = 2e-5;

// ---------------------------------------------------------------------------------------------- attention, `fast`

// What rounding the weights to int16 adds.
inline constexpr double kFastWeights = 5e-5;
// csrc/cpu/vector_pages-inl.h derives twice this for the rounding of the queries: a score is off by sqrt(D) *
// max|q * scale * K scale| * max code / 32767. `scaled_query` is that maximum in natural units.
inline double fast(int64_t head_dim, int64_t k_bits, double scaled_query) {
  const auto d = static_cast<double>(head_dim);
  const double amplitude = std::min(32767.0, 2147483647.0 / ((k_bits == 3 ? 448 : 255) * d));
  const double code = std::exp2(static_cast<double>(k_bits)) - 1;
  return kFastWeights + 0.5 * std::sqrt(d) * scaled_query * code / amplitude;
}
// With rotated V the rounding of a weight, times the middle of the codes, is the same in all channels, and the rotation
// gathers that in the first channel of its block.
inline double fast_gathered(int64_t block) { return 2 * kFastWeights * std::sqrt(static_cast<double>(block)); }
// Unit queries from 64 channels on. Measured: 1.3e-4; the tests have sizes, widths and lengths of which more is
// asked.
inline constexpr double kFastUnitQueries = 5e-4;

// ---------------------------------------------------------------------------------------------- outputs of 16 bits

// Half a unit in the last place of outputs from 1 to 2, on top of the limits above.
inline constexpr double kFloat16Output = 1.0 / 2048, kBFloat16Output = 1.0 / 256;

// ---------------------------------------------------------------------------------------------- CUDA

// The generic kernel, fp32, scores of order 1. A product of a query and a key is rounded at the size of 16 terms and of
// the whole, a sum of values at the size of a page and of the whole: about ten roundings of 2^-24 each, that is 6e-7.
// Measured in the emulator: 9.7e-7. The second one where head sizes and formats are all there are.
inline constexpr double kCudaExact = 2e-6, kCudaExactSizes = 3e-6;
// Tensor cores multiply numbers of 16 bits, and a device may round their sums otherwise than the emulator does, which
// is why these limits are further from what that measured: 3.2e-4 and 1.1e-3.
inline constexpr double kTensorFloat16 = 2e-3, kTensorBFloat16 = 1e-2;

}  // namespace kivi::limits
