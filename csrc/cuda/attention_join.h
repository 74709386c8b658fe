// How two partial results of one query row become one (parts.h). Both the kernels of parts and the merge do it with
// this, so that it does not change a bit which of them joins what, as long as the order of the parts is kept.
#pragma once

#include <cmath>

#include "cuda/device.h"
#include "format/half.h"

namespace kivi::cuda {

// The softmax over the keys seen so far: the largest score in log2 units, and the sum of 2^(score - max). A NaN score
// leaves max as it is and makes sum NaN.
struct SoftmaxState {
  float max, sum;

  static KIVI_DEVICE SoftmaxState empty() { return {-bits_float(kFloatInf), 0.0f}; }
  KIVI_DEVICE bool is_empty() const { return max == -bits_float(kFloatInf) && sum == 0.0f; }
};

// What the weighted sums of two parts are multiplied by when they are added.
struct Join {
  SoftmaxState state;
  float first, second;

  KIVI_DEVICE Join(SoftmaxState a, SoftmaxState b) {
    state.max = fmaxf(a.max, b.max);
    first = state.max > a.max ? exp2f(a.max - state.max) : 1.0f;
    second = state.max > b.max ? exp2f(b.max - state.max) : 1.0f;
    state.sum = (*this)(a.sum, b.sum);
  }
  // The same operations, whatever the compiler would like to contract.
  KIVI_DEVICE float operator()(float a, float b) const { return fmaf(b, second, a * first); }
};

}  // namespace kivi::cuda
