// Decode: KVCache::attend of one query token over a cache with the default policy (4 first and at least 128 newest
// tokens exact, float32), against two plain fp32 matrix products per kv head and against scaled_dot_product_attention
// in fp32 and bf16. Then what KVCache::forward costs beside the kernels it calls.
//
// Layers are cold. Counters: min_ms, median_ms; MB that one layer's cache stores (not its spare room), GB_s; x_floor:
// min_ms over the time of reading that with as many threads; x_matmul, x_sdpa_f32, x_sdpa_bf16: how many times as long
// those take; max_error, max_error_wide: against double precision over the same keys and values, for scores of a normal
// distribution with deviation 1 and 10.
#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "cache_bench.h"

namespace kivi::bench {
namespace {

constexpr double kWide = 10;

// Least seconds of a baseline, by its name, tokens and threads.
std::map<std::string, double> baselines;
std::string key(const std::string& what, int64_t tokens, int threads, const std::string& path = "") {
  return what + "/tokens:" + std::to_string(tokens) + "/heads:32x8" + (path.empty() ? "" : "/path:" + path) +
         "/threads:" + std::to_string(threads);
}

const at::Tensor& query() {
  static const at::Tensor q = [] {
    at::manual_seed(4);
    return at::randn({1, kHeads, 1, kDim});
  }();
  return q;
}

// What is kept between benchmarks of the same tokens: the first layer, and the layers of the last kind asked for.
struct Tokens {
  explicit Tokens(int64_t n) : count(n), first(random_tokens(n)) {}
  int64_t count;
  Dense first;
  at::Tensor want;  // in_double(query(), first)
  std::string kind;
  std::vector<Dense> dense;
  std::vector<c10::intrusive_ptr<KVCache>> caches;

  // True if layers of another kind were dropped: the caller makes its own.
  bool drop_others(const std::string& wanted) {
    if (kind == wanted) return false;
    kind = wanted;
    dense.clear(), caches.clear();
    return true;
  }
};

Tokens& tokens_of(int64_t count) {
  static std::unique_ptr<Tokens> tokens;
  if (tokens == nullptr || tokens->count != count) {
    tokens.reset();
    tokens = std::make_unique<Tokens>(count);
  }
  return *tokens;
}

// ---------------------------------------------------------------------------------------------- baselines

at::Tensor by_matmul(const at::Tensor& q, const Dense& d) {
  const at::Tensor grouped = q.view({1, kKvHeads, kHeads / kKvHeads, kDim}) / std::sqrt(double(kDim));
  return at::matmul(at::softmax(at::matmul(grouped, d.k.transpose(-1, -2)), -1), d.v).view({1, kHeads, 1, kDim});
}

at::Tensor by_sdpa(const at::Tensor& q, const Dense& d) {
  return at::scaled_dot_product_attention(q, d.k, d.v, std::nullopt, 0.0, false, std::nullopt, /*enable_gqa=*/true);
}

at::Tensor in_double(const at::Tensor& q, const Dense& d) {
  std::vector<at::Tensor> out;
  for (int64_t h = 0; h < kKvHeads; h++) {
    const at::Tensor grouped = q.slice(1, 4 * h, 4 * h + 4).squeeze(2).squeeze(0).to(at::kDouble);
    const at::Tensor k = d.k[0][h].to(at::kDouble), v = d.v[0][h].to(at::kDouble);
    out.push_back(at::matmul(at::softmax(at::matmul(grouped, k.t()) / std::sqrt(double(kDim)), -1), v));
  }
  return at::cat(out, 0).view({1, kHeads, 1, kDim});
}

struct Baseline {
  const char* name;
  at::ScalarType type;
  double limit;  // of its error, at most
  at::Tensor (*call)(const at::Tensor&, const Dense&);
};
constexpr Baseline kBaselines[] = {{"matmul_f32", at::kFloat, 1e-5, by_matmul},
                                   {"sdpa_f32", at::kFloat, 1e-5, by_sdpa},
                                   {"sdpa_bf16", at::kBFloat16, 1e-2, by_sdpa}};

void run_baseline(benchmark::State& state, Samples& samples, const Baseline& b, int64_t count, int threads) {
  at::set_num_threads(threads);
  Tokens& tokens = tokens_of(count);
  if (tokens.drop_others(type_name(b.type))) tokens.dense = cold_layers(tokens.first, b.type);
  const std::vector<Dense>& layers = tokens.dense;
  const at::Tensor q = query().to(b.type);
  if (!tokens.want.defined()) tokens.want = in_double(query(), tokens.first);
  const double error = difference(b.call(q, layers[0]), tokens.want);
  state.counters["max_error"] = error;
  check_limit(state, b.name, error, b.limit);
  size_t turn = 0;
  measure(state, samples, [&] { b.call(q, layers[turn = (turn + 1) % layers.size()]); });
  if (samples.empty()) return;
  report_time(state, samples, layers[0].bytes());
  report_floor(state, samples, layers[0].bytes(), threads);
  baselines[key(b.name, count, threads)] = samples.least();
}

// ---------------------------------------------------------------------------------------------- ours

struct Ours {
  int64_t bits;
  const char* precision;
  bool all_exact;  // a window so long that nothing is quantised
  std::string name() const {
    const std::string b = std::to_string(bits);
    return all_exact ? "all_exact" : "K" + b + "V" + b;
  }
  CacheOptions options() const {
    CacheOptions o;
    o.num_kv_heads = kKvHeads, o.head_dim = kDim, o.k_bits = o.v_bits = bits, o.precision = precision;
    if (all_exact) o.residual_length = 256;
    return o;
  }
};

struct Errors {
  double plain, wide;
};

// Against double precision over what the cache gives back. The cache of the last call is remembered: the rounds of one
// benchmark ask again.
const Errors& errors_of(const Ours& o, const c10::intrusive_ptr<KVCache>& cache, int threads) {
  static std::string last;
  static Errors errors;
  const std::string name = key(o.name(), cache->length(), threads, o.precision);
  if (name == last) return errors;
  last = name;
  const auto [k, v] = cache->dequantize();
  const at::Tensor wide = query() * kWide;
  errors = {difference(cache->attend(query()), in_double(query(), {k, v})),
            difference(cache->attend(wide), in_double(wide, {k, v}))};
  return errors;
}

// Codes, scales and zeros, and the exact tokens.
double stored_bytes(const KVCache& cache) {
  const int64_t exact = cache.length() - cache.quantized_length();
  const int64_t records = cache.quantized_length() / cache.format().group_size;
  return static_cast<double>(kKvHeads * (records * record_layout(cache.format()).bytes + exact * 2 * kDim * 4));
}

void run_ours(benchmark::State& state, Samples& samples, const Ours& o, int64_t count, int threads) {
  at::set_num_threads(threads);
  Tokens& tokens = tokens_of(count);
  auto& layers = tokens.caches;
  if (tokens.drop_others(o.name() + o.precision)) {
    KVCache cache(o.options());
    cache.append(tokens.first.k, tokens.first.v);
    for (int64_t i = 0; i < cold_copies(stored_bytes(cache)); i++) layers.push_back(cache.clone());
  }
  if (o.all_exact && layers[0]->quantized_length() != 0) return fail(state, "some tokens are quantised");
  // Limits as in tests/; with scores ten times as wide those of "fast" grow as much.
  const bool fast = std::string(o.precision) == "fast" && !o.all_exact;
  const Errors& errors = errors_of(o, layers[0], threads);
  state.counters["max_error"] = errors.plain;
  state.counters["max_error_wide"] = errors.wide;
  check_limit(state, o.name(), errors.plain, fast ? 5e-4 : 1e-5);
  check_limit(state, o.name() + " with wide scores", errors.wide, fast ? 5e-3 : 2e-5);
  const at::Tensor before = layers[0]->attend(query());
  size_t turn = 0;
  measure(state, samples, [&] { layers[turn = (turn + 1) % layers.size()]->attend(query()); });
  if (samples.empty()) return;
  if (!at::equal(layers[0]->attend(query()), before)) {
    fail(state, "WRONG RESULT: not the same before and after the timed calls");
  }
  const double bytes = stored_bytes(*layers[0]);
  report_time(state, samples, bytes);
  report_floor(state, samples, bytes, threads);
  for (const Baseline& b : kBaselines) {
    const auto at = baselines.find(key(b.name, count, threads));
    if (at != baselines.end()) state.counters[std::string("x_") + b.name] = at->second / samples.least();
  }
}

void add_decode(int64_t count, const std::vector<Ours>& variants, const std::vector<int>& threads = {1, 2}) {
  for (const Baseline& b : kBaselines) {
    for (const int t : threads) {
      add_benchmark("decode/" + key(b.name, count, t), [&b, count, t](benchmark::State& state, Samples& samples) {
        run_baseline(state, samples, b, count, t);
      });
    }
  }
  for (const Ours& o : variants) {
    for (const int t : threads) {
      add_benchmark(
          "decode/" + key(o.name(), count, t, o.precision),
          [o, count, t](benchmark::State& state, Samples& samples) { run_ours(state, samples, o, count, t); });
    }
  }
}

// ---------------------------------------------------------------------------------------------- forward beside kernels

// Decode steps on a short cache, all in the caches of the CPU, one thread: KVCache::forward, and the same attention by
// kernel calls on plain arrays with the token copied to its place.
class Steps {
 public:
  static constexpr int64_t kStart = 16, kSteps = 32;

  Steps() : tokens_(random_tokens(kStart + kSteps)) {
    at::manual_seed(5);
    q_ = at::randn({kSteps, 1, kHeads, 1, kDim});
    CacheOptions o;
    o.num_kv_heads = kKvHeads, o.head_dim = kDim;
    cache_ = c10::make_intrusive<KVCache>(o);
    cache_->append(tokens_.k.slice(2, 0, kStart), tokens_.v.slice(2, 0, kStart));
    format_ = cache_->format();
    layout_ = record_layout(format_);
    const auto zeros = [](int64_t n) { return at::zeros({kKvHeads, n, kDim}); };
    sink_ = {zeros(format_.sink_length), zeros(format_.sink_length)};
    window_ = {zeros(window_capacity(format_)), zeros(window_capacity(format_))};
    for (int64_t t = 0; t < kStart; t++) store(t);
    for (int64_t i = 0; i < kSteps; i++) {
      step_q_.push_back(q_[i]);
      step_k_.push_back(tokens_.k.slice(2, kStart + i, kStart + i + 1));
      step_v_.push_back(tokens_.v.slice(2, kStart + i, kStart + i + 1));
    }
    out_ = at::zeros({kSteps, 1, kHeads, 1, kDim});
    lse_ = at::zeros({kHeads});
  }

  // Seconds of one step, as the mean of all.
  double forward() {
    const auto cache = cache_->clone();
    outputs_.clear();
    return seconds_of([&] {
             for (size_t i = 0; i < kSteps; i++) {
               outputs_.push_back(cache->forward(step_q_[i], step_k_[i], step_v_[i]));
             }
           }) /
           kSteps;
  }
  double kernels() {
    return seconds_of([&] {
             for (int64_t i = 0; i < kSteps; i++) {
               attend(i);
               store(kStart + i);
             }
           }) /
           kSteps;
  }
  double outputs_differ() const { return difference(at::stack(outputs_), out_); }

 private:
  void store(int64_t t) {
    const bool sink = t < format_.sink_length;
    const Dense& to = sink ? sink_ : window_;
    const int64_t slots = to.k.size(1), slot = sink ? t : (t - format_.sink_length) % slots;
    const auto copy = [&](const at::Tensor& x, const at::Tensor& y) {
      const auto* source = x.const_data_ptr<float>();
      auto* target = y.mutable_data_ptr<float>();
      for (int64_t h = 0; h < kKvHeads; h++) {
        std::memcpy(target + (h * slots + slot) * kDim, source + (h * (kStart + kSteps) + t) * kDim, kDim * 4);
      }
    };
    copy(tokens_.k, to.k), copy(tokens_.v, to.v);
  }

  void attend(int64_t step) {
    const int64_t length = kStart + step, quantized = 0, stride = (kStart + kSteps) * kDim;
    const int32_t no_page = 0;
    AttentionParams p{};
    p.format = format_, p.layout = layout_, p.batch = 1, p.num_heads = kHeads, p.q_len = 1;
    p.q = q_.const_data_ptr<float>() + step * kHeads * kDim;
    p.q_batch_stride = kHeads * kDim, p.q_head_stride = p.q_row_stride = kDim;
    p.page_bytes = page_bytes(format_).value, p.block_table = &no_page, p.block_table_stride = 1;
    p.lengths = &length, p.quantized_lengths = &quantized;
    p.sink_k = sink_.k.const_data_ptr(), p.sink_v = sink_.v.const_data_ptr();
    p.window_k = window_.k.const_data_ptr(), p.window_v = window_.v.const_data_ptr();
    p.new_len = 1;
    p.new_k = tokens_.k.const_data_ptr<float>() + length * kDim;
    p.new_v = tokens_.v.const_data_ptr<float>() + length * kDim;
    p.new_k_strides[0] = p.new_v_strides[0] = stride * kKvHeads;
    p.new_k_strides[1] = p.new_v_strides[1] = stride, p.new_k_strides[2] = p.new_v_strides[2] = kDim;
    p.scale = static_cast<float>(1 / std::sqrt(double(kDim))), p.causal = true;
    p.out = out_.mutable_data_ptr<float>() + step * kHeads * kDim, p.lse = lse_.mutable_data_ptr<float>();
    int64_t floats = 0;
    const int64_t count = cpu::attention_plan(p, nullptr, &floats);
    items_.resize(static_cast<size_t>(count)), partials_.resize(static_cast<size_t>(floats));
    cpu::attention_plan(p, items_.data(), &floats);
    cpu::kernels().attention(p, items_.data(), 0, count, partials_.data());
    cpu::attention_merge(p, items_.data(), 0, count, partials_.data());
  }

  Dense tokens_, sink_, window_;
  at::Tensor q_, out_, lse_;
  std::vector<at::Tensor> step_q_, step_k_, step_v_, outputs_;
  c10::intrusive_ptr<KVCache> cache_;
  Format format_;
  RecordLayout layout_;
  std::vector<cpu::AttentionItem> items_;
  std::vector<float> partials_;
};

void run_forward(benchmark::State& state, Samples& samples) {
  at::set_num_threads(1);
  Steps steps;
  steps.forward(), steps.kernels();
  check_limit(state, "forward beside the kernels", steps.outputs_differ(), 1e-6);
  Samples kernels;
  for ([[maybe_unused]] auto iteration : state) {
    const double seconds = steps.forward();
    kernels.add(steps.kernels());
    samples.add(seconds);
    state.SetIterationTime(seconds * Steps::kSteps);
  }
  if (samples.empty()) return;
  report_time(state, samples);
  state.counters["kernels_us"] = kernels.least() * 1e6;
  state.counters["overhead_us"] = (samples.least() - kernels.least()) * 1e6;
}

}  // namespace

void add_decode_benchmarks() {
  const Ours all_exact{2, "fast", true}, k2{2, "fast", false};
  if (quick) {
    add_decode(256, {all_exact});
    add_decode(1024, {k2, {2, "exact", false}, {4, "fast", false}});
  } else {
    for (const int64_t tokens : {64, 128, 256}) add_decode(tokens, {all_exact});
    for (const int64_t tokens : {1024, 2048, 4096, 8192, 16384, 32768}) {
      std::vector<Ours> variants{k2};
      if (tokens == 4096 || tokens == 16384) {
        variants.insert(variants.end(), {{2, "exact", false}, {4, "fast", false}, {8, "fast", false}});
      }
      add_decode(tokens, variants);
      if (tokens != 16384) continue;
      // More threads than cores.
      add_benchmark("decode/" + key(k2.name(), tokens, 8, k2.precision),
                    [=](benchmark::State& state, Samples& samples) { run_ours(state, samples, k2, tokens, 8); });
    }
  }
  add_benchmark("forward/tokens:16/steps:32/heads:32x8/threads:1",
                [](benchmark::State& state, Samples& samples) { run_forward(state, samples); });
}

}  // namespace kivi::bench
