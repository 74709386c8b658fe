// From the options that users give to the format that the kernels read, and back; recipes.
#pragma once

#include <string>

#include "kivi/cache.h"
#include "kivi/format.h"

namespace kivi {

// The options with what their recipe sets. An option that the recipe sets and the caller too is an error.
CacheOptions with_recipe(const CacheOptions& options);

// Checks every option; errors name it.
Format format_of(const CacheOptions& options);

// Options that give this format.
CacheOptions options_of(const Format& format, const std::string& precision);

}  // namespace kivi
