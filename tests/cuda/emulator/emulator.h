// emulator: run CUDA kernels as plain C++ on the host, for testing without a GPU.
//
// Each thread of a block is a fiber; all fibers of a block share one OS thread. A fiber runs until it
// reaches a synchronising intrinsic, then a seeded scheduler picks the next runnable one. Everything
// that joins several lanes (barriers, shuffles, votes, mma, ldmatrix, ...) is built on `collective()`.
#pragma once

#include <cuda_runtime_api.h>  // dim3, uint3, cudaStream_t, cudaError_t; plain C++ when not under nvcc
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#undef __shared__
#define __shared__ thread_local  // at block scope: one per OS thread, hence one per running block
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace emulator {

// ---- configuration -------------------------------------------------------------------------------

enum class Order {
  ascending,     // lowest runnable thread first: deterministic, warp by warp
  descending,    // highest runnable thread first
  random,        // uniformly random runnable warp and lane
  random_warps,  // random warp priorities, redrawn at every block barrier: warps run far ahead
};

struct Config {
  Order order = Order::ascending;
  uint64_t seed = 1;
  int workers = 1;                  // OS threads; each runs whole blocks
  size_t stack_bytes = 0;           // per fiber; 0 = default for this build
  bool poison_shared = true;        // fill shared memory with 0xFF (NaN as half, bfloat16 and float)
  bool strict_exit = true;          // a thread that exited must not leave others at a block barrier
  bool strict_source = true;        // a shuffle must not read a lane that takes no part; else it gets 0xFF bytes
  unsigned max_spins = 10'000'000;  // atomics, fences and sleeps without other progress before giving up
  bool strict_site = true;          // threads of one collective must come from the same source line
};
Config& config();

// Any misuse of the programming model ends the launch with this exception.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- what intrinsics are made of -----------------------------------------------------------------

struct Site {
  const char* file;
  int line;
};
#define EMULATOR_SITE ::emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

// Called once, by the last thread to arrive, with the argument block of every participating thread
// (index = lane for warp collectives, thread number for block collectives; null = not taking part).
using Combine = void (*)(void* const* args, unsigned count);

enum class Fence { none, memory };  // does the collective order memory accesses?
void warp_collective(const char* what, uint32_t mask, Site, Fence, void* args, Combine);
void block_collective(const char* what, Site, void* args, Combine);
void yield();  // scheduling point without synchronisation: atomics, fences, __nanosleep
// __threadfence. For the race detector, a fence, an atomic and, in another thread that sees its value,
// a fence after it order memory; an atomic alone does not.
void memory_fence();
void before_atomic(void*);
void after_atomic(void*);

unsigned lane_id();
uint32_t live_lanes();

// Shared memory, one heap block per array: exact bounds for ASan and valgrind.
void* static_shared(const void* key, size_t bytes, size_t align);
void* dynamic_shared();                                                         // the whole dynamic allocation
void* carve_shared(unsigned index, size_t offset, size_t bytes, size_t align);  // a piece of it, redzoned

// cp.async: each copy happens either at once or at the wait that covers it (seeded coin).
void async_copy(void* dst, const void* src, size_t bytes, size_t src_bytes);
void async_commit();
void async_wait(unsigned groups_left);

// ---- launching -----------------------------------------------------------------------------------

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_smem;
};
void run(const Launch&, void (*thread_body)(const void*), const void* argument);

struct Stats {
  uint64_t launches, blocks, threads, switches;
};
Stats& stats();

}  // namespace emulator

// Set by the scheduler before it switches to a fiber.
inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;
