// What the parts of the tensor-core kernel share: arithmetic on pairs of float16, shared memory, and the rules that
// change scores.
#pragma once

#include "cuda/attention_tensor_format.h"
#include "cuda/device.h"
#include "cuda/parts.h"
#include "format/half.h"
#include "format/keys.h"

namespace kivi::cuda::tensor {

inline constexpr float kNone = -1e38f;  // the reference m of a row that has seen no key
inline constexpr float kSlack = 4;      // the reference is moved to this much (log2) below what it may be
inline constexpr float kTop = 10;       // weights <= 2^kTop in the first attempt, 1 in the second

// What sums over codes are multiplied by.
template <class F>
constexpr float code_unit() {
  return F::kSubnormalCodes ? 16777216.0f : 1.0f;  // 2^24
}

template <class Body, int... I>
KIVI_DEVICE void static_for(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
KIVI_DEVICE void static_for(Body&& body) {
  static_for(std::make_integer_sequence<int, N>{}, body);
}

// ---- numbers -------------------------------------------------------------------------------------

KIVI_DEVICE __half2 as_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
KIVI_DEVICE uint32_t as_bits(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
KIVI_DEVICE uint32_t hmul2(uint32_t a, uint32_t b) { return as_bits(__hmul2(as_half2(a), as_half2(b))); }
KIVI_DEVICE uint32_t half2_of(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }
KIVI_DEVICE uint32_t same_half2(float x) { return half2_of(x, x); }
KIVI_DEVICE uint4 load_uint4(const void* p) { return *static_cast<const uint4*>(p); }
KIVI_DEVICE uint2 load_uint2(const void* p) { return *static_cast<const uint2*>(p); }
KIVI_DEVICE float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(127 + e) << 23); }
KIVI_DEVICE float nan_float() { return __uint_as_float(kFloatNaN); }
// Whether one of the two halves is infinite or NaN.
KIVI_DEVICE bool has_special(uint32_t halves) {
  return (halves & 0x7C00u) == 0x7C00u || (halves & 0x7C000000u) == 0x7C000000u;
}

// Codes that stand at the same bit of both halves of `bits`, as half2: subnormals code * 2^(bit - 24), or (normal
// codes) code * 2^bit by way of 1024 + code * 2^bit.
template <bool Subnormal>
KIVI_DEVICE uint32_t codes_as_half2(uint32_t bits) {
  if constexpr (Subnormal) return bits;
  constexpr uint32_t k1024 = 0x64006400u;
  return as_bits(__hsub2(as_half2(bits | k1024), as_half2(k1024)));
}
// Pair i of a word; `high` is word >> 8.
template <int Bits, bool Subnormal>
KIVI_DEVICE uint32_t code_pair(uint32_t word, uint32_t high, int i) {
  constexpr uint32_t kMask = Bits == 2 ? 0x00030003u : 0x000F000Fu;
  const int bit = Bits * i;
  return codes_as_half2<Subnormal>(bit < 8 ? word & kMask << bit : high & kMask << (bit - 8));
}
// The A operand of two words of codes: pairs 2k and 2k + 1 of rows gid and gid + 8.
template <int Bits, bool Subnormal>
KIVI_DEVICE void code_fragment(uint32_t low_row, uint32_t high_row, int k, uint32_t (&a)[4]) {
  const uint32_t low_shifted = low_row >> 8, high_shifted = high_row >> 8;
  a[0] = code_pair<Bits, Subnormal>(low_row, low_shifted, 2 * k);
  a[1] = code_pair<Bits, Subnormal>(high_row, high_shifted, 2 * k);
  a[2] = code_pair<Bits, Subnormal>(low_row, low_shifted, 2 * k + 1);
  a[3] = code_pair<Bits, Subnormal>(high_row, high_shifted, 2 * k + 1);
}
// Pair i of a plane of high bits in a word that was turned left by 2: 4 times the bits.
template <bool Subnormal>
KIVI_DEVICE uint32_t high_bit_pair(uint32_t turned, int i) {
  return codes_as_half2<Subnormal>(turned & 0x00040004u << i);
}
// What the other operand is multiplied by.
constexpr float pair_factor(int bits, int i) { return 1.0f / static_cast<float>(1 << bits * i % 8); }
constexpr float high_bit_factor(int i) { return 1.0f / static_cast<float>(1 << i); }

// A lane's share of a word that 4 / words lanes share, in its low bits; `words` is 1, 2 or 4.
template <int Words>
KIVI_DEVICE uint32_t own_codes(uint32_t word, int tq) {
  return Words == 4 ? word : word >> (Words == 2 ? 8 * (tq % 2) : 4 * tq);
}
// The same, turned left by 2 for high_bit_pair.
template <int Words>
KIVI_DEVICE uint32_t own_high_bits(uint32_t word, int tq) {
  const unsigned shift = Words == 2 ? 8u * (tq % 2) : 4u * tq;
  return __funnelshift_r(word, word, shift + 30);
}
template <int Words>
KIVI_DEVICE int own_word(int tq) {
  return tq * Words / 4;
}

// float8: scales of two bytes, and zeros of two in units of scale * 2^(bits + 2), which no scale overflows (7 bits of
// steps below 1) and which are exact.
KIVI_DEVICE uint32_t scale_pair(uint32_t bytes, bool upper) {
  return __byte_perm(bytes, 0, upper ? 0x3424 : 0x1404) >> 1;
}
KIVI_DEVICE uint32_t zero_pair(uint32_t steps, bool upper, uint32_t scales) {
  const uint32_t biased = __byte_perm(steps ^ 0x80808080u, 0x64646464u, upper ? 0x4342 : 0x4140);  // 1152 + steps
  const __half2 small = __hfma2(as_half2(biased), __floats2half2_rn(0.0078125f, 0.0078125f),
                                __floats2half2_rn(-9.0f, -9.0f));  // steps / 128
  return as_bits(__hmul2(small, as_half2(scales)));
}
constexpr float zero_unit(int bits) { return static_cast<float>(1 << (bits + 2)); }

// ---- what the threads of a block share -----------------------------------------------------------

// One query row of the tile.
struct RowState {
  int begin, end;    // the keys of this part that it may see, counted within the part
  int exponent;      // q = stored q * 2^exponent
  float slope;       // ALiBi
  int64_t position;  // of the query
  int64_t mask;      // offset of its first key
  int64_t query;     // offset of its first channel
};

template <class F, int NT>
struct SharedSizes {
  static constexpr int kRows = NT * kTileRows;
  static constexpr size_t kRing = size_t{2} * kWarps * F::kStage;
  static constexpr int kExactRow = F::kD * 2 + 16;  // bytes between tokens of V, an odd number of units
  static constexpr size_t kExact = size_t{kWarps} * kWarpThreads * kExactRow;
  static constexpr size_t kJoin = size_t{kWarps} * kRows * (F::kD + 4) * sizeof(float);
  static constexpr size_t kMain = kRing > kExact ? (kRing > kJoin ? kRing : kJoin) : (kExact > kJoin ? kExact : kJoin);
  static constexpr size_t kConstants = 32;    // 16 bytes of ones and 16 of zeros, behind the scales of V
  static constexpr int kWeights = NT * 1152;  // of a warp
  static constexpr size_t kQueries = size_t{kRows} * (F::kD * 2 + 16);
  static constexpr int kZeroProducts = NT * kMaxGroups * kTileRows;  // of a warp
  static constexpr size_t kBytes = kMain + kConstants + kWarps * (kWeights + F::kExpanded) + kConstants + kQueries +
                                   kWarps * kZeroProducts * sizeof(float) + 2 * kWarps * kRows * sizeof(float) +
                                   kRows * sizeof(RowState) + kMaxPages * sizeof(const uint8_t*) + 8 * 16;
};

template <class F, int NT>
struct SharedPieces {
  unsigned char* main;      // rings, or V of exact tokens; in the end the warps' sums
  unsigned char* weights;   // [warp]
  unsigned char* expanded;  // [warp], float8 only
  unsigned char* queries;   // [row][D + 8] 16-bit
  float* zero_products;     // [warp][NT][group][8]
  float *max, *sum;         // [warp][row]
  RowState* rows;
  const uint8_t** pages;  // of this part: the first record of the kv head

  KIVI_DEVICE SharedPieces() {
    using S = SharedSizes<F, NT>;
    SharedCarver carver;
    main = carver.take<unsigned char>(S::kMain + S::kConstants);
    weights = carver.take<unsigned char>(kWarps * S::kWeights);
    expanded = carver.take<unsigned char>(kWarps * F::kExpanded + S::kConstants);
    queries = carver.take<unsigned char>(S::kQueries);
    zero_products = carver.take<float>(kWarps * S::kZeroProducts);
    max = carver.take<float>(kWarps * S::kRows);
    sum = carver.take<float>(kWarps * S::kRows);
    rows = carver.take<RowState>(S::kRows);
    pages = carver.take<const uint8_t*>(kMaxPages);
  }
};

// What a warp knows at the end: acc[n][c][i] of tile c, row gid + 8 (i / 2), query row 8n + 2tq + i % 2. max: kNone
// where no key is seen.
template <int D, int NT>
struct WarpSums {
  float acc[NT][D / 16][4], max[NT][2], sum[NT][2];
};

// Which keys of the part the rows of the tile see: some of them [begin, end), all of them [all_begin, all_end).
struct SeenByTile {
  int begin, end, all_begin, all_end;
};
template <int Rows>
KIVI_DEVICE SeenByTile seen_by_tile(const RowState* rows) {
  static_assert(Rows <= kWarpThreads && (Rows & (Rows - 1)) == 0);
  const RowState& row = rows[threadIdx.x % Rows];
  const bool none = row.begin >= row.end;
  SeenByTile seen{none ? 1 << 30 : row.begin, none ? 0 : row.end, none ? 0 : row.begin, none ? 1 << 30 : row.end};
#pragma unroll
  for (int step = 1; step < Rows; step *= 2) {
    seen.begin = min(seen.begin, __shfl_xor_sync(kFullWarp, seen.begin, step));
    seen.end = max(seen.end, __shfl_xor_sync(kFullWarp, seen.end, step));
    seen.all_begin = max(seen.all_begin, __shfl_xor_sync(kFullWarp, seen.all_begin, step));
    seen.all_end = min(seen.all_end, __shfl_xor_sync(kFullWarp, seen.all_end, step));
  }
  return seen;
}

// ---- scores with rules ---------------------------------------------------------------------------

KIVI_DEVICE bool masked_out(const AttentionParams& p, const RowState& row, int64_t position) {
  if (p.mask_type == MaskType::kNone) return false;
  const int64_t at = row.mask + position * p.mask_strides[3];
  if (p.mask_type == MaskType::kBool) return static_cast<const uint8_t*>(p.mask)[at] == 0;
  return static_cast<const float*>(p.mask)[at] == -INFINITY;
}
// A score in log2 units with softcap, ALiBi and mask; of a key that is not masked out.
KIVI_DEVICE float with_rules(const AttentionParams& p, const RowState& row, float score, int64_t position) {
  float s = score * kLn2;
  if (p.softcap > 0.0f) s = p.softcap * tanhf(s / p.softcap);
  if (p.alibi_slopes != nullptr) s += row.slope * static_cast<float>(position - row.position);
  if (p.mask_type == MaskType::kFloat32) {
    s += static_cast<const float*>(p.mask)[row.mask + position * p.mask_strides[3]];
  }
  return s * kLog2E;
}

}  // namespace kivi::cuda::tensor
