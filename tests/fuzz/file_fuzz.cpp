// Files of caches: load_caches must refuse what is no whole file with a c10::Error, or give caches that save and load
// alike. An input is a byte that says whether size and checksum are made right (without that no change would get past
// them), and the file.
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz/tensors.h"
#include "tests/sealed.h"

namespace kivi::fuzz {
namespace {

void run(std::string file, bool sealed) {
  if (sealed) file = test::sealed(file);
  static const int memory = memfd_create("caches", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(memory);
  KIVI_REQUIRE(ftruncate(memory, 0) == 0);
  KIVI_REQUIRE(pwrite(memory, file.data(), file.size(), 0) == static_cast<ssize_t>(file.size()));
  std::vector<c10::intrusive_ptr<KVCache>> caches;
  try {
    caches = load_caches(path);
  } catch (const c10::Error&) {
    return;
  }
  for (const auto& cache : caches) {
    const KVCache::State state = cache->state();
    KIVI_REQUIRE(same_state(KVCache::from_state(state)->state(), state));
    cache->dequantize();
  }
}

}  // namespace
}  // namespace kivi::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  kivi::fuzz::run(std::string(reinterpret_cast<const char*>(data) + 1, size - 1), data[0] % 2 != 0);
  return 0;
}
