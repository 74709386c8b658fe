// The emulator itself.
#include "cuda/device.h"
#include "cuda/device_memory.h"

namespace kivi::cuda {
namespace {

__global__ void reverse_kernel(const int* in, int* out) {
  KIVI_SHARED(int, buffer, [64]);
  buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[63 - threadIdx.x];
}

TEST(Emulator, BarrierOrdersTheThreadsOfABlock) {
  std::vector<int> in(64), want(64);
  for (int i = 0; i < 64; i++) in[static_cast<size_t>(i)] = i, want[static_cast<size_t>(63 - i)] = i;
  in_every_order([&] {
    const DeviceArray<int> a(in), b(64);
    check(launch(reverse_kernel, "reverse", dim3(1), dim3(64), 0, nullptr, a.data(), b.data()));
    EXPECT_EQ(b.get(), want);
  });
}

}  // namespace
}  // namespace kivi::cuda
