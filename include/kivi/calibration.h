// Options of its own for the cache of each layer, so that a model loses least for its bits. Some layers bear coarse
// codes well, others do not: measure what each candidate costs each layer on captured queries, keys and values, choose
// one a layer under a budget of bits, and keep the choice in a file.
//
//   std::vector<kivi::LayerCalibration> layers;
//   for (...) layers.push_back(kivi::measure_layer(q, k, v, candidates));   // one call per layer
//   kivi::choose_candidates(layers, 2.75);
//   kivi::save_calibration("calibrated.json", layers, 2.75);
//   std::vector<kivi::CacheOptions> options = kivi::load_calibration("calibrated.json");
//
// The program of examples/calibrate does all of it. Errors are c10::Errors that name the argument and the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kivi/cache.h"
#include "kivi/export.h"

namespace kivi {

// One way to hold the cache of a layer, and what it costs there.
struct LayerCandidate {
  std::string name;  // for those who read the file
  CacheOptions options;
  double error = 0;  // of the attention output: squares of the differences over squares of the exact output
  double bits = 0;   // KVCache::bits_per_element
};

struct LayerCalibration {
  int64_t layer = 0;  // its number in the model
  std::vector<LayerCandidate> candidates;
  double weight = 1;   // of its errors: how much the model makes of them
  int64_t chosen = 0;  // which of them the layer gets
};

// The candidates with their error and bits for one layer. q [B, Hq, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] are
// what the layer's attention got for a text (after RoPE), float32, float16 or bfloat16. Each candidate's cache gets all
// tokens in one append with the queries; then the queries of the second half of the text attend to it, causally. Their
// output is compared with attention over k and v in double. The sizes of heads come from the tensors; num_kv_heads,
// head_dim and value_head_dim of the candidates are replaced. A candidate that quantises none of the T tokens is an
// error.
KIVI_API LayerCalibration measure_layer(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        std::vector<LayerCandidate> candidates);

// Sets `chosen` of every layer: of all choices whose mean bits are at most `budget`, the one with the least sum of
// errors times weights. The mean is over all numbers of K and V, so layers with more or wider heads count for more. The
// choice is exact (dynamic programming over the bits of a token) and always the same. A budget that no choice meets is
// an error that says what the least one is.
KIVI_API void choose_candidates(std::vector<LayerCalibration>& layers, double budget);

// Mean bits of the candidates chosen, over all numbers of K and V.
KIVI_API double mean_bits(const std::vector<LayerCalibration>& layers);

// Writes the choice as JSON: version, budget, mean_bits and layers; of each layer its number, num_kv_heads, head_dim,
// weight, `options` (the other keyword arguments of KVCache, what a recipe sets spelt out), the name, error and bits of
// what was chosen, and name, error and bits of all candidates. A file of this name is replaced as a whole or not at
// all.
KIVI_API void save_calibration(const std::string& path, const std::vector<LayerCalibration>& layers, double budget);

// The options of each layer from such a file, layer by layer. Anything that is not as save_calibration writes it is an
// error that names the file, the key and the value.
KIVI_API std::vector<CacheOptions> load_calibration(const std::string& path);

}  // namespace kivi
