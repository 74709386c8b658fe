#include "model.h"

namespace smollm2 {

Model::Model(const std::string& path)
    : module_(torch::jit::load(path, at::kCPU, files_)),
      tokenizer_(files_.at("tokenizer.bin")),
      eval_text_(files_.at("eval.txt")),
      eval_python_(files_.at("python.txt")),
      context_length_(module_.attr("context_length").toInt()) {}

kivi::CacheOptions cache_options(const CacheConfig& config, int64_t num_kv_heads, int64_t head_dim) {
  kivi::CacheOptions o;
  o.num_kv_heads = num_kv_heads;
  o.head_dim = head_dim;
  if (config.recipe.empty()) o.k_bits = config.k_bits, o.v_bits = config.v_bits;  // a recipe sets them
  o.group_size = config.group_size;
  o.residual_length = config.residual_length;
  o.sink_length = config.sink_length;
  o.precision = config.precision;
  o.range_search = config.range_search;
  o.scale_dtype = config.scale_dtype;
  o.recipe = config.recipe;
  for (int i = 24; config.wide_search && i >= 15; i--) o.v_search.push_back(i / 25.0);
  o.k_bias_correction = o.v_gain_correction = config.corrections;
  if (config.one_group_per_token) o.v_group_size = head_dim;
  o.v_symmetric = config.one_group_per_token;
  o.v_rotated = config.v_rotated;
  return o;
}

int64_t Model::add_cache(const CacheConfig& config) {
  const int64_t num_layers = module_.attr("num_layers").toInt(), num_kv_heads = module_.attr("num_kv_heads").toInt(),
                head_dim = module_.attr("head_dim").toInt();
  std::vector<kivi::CacheOptions> layers = config.layers;
  if (layers.empty()) {
    layers.assign(static_cast<std::size_t>(num_layers), cache_options(config, num_kv_heads, head_dim));
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(layers.size()) == num_layers, config.name, " is for ", layers.size(),
                    " layers, but the model has ", num_layers);
  int64_t lane = 0;
  for (int64_t i = 0; i < num_layers; ++i) {
    const kivi::CacheOptions& o = layers[static_cast<std::size_t>(i)];
    TORCH_CHECK_VALUE(
        o.num_kv_heads == num_kv_heads && o.head_dim == head_dim && o.value_head_dim.value_or(head_dim) == head_dim,
        config.name, " is for ", o.num_kv_heads, " kv heads of ", o.head_dim, " channels, but the model has ",
        num_kv_heads, " of ", head_dim);
    lane = call("add_cache", i, o.k_bits, o.v_bits, o.group_size, o.residual_length, o.sink_length, o.precision,
                o.range_search, o.scale_dtype, o.recipe, o.k_search, o.v_search, o.k_bias_correction,
                o.v_gain_correction, o.v_group_size, o.v_symmetric, o.v_rotated, o.k_classes)
               .toInt();
  }
  return lane;
}

std::vector<std::tuple<at::Tensor, at::Tensor, at::Tensor>> Model::captured() {
  std::vector<std::tuple<at::Tensor, at::Tensor, at::Tensor>> layers;
  const c10::IValue result = call("captured");
  for (const c10::IValue& layer : result.toListRef()) {
    const auto& tensors = layer.toTupleRef().elements();
    layers.emplace_back(tensors[0].toTensor(), tensors[1].toTensor(), tensors[2].toTensor());
  }
  return layers;
}

at::Tensor Model::forward(const at::Tensor& ids, int64_t start) {
  return call("forward", ids, start).toTensor().squeeze(1);
}

}  // namespace smollm2
