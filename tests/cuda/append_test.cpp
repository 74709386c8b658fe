// append of csrc/cuda, against the model of a cache: every byte that it writes, and that it writes no other.
#include <limits>

#include "cuda/cache_case.h"

namespace kivi::cuda {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Format small_format(int64_t group) {
  Format f = make_format(2, 48, 32, 2, 2, group);
  f.residual_length = 40, f.sink_length = 3;
  return f;
}

// One append to an empty cache.
void check_one_shot(const Format& f, Element type, int64_t tokens, const NewTokens& x) {
  CacheModel model(f, type, 1, tokens);
  DeviceCache device(model);
  ASSERT_TRUE(model.append(x)) << format_text(f);
  device.append(x);
  device.expect(model);
}
void check_one_shot(const Format& f, Element type, int64_t tokens, uint32_t seed = 7) {
  check_one_shot(f, type, tokens, NewTokens(f, type, 1, tokens, seed));
}

// All combinations of options, with every width and group size in turn.
TEST(Append, EveryOption) {
  for (const int64_t bits : kBitWidths) {
    for (int64_t i = 0; i < 64; i++) {
      const int64_t dims[] = {64, 128, 80, 96, 17}, dim = dims[(i + bits) % 5], group = kGroupSizes[(i / 3 + bits) % 4];
      Format f = with_options(make_format(1, dim, dims[(i + bits + i / 5) % 5], bits, bits, group), i);
      f.residual_length = 5, f.sink_length = i % 3;
      check_one_shot(f, kElements[(i + bits) % 3], 2 * group + 9, static_cast<uint32_t>(i));
      if (HasFailure()) return;
    }
  }
}

TEST(Append, EveryWidthAndGroupSize) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      for (const int64_t group : kGroupSizes) {
        for (const Element type : kElements) {
          Format f = make_format(1, 40, 24, k_bits, v_bits, group);
          f.residual_length = 0;
          check_one_shot(f, type, group + f.sink_length + 1);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Sizes of heads that need several tiles, pieces of words, or channels that fill up a line.
TEST(Append, SizesOfHeads) {
  for (const int64_t dim : {1, 2, 15, 17, 33, 64, 100, 112, 127, 192, 256, 300, 512, 576, 1024}) {
    for (const int64_t group : kGroupSizes) {
      for (const int64_t bits : {1, 2, 3, 8}) {
        for (const bool rotated : {false, true}) {
          Format f = make_format(1, dim, dim, bits, bits, group);
          f.residual_length = 0, f.sink_length = 0, f.v_rotated = rotated;
          check_one_shot(f, Element::kFloat16, group);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(Append, ClassesOfKeys) {
  const std::initializer_list<KeyClass> lists[] = {{{16, 4}, {48, 2}},
                                                   {{16, 4}, {32, 3}, {16, 2}},
                                                   {{16, 8}, {64, 1}},
                                                   {{32, 3}, {16, 4}, {32, 2}},
                                                   {{16, 4}, {4, 2}},
                                                   {{16, 4}, {112, 1}},
                                                   {{64, 4}, {192, 2}},
                                                   {{16, 2}, {33, 3}},
                                                   {{112, 2}, {16, 1}},
                                                   {{32, 1}, {32, 3}, {16, 8}, {17, 4}},
                                                   {{48, 8}, {480, 1}, {16, 2}, {300, 3}}};
  for (const auto& list : lists) {
    for (const int64_t group : kGroupSizes) {
      for (const Element type : kElements) {
        Format f = with_classes(make_format(2, 0, 32, 0, 2, group), list);
        f.residual_length = 0;
        f.scale_type = group == 32 ? ScaleType::kFloat8 : ScaleType::kFloat16;
        f.k_bias_correction = group == 64;
        check_one_shot(f, type, group + f.sink_length);
        if (HasFailure()) return;
      }
    }
  }
}

// Lengths at all the boundaries, rows of several at once.
TEST(Append, Lengths) {
  const std::vector<int64_t> counts = {0, 1, 31, 32, 33, 63, 64, 65, 129, 1000};
  for (const int64_t group : {int64_t{32}, int64_t{64}}) {
    for (const int64_t residual : {0, 31, 128}) {
      for (const int64_t sink : {0, 4, 70}) {
        Format f = small_format(group);
        f.residual_length = residual, f.sink_length = sink;
        const Element type = kElements[(sink + residual) % 3];
        const auto batch = static_cast<int64_t>(counts.size());
        CacheModel model(f, type, batch, 1000);
        NewTokens x(f, type, batch, 1000, 5);
        for (int64_t b = 0; b < batch; b++) {  // what is not appended is not read
          for (int64_t h = 0; h < f.num_kv_heads; h++) {
            for (int64_t t = counts[static_cast<size_t>(b)]; t < 1000; t++) {
              for (int64_t d = 0; d < f.head_dim; d++) x.k.set(x.k_at(b, h, t) + d, kNaN);
              for (int64_t d = 0; d < f.value_head_dim; d++) x.v.set(x.v_at(b, h, t) + d, kInf);
            }
          }
        }
        DeviceCache device(model);
        ASSERT_TRUE(model.append(x, counts));
        device.append(x, counts);
        device.expect(model);
        if (HasFailure()) return;
      }
    }
  }
}

// Steps of all kinds, every row in its own, end in the same bytes as the model's single tokens.
TEST(Append, Steps) {
  for (const int64_t group : {int64_t{16}, int64_t{32}, int64_t{128}}) {
    Format f = small_format(group);
    f.residual_length = group == 16 ? 0 : 40;
    CacheModel model(f, Element::kBFloat16, 3, 4000);
    DeviceCache device(model);
    Random random(static_cast<uint32_t>(group));
    const int64_t steps[] = {0, 1, 1, 3, 300, 31, 1, 32, 1, 0, 129, 2, 64, 65, 300, 1, 33, 16, 100, 1, 1, 1};
    uint32_t seed = 0;
    for (const int64_t tokens : steps) {
      const NewTokens x(f, model.type, 3, tokens, ++seed);
      const std::vector<int64_t> counts = {tokens, random.below(tokens + 1), random.below(tokens + 1)};
      ASSERT_TRUE(model.append(x, counts));
      device.append(x, counts);
      device.expect(model);
      if (HasFailure()) return;
    }
  }
}

TEST(Append, EveryOrderOfThreads) {
  for (const int64_t options : {0, 63}) {
    Format f = with_options(small_format(32), options);
    f.scale_type = options == 0 ? ScaleType::kFloat16 : ScaleType::kFloat8;
    const NewTokens first(f, Element::kFloat16, 2, 150, 1), second(f, Element::kFloat16, 2, 90, 2);
    in_every_order([&] {
      CacheModel model(f, Element::kFloat16, 2, 300);
      DeviceCache device(model);
      for (const NewTokens* x : {&first, &second}) {
        ASSERT_TRUE(model.append(*x, {x->tokens, x->tokens - 37}));
        device.append(*x, {x->tokens, x->tokens - 37});
        device.expect(model);
      }
    });
  }
}

// Tokens anywhere in memory: on no boundary, with other tokens between, heads inside of tokens, one token for all.
TEST(Append, Strides) {
  for (const Element type : kElements) {
    const Format f = small_format(32);
    for (const int64_t offset : {0, 1, 8}) {
      for (const int64_t gap : {0, 3, 8}) check_one_shot(f, type, 150, NewTokens(f, type, 1, 150, 3, offset, gap));
    }
    NewTokens x(f, type, 1, 150, 3);  // [B][T][Hkv][D] in memory
    x.k_strides[1] = f.head_dim, x.k_strides[2] = f.num_kv_heads * f.head_dim;
    x.v_strides[1] = f.value_head_dim, x.v_strides[2] = f.num_kv_heads * f.value_head_dim;
    check_one_shot(f, type, 150, x);
    x.k_strides[2] = x.v_strides[2] = 0;
    check_one_shot(f, type, 150, x);
    // Only the heads, or only the tokens, are off every boundary.
    for (const auto& [head, token] : {std::pair<int64_t, int64_t>{1, 0}, {0, 1}}) {
      NewTokens y(f, type, 1, 150, 3, 0, 8);
      y.k = Array(type, 2 * 150 * 64), y.v = y.k;
      Random random(1);
      for (int64_t i = 0; i < y.k.size(); i++) y.k.set(i, random.normal()), y.v.set(i, random.normal());
      y.k_strides[1] = y.v_strides[1] = 150 * 56 + head;
      y.k_strides[2] = y.v_strides[2] = 48 + token;
      check_one_shot(f, type, 150, y);
    }
  }
}

// The same launches again, as a graph repeats them: what they do follows the lengths on the device.
TEST(Append, RepeatedLaunches) {
  Format f = small_format(32);
  for (const int64_t tokens : {1, 7, 40}) {
    const NewTokens x(f, Element::kFloat16, 2, tokens, 9);
    const std::vector<int64_t> counts = {tokens, tokens - 1};
    CacheModel model(f, Element::kFloat16, 2, 100 * tokens);
    DeviceCache device(model);
    const DeviceArray<uint8_t> k(x.k.bytes()), v(x.v.bytes());
    const DeviceArray<int64_t> lengths(counts);
    const AppendParams p = device.append_params(x, k, v, lengths.data(), nullptr);
    for (int64_t step = 0; step < 100; step++) {
      ASSERT_TRUE(model.append(x, counts));
      check(append(p, nullptr));
      if (step % 9 == 0) device.expect(model);
    }
    device.expect(model);
  }
}

// A row that was cut inside its window, or inside its records, and goes on; one whose window is fuller than appends
// leave it, which gives up a group without a new token.
TEST(Append, AfterATruncation) {
  for (const int64_t length : {0, 2, 3, 50, 67, 99, 120, 131}) {
    const Format f = small_format(32);
    CacheModel model(f, Element::kFloat32, 2, 500);
    ASSERT_TRUE(model.append(NewTokens(f, model.type, 2, 140, 1), {140, 97}));
    model.truncate(length);
    DeviceCache device(model);
    for (uint32_t step = 0; step < 4; step++) {
      const NewTokens x(f, model.type, 2, step == 3 ? 70 : 1, step);
      ASSERT_TRUE(model.append(x));
      device.append(x);
      device.expect(model);
    }
    if (HasFailure()) return;
  }
}

TEST(Append, AFullWindow) {
  Format f = small_format(32);
  f.num_kv_heads = 1, f.residual_length = 64, f.sink_length = 0;
  ASSERT_EQ(window_capacity(f), 96);
  CacheModel model(f, Element::kFloat32, 1, 500);
  ASSERT_TRUE(model.append(NewTokens(f, model.type, 1, 95, 1)));
  model.f.residual_length = 96;  // so that the 96th token stays
  ASSERT_TRUE(model.append(NewTokens(f, model.type, 1, 1, 2)));
  model.f.residual_length = 64;
  ASSERT_EQ(model.m.quantized[0], 0);
  for (const int64_t tokens : {0, 1, 32, 33}) {
    CacheModel copy = model;
    DeviceCache device(copy);
    const NewTokens x(f, model.type, 1, tokens, 3);
    ASSERT_TRUE(copy.append(x));
    device.append(x);
    device.expect(copy);
    EXPECT_GT(copy.m.quantized[0], 0);
  }
}

// NaN, Inf, and what they do not touch; zeros of both signs; subnormals; numbers that only just fit.
TEST(Append, HardNumbers) {
  const float hard[] = {0.0f,      -0.0f, 1.0f, -3.0f, 1e-7f, 1e-40f, 3e-45f, 65504.0f,
                        -65504.0f, 6e4f,  kNaN, kInf,  -kInf, 3e38f,  -3e38f};
  for (int64_t i = 0; i < 64; i += 3) {
    for (const int64_t bits : {1, 2, 8}) {
      Format f = with_options(make_format(1, 64, 64, bits, bits, 32), i);
      f.residual_length = 0, f.sink_length = 0;
      f.scale_type = i % 2 == 0 ? ScaleType::kFloat32 : i % 4 == 1 ? ScaleType::kWidened : ScaleType::kWidened8;
      NewTokens x(f, Element::kFloat32, 1, 32, 5);
      for (int64_t n = 0; n < 15; n++) {
        const float a = hard[n], b = hard[(n + static_cast<int64_t>(i)) % 15];
        for (int64_t t = 0; t < 32; t++) {
          x.k.set(x.k_at(0, 0, t) + 2 * n, t % 2 == 0 ? a : b);
          x.v.set(x.v_at(0, 0, 2 * n) + t, t % 2 == 0 ? a : b);
        }
        x.k.set(x.k_at(0, 0, 31) + 2 * n + 1, a);
        x.v.set(x.v_at(0, 0, 2 * n + 1) + 63, a);
      }
      check_one_shot(f, Element::kFloat32, 32, x);
      if (HasFailure()) return;
    }
  }
}

// Positions that lie between two codes, or next to it: where a product with the inverse of the scale is not enough.
TEST(Append, PositionsBetweenCodes) {
  for (const int64_t bits : kBitWidths) {
    Format f = make_format(1, 256, 256, bits, bits, 128);
    f.residual_length = 0, f.sink_length = 0, f.scale_type = ScaleType::kFloat32;
    NewTokens x(f, Element::kFloat32, 1, 128, 5);
    Random random(static_cast<uint32_t>(bits));
    const auto top = (int64_t{1} << bits) - 1;
    const auto number = [&](int64_t i, float lo, float scale) {  // the ends of the range first
      if (i < 2) return lo + static_cast<float>(i * top) * scale;
      const float middle = lo + (static_cast<float>(random.below(top)) + 0.5f) * scale;
      const int64_t steps = random.below(9) - 4;
      float y = middle;
      for (int64_t s = 0; s < std::abs(steps); s++) y = std::nextafter(y, steps < 0 ? -kInf : kInf);
      return y;
    };
    for (int64_t a = 0; a < 256; a++) {
      const float lo = random.normal(), scale = std::fabs(random.normal()) + 0.01f;
      for (int64_t t = 0; t < 128; t++) x.k.set(x.k_at(0, 0, t) + a, number(t, lo, scale));
    }
    for (int64_t t = 0; t < 128; t++) {
      for (int64_t g = 0; g < 256; g += 128) {
        const float lo = random.normal(), scale = std::fabs(random.normal()) + 0.01f;
        for (int64_t d = 0; d < 128; d++) x.v.set(x.v_at(0, 0, t) + g + d, number(d, lo, scale));
      }
    }
    check_one_shot(f, Element::kFloat32, 128, x);
  }
}

// ---- scales that do not fit ------------------------------------------------------------------------

// Tokens of which one channel of K and one token of V leave the range of float16's and float8's scales.
NewTokens too_wide(const Format& f, int64_t tokens, bool in_k, bool in_v) {
  NewTokens x(f, Element::kFloat32, 1, tokens, 4);
  for (int64_t t = 0; t < tokens && in_k; t++) {
    x.k.set(x.k_at(0, 1, t) + 5, (t % 2 == 0 ? -1.0f : 1.0f) * 1e7f / static_cast<float>(1 + t % 3));
  }
  for (int64_t d = 0; d < f.value_head_dim && in_v; d++) {
    x.v.set(x.v_at(0, 0, 6) + d, (d % 2 == 0 ? 1e7f : 3e7f) * static_cast<float>(d % 4));
  }
  return x;
}

TEST(Append, OverflowLeavesTheCacheAsItWas) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16}) {
    for (const auto& [in_k, in_v] : {std::pair<bool, bool>{true, false}, {false, true}}) {
      Format f = small_format(32);
      f.scale_type = type;
      if (in_v) f.num_kv_heads = 5;  // exact tokens for more than one block
      CacheModel model(f, Element::kFloat32, 1, 500);
      DeviceCache device(model);
      const NewTokens first(f, Element::kFloat32, 1, 70, 3);
      ASSERT_TRUE(model.append(first));
      device.append(first);
      const HostMemory before = model.m;
      DeviceArray<int32_t> overflow(std::vector<int32_t>{0});
      // Reaches around the ring, so that new tokens go where old ones are.
      const NewTokens wide = too_wide(f, 140, in_k, in_v);
      device.append(wide, {}, overflow.data());
      EXPECT_EQ(overflow.get()[0], 1);
      // All is as it was but records past the quantised length.
      const auto pool = device.memory().pool.get();
      for (int64_t t = 0; t < model.m.quantized[0]; t += f.group_size) {
        for (int64_t h = 0; h < f.num_kv_heads; h++) {
          const int64_t at = model.record(0, h, t) - model.m.pool.data();
          EXPECT_EQ(std::memcmp(pool.data() + at, before.pool.data() + at, static_cast<size_t>(model.layout.bytes)), 0);
        }
      }
      EXPECT_EQ(device.memory().lengths.get(), before.lengths);
      EXPECT_EQ(device.memory().quantized.get(), before.quantized);
      EXPECT_EQ(device.memory().window_k.get(), before.window_k);
      EXPECT_EQ(device.memory().window_v.get(), before.window_v);
      EXPECT_EQ(device.memory().sink_k.get(), before.sink_k);
      EXPECT_EQ(device.memory().sink_v.get(), before.sink_v);
      // As long as nobody clears the flag, nothing is appended.
      const NewTokens good(f, Element::kFloat32, 1, 140, 6);
      device.append(good, {}, overflow.data());
      EXPECT_EQ(overflow.get()[0], 1);
      EXPECT_EQ(device.memory().lengths.get(), before.lengths);
      EXPECT_EQ(device.memory().window_k.get(), before.window_k);
      overflow.set({0});
      device.append(good, {}, overflow.data());
      EXPECT_EQ(overflow.get()[0], 0);
      ASSERT_TRUE(model.append(good));
      device.expect(model);
    }
  }
}

// Widened formats and float32 take the same tokens, whether a flag is given or not.
TEST(Append, WideFormatsDoNotOverflow) {
  for (const ScaleType type : {ScaleType::kFloat32, ScaleType::kWidened, ScaleType::kWidened8}) {
    Format f = small_format(32);
    f.scale_type = type;
    CacheModel model(f, Element::kFloat32, 1, 500);
    DeviceCache device(model);
    const DeviceArray<int32_t> overflow(std::vector<int32_t>{0});
    const NewTokens x = too_wide(f, 140, true, true);
    ASSERT_TRUE(model.append(x));
    device.append(x, {}, overflow.data());
    EXPECT_EQ(overflow.get()[0], 0);
    device.expect(model);
  }
}

// Without a flag: the groups that do not fit have the nearest scale and zero, all others what they would have.
TEST(Append, SaturatesWithoutAFlag) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16}) {
    for (int64_t options = 0; options < 48; options += options == 7 ? 25 : 1) {  // with and without search
      Format f = with_options(small_format(32), options & ~8);                   // rotated, no number is what it was
      f.scale_type = type;
      f.residual_length = 0, f.sink_length = 0;
      CacheModel model(f, Element::kFloat32, 1, 32);
      DeviceCache device(model);
      NewTokens x = too_wide(f, 32, true, true);
      device.append(x);
      NewTokens tame = x;  // the groups that do not fit as zeros, which leave no trace in a record
      const int64_t groups = model.layout.v_groups;
      for (int64_t t = 0; t < 32; t++) tame.k.set(x.k_at(0, 1, t) + 5, 0.0f);
      for (int64_t d = 0; d < f.value_head_dim; d++) tame.v.set(x.v_at(0, 0, 6) + d, 0.0f);
      ASSERT_TRUE(model.append(tame)) << format_text(f);
      const bool bytes = type == ScaleType::kFloat8;
      const float most = bytes ? 61440.0f : 65504.0f;
      const auto put = [&](Side side, uint8_t* record, int64_t at, const std::vector<float>& numbers, int64_t first,
                           bool symmetric) {
        // By hand: 2 bits; the range is much wider than three times the largest scale.
        float zero = *std::min_element(numbers.begin(), numbers.end());
        const float hi = *std::max_element(numbers.begin(), numbers.end());
        if (symmetric) {
          zero = -1.5f * most;
        } else if (bytes) {
          const float steps = std::nearbyint(((zero + (hi - zero) * 0.5f) - 1.5f * most) / most * 8.0f);
          zero = std::min(std::max(steps, -127.0f), 127.0f) * most / 8.0f + 0.0f;
        } else {
          zero = std::min(std::max(zero, -most), most);
        }
        const RecordLayout& l = model.layout;
        const bool keys = side == Side::kKey;
        Choice c;
        c.scale = most, c.zero = zero;
        store_group(l, 2, record + (keys ? l.k_scale : l.v_scale),
                    symmetric ? nullptr : record + (keys ? l.k_zero : l.v_zero), at, c);
        for (size_t i = 0; i < numbers.size(); i++) {
          const float code = std::nearbyint((numbers[i] - zero) / most);
          const auto clamped = static_cast<uint32_t>(std::min(std::max(code, 0.0f), 3.0f));
          const auto n = first + static_cast<int64_t>(i);
          add_code(side, l, 2, record, keys ? n : 6, keys ? 5 : n, clamped);
        }
      };
      std::vector<float> numbers;
      for (int64_t t = 0; t < 32; t++) numbers.push_back(x.k.get(x.k_at(0, 1, t) + 5));
      put(Side::kKey, model.record(0, 1, 0), 5, numbers, 0, false);
      for (int64_t g = 0; g < groups; g++) {
        numbers.clear();
        for (int64_t d = g * model.layout.v_group; d < std::min((g + 1) * model.layout.v_group, f.value_head_dim);
             d++) {
          numbers.push_back(x.v.get(x.v_at(0, 0, 6) + d));
        }
        put(Side::kValue, model.record(0, 0, 0), g * 32 + 6, numbers, g * model.layout.v_group, f.v_symmetric);
      }
      device.expect(model);
      if (HasFailure()) return;
    }
  }
}

// ---- what cannot be -------------------------------------------------------------------------------

TEST(Append, WhatCannotBeIsAnError) {
  const Format f = small_format(32);
  CacheModel model(f, Element::kFloat16, 2, 300);
  const NewTokens x(f, Element::kFloat16, 2, 100, 3);
  const auto fails = [&](const CacheModel& m, const std::vector<int64_t>& counts = {}) {
    DeviceCache device(m);
    EXPECT_DEVICE_CHECK(device.append(x, counts));
  };
  for (const int32_t page : {-1, static_cast<int32_t>(model.pages)}) {
    CacheModel missing = model;
    missing.m.block_table[static_cast<size_t>(model.max_pages)] = page;
    fails(missing);
    // Not where the page is not needed yet.
    DeviceCache device(missing);
    EXPECT_NO_THROW(device.append(x, {100, 20}));
  }
  fails(model, {100, 101});
  fails(model, {-1, 100});
  CacheModel narrow = model;
  narrow.max_pages = 0;
  fails(narrow);
  for (const auto& [length, quantized] :
       {std::pair<int64_t, int64_t>{-1, 0}, {100, 31}, {34, 32}, {100, -32}, {100, 0}}) {
    CacheModel wrong = model;
    wrong.m.lengths[1] = length, wrong.m.quantized[1] = quantized;
    fails(wrong);
  }
  CacheModel classes(with_classes(make_format(1, 0, 32, 0, 2, 32), {{16, 4}, {16, 2}}), Element::kFloat16, 1, 300);
  classes.m.k_order[7] = 32;
  const NewTokens y(classes.f, Element::kFloat16, 1, 200, 3);
  DeviceCache device(classes);
  EXPECT_DEVICE_CHECK(device.append(y));
}

TEST(Append, NoRows) {
  AppendParams p{};
  p.cache.format = small_format(32);
  p.cache.layout = record_layout(p.cache.format);
  check(append(p, nullptr));
}

// More rows and heads than the second and third axis of a grid have room for.
TEST(Append, ManyRowsAndHeads) {
  Format f = make_format(257, 1, 1, 8, 8, 16);
  f.residual_length = 0, f.sink_length = 0;
  constexpr int64_t kRows = 257;
  CacheModel model(f, Element::kFloat16, kRows, 1, 1, /*pool_pages=*/3);
  std::vector<int64_t> counts(kRows);
  counts[1] = 3;
  int32_t page = 0;
  for (const size_t row : {size_t{0}, size_t{100}, size_t{kRows - 1}}) {
    counts[row] = 16;
    model.m.block_table[row * static_cast<size_t>(model.max_pages)] = page++;
  }
  DeviceCache device(model);
  const NewTokens x(f, Element::kFloat16, kRows, 16, 3);
  ASSERT_TRUE(model.append(x, counts));
  device.append(x, counts);
  device.expect(model);
}

}  // namespace
}  // namespace kivi::cuda
