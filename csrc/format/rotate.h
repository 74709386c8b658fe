// The rotation of values (kivi/format.h), one row at a time: the definition for the vector kernels, and what they use
// for blocks that are shorter than a vector.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "kivi/format.h"

namespace kivi {

// What the sums of a block of n = 2^k channels are multiplied by on the way into a record, and on the way back.
KIVI_HOST_DEVICE inline float rotation_factor(int64_t n, bool back) {
  int k = 0;
  while (int64_t{1} << k < n) k++;
  return 1.0f / static_cast<float>(int64_t{1} << (back ? k / 2 : (k + 1) / 2));
}

// One block in place: sums and differences of neighbours at distance 1, 2, 4 and so on, then the factor.
KIVI_HOST_DEVICE inline void rotate_block(float* x, int64_t n, float factor) {
  for (int64_t distance = 1; distance < n; distance *= 2) {
    for (int64_t i = 0; i < n; i += 2 * distance) {
      for (int64_t j = i; j < i + distance; j++) {
        const float a = x[j], b = x[j + distance];
        x[j] = a + b;
        x[j + distance] = a - b;
      }
    }
  }
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

// A row of value_head_dim numbers in place.
KIVI_HOST_DEVICE inline void rotate_row(float* row, int64_t value_head_dim, bool back) {
  const int64_t n = rotation_size(value_head_dim);
  const float factor = rotation_factor(n, back);
  for (int64_t i = 0; i < value_head_dim; i += n) rotate_block(row + i, n, factor);
}

}  // namespace kivi
