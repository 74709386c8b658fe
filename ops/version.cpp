// kivi::version(), kivi::cpu_capability() and the operators of the same names, and the format helpers, which take no
// tensor.
#include "kivi/version.h"

#include <torch/version.h>

#include "csrc/cpu/kernels.h"
#include "kivi/cache.h"
#include "kivi/ops.h"
#include "ops/registration.h"

#ifndef KIVI_VERSION
#error "the build defines KIVI_VERSION"
#endif

namespace kivi {

std::string version() { return std::string(KIVI_VERSION) + " (torch " + TORCH_VERSION + ")"; }

std::string cpu_capability() { return cpu::kernels().name; }

namespace detail {
int register_library() { return 1; }
}  // namespace detail

}  // namespace kivi

// CompositeImplicitAutograd: they touch no tensor and serve every device.
TORCH_LIBRARY_IMPL(kivi, CompositeImplicitAutograd, m) {
  if (!kivi::registers_operators()) return;
  m.impl("version", kivi::version);
  m.impl("cpu_capability", kivi::cpu_capability);
  m.impl("cache_format",
         [](int64_t num_kv_heads, int64_t head_dim, std::optional<int64_t> value_head_dim, int64_t k_bits,
            int64_t v_bits, int64_t group_size, int64_t residual_length, int64_t sink_length,
            std::string_view scale_dtype, bool range_search, std::string_view recipe, at::ArrayRef<double> k_search,
            at::ArrayRef<double> v_search, bool k_bias_correction, bool v_gain_correction,
            std::optional<int64_t> v_group_size, bool v_symmetric, bool v_rotated, at::IntArrayRef k_classes) {
           kivi::CacheOptions o{num_kv_heads, head_dim,   value_head_dim,  k_bits,
                                v_bits,       group_size, residual_length, sink_length};
           o.scale_dtype = std::string(scale_dtype);
           o.range_search = range_search;
           o.recipe = std::string(recipe);
           o.k_search = k_search.vec();
           o.v_search = v_search.vec();
           o.k_bias_correction = k_bias_correction;
           o.v_gain_correction = v_gain_correction;
           o.v_group_size = v_group_size;
           o.v_symmetric = v_symmetric;
           o.v_rotated = v_rotated;
           o.k_classes = k_classes.vec();
           return kivi::cache_format(o);
         });
  m.impl("cache_page_bytes", [](at::IntArrayRef format) { return kivi::cache_page_bytes(format); });
  m.impl("cache_window_capacity", [](at::IntArrayRef format) { return kivi::cache_window_capacity(format); });
}
