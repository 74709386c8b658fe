// What it costs to store and to fetch tokens through KVCache and the operators: the prompt (4096 tokens) beside a copy
// of its keys and values, one decoded token beside the attention over the cache it joins, a whole cache back beside a
// fill of the output, and the dense quantise and dequantise. K2V2, 8 kv heads of 128 channels.
//
// Inputs are cold. Counters: min_ms, median_ms; MB read and written, and GB_s; x_copy: min_ms over the copy's;
// percent_of_fill: the fill's min_ms over this, both into tensors that they allocate (of 17 MB at most: malloc has such
// memory at hand, larger tensors cost page faults in both), and percent_of_fill_reused, against a fill of memory in
// use; max_error: of what comes back, in steps of its group.
#include <map>

#include "cache_bench.h"

namespace kivi::bench {
namespace {

constexpr int64_t kGroup = 32, kSink = 4;

int64_t prompt_tokens() { return quick ? 512 : 4096; }

// Least seconds by name.
std::map<std::string, double> baselines;

std::string suffix(int64_t tokens, at::ScalarType type, int threads) {
  return "/tokens:" + std::to_string(tokens) + "/type:" + type_name(type) + "/threads:" + std::to_string(threads);
}

// ---------------------------------------------------------------------------------------------- checks

// The largest error of x_back in steps of its group, groups along `axis` of [1, heads, tokens, channels].
double error_in_steps(const at::Tensor& x, const at::Tensor& x_back, int64_t axis, int64_t bits) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[static_cast<size_t>(axis)] /= kGroup;
  shape.insert(shape.begin() + axis + 1, kGroup);
  const at::Tensor groups = x.to(at::kFloat).reshape(shape), back = x_back.to(at::kFloat).reshape(shape);
  const at::Tensor step = (groups.amax({axis + 1}) - groups.amin({axis + 1})) / static_cast<double>((1 << bits) - 1);
  return ((groups - back).abs().amax({axis + 1}) / step).max().item<double>();
}

// Exact tokens must be as they came, the others within rounding; scales are float16, and bfloat16 rounds once more.
void check_cache(benchmark::State& state, const KVCache& cache, const Dense& in) {
  const auto [k, v] = cache.dequantize();
  const int64_t begin = kSink, end = kSink + cache.quantized_length(), n = in.k.size(2);
  if (cache.length() != n || end - begin < n - kSink - 160 || (end - begin) % kGroup != 0) {
    return fail(state,
                "WRONG RESULT: " + std::to_string(end - begin) + " tokens of " + std::to_string(n) + " are quantised");
  }
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, begin}, {end, n}}) {
    if (!at::equal(k.slice(2, first, last), in.k.slice(2, first, last)) ||
        !at::equal(v.slice(2, first, last), in.v.slice(2, first, last))) {
      return fail(state, "WRONG RESULT: exact tokens are not as they came");
    }
  }
  const double k_error = error_in_steps(in.k.slice(2, begin, end), k.slice(2, begin, end), 2, 2);
  const double v_error = error_in_steps(in.v.slice(2, begin, end), v.slice(2, begin, end), 3, 2);
  state.counters["max_error"] = std::max(k_error, v_error);
  const double limit = in.k.scalar_type() == at::kFloat ? 0.51 : 0.60;
  check_limit(state, "a key, in steps of its group,", k_error, limit);
  check_limit(state, "a value, in steps of its group,", v_error, limit);
}

c10::intrusive_ptr<KVCache> make_cache() { return c10::make_intrusive<KVCache>(kKvHeads, kDim); }

// ---------------------------------------------------------------------------------------------- prompt

void run_copy(benchmark::State& state, Samples& samples, at::ScalarType type, int threads) {
  at::set_num_threads(threads);
  const std::vector<Dense> layers = cold_layers(random_tokens(prompt_tokens()), type);
  std::vector<Dense> targets;
  for (const Dense& d : layers) targets.push_back({at::zeros_like(d.k), at::zeros_like(d.v)});
  size_t turn = 0;
  measure(state, samples, [&] {
    turn = (turn + 1) % layers.size();
    targets[turn].k.copy_(layers[turn].k);
    targets[turn].v.copy_(layers[turn].v);
  });
  if (samples.empty()) return;
  report_time(state, samples, 2 * layers[0].bytes());
  baselines["copy" + suffix(prompt_tokens(), type, threads)] = samples.least();
}

void run_prompt(benchmark::State& state, Samples& samples, at::ScalarType type, int threads) {
  at::set_num_threads(threads);
  const std::vector<Dense> layers = cold_layers(random_tokens(prompt_tokens()), type);
  auto cache = make_cache();
  cache->append(layers[0].k, layers[0].v);
  check_cache(state, *cache, layers[0]);
  size_t turn = 0;
  measure(
      state, samples,
      [&] {
        cache = make_cache();
        cache->append(layers[turn].k, layers[turn].v);
      },
      [&] {
        cache.reset();
        turn = (turn + 1) % layers.size();
      });
  if (samples.empty()) return;
  check_cache(state, *cache, layers[turn]);
  report_time(state, samples, layers[0].bytes());
  const auto at = baselines.find("copy" + suffix(prompt_tokens(), type, threads));
  if (at != baselines.end()) state.counters["x_copy"] = samples.least() / at->second;
}

// ---------------------------------------------------------------------------------------------- one token

// Every layer in turn gets one token, 32 times, so that each layer quantises one group: a sample is the mean of a
// layer's 32 appends.
void run_append(benchmark::State& state, Samples& samples, int threads) {
  at::set_num_threads(threads);
  const int64_t tokens = prompt_tokens();
  const Dense& prompt = random_tokens(tokens + kGroup);
  const auto first = make_cache();
  first->append(prompt.k.slice(2, 0, tokens), prompt.v.slice(2, 0, tokens));
  std::vector<c10::intrusive_ptr<KVCache>> layers(
      static_cast<size_t>(cold_copies(static_cast<double>(first->nbytes()))));
  std::vector<at::Tensor> k, v;
  for (int64_t i = 0; i < kGroup; i++) {
    k.push_back(prompt.k.slice(2, tokens + i, tokens + i + 1));
    v.push_back(prompt.v.slice(2, tokens + i, tokens + i + 1));
  }
  Samples attention, plain;
  at::manual_seed(6);
  const at::Tensor q = at::randn({1, kHeads, 1, kDim});
  for ([[maybe_unused]] auto iteration : state) {
    if (layers[0] == nullptr || layers[0]->length() > 2 * tokens - kGroup) {
      for (auto& layer : layers) {
        layer = first->clone();
        layer->reserve(2 * tokens);  // else the pool grows by a quarter now and then: not the work of one append
      }
    }
    const bool after_prompt = layers[0]->length() == tokens;
    std::vector<double> seconds(layers.size(), 0.0);
    for (size_t i = 0; i < kGroup; i++) {
      for (size_t l = 0; l < layers.size(); l++) {
        const double start = now();
        layers[l]->append(k[i], v[i]);
        const double one = now() - start;
        seconds[l] += one / kGroup;
        plain.add(one);
      }
    }
    double sum = 0;
    for (const double s : seconds) samples.add(s), sum += s * kGroup;
    if (after_prompt) check_cache(state, *layers[0], prompt);  // it holds all of `prompt` now
    for (const auto& layer : layers) {
      const double one = seconds_of([&] { layer->attend(q); });
      attention.add(one);
      sum += one;
    }
    state.SetIterationTime(sum);
  }
  if (samples.empty()) return;
  report_time(state, samples);
  state.counters["append_us"] = samples.least() * 1e6;
  state.counters["append_median_us"] = samples.median() * 1e6;
  state.counters["no_flush_us"] = plain.least() * 1e6;
  state.counters["attention_us"] = attention.least() * 1e6;
  state.counters["percent_of_attention"] = 100 * samples.least() / attention.least();
}

// ---------------------------------------------------------------------------------------------- the cache back

// Outputs in turn, so that what was written last is in no cache of the CPU, whether the memory is kept or given back to
// the allocator and taken again.
std::vector<Dense> cold_outputs(at::ScalarType type) {
  const at::Tensor one = at::zeros({1, kKvHeads, prompt_tokens(), kDim}, type);
  return cold_layers({one, one}, type);
}

void run_fill(benchmark::State& state, Samples& samples, at::ScalarType type, int threads, bool reused) {
  at::set_num_threads(threads);
  std::vector<Dense> outs = cold_outputs(type);
  const double bytes = outs[0].bytes();
  const std::vector<int64_t> shape = outs[0].k.sizes().vec();
  size_t turn = 0;
  measure(
      state, samples,
      [&] {
        if (reused) {
          outs[turn].k.fill_(1.0), outs[turn].v.fill_(1.0);
        } else {
          outs[turn] = {at::full(shape, 1.0, type), at::full(shape, 1.0, type)};
        }
      },
      [&] {
        turn = (turn + 1) % outs.size();
        if (!reused) outs[turn] = {};
      });
  if (samples.empty()) return;
  report_time(state, samples, bytes);
  baselines[(reused ? "fill_reused" : "fill_new") + suffix(prompt_tokens(), type, threads)] = samples.least();
}

void run_dequantize(benchmark::State& state, Samples& samples, at::ScalarType type, int threads) {
  at::set_num_threads(threads);
  const Dense in{random_tokens(prompt_tokens()).k.to(type), random_tokens(prompt_tokens()).v.to(type)};
  const auto first = make_cache();
  first->append(in.k, in.v);
  check_cache(state, *first, in);
  std::vector<c10::intrusive_ptr<KVCache>> layers;
  for (int64_t i = 0; i < cold_copies(static_cast<double>(first->nbytes())); i++) layers.push_back(first->clone());
  std::vector<Dense> outs = cold_outputs(type);
  size_t layer = 0, turn = 0;
  measure(
      state, samples, [&] { std::tie(outs[turn].k, outs[turn].v) = layers[layer]->dequantize(); },
      [&] {
        layer = (layer + 1) % layers.size();
        turn = (turn + 1) % outs.size();
        outs[turn] = {};
      });
  if (samples.empty()) return;
  const auto [k, v] = first->dequantize();
  if (!at::equal(outs[turn].k, k) || !at::equal(outs[turn].v, v)) fail(state, "WRONG RESULT: not the same twice");
  report_time(state, samples, in.bytes() + static_cast<double>(first->nbytes()));
  const auto percent = [&](const char* of, const char* counter) {
    const auto at = baselines.find(of + suffix(prompt_tokens(), type, threads));
    if (at != baselines.end()) state.counters[counter] = 100 * at->second / samples.least();
  };
  percent("fill_new", "percent_of_fill");
  percent("fill_reused", "percent_of_fill_reused");
}

// ---------------------------------------------------------------------------------------------- dense operators

// x [kv heads, tokens, channels] float32; the outputs are new tensors, as a program gets them.
void run_dense(benchmark::State& state, Samples& samples, int64_t axis, int64_t bits, int threads, bool back) {
  at::set_num_threads(threads);
  const Dense& in = random_tokens(prompt_tokens());
  const std::vector<int64_t> sizes = in.k.sizes().vec();
  using Quantized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  const auto dequantized = [&](const Quantized& q) {
    return dequantize(std::get<0>(q), std::get<1>(q), std::get<2>(q), axis, bits, kGroup,
                      sizes[static_cast<size_t>(axis)]);
  };
  const Quantized want = quantize(in.k, axis, bits, kGroup);
  const double error = error_in_steps(in.k, dequantized(want), axis, bits);
  state.counters["max_error"] = error;
  check_limit(state, "a value, in steps of its group,", error, 0.501);
  if (!at::equal(dequantized(want), fake_quantize(in.k, axis, bits, kGroup))) {
    fail(state, "WRONG RESULT: not what fake_quantize gives");
  }
  const double quantized_bytes = static_cast<double>(std::get<0>(want).nbytes() + 2 * std::get<1>(want).nbytes());
  std::vector<at::Tensor> inputs;
  std::vector<Quantized> quantized;
  for (int64_t i = 0; i < cold_copies(back ? quantized_bytes : in.bytes() / 2); i++) {
    if (back) {
      quantized.emplace_back(std::get<0>(want).clone(), std::get<1>(want).clone(), std::get<2>(want).clone());
    } else {
      inputs.push_back(in.k.clone());
    }
  }
  Quantized codes;
  at::Tensor values;
  size_t turn = 0;
  measure(
      state, samples,
      [&] {
        if (back) {
          values = dequantized(quantized[turn]);
        } else {
          codes = quantize(inputs[turn], axis, bits, kGroup);
        }
      },
      [&] {
        codes = Quantized(), values = at::Tensor();
        turn = (turn + 1) % std::max(inputs.size(), quantized.size());
      });
  if (samples.empty()) return;
  if (back ? !at::equal(values, dequantized(want)) : !at::equal(std::get<0>(codes), std::get<0>(want))) {
    fail(state, "WRONG RESULT: not the same twice");
  }
  report_time(state, samples, in.bytes() / 2 + quantized_bytes);
}

}  // namespace

void add_storage_benchmarks() {
  const int64_t prompt = prompt_tokens();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int t : {1, 2}) {
      add_benchmark("copy" + suffix(prompt, type, t),
                    [=](benchmark::State& state, Samples& samples) { run_copy(state, samples, type, t); });
      add_benchmark("append_prompt" + suffix(prompt, type, t),
                    [=](benchmark::State& state, Samples& samples) { run_prompt(state, samples, type, t); });
    }
  }
  for (const int t : {1, 2}) {
    add_benchmark("append_token" + suffix(prompt, at::kFloat, t),
                  [=](benchmark::State& state, Samples& samples) { run_append(state, samples, t); });
  }
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int t : {1, 2}) {
      for (const bool reused : {false, true}) {
        add_benchmark((reused ? "fill_reused" : "fill_new") + suffix(prompt, type, t),
                      [=](benchmark::State& state, Samples& samples) { run_fill(state, samples, type, t, reused); });
      }
      add_benchmark("dequantize_cache" + suffix(prompt, type, t),
                    [=](benchmark::State& state, Samples& samples) { run_dequantize(state, samples, type, t); });
    }
  }
  for (const bool back : {false, true}) {
    for (const int64_t bits : {2, 4}) {
      for (const int64_t axis : {2, 3}) {
        for (const int t : {1, 2}) {
          add_benchmark(
              std::string(back ? "dequantize" : "quantize") + "/bits:" + std::to_string(bits) +
                  "/axis:" + (axis == 2 ? "tokens" : "channels") + suffix(prompt, at::kFloat, t),
              [=](benchmark::State& state, Samples& samples) { run_dense(state, samples, axis, bits, t, back); });
        }
      }
    }
  }
}

}  // namespace kivi::bench
