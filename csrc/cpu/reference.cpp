// The scalar kernels for the dense form and for attention, written for reading. fp32 arithmetic without fused
// operations: this file and the vector kernels are compiled with -ffp-contract=off. Quantisation: KIVI (arXiv
// 2402.02750), section
// 3. Attention: online softmax over tiles of 128 keys, so that no buffer grows with the number of tokens.
#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/plan.h"
#include "format/codes.h"
#include "format/group.h"
#include "format/half.h"

namespace kivi::cpu {

// ---------------------------------------------------------------------------------------------- dense quantise

void scalar_quantize_columns(const QuantizeParams& p, int64_t o, int64_t begin, int64_t end) {
  const int64_t groups = ceil_div(p.n, p.group_size);
  const int64_t row_bytes = dense_bytes(p.n, p.bits);
  const float top = top_code(p.bits);
  for (int64_t j = begin; j < end; j++) {
    uint8_t* codes = p.codes == nullptr ? nullptr : p.codes + o * row_bytes * p.inner + j;
    for (int64_t i = 0; codes != nullptr && i < row_bytes; i++) codes[i * p.inner] = 0;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t start = g * p.group_size;
      const Strided x{advance(p.x, p.type, o * p.x_outer_stride + start * p.x_n_stride + j * p.x_inner_stride), p.type,
                      p.x_n_stride, std::min(p.group_size, p.n - start)};
      const GroupRange range = group_range(x);
      const Quantizer q = range.finite ? Quantizer{range.span / top, range.lo + 0.0f, top} : not_finite(top);
      const int64_t at = (o * groups + g) * p.inner + j;
      if (p.scale != nullptr) p.scale[at] = q.scale;
      if (p.zero != nullptr) p.zero[at] = q.zero;
      for (int64_t i = 0; i < x.count; i++) {
        const uint32_t code = q.code(x[i]);
        if (codes != nullptr) add_dense_code(codes, p.inner, p.bits, start + i, code);
        if (p.values != nullptr) p.values[(o * p.n + start + i) * p.inner + j] = q.value(code);
      }
    }
  }
}

void scalar_dequantize_columns(const DequantizeParams& p, int64_t o, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j++) {
    const uint8_t* codes = p.codes + o * p.codes_strides[0] + j * p.codes_strides[2];
    for (int64_t i = 0; i < p.n; i++) {
      const int64_t g = i / p.group_size;
      const Quantizer q{p.scale[o * p.scale_strides[0] + g * p.scale_strides[1] + j * p.scale_strides[2]],
                        p.zero[o * p.zero_strides[0] + g * p.zero_strides[1] + j * p.zero_strides[2]], 0};
      store_element(p.out, p.type, (o * p.n + i) * p.inner + j,
                    q.value(load_dense_code(codes, p.codes_strides[1], p.bits, i)));
    }
  }
}

void scalar_quantize(const QuantizeParams& params, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(params.inner, kInnerBlock);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit % blocks * kInnerBlock;
    scalar_quantize_columns(params, unit / blocks, first, std::min(first + kInnerBlock, params.inner));
  }
}

void scalar_dequantize(const DequantizeParams& params, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(params.inner, kInnerBlock);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit % blocks * kInnerBlock;
    scalar_dequantize_columns(params, unit / blocks, first, std::min(first + kInnerBlock, params.inner));
  }
}

// ---------------------------------------------------------------------------------------------- attention

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTileKeys = 128;

// Sixteen partial sums: a shorter chain of roundings than one sum.
float dot(const float* a, const float* b, int64_t n) {
  float part[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int64_t l = 0; l < 16; l++) {
      const float product = a[i + l] * b[i + l];
      part[l] += product;
    }
  }
  for (int64_t l = 0; i < n; i++, l++) {
    const float product = a[i] * b[i];
    part[l] += product;
  }
  for (int64_t width = 8; width > 0; width /= 2) {
    for (int64_t l = 0; l < width; l++) part[l] += part[l + width];
  }
  return part[0];
}

// One item at work: its query rows, their running softmax, and a tile of dequantised keys and values.
class Item {
 public:
  Item(const AttentionParams& params, const AttentionItem& item)
      : p_(params),
        item_(item),
        ranges_(key_ranges(params, item.batch)),
        head_dim_(params.format.head_dim),
        value_dim_(params.format.value_head_dim),
        v_channels_(params.layout.v_channels),
        queries_(static_cast<size_t>(item.num_rows * head_dim_)),
        acc_(static_cast<size_t>(item.num_rows * v_channels_)),
        max_(static_cast<size_t>(item.num_rows), -kInfinity),
        sum_(static_cast<size_t>(item.num_rows)),
        keys_(static_cast<size_t>(kTileKeys * head_dim_)),
        values_(static_cast<size_t>(kTileKeys * value_dim_)),
        tile_acc_(static_cast<size_t>(value_dim_)),
        order_(head_order(params, item.batch, item.kv_head)) {
    for (int64_t row = 0; row < item.num_rows; row++) {
      const QueryRow r = query_row(p_, item_, row);
      const int64_t at = item.batch * p_.q_batch_stride + r.head * p_.q_head_stride + r.query * p_.q_row_stride;
      for (int64_t d = 0; d < head_dim_; d++) {
        queries_[static_cast<size_t>(row * head_dim_ + d)] = load_element(p_.q, p_.q_type, at + d);
      }
    }
  }

  void run(float* partials) {
    const int64_t batch_head = item_.batch * p_.format.num_kv_heads + item_.kv_head;
    if (item_.exact_keys) {
      for (int64_t t = 0; t < ranges_.sink; t++) {
        const int64_t slot = batch_head * p_.format.sink_length + t;
        add_exact(t, p_.sink_k, slot * head_dim_, p_.sink_v, slot * value_dim_, p_.cache_type);
      }
    }
    for (int64_t page = item_.first_page; page < item_.first_page + item_.num_pages; page++) add_page(page);
    if (item_.exact_keys) {
      const int64_t capacity = window_capacity(p_.format);
      for (int64_t t = ranges_.window_begin; t < ranges_.cached; t++) {
        const int64_t slot = batch_head * capacity + (t - p_.format.sink_length) % capacity;
        add_exact(t, p_.window_k, slot * head_dim_, p_.window_v, slot * value_dim_, p_.cache_type);
      }
      for (int64_t t = 0; t < ranges_.fresh; t++) {
        const int64_t k_at =
            item_.batch * p_.new_k_strides[0] + item_.kv_head * p_.new_k_strides[1] + t * p_.new_k_strides[2];
        const int64_t v_at =
            item_.batch * p_.new_v_strides[0] + item_.kv_head * p_.new_v_strides[1] + t * p_.new_v_strides[2];
        add_exact(ranges_.cached + t, p_.new_k, k_at, p_.new_v, v_at, p_.new_type);
      }
    }
    flush();
    finish(partials);
  }

 private:
  // The next place of the tile, for the key at `position`. Keys of a tile follow one another.
  int64_t next_slot(int64_t position) {
    if (count_ == kTileKeys || (count_ > 0 && position != first_ + count_)) flush();
    if (count_ == 0) first_ = position;
    return count_++;
  }

  void add_exact(int64_t position, const void* k, int64_t k_at, const void* v, int64_t v_at, Element type) {
    const int64_t slot = next_slot(position);
    for (int64_t d = 0; d < head_dim_; d++) {
      keys_[static_cast<size_t>(slot * head_dim_ + d)] = load_element(k, type, k_at + d);
    }
    for (int64_t d = 0; d < value_dim_; d++) {
      values_[static_cast<size_t>(slot * value_dim_ + d)] = load_element(v, type, v_at + d);
    }
  }

  void add_page(int64_t page) {
    const int64_t group = p_.format.group_size;
    const int64_t begin = page * kPageTokens;
    const int64_t end = std::min(begin + kPageTokens, ranges_.quantized);
    for (int64_t t = begin; t < end; t++) {
      const uint8_t* record = record_address(p_, item_.batch, item_.kv_head, page, (t - begin) / group);
      const int64_t slot = next_slot(p_.format.sink_length + t);
      decode_key_row(p_.format, p_.layout, record, t % group, order_, &keys_[static_cast<size_t>(slot * head_dim_)]);
      decode_value_row(p_.format, p_.layout, record, t % group, &values_[static_cast<size_t>(slot * value_dim_)]);
    }
  }

  // What the mask says about a key: what to add to its score, -inf if it is masked out.
  float mask_of(const QueryRow& row, int64_t position) const {
    if (p_.mask_type == MaskType::kNone) return 0.0f;
    const int64_t at = item_.batch * p_.mask_strides[0] + row.head * p_.mask_strides[1] +
                       row.query * p_.mask_strides[2] + position * p_.mask_strides[3];
    if (p_.mask_type == MaskType::kFloat32) return static_cast<const float*>(p_.mask)[at];
    return static_cast<const uint8_t*>(p_.mask)[at] != 0 ? 0.0f : -kInfinity;
  }

  // In log2 units, the mask included.
  float score(const QueryRow& row, const float* query, int64_t slot, int64_t query_at, float mask) const {
    float s = dot(query, &keys_[static_cast<size_t>(slot * head_dim_)], head_dim_) * p_.scale;
    if (p_.softcap > 0.0f) s = p_.softcap * std::tanh(s / p_.softcap);
    if (p_.alibi_slopes != nullptr) {
      const float slope = p_.alibi_slopes[item_.batch * p_.alibi_batch_stride + row.head];
      const float bias = slope * static_cast<float>(first_ + slot - query_at);
      s += bias;
    }
    return (s + mask) * kLog2E;
  }

  // Takes the keys of the tile into the running softmax of every row.
  void flush() {
    for (int64_t row = 0; row < item_.num_rows; row++) {
      const QueryRow r = query_row(p_, item_, row);
      if (r.query < ranges_.rows) attend_tile(row, r);
    }
    count_ = 0;
  }

  void attend_tile(int64_t row, const QueryRow& r) {
    const int64_t query_at = query_position(ranges_, r.query);
    const SeenKeys seen = seen_keys(p_, ranges_, query_at);
    const int64_t begin = std::max<int64_t>(seen.begin - first_, 0);
    const int64_t end = std::min(seen.end - first_, count_);
    float scores[kTileKeys];
    bool kept[kTileKeys];
    float tile_max = -kInfinity;
    for (int64_t i = begin; i < end; i++) {
      const float mask = mask_of(r, first_ + i);
      kept[i] = mask != -kInfinity;
      if (!kept[i]) continue;
      scores[i] = score(r, &queries_[static_cast<size_t>(row * head_dim_)], i, query_at, mask);
      if (scores[i] > tile_max) tile_max = scores[i];  // a NaN is passed over here and comes back in the weights
    }
    // The sums of a tile stand for themselves before they join the running ones: fewer roundings at the size of the
    // whole sum.
    std::fill(tile_acc_.begin(), tile_acc_.end(), 0.0f);
    float tile_sum = 0.0f;
    float& max = max_[static_cast<size_t>(row)];
    const float new_max = std::max(max, tile_max);
    for (int64_t i = begin; i < end; i++) {
      if (!kept[i]) continue;
      const float weight = scores[i] == -kInfinity ? 0.0f : std::exp2(scores[i] - new_max);
      const float* value = &values_[static_cast<size_t>(i * value_dim_)];
      for (int64_t d = 0; d < value_dim_; d++) {
        const float product = weight * value[d];
        tile_acc_[static_cast<size_t>(d)] += product;
      }
      tile_sum += weight;
    }
    const float factor = new_max > max ? std::exp2(max - new_max) : 1.0f;
    float* acc = &acc_[static_cast<size_t>(row * v_channels_)];
    for (int64_t d = 0; d < value_dim_; d++) acc[d] = acc[d] * factor + tile_acc_[static_cast<size_t>(d)];
    float& sum = sum_[static_cast<size_t>(row)];
    sum = sum * factor + tile_sum;
    max = new_max;
  }

  void finish(float* partials) {
    for (int64_t row = 0; row < item_.num_rows; row++) {
      const float* acc = &acc_[static_cast<size_t>(row * v_channels_)];
      const float max = max_[static_cast<size_t>(row)];
      const float sum = sum_[static_cast<size_t>(row)];
      if (item_.partial < 0) {
        finish_row(p_, item_, row, acc, max, sum);
        continue;
      }
      float* cell = partials + item_.partial + row * partial_row_floats(p_);
      std::copy(acc, acc + v_channels_, cell);
      cell[v_channels_] = max;
      cell[v_channels_ + 1] = sum;
    }
  }

  const AttentionParams& p_;
  const AttentionItem& item_;
  const KeyRanges ranges_;
  const int64_t head_dim_, value_dim_, v_channels_;
  std::vector<float> queries_;     // [row][D]
  std::vector<float> acc_;         // [row][v_channels]
  std::vector<float> max_, sum_;   // [row]
  std::vector<float> keys_;        // [kTileKeys][D]
  std::vector<float> values_;      // [kTileKeys][Dv]
  std::vector<float> tile_acc_;    // [Dv]
  const int16_t* order_;           // of the keys
  int64_t first_ = 0, count_ = 0;  // the tile holds the keys [first_, first_ + count_)
};

}  // namespace

void scalar_attention(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                      float* partials) {
  for (int64_t i = begin; i < end; i++) Item(params, items[i]).run(partials);
}

}  // namespace kivi::cpu
