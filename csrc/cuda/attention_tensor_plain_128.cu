// Tensor-core attention kernels: float16 scales, heads of 128 channels.
#include "cuda/attention_tensor_configs.h"

namespace kivi::cuda::tensor {
KIVI_TENSOR_PLAIN_128(KIVI_TENSOR_DEFINE)
}  // namespace kivi::cuda::tensor
