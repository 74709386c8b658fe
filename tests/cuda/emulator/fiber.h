// Fibers with stacks of their own, by Boost.Context or, with EMULATOR_UCONTEXT, by ucontext. Only the scheduler resumes
// a fiber, and a fiber suspends only itself.
#pragma once

#if defined(EMULATOR_UCONTEXT)
#include <ucontext.h>
#else
#include <boost/context/fiber.hpp>
#endif

#include <cstddef>
#include <memory>
#include <vector>

#include "emulator/sanitizers.h"

namespace emulator {

// Memory for the stack of one fiber after another, with a guard page below; for ThreadSanitizer also the identity of
// what runs on it.
class Stack {
 public:
  explicit Stack(size_t bytes);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* base() const { return base_; }
  size_t size() const { return bytes_; }
  // Before each use; reports of races call the fiber by this name.
  void reset(const char* name);

#if EMULATOR_TSAN
  void* tsan() const { return tsan_; }
#endif

 private:
  size_t page_, bytes_;
  char* base_;
  unsigned valgrind_id_;
#if EMULATOR_TSAN
  void* tsan_;
#endif
};

// The stacks of one thread of the system, used again and again.
class StackPool {
 public:
  // Stacks for the next block, of at least so many bytes each.
  std::unique_ptr<Stack>* take(unsigned count, size_t bytes);

 private:
  std::vector<std::unique_ptr<Stack>> stacks_;
  size_t next_ = 0;
};

class Fiber {
 public:
  // body(argument) starts at the first resume().
  void start(Stack& stack, void (*body)(void*), void* argument, const char* name);
  // Called by the scheduler: runs the fiber until it suspends itself or ends.
  void resume();
  // Called by the fiber: returns at the next resume().
  void suspend();

 private:
  void entry();
  void arrive();
  void leave(bool for_good);

  Stack* stack_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
#if defined(EMULATOR_UCONTEXT)
  ucontext_t self_, scheduler_;
#else
  boost::context::fiber self_, scheduler_;
#endif
#if EMULATOR_ASAN
  void* fake_stack_ = nullptr;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_size_ = 0;
#endif
#if EMULATOR_TSAN
  void* scheduler_tsan_ = nullptr;
#endif
};

}  // namespace emulator
