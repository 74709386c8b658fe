// A model of the cache that is slow and obvious: every row of the batch is a list of tokens as the cache should give
// them back, in float32. It follows the definition in cache.h and nothing else; the quantiser is the one of support.h.
// For formats that go beyond it, tokens wait as they came until adopt_quantized puts in what a cache gave back.
#pragma once

#include "tests/ops/support.h"

namespace kivi::test {

struct ModelRow {
  at::Tensor k, v;  // [H, n, D], [H, n, Dv]: quantised tokens as they come back (not yet rounded to the dtype of the
                    // cache: attention sees them so), the others as they came
  int64_t quantized = 0;
  int64_t adopted = 0;  // of the quantised tokens: those that are as they come back

  int64_t length() const { return k.size(1); }
};

class Model {
 public:
  Model(const CacheOptions& options, int64_t batch, at::ScalarType type, bool by_definition = true)
      : options_(options), type_(type), by_definition_(by_definition) {
    const int64_t value_dim = options.value_head_dim.value_or(options.head_dim);
    const auto floats = at::TensorOptions().dtype(at::kFloat);
    for (int64_t b = 0; b < batch; b++) {
      rows_.push_back({at::empty({options.num_kv_heads, 0, options.head_dim}, floats),
                       at::empty({options.num_kv_heads, 0, value_dim}, floats)});
    }
  }

  // The published rule: after the sink, floor(max(0, n - sink - R) / G) * G tokens are quantised.
  int64_t rule(int64_t n) const {
    const int64_t over = std::max<int64_t>(0, n - options_.sink_length - options_.residual_length);
    return over / options_.group_size * options_.group_size;
  }

  void append(int64_t row, const at::Tensor& k, const at::Tensor& v) {
    ModelRow& r = rows_[static_cast<size_t>(row)];
    r.k = at::cat({r.k, k.to(at::kFloat)}, 1);
    r.v = at::cat({r.v, v.to(at::kFloat)}, 1);
    const int64_t after = std::max(r.quantized, rule(r.length()));
    if (by_definition_ && after > r.quantized) {
      const int64_t first = options_.sink_length + r.quantized, count = after - r.quantized, g = options_.group_size;
      const bool half = options_.scale_dtype == "float16";
      at::Tensor kq = r.k.narrow(1, first, count), vq = r.v.narrow(1, first, count);
      kq.copy_(definition_keys(kq.unsqueeze(0), options_.k_bits, g, half)[0]);
      vq.copy_(definition_values(vq.unsqueeze(0), options_.v_bits, options_.v_group_size.value_or(g), half)[0]);
      r.adopted = after;
    }
    r.quantized = after;
  }

  // k [H, n, D] and v: row b as a cache gave it back. `check` is called with the quantised tokens that were not known
  // yet: what went in and what came back, of K and of V.
  template <class Check>
  void adopt_quantized(int64_t row, const at::Tensor& k, const at::Tensor& v, Check&& check) {
    ModelRow& r = rows_[static_cast<size_t>(row)];
    const int64_t first = options_.sink_length + r.adopted, count = r.quantized - r.adopted;
    if (count <= 0) return;
    at::Tensor kq = r.k.narrow(1, first, count), vq = r.v.narrow(1, first, count);
    check(kq, k.narrow(1, first, count).to(at::kFloat), vq, v.narrow(1, first, count).to(at::kFloat));
    kq.copy_(k.narrow(1, first, count));
    vq.copy_(v.narrow(1, first, count));
    r.adopted = r.quantized;
  }

  // k and v [B, H, T, D]; row b takes the first counts[b].
  void append(const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& counts = {}) {
    for (int64_t b = 0; b < batch(); b++) {
      const int64_t count = counts.empty() ? k.size(2) : counts[static_cast<size_t>(b)];
      append(b, k[b].narrow(1, 0, count), v[b].narrow(1, 0, count));
    }
  }

  void truncate(int64_t n) {
    for (ModelRow& r : rows_) {
      if (r.length() <= n) continue;
      r.k = r.k.narrow(1, 0, n).clone();
      r.v = r.v.narrow(1, 0, n).clone();
      const int64_t kept = std::max<int64_t>(0, n - options_.sink_length);
      r.quantized = std::min(r.quantized, kept / options_.group_size * options_.group_size);
      r.adopted = std::min(r.adopted, r.quantized);
      const int64_t exact = std::min(n, options_.sink_length + r.quantized);
      for (at::Tensor* t : {&r.k, &r.v}) {
        at::Tensor rest = t->narrow(1, exact, n - exact);
        rest.copy_(given_back(rest, type_));
      }
    }
  }

  void select(const std::vector<int64_t>& rows) {
    std::vector<ModelRow> chosen;
    for (int64_t row : rows) {
      const ModelRow& r = rows_[static_cast<size_t>(row)];
      chosen.push_back({r.k.clone(), r.v.clone(), r.quantized, r.adopted});
    }
    rows_ = chosen;
  }

  at::ScalarType type() const { return type_; }
  bool by_definition() const { return by_definition_; }
  int64_t batch() const { return static_cast<int64_t>(rows_.size()); }
  const ModelRow& row(int64_t b) const { return rows_[static_cast<size_t>(b)]; }

  ::testing::AssertionResult matches(const KVCache& cache) const {
    const auto fail = [] { return ::testing::AssertionFailure(); };
    if (cache.batch_size() != batch()) return fail() << "batch " << cache.batch_size() << ", model " << batch();
    const auto [k, v] = cache.dequantize();
    const at::Tensor lengths = cache.lengths(), quantized = cache.quantized_lengths();
    int64_t longest = 0, most = 0;
    for (int64_t b = 0; b < batch(); b++) {
      const int64_t n = lengths[b].item<int64_t>(), m = quantized[b].item<int64_t>();
      if (n != row(b).length() || m != row(b).quantized) {
        return fail() << "row " << b << " holds " << n << " tokens, " << m << " of them quantised; the model "
                      << row(b).length() << " and " << row(b).quantized;
      }
      longest = std::max(longest, n);
      most = std::max(most, m);
    }
    if (cache.length() != longest || cache.quantized_length() != most || k.size(2) != longest) {
      return fail() << "length " << cache.length() << ", quantised " << cache.quantized_length() << ", dequantised "
                    << k.size(2) << "; the model " << longest << " and " << most;
    }
    for (int64_t b = 0; b < batch(); b++) {
      const int64_t n = row(b).length();
      auto result = same_bits(k[b].narrow(1, 0, n), given_back(row(b).k, type_));
      if (!result) return fail() << "keys of row " << b << ": " << result.message();
      result = same_bits(v[b].narrow(1, 0, n), given_back(row(b).v, type_));
      if (!result) return fail() << "values of row " << b << ": " << result.message();
      for (const at::Tensor& t : {k[b], v[b]}) {
        const at::Tensor rest = t.narrow(1, n, longest - n);
        if (rest.numel() > 0 && !(rest == 0).all().item<bool>())
          return fail() << "row " << b << " has data past its end";
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  CacheOptions options_;
  at::ScalarType type_;
  bool by_definition_;
  std::vector<ModelRow> rows_;
};

}  // namespace kivi::test
