#include "emulator/shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "emulator/emulator.h"
#include "emulator/launch.h"
#include "emulator/sanitizers.h"

namespace emulator {

void* SharedMemory::get(const void* key, unsigned index, size_t bytes, size_t align, bool is_static, bool poison) {
  const TsanIgnore ignore;
  for (const Array& array : arrays_) {
    if (array.key != key || array.index != index) continue;
    if (array.bytes == bytes) return array.data;
    fail("shared memory: piece %u is taken with %zu bytes, another thread took it with %zu", index, bytes, array.bytes);
  }
  void* data = nullptr;
  if (posix_memalign(&data, std::max(align, sizeof(void*)), bytes) != 0) throw std::bad_alloc();
  if (poison) std::memset(data, 0xFF, bytes);
  static_cast<void>(VALGRIND_MAKE_MEM_UNDEFINED(data, bytes));
  arrays_.push_back({key, index, bytes, data});
  if (is_static) static_bytes_ += bytes;
  if (static_bytes_ > kStaticSharedLimit) {
    fail("%zu bytes of static shared memory, allowed %zu", static_bytes_, kStaticSharedLimit);
  }
  return data;
}

void SharedMemory::clear() {
  const TsanIgnore ignore;
  for (const Array& array : arrays_) std::free(array.data);
  arrays_.clear();
  static_bytes_ = 0;
}

}  // namespace emulator
