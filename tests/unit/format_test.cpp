// The record layout: published sizes, sections that follow one another on lines (8-bit scales: on halves of them),
// checked size arithmetic.
#include "kivi/format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "format/codes.h"
#include "test_data.h"

namespace kivi::cpu {
namespace {

constexpr int64_t kMax = INT64_MAX;

TEST(FormatTest, PublishedRecordSizes) {
  const int64_t bytes[][3] = {{2, 2, 96}, {4, 2, 128}, {4, 4, 160}, {8, 8, 288}, {1, 1, 64}, {3, 3, 128}};
  for (const auto& b : bytes) {
    const RecordLayout r = record_layout(make_format(8, 128, 128, b[0], b[1], 32));
    EXPECT_EQ(r.bytes, b[2] * 32) << "K" << b[0] << "V" << b[1];
  }
}

TEST(FormatTest, PublishedOffsets) {
  const RecordLayout r = record_layout(make_format(8, 128, 128, 2, 2, 32));
  EXPECT_EQ(r.k_codes[0], 0);
  EXPECT_EQ(r.k_scale, 1024);
  EXPECT_EQ(r.k_zero, 1280);
  EXPECT_EQ(r.v_codes[0], 1536);
  EXPECT_EQ(r.v_scale, 2560);
  EXPECT_EQ(r.v_zero, 2816);
  EXPECT_EQ(r.bytes, 3072);
  const RecordLayout three = record_layout(make_format(8, 128, 128, 3, 3, 32));
  EXPECT_EQ(three.k_codes[1], 1024);  // the plane of the high bit follows that of the two low ones
  EXPECT_EQ(three.k_scale, 1536);
  EXPECT_EQ(three.v_codes[1], three.v_codes[0] + 1024);
}

TEST(FormatTest, SectionsFollowOneAnother) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      for (const int64_t group : kGroupSizes) {
        for (const int64_t dim : {1, 8, 16, 17, 48, 80, 96, 128, 192, 256, 576, 1024}) {
          for (const ScaleType type :
               {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened}) {
            Format f = make_format(3, dim, dim / 2 + 1, k_bits, v_bits, group);
            f.scale_type = type;
            int64_t value = 0;
            ASSERT_EQ(format_error(f, &value), nullptr);
            const RecordLayout r = record_layout(f);
            std::vector<int64_t> starts = {r.k_codes[0], r.k_scale, r.k_zero, r.v_codes[0],
                                           r.v_scale,    r.v_zero,  r.bytes};
            if (k_bits == 3) starts.push_back(r.k_codes[1]);
            if (v_bits == 3) starts.push_back(r.v_codes[1]);
            std::sort(starts.begin(), starts.end());
            EXPECT_EQ(starts[0], 0);
            for (size_t i = 0; i < starts.size(); i++) {
              EXPECT_EQ(starts[i] % (type == ScaleType::kFloat8 ? 32 : 64), 0) << format_text(f);
              if (i > 0) {
                EXPECT_GT(starts[i], starts[i - 1]) << format_text(f);
              }
            }
            EXPECT_EQ(starts.back(), r.bytes);
            EXPECT_EQ(page_bytes(f).value, 3 * (128 / group) * r.bytes);
          }
        }
      }
    }
  }
}

// Every bit of the code sections belongs to at most one code, and stays inside its section.
TEST(FormatTest, CodesDoNotOverlap) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t group : {16, 32, 128}) {
      const Format f = make_format(1, 40, 24, bits, bits, group);
      const RecordLayout r = record_layout(f);
      for (const Side side : {Side::kKey, Side::kValue}) {
        std::vector<int> used(static_cast<size_t>(r.bytes * 8), 0);
        const int64_t channels = side == Side::kKey ? r.k_channels : r.v_channels;
        for (int64_t t = 0; t < group; t++) {
          for (int64_t c = 0; c < channels; c++) {
            for (int plane = 0; plane < num_planes(bits); plane++) {
              const CodePlace at = code_place(side, r, bits, plane, t, c);
              for (int64_t b = 0; b < plane_bits(bits, plane); b++) {
                used[static_cast<size_t>(at.word * 8 + at.bit + b)]++;
              }
            }
          }
        }
        EXPECT_LE(*std::max_element(used.begin(), used.end()), 1) << bits;
        const int64_t begin = side == Side::kKey ? r.k_codes[0] : r.v_codes[0];
        const int64_t end = side == Side::kKey ? r.k_scale : r.v_scale;
        for (int64_t i = 0; i < r.bytes * 8; i++) {
          if (i < begin * 8 || i >= end * 8) {
            EXPECT_EQ(used[static_cast<size_t>(i)], 0);
          }
        }
      }
    }
  }
}

TEST(FormatTest, CheckedArithmetic) {
  EXPECT_EQ((CheckedSize(1 << 16) * CheckedSize(1 << 16)).value, int64_t{1} << 32);
  EXPECT_EQ((CheckedSize(INT32_MAX) + CheckedSize(1)).value, int64_t{1} << 31);
  EXPECT_TRUE((CheckedSize(kMax) + CheckedSize(0)).ok);
  EXPECT_FALSE((CheckedSize(kMax) + CheckedSize(1)).ok);
  EXPECT_TRUE((CheckedSize(int64_t{1} << 31) * CheckedSize(int64_t{1} << 31)).ok);
  EXPECT_FALSE((CheckedSize(int64_t{1} << 32) * CheckedSize(int64_t{1} << 31)).ok);
  EXPECT_FALSE((CheckedSize(int64_t{1} << 32) * CheckedSize(int64_t{1} << 31) * CheckedSize(0)).ok);  // once lost, lost
  EXPECT_FALSE((CheckedSize(int64_t{1} << 32) * CheckedSize(int64_t{1} << 31) + CheckedSize(1)).ok);
  EXPECT_FALSE(CheckedSize(-1).ok);
  EXPECT_FALSE((CheckedSize(-1) * CheckedSize(-1)).ok);
}

// The largest format is far from the limits, and pages of it are counted past 2^31 and 2^32.
TEST(FormatTest, SizesPast2To31) {
  Format f = make_format(65536, 1024, 1024, 8, 8, 16);
  f.scale_type = ScaleType::kFloat32;
  const CheckedSize page = page_bytes(f);
  ASSERT_TRUE(page.ok);
  EXPECT_EQ(page.value, 65536 * 8 * record_layout(f).bytes);
  EXPECT_GT(page.value, int64_t{1} << 32);
  EXPECT_TRUE((page * CheckedSize(int64_t{1} << 20)).ok);
  EXPECT_FALSE((page * CheckedSize(int64_t{1} << 40)).ok);
}

TEST(FormatTest, QuantizedCount) {
  Format f = make_format(1, 64, 64, 2, 2, 32);
  for (const int64_t group : kGroupSizes) {
    for (const int64_t residual : {int64_t{0}, int64_t{1}, group - 1, group, int64_t{128}}) {
      for (const int64_t sink : {0, 4}) {
        f.group_size = group, f.residual_length = residual, f.sink_length = sink;
        for (int64_t n = 0; n <= 700; n++) {
          const int64_t m = quantized_count(f, n);
          EXPECT_EQ(m % group, 0);
          const int64_t exact = n - std::min(n, sink) - m;
          EXPECT_LT(exact, residual + group);
          if (m > 0) {
            EXPECT_GE(exact, residual);
          }
          EXPECT_GE(window_capacity(f), exact);
          if (n >= sink + residual + group) {
            EXPECT_GT(m, 0);
          }
        }
      }
    }
  }
}

TEST(FormatTest, ErrorsNameTheField) {
  const Format good = make_format(8, 128, 128, 2, 2, 32);
  int64_t value = 0;
  EXPECT_EQ(format_error(good, &value), nullptr);
  const auto expect_error = [&](const Format& f, const char* field, int64_t bad) {
    const char* error = format_error(f, &value);
    ASSERT_NE(error, nullptr) << field;
    EXPECT_EQ(std::string(error).rfind(field, 0), 0u) << error;
    EXPECT_EQ(value, bad);
  };
  for (const int64_t bits : {0, 5, 6, 7, 16, -4}) {
    Format f = good;
    f.k_bits = bits;
    expect_error(f, "k_bits", bits);
    f = good, f.v_bits = bits;
    expect_error(f, "v_bits", bits);
  }
  for (const int64_t group : {0, -32, 8, 48, 256}) {
    Format f = good;
    f.group_size = group;
    expect_error(f, "group_size", group);
  }
  Format f = good;
  f.num_kv_heads = 0;
  expect_error(f, "num_kv_heads", 0);
  f = good, f.head_dim = 1025;
  expect_error(f, "head_dim", 1025);
  f = good, f.value_head_dim = 0;
  expect_error(f, "value_head_dim", 0);
  f = good, f.residual_length = -1;
  expect_error(f, "residual_length", -1);
  f = good, f.sink_length = -1;
  expect_error(f, "sink_length", -1);
  f = good, f.scale_type = static_cast<ScaleType>(7);
  expect_error(f, "scale_type", 7);
}

// Found by fuzzing: the sum of the channels overflowed.
TEST(FormatTest, ClassesOfMoreChannelsThanAnyHead) {
  Format f = make_format(8, 128, 128, 4, 2, 32);
  f.num_key_classes = 2;
  for (const int64_t channels : {int64_t{129}, int64_t{1} << 62, kMax}) {
    f.key_classes[0] = {96, 4};
    f.key_classes[1] = {channels, 2};
    int64_t value = 0;
    ASSERT_NE(format_error(f, &value), nullptr);
    EXPECT_EQ(value, channels);
  }
  f.key_classes[0] = {int64_t{1} << 62, 4};
  f.key_classes[1] = {int64_t{1} << 62, 2};
  int64_t value = 0;
  EXPECT_NE(format_error(f, &value), nullptr);
}

}  // namespace
}  // namespace kivi::cpu
