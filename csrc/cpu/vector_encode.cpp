#include "cpu/vector.h"

namespace kivi::cpu {
EncodeFn vector_encode(Isa) { return nullptr; }
DecodeFn vector_decode(Isa) { return nullptr; }
QuantizeFn vector_quantize(Isa) { return nullptr; }
DequantizeFn vector_dequantize(Isa) { return nullptr; }
}  // namespace kivi::cpu
