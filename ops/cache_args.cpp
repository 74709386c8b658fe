// Checks of the arguments of the cache operators; see cache_args.h.
#include "ops/cache_args.h"

namespace kivi {

std::vector<int64_t> format_to_ints(const Format& f) {
  std::vector<int64_t> ints = {kFormatVersion,
                               f.num_kv_heads,
                               f.head_dim,
                               f.value_head_dim,
                               f.k_bits,
                               f.v_bits,
                               f.group_size,
                               f.residual_length,
                               f.sink_length,
                               static_cast<int64_t>(f.scale_type),
                               f.k_bias_correction ? 1 : 0,
                               f.v_gain_correction ? 1 : 0,
                               f.v_group_size,
                               f.v_symmetric ? 1 : 0,
                               f.v_rotated ? 1 : 0};
  for (const RangeSearch* search : {&f.k_search, &f.v_search}) {
    ints.push_back(search->count);
    ints.insert(ints.end(), search->thousandths, search->thousandths + search->count);
  }
  ints.push_back(f.num_key_classes);
  for (int64_t c = 0; c < f.num_key_classes; c++) {
    ints.push_back(f.key_classes[c].channels);
    ints.push_back(f.key_classes[c].bits);
  }
  return ints;
}

Format format_from_ints(at::IntArrayRef ints) {
  constexpr size_t kFixed = 15;
  TORCH_CHECK_VALUE(!ints.empty() && ints[0] == kFormatVersion, "format has version ", ints.empty() ? 0 : ints[0],
                    ", but this library reads version ", kFormatVersion);
  TORCH_CHECK_VALUE(ints.size() >= kFixed + 3, "format must have at least ", kFixed + 3,
                    " integers (see cache_format), got ", ints.size());
  const auto flag = [&](size_t i, const char* name) {
    TORCH_CHECK_VALUE(ints[i] == 0 || ints[i] == 1, "format: ", name, " must be 0 or 1, got ", ints[i]);
    return ints[i] == 1;
  };
  TORCH_CHECK_VALUE(ints[9] >= 0 && ints[9] < 256 && is_scale_type(static_cast<ScaleType>(ints[9])),
                    "format: scale_type must be 8 (float8), 16 (float16), 32 (float32), 40 or 48 (widened), got ",
                    ints[9]);
  Format f;
  f.num_kv_heads = ints[1];
  f.head_dim = ints[2];
  f.value_head_dim = ints[3];
  f.k_bits = ints[4];
  f.v_bits = ints[5];
  f.group_size = ints[6];
  f.residual_length = ints[7];
  f.sink_length = ints[8];
  f.scale_type = static_cast<ScaleType>(ints[9]);
  f.k_bias_correction = flag(10, "k_bias_correction");
  f.v_gain_correction = flag(11, "v_gain_correction");
  f.v_group_size = ints[12];
  f.v_symmetric = flag(13, "v_symmetric");
  f.v_rotated = flag(14, "v_rotated");
  size_t at = kFixed;
  for (RangeSearch* search : {&f.k_search, &f.v_search}) {
    const int64_t count = at < ints.size() ? ints[at++] : -1;
    TORCH_CHECK_VALUE(count >= 0 && count <= RangeSearch::kMax && static_cast<size_t>(count) <= ints.size() - at,
                      "format: a range search must have 0 to ", RangeSearch::kMax, " parts, got ", count, " of ",
                      ints.size() - at, " integers left");
    for (; search->count < count; search->count++) {
      TORCH_CHECK_VALUE(ints[at] >= 1 && ints[at] <= 1000,
                        "format: the parts of a range search must be 1 to 1000 thousandths, got ", ints[at]);
      search->thousandths[search->count] = static_cast<int16_t>(ints[at++]);
    }
  }
  const int64_t classes = at < ints.size() ? ints[at++] : -1;
  TORCH_CHECK_VALUE(classes >= 0 && classes <= kMaxKeyClasses && ints.size() - at == 2 * static_cast<size_t>(classes),
                    "format: 0 to ", kMaxKeyClasses, " classes of key channels must end it, got ", classes, " and ",
                    ints.size() - at, " more integers");
  for (; f.num_key_classes < classes; f.num_key_classes++, at += 2) {
    f.key_classes[f.num_key_classes] = {ints[at], ints[at + 1]};
  }
  check_format(f);
  return f;
}

ScaleType check_widened(const Format& format) {
  const ScaleType wide = widened(format.scale_type);
  TORCH_CHECK_VALUE(wide != format.scale_type, "format must have scale type 8 (float8) or 16 (float16), got ",
                    static_cast<int64_t>(format.scale_type));
  return wide;
}

void check_pool(const at::Tensor& pool, const Format& format) {
  check_dtype("pool", pool, at::kByte);
  check_rank("pool", pool, 2, "[pages, page_bytes]");
  check_size("pool", pool, 1, "page size", page_bytes(format).value, "the format has page_bytes");
}

WidenCall widen_call(const at::Tensor& pool, at::IntArrayRef format_ints) {
  WidenCall call;
  call.from = call.to = format_from_ints(format_ints);
  call.to.scale_type = check_widened(call.from);
  check_pool(pool, call.from);
  call.pool = pool.contiguous();
  call.wide = at::empty({pool.size(0), page_bytes(call.to).value}, pool.options());
  call.records = pool.size(0) * call.from.num_kv_heads * (kPageTokens / call.from.group_size);
  return call;
}

namespace {

void check_exact_part(const char* name, const at::Tensor& t, const c10::SymInt& batch, const Format& f, int64_t slots,
                      int64_t channels, at::ScalarType dtype, at::Device device) {
  check_same_device(name, t, "pool", device);
  check_same_dtype(name, t, "window_k", dtype);
  check_rank(name, t, 4, "[B, Hkv, slots, channels]");
  check_size(name, t, 0, "batch size", batch, "lengths has");
  check_size(name, t, 1, "head count", f.num_kv_heads, "the format has num_kv_heads");
  check_size(name, t, 2, "token slots", slots, "the format wants");
  check_size(name, t, 3, "channels", channels, "the format has");
  check_contiguous(name, t);
}

}  // namespace

c10::SymInt check_cache(const CacheTensors& c, const Format& f) {
  const at::Device device = c.pool.device();
  check_pool(c.pool, f);
  check_contiguous("pool", c.pool);
  check_same_device("lengths", c.lengths, "pool", device);
  check_dtype("lengths", c.lengths, at::kLong);
  check_rank("lengths", c.lengths, 1, "[B]");
  check_contiguous("lengths", c.lengths);
  const c10::SymInt batch = c.lengths.sym_size(0);
  check_same_device("quantized_lengths", c.quantized_lengths, "pool", device);
  check_dtype("quantized_lengths", c.quantized_lengths, at::kLong);
  check_rank("quantized_lengths", c.quantized_lengths, 1, "[B]");
  check_size("quantized_lengths", c.quantized_lengths, 0, "batch size", batch, "lengths has");
  check_contiguous("quantized_lengths", c.quantized_lengths);
  check_same_device("block_table", c.block_table, "pool", device);
  check_dtype("block_table", c.block_table, at::kInt);
  check_rank("block_table", c.block_table, 2, "[B, max_pages]");
  check_size("block_table", c.block_table, 0, "batch size", batch, "lengths has");
  check_contiguous("block_table", c.block_table);
  check_floating("window_k", c.window_k);
  const at::ScalarType dtype = c.window_k.scalar_type();
  check_exact_part("sink_k", c.sink_k, batch, f, f.sink_length, f.head_dim, dtype, device);
  check_exact_part("sink_v", c.sink_v, batch, f, f.sink_length, f.value_head_dim, dtype, device);
  check_exact_part("window_k", c.window_k, batch, f, window_capacity(f), f.head_dim, dtype, device);
  check_exact_part("window_v", c.window_v, batch, f, window_capacity(f), f.value_head_dim, dtype, device);
  TORCH_CHECK_VALUE(c.k_order.defined() == (f.num_key_classes > 0),
                    "k_order must be given if the format has classes of ",
                    "key channels, and only then; the format has ", f.num_key_classes, " classes");
  if (c.k_order.defined()) {
    check_same_device("k_order", c.k_order, "pool", device);
    check_dtype("k_order", c.k_order, at::kShort);
    check_rank("k_order", c.k_order, 3, "[B, Hkv, D]");
    check_size("k_order", c.k_order, 0, "batch size", batch, "lengths has");
    check_size("k_order", c.k_order, 1, "head count", f.num_kv_heads, "the format has num_kv_heads");
    check_size("k_order", c.k_order, 2, "size", f.head_dim, "the format has head_dim");
    check_contiguous("k_order", c.k_order);
  }
  return batch;
}

void check_lengths(const char* name, const at::Tensor& lengths, const c10::SymInt& batch) {
  check_dtype(name, lengths, at::kLong);
  check_rank(name, lengths, 1, "[B]");
  check_size(name, lengths, 0, "size", batch, "the batch size is");
}

void check_new_tokens(const NewTokenNames& names, const at::Tensor& k, const at::Tensor& v,
                      const std::optional<at::Tensor>& lengths, const c10::SymInt& batch, const Format& f,
                      at::ScalarType cache_dtype, at::Device device) {
  check_same_device(names.k, k, "the cache", device);
  check_same_device(names.v, v, "the cache", device);
  check_floating(names.k, k);
  check_same_dtype(names.v, v, names.k, k.scalar_type());
  check_same_dtype(names.k, k, "the cache", cache_dtype);
  check_rank(names.k, k, 4, "[B, Hkv, T, D]");
  check_rank(names.v, v, 4, "[B, Hkv, T, Dv]");
  check_size(names.k, k, 0, "batch size", batch, "the cache has");
  check_size(names.v, v, 0, "batch size", batch, "the cache has");
  check_size(names.k, k, 1, "head count", f.num_kv_heads, "the cache has num_kv_heads");
  check_size(names.v, v, 1, "head count", f.num_kv_heads, "the cache has num_kv_heads");
  check_size(names.k, k, 3, "head size", f.head_dim, "the cache has head_dim");
  check_size(names.v, v, 3, "head size", f.value_head_dim, "the cache has value_head_dim");
  TORCH_CHECK_VALUE(v.sym_size(2) == k.sym_size(2), names.v, " has ", v.sym_size(2), " tokens, but ", names.k, " has ",
                    k.sym_size(2));
  if (lengths) {
    check_same_device(names.lengths, *lengths, "the cache", device);
    check_lengths(names.lengths, *lengths, batch);
  }
}

void check_overflow(const at::Tensor& overflow, at::Device device) {
  check_dtype("overflow", overflow, at::kInt);
  check_same_device("overflow", overflow, "pool", device);
  TORCH_CHECK_VALUE(overflow.sym_numel() == 1, "overflow must have 1 element, got ", overflow.sym_numel());
}

void check_page_lists(const at::Tensor& pool, const at::Tensor& source, const at::Tensor& target) {
  check_dtype("pool", pool, at::kByte);
  check_rank("pool", pool, 2, "[pages, page_bytes]");
  check_contiguous("pool", pool);
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"source", source}, {"target", target}}) {
    check_same_device(name, t, "pool", pool.device());
    check_dtype(name, t, at::kLong);
    check_rank(name, t, 1, "[N]");
  }
  check_size("target", target, 0, "size", source.sym_size(0), "source has");
}

namespace {

// [begin, end) of the bytes of a tensor; empty if there are none.
std::pair<const char*, const char*> memory_of(const at::Tensor* t) {
  if (t == nullptr || !t->defined() || t->numel() == 0) return {nullptr, nullptr};
  int64_t last = 0;
  for (int64_t d = 0; d < t->dim(); d++) last += (t->size(d) - 1) * t->stride(d);
  const auto* data = static_cast<const char*>(t->const_data_ptr());
  return {data, data + (last + 1) * static_cast<int64_t>(t->element_size())};
}

}  // namespace

void check_no_overlap(at::ArrayRef<NamedTensor> written, at::ArrayRef<NamedTensor> read) {
  const auto argument = [&](size_t i) { return i < written.size() ? written[i] : read[i - written.size()]; };
  c10::SmallVector<std::pair<const char*, const char*>, 16> memory;
  for (size_t i = 0; i < written.size() + read.size(); i++) memory.push_back(memory_of(argument(i).tensor));
  for (size_t i = 0; i < written.size(); i++) {
    const auto [begin, end] = memory[i];
    if (begin == end) continue;
    for (size_t j = i + 1; j < memory.size(); j++) {
      const auto [first, last] = memory[j];
      TORCH_CHECK_VALUE(first == last || first >= end || last <= begin, argument(j).name, " shares memory with ",
                        argument(i).name, ", which the call writes: sizes ", argument(j).tensor->sizes(), " and ",
                        argument(i).tensor->sizes());
    }
  }
}

void check_append_overlap(const CacheTensors& c, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& new_lengths, const std::optional<at::Tensor>& overflow) {
  check_no_overlap(
      {{"pool", c.pool},
       {"lengths", c.lengths},
       {"quantized_lengths", c.quantized_lengths},
       {"sink_k", c.sink_k},
       {"sink_v", c.sink_v},
       {"window_k", c.window_k},
       {"window_v", c.window_v},
       {"overflow", overflow}},
      {{"block_table", c.block_table}, {"k", k}, {"v", v}, {"new_lengths", new_lengths}, {"k_order", c.k_order}});
}

void check_truncate_overlap(const CacheTensors& c) {
  check_no_overlap({{"lengths", c.lengths},
                    {"quantized_lengths", c.quantized_lengths},
                    {"window_k", c.window_k},
                    {"window_v", c.window_v}},
                   {{"pool", c.pool},
                    {"block_table", c.block_table},
                    {"sink_k", c.sink_k},
                    {"sink_v", c.sink_v},
                    {"k_order", c.k_order}});
}

at::Tensor expand_mask(const at::Tensor& mask, const c10::SymInt& batch, const c10::SymInt& heads,
                       const c10::SymInt& rows, const c10::SymInt& keys) {
  const c10::SymInt target[4] = {batch, heads, rows, keys};
  bool fits = mask.dim() >= 1 && mask.dim() <= 4;
  for (int64_t i = 0; fits && i < mask.dim(); i++) {
    const c10::SymInt size = mask.sym_size(mask.dim() - 1 - i);
    fits = size == 1 || size == target[3 - i];
  }
  TORCH_CHECK_VALUE(fits, "attn_mask has sizes ", mask.sym_sizes(), ", which do not broadcast to [B, Hq, Lq, keys] = [",
                    batch, ", ", heads, ", ", rows, ", ", keys, "]");
  const at::Tensor m = mask.scalar_type() == at::kBool ? mask : mask.to(at::kFloat);
  return m.expand_symint({batch, heads, rows, keys});
}

void check_attention(const at::Tensor& q, const c10::SymInt& batch, const Format& f, at::Device device,
                     const CacheAttentionOptions& o) {
  check_same_device("q", q, "the cache", device);
  check_floating("q", q);
  check_rank("q", q, 4, "[B, Hq, Lq, D]");
  check_size("q", q, 0, "batch size", batch, "the cache has");
  check_size("q", q, 3, "head size", f.head_dim, "the cache has head_dim");
  TORCH_CHECK_VALUE(q.sym_size(1) >= 1 && q.sym_size(1) % f.num_kv_heads == 0, "q has head count ", q.sym_size(1),
                    ", which is no multiple of the cache's num_kv_heads ", f.num_kv_heads);
  if (o.scale) check_finite("scale", *o.scale);
  check_finite("softcap", o.softcap);
  TORCH_CHECK_VALUE(o.softcap >= 0, "softcap must not be negative, got ", o.softcap);
  check_not_negative("window", o.window);
  check_precision(o.precision);
  if (o.attn_mask) {
    const auto type = o.attn_mask->scalar_type();
    TORCH_CHECK_TYPE(type == at::kBool || is_supported_float(type),
                     "attn_mask must be bool, float32, float16 or bfloat16, got ", type);
    check_same_device("attn_mask", *o.attn_mask, "q", device);
  }
  if (o.sinks) {
    check_floating("sinks", *o.sinks);
    check_same_device("sinks", *o.sinks, "q", device);
    check_rank("sinks", *o.sinks, 1, "[Hq]");
    check_size("sinks", *o.sinks, 0, "size", q.sym_size(1), "q has head count");
  }
  if (o.alibi_slopes) {
    const at::Tensor& slopes = *o.alibi_slopes;
    check_floating("alibi_slopes", slopes);
    check_same_device("alibi_slopes", slopes, "q", device);
    TORCH_CHECK_VALUE(slopes.dim() == 1 || slopes.dim() == 2, "alibi_slopes must be [Hq] or [B, Hq], got ",
                      slopes.dim(), " dimensions of sizes ", slopes.sym_sizes());
    check_size("alibi_slopes", slopes, slopes.dim() - 1, "head count", q.sym_size(1), "q has head count");
    if (slopes.dim() == 2) check_size("alibi_slopes", slopes, 0, "batch size", batch, "the cache has");
  }
}

}  // namespace kivi
