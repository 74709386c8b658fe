#include "emulator/emulator.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "emulator/fiber.h"

#if EMULATOR_TSAN  // races with blocks that ended long ago are only reported if their history is kept
extern "C" const char* __tsan_default_options() { return "history_size=7"; }
#endif

namespace emulator {

Config& config() {
  static Config c;
  return c;
}
Stats& stats() {
  static Stats s;
  return s;
}

void fail(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error(text);
}

namespace {

constexpr unsigned kMaxThreads = 1024, kMaxWarps = 32;
constexpr size_t kStaticSmemLimit = 48 * 1024, kDynamicSmemLimit = 227 * 1024;

struct Random {
  uint64_t state;
  uint64_t next() {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  unsigned below(unsigned n) { return unsigned((next() >> 32) * n >> 32); }
};

unsigned nth_bit(uint32_t mask, unsigned n) {
  for (; n; --n) mask &= mask - 1;
  return unsigned(__builtin_ctz(mask));
}

struct Cancelled {};  // unwinds the fibers of a block that failed

struct Copy {
  void* dst;
  const void* src;
  size_t bytes, src_bytes;
};

enum class State : uint8_t { ready, in_warp, in_block, done };

struct Thread {
  Fiber fiber;
  uint3 index;
  unsigned number;  // in the block
  State state = State::ready;
  const char* what = nullptr;  // the collective it waits in
  Site site{};
  uint32_t mask = 0;
  void* args = nullptr;
  Combine combine = nullptr;
  Fence fence = Fence::none;
  std::vector<Copy> copies;    // deferred cp.async, oldest first
  std::vector<size_t> groups;  // copies in each committed group
  size_t uncommitted = 0;
  bool fenced = false;         // has executed a fence
  std::vector<void*> atomics;  // touched since the last fence; TSan builds only
};

struct Warp {
  uint32_t lanes = 0, live = 0, ready = 0, waiting = 0, yielded = 0;
  unsigned phase = 0;  // of memory-ordering collectives
};

struct SharedArray {
  const void* key;
  unsigned index;
  size_t bytes;
  void* data;
};

void perform(const Copy& c) {
  std::memcpy(c.dst, c.src, c.src_bytes);
  std::memset(static_cast<char*>(c.dst) + c.src_bytes, 0, c.bytes - c.src_bytes);
}

int launch_tag, done_tag;  // addresses that stand for synchronisation in TSan builds

class Block;
thread_local Block* t_block = nullptr;
thread_local Thread* t_thread = nullptr;

// One block at a time; a worker reuses it, with its stacks, for all blocks that it runs.
class Block {
 public:
  Block(const Launch& launch, void (*body)(const void*), const void* argument)
      : launch_(launch),
        body_(body),
        argument_(argument),
        config_(config()),
        count_(launch.block.x * launch.block.y * launch.block.z),
        threads_(count_),
        warps_((count_ + 31) / 32) {
    size_t bytes = config_.stack_bytes;
#if EMULATOR_ASAN
    if (!bytes) bytes = 256 * 1024;
#else
    if (!bytes) bytes = 64 * 1024;
#endif
    static thread_local std::vector<std::unique_ptr<Stack>> pool;
    if (!pool.empty() && pool[0]->size() < bytes) pool.clear();
    while (pool.size() < count_) pool.push_back(std::make_unique<Stack>(bytes));
    stacks_ = pool.data();
  }

  void run(uint3 index) {
    index_ = index;
    uint64_t number = (uint64_t(index.z) * launch_.grid.y + index.y) * launch_.grid.x + index.x;
    random_.state = config_.seed * 0x100000001b3u + number;
    live_ = count_, arrived_ = 0, spins_ = 0, exited_early_ = false, cancelled_ = false, phase_ = 0, error_ = nullptr;
    tags_ = std::make_unique<Tags>();
    for (unsigned w = 0; w < warps_.size(); ++w) {
      uint32_t all = count_ - 32 * w >= 32 ? ~0u : (1u << (count_ - 32 * w)) - 1;
      warps_[w] = {all, all, all, 0, 0, 0};
    }
    runnable_ = warps_.size() == 32 ? ~0u : (1u << warps_.size()) - 1;
    redraw_priorities();
    for (unsigned i = 0; i < count_; ++i) {
      Thread& t = threads_[i];
      t.index = {i % launch_.block.x, i / launch_.block.x % launch_.block.y, i / (launch_.block.x * launch_.block.y)};
      t.number = i;
      t.state = State::ready;
      t.copies.clear(), t.groups.clear(), t.uncommitted = 0;
      t.fenced = false, t.atomics.clear();
      t.fiber.start(
          *stacks_[i], [](void* p) { t_block->thread_main(*static_cast<Thread*>(p)); }, &t, name(t).c_str());
    }
    t_block = this;
    blockIdx = index, blockDim = launch_.block, gridDim = launch_.grid;
    while (!error_ && (runnable_ || readmit_yielded())) resume(pick());
    if (!error_ && live_) error_ = std::make_exception_ptr(Error(deadlock_report()));
    if (error_) cancel();
    t_block = nullptr;
    for (SharedArray& a : shared_) {
      TsanIgnore ignore;
      std::free(a.data);
    }
    shared_.clear();
    if (error_) std::rethrow_exception(error_);
  }

  // ---- called from fibers ------------------------------------------------------------------------

  void warp_collective(const char* what, uint32_t mask, Site site, Fence fence, void* args, Combine combine) {
    Thread& t = *t_thread;
    Warp& w = warps_[t.number / 32];
    unsigned lane = t.number % 32;
    if (!(mask >> lane & 1))
      fail("%s(mask %08x) at %s:%d: %s is not in the mask", what, mask, site.file, site.line, who(t).c_str());
    if (uint32_t gone = mask & w.lanes & ~w.live; gone && config_.strict_exit)
      fail("%s(mask %08x) at %s:%d: %s waits for lanes %08x, which have exited", what, mask, site.file, site.line,
           who(t).c_str(), gone);
    wait_in(t, State::in_warp, what, site, args, combine);
    t.mask = mask, t.fence = fence;
    void* tag = &tags_->warp[t.number / 32][w.phase % 2];
    if (fence == Fence::memory) tsan_release(tag);
    w.ready &= ~(1u << lane);
    w.waiting |= 1u << lane;
    if (!complete_warp(w, t.number / 32, mask) || config_.order != Order::ascending) suspend(t);
    if (fence == Fence::memory) tsan_acquire(tag);
  }

  void block_collective(const char* what, Site site, void* args, Combine combine) {
    Thread& t = *t_thread;
    if (exited_early_ && config_.strict_exit)
      fail("%s at %s:%d: %s waits for threads of the block that have exited", what, site.file, site.line,
           who(t).c_str());
    wait_in(t, State::in_block, what, site, args, combine);
    void* tag = &tags_->block[phase_ % 2];
    tsan_release(tag);
    warps_[t.number / 32].ready &= ~(1u << t.number % 32);
    ++arrived_;
    if (arrived_ == live_) complete_block();
    if (t.state != State::ready || config_.order != Order::ascending) suspend(t);
    tsan_acquire(tag);
  }

  // Always in the fixed orders, on a coin otherwise, the thread waits until no other one can run; so a
  // thread that polls cannot keep the one it waits for from running.
  void yield() {
    Thread& t = *t_thread;
    if (++spins_ > config_.max_spins)
      fail(
          "no progress in %u scheduling points: %s and all others only poll (blocks run one after another: none may "
          "wait for another)",
          config_.max_spins, who(t).c_str());
    if (config_.order == Order::ascending || config_.order == Order::descending || coin()) {
      warps_[t.number / 32].ready &= ~(1u << t.number % 32);
      warps_[t.number / 32].yielded |= 1u << t.number % 32;
    }
    suspend(t);
  }

  void* shared(const void* key, unsigned index, size_t bytes, size_t align) {
    for (const SharedArray& a : shared_)
      if (a.key == key && a.index == index) {
        if (a.bytes != bytes)
          fail("shared memory: %s takes piece %u with %zu bytes, another thread took it with %zu",
               who(*t_thread).c_str(), index, bytes, a.bytes);
        return a.data;
      }
    TsanIgnore ignore;
    void* data = nullptr;
    if (posix_memalign(&data, std::max(align, sizeof(void*)), bytes)) throw std::bad_alloc();
    if (config_.poison_shared) std::memset(data, 0xff, bytes);
    (void)VALGRIND_MAKE_MEM_UNDEFINED(data, bytes);
    shared_.push_back({key, index, bytes, data});
    if (key == &launch_) return data;
    size_t total = 0;
    for (const SharedArray& a : shared_) total += a.key == &launch_ ? 0 : a.bytes;
    if (total > kStaticSmemLimit) fail("static shared memory of %s is over 48 KiB", launch_.name);
    return data;
  }
  const Launch& launch() const { return launch_; }
  bool coin() { return random_.next() >> 63; }
  bool eager_copies() { return config_.order == Order::ascending || (config_.order != Order::descending && coin()); }
  uint32_t live_lanes() const { return warps_[t_thread->number / 32].live; }

 private:
  struct Tags {
    char block[2], warp[kMaxWarps][2];
  };

  void thread_main(Thread& t) {
    tsan_acquire(&launch_tag);
    try {
      if (cancelled_) throw Cancelled{};
      body_(argument_);
      exited(t);
    } catch (const Cancelled&) {
      t.state = State::done;
    } catch (...) {
      t.state = State::done;
      if (!error_) error_ = located(std::current_exception());
    }
    tsan_release(&done_tag);
  }

  void exited(Thread& t) {
    for (const Copy& c : t.copies) perform(c);
    t.state = State::done;
    Warp& w = warps_[t.number / 32];
    uint32_t bit = 1u << t.number % 32;
    w.live &= ~bit, w.ready &= ~bit;
    --live_, spins_ = 0;
    exited_early_ = true;
    if (arrived_ && config_.strict_exit) {
      const Thread& waiting =
          *std::find_if(threads_.begin(), threads_.end(), [](const Thread& o) { return o.state == State::in_block; });
      fail("%s exited while %s waits in %s at %s:%d", who(t).c_str(), who(waiting).c_str(), waiting.what,
           waiting.site.file, waiting.site.line);
    }
    for (uint32_t left = w.waiting; left; left &= left - 1) {  // this exit may complete a collective
      const Thread& waiting = threads_[t.number / 32 * 32 + unsigned(__builtin_ctz(left))];
      if (waiting.mask & bit && config_.strict_exit)
        fail("%s exited while %s waits for it in %s(mask %08x) at %s:%d", who(t).c_str(), who(waiting).c_str(),
             waiting.what, waiting.mask, waiting.site.file, waiting.site.line);
      if (complete_warp(w, t.number / 32, waiting.mask)) break;
    }
    if (live_ && arrived_ == live_) complete_block();
    if (!w.ready) runnable_ &= ~(1u << t.number / 32);
  }

  void wait_in(Thread& t, State state, const char* what, Site site, void* args, Combine combine) {
    t.state = state, t.what = what, t.site = site, t.args = args, t.combine = combine;
  }

  void same_collective(const Thread& a, const Thread& b) {
    bool same = a.what == b.what || !std::strcmp(a.what, b.what);
    bool same_site = a.site.line == b.site.line && !std::strcmp(a.site.file, b.site.file);
    if (same && a.mask == b.mask && (same_site || !config_.strict_site)) return;
    fail("diverged: %s is %s while %s is %s", who(a).c_str(), waiting_in(a).c_str(), who(b).c_str(),
         waiting_in(b).c_str());
  }

  bool complete_warp(Warp& w, unsigned warp, uint32_t mask) {
    uint32_t members = mask & w.live;
    if ((w.waiting & members) != members) return false;
    Thread* first = &threads_[32 * warp + unsigned(__builtin_ctz(members))];
    void* args[32] = {};
    for (uint32_t left = members; left; left &= left - 1) {
      unsigned lane = unsigned(__builtin_ctz(left));
      Thread& t = threads_[32 * warp + lane];
      same_collective(*first, t);
      args[lane] = t.args;
    }
    if (first->combine) {
      TsanIgnore ignore;
      first->combine(args, 32);
    }
    if (first->fence == Fence::memory) ++w.phase;
    for (uint32_t left = members; left; left &= left - 1)
      threads_[32 * warp + unsigned(__builtin_ctz(left))].state = State::ready;
    spins_ = 0;
    w.waiting &= ~members;
    w.ready |= members;
    runnable_ |= 1u << warp;
    return true;
  }

  void complete_block() {
    std::vector<void*> args(count_);
    Thread* first = nullptr;
    for (Thread& t : threads_)
      if (t.state == State::in_block) {
        t.mask = 0;
        if (!first) first = &t;
        same_collective(*first, t);
        args[t.number] = t.args;
      }
    if (first->combine) {
      TsanIgnore ignore;
      first->combine(args.data(), count_);
    }
    for (Thread& t : threads_)
      if (t.state == State::in_block) {
        t.state = State::ready;
        warps_[t.number / 32].ready |= 1u << t.number % 32;
        runnable_ |= 1u << t.number / 32;
      }
    arrived_ = 0, spins_ = 0;
    ++phase_;
    redraw_priorities();
  }

  void suspend(Thread& t) {
    if (!warps_[t.number / 32].ready) runnable_ &= ~(1u << t.number / 32);
    t.fiber.suspend();
    if (cancelled_) throw Cancelled{};
  }

  void resume(Thread& t) {
    t_thread = &t;
    threadIdx = t.index;
    ++switches_;
    t.fiber.resume();
  }

  Thread& pick() {
    unsigned warp = 0, lane = 0;
    switch (config_.order) {
      case Order::ascending:
        warp = unsigned(__builtin_ctz(runnable_)), lane = unsigned(__builtin_ctz(warps_[warp].ready));
        break;
      case Order::descending:
        warp = 31 - unsigned(__builtin_clz(runnable_)), lane = 31 - unsigned(__builtin_clz(warps_[warp].ready));
        break;
      case Order::random:
      case Order::random_warps:
        warp = config_.order == Order::random
                   ? nth_bit(runnable_, random_.below(unsigned(__builtin_popcount(runnable_))))
                   : *std::find_if(priority_, priority_ + kMaxWarps, [&](unsigned w) { return runnable_ >> w & 1; });
        lane = nth_bit(warps_[warp].ready, random_.below(unsigned(__builtin_popcount(warps_[warp].ready))));
        break;
    }
    return threads_[32 * warp + lane];
  }

  bool readmit_yielded() {
    for (unsigned w = 0; w < warps_.size(); ++w)
      if (warps_[w].yielded) {
        warps_[w].ready |= warps_[w].yielded;
        warps_[w].yielded = 0;
        runnable_ |= 1u << w;
      }
    return runnable_ != 0;
  }

  void redraw_priorities() {
    if (config_.order != Order::random_warps) return;
    std::iota(priority_, priority_ + kMaxWarps, 0u);
    for (unsigned i = kMaxWarps; i > 1; --i) std::swap(priority_[i - 1], priority_[random_.below(i)]);
  }

  void cancel() {
    cancelled_ = true;
    for (Thread& t : threads_)
      if (t.state != State::done) resume(t);
  }

  std::string where() const {
    char text[256];
    snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u): ", launch_.name, index_.x, index_.y, index_.z);
    return text;
  }
  std::string who(const Thread& t) const {
    char text[64];
    snprintf(text, sizeof text, "thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z);
    return text;
  }
  std::string name([[maybe_unused]] const Thread& t) const {  // for race reports
#if EMULATOR_TSAN
    char text[96];
    snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u)", index_.x, index_.y, index_.z, t.index.x,
             t.index.y, t.index.z);
    return text;
#else
    return {};
#endif
  }
  static std::string waiting_in(const Thread& t) {
    char text[512];
    if (t.state == State::in_warp)
      snprintf(text, sizeof text, "waiting in %s(mask %08x) at %s:%d", t.what, t.mask, t.site.file, t.site.line);
    else
      snprintf(text, sizeof text, "waiting in %s at %s:%d", t.what, t.site.file, t.site.line);
    return text;
  }
  std::exception_ptr located(std::exception_ptr e) const {
    try {
      std::rethrow_exception(e);
    } catch (const Error& error) {
      return std::make_exception_ptr(Error(where() + error.what()));
    } catch (...) {
      return e;
    }
  }

  std::string deadlock_report() const {
    std::map<std::string, std::vector<unsigned>> groups;
    for (const Thread& t : threads_) groups[t.state == State::done ? "exited" : waiting_in(t)].push_back(t.number);
    std::string report = where() + "deadlock";
    for (auto& [text, numbers] : groups) {
      report += "\n  " + std::to_string(numbers.size()) + " threads " + text + ": threads ";
      for (size_t i = 0; i < numbers.size();) {
        size_t j = i;
        while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
        report += (i ? "," : "") + std::to_string(numbers[i]) + (j > i ? "-" + std::to_string(numbers[j]) : "");
        i = j + 1;
      }
    }
    return report;
  }

  const Launch& launch_;
  void (*const body_)(const void*);
  const void* const argument_;
  const Config config_;
  const unsigned count_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<SharedArray> shared_;
  std::unique_ptr<Stack>* stacks_ = nullptr;
  std::unique_ptr<Tags> tags_;
  Random random_{0};
  unsigned priority_[kMaxWarps] = {};
  uint3 index_{};
  uint32_t runnable_ = 0;  // warps with a ready lane
  unsigned live_ = 0, arrived_ = 0, phase_ = 0, spins_ = 0;
  bool exited_early_ = false, cancelled_ = false;
  std::exception_ptr error_;

 public:
  uint64_t switches_ = 0;
};

std::mutex g_limits_mutex;
std::map<const void*, size_t> g_smem_limits;  // cudaFuncSetAttribute

void validate(const Launch& l) {
  uint64_t threads = uint64_t(l.block.x) * l.block.y * l.block.z;
  if (threads == 0 || threads > kMaxThreads || l.block.z > 64)
    fail("kernel %s: bad block size %ux%ux%u", l.name, l.block.x, l.block.y, l.block.z);
  if (!l.grid.x || !l.grid.y || !l.grid.z || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    fail("kernel %s: bad grid size %ux%ux%u", l.name, l.grid.x, l.grid.y, l.grid.z);
  size_t limit = kStaticSmemLimit;
  std::lock_guard<std::mutex> lock(g_limits_mutex);
  if (auto i = g_smem_limits.find(l.kernel); i != g_smem_limits.end()) limit = std::max(limit, i->second);
  if (l.dynamic_smem > limit)
    fail("kernel %s: %zu bytes of dynamic shared memory, allowed %zu (cudaFuncSetAttribute raises it)", l.name,
         l.dynamic_smem, limit);
}

Block& block() {
  if (!t_block) fail("device intrinsic called outside a kernel");
  return *t_block;
}

}  // namespace

void run(const Launch& launch, void (*body)(const void*), const void* argument) {
  validate(launch);
  const Config& c = config();
  uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (c.order == Order::descending) std::reverse(order.begin(), order.end());
  if (c.order == Order::random || c.order == Order::random_warps) {
    Random random{c.seed};
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(unsigned(i))]);
  }
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> switches{0};
  std::exception_ptr error;
  std::mutex mutex;
  auto worker = [&] {
    TsanIgnore ignore;  // what the scheduler itself does; the fibers have contexts of their own
    try {
      Block b(launch, body, argument);
      for (size_t i; (i = next++) < order.size();)
        b.run({order[i] % launch.grid.x, order[i] / launch.grid.x % launch.grid.y,
               order[i] / (launch.grid.x * launch.grid.y)});
      switches += b.switches_;
    } catch (...) {
      next = order.size();
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  tsan_release(&launch_tag);
  std::vector<std::thread> helpers;
  for (int i = 1; i < c.workers; ++i) helpers.emplace_back(worker);
  worker();
  for (std::thread& t : helpers) t.join();
  tsan_acquire(&done_tag);
  Stats& s = stats();
  ++s.launches, s.blocks += blocks, s.threads += blocks * launch.block.x * launch.block.y * launch.block.z,
      s.switches += switches;
  if (error) std::rethrow_exception(error);
}

void warp_collective(const char* what, uint32_t mask, Site site, Fence fence, void* args, Combine combine) {
  block().warp_collective(what, mask, site, fence, args, combine);
}
void block_collective(const char* what, Site site, void* args, Combine combine) {
  block().block_collective(what, site, args, combine);
}
void yield() { block().yield(); }
void memory_fence() {
  for (void* p : t_thread->atomics) tsan_acquire(p);
  t_thread->atomics.clear();
  t_thread->fenced = true;
  yield();
}
void before_atomic(void* p) {
  if (t_thread->fenced) tsan_release(p);
}
void after_atomic(void* p) {
#if EMULATOR_TSAN
  TsanIgnore ignore;
  t_thread->atomics.push_back(p);
#endif
  (void)p;
  yield();
}
unsigned lane_id() { return t_thread->number % 32; }
uint32_t live_lanes() { return block().live_lanes(); }

void* static_shared(const void* key, size_t bytes, size_t align) { return block().shared(key, 0, bytes, align); }
void* dynamic_shared() { return block().shared(&block().launch(), 0, block().launch().dynamic_smem, 128); }
void* carve_shared(unsigned index, size_t offset, size_t bytes, size_t align) {
  const Launch& l = block().launch();
  if (offset + bytes > l.dynamic_smem)
    fail("dynamic shared memory: the kernel takes %zu bytes, the launch gives %zu", offset + bytes, l.dynamic_smem);
  return block().shared(&l, 1 + index, bytes, align);
}

void async_copy(void* dst, const void* src, size_t bytes, size_t src_bytes) {
  if (reinterpret_cast<uintptr_t>(dst) % bytes || reinterpret_cast<uintptr_t>(src) % bytes)
    fail("cp.async: an address is not aligned to %zu bytes", bytes);
  Copy copy{dst, src, bytes, src_bytes};
  if (block().eager_copies()) return perform(copy);
  TsanIgnore ignore;
  t_thread->copies.push_back(copy);
  ++t_thread->uncommitted;
}
void async_commit() {
  TsanIgnore ignore;
  t_thread->groups.push_back(t_thread->uncommitted);
  t_thread->uncommitted = 0;
}
void async_wait(unsigned groups_left) {
  Thread& t = *t_thread;
  while (t.groups.size() > groups_left) {
    for (size_t i = 0; i < t.groups.front(); ++i) perform(t.copies[i]);
    TsanIgnore ignore;
    t.copies.erase(t.copies.begin(), t.copies.begin() + std::ptrdiff_t(t.groups.front()));
    t.groups.erase(t.groups.begin());
  }
}

}  // namespace emulator

// ---- the CUDA runtime calls that host code makes; device memory is host memory -------------------

extern "C" {
cudaError_t cudaMalloc(void** p, size_t bytes) {
  return posix_memalign(p, 256, bytes) ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(dst, src, bytes, kind);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "error"; }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (size_t(value) > emulator::kDynamicSmemLimit) return cudaErrorInvalidValue;
  std::lock_guard<std::mutex> lock(emulator::g_limits_mutex);
  emulator::g_smem_limits[kernel] = size_t(value);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {  // of an H200
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
}
