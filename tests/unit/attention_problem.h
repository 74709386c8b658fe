// A cache with random content for the attention tests: pool, block table, sink and window, new tokens,
// queries, and the dequantised keys and values in double, with a softmax in double to compare with. What the kernels
// must not read is poisoned with 0xFF bytes (NaN as float, a huge code as codes).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "format/codes.h"
#include "format/half.h"
#include "tests/unit/oracle.h"

namespace kivi::test {

using cpu::AttentionItem;

inline Format make_format(int64_t heads, int64_t d, int64_t dv, int64_t k_bits, int64_t v_bits, int64_t g,
                          int64_t residual, int64_t sink) {
  Format f;
  f.num_kv_heads = heads;
  f.head_dim = d;
  f.value_head_dim = dv;
  f.k_bits = k_bits;
  f.v_bits = v_bits;
  f.group_size = g;
  f.residual_length = residual;
  f.sink_length = sink;
  return f;
}

// 64-byte aligned bytes, all 0xFF.
class Bytes {
 public:
  explicit Bytes(int64_t n = 0) : data_(static_cast<size_t>(n) + 64, 0xFF) {}
  uint8_t* get() {
    const auto at = reinterpret_cast<uintptr_t>(data_.data());
    return data_.data() + (64 - at % 64) % 64;
  }

 private:
  std::vector<uint8_t> data_;
};

struct Settings {
  Format format;
  std::vector<int64_t> lengths{512};  // cached tokens of each row of the batch
  int64_t heads = 4, q_len = 1;
  std::vector<int64_t> new_lengths;  // empty: no new tokens
  int64_t new_len = 0;               // their padded number
  bool rows_follow_new = false;
  Element q_type = Element::kFloat32, cache_type = Element::kFloat32, new_type = Element::kFloat32;
  bool causal = true;
  int64_t window = 0;
  float softcap = 0;
  bool sinks = false, alibi = false;
  MaskType mask = MaskType::kNone;
  bool broadcast_mask = false;  // over heads and queries
  double top_score = 4.0;       // the largest |score| of all, about
  unsigned seed = 1;
  // Changes K and V of one (row, kv head) before they are stored: [tokens][D], [tokens][Dv].
  std::function<void(int64_t, int64_t, std::vector<float>&, std::vector<float>&)> edit;
  // Changes all queries, [B][Hq][Lq][D], after they were scaled to `top_score`.
  std::function<void(std::vector<float>&)> edit_q;
};

inline Settings settings(const Format& f, std::vector<int64_t> lengths, int64_t heads, int64_t q_len = 1) {
  Settings s;
  s.format = f;
  s.lengths = std::move(lengths);
  s.heads = heads;
  s.q_len = q_len;
  return s;
}

class Problem {
 public:
  AttentionParams params{};
  Format format;
  RecordLayout layout;
  // Oracle: dequantised, [b][kv head][token][channel].
  std::vector<std::vector<double>> k, v;
  std::vector<double> q;  // [B][Hq][Lq][D]
  std::vector<int64_t> lengths, quantized, new_lengths, totals;

  explicit Problem(const Settings& s) : format(s.format), layout(record_layout(s.format)), rng_(s.seed) {
    lengths = s.lengths;
    new_lengths = s.new_lengths;
    if (new_lengths.empty()) new_lengths.assign(lengths.size(), 0);
    for (size_t b = 0; b < lengths.size(); b++) {
      quantized.push_back(quantized_count(format, lengths[b]));
      totals.push_back(lengths[b] + new_lengths[b]);
    }
    fill_params(s);
    fill_cache(s);
    fill_queries(s);
    fill_rules(s);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  int64_t batch() const { return static_cast<int64_t>(lengths.size()); }
  int64_t out_size() const { return params.batch * params.num_heads * params.q_len * format.value_head_dim; }
  int64_t lse_size() const { return params.batch * params.num_heads * params.q_len; }

  struct Result {
    std::vector<double> out, lse;
  };

  Result oracle() const {
    Result result;
    for (int64_t b = 0; b < batch(); b++) {
      for (int64_t h = 0; h < params.num_heads; h++) {
        for (int64_t i = 0; i < params.q_len; i++) oracle_row(b, h, i, result);
      }
    }
    return result;
  }

  // Runs the kernels, the items cut at `cuts` into calls.
  Result run(const cpu::Kernels& kernels, bool exact, const std::vector<int64_t>& cuts = {}) {
    params.exact = exact;
    Bytes out(out_size() * 4);
    std::vector<float> lse(static_cast<size_t>(lse_size()), -123.0f);
    params.out = out.get();
    params.lse = lse.data();
    int64_t floats = 0;
    const int64_t count = cpu::attention_plan(params, nullptr, &floats);
    std::vector<AttentionItem> items(static_cast<size_t>(count));
    cpu::attention_plan(params, items.data(), &floats);
    Bytes partials(floats * 4);
    int64_t begin = 0;
    const auto until = [&](int64_t end) {
      kernels.attention(params, items.data(), begin, end, reinterpret_cast<float*>(partials.get()));
      begin = end;
    };
    for (const int64_t cut : cuts) {
      if (cut > begin && cut < count) until(cut);
    }
    until(count);
    cpu::attention_merge(params, items.data(), 0, count, reinterpret_cast<float*>(partials.get()));
    Result result;
    for (int64_t i = 0; i < out_size(); i++) result.out.push_back(load_element(params.out, params.q_type, i));
    result.lse.assign(lse.begin(), lse.end());
    return result;
  }

  // The largest |q * scale * K scale| over the pages, natural units: what the error of "fast" grows with.
  double largest_scaled_query() const { return largest_scaled_query_; }

 private:
  void fill_params(const Settings& s) {
    AttentionParams& p = params;
    p.format = format;
    p.layout = layout;
    p.batch = batch();
    p.num_heads = s.heads;
    p.q_len = s.q_len;
    p.q_type = s.q_type;
    p.cache_type = s.cache_type;
    p.new_type = s.new_type;
    p.lengths = lengths.data();
    p.quantized_lengths = quantized.data();
    p.page_bytes = page_bytes(format).value;
    p.new_len = s.new_len;
    p.new_lengths = s.new_lengths.empty() ? nullptr : new_lengths.data();
    p.rows_follow_new = s.rows_follow_new;
    p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(format.head_dim)));
    p.softcap = s.softcap;
    p.causal = s.causal;
    p.window = s.window;
  }

  // Channels 3, 19, 35, ... are outliers: four of 5x, four of 30x.
  std::vector<float> random_keys(int64_t tokens) {
    std::vector<float> x(static_cast<size_t>(tokens * format.head_dim));
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t d = 0; d < format.head_dim; d++) {
        float value = normal_(rng_);
        if (d % 16 == 3 && d < 128) value = (value + 0.5f) * (d % 32 == 3 ? 5.0f : 30.0f);
        x[static_cast<size_t>(t * format.head_dim + d)] = value;
      }
    }
    return x;
  }

  static double put(void* array, Element type, int64_t i, float x) {
    store_element(array, type, i, x);
    return load_element(array, type, i);
  }

  void fill_cache(const Settings& s) {
    const Format& f = format;
    const int64_t heads = f.num_kv_heads, capacity = window_capacity(f), size = element_bytes(s.cache_type);
    int64_t pages = 1;  // page 0 stays poisoned
    int64_t most = 1;
    for (const int64_t m : quantized) most = std::max(most, ceil_div(m, kPageTokens));
    block_table_.assign(static_cast<size_t>(most * batch()), 0);
    for (int64_t b = 0; b < batch(); b++) {
      for (int64_t i = 0; i < ceil_div(quantized[static_cast<size_t>(b)], kPageTokens); i++) {
        block_table_[static_cast<size_t>(b * most + i)] = static_cast<int32_t>(pages++);
      }
    }
    // Pages in another order than the tokens.
    std::vector<int32_t> order;
    for (int32_t i = 1; i < pages; i++) order.push_back(i);
    std::shuffle(order.begin(), order.end(), rng_);
    for (auto& id : block_table_) id = id > 0 ? order[static_cast<size_t>(id - 1)] : 0;
    pool_ = Bytes(pages * params.page_bytes);
    params.pool_pages = pages;
    if (f.num_key_classes > 0) {
      for (int64_t row = 0; row < batch() * heads; row++) {
        std::vector<int16_t> channels(static_cast<size_t>(f.head_dim));
        for (size_t i = 0; i < channels.size(); i++) channels[i] = static_cast<int16_t>(i);
        std::shuffle(channels.begin(), channels.end(), rng_);
        k_order_.insert(k_order_.end(), channels.begin(), channels.end());
      }
      params.k_order = k_order_.data();
    }
    sink_k_ = Bytes(batch() * heads * f.sink_length * f.head_dim * size);
    sink_v_ = Bytes(batch() * heads * f.sink_length * f.value_head_dim * size);
    window_k_ = Bytes(batch() * heads * capacity * f.head_dim * size);
    window_v_ = Bytes(batch() * heads * capacity * f.value_head_dim * size);
    const int64_t new_size = element_bytes(s.new_type);
    // New tokens as [B][Tn][Hkv][D]: the head is not the slowest stride.
    new_k_ = Bytes(batch() * s.new_len * heads * f.head_dim * new_size);
    new_v_ = Bytes(batch() * s.new_len * heads * f.value_head_dim * new_size);
    AttentionParams& p = params;
    p.pool = pool_.get();
    p.block_table = block_table_.data();
    p.block_table_stride = most;
    p.sink_k = sink_k_.get(), p.sink_v = sink_v_.get(), p.window_k = window_k_.get(), p.window_v = window_v_.get();
    p.new_k = s.new_len > 0 ? new_k_.get() : nullptr;
    p.new_v = s.new_len > 0 ? new_v_.get() : nullptr;
    const int64_t k_strides[3] = {s.new_len * heads * f.head_dim, f.head_dim, heads * f.head_dim};
    const int64_t v_strides[3] = {s.new_len * heads * f.value_head_dim, f.value_head_dim, heads * f.value_head_dim};
    std::copy(k_strides, k_strides + 3, p.new_k_strides);
    std::copy(v_strides, v_strides + 3, p.new_v_strides);
    for (int64_t b = 0; b < batch(); b++) {
      for (int64_t h = 0; h < heads; h++) fill_head(s, b, h);
    }
  }

  void fill_head(const Settings& s, int64_t b, int64_t h) {
    const Format& f = format;
    const int64_t d = f.head_dim, dv = f.value_head_dim, n = lengths[static_cast<size_t>(b)];
    const int64_t m = quantized[static_cast<size_t>(b)], total = totals[static_cast<size_t>(b)];
    std::vector<float> keys = random_keys(total), values(static_cast<size_t>(total * dv));
    for (auto& x : values) x = normal_(rng_);
    if (s.edit) s.edit(b, h, keys, values);
    std::vector<double> k_double(keys.size()), v_double(values.size());
    const int64_t row = b * f.num_kv_heads + h, capacity = window_capacity(f);
    for (int64_t t = 0; t < total; t++) {
      void *k_array, *v_array;
      Element type = s.cache_type;
      int64_t k_at, v_at;
      if (t >= n) {
        type = s.new_type;
        k_array = new_k_.get(), v_array = new_v_.get();
        const AttentionParams& p = params;
        k_at = b * p.new_k_strides[0] + h * p.new_k_strides[1] + (t - n) * p.new_k_strides[2];
        v_at = b * p.new_v_strides[0] + h * p.new_v_strides[1] + (t - n) * p.new_v_strides[2];
      } else if (t < f.sink_length) {
        k_array = sink_k_.get(), v_array = sink_v_.get();
        k_at = (row * f.sink_length + t) * d, v_at = (row * f.sink_length + t) * dv;
      } else if (t < f.sink_length + m) {
        continue;
      } else {
        const int64_t slot = (t - f.sink_length) % capacity;
        k_array = window_k_.get(), v_array = window_v_.get();
        k_at = (row * capacity + slot) * d, v_at = (row * capacity + slot) * dv;
      }
      for (int64_t i = 0; i < d; i++) {
        k_double[static_cast<size_t>(t * d + i)] = put(k_array, type, k_at + i, keys[static_cast<size_t>(t * d + i)]);
      }
      for (int64_t i = 0; i < dv; i++) {
        v_double[static_cast<size_t>(t * dv + i)] =
            put(v_array, type, v_at + i, values[static_cast<size_t>(t * dv + i)]);
      }
    }
    for (int64_t t = 0; t < m; t += f.group_size) {
      const int64_t records = kPageTokens / f.group_size, page = t / kPageTokens;
      const int64_t id = block_table_[static_cast<size_t>(b * params.block_table_stride + page)];
      uint8_t* record =
          pool_.get() + id * params.page_bytes + (h * records + t % kPageTokens / f.group_size) * layout.bytes;
      const int64_t from = f.sink_length + t;
      cpu::EncodeParams e{&format,
                          &layout,
                          &keys[static_cast<size_t>(from * d)],
                          &values[static_cast<size_t>(from * dv)],
                          d,
                          dv,
                          Element::kFloat32,
                          record,
                          head_order(b, h)};
      cpu::kernels_for(cpu::Isa::kScalar)->encode(e);
      poison_padding(record);
      decode_record(record, head_order(b, h), &k_double[static_cast<size_t>(from * d)],
                    &v_double[static_cast<size_t>(from * dv)]);
    }
    k.push_back(std::move(k_double));
    v.push_back(std::move(v_double));
  }

  struct Group {
    double scale, zero;
  };

  // Scale and zero of one group, from the text of kivi/format.h.
  Group group_at(const uint8_t* record, int64_t scales, int64_t zeros, int64_t i, int64_t bits, bool symmetric) const {
    const double middle = 0.5 * static_cast<double>((1 << bits) - 1);
    if (layout.scale_bytes == 1) {
      const int byte = record[scales + i], exponent = byte >> 3, mantissa = byte & 7;
      if (byte == 255) return {0, std::nan("")};
      const double scale = exponent == 0 ? std::ldexp(mantissa, -17) : std::ldexp(8 + mantissa, exponent - 18);
      const double step = bits == 8 ? 8 : std::ldexp(1.0, static_cast<int>(bits) - 5);
      return {scale, symmetric ? -middle * scale : static_cast<int8_t>(record[zeros + i]) * step * scale};
    }
    const Element type = layout.scale_bytes == 2 ? Element::kFloat16 : Element::kFloat32;
    const double scale = load_element(record + scales, type, i);
    if (std::isnan(scale)) return {0, scale};
    return {scale, symmetric ? -middle * scale : load_element(record + zeros, type, i)};
  }

  // A word of 32 codes of 1 bit may have 16 channels or tokens only; the other bits must not matter.
  void poison_padding(uint8_t* record) const {
    const Format& f = format;
    const auto spoil = [&](int64_t word) {
      for (int i = 1; i < 4; i += 2) record[word + i] = 0xFF;  // elements 16 to 31 have bits 8 to 15 and 24 to 31
    };
    for (int plane = 0; plane < 2; plane++) {
      for (int64_t c = 0; c < layout.num_key_classes; c++) {
        const RecordLayout one = key_class_layout(layout, c);
        const int64_t bits = layout.key_classes[c].bits;
        if (plane >= num_planes(bits) || plane_bits(bits, plane) != 1 || one.k_channels % 32 == 0) continue;
        for (int64_t t = 0; t < f.group_size; t++) {
          spoil(k_code_place(one, bits, plane, t, one.k_channels - 1).word);
        }
      }
      if (plane < num_planes(f.v_bits) && plane_bits(f.v_bits, plane) == 1 && f.group_size == 16) {
        for (int64_t i = 0; i < layout.v_channels; i++) {
          spoil(v_code_place(layout, f.v_bits, plane, 0, i).word);
        }
      }
    }
  }

  // The order of one head's keys: a different one for each, null without classes.
  const int16_t* head_order(int64_t b, int64_t h) const {
    return k_order_.empty() ? nullptr : k_order_.data() + (b * format.num_kv_heads + h) * format.head_dim;
  }

  void decode_record(const uint8_t* record, const int16_t* order, double* keys, double* values) {
    const Format& f = format;
    for (int64_t t = 0; t < f.group_size; t++) {
      for (int64_t c = 0; c < layout.num_key_classes; c++) {
        const KeyClassLayout& own = layout.key_classes[c];
        const RecordLayout one = key_class_layout(layout, c);
        for (int64_t i = 0; i < own.channels; i++) {
          const int64_t channel = order != nullptr ? order[own.first + i] : i;
          const Group g = group_at(record, one.k_scale, one.k_zero, i, own.bits, false);
          largest_k_scale_.resize(static_cast<size_t>(f.head_dim), 0.0);
          auto& top = largest_k_scale_[static_cast<size_t>(channel)];
          top = std::max(top, g.scale);
          keys[t * f.head_dim + channel] = g.zero + g.scale * load_code(Side::kKey, one, own.bits, record, t, i);
        }
      }
      const int64_t per_group = f.v_group_size == 0 ? f.group_size : f.v_group_size;
      std::vector<double> row;
      for (int64_t i = 0; i < f.value_head_dim; i++) {
        const int64_t at = i / per_group * f.group_size + t;
        const Group g = group_at(record, layout.v_scale, layout.v_zero, at, f.v_bits, f.v_symmetric);
        row.push_back(g.zero + g.scale * load_code(Side::kValue, layout, f.v_bits, record, t, i));
      }
      if (f.v_rotated) row = cpu::oracle::rotated(row, true);
      std::copy(row.begin(), row.end(), values + t * f.value_head_dim);
    }
  }

  void fill_queries(const Settings& s) {
    const int64_t d = format.head_dim, rows = batch() * s.heads * s.q_len;
    AttentionParams& p = params;
    // [B][Lq][Hq][D], as a model has them.
    p.q_row_stride = s.heads * d, p.q_head_stride = d, p.q_batch_stride = s.q_len * s.heads * d;
    q_ = Bytes(rows * d * element_bytes(s.q_type));
    p.q = q_.get();
    std::vector<float> random(static_cast<size_t>(rows * d));
    for (auto& x : random) x = normal_(rng_);
    const double factor = s.top_score / std::max(largest_score(random), 1e-30);
    for (auto& x : random) x = static_cast<float>(x * factor);
    if (s.edit_q) s.edit_q(random);
    q.resize(random.size());
    for (int64_t row = 0; row < rows; row++) {
      const int64_t b = row / (s.heads * s.q_len), h = row / s.q_len % s.heads, i = row % s.q_len;
      for (int64_t c = 0; c < d; c++) {
        const int64_t at = b * p.q_batch_stride + h * p.q_head_stride + i * p.q_row_stride + c;
        const auto n = static_cast<size_t>(row * d + c);
        q[n] = put(q_.get(), s.q_type, at, random[n]);
        if (largest_k_scale_.empty()) continue;
        const double scaled = std::fabs(q[n]) * p.scale * largest_k_scale_[static_cast<size_t>(c)];
        largest_scaled_query_ = std::max(largest_scaled_query_, scaled);
      }
    }
  }

  double largest_score(const std::vector<float>& queries) const {
    const int64_t d = format.head_dim, rows = batch() * params.num_heads * params.q_len;
    double top = 0;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t b = row / (params.num_heads * params.q_len), h = row / params.q_len % params.num_heads;
      const auto head = static_cast<size_t>(b * format.num_kv_heads + h / (params.num_heads / format.num_kv_heads));
      for (int64_t t = 0; t < totals[static_cast<size_t>(b)]; t++) {
        double x = 0;
        for (int64_t c = 0; c < d; c++) {
          x += static_cast<double>(queries[static_cast<size_t>(row * d + c)]) * k[head][static_cast<size_t>(t * d + c)];
        }
        if (std::isfinite(x)) top = std::max(top, std::fabs(x) * static_cast<double>(params.scale));
      }
    }
    return top;
  }

  void fill_rules(const Settings& s) {
    AttentionParams& p = params;
    for (int64_t h = 0; h < s.heads; h++) sinks_.push_back(normal_(rng_));
    for (int64_t h = 0; h < s.heads * batch(); h++) alibi_.push_back(0.01f + 0.02f * static_cast<float>(h % 5));
    p.sinks = s.sinks ? sinks_.data() : nullptr;
    p.alibi_slopes = s.alibi ? alibi_.data() : nullptr;
    p.alibi_batch_stride = s.heads;
    p.mask_type = s.mask;
    if (s.mask == MaskType::kNone) return;
    const int64_t keys = *std::max_element(totals.begin(), totals.end());
    p.mask_keys = keys;
    // Keys two apart, so that the stride of the last dimension counts.
    p.mask_strides[3] = 2;
    p.mask_strides[2] = s.broadcast_mask ? 0 : 2 * keys + 1;
    p.mask_strides[1] = s.broadcast_mask ? 0 : s.q_len * p.mask_strides[2];
    p.mask_strides[0] = (s.broadcast_mask ? 1 : s.heads * s.q_len) * (2 * keys + 1);
    const int64_t size = batch() * p.mask_strides[0];
    mask_ = Bytes(size * 4);
    for (int64_t i = 0; i < size; i++) {
      const bool keep = rng_() % 3 != 0;
      if (s.mask == MaskType::kBool) {
        mask_.get()[i] = keep;
      } else {
        const float x = keep ? normal_(rng_) : -std::numeric_limits<float>::infinity();
        std::memcpy(mask_.get() + 4 * i, &x, 4);
      }
    }
    p.mask = mask_.get();
  }

  void oracle_row(int64_t b, int64_t h, int64_t i, Result& result) const {
    const AttentionParams& p = params;
    const int64_t total = totals[static_cast<size_t>(b)], d = format.head_dim, dv = format.value_head_dim;
    const int64_t rows = p.rows_follow_new ? new_lengths[static_cast<size_t>(b)] : p.q_len;
    const int64_t position = total - rows + i;
    const auto head = static_cast<size_t>(b * format.num_kv_heads + h / (p.num_heads / format.num_kv_heads));
    const double* query = &q[static_cast<size_t>(((b * p.num_heads + h) * p.q_len + i) * d)];
    std::vector<double> out(static_cast<size_t>(dv), 0.0);
    double max = -INFINITY, sum = 0, lse = -INFINITY;
    bool any = false, bad = false;
    if (i < rows) {
      std::vector<double> score(static_cast<size_t>(total), -INFINITY);
      for (int64_t t = 0; t < total; t++) {
        if (!oracle_sees(b, h, i, position, t)) continue;
        double x = 0;
        for (int64_t c = 0; c < d; c++) x += query[c] * k[head][static_cast<size_t>(t * d + c)];
        x *= p.scale;
        if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
        if (p.alibi_slopes != nullptr) {
          x += static_cast<double>(p.alibi_slopes[b * p.alibi_batch_stride + h]) * static_cast<double>(t - position);
        }
        if (p.mask_type == MaskType::kFloat32) {
          x += static_cast<const float*>(p.mask)[mask_at(b, h, i, t)];
        }
        any = true;
        bad = bad || !std::isfinite(x);
        score[static_cast<size_t>(t)] = x;
        max = std::max(max, x);
      }
      const double sink = p.sinks != nullptr ? static_cast<double>(p.sinks[h]) : -INFINITY;
      const double top = std::max(max, sink);
      for (int64_t t = 0; t < total; t++) {
        if (!oracle_sees(b, h, i, position, t)) continue;
        const double w = std::exp(score[static_cast<size_t>(t)] - top);
        sum += w;
        for (int64_t c = 0; c < dv; c++) out[static_cast<size_t>(c)] += w * v[head][static_cast<size_t>(t * dv + c)];
      }
      if (p.sinks != nullptr) sum += std::exp(sink - top);
      if (any || p.sinks != nullptr) lse = top + std::log(sum);
    }
    for (const double x : out) result.out.push_back(!any ? 0.0 : bad ? NAN : x / sum);
    result.lse.push_back(bad ? NAN : lse);
  }

  int64_t mask_at(int64_t b, int64_t h, int64_t i, int64_t t) const {
    const int64_t* s = params.mask_strides;
    return b * s[0] + h * s[1] + i * s[2] + t * s[3];
  }

  bool oracle_sees(int64_t b, int64_t h, int64_t i, int64_t position, int64_t t) const {
    const AttentionParams& p = params;
    if (p.causal && t > position) return false;
    if (p.window > 0 && t <= position - p.window) return false;
    if (p.mask_type == MaskType::kBool) return static_cast<const uint8_t*>(p.mask)[mask_at(b, h, i, t)] != 0;
    if (p.mask_type == MaskType::kFloat32) {
      return static_cast<const float*>(p.mask)[mask_at(b, h, i, t)] > -std::numeric_limits<float>::infinity();
    }
    return true;
  }

  std::mt19937 rng_;
  std::normal_distribution<float> normal_;
  Bytes pool_, sink_k_, sink_v_, window_k_, window_v_, new_k_, new_v_, q_, mask_;
  std::vector<int32_t> block_table_;
  std::vector<float> sinks_, alibi_;
  std::vector<double> largest_k_scale_;
  std::vector<int16_t> k_order_;
  double largest_scaled_query_ = 0;
};

}  // namespace kivi::test
