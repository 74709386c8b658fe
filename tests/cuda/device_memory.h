// Device memory for tests of kernels: arrays of exact size (in the emulator a heap block each, so that sanitizers see
// their ends), filled with 0xFF, which is NaN as a float of any size and an impossible length or page.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "emulator/emulator.h"

namespace kivi::cuda {

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
    check(cudaMemset(data_, 0xFF, count * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { set(values); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return count_; }
  void set(const std::vector<T>& values) {
    ASSERT_EQ(values.size(), count_);
    check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Waits for the device.
  std::vector<T> get() const {
    std::vector<T> values(count_);
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

// Runs `body` under every order of the emulator's scheduler, the random ones with a few seeds.
template <class Body>
void in_every_order(Body body) {
  emulator::Config& c = emulator::config();
  const emulator::Config before = c;
  for (const auto& [order, seeds, name] :
       {std::tuple<emulator::Order, uint64_t, const char*>{emulator::Order::ascending, 1, "ascending"},
        {emulator::Order::descending, 1, "descending"},
        {emulator::Order::random, 2, "random"},
        {emulator::Order::random_warps, 3, "random warps"}}) {
    for (uint64_t seed = 1; seed <= seeds; seed++) {
      SCOPED_TRACE(testing::Message() << "order " << name << ", seed " << seed);
      c.order = order, c.seed = seed;
      body();
    }
  }
  c = before;
}

}  // namespace kivi::cuda
