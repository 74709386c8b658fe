// How fast keys and values become records, beside copying the same keys and values once in the same run. One thread.
//
//   encode_bench [--tokens 4096] [--heads 8] [--dim 128] [--k-bits 2] [--v-bits 2] [--group 32] [--type f32|f16|bf16]
//                [--search] [--repeats 40]
//
// Cold: the inputs and outputs are rotated over more than 300 MB, so that every call finds them in memory only. The
// least of the repeats counts: neighbours on the machine only add time.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "cpu/half.h"
#include "cpu/kernels.h"

namespace {

using namespace kivi;
using namespace kivi::cpu;

struct Options {
  int64_t tokens = 4096, heads = 8, dim = 128, k_bits = 2, v_bits = 2, group = 32, repeats = 40;
  Element type = Element::kFloat32;
  bool search = false;
};

bool parse(int argc, char** argv, Options* o) {
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name == "--search") {
      o->search = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const std::string value = argv[++i];
    int64_t* number = name == "--tokens"    ? &o->tokens
                      : name == "--heads"   ? &o->heads
                      : name == "--dim"     ? &o->dim
                      : name == "--k-bits"  ? &o->k_bits
                      : name == "--v-bits"  ? &o->v_bits
                      : name == "--group"   ? &o->group
                      : name == "--repeats" ? &o->repeats
                                            : nullptr;
    if (number != nullptr) {
      *number = std::atoll(value.c_str());
    } else if (name == "--type") {
      o->type = value == "f16" ? Element::kFloat16 : value == "bf16" ? Element::kBFloat16 : Element::kFloat32;
    } else {
      return false;
    }
  }
  return true;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory allocate(int64_t bytes) {
  const int64_t large_page = int64_t{1} << 21;
  const int64_t size = round_up(bytes, large_page);
  auto* p = static_cast<uint8_t*>(std::aligned_alloc(static_cast<size_t>(large_page), static_cast<size_t>(size)));
  if (p == nullptr) std::abort();
  madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);
  std::memset(p, 0, static_cast<size_t>(size));
  return Memory(p);
}

// Least time in milliseconds of `repeats` calls body(set), the sets in turn.
template <class Body>
double least_time(int64_t repeats, int64_t sets, Body body) {
  double best = 1e30;
  for (int64_t i = 0; i < repeats; i++) {
    const auto start = std::chrono::steady_clock::now();
    body(i % sets);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  if (!parse(argc, argv, &o)) {
    std::fprintf(stderr,
                 "usage: %s [--tokens N] [--heads N] [--dim N] [--k-bits N] [--v-bits N] [--group N] "
                 "[--type f32|f16|bf16] [--search] [--repeats N]\n",
                 argv[0]);
    return 1;
  }
  Format f;
  f.num_kv_heads = o.heads, f.head_dim = f.value_head_dim = o.dim, f.k_bits = o.k_bits, f.v_bits = o.v_bits;
  f.group_size = o.group, f.range_search = o.search;
  int64_t bad = 0;
  if (const char* error = format_error(f, &bad)) {
    std::fprintf(stderr, "%s, got %lld\n", error, static_cast<long long>(bad));
    return 1;
  }
  const RecordLayout layout = record_layout(f);
  const int64_t groups = o.tokens / o.group, elements = o.tokens * o.heads * o.dim;
  const int64_t bytes = elements * element_bytes(o.type), record_bytes = groups * o.heads * layout.bytes;
  const int64_t sets = (int64_t{320} << 20) / (2 * bytes + record_bytes) + 1;

  std::vector<Memory> k, v, records;
  for (int64_t s = 0; s < sets; s++) {
    k.push_back(allocate(bytes)), v.push_back(allocate(bytes)), records.push_back(allocate(record_bytes));
    for (int64_t i = 0; i < elements; i++) {
      const auto mixed = static_cast<uint32_t>(i + s) * 2654435761u;
      const float x = static_cast<float>(static_cast<int32_t>(mixed)) * 1e-9f;
      store_element(k.back().get(), o.type, i, x);
      store_element(v.back().get(), o.type, elements - 1 - i, x);
    }
  }

  // Keys and values are [head][token][channel].
  const auto encode_set = [&](const Kernels& kernels, int64_t s, bool warm) {
    for (int64_t h = 0; h < o.heads; h++) {
      for (int64_t g = 0; g < groups; g++) {
        const int64_t i = h * groups + g;
        const int64_t at = warm ? i % 4 * o.group * o.dim : i * o.group * o.dim;
        const EncodeParams p{&f,
                             &layout,
                             advance(k[static_cast<size_t>(s)].get(), o.type, at),
                             advance(v[static_cast<size_t>(s)].get(), o.type, at),
                             o.dim,
                             o.dim,
                             o.type,
                             records[static_cast<size_t>(s)].get() + (warm ? i % 4 : i) * layout.bytes};
        if (!kernels.encode(p)) std::abort();
      }
    }
  };

  std::printf("%s, 1 thread\n", cpu_model().c_str());
  std::printf("%lld tokens, %lld kv heads, head size %lld, K%lldV%lld, G %lld, %s%s: %.1f MB read, %.1f MB written\n",
              static_cast<long long>(o.tokens), static_cast<long long>(o.heads), static_cast<long long>(o.dim),
              static_cast<long long>(o.k_bits), static_cast<long long>(o.v_bits), static_cast<long long>(o.group),
              o.type == Element::kFloat32   ? "float32"
              : o.type == Element::kFloat16 ? "float16"
                                            : "bfloat16",
              o.search ? ", range search" : "", 2e-6 * static_cast<double>(bytes),
              1e-6 * static_cast<double>(record_bytes));
  const auto copy = [&](int64_t s) {
    const auto to = static_cast<size_t>((s + sets / 2) % sets), from = static_cast<size_t>(s);
    std::memcpy(v[to].get(), k[from].get(), static_cast<size_t>(bytes));
    std::memcpy(k[to].get(), v[from].get(), static_cast<size_t>(bytes));
  };
  double copy_time = least_time(o.repeats, sets, copy);
  struct Row {
    const char* name;
    double cold, warm;
  };
  std::vector<Row> rows;
  for (const Isa isa : {Isa::kScalar, Isa::kNeon, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni}) {
    const Kernels* kernels = kernels_for(isa);
    if (kernels == nullptr) continue;
    const int64_t repeats = isa == Isa::kScalar ? 2 : o.repeats;
    rows.push_back({kernels->name, least_time(repeats, sets, [&](int64_t s) { encode_set(*kernels, s, false); }),
                    least_time(repeats, 1, [&](int64_t s) { encode_set(*kernels, s, true); })});
  }
  copy_time = std::min(copy_time, least_time(o.repeats, sets, copy));  // before and after: the machine may change
  std::printf("copying K and V once, cold       %8.2f ms  %6.1f GB/s read\n", copy_time,
              2e-6 * static_cast<double>(bytes) / copy_time);
  for (const Row& row : rows) {
    std::printf("encode %-12s cold         %8.2f ms  %6.1f GB/s read  %5.2f x the copy   (in cache %.2f ms)\n",
                row.name, row.cold, 2e-6 * static_cast<double>(bytes) / row.cold, row.cold / copy_time, row.warm);
  }
  return 0;
}
