// Tests that run once per instruction set that this build holds and this CPU runs; the name is in the test id
// (".../avx2").
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace kivi::cpu {

inline std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> all;
  for (const Isa isa : {Isa::kScalar, Isa::kNeon, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni}) {
    if (const Kernels* table = kernels_for(isa)) all.push_back(table);
  }
  return all;
}

// A fixture whose tests get the table of one instruction set as `kernels()`.
class IsaTest : public testing::TestWithParam<const Kernels*> {
 public:
  const Kernels& kernels() const { return *GetParam(); }
  const Kernels& scalar() const { return *kernels_for(Isa::kScalar); }
};

inline std::string isa_test_name(const testing::TestParamInfo<const Kernels*>& info) { return info.param->name; }

}  // namespace kivi::cpu

// gtest prints a parameter that it does not know as bytes.
namespace kivi::cpu {
inline void PrintTo(const Kernels* kernels, std::ostream* out) { *out << kernels->name; }
}  // namespace kivi::cpu

#define KIVI_TEST_EVERY_ISA(Fixture) \
  INSTANTIATE_TEST_SUITE_P(Isa, Fixture, testing::ValuesIn(kivi::cpu::available_kernels()), kivi::cpu::isa_test_name)
