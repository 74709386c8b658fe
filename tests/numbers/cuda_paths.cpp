// In a file of its own: the headers of the emulator and those of torch define some of the same names.
#include "tests/numbers/cuda_paths.h"

#include "cuda/attention.h"
#include "cuda/attention_device.h"

namespace kivi::test {

std::vector<float> run_on_cuda(const AttentionParams& params, CudaPath path) {
  using namespace kivi::cuda;
  DeviceAttention call(params);
  const AttentionParams& p = call.params;
  if (path == CudaPath::kTensorCores && !tensor_parts_support(p)) return {};
  const int64_t parts = most_parts(p.block_table_stride);
  const DeviceArray<float> scratch(static_cast<size_t>(part_offset(p, parts, p.batch, 0, 0, 0)));
  check(path == CudaPath::kTensorCores ? launch_tensor_parts(p, parts, scratch.data(), nullptr)
                                       : launch_generic_parts(p, parts, scratch.data(), nullptr));
  check(launch_merge(p, parts, scratch.data(), nullptr));
  return call.output().out;
}

}  // namespace kivi::test
