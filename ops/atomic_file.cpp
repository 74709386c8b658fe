#include "ops/atomic_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <system_error>

namespace kivi {
namespace {

// Where a link leads to; the path itself where there is nothing yet.
std::string target_of(const std::string& path) {
  char real[PATH_MAX];
  return realpath(path.c_str(), real) != nullptr ? real : path;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(target_of(path)), partial_(path_ + ".partial") {
  struct stat there = {};
  const bool replaces = stat(path_.c_str(), &there) == 0;
  if (replaces && !S_ISREG(there.st_mode)) fail("it is no regular file", 0);
  // The lock makes sure that no one else writes into the file of this name. It may have been renamed by the one who
  // held the lock until now: then this is not the partial file any more, and must not be touched.
  for (;;) {
    file_ = open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) fail("", errno);
    struct stat opened = {}, named = {};
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      close(file_);
      file_ = -1;
      fail(error == EWOULDBLOCK ? "another call is writing it" : "", error == EWOULDBLOCK ? 0 : error);
    }
    if (fstat(file_, &opened) == 0 && stat(partial_.c_str(), &named) == 0 && opened.st_ino == named.st_ino) break;
    close(file_);
    file_ = -1;
  }
  if (ftruncate(file_, 0) != 0 || (replaces && fchmod(file_, there.st_mode & 07777) != 0)) {
    const int error = errno;
    unlink(partial_.c_str());
    close(file_);
    file_ = -1;
    fail("", error);
  }
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  unlink(partial_.c_str());
  close(file_);
}

void AtomicFile::fail(const char* what, int error) const {
  TORCH_CHECK(false, "cannot write \"", path_, "\": ", error != 0 ? std::generic_category().message(error) : what);
}

void AtomicFile::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file_, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("", errno);
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::write_at(size_t offset, const void* data, size_t bytes) {
  if (lseek(file_, static_cast<off_t>(offset), SEEK_SET) < 0) fail("", errno);
  write(data, bytes);
  if (lseek(file_, 0, SEEK_END) < 0) fail("", errno);
}

void AtomicFile::commit() {
  if (fsync(file_) != 0) fail("", errno);
  if (rename(partial_.c_str(), path_.c_str()) != 0) fail("", errno);
  close(file_);
  file_ = -1;
  // The new name has to reach the disk as well. Some file systems cannot do that; the file is whole either way.
  const int folder = open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  fsync(folder);
  close(folder);
}

}  // namespace kivi
