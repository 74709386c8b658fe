// Do the tensor cores of this device take subnormal float16 numbers? The kernels leave the codes of a record where they
// lie in a word, so that as float16 they are subnormal (csrc/cuda/attention_tensor_records.h). Multiplies every
// subnormal that a code can be by powers of two and compares with the exact product. Exit code 0: yes; 1: no, and the
// tensor-core path must not be used there; 77: there is no device.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/device.h"

namespace {

// Row r of A holds the number `bits` + r in its first place, column c of B holds 2^c there.
__global__ void products_kernel(uint32_t bits, float* out) {
  const unsigned lane = threadIdx.x, row = lane / 4;
  const bool first = lane % 4 == 0;
  uint32_t a[4] = {first ? bits + row : 0u, first ? bits + row + 8 : 0u, 0u, 0u};
  const __half power = __float2half(ldexpf(1.0f, static_cast<int>(row)));  // of column lane / 4 of B
  uint32_t b[2] = {first ? static_cast<uint32_t>(__half_as_ushort(power)) : 0u, 0u};
  float c[4] = {0, 0, 0, 0}, d[4];
  kivi::cuda::mma_m16n8k16<__half>(d, a, b, c);
  for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  float* device = nullptr;
  if (cudaMalloc(&device, 128 * sizeof(float)) != cudaSuccess) return 1;
  std::vector<float> out(128);
  int wrong = 0;
  for (uint32_t bits = 0; bits < 1024; bits += 16) {  // all subnormals: bits * 2^-24
    if (kivi::cuda::launch(products_kernel, "products", dim3(1), dim3(32), 0, nullptr, bits, device) != cudaSuccess ||
        cudaMemcpy(out.data(), device, 128 * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess) {
      std::printf("the kernel did not run\n");
      return 1;
    }
    for (int row = 0; row < 16; row++) {
      for (int column = 0; column < 8; column++) {
        wrong += out[static_cast<size_t>(row * 8 + column)] != std::ldexp(static_cast<float>(bits + row), column - 24);
      }
    }
  }
  std::printf("%d of %d products of subnormal float16 numbers are wrong\n", wrong, 64 * 128);
  return wrong == 0 ? 0 : 1;
}
