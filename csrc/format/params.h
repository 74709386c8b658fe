// What the CPU kernels and the CUDA kernels take alike: element types, and the parameters of the dense operators and of
// attention. Raw pointers of the machine that runs the kernel, sizes, strides in elements. Arguments are checked by the
// caller (ops/checks.h).
#pragma once

#include <cstdint>

#include "kivi/format.h"

namespace kivi {

enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16 };
constexpr int64_t element_bytes(Element e) { return e == Element::kFloat32 ? 4 : 2; }

// x viewed as [outer][n][inner], groups of `group_size` along n (the last one may be short). Codes are a dense
// little-endian bit string along n: code i at bits [i * bits, (i + 1) * bits) of the ceil(n * bits / 8) bytes of its
// row; unused high bits are zero.
struct QuantizeParams {
  int64_t outer, n, inner;
  int64_t bits, group_size;
  const void* x;
  Element type;
  int64_t x_outer_stride, x_n_stride, x_inner_stride;  // elements; any
  uint8_t* codes;  // [outer][ceil(n * bits / 8)][inner] contiguous; null: not wanted (fake_quantize)
  float* scale;    // [outer][ceil(n / group_size)][inner] contiguous; null: not wanted
  float* zero;
  float* values;  // [outer][n][inner] contiguous: zero + code * scale (a multiplication, then an addition, both
                  // rounded); null: not wanted
};

// The inverse. Codes, scale and zero may have any strides.
struct DequantizeParams {
  int64_t outer, n, inner;
  int64_t bits, group_size;
  const uint8_t* codes;
  const float* scale;
  const float* zero;
  int64_t codes_strides[3], scale_strides[3], zero_strides[3];  // outer, n (bytes or groups), inner
  void* out;                                                    // [outer][n][inner] contiguous
  Element type;
};

// No row holds so many tokens: a longer window shows the same, and positions less this one do not overflow.
inline constexpr int64_t kMaxWindow = int64_t{1} << 62;

enum class MaskType : uint8_t { kNone, kBool, kFloat32 };

// Attention of q over one layer's cache, and optionally over `new` tokens that follow it. The keys of row b of the
// batch are
//   sink tokens    [0, min(S, n))                  exact, sink_k / sink_v
//   quantised      [S, S + m)                      records of the pool through the block table
//   window         [S + m, n)                      exact, ring: token t is in slot (t - S) % window_capacity
//   new            [n, n + new_lengths[b])         exact, new_k / new_v
// with n = lengths[b], m = quantized_lengths[b] (a multiple of G), S = format.sink_length.
// Query row i of row b stands at position n + new_lengths[b] - rows_b + i, where rows_b = new_lengths[b] if
// `rows_follow_new`, else q_len: the last query is aligned with the newest token. Query rows i >= rows_b give output 0
// and lse -inf.
struct AttentionParams {
  Format format;
  RecordLayout layout;
  int64_t batch, num_heads, q_len;  // num_heads is a multiple of format.num_kv_heads

  const void* q;  // [B][Hq][Lq][D], channels contiguous
  int64_t q_batch_stride, q_head_stride, q_row_stride;
  Element q_type;

  const uint8_t* pool;  // [pages][page_bytes]
  int64_t pool_pages;
  int64_t page_bytes;
  const int16_t* k_order;      // with classes of keys: [B][Hkv][D], the channel in each place; else null
  const int32_t* block_table;  // [B][block_table_stride]; page of tokens [S + 128 i, S + 128 (i + 1))
  int64_t block_table_stride;
  const int64_t* lengths;            // [B] n
  const int64_t* quantized_lengths;  // [B] m

  const void* sink_k;    // [B][Hkv][S][D], contiguous
  const void* sink_v;    // [B][Hkv][S][Dv]
  const void* window_k;  // [B][Hkv][window_capacity][D], contiguous
  const void* window_v;
  Element cache_type;  // of sink and window

  const void* new_k;  // [B][Hkv][Tn][D], channels contiguous; null if new_len == 0
  const void* new_v;
  int64_t new_k_strides[3];  // batch, head, token
  int64_t new_v_strides[3];
  Element new_type;
  int64_t new_len;             // Tn
  const int64_t* new_lengths;  // [B]; null: new_len for every row
  bool rows_follow_new;

  float scale;                // of the scores
  float softcap;              // > 0: score = softcap * tanh(score / softcap), before mask and ALiBi
  bool causal;                // key j is seen by the query at position p if j <= p
  int64_t window;             // > 0: ... and j > p - window; at most kMaxWindow
  const float* sinks;         // [Hq] a learned logit that joins the denominator only, or null
  const float* alibi_slopes;  // [B or 1][Hq]: score += slope * (j - p), or null
  int64_t alibi_batch_stride;
  const void* mask;  // bool (1 byte, true = keep) or float (added; -inf = masked out) [B][Hq][Lq][keys], any strides, 0
                     // = broadcast
  MaskType mask_type;
  int64_t mask_keys;  // size of the mask's last axis, also where its stride is 0
  int64_t mask_strides[4];
  bool exact;  // fp32 arithmetic; else int16 products

  void* out;   // [B][Hq][Lq][Dv] contiguous, of type q_type
  float* lse;  // [B][Hq][Lq] natural logarithm of the denominator, sink logit included; -inf where no key is seen
};

}  // namespace kivi
