#include "progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace smollm2 {

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)), total_(total), terminal_(isatty(STDERR_FILENO) == 1), thread_([this] { run(); }) {}

Progress::~Progress() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (!shown_) return;
  std::fprintf(stderr, "%s%s: %.0f s\n", terminal_ ? "\r\033[K" : "", what_.c_str(), seconds());
  std::fflush(stderr);
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

void Progress::run() {
  const std::chrono::milliseconds between(terminal_ ? 500 : 10000);
  std::unique_lock<std::mutex> lock(mutex_);
  if (wake_.wait_for(lock, std::chrono::seconds(2), [this] { return stop_; })) return;
  do {
    show();
  } while (!wake_.wait_for(lock, between, [this] { return stop_; }));
}

void Progress::show() {
  shown_ = true;
  const double spent = seconds();
  const auto done = static_cast<double>(done_);
  std::string line = what_;
  char text[96];
  if (total_ > 0 && done > 0) {
    const auto total = static_cast<double>(total_);
    std::snprintf(text, sizeof text, ": %3.0f %%, about %.0f s left", 100 * done / total,
                  spent * (total - done) / done);
  } else {
    std::snprintf(text, sizeof text, ": %.0f s", spent);
  }
  line += text;
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
}

}  // namespace smollm2
