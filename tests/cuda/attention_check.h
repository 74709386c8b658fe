// A call of attention on the device compared with the reference in double, with the scalar kernel of the CPU, and with
// another call to the bit.
//
// The limits are those of tests/limits.h.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda/attention.h"
#include "cuda/attention_device.h"
#include "tests/limits.h"
#include "tests/unit/attention_case.h"
#include "tests/unit/attention_problem.h"

namespace kivi::cuda {

using cpu::AttentionCase;
using cpu::AttentionResult;
using cpu::AttentionSpec;
using cpu::kBitWidths;
using cpu::kElements;
using cpu::kGroupSizes;
using cpu::make_format;
using cpu::max_difference;
using test::Problem;
using test::Settings;
using test::settings;

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr double kLimit = limits::kCudaExact;

inline const cpu::Kernels& scalar() { return *cpu::kernels_for(cpu::Isa::kScalar); }

// lse may be far from 0: then it is its own last bits that count.
inline void expect_lse(const std::vector<float>& got, const std::vector<float>& want, double limit,
                       const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); i++) {
    if (std::isfinite(want[i])) {
      EXPECT_NEAR(got[i], want[i], limit + 4e-7 * std::fabs(want[i])) << what << " lse " << i;
    } else {
      EXPECT_EQ(std::isnan(got[i]), std::isnan(want[i])) << what << " lse " << i;
      if (!std::isnan(want[i])) EXPECT_EQ(got[i], want[i]) << what << " lse " << i;
    }
  }
}

inline void expect_result(const AttentionOutput& got, const std::vector<float>& out, const std::vector<float>& lse,
                          double limit, double rounding, const std::string& what) {
  EXPECT_LE(max_difference(got.out, out), limit + rounding) << what;
  expect_lse(got.lse, lse, limit, what);
}

// `rounding` is that of outputs to the type of the queries.
inline void expect_close(const AttentionSpec& spec, double limit = kLimit, double rounding = 0) {
  AttentionCase c(spec);
  const AttentionOutput got = DeviceAttention(c.params()).run();
  const AttentionResult want = c.oracle(), other = c.run(scalar());
  const std::string what = cpu::format_text(spec.format) + " heads " + std::to_string(spec.num_heads) + " queries " +
                           std::to_string(spec.q_len) + " seed " + std::to_string(spec.seed);
  expect_result(got, want.out, want.lse, limit, rounding, what);
  expect_result(got, other.out, other.lse, 2 * limit, 2 * rounding, what + " scalar");
}

inline std::vector<float> floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

inline void expect_close(const Settings& settings, double limit, const std::string& what) {
  Problem problem(settings);
  const AttentionOutput got = DeviceAttention(problem.params).run();
  const Problem::Result want = problem.oracle(), other = problem.run(scalar(), true);
  expect_result(got, floats(want.out), floats(want.lse), limit, 0, what);
  expect_result(got, floats(other.out), floats(other.lse), 2 * limit, 0, what + " scalar");
}

inline void expect_same_bits(const AttentionOutput& got, const AttentionOutput& want) {
  ASSERT_EQ(got.out.size(), want.out.size());
  ASSERT_EQ(got.lse.size(), want.lse.size());
  const auto differ = [](const std::vector<float>& a, const std::vector<float>& b) {
    int64_t count = 0;
    for (size_t i = 0; i < a.size(); i++) count += float_bits(a[i]) != float_bits(b[i]);
    return count;
  };
  EXPECT_EQ(differ(got.out, want.out), 0);
  EXPECT_EQ(differ(got.lse, want.lse), 0);
}

inline AttentionSpec attention_spec(const Format& f) {
  AttentionSpec s;
  s.format = f;
  return s;
}

inline Format small_format(int64_t k_bits = 2, int64_t v_bits = 2, int64_t group = 32) {
  Format f = make_format(2, 32, 32, k_bits, v_bits, group);
  f.residual_length = 32;
  return f;
}

// The formats of the recipes (ops/options.cpp) for a head of 64 or 128 channels.
inline Format recipe_format(int recipe, int64_t dim) {
  Format f = test::make_format(2, dim, dim, 2, 2, 32, 32, 4);
  if (recipe == 0) return f;  // kivi
  f.scale_type = ScaleType::kFloat8;
  f.k_search = kRecipeKeySearch, f.v_search = kRecipeTokenSearch;
  f.k_bias_correction = f.v_gain_correction = true;
  f.v_rotated = true;
  if (recipe != 2) f.v_group_size = dim, f.v_symmetric = true;
  if (recipe == 2) f.v_search = kRecipeGroupSearch;  // balanced
  if (recipe == 3) f.v_bits = 3;                     // quality
  if (recipe == 4) {                                 // near-lossless
    f.k_bits = f.v_bits = 4;
    return f;
  }
  f.k_bits = 4;
  const int64_t third = recipe == 3 ? (dim * 3 + 128) / 256 * 32 : 0;
  f.key_classes[f.num_key_classes++] = {dim / 4, 4};
  if (third > 0) f.key_classes[f.num_key_classes++] = {third, 3};
  f.key_classes[f.num_key_classes++] = {dim - dim / 4 - third, 2};
  return f;
}

}  // namespace kivi::cuda
