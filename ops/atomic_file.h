// Files of the system: descriptors that close themselves, and writing files that are there whole or not at all.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace kivi {

// An open file, or none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

// A path with a NUL byte would name another file: the system reads up to it.
void check_path(const std::string& path);

// What the system says about an error, errno.
std::string system_reason(int error);

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
  [[noreturn]] void fail(const std::string& reason) const;

  std::string path_, partial_;
  FileDescriptor file_;  // of the partial file, and its lock; none once it was committed
};

}  // namespace kivi
