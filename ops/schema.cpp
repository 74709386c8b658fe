// The table of contents of torch.ops.kivi: the class first, then every schema. Kernels are in the files named after
// what they do; each file registers its own.
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/cuda_library.h"
#include "ops/registration.h"

namespace kivi {

void check_only_copy() {
  TORCH_CHECK(registers_operators(),
              "this is a second copy of libkivi in one process, and the first one has registered ",
              "the operators and the class; load one copy only");
}

bool registers_operators() {
  static const bool first = [] {
    const bool taken = c10::Dispatcher::singleton().findSchema({"kivi::quantize", ""}).has_value();
    if (taken) TORCH_WARN("a second copy of libkivi was loaded; its operators are not registered again");
    return !taken;
  }();
  return first;
}

}  // namespace kivi

TORCH_LIBRARY_FRAGMENT(kivi, m) {
  if (!kivi::registers_operators()) return;

  kivi::register_cache_class(m);

  // Quantisation of any tensor along any axis.
  m.def(
      "quantize("
      "Tensor x, "
      "int axis, "
      "int bits=2, "
      "int group_size=32"
      ") -> (Tensor codes, Tensor scale, Tensor zero)");
  m.def(
      "dequantize("
      "Tensor codes, "
      "Tensor scale, "
      "Tensor zero, "
      "int axis, "
      "int bits, "
      "int group_size, "
      "SymInt size, "
      "ScalarType? dtype=None"  // None: float32
      ") -> Tensor");
  m.def(
      "fake_quantize("
      "Tensor x, "
      "int axis, "
      "int bits=2, "
      "int group_size=32"
      ") -> Tensor");

  // The format of a cache, and what it implies.
  m.def(
      "cache_format("
      "int num_kv_heads, "
      "int head_dim, "
      "int? value_head_dim=None, "
      "int k_bits=2, "
      "int v_bits=2, "
      "int group_size=32, "
      "int residual_length=128, "
      "int sink_length=4, "
      "str scale_dtype=\"float16\", "
      "bool range_search=False, "
      "str recipe=\"\", "
      "float[] k_search=[], "
      "float[] v_search=[], "
      "bool k_bias_correction=False, "
      "bool v_gain_correction=False, "
      "int? v_group_size=None, "
      "bool v_symmetric=False, "
      "bool v_rotated=False, "
      "int[] k_classes=[]"
      ") -> int[]");
  m.def("cache_page_bytes(int[] format) -> int");
  m.def("cache_window_capacity(int[] format) -> int");

  // A cache as plain tensors.
  m.def(
      "cache_append("
      "Tensor(a!) pool, "
      "Tensor block_table, "
      "Tensor(b!) lengths, "
      "Tensor(c!) quantized_lengths, "
      "Tensor(d!) sink_k, "
      "Tensor(e!) sink_v, "
      "Tensor(f!) window_k, "
      "Tensor(g!) window_v, "
      "Tensor k, "
      "Tensor v, "
      "int[] format, "
      "Tensor? new_lengths=None, "
      "Tensor(h!)? overflow=None, "
      "Tensor? k_order=None"
      ") -> ()");
  m.def(
      "cache_attention("
      "Tensor q, "
      "Tensor pool, "
      "Tensor block_table, "
      "Tensor lengths, "
      "Tensor quantized_lengths, "
      "Tensor sink_k, "
      "Tensor sink_v, "
      "Tensor window_k, "
      "Tensor window_v, "
      "int[] format, "
      "Tensor? new_k=None, "
      "Tensor? new_v=None, "
      "Tensor? new_lengths=None, "
      "*, "
      "Tensor? attn_mask=None, "
      "bool is_causal=True, "
      "float? scale=None, "
      "float softcap=0.0, "
      "int window=0, "
      "Tensor? sinks=None, "
      "Tensor? alibi_slopes=None, "
      "str precision=\"fast\", "
      "Tensor? k_order=None"
      ") -> (Tensor out, Tensor lse)");
  m.def(
      "cache_dequantize("
      "Tensor pool, "
      "Tensor block_table, "
      "Tensor lengths, "
      "Tensor quantized_lengths, "
      "Tensor sink_k, "
      "Tensor sink_v, "
      "Tensor window_k, "
      "Tensor window_v, "
      "int[] format, "
      "SymInt length, "
      "Tensor? k_order=None"
      ") -> (Tensor k, Tensor v)");
  m.def(
      "cache_truncate("
      "Tensor pool, "
      "Tensor block_table, "
      "Tensor(a!) lengths, "
      "Tensor(b!) quantized_lengths, "
      "Tensor sink_k, "
      "Tensor sink_v, "
      "Tensor(c!) window_k, "
      "Tensor(d!) window_v, "
      "int[] format, "
      "int length, "
      "Tensor? k_order=None"
      ") -> ()");
  m.def(
      "cache_copy_pages("
      "Tensor(a!) pool, "
      "Tensor source, "
      "Tensor target"
      ") -> ()");
  m.def("cache_widen(Tensor pool, int[] format) -> Tensor");

  // Files of caches, after the class that they name. CONSERVATIVE: what has an effect outside of its results must not
  // be dropped or moved.
  m.def(torch::schema("save_caches(__torch__.torch.classes.kivi.KVCache[] caches, str path) -> ()",
                      c10::AliasAnalysisKind::CONSERVATIVE));
  m.def(torch::schema("load_caches(str path) -> __torch__.torch.classes.kivi.KVCache[]",
                      c10::AliasAnalysisKind::CONSERVATIVE));

  m.def("version() -> str");
  m.def("cpu_capability() -> str");
}

// In this file, after the schemas: the CUDA operators are registered for schemas that exist.
static const bool kCudaWasLookedFor = (kivi::load_cuda_library(), true);
