// quantize, dequantize and fake_quantize on the CPU: checks, shapes and threads around the kernels of csrc/cpu.
#include <ATen/Parallel.h>

#include "csrc/cpu/kernels.h"
#include "ops/elements.h"
#include "ops/quantize_shapes.h"
#include "ops/registration.h"

namespace kivi {
namespace {

// A tensor as [outer][n][inner] around an axis; a copy only where no such view exists.
struct AxisView {
  at::Tensor tensor;
  int64_t outer, n, inner;
};

AxisView view_around_axis(const at::Tensor& t, int64_t axis) {
  int64_t outer = 1, inner = 1;
  for (int64_t i = 0; i < axis; i++) outer *= t.size(i);
  for (int64_t i = axis + 1; i < t.dim(); i++) inner *= t.size(i);
  return {t.reshape({outer, t.size(axis), inner}), outer, t.size(axis), inner};
}

// Elements that keep a thread busy for long enough to be worth waking it.
constexpr int64_t kGrainElements = 16384;

template <class Params, class Kernel>
void run_units(const Params& p, Kernel kernel) {
  const int64_t units = p.outer * ceil_div(p.inner, cpu::kInnerBlock);
  const int64_t per_unit = std::max<int64_t>(1, p.n * std::min(p.inner, cpu::kInnerBlock));
  at::parallel_for(0, units, std::max<int64_t>(1, kGrainElements / per_unit),
                   [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

QuantizeParams quantize_params(const AxisView& x, int64_t bits, int64_t group_size) {
  QuantizeParams p{};
  p.outer = x.outer;
  p.n = x.n;
  p.inner = x.inner;
  p.bits = bits;
  p.group_size = group_size;
  p.x = x.tensor.const_data_ptr();
  p.type = element_of(x.tensor.scalar_type());
  p.x_outer_stride = x.tensor.stride(0);
  p.x_n_stride = x.tensor.stride(1);
  p.x_inner_stride = x.tensor.stride(2);
  return p;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_cpu(const at::Tensor& x, int64_t axis, int64_t bits,
                                                            int64_t group_size) {
  const QuantizeShapes shapes = quantize_shapes(x, axis, bits, group_size);
  const auto as_float = at::TensorOptions().dtype(at::kFloat).device(x.device());
  at::Tensor codes = at::empty(C10_AS_INTARRAYREF_SLOW(shapes.codes), as_float.dtype(at::kByte));
  at::Tensor scale = at::empty(C10_AS_INTARRAYREF_SLOW(shapes.scale), as_float);
  at::Tensor zero = at::empty_like(scale);
  const AxisView view = view_around_axis(x, shapes.axis);
  QuantizeParams p = quantize_params(view, bits, group_size);
  p.codes = codes.mutable_data_ptr<uint8_t>();
  p.scale = scale.mutable_data_ptr<float>();
  p.zero = zero.mutable_data_ptr<float>();
  run_units(p, cpu::kernels().quantize);
  return {codes, scale, zero};
}

at::Tensor fake_quantize_cpu(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  const QuantizeShapes shapes = quantize_shapes(x, axis, bits, group_size);
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  const AxisView view = view_around_axis(x, shapes.axis);
  QuantizeParams p = quantize_params(view, bits, group_size);
  p.values = out.mutable_data_ptr<float>();
  run_units(p, cpu::kernels().quantize);
  return out;
}

at::Tensor dequantize_cpu(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero, int64_t axis,
                          int64_t bits, int64_t group_size, c10::SymInt size,
                          std::optional<at::ScalarType> optional_dtype) {
  const at::ScalarType dtype = optional_dtype.value_or(at::kFloat);
  const auto shape = dequantize_shape(codes, scale, zero, axis, bits, group_size, size, dtype);
  at::Tensor out = at::empty(C10_AS_INTARRAYREF_SLOW(shape), at::TensorOptions().dtype(dtype).device(codes.device()));
  const AxisView c = view_around_axis(codes, axis), s = view_around_axis(scale, axis), z = view_around_axis(zero, axis);
  DequantizeParams p{};
  p.outer = c.outer;
  p.n = size.expect_int();
  p.inner = c.inner;
  p.bits = bits;
  p.group_size = group_size;
  p.codes = c.tensor.const_data_ptr<uint8_t>();
  p.scale = s.tensor.const_data_ptr<float>();
  p.zero = z.tensor.const_data_ptr<float>();
  for (int i = 0; i < 3; i++) {
    p.codes_strides[i] = c.tensor.stride(i);
    p.scale_strides[i] = s.tensor.stride(i);
    p.zero_strides[i] = z.tensor.stride(i);
  }
  p.out = out.mutable_data_ptr();
  p.type = element_of(dtype);
  run_units(p, cpu::kernels().dequantize);
  return out;
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, CPU, m) {
  if (!kivi::registers_operators()) return;
  m.impl("quantize", TORCH_FN(kivi::quantize_cpu));
  m.impl("dequantize", TORCH_FN(kivi::dequantize_cpu));
  m.impl("fake_quantize", TORCH_FN(kivi::fake_quantize_cpu));
}
