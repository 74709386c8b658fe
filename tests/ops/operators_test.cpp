// The operators by hand against the class, and tests over the registry, which a new operator passes without being named
// here: every operator has its kernels, what a call changes is what its schema says, and backward is refused by name.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <random>

#include "tests/ops/small_cache.h"

namespace kivi::test {
namespace {

// The operators by hand do what the class does.
TEST(Operators, EqualTheClass) {
  const auto format = op_format();
  KVCache cache(cache_options());
  CacheTensors t = make_tensors(format, kBatch, 3);
  std::mt19937 rng(4);
  for (int step = 0; step < 40; step++) {
    const int64_t width = 1 + static_cast<int64_t>(rng() % 12);
    const at::Tensor k = randn({kBatch, kHeads, width, kDim}, rng()),
                     v = randn({kBatch, kHeads, width, kValueDim}, rng());
    const at::Tensor q = randn({kBatch, 4, width, kDim}, rng());
    const at::Tensor counts = longs({width, static_cast<int64_t>(rng() % static_cast<uint64_t>(width + 1))});
    const auto [out, lse] = cache_attention(q, t, format, k, v, counts);
    EXPECT_TRUE(same_bits(out, cache.forward(q, k, v, {}, counts)));
    cache_append(t, k, v, format, counts);
    if (step % 7 == 6) {
      const int64_t n = cache.length() - static_cast<int64_t>(rng() % 20);
      cache.truncate(std::max<int64_t>(n, 0));
      cache_truncate(t, format, std::max<int64_t>(n, 0));
    }
    const auto [kd, vd] = cache_dequantize(t, format, cache.length());
    ASSERT_TRUE(same_bits(kd, std::get<0>(cache.dequantize()))) << step;
    ASSERT_TRUE(same_bits(vd, std::get<1>(cache.dequantize()))) << step;
    ASSERT_TRUE(same_bits(t.lengths, cache.lengths()));
  }
  // cache_dequantize takes any length: fewer tokens, or zeros behind.
  const auto [shorter, v1] = cache_dequantize(t, format, 10);
  EXPECT_TRUE(same_bits(shorter, std::get<0>(cache.dequantize()).narrow(2, 0, 10)));
  const auto [longer, v2] = cache_dequantize(t, format, cache.length() + 5);
  EXPECT_EQ(longer.narrow(2, cache.length(), 5).abs().max().item<double>(), 0.0);
}

TEST(Operators, WidenKeepsEveryValue) {
  for (int64_t bits : kAllBits) {
    const auto narrow = cache_format(kHeads, kDim, kValueDim, bits, 2, 16, 8, 4);
    auto wide = narrow;
    wide[9] = 48;
    CacheTensors t = make_tensors(narrow, kBatch, 2);
    cache_append(t, randn({kBatch, kHeads, 200, kDim}, 18), randn({kBatch, kHeads, 200, kValueDim}, 19), narrow);
    const auto [k, v] = cache_dequantize(t, narrow, 200);
    const at::Tensor pool = cache_widen(t.pool, narrow);
    EXPECT_FALSE(pool.is_alias_of(t.pool));
    EXPECT_EQ(pool.size(1), cache_page_bytes(wide));
    t.pool = pool;
    const auto [kw, vw] = cache_dequantize(t, wide, 200);
    EXPECT_TRUE(same_bits(kw, k)) << bits;
    EXPECT_TRUE(same_bits(vw, v)) << bits;
  }
}

// ---------------------------------------------------------------------------------------------- the registry

std::vector<c10::OperatorHandle> kivi_operators() {
  std::vector<c10::OperatorHandle> all;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("kivi::", 0) == 0) all.push_back(c10::Dispatcher::singleton().findSchema(name).value());
  }
  return all;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& a : schema.arguments()) {
    if (a.type()->isSubtypeOf(*c10::TensorType::get()) || a.type()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
      return true;
    }
  }
  return false;
}

TEST(Registry, EveryOperatorHasItsKernels) {
  int count = 0;
  for (const c10::OperatorHandle& op : kivi_operators()) {
    SCOPED_TRACE(op.operator_name().name);
    EXPECT_TRUE(op.hasSchema());
    if (!takes_tensors(op.schema())) {
      EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
      continue;
    }
    count++;
    EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::CPU));
    EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::Meta));
    EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::Autograd));
    EXPECT_FALSE(op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
    // A tensor that is written is not returned.
    for (const c10::Argument& r : op.schema().returns()) EXPECT_EQ(r.alias_info(), nullptr);
    for (const c10::Argument& a : op.schema().arguments()) EXPECT_FALSE(a.name().empty());
  }
  EXPECT_GE(count, 9);
}

// Arguments of a call by name.
using Arguments = std::map<std::string, c10::IValue>;

// For each operator that takes tensors: calls that together write every argument that it may write. A new operator
// needs an entry.
std::map<std::string, std::vector<Arguments>> sample_calls() {
  const auto format = op_format();
  const auto cache_arguments = [&](const CacheTensors& t) {
    Arguments a;
    for (size_t i = 0; i < kParts.size(); i++) a[kParts[i]] = list(t)[i];
    a["format"] = format;
    return a;
  };
  const auto with = [](Arguments a, const Arguments& more) {
    for (const auto& [name, value] : more) a[name] = value;
    return a;
  };
  const at::Tensor x = randn({4, 40}, 20);
  const auto [codes, scale, zero] = quantize(x, 1, 3, 16);
  const at::Tensor k = randn({kBatch, kHeads, 100, kDim}, 21), v = randn({kBatch, kHeads, 100, kValueDim}, 22);
  const at::Tensor overflow = at::zeros({1}, at::kInt), q = randn({kBatch, 4, 5, kDim}, 23);
  const Arguments cache = cache_arguments(filled());
  CacheTensors empty = make_tensors(format, kBatch, 2);
  return {
      {"kivi::quantize", {{{"x", x}, {"axis", 1}}}},
      {"kivi::fake_quantize", {{{"x", x}, {"axis", 0}}}},
      {"kivi::dequantize",
       {{{"codes", codes},
         {"scale", scale},
         {"zero", zero},
         {"axis", 1},
         {"bits", 3},
         {"group_size", 16},
         {"size", 40}}}},
      {"kivi::cache_append",
       {with(cache_arguments(empty), {{"k", k}, {"v", v}, {"new_lengths", longs({100, 70})}}),
        with(cache_arguments(filled()), {{"k", k * 1e7}, {"v", v}, {"overflow", overflow}})}},
      {"kivi::cache_attention",
       {with(cache, {{"q", q}}), with(cache, {{"q", q},
                                              {"new_k", k.narrow(2, 0, 5).contiguous()},
                                              {"new_v", v.narrow(2, 0, 5).contiguous()},
                                              {"new_lengths", longs({5, 2})},
                                              {"attn_mask", randn({kBatch, 4, 5, kTokens + 5}, 24)},
                                              {"sinks", at::zeros({4})},
                                              {"alibi_slopes", at::ones({4})}})}},
      {"kivi::cache_dequantize", {with(cache, {{"length", kTokens}})}},
      {"kivi::cache_truncate", {with(cache_arguments(filled()), {{"length", 30}})}},
      {"kivi::cache_copy_pages", {{{"pool", filled().pool}, {"source", longs({0})}, {"target", longs({2})}}}},
      {"kivi::cache_widen", {{{"pool", filled().pool}, {"format", format}}}},
  };
}

TEST(Registry, ACallChangesExactlyWhatItsSchemaSays) {
  const auto samples = sample_calls();
  for (const c10::OperatorHandle& op : kivi_operators()) {
    const c10::FunctionSchema& schema = op.schema();
    if (!takes_tensors(schema)) continue;
    const std::string name = op.operator_name().name;
    SCOPED_TRACE(name);
    ASSERT_EQ(samples.count(name), 1u) << "sample_calls has no call of this operator";
    std::map<std::string, bool> written;
    for (const Arguments& given : samples.at(name)) {
      std::vector<c10::IValue> stack;
      std::vector<std::pair<std::string, std::pair<at::Tensor, at::Tensor>>> tensors;
      for (const c10::Argument& a : schema.arguments()) {
        const auto found = given.find(a.name());
        if (found == given.end()) {
          ASSERT_TRUE(a.default_value()) << a.name();
          stack.push_back(*a.default_value());
          continue;
        }
        stack.push_back(found->second);
        if (found->second.isTensor()) {
          const at::Tensor t = found->second.toTensor();
          tensors.push_back({a.name(), {t, t.clone()}});
        }
      }
      op.callBoxed(stack);
      for (const auto& [argument, pair] : tensors) {
        if (!same_bits(pair.first, pair.second)) written[argument] = true;
        for (const c10::IValue& result : stack) {
          EXPECT_FALSE(result.toTensor().is_alias_of(pair.first)) << "a result shares storage with " << argument;
        }
      }
    }
    for (const c10::Argument& a : schema.arguments()) {
      const bool says = a.alias_info() != nullptr && a.alias_info()->isWrite();
      EXPECT_EQ(written.count(a.name()) == 1, says) << a.name();
    }
  }
}

// A negated view stands for its values where it is read, and is refused by name where it would be written to: there
// torch's own fallback reads a result that these operators do not have.
TEST(Registry, NegatedViews) {
  const auto samples = sample_calls();
  int refused = 0;
  for (const c10::OperatorHandle& op : kivi_operators()) {
    const c10::FunctionSchema& schema = op.schema();
    if (!takes_tensors(schema)) continue;
    for (const Arguments& given : samples.at(op.operator_name().name)) {
      // The stack of the call, with copies; argument `negated` as a negated view.
      const auto stack_with = [&](const std::string& negated) {
        std::vector<c10::IValue> stack;
        for (const c10::Argument& a : schema.arguments()) {
          const auto found = given.find(a.name());
          c10::IValue value = found == given.end() ? *a.default_value() : found->second;
          if (value.isTensor()) {
            const at::Tensor t = value.toTensor();
            value = a.name() == negated ? at::_neg_view(t.neg()) : t.clone();
          }
          stack.push_back(value);
        }
        return stack;
      };
      const auto tensors_of = [](const std::vector<c10::IValue>& stack) {
        std::vector<at::Tensor> tensors;
        for (const c10::IValue& value : stack) tensors.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
        return tensors;
      };
      std::vector<c10::IValue> plain = stack_with("");
      const std::vector<at::Tensor> arguments = tensors_of(plain);
      op.callBoxed(plain);
      for (size_t i = 0; i < arguments.size(); i++) {
        const c10::Argument& a = schema.arguments()[i];
        if (!arguments[i].defined()) continue;
        SCOPED_TRACE(op.operator_name().name + " with " + a.name());
        std::vector<c10::IValue> stack = stack_with(a.name());
        const std::vector<at::Tensor> now = tensors_of(stack);
        std::vector<at::Tensor> before;
        for (const at::Tensor& t : now) before.push_back(t.defined() ? t.resolve_neg().clone() : t);
        const bool is_written = a.alias_info() != nullptr && a.alias_info()->isWrite();
        if (is_written) {
          refused++;
          expect_error([&] { op.callBoxed(stack); }, {op.operator_name().name, a.name(), "negated"});
        } else {
          op.callBoxed(stack);
          ASSERT_EQ(stack.size(), plain.size());
          for (size_t r = 0; r < stack.size(); r++) EXPECT_TRUE(same_bits(stack[r].toTensor(), plain[r].toTensor()));
        }
        for (size_t j = 0; j < now.size(); j++) {
          if (!now[j].defined()) continue;
          EXPECT_TRUE(same_bits(now[j].resolve_neg(), j == i || is_written ? before[j] : arguments[j]))
              << schema.arguments()[j].name();
        }
      }
    }
  }
  EXPECT_EQ(refused, 7 + 8 + 4 + 1);  // cache_append twice, once with overflow; cache_truncate; cache_copy_pages
}

// C20 a: whichever tensor requires a gradient, backward raises and names the operator, and the values stay the same.
TEST(Registry, BackwardOfEveryOperatorRaisesAndNamesIt) {
  const auto samples = sample_calls();
  for (const c10::OperatorHandle& op : kivi_operators()) {
    const c10::FunctionSchema& schema = op.schema();
    if (!takes_tensors(schema)) continue;
    const std::string name = op.operator_name().name;
    SCOPED_TRACE(name);
    for (const c10::Argument& argument : schema.arguments()) {
      for (const Arguments& given : samples.at(name)) {
        const auto found = given.find(argument.name());
        if (found == given.end() || !found->second.isTensor() || !found->second.toTensor().is_floating_point())
          continue;
        if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) continue;  // buffers are no leaves
        SCOPED_TRACE(argument.name());
        std::vector<c10::IValue> stack;
        for (const c10::Argument& a : schema.arguments()) {
          const auto value = given.find(a.name());
          stack.push_back(value == given.end() ? *a.default_value() : value->second);
          if (a.name() == argument.name()) stack.back() = value->second.toTensor().clone().requires_grad_();
        }
        op.callBoxed(stack);
        for (const c10::IValue& result : stack) {
          const at::Tensor t = result.toTensor();
          if (!t.is_floating_point()) continue;
          ASSERT_TRUE(t.requires_grad());
          expect_error([&] { t.sum().backward(); }, {name});
        }
        for (const auto& [other, value] : given) {
          if (value.isTensor()) EXPECT_FALSE(value.toTensor().requires_grad()) << other;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kivi::test
