// quantize, dequantize and fake_quantize on CUDA.
#include "csrc/cuda/kernels.h"
#include "ops/cuda_call.h"
#include "ops/quantize_call.h"

namespace kivi {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_cuda(const at::Tensor& x, int64_t axis, int64_t bits,
                                                             int64_t group_size) {
  const CudaCall cuda(x);
  const QuantizeCall call = quantize_call(x, axis, bits, group_size);
  if (x.numel() > 0) CudaCall::check(cuda::quantize(call.params, cuda.stream()), "quantize");
  return {call.codes, call.scale, call.zero};
}

at::Tensor fake_quantize_cuda(const at::Tensor& x, int64_t axis, int64_t bits, int64_t group_size) {
  const CudaCall cuda(x);
  const QuantizeCall call = fake_quantize_call(x, axis, bits, group_size);
  if (x.numel() > 0) CudaCall::check(cuda::quantize(call.params, cuda.stream()), "fake_quantize");
  return call.values;
}

at::Tensor dequantize_cuda(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero, int64_t axis,
                           int64_t bits, int64_t group_size, c10::SymInt size, std::optional<at::ScalarType> dtype) {
  const CudaCall cuda(codes);
  const DequantizeCall call = dequantize_call(codes, scale, zero, axis, bits, group_size, size, dtype);
  if (call.out.numel() > 0) CudaCall::check(cuda::dequantize(call.params, cuda.stream()), "dequantize");
  return call.out;
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, KIVI_CUDA_KEY, m) {
  if (!kivi::registers_cuda_operators()) return;
  m.impl("quantize", TORCH_FN(kivi::quantize_cuda));
  m.impl("dequantize", TORCH_FN(kivi::dequantize_cuda));
  m.impl("fake_quantize", TORCH_FN(kivi::fake_quantize_cuda));
}
