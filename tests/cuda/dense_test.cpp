// quantize and dequantize of csrc/cuda, against the scalar kernels, to the bit: any axis, strides, widths, group sizes.
#include <limits>

#include "cpu/reference.h"
#include "cuda/device_memory.h"
#include "cuda/kernels.h"
#include "format/codes.h"
#include "unit/test_data.h"

namespace kivi::cuda {
namespace {

using cpu::Array;
using cpu::element_name;
using cpu::kBitWidths;
using cpu::kElements;
using cpu::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Shape {
  int64_t outer, n, inner;
  int64_t bits, group_size;
  int64_t groups() const { return ceil_div(n, group_size); }
  int64_t row_bytes() const { return dense_bytes(n, bits); }
  int64_t units() const { return outer * ceil_div(inner, cpu::kInnerBlock); }
  std::string text() const {
    return std::to_string(outer) + "x" + std::to_string(n) + "x" + std::to_string(inner) + " bits " +
           std::to_string(bits) + " groups of " + std::to_string(group_size);
  }
};

struct Input {
  Array x;
  int64_t offset = 0, strides[3] = {0, 0, 0};
};

Input contiguous(const Shape& s, Element type, int64_t offset = 0) {
  Input in;
  in.offset = offset;
  in.x = Array(type, offset + s.outer * s.n * s.inner);
  in.strides[0] = s.n * s.inner, in.strides[1] = s.inner, in.strides[2] = 1;
  Random random(static_cast<uint32_t>(s.n + s.bits));
  for (int64_t i = offset; i < in.x.size(); i++) in.x.set(i, random.normal() * 2 + 0.2f);
  return in;
}

// What a call writes; 0xFF at first.
struct Quantized {
  explicit Quantized(const Shape& s)
      : codes(static_cast<size_t>(s.outer * s.row_bytes() * s.inner), 0xFF),
        scale(static_cast<size_t>(s.outer * s.groups() * s.inner), 0xFFFFFFFF),
        zero(scale),
        values(static_cast<size_t>(s.outer * s.n * s.inner), 0xFFFFFFFF) {}
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scale, zero, values;  // bits of floats
};

QuantizeParams quantize_params(const Shape& s, const Input& in, const void* x) {
  QuantizeParams p{};
  p.outer = s.outer, p.n = s.n, p.inner = s.inner, p.bits = s.bits, p.group_size = s.group_size;
  p.x = advance(x, in.x.type(), in.offset), p.type = in.x.type();
  p.x_outer_stride = in.strides[0], p.x_n_stride = in.strides[1], p.x_inner_stride = in.strides[2];
  return p;
}

Quantized on_the_host(const Shape& s, const Input& in) {
  Quantized q(s);
  QuantizeParams p = quantize_params(s, in, in.x.data());
  p.codes = q.codes.data();
  p.scale = reinterpret_cast<float*>(q.scale.data()), p.zero = reinterpret_cast<float*>(q.zero.data());
  p.values = reinterpret_cast<float*>(q.values.data());
  cpu::scalar_quantize(p, 0, s.units());
  return q;
}

// wanted: bit 0 codes, 1 scale, 2 zero, 3 values.
void check_quantize(const Shape& s, const Input& in, int wanted = 15) {
  SCOPED_TRACE(s.text() + " " + element_name(in.x.type()));
  const Quantized want = on_the_host(s, in), empty(s);
  const DeviceArray<uint8_t> x(in.x.bytes()), codes(want.codes.size());
  const DeviceArray<uint32_t> scale(want.scale.size()), zero(want.zero.size()), values(want.values.size());
  QuantizeParams p = quantize_params(s, in, x.data());
  if ((wanted & 1) != 0) p.codes = codes.data();
  if ((wanted & 2) != 0) p.scale = reinterpret_cast<float*>(scale.data());
  if ((wanted & 4) != 0) p.zero = reinterpret_cast<float*>(zero.data());
  if ((wanted & 8) != 0) p.values = reinterpret_cast<float*>(values.data());
  check(quantize(p, nullptr));
  EXPECT_TRUE(codes.get() == ((wanted & 1) != 0 ? want.codes : empty.codes));
  EXPECT_TRUE(scale.get() == ((wanted & 2) != 0 ? want.scale : empty.scale));
  EXPECT_TRUE(zero.get() == ((wanted & 4) != 0 ? want.zero : empty.zero));
  EXPECT_TRUE(values.get() == ((wanted & 8) != 0 ? want.values : empty.values));
}

void check_dequantize(const Shape& s, const Quantized& q, Element type) {
  SCOPED_TRACE(s.text() + " " + element_name(type));
  DequantizeParams p{};
  p.outer = s.outer, p.n = s.n, p.inner = s.inner, p.bits = s.bits, p.group_size = s.group_size;
  p.codes_strides[0] = s.row_bytes() * s.inner, p.codes_strides[1] = s.inner, p.codes_strides[2] = 1;
  p.scale_strides[0] = p.zero_strides[0] = s.groups() * s.inner;
  p.scale_strides[1] = p.zero_strides[1] = s.inner;
  p.scale_strides[2] = p.zero_strides[2] = 1;
  p.type = type;
  Array want(type, s.outer * s.n * s.inner);
  p.codes = q.codes.data();
  p.scale = reinterpret_cast<const float*>(q.scale.data()), p.zero = reinterpret_cast<const float*>(q.zero.data());
  p.out = want.data();
  cpu::scalar_dequantize(p, 0, s.units());
  const DeviceArray<uint8_t> codes(q.codes), out(want.bytes().size());
  const DeviceArray<uint32_t> scale(q.scale), zero(q.zero);
  p.codes = codes.data();
  p.scale = reinterpret_cast<float*>(scale.data()), p.zero = reinterpret_cast<float*>(zero.data());
  p.out = out.data();
  check(dequantize(p, nullptr));
  EXPECT_TRUE(out.get() == want.bytes());
}

TEST(DenseQuantize, EveryShape) {
  for (const int64_t bits : kBitWidths) {
    for (const int64_t group : {1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 100, 128, 256, 300}) {
      for (const int64_t n : {int64_t{1}, int64_t{7}, 2 * group, 3 * group + 5}) {
        for (const int64_t inner : {1, 2, 35}) {
          const Shape s{3, n, inner, bits, group};
          const Element type = kElements[(n + inner + bits) % 3];
          const Input in = contiguous(s, type);
          check_quantize(s, in);
          check_dequantize(s, on_the_host(s, in), kElements[(n + bits) % 3]);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// Groups far longer than the axis, whose multiples are no numbers.
TEST(DenseQuantize, GroupsThatNoAxisFills) {
  for (const int64_t group : {int64_t{1} << 40, (int64_t{1} << 62) + 1, std::numeric_limits<int64_t>::max()}) {
    for (const int64_t inner : {1, 3}) {
      const Shape s{2, 20, inner, 3, group};
      const Input in = contiguous(s, Element::kFloat32);
      check_quantize(s, in);
      check_dequantize(s, on_the_host(s, in), Element::kFloat32);
    }
  }
}

// One group of everything, longer than a warp reads at once.
TEST(DenseQuantize, LongGroups) {
  for (const int64_t inner : {1, 3}) {
    for (const int64_t n : {1000, 4099}) {
      const Shape s{2, n, inner, 3, n};
      for (const Element type : kElements) {
        check_quantize(s, contiguous(s, type));
        check_dequantize(s, on_the_host(s, contiguous(s, type)), type);
      }
    }
  }
}

TEST(DenseQuantize, EveryOrderOfThreads) {
  for (const Shape& s : {Shape{5, 96, 1, 2, 32}, Shape{2, 21, 1, 3, 5}, Shape{3, 50, 7, 3, 12}}) {
    const Input in = contiguous(s, Element::kFloat16);
    in_every_order([&] {
      check_quantize(s, in);
      check_dequantize(s, on_the_host(s, in), Element::kFloat16);
    });
  }
}

TEST(DenseQuantize, WhatIsNotWanted) {
  for (const int64_t inner : {1, 3}) {
    for (int wanted = 0; wanted < 16; wanted++) {
      const Shape s{2, 70, inner, 4, 32};
      check_quantize(s, contiguous(s, Element::kFloat32), wanted);
    }
  }
}

// Numbers on no boundary, backwards, every second one, one for all; axes in any order.
TEST(DenseQuantize, Strides) {
  for (const Element type : kElements) {
    for (const int64_t inner : {1, 5}) {
      const Shape s{4, 80, inner, 2, 32};
      for (const int64_t offset : {1, 2, 4, 8}) check_quantize(s, contiguous(s, type, offset));
      Input in = contiguous({4, 160, inner, 2, 32}, type);
      in.strides[1] *= 2;
      check_quantize(s, in);
      in.offset = in.strides[1] * (s.n - 1), in.strides[1] = -in.strides[1];
      check_quantize(s, in);
      in = contiguous(s, type);
      in.strides[0] = 0;
      check_quantize(s, in);
      in = contiguous(s, type);
      in.strides[0] = 1, in.strides[1] = 4 * inner, in.strides[2] = 4;
      check_quantize(s, in);
    }
  }
}

TEST(DenseQuantize, DequantizeStrides) {
  const Shape s{3, 50, 4, 3, 16};
  const Input in = contiguous(s, Element::kFloat32);
  const Quantized q = on_the_host(s, in);
  // [inner][outer][n] in memory, twice as far apart, scale the same for all of `inner`.
  const int64_t bytes = s.row_bytes();
  std::vector<uint8_t> codes(static_cast<size_t>(2 * s.inner * s.outer * bytes), 0xFF);
  for (int64_t o = 0; o < s.outer; o++) {
    for (int64_t i = 0; i < bytes; i++) {
      for (int64_t j = 0; j < s.inner; j++) {
        codes[static_cast<size_t>(2 * ((j * s.outer + o) * bytes + i))] =
            q.codes[static_cast<size_t>((o * bytes + i) * s.inner + j)];
      }
    }
  }
  for (const Element type : kElements) {
    DequantizeParams p{};
    p.outer = s.outer, p.n = s.n, p.inner = s.inner, p.bits = s.bits, p.group_size = s.group_size;
    p.codes_strides[0] = 2 * bytes, p.codes_strides[1] = 2, p.codes_strides[2] = 2 * s.outer * bytes;
    p.scale_strides[0] = s.groups() * s.inner, p.scale_strides[1] = s.inner, p.scale_strides[2] = 0;
    p.zero_strides[0] = s.groups() * s.inner, p.zero_strides[1] = s.inner, p.zero_strides[2] = 1;
    p.type = type;
    Array want(type, s.outer * s.n * s.inner);
    p.codes = codes.data(), p.out = want.data();
    p.scale = reinterpret_cast<const float*>(q.scale.data()), p.zero = reinterpret_cast<const float*>(q.zero.data());
    cpu::scalar_dequantize(p, 0, s.units());
    const DeviceArray<uint8_t> device_codes(codes), out(want.bytes().size());
    const DeviceArray<uint32_t> scale(q.scale), zero(q.zero);
    p.codes = device_codes.data(), p.out = out.data();
    p.scale = reinterpret_cast<float*>(scale.data()), p.zero = reinterpret_cast<float*>(zero.data());
    check(dequantize(p, nullptr));
    EXPECT_TRUE(out.get() == want.bytes()) << element_name(type);
  }
}

// NaN and Inf in every place of a group, ranges that overflow, subnormals, zeros of both signs.
TEST(DenseQuantize, HardNumbers) {
  const float hard[] = {0.0f, -0.0f, 1e-40f, 3e-45f, -1e-44f, 65504.0f, 3e38f, -3e38f, kNaN, kInf, -kInf};
  for (const int64_t bits : kBitWidths) {
    for (const int64_t inner : {1, 2}) {
      for (const int64_t group : {12, 32}) {
        const Shape s{121, 2 * group, inner, bits, group};
        Input in = contiguous(s, Element::kFloat32);
        for (int64_t o = 0; o < s.outer; o++) {
          const float a = hard[o % 11], b = hard[o / 11];
          for (int64_t i = 0; i < group; i++) {
            if (o % 3 == 0 || i == o % group) in.x.set((o * s.n + i) * inner, i % 2 == 0 ? a : b);
          }
        }
        check_quantize(s, in);
        for (const Element type : kElements) check_dequantize(s, on_the_host(s, in), type);
      }
    }
  }
}

// Numbers that float16 rounds to infinity.
TEST(DenseQuantize, ValuesThatFloat16CannotHold) {
  const Shape s{1, 64, 1, 2, 16};
  Quantized q(s);
  for (size_t i = 0; i < q.codes.size(); i++) q.codes[i] = static_cast<uint8_t>(i * 77);
  const float scales[] = {30000.0f, 1e5f, kInf, 21840.0f}, zeros[] = {-40000.0f, -3e38f, 0.0f, -10.0f};
  for (size_t g = 0; g < 4; g++) q.scale[g] = float_bits(scales[g]), q.zero[g] = float_bits(zeros[g]);
  q.codes[8] = q.codes[9] = q.codes[10] = q.codes[11] = 0xFF;  // no 0 * Inf, whose NaN differs between machines
  for (const Element type : kElements) check_dequantize(s, q, type);
}

TEST(DenseQuantize, Nothing) {
  for (const Shape& s : {Shape{0, 4, 4, 2, 2}, Shape{4, 0, 4, 2, 2}, Shape{4, 4, 0, 2, 2}}) {
    const Input in = contiguous(s, Element::kFloat32);
    check_quantize(s, in);
    check_dequantize(s, Quantized(s), Element::kFloat32);
  }
}

// More rows than the second and third axis of a grid have room for.
TEST(DenseQuantize, ManyRows) {
  const Shape s{70000, 8, 1, 8, 8};
  const Input in = contiguous(s, Element::kFloat32);
  check_quantize(s, in);
  check_dequantize(s, on_the_host(s, in), Element::kFloat32);
}

// Rows that are more than 2^31 elements apart, in memory of which little is touched.
TEST(DenseQuantize, OffsetsPast31Bits) {
  constexpr int64_t kApart = (int64_t{1} << 31) + 64, kNumbers = 64;
  for (const int64_t inner : {1, 2}) {
    const Shape s{2, kNumbers / inner, inner, 2, 32};
    Input in = contiguous(s, Element::kFloat16);
    const Quantized want = on_the_host(s, in);
    uint8_t* memory = nullptr;
    if (cudaMalloc(reinterpret_cast<void**>(&memory), 2 * (kApart + kNumbers)) != cudaSuccess) {
      GTEST_SKIP() << "4 GB of memory are needed";
    }
    for (int64_t o = 0; o < 2; o++) {
      check(cudaMemcpy(memory + 2 * o * kApart, in.x.bytes().data() + 2 * o * kNumbers, 2 * kNumbers,
                       cudaMemcpyHostToDevice));
    }
    in.strides[0] = kApart;
    QuantizeParams p = quantize_params(s, in, memory);
    const DeviceArray<uint8_t> codes(want.codes.size());
    p.codes = codes.data();
    check(quantize(p, nullptr));
    EXPECT_TRUE(codes.get() == want.codes);
    check(cudaFree(memory));
  }
}

}  // namespace
}  // namespace kivi::cuda
