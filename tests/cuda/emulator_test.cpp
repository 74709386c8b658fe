// The emulator itself: what its intrinsics give, and in which orders it runs threads and blocks. Its answers to
// mistakes are in faults_test.cpp, its tensor cores in emulator_mma_test.cpp.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <set>

#include "cuda/device.h"
#include "cuda/device_memory.h"
#include "cuda/sample_kernel.h"

namespace kivi::cuda {
namespace {

using emulator::Order;

template <class T>
DeviceArray<T> zeros(size_t count) {
  return DeviceArray<T>(std::vector<T>(count));
}

// ---- warps ---------------------------------------------------------------------------------------

constexpr int kWarpResults = 8;

__global__ void warp_kernel(int* out, int width) {
  int* const own = out + threadIdx.x * kWarpResults;
  const int lane = static_cast<int>(threadIdx.x), value = 100 + lane;
  own[0] = __shfl_sync(kFullWarp, value, 3, width);
  own[1] = __shfl_xor_sync(kFullWarp, value, 5, width);
  own[2] = __shfl_up_sync(kFullWarp, value, 2u, width);
  own[3] = __shfl_down_sync(kFullWarp, value, 2u, width);
  own[4] = static_cast<int>(__ballot_sync(kFullWarp, lane % 3 == 0));
  own[5] = __any_sync(kFullWarp, lane == 9);
  own[6] = __all_sync(kFullWarp, lane < 31);
  own[7] = __shfl_xor_sync(lane < 16 ? 0x0000ffffu : 0xffff0000u, value, 8);  // two groups at once
}

TEST(Emulator, ShufflesAndVotes) {
  for (const int width : {32, 8}) {
    in_every_order([&] {
      const DeviceArray<int> device(32 * kWarpResults);
      check(launch(warp_kernel, "warp", dim3(1), dim3(32), 0, nullptr, device.data(), width));
      const std::vector<int> out = device.get();
      for (int lane = 0; lane < 32; lane++) {
        const int in_segment = lane % width, begin = lane - in_segment;
        const std::vector<int> want = {
            100 + begin + 3,
            100 + (lane ^ 5),
            100 + (in_segment < 2 ? lane : lane - 2),
            100 + (in_segment + 2 >= width ? lane : lane + 2),
            0x49249249,
            1,
            0,
            100 + (lane ^ 8),
        };
        EXPECT_EQ(std::vector<int>(out.begin() + lane * kWarpResults, out.begin() + (lane + 1) * kWarpResults), want);
      }
    });
  }
}

__global__ void wide_shuffle_kernel(int64_t* out) {
  out[threadIdx.x] = __shfl_xor_sync(kFullWarp, (int64_t{1} << 40) + threadIdx.x, 1);
}

TEST(Emulator, ShufflesOfEightBytes) {
  const DeviceArray<int64_t> out(32);
  check(launch(wide_shuffle_kernel, "wide_shuffle", dim3(1), dim3(32), 0, nullptr, out.data()));
  for (int64_t lane = 0; lane < 32; lane++)
    EXPECT_EQ(out.get()[static_cast<size_t>(lane)], (int64_t{1} << 40) + (lane ^ 1));
}

// Allowed: half of a warp meets while the other half waits for all.
__global__ void half_then_full_kernel(int* out) {
  int value = static_cast<int>(threadIdx.x);
  if (threadIdx.x < 16) value += __shfl_xor_sync(0xffffu, value, 1);
  out[threadIdx.x] = __shfl_xor_sync(kFullWarp, value, 16);
}

TEST(Emulator, PartsOfAWarpMayMeet) {
  in_every_order([] {
    const DeviceArray<int> out(32);
    check(launch(half_then_full_kernel, "half_then_full", dim3(1), dim3(32), 0, nullptr, out.data()));
    for (int i = 0; i < 32; i++) {
      EXPECT_EQ(out.get()[static_cast<size_t>(i)], i < 16 ? i + 16 : i - 16 + ((i - 16) ^ 1));
    }
  });
}

// Sums of a block whose last warp has ten lanes: it shuffles from lanes that are not there, and does not use what it
// gets.
__global__ void odd_block_kernel(int* out, int* sum_of_all) {
  const unsigned i = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  const int odd = __syncthreads_count(i % 2 != 0), any = __syncthreads_or(i == 7), all = __syncthreads_and(i != 7);
  int sum = static_cast<int>(i);
  for (unsigned delta = 16; delta > 0; delta /= 2) {
    const int other = __shfl_down_sync(kFullWarp, sum, delta);
    if (i % 32 + delta < 32 && i + delta < threads) sum += other;
  }
  out[i] = odd * 1000 + any * 100 + all * 10;
  if (i % 32 == 0) atomicAdd(sum_of_all, sum);
}

TEST(Emulator, BlocksOfAnyShape) {
  in_every_order([] {
    const WithConfig config;
    config->strict_source = false;  // as on the device: undefined, and here unused
    const DeviceArray<int> out(42), sum = zeros<int>(1);
    check(launch(odd_block_kernel, "odd_block", dim3(1), dim3(7, 3, 2), 0, nullptr, out.data(), sum.data()));
    EXPECT_EQ(out.get(), std::vector<int>(42, 21100));
    EXPECT_EQ(sum.get()[0], 41 * 42 / 2);
  });
}

__global__ void coordinates_kernel(unsigned* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned own = block * blockDim.x * blockDim.y * blockDim.z + thread;
  atomicAdd(&out[own], own + 1);
}

TEST(Emulator, EveryThreadOfEveryBlockRunsOnce) {
  in_every_order([] {
    for (const int workers : {1, 3}) {
      const WithConfig config;
      config->workers = workers;
      const DeviceArray<unsigned> out = zeros<unsigned>(2 * 3 * 4 * 40);
      check(launch(coordinates_kernel, "coordinates", dim3(2, 3, 4), dim3(5, 4, 2), 0, nullptr, out.data()));
      std::vector<unsigned> want(2 * 3 * 4 * 40);
      std::iota(want.begin(), want.end(), 1u);
      EXPECT_EQ(out.get(), want);
    }
  });
}

// ---- atomics -------------------------------------------------------------------------------------

__global__ void histogram_kernel(const int* in, int64_t count, unsigned* bins, float* total, int* most) {
  KIVI_SHARED(unsigned, own, [16]);
  if (threadIdx.x < 16) own[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    atomicAdd(&own[in[i] & 15], 1u);
    atomicAdd(total, static_cast<float>(in[i]));
    atomicMax(most, in[i]);
  }
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], own[threadIdx.x]);
}

TEST(Emulator, AtomicsOfThreadsAndBlocks) {
  std::vector<int> in(500);
  std::vector<unsigned> want(16);
  float sum = 0;
  for (size_t i = 0; i < in.size(); i++) {
    in[i] = static_cast<int>(i * 7 % 160);
    want[i * 7 % 160 % 16]++;
    sum += static_cast<float>(in[i]);
  }
  in_every_order([&] {
    for (const int workers : {1, 2}) {
      const WithConfig config;
      config->workers = workers;
      const DeviceArray<int> device(in), most = zeros<int>(1);
      const DeviceArray<unsigned> bins = zeros<unsigned>(16);
      const DeviceArray<float> total = zeros<float>(1);
      check(launch(histogram_kernel, "histogram", dim3(3), dim3(64), 0, nullptr, device.data(), int64_t{500},
                   bins.data(), total.data(), most.data()));
      EXPECT_EQ(bins.get(), want);
      EXPECT_EQ(total.get()[0], sum);
      EXPECT_EQ(most.get()[0], 159);
    }
  });
}

__global__ void atomics_kernel(unsigned* values) {
  atomicSub(&values[0], 1u);
  atomicMin(&values[1], 7u + threadIdx.x);
  atomicAnd(&values[2], ~(1u << threadIdx.x));
  atomicOr(&values[3], 1u << threadIdx.x);
  atomicXor(&values[4], 3u << threadIdx.x);
  atomicInc(&values[5], 9u);
  if (threadIdx.x == 0) values[7] = atomicExch(&values[6], 5u);
}

TEST(Emulator, EachAtomic) {
  in_every_order([] {
    const DeviceArray<unsigned> values(std::vector<unsigned>{100, 99, ~0u, 0, 0, 0, 42, 0});
    check(launch(atomics_kernel, "atomics", dim3(1), dim3(31), 0, nullptr, values.data()));
    EXPECT_EQ(values.get(), (std::vector<unsigned>{69, 7, 1u << 31, ~0u >> 1, 0x80000001u, 1, 5, 42}));
  });
}

// Polling is allowed among the threads of a block.
__global__ void lock_kernel(int* mutex, int* counter) {
  for (bool done = false; !done;) {
    if (atomicCAS(mutex, 0, 1) != 0) continue;
    __threadfence();
    *counter = *counter + 1;
    __threadfence();
    atomicExch(mutex, 0);
    done = true;
  }
}

TEST(Emulator, ThreadsMayPollForOthersOfTheirBlock) {
  in_every_order([] {
    const DeviceArray<int> mutex = zeros<int>(1), counter = zeros<int>(1);
    check(launch(lock_kernel, "lock", dim3(2), dim3(64), 0, nullptr, mutex.data(), counter.data()));
    EXPECT_EQ(counter.get()[0], 128);
  });
}

__global__ void wait_for_kernel(int* flag, unsigned waiting, unsigned setting) {
  if (threadIdx.x == setting) atomicExch(flag, 1);
  if (threadIdx.x == waiting) {
    while (atomicAdd(flag, 0) == 0) {
    }
  }
}

TEST(Emulator, WhoeverPollsLetsOthersRun) {
  in_every_order([] {
    const WithConfig config;
    config->max_spins = 10000;
    for (const auto& [waiting, setting] : {std::pair<unsigned, unsigned>{0, 63}, {63, 0}, {0, 1}, {1, 0}}) {
      const DeviceArray<int> flag = zeros<int>(1);
      check(launch(wait_for_kernel, "wait_for", dim3(1), dim3(64), 0, nullptr, flag.data(), waiting, setting));
      EXPECT_EQ(flag.get()[0], 1);
    }
  });
}

// ---- shared memory -------------------------------------------------------------------------------

__global__ void reverse_kernel(const int* in, int* out) {
  KIVI_SHARED(int, first, [64]);
  SharedCarver carver;
  int* const second = carver.take<int>(64);
  first[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  second[threadIdx.x] = first[63 - threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = second[threadIdx.x ^ 1];
}

TEST(Emulator, BarriersOrderTheThreadsOfABlock) {
  std::vector<int> in(64), want(64);
  std::iota(in.begin(), in.end(), 0);
  for (int i = 0; i < 64; i++) want[static_cast<size_t>(i)] = 63 - (i ^ 1);
  in_every_order([&] {
    const DeviceArray<int> a(in), b(64);
    check(launch(reverse_kernel, "reverse", dim3(1), dim3(64), 64 * sizeof(int), nullptr, a.data(), b.data()));
    EXPECT_EQ(b.get(), want);
  });
}

// Plain __shared__ works too, without checks of bounds.
__global__ void plain_shared_kernel(int* out) {
  __shared__ int values[64];
  values[threadIdx.x] = static_cast<int>(threadIdx.x + blockIdx.x);
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = values[63 - threadIdx.x];
}

TEST(Emulator, PlainShared) {
  const DeviceArray<int> out(64);
  check(launch(plain_shared_kernel, "plain_shared", dim3(1), dim3(64), 0, nullptr, out.data()));
  for (int i = 0; i < 64; i++) EXPECT_EQ(out.get()[static_cast<size_t>(i)], 63 - i);
}

__global__ void unwritten_kernel(uint32_t* out, bool write) {
  KIVI_SHARED(uint32_t, values, [32]);
  if (write) values[threadIdx.x] = 0;
  out[blockIdx.x * 32 + threadIdx.x] = values[threadIdx.x];
}

TEST(Emulator, EveryBlockBeginsWithPoisonedSharedMemory) {
  const DeviceArray<uint32_t> out(64);
  check(launch(unwritten_kernel, "unwritten", dim3(2), dim3(32), 0, nullptr, out.data(), true));
  check(launch(unwritten_kernel, "unwritten", dim3(2), dim3(32), 0, nullptr, out.data(), false));
  EXPECT_EQ(out.get(), std::vector<uint32_t>(64, 0xFFFFFFFFu));
}

TEST(Emulator, LargeSharedMemoryMustBeAllowed) {
  const auto kernel = reinterpret_cast<const void*>(plain_shared_kernel);
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  const DeviceArray<int> out(64);
  const auto try_launch = [&] {
    check(launch(plain_shared_kernel, "plain_shared", dim3(1), dim3(64), 100000, nullptr, out.data()));
  };
  EXPECT_THROW(try_launch(), emulator::Error);
  check(cudaFuncSetAttribute(kernel, attribute, 100000));
  try_launch();
  EXPECT_EQ(cudaFuncSetAttribute(kernel, attribute, 228 * 1024), cudaErrorInvalidValue);
}

// ---- cp.async ------------------------------------------------------------------------------------

// Reads what two groups of copies brought: before any wait, after the older must be there, after both must be.
__global__ void copies_kernel(const uint32_t* in, uint32_t* out) {
  SharedCarver carver;
  uint32_t* const older = carver.take<uint32_t>(4);
  uint32_t* const newer = carver.take<uint32_t>(4);
  cp_async16(older, in);
  cp_async_commit();
  cp_async8(newer, in + 4, 4);
  cp_async8(newer + 2, in + 6, 0);
  cp_async_commit();
  out[0] = older[0];
  cp_async_wait<1>();
  out[1] = older[3];
  out[2] = newer[0];
  cp_async_wait<0>();
  for (int i = 0; i < 4; i++) out[3 + i] = newer[i];
}

std::vector<uint32_t> copied(Order order, uint64_t seed) {
  const WithConfig config;
  config->order = order;
  config->seed = seed;
  const DeviceArray<uint32_t> in(std::vector<uint32_t>{1, 2, 3, 4, 5, 6, 7, 8}), out(7);
  check(launch(copies_kernel, "copies", dim3(1), dim3(1), 32, nullptr, in.data(), out.data()));
  return out.get();
}

TEST(Emulator, CopiesHappenAtOnceOrInTheWaitThatCoversThem) {
  constexpr uint32_t kPoison = 0xFFFFFFFFu;
  EXPECT_EQ(copied(Order::ascending, 1), (std::vector<uint32_t>{1, 4, 5, 5, 0, 0, 0}));
  EXPECT_EQ(copied(Order::descending, 1), (std::vector<uint32_t>{kPoison, 4, kPoison, 5, 0, 0, 0}));
  std::set<std::vector<uint32_t>> seen;
  for (uint64_t seed = 1; seed <= 40; seed++) seen.insert(copied(Order::random_warps, seed));
  EXPECT_EQ(seen.size(), 4u);  // each of the two groups early or late
}

// ---- orders --------------------------------------------------------------------------------------

__global__ void tickets_kernel(unsigned* next, unsigned* threads, unsigned* blocks) {
  const unsigned ticket = atomicAdd(next, 1u);
  threads[ticket] = threadIdx.x;
  blocks[ticket] = blockIdx.x;
}

struct Tickets {
  std::vector<unsigned> threads, blocks;  // in the order in which they ran
};

Tickets tickets(Order order, uint64_t seed, unsigned blocks) {
  const WithConfig config;
  config->order = order;
  config->seed = seed;
  const DeviceArray<unsigned> next = zeros<unsigned>(1), of_threads(blocks * 128), of_blocks(blocks * 128);
  check(launch(tickets_kernel, "tickets", dim3(blocks), dim3(128), 0, nullptr, next.data(), of_threads.data(),
               of_blocks.data()));
  return {of_threads.get(), of_blocks.get()};
}

TEST(Emulator, FixedOrders) {
  std::vector<unsigned> up(128);
  std::iota(up.begin(), up.end(), 0u);
  EXPECT_EQ(tickets(Order::ascending, 1, 1).threads, up);
  EXPECT_EQ(tickets(Order::descending, 1, 1).threads, std::vector<unsigned>(up.rbegin(), up.rend()));
  EXPECT_EQ(tickets(Order::ascending, 1, 2).blocks.front(), 0u);
  EXPECT_EQ(tickets(Order::descending, 1, 2).blocks.front(), 1u);
}

TEST(Emulator, ASeedIsAnOrder) {
  for (const Order order : {Order::random, Order::random_warps}) {
    const Tickets once = tickets(order, 1, 3), again = tickets(order, 1, 3), other = tickets(order, 2, 3);
    EXPECT_EQ(once.threads, again.threads);
    EXPECT_EQ(once.blocks, again.blocks);
    EXPECT_NE(once.threads, other.threads);
  }
}

int changes_of_warp(const std::vector<unsigned>& threads) {
  int changes = 0;
  for (size_t i = 1; i < threads.size(); i++) changes += threads[i] / 32 != threads[i - 1] / 32;
  return changes;
}

TEST(Emulator, RandomWarpsRunFarAhead) {
  EXPECT_EQ(changes_of_warp(tickets(Order::random_warps, 1, 1).threads), 3);
  EXPECT_GT(changes_of_warp(tickets(Order::random, 1, 1).threads), 30);
}

// Which warp is first, between one barrier and the next.
__global__ void first_warps_kernel(unsigned* next, unsigned* first) {
  for (unsigned phase = 0; phase < 8; phase++) {
    if (atomicAdd(&next[phase], 1u) == 0) first[phase] = threadIdx.x / 32;
    __syncthreads();
  }
}

TEST(Emulator, PrioritiesOfWarpsChangeAtBarriers) {
  const WithConfig config;
  config->order = Order::random_warps;
  const DeviceArray<unsigned> next = zeros<unsigned>(8), first(8);
  check(launch(first_warps_kernel, "first_warps", dim3(1), dim3(256), 0, nullptr, next.data(), first.data()));
  const std::vector<unsigned> warps = first.get();
  EXPECT_GT(std::set<unsigned>(warps.begin(), warps.end()).size(), 2u);
}

TEST(Emulator, OrdersToTryAreThoseOfTheEnvironment) {
  const char* const before = std::getenv("KIVI_CUDA_ORDERS");
  const std::string kept = before != nullptr ? before : "";
  setenv("KIVI_CUDA_ORDERS", "random_warps:2,descending", 1);
  std::vector<std::string> names;
  in_every_order([&] {
    names.push_back(std::to_string(static_cast<int>(emulator::config().order)) + " " +
                    std::to_string(emulator::config().seed));
  });
  EXPECT_EQ(names, (std::vector<std::string>{"3 1", "3 2", "1 1"}));
  for (const char* wrong : {"sideways", "random:0", ","}) {
    setenv("KIVI_CUDA_ORDERS", wrong, 1);
    EXPECT_THROW(emulator::orders_to_try(), emulator::Error);
  }
  unsetenv("KIVI_CUDA_ORDERS");
  EXPECT_EQ(emulator::orders_to_try().size(), emulator::watches_races() ? 1u : 7u);
  if (before != nullptr) setenv("KIVI_CUDA_ORDERS", kept.c_str(), 1);
}

// ---- a whole kernel ------------------------------------------------------------------------------

// Sums are small whole numbers: exact in any order.
std::vector<float> sample_input(int64_t chunks) {
  std::vector<float> in(static_cast<size_t>(chunks * kSampleChunk));
  for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<float>((i * 7 + i / 512) % 5);
  return in;
}

std::vector<float> sample_shares(const std::vector<float>& in, int64_t blocks) {
  std::vector<float> sums(static_cast<size_t>(blocks));
  float all = 0;
  for (size_t i = 0; i < in.size(); i++) {
    sums[i / kSampleChunk % sums.size()] += in[i];
    all += in[i];
  }
  for (float& sum : sums) sum /= all;
  return sums;
}

TEST(Sample, SharesOfBlocks) {
  for (const auto& [blocks, chunks] : {std::pair<int64_t, int64_t>{1, 1}, {3, 8}, {6, 5}}) {
    const std::vector<float> in = sample_input(chunks), want = sample_shares(in, blocks);
    in_every_order([&, blocks = blocks, chunks = chunks] {
      const DeviceArray<float> device(in), sums(want.size()), shares(want.size());
      const DeviceArray<unsigned> next = zeros<unsigned>(1);
      const SampleParams params{device.data(), chunks, sums.data(), next.data(), shares.data()};
      for (int time = 0; time < 2; time++) {  // the second launch finds what the first left
        check(launch(sample_kernel, "sample", dim3(static_cast<unsigned>(blocks)), dim3(kSampleThreads),
                     sample_shared_bytes(), nullptr, params));
        EXPECT_EQ(shares.get(), want);
      }
    });
  }
}

}  // namespace
}  // namespace kivi::cuda
