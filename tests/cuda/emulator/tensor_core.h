// Emulated tensor-core instructions, after the fragment layouts in the PTX ISA manual.
#pragma once

#include "emulator/intrinsics.h"

namespace emulator {

inline float to_float(__half v) { return __half2float(v); }
inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Element coordinates of mma.m16n8k16 fragments; `i` counts 16-bit elements of A and B (two a register),
// floats of C and D.
struct Coord {
  unsigned row, col;
};
constexpr Coord mma_a(unsigned lane, unsigned i) {
  return {lane / 4 + (i / 2 % 2) * 8, lane % 4 * 2 + i % 2 + (i / 4) * 8};
}  // 16 x 16
constexpr Coord mma_b(unsigned lane, unsigned i) { return {lane % 4 * 2 + i % 2 + (i / 2) * 8, lane / 4}; }  // 16 x 8
constexpr Coord mma_c(unsigned lane, unsigned i) { return {lane / 4 + (i / 2) * 8, lane % 4 * 2 + i % 2}; }  // 16 x 8

// A tensor core that keeps `mma_bits` fraction bits below the largest exponent of the (not normalised) products and
// the addend, and cuts off the rest, as published tests found on V100 (23) and, with more bits, A100 and H100. 0:
// exact.
inline int mma_bits = 0;
inline int raw_exponent(float v, int min_exponent) {
  if (v == 0) return -1000;
  return std::max(std::ilogb(v), min_exponent);  // subnormals keep the smallest normal exponent
}

struct Mma {
  uint32_t a[4], b[2];
  float c[4], d[4];
};

template <class T>
T half_of(const uint32_t* registers, unsigned i) {
  return bit_cast<T>(uint16_t(registers[i / 2] >> 16 * (i % 2)));
}

template <class T>
void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], Site site) {
  Mma m{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}, {}};
  warp_collective("mma.m16n8k16", ~0u, site, Fence::none, &m, [](void* const* args, unsigned n) {
    float A[16][16], B[16][8];
    for (unsigned lane = 0; lane < n; ++lane) {
      if (!args[lane]) fail("mma: lane %u does not take part", lane);
      auto& own = *static_cast<Mma*>(args[lane]);
      for (unsigned i = 0; i < 8; ++i) A[mma_a(lane, i).row][mma_a(lane, i).col] = to_float(half_of<T>(own.a, i));
      for (unsigned i = 0; i < 4; ++i) B[mma_b(lane, i).row][mma_b(lane, i).col] = to_float(half_of<T>(own.b, i));
    }
    for (unsigned lane = 0; lane < n; ++lane) {
      auto& own = *static_cast<Mma*>(args[lane]);
      for (unsigned i = 0; i < 4; ++i) {
        auto [row, col] = mma_c(lane, i);
        if (mma_bits) {
          constexpr int kMin = std::is_same_v<T, __half> ? -14 : -126;
          int top = own.c[i] == 0 ? -1000 : std::ilogb(own.c[i]);
          for (unsigned k = 0; k < 16; ++k)
            if (A[row][k] != 0 && B[k][col] != 0)
              top = std::max(top, raw_exponent(A[row][k], kMin) + raw_exponent(B[k][col], kMin));
          if (top > -1000 && top < 200) {
            auto cut = [&](double v) { return std::trunc(std::ldexp(v, mma_bits - top)); };
            double sum = cut(own.c[i]);
            for (unsigned k = 0; k < 16; ++k) sum += cut(double(A[row][k]) * double(B[k][col]));
            sum = std::ldexp(sum, top - mma_bits);
            if (std::isfinite(sum) && sum != 0) {  // and truncated to float
              const int e = std::ilogb(sum);
              sum = std::ldexp(std::trunc(std::ldexp(sum, 23 - e)), e - 23);
            }
            own.d[i] = float(sum);
            continue;
          }
        }
        double sum = own.c[i];  // the hardware's order and rounding of the sum are unspecified
        for (unsigned k = 0; k < 16; ++k) sum += double(A[row][k]) * double(B[k][col]);
        own.d[i] = float(sum);
      }
    }
  });
  std::copy(m.d, m.d + 4, d);
}

// ldmatrix .x1/.x2/.x4: lanes 8i..8i+7 address the 16-byte rows of matrix i. Each lane reads the row it
// addresses itself, so sanitizers attribute the access to it.
template <unsigned N>
void ldmatrix(uint32_t (&r)[N], const void* row, bool transpose, Site site) {
  struct Args {
    uint16_t row[8];
    uint32_t r[N];
    bool transpose;
  } args{{}, {}, transpose};
  if (lane_id() < 8 * N) {
    if (reinterpret_cast<uintptr_t>(row) % 16)
      fail("ldmatrix: lane %u has a row address not aligned to 16 bytes", lane_id());
    const auto* source = static_cast<const uint16_t*>(row);
    for (unsigned i = 0; i < 8; ++i) args.row[i] = source[i];
  }
  warp_collective("ldmatrix", ~0u, site, Fence::none, &args, [](void* const* all, unsigned n) {
    auto element = [&](unsigned matrix, unsigned i, unsigned j) -> uint32_t {
      return static_cast<Args*>(all[8 * matrix + i])->row[j];
    };
    for (unsigned lane = 0; lane < n; ++lane)
      if (!all[lane]) fail("ldmatrix: lane %u does not take part", lane);
    for (unsigned lane = 0; lane < n; ++lane) {
      auto& self = *static_cast<Args*>(all[lane]);
      unsigned i = lane / 4, j = lane % 4 * 2;
      for (unsigned m = 0; m < N; ++m)
        self.r[m] = self.transpose ? element(m, j, i) | element(m, j + 1, i) << 16
                                   : element(m, i, j) | element(m, i, j + 1) << 16;
    }
  });
  std::copy(args.r, args.r + N, r);
}

}  // namespace emulator
