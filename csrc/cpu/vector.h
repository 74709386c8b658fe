// The seam between the tables of dispatch.cpp and the vector kernels, which are written once with Highway and compiled
// once per instruction set. Each function gives the kernel for one instruction set, or null if this build does not hold
// it or this CPU does not run it; the table then takes the scalar kernel instead.
#pragma once

#include "cpu/kernels.h"

namespace kivi::cpu {

using EncodeFn = bool (*)(const EncodeParams&);
using DecodeFn = void (*)(const DecodeParams&);
using QuantizeFn = void (*)(const QuantizeParams&, int64_t, int64_t);
using DequantizeFn = void (*)(const DequantizeParams&, int64_t, int64_t);
using AttentionFn = void (*)(const AttentionParams&, const AttentionItem*, int64_t, int64_t, float*);

// vector_encode.cpp. Results are equal to the scalar ones to the bit.
EncodeFn vector_encode(Isa isa);
DecodeFn vector_decode(Isa isa);
QuantizeFn vector_quantize(Isa isa);
DequantizeFn vector_dequantize(Isa isa);

// vector_attention.cpp
AttentionFn vector_attention(Isa isa);

}  // namespace kivi::cpu

// What each instruction set is called in Highway, for the kernels' own selection:
//   kAvx2 -> HWY_AVX2, kAvx512 -> HWY_AVX3, kAvx512Vnni -> HWY_AVX3_DL, kNeon -> HWY_NEON
