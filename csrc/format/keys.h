// Which keys there are for a row of the batch, where they are kept, and which of them a query may see: shared by the
// attention kernels of all machines.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "format/params.h"

namespace kivi {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Query heads that share one kv head.
KIVI_HOST_DEVICE inline int64_t group_heads(const AttentionParams& p) { return p.num_heads / p.format.num_kv_heads; }

// The tokens of one row of the batch, by where they are kept.
struct KeyRanges {
  int64_t cached;        // n: sink + quantised + window
  int64_t sink;          // exact tokens [0, sink)
  int64_t quantized;     // tokens [sink_length, sink_length + quantized) in records
  int64_t window_begin;  // exact tokens [window_begin, cached) in the ring; window_begin <= cached
  int64_t fresh;         // new tokens [cached, cached + fresh)
  int64_t rows;          // queries that exist; the others give 0
};
KIVI_HOST_DEVICE inline KeyRanges key_ranges(const AttentionParams& p, int64_t batch) {
  KeyRanges r;
  const int64_t sink_length = p.format.sink_length;
  r.cached = p.lengths[batch];
  r.sink = r.cached < sink_length ? r.cached : sink_length;
  r.quantized = p.quantized_lengths[batch];
  r.window_begin = r.sink + r.quantized;
  r.fresh = p.new_lengths != nullptr ? p.new_lengths[batch] : p.new_len;
  r.rows = p.rows_follow_new ? r.fresh : p.q_len;
  return r;
}

// Position of query i: the last one stands where the newest token does. May be negative: such a causal query sees
// nothing.
KIVI_HOST_DEVICE inline int64_t query_position(const KeyRanges& r, int64_t query) {
  return r.cached + r.fresh - r.rows + query;
}

// The keys [begin, end) that the query at `position` may see, before any mask.
struct SeenKeys {
  int64_t begin, end;
};
KIVI_HOST_DEVICE inline SeenKeys seen_keys(const AttentionParams& p, const KeyRanges& r, int64_t position) {
  const int64_t total = r.cached + r.fresh;
  SeenKeys seen{0, total};
  if (p.causal && position + 1 < total) seen.end = position + 1 > 0 ? position + 1 : 0;
  if (p.window > 0 && position - p.window + 1 > 0) seen.begin = position - p.window + 1;
  if (seen.begin > seen.end) seen.begin = seen.end;
  return seen;
}

// Whether the mask reaches as far as these keys.
KIVI_HOST_DEVICE inline bool mask_covers(const AttentionParams& p, const SeenKeys& seen) {
  return p.mask_type == MaskType::kNone || p.mask_strides[3] == 0 || seen.end <= p.mask_keys;
}

// Whether a page of a row is one of the pool's.
KIVI_HOST_DEVICE inline bool page_is_there(const AttentionParams& p, int64_t batch, int64_t page) {
  const int64_t id = p.block_table[batch * p.block_table_stride + page];
  return id >= 0 && id < p.pool_pages;
}

// Record of group `record` (of 128 / G) of quantised page `page` of a row of the batch.
KIVI_HOST_DEVICE inline const uint8_t* record_address(const AttentionParams& p, int64_t batch, int64_t kv_head,
                                                      int64_t page, int64_t record) {
  const int64_t id = p.block_table[batch * p.block_table_stride + page];
  const int64_t records = kPageTokens / p.format.group_size;
  return p.pool + id * p.page_bytes + (kv_head * records + record) * p.layout.bytes;
}

// The order of one head's keys, null where there are no classes.
KIVI_HOST_DEVICE inline const int16_t* head_order(const AttentionParams& p, int64_t batch, int64_t kv_head) {
  if (p.k_order == nullptr) return nullptr;
  return p.k_order + (batch * p.format.num_kv_heads + kv_head) * p.format.head_dim;
}

}  // namespace kivi
