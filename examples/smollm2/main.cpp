// SmolLM2-135M-Instruct decoding with a quantised cache. The model is a TorchScript file that holds a Kivi cache in
// every layer; this program links torch and Kivi, runs the model with several caches and prints what they cost and what
// they give.
#include <kivi/version.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "measure.h"
#include "model.h"
#include "options.h"
#include "progress.h"

namespace {

using smollm2::CacheConfig;
using smollm2::Model;
using smollm2::Options;
using smollm2::Quality;
using smollm2::Speed;

// A text long enough that most of it is quantised when the answer is written.
constexpr const char* kStory =
    "Context: The lighthouse on Heron Island stood empty for eleven years. In the spring of 1952 a young "
    "clockmaker named Ada Brandt rowed out to it with two\n"
    "trunks, a box of tools and a grey cat called Pepper. The council had promised her a small wage if she "
    "could make the old lamp turn again.\n"
    "The machine that turned the lamp was worse than she had feared. Salt had eaten the brass wheels, and a "
    "storm had broken the glass on the north side.\n"
    "For the first month she did nothing but clean. She laid every part on a white sheet in the kitchen, drew "
    "it in a notebook, and wrote down its weight.\n"
    "The fishermen thought that she was wasting her time. Only the baker's son, Tomas, believed in her. Every "
    "Sunday he brought bread, paraffin and letters\n"
    "from the mainland, and stayed until dark to hold the lantern while she worked.\n"
    "In August the last wheel was missing. No workshop on the coast could cut it. So Ada melted down the brass"
    " handles of her own trunks, made a mould of\n"
    "sand and candle wax, and poured the wheel herself. The first one cracked. The second one was too small. "
    "The third one fitted.\n"
    "On the evening of the ninth of September she wound the machine, lit the lamp, and stepped back. The beam "
    "went out over the water, slow and even, once\n"
    "every twelve seconds. In the harbour the boats sounded their horns one after another. Tomas stood on the "
    "pier and counted the seconds aloud.\n"
    "That winter no ship was lost on the rocks, and in the spring the council gave Ada the house, the garden "
    "and the little boat for as long as she lived.\n\n"
    "Question: Who was Ada Brandt and what did she do on the island? Answer with two short sentences.";

constexpr const char* kSystem =
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n";

// FNV-1a of the 8193 evaluation tokens as little-endian 16-bit numbers, for the text with which the figures below were
// found.
constexpr uint64_t kPublishedText = 0x866d5b850dfceb22;

uint64_t fingerprint(const std::vector<int64_t>& ids) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t id : ids) {
    for (const int64_t byte : {id & 255, id >> 8}) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  }
  return hash;
}

template <typename... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
  char text[256];
  std::snprintf(text, sizeof text, pattern, arguments...);
  return text;
}

// Rows of cells as a table: the first column to the left, the others to the right.
void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      const int columns = static_cast<int>(width[i]);
      std::printf(i == 0 ? "%-*s" : "  %*s", columns, rows[r][i].c_str());
      total += width[i] + (i == 0 ? 0 : 2);
    }
    std::printf("\n%s", r == 0 ? (std::string(total, '-') + "\n").c_str() : "");
  }
}

std::string read_text(const std::string& path) {
  // The start is enough for every measurement, and a tokeniser takes time.
  constexpr std::size_t kMost = 400000;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMost, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.empty()) throw std::invalid_argument("--text-file: cannot read '" + path + "', or it is empty");
  if (text.size() == kMost) {  // not in the middle of a character
    while (!text.empty() && (static_cast<unsigned char>(text.back()) & 0xC0) == 0x80) text.pop_back();
    text.pop_back();
  }
  return text;
}

std::string model_path(const Options& options) {
  if (!options.model.empty()) return options.model;
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "smollm2.pt").string();
}

std::unique_ptr<Model> load(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw std::invalid_argument("there is no model file '" + path +
                                "'. Build the target smollm2_export, or give one with --model.");
  }
  const smollm2::Progress progress("  loading the model", 0);
  return std::make_unique<Model>(path);
}

void show_texts(Model* model, const Options& options, const std::vector<CacheConfig>& configs) {
  const std::string question = options.prompt.empty() ? kStory : options.prompt;
  const std::string prompt =
      options.raw ? question : kSystem + ("<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n");
  const std::vector<int64_t> ids = model->tokenizer().encode(prompt);
  if (ids.empty() || static_cast<int64_t>(ids.size()) >= model->context_length()) {
    throw std::invalid_argument("--prompt has " + std::to_string(ids.size()) + " tokens; the model takes 1 to " +
                                std::to_string(model->context_length() - 1));
  }
  std::printf("1. Text (greedy, prompt of %zu tokens)\n", ids.size());
  std::printf("%s\n\n", options.prompt.empty()
                            ? "A story about a lighthouse, and: Who was Ada Brandt and what did she do on the island?"
                            : question.c_str());
  std::vector<int64_t> exact;
  for (const CacheConfig& config : configs) {
    const smollm2::Generated generated = smollm2::generate(model, config, ids, options.tokens);
    if (config.exact()) {
      exact = generated.ids;
      std::printf("\n");
      continue;
    }
    std::printf("\n%-12s [%s; %lld of the cached tokens are quantised]\n", "",
                generated.ids == exact ? "same as fp32" : "differs from fp32",
                static_cast<long long>(generated.quantized));
  }
  std::printf("\n");
}

// The settings of the protocol with published figures: newest 32 tokens exact, no sink tokens, groups of 32.
CacheConfig anchor(int64_t k_bits, int64_t v_bits, int64_t sink_length, bool range_search) {
  CacheConfig config;
  config.name = format("K%dV%d", static_cast<int>(k_bits), static_cast<int>(v_bits));
  config.k_bits = k_bits;
  config.v_bits = v_bits;
  config.residual_length = 32;
  config.sink_length = sink_length;
  config.range_search = range_search;
  return config;
}

struct Anchor {
  CacheConfig config;
  double published;  // perplexity over four windows
  double tolerance;  // relative; of K8V8 and K4V4 against fp32
};

const std::vector<Anchor>& anchors() {
  static const std::vector<Anchor> all = {{anchor(8, 8, 0, false), 10.253, 0.001},
                                          {anchor(4, 4, 0, false), 10.292, 0.01},
                                          {anchor(4, 2, 0, false), 10.776, 0.015},
                                          {anchor(2, 2, 0, false), 13.365, 0.03}};
  return all;
}

// Prints the second table of --full and returns whether everything is where it should be.
bool show_anchors(const Quality& exact, const std::vector<Quality>& measured, bool published_text) {
  constexpr double kExact = 10.251;
  bool all_good = true;
  const auto verdict = [&](bool good) {
    all_good = all_good && good;
    return std::string(good ? "yes" : "NO");
  };
  std::printf("Published settings (newest 32 tokens exact, no sink tokens, groups of 32), four windows\n");
  if (!published_text) std::printf("The text differs from the published one, so the figures need not agree.\n");
  const double fp32 = exact.perplexity();
  std::vector<std::vector<std::string>> rows = {
      {"cache", "perplexity", "over fp32", "same token", "published", "within", "holds"}};
  rows.push_back({"fp32", format("%.3f", fp32), "", "100.0 %", format("%.3f", kExact), "0.2 %",
                  verdict(std::abs(fp32 / kExact - 1) <= 0.002)});
  for (std::size_t i = 0; i < anchors().size(); ++i) {
    const Anchor& expected = anchors()[i];
    const double found = measured[i].perplexity();
    // The mild settings are held against the exact cache, the coarse ones against the published figure.
    const bool mild = expected.tolerance <= 0.01;
    const double reference = mild ? fp32 : expected.published;
    rows.push_back({expected.config.name, format("%.3f", found), format("%+.2f %%", 100 * (found / fp32 - 1)),
                    format("%.1f %%", 100 * measured[i].agreement()), format("%.3f", expected.published),
                    format(mild ? "%.1f %% of fp32" : "%.1f %%", 100 * expected.tolerance),
                    verdict(std::abs(found / reference - 1) <= expected.tolerance)});
  }
  print_table(rows);
  const double base = exact.perplexity(0, 2);
  const auto increase = [&](const Quality& quality) { return 100 * (quality.perplexity(0, 2) / base - 1); };
  const std::size_t first = anchors().size();
  const double plain = increase(measured[first - 1]);
  const double both = increase(measured[first + 1]);
  std::printf("\nWhat helps at 2 bits, windows 1 and 2 (published: +36.9, +22.3 and +16.1 %%)\n");
  print_table({{"K2V2", "perplexity over fp32"},
               {"no sink tokens", format("%+.1f %%", plain)},
               {"4 exact sink tokens", format("%+.1f %%", increase(measured[first]))},
               {"4 exact sink tokens and range search", format("%+.1f %%", both)}});
  std::printf("The two together at least halve the loss: %s\n\n", verdict(both <= plain / 2).c_str());
  return all_good;
}

void show_table(const std::vector<CacheConfig>& configs, const std::vector<int64_t>& contexts,
                const std::vector<std::vector<Speed>>& speed, const std::vector<Quality>& quality) {
  std::vector<std::vector<std::string>> rows(configs.size() + 1);
  rows[0] = {"cache"};
  for (const int64_t context : contexts) {
    if (!speed.empty()) rows[0].push_back(format("MB at %d", static_cast<int>(context)));
  }
  if (!speed.empty()) rows[0].insert(rows[0].end(), {"bytes/token", "smaller"});
  for (const int64_t context : contexts) {
    if (!speed.empty()) rows[0].push_back(format("tok/s at %d", static_cast<int>(context)));
  }
  if (!quality.empty()) rows[0].insert(rows[0].end(), {"bits", "perplexity", "over fp32", "KL", "same token"});
  for (std::size_t i = 0; i < configs.size(); ++i) {
    std::vector<std::string>& row = rows[i + 1];
    row = {configs[i].name};
    if (!speed.empty()) {
      for (const Speed& at : speed[i]) row.push_back(format("%.1f", static_cast<double>(at.bytes) / 1e6));
      const auto last = static_cast<double>(speed[i].back().bytes);
      row.push_back(format("%.0f", last / static_cast<double>(contexts.back())));
      row.push_back(format("%.1fx", static_cast<double>(speed[0].back().bytes) / last));
      for (const Speed& at : speed[i]) row.push_back(format("%.1f", at.tokens_per_second));
    }
    if (!quality.empty()) {
      const double perplexity = quality[i].perplexity();
      row.push_back(format("%.2f", quality[i].bits));
      row.push_back(format("%.3f", perplexity));
      row.push_back(i == 0 ? "exact" : format("%+.2f %%", 100 * (perplexity / quality[0].perplexity() - 1)));
      row.push_back(i == 0 ? "" : format("%.4f", quality[i].mean_divergence()));
      row.push_back(format("%.1f %%", 100 * quality[i].agreement()));
    }
  }
  print_table(rows);
  std::printf("\n");
}

// What is lost against bits per number: perplexity, and divergence, which has less noise.
void draw_quality(const std::vector<CacheConfig>& configs, const std::vector<Quality>& quality,
                  const std::string& path) {
  const std::string extension = std::filesystem::path(path).extension().string();
  const bool svg = extension == ".svg";
  if (!svg && extension != ".png") throw std::invalid_argument("--plot takes a .png or .svg file, got '" + path + "'");
  // What noise makes better than exact, and what is past use, is drawn on the edge.
  const auto percent = [](double x) { return std::min(std::max(100 * x, 0.01), 100.0); };
  const auto nats = [](double x) { return std::min(std::max(x, 1e-5), 1.0); };
  std::string plain, recipes;  // bits, percent of perplexity, divergence, name
  for (std::size_t i = 1; i < configs.size(); ++i) {
    const double loss = percent(quality[i].perplexity() / quality[0].perplexity() - 1);
    std::string& points = configs[i].recipe.empty() ? plain : recipes;
    points += format("%.4f %.4f %.6f \"%s\"\n", quality[i].bits, loss, nats(quality[i].mean_divergence()),
                     configs[i].name.c_str());
  }
  FILE* const plot = popen("gnuplot", "w");
  if (plot == nullptr) throw std::runtime_error("--plot: cannot start gnuplot");
  std::fprintf(plot,
               "set terminal %s size 1200,560 font 'Sans,11'\nset output '%s'\n"
               "set xlabel 'bits per number of a quantised token, scales and padding included'\n"
               "set logscale y\nset format y '%%g'\nset grid xtics ytics lc rgb '#dddddd'\nset key top right\n"
               "set xrange [1:9.9]\n$plain << EOD\n%sEOD\n$recipes << EOD\n%sEOD\nset multiplot layout 1,2\n",
               svg ? "svg background '#ffffff'" : "pngcairo", path.c_str(), plain.c_str(), recipes.c_str());
  const char* const titles[] = {"perplexity above that of fp32 (%)", "KL divergence from fp32 (nats per token)"};
  for (int panel = 0; panel < 2; ++panel) {
    std::fprintf(plot,
                 "set title '%s'\n"
                 "plot $plain using 1:%d with points pt 7 ps 1.2 lc rgb '#4575b4' title 'plain widths', \\\n"
                 "     $plain using 1:%d:4 with labels left offset 0.8,0.5 tc rgb '#4575b4' notitle, \\\n"
                 "     $recipes using 1:%d with points pt 5 ps 1.2 lc rgb '#d73027' title 'recipes', \\\n"
                 "     $recipes using 1:%d:4 with labels right offset -0.8,-0.3 tc rgb '#d73027' notitle\n",
                 titles[panel], panel + 2, panel + 2, panel + 2, panel + 2);
  }
  const bool drawn = pclose(plot) == 0 && std::filesystem::exists(path);
  std::printf("%s %s\n\n",
              drawn ? "plot:" : "NOT DRAWN (is gnuplot installed?):", std::filesystem::absolute(path).string().c_str());
}

void explain(const std::vector<CacheConfig>& configs, const Options& options) {
  std::printf("fp32 is the exact cache; K4V2 keeps keys in 4 and values in 2 bits.\n");
  if (configs.size() > 1) {
    const CacheConfig& config = configs[1];
    std::printf("Kivi caches: groups of %lld, the newest %lld tokens and the first %lld exact, precision %s.\n",
                static_cast<long long>(config.group_size), static_cast<long long>(config.residual_length),
                static_cast<long long>(config.sink_length), config.precision.c_str());
  }
  if (options.speed) {
    std::printf(
        "MB: all bytes of the caches of all layers. bytes/token and smaller (times smaller than fp32): at the longest "
        "context. An fp16\n"
        "cache would be half of fp32. tok/s: decoding one token at a time; reading the weights is part of it and the "
        "same for all.\n");
  }
  if (options.quality) {
    std::printf(
        "bits: of one number of a quantised token, scales and padding included. perplexity: over %lld tokens of %s, "
        "lower is better. KL:\n"
        "mean Kullback-Leibler divergence from fp32, nats. same token: how often the most likely next token is that of "
        "fp32.\n",
        static_cast<long long>(options.windows * (smollm2::kWindow - smollm2::kPrefilled)),
        options.text_file.empty() ? "the help texts of Python" : options.text_file.c_str());
  }
}

int run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(static_cast<int>(options.threads));
  torch::jit::setGraphExecutorOptimize(
      false);  // the shapes change with every token: specialising on them only costs time
  const c10::InferenceMode inference;
  const std::unique_ptr<Model> model = load(model_path(options));
  std::printf("SmolLM2-135M-Instruct with Kivi %s, CPU kernels %s, %d threads\n\n", kivi::version().c_str(),
              kivi::cpu_capability().c_str(), at::get_num_threads());

  std::vector<CacheConfig> configs = {CacheConfig()};
  configs.insert(configs.end(), options.caches.begin(), options.caches.end());
  const std::string written = options.text_file.empty() ? model->eval_text() : read_text(options.text_file);
  std::vector<int64_t> text = model->tokenizer().encode(written, false);
  if (static_cast<int64_t>(text.size()) <= model->context_length()) {
    throw std::invalid_argument("the evaluation text has " + std::to_string(text.size()) + " tokens, but " +
                                std::to_string(model->context_length() + 1) + " are needed: " +
                                (options.text_file.empty() ? "export the model again" : options.text_file));
  }
  text.resize(static_cast<std::size_t>(model->context_length()) + 1);

  if (options.text) show_texts(model.get(), options, configs);

  std::vector<int64_t> contexts = options.contexts;
  if (contexts.empty()) contexts = {512, model->context_length()};
  std::vector<std::vector<Speed>> speed;
  if (options.speed) {
    std::printf("%d. Speed and bytes\n", 1 + options.text);
    std::fflush(stdout);
    speed = smollm2::measure_speed(model.get(), configs, text, contexts);
  }

  std::vector<Quality> quality;
  std::vector<Quality> anchor_quality;
  if (options.quality) {
    std::printf("%d. Quality: %lld of %lld windows, all caches side by side\n", 1 + options.text + options.speed,
                static_cast<long long>(options.windows), static_cast<long long>(smollm2::kMaxWindows));
    std::fflush(stdout);
    std::vector<CacheConfig> all = configs;
    if (options.anchors) {
      for (const Anchor& each : anchors()) all.push_back(each.config);
      all.push_back(anchor(2, 2, 4, false));
      all.push_back(anchor(2, 2, 4, true));
    }
    quality = smollm2::measure_quality(model.get(), all, text, options.windows);
    anchor_quality.assign(quality.begin() + static_cast<std::ptrdiff_t>(configs.size()), quality.end());
    quality.resize(configs.size());
  }

  bool good = true;
  std::printf("\n");
  if (!options.plot.empty() && !quality.empty()) draw_quality(configs, quality, options.plot);
  if (!speed.empty() || !quality.empty()) {
    show_table(configs, contexts, speed, quality);
    explain(configs, options);
    std::printf("\n");
  }
  if (!quality.empty()) {
    const bool published_text = fingerprint(text) == kPublishedText;
    if (!published_text && options.text_file.empty()) {
      std::printf("The text is that of Python %s; the published figures are for Python 3.11.7.\n\n",
                  model->eval_python().c_str());
    }
    if (!anchor_quality.empty()) good = show_anchors(quality[0], anchor_quality, published_text) || !published_text;
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = smollm2::parse_options(argc, argv);
    if (options.help) {
      std::fputs(smollm2::usage().c_str(), stdout);
      return 0;
    }
    return run(options);
  } catch (const c10::Error& error) {
    std::cerr << "smollm2: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "smollm2: " << error.what() << "\n";
  }
  return 2;
}
