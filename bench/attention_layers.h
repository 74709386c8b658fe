// Layers of a cache for the attention benchmark: records with random codes, block tables, exact tokens and queries of
// one shape, many times over, so that no layer is in a cache of the CPU when its turn comes. And what attention over
// the first layer gives in double precision, for scores up to +-4 and up to +-40. Keys have outlier channels of 5x and
// 30x. No torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "format/half.h"
#include "machine.h"

namespace kivi::bench {

struct Shape {
  int64_t k_bits = 2, v_bits = 2;
  int64_t heads = 32, kv_heads = 8, dim = 128, group_size = 32;
  int64_t q_len = 1;
  std::vector<int64_t> lengths{16384};           // tokens of each row of the batch
  int64_t sink_length = 0, residual_length = 0;  // the policy of what is exact; 0: only what fills no group
  bool narrow = false;                           // scales of a byte, and one symmetric, rotated group of V per token
  std::vector<KeyClass> classes;                 // of K
  bool value_groups = false;                     // narrow, but V in groups of group_size channels with zeros
  std::string recipe;                            // the name for these

  Format format() const {
    Format f;
    f.num_kv_heads = kv_heads, f.head_dim = f.value_head_dim = dim, f.k_bits = k_bits, f.v_bits = v_bits;
    f.group_size = group_size, f.residual_length = residual_length, f.sink_length = sink_length;
    if (narrow) {
      f.scale_type = ScaleType::kFloat8;
      f.v_group_size = round_up(dim, group_size);
      f.v_symmetric = f.v_rotated = true;
      if (value_groups) f.v_group_size = 0, f.v_symmetric = false;
    }
    for (const KeyClass& k : classes) {
      f.k_bits = f.num_key_classes == 0 ? k.bits : std::max(f.k_bits, k.bits);
      f.key_classes[f.num_key_classes++] = k;
    }
    return f;
  }
  std::string bits_name() const { return "K" + std::to_string(k_bits) + "V" + std::to_string(v_bits); }
  // Names what differs from the plain case too.
  std::string name() const {
    std::string s = "decode/" + (recipe.empty() ? bits_name() + (narrow ? "_narrow" : "") : recipe);
    s += lengths.size() == 1 ? "/tokens:" + std::to_string(lengths[0]) : "/ragged:" + std::to_string(lengths.size());
    s += "/heads:" + std::to_string(heads) + "x" + std::to_string(kv_heads);
    if (dim != 128) s += "/dim:" + std::to_string(dim);
    if (group_size != 32) s += "/group:" + std::to_string(group_size);
    if (q_len != 1) s += "/q_len:" + std::to_string(q_len);
    if (sink_length + residual_length > 0) s += "/exact:" + std::to_string(sink_length + residual_length);
    return s;
  }
  int64_t all_tokens() const {
    int64_t sum = 0;
    for (const int64_t n : lengths) sum += n;
    return sum;
  }
};

struct Output {
  std::vector<double> out, lse;
};

class CacheLayers {
 public:
  static constexpr Element kExactType = Element::kFloat16;
  static constexpr float kWide = 10;  // from scores up to +-4 to scores up to +-40

  CacheLayers(const Shape& s, int64_t least_bytes)
      : shape(s), format(s.format()), layout(record_layout(format)), lengths_(s.lengths), random_(7) {
    for (const int64_t n : lengths_) quantized_.push_back(quantized_count(format, n));
    for (const int64_t m : quantized_) most_pages_ = std::max(most_pages_, ceil_div(m, kPageTokens));
    int32_t page = 0;
    for (const int64_t m : quantized_) {
      for (int64_t i = 0; i < most_pages_; i++) table_.push_back(i < ceil_div(m, kPageTokens) ? page++ : 0);
    }
    layer_bytes_ = page * page_bytes(format).value;
    count_ = std::max<int64_t>(1, ceil_div(least_bytes, std::max<int64_t>(layer_bytes_, 1)));
    pool_ = std::make_unique<Memory>(count_ * layer_bytes_);
    // One order for all heads, which share scales; 37 and the number of channels have no factor in common.
    for (int64_t i = 0; !s.classes.empty() && i < static_cast<int64_t>(lengths_.size()) * s.kv_heads * s.dim; i++) {
      order_.push_back(static_cast<int16_t>(37 * i % s.dim));
    }
    fill_pool();
    fill_exact();
    fill_params();
    set_scale_and_want();
  }

  const Shape shape;
  const Format format;
  const RecordLayout layout;

  // What the cache stores of one layer, without pages' unused ends.
  double stored_bytes() const {
    int64_t bytes = 0;
    for (size_t b = 0; b < lengths_.size(); b++) {
      const int64_t records = quantized_[b] / format.group_size * shape.kv_heads;
      const int64_t exact = (lengths_[b] - quantized_[b]) * shape.kv_heads * 2 * shape.dim;
      bytes += records * layout.bytes + exact * element_bytes(kExactType);
    }
    return static_cast<double>(bytes);
  }

  // Parameters for the layer whose turn it is; scores up to +-4.
  AttentionParams next_layer(bool exact, float* out, float* lse) {
    turn_ = (turn_ + 1) % count_;
    return params(turn_, 1, exact, out, lse);
  }
  // Parameters for the first layer; scores up to +-4 * factor.
  AttentionParams first_layer(float factor, bool exact, float* out, float* lse) const {
    return params(0, factor, exact, out, lse);
  }
  const Output& want() const { return want_[0]; }
  const Output& want_wide() const { return want_[1]; }  // scale times kWide

  size_t out_size() const { return q_.size(); }
  size_t lse_size() const { return q_.size() / static_cast<size_t>(shape.dim); }

  // What rounding q * K scale to int16 may put an output off by, times `factor`: see csrc/cpu/vector_pages-inl.h.
  double fast_limit(double factor) const {
    const auto d = static_cast<double>(shape.dim);
    const double amplitude = std::min(32767.0, 2147483647.0 / (255 * d));
    const auto largest_code = static_cast<double>((1 << format.k_bits) - 1);
    return 5e-5 + 0.5 * std::sqrt(d) * factor * largest_scaled_query_ * largest_code / amplitude;
  }

 private:
  // Channels 3, 19, 35, ... up to 128: four of 5x, four of 30x.
  float channel_size(int64_t channel) const {
    return channel % 16 != 3 || channel >= 128 ? 1.0f : channel % 32 == 3 ? 5.0f : 30.0f;
  }

  void fill_pool() {
    uint64_t s = 88172645463325252ull;
    auto* words = pool_->as<uint64_t>();
    for (int64_t i = 0; i < pool_->size() / 8; i++) {
      s ^= s << 13, s ^= s >> 7, s ^= s << 17;
      words[i] = s;
    }
    // Scales and zeros of some records, copied into all: values within +-1.7 times the size of the channel.
    constexpr int64_t kKinds = 7;
    std::vector<std::vector<uint8_t>> kinds;
    k_scale_.assign(static_cast<size_t>(shape.dim), 0.0f);
    for (int64_t kind = 0; kind < kKinds; kind++) kinds.push_back(make_scales(kind));
    int64_t number = 0;
    for (uint8_t* r = pool_->data(); r + layout.bytes <= pool_->data() + pool_->size(); r += layout.bytes) {
      const uint8_t* const from = kinds[static_cast<size_t>(number++ % kKinds)].data();
      std::memcpy(r + layout.k_scale, from + layout.k_scale, static_cast<size_t>(layout.v_codes[0] - layout.k_scale));
      std::memcpy(r + layout.v_scale, from + layout.v_scale, static_cast<size_t>(layout.bytes - layout.v_scale));
    }
  }

  // A record with scales and zeros, and no codes.
  std::vector<uint8_t> make_scales(int64_t kind) {
    std::vector<uint8_t> record(static_cast<size_t>(layout.bytes), 0);
    // A scale and a zero, which a byte holds in steps of the scale.
    const auto put = [&](int64_t scales, int64_t zeros, int64_t i, int64_t bits, float scale, float zero) {
      if (layout.scale_bytes == 1) {
        const uint8_t byte = record[static_cast<size_t>(scales + i)] = float_to_float8(scale);
        const float stored = half_to_float(float8_to_half(byte));
        if (zeros < layout.bytes) {
          const float steps = std::round(zero / stored * zero_steps(bits));
          record[static_cast<size_t>(zeros + i)] =
              static_cast<uint8_t>(static_cast<int8_t>(std::clamp(steps, -127.0f, 127.0f)));
        }
        return stored;
      }
      store_element(record.data() + scales, Element::kFloat16, i, scale);
      store_element(record.data() + zeros, Element::kFloat16, i, zero);
      return load_element(record.data() + scales, Element::kFloat16, i);
    };
    // By place; with classes the channel in it is another one.
    std::vector<int64_t> k_bits, channel;
    for (int64_t i = 0; i < layout.num_key_classes; i++) {
      k_bits.insert(k_bits.end(), static_cast<size_t>(layout.key_classes[i].channels), layout.key_classes[i].bits);
    }
    for (int64_t i = 0; i < shape.dim; i++) channel.push_back(order_.empty() ? i : order_[static_cast<size_t>(i)]);
    const float v_step = 3.0f / static_cast<float>((1 << shape.v_bits) - 1);
    for (int64_t i = 0; i < shape.dim; i++) {
      const int64_t c = channel[static_cast<size_t>(i)], bits = k_bits[static_cast<size_t>(i)];
      const float k_step = 3.0f / static_cast<float>((1 << bits) - 1);
      const float scale = put(layout.k_scale, layout.k_zero, i, bits,
                              k_step * channel_size(c) * (1.0f - 0.02f * static_cast<float>((c + kind) % 7)),
                              channel_size(c) * (-1.5f + 0.1f * static_cast<float>((3 * c + kind) % 5 - 2)));
      k_scale_[static_cast<size_t>(c)] = std::max(k_scale_[static_cast<size_t>(c)], scale);
    }
    for (int64_t i = 0; i < layout.v_groups * shape.group_size; i++) {
      put(layout.v_scale, layout.v_zero, i, shape.v_bits, v_step * (1.0f - 0.02f * static_cast<float>((i + kind) % 5)),
          -1.5f + 0.1f * static_cast<float>((i + 2 * kind) % 5 - 2));
    }
    return record;
  }

  void fill_exact() {
    const int64_t rows = static_cast<int64_t>(lengths_.size()) * shape.kv_heads;
    const auto fill = [&](std::vector<uint16_t>& array, int64_t tokens, bool keys) {
      array.resize(static_cast<size_t>(rows * tokens * shape.dim));
      for (size_t i = 0; i < array.size(); i++) {
        const float size = keys ? channel_size(static_cast<int64_t>(i) % shape.dim) : 1.0f;
        array[i] = float_to_half(normal_(random_) * size);
      }
    };
    fill(sink_k_, shape.sink_length, true), fill(sink_v_, shape.sink_length, false);
    fill(window_k_, window_capacity(format), true), fill(window_v_, window_capacity(format), false);
    q_.resize(static_cast<size_t>(static_cast<int64_t>(lengths_.size()) * shape.heads * shape.q_len * shape.dim));
    for (float& x : q_) x = normal_(random_);
  }

  void fill_params() {
    AttentionParams& p = params_;
    p.format = format, p.layout = layout;
    p.batch = static_cast<int64_t>(lengths_.size()), p.num_heads = shape.heads, p.q_len = shape.q_len;
    p.q = q_.data(), p.q_row_stride = shape.dim, p.q_head_stride = shape.q_len * shape.dim;
    p.q_batch_stride = shape.heads * p.q_head_stride;
    p.pool_pages = layer_bytes_ / page_bytes(format).value, p.page_bytes = page_bytes(format).value;
    p.block_table = table_.data(), p.block_table_stride = most_pages_;
    p.lengths = lengths_.data(), p.quantized_lengths = quantized_.data();
    p.sink_k = sink_k_.data(), p.sink_v = sink_v_.data();
    p.window_k = window_k_.data(), p.window_v = window_v_.data(), p.cache_type = kExactType;
    p.k_order = order_.empty() ? nullptr : order_.data();
    p.causal = true;
  }

  AttentionParams params(int64_t layer, float factor, bool exact, float* out, float* lse) const {
    AttentionParams p = params_;
    p.pool = pool_->data() + layer * layer_bytes_;
    p.scale *= factor;
    p.exact = exact, p.out = out, p.lse = lse;
    return p;
  }

  // ---- the first layer in double precision

  // Keys and values of one kv head of one row of the batch, [tokens][dim].
  void dequantize(size_t b, int64_t kv_head, std::vector<float>& k, std::vector<float>& v) const {
    const int64_t d = shape.dim, n = lengths_[b], m = quantized_[b], capacity = window_capacity(format);
    k.resize(static_cast<size_t>(n * d)), v.resize(k.size());
    const int64_t row = static_cast<int64_t>(b) * shape.kv_heads + kv_head;
    for (int64_t t = 0; t < n; t++) {
      const bool sink = t < shape.sink_length;
      if (!sink && t < shape.sink_length + m) continue;
      const int64_t slot = sink ? row * shape.sink_length + t : row * capacity + (t - shape.sink_length) % capacity;
      for (int64_t c = 0; c < d; c++) {
        k[static_cast<size_t>(t * d + c)] =
            half_to_float((sink ? sink_k_ : window_k_)[static_cast<size_t>(slot * d + c)]);
        v[static_cast<size_t>(t * d + c)] =
            half_to_float((sink ? sink_v_ : window_v_)[static_cast<size_t>(slot * d + c)]);
      }
    }
    const int64_t records = kPageTokens / format.group_size;
    for (int64_t t = 0; t < m; t += format.group_size) {
      const int64_t page = table_[b * static_cast<size_t>(most_pages_) + static_cast<size_t>(t / kPageTokens)];
      const int64_t record = kv_head * records + t % kPageTokens / format.group_size;
      const auto at = static_cast<size_t>((shape.sink_length + t) * d);
      cpu::kernels_for(cpu::Isa::kScalar)
          ->decode({&format, &layout, pool_->data() + page * params_.page_bytes + record * layout.bytes, 0,
                    format.group_size, &k[at], &v[at], d, d, Element::kFloat32, false, params_.k_order});
    }
  }

  static double dot(const float* a, const float* b, int64_t n) {
    double sum[8] = {};
    for (int64_t i = 0; i < n; i += 8) {  // n is a multiple of 16 in every shape
      for (int j = 0; j < 8; j++) sum[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
    }
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  }

  // body(scores before scaling, values) for every row of the output, in its order.
  template <class Body>
  void for_each_row(const Body& body) const {
    std::vector<float> k, v;
    const int64_t rows = shape.heads / shape.kv_heads * shape.q_len;  // of one kv head
    for (size_t b = 0; b < lengths_.size(); b++) {
      for (int64_t h = 0; h < shape.kv_heads; h++) {
        dequantize(b, h, k, v);
        for (int64_t row = h * rows; row < (h + 1) * rows; row++) body(row_scores(b, row, k), v);
      }
    }
  }

  void set_scale_and_want() {
    double top = 0;
    for_each_row([&](const std::vector<double>& scores, const std::vector<float>&) {
      for (const double x : scores) top = std::max(top, std::fabs(x));
    });
    params_.scale = static_cast<float>(4.0 / top);
    for_each_row([&](const std::vector<double>& scores, const std::vector<float>& v) {
      want_row(want_[0], scores, v, static_cast<double>(params_.scale));
      want_row(want_[1], scores, v, static_cast<double>(params_.scale * kWide));
    });
    for (size_t i = 0; i < q_.size(); i++) {
      const float scaled = std::fabs(q_[i]) * params_.scale * k_scale_[i % k_scale_.size()];
      largest_scaled_query_ = std::max(largest_scaled_query_, static_cast<double>(scaled));
    }
  }

  // q . k of the keys that query row `row` ([head][query]) of batch row b sees; the last query sees all.
  std::vector<double> row_scores(size_t b, int64_t row, const std::vector<float>& k) const {
    const int64_t d = shape.dim, seen = lengths_[b] - (shape.q_len - 1 - row % shape.q_len);
    const float* query =
        &q_[(b * static_cast<size_t>(shape.heads * shape.q_len) + static_cast<size_t>(row)) * static_cast<size_t>(d)];
    std::vector<double> scores;
    for (int64_t t = 0; t < seen; t++) scores.push_back(dot(query, &k[static_cast<size_t>(t * d)], d));
    return scores;
  }

  void want_row(Output& want, const std::vector<double>& scores, const std::vector<float>& v, double scale) const {
    const auto d = static_cast<size_t>(shape.dim);
    std::vector<double> out(d, 0.0);
    const double top = scale * *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (size_t t = 0; t < scores.size(); t++) {
      const double w = std::exp(scores[t] * scale - top);
      sum += w;
      for (size_t c = 0; c < d; c++) out[c] += w * static_cast<double>(v[t * d + c]);
    }
    for (const double x : out) want.out.push_back(x / sum);
    want.lse.push_back(top + std::log(sum));
  }

  std::vector<int64_t> lengths_, quantized_;
  int64_t most_pages_ = 1, layer_bytes_ = 0, count_ = 1, turn_ = 0;
  std::vector<int32_t> table_;
  std::unique_ptr<Memory> pool_;
  std::vector<uint16_t> sink_k_, sink_v_, window_k_, window_v_;
  std::vector<int16_t> order_;      // of the keys, with classes
  std::vector<float> q_, k_scale_;  // k_scale_: the largest of every channel
  AttentionParams params_{};
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  Output want_[2];
  double largest_scaled_query_ = 0;
};

}  // namespace kivi::bench
