// Runs the tests if there is a device; else says why not and exits with 77, which ctest shows as skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("skipped: no CUDA device (%s)\n", error == cudaSuccess ? "none found" : cudaGetErrorString(error));
    return 77;
  }
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) == cudaSuccess) std::printf("on %s\n", device.name);
  return RUN_ALL_TESTS();
}
