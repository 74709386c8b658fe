// Encoding and decoding of records on every instruction set: equal to the bit to an oracle written from the definition,
// for every pair of bit widths, group size, head size and element type; and the rules for constants, the ends of
// float16, NaN, Inf and subnormals.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "encode_case.h"

namespace kivi::cpu {
namespace {

// wild: NaN, Inf and the ends of the types among the scales and zeros.
void fill_with_any_codes(const Format& f, Random& random, bool wild, Record* record) {
  const RecordLayout layout = record_layout(f);
  const bool half = layout.scale_bytes == 2;
  const float wild_values[] = {kNaN, kInf, -kInf, 65504.0f, -65504.0f, half ? 6e-8f : 1e-40f, half ? 60000.0f : 3e38f};
  for (int64_t i = 0; i < layout.bytes; i++) record->data()[i] = static_cast<uint8_t>(random.below(256));
  const int64_t sections[][2] = {{layout.k_scale, layout.k_channels},
                                 {layout.k_zero, layout.k_channels},
                                 {layout.v_scale, layout.v_groups * f.group_size},
                                 {layout.v_zero, layout.v_groups * f.group_size}};
  for (const auto& section : sections) {
    for (int64_t i = 0; i < section[1]; i++) {
      const float x = wild && random.below(4) == 0 ? wild_values[random.below(7)] : random.normal();
      store_element(record->data() + section[0], half ? Element::kFloat16 : Element::kFloat32, i, x);
    }
  }
}

constexpr int64_t kHeadDims[] = {1, 8, 48, 64, 80, 96, 128, 192, 256, 576};

TEST_P(Encode, EqualsTheOracle) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      for (const int64_t group : kGroupSizes) {
        for (const int64_t dim : kHeadDims) {
          for (const Element type : kElements) {
            // All 25 pairs up to 128 channels; beyond, K and V are still met in every width.
            if (dim > 128 && (k_bits + v_bits) % 5 != 0) continue;
            const Format f = make_format(1, dim, dim, k_bits, v_bits, group);
            check(Tokens(f, type, static_cast<uint32_t>(dim + 7 * k_bits + v_bits)), dim <= 128);
          }
        }
      }
    }
  }
}

TEST_P(Encode, HeadSizesOfKAndVDiffer) {
  const int64_t sizes[][2] = {{192, 128}, {576, 512}, {96, 64}, {17, 33}, {1, 100}, {1024, 3}};
  for (const auto& size : sizes) {
    for (const int64_t group : kGroupSizes) {
      check(Tokens(make_format(1, size[0], size[1], 2, 4, group), Element::kFloat32, 3));
    }
  }
}

TEST_P(Encode, ScaleTypesAndRangeSearch) {
  for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened}) {
    for (const bool search : {false, true}) {
      for (const int64_t bits : kBitWidths) {
        for (const int64_t group : kGroupSizes) {
          for (const int64_t dim : {1, 48, 80, 128}) {
            for (const Element element : kElements) {
              Format f = make_format(1, dim, dim, bits, bits, group);
              f.scale_type = type;
              f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
              check(Tokens(f, element, static_cast<uint32_t>(bits + group)));
            }
          }
        }
      }
    }
  }
}

TEST_P(Encode, RangeSearchNeverLoses) {
  Format f = make_format(1, 64, 64, 2, 2, 32);
  const Tokens plain(f, Element::kFloat32, 5);
  f.k_search = f.v_search = kNarrowSearch;
  const Tokens searched(f, Element::kFloat32, 5);
  double errors[2] = {};
  for (int i = 0; i < 2; i++) {
    const Tokens& x = i == 0 ? plain : searched;
    Record record(record_layout(x.f).bytes);
    ASSERT_TRUE(encode(x, &record));
    const auto values = decode(x.f, record, Element::kFloat32, 0, 32);
    for (int64_t t = 0; t < 32; t++) {
      for (int64_t d = 0; d < 64; d++)
        errors[i] += std::pow(values.second.get(t * 64 + d) - x.v.get(t * x.v_stride + d), 2);
    }
  }
  EXPECT_LT(errors[1], 0.98 * errors[0]);
}

// Where no error is smaller than another (here all overflow) the plain range is kept.
TEST_P(Encode, RangeSearchKeepsTheFirstOfATie) {
  for (const int64_t bits : kBitWidths) {
    Format f = make_format(1, 48, 48, bits, bits, 32);
    f.k_search = f.v_search = kNarrowSearch;
    f.scale_type = ScaleType::kFloat32;
    Tokens x(f, Element::kFloat32, 5);
    for (int64_t t = 0; t < 32; t++) {
      for (int64_t d = 0; d < 48; d++) x.set_k(t, d, 1e30f * x.k.get(t * x.k_stride + d));
      for (int64_t d = 0; d < 48; d++) x.set_v(t, d, 1e30f * x.v.get(t * x.v_stride + d));
    }
    check(x);
    Record searched(record_layout(f).bytes), plain(record_layout(f).bytes);
    encode(x, &searched);
    x.f.k_search = x.f.v_search = RangeSearch();
    encode(x, &plain);
    EXPECT_EQ(searched.copy(), plain.copy());
  }
}

// Equal data give equal bytes, whatever stood in the record before.
TEST_P(Encode, EveryByteIsWritten) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t dim : {1, 17, 80, 128}) {
      for (const int64_t group : kGroupSizes) {
        const Format f = make_format(1, dim, dim, bits, bits, group);
        const Tokens x(f, Element::kFloat32, 1);
        Record a(record_layout(f).bytes, 0x00), b(record_layout(f).bytes, 0xFF);
        encode(x, &a);
        encode(x, &b);
        EXPECT_EQ(a.copy(), b.copy());
      }
    }
  }
}

TEST_P(Encode, SomeTokensOfARecord) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t group : kGroupSizes) {
      const Format f = make_format(1, 80, 48, bits, bits, group);
      const Tokens x(f, Element::kFloat32, 9);
      Record record(record_layout(f).bytes);
      ASSERT_TRUE(encode(x, &record));
      for (const Element type : kElements) {
        const auto all = decode(f, record, type, 0, group);
        for (const auto& part : {std::pair<int64_t, int64_t>{0, 1}, {3, 7}, {group - 1, 1}, {5, group - 5}, {2, 0}}) {
          const auto some = decode(f, record, type, part.first, part.second);
          for (int64_t i = 0; i < some.first.size(); i++)
            EXPECT_EQ(some.first.get(i), all.first.get(part.first * 80 + i));
          for (int64_t i = 0; i < some.second.size(); i++)
            EXPECT_EQ(some.second.get(i), all.second.get(part.first * 48 + i));
        }
      }
    }
  }
}

// Only K or only V, rows at a distance: nothing between the rows is written.
TEST_P(Encode, DecodeTouchesItsRowsOnly) {
  const Format f = make_format(1, 40, 24, 2, 2, 16);
  const RecordLayout layout = record_layout(f);
  const Tokens x(f, Element::kFloat32, 2);
  Record record(layout.bytes);
  ASSERT_TRUE(encode(x, &record));
  for (const Element type : kElements) {
    for (const bool keys : {true, false}) {
      const int64_t dim = keys ? 40 : 24, stride = 51;
      Array rows(type, 16 * stride);
      DecodeParams p{&f, &layout, record.data(), 0, 16, nullptr, nullptr, stride, stride, type};
      (keys ? p.k : p.v) = rows.data();
      kernels().decode(p);
      for (int64_t i = 0; i < rows.size(); i++) EXPECT_EQ(std::isnan(rows.get(i)), i % stride >= dim) << i;
    }
  }
}

// Scales and zeros as encode never stores them, codes at random: decode gives what the scalar kernel gives, to the bit
// (NaN for NaN), for any number of channels, any tokens, and rows on a line or anywhere, and writes nothing else.
TEST_P(Encode, DecodeEqualsTheScalarKernel) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t group : kGroupSizes) {
      for (const int64_t dim : {1, 15, 16, 17, 31, 32, 33, 48, 64, 80, 100, 128, 240, 1024}) {
        if (dim > 128 && group != 16 && group != 32) continue;
        for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kFloat32}) {
          Format f = make_format(1, dim, dim, bits, bits, group);
          f.scale_type = type;
          Random random(static_cast<uint32_t>(dim + bits));
          for (const bool wild : {false, true}) {
            Record record(record_layout(f).bytes);
            fill_with_any_codes(f, random, wild, &record);
            for (const Element element : kElements) {
              const int64_t first = random.below(group), count = 1 + random.below(group - first);
              for (const int64_t offset : {0, 1}) {  // elements, of the first row from a line
                for (const bool stream : {false, true}) {
                  check_against_scalar(f, record, element, first, count, offset, stream);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Case C01: constants come back exactly, with code 0 and scale 0.
TEST_P(Encode, ConstantGroups) {
  for (const Element type : kElements) {
    for (const int64_t bits : kBitWidths) {
      for (const float constant : {100.0f, -9.0f, 0.0f, -0.0f, 0.01f}) {
        for (const bool both_zeros : {false, true}) {
          Format f = make_format(1, 64, 64, bits, bits, 32);
          f.scale_type = constant == 0.01f ? ScaleType::kFloat32 : ScaleType::kFloat16;
          Tokens x(f, type, 1);
          for (int64_t t = 0; t < 32; t++) {
            for (int64_t d = 0; d < 64; d++) {
              const float value = both_zeros && constant == 0 && (t + d) % 2 == 1 ? -constant : constant;
              x.set_k(t, d, value), x.set_v(t, d, value);
            }
          }
          check(x);
          Record record(record_layout(f).bytes);
          ASSERT_TRUE(encode(x, &record));
          const auto values = decode(f, record, type, 0, 32);
          for (int64_t i = 0; i < 32 * 64; i++) {
            EXPECT_EQ(values.first.get(i), x.k.get(0));
            EXPECT_EQ(values.second.get(i), x.v.get(0));
          }
          const RecordLayout layout = record_layout(f);
          for (int64_t i = 0; i < 64 * layout.scale_bytes; i++) EXPECT_EQ(record.data()[layout.k_scale + i], 0);
        }
      }
    }
  }
}

// A group of one short pattern, repeated: by channels for K, by tokens for V.
Tokens pattern(const Format& f, Element type, const std::vector<float>& x) {
  Tokens tokens(f, type, 1);
  for (int64_t t = 0; t < f.group_size; t++) {
    for (int64_t d = 0; d < f.head_dim; d++) tokens.set_k(t, d, x[static_cast<size_t>(t) % x.size()]);
    for (int64_t d = 0; d < f.value_head_dim; d++) tokens.set_v(t, d, x[static_cast<size_t>(d) % x.size()]);
  }
  return tokens;
}

struct RangeCase {
  std::vector<float> x;
  int64_t bits;
  Element type;
  float limit;  // of the error
};

// Cases C02 to C04: small spreads, large offsets, the ends of float16, subnormals. Every one is finite and within its
// limit.
TEST_P(Encode, HardRanges) {
  std::vector<float> c03b, c03d;
  for (int i = 0; i < 32; i++)
    c03b.push_back(512 + 0.5f * static_cast<float>(i)), c03d.push_back(-1000.5f - 0.5f * static_cast<float>(i));
  const float tiny = std::ldexp(1.0f, -24);
  const std::vector<RangeCase> cases = {
      {{1, 1, 1, 1.0009765625f}, 8, Element::kFloat16, 1e-6f},
      {{0, 0, 0, tiny}, 8, Element::kFloat16, tiny},
      {{-60000, 60000}, 2, Element::kFloat16, 0},
      {{-65504, 65504}, 2, Element::kFloat16, 32},
      {{-65504, 65504}, 3, Element::kFloat16, 32},
      {{-65504, 65504}, 4, Element::kFloat16, 32},
      {{-65504, 65504}, 8, Element::kFloat16, 62},
      {{1000, 1000.5f, 1001}, 8, Element::kFloat16, 0.002f},
      {c03b, 4, Element::kFloat16, 0.77f},
      {{300, 302, 304, 306}, 2, Element::kBFloat16, 0},
      {c03d, 4, Element::kFloat16, 0.77f},
      {{5, 7}, 1, Element::kFloat16, 0},
      {{5, 7}, 1, Element::kFloat32, 0},
  };
  for (const RangeCase& c : cases) {
    for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kFloat32}) {
      Format f = make_format(1, 32, 32, c.bits, c.bits, 32);
      f.scale_type = type;
      const Tokens x = pattern(f, c.type, c.x);
      check(x);
      Record record(record_layout(f).bytes);
      ASSERT_TRUE(encode(x, &record));
      const auto values = decode(f, record, c.type, 0, 32);
      for (int64_t t = 0; t < 32; t++) {
        for (int64_t d = 0; d < 32; d++) {
          EXPECT_LE(std::fabs(values.first.get(t * 32 + d) - x.k.get(t * x.k_stride + d)), c.limit)
              << c.x[0] << " bits " << c.bits;
          EXPECT_LE(std::fabs(values.second.get(t * 32 + d) - x.v.get(t * x.v_stride + d)), c.limit)
              << c.x[0] << " bits " << c.bits;
        }
      }
    }
  }
}

// Case C02 c: what float16 cannot store is said, and float32 or widened storage holds it.
TEST_P(Encode, RangesBeyondFloat16) {
  const std::vector<std::pair<std::vector<float>, int64_t>> cases = {
      {{-60000, 60000}, 1}, {{70000, 70001}, 2}, {{-1e30f, 1e30f}, 4}, {{-65520, 0}, 8}, {{65519, 65519}, 2}};
  for (const auto& c : cases) {
    const bool fits = c.first[0] == 65519;
    for (const bool search : {false, true}) {
      for (const Element element : {Element::kFloat32, Element::kBFloat16}) {
        Format f = make_format(1, 48, 48, c.second, c.second, 32);
        f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
        Tokens x = pattern(f, element, c.first);
        Record record(record_layout(f).bytes);
        if (element == Element::kFloat32) {
          EXPECT_EQ(encode(x, &record), fits);
        }
        check(x);
        for (const ScaleType type : {ScaleType::kFloat32, ScaleType::kWidened}) {
          x.f.scale_type = type;
          check(x);
          Record wide(record_layout(x.f).bytes);
          ASSERT_TRUE(encode(x, &wide));
          const auto values = decode(x.f, wide, Element::kFloat32, 0, 32);
          for (int64_t i = 0; i < values.first.size(); i++) ASSERT_TRUE(std::isfinite(values.first.get(i)));
        }
      }
    }
  }
}

// A widened cache has the codes of the float16 one, in every group that fits float16.
TEST_P(Encode, WideningChangesNoCode) {
  for (const bool search : {false, true}) {
    Format f = make_format(1, 64, 64, 2, 2, 32);
    f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
    Tokens x(f, Element::kFloat32, 4);
    for (int64_t t = 0; t < 32; t++)
      x.set_k(t, 3, 65510.0f + 40.0f * static_cast<float>(t));  // fits, but not when shrunk
    Record narrow(record_layout(f).bytes);
    ASSERT_TRUE(encode(x, &narrow));
    const auto before = decode(f, narrow, Element::kFloat32, 0, 32);
    x.f.scale_type = ScaleType::kWidened;
    Record wide(record_layout(x.f).bytes);
    ASSERT_TRUE(encode(x, &wide));
    const auto after = decode(x.f, wide, Element::kFloat32, 0, 32);
    EXPECT_EQ(before.first.bytes(), after.first.bytes());
    EXPECT_EQ(before.second.bytes(), after.second.bytes());
  }
}

// Case C05: NaN and Inf at every index make their own group NaN and change no other.
TEST_P(Encode, NotFinite) {
  for (const Element type : kElements) {
    for (const int64_t bits : kBitWidths) {
      for (const bool search : {false, true}) {
        Format f = make_format(1, 80, 80, bits, bits, 32);
        f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
        const Tokens clean(f, type, 6);
        Record clean_record(record_layout(f).bytes);
        ASSERT_TRUE(encode(clean, &clean_record));
        const auto clean_values = decode(f, clean_record, Element::kFloat32, 0, 32);
        for (int64_t index = 0; index < 32; index++) {
          for (const int kind : {0, 1, 2, 3}) {
            Tokens x(f, type, 6);
            const float bad = kind == 0 ? kNaN : kind == 2 ? -kInf : kInf;
            const int64_t channel = index % 2 == 0 ? 70 : 5, token = 31 - index;
            x.set_k(index, channel, bad);
            x.set_v(token, 32 + index, bad);
            if (kind == 3) x.set_k((index + 1) % 32, channel, -kInf), x.set_v(token, 32 + (index + 1) % 32, -kInf);
            if (index % 8 == 0) check(x, false);
            Record record(record_layout(f).bytes);
            ASSERT_TRUE(encode(x, &record));
            const auto values = decode(f, record, Element::kFloat32, 0, 32);
            for (int64_t t = 0; t < 32; t++) {
              for (int64_t d = 0; d < 80; d++) {
                const int64_t i = t * 80 + d;
                if (d == channel) {
                  ASSERT_TRUE(std::isnan(values.first.get(i)));
                } else {
                  ASSERT_EQ(values.first.get(i), clean_values.first.get(i));
                }
                if (t == token && d / 32 == 1) {
                  ASSERT_TRUE(std::isnan(values.second.get(i)));
                } else {
                  ASSERT_EQ(values.second.get(i), clean_values.second.get(i));
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(Encode, SpanThatOverflowsIsNotFinite) {
  Format f = make_format(1, 32, 32, 2, 2, 32);
  f.scale_type = ScaleType::kFloat32;
  const Tokens x = pattern(f, Element::kFloat32, {-3e38f, 3e38f});
  check(x);
  Record record(record_layout(f).bytes);
  ASSERT_TRUE(encode(x, &record));
  EXPECT_TRUE(std::isnan(decode(f, record, Element::kFloat32, 0, 32).first.get(0)));
}

// Case C04 a, b: subnormal data.
TEST_P(Encode, Subnormals) {
  Format f = make_format(1, 32, 32, 2, 2, 32);
  f.scale_type = ScaleType::kFloat32;
  const Tokens x = pattern(f, Element::kFloat32, {0, 1e-40f, 2e-40f, 3e-40f});
  check(x);
  Record record(record_layout(f).bytes);
  ASSERT_TRUE(encode(x, &record));
  const auto values = decode(f, record, Element::kFloat32, 0, 32);
  for (int64_t t = 0; t < 32; t++) EXPECT_LE(std::fabs(values.first.get(t * 32) - x.k.get(t * x.k_stride)), 1.5e-45f);
  f.k_bits = f.v_bits = 8;
  check(pattern(f, Element::kFloat32, {0, std::numeric_limits<float>::denorm_min()}));
}

// ... and a thread that treats subnormal numbers as 0: all finite, also with what was stored before.
TEST_P(Encode, FiniteWithSubnormalsFlushed) {
  if (!FlushDenormals::supported) GTEST_SKIP() << "no known switch for subnormals on this machine";
  for (const std::vector<float>& data : {std::vector<float>{0, 1e-40f, 2e-40f, 3e-40f},
                                         {1e-38f, 1.1e-38f, 1.3e-38f},
                                         {0, std::ldexp(1.0f, -24)},
                                         {1, 1.0000001f}}) {
    for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kFloat32}) {
      for (const int64_t bits : kBitWidths) {
        for (const bool search : {false, true}) {
          Format f = make_format(1, 32, 32, bits, bits, 32);
          f.scale_type = type;
          f.k_search = f.v_search = search ? kNarrowSearch : RangeSearch();
          const Tokens x = pattern(f, Element::kFloat32, data);
          Record with(record_layout(f).bytes), without(record_layout(f).bytes);
          ASSERT_TRUE(encode(x, &without));
          const FlushDenormals flush;
          ASSERT_TRUE(encode(x, &with));
          for (const Record* record : {&with, &without}) {
            for (const Element element : kElements) {
              const auto values = decode(f, *record, element, 0, 32);
              for (int64_t i = 0; i < values.first.size(); i++) {
                ASSERT_TRUE(std::isfinite(values.first.get(i)));
                ASSERT_NEAR(values.first.get(i), x.k.get(i / 32 * x.k_stride),
                            element == Element::kBFloat16 ? 0.01f : 1e-6f);
              }
            }
          }
        }
      }
    }
  }
}

// Case C07: a grid that every code meets comes back exactly.
TEST_P(Encode, ExactGrids) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      const Format f = make_format(1, 48, 48, k_bits, v_bits, 16);
      Tokens x(f, Element::kFloat32, 1);
      const auto grid = [](int64_t i, int64_t bits) {
        const int64_t top = (1 << bits) - 1;
        return -3.0f + 0.5f * static_cast<float>(i == 0 ? 0 : i == 1 ? top : (i * 5) % (top + 1));
      };
      for (int64_t t = 0; t < 16; t++) {
        for (int64_t d = 0; d < 48; d++) x.set_k(t, d, grid(t, k_bits)), x.set_v(t, d, grid(d % 16, v_bits));
      }
      Record record(record_layout(f).bytes);
      ASSERT_TRUE(encode(x, &record));
      const auto values = decode(f, record, Element::kFloat32, 0, 16);
      for (int64_t t = 0; t < 16; t++) {
        for (int64_t d = 0; d < 48; d++) {
          EXPECT_EQ(values.first.get(t * 48 + d), x.k.get(t * x.k_stride + d));
          EXPECT_EQ(values.second.get(t * 48 + d), x.v.get(t * x.v_stride + d));
        }
      }
    }
  }
}

// Rows at byte addresses that are no multiple of a vector: element-aligned only.
TEST_P(Encode, UnalignedRows) {
  for (const Element type : kElements) {
    const Format f = make_format(1, 96, 96, 2, 2, 32);
    Tokens x(f, type, 8);
    Array k(type, x.k.size() + 1), v(type, x.v.size() + 1);
    for (int64_t i = 0; i < x.k.size(); i++) k.set(i + 1, x.k.get(i));
    for (int64_t i = 0; i < x.v.size(); i++) v.set(i + 1, x.v.get(i));
    const RecordLayout layout = record_layout(f);
    Record a(layout.bytes), b(layout.bytes);
    ASSERT_TRUE(encode(x, &a));
    EncodeParams p{&f,   &layout, advance(k.data(), type, 1), advance(v.data(), type, 1), x.k_stride, x.v_stride,
                   type, b.data()};
    ASSERT_TRUE(kernels().encode(p));
    EXPECT_EQ(a.copy(), b.copy());
  }
}

KIVI_TEST_EVERY_ISA(Encode);

}  // namespace
}  // namespace kivi::cpu
