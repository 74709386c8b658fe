// The cases C20 to C25: what PyTorch does around the operators, that is gradients and modes, dtypes and devices,
// saving, the optimiser of TorchScript, registration and threads. The inputs of the case, then others of the same kind.
// Users of the installed package (C24) are in tests/install, compilers and scripts in tests/jit. Left out: what a case
// says about CUDA.
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/custom_class.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <sstream>
#include <thread>

#include "tests/ops/cases.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- C20

TEST(C20_Gradients, OfTheQuantiser) {
  const at::Tensor plain = randn({4, 64}, 32), x = plain.clone().requires_grad_();
  const Quantized want = quantized(plain, 1, 3, 16);
  expect_same(quantized(x, 1, 3, 16), want, "requires_grad");
  expect_error([&] { (fake_quantize(x, 1, 3, 16) * 2).sum().backward(); }, {"kivi::fake_quantize"});
  expect_error([&] { std::get<1>(quantize(x, 0, 3, 16)).mean().backward(); }, {"kivi::quantize"});
  EXPECT_FALSE(x.grad().defined() || std::get<0>(quantize(x, 1)).requires_grad());
  at::Tensor made_inside;
  {
    const c10::InferenceMode mode;
    made_inside = plain.clone();
    expect_same(quantized(plain, 1, 3, 16), want, "inside inference mode");
    expect_same(quantized(x, 1, 3, 16), want, "inside inference mode, requires_grad");
  }
  expect_same(quantized(made_inside, 1, 3, 16), want, "an inference tensor outside");
  const at::NoGradGuard guard;
  EXPECT_FALSE(fake_quantize(x, 1).requires_grad());
}

// Create in one mode, go on in others: 5 steps, each inside or outside inference mode, or without gradients.
TEST(C20_Gradients, EveryMixOfModesGivesTheSameState) {
  const CacheOptions o = case_options(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 120, 16}, 1), v = randn({2, 2, 120, 16}, 2), q = randn({2, 4, 3, 16}, 3);
  const auto step = [&](KVCache& cache, int which) {
    if (which == 0) append_range(cache, k, v, 0, 70);
    if (which == 1) cache.truncate(50);
    if (which == 2) cache.reorder(longs({1, 0}));
    if (which == 3) cache.forward(q, k.narrow(2, 50, 3), v.narrow(2, 50, 3));
    if (which == 4) append_range(cache, k, v, 53, 120);
  };
  KVCache plain(o);
  for (int i = 0; i < 5; i++) step(plain, i);
  const at::Tensor want = plain.attend(q);
  for (int mix = 0; mix < 243; mix += 2) {
    KVCache cache(o);
    for (int i = 0, rest = mix; i < 5; i++, rest /= 3) {
      const c10::InferenceMode inference(rest % 3 == 1);
      const at::AutoGradMode gradients(rest % 3 == 0);
      step(cache, i);
    }
    ASSERT_TRUE(same_state(cache.state(), plain.state())) << mix;
    ASSERT_TRUE(same_bits(cache.attend(q), want)) << mix;
  }
}

TEST(C20_Gradients, NoneIsLostInSilenceAndNoGraphIsKept) {
  const CacheOptions o = case_options(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 40, 16}, 4), v = randn({1, 2, 40, 16}, 5), q = randn({1, 4, 40, 16}, 6);
  const at::Tensor kg = k.clone().requires_grad_(), vg = v.clone().requires_grad_(), qg = q.clone().requires_grad_();
  KVCache plain(o), graph(o);
  plain.append(k, v), graph.append(kg, vg);
  // Each of the three alone, in a step and in a read.
  for (const auto& [a, b, c] : {std::tuple{qg, k, v}, {q, kg, v}, {q, k, vg}, {qg, kg, vg}}) {
    const at::Tensor want = plain.forward(q, k, v), out = graph.forward(a, b, c);
    EXPECT_TRUE(same_bits(out, want));
    expect_error([&, t = out] { t.sum().backward(); }, {"kivi::cache_attention"});
  }
  expect_error([&] { graph.attend(qg).sum().backward(); }, {"kivi::cache_attention"});
  EXPECT_FALSE(graph.attend(q).requires_grad());
  for (int i = 0; i < 100; i++) graph.append(kg.narrow(2, i % 40, 1) * 2, vg.narrow(2, i % 40, 1));
  const auto [kd, vd] = graph.dequantize();
  EXPECT_FALSE(kd.requires_grad() || vd.requires_grad());
  const KVCache::State stored = graph.state();
  for (const at::Tensor& t : std::get<2>(stored)) EXPECT_FALSE(t.requires_grad() || t.grad_fn());
  EXPECT_EQ(kg.use_count(), 1u) << "a graph still holds the input";
  EXPECT_FALSE(qg.grad().defined() || kg.grad().defined() || vg.grad().defined());
}

// ---------------------------------------------------------------------------------------------- C21

TEST(C21_Dtypes, OfTheQuantiser) {
  for (const auto type : {at::kDouble, at::kChar, at::kByte, at::kLong, at::kBool, at::kComplexFloat}) {
    expect_error([=] { quantize(at::ones({32}).to(type), 0); }, {"x", "float32", toString(type)});
    expect_error([=] { fake_quantize(at::ones({32}).to(type), 0); }, {"x", "float32", toString(type)});
  }
  const at::Tensor x = randn({6, 50}, 33);
  const auto [codes, scale, zero] = quantize(x, 1, 2, 16);
  const auto back = [](const at::Tensor& c, const at::Tensor& s, const at::Tensor& z) {
    return [=] { dequantize(c, s, z, 1, 2, 16, 50); };
  };
  expect_error(back(codes.to(at::kLong), scale, zero), {"codes", "Byte", "Long"});
  expect_error(back(codes.to(at::kChar), scale, zero), {"codes", "Byte", "Char"});
  expect_error(back(codes, scale.to(at::kHalf), zero), {"scale", "Float", "Half"});
  expect_error(back(codes, scale, zero.to(at::kDouble)), {"zero", "Float", "Double"});
  expect_error(back(codes.to(at::kMeta), scale, zero), {"scale", "meta", "cpu"});
  expect_error(back(codes, scale.to(at::kMeta), zero), {"scale", "meta", "cpu"});
  expect_error(back(codes, scale, zero.to(at::kMeta)), {"zero", "meta", "cpu"});
  const Quantized want = quantized(x, 1, 2, 16);
  for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16}) {
    const DefaultDtype guard(type);
    expect_same(quantized(x, 1, 2, 16), want, "another default");
  }
  // Autocast does not touch an operator that computes in fp32 whatever comes in.
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  expect_same(quantized(x, 1, 2, 16), want, "autocast");
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST(C21_Dtypes, OfTheCacheAreThoseOfItsFirstTokens) {
  const CacheOptions o = case_options(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 60, 16}, 11), q = randn({1, 4, 2, 16}, 12);
  for (const auto type : kTypes) {
    KVCache cache(o);
    cache.append(k.to(type), k.to(type));
    const auto before = cache.state();
    for (const auto other :
         {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kChar, at::kBool, at::kComplexFloat}) {
      if (other == type) continue;
      const std::string name = toString(other);
      expect_error([&] { cache.append(k.to(other), k.to(other)); }, {"k", name});
      expect_error([&] { cache.append(k.to(type), k.to(other)); }, {"v", name});
      expect_error([&] { cache.forward(k.to(other), k.to(other), k.to(other)); }, {});
      if (std::find(kTypes.begin(), kTypes.end(), other) != kTypes.end()) {
        EXPECT_EQ(cache.attend(q.to(other)).scalar_type(), other);
      } else {
        expect_error([&] { cache.attend(q.to(other)); }, {"q", name});
      }
    }
    for (const at::Tensor& t : {k.to(type).to(at::kMeta), k.narrow(1, 0, 1), k.narrow(3, 0, 8)}) {
      expect_error([&] { cache.append(t, k.to(type)); }, {"k"});
      expect_error([&] { cache.append(k.to(type), t); }, {"v"});
    }
    expect_error([&] { cache.append(k.to(type), k.narrow(2, 1, 59).to(type)); }, {"v", "59", "60"});
    expect_error([&] { cache.attend(randn({2, 4, 1, 16}, 1)); }, {"q", "batch size 2", "1"});
    expect_error([&] { cache.attend(q.to(at::kMeta)); }, {"q", "meta"});
    EXPECT_TRUE(same_state(cache.state(), before)) << "an error changed the cache";
  }
}

TEST(C21_Dtypes, TheDefaultDtypeDecidesNothing) {
  const CacheOptions o = case_options(2, 16, 16, 5, 4, 3, 2);
  const at::Tensor k = randn({2, 2, 90, 16}, 13), q = randn({2, 4, 2, 16}, 14);
  const auto everything = [&] {
    KVCache cache(o);
    std::vector<at::Tensor> all = {cache.lengths(), cache.quantized_lengths(), std::get<0>(cache.dequantize()),
                                   cache.attend(q)};
    cache.append(k, k * 1e5, longs({90, 33}));  // widens the scales
    AttentionOptions with;
    with.sinks = at::zeros({4}, at::kFloat);
    with.attn_mask = at::ones({1}, at::kBool);
    all.push_back(cache.forward(q, k.narrow(2, 0, 2), k.narrow(2, 0, 2), with));
    cache.repeat_interleave(2);
    cache.truncate(40);
    all.push_back(std::get<1>(cache.attend_with_lse(q.repeat_interleave(2, 0))));
    all.push_back(std::get<1>(cache.dequantize()));
    const auto loaded = KVCache::from_state(cache.state());
    const KVCache::State state = loaded->state();
    for (const at::Tensor& t : std::get<2>(state)) all.push_back(t);
    return all;
  };
  const std::vector<at::Tensor> want = everything();
  for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16}) {
    const DefaultDtype guard(type);
    const std::vector<at::Tensor> got = everything();
    for (size_t i = 0; i < want.size(); i++)
      EXPECT_TRUE(same_bits(got[i], want[i])) << "tensor " << i << ", default " << type;
  }
}

// As for scaled_dot_product_attention: what is new takes autocast's dtype, what a cache holds keeps its own.
TEST(C21_Dtypes, AutocastIsACast) {
  const at::Tensor q = randn({1, 4, 40, 16}, 15), k = randn({1, 2, 40, 16}, 16), v = randn({1, 2, 40, 16}, 17);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const CacheOptions o = case_options(2, 16, 16, 5);
    KVCache automatic(o), by_hand(o);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, type);
    const at::Tensor first = automatic.forward(q, k, v), second = automatic.forward(q, k.to(at::kHalf), v);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_TRUE(same_bits(first, by_hand.forward(q.to(type), k.to(type), v.to(type))));
    EXPECT_TRUE(same_bits(second, by_hand.forward(q.to(type), k.to(at::kHalf).to(type), v.to(type))));
    EXPECT_TRUE(same_state(automatic.state(), by_hand.state()));
  }
}

// ---------------------------------------------------------------------------------------------- C22

torch::jit::Module module_of(const KVCache& cache) {
  torch::jit::Module m("Layer");
  m.register_attribute("cache", torch::getCustomClass("__torch__.torch.classes.kivi.KVCache"),
                       c10::IValue(cache.clone()));
  return m;
}

TEST(C22_SaveAndLoad, EveryPairOfWidthsAtTheLengthsOfTheCase) {
  for (const int64_t k_bits : kAllBits) {
    for (const int64_t v_bits : kAllBits) {
      const CacheOptions o = case_options(2, 16, 16, 8, k_bits < v_bits ? 3 : 0, k_bits, v_bits);
      for (const int64_t n : {0, 1, 7, 8, 9, 23, 24, 37, 170}) {
        const at::Tensor k = randn({2, 2, n + 30, 16}, 22), v = randn({2, 2, n + 30, 16}, 23);
        KVCache cache(o);
        append_range(cache, k, v, 0, n);
        if (n == 37) cache.reorder(longs({1, 0})), cache.truncate(33);
        std::stringstream file;
        module_of(cache).save(file);
        const auto state = cache.state();
        int64_t bytes = 0;
        for (const at::Tensor& t : std::get<2>(state)) bytes += static_cast<int64_t>(t.nbytes());
        EXPECT_LT(static_cast<int64_t>(file.str().size()), bytes + 8192) << n;
        const auto loaded = torch::jit::load(file, at::kCPU).attr("cache").toCustomClass<KVCache>();
        ASSERT_EQ(loaded->length(), cache.length());
        ASSERT_TRUE(same_bits(std::get<0>(loaded->dequantize()), std::get<0>(cache.dequantize()))) << n;
        ASSERT_TRUE(same_bits(std::get<1>(loaded->dequantize()), std::get<1>(cache.dequantize()))) << n;
        for (int64_t t = n; t < n + 30; t += 3) {
          append_range(cache, k, v, t, t + 3);
          append_range(*loaded, k, v, t, t + 3);
        }
        ASSERT_TRUE(same_state(loaded->state(), cache.state())) << k_bits << " " << v_bits << " " << n;
      }
    }
  }
}

// Widths are told apart by the size of the records: another one for each at groups of 32 tokens and 64 channels.
TEST(C22_SaveAndLoad, ATamperedStateIsRefused) {
  KVCache cache(case_options(2, 64, 32, 8, 4, 3, 2));
  cache.append(randn({1, 2, 80, 64}, 24), randn({1, 2, 80, 64}, 25));
  const auto good = cache.state();
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    SCOPED_TRACE(::testing::PrintToString(words));
    auto bad = good;
    change(std::get<1>(bad), std::get<2>(bad));
    expect_error([&] { KVCache::from_state(bad); }, words);
  };
  // Integers: version, precision, batch, scale type in use, checksum, size of the format, then the format: version,
  // heads, D, Dv, K bits, V bits, G.
  refused([](auto& ints, auto&) { ints[0] = 99; }, {"version", "99"});
  refused([](auto& ints, auto&) { ints[6] = 99; }, {"version", "99"});
  for (const int64_t bits : {1, 2, 4, 8}) refused([=](auto& ints, auto&) { ints[10] = bits; }, {"records"});
  refused([](auto& ints, auto&) { ints[10] = 5; }, {"k_bits", "5"});
  for (const int64_t bits : {1, 3, 4, 8}) refused([=](auto& ints, auto&) { ints[11] = bits; }, {"records"});
  refused([](auto& ints, auto&) { ints[12] = 128; }, {"quantised length 64"});
  refused([](auto& ints, auto&) { ints[3] = 32; }, {"scale type", "32", "16"});
  refused([](auto&, auto& t) { t[0] = t[0].narrow(1, 0, t[0].size(1) - 64); }, {"records"});
  refused([](auto&, auto& t) { t[2] = t[2].narrow(1, 0, 1); }, {"exact_k"});
  refused([](auto&, auto& t) { t[3] = t[3].to(at::kHalf); }, {"exact_v", "Float", "Half"});
  refused([](auto&, auto& t) { t.pop_back(); }, {"tensors", "3", "4"});
}

// At 16 tokens or 16 channels 1 and 2 bits, and 3 and 4 bits, fill words of the same size: only the checksum can tell.
TEST(C22_SaveAndLoad, AWidthThatFillsTheSameWordsIsRefused) {
  for (const auto& [bits, other] : {std::pair<int64_t, int64_t>{1, 2}, {2, 1}, {3, 4}, {4, 3}}) {
    KVCache cache(case_options(2, 16, 16, 8, 4, bits, bits));
    cache.append(randn({1, 2, 75, 16}, 26), randn({1, 2, 75, 16}, 27));
    for (const size_t field : {size_t{10}, size_t{11}}) {
      auto state = cache.state();
      ASSERT_EQ(std::get<1>(state)[field], bits);
      std::get<1>(state)[field] = other;
      expect_error([&] { KVCache::from_state(state); }, {"checksum"});
    }
  }
}

// ---------------------------------------------------------------------------------------------- C23

TEST(C23_Outputs, OfTheQuantiser) {
  std::mt19937 rng(34);
  for (int i = 0; i < 50; i++) {
    std::vector<int64_t> sizes;
    for (uint32_t d = 1 + rng() % 4; d > 0; d--) sizes.push_back(static_cast<int64_t>(rng() % 20));
    at::Tensor x = randn(sizes, rng(), kTypes[rng() % 3]);
    if (rng() % 2 == 0) x = x.transpose(0, -1);
    const int64_t axis = static_cast<int64_t>(rng() % sizes.size()), bits = kAllBits[rng() % 5];
    const auto group = static_cast<int64_t>(1 + rng() % 40);
    const at::Tensor copy = x.clone();
    const Quantized on_cpu = quantized(x, axis, bits, group), on_meta = quantized(x.to(at::kMeta), axis, bits, group);
    const std::vector<at::Tensor> all = {x, on_cpu.codes, on_cpu.scale, on_cpu.zero, on_cpu.back, on_cpu.fake};
    const std::vector<at::Tensor> meta = {x, on_meta.codes, on_meta.scale, on_meta.zero, on_meta.back, on_meta.fake};
    for (size_t a = 1; a < all.size(); a++) {
      for (size_t b = 0; b < a; b++) EXPECT_FALSE(all[a].is_alias_of(all[b])) << a << " and " << b;
      EXPECT_TRUE(meta[a].is_meta());
      EXPECT_EQ(meta[a].scalar_type(), all[a].scalar_type());
      EXPECT_EQ(meta[a].sizes(), all[a].sizes());
      EXPECT_EQ(meta[a].strides(), all[a].strides());
    }
    EXPECT_TRUE(same_bits(x, copy));
  }
  // Codes that are their own values: 8 bits, scale 1, zero 0.
  const at::Tensor codes = at::arange(16, at::kByte), one = at::ones({1}), none = at::zeros({1});
  const at::Tensor back = dequantize(codes, one, none, 0, 8, 16, 16);
  for (const at::Tensor& t : {codes, one, none}) EXPECT_FALSE(back.is_alias_of(t));
}

// The passes that delete and merge: both appends and both truncations stay in order, equal quantisations become one.
TEST(C23_Optimiser, KeepsCallsThatChangeTheirArguments) {
  const auto count = [](const torch::jit::Graph& graph, const char* kind) {
    int64_t n = 0;
    for (const torch::jit::Node* node : graph.nodes()) n += node->kind() == c10::Symbol::fromQualString(kind);
    return n;
  };
  const auto append = std::make_shared<torch::jit::Graph>();
  std::vector<torch::jit::NamedValue> held;
  for (const char* name : {"pool", "table", "lengths", "quantized", "sk", "sv", "wk", "wv"}) {
    held.emplace_back(append->addInput(name));
  }
  torch::jit::Value *const k_in = append->addInput("k"), *const v_in = append->addInput("v");
  torch::jit::Value* const format_in = append->addInput("format")->setType(c10::ListType::ofInts());
  const auto call = [&](const char* name, const std::vector<torch::jit::NamedValue>& rest) {
    std::vector<torch::jit::NamedValue> all = held;
    all.insert(all.end(), rest.begin(), rest.end());
    append->insert(c10::Symbol::fromQualString(name), all);
  };
  call("kivi::cache_append", {k_in, v_in, format_in});
  call("kivi::cache_append", {k_in, v_in, format_in});
  call("kivi::cache_truncate", {format_in, 1});
  call("kivi::cache_append", {k_in, v_in, format_in});
  append->registerOutput(held[2].value(*append));
  torch::jit::EliminateCommonSubexpression(append);
  torch::jit::EliminateDeadCode(append);
  EXPECT_EQ(count(*append, "kivi::cache_append"), 3);
  EXPECT_EQ(count(*append, "kivi::cache_truncate"), 1);
  const auto pure = std::make_shared<torch::jit::Graph>();
  torch::jit::parseIR(R"(graph(%x : Tensor):
  %axis : int = prim::Constant[value=1]()
  %bits : int = prim::Constant[value=2]()
  %group : int = prim::Constant[value=32]()
  %a : Tensor = kivi::fake_quantize(%x, %axis, %bits, %group)
  %b : Tensor = kivi::fake_quantize(%x, %axis, %bits, %group)
  %unused : Tensor = kivi::fake_quantize(%x, %bits, %bits, %group)
  %product : Tensor = aten::mul(%a, %b)
  return (%product)
)",
                      pure.get());
  torch::jit::EliminateCommonSubexpression(pure);
  torch::jit::EliminateDeadCode(pure);
  EXPECT_EQ(count(*pure, "kivi::fake_quantize"), 1) << *pure;
  // Run often enough for the profiling executor to rewrite it.
  torch::jit::GraphFunction function("appends", append, nullptr);
  const auto format = cache_format(2, 16, std::nullopt, 2, 2, 16, 8, 4);
  const CacheTensors t = make_tensors(format, 1, 2);
  const at::Tensor k = randn({1, 2, 6, 16}, 21);
  for (int i = 0; i < 4; i++) {
    std::vector<c10::IValue> arguments;
    for (const at::Tensor& part : list(t)) arguments.emplace_back(part);
    arguments.emplace_back(k), arguments.emplace_back(k), arguments.emplace_back(format);
    EXPECT_EQ(function(arguments).toTensor().item<int64_t>(), 7);
  }
}

// What a cache gives out is not what it holds, and not what it was given.
TEST(C23_Outputs, OfTheCacheShareNothing) {
  for (const int64_t n : {0, 1, 4, 60}) {  // nothing, the sink, the window, pages
    for (const auto type : kTypes) {
      KVCache cache(case_options(1, 16, 16, 5, 2, 8, 8));
      const at::Tensor k = randn({1, 1, n, 16}, 22, type), v = randn({1, 1, n, 16}, 23, type), q = k.clone();
      const at::Tensor kept_k = k.clone(), kept_v = v.clone();
      const at::Tensor out = cache.forward(q, k, v);
      const auto [kd, vd] = cache.dequantize();
      const at::Tensor lengths = cache.lengths(), read = cache.attend(q), quantised = cache.quantized_lengths();
      const KVCache::State before = cache.state();
      std::vector<at::Tensor> given = {out, kd, vd, lengths, read, quantised};
      const KVCache::State state = cache.state();
      for (const at::Tensor& t : std::get<2>(state)) given.push_back(t);
      for (size_t i = 0; i < given.size(); i++) {
        for (const at::Tensor& input : {q, k, v})
          EXPECT_FALSE(given[i].is_alias_of(input)) << i << ", " << n << " tokens";
        for (size_t j = 0; j < i; j++) EXPECT_FALSE(given[i].is_alias_of(given[j])) << i << " and " << j;
      }
      EXPECT_TRUE(same_bits(k, kept_k) && same_bits(v, kept_v) && same_bits(q, kept_k));
      for (const at::Tensor& t : given) t.zero_();
      for (const at::Tensor& t : {q, k, v}) t.zero_();
      EXPECT_TRUE(same_state(cache.state(), before)) << "writing to an output or an input changed the cache";
    }
  }
}

// ---------------------------------------------------------------------------------------------- C24

// A second copy of the library, and the first one by another path: no abort, and everything works on.
TEST(C24_Registration, ASecondLibraryDoesNoHarm) {
  namespace fs = std::filesystem;
  const fs::path library = KIVI_TEST_LIBRARY,
                 folder = fs::temp_directory_path() / ("kivi_case_" + std::to_string(getpid()));
  fs::create_directories(folder);
  fs::create_symlink(library, folder / "libkivi_link.so");
  fs::copy_file(library, folder / "libkivi_copy.so");
  const at::Tensor x = randn({4, 64}, 31), want = fake_quantize(x, 1);
  for (const char* name : {"libkivi_link.so", "libkivi_copy.so"}) {
    for (int i = 0; i < 2; i++) {
      EXPECT_NE(dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
      EXPECT_TRUE(same_bits(fake_quantize(x, 1), want)) << name;
      KVCache cache(case_options(2, 16, 16, 0));
      cache.append(randn({1, 2, 40, 16}, 32), randn({1, 2, 40, 16}, 33));
      EXPECT_EQ(KVCache::from_state(cache.state())->quantized_length(), 32);
    }
  }
  // The copy warns when it is loaded. Its own class is another than the one that is registered, perhaps of another
  // version, and says so.
  void* const copy = dlopen((folder / "libkivi_copy.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  using Constructor = void (*)(void*, const CacheOptions&);
  const auto construct = reinterpret_cast<Constructor>(dlsym(copy, "_ZN4kivi7KVCacheC1ERKNS_12CacheOptionsE"));
  ASSERT_NE(construct, nullptr);
  alignas(KVCache) char place[sizeof(KVCache)] = {};
  expect_error([&] { construct(place, case_options(2, 16, 16, 0)); }, {"second copy of libkivi"});
  fs::remove_all(folder);
}

// ---------------------------------------------------------------------------------------------- C25

TEST(C25_Threads, OfTheQuantiser) {
  const at::Tensor x = randn({12, 1000, 7}, 35);
  for (const int64_t axis : {1, 2}) {
    std::optional<Quantized> want;
    for (const int count : {1, 2, 3, 8}) {
      const Threads guard(count);
      const Quantized got = quantized(x, axis, 3, 32);
      if (!want) want = got;
      expect_same(got, *want, std::to_string(count) + " threads");
    }
    std::vector<Quantized> inside(6);
    const Threads guard(3);
    at::parallel_for(0, 6, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) inside[static_cast<size_t>(i)] = quantized(x, axis, 3, 32);
    });
    for (const Quantized& r : inside) expect_same(r, *want, "inside a parallel region");
    Quantized fresh;
    std::thread([&] {
      const c10::InferenceMode mode;
      fresh = quantized(x, axis, 3, 32);
    }).join();
    expect_same(fresh, *want, "on a fresh thread in inference mode");
  }
  const Threads guard(4);
  expect_error([&] { at::parallel_for(0, 8, 1, [&](int64_t begin, int64_t) { quantize(x, 1, begin == 0 ? 2 : 5); }); },
               {"bits", "5"});
}

TEST(C25_Threads, EachItsOwnCacheEqualsSerial) {
  const auto steps = [](uint64_t seed) {
    KVCache cache(
        case_options(2, 16, seed % 2 == 0 ? 16 : 32, static_cast<int64_t>(seed) * 3, 4, kAllBits[seed % 5], 2));
    at::Tensor sum = at::zeros({1, 4, 1, 16});
    for (uint64_t i = 0; i < 200; i++) {
      const at::Tensor x = randn({1, 2, 1, 16}, seed * 1000 + i);
      sum += cache.forward(randn({1, 4, 1, 16}, i), x, x);
      if (i % 50 == 49) cache.truncate(cache.length() - 7);
    }
    return std::pair(sum, cache.state());
  };
  std::vector<std::pair<at::Tensor, KVCache::State>> got(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 8; i++) {
    threads.emplace_back([&, i] {
      const c10::InferenceMode mode(i % 2 == 0);
      got[i] = steps(i);
    });
  }
  for (std::thread& t : threads) t.join();
  for (size_t i = 0; i < 8; i++) {
    const auto [sum, state] = steps(i);
    EXPECT_TRUE(same_bits(got[i].first, sum)) << i;
    EXPECT_TRUE(same_state(got[i].second, state)) << i;
  }
}

// A bad call inside a parallel region reaches the caller and leaves the caches as they were.
TEST(C25_Threads, ErrorsLeaveAParallelRegion) {
  const Threads guard(4);
  std::vector<std::unique_ptr<KVCache>> caches;
  const at::Tensor x = randn({1, 2, 40, 16}, 41);
  for (int i = 0; i < 8; i++) caches.push_back(std::make_unique<KVCache>(case_options(2, 16, 16, 0)));
  for (auto& cache : caches) cache->append(x, x);
  const auto before = caches[0]->state();
  expect_error(
      [&] {
        at::parallel_for(0, 8, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) caches[static_cast<size_t>(i)]->append(x, x.narrow(3, 0, 8));
        });
      },
      {"v", "8", "16"});
  for (auto& cache : caches) EXPECT_TRUE(same_state(cache->state(), before));
}

}  // namespace
}  // namespace kivi::test
