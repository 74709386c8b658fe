#include "options.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <stdexcept>

#include "measure.h"

namespace smollm2 {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

int64_t integer(const std::string& option, const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw std::invalid_argument(option + " takes a whole number from " + std::to_string(least) + " to " +
                                std::to_string(most) + ", got '" + text + "'");
  }
  return value;
}

CacheConfig cache_config(const std::string& option, const std::string& text) {
  CacheConfig config;
  config.name = text;
  if (text.size() > 5 && text.compare(text.size() - 5, 5, ".json") == 0) {
    config.layers = kivi::load_calibration(text);
    config.name = text.substr(text.rfind('/') + 1);
    config.group_size = config.layers[0].group_size;  // for those who print them
    config.residual_length = config.layers[0].residual_length;
    config.sink_length = config.layers[0].sink_length;
    config.precision = config.layers[0].precision;
    return config;
  }
  const std::string bits = text.substr(0, text.find('+'));
  const auto known = [](char c) { return c == '1' || c == '2' || c == '3' || c == '4' || c == '8'; };
  if (bits.size() != 4 || bits[0] != 'K' || bits[2] != 'V' || !known(bits[1]) || !known(bits[3])) {
    if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') {
      config.recipe = text;  // kivi::KVCache knows the names
      return config;
    }
    throw std::invalid_argument(
        option + " takes a list such as K8V8,K4V2,K2V2+search with 1, 2, 3, 4 or 8 bits, got '" + text + "'");
  }
  config.k_bits = bits[1] - '0';
  config.v_bits = bits[3] - '0';
  const std::map<std::string, std::function<void()>> features = {
      {"search", [&] { config.range_search = true; }},       {"wide", [&] { config.wide_search = true; }},
      {"float8", [&] { config.scale_dtype = "float8"; }},    {"float32", [&] { config.scale_dtype = "float32"; }},
      {"token", [&] { config.one_group_per_token = true; }}, {"rotated", [&] { config.v_rotated = true; }},
      {"corrected", [&] { config.corrections = true; }},
  };
  for (size_t at = bits.size(); at < text.size();) {
    const size_t end = std::min(text.find('+', at + 1), text.size());
    const std::string feature = text.substr(at + 1, end - at - 1);
    const auto found = features.find(feature);
    if (found == features.end()) {
      throw std::invalid_argument(
          option + " knows +search, +wide, +float8, +float32, +token, +rotated and +corrected, got '+" + feature + "'");
    }
    found->second();
    at = end;
  }
  return config;
}

std::string usage() {
  return R"(Usage: smollm2 [options]

Runs SmolLM2-135M-Instruct with the plain fp32 cache and with Kivi caches of several bit widths. Shows the text that
each generates, the bytes of its cache, its speed, and its perplexity on a text.

  --prompt TEXT        the question to answer (default: a built-in story and a question about it)
  --raw                give the prompt to the model as it is, without the chat template
  --tokens N           longest answer, in tokens (default 64)
  --bits LIST          caches to compare with fp32 (default K8V8,K4V4,K4V2,K2V2). K4V2 = 4-bit keys and 2-bit values;
                       K2V2+search = with range search for this cache; also +float8 scales, one symmetric group of V
                       for each +token, +rotated V, +corrected K and V, +wide range search of V; or a recipe such as
                       near-lossless; or a file of kivi_calibrate, such as calibrated.json, with options for each layer
                       (its name ends in .json; --group-size, --residual, --sink and --precision do not touch it)
  --context LIST       contexts for speed and bytes (default 512 and the longest that the model takes, 8192)
  --windows N          windows of 1024 scored tokens for the perplexity, 1 to 4 (default 1)

  --group-size N       tokens (keys) or channels (values) that share a scale: 16, 32, 64 or 128 (default 32)
  --residual N         newest tokens that are kept exact (default 128)
  --sink N             first tokens that are kept exact (default 4)
  --range-search       search the best range of each group when it is quantised, for all caches
  --precision P        arithmetic of the attention: fast or exact (default fast)
  --text-file FILE     the text for speed and perplexity, UTF-8 (default: help texts of Python, from the model file)
  --recipes            all recipes and plain caches of 8 to 1 bits, on four windows with --residual 32, their perplexity
                       against the bits that they take; the table goes to the terminal, the plot to recipes.png
  --plot FILE          draws perplexity against bits into this file, .png or .svg (needs gnuplot)
  --protocol p1        the settings of the published figures: --residual 32 --sink 0

  --parts LIST         what to run (default text,speed,quality)
  --full               all four windows, and a second table with the published figures beside those measured
  --threads N          threads (default: one per core)
  --model FILE         the exported model (default: smollm2.pt beside this program)
  --help               this text
)";
}

void take_option(const std::map<std::string, Action>& with_value, int argc, char** argv, int* i) {
  std::string option = argv[*i], value;
  const std::size_t equals = option.find('=');
  const bool joined = option.compare(0, 2, "--") == 0 && equals != std::string::npos;
  if (joined) {
    value = option.substr(equals + 1);
    option.resize(equals);
  }
  const auto found = with_value.find(option);
  if (found == with_value.end()) throw std::invalid_argument("unknown option '" + option + "'; --help lists them");
  if (!joined) {
    if (*i + 1 == argc) throw std::invalid_argument(option + " needs a value");
    value = argv[++*i];
  }
  found->second(option, value);
}

Options parse_options(int argc, char** argv) {
  Options options;
  CacheConfig common;
  std::string bits = "K8V8,K4V4,K4V2,K2V2";
  const auto number = [](int64_t* target, int64_t least, int64_t most) -> Action {
    return [=](const std::string& option, const std::string& value) { *target = integer(option, value, least, most); };
  };
  const auto text = [](std::string* target) -> Action {
    return [=](const std::string&, const std::string& value) { *target = value; };
  };
  const std::map<std::string, Action> with_value = {
      {"--prompt", text(&options.prompt)},
      {"--model", text(&options.model)},
      {"--bits", text(&bits)},
      {"--text-file", text(&options.text_file)},
      {"--plot", text(&options.plot)},
      {"--tokens", number(&options.tokens, 1, 8192)},
      {"--windows", number(&options.windows, 1, kMaxWindows)},
      {"--group-size",
       [&](const std::string& option, const std::string& value) {
         common.group_size = integer(option, value, 16, 128);
         if (common.group_size % 16 != 0 || 128 % common.group_size != 0) {
           throw std::invalid_argument(option + " is 16, 32, 64 or 128, got '" + value + "'");
         }
       }},
      {"--residual", number(&common.residual_length, 0, 8192)},
      {"--sink", number(&common.sink_length, 0, 8192)},
      {"--threads", number(&options.threads, 1, 1024)},
      {"--precision",
       [&](const std::string& option, const std::string& value) {
         if (value != "fast" && value != "exact")
           throw std::invalid_argument(option + " is fast or exact, got '" + value + "'");
         common.precision = value;
       }},
      {"--protocol",
       [&](const std::string& option, const std::string& value) {
         if (value != "p1") throw std::invalid_argument(option + " knows only p1, got '" + value + "'");
         common.residual_length = 32;
         common.sink_length = 0;
       }},
      {"--context",
       [&](const std::string& option, const std::string& value) {
         options.contexts.clear();
         for (const std::string& part : split(value))
           options.contexts.push_back(integer(option, part, kShortestContext, 8192));
         std::sort(options.contexts.begin(), options.contexts.end());
         options.contexts.erase(std::unique(options.contexts.begin(), options.contexts.end()), options.contexts.end());
       }},
      {"--parts",
       [&](const std::string& option, const std::string& value) {
         options.text = options.speed = options.quality = false;
         for (const std::string& part : split(value)) {
           if (part != "text" && part != "speed" && part != "quality") {
             throw std::invalid_argument(option + " takes text, speed and quality, got '" + part + "'");
           }
           (part == "text" ? options.text : part == "speed" ? options.speed : options.quality) = true;
         }
       }},
  };
  const std::map<std::string, std::function<void()>> alone = {
      {"--raw", [&] { options.raw = true; }},
      {"--range-search", [&] { common.range_search = true; }},
      {"--help", [&] { options.help = true; }},
      {"-h", [&] { options.help = true; }},
      {"--recipes",
       [&] {
         bits = "K8V8,K4V4,K3V3,K4V2,K2V2,K1V1,near-lossless,quality,balanced,compact";
         options.windows = kMaxWindows;
         common.residual_length = 32;
         options.text = options.speed = false;
         options.plot = "recipes.png";
       }},
      {"--full",
       [&] {
         options.windows = kMaxWindows;
         options.anchors = true;
       }},
  };
  for (int i = 1; i < argc; ++i) {
    if (const auto found = alone.find(argv[i]); found != alone.end()) {
      found->second();
      continue;
    }
    take_option(with_value, argc, argv, &i);
  }
  for (const std::string& part : split(bits)) {
    if (part == "fp32") continue;  // it is always there
    CacheConfig config = cache_config("--bits", part);
    if (!config.layers.empty()) {
      options.caches.push_back(config);
      continue;
    }
    config.range_search |= common.range_search && config.recipe.empty();
    config.group_size = common.group_size;
    config.residual_length = common.residual_length;
    config.sink_length = common.sink_length;
    config.precision = common.precision;
    options.caches.push_back(config);
  }
  return options;
}

}  // namespace smollm2
