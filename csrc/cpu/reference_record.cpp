// The scalar kernels for records, written for reading: how scale and zero of a group are chosen (the definition is at
// EncodeParams in kernels.h), encode and decode. fp32 arithmetic, fused only where fma is written: this file and the
// vector kernels are compiled with -ffp-contract=off. Quantisation: KIVI (arXiv 2402.02750), section 3.
#include <cfloat>
#include <cstring>
#include <vector>

#include "cpu/codes.h"
#include "cpu/reference.h"
#include "cpu/reference_group.h"
#include "cpu/rotate.h"

namespace kivi::cpu {
namespace {

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
  // The range itself in float16 or float32: what KIVI defines.
  bool plain() const {
    return narrow(type) != ScaleType::kFloat8 && !symmetric && !bias && !gain && search->count == 0;
  }
};

// A quantizer that makes codes, and what is stored of it. They differ after a correction, which keeps the codes.
struct Choice {
  Quantizer coder;
  float scale = 0, zero = 0;  // stored
  bool fits = true;           // both fit the type that they are rounded to; always so for float32
};

// 0 for scales so small that 1 / scale might overflow: such groups are neither searched nor corrected, and their codes
// are 0.
float inverse(float scale) { return scale >= FLT_MIN ? 1.0f / scale : 0.0f; }

// The stored scale of a group whose zero is to be about `zero`.
float stored_scale(const GroupRules& g, float scale, float zero, bool* fits) {
  const ScaleType type = narrow(g.type);
  if (type == ScaleType::kFloat8 && !g.symmetric) {
    scale = std::max(scale, std::fabs(zero) * (zero_steps(g.bits) / kZeroReach));  // or the zero would be out of reach
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
  const float steps = std::nearbyint(zero * inverse(scale) * zero_steps(g.bits)) + 0.0f;  // no -0: bytes have none
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

float clamped(float position, float top) { return std::nearbyint(std::min(std::max(position, 0.0f), top)); }

uint32_t code_of(const GroupRules& g, const Quantizer& q, float x) {
  if (g.plain()) return q.code(x);
  const float factor = inverse(q.scale);
  return factor > 0.0f ? static_cast<uint32_t>(clamped((x - q.zero) * factor, g.top())) : 0;
}

// A choice, corrected if that is asked for, with the sum of the squared errors of what is then stored. One look at the
// numbers gives sums from which the correction and the error follow.
struct Trial {
  Choice choice;
  float error = 0;
  bool valid = false;  // fits, and may win the search
};

// Without a correction, or with that of the bias, which moves the zero by the mean error. The sums are those of what
// the codes leave.
void measure_rest(const GroupRules& g, Trial& t) {
  Choice& c = t.choice;
  const auto count = static_cast<float>(g.x.count);
  const float factor = inverse(c.scale);
  float sum = 0, square = 0;
  for (int64_t i = 0; i < g.x.count; i++) {
    const float distance = g.x[i] - c.zero;
    const float rest = std::fma(-c.scale, clamped(distance * factor, g.top()), distance);
    sum += rest;
    square = std::fma(rest, rest, square);
  }
  t.error = square;
  if (!g.bias || !t.valid) return;
  const float wanted = c.zero + sum * (1.0f / count);
  bool fits = is_finite(wanted);
  const float zero = stored_zero(g, c.scale, wanted, &fits);
  if (!fits) return;
  const float moved = zero - c.zero;
  t.error = square + moved * (count * moved - 2.0f * sum);
  c.zero = zero;
}

// The numbers of a group around their mean; around 0 if V is symmetric.
struct Centred {
  float mean = 0, sum = 0, square = 0;

  explicit Centred(const GroupRules& g) {
    if (!g.symmetric) {
      for (int64_t i = 0; i < g.x.count; i++) mean += g.x[i];
      mean *= 1.0f / static_cast<float>(g.x.count);
    }
    for (int64_t i = 0; i < g.x.count; i++) {
      const float x = g.x[i] - mean;
      sum += x;
      square = std::fma(x, x, square);
    }
  }
};

// With the correction of the gain: scale and zero that give the values slope 1 on x, and x's mean; the scale by a
// factor of 2 at most. The sums are those of the codes.
void measure_gain(const GroupRules& g, const Centred& x, Trial& t) {
  Choice& c = t.choice;
  const auto count = static_cast<float>(g.x.count);
  const float factor = inverse(c.scale), shift = (x.mean - c.zero) * factor;
  float codes = 0, squares = 0, products = 0;
  for (int64_t i = 0; i < g.x.count; i++) {
    const float distance = g.x[i] - x.mean;
    const float code = clamped(std::fma(distance, factor, shift), g.top());
    codes += code;
    squares = std::fma(code, code, squares);
    products = std::fma(code, distance, products);
  }
  // Around the mean of the codes, or the middle one.
  const float middle = g.symmetric ? 0.5f * g.top() : codes * (1.0f / count);
  const float spread = g.symmetric ? squares - g.top() * codes + count * (middle * middle) : squares - codes * middle;
  const float both = products - middle * x.sum;
  const float slope = x.square / both;
  if (t.valid && slope > 0.0f && slope <= FLT_MAX) {
    const float wanted = std::min(std::max(slope, 0.5f * c.scale), 2.0f * c.scale);
    bool fits = true;
    const float scale = stored_scale(g, wanted, x.mean - wanted * middle, &fits);
    const float moved = x.mean - scale * middle;
    const float zero = stored_zero(g, scale, moved, &fits);
    if (fits && is_finite(moved)) c.scale = scale, c.zero = zero;
  }
  const float offset = (x.mean - c.zero) - c.scale * middle;
  t.error = x.square + c.scale * (c.scale * spread - 2.0f * both) + count * (offset * offset);
}

Trial try_range(const GroupRules& g, const GroupRange& range, const Centred& x, float factor) {
  Trial t;
  t.choice = choose_range(g, range, factor);
  t.valid = t.choice.fits && t.choice.scale >= FLT_MIN;
  if (g.gain) {
    measure_gain(g, x, t);
  } else {
    measure_rest(g, t);
  }
  return t;
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
  if (!g.bias && !g.gain && g.search->count == 0) {  // nothing that would look at the numbers
    best = choose_range(g, range, 1.0f);
  } else {
    const Centred x(g);
    const Trial plain = try_range(g, range, x, 1.0f);
    best = plain.choice;
    float least = plain.error;
    for (int64_t i = 0; i < g.search->count; i++) {
      const Trial other = try_range(g, range, x, g.search->factor(i));
      if (!other.valid || !(other.error < least)) continue;
      least = other.error;
      best = other.choice;
    }
    best.fits = plain.choice.fits;
  }
  best.fits = best.fits || widened(g.type) == g.type;
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
  bool fits = true;
  for (int64_t c = 0; c < p.layout->num_key_classes; c++) {
    const Format f = key_class_format(*p.format, *p.layout, c);
    const RecordLayout layout = key_class_layout(*p.layout, c);
    for (int64_t i = 0; i < f.head_dim; i++) {
      const int64_t place = p.layout->key_classes[c].first + i;
      const int64_t channel = p.k_order != nullptr ? p.k_order[place] : place;
      const Strided x{advance(p.k, p.type, channel), p.type, p.k_token_stride, f.group_size};
      const GroupRules rules = key_rules(f, x);
      const Choice choice = choose_quantizer(rules);
      fits &= choice.fits;
      store_group(layout, f.k_bits, p.record + layout.k_scale, p.record + layout.k_zero, i, choice);
      for (int64_t t = 0; t < f.group_size; t++) {
        add_code(Side::kKey, layout, f.k_bits, p.record, t, i, code_of(rules, choice.coder, x[t]));
      }
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
      const GroupRules rules = value_rules(f, x);
      const Choice c = choose_quantizer(rules);
      fits &= c.fits;
      store_group(layout, f.v_bits, p.record + layout.v_scale, f.v_symmetric ? nullptr : p.record + layout.v_zero,
                  g * f.group_size + t, c);
      for (int64_t i = 0; i < x.count; i++) {
        add_code(Side::kValue, layout, f.v_bits, p.record, t, first + i, code_of(rules, c.coder, x[i]));
      }
    }
  }
  return fits;
}

}  // namespace

void decode_key_row(const Format& format, const RecordLayout& whole, const uint8_t* record, int64_t token,
                    const int16_t* order, float* row) {
  for (int64_t c = 0; c < whole.num_key_classes; c++) {
    const Format f = key_class_format(format, whole, c);
    const RecordLayout layout = key_class_layout(whole, c);
    for (int64_t i = 0; i < f.head_dim; i++) {
      const int64_t place = whole.key_classes[c].first + i;
      const Quantizer q = load_group(layout, f.k_bits, record + layout.k_scale, record + layout.k_zero, i);
      row[order != nullptr ? order[place] : place] = q.value(load_code(Side::kKey, layout, f.k_bits, record, token, i));
    }
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
      decode_key_row(f, *params.layout, params.record, token, params.k_order, row.data());
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
  for (int64_t c = 0; c < a.num_key_classes; c++) {
    const RecordLayout x = key_class_layout(a, c), y = key_class_layout(b, c);
    widen(a.key_classes[c].bits, x.k_scale, x.k_zero, y.k_scale, y.k_zero, x.k_channels, false);
  }
  widen(from.v_bits, a.v_scale, a.v_zero, b.v_scale, b.v_zero, a.v_groups * from.group_size, from.v_symmetric);
}

}  // namespace kivi::cpu
