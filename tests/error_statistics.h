// The distribution of errors, not one number: what a limit in a test or a figure in a document comes from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kivi::test {

class ErrorStatistics {
 public:
  void add(double error) {
    errors_.push_back(static_cast<float>(std::fabs(error)));
    squares_ += error * error;
  }
  void add_all(const ErrorStatistics& other) {
    errors_.insert(errors_.end(), other.errors_.begin(), other.errors_.end());
    squares_ += other.squares_;
  }
  bool empty() const { return errors_.empty(); }
  // A NaN is larger than any error: it shows in the maximum.
  double max() const {
    double most = 0;
    for (const float e : errors_) {
      if (!(static_cast<double>(e) <= most)) most = static_cast<double>(e);
    }
    return most;
  }
  double rms() const { return std::sqrt(squares_ / static_cast<double>(std::max<size_t>(errors_.size(), 1))); }
  // The error that this share of all errors does not exceed.
  double quantile(double share) const {
    if (errors_.empty()) return 0;
    std::vector<float> sorted = errors_;
    const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(sorted.size() - 1));
    std::nth_element(sorted.begin(), sorted.begin() + at, sorted.end());
    return static_cast<double>(sorted[static_cast<size_t>(at)]);
  }

 private:
  std::vector<float> errors_;
  double squares_ = 0;
};

}  // namespace kivi::test
