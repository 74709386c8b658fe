// Attention over the exact tokens (part 0): sink, window and new ones, 16-bit K and V, on tensor cores. A warp takes 32
// tokens at a time, every fourth run of them. Rows of A are tokens for K, straight from global memory, and channels for
// V, turned by ldmatrix.
#pragma once

#include "cuda/attention_tensor_common.h"

namespace kivi::cuda::tensor {

// The exact tokens of a row of the batch, in the order of their positions: number `index` of `count`.
struct ExactTokens {
  int64_t sink, window_begin, cached, count;

  KIVI_DEVICE explicit ExactTokens(const KeyRanges& r)
      : sink(r.sink),
        window_begin(r.window_begin),
        cached(r.cached),
        count(r.sink + (r.cached - r.window_begin) + r.fresh) {}

  KIVI_DEVICE int64_t position(int64_t index) const { return index < sink ? index : index - sink + window_begin; }
  // How many stand before a position.
  KIVI_DEVICE int64_t before(int64_t position) const {
    if (position <= sink) return position;
    return position <= window_begin ? sink : position - window_begin + sink;
  }
};

template <class F, int NT, bool Rules, class T>
class ExactAttention {
 public:
  static constexpr int D = F::kD;
  using S = SharedSizes<F, NT>;

  KIVI_DEVICE ExactAttention(const AttentionParams& p, const SharedPieces<F, NT>& shared, const ExactTokens& tokens,
                             int64_t batch, int64_t kv_head)
      : p_(p),
        shared_(shared),
        tokens_(tokens),
        batch_(batch),
        kv_head_(kv_head),
        warp_(static_cast<int>(threadIdx.x) / kWarpThreads),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads),
        gid_(lane_ / 4),
        tq_(lane_ % 4),
        seen_(seen_by_tile<S::kRows>(shared.rows)) {}

  KIVI_DEVICE void run(WarpSums<D, NT>& sums) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums.acc[n][c][i] = 0;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) sums.max[n][j] = kNone, sums.sum[n][j] = 0;
    }
#pragma unroll 1
    for (int first = seen_.begin / kTile * kTile + kTile * warp_; first < seen_.end; first += kTile * kWarps) {
      add_tile(first, sums);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sums.sum[n][j] += __shfl_xor_sync(kFullWarp, sums.sum[n][j], step);
        }
      }
    }
  }

 private:
  static constexpr int kTile = 32;  // tokens

  struct Address {
    const unsigned char *k, *v;
  };
  KIVI_DEVICE Address address_of(int64_t index) const {
    const auto* const sink_k = static_cast<const unsigned char*>(p_.sink_k);
    const auto* const sink_v = static_cast<const unsigned char*>(p_.sink_v);
    const int64_t head = batch_ * p_.format.num_kv_heads + kv_head_, position = tokens_.position(index);
    if (index < tokens_.sink) {
      const int64_t at = (head * p_.format.sink_length + index) * (D * 2);
      return {sink_k + at, sink_v + at};
    }
    if (position < tokens_.cached) {
      const int64_t capacity = window_capacity(p_.format);
      const int64_t at = (head * capacity + (position - p_.format.sink_length) % capacity) * (D * 2);
      return {static_cast<const unsigned char*>(p_.window_k) + at, static_cast<const unsigned char*>(p_.window_v) + at};
    }
    const int64_t t = position - tokens_.cached;
    const int64_t* const k = p_.new_k_strides;
    const int64_t* const v = p_.new_v_strides;
    return {static_cast<const unsigned char*>(p_.new_k) + (batch_ * k[0] + kv_head_ * k[1] + t * k[2]) * 2,
            static_cast<const unsigned char*>(p_.new_v) + (batch_ * v[0] + kv_head_ * v[1] + t * v[2]) * 2};
  }
  static KIVI_DEVICE const unsigned char* of_lane(const unsigned char* pointer, int lane) {
    const auto bits = reinterpret_cast<unsigned long long>(pointer);
    return reinterpret_cast<const unsigned char*>(__shfl_sync(kFullWarp, bits, lane));
  }

  KIVI_DEVICE bool sees(const RowState& row, int index) const {
    if (index < row.begin || index >= row.end) return false;
    return !Rules || !masked_out(p_, row, tokens_.position(index));
  }

  KIVI_DEVICE void add_tile(int first, WarpSums<D, NT>& sums) {
    unsigned char* const values = shared_.main + warp_ * kTile * S::kExactRow;
    unsigned char* const weights = shared_.weights + warp_ * S::kWeights;
    const int count = min(kTile, static_cast<int>(tokens_.count) - first);
    const Address own = address_of(first + min(lane_, count - 1));  // of token `lane`
    __syncwarp();                  // nobody reads the previous tile's values and weights any more
    constexpr int kUnits = D / 8;  // of a token
#pragma unroll 2
    for (int i = 0; i < kUnits; i++) {
      const int unit = 32 * i + lane_, token = unit / kUnits;
      cp_async16(values + token * S::kExactRow + unit % kUnits * 16, of_lane(own.v, token) + unit % kUnits * 16,
                 token < count ? 16 : 0);
    }
    cp_async_commit();

    // Tile t, row gid + 8h: token 16t + 8h + gid. A lane has 8 of 32 channels.
    float s[NT][2][4] = {};
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const unsigned char* const ka = of_lane(own.k, 16 * t + gid_);
      const unsigned char* const kb = of_lane(own.k, 16 * t + 8 + gid_);
#pragma unroll
      for (int i = 0; i < (D + 31) / 32; i++) {
        const bool is_short = 32 * i + 32 > D;  // 16 channels: lanes with an even tq have 8
        const int channel = 32 * i + 8 * (is_short ? tq_ / 2 : tq_);
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (!is_short || tq_ % 2 == 0) {
          a = __ldg(reinterpret_cast<const uint4*>(ka + channel * 2));
          b = __ldg(reinterpret_cast<const uint4*>(kb + channel * 2));
        }
        const uint32_t a0[4] = {a.x, b.x, a.y, b.y}, a1[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (int n = 0; n < NT; n++) {
          uint4 q = load_uint4(shared_.queries + (8 * n + gid_) * (2 * D + 16) + channel * 2);
          const uint32_t b0[2] = {q.x, q.y}, b1[2] = {q.z, q.w};
          mma_m16n8k16<T>(s[n][t], a0, b0, s[n][t]);
          mma_m16n8k16<T>(s[n][t], a1, b1, s[n][t]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const RowState row = shared_.rows[8 * n + 2 * tq_ + j];
        float x = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int index = first + 8 * i + gid_;
          float& score = s[n][i / 2][i % 2 * 2 + j];
          score *= p_.scale * kLog2E;
          if (!sees(row, index)) {
            score = -INFINITY;
          } else if constexpr (Rules) {
            score = with_rules(p_, row, score, tokens_.position(index));
          }
          x = fmaxf(x, score);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
        float& max = sums.max[n][j];
        const float next = fmaxf(max, x), shrink = exp2_fast(max - next);
        max = next;
        sums.sum[n][j] *= shrink;
#pragma unroll
        for (int c = 0; c < D / 16; c++) sums.acc[n][c][j] *= shrink, sums.acc[n][c][2 + j] *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint16_t weight = rounded(exp2_fast(s[n][i / 2][i % 2 * 2 + j] - next));
          sums.sum[n][j] += number(weight);
          *reinterpret_cast<uint16_t*>(weights + (8 * n + 2 * tq_ + j) * 144 + 2 * (8 * i + gid_)) = weight;
        }
      }
    }
    cp_async_wait<0>();
    __syncwarp();  // values and weights
    if (Rules || first < seen_.all_begin || first + kTile > seen_.all_end) {
      bool special = false;
#pragma unroll 1
      for (int i = lane_; i < kTile * D / 2; i += kWarpThreads) {
        const uint32_t two = *reinterpret_cast<const uint32_t*>(values + i / (D / 2) * S::kExactRow + i % (D / 2) * 4);
        special |= !is_finite(number(static_cast<uint16_t>(two))) || !is_finite(number(two >> 16));
      }
      if (__any_sync(kFullWarp, special)) return multiply_carefully(first, values, weights, sums);
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
        const int token = 16 * t + lane_ / 16 * 8 + lane_ % 8;
        uint32_t a[4];
        ldmatrix_x4_trans(a, values + token * S::kExactRow + (2 * c + lane_ / 8 % 2) * 16);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const unsigned char* const at = weights + (8 * n + gid_) * 144 + 32 * t + 4 * tq_;
          const uint32_t b[2] = {*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 16)};
          mma_m16n8k16<T>(sums.acc[n][c], a, b, sums.acc[n][c]);
        }
      }
    }
  }

  // Values that are infinite or NaN, of tokens that some row does not see: 0 * NaN must not enter its sums.
  KIVI_DEVICE void multiply_carefully(int first, const unsigned char* values, const unsigned char* weights,
                                      WarpSums<D, NT>& sums) const {
#pragma unroll 1
    for (int t = 0; t < kTile; t++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (!sees(shared_.rows[8 * n + 2 * tq_ + j], first + t)) continue;
          const float weight =
              number(*reinterpret_cast<const uint16_t*>(weights + (8 * n + 2 * tq_ + j) * 144 + 2 * t));
#pragma unroll
          for (int c = 0; c < D / 16; c++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const unsigned char* const at = values + t * S::kExactRow + (16 * c + gid_ + 8 * h) * 2;
              float& acc = sums.acc[n][c][2 * h + j];
              acc = fmaf(weight, number(*reinterpret_cast<const uint16_t*>(at)), acc);
            }
          }
        }
      }
    }
  }

  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static KIVI_DEVICE uint16_t rounded(float x) {
    if constexpr (kHalf) return static_cast<uint16_t>(half2_of(x, 0.0f));
    return float_to_bfloat16(x);
  }
  static KIVI_DEVICE float number(uint32_t bits) {
    if constexpr (kHalf) return __low2float(as_half2(bits));
    return __uint_as_float(bits << 16);
  }

  const AttentionParams& p_;
  const SharedPieces<F, NT>& shared_;
  const ExactTokens tokens_;
  const int64_t batch_, kv_head_;
  const int warp_, lane_, gid_, tq_;
  const SeenByTile seen_;
};

}  // namespace kivi::cuda::tensor
