// Writes the TorchScript module of export.py from C++ alone: no Python is needed to author, save, load or run it.
//
//   torchscript_author OUT.pt
//
// Module::define compiles TorchScript source. Out of the box it finds neither `torch.ops.<library>` nor custom classes;
// that is what the resolver below teaches it.
#include <kivi/kivi.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/custom_class.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

namespace {

namespace jit = torch::jit;

// `torch.ops`: its attributes are the namespaces of registered operators.
struct Ops : jit::SugaredValue {
  std::string kind() const override { return "torch.ops"; }
  std::shared_ptr<jit::SugaredValue> attr(const jit::SourceRange&, jit::GraphFunction&,
                                          const std::string& name) override {
    return std::make_shared<jit::BuiltinModule>(name);
  }
};

// `torch`: `ops` is special, everything else is an operator of PyTorch itself.
struct Torch : jit::SugaredValue {
  std::string kind() const override { return "torch"; }
  std::shared_ptr<jit::SugaredValue> attr(const jit::SourceRange& where, jit::GraphFunction& function,
                                          const std::string& name) override {
    if (name == "ops") return std::make_shared<Ops>();
    return jit::BuiltinModule("aten").attr(where, function, name);
  }
};

struct Resolver : jit::Resolver {
  std::shared_ptr<jit::SugaredValue> resolveValue(const std::string& name, jit::GraphFunction&,
                                                  const jit::SourceRange&) override {
    return name == "torch" ? std::make_shared<Torch>() : nullptr;
  }
};

constexpr const char* kSource = R"(
def forward(self, x):
    y = torch.matmul(x, self.weight).view([x.size(0), x.size(1), 8, 32]).transpose(1, 2)
    o = self.cache.forward(y[:, 0:4], y[:, 4:6], y[:, 6:8])
    return o.transpose(1, 2).flatten(2)

def length(self) -> int:
    return self.cache.length()

def quantized_length(self) -> int:
    return self.cache.quantized_length()

def key_error(self, x, bits: int):
    k = torch.matmul(x, self.weight).view([x.size(0), x.size(1), 8, 32]).transpose(1, 2)[:, 4:6]
    return (k - torch.ops.kivi.fake_quantize(k, 2, bits, 32)).abs().max()
)";

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: torchscript_author OUT.pt\n");
    return 2;
  }
  constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 32, kHidden = 128;
  jit::Module module("Attention");
  torch::manual_seed(0);
  module.register_parameter("weight",
                            torch::randn({kHidden, (kHeads + 2 * kKvHeads) * kHeadDim}) / std::sqrt(1.0 * kHidden),
                            /*is_buffer=*/false);
  kivi::CacheOptions options;  // 2 bits in groups of 32; the first 4 tokens and the newest 32 to 63 stay exact
  options.num_kv_heads = kKvHeads, options.head_dim = kHeadDim, options.residual_length = 32;
  module.register_attribute("cache", torch::getCustomClass("__torch__.torch.classes.kivi.KVCache"),
                            c10::IValue(c10::make_intrusive<kivi::KVCache>(options)));
  module.define(kSource, std::make_shared<Resolver>());
  module.register_attribute("training", c10::BoolType::get(), false);  // eval() and freeze() look for it
  module.save(argv[1]);
  std::printf("wrote %s\n", argv[1]);
  return 0;
}
