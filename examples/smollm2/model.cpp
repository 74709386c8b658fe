#include "model.h"

namespace smollm2 {

Model::Model(const std::string& path)
    : module_(torch::jit::load(path, at::kCPU, files_)),
      tokenizer_(files_.at("tokenizer.bin")),
      eval_text_(files_.at("eval.txt")),
      eval_python_(files_.at("python.txt")),
      context_length_(module_.attr("context_length").toInt()) {}

int64_t Model::add_cache(const CacheConfig& config) {
  return call("add_cache", config.k_bits, config.v_bits, config.group_size, config.residual_length, config.sink_length,
              config.range_search, config.precision)
      .toInt();
}

at::Tensor Model::forward(const at::Tensor& ids, int64_t start) {
  return call("forward", ids, start).toTensor().squeeze(1);
}

}  // namespace smollm2
