// Tensors made from the bytes of an input, for the targets that go through libkivi.so: their contents, small caches,
// and comparison to the bit.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "kivi/kivi.h"
#include "tests/fuzz/bytes.h"

namespace kivi::fuzz {

inline at::ScalarType float_type(Bytes& in) { return in.pick({at::kFloat, at::kHalf, at::kBFloat16}); }

// Numbers of one kind: of order 1, tiny, beyond float16's range, equal, now and then NaN or Inf.
inline at::Tensor numbers(Bytes& in, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor t = at::empty(sizes, at::TensorOptions().dtype(at::kFloat));
  auto* const data = t.mutable_data_ptr<float>();
  const int kind = in.byte() % 8;
  uint64_t state = in.byte() * 0x9E3779B97F4A7C15u + 1;
  const float factors[8] = {1.0f, 1.0f, 1.0f, 1e-30f, 3e5f, 3e38f, 0.0f, 100.0f};
  for (int64_t i = 0; i < t.numel(); i++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    data[i] = (static_cast<float>(state >> 40) / 8388608.0f - 1.0f) * factors[kind];
    if (kind == 1 && (state >> 32) % 97 == 0) data[i] = std::numeric_limits<float>::quiet_NaN();
    if (kind == 2 && (state >> 32) % 97 == 0) data[i] = -std::numeric_limits<float>::infinity();
  }
  return t.to(type);
}

inline at::Tensor longs(const std::vector<int64_t>& values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong));
}

// Right options of a small cache, with everything that a format can have.
inline CacheOptions small_options(Bytes& in) {
  CacheOptions o;
  o.num_kv_heads = in.number(1, 2);
  o.head_dim = in.pick<int64_t>({16, 1, 20, 32, 40});
  o.value_head_dim = in.pick<int64_t>({16, 1, 20, 32, 48});
  o.k_bits = in.pick<int64_t>({2, 1, 3, 4, 8});
  o.v_bits = in.pick<int64_t>({2, 1, 3, 4, 8});
  o.group_size = in.pick<int64_t>({16, 16, 32});
  o.residual_length = in.number(0, 20);
  o.sink_length = in.number(0, 5);
  o.precision = in.flag() ? "exact" : "fast";
  o.scale_dtype = in.pick({"float16", "float8", "float32"});
  o.range_search = in.one_in(3);
  o.k_bias_correction = in.flag();
  o.v_gain_correction = in.flag();
  if (in.one_in(3)) o.v_group_size = o.value_head_dim;
  o.v_symmetric = in.one_in(3);
  o.v_rotated = in.one_in(3);
  if (o.head_dim > 16 && in.flag()) {
    o.k_classes = {16, in.pick<int64_t>({4, 2, 8}), o.head_dim - 16, in.pick<int64_t>({2, 1, 3, 4})};
  }
  return o;
}

// Tensors whose bytes can be read as they are.
inline bool is_readable(const at::Tensor& t) {
  return t.defined() && t.layout() == at::kStrided && t.device().is_cpu() && !t.is_neg() && !t.is_conj();
}

// Same dtype, sizes and bytes: NaN equals NaN, 0 does not equal -0.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

inline bool same_state(const KVCache::State& a, const KVCache::State& b) {
  const auto &s = std::get<2>(a), &t = std::get<2>(b);
  if (std::get<0>(a) != std::get<0>(b) || std::get<1>(a) != std::get<1>(b) || s.size() != t.size()) return false;
  for (size_t i = 0; i < s.size(); i++) {
    if (!same_bits(s[i], t[i])) return false;
  }
  return true;
}

// Whether a cache of this format with so many rows is small enough for a fuzz target (its exact part is allocated at
// once, and a format may ask for 2^30 exact tokens). Integers that are no format are an error elsewhere.
inline bool is_small(at::IntArrayRef format, int64_t batch) {
  try {
    const auto slots = static_cast<double>(cache_window_capacity(format) + format[8]);
    const auto token = static_cast<double>(format[1]) * static_cast<double>(format[2] + format[3]) * 4;
    return static_cast<double>(batch) * slots * token < 1e8 && cache_page_bytes(format) < 50'000'000;
  } catch (const c10::Error&) {
    return true;
  }
}

}  // namespace kivi::fuzz
