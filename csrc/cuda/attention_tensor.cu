// Attention on tensor cores: no call is made there yet.
#include "cuda/attention.h"

namespace kivi::cuda {

bool tensor_parts_support(const AttentionParams&) { return false; }

cudaError_t launch_tensor_parts(const AttentionParams&, int64_t, float*, cudaStream_t) { return cudaErrorNotSupported; }

}  // namespace kivi::cuda
