// One call of cache_attention, ready for the kernels of any device: everything checked that shapes and dtypes tell, the
// results allocated, the kernel's parameters filled in. What depends on values in lengths and block table is left to
// the device: a CPU looks at them, CUDA does not wait for them.
#pragma once

#include <ATen/ATen.h>

#include "csrc/format/params.h"
#include "kivi/ops.h"
#include "ops/cache_args.h"

namespace kivi {

inline at::Tensor with_contiguous_channels(const at::Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : t.contiguous();
}

struct AttentionCall {
  CacheTensors cache;
  at::Tensor q, new_k, new_v, new_lengths, sinks, slopes, mask;  // keep alive what the parameters point to
  at::Tensor out, lse;
  AttentionParams params{};

  // `keys`: of the longest row, new tokens included.
  void set_mask(const at::Tensor& attn_mask, int64_t keys);
};

AttentionCall attention_call(const at::Tensor& q, const CacheTensors& cache, at::IntArrayRef format_ints,
                             const std::optional<at::Tensor>& new_k, const std::optional<at::Tensor>& new_v,
                             const std::optional<at::Tensor>& new_lengths, const CacheAttentionOptions& options);

}  // namespace kivi
