// Loading of libkivi_cuda.so.
#pragma once

#include <ATen/core/Tensor.h>

namespace kivi {

// Loads it if torch's CUDA library is in the process and this was not tried before. Does nothing where there is none.
void load_cuda_library();

// Whether caches can be on CUDA.
bool has_cuda_operators();

// Whether the current stream of the tensor's device is being captured in a graph; false before the library is loaded.
bool is_capturing(const at::Tensor& tensor);
using CaptureQuery = bool (*)(const at::Tensor& tensor);
void set_capture_query(CaptureQuery query);

}  // namespace kivi

// What libkivi_cuda.so offers beside operators, found by its name.
extern "C" __attribute__((visibility("default"))) bool kivi_is_capturing(const at::Tensor& tensor);
