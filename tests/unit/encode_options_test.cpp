// Records beyond the plain one on every instruction set: 8-bit scales, groups of V of any size, symmetric and rotated
// values, range searches and corrections. Equal to the bit to the oracle, whatever is combined.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "encode_case.h"
#include "format/rotate.h"

namespace kivi::cpu {
namespace {

constexpr RangeSearch kWideSearch{10, {960, 920, 880, 840, 800, 760, 720, 680, 640, 600}};
// Lists of K and V, of every length that falls differently into trials side by side.
constexpr RangeSearch kSearches[][2] = {
    {kNarrowSearch, kWideSearch},
    {kRecipeKeySearch, kRecipeTokenSearch},
    {{1, {900}}, {16, {1, 999, 998, 950, 900, 850, 800, 750, 700, 650, 600, 550, 500, 450, 400, 1000}}},
    {{3, {700, 800, 900}}, {4, {1000, 930, 860, 790}}}};

constexpr ScaleType kScaleTypes[] = {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened8,
                                     ScaleType::kWidened};

class EncodeOptions : public Encode {
 public:
  // Values as the record holds them: rotated rows, in fp32.
  static Tokens with_rotated_values(const Tokens& x) {
    Tokens y = x;
    const int64_t dim = x.f.value_head_dim;
    y.v = Array(Element::kFloat32, x.v.size());
    std::vector<float> row(static_cast<size_t>(dim));
    for (int64_t t = 0; t < x.f.group_size; t++) {
      for (int64_t d = 0; d < dim; d++) row[static_cast<size_t>(d)] = x.v.get(t * x.v_stride + d);
      rotate_row(row.data(), dim, false);
      for (int64_t d = 0; d < dim; d++) y.v.set(t * x.v_stride + d, row[static_cast<size_t>(d)]);
    }
    return y;
  }

  // The bytes against the oracle, the decoded tokens against the scalar kernel.
  void check_options(const Tokens& x) {
    if (!x.f.v_rotated) {
      check(x, !HasFailure());
      return;
    }
    const Tokens y = with_rotated_values(x);
    bool want_fits = true;
    std::vector<float> k_back, v_back;
    const std::vector<uint8_t> want =
        oracle::encode(x.f, x.k, x.k_stride, y.v, y.v_stride, &want_fits, &k_back, &v_back);
    Record got(record_layout(x.f).bytes);
    ASSERT_EQ(encode(x, &got), want_fits) << format_text(x.f);
    if (!want_fits) return;
    EXPECT_TRUE(got.guard_intact()) << format_text(x.f);
    ASSERT_EQ(got.copy(), want) << format_text(x.f) << " " << element_name(x.k.type());
    for (const Element type : kElements) check_against_scalar(x.f, got, type, 0, x.f.group_size, 0, false);
  }

  // All combinations of the options that the bits of `i` name.
  static Format with_options(Format f, int64_t i) {
    f.k_bias_correction = (i & 1) != 0;
    f.v_gain_correction = (i & 2) != 0;
    f.v_symmetric = (i & 4) != 0;
    f.v_rotated = (i & 8) != 0;
    if ((i & 16) != 0) f.v_group_size = round_up(f.value_head_dim, f.group_size);
    const auto& search = kSearches[(i + i / 4 + i / 16) % 4];
    if ((i & 32) != 0) f.k_search = search[0], f.v_search = search[1];
    return f;
  }
};

TEST_P(EncodeOptions, EqualsTheOracle) {
  for (const ScaleType type : kScaleTypes) {
    for (const int64_t bits : kBitWidths) {
      for (int64_t i = 0; i < 64; i++) {
        // Every option with every width and type; sizes and element types take turns.
        const int64_t dims[] = {64, 128, 80, 96, 17}, groups[] = {32, 64, 16, 128};
        const int64_t dim = dims[(i + bits) % 5], group = groups[(i / 3 + bits) % 4];
        Format f = with_options(make_format(1, dim, dim, bits, bits, group), i);
        f.scale_type = type;
        check_options(Tokens(f, kElements[(i + bits) % 3], static_cast<uint32_t>(i + bits)));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(EncodeOptions, GroupsOfValues) {
  for (const int64_t group : kGroupSizes) {
    for (const int64_t dim : {1, 48, 128, 192, 576}) {
      for (int64_t size = 0; size <= std::min<int64_t>(round_up(dim, group), 512); size += group) {
        Format f = make_format(1, 16, dim, 2, 3, group);
        f.v_group_size = size;
        f.scale_type = ScaleType::kFloat8;
        check_options(Tokens(f, Element::kFloat16, 5));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Channels of K in classes of different widths, in any order.
TEST_P(EncodeOptions, ClassesOfKeys) {
  const std::vector<std::vector<KeyClass>> lists = {
      {{16, 4}, {48, 2}},  {{16, 4}, {32, 3}, {16, 2}},
      {{16, 8}, {64, 1}},  {{32, 3}, {16, 4}, {32, 2}},
      {{16, 4}, {4, 2}},   {{16, 4}, {16, 2}},
      {{64, 4}, {192, 2}}, {{48, 2}, {16, 3}},
      {{112, 2}, {16, 1}}, {{32, 1}, {32, 3}, {16, 8}, {17, 4}},
  };
  for (const auto& list : lists) {
    for (const int64_t group : kGroupSizes) {
      for (const Element type : kElements) {
        int64_t dim = 0, widest = 0;
        for (const KeyClass& k : list) dim += k.channels, widest = std::max(widest, k.bits);
        Format f = make_format(1, dim, 32, widest, 2, group);
        for (const KeyClass& k : list) f.key_classes[f.num_key_classes++] = k;
        f.scale_type = group == 32 ? ScaleType::kFloat8 : ScaleType::kFloat16;
        f.k_bias_correction = group == 64;
        int64_t value = 0;
        ASSERT_EQ(format_error(f, &value), nullptr) << value;
        Tokens x(f, type, static_cast<uint32_t>(dim));
        Random random(static_cast<uint32_t>(group));
        for (int64_t i = 0; i < dim; i++) x.k_order.push_back(static_cast<int16_t>(i));
        for (int64_t i = dim - 1; i > 0; i--)
          std::swap(x.k_order[static_cast<size_t>(i)], x.k_order[static_cast<size_t>(random.below(i + 1))]);
        check(x);
        if (HasFatalFailure()) return;
        if (type == Element::kFloat16) continue;
        // A class whose scales do not fit, wherever it stands.
        int64_t first = 0;
        for (const KeyClass& k : list) {
          Tokens beyond = x;
          beyond.set_k(0, x.k_order[static_cast<size_t>(first)], 1e30f);
          check(beyond);
          if (HasFatalFailure()) return;
          first += k.channels;
        }
      }
    }
  }
}

// Groups of zeros, of one number, of NaN and Inf, of numbers at both ends of every type.
TEST_P(EncodeOptions, HardGroups) {
  const float hard[] = {0.0f,      -0.0f, 1.0f,  -3.0f,  1e-7f, -2e-6f, 65504.0f,
                        -65504.0f, 1e6f,  3e38f, -3e38f, kNaN,  kInf,   -kInf};
  for (const ScaleType type : kScaleTypes) {
    for (const int64_t bits : kBitWidths) {
      for (int64_t i = bits % 4; i < 64; i += 5) {
        Format f = with_options(make_format(1, 64, 64, bits, bits, 32), i);
        f.scale_type = type;
        for (size_t a = 0; a < std::size(hard); a++) {
          Tokens x(f, Element::kFloat32, 3);
          for (int64_t t = 0; t < 32; t++)
            x.set_k(t, 5, hard[a]), x.set_k(t, 6, t % 2 == 0 ? hard[a] : hard[(a + 5) % std::size(hard)]);
          for (int64_t d = 0; d < 32; d++) {
            x.set_v(3, d, hard[a]);
            x.set_v(4, d, d % 2 == 0 ? hard[a] : hard[(a + 3) % std::size(hard)]);
          }
          // A rotated row of NaN or of overflowing sums is compared as numbers (NaN payloads differ between CPUs).
          check_options(x);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// What a rotation does, against its definition in double; and that it comes back.
TEST_P(EncodeOptions, RotationIsItsDefinition) {
  for (const int64_t dim : {1, 2, 8, 12, 16, 48, 64, 80, 96, 128, 192, 256, 576}) {
    Format f = make_format(1, 16, dim, 2, 8, 32);
    f.v_rotated = true;
    f.scale_type = ScaleType::kFloat32;
    Tokens x(f, Element::kFloat32, 11);
    Record record(record_layout(f).bytes);
    ASSERT_TRUE(encode(x, &record));
    const auto values = decode(f, record, Element::kFloat32, 0, 32);
    f.v_rotated = false;  // the record as it stands
    const auto inside = decode(f, record, Element::kFloat32, 0, 32);
    for (int64_t t = 0; t < 32; t++) {
      std::vector<double> row;
      for (int64_t d = 0; d < dim; d++) row.push_back(static_cast<double>(x.v.get(t * x.v_stride + d)));
      const std::vector<double> want = oracle::rotated(row, false);
      for (int64_t d = 0; d < dim; d++) {
        const auto i = static_cast<size_t>(d);
        EXPECT_NEAR(static_cast<double>(inside.second.get(t * dim + d)), want[i], 0.03) << dim << " " << t << " " << d;
        EXPECT_NEAR(static_cast<double>(values.second.get(t * dim + d)), row[i], 0.05) << dim << " " << t << " " << d;
      }
    }
  }
}

double mean_error(const Tokens& x, const Array& v) {
  double sum = 0;
  const int64_t dim = x.f.value_head_dim;
  for (int64_t t = 0; t < x.f.group_size; t++) {
    for (int64_t d = 0; d < dim; d++)
      sum += std::pow(static_cast<double>(v.get(t * dim + d) - x.v.get(t * x.v_stride + d)), 2);
  }
  return sum / static_cast<double>(x.f.group_size * dim);
}

// What the options are for: less error where they promise it, for the same bits.
TEST_P(EncodeOptions, WhatTheyAreFor) {
  Format f = make_format(1, 64, 64, 2, 2, 32);
  f.scale_type = ScaleType::kFloat8;
  const auto error_of = [&](const Format& format, bool outliers) {
    Tokens x(format, Element::kFloat32, 17);
    for (int64_t t = 0; outliers && t < 32; t++) x.set_v(t, 7, 12.0f + x.v.get(t * x.v_stride + 7));
    Record record(record_layout(format).bytes);
    EXPECT_TRUE(encode(x, &record));
    return mean_error(x, decode(format, record, Element::kFloat32, 0, 32).second);
  };
  Format half = f, rotated = f, searched = f;
  half.scale_type = ScaleType::kFloat16;
  EXPECT_LT(error_of(f, false), 1.03 * error_of(half, false));  // a byte is as good as two
  rotated.v_rotated = true;
  EXPECT_LT(error_of(rotated, true), 0.5 * error_of(f, true));  // an outlier is spread over the row
  searched.v_search = kWideSearch;
  EXPECT_LT(error_of(searched, false), 0.9 * error_of(f, false));

  // The gain correction gives slope 1, the bias correction the mean of the group.
  Format corrected = f;
  corrected.scale_type = ScaleType::kFloat32;
  corrected.k_bias_correction = corrected.v_gain_correction = true;
  Tokens x(corrected, Element::kFloat32, 23);
  Record record(record_layout(corrected).bytes);
  ASSERT_TRUE(encode(x, &record));
  const auto back = decode(corrected, record, Element::kFloat32, 0, 32);
  for (int64_t d = 0; d < 64; d++) {
    double error = 0;
    for (int64_t t = 0; t < 32; t++)
      error += static_cast<double>(back.first.get(t * 64 + d) - x.k.get(t * x.k_stride + d));
    EXPECT_NEAR(error / 32, 0, 1e-5) << d;
  }
  for (int64_t t = 0; t < 32; t++) {
    for (int64_t first = 0; first < 64; first += 32) {
      double mx = 0, my = 0, xy = 0, xx = 0;
      for (int64_t d = first; d < first + 32; d++) {
        mx += static_cast<double>(x.v.get(t * x.v_stride + d)) / 32,
            my += static_cast<double>(back.second.get(t * 64 + d)) / 32;
      }
      for (int64_t d = first; d < first + 32; d++) {
        const double dx = static_cast<double>(x.v.get(t * x.v_stride + d)) - mx;
        xy += dx * (static_cast<double>(back.second.get(t * 64 + d)) - my), xx += dx * dx;
      }
      EXPECT_NEAR(xy / xx, 1, 1e-4) << t;
      EXPECT_NEAR(mx, my, 1e-5) << t;
    }
  }
}

// A group that a byte cannot hold is reported; widened, every other group keeps its bits.
TEST_P(EncodeOptions, RangesBeyondFloat8) {
  Format f = make_format(1, 64, 64, 2, 2, 32);
  f.scale_type = ScaleType::kFloat8;
  f.k_search = kNarrowSearch;
  Tokens x(f, Element::kFloat32, 29);
  for (int64_t t = 0; t < 32; t++) x.set_k(t, 9, static_cast<float>(t) * 1e5f);
  Record record(record_layout(f).bytes);
  EXPECT_FALSE(encode(x, &record));
  x.f.scale_type = ScaleType::kWidened8;
  check_options(x);
  Record wide(record_layout(x.f).bytes), narrow(record_layout(f).bytes);
  ASSERT_TRUE(encode(x, &wide));
  const auto values = decode(x.f, wide, Element::kFloat32, 0, 32);
  for (int64_t t = 0; t < 32; t++) EXPECT_NEAR(values.first.get(t * 64 + 9), static_cast<float>(t) * 1e5f, 6e5f);
  for (int64_t t = 0; t < 32; t++) x.set_k(t, 9, 1.0f);
  x.f.scale_type = ScaleType::kFloat8;
  ASSERT_TRUE(encode(x, &narrow));
  const auto want = decode(x.f, narrow, Element::kFloat32, 0, 32);
  for (int64_t t = 0; t < 32; t++) {
    for (int64_t d = 0; d < 64; d++) {
      if (d != 9) EXPECT_EQ(values.first.get(t * 64 + d), want.first.get(t * 64 + d)) << t << " " << d;
    }
  }
}

// Found by fuzzing: the last vector of codes of an odd number of lines reached behind records with short scales, that
// of keys behind those with short values. Here the record ends where the process may not read on.
TEST_P(EncodeOptions, DecodeReadsNothingBehindTheRecord) {
  const int64_t page = sysconf(_SC_PAGESIZE), room = 512 * 1024 / page * page;
  void* const memory =
      mmap(nullptr, static_cast<size_t>(room + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  uint8_t* const end = static_cast<uint8_t*>(memory) + room;
  ASSERT_EQ(mprotect(end, static_cast<size_t>(page), PROT_NONE), 0);
  for (const ScaleType type : kScaleTypes) {
    for (const int64_t bits : kBitWidths) {
      for (const int64_t dim : {1, 16, 17, 40, 48, 80}) {
        for (const int64_t group : kGroupSizes) {
          for (int64_t i = 0; i < 32; i += 4) {  // symmetric, rotated, one group of V
            const bool short_values = i % 8 == 4;
            Format f =
                with_options(make_format(1, dim, short_values ? 1 : dim, bits, short_values ? 1 : bits, group), i);
            f.scale_type = type;
            const RecordLayout layout = record_layout(f);
            ASSERT_LE(layout.bytes, room);
            for (const Element element : kElements) {
              Array rows(element, 2 * group * dim);
              DecodeParams p{&f, &layout, end - layout.bytes, 0, group, rows.data(), nullptr, dim, dim, element};
              kernels().decode(p);
              p.k = nullptr, p.v = rows.data();
              kernels().decode(p);
            }
          }
        }
      }
    }
  }
  munmap(memory, static_cast<size_t>(room + page));
}

KIVI_TEST_EVERY_ISA(EncodeOptions);

}  // namespace
}  // namespace kivi::cpu
