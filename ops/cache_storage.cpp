// The pages of a kivi::KVCache; see cache_storage.h.
#include "ops/cache_storage.h"

#include <algorithm>
#include <limits>

#include "ops/cache_args.h"

namespace kivi {

using Storage = CacheStorage;

namespace {

// Whether the block table needs a copy on the host. The tests of the emulator have one for tensors on the CPU too, so
// that what is done on CUDA is done there.
bool mirrors_table(const at::Device& device) {
#if defined(KIVI_CUDA_EMULATED)
  (void)device;
  return true;
#else
  return !device.is_cpu();
#endif
}

void copy_to_host(const at::Tensor& t, std::vector<int64_t>& values) {
  const at::Tensor host = t.to(at::kCPU);
  values.assign(host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
}

}  // namespace

// An empty cache for `batch` rows.
Storage start_storage(const Format& format, int64_t batch, const at::TensorOptions& like) {
  const PlainTensors guard;
  const auto bytes = at::TensorOptions().device(like.device());
  const auto exact = bytes.dtype(like.dtype());
  Storage s;
  s.started = true;
  s.set_format(format);
  s.batch = batch;
  s.lengths.assign(static_cast<size_t>(batch), 0);
  s.quantized = s.lengths;
  s.row_pages = s.lengths;
  const int64_t heads = format.num_kv_heads, slots = window_capacity(format);
  CacheTensors& t = s.tensors;
  t.pool = at::empty({0, page_bytes(format).value}, bytes.dtype(at::kByte));
  t.block_table = at::zeros({batch, 0}, bytes.dtype(at::kInt));
  if (mirrors_table(like.device())) s.host_table = at::zeros({batch, 0}, at::kInt);
  t.lengths = at::zeros({batch}, bytes.dtype(at::kLong));
  t.quantized_lengths = at::zeros({batch}, bytes.dtype(at::kLong));
  t.sink_k = at::zeros({batch, heads, format.sink_length, format.head_dim}, exact);
  t.sink_v = at::zeros({batch, heads, format.sink_length, format.value_head_dim}, exact);
  t.window_k = at::zeros({batch, heads, slots, format.head_dim}, exact);
  t.window_v = at::zeros({batch, heads, slots, format.value_head_dim}, exact);
  s.overflow = at::zeros({1}, bytes.dtype(at::kInt));
  if (format.num_key_classes > 0) {
    t.k_order = at::full({batch, heads, format.head_dim}, -1, bytes.dtype(at::kShort));
    s.query_squares = at::zeros({batch, heads, format.head_dim}, bytes.dtype(at::kFloat));
    s.ordered.assign(static_cast<size_t>(batch), 0);
  }
  return s;
}

void upload_table(Storage& s) {
  if (!s.host_table.defined()) return;
  const PlainTensors guard;
  at::Tensor& table = s.tensors.block_table;
  if (table.sizes() != s.host_table.sizes()) table = at::empty(s.host_table.sizes(), table.options());
  table.copy_(s.host_table, /*non_blocking=*/true);
}

void download_lengths(Storage& s) {
  copy_to_host(s.tensors.lengths, s.lengths);
  copy_to_host(s.tensors.quantized_lengths, s.quantized);
}

void move_tensors(Storage& s, at::Device device) {
  const PlainTensors guard;
  const at::Tensor table = s.table().clone();
  for (at::Tensor* part : s.all_tensors()) *part = part->to(device, /*non_blocking=*/false, /*copy=*/true);
  s.host_table = mirrors_table(device) ? table : at::Tensor();
  s.captured = false;
}

// Room for `count` more pages in the pool. Grows by a quarter at least, so that a token is copied a few times in all
// and never per step; the first call (a prefill) gets what it asks for.
void grow_pool(Storage& s, int64_t count) {
  const int64_t missing = count - static_cast<int64_t>(s.free_pages.size());
  if (missing <= 0) return;
  const int64_t old_pages = s.pages();
  const int64_t new_pages = old_pages + std::max(missing, old_pages / 4);
  TORCH_CHECK(new_pages <= std::numeric_limits<int32_t>::max(), "the cache would need ", new_pages, " pages");
  const PlainTensors guard;
  at::Tensor pool = at::empty({new_pages, s.tensors.pool.size(1)}, s.tensors.pool.options());
  if (old_pages > 0) pool.narrow(0, 0, old_pages).copy_(s.tensors.pool);
  s.free_pages.reserve(static_cast<size_t>(new_pages));
  s.page_users.reserve(static_cast<size_t>(new_pages));
  s.tensors.pool = pool;
  s.page_users.resize(static_cast<size_t>(new_pages), 0);
  for (int64_t i = new_pages - 1; i >= old_pages; i--) s.free_pages.push_back(static_cast<int32_t>(i));
}

void grow_table(Storage& s, int64_t width) {
  const int64_t old_width = s.max_pages();
  if (width <= old_width) return;
  const PlainTensors guard;
  at::Tensor table = at::zeros({s.batch, std::max(width, old_width + old_width / 2)}, at::kInt);
  if (old_width > 0) table.narrow(1, 0, old_width).copy_(s.table());
  (s.host_table.defined() ? s.host_table : s.tensors.block_table) = table;
}

namespace {

int32_t take_page(Storage& s) {
  const int32_t page = s.free_pages.back();
  s.free_pages.pop_back();
  s.page_users[page] = 1;
  return page;
}

void drop_page(Storage& s, int32_t page) {
  if (--s.page_users[page] == 0) s.free_pages.push_back(page);
}

// A page in a row's part of the table.
struct Entry {
  int64_t row, index;
};

}  // namespace

void make_room(Storage& s, const std::vector<int64_t>& after) {
  int64_t wanted = 0, width = 0;
  bool changed = false;       // the table
  std::vector<Entry> shared;  // pages that a row will write into although others use them
  for (int64_t b = 0; b < s.batch; b++) {
    const int64_t need = pages_for(after[b]);
    changed |= need > s.row_pages[b];
    wanted += std::max<int64_t>(need - s.row_pages[b], 0);
    width = std::max(width, need);
    if (after[b] == s.quantized[b]) continue;
    for (int64_t i = s.quantized[b] / kPageTokens; i < std::min(need, s.row_pages[b]); i++) {
      // The last of the rows that write into a page may keep it.
      const int32_t page = s.table_row(b)[i];
      const auto copies = std::count_if(shared.begin(), shared.end(),
                                        [&](const Entry& e) { return s.table_row(e.row)[e.index] == page; });
      if (s.page_users[page] - copies > 1) shared.push_back({b, i});
    }
  }
  if (!changed && shared.empty()) return;
  grow_pool(s, wanted + static_cast<int64_t>(shared.size()));
  grow_table(s, width);
  if (!shared.empty()) {
    std::vector<int64_t> source, target;
    for (const Entry& e : shared) {
      source.push_back(s.table_row(e.row)[e.index]);
      target.push_back(s.free_pages[s.free_pages.size() - 1 - target.size()]);
    }
    const auto options = at::TensorOptions().dtype(at::kLong);
    cache_copy_pages(s.tensors.pool, at::tensor(source, options).to(s.device()),
                     at::tensor(target, options).to(s.device()));
    const std::vector<int32_t> copies(target.begin(), target.end());
    s.free_pages.resize(s.free_pages.size() - copies.size());
    for (size_t i = 0; i < copies.size(); i++) {
      int32_t& entry = s.table_row(shared[i].row)[shared[i].index];
      drop_page(s, entry);
      entry = copies[i];
      s.page_users[entry] = 1;
    }
  }
  for (int64_t b = 0; b < s.batch; b++) {
    for (; s.row_pages[b] < pages_for(after[b]); s.row_pages[b]++) s.table_row(b)[s.row_pages[b]] = take_page(s);
  }
  upload_table(s);
}

void drop_unused_pages(Storage& s, int64_t b) {
  const int64_t kept = std::max(pages_for(s.quantized[b]), s.reserved_pages);
  for (; s.row_pages[b] > kept; s.row_pages[b]--) drop_page(s, s.table_row(b)[s.row_pages[b] - 1]);
}

void recount_pages(Storage& s) {
  std::fill(s.page_users.begin(), s.page_users.end(), 0);
  for (int64_t b = 0; b < s.batch; b++) {
    for (int64_t i = 0; i < s.row_pages[b]; i++) s.page_users[s.table_row(b)[i]]++;
  }
  s.free_pages.clear();
  s.free_pages.reserve(s.page_users.size());
  for (int64_t p = s.pages() - 1; p >= 0; p--) {
    if (s.page_users[p] == 0) s.free_pages.push_back(static_cast<int32_t>(p));
  }
}

}  // namespace kivi
