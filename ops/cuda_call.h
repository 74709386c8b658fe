// What every operator on CUDA does around its launches: makes the device of its tensors the current one, launches on
// that device's current stream, and turns an error of a launch into an exception. Through c10's interface for any
// device, so that nothing of libtorch_cuda is linked. The same operators are tested without a GPU: there the tensors
// are on the CPU and the launches go to the emulator of tests/cuda/emulator.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

#include "ops/registration.h"

// The dispatch key that the operators are registered for.
#if defined(KIVI_CUDA_EMULATED)
#define KIVI_CUDA_KEY CPU
#else
#define KIVI_CUDA_KEY CUDA
#endif

namespace kivi {

class CudaCall {
 public:
  explicit CudaCall(const at::Tensor& t) : guard_(t.device()) {
    if (t.device().is_cpu()) return;  // the emulator has no streams
    const c10::impl::VirtualGuardImpl device(t.device().type());
    stream_ = static_cast<cudaStream_t>(device.getStream(t.device()).native_handle());
  }

  cudaStream_t stream() const { return stream_; }
  static void check(cudaError_t error, const char* name) {
    TORCH_CHECK(error == cudaSuccess, "kivi::", name, ": the launch failed: ", cudaGetErrorString(error));
  }

 private:
  c10::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace kivi
