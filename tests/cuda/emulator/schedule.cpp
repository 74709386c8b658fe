#include "emulator/schedule.h"

#include <algorithm>
#include <numeric>

namespace emulator {

Schedule::Schedule(Order order, unsigned threads)
    : order_(order), threads_(threads), ready_((threads + kWarpLanes - 1) / kWarpLanes), put_off_(ready_.size()) {}

void Schedule::reset(uint64_t seed) {
  random_ = Random(seed);
  for (unsigned warp = 0; warp < ready_.size(); warp++) {
    ready_[warp] = first_bits(threads_ - kWarpLanes * warp);
    put_off_[warp] = 0;
  }
  warps_ = first_bits(static_cast<unsigned>(ready_.size()));
  redraw_priorities();
}

void Schedule::put_off(unsigned thread) {
  const bool fixed = order_ == Order::ascending || order_ == Order::descending;
  if (!fixed && !coin()) return;
  remove(thread);
  put_off_[thread / kWarpLanes] |= bit(thread % kWarpLanes);
}

void Schedule::readmit_put_off() {
  for (unsigned warp = 0; warp < put_off_.size(); warp++) {
    if (put_off_[warp] == 0) continue;
    add_lanes(warp, put_off_[warp]);
    put_off_[warp] = 0;
  }
}

bool Schedule::pick(unsigned* thread) {
  if (warps_ == 0) readmit_put_off();
  if (warps_ == 0) return false;
  const unsigned warp = pick_warp();
  *thread = kWarpLanes * warp + pick_lane(ready_[warp]);
  return true;
}

void Schedule::redraw_priorities() {
  if (order_ != Order::random_warps) return;
  std::iota(priority_, priority_ + kMaxBlockWarps, 0u);
  for (unsigned i = kMaxBlockWarps; i > 1; i--) std::swap(priority_[i - 1], priority_[random_.below(i)]);
}

unsigned Schedule::random_of(uint32_t set) {
  unsigned skip = random_.below(static_cast<unsigned>(__builtin_popcount(set)));
  for (; skip > 0; skip--) set &= set - 1;
  return lowest(set);
}

unsigned Schedule::pick_warp() {
  switch (order_) {
    case Order::ascending:
      return lowest(warps_);
    case Order::descending:
      return highest(warps_);
    case Order::random:
      return random_of(warps_);
    case Order::random_warps:
      break;
  }
  return *std::find_if(priority_, priority_ + kMaxBlockWarps, [&](unsigned warp) { return (warps_ & bit(warp)) != 0; });
}

unsigned Schedule::pick_lane(uint32_t lanes) {
  switch (order_) {
    case Order::ascending:
      return lowest(lanes);
    case Order::descending:
      return highest(lanes);
    default:
      return random_of(lanes);
  }
}

}  // namespace emulator
