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
// Token `token` of a record, in fp32. order: of the keys, null where there are no classes.
void decode_key_row(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token,
                    const int16_t* order, float* row);
void decode_value_row(const Format& f, const RecordLayout& layout, const uint8_t* record, int64_t token, float* row);
// A record of a float8 or float16 format as one of the format that it is widened to: the same codes and numbers.
void widen_record(const Format& from, const uint8_t* record, const Format& to, uint8_t* out);
void scalar_attention(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                      float* partials);

}  // namespace kivi::cpu
