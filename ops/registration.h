// Guards against two copies of the library in one process: the first one registers, a later one warns and stays silent,
// where registering twice would abort the process.
#pragma once

#include <torch/library.h>

namespace kivi {

// Whether this copy of the library is the one that registers. The first call decides, whichever file makes it.
bool registers_operators();

// An error in a copy that did not register: a class and operators of two copies, perhaps of two versions, do not mix.
void check_only_copy();

// The same for the operators on CUDA, which are in a library of their own.
bool registers_cuda_operators();

// Adds torch.classes.kivi.KVCache.
void register_cache_class(torch::Library& m);

}  // namespace kivi
