#include "emulator/report.h"

#include <cstdio>
#include <map>

namespace emulator {
namespace {

// "0-15,32-47"
std::string ranges(const std::vector<unsigned>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) last++;
    if (!text.empty()) text += ",";
    text += std::to_string(numbers[i]);
    if (last > i) text += "-" + std::to_string(numbers[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace

std::string describe(const Launch& launch, uint3 block) {
  char text[256];
  snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u)", launch.name, block.x, block.y, block.z);
  return text;
}

std::string describe(const Thread& thread) {
  char text[64];
  snprintf(text, sizeof text, "thread (%u,%u,%u)", thread.index.x, thread.index.y, thread.index.z);
  return text;
}

std::string describe(const Collective& collective) {
  char mask[24] = "";
  if (collective.mask != 0) snprintf(mask, sizeof mask, "(mask %08x)", collective.mask);
  char text[512];
  snprintf(text, sizeof text, "%s%s at %s:%d", collective.what, mask, collective.site.file, collective.site.line);
  return text;
}

std::string describe_deadlock(const std::vector<Thread>& threads) {
  std::map<std::string, std::vector<unsigned>> groups;
  for (const Thread& thread : threads) {
    const bool done = thread.state == Thread::State::done;
    groups[done ? "exited" : "waiting in " + describe(thread.waits_in)].push_back(thread.number);
  }
  std::string report = "deadlock";
  for (const auto& [text, numbers] : groups) {
    report += "\n  " + std::to_string(numbers.size()) + " threads " + text + ": threads " + ranges(numbers);
  }
  return report;
}

}  // namespace emulator
