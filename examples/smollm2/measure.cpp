#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <stdexcept>

#include "progress.h"

namespace smollm2 {
namespace {

constexpr int64_t kChunk = 512;       // tokens of one prefill call
constexpr int64_t kEndOfText = 0;     // <|endoftext|>
constexpr int64_t kEndOfMessage = 2;  // <|im_end|>
constexpr int64_t kWarmUp = 8;        // decode steps before the clock starts
constexpr int64_t kTimed = 32;        // decode steps of one timing: with groups of 32, one group is quantised in each
constexpr int64_t kTimings = 2;       // the best counts

at::Tensor row(const std::vector<int64_t>& ids) { return torch::tensor(ids, at::kLong).unsqueeze(0); }

// ids [B, T] of positions begin to end - 1 through the lanes in use, in chunks. Returns the logits of the last token.
at::Tensor prefill(Model* model, const at::Tensor& ids, int64_t begin, int64_t end, const std::string& what) {
  Progress progress(what, end - begin);
  at::Tensor logits;
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t stop = std::min(at + kChunk, end);
    logits = model->forward(ids.slice(1, at, stop), at);
    progress.step(stop - begin);
  }
  return logits;
}

// One lane per config; the exact cache is always there and needs none.
std::vector<int64_t> add_lanes(Model* model, const std::vector<CacheConfig>& configs) {
  model->clear_caches();
  std::vector<int64_t> lanes;
  for (const CacheConfig& config : configs) lanes.push_back(config.exact() ? kExactLane : model->add_cache(config));
  return lanes;
}

}  // namespace

Generated generate(Model* model, const CacheConfig& config, const std::vector<int64_t>& prompt, int64_t max_tokens) {
  const int64_t lane = add_lanes(model, {config})[0];
  model->use({lane}, false);
  const auto length = static_cast<int64_t>(prompt.size());
  at::Tensor logits = prefill(model, row(prompt), 0, length, "  reading the prompt with the " + config.name + " cache");
  std::printf("%-12s ", config.name.c_str());  // after the progress line, which rewrites its line
  Generated result;
  for (int64_t position = length; position < model->context_length(); ++position) {
    const auto id = logits.argmax(-1).item<int64_t>();
    result.ids.push_back(id);
    const std::string text = model->tokenizer().decode({id});
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    if (id == kEndOfText || id == kEndOfMessage || static_cast<int64_t>(result.ids.size()) == max_tokens) break;
    logits = model->forward(row({id}), position);
  }
  result.quantized = model->quantized_length(lane);
  model->clear_caches();
  return result;
}

std::vector<std::vector<Speed>> measure_speed(Model* model, const std::vector<CacheConfig>& configs,
                                              const std::vector<int64_t>& ids, const std::vector<int64_t>& contexts) {
  const std::vector<int64_t> lanes = add_lanes(model, configs);
  const at::Tensor text = row(ids);
  std::vector<std::vector<Speed>> result(configs.size());
  int64_t filled = 0;
  for (const int64_t context : contexts) {
    // Every cache starts from the same exact prompt, which is computed once.
    const int64_t begin = context - kWarmUp - kTimed * kTimings;
    if (begin < filled || context > text.size(1)) throw std::invalid_argument("contexts must ascend and fit the text");
    model->use({kExactLane}, false);
    prefill(model, text, filled, begin, "  filling the context with " + std::to_string(context) + " tokens");
    filled = begin;
    Progress progress("  decoding at " + std::to_string(context), static_cast<int64_t>(configs.size()));
    for (std::size_t i = 0; i < configs.size(); ++i) {
      if (lanes[i] != kExactLane) model->fill(lanes[i]);
      model->use({lanes[i]}, false);
      int64_t position = begin;
      const auto decode = [&](int64_t steps) {
        const auto start = std::chrono::steady_clock::now();
        for (int64_t step = 0; step < steps; ++step, ++position)
          model->forward(text.slice(1, position, position + 1), position);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      };
      decode(kWarmUp);
      double best = decode(kTimed);
      for (int64_t timing = 1; timing < kTimings; ++timing) best = std::min(best, decode(kTimed));
      result[i].push_back({static_cast<double>(kTimed) / best, model->nbytes(lanes[i])});
      if (lanes[i] == kExactLane) {
        model->truncate_exact(filled);
      } else {
        model->reset_lane(lanes[i]);
      }
      progress.step(static_cast<int64_t>(i) + 1);
    }
  }
  model->clear_caches();
  return result;
}

double Quality::perplexity(std::size_t first, std::size_t count) const {
  const auto begin = loss.begin() + static_cast<std::ptrdiff_t>(first);
  const double sum = std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(count), 0.0);
  return std::exp(sum / static_cast<double>(count * (kWindow - kPrefilled)));
}

double Quality::mean_divergence() const {
  const double sum = std::accumulate(divergence.begin(), divergence.end(), 0.0);
  return sum / static_cast<double>(static_cast<int64_t>(divergence.size()) * (kWindow - kPrefilled));
}

double Quality::agreement() const {
  const auto sum = static_cast<double>(std::accumulate(same.begin(), same.end(), int64_t{0}));
  return sum / static_cast<double>(static_cast<int64_t>(same.size()) * (kWindow - kPrefilled));
}

std::vector<Quality> measure_quality(Model* model, const std::vector<CacheConfig>& configs,
                                     const std::vector<int64_t>& ids, int64_t windows) {
  if (configs.empty() || !configs[0].exact()) throw std::invalid_argument("the first config must be the exact cache");
  if (static_cast<int64_t>(ids.size()) < windows * kWindow + 1) throw std::invalid_argument("the text is too short");
  const std::vector<int64_t> lanes = add_lanes(model, configs);
  const at::Tensor all = torch::tensor(ids, at::kLong);
  const at::Tensor inputs = all.slice(0, 0, windows * kWindow).view({windows, kWindow});
  const at::Tensor targets = all.slice(0, 1, windows * kWindow + 1).view({windows, kWindow});

  model->use({kExactLane}, true);
  prefill(model, inputs, 0, kPrefilled, "  quality: prefilling");
  for (const int64_t lane : lanes) {
    if (lane != kExactLane) model->fill(lane);
  }
  model->use(lanes, true);
  const auto count = static_cast<int64_t>(configs.size());
  at::Tensor loss = torch::zeros({count, windows}, at::kDouble);
  at::Tensor divergence = torch::zeros({count, windows}, at::kDouble);
  at::Tensor same = torch::zeros({count, windows}, at::kLong);
  Progress progress("  quality: decoding " + std::to_string(kWindow - kPrefilled) + " tokens", kWindow - kPrefilled);
  for (int64_t position = kPrefilled; position < kWindow; ++position) {
    const at::Tensor logits =
        model->forward(inputs.slice(1, position, position + 1), position).view({count, windows, -1});
    const at::Tensor target = targets.select(1, position).expand({count, windows}).unsqueeze(-1);
    const at::Tensor normalizer = logits.logsumexp(-1, /*keepdim=*/true);
    loss += (normalizer - logits.gather(-1, target)).squeeze(-1).to(at::kDouble);
    // sum p log(p / q), where p is what the exact cache predicts
    const at::Tensor exact_log = logits[0] - normalizer[0];
    const at::Tensor exact = exact_log.exp();
    for (int64_t i = 1; i < count; ++i) {
      divergence[i] += (exact * (exact_log - (logits[i] - normalizer[i]))).sum(-1).to(at::kDouble);
    }
    const at::Tensor greedy = logits.argmax(-1);
    same += greedy.eq(greedy[0]).to(at::kLong);
    progress.step(position - kPrefilled + 1);
  }

  std::vector<Quality> result(configs.size());
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t window = 0; window < windows; ++window) {
      result[static_cast<std::size_t>(i)].loss.push_back(loss[i][window].item<double>());
      result[static_cast<std::size_t>(i)].divergence.push_back(divergence[i][window].item<double>());
      result[static_cast<std::size_t>(i)].same.push_back(same[i][window].item<int64_t>());
    }
    const auto lane = lanes[static_cast<std::size_t>(i)];
    if (lane != kExactLane) result[static_cast<std::size_t>(i)].bits = model->bits_per_element(lane);
  }
  model->clear_caches();
  return result;
}

}  // namespace smollm2
