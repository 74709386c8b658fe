// Which instruction sets ran: one test per instruction set that this build holds. It is skipped, and so named at the
// end of ctest, where the CPU lacks the set and the other tests therefore have no entry for it; it fails where the CPU
// has the set and the tables do not.
#include "isa.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ostream>
#include <string>

namespace kivi::cpu {
namespace {

struct IsaCase {
  Isa isa;
  const char* name;
};
void PrintTo(const IsaCase& isa, std::ostream* out) { *out << isa.name; }

// Asks the CPU and the operating system, not Highway.
bool cpu_runs(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) return avx512;
  if (isa == Isa::kAvx512Vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return isa == Isa::kScalar || isa == Isa::kNeon;  // every 64-bit Arm CPU has NEON
}

class WhatRan : public testing::TestWithParam<IsaCase> {};

TEST_P(WhatRan, Isa) {
  const IsaCase& isa = GetParam();
  const Kernels* table = kernels_for(isa.isa);
  if (!cpu_runs(isa.isa)) {
    ASSERT_EQ(table, nullptr) << "this CPU lacks " << isa.name << ", but it is offered";
    GTEST_SKIP() << "this CPU lacks " << isa.name << ": none of its tests ran";
  }
  ASSERT_NE(table, nullptr) << "this CPU has " << isa.name << ", but no test of it ran";
  EXPECT_EQ(table->isa, isa.isa);
  EXPECT_STREQ(table->name, isa.name);
}

constexpr IsaCase kOfThisBuild[] = {
    {Isa::kScalar, "scalar"},
#if defined(__x86_64__)
    {Isa::kAvx2, "avx2"},
    {Isa::kAvx512, "avx512"},
    {Isa::kAvx512Vnni, "avx512_vnni"},
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    {Isa::kNeon, "neon"},
#endif
};
std::string case_name(const testing::TestParamInfo<IsaCase>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Isa, WhatRan, testing::ValuesIn(kOfThisBuild), case_name);

// In use is the best table that this CPU runs, unless the environment asks for another.
TEST(WhatRanTest, TheBestIsInUse) {
  if (std::getenv("KIVI_CPU_CAPABILITY") != nullptr) GTEST_SKIP() << "KIVI_CPU_CAPABILITY is set";
  EXPECT_STREQ(kernels().name, available_kernels().back()->name);
}

}  // namespace
}  // namespace kivi::cpu
