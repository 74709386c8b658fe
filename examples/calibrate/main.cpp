// Chooses options for the cache of each layer of a model: measures what every candidate costs each layer on captured
// queries, keys and values, and takes the choice with the least error under a budget of bits. The work is done by
// kivi/calibration.h; this program captures, shows and writes.
#include <kivi/calibration.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "measure.h"
#include "model.h"
#include "options.h"
#include "plot.h"
#include "progress.h"

namespace {

constexpr const char* kUsage = R"(Usage: kivi_calibrate [options]

Chooses options for the cache of each layer, so that the attention outputs of all layers together err least while the
mean bits stay within a budget. Prints the choice and, with --out, writes it.

  --model FILE       the model that the demo exports (default: smollm2.pt beside this program)
  --text FILE        the text to calibrate on (default: the evaluation text of the model file)
  --tokens N         tokens of the text (default 2048)
  --unweighted       count the errors of all layers alike. Without it, each layer's are weighted with what they do to the
                     predictions of the model (two windows of 2048 tokens; some minutes)
  --capture FILE     queries, keys and values of any model instead: a dict saved with torch.save, with the keys
                     l<N>.q [B, Hq, T, D], l<N>.k and l<N>.v [B, Hkv, T, D], after RoPE, for each layer N

  --budget BITS      mean bits per number, metadata included (default 2.75)
  --candidates LIST  caches to choose from, named as in --bits of the demo (default: the recipes, K8V8, K4V4, K4V2
                     and bits with the options of the recipes)
  --group-size N     tokens (keys) or channels (values) that share a scale: 16, 32, 64 or 128 (default 32)
  --residual N       newest tokens that are kept exact (default 32)
  --sink N           first tokens that are kept exact (default 4)

  --out FILE.json    where to write the choice
  --plot FILE.png    a picture of error against bits
  --threads N        threads (default: one per core)
  --help             this text
)";

const std::string kRefined = "+float8+token+rotated+corrected+search+wide";  // what the recipes do beside classes

struct Options {
  std::string model, text, capture, out, plot;
  std::string candidates = "kivi,compact,balanced,quality,near-lossless,K8V8,K4V4,K4V2";
  int64_t tokens = 2048, group_size = 32, residual_length = 32, sink_length = 4, threads = 0;
  double budget = 2.75;
  bool unweighted = false;
  bool help = false;
};

constexpr int64_t kWeighed = 2;  // windows of the text with which layers are weighed

using Layers = std::vector<kivi::LayerCalibration>;
struct Captured {
  int64_t layer;
  at::Tensor q, k, v;
};

Options parse_options(int argc, char** argv) {
  Options options;
  for (const char* bits : {"K2V2", "K3V2", "K3V3", "K4V2", "K4V3"}) options.candidates += "," + (bits + kRefined);
  using smollm2::Action;
  const auto number = [](int64_t* target, int64_t least, int64_t most) -> Action {
    return [=](const std::string& option, const std::string& value) {
      *target = smollm2::integer(option, value, least, most);
    };
  };
  const auto text = [](std::string* target) -> Action {
    return [=](const std::string& option, const std::string& value) {
      if (value.empty()) throw std::invalid_argument(option + " needs a value");
      *target = value;
    };
  };
  const std::map<std::string, Action> with_value = {
      {"--model", text(&options.model)},
      {"--text", text(&options.text)},
      {"--capture", text(&options.capture)},
      {"--out", text(&options.out)},
      {"--plot", text(&options.plot)},
      {"--candidates", text(&options.candidates)},
      {"--tokens", number(&options.tokens, 2, 1 << 20)},
      {"--group-size", number(&options.group_size, 16, 128)},
      {"--residual", number(&options.residual_length, 0, 1 << 20)},
      {"--sink", number(&options.sink_length, 0, 1 << 20)},
      {"--threads", number(&options.threads, 1, 1024)},
      {"--budget",
       [&](const std::string& option, const std::string& value) {
         std::size_t end = 0;
         try {
           options.budget = std::stod(value, &end);
         } catch (const std::exception&) {
         }
         if (value.empty() || end != value.size() || !(options.budget > 0 && options.budget <= 64)) {
           throw std::invalid_argument(option + " takes a number of bits above 0 and up to 64, got '" + value + "'");
         }
       }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--help" || option == "-h") {
      options.help = true;
      return options;
    }
    if (option == "--unweighted") {
      options.unweighted = true;
      continue;
    }
    smollm2::take_option(with_value, argc, argv, &i);
  }
  if (!options.capture.empty() && !(options.model.empty() && options.text.empty())) {
    throw std::invalid_argument("--capture takes the place of --model and --text: give one or the other");
  }
  return options;
}

std::vector<kivi::LayerCandidate> candidates_of(const Options& options, int64_t num_kv_heads, int64_t head_dim) {
  std::vector<kivi::LayerCandidate> candidates;
  for (const std::string& name : smollm2::split(options.candidates)) {
    smollm2::CacheConfig config = smollm2::cache_config("--candidates", name);
    if (!config.layers.empty()) throw std::invalid_argument("--candidates takes no file, got '" + name + "'");
    config.group_size = options.group_size;
    config.residual_length = options.residual_length;
    config.sink_length = options.sink_length;
    kivi::LayerCandidate candidate;
    candidate.name = name;
    candidate.options = smollm2::cache_options(config, num_kv_heads, head_dim);
    candidates.push_back(candidate);
  }
  return candidates;
}

std::string read_file(const std::string& option, const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || !text) throw std::invalid_argument(option + ": cannot read '" + file + "', or it is empty");
  return text.str();
}

// Layers in the order of their numbers.
std::vector<Captured> read_capture(const std::string& file) {
  const std::string bytes = read_file("--capture", file);
  c10::IValue value;
  try {
    value = torch::pickle_load({bytes.begin(), bytes.end()});
  } catch (const std::exception&) {
  }
  if (!value.isGenericDict()) throw std::invalid_argument("--capture: '" + file + "' is no dict saved with torch.save");
  std::map<int64_t, std::map<char, at::Tensor>> found;
  for (const auto& entry : value.toGenericDict()) {
    if (!entry.key().isString() || !entry.value().isTensor()) continue;
    const std::string key = entry.key().toStringRef();
    const std::size_t dot = key.find('.');
    // Other keys may stand beside: captures of the notebook have more than the three.
    if (key.empty() || key[0] != 'l' || dot == std::string::npos || dot + 2 != key.size()) continue;
    if (key.back() != 'q' && key.back() != 'k' && key.back() != 'v') continue;
    found[smollm2::integer("--capture: " + key, key.substr(1, dot - 1), 0, 1 << 20)][key.back()] =
        entry.value().toTensor();
  }
  std::vector<Captured> layers;
  for (auto& [layer, tensors] : found) {
    for (const char name : {'q', 'k', 'v'}) {
      if (tensors.count(name) == 0) {
        throw std::invalid_argument("--capture: '" + file + "' has no l" + std::to_string(layer) + "." + name);
      }
    }
    layers.push_back({layer, tensors['q'], tensors['k'], tensors['v']});
  }
  if (layers.empty()) throw std::invalid_argument("--capture: '" + file + "' has no keys such as l0.q");
  return layers;
}

// The model of the demo and a text for it.
struct Subject {
  std::unique_ptr<smollm2::Model> model;
  std::vector<int64_t> ids;
};

Subject load_model(const Options& options) {
  const std::string path = options.model.empty()
                               ? (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "smollm2.pt").string()
                               : options.model;
  if (!std::filesystem::exists(path)) {
    throw std::invalid_argument("there is no model file '" + path +
                                "'. Build the target smollm2_export, or give one with --model.");
  }
  std::string text;
  if (!options.text.empty()) text = read_file("--text", options.text);
  Subject subject{std::make_unique<smollm2::Model>(path), {}};
  smollm2::Model& model = *subject.model;
  if (options.tokens > model.context_length()) {
    throw std::invalid_argument("--tokens is at most the context of the model, " +
                                std::to_string(model.context_length()) + ", got " + std::to_string(options.tokens));
  }
  subject.ids = model.tokenizer().encode(options.text.empty() ? model.eval_text() : text, false);
  const int64_t needed =
      options.unweighted ? options.tokens : std::max(options.tokens, kWeighed * smollm2::kWindow + 1);
  if (static_cast<int64_t>(subject.ids.size()) < needed) {
    throw std::invalid_argument("the text has " + std::to_string(subject.ids.size()) + " tokens, but " +
                                std::to_string(needed) + " are needed for --tokens " + std::to_string(options.tokens) +
                                (options.unweighted ? "" : " and the weights of the layers (see --unweighted)"));
  }
  return subject;
}

std::vector<Captured> run_model(const Options& options, const Subject& subject) {
  smollm2::Model& model = *subject.model;
  const at::Tensor all = torch::tensor(subject.ids, at::kLong).narrow(0, 0, options.tokens).unsqueeze(0);
  smollm2::Progress progress("  running the model", options.tokens);
  model.keep_queries(true);
  model.use({smollm2::kExactLane}, false);
  for (int64_t at = 0; at < options.tokens;) {
    const int64_t end = std::min<int64_t>(at + 512, options.tokens);
    model.forward(all.slice(1, at, end), at);
    progress.step(at = end);
  }
  std::vector<Captured> layers;
  for (const auto& [q, k, v] : model.captured()) layers.push_back({static_cast<int64_t>(layers.size()), q, k, v});
  model.keep_queries(false);
  model.clear_caches();
  return layers;
}

double sum_of_errors(const Layers& layers) {
  double sum = 0;
  for (const auto& layer : layers) {
    sum += layer.weight * layer.candidates[static_cast<std::size_t>(layer.chosen)].error;
  }
  return sum;
}

// The weight of a layer: how far the model's predictions go from those of the exact cache when this layer alone takes a
// coarse candidate, over the error of that candidate. The one is taken that, in all layers, comes closest to the
// budget.
void weigh(const Options& options, const Subject& subject, Layers& layers) {
  std::size_t coarse = 0;
  std::pair<double, double> least;
  for (std::size_t c = 0; c < layers[0].candidates.size(); ++c) {
    for (auto& layer : layers) layer.chosen = static_cast<int64_t>(c);
    const std::pair<double, double> distance{std::abs(kivi::mean_bits(layers) - options.budget), sum_of_errors(layers)};
    if (c == 0 || distance < least) coarse = c, least = distance;
  }
  std::vector<smollm2::CacheConfig> configs(1 + layers.size());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    configs[1 + l].name = "layer " + std::to_string(layers[l].layer);
    for (const auto& layer : layers) {  // 8 bits are exact enough, and take less memory than to keep all tokens exact
      kivi::CacheOptions o = layer.candidates[coarse].options;
      kivi::CacheOptions fine;
      fine.num_kv_heads = o.num_kv_heads, fine.head_dim = o.head_dim, fine.value_head_dim = o.value_head_dim;
      fine.k_bits = fine.v_bits = 8;
      configs[1 + l].layers.push_back(fine);
    }
    configs[1 + l].layers[l] = layers[l].candidates[coarse].options;
  }
  const std::vector<smollm2::Quality> quality =
      smollm2::measure_quality(subject.model.get(), configs, subject.ids, kWeighed);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    layers[l].weight = quality[1 + l].mean_divergence() / std::max(layers[l].candidates[coarse].error, 1e-12);
  }
}

void print_line(const std::string& first, const std::string& name, double bits, double error, double weight = -1) {
  std::printf("%-10s  %-50s  %6.3f  %10.3e", first.c_str(), name.c_str(), bits, error);
  if (weight >= 0) std::printf("  %10.3g", weight);
  std::printf("\n");
}

void print_tables(const Layers& layers, double budget) {
  std::printf("%-10s  %-50s  %6s  %10s  %10s\n", "layer", "cache", "bits", "error", "weight");
  for (const auto& layer : layers) {
    const auto& c = layer.candidates[static_cast<std::size_t>(layer.chosen)];
    print_line(std::to_string(layer.layer), c.name, c.bits, c.error, layer.weight);
  }
  std::printf("\nMean bits and weighted sum of the errors of all layers (budget: %g bits)\n", budget);
  print_line("calibrated", "", kivi::mean_bits(layers), sum_of_errors(layers));
  Layers same = layers;
  for (std::size_t c = 0; c < layers[0].candidates.size(); ++c) {
    for (auto& layer : same) layer.chosen = static_cast<int64_t>(c);
    print_line("all layers", layers[0].candidates[c].name, kivi::mean_bits(same), sum_of_errors(same));
  }
  std::printf(
      "\nbits: per number of K and V, scales and padding included. error: of the attention output, squares of the\n"
      "differences over squares of the exact output, for the second half of the tokens. weight: divergence of the\n"
      "predictions (nats) for an error of 1 in this layer.\n");
}

int run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  torch::jit::setGraphExecutorOptimize(false);
  const c10::InferenceMode inference;
  // What cannot go well is told before the long work.
  for (const auto& candidate : candidates_of(options, 1, 64)) kivi::KVCache(candidate.options);
  for (const auto& [option, file] : {std::pair("--out", options.out), std::pair("--plot", options.plot)}) {
    if (file.empty()) continue;
    const std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
    if (!std::filesystem::is_directory(folder)) {
      throw std::invalid_argument(option + (": there is no folder '" + folder.string() + "'"));
    }
  }
  if (!options.plot.empty()) check_gnuplot();
  Subject subject;
  if (options.capture.empty()) subject = load_model(options);
  const std::vector<Captured> captured =
      options.capture.empty() ? run_model(options, subject) : read_capture(options.capture);

  Layers layers;
  {
    smollm2::Progress progress("  measuring " + std::to_string(captured.size()) + " layers",
                               static_cast<int64_t>(captured.size()));
    for (const Captured& c : captured) {
      TORCH_CHECK_VALUE(c.k.dim() == 4, "l", c.layer, ".k must be [B, Hkv, T, D], got sizes ", c.k.sizes());
      layers.push_back(kivi::measure_layer(c.q, c.k, c.v, candidates_of(options, c.k.size(1), c.k.size(3))));
      layers.back().layer = c.layer;
      progress.step(static_cast<int64_t>(layers.size()));
    }
  }
  if (options.capture.empty() && !options.unweighted) weigh(options, subject, layers);
  kivi::choose_candidates(layers, options.budget);
  print_tables(layers, options.budget);
  if (!options.out.empty()) {
    kivi::save_calibration(options.out, layers, options.budget);
    std::printf("wrote %s\n", options.out.c_str());
  }
  if (!options.plot.empty()) {
    plot(layers, options.budget, options.plot);
    std::printf("drew %s\n", options.plot.c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse_options(argc, argv);
    if (options.help) {
      std::fputs(kUsage, stdout);
      return 0;
    }
    return run(options);
  } catch (const c10::Error& error) {
    std::cerr << "kivi_calibrate: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "kivi_calibrate: " << error.what() << "\n";
  }
  return 2;
}
