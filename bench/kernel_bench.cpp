// Decode attention straight from the codes, without torch: every instruction set of this CPU, "fast" and "exact", head
// sizes, group sizes, heads per kv head, several queries, ragged batches, and more threads than cores.
//
// Layers are cold (kColdBytes pass between two uses). Counters: min_ms, median_ms; MB: bytes that the cache stores of
// the layer, and GB_s at which they pass; x_floor: min_ms over the time of reading them with as many threads; cycles:
// core cycles per token, query head and query; cycles_mac: per multiply-add (2 * head size for each of these);
// max_error, max_error_wide: the largest error of an output against double precision for scores up to +-4 and +-40.
// A result that is too far off, or that changes during the timed calls, fails the benchmark and the program.
#include <memory>
#include <string>
#include <vector>

#include "attention_layers.h"
#include "harness.h"

namespace {

using namespace kivi;
using namespace kivi::bench;

struct Case {
  Shape shape;
  const cpu::Kernels* kernels;
  bool exact;
  int threads;
};

// The layers of the shape that was asked for last; benchmarks of one shape stand side by side.
CacheLayers& layers_of(const Shape& shape) {
  static std::unique_ptr<CacheLayers> layers;
  if (layers == nullptr || layers->shape.name() != shape.name()) {
    layers.reset();  // the old memory first
    layers = std::make_unique<CacheLayers>(shape, quick ? 0 : kColdBytes);
  }
  return *layers;
}

class Attention {
 public:
  Attention(const Case& c, CacheLayers& layers)
      : case_(c), layers_(layers), team_(c.threads), out_(layers.out_size()), lse_(layers.lse_size()) {}

  void call_next() { call(layers_.next_layer(case_.exact, out_.data(), lse_.data())); }

  struct Errors {
    double out, lse;
  };
  // Of the first layer's scores times `factor`; NaN if any output is NaN.
  Errors error(float factor, const Output& want) {
    std::fill(out_.begin(), out_.end(), NAN), std::fill(lse_.begin(), lse_.end(), NAN);
    call(layers_.first_layer(factor, case_.exact, out_.data(), lse_.data()));
    return {largest_difference(out_, want.out), largest_difference(lse_, want.lse)};
  }
  const std::vector<float>& out() const { return out_; }

 private:
  // As ops/attention_cpu.cpp does it, the plan included.
  void call(const AttentionParams& p) {
    int64_t floats = 0;
    const int64_t count = cpu::attention_plan(p, nullptr, &floats);
    if (items_.size() < static_cast<size_t>(count)) items_.resize(static_cast<size_t>(count));
    if (partials_.size() < static_cast<size_t>(floats)) partials_.resize(static_cast<size_t>(floats));
    cpu::attention_plan(p, items_.data(), &floats);
    const int threads = team_.threads();
    team_.run([&](int t) {
      case_.kernels->attention(p, items_.data(), count * t / threads, count * (t + 1) / threads, partials_.data());
    });
    if (floats == 0) return;
    team_.run([&](int t) {
      cpu::attention_merge(p, items_.data(), count * t / threads, count * (t + 1) / threads, partials_.data());
    });
  }

  static double largest_difference(const std::vector<float>& got, const std::vector<double>& want) {
    double worst = got.size() == want.size() ? 0 : NAN;
    for (size_t i = 0; i < got.size(); i++) {
      const double e = std::fabs(static_cast<double>(got[i]) - want[i]);
      worst = e <= worst ? worst : e;  // NaN stays
      if (std::isnan(worst)) break;
    }
    return worst;
  }

  const Case& case_;
  CacheLayers& layers_;
  Team team_;
  std::vector<float> out_, lse_;
  std::vector<cpu::AttentionItem> items_;
  std::vector<float> partials_;
};

// Limits as in tests/: "exact" 1e-5, twice that for outputs of wide scores, which reach 1.5 in size; "fast" what the
// rounding of q' may do, and 5e-4 for scores up to +-4. The outputs of many tokens with such scores are small: so the
// error is also held below 1 % ("fast") and 0.01 % ("exact") of the largest output.
bool check(benchmark::State& state, const Case& c, CacheLayers& layers, Attention& attention) {
  bool good = true;
  for (const bool wide : {false, true}) {
    const float factor = wide ? CacheLayers::kWide : 1.0f;
    const Output& want = wide ? layers.want_wide() : layers.want();
    double largest = 0;
    for (const double x : want.out) largest = std::max(largest, std::fabs(x));
    const double bound = layers.fast_limit(static_cast<double>(factor));
    const double absolute = c.exact ? (wide ? 2e-5 : 1e-5) : wide ? bound : std::min(bound, 5e-4);
    const double limit = std::min(absolute, (c.exact ? 1e-4 : 1e-2) * largest);
    const double lse_limit = 2 * absolute + (wide ? 4e-5 : 5e-6);
    const auto error = attention.error(factor, want);
    state.counters[wide ? "max_error_wide" : "max_error"] = error.out;
    if (error.out <= limit && error.lse <= lse_limit) continue;
    good = false;
    char text[200];
    std::snprintf(text, sizeof text, "WRONG RESULT: out is off by %.2e (limit %.1e), lse by %.2e (limit %.1e)%s",
                  error.out, limit, error.lse, lse_limit, wide ? ", wide scores" : "");
    fail(state, text);
  }
  return good;
}

void run(benchmark::State& state, Samples& samples, const Case& c) {
  CacheLayers& layers = layers_of(c.shape);
  Attention attention(c, layers);
  const bool good = check(state, c, layers, attention);
  attention.error(1, layers.want());
  const std::vector<float> before = attention.out();
  measure(state, samples, [&] { attention.call_next(); });
  if (!good) return;
  attention.error(1, layers.want());
  if (attention.out() != before) fail(state, "WRONG RESULT: not the same before and after the timed calls");
  const double bytes = layers.stored_bytes();
  report_time(state, samples, bytes);
  report_floor(state, samples, bytes, c.threads);
  const double cores = std::min(c.threads, usable_cores());
  const auto units = static_cast<double>(c.shape.all_tokens() * c.shape.heads * c.shape.q_len);
  const double cycles = samples.least() * clock_ghz() * 1e9 * cores / units;
  state.counters["cycles"] = cycles;
  state.counters["cycles_mac"] = cycles / static_cast<double>(2 * c.shape.dim);
}

void add_cases(const Shape& shape, const std::vector<int>& threads, const std::vector<bool>& exact = {false, true}) {
  for (const int count : threads) {
    for (const cpu::Kernels* kernels : vector_kernels()) {
      for (const bool e : exact) {
        const Case c{shape, kernels, e, count};
        add_benchmark(shape.name() + "/isa:" + kernels->name + "/path:" + (e ? "exact" : "fast") +
                          "/threads:" + std::to_string(count),
                      [c](benchmark::State& state, Samples& samples) { run(state, samples, c); });
      }
    }
  }
}

template <class Change>
Shape changed(Change change) {
  Shape shape;
  if (quick) shape.lengths = {1024};
  change(shape);
  return shape;
}

constexpr int64_t kBits[][2] = {{1, 1}, {3, 3}, {4, 4}, {8, 8}, {4, 2}};

// The records of the recipes that README names, at 128 channels.
std::vector<Shape> recipes() {
  return {changed([](Shape& s) {
            s.recipe = "balanced", s.narrow = s.value_groups = true, s.classes = {{32, 4}, {96, 2}};
          }),
          changed([](Shape& s) {
            s.recipe = "compact", s.narrow = true, s.classes = {{32, 4}, {96, 2}};
          }),
          changed([](Shape& s) {
            s.recipe = "quality", s.narrow = true, s.v_bits = 3, s.classes = {{32, 4}, {64, 3}, {32, 2}};
          })};
}

void add_quick() {
  for (const Shape& recipe : recipes()) add_cases(recipe, {1});
  add_cases(changed([](Shape&) {}), {1, 2});
  for (const auto& bits : kBits) {
    add_cases(changed([&](Shape& s) { s.k_bits = bits[0], s.v_bits = bits[1]; }), {1});
  }
  add_cases(changed([](Shape& s) { s.k_bits = s.v_bits = 4, s.narrow = true; }), {1});
  add_cases(changed([](Shape& s) { s.dim = 80, s.heads = 12, s.kv_heads = 4, s.group_size = 64; }), {1});
  add_cases(changed([](Shape& s) { s.q_len = 4, s.sink_length = 4, s.residual_length = 128; }), {2});
  add_cases(changed([](Shape& s) { s.lengths = {100, 700, 1500}; }), {2});
}

void add_all() {
  for (const int64_t tokens : {4096, 16384, 32768}) {
    add_cases(changed([&](Shape& s) { s.lengths = {tokens}; }), {1, 2});
    if (tokens == 16384) add_cases(Shape(), {8}, {false});
  }
  // The policy of a KVCache by default: 4 first and 128 to 159 newest tokens exact, as float16.
  add_cases(changed([](Shape& s) { s.sink_length = 4, s.residual_length = 128; }), {1, 2});
  for (const auto& bits : kBits) {
    add_cases(changed([&](Shape& s) { s.k_bits = bits[0], s.v_bits = bits[1]; }), {1, 2});
  }
  for (const int64_t bits : {2, 3, 4}) {
    add_cases(changed([&](Shape& s) { s.k_bits = s.v_bits = bits, s.narrow = true; }), {1});
  }
  for (const Shape& recipe : recipes()) add_cases(recipe, {1});
  add_cases(changed([](Shape& s) { s.kv_heads = 32; }), {1, 2});
  for (const int64_t dim : {64, 80, 96, 192, 256}) add_cases(changed([&](Shape& s) { s.dim = dim; }), {1});
  for (const int64_t group : {1, 2, 3, 7, 8, 16}) {
    add_cases(changed([&](Shape& s) { s.heads = group * s.kv_heads; }), {1});
  }
  for (const int64_t size : {16, 64, 128}) add_cases(changed([&](Shape& s) { s.group_size = size; }), {1});
  add_cases(changed([](Shape& s) { s.q_len = 4; }), {1});
  add_cases(changed([](Shape& s) { s.lengths = {100, 700, 1500, 3000, 5000, 8000, 12000, 16384}; }), {1, 2});
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, {1, 2}, [] { quick ? add_quick() : add_all(); });
}
