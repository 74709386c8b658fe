// The texts of errors.
#pragma once

#include <string>
#include <vector>

#include "emulator/thread.h"

namespace emulator {

// "kernel name, block (0,0,0)"
std::string describe(const Launch& launch, uint3 block);
// "thread (0,0,0)"
std::string describe(const Thread& thread);
// "__shfl_sync(mask ffffffff) at file:line"
std::string describe(const Collective& collective);
// What each thread of a block in which none can run waits for.
std::string describe_deadlock(const std::vector<Thread>& threads);

}  // namespace emulator
