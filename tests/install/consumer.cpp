// A program that uses the operators by name only and refers to no symbol of the library: a linker with --as-needed
// drops the library unless the exported target, or the header below, keeps it. Built three ways by install_test.sh; see
// there.
//
//   consumer            the library was linked
//   consumer LIBRARY    the library is opened at run time
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/custom_class.h>

#include <cstdio>
#include <tuple>

#ifdef KIVI_CONSUMER_INCLUDES_HEADER
#include <kivi/version.h>
#endif

int main(int argc, char** argv) {
  if (argc > 1 && !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::printf("dlopen: %s\n", dlerror());
    return 1;
  }
  const auto quantize = c10::Dispatcher::singleton().findSchema({"kivi::quantize", ""});
  if (!quantize) {
    std::puts("kivi::quantize is not registered");
    return 1;
  }
  if (!torch::getCustomClass("__torch__.torch.classes.kivi.KVCache")) {
    std::puts("the class kivi.KVCache is not registered");
    return 1;
  }
  // Codes 0, 1, 2, 3 over and over: the 2-bit codes of a byte are 0b11'10'01'00.
  const at::Tensor x = at::arange(64, at::kFloat).remainder(4);
  const auto codes = std::get<0>(
      quantize->typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, int64_t, int64_t, int64_t)>()
          .call(x, 0, 2, 32));
  const bool good = codes.equal(at::full({16}, 0xE4, at::kByte));
  std::puts(good ? "operator and class found" : "wrong codes");
  return good ? 0 : 1;
}
