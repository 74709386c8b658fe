// Copies of whole pages.
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace kivi::cuda {
namespace {

constexpr int kCopyThreads = 256;

// Block (x, page): a share of one page. Records, and so pages, are multiples of 32 bytes.
__global__ void copy_pages_kernel(uint8_t* pool, int64_t pages, int64_t page_bytes, const int64_t* source,
                                  const int64_t* target) {
  const int64_t from = source[blockIdx.y], to = target[blockIdx.y];
  device_check(from >= 0 && from < pages && to >= 0 && to < pages, "copy_pages: a page is not in the pool");
  const auto* const in = reinterpret_cast<const uint4*>(pool + from * page_bytes);
  auto* const out = reinterpret_cast<uint4*>(pool + to * page_bytes);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCopyThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kCopyThreads) + threadIdx.x; i < page_bytes / 16; i += stride) {
    out[i] = in[i];
  }
}

}  // namespace

cudaError_t copy_pages(uint8_t* pool, int64_t pages, int64_t page_bytes, const int64_t* source, const int64_t* target,
                       int64_t count, cudaStream_t stream) {
  constexpr int64_t kMostPages = 65535;  // of one launch: the second axis of a grid
  const int64_t blocks = page_bytes / 16 / (4 * kCopyThreads);
  for (int64_t first = 0; first < count; first += kMostPages) {
    const int64_t some = count - first < kMostPages ? count - first : kMostPages;
    const dim3 grid(static_cast<unsigned>(blocks < 1 ? 1 : blocks > 64 ? 64 : blocks), static_cast<unsigned>(some));
    const cudaError_t error = launch(copy_pages_kernel, "copy_pages", grid, dim3(kCopyThreads), 0, stream, pool, pages,
                                     page_bytes, source + first, target + first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kivi::cuda
