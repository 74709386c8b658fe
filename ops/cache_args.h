// What the cache operators take, and their checks: the format as a list of integers, the tensors of a cache, and the
// shapes of an attention call. Used by the CPU, CUDA and Meta kernels and by the class.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "kivi/format.h"
#include "kivi/ops.h"
#include "ops/checks.h"

namespace kivi {

// So many tokens in one row, or more, are refused: sizes in bytes then stay far below 2^63.
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;

// Row `row` holds `before` tokens and is to get `count` more; both are at least 0. A tensor of one element, expanded,
// claims to be any number of tokens.
inline void check_token_count(int64_t row, int64_t before, int64_t count) {
  TORCH_CHECK_VALUE(count < kMaxTokens - before, "row ", row, " would hold more than 2^40 tokens: it has ", before,
                    " and is given ", count);
}

std::vector<int64_t> format_to_ints(const Format& format);
// Checks every field; errors name it.
Format format_from_ints(at::IntArrayRef ints);

// The scale type that a cache of this format becomes when it is widened; an error if there is none.
ScaleType check_widened(const Format& format);
// A pool of pages of this format, contiguous or not.
void check_pool(const at::Tensor& pool, const Format& format);

// The arguments of an operator as the tensors of a cache.
inline CacheTensors cache_tensors(const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
                                  const at::Tensor& quantized_lengths, const at::Tensor& sink_k,
                                  const at::Tensor& sink_v, const at::Tensor& window_k, const at::Tensor& window_v,
                                  const std::optional<at::Tensor>& k_order) {
  return {pool,
          block_table,
          lengths,
          quantized_lengths,
          sink_k,
          sink_v,
          window_k,
          window_v,
          k_order.value_or(at::Tensor())};
}

// A call of cache_widen: checked, with the new pool allocated.
struct WidenCall {
  Format from, to;
  at::Tensor pool, wide;
  int64_t records;  // in each
};
WidenCall widen_call(const at::Tensor& pool, at::IntArrayRef format_ints);

// Shapes, dtypes and devices of the tensors of a cache among themselves and against the format. Returns the batch size.
c10::SymInt check_cache(const CacheTensors& cache, const Format& format);

// k and v against the cache; `new_lengths` may be absent. `names` for messages: {"k", "v", "lengths"} or {"new_k",
// ...}.
struct NewTokenNames {
  const char* k;
  const char* v;
  const char* lengths;
};
void check_new_tokens(const NewTokenNames& names, const at::Tensor& k, const at::Tensor& v,
                      const std::optional<at::Tensor>& lengths, const c10::SymInt& batch, const Format& format,
                      at::ScalarType cache_dtype, at::Device device);

// int64 [B], on any device.
void check_lengths(const char* name, const at::Tensor& lengths, const c10::SymInt& batch);

// The flag of cache_append: int32 [1].
void check_overflow(const at::Tensor& overflow, at::Device device);
// What cache_copy_pages takes: int64 [N] both.
void check_page_lists(const at::Tensor& pool, const at::Tensor& source, const at::Tensor& target);

// An argument that may be absent.
struct NamedTensor {
  const char* name;
  const at::Tensor* tensor;
  NamedTensor(const char* n, const at::Tensor& t) : name(n), tensor(&t) {}
  NamedTensor(const char* n, const std::optional<at::Tensor>& t) : name(n), tensor(t ? &*t : nullptr) {}
};
// What a call writes must not share memory with anything else that it is given: the result would depend on the order in
// which threads come. Looks at addresses, so that views of one storage may be given side by side; a strided tensor
// counts as all that lies between its first and its last element.
void check_no_overlap(at::ArrayRef<NamedTensor> written, at::ArrayRef<NamedTensor> read);
// The same for an append, a truncation.
void check_append_overlap(const CacheTensors& cache, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& new_lengths, const std::optional<at::Tensor>& overflow);
void check_truncate_overlap(const CacheTensors& cache);

// Everything about an attention call that does not depend on values.
void check_attention(const at::Tensor& q, const c10::SymInt& batch, const Format& format, at::Device device,
                     const CacheAttentionOptions& options);

// The mask as [B, Hq, Lq, keys] without copying (bool or float32), or undefined. `keys` is the length of its last axis.
at::Tensor expand_mask(const at::Tensor& mask, const c10::SymInt& batch, const c10::SymInt& heads,
                       const c10::SymInt& rows, const c10::SymInt& keys);

}  // namespace kivi
