// Decode attention straight from the codes: time per layer call, for every instruction set of this CPU, "fast" and
// "exact". No torch.
//
//   attention_bench [--seconds S] [--tokens N,N,..] [--threads T] [--isa NAME] [--quick]
//
// One query token, head size 128, groups of 32, float16 scales. "cold": copies of the layer are rotated past 300 MB, so
// that all codes come from memory. The floor is the time to read the codes, scales and zeros at the read bandwidth that
// this program measures. "cycles" are core cycles per token and query head, from the clock that this program measures.
// The results of every variant are compared with a softmax in double before anything is timed.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"
#include "tests/unit/attention_problem.h"

namespace {

using namespace kivi;
using cpu::AttentionItem;
using cpu::AttentionParams;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Options {
  double seconds = 1.0;
  std::vector<int64_t> tokens{4096, 16384, 32768};
  int threads = 1;
  std::string isa;
  bool quick = false;
};

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// A chain of dependent additions takes one cycle each.
double core_ghz() {
#if defined(__x86_64__) || defined(__aarch64__)
  double best = 0;
  unsigned long x = 1;
  for (int r = 0; r < 4000; r++) {
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

struct Memory {
  explicit Memory(size_t n) : bytes((n + (1 << 21)) >> 21 << 21) {
    data = static_cast<uint8_t*>(std::aligned_alloc(1 << 21, bytes));
    madvise(data, bytes, MADV_HUGEPAGE);
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  size_t bytes;
  uint8_t* data;
};

double read_gbs() {
  const Memory memory(size_t{320} << 20);
  std::memset(memory.data, 1, memory.bytes);
  double best = 0;
  for (int r = 0; r < 12; r++) {
    const double start = now();
    uint64_t sum[8] = {};
    for (size_t i = 0; i < memory.bytes; i += 64) {
      __builtin_prefetch(memory.data + i + 4096);
      const auto* line = reinterpret_cast<const uint64_t*>(memory.data + i);
      for (int j = 0; j < 8; j++) sum[j] ^= line[j];
    }
    for (uint64_t& s : sum) asm volatile("" : "+r"(s));
    best = std::max(best, static_cast<double>(memory.bytes) / (now() - start) / 1e9);
  }
  return best;
}

// Threads that wait in a loop between the calls: a call is too short for anything slower.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { wait(t); });
  }
  ~Team() {
    quit_ = true;
    for (auto& w : workers_) w.join();
  }
  template <class Work>
  void run(const Work& work) {
    work_ = [&work](int t) { work(t); };
    done_ = 0;
    round_.fetch_add(1, std::memory_order_release);
    work(0);
    while (done_.load(std::memory_order_acquire) < threads_ - 1) {
    }
  }

 private:
  void wait(int t) {
    for (int seen = 0; !quit_;) {
      if (round_.load(std::memory_order_acquire) == seen) continue;
      seen++;
      work_(t);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  int threads_;
  std::vector<std::thread> workers_;
  std::atomic<bool> quit_{false};
  std::atomic<int> round_{0}, done_{0};
  std::function<void(int)> work_;
};

struct Shape {
  int64_t k_bits, v_bits, heads, kv_heads, tokens, residual;
  bool cold;
};

// Records with random codes and plausible scales.
void fill_pool(const Format& f, uint8_t* pool, size_t bytes) {
  const RecordLayout layout = record_layout(f);
  uint64_t s = 88172645463325252ull;
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    std::memcpy(pool + at, &s, 8);
  }
  const auto fill = [](uint8_t* section, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++) {
      cpu::store_element(section, cpu::Element::kFloat16, i, value * (1.0f + 0.01f * static_cast<float>(i % 7)));
    }
  };
  const float k_step = 3.0f / static_cast<float>((1 << f.k_bits) - 1);
  const float v_step = 3.0f / static_cast<float>((1 << f.v_bits) - 1);
  for (uint8_t* r = pool; r < pool + bytes; r += layout.bytes) {
    fill(r + layout.k_scale, layout.k_channels, k_step);
    fill(r + layout.k_zero, layout.k_channels, -1.5f);
    fill(r + layout.v_scale, layout.v_groups * f.group_size, v_step);
    fill(r + layout.v_zero, layout.v_groups * f.group_size, -1.5f);
  }
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), team_(options.threads) {
    ghz_ = core_ghz();
    gbs_ = read_gbs();
    std::printf("CPU: %s, %.2f GHz (dependent additions), read bandwidth %.1f GB/s (1 thread, 320 MB)\n",
                cpu_model().c_str(), ghz_, gbs_);
    std::printf("best instruction set: %s; threads: %d\n", cpu::kernels().name, options.threads);
  }

  bool wanted(const cpu::Kernels* k) const {
    return k != nullptr && k->isa != cpu::Isa::kScalar && (options_.isa.empty() || options_.isa == k->name);
  }

  std::vector<const cpu::Kernels*> tables() const {
    std::vector<const cpu::Kernels*> all;
    for (const auto isa : {cpu::Isa::kNeon, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Vnni}) {
      if (wanted(cpu::kernels_for(isa))) all.push_back(cpu::kernels_for(isa));
    }
    return all;
  }

  // Largest error against double, for keys with outlier channels.
  bool check(int64_t bits) {
    test::Settings s;
    s.format = test::make_format(2, 128, 128, bits, bits, 32, 128, 4);
    s.heads = 8;
    s.lengths = {3000};
    test::Problem problem(s);
    const auto want = problem.oracle();
    bool ok = true;
    for (const auto* k : tables()) {
      for (const bool exact : {false, true}) {
        const auto got = problem.run(*k, exact);
        double worst = 0;
        for (size_t i = 0; i < want.out.size(); i++) {
          const double e = std::fabs(got.out[i] - want.out[i]);
          worst = e <= worst ? worst : e;  // NaN stays
        }
        const bool good = worst < (exact ? 1e-5 : 5e-4);
        ok = ok && good;
        std::printf("check K%dV%d %-11s %-5s largest error %.1e %s\n", static_cast<int>(bits), static_cast<int>(bits),
                    k->name, exact ? "exact" : "fast", worst, good ? "ok" : "WRONG");
      }
    }
    return ok;
  }

  void time(const Shape& shape) {
    const Format f = test::make_format(shape.kv_heads, 128, 128, shape.k_bits, shape.v_bits, 32, shape.residual, 0);
    const RecordLayout layout = record_layout(f);
    const int64_t pages = ceil_div(shape.tokens, kPageTokens);
    const int64_t layer_bytes = pages * page_bytes(f).value;
    const int64_t layers = shape.cold ? 320000000 / layer_bytes + 1 : 1;
    const Memory pool(static_cast<size_t>(layer_bytes * layers));
    fill_pool(f, pool.data, static_cast<size_t>(layer_bytes * layers));
    std::vector<int32_t> table;
    for (int64_t i = 0; i < pages; i++) table.push_back(static_cast<int32_t>(i));
    const int64_t quantized = shape.tokens, length = shape.tokens + shape.residual;
    std::vector<float> q(static_cast<size_t>(shape.heads * 128)), out(q.size()), lse(static_cast<size_t>(shape.heads));
    for (size_t i = 0; i < q.size(); i++) q[i] = std::sin(static_cast<float>(i) * 1.7f);
    const auto window_floats = static_cast<size_t>(shape.kv_heads * window_capacity(f) * 128);
    std::vector<uint16_t> window_k(window_floats, 0x3400), window_v(window_floats, 0x3400);

    AttentionParams p{};
    p.format = &f, p.layout = &layout, p.batch = 1, p.num_heads = shape.heads, p.q_len = 1;
    p.q = q.data(), p.q_head_stride = p.q_row_stride = 128, p.q_batch_stride = shape.heads * 128;
    p.page_bytes = page_bytes(f).value, p.block_table = table.data(), p.block_table_stride = pages;
    p.lengths = &length, p.quantized_lengths = &quantized;
    p.window_k = window_k.data(), p.window_v = window_v.data(), p.cache_type = cpu::Element::kFloat16;
    p.scale = 0.088388f, p.causal = true;
    p.out = out.data(), p.lse = lse.data();
    for (const auto* k : tables()) {
      for (const bool exact : {false, true}) {
        p.exact = exact;
        report(shape, p, *k, pool.data, layer_bytes, layers);
      }
    }
  }

 private:
  void call(const AttentionParams& p, const cpu::Kernels& k) {
    int64_t floats = 0;
    const int64_t count = cpu::attention_plan(p, nullptr, &floats);
    if (items_.size() < static_cast<size_t>(count)) items_.resize(static_cast<size_t>(count));
    if (partials_.size() < static_cast<size_t>(floats)) partials_.resize(static_cast<size_t>(floats));
    cpu::attention_plan(p, items_.data(), &floats);
    const int threads = options_.threads;
    team_.run([&](int t) {
      k.attention(p, items_.data(), count * t / threads, count * (t + 1) / threads, partials_.data());
    });
    team_.run([&](int t) {
      cpu::attention_merge(p, items_.data(), count * t / threads, count * (t + 1) / threads, partials_.data());
    });
  }

  void report(const Shape& s, AttentionParams p, const cpu::Kernels& k, const uint8_t* pool, int64_t layer_bytes,
              int64_t layers) {
    std::vector<double> times;
    const double start = now();
    for (int64_t i = 0; (now() - start < options_.seconds || i < layers + 3) && i < 100000; i++) {
      p.pool = pool + layer_bytes * (i % layers);
      const double from = now();
      call(p, k);
      times.push_back(now() - from);
    }
    std::sort(times.begin(), times.end());
    const double best = times.front(), median = times[times.size() / 2];
    const double units = static_cast<double>(s.tokens * s.heads);
    const double floor = static_cast<double>(layer_bytes) / gbs_ / 1e9;
    std::printf(
        "K%dV%d %6d tokens + %3d exact, %2d q / %2d kv heads, %s %-11s %-5s min %7.3f ms, median %7.3f, %5.2f "
        "cycles, %5.1f MB, %5.2f GB/s, %4.2f x floor\n",
        static_cast<int>(s.k_bits), static_cast<int>(s.v_bits), static_cast<int>(s.tokens),
        static_cast<int>(s.residual), static_cast<int>(s.heads), static_cast<int>(s.kv_heads), s.cold ? "cold" : "warm",
        k.name, p.exact ? "exact" : "fast", best * 1e3, median * 1e3, best * ghz_ * 1e9 * options_.threads / units,
        static_cast<double>(layer_bytes) / 1e6, static_cast<double>(layer_bytes) / best / 1e9, best / floor);
    std::fflush(stdout);
  }

  Options options_;
  Team team_;
  std::vector<AttentionItem> items_;
  std::vector<float> partials_;
  double ghz_ = 0, gbs_ = 1;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--seconds") {
      o.seconds = std::atof(value().c_str());
    } else if (name == "--threads") {
      o.threads = std::max(1, std::atoi(value().c_str()));
    } else if (name == "--isa") {
      o.isa = value();
    } else if (name == "--quick") {
      o.quick = true;
    } else if (name == "--tokens") {
      o.tokens.clear();
      const std::string list = value();
      for (size_t at = 0; at < list.size();
           at = list.find(',', at) == std::string::npos ? list.size() : list.find(',', at) + 1) {
        o.tokens.push_back(round_up(std::max<int64_t>(1, std::atoll(list.c_str() + at)), kPageTokens));
      }
    } else {
      std::printf("attention_bench [--seconds S] [--tokens N,N,..] [--threads T] [--isa NAME] [--quick]\n");
      std::exit(name == "--help" ? 0 : 1);
    }
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  Bench bench(options);
  bool ok = true;
  for (const int64_t bits : {2, 4, 8}) ok = bench.check(bits) && ok;
  if (!ok) return 1;
  for (const int64_t tokens : options.tokens) bench.time({2, 2, 32, 8, tokens, 0, true});
  if (options.quick) return 0;
  bench.time({2, 2, 4, 1, 2048, 0, false});
  bench.time({2, 2, 32, 8, 16384, 128, true});
  for (const int64_t bits : {1, 3, 4, 8}) bench.time({bits, bits, 32, 8, 16384, 0, true});
  bench.time({4, 2, 32, 8, 16384, 0, true});
  bench.time({2, 2, 32, 32, 16384, 0, true});
  bench.time({2, 2, 64, 8, 16384, 0, true});
}
