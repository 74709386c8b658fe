// What a launch may ask for. The limits are those of sm_90 (CUDA C++ Programming Guide, technical specifications).
#pragma once

#include <cstddef>

namespace emulator {

constexpr size_t kStaticSharedLimit = 48 * 1024;  // and of dynamic shared memory, unless a kernel has been allowed more
constexpr size_t kDynamicSharedLimit = 227 * 1024;  // of a kernel that cudaFuncSetAttribute allowed it

// What cudaFuncSetAttribute allowed the kernel.
size_t allowed_dynamic_shared(const void* kernel);

}  // namespace emulator
