// The scalar kernels, written for reading. fp32 arithmetic without fused operations: this file and the vector kernels
// are compiled with -ffp-contract=off. Quantisation: KIVI (arXiv 2402.02750), section 3. Attention: online softmax over
// tiles of 128 keys, so that no buffer grows with the number of tokens.
#include "cpu/reference.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/codes.h"
#include "cpu/half.h"
#include "cpu/plan.h"

namespace kivi::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------- groups

// Numbers `stride` elements apart.
struct Strided {
  const void* data;
  Element type;
  int64_t stride;
  int64_t count;

  float operator[](int64_t i) const { return load_element(data, type, i * stride); }
};

// The extremes of a group. Adding +0 makes a span of -0 into +0, so that no bit depends on which of two zeros came
// first; `shrunk` does the same to the zero point.
struct GroupRange {
  float lo = 0;
  float span = 0;
  bool finite = false;  // no NaN, no Inf, and the span does not overflow
};

GroupRange group_range(const Strided& x) {
  GroupRange r;
  float lo = kInfinity;
  float hi = -kInfinity;
  for (int64_t i = 0; i < x.count; i++) {
    const float value = x[i];
    if (!is_finite(value)) return r;
    lo = std::min(lo, value);
    hi = std::max(hi, value);
  }
  const float span = hi - lo;
  if (!is_finite(span)) return r;
  r.lo = lo;
  r.span = span + 0.0f;
  r.finite = true;
  return r;
}

struct Quantizer {
  float scale = 0;
  float zero = 0;
  float top = 0;  // largest code

  // A scale of 0 (also a subnormal one, if the thread treats those as 0) has code 0. The clamp comes before the
  // conversion.
  uint32_t code(float x) const {
    if (!(scale > 0.0f)) return 0;
    const float rounded = std::nearbyint((x - zero) / scale);
    return static_cast<uint32_t>(std::min(std::max(rounded, 0.0f), top));
  }

  float value(uint32_t code) const {
    const float product = static_cast<float>(code) * scale;
    return zero + product;
  }
};

Quantizer not_finite(float top) { return {0.0f, bits_float(kFloatNaN), top}; }

// The range shrunk around its middle to `shrink` of its width. With 1 it is the range itself: the margin is then +0.
Quantizer shrunk(const GroupRange& range, float shrink, float top) {
  const float span = range.span * shrink;
  return {span / top, range.lo + (range.span - span) * 0.5f, top};
}

float squared_error(const Strided& x, const Quantizer& q) {
  float sum = 0;
  for (int64_t i = 0; i < x.count; i++) {
    const float value = x[i];
    const float error = value - q.value(q.code(value));
    const float square = error * error;
    sum += square;
  }
  return sum;
}

float through_half(float x) { return half_to_float(float_to_half(x)); }

bool fits_half(const Quantizer& q) { return is_finite(through_half(q.scale)) && is_finite(through_half(q.zero)); }

// The stored scale and zero of what was computed. Widened: float16 values where they fit, each for itself.
Quantizer as_stored(const Quantizer& q, ScaleType type) {
  Quantizer stored = q;
  if (type == ScaleType::kFloat32) return stored;
  stored.scale = through_half(q.scale);
  stored.zero = through_half(q.zero);
  if (type == ScaleType::kWidened && !is_finite(stored.scale)) stored.scale = q.scale;
  if (type == ScaleType::kWidened && !is_finite(stored.zero)) stored.zero = q.zero;
  return stored;
}

// False if the format stores float16 and the group's scale or zero does not fit. In the search, a shrunk range that
// does not fit float16 is passed over (unless scales are float32 from the start), so that a widened cache chooses what
// a float16 one does.
bool choose_quantizer(const Strided& x, const Format& format, float top, Quantizer* chosen) {
  const GroupRange range = group_range(x);
  if (!range.finite) {
    *chosen = not_finite(top);
    return true;
  }
  const Quantizer plain = shrunk(range, 1.0f, top);
  *chosen = as_stored(plain, format.scale_type);
  if (format.scale_type == ScaleType::kFloat16 && !fits_half(plain)) return false;
  if (!format.range_search) return true;
  float best = squared_error(x, *chosen);
  for (int i = 1; i < kNumShrinks; i++) {
    const Quantizer candidate = shrunk(range, kShrinks[i], top);
    if (format.scale_type != ScaleType::kFloat32 && !fits_half(candidate)) continue;
    const Quantizer stored = as_stored(candidate, format.scale_type);
    const float error = squared_error(x, stored);
    if (error < best) {
      best = error;
      *chosen = stored;
    }
  }
  return true;
}

float top_code(int64_t bits) { return static_cast<float>((1 << bits) - 1); }

// ---------------------------------------------------------------------------------------------- records

float load_scale(const RecordLayout& layout, const uint8_t* section, int64_t i) {
  return load_element(section, layout.scale_bytes == 2 ? Element::kFloat16 : Element::kFloat32, i);
}

void store_scale(const RecordLayout& layout, uint8_t* section, int64_t i, float x) {
  if (layout.scale_bytes == 2) {
    reinterpret_cast<uint16_t*>(section)[i] = float_to_half(x);
  } else {
    reinterpret_cast<float*>(section)[i] = x;
  }
}

bool encode_keys(const EncodeParams& p) {
  const Format& f = *p.format;
  bool fits = true;
  for (int64_t d = 0; d < f.head_dim; d++) {
    const Strided x{advance(p.k, p.type, d), p.type, p.k_token_stride, f.group_size};
    Quantizer q;
    fits &= choose_quantizer(x, f, top_code(f.k_bits), &q);
    store_scale(*p.layout, p.record + p.layout->k_scale, d, q.scale);
    store_scale(*p.layout, p.record + p.layout->k_zero, d, q.zero);
    for (int64_t t = 0; t < f.group_size; t++) {
      add_code(Side::kKey, *p.layout, f.k_bits, p.record, t, d, q.code(x[t]));
    }
  }
  return fits;
}

bool encode_values(const EncodeParams& p) {
  const Format& f = *p.format;
  bool fits = true;
  for (int64_t t = 0; t < f.group_size; t++) {
    for (int64_t g = 0; g < p.layout->v_groups; g++) {
      const int64_t first = g * f.group_size;
      const Strided x{advance(p.v, p.type, t * p.v_token_stride + first), p.type, 1,
                      std::min(f.group_size, f.value_head_dim - first)};
      Quantizer q;
      fits &= choose_quantizer(x, f, top_code(f.v_bits), &q);
      store_scale(*p.layout, p.record + p.layout->v_scale, first + t, q.scale);
      store_scale(*p.layout, p.record + p.layout->v_zero, first + t, q.zero);
      for (int64_t i = 0; i < x.count; i++) {
        add_code(Side::kValue, *p.layout, f.v_bits, p.record, t, first + i, q.code(x[i]));
      }
    }
  }
  return fits;
}

Quantizer stored_k(const RecordLayout& layout, const uint8_t* record, int64_t channel) {
  return {load_scale(layout, record + layout.k_scale, channel), load_scale(layout, record + layout.k_zero, channel), 0};
}

Quantizer stored_v(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, int64_t channel) {
  const int64_t at = channel / f.group_size * f.group_size + token;
  return {load_scale(layout, record + layout.v_scale, at), load_scale(layout, record + layout.v_zero, at), 0};
}

float decode_k(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, int64_t channel) {
  return stored_k(layout, record, channel).value(load_code(Side::kKey, layout, f.k_bits, record, token, channel));
}

float decode_v(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, int64_t channel) {
  const uint32_t code = load_code(Side::kValue, layout, f.v_bits, record, token, channel);
  return stored_v(f, layout, record, token, channel).value(code);
}

}  // namespace

bool scalar_encode(const EncodeParams& params) {
  std::memset(params.record, 0, static_cast<size_t>(params.layout->bytes));
  const bool keys_fit = encode_keys(params);
  return encode_values(params) && keys_fit;
}

void scalar_decode(const DecodeParams& params) {
  const Format& f = *params.format;
  for (int64_t i = 0; i < params.count; i++) {
    for (int64_t d = 0; params.k != nullptr && d < f.head_dim; d++) {
      store_element(params.k, params.type, i * params.k_token_stride + d,
                    decode_k(f, *params.layout, params.record, params.first + i, d));
    }
    for (int64_t d = 0; params.v != nullptr && d < f.value_head_dim; d++) {
      store_element(params.v, params.type, i * params.v_token_stride + d,
                    decode_v(f, *params.layout, params.record, params.first + i, d));
    }
  }
}

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
      const Quantizer q = range.finite ? shrunk(range, 1.0f, top) : not_finite(top);
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
        head_dim_(params.format->head_dim),
        value_dim_(params.format->value_head_dim),
        v_channels_(params.layout->v_channels),
        queries_(static_cast<size_t>(item.num_rows * head_dim_)),
        acc_(static_cast<size_t>(item.num_rows * v_channels_)),
        max_(static_cast<size_t>(item.num_rows), -kInfinity),
        sum_(static_cast<size_t>(item.num_rows)),
        keys_(static_cast<size_t>(kTileKeys * head_dim_)),
        values_(static_cast<size_t>(kTileKeys * value_dim_)),
        tile_acc_(static_cast<size_t>(value_dim_)) {
    for (int64_t row = 0; row < item.num_rows; row++) {
      const QueryRow r = query_row(p_, item_, row);
      const int64_t at = item.batch * p_.q_batch_stride + r.head * p_.q_head_stride + r.query * p_.q_row_stride;
      for (int64_t d = 0; d < head_dim_; d++) {
        queries_[static_cast<size_t>(row * head_dim_ + d)] = load_element(p_.q, p_.q_type, at + d);
      }
    }
  }

  void run(float* partials) {
    const int64_t batch_head = item_.batch * p_.format->num_kv_heads + item_.kv_head;
    if (item_.exact_keys) {
      for (int64_t t = 0; t < ranges_.sink; t++) {
        const int64_t slot = batch_head * p_.format->sink_length + t;
        add_exact(t, p_.sink_k, slot * head_dim_, p_.sink_v, slot * value_dim_, p_.cache_type);
      }
    }
    for (int64_t page = item_.first_page; page < item_.first_page + item_.num_pages; page++) add_page(page);
    if (item_.exact_keys) {
      const int64_t capacity = window_capacity(*p_.format);
      for (int64_t t = ranges_.window_begin; t < ranges_.cached; t++) {
        const int64_t slot = batch_head * capacity + (t - p_.format->sink_length) % capacity;
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
    const int64_t group = p_.format->group_size;
    const int64_t begin = page * kPageTokens;
    const int64_t end = std::min(begin + kPageTokens, ranges_.quantized);
    for (int64_t t = begin; t < end; t++) {
      const uint8_t* record = record_address(p_, item_.batch, item_.kv_head, page, (t - begin) / group);
      const int64_t slot = next_slot(p_.format->sink_length + t);
      for (int64_t d = 0; d < head_dim_; d++) {
        keys_[static_cast<size_t>(slot * head_dim_ + d)] = decode_k(*p_.format, *p_.layout, record, t % group, d);
      }
      for (int64_t d = 0; d < value_dim_; d++) {
        values_[static_cast<size_t>(slot * value_dim_ + d)] = decode_v(*p_.format, *p_.layout, record, t % group, d);
      }
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
  int64_t first_ = 0, count_ = 0;  // the tile holds the keys [first_, first_ + count_)
};

}  // namespace

void scalar_attention(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                      float* partials) {
  for (int64_t i = begin; i < end; i++) Item(params, items[i]).run(partials);
}

}  // namespace kivi::cpu
