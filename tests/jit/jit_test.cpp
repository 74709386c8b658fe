// The operators and torch.classes.kivi.KVCache in TorchScript, authored from C++ alone: named arguments and defaults,
// the optimiser (each function runs often enough for the profiling executor to rewrite it), freezing, saving and
// copying. Python is in python_test.py.
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/custom_class.h>

#include <sstream>

#include "tests/ops/support.h"

namespace kivi::test {
namespace {

namespace jit = torch::jit;

constexpr int kRuns = 4;

c10::ClassTypePtr cache_class() { return torch::getCustomClass("__torch__.torch.classes.kivi.KVCache"); }

// `torch`, `torch.ops.<namespace>` and `torch.classes.kivi.KVCache` by name.
struct Named : jit::SugaredValue {
  explicit Named(std::string path) : path_(std::move(path)) {}
  std::string kind() const override { return path_; }
  std::shared_ptr<jit::SugaredValue> attr(const jit::SourceRange& where, jit::GraphFunction& function,
                                          const std::string& name) override {
    if (path_ == "torch.ops") return std::make_shared<jit::BuiltinModule>(name);
    if (path_ == "torch.classes.kivi") return std::make_shared<jit::ClassValue>(cache_class());
    if (path_ == "torch" && name != "ops" && name != "classes") {
      return jit::BuiltinModule("aten").attr(where, function, name);
    }
    return std::make_shared<Named>(path_ + "." + name);
  }

 private:
  std::string path_;
};

struct Resolver : jit::Resolver {
  std::shared_ptr<jit::SugaredValue> resolveValue(const std::string& name, jit::GraphFunction&,
                                                  const jit::SourceRange&) override {
    return name == "torch" ? std::make_shared<Named>("torch") : nullptr;
  }
  c10::TypePtr resolveType(const std::string& name, const jit::SourceRange&) override {
    return name == "KVCache" ? cache_class() : nullptr;
  }
};

std::shared_ptr<jit::CompilationUnit> compile(const std::string& source) {
  auto unit = std::make_shared<jit::CompilationUnit>();
  unit->define(std::nullopt, source, std::make_shared<Resolver>(), nullptr);
  return unit;
}

c10::IValue run(jit::CompilationUnit& unit, const std::string& name, std::vector<c10::IValue> arguments) {
  return unit.get_function(c10::QualifiedName(name))(std::move(arguments));
}

c10::intrusive_ptr<KVCache> make_cache() {
  CacheOptions o;
  o.num_kv_heads = 2, o.head_dim = 16, o.group_size = 16, o.residual_length = 8;
  return c10::make_intrusive<KVCache>(o);
}

// ---------------------------------------------------------------------------------------------- operators

TEST(Jit, OperatorsTakeNamedArgumentsAndDefaults) {
  const auto unit = compile(R"(
def by_name(x, bits: int):
    codes, scale, zero = torch.ops.kivi.quantize(x, axis=1, bits=bits, group_size=16)
    return torch.ops.kivi.dequantize(codes, scale, zero, 1, bits, 16, size=x.size(1))

def by_default(x):
    return torch.ops.kivi.fake_quantize(x, 1)

def typed(x):
    codes, scale, zero = torch.ops.kivi.quantize(x, -1)
    return torch.ops.kivi.dequantize(codes, scale, zero, -1, 2, 32, x.size(1), dtype=5)

def format():
    f = torch.ops.kivi.cache_format(2, 16, k_bits=4, sink_length=0)
    return f, torch.ops.kivi.cache_page_bytes(f), torch.ops.kivi.cache_window_capacity(f)

def about():
    return torch.ops.kivi.version(), torch.ops.kivi.cpu_capability()
)");
  const at::Tensor x = randn({3, 70}, 1);
  for (int i = 0; i < kRuns; i++) {
    EXPECT_TRUE(same_bits(run(*unit, "by_name", {x, 3}).toTensor(), fake_quantize(x, 1, 3, 16)));
    EXPECT_TRUE(same_bits(run(*unit, "by_default", {x}).toTensor(), fake_quantize(x, 1, 2, 32)));
    EXPECT_TRUE(same_bits(run(*unit, "typed", {x}).toTensor(), fake_quantize(x, 1).to(at::kHalf)));
  }
  const auto format = cache_format(2, 16, std::nullopt, 4, 2, 32, 128, 0);
  const auto made = run(*unit, "format", {}).toTuple();
  EXPECT_EQ(made->elements()[0].toIntVector(), format);
  EXPECT_EQ(made->elements()[1].toInt(), cache_page_bytes(format));
  EXPECT_EQ(made->elements()[2].toInt(), cache_window_capacity(format));
  const auto about = run(*unit, "about", {}).toTuple();
  EXPECT_EQ(about->elements()[0].toStringRef(), version());
  EXPECT_EQ(about->elements()[1].toStringRef(), cpu_capability());
}

TEST(Jit, ErrorsKeepTheirWords) {
  const auto unit = compile(R"(
def bad(x):
    return torch.ops.kivi.fake_quantize(x, 1, bits=5)
)");
  try {
    run(*unit, "bad", {randn({2, 32}, 1)});
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("bits must be 1, 2, 3, 4 or 8, got 5"), std::string::npos) << error.what();
  }
}

// ---------------------------------------------------------------------------------------------- the class

// design: names and defaults, the same in C++, TorchScript and Python.
TEST(Jit, SignaturesOfTheClass) {
  const auto signature = [](const std::string& method) {
    std::ostringstream s;
    const auto& arguments = cache_class()->getMethod(method).getSchema().arguments();
    for (size_t i = 1; i < arguments.size(); i++) {  // 0 is the object
      const c10::Argument& a = arguments[i];
      s << a.name();
      if (a.default_value()) s << "=" << *a.default_value();
      s << " ";
    }
    return s.str();
  };
  EXPECT_EQ(signature("__init__"),
            "num_kv_heads head_dim value_head_dim=None k_bits=2 v_bits=2 group_size=32 residual_length=128 "
            "sink_length=4 precision=fast range_search=False scale_dtype=float16 recipe= k_search=[] v_search=[] "
            "k_bias_correction=False v_gain_correction=False v_group_size=None v_symmetric=False v_rotated=False "
            "k_classes=[] ");
  const std::string options =
      "attn_mask=None is_causal=True scale=None softcap=0. window=0 sinks=None alibi_slopes=None ";
  EXPECT_EQ(signature("forward"), "q k v " + options + "lengths=None ");
  EXPECT_EQ(signature("attend"), "q " + options);
  EXPECT_EQ(signature("attend_with_lse"), "q " + options);
  EXPECT_EQ(signature("append"), "k v lengths=None q=None ");
  EXPECT_EQ(signature("truncate"), "n ");
  EXPECT_EQ(signature("reorder"), "rows ");
  EXPECT_EQ(signature("select"), "rows ");
  EXPECT_EQ(signature("repeat_interleave"), "n ");
  for (const char* plain : {"length", "lengths", "quantized_length", "quantized_lengths", "batch_size", "nbytes",
                            "dequantize", "reset", "clone"}) {
    EXPECT_EQ(signature(plain), "") << plain;
  }
}

TEST(Jit, EveryMethodWorks) {
  const auto unit = compile(R"(
def everything(q, k, v, mask, rows, lengths):
    c = torch.classes.kivi.KVCache(2, 16, value_head_dim=20, k_bits=4, group_size=16, residual_length=8, sink_length=4, precision="exact", range_search=True, scale_dtype="float32")
    c.append(k, v)
    c.append(k, v, lengths=lengths)
    c.reserve(tokens=500)
    o = c.forward(q, k, v, attn_mask=None, is_causal=True, scale=0.3, softcap=5., window=40, sinks=None, alibi_slopes=None, lengths=lengths)
    p = c.attend(q[:, :, 0:1], attn_mask=mask)
    r, lse = c.attend_with_lse(q, is_causal=False)
    d = c.clone()
    d.reorder(rows=rows)
    d.select(rows)
    d.repeat_interleave(n=2)
    d.truncate(n=50)
    dk, dv = d.dequantize()
    n = [c.length(), c.quantized_length(), c.batch_size(), c.nbytes(), d.length(), d.quantized_length(), d.batch_size(), d.nbytes()]
    both = [c.lengths(), c.quantized_lengths(), d.lengths()]
    c.reset()
    n.append(c.length())
    return o, p, r, lse, dk, dv, n, both
)");
  const at::Tensor q = randn({2, 4, 30, 16}, 11), k = randn({2, 2, 30, 16}, 12), v = randn({2, 2, 30, 20}, 13);
  const at::Tensor mask = randn({2, 1, 1, 90}, 14) > 0, rows = longs({1, 0}), lengths = longs({30, 17});
  KVCache c(2, 16, 20, 4, 2, 16, 8, 4, "exact", true, "float32");
  c.append(k, v);
  c.append(k, v, lengths);
  c.reserve(500);
  AttentionOptions o;
  o.scale = 0.3, o.softcap = 5, o.window = 40;
  const at::Tensor out = c.forward(q, k, v, o, lengths);
  AttentionOptions masked, all;
  masked.attn_mask = mask;
  all.is_causal = false;
  const auto d = c.clone();
  d->reorder(rows);
  d->select(rows);
  d->repeat_interleave(2);
  d->truncate(50);
  for (int i = 0; i < kRuns; i++) {
    const auto got = run(*unit, "everything", {q, k, v, mask, rows, lengths}).toTuple()->elements().vec();
    EXPECT_TRUE(same_bits(got[0].toTensor(), out));
    EXPECT_TRUE(same_bits(got[1].toTensor(), c.attend(q.narrow(2, 0, 1), masked)));
    EXPECT_TRUE(same_bits(got[2].toTensor(), c.attend(q, all)));
    EXPECT_TRUE(same_bits(got[3].toTensor(), std::get<1>(c.attend_with_lse(q, all))));
    EXPECT_TRUE(same_bits(got[4].toTensor(), std::get<0>(d->dequantize())));
    EXPECT_TRUE(same_bits(got[5].toTensor(), std::get<1>(d->dequantize())));
    EXPECT_EQ(got[6].toIntVector(), (std::vector<int64_t>{c.length(), c.quantized_length(), 2, c.nbytes(), d->length(),
                                                          d->quantized_length(), 4, d->nbytes(), 0}));
    const auto both = got[7].toTensorVector();
    EXPECT_TRUE(same_bits(both[0], c.lengths()));
    EXPECT_TRUE(same_bits(both[1], c.quantized_lengths()));
    EXPECT_TRUE(same_bits(both[2], d->lengths()));
  }
}

// C23 a: calls whose result nobody uses stay, equal calls are not merged, reads are not moved across writes.
TEST(Jit, TheOptimiserKeepsEveryStatefulCall) {
  const auto unit = compile(R"(
def twice(c: KVCache, k, v) -> int:
    c.append(k, v)
    c.append(k, v)
    return c.length()

def unused_results(c: KVCache, k, v) -> int:
    c.forward(k, k, v)
    o = c.forward(k, k, v)
    c.attend(k)
    return c.length()

def reads(c: KVCache, k, v):
    a = c.length()
    c.append(k, v)
    b = c.length()
    x, y = c.dequantize()
    c.truncate(a)
    z, w = c.dequantize()
    return [a, b, c.length(), x.size(2), z.size(2)]

def loops(c: KVCache, k, v, n: int) -> int:
    for i in range(n):
        if i % 3 == 0:
            c.append(k, v)
        elif i % 3 == 1:
            c.forward(k, k, v)
        else:
            c.truncate(c.length() - 1)
    return c.length()

def while_loop(c: KVCache, k, v, n: int) -> int:
    i = 0
    while c.length() < n:
        c.append(k[:, :, 0:1], v[:, :, 0:1])
        i += 1
    return i

def operator(pool, table, lengths, quantized, sk, sv, wk, wv, k, v, format: List[int]) -> int:
    torch.ops.kivi.cache_append(pool, table, lengths, quantized, sk, sv, wk, wv, k, v, format)
    torch.ops.kivi.cache_append(pool, table, lengths, quantized, sk, sv, wk, wv, k, v, format)
    n = int(lengths[0])
    torch.ops.kivi.cache_truncate(pool, table, lengths, quantized, sk, sv, wk, wv, format, n - 1)
    return int(lengths[0])
)");
  const at::Tensor k = randn({1, 2, 6, 16}, 21), v = randn({1, 2, 6, 16}, 22);
  auto c = make_cache();
  for (int i = 1; i <= kRuns; i++) EXPECT_EQ(run(*unit, "twice", {c, k, v}).toInt(), 2 * 6 * i);
  c = make_cache();
  for (int i = 1; i <= kRuns; i++) EXPECT_EQ(run(*unit, "unused_results", {c, k, v}).toInt(), 2 * 6 * i);
  c = make_cache();
  c->append(k, v);
  for (int i = 0; i < kRuns; i++) {
    EXPECT_EQ(run(*unit, "reads", {c, k, v}).toIntVector(), (std::vector<int64_t>{6, 12, 6, 12, 6}));
  }
  c = make_cache();
  int64_t want = 0;
  for (int i = 0; i < kRuns; i++) {
    want += 3 * 6 + 3 * 6 - 2;  // 8 rounds: 0 3 6 append, 1 4 7 forward, 2 5 truncate
    EXPECT_EQ(run(*unit, "loops", {c, k, v, 8}).toInt(), want);
  }
  c = make_cache();
  for (int i = 1; i <= kRuns; i++) EXPECT_EQ(run(*unit, "while_loop", {c, k, v, 20 * i}).toInt(), 20);
  const auto format = cache_format(2, 16, std::nullopt, 2, 2, 16, 8, 4);
  const CacheTensors t = make_tensors(format, 1, 2);
  for (int i = 1; i <= kRuns; i++) {
    std::vector<c10::IValue> arguments;
    for (const at::Tensor& part : list(t)) arguments.emplace_back(part);
    arguments.emplace_back(k), arguments.emplace_back(v), arguments.emplace_back(format);
    EXPECT_EQ(run(*unit, "operator", arguments).toInt(), 11 * i);
  }
}

// ---------------------------------------------------------------------------------------------- modules

constexpr const char* kModule = R"(
def forward(self, q, k, v):
    o = self.cache.forward(q, k, v)
    self.cache.append(k[:, :, 0:1], v[:, :, 0:1])
    return o * self.gain

def length(self) -> int:
    return self.cache.length()
)";

jit::Module make_module() {
  jit::Module m("Layer");
  m.register_attribute("cache", cache_class(), c10::IValue(make_cache()));
  m.register_parameter("gain", at::full({1}, 2.0), /*is_buffer=*/true);
  m.define(kModule, std::make_shared<Resolver>());
  m.register_attribute("training", c10::BoolType::get(), false);
  return m;
}

c10::intrusive_ptr<KVCache> cache_of(const jit::Module& m) { return m.attr("cache").toCustomClass<KVCache>(); }

struct Inputs {
  at::Tensor q, k, v;
};

Inputs inputs_of(int64_t step) {
  const int64_t tokens = step == 0 ? 40 : 1 + step % 3;
  const auto seed = static_cast<uint64_t>(step) * 3;
  return {randn({2, 4, tokens, 16}, 31 + seed), randn({2, 2, tokens, 16}, 32 + seed),
          randn({2, 2, tokens, 16}, 33 + seed)};
}

at::Tensor step(jit::Module& m, int64_t index) {
  const Inputs x = inputs_of(index);
  return m.forward({x.q, x.k, x.v}).toTensor();
}

// The same by hand.
at::Tensor step(KVCache& c, int64_t index) {
  const Inputs x = inputs_of(index);
  const at::Tensor out = c.forward(x.q, x.k, x.v) * 2.0;
  c.append(x.k.narrow(2, 0, 1), x.v.narrow(2, 0, 1));
  return out;
}

void expect_steps(jit::Module& m, KVCache& twin, int64_t first, int64_t last, const std::string& what) {
  for (int64_t i = first; i < last; i++) ASSERT_TRUE(same_bits(step(m, i), step(twin, i))) << what << ", step " << i;
}

TEST(JitModule, RunsLikeTheCacheByHand) {
  jit::Module m = make_module();
  const auto twin = make_cache();
  expect_steps(m, *twin, 0, 12, "module");
  EXPECT_EQ(m.get_method("length")({}).toInt(), twin->length());
  EXPECT_TRUE(same_state(cache_of(m)->state(), twin->state()));
}

// C22: saved empty, saved with contents; what was saved goes on as if nothing had happened.
TEST(JitModule, StateSurvivesSavingAndLoading) {
  for (int64_t before : {0, 1, 7}) {
    jit::Module m = make_module();
    const auto twin = make_cache();
    expect_steps(m, *twin, 0, before, "before saving");
    std::stringstream file;
    m.save(file);
    int64_t held = 0;
    const KVCache::State state = twin->state();
    for (const at::Tensor& t : std::get<2>(state)) held += static_cast<int64_t>(t.nbytes());
    EXPECT_LT(static_cast<int64_t>(file.str().size()), held + 32768);
    jit::Module loaded = jit::load(file, at::kCPU);
    EXPECT_EQ(loaded.get_method("length")({}).toInt(), twin->length());
    EXPECT_TRUE(same_state(cache_of(loaded)->state(), twin->state()));
    expect_steps(loaded, *twin, before, before + 10, "loaded");
    // The saved module did not move along.
    EXPECT_NE(cache_of(m)->length(), twin->length());
  }
}

TEST(JitModule, ADeepCopyIsIndependent) {
  jit::Module m = make_module();
  const auto twin = make_cache();
  expect_steps(m, *twin, 0, 5, "before copying");
  jit::Module other = m.deepcopy();
  const auto other_twin = twin->clone();
  EXPECT_NE(cache_of(other).get(), cache_of(m).get());
  expect_steps(m, *twin, 5, 12, "original");
  expect_steps(other, *other_twin, 20, 27, "copy");
  expect_steps(m, *twin, 12, 15, "original after the copy moved on");
}

TEST(JitModule, FrozenAndOptimisedModulesKeepTheirCalls) {
  for (bool optimise : {false, true}) {
    jit::Module m = make_module();
    const auto twin = make_cache();
    expect_steps(m, *twin, 0, 3, "before freezing");
    jit::Module frozen = optimise ? jit::optimize_for_inference(m, {}) : jit::freeze(m);
    const std::string what = optimise ? "optimised" : "frozen";
    expect_steps(frozen, *twin, 3, 10, what);
    std::stringstream file;
    frozen.save(file);
    jit::Module loaded = jit::load(file);
    expect_steps(loaded, *twin, 10, 15, what + " and loaded");
  }
}

TEST(JitModule, CachesMadeInsideAFunctionAndHeldInLists) {
  const auto unit = compile(R"(
def layers(k, v, n: int):
    caches = [torch.classes.kivi.KVCache(2, 16, group_size=16, residual_length=0, sink_length=0) for i in range(3)]
    for i in range(n):
        for c in caches:
            c.append(k, v)
        caches[1].truncate(caches[1].length() - 2)
    return [c.length() for c in caches]
)");
  const at::Tensor k = randn({1, 2, 6, 16}, 41);
  for (int i = 0; i < kRuns; i++) {
    EXPECT_EQ(run(*unit, "layers", {k, k, 5}).toIntVector(), (std::vector<int64_t>{30, 20, 30}));
  }
}

}  // namespace
}  // namespace kivi::test
