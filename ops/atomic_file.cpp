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

FileDescriptor::~FileDescriptor() {
  if (is_open()) close(number_);
}

void check_path(const std::string& path) {
  TORCH_CHECK_VALUE(path.find('\0') == std::string::npos, "path \"", path.c_str(), "\" goes on after a NUL byte");
}

std::string system_reason(int error) { return std::generic_category().message(error); }

AtomicFile::AtomicFile(const std::string& path) : path_(target_of(path)), partial_(path_ + ".partial") {
  check_path(path);
  struct stat there = {};
  const bool replaces = stat(path_.c_str(), &there) == 0;
  if (!replaces && lstat(path_.c_str(), &there) == 0) fail("it is a link that leads nowhere");
  if (replaces && !S_ISREG(there.st_mode)) fail("it is no regular file");
  // The lock makes sure that no one else writes into the file of this name. It may have been renamed by the one who
  // held the lock until now: then this is not the partial file any more, and must not be touched.
  for (bool is_partial = false; !is_partial;) {
    // Neither a link to another file nor a pipe that someone has put there.
    FileDescriptor file(open(partial_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
    if (!file.is_open()) fail(partial_ + ": " + system_reason(errno));
    if (flock(file.number(), LOCK_EX | LOCK_NB) != 0) {
      fail(errno == EWOULDBLOCK ? "another call is writing it" : system_reason(errno));
    }
    struct stat opened = {}, named = {};
    is_partial =
        fstat(file.number(), &opened) == 0 && stat(partial_.c_str(), &named) == 0 && opened.st_ino == named.st_ino;
    if (is_partial && opened.st_nlink != 1) fail(partial_ + " is another file, too");
    if (is_partial) file_ = std::move(file);
  }
  if (ftruncate(file_.number(), 0) != 0) fail(system_reason(errno));
  if (replaces && fchmod(file_.number(), there.st_mode & 07777) != 0) fail(system_reason(errno));
}

AtomicFile::~AtomicFile() {
  if (file_.is_open()) unlink(partial_.c_str());
}

void AtomicFile::fail(const std::string& reason) const { TORCH_CHECK(false, "cannot write \"", path_, "\": ", reason); }

void AtomicFile::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file_.number(), at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(system_reason(errno));
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::write_at(size_t offset, const void* data, size_t bytes) {
  if (lseek(file_.number(), static_cast<off_t>(offset), SEEK_SET) < 0) fail(system_reason(errno));
  write(data, bytes);
  if (lseek(file_.number(), 0, SEEK_END) < 0) fail(system_reason(errno));
}

void AtomicFile::commit() {
  if (fsync(file_.number()) != 0) fail(system_reason(errno));
  if (rename(partial_.c_str(), path_.c_str()) != 0) fail(system_reason(errno));
  file_ = FileDescriptor();
  // The new name has to reach the disk as well. Some file systems cannot do that; the file is whole either way.
  const FileDescriptor folder(open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.is_open()) fsync(folder.number());
}

}  // namespace kivi
