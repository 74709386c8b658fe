// The storage format of a quantised KV cache, described once for the CPU and CUDA kernels, the Meta kernels, the tests
// and the saved state. No torch header here. The method is KIVI (arXiv 2402.02750, section 3): keys are quantised per
// channel along tokens, values per token along channels, asymmetrically between the minimum and the maximum of a group.
//
// Block record: `group_size` tokens of one kv head in one run of bytes, 64-byte aligned (8-bit scales: 32):
//
//   K codes | K scale [D] | K zero [D] | V codes | V scale [ceil(Dv/Gv)][G] | V zero [ceil(Dv/Gv)][G]
//
// Gv is the number of channels in a group of V, G unless the format says otherwise; a symmetric V has no zeros.
// Codes stand in 32-bit little-endian words along the axis that attention contracts: a K word holds consecutive
// channels of one token, a V word consecutive tokens of one channel. Element e of a word of B-bit codes sits at bit
// B*(e/2) + 16*(e%2), so that elements 2j and 2j+1 stand at the same place of the two 16-bit halves: one operand of a
// 16-bit multiply-add pair on a CPU, one `half2` on a GPU. 3-bit codes are two planes: the low 2 bits, then the high
// bit, each laid out like a code of its own. Words lie side by side in lines of 64 bytes: a K line is one word of 16
// tokens, a V line one word of 16 channels, in natural order; K lines are ordered [token / 16][word], V lines
// [word][channel / 16]. A vector register then holds tokens (K) or channels (V) and needs no shuffle. Putting entries i
// and i+8 of a line side by side would save a GPU 4 of 622 instructions per 64 tokens and cost a CPU with AVX2 about a
// quarter cycle of 14 per token and head, so the order is the natural one.
//
// Page: 128 tokens of all kv heads, [num_kv_heads][128 / group_size] records: the unit of the pool and of sharing.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace kivi {

inline constexpr int64_t kFormatVersion = 2;
inline constexpr int64_t kPageTokens = 128;  // a multiple of every group size
inline constexpr int64_t kLineBytes = 64;    // a cache line, and 16 words
inline constexpr int64_t kLineLanes = 16;
inline constexpr int64_t kMaxHeadDim = 1024;

// How scale and zero are stored in a record.
//
// kFloat8: a scale is the upper byte of a float16 without its sign (5 bits of exponent, 3 of mantissa), from 8e-6 to
// 61440, rounded to nearest; a zero is a signed byte in units of scale / zero_steps(bits), and the scale is raised
// where the zero would not fit. A group that holds NaN or Inf has the scale byte 255.
//
// kWidened and kWidened8 are what a float16 and a float8 cache become when a group leaves the range: stored as float32,
// yet still rounded as before wherever that fits, so that no code depends on when the widening happened.
enum class ScaleType : uint8_t { kFloat8 = 8, kFloat16 = 16, kFloat32 = 32, kWidened8 = 40, kWidened = 48 };

constexpr bool is_scale_type(ScaleType t) {
  return t == ScaleType::kFloat8 || t == ScaleType::kFloat16 || t == ScaleType::kFloat32 || t == ScaleType::kWidened8 ||
         t == ScaleType::kWidened;
}
// What a cache of this type becomes when a group leaves its range; itself if none does.
constexpr ScaleType widened(ScaleType t) {
  return t == ScaleType::kFloat16 ? ScaleType::kWidened : t == ScaleType::kFloat8 ? ScaleType::kWidened8 : t;
}
// The type whose numbers a cache of this type rounds to where they fit.
constexpr ScaleType narrow(ScaleType t) {
  return t == ScaleType::kWidened ? ScaleType::kFloat16 : t == ScaleType::kWidened8 ? ScaleType::kFloat8 : t;
}
constexpr int64_t scale_bytes(ScaleType t) { return t == ScaleType::kFloat8 ? 1 : t == ScaleType::kFloat16 ? 2 : 4; }
// Records and their sections start on multiples of this many bytes. Sections of single bytes are so small that whole
// lines would cost more than lines in two pieces: with 64 channels a sixteenth of a bit for every number.
constexpr int64_t record_alignment(ScaleType t) { return t == ScaleType::kFloat8 ? kLineBytes / 2 : kLineBytes; }
// kFloat8: steps of a zero in one scale. Fine steps at few bits, where the range is a few scales wide.
constexpr float zero_steps(int64_t bits) { return bits == 8 ? 0.125f : static_cast<float>(1 << (5 - bits)); }
// kFloat8: steps that a zero may have of a scale before that is rounded, which may make it smaller by a seventeenth; of
// the rounded one a zero has 127 at most.
inline constexpr float kZeroReach = 119.5f;

// Ranges that are tried beside the plain one when a group is quantised: parts of it, around the same middle. The one
// with the least sum of squared errors is kept; the first wins a tie, and the plain one is the first.
struct RangeSearch {
  static constexpr int64_t kMax = 16;
  int64_t count = 0;
  int16_t thousandths[kMax] = {};

  constexpr float factor(int64_t i) const { return static_cast<float>(thousandths[i]) / 1000.0f; }
  friend constexpr bool operator==(const RangeSearch& a, const RangeSearch& b) {
    if (a.count != b.count) return false;
    for (int64_t i = 0; i < a.count; i++) {
      if (a.thousandths[i] != b.thousandths[i]) return false;
    }
    return true;
  }
  friend constexpr bool operator!=(const RangeSearch& a, const RangeSearch& b) { return !(a == b); }
};
inline constexpr RangeSearch kNarrowSearch{5, {980, 960, 940, 920, 900}};  // range_search
// Those of the recipes: of K, of V in groups, of V with one group a token. More parts give no better text
// (SmolLM2-135M: 5 and 10 parts are within the noise of these) and take their time.
inline constexpr RangeSearch kRecipeKeySearch{1, {940}};
inline constexpr RangeSearch kRecipeGroupSearch{1, {760}};
inline constexpr RangeSearch kRecipeTokenSearch{2, {840, 680}};

// A class of key channels that share a width. A record holds the channels class by class, in an order that each row of
// the batch and each kv head has for itself: number i of the order is the channel that stands in place i.
struct KeyClass {
  int64_t channels = 0;  // all but the last class: a multiple of 16; of 32 at 1 and 3 bits
  int64_t bits = 0;
  friend constexpr bool operator==(const KeyClass& a, const KeyClass& b) {
    return a.channels == b.channels && a.bits == b.bits;
  }
};
inline constexpr int64_t kMaxKeyClasses = 4;

// What one cache looks like. Sizes in tokens and channels.
struct Format {
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;        // D, of keys and queries
  int64_t value_head_dim = 0;  // Dv, of values and outputs
  int64_t k_bits = 2;          // 1, 2, 3, 4 or 8; with classes: of the widest
  int64_t v_bits = 2;
  int64_t group_size = 32;        // G: 16, 32, 64 or 128
  int64_t residual_length = 128;  // R: the newest tokens, always exact
  int64_t sink_length = 4;        // the first tokens, always exact
  ScaleType scale_type = ScaleType::kFloat16;
  int64_t num_key_classes = 0;  // 0: all channels of K have k_bits, in their own order
  KeyClass key_classes[kMaxKeyClasses];
  RangeSearch k_search, v_search;
  // K: after its codes are made, a group's zero is moved by its mean error, so that the mean error becomes 0.
  bool k_bias_correction = false;
  // V: after its codes are made, a group's scale and zero are chosen so that the values have the slope 1 on what they
  // stand for, and the same mean. Rounding shrinks values towards the middle of the range, and attention adds that up.
  bool v_gain_correction = false;
  int64_t v_group_size = 0;  // Gv, channels of a group of V: a multiple of G; 0: G
  bool v_symmetric = false;  // V: zero = -scale * (2^v_bits - 1) / 2, not stored
  bool v_rotated = false;    // V times a Hadamard matrix before it is quantised (rotation_size)

  friend constexpr bool operator==(const Format& a, const Format& b) {
    if (a.num_key_classes != b.num_key_classes) return false;
    for (int64_t c = 0; c < a.num_key_classes; c++) {
      if (!(a.key_classes[c] == b.key_classes[c])) return false;
    }
    return a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim && a.value_head_dim == b.value_head_dim &&
           a.k_bits == b.k_bits && a.v_bits == b.v_bits && a.group_size == b.group_size &&
           a.residual_length == b.residual_length && a.sink_length == b.sink_length && a.scale_type == b.scale_type &&
           a.k_search == b.k_search && a.v_search == b.v_search && a.k_bias_correction == b.k_bias_correction &&
           a.v_gain_correction == b.v_gain_correction && a.v_group_size == b.v_group_size &&
           a.v_symmetric == b.v_symmetric && a.v_rotated == b.v_rotated;
  }
  friend constexpr bool operator!=(const Format& a, const Format& b) { return !(a == b); }
};

// Gv, a multiple of G.
constexpr int64_t value_group(const Format& f) { return f.v_group_size == 0 ? f.group_size : f.v_group_size; }

// The values of a head are rotated in blocks of this many channels: the largest power of two that divides Dv. A block
// x of n channels becomes H x / 2^ceil(log2(n) / 2) with H[i][j] = (-1)^(bits that i and j share), and comes back as
// H y / 2^floor(log2(n) / 2): both factors are powers of two, so that only the sums round.
constexpr int64_t rotation_size(int64_t value_head_dim) { return value_head_dim & -value_head_dim; }

// 64-bit size arithmetic that remembers an overflow instead of wrapping.
struct CheckedSize {
  int64_t value = 0;
  bool ok = true;
  constexpr CheckedSize(int64_t v = 0, bool valid = true) : value(v), ok(valid && v >= 0) {}  // NOLINT: implicit
};

constexpr CheckedSize operator+(CheckedSize a, CheckedSize b) {
  int64_t r = 0;
  const bool over = __builtin_add_overflow(a.value, b.value, &r);
  return {over ? 0 : r, a.ok && b.ok && !over};
}

constexpr CheckedSize operator*(CheckedSize a, CheckedSize b) {
  int64_t r = 0;
  const bool over = __builtin_mul_overflow(a.value, b.value, &r);
  return {over ? 0 : r, a.ok && b.ok && !over};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr bool is_valid_bits(int64_t bits) { return bits == 1 || bits == 2 || bits == 3 || bits == 4 || bits == 8; }
constexpr bool is_valid_group_size(int64_t g) { return g == 16 || g == 32 || g == 64 || g == 128; }

// The planes of a code: 3 bits are stored as 2 + 1, every other width as one plane.
constexpr int num_planes(int64_t bits) { return bits == 3 ? 2 : 1; }
constexpr int64_t plane_bits(int64_t bits, int plane) { return bits == 3 ? (plane == 0 ? 2 : 1) : bits; }
// The weight of a plane's code in the whole code.
constexpr int64_t plane_weight(int plane) { return plane == 0 ? 1 : 4; }

// Bit of element e in a word of B-bit codes.
constexpr int code_bit(int64_t bits, int64_t e) { return static_cast<int>(bits * (e / 2) + 16 * (e % 2)); }
constexpr int64_t codes_per_word(int64_t bits) { return 32 / bits; }

// Where one class of keys stands.
struct KeyClassLayout {
  int64_t bits = 0;
  int64_t first = 0;          // place of its first channel, a multiple of 16
  int64_t channels = 0;       // its channels
  int64_t words[2] = {0, 0};  // per token, by plane
  int64_t codes[2] = {0, 0};  // plane p: lines [G / 16][words[p]]
};

// Offsets and sizes inside one record, in bytes from its start unless said otherwise.
struct RecordLayout {
  int64_t k_channels = 0;       // D rounded up to a line of 16; the added channels hold code, scale and zero 0
  int64_t v_channels = 0;       // Dv rounded up likewise
  int64_t v_group = 0;          // Gv
  int64_t v_groups = 0;         // ceil(Dv / Gv); the last group may be short
  int64_t k_words[2] = {0, 0};  // words per token, by plane
  int64_t v_words[2] = {0, 0};  // words per channel, by plane
  int64_t k_codes[2] = {0, 0};  // plane p: lines [G / 16][k_words[p]]
  int64_t num_key_classes = 1;  // a plain record has one; k_words and k_codes are those of the first
  KeyClassLayout key_classes[kMaxKeyClasses];
  int64_t k_scale = 0, k_zero = 0;  // [k_channels]
  int64_t v_codes[2] = {0, 0};      // plane p: lines [v_words[p]][v_channels / 16]
  int64_t v_scale = 0, v_zero = 0;  // [v_groups][G]; v_zero is empty if V is symmetric
  int64_t scale_bytes = 2;          // of one scale or zero: 1, 2 or 4
  int64_t bytes = 0;                // of the whole record, a multiple of record_alignment
};

// Needs a format that `format_error` accepts. Sections start on multiples of record_alignment.
constexpr RecordLayout record_layout(const Format& f) {
  RecordLayout r;
  const int64_t alignment = record_alignment(f.scale_type);
  r.scale_bytes = scale_bytes(f.scale_type);
  r.k_channels = round_up(f.head_dim, kLineLanes);
  r.v_channels = round_up(f.value_head_dim, kLineLanes);
  r.v_group = value_group(f);
  r.v_groups = ceil_div(f.value_head_dim, r.v_group);
  int64_t at = 0;
  r.num_key_classes = f.num_key_classes == 0 ? 1 : f.num_key_classes;
  int64_t first = 0;
  for (int64_t c = 0; c < r.num_key_classes; c++) {
    KeyClassLayout& k = r.key_classes[c];
    k.bits = f.num_key_classes == 0 ? f.k_bits : f.key_classes[c].bits;
    k.channels = f.num_key_classes == 0 ? f.head_dim : f.key_classes[c].channels;
    k.first = first;
    first += round_up(k.channels, kLineLanes);
    for (int p = 0; p < num_planes(k.bits); p++) {
      k.words[p] = ceil_div(round_up(k.channels, kLineLanes), codes_per_word(plane_bits(k.bits, p)));
      k.codes[p] = at;
      at += f.group_size / kLineLanes * k.words[p] * kLineBytes;
    }
  }
  for (int p = 0; p < 2; p++) {
    r.k_words[p] = r.key_classes[0].words[p];
    r.k_codes[p] = r.key_classes[0].codes[p];
  }
  r.k_scale = at;
  at += round_up(r.k_channels * r.scale_bytes, alignment);
  r.k_zero = at;
  at += round_up(r.k_channels * r.scale_bytes, alignment);
  for (int p = 0; p < num_planes(f.v_bits); p++) {
    r.v_words[p] = ceil_div(f.group_size, codes_per_word(plane_bits(f.v_bits, p)));
    r.v_codes[p] = at;
    at += r.v_words[p] * (r.v_channels / kLineLanes) * kLineBytes;
  }
  r.v_scale = at;
  at += round_up(r.v_groups * f.group_size * r.scale_bytes, alignment);
  r.v_zero = at;
  if (!f.v_symmetric) at += round_up(r.v_groups * f.group_size * r.scale_bytes, alignment);
  r.bytes = at;
  return r;
}

// One class of keys as the keys of a plain record: its format, and the layout of the whole record with the sections of
// K narrowed to it.
constexpr Format key_class_format(const Format& f, const RecordLayout& r, int64_t c) {
  Format one = f;
  one.head_dim = r.key_classes[c].channels;
  one.k_bits = r.key_classes[c].bits;
  one.num_key_classes = 0;
  return one;
}
constexpr RecordLayout key_class_layout(const RecordLayout& r, int64_t c) {
  RecordLayout one = r;
  const KeyClassLayout& k = r.key_classes[c];
  one.num_key_classes = 1;
  one.key_classes[0] = k;
  one.key_classes[0].first = 0;
  one.k_channels = round_up(k.channels, kLineLanes);
  for (int p = 0; p < 2; p++) {
    one.k_words[p] = k.words[p];
    one.k_codes[p] = k.codes[p];
  }
  one.k_scale += k.first * r.scale_bytes;
  one.k_zero += k.first * r.scale_bytes;
  return one;
}

// Bytes of one page: [num_kv_heads][128 / G] records. Needs a format that `format_error` accepts.
constexpr CheckedSize page_bytes(const Format& f) {
  return CheckedSize(f.num_kv_heads) * CheckedSize(kPageTokens / f.group_size) * CheckedSize(record_layout(f).bytes);
}

// Slots of the ring that holds the exact window: R + G tokens, rounded up so that a group never wraps around.
constexpr int64_t window_capacity(const Format& f) { return round_up(f.residual_length, f.group_size) + f.group_size; }

// Of a sequence of n tokens: how many are quantised. They follow the first `sink_length` tokens; the others are exact.
constexpr int64_t quantized_count(const Format& f, int64_t n) {
  const int64_t over = n - f.sink_length - f.residual_length;
  return over > 0 ? over / f.group_size * f.group_size : 0;
}

// Null if the format can be stored, else which field is wrong and what it may be; `*value` is what it was.
constexpr const char* format_error(const Format& f, int64_t* value) {
  const auto bad = [value](int64_t v, const char* what) {
    *value = v;
    return what;
  };
  if (f.num_kv_heads < 1 || f.num_kv_heads > 65536) return bad(f.num_kv_heads, "num_kv_heads must be 1 to 65536");
  if (f.head_dim < 1 || f.head_dim > kMaxHeadDim) return bad(f.head_dim, "head_dim must be 1 to 1024");
  if (f.value_head_dim < 1 || f.value_head_dim > kMaxHeadDim) {
    return bad(f.value_head_dim, "value_head_dim must be 1 to 1024");
  }
  if (!is_valid_bits(f.k_bits)) return bad(f.k_bits, "k_bits must be 1, 2, 3, 4 or 8");
  if (!is_valid_bits(f.v_bits)) return bad(f.v_bits, "v_bits must be 1, 2, 3, 4 or 8");
  if (!is_valid_group_size(f.group_size)) return bad(f.group_size, "group_size must be 16, 32, 64 or 128");
  if (f.residual_length < 0 || f.residual_length > (int64_t{1} << 30)) {
    return bad(f.residual_length, "residual_length must be 0 to 2^30");
  }
  if (f.sink_length < 0 || f.sink_length > (int64_t{1} << 30)) {
    return bad(f.sink_length, "sink_length must be 0 to 2^30");
  }
  if (!is_scale_type(f.scale_type)) {
    return bad(static_cast<int64_t>(f.scale_type),
               "scale_type must be 8 (float8), 16 (float16), 32 (float32), 40 or 48 (widened)");
  }
  if (f.v_group_size < 0 || f.v_group_size > kMaxHeadDim || f.v_group_size % f.group_size != 0) {
    return bad(f.v_group_size, "v_group_size must be a multiple of group_size up to 1024, or 0");
  }
  if (f.num_key_classes < 0 || f.num_key_classes == 1 || f.num_key_classes > kMaxKeyClasses) {
    return bad(f.num_key_classes, "the number of k_classes must be 0 or 2 to 4");
  }
  int64_t in_classes = 0, widest = 0;
  for (int64_t c = 0; c < f.num_key_classes; c++) {
    const KeyClass& k = f.key_classes[c];
    if (!is_valid_bits(k.bits)) return bad(k.bits, "a class of k_classes must have 1, 2, 3, 4 or 8 bits");
    const bool last = c + 1 == f.num_key_classes;
    if (k.channels < 1 || (!last && k.channels % (k.bits == 1 || k.bits == 3 ? 32 : 16) != 0)) {
      return bad(k.channels,
                 "a class of k_classes must have a multiple of 16 channels (1 and 3 bits: 32), the last any");
    }
    if (k.channels > f.head_dim) {  // before the sum, which it might overflow
      return bad(k.channels, "a class of k_classes must have at most head_dim channels");
    }
    in_classes += k.channels;
    widest = k.bits > widest ? k.bits : widest;
  }
  if (f.num_key_classes > 0 && in_classes != f.head_dim) {
    return bad(in_classes, "the classes of k_classes must have head_dim channels together");
  }
  if (f.num_key_classes > 0 && widest != f.k_bits) {
    return bad(f.k_bits, "k_bits must be that of the widest class of key channels");
  }
  for (const RangeSearch* search : {&f.k_search, &f.v_search}) {
    if (search->count < 0 || search->count > RangeSearch::kMax) {
      return bad(search->count, "a range search must try at most 16 parts");
    }
    for (int64_t i = 0; i < search->count; i++) {
      if (search->thousandths[i] < 1 || search->thousandths[i] > 1000) {
        return bad(search->thousandths[i], "the parts of a range search must be 1 to 1000 thousandths");
      }
    }
  }
  return nullptr;
}

// D = 128, G = 32: 96 bytes per token and kv head at 2 bits, 160 at 4 bits (fp16: 512).
namespace detail {
constexpr Format example_format(int64_t bits) {
  Format f;
  f.num_kv_heads = 1, f.head_dim = f.value_head_dim = 128, f.k_bits = f.v_bits = bits;
  return f;
}
static_assert(record_layout(example_format(2)).bytes == 96 * 32, "the record is the published one");
static_assert(record_layout(example_format(4)).bytes == 160 * 32, "the record is the published one");
constexpr Format narrow_format(int64_t bits) {
  Format f = example_format(bits);
  f.scale_type = ScaleType::kFloat8, f.v_group_size = 128, f.v_symmetric = true;
  return f;
}
static_assert(record_layout(narrow_format(4)).bytes == (64 + 64) * 32 + 128 + 128 + 32, "a byte a scale");
}  // namespace detail

}  // namespace kivi
