// Attention parts (cuda/parts.h) on tensor cores: the kernel and its launch, instantiated in attention_tensor_*.cu for
// the formats of attention_tensor_configs.h. sm_80 or newer; on older devices the kernel traps.
//
// Block (part, kv head and tile of query rows, row of the batch), 4 warps. A tile is 8 NT query rows, the columns of B.
// Part 0 takes the exact tokens, the others a run of pages each. At the end the warps' sums are joined.
#pragma once

#include "cuda/attention_tensor_exact.h"
#include "cuda/attention_tensor_records.h"

namespace kivi::cuda::tensor {

// The kernel's parameters. What the host can divide it divides: a division of 64 bits takes a hundred instructions, and
// parts may be short.
struct TensorArguments {
  AttentionParams attention;
  float* scratch;
  int parts;
  int group_heads, q_len, rows, tiles;  // of a kv head: query heads, queries, rows = heads * queries, tiles of rows
};

// Rows of the tile, and their queries: normalised float16 in the order of the record's channels, or for exact tokens as
// they are.
template <class F, int NT>
KIVI_DEVICE void load_rows(const TensorArguments& arguments, const SharedPieces<F, NT>& shared, const KeyRanges& ranges,
                           int64_t batch, int64_t kv_head, int first_row, bool exact, const ExactTokens& tokens,
                           int64_t run_begin, int64_t run_tokens) {
  constexpr int D = F::kD, kRows = NT * kTileRows;
  const AttentionParams& p = arguments.attention;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  if (thread < kRows) {
    RowState state{0, 0, 0, 0.0f, 0, 0, 0};
    const int row = first_row + thread, head_of_group = row / arguments.q_len;
    const int64_t query = row - head_of_group * arguments.q_len;
    if (row < arguments.rows && query < ranges.rows) {
      const int64_t head = kv_head * arguments.group_heads + head_of_group;
      state.position = query_position(ranges, query);
      const SeenKeys seen = seen_keys(p, ranges, state.position);
      device_check(mask_covers(p, seen), "attention: the mask is narrower than the keys of a row");
      const auto in_run = [&](int64_t position) {
        const int64_t at = position - run_begin;
        return at < 0 ? int64_t{0} : at < run_tokens ? at : run_tokens;
      };
      state.begin = static_cast<int>(exact ? tokens.before(seen.begin) : in_run(seen.begin));
      state.end = static_cast<int>(exact ? tokens.before(seen.end) : in_run(seen.end));
      if (p.alibi_slopes != nullptr) state.slope = p.alibi_slopes[batch * p.alibi_batch_stride + head];
      state.mask = batch * p.mask_strides[0] + head * p.mask_strides[1] + query * p.mask_strides[2];
      state.query = batch * p.q_batch_stride + head * p.q_head_stride + query * p.q_row_stride;
    }
    shared.rows[thread] = state;
  }
  __syncthreads();  // rows are there; exponents follow
  const int16_t* const order = exact ? nullptr : head_order(p, batch, kv_head);
  constexpr int kOfLane = (D + kWarpThreads - 1) / kWarpThreads;
  for (int r = warp; r < kRows; r += kWarps) {
    auto* const to = reinterpret_cast<uint16_t*>(shared.queries + r * (2 * D + 16));
    const bool used = shared.rows[r].begin < shared.rows[r].end;
    const auto* const q = static_cast<const uint16_t*>(p.q) + shared.rows[r].query;
    if (exact) {
      for (int i = lane; i < D; i += kWarpThreads) to[i] = used ? q[i] : uint16_t{0};
      continue;
    }
    float x[kOfLane], top = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const int place = 32 * i + lane;
      x[i] = 0;
      if (used && place < D) {
        const uint16_t bits = q[order != nullptr ? order[place] : place];
        x[i] = p.q_type == Element::kFloat16 ? __low2float(as_half2(bits)) : bfloat16_to_float(bits);
      }
      top = fmaxf(top, fabsf(x[i]));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
    // |q| < 2^e. A negative scale of the scores goes into q, and with scale 0 q is 0.
    const int e = top > 0 ? min(126, max(-100, static_cast<int>(__float_as_uint(top) >> 23) - 126)) : 0;
    const float factor = p.scale == 0.0f ? 0.0f : copysignf(power_of_two(-e), p.scale);
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const int place = 32 * i + lane;
      if (place < D) to[place] = static_cast<uint16_t>(half2_of(x[i] * factor, 0.0f));
    }
    if (lane == 0) shared.rows[r].exponent = e;
  }
}

// Joins the warps' sums and writes the part's results. `of_exact`: which map of tiles to channels they have.
template <class F, int NT>
KIVI_DEVICE void join_warps(const SharedPieces<F, NT>& shared, const WarpSums<F::kD, NT>& sums, bool of_exact, int rows,
                            float* out) {
  constexpr int D = F::kD, kRows = NT * kTileRows, kStride = D + 4;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  const int gid = lane / 4, tq = lane % 4;
  auto* const acc = reinterpret_cast<float*>(shared.main);  // [warp][row][D + 4]
  // A lane's places in a row: tile c, half h of the exact tokens at 16c + 8h, of records at 32 (c / 2) + 2 (c % 2) + h;
  // a last half of 32 channels at 16c + h.
  const int exact_place = gid, record_place = 4 * gid, short_place = 2 * gid;
  __syncthreads();  // the rings are free
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int row = warp * kRows + 8 * n + 2 * tq + j;
      float* const to = acc + row * kStride;
      if (of_exact) {
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
          to[exact_place + 16 * c] = sums.acc[n][c][j], to[exact_place + 16 * c + 8] = sums.acc[n][c][2 + j];
        }
      } else {
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
          *reinterpret_cast<float4*>(to + record_place + 32 * c) =
              make_float4(sums.acc[n][2 * c][j], sums.acc[n][2 * c][2 + j], sums.acc[n][2 * c + 1][j],
                          sums.acc[n][2 * c + 1][2 + j]);
        }
        if constexpr (D % 32 != 0) {
          to[short_place + D - 16] = sums.acc[n][D / 16 - 1][j],
                               to[short_place + D - 15] = sums.acc[n][D / 16 - 1][2 + j];
        }
      }
      if (gid == 0) shared.max[row] = sums.max[n][j], shared.sum[row] = sums.sum[n][j];
    }
  }
  __syncthreads();  // the warps' sums
  for (int row = warp; row < rows; row += kWarps) {
    float top = kNone, sum = 0, weight[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; w++) top = fmaxf(top, shared.max[w * kRows + row]);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      weight[w] = exp2_fast(shared.max[w * kRows + row] - top);
      sum += weight[w] * shared.sum[w * kRows + row];
    }
    float* const to = out + row * int64_t{D + 2};
#pragma unroll
    for (int i = 0; i < (D / 2 + kWarpThreads - 1) / kWarpThreads; i++) {
      const int channel = 2 * (kWarpThreads * i + lane);
      if (channel < D) {
        float2 total = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
          const float2 x = *reinterpret_cast<const float2*>(acc + (w * kRows + row) * kStride + channel);
          total.x += weight[w] * x.x, total.y += weight[w] * x.y;
        }
        *reinterpret_cast<float2*>(to + channel) = total;
      }
    }
    // The column of a row that sees nothing of the part holds anything.
    const bool sees = shared.rows[row].begin < shared.rows[row].end;
    if (lane == 0) to[D] = !sees || top == kNone ? -INFINITY : top, to[D + 1] = sees ? sum : 0.0f;
  }
}

// Blocks that a multiprocessor shall hold: three where shared memory has room and 168 registers are enough, which sums,
// queries and the addresses of copies decide.
template <class F, int NT, bool Rules>
constexpr int min_blocks() {
  const bool small = F::kD * F::kVPlanes + 4 * F::copy_addresses() <= 165;
  return NT == 1 && !Rules && small && SharedSizes<F, NT>::kBytes <= 75 * 1024 ? 3 : 2;
}

template <class F, int NT, bool Rules>
__global__ void __launch_bounds__(kThreads, min_blocks<F, NT, Rules>())
    tensor_parts_kernel(const KIVI_GRID_CONSTANT TensorArguments arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int D = F::kD, kRows = NT * kTileRows;
  const AttentionParams& p = arguments.attention;
  const SharedPieces<F, NT> shared;
  const int thread = static_cast<int>(threadIdx.x), part = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y) / arguments.tiles;
  const int first_row = (static_cast<int>(blockIdx.y) - kv_head * arguments.tiles) * kRows;
  const int tile_rows = min(arguments.rows - first_row, kRows);
  const int64_t batch = blockIdx.z;
  // part_offset of cuda/parts.h.
  const int64_t cell =
      ((batch * p.format.num_kv_heads + kv_head) * arguments.parts + part) * arguments.rows + first_row;
  float* const out = arguments.scratch + cell * (D + 2);

  const KeyRanges ranges = key_ranges(p, batch);
  const ExactTokens tokens(ranges);
  const bool exact = part == 0;
  const int64_t pages = ceil_div(ranges.quantized, kPageTokens), of_part = pages_per_part(pages);
  const int64_t first_page = (part - 1) * of_part;
  const int64_t run_begin = first_page * kPageTokens, left = ranges.quantized - run_begin;
  const int64_t run_tokens = exact ? 0 : left < 0 ? 0 : left < of_part * kPageTokens ? left : of_part * kPageTokens;
  const int64_t run_position = p.format.sink_length + run_begin;
  if (exact ? tokens.count == 0 : run_tokens == 0) {
    if (thread < tile_rows) {
      float* const to = out + thread * int64_t{D + 2};
      to[D] = -INFINITY, to[D + 1] = 0;
    }
    return;
  }
  if (thread < kMaxPages && thread < ceil_div(run_tokens, kPageTokens)) {
    // record_address of format/keys.h, of record 0.
    device_check(first_page + thread < p.block_table_stride && page_is_there(p, batch, first_page + thread),
                 "attention: a page of a row is not in the pool");
    const int64_t id = p.block_table[batch * p.block_table_stride + first_page + thread];
    constexpr int64_t kHeadBytes = kPageTokens / F::kG * F::kRecordBytes;
    shared.pages[thread] = p.pool + id * p.page_bytes + kv_head * kHeadBytes;
  }
  if (thread < 8) {
    const uint32_t value = thread < 4 ? 0x3C003C00u : 0u;  // ones, then zeros
    unsigned char* const constants =
        F::kScaleBytes == 1 ? shared.expanded + kWarps * F::kExpanded : shared.main + SharedSizes<F, NT>::kMain;
    reinterpret_cast<uint32_t*>(constants)[thread] = value;
  }
  load_rows<F, NT>(arguments, shared, ranges, batch, kv_head, first_row, exact, tokens, run_position, run_tokens);
  __syncthreads();  // pages, constants and queries

  WarpSums<D, NT> sums;
  if (exact) {
    if (p.cache_type == Element::kFloat16) {
      ExactAttention<F, NT, Rules, __half>(p, shared, tokens, batch, kv_head).run(sums);
    } else {
      ExactAttention<F, NT, Rules, __nv_bfloat16>(p, shared, tokens, batch, kv_head).run(sums);
    }
  } else {
    RecordAttention<F, NT, Rules>(p, shared, run_position, static_cast<int>(run_tokens)).run(sums);
  }
  join_warps<F, NT>(shared, sums, exact, tile_rows, out);
#else
  (void)arguments;
#if defined(__CUDA_ARCH__)
  __trap();
#endif
#endif
}

// What tensor_parts_support and launch_tensor_parts need of one format.
template <class F>
struct TensorParts {
  // Query rows beyond 8 take tiles of 16 where nothing but limits applies to the scores.
  static bool wide(const AttentionParams& p, bool rules) { return !rules && query_rows(p) > kTileRows && F::kD <= 128; }

  static size_t shared_bytes(const AttentionParams& p, bool rules) {
    return wide(p, rules) ? SharedSizes<F, 2>::kBytes : SharedSizes<F, 1>::kBytes;
  }

  static bool matches(const AttentionParams& p) {
    constexpr Format kFormat = F::format();
    const Format& f = p.format;
    if (f.head_dim != kFormat.head_dim || f.value_head_dim != kFormat.value_head_dim) return false;
    if (f.group_size != kFormat.group_size || f.scale_type != kFormat.scale_type) return false;
    if (f.k_bits != kFormat.k_bits || f.v_bits != kFormat.v_bits) return false;
    if (value_group(f) != value_group(kFormat) || f.v_symmetric != kFormat.v_symmetric) return false;
    if (f.num_key_classes != kFormat.num_key_classes) return false;
    for (int64_t c = 0; c < f.num_key_classes; c++) {
      if (!(f.key_classes[c] == kFormat.key_classes[c])) return false;
    }
    return true;
  }

  template <int NT, bool Rules>
  static cudaError_t launch_as(const AttentionParams& p, int64_t parts, float* scratch, cudaStream_t stream) {
    constexpr size_t kBytes = SharedSizes<F, NT>::kBytes;
    auto* const kernel = tensor_parts_kernel<F, NT, Rules>;
    const cudaError_t error = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
    if (error != cudaSuccess) return error;
    const auto rows = static_cast<int>(query_rows(p));
    const int tiles = (rows + NT * kTileRows - 1) / (NT * kTileRows);
    const TensorArguments arguments{
        p, scratch, static_cast<int>(parts), static_cast<int>(group_heads(p)), static_cast<int>(p.q_len), rows, tiles};
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(p.format.num_kv_heads * tiles),
                    static_cast<unsigned>(p.batch));
    return launch(kernel, "tensor_parts", grid, dim3(kThreads), kBytes, stream, arguments);
  }
  static cudaError_t launch_parts(const AttentionParams& p, bool rules, int64_t parts, float* scratch,
                                  cudaStream_t stream);
};

template <class F>
cudaError_t TensorParts<F>::launch_parts(const AttentionParams& p, bool rules, int64_t parts, float* scratch,
                                         cudaStream_t stream) {
  if (rules) return launch_as<1, true>(p, parts, scratch, stream);
  if constexpr (F::kD <= 128) {
    if (wide(p, rules)) return launch_as<2, false>(p, parts, scratch, stream);
  }
  return launch_as<1, false>(p, parts, scratch, stream);
}

}  // namespace kivi::cuda::tensor
