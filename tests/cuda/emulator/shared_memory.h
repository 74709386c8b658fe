// The shared memory of one block: a heap block for each array, so that sanitizers and valgrind know its ends.
#pragma once

#include <cstddef>
#include <vector>

namespace emulator {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory() { clear(); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The array of this key and index, which the first thread that asks for it makes. `is_static` arrays count towards
  // the limit of static shared memory. `poison`: it begins as 0xFF, and undefined for valgrind.
  void* get(const void* key, unsigned index, size_t bytes, size_t align, bool is_static, bool poison);
  void clear();

 private:
  struct Array {
    const void* key;
    unsigned index;
    size_t bytes;
    void* data;
  };
  std::vector<Array> arrays_;
  size_t static_bytes_ = 0;
};

}  // namespace emulator
