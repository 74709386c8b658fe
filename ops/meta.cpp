// Meta kernels: the shapes, dtypes and strides that the real kernels give, from sizes alone (symbolic ones too). Values
// in lengths and block_table are not looked at.
#include "ops/cache_args.h"
#include "ops/quantize_shapes.h"
#include "ops/registration.h"

namespace kivi {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_meta(const at::Tensor& x, int64_t axis, int64_t bits,
                                                             int64_t group_size) {
  const QuantizeShapes s = quantize_shapes(x, axis, bits, group_size);
  const auto options = at::TensorOptions().device(x.device());
  return {at::empty_symint(s.codes, options.dtype(at::kByte)), at::empty_symint(s.scale, options.dtype(at::kFloat)),
          at::empty_symint(s.scale, options.dtype(at::kFloat))};
}

at::Tensor dequantize_meta(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero, int64_t axis,
                           int64_t bits, int64_t group_size, c10::SymInt size, std::optional<at::ScalarType> dtype) {
  const auto type = dtype.value_or(at::kFloat);
  const auto shape = dequantize_shape(codes, scale, zero, axis, bits, group_size, size, type);
  return at::empty_symint(shape, at::TensorOptions().device(codes.device()).dtype(type));
}

at::Tensor fake_quantize_meta(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  quantize_shapes(x, axis, bits, group_size);
  return at::empty_symint(x.sym_sizes(), at::TensorOptions().device(x.device()).dtype(at::kFloat));
}

void cache_append_meta(at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                       at::Tensor& quantized_lengths, at::Tensor& sink_k, at::Tensor& sink_v, at::Tensor& window_k,
                       at::Tensor& window_v, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef format_ints,
                       const OptionalTensor& new_lengths, OptionalTensor overflow, const OptionalTensor& k_order) {
  const Format format = format_from_ints(format_ints);
  const c10::SymInt batch = check_cache(
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order),
      format);
  check_new_tokens({"k", "v", "new_lengths"}, k, v, new_lengths, batch, format, window_k.scalar_type(), pool.device());
  if (overflow) check_overflow(*overflow, pool.device());
}

std::tuple<at::Tensor, at::Tensor> cache_attention_meta(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
    const at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v, const at::Tensor& window_k,
    const at::Tensor& window_v, at::IntArrayRef format_ints, const OptionalTensor& new_k, const OptionalTensor& new_v,
    const OptionalTensor& new_lengths, const OptionalTensor& attn_mask, bool is_causal, std::optional<double> scale,
    double softcap, int64_t window, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
    std::string_view precision, const std::optional<at::Tensor>& k_order) {
  const Format format = format_from_ints(format_ints);
  const c10::SymInt batch = check_cache(
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order),
      format);
  CacheAttentionOptions options;
  options.attn_mask = attn_mask;
  options.is_causal = is_causal;
  options.scale = scale;
  options.softcap = softcap;
  options.window = window;
  options.sinks = sinks;
  options.alibi_slopes = alibi_slopes;
  options.precision = std::string(precision);
  check_attention(q, batch, format, pool.device(), options);
  TORCH_CHECK_VALUE(new_k.has_value() == new_v.has_value(), "new_k and new_v must be given together");
  TORCH_CHECK_VALUE(!new_lengths || new_k, "new_lengths needs new_k and new_v");
  if (new_k) {
    check_new_tokens({"new_k", "new_v", "new_lengths"}, *new_k, *new_v, new_lengths, batch, format,
                     window_k.scalar_type(), pool.device());
    TORCH_CHECK_VALUE(!new_lengths || q.sym_size(2) == new_k->sym_size(2), "q has ", q.sym_size(2),
                      " rows, but new_k has ", new_k->sym_size(2), " tokens; with new_lengths they must be equal");
  }
  const auto on = at::TensorOptions().device(q.device());
  return {at::empty_symint({batch, q.sym_size(1), q.sym_size(2), format.value_head_dim}, on.dtype(q.scalar_type())),
          at::empty_symint({batch, q.sym_size(1), q.sym_size(2)}, on.dtype(at::kFloat))};
}

std::tuple<at::Tensor, at::Tensor> cache_dequantize_meta(const at::Tensor& pool, const at::Tensor& block_table,
                                                         const at::Tensor& lengths, const at::Tensor& quantized_lengths,
                                                         const at::Tensor& sink_k, const at::Tensor& sink_v,
                                                         const at::Tensor& window_k, const at::Tensor& window_v,
                                                         at::IntArrayRef format_ints, c10::SymInt length,
                                                         const std::optional<at::Tensor>& k_order) {
  const Format format = format_from_ints(format_ints);
  const c10::SymInt batch = check_cache(
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order),
      format);
  TORCH_CHECK_VALUE(length >= 0, "length must not be negative, got ", length);
  const auto options = at::TensorOptions().device(pool.device()).dtype(window_k.scalar_type());
  return {at::empty_symint({batch, format.num_kv_heads, length, format.head_dim}, options),
          at::empty_symint({batch, format.num_kv_heads, length, format.value_head_dim}, options)};
}

void cache_truncate_meta(const at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                         at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v,
                         at::Tensor& window_k, at::Tensor& window_v, at::IntArrayRef format_ints, int64_t length,
                         const std::optional<at::Tensor>& k_order) {
  check_cache(cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order),
              format_from_ints(format_ints));
  check_not_negative("length", length);
}

void cache_copy_pages_meta(at::Tensor& pool, const at::Tensor& source, const at::Tensor& target) {
  check_page_lists(pool, source, target);
}

at::Tensor cache_widen_meta(const at::Tensor& pool, at::IntArrayRef format_ints) {
  Format format = format_from_ints(format_ints);
  const ScaleType wide = check_widened(format);
  check_pool(pool, format);
  format.scale_type = wide;
  return at::empty_symint({pool.sym_size(0), page_bytes(format).value},
                          at::TensorOptions().device(pool.device()).dtype(at::kByte));
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, Meta, m) {
  if (!kivi::registers_operators()) return;
  m.impl("quantize", TORCH_FN(kivi::quantize_meta));
  m.impl("dequantize", TORCH_FN(kivi::dequantize_meta));
  m.impl("fake_quantize", TORCH_FN(kivi::fake_quantize_meta));
  m.impl("cache_append", TORCH_FN(kivi::cache_append_meta));
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_meta));
  m.impl("cache_dequantize", TORCH_FN(kivi::cache_dequantize_meta));
  m.impl("cache_truncate", TORCH_FN(kivi::cache_truncate_meta));
  m.impl("cache_copy_pages", TORCH_FN(kivi::cache_copy_pages_meta));
  m.impl("cache_widen", TORCH_FN(kivi::cache_widen_meta));
}
