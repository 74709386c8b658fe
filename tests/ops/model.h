// A model of the cache that is slow and obvious: every row of the batch is a list of tokens as the cache should give
// them back. It follows the definition in cache.h and nothing else; the quantiser is the one of support.h.
#pragma once

#include "tests/ops/support.h"

namespace kivi::test {

struct ModelRow {
  at::Tensor k, v;  // [H, n, D], [H, n, Dv]: quantised tokens as they come back, the others as they came
  int64_t quantized = 0;

  int64_t length() const { return k.size(1); }
};

class Model {
 public:
  Model(const CacheOptions& options, int64_t batch, at::ScalarType type) : options_(options), type_(type) {
    const int64_t value_dim = options.value_head_dim.value_or(options.head_dim);
    for (int64_t b = 0; b < batch; b++) {
      rows_.push_back({at::empty({options.num_kv_heads, 0, options.head_dim}, type),
                       at::empty({options.num_kv_heads, 0, value_dim}, type), 0});
    }
  }

  // The published rule: after the sink, floor(max(0, n - sink - R) / G) * G tokens are quantised.
  int64_t rule(int64_t n) const {
    const int64_t over = std::max<int64_t>(0, n - options_.sink_length - options_.residual_length);
    return over / options_.group_size * options_.group_size;
  }

  void append(int64_t row, const at::Tensor& k, const at::Tensor& v) {
    ModelRow& r = rows_[static_cast<size_t>(row)];
    r.k = at::cat({r.k, k}, 1);
    r.v = at::cat({r.v, v}, 1);
    const int64_t after = std::max(r.quantized, rule(r.length()));
    if (after > r.quantized) {
      const int64_t first = options_.sink_length + r.quantized, count = after - r.quantized, g = options_.group_size;
      at::Tensor kq = r.k.narrow(1, first, count), vq = r.v.narrow(1, first, count);
      kq.copy_(given_back(definition_keys(kq.unsqueeze(0), options_.k_bits, g)[0], type_));
      vq.copy_(given_back(definition_values(vq.unsqueeze(0), options_.v_bits, g)[0], type_));
      r.quantized = after;
    }
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
    }
  }

  void select(const std::vector<int64_t>& rows) {
    std::vector<ModelRow> chosen;
    for (int64_t row : rows) {
      const ModelRow& r = rows_[static_cast<size_t>(row)];
      chosen.push_back({r.k.clone(), r.v.clone(), r.quantized});
    }
    rows_ = chosen;
  }

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
      auto result = same_bits(k[b].narrow(1, 0, n), row(b).k);
      if (!result) return fail() << "keys of row " << b << ": " << result.message();
      result = same_bits(v[b].narrow(1, 0, n), row(b).v);
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
  std::vector<ModelRow> rows_;
};

}  // namespace kivi::test
