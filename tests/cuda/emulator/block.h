// Runs one block of a launch: its threads, the collectives they meet in, and what they may not do.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/schedule.h"
#include "emulator/shared_memory.h"
#include "emulator/thread.h"

namespace emulator {

// A worker makes one and runs all its blocks with it, one after another.
class Block {
 public:
  Block(const Launch& launch, ThreadBody body, const void* argument);

  // Throws what went wrong in the block, first ending all its threads.
  void run(uint3 index);
  uint64_t switches() const { return switches_; }

  // ---- called by the block's threads

  void join(Thread& thread, const Collective& collective);
  void yield(Thread& thread);
  void* static_shared(const void* key, size_t bytes, size_t align);
  void* dynamic_shared(unsigned index, size_t offset, size_t bytes, size_t align);
  // Whether a copy by cp.async happens at once: always in ascending order, never in descending, else by a coin.
  bool copies_at_once();
  uint32_t live_lanes(const Thread& thread) const { return warps_[thread.number / kWarpLanes].live; }
  const Launch& launch() const { return launch_; }

 private:
  struct Warp {
    uint32_t lanes, live, waiting;
    unsigned phase;  // counts collectives that order memory
  };
  // Addresses that stand for the collectives of warps and block: ThreadSanitizer takes what threads do before one as
  // done before what they do after it. Two that alternate keep a thread that is already at the next one apart.
  struct Tags {
    char block[2], warp[kMaxBlockWarps][2];
  };

  void prepare(uint3 index);
  void resume(Thread& thread);
  void suspend(Thread& thread);
  void thread_main(Thread& thread);
  void exited(Thread& thread);
  void check_exit(const Thread& thread) const;
  void cancel();

  void join_warp(Thread& thread);
  void join_block(Thread& thread);
  bool complete_warp(unsigned warp, uint32_t mask);
  void complete_block();
  void require_same_collective(const Thread& a, const Thread& b) const;
  void* poisoned(const void* key, unsigned index, size_t bytes, size_t align, bool is_static);
  std::exception_ptr located(const Thread& thread, std::exception_ptr error) const;

  const Launch& launch_;
  const ThreadBody body_;
  const void* const argument_;
  const Config config_;
  const unsigned count_;  // of threads
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Schedule schedule_;
  SharedMemory shared_;
  std::unique_ptr<Tags> tags_;
  uint3 index_{};
  unsigned live_ = 0, arrived_ = 0, phase_ = 0, spins_ = 0;
  bool some_exited_ = false, cancelled_ = false;
  std::exception_ptr error_;
  uint64_t switches_ = 0;
};

// Of the thread of the system that calls; fails outside a kernel.
Block& current_block();
Thread& current_thread();

// Addresses that stand for the beginning and the end of a launch.
extern char launch_tag, done_tag;

}  // namespace emulator
