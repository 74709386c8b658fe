// Device memory for tests of kernels: arrays of exact size (in the emulator a heap block each, so that sanitizers see
// their ends), filled with 0xFF, which is NaN as a float of any size and an impossible length or page.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <utility>
#include <vector>

#if !defined(KIVI_ON_DEVICE)
#include "emulator/emulator.h"
#include "emulator/orders.h"
#endif

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

#if defined(KIVI_ON_DEVICE)

// The same tests on a real device, which has its own order.
template <class Body>
void in_every_order(Body body) {
  body();
}

#else

// Changes the emulator's configuration until it goes out of scope.
class WithConfig {
 public:
  WithConfig() = default;
  ~WithConfig() { emulator::config() = before_; }
  WithConfig(const WithConfig&) = delete;
  WithConfig& operator=(const WithConfig&) = delete;

  emulator::Config* operator->() const { return &emulator::config(); }

 private:
  const emulator::Config before_ = emulator::config();
};

// Runs `body` under every order of the emulator's scheduler (emulator/orders.h).
template <class Body>
void in_every_order(Body body) {
  const WithConfig config;
  for (const emulator::NamedOrder& order : emulator::orders_to_try()) {
    SCOPED_TRACE(order.name);
    config->order = order.order;
    config->seed = order.seed;
    body();
  }
}

#endif

}  // namespace kivi::cuda

// A call whose kernel ends with device_check. On a device that would end all work of the process, so it is not made.
#if defined(KIVI_ON_DEVICE)
#define EXPECT_DEVICE_CHECK(statement) \
  if (false) statement
#else
#define EXPECT_DEVICE_CHECK(statement) EXPECT_THROW(statement, emulator::Error)
#endif
