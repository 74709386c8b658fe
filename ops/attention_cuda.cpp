// kivi::cache_attention on CUDA.
#include "csrc/cuda/kernels.h"
#include "ops/attention_call.h"
#include "ops/cuda_call.h"

namespace kivi {
namespace {

std::tuple<at::Tensor, at::Tensor> cache_attention_cuda(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
    const at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v, const at::Tensor& window_k,
    const at::Tensor& window_v, at::IntArrayRef format, const std::optional<at::Tensor>& new_k,
    const std::optional<at::Tensor>& new_v, const std::optional<at::Tensor>& new_lengths,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale, double softcap,
    int64_t window, const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& alibi_slopes,
    std::string_view precision, const std::optional<at::Tensor>& k_order) {
  const CudaCall cuda(pool);
  const CacheTensors cache =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  AttentionCall call =
      attention_call(q, cache, format, new_k, new_v, new_lengths,
                     {attn_mask, is_causal, scale, softcap, window, sinks, alibi_slopes, std::string(precision)});
  // How long the longest row is, only the device knows: the mask's own width is taken, and the kernels check it. A
  // width of 1 is any width.
  if (attn_mask) call.set_mask(*attn_mask, attn_mask->dim() >= 1 ? attn_mask->size(-1) : 1);
  if (call.params.mask_keys == 1) call.params.mask_strides[3] = 0;
  if (call.out.numel() == 0) return {call.out, call.lse};
  const at::Tensor scratch = at::empty({cuda::attention_scratch_bytes(call.params)}, pool.options());
  CudaCall::check(cuda::attention(call.params, scratch.mutable_data_ptr(), cuda.stream()), "cache_attention");
  return {call.out, call.lse};
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, KIVI_CUDA_KEY, m) {
  if (!kivi::registers_cuda_operators()) return;
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_cuda));
}
