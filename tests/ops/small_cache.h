// A small cache, as an object and as the tensors of the operators, for the tests of errors and of the operators.
#pragma once

#include "tests/ops/support.h"

namespace kivi::test {

inline constexpr int64_t kBatch = 2, kHeads = 2, kDim = 16, kValueDim = 20, kTokens = 60;

inline CacheOptions cache_options() {
  CacheOptions o;
  o.num_kv_heads = kHeads;
  o.head_dim = kDim;
  o.value_head_dim = kValueDim;
  o.group_size = 16;
  o.residual_length = 8;
  o.sink_length = 4;
  return o;
}

inline std::vector<int64_t> op_format() { return cache_format(kHeads, kDim, kValueDim, 2, 2, 16, 8, 4); }

// A cache of the operators with kTokens and 37 tokens.
inline CacheTensors filled() {
  CacheTensors t = make_tensors(op_format(), kBatch, 2);
  cache_append(t, randn({kBatch, kHeads, kTokens, kDim}, 7), randn({kBatch, kHeads, kTokens, kValueDim}, 8),
               op_format(), longs({kTokens, 37}));
  return t;
}

inline const std::vector<std::string> kParts = {"pool",   "block_table", "lengths",  "quantized_lengths",
                                                "sink_k", "sink_v",      "window_k", "window_v"};

}  // namespace kivi::test
