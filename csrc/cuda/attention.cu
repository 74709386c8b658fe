// Attention on a GPU: which kernel makes the parts, and how many parts there are.
#include "cuda/attention.h"
#include "cuda/kernels.h"
#include "kivi/format.h"

namespace kivi::cuda {
namespace {

// More scratch memory than this is not asked for where there is a choice. So many results are those of hundreds of
// blocks, which keep a GPU busy without dividing the keys.
constexpr int64_t kMostScratchBytes = int64_t{1} << 27;
// Of the generic kernel: the second axis of a grid. Rows of 134 million tokens and more would have more.
constexpr int64_t kMostParts = 65535;

int64_t scratch_bytes(const AttentionParams& p, int64_t parts) {
  return part_offset(p, parts, p.batch, 0, 0, 0) * static_cast<int64_t>(sizeof(float));
}

struct Plan {
  bool tensor_cores;
  int64_t parts;
};

// Two parts hold the same results as more do (launch_generic_parts). The tensor-core kernel always divides: it is for
// few queries.
Plan plan_of(const AttentionParams& p) {
  const int64_t most = most_parts(p.block_table_stride);
  const bool tensor_cores = tensor_parts_support(p);
  const bool fits = most <= kMostParts && scratch_bytes(p, most) <= kMostScratchBytes;
  const bool all = most <= 2 || tensor_cores || fits;
  return {tensor_cores, all ? most : 2};
}

}  // namespace

int64_t attention_scratch_bytes(const AttentionParams& params) {
  return round_up(scratch_bytes(params, plan_of(params).parts), 256);
}

cudaError_t attention(const AttentionParams& params, void* scratch, cudaStream_t stream) {
  if (params.batch == 0 || params.num_heads == 0 || params.q_len == 0) return cudaSuccess;
  const Plan plan = plan_of(params);
  auto* const results = static_cast<float*>(scratch);
  const cudaError_t error = plan.tensor_cores ? launch_tensor_parts(params, plan.parts, results, stream)
                                              : launch_generic_parts(params, plan.parts, results, stream);
  if (error != cudaSuccess) return error;
  return launch_merge(params, plan.parts, results, stream);
}

}  // namespace kivi::cuda
