// What the generic attention kernel is made of: its sizes and shared memory, a query row, and how codes and other
// numbers come out of memory.
#pragma once

#include <cstdint>

#include "cuda/attention_join.h"
#include "cuda/device.h"
#include "format/keys.h"
#include "format/scales.h"

namespace kivi::cuda::generic {

inline constexpr int kThreads = 128;  // one for each token of a page, or for each channel of eight lines
inline constexpr int kWarps = kThreads / kWarpThreads;
inline constexpr int kUnit = 16;      // channels of a key, or tokens of a channel, that are worked on together
inline constexpr int kChunk = 256;    // channels of K whose scales are in shared memory at once
inline constexpr int kPassLines = 8;  // lines of V channels that are worked on at once
// Of the scales of 128 tokens of V: even, for pairs, and the groups of two half-warps in different banks.
inline constexpr int kValueStride = 130;
inline constexpr int kExactStride = 17;   // of 16 channels of exact tokens, one token a thread: different banks
inline constexpr float kNotSeen = -1.0f;  // a weight that counts for nothing
inline constexpr size_t kSharedLimit = 48 * 1024;  // what every device gives a block
static_assert(kThreads == kPageTokens && kThreads == kPassLines * kLineLanes && kUnit == kLineLanes);

// By value: a reference to a constant of the host does not exist on the device.
KIVI_DEVICE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KIVI_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KIVI_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
KIVI_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// One scale and zero.
struct alignas(8) Numbers {
  float scale, zero;
};

// Sizes that the shared memory follows from.
struct Shape {
  int places;       // channels of K as a record holds them
  int channels;     // of V as a record holds them
  int pass_lines;   // lines of 16 of these at once, a power of two
  int group_shift;  // log2 of the tokens in a group

  KIVI_HOST_DEVICE explicit Shape(const AttentionParams& p)
      : places(static_cast<int>(p.layout.k_channels)), channels(static_cast<int>(p.layout.v_channels)) {
    pass_lines = 1;
    while (pass_lines < lines() && pass_lines < kPassLines) pass_lines *= 2;
    group_shift = 4;
    while (int64_t{1} << group_shift < p.format.group_size) group_shift++;
  }
  KIVI_HOST_DEVICE int lines() const { return channels / kUnit; }
  // Where fewer than 8 lines are worked on, the units of tokens are divided.
  KIVI_HOST_DEVICE int splits() const { return kPassLines / pass_lines; }
  // Places of K whose scales are in shared memory at once.
  KIVI_HOST_DEVICE int chunk() const { return places < kChunk ? places : kChunk; }
  KIVI_HOST_DEVICE int key_numbers() const { return (kThreads >> group_shift) * chunk(); }
  // As many groups of V as the lines of a pass may lie in.
  KIVI_HOST_DEVICE int value_numbers(const AttentionParams& p) const {
    const auto groups = static_cast<int>(p.layout.v_groups);
    return (groups < pass_lines ? groups : pass_lines) * kValueStride;
  }
  // Scales and zeros, or 16 channels of exact tokens and the addresses of their keys and values.
  KIVI_HOST_DEVICE int staged_numbers(const AttentionParams& p) const {
    constexpr int kExact = kThreads * (kExactStride * 4 + 2 * static_cast<int>(sizeof(void*)));
    const int both = key_numbers() + value_numbers(p), exact = kExact / static_cast<int>(sizeof(Numbers));
    return both > exact ? both : exact;
  }
};

// What the rows of a block have in common.
struct Place {
  int64_t batch, kv_head;
  KeyRanges ranges;
  SeenKeys seen;  // by any row
};

// A query row of the block.
struct Row {
  int64_t begin, end;  // the keys that it may see
  int64_t position;
  int64_t mask;  // where its mask starts, in elements
  float slope;   // ALiBi
  bool exists;
  SoftmaxState run, all;  // of the keys of the run so far, and of the runs before
  float factor;           // what the sums of the run are multiplied by before those of the present tokens join them
};

template <int R>
size_t shared_bytes(const AttentionParams& p) {
  const Shape s(p);
  const size_t rows = R;
  const auto piece = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
  return piece(static_cast<size_t>(s.places) * rows * sizeof(float)) +
         piece(static_cast<size_t>(s.splits() * s.channels) * rows * sizeof(float)) +
         piece(kThreads * rows * sizeof(float)) + piece(rows * sizeof(Row)) + piece(sizeof(Place)) +
         piece(static_cast<size_t>(s.staged_numbers(p)) * sizeof(Numbers));
}

// Floats from shared memory, on 16 bytes where there are at least four.
template <int N>
KIVI_DEVICE void load_floats(const float* from, float (&to)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = from[i];
  }
}

// What all query rows have for the first of some channels or tokens, and for the next; loaded four floats at a time.
template <int R>
class RowFloats {
 public:
  static constexpr int kTogether = R < 4 ? 4 / R : 1;

  KIVI_DEVICE void load(const float* from) { load_floats(from, floats_); }
  KIVI_DEVICE float get(int e, int r) const { return floats_[e * R + r]; }

 private:
  float floats_[kTogether * R];
};

// An element as it is loaded, of 4 or 2 bytes.
KIVI_DEVICE float number_of(float x, Element) { return x; }
KIVI_DEVICE float number_of(uint16_t x, Element type) {
  return type == Element::kFloat16 ? __half2float(__half(__half_raw{x})) : bfloat16_to_float(x);
}

// The codes of 16 channels of one token, or of 16 tokens of one channel.
template <int Bits>
struct Codes {
  static constexpr int kWords = Bits == 3 ? 2 : Bits < 2 ? 1 : Bits / 2;
  uint32_t words[kWords];

  // The words of a plane are `step` bytes apart.
  KIVI_DEVICE void load(const uint8_t* low, const uint8_t* high, int64_t step, int unit) {
    if constexpr (Bits == 1) {
      words[0] = one_bit(low, step, unit);
    } else if constexpr (Bits == 3) {
      words[0] = word(low + unit * step);
      words[1] = one_bit(high, step, unit);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i++) words[i] = word(low + (unit * kWords + i) * step);
    }
  }
  // Number `e` is known when this is compiled. 2^23 + code is a float whose last bits are the code.
  KIVI_DEVICE float operator[](int e) const {
    uint32_t code;
    if constexpr (Bits == 3) {
      code = (words[0] >> code_bit(2, e) & 3u) | (words[1] >> code_bit(1, e) & 1u) << 2;
    } else {
      constexpr int kPerWord = Bits == 1 ? kUnit : 32 / Bits;
      code = words[e / kPerWord] >> code_bit(Bits, e % kPerWord) & ((1u << Bits) - 1u);
    }
    return bits_float(0x4B000000u | code) - 8388608.0f;
  }

 private:
  static KIVI_DEVICE uint32_t word(const uint8_t* at) { return __ldg(reinterpret_cast<const uint32_t*>(at)); }
  // The half of a word of 32: elements 16 to 31 stand 8 bits above the others.
  static KIVI_DEVICE uint32_t one_bit(const uint8_t* plane, int64_t step, int unit) {
    return word(plane + unit / 2 * step) >> (unit % 2 * 8);
  }
};

}  // namespace kivi::cuda::generic
