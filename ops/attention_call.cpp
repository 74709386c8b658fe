// See attention_call.h.
#include "ops/attention_call.h"

#include <algorithm>
#include <cmath>

#include "ops/elements.h"

namespace kivi {
namespace {

constexpr NewTokenNames kNames = {"new_k", "new_v", "new_lengths"};

void set_cache(AttentionCall& call) {
  const CacheTensors& c = call.cache;
  AttentionParams& p = call.params;
  p.batch = c.lengths.size(0);
  p.pool = c.pool.const_data_ptr<uint8_t>();
  p.pool_pages = c.pool.size(0);
  p.page_bytes = c.pool.size(1);
  p.k_order = c.k_order.defined() ? c.k_order.const_data_ptr<int16_t>() : nullptr;
  p.block_table = c.block_table.const_data_ptr<int32_t>();
  p.block_table_stride = c.block_table.size(1);
  p.lengths = c.lengths.const_data_ptr<int64_t>();
  p.quantized_lengths = c.quantized_lengths.const_data_ptr<int64_t>();
  p.sink_k = c.sink_k.const_data_ptr();
  p.sink_v = c.sink_v.const_data_ptr();
  p.window_k = c.window_k.const_data_ptr();
  p.window_v = c.window_v.const_data_ptr();
  p.cache_type = element_of(c.window_k.scalar_type());
  p.new_type = p.cache_type;
}

void set_new_tokens(AttentionCall& call, const c10::SymInt& batch, const at::Tensor& k, const at::Tensor& v,
                    const std::optional<at::Tensor>& lengths) {
  AttentionParams& p = call.params;
  check_new_tokens(kNames, k, v, lengths, batch, p.format, call.cache.window_k.scalar_type(), call.cache.pool.device());
  call.new_k = with_contiguous_channels(k);
  call.new_v = with_contiguous_channels(v);
  p.new_len = call.new_k.size(2);
  p.new_k = call.new_k.const_data_ptr();
  p.new_v = call.new_v.const_data_ptr();
  for (int i = 0; i < 3; i++) {
    p.new_k_strides[i] = call.new_k.stride(i);
    p.new_v_strides[i] = call.new_v.stride(i);
  }
  if (!lengths) return;
  TORCH_CHECK_VALUE(p.q_len == p.new_len, "q has ", p.q_len, " rows, but new_k has ", p.new_len,
                    " tokens; with new_lengths they must be equal");
  call.new_lengths = lengths->contiguous();
  p.new_lengths = call.new_lengths.const_data_ptr<int64_t>();
  p.rows_follow_new = true;
}

}  // namespace

void AttentionCall::set_mask(const at::Tensor& attn_mask, int64_t keys) {
  mask = expand_mask(attn_mask, params.batch, params.num_heads, params.q_len, keys);
  if (mask.numel() == 0) return;  // no key to keep from anyone, and no memory to point into
  params.mask = mask.const_data_ptr();
  params.mask_type = mask.scalar_type() == at::kBool ? MaskType::kBool : MaskType::kFloat32;
  params.mask_keys = keys;
  for (int i = 0; i < 4; i++) params.mask_strides[i] = mask.stride(i);
}

AttentionCall attention_call(const at::Tensor& q, const CacheTensors& cache, at::IntArrayRef format_ints,
                             const std::optional<at::Tensor>& new_k, const std::optional<at::Tensor>& new_v,
                             const std::optional<at::Tensor>& new_lengths, const CacheAttentionOptions& options) {
  const Format format = format_from_ints(format_ints);
  const c10::SymInt batch = check_cache(cache, format);
  check_attention(q, batch, format, cache.pool.device(), options);
  TORCH_CHECK_VALUE(new_k.has_value() == new_v.has_value(), "new_k and new_v must be given together");
  TORCH_CHECK_VALUE(!new_lengths || new_k, "new_lengths needs new_k and new_v");

  AttentionCall call;
  call.cache = cache;
  call.q = with_contiguous_channels(q);
  AttentionParams& p = call.params;
  p.format = format;
  p.layout = record_layout(format);
  set_cache(call);
  p.num_heads = q.size(1);
  p.q_len = q.size(2);
  p.q = call.q.const_data_ptr();
  p.q_batch_stride = call.q.stride(0);
  p.q_head_stride = call.q.stride(1);
  p.q_row_stride = call.q.stride(2);
  p.q_type = element_of(q.scalar_type());
  if (new_k) set_new_tokens(call, batch, *new_k, *new_v, new_lengths);
  p.scale = static_cast<float>(options.scale.value_or(1.0 / std::sqrt(static_cast<double>(format.head_dim))));
  p.softcap = static_cast<float>(options.softcap);
  p.causal = options.is_causal;
  p.window = std::min(options.window, kMaxWindow);
  p.exact = check_precision(options.precision);
  if (options.sinks) {
    call.sinks = options.sinks->to(at::kFloat).contiguous();
    p.sinks = call.sinks.const_data_ptr<float>();
  }
  if (options.alibi_slopes) {
    call.slopes = options.alibi_slopes->to(at::kFloat).contiguous();
    p.alibi_slopes = call.slopes.const_data_ptr<float>();
    p.alibi_batch_stride = call.slopes.dim() == 2 ? call.slopes.stride(0) : 0;
  }
  const auto on = at::TensorOptions().device(q.device());
  call.out = at::empty({p.batch, p.num_heads, p.q_len, format.value_head_dim}, on.dtype(q.scalar_type()));
  call.lse = at::empty({p.batch, p.num_heads, p.q_len}, on.dtype(at::kFloat));
  p.out = call.out.mutable_data_ptr();
  p.lse = call.lse.mutable_data_ptr<float>();
  return call;
}

}  // namespace kivi
