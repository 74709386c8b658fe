// Runs CUDA kernels as plain C++ on the CPU, to test them without a GPU. Each thread of a block is a fiber, and all
// fibers of a block share one thread of the system. A fiber runs until it reaches an intrinsic that synchronises; then
// the scheduler picks the next one that can run, in an order that a seed decides. Whatever joins threads (barriers,
// shuffles, votes, tensor cores) is made of the two functions `warp_collective` and `block_collective`.
//
// csrc/cuda/device.h includes this in place of the CUDA toolkit. tests/README.md says what it can and cannot tell.
#pragma once

#include <cuda_runtime_api.h>  // dim3, uint3, cudaStream_t, cudaError_t: plain C++ when not under nvcc
#include <vector_functions.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#undef __shared__
#define __shared__ thread_local  // inside a function: one for each running block, which has its thread to itself
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace emulator {

// ---- configuration -------------------------------------------------------------------------------

// Which of the threads that can run is next.
enum class Order {
  ascending,     // the lowest: deterministic, warp by warp
  descending,    // the highest
  random,        // any warp, any lane
  random_warps,  // warps by priorities, drawn anew at every barrier of the block, and any lane: warps run far ahead
};

struct Config {
  Order order = Order::ascending;
  uint64_t seed = 1;
  int workers = 1;                  // threads of the system; each runs whole blocks
  size_t stack_bytes = 0;           // of a fiber; 0: what suits this build
  bool poison_shared = true;        // shared memory begins as 0xFF, which is NaN as half, bfloat16 and float
  bool strict_exit = true;          // a thread that exited must not leave others at a barrier
  bool strict_source = true;        // a shuffle must not read a lane that takes no part; else it gets 0xFF bytes
  bool strict_site = true;          // the threads of one collective must come from the same source line
  unsigned max_spins = 10'000'000;  // atomics, fences and sleeps without other progress before giving up
};
Config& config();

// What a kernel or a launch may not do ends the launch with this exception, which names kernel, block, thread, line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Whether this build has ThreadSanitizer watch the threads of kernels.
bool watches_races();

// ---- what intrinsics are made of -----------------------------------------------------------------

struct Site {
  const char* file;
  int line;
};
// A last parameter: the line of the call.
#define EMULATOR_SITE ::emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

// Called once, by the last thread to arrive, with what every participating thread passed as `args`; the index is the
// lane, or the number of the thread in the block, and null stands for threads that take no part.
using Combine = void (*)(void* const* args, unsigned count);

enum class Fence { none, memory };  // whether a collective orders accesses to memory
void warp_collective(const char* what, uint32_t mask, Site, Fence, void* args, Combine);
void block_collective(const char* what, Site, void* args, Combine);
// Lets others run, without synchronisation: atomics, fences, __nanosleep.
void yield();
// __threadfence. Memory is ordered by a fence, then an atomic, and in another thread that sees its value a fence after
// the atomic; an atomic alone orders nothing.
void memory_fence();
void before_atomic(void* address);
void after_atomic(void* address);

unsigned lane_id();
uint32_t live_lanes();

// Shared memory: each array is a heap block of its own, so that sanitizers and valgrind know its ends.
void* static_shared(const void* key, size_t bytes, size_t align);
void* dynamic_shared();                                                         // the whole of the launch
void* carve_shared(unsigned index, size_t offset, size_t bytes, size_t align);  // a piece of it

// cp.async: a copy happens either at once or in the wait that covers it, as a coin decides.
void async_copy(void* shared, const void* global, size_t bytes, size_t valid_bytes);
void async_commit();
void async_wait(unsigned groups_left);

// ---- launching -----------------------------------------------------------------------------------

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_bytes;  // of shared memory
};
using ThreadBody = void (*)(const void* argument);
void run(const Launch& launch, ThreadBody body, const void* argument);

// Graphs: between begin_capture and end_capture launches are kept with their arguments instead of run; replay runs them
// in order. One thread at a time.
struct GraphNode {
  Launch launch;
  std::function<void()> body;  // of one thread of a block
};
using Graph = std::vector<GraphNode>;
void begin_capture();
Graph end_capture();
void replay(const Graph& graph);
// Runs a launch, or keeps it.
void submit(const Launch& launch, std::function<void()> body);

struct Stats {
  uint64_t launches, blocks, threads, switches;
};
Stats& stats();

}  // namespace emulator

// Set by the scheduler before it switches to a fiber.
inline thread_local uint3 threadIdx{}, blockIdx{};
inline thread_local dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;
