#pragma once

#include <cstdint>

namespace kivi::limits {

inline constexpr double kExact = 1e-5;
inline constexpr double kExactWide = 2e-5;
inline constexpr double kFast = 5e-4;
inline constexpr double kFastWide = 1e-1;
inline constexpr double kFloat16Output = 2e-3;
inline constexpr double kBFloat16Output = 1.6e-2;
inline constexpr double kTensorFloat16 = 2e-3;
inline constexpr double kTensorBFloat16 = 1e-2;
inline double quantiser_in_scales(int64_t bits) { return bits == 8 ? 0.8 : 0.6; }

}  // namespace kivi::limits
