// One call of quantize, fake_quantize or dequantize, ready for the kernels of any device: checked, with its results
// allocated and its parameters filled in.
#pragma once

#include <ATen/ATen.h>

#include "csrc/format/params.h"
#include "ops/elements.h"
#include "ops/quantize_shapes.h"

namespace kivi {

// A tensor as [outer][n][inner] around an axis; a copy only where no such view exists.
struct AxisView {
  at::Tensor tensor;
  int64_t outer, n, inner;
};

inline AxisView view_around_axis(const at::Tensor& t, int64_t axis) {
  // Nothing to do, whatever the other sizes: their product may overflow, or be rows of no element to walk through.
  if (t.numel() == 0) return {t.new_empty({0, t.size(axis), 0}), 0, t.size(axis), 0};
  int64_t outer = 1, inner = 1;
  for (int64_t i = 0; i < axis; i++) outer *= t.size(i);
  for (int64_t i = axis + 1; i < t.dim(); i++) inner *= t.size(i);
  return {t.reshape({outer, t.size(axis), inner}), outer, t.size(axis), inner};
}

struct QuantizeCall {
  AxisView x;
  at::Tensor codes, scale, zero;  // of quantize
  at::Tensor values;              // of fake_quantize
  QuantizeParams params{};
};

inline QuantizeCall begin_quantize(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  QuantizeCall call;
  call.x = view_around_axis(x, axis);
  QuantizeParams& p = call.params;
  p.outer = call.x.outer;
  p.n = call.x.n;
  p.inner = call.x.inner;
  p.bits = bits;
  p.group_size = group_size;
  p.x = call.x.tensor.const_data_ptr();
  p.type = element_of(call.x.tensor.scalar_type());
  p.x_outer_stride = call.x.tensor.stride(0);
  p.x_n_stride = call.x.tensor.stride(1);
  p.x_inner_stride = call.x.tensor.stride(2);
  return call;
}

inline QuantizeCall quantize_call(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  const QuantizeShapes shapes = quantize_shapes(x, axis, bits, group_size);
  QuantizeCall call = begin_quantize(x, shapes.axis, bits, group_size);
  const auto as_float = at::TensorOptions().dtype(at::kFloat).device(x.device());
  call.codes = at::empty(C10_AS_INTARRAYREF_SLOW(shapes.codes), as_float.dtype(at::kByte));
  call.scale = at::empty(C10_AS_INTARRAYREF_SLOW(shapes.scale), as_float);
  call.zero = at::empty_like(call.scale);
  call.params.codes = call.codes.mutable_data_ptr<uint8_t>();
  call.params.scale = call.scale.mutable_data_ptr<float>();
  call.params.zero = call.zero.mutable_data_ptr<float>();
  return call;
}

inline QuantizeCall fake_quantize_call(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  const QuantizeShapes shapes = quantize_shapes(x, axis, bits, group_size);
  QuantizeCall call = begin_quantize(x, shapes.axis, bits, group_size);
  call.values = at::empty(x.sizes(), x.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
  call.params.values = call.values.mutable_data_ptr<float>();
  return call;
}

struct DequantizeCall {
  AxisView codes, scale, zero;
  at::Tensor out;
  DequantizeParams params{};
};

inline DequantizeCall dequantize_call(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                                      int64_t axis, int64_t bits, int64_t group_size, const c10::SymInt& size,
                                      std::optional<at::ScalarType> optional_dtype) {
  const at::ScalarType dtype = optional_dtype.value_or(at::kFloat);
  const auto shape = dequantize_shape(codes, scale, zero, axis, bits, group_size, size, dtype);
  DequantizeCall call;
  call.out = at::empty(C10_AS_INTARRAYREF_SLOW(shape), at::TensorOptions().dtype(dtype).device(codes.device()));
  call.codes = view_around_axis(codes, axis);
  call.scale = view_around_axis(scale, axis);
  call.zero = view_around_axis(zero, axis);
  DequantizeParams& p = call.params;
  p.outer = call.codes.outer;
  p.n = size.expect_int();
  p.inner = call.codes.inner;
  p.bits = bits;
  p.group_size = group_size;
  p.codes = call.codes.tensor.const_data_ptr<uint8_t>();
  p.scale = call.scale.tensor.const_data_ptr<float>();
  p.zero = call.zero.tensor.const_data_ptr<float>();
  for (int i = 0; i < 3; i++) {
    p.codes_strides[i] = call.codes.tensor.stride(i);
    p.scale_strides[i] = call.scale.tensor.stride(i);
    p.zero_strides[i] = call.zero.tensor.stride(i);
  }
  p.out = call.out.mutable_data_ptr();
  p.type = element_of(dtype);
  return call;
}

}  // namespace kivi
