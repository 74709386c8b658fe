// Calibrations as JSON files; see kivi/calibration.h. The JSON library is known here only.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kivi/calibration.h"
#include "ops/atomic_file.h"
#include "ops/checks.h"
#include "ops/options.h"

namespace kivi {
namespace {

using Json = nlohmann::ordered_json;  // keys stay in the order in which they are written

constexpr int64_t kCalibrationVersion = 1;

// The keyword arguments of KVCache beside num_kv_heads, head_dim and recipe.
template <class Options, class Visit>
void for_each_option(Options& o, const Visit& visit) {
  visit("value_head_dim", o.value_head_dim);
  visit("k_bits", o.k_bits);
  visit("v_bits", o.v_bits);
  visit("group_size", o.group_size);
  visit("residual_length", o.residual_length);
  visit("sink_length", o.sink_length);
  visit("precision", o.precision);
  visit("range_search", o.range_search);
  visit("scale_dtype", o.scale_dtype);
  visit("k_search", o.k_search);
  visit("v_search", o.v_search);
  visit("k_bias_correction", o.k_bias_correction);
  visit("v_gain_correction", o.v_gain_correction);
  visit("v_group_size", o.v_group_size);
  visit("v_symmetric", o.v_symmetric);
  visit("v_rotated", o.v_rotated);
  visit("k_classes", o.k_classes);
}

// ---------------------------------------------------------------------------------------------- writing

// All values are spelt out: the file means the same when a recipe or a default has changed.
Json keyword_arguments(const CacheOptions& options) {
  const CacheOptions o = with_recipe(options);
  Json json = Json::object();
  for_each_option(o, [&](const char* name, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const std::optional<int64_t>&>) {
      if (value) json[name] = *value;
    } else {
      json[name] = value;
    }
  });
  return json;
}

Json cost_of(const LayerCandidate& c) { return {{"name", c.name}, {"error", c.error}, {"bits", c.bits}}; }

Json json_of(const LayerCalibration& layer) {
  const LayerCandidate& chosen = layer.candidates[static_cast<size_t>(layer.chosen)];
  Json candidates = Json::array();
  for (const LayerCandidate& c : layer.candidates) candidates.push_back(cost_of(c));
  return {{"layer", layer.layer},
          {"num_kv_heads", chosen.options.num_kv_heads},
          {"head_dim", chosen.options.head_dim},
          {"options", keyword_arguments(chosen.options)},
          {"weight", layer.weight},
          {"chosen", cost_of(chosen)},
          {"candidates", candidates}};
}

// ---------------------------------------------------------------------------------------------- reading

// A value of the file and where it stands.
class Entry {
 public:
  Entry(const std::string& file, std::string key, const Json& value)
      : file_(file), key_(std::move(key)), value_(value) {}

  void check(bool good, const std::string& what) const {
    TORCH_CHECK_VALUE(good, "\"", file_, "\": ", key_.empty() ? "the file" : key_, " must be ", what, ", got ",
                      shown(value_));
  }

  // An object that has these keys and no others; all of them, unless they are optional.
  void check_object(const std::vector<std::string>& keys, bool optional = false) const {
    check(value_.is_object(), "an object");
    for (const auto& entry : value_.items()) {
      TORCH_CHECK_VALUE(std::find(keys.begin(), keys.end(), entry.key()) != keys.end(), "\"", file_,
                        "\": ", path(entry.key()), " is no key of a calibration; its value is ", shown(entry.value()));
    }
    for (const std::string& key : keys) {
      TORCH_CHECK_VALUE(optional || has(key), "\"", file_, "\": ", path(key), " is missing");
    }
  }
  bool has(const std::string& key) const { return value_.contains(key); }
  Entry at(const std::string& key) const { return {file_, path(key), value_.at(key)}; }

  std::vector<Entry> list() const {
    check(value_.is_array(), "a list");
    std::vector<Entry> entries;
    for (size_t i = 0; i < value_.size(); i++) {
      entries.emplace_back(file_, key_ + "[" + std::to_string(i) + "]", value_[i]);
    }
    return entries;
  }

  void read(bool& target) const {
    check(value_.is_boolean(), "true or false");
    target = value_.get<bool>();
  }
  void read(int64_t& target) const {
    // What is above 2^63 - 1 is unsigned, and what is above 2^64 - 1 a floating-point number.
    const bool fits = value_.is_number_integer() &&
                      (!value_.is_number_unsigned() || value_.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
    check(fits, "a whole number");
    target = value_.get<int64_t>();
  }
  void read(double& target) const {
    check(value_.is_number(), "a number");
    target = value_.get<double>();
  }
  void read(std::string& target) const {
    check(value_.is_string(), "a text");
    target = value_.get<std::string>();
  }
  template <class T>
  void read(std::optional<T>& target) const {
    read(target.emplace());
  }
  template <class T>
  void read(std::vector<T>& target) const {
    target.clear();
    for (const Entry& entry : list()) entry.read(target.emplace_back());
  }

  const std::string& file() const { return file_; }
  const std::string& key() const { return key_; }

 private:
  static std::string shown(const Json& value) {
    const std::string text = value.dump();
    return text.size() > 80 ? text.substr(0, 77) + "..." : text;
  }
  std::string path(const std::string& key) const { return key_.empty() ? key : key_ + "." + key; }

  const std::string& file_;
  const std::string key_;
  const Json& value_;
};

// Not needed to build a cache, yet a file in which it is broken is not to be trusted.
void check_cost(const Entry& cost) {
  cost.check_object({"name", "error", "bits"});
  std::string name;
  cost.at("name").read(name);
  for (const char* key : {"error", "bits"}) {
    double value = 0;
    cost.at(key).read(value);
    cost.at(key).check(value >= 0, "at least 0");
  }
}

CacheOptions read_layer(const Entry& layer) {
  layer.check_object({"layer", "num_kv_heads", "head_dim", "options", "weight", "chosen", "candidates"});
  int64_t number = 0;
  layer.at("layer").read(number);
  layer.at("layer").check(number >= 0, "at least 0");
  double weight = 0;
  layer.at("weight").read(weight);
  layer.at("weight").check(weight >= 0, "at least 0");
  check_cost(layer.at("chosen"));
  for (const Entry& candidate : layer.at("candidates").list()) check_cost(candidate);

  CacheOptions o;
  layer.at("num_kv_heads").read(o.num_kv_heads);
  layer.at("head_dim").read(o.head_dim);
  const Entry options = layer.at("options");
  std::vector<std::string> names = {"recipe"};  // of those who write such a file by hand
  for_each_option(o, [&](const char* name, const auto&) { names.push_back(name); });
  options.check_object(names, /*optional=*/true);
  const auto read = [&](const char* name, auto& target) {
    if (options.has(name)) options.at(name).read(target);
  };
  read("recipe", o.recipe);
  for_each_option(o, read);
  try {
    format_of(o);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "\"", options.file(), "\": ", options.key(), ": ", error.what_without_backtrace());
  }
  return o;
}

}  // namespace

void save_calibration(const std::string& path, const std::vector<LayerCalibration>& layers, double budget) {
  check_finite("budget", budget);
  // One line a layer, so that files can be compared.
  std::string text = "{\"version\": " + std::to_string(kCalibrationVersion) + ", \"budget\": " + Json(budget).dump() +
                     ", \"mean_bits\": " + Json(mean_bits(layers)).dump() + ", \"layers\": [";
  for (const LayerCalibration& layer : layers) {
    // A name with bytes that are no UTF-8 must not throw what is no c10::Error.
    text += (text.back() == '[' ? "\n" : ",\n") + json_of(layer).dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  text += "\n]}\n";

  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::vector<CacheOptions> load_calibration(const std::string& path) {
  check_path(path);
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  TORCH_CHECK(in && text, "cannot read \"", path, "\", or it is empty");
  Json json;
  try {
    json = Json::parse(text.str());
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, "\"", path, "\" is no JSON: ", error.what());
  }
  const Entry file(path, "", json);
  file.check(json.is_object(), "an object");
  int64_t version = 0;
  TORCH_CHECK_VALUE(file.has("version"), "\"", path, "\": version is missing");
  file.at("version").read(version);  // first, since it decides about the other keys
  file.at("version").check(version == kCalibrationVersion, std::to_string(kCalibrationVersion));
  file.check_object({"version", "budget", "mean_bits", "layers"});
  for (const char* key : {"budget", "mean_bits"}) {
    double value = 0;
    file.at(key).read(value);
    file.at(key).check(value > 0, "above 0");
  }
  std::vector<CacheOptions> options;
  for (const Entry& layer : file.at("layers").list()) options.push_back(read_layer(layer));
  file.at("layers").check(!options.empty(), "a list of at least one layer");
  return options;
}

}  // namespace kivi
