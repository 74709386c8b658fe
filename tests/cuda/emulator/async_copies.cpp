// The copies are real ones and seen by ThreadSanitizer; the lists of them are the emulator's own.
#include "emulator/async_copies.h"

#include <cstring>

#include "emulator/sanitizers.h"

namespace emulator {

void perform(const AsyncCopy& copy) {
  std::memcpy(copy.shared, copy.global, copy.valid_bytes);
  std::memset(static_cast<char*>(copy.shared) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

void AsyncCopies::clear() {
  copies_.clear();
  groups_.clear();
  uncommitted_ = 0;
}

void AsyncCopies::add(const AsyncCopy& copy) {
  const TsanIgnore ignore;
  copies_.push_back(copy);
  uncommitted_++;
}

void AsyncCopies::commit() {
  const TsanIgnore ignore;
  groups_.push_back(uncommitted_);
  uncommitted_ = 0;
}

void AsyncCopies::wait(size_t groups_left) {
  while (groups_.size() > groups_left) {
    const size_t count = groups_.front();
    for (size_t i = 0; i < count; i++) perform(copies_[i]);
    const TsanIgnore ignore;
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(count));
    groups_.erase(groups_.begin());
  }
}

void AsyncCopies::wait_for_all() {
  for (const AsyncCopy& copy : copies_) perform(copy);
  clear();
}

}  // namespace emulator
