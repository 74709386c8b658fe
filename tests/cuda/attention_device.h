// An attention call of the CPU tests on the device: every array that its parameters point to is copied to device memory
// of exactly the size that the call may look at.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_memory.h"
#include "cuda/kernels.h"
#include "format/half.h"
#include "format/keys.h"

namespace kivi::cuda {

struct AttentionOutput {
  std::vector<float> out;  // [B][Hq][Lq][Dv]
  std::vector<float> lse;  // [B][Hq][Lq]
};

class DeviceAttention {
 public:
  AttentionParams params;  // pointers to device memory
  DeviceArray<uint8_t> pool;
  DeviceArray<int32_t> block_table;
  DeviceArray<int64_t> lengths, quantized_lengths, new_lengths;
  DeviceArray<uint8_t> mask, new_k, new_v;

  // `wider`: entries that the block table of each row has beyond what the call needs, all -1.
  explicit DeviceAttention(const AttentionParams& host, int64_t wider = 0) : params(host) {
    const Format& f = host.format;
    const int64_t batch = host.batch, heads = f.num_kv_heads, stride = host.block_table_stride;
    copy_bytes(
        q_, params.q, element_bytes(host.q_type),
        reach({{batch, host.q_batch_stride}, {host.num_heads, host.q_head_stride}, {host.q_len, host.q_row_stride}},
              f.head_dim));
    int64_t pages = 0;
    std::vector<int32_t> table(static_cast<size_t>(batch * (stride + wider)), -1);
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t i = 0; i < stride; i++) {
        const int32_t page = host.block_table[b * stride + i];
        table[static_cast<size_t>(b * (stride + wider) + i)] = page;
        pages = std::max<int64_t>(pages, page + 1);
      }
    }
    copy_bytes(pool, params.pool, 1, pages * host.page_bytes);
    block_table = DeviceArray<int32_t>(table);
    params.block_table = block_table.data();
    params.block_table_stride = stride + wider;
    if (host.k_order != nullptr) copy_bytes(k_order_, params.k_order, 2, batch * heads * f.head_dim);
    copy(lengths, params.lengths, batch);
    copy(quantized_lengths, params.quantized_lengths, batch);
    const int64_t cache_bytes = element_bytes(host.cache_type), capacity = window_capacity(f);
    copy_bytes(sink_k_, params.sink_k, cache_bytes, batch * heads * f.sink_length * f.head_dim);
    copy_bytes(sink_v_, params.sink_v, cache_bytes, batch * heads * f.sink_length * f.value_head_dim);
    copy_bytes(window_k_, params.window_k, cache_bytes, batch * heads * capacity * f.head_dim);
    copy_bytes(window_v_, params.window_v, cache_bytes, batch * heads * capacity * f.value_head_dim);
    const auto new_reach = [&](const int64_t* strides, int64_t channels) {
      return reach({{batch, strides[0]}, {heads, strides[1]}, {host.new_len, strides[2]}}, channels);
    };
    copy_bytes(new_k, params.new_k, element_bytes(host.new_type), new_reach(host.new_k_strides, f.head_dim));
    copy_bytes(new_v, params.new_v, element_bytes(host.new_type), new_reach(host.new_v_strides, f.value_head_dim));
    if (host.new_lengths != nullptr) copy(new_lengths, params.new_lengths, batch);
    if (host.sinks != nullptr) copy(sinks_, params.sinks, host.num_heads);
    if (host.alibi_slopes != nullptr) {
      copy(slopes_, params.alibi_slopes, reach({{batch, host.alibi_batch_stride}}, host.num_heads));
    }
    int64_t keys = 0;
    for (int64_t b = 0; b < batch; b++) {
      const KeyRanges ranges = key_ranges(host, b);
      keys = std::max(keys, ranges.cached + ranges.fresh);
    }
    if (host.mask_type != MaskType::kNone) {
      const int64_t* const s = host.mask_strides;
      copy_bytes(mask, params.mask, host.mask_type == MaskType::kBool ? 1 : 4,
                 reach({{batch, s[0]}, {host.num_heads, s[1]}, {host.q_len, s[2]}, {keys, s[3]}}, 1));
    }
    const auto rows = static_cast<size_t>(batch * host.num_heads * host.q_len);
    out_ = DeviceArray<uint8_t>(rows * static_cast<size_t>(f.value_head_dim * element_bytes(host.q_type)));
    lse_ = DeviceArray<float>(rows);
    params.out = out_.data();
    params.lse = lse_.data();
  }
  DeviceAttention(const DeviceAttention&) = delete;
  DeviceAttention& operator=(const DeviceAttention&) = delete;

  // With scratch memory of its own, full of NaN.
  AttentionOutput run() {
    const DeviceArray<uint8_t> scratch(static_cast<size_t>(attention_scratch_bytes(params)));
    return run(scratch.data());
  }
  AttentionOutput run(void* scratch) {
    check(attention(params, scratch, nullptr));
    return output();
  }

  AttentionOutput output() const {
    const std::vector<uint8_t> bytes = out_.get();
    AttentionOutput result;
    const auto count = static_cast<int64_t>(bytes.size()) / element_bytes(params.q_type);
    for (int64_t i = 0; i < count; i++) result.out.push_back(load_element(bytes.data(), params.q_type, i));
    result.lse = lse_.get();
    return result;
  }

 private:
  // The elements from the first one to the last one that is looked at, of rows of `last` elements.
  static int64_t reach(const std::vector<std::pair<int64_t, int64_t>>& sizes_and_strides, int64_t last) {
    int64_t at = last;
    for (const auto& [size, stride] : sizes_and_strides) {
      if (size == 0) return 0;
      at += (size - 1) * stride;
    }
    return at;
  }

  // `field` points to host memory, then to the copy.
  template <class T>
  static void copy_bytes(DeviceArray<uint8_t>& array, const T*& field, int64_t size, int64_t count) {
    const auto* const from = static_cast<const uint8_t*>(static_cast<const void*>(field));
    array = DeviceArray<uint8_t>(std::vector<uint8_t>(from, from + size * count));
    field = static_cast<const T*>(static_cast<const void*>(array.data()));
  }
  template <class T>
  static void copy(DeviceArray<T>& array, const T*& field, int64_t count) {
    array = DeviceArray<T>(std::vector<T>(field, field + count));
    field = array.data();
  }

  DeviceArray<uint8_t> q_, k_order_, sink_k_, sink_v_, window_k_, window_v_, out_;
  DeviceArray<float> sinks_, slopes_, lse_;
};

}  // namespace kivi::cuda
