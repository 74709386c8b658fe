// quantize, dequantize and fake_quantize on the CPU: threads around the kernels of csrc/cpu.
#include <ATen/Parallel.h>

#include "csrc/cpu/kernels.h"
#include "ops/quantize_call.h"
#include "ops/registration.h"

namespace kivi {
namespace {

// Elements that keep a thread busy for long enough to be worth waking it.
constexpr int64_t kGrainElements = 16384;

template <class Params, class Kernel>
void run_units(const Params& p, Kernel kernel) {
  if (p.outer == 0 || p.inner == 0) return;
  const int64_t units = p.outer * ceil_div(p.inner, cpu::kInnerBlock);
  const int64_t per_unit = std::max<int64_t>(1, p.n * std::min(p.inner, cpu::kInnerBlock));
  at::parallel_for(0, units, std::max<int64_t>(1, kGrainElements / per_unit),
                   [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_cpu(const at::Tensor& x, int64_t axis, int64_t bits,
                                                            int64_t group_size) {
  const QuantizeCall call = quantize_call(x, axis, bits, group_size);
  run_units(call.params, cpu::kernels().quantize);
  return {call.codes, call.scale, call.zero};
}

at::Tensor fake_quantize_cpu(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  const QuantizeCall call = fake_quantize_call(x, axis, bits, group_size);
  run_units(call.params, cpu::kernels().quantize);
  return call.values;
}

at::Tensor dequantize_cpu(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero, int64_t axis,
                          int64_t bits, int64_t group_size, c10::SymInt size, std::optional<at::ScalarType> dtype) {
  const DequantizeCall call = dequantize_call(codes, scale, zero, axis, bits, group_size, size, dtype);
  run_units(call.params, cpu::kernels().dequantize);
  return call.out;
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, CPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("quantize", TORCH_FN(kivi::quantize_cpu));
  m.impl("dequantize", TORCH_FN(kivi::dequantize_cpu));
  m.impl("fake_quantize", TORCH_FN(kivi::fake_quantize_cpu));
}
