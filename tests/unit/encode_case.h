// Tokens of one group, and the fixture that encodes and decodes them with every instruction set.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "isa.h"
#include "oracle.h"

namespace kivi::cpu {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Tokens of one group, with rows further apart than they are long.
struct Tokens {
  Tokens(const Format& format, Element type, uint32_t seed) : f(format) {
    k_stride = f.head_dim + 7, v_stride = f.value_head_dim + 2;
    k = Array(type, f.group_size * k_stride);
    v = Array(type, f.group_size * v_stride);
    Random random(seed);
    for (int64_t t = 0; t < f.group_size; t++) {
      for (int64_t d = 0; d < f.head_dim; d++)
        set_k(t, d, random.normal() * (d % 16 == 0 ? 6.0f : 1.0f) + 0.3f * static_cast<float>(d % 3));
      for (int64_t d = 0; d < f.value_head_dim; d++) set_v(t, d, random.normal());
    }
  }
  void set_k(int64_t t, int64_t d, float x) { k.set(t * k_stride + d, x); }
  void set_v(int64_t t, int64_t d, float x) { v.set(t * v_stride + d, x); }

  // The order of the keys; null where there are no classes.
  const int16_t* order() const { return k_order.empty() ? nullptr : k_order.data(); }

  Format f;
  int64_t k_stride, v_stride;
  Array k, v;
  std::vector<int16_t> k_order;
};

class Encode : public IsaTest {
 public:
  bool encode(const Tokens& x, Record* record) {
    const RecordLayout layout = record_layout(x.f);
    EncodeParams p{&x.f,       &layout,    x.k.data(),     x.v.data(), x.k_stride,
                   x.v_stride, x.k.type(), record->data(), x.order()};
    return kernels().encode(p);
  }

  // Decodes tokens [first, first + count) of the record.
  std::pair<Array, Array> decode(const Format& f, const Record& record, Element type, int64_t first, int64_t count,
                                 const int16_t* k_order = nullptr) {
    const RecordLayout layout = record_layout(f);
    Array k(type, count * f.head_dim), v(type, count * f.value_head_dim);
    DecodeParams p{&f, &layout, record.data(), first, count, k.data(), v.data(), f.head_dim, f.value_head_dim, type};
    p.k_order = k_order;
    kernels().decode(p);
    return {std::move(k), std::move(v)};
  }

  // Tokens [first, first + count) by this table and by the scalar one. Rows are a multiple of 64 bytes apart; the first
  // begins `offset` elements after a line.
  void check_against_scalar(const Format& f, const Record& record, Element type, int64_t first, int64_t count,
                            int64_t offset, bool stream) {
    const RecordLayout layout = record_layout(f);
    const int64_t size = element_bytes(type), stride = round_up(f.head_dim, 32);
    const int64_t values = offset + count * stride;
    Record got_k(values * size), got_v(values * size), want_k(values * size), want_v(values * size);
    const auto decode_into = [&](const Kernels& kernels, Record& k, Record& v) {
      kernels.decode({&f, &layout, record.data(), first, count, k.data() + offset * size, v.data() + offset * size,
                      stride, stride, type, stream});
    };
    decode_into(kernels(), got_k, got_v);
    decode_into(scalar(), want_k, want_v);
    EXPECT_TRUE(got_k.guard_intact() && got_v.guard_intact()) << format_text(f);
    for (const auto& [got, want] : {std::pair<Record*, Record*>{&got_k, &want_k}, {&got_v, &want_v}}) {
      if (std::memcmp(got->data(), want->data(), static_cast<size_t>(values * size)) == 0) continue;
      for (int64_t i = 0; i < values; i++) {
        const bool same = std::memcmp(got->data() + i * size, want->data() + i * size, static_cast<size_t>(size)) == 0;
        const float a = load_element(got->data(), type, i), b = load_element(want->data(), type, i);
        ASSERT_TRUE(same || (std::isnan(a) && std::isnan(b)))
            << format_text(f) << " " << element_name(type) << " token " << first + (i - offset) / stride << " channel "
            << (i - offset) % stride << ": " << a << ", not " << b;
      }
    }
  }

  // One record against the oracle: bytes, the answer of encode, and the values of every token in every type.
  void check(const Tokens& x, bool decode_too = true) {
    const Format& f = x.f;
    const RecordLayout layout = record_layout(f);
    bool want_fits = true;
    std::vector<float> k_back, v_back;
    const std::vector<uint8_t> want =
        oracle::encode(f, x.k, x.k_stride, x.v, x.v_stride, &want_fits, &k_back, &v_back, x.order());
    Record got(layout.bytes);
    const bool fits = encode(x, &got);
    ASSERT_EQ(fits, want_fits) << format_text(f);
    EXPECT_TRUE(got.guard_intact()) << format_text(f);
    if (!fits) return;  // the record is not to be used
    const std::vector<uint8_t> bytes = got.copy();
    if (bytes != want) {
      for (size_t i = 0; i < bytes.size(); i++) {
        ASSERT_EQ(bytes[i], want[i]) << "byte " << i << " of " << layout.bytes << ", " << format_text(f) << " "
                                     << element_name(x.k.type());
      }
    }
    if (!decode_too) return;
    for (const Element type : kElements) {
      Array k(type, static_cast<int64_t>(k_back.size())), v(type, static_cast<int64_t>(v_back.size()));
      for (int64_t i = 0; i < k.size(); i++) k.set(i, k_back[static_cast<size_t>(i)]);
      for (int64_t i = 0; i < v.size(); i++) v.set(i, v_back[static_cast<size_t>(i)]);
      const auto values = decode(f, got, type, 0, f.group_size, x.order());
      EXPECT_EQ(values.first.bytes(), k.bytes()) << format_text(f) << " " << element_name(type);
      EXPECT_EQ(values.second.bytes(), v.bytes()) << format_text(f) << " " << element_name(type);
    }
  }
};

}  // namespace kivi::cpu
