// What a kivi::KVCache holds, and the bookkeeping of its pages. Invariant between calls: the host copies of lengths and
// block table equal the tensors; row b names pages block_table[b][0 .. row_pages[b]), which cover its quantised tokens;
// page_users counts the rows that name a page, free_pages lists those that none names. A page with more than one user
// is never written. Whatever may throw comes before the first visible change.
//
// On CUDA the tensors are on the device and the host copies spare every step a wait for it. Only where appends were
// captured in a graph do lengths move without the host: from then on they are fetched whenever the host needs them.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "kivi/cache.h"
#include "kivi/ops.h"
#include "ops/cache_args.h"

namespace kivi {

// Buffers must stay writable whatever mode they were made in, and never join a graph.
struct PlainTensors {
  c10::InferenceMode no_inference{false};
  at::NoGradGuard no_grad;
};

// The class computes with real tensors, whatever modes are active (fake tensors, functorch, functionalisation, dispatch
// modes): the wrappers that they make would stay in the cache. So its own calls are not seen by such modes.
struct NoModes {
  c10::impl::ExcludeDispatchKeyGuard none{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::PreDispatch, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchBatchedDecomposition, c10::DispatchKey::FuncTorchVmapMode,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

// Everything that changes. A copy shares the tensors.
struct CacheStorage {
  bool started = false;
  Format format;
  std::vector<int64_t> format_ints;
  CacheTensors tensors;
  at::Tensor overflow;  // int32 [1]
  // With classes of key channels: the sum of squares of the queries that each row has seen, float [B, Hkv, D]; and
  // whether its order (tensors.k_order) is chosen.
  at::Tensor query_squares;
  std::vector<uint8_t> ordered;  // [B]
  int64_t batch = 0;
  at::Tensor host_table;                    // a copy of tensors.block_table on the CPU, where that is on another device
  bool captured = false;                    // an append was captured in a graph
  std::vector<int64_t> lengths, quantized;  // [B]
  std::vector<int64_t> row_pages;           // [B]
  int64_t reserved_pages = 0;               // rows keep as many when tokens go
  std::vector<int32_t> page_users;          // [pages]
  std::vector<int32_t> free_pages;

  // All tensors that it holds.
  std::vector<at::Tensor*> all_tensors() {
    std::vector<at::Tensor*> all = row_tensors();
    all.insert(all.end(), {&tensors.pool, &overflow});
    return all;
  }
  std::vector<at::Tensor*> row_tensors() {  // [B, ...]
    CacheTensors& t = tensors;
    std::vector<at::Tensor*> rows = {&t.block_table, &t.lengths,  &t.quantized_lengths, &t.sink_k,
                                     &t.sink_v,      &t.window_k, &t.window_v};
    if (t.k_order.defined()) rows.insert(rows.end(), {&t.k_order, &query_squares});
    return rows;
  }

  // The block table as the host sees it. After a change: upload_table.
  const at::Tensor& table() const { return host_table.defined() ? host_table : tensors.block_table; }
  int64_t max_pages() const { return table().size(1); }
  int32_t* table_row(int64_t b) const { return table().mutable_data_ptr<int32_t>() + b * max_pages(); }
  at::Device device() const { return tensors.pool.device(); }
  int64_t longest() const { return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end()); }
  int64_t pages() const { return static_cast<int64_t>(page_users.size()); }

  void set_format(const Format& f) {
    format = f;
    format_ints = format_to_ints(f);
  }
};

constexpr int64_t pages_for(int64_t quantized_tokens) { return ceil_div(quantized_tokens, kPageTokens); }

// The classes of key channels (cache_order.cpp). What queries [B, Hq, T, D] say about rows whose order is not chosen.
void note_queries(CacheStorage& s, const at::Tensor& q, const std::vector<int64_t>& counts);
// Chooses the orders of the rows that will hold after_quantized[b] quantised tokens once k was appended, and did not
// have one. `given`: [Hkv, D], or undefined.
void choose_orders(CacheStorage& s, const at::Tensor& k, const std::vector<int64_t>& after_quantized,
                   const at::Tensor& given);
// Whether the order of some row is still to be chosen.
bool has_unordered_rows(const CacheStorage& s);
// A copy in which orders may be chosen, and pages taken, without the original seeing it: for a call that may yet fail.
CacheStorage with_own_orders(const CacheStorage& s);
// Whether each row [..., D] names every channel once.
bool is_key_order(const at::Tensor& order);

// An empty cache for `batch` rows, with the dtype and device of `like`.
CacheStorage start_storage(const Format& format, int64_t batch, const at::TensorOptions& like);
// Brings the block table of the device up to date. Does not wait for the device.
void upload_table(CacheStorage& s);
// Fetches the lengths from the device. Waits for it.
void download_lengths(CacheStorage& s);
// Copies of all tensors on `device`.
void move_tensors(CacheStorage& s, at::Device device);
// Room for `count` more pages in the pool, for `width` pages a row in the table.
void grow_pool(CacheStorage& s, int64_t count);
void grow_table(CacheStorage& s, int64_t width);
// Gives every row the pages for `after[b]` quantised tokens, and pages of its own where it will write into shared ones.
void make_room(CacheStorage& s, const std::vector<int64_t>& after);
// Gives back the pages past the quantised tokens of row b.
void drop_unused_pages(CacheStorage& s, int64_t b);
// Counts the users of every page anew, and lists the free ones.
void recount_pages(CacheStorage& s);

struct KVCache::Impl {
  // Held by every public function, through Reading or Writing; functions of Impl need it held. Whoever wants it queues
  // at the turnstile, so that a writer waits for the readers that are there and not for those that come.
  mutable std::shared_mutex mutex;
  mutable std::mutex turnstile;
  CacheOptions options;
  Format format;  // as constructed
  // Through `current` where lengths are read.
  mutable CacheStorage storage;
  at::Tensor given_order;  // int16 [Hkv, D], for rows that have none

  // The storage, with the lengths of the device where a graph may have moved them.
  CacheStorage& current() const {
    if (storage.captured) download_lengths(storage);
    return storage;
  }
  void check_append(const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths) const;
  // q: the queries of these tokens, where they are known.
  void append(const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths,
              const at::Tensor& q = {});
  std::tuple<at::Tensor, at::Tensor> attend(const at::Tensor& q, const AttentionOptions& o) const;
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& o,
                     const std::optional<at::Tensor>& lengths);
  void truncate(int64_t n);
  void select(const char* name, const at::Tensor& rows);
  c10::intrusive_ptr<KVCache> copy(at::Device device) const;
};

class Writing {
 public:
  explicit Writing(const KVCache::Impl& impl) {
    const std::lock_guard queue(impl.turnstile);
    alone_ = std::unique_lock(impl.mutex);
  }

 private:
  NoModes no_modes_;
  std::unique_lock<std::shared_mutex> alone_;
};

class Reading {
 public:
  explicit Reading(const KVCache::Impl& impl) {
    const std::lock_guard queue(impl.turnstile);
    shared_ = std::shared_lock(impl.mutex);
    if (!impl.storage.captured) return;
    // Reading fetches the lengths that a graph has moved, and so writes.
    shared_.unlock();
    alone_ = std::unique_lock(impl.mutex);
  }

 private:
  NoModes no_modes_;
  std::shared_lock<std::shared_mutex> shared_;
  std::unique_lock<std::shared_mutex> alone_;
};

}  // namespace kivi
