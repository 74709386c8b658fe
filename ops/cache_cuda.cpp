// The cache operators on CUDA: append, dequantize, truncate, copy pages, widen. Nothing here waits for the device, so
// values in lengths, block table and page lists are not looked at on the host; the kernels check what would lead them
// out of the tensors, and end with an error of the device.
#include "csrc/cuda/kernels.h"
#include "ops/attention_call.h"
#include "ops/cache_args.h"
#include "ops/cuda_call.h"
#include "ops/cuda_library.h"
#include "ops/elements.h"

namespace kivi {
namespace {

cuda::CacheParams cache_params(const CacheTensors& c, const Format& format) {
  cuda::CacheParams p{};
  p.format = format;
  p.layout = record_layout(format);
  p.batch = c.lengths.size(0);
  p.pool = static_cast<uint8_t*>(c.pool.data_ptr());
  p.pages = c.pool.size(0);
  p.page_bytes = c.pool.size(1);
  p.block_table = c.block_table.const_data_ptr<int32_t>();
  p.max_pages = c.block_table.size(1);
  p.lengths = static_cast<int64_t*>(c.lengths.data_ptr());
  p.quantized_lengths = static_cast<int64_t*>(c.quantized_lengths.data_ptr());
  p.k_order = c.k_order.defined() ? c.k_order.const_data_ptr<int16_t>() : nullptr;
  p.sink_k = c.sink_k.data_ptr();
  p.sink_v = c.sink_v.data_ptr();
  p.window_k = c.window_k.data_ptr();
  p.window_v = c.window_v.data_ptr();
  p.type = element_of(c.window_k.scalar_type());
  return p;
}

void cache_append_cuda(at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                       at::Tensor& quantized_lengths, at::Tensor& sink_k, at::Tensor& sink_v, at::Tensor& window_k,
                       at::Tensor& window_v, const at::Tensor& k_arg, const at::Tensor& v_arg, at::IntArrayRef ints,
                       const std::optional<at::Tensor>& new_lengths_arg, std::optional<at::Tensor> overflow,
                       const std::optional<at::Tensor>& k_order) {
  const CudaCall cuda(pool);
  const CacheTensors cache =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(ints);
  const c10::SymInt batch = check_cache(cache, format);
  check_new_tokens({"k", "v", "new_lengths"}, k_arg, v_arg, new_lengths_arg, batch, format, window_k.scalar_type(),
                   pool.device());
  if (overflow) check_overflow(*overflow, pool.device());
  check_append_overlap(cache, k_arg, v_arg, new_lengths_arg, overflow);
  const at::Tensor k = with_contiguous_channels(k_arg), v = with_contiguous_channels(v_arg);
  const at::Tensor new_lengths = new_lengths_arg ? new_lengths_arg->contiguous() : at::Tensor();
  cuda::AppendParams p{};
  p.cache = cache_params(cache, format);
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  for (int i = 0; i < 3; i++) {
    p.k_strides[i] = k.stride(i);
    p.v_strides[i] = v.stride(i);
  }
  p.tokens = k.size(2);
  p.new_lengths = new_lengths.defined() ? new_lengths.const_data_ptr<int64_t>() : nullptr;
  p.overflow = overflow ? overflow->mutable_data_ptr<int32_t>() : nullptr;
  if (p.cache.batch == 0 || p.tokens == 0) return;
  CudaCall::check(cuda::append(p, cuda.stream()), "cache_append");
}

std::tuple<at::Tensor, at::Tensor> cache_dequantize_cuda(const at::Tensor& pool, const at::Tensor& block_table,
                                                         const at::Tensor& lengths, const at::Tensor& quantized_lengths,
                                                         const at::Tensor& sink_k, const at::Tensor& sink_v,
                                                         const at::Tensor& window_k, const at::Tensor& window_v,
                                                         at::IntArrayRef ints, c10::SymInt sym_length,
                                                         const std::optional<at::Tensor>& k_order) {
  const CudaCall cuda(pool);
  const CacheTensors cache =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(ints);
  check_cache(cache, format);
  const int64_t length = sym_length.expect_int();
  check_not_negative("length", length);
  const cuda::CacheParams p = cache_params(cache, format);
  at::Tensor k = at::empty({p.batch, format.num_kv_heads, length, format.head_dim}, window_k.options());
  at::Tensor v = at::empty({p.batch, format.num_kv_heads, length, format.value_head_dim}, window_k.options());
  if (p.batch > 0 && length > 0) {
    CudaCall::check(cuda::dequantize_cache(p, length, k.mutable_data_ptr(), v.mutable_data_ptr(), cuda.stream()),
                    "cache_dequantize");
  }
  return {k, v};
}

void cache_truncate_cuda(const at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                         at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v,
                         at::Tensor& window_k, at::Tensor& window_v, at::IntArrayRef ints, int64_t length,
                         const std::optional<at::Tensor>& k_order) {
  const CudaCall cuda(pool);
  const CacheTensors cache =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(ints);
  check_cache(cache, format);
  check_not_negative("length", length);
  check_truncate_overlap(cache);
  const cuda::CacheParams p = cache_params(cache, format);
  if (p.batch > 0) CudaCall::check(cuda::truncate(p, length, cuda.stream()), "cache_truncate");
}

void cache_copy_pages_cuda(at::Tensor& pool, const at::Tensor& source, const at::Tensor& target) {
  const CudaCall cuda(pool);
  check_page_lists(pool, source, target);
  check_no_overlap({{"pool", pool}}, {{"source", source}, {"target", target}});
  const at::Tensor from = source.contiguous(), to = target.contiguous();
  if (from.numel() == 0) return;
  CudaCall::check(
      cuda::copy_pages(pool.mutable_data_ptr<uint8_t>(), pool.size(0), pool.size(1), from.const_data_ptr<int64_t>(),
                       to.const_data_ptr<int64_t>(), from.numel(), cuda.stream()),
      "cache_copy_pages");
}

at::Tensor cache_widen_cuda(const at::Tensor& pool, at::IntArrayRef format_ints) {
  const CudaCall cuda(pool);
  const WidenCall call = widen_call(pool, format_ints);
  if (call.records > 0) {
    CudaCall::check(cuda::widen(call.from, call.pool.const_data_ptr<uint8_t>(), call.to,
                                call.wide.mutable_data_ptr<uint8_t>(), call.records, cuda.stream()),
                    "cache_widen");
  }
  return call.wide;
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, KIVI_CUDA_KEY, m) {
  if (!kivi::registers_cuda_operators()) return;
  m.impl("cache_append", TORCH_FN(kivi::cache_append_cuda));
  m.impl("cache_dequantize", TORCH_FN(kivi::cache_dequantize_cuda));
  m.impl("cache_truncate", TORCH_FN(kivi::cache_truncate_cuda));
  m.impl("cache_copy_pages", TORCH_FN(kivi::cache_copy_pages_cuda));
  m.impl("cache_widen", TORCH_FN(kivi::cache_widen_cuda));
}

bool kivi_is_capturing(const at::Tensor& tensor) {
#if !defined(KIVI_CUDA_EMULATED)
  if (!tensor.is_cuda()) return false;
#endif
  const kivi::CudaCall cuda(tensor);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  kivi::CudaCall::check(cudaStreamIsCapturing(cuda.stream(), &status), "is_capturing");
  return status != cudaStreamCaptureStatusNone;
}
