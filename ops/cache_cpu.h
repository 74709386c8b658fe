// A cache's CPU tensors as raw pointers and sizes, with the values in lengths and block_table checked.
#pragma once

#include <ATen/ATen.h>

#include "csrc/cpu/kernels.h"
#include "kivi/ops.h"
#include "ops/cache_args.h"

namespace kivi {

// One of the exact parts: [B, Hkv, slots, channels], contiguous.
struct ExactPart {
  explicit ExactPart(const at::Tensor& t)
      : data(static_cast<char*>(t.data_ptr())),
        token_bytes(static_cast<size_t>(t.size(3)) * t.element_size()),
        head_bytes(t.size(2) * static_cast<int64_t>(token_bytes)),
        batch_bytes(t.size(1) * head_bytes) {}
  char* at(int64_t b, int64_t h, int64_t slot) const {
    return data + b * batch_bytes + h * head_bytes + slot * static_cast<int64_t>(token_bytes);
  }
  char* data;
  size_t token_bytes;
  int64_t head_bytes, batch_bytes;
};

struct CacheView {
  // Needs tensors that check_cache accepts. Throws if lengths, quantized_lengths or the block table name what is not
  // there.
  CacheView(const CacheTensors& cache, const Format& format);

  void check_pages(int64_t b, int64_t quantized_tokens) const;
  // That row b has an order of its keys, if the format has classes of them.
  void check_order(int64_t b) const;
  const int16_t* order(int64_t b, int64_t h) const {
    return k_order == nullptr ? nullptr : k_order + (b * format.num_kv_heads + h) * format.head_dim;
  }
  // The record of quantised token `token`, counted from the end of the sink.
  uint8_t* record(int64_t b, int64_t h, int64_t token) const;

  Format format;
  RecordLayout layout;
  int64_t batch, pages, page_size, max_pages, capacity;
  uint8_t* pool;
  const int32_t* block_table;
  const int64_t* lengths;
  const int64_t* quantized;
  const int16_t* k_order;  // null without classes
  Element type;
  ExactPart sink_k, sink_v, window_k, window_v;
};

}  // namespace kivi
