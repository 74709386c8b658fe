// The random numbers that decide orders: splitmix64, so that a seed means the same everywhere.
#pragma once

#include <cstdint>

namespace emulator {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // 0 to n - 1.
  unsigned below(unsigned n) { return static_cast<unsigned>(((next() >> 32) * n) >> 32); }
  bool coin() { return (next() >> 63) != 0; }

 private:
  uint64_t state_;
};

}  // namespace emulator
