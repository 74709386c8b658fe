// Joins the parts of every query row and writes out and lse: finish_row of csrc/cpu/plan.cpp is the definition. The
// parts are taken in order, whatever wrote them, and only those that the row has.
#include <algorithm>

#include "cuda/attention.h"
#include "cuda/attention_join.h"
#include "cuda/device.h"
#include "format/half.h"
#include "format/rotate.h"

namespace kivi::cuda {
namespace {

constexpr int kMergeThreads = 128;

// All threads: x becomes what its rotation came from.
KIVI_DEVICE void rotate_back(float* x, int64_t channels) {
  const auto count = static_cast<int>(channels), block = static_cast<int>(rotation_size(channels));
  for (int distance = 1; distance < block; distance *= 2) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += kMergeThreads) {
      const int at = i / distance * 2 * distance + i % distance;
      const float a = x[at], b = x[at + distance];
      x[at] = a + b;
      x[at + distance] = a - b;
    }
  }
  __syncthreads();
  const float factor = rotation_factor(block, /*back=*/true);
  for (int d = static_cast<int>(threadIdx.x); d < count; d += kMergeThreads) x[d] *= factor;
}

// A block for each row of the output.
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge_kernel(const KIVI_GRID_CONSTANT AttentionParams p, int64_t parts, const float* scratch) {
  KIVI_SHARED(float, acc, [kMaxHeadDim]);
  KIVI_SHARED(SoftmaxState, states, [kMergeThreads]);
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t out_row = blockIdx.x, query = out_row % p.q_len, head = out_row / p.q_len % p.num_heads;
  const int64_t batch = out_row / p.q_len / p.num_heads, kv_head = head / group_heads(p);
  const int64_t row = head % group_heads(p) * p.q_len + query;
  const auto value_dim = static_cast<int>(p.format.value_head_dim);
  const KeyRanges ranges = key_ranges(p, batch);
  if (query >= ranges.rows) {  // does not exist
    for (int d = thread; d < value_dim; d += kMergeThreads) {
      store_element(p.out, p.q_type, out_row * value_dim + d, 0.0f);
    }
    if (thread == 0) p.lse[out_row] = -bits_float(kFloatInf);
    return;
  }

  const int64_t own_parts = std::min(1 + quantized_parts(ceil_div(ranges.quantized, kPageTokens)), parts);
  const float* const first_part = scratch + part_offset(p, parts, batch, kv_head, 0, row);
  const int64_t part_step = query_rows(p) * part_row_floats(p);
  const int64_t state_at = p.layout.v_channels;
  const auto state_of = [&](int64_t part) {
    const float* const state = first_part + part * part_step + state_at;
    return SoftmaxState{state[0], state[1]};
  };

  // The quantised parts, so many at a time that a thread loads the state of one.
  for (int d = thread; d < value_dim; d += kMergeThreads) acc[d] = 0.0f;
  SoftmaxState all = SoftmaxState::empty();
  for (int64_t first = 1; first < own_parts; first += kMergeThreads) {
    const auto count = static_cast<int>(std::min<int64_t>(own_parts - first, kMergeThreads));
    __syncthreads();
    if (thread < count) states[thread] = state_of(first + thread);
    __syncthreads();
    const SoftmaxState before = all;
    for (int d = thread; d < value_dim; d += kMergeThreads) {
      const float* part = first_part + first * part_step + d;
      float sum = acc[d];
      all = before;
#pragma unroll 8
      for (int i = 0; i < count; i++, part += part_step) {
        const float value = *part;  // anything where the part is empty
        if (states[i].is_empty()) continue;
        const Join join(all, states[i]);
        sum = join(sum, value);
        all = join.state;
      }
      acc[d] = sum;
    }
  }
  if (p.format.v_rotated && own_parts > 1) rotate_back(acc, value_dim);

  // The exact tokens, then the learned logit, in the denominator only. From here on a thread keeps to its channels.
  const SoftmaxState exact = state_of(0);
  const Join join(all, exact);
  const SoftmaxState total = join.state;
  const float sink_logit = p.sinks != nullptr ? p.sinks[head] : -bits_float(kFloatInf);
  const bool seen = !total.is_empty();
  float factor = 0.0f, lse = sink_logit;
  if (seen) {
    // A row that has seen a key without a maximum has seen NaN, and its sum says so.
    const float sink = sink_logit * kLog2E;
    const float top = fmaxf(total.max, sink);
    const float shrink = exp2f(total.max - top);
    const float denominator = total.sum * shrink + exp2f(sink - top);
    factor = shrink / denominator;
    lse = (top + log2f(denominator)) * kLn2;
  }
  for (int d = thread; d < value_dim; d += kMergeThreads) {
    const float sum = exact.is_empty() ? acc[d] : join(acc[d], first_part[d]);
    store_element(p.out, p.q_type, out_row * value_dim + d, seen ? sum * factor : 0.0f);
  }
  if (thread == 0) p.lse[out_row] = lse;
}

}  // namespace

cudaError_t launch_merge(const AttentionParams& params, int64_t parts, const float* scratch, cudaStream_t stream) {
  const int64_t rows = params.batch * params.num_heads * params.q_len;
  if (rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch(attention_merge_kernel, "attention_merge", dim3(static_cast<unsigned>(rows)), dim3(kMergeThreads), 0,
                stream, params, parts, scratch);
}

}  // namespace kivi::cuda
