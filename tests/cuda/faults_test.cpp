// Kernels with one mistake each, and what is said about it. The emulator reports some in every build; others are seen
// only by a sanitizer, through what the emulator tells it of fibers and shared memory, and are tried in its build.
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/device_memory.h"

namespace kivi::cuda {
namespace {

using FloatKernel = void (*)(float*);

struct Shape {
  dim3 grid{1}, block{64};
  size_t shared_bytes = 0;
};

void run(FloatKernel kernel, const Shape& shape) {
  const DeviceArray<float> out(std::vector<float>(64));
  check(launch(kernel, "faulty", shape.grid, shape.block, shape.shared_bytes, nullptr, out.data()));
}

// What the launch throws: in whatever order, and here in ascending order.
std::string error_of(FloatKernel kernel, const Shape& shape = {}) {
  in_every_order([&] { EXPECT_THROW(run(kernel, shape), emulator::Error); });
  try {
    run(kernel, shape);
  } catch (const emulator::Error& error) {
    return error.what();
  }
  return "";
}

// Which contains these parts in this order.
testing::AssertionResult has(const std::string& text, const std::vector<std::string>& parts) {
  size_t from = 0;
  for (const std::string& part : parts) {
    from = text.find(part, from);
    if (from == std::string::npos) return testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
    from += part.size();
  }
  return testing::AssertionSuccess();
}

const std::string kHere = "faults_test.cpp:";

// ---- what the emulator reports: barriers ---------------------------------------------------------

__global__ void exit_before_barrier_kernel(float* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(Faults, ExitBeforeABarrier) {
  EXPECT_TRUE(has(
      error_of(exit_before_barrier_kernel),
      {"kernel faulty, block (0,0,0), thread (40,0,0): exited while thread (0,0,0) waits in __syncthreads at", kHere}));
}

TEST(Faults, ExitBeforeABarrierAsTheDeviceTakesIt) {
  const WithConfig config;
  config->strict_exit = false;
  EXPECT_NO_THROW(run(exit_before_barrier_kernel, {}));
}

__global__ void exit_after_kernel(float* out) {
  if (threadIdx.x < 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(Faults, BarrierAfterAnExit) {
  EXPECT_TRUE(has(error_of(exit_after_kernel),
                  {"thread (40,0,0): waits for threads that have exited in __syncthreads at", kHere}));
}

__global__ void barrier_in_branches_kernel(float* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

TEST(Faults, OneBarrierFromTwoLines) {
  EXPECT_TRUE(has(error_of(barrier_in_branches_kernel), {"diverged: thread (0,0,0) waits in __syncthreads at", kHere,
                                                         "while thread (40,0,0) waits in __syncthreads at", kHere}));
}

__global__ void barrier_in_loop_kernel(float* out) {
  for (unsigned i = 0; i < 2 + threadIdx.x / 40; i++) __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(Faults, BarriersOfDifferentNumber) {
  EXPECT_TRUE(has(error_of(barrier_in_loop_kernel), {"__syncthreads at", kHere}));
}

TEST(Faults, OneBarrierFromTwoLinesAsTheDeviceTakesIt) {
  const WithConfig config;
  config->strict_site = false;
  EXPECT_NO_THROW(run(barrier_in_branches_kernel, {}));
}

__global__ void different_barriers_kernel(float* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    out[threadIdx.x] = static_cast<float>(__syncthreads_count(1));
  }
}

TEST(Faults, DifferentBarriersMeet) {
  const WithConfig config;
  config->strict_site = false;
  EXPECT_TRUE(has(error_of(different_barriers_kernel), {"diverged: ", "__syncthreads at", "__syncthreads_count at"}));
}

// ---- warps ---------------------------------------------------------------------------------------

__global__ void shuffle_against_barrier_kernel(float* out) {
  float value = 1;
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(kFullWarp, value, 1);
  __syncthreads();
  out[threadIdx.x] = value;
}

TEST(Faults, DeadlockListsWhatEveryThreadWaitsFor) {
  EXPECT_TRUE(has(
      error_of(shuffle_against_barrier_kernel),
      {"kernel faulty, block (0,0,0): deadlock", "\n  32 threads waiting in __shfl_xor_sync(mask ffffffff) at", kHere,
       ": threads 0-15,32-47", "\n  32 threads waiting in __syncthreads at", kHere, ": threads 16-31,48-63"}));
}

__global__ void shuffle_from_exited_kernel(float* out) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_sync(kFullWarp, 1.0f, 5);
}

TEST(Faults, ShuffleFromALaneThatExited) {
  EXPECT_TRUE(
      has(error_of(shuffle_from_exited_kernel), {"exited while thread (0,0,0) waits in __shfl_sync(mask ffffffff)"}));
}

__global__ void shuffle_outside_mask_kernel(float* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0); }

TEST(Faults, LaneOutsideItsMask) {
  EXPECT_TRUE(has(error_of(shuffle_outside_mask_kernel),
                  {"thread (16,0,0): not in the mask of __shfl_sync(mask 0000ffff) at", kHere}));
}

__global__ void empty_mask_kernel(float* out) { out[threadIdx.x] = static_cast<float>(__any_sync(0, 1)); }

TEST(Faults, EmptyMask) { EXPECT_TRUE(has(error_of(empty_mask_kernel), {"__any_sync with an empty mask at", kHere})); }

__global__ void shuffle_masks_differ_kernel(float* out) {
  out[threadIdx.x] = __shfl_xor_sync(threadIdx.x % 32 < 16 ? kFullWarp : 0xffff0000u, 1.0f, 1);
}

TEST(Faults, MasksDiffer) { EXPECT_TRUE(has(error_of(shuffle_masks_differ_kernel), {"__shfl_xor_sync(mask ffff"})); }

__global__ void shuffle_in_branches_kernel(float* out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = __shfl_xor_sync(kFullWarp, 1.0f, 1);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(kFullWarp, 1.0f, 1);
  }
}

TEST(Faults, OneShuffleFromTwoLines) {
  EXPECT_TRUE(has(error_of(shuffle_in_branches_kernel),
                  {"diverged: thread (0,0,0) waits in __shfl_xor_sync(mask ffffffff) at", kHere,
                   "while thread (16,0,0) waits in __shfl_xor_sync(mask ffffffff) at", kHere}));
}

__global__ void shuffle_source_kernel(float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}

TEST(Faults, ShuffleFromALaneThatTakesNoPart) {
  EXPECT_TRUE(has(error_of(shuffle_source_kernel), {"shuffle: lane 0 reads lane 20, which does not take part"}));
}

__global__ void mma_half_warp_kernel(float* out) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x % 32 < 16) mma_m16n8k16<__half>(d, a, b, d);
  out[threadIdx.x] = d[0];
}

TEST(Faults, MmaWithoutSomeLanes) {
  EXPECT_TRUE(has(error_of(mma_half_warp_kernel), {"waits in mma.m16n8k16(mask ffffffff) at", kHere}));
}

// ---- addresses -----------------------------------------------------------------------------------

__global__ void ldmatrix_misaligned_kernel(float* out) {
  SharedCarver carver;
  auto* const rows = carver.take<uint16_t>(64 * 8);
  rows[threadIdx.x] = 0;
  __syncwarp();
  uint32_t result[4];
  ldmatrix_x4(result, rows + 4);
  out[threadIdx.x] = static_cast<float>(result[0]);
}

TEST(Faults, MisalignedLdmatrix) {
  EXPECT_TRUE(has(error_of(ldmatrix_misaligned_kernel, {dim3(1), dim3(32), 1024}),
                  {"ldmatrix: the row address of lane", "is not aligned to 16 bytes"}));
}

__global__ void copy_misaligned_kernel(float* out) {
  KIVI_SHARED(float, values, [8]);
  cp_async16(values, out + 1);
  cp_async_commit();
  cp_async_wait<0>();
}

__global__ void copy_to_misaligned_kernel(float* out) {
  KIVI_SHARED(float, values, [8]);
  cp_async8(values + 1, out);
  cp_async_commit();
  cp_async_wait<0>();
}

TEST(Faults, MisalignedCopy) {
  EXPECT_TRUE(has(error_of(copy_misaligned_kernel), {"cp.async: an address is not aligned to 16 bytes"}));
  EXPECT_TRUE(has(error_of(copy_to_misaligned_kernel), {"cp.async: an address is not aligned to 8 bytes"}));
}

// ---- shared memory -------------------------------------------------------------------------------

__global__ void carve_too_much_kernel(float* out) {
  SharedCarver carver;
  carver.take<float>(3);
  float* const values = carver.take<float>(64);
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(Faults, MoreDynamicSharedMemoryThanLaunchedWith) {
  EXPECT_TRUE(has(error_of(carve_too_much_kernel, {dim3(1), dim3(64), 271}),
                  {"dynamic shared memory: the kernel takes 272 bytes, the launch gives 271"}));
  EXPECT_NO_THROW(run(carve_too_much_kernel, {dim3(1), dim3(64), 272}));
}

__global__ void carve_differently_kernel(float* out) {
  SharedCarver carver;
  carver.take<float>(1 + threadIdx.x)[0] = 1;
  out[threadIdx.x] = 1;
}

TEST(Faults, ThreadsCarveDifferently) {
  EXPECT_TRUE(has(error_of(carve_differently_kernel, {dim3(1), dim3(64), 256}),
                  {"thread (1,0,0): shared memory: piece 1 is taken with 8 bytes, another thread took it with 4"}));
}

__global__ void static_too_large_kernel(float* out) {
  KIVI_SHARED(float, first, [6 * 1024]);
  KIVI_SHARED(float, second, [6 * 1024 + 1]);
  first[threadIdx.x] = second[threadIdx.x] = 1;
  out[threadIdx.x] = first[threadIdx.x];
}

TEST(Faults, StaticSharedMemoryOver48KiB) {
  EXPECT_TRUE(has(error_of(static_too_large_kernel), {"49156 bytes of static shared memory, allowed 49152"}));
}

// ---- launches ------------------------------------------------------------------------------------

__global__ void right_kernel(float* out) { out[threadIdx.x] = __shfl_xor_sync(kFullWarp, 1.0f, 1); }

TEST(Faults, LaunchesThatADeviceRefuses) {
  EXPECT_TRUE(has(error_of(right_kernel, {dim3(1), dim3(2048), 0}), {"kernel faulty: bad block size 2048x1x1"}));
  EXPECT_TRUE(has(error_of(right_kernel, {dim3(1), dim3(1, 1, 65), 0}), {"bad block size 1x1x65"}));
  EXPECT_TRUE(has(error_of(right_kernel, {dim3(1), dim3(0), 0}), {"bad block size 0x1x1"}));
  EXPECT_TRUE(has(error_of(right_kernel, {dim3(1, 70000), dim3(64), 0}), {"bad grid size 1x70000x1"}));
  EXPECT_TRUE(has(error_of(right_kernel, {dim3(1, 1, 0), dim3(64), 0}), {"bad grid size 1x1x0"}));
  EXPECT_TRUE(
      has(error_of(right_kernel, {dim3(1), dim3(64), 50000}), {"50000 bytes of dynamic shared memory, allowed 49152"}));
  EXPECT_NO_THROW(run(right_kernel, {}));
}

TEST(Faults, IntrinsicOutsideOfAKernel) { EXPECT_THROW(__syncthreads(), emulator::Error); }

__global__ void wait_for_later_block_kernel(float* out) {
  auto* const flag = reinterpret_cast<unsigned*>(out);
  if (blockIdx.x == 0) {
    while (atomicAdd(flag, 0u) == 0) {
    }
  } else {
    atomicExch(flag, 1u);
  }
}

TEST(Faults, WaitingForALaterBlock) {
  const WithConfig config;
  config->max_spins = 1000;
  try {
    run(wait_for_later_block_kernel, {dim3(2), dim3(32), 0});
    FAIL() << "no error";
  } catch (const emulator::Error& error) {
    EXPECT_TRUE(has(error.what(), {"block (0,0,0), thread (", "no progress in 1000 scheduling points"}));
  }
}

// ---- the kernel's own checks ---------------------------------------------------------------------

__global__ void checked_kernel(float* out) {
  device_check(blockIdx.x < 2, "no page for the tokens");
  if (blockIdx.x == 0) out[threadIdx.x] = 1;
}

TEST(Faults, DeviceCheck) {
  EXPECT_NO_THROW(run(checked_kernel, {dim3(2), dim3(64), 0}));
  EXPECT_EQ(error_of(checked_kernel, {dim3(3), dim3(64), 0}),
            "kernel faulty, block (2,0,0), thread (0,0,0): no page for the tokens");
}

std::atomic<int> alive{0};
struct Counted {
  Counted() { alive++; }
  ~Counted() { alive--; }
};
__global__ void holds_something_kernel(float* out) {
  const Counted counted;
  __syncthreads();
  device_check(threadIdx.x != 5, "five");
  __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(Faults, ThreadsOfAFailedBlockAreUnwound) {
  EXPECT_TRUE(has(error_of(holds_something_kernel), {"thread (5,0,0): five"}));
  EXPECT_EQ(alive, 0);
}

// A failed launch ends every thread of the block, and the next one finds nothing of it.
TEST(Faults, TheNextLaunchIsAsGoodAsNew) {
  for (int time = 0; time < 3; time++) {
    EXPECT_THROW(run(shuffle_against_barrier_kernel, {}), emulator::Error);
    EXPECT_NO_THROW(run(right_kernel, {}));
  }
}

#if !defined(KIVI_SANITIZES_THREAD)

__global__ void deep_stack_kernel(float* out) {
  volatile float large[1 << 18];
  for (int i = 0; i < 1 << 18; i++) large[i] = 1;
  out[threadIdx.x] = large[threadIdx.x];
}

TEST(FaultsDeathTest, StackThatIsTooDeep) {
#if defined(KIVI_SANITIZES_ADDRESS)
  EXPECT_DEATH(run(deep_stack_kernel, {}), "stack-overflow");
#else
  EXPECT_DEATH(run(deep_stack_kernel, {}), "");
#endif
}

#endif

// ---- AddressSanitizer ----------------------------------------------------------------------------

#if defined(KIVI_SANITIZES_ADDRESS)

__global__ void past_static_kernel(float* out) {
  KIVI_SHARED(float, values, [64]);
  float* const p = values;
  p[threadIdx.x + 1] = 1;
  out[threadIdx.x] = p[threadIdx.x];
}

__global__ void past_piece_kernel(float* out) {  // into the next one
  SharedCarver carver;
  float* const first = carver.take<float>(64);
  float* const second = carver.take<float>(64);
  second[threadIdx.x] = 1;
  first[threadIdx.x + 1] = 1;
  out[threadIdx.x] = first[threadIdx.x];
}

__global__ void past_global_kernel(float* out) { out[threadIdx.x + 1] = 1; }
__global__ void read_past_global_kernel(float* out) { out[threadIdx.x] = out[threadIdx.x + 1]; }

__global__ void copy_past_shared_kernel(float* out) {
  KIVI_SHARED(float, values, [62]);
  if (threadIdx.x == 15) cp_async16(values + 60, out);
  cp_async_commit();
  cp_async_wait<0>();
}

float* kept = nullptr;
__global__ void stale_shared_kernel(float* out) {
  KIVI_SHARED(float, values, [64]);
  values[threadIdx.x] = 1;
  if (kept != nullptr) out[threadIdx.x] = kept[threadIdx.x];
  __syncthreads();
  kept = values;
}

TEST(FaultsDeathTest, AddressSanitizer) {
  const std::string overflow = "heap-buffer-overflow";
  EXPECT_DEATH(run(past_static_kernel, {}), overflow);
  EXPECT_DEATH(run(past_piece_kernel, {dim3(1), dim3(64), 512}), overflow);
  EXPECT_DEATH(run(past_global_kernel, {}), overflow);
  EXPECT_DEATH(run(read_past_global_kernel, {}), overflow);
  EXPECT_DEATH(run(copy_past_shared_kernel, {}), overflow);
  EXPECT_DEATH(run(stale_shared_kernel, {dim3(2), dim3(64), 0}), "heap-use-after-free");
}

#endif

// ---- UndefinedBehaviorSanitizer ------------------------------------------------------------------

#if defined(KIVI_SANITIZES_UNDEFINED)

__global__ void misaligned_vector_kernel(float* out) {
  const auto* const four = reinterpret_cast<const float4*>(out + 1 + threadIdx.x);
  out[threadIdx.x] = four->x;
}
__global__ void wide_shift_kernel(float* out) { out[threadIdx.x] = static_cast<float>(1u << (threadIdx.x + 1)); }

TEST(FaultsDeathTest, UndefinedBehaviorSanitizer) {
  EXPECT_DEATH(run(misaligned_vector_kernel, {dim3(1), dim3(1), 0}), "misaligned address");
  EXPECT_DEATH(run(wide_shift_kernel, {dim3(1), dim3(32), 0}), "shift exponent 32");
}

#endif

// ---- ThreadSanitizer -----------------------------------------------------------------------------

#if defined(KIVI_SANITIZES_THREAD)

__global__ void no_barrier_kernel(float* out) {  // right where thread 0 runs first
  KIVI_SHARED(float, value);
  if (threadIdx.x == 0) value = 1;
  out[threadIdx.x] = value;
}
__global__ void no_syncwarp_kernel(float* out) {  // a shuffle meets, but orders no memory
  KIVI_SHARED(float, values, [64]);
  values[threadIdx.x] = 1;
  __shfl_sync(kFullWarp, 0, 0);
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}
__global__ void lost_update_kernel(float* out) {
  KIVI_SHARED(float, sum);
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  sum += 1;
  __syncthreads();
  out[threadIdx.x] = sum;
}
template <unsigned apart>
__global__ void blocks_race_kernel(float* out) {
  if (threadIdx.x == 7 && blockIdx.x % apart == 0) out[0] += 1;
}
__global__ void late_copy_kernel(float* out) {  // copies into what others still read
  KIVI_SHARED(float, values, [64]);
  values[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = values[63 - threadIdx.x];
  if (threadIdx.x % 4 == 0) cp_async16(values + threadIdx.x, out);
  cp_async_commit();
  cp_async_wait<0>();
}

template <bool before, bool after>
__global__ void last_block_kernel(float* out) {
  auto* const tickets = reinterpret_cast<unsigned*>(out + 32);
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 1;
  if (before) __threadfence();
  const bool last = atomicAdd(tickets, 1u) == gridDim.x - 1;
  if (after) __threadfence();
  if (last) out[10] = out[0] + out[1] + out[2];
}

TEST(FaultsDeathTest, ThreadSanitizer) {
  const std::string race = "data race";
  EXPECT_DEATH(run(no_barrier_kernel, {}), "data race(.|\n)*block .0,0,0. thread .(1|0),0,0.");
  EXPECT_DEATH(run(no_syncwarp_kernel, {}), race);
  EXPECT_DEATH(run(lost_update_kernel, {}), race);
  EXPECT_DEATH(run(late_copy_kernel, {}), race);
  EXPECT_DEATH(run(blocks_race_kernel<1>, {dim3(2), dim3(64), 0}), race);
  EXPECT_DEATH(run(blocks_race_kernel<3>, {dim3(4), dim3(64), 0}), race);  // not between neighbours
}

TEST(FaultsDeathTest, ThreadSanitizerAndFences) {
  const Shape shape{dim3(3), dim3(32), 0};
  EXPECT_DEATH(run(last_block_kernel<false, true>, shape), "data race");
  EXPECT_DEATH(run(last_block_kernel<true, false>, shape), "data race");
  EXPECT_NO_THROW(run(last_block_kernel<true, true>, shape));
}

#endif

}  // namespace
}  // namespace kivi::cuda
