// What intrinsics call: the functions of emulator.h for the thread that runs.
#include <cstdint>

#include "emulator/block.h"
#include "emulator/emulator.h"
#include "emulator/sanitizers.h"

namespace emulator {

void warp_collective(const char* what, uint32_t mask, Site site, Fence fence, void* args, Combine combine) {
  if (mask == 0) fail("%s with an empty mask at %s:%d", what, site.file, site.line);
  current_block().join(current_thread(), {what, mask, site, fence, args, combine});
}

void block_collective(const char* what, Site site, void* args, Combine combine) {
  current_block().join(current_thread(), {what, 0, site, Fence::memory, args, combine});
}

void yield() { current_block().yield(current_thread()); }

void memory_fence() {
  Thread& thread = current_thread();
  for (void* address : thread.atomics) tsan_acquire(address);
  thread.atomics.clear();
  thread.fenced = true;
  yield();
}

void before_atomic(void* address) {
  if (current_thread().fenced) tsan_release(address);
}

void after_atomic(void* address) {
  // Once more, so that the atomic itself is ordered too: whoever saw its value may write there without one.
  if (current_thread().fenced) tsan_release(address);
  if (watches_races()) {
    const TsanIgnore ignore;
    current_thread().atomics.push_back(address);
  }
  yield();
}

unsigned lane_id() { return current_thread().number % kWarpLanes; }
uint32_t live_lanes() { return current_block().live_lanes(current_thread()); }

void* static_shared(const void* key, size_t bytes, size_t align) {
  return current_block().static_shared(key, bytes, align);
}
void* dynamic_shared() {
  constexpr size_t kAlign = 128;
  return current_block().dynamic_shared(0, 0, current_block().launch().dynamic_bytes, kAlign);
}
void* carve_shared(unsigned index, size_t offset, size_t bytes, size_t align) {
  return current_block().dynamic_shared(1 + index, offset, bytes, align);
}

void async_copy(void* shared, const void* global, size_t bytes, size_t valid_bytes) {
  const auto misaligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; };
  if (misaligned(shared) || misaligned(global)) fail("cp.async: an address is not aligned to %zu bytes", bytes);
  const AsyncCopy copy{shared, global, bytes, valid_bytes};
  if (current_block().copies_at_once()) {
    perform(copy);
  } else {
    current_thread().copies.add(copy);
  }
}
void async_commit() { current_thread().copies.commit(); }
void async_wait(unsigned groups_left) { current_thread().copies.wait(groups_left); }

}  // namespace emulator
