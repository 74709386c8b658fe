// kivi::cache_attention on the CPU: turns tensors into the kernel's parameters and runs its fixed division of the work
// on torch's threads.
#include <ATen/Parallel.h>

#include "csrc/cpu/kernels.h"
#include "ops/attention_call.h"
#include "ops/cache_cpu.h"
#include "ops/registration.h"

namespace kivi {
namespace {

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
  const int64_t products = keys * p.num_heads * p.q_len * (p.format.head_dim + p.format.value_head_dim);
  return std::max<int64_t>(1, kGrainProducts * count / std::max<int64_t>(products, 1));
}

void run(const AttentionParams& p) {
  static thread_local Scratch scratch;
  int64_t floats = 0;
  const int64_t count = cpu::attention_plan(p, nullptr, &floats);
  if (count == 0) return;
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

// The length of the mask's last axis: the keys of the longest row.
int64_t longest_row(const AttentionParams& p, const at::Tensor& attn_mask) {
  int64_t keys = 0, padded = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    keys = std::max(keys, p.lengths[b] + (p.new_lengths != nullptr ? p.new_lengths[b] : p.new_len));
    padded = std::max(padded, p.lengths[b] + p.new_len);
  }
  // With new tokens of different lengths the mask may also be as wide as the padded batch.
  const int64_t width = attn_mask.dim() >= 1 ? attn_mask.size(-1) : 0;
  return p.new_lengths != nullptr && width > keys ? padded : keys;
}

std::tuple<at::Tensor, at::Tensor> cache_attention_cpu(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& block_table, const at::Tensor& lengths,
    const at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v, const at::Tensor& window_k,
    const at::Tensor& window_v, at::IntArrayRef format, const std::optional<at::Tensor>& new_k,
    const std::optional<at::Tensor>& new_v, const std::optional<at::Tensor>& new_lengths,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale, double softcap,
    int64_t window, const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& alibi_slopes,
    std::string_view precision, const std::optional<at::Tensor>& k_order) {
  const CacheTensors cache =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  AttentionCall call =
      attention_call(q, cache, format, new_k, new_v, new_lengths,
                     {attn_mask, is_causal, scale, softcap, window, sinks, alibi_slopes, std::string(precision)});
  AttentionParams& p = call.params;
  const CacheView checked(cache, p.format);
  if (p.new_lengths != nullptr) check_new_lengths(p.new_lengths, p.batch, p.new_len);
  if (attn_mask) call.set_mask(*attn_mask, longest_row(p, *attn_mask));
  run(p);
  return {call.out, call.lse};
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, CPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("cache_attention", TORCH_FN(kivi::cache_attention_cpu));
}
