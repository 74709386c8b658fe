// The orders that a test of a kernel is run in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/emulator.h"

namespace emulator {

struct NamedOrder {
  Order order;
  uint64_t seed;
  std::string name;  // "random_warps, seed 2"
};

// All orders, the random ones with a few seeds; only ascending under ThreadSanitizer, which finds the races of all
// orders in one. KIVI_CUDA_ORDERS in the environment names others, for example "random_warps:20,descending": 20 seeds
// of the one, and the other.
std::vector<NamedOrder> orders_to_try();

}  // namespace emulator
