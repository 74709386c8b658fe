// The saved form of a kivi::KVCache: what pickling stores and how it is checked when it comes back.
// (header, integers, tensors): integers are [version, precision is exact, batch or -1, scale type in use, checksum of
// everything else, F, F of the format as constructed (see cache_format), B lengths, B quantised lengths]; tensors, when
// tokens were ever seen: the records that hold tokens, [n, record_bytes], page by page and in a page head by head;
// block table over the pages, [B, max]; keys and values of the exact tokens, [Hkv, n, D] and [..., Dv], row by row,
// those of the sink before those of the window; with classes of key channels the orders and the sums of the squared
// queries. Last, also before any token, the order that set_key_order gave, if it did. So the saved form has the size of
// what is held: no half-filled page, no padding of shorter rows.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/cache_args.h"
#include "ops/cache_storage.h"
#include "ops/checksum.h"
#include "ops/options.h"

namespace kivi {

using Storage = CacheStorage;

namespace {

constexpr const char* kStateHeader = "kivi.KVCache";
constexpr int64_t kStateVersion = 3;
constexpr size_t kChecksumAt = 4, kFixedInts = 6;

// The exact tokens of a row: of the sink, and after it.
struct ExactTokens {
  int64_t sink, window;
};

ExactTokens exact_tokens(const Format& f, int64_t length, int64_t quantized) {
  const int64_t sink = std::min(f.sink_length, length);
  return {sink, length - sink - quantized};
}

// Copies the exact tokens of every row between a cache's sink and ring and an array that holds row after row.
void copy_exact(const Storage& s, const at::Tensor& sink, const at::Tensor& ring, const at::Tensor& straight,
                bool to_cache) {
  const int64_t capacity = ring.size(2);
  int64_t at = 0;
  const auto copy = [&](const at::Tensor& in_cache, int64_t count) {
    at::Tensor in_array = straight.narrow(1, at, count);
    at += count;
    if (to_cache) {
      in_cache.copy_(in_array);
    } else {
      in_array.copy_(in_cache);
    }
  };
  for (int64_t b = 0; b < s.batch; b++) {
    const ExactTokens row = exact_tokens(s.format, s.lengths[b], s.quantized[b]);
    copy(sink.select(0, b).narrow(1, 0, row.sink), row.sink);
    for (int64_t i = 0; i < row.window;) {
      const int64_t slot = (s.quantized[b] + i) % capacity, run = std::min(row.window - i, capacity - slot);
      copy(ring.select(0, b).narrow(1, slot, run), run);
      i += run;
    }
  }
}

// How many records of a head each page holds: as many as the row that fills it most. `table`: [B, width].
std::vector<int64_t> filled_records(const Format& f, const int32_t* table, int64_t width, int64_t pages,
                                    const std::vector<int64_t>& quantized) {
  std::vector<int64_t> filled(static_cast<size_t>(pages), 0);
  for (size_t b = 0; b < quantized.size(); b++) {
    for (int64_t i = 0; i < pages_for(quantized[b]); i++) {
      int64_t& page = filled[table[static_cast<int64_t>(b) * width + i]];
      page = std::max(page, std::min(kPageTokens, quantized[b] - i * kPageTokens) / f.group_size);
    }
  }
  return filled;
}

// Calls copy(offset in the pool, offset in an array without the unused records, bytes) for the records of every page
// and head.
template <typename Copy>
void for_each_run(const Format& f, const std::vector<int64_t>& filled, const std::vector<int64_t>& pages,
                  const Copy& copy) {
  const int64_t bytes = record_layout(f).bytes, head_bytes = kPageTokens / f.group_size * bytes;
  int64_t at = 0;
  for (size_t i = 0; i < filled.size(); i++) {
    for (int64_t h = 0; h < f.num_kv_heads; h++, at += filled[i] * bytes) {
      copy((pages[i] * f.num_kv_heads + h) * head_bytes, at, static_cast<size_t>(filled[i] * bytes));
    }
  }
}

// The records in use, with the block table over the pages renumbered in the order of their first use.
std::pair<at::Tensor, at::Tensor> pack_pages(const Storage& s) {
  std::vector<int64_t> used, number(static_cast<size_t>(s.pages()), -1);
  int64_t width = 0;
  for (int64_t b = 0; b < s.batch; b++) width = std::max(width, pages_for(s.quantized[b]));
  at::Tensor table = at::zeros({s.batch, width}, at::kInt);
  auto* entries = table.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < s.batch; b++) {
    for (int64_t i = 0; i < pages_for(s.quantized[b]); i++) {
      int64_t& page = number[s.table_row(b)[i]];
      if (page < 0) {
        page = static_cast<int64_t>(used.size());
        used.push_back(s.table_row(b)[i]);
      }
      entries[b * width + i] = static_cast<int32_t>(page);
    }
  }
  const std::vector<int64_t> filled =
      filled_records(s.format, entries, width, static_cast<int64_t>(used.size()), s.quantized);
  const int64_t count = std::accumulate(filled.begin(), filled.end(), int64_t{0}) * s.format.num_kv_heads;
  at::Tensor records = at::empty({count, record_layout(s.format).bytes}, at::kByte);
  const auto* from = s.tensors.pool.const_data_ptr<uint8_t>();
  auto* to = records.mutable_data_ptr<uint8_t>();
  for_each_run(s.format, filled, used, [=](int64_t in_pool, int64_t in_records, size_t bytes) {
    std::memcpy(to + in_records, from + in_pool, bytes);
  });
  return {records, table};
}

int64_t checksum(const std::vector<int64_t>& ints, const std::vector<at::Tensor>& tensors) {
  Checksum sum;
  for (size_t i = 0; i < ints.size(); i++) sum.add(i == kChecksumAt ? 0 : static_cast<uint64_t>(ints[i]));
  for (const at::Tensor& t : tensors) {
    const at::Tensor whole = t.contiguous();
    sum.add(static_cast<uint64_t>(whole.scalar_type()));
    for (const int64_t size : whole.sizes()) sum.add(static_cast<uint64_t>(size));
    sum.add(whole.const_data_ptr(), whole.nbytes());
  }
  return sum.value();
}

KVCache::State with_checksum(KVCache::State state) {
  auto& [header, ints, tensors] = state;
  ints[kChecksumAt] = checksum(ints, tensors);
  return state;
}

void check_checksum(const std::vector<int64_t>& ints, const std::vector<at::Tensor>& tensors) {
  const int64_t now = checksum(ints, tensors);
  TORCH_CHECK_VALUE(now == ints[kChecksumAt], "saved KVCache: the checksum is ", now, ", but ", ints[kChecksumAt],
                    " was saved: the file is damaged");
}

void check_state_tensor(const char* name, const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(t.defined() && t.scalar_type() == dtype && t.sizes() == sizes, "saved KVCache: ", name,
                    " should be ", dtype, " of sizes ", sizes, ", got ",
                    t.defined() ? toString(t.scalar_type()) : "nothing", " of sizes ",
                    t.defined() ? t.sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(t.device().is_cpu(), "saved KVCache: ", name, " is on ", t.device(), ", expected cpu");
}

// A row's order of the channels of each head: a whole one for a row that holds, or once held, quantised tokens, else -1
// throughout. Returns whether it is chosen.
bool check_saved_order(const at::Tensor& orders, int64_t row, int64_t quantized) {
  const int64_t heads = orders.size(1), channels = orders.size(2);
  const int16_t* const all = orders.const_data_ptr<int16_t>() + row * heads * channels;
  const bool chosen = quantized > 0 || all[0] >= 0;
  for (int64_t h = 0; h < heads; h++) {
    std::vector<bool> seen(static_cast<size_t>(channels), false);
    for (int64_t i = 0; i < channels; i++) {
      const int64_t channel = all[h * channels + i];
      const bool fits =
          chosen ? channel >= 0 && channel < channels && !seen[static_cast<size_t>(channel)] : channel == -1;
      TORCH_CHECK_VALUE(fits, "saved KVCache: k_order[", row, "][", h, "] has ", channel, " in place ", i,
                        ", expected ", chosen ? "each channel once" : "-1, as the row has no order");
      if (chosen) seen[static_cast<size_t>(channel)] = true;
    }
  }
  return chosen;
}

}  // namespace

KVCache::State KVCache::state() const {
  const PlainTensors guard;
  const Reading reading(*impl_);
  const Storage& s = impl_->current();
  if (s.started && !s.device().is_cpu()) return impl_->copy(at::kCPU)->state();
  std::vector<int64_t> ints = {kStateVersion, impl_->options.precision == "exact" ? 1 : 0, s.started ? s.batch : -1,
                               static_cast<int64_t>(s.format.scale_type), 0};
  const std::vector<int64_t> format = format_to_ints(impl_->format);
  ints.push_back(static_cast<int64_t>(format.size()));
  ints.insert(ints.end(), format.begin(), format.end());
  std::vector<at::Tensor> given;
  if (impl_->given_order.defined()) given = {impl_->given_order.clone()};
  if (!s.started) return with_checksum({kStateHeader, ints, given});
  ints.insert(ints.end(), s.lengths.begin(), s.lengths.end());
  ints.insert(ints.end(), s.quantized.begin(), s.quantized.end());
  const CacheTensors& t = s.tensors;
  int64_t exact = 0;
  for (int64_t b = 0; b < s.batch; b++) exact += s.lengths[b] - s.quantized[b];
  const at::Tensor exact_k = at::empty({s.format.num_kv_heads, exact, s.format.head_dim}, t.window_k.options());
  const at::Tensor exact_v = at::empty({s.format.num_kv_heads, exact, s.format.value_head_dim}, t.window_v.options());
  copy_exact(s, t.sink_k, t.window_k, exact_k, false);
  copy_exact(s, t.sink_v, t.window_v, exact_v, false);
  const auto [records, table] = pack_pages(s);
  std::vector<at::Tensor> orders;
  if (t.k_order.defined()) orders = {t.k_order.clone(), s.query_squares.clone()};
  KVCache::State whole = {kStateHeader, ints, {records, table, exact_k, exact_v}};
  auto& all = std::get<2>(whole);
  all.insert(all.end(), orders.begin(), orders.end());
  all.insert(all.end(), given.begin(), given.end());
  return with_checksum(whole);
}

c10::intrusive_ptr<KVCache> KVCache::from_state(const State& state) {
  const NoModes no_modes;
  const auto& [header, ints, given] = state;
  TORCH_CHECK_VALUE(header == kStateHeader, "saved KVCache: the header is \"", header, "\", expected \"", kStateHeader,
                    "\"");
  TORCH_CHECK_VALUE(!ints.empty() && ints[0] == kStateVersion, "saved KVCache: the version is ",
                    ints.empty() ? 0 : ints[0], ", but this library reads version ", kStateVersion);
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& t : given) {
    check_tensor("saved KVCache: a tensor", t);
    tensors.push_back(t.resolve_neg());
  }
  TORCH_CHECK_VALUE(ints.size() >= kFixedInts, "saved KVCache: ", ints.size(), " integers, expected at least ",
                    kFixedInts);
  TORCH_CHECK_VALUE(ints[1] == 0 || ints[1] == 1, "saved KVCache: precision is ", ints[1], ", expected 0 or 1");
  const int64_t format_size = ints[kFixedInts - 1];
  TORCH_CHECK_VALUE(format_size >= 0 && static_cast<size_t>(format_size) <= ints.size() - kFixedInts,
                    "saved KVCache: a format of ", format_size, " integers, but only ", ints.size() - kFixedInts,
                    " follow");
  const size_t fixed_ints = kFixedInts + static_cast<size_t>(format_size);
  Format format = format_from_ints(at::IntArrayRef(ints).slice(kFixedInts, static_cast<size_t>(format_size)));
  TORCH_CHECK_VALUE(format.scale_type == narrow(format.scale_type),
                    "saved KVCache: the format was constructed as widened");
  auto cache = c10::make_intrusive<KVCache>(options_of(format, ints[1] == 1 ? "exact" : "fast"));
  const int64_t batch = ints[2];
  const bool classes = format.num_key_classes > 0;
  const size_t expected = batch == -1 ? 0 : classes ? 6 : 4;
  const bool order_given = classes && tensors.size() == expected + 1;
  if (order_given) {
    check_state_tensor("the given order", tensors.back(), at::kShort, {format.num_kv_heads, format.head_dim});
    cache->set_key_order(tensors.back().to(at::kLong));
  }
  if (batch == -1) {
    TORCH_CHECK_VALUE((tensors.empty() || order_given) && ints.size() == fixed_ints,
                      "saved KVCache: an empty cache with contents");
    check_checksum(ints, tensors);
    return cache;
  }
  TORCH_CHECK_VALUE(
      batch >= 0 && batch < (int64_t{1} << 31) && ints.size() == fixed_ints + 2 * static_cast<size_t>(batch),
      "saved KVCache: batch size ", batch, " with ", ints.size(), " integers");
  TORCH_CHECK_VALUE(tensors.size() == expected || order_given, "saved KVCache: ", tensors.size(), " tensors, expected ",
                    expected);
  const ScaleType wide = widened(format.scale_type);
  TORCH_CHECK_VALUE(ints[3] == static_cast<int64_t>(format.scale_type) || ints[3] == static_cast<int64_t>(wide),
                    "saved KVCache: scale type ", ints[3], " in a cache of scale type ",
                    static_cast<int64_t>(format.scale_type));
  if (ints[3] == static_cast<int64_t>(wide)) format.scale_type = wide;

  const auto first = ints.begin() + static_cast<int64_t>(fixed_ints);
  std::vector<int64_t> lengths(first, first + batch);
  std::vector<int64_t> quantized(first + batch, ints.end());
  int64_t exact = 0, width = 0;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t n = lengths[b], m = quantized[b];
    TORCH_CHECK_VALUE(n >= 0 && n < (int64_t{1} << 40) && m >= 0 && m % format.group_size == 0 &&
                          (m == 0 || m <= n - format.sink_length) &&
                          n - format.sink_length - m < format.residual_length + format.group_size,
                      "saved KVCache: row ", b, " has length ", n, " and quantised length ", m);
    exact += n - m;
    width = std::max(width, pages_for(m));
  }
  const at::Tensor& window = tensors[2];
  const auto dtype = window.defined() ? window.scalar_type() : at::kFloat;
  TORCH_CHECK_VALUE(is_supported_float(dtype), "saved KVCache: exact tokens of ", dtype);
  const int64_t heads = format.num_kv_heads;
  check_state_tensor("block_table", tensors[1], at::kInt, {batch, width});
  check_state_tensor("exact_k", tensors[2], dtype, {heads, exact, format.head_dim});
  check_state_tensor("exact_v", tensors[3], dtype, {heads, exact, format.value_head_dim});
  if (classes) {
    check_state_tensor("k_order", tensors[4], at::kShort, {batch, heads, format.head_dim});
    check_state_tensor("query_squares", tensors[5], at::kFloat, {batch, heads, format.head_dim});
  }
  // All of it is checked before memory is taken for what it claims to be.
  const at::Tensor table = tensors[1].contiguous();
  const auto* entries = table.const_data_ptr<int32_t>();
  int64_t pages = 0;
  for (int64_t b = 0; b < batch; b++) {
    for (int64_t i = 0; i < pages_for(quantized[b]); i++) {
      // Pages are numbered by their first use, so that none is left out and few can be made of much.
      const int32_t page = entries[b * width + i];
      TORCH_CHECK_VALUE(page >= 0 && page <= pages, "saved KVCache: block_table[", b, "][", i, "] is ", page,
                        ", expected 0 to ", pages);
      pages = std::max<int64_t>(pages, page + 1);
    }
  }
  const std::vector<int64_t> filled = filled_records(format, entries, width, pages, quantized);
  const int64_t count = std::accumulate(filled.begin(), filled.end(), int64_t{0}) * heads;
  check_state_tensor("records", tensors[0], at::kByte, {count, record_layout(format).bytes});
  std::vector<uint8_t> ordered;
  if (classes) {
    const at::Tensor orders = tensors[4].contiguous();
    for (int64_t b = 0; b < batch; b++) ordered.push_back(check_saved_order(orders, b, quantized[b]) ? 1 : 0);
    TORCH_CHECK_VALUE(tensors[5].ge(0).all().item<bool>(), "saved KVCache: query_squares has a number below 0, or NaN");
  }
  check_checksum(ints, tensors);

  const PlainTensors guard;
  Storage s = start_storage(format, batch, at::TensorOptions().dtype(dtype));
  s.lengths = lengths;
  s.quantized = quantized;
  s.page_users.assign(static_cast<size_t>(pages), 0);
  s.tensors.pool = at::zeros({pages, page_bytes(format).value}, at::kByte);
  std::vector<int64_t> in_order(static_cast<size_t>(pages));
  std::iota(in_order.begin(), in_order.end(), 0);
  const at::Tensor records = tensors[0].contiguous();
  const auto* from = records.const_data_ptr<uint8_t>();
  auto* to = s.tensors.pool.mutable_data_ptr<uint8_t>();
  for_each_run(format, filled, in_order, [=](int64_t in_pool, int64_t in_records, size_t bytes) {
    std::memcpy(to + in_pool, from + in_records, bytes);
  });
  s.tensors.block_table = table.clone();
  if (s.host_table.defined()) s.host_table = table.clone();
  for (int64_t b = 0; b < batch; b++) s.row_pages[b] = pages_for(quantized[b]);
  recount_pages(s);
  if (classes) {
    s.tensors.k_order.copy_(tensors[4]);
    s.query_squares.copy_(tensors[5]);
    s.ordered = ordered;
  }
  copy_exact(s, s.tensors.sink_k, s.tensors.window_k, tensors[2], true);
  copy_exact(s, s.tensors.sink_v, s.tensors.window_v, tensors[3], true);
  std::copy(s.lengths.begin(), s.lengths.end(), s.tensors.lengths.mutable_data_ptr<int64_t>());
  std::copy(s.quantized.begin(), s.quantized.end(), s.tensors.quantized_lengths.mutable_data_ptr<int64_t>());
  cache->impl_->storage = std::move(s);
  return cache;
}

}  // namespace kivi
