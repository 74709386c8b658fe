// Options, formats and recipes; see options.h.
#include "ops/options.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/checks.h"

namespace kivi {
namespace {

std::vector<double> parts_of(const RangeSearch& search) {
  std::vector<double> parts;
  for (int64_t i = 0; i < search.count; i++) parts.push_back(search.thousandths[i] / 1000.0);
  return parts;
}

RangeSearch search_of(const char* name, const std::vector<double>& parts) {
  RangeSearch search;
  TORCH_CHECK_VALUE(parts.size() <= static_cast<size_t>(RangeSearch::kMax), name, " must have at most ",
                    RangeSearch::kMax, " parts, got ", parts.size());
  for (const double part : parts) {
    TORCH_CHECK_VALUE(part >= 0.001 && part <= 1.0, name, " must have parts of the range from 0.001 to 1, got ", part);
    search.thousandths[search.count++] = static_cast<int16_t>(std::lround(part * 1000));
  }
  return search;
}

const char* scale_dtype_name(ScaleType type) {
  return narrow(type) == ScaleType::kFloat8 ? "float8" : narrow(type) == ScaleType::kFloat16 ? "float16" : "float32";
}

// What a recipe sets: everything that decides about quality and bits.
struct Recipe {
  const char* name;
  int64_t k_bits, v_bits;
  const char* scale_dtype;
  RangeSearch k_search, v_search;
  bool corrections;    // of K's bias and V's gain
  bool one_per_token;  // one symmetric group of V per token and head
  bool rotated;
  bool classes = false;      // of K: a quarter of the channels at 4 bits, the others at k_bits
  bool third_class = false;  // and three eighths at 3 bits
};

constexpr Recipe kRecipes[] = {
    {"kivi", 2, 2, "float16", {}, {}, false, false, false},
    {"compact", 2, 2, "float8", kRecipeKeySearch, kRecipeTokenSearch, true, true, true, true},
    {"balanced", 2, 2, "float8", kRecipeKeySearch, kRecipeGroupSearch, true, false, true, true},
    {"quality", 2, 3, "float8", kRecipeKeySearch, kRecipeTokenSearch, true, true, true, true, true},
    {"near-lossless", 4, 4, "float8", kRecipeKeySearch, kRecipeTokenSearch, true, true, true},
};

// The classes of a recipe for a head of `dim` channels: shares of it, in whole units of the classes.
std::vector<int64_t> classes_of(const Recipe& recipe, int64_t dim) {
  const auto share = [dim](int64_t eighths, int64_t unit) {
    return std::max<int64_t>(unit, (dim * eighths + 4 * unit) / (8 * unit) * unit);
  };
  std::vector<int64_t> classes;
  int64_t left = dim;
  const auto take = [&](int64_t channels, int64_t bits) {
    if (channels > left) return;
    classes.push_back(channels);
    classes.push_back(bits);
    left -= channels;
  };
  take(share(2, 16), 4);
  if (recipe.third_class) take(share(3, 32), 3);
  if (left > 0) take(left, recipe.k_bits);
  return classes;
}

}  // namespace

CacheOptions with_recipe(const CacheOptions& options) {
  if (options.recipe.empty()) return options;
  std::string names;
  const Recipe* recipe = nullptr;
  for (const Recipe& r : kRecipes) {
    names += std::string(names.empty() ? "\"" : ", \"") + r.name + "\"";
    if (options.recipe == r.name) recipe = &r;
  }
  TORCH_CHECK_VALUE(recipe != nullptr, "recipe must be one of ", names, ", got \"", options.recipe, "\"");
  const CacheOptions defaults;
  const auto check_free = [&](bool is_default, const char* name) {
    TORCH_CHECK_VALUE(is_default, "recipe \"", recipe->name, "\" sets ", name, ", which must not be given beside it");
  };
  check_free(options.k_bits == defaults.k_bits, "k_bits");
  check_free(options.v_bits == defaults.v_bits, "v_bits");
  check_free(options.scale_dtype == defaults.scale_dtype, "scale_dtype");
  check_free(options.range_search == defaults.range_search, "range_search");
  check_free(options.k_search == defaults.k_search, "k_search");
  check_free(options.v_search == defaults.v_search, "v_search");
  check_free(options.k_bias_correction == defaults.k_bias_correction, "k_bias_correction");
  check_free(options.v_gain_correction == defaults.v_gain_correction, "v_gain_correction");
  check_free(options.v_group_size == defaults.v_group_size, "v_group_size");
  check_free(options.v_symmetric == defaults.v_symmetric, "v_symmetric");
  check_free(options.v_rotated == defaults.v_rotated, "v_rotated");
  check_free(options.k_classes.empty(), "k_classes");
  CacheOptions o = options;
  o.k_bits = recipe->k_bits;
  o.v_bits = recipe->v_bits;
  o.scale_dtype = recipe->scale_dtype;
  o.k_search = parts_of(recipe->k_search);
  o.v_search = parts_of(recipe->v_search);
  o.k_bias_correction = o.v_gain_correction = recipe->corrections;
  if (recipe->one_per_token) o.v_group_size = o.value_head_dim.value_or(o.head_dim);
  o.v_symmetric = recipe->one_per_token;
  o.v_rotated = recipe->rotated;
  // A head_dim that no format takes has no classes; who asks for it is told by check_format.
  if (recipe->classes && o.head_dim >= 1 && o.head_dim <= kMaxHeadDim) o.k_classes = classes_of(*recipe, o.head_dim);
  return o;
}

namespace {

// One class alone is a plain format.
void set_classes(const std::vector<int64_t>& classes, Format& f) {
  TORCH_CHECK_VALUE(classes.size() % 2 == 0 && classes.size() <= 2 * kMaxKeyClasses,
                    "k_classes must be channels and bits by turns, of at most ", kMaxKeyClasses, " classes, got ",
                    classes.size(), " integers");
  int64_t widest = 0;
  for (size_t i = 0; i < classes.size(); i += 2) {
    TORCH_CHECK_VALUE(is_valid_bits(classes[i + 1]), "k_classes must give each class 1, 2, 3, 4 or 8 bits, got ",
                      classes[i + 1]);
    f.key_classes[f.num_key_classes++] = {classes[i], classes[i + 1]};
    widest = std::max(widest, classes[i + 1]);
  }
  if (f.num_key_classes > 0) f.k_bits = widest;
  if (f.num_key_classes == 1) {
    TORCH_CHECK_VALUE(classes[0] == f.head_dim, "k_classes has ", classes[0], " channels, but head_dim is ",
                      f.head_dim);
    f.num_key_classes = 0;
  }
}

}  // namespace

Format format_of(const CacheOptions& options) {
  const CacheOptions o = with_recipe(options);
  Format f;
  f.num_kv_heads = o.num_kv_heads;
  f.head_dim = o.head_dim;
  f.value_head_dim = o.value_head_dim.value_or(o.head_dim);
  f.k_bits = o.k_bits;
  f.v_bits = o.v_bits;
  set_classes(o.k_classes, f);
  f.group_size = o.group_size;
  f.residual_length = o.residual_length;
  f.sink_length = o.sink_length;
  f.scale_type = check_scale_dtype(o.scale_dtype);
  if (o.range_search) f.k_search = f.v_search = kNarrowSearch;
  if (!o.k_search.empty()) f.k_search = search_of("k_search", o.k_search);
  if (!o.v_search.empty()) f.v_search = search_of("v_search", o.v_search);
  f.k_bias_correction = o.k_bias_correction;
  f.v_gain_correction = o.v_gain_correction;
  f.v_symmetric = o.v_symmetric;
  f.v_rotated = o.v_rotated;
  check_format(f);
  if (o.v_group_size) {
    const int64_t size = *o.v_group_size;
    TORCH_CHECK_VALUE(size >= 1 && (size >= f.value_head_dim || size % f.group_size == 0),
                      "v_group_size must be a multiple of group_size ", f.group_size, " or the whole value_head_dim ",
                      f.value_head_dim, ", got ", size);
    f.v_group_size = round_up(std::min(size, f.value_head_dim), f.group_size);
    check_format(f);
  }
  check_precision(o.precision);
  return f;
}

CacheOptions options_of(const Format& format, const std::string& precision) {
  CacheOptions o;
  o.num_kv_heads = format.num_kv_heads;
  o.head_dim = format.head_dim;
  o.value_head_dim = format.value_head_dim;
  o.k_bits = format.k_bits;
  o.v_bits = format.v_bits;
  o.group_size = format.group_size;
  o.residual_length = format.residual_length;
  o.sink_length = format.sink_length;
  o.precision = precision;
  o.scale_dtype = scale_dtype_name(format.scale_type);
  o.k_search = parts_of(format.k_search);
  o.v_search = parts_of(format.v_search);
  o.range_search = format.k_search == kNarrowSearch && format.v_search == kNarrowSearch;
  if (o.range_search) o.k_search.clear(), o.v_search.clear();
  o.k_bias_correction = format.k_bias_correction;
  o.v_gain_correction = format.v_gain_correction;
  if (format.v_group_size > 0) o.v_group_size = format.v_group_size;
  o.v_symmetric = format.v_symmetric;
  o.v_rotated = format.v_rotated;
  for (int64_t c = 0; c < format.num_key_classes; c++) {
    o.k_classes.push_back(format.key_classes[c].channels);
    o.k_classes.push_back(format.key_classes[c].bits);
  }
  return o;
}

}  // namespace kivi
