// What the parts of the notebook share: options, checks, the reference numbers, and the two formulas of the notebook's
// cells (attention, relative error).
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct Options {
  std::string reference;           // what reference.py wrote
  std::string capture;             // real K and V, as capture.py writes them; may be empty
  std::string model;               // with no capture: the exported model from which capture.py makes one; may be empty
  std::string python = "python3";  // runs capture.py; it must be able to import the torch that kivi was built for
  std::string output = ".";        // where the plots and their data go
  bool plots = true;
};

// Each check prints a line; the program ends with 0 only if all of them passed.
class Checks {
 public:
  void operator()(const std::string& name, bool passed, const std::string& message = "");
  // That `value` is what the notebook's code in Python gave under that name, within a relative tolerance: matrix
  // products differ in their last bits between machines. Where torch::randn does too, a few codes differ, and the
  // tolerance must be wider.
  void same_as_reference(const std::string& name, double value);
  void set_tolerance(double relative) { tolerance_ = relative; }
  void read_reference(const std::string& file);
  double reference(const std::string& name) const;  // NaN if it has no such name
  // Whether the tensor's fingerprint is the one that Python printed under that name.
  bool same_fingerprint(const std::string& name, const torch::Tensor& x) const;
  int failed() const { return failed_; }
  int passed() const { return passed_; }
  double largest_difference() const { return largest_difference_; }
  int compared() const { return compared_; }

 private:
  std::map<std::string, std::string> reference_;
  int failed_ = 0, passed_ = 0, compared_ = 0;
  double largest_difference_ = 0, tolerance_ = 1e-5;
};

// One curve of the quality-cliff plot: the relative error of the attention output by bits per code.
using Curve = std::vector<std::pair<int64_t, double>>;
struct Cliff {
  Curve both, keys, values;  // the notebook's random K and V: both quantised, one of them
  Curve real;                // mean over the layers of the real model; empty without a capture
  double fp16 = 0;           // 16 bits: what rounding K, V, q and the output to fp16 costs
};

// The real model's K or V of one layer, [kv heads * channels, tokens] float32.
struct Layer {
  std::string name;
  torch::Tensor k, v;
  int64_t head_dim = 0;
};

torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);
double relative_error(const torch::Tensor& reference, const torch::Tensor& value);
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// Mean |x| over tokens of the largest channel over that of the median one; x is [channels, tokens].
double outlier_ratio(const torch::Tensor& channels);

// The cells of the notebook and its exercises 1 and 2, on random data.
void run_synthetic(Checks& check, Cliff& cliff);
// Exercise 3. Returns the layers for the plots; none if there is no capture, which it says.
std::vector<Layer> run_real_model(const Options& options, Checks& check, Cliff& cliff);
// Writes the data and the scripts, and calls gnuplot. A missing gnuplot is one sentence and no failure.
void draw_plots(const Options& options, const Cliff& cliff, const std::vector<Layer>& layers, Checks& check);
