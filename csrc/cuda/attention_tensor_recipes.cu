// Tensor-core attention kernels: the recipes.
#include "cuda/attention_tensor_configs.h"

namespace kivi::cuda::tensor {
KIVI_TENSOR_RECIPES(KIVI_TENSOR_DEFINE)
}  // namespace kivi::cuda::tensor
