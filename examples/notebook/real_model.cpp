// Exercise 3: the keys and values of a real model, SmolLM2-135M. capture.py writes them from the model that
// examples/smollm2 exports: a dict of tensors, after RoPE, for some layers l<i>:
//   l<i>.q [1, Hq, T, D], .k and .v [1, Hkv, T, D]           the prompt
//   l<i>.q_step, .k_step, .v_step (T = 1), .out_step         one decode step, with its exact attention output over T +
//   1 tokens
#include <kivi/kivi.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "notebook.h"

namespace {

constexpr int64_t kGroup = 32;
using Capture = std::map<std::string, torch::Tensor>;

// The options' capture file; else what capture.py makes of the exported model; else "" with a sentence that says what
// to do.
std::string capture_file(const Options& options, Checks& check) {
  if (!options.capture.empty()) return options.capture;
  if (options.model.empty()) {
    std::puts(
        "  NOT RUN: it needs real K and V. Give --capture FILE (written by capture.py), or --model FILE (the model "
        "that");
    std::puts("  examples/smollm2/export.py writes), from which capture.py then makes one.");
    return "";
  }
  const auto file = (std::filesystem::path(options.output) / "capture.pt").string();
  const auto command = "'" + options.python +
                       "' '" NOTEBOOK_FOLDER "/capture.py' --kivi-library '" KIVI_LIBRARY "' --model '" +
                       options.model + "' --output '" + file + "'";
  std::fflush(stdout);
  if (std::system(command.c_str()) == 0) return file;
  check("capture.py wrote the K and V of the model", false, command);
  return "";
}

Capture read_capture(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  TORCH_CHECK(in && !bytes.empty(), "cannot read the capture ", file);
  Capture capture;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict()) {
    capture[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return capture;
}

// Relative errors of the attention output of one layer, for the queries of the second half of the prompt, each of which
// sees its own token and the ones before it.
struct LayerAttention {
  torch::Tensor q, k, v, mask, expected;  // q [Hq, T / 2, D], k and v [Hkv, T, D], all float32

  LayerAttention(const Capture& capture, const std::string& layer) {
    const auto get = [&](const char* what) { return capture.at(layer + what).squeeze(0).to(torch::kFloat); };
    k = get(".k"), v = get(".v");
    const int64_t tokens = k.size(1), rows = tokens / 2;
    q = get(".q").narrow(1, tokens - rows, rows);
    mask = torch::full({rows, tokens}, -INFINITY).triu(tokens - rows + 1);
    expected = output(k, v);
  }
  torch::Tensor output(const torch::Tensor& keys, const torch::Tensor& values) const {
    const int64_t shared = q.size(0) / keys.size(0);  // query heads of one kv head
    const auto scores =
        torch::matmul(q, keys.repeat_interleave(shared, 0).transpose(1, 2)) / std::sqrt(double(q.size(2)));
    return torch::matmul(torch::softmax(scores + mask, -1), values.repeat_interleave(shared, 0));
  }
  double error(const torch::Tensor& keys, const torch::Tensor& values) const {
    return relative_error(expected, output(keys, values));
  }
};

// [heads, tokens, channels] -> [heads * channels, tokens]
torch::Tensor channels(const torch::Tensor& x) { return x.transpose(1, 2).flatten(0, 1).contiguous(); }

constexpr int64_t kPerChannel = 1, kPerToken = 2;  // the axis of [heads, tokens, channels] along which a group lies

torch::Tensor rounded(const torch::Tensor& x, int64_t axis, int64_t bits) {
  return kivi::fake_quantize(x, axis, bits, kGroup);
}

// One decode step by a KVCache that holds the prompt, against the exact output.
double decode_error(const Capture& capture, const std::string& layer, int64_t k_bits, int64_t v_bits) {
  const auto get = [&](const char* what) { return capture.at(layer + what); };
  kivi::CacheOptions options;  // the defaults: the first 4 and the newest 128 tokens are exact
  options.num_kv_heads = get(".k").size(1), options.head_dim = get(".k").size(3);
  if (k_bits == 16) {
    options.residual_length = get(".k").size(2);  // nothing is quantised
  } else {
    options.k_bits = k_bits, options.v_bits = v_bits;
  }
  kivi::KVCache cache(options);
  cache.append(get(".k"), get(".v"));
  return relative_error(get(".out_step"),
                        cache.forward(get(".q_step"), get(".k_step"), get(".v_step")).to(torch::kFloat));
}

void print_axes(const std::vector<std::string>& layers, const Capture& capture, Checks& check) {
  std::puts(
      "  Attention output error at 2 bits, by the axis of the groups (the other side exact), and how far channels "
      "stand out");
  std::puts("  (the largest channel's mean magnitude over the median channel's)");
  std::puts("  layer |  K per channel  K per token  V per token  V per channel | outliers:     K      V");
  const double count = static_cast<double>(layers.size());
  double channel_sum = 0, token_sum = 0;
  for (const auto& name : layers) {
    const LayerAttention layer(capture, name);
    const double k_channel = layer.error(rounded(layer.k, kPerChannel, 2), layer.v);
    const double k_token = layer.error(rounded(layer.k, kPerToken, 2), layer.v);
    const double v_token = layer.error(layer.k, rounded(layer.v, kPerToken, 2));
    const double v_channel = layer.error(layer.k, rounded(layer.v, kPerChannel, 2));
    std::printf("  %5s | %13.2f%% %11.2f%% %11.2f%% %13.2f%% | %15.2f %6.2f\n", name.c_str(), 1e2 * k_channel,
                1e2 * k_token, 1e2 * v_token, 1e2 * v_channel, outlier_ratio(channels(layer.k)),
                outlier_ratio(channels(layer.v)));
    channel_sum += k_channel, token_sum += k_token;
  }
  check("real keys: groups along a channel err less than groups along a token", channel_sum < token_sum,
        format("mean %.1f%% and %.1f%%", 1e2 * channel_sum / count, 1e2 * token_sum / count));
}

void print_bits(const std::vector<std::string>& layers, const Capture& capture, Checks& check, Cliff& cliff) {
  std::puts("  Attention output error against bits, every token quantised, mean over the layers");
  std::puts("  bits |   K alone   V alone   K and V");
  double wider = 0;
  bool ordered = true;
  for (const int64_t bits : {8, 4, 3, 2, 1}) {
    double k_error = 0, v_error = 0, both = 0;
    for (const auto& name : layers) {
      const LayerAttention layer(capture, name);
      const auto k = rounded(layer.k, kPerChannel, bits), v = rounded(layer.v, kPerToken, bits);
      const double share = 1.0 / static_cast<double>(layers.size());
      k_error += share * layer.error(k, layer.v);
      v_error += share * layer.error(layer.k, v);
      both += share * layer.error(k, v);
    }
    std::printf("  %4lld | %8.3f%% %8.3f%% %8.3f%%\n", static_cast<long long>(bits), 1e2 * k_error, 1e2 * v_error,
                1e2 * both);
    cliff.real.emplace_back(bits, both);
    ordered &= both > wider;
    wider = both;
  }
  check("real K and V: fewer bits, larger error", ordered);
}

void print_decode(const std::vector<std::string>& layers, const Capture& capture, Checks& check) {
  std::puts(
      "  One decode step by KVCache with its defaults (first 4 and newest 128 tokens exact), error of the output;");
  std::puts("  a single query a layer, so take the trend from the means above");
  std::puts("  layer |  exact fp16      K8V8      K4V4      K4V2      K2V2");
  for (const auto& name : layers) {
    const double exact = decode_error(capture, name, 16, 16), k8v8 = decode_error(capture, name, 8, 8);
    const double k4v4 = decode_error(capture, name, 4, 4), k4v2 = decode_error(capture, name, 4, 2);
    const double k2v2 = decode_error(capture, name, 2, 2);
    std::printf("  %5s | %10.3f%% %8.3f%% %8.3f%% %8.3f%% %8.3f%%\n", name.c_str(), 1e2 * exact, 1e2 * k8v8, 1e2 * k4v4,
                1e2 * k4v2, 1e2 * k2v2);
    check(name + ": exact within fp16 rounding, K8V8 within 1 %, K4V4 better than K2V2",
          exact < 2e-3 && k8v8 < 0.01 && k4v4 < k2v2);
  }
}

}  // namespace

double outlier_ratio(const torch::Tensor& channels) {
  const auto magnitude = channels.abs().mean(1);
  return (magnitude.max() / magnitude.median()).item<double>();
}

std::vector<Layer> run_real_model(const Options& options, Checks& check, Cliff& cliff) {
  std::puts("\nExercise 3: real K and V (SmolLM2-135M)");
  const auto file = capture_file(options, check);
  if (file.empty()) return {};
  const auto capture = read_capture(file);
  std::vector<std::string> names;  // in the order of the layers: l0, l14, l29
  std::set<int64_t> numbers;
  for (const auto& [key, tensor] : capture) numbers.insert(std::stoll(key.substr(1)));
  for (const int64_t number : numbers) names.push_back("l" + std::to_string(number));

  print_axes(names, capture, check);
  print_bits(names, capture, check, cliff);
  print_decode(names, capture, check);

  std::vector<Layer> layers;
  for (const auto& name : names) {
    const LayerAttention layer(capture, name);
    layers.push_back({"layer " + name.substr(1), channels(layer.k), channels(layer.v), layer.k.size(2)});
  }
  return layers;
}
