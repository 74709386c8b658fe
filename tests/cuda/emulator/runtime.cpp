// The functions of the CUDA runtime that host code calls. The memory of the device is the heap, and all work is done
// when a call returns.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "emulator/launch.h"

namespace emulator {
namespace {

struct Allowed {
  std::mutex mutex;
  std::map<const void*, size_t> bytes;  // of each kernel
};
Allowed& allowed() {
  static Allowed allowed;
  return allowed;
}

}  // namespace

size_t allowed_dynamic_shared(const void* kernel) {
  const std::lock_guard<std::mutex> lock(allowed().mutex);
  const auto found = allowed().bytes.find(kernel);
  return found == allowed().bytes.end() ? kStaticSharedLimit : std::max(kStaticSharedLimit, found->second);
}

}  // namespace emulator

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  constexpr size_t kAlign = 256;
  return posix_memalign(memory, kAlign, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  if (bytes > 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "error"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {  // of an H200
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(emulator::kDynamicSharedLimit);
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  const auto bytes = static_cast<size_t>(value);
  if (bytes > emulator::kDynamicSharedLimit) return cudaErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(emulator::allowed().mutex);
  emulator::allowed().bytes[kernel] = bytes;
  return cudaSuccess;
}

}  // extern "C"
