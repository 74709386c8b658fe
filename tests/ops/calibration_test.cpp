// One recipe per layer: errors against a reference of at:: calls, the choice against all choices there are, files.
#include "kivi/calibration.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/ops/attention_reference.h"

namespace kivi::test {
namespace {

LayerCandidate named(const std::string& name) {
  LayerCandidate c;
  c.name = name;
  c.options.recipe = name;
  c.options.residual_length = 16;
  return c;
}

LayerCalibration measured(uint64_t seed = 1) {
  return measure_layer(randn({1, 4, 150, 64}, seed), randn({1, 2, 150, 64}, seed + 1), randn({1, 2, 150, 64}, seed + 2),
                       {named("kivi"), named("balanced"), named("quality"), named("near-lossless")});
}

TEST(Calibration, MeasuresWhatACacheDoesToTheOutput) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor q = randn({2, 4, 151, 48}, 1, type), k = randn({2, 2, 151, 48}, 2, type),
                     v = randn({2, 2, 151, 80}, 3, type);
    LayerCandidate c = named("balanced");
    c.options.precision = "exact";
    c.options.num_kv_heads = 7;  // what is not for the tensors given is replaced
    const LayerCalibration layer = measure_layer(q, k, v, {named("kivi"), c});
    ASSERT_EQ(layer.candidates.size(), 2u);
    const LayerCandidate& got = layer.candidates[1];
    EXPECT_EQ(got.options.num_kv_heads, 2);
    EXPECT_EQ(got.options.value_head_dim, std::optional<int64_t>(80));

    KVCache cache(got.options);
    cache.append(k.to(at::kFloat), v.to(at::kFloat), std::nullopt, q.to(at::kFloat));
    const auto [kd, vd] = cache.dequantize();
    const at::Tensor asked = q.narrow(2, 75, 76);
    const at::Tensor exact = reference(asked, k, v).out;
    const double want = ((reference(asked, kd, vd).out - exact).square().sum() / exact.square().sum()).item<double>();
    EXPECT_NEAR(got.error, want, 1e-4 * want);
    EXPECT_GT(want, 1e-4);
    EXPECT_DOUBLE_EQ(got.bits, cache.bits_per_element());
  }
}

TEST(Calibration, MoreBitsErrLess) {
  const LayerCalibration layer = measured();
  for (size_t c = 1; c < layer.candidates.size(); c++) {
    EXPECT_LT(layer.candidates[c].error, layer.candidates[c - 1].error) << layer.candidates[c].name;
  }
}

TEST(Calibration, CapturesAreChecked) {
  const at::Tensor q = randn({1, 4, 64, 32}, 1), k = randn({1, 2, 64, 32}, 2), v = randn({1, 2, 64, 16}, 3);
  const auto measure = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return [=] { measure_layer(a, b, c, {named("kivi")}); };
  };
  EXPECT_NO_THROW(measure(q, k, v)());
  expect_error(measure(q[0], k, v), {"q must be", "3 dimensions"});
  expect_error(measure(q, k, v[0][0]), {"v must be", "2 dimensions"});
  expect_error(measure(q.to(at::kLong), k, v), {"q", "Long"});
  expect_error(measure(q.narrow(2, 0, 9), k, v), {"q has tokens 9", "64"});
  expect_error(measure(q.narrow(3, 0, 9), k, v), {"q has head_dim 9", "32"});
  expect_error(measure(q.narrow(1, 0, 3), k, v), {"q has head count 3", "2"});
  expect_error(measure(q, k, v.narrow(1, 0, 1)), {"v has head count 1", "2"});
  expect_error(measure(q.expand({3, 4, 64, 32}), k, v), {"q has batch size 3", "1"});
  expect_error(measure(q, k, v * 0), {"not all 0"});
  expect_error(measure(q, k * kNan, v), {"finite"});
  expect_error([&] { measure_layer(q, k, v, {named("best")}); }, {"recipe", "\"best\""});
  LayerCandidate exact = named("kivi");
  exact.options.residual_length = 60;
  expect_error([&] { measure_layer(q, k, v, {exact}); }, {"64 tokens", "\"kivi\" quantises none", "60"});
}

// Layers with random errors and bits, which are whole per token; of one shape or of several.
std::vector<LayerCalibration> random_layers(std::mt19937& random, size_t layers, size_t candidates, bool one_shape) {
  std::vector<LayerCalibration> all(layers);
  for (size_t l = 0; l < layers; l++) {
    all[l].candidates.resize(candidates);
    if (random() % 2 == 0) all[l].weight = static_cast<double>(random() % 100) / 10;
    const int64_t heads = one_shape ? 2 : 1 + random() % 3, dim = one_shape ? 40 : 8 * (1 + random() % 9);
    for (LayerCandidate& c : all[l].candidates) {
      c.options.num_kv_heads = heads, c.options.head_dim = dim;
      const double numbers = static_cast<double>(2 * heads * dim), share = static_cast<double>(random() % 1000) / 1000;
      c.bits = std::round((1 + 7 * share) * numbers / 8) * 8 / numbers;
      c.error = random() % 8 == 0 ? 0.25 : static_cast<double>(random() % 100000) / 1e5;
    }
  }
  return all;
}

double sum_of_errors(const std::vector<LayerCalibration>& layers) {
  double sum = 0;
  for (const auto& layer : layers) sum += layer.weight * layer.candidates[static_cast<size_t>(layer.chosen)].error;
  return sum;
}

TEST(Calibration, TheChoiceIsTheBestOfAll) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; round++) {
    const size_t count = 1 + random() % 5, candidates = 1 + random() % 5;
    std::vector<LayerCalibration> layers = random_layers(random, count, candidates, round % 2 == 0), tried = layers;
    const double budget = 2 + static_cast<double>(random() % 500) / 100;
    double least = kInf, smallest = kInf;
    size_t choices = 1;
    for (size_t l = 0; l < count; l++) choices *= candidates;
    for (size_t i = 0; i < choices; i++) {
      size_t rest = i;
      for (auto& layer : tried) layer.chosen = static_cast<int64_t>(rest % candidates), rest /= candidates;
      const double bits = mean_bits(tried);
      smallest = std::min(smallest, bits);
      if (bits <= budget + 1e-12) least = std::min(least, sum_of_errors(tried));
    }
    if (least == kInf) {
      std::ostringstream text;
      text << "at least " << smallest << " bits";
      expect_error([&] { choose_candidates(layers, budget); }, {"budget", text.str()});
      continue;
    }
    choose_candidates(layers, budget);
    EXPECT_LE(mean_bits(layers), budget + 1e-12);
    EXPECT_NEAR(sum_of_errors(layers), least, 1e-12) << "round " << round;
    const auto again = layers;
    choose_candidates(layers, budget);
    for (size_t l = 0; l < count; l++) EXPECT_EQ(layers[l].chosen, again[l].chosen);
  }
}

TEST(Calibration, ManyLayersAndTheEndsOfTheBudget) {
  std::mt19937 random(6);
  for (const bool one_shape : {true, false}) {
    std::vector<LayerCalibration> layers = random_layers(random, 200, 20, one_shape);
    double least = 0;
    for (auto& layer : layers) {
      double error = kInf;
      for (const auto& c : layer.candidates) error = std::min(error, layer.weight * c.error);
      least += error;
    }
    choose_candidates(layers, 1e300);
    EXPECT_NEAR(sum_of_errors(layers), least, 1e-9);
    choose_candidates(layers, 3);
    EXPECT_LE(mean_bits(layers), 3);
    EXPECT_GT(mean_bits(layers), 2.9);  // nothing that is of use is left over
    // The smallest candidates alone meet the smallest budget.
    for (auto& layer : layers) {
      layer.chosen = 0;
      for (size_t c = 1; c < layer.candidates.size(); c++) {
        if (layer.candidates[c].bits < layer.candidates[static_cast<size_t>(layer.chosen)].bits) {
          layer.chosen = static_cast<int64_t>(c);
        }
      }
    }
    const double smallest = mean_bits(layers);
    choose_candidates(layers, smallest);
    EXPECT_DOUBLE_EQ(mean_bits(layers), smallest);
    expect_error([&] { choose_candidates(layers, smallest - 1e-3); }, {"budget must be at least"});
  }
}

TEST(Calibration, ChoicesAreChecked) {
  std::mt19937 random(7);
  const auto good = random_layers(random, 2, 3, true);
  const auto choose = [](std::vector<LayerCalibration> layers, double budget = 5) {
    choose_candidates(layers, budget);
  };
  expect_error([&] { choose({}); }, {"layers", "got 0"});
  for (const double budget : {double(kNan), double(kInf)}) expect_error([&] { choose(good, budget); }, {"budget"});
  auto bad = good;
  bad[1].candidates.clear();
  expect_error([&] { choose(bad); }, {"layers[1]", "got 0"});
  bad = good, bad[1].weight = -0.5;
  expect_error([&] { choose_candidates(bad, 8); }, {"layers[1]", "weight", "-0.5"});
  bad = good, bad[1].candidates[2].error = kNan;
  expect_error([&] { choose(bad); }, {"layers[1]", "nan"});
  bad = good, bad[0].candidates[1].options.head_dim = 48;
  expect_error([&] { choose(bad); }, {"layers[0]", "192", "160"});
  bad = good, bad[0].candidates[0].options.head_dim = 0;
  expect_error([&] { choose(bad); }, {"layers[0]", "head_dim 0"});
  bad = good, bad[1].chosen = 3;
  expect_error([&] { mean_bits(bad); }, {"layers[1]", "0 to 2", "3"});
}

// ---------------------------------------------------------------------------------------------- files

class CalibrationFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("kivi_calibration_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "calibrated.json").string();
    layers_ = {measured(1), measured(11)};
    layers_[1].layer = 4;
    layers_[0].chosen = 2, layers_[1].chosen = 1;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string text() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  void write(const std::string& text) const { std::ofstream(path_) << text; }
  // The file with the first `from` replaced.
  void expect_refused(const std::string& from, const std::string& to, std::vector<std::string> words) const {
    SCOPED_TRACE(to);
    std::string changed = text();
    const size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    const std::string whole = changed;
    write(changed.replace(at, from.size(), to));
    words.push_back(path_);
    expect_error([&] { load_calibration(path_); }, words);
    write(whole);
  }

  std::filesystem::path folder_;
  std::string path_;
  std::vector<LayerCalibration> layers_;
};

TEST_F(CalibrationFile, ComesBackAsItWas) {
  write("an old file");
  save_calibration(path_, layers_, 3.25);
  const std::vector<CacheOptions> options = load_calibration(path_);
  ASSERT_EQ(options.size(), 2u);
  for (size_t l = 0; l < 2; l++) {
    const LayerCandidate& chosen = layers_[l].candidates[static_cast<size_t>(layers_[l].chosen)];
    const KVCache cache(options[l]), want(chosen.options);
    EXPECT_EQ(cache.format(), want.format());
    EXPECT_EQ(options[l].recipe, "");  // spelt out
    EXPECT_DOUBLE_EQ(cache.bits_per_element(), chosen.bits);
  }
  for (const char* word :
       {"\"version\": 1", "\"budget\": 3.25", "\"mean_bits\": ", "\"layer\":4", "\"near-lossless\""}) {
    EXPECT_NE(text().find(word), std::string::npos) << word;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);  // nothing is left beside it
}

TEST_F(CalibrationFile, OptionsMayBeGivenByHand) {
  save_calibration(path_, layers_, 3.25);
  std::string changed = text();
  const size_t at = changed.find("\"options\":{"), end = changed.find('}', at);
  write(changed.replace(at, end - at, "\"options\":{\"recipe\":\"compact\",\"k_search\":[]"));
  CacheOptions want = named("compact").options;
  want.num_kv_heads = 2, want.head_dim = 64, want.residual_length = 128;
  EXPECT_EQ(KVCache(load_calibration(path_)[0]).format(), KVCache(want).format());
}

TEST_F(CalibrationFile, WhatIsMalformedIsRefused) {
  save_calibration(path_, layers_, 3.25);
  expect_refused("{\"version\": 1", "", {"no JSON"});
  expect_refused("\n]}", "\n]", {"no JSON"});
  expect_refused("\"version\": 1", "\"version\": 2", {"version must be 1", "got 2"});
  expect_refused("\"version\": 1, ", "", {"version is missing"});
  expect_refused("\"budget\": 3.25", "\"budget\": \"3.25\"", {"budget must be a number", "\"3.25\""});
  expect_refused("\"budget\": 3.25", "\"budget\": -1", {"budget must be above 0", "-1"});
  expect_refused("\"mean_bits\"", "\"bits\"", {"bits is no key"});
  expect_refused("\"budget\": 3.25,", "", {"budget is missing"});
  expect_refused("\"layer\":0", "\"layer\":-1", {"layers[0].layer", "-1"});
  expect_refused("\"layer\":4", "\"layer\":4.5", {"layers[1].layer must be a whole number", "4.5"});
  expect_refused("\"num_kv_heads\":2,", "", {"layers[0].num_kv_heads is missing"});
  expect_refused("\"weight\":1.0", "\"weight\":-1.0", {"layers[0].weight must be at least 0", "-1.0"});
  expect_refused("\"num_kv_heads\":2", "\"num_kv_heads\":0", {"layers[0].options", "num_kv_heads", "0"});
  expect_refused("\"head_dim\":64", "\"head_dim\":99999999999999999999", {"layers[0].head_dim", "1e+20"});
  expect_refused("\"head_dim\":64", "\"head_dim\":18446744073709551615",
                 {"layers[0].head_dim", "18446744073709551615"});
  expect_refused("\"options\":{", "\"options\":{\"bits\":2,", {"layers[0].options.bits is no key", "2"});
  expect_refused("\"v_bits\":3", "\"v_bits\":5", {"layers[0].options: v_bits", "5"});
  expect_refused("\"k_bits\":2", "\"k_bits\":true", {"layers[0].options.k_bits must be a whole number", "true"});
  expect_refused("\"v_symmetric\":true", "\"v_symmetric\":1", {"options.v_symmetric must be true or false", "1"});
  expect_refused("\"precision\":\"fast\"", "\"precision\":\"quick\"", {"layers[0].options", "precision", "quick"});
  expect_refused("\"precision\":\"fast\"", "\"precision\":null", {"options.precision must be a text", "null"});
  expect_refused("\"k_search\":[", "\"k_search\":[\"all\",", {"options.k_search[0] must be a number", "all"});
  expect_refused("\"k_search\":[", "\"k_search\":[7.5,", {"layers[0].options", "k_search", "7.5"});
  expect_refused("\"k_classes\":[", "\"k_classes\":[0.5,", {"options.k_classes[0] must be a whole number", "0.5"});
  expect_refused("\"v_group_size\":64", "\"v_group_size\":\"64\"", {"options.v_group_size", "\"64\""});
  expect_refused("\"chosen\":{\"name\":\"quality\"", "\"chosen\":{\"name\":3", {"layers[0].chosen.name", "3"});
  expect_refused("\"candidates\":[", "\"candidates\":[0,", {"layers[0].candidates[0] must be an object", "0"});
  expect_refused("\"candidates\":[{\"name\":\"kivi\",\"error\":", "\"candidates\":[{\"name\":\"kivi\",\"error\":-",
                 {"layers[0].candidates[0].error must be at least 0", "-"});
  EXPECT_NO_THROW(load_calibration(path_));
  for (const auto& [whole, word] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "must be an object"},
           {"", "cannot read"},
           {"{\"version\":1,\"budget\":3,\"mean_bits\":3,\"layers\":[]}", "at least one layer"},
           {"{\"version\":1,\"budget\":3,\"mean_bits\":3,\"layers\":{}}", "layers must be a list"},
           {"{\"version\":1,\"budget\":1e999,\"mean_bits\":3,\"layers\":[]}", "no JSON"},
           {std::string(100000, '['), "no JSON"}}) {
    SCOPED_TRACE(word);
    write(whole);
    expect_error([&] { load_calibration(path_); }, {path_, word});
  }
  expect_error([&] { load_calibration(path_ + ".none"); }, {"cannot read", path_});
  expect_error([&] { load_calibration(folder_.string()); }, {"cannot read", folder_.string()});
  expect_error([&] { save_calibration((folder_ / "none" / "file").string(), layers_, 3); }, {"cannot write", "none"});
  expect_error([&] { save_calibration(folder_.string(), layers_, 3); }, {"cannot write", folder_.string()});
  layers_[0].chosen = 9;
  expect_error([&] { save_calibration(path_, layers_, 3); }, {"layers[0]", "9"});
  std::filesystem::remove_all(folder_);
}

}  // namespace
}  // namespace kivi::test
