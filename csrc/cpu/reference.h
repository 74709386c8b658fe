// The scalar kernels: the definition that the vector kernels are tested against, and the table of a CPU without
// vectors. And the pieces of the definition that other files need too.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace kivi::cpu {

bool scalar_encode(const EncodeParams& params);
void scalar_decode(const DecodeParams& params);
void scalar_quantize(const QuantizeParams& params, int64_t begin, int64_t end);
void scalar_dequantize(const DequantizeParams& params, int64_t begin, int64_t end);
// The same for the columns [begin, end) of one outer index: what vectors leave over.
void scalar_quantize_columns(const QuantizeParams& params, int64_t outer, int64_t begin, int64_t end);
void scalar_dequantize_columns(const DequantizeParams& params, int64_t outer, int64_t begin, int64_t end);
void scalar_attention(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                      float* partials);

// r of range_search, the first is the plain range.
inline constexpr int kNumShrinks = 6;
inline constexpr float kShrinks[kNumShrinks] = {1.0f, 0.98f, 0.96f, 0.94f, 0.92f, 0.90f};

}  // namespace kivi::cpu
