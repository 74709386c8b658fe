// The operators on CUDA are in a library of their own, libkivi_cuda.so, which needs the CUDA runtime. It lies beside
// libkivi.so, and is loaded where torch's own CUDA library is: a program that uses CUDA has that anyway, and one that
// does not never waits for it nor needs it.
#include "ops/cuda_library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <string>

namespace kivi {
namespace {

bool is_loaded(const char* library) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&load_cuda_library), &info) == 0 || info.dli_fname == nullptr) return "";
  const std::string path = info.dli_fname;
  const size_t end = path.rfind('/');
  return end == std::string::npos ? "" : path.substr(0, end + 1);
}

CaptureQuery g_is_capturing = nullptr;

}  // namespace

void load_cuda_library() {
  static bool done = false;
  if (done || !is_loaded("libtorch_cuda.so")) return;
  done = true;
  const std::string path = own_folder() + "libkivi_cuda.so";
  struct stat entry;
  if (path.front() == '/' && stat(path.c_str(), &entry) != 0) return;  // built without CUDA
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    if (path.front() == '/') TORCH_WARN("Kivi: ", path, " cannot be loaded, so there is no cache on CUDA: ", dlerror());
    return;
  }
  set_capture_query(reinterpret_cast<CaptureQuery>(dlsym(library, "kivi_is_capturing")));
}

void set_capture_query(CaptureQuery query) { g_is_capturing = query; }

bool is_capturing(const at::Tensor& tensor) { return g_is_capturing != nullptr && g_is_capturing(tensor); }

bool has_cuda_operators() {
  load_cuda_library();
  const auto op = c10::Dispatcher::singleton().findSchema({"kivi::cache_append", ""});
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

}  // namespace kivi
