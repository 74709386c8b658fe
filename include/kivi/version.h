// The version of the library, of the torch that it was built for, and the instruction set that it runs on.
#pragma once

#include <string>

#include "kivi/export.h"

namespace kivi {

// "0.1.0 (torch 2.11.0)"
KIVI_API std::string version();
// "scalar", "neon", "avx2", "avx512" or "avx512_vnni": the kernels in use on this CPU. The environment variable
// KIVI_CPU_CAPABILITY asks for a lesser one.
KIVI_API std::string cpu_capability();

namespace detail {
KIVI_API int register_library();
// Every file that includes this header refers to the library by a call made at start-up, so that a linker that drops
// unused libraries (--as-needed) keeps it and with it the registered operators.
inline const int kLibraryRegistered = register_library();
}  // namespace detail

}  // namespace kivi
