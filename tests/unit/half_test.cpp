// float16 and bfloat16, all 65536 values of each, and every rounding boundary.
#include "format/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "test_data.h"

namespace kivi::cpu {
namespace {

// The value of a finite half from the definition.
double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

bool same(float a, float b) { return float_bits(a) == float_bits(b); }

TEST(HalfTest, EveryFloat16ToFloatAndBack) {
  for (uint32_t i = 0; i < 65536; i++) {
    const auto h = static_cast<uint16_t>(i);
    const float x = half_to_float(h);
    const bool special = (h & 0x7C00) == 0x7C00;
    if (special && (h & 1023) != 0) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_EQ(float_to_half(x), h | 0x200);  // quiet, the payload kept
    } else if (special) {
      EXPECT_TRUE(same(
          x, (h & 0x8000) != 0 ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity()));
      EXPECT_EQ(float_to_half(x), h);
    } else {
      EXPECT_TRUE(same(x, static_cast<float>(half_value(h)))) << i;
      EXPECT_EQ(float_to_half(x), h);
    }
  }
}

// Between each two neighbours: the middle goes to the even one, one step of a float before or after it to the nearer
// one.
TEST(HalfTest, RoundsToNearestEven) {
  for (uint32_t i = 0; i < 0x7BFF; i++) {
    const auto low = static_cast<uint16_t>(i);
    const auto high = static_cast<uint16_t>(i + 1);
    const auto middle = static_cast<float>((half_value(low) + half_value(high)) / 2);
    for (const int sign : {0, 0x8000}) {
      const float s = sign != 0 ? -1.0f : 1.0f;
      EXPECT_EQ(float_to_half(s * middle), sign | ((i & 1) != 0 ? high : low));
      EXPECT_EQ(float_to_half(s * std::nextafter(middle, 0.0f)), sign | low);
      EXPECT_EQ(float_to_half(s * std::nextafter(middle, 1e9f)), sign | high);
    }
  }
}

TEST(HalfTest, EndsOfFloat16) {
  EXPECT_EQ(float_to_half(65519.996f), kHalfMax);
  EXPECT_EQ(float_to_half(65520.0f), kHalfInf);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::max()), kHalfInf);
  EXPECT_EQ(float_to_half_finite(65520.0f), kHalfMax);
  EXPECT_EQ(float_to_half_finite(-1e30f), 0x8000 | kHalfMax);
  EXPECT_EQ(float_to_half_finite(std::numeric_limits<float>::infinity()), kHalfInf);
  EXPECT_EQ(float_to_half(std::ldexp(1.0f, -25)), 0);  // half of the smallest, to even
  EXPECT_EQ(float_to_half(std::nextafter(std::ldexp(1.0f, -25), 1.0f)), 1);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(float_to_half(-0.0f), 0x8000);
  EXPECT_EQ(float_to_half(bits_float(kFloatNaN)), 0x7E00);
}

TEST(HalfTest, EveryBFloat16ToFloatAndBack) {
  for (uint32_t i = 0; i < 65536; i++) {
    const auto b = static_cast<uint16_t>(i);
    const float x = bfloat16_to_float(b);
    EXPECT_EQ(float_bits(x), i << 16);
    EXPECT_EQ(float_to_bfloat16(x), std::isnan(x) ? b | 0x40 : b);
  }
}

TEST(HalfTest, BFloat16RoundsToNearestEven) {
  for (uint32_t i = 0; i < 0x7F80; i++) {
    const uint32_t middle = i << 16 | 0x8000;
    for (const uint32_t sign : {0u, 0x8000u}) {
      EXPECT_EQ(float_to_bfloat16(bits_float(sign << 16 | middle)), sign | (i + (i & 1)));
      EXPECT_EQ(float_to_bfloat16(bits_float(sign << 16 | (middle - 1))), sign | i);
      EXPECT_EQ(float_to_bfloat16(bits_float(sign << 16 | (middle + 1))), sign | (i + 1));
    }
  }
  EXPECT_EQ(float_to_bfloat16(bits_float(0x7F800001u)), 0x7FC0);  // NaN, not infinity
}

TEST(HalfTest, SubnormalsDoNotDependOnTheModeOfTheThread) {
  if (!FlushDenormals::supported) GTEST_SKIP() << "no known switch for subnormals on this machine";
  const FlushDenormals flush;
  for (uint32_t i = 0; i < 0x7C00; i++) {
    const auto h = static_cast<uint16_t>(i);
    EXPECT_EQ(float_to_half(half_to_float(h)), h);
  }
}

}  // namespace
}  // namespace kivi::cpu
