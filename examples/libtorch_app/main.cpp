// The same decoder layer with a plain fp32 cache and with kivi::KVCache in its place: how far the outputs differ, what
// the caches hold, how long a decode step takes. The exit code tells whether the difference is what it should be.
#include <kivi/kivi.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "decoder_layer.h"

constexpr int64_t kPrompt = 128, kContext = 4096, kSteps = 64;

// Feeds tokens [from, to) in chunks of `chunk` to both layers. Returns |difference| / |output| (largest of each), and
// the seconds that each layer took.
struct Comparison {
  double difference = 0, largest = 0, fp_seconds = 0, kivi_seconds = 0;
};
template <class A, class B>
Comparison compare(A& fp, B& kivi, const torch::Tensor& tokens, int64_t from, int64_t to, int64_t chunk) {
  Comparison sum;
  const auto timed = [](auto& layer, const torch::Tensor& x, double& seconds) {
    const auto start = std::chrono::steady_clock::now();
    auto y = layer.forward(x);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return y;
  };
  for (int64_t at = from; at < to; at += chunk) {
    const auto x = tokens.slice(1, at, std::min(at + chunk, to));
    const auto expected = timed(fp, x, sum.fp_seconds), got = timed(kivi, x, sum.kivi_seconds);
    sum.difference = std::max(sum.difference, (got - expected).abs().max().template item<double>());
    sum.largest = std::max(sum.largest, expected.abs().max().template item<double>());
  }
  return sum;
}

int main() {
  torch::NoGradGuard no_grad;  // a cache holds data, not a graph
  DecoderLayer<FpCache> fp(kContext + kSteps);
  kivi::CacheOptions options;  // 2 bits, groups of 32, the first 4 and the newest 128 tokens exact
  options.num_kv_heads = kKvHeads, options.head_dim = kHeadDim;
  DecoderLayer<kivi::KVCache> kivi(options);

  const auto tokens = torch::randn({1, kContext + kSteps, kHidden});
  // Nothing is quantised up to sink + residual + group - 1 = 163 tokens: a prompt at once, then single tokens.
  const int64_t exact = options.sink_length + options.residual_length + options.group_size - 1;
  const auto prompt = compare(fp, kivi, tokens, 0, kPrompt, kPrompt);
  const auto first = compare(fp, kivi, tokens, kPrompt, exact, 1);
  const bool nothing_quantised = kivi.cache.quantized_length() == 0;
  compare(fp, kivi, tokens, exact, kContext, 512);
  const auto decode = compare(fp, kivi, tokens, kContext, kContext + kSteps, 1);

  std::printf("%s on %s\n", kivi::version().c_str(), kivi::cpu_capability().c_str());
  std::printf("largest output difference, %4lld tokens, none quantised: %.1e of %.2f\n", static_cast<long long>(exact),
              std::max(prompt.difference, first.difference), first.largest);
  std::printf("largest output difference, %lld tokens, %lld quantised: %.1e of %.2f\n",
              static_cast<long long>(kivi.cache.length()), static_cast<long long>(kivi.cache.quantized_length()),
              decode.difference, decode.largest);
  const double fp_bytes = static_cast<double>(fp.cache.nbytes()), kivi_bytes = static_cast<double>(kivi.cache.nbytes());
  std::printf("cache bytes: fp32 %.0f, kivi %.0f (%.1fx less)\n", fp_bytes, kivi_bytes, fp_bytes / kivi_bytes);
  std::printf("layer, ms per decode step: fp32 %.3f, kivi %.3f\n", 1e3 * decode.fp_seconds / kSteps,
              1e3 * decode.kivi_seconds / kSteps);
  const bool good = nothing_quantised && std::max(prompt.difference, first.difference) <= 1e-5 * first.largest &&
                    decode.difference > 0 && decode.difference <= 0.02 * decode.largest && 4 * kivi_bytes < fp_bytes;
  std::puts(good ? "as it should be" : "NOT as it should be");
  return good ? 0 : 1;
}
