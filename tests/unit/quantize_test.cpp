// Dense quantise and dequantise on every instruction set, against an oracle from the definition: any axis, strides,
// bits, group size; and the formula of the KIVI notebook.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "isa.h"
#include "oracle.h"

namespace kivi::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Shape {
  int64_t outer, n, inner;
};

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scale, zero, values;
  friend bool operator==(const Quantized& a, const Quantized& b) {  // to the bit: NaN equals NaN, +0 is not -0
    const auto bits = [](const std::vector<float>& x) {
      std::vector<uint32_t> u;
      for (const float v : x) u.push_back(float_bits(v));
      return u;
    };
    return a.codes == b.codes && bits(a.scale) == bits(b.scale) && bits(a.zero) == bits(b.zero) &&
           bits(a.values) == bits(b.values);
  }
};

struct Input {
  Array x;
  int64_t offset = 0, strides[3] = {0, 0, 0};
  float at(int64_t o, int64_t i, int64_t j) const {
    return x.get(offset + o * strides[0] + i * strides[1] + j * strides[2]);
  }
};

Input contiguous(const Shape& s, Element type, uint32_t seed) {
  Input in;
  in.x = Array(type, s.outer * s.n * s.inner);
  in.strides[0] = s.n * s.inner, in.strides[1] = s.inner, in.strides[2] = 1;
  Random random(seed);
  for (int64_t i = 0; i < in.x.size(); i++) in.x.set(i, random.normal() * 2 + 0.2f);
  return in;
}

class Quantize : public IsaTest {
 public:
  Quantized quantize(const Shape& s, int64_t bits, int64_t group, const Input& in, int64_t step = 0) {
    const int64_t groups = ceil_div(s.n, group), bytes = (s.n * bits + 7) / 8;
    Quantized q;
    q.codes.assign(static_cast<size_t>(s.outer * bytes * s.inner), 0xEE);
    q.scale.assign(static_cast<size_t>(s.outer * groups * s.inner), 77.0f);
    q.zero = q.scale;
    q.values.assign(static_cast<size_t>(s.outer * s.n * s.inner), 77.0f);
    QuantizeParams p{};
    p.outer = s.outer, p.n = s.n, p.inner = s.inner;
    p.bits = bits, p.group_size = group;
    p.x = advance(in.x.data(), in.x.type(), in.offset), p.type = in.x.type();
    p.x_outer_stride = in.strides[0], p.x_n_stride = in.strides[1], p.x_inner_stride = in.strides[2];
    p.codes = q.codes.data(), p.scale = q.scale.data(), p.zero = q.zero.data(), p.values = q.values.data();
    const int64_t units = s.outer * ceil_div(s.inner, kInnerBlock);
    for (int64_t u = 0; u<units; u += step> 0 ? step : units)
      kernels().quantize(p, u, std::min(units, u + (step > 0 ? step : units)));
    return q;
  }

  static Quantized expected(const Shape& s, int64_t bits, int64_t group, const Input& in) {
    const int64_t groups = ceil_div(s.n, group), bytes = (s.n * bits + 7) / 8;
    Quantized q;
    q.codes.assign(static_cast<size_t>(s.outer * bytes * s.inner), 0);
    q.scale.assign(static_cast<size_t>(s.outer * groups * s.inner), 0);
    q.zero = q.scale;
    q.values.assign(static_cast<size_t>(s.outer * s.n * s.inner), 0);
    for (int64_t o = 0; o < s.outer; o++) {
      for (int64_t j = 0; j < s.inner; j++) {
        for (int64_t g = 0; g < groups; g++) {
          std::vector<float> x;
          for (int64_t i = g * group; i < std::min(s.n, (g + 1) * group); i++) x.push_back(in.at(o, i, j));
          const oracle::Group r = oracle::quantize_group(x, {static_cast<int>(bits), ScaleType::kFloat32, {}});
          q.scale[static_cast<size_t>((o * groups + g) * s.inner + j)] = r.scale;
          q.zero[static_cast<size_t>((o * groups + g) * s.inner + j)] = r.zero;
          for (size_t k = 0; k < x.size(); k++) {
            const int64_t i = g * group + static_cast<int64_t>(k);
            const float product = static_cast<float>(r.codes[k]) * r.scale;
            q.values[static_cast<size_t>((o * s.n + i) * s.inner + j)] = r.zero + product;
            for (int64_t b = 0; b < bits; b++) {
              const int64_t bit = i * bits + b;
              auto& byte = q.codes[static_cast<size_t>((o * bytes + bit / 8) * s.inner + j)];
              byte = static_cast<uint8_t>(byte | (r.codes[k] >> b & 1) << (bit % 8));
            }
          }
        }
      }
    }
    return q;
  }

  void check(const Shape& s, int64_t bits, int64_t group, const Input& in) {
    EXPECT_TRUE(quantize(s, bits, group, in) == expected(s, bits, group, in))
        << s.outer << "x" << s.n << "x" << s.inner << " bits " << bits << " group " << group << " "
        << element_name(in.x.type());
  }

  Array dequantize(const Shape& s, int64_t bits, int64_t group, const Quantized& q, Element type) {
    const int64_t groups = ceil_div(s.n, group), bytes = (s.n * bits + 7) / 8;
    Array out(type, s.outer * s.n * s.inner);
    DequantizeParams p{};
    p.outer = s.outer, p.n = s.n, p.inner = s.inner;
    p.bits = bits, p.group_size = group;
    p.codes = q.codes.data(), p.scale = q.scale.data(), p.zero = q.zero.data();
    p.codes_strides[0] = bytes * s.inner, p.codes_strides[1] = s.inner, p.codes_strides[2] = 1;
    p.scale_strides[0] = p.zero_strides[0] = groups * s.inner;
    p.scale_strides[1] = p.zero_strides[1] = s.inner;
    p.scale_strides[2] = p.zero_strides[2] = 1;
    p.out = out.data(), p.type = type;
    kernels().dequantize(p, 0, s.outer * ceil_div(s.inner, kInnerBlock));
    return out;
  }

  // Units [0, middle) and the rest by this table, all by the scalar one: the same to the bit, NaN for NaN.
  void check_dequantize(DequantizeParams p, int64_t middle) {
    const int64_t units = p.outer * ceil_div(p.inner, kInnerBlock), size = element_bytes(p.type);
    const int64_t count = p.outer * p.n * p.inner;
    const int64_t bytes = count * size;
    if (bytes <= 0) return;
    Record got(bytes), want(bytes);
    p.out = got.data();
    kernels().dequantize(p, 0, middle);
    kernels().dequantize(p, middle, units);
    p.out = want.data();
    scalar().dequantize(p, 0, units);
    EXPECT_TRUE(got.guard_intact());
    if (std::memcmp(got.data(), want.data(), static_cast<size_t>(bytes)) == 0) return;
    for (int64_t i = 0; i < count; i++) {
      const bool same = std::memcmp(got.data() + i * size, want.data() + i * size, static_cast<size_t>(size)) == 0;
      const float a = load_element(got.data(), p.type, i), b = load_element(want.data(), p.type, i);
      ASSERT_TRUE(same || (std::isnan(a) && std::isnan(b)))
          << p.outer << "x" << p.n << "x" << p.inner << " bits " << p.bits << " group " << p.group_size << " "
          << element_name(p.type) << " at " << i << ": " << a << ", not " << b;
    }
  }

  // Contiguous codes, scales and zeros.
  struct Packed {
    Packed(const Shape& s, int64_t bits, int64_t group) {
      const int64_t groups = ceil_div(s.n, group), bytes = (s.n * bits + 7) / 8;
      codes.resize(static_cast<size_t>(s.outer * bytes * s.inner));
      scale.resize(static_cast<size_t>(s.outer * groups * s.inner)), zero = scale;
      p.outer = s.outer, p.n = s.n, p.inner = s.inner, p.bits = bits, p.group_size = group;
      p.codes = codes.data(), p.scale = scale.data(), p.zero = zero.data();
      p.codes_strides[0] = bytes * s.inner, p.codes_strides[1] = s.inner, p.codes_strides[2] = 1;
      p.scale_strides[0] = p.zero_strides[0] = groups * s.inner;
      p.scale_strides[1] = p.zero_strides[1] = s.inner;
      p.scale_strides[2] = p.zero_strides[2] = 1;
    }
    Packed(const Packed&) = delete;
    Packed& operator=(const Packed&) = delete;
    std::vector<uint8_t> codes;
    std::vector<float> scale, zero;
    DequantizeParams p{};
  };
};

constexpr Shape kShapes[] = {{1, 1, 1},   {3, 32, 1},  {2, 33, 1},  {5, 128, 1},  {1, 32, 4},  {2, 64, 16},
                             {2, 40, 17}, {1, 37, 64}, {2, 96, 65}, {1, 70, 200}, {1, 130, 1}, {1, 7, 3}};

TEST_P(Quantize, EqualsTheOracle) {
  for (const Shape& s : kShapes) {
    for (const int64_t bits : kBitWidths) {
      for (const int64_t group : {1, 3, 16, 32, 64, 1000}) {
        for (const Element type : kElements)
          check(s, bits, group, contiguous(s, type, static_cast<uint32_t>(bits + group)));
      }
    }
  }
}

// Case C06: every length along the packed axis.
TEST_P(Quantize, EveryLength) {
  for (const int64_t bits : kBitWidths) {
    for (int64_t n = 1; n <= 130; n++) {
      for (const int64_t inner : {1, 8}) {
        const Shape s{1, n, inner};
        check(s, bits, n, contiguous(s, Element::kFloat32, static_cast<uint32_t>(n)));
        check(s, bits, 32, contiguous(s, Element::kFloat32, static_cast<uint32_t>(n)));
      }
    }
  }
}

// Case C17: views of any strides give what a contiguous copy gives.
TEST_P(Quantize, AnyStrides) {
  const Shape s{2, 40, 24};
  const int64_t strides[][4] = {{2000, 1, 41, 0},   {2000, 48, 2, 0},  {0, 24, 1, 0},
                                {1000, 0, 1, 5},    {1000, 25, 0, 3},  {3, 48, 0, 7},
                                {960, -24, 1, 936}, {960, 24, -1, 23}, {0, 0, 0, 1}};
  for (const auto& stride : strides) {
    for (const Element type : kElements) {
      for (const int64_t bits : kBitWidths) {
        Input in;
        in.x = Array(type, 4500);
        Random random(3);
        for (int64_t i = 0; i < in.x.size(); i++) in.x.set(i, random.normal());
        for (int i = 0; i < 3; i++) in.strides[i] = stride[i];
        in.offset = stride[3];
        check(s, bits, 16, in);
      }
    }
  }
}

TEST_P(Quantize, UnitsInAnyDivision) {
  const Shape s{3, 50, 200};
  const Input in = contiguous(s, Element::kFloat32, 1);
  const Quantized want = quantize(s, 3, 16, in);
  for (const int64_t step : {1, 2, 5}) EXPECT_TRUE(quantize(s, 3, 16, in, step) == want);
}

TEST_P(Quantize, OutputsThatAreNotWanted) {
  const Shape s{2, 40, 24};
  const Input in = contiguous(s, Element::kFloat32, 1);
  const Quantized want = expected(s, 2, 16, in);
  for (const bool inner_last : {false, true}) {
    QuantizeParams p{};
    p.outer = 2, p.n = 40, p.inner = 24, p.bits = 2, p.group_size = 16;
    p.x = in.x.data(), p.type = Element::kFloat32;
    p.x_outer_stride = 960, p.x_n_stride = 24, p.x_inner_stride = 1;
    std::vector<float> values(want.values.size()), scale(want.scale.size());
    if (inner_last) p.scale = scale.data();
    if (!inner_last) p.values = values.data();
    kernels().quantize(p, 0, 2);
    if (inner_last) {
      EXPECT_EQ(scale, want.scale);
    } else {
      EXPECT_EQ(values, want.values);
    }
  }
}

TEST_P(Quantize, ZeroUnitsTouchNothing) {
  QuantizeParams q{};
  q.bits = 2, q.group_size = 32;
  kernels().quantize(q, 0, 0);
  DequantizeParams d{};
  d.bits = 2, d.group_size = 32;
  kernels().dequantize(d, 0, 0);
}

TEST_P(Quantize, GoldenWords) {
  const Shape s{1, 16, 1};
  Input in = contiguous(s, Element::kFloat32, 1);
  for (int64_t i = 0; i < 16; i++) in.x.set(i, static_cast<float>(i % 4));
  EXPECT_EQ(quantize(s, 2, 16, in).codes, (std::vector<uint8_t>{0xE4, 0xE4, 0xE4, 0xE4}));
  for (int64_t i = 0; i < 16; i++) in.x.set(i, static_cast<float>(i));
  EXPECT_EQ(quantize(s, 4, 16, in).codes, (std::vector<uint8_t>{0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE}));
}

// The notebook's quantize_grouped, where a scale of 0 counts as 1.
TEST_P(Quantize, EqualsTheNotebook) {
  for (const Shape& s : {Shape{1, 1024, 128}, Shape{64, 128, 1}}) {
    for (const int64_t bits : kBitWidths) {
      Input in = contiguous(s, Element::kFloat32, 11);
      for (int64_t i = 0; i < 32; i++) in.x.set(i * s.inner, 1.5f);
      const Quantized q = quantize(s, bits, 32, in);
      const auto levels = static_cast<float>((1 << bits) - 1);
      for (int64_t o = 0; o < s.outer; o++) {
        for (int64_t j = 0; j < s.inner; j++) {
          for (int64_t g = 0; g < s.n / 32; g++) {
            float lo = in.at(o, g * 32, j), hi = lo;
            for (int64_t i = 0; i < 32; i++)
              lo = std::min(lo, in.at(o, g * 32 + i, j)), hi = std::max(hi, in.at(o, g * 32 + i, j));
            float scale = (hi - lo) / levels;
            if (scale == 0) scale = 1;
            for (int64_t i = g * 32; i < (g + 1) * 32; i++) {
              const float code = std::min(std::max(std::nearbyint((in.at(o, i, j) - lo) / scale), 0.0f), levels);
              const float product = code * scale;
              ASSERT_EQ(q.values[static_cast<size_t>((o * s.n + i) * s.inner + j)], lo + product);
            }
          }
        }
      }
    }
  }
}

TEST_P(Quantize, NotFinite) {
  for (const Element type : kElements) {
    for (const int64_t bits : kBitWidths) {
      for (const Shape& s : {Shape{2, 64, 1}, Shape{1, 64, 20}}) {
        for (int64_t index = 0; index < 32; index++) {
          for (const float bad : {kNaN, kInf, -kInf}) {
            Input in = contiguous(s, type, 2);
            in.x.set((32 + index) * s.inner + (s.inner > 1 ? 9 : 0), bad);
            const Quantized q = quantize(s, bits, 32, in);
            ASSERT_TRUE(q == expected(s, bits, 32, in)) << index;
            int64_t nans = 0;
            for (const float x : q.values) nans += std::isnan(x);
            ASSERT_EQ(nans, 32);
          }
        }
      }
    }
  }
}

TEST_P(Quantize, ConstantsAndHardRanges) {
  for (const std::vector<float>& data : {std::vector<float>{100, 100},
                                         {-9, -9},
                                         {0.0f, -0.0f},
                                         {-0.0f, 0.0f},
                                         {-0.0f, -0.0f},
                                         {0, 1e-40f, 2e-40f, 3e-40f},
                                         {0, std::numeric_limits<float>::denorm_min()},
                                         {-3e38f, 3e38f},
                                         {1e38f, 3e38f}}) {
    for (const int64_t bits : kBitWidths) {
      for (const Shape& s : {Shape{1, 32, 1}, Shape{1, 32, 9}}) {
        Input in = contiguous(s, Element::kFloat32, 1);
        for (int64_t i = 0; i < in.x.size(); i++) in.x.set(i, data[static_cast<size_t>(i / s.inner) % data.size()]);
        check(s, bits, 32, in);
      }
    }
  }
}

TEST_P(Quantize, FiniteWithSubnormalsFlushed) {
  if (!FlushDenormals::supported) GTEST_SKIP() << "no known switch for subnormals on this machine";
  for (const Shape& s : {Shape{1, 32, 1}, Shape{1, 32, 9}}) {
    for (const int64_t bits : kBitWidths) {
      Input in = contiguous(s, Element::kFloat32, 1);
      for (int64_t i = 0; i < in.x.size(); i++) in.x.set(i, 1e-40f * static_cast<float>(i));
      const Quantized before = quantize(s, bits, 32, in);
      const FlushDenormals flush;
      const Quantized q = quantize(s, bits, 32, in);
      const Array back = dequantize(s, bits, 32, before, Element::kFloat32);
      for (const float x : q.values) EXPECT_TRUE(std::isfinite(x));
      for (int64_t i = 0; i < back.size(); i++) EXPECT_TRUE(std::isfinite(back.get(i)));
    }
  }
}

TEST_P(Quantize, DequantizeGivesTheValues) {
  for (const Shape& s : kShapes) {
    for (const int64_t bits : kBitWidths) {
      for (const int64_t group : {1, 3, 16, 32, 1000}) {
        const Input in = contiguous(s, Element::kFloat32, 4);
        const Quantized q = expected(s, bits, group, in);
        for (const Element type : kElements) {
          Array want(type, static_cast<int64_t>(q.values.size()));
          for (int64_t i = 0; i < want.size(); i++) want.set(i, q.values[static_cast<size_t>(i)]);
          EXPECT_EQ(dequantize(s, bits, group, q, type).bytes(), want.bytes());
        }
      }
    }
  }
}

// Codes, scale and zero as views: each with strides of its own, expanded too.
TEST_P(Quantize, DequantizeAnyStrides) {
  for (const int64_t bits : kBitWidths) {
    const int64_t groups = 3, bytes = (40 * bits + 7) / 8;
    Random random(1);
    std::vector<uint8_t> codes(static_cast<size_t>(2 * bytes * 24 * 3));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(random.below(256));
    std::vector<float> scale(static_cast<size_t>(2 * groups * 24 * 3)), zero(scale.size());
    for (float& x : scale) x = random.normal();
    for (float& x : zero) x = random.normal();
    const int64_t views[][3] = {
        {bytes * 24, 24, 1}, {bytes * 48, 48, 2}, {bytes * 24, 1, bytes}, {0, 24, 1}, {bytes, 1, 0}};
    for (const auto& view : views) {
      for (const int turn : {0, 1, 2}) {
        DequantizeParams p{};
        p.outer = 2, p.n = 40, p.inner = 24, p.bits = bits, p.group_size = 16;
        p.codes = codes.data(), p.scale = scale.data(), p.zero = zero.data();
        const int64_t scales[3][3] = {{groups * 24, 24, 1}, {groups, 1, 2 * groups}, {0, 0, turn}};
        for (int i = 0; i < 3; i++)
          p.codes_strides[i] = view[i], p.scale_strides[i] = scales[turn][i], p.zero_strides[i] = scales[2 - turn][i];
        for (const Element type : kElements) {
          Array out(type, 2 * 40 * 24), want(type, 2 * 40 * 24);
          p.out = out.data(), p.type = type;
          kernels().dequantize(p, 0, 2);
          for (int64_t o = 0; o < 2; o++) {
            for (int64_t i = 0; i < 40; i++) {
              for (int64_t j = 0; j < 24; j++) {
                int code = 0;
                for (int64_t b = 0; b < bits; b++) {
                  const int64_t bit = i * bits + b;
                  code |= (codes[static_cast<size_t>(o * view[0] + bit / 8 * view[1] + j * view[2])] >> (bit % 8) & 1)
                          << b;
                }
                const auto at = [&](const int64_t* st) {
                  return static_cast<size_t>(o * st[0] + i / 16 * st[1] + j * st[2]);
                };
                const float product = static_cast<float>(code) * scale[at(p.scale_strides)];
                want.set((o * 40 + i) * 24 + j, zero[at(p.zero_strides)] + product);
              }
            }
          }
          EXPECT_EQ(out.bytes(), want.bytes()) << bits << " " << turn;
        }
      }
    }
  }
}

// Scales that quantize never gives: defined, no trap.
TEST_P(Quantize, DequantizeOddScales) {
  const Shape s{1, 16, 1};
  Quantized q;
  q.codes.assign(4, 0xE4);
  for (const float scale : {kNaN, kInf, -kInf, -1.0f}) {
    q.scale = {scale};
    q.zero = {1.0f};
    const Array out = dequantize(s, 2, 16, q, Element::kFloat32);
    for (int64_t i = 0; i < 16; i++) {
      const float product = static_cast<float>(i % 4) * scale;
      const float want = 1.0f + product;
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(out.get(i)));
      } else {
        EXPECT_EQ(out.get(i), want);
      }
    }
  }
  q.scale = {40000.0f}, q.zero = {-60000.0f};
  const Array half = dequantize(s, 2, 16, q, Element::kFloat16);
  EXPECT_EQ(half.get(3), 60000.0f);
  q.scale = {50000.0f};
  EXPECT_EQ(dequantize(s, 2, 16, q, Element::kFloat16).get(3), 65504.0f);  // 90000 is not infinity
}

// Scales and zeros that quantize never gives, codes at random, every way in which rows and columns come, units in any
// division.
TEST_P(Quantize, DequantizeEqualsTheScalarKernel) {
  const Shape shapes[] = {{3, 128, 1}, {2, 200, 1}, {5, 37, 1},   {2, 40, 16},  {1, 64, 32},  {2, 40, 47},
                          {1, 33, 64}, {2, 50, 80}, {1, 40, 128}, {2, 35, 200}, {1, 20, 1100}};
  const float wild_values[] = {kNaN, kInf, -kInf, 3e38f, 65504.0f, -70000.0f, 1e-40f};
  for (const Shape& s : shapes) {
    for (const int64_t bits : kBitWidths) {
      for (const int64_t group : {1, 3, 16, 24, 32, 64, 1000}) {
        for (const bool wild : {false, true}) {
          Random random(static_cast<uint32_t>(s.n + bits + group));
          Packed x(s, bits, group);
          for (uint8_t& c : x.codes) c = static_cast<uint8_t>(random.below(256));
          for (std::vector<float>* numbers : {&x.scale, &x.zero}) {
            for (float& f : *numbers) f = wild && random.below(8) == 0 ? wild_values[random.below(7)] : random.normal();
          }
          for (const Element type : kElements) {
            x.p.type = type;
            check_dequantize(x.p, random.below(s.outer * ceil_div(s.inner, kInnerBlock) + 1));
          }
        }
      }
    }
  }
}

// Outputs larger than most caches, which vectors write past them.
TEST_P(Quantize, DequantizeLarge) {
  for (const Shape& s : {Shape{1, 4200, 1024}, Shape{65000, 136, 1}, Shape{66000, 128, 1}}) {
    Random random(1);
    Packed x(s, 2, 32);
    for (uint8_t& c : x.codes) c = static_cast<uint8_t>(random.below(256));
    for (float& f : x.scale) f = static_cast<float>(random.below(1000));
    for (float& f : x.zero) f = static_cast<float>(random.below(1000));
    for (const Element type : {Element::kFloat32, Element::kBFloat16}) {
      x.p.type = type;
      check_dequantize(x.p, 7);
    }
  }
}

KIVI_TEST_EVERY_ISA(Quantize);

}  // namespace
}  // namespace kivi::cpu
