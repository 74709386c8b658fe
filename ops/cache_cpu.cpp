// The cache operators on the CPU: append, dequantize, truncate, copy pages, widen. Attention is in attention_cpu.cpp.
// The values in lengths and block_table are checked here, since they are at hand on a CPU; everything is checked before
// anything is written.
#include "ops/cache_cpu.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/reference.h"
#include "ops/attention_call.h"
#include "ops/cache_args.h"
#include "ops/elements.h"
#include "ops/registration.h"

namespace kivi {

CacheView::CacheView(const CacheTensors& c, const Format& f)
    : format(f),
      layout(record_layout(f)),
      batch(c.lengths.size(0)),
      pages(c.pool.size(0)),
      page_size(c.pool.size(1)),
      max_pages(c.block_table.size(1)),
      capacity(window_capacity(f)),
      pool(static_cast<uint8_t*>(c.pool.data_ptr())),
      block_table(c.block_table.const_data_ptr<int32_t>()),
      lengths(c.lengths.const_data_ptr<int64_t>()),
      quantized(c.quantized_lengths.const_data_ptr<int64_t>()),
      k_order(c.k_order.defined() ? c.k_order.const_data_ptr<int16_t>() : nullptr),
      type(element_of(c.window_k.scalar_type())),
      sink_k(c.sink_k),
      sink_v(c.sink_v),
      window_k(c.window_k),
      window_v(c.window_v) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t n = lengths[b], m = quantized[b];
    TORCH_CHECK_VALUE(n >= 0 && n < kMaxTokens, "lengths[", b, "] must be 0 to 2^40, got ", n);
    TORCH_CHECK_VALUE(m >= 0 && m % f.group_size == 0 && (m == 0 || m <= n - f.sink_length), "quantized_lengths[", b,
                      "] must be a multiple of group_size ", f.group_size, " within lengths[", b, "] ", n,
                      " less sink_length ", f.sink_length, ", got ", m);
    TORCH_CHECK_VALUE(n - f.sink_length - m <= capacity, "lengths[", b, "] ", n, " less quantized_lengths[", b, "] ", m,
                      " leaves more exact tokens than the ", capacity, " slots of the window");
    check_pages(b, m);
    if (m > 0) check_order(b);
  }
}

void CacheView::check_order(int64_t b) const {
  if (k_order == nullptr) return;
  for (int64_t h = 0; h < format.num_kv_heads; h++) {
    const int16_t* const channels = order(b, h);
    uint64_t seen[kMaxHeadDim / 64] = {};
    for (int64_t i = 0; i < format.head_dim; i++) {
      const int64_t channel = channels[i];
      const bool is_new = channel >= 0 && channel < format.head_dim && (seen[channel / 64] >> channel % 64 & 1) == 0;
      TORCH_CHECK_VALUE(is_new, "k_order[", b, "][", h, "] must name each of the ", format.head_dim,
                        " channels once, but has ", channel, " in place ", i);
      seen[channel / 64] |= uint64_t{1} << channel % 64;
    }
  }
}

void CacheView::check_pages(int64_t b, int64_t quantized_tokens) const {
  const int64_t needed = ceil_div(quantized_tokens, kPageTokens);
  TORCH_CHECK_VALUE(needed <= max_pages, "block_table has ", max_pages, " pages a row, but row ", b, " needs ", needed,
                    " for ", quantized_tokens, " quantised tokens");
  for (int64_t i = 0; i < needed; i++) {
    const int64_t page = block_table[b * max_pages + i];
    TORCH_CHECK_INDEX(page >= 0 && page < pages, "block_table[", b, "][", i, "] is ", page, ", but pool has ", pages,
                      " pages");
  }
}

uint8_t* CacheView::record(int64_t b, int64_t h, int64_t token) const {
  const int64_t page = block_table[b * max_pages + token / kPageTokens];
  const int64_t index = h * (kPageTokens / format.group_size) + token % kPageTokens / format.group_size;
  return pool + page * page_size + index * layout.bytes;
}

namespace {

constexpr NewTokenNames kAppendNames = {"k", "v", "new_lengths"};

// What an append does to one row of the batch.
struct RowAppend {
  int64_t before, after;                      // tokens held
  int64_t quantized_before, quantized_after;  // of these, quantised
};

// The new tokens of one of K and V.
struct NewTokens {
  NewTokens(const at::Tensor& t)  // NOLINT: implicit
      : data(static_cast<const char*>(t.const_data_ptr())),
        batch_stride(t.stride(0)),
        head_stride(t.stride(1)),
        token_stride(t.stride(2)),
        element_size(static_cast<int64_t>(t.element_size())) {}
  const char* at(int64_t b, int64_t h, int64_t t) const {
    return data + (b * batch_stride + h * head_stride + t * token_stride) * element_size;
  }
  const char* data;
  int64_t batch_stride, head_stride, token_stride, element_size;
};

// Appends in two steps: encode (writes only where no reader looks yet: records past the quantised length, slots of
// tokens that are not held yet), then commit. An encode that fails leaves the cache as it was.
class Append {
 public:
  Append(const CacheView& cache, const at::Tensor& k, const at::Tensor& v, std::vector<RowAppend> rows)
      : cache_(cache), k_(k), v_(v), rows_(std::move(rows)) {
    const int64_t group = cache_.format.group_size;
    for (const RowAppend& row : rows_) {
      first_group_.push_back(groups_);
      groups_ += (row.quantized_after - row.quantized_before) / group;
    }
    first_group_.push_back(groups_);
  }

  // False if a scale or zero does not fit the format's float8 or float16.
  bool encode() {
    const int64_t heads = cache_.format.num_kv_heads;
    std::atomic<bool> fits{true};
    // Items run along one head's groups, so that a thread reads its head's tokens in order.
    at::parallel_for(0, groups_ * heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; item++) {
        if (!encode_item(item)) fits.store(false, std::memory_order_relaxed);
      }
    });
    return fits;
  }

  void commit() {
    const int64_t heads = cache_.format.num_kv_heads;
    at::parallel_for(0, cache_.batch * heads, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) store_exact(i / heads, i % heads);
    });
  }

 private:
  int64_t sink() const { return cache_.format.sink_length; }

  bool encode_item(int64_t item) {
    const int64_t heads = cache_.format.num_kv_heads, group = cache_.format.group_size;
    const auto row =
        std::upper_bound(first_group_.begin(), first_group_.end(), item / heads) - first_group_.begin() - 1;
    const int64_t b = row, in_row = item - first_group_[b] * heads;
    const int64_t row_groups = first_group_[b + 1] - first_group_[b];
    const int64_t h = in_row / row_groups;
    const RowAppend& r = rows_[b];
    const int64_t token = r.quantized_before + in_row % row_groups * group;  // counted from the end of the sink
    const int64_t known = std::max<int64_t>(r.before - sink(), 0);           // tokens before this one are in the window

    cpu::EncodeParams p{};
    p.format = &cache_.format;
    p.layout = &cache_.layout;
    p.type = cache_.type;
    p.record = cache_.record(b, h, token);
    p.k_order = cache_.order(b, h);
    if (token >= known) {
      const int64_t at = token + sink() - r.before;
      p.k = k_.at(b, h, at);
      p.v = v_.at(b, h, at);
      p.k_token_stride = k_.token_stride;
      p.v_token_stride = v_.token_stride;
    } else {
      // The group's slots are contiguous in the ring. New tokens that complete the group join them there first: those
      // slots hold no token that is still wanted, because the ring has room for a whole group beyond the residual.
      for (int64_t t = known; t < token + group; t++) store_window(b, h, t, t + sink() - r.before);
      const int64_t slot = token % cache_.capacity;
      p.k = cache_.window_k.at(b, h, slot);
      p.v = cache_.window_v.at(b, h, slot);
      p.k_token_stride = cache_.format.head_dim;
      p.v_token_stride = cache_.format.value_head_dim;
    }
    return cpu::kernels().encode(p);
  }

  void store_window(int64_t b, int64_t h, int64_t token, int64_t new_index) const {
    const int64_t slot = token % cache_.capacity;
    std::memcpy(cache_.window_k.at(b, h, slot), k_.at(b, h, new_index), cache_.window_k.token_bytes);
    std::memcpy(cache_.window_v.at(b, h, slot), v_.at(b, h, new_index), cache_.window_v.token_bytes);
  }

  void store_exact(int64_t b, int64_t h) const {
    const RowAppend& r = rows_[b];
    for (int64_t t = r.before; t < std::min(r.after, sink()); t++) {
      std::memcpy(cache_.sink_k.at(b, h, t), k_.at(b, h, t - r.before), cache_.sink_k.token_bytes);
      std::memcpy(cache_.sink_v.at(b, h, t), v_.at(b, h, t - r.before), cache_.sink_v.token_bytes);
    }
    for (int64_t t = std::max(r.quantized_after, r.before - sink()); t < r.after - sink(); t++) {
      store_window(b, h, t, t + sink() - r.before);
    }
  }

  const CacheView& cache_;
  NewTokens k_, v_;
  std::vector<RowAppend> rows_;
  std::vector<int64_t> first_group_;  // of each row, then the total
  int64_t groups_ = 0;
};

std::vector<RowAppend> plan_append(const CacheView& cache, int64_t tokens,
                                   const std::optional<at::Tensor>& new_lengths) {
  std::vector<RowAppend> rows(static_cast<size_t>(cache.batch));
  const at::Tensor counts = new_lengths ? new_lengths->contiguous() : at::Tensor();
  for (int64_t b = 0; b < cache.batch; b++) {
    int64_t count = tokens;
    if (new_lengths) {
      count = counts.const_data_ptr<int64_t>()[b];
      TORCH_CHECK_VALUE(count >= 0 && count <= tokens, "new_lengths[", b, "] must be 0 to the ", tokens,
                        " tokens of k, got ", count);
    }
    RowAppend& r = rows[b];
    r.before = cache.lengths[b];
    check_token_count(b, r.before, count);
    r.after = r.before + count;
    r.quantized_before = cache.quantized[b];
    // A truncated row may hold more quantised tokens than its length asks for; they stay as they are.
    r.quantized_after = std::max(r.quantized_before, quantized_count(cache.format, r.after));
    cache.check_pages(b, r.quantized_after);
    if (r.quantized_after > 0) cache.check_order(b);
  }
  return rows;
}

void cache_append_cpu(at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                      at::Tensor& quantized_lengths, at::Tensor& sink_k, at::Tensor& sink_v, at::Tensor& window_k,
                      at::Tensor& window_v, const at::Tensor& k, const at::Tensor& v, at::IntArrayRef format_ints,
                      const std::optional<at::Tensor>& new_lengths, std::optional<at::Tensor> overflow,
                      const std::optional<at::Tensor>& k_order) {
  const CacheTensors tensors =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(format_ints);
  const c10::SymInt batch = check_cache(tensors, format);
  check_new_tokens(kAppendNames, k, v, new_lengths, batch, format, window_k.scalar_type(), pool.device());
  if (overflow) check_overflow(*overflow, pool.device());
  check_append_overlap(tensors, k, v, new_lengths, overflow);
  const CacheView cache(tensors, format);
  std::vector<RowAppend> rows = plan_append(cache, k.size(2), new_lengths);
  // Named, so that a copy outlives the pointers into it.
  const at::Tensor k_rows = with_contiguous_channels(k), v_rows = with_contiguous_channels(v);
  Append append(cache, k_rows, v_rows, rows);
  if (!append.encode()) {
    TORCH_CHECK_VALUE(
        overflow, "k or v: the scale or the minimum of a group leaves the range of the format's scales (float16's is ",
        "+-65504, a float8 scale's 61440); use ", "scale_dtype=\"float32\" (or kivi::KVCache, which widens by itself)");
    overflow->mutable_data_ptr<int32_t>()[0] = 1;
    return;
  }
  append.commit();
  for (int64_t b = 0; b < cache.batch; b++) {
    lengths.mutable_data_ptr<int64_t>()[b] = rows[b].after;
    quantized_lengths.mutable_data_ptr<int64_t>()[b] = rows[b].quantized_after;
  }
}

// Dequantised tokens [first, last) of the quantised part (counted from the end of the sink) of one row and head.
void decode_range(const CacheView& cache, int64_t b, int64_t h, int64_t first, int64_t last, char* k, char* v,
                  bool stream) {
  const int64_t group = cache.format.group_size, size = element_bytes(cache.type);
  for (int64_t t = first; t < last;) {
    const int64_t in_group = t % group, count = std::min(group - in_group, last - t);
    cpu::DecodeParams p{};
    p.format = &cache.format;
    p.layout = &cache.layout;
    p.record = cache.record(b, h, t);
    p.first = in_group;
    p.count = count;
    p.k = k;
    p.v = v;
    p.k_token_stride = cache.format.head_dim;
    p.v_token_stride = cache.format.value_head_dim;
    p.type = cache.type;
    p.stream = stream;
    p.k_order = cache.order(b, h);
    cpu::kernels().decode(p);
    k += count * cache.format.head_dim * size;
    v += count * cache.format.value_head_dim * size;
    t += count;
  }
}

// All tokens [0, length) of one row and head; zeros past the row's own length.
void dequantize_row(const CacheView& cache, int64_t b, int64_t h, int64_t length, char* k, char* v, bool stream) {
  const size_t kb = cache.window_k.token_bytes, vb = cache.window_v.token_bytes;
  const int64_t n = std::min(length, cache.lengths[b]), sink = cache.format.sink_length, m = cache.quantized[b];
  const int64_t sinks = std::min(n, sink);
  if (sinks > 0) {
    std::memcpy(k, cache.sink_k.at(b, h, 0), static_cast<size_t>(sinks) * kb);
    std::memcpy(v, cache.sink_v.at(b, h, 0), static_cast<size_t>(sinks) * vb);
  }
  const auto at = [](char* base, int64_t token, size_t bytes) { return base + token * static_cast<int64_t>(bytes); };
  const int64_t quantised = std::min(m, std::max<int64_t>(n - sink, 0));
  decode_range(cache, b, h, 0, quantised, at(k, sink, kb), at(v, sink, vb), stream);
  for (int64_t t = m; t < n - sink; t++) {
    const int64_t slot = t % cache.capacity;
    std::memcpy(at(k, sink + t, kb), cache.window_k.at(b, h, slot), kb);
    std::memcpy(at(v, sink + t, vb), cache.window_v.at(b, h, slot), vb);
  }
  std::memset(at(k, n, kb), 0, static_cast<size_t>(length - n) * kb);
  std::memset(at(v, n, vb), 0, static_cast<size_t>(length - n) * vb);
}

std::tuple<at::Tensor, at::Tensor> cache_dequantize_cpu(const at::Tensor& pool, const at::Tensor& block_table,
                                                        const at::Tensor& lengths, const at::Tensor& quantized_lengths,
                                                        const at::Tensor& sink_k, const at::Tensor& sink_v,
                                                        const at::Tensor& window_k, const at::Tensor& window_v,
                                                        at::IntArrayRef format_ints, c10::SymInt sym_length,
                                                        const std::optional<at::Tensor>& k_order) {
  const CacheTensors tensors =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(format_ints);
  check_cache(tensors, format);
  const int64_t length = sym_length.expect_int();
  check_not_negative("length", length);
  const CacheView cache(tensors, format);
  const int64_t heads = format.num_kv_heads;
  at::Tensor k = at::empty({cache.batch, heads, length, format.head_dim}, window_k.options());
  at::Tensor v = at::empty({cache.batch, heads, length, format.value_head_dim}, window_k.options());
  // Without rows the length may be any: its bytes are not to be counted. Without tokens there is no memory to point
  // into.
  if (k.numel() == 0) return {k, v};
  char* const k_data = static_cast<char*>(k.mutable_data_ptr());
  char* const v_data = static_cast<char*>(v.mutable_data_ptr());
  const int64_t k_row = length * static_cast<int64_t>(cache.window_k.token_bytes);
  const int64_t v_row = length * static_cast<int64_t>(cache.window_v.token_bytes);
  const bool stream = cache.batch * heads * (k_row + v_row) >= cpu::kStreamBytes;
  at::parallel_for(0, cache.batch * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      dequantize_row(cache, i / heads, i % heads, length, k_data + i * k_row, v_data + i * v_row, stream);
    }
    if (stream) cpu::flush_streams();
  });
  return {k, v};
}

void cache_truncate_cpu(const at::Tensor& pool, const at::Tensor& block_table, at::Tensor& lengths,
                        at::Tensor& quantized_lengths, const at::Tensor& sink_k, const at::Tensor& sink_v,
                        at::Tensor& window_k, at::Tensor& window_v, at::IntArrayRef format_ints, int64_t length,
                        const std::optional<at::Tensor>& k_order) {
  const CacheTensors tensors =
      cache_tensors(pool, block_table, lengths, quantized_lengths, sink_k, sink_v, window_k, window_v, k_order);
  const Format format = format_from_ints(format_ints);
  check_cache(tensors, format);
  check_not_negative("length", length);
  check_truncate_overlap(tensors);
  const CacheView cache(tensors, format);
  const int64_t kept = std::max<int64_t>(length - format.sink_length, 0);  // counted from the end of the sink
  for (int64_t b = 0; b < cache.batch; b++) {
    if (cache.lengths[b] <= length) continue;
    const int64_t whole = kept / format.group_size * format.group_size;
    if (whole < cache.quantized[b]) {
      // The kept part of the group that is cut becomes exact: its dequantised values move into the window.
      const int64_t slot = whole % cache.capacity;
      for (int64_t h = 0; h < format.num_kv_heads; h++) {
        decode_range(cache, b, h, whole, kept, cache.window_k.at(b, h, slot), cache.window_v.at(b, h, slot),
                     /*stream=*/false);
      }
      quantized_lengths.mutable_data_ptr<int64_t>()[b] = whole;
    }
    lengths.mutable_data_ptr<int64_t>()[b] = length;
  }
}

void cache_copy_pages_cpu(at::Tensor& pool, const at::Tensor& source, const at::Tensor& target) {
  check_page_lists(pool, source, target);
  check_no_overlap({{"pool", pool}}, {{"source", source}, {"target", target}});
  const at::Tensor from = source.contiguous(), to = target.contiguous();
  const auto* s = from.const_data_ptr<int64_t>();
  const auto* t = to.const_data_ptr<int64_t>();
  const int64_t count = from.size(0), pages = pool.size(0), bytes = pool.size(1);
  std::unordered_set<int64_t> written;
  for (int64_t i = 0; i < count; i++) {
    TORCH_CHECK_INDEX(s[i] >= 0 && s[i] < pages, "source[", i, "] is ", s[i], ", but pool has ", pages, " pages");
    TORCH_CHECK_INDEX(t[i] >= 0 && t[i] < pages, "target[", i, "] is ", t[i], ", but pool has ", pages, " pages");
    TORCH_CHECK_VALUE(written.insert(t[i]).second, "target[", i, "] is ", t[i], ", which an earlier entry names too");
  }
  for (int64_t i = 0; i < count; i++) {
    TORCH_CHECK_VALUE(written.count(s[i]) == 0, "source[", i, "] is ", s[i], ", which target names too");
  }
  if (bytes == 0) return;
  auto* data = static_cast<uint8_t*>(pool.mutable_data_ptr());
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      std::memcpy(data + t[i] * bytes, data + s[i] * bytes, static_cast<size_t>(bytes));
    }
  });
}

at::Tensor cache_widen_cpu(const at::Tensor& pool, at::IntArrayRef format_ints) {
  const WidenCall call = widen_call(pool, format_ints);
  const int64_t old_bytes = record_layout(call.from).bytes, new_bytes = record_layout(call.to).bytes;
  const auto* old_records = static_cast<const uint8_t*>(call.pool.const_data_ptr());
  auto* new_records = static_cast<uint8_t*>(call.wide.mutable_data_ptr());
  at::parallel_for(0, call.records, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      cpu::widen_record(call.from, old_records + i * old_bytes, call.to, new_records + i * new_bytes);
    }
  });
  return call.wide;
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, CPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("cache_append", TORCH_FN(kivi::cache_append_cpu));
  m.impl("cache_dequantize", TORCH_FN(kivi::cache_dequantize_cpu));
  m.impl("cache_truncate", TORCH_FN(kivi::cache_truncate_cpu));
  m.impl("cache_copy_pages", TORCH_FN(kivi::cache_copy_pages_cpu));
  m.impl("cache_widen", TORCH_FN(kivi::cache_widen_cpu));
}
