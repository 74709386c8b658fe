// The operators as C++ functions. Each goes through the dispatcher, so that device, autocast and Meta tensors work as
// they do for torch.ops.kivi.*. The method is KIVI, arXiv 2402.02750, section 3.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kivi/export.h"

namespace kivi {

struct CacheOptions;  // kivi/cache.h

// Asymmetric min/max quantisation in groups of `group_size` along `axis` of x (any rank >= 1, float32, float16 or
// bfloat16). Returns codes (uint8, the axis holds ceil(n * bits / 8) bytes: a dense little-endian bit string), scale
// and zero (float32, the axis holds ceil(n / group_size)). Arithmetic is fp32: scale = (max - min) / (2^bits - 1), zero
// = min, code = clamp(rint((x - zero) / scale)), half to even. A last group that is short uses its real elements only.
// A group with NaN or Inf comes back as NaN. bits: 1, 2, 3, 4 or 8; group_size >= 1.
KIVI_API std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize(const at::Tensor& x, int64_t axis, int64_t bits = 2,
                                                                 int64_t group_size = 32);

// zero + code * scale, in `dtype`. `size` is the number of elements along `axis` (the codes alone do not tell it).
KIVI_API at::Tensor dequantize(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero, int64_t axis,
                               int64_t bits, int64_t group_size, int64_t size, at::ScalarType dtype = at::kFloat);

// dequantize(quantize(x)) without the codes, in float32. Equal to the bit to the two calls.
KIVI_API at::Tensor fake_quantize(const at::Tensor& x, int64_t axis, int64_t bits = 2, int64_t group_size = 32);

// ---------------------------------------------------------------------------------------------- the cache as plain
// tensors kivi::KVCache owns these and calls the operators below; use them directly to manage pages yourself. One
// compact list of integers describes the format; make it with cache_format.

// [version, num_kv_heads, head_dim, value_head_dim, k_bits, v_bits, group_size, residual_length, sink_length, scale
// type (8, 16, 32; 40 and 48: float32 that holds float8 and float16 values where they fit), k_bias_correction,
// v_gain_correction, v_group_size (0: group_size), v_symmetric, v_rotated, then two range searches (K, V): the number
// of parts and each part in thousandths, then the number of classes of key channels and the channels and bits of each].
// Every value is checked. Of the options all but the precision count.
KIVI_API std::vector<int64_t> cache_format(const CacheOptions& options);
KIVI_API std::vector<int64_t> cache_format(int64_t num_kv_heads, int64_t head_dim,
                                           std::optional<int64_t> value_head_dim = std::nullopt, int64_t k_bits = 2,
                                           int64_t v_bits = 2, int64_t group_size = 32, int64_t residual_length = 128,
                                           int64_t sink_length = 4, const std::string& scale_dtype = "float16",
                                           bool range_search = false);
// Bytes of a page (128 tokens of all kv heads) and slots of the exact window.
KIVI_API int64_t cache_page_bytes(at::IntArrayRef format);
KIVI_API int64_t cache_window_capacity(at::IntArrayRef format);

// The tensors of a cache. What a call writes must not share memory with anything else that it is given (ValueError;
// views of one storage side by side are fine).
struct CacheTensors {
  at::Tensor pool;               // uint8 [pages, page_bytes]
  at::Tensor block_table;        // int32 [B, max_pages]: the page of tokens [sink + 128 i, sink + 128 (i + 1)) of a row
  at::Tensor lengths;            // int64 [B]: tokens held
  at::Tensor quantized_lengths;  // int64 [B]: of these, quantised; a multiple of group_size
  at::Tensor sink_k, sink_v;     // [B, Hkv, sink_length, D], [..., Dv]: the first tokens, exact
  at::Tensor window_k,
      window_v;             // [B, Hkv, window_capacity, D], [..., Dv]: ring; token t in slot (t - sink) % capacity
  at::Tensor k_order = {};  // int16 [B, Hkv, D], with classes of key channels only: the channel in each place of a
                            // record; read for rows that hold, or get, quantised tokens
};

// Appends k [B, Hkv, T, D] and v [B, Hkv, T, Dv], of the dtype of the window; quantises every group that leaves the
// window. Row b takes its first new_lengths[b] (int64) tokens. The pages that the quantised tokens need must stand in
// the block table and belong to one row each. If a scale or zero does not fit a float8 or float16 format, `overflow`
// (int32 [1]) becomes 1 and nothing that the cache holds changes; without `overflow` that is an error. On CUDA, where
// no operator waits for the device, such a group without `overflow` keeps the nearest scale and zero that fit, and
// values in lengths and block table are checked by the kernels.
KIVI_API void cache_append(const CacheTensors& cache, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef format,
                           const std::optional<at::Tensor>& new_lengths = std::nullopt,
                           const std::optional<at::Tensor>& overflow = std::nullopt);

struct CacheAttentionOptions {
  std::optional<at::Tensor> attn_mask =
      std::nullopt;  // bool (true = keep) or float, broadcastable to [B, Hq, Lq, keys]
  bool is_causal = true;
  std::optional<double> scale = std::nullopt;
  double softcap = 0.0;
  int64_t window = 0;
  std::optional<at::Tensor> sinks = std::nullopt;
  std::optional<at::Tensor> alibi_slopes = std::nullopt;
  std::string precision = "fast";
};

// Attention of q [B, Hq, Lq, D] over the cache and, where given, the new tokens that follow it (exact; not appended).
// Returns out [B, Hq, Lq, Dv] in q's dtype and lse [B, Hq, Lq] float32. See AttentionOptions in cache.h for the
// options.
KIVI_API std::tuple<at::Tensor, at::Tensor> cache_attention(const at::Tensor& q, const CacheTensors& cache,
                                                            at::IntArrayRef format,
                                                            const std::optional<at::Tensor>& new_k = std::nullopt,
                                                            const std::optional<at::Tensor>& new_v = std::nullopt,
                                                            const std::optional<at::Tensor>& new_lengths = std::nullopt,
                                                            const CacheAttentionOptions& options = {});

// Tokens [0, length) of every row as [B, Hkv, length, D] and [..., Dv] in the dtype of the window; 0 past a row's own
// length.
KIVI_API std::tuple<at::Tensor, at::Tensor> cache_dequantize(const CacheTensors& cache, at::IntArrayRef format,
                                                             int64_t length);

// Keeps the first `length` tokens of every row that has more. Of a quantised group that is cut, the kept tokens go
// dequantised into the window. Pages are not touched.
KIVI_API void cache_truncate(const CacheTensors& cache, at::IntArrayRef format, int64_t length);

// Copies page source[i] to page target[i] (int64 [N]); no page may be both.
KIVI_API void cache_copy_pages(const at::Tensor& pool, const at::Tensor& source, const at::Tensor& target);

// The pool of a float8 or float16 format as the pool of the same format with scale type 40 or 48: codes as they are,
// scale and zero as float32.
KIVI_API at::Tensor cache_widen(const at::Tensor& pool, at::IntArrayRef format);

}  // namespace kivi
