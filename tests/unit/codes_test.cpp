// Packing: dense bit strings and the words of a record give back what went in, and the published words come out.
#include "format/codes.h"

#include <gtest/gtest.h>

#include <vector>

#include "test_data.h"

namespace kivi::cpu {
namespace {

std::vector<uint8_t> pack(const std::vector<uint32_t>& codes, int64_t bits) {
  std::vector<uint8_t> bytes(static_cast<size_t>(dense_bytes(static_cast<int64_t>(codes.size()), bits)), 0);
  for (size_t i = 0; i < codes.size(); i++) add_dense_code(bytes.data(), 1, bits, static_cast<int64_t>(i), codes[i]);
  return bytes;
}

TEST(CodesTest, GoldenDenseWords) {
  const std::vector<uint8_t> two = pack({0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}, 2);
  EXPECT_EQ(load_word(two.data()), 0xE4E4E4E4u);
  const std::vector<uint8_t> four = pack({0, 1, 2, 3, 4, 5, 6, 7}, 4);
  EXPECT_EQ(load_word(four.data()), 0x76543210u);
  const std::vector<uint8_t> three =
      pack({0, 1, 2, 3, 4, 5, 6, 7}, 3);  // the bit string 000 001 010 011 ... from the low end
  EXPECT_EQ(three, (std::vector<uint8_t>{0x88, 0xC6, 0xFA}));
  EXPECT_EQ(pack({1, 0, 1, 1, 0, 0, 0, 0, 1}, 1), (std::vector<uint8_t>{0x0D, 0x01}));
}

// The string from its definition: bit i * bits + b is bit b of code i.
TEST(CodesTest, DenseStringOfAnyLength) {
  for (const int64_t bits : kBitWidths) {
    for (int64_t n = 1; n <= 130; n++) {
      std::vector<uint32_t> codes;
      for (int64_t i = 0; i < n; i++) codes.push_back(static_cast<uint32_t>((i * 7 + 3) % (1 << bits)));
      const std::vector<uint8_t> bytes = pack(codes, bits);
      ASSERT_EQ(static_cast<int64_t>(bytes.size()), (n * bits + 7) / 8);
      for (int64_t i = 0; i < n; i++) {
        EXPECT_EQ(load_dense_code(bytes.data(), 1, bits, i), codes[static_cast<size_t>(i)]);
        for (int64_t b = 0; b < bits; b++) {
          const int64_t at = i * bits + b;
          EXPECT_EQ(bytes[static_cast<size_t>(at / 8)] >> (at % 8) & 1,
                    static_cast<int>(codes[static_cast<size_t>(i)] >> b & 1));
        }
      }
      const int64_t unused = static_cast<int64_t>(bytes.size()) * 8 - n * bits;
      EXPECT_EQ(bytes.back() >> (8 - unused), 0);
    }
  }
}

TEST(CodesTest, DenseOneHot) {
  for (const int64_t bits : kBitWidths) {
    const auto top = static_cast<uint32_t>((1 << bits) - 1);
    for (const int64_t n : {1, 7, 8, 9, 80, 130}) {
      for (int64_t hot = 0; hot < n; hot++) {
        std::vector<uint32_t> codes(static_cast<size_t>(n), 0);
        codes[static_cast<size_t>(hot)] = top;
        const std::vector<uint8_t> bytes = pack(codes, bits);
        for (int64_t i = 0; i < n; i++) EXPECT_EQ(load_dense_code(bytes.data(), 1, bits, i), i == hot ? top : 0);
      }
    }
  }
}

TEST(CodesTest, EveryCodeOfARecord) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t group : kGroupSizes) {
      for (const int64_t dim : {1, 16, 40, 80}) {
        const Format f = make_format(1, dim, dim, bits, bits, group);
        const RecordLayout layout = record_layout(f);
        for (const Side side : {Side::kKey, Side::kValue}) {
          std::vector<uint8_t> record(static_cast<size_t>(layout.bytes), 0);
          const auto code_of = [&](int64_t t, int64_t d) {
            return static_cast<uint32_t>((t * 5 + d * 3 + t * d) % (1 << bits));
          };
          for (int64_t t = 0; t < group; t++) {
            for (int64_t d = 0; d < dim; d++) add_code(side, layout, bits, record.data(), t, d, code_of(t, d));
          }
          for (int64_t t = 0; t < group; t++) {
            for (int64_t d = 0; d < dim; d++) {
              ASSERT_EQ(load_code(side, layout, bits, record.data(), t, d), code_of(t, d))
                  << bits << " " << group << " " << dim;
            }
          }
        }
      }
    }
  }
}

// Element e of a word at bit B (e / 2) + 16 (e % 2): neighbours at the same place of the two halves.
TEST(CodesTest, WordsOfARecord) {
  const Format f = make_format(1, 16, 16, 2, 4, 16);
  const RecordLayout layout = record_layout(f);
  std::vector<uint8_t> record(static_cast<size_t>(layout.bytes), 0);
  for (int64_t d = 0; d < 16; d++) add_code(Side::kKey, layout, 2, record.data(), 3, d, static_cast<uint32_t>(d % 4));
  // Channels 0, 2, 4, ... hold 0, 2, 0, 2, ... in the low half, 1, 3, 5, ... hold 1, 3, 1, 3, ... in the high half.
  EXPECT_EQ(load_word(record.data() + 3 * 4), 0xDDDD8888u);
  for (int64_t t = 0; t < 8; t++) add_code(Side::kValue, layout, 4, record.data(), t, 5, static_cast<uint32_t>(t));
  EXPECT_EQ(load_word(record.data() + layout.v_codes[0] + 5 * 4), 0x75316420u);
}

}  // namespace
}  // namespace kivi::cpu
