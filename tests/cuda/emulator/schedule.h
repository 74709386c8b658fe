// Which threads of a block can run, and which of them is next.
#pragma once

#include <cstdint>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/random.h"

namespace emulator {

constexpr unsigned kWarpLanes = 32;
constexpr unsigned kMaxBlockThreads = 1024;
constexpr unsigned kMaxBlockWarps = kMaxBlockThreads / kWarpLanes;

// A set of lanes, or of warps.
inline uint32_t bit(unsigned i) { return uint32_t{1} << i; }
inline uint32_t first_bits(unsigned count) { return count >= 32 ? ~uint32_t{0} : bit(count) - 1; }
inline unsigned lowest(uint32_t set) { return static_cast<unsigned>(__builtin_ctz(set)); }
inline unsigned highest(uint32_t set) { return 31 - static_cast<unsigned>(__builtin_clz(set)); }

class Schedule {
 public:
  Schedule(Order order, unsigned threads);

  // All threads can run.
  void reset(uint64_t seed);
  // The thread waits, or has ended.
  void remove(unsigned thread) {
    const unsigned warp = thread / kWarpLanes;
    ready_[warp] &= ~bit(thread % kWarpLanes);
    if (ready_[warp] == 0) warps_ &= ~bit(warp);
  }
  void add(unsigned thread) { add_lanes(thread / kWarpLanes, bit(thread % kWarpLanes)); }
  void add_lanes(unsigned warp, uint32_t lanes) {
    ready_[warp] |= lanes;
    warps_ |= bit(warp);
  }
  // The thread lets others run: until none of them can in the fixed orders, else if a coin says so. Thus a thread that
  // polls cannot keep the one it waits for from running.
  void put_off(unsigned thread);
  // False if none can run.
  bool pick(unsigned* thread);
  // Warps get other priorities: at every barrier of the block.
  void redraw_priorities();
  bool coin() { return random_.coin(); }

 private:
  void readmit_put_off();
  unsigned random_of(uint32_t set);
  unsigned pick_warp();
  unsigned pick_lane(uint32_t lanes);

  const Order order_;
  const unsigned threads_;
  std::vector<uint32_t> ready_, put_off_;  // lanes of each warp
  uint32_t warps_ = 0;                     // with a lane that is ready
  unsigned priority_[kMaxBlockWarps] = {};
  Random random_{0};
};

}  // namespace emulator
