// What the tests share that are named after the cases: small inputs that broke other systems, numbered C01 to C25. The
// tests run once per instruction set: ctest sets KIVI_CPU_CAPABILITY, and a process that did not get what it asked for
// ends with 77 (skipped), unless it asked for "scalar", which every machine has.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tests/ops/support.h"

namespace kivi::test {

class AskedInstructionSet : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* const asked = std::getenv("KIVI_CPU_CAPABILITY");
    std::printf("instruction set: %s\n", cpu_capability().c_str());
    if (asked == nullptr || *asked == 0 || cpu_capability() == asked) return;
    if (std::string(asked) == "scalar") FAIL() << "asked for scalar, got " << cpu_capability();
    std::printf("SKIPPED: this CPU lacks %s\n", asked);
    std::fflush(stdout);
    std::_Exit(77);
  }
};

inline ::testing::Environment* const kAskedInstructionSet =
    ::testing::AddGlobalTestEnvironment(new AskedInstructionSet);

inline CacheOptions case_options(int64_t heads, int64_t dim, int64_t group, int64_t residual, int64_t sink = 0,
                                 int64_t k_bits = 2, int64_t v_bits = 2) {
  CacheOptions o = options_of(heads, dim, group, residual, sink, k_bits, v_bits);
  o.precision = "exact";
  return o;
}

inline const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kHalf, at::kBFloat16};

struct Quantized {
  at::Tensor codes, scale, zero, back, fake;
};

// All results of one input: the two calls and the fused one.
inline Quantized quantized(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group) {
  Quantized r;
  std::tie(r.codes, r.scale, r.zero) = quantize(x, axis, bits, group);
  r.back = dequantize(r.codes, r.scale, r.zero, axis, bits, group, x.size(axis), x.scalar_type());
  r.fake = fake_quantize(x, axis, bits, group);
  return r;
}

inline void expect_same(const Quantized& a, const Quantized& b, const std::string& what) {
  EXPECT_TRUE(same_bits(a.codes, b.codes)) << what << ": codes";
  EXPECT_TRUE(same_bits(a.scale, b.scale)) << what << ": scale";
  EXPECT_TRUE(same_bits(a.zero, b.zero)) << what << ": zero";
  EXPECT_TRUE(same_bits(a.back, b.back)) << what << ": dequantize";
  EXPECT_TRUE(same_bits(a.fake, b.fake)) << what << ": fake_quantize";
}

// Half a unit in the last place of |x| in `type`, in double.
inline at::Tensor half_ulp(const at::Tensor& x, at::ScalarType type) {
  const int digits = type == at::kHalf ? 11 : type == at::kBFloat16 ? 8 : 24;
  const double least = std::ldexp(1.0, type == at::kHalf ? -24 : type == at::kBFloat16 ? -133 : -149);
  const at::Tensor a = x.to(at::kDouble).abs().clamp_min(std::ldexp(1.0, -200));
  return at::exp2(at::floor(at::log2(a)) - (digits - 1)).clamp_min(least) / 2;
}

// The limit of the cases for groups along `dim` of x: s/2 + qmax * d_s + d_z + d_o. Scale and zero are stored as
// `stored`, the result as `out`.
inline ::testing::AssertionResult within_tolerance(const at::Tensor& got, const at::Tensor& x, int64_t dim,
                                                   int64_t bits, at::ScalarType stored, at::ScalarType out) {
  const double levels = static_cast<double>((int64_t{1} << bits) - 1);
  const at::Tensor xd = x.to(at::kDouble), lo = xd.amin(dim, true), scale = (xd.amax(dim, true) - lo) / levels;
  // The part in fp32 arithmetic: a product and a sum that are rounded.
  const at::Tensor arithmetic = half_ulp(xd.abs().amax(dim, true) + scale, at::kFloat) * 4;
  const at::Tensor limit = scale / 2 + levels * half_ulp(scale, stored) + half_ulp(lo, stored) +
                           half_ulp(xd.abs() + scale, out) + arithmetic;
  const at::Tensor excess = (got.to(at::kDouble) - xd).abs() - limit;
  if (got.isfinite().all().item<bool>() && (excess <= 0).all().item<bool>()) return ::testing::AssertionSuccess();
  const int64_t worst = at::nan_to_num(excess, 1e300).argmax().item<int64_t>();
  return ::testing::AssertionFailure() << bits << " bits: " << xd.flatten()[worst].item<double>() << " came back as "
                                       << got.flatten()[worst].item<double>() << ", limit "
                                       << limit.expand_as(xd).flatten()[worst].item<double>();
}

inline bool all_finite(const at::Tensor& t) { return t.isfinite().all().item<bool>(); }

}  // namespace kivi::test
