// The bytes of one input, read as the numbers that a fuzz target needs. Past the end every byte is 0, so that each
// input, also the empty one, is a whole case. What a target promises is checked with `require`, which aborts: that is
// what libFuzzer and ctest notice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>

namespace kivi::fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  uint8_t byte() {
    if (size_ == 0) return 0;
    size_--;
    return *data_++;
  }
  bool flag() { return (byte() & 1) != 0; }
  // True in one of `n` cases; never where the input has ended.
  bool one_in(int n) { return byte() % n == n - 1; }
  int64_t number(int64_t first, int64_t last) { return first + byte() % (last - first + 1); }
  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[byte() % list.size()];
  }
  uint64_t word() {
    uint64_t all = 0;
    for (int i = 0; i < 8; i++) all = all << 8 | byte();
    return all;
  }
  // Any 64-bit number; mostly one next to where sums and products overflow.
  int64_t any() {
    using Limits = std::numeric_limits<int64_t>;
    const uint8_t kind = byte();
    if (kind < 8) return static_cast<int64_t>(word());
    if (kind < 64) return static_cast<int8_t>(byte());
    if (kind < 96) return Limits::max() - byte();
    if (kind < 112) return Limits::min() + byte();
    const int64_t power = int64_t{1} << (kind % 63);
    return (byte() & 1) != 0 ? power : power - 1;
  }
  // Mostly `usual`, which the caller knows to be right.
  int64_t mostly(int64_t usual, int n = 24) { return one_in(n) ? any() : usual; }

  bool ended() const { return size_ == 0; }
  size_t left() const { return size_; }
  const uint8_t* data() const { return data_; }

 private:
  const uint8_t* data_;
  size_t size_;
};

[[noreturn]] inline void fail(const char* what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
  std::abort();
}

}  // namespace kivi::fuzz

#define KIVI_REQUIRE(condition) \
  ((condition) ? static_cast<void>(0) : ::kivi::fuzz::fail(#condition, __FILE__, __LINE__))
