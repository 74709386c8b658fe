// What AddressSanitizer, ThreadSanitizer and valgrind must be told of fibers and of shared memory; nothing in other
// builds. EMULATOR_TSAN comes from the build, since the files that include this are themselves compiled without
// ThreadSanitizer: it shall watch kernels, not the scheduler.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#endif
#if EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#else
#define VALGRIND_STACK_REGISTER(begin, end) 0
#define VALGRIND_STACK_DEREGISTER(id) static_cast<void>(id)
#define VALGRIND_MAKE_MEM_UNDEFINED(begin, bytes) 0
#endif

namespace emulator {

// What one thread did before it released an address happens before what another does after it acquired it.
inline void tsan_acquire([[maybe_unused]] void* address) {
#if EMULATOR_TSAN
  __tsan_acquire(address);
#endif
}
inline void tsan_release([[maybe_unused]] void* address) {
#if EMULATOR_TSAN
  __tsan_release(address);
#endif
}

// While one lives, accesses of the present fiber are not watched: those of the emulator itself, also in functions of
// the standard library of which the linker may have kept the instrumented copy.
class TsanIgnore {
 public:
#if EMULATOR_TSAN
  TsanIgnore() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~TsanIgnore() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  TsanIgnore() {}
  ~TsanIgnore() {}
#endif
  TsanIgnore(const TsanIgnore&) = delete;
  TsanIgnore& operator=(const TsanIgnore&) = delete;
};

}  // namespace emulator
