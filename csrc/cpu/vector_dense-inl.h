// Dense quantise and dequantise with vectors, in the two cases that occur: groups across rows of contiguous elements
// (lanes are columns), and groups along contiguous elements. All else, and what is left over, is the scalar kernel's.
// (No #pragma once: foreach_target.h includes this file once per target.)

#if defined(KIVI_CPU_VECTOR_DENSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KIVI_CPU_VECTOR_DENSE_INL_H_
#undef KIVI_CPU_VECTOR_DENSE_INL_H_
#else
#define KIVI_CPU_VECTOR_DENSE_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/reference.h"
#include "cpu/vector_decode-inl.h"
#include "cpu/vector_group-inl.h"
#include "format/codes.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// kLanes bytes, one per lane.
HWY_INLINE VU load_bytes(const uint8_t* p) {
  const hn::Rebind<uint8_t, DU> db;
  return hn::PromoteTo(DU(), hn::LoadU(db, p));
}
HWY_INLINE void store_bytes(VU x, uint8_t* p) {
  const hn::Rebind<uint8_t, DU> db;
  hn::StoreU(hn::DemoteTo(db, hn::BitCast(DI(), x)), db, p);
}

HWY_INLINE Quantizers plain_quantizers(const Range& range, int64_t bits) {
  Chooser chooser(GroupRules{ScaleType::kFloat32, static_cast<int>(bits)});
  const Choice c = chooser.choose(range, nullptr, 0);
  return {c.scale, c.zero, c.coder.top};
}

// ---------------------------------------------------------------------------------------------- lanes are columns

// kLanes columns from column j of outer index o. Codes are collected until 8 of them make whole bytes.
template <Element kType>
HWY_INLINE void quantize_columns(const QuantizeParams& p, int64_t o, int64_t j) {
  const int64_t groups = ceil_div(p.n, p.group_size);
  const VF levels = splat(static_cast<float>((1 << p.bits) - 1));
  const auto x_at = [&](int64_t i) { return o * p.x_outer_stride + i * p.x_n_stride + j; };
  uint8_t* out = p.codes == nullptr ? nullptr : p.codes + o * dense_bytes(p.n, p.bits) * p.inner + j;
  VU collected = hn::Zero(DU());
  int shift = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * p.group_size, end = std::min(first + p.group_size, p.n);
    Range range;
    for (int64_t i = first; i < end; i++) widen(range, load_as_float<kType>(p.x, x_at(i)));
    const Quantizers q = plain_quantizers(range, p.bits);
    const int64_t at = (o * groups + g) * p.inner + j;
    if (p.scale != nullptr) store_float(q.scale, p.scale + at);
    if (p.zero != nullptr) store_float(q.zero, p.zero + at);
    for (int64_t i = first; i < end; i++) {
      const VU codes = codes_of(load_as_float<kType>(p.x, x_at(i)), q, levels);
      if (p.values != nullptr) {
        store_float(values_of(codes, q.scale, q.zero), p.values + (o * p.n + i) * p.inner + j);
      }
      if (out == nullptr) continue;
      collected = hn::Or(collected, hn::ShiftLeftSame(codes, shift));
      shift += static_cast<int>(p.bits);
      if (shift < 8 * p.bits && shift < 32 && i + 1 < p.n) continue;
      for (; shift > 0; shift -= 8) {
        store_bytes(hn::And(collected, hn::Set(DU(), 255u)), out);
        collected = hn::ShiftRight<8>(collected);
        out += p.inner;
      }
      shift = 0;
    }
  }
}

// ---------------------------------------------------------------------------------------------- lanes along the group

inline constexpr int64_t kRun = 64;  // elements of a group that are worked on at once

// 8 codes, one per byte, to 8 * bits bits: pairs, then fours, then eights move together.
HWY_INLINE uint64_t close_bytes(uint64_t x, int bits) {
  x = (x | x >> (8 - bits)) & 0x0001000100010001u * ((1u << 2 * bits) - 1u);
  x = (x | x >> (16 - 2 * bits)) & 0x0000000100000001u * ((uint64_t{1} << 4 * bits) - 1u);
  return (x | x >> (32 - 4 * bits)) & (~uint64_t{0} >> (64 - 8 * bits));
}

// The elements of one run as floats, `fill` beyond its end.
template <Element kType>
HWY_INLINE VF load_run(const void* x, int64_t at, int64_t count, VF fill) {
  if (count >= kLanes) return load_as_float<kType>(x, at);
  if (count <= 0) return fill;
  return hn::IfThenElse(hn::FirstN(DF(), static_cast<size_t>(count)), load_tail<kType>(x, at, count), fill);
}

template <Element kType>
HWY_INLINE Range group_ranges(const void* x, int64_t at, int64_t count) {
  const VF fill = splat(load_element(x, kType, at));  // counts twice, which no extreme minds
  Range range;
  for (int64_t i = 0; i < count; i += kLanes) widen(range, load_run<kType>(x, at + i, count - i, fill));
  // A lane that met NaN or Inf gets the largest value Inf: whatever the smallest is, the span is then not finite.
  const MF bad = hn::IsNaN(range.probe);
  range.lo = hn::MinOfLanes(DF(), range.lo);
  range.hi = hn::MaxOfLanes(DF(), hn::IfThenElse(bad, splat(std::numeric_limits<float>::infinity()), range.hi));
  range.probe = splat(0.0f);
  return range;
}

// One row of contiguous elements. Groups start on whole bytes: their size is a multiple of 8, or there is one group.
template <Element kType>
HWY_INLINE void quantize_row(const QuantizeParams& p, int64_t o) {
  const int64_t groups = ceil_div(p.n, p.group_size);
  const VF levels = splat(static_cast<float>((1 << p.bits) - 1));
  const int bits = static_cast<int>(p.bits);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * p.group_size, count = std::min(p.group_size, p.n - first);
    const int64_t x_at = o * p.x_outer_stride + first;
    const Quantizers q = plain_quantizers(group_ranges<kType>(p.x, x_at, count), p.bits);
    if (p.scale != nullptr) p.scale[o * groups + g] = hn::GetLane(q.scale);
    if (p.zero != nullptr) p.zero[o * groups + g] = hn::GetLane(q.zero);
    uint8_t* out = p.codes == nullptr ? nullptr : p.codes + o * dense_bytes(p.n, p.bits) + first * p.bits / 8;
    for (int64_t start = 0; start < count; start += kRun) {
      alignas(64) uint8_t codes[kRun] = {};
      const int64_t run = std::min(kRun, count - start);
      for (int64_t i = 0; i < run; i += kLanes) {
        // Beyond the end the zero point itself: code 0.
        const VU c = codes_of(load_run<kType>(p.x, x_at + start + i, run - i, q.zero), q, levels);
        store_bytes(c, codes + i);
        if (p.values == nullptr) continue;
        const VF values = values_of(c, q.scale, q.zero);
        store_some<Element::kFloat32>(values, p.values, o * p.n + first + start + i, run - i);
      }
      if (out == nullptr) continue;
      for (int64_t i = 0; i < run; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, codes + i, 8);
        if (bits < 8) eight = close_bytes(eight, bits);
        const int64_t bytes = std::min(p.bits, dense_bytes(run - i, p.bits));
        std::memcpy(out, &eight, static_cast<size_t>(bytes & 15));
        out += bytes;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- dequantise
//
// As records are decoded (vector_record-inl.h): spans of 32 numbers, each row written from end to end before the next.

// Where the codes of kLanes numbers stand in their bits: from the first of them, or from the byte that a code begins
// in.
template <int kBits>
struct RowPlaces {
  constexpr RowPlaces() : bit(), bit_of_byte(), bytes() {
    for (int i = 0; i < kLanes; i++) {
      bit[i] = static_cast<uint32_t>(i * kBits);
      bit_of_byte[i] = static_cast<uint32_t>(i * kBits % 8);
      for (int b = 0; b < 4; b++) bytes[4 * i + b] = static_cast<uint8_t>(i * kBits / 8 + std::min(b, 1));
    }
  }
  alignas(64) uint32_t bit[kLanes];
  alignas(64) uint32_t bit_of_byte[kLanes];
  alignas(64) uint8_t bytes[4 * kLanes];  // a lane's two
};
template <int kBits>
inline constexpr RowPlaces<kBits> kRowPlaces{};

// 16 codes. (Copied as one piece, the 6 bytes of 3 bits would go through memory.)
template <int kBits>
HWY_INLINE uint64_t load_line(const uint8_t* codes) {
  constexpr int kLow = std::min(2 * kBits, 4), kHigh = 2 * kBits - kLow;
  uint32_t low = 0, high = 0;
  std::memcpy(&low, codes, kLow);
  if constexpr (kHigh == 2) {
    uint16_t two;
    std::memcpy(&two, codes + kLow, sizeof two);
    high = two;
  } else if constexpr (kHigh > 0) {
    std::memcpy(&high, codes + kLow, sizeof high);
  }
  return low | uint64_t{high} << 32;
}

// Codes n * kLanes and on of a span of contiguous ones, a code at the bottom of each lane and anything above it.
template <int kBits>
HWY_INLINE VU row_codes(const uint8_t* codes, int n) {
  if constexpr (kBits == 8) {
    return load_bytes(codes + n * kLanes);
  } else {
    const uint64_t line = load_line<kBits>(codes + n / kLineVectors * 2 * kBits);
    if constexpr (kLanes * kBits <= 32) {
      const auto word = static_cast<uint32_t>(line >> (n % kLineVectors * kLanes * kBits));
      return hn::Shr(hn::Set(DU(), word), hn::Load(DU(), kRowPlaces<kBits>.bit));
    } else {
      const hn::Repartition<uint64_t, DF> d64;
      const hn::Repartition<uint8_t, DF> d8;
      const auto both =
          hn::TableLookupBytes(hn::BitCast(d8, hn::Set(d64, line)), hn::Load(d8, kRowPlaces<kBits>.bytes));
      return hn::Shr(hn::BitCast(DU(), both), hn::Load(DU(), kRowPlaces<kBits>.bit_of_byte));
    }
  }
}

// One group of contiguous elements.
template <Element kType, int kBits, bool kPlain>
HWY_INLINE void dequantize_run(const uint8_t* codes, int64_t count, float scale, float zero, uint8_t* out,
                               bool stream) {
  using Numbers = GroupNumbers<kType, kBits, kPlain>;
  constexpr int64_t kSpanBytes = kSpan * element_bytes(kType), kCodeBytes = kSpan * kBits / 8;
  const Numbers numbers(scale, zero);
  const auto span = [&](const uint8_t* in, uint8_t* at, bool stream_it) {
    VU x[kSpanVectors];
    KIVI_UNROLL
    for (int n = 0; n < kSpanVectors; n++) x[n] = numbers.of(row_codes<kBits>(in, n));
    Numbers::put(x, at, stream_it);
  };
  for (; count >= kSpan; count -= kSpan, codes += kCodeBytes, out += kSpanBytes) span(codes, out, stream);
  if (count == 0) return;
  alignas(64) uint8_t last_codes[kCodeBytes] = {}, last[kSpanBytes];
  std::memcpy(last_codes, codes, static_cast<size_t>(dense_bytes(count & (kSpan - 1), kBits)));
  span(last_codes, last, false);
  std::memcpy(out, last, static_cast<size_t>((count & (kSpan - 1)) * element_bytes(kType)));
}

// One row of contiguous elements. Groups start on whole bytes.
template <Element kType, int kBits>
HWY_INLINE void dequantize_row(const DequantizeParams& p, int64_t o, bool stream) {
  constexpr float kLevels = static_cast<float>((1 << kBits) - 1);
  auto* out = static_cast<uint8_t*>(p.out) + o * p.n * element_bytes(kType);
  const uint8_t* codes = p.codes + o * p.codes_strides[0];
  const float* scales = p.scale + o * p.scale_strides[0];
  const float* zeros = p.zero + o * p.zero_strides[0];
  for (int64_t first = 0; first < p.n; first += p.group_size) {
    const int64_t count = std::min(p.group_size, p.n - first);
    const float scale = *scales, zero = *zeros;
    const bool plain = std::fabs(scale) * kLevels + std::fabs(zero) <= kPlainLimit;
    const uint8_t* in = codes + first * kBits / 8;
    uint8_t* at = out + first * element_bytes(kType);
    if (kType == Element::kFloat32 || plain) {
      dequantize_run<kType, kBits, true>(in, count, scale, zero, at, stream);
    } else {
      dequantize_run<kType, kBits, false>(in, count, scale, zero, at, stream);
    }
    scales += p.scale_strides[1], zeros += p.zero_strides[1];
  }
}

// One group, rows [first, last), of some columns.
struct ColumnGroup {
  int64_t outer, first, last;
  int64_t column, columns;
  const float* scale;  // of the first of the columns
  const float* zero;
};

// The codes of some columns in one row, above and below them anything. 3 bits may end in the next byte: `more` is how
// far that is, or 0. D: lanes of 16 or of 32 bits.
template <int kBits, class D>
HWY_INLINE hn::Vec<D> column_codes(const uint8_t* codes, int64_t more, D d) {
  const hn::Rebind<uint8_t, D> db;
  const auto bits = hn::PromoteTo(d, hn::LoadU(db, codes));
  if constexpr (kBits != 3) return bits;
  return hn::Or(bits, hn::ShiftLeft<8>(hn::PromoteTo(d, hn::LoadU(db, codes + more))));
}

// Whole vectors of its columns; fewer than kLanes are left over.
template <Element kType, int kBits, bool kPlain>
void dequantize_columns_of_group(const DequantizeParams& p, const ColumnGroup& group, bool stream) {
  constexpr int64_t kSize = element_bytes(kType);
  constexpr bool kChoose = kType != Element::kFloat32 && kBits <= 3;
  const int64_t spans = group.columns / kSpan * kSpan;
  // To fill the choices takes as long as some rows.
  const bool choose = kChoose && group.last - group.first >= 2 << kBits;
  Choices<kChoose ? kBits : 1> choices;
  if constexpr (kChoose) {
    if (choose) choices.template fill<kType, kPlain>(group.scale, group.zero, spans);
  }
  const VU mask = hn::Set(DU(), (1u << kBits) - 1u);
  for (int64_t i = group.first; i < group.last; i++) {
    const int64_t first_bit = i * kBits, bit = first_bit % 8, more = bit + kBits > 8 ? p.codes_strides[1] : 0;
    const uint8_t* codes =
        p.codes + group.outer * p.codes_strides[0] + first_bit / 8 * p.codes_strides[1] + group.column;
    uint8_t* row = static_cast<uint8_t*>(p.out) + ((group.outer * p.n + i) * p.inner + group.column) * kSize;
    const VU place = hn::Set(DU(), static_cast<uint32_t>(bit));
    const auto number = [&](int64_t c) {
      const VU code = hn::And(hn::Shr(column_codes<kBits>(codes + c, more, DU()), place), mask);
      return values_of(code, load_float(group.scale + c), load_float(group.zero + c));
    };
    int64_t c = 0;
    if (choose) {
      if constexpr (kChoose) {
        const VH bit_0 = hn::Set(DH(), static_cast<uint16_t>(1u << bit));
        const VH bit_2 = hn::Set(DH(), static_cast<uint16_t>(4u << bit));
        for (; c < spans; c += kSpan) {
          VH halves[kLineVectors];
          KIVI_UNROLL
          for (int n = 0; n < kLineVectors; n++) {
            const int64_t at = c + n * kHalfLanes;
            const VH code = column_codes<kBits>(codes + at, more, DH());
            halves[n] = choices.choose(at, code, bit_0, code, bit_2);
          }
          put(halves, DH(), row + c * kSize, stream);
        }
      }
    } else {
      for (; c < spans; c += kSpan) {
        VF x[kSpanVectors];
        KIVI_UNROLL
        for (int n = 0; n < kSpanVectors; n++) x[n] = number(c + n * kLanes);
        put_numbers<kType, kPlain>(x, row + c * kSize, stream);
      }
    }
    for (; c + kLanes <= group.columns; c += kLanes) store_rounded<kType>(number(c), row + c * kSize, 0);
  }
}

// Columns [begin, end) of outer index o.
template <Element kType, int kBits>
void dequantize_columns(const DequantizeParams& p, int64_t o, int64_t begin, int64_t end, bool stream) {
  for (int64_t first = 0; first < p.n; first += p.group_size) {
    const int64_t g = first / p.group_size;
    for (int64_t column = begin; column < end; column += kMaxHeadDim) {  // few enough for scales to stay in L1
      const ColumnGroup group{o,
                              first,
                              std::min(first + p.group_size, p.n),
                              column,
                              std::min(kMaxHeadDim, end - column),
                              p.scale + o * p.scale_strides[0] + g * p.scale_strides[1] + column,
                              p.zero + o * p.zero_strides[0] + g * p.zero_strides[1] + column};
      if (kType == Element::kFloat32 || all_plain(group.scale, group.zero, group.columns / kLanes * kLanes, kBits)) {
        dequantize_columns_of_group<kType, kBits, true>(p, group, stream);
      } else {
        dequantize_columns_of_group<kType, kBits, false>(p, group, stream);
      }
    }
  }
  scalar_dequantize_columns(p, o, end - (end - begin) % kLanes, end);
}

// ---------------------------------------------------------------------------------------------- the kernels

HWY_INLINE bool whole_bytes(int64_t n, int64_t group_size) { return group_size % 8 == 0 || n <= group_size; }

template <Element kType>
void quantize_as(const QuantizeParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(p.inner, kInnerBlock);
  const bool rows = p.inner == 1 && p.x_n_stride == 1 && whole_bytes(p.n, p.group_size);
  const bool columns = !rows && p.x_inner_stride == 1 && p.inner >= kLanes;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t o = unit / blocks, first = unit % blocks * kInnerBlock;
    if (rows) {
      quantize_row<kType>(p, o);
    } else if (columns) {
      const int64_t last = std::min(first + kInnerBlock, p.inner);
      int64_t j = first;
      for (; j + kLanes <= last; j += kLanes) quantize_columns<kType>(p, o, j);
      scalar_quantize_columns(p, o, j, last);
    } else {
      scalar_quantize(p, unit, unit + 1);
    }
  }
}

void quantize(const QuantizeParams& p, int64_t begin, int64_t end) {
  switch (p.type) {
    case Element::kFloat32:
      return quantize_as<Element::kFloat32>(p, begin, end);
    case Element::kFloat16:
      return quantize_as<Element::kFloat16>(p, begin, end);
    default:
      return quantize_as<Element::kBFloat16>(p, begin, end);
  }
}

template <Element kType, int kBits>
void dequantize_of_bits(const DequantizeParams& p, int64_t begin, int64_t end) {
  constexpr int64_t kSize = element_bytes(kType);
  const int64_t blocks = ceil_div(p.inner, kInnerBlock);
  const bool rows = p.inner == 1 && p.codes_strides[1] == 1 && whole_bytes(p.n, p.group_size);
  const bool columns =
      !rows && p.inner >= kLanes && p.codes_strides[2] == 1 && p.scale_strides[2] == 1 && p.zero_strides[2] == 1;
  const int64_t run = (rows ? std::min(p.group_size, p.n) : p.inner) * kSize;
  const int64_t row = p.n * p.inner * kSize;
  const bool on_lines = (reinterpret_cast<uintptr_t>(p.out) | static_cast<uintptr_t>(run | row)) % kLineBytes == 0;
  const bool stream = p.outer * row >= kStreamBytes && on_lines;
  for (int64_t unit = begin; unit < end;) {
    const int64_t o = unit / blocks, block = unit % blocks;
    const int64_t units = columns ? std::min(end - unit, blocks - block) : 1;  // side by side: longer rows
    if (rows) {
      dequantize_row<kType, kBits>(p, o, stream);
    } else if (columns) {
      dequantize_columns<kType, kBits>(p, o, block * kInnerBlock, std::min((block + units) * kInnerBlock, p.inner),
                                       stream);
    } else {
      scalar_dequantize(p, unit, unit + 1);
    }
    unit += units;
  }
  if (stream) flush_streams();
}

template <Element kType>
void dequantize_as(const DequantizeParams& p, int64_t begin, int64_t end) {
  switch (p.bits) {
    case 1:
      return dequantize_of_bits<kType, 1>(p, begin, end);
    case 2:
      return dequantize_of_bits<kType, 2>(p, begin, end);
    case 3:
      return dequantize_of_bits<kType, 3>(p, begin, end);
    case 4:
      return dequantize_of_bits<kType, 4>(p, begin, end);
    default:
      return dequantize_of_bits<kType, 8>(p, begin, end);
  }
}

void dequantize(const DequantizeParams& p, int64_t begin, int64_t end) {
  switch (p.type) {
    case Element::kFloat32:
      return dequantize_as<Element::kFloat32>(p, begin, end);
    case Element::kFloat16:
      return dequantize_as<Element::kFloat16>(p, begin, end);
    default:
      return dequantize_as<Element::kBFloat16>(p, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard of this target
