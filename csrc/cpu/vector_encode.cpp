// Quantising and dequantising with vectors: records of the cache and the dense form of quantize. Written once with
// Highway, compiled for AVX2, AVX-512 and NEON; equal to the scalar reference to the bit.
#define HWY_TARGET_INCLUDE "cpu/vector_encode.cpp"
// Only what cpu/vector.h names. The baseline target is compiled too, but left empty (below).
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#include "hwy/foreach_target.h"
// After it, because it defines HWY_TARGET.
#include "cpu/vector.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
#include "cpu/vector_decode-inl.h"
#include "cpu/vector_dense-inl.h"
#include "cpu/vector_record-inl.h"
#endif

#if HWY_ONCE
namespace kivi::cpu {
namespace {

// The instruction set whose kernels serve `isa`: these have no use for VNNI, and AVX2 serves no AVX-512 table.
bool is_supported(Isa isa) {
#if HWY_ARCH_X86
  const int64_t supported = hwy::SupportedTargets();
  if (isa == Isa::kAvx2) return (supported & HWY_AVX2) != 0;
  if (isa == Isa::kAvx512) return (supported & HWY_AVX3) != 0;
  if (isa == Isa::kAvx512Vnni) return (supported & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512vnni");
#elif HWY_ARCH_ARM_A64
  if (isa == Isa::kNeon) return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
#endif
  (void)isa;
  return false;
}

}  // namespace

#if HWY_ARCH_X86
#define KIVI_CHOOSE(function) (is_supported(isa) ? (isa == Isa::kAvx2 ? N_AVX2::function : N_AVX3::function) : nullptr)
#elif HWY_ARCH_ARM_A64
#define KIVI_CHOOSE(function) (is_supported(isa) ? N_NEON::function : nullptr)
#else
#define KIVI_CHOOSE(function) (is_supported(isa) ? nullptr : nullptr)
#endif

EncodeFn vector_encode(Isa isa) { return KIVI_CHOOSE(encode); }
DecodeFn vector_decode(Isa isa) { return KIVI_CHOOSE(decode); }
QuantizeFn vector_quantize(Isa isa) { return KIVI_CHOOSE(quantize); }
DequantizeFn vector_dequantize(Isa isa) { return KIVI_CHOOSE(dequantize); }

#undef KIVI_CHOOSE

void flush_streams() { hwy::FlushStream(); }

}  // namespace kivi::cpu
#endif  // HWY_ONCE
