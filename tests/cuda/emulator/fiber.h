// Stackful fibers with the annotations that ASan, TSan and valgrind need. Boost.Context by default,
// ucontext with -DEMULATOR_UCONTEXT. Only the scheduler resumes a fiber; a fiber only suspends itself.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(EMULATOR_UCONTEXT)
#include <ucontext.h>
#else
#include <boost/context/fiber.hpp>
#endif

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
#if EMULATOR_TSAN  // set by the build: this file itself must not be instrumented
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
#define VALGRIND_STACK_REGISTER(a, b) 0
#define VALGRIND_STACK_DEREGISTER(a) (void)(a)
#define VALGRIND_MAKE_MEM_UNDEFINED(a, b) (void)0
#endif

namespace emulator {

// ---- race-detector hooks: nothing unless built for TSan ------------------------------------------

#if EMULATOR_TSAN
inline void tsan_acquire(void* p) { __tsan_acquire(p); }
inline void tsan_release(void* p) { __tsan_release(p); }
struct TsanIgnore {
  TsanIgnore() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~TsanIgnore() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
#else
inline void tsan_acquire(void*) {}
inline void tsan_release(void*) {}
struct TsanIgnore {
  TsanIgnore() {}
  ~TsanIgnore() {}
};
#endif

// ---- stacks: mapped once, with a guard page below ------------------------------------------------

class Stack {
 public:
  explicit Stack(size_t bytes) : page_(size_t(sysconf(_SC_PAGESIZE))), bytes_((bytes + page_ - 1) / page_ * page_) {
    void* p = mmap(nullptr, bytes_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mprotect(p, page_, PROT_NONE);
    base_ = static_cast<char*>(p) + page_;
    valgrind_id_ = unsigned(VALGRIND_STACK_REGISTER(base_, base_ + bytes_));
  }
  ~Stack() {
#if EMULATOR_TSAN
    if (tsan_) __tsan_destroy_fiber(tsan_);
#endif
    VALGRIND_STACK_DEREGISTER(valgrind_id_);
    munmap(base_ - page_, bytes_ + page_);
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* base() const { return base_; }
  size_t size() const { return bytes_; }
  void* tsan() const { return tsan_; }
  // Before each use. For TSan a new context and new memory: old ones would carry another block's history.
  void reset([[maybe_unused]] const char* name) {
#if EMULATOR_ASAN
    ASAN_UNPOISON_MEMORY_REGION(base_, bytes_);
#endif
#if EMULATOR_TSAN
    if (tsan_) __tsan_destroy_fiber(tsan_);
    tsan_ = __tsan_create_fiber(0);
    __tsan_set_fiber_name(tsan_, name);
    mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
  }

 private:
  size_t page_, bytes_;
  char* base_;
  unsigned valgrind_id_ = 0;
  void* tsan_ = nullptr;
};

// ---- fibers --------------------------------------------------------------------------------------

class Fiber {
 public:
  // `body(argument)` starts at the first resume().
  void start(Stack& stack, void (*body)(void*), void* argument, const char* name) {
    stack_ = &stack, body_ = body, argument_ = argument;
    stack.reset(name);
#if defined(EMULATOR_UCONTEXT)
    getcontext(&self_);
    self_.uc_stack.ss_sp = stack.base();
    self_.uc_stack.ss_size = stack.size();
    self_.uc_link = &scheduler_;
    auto p = reinterpret_cast<uintptr_t>(this);
    makecontext(&self_, reinterpret_cast<void (*)()>(+[](unsigned hi, unsigned lo) {
      reinterpret_cast<Fiber*>(uintptr_t(hi) << 32 | lo)->entry();
    }),
                2, unsigned(uint64_t(p) >> 32), unsigned(p));
#else
    struct Allocator {
      Stack* stack;
      boost::context::stack_context allocate() {
        boost::context::stack_context c;
        c.size = stack->size();
        c.sp = stack->base() + stack->size();
        return c;
      }
      void deallocate(boost::context::stack_context&) {}
    };
    self_ = boost::context::fiber(std::allocator_arg, Allocator{&stack}, [this](boost::context::fiber&& scheduler) {
      scheduler_ = std::move(scheduler);
      entry();
      return std::move(scheduler_);
    });
#endif
  }

  void resume() {
#if EMULATOR_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_->base(), stack_->size());
#endif
#if EMULATOR_TSAN
    scheduler_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(stack_->tsan(), __tsan_switch_to_fiber_no_sync);
#endif
#if defined(EMULATOR_UCONTEXT)
    swapcontext(&scheduler_, &self_);
#else
    self_ = std::move(self_).resume();
#endif
#if EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void suspend() {
    leave(false);
#if defined(EMULATOR_UCONTEXT)
    swapcontext(&self_, &scheduler_);
#else
    scheduler_ = std::move(scheduler_).resume();
#endif
    arrive();
  }

 private:
  void entry() {
    arrive();
    body_(argument_);
    leave(true);
  }
  void arrive() {
#if EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fake_, &scheduler_bottom_, &scheduler_size_);
#endif
  }
  void leave(bool for_good) {
    (void)for_good;
#if EMULATOR_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_, scheduler_bottom_, scheduler_size_);
    if (for_good) fake_ = nullptr;
#endif
#if EMULATOR_TSAN
    __tsan_switch_to_fiber(scheduler_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
  }

  Stack* stack_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
#if defined(EMULATOR_UCONTEXT)
  ucontext_t self_, scheduler_;
#else
  boost::context::fiber self_, scheduler_;
#endif
#if EMULATOR_ASAN
  void* fake_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
#endif
#if EMULATOR_TSAN
  void* scheduler_tsan_ = nullptr;
#endif
};

}  // namespace emulator
