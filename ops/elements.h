// Torch dtypes as the kernels' element types.
#pragma once

#include <ATen/ATen.h>

#include "csrc/format/params.h"

namespace kivi {

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Element::kFloat32;
    case at::kHalf:
      return Element::kFloat16;
    case at::kBFloat16:
      return Element::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "expected float32, float16 or bfloat16, got ", type);
  }
}

}  // namespace kivi
