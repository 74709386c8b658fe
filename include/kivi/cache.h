// kivi::KVCache: a quantised key/value cache for one attention layer (KIVI, arXiv 2402.02750), with attention computed
// straight from the packed codes. In TorchScript and Python the same class is torch.classes.kivi.KVCache.
//
//   kivi::KVCache cache(/*num_kv_heads=*/8, /*head_dim=*/128);   // one per layer
//   at::Tensor out = cache.forward(q, k, v);                     // prefill, chunked prefill, decode, verify alike
//
// Tensors are [B, H, T, D] as in scaled_dot_product_attention. Batch size, dtype and device are those of the first
// tensors. Of n tokens the first `sink_length` are exact, the next floor(max(0, n - sink - R) / G) * G are quantised,
// the rest exact. Rows of a batch may have different lengths. Every error is a c10::Error that names the argument, and
// leaves the cache as it was. Different caches share nothing. Calls of several threads on one cache are safe: each
// waits for those that change the cache, and calls that only read it (const) run side by side.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kivi/export.h"
#include "kivi/format.h"

namespace kivi {

// What to build a cache from.
struct CacheOptions {
  int64_t num_kv_heads = 0;                              // kv heads of one layer
  int64_t head_dim = 0;                                  // channels of a key and a query
  std::optional<int64_t> value_head_dim = std::nullopt;  // channels of a value and an output; none: as head_dim
  int64_t k_bits = 2;                                    // 1, 2, 3, 4 or 8
  int64_t v_bits = 2;
  int64_t group_size = 32;              // 16, 32, 64 or 128
  int64_t residual_length = 128;        // the newest tokens, always exact
  int64_t sink_length = 4;              // the first tokens, always exact
  std::string precision = "fast";       // "fast": int16 products; "exact": fp32
  bool range_search = false;            // search the best of the ranges shrunk by 0.90 to 1.00 when quantising
  std::string scale_dtype = "float16";  // "float32", "float16" or "float8": the stored scale and zero

  // All that follows is beyond KIVI; see kivi/format.h for the exact meaning.
  std::string recipe = "";            // a name for a set of the options: see README; empty: none
  std::vector<double> k_search = {};  // parts of the range that are tried beside the whole; range_search: 0.98 to 0.90
  std::vector<double> v_search = {};  // (a correction is part of each trial)
  bool k_bias_correction = false;     // K: move each group's zero by its mean error
  bool v_gain_correction = false;     // V: scale and zero that keep the slope and the mean of a group
  std::optional<int64_t> v_group_size = std::nullopt;  // channels of a group of V: a multiple of group_size or
                                                       // value_head_dim; none: group_size
  bool v_symmetric = false;                            // V: no zeros, ranges lie around 0
  bool v_rotated = false;                              // V: rotated by a Hadamard matrix before it is quantised
  // K: classes of channels, as channels and bits by turns, {32, 4, 96, 2}: the 32 channels that matter most get 4 bits,
  // the others 2. All but the last a multiple of 16 channels (1 and 3 bits: 32), head_dim together. Which channels are
  // in which class is chosen for each row and head, see key_order. k_bits is then not used.
  std::vector<int64_t> k_classes = {};
};

// How a query attends. The meaning of the fields is that of scaled_dot_product_attention where it has them.
struct AttentionOptions {
  std::optional<at::Tensor> attn_mask =
      std::nullopt;                            // bool (true = keep) or float (added), broadcastable to [B, Hq, Lq, Lk]
  bool is_causal = true;                       // bottom-right aligned: the last query sees every key
  std::optional<double> scale = std::nullopt;  // default 1 / sqrt(head_dim)
  double softcap = 0.0;                        // > 0: score = softcap * tanh(score / softcap)
  int64_t window = 0;                          // > 0: a query sees its own and the window - 1 tokens before it
  std::optional<at::Tensor> sinks = std::nullopt;  // [Hq] learned sink logits that join the denominator
  std::optional<at::Tensor> alibi_slopes =
      std::nullopt;  // [Hq] or [B, Hq]: score += slope * (key position - query position)
};

class KIVI_API KVCache : public torch::CustomClassHolder {
 public:
  explicit KVCache(const CacheOptions& options);
  // The same values by position, as in TorchScript and Python.
  KVCache(int64_t num_kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim = std::nullopt,
          int64_t k_bits = 2, int64_t v_bits = 2, int64_t group_size = 32, int64_t residual_length = 128,
          int64_t sink_length = 4, const std::string& precision = "fast", bool range_search = false,
          const std::string& scale_dtype = "float16");
  ~KVCache() override;

  // Attention of q [B, Hq, T, D] over everything cached plus the new k [B, Hkv, T, D] and v [B, Hkv, T, Dv], which are
  // used exactly; then k and v are appended. Hq is a multiple of Hkv. Returns [B, Hq, T, Dv] in q's dtype. With
  // `lengths` [B] (int64) row b takes its first lengths[b] tokens and its other query rows give 0.
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options = {}, const std::optional<at::Tensor>& lengths = std::nullopt);

  // Appends k and v; padding beyond lengths[b] is never read. q [B, Hq, Tq, D]: queries that go with them, for the
  // choice of classes of key channels only (`forward` has its own); any number of them, with `lengths` as many as
  // tokens.
  void append(const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths = std::nullopt,
              const std::optional<at::Tensor>& q = std::nullopt);

  // Attention of q [B, Hq, Lq, D] over the cache; the last query row is aligned with the newest token. With no key to
  // see: 0.
  at::Tensor attend(const at::Tensor& q, const AttentionOptions& options = {}) const;
  // The same, with the log-sum-exp of the scores, [B, Hq, Lq] float32.
  std::tuple<at::Tensor, at::Tensor> attend_with_lse(const at::Tensor& q, const AttentionOptions& options = {}) const;

  int64_t length() const;            // tokens of the longest row
  at::Tensor lengths() const;        // [B] int64
  int64_t quantized_length() const;  // quantised tokens of the longest row
  at::Tensor quantized_lengths() const;
  int64_t batch_size() const;  // 0 before the first tensors
  bool empty() const;          // no row holds a token
  // Bytes of all storages that the cache holds, each counted once.
  int64_t nbytes() const;
  // Bits that a number of a quantised token takes, K and V together: codes, scales, zeros and padding, all that a page
  // holds. The exact tokens come on top (nbytes counts everything).
  double bits_per_element() const;

  // The cached keys and values, [B, Hkv, length(), D] and [..., Dv], in the cache's dtype; exact tokens as they came.
  // Slots past the length of a shorter row are 0.
  std::tuple<at::Tensor, at::Tensor> dequantize() const;

  // With classes of key channels: the channel in each place of a record, [B, Hkv, D] int64; -1 in rows for which none
  // is chosen yet. It is chosen when a row's first tokens are quantised, and then stays: channels are ranked by the
  // root mean square of their ranges in those groups, times that of the queries that `forward` has seen for the row;
  // the classes take them from the widest on.
  at::Tensor key_order() const;
  // Gives all rows for which none is chosen yet this order, [Hkv, D] int64, when their time comes.
  void set_key_order(const at::Tensor& order);

  void truncate(int64_t n);              // keep the first n tokens of every row (n >= length: nothing happens)
  void reorder(const at::Tensor& rows);  // [B] int64: row b becomes the old row rows[b] (beam search)
  void select(const at::Tensor& rows);   // [N] int64, any N: the batch becomes the rows named
  void repeat_interleave(int64_t n);     // each row n times, sharing its pages
  void reset();                          // empty; batch, dtype and device are free again
  // Room for `tokens` per row (needs a first append). A CUDA graph that appends needs it before it is captured: what it
  // writes to must be there then. The graph holds the cache's tensors, so reorder, select, repeat_interleave and reset,
  // and more tokens than were reserved, make it useless.
  void reserve(int64_t tokens);
  c10::intrusive_ptr<KVCache> clone() const;  // shares nothing with this cache
  // A copy on another device (the CPU or CUDA) that shares nothing with this cache; the records are the same bytes.
  c10::intrusive_ptr<KVCache> to(at::Device device) const;

  const Format& format() const;
  const CacheOptions& options() const;

  // The saved form: version, format and true lengths, tensors trimmed to what is held.
  using State = std::tuple<std::string, std::vector<int64_t>, std::vector<at::Tensor>>;
  State state() const;
  static c10::intrusive_ptr<KVCache> from_state(const State& state);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

// Writes caches, usually one per layer, into one file: format, true lengths, what is held and no more, and a checksum.
// The file replaces what was at `path` once it is whole and on the disk, so a process that is killed leaves the old
// file or the new one (and <path>.partial, which the next call overwrites). One layer's saved state at a time is in
// memory.
KIVI_API void save_caches(const std::vector<c10::intrusive_ptr<KVCache>>& caches, const std::string& path);
// Reads them back, on the CPU (see KVCache::to). A file that was changed or cut, or is of another version, is an error.
KIVI_API std::vector<c10::intrusive_ptr<KVCache>> load_caches(const std::string& path);

}  // namespace kivi
