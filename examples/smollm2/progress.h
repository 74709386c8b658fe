// One line that tells how far a long piece of work is. It appears after two seconds: on a terminal it is rewritten in
// place, else it is a plain line now and then. It goes to the standard error output, so that results can be sent to a
// file.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace smollm2 {

class Progress {
 public:
  // Ends with the object. `total` is the number of steps, 0 if it is not known.
  Progress(std::string what, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(int64_t done) { done_ = done; }
  double seconds() const;

 private:
  void run();
  void show();

  const std::string what_;
  const int64_t total_;
  const bool terminal_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::atomic<int64_t> done_{0};
  bool shown_ = false;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace smollm2
