#include "emulator/block.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "emulator/report.h"
#include "emulator/sanitizers.h"

namespace emulator {
namespace {

thread_local Block* running_block = nullptr;
thread_local Thread* running_thread = nullptr;

#if EMULATOR_ASAN
constexpr size_t kStackBytes = 256 * 1024;  // its frames have room between variables
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

std::unique_ptr<Stack>* take_stacks(unsigned count, size_t bytes) {
  static thread_local StackPool pool;
  return pool.take(count, bytes != 0 ? bytes : kStackBytes);
}

// At most 63 characters of it are shown.
std::string name_for_races(uint3 block, const Thread& thread) {
  char text[64];
  snprintf(text, sizeof text, "block (%u,%u,%u) ", block.x, block.y, block.z);
  return text + describe(thread);
}

bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

struct Cancelled {};  // unwinds the fibers of a block that failed

}  // namespace

char launch_tag, done_tag;

Block& current_block() {
  if (running_block == nullptr) fail("device intrinsic called outside a kernel");
  return *running_block;
}
Thread& current_thread() {
  current_block();
  return *running_thread;
}

Block::Block(const Launch& launch, ThreadBody body, const void* argument)
    : launch_(launch),
      body_(body),
      argument_(argument),
      config_(config()),
      count_(launch.block.x * launch.block.y * launch.block.z),
      threads_(count_),
      warps_((count_ + kWarpLanes - 1) / kWarpLanes),
      schedule_(config_.order, count_) {}

// ---- the life of a block -------------------------------------------------------------------------

void Block::run(uint3 index) {
  prepare(index);
  running_block = this;
  blockIdx = index;
  blockDim = launch_.block;
  gridDim = launch_.grid;
  unsigned next = 0;
  while (!error_ && schedule_.pick(&next)) resume(threads_[next]);
  if (!error_ && live_ > 0) {
    error_ = std::make_exception_ptr(Error(describe(launch_, index_) + ": " + describe_deadlock(threads_)));
  }
  if (error_) cancel();
  running_block = nullptr;
  shared_.clear();
  if (error_) std::rethrow_exception(error_);
}

void Block::prepare(uint3 index) {
  index_ = index;
  const uint64_t number = (static_cast<uint64_t>(index.z) * launch_.grid.y + index.y) * launch_.grid.x + index.x;
  schedule_.reset(config_.seed * 0x100000001b3u + number);
  live_ = count_;
  arrived_ = phase_ = spins_ = 0;
  some_exited_ = cancelled_ = false;
  error_ = nullptr;
  tags_ = std::make_unique<Tags>();
  for (unsigned warp = 0; warp < warps_.size(); warp++) {
    const uint32_t lanes = first_bits(count_ - kWarpLanes * warp);
    warps_[warp] = {lanes, lanes, 0, 0};
  }
  std::unique_ptr<Stack>* const stacks = take_stacks(count_, config_.stack_bytes);
  const dim3& size = launch_.block;
  for (unsigned i = 0; i < count_; i++) {
    Thread& thread = threads_[i];
    thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    thread.number = i;
    thread.state = Thread::State::ready;
    thread.copies.clear();
    thread.fenced = false;
    thread.atomics.clear();
    const std::string name = watches_races() ? name_for_races(index_, thread) : "";
    const auto main = [](void* self) { running_block->thread_main(*static_cast<Thread*>(self)); };
    thread.fiber.start(*stacks[i], main, &thread, name.c_str());
  }
}

void Block::resume(Thread& thread) {
  running_thread = &thread;
  threadIdx = thread.index;
  switches_++;
  thread.fiber.resume();
}

void Block::suspend(Thread& thread) {
  thread.fiber.suspend();
  if (cancelled_) throw Cancelled{};
}

void Block::thread_main(Thread& thread) {
  tsan_acquire(&launch_tag);
  try {
    if (cancelled_) throw Cancelled{};
    body_(argument_);
    exited(thread);
  } catch (const Cancelled&) {
    thread.state = Thread::State::done;
  } catch (...) {
    thread.state = Thread::State::done;
    if (!error_) error_ = located(thread, std::current_exception());
  }
  tsan_release(&done_tag);
}

void Block::exited(Thread& thread) {
  thread.copies.wait_for_all();
  thread.state = Thread::State::done;
  const unsigned number = thread.number / kWarpLanes;
  Warp& warp = warps_[number];
  warp.live &= ~bit(thread.number % kWarpLanes);
  schedule_.remove(thread.number);
  live_--;
  spins_ = 0;
  some_exited_ = true;
  if (config_.strict_exit && (arrived_ > 0 || warp.waiting != 0)) check_exit(thread);
  // Collectives that only this thread was missing from.
  for (uint32_t left = warp.waiting; left != 0; left &= left - 1) {
    const Thread& waiting = threads_[kWarpLanes * number + lowest(left)];
    if (complete_warp(number, waiting.waits_in.mask)) break;
  }
  if (live_ > 0 && arrived_ == live_) complete_block();
}

// Fails if another thread waits for this one, which has exited.
void Block::check_exit(const Thread& thread) const {
  const auto waits = [&](const Thread& other) {
    if (other.state == Thread::State::in_block) return true;
    return other.state == Thread::State::in_warp && other.number / kWarpLanes == thread.number / kWarpLanes &&
           (other.waits_in.mask & bit(thread.number % kWarpLanes)) != 0;
  };
  const auto waiting = std::find_if(threads_.begin(), threads_.end(), waits);
  if (waiting == threads_.end()) return;
  fail("exited while %s waits in %s", describe(*waiting).c_str(), describe(waiting->waits_in).c_str());
}

// Ends all threads by an exception, so that what they hold is freed.
void Block::cancel() {
  cancelled_ = true;
  for (Thread& thread : threads_) {
    if (thread.state != Thread::State::done) resume(thread);
  }
}

// ---- collectives ---------------------------------------------------------------------------------

void Block::join(Thread& thread, const Collective& collective) {
  const uint32_t mask = collective.mask;
  if (mask != 0 && (mask & bit(thread.number % kWarpLanes)) == 0) {
    fail("not in the mask of %s", describe(collective).c_str());
  }
  const Warp& warp = warps_[thread.number / kWarpLanes];
  const bool some_are_gone = mask != 0 ? (mask & warp.lanes & ~warp.live) != 0 : some_exited_;
  if (some_are_gone && config_.strict_exit) {
    fail("waits for threads that have exited in %s", describe(collective).c_str());
  }
  thread.waits_in = collective;
  if (mask != 0) {
    join_warp(thread);
  } else {
    join_block(thread);
  }
}

void Block::join_warp(Thread& thread) {
  const unsigned number = thread.number / kWarpLanes;
  Warp& warp = warps_[number];
  const bool orders_memory = thread.waits_in.fence == Fence::memory;
  void* const tag = &tags_->warp[number][warp.phase % 2];
  if (orders_memory) tsan_release(tag);
  thread.state = Thread::State::in_warp;
  schedule_.remove(thread.number);
  warp.waiting |= bit(thread.number % kWarpLanes);
  const bool complete = complete_warp(number, thread.waits_in.mask);
  if (!complete || config_.order != Order::ascending) suspend(thread);
  if (orders_memory) tsan_acquire(tag);
}

void Block::join_block(Thread& thread) {
  void* const tag = &tags_->block[phase_ % 2];
  tsan_release(tag);
  thread.state = Thread::State::in_block;
  schedule_.remove(thread.number);
  arrived_++;
  const bool complete = arrived_ == live_;
  if (complete) complete_block();
  if (!complete || config_.order != Order::ascending) suspend(thread);
  tsan_acquire(tag);
}

// False if some lane of the mask is not there yet.
bool Block::complete_warp(unsigned number, uint32_t mask) {
  Warp& warp = warps_[number];
  const uint32_t members = mask & warp.live;
  if ((warp.waiting & members) != members) return false;
  const Thread& first = threads_[kWarpLanes * number + lowest(members)];
  void* args[kWarpLanes] = {};
  for (uint32_t left = members; left != 0; left &= left - 1) {
    const Thread& member = threads_[kWarpLanes * number + lowest(left)];
    require_same_collective(first, member);
    args[lowest(left)] = member.waits_in.args;
  }
  if (first.waits_in.combine != nullptr) {
    const TsanIgnore ignore;
    first.waits_in.combine(args, kWarpLanes);
  }
  if (first.waits_in.fence == Fence::memory) warp.phase++;
  for (uint32_t left = members; left != 0; left &= left - 1) {
    threads_[kWarpLanes * number + lowest(left)].state = Thread::State::ready;
  }
  schedule_.add_lanes(number, members);
  warp.waiting &= ~members;
  spins_ = 0;
  return true;
}

void Block::complete_block() {
  std::vector<void*> args(count_);
  const Thread* first = nullptr;
  for (const Thread& thread : threads_) {
    if (thread.state != Thread::State::in_block) continue;
    if (first == nullptr) first = &thread;
    require_same_collective(*first, thread);
    args[thread.number] = thread.waits_in.args;
  }
  if (first->waits_in.combine != nullptr) {
    const TsanIgnore ignore;
    first->waits_in.combine(args.data(), count_);
  }
  for (Thread& thread : threads_) {
    if (thread.state != Thread::State::in_block) continue;
    thread.state = Thread::State::ready;
    schedule_.add(thread.number);
  }
  arrived_ = spins_ = 0;
  phase_++;
  schedule_.redraw_priorities();
}

void Block::require_same_collective(const Thread& a, const Thread& b) const {
  const Collective &one = a.waits_in, &other = b.waits_in;
  const bool same_site = one.site.line == other.site.line && same_text(one.site.file, other.site.file);
  if (same_text(one.what, other.what) && one.mask == other.mask && (same_site || !config_.strict_site)) return;
  fail("diverged: %s waits in %s while %s waits in %s", describe(a).c_str(), describe(one).c_str(), describe(b).c_str(),
       describe(other).c_str());
}

// ---- the rest ------------------------------------------------------------------------------------

void Block::yield(Thread& thread) {
  if (++spins_ > config_.max_spins) {
    fail(
        "no progress in %u scheduling points: this thread and all others only poll (blocks run one after another: none "
        "may wait for another)",
        config_.max_spins);
  }
  schedule_.put_off(thread.number);
  suspend(thread);
}

void* Block::poisoned(const void* key, unsigned index, size_t bytes, size_t align, bool is_static) {
  return shared_.get(key, index, bytes, align, is_static, config_.poison_shared);
}

void* Block::static_shared(const void* key, size_t bytes, size_t align) { return poisoned(key, 0, bytes, align, true); }

void* Block::dynamic_shared(unsigned index, size_t offset, size_t bytes, size_t align) {
  if (offset + bytes > launch_.dynamic_bytes) {
    fail("dynamic shared memory: the kernel takes %zu bytes, the launch gives %zu", offset + bytes,
         launch_.dynamic_bytes);
  }
  return poisoned(&launch_, index, bytes, align, false);
}

bool Block::copies_at_once() {
  return config_.order == Order::ascending || (config_.order != Order::descending && schedule_.coin());
}

// An error of the emulator gets to know where it happened.
std::exception_ptr Block::located(const Thread& thread, std::exception_ptr error) const {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return std::make_exception_ptr(Error(describe(launch_, index_) + ", " + describe(thread) + ": " + e.what()));
  } catch (...) {
    return error;
  }
}

}  // namespace emulator
