// What the benchmark programs share on top of Google Benchmark: one call per iteration, timed by hand, least and median
// reported; a failed check that ends the program with an error; the machine in the context of the output.
//
//   --quick                few shapes, short times: does it run, are the results right? (ctest bench/quick)
//   --benchmark_filter=R   and every other option of Google Benchmark
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "machine.h"

namespace kivi::bench {

inline bool check_failed = false;
inline bool quick = false;

// To be called before the first iteration, or after the last.
inline void fail(benchmark::State& state, const std::string& message) {
  check_failed = true;
  state.SkipWithError(message.c_str());
}

// Measured once, when first asked for; start_program asks before anything else runs.
inline double clock_ghz() {
  static const double ghz = core_ghz();
  return ghz;
}
inline double bandwidth(int threads) {
  static std::map<int, double> known;
  const auto at = known.find(threads);
  return at != known.end() ? at->second : known[threads] = read_gbs(threads, quick ? 0.1 : 1.0);
}

// The times of all calls of one benchmark, also those of the first rounds, in which the library looks for the number of
// iterations.
class Samples {
 public:
  void add(double seconds) { seconds_.push_back(seconds); }
  bool empty() const { return seconds_.empty(); }
  size_t count() const { return seconds_.size(); }
  double least() const { return *std::min_element(seconds_.begin(), seconds_.end()); }
  double median() const {
    std::vector<double> sorted = seconds_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

 private:
  std::vector<double> seconds_;
};

// Seconds that call() takes: wall time, or the CPU time of the whole process where that is less. Undisturbed, some
// thread of ours runs at any moment of the call, so that its CPU time is no less than its wall time; where another
// program took the core away it is, and is still no less than the call would have taken.
template <class Call>
double seconds_of(Call call) {
  const double cpu_start = process_seconds(), start = now();
  call();
  const double wall = now() - start, cpu = process_seconds() - cpu_start;
  return std::min(wall, cpu);
}

// Times call() once per iteration; prepare() before each, untimed. A call so slow that it needs few iterations is made
// kLeastSamples times at least: the least of one or two says nothing.
inline constexpr size_t kLeastSamples = 6;
template <class Call, class Prepare>
void measure(benchmark::State& state, Samples& samples, Call call, Prepare prepare) {
  const auto one = [&] {
    prepare();
    const double seconds = seconds_of(call);
    samples.add(seconds);
    return seconds;
  };
  for ([[maybe_unused]] auto iteration : state) state.SetIterationTime(one());
  while (!quick && !samples.empty() && samples.count() < kLeastSamples) one();
}
template <class Call>
void measure(benchmark::State& state, Samples& samples, Call call) {
  measure(state, samples, call, [] {});
}

// min_ms, median_ms and, for calls that move `bytes` to or from memory, MB and GB_s.
inline void report_time(benchmark::State& state, const Samples& samples, double bytes = 0) {
  if (samples.empty()) return;
  state.counters["min_ms"] = samples.least() * 1e3;
  state.counters["median_ms"] = samples.median() * 1e3;
  if (bytes <= 0) return;
  state.counters["MB"] = bytes / 1e6;
  state.counters["GB_s"] = bytes / samples.least() / 1e9;
}

// How many times as long as reading `bytes` with the same threads takes.
inline void report_floor(benchmark::State& state, const Samples& samples, double bytes, int threads) {
  if (!samples.empty()) state.counters["x_floor"] = samples.least() * bandwidth(threads) * 1e9 / bytes;
}

// Registers a benchmark whose body takes the samples of its earlier rounds along.
template <class Body>
void add_benchmark(const std::string& name, Body body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body, samples = Samples()](benchmark::State& state) mutable { body(state, samples); })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

inline std::vector<const cpu::Kernels*> vector_kernels() {
  std::vector<const cpu::Kernels*> all;
  for (const auto isa : {cpu::Isa::kNeon, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Vnni}) {
    if (const cpu::Kernels* table = cpu::kernels_for(isa)) all.push_back(table);
  }
  return all;
}

inline std::string number(double x, int digits = 2) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, x);
  return text;
}

// The whole of main: options, the machine, `register_all` (which reads `quick`), the run. 1: a check failed. 2: no
// benchmark has such a name.
template <class Register>
int run_program(int argc, char** argv, const std::vector<int>& bandwidth_threads, Register register_all) {
  std::vector<char*> arguments{argv[0]};
  // The default first: what the user says later wins.
  static char least_time[] = "--benchmark_min_time=0.15", quick_time[] = "--benchmark_min_time=0.001";
  bool list_only = false;
  for (int i = 1; i < argc; i++) {
    quick = quick || std::strcmp(argv[i], "--quick") == 0;
    list_only = list_only || std::strncmp(argv[i], "--benchmark_list_tests", 22) == 0;
  }
  arguments.push_back(quick ? quick_time : least_time);
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--quick") != 0) arguments.push_back(argv[i]);
  }
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  if (!list_only) {
    benchmark::AddCustomContext("cpu", cpu_model());
    benchmark::AddCustomContext("usable_cores", std::to_string(usable_cores()));
    benchmark::AddCustomContext("isa", cpu::kernels().name);
    benchmark::AddCustomContext("clock_ghz", number(clock_ghz()));
    for (const int threads : bandwidth_threads) {
      benchmark::AddCustomContext("read_gbs_" + std::to_string(threads), number(bandwidth(threads)));
    }
  }
  register_all();
  const size_t matches = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (check_failed) std::fprintf(stderr, "%s: a check FAILED, see above\n", argv[0]);
  return check_failed ? 1 : matches == 0 ? 2 : 0;
}

}  // namespace kivi::bench
