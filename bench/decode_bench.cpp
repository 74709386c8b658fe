// Decode attention of kivi::KVCache against what a LibTorch program would call otherwise, in one run on one machine:
// two plain fp32 matrix products per kv head (the fair baseline) and scaled_dot_product_attention in fp32 and bf16. One
// query token, 32 query and 8 kv heads of 128 channels, one layer; copies of the layer are rotated past 300 MB, so that
// the caches of the CPU are cold. Also append against a copy of K and V. Every result is checked before it is timed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "kivi/kivi.h"

namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kChannels = 128;
constexpr double kColdBytes = 3.2e8;

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

struct Times {
  double least, median;  // ms
};

// Calls f(0), f(1), ... for `seconds`, and `rounds` times at least.
Times time_calls(int64_t rounds, double seconds, const std::function<void(int64_t)>& f) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> ms;
  const auto start = Clock::now();
  const auto since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  for (int64_t i = 0; i < rounds || since(start) < seconds; i++) {
    const auto begin = Clock::now();
    f(i);
    ms.push_back(since(begin) * 1e3);
  }
  std::sort(ms.begin(), ms.end());
  return {ms.front(), ms[ms.size() / 2]};
}

struct Dense {
  at::Tensor k, v;
};

at::Tensor by_matmul(const at::Tensor& q, const Dense& d) {
  const at::Tensor grouped = q.view({1, kKvHeads, kHeads / kKvHeads, kChannels}) / std::sqrt(double(kChannels));
  return at::matmul(at::softmax(at::matmul(grouped, d.k.transpose(-1, -2)), -1), d.v).view({1, kHeads, 1, kChannels});
}

at::Tensor by_sdpa(const at::Tensor& q, const Dense& d) {
  return at::scaled_dot_product_attention(q, d.k, d.v, std::nullopt, 0.0, false, std::nullopt, /*enable_gqa=*/true);
}

void print(const char* name, const Times& t, double mb, double base) {
  std::printf("  %-28s %9.3f ms (median %9.3f)  %7.1f MB  %6.1f x the time of K2V2 fast\n", name, t.least, t.median, mb,
              t.least / base);
  std::fflush(stdout);
}

void check(const char* name, const at::Tensor& got, const at::Tensor& want, double limit) {
  const double error = (got.to(at::kFloat) - want).abs().max().item<double>();
  if (error <= limit) return;
  std::printf("FAILED: %s is off by %g, more than %g\n", name, error, limit);
  std::exit(1);
}

void bench_tokens(int64_t tokens, double seconds) {
  const auto copies = [](double bytes) { return static_cast<int64_t>(kColdBytes / bytes) + 1; };
  const at::Tensor q = at::randn({1, kHeads, 1, kChannels});
  const Dense first{at::randn({1, kKvHeads, tokens, kChannels}), at::randn({1, kKvHeads, tokens, kChannels})};
  std::printf("%lld tokens\n", static_cast<long long>(tokens));

  double base = 0;
  for (const auto& [bits, precision] :
       {std::pair<int64_t, const char*>{2, "fast"}, {2, "exact"}, {4, "fast"}, {8, "fast"}}) {
    kivi::KVCache cache(kKvHeads, kChannels, std::nullopt, bits, bits, 32, 128, 4, precision);
    cache.append(first.k, first.v);
    const auto [k, v] = cache.dequantize();
    const std::string name = "K" + std::to_string(bits) + "V" + std::to_string(bits) + " " + precision;
    check(name.c_str(), cache.attend(q), by_matmul(q, {k, v}), 5e-4);
    const auto bytes = static_cast<double>(cache.nbytes());
    std::vector<c10::intrusive_ptr<kivi::KVCache>> layers;
    for (int64_t i = 0; i < copies(bytes); i++) layers.push_back(cache.clone());
    const auto count = static_cast<int64_t>(layers.size());
    const Times t =
        time_calls(2 * count, seconds, [&](int64_t i) { layers[static_cast<size_t>(i % count)]->attend(q); });
    if (base == 0) base = t.least;
    print(name.c_str(), t, bytes / 1e6, base);
  }

  const double fp32_bytes = 2.0 * 4 * kKvHeads * kChannels * static_cast<double>(tokens);
  std::vector<Dense> fp32, bf16;
  for (int64_t i = 0; i < copies(fp32_bytes); i++) fp32.push_back({first.k.clone(), first.v.clone()});
  for (int64_t i = 0; i < copies(fp32_bytes / 2); i++)
    bf16.push_back({first.k.to(at::kBFloat16), first.v.to(at::kBFloat16)});
  const at::Tensor q16 = q.to(at::kBFloat16), want = by_matmul(q, first);
  check("SDPA fp32", by_sdpa(q, first), want, 1e-4);
  check("SDPA bf16", by_sdpa(q16, bf16[0]), want, 5e-2);
  const auto run = [&](const char* name, const std::vector<Dense>& layers, double bytes,
                       const std::function<void(const Dense&)>& f) {
    const auto count = static_cast<int64_t>(layers.size());
    print(name, time_calls(2 * count, seconds, [&](int64_t i) { f(layers[static_cast<size_t>(i % count)]); }),
          bytes / 1e6, base);
  };
  run("two fp32 matmuls per kv head", fp32, fp32_bytes, [&](const Dense& d) { by_matmul(q, d); });
  run("SDPA fp32", fp32, fp32_bytes, [&](const Dense& d) { by_sdpa(q, d); });
  run("SDPA bf16", bf16, fp32_bytes / 2, [&](const Dense& d) { by_sdpa(q16, d); });
}

void bench_append(double seconds) {
  constexpr int64_t kTokens = 4096, kLayers = 8;
  std::vector<Dense> layers;
  for (int64_t i = 0; i < kLayers; i++) {
    layers.push_back({at::randn({1, kKvHeads, kTokens, kChannels}), at::randn({1, kKvHeads, kTokens, kChannels})});
  }
  const Dense target{at::empty_like(layers[0].k), at::empty_like(layers[0].v)};
  const auto layer = [&](int64_t i) -> const Dense& { return layers[static_cast<size_t>(i % kLayers)]; };
  const Times append = time_calls(2 * kLayers, seconds, [&](int64_t i) {
    kivi::KVCache cache(kKvHeads, kChannels);
    cache.append(layer(i).k, layer(i).v);
  });
  const Times copy = time_calls(2 * kLayers, seconds, [&](int64_t i) {
    target.k.copy_(layer(i).k);
    target.v.copy_(layer(i).v);
  });
  std::printf("append of %lld fp32 tokens %.2f ms (median %.2f); a copy of K and V %.2f ms (median %.2f): %.2f x\n",
              static_cast<long long>(kTokens), append.least, append.median, copy.least, copy.median,
              append.least / copy.least);
}

}  // namespace

int main(int argc, char** argv) {
  const c10::InferenceMode guard;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  std::printf("Kivi %s, %s on %s\n", kivi::version().c_str(), kivi::cpu_capability().c_str(), cpu_model().c_str());
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    std::printf("---- %d thread%s\n", threads, threads > 1 ? "s" : "");
    for (const int64_t tokens : {4096, 16384}) bench_tokens(tokens, seconds);
    bench_append(seconds);
  }
}
