// The instructions of tensor cores, after the layouts of fragments in the PTX ISA manual (mma.m16n8k16, ldmatrix).
#pragma once

#include "emulator/intrinsics.h"

namespace emulator {

inline float to_float(__half v) { return __half2float(v); }
inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// ---- mma.m16n8k16 --------------------------------------------------------------------------------

// Where a lane's i-th element lies; i counts 16-bit elements of A and B, two a register, and floats of C and D.
struct Coord {
  unsigned row, col;
};
constexpr Coord mma_a(unsigned lane, unsigned i) {  // 16 x 16
  return {lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8};
}
constexpr Coord mma_b(unsigned lane, unsigned i) {  // 16 x 8
  return {lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4};
}
constexpr Coord mma_c(unsigned lane, unsigned i) {  // 16 x 8
  return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2};
}

// How exact the tensor core is. 0: sums in double, rounded once. Else it keeps so many fraction bits below the largest
// exponent of the (not normalised) products and the addend and cuts off the rest, as published tests found on V100 (23)
// and, with more bits, A100 and H100.
inline int mma_bits = 0;

constexpr int kNoExponent = -1000;  // of zero

// Subnormals have the smallest normal exponent.
inline int raw_exponent(float v, int smallest) { return v == 0 ? kNoExponent : std::max(std::ilogb(v), smallest); }

// The rows of A and columns of B of one product, and its addend.
struct Dot {
  float a[16], b[16], c;
};

inline float exact_sum(const Dot& dot) {
  double sum = double{dot.c};
  for (int k = 0; k < 16; k++) sum += double{dot.a[k]} * double{dot.b[k]};
  return static_cast<float>(sum);
}

inline float truncate_to_float(double v) {
  if (!std::isfinite(v) || v == 0) return static_cast<float>(v);
  const int exponent = std::ilogb(v);
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(v, 23 - exponent)), exponent - 23));
}

inline float truncated_sum(const Dot& dot, int bits, int smallest) {
  constexpr int kInfinite = 200;  // exponents from here on are those of infinity and NaN
  int top = dot.c == 0 ? kNoExponent : std::ilogb(dot.c);
  for (int k = 0; k < 16; k++) {
    if (dot.a[k] == 0 || dot.b[k] == 0) continue;
    top = std::max(top, raw_exponent(dot.a[k], smallest) + raw_exponent(dot.b[k], smallest));
  }
  if (top <= kNoExponent || top >= kInfinite) return exact_sum(dot);
  const auto cut = [&](double v) { return std::trunc(std::ldexp(v, bits - top)); };
  double sum = cut(double{dot.c});
  for (int k = 0; k < 16; k++) sum += cut(double{dot.a[k]} * double{dot.b[k]});
  return truncate_to_float(std::ldexp(sum, top - bits));
}

struct Mma {
  uint32_t a[4], b[2];
  float c[4], d[4];
};

template <class T>
float element_of(const uint32_t* registers, unsigned i) {
  return to_float(bit_cast<T>(static_cast<uint16_t>(registers[i / 2] >> (16 * (i % 2)))));
}

template <class T>
void combine_mma(void* const* args, unsigned lanes) {
  float a[16][16], b[8][16];  // b transposed
  for (unsigned lane = 0; lane < lanes; lane++) {
    if (args[lane] == nullptr) fail("mma: lane %u does not take part", lane);
    const Mma& own = *static_cast<const Mma*>(args[lane]);
    for (unsigned i = 0; i < 8; i++) a[mma_a(lane, i).row][mma_a(lane, i).col] = element_of<T>(own.a, i);
    for (unsigned i = 0; i < 4; i++) b[mma_b(lane, i).col][mma_b(lane, i).row] = element_of<T>(own.b, i);
  }
  constexpr int kSmallestExponent = std::is_same_v<T, __half> ? -14 : -126;
  for (unsigned lane = 0; lane < lanes; lane++) {
    Mma& own = *static_cast<Mma*>(args[lane]);
    for (unsigned i = 0; i < 4; i++) {
      const auto [row, col] = mma_c(lane, i);
      Dot dot;
      std::copy_n(a[row], 16, dot.a);
      std::copy_n(b[col], 16, dot.b);
      dot.c = own.c[i];
      own.d[i] = mma_bits == 0 ? exact_sum(dot) : truncated_sum(dot, mma_bits, kSmallestExponent);
    }
  }
}

template <class T>
void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site) {
  Mma own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}, {}};
  warp_collective("mma.m16n8k16", ~0u, site, Fence::none, &own, combine_mma<T>);
  std::copy_n(own.d, 4, d);
}

// ---- ldmatrix .x1, .x2, .x4 ----------------------------------------------------------------------

template <unsigned N>
struct LoadMatrix {
  uint16_t row[8];
  uint32_t result[N];
  bool transpose;
};

template <unsigned N>
void combine_ldmatrix(void* const* args, unsigned lanes) {
  for (unsigned lane = 0; lane < lanes; lane++) {
    if (args[lane] == nullptr) fail("ldmatrix: lane %u does not take part", lane);
  }
  const auto element = [&](unsigned matrix, unsigned row, unsigned col) -> uint32_t {
    return static_cast<const LoadMatrix<N>*>(args[8 * matrix + row])->row[col];
  };
  for (unsigned lane = 0; lane < lanes; lane++) {
    auto& own = *static_cast<LoadMatrix<N>*>(args[lane]);
    const unsigned i = lane / 4, j = lane % 4 * 2;
    for (unsigned m = 0; m < N; m++) {
      const uint32_t low = own.transpose ? element(m, j, i) : element(m, i, j);
      const uint32_t high = own.transpose ? element(m, j + 1, i) : element(m, i, j + 1);
      own.result[m] = low | high << 16;
    }
  }
}

// Lanes 8i to 8i + 7 address the 16-byte rows of matrix i. Each lane reads the row that it addresses, so that
// sanitizers hold it responsible.
template <unsigned N>
void ldmatrix(uint32_t (&result)[N], const void* row, bool transpose, Site site) {
  LoadMatrix<N> own{{}, {}, transpose};
  if (lane_id() < 8 * N) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
      fail("ldmatrix: the row address of lane %u is not aligned to 16 bytes", lane_id());
    }
    std::copy_n(static_cast<const uint16_t*>(row), 8, own.row);
  }
  warp_collective("ldmatrix", ~0u, site, Fence::none, &own, combine_ldmatrix<N>);
  std::copy_n(own.result, N, result);
}

}  // namespace emulator
