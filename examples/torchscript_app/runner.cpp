// Runs a TorchScript module with a kivi cache inside. This program names nothing of kivi: it includes no kivi header
// and refers to no kivi symbol. It only links Kivi::kivi, which registers the operators and the class when the program
// starts.
//
//   torchscript_runner MODULE.pt PART.pt            runs, copies, freezes, and saves with a part-filled cache into
//   PART.pt torchscript_runner MODULE.pt PART.pt --resume   in a new process: goes on from PART.pt
//
// Each way on is compared with a twin, a module that was loaded from MODULE.pt and fed the same tokens. All must agree
// to the bit.
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

namespace jit = torch::jit;

constexpr int64_t kPrompt = 100, kSteps = 24,
                  kMore = 40;  // groups fill up while decoding, before the save and after it
int failures = 0;

void check(const std::string& what, bool good) {
  std::printf("%-72s %s\n", what.c_str(), good ? "ok" : "FAILED");
  if (!good) failures++;
}

torch::Tensor feed(jit::Module& module, const torch::Tensor& tokens) { return module.forward({tokens}).toTensor(); }

// One token at a time, as a model decodes.
torch::Tensor decode(jit::Module& module, const torch::Tensor& tokens) {
  std::vector<torch::Tensor> out;
  for (int64_t t = 0; t < tokens.size(1); t++) out.push_back(feed(module, tokens.narrow(1, t, 1)));
  return torch::cat(out, 1);
}

int64_t length(jit::Module& module) { return module.get_method("length")({}).toInt(); }
int64_t quantized(jit::Module& module) { return module.get_method("quantized_length")({}).toInt(); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4 || (argc == 4 && std::strcmp(argv[3], "--resume") != 0)) {
    std::fprintf(stderr, "usage: torchscript_runner MODULE.pt PART.pt [--resume]\n");
    return 2;
  }
  const std::string module_file = argv[1], part_file = argv[2];
  torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  const auto prompt = torch::randn({1, kPrompt, 128}), steps = torch::randn({1, kSteps, 128});
  const auto more = torch::randn({1, kMore, 128});
  const auto load = [&](const std::string& file) {
    auto module = jit::load(file);
    module.eval();
    return module;
  };

  auto twin = load(module_file);
  check("a fresh module holds no token", length(twin) == 0);
  const auto first = torch::cat({feed(twin, prompt), decode(twin, steps)}, 1);
  check("124 tokens are held, 64 of them quantised", length(twin) == 124 && quantized(twin) == 64);
  check("the output is finite", first.isfinite().all().item<bool>());
  const double error4 = twin.get_method("key_error")({prompt, 4}).toTensor().item<double>();
  const double error2 = twin.get_method("key_error")({prompt, 2}).toTensor().item<double>();
  std::printf("largest error of a key: %.4f at 4 bits, %.4f at 2 bits\n", error4, error2);
  check("torch.ops.kivi.fake_quantize: 2 bits err more than 4", 0 < error4 && error4 < error2 && error2 < 1.5);

  if (argc == 4) {  // PART.pt comes from another process
    auto part = load(part_file);
    check("resumed: length as saved", length(part) == length(twin) && quantized(part) == quantized(twin));
    check("resumed: the next 40 outputs equal the twin's", torch::equal(decode(part, more), decode(twin, more)));
    check("resumed: 164 tokens, 128 quantised", length(part) == 164 && quantized(part) == 128);
    return failures == 0 ? 0 : 1;
  }

  // deepcopy() copies the cache through its saved form: the two share nothing.
  auto copy = twin.deepcopy();
  const auto twin_next = decode(twin, more);
  check("deepcopy: tokens fed to the original do not reach the copy", length(copy) == 124 && length(twin) == 164);
  check("deepcopy: the copy goes on like the original", torch::equal(decode(copy, more), twin_next));

  auto module = load(module_file);
  feed(module, prompt), decode(module, steps);
  module.save(part_file);
  auto part = load(part_file);
  check("save: length survives", length(part) == 124 && quantized(part) == 64);
  check("save: the next 40 outputs equal those of the twin that was not saved",
        torch::equal(decode(part, more), twin_next));
  check("save: the module that was saved goes on undisturbed", torch::equal(decode(module, more), twin_next));

  // clone() copies everything, the cache included. (Module::copy() does not: both modules would feed one cache.)
  auto original = load(module_file);
  feed(original, prompt), decode(original, steps);
  auto clone = original.clone();
  check("clone: the clone goes on like the original", torch::equal(decode(clone, more), twin_next));
  check("clone: tokens fed to the clone do not reach the original", length(original) == 124);

  // freeze() folds the weights into the graph. Three things to know about a cache in a frozen module:
  // - freeze() never copies the cache: the frozen module and the one that it came from feed the same cache. deepcopy()
  // first if the
  //   other one is still used.
  // - Name the attribute "cache" among those to preserve. Without that the cache becomes a constant of the graph. Such
  // a module runs,
  //   is saved and loaded, but deepcopy() and clone() of it share the cache.
  // - Methods other than forward() stay only if they are named too.
  auto frozen = jit::freeze(original.deepcopy(), std::vector<std::string>{"cache", "length", "quantized_length"});
  check("freeze: the weights are constants, the cache is still an attribute",
        frozen.hasattr("cache") && !frozen.hasattr("weight"));
  auto frozen_copy = frozen.deepcopy();
  check("freeze: the frozen module goes on like the original", torch::equal(decode(frozen, more), twin_next));
  check("freeze: a copy of it has a cache of its own", length(frozen_copy) == 124 && length(frozen) == 164);
  check("freeze: and goes on the same way", torch::equal(decode(frozen_copy, more), twin_next));
  auto frozen_part = jit::freeze(original.deepcopy(), std::vector<std::string>{"cache", "length", "quantized_length"});
  frozen_part.save(part_file + ".frozen");
  auto frozen_loaded = jit::load(part_file + ".frozen");
  std::remove((part_file + ".frozen").c_str());
  check("freeze: saved with a part-filled cache, loaded, goes on",
        length(frozen_loaded) == 124 && torch::equal(decode(frozen_loaded, more), twin_next));
  check("freeze: the module that was frozen as a copy is untouched", length(original) == 124);

  std::puts(failures == 0 ? "all as it should be" : "NOT as it should be");
  return failures == 0 ? 0 : 1;
}
