// Attention of csrc/cuda gives the same bits whatever does not belong to a row: the batch, the width of the block
// table, scratch memory, the order of threads, an earlier launch; and refuses what does not fit.
#include "cuda/attention_check.h"

namespace kivi::cuda {
namespace {

// A call with all that may matter: several runs of pages, ragged rows, new tokens, more rows than a block takes.
AttentionSpec busy_spec() {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {1700, 5, 700, 0};
  s.fresh = {3, 3, 1, 2};
  s.q_len = 3;
  s.num_heads = 6;
  s.sinks = true;
  s.alibi = true;
  s.mask = MaskType::kBool;
  s.mask_broadcast[0] = s.mask_broadcast[1] = s.mask_broadcast[2] = true;
  return s;
}

TEST(AttentionBits, RowsDoNotDependOnTheBatch) {
  AttentionCase c(busy_spec());
  const AttentionOutput all = DeviceAttention(c.params()).run();
  const Format& f = c.spec().format;
  const size_t batch = static_cast<size_t>(c.batch()), out = all.out.size() / batch, lse = all.lse.size() / batch;
  for (int64_t b = 0; b < c.batch(); b++) {
    AttentionParams p = c.params();
    p.batch = 1;
    p.q = advance(p.q, p.q_type, b * p.q_batch_stride);
    p.block_table += b * p.block_table_stride;
    // A table no wider than the row needs.
    p.block_table_stride = ceil_div(p.quantized_lengths[b], kPageTokens);
    p.lengths += b, p.quantized_lengths += b, p.new_lengths += b;
    const int64_t slots = b * f.num_kv_heads * window_capacity(f), sinks = b * f.num_kv_heads * f.sink_length;
    p.sink_k = advance(p.sink_k, p.cache_type, sinks * f.head_dim);
    p.sink_v = advance(p.sink_v, p.cache_type, sinks * f.value_head_dim);
    p.window_k = advance(p.window_k, p.cache_type, slots * f.head_dim);
    p.window_v = advance(p.window_v, p.cache_type, slots * f.value_head_dim);
    p.new_k = advance(p.new_k, p.new_type, b * p.new_k_strides[0]);
    p.new_v = advance(p.new_v, p.new_type, b * p.new_v_strides[0]);
    const auto row = static_cast<size_t>(b);
    const auto part = [row](const std::vector<float>& x, size_t size) {
      return std::vector<float>(x.begin() + static_cast<int64_t>(row * size),
                                x.begin() + static_cast<int64_t>((row + 1) * size));
    };
    expect_same_bits(DeviceAttention(p).run(), {part(all.out, out), part(all.lse, lse)});
  }
}

TEST(AttentionBits, WidthOfTheBlockTableDoesNotMatter) {
  AttentionCase c(busy_spec());
  const AttentionOutput want = DeviceAttention(c.params()).run();
  for (const int64_t wider : {1, 7, 130}) expect_same_bits(DeviceAttention(c.params(), wider).run(), want);
}

// Nor does what the scratch memory held.
TEST(AttentionBits, ScratchMemoryMayHoldAnything) {
  AttentionCase c(busy_spec());
  DeviceAttention device(c.params());
  const AttentionOutput want = device.run();
  const auto floats_of_scratch = static_cast<size_t>(attention_scratch_bytes(device.params)) / sizeof(float);
  for (const float garbage : {1e30f, kInf, 0.0f}) {
    const DeviceArray<float> scratch(std::vector<float>(floats_of_scratch, garbage));
    expect_same_bits(device.run(scratch.data()), want);
    expect_same_bits(device.run(scratch.data()), want);  // its own results
  }
}

// One block takes all runs of a row where so many queries would need too much memory: parts 0 and 1 only.
TEST(AttentionBits, TwoPartsGiveTheSameBits) {
  for (const bool rotated : {false, true}) {
    AttentionSpec s = busy_spec();
    s.format.v_rotated = rotated;
    if (rotated) s.window = 600;
    AttentionCase c(s);
    DeviceAttention device(c.params());
    const AttentionOutput want = device.run();
    ASSERT_GT(most_parts(device.params.block_table_stride), 3);
    const DeviceArray<float> scratch(static_cast<size_t>(part_offset(device.params, 2, device.params.batch, 0, 0, 0)));
    check(launch_generic_parts(device.params, 2, scratch.data(), nullptr));
    check(launch_merge(device.params, 2, scratch.data(), nullptr));
    expect_same_bits(device.output(), want);
  }
}

TEST(AttentionBits, ScratchMemoryIsBounded) {
  AttentionCase c(busy_spec());
  AttentionParams p = c.params();
  p.block_table_stride = 1024;  // 128k tokens
  EXPECT_EQ(attention_scratch_bytes(p), round_up(part_offset(p, most_parts(1024), p.batch, 0, 0, 0) * 4, 256));
  p.q_len = 4096;
  EXPECT_EQ(attention_scratch_bytes(p), round_up(part_offset(p, 2, p.batch, 0, 0, 0) * 4, 256));
  for (int64_t width = 0; width < 3000; width++) {
    EXPECT_GE(most_parts(width), 1 + quantized_parts(width));
    EXPECT_GE(most_parts(width + 1), most_parts(width));
  }
}

// More parts than the merge looks at at once, some of them empty and full of garbage, against one sum in double. Of the
// cache, the merge reads the lengths only.
TEST(AttentionBits, MergeOfManyParts) {
  Format f = make_format(1, 8, 24, 2, 2, 128);
  for (const bool rotated : {false, true}) {
    f.v_rotated = rotated;
    AttentionSpec s = attention_spec(f);
    s.num_heads = 3;
    s.sinks = true;
    AttentionCase c(s);
    DeviceAttention device(c.params());
    AttentionParams& p = device.params;
    const int64_t runs = 300, parts = runs + 5;
    device.quantized_lengths.set({runs * 16 * kPageTokens});
    device.lengths.set({runs * 16 * kPageTokens + 4});
    const int64_t step = part_row_floats(p), channels = p.layout.v_channels;
    std::vector<float> scratch(static_cast<size_t>(parts * 3 * step), kNaN);
    cpu::Random random(7);
    std::vector<double> lse(3), out(3 * 24);
    for (int64_t row = 0; row < 3; row++) {
      const double sink = c.params().sinks[row];
      double sum = std::exp(sink);
      std::vector<double> acc(24), turned(24);
      for (int64_t part = 0; part <= runs; part++) {
        float* const cell = &scratch[static_cast<size_t>((part * 3 + row) * step)];
        cell[channels] = part % 7 == 3 ? -kInf : 3.0f * random.normal();
        cell[channels + 1] = part % 7 == 3 ? 0.0f : 1.0f + static_cast<float>(random.below(50));
        if (part % 7 == 3) continue;
        const double weight = std::exp2(static_cast<double>(cell[channels]));
        sum += weight * cell[channels + 1];
        for (int64_t d = 0; d < 24; d++) {
          cell[d] = cell[channels + 1] * random.normal();
          (part == 0 ? acc : turned)[static_cast<size_t>(d)] += weight * cell[d];
        }
      }
      if (rotated) turned = cpu::oracle::rotated(turned, /*back=*/true);
      for (size_t d = 0; d < 24; d++) out[static_cast<size_t>(row) * 24 + d] = (acc[d] + turned[d]) / sum;
      lse[static_cast<size_t>(row)] = std::log(sum);
    }
    in_every_order([&] {
      const DeviceArray<float> copy(scratch);
      check(launch_merge(p, parts, copy.data(), nullptr));
      expect_result(device.output(), floats(out), floats(lse), kLimit, 0, rotated ? "rotated" : "plain");
    });
  }
}

// The same parameters and scratch memory while the contents of the device arrays change, as when a captured graph is
// replayed: the lengths grow over the ends of groups, pages and runs, and become short again.
TEST(AttentionBits, LengthsChangeBetweenLaunches) {
  AttentionSpec s = attention_spec(small_format());
  s.format.residual_length = 0;
  s.cached = {1700, 900};
  s.fresh = {4, 4};
  s.q_len = 4;
  s.rows_follow_new = true;
  AttentionCase c(s);
  DeviceAttention device(c.params(), 3);
  const DeviceArray<uint8_t> scratch(static_cast<size_t>(attention_scratch_bytes(device.params)));
  const int64_t steps[][4] = {{1696, 896, 4, 4}, {0, 32, 1, 0},   {96, 128, 2, 3},   {128, 160, 4, 4},
                              {512, 544, 3, 1},  {1056, 0, 0, 4}, {1696, 896, 4, 4}, {32, 512, 4, 2}};
  for (const auto& step : steps) {
    const std::vector<int64_t> quantized = {step[0], step[1]}, fresh = {step[2], step[3]};
    // The window is empty, and with it no ring moves.
    const std::vector<int64_t> lengths = {s.format.sink_length + step[0], s.format.sink_length + step[1]};
    device.lengths.set(lengths);
    device.quantized_lengths.set(quantized);
    device.new_lengths.set(fresh);
    AttentionParams p = c.params();
    p.lengths = lengths.data(), p.quantized_lengths = quantized.data(), p.new_lengths = fresh.data();
    const AttentionResult want = AttentionCase::run(p, scalar());
    const AttentionOutput got = device.run(scratch.data());
    expect_result(got, want.out, want.lse, 2 * kLimit, 0, "tokens " + std::to_string(step[0]));
    expect_same_bits(got, DeviceAttention(p).run());
  }
}

// ---------------------------------------------------------------------------------------------- synchronisation

TEST(AttentionBits, EveryOrder) {
  std::vector<Settings> calls;
  // Values in one pass and two, in halves and quarters of the tokens; keys in one chunk and two; 1, 2, 4 and 8 rows.
  const int64_t sizes[][3] = {{32, 32, 8}, {64, 64, 4}, {48, 160, 2}, {272, 16, 1}};
  for (const auto& size : sizes) {
    Settings s = settings(test::make_format(1, size[0], size[1], 2, 3, 32, 20, 4), {900, 140}, size[2]);
    s.new_len = 2;
    s.new_lengths = {2, 1};
    s.sinks = true;
    s.format.v_rotated = size[0] != 32;
    if (size[0] == 48) s.mask = MaskType::kFloat32;
    calls.push_back(s);
  }
  calls.push_back(settings(recipe_format(3, 64), {700}, 4, 3));
  for (const Settings& s : calls) {
    Problem problem(s);
    const Problem::Result want = problem.oracle();
    const AttentionOutput first = DeviceAttention(problem.params).run();
    expect_result(first, floats(want.out), floats(want.lse), limits::kCudaExactSizes, 0,
                  "D " + std::to_string(s.format.head_dim));
    in_every_order([&] { expect_same_bits(DeviceAttention(problem.params).run(), first); });
  }
  AttentionCase c(busy_spec());
  DeviceAttention device(c.params());
  const AttentionOutput want = device.run();
  in_every_order([&] {
    const DeviceArray<float> scratch(static_cast<size_t>(part_offset(device.params, 2, device.params.batch, 0, 0, 0)));
    check(launch_generic_parts(device.params, 2, scratch.data(), nullptr));
    check(launch_merge(device.params, 2, scratch.data(), nullptr));
    expect_same_bits(device.output(), want);
  });
}

// ---------------------------------------------------------------------------------------------- errors

// What only the device knows ends the launch.
TEST(AttentionBits, WhatDoesNotFitIsAnError) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {300, 500};
  s.fresh = {1, 1};
  AttentionCase c(s);
  const auto expect_error = [&](auto change) {
    DeviceAttention device(c.params());
    change(device);
    EXPECT_DEVICE_CHECK(device.run());
  };
  expect_error([](DeviceAttention& d) {
    std::vector<int32_t> table = d.block_table.get();
    table[static_cast<size_t>(d.params.block_table_stride)] = -1;
    d.block_table.set(table);
  });
  expect_error([](DeviceAttention& d) { d.params.block_table_stride = 2; });
  expect_error([](DeviceAttention& d) { d.lengths.set({300, 100}); });
  expect_error([](DeviceAttention& d) { d.lengths.set({300, 800}); });
  expect_error([](DeviceAttention& d) { d.quantized_lengths.set({-32, 448}); });
  expect_error([](DeviceAttention& d) { d.new_lengths.set({1, 2}); });
}

TEST(AttentionBits, EmptyCallsLaunchNothing) {
  AttentionCase c(attention_spec(small_format()));
  for (const int which : {0, 1, 2}) {
    AttentionParams p = c.params();
    (which == 0 ? p.batch : which == 1 ? p.num_heads : p.q_len) = 0;
#if defined(KIVI_ON_DEVICE)
    EXPECT_EQ(attention(p, nullptr, nullptr), cudaSuccess);
#else
    const uint64_t before = emulator::stats().launches;
    EXPECT_EQ(attention(p, nullptr, nullptr), cudaSuccess);
    EXPECT_EQ(emulator::stats().launches, before);
#endif
  }
}

}  // namespace
}  // namespace kivi::cuda
