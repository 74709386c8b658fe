// kivi::KVCache and the operators inside a LibTorch program, beside what such a program would call otherwise, all in
// one run on one machine, with 1 and 2 threads. Needs torch; kernel_bench and encode_bench do not.
#include "cache_bench.h"

int main(int argc, char** argv) {
  const c10::InferenceMode no_autograd;
  return kivi::bench::run_program(argc, argv, {1, 2}, [] {
    kivi::bench::add_decode_benchmarks();
    kivi::bench::add_storage_benchmarks();
  });
}
