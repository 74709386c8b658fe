// libkivi_cuda.so, which libkivi.so loads where CUDA is in use (cuda_library.cpp): whether this copy registers.
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/registration.h"

namespace kivi {

bool registers_cuda_operators() {
  static const bool first = [] {
    const auto op = c10::Dispatcher::singleton().findSchema({"kivi::quantize", ""});
    if (!op) {
      TORCH_WARN("libkivi_cuda was loaded without libkivi; its operators are not registered");
      return false;
    }
    const bool taken = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (taken) TORCH_WARN("a second copy of libkivi_cuda was loaded; its operators are not registered again");
    return !taken;
  }();
  return first;
}

}  // namespace kivi
