// The checksum of a saved cache. It is there to notice damage, not malice: every change within one 8-byte word of what
// it covers changes it, since each step is a bijection of the state and of the word; other changes do but for one in
// 2^64.
#pragma once

#include <cstdint>
#include <cstring>

namespace kivi {

class Checksum {
 public:
  void add(uint64_t word) {
    uint64_t& lane = lanes_[count_++ % 4];
    lane = mixed(lane ^ word);
  }
  // Whole words; what is left of the last one is filled with zeros.
  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    uint64_t word;
    for (; bytes >= sizeof word; at += sizeof word, bytes -= sizeof word) {
      std::memcpy(&word, at, sizeof word);
      add(word);
    }
    if (bytes == 0) return;
    word = 0;
    std::memcpy(&word, at, bytes);
    add(word);
  }
  int64_t value() const {
    uint64_t all = count_;
    for (const uint64_t lane : lanes_) all = mixed(all ^ lane);
    return static_cast<int64_t>(all);
  }

 private:
  static uint64_t mixed(uint64_t x) {
    x *= 0x9E3779B97F4A7C15u;  // odd: a bijection, as the rotation and the xor with a shift are
    x = x << 29 | x >> 35;
    return x ^ x >> 32;
  }
  // Four side by side: one alone would wait for its own multiplications.
  uint64_t lanes_[4] = {1, 2, 3, 4};
  uint64_t count_ = 0;
};

}  // namespace kivi
