// Measures candidates for the cache of a layer and chooses one per layer; see kivi/calibration.h. The files are
// calibration_file.cpp's.
#include "kivi/calibration.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "ops/checks.h"

namespace kivi {
namespace {

// Causal attention of the last `rows` queries, in double; one head at a time, so that one head's scores are all that is
// held. q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, rows, Dv].
at::Tensor exact_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t rows) {
  const int64_t tokens = k.size(2), shared = q.size(1) / k.size(1);  // query heads of one kv head
  const at::Tensor later = at::ones({rows, tokens}, at::kBool).triu(tokens - rows + 1);
  at::Tensor out = at::empty({q.size(0), q.size(1), rows, v.size(3)}, at::kDouble);
  for (int64_t b = 0; b < q.size(0); b++) {
    for (int64_t h = 0; h < q.size(1); h++) {
      const at::Tensor queries = q[b][h].narrow(0, tokens - rows, rows).to(at::kDouble);
      const at::Tensor keys = k[b][h / shared].to(at::kDouble), values = v[b][h / shared].to(at::kDouble);
      at::Tensor scores = at::matmul(queries, keys.t()) / std::sqrt(static_cast<double>(q.size(3)));
      scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
      out[b][h].copy_(at::matmul(at::softmax(scores, -1), values));
    }
  }
  return out;
}

void check_capture(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_rank("q", q, 4, "[B, Hq, T, D]");
  check_rank("k", k, 4, "[B, Hkv, T, D]");
  check_rank("v", v, 4, "[B, Hkv, T, Dv]");
  check_floating("q", q), check_floating("k", k), check_floating("v", v);
  for (const at::Tensor* t : {&q, &v}) {
    const char* name = t == &q ? "q" : "v";
    check_size(name, *t, 0, "batch size", k.size(0), "k has");
    check_size(name, *t, 2, "tokens", k.size(2), "k has");
  }
  check_size("q", q, 3, "head_dim", k.size(3), "k has");
  check_size("v", v, 1, "head count", k.size(1), "k has");
  TORCH_CHECK_VALUE(k.numel() > 0 && v.numel() > 0, "k and v must not be empty, got sizes ", k.sizes(), " and ",
                    v.sizes());
  TORCH_CHECK_VALUE(q.size(1) > 0 && q.size(1) % k.size(1) == 0, "q has head count ", q.size(1),
                    ", which must be a multiple of that of k, ", k.size(1));
}

// Numbers of K and V in a token, all kv heads.
int64_t numbers_of(const CacheOptions& o) {
  return o.num_kv_heads * (o.head_dim + o.value_head_dim.value_or(o.head_dim));
}

// Bits of a token, all kv heads: whole, since a record is made of whole bytes for at most 128 tokens, a
// multiple of 32.
int64_t token_bits(const LayerCandidate& c) {
  return std::llround(c.bits * static_cast<double>(numbers_of(c.options)));
}

void check_layers(const std::vector<LayerCalibration>& layers) {
  TORCH_CHECK_VALUE(!layers.empty(), "layers must hold at least one layer, got 0");
  for (size_t l = 0; l < layers.size(); l++) {
    const auto& candidates = layers[l].candidates;
    TORCH_CHECK_VALUE(!candidates.empty() && candidates.size() <= std::numeric_limits<uint8_t>::max(), "layers[", l,
                      "] must have 1 to ", int{std::numeric_limits<uint8_t>::max()}, " candidates, got ",
                      candidates.size());
    TORCH_CHECK_VALUE(std::isfinite(layers[l].weight) && layers[l].weight >= 0, "layers[", l,
                      "] must have a finite weight of 0 or more, got ", layers[l].weight);
    TORCH_CHECK_VALUE(numbers_of(candidates[0].options) > 0, "layers[", l, "]: candidate \"", candidates[0].name,
                      "\" has num_kv_heads ", candidates[0].options.num_kv_heads, " and head_dim ",
                      candidates[0].options.head_dim, "; measure_layer sets them");
    for (const LayerCandidate& c : candidates) {
      TORCH_CHECK_VALUE(std::isfinite(c.error) && c.error >= 0 && c.bits > 0 && c.bits <= 1024, "layers[", l,
                        "]: candidate \"", c.name, "\" must have an error of 0 or more and bits of 0 to 1024, got ",
                        c.error, " and ", c.bits);
      TORCH_CHECK_VALUE(numbers_of(c.options) == numbers_of(candidates[0].options), "layers[", l, "]: candidate \"",
                        c.name, "\" is for ", numbers_of(c.options), " numbers a token, but \"", candidates[0].name,
                        "\" for ", numbers_of(candidates[0].options));
    }
  }
}

}  // namespace

LayerCalibration measure_layer(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               std::vector<LayerCandidate> candidates) {
  const at::NoGradGuard no_grad;
  check_capture(q, k, v);
  const int64_t tokens = k.size(2), rows = tokens - tokens / 2;
  const at::Tensor exact = exact_attention(q, k, v, rows);
  const auto squares = exact.square().sum().item<double>();
  TORCH_CHECK_VALUE(std::isfinite(squares) && squares > 0,
                    "q, k and v must give finite attention outputs that are not all 0, got a sum of squares of ",
                    squares);
  // In float32 the caches hold the exact tokens as they are, and outputs are not rounded to the type of q.
  const at::Tensor qf = q.to(at::kFloat), kf = k.to(at::kFloat), vf = v.to(at::kFloat);
  const at::Tensor asked = qf.narrow(2, tokens - rows, rows);
  for (LayerCandidate& c : candidates) {
    c.options.num_kv_heads = k.size(1);
    c.options.head_dim = k.size(3);
    c.options.value_head_dim = v.size(3);
    KVCache cache(c.options);
    cache.append(kf, vf, std::nullopt, qf);
    TORCH_CHECK_VALUE(cache.quantized_length() > 0, "k has ", tokens, " tokens, of which candidate \"", c.name,
                      "\" quantises none: its sink_length is ", c.options.sink_length, ", its residual_length ",
                      c.options.residual_length, ", its group_size ", c.options.group_size);
    c.error = (cache.attend(asked).to(at::kDouble) - exact).square().sum().item<double>() / squares;
    c.bits = cache.bits_per_element();
  }
  LayerCalibration layer;
  layer.candidates = std::move(candidates);
  return layer;
}

void choose_candidates(std::vector<LayerCalibration>& layers, double budget) {
  check_finite("budget", budget);
  check_layers(layers);
  // What a choice takes beyond the smallest candidate of every layer, in the largest unit that divides it all.
  int64_t numbers = 0, least = 0, most = 0, unit = 0;
  std::vector<std::vector<int64_t>> extra(layers.size());
  for (size_t l = 0; l < layers.size(); l++) {
    for (const LayerCandidate& c : layers[l].candidates) extra[l].push_back(token_bits(c));
    const auto [low, high] = std::minmax_element(extra[l].begin(), extra[l].end());
    const int64_t smallest = *low;
    numbers += numbers_of(layers[l].candidates[0].options);
    least += smallest;
    most += *high - smallest;
    for (int64_t& bits : extra[l]) bits -= smallest, unit = std::gcd(unit, bits);
  }
  unit = std::max<int64_t>(unit, 1);
  // A budget such as 2.7 bits is a little less than it says as a double; a millionth of a bit makes up for that.
  const double bits = std::floor(budget * static_cast<double>(numbers) + 1e-6);
  TORCH_CHECK_VALUE(bits >= static_cast<double>(least), "budget must be at least ",
                    static_cast<double>(least) / static_cast<double>(numbers),
                    " bits, the mean with the smallest candidate in every layer, got ", budget);
  const double spare = std::min(bits - static_cast<double>(least), static_cast<double>(most));
  const auto units = static_cast<size_t>(static_cast<int64_t>(spare) / unit);

  // best[u]: the least sum of errors of the layers so far with at most u units; with[l][u]: the candidate of layer l in
  // it. Of equal sums the one with fewer bits in the later layer, then the earlier candidate.
  std::vector<double> best(units + 1, 0.0), next(units + 1);
  std::vector<std::vector<uint8_t>> with(layers.size(), std::vector<uint8_t>(units + 1));
  for (size_t l = 0; l < layers.size(); l++) {
    std::vector<size_t> order(extra[l].size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return extra[l][a] < extra[l][b]; });
    std::fill(next.begin(), next.end(), std::numeric_limits<double>::infinity());
    for (const size_t c : order) {
      const double error = layers[l].weight * layers[l].candidates[c].error;
      for (auto from = static_cast<size_t>(extra[l][c] / unit), u = from; u <= units; u++) {
        const double sum = best[u - from] + error;
        if (sum < next[u]) next[u] = sum, with[l][u] = static_cast<uint8_t>(c);
      }
    }
    best.swap(next);
  }
  size_t u = units;
  for (size_t l = layers.size(); l-- > 0;) {
    layers[l].chosen = with[l][u];
    u -= static_cast<size_t>(extra[l][with[l][u]] / unit);
  }
}

double mean_bits(const std::vector<LayerCalibration>& layers) {
  check_layers(layers);
  int64_t bits = 0, numbers = 0;
  for (size_t l = 0; l < layers.size(); l++) {
    const auto& candidates = layers[l].candidates;
    const int64_t chosen = layers[l].chosen;
    TORCH_CHECK_INDEX(chosen >= 0 && chosen < static_cast<int64_t>(candidates.size()), "chosen of layers[", l,
                      "] must be 0 to ", candidates.size() - 1, ", got ", chosen);
    bits += token_bits(candidates[static_cast<size_t>(chosen)]);
    numbers += numbers_of(candidates[0].options);
  }
  return static_cast<double>(bits) / static_cast<double>(numbers);
}

}  // namespace kivi
