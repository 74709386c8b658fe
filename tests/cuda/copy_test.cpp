// copy_pages of csrc/cuda.
#include <cstdint>
#include <numeric>

#include "cuda/device_memory.h"
#include "cuda/kernels.h"

namespace kivi::cuda {
namespace {

TEST(CopyPages, MovesWholePagesOnly) {
  constexpr int64_t kPages = 7;
  for (const int64_t bytes : {int64_t{32}, int64_t{96 * 128}, int64_t{5 * 4096 + 32}}) {
    std::vector<uint8_t> pool(static_cast<size_t>(kPages * bytes));
    std::iota(pool.begin(), pool.end(), uint8_t{0});
    std::vector<uint8_t> want = pool;
    const std::vector<int64_t> source = {6, 0, 2}, target = {1, 3, 5};
    for (size_t i = 0; i < source.size(); i++) {
      std::copy_n(pool.begin() + source[i] * bytes, bytes, want.begin() + target[i] * bytes);
    }
    in_every_order([&] {
      const DeviceArray<uint8_t> device(pool);
      const DeviceArray<int64_t> from(source), to(target);
      check(copy_pages(device.data(), kPages, bytes, from.data(), to.data(), 3, nullptr));
      EXPECT_EQ(device.get(), want);
    });
  }
}

TEST(CopyPages, PageOutsideThePoolIsAnError) {
  const DeviceArray<uint8_t> pool(4 * 64);
  const DeviceArray<int64_t> from(std::vector<int64_t>{0}), to(std::vector<int64_t>{4});
  EXPECT_DEVICE_CHECK(copy_pages(pool.data(), 4, 64, from.data(), to.data(), 1, nullptr));
}

}  // namespace
}  // namespace kivi::cuda
