// Tensor-core attention kernels: groups of 64 and 128 tokens.
#include "cuda/attention_tensor_configs.h"

namespace kivi::cuda::tensor {
KIVI_TENSOR_GROUPS(KIVI_TENSOR_DEFINE)
}  // namespace kivi::cuda::tensor
