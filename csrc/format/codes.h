// Where a code is: in the 32-bit words of a record (kivi/format.h) and in the dense bit string of quantize. One code at
// a time; this is what the fast paths are checked against.
#pragma once

#include <cstdint>
#include <cstring>

#include "format/host_device.h"
#include "kivi/format.h"

namespace kivi {

// A code's place in one plane: byte offset of its word in the record, and its bit there.
struct CodePlace {
  int64_t word;
  int bit;
};

KIVI_HOST_DEVICE inline CodePlace k_code_place(const RecordLayout& layout, int64_t bits, int plane, int64_t token,
                                               int64_t channel) {
  const int64_t width = plane_bits(bits, plane);
  const int64_t per_word = codes_per_word(width);
  const int64_t line = token / kLineLanes * layout.k_words[plane] + channel / per_word;
  return {layout.k_codes[plane] + line * kLineBytes + token % kLineLanes * 4, code_bit(width, channel % per_word)};
}

KIVI_HOST_DEVICE inline CodePlace v_code_place(const RecordLayout& layout, int64_t bits, int plane, int64_t token,
                                               int64_t channel) {
  const int64_t width = plane_bits(bits, plane);
  const int64_t per_word = codes_per_word(width);
  const int64_t line = token / per_word * (layout.v_channels / kLineLanes) + channel / kLineLanes;
  return {layout.v_codes[plane] + line * kLineBytes + channel % kLineLanes * 4, code_bit(width, token % per_word)};
}

// Words are little-endian on every machine.
KIVI_HOST_DEVICE inline uint32_t load_word(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
         static_cast<uint32_t>(p[3]) << 24;
}

KIVI_HOST_DEVICE inline void store_word(uint8_t* p, uint32_t word) {
  for (int i = 0; i < 4; i++) p[i] = static_cast<uint8_t>(word >> (8 * i));
}

enum class Side : uint8_t { kKey, kValue };

KIVI_HOST_DEVICE inline CodePlace code_place(Side side, const RecordLayout& layout, int64_t bits, int plane,
                                             int64_t token, int64_t channel) {
  return side == Side::kKey ? k_code_place(layout, bits, plane, token, channel)
                            : v_code_place(layout, bits, plane, token, channel);
}

KIVI_HOST_DEVICE inline uint32_t load_code(Side side, const RecordLayout& layout, int64_t bits, const uint8_t* record,
                                           int64_t token, int64_t channel) {
  uint32_t code = 0;
  for (int plane = 0; plane < num_planes(bits); plane++) {
    const CodePlace at = code_place(side, layout, bits, plane, token, channel);
    const uint32_t mask = (1u << plane_bits(bits, plane)) - 1u;
    code += (load_word(record + at.word) >> at.bit & mask) * static_cast<uint32_t>(plane_weight(plane));
  }
  return code;
}

// Writes a code where zero bits stand.
KIVI_HOST_DEVICE inline void add_code(Side side, const RecordLayout& layout, int64_t bits, uint8_t* record,
                                      int64_t token, int64_t channel, uint32_t code) {
  for (int plane = 0; plane < num_planes(bits); plane++) {
    const CodePlace at = code_place(side, layout, bits, plane, token, channel);
    const uint32_t mask = (1u << plane_bits(bits, plane)) - 1u;
    const uint32_t part = code / static_cast<uint32_t>(plane_weight(plane)) & mask;
    store_word(record + at.word, load_word(record + at.word) | part << at.bit);
  }
}

// Bytes of a dense string of n codes.
constexpr int64_t dense_bytes(int64_t n, int64_t bits) { return ceil_div(n * bits, 8); }

// Code i of a dense string whose bytes are `stride` apart. A 3-bit code may lie in two bytes.
KIVI_HOST_DEVICE inline uint32_t load_dense_code(const uint8_t* codes, int64_t stride, int64_t bits, int64_t i) {
  const int64_t first = i * bits;
  const int64_t byte = first / 8;
  uint32_t pair = codes[byte * stride];
  if (first % 8 + bits > 8) pair |= static_cast<uint32_t>(codes[(byte + 1) * stride]) << 8;
  return pair >> (first % 8) & ((1u << bits) - 1u);
}

// Writes a code where zero bits stand.
KIVI_HOST_DEVICE inline void add_dense_code(uint8_t* codes, int64_t stride, int64_t bits, int64_t i, uint32_t code) {
  const int64_t first = i * bits;
  const int64_t byte = first / 8;
  const uint32_t pair = code << (first % 8);
  codes[byte * stride] = static_cast<uint8_t>(codes[byte * stride] | pair);
  if (first % 8 + bits > 8) {
    codes[(byte + 1) * stride] = static_cast<uint8_t>(codes[(byte + 1) * stride] | pair >> 8);
  }
}

}  // namespace kivi
