#include "model.h"

namespace smollm2 {

Model::Model(const std::string& path)
    : module_(torch::jit::load(path, at::kCPU, files_)),
      tokenizer_(files_.at("tokenizer.bin")),
      eval_text_(files_.at("eval.txt")),
      eval_python_(files_.at("python.txt")),
      context_length_(module_.attr("context_length").toInt()) {}

int64_t Model::add_cache(const CacheConfig& config) {
  const int64_t default_bits = 2;  // a recipe sets them
  const int64_t k_bits = config.recipe.empty() ? config.k_bits : default_bits;
  const int64_t v_bits = config.recipe.empty() ? config.v_bits : default_bits;
  c10::optional<int64_t> v_group_size;
  if (config.one_group_per_token) v_group_size = 1024;  // the whole head
  std::vector<double> v_search;
  for (int i = 24; config.wide_search && i >= 15; i--) v_search.push_back(i / 25.0);
  return call("add_cache", k_bits, v_bits, config.group_size, config.residual_length, config.sink_length,
              config.range_search, config.precision, config.recipe, config.scale_dtype, v_group_size,
              config.one_group_per_token, config.v_rotated, config.corrections, v_search)
      .toInt();
}

at::Tensor Model::forward(const at::Tensor& ids, int64_t start) {
  return call("forward", ids, start).toTensor().squeeze(1);
}

}  // namespace smollm2
