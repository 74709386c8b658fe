// The CUDA kernels as host functions: the same operators as csrc/cpu on the same records, to the bit where the CPU's
// are defined to the bit. No torch header: pointers to device memory, sizes, strides in elements, a stream. Every
// function only launches (nothing here waits for the device), so that all of them can be captured in a graph; lengths
// and block table are read on the device when the kernels run. Arguments are checked by the caller (ops/checks.h). The
// result is the error of the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "format/params.h"
#include "kivi/format.h"

namespace kivi::cuda {

// A cache's tensors (kivi::CacheTensors), contiguous.
struct CacheParams {
  Format format;
  RecordLayout layout;
  int64_t batch;
  uint8_t* pool;  // [pages][page_bytes]
  int64_t pages;
  int64_t page_bytes;
  const int32_t* block_table;  // [B][max_pages]
  int64_t max_pages;
  int64_t* lengths;            // [B]
  int64_t* quantized_lengths;  // [B]
  const int16_t* k_order;      // with classes of keys: [B][Hkv][D], else null
  void* sink_k;                // [B][Hkv][S][D]
  void* sink_v;                // [B][Hkv][S][Dv]
  void* window_k;              // [B][Hkv][window_capacity][D]
  void* window_v;
  Element type;  // of sink and window
};

struct AppendParams {
  CacheParams cache;
  const void* k;  // [B][Hkv][T][D] of the cache's type, channels contiguous
  const void* v;
  int64_t k_strides[3];  // batch, head, token
  int64_t v_strides[3];
  int64_t tokens;              // T
  const int64_t* new_lengths;  // [B], each 0 to T; null: T for every row
  // Where a scale or zero does not fit the float8 or float16 of the format: with `overflow` (int32 [1]) that becomes 1
  // and nothing that the cache holds changes, also not in later calls until the caller clears it; without it, such a
  // group is stored with the nearest scale and zero that fit (`saturated` in format/scales.h).
  int32_t* overflow;
};
// Appends the tokens, quantises every group that leaves the window, and moves the lengths on. A row whose pages are
// missing from the block table ends the kernel with an error of the device.
cudaError_t append(const AppendParams& params, cudaStream_t stream);

// Tokens [0, length) of every row into k [B][Hkv][length][D] and v [..][Dv], of the cache's type; 0 past a row's
// length.
cudaError_t dequantize_cache(const CacheParams& cache, int64_t length, void* k, void* v, cudaStream_t stream);

// Keeps the first `length` tokens of every row that has more; of a group that is cut, the kept tokens go dequantised
// into the window.
cudaError_t truncate(const CacheParams& cache, int64_t length, cudaStream_t stream);

// Page source[i] to page target[i], i < count; no page may be both.
cudaError_t copy_pages(uint8_t* pool, int64_t pages, int64_t page_bytes, const int64_t* source, const int64_t* target,
                       int64_t count, cudaStream_t stream);

// `records` records of the format `from` as records of `to`, which is `from` widened.
cudaError_t widen(const Format& from, const uint8_t* records, const Format& to, uint8_t* out, int64_t count,
                  cudaStream_t stream);

// The dense operators; p.x and the rest point to device memory.
cudaError_t quantize(const QuantizeParams& params, cudaStream_t stream);
cudaError_t dequantize(const DequantizeParams& params, cudaStream_t stream);

// Bytes of scratch memory that `attention` needs, aligned to 256; it may hold anything and is free again when the
// launched work is done. Depends on shapes and on the width of the block table, not on lengths.
int64_t attention_scratch_bytes(const AttentionParams& params);
// Attention over the cache and new tokens (AttentionParams). Launches a kernel for the parts and one that merges them.
// Results do not depend on what else is in the batch nor on the device: the keys of a row are divided by its own length
// alone.
cudaError_t attention(const AttentionParams& params, void* scratch, cudaStream_t stream);

}  // namespace kivi::cuda
