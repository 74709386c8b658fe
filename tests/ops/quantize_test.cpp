// kivi::quantize, dequantize and fake_quantize through the dispatcher. The reference is the quantiser of the KIVI
// notebook, written with the same tensor operations in the same order.
#include <sys/mman.h>

#include <cmath>
#include <thread>

#include "tests/ops/support.h"

namespace kivi::test {
namespace {

// The notebook's quantize_grouped. It pads a short last group with zeros, so it is the reference where the axis is a
// multiple of the group.
at::Tensor notebook(const at::Tensor& input, int64_t axis, int64_t bits, int64_t group) {
  const double levels = static_cast<double>((int64_t{1} << bits) - 1);
  at::Tensor x = input.to(at::kFloat);
  std::vector<int64_t> dims(static_cast<size_t>(x.dim()));
  for (int64_t i = 0; i < x.dim(); i++) dims[static_cast<size_t>(i)] = i;
  std::swap(dims[0], dims[static_cast<size_t>(axis < 0 ? axis + x.dim() : axis)]);
  at::Tensor xt = x.permute(dims).contiguous();
  const int64_t length = xt.size(0), groups = length / group;
  const std::vector<int64_t> rest(xt.sizes().begin() + 1, xt.sizes().end());
  std::vector<int64_t> grouped = {groups, group};
  grouped.insert(grouped.end(), rest.begin(), rest.end());
  const at::Tensor in_groups = xt.reshape(grouped);
  const at::Tensor x_min = in_groups.amin(1, true), x_max = in_groups.amax(1, true);
  at::Tensor scale = (x_max - x_min) / levels;
  scale = at::where(scale == 0, at::ones_like(scale), scale);
  const at::Tensor q = at::round((in_groups - x_min) / scale).clamp(0, levels);
  return (x_min + q * scale).reshape(xt.sizes()).permute(dims);
}

// Any length: the whole groups, then the real elements of the last one.
at::Tensor reference(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group) {
  const int64_t n = x.size(axis), whole = n / group * group;
  std::vector<at::Tensor> parts;
  if (whole > 0) parts.push_back(notebook(x.narrow(axis, 0, whole), axis, bits, group));
  if (whole < n) parts.push_back(notebook(x.narrow(axis, whole, n - whole), axis, bits, n - whole));
  return at::cat(parts, axis);
}

at::Tensor round_trip(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group,
                      at::ScalarType type = at::kFloat) {
  const auto [codes, scale, zero] = quantize(x, axis, bits, group);
  return dequantize(codes, scale, zero, axis, bits, group, x.size(axis), type);
}

// All results of one input: the two calls and the fused one.
std::vector<at::Tensor> all_results(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group) {
  const auto [codes, scale, zero] = quantize(x, axis, bits, group);
  return {codes, scale, zero, fake_quantize(x, axis, bits, group),
          dequantize(codes, scale, zero, axis, bits, group, x.size(axis), x.scalar_type())};
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want, const std::string& what) {
  static const char* const kNames[] = {"codes", "scale", "zero", "fake_quantize", "dequantize"};
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << what << ": " << kNames[i];
}

// Code i of one row of a dense little-endian bit string.
int64_t code_at(const uint8_t* bytes, int64_t i, int64_t bits) {
  int64_t code = 0;
  for (int64_t b = 0; b < bits; b++) code |= ((bytes[(i * bits + b) / 8] >> ((i * bits + b) % 8)) & 1) << b;
  return code;
}

TEST(Quantize, FakeQuantizeIsTheNotebooksToTheBit) {
  const std::vector<std::vector<int64_t>> shapes = {{64}, {64, 48}, {32, 64, 16}, {2, 32, 64, 16}, {2, 16, 3, 32, 4}};
  uint64_t seed = 1;
  for (const auto& shape : shapes) {
    const at::Tensor x = randn(shape, seed++) * 3 + 0.5;
    for (int64_t axis = -x.dim(); axis < x.dim(); axis++) {
      for (int64_t bits : kAllBits) {
        for (int64_t group : {1, 2, 4, 8, 16, 32, 64}) {
          if (x.size(axis) % group != 0) continue;
          ASSERT_TRUE(same_bits(fake_quantize(x, axis, bits, group), notebook(x, axis, bits, group)))
              << x.sizes() << " axis " << axis << " bits " << bits << " group " << group;
        }
      }
    }
  }
}

TEST(Quantize, NotebookDataWithOutlierChannels) {
  at::Tensor k = randn({1024, 128}, 7) * 0.5;
  for (int64_t channel : {3, 17, 40, 88}) k.select(1, channel).mul_(5.0);
  for (int64_t bits : kAllBits) {
    EXPECT_TRUE(same_bits(fake_quantize(k, 0, bits, 32), notebook(k, 0, bits, 32))) << bits;
    EXPECT_TRUE(same_bits(fake_quantize(k, 1, bits, 32), notebook(k, 1, bits, 32))) << bits;
  }
}

TEST(Quantize, ShortLastGroupUsesItsRealElementsOnly) {
  // All values lie far from 0: a padding of zeros would widen the range.
  for (int64_t n : {1, 5, 31, 33, 47, 63, 65, 100}) {
    const at::Tensor x = randn({3, n, 7}, static_cast<uint64_t>(n)) + 40.0;
    for (int64_t bits : kAllBits) {
      EXPECT_TRUE(same_bits(fake_quantize(x, 1, bits, 32), reference(x, 1, bits, 32))) << n << " at " << bits;
      const auto [codes, scale, zero] = quantize(x, 1, bits, 32);
      EXPECT_EQ(scale.size(1), (n + 31) / 32);
      EXPECT_GT(zero.min().item<float>(), 30.0f);
    }
  }
}

TEST(Quantize, FakeEqualsDequantizeOfQuantizeToTheBit) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (int64_t bits : kAllBits) {
      for (int64_t group : {1, 3, 32, 200}) {
        const at::Tensor x = randn({5, 70, 9}, static_cast<uint64_t>(bits), type);
        for (int64_t axis : {0, 1, 2}) {
          ASSERT_TRUE(same_bits(round_trip(x, axis, bits, group), fake_quantize(x, axis, bits, group)))
              << type << " axis " << axis << " bits " << bits << " group " << group;
        }
      }
    }
  }
}

TEST(Quantize, GoldenWords) {
  const at::Tensor two = at::arange(16, at::kFloat).remainder(4);
  const auto [codes2, scale2, zero2] = quantize(two, 0, 2, 16);
  ASSERT_EQ(codes2.numel(), 4);
  EXPECT_EQ(codes2.const_data_ptr<uint8_t>()[0], 0xE4);
  EXPECT_EQ(*reinterpret_cast<const uint32_t*>(codes2.const_data_ptr<uint8_t>()), 0xE4E4E4E4u);
  EXPECT_EQ(scale2.item<float>(), 1.0f);
  EXPECT_EQ(zero2.item<float>(), 0.0f);
  // 15 in the second word makes the scale 1.
  const at::Tensor four = floats({0, 1, 2, 3, 4, 5, 6, 7, 15, 0, 0, 0, 0, 0, 0, 0});
  const auto [codes4, scale4, zero4] = quantize(four, 0, 4, 16);
  ASSERT_EQ(codes4.numel(), 8);
  EXPECT_EQ(*reinterpret_cast<const uint32_t*>(codes4.const_data_ptr<uint8_t>()), 0x76543210u);
  EXPECT_EQ(scale4.item<float>(), 1.0f);
}

TEST(Quantize, DefaultsAreTwoBitsInGroupsOf32) {
  const at::Tensor x = randn({3, 64}, 5);
  EXPECT_TRUE(same_bits(fake_quantize(x, 1), fake_quantize(x, 1, 2, 32)));
  EXPECT_EQ(std::get<0>(quantize(x, 1)).sizes(), at::IntArrayRef({3, 16}));
  EXPECT_EQ(std::get<1>(quantize(x, 1)).sizes(), at::IntArrayRef({3, 2}));
}

// C06
TEST(Quantize, PackedSizeIsCeilOfBitsAndCodesComeBack) {
  for (int64_t bits : kAllBits) {
    const int64_t top = (int64_t{1} << bits) - 1;
    for (int64_t n = 1; n <= 130; n++) {
      // Row 0 a pattern with both ends of the range, then `top` at each place in turn.
      at::Tensor x = at::cat({((at::arange(n, at::kLong) * 7 + 3) % (top + 1)).to(at::kFloat).unsqueeze(0),
                              at::eye(n) * static_cast<double>(top)});
      if (n >= 2) x[0][0] = 0, x[0][1] = static_cast<double>(top);
      const auto [codes, scale, zero] = quantize(x, 1, bits, n);
      const int64_t bytes = (n * bits + 7) / 8;
      ASSERT_EQ(codes.sizes(), at::IntArrayRef({n + 1, bytes})) << n << " at " << bits;
      const int64_t used = n * bits - (bytes - 1) * 8;
      for (int64_t row = 0; row <= n; row++) {
        const uint8_t* packed = codes.const_data_ptr<uint8_t>() + row * bytes;
        ASSERT_EQ(packed[bytes - 1] >> used, 0) << "unused bits of row " << row << ", " << n << " at " << bits;
        if (n < 2) continue;
        for (int64_t i = 0; i < n; i++) {
          const auto want = static_cast<int64_t>(x.const_data_ptr<float>()[row * n + i]);
          ASSERT_EQ(code_at(packed, i, bits), want) << "code " << i << " of row " << row << ", " << n << " at " << bits;
        }
      }
      ASSERT_TRUE(same_bits(dequantize(codes, scale, zero, 1, bits, n, n), x)) << n << " at " << bits;
    }
  }
}

TEST(Quantize, PackingRunsAlongTheAxis) {
  const at::Tensor x = randn({6, 37, 5}, 11);
  for (int64_t bits : kAllBits) {
    const auto [codes, scale, zero] = quantize(x, 1, bits, 16);
    const auto [codes_t, scale_t, zero_t] = quantize(x.transpose(1, 2).contiguous(), 2, bits, 16);
    EXPECT_TRUE(same_bits(codes.transpose(1, 2), codes_t)) << bits;
    EXPECT_TRUE(same_bits(scale.transpose(1, 2), scale_t)) << bits;
    EXPECT_TRUE(same_bits(zero.transpose(1, 2), zero_t)) << bits;
  }
}

// C17
TEST(Quantize, AnyStridesEqualTheContiguousCopyAndInputsStay) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor base = randn({2, 3, 16, 32}, 21, type);
    std::vector<std::pair<const char*, at::Tensor>> views = {
        {"transposed", randn({2, 16, 3, 32}, 22, type).transpose(1, 2)},
        {"every second channel", randn({2, 3, 16, 64}, 23, type).slice(3, 0, 64, 2)},
        {"narrow with an offset", randn({2, 3, 30, 32}, 24, type).narrow(2, 5, 16)},
        {"offset of one element",
         randn({2 * 3 * 16 * 32 + 1}, 25, type).narrow(0, 1, 2 * 3 * 16 * 32).view({2, 3, 16, 32})},
        {"expanded batch", randn({1, 3, 16, 32}, 26, type).expand({2, 3, 16, 32})},
        {"expanded heads", randn({2, 1, 16, 32}, 27, type).expand({2, 3, 16, 32})},
        {"zero stride in the last axis", randn({2, 3, 16, 1}, 28, type).expand({2, 3, 16, 32})},
        {"zero stride in the token axis", randn({2, 3, 1, 32}, 29, type).expand({2, 3, 16, 32})},
        {"all strides zero", randn({1, 1, 1, 1}, 30, type).expand({2, 3, 16, 32})},
        {"flipped", base.flip({2})},
        {"channels_last", base.contiguous(at::MemoryFormat::ChannelsLast)},
        {"permuted", randn({32, 16, 3, 2}, 31, type).permute({3, 2, 1, 0})},
        {"overlapping", randn({200}, 32, type).as_strided({2, 3, 16, 32}, {50, 20, 2, 1})},
    };
    for (const auto& [what, view] : views) {
      const at::Tensor contiguous = view.contiguous().clone();
      for (int64_t axis = 0; axis < 4; axis++) {
        for (int64_t bits : {1, 2, 3, 8}) {
          const auto got = all_results(view, axis, bits, 16);
          expect_same(got, all_results(contiguous, axis, bits, 16),
                      std::string(what) + " axis " + std::to_string(axis) + " bits " + std::to_string(bits));
          for (const at::Tensor& t : got) EXPECT_TRUE(t.is_contiguous()) << what;
        }
      }
      EXPECT_TRUE(same_bits(view, contiguous)) << what << " was changed";
    }
  }
}

TEST(Quantize, CodesScaleAndZeroMayHaveAnyStrides) {
  const at::Tensor x = randn({4, 50, 6}, 33);
  for (int64_t bits : kAllBits) {
    for (int64_t axis : {0, 1, 2}) {
      const auto [codes, scale, zero] = quantize(x, axis, bits, 16);
      const at::Tensor want = dequantize(codes, scale, zero, axis, bits, 16, x.size(axis));
      // Prefixes of larger buffers that hold garbage behind them.
      const auto prefix = [](const at::Tensor& t) {
        at::Tensor big = at::full({t.size(0) + 2, t.size(1) + 3, t.size(2) + 1}, 250, t.options());
        at::Tensor view = big.narrow(0, 1, t.size(0)).narrow(1, 2, t.size(1)).narrow(2, 0, t.size(2));
        view.copy_(t);
        return view;
      };
      const auto reversed = [](const at::Tensor& t) { return t.permute({2, 1, 0}).contiguous().permute({2, 1, 0}); };
      EXPECT_TRUE(
          same_bits(dequantize(prefix(codes), prefix(scale), prefix(zero), axis, bits, 16, x.size(axis)), want));
      EXPECT_TRUE(
          same_bits(dequantize(reversed(codes), reversed(scale), prefix(zero), axis, bits, 16, x.size(axis)), want));
    }
  }
  const auto [codes, scale, zero] = quantize(x.narrow(0, 0, 1), 1, 2, 16);
  const auto wide = [](const at::Tensor& t) { return t.expand({5, t.size(1), t.size(2)}); };
  EXPECT_TRUE(same_bits(dequantize(wide(codes), wide(scale), wide(zero), 1, 2, 16, 50),
                        wide(dequantize(codes, scale, zero, 1, 2, 16, 50))));
}

TEST(Quantize, ArithmeticIsFloat32WhateverTheInput) {
  for (auto type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor x = (randn({40, 33}, 41) * 20).to(type);
    for (int64_t bits : kAllBits) {
      for (int64_t axis : {0, 1}) {
        const auto [codes, scale, zero] = quantize(x, axis, bits, 32);
        const auto [codes_f, scale_f, zero_f] = quantize(x.to(at::kFloat), axis, bits, 32);
        EXPECT_TRUE(same_bits(codes, codes_f));
        EXPECT_TRUE(same_bits(scale, scale_f));
        EXPECT_TRUE(same_bits(zero, zero_f));
        EXPECT_EQ(scale.scalar_type(), at::kFloat);
        const at::Tensor whole = dequantize(codes, scale, zero, axis, bits, 32, x.size(axis));
        EXPECT_TRUE(same_bits(dequantize(codes, scale, zero, axis, bits, 32, x.size(axis), type), whole.to(type)));
      }
    }
  }
}

// C01
TEST(Quantize, ConstantGroupsComeBackExactly) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    at::Tensor x = at::zeros({1, 1, 6, 32}, type);
    x[0][0][0].fill_(100.0);
    x[0][0][1].fill_(-9.0);
    x[0][0][3].slice(0, 1, 32, 2).fill_(-0.0);
    x[0][0][4].fill_(0.01);
    x[0][0][5].fill_(-60000.0);
    for (int64_t bits : kAllBits) {
      for (const auto& [input, axis] :
           {std::pair<at::Tensor, int64_t>{x, 3}, {x.transpose(2, 3).contiguous(), 2}, {x.transpose(2, 3), 2}}) {
        const auto [codes, scale, zero] = quantize(input, axis, bits, 32);
        EXPECT_EQ(codes.max().item<int>(), 0);
        EXPECT_TRUE(scale.isfinite().all().item<bool>());
        EXPECT_GE(scale.min().item<float>(), 0.0f);
        EXPECT_EQ(max_difference(dequantize(codes, scale, zero, axis, bits, 32, 32, type), input), 0.0) << bits;
        EXPECT_EQ(max_difference(fake_quantize(input, axis, bits, 32), input), 0.0) << bits;
      }
    }
  }
}

// C02, C03
TEST(Quantize, HalfRangeAndSmallSpreads) {
  const auto half = [](const std::vector<double>& v) { return floats(v, at::kHalf); };
  const auto expect_exact = [](const at::Tensor& x, int64_t bits) {
    EXPECT_TRUE(same_bits(round_trip(x, 0, bits, x.numel(), x.scalar_type()), x)) << x << " at " << bits;
  };
  expect_exact(half({1, 1, 1, 1.0009765625}), 8);
  expect_exact(half({-60000, 60000}), 2);
  expect_exact(half({-60000, 60000}), 1);
  expect_exact(half({1000, 1000.5, 1001}), 8);
  expect_exact(floats({300, 302, 304, 306}, at::kBFloat16), 2);
  expect_exact(half({5, 7}), 1);
  const at::Tensor tiny = half({0, 0, 0, std::ldexp(1.0, -24)});
  EXPECT_LE(max_difference(round_trip(tiny, 0, 8, 4, at::kHalf), tiny), std::ldexp(1.0, -24));
  const at::Tensor widest = half({-65504, 65504});
  for (int64_t bits : kAllBits) {
    EXPECT_LE(max_difference(round_trip(widest, 0, bits, 2, at::kHalf), widest), bits == 8 ? 62.0 : 32.0) << bits;
  }
  const at::Tensor offset = (at::arange(32, at::kFloat) * 0.5 + 512).to(at::kHalf);
  EXPECT_LE(max_difference(round_trip(offset, 0, 4, 32, at::kHalf), offset), 0.52 + 0.25);
  const at::Tensor negative = (at::arange(32, at::kFloat) * -0.5 - 1000.5).to(at::kHalf);
  EXPECT_LE(max_difference(round_trip(negative, 0, 4, 32, at::kHalf), negative), 0.52 + 0.25);
  // A value that rounds to infinity in float16 becomes the largest float16.
  const at::Tensor big =
      dequantize(at::full({1}, 1, at::kByte), at::full({1}, 70000.0), at::zeros({1}), 0, 1, 8, 1, at::kHalf);
  EXPECT_EQ(big.item<float>(), 65504.0f);
}

// C04
TEST(Quantize, SubnormalsAndFlushToZero) {
  const at::Tensor x = floats({0, 1e-40, 2e-40, 3e-40});
  const auto [codes, scale, zero] = quantize(x, 0, 2, 4);
  EXPECT_EQ(codes.item<int>(), 0xE4);
  EXPECT_LE(max_difference(dequantize(codes, scale, zero, 0, 2, 4, 4), x), std::numeric_limits<float>::denorm_min());
  const at::Tensor smallest = at::zeros({32});
  smallest[7] = std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(round_trip(smallest, 0, 8, 32).isfinite().all().item<bool>());
  volatile float subnormal = 1e-40f;
  EXPECT_NE(subnormal / 2, 0.0f) << "the library turned subnormals off";
  EXPECT_TRUE(std::isnan(kNan) && std::isinf(kInf));
  if (at::globalContext().setFlushDenormal(true)) {
    for (int64_t bits : kAllBits) {
      EXPECT_TRUE(fake_quantize(x, 0, bits, 4).isfinite().all().item<bool>());
      EXPECT_TRUE(round_trip(smallest, 0, bits, 32).isfinite().all().item<bool>());
    }
    at::globalContext().setFlushDenormal(false);
  }
}

// C05
TEST(Quantize, NanOrInfSpoilsItsOwnGroupOnly) {
  for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const at::Tensor clean = randn({3, 96}, 51, type);
    for (int64_t bits : kAllBits) {
      const at::Tensor want = fake_quantize(clean, 1, bits, 32);
      for (const auto& bad : std::vector<std::vector<float>>{{kNan}, {kInf}, {-kInf}, {kInf, -kInf}, {kNan, kInf}}) {
        for (int64_t index : {0, 7, 15, 16, 30}) {
          at::Tensor x = clean.clone();
          for (size_t i = 0; i < bad.size(); i++) x[1][32 + index + static_cast<int64_t>(i)] = bad[i];
          for (const at::Tensor& input : {x, x.t().contiguous().t()}) {
            const auto [codes, scale, zero] = quantize(input, 1, bits, 32);
            const at::Tensor got = dequantize(codes, scale, zero, 1, bits, 32, 96);
            ASSERT_TRUE(got[1].narrow(0, 32, 32).isnan().all().item<bool>()) << type << " " << bits << " " << index;
            ASSERT_TRUE(same_bits(got[0], want[0]));
            ASSERT_TRUE(same_bits(got[2], want[2]));
            ASSERT_TRUE(same_bits(got[1].narrow(0, 0, 32), want[1].narrow(0, 0, 32)));
            ASSERT_TRUE(same_bits(got[1].narrow(0, 64, 32), want[1].narrow(0, 64, 32)));
            ASSERT_TRUE(fake_quantize(input, 1, bits, 32)[1].narrow(0, 32, 32).isnan().all().item<bool>());
          }
        }
      }
    }
  }
}

TEST(Quantize, AnyScaleAndZeroAtDequantize) {
  const at::Tensor codes = at::arange(32, at::kByte).view({1, 32});
  for (float scale : {kNan, kInf, -kInf, -1.0f, 0.0f}) {
    const at::Tensor s = at::full({1, 1}, scale), z = at::full({1, 1}, 2.0);
    for (auto type : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor got = dequantize(codes, s, z, 1, 8, 32, 32, type);
      const at::Tensor want = given_back(at::arange(32, at::kFloat) * s[0] + 2.0, type);
      EXPECT_TRUE(at::allclose(got[0].to(at::kFloat), want.to(at::kFloat), 0, 0, true)) << scale << " " << type << got;
    }
  }
}

// C19
TEST(Quantize, EmptyTensors) {
  const std::vector<std::vector<int64_t>> shapes = {{0, 2, 8, 16}, {1, 0, 8, 16}, {1, 2, 0, 16}, {1, 2, 8, 0}, {0}};
  for (const auto& shape : shapes) {
    const at::Tensor x = at::empty(shape);
    for (int64_t axis = 0; axis < x.dim(); axis++) {
      const auto [codes, scale, zero] = quantize(x, axis, 3, 32);
      EXPECT_EQ(codes.size(axis), (x.size(axis) * 3 + 7) / 8);
      EXPECT_EQ(scale.size(axis), (x.size(axis) + 31) / 32);
      EXPECT_EQ(dequantize(codes, scale, zero, axis, 3, 32, x.size(axis)).sizes(), x.sizes());
      EXPECT_EQ(fake_quantize(x, axis, 3, 32).sizes(), x.sizes());
    }
  }
}

// C21 b
// A tensor without elements may have rows without end to walk through, or sizes whose product
// overflows; of the latter torch makes no contiguous result.
TEST(Quantize, EmptyTensorsOfHugeSizes) {
  constexpr int64_t kHuge = int64_t{1} << 48;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{kHuge, 0}, {0, kHuge}, {kHuge, 0, 64}}) {
    const at::Tensor x = at::empty_strided(sizes, std::vector<int64_t>(sizes.size(), 0), at::kFloat);
    for (int64_t axis = 0; axis < x.dim(); axis++) {
      const auto [codes, scale, zero] = quantize(x, axis, 8, 32);
      EXPECT_EQ(codes.sizes(), x.sizes());
      EXPECT_EQ(dequantize(codes, scale, zero, axis, 8, 32, x.size(axis)).sizes(), x.sizes());
      EXPECT_EQ(fake_quantize(x, axis, 8, 32).sizes(), x.sizes());
    }
  }
  const at::Tensor x = at::empty_strided({0, kHuge, kHuge}, {0, 0, 0}, at::kFloat);
  expect_error([&] { quantize(x, 0, 8, 32); }, {});
}

TEST(Quantize, DefaultDtypeChangesNothing) {
  const at::Tensor x = randn({40, 50}, 61);
  const auto want = all_results(x, 1, 2, 32);
  for (auto type : {at::kDouble, at::kHalf}) {
    const DefaultDtype guard(type);
    expect_same(all_results(x, 1, 2, 32), want, std::string("default ") + toString(type));
  }
}

// C25 b, d
TEST(Quantize, ThreadCountChangesNothing) {
  const at::Tensor x = randn({12, 1000, 33}, 71);
  for (int64_t bits : {1, 2, 3, 8}) {
    for (int64_t axis : {0, 1, 2}) {
      std::vector<at::Tensor> want;
      for (int count : {1, 2, 3, 8}) {
        const Threads guard(count);
        const auto got = all_results(x, axis, bits, 32);
        if (want.empty()) want = got;
        expect_same(got, want, std::to_string(count) + " threads");
      }
    }
  }
}

TEST(Quantize, WorksInsideAParallelRegionAndOnAFreshThread) {
  const at::Tensor x = randn({64, 100}, 72);
  const auto want = all_results(x, 1, 2, 32);
  std::vector<std::vector<at::Tensor>> got(8);
  at::parallel_for(0, 8, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) got[static_cast<size_t>(i)] = all_results(x, 1, 2, 32);
  });
  for (const auto& results : got) expect_same(results, want, "in a parallel region");
  std::vector<at::Tensor> fresh;
  std::thread([&] {
    const c10::InferenceMode guard;
    fresh = all_results(x, 1, 2, 32);
  }).join();
  expect_same(fresh, want, "on a fresh thread in inference mode");
}

// C23 b
TEST(Quantize, NoOutputSharesStorageWithAnInput) {
  for (int64_t bits : kAllBits) {
    const at::Tensor x = at::arange(32, at::kFloat).remainder(2);
    const auto [codes, scale, zero] = quantize(x, 0, bits, 1);
    const at::Tensor fake = fake_quantize(x, 0, bits, 1), back = dequantize(codes, scale, zero, 0, bits, 1, 32);
    const std::vector<at::Tensor> all = {x, codes, scale, zero, fake, back};
    for (size_t i = 0; i < all.size(); i++) {
      for (size_t j = 0; j < i; j++) EXPECT_FALSE(all[i].is_alias_of(all[j])) << i << " and " << j;
    }
  }
}

// C20 a, c
TEST(Quantize, BackwardRaisesAndNamesTheOperator) {
  const at::Tensor x = randn({4, 64}, 81).requires_grad_();
  const at::Tensor fake = fake_quantize(x, 1);
  EXPECT_TRUE(same_bits(fake, fake_quantize(x.detach(), 1)));
  expect_error([&] { fake.sum().backward(); }, {"kivi::fake_quantize"});
  const auto [codes, scale, zero] = quantize(x, 1);
  EXPECT_FALSE(codes.requires_grad());
  expect_error([&, s = scale] { s.sum().backward(); }, {"kivi::quantize"});
  const at::Tensor leaf = scale.detach().clone().requires_grad_();
  const at::Tensor back = dequantize(codes, leaf, zero.detach(), 1, 2, 32, 64);
  expect_error([&] { back.sum().backward(); }, {"kivi::dequantize"});
  EXPECT_FALSE(x.grad().defined());
  const at::NoGradGuard guard;
  EXPECT_FALSE(fake_quantize(x, 1).requires_grad());
}

TEST(Quantize, InferenceTensorsOutsideInferenceMode) {
  at::Tensor x;
  {
    const c10::InferenceMode guard;
    x = randn({4, 64}, 82);
  }
  EXPECT_TRUE(same_bits(fake_quantize(x, 1), fake_quantize(x.clone(), 1)));
}

// C18 a: a batch stride of more than 2^31 elements over address space that is never touched in between.
TEST(Quantize, StridesBeyond31Bits) {
  const int64_t stride = (int64_t{1} << 31) + 64, rows = 32 * 64;
  const size_t bytes = static_cast<size_t>(stride + rows) * 2;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no " << bytes << " bytes of address space";
  {
    const at::Tensor x = at::from_blob(memory, {2, 1, 32, 64}, {stride, rows, 64, 1}, at::TensorOptions(at::kHalf));
    x[0].copy_(randn({1, 32, 64}, 91));
    x[1].copy_(randn({1, 32, 64}, 92));
    for (int64_t axis : {2, 3}) {
      expect_same(all_results(x, axis, 2, 32), all_results(x.contiguous(), axis, 2, 32), "far rows");
    }
    const at::Tensor packed =
        at::from_blob(memory, {2, 1, 32, 16}, {2 * stride, rows, 16, 1}, at::TensorOptions(at::kByte));
    const auto [codes, scale, zero] = quantize(randn({2, 1, 32, 64}, 93), 3, 2, 32);
    packed.copy_(codes);
    EXPECT_TRUE(same_bits(dequantize(packed, scale, zero, 3, 2, 32, 64), dequantize(codes, scale, zero, 3, 2, 32, 64)));
  }
  munmap(memory, bytes);
}

}  // namespace
}  // namespace kivi::test
