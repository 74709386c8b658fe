// What the attention kernels of all instruction sets share: which keys a query row may see, the layout of partial
// results, and how a finished row is written. The division of the work itself is attention_plan in kernels.h.
//
// Partial results of one item: its rows one after another, `partial_row_floats` floats each:
//
//   acc [v_channels] | max | sum        (v_channels = the value head size rounded up to 16, added channels 0)
//
// max is the largest score seen, in log2 units: the score (scale, softcap, ALiBi and mask included) times log2(e).
// -inf: no key. sum = sum over the keys seen of 2^(score - max), acc = sum of 2^(score - max) * value. Where no key is
// seen sum and acc are 0. A NaN score leaves max as it is and makes sum and acc NaN.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "format/keys.h"

namespace kivi::cpu {

inline constexpr int64_t kMaxItemRows = 32;  // query rows of one item at most

inline int64_t partial_row_floats(const AttentionParams& p) { return p.layout.v_channels + 2; }

// One row of an item: which query head and which query it is.
struct QueryRow {
  int64_t head;   // of num_heads
  int64_t query;  // of q_len
};
// `row` counts from 0 within the item.
inline QueryRow query_row(const AttentionParams& p, const AttentionItem& item, int64_t row) {
  const int64_t r = item.first_row + row;
  return {item.kv_head * group_heads(p) + r / p.q_len, r % p.q_len};
}

// Ends one row: adds the learned sink logit to the denominator, divides, writes `out` (a finite value beyond float16
// becomes
// +-65504 there) and `lse`. `row` counts from 0 within the item; acc has v_channels floats, max and sum are as in a
// partial result. A query that does not exist, or that sees no key, gets 0.
void finish_row(const AttentionParams& params, const AttentionItem& item, int64_t row, const float* acc, float max,
                float sum);

}  // namespace kivi::cpu
