// One attention call for the tests: a cache with random contents, its parameters, and what comes out according to a
// reference in double precision that works from the definition (dequantised keys and values, one softmax per query).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "test_data.h"

namespace kivi::cpu {

struct AttentionSpec {
  Format format;
  int64_t num_heads = 4;
  int64_t q_len = 1;
  std::vector<int64_t> cached = {300};  // tokens in the cache, per row of the batch
  std::vector<int64_t> fresh;           // new tokens, per row; empty: none
  bool rows_follow_new = false;
  Element q_type = Element::kFloat32;
  Element cache_type = Element::kFloat32;
  Element new_type = Element::kFloat32;
  bool causal = true;
  int64_t window = 0;
  float softcap = 0;
  bool sinks = false;
  bool alibi = false;
  bool alibi_per_batch = false;
  MaskType mask = MaskType::kNone;
  bool mask_broadcast[4] = {false, false, false, false};  // the dimensions of stride 0
  bool exact = true;
  float score_spread = 1;    // standard deviation of the scores, roughly
  int64_t outlier_step = 0;  // > 0: every so many channels of K are wider (by turns 5 and 30 times) and off centre
  uint32_t seed = 1;
};

struct AttentionResult {
  std::vector<float> out;  // [B][Hq][Lq][Dv]
  std::vector<float> lse;  // [B][Hq][Lq]
};

inline AttentionSpec attention_spec(const Format& format) {
  AttentionSpec s;
  s.format = format;
  return s;
}

class AttentionCase {
 public:
  explicit AttentionCase(const AttentionSpec& spec)
      : spec_(spec), layout_(record_layout(spec.format)), random_(spec.seed) {
    batch_ = static_cast<int64_t>(spec.cached.size());
    new_len_ = 0;
    for (const int64_t n : spec.fresh) new_len_ = std::max(new_len_, n);
    lengths_ = spec.cached;
    fresh_ = spec.fresh.empty() ? std::vector<int64_t>(spec.cached.size(), 0) : spec.fresh;
    for (const int64_t n : lengths_) quantized_.push_back(quantized_count(spec.format, n));
    for (size_t b = 0; b < lengths_.size(); b++) keys_ = std::max(keys_, lengths_[b] + fresh_[b]);
    make_queries();
    make_cache();
    make_options();
    make_params();
  }
  AttentionCase(const AttentionCase&) = delete;  // params point into this
  AttentionCase& operator=(const AttentionCase&) = delete;

  AttentionParams& params() { return params_; }
  const AttentionSpec& spec() const { return spec_; }
  const RecordLayout& layout() const { return layout_; }
  int64_t batch() const { return batch_; }
  int64_t keys() const { return keys_; }

  // Where a test may plant values.
  Array& queries() { return q_; }
  Array& sink_k() { return sink_k_; }
  Array& sink_v() { return sink_v_; }
  Array& window_k() { return window_k_; }
  Array& window_v() { return window_v_; }
  Array& new_k() { return new_k_; }
  Array& new_v() { return new_v_; }
  uint8_t* record(int64_t b, int64_t h, int64_t group) {
    const int64_t records = kPageTokens / spec_.format.group_size;
    const int64_t page = table_[static_cast<size_t>(b * table_stride_ + group / records)];
    return pool() + page * params_.page_bytes + (h * records + group % records) * layout_.bytes;
  }
  std::vector<float>& float_mask() { return float_mask_; }
  std::vector<uint8_t>& bool_mask() { return bool_mask_; }
  int64_t mask_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * params_.mask_strides[0] + h * params_.mask_strides[1] + i * params_.mask_strides[2] +
           j * params_.mask_strides[3];
  }

  // The key or value that the cache stands for, NaN and all.
  float key(int64_t b, int64_t h, int64_t token, int64_t d) const { return element(true, b, h, token, d); }
  float value(int64_t b, int64_t h, int64_t token, int64_t d) const { return element(false, b, h, token, d); }

  AttentionResult run(const Kernels& kernels, int threads = 1) const { return run(params_, kernels, threads); }

  // What the calls plan, attention and merge give, the items divided between threads.
  static AttentionResult run(AttentionParams p, const Kernels& kernels, int threads = 1) {
    int64_t floats = 0;
    std::vector<AttentionItem> items(static_cast<size_t>(attention_plan(p, nullptr, &floats)));
    attention_plan(p, items.data(), &floats);
    return run(p, kernels, threads, items, floats);
  }
  static AttentionResult run(AttentionParams p, const Kernels& kernels, int threads,
                             const std::vector<AttentionItem>& items, int64_t floats) {
    const int64_t rows = p.batch * p.num_heads * p.q_len;
    Array out(p.q_type, rows * p.format.value_head_dim);
    AttentionResult result;
    result.lse.assign(static_cast<size_t>(rows), 12345.0f);
    p.out = out.data();
    p.lse = result.lse.data();
    std::vector<float> partials(static_cast<size_t>(floats), std::numeric_limits<float>::quiet_NaN());
    const auto count = static_cast<int64_t>(items.size());
    parallel(count, threads,
             [&](int64_t begin, int64_t end) { kernels.attention(p, items.data(), begin, end, partials.data()); });
    parallel(count, threads,
             [&](int64_t begin, int64_t end) { attention_merge(p, items.data(), begin, end, partials.data()); });
    for (int64_t i = 0; i < out.size(); i++) result.out.push_back(out.get(i));
    return result;
  }

  // The definition, in double.
  AttentionResult oracle() const {
    const Format& f = spec_.format;
    AttentionResult result;
    for (int64_t b = 0; b < batch_; b++) {
      const int64_t total = lengths_[static_cast<size_t>(b)] + fresh_[static_cast<size_t>(b)];
      const int64_t rows = spec_.rows_follow_new ? fresh_[static_cast<size_t>(b)] : spec_.q_len;
      for (int64_t kv_head = 0; kv_head < f.num_kv_heads; kv_head++) {
        const std::vector<double> k = rows_of(true, b, kv_head, total);
        const std::vector<double> v = rows_of(false, b, kv_head, total);
        const int64_t group = spec_.num_heads / f.num_kv_heads;
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
          for (int64_t i = 0; i < spec_.q_len; i++) {
            std::vector<double> out(static_cast<size_t>(f.value_head_dim), 0.0);
            double lse = -std::numeric_limits<double>::infinity();
            if (i < rows) one_query(b, h, i, total - rows + i, k, v, &out, &lse);
            for (const double x : out) result.out.push_back(static_cast<float>(x));
            result.lse.push_back(static_cast<float>(lse));
          }
        }
      }
    }
    return result;
  }

 private:
  template <class Body>
  static void parallel(int64_t count, int threads, Body body) {
    if (threads == 1) return body(0, count);
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; t++) {
      workers.emplace_back([=] { body(count * t / threads, count * (t + 1) / threads); });
    }
    for (std::thread& worker : workers) worker.join();
  }

  void make_queries() {
    const Format& f = spec_.format;
    // Rows further apart than they are long: strides are what counts.
    q_row_stride_ = f.head_dim + 3;
    q_ = Array(spec_.q_type, batch_ * spec_.num_heads * spec_.q_len * q_row_stride_);
    float norm = 0;  // of the keys' standard deviations
    for (int64_t d = 0; d < f.head_dim; d++) norm += width(d) * width(d);
    for (int64_t r = 0; r < batch_ * spec_.num_heads * spec_.q_len; r++) {
      for (int64_t d = 0; d < f.head_dim; d++) {
        q_.set(r * q_row_stride_ + d, random_.normal() * spec_.score_spread / std::sqrt(norm));
      }
    }
  }

  float width(int64_t d) const {
    if (spec_.outlier_step <= 0 || d % spec_.outlier_step != 0) return 1;
    return d / spec_.outlier_step % 2 == 0 ? 5.0f : 30.0f;
  }
  float new_key(int64_t d) { return random_.normal() * width(d) + (width(d) > 1 ? 0.5f * width(d) : 0.0f); }

  void make_cache() {
    const Format& f = spec_.format;
    const int64_t heads = f.num_kv_heads, capacity = window_capacity(f);
    sink_k_ = Array(spec_.cache_type, batch_ * heads * f.sink_length * f.head_dim);
    sink_v_ = Array(spec_.cache_type, batch_ * heads * f.sink_length * f.value_head_dim);
    window_k_ = Array(spec_.cache_type, batch_ * heads * capacity * f.head_dim);
    window_v_ = Array(spec_.cache_type, batch_ * heads * capacity * f.value_head_dim);
    int64_t pages = 0;
    for (const int64_t m : quantized_)
      pages += ceil_div(m, kPageTokens), table_stride_ = std::max(table_stride_, ceil_div(m, kPageTokens));
    const int64_t bytes = page_bytes(f).value;
    pool_ = std::vector<uint8_t>(static_cast<size_t>((pages + 2) * bytes + 64), 0xFF);
    std::vector<int32_t> ids;  // pages in any order, one at the front and one at the back never used
    for (int64_t i = 0; i < pages; i++) ids.push_back(static_cast<int32_t>(i + 1));
    for (size_t i = ids.size(); i > 1; i--)
      std::swap(ids[i - 1], ids[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    table_ = std::vector<int32_t>(static_cast<size_t>(batch_ * table_stride_ + 1), -1);
    size_t next = 0;
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t i = 0; i < ceil_div(quantized_[static_cast<size_t>(b)], kPageTokens); i++)
        table_[static_cast<size_t>(b * table_stride_ + i)] = ids[next++];
    }
    params_.pool_pages = pages + 2;
    params_.page_bytes = bytes;
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t h = 0; h < heads; h++) fill_head(b, h);
    }
    new_row_ = std::max(f.head_dim, f.value_head_dim) + 5;
    new_k_ = Array(spec_.new_type, batch_ * heads * new_len_ * new_row_);
    new_v_ = Array(spec_.new_type, batch_ * heads * new_len_ * new_row_);
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t t = 0; t < fresh_[static_cast<size_t>(b)]; t++) {
        for (int64_t h = 0; h < heads; h++) {
          for (int64_t d = 0; d < f.head_dim; d++) new_k_.set(new_at(b, h, t) + d, new_key(d));
          for (int64_t d = 0; d < f.value_head_dim; d++) new_v_.set(new_at(b, h, t) + d, random_.normal());
        }
      }
    }
  }

  // New tokens lie as [B][Tn][Hkv][...], seen as [B][Hkv][Tn][...].
  int64_t new_at(int64_t b, int64_t h, int64_t t) const {
    return ((b * new_len_ + t) * spec_.format.num_kv_heads + h) * new_row_;
  }

  void fill_head(int64_t b, int64_t h) {
    const Format& f = spec_.format;
    const int64_t n = lengths_[static_cast<size_t>(b)], m = quantized_[static_cast<size_t>(b)];
    const int64_t bh = b * f.num_kv_heads + h, capacity = window_capacity(f), group = f.group_size;
    Array k(spec_.cache_type, n * f.head_dim), v(spec_.cache_type, n * f.value_head_dim);
    for (int64_t t = 0; t < n; t++) {
      for (int64_t d = 0; d < f.head_dim; d++) k.set(t * f.head_dim + d, new_key(d));
      for (int64_t d = 0; d < f.value_head_dim; d++) v.set(t * f.value_head_dim + d, random_.normal());
    }
    for (int64_t t = 0; t < n; t++) {
      const bool sink = t < f.sink_length;
      if (!sink && t < f.sink_length + m) continue;
      const int64_t slot = sink ? bh * f.sink_length + t : bh * capacity + (t - f.sink_length) % capacity;
      for (int64_t d = 0; d < f.head_dim; d++)
        (sink ? sink_k_ : window_k_).set(slot * f.head_dim + d, k.get(t * f.head_dim + d));
      for (int64_t d = 0; d < f.value_head_dim; d++)
        (sink ? sink_v_ : window_v_).set(slot * f.value_head_dim + d, v.get(t * f.value_head_dim + d));
    }
    for (int64_t g = 0; g < m / group; g++) {
      const int64_t t = f.sink_length + g * group;
      const EncodeParams p{&f,
                           &layout_,
                           advance(k.data(), k.type(), t * f.head_dim),
                           advance(v.data(), v.type(), t * f.value_head_dim),
                           f.head_dim,
                           f.value_head_dim,
                           k.type(),
                           record(b, h, g)};
      kernels_for(Isa::kScalar)->encode(p);
    }
  }

  void make_options() {
    for (int64_t h = 0; h < spec_.num_heads; h++) sinks_.push_back(random_.normal());
    for (int64_t i = 0; i < batch_ * spec_.num_heads; i++) slopes_.push_back(0.02f * std::fabs(random_.normal()));
    const int64_t sizes[4] = {batch_, spec_.num_heads, spec_.q_len, keys_};
    params_.mask_keys = keys_;
    int64_t count = 1;
    for (int i = 3; i >= 0; i--) {
      params_.mask_strides[i] = spec_.mask_broadcast[i] ? 0 : count;
      if (!spec_.mask_broadcast[i]) count *= sizes[i];
    }
    if (spec_.mask == MaskType::kNone) count = 0;
    for (int64_t i = 0; i < count; i++) {
      const bool keep = random_.below(4) != 0;
      bool_mask_.push_back(keep);
      float_mask_.push_back(keep ? random_.normal() : -std::numeric_limits<float>::infinity());
    }
  }

  void make_params() {
    AttentionParams& p = params_;
    const Format& f = spec_.format;
    p.format = spec_.format;
    p.layout = layout_;
    p.batch = batch_, p.num_heads = spec_.num_heads, p.q_len = spec_.q_len;
    p.q = q_.data();
    p.q_row_stride = q_row_stride_;
    p.q_head_stride = q_row_stride_ * spec_.q_len;
    p.q_batch_stride = p.q_head_stride * spec_.num_heads;
    p.q_type = spec_.q_type;
    p.pool = pool();
    p.block_table = table_.data();
    p.block_table_stride = table_stride_;
    p.lengths = lengths_.data();
    p.quantized_lengths = quantized_.data();
    p.sink_k = sink_k_.data(), p.sink_v = sink_v_.data();
    p.window_k = window_k_.data(), p.window_v = window_v_.data();
    p.cache_type = spec_.cache_type;
    p.new_k = new_len_ > 0 ? new_k_.data() : nullptr;
    p.new_v = new_len_ > 0 ? new_v_.data() : nullptr;
    p.new_k_strides[0] = p.new_v_strides[0] = new_len_ * f.num_kv_heads * new_row_;
    p.new_k_strides[1] = p.new_v_strides[1] = new_row_;
    p.new_k_strides[2] = p.new_v_strides[2] = f.num_kv_heads * new_row_;
    p.new_type = spec_.new_type;
    p.new_len = new_len_;
    p.new_lengths = spec_.fresh.empty() ? nullptr : fresh_.data();
    p.rows_follow_new = spec_.rows_follow_new;
    p.scale = 1.0f;
    p.softcap = spec_.softcap;
    p.causal = spec_.causal;
    p.window = spec_.window;
    p.sinks = spec_.sinks ? sinks_.data() : nullptr;
    p.alibi_slopes = spec_.alibi ? slopes_.data() : nullptr;
    p.alibi_batch_stride = spec_.alibi_per_batch ? spec_.num_heads : 0;
    p.mask_type = spec_.mask;
    p.mask = spec_.mask == MaskType::kBool      ? static_cast<const void*>(bool_mask_.data())
             : spec_.mask == MaskType::kFloat32 ? static_cast<const void*>(float_mask_.data())
                                                : nullptr;
    p.exact = spec_.exact;
  }

  uint8_t* pool() {
    const auto at = reinterpret_cast<uintptr_t>(pool_.data()) % 64;
    return pool_.data() + (64 - at) % 64;
  }
  const uint8_t* pool() const { return const_cast<AttentionCase*>(this)->pool(); }

  float element(bool is_key, int64_t b, int64_t h, int64_t token, int64_t d) const {
    const Format& f = spec_.format;
    const int64_t n = lengths_[static_cast<size_t>(b)], m = quantized_[static_cast<size_t>(b)];
    const int64_t bh = b * f.num_kv_heads + h, dim = is_key ? f.head_dim : f.value_head_dim;
    if (token < std::min(f.sink_length, n))
      return (is_key ? sink_k_ : sink_v_).get((bh * f.sink_length + token) * dim + d);
    if (token >= n) return (is_key ? new_k_ : new_v_).get(new_at(b, h, token - n) + d);
    const int64_t t = token - f.sink_length;
    if (t >= m)
      return (is_key ? window_k_ : window_v_).get((bh * window_capacity(f) + t % window_capacity(f)) * dim + d);
    std::vector<float> row(static_cast<size_t>(dim));
    DecodeParams p{};
    p.format = &f, p.layout = &layout_;
    p.record = const_cast<AttentionCase*>(this)->record(b, h, t / f.group_size);
    p.first = t % f.group_size, p.count = 1;
    (is_key ? p.k : p.v) = row.data();
    p.type = Element::kFloat32;
    kernels_for(Isa::kScalar)->decode(p);
    return row[static_cast<size_t>(d)];
  }

  // All keys or values of one head, so that the oracle decodes a token once.
  std::vector<double> rows_of(bool is_key, int64_t b, int64_t h, int64_t total) const {
    const Format& f = spec_.format;
    const int64_t n = lengths_[static_cast<size_t>(b)], m = quantized_[static_cast<size_t>(b)];
    const int64_t dim = is_key ? f.head_dim : f.value_head_dim;
    std::vector<double> all;
    std::vector<float> row(static_cast<size_t>(dim));
    for (int64_t token = 0; token < total; token++) {
      const int64_t t = token - f.sink_length;
      const bool quantized = token >= f.sink_length && token < n && t < m;
      if (quantized) {
        DecodeParams p{};
        p.format = &f, p.layout = &layout_;
        p.record = const_cast<AttentionCase*>(this)->record(b, h, t / f.group_size);
        p.first = t % f.group_size, p.count = 1;
        (is_key ? p.k : p.v) = row.data();
        p.type = Element::kFloat32;
        kernels_for(Isa::kScalar)->decode(p);
      }
      for (int64_t d = 0; d < dim; d++)
        all.push_back(quantized ? row[static_cast<size_t>(d)] : element(is_key, b, h, token, d));
    }
    return all;
  }

  void one_query(int64_t b, int64_t h, int64_t i, int64_t at, const std::vector<double>& k,
                 const std::vector<double>& v, std::vector<double>* out, double* lse) const {
    const double infinity = std::numeric_limits<double>::infinity();
    const int64_t dim = spec_.format.head_dim, value_dim = spec_.format.value_head_dim;
    const auto total = static_cast<int64_t>(v.size()) / value_dim;
    const int64_t q_at = ((b * spec_.num_heads + h) * spec_.q_len + i) * q_row_stride_;
    std::vector<double> scores(static_cast<size_t>(total), -infinity);
    double top = params_.sinks != nullptr ? params_.sinks[h] : -infinity;
    std::vector<bool> kept(static_cast<size_t>(total), false);
    for (int64_t j = 0; j < total; j++) {
      if (spec_.causal && j > at) continue;
      if (spec_.window > 0 && j <= at - spec_.window) continue;
      double mask = 0;
      if (spec_.mask == MaskType::kBool && bool_mask_[static_cast<size_t>(mask_at(b, h, i, j))] == 0) continue;
      if (spec_.mask == MaskType::kFloat32) mask = float_mask_[static_cast<size_t>(mask_at(b, h, i, j))];
      if (mask == -infinity) continue;
      double s = 0;
      for (int64_t d = 0; d < dim; d++)
        s += static_cast<double>(q_.get(q_at + d)) * k[static_cast<size_t>(j * dim + d)];
      s *= params_.scale;
      if (spec_.softcap > 0) s = spec_.softcap * std::tanh(s / spec_.softcap);
      if (spec_.alibi)
        s += static_cast<double>(slopes_[static_cast<size_t>(b * params_.alibi_batch_stride + h)]) *
             static_cast<double>(j - at);
      kept[static_cast<size_t>(j)] = true;
      scores[static_cast<size_t>(j)] = s + mask;
      top = std::max(top, scores[static_cast<size_t>(j)]);
    }
    double sum = params_.sinks != nullptr ? std::exp(params_.sinks[h] - top) : 0;
    bool any = false;
    for (int64_t j = 0; j < total; j++) {
      if (!kept[static_cast<size_t>(j)]) continue;
      any = true;
      const double p = std::exp(scores[static_cast<size_t>(j)] - top);
      sum += p;
      for (int64_t d = 0; d < value_dim; d++)
        (*out)[static_cast<size_t>(d)] += p * v[static_cast<size_t>(j * value_dim + d)];
    }
    for (double& x : *out) x = any ? x / sum : 0;
    if (any || params_.sinks != nullptr) *lse = top + std::log(sum);
  }

  AttentionSpec spec_;
  RecordLayout layout_;
  Random random_;
  int64_t batch_ = 0, new_len_ = 0, keys_ = 0, q_row_stride_ = 0, new_row_ = 0, table_stride_ = 0;
  std::vector<int64_t> lengths_, quantized_, fresh_;
  Array q_, sink_k_, sink_v_, window_k_, window_v_, new_k_, new_v_;
  std::vector<uint8_t> pool_;
  std::vector<int32_t> table_;
  std::vector<float> sinks_, slopes_, float_mask_;
  std::vector<uint8_t> bool_mask_;
  AttentionParams params_{};
};

// The largest difference of two results; NaN must stand at the same places, else infinity.
inline double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < a.size() && i < b.size(); i++) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (a[i] == b[i]) continue;  // also infinities
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isnan(d) ? std::numeric_limits<double>::infinity() : std::max(worst, d);
  }
  return worst;
}

}  // namespace kivi::cpu
