// What the demo measures: the text that a cache leads to, speed and bytes, and quality on a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace smollm2 {

// Greedy text after the prompt, written to the standard output as it comes, after the name of the cache. The prompt
// goes through the cache at once, then token by token. `quantized` is the number of tokens that the cache had quantised
// at the end.
struct Generated {
  std::vector<int64_t> ids;
  int64_t quantized = 0;
};
Generated generate(Model* model, const CacheConfig& config, const std::vector<int64_t>& prompt, int64_t max_tokens);

// Decoding one token after another with the last of them at position context - 1.
struct Speed {
  double tokens_per_second = 0;
  int64_t bytes = 0;  // of the caches of all layers
};
constexpr int64_t kShortestContext = 128;
// One vector per config, with one entry per context. `ids` is the text to run through; contexts ascend.
std::vector<std::vector<Speed>> measure_speed(Model* model, const std::vector<CacheConfig>& configs,
                                              const std::vector<int64_t>& ids, const std::vector<int64_t>& contexts);

// Protocol: the text is cut into windows of 2048 tokens. The first 1024 tokens of a window are prefilled exactly, then
// each of the others is fed to the model and its prediction of the next token is scored. A token joins the cache before
// its query attends.
constexpr int64_t kWindow = 2048;
constexpr int64_t kPrefilled = 1024;
constexpr int64_t kMaxWindows = 4;
struct Quality {
  std::vector<double> loss;        // per window: sum of -log p(next token)
  std::vector<double> divergence;  // per window: sum of the Kullback-Leibler divergences from the exact cache, in nats
  std::vector<int64_t> same;       // per window: tokens for which the most likely next token is that of the exact cache
  double bits = 32;                // that a number of a quantised token takes

  double perplexity(std::size_t first, std::size_t count) const;
  double perplexity() const { return perplexity(0, loss.size()); }
  double agreement() const;        // 0 to 1
  double mean_divergence() const;  // nats per token
};
// configs[0] must be the exact cache. All configs run side by side, so that the weights are read once for all of them;
// each has its own caches. `ids` holds at least windows * 2048 + 1 tokens.
std::vector<Quality> measure_quality(Model* model, const std::vector<CacheConfig>& configs,
                                     const std::vector<int64_t>& ids, int64_t windows);

}  // namespace smollm2
