// dequantize_cache, truncate and widen of csrc/cuda, against the model of a cache and the scalar kernels, to the byte.
#include <initializer_list>

#include "cuda/cache_case.h"

namespace kivi::cuda {
namespace {

// Tokens [0, length) of every row as the cache gives them back: [B][Hkv][length][D], 0 past a row's length.
std::pair<std::vector<uint8_t>, std::vector<uint8_t>> all_tokens(const CacheModel& model, int64_t length) {
  std::vector<uint8_t> k, v;
  for (int64_t b = 0; b < model.batch; b++) {
    for (int64_t h = 0; h < model.f.num_kv_heads; h++) {
      for (int64_t n = 0; n < length; n++) {
        const int64_t size = element_bytes(model.type);
        CacheModel::Token t{std::vector<uint8_t>(static_cast<size_t>(model.f.head_dim * size), 0),
                            std::vector<uint8_t>(static_cast<size_t>(model.f.value_head_dim * size), 0)};
        if (n < model.m.lengths[static_cast<size_t>(b)]) t = model.token(b, h, n);
        k.insert(k.end(), t.k.begin(), t.k.end());
        v.insert(v.end(), t.v.begin(), t.v.end());
      }
    }
  }
  return {k, v};
}

void expect_tokens(const CacheModel& model, DeviceCache& device, int64_t length) {
  const auto want = all_tokens(model, length);
  const DeviceArray<uint8_t> k(want.first.size()), v(want.second.size());
  check(dequantize_cache(device.params(), length, k.data(), v.data(), nullptr));
  EXPECT_TRUE(k.get() == want.first) << "K of " << length << " tokens; " << format_text(model.f);
  EXPECT_TRUE(v.get() == want.second) << "V of " << length << " tokens; " << format_text(model.f);
}

CacheModel filled(const Format& f, Element type, const std::vector<int64_t>& lengths, uint32_t seed = 3) {
  int64_t most = 0;
  for (const int64_t n : lengths) most = std::max(most, n);
  const auto batch = static_cast<int64_t>(lengths.size());
  CacheModel model(f, type, batch, most);
  EXPECT_TRUE(model.append(NewTokens(f, type, batch, most, seed), lengths)) << format_text(f);
  return model;
}

TEST(DequantizeCache, EveryOption) {
  for (const int64_t bits : kBitWidths) {
    for (int64_t i = 0; i < 64; i++) {
      const int64_t dims[] = {64, 128, 80, 96, 17}, group = kGroupSizes[(i / 3 + bits) % 4];
      Format f = with_options(make_format(1, dims[(i + bits) % 5], dims[(i + bits + i / 5) % 5], bits, bits, group), i);
      f.residual_length = 5, f.sink_length = i % 3;
      const CacheModel model = filled(f, kElements[(i + bits) % 3], {2 * group + 9}, static_cast<uint32_t>(i));
      DeviceCache device(model);
      expect_tokens(model, device, 2 * group + 9);
      device.expect(model);  // changes nothing
      if (HasFailure()) return;
    }
  }
}

TEST(DequantizeCache, SizesOfHeads) {
  for (const int64_t dim : {1, 2, 15, 17, 33, 100, 127, 256, 300, 576, 1024}) {
    for (const int64_t group : kGroupSizes) {
      for (const int64_t bits : {1, 2, 3, 8}) {
        Format f = make_format(1, dim, dim, bits, bits, group);
        f.residual_length = 0, f.sink_length = 0, f.v_rotated = bits != 2;
        const CacheModel model = filled(f, kElements[bits % 3], {group});
        DeviceCache device(model);
        expect_tokens(model, device, group);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DequantizeCache, ClassesOfKeys) {
  const std::initializer_list<KeyClass> lists[] = {
      {{16, 4}, {48, 2}}, {{16, 4}, {32, 3}, {16, 2}},          {{16, 8}, {64, 1}},
      {{16, 4}, {4, 2}},  {{32, 1}, {32, 3}, {16, 8}, {17, 4}}, {{48, 8}, {480, 1}, {16, 2}, {300, 3}}};
  for (const auto& list : lists) {
    for (const int64_t group : kGroupSizes) {
      Format f = with_classes(make_format(2, 0, 32, 0, 2, group), list);
      f.residual_length = 0;
      f.scale_type = group == 32 ? ScaleType::kFloat8 : ScaleType::kFloat16;
      const CacheModel model = filled(f, kElements[group / 32 % 3], {group + 4, 5});
      DeviceCache device(model);
      expect_tokens(model, device, group + 4);
      if (HasFailure()) return;
    }
  }
}

// Rows of all lengths, asked for less, as much and more than they hold.
TEST(DequantizeCache, Lengths) {
  const std::vector<int64_t> lengths = {0, 1, 31, 32, 33, 63, 64, 65, 129, 1000};
  for (const int64_t sink : {0, 4, 70}) {
    for (const int64_t residual : {0, 31, 128}) {
      Format f = make_format(2, 48, 31, 2, 4, 32);
      f.sink_length = sink, f.residual_length = residual;
      const CacheModel model = filled(f, kElements[(sink + residual) % 3], lengths);
      DeviceCache device(model);
      for (const int64_t length : {0, 1, 3, 32, 69, 70, 71, 100, 999, 1000, 1100}) {
        expect_tokens(model, device, length);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DequantizeCache, EveryOrderOfThreads) {
  for (const int64_t options : {0, 15}) {
    Format f = with_options(make_format(2, 64, 128, 3, 3, 32), options);
    f.residual_length = 32, f.scale_type = ScaleType::kFloat16;
    const CacheModel model = filled(f, Element::kFloat16, {200, 77});
    in_every_order([&] {
      DeviceCache device(model);
      expect_tokens(model, device, 210);
    });
  }
}

// Groups of NaN come back as NaN with the bits of a CPU, rotated or not.
TEST(DequantizeCache, LostGroups) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32}) {
    for (const bool symmetric : {false, true}) {
      for (const bool rotated : {false, true}) {
        for (const Element element : kElements) {
          Format f = make_format(1, 32, 32, 2, 2, 32);
          f.residual_length = 0, f.sink_length = 0;
          f.scale_type = type, f.v_symmetric = symmetric, f.v_rotated = rotated;
          NewTokens x(f, element, 1, 32, 3);
          x.k.set(x.k_at(0, 0, 3) + 7, cpu::Array(element, 1).get(0));  // NaN
          x.v.set(x.v_at(0, 0, 9) + 30, cpu::Array(element, 1).get(0));
          CacheModel model(f, element, 1, 32);
          ASSERT_TRUE(model.append(x));
          DeviceCache device(model);
          expect_tokens(model, device, 32);
        }
      }
    }
  }
}

TEST(DequantizeCache, PageThatIsMissingIsAnError) {
  Format f = make_format(1, 16, 16, 2, 2, 32);
  CacheModel model = filled(f, Element::kFloat16, {400});
  model.m.block_table[1] = -1;
  DeviceCache device(model);
  const DeviceArray<uint8_t> k(400 * 32), v(400 * 32);
  EXPECT_DEVICE_CHECK(dequantize_cache(device.params(), 400, k.data(), v.data(), nullptr));
  EXPECT_NO_THROW(dequantize_cache(device.params(), 132, k.data(), v.data(), nullptr));
}

// ---- truncate --------------------------------------------------------------------------------------

TEST(Truncate, EveryLength) {
  for (const int64_t group : {int64_t{16}, int64_t{64}}) {
    for (const int64_t sink : {0, 5}) {
      Format f = make_format(2, 40, 72, 2, 3, group);
      f.sink_length = sink, f.residual_length = 20, f.v_rotated = group == 64;
      for (int64_t length = 0; length <= 150; length += length < 30 ? 1 : 7) {
        CacheModel model = filled(f, kElements[length % 3], {149, 0, 33, 100});
        DeviceCache device(model);
        check(truncate(device.params(), length, nullptr));
        model.truncate(length);
        device.expect(model);
        // And again: nothing more to do.
        check(truncate(device.params(), length, nullptr));
        device.expect(model);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Truncate, EveryOrderOfThreads) {
  Format f = with_classes(make_format(3, 0, 64, 0, 4, 32), {{16, 4}, {32, 2}});
  f.residual_length = 32;
  in_every_order([&] {
    CacheModel model = filled(f, Element::kBFloat16, {200, 77, 150});
    DeviceCache device(model);
    for (const int64_t length : {160, 120, 61, 60, 3}) {
      check(truncate(device.params(), length, nullptr));
      model.truncate(length);
      device.expect(model);
    }
  });
}

// The scales of narrow values stand where the numbers of wide keys were.
TEST(Truncate, NarrowValuesAfterWideKeys) {
  Format f = make_format(1, 256, 16, 8, 8, 32);
  f.residual_length = 0;
  in_every_order([&] {
    CacheModel model = filled(f, Element::kFloat32, {68});
    DeviceCache device(model);
    check(truncate(device.params(), 4 + 32 + 31, nullptr));
    model.truncate(4 + 32 + 31);
    device.expect(model);
  });
}

// Wide heads take more than one tile a group.
TEST(Truncate, WideHeads) {
  Format f = make_format(1, 576, 1024, 1, 3, 32);
  f.residual_length = 0;
  CacheModel model = filled(f, Element::kFloat16, {68});
  DeviceCache device(model);
  check(truncate(device.params(), 4 + 32 + 21, nullptr));
  model.truncate(4 + 32 + 21);
  device.expect(model);
}

TEST(Truncate, ManyRows) {
  Format f = make_format(1, 1, 1, 2, 2, 16);
  f.residual_length = 0, f.sink_length = 1;
  CacheModel model(f, Element::kFloat16, 66000, 1, 1, 1);
  std::fill(model.m.lengths.begin(), model.m.lengths.end(), int64_t{1});
  DeviceCache device(model);
  check(truncate(device.params(), 0, nullptr));
  std::fill(model.m.lengths.begin(), model.m.lengths.end(), int64_t{0});
  device.expect(model);
}

// ---- widen -----------------------------------------------------------------------------------------

TEST(Widen, EveryFormat) {
  for (int64_t i = 0; i < 40; i++) {
    for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16}) {
      const int64_t bits = kBitWidths[i % 5], group = kGroupSizes[i % 4];
      Format from = with_options(make_format(2, 40, 33 + i, bits, kBitWidths[(i / 5) % 5], group), i);
      if (i % 6 == 5) from = with_classes(from, {{16, 4}, {32, 3}, {16, 2}, {9, 1}});
      from.scale_type = type, from.residual_length = 0, from.sink_length = 0;
      Format to = from;
      to.scale_type = widened(type);
      NewTokens x(from, Element::kFloat32, 1, 2 * group, 3);
      x.k.set(x.k_at(0, 0, 3) + 7, cpu::Array(Element::kFloat32, 1).get(0));  // a lost group
      x.v.set(x.v_at(0, 1, 9) + 30, cpu::Array(Element::kFloat32, 1).get(0));
      CacheModel model(from, Element::kFloat32, 1, 2 * group);
      ASSERT_TRUE(model.append(x));
      const int64_t old_bytes = model.layout.bytes, new_bytes = record_layout(to).bytes;
      std::vector<uint8_t> records;
      for (int64_t r = 0; r < 4; r++) {
        const uint8_t* const record = model.record(0, r / 2, r % 2 * group);
        records.insert(records.end(), record, record + old_bytes);
      }
      std::vector<uint8_t> want(static_cast<size_t>(4 * new_bytes));
      for (int64_t r = 0; r < 4; r++) {
        cpu::widen_record(from, records.data() + r * old_bytes, to, want.data() + r * new_bytes);
      }
      const DeviceArray<uint8_t> in(records), out(want.size());
      check(widen(from, in.data(), to, out.data(), 4, nullptr));
      EXPECT_TRUE(out.get() == want) << format_text(from);
      EXPECT_EQ(in.get(), records);
      if (HasFailure()) return;
    }
  }
}

TEST(Widen, NoRecords) {
  const Format f = make_format(1, 16, 16, 2, 2, 32);
  check(widen(f, nullptr, f, nullptr, 0, nullptr));
}

}  // namespace
}  // namespace kivi::cuda
