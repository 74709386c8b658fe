// torch.classes.kivi.KVCache: kivi::KVCache with the argument names and defaults of C++, for TorchScript and Python.
#include <torch/custom_class.h>

#include "kivi/cache.h"
#include "ops/registration.h"

namespace kivi {
namespace {

using Cache = c10::intrusive_ptr<KVCache>;
using OptionalTensor = std::optional<at::Tensor>;
using torch::arg;

AttentionOptions attention_options(const OptionalTensor& attn_mask, bool is_causal, std::optional<double> scale,
                                   double softcap, int64_t window, const OptionalTensor& sinks,
                                   const OptionalTensor& alibi_slopes) {
  AttentionOptions o;
  o.attn_mask = attn_mask;
  o.is_causal = is_causal;
  o.scale = scale;
  o.softcap = softcap;
  o.window = window;
  o.sinks = sinks;
  o.alibi_slopes = alibi_slopes;
  return o;
}

Cache make_cache(int64_t num_kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim, int64_t k_bits,
                 int64_t v_bits, int64_t group_size, int64_t residual_length, int64_t sink_length,
                 const std::string& precision, bool range_search, const std::string& scale_dtype,
                 const std::string& recipe, const std::vector<double>& k_search, const std::vector<double>& v_search,
                 bool k_bias_correction, bool v_gain_correction, std::optional<int64_t> v_group_size, bool v_symmetric,
                 bool v_rotated, const std::vector<int64_t>& k_classes) {
  CacheOptions o{num_kv_heads,    head_dim,    value_head_dim, k_bits,       v_bits,     group_size,
                 residual_length, sink_length, precision,      range_search, scale_dtype};
  o.recipe = recipe;
  o.k_search = k_search;
  o.v_search = v_search;
  o.k_bias_correction = k_bias_correction;
  o.v_gain_correction = v_gain_correction;
  o.v_group_size = v_group_size;
  o.v_symmetric = v_symmetric;
  o.v_rotated = v_rotated;
  o.k_classes = k_classes;
  return c10::make_intrusive<KVCache>(o);
}

at::Tensor forward(const Cache& self, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const OptionalTensor& attn_mask, bool is_causal, std::optional<double> scale, double softcap,
                   int64_t window, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                   const OptionalTensor& lengths) {
  return self->forward(q, k, v, attention_options(attn_mask, is_causal, scale, softcap, window, sinks, alibi_slopes),
                       lengths);
}

at::Tensor attend(const Cache& self, const at::Tensor& q, const OptionalTensor& attn_mask, bool is_causal,
                  std::optional<double> scale, double softcap, int64_t window, const OptionalTensor& sinks,
                  const OptionalTensor& alibi_slopes) {
  return self->attend(q, attention_options(attn_mask, is_causal, scale, softcap, window, sinks, alibi_slopes));
}

std::tuple<at::Tensor, at::Tensor> attend_with_lse(const Cache& self, const at::Tensor& q,
                                                   const OptionalTensor& attn_mask, bool is_causal,
                                                   std::optional<double> scale, double softcap, int64_t window,
                                                   const OptionalTensor& sinks, const OptionalTensor& alibi_slopes) {
  return self->attend_with_lse(q, attention_options(attn_mask, is_causal, scale, softcap, window, sinks, alibi_slopes));
}

}  // namespace

void register_cache_class(torch::Library& m) {
  auto cls = m.class_<KVCache>("KVCache");
  cls.def(torch::init(&make_cache), "",
          {arg("num_kv_heads"),
           arg("head_dim"),
           arg("value_head_dim") = arg::none(),
           arg("k_bits") = 2,
           arg("v_bits") = 2,
           arg("group_size") = 32,
           arg("residual_length") = 128,
           arg("sink_length") = 4,
           arg("precision") = "fast",
           arg("range_search") = false,
           arg("scale_dtype") = "float16",
           arg("recipe") = "",
           arg("k_search") = std::vector<double>(),
           arg("v_search") = std::vector<double>(),
           arg("k_bias_correction") = false,
           arg("v_gain_correction") = false,
           arg("v_group_size") = arg::none(),
           arg("v_symmetric") = false,
           arg("v_rotated") = false,
           arg("k_classes") = std::vector<int64_t>()});
  cls.def("forward", &forward, "",
          {arg("q"), arg("k"), arg("v"), arg("attn_mask") = arg::none(), arg("is_causal") = true,
           arg("scale") = arg::none(), arg("softcap") = 0.0, arg("window") = 0, arg("sinks") = arg::none(),
           arg("alibi_slopes") = arg::none(), arg("lengths") = arg::none()});
  cls.def("attend", &attend, "",
          {arg("q"), arg("attn_mask") = arg::none(), arg("is_causal") = true, arg("scale") = arg::none(),
           arg("softcap") = 0.0, arg("window") = 0, arg("sinks") = arg::none(), arg("alibi_slopes") = arg::none()});
  cls.def("attend_with_lse", &attend_with_lse, "",
          {arg("q"), arg("attn_mask") = arg::none(), arg("is_causal") = true, arg("scale") = arg::none(),
           arg("softcap") = 0.0, arg("window") = 0, arg("sinks") = arg::none(), arg("alibi_slopes") = arg::none()});
  cls.def("append",
          [](const Cache& self, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& lengths,
             const OptionalTensor& q) { self->append(k, v, lengths, q); },
          "", {arg("k"), arg("v"), arg("lengths") = arg::none(), arg("q") = arg::none()});
  cls.def("length", [](const Cache& self) { return self->length(); });
  cls.def("lengths", [](const Cache& self) { return self->lengths(); });
  cls.def("quantized_length", [](const Cache& self) { return self->quantized_length(); });
  cls.def("quantized_lengths", [](const Cache& self) { return self->quantized_lengths(); });
  cls.def("batch_size", [](const Cache& self) { return self->batch_size(); });
  cls.def("nbytes", [](const Cache& self) { return self->nbytes(); });
  cls.def("bits_per_element", [](const Cache& self) { return self->bits_per_element(); });
  cls.def("dequantize", [](const Cache& self) { return self->dequantize(); });
  cls.def("key_order", [](const Cache& self) { return self->key_order(); });
  cls.def("set_key_order", [](const Cache& self, const at::Tensor& order) { self->set_key_order(order); }, "",
          {arg("order")});
  cls.def("truncate", [](const Cache& self, int64_t n) { self->truncate(n); }, "", {arg("n")});
  cls.def("reorder", [](const Cache& self, const at::Tensor& rows) { self->reorder(rows); }, "", {arg("rows")});
  cls.def("select", [](const Cache& self, const at::Tensor& rows) { self->select(rows); }, "", {arg("rows")});
  cls.def("repeat_interleave", [](const Cache& self, int64_t n) { self->repeat_interleave(n); }, "", {arg("n")});
  cls.def("reset", [](const Cache& self) { self->reset(); });
  cls.def("reserve", [](const Cache& self, int64_t tokens) { self->reserve(tokens); }, "", {arg("tokens")});
  cls.def("clone", [](const Cache& self) { return self->clone(); });
  cls.def("to", [](const Cache& self, at::Device device) { return self->to(device); }, "", {arg("device")});
  cls.def_pickle([](const Cache& self) { return self->state(); },
                 [](const KVCache::State& state) { return KVCache::from_state(state); });
}

}  // namespace kivi
