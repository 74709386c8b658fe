// Writing files that are there whole or not at all.
#pragma once

#include <cstddef>
#include <string>

namespace kivi {

// A file that takes its place only when it is complete: it is written to <path>.partial, forced to the disk, and
// renamed. Whenever the process is killed, `path` is what it was before or the whole new file. What a killed process
// left in <path>.partial is overwritten by the next one. Two that write the same path at once: the second one gets an
// error. A path that is a link keeps being one; a file that is replaced keeps its permissions. Errors are c10::Errors
// with the path and the system's reason.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  // Unless it was committed, nothing is left of it.
  ~AtomicFile();

  void write(const void* data, size_t bytes);
  // Overwrites what was written at `offset`, and goes on at the end.
  void write_at(size_t offset, const void* data, size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string path_, partial_;
  int file_ = -1;
};

}  // namespace kivi
