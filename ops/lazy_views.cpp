// Views that torch negates or conjugates whenever they are read (torch._neg_view, x.conj()), for the operators that
// write to their arguments. torch's own fallback writes such an argument back from the result that an in-place operator
// returns, and reads past the end of its stack where there is no result. Here it is an error; arguments that are only
// read become plain tensors, as the fallback makes them.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "ops/registration.h"

namespace kivi {
namespace {

template <c10::DispatchKey kKey>
void call_with_plain_tensors(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr bool kNegated = kKey == c10::DispatchKey::Negative;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor()) continue;
    const at::Tensor t = value.toTensor();
    if (!t.defined() || !(kNegated ? t.is_neg() : t.is_conj())) continue;
    const bool is_written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    TORCH_CHECK_VALUE(!is_written, op.schema().name(), ": ", arguments[i].name(), " is a ",
                      kNegated ? "negated" : "conjugated", " view, which cannot be written to; got sizes ",
                      t.sym_sizes());
    value = kNegated ? t.resolve_neg() : t.resolve_conj();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

template <c10::DispatchKey kKey>
void register_for(torch::Library& m) {
  for (const char* name : {"cache_append", "cache_truncate", "cache_copy_pages"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_with_plain_tensors<kKey>>());
  }
}

}  // namespace
}  // namespace kivi

TORCH_LIBRARY_IMPL(kivi, Negative, m) {
  if (kivi::registers_operators()) kivi::register_for<c10::DispatchKey::Negative>(m);
}
TORCH_LIBRARY_IMPL(kivi, Conjugate, m) {
  if (kivi::registers_operators()) kivi::register_for<c10::DispatchKey::Conjugate>(m);
}
