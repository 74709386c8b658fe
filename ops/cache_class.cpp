// kivi::KVCache: checks, and calls of the operators on the tensors that it holds. The pages are kept in
// cache_storage.cpp, the saved form in cache_state.cpp.
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kivi/cache.h"
#include "ops/cache_args.h"
#include "ops/cache_storage.h"
#include "ops/cuda_library.h"
#include "ops/options.h"
#include "ops/registration.h"

namespace kivi {

using Storage = CacheStorage;

namespace {

std::vector<int64_t> counts_of(const std::optional<at::Tensor>& lengths, int64_t batch, int64_t tokens) {
  if (!lengths) return std::vector<int64_t>(static_cast<size_t>(batch), tokens);
  const at::Tensor host = lengths->to(at::kCPU).contiguous();
  const int64_t* data = host.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; b++) {
    TORCH_CHECK_VALUE(data[b] >= 0 && data[b] <= tokens, "lengths[", b, "] must be 0 to the ", tokens,
                      " tokens of k, got ", data[b]);
  }
  return {data, data + batch};
}

CacheAttentionOptions op_options(const AttentionOptions& o, const std::string& precision) {
  CacheAttentionOptions r;
  r.attn_mask = o.attn_mask;
  r.is_causal = o.is_causal;
  r.scale = o.scale;
  r.softcap = o.softcap;
  r.window = o.window;
  r.sinks = o.sinks;
  r.alibi_slopes = o.alibi_slopes;
  r.precision = precision;
  return r;
}

// Whether torch's own attention over the new tokens alone says the same.
bool is_plain(const AttentionOptions& o) {
  return !o.attn_mask && !o.sinks && !o.alibi_slopes && o.softcap == 0 && o.window == 0;
}

// Whether torch's own attention keeps from a query what the query does not see. It multiplies the values behind the
// causal mask by weights of 0, so that a NaN or Inf among them would reach every row.
bool hides_the_future(const at::Tensor& v, const AttentionOptions& o) {
  if (!o.is_causal || v.size(2) == 1) return true;
  const auto [least, greatest] = at::aminmax(v.detach());
  return std::isfinite(least.item<float>()) && std::isfinite(greatest.item<float>());
}

// SDPA of [B, Hq, T, D] over [B, Hkv, T, D]: the heads of a group become a batch of their own, so that keys and values
// are expanded as views and never copied.
at::Tensor prefill_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& o) {
  const int64_t batch = q.size(0), kv_heads = k.size(1), group = q.size(1) / kv_heads, rows = q.size(2);
  if (group == 1) return at::scaled_dot_product_attention(q, k, v, std::nullopt, 0.0, o.is_causal, o.scale);
  const auto fold = [&](const at::Tensor& t) {
    return t.flatten(0, 1).unsqueeze(1).expand({batch * kv_heads, group, t.size(2), t.size(3)});
  };
  const at::Tensor out = at::scaled_dot_product_attention(q.reshape({batch * kv_heads, group, rows, q.size(3)}),
                                                          fold(k), fold(v), std::nullopt, 0.0, o.is_causal, o.scale);
  return out.reshape({batch, kv_heads * group, rows, v.size(3)});
}

void check_supported_device(const char* name, const at::Tensor& t) {
  const at::Device device = t.device();
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), name, " is on ", device, "; caches are on the CPU or on CUDA");
  TORCH_CHECK(device.is_cpu() || has_cuda_operators(), name, " is on ", device,
              ", but this build of Kivi has no CUDA kernels; configure it with -DKIVI_WITH_CUDA=ON");
}

// Whether the call is being captured in a CUDA graph: then nothing may be asked of the device. `first`: of the call's
// tensors, for a cache that has none yet.
bool captures(const Storage& s, const at::Tensor& first) {
  if (s.started && !s.host_table.defined()) return false;
  const bool capturing = kivi::is_capturing(s.started ? s.tensors.lengths : first);
  TORCH_CHECK(s.started || !capturing,
              "the first tokens of a cache cannot be captured in a graph; append them, and call ",
              "reserve, before the capture");
  return capturing;
}

// `lengths` on the device of the cache, where the operators want them.
std::optional<at::Tensor> lengths_on(at::Device device, const std::optional<at::Tensor>& lengths, bool capturing) {
  if (!lengths) return std::nullopt;
  TORCH_CHECK(!capturing || lengths->device() == device, "lengths is on ", lengths->device(),
              ", but in a graph that is captured they must be on ", device, " as the cache");
  return lengths->to(device);
}

// Whether a scale or zero of these numbers may leave the range of the format's scales. Numbers of float16 do not with a
// scale for 2 bits or more, unless they are added up first.
bool may_overflow(const Format& f, at::ScalarType type) {
  if (widened(f.scale_type) == f.scale_type) return false;
  return type != at::kHalf || f.scale_type == ScaleType::kFloat8 || f.v_rotated || f.v_symmetric || f.k_bits == 1 ||
         f.v_bits == 1;
}

// Appends to the tensors; `quantizes`: some group leaves the window. Widens the scales where they do not suffice, which
// on CUDA means to wait for the device: a single token is appended without that, and keeps the scales that there are.
void append_tokens(Storage& s, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths,
                   bool quantizes) {
  const at::NoGradGuard no_grad;
  const bool waits = !s.host_table.defined() || (quantizes && k.size(2) > 1 && may_overflow(s.format, k.scalar_type()));
  if (!waits) return cache_append(s.tensors, k, v, s.format_ints, lengths);
  const bool on_host = s.overflow.device().is_cpu();
  // Before each use: a call that was interrupted may have left it set.
  on_host ? void(*s.overflow.mutable_data_ptr<int32_t>() = 0) : void(s.overflow.zero_());
  cache_append(s.tensors, k, v, s.format_ints, lengths, s.overflow);
  const bool overflow = on_host ? *s.overflow.const_data_ptr<int32_t>() != 0 : s.overflow.item<int32_t>() != 0;
  if (!overflow) return;
  // A group left the range of the scales: from now on they are stored as float32. Nothing was appended yet, and until
  // it is nothing is changed.
  Format wide = s.format;
  wide.scale_type = widened(wide.scale_type);
  std::vector<int64_t> wide_ints = format_to_ints(wide);
  CacheTensors tensors = s.tensors;
  tensors.pool = cache_widen(s.tensors.pool, s.format_ints);
  cache_append(tensors, k, v, wide_ints, lengths);
  s.tensors = std::move(tensors);
  s.format = wide;
  s.format_ints = std::move(wide_ints);
}

// Appends while a graph is captured: how long rows are when it is replayed is not known now, so rows must have their
// pages (reserve) and orders already.
void append_captured(Storage& s, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths) {
  TORCH_CHECK(!has_unordered_rows(s),
              "the classes of key channels are not chosen yet, which a graph cannot do; append a prompt of more than ",
              s.format.sink_length + s.format.residual_length, " tokens before the capture");
  const at::NoGradGuard no_grad;
  s.captured = true;
  cache_append(s.tensors, k, v, s.format_ints, lengths);
}

// What every row holds once it got counts[b] tokens more.
struct AfterAppend {
  AfterAppend(const Storage& s, const std::vector<int64_t>& counts) : lengths(s.lengths), quantized(s.quantized) {
    for (int64_t b = 0; b < s.batch; b++) {
      check_token_count(b, lengths[b], counts[b]);
      lengths[b] += counts[b];
      quantized[b] = std::max(quantized[b], quantized_count(s.format, lengths[b]));
    }
  }
  std::vector<int64_t> lengths, quantized;
};

// `lengths` on the device of the cache. Needs make_room for these tokens.
void append_to(Storage& s, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths,
               AfterAppend after, const at::Tensor& given_order) {
  choose_orders(s, k, after.quantized, given_order);
  append_tokens(s, k, v, lengths, after.quantized != s.quantized);
  s.lengths = std::move(after.lengths);
  s.quantized = std::move(after.quantized);
}

// Attention over what a cache holds and, where given, over new tokens. The mask's width is checked here for CUDA, where
// the operator cannot know how long the longest row is; the storage's lengths must be up to date.
std::tuple<at::Tensor, at::Tensor> attend_storage(const Storage& s, const at::Tensor& q, const AttentionOptions& o,
                                                  const std::string& precision,
                                                  const std::optional<at::Tensor>& k = std::nullopt,
                                                  const std::optional<at::Tensor>& v = std::nullopt,
                                                  const std::optional<at::Tensor>& lengths = std::nullopt) {
  if (o.attn_mask) check_tensor("attn_mask", *o.attn_mask);
  if (o.sinks) check_tensor("sinks", *o.sinks);
  if (o.alibi_slopes) check_tensor("alibi_slopes", *o.alibi_slopes);
  if (o.attn_mask && !lengths && s.host_table.defined() && q.dim() == 4 && !captures(s, q)) {
    expand_mask(*o.attn_mask, s.batch, q.size(1), q.size(2), s.longest() + (k ? k->size(2) : 0));
  }
  return cache_attention(q, s.tensors, s.format_ints, k, v, lengths, op_options(o, precision));
}

// No key to see: the output is 0 and the log-sum-exp that of the sink logit, if there is one.
std::tuple<at::Tensor, at::Tensor> attend_nothing(const Format& format, const std::string& precision,
                                                  const at::Tensor& q, const AttentionOptions& o) {
  check_supported_device("q", q);
  check_floating("q", q);
  TORCH_CHECK_VALUE(q.dim() == 4, "q must be [B, Hq, Lq, D] (4 dimensions), got ", q.dim(), " dimensions of sizes ",
                    q.sizes());
  const Storage none = start_storage(format, q.size(0), q.options());
  return attend_storage(none, q, o, precision);
}

}  // namespace

// What the arguments of an append must be, whether or not the cache has begun. Returns the dtype to store.
void KVCache::Impl::check_append(const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& lengths) const {
  check_supported_device("k", k);
  check_supported_device("v", v);
  TORCH_CHECK_VALUE(k.dim() == 4, "k must be [B, Hkv, T, D] (4 dimensions), got ", k.dim(), " dimensions of sizes ",
                    k.sizes());
  check_floating("k", k);
  const int64_t batch = storage.started ? storage.batch : k.size(0);
  const auto dtype = storage.started ? storage.tensors.window_k.scalar_type() : k.scalar_type();
  const at::Device device = storage.started ? storage.device() : k.device();
  // `lengths` may also be on the CPU, where reading them is free.
  const bool on_host = lengths && lengths->device().is_cpu();
  check_new_tokens({"k", "v", "lengths"}, k, v, on_host ? std::nullopt : lengths, batch, format, dtype, device);
  if (on_host) check_lengths("lengths", *lengths, batch);
}

void KVCache::Impl::append(const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths_arg,
                           const at::Tensor& q) {
  const bool capturing = captures(storage, k);
  const auto lengths = lengths_on(k.device(), lengths_arg, capturing);
  if (capturing) return append_captured(storage, k, v, lengths);
  const auto append_all = [&](Storage& s) {
    const std::vector<int64_t> counts = counts_of(lengths_arg, s.batch, k.size(2));
    AfterAppend after(s, counts);
    make_room(s, after.quantized);  // before the queries are noted: there may be no such room
    if (q.defined()) note_queries(s, q, lengths_arg ? counts : counts_of({}, s.batch, q.size(2)));
    append_to(s, k, v, lengths, std::move(after), given_order);
  };
  if (storage.started && !has_unordered_rows(storage)) return append_all(current());
  Storage s = storage.started ? with_own_orders(current()) : start_storage(format, k.size(0), k.options());
  append_all(s);
  storage = std::move(s);
}

std::tuple<at::Tensor, at::Tensor> KVCache::Impl::attend(const at::Tensor& q, const AttentionOptions& o) const {
  if (!storage.started) return attend_nothing(format, options.precision, q, o);
  return attend_storage(captures(storage, q) ? storage : current(), q, o, options.precision);
}

at::Tensor KVCache::Impl::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionOptions& o, const std::optional<at::Tensor>& lengths_arg) {
  check_append(k, v, lengths_arg);
  check_supported_device("q", q);
  check_attention(q, k.size(0), format, k.device(), op_options(o, options.precision));
  TORCH_CHECK_VALUE(q.size(2) == k.size(2), "q has ", q.size(2), " rows, but k has ", k.size(2), " tokens");
  const bool capturing = captures(storage, k);
  const auto lengths = lengths_on(k.device(), lengths_arg, capturing);
  // Fetched once: it waits for the device where they are there.
  const auto known = lengths_arg && !capturing ? std::optional<at::Tensor>(lengths_arg->to(at::kCPU)) : lengths;
  if (!capturing) counts_of(known, k.size(0), k.size(2));
  at::Tensor out;
  const bool nothing_cached = !capturing && (!storage.started || current().longest() == 0);
  if (nothing_cached && !lengths && is_plain(o) && q.scalar_type() == k.scalar_type() && q.numel() > 0 &&
      hides_the_future(v, o)) {
    out = prefill_attention(q, k, v, o);
  } else {
    const Storage empty = storage.started ? Storage() : start_storage(format, k.size(0), k.options());
    const Storage& s = storage.started ? storage : empty;
    out = std::get<0>(attend_storage(s, q, o, options.precision, k, v, lengths));
  }
  append(k, v, known, q);
  return out;
}

void KVCache::Impl::truncate(int64_t n) {
  check_not_negative("n", n);
  if (!storage.started) return;
  Storage& s = current();
  s.free_pages.reserve(s.page_users.size());
  cache_truncate(s.tensors, s.format_ints, n);
  const int64_t group = s.format.group_size, whole = std::max<int64_t>(n - s.format.sink_length, 0) / group * group;
  for (int64_t b = 0; b < s.batch; b++) {
    if (s.lengths[b] <= n) continue;
    s.lengths[b] = n;
    s.quantized[b] = std::min(s.quantized[b], whole);
    drop_unused_pages(s, b);
  }
}

// The batch becomes the rows named. Pages are shared, the exact part is copied.
void KVCache::Impl::select(const char* name, const at::Tensor& rows_arg) {
  check_tensor(name, rows_arg);
  check_dtype(name, rows_arg, at::kLong);
  check_rank(name, rows_arg, 1, "[N]");
  check_supported_device(name, rows_arg);
  TORCH_CHECK_VALUE(rows_arg.size(0) >= 1, name, " must name at least one row, got ", rows_arg.size(0));
  const at::Tensor rows = rows_arg.to(at::kCPU).contiguous();
  const int64_t count = rows.size(0);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; i++) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < storage.batch, name, "[", i, "] is ", row[i],
                      ", but the cache has batch size ", storage.batch);
  }
  const PlainTensors guard;
  const Storage& old = current();
  Storage s = old;
  const at::Tensor device_rows = rows.to(s.device());
  for (at::Tensor* part : s.row_tensors()) *part = part->index_select(0, device_rows);
  if (s.host_table.defined()) s.host_table = s.host_table.index_select(0, rows);
  if (!s.ordered.empty()) {
    s.ordered.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) s.ordered[i] = old.ordered[row[i]];
  }
  s.batch = count;
  s.lengths.resize(static_cast<size_t>(count));
  s.quantized.resize(static_cast<size_t>(count));
  s.row_pages.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; i++) {
    s.lengths[i] = old.lengths[row[i]];
    s.quantized[i] = old.quantized[row[i]];
    s.row_pages[i] = pages_for(s.quantized[i]);  // reserved ones are not shared
  }
  s.reserved_pages = 0;
  recount_pages(s);
  storage = std::move(s);
}

KVCache::KVCache(const CacheOptions& options) : impl_(std::make_unique<Impl>()) {
  check_only_copy();
  impl_->options = options;
  impl_->format = format_of(options);
  impl_->options.value_head_dim = impl_->format.value_head_dim;
  impl_->storage.set_format(impl_->format);
}

KVCache::KVCache(int64_t num_kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim, int64_t k_bits,
                 int64_t v_bits, int64_t group_size, int64_t residual_length, int64_t sink_length,
                 const std::string& precision, bool range_search, const std::string& scale_dtype)
    : KVCache(CacheOptions{num_kv_heads, head_dim, value_head_dim, k_bits, v_bits, group_size, residual_length,
                           sink_length, precision, range_search, scale_dtype}) {}

KVCache::~KVCache() = default;

namespace {

// Under autocast the cache's dtype is decided by its first tokens; later ones, and the queries, are cast as autocast
// would.
struct AutocastInputs {
  at::Tensor q, k, v;
};

std::optional<at::ScalarType> autocast_dtype(const at::Tensor& t) {
  const auto device = t.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

at::Tensor cast_float(const at::Tensor& t, at::ScalarType type) {
  return is_supported_float(t.scalar_type()) ? t.to(type) : t;
}

}  // namespace

at::Tensor KVCache::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& options, const std::optional<at::Tensor>& lengths) {
  const Writing writing(*impl_);
  const Storage& s = impl_->storage;
  check_tensor("q", q);
  check_tensor("k", k);
  check_tensor("v", v);
  if (lengths) check_tensor("lengths", *lengths);
  if (const auto type = autocast_dtype(k)) {
    const auto stored = s.started ? s.tensors.window_k.scalar_type() : *type;
    return impl_->forward(cast_float(q, *type), cast_float(k, stored), cast_float(v, stored), options, lengths);
  }
  return impl_->forward(q, k, v, options, lengths);
}

void KVCache::append(const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& lengths,
                     const std::optional<at::Tensor>& q) {
  const Writing writing(*impl_);
  const Storage& s = impl_->storage;
  check_tensor("k", k);
  check_tensor("v", v);
  if (q) check_tensor("q", *q);
  if (lengths) check_tensor("lengths", *lengths);
  at::Tensor k_cast = k, v_cast = v;
  if (const auto type = autocast_dtype(k)) {
    const auto stored = s.started ? s.tensors.window_k.scalar_type() : *type;
    k_cast = cast_float(k, stored), v_cast = cast_float(v, stored);
  }
  impl_->check_append(k_cast, v_cast, lengths);
  if (!lengths || lengths->device().is_cpu()) counts_of(lengths, k.size(0), k.size(2));
  if (q) {
    check_supported_device("q", *q);
    check_attention(*q, k.size(0), impl_->format, k.device(), {});
    TORCH_CHECK_VALUE(!lengths || q->size(2) == k.size(2), "q has ", q->size(2), " rows, but k has ", k.size(2),
                      " tokens; with lengths they must be equal");
  }
  impl_->append(k_cast, v_cast, lengths, q.value_or(at::Tensor()));
}

at::Tensor KVCache::attend(const at::Tensor& q, const AttentionOptions& options) const {
  return std::get<0>(attend_with_lse(q, options));
}

std::tuple<at::Tensor, at::Tensor> KVCache::attend_with_lse(const at::Tensor& q,
                                                            const AttentionOptions& options) const {
  const Reading reading(*impl_);
  check_tensor("q", q);
  const auto type = autocast_dtype(q);
  return impl_->attend(type ? cast_float(q, *type) : q, options);
}

int64_t KVCache::length() const {
  const Reading reading(*impl_);
  return impl_->current().longest();
}

at::Tensor KVCache::lengths() const {
  const Reading reading(*impl_);
  return at::tensor(impl_->current().lengths, at::TensorOptions().dtype(at::kLong));
}

int64_t KVCache::quantized_length() const {
  const Reading reading(*impl_);
  const auto& q = impl_->current().quantized;
  return q.empty() ? 0 : *std::max_element(q.begin(), q.end());
}

at::Tensor KVCache::quantized_lengths() const {
  const Reading reading(*impl_);
  return at::tensor(impl_->current().quantized, at::TensorOptions().dtype(at::kLong));
}

int64_t KVCache::batch_size() const {
  const Reading reading(*impl_);
  return impl_->storage.batch;
}

bool KVCache::empty() const { return length() == 0; }

int64_t KVCache::nbytes() const {
  const Reading reading(*impl_);
  Storage& s = impl_->storage;
  if (!s.started) return 0;
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const at::Tensor* part : s.all_tensors()) {
    if (seen.insert(part->storage().unsafeGetStorageImpl()).second) {
      bytes += static_cast<int64_t>(part->storage().nbytes());
    }
  }
  return bytes;
}

double KVCache::bits_per_element() const {
  const Reading reading(*impl_);
  const Format& f = format();
  const auto numbers = static_cast<double>(f.group_size * (f.head_dim + f.value_head_dim));
  return 8.0 * static_cast<double>(record_layout(f).bytes) / numbers;
}

std::tuple<at::Tensor, at::Tensor> KVCache::dequantize() const {
  const Reading reading(*impl_);
  const Storage& s = impl_->current();
  const at::NoGradGuard no_grad;
  if (!s.started) {
    const Format& f = impl_->format;
    const auto type = at::TensorOptions().dtype(at::kFloat);  // whatever torch's default dtype is
    return {at::empty({0, f.num_kv_heads, 0, f.head_dim}, type),
            at::empty({0, f.num_kv_heads, 0, f.value_head_dim}, type)};
  }
  return cache_dequantize(s.tensors, s.format_ints, s.longest());
}

at::Tensor KVCache::key_order() const {
  const Reading reading(*impl_);
  TORCH_CHECK(impl_->format.num_key_classes > 0, "key_order needs a cache with classes of key channels (k_classes)");
  const Storage& s = impl_->storage;
  if (!s.started) return at::empty({0, impl_->format.num_kv_heads, impl_->format.head_dim}, at::kLong);
  return s.tensors.k_order.to(at::kLong);
}

void KVCache::set_key_order(const at::Tensor& order) {
  const Writing writing(*impl_);
  const Format& f = impl_->format;
  TORCH_CHECK(f.num_key_classes > 0, "set_key_order needs a cache with classes of key channels (k_classes)");
  check_tensor("order", order);
  check_dtype("order", order, at::kLong);
  check_rank("order", order, 2, "[Hkv, D]");
  check_size("order", order, 0, "head count", f.num_kv_heads, "the cache has num_kv_heads");
  check_size("order", order, 1, "size", f.head_dim, "the cache has head_dim");
  const PlainTensors guard;
  const at::Tensor on_host = order.to(at::kCPU);
  TORCH_CHECK_VALUE(is_key_order(on_host), "order must name each of the ", f.head_dim, " channels once for every head");
  impl_->given_order = on_host.to(at::kShort).contiguous();
}

void KVCache::truncate(int64_t n) {
  const Writing writing(*impl_);
  impl_->truncate(n);
}

void KVCache::reorder(const at::Tensor& rows) {
  const Writing writing(*impl_);
  check_tensor("rows", rows);
  TORCH_CHECK_VALUE(rows.dim() == 1 && rows.size(0) == impl_->storage.batch,
                    "rows must be [B] with B = ", impl_->storage.batch, ", got sizes ", rows.sizes());
  impl_->select("rows", rows);
}

void KVCache::select(const at::Tensor& rows) {
  const Writing writing(*impl_);
  impl_->select("rows", rows);
}

void KVCache::repeat_interleave(int64_t n) {
  const Writing writing(*impl_);
  TORCH_CHECK_VALUE(n >= 1, "n must be at least 1, got ", n);
  if (!impl_->storage.started) return;
  impl_->select("rows", at::arange(impl_->storage.batch, at::kLong).repeat_interleave(n));
}

void KVCache::reset() {
  const Writing writing(*impl_);
  Storage fresh;
  fresh.set_format(impl_->format);
  impl_->storage = std::move(fresh);
}

void KVCache::reserve(int64_t tokens) {
  const Writing writing(*impl_);
  check_not_negative("tokens", tokens);
  TORCH_CHECK(impl_->storage.started,
              "reserve needs a cache that has seen tokens: batch size and dtype come from the first ones");
  Storage& s = impl_->current();
  const int64_t quantized = quantized_count(s.format, tokens), pages = pages_for(quantized);
  TORCH_CHECK(pages <= std::numeric_limits<int32_t>::max(), "the cache would need ", pages, " pages for each row");
  if (s.host_table.defined()) {  // a graph cannot take pages: every row gets its own now
    std::vector<int64_t> after = s.quantized;
    for (int64_t& m : after) m = std::max(m, quantized);
    make_room(s, after);
    s.reserved_pages = std::max(s.reserved_pages, pages);
    return;
  }
  int64_t missing = 0;
  for (int64_t b = 0; b < s.batch; b++) missing += std::max<int64_t>(pages - s.row_pages[b], 0);
  grow_pool(s, missing);
  grow_table(s, pages);
}

c10::intrusive_ptr<KVCache> KVCache::Impl::copy(at::Device device) const {
  auto copied = c10::make_intrusive<KVCache>(options);
  Storage s = current();
  if (s.started) move_tensors(s, device);
  copied->impl_->storage = std::move(s);
  copied->impl_->given_order = given_order;
  return copied;
}

c10::intrusive_ptr<KVCache> KVCache::clone() const {
  const Reading reading(*impl_);
  return impl_->copy(impl_->storage.started ? impl_->storage.device() : at::Device(at::kCPU));
}

c10::intrusive_ptr<KVCache> KVCache::to(at::Device device) const {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "device must be the CPU or CUDA, got ", device);
  const Reading reading(*impl_);
  return impl_->copy(device);
}

const Format& KVCache::format() const { return impl_->storage.format; }

const CacheOptions& KVCache::options() const { return impl_->options; }

}  // namespace kivi
