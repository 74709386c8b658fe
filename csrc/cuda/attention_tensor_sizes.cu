// Tensor-core attention kernels: heads of other sizes.
#include "cuda/attention_tensor_configs.h"

namespace kivi::cuda::tensor {
KIVI_TENSOR_SIZES(KIVI_TENSOR_DEFINE)
}  // namespace kivi::cuda::tensor
