// Autograd and autocast. Quantisation has no gradient: operators with outputs give tensors whose backward raises an
// error that names the operator, so that no gradient is lost in silence. cache_append detaches what it stores. Under
// autocast the new keys and values take the dtype of the cache; everything else computes in fp32 inside and needs no
// cast.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "kivi/ops.h"
#include "ops/checks.h"
#include "ops/registration.h"

namespace kivi {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// What is written counts as changed, for the graphs that have saved it. Tensors of inference mode have no such count.
void count_changes(std::initializer_list<at::Tensor> written) {
  for (const at::Tensor& t : written) {
    if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  }
}

void cache_append_autograd(at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                           at::Tensor& quantized_lengths, at::Tensor& sink_k, at::Tensor& sink_v, at::Tensor& window_k,
                           at::Tensor& window_v, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef format,
                           const OptionalTensor& new_lengths, OptionalTensor overflow, const OptionalTensor& k_order) {
  const at::AutoDispatchBelowADInplaceOrView below;
  cache_append({pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v,
                k_order.value_or(at::Tensor())},
               k, v, format, new_lengths, overflow);
  count_changes(
      {pool, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, overflow.value_or(at::Tensor())});
}

void cache_truncate_autograd(const at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                             at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v,
                             at::Tensor& window_k, at::Tensor& window_v, at::IntArrayRef format, int64_t length,
                             const std::optional<at::Tensor>& k_order) {
  const at::AutoDispatchBelowADInplaceOrView below;
  cache_truncate({pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v,
                  k_order.value_or(at::Tensor())},
                 format, length);
  count_changes({lengths, quantized_lengths, window_k, window_v});
}

void cache_copy_pages_autograd(at::Tensor& pool, const at::Tensor& source, const at::Tensor& target) {
  const at::AutoDispatchBelowADInplaceOrView below;
  cache_copy_pages(pool, source, target);
  count_changes({pool});
}

// As autocast would: numbers that the operators take no other way stay what they are, to be refused.
at::Tensor cast_float(const at::Tensor& t, at::ScalarType type) {
  return t.defined() && is_supported_float(t.scalar_type()) ? t.to(type) : t;
}

template <c10::DispatchKey key>
void cache_append_autocast(at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                           at::Tensor& quantized_lengths, at::Tensor& sink_k, at::Tensor& sink_v, at::Tensor& window_k,
                           at::Tensor& window_v, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef format,
                           const OptionalTensor& new_lengths, OptionalTensor overflow, const OptionalTensor& k_order) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const at::ScalarType type = window_k.scalar_type();
  cache_append({pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v,
                k_order.value_or(at::Tensor())},
               cast_float(k, type), cast_float(v, type), format, new_lengths, overflow);
}

template <c10::DispatchKey key>
std::tuple<at::Tensor, at::Tensor> cache_attention_autocast(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
    const at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v, const at::Tensor& window_k,
    const at::Tensor& window_v, at::IntArrayRef format, const OptionalTensor& new_k, const OptionalTensor& new_v,
    const OptionalTensor& new_lengths, const OptionalTensor& attn_mask, bool is_causal, std::optional<double> scale,
    double softcap, int64_t window, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
    std::string_view precision, const std::optional<at::Tensor>& k_order) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const at::ScalarType type = window_k.scalar_type();
  const auto cast = [type](const OptionalTensor& t) { return t ? OptionalTensor(cast_float(*t, type)) : t; };
  CacheAttentionOptions options;
  options.attn_mask = attn_mask;
  options.is_causal = is_causal;
  options.scale = scale;
  options.softcap = softcap;
  options.window = window;
  options.sinks = sinks;
  options.alibi_slopes = alibi_slopes;
  options.precision = std::string(precision);
  return cache_attention(q,
                         {pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v,
                          k_order.value_or(at::Tensor())},
                         format, cast(new_k), cast(new_v), new_lengths, options);
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, Autograd, m) {
  if (!kivi::registers_operators()) return;
  for (const char* name :
       {"quantize", "dequantize", "fake_quantize", "cache_attention", "cache_dequantize", "cache_widen"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
  m.impl("cache_append", TORCH_FN(kivi::cache_append_autograd));
  m.impl("cache_truncate", TORCH_FN(kivi::cache_truncate_autograd));
  m.impl("cache_copy_pages", TORCH_FN(kivi::cache_copy_pages_autograd));
}

TORCH_LIBRARY_IMPL(kivi, AutocastCPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("cache_append", TORCH_FN(kivi::cache_append_autocast<c10::DispatchKey::AutocastCPU>));
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_autocast<c10::DispatchKey::AutocastCPU>));
}

TORCH_LIBRARY_IMPL(kivi, Autocast, m) {
  if (!kivi::registers_operators()) return;
  m.impl("cache_append", TORCH_FN(kivi::cache_append_autocast<c10::DispatchKey::Autocast>));
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_autocast<c10::DispatchKey::Autocast>));
}
