// What the two halves of cache_bench share: shapes, tensors of random tokens and comparisons with what torch computes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <string>
#include <vector>

#include "harness.h"
#include "kivi/kivi.h"

namespace kivi::bench {

inline constexpr int64_t kHeads = 32, kKvHeads = 8, kDim = 128;

// Keys and values [1, kv heads, tokens, channels] of one layer.
struct Dense {
  at::Tensor k, v;
  double bytes() const { return static_cast<double>(k.nbytes() + v.nbytes()); }
};

// The same for the same number of tokens; not to be written to.
inline const Dense& random_tokens(int64_t tokens) {
  static Dense last;
  if (!last.k.defined() || last.k.size(2) != tokens) {
    at::manual_seed(3);
    last = {};
    last.k = at::randn({1, kKvHeads, tokens, kDim});
    last.v = at::randn_like(last.k);
  }
  return last;
}

inline const char* type_name(at::ScalarType type) { return type == at::kFloat ? "f32" : "bf16"; }

// How many copies of `bytes` make a cold rotation.
inline int64_t cold_copies(double bytes) {
  return quick ? 2 : static_cast<int64_t>(static_cast<double>(kColdBytes) / bytes) + 1;
}

inline std::vector<Dense> cold_layers(const Dense& first, at::ScalarType type) {
  std::vector<Dense> layers;
  const Dense typed{first.k.to(type), first.v.to(type)};
  for (int64_t i = 0; i < cold_copies(typed.bytes()); i++) layers.push_back({typed.k.clone(), typed.v.clone()});
  return layers;
}

// The largest difference; NaN if anything is NaN.
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Fails the benchmark, and returns false, unless error <= limit.
inline bool check_limit(benchmark::State& state, const std::string& what, double error, double limit) {
  if (error <= limit) return true;
  char text[64];
  std::snprintf(text, sizeof text, " is off by %.3g, more than %.3g", error, limit);
  fail(state, "WRONG RESULT: " + what + text);
  return false;
}

void add_decode_benchmarks();   // cache_decode_bench.cpp
void add_storage_benchmarks();  // cache_storage_bench.cpp

}  // namespace kivi::bench
