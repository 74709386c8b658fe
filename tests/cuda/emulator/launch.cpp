// Launches: their limits, the order of blocks, the threads of the system that run them.
#include "emulator/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "emulator/block.h"
#include "emulator/emulator.h"
#include "emulator/sanitizers.h"

namespace emulator {
namespace {

void require_possible(const Launch& launch) {
  const dim3 &block = launch.block, &grid = launch.grid;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads || block.z > 64) {
    fail("kernel %s: bad block size %ux%ux%u", launch.name, block.x, block.y, block.z);
  }
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
  if (empty || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fail("kernel %s: bad grid size %ux%ux%u", launch.name, grid.x, grid.y, grid.z);
  }
  const size_t allowed = allowed_dynamic_shared(launch.kernel);
  if (launch.dynamic_bytes > allowed) {
    fail("kernel %s: %zu bytes of dynamic shared memory, allowed %zu (cudaFuncSetAttribute raises it)", launch.name,
         launch.dynamic_bytes, allowed);
  }
}

std::vector<uint32_t> order_of_blocks(uint64_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  const Config& c = config();
  if (c.order == Order::descending) std::reverse(order.begin(), order.end());
  if (c.order == Order::random || c.order == Order::random_warps) {
    Random random(c.seed);
    for (size_t i = order.size(); i > 1; i--) {
      std::swap(order[i - 1], order[random.below(static_cast<unsigned>(i))]);
    }
  }
  return order;
}

// The blocks of a launch, which workers take one after another.
class Work {
 public:
  Work(const Launch& launch, ThreadBody body, const void* argument, std::vector<uint32_t> order)
      : launch_(launch), body_(body), argument_(argument), order_(std::move(order)) {}

  // Runs blocks until none is left or one has failed.
  void work() {
    const TsanIgnore ignore;  // the fibers are watched, each on its own
    try {
      Block block(launch_, body_, argument_);
      const dim3& grid = launch_.grid;
      for (size_t i = next_++; i < order_.size(); i = next_++) {
        block.run({order_[i] % grid.x, order_[i] / grid.x % grid.y, order_[i] / (grid.x * grid.y)});
      }
      switches_ += block.switches();
    } catch (...) {
      next_ = order_.size();
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  uint64_t switches() const { return switches_; }
  std::exception_ptr error() const { return error_; }

 private:
  const Launch& launch_;
  const ThreadBody body_;
  const void* const argument_;
  const std::vector<uint32_t> order_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> switches_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

Config& config() {
  static Config config;
  return config;
}

Stats& stats() {
  static Stats stats;
  return stats;
}

bool watches_races() {
#if EMULATOR_TSAN
  return true;
#else
  return false;
#endif
}

void fail(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error(text);
}

void run(const Launch& launch, ThreadBody body, const void* argument) {
  require_possible(launch);
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  Work work(launch, body, argument, order_of_blocks(blocks));
  tsan_release(&launch_tag);
  std::vector<std::thread> helpers;
  for (int i = 1; i < config().workers; i++) helpers.emplace_back([&] { work.work(); });
  work.work();
  for (std::thread& helper : helpers) helper.join();
  tsan_acquire(&done_tag);
  stats().launches++;
  stats().blocks += blocks;
  stats().threads += blocks * launch.block.x * launch.block.y * launch.block.z;
  stats().switches += work.switches();
  if (work.error()) std::rethrow_exception(work.error());
}

}  // namespace emulator
