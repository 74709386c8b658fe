// What a piece of code allocates, through torch's own reports.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>

namespace kivi::test {

// Follows the live and the largest allocations of this thread.
class MemoryWatch : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    live += bytes;
    if (bytes > 0) allocated += bytes, calls++, largest = std::max(largest, bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live = 0, allocated = 0, largest = 0, calls = 0;
};

struct Watched {
  std::shared_ptr<MemoryWatch> watch = std::make_shared<MemoryWatch>();
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, watch};
  MemoryWatch* operator->() const { return watch.get(); }
};

}  // namespace kivi::test
