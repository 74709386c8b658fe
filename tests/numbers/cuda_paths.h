// The two CUDA paths of an attention call whose parameters point to host memory, in the emulator.
#pragma once

#include <vector>

#include "format/params.h"

namespace kivi::test {

enum class CudaPath { kGeneric, kTensorCores };

// out [B][Hq][Lq][Dv]; empty if the path does not take this call.
std::vector<float> run_on_cuda(const AttentionParams& params, CudaPath path);

}  // namespace kivi::test
