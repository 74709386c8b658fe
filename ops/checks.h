// The vocabulary of argument checks. Each names the argument and prints both values; the same checks serve the CPU,
// CUDA and Meta kernels, so they read sizes as SymInt.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <string>

#include "kivi/format.h"

namespace kivi {

inline bool is_supported_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// The first check of every tensor: Python's None arrives as a tensor that is none.
inline void check_defined(const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), name, " must be a tensor, got none");
}

inline void check_floating(const char* name, const at::Tensor& t) {
  check_defined(name, t);
  TORCH_CHECK_TYPE(is_supported_float(t.scalar_type()), name, " must be float32, float16 or bfloat16, got ",
                   t.scalar_type());
}

inline void check_dtype(const char* name, const at::Tensor& t, at::ScalarType type) {
  check_defined(name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == type, name, " must be ", type, ", got ", t.scalar_type());
}

inline void check_same_dtype(const char* name, const at::Tensor& t, const char* other, at::ScalarType type) {
  check_defined(name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == type, name, " is ", t.scalar_type(), ", but ", other, " is ", type);
}

inline void check_same_device(const char* name, const at::Tensor& t, const char* other, at::Device device) {
  check_defined(name, t);
  TORCH_CHECK(t.device() == device, name, " is on ", t.device(), ", but ", other, " is on ", device);
}

// The operators have kernels for nothing else, but the class does much before the dispatcher would say so.
inline void check_strided(const char* name, const at::Tensor& t) {
  check_defined(name, t);
  TORCH_CHECK_TYPE(t.layout() == at::kStrided, name, " must be a dense tensor (layout Strided), got layout ",
                   t.layout());
  TORCH_CHECK_TYPE(!t.is_nested(), name, " must be a dense tensor, got a nested one");
}

// A tensor that the class can take at all: it computes with values. Fake tensors claim to be on the CPU and have none;
// those of functorch and other wrappers keep them somewhere else.
inline void check_tensor(const char* name, const at::Tensor& t) {
  check_strided(name, t);
  const bool has_data = t.has_storage() && t.storage().data() != nullptr;
  TORCH_CHECK_VALUE(has_data || t.is_meta() || t.sym_numel() == 0, name,
                    " has no data of its own: a KVCache takes neither fake tensors nor wrappers of tensors");
}

// Every tensor passes here. `shape` is printed, for example "[B, Hq, Lq, D]".
inline void check_rank(const char* name, const at::Tensor& t, int64_t rank, const char* shape) {
  check_strided(name, t);
  TORCH_CHECK_VALUE(t.dim() == rank, name, " must be ", shape, " (", rank, " dimensions), got ", t.dim(),
                    " dimensions of sizes ", t.sym_sizes());
}

// `axis` and `reason` are printed: "k has head count 7, but the cache has num_kv_heads 8".
inline void check_size(const char* name, const at::Tensor& t, int64_t dim, const char* axis,
                       const c10::SymInt& expected, const char* reason) {
  TORCH_CHECK_VALUE(t.sym_size(dim) == expected, name, " has ", axis, " ", t.sym_size(dim), ", but ", reason, " ",
                    expected);
}

inline void check_contiguous(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), name, " must be contiguous, got sizes ", t.sym_sizes(), " and strides ",
                    t.sym_strides());
}

inline void check_bits(const char* name, int64_t bits) {
  TORCH_CHECK_VALUE(is_valid_bits(bits), name, " must be 1, 2, 3, 4 or 8, got ", bits);
}

inline void check_finite(const char* name, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value), name, " must be finite, got ", value);
}

inline void check_not_negative(const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 0, name, " must not be negative, got ", value);
}

inline int64_t check_axis(int64_t axis, int64_t rank) {
  TORCH_CHECK_INDEX(rank >= 1 && axis >= -rank && axis < rank, "axis must be ", -rank, " to ", rank - 1,
                    " for a tensor of ", rank, " dimensions, got ", axis);
  return axis < 0 ? axis + rank : axis;
}

// True for "exact", false for "fast".
inline bool check_precision(const std::string& precision) {
  TORCH_CHECK_VALUE(precision == "fast" || precision == "exact", "precision must be \"fast\" or \"exact\", got \"",
                    precision, "\"");
  return precision == "exact";
}

inline ScaleType check_scale_dtype(const std::string& name) {
  if (name == "float8") return ScaleType::kFloat8;
  if (name == "float16") return ScaleType::kFloat16;
  TORCH_CHECK_VALUE(name == "float32", "scale_dtype must be \"float8\", \"float16\" or \"float32\", got \"", name,
                    "\"");
  return ScaleType::kFloat32;
}

inline void check_format(const Format& format) {
  int64_t value = 0;
  const char* error = format_error(format, &value);
  TORCH_CHECK_VALUE(error == nullptr, error, ", got ", value);
  TORCH_CHECK_VALUE(page_bytes(format).ok, "num_kv_heads ", format.num_kv_heads, " with head_dim ", format.head_dim,
                    " gives a page of more than 2^63 bytes");
}

}  // namespace kivi
