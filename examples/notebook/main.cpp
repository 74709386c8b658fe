// The KIVI notebook ("2-bit KV cache quantisation") redone with kivi's operators from LibTorch: the same seeds, checks
// and sweep, then its three exercises and the plots. torch::randn gives Python's numbers for the same seed, so every
// number can be compared with that of the notebook's own code, which reference.py runs.
#include <kivi/kivi.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "notebook.h"

std::string format(const char* pattern, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(line, sizeof(line), pattern, arguments);
  va_end(arguments);
  return line;
}

torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
  const auto scores = torch::matmul(q, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(q.size(-1)));
  return torch::matmul(torch::softmax(scores, -1), v);
}

double relative_error(const torch::Tensor& reference, const torch::Tensor& value) {
  return ((reference - value).norm() / reference.norm()).item<double>();
}

void Checks::operator()(const std::string& name, bool passed, const std::string& message) {
  std::printf("  [%s] %s%s%s\n", passed ? "PASS" : "FAIL", name.c_str(), message.empty() ? "" : ": ", message.c_str());
  (passed ? passed_ : failed_)++;
}

void Checks::read_reference(const std::string& file) {
  std::ifstream in(file);
  TORCH_CHECK(in, "cannot read the reference numbers; write them with: python reference.py ", file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("# ", 0) == 0) std::printf("%s\n", line.c_str() + 2);
    std::istringstream words(line);
    std::string name, value;
    if (line[0] != '#' && words >> name >> value) reference_[name] = value;
  }
}

double Checks::reference(const std::string& name) const {
  const auto found = reference_.find(name);
  return found == reference_.end() ? std::nan("") : std::stod(found->second);
}

void Checks::same_as_reference(const std::string& name, double value) {
  const double expected = reference(name), difference = std::abs(value - expected) / std::abs(expected);
  compared_++;
  if (!(difference <= tolerance_)) {
    (*this)("equal to the notebook's code: " + name, false, format("%.9g here, %.9g there", value, expected));
  } else if (difference > largest_difference_) {
    largest_difference_ = difference;
  }
}

bool Checks::same_fingerprint(const std::string& name, const torch::Tensor& x) const {
  // As in reference.py: the bit patterns, weighted by position, summed modulo 2^64.
  const auto bits = x.contiguous().view({-1}).view(torch::kInt).to(torch::kLong);
  const auto sum = (bits * (2 * torch::arange(bits.numel()) + 1)).sum().item<int64_t>();
  const auto found = reference_.find("fingerprint." + name);
  return found != reference_.end() && found->second == std::to_string(sum);
}

namespace {

constexpr const char* kUsage = R"(usage: notebook [options]
  --reference FILE  numbers of the notebook's own code, as reference.py writes them (default: reference.txt of this example)
  --capture FILE    real K and V for exercise 3, as capture.py writes them
  --model FILE      without --capture: make DIR/capture.pt from this model, as examples/smollm2/export.py writes it
  --python PATH     the Python that runs capture.py for --model (default: python3)
  --out DIR         where the plots go (default: the current folder)
  --no-plots        tables and checks only
  --help            this text
)";

// Returns false, with a sentence on stderr, if the command line cannot be understood.
bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    std::string* value = name == "--reference" ? &options.reference
                         : name == "--capture" ? &options.capture
                         : name == "--model"   ? &options.model
                         : name == "--python"  ? &options.python
                         : name == "--out"     ? &options.output
                                               : nullptr;
    if (name == "--no-plots") {
      options.plots = false;
    } else if (value && i + 1 < argc) {
      *value = argv[++i];
    } else {
      std::fprintf(stderr, "notebook: %s %s\n%s", name.c_str(), value ? "needs a value" : "is not an option", kUsage);
      return false;
    }
  }
  return true;
}

int run(const Options& options) {
  std::filesystem::create_directories(options.output);
  torch::NoGradGuard no_grad;
  std::printf("kivi %s on %s\n", kivi::version().c_str(), kivi::cpu_capability().c_str());
  Checks check;
  check.read_reference(options.reference);
  Cliff cliff;
  run_synthetic(check, cliff);
  const auto layers = run_real_model(options, check, cliff);
  if (options.plots) draw_plots(options, cliff, layers, check);
  std::printf("\n%d checks passed, %d failed; %d numbers compared with Python, largest relative difference %.1e%s\n",
              check.passed(), check.failed(), check.compared(), check.largest_difference(),
              layers.empty() ? "; exercise 3 NOT RUN" : "");
  return check.failed() == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--help") == 0) return std::fputs(kUsage, stdout), 0;
  }
  Options options;
  options.reference = NOTEBOOK_FOLDER "/reference.txt";
  if (!parse(argc, argv, options)) return 2;

  try {
    return run(options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "notebook: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "notebook: %s\n", error.what());
  }
  return 1;
}
