// The cases C01 to C06 and C17 to C19 for quantize, dequantize and fake_quantize: the inputs of the case, then others
// of the same kind. What a case says about the cache and about attention is in the files cases_cache_test.cpp and
// cases_attention_test.cpp. Left out: what it says about CUDA.
#include <sys/mman.h>

#include <atomic>
#include <random>

#include "tests/ops/cases.h"

namespace kivi::test {
namespace {

// Every code along the last axis of [rows, bytes], read bit by bit.
at::Tensor unpacked(const at::Tensor& codes, int64_t bits, int64_t n) {
  at::Tensor out = at::zeros({codes.size(0), n}, at::kLong);
  const at::Tensor bytes = codes.contiguous();
  for (int64_t row = 0; row < codes.size(0); row++) {
    const uint8_t* p = bytes.const_data_ptr<uint8_t>() + row * codes.size(1);
    for (int64_t i = 0; i < n * bits; i++) {
      out.mutable_data_ptr<int64_t>()[row * n + i / bits] |= int64_t{p[i / 8] >> i % 8 & 1} << i % bits;
    }
  }
  return out;
}

// ---------------------------------------------------------------------------------------------- C01

TEST(C01_Constants, ComeBackExactlyWithCodesOfZero) {
  const double mixed_zero = 1e-300;  // stands for +0 and -0 in turn
  const std::vector<double> of_the_case = {100.0, -9.0, 0.0, mixed_zero, 0.01};
  const std::vector<double> others = {-0.0, 1.0 / 3, 65504.0, -65504.0, 6e-8, -6.1e-5, 0.1, -1e-3, 2048.5, 17.25};
  for (const auto& fills : {of_the_case, others}) {
    for (const auto type : kTypes) {
      const auto rows = static_cast<int64_t>(fills.size());
      at::Tensor x = at::zeros({1, 1, rows, 32}, type);
      for (int64_t r = 0; r < rows; r++) {
        const double fill = fills[static_cast<size_t>(r)];
        x[0][0][r].fill_(fill == mixed_zero ? 0.0 : fill);
        if (fill == mixed_zero) x[0][0][r].slice(0, 1, 32, 2).fill_(-0.0);
      }
      const at::Tensor along_tokens = x.transpose(2, 3).contiguous();
      for (const int64_t bits : kAllBits) {
        for (const int64_t group : {32, 16, 5, 1, 40}) {
          for (const auto& [input, axis] : {std::pair<at::Tensor, int64_t>{x, 3}, {along_tokens, 2}}) {
            const Quantized r = quantized(input, axis, bits, group);
            EXPECT_EQ(r.codes.max().item<int>(), 0) << type << " " << bits << " " << group;
            EXPECT_TRUE(all_finite(r.scale) && r.scale.min().item<float>() >= 0.0f);
            EXPECT_EQ(max_difference(r.back, input), 0.0) << type << " " << bits << " " << group;
            EXPECT_EQ(max_difference(r.fake, input), 0.0) << type << " " << bits << " " << group;
          }
        }
      }
    }
  }
}

// The largest float32 values, and a constant group between two groups that are not.
TEST(C01_Constants, BetweenOtherGroupsAndAtTheEndsOfFloat32) {
  for (const double fill : {3.4e38, -3.4e38, 1e-38, 1e-45}) {
    at::Tensor x = randn({3, 96}, 1);
    x.narrow(1, 32, 32).fill_(fill);
    for (const int64_t bits : kAllBits) {
      const Quantized r = quantized(x, 1, bits, 32);
      EXPECT_EQ(max_difference(r.back.narrow(1, 32, 32), x.narrow(1, 32, 32)), 0.0) << fill << " " << bits;
      EXPECT_TRUE(
          within_tolerance(r.back.unflatten(1, {3, 32}), x.unflatten(1, {3, 32}), 2, bits, at::kFloat, at::kFloat));
    }
  }
}

// ---------------------------------------------------------------------------------------------- C02, C03

TEST(C02_HalfRange, ReciprocalRangeProductAndTopCode) {
  const auto back = [](const std::vector<double>& values, int64_t bits) {
    const at::Tensor x = floats(values, at::kHalf);
    return quantized(x, 0, bits, x.numel()).back;
  };
  const std::vector<double> step = {1, 1, 1, 1.0009765625}, tiny = {0, 0, 0, std::ldexp(1.0, -24)};
  EXPECT_TRUE(same_bits(back(step, 8), floats(step, at::kHalf)));
  EXPECT_LE(max_difference(back(tiny, 8), floats(tiny, at::kHalf)), std::ldexp(1.0, -24));
  for (const int64_t bits : {1, 2}) {  // scale and zero are float32, so that 1 bit is exact too
    EXPECT_TRUE(same_bits(back({-60000, 60000}, bits), floats({-60000, 60000}, at::kHalf))) << bits;
  }
  for (const int64_t bits : kAllBits) {
    EXPECT_LE(max_difference(back({-65504, 65504}, bits), floats({-65504, 65504}, at::kHalf)), bits == 8 ? 62 : 32);
  }
}

// Pairs and groups from the whole of float16 and bfloat16, by their bit patterns.
TEST(C02_HalfRange, AnyFiniteGroupIsWithinTheTolerance) {
  std::mt19937 rng(2);
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    for (const int64_t group : {2, 4, 33}) {
      at::Tensor x = at::empty({200, group}, at::kShort);
      for (int64_t i = 0; i < x.numel(); i++) x.mutable_data_ptr<int16_t>()[i] = static_cast<int16_t>(rng());
      x = at::nan_to_num(x.view(type), 1.0, 2.0, -3.0);
      if (type == at::kBFloat16) x = x.clamp(-1e38, 1e38);  // the span of a group must be a float32
      for (const int64_t bits : kAllBits) {
        EXPECT_TRUE(within_tolerance(quantized(x, 1, bits, group).back, x, 1, bits, at::kFloat, type)) << type;
      }
    }
  }
}

TEST(C03_SmallSpread, OnALargeOffset) {
  const auto expect_exact = [](const std::vector<double>& values, at::ScalarType type, int64_t bits) {
    const at::Tensor x = floats(values, type);
    EXPECT_TRUE(same_bits(quantized(x, 0, bits, x.numel()).back, x)) << x << " at " << bits;
  };
  expect_exact({1000, 1000.5, 1001}, at::kHalf, 8);
  expect_exact({300, 302, 304, 306}, at::kBFloat16, 2);
  expect_exact({5, 7}, at::kHalf, 1);
  expect_exact({-7, -5}, at::kHalf, 1);
  expect_exact({-65504, -65472}, at::kHalf, 1);
  expect_exact({16777214, 16777215}, at::kFloat, 3);
  const at::Tensor i = at::arange(32, at::kFloat);
  for (const at::Tensor& x : {i * 0.5 + 512, i * -0.5 - 1000.5}) {
    EXPECT_LE(max_difference(quantized(x.to(at::kHalf), 0, 4, 32).back, x), 0.52 + 0.25);
  }
  for (const double offset : {1e3, -1e3, 3e4, -6e4, 1e6, -1e7}) {
    for (const auto type : kTypes) {
      if (type == at::kHalf && std::abs(offset) > 65000) continue;
      const at::Tensor x = (randn({40, 32}, 3) + offset).to(type);
      for (const int64_t bits : kAllBits) {
        EXPECT_TRUE(within_tolerance(quantized(x, 1, bits, 32).back, x, 1, bits, at::kFloat, type)) << offset;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- C04

TEST(C04_Subnormals, AreQuantisedAndStayOnForTheProcess) {
  const at::Tensor x = floats({0, 1e-40, 2e-40, 3e-40});
  const Quantized r = quantized(x, 0, 2, 4);
  EXPECT_TRUE(at::equal(unpacked(r.codes.unsqueeze(0), 2, 4)[0], longs({0, 1, 2, 3})));
  EXPECT_LE(max_difference(r.back, x), 1.5e-45);
  for (const double tiny : {1.4e-45, 3e-45, 1e-42, 1e-39}) {
    for (const int64_t group : {2, 7, 32, 33}) {
      at::Tensor spread = at::zeros({group});
      spread[group - 1] = tiny;
      for (const int64_t bits : kAllBits) {
        const Quantized s = quantized(spread, 0, bits, group);
        EXPECT_TRUE(all_finite(s.back) && all_finite(s.scale) && all_finite(s.zero)) << tiny << " " << bits;
        EXPECT_LE(max_difference(s.back, spread), tiny * 1.01) << bits;
        EXPECT_TRUE(same_bits(s.back, s.fake));
      }
    }
  }
  const auto subnormals_are_on = [] {
    volatile float a = 1e-40f, nan = kNan, inf = kInf;
    return a / 2 != 0.0f && std::isnan(nan) && std::isinf(inf);
  };
  EXPECT_TRUE(subnormals_are_on());
  const Threads guard(4);
  std::atomic<int> off{0};
  at::parallel_for(0, 8, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      fake_quantize(x, 0, 2, 4);
      if (!subnormals_are_on()) off++;
    }
  });
  EXPECT_EQ(off, 0);
  if (!at::globalContext().setFlushDenormal(true)) return;  // no switch on this machine
  for (const int64_t bits : kAllBits) {
    for (const double size : {3e-40, 1.4e-45, 1.2e-38}) {
      const Quantized s = quantized(randn({8, 64}, 4).clamp(-1, 1) * size, 1, bits, 32);
      EXPECT_TRUE(all_finite(s.back) && all_finite(s.fake) && all_finite(s.scale)) << bits << " " << size;
    }
  }
  at::globalContext().setFlushDenormal(false);
}

// ---------------------------------------------------------------------------------------------- C05

// The policy: the whole group dequantises to NaN, whatever it was that is not finite; the others keep every bit.
TEST(C05_NotFinite, TheWholeGroupIsNanAndNothingElse) {
  for (const auto type : kTypes) {
    const at::Tensor clean = randn({3, 96}, 5, type);
    for (const int64_t bits : kAllBits) {
      const Quantized want = quantized(clean, 1, bits, 32);
      for (const auto& bad : std::vector<std::vector<float>>{{kNan}, {kInf}, {-kInf}, {kInf, -kInf}, {-kNan, kInf}}) {
        for (const int64_t index : {0, 7, 15, 16, 31, 30, 8}) {
          at::Tensor x = clean.clone();
          for (size_t i = 0; i < bad.size(); i++) x[1][32 + (index + static_cast<int64_t>(i)) % 32] = bad[i];
          std::ostringstream what;
          what << type << " " << bits << " bits, " << bad[0] << " at " << index;
          const Quantized got = quantized(x, 1, bits, 32);
          ASSERT_TRUE(got.back[1].narrow(0, 32, 32).isnan().all().item<bool>()) << what.str();
          ASSERT_TRUE(got.fake[1].narrow(0, 32, 32).isnan().all().item<bool>()) << what.str();
          // Codes, scale and zero of every other group: 32 codes are 4 * bits bytes.
          const auto spoilt = [&](const at::Tensor& t, int64_t size) { return t[1].narrow(0, size, size); };
          Quantized mended = got;
          mended.codes = got.codes.clone(), mended.scale = got.scale.clone(), mended.zero = got.zero.clone();
          mended.back = got.back.clone(), mended.fake = got.fake.clone();
          spoilt(mended.codes, 4 * bits).copy_(spoilt(want.codes, 4 * bits));
          spoilt(mended.scale, 1).copy_(spoilt(want.scale, 1));
          spoilt(mended.zero, 1).copy_(spoilt(want.zero, 1));
          spoilt(mended.back, 32).copy_(spoilt(want.back, 32));
          spoilt(mended.fake, 32).copy_(spoilt(want.fake, 32));
          expect_same(mended, want, what.str());
          // The same outcome for every layout and number of threads.
          const Threads guard(3);
          const Quantized strided = quantized(x.t().contiguous().t(), 1, bits, 32);
          ASSERT_TRUE(same_bits(strided.codes, got.codes)) << what.str();
          ASSERT_TRUE(at::equal(strided.back.isnan(), got.back.isnan())) << what.str();
          ASSERT_TRUE(same_bits(at::nan_to_num(strided.back), at::nan_to_num(got.back))) << what.str();
        }
      }
    }
  }
}

// Groups that are no multiple of any vector, along the first axis too.
TEST(C05_NotFinite, InShortGroupsAndAlongTokens) {
  for (const int64_t group : {3, 9, 17, 50}) {
    const at::Tensor clean = randn({50, 5}, 6);
    for (int64_t at = 0; at < 50; at += 7) {
      at::Tensor x = clean.clone();
      x[at][2] = at % 2 == 0 ? kNan : -kInf;
      for (const int64_t bits : kAllBits) {
        const at::Tensor got = quantized(x, 0, bits, group).back, want = quantized(clean, 0, bits, group).back;
        at::Tensor hit = at::zeros({50, 5}, at::kBool);
        const int64_t first = at / group * group;
        hit.narrow(0, first, std::min(group, 50 - first)).select(1, 2).fill_(true);
        ASSERT_TRUE(at::equal(got.isnan(), hit)) << group << " " << at << " " << bits;
        ASSERT_TRUE(same_bits(got.masked_fill(hit, 0), want.masked_fill(hit, 0)));
      }
    }
  }
}

TEST(C05_NotFinite, ScalesThatAreNotAtDequantise) {
  for (const int64_t bits : kAllBits) {
    const int64_t top = (int64_t{1} << bits) - 1, n = 40;
    const at::Tensor codes = at::full({1, (n * bits + 7) / 8}, 0xFF, at::kByte);
    for (const float scale : {kNan, kInf, -kInf, -2.0f, 0.0f, -0.0f, 3e38f}) {
      for (const float zero : {1.0f, kNan, -kInf}) {
        for (const auto type : kTypes) {
          const at::Tensor s = at::full({1, 2}, scale), z = at::full({1, 2}, zero);
          const at::Tensor got = dequantize(codes, s, z, 1, bits, 32, n, type).to(at::kFloat);
          const float product = scale * static_cast<float>(top);
          const at::Tensor want = given_back(at::full({1, n}, zero + product), type).to(at::kFloat);
          EXPECT_TRUE(at::equal(got.isnan(), want.isnan())) << scale << " " << zero << " " << type;
          EXPECT_TRUE(at::equal(at::nan_to_num(got), at::nan_to_num(want))) << scale << " " << zero << " " << type;
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- C06

TEST(C06_Packing, SizesAndIdentityForEveryLength) {
  for (const int64_t bits : kAllBits) {
    const int64_t top = (int64_t{1} << bits) - 1;
    for (int64_t n = 1; n <= 130; n++) {
      const int64_t bytes = (n * bits + 7) / 8;
      at::Tensor want = at::cat({((at::arange(n, at::kLong) * 7 + 3) % (top + 1)).unsqueeze(0),
                                 at::eye(n, at::kLong) * top, (1 - at::eye(n, at::kLong)) * top});
      // Unit scale: a group that holds both ends of the range. One of a length of 1 cannot.
      if (n >= 2) want[0][0] = 0, want[0][n - 1] = top;
      if (n == 1) want.zero_();
      { const at::Tensor dirt = at::full({want.size(0), bytes}, 0xFF, at::kByte); }  // what at::empty may reuse
      const auto [codes, scale, zero] = quantize(want.to(at::kFloat), 1, bits, n);
      ASSERT_EQ(codes.sizes(), at::IntArrayRef({want.size(0), bytes})) << n << " at " << bits;
      ASSERT_TRUE(at::equal(unpacked(codes, bits, n), want)) << n << " at " << bits;
      const auto spare = static_cast<int>(bytes * 8 - n * bits);
      ASSERT_EQ(codes.select(1, bytes - 1).max().item<int>() >> (8 - spare), 0) << "unused bits, " << n << " " << bits;
      ASSERT_TRUE(same_bits(dequantize(codes, scale, zero, 1, bits, n, n), want.to(at::kFloat)));
    }
  }
}

// A group that ends within a byte, and one that ends within a code of 3 bits.
TEST(C06_Packing, GroupsThatAreNoWholeBytes) {
  for (const int64_t bits : kAllBits) {
    const int64_t top = (int64_t{1} << bits) - 1, n = 130;
    for (const int64_t group : {2, 3, 5, 12, 20, 33, 100}) {
      at::Tensor want = (at::arange(3 * n, at::kLong) * 7 + 3).view({3, n}) % (top + 1);
      for (int64_t i = 0; i < n; i += group) {
        want.select(1, i).zero_();
        if (i + 1 < n) want.select(1, i + 1).fill_(top);
      }
      const Quantized r = quantized(want.to(at::kFloat), 1, bits, group);
      EXPECT_TRUE(at::equal(unpacked(r.codes, bits, n), want)) << bits << " bits, groups of " << group;
      EXPECT_TRUE(same_bits(r.back, want.to(at::kFloat)) && same_bits(r.fake, r.back)) << bits << " " << group;
      const Quantized columns = quantized(want.t().to(at::kHalf), 0, bits, group);
      EXPECT_TRUE(same_bits(columns.codes.t(), r.codes)) << bits << " bits, groups of " << group;
    }
  }
}

TEST(C06_Packing, TheTrueLengthAndWidthAreNeeded) {
  EXPECT_EQ(std::get<0>(quantize(randn({7, 80}, 7), 1, 3, 16)).sizes(), at::IntArrayRef({7, 30}));
  for (const int64_t bits : kAllBits) {
    const at::Tensor x = randn({4, 80}, 8);
    const auto [codes, scale, zero] = quantize(x, 1, bits, 16);
    const auto read = [&, c = codes, s = scale, z = zero](int64_t width, int64_t size) {
      return [=] { dequantize(c, s, z, 1, width, 16, size); };
    };
    for (const int64_t other : kAllBits) {
      if (other != bits)
        expect_error(read(other, 80), {"codes", std::to_string(10 * bits), std::to_string(10 * other)});
    }
    for (const int64_t size : {0, 64, 72, 79, 81, 88, 160}) {
      // Lengths that take the same bytes and groups cannot be told apart.
      if ((size * bits + 7) / 8 == 10 * bits && (size + 15) / 16 == 5) continue;
      expect_error(read(bits, size), {"size", std::to_string(size)});
    }
  }
}

// ---------------------------------------------------------------------------------------------- C17, C18

TEST(C17_Strides, EveryViewEqualsItsCopy) {
  for (const auto type : kTypes) {
    const std::vector<at::Tensor> views = {
        randn({2, 16, 3, 32}, 11, type).transpose(1, 2),
        randn({2, 3, 16, 64}, 12, type).slice(3, 0, 64, 2),
        randn({2, 3, 30, 32}, 13, type).narrow(2, 5, 16),
        randn({1, 3, 16, 32}, 14, type).expand({2, 3, 16, 32}),
        randn({2, 1, 16, 32}, 15, type).expand({2, 3, 16, 32}),
        randn({2, 3, 16, 32}, 16, type).flip({1, 3}),
        randn({2, 3, 16, 32}, 17, type).contiguous(at::MemoryFormat::ChannelsLast),
        randn({2, 3, 16, 1}, 18, type).expand({2, 3, 16, 32}),
        randn({2, 3, 47}, 19, type).unfold(2, 32, 1),                      // windows that overlap
        randn({2, 3, 32, 17}, 20, type).narrow(3, 1, 16).transpose(2, 3),  // rows of an odd length
        randn({2, 3, 16, 32, 2}, 21, type).select(4, 1),
        randn({3, 16, 32}, 22, type).diagonal(0, 0, 1).unsqueeze(1).expand({32, 2, 3}).permute({1, 2, 0}).unsqueeze(2),
    };
    for (size_t i = 0; i < views.size(); i++) {
      const at::Tensor &view = views[i], copy = view.contiguous().clone();
      for (int64_t axis = 0; axis < 4; axis++) {
        for (const int64_t bits : {1, 3, 4}) {
          const Quantized got = quantized(view, axis, bits, 16);
          expect_same(got, quantized(copy, axis, bits, 16), "view " + std::to_string(i));
          EXPECT_TRUE(got.codes.is_contiguous() && got.back.is_contiguous() && got.fake.is_contiguous());
          // Codes, scale and zero as parts of larger buffers that end in other bytes, and as broadcast views.
          const auto part = [](const at::Tensor& t) {
            at::Tensor big = at::full({2, t.size(0), t.size(1), t.size(2) + 3, t.size(3) + 5}, 77, t.options());
            return big[1].narrow(2, 1, t.size(2)).narrow(3, 2, t.size(3)).copy_(t);
          };
          const auto wide = [](const at::Tensor& t) { return t.unsqueeze(0).expand({3, -1, -1, -1, -1}); };
          EXPECT_TRUE(same_bits(
              dequantize(part(got.codes), part(got.scale), part(got.zero), axis, bits, 16, view.size(axis), type),
              got.back));
          EXPECT_TRUE(same_bits(
              dequantize(wide(got.codes), wide(got.scale), wide(got.zero), axis + 1, bits, 16, view.size(axis), type),
              wide(got.back)));
        }
      }
      EXPECT_TRUE(same_bits(view, copy)) << "view " << i << " was changed";
    }
  }
}

TEST(C18_Beyond31Bits, StridesOfQuantizeAndDequantize) {
  const int64_t stride = (int64_t{1} << 31) + 64, row = 32 * 64;
  const size_t bytes = static_cast<size_t>(stride + row) * 4;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << bytes << " bytes of address space";
  for (const auto type : {at::kHalf, at::kFloat}) {
    const at::Tensor x = at::from_blob(memory, {2, 1, 32, 64}, {stride, row, 64, 1}, at::TensorOptions(type));
    x[0].copy_(randn({1, 32, 64}, 23));
    x[1].copy_(randn({1, 32, 64}, 24));
    for (const int64_t axis : {2, 3}) {
      const Quantized near = quantized(x.contiguous(), axis, 2, 32);
      expect_same(quantized(x, axis, 2, 32), near, "far rows");
      expect_same(quantized(x.transpose(0, 1), axis, 2, 32), quantized(x.transpose(0, 1).contiguous(), axis, 2, 32),
                  "swapped");
      // The far scale, then the far zero, then the far codes.
      const auto far = [&](const at::Tensor& t) {
        return at::from_blob(memory, t.sizes(), {stride, t.stride(1), t.stride(2), t.stride(3)}, t.options()).copy_(t);
      };
      const auto back = [&](const at::Tensor& c, const at::Tensor& s, const at::Tensor& z) {
        return dequantize(c, s, z, axis, 2, 32, x.size(axis), type);
      };
      EXPECT_TRUE(same_bits(back(near.codes, far(near.scale), near.zero), near.back));
      EXPECT_TRUE(same_bits(back(near.codes, near.scale, far(near.zero)), near.back));
      EXPECT_TRUE(same_bits(back(far(near.codes), near.scale, near.zero), near.back));
      x[0].copy_(randn({1, 32, 64}, 23));
      x[1].copy_(randn({1, 32, 64}, 24));
    }
  }
  munmap(memory, bytes);
}

// 2^31 elements and 64 more, of which 64 exist.
TEST(C18_Beyond31Bits, MoreElementsThan31BitsCount) {
  const int64_t tokens = 33554433;
  at::Tensor row = at::zeros({1, 1, 1, 64});
  row.narrow(3, 32, 32).fill_(1.0);
  const auto [codes, scale, zero] = quantize(row.expand({1, 1, tokens, 64}), 3, 1, 64);
  ASSERT_EQ(codes.sizes(), at::IntArrayRef({1, 1, tokens, 8}));
  ASSERT_EQ(scale.sizes(), at::IntArrayRef({1, 1, tokens, 1}));
  for (const int64_t token : {int64_t{0}, tokens / 2, tokens - 1}) {
    EXPECT_TRUE(at::equal(codes[0][0][token], at::tensor({0, 0, 0, 0, 255, 255, 255, 255}, at::kByte))) << token;
    EXPECT_EQ(scale[0][0][token].item<float>(), 1.0f);
    EXPECT_EQ(zero[0][0][token].item<float>(), 0.0f);
  }
}

TEST(C18_Beyond31Bits, SizesAreCheckedIn64Bits) {
  EXPECT_EQ((CheckedSize(70000) * CheckedSize(32) * CheckedSize(1024) * CheckedSize(2)).value, 4587520000);
  EXPECT_EQ((CheckedSize(int64_t{1} << 31) * CheckedSize(2) + CheckedSize(5)).value, (int64_t{1} << 32) + 5);
  EXPECT_FALSE((CheckedSize(int64_t{1} << 40) * CheckedSize(int64_t{1} << 30)).ok);
  const int64_t bytes = cache_page_bytes(cache_format(65536, 1024, std::nullopt, 8, 8, 32));
  EXPECT_EQ(bytes, int64_t{65536} * 4 * (32 * 1024 * 2 + 4 * 1024 * 2));
  const at::Tensor x = at::empty({1, 1, int64_t{1} << 33, 64}, at::TensorOptions(at::kHalf).device(at::kMeta));
  EXPECT_EQ(std::get<0>(quantize(x, 3, 3, 64)).numel(), (int64_t{1} << 33) * 24);
  EXPECT_EQ(std::get<0>(quantize(x, 2, 3, 64)).numel(), (int64_t{3} << 30) * 64);
}

// ---------------------------------------------------------------------------------------------- C19

// An axis of size 0 has no groups: the result is empty, as for every other axis. A group larger than the axis is short.
TEST(C19_Empty, ShapesOfEmptyResultsAndBadGroups) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {0, 2, 8, 16}, {1, 0, 8, 16}, {1, 2, 0, 16}, {1, 2, 8, 0}, {0, 0}, {0}, {3, 0, 5}}) {
    for (const auto type : kTypes) {
      const at::Tensor x = at::empty(shape, type);
      for (int64_t axis = -x.dim(); axis < x.dim(); axis++) {
        for (const int64_t bits : kAllBits) {
          const Quantized r = quantized(x, axis, bits, 16);
          std::vector<int64_t> packed = shape, groups = shape;
          const auto at = static_cast<size_t>(axis < 0 ? axis + x.dim() : axis);
          packed[at] = (shape[at] * bits + 7) / 8, groups[at] = (shape[at] + 15) / 16;
          EXPECT_EQ(r.codes.sizes(), at::IntArrayRef(packed));
          EXPECT_EQ(r.scale.sizes(), at::IntArrayRef(groups));
          EXPECT_EQ(r.back.sizes(), x.sizes());
          EXPECT_EQ(r.fake.sizes(), x.sizes());
        }
      }
    }
  }
  const at::Tensor x = randn({2, 20}, 31);
  for (const int64_t group : {int64_t{0}, int64_t{-1}, int64_t{-32}, std::numeric_limits<int64_t>::min()}) {
    expect_error([&] { quantize(x, 1, 2, group); }, {"group_size", std::to_string(group)});
    expect_error([&] { fake_quantize(x.narrow(0, 0, 0), 1, 2, group); }, {"group_size", std::to_string(group)});
  }
  for (const int64_t group : {int64_t{21}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    EXPECT_TRUE(same_bits(fake_quantize(x, 1, 2, group), fake_quantize(x, 1, 2, 20))) << group;
    EXPECT_TRUE(same_bits(quantized(x, 1, 2, group).back, fake_quantize(x, 1, 2, 20))) << group;
  }
}

}  // namespace
}  // namespace kivi::test
