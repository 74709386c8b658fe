// The C++ functions of include/kivi/ops.h. Each finds its operator once and calls it through the dispatcher, so that
// C++ callers get device, autograd and autocast dispatch like everyone else.
#include <ATen/core/dispatch/Dispatcher.h>

#include "kivi/ops.h"
#include "ops/cache_args.h"
#include "ops/options.h"

namespace kivi {

namespace {

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Tensor = at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  static const auto op =
      find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, int64_t, int64_t, int64_t)>("kivi::quantize");
  return op.call(x, axis, bits, group_size);
}

Tensor dequantize(const Tensor& codes, const Tensor& scale, const Tensor& zero, int64_t axis, int64_t bits,
                  int64_t group_size, int64_t size, at::ScalarType dtype) {
  static const auto op = find<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, int64_t,
                                     c10::SymInt, std::optional<at::ScalarType>)>("kivi::dequantize");
  return op.call(codes, scale, zero, axis, bits, group_size, size, dtype);
}

Tensor fake_quantize(const Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  static const auto op = find<Tensor(const Tensor&, int64_t, int64_t, int64_t)>("kivi::fake_quantize");
  return op.call(x, axis, bits, group_size);
}

std::vector<int64_t> cache_format(const CacheOptions& options) { return format_to_ints(format_of(options)); }

std::vector<int64_t> cache_format(int64_t num_kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim,
                                  int64_t k_bits, int64_t v_bits, int64_t group_size, int64_t residual_length,
                                  int64_t sink_length, const std::string& scale_dtype, bool range_search) {
  CacheOptions o{num_kv_heads, head_dim, value_head_dim, k_bits, v_bits, group_size, residual_length, sink_length};
  o.scale_dtype = scale_dtype;
  o.range_search = range_search;
  return cache_format(o);
}

int64_t cache_page_bytes(at::IntArrayRef format) { return page_bytes(format_from_ints(format)).value; }

int64_t cache_window_capacity(at::IntArrayRef format) { return window_capacity(format_from_ints(format)); }

namespace {
OptionalTensor optional_order(const CacheTensors& c) {
  return c.k_order.defined() ? OptionalTensor(c.k_order) : std::nullopt;
}
}  // namespace

void cache_append(const CacheTensors& c, const Tensor& k, const Tensor& v, at::IntArrayRef format,
                  const OptionalTensor& new_lengths, const OptionalTensor& overflow) {
  static const auto op =
      find<void(Tensor&, const Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, const Tensor&,
                const Tensor&, at::IntArrayRef, const OptionalTensor&, OptionalTensor, const OptionalTensor&)>(
          "kivi::cache_append");
  CacheTensors m = c;  // the operator wants its mutated arguments as lvalues; these are handles to the same tensors
  op.call(m.pool, m.block_table, m.lengths, m.quantized_lengths, m.sink_k, m.sink_v, m.window_k, m.window_v, k, v,
          format, new_lengths, overflow, optional_order(c));
}

std::tuple<Tensor, Tensor> cache_attention(const Tensor& q, const CacheTensors& c, at::IntArrayRef format,
                                           const OptionalTensor& new_k, const OptionalTensor& new_v,
                                           const OptionalTensor& new_lengths, const CacheAttentionOptions& o) {
  static const auto op = find<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, const Tensor&, at::IntArrayRef, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, bool, std::optional<double>, double, int64_t, const OptionalTensor&,
      const OptionalTensor&, std::string_view, const OptionalTensor&)>("kivi::cache_attention");
  return op.call(q, c.pool, c.block_table, c.lengths, c.quantized_lengths, c.sink_k, c.sink_v, c.window_k, c.window_v,
                 format, new_k, new_v, new_lengths, o.attn_mask, o.is_causal, o.scale, o.softcap, o.window, o.sinks,
                 o.alibi_slopes, o.precision, optional_order(c));
}

std::tuple<Tensor, Tensor> cache_dequantize(const CacheTensors& c, at::IntArrayRef format, int64_t length) {
  static const auto op = find<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Tensor&, at::IntArrayRef, c10::SymInt, const OptionalTensor&)>("kivi::cache_dequantize");
  return op.call(c.pool, c.block_table, c.lengths, c.quantized_lengths, c.sink_k, c.sink_v, c.window_k, c.window_v,
                 format, length, optional_order(c));
}

void cache_truncate(const CacheTensors& c, at::IntArrayRef format, int64_t length) {
  static const auto op =
      find<void(const Tensor&, const Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, Tensor&, Tensor&,
                at::IntArrayRef, int64_t, const OptionalTensor&)>("kivi::cache_truncate");
  CacheTensors m = c;
  op.call(m.pool, m.block_table, m.lengths, m.quantized_lengths, m.sink_k, m.sink_v, m.window_k, m.window_v, format,
          length, optional_order(c));
}

void cache_copy_pages(const Tensor& pool, const Tensor& source, const Tensor& target) {
  static const auto op = find<void(Tensor&, const Tensor&, const Tensor&)>("kivi::cache_copy_pages");
  Tensor mutated = pool;
  op.call(mutated, source, target);
}

Tensor cache_widen(const Tensor& pool, at::IntArrayRef format) {
  static const auto op = find<Tensor(const Tensor&, at::IntArrayRef)>("kivi::cache_widen");
  return op.call(pool, format);
}

}  // namespace kivi
