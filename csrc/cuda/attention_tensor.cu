// Which calls the tensor-core kernels can do, and their launch.
#include "cuda/attention.h"
#include "cuda/attention_tensor_configs.h"

namespace kivi::cuda {
namespace {

using tensor::TensorParts;

// Rules that change scores beyond which keys are seen.
bool has_rules(const AttentionParams& p) {
  return p.softcap > 0.0f || p.alibi_slopes != nullptr || p.mask_type != MaskType::kNone;
}

struct Entry {
  bool (*matches)(const AttentionParams&);
  size_t (*shared_bytes)(const AttentionParams&, bool rules);
  cudaError_t (*launch)(const AttentionParams&, bool rules, int64_t parts, float* scratch, cudaStream_t);
};

}  // namespace

namespace tensor {
KIVI_TENSOR_FORMATS(KIVI_TENSOR_DECLARE)
}  // namespace tensor

namespace {

const Entry* find_entry(const AttentionParams& p) {
  using namespace tensor;
#define KIVI_TENSOR_ENTRY(...) \
  {TensorParts<__VA_ARGS__>::matches, TensorParts<__VA_ARGS__>::shared_bytes, TensorParts<__VA_ARGS__>::launch_parts},
  static constexpr Entry kEntries[] = {KIVI_TENSOR_FORMATS(KIVI_TENSOR_ENTRY)};
#undef KIVI_TENSOR_ENTRY
  for (const Entry& e : kEntries) {
    if (e.matches(p)) return &e;
  }
  return nullptr;
}

bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool on_16_bytes(const int64_t (&strides)[3]) {
  return strides[0] % 8 == 0 && strides[1] % 8 == 0 && strides[2] % 8 == 0;
}

// sm_80 has what the kernels need.
bool device_fits(size_t shared_bytes) {
  int device = 0, major = 0, most = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) return false;
  return major >= 8 && shared_bytes <= static_cast<size_t>(most);
}

}  // namespace

bool tensor_parts_support(const AttentionParams& p) {
  if (p.exact) return false;  // asked for fp32
  if (p.q_type != Element::kFloat16 && p.q_type != Element::kBFloat16) return false;
  if (p.cache_type != p.q_type || (p.new_len > 0 && p.new_type != p.q_type)) return false;
  const Entry* const entry = find_entry(p);
  if (entry == nullptr || !device_fits(entry->shared_bytes(p, has_rules(p)))) return false;
  // Copies of 16 bytes. What a cache allocates is aligned; new tokens are the caller's.
  for (const void* pointer : {static_cast<const void*>(p.pool), p.sink_k, p.sink_v, p.window_k, p.window_v}) {
    if (!on_16_bytes(pointer)) return false;
  }
  if (p.new_len > 0) {
    if (!on_16_bytes(p.new_k) || !on_16_bytes(p.new_v)) return false;
    if (!on_16_bytes(p.new_k_strides) || !on_16_bytes(p.new_v_strides)) return false;
  }
  constexpr int64_t kMostBlocks = 65535;  // of the second and third axis of a grid
  const int64_t tiles = ceil_div(query_rows(p), int64_t{tensor::kTileRows});
  return p.batch <= kMostBlocks && p.format.num_kv_heads * tiles <= kMostBlocks && p.q_len <= kMostBlocks;
}

cudaError_t launch_tensor_parts(const AttentionParams& p, int64_t parts, float* scratch, cudaStream_t stream) {
  const Entry* const entry = find_entry(p);
  if (entry == nullptr) return cudaErrorNotSupported;
  return entry->launch(p, has_rules(p), parts, scratch, stream);
}

}  // namespace kivi::cuda
