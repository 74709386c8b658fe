// The machine under a benchmark: which CPU, its clock, what it reads from memory with a number of threads, memory in
// large pages, and threads that start work within a microsecond. Linux; no torch, no benchmark library.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace kivi::bench {

// Copies of what is timed are used in turn until this many bytes have passed: more than any cache of the CPU holds.
inline constexpr int64_t kColdBytes = 320 << 20;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// CPU time of all threads of this process.
inline double process_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

inline std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    for (const char* key : {"model name", "Model", "CPU part"}) {
      if (line.rfind(key, 0) == 0 && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
    }
  }
  return "unknown CPU";
}

// Cores that this process may use (taskset counts).
inline int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

// Core clock while integer work runs: a chain of dependent additions takes one cycle each. 0: unknown machine.
inline double core_ghz() {
#if defined(__x86_64__) || defined(__aarch64__)
  double best = 0;
  unsigned long x = 1;
  for (int r = 0; r < 8000; r++) {
    const double start = now();
    for (int i = 0; i < 2000; i++) {
#if defined(__x86_64__)
      asm volatile(".rept 16\nadd $1,%0\n.endr" : "+r"(x));
#else
      asm volatile(".rept 16\nadd %0,%0,#1\n.endr" : "+r"(x));
#endif
    }
    best = std::max(best, 16 * 2000 / (now() - start) / 1e9);
  }
  return best;
#else
  return 0;
#endif
}

// Bytes in large pages where the system grants them, all zero, so that no page is touched for the first time in a
// timed call.
class Memory {
 public:
  explicit Memory(int64_t bytes = 0) {
    constexpr int64_t kLargePage = int64_t{1} << 21;
    size_ = (bytes + kLargePage) / kLargePage * kLargePage;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kLargePage, static_cast<size_t>(size_)));
    if (data_ == nullptr) std::abort();
    madvise(data_, static_cast<size_t>(size_), MADV_HUGEPAGE);
    std::memset(data_, 0, static_cast<size_t>(size_));
  }
  ~Memory() { std::free(data_); }
  Memory(Memory&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;

  uint8_t* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t size() const { return size_; }

 private:
  uint8_t* data_;
  int64_t size_;
};

// A fixed number of threads, the caller among them. The others wait in a loop between the calls, since a call is too
// short for anything slower; with more threads than cores they let the others run.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), crowded_(threads > usable_cores()) {
    for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { work_until_quit(t); });
  }
  ~Team() {
    quit_ = true;
    for (auto& worker : workers_) worker.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // work(t) on every thread t; returns when all are done.
  template <class Work>
  void run(const Work& work) {
    if (threads_ == 1) return work(0);
    work_ = [&work](int t) { work(t); };
    done_ = 0;
    round_.fetch_add(1, std::memory_order_release);
    work(0);
    while (done_.load(std::memory_order_acquire) < threads_ - 1) relax();
  }

 private:
  void relax() const {
    if (crowded_) std::this_thread::yield();
  }
  void work_until_quit(int t) {
    for (int seen = 0; !quit_;) {
      if (round_.load(std::memory_order_acquire) == seen) {
        relax();
        continue;
      }
      seen++;
      work_(t);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  int threads_;
  bool crowded_;
  std::vector<std::thread> workers_;
  std::atomic<bool> quit_{false};
  std::atomic<int> round_{0}, done_{0};
  std::function<void(int)> work_;
};

// What `threads` threads read from memory together, GB/s: kColdBytes are read again and again for so long, in pieces
// of 16 MB, about a layer; the fastest piece counts, as the fastest call does elsewhere.
inline double read_gbs(int threads, double seconds) {
  constexpr int64_t kPiece = 16 << 20;
  Team team(threads);
  const Memory memory(kColdBytes);
  double best = 0;
  int64_t piece = 0;
  for (const double begin = now(); now() - begin < seconds; piece = (piece + 1) % (kColdBytes / kPiece)) {
    const uint8_t* const data = memory.data() + piece * kPiece;
    const double start = now();
    team.run([&](int t) {
      uint64_t sum[8] = {};
      for (int64_t i = kPiece / 64 * t / threads * 64; i < kPiece / 64 * (t + 1) / threads * 64; i += 64) {
        __builtin_prefetch(data + i + 4096);
        const auto* line = reinterpret_cast<const uint64_t*>(data + i);
        for (int j = 0; j < 8; j++) sum[j] ^= line[j];
      }
      for (uint64_t& s : sum) asm volatile("" : "+r"(s));
    });
    best = std::max(best, static_cast<double>(kPiece) / (now() - start) / 1e9);
  }
  return best;
}

}  // namespace kivi::bench
