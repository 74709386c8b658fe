// The command line of the demo.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "model.h"

namespace smollm2 {

struct Options {
  std::string model;                // empty: smollm2.pt beside the program
  std::string prompt;               // empty: the built-in one
  bool raw = false;                 // the prompt as it is, without the chat template
  std::vector<CacheConfig> caches;  // without the exact one
  std::vector<int64_t> contexts;    // empty: 512 and the longest that the model takes
  std::string text_file;            // evaluation text; empty: that of the model file
  std::string plot;                 // a PNG or SVG file to draw perplexity against bits into; empty: none
  int64_t tokens = 64;
  int64_t windows = 1;
  int64_t threads = 0;  // 0: as many as torch takes
  bool text = true;
  bool speed = true;
  bool quality = true;
  bool anchors = false;  // also the protocol with published figures
  bool help = false;
};

// A recipe, or bits with options beyond them: "near-lossless", "K4V2", "K2V2+search", "K4V4+float8+token+rotated"; or
// the file of a calibration, "calibrated.json". `option` is what errors name.
CacheConfig cache_config(const std::string& option, const std::string& text);
std::vector<std::string> split(const std::string& list);  // at its commas
int64_t integer(const std::string& option, const std::string& text, int64_t least, int64_t most);

// Options that take a value: what each does with its name and value. `take_option` carries out argv[*i], written as
// --name value or --name=value, and leaves *i at the last word that belongs to it.
using Action = std::function<void(const std::string& option, const std::string& value)>;
void take_option(const std::map<std::string, Action>& with_value, int argc, char** argv, int* i);

// These throw std::invalid_argument with a sentence that names the option.
Options parse_options(int argc, char** argv);
std::string usage();

}  // namespace smollm2
