// A small kernel with every kind of synchronisation that kernels of csrc/cuda use, each of them needed: what the
// emulator, the sanitizers and mutate.py are tried on.
#pragma once

#include <cstdint>

#include "cuda/device.h"

namespace kivi::cuda {

constexpr int kSampleThreads = 128;
constexpr int kSampleChunk = 4 * kSampleThreads;  // floats: 16 bytes a thread

struct SampleParams {
  const float* in;  // [chunks][kSampleChunk]
  int64_t chunks;
  float* sums;        // [blocks] of the grid
  unsigned* tickets;  // [1]; 0 before and after
  float* shares;      // [blocks]: each block's part of the sum of all
};

// Blocks sum every so many-th chunk, and the last one to end puts their sums in proportion.
inline __global__ void sample_kernel(const KIVI_GRID_CONSTANT SampleParams p) {
  KIVI_SHARED(float, warp_sums, [kSampleThreads / kWarpThreads]);
  SharedCarver carver;
  float* const stages = carver.take<float>(2 * kSampleChunk);
  float* const lane_sums = carver.take<float>(kSampleThreads);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpThreads;
  const auto load = [&](int64_t chunk, int stage) {
    cp_async16(stages + stage * kSampleChunk + 4 * thread, p.in + chunk * kSampleChunk + 4 * thread);
    cp_async_commit();
  };

  float sum = 0;
  int stage = 0;
  if (blockIdx.x < p.chunks) load(blockIdx.x, 0);
  for (int64_t chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x, stage ^= 1) {
    if (chunk + gridDim.x < p.chunks) {
      load(chunk + gridDim.x, stage ^ 1);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();  // the stage is there
    for (int i = 0; i < 4; i++) sum += stages[stage * kSampleChunk + i * kSampleThreads + thread];
    __syncthreads();  // before the next chunk but one overwrites it
  }
  lane_sums[thread] = sum;
  __syncwarp();
  if (thread % kWarpThreads == 0) {
    for (int lane = 1; lane < kWarpThreads; lane++) sum += lane_sums[thread + lane];
    warp_sums[warp] = sum;
  }
  __syncthreads();  // warp_sums are there

  bool last = false;
  if (thread == 0) {
    for (int i = 1; i < kSampleThreads / kWarpThreads; i++) sum += warp_sums[i];
    p.sums[blockIdx.x] = sum;
    __threadfence();  // the sum before the ticket
    last = atomicAdd(p.tickets, 1u) == gridDim.x - 1;
    __threadfence();  // the tickets of others before their sums
  }
  if (!__syncthreads_or(last)) return;
  float all = 0;
  for (unsigned block = 0; block < gridDim.x; block++) all += p.sums[block];
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kSampleThreads) p.shares[block] = p.sums[block] / all;
  if (thread == 0) *p.tickets = 0;
}

constexpr size_t sample_shared_bytes() { return (2 * kSampleChunk + kSampleThreads) * sizeof(float); }

}  // namespace kivi::cuda
