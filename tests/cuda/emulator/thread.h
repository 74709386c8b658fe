// What the emulator knows of one thread of a block.
#pragma once

#include <vector>

#include "emulator/async_copies.h"
#include "emulator/emulator.h"
#include "emulator/fiber.h"

namespace emulator {

// What a thread waits in.
struct Collective {
  const char* what = nullptr;
  uint32_t mask = 0;  // lanes; 0: of the whole block
  Site site{};
  Fence fence = Fence::none;
  void* args = nullptr;
  Combine combine = nullptr;
};

struct Thread {
  enum class State : uint8_t { ready, in_warp, in_block, done };

  Fiber fiber;
  uint3 index{};
  unsigned number = 0;  // in the block
  State state = State::ready;
  Collective waits_in;
  AsyncCopies copies;
  bool fenced = false;         // has executed a fence
  std::vector<void*> atomics;  // touched since the last fence; kept for ThreadSanitizer only
};

}  // namespace emulator
