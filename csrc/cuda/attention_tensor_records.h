// Attention over the quantised tokens of a part, on tensor cores; fragment maps in attention_tensor_format.h.
//
// Warp w of the block takes the chunks w, w + 4, ... of the part through a ring of two chunks of its own, so that only
// __syncwarp is needed in its loop.
//
// Dequantisation: one AND for two codes. word & (mask << bit) is a half2 of subnormals, code * 2^(bit - 24); the other
// operand carries 2^-bit and the group's scale, and 2^24 is multiplied in once at the end. (Tensor cores are said to
// take subnormals; for one that does not there is NormalCodes.) Zeros never meet codes: q
// times the zeros of K is one number for a group and query row, and the zeros of V enter as sums of weights.
//
// Range: q is normalised to |q| < 1 by a power of two for each row, so q * scale cannot overflow. Weights are 2^(x - m)
// with a reference m that moves only when x > m + 10; weight * scale may then overflow (V scale > 64): a warp whose
// sums are not finite at the end repeats its chunks once with weights <= 1, which are safe for every float16 scale.
//
// NaN: a group of NaN is stored as zero (or scale) NaN and makes the sums NaN of every query row that sees it. In
// chunks that some row sees only in part, NaN scales and zeros of V are replaced by 0, as 0 * NaN would enter the sums
// of rows that do not see the token, and the sums of the others are made NaN by hand.
#pragma once

#include "cuda/attention_tensor_common.h"

namespace kivi::cuda::tensor {

template <class F, int NT, bool Rules>
class RecordAttention {
 public:
  static constexpr int D = F::kD;
  static_assert(F::kVGroups <= 8, "zeros of V are rows of one MMA");
  static_assert(!F::kVSymmetric || F::kVGroups == 1, "a symmetric V has one scale a token");
  using S = SharedSizes<F, NT>;

  KIVI_DEVICE RecordAttention(const AttentionParams& p, const SharedPieces<F, NT>& shared, int64_t first_position,
                              int tokens)
      : p_(p),
        shared_(shared),
        first_position_(first_position),
        tokens_(tokens),
        warp_(static_cast<int>(threadIdx.x) / kWarpThreads),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads),
        gid_(lane_ / 4),
        tq_(lane_ % 4),
        seen_(seen_by_tile<S::kRows>(shared.rows)) {}

  KIVI_DEVICE void run(WarpSums<D, NT>& sums) {
    // The warp's chunks are number `warp + 4 i`, i in [begin, end), of the part.
    const int first = seen_.begin / kChunk, last = (seen_.end + kChunk - 1) / kChunk;
    begin_ = first > warp_ ? (first - warp_ + kWarps - 1) / kWarps : 0;
    end_ = last > warp_ ? (last - warp_ + kWarps - 1) / kWarps : 0;
    make_copies();
    load_first();  // it comes while queries and zeros are prepared
    make_addresses();
    load_queries();
    if (begin_ < end_) multiply_zeros();
    for (float top = kTop;; top = 0) {
      if (top != kTop) load_first();
      attend(sums, top);
      float check = 0;  // NaN if anything overflowed
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
#pragma unroll
          for (int i = 0; i < 4; i++) check = fmaf(sums.acc[n][c][i], 0.0f, check);
        }
      }
      if (!__any_sync(kFullWarp, check != 0.0f) || top == 0) break;
    }
    finish(sums);
  }

 private:
  // ---- copies

  KIVI_DEVICE void make_copies() {
    second_ = 0;
    static_for<F::kCopies>([&](auto k) {
      const int unit = min(32 * k + lane_, F::kUnits - 1);
      if constexpr (F::base_copy(k, true) == k) {
        source_[k] = F::move(unit, warp_ % 2).from;
        keep_in_register(source_[k]);
      }
      if constexpr (F::base_copy(k, false) == k) {
        target_[k] = warp_ * 2 * F::kStage + F::move(unit, 0).to;
        keep_in_register(target_[k]);
      }
      if constexpr (F::has_record(k, 0) && F::has_record(k, 1)) second_ |= F::move(unit, 0).record << k;
    });
    if constexpr (F::kRecords == 2) keep_in_register(second_);
  }

  // Chunk i of this warp into the half of its ring at `stage`. The second record may not exist: zeros then.
  KIVI_DEVICE void load(int i, int stage) const {
    const uint8_t* const page = shared_.pages[2 * i + warp_ / 2];
    const bool whole = F::kRecords == 1 || (kWarps * i + warp_ + 1) * kChunk <= tokens_;
    static_for<F::kCopies>([&](auto k) {
      constexpr int kSource = F::base_copy(k, true), kTarget = F::base_copy(k, false);
      constexpr bool kBoth = F::has_record(k, 0) && F::has_record(k, 1);
      if (F::kUnits - 32 * k >= kWarpThreads || lane_ < F::kUnits - 32 * k) {
        const bool valid = whole || (kBoth ? (second_ >> k & 1) == 0 : F::has_record(k, 0));
        cp_async16(shared_.main + (target_[kTarget] + stage) + F::copy_distance(kTarget, k, false),
                   page + source_[kSource] + F::copy_distance(kSource, k, true), valid ? 16 : 0);
      }
    });
  }

  KIVI_DEVICE void load_first() const {
    if (begin_ < end_) load(begin_, 0);
    cp_async_commit();
  }

  // ---- addresses of this lane in a chunk

  KIVI_DEVICE void make_addresses() {
    const int ring = warp_ * 2 * F::kStage, expanded = warp_ * F::kExpanded;
    static_for<F::kPlaneSlots>([&](auto slot) {
      if constexpr (slot % 2 < num_planes(F::find_piece(slot / 2).bits) && F::address_of(slot) == slot) {
        k_codes_[slot] = ring + F::k_code_place(slot, lane_);
        if constexpr (NT == 1) keep_in_register(k_codes_[slot]);
      }
    });
    // Of byte scales what is expanded does not move with the stage.
    constexpr bool kBytes = F::kScaleBytes == 1;
    k_scales_ = kBytes ? expanded : ring + F::kKScaleRaw;
    v_codes_[0] = ring + F::v_code_place(0, lane_);
    v_codes_[1] = ring + F::v_code_place(1, lane_);
    const int rows = kBytes ? expanded + F::kKGroups * D * 2 : ring + F::kVScaleRaw;
    v_scales_ = rows + F::v_row_part(0, lane_, 0);
    // Rows of A for the sums of weights: channel groups, then a row of ones, then zeros.
    const bool group = gid_ < F::kVGroups;
    const int zeros = rows + (F::kVSymmetric ? 0 : F::kVGroups * F::kVRow);
    const int constant = static_cast<int>(kBytes ? kWarps * F::kExpanded : S::kMain) + (gid_ == F::kVGroups ? 0 : 16);
    zero_low_ = group ? zeros + F::v_row_part(gid_, lane_, 0) : constant;
    zero_high_ = group ? zeros + F::v_row_part(gid_, lane_, 1) : constant;
    zero_moves_ = group && !kBytes ? -1 : 0;
    weight_store_ = warp_ * S::kWeights + F::weight_place(2 * tq_, 4 * gid_);
    weight_low_ = warp_ * S::kWeights + F::weight_part(lane_, 0);
    weight_high_ = warp_ * S::kWeights + F::weight_part(lane_, 1);
    if constexpr (NT == 1) {
      keep_in_register(k_scales_), keep_in_register(v_codes_[0]), keep_in_register(v_scales_);
      keep_in_register(zero_low_), keep_in_register(zero_high_), keep_in_register(zero_moves_);
      keep_in_register(weight_store_), keep_in_register(weight_low_), keep_in_register(weight_high_);
    }
  }

  // Scales and zeros as float16 that belong to the chunk at `stage`.
  KIVI_DEVICE unsigned char* scales_of(int stage) const {
    return F::kScaleBytes == 1 ? shared_.expanded : shared_.main + stage;
  }

  // ---- queries and zeros of K

  // B fragments: this lane's channels of row gid, with the codes' powers of two divided out.
  KIVI_DEVICE void load_queries() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const unsigned char* const row = shared_.queries + (8 * n + gid_) * (2 * D + 16);
      static_for<F::kPieces>([&](auto i) {
        constexpr KeyPiece kPiece = F::find_piece(i);
#pragma unroll
        for (int pair = 0; pair < kPiece.n / 2; pair++) {
          const uint32_t q = *reinterpret_cast<const uint32_t*>(row + (kPiece.first + kPiece.n * tq_) * 2 + pair * 4);
          const float factor = pair_factor(kPiece.bits == 4 ? 4 : 2, pair);
          q_[n][kPiece.first / 8 + pair] = factor == 1.0f ? q : hmul2(q, same_half2(factor));
        }
      });
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int e = shared_.rows[8 * n + 2 * tq_ + j].exponent;
        const float scale = p_.scale == 0.0f ? 1.0f : fabsf(p_.scale);
        to_log2_[n][j] = code_unit<F>() * (scale * kLog2E) * power_of_two(e);
        keep_in_register(to_log2_[n][j]);
      }
    }
  }

  // Four pairs of zeros of a record of K, from channel on, in units of the widest class.
  KIVI_DEVICE void load_k_zeros(const uint8_t* record, int channel, uint32_t (&z)[4]) const {
    constexpr RecordLayout kLayout = F::layout();
    if constexpr (F::kScaleBytes == 2) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(record + kLayout.k_zero + channel * 2));
      z[0] = raw.x, z[1] = raw.y, z[2] = raw.z, z[3] = raw.w;
    } else {
      const uint2 scale = __ldg(reinterpret_cast<const uint2*>(record + kLayout.k_scale + channel));
      const uint2 zero = __ldg(reinterpret_cast<const uint2*>(record + kLayout.k_zero + channel));
      z[0] = zero_pair(zero.x, false, scale_pair(scale.x, false));
      z[1] = zero_pair(zero.x, true, scale_pair(scale.x, true));
      z[2] = zero_pair(zero.y, false, scale_pair(scale.y, false));
      z[3] = zero_pair(zero.y, true, scale_pair(scale.y, true));
    }
  }

  // q times the zeros of K for all groups of this warp: a row of A for each, the groups of its first chunk first.
  KIVI_DEVICE void multiply_zeros() const {
    const uint8_t* record[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int group = gid_ + 8 * h, i = begin_ + group / F::kKGroups;
      const int token = (kWarps * i + warp_) * kChunk + group % F::kKGroups * F::kG;
      record[h] = nullptr;
      if (i < end_ && (F::kG > kChunk || token < tokens_)) {
        const int of_page = F::kG == 32 ? warp_ % 2 * 2 + group % 2 : F::kG == 64 ? warp_ % 2 : 0;
        record[h] = shared_.pages[2 * i + warp_ / 2] + of_page * F::kRecordBytes;
      }
    }
    float product[NT][4] = {};
    static_for<(D + 31) / 32>([&](auto i) {
      // 32 channels, of which a lane has 8; 16 at the end, of which lanes with an even tq have 8.
      constexpr bool kShort = 32 * i + 32 > D;
      const int channel = 32 * i + 8 * (kShort ? tq_ / 2 : tq_);
      uint32_t z[2][4] = {};
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (record[h] != nullptr && (!kShort || tq_ % 2 == 0)) load_k_zeros(record[h], channel, z[h]);
      }
      const uint32_t a0[4] = {z[0][0], z[1][0], z[0][1], z[1][1]}, a1[4] = {z[0][2], z[1][2], z[0][3], z[1][3]};
#pragma unroll
      for (int n = 0; n < NT; n++) {
        uint4 q = load_uint4(shared_.queries + (8 * n + gid_) * (2 * D + 16) + channel * 2);
        if constexpr (F::kScaleBytes == 1 && F::num_classes() > 1) {
          const uint32_t unit = same_half2(zero_unit(bits_of_channel(channel)) / zero_unit(F::kKBits));
          q.x = hmul2(q.x, unit), q.y = hmul2(q.y, unit), q.z = hmul2(q.z, unit), q.w = hmul2(q.w, unit);
        }
        const uint32_t b0[2] = {q.x, q.y}, b1[2] = {q.z, q.w};
        mma_m16n8k16<__half>(product[n], a0, b0, product[n]);
        mma_m16n8k16<__half>(product[n], a1, b1, product[n]);
      }
    });
    constexpr float kProductUnit = (F::kScaleBytes == 1 ? zero_unit(F::kKBits) : 1.0f) / code_unit<F>();
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        *reinterpret_cast<float2*>(shared_.zero_products + warp_ * S::kZeroProducts +
                                   (kMaxGroups * n + 8 * h + gid_) * kTileRows + 2 * tq_) =
            make_float2(product[n][2 * h] * (to_log2_[n][0] * kProductUnit),
                        product[n][2 * h + 1] * (to_log2_[n][1] * kProductUnit));
      }
    }
  }
  static KIVI_DEVICE int bits_of_channel(int channel) {
    int bits = 0;
    static_for<F::kPieces>([&](auto i) {
      constexpr KeyPiece kPiece = F::find_piece(i);
      if (channel >= kPiece.first) bits = kPiece.bits;
    });
    return bits;
  }

  // ---- the loop

  KIVI_DEVICE void attend(WarpSums<D, NT>& sums, float top) {
    float(&o)[NT][D / 16][4] = sums.acc;
    float(&m)[NT][2] = sums.max;
    float limit[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int c = 0; c < D / 16; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][c][i] = 0;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) even_[n][i] = odd_[n][i] = 0, total_[n % kTotals][i] = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) m[n][j] = kNone, limit[n][j] = kNone;
    }
    int stage = 0;
    int zero_product = warp_ * S::kZeroProducts + 2 * tq_;
#pragma unroll 1
    for (int i = begin_; i < end_; i++) {
      cp_async_wait<0>();
      __syncwarp();  // the chunk is there, and nobody reads the other half of the ring any more
      if (i + 1 < end_) load(i + 1, F::kStage - stage);
      cp_async_commit();
      if constexpr (F::kScaleBytes == 1) {
        expand(stage);
        __syncwarp();  // scales and zeros as float16
      }
      const int first = (kWarps * i + warp_) * kChunk;  // token of the part
      const bool careful = Rules || first < seen_.all_begin || first + kChunk > seen_.all_end;

      float s[NT][2][2][4] = {};  // [n][half of the chunk][tile]
      multiply_keys(stage, s);
      float add[NT][F::kKGroups][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int g = 0; g < F::kKGroups; g++) {
          const float2 z =
              *reinterpret_cast<const float2*>(shared_.zero_products + zero_product + (kMaxGroups * n + g) * kTileRows);
          add[n][g][0] = z.x, add[n][g][1] = z.y;
        }
      }
      zero_product += F::kKGroups * kTileRows;
      if (careful) {
        apply_rules(first, s, add);
        clean_values(stage, first);
      }
      const auto group_of = [](int h) { return F::kKGroups == 2 ? h : 0; };

      // Softmax against a reference that moves only when it has to.
      float high[NT][2];
      bool grown = false;
#pragma unroll
      for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float x[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float most = fmaxf(fmaxf(s[n][h][0][j], s[n][h][0][2 + j]), fmaxf(s[n][h][1][j], s[n][h][1][2 + j]));
            x[h] = Rules ? most : fmaf(most, to_log2_[n][j], add[n][group_of(h)][j]);
          }
          high[n][j] = fmaxf(x[0], x[1]);
          grown |= high[n][j] > limit[n][j];
        }
      }
      if (__any_sync(kFullWarp, grown)) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float x = high[n][j];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
            const float next = x > limit[n][j] ? x - (top - kSlack) : m[n][j];
            const float shrink = exp2_fast(m[n][j] - next);
            m[n][j] = next, limit[n][j] = next + top;
#pragma unroll
            for (int c = 0; c < D / 16; c++) o[n][c][j] *= shrink, o[n][c][2 + j] *= shrink;
            even_[n][j] *= shrink, odd_[n][2 + j] *= shrink;
            if constexpr (kOwnTotal) total_[n][j] *= shrink;
          }
        }
      }
      store_weights(s, add, m);
      __syncwarp();  // the weights
      multiply_values(stage, o);
      stage = F::kStage - stage;
    }
    __syncwarp();  // nobody reads the ring when another attempt loads; no copies are pending
  }

  // Byte scales and zeros as float16.
  KIVI_DEVICE void expand(int stage) const {
    const unsigned char* const from = shared_.main + warp_ * 2 * F::kStage + stage;
    unsigned char* const to = shared_.expanded + warp_ * F::kExpanded;
#pragma unroll
    for (int i = 0; i < (F::kKGroups * D / 8 + 31) / 32; i++) {
      const int at = 32 * i + lane_;
      if (at < F::kKGroups * D / 8) {
        const uint2 raw = load_uint2(from + F::kKScaleRaw + at * 8);
        *reinterpret_cast<uint4*>(to + at * 16) = make_uint4(scale_pair(raw.x, false), scale_pair(raw.x, true),
                                                             scale_pair(raw.y, false), scale_pair(raw.y, true));
      }
    }
    unsigned char* const rows = to + F::kKGroups * D * 2;
#pragma unroll
    for (int i = 0; i < (F::kVGroups * 8 + 31) / 32; i++) {
      const int at = 32 * i + lane_, g = at / 8, token = at % 8 * 8;
      if (g < F::kVGroups) {
        const uint2 raw = load_uint2(from + F::v_raw_place(0, g, token));
        const uint4 scale = make_uint4(scale_pair(raw.x, false), scale_pair(raw.x, true), scale_pair(raw.y, false),
                                       scale_pair(raw.y, true));
        unsigned char* const row = rows + F::v_row_place(g, token);
        *reinterpret_cast<uint4*>(row) = scale;
        if constexpr (!F::kVSymmetric) {
          const uint2 steps = load_uint2(from + F::v_raw_place(1, g, token));
          *reinterpret_cast<uint4*>(row + F::kVGroups * F::kVRow) =
              make_uint4(zero_pair(steps.x, false, scale.x), zero_pair(steps.x, true, scale.y),
                         zero_pair(steps.y, false, scale.z), zero_pair(steps.y, true, scale.w));
        }
      }
    }
  }

  // Scores / 2^24, without zeros.
  KIVI_DEVICE void multiply_keys(int stage, float (&s)[NT][2][2][4]) const {
#pragma unroll
    for (int g = 0; g < F::kKGroups; g++) {
      const unsigned char* const scales = scales_of(stage) + k_scales_ + g * 2 * D;
      static_for<F::kPieces>([&](auto index) {
        constexpr KeyPiece kPiece = F::find_piece(index);
        constexpr int kN = kPiece.n, kCount = kN / 2;  // pairs
        uint32_t scale[kCount];
        const unsigned char* const at = scales + kPiece.first * 2 + kN * 2 * tq_;
        if constexpr (kN >= 8) {
#pragma unroll
          for (int i = 0; i < kN / 8; i++) {
            const uint4 four = load_uint4(at + 16 * i);
            scale[4 * i] = four.x, scale[4 * i + 1] = four.y, scale[4 * i + 2] = four.z, scale[4 * i + 3] = four.w;
          }
        } else {
          const uint2 two = load_uint2(at);
          scale[0] = two.x, scale[1] = two.y;
        }
        uint32_t scaled[NT][kCount];
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
          for (int i = 0; i < kCount; i++) scaled[n][i] = hmul2(q_[n][kPiece.first / 8 + i], scale[i]);
        }
        constexpr int kHalves = 2 / F::kKGroups;
#pragma unroll
        for (int h = g; h < g + kHalves; h++) {
          constexpr int kBits = kPiece.bits == 4 ? 4 : 2;  // of plane 0
          constexpr int kWords = shared_words(kBits, kN);
          const uint4 words = load_key_words<2 * index>(stage, h);
          const uint32_t w[4] = {own_codes<kWords>(words.x, tq_), own_codes<kWords>(words.y, tq_),
                                 own_codes<kWords>(words.z, tq_), own_codes<kWords>(words.w, tq_)};
#pragma unroll
          for (int t = 0; t < 2; t++) {
            const uint32_t wa = w[2 * t], wb = w[2 * t + 1];
#pragma unroll
            for (int k = 0; k < kCount / 2; k++) {
              uint32_t a[4];
              code_fragment<kBits, F::kSubnormalCodes>(wa, wb, k, a);
#pragma unroll
              for (int n = 0; n < NT; n++) {
                const uint32_t b[2] = {scaled[n][2 * k], scaled[n][2 * k + 1]};
                mma_m16n8k16<__half>(s[n][h][t], a, b, s[n][h][t]);
              }
            }
          }
        }
        if constexpr (kPiece.bits == 3) {
#pragma unroll
          for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < kCount; i++) {
              const float ratio = high_bit_factor(i) / pair_factor(2, i);
              scaled[n][i] = hmul2(hmul2(q_[n][kPiece.first / 8 + i], same_half2(ratio)), scale[i]);
            }
          }
#pragma unroll
          for (int h = g; h < g + kHalves; h++) {
            constexpr int kWords = shared_words(1, kN);
            const uint4 words = load_key_words<2 * index + 1>(stage, h);
            const uint32_t w[4] = {own_high_bits<kWords>(words.x, tq_), own_high_bits<kWords>(words.y, tq_),
                                   own_high_bits<kWords>(words.z, tq_), own_high_bits<kWords>(words.w, tq_)};
#pragma unroll
            for (int t = 0; t < 2; t++) {
#pragma unroll
              for (int k = 0; k < kCount / 2; k++) {
                const uint32_t a[4] = {high_bit_pair<F::kSubnormalCodes>(w[2 * t], 2 * k),
                                       high_bit_pair<F::kSubnormalCodes>(w[2 * t + 1], 2 * k),
                                       high_bit_pair<F::kSubnormalCodes>(w[2 * t], 2 * k + 1),
                                       high_bit_pair<F::kSubnormalCodes>(w[2 * t + 1], 2 * k + 1)};
#pragma unroll
                for (int n = 0; n < NT; n++) {
                  const uint32_t b[2] = {scaled[n][2 * k], scaled[n][2 * k + 1]};
                  mma_m16n8k16<__half>(s[n][h][t], a, b, s[n][h][t]);
                }
              }
            }
          }
        }
      });
    }
  }
  // One word of each of four tokens, of the plane and piece `Slot`, in half h of the chunk.
  template <int Slot>
  KIVI_DEVICE uint4 load_key_words(int stage, int h) const {
    constexpr int kBase = F::address_of(Slot);
    constexpr int kDistance = F::find_piece(Slot / 2).line[Slot % 2] - F::find_piece(kBase / 2).line[kBase % 2];
    return load_uint4(shared_.main + (k_codes_[kBase] + stage) + (kDistance + h * F::kKHalfLines) * 64);
  }

  // Whether row `row` of the tile sees a token of the part.
  KIVI_DEVICE bool sees(const RowState& row, int token) const {
    if (token < row.begin || token >= row.end) return false;
    return !Rules || !masked_out(p_, row, first_position_ + token);
  }

  // -inf for keys that a row does not see; with rules, scores become final ones in log2 units.
  KIVI_DEVICE void apply_rules(int first, float (&s)[NT][2][2][4], float (&add)[NT][F::kKGroups][2]) const {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const RowState row = shared_.rows[8 * n + 2 * tq_ + j];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float& plus = add[n][F::kKGroups == 2 ? h : 0][j];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int token = first + 32 * h + 4 * gid_ + i;
            float& score = s[n][h][i / 2][i % 2 * 2 + j];
            const bool seen = sees(row, token);
            if constexpr (Rules) {
              score =
                  seen ? with_rules(p_, row, fmaf(score, to_log2_[n][j], plus), first_position_ + token) : -INFINITY;
            } else {
              if (!seen) score = -INFINITY;
            }
          }
        }
        // A group of which nothing is seen may have NaN as its zero, and its scores may be NaN.
        if constexpr (!Rules) {
#pragma unroll
          for (int g = 0; g < F::kKGroups; g++) {
            const int at = first + 32 * g;
            if (row.begin >= at + kChunk / F::kKGroups || row.end <= at) add[n][g][j] = -INFINITY;
          }
        }
      }
    }
  }

  // Makes NaN the sums of rows that see a value whose scale or zero is NaN, and then those scales and zeros 0.
  KIVI_DEVICE void clean_values(int stage, int first) {
    unsigned char* const rows = scales_of(stage) + (F::kScaleBytes == 1 ? warp_ * F::kExpanded + F::kKGroups * D * 2
                                                                        : warp_ * 2 * F::kStage + F::kVScaleRaw);
    constexpr int kNumRows = F::kVSections * F::kVGroups;
    bool special = false;
#pragma unroll 1
    for (int i = lane_; i < kNumRows * 8; i += kWarpThreads) {
      const uint4 x = load_uint4(rows + i / 8 * F::kVRow + i % 8 * 16);
      special |= has_special(x.x) || has_special(x.y) || has_special(x.z) || has_special(x.w);
    }
    if (!__any_sync(kFullWarp, special)) return;
    const int g = F::kVSymmetric ? 0 : gid_;
    if (g < F::kVGroups) {
#pragma unroll 1
      for (int token = 0; token < kChunk; token++) {
        bool lost = false;
        for (int section = 0; section < F::kVSections; section++) {
          const unsigned char* const row = rows + section * F::kVGroups * F::kVRow;
          lost |= has_special(*reinterpret_cast<const uint16_t*>(row + F::v_row_place(g, token)));
        }
        if (!lost) continue;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            if (sees(shared_.rows[8 * n + 2 * tq_ + j], first + token)) even_[n][j] = nan_float();
          }
        }
      }
    }
    __syncwarp();  // everybody has looked
#pragma unroll 1
    for (int i = lane_; i < kNumRows * kChunk; i += kWarpThreads) {
      const int row = i / kChunk, section = row / F::kVGroups;
      auto* const at = reinterpret_cast<uint16_t*>(rows + section * F::kVGroups * F::kVRow +
                                                   F::v_row_place(row % F::kVGroups, i % kChunk));
      if (has_special(*at)) *at = 0;
    }
    // The barrier behind store_weights orders this before the multiplication.
  }

  // Weights as float16, [row][token].
  KIVI_DEVICE void store_weights(const float (&s)[NT][2][2][4], const float (&add)[NT][F::kKGroups][2],
                                 const float (&m)[NT][2]) const {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float plus = Rules ? -m[n][j] : add[n][F::kKGroups == 2 ? h : 0][j] - m[n][j];
          const auto weight = [&](int i) {
            const float score = s[n][h][i / 2][i % 2 * 2 + j];
            return exp2_fast(Rules ? score + plus : fmaf(score, to_log2_[n][j], plus));
          };
          const int at = F::weight_place(j, 32 * h);
          *reinterpret_cast<uint2*>(shared_.weights + weight_store_ + (1152 * n + at)) =
              make_uint2(half2_of(weight(0), weight(1)), half2_of(weight(2), weight(3)));
        }
      }
    }
  }

  KIVI_DEVICE void multiply_values(int stage, float (&o)[NT][D / 16][4]) {
    constexpr int kBits = F::kVBits == 4 ? 4 : 2;  // of plane 0
    constexpr int kOfWord = 16 / kBits;            // pairs
    const unsigned char* const scales = scales_of(stage);
    // Weights as B: eight pairs of tokens of row gid.
    uint32_t weight[NT][8], factored[NT][8];
    {
      uint32_t a0[4] = {}, a1[4] = {};
      if constexpr (!F::kVSymmetric) {
        unsigned char* const base = F::kScaleBytes == 1 ? shared_.expanded : shared_.main;
        const int moved = stage & zero_moves_;
        const uint4 z0 = load_uint4(base + (zero_low_ + moved)), z1 = load_uint4(base + (zero_high_ + moved));
        a0[0] = z0.x, a0[1] = z0.y, a0[2] = z0.z, a0[3] = z0.w;
        a1[0] = z1.x, a1[1] = z1.y, a1[2] = z1.z, a1[3] = z1.w;
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const uint4 x = load_uint4(shared_.weights + weight_low_ + 1152 * n);
        const uint4 y = load_uint4(shared_.weights + weight_high_ + 1152 * n);
        const uint32_t all[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        if constexpr (!F::kVSymmetric) {
          // A's registers are four pairs of one row: right in rows 0-7 for the even pairs, in rows 8-15 for the odd
          // ones; the other halves of the two accumulators are of no use.
          const uint32_t b0[2] = {x.x, x.z}, b1[2] = {x.y, x.w}, b2[2] = {y.x, y.z}, b3[2] = {y.y, y.w};
          mma_m16n8k16<__half>(even_[n], a0, b0, even_[n]);
          mma_m16n8k16<__half>(odd_[n], a0, b1, odd_[n]);
          mma_m16n8k16<__half>(even_[n], a1, b2, even_[n]);
          mma_m16n8k16<__half>(odd_[n], a1, b3, odd_[n]);
          if constexpr (kOwnTotal) {
            const uint32_t one = same_half2(1.0f), ones[4] = {one, one, one, one};
            const uint32_t c0[2] = {x.x, x.y}, c1[2] = {x.z, x.w}, c2[2] = {y.x, y.y}, c3[2] = {y.z, y.w};
            mma_m16n8k16<__half>(total_[n], ones, c0, total_[n]);
            mma_m16n8k16<__half>(total_[n], ones, c1, total_[n]);
            mma_m16n8k16<__half>(total_[n], ones, c2, total_[n]);
            mma_m16n8k16<__half>(total_[n], ones, c3, total_[n]);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float factor = pair_factor(kBits, i % kOfWord);
          weight[n][i] = all[i];
          factored[n][i] = factor == 1.0f ? all[i] : hmul2(all[i], same_half2(factor));
        }
      }
    }
    uint32_t scaled[NT][8];
    static_for<(D + 31) / 32>([&](auto index) {
      constexpr int kGroup = 32 * index / F::kVGroup;
      if constexpr (32 * index % F::kVGroup == 0) {
        const unsigned char* const row = scales + v_scales_;
        const uint4 x = load_uint4(row + F::v_row_part(kGroup, 0, 0));
        const uint4 y = load_uint4(row + F::v_row_part(kGroup, 0, 1));
        const uint32_t scale[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
          for (int i = 0; i < 8; i++) scaled[n][i] = hmul2(factored[n][i], scale[i]);
          if constexpr (F::kVSymmetric) add_symmetric(weight[n], scaled[n], n);
        }
      }
      constexpr bool kShort = 32 * index + 32 > D;  // 16 channels: one tile, two channels a lane
#pragma unroll
      for (int b = 0; b < 8 / kOfWord; b++) {
        uint32_t w[4] = {};
        load_value_words<kShort>(v_codes_[0] + stage + 128 * index + b * 4 * F::kVStride, w);
#pragma unroll
        for (int t = 0; t < (kShort ? 1 : 2); t++) {
          const uint32_t wa = w[2 * t], wb = w[2 * t + 1];
#pragma unroll
          for (int k = 0; k < kOfWord / 2; k++) {
            uint32_t a[4];
            code_fragment<kBits, F::kSubnormalCodes>(wa, wb, k, a);
#pragma unroll
            for (int n = 0; n < NT; n++) {
              const uint32_t pair[2] = {scaled[n][b * kOfWord + 2 * k], scaled[n][b * kOfWord + 2 * k + 1]};
              mma_m16n8k16<__half>(o[n][2 * index + t], a, pair, o[n][2 * index + t]);
            }
          }
        }
      }
    });
    if constexpr (F::kVPlanes == 2) multiply_high_bits(stage, scaled, o);
  }

  // The second plane of 3-bit values, with the same products: their rounding must not differ between the planes.
  KIVI_DEVICE void multiply_high_bits(int stage, uint32_t (&scaled)[NT][8], float (&o)[NT][D / 16][4]) const {
    static_assert(F::kVPlanes == 1 || (F::kVGroups == 1 && D % 32 == 0), "one scale a token, whole loads");
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float ratio = high_bit_factor(i) / pair_factor(2, i);
        if (ratio != 1.0f) scaled[n][i] = hmul2(scaled[n][i], same_half2(ratio));
      }
    }
#pragma unroll
    for (int group = 0; group < D / 32; group++) {
      uint32_t w[4];
      load_value_words<false>(v_codes_[1] + stage + 128 * group, w);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const uint32_t wa = own_high_bits<2>(w[2 * t], tq_), wb = own_high_bits<2>(w[2 * t + 1], tq_);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const uint32_t a[4] = {
              high_bit_pair<F::kSubnormalCodes>(wa, 2 * k), high_bit_pair<F::kSubnormalCodes>(wb, 2 * k),
              high_bit_pair<F::kSubnormalCodes>(wa, 2 * k + 1), high_bit_pair<F::kSubnormalCodes>(wb, 2 * k + 1)};
#pragma unroll
          for (int n = 0; n < NT; n++) {
            const uint32_t pair[2] = {scaled[n][2 * k], scaled[n][2 * k + 1]};
            mma_m16n8k16<__half>(o[n][2 * group + t], a, pair, o[n][2 * group + t]);
          }
        }
      }
    }
  }

  // Symmetric V: the sum of the rounded products weight * scale, in all rows of even_, and that of the weights in odd_.
  // With products that are not rounded the middle code would not cancel, and all channels would be off alike: which one
  // channel gets in full when V is turned back.
  KIVI_DEVICE void add_symmetric(const uint32_t (&weight)[8], const uint32_t (&scaled)[8], int n) {
    constexpr int kBits = F::kVBits == 4 ? 4 : 2, kOfWord = 16 / kBits;
    const uint32_t one = same_half2(1.0f), ones[4] = {one, one, one, one};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint32_t first = same_half2(1.0f / pair_factor(kBits, 2 * k % kOfWord));
      const uint32_t second = same_half2(1.0f / pair_factor(kBits, (2 * k + 1) % kOfWord));
      const uint32_t a[4] = {first, first, second, second};
      const uint32_t b[2] = {scaled[2 * k], scaled[2 * k + 1]}, w[2] = {weight[2 * k], weight[2 * k + 1]};
      mma_m16n8k16<__half>(even_[n], a, b, even_[n]);
      mma_m16n8k16<__half>(odd_[n], ones, w, odd_[n]);
    }
  }
  template <bool Short>
  KIVI_DEVICE void load_value_words(int at, uint32_t (&w)[4]) const {
    if constexpr (Short) {
      const uint2 two = load_uint2(shared_.main + (at - 8 * gid_));
      w[0] = two.x, w[1] = two.y;
    } else {
      const uint4 four = load_uint4(shared_.main + at);
      w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
    }
  }
  // Puts the sums of weights and zeros where they belong.
  KIVI_DEVICE void finish(WarpSums<D, NT>& sums) const {
    constexpr float kZeroUnit = F::kVSymmetric        ? -0.5f * static_cast<float>((1 << F::kVBits) - 1)
                                : F::kScaleBytes == 1 ? zero_unit(F::kVBits)
                                                      : 1.0f;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float side = even_[n][j] + odd_[n][2 + j];
        sums.sum[n][j] = F::kVSymmetric ? odd_[n][2 + j]
                         : kOwnTotal    ? total_[n % kTotals][j]
                                        : __shfl_sync(kFullWarp, side, 4 * F::kVGroups % kWarpThreads + tq_);
        static_for<F::kVGroups>([&](auto g) {
          const float zero = kZeroUnit * (F::kVSymmetric ? even_[n][j] : __shfl_sync(kFullWarp, side, 4 * g + tq_));
          constexpr int kFirst = g * F::kVGroup / 16, kLast = (g + 1) * F::kVGroup / 16;
#pragma unroll
          for (int c = kFirst; c < (kLast < D / 16 ? kLast : D / 16); c++) {
            sums.acc[n][c][j] = fmaf(sums.acc[n][c][j], code_unit<F>(), zero);
            sums.acc[n][c][2 + j] = fmaf(sums.acc[n][c][2 + j], code_unit<F>(), zero);
          }
        });
      }
    }
  }

  const AttentionParams& p_;
  const SharedPieces<F, NT>& shared_;
  const int64_t first_position_;  // of the part's first token
  const int tokens_;              // of the part
  const int warp_, lane_, gid_, tq_;
  const SeenByTile seen_;
  int begin_, end_;                                       // chunks of this warp
  int source_[F::kCopies], target_[F::kCopies], second_;  // second_: bit k: copy k of this lane is of record 1
  int k_codes_[F::kPlaneSlots], k_scales_, v_codes_[2], v_scales_;
  int zero_low_, zero_high_, zero_moves_, weight_store_, weight_low_, weight_high_;
  uint32_t q_[NT][F::kPairs];
  float to_log2_[NT][2];
  // Row gid: sum of weight * zero of channel group gid; row kVGroups: sum of weights. Even pairs of tokens in rows 0-7
  // of the one, odd pairs in rows 8-15 of the other; their other halves are of no use. Symmetric V: see add_symmetric.
  float even_[NT][4], odd_[NT][4];
  // Where eight channel groups leave no row for it: the sum of weights, in all rows.
  static constexpr bool kOwnTotal = !F::kVSymmetric && F::kVGroups == 8;
  static constexpr int kTotals = kOwnTotal ? NT : 1;
  float total_[kTotals][4];
};

}  // namespace kivi::cuda::tensor
