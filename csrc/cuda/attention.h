// The launches that attention on a GPU consists of. The division into parts and the layout of their results is in
// parts.h.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/parts.h"
#include "format/params.h"

namespace kivi::cuda {

// `scratch` holds the results of `parts` parts for every kv head of every row of the batch. A kernel of parts writes
// max and sum of every query row of every part, also of the empty ones. `parts` is most_parts of the block table; for
// the generic kernel it may be 2, and part 1 then takes all runs of a row one after another, with the same results.

// Any format, options and dtypes.
cudaError_t launch_generic_parts(const AttentionParams& params, int64_t parts, float* scratch, cudaStream_t stream);

// Tensor cores: whether they can do this call on the current device, and the launch.
bool tensor_parts_support(const AttentionParams& params);
cudaError_t launch_tensor_parts(const AttentionParams& params, int64_t parts, float* scratch, cudaStream_t stream);

// Joins the parts in order, turns rotated V back, adds the sink logits, writes out and lse.
cudaError_t launch_merge(const AttentionParams& params, int64_t parts, const float* scratch, cudaStream_t stream);

}  // namespace kivi::cuda
