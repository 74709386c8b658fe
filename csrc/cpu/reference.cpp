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
#include "cpu/rotate.h"

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
  float lo = 0, hi = 0;
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
  r.hi = hi;
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

float top_code(int64_t bits) { return static_cast<float>((1 << bits) - 1); }

float through_half(float x) { return half_to_float(float_to_half(x)); }

float through_float8(float x) { return half_to_float(float8_to_half(float_to_float8(x))); }

float through_narrow(float x, ScaleType type) {
  return type == ScaleType::kFloat8 ? through_float8(x) : type == ScaleType::kFloat16 ? through_half(x) : x;
}

// The numbers of a group, and how its quantizer is chosen.
struct GroupRules {
  Strided x;
  ScaleType type;
  int64_t bits;
  bool symmetric;
  bool bias, gain;
  const RangeSearch* search;

  float top() const { return top_code(bits); }
};

// A quantizer that makes codes, and what is stored of it. They differ after a correction, which keeps the codes.
struct Choice {
  Quantizer coder;
  float scale = 0, zero = 0;  // stored
  bool fits = true;           // both fit the type that they are rounded to; always so for float32
};

// The stored scale of a group whose zero is to be about `zero`.
float stored_scale(const GroupRules& g, float scale, float zero, bool* fits) {
  const ScaleType type = narrow(g.type);
  if (type == ScaleType::kFloat8 && !g.symmetric) {
    scale = std::max(scale, std::fabs(zero) / 127.5f * zero_steps(g.bits));  // or the zero would be out of reach
  }
  const float rounded = through_narrow(scale, type);
  if (is_finite(rounded)) return rounded;
  *fits = false;
  return g.type == type ? rounded : scale;
}

// The stored zero beside a stored scale.
float stored_zero(const GroupRules& g, float scale, float zero, bool* fits) {
  if (g.symmetric) return -(scale * (0.5f * g.top()));
  const ScaleType type = narrow(g.type);
  if (type == ScaleType::kFloat32) return zero;
  if (type == ScaleType::kFloat16) {
    const float rounded = through_half(zero);
    if (is_finite(rounded)) return rounded;
    *fits = false;
    return g.type == type ? rounded : zero;
  }
  if (!is_finite(through_float8(scale))) return zero;  // a scale out of range has been reported
  if (!(scale > 0.0f)) return 0.0f;
  const float steps = std::nearbyint(zero / scale * zero_steps(g.bits));
  return float8_zero(std::min(std::max(steps, -127.0f), 127.0f), scale, g.bits);
}

// The choice for the part `factor` of the range around its middle. For float16 and float32 the zero is the lower end of
// that; for float8, whose scale may be rounded far, the middle is kept.
Choice choose_range(const GroupRules& g, const GroupRange& range, float factor) {
  Choice c;
  const float width = range.span * factor, top = g.top();
  float scale = width / top;
  float zero = range.lo + (range.span - width) * 0.5f;
  if (narrow(g.type) == ScaleType::kFloat8) {
    const float middle = range.lo + range.span * 0.5f;
    scale = stored_scale(g, scale, middle - scale * (0.5f * top), &c.fits);
    zero = middle - scale * (0.5f * top);
  } else {
    scale = stored_scale(g, scale, zero, &c.fits);
  }
  c.coder = {scale, stored_zero(g, scale, zero, &c.fits), top};
  c.scale = c.coder.scale, c.zero = c.coder.zero;
  return c;
}

// Moves the zero by the mean error.
void correct_bias(const GroupRules& g, Choice& c) {
  float sum = 0;
  for (int64_t i = 0; i < g.x.count; i++) {
    const float x = g.x[i];
    sum += x - c.coder.value(c.coder.code(x));
  }
  bool fits = true;
  const float zero = stored_zero(g, c.scale, c.zero + sum / static_cast<float>(g.x.count), &fits);
  if (fits) c.zero = zero;
}

// Scale and zero that give the values slope 1 on x, and x's mean; the scale by a factor of 2 at most.
void correct_gain(const GroupRules& g, Choice& c) {
  const auto count = static_cast<float>(g.x.count);
  float code_mean = 0.5f * g.top(), x_mean = 0;
  if (!g.symmetric) {
    float codes = 0, sum = 0;
    for (int64_t i = 0; i < g.x.count; i++) {
      const float x = g.x[i];
      codes += static_cast<float>(c.coder.code(x));
      sum += x;
    }
    code_mean = codes / count;
    x_mean = sum / count;
  }
  float both = 0, square = 0;
  for (int64_t i = 0; i < g.x.count; i++) {
    const float x = g.x[i], dx = x - x_mean, dc = static_cast<float>(c.coder.code(x)) - code_mean;
    const float product = dc * dx, dxdx = dx * dx;
    both += product;
    square += dxdx;
  }
  if (!(both > 0.0f)) return;
  const float wanted = std::min(std::max(square / both, 0.5f * c.scale), 2.0f * c.scale);
  bool fits = true;
  const float scale = stored_scale(g, wanted, x_mean - wanted * code_mean, &fits);
  const float zero = stored_zero(g, scale, x_mean - scale * code_mean, &fits);
  if (fits) c.scale = scale, c.zero = zero;
}

// Of what is stored.
float squared_error(const GroupRules& g, const Choice& c) {
  const Quantizer stored{c.scale, c.zero, 0};
  float sum = 0;
  for (int64_t i = 0; i < g.x.count; i++) {
    const float x = g.x[i];
    const float error = x - stored.value(c.coder.code(x));
    const float square = error * error;
    sum += square;
  }
  return sum;
}

Choice choose_corrected(const GroupRules& g, const GroupRange& range, float factor) {
  Choice c = choose_range(g, range, factor);
  if (g.bias && c.fits) correct_bias(g, c);
  if (g.gain && c.fits) correct_gain(g, c);
  return c;
}

// `fits` is false where the format stores less than float32 and the plain range's scale or zero does not fit. In the
// search, a part that does not fit is passed over (unless scales are float32 from the start), so that a widened cache
// chooses what it did before.
Choice choose_quantizer(const GroupRules& g) {
  GroupRange range = group_range(g.x);
  if (range.finite && g.symmetric) {
    const float reach = std::max(std::fabs(range.lo), std::fabs(range.hi));
    range = {-reach, reach, 2.0f * reach, is_finite(2.0f * reach)};
  }
  Choice best;
  if (!range.finite) {
    best.zero = bits_float(kFloatNaN);
    return best;
  }
  best = choose_corrected(g, range, 1.0f);
  const bool plain_fits = best.fits;
  if (g.search->count > 0) {
    float least = squared_error(g, best);
    for (int64_t i = 0; i < g.search->count; i++) {
      const Choice other = choose_corrected(g, range, g.search->factor(i));
      if (!other.fits) continue;
      const float error = squared_error(g, other);
      if (error < least) {
        least = error;
        best = other;
      }
    }
  }
  best.fits = plain_fits || widened(g.type) == g.type;
  return best;
}

// ---------------------------------------------------------------------------------------------- records

// Scale and zero of one group as stored. 255 is the scale of a group of NaN: it comes back as scale 0, zero NaN.
void store_group(const RecordLayout& layout, int64_t bits, uint8_t* scales, uint8_t* zeros, int64_t i,
                 const Choice& c) {
  const bool lost = c.zero != c.zero;
  if (layout.scale_bytes == 1) {
    scales[i] = lost ? 255 : float_to_float8(c.scale);
    if (zeros == nullptr) return;
    const float steps = lost || !(c.scale > 0.0f) ? 0.0f : c.zero / c.scale * zero_steps(bits);
    reinterpret_cast<int8_t*>(zeros)[i] = static_cast<int8_t>(steps);
  } else {
    const float scale = lost && zeros == nullptr ? bits_float(kLostScale) : c.scale;
    if (layout.scale_bytes == 2) {
      reinterpret_cast<uint16_t*>(scales)[i] = float_to_half(scale);
      if (zeros != nullptr) reinterpret_cast<uint16_t*>(zeros)[i] = float_to_half(c.zero);
    } else {
      reinterpret_cast<float*>(scales)[i] = scale;
      if (zeros != nullptr) reinterpret_cast<float*>(zeros)[i] = c.zero;
    }
  }
}

// zeros: null where V is symmetric.
Quantizer load_group(const RecordLayout& layout, int64_t bits, const uint8_t* scales, const uint8_t* zeros, int64_t i) {
  const Element type = layout.scale_bytes == 4 ? Element::kFloat32 : Element::kFloat16;
  float scale = layout.scale_bytes == 1 ? half_to_float(float8_to_half(scales[i])) : load_element(scales, type, i);
  float zero;
  if (zeros == nullptr) {
    zero = -(scale * (0.5f * top_code(bits)));
  } else if (layout.scale_bytes == 1) {
    zero = float8_zero(static_cast<float>(reinterpret_cast<const int8_t*>(zeros)[i]), scale, bits);
  } else {
    zero = load_element(zeros, type, i);
  }
  if (scale != scale) scale = 0.0f, zero = bits_float(kFloatNaN);
  return {scale, zero, 0};
}

GroupRules key_rules(const Format& f, const Strided& x) {
  return {x, f.scale_type, f.k_bits, false, f.k_bias_correction, false, &f.k_search};
}

GroupRules value_rules(const Format& f, const Strided& x) {
  return {x, f.scale_type, f.v_bits, f.v_symmetric, false, f.v_gain_correction, &f.v_search};
}

bool encode_keys(const EncodeParams& p) {
  const Format& f = *p.format;
  const RecordLayout& layout = *p.layout;
  bool fits = true;
  for (int64_t d = 0; d < f.head_dim; d++) {
    const Strided x{advance(p.k, p.type, d), p.type, p.k_token_stride, f.group_size};
    const Choice c = choose_quantizer(key_rules(f, x));
    fits &= c.fits;
    store_group(layout, f.k_bits, p.record + layout.k_scale, p.record + layout.k_zero, d, c);
    for (int64_t t = 0; t < f.group_size; t++) {
      add_code(Side::kKey, layout, f.k_bits, p.record, t, d, c.coder.code(x[t]));
    }
  }
  return fits;
}

bool encode_values(const EncodeParams& p) {
  const Format& f = *p.format;
  const RecordLayout& layout = *p.layout;
  std::vector<float> rotated(static_cast<size_t>(f.v_rotated ? f.value_head_dim : 0));
  bool fits = true;
  for (int64_t t = 0; t < f.group_size; t++) {
    Strided row{advance(p.v, p.type, t * p.v_token_stride), p.type, 1, f.value_head_dim};
    if (f.v_rotated) {
      for (int64_t d = 0; d < f.value_head_dim; d++) rotated[static_cast<size_t>(d)] = row[d];
      rotate_row(rotated.data(), f.value_head_dim, /*back=*/false);
      row = {rotated.data(), Element::kFloat32, 1, f.value_head_dim};
    }
    for (int64_t g = 0; g < layout.v_groups; g++) {
      const int64_t first = g * layout.v_group;
      const Strided x{advance(row.data, row.type, first), row.type, 1, std::min(layout.v_group, row.count - first)};
      const Choice c = choose_quantizer(value_rules(f, x));
      fits &= c.fits;
      store_group(layout, f.v_bits, p.record + layout.v_scale, f.v_symmetric ? nullptr : p.record + layout.v_zero,
                  g * f.group_size + t, c);
      for (int64_t i = 0; i < x.count; i++) {
        add_code(Side::kValue, layout, f.v_bits, p.record, t, first + i, c.coder.code(x[i]));
      }
    }
  }
  return fits;
}

void decode_key_row(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, float* row) {
  for (int64_t d = 0; d < f.head_dim; d++) {
    const Quantizer q = load_group(layout, f.k_bits, record + layout.k_scale, record + layout.k_zero, d);
    row[d] = q.value(load_code(Side::kKey, layout, f.k_bits, record, token, d));
  }
}

void decode_value_row(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, float* row) {
  const uint8_t* zeros = f.v_symmetric ? nullptr : record + layout.v_zero;
  for (int64_t d = 0; d < f.value_head_dim; d++) {
    const int64_t at = d / layout.v_group * f.group_size + token;
    const Quantizer q = load_group(layout, f.v_bits, record + layout.v_scale, zeros, at);
    row[d] = q.value(load_code(Side::kValue, layout, f.v_bits, record, token, d));
  }
  if (f.v_rotated) rotate_row(row, f.value_head_dim, /*back=*/true);
}

}  // namespace

bool scalar_encode(const EncodeParams& params) {
  std::memset(params.record, 0, static_cast<size_t>(params.layout->bytes));
  const bool keys_fit = encode_keys(params);
  return encode_values(params) && keys_fit;
}

void scalar_decode(const DecodeParams& params) {
  const Format& f = *params.format;
  std::vector<float> row(static_cast<size_t>(std::max(f.head_dim, f.value_head_dim)));
  const auto store = [&](void* out, int64_t at, int64_t count) {
    for (int64_t d = 0; d < count; d++) store_element(out, params.type, at + d, row[static_cast<size_t>(d)]);
  };
  for (int64_t i = 0; i < params.count; i++) {
    const int64_t token = params.first + i;
    if (params.k != nullptr) {
      decode_key_row(f, *params.layout, params.record, token, row.data());
      store(params.k, i * params.k_token_stride, f.head_dim);
    }
    if (params.v != nullptr) {
      decode_value_row(f, *params.layout, params.record, token, row.data());
      store(params.v, i * params.v_token_stride, f.value_head_dim);
    }
  }
}

void widen_record(const Format& from, const uint8_t* record, const Format& to, uint8_t* out) {
  const RecordLayout a = record_layout(from), b = record_layout(to);
  std::memset(out, 0, static_cast<size_t>(b.bytes));
  std::memcpy(out + b.k_codes[0], record + a.k_codes[0], static_cast<size_t>(a.k_scale - a.k_codes[0]));
  std::memcpy(out + b.v_codes[0], record + a.v_codes[0], static_cast<size_t>(a.v_scale - a.v_codes[0]));
  const auto widen = [&](int64_t bits, int64_t old_scale, int64_t old_zero, int64_t new_scale, int64_t new_zero,
                         int64_t count, bool symmetric) {
    for (int64_t i = 0; i < count; i++) {
      const Quantizer q = load_group(a, bits, record + old_scale, symmetric ? nullptr : record + old_zero, i);
      Choice c;
      c.scale = q.scale, c.zero = q.zero;
      store_group(b, bits, out + new_scale, symmetric ? nullptr : out + new_zero, i, c);
    }
  };
  widen(from.k_bits, a.k_scale, a.k_zero, b.k_scale, b.k_zero, a.k_channels, false);
  widen(from.v_bits, a.v_scale, a.v_zero, b.v_scale, b.v_zero, a.v_groups * from.group_size, from.v_symmetric);
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
      decode_key_row(*p_.format, *p_.layout, record, t % group, &keys_[static_cast<size_t>(slot * head_dim_)]);
      decode_value_row(*p_.format, *p_.layout, record, t % group, &values_[static_cast<size_t>(slot * value_dim_)]);
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
