// The formats that have a tensor-core kernel; the others take the generic one. One attention_tensor_*.cu instantiates
// the kernels of each list.
#pragma once

#include "cuda/attention_tensor_kernel.h"

namespace kivi::cuda::tensor {

// -DKIVI_CUDA_NORMAL_CODES: for devices whose tensor cores fail the test TensorCore.TakesSubnormals.
#if defined(KIVI_CUDA_NORMAL_CODES)
template <class F>
using Chosen = NormalCodes<F>;
#else
template <class F>
using Chosen = F;
#endif

// float16 scales, groups of G in K and V.
template <int D, int KBits, int VBits, int G = 32>
using Plain = Chosen<TensorFormat<D, G, 2, VBits, G, false, Keys<D, KBits>>>;
// The recipes of ops/options.cpp for heads of 64 and 128 channels.
template <int D>
using Compact = Chosen<TensorFormat<D, 32, 1, 2, D, true, Keys<D / 4, 4>, Keys<D / 4 * 3, 2>>>;
template <int D>
using Balanced = Chosen<TensorFormat<D, 32, 1, 2, 32, false, Keys<D / 4, 4>, Keys<D / 4 * 3, 2>>>;
template <int D>
using Quality = Chosen<TensorFormat<D, 32, 1, 3, D, true, Keys<D / 4, 4>, Keys<D / 2, 3>, Keys<D / 4, 2>>>;
template <int D>
using NearLossless = Chosen<TensorFormat<D, 32, 1, 4, D, true, Keys<D, 4>>>;

#if defined(KIVI_TENSOR_FEW_FORMATS)
// For builds with sanitizers, where each kernel takes long to compile: one format of each kind.
#define KIVI_TENSOR_PLAIN_128(X) X(Plain<128, 2, 2>) X(Plain<128, 2, 4>) X(Plain<128, 4, 4>)
#define KIVI_TENSOR_PLAIN_64(X) X(Plain<64, 2, 2>) X(Plain<64, 2, 4>) X(Plain<64, 4, 4>)
#define KIVI_TENSOR_GROUPS(X) X(Plain<128, 2, 2, 64>)
#define KIVI_TENSOR_SIZES(X) X(Plain<96, 4, 4>)
#define KIVI_TENSOR_RECIPES(X) X(Balanced<64>) X(Balanced<128>) X(Quality<64>) X(Quality<128>)
#else
#define KIVI_TENSOR_PLAIN_128(X) X(Plain<128, 2, 2>) X(Plain<128, 4, 2>) X(Plain<128, 2, 4>) X(Plain<128, 4, 4>)
#define KIVI_TENSOR_PLAIN_64(X) X(Plain<64, 2, 2>) X(Plain<64, 4, 2>) X(Plain<64, 2, 4>) X(Plain<64, 4, 4>)
#define KIVI_TENSOR_GROUPS(X) \
  X(Plain<128, 2, 2, 64>) X(Plain<128, 4, 4, 64>) X(Plain<128, 2, 2, 128>) X(Plain<128, 4, 4, 128>)
#define KIVI_TENSOR_SIZES(X) \
  X(Plain<80, 2, 2>)         \
  X(Plain<80, 4, 4>)         \
  X(Plain<96, 2, 2>)         \
  X(Plain<96, 4, 4>)         \
  X(Plain<112, 2, 2>)        \
  X(Plain<112, 4, 4>)        \
  X(Plain<192, 2, 2>)        \
  X(Plain<192, 4, 4>)        \
  X(Plain<256, 2, 2>)        \
  X(Plain<256, 4, 4>)
#define KIVI_TENSOR_RECIPES(X) \
  X(Compact<64>)               \
  X(Compact<128>)              \
  X(Balanced<64>)              \
  X(Balanced<128>)             \
  X(Quality<64>)               \
  X(Quality<128>)              \
  X(NearLossless<64>)          \
  X(NearLossless<128>)
#endif

#define KIVI_TENSOR_FORMATS(X) \
  KIVI_TENSOR_PLAIN_128(X)     \
  KIVI_TENSOR_PLAIN_64(X)      \
  KIVI_TENSOR_GROUPS(X)        \
  KIVI_TENSOR_SIZES(X)         \
  KIVI_TENSOR_RECIPES(X)

// For the lists above: the launches are compiled elsewhere, and here.
#define KIVI_TENSOR_DECLARE(...)                                                                                    \
  extern template cudaError_t TensorParts<__VA_ARGS__>::launch_parts(const AttentionParams&, bool, int64_t, float*, \
                                                                     cudaStream_t);
#define KIVI_TENSOR_DEFINE(...)                                                                              \
  template cudaError_t TensorParts<__VA_ARGS__>::launch_parts(const AttentionParams&, bool, int64_t, float*, \
                                                              cudaStream_t);

}  // namespace kivi::cuda::tensor
