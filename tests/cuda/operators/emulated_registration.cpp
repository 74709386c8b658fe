// In the library for the emulator the operators on CUDA are the operators on the CPU.
#include "ops/cuda_library.h"
#include "ops/registration.h"

namespace kivi {
namespace {
const bool kKnowsCaptures = (set_capture_query(&kivi_is_capturing), true);
}  // namespace

bool registers_cuda_operators() { return kKnowsCaptures && registers_operators(); }

}  // namespace kivi
