// The tables of kernels, one per instruction set that this build holds and this CPU runs, and the choice between them.
#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/reference.h"
#include "cpu/vector.h"

namespace kivi::cpu {
namespace {

constexpr int kNumIsas = 5;
constexpr Isa kBestFirst[kNumIsas] = {Isa::kAvx512Vnni, Isa::kAvx512, Isa::kAvx2, Isa::kNeon, Isa::kScalar};

constexpr const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512_vnni";
  }
  return "";
}

template <class Fn>
Fn either(Fn vector, Fn scalar) {
  return vector != nullptr ? vector : scalar;
}

struct Table {
  bool present = false;
  Kernels kernels{};
};

Table make_table(Isa isa) {
  const EncodeFn encode = vector_encode(isa);
  const DecodeFn decode = vector_decode(isa);
  const QuantizeFn quantize = vector_quantize(isa);
  const DequantizeFn dequantize = vector_dequantize(isa);
  const AttentionFn attention = vector_attention(isa);
  Table table;
  table.present = isa == Isa::kScalar || encode != nullptr || attention != nullptr;
  table.kernels = {isa,
                   isa_name(isa),
                   either<EncodeFn>(encode, scalar_encode),
                   either<DecodeFn>(decode, scalar_decode),
                   either<QuantizeFn>(quantize, scalar_quantize),
                   either<DequantizeFn>(dequantize, scalar_dequantize),
                   either<AttentionFn>(attention, scalar_attention)};
  return table;
}

struct Tables {
  Table of[kNumIsas];
  Tables() {
    for (const Isa isa : kBestFirst) of[static_cast<int>(isa)] = make_table(isa);
  }
};

const Kernels& choose() {
  const char* wanted = std::getenv("KIVI_CPU_CAPABILITY");
  const Kernels* best = nullptr;
  for (const Isa isa : kBestFirst) {
    const Kernels* table = kernels_for(isa);
    if (table == nullptr) continue;
    if (best == nullptr) best = table;
    if (wanted != nullptr && std::strcmp(wanted, table->name) == 0) return *table;
  }
  return *best;  // also if the name is unknown, or names what this CPU lacks
}

}  // namespace

const Kernels* kernels_for(Isa isa) {
  static const Tables tables;
  const Table& table = tables.of[static_cast<int>(isa)];
  return table.present ? &table.kernels : nullptr;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace kivi::cpu
