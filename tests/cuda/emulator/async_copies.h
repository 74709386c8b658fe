// The copies that a thread has begun with cp.async and not yet waited for.
#pragma once

#include <cstddef>
#include <vector>

namespace emulator {

struct AsyncCopy {
  void* shared;
  const void* global;
  size_t bytes, valid_bytes;  // the rest becomes zero
};

// Done by the thread that copies, so that sanitizers hold it responsible.
void perform(const AsyncCopy& copy);

class AsyncCopies {
 public:
  void clear();
  void add(const AsyncCopy& copy);
  void commit();
  void wait(size_t groups_left);
  void wait_for_all();

 private:
  std::vector<AsyncCopy> copies_;  // oldest first
  std::vector<size_t> groups_;     // copies in each committed group
  size_t uncommitted_ = 0;
};

}  // namespace emulator
