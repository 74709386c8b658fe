// How attention on a GPU divides the keys of a row of the batch, and how the parts join: shared by the kernels that
// make parts and the one that merges them.
//
// Part 0 takes the exact tokens: sink, window and new ones. Part i + 1 takes a run of quantised pages. How long the
// runs are depends on the row's own number of quantised tokens alone (known on the device), so that a row's result does
// not depend on what else is in the batch, nor on the device; the host launches as many parts as the block table could
// need, and those past the row's last one leave at once.
//
// Results of a part, for each of the `rows` = group_heads * q_len query rows of a kv head ([head of the group][query]):
//
//   acc [v_channels] | max | sum      floats; v_channels is the value head size rounded up to 16
//
// as in cpu/plan.h: max in log2 units, -inf where no key is seen, sum and acc relative to it. acc of the quantised
// parts is what the records hold: where V is rotated, still rotated. acc need not be written where sum is 0.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "format/keys.h"
#include "format/params.h"

namespace kivi::cuda {

// Pages (of 128 tokens) in a run of a row with this many pages: 512 tokens up to 8k, so that a single short sequence
// still keeps a GPU busy; longer rows have enough runs of twice and four times that.
constexpr int64_t pages_per_part(int64_t pages) { return pages <= 64 ? 4 : pages <= 512 ? 8 : 16; }
constexpr int64_t quantized_parts(int64_t pages) { return ceil_div(pages, pages_per_part(pages)); }
// The most parts that a row of at most `pages` pages may have, part 0 included.
constexpr int64_t most_parts(int64_t pages) {
  const int64_t most = quantized_parts(pages);
  const int64_t below = pages > 512 ? quantized_parts(512) : pages > 64 ? quantized_parts(64) : 0;
  return 1 + (most > below ? most : below);
}

KIVI_HOST_DEVICE inline int64_t query_rows(const AttentionParams& p) { return group_heads(p) * p.q_len; }
KIVI_HOST_DEVICE inline int64_t part_row_floats(const AttentionParams& p) { return p.layout.v_channels + 2; }
// Offset, in floats, of a query row's results in the scratch memory: [B][Hkv][parts][rows][part_row_floats].
KIVI_HOST_DEVICE inline int64_t part_offset(const AttentionParams& p, int64_t parts, int64_t batch, int64_t kv_head,
                                            int64_t part, int64_t row) {
  return (((batch * p.format.num_kv_heads + kv_head) * parts + part) * query_rows(p) + row) * part_row_floats(p);
}

}  // namespace kivi::cuda
