// Stacks and switches between them, each switch announced to the sanitizers.
#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <utility>

#if EMULATOR_TSAN
// Races with what ended long ago are reported only if its history is kept. The first race ends the program: a test that
// went on would only bury it.
extern "C" const char* __tsan_default_options() { return "history_size=7:halt_on_error=1"; }
#endif

namespace emulator {
namespace {

// What two fibers do is a race only if they have different identities for ThreadSanitizer, but g++'s takes a
// millisecond to make one. So they are made once and serve again: within a launch by the block that runs so many blocks
// later (the launch itself, its end and every barrier order what has to be ordered). Races between blocks that run
// closer after one another are seen.
#if EMULATOR_TSAN
constexpr unsigned kBlocksToldApart = 4;
#else
constexpr unsigned kBlocksToldApart = 1;
#endif

}  // namespace

// ---- stacks --------------------------------------------------------------------------------------

Stack::Stack(size_t bytes)
    : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), bytes_((bytes + page_ - 1) / page_ * page_) {
  void* const memory =
      mmap(nullptr, bytes_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page_, PROT_NONE);
  base_ = static_cast<char*>(memory) + page_;
  valgrind_id_ = static_cast<unsigned>(VALGRIND_STACK_REGISTER(base_, base_ + bytes_));
#if EMULATOR_TSAN
  tsan_ = __tsan_create_fiber(0);
#endif
}

Stack::~Stack() {
#if EMULATOR_TSAN
  __tsan_destroy_fiber(tsan_);
#endif
  VALGRIND_STACK_DEREGISTER(valgrind_id_);
  munmap(base_ - page_, bytes_ + page_);
}

void Stack::reset([[maybe_unused]] const char* name) {
#if EMULATOR_ASAN
  ASAN_UNPOISON_MEMORY_REGION(base_, bytes_);
#endif
#if EMULATOR_TSAN
  __tsan_set_fiber_name(tsan_, name);
#endif
}

std::unique_ptr<Stack>* StackPool::take(unsigned count, size_t bytes) {
  if (!stacks_.empty() && stacks_[0]->size() < bytes) {
    stacks_.clear();
    next_ = 0;
  }
  if (next_ + count > static_cast<size_t>(kBlocksToldApart) * count) next_ = 0;
  while (stacks_.size() < next_ + count) stacks_.push_back(std::make_unique<Stack>(bytes));
  const size_t first = next_;
  next_ += count;
  return &stacks_[first];
}

// ---- fibers --------------------------------------------------------------------------------------

void Fiber::start(Stack& stack, void (*body)(void*), void* argument, const char* name) {
  stack_ = &stack;
  body_ = body;
  argument_ = argument;
  stack.reset(name);
#if defined(EMULATOR_UCONTEXT)
  getcontext(&self_);
  self_.uc_stack.ss_sp = stack.base();
  self_.uc_stack.ss_size = stack.size();
  self_.uc_link = &scheduler_;
  const auto address = reinterpret_cast<uint64_t>(this);  // makecontext passes int arguments only
  const auto entry =
      +[](unsigned high, unsigned low) { reinterpret_cast<Fiber*>(static_cast<uint64_t>(high) << 32 | low)->entry(); };
  makecontext(&self_, reinterpret_cast<void (*)()>(entry), 2, static_cast<unsigned>(address >> 32),
              static_cast<unsigned>(address));
#else
  struct Allocator {
    Stack* stack;
    boost::context::stack_context allocate() {
      boost::context::stack_context context;
      context.size = stack->size();
      context.sp = stack->base() + stack->size();
      return context;
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

void Fiber::resume() {
#if EMULATOR_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack_->base(), stack_->size());
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
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

void Fiber::suspend() {
  leave(false);
#if defined(EMULATOR_UCONTEXT)
  swapcontext(&self_, &scheduler_);
#else
  scheduler_ = std::move(scheduler_).resume();
#endif
  arrive();
}

void Fiber::entry() {
  arrive();
  body_(argument_);
  leave(true);
}

void Fiber::arrive() {
#if EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_bottom_, &scheduler_size_);
#endif
}

void Fiber::leave([[maybe_unused]] bool for_good) {
#if EMULATOR_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_bottom_, scheduler_size_);
  if (for_good) fake_stack_ = nullptr;
#endif
#if EMULATOR_TSAN
  __tsan_switch_to_fiber(scheduler_tsan_, __tsan_switch_to_fiber_no_sync);
#endif
}

}  // namespace emulator
