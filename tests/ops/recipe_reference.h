// The recipes once more, as operations on whole tensors: what the definitions say (README "Beyond KIVI",
// kivi/format.h), a line or two for each step, nothing shared with the library, not even the table of recipes. All
// groups are quantised at once. Numbers are finite and within the range of the scales: NaN, Inf and widening are tested
// elsewhere. Needs ATen alone, so that the check of the real model in examples/smollm2 can use it too.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace kivi::reference {

enum class Stored { kFloat8, kFloat16, kFloat32 };

struct Class {
  int64_t channels, bits;
};

struct Recipe {
  int64_t group_size = 32;     // tokens of a group of K, and channels of one of V
  std::vector<Class> classes;  // of key channels, the widest first; they have all channels together
  int64_t v_bits = 2;
  Stored stored = Stored::kFloat16;
  std::vector<double> k_parts = {1.0}, v_parts = {1.0};  // of a group's range that are tried; the first wins a tie
  bool bias = false, gain = false;                       // of K, of V
  bool one_per_token = false;                            // one group of V per token and head
  bool symmetric = false, rotated = false;               // of V
};

// `share` of the channels in whole units, at least one.
inline int64_t rounded_share(double share, int64_t channels, int64_t unit) {
  const double units = share * static_cast<double>(channels) / static_cast<double>(unit);
  return unit * std::max<int64_t>(1, static_cast<int64_t>(std::floor(units + 0.5)));
}

// K and V have head_dim channels.
inline Recipe recipe_of(const std::string& name, int64_t head_dim, int64_t group_size) {
  Recipe r;
  r.group_size = group_size;
  r.classes = {{head_dim, 2}};
  if (name == "kivi") return r;
  r.stored = Stored::kFloat8;
  r.k_parts = {1.0, 0.94};
  r.v_parts = {1.0, 0.84, 0.68};
  if (name == "balanced") r.v_parts = {1.0, 0.76};
  r.bias = r.gain = r.rotated = true;
  r.one_per_token = r.symmetric = name != "balanced";
  const int64_t quarter = rounded_share(1.0 / 4, head_dim, 16), three_eighths = rounded_share(3.0 / 8, head_dim, 32);
  if (name == "compact" || name == "balanced") {
    r.classes = {{quarter, 4}, {head_dim - quarter, 2}};
  } else if (name == "quality") {
    r.classes = {{quarter, 4}, {three_eighths, 3}, {head_dim - quarter - three_eighths, 2}};
    r.v_bits = 3;
  } else if (name == "near-lossless") {
    r.classes = {{head_dim, 4}};
    r.v_bits = 4;
  } else {
    throw std::invalid_argument("no recipe is called " + name);
  }
  return r;
}

// Of n tokens that a cache holds: how many after the sink are quantised.
inline int64_t quantized_count(int64_t n, int64_t sink, int64_t residual, int64_t group_size) {
  return std::max<int64_t>(0, n - sink - residual) / group_size * group_size;
}

// -------------------------------------------------------------------------------------------------------- one group

// How a group becomes codes and comes back.
struct Rules {
  int64_t bits;
  Stored stored;
  std::vector<double> parts;
  bool bias = false, gain = false, symmetric = false;

  double top() const { return static_cast<double>((int64_t{1} << bits) - 1); }
  // Steps of a float8 zero in one scale.
  double zero_steps() const { return bits == 8 ? 1.0 / 8 : std::exp2(static_cast<double>(5 - bits)); }
};

inline at::Tensor through_half(const at::Tensor& x) { return x.to(at::kHalf).to(at::kFloat); }

// A float8 is the upper byte of a float16 without its sign: bits 14 to 7. Neighbouring floats have neighbouring bits,
// so that rounding the bits to whole bytes, half to even, rounds the number.
inline at::Tensor through_float8(const at::Tensor& x) {
  const at::Tensor bits = x.to(at::kHalf).view(at::kShort).to(at::kFloat);
  return (at::round(bits / 128) * 128).to(at::kShort).view(at::kHalf).to(at::kFloat);
}

// `zero` is what will be stored beside the scale: a float8 zero has at most 127 steps of it, which rounding may make
// smaller by a seventeenth.
inline at::Tensor stored_scale(const at::Tensor& scale, const at::Tensor& zero, const Rules& r) {
  if (r.stored == Stored::kFloat32) return scale;
  if (r.stored == Stored::kFloat16) return through_half(scale);
  if (r.symmetric) return through_float8(scale);
  return through_float8(at::maximum(scale, zero.abs() / 119.5 * r.zero_steps()));
}

inline at::Tensor stored_zero(const at::Tensor& zero, const at::Tensor& scale, const Rules& r) {
  if (r.symmetric) return -(scale * (r.top() / 2));
  if (r.stored == Stored::kFloat32) return zero;
  if (r.stored == Stored::kFloat16) return through_half(zero);
  const at::Tensor step = scale / r.zero_steps();
  return at::where(scale > 0, at::round(zero / step).clamp(-127, 127) * step, at::zeros_like(zero));
}

// KIVI divides by the scale. What goes beyond it multiplies by 1 / scale, which falls otherwise where a number lies in
// the middle between two codes: often so if numbers and scales have few bits.
inline at::Tensor codes_of(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero, const Rules& r) {
  const bool plain = r.stored != Stored::kFloat8 && !r.symmetric && !r.bias && !r.gain && r.parts.size() == 1;
  const at::Tensor position = plain ? (x - zero) / scale : (x - zero) * (1 / scale);
  return at::where(scale > 0, at::round(position).clamp(0, r.top()), at::zeros_like(x));
}

// x [..., n], a group in each row, as it comes back.
inline at::Tensor fake_quantize(const at::Tensor& x, const Rules& r) {
  const at::Tensor reach = x.abs().amax(-1, true);
  const at::Tensor lo = r.symmetric ? -reach : x.amin(-1, true), hi = r.symmetric ? reach : x.amax(-1, true);
  const at::Tensor middle = lo + (hi - lo) / 2;
  at::Tensor best = at::zeros_like(x), least = at::full_like(lo, std::numeric_limits<double>::infinity());
  for (const double part : r.parts) {
    // The part of the range around its middle.
    const at::Tensor width = (hi - lo) * part;
    at::Tensor scale, zero;
    if (r.stored == Stored::kFloat8) {  // the scale may be rounded far: the middle stays
      scale = stored_scale(width / r.top(), middle - width / 2, r);
      zero = stored_zero(middle - scale * (r.top() / 2), scale, r);
    } else {
      zero = lo + (hi - lo - width) / 2;
      scale = stored_scale(width / r.top(), zero, r);
      zero = stored_zero(zero, scale, r);
    }
    const at::Tensor codes = codes_of(x, scale, zero, r);
    // The corrections leave the codes alone.
    if (r.bias) {
      const at::Tensor error = x - (zero + codes * scale);
      zero = stored_zero(zero + error.mean(-1, true), scale, r);
    }
    if (r.gain) {
      const at::Tensor x_mean = r.symmetric ? at::zeros_like(lo) : x.mean(-1, true);
      const at::Tensor code_mean = r.symmetric ? at::full_like(lo, r.top() / 2) : codes.mean(-1, true);
      const at::Tensor dx = x - x_mean, both = (dx * (codes - code_mean)).sum(-1, true);
      const at::Tensor wanted = at::minimum(at::maximum(dx.square().sum(-1, true) / both, scale / 2), scale * 2);
      const at::Tensor new_scale = stored_scale(wanted, x_mean - wanted * code_mean, r);
      const at::Tensor new_zero = stored_zero(x_mean - new_scale * code_mean, new_scale, r);
      zero = at::where(both > 0, new_zero, zero);  // a constant group has no slope
      scale = at::where(both > 0, new_scale, scale);
    }
    const at::Tensor back = zero + codes * scale, error = (x - back).square().sum(-1, true);
    best = at::where(error < least, back, best);
    least = at::minimum(error, least);
  }
  return best;
}

// ----------------------------------------------------------------------------------------------------------- keys

// The channel that stands in each place, [..., D]: the channels whose keys have the widest ranges in their groups,
// times the queries that multiply them, get the most bits. k [..., T, D] are the first quantised tokens; query_squares
// [..., D] is the sum of the squared queries of a kv head, or undefined.
inline at::Tensor key_order(const at::Tensor& k, const at::Tensor& query_squares, const Recipe& r) {
  const at::Tensor groups = k.to(at::kDouble).unflatten(-2, {-1, r.group_size});
  const at::Tensor range = groups.amax(-2) - groups.amin(-2);  // [..., T / G, D]
  at::Tensor score = range.square().mean(-2).sqrt();
  if (query_squares.defined()) score = score * query_squares.to(at::kDouble).sqrt();
  const at::Tensor ranked = at::argsort(score, /*stable=*/true, -1, /*descending=*/true);
  std::vector<at::Tensor> classes;
  int64_t first = 0;
  for (const Class& c : r.classes) {  // within a class they keep their order
    classes.push_back(std::get<0>(ranked.narrow(-1, first, c.channels).sort(-1)));
    first += c.channels;
  }
  return at::cat(classes, -1);
}

// k [..., T, D], whole groups of tokens; order [..., D] as key_order gives it (used if there are classes).
inline at::Tensor fake_quantize_keys(const at::Tensor& k, const Recipe& r, const at::Tensor& order) {
  const bool in_order = r.classes.size() > 1;
  const at::Tensor x = k.to(at::kFloat);
  const at::Tensor places = in_order ? order.unsqueeze(-2).expand(x.sizes()) : at::Tensor();
  const at::Tensor sorted = in_order ? x.gather(-1, places) : x;
  std::vector<at::Tensor> classes;
  int64_t first = 0;
  for (const Class& c : r.classes) {
    // Per channel along the tokens of a group.
    const at::Tensor groups = sorted.narrow(-1, first, c.channels).unflatten(-2, {-1, r.group_size}).transpose(-2, -1);
    const at::Tensor back = fake_quantize(groups, {c.bits, r.stored, r.k_parts, r.bias, false, false});
    classes.push_back(back.transpose(-2, -1).flatten(-3, -2));
    first += c.channels;
  }
  const at::Tensor back = at::cat(classes, -1);
  return in_order ? at::empty_like(x).scatter_(-1, places, back) : back;
}

// ---------------------------------------------------------------------------------------------------------- values

// H [n, n], n a power of two: H[i][j] = (-1)^(bits that i and j share).
inline at::Tensor hadamard(int64_t n) {
  at::Tensor h = at::ones({1, 1}, at::kFloat);
  while (h.size(0) < n) h = at::cat({at::cat({h, h}, 1), at::cat({h, -h}, 1)}, 0);
  return h;
}

// In blocks of the largest power of two that divides the head. 1 / n is split into two powers of two, one each way.
inline at::Tensor rotated(const at::Tensor& v, bool back) {
  int64_t n = 1, log2 = 0;
  while (v.size(-1) % (2 * n) == 0) n *= 2, log2++;
  const auto exponent = static_cast<double>(back ? log2 / 2 : (log2 + 1) / 2);
  return at::matmul(v.unflatten(-1, {-1, n}), hadamard(n)).flatten(-2) / std::exp2(exponent);
}

// v [..., T, D], any number of tokens.
inline at::Tensor fake_quantize_values(const at::Tensor& v, const Recipe& r) {
  const at::Tensor x = r.rotated ? rotated(v.to(at::kFloat), false) : v.to(at::kFloat);
  // Per token along the channels of a group; the last one may be short.
  std::vector<at::Tensor> groups;
  for (const at::Tensor& group : x.split(r.one_per_token ? x.size(-1) : r.group_size, -1)) {
    groups.push_back(fake_quantize(group, {r.v_bits, r.stored, r.v_parts, false, r.gain, r.symmetric}));
  }
  const at::Tensor back = at::cat(groups, -1);
  return r.rotated ? rotated(back, true) : back;
}

}  // namespace kivi::reference
