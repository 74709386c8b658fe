// The exported SmolLM2 as a C++ object: a TorchScript module, its tokeniser and its evaluation text. Of Kivi only the
// options are known here: the caches live in the module, which calls them as torch.classes.kivi.KVCache.
#pragma once

#include <kivi/calibration.h>
#include <torch/script.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tokenizer.h"

namespace smollm2 {

// How one lane of the model holds its cache, as kivi::CacheOptions has it. bits of 0 and no recipe mean the plain
// float32 cache.
struct CacheConfig {
  std::string name = "fp32";
  int64_t k_bits = 0;
  int64_t v_bits = 0;
  int64_t group_size = 32;
  int64_t residual_length = 128;
  int64_t sink_length = 4;
  bool range_search = false;
  std::string recipe = "";
  std::string scale_dtype = "float16";
  bool one_group_per_token = false;  // of V: symmetric
  bool v_rotated = false;
  bool corrections = false;  // of the bias of K and the gain of V
  bool wide_search = false;  // of V
  std::string precision = "fast";
  std::vector<kivi::CacheOptions> layers;  // of a calibration: the options of each layer, which count instead

  bool exact() const { return k_bits == 0 && recipe.empty() && layers.empty(); }
};

// The same for one layer.
kivi::CacheOptions cache_options(const CacheConfig& config, int64_t num_kv_heads, int64_t head_dim);

constexpr int64_t kExactLane = -1;

class Model {
 public:
  // Throws c10::Error if the file is not the one that export.py writes.
  explicit Model(const std::string& path);

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::string& eval_text() const { return eval_text_; }
  const std::string& eval_python() const { return eval_python_; }
  int64_t context_length() const { return context_length_; }

  // Adds a cache to every layer and returns its lane. Throws c10::Error if a calibration is not for such a model.
  int64_t add_cache(const CacheConfig& config);
  void clear_caches() { call("clear_caches"); }
  void use(const std::vector<int64_t>& lanes, bool append_first) { call("use", lanes, append_first); }
  void fill(int64_t lane) { call("fill", lane); }
  void reset() { call("reset"); }
  void reset_lane(int64_t lane) { call("reset_lane", lane); }
  void truncate_exact(int64_t length) { call("truncate_exact", length); }
  int64_t nbytes(int64_t lane) { return call("nbytes", lane).toInt(); }
  double bits_per_element(int64_t lane) { return call("bits_per_element", lane).toDouble(); }
  int64_t quantized_length(int64_t lane) { return call("quantized_length", lane).toInt(); }

  // From here on the exact lane keeps its queries too. What it holds, layer by layer: q [B, Hq, T, D], k and v
  // [B, Hkv, T, D], after RoPE.
  void keep_queries(bool keep) { call("keep_queries", keep); }
  std::vector<std::tuple<at::Tensor, at::Tensor, at::Tensor>> captured();

  // ids [B, T] at positions start, start + 1, ...: logits of the last token, [lanes * B, vocabulary].
  at::Tensor forward(const at::Tensor& ids, int64_t start);

  // For tests that look into the caches of the layers. Copies of it share them.
  torch::jit::Module module() const { return module_; }

 private:
  template <typename... Arguments>
  c10::IValue call(const char* method, const Arguments&... arguments) {
    return module_.get_method(method)({c10::IValue(arguments)...});
  }

  // Loading fills these on the way, so they come first.
  torch::jit::ExtraFilesMap files_ = {{"tokenizer.bin", ""}, {"eval.txt", ""}, {"python.txt", ""}};
  torch::jit::Module module_;
  Tokenizer tokenizer_;
  std::string eval_text_, eval_python_;
  int64_t context_length_;
};

}  // namespace smollm2
