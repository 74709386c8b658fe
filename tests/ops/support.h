// What the tests of the operators share: data from a seed, comparison to the bit, the words that an error must hold,
// and references that are written with at:: calls and know nothing of the library's kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace kivi::test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline const std::vector<int64_t> kAllBits = {1, 2, 3, 4, 8};

inline at::Tensor randn(at::IntArrayRef sizes, uint64_t seed, at::ScalarType type = at::kFloat) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kFloat)).to(type);
}

inline at::Tensor longs(const std::vector<int64_t>& values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong));
}

inline at::Tensor floats(const std::vector<double>& values, at::ScalarType type = at::kFloat) {
  return at::tensor(values, at::TensorOptions().dtype(at::kDouble)).to(type);
}

inline CacheOptions options_of(int64_t heads, int64_t dim, int64_t group, int64_t residual, int64_t sink,
                               int64_t k_bits = 2, int64_t v_bits = 2) {
  CacheOptions o;
  o.num_kv_heads = heads;
  o.head_dim = dim;
  o.group_size = group;
  o.residual_length = residual;
  o.sink_length = sink;
  o.k_bits = k_bits;
  o.v_bits = v_bits;
  return o;
}

// Tokens [first, last) of both.
inline void append_range(KVCache& cache, const at::Tensor& k, const at::Tensor& v, int64_t first, int64_t last) {
  cache.append(k.narrow(2, first, last - first), v.narrow(2, first, last - first));
}

// Same dtype, sizes and bytes: NaN equals NaN, 0 does not equal -0.
inline ::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure() << "dtypes " << a.scalar_type() << " and " << b.scalar_type();
  }
  if (a.sizes() != b.sizes()) return ::testing::AssertionFailure() << "sizes " << a.sizes() << " and " << b.sizes();
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  const auto size = static_cast<int64_t>(x.element_size());
  const auto* p = static_cast<const char*>(x.const_data_ptr());
  const auto* q = static_cast<const char*>(y.const_data_ptr());
  if (x.numel() == 0 || std::memcmp(p, q, static_cast<size_t>(x.numel() * size)) == 0) {
    return ::testing::AssertionSuccess();
  }
  int64_t different = 0, first = -1;
  for (int64_t i = 0; i < x.numel(); i++) {
    if (std::memcmp(p + i * size, q + i * size, static_cast<size_t>(size)) == 0) continue;
    if (first < 0) first = i;
    different++;
  }
  return ::testing::AssertionFailure() << different << " of " << x.numel()
                                       << " elements differ, the first at flat index " << first << ": "
                                       << x.flatten()[first].item<double>() << " and "
                                       << y.flatten()[first].item<double>() << ", sizes " << x.sizes();
}

inline ::testing::AssertionResult same_state(const KVCache::State& a, const KVCache::State& b) {
  if (std::get<0>(a) != std::get<0>(b)) return ::testing::AssertionFailure() << "headers differ";
  const auto &x = std::get<1>(a), &y = std::get<1>(b);
  if (x != y) {
    auto failure = ::testing::AssertionFailure() << "integers differ:";
    for (size_t i = 0; i < std::max(x.size(), y.size()); i++) {
      const int64_t p = i < x.size() ? x[i] : -999, q = i < y.size() ? y[i] : -999;
      if (p != q) failure << " [" << i << "] " << p << " and " << q;
    }
    return failure;
  }
  const auto &s = std::get<2>(a), &t = std::get<2>(b);
  if (s.size() != t.size()) return ::testing::AssertionFailure() << s.size() << " and " << t.size() << " tensors";
  for (size_t i = 0; i < s.size(); i++) {
    const auto result = same_bits(s[i], t[i]);
    if (!result) return ::testing::AssertionFailure() << "tensor " << i << ": " << result.message();
  }
  return ::testing::AssertionSuccess();
}

// Largest absolute difference, in double. NaN if any element of one alone is NaN.
inline double max_difference(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  if (a.numel() == 0) return 0;
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

// `call` throws a c10::Error whose message holds every word.
template <class Call>
void expect_error(Call&& call, const std::vector<std::string>& words) {
  try {
    call();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" is not in: " << message;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a c10::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error";
}

// Restores torch's thread count.
class Threads {
 public:
  Threads() : before_(at::get_num_threads()) {}
  explicit Threads(int count) : Threads() { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

// Sets torch's default dtype for a while.
class DefaultDtype {
 public:
  explicit DefaultDtype(at::ScalarType type) : before_(c10::get_default_dtype()) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(type));
  }
  ~DefaultDtype() { c10::set_default_dtype(before_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  caffe2::TypeMeta before_;
};

// The tensors of a cache for the operators, empty, with pages [B, max_pages] in order.
inline CacheTensors make_tensors(at::IntArrayRef format, int64_t batch, int64_t max_pages,
                                 at::ScalarType type = at::kFloat) {
  const int64_t heads = format[1], dim = format[2], value_dim = format[3], sink = format[8];
  const int64_t slots = cache_window_capacity(format);
  const auto exact = at::TensorOptions().dtype(type);
  CacheTensors t;
  t.pool = at::zeros({batch * max_pages, cache_page_bytes(format)}, at::kByte);
  t.block_table = at::arange(batch * max_pages, at::kInt).view({batch, max_pages});
  t.lengths = at::zeros({batch}, at::kLong);
  t.quantized_lengths = at::zeros({batch}, at::kLong);
  t.sink_k = at::zeros({batch, heads, sink, dim}, exact);
  t.sink_v = at::zeros({batch, heads, sink, value_dim}, exact);
  t.window_k = at::zeros({batch, heads, slots, dim}, exact);
  t.window_v = at::zeros({batch, heads, slots, value_dim}, exact);
  return t;
}

inline std::vector<at::Tensor> list(const CacheTensors& t) {
  return {t.pool, t.block_table, t.lengths, t.quantized_lengths, t.sink_k, t.sink_v, t.window_k, t.window_v};
}

inline CacheTensors from_list(const std::vector<at::Tensor>& t) {
  return {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]};
}

inline CacheTensors copy(const CacheTensors& t) {
  std::vector<at::Tensor> copies = list(t);
  for (at::Tensor& part : copies) part = part.clone();
  return from_list(copies);
}

// The quantiser of the definition, with at:: calls: x [..., groups, G, ...] reduced along `dim`; scale and zero rounded
// to float16 before the codes are taken. Returns zero + code * scale in float32.
inline at::Tensor definition(const at::Tensor& x, int64_t dim, int64_t bits, bool float16_scales) {
  const double levels = static_cast<double>((int64_t{1} << bits) - 1);
  const at::Tensor lo = x.amin(dim, true), hi = x.amax(dim, true);
  at::Tensor scale = (hi - lo) / levels, zero = lo;
  if (float16_scales) scale = scale.to(at::kHalf).to(at::kFloat), zero = zero.to(at::kHalf).to(at::kFloat);
  const at::Tensor divisor = at::where(scale == 0, at::ones_like(scale), scale);
  const at::Tensor codes = at::where(scale == 0, at::zeros_like(x), at::round((x - zero) / divisor).clamp(0, levels));
  return zero + codes * scale;
}

// Keys [B, H, m, D], m a multiple of `group`: per channel, along tokens.
inline at::Tensor definition_keys(const at::Tensor& k, int64_t bits, int64_t group, bool float16_scales = true) {
  const at::Tensor x = k.to(at::kFloat);
  return definition(x.unflatten(2, {x.size(2) / group, group}), 3, bits, float16_scales).reshape(x.sizes());
}

// Values [B, H, m, Dv]: per token, along channels; the last group may be short.
inline at::Tensor definition_values(const at::Tensor& v, int64_t bits, int64_t group, bool float16_scales = true) {
  const at::Tensor x = v.to(at::kFloat);
  std::vector<at::Tensor> parts;
  for (int64_t d = 0; d < x.size(3); d += group) {
    parts.push_back(definition(x.narrow(3, d, std::min(group, x.size(3) - d)), 3, bits, float16_scales));
  }
  return at::cat(parts, 3);
}

// As stored values are given back: rounded to the dtype; a finite value that would be infinite in float16 is +-65504.
inline at::Tensor given_back(const at::Tensor& x, at::ScalarType type) {
  return type == at::kHalf ? at::where(x.isinf(), x, at::clamp(x, -65504.0, 65504.0)).to(type) : x.to(type);
}

}  // namespace kivi::test
