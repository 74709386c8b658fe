// The CPU kernels: quantise, dequantise, encode and decode of block records, attention over a cache. No torch header:
// raw pointers, sizes, strides in elements. Every function exists once per instruction set behind one table; the scalar
// one is the reference that the others are tested against. Arguments are checked by the caller (ops/checks.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/params.h"
#include "kivi/format.h"

namespace kivi::cpu {

enum class Isa : uint8_t { kScalar, kNeon, kAvx2, kAvx512, kAvx512Vnni };

// ---------------------------------------------------------------------------------------------- records

// One group of tokens of one kv head into one record. Channels are contiguous. Per group of one channel (K) or of one
// token and Gv channels (V), in fp32: lo = min, hi = max, scale = (hi - lo) / (2^bits - 1), zero = lo, both rounded to
// the stored type, then code = clamp(rint((x - zero) / scale), 0, 2^bits - 1) against the stored values (scale 0: code
// 0); rint is half to even. A group that holds NaN or Inf, or whose hi - lo overflows fp32, is stored as scale 0, zero
// NaN, codes 0: it comes back as NaN.
//
// Options of the format change this so, in this order:
//   rotated V     the row is rotated first (kivi/format.h), in fp32
//   symmetric V   hi = max |x|, lo = -hi; zero = -scale * (2^bits - 1) / 2
//   float8        scale = the larger one of (hi - lo) / (2^bits - 1) and |zero| / 119.5 * zero_steps, rounded; zero =
//                 (lo + hi) / 2 - scale * (2^bits - 1) / 2, rounded to a step
//   bias (K)      zero += mean(x - x^), stored again; codes stay
//   gain (V)      scale = sum (x - mx)^2 / sum (c - mc)(x - mx) within [1/2, 2] of what it was, zero = mx - scale * mc,
//                 stored again, with mx and mc the means of x and of the codes (symmetric: 0 and the middle code)
//   search        all of it for each part of the range, (hi - lo) * r around the same middle; the least sum of squared
//                 errors wins, the first of equal ones
// A correction, or a part, whose numbers do not fit the stored type is passed over. With float8 or any of these options
// codes are rint((x - zero) * (1 / scale)), and 0 where scale is below 2^-126. (In which order the sums are added is
// written in reference_record.cpp.)
struct EncodeParams {
  const Format* format;
  const RecordLayout* layout;
  const void* k;           // [group_size][head_dim]
  const void* v;           // [group_size][value_head_dim]
  int64_t k_token_stride;  // elements
  int64_t v_token_stride;
  Element type;
  uint8_t* record;                   // layout->bytes, on record_alignment; every byte is written
  const int16_t* k_order = nullptr;  // with classes of keys: [head_dim], the channel in each place
};

// Values of `count` tokens of a record from token `first`: x^ = zero + code * scale in fp32, rounded to `type`; a
// finite value that rounds to infinity in fp16 becomes +-65504 instead.
struct DecodeParams {
  const Format* format;
  const RecordLayout* layout;
  const uint8_t* record;
  int64_t first;
  int64_t count;
  void* k;  // [count][head_dim], channels contiguous; null: not wanted
  void* v;  // [count][value_head_dim]
  int64_t k_token_stride;
  int64_t v_token_stride;
  Element type;
  // Rows that begin on 64 bytes may be written past the caches, for an output that is larger than these (see
  // kStreamBytes). flush_streams() is then called before another thread reads them.
  bool stream = false;
  const int16_t* k_order = nullptr;  // as for encode
};

// Outputs of this size or more are written past the caches, which are little larger. (8 MB written and read back take
// 0.27 ms, past the caches 0.50; 34 MB take 6.9 ms, past the caches 3.0. Zen 4.)
inline constexpr int64_t kStreamBytes = int64_t{1} << 24;

// Orders the calling thread's stores past the caches before its later ones (vector_encode.cpp).
void flush_streams();

// ---------------------------------------------------------------------------------------------- dense quantise

// Work of quantize and dequantize: outer * ceil_div(inner, kInnerBlock) units, unit u = outer u / blocks, inner block u
// % blocks.
inline constexpr int64_t kInnerBlock = 64;

// ---------------------------------------------------------------------------------------------- attention

// The fixed division of the work: independent of the thread count and, per row, of the other rows of the batch.
// One item = one row of the batch, one kv head, a run of its query rows, a run of its keys.
struct AttentionItem {
  int64_t batch, kv_head;
  int64_t first_row, num_rows;    // of the (num_heads / num_kv_heads) * q_len rows [head of the group][query]
  int64_t first_page, num_pages;  // quantised pages
  bool exact_keys;                // this item takes sink, window and new tokens
  int64_t split, num_splits;      // num_splits == 1: the item writes `out` itself
  int64_t partial;                // where its partial results start, in floats; -1 if num_splits == 1
};

// ---------------------------------------------------------------------------------------------- the table

struct Kernels {
  Isa isa;
  const char* name;  // "scalar", "neon", "avx2", "avx512", "avx512_vnni"
  // False if the scale or zero of a finite group does not fit the float8 or float16 that the format stores; the record
  // is then not usable. With float32 storage it is always true.
  bool (*encode)(const EncodeParams&);
  void (*decode)(const DecodeParams&);
  void (*quantize)(const QuantizeParams&, int64_t begin, int64_t end);      // units
  void (*dequantize)(const DequantizeParams&, int64_t begin, int64_t end);  // units
  // Items [begin, end) of the plan; `partials` has plan_floats elements.
  void (*attention)(const AttentionParams&, const AttentionItem* items, int64_t begin, int64_t end, float* partials);
};

// The best table that this CPU runs, unless the environment variable KIVI_CPU_CAPABILITY names a lesser one of `name`.
const Kernels& kernels();
// Null if this build or this CPU has no such table. Scalar is always there.
const Kernels* kernels_for(Isa isa);

// ---------------------------------------------------------------------------------------------- plan and merge (all
// ISAs)

// Number of items; `items` (null: only count) is filled in order (batch, kv head, rows, split). `*partial_floats` is
// the size of the scratch buffer for partial results.
int64_t attention_plan(const AttentionParams&, AttentionItem* items, int64_t* partial_floats);
// Merges the partial results of the (batch, query row) pairs whose items were split, in the order of the splits.
// [begin, end) are item indices; an item with split == 0 and num_splits > 1 leads its run, the other items are passed
// over, so that any division of the items between threads merges every run once.
void attention_merge(const AttentionParams&, const AttentionItem* items, int64_t begin, int64_t end,
                     const float* partials);

}  // namespace kivi::cpu
