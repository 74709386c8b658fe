// kivi::cache_attention on the CPU: turns tensors into the kernel's parameters and runs its fixed division of the work
// on torch's threads.
#include <ATen/Parallel.h>

#include <cmath>

#include "csrc/cpu/kernels.h"
#include "ops/cache_args.h"
#include "ops/cache_cpu.h"
#include "ops/elements.h"
#include "ops/registration.h"

namespace kivi {
namespace {

constexpr NewTokenNames kNames = {"new_k", "new_v", "new_lengths"};

at::Tensor with_contiguous_channels(const at::Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : t.contiguous();
}

// Scratch memory of one call. Kept per thread, so that a decode step neither allocates nor touches fresh pages.
struct Scratch {
  std::vector<cpu::AttentionItem> items;
  std::vector<float> partials;
};

// Work that is worth waking a thread for: a few microseconds of products, or of merging.
constexpr int64_t kGrainProducts = int64_t{1} << 19;
constexpr int64_t kMergeGrainFloats = int64_t{1} << 15;

// Items that one thread should take at least. Only who runs an item depends on it, never a result.
int64_t items_per_thread(const AttentionParams& p, int64_t count) {
  int64_t keys = 0;
  for (int64_t b = 0; b < p.batch; b++) keys += p.lengths[b] + p.new_len;
  const int64_t products = keys * p.num_heads * p.q_len * (p.format->head_dim + p.format->value_head_dim);
  return std::max<int64_t>(1, kGrainProducts * count / std::max<int64_t>(products, 1));
}

void run(const AttentionParams& p) {
  static thread_local Scratch scratch;
  int64_t floats = 0;
  const int64_t count = cpu::attention_plan(p, nullptr, &floats);
  if (static_cast<int64_t>(scratch.items.size()) < count) scratch.items.resize(static_cast<size_t>(count));
  if (static_cast<int64_t>(scratch.partials.size()) < floats) scratch.partials.resize(static_cast<size_t>(floats));
  cpu::AttentionItem* const items = scratch.items.data();
  float* const partials = scratch.partials.data();
  cpu::attention_plan(p, items, &floats);
  const auto kernel = cpu::kernels().attention;
  at::parallel_for(0, count, items_per_thread(p, count),
                   [&](int64_t begin, int64_t end) { kernel(p, items, begin, end, partials); });
  if (floats == 0) return;
  const int64_t merged = std::max<int64_t>(1, kMergeGrainFloats * count / floats);
  at::parallel_for(0, count, merged,
                   [&](int64_t begin, int64_t end) { cpu::attention_merge(p, items, begin, end, partials); });
}

void check_new_lengths(const int64_t* lengths, int64_t batch, int64_t tokens) {
  for (int64_t b = 0; b < batch; b++) {
    TORCH_CHECK_VALUE(lengths[b] >= 0 && lengths[b] <= tokens, "new_lengths[", b, "] must be 0 to the ", tokens,
                      " tokens of new_k, got ", lengths[b]);
  }
}

std::tuple<at::Tensor, at::Tensor> cache_attention_cpu(
    const at::Tensor& q_arg, const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
    const at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v, const at::Tensor& window_k,
    const at::Tensor& window_v, at::IntArrayRef format_ints, const std::optional<at::Tensor>& new_k_arg,
    const std::optional<at::Tensor>& new_v_arg, const std::optional<at::Tensor>& new_lengths_arg,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale, double softcap,
    int64_t window, const std::optional<at::Tensor>& sinks_arg, const std::optional<at::Tensor>& slopes_arg,
    std::string_view precision, const std::optional<at::Tensor>& k_order) {
  const CacheTensors tensors{pool,
                             block_table,
                             lengths,
                             quantized_lengths,
                             sink_k,
                             sink_v,
                             window_k,
                             window_v,
                             k_order.value_or(at::Tensor())};
  const Format format = format_from_ints(format_ints);
  const c10::SymInt sym_batch = check_cache(tensors, format);
  CacheAttentionOptions options;
  options.attn_mask = attn_mask;
  options.is_causal = is_causal;
  options.scale = scale;
  options.softcap = softcap;
  options.window = window;
  options.sinks = sinks_arg;
  options.alibi_slopes = slopes_arg;
  options.precision = std::string(precision);
  check_attention(q_arg, sym_batch, format, pool.device(), options);
  TORCH_CHECK_VALUE(new_k_arg.has_value() == new_v_arg.has_value(), "new_k and new_v must be given together");
  TORCH_CHECK_VALUE(!new_lengths_arg || new_k_arg, "new_lengths needs new_k and new_v");

  const CacheView cache(tensors, format);
  const at::Tensor q = with_contiguous_channels(q_arg);
  AttentionParams p{};
  p.format = cache.format;
  p.layout = cache.layout;
  p.batch = cache.batch;
  p.num_heads = q.size(1);
  p.q_len = q.size(2);
  p.q = q.const_data_ptr();
  p.q_batch_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.q_row_stride = q.stride(2);
  p.q_type = element_of(q.scalar_type());
  p.pool = cache.pool;
  p.k_order = cache.k_order;
  p.page_bytes = cache.page_size;
  p.block_table = cache.block_table;
  p.block_table_stride = cache.max_pages;
  p.lengths = cache.lengths;
  p.quantized_lengths = cache.quantized;
  p.sink_k = cache.sink_k.data;
  p.sink_v = cache.sink_v.data;
  p.window_k = cache.window_k.data;
  p.window_v = cache.window_v.data;
  p.cache_type = cache.type;
  p.new_type = cache.type;

  at::Tensor new_k, new_v, new_lengths;  // keep alive what the parameters point to
  if (new_k_arg) {
    check_new_tokens(kNames, *new_k_arg, *new_v_arg, new_lengths_arg, sym_batch, format, window_k.scalar_type(),
                     pool.device());
    new_k = with_contiguous_channels(*new_k_arg);
    new_v = with_contiguous_channels(*new_v_arg);
    p.new_len = new_k.size(2);
    p.new_k = new_k.const_data_ptr();
    p.new_v = new_v.const_data_ptr();
    for (int i = 0; i < 3; i++) {
      p.new_k_strides[i] = new_k.stride(i);
      p.new_v_strides[i] = new_v.stride(i);
    }
    if (new_lengths_arg) {
      TORCH_CHECK_VALUE(q.size(2) == p.new_len, "q has ", q.size(2), " rows, but new_k has ", p.new_len,
                        " tokens; with new_lengths they must be equal");
      new_lengths = new_lengths_arg->contiguous();
      p.new_lengths = new_lengths.const_data_ptr<int64_t>();
      check_new_lengths(p.new_lengths, cache.batch, p.new_len);
      p.rows_follow_new = true;
    }
  }

  p.scale = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(format.head_dim))));
  p.softcap = static_cast<float>(softcap);
  p.causal = is_causal;
  p.window = window;
  p.exact = check_precision(options.precision);
  at::Tensor sinks, slopes, mask;
  if (sinks_arg) {
    sinks = sinks_arg->to(at::kFloat).contiguous();
    p.sinks = sinks.const_data_ptr<float>();
  }
  if (slopes_arg) {
    slopes = slopes_arg->to(at::kFloat).contiguous();
    p.alibi_slopes = slopes.const_data_ptr<float>();
    p.alibi_batch_stride = slopes.dim() == 2 ? slopes.stride(0) : 0;
  }
  if (attn_mask) {
    int64_t keys = 0;
    for (int64_t b = 0; b < cache.batch; b++) {
      keys = std::max(keys, cache.lengths[b] + (p.new_lengths != nullptr ? p.new_lengths[b] : p.new_len));
    }
    // With new tokens of different lengths the mask may also be as wide as the padded batch.
    const int64_t width = attn_mask->dim() >= 1 ? attn_mask->size(-1) : 0;
    if (p.new_lengths != nullptr && width > keys) {
      int64_t padded = 0;
      for (int64_t b = 0; b < cache.batch; b++) padded = std::max(padded, cache.lengths[b] + p.new_len);
      keys = padded;
    }
    mask = expand_mask(*attn_mask, sym_batch, p.num_heads, p.q_len, keys);
    p.mask = mask.const_data_ptr();
    p.mask_type = mask.scalar_type() == at::kBool ? MaskType::kBool : MaskType::kFloat32;
    for (int i = 0; i < 4; i++) p.mask_strides[i] = mask.stride(i);
  }

  at::Tensor out = at::empty({p.batch, p.num_heads, p.q_len, format.value_head_dim},
                             at::TensorOptions().dtype(q.scalar_type()).device(q.device()));
  at::Tensor lse = at::empty({p.batch, p.num_heads, p.q_len}, at::TensorOptions().dtype(at::kFloat).device(q.device()));
  p.out = out.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr<float>();
  run(p);
  return {out, lse};
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, CPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_cpu));
}
