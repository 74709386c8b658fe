// Shapes and checks of quantize, dequantize and fake_quantize, shared by the CPU and Meta kernels.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "ops/checks.h"

namespace kivi {

// ceil(size / group_size). A group of 2^62 elements holds any tensor; a larger one would only make the sum overflow.
inline c10::SymInt groups_along(const c10::SymInt& size, int64_t group_size) {
  const int64_t group = std::min(group_size, int64_t{1} << 62);
  return (size + (group - 1)) / group;
}

// Bytes of a dense string of `size` codes.
inline c10::SymInt code_bytes_along(const c10::SymInt& size, int64_t bits) {
  // A tensor without elements may have any size along the axis; a symbolic one is not asked.
  const auto known = size.maybe_as_int();
  TORCH_CHECK_VALUE(!known || *known <= std::numeric_limits<int64_t>::max() / 16, "size along the axis is ", size,
                    ", more than 2^59 elements");
  return (size * bits + 7) / 8;
}

struct QuantizeShapes {
  int64_t axis;
  c10::SymInt size;  // along the axis
  c10::SymDimVector codes, scale;
};

inline QuantizeShapes quantize_shapes(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  check_floating("x", x);
  check_bits("bits", bits);
  TORCH_CHECK_VALUE(group_size >= 1, "group_size must be at least 1, got ", group_size);
  QuantizeShapes s;
  s.axis = check_axis(axis, x.dim());
  s.size = x.sym_size(s.axis);
  s.codes.assign(x.sym_sizes().begin(), x.sym_sizes().end());
  s.scale = s.codes;
  s.codes[s.axis] = code_bytes_along(s.size, bits);
  s.scale[s.axis] = groups_along(s.size, group_size);
  return s;
}

// The sizes of dequantize's result. `size` is the number of elements along the axis.
inline c10::SymDimVector dequantize_shape(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                                          int64_t& axis, int64_t bits, int64_t group_size, const c10::SymInt& size,
                                          at::ScalarType dtype) {
  check_dtype("codes", codes, at::kByte);
  check_dtype("scale", scale, at::kFloat);
  check_dtype("zero", zero, at::kFloat);
  check_same_device("scale", scale, "codes", codes.device());
  check_same_device("zero", zero, "codes", codes.device());
  check_bits("bits", bits);
  TORCH_CHECK_VALUE(group_size >= 1, "group_size must be at least 1, got ", group_size);
  TORCH_CHECK_VALUE(size >= 0, "size must not be negative, got ", size);
  TORCH_CHECK_TYPE(is_supported_float(dtype), "dtype must be float32, float16 or bfloat16, got ", dtype);
  axis = check_axis(axis, codes.dim());
  const c10::SymInt bytes = code_bytes_along(size, bits);
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"scale", scale}, {"zero", zero}}) {
    TORCH_CHECK_VALUE(t.dim() == codes.dim(), name, " has ", t.dim(), " dimensions, but codes has ", codes.dim());
    for (int64_t i = 0; i < codes.dim(); i++) {
      const c10::SymInt want = i == axis ? groups_along(size, group_size) : codes.sym_size(i);
      TORCH_CHECK_VALUE(t.sym_size(i) == want, name, " has size ", t.sym_size(i), " at dimension ", i,
                        ", but codes of sizes ", codes.sym_sizes(), " with size ", size, " and group_size ", group_size,
                        " want ", want);
    }
  }
  TORCH_CHECK_VALUE(codes.sym_size(axis) == bytes, "codes has ", codes.sym_size(axis), " bytes along axis ", axis,
                    ", but size ", size, " at ", bits, " bits takes ", bytes);
  c10::SymDimVector shape(codes.sym_sizes().begin(), codes.sym_sizes().end());
  shape[axis] = size;
  return shape;
}

}  // namespace kivi
