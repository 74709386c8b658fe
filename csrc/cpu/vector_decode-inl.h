// Decoding of records with vectors (layout: kivi/format.h; the inverse: vector_record-inl.h). At the speed of memory: a
// few instructions per vector, each row written from end to end before the next (strips of 16 channels down the record
// take 3 to 5 times as long), the next record fetched meanwhile. Spans of 32 channels, two lines of a record, are
// worked on at once; the last one of a row goes through a buffer. What is read beyond the last channel is still in the
// record. (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_DECODE_INL_H_
#undef KIVI_CPU_VECTOR_DECODE_INL_H_
#else
#define KIVI_CPU_VECTOR_DECODE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/vector_record-inl.h"
#include "format/codes.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

inline constexpr int64_t kSpan = 2 * kLine;
inline constexpr int kSpanVectors = 2 * kLineVectors;

using DH = hn::Repartition<uint16_t, DF>;
using VH = hn::Vec<DH>;
inline constexpr int kHalfLanes = 2 * kLanes;

// Scales and zeros of one side of a record as floats; 0 beyond the last one, up to a whole span.
struct DecodeScales {
  alignas(64) float scale[kMaxHeadDim];
  alignas(64) float zero[kMaxHeadDim];
  bool plain;  // all_plain
};

// Numbers below this need no care when they are rounded to 16 bits: none is NaN or Inf, none leaves float16.
inline constexpr float kPlainLimit = 65000.0f;

// True if all numbers that `count` (a multiple of kLanes) scales and zeros can give are of that kind.
HWY_INLINE bool all_plain(const float* scale, const float* zero, int64_t count, int64_t bits) {
  const VF levels = splat(static_cast<float>((1 << bits) - 1)), limit = splat(kPlainLimit);
  MF plain = hn::Eq(limit, limit);
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF reach = hn::MulAdd(hn::Abs(load_float(scale + i)), levels, hn::Abs(load_float(zero + i)));
    plain = hn::And(plain, hn::Le(reach, limit));
  }
  return hn::AllTrue(DF(), plain);
}

HWY_INLINE void load_decode_scales(const RecordLayout& layout, const uint8_t* scales, const uint8_t* zeros,
                                   bool symmetric, int64_t count, int64_t bits, DecodeScales& out) {
  const ScaleKind kind = scale_kind(layout.scale_bytes);
  const ZeroRule rule(bits, symmetric);
  for (int64_t i = 0; i < round_up(count, kSpan); i += kLanes) {
    VF s = splat(0.0f), z = s;
    if (i < count) load_group(kind, scales, zeros, rule, i, s, z);
    hn::Store(s, DF(), out.scale + i);
    hn::Store(z, DF(), out.zero + i);
  }
  out.plain = all_plain(out.scale, out.zero, count, bits);
}

// ---------------------------------------------------------------------------------------------- decoded rows

// One side of a record and of the output. Copies, since a store through uint8_t* may change what is not local.
//
// Past the caches 4096 tokens of 8 heads take 1.3 ms instead of 1.7 in float32, 0.8 instead of 1.0 in bfloat16 (Zen
// 4).
struct DecodeSide {
  DecodeSide(const DecodeParams& p, void* out, int64_t token_stride, int64_t dim)
      : layout(*p.layout),
        record(p.record),
        group(p.format->group_size),
        symmetric(p.format->v_symmetric),
        head_dim(dim),
        first(p.first),
        count(p.count),
        rows(static_cast<uint8_t*>(out)),
        stride(token_stride * element_bytes(p.type)),
        stream(p.stream && (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(stride)) % kLineBytes == 0) {}
  uint8_t* row(int64_t i) const { return rows + i * stride; }

  RecordLayout layout;
  const uint8_t* record;
  int64_t group;
  bool symmetric;  // V
  int64_t head_dim;
  int64_t first, count;  // tokens
  uint8_t* rows;
  int64_t stride;  // bytes
  bool stream;
};

// Asks for the bytes [from, to) of the record that follows, a few lines with each token. It need not exist; at the end
// of a head's part of a page another one comes next, and this is in vain.
struct NextRecord {
  HWY_INLINE NextRecord(const DecodeSide& p, int64_t from, int64_t to)
      : first(p.record + from),
        distance(p.layout.bytes),
        bytes(to - from),
        per_token(round_up(ceil_div(bytes, p.group), kLineBytes)) {}
  HWY_INLINE void fetch(int64_t token) const {
    const int64_t end = std::min((token + 1) * per_token, bytes);
    for (int64_t i = token * per_token; i < end; i += kLineBytes) fetch_line(first + i, distance);
  }
  const uint8_t* first;
  int64_t distance, bytes, per_token;
};

// A row from spans: span(s, at, stream, last_at(x)) stores the 32 values of span s. last_at(x) is x in the last span
// where that is a part of one, so that what reads a record can stop at its end; in whole spans it is a constant beyond
// all, and costs nothing.
template <Element kType, class Span>
HWY_INLINE void store_row(const DecodeSide& p, int64_t i, const Span& span) {
  constexpr int64_t kSpanBytes = kSpan * element_bytes(kType);
  const auto whole = static_cast<int64_t>(static_cast<uint64_t>(p.head_dim) / kSpan);
  uint8_t* row = p.row(i);
  for (int64_t s = 0; s < whole; s++) {
    span(s, row + s * kSpanBytes, p.stream, [](int64_t) { return std::numeric_limits<int64_t>::max(); });
  }
  const int64_t rest = p.head_dim & (kSpan - 1);
  if (rest == 0) return;
  alignas(64) uint8_t last[kSpanBytes];
  span(whole, last, false, [](int64_t end) { return end; });
  std::memcpy(row + whole * kSpanBytes, last, static_cast<size_t>(rest * element_bytes(kType)));
}

template <class D, int kCount>
HWY_INLINE void put(const hn::Vec<D> (&x)[kCount], D d, uint8_t* at, bool stream) {
  auto* to = reinterpret_cast<hn::TFromD<D>*>(at);
  constexpr int kStep = static_cast<int>(hn::MaxLanes(D()));
  if (stream) {
    KIVI_UNROLL
    for (int n = 0; n < kCount; n++) hn::Stream(x[n], d, to + n * kStep);
  } else {
    KIVI_UNROLL
    for (int n = 0; n < kCount; n++) hn::StoreU(x[n], d, to + n * kStep);
  }
}

// Numbers rounded to 16 bits. kPlain: as all_plain says.
template <bool kPlain>
HWY_INLINE hn::Vec<hn::Half<DH>> to_float16(VF x) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  if constexpr (!kPlain) {
    x = hn::IfThenElse(is_finite(x), hn::Min(hn::Max(x, splat(-65504.0f)), splat(65504.0f)), x);
  }
  return hn::BitCast(hn::Half<DH>(), hn::DemoteTo(dh, x));
}
template <bool kPlain>
HWY_INLINE VU to_bfloat16(VF x) {  // in the upper halves; the lower ones hold anything
  const VU bits = hn::BitCast(DU(), x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1u));
  const VU rounded = hn::Add(hn::Add(bits, hn::Set(DU(), 0x7FFFu)), odd);
  if constexpr (kPlain) return rounded;
  return hn::IfThenElse(hn::RebindMask(DU(), hn::IsNaN(x)), hn::Or(bits, hn::Set(DU(), 0x00400000u)), rounded);
}

// The bits of numbers of the type, one a lane.
template <Element kType, bool kPlain>
HWY_INLINE VU element_bits(VF x) {
  if constexpr (kType == Element::kFloat32) return hn::BitCast(DU(), x);
  if constexpr (kType == Element::kFloat16) return hn::PromoteTo(DU(), to_float16<kPlain>(x));
  return hn::ShiftRight<16>(to_bfloat16<kPlain>(x));
}

// 2 * kLanes numbers of a 16-bit type side by side.
template <Element kType, bool kPlain>
HWY_INLINE VH to_halves(VF a, VF b) {
  if constexpr (kType == Element::kFloat16) {
    return hn::Combine(DH(), to_float16<kPlain>(b), to_float16<kPlain>(a));
  } else {
    return hn::ConcatOdd(DH(), hn::BitCast(DH(), to_bfloat16<kPlain>(b)), hn::BitCast(DH(), to_bfloat16<kPlain>(a)));
  }
}

// Stores a span of numbers as kType.
template <Element kType, bool kPlain>
HWY_INLINE void put_numbers(const VF (&x)[kSpanVectors], uint8_t* at, bool stream) {
  if constexpr (kType == Element::kFloat32) {
    put(x, DF(), at, stream);
  } else {
    VH halves[kLineVectors];
    KIVI_UNROLL
    for (int n = 0; n < kLineVectors; n++) halves[n] = to_halves<kType, kPlain>(x[2 * n], x[2 * n + 1]);
    put(halves, DH(), at, stream);
  }
}

// Stores a span from element_bits of its numbers.
template <Element kType>
HWY_INLINE void put_bits(const VU (&x)[kSpanVectors], uint8_t* at, bool stream) {
  if constexpr (kType == Element::kFloat32) {
    put(x, DU(), at, stream);
  } else {
    VH halves[kLineVectors];
    KIVI_UNROLL
    for (int n = 0; n < kLineVectors; n++) {
#if HWY_TARGET == HWY_AVX2
      // ConcatEven would clear the upper halves first.
      const __m256i packed = _mm256_packus_epi32(x[2 * n].raw, x[2 * n + 1].raw);
      halves[n] = VH{_mm256_permute4x64_epi64(packed, 0xD8)};
#else
      halves[n] = hn::ConcatEven(DH(), hn::BitCast(DH(), x[2 * n + 1]), hn::BitCast(DH(), x[2 * n]));
#endif
    }
    put(halves, DH(), at, stream);
  }
}

// ---------------------------------------------------------------------------------------------- a group's numbers

// Where all numbers that a group's codes stand for fit one vector they are looked up, else computed.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kLookUpBits = 4;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kLookUpBits = 3;
#else
inline constexpr int kLookUpBits = 2;
#endif

// table[code]. The table repeats itself, so that it does not matter what stands above the code.
template <int kBits>
HWY_INLINE VU look_up(VU table, VU codes) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kBits > 2) return VU{_mm512_permutexvar_epi32(codes.raw, table.raw)};
  return VU{_mm512_castps_si512(_mm512_permutevar_ps(_mm512_castsi512_ps(table.raw), codes.raw))};
#elif HWY_TARGET == HWY_AVX2
  if constexpr (kBits > 2) return VU{_mm256_permutevar8x32_epi32(table.raw, codes.raw)};
  return VU{_mm256_castps_si256(_mm256_permutevar_ps(_mm256_castsi256_ps(table.raw), codes.raw))};
#else
  return hn::TableLookupLanes(table, hn::IndicesFromVec(DU(), hn::And(codes, hn::Set(DU(), 3u))));
#endif
}

// The numbers of one group, from lanes with a code of kBits at the bottom and anything above it.
template <Element kType, int kBits, bool kPlain>
struct GroupNumbers {
  static constexpr bool kLookUp = kBits <= kLookUpBits;

  HWY_INLINE GroupNumbers(float s, float z) : scale(splat(s)), zero(splat(z)), table(hn::Zero(DU())) {
    if constexpr (kLookUp) table = bits_of_codes(scale, zero);
  }
  // With a table of fill_tables.
  HWY_INLINE explicit GroupNumbers(const uint32_t* four)
      : scale(splat(0.0f)), zero(scale), table(hn::LoadDup128(DU(), four)) {}

  // The tables of `count` groups (a multiple of 4) for codes of up to 2 bits, [count][4]. A vector of several tables
  // costs what one table does.
  static HWY_INLINE void fill_tables(const float* scales, const float* zeros, int64_t count, uint32_t* tables) {
    for (int64_t i = 0; i < count; i += 4) {
      const VF s = hn::LoadDup128(DF(), scales + i), z = hn::LoadDup128(DF(), zeros + i);
      KIVI_UNROLL
      for (int n = 0; n < kLineVectors; n++) {
        const auto group = hn::IndicesFromVec(DF(), hn::ShiftRight<2>(hn::Iota(DI(), n * kLanes)));
        const VU bits = bits_of_codes(hn::TableLookupLanes(s, group), hn::TableLookupLanes(z, group));
        hn::Store(bits, DU(), tables + 4 * i + n * kLanes);
      }
    }
  }

  // For `put` alone, which takes those of one span, of whichever groups.
  HWY_INLINE VU of(VU codes) const {
    if constexpr (kLookUp) return look_up<kBits>(table, codes);
    return hn::BitCast(DU(), values_of(hn::And(codes, code_mask()), scale, zero));
  }
  static HWY_INLINE void put(const VU (&x)[kSpanVectors], uint8_t* at, bool stream) {
    if constexpr (kLookUp) {
      put_bits<kType>(x, at, stream);
    } else {
      VF numbers[kSpanVectors];
      KIVI_UNROLL
      for (int n = 0; n < kSpanVectors; n++) numbers[n] = hn::BitCast(DF(), x[n]);
      put_numbers<kType, kPlain>(numbers, at, stream);
    }
  }

 private:
  static HWY_INLINE VU code_mask() { return hn::Set(DU(), (1u << kBits) - 1u); }
  // Of the codes 0, 1 and so on, over and over.
  static HWY_INLINE VU bits_of_codes(VF s, VF z) {
    return element_bits<kType, kPlain>(values_of(hn::And(hn::Iota(DU(), 0), code_mask()), s, z));
  }

  VF scale, zero;
  VU table;
};

// The numbers that codes of up to 3 bits stand for, by channel, each with a scale and a zero of its own. For a 16-bit
// type it is cheaper to round them all once and to choose by the bits of each code than to compute and round a number
// for every code.
template <int kBits>
struct Choices {
  template <Element kType, bool kPlain>
  HWY_INLINE void fill(const float* scale, const float* zero, int64_t channels) {
    for (int code = 0; code < 1 << kBits; code++) {
      const VU codes = hn::Set(DU(), static_cast<uint32_t>(code));
      const auto number = [&](int64_t c) { return values_of(codes, load_float(scale + c), load_float(zero + c)); };
      for (int64_t c = 0; c < round_up(channels, kSpan); c += kHalfLanes) {
        hn::Store(to_halves<kType, kPlain>(number(c), number(c + kLanes)), DH(), numbers[code] + c);
      }
    }
  }

  // Of kHalfLanes channels. The lowest bit of a code is the bit `mask` of `low`; the third, if there is one, is the bit
  // `high_mask` of `high`.
  HWY_INLINE VH choose(int64_t channel, VH low, VH mask, VH high, VH high_mask) const {
    const auto number = [&](int code) { return hn::Load(DH(), numbers[code] + channel); };
    const auto bit_0 = hn::TestBit(low, mask);
    if constexpr (kBits == 1) {
      return hn::IfThenElse(bit_0, number(1), number(0));
    } else {
      const auto bit_1 = hn::TestBit(low, hn::Add(mask, mask));
      const auto of_four = [&](int base) {
        const VH upper = hn::IfThenElse(bit_0, number(base + 3), number(base + 2));
        return hn::IfThenElse(bit_1, upper, hn::IfThenElse(bit_0, number(base + 1), number(base)));
      };
      if constexpr (kBits == 2) {
        return of_four(0);
      } else {
        return hn::IfThenElse(hn::TestBit(high, high_mask), of_four(4), of_four(0));
      }
    }
  }

  alignas(64) uint16_t numbers[1 << kBits][kMaxHeadDim];
};

// ---------------------------------------------------------------------------------------------- decoded keys

// The words of one token in the two planes.
struct KeyWords {
  HWY_INLINE KeyWords(const DecodeSide& p, int64_t token) {
    const auto t = static_cast<uint64_t>(token);
    for (int s = 0; s < 2; s++) {
      const int64_t line = static_cast<int64_t>(t / kLine) * p.layout.k_words[s];
      plane[s] = p.record + p.layout.k_codes[s] + line * kLineBytes + t % kLine * 4;
      last[s] = p.layout.k_words[s] - 1;
    }
  }
  const uint8_t* plane[2];
  int64_t last[2];  // word of the line
};

// Where the codes of a span's channels stand: the lowest bit in the word, and a mask of it in its half of the word.
template <int kBits>
struct KeyPlaces {
  constexpr KeyPlaces() : bit(), mask() {
    for (int64_t i = 0; i < kSpan; i++) {
      bit[i] = static_cast<uint32_t>(code_bit(kBits, i % codes_per_word(kBits)));
      mask[i] = static_cast<uint16_t>(1u << bit[i] % 16);
    }
  }
  alignas(64) uint32_t bit[kSpan];
  alignas(64) uint16_t mask[kSpan];
};
template <int kBits>
inline constexpr KeyPlaces<kBits> kKeyPlaces{};

// The words of kCount channels from channel `first` of the span on, each in its channels' part of the vector. Of a last
// span of one line the other half, which nobody reads, has no words: behind the last one there may be no record.
template <int kBits, int kCount>
HWY_INLINE VU spread_words(const uint8_t* words, int64_t last, int64_t span, int first) {
  constexpr int kWords = std::max(1, kCount * kBits / 32);
  const auto word = [&](int i) {
    uint32_t w;
    std::memcpy(&w, words + std::min<int64_t>(span * kBits + first * kBits / 32 + i, last) * kLineBytes, sizeof w);
    return hn::Set(DU(), w);
  };
  VU spread = word(kWords - 1);
  KIVI_UNROLL
  for (int i = kWords - 2; i >= 0; i--) {
    spread = hn::IfThenElse(hn::FirstN(DU(), static_cast<size_t>((i + 1) * kLanes / kWords)), word(i), spread);
  }
  return spread;
}

// The plane's codes of kLanes channels from channel `first` of the span on.
template <int kBits>
HWY_INLINE VU key_codes(const uint8_t* words, int64_t last, int64_t span, int first) {
  const VU spread = spread_words<kBits, kLanes>(words, last, span, first);
  return hn::And(hn::Shr(spread, hn::Load(DU(), kKeyPlaces<kBits>.bit + first)), hn::Set(DU(), (1u << kBits) - 1u));
}

template <Element kType, int kBits, bool kPlain>
void compute_key_rows(DecodeSide p, const DecodeScales& scales) {
  const NextRecord next(p, 0, p.layout.v_codes[0]);
  for (int64_t i = 0; i < p.count; i++) {
    next.fetch(p.first + i);
    const KeyWords words(p, p.first + i);
    const auto span = [&](int64_t s, uint8_t* at, bool stream, auto last_at) {
      VF x[kSpanVectors];
      KIVI_UNROLL
      for (int n = 0; n < kSpanVectors; n++) {
        VU codes = key_codes < kBits == 3 ? 2 : kBits > (words.plane[0], last_at(words.last[0]), s, n * kLanes);
        if constexpr (kBits == 3) {
          codes = hn::Or(codes, hn::ShiftLeft<2>(key_codes<1>(words.plane[1], last_at(words.last[1]), s, n * kLanes)));
        }
        const int64_t channel = s * kSpan + n * kLanes;
        x[n] = values_of(codes, hn::Load(DF(), scales.scale + channel), hn::Load(DF(), scales.zero + channel));
      }
      put_numbers<kType, kPlain>(x, at, stream);
    };
    store_row<kType>(p, i, span);
  }
}

template <Element kType, int kBits, bool kPlain>
void choose_key_rows(DecodeSide p, const DecodeScales& scales) {
  const NextRecord next(p, 0, p.layout.v_codes[0]);
  constexpr int kPlaneBits = kBits == 3 ? 2 : kBits;
  Choices<kBits> choices;
  choices.template fill<kType, kPlain>(scales.scale, scales.zero, p.head_dim);
  for (int64_t i = 0; i < p.count; i++) {
    next.fetch(p.first + i);
    const KeyWords words(p, p.first + i);
    const auto span = [&](int64_t s, uint8_t* at, bool stream, auto last_at) {
      VH halves[kLineVectors];
      KIVI_UNROLL
      for (int n = 0; n < kLineVectors; n++) {
        const int first = n * kHalfLanes;
        const VU low = spread_words<kPlaneBits, kHalfLanes>(words.plane[0], last_at(words.last[0]), s, first);
        const VU high =
            kBits == 3 ? spread_words<1, kHalfLanes>(words.plane[1], last_at(words.last[1]), s, first) : low;
        halves[n] = choices.choose(s * kSpan + first, hn::BitCast(DH(), low),
                                   hn::Load(DH(), kKeyPlaces<kPlaneBits>.mask + first), hn::BitCast(DH(), high),
                                   hn::Load(DH(), kKeyPlaces<1>.mask + first));
      }
      put(halves, DH(), at, stream);
    };
    store_row<kType>(p, i, span);
  }
}

template <Element kType, int kBits>
void decode_keys(const DecodeSide& p) {
  const RecordLayout& r = p.layout;
  DecodeScales scales;
  load_decode_scales(r, p.record + r.k_scale, p.record + r.k_zero, false, r.k_channels, kBits, scales);
  if constexpr (kType == Element::kFloat32) {
    compute_key_rows<kType, kBits, true>(p, scales);
  } else if constexpr (kBits > 3) {
    (scales.plain ? compute_key_rows<kType, kBits, true> : compute_key_rows<kType, kBits, false>)(p, scales);
  } else {
    (scales.plain ? choose_key_rows<kType, kBits, true> : choose_key_rows<kType, kBits, false>)(p, scales);
  }
}

// ---------------------------------------------------------------------------------------------- decoded values

// The codes of one token, a channel a lane. Above the code a lane holds anything.
template <int kBits>
struct ValueCodes {
  static constexpr int kLowBits = kBits == 3 ? 2 : kBits;

  HWY_INLINE ValueCodes(const DecodeSide& p, int64_t token)
      : low(words_of<kLowBits>(p, 0, token)),
        high(words_of<1>(p, 1, token)),
        low_place(place_of<kLowBits>(token)),
        high_place(place_of<1>(token)) {}

  HWY_INLINE VU at(int64_t channel) const {
    const VU codes = hn::Shr(hn::LoadU(DU(), low + channel), low_place);
    if constexpr (kBits != 3) return codes;
    const VU top = hn::Shr(hn::LoadU(DU(), high + channel), high_place);
    return hn::Or(hn::And(codes, hn::Set(DU(), 3u)), hn::ShiftLeft<2>(top));
  }

 private:
  template <int kPlaneBits>
  static const uint32_t* words_of(const DecodeSide& p, int plane, int64_t token) {
    const auto word = static_cast<int64_t>(static_cast<uint64_t>(token) / (32 / kPlaneBits));
    return reinterpret_cast<const uint32_t*>(p.record + p.layout.v_codes[plane]) + word * p.layout.v_channels;
  }
  template <int kPlaneBits>
  static HWY_INLINE VU place_of(int64_t token) {
    const uint64_t e = static_cast<uint64_t>(token) % (32 / kPlaneBits);
    return hn::Set(DU(), static_cast<uint32_t>(kPlaneBits * (e / 2) + 16 * (e % 2)));  // code_bit
  }

  const uint32_t* low;
  const uint32_t* high;
  VU low_place, high_place;
};

// kNarrow: groups are an odd number of lines, so that the two lines of a span may be of different groups.
template <Element kType, int kBits, bool kPlain, bool kNarrow>
void decode_value_rows(DecodeSide p, const DecodeScales& scales) {
  using Numbers = GroupNumbers<kType, kBits, kPlain>;
  constexpr int kGroupVectors = kNarrow ? kLineVectors : kSpanVectors;
  constexpr bool kTables = kType != Element::kFloat32 && kBits <= 2;
  const NextRecord next(p, p.layout.v_codes[0], p.layout.bytes);
  const int64_t group = p.group;
  // Of a last span of one line the other half, which nobody reads, has no codes: after those of the last token there
  // may be less than a vector of the record.
  const int64_t last_codes = p.layout.v_channels - kLanes;
  alignas(64) uint32_t tables[kTables ? 4 * kMaxHeadDim : 1];  // by group of channels and token
  if constexpr (kTables) {
    Numbers::fill_tables(scales.scale, scales.zero, round_up(p.layout.v_groups * group, kSpan), tables);
  }
  const auto numbers_of = [&](int64_t i) {
    if constexpr (kTables) {
      return Numbers(tables + 4 * i);
    } else {
      return Numbers(scales.scale[i], scales.zero[i]);
    }
  };
  uint16_t scale_at[kMaxHeadDim / kLine];  // of token 0, by line of channels
  for (int64_t line = 0; line < round_up(p.layout.v_channels, kSpan) / kLine; line++) {
    scale_at[line] = static_cast<uint16_t>(line * kLine / p.layout.v_group * group);
  }
  for (int64_t i = 0; i < p.count; i++) {
    const int64_t t = p.first + i;
    next.fetch(t);
    const ValueCodes<kBits> codes(p, t);
    const auto span = [&](int64_t s, uint8_t* at, bool stream, auto last_at) {
      VU x[kSpanVectors];
      KIVI_UNROLL
      for (int from = 0; from < kSpanVectors; from += kGroupVectors) {
        const Numbers numbers = numbers_of(scale_at[(s * kSpan + from * kLanes) / kLine] + t);
        KIVI_UNROLL
        for (int n = from; n < from + kGroupVectors; n++) {
          x[n] = numbers.of(codes.at(std::min<int64_t>(s * kSpan + n * kLanes, last_at(last_codes))));
        }
      }
      Numbers::put(x, at, stream);
    };
    store_row<kType>(p, i, span);
  }
}

template <Element kType, int kBits, bool kPlain>
void decode_values_as(const DecodeSide& p, const DecodeScales& scales) {
  if (p.layout.v_group % kSpan != 0) {
    decode_value_rows<kType, kBits, kPlain, true>(p, scales);
  } else {
    decode_value_rows<kType, kBits, kPlain, false>(p, scales);
  }
}

template <Element kType, int kBits>
void decode_values(const DecodeSide& p) {
  const RecordLayout& r = p.layout;
  DecodeScales scales;
  load_decode_scales(r, p.record + r.v_scale, p.record + r.v_zero, p.symmetric, r.v_groups * p.group, kBits, scales);
  if constexpr (kType == Element::kFloat32) {
    decode_values_as<kType, kBits, true>(p, scales);
  } else {
    (scales.plain ? decode_values_as<kType, kBits, true> : decode_values_as<kType, kBits, false>)(p, scales);
  }
}

// ---------------------------------------------------------------------------------------------- a decoded record

template <Element kType>
void decode_keys_of_bits(int64_t bits, const DecodeSide& p) {
  switch (bits) {
    case 1:
      return decode_keys<kType, 1>(p);
    case 2:
      return decode_keys<kType, 2>(p);
    case 3:
      return decode_keys<kType, 3>(p);
    case 4:
      return decode_keys<kType, 4>(p);
    default:
      return decode_keys<kType, 8>(p);
  }
}

template <Element kType>
void decode_values_of_bits(int64_t bits, const DecodeSide& p) {
  switch (bits) {
    case 1:
      return decode_values<kType, 1>(p);
    case 2:
      return decode_values<kType, 2>(p);
    case 3:
      return decode_values<kType, 3>(p);
    case 4:
      return decode_values<kType, 4>(p);
    default:
      return decode_values<kType, 8>(p);
  }
}

// Keys in classes: each class as the keys of a plain record, a few rows at a time, and then every number to its
// channel.
template <Element kType>
HWY_NOINLINE void decode_key_classes(const DecodeParams& p) {
  using Number = std::conditional_t<kType == Element::kFloat32, uint32_t, uint16_t>;
  constexpr int64_t kRows = 8;
  alignas(64) Number rows[kRows * kMaxHeadDim];
  for (int64_t c = 0; c < p.layout->num_key_classes; c++) {
    const Format format = key_class_format(*p.format, *p.layout, c);
    const RecordLayout layout = key_class_layout(*p.layout, c);
    const int16_t* const order = p.k_order + p.layout->key_classes[c].first;
    const int64_t dim = format.head_dim, stride = layout.k_channels;
    DecodeParams some = p;
    some.format = &format, some.layout = &layout, some.k = rows, some.k_token_stride = stride, some.stream = false;
    for (int64_t i = 0; i < p.count; i += kRows) {
      some.first = p.first + i, some.count = std::min(kRows, p.count - i);
      decode_keys_of_bits<kType>(format.k_bits, DecodeSide(some, rows, stride, dim));
      for (int64_t j = 0; j < some.count; j++) {
        Number* const out = static_cast<Number*>(p.k) + (i + j) * p.k_token_stride;
        for (int64_t d = 0; d < dim; d++) out[order[d]] = rows[j * stride + d];
      }
    }
  }
}

// Values that stand in the record rotated: rows in float32 first, a few at a time.
template <Element kType>
HWY_NOINLINE void decode_rotated_values(const DecodeParams& p) {
  constexpr int64_t kRows = 8;
  alignas(64) float rows[kRows * kMaxHeadDim];
  const int64_t dim = p.format->value_head_dim, stride = round_up(dim, kLine);
  DecodeParams some = p;
  some.v = rows, some.v_token_stride = stride, some.type = Element::kFloat32, some.stream = false;
  for (int64_t i = 0; i < p.count; i += kRows) {
    some.first = p.first + i, some.count = std::min(kRows, p.count - i);
    decode_values_of_bits<Element::kFloat32>(p.format->v_bits, DecodeSide(some, rows, stride, dim));
    for (int64_t j = 0; j < some.count; j++) {
      float* const row = rows + j * stride;
      rotate(row, dim, /*back=*/true);
      for (int64_t d = 0; d < dim; d += kLanes) {
        store_some<kType>(load_float(row + d), p.v, (i + j) * p.v_token_stride + d, dim - d);
      }
    }
  }
}

template <Element kType>
void decode_as(const DecodeParams& p) {
  const Format& f = *p.format;
  if (p.k != nullptr) {
    if (p.layout->num_key_classes > 1) {
      decode_key_classes<kType>(p);
    } else {
      decode_keys_of_bits<kType>(f.k_bits, DecodeSide(p, p.k, p.k_token_stride, f.head_dim));
    }
  }
  if (p.v == nullptr) return;
  if (f.v_rotated) {
    decode_rotated_values<kType>(p);
  } else {
    decode_values_of_bits<kType>(f.v_bits, DecodeSide(p, p.v, p.v_token_stride, f.value_head_dim));
  }
}

void decode(const DecodeParams& p) {
  switch (p.type) {
    case Element::kFloat32:
      return decode_as<Element::kFloat32>(p);
    case Element::kFloat16:
      return decode_as<Element::kFloat16>(p);
    default:
      return decode_as<Element::kBFloat16>(p);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
