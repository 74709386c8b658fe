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
#include <cstdint>
#include <cstring>

#include "cpu/codes.h"
#include "cpu/vector_group-inl.h"

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
  Chooser chooser{ScaleType::kFloat32, false, static_cast<int>(bits), splat(0.0f)};
  return chooser.choose<Element::kFloat32>(range, nullptr, 0, 0);
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

template <Element kType>
HWY_INLINE void dequantize_columns(const DequantizeParams& p, int64_t o, int64_t j) {
  const VU mask = hn::Set(DU(), (1u << p.bits) - 1u);
  const uint8_t* codes = p.codes + o * p.codes_strides[0] + j;
  const float* scale = p.scale + o * p.scale_strides[0] + j;
  const float* zero = p.zero + o * p.zero_strides[0] + j;
  for (int64_t first = 0; first < p.n; first += p.group_size) {
    const VF s = load_float(scale), z = load_float(zero);
    for (int64_t i = first; i < std::min(first + p.group_size, p.n); i++) {
      const int64_t bit = i * p.bits;
      VU bits = load_bytes(codes + bit / 8 * p.codes_strides[1]);
      if (bit % 8 + p.bits > 8) {  // a code of 3 bits in two bytes
        bits = hn::Or(bits, hn::ShiftLeft<8>(load_bytes(codes + (bit / 8 + 1) * p.codes_strides[1])));
      }
      const VU code = hn::And(hn::ShiftRightSame(bits, static_cast<int>(bit % 8)), mask);
      store_rounded<kType>(values_of(code, s, z), p.out, (o * p.n + i) * p.inner + j);
    }
    scale += p.scale_strides[1], zero += p.zero_strides[1];
  }
}

// ---------------------------------------------------------------------------------------------- lanes along the group

inline constexpr int64_t kRun = 64;  // elements of a group that are worked on at once

// 8 codes, one per byte, to 8 * bits bits, and back: pairs, then fours, then eights move together.
HWY_INLINE uint64_t close_bytes(uint64_t x, int bits) {
  x = (x | x >> (8 - bits)) & 0x0001000100010001u * ((1u << 2 * bits) - 1u);
  x = (x | x >> (16 - 2 * bits)) & 0x0000000100000001u * ((uint64_t{1} << 4 * bits) - 1u);
  return (x | x >> (32 - 4 * bits)) & (~uint64_t{0} >> (64 - 8 * bits));
}
HWY_INLINE uint64_t spread_bytes(uint64_t x, int bits) {
  x = (x | x << (32 - 4 * bits)) & 0x0000000100000001u * ((uint64_t{1} << 4 * bits) - 1u);
  x = (x | x << (16 - 2 * bits)) & 0x0001000100010001u * ((1u << 2 * bits) - 1u);
  return (x | x << (8 - bits)) & 0x0101010101010101u * ((1u << bits) - 1u);
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

template <Element kType>
HWY_INLINE void dequantize_row(const DequantizeParams& p, int64_t o) {
  const int bits = static_cast<int>(p.bits);
  for (int64_t g = 0; g * p.group_size < p.n; g++) {
    const int64_t first = g * p.group_size, count = std::min(p.group_size, p.n - first);
    const VF scale = splat(p.scale[o * p.scale_strides[0] + g * p.scale_strides[1]]);
    const VF zero = splat(p.zero[o * p.zero_strides[0] + g * p.zero_strides[1]]);
    const uint8_t* in = p.codes + o * p.codes_strides[0] + first * p.bits / 8;
    for (int64_t start = 0; start < count; start += kRun) {
      alignas(64) uint8_t codes[kRun] = {};
      const int64_t run = std::min(kRun, count - start);
      for (int64_t i = 0; i < run; i += 8) {
        uint64_t eight = 0;
        const int64_t bytes = std::min(p.bits, dense_bytes(run - i, p.bits));
        std::memcpy(&eight, in, static_cast<size_t>(bytes & 15));
        if (bits < 8) eight = spread_bytes(eight, bits);
        std::memcpy(codes + i, &eight, 8);
        in += bytes;
      }
      for (int64_t i = 0; i < run; i += kLanes) {
        store_some<kType>(values_of(load_bytes(codes + i), scale, zero), p.out, o * p.n + first + start + i, run - i);
      }
    }
  }
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

template <Element kType>
void dequantize_as(const DequantizeParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(p.inner, kInnerBlock);
  const bool rows = p.inner == 1 && p.codes_strides[1] == 1 && whole_bytes(p.n, p.group_size);
  const bool columns =
      !rows && p.inner >= kLanes && p.codes_strides[2] == 1 && p.scale_strides[2] == 1 && p.zero_strides[2] == 1;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t o = unit / blocks, first = unit % blocks * kInnerBlock;
    if (rows) {
      dequantize_row<kType>(p, o);
    } else if (columns) {
      const int64_t last = std::min(first + kInnerBlock, p.inner);
      int64_t j = first;
      for (; j + kLanes <= last; j += kLanes) dequantize_columns<kType>(p, o, j);
      scalar_dequantize_columns(p, o, j, last);
    } else {
      scalar_dequantize(p, unit, unit + 1);
    }
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
