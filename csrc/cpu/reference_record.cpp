// The scalar kernels for records, written for reading: encode and decode. How scale and zero of a group are chosen is
// in format/scales.h. fp32 arithmetic, fused only where fma is written: this file and the vector kernels are compiled
// with -ffp-contract=off. Quantisation: KIVI (arXiv 2402.02750), section 3.
#include <cstring>
#include <vector>

#include "cpu/reference.h"
#include "format/codes.h"
#include "format/rotate.h"
#include "format/scales.h"

namespace kivi::cpu {
namespace {

bool encode_keys(const EncodeParams& p) {
  bool fits = true;
  for (int64_t c = 0; c < p.layout->num_key_classes; c++) {
    const Format f = key_class_format(*p.format, *p.layout, c);
    const RecordLayout layout = key_class_layout(*p.layout, c);
    for (int64_t i = 0; i < f.head_dim; i++) {
      const int64_t place = p.layout->key_classes[c].first + i;
      const int64_t channel = p.k_order != nullptr ? p.k_order[place] : place;
      const Strided x{advance(p.k, p.type, channel), p.type, p.k_token_stride, f.group_size};
      const GroupRules rules = key_rules(f);
      const Choice choice = choose_quantizer(rules, x);
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
      const GroupRules rules = value_rules(f);
      const Choice c = choose_quantizer(rules, x);
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
