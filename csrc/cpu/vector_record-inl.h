// Encoding of records with vectors (layout: kivi/format.h; the inverse: vector_decode-inl.h). Channels are worked
// through in strips of 16, a line of the record. Lanes are channels; only the ranges of V, whose groups lie along
// channels, are turned so that lanes are tokens. While the codes of a group are made, the rows of the group that
// follows it in memory are fetched. (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_RECORD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_RECORD_INL_H_
#undef KIVI_CPU_VECTOR_RECORD_INL_H_
#else
#define KIVI_CPU_VECTOR_RECORD_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu/vector_group-inl.h"
#include "cpu/vector_rotate-inl.h"
#include "format/codes.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

using D4 = hn::Full128<uint32_t>;  // one word of 4 tokens
using V4 = hn::Vec<D4>;

inline constexpr int64_t kMaxGroup = kPageTokens;

// The rows of one strip: 16 elements each, `stride` bytes apart.
struct StripRows {
  const uint8_t* data;
  int64_t stride;
  const uint8_t* row(int64_t i) const { return data + i * stride; }
};

// Asks for the line that lies `distance` bytes from p, which need not exist. Into L2: the first level has too few lines
// on their way to keep up (4096 tokens on Zen 4: 4.7 ms with L1, 2.6 with L2, 7 without).
HWY_INLINE void fetch_line(const uint8_t* p, int64_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(distance)),
                     0, 2);
}

// A strip that ends beyond the last channel, copied with its missing channels filled: with 0 for keys, whose channels
// are groups of their own (code, scale and zero 0), with the row's first channel for values, where the group's range
// must not change.
template <Element kType>
StripRows fill_strip(const StripRows& rows, int64_t count, int64_t valid, bool repeat_first, uint8_t* filled) {
  constexpr int64_t kSize = element_bytes(kType);
  const auto bytes = static_cast<size_t>(valid * kSize);
  for (int64_t t = 0; t < count; t++) {
    uint8_t* out = filled + t * kLine * kSize;
    std::memcpy(out, rows.row(t), bytes);
    for (int64_t c = valid; c < kLine; c++) {
      if (repeat_first) {
        std::memcpy(out + c * kSize, out, static_cast<size_t>(kSize));
      } else {
        std::memset(out + c * kSize, 0, static_cast<size_t>(kSize));
      }
    }
  }
  return {filled, kLine * kSize};
}

// ---------------------------------------------------------------------------------------------- keys

// Bytes e0 e2 e1 e3 (4 channels of one token, codes of kBits) to the two halves of a word: e0 and e1 at bit 0, e2 and
// e3 above them.
template <int kBits>
HWY_INLINE VU close_halves(VU bytes) {
  if constexpr (kBits == 8) {
    return bytes;
  } else {
    const hn::Repartition<uint16_t, DU> dh;
    const auto x = hn::BitCast(dh, bytes);
    const auto mask = hn::Set(dh, static_cast<uint16_t>((1 << 2 * kBits) - 1));
    return hn::BitCast(DU(), hn::And(hn::Or(x, hn::ShiftRight<8 - kBits>(x)), mask));
  }
}

HWY_INLINE void store_words(uint8_t* at, V4 words) { hn::StoreU(words, D4(), reinterpret_cast<uint32_t*>(at)); }

// Words of plane codes of 4 tokens and the 16 channels of `strip`, from `key_code_bytes`. `at` is where the first word
// of these tokens goes; words of one token are a line apart.
template <int kBits>
HWY_INLINE void store_key_words(const VU (&bytes)[kLineVectors], int64_t strip, uint8_t* at) {
  alignas(64) uint32_t blocks[kLine];
  for (int n = 0; n < kLineVectors; n++) hn::Store(close_halves<kBits>(bytes[n]), DU(), blocks + n * kLanes);
  V4 quad[4];
  for (int i = 0; i < 4; i++) quad[i] = hn::Load(D4(), blocks + 4 * i);
  if constexpr (kBits == 8) {
    for (int i = 0; i < 4; i++) store_words(at + (4 * strip + i) * kLineBytes, quad[i]);
  } else {
    const V4 low = hn::Or(quad[0], hn::ShiftLeft<2 * kBits>(quad[1]));
    const V4 high = hn::Or(quad[2], hn::ShiftLeft<2 * kBits>(quad[3]));
    if constexpr (kBits == 4) {
      store_words(at + 2 * strip * kLineBytes, low);
      store_words(at + (2 * strip + 1) * kLineBytes, high);
    } else {
      const V4 words = hn::Or(low, hn::ShiftLeft<4 * kBits>(high));
      if constexpr (kBits == 2) {
        store_words(at + strip * kLineBytes, words);
      } else {  // two strips share a word; the even one comes first
        uint8_t* word = at + strip / 2 * kLineBytes;
        if (strip % 2 == 0) {
          store_words(word, words);
        } else {
          store_words(word, hn::Or(hn::LoadU(D4(), reinterpret_cast<const uint32_t*>(word)), hn::ShiftLeft<8>(words)));
        }
      }
    }
  }
}

// The codes of 4 tokens (one per row) and 16 channels as bytes: each 16 bytes hold 4 channels of the tokens one after
// another, the channels in the order 0 2 1 3.
template <Element kType, bool kDivide>
HWY_INLINE void key_code_bytes(const StripRows& rows, int64_t token, int64_t fetch, const Quantizers (&q)[kLineVectors],
                               VF levels, VU (&bytes)[kLineVectors]) {
  alignas(16) static constexpr uint8_t kTurn[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
  const hn::Repartition<uint8_t, DU> db;
  for (int n = 0; n < kLineVectors; n++) {
    VU c[4];
    for (int i = 0; i < 4; i++) {
      if (n == 0) fetch_line(rows.row(token + i), fetch);
      c[i] = codes_of<kDivide>(load_as_float<kType>(rows.row(token + i), n * kLanes), q[n], levels);
    }
    const VU low = hn::Or(c[0], hn::ShiftLeft<8>(c[1]));
    const VU high = hn::Or(hn::ShiftLeft<16>(c[2]), hn::ShiftLeft<24>(c[3]));
    const auto turned = hn::TableLookupBytes(hn::BitCast(db, hn::Or(low, high)), hn::LoadDup128(db, kTurn));
    bytes[n] = hn::BitCast(DU(), turned);
  }
}

template <Element kType, int kBits, bool kDivide>
HWY_INLINE void encode_key_codes(const EncodeParams& p, int64_t strip, const StripRows& rows, int64_t fetch,
                                 const Quantizers (&q)[kLineVectors]) {
  const RecordLayout& layout = *p.layout;
  const VF levels = splat(static_cast<float>((1 << kBits) - 1));
  for (int64_t t = 0; t < p.format->group_size; t += 4) {
    VU bytes[kLineVectors];
    key_code_bytes<kType, kDivide>(rows, t, fetch, q, levels, bytes);
    const auto line_of = [&](int plane) {
      return p.record + layout.k_codes[plane] + t / kLine * layout.k_words[plane] * kLineBytes + t % kLine * 4;
    };
    if constexpr (kBits == 3) {
      VU low[kLineVectors], high[kLineVectors];
      for (int n = 0; n < kLineVectors; n++) {
        low[n] = hn::And(bytes[n], hn::Set(DU(), 0x03030303u));
        high[n] = hn::And(hn::ShiftRight<2>(bytes[n]), hn::Set(DU(), 0x01010101u));
      }
      store_key_words<2>(low, strip, line_of(0));
      store_key_words<1>(high, strip, line_of(1));
    } else {
      store_key_words<kBits>(bytes, strip, line_of(0));
    }
  }
}

template <Element kType, int kBits>
HWY_INLINE void encode_key_strip(const EncodeParams& p, int64_t strip, const StripRows& rows, int64_t fetch,
                                 Chooser& chooser) {
  const RecordLayout& layout = *p.layout;
  const int64_t group = p.format->group_size;
  const ScaleKind kind = scale_kind(layout.scale_bytes);
  const ZeroRule rule(kBits);
  Range range[kLineVectors];
  alignas(64) float numbers[kLineVectors][kMaxGroup * kLanes];  // for rules that look at them
  const bool looked_at = chooser.rules.looks_at_numbers();
  for (int64_t t = 0; t < group; t++) {
    for (int n = 0; n < kLineVectors; n++) {
      const VF x = load_as_float<kType>(rows.row(t), n * kLanes);
      widen(range[n], x);
      if (looked_at) store_float(x, numbers[n] + t * kLanes);
    }
  }
  Quantizers q[kLineVectors];
  for (int n = 0; n < kLineVectors; n++) {
    const Choice c = chooser.choose(range[n], numbers[n], group);
    store_group(kind, p.record + layout.k_scale, p.record + layout.k_zero, rule, strip * kLine + n * kLanes, c.scale,
                c.zero);
    q[n] = c.coder;
  }
  if (chooser.rules.plain()) {
    encode_key_codes<kType, kBits, true>(p, strip, rows, fetch, q);
  } else {
    encode_key_codes<kType, kBits, false>(p, strip, rows, fetch, q);
  }
}

// `buffered`: p.k are rows that were just written, so that nothing need be fetched.
template <Element kType, int kBits>
bool encode_keys(const EncodeParams& p, bool buffered) {
  constexpr int64_t kSize = element_bytes(kType);
  const Format& f = *p.format;
  const int64_t next = buffered ? 0 : f.group_size * p.k_token_stride * kSize;
  Chooser chooser(GroupRules{f.scale_type, kBits, false, f.k_bias_correction, false, &f.k_search});
  for (int64_t strip = 0; strip < p.layout->k_channels / kLine; strip++) {
    StripRows rows{static_cast<const uint8_t*>(p.k) + strip * kLine * kSize, p.k_token_stride * kSize};
    const int64_t valid = std::min<int64_t>(kLine, f.head_dim - strip * kLine);
    if (valid == kLine) {
      encode_key_strip<kType, kBits>(p, strip, rows, next, chooser);
    } else {
      alignas(64) uint8_t filled[kMaxGroup * kLine * kSize];
      rows = fill_strip<kType>(rows, f.group_size, valid, false, filled);
      encode_key_strip<kType, kBits>(p, strip, rows, 0, chooser);
    }
  }
  return chooser.all_fit();
}

// ---------------------------------------------------------------------------------------------- values

// Scale, zero and largest code by group and token, [v_groups][G].
struct ValueScales {
  alignas(64) float scale[kMaxHeadDim];
  alignas(64) float zero[kMaxHeadDim];
  alignas(64) uint32_t top[kMaxHeadDim];
};

// The extremes of a row's lanes in 4 numbers each. A lane that met NaN or Inf gets the largest value Inf: whatever the
// smallest is, the span is then not finite.
HWY_INLINE void store_row_range(const Range& range, float* lo, float* hi) {
  const VF low = range.lo;
  const VF high = hn::IfThenElse(hn::IsNaN(range.probe), splat(std::numeric_limits<float>::infinity()), range.hi);
  const hn::Full128<float> d4;
#if HWY_TARGET == HWY_AVX3
  const hn::Half<DF> d8;
  const auto low8 = hn::Min(hn::LowerHalf(d8, low), hn::UpperHalf(d8, low));
  const auto high8 = hn::Max(hn::LowerHalf(d8, high), hn::UpperHalf(d8, high));
  hn::StoreU(hn::Min(hn::LowerHalf(d4, low8), hn::UpperHalf(d4, low8)), d4, lo);
  hn::StoreU(hn::Max(hn::LowerHalf(d4, high8), hn::UpperHalf(d4, high8)), d4, hi);
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::Min(hn::LowerHalf(d4, low), hn::UpperHalf(d4, low)), d4, lo);
  hn::StoreU(hn::Max(hn::LowerHalf(d4, high), hn::UpperHalf(d4, high)), d4, hi);
#else
  hn::StoreU(low, d4, lo);
  hn::StoreU(high, d4, hi);
#endif
}

// The ranges of one group of channels, of kLanes tokens, one token a lane.
template <Element kType>
HWY_INLINE Range value_ranges(const StripRows* strips, int64_t count, int64_t token) {
  alignas(64) float lo[kLanes * 4], hi[kLanes * 4];
  for (int64_t i = 0; i < kLanes; i++) {
    Range range;
    for (int64_t s = 0; s < count; s++) {
      const uint8_t* row = strips[s].row(token + i);
      for (int n = 0; n < kLineVectors; n++) widen(range, load_as_float<kType>(row, n * kLanes));
    }
    store_row_range(range, lo + 4 * i, hi + 4 * i);
  }
  VF a, b, c, d;
  hn::LoadInterleaved4(DF(), lo, a, b, c, d);
  const VF low = hn::Min(hn::Min(a, b), hn::Min(c, d));
  hn::LoadInterleaved4(DF(), hi, a, b, c, d);
  return {low, hn::Max(hn::Max(a, b), hn::Max(c, d))};
}

// Runs of 4 lanes, `stride` floats apart.
HWY_INLINE void store_quads(VF x, float* out, int64_t stride) {
  const hn::Full128<float> d4;
#if HWY_TARGET == HWY_AVX3
  const hn::Half<DF> d8;
  const auto low = hn::LowerHalf(d8, x), high = hn::UpperHalf(d8, x);
  hn::StoreU(hn::LowerHalf(d4, low), d4, out);
  hn::StoreU(hn::UpperHalf(d4, low), d4, out + stride);
  hn::StoreU(hn::LowerHalf(d4, high), d4, out + 2 * stride);
  hn::StoreU(hn::UpperHalf(d4, high), d4, out + 3 * stride);
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::LowerHalf(d4, x), d4, out);
  hn::StoreU(hn::UpperHalf(d4, x), d4, out + stride);
#else
  hn::StoreU(x, d4, out);
  (void)stride;
#endif
}

// For rules that look at the numbers: those of a group with the token in the lane, [channels up to a line][kLanes].
template <Element kType>
HWY_INLINE void turn_values(const StripRows* strips, int64_t channels, int64_t token, float* turned) {
  for (int64_t first = 0; first < channels; first += kLine) {
    for (int64_t i = 0; i < kLanes; i += 4) {
      for (int n = 0; n < kLineVectors; n++) {
        const auto row = [&](int64_t t) {
          return load_as_float<kType>(strips[first / kLine].row(token + i + t), n * kLanes);
        };
        const VF a = row(0), b = row(1), c = row(2), d = row(3);
        const VF ac = hn::InterleaveLower(DF(), a, c), bd = hn::InterleaveLower(DF(), b, d);
        const VF AC = hn::InterleaveUpper(DF(), a, c), BD = hn::InterleaveUpper(DF(), b, d);
        float* const out = turned + (first + n * kLanes) * kLanes + i;  // channels 4 j, 4 j + 1, 4 j + 2, 4 j + 3
        store_quads(hn::InterleaveLower(DF(), ac, bd), out, 4 * kLanes);
        store_quads(hn::InterleaveUpper(DF(), ac, bd), out + kLanes, 4 * kLanes);
        store_quads(hn::InterleaveLower(DF(), AC, BD), out + 2 * kLanes, 4 * kLanes);
        store_quads(hn::InterleaveUpper(DF(), AC, BD), out + 3 * kLanes, 4 * kLanes);
      }
    }
  }
}

template <Element kType>
HWY_INLINE void choose_value_scales(const EncodeParams& p, const StripRows* strips, Chooser& chooser,
                                    ValueScales& scales) {
  const RecordLayout& layout = *p.layout;
  const int64_t group = p.format->group_size, dim = p.format->value_head_dim;
  const ScaleKind kind = scale_kind(layout.scale_bytes);
  const ZeroRule rule(p.format->v_bits, p.format->v_symmetric);
  for (int64_t g = 0; g < layout.v_groups; g++) {
    const int64_t channels = std::min(layout.v_group, dim - g * layout.v_group);
    const StripRows* own = strips + g * layout.v_group / kLine;
    for (int64_t t = 0; t < group; t += kLanes) {
      const Range range = value_ranges<kType>(own, ceil_div(channels, kLine), t);
      alignas(64) float turned[kMaxHeadDim * kLanes];
      if (chooser.rules.looks_at_numbers()) turn_values<kType>(own, channels, t, turned);
      const Choice c = chooser.choose(range, turned, channels);
      const int64_t at = g * group + t;
      hn::Store(c.coder.scale, DF(), scales.scale + at);
      hn::Store(c.coder.zero, DF(), scales.zero + at);
      hn::Store(c.coder.top, DU(), scales.top + at);
      store_group(kind, p.record + layout.v_scale, p.record + layout.v_zero, rule, at, c.scale, c.zero);
    }
  }
}

// Where the words of a plane are, for one strip of channels and one vector of it.
struct ValueWords {
  HWY_INLINE ValueWords(uint8_t* first_word, int64_t bytes, VU mask) : first(first_word), next(bytes), valid(mask) {}

  uint8_t* first;  // word 0
  int64_t next;    // bytes from one word to the next
  VU valid;        // all ones in the channels that exist

  HWY_INLINE void store(int64_t word, VU words) const {
    hn::StoreU(hn::And(words, valid), DU(), reinterpret_cast<uint32_t*>(first + word * next));
  }
  // The upper half of a word of 32 codes.
  HWY_INLINE void join(int64_t word, VU words) const {
    auto* at = reinterpret_cast<uint32_t*>(first + word * next);
    hn::StoreU(hn::Or(hn::LoadU(DU(), at), hn::ShiftLeft<8>(hn::And(words, valid))), DU(), at);
  }
};

// The codes of 16 tokens from `token` on and kLanes channels, into words. Pairs of tokens stand in the two halves of a
// word, the last pair on top: each step shifts what is there and adds a pair below it.
template <Element kType, int kBits, bool kDivide>
HWY_INLINE void encode_value_words(const StripRows& rows, int n, int64_t token, int64_t fetch,
                                   const ValueScales& scales, int64_t at, const ValueWords (&planes)[2]) {
  const VF levels = splat(static_cast<float>((1 << kBits) - 1));
  constexpr int kPairs = kBits >= 4 ? 16 / kBits : 8;  // of one word that these tokens fill
  VU words = hn::Zero(DU()), high = hn::Zero(DU());
  for (int pair = 7; pair >= 0; pair--) {
    VU c[2];
    for (int i = 0; i < 2; i++) {
      const int64_t t = token + 2 * pair + i;
      const Quantizers q{splat(scales.scale[at + t]), splat(scales.zero[at + t]), hn::Set(DU(), scales.top[at + t])};
      if (n == 0) fetch_line(rows.row(t), fetch);
      const VF x = load_as_float<kType>(rows.row(t), n * kLanes);
      c[i] = codes_of<kDivide>(x, q, levels);
    }
    const VU both = hn::Or(c[0], hn::ShiftLeft<16>(c[1]));
    if constexpr (kBits == 3) {
      words = hn::Or(hn::ShiftLeft<2>(words), hn::And(both, hn::Set(DU(), 0x00030003u)));
      high = hn::Or(hn::ShiftLeft<1>(high), hn::And(hn::ShiftRight<2>(both), hn::Set(DU(), 0x00010001u)));
    } else {
      words = hn::Or(hn::ShiftLeft<kBits>(words), both);
      if (kBits >= 4 && pair % kPairs == 0) {
        planes[0].store((token + 2 * pair) / codes_per_word(kBits), words);
        words = hn::Zero(DU());
      }
    }
  }
  if constexpr (kBits == 2 || kBits == 3) planes[0].store(token / kLine, words);
  if constexpr (kBits == 1 || kBits == 3) {
    const ValueWords& plane = planes[kBits == 3 ? 1 : 0];
    const VU bits = kBits == 3 ? high : words;
    if (token % 32 == 0) {
      plane.store(token / 32, bits);
    } else {
      plane.join(token / 32, bits);
    }
  }
}

template <Element kType, int kBits>
bool encode_values(const EncodeParams& p, bool buffered) {
  constexpr int64_t kSize = element_bytes(kType);
  const Format& f = *p.format;
  const RecordLayout& layout = *p.layout;
  const int64_t num_strips = layout.v_channels / kLine;
  StripRows strips[kMaxHeadDim / kLine];
  for (int64_t s = 0; s < num_strips; s++) {
    strips[s] = {static_cast<const uint8_t*>(p.v) + s * kLine * kSize, p.v_token_stride * kSize};
  }
  const int64_t last_valid = f.value_head_dim - (num_strips - 1) * kLine;
  alignas(64) uint8_t filled[kMaxGroup * kLine * kSize];
  if (last_valid < kLine) {
    strips[num_strips - 1] = fill_strip<kType>(strips[num_strips - 1], f.group_size, last_valid, true, filled);
  }
  ValueScales scales;
  Chooser chooser(GroupRules{f.scale_type, kBits, f.v_symmetric, false, f.v_gain_correction, &f.v_search});
  choose_value_scales<kType>(p, strips, chooser, scales);
  for (int64_t s = 0; s < num_strips; s++) {
    const int64_t valid = s + 1 < num_strips ? kLine : last_valid;
    const int64_t at = s * kLine / layout.v_group * f.group_size;
    const int64_t fetch = valid == kLine && !buffered ? f.group_size * p.v_token_stride * kSize : 0;
    for (int n = 0; n < kLineVectors; n++) {
      const auto existing = static_cast<size_t>(std::max<int64_t>(valid - n * kLanes, 0));
      const VU mask = hn::VecFromMask(DU(), hn::FirstN(DU(), existing));
      uint8_t* line = p.record + s * kLineBytes + n * kLanes * 4;
      const ValueWords planes[2] = {{line + layout.v_codes[0], num_strips * kLineBytes, mask},
                                    {line + layout.v_codes[1], num_strips * kLineBytes, mask}};
      for (int64_t t = 0; t < f.group_size; t += kLine) {
        if (chooser.rules.plain()) {
          encode_value_words<kType, kBits, true>(strips[s], n, t, fetch, scales, at, planes);
        } else {
          encode_value_words<kType, kBits, false>(strips[s], n, t, fetch, scales, at, planes);
        }
      }
    }
  }
  return chooser.all_fit();
}

// ---------------------------------------------------------------------------------------------- the whole record

template <Element kType>
bool encode_keys_of_bits(const EncodeParams& p, bool buffered) {
  switch (p.format->k_bits) {
    case 1:
      return encode_keys<kType, 1>(p, buffered);
    case 2:
      return encode_keys<kType, 2>(p, buffered);
    case 3:
      return encode_keys<kType, 3>(p, buffered);
    case 4:
      return encode_keys<kType, 4>(p, buffered);
    default:
      return encode_keys<kType, 8>(p, buffered);
  }
}

template <Element kType>
bool encode_values_of_bits(const EncodeParams& p, bool buffered) {
  switch (p.format->v_bits) {
    case 1:
      return encode_values<kType, 1>(p, buffered);
    case 2:
      return encode_values<kType, 2>(p, buffered);
    case 3:
      return encode_values<kType, 3>(p, buffered);
    case 4:
      return encode_values<kType, 4>(p, buffered);
    default:
      return encode_values<kType, 8>(p, buffered);
  }
}

#if HWY_TARGET == HWY_AVX3
HWY_INLINE __m512i pick(__m512i low, __m512i high, __m512i index, uint32_t) {
  return _mm512_permutex2var_epi32(low, index, high);
}
HWY_INLINE __m512i pick(__m512i low, __m512i high, __m512i index, uint16_t) {
  return _mm512_permutex2var_epi16(low, index, high);
}

// order_rows for rows of kPairs pairs of vectors: a permutation picks from a pair, and the lanes are kept that it has.
template <int kPairs, class Number>
HWY_INLINE void order_pairs(const Number* rows, int64_t row_stride, const int16_t* order, int64_t count, Number* out,
                            int64_t out_stride) {
  constexpr bool kWide = sizeof(Number) == 4;
  constexpr int64_t kPick = 64 / static_cast<int64_t>(sizeof(Number));  // numbers in a vector
  const int64_t next = count * row_stride * static_cast<int64_t>(sizeof(Number));
  for (int64_t i = 0; i < 2 * kPairs * kPick; i += kPick) {
    const __m512i index = kWide ? _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(order + i)))
                                : _mm512_loadu_si512(order + i);
    __mmask64 here[kPairs];  // by byte
    KIVI_UNROLL
    for (int pair = 0; pair < kPairs; pair++) {
      const __m512i of_lane = kWide ? _mm512_srli_epi32(index, 5) : _mm512_srli_epi16(index, 6);
      here[pair] = kWide ? _mm512_cmpeq_epi32_mask(of_lane, _mm512_set1_epi32(pair))
                         : _mm512_cmpeq_epi16_mask(of_lane, _mm512_set1_epi16(static_cast<int16_t>(pair)));
    }
    for (int64_t t = 0; t < count; t++) {
      const Number* const row = rows + t * row_stride;
      fetch_line(reinterpret_cast<const uint8_t*>(row + i), next);
      __m512i picked = _mm512_setzero_si512();
      KIVI_UNROLL
      for (int pair = 0; pair < kPairs; pair++) {
        const Number* const from = row + 2 * pair * kPick;
        const __m512i found = pick(_mm512_loadu_si512(from), _mm512_loadu_si512(from + kPick), index, Number());
        picked = kWide ? _mm512_mask_mov_epi32(picked, static_cast<__mmask16>(here[pair]), found)
                       : _mm512_mask_mov_epi16(picked, static_cast<__mmask32>(here[pair]), found);
      }
      _mm512_storeu_si512(out + t * out_stride + i, picked);
    }
  }
}
#endif

// Rows of `dim` numbers brought into an order: out[t][i] = rows[t][order[i]]. `count` is a multiple of 4; as many rows
// after them are fetched.
template <class Number>
HWY_INLINE void order_rows(const Number* rows, int64_t row_stride, const int16_t* order, int64_t count, int64_t dim,
                           Number* out, int64_t out_stride) {
#if HWY_TARGET == HWY_AVX3
  constexpr int64_t kPair = 128 / static_cast<int64_t>(sizeof(Number));
  if (dim == kPair) return order_pairs<1>(rows, row_stride, order, count, out, out_stride);
  if (dim == 2 * kPair) return order_pairs<2>(rows, row_stride, order, count, out, out_stride);
  if (dim == 4 * kPair) return order_pairs<4>(rows, row_stride, order, count, out, out_stride);
#endif
  const int64_t next = count * row_stride * static_cast<int64_t>(sizeof(Number));
  for (int64_t t = 0; t < count; t += 4) {  // an entry of the order serves four rows
    const Number* const row = rows + t * row_stride;
    Number* const ordered = out + t * out_stride;
    for (int64_t i = 0; i < dim; i++) {
      if (i % kLine == 0) {
        for (int64_t j = 0; j < 4; j++) fetch_line(reinterpret_cast<const uint8_t*>(row + j * row_stride + i), next);
      }
      const int64_t d = order[i];
      for (int64_t j = 0; j < 4; j++) ordered[j * out_stride + i] = row[j * row_stride + d];
    }
  }
}

// The keys of a record, brought into the order of their classes, and then each class as the keys of a plain record.
template <Element kType>
HWY_NOINLINE bool encode_key_classes(const EncodeParams& p) {
  constexpr int64_t kSize = element_bytes(kType);
  using Number = std::conditional_t<kType == Element::kFloat32, uint32_t, uint16_t>;
  const int64_t dim = p.format->head_dim, stride = p.layout->k_channels;
  thread_local std::vector<Number> buffer;
  buffer.resize(static_cast<size_t>(p.format->group_size * stride));
  order_rows(static_cast<const Number*>(p.k), p.k_token_stride, p.k_order, p.format->group_size, dim, buffer.data(),
             stride);
  bool fit = true;
  for (int64_t c = 0; c < p.layout->num_key_classes; c++) {
    const Format format = key_class_format(*p.format, *p.layout, c);
    const RecordLayout layout = key_class_layout(*p.layout, c);
    EncodeParams one = p;
    one.format = &format;
    one.layout = &layout;
    one.k = reinterpret_cast<const uint8_t*>(buffer.data()) + p.layout->key_classes[c].first * kSize;
    one.k_token_stride = stride;
    fit = encode_keys_of_bits<kType>(one, true) && fit;
  }
  return fit;
}

// The values of a record in float32, rotated; rows are a multiple of a vector apart.
template <Element kType>
HWY_NOINLINE bool encode_rotated_values(const EncodeParams& p) {
  constexpr int64_t kSize = element_bytes(kType);
  const int64_t dim = p.format->value_head_dim, stride = round_up(dim, kLine);
  const int64_t next = p.format->group_size * p.v_token_stride * kSize;  // the group after this one is fetched
  thread_local std::vector<float> buffer;
  buffer.resize(static_cast<size_t>(p.format->group_size * stride));
  float* const rows = buffer.data();
  for (int64_t t = 0; t < p.format->group_size; t++) {
    float* const row = rows + t * stride;
    const int64_t at = t * p.v_token_stride;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      if (d % kLine == 0) fetch_line(static_cast<const uint8_t*>(p.v) + (at + d) * kSize, next);
      store_float(load_as_float<kType>(p.v, at + d), row + d);
    }
    if (d < dim) store_float(load_tail<kType>(p.v, at + d, dim - d), row + d);
    rotate(row, dim, /*back=*/false);
  }
  EncodeParams rotated = p;
  rotated.v = rows;
  rotated.v_token_stride = stride;
  rotated.type = Element::kFloat32;
  return encode_values_of_bits<Element::kFloat32>(rotated, true);
}

template <Element kType>
bool encode_as(const EncodeParams& p) {
  const bool keys_fit =
      p.layout->num_key_classes > 1 ? encode_key_classes<kType>(p) : encode_keys_of_bits<kType>(p, false);
  return (p.format->v_rotated ? encode_rotated_values<kType>(p) : encode_values_of_bits<kType>(p, false)) && keys_fit;
}

bool encode(const EncodeParams& p) {
  const RecordLayout& r = *p.layout;
  const auto clear = [&](int64_t from, int64_t to) {  // what a section leaves up to where the next one starts
    std::memset(p.record + from, 0, static_cast<size_t>(to - from));
  };
  const int64_t k_bytes = r.k_channels * r.scale_bytes;
  const int64_t v_bytes = r.v_groups * p.format->group_size * r.scale_bytes;
  clear(r.k_scale + k_bytes, r.k_zero);
  clear(r.k_zero + k_bytes, r.v_codes[0]);
  clear(r.v_scale + v_bytes, r.v_zero);
  if (!p.format->v_symmetric) clear(r.v_zero + v_bytes, r.bytes);
  switch (p.type) {
    case Element::kFloat32:
      return encode_as<Element::kFloat32>(p);
    case Element::kFloat16:
      return encode_as<Element::kFloat16>(p);
    default:
      return encode_as<Element::kBFloat16>(p);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
