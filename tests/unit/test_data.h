// Data for the tests: typed arrays, random numbers, aligned records, and switches for the floating-point mode of the
// thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include "cpu/kernels.h"
#include "format/half.h"

namespace kivi::cpu {

inline constexpr Element kElements[3] = {Element::kFloat32, Element::kFloat16, Element::kBFloat16};
inline constexpr int64_t kBitWidths[5] = {1, 2, 3, 4, 8};
inline constexpr int64_t kGroupSizes[4] = {16, 32, 64, 128};

inline const char* element_name(Element e) {
  return e == Element::kFloat32 ? "float32" : e == Element::kFloat16 ? "float16" : "bfloat16";
}

// An array of any element type. Filled with NaN at first, so that a read of what was never written shows.
class Array {
 public:
  Array() = default;
  Array(Element type, int64_t count)
      : type_(type), count_(count), bytes_(static_cast<size_t>(count * element_bytes(type)), 0xFF) {}

  void set(int64_t i, float x) { store_element(bytes_.data(), type_, i, x); }
  float get(int64_t i) const { return load_element(bytes_.data(), type_, i); }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  Element type() const { return type_; }
  int64_t size() const { return count_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

 private:
  Element type_ = Element::kFloat32;
  int64_t count_ = 0;
  std::vector<uint8_t> bytes_;
};

// Bytes between two 64-byte boundaries, where records with 8-bit scales may lie (record_alignment), with guard bytes
// around that must not change.
class Record {
 public:
  explicit Record(int64_t bytes, uint8_t fill = 0xA5)
      : bytes_(bytes), memory_(static_cast<size_t>(bytes + 3 * 64), kGuard) {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    start_ = static_cast<size_t>(32 + (64 - at) % 64);
    std::fill_n(data(), bytes, fill);
  }
  Record(const Record&) = delete;  // the boundary would move
  Record& operator=(const Record&) = delete;

  uint8_t* data() { return memory_.data() + start_; }
  const uint8_t* data() const { return memory_.data() + start_; }
  int64_t size() const { return bytes_; }
  std::vector<uint8_t> copy() const { return {data(), data() + bytes_}; }
  bool guard_intact() const {
    for (size_t i = 0; i < memory_.size(); i++) {
      const bool inside = i >= start_ && i < start_ + static_cast<size_t>(bytes_);
      if (!inside && memory_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr uint8_t kGuard = 0x5B;
  int64_t bytes_;
  size_t start_;
  std::vector<uint8_t> memory_;
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  float normal() { return normal_(engine_); }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// Subnormal numbers count as 0 while this lives, as under at::globalContext().setFlushDenormal(true). `supported` is
// false on machines where the test does not know how.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  static constexpr bool supported = true;
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  static constexpr bool supported = true;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#else
  static constexpr bool supported = false;
  FlushDenormals() {}
#endif
};

inline Format make_format(int64_t kv_heads, int64_t head_dim, int64_t value_head_dim, int64_t k_bits, int64_t v_bits,
                          int64_t group_size) {
  Format f;
  f.num_kv_heads = kv_heads;
  f.head_dim = head_dim;
  f.value_head_dim = value_head_dim;
  f.k_bits = k_bits;
  f.v_bits = v_bits;
  f.group_size = group_size;
  return f;
}

inline std::string format_text(const Format& f) {
  return "D " + std::to_string(f.head_dim) + " Dv " + std::to_string(f.value_head_dim) + " K" +
         std::to_string(f.k_bits) + "V" + std::to_string(f.v_bits) + " G " + std::to_string(f.group_size) + " scales " +
         std::to_string(static_cast<int>(f.scale_type)) + (f.k_search.count + f.v_search.count > 0 ? " search" : "") +
         (f.k_bias_correction ? " bias" : "") + (f.v_gain_correction ? " gain" : "") +
         (f.v_group_size > 0 ? " Gv " + std::to_string(f.v_group_size) : "") + (f.v_symmetric ? " symmetric" : "") +
         (f.v_rotated ? " rotated" : "");
}

}  // namespace kivi::cpu
