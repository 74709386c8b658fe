// Caches of every recipe against recipe_reference.h: what they hold, and what attention over them gives, at once and
// token by token. Kernel and reference round sums differently, so that a number which lies between two codes may get
// either one; a group then differs, and all else is equal.
#include "tests/ops/recipe_reference.h"

#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "tests/ops/attention_reference.h"

namespace kivi::test {
namespace {

using reference::Recipe;
using reference::Stored;

constexpr int64_t kSink = 4, kResidual = 32;
// Of the errors that a test compares, in the mean, and of each. Sums in another order choose otherwise where two parts
// of a range, or two steps of a zero, are as good as equal.
constexpr double kErrorTolerance = 0.003, kErrorToleranceOfOne = 0.006;
// Of the elements that a test compares, all its configurations together. One that is between two codes takes its group
// along where the group's gain or bias moves, and a whole row where V is rotated: 1 of 384 in the smallest
// configuration.
constexpr double kEqualShare = 0.999, kEqualShareOfOne = 0.99;
const std::vector<std::string> kRecipes = {"kivi", "compact", "balanced", "quality", "near-lossless"};
// Not recipes: other ways to combine the same options, so that every branch of the reference is held against the
// library.
const std::vector<std::string> kOthers = {"float32", "few-and-many"};

// The same cache twice: as the library takes it, and as the reference does.
struct Twins {
  CacheOptions options;
  Recipe recipe;
};

Twins twins(const std::string& name, int64_t heads, int64_t dim, int64_t group) {
  CacheOptions o = options_of(heads, dim, group, kResidual, kSink);
  if (name == "float32") {
    o.scale_dtype = "float32", o.k_bits = 3, o.v_bits = 2;
    o.k_search = {0.95, 0.9}, o.v_search = {0.8, 0.7};
    o.k_bias_correction = o.v_gain_correction = true;
    return {o, {group, {{dim, 3}}, 2, Stored::kFloat32, {1.0, 0.95, 0.9}, {1.0, 0.8, 0.7}, true, true}};
  }
  if (name == "few-and-many") {
    o.scale_dtype = "float8", o.v_bits = 8, o.v_symmetric = true;
    o.k_classes = {32, 3, dim - 32, 1};
    return {o, {group, {{32, 3}, {dim - 32, 1}}, 8, Stored::kFloat8, {1.0}, {1.0}, false, false, false, true}};
  }
  o.recipe = name;
  return {o, reference::recipe_of(name, dim, group)};
}

struct Data {
  at::Tensor q, k, v;  // [B, Hq, T, D], [B, Hkv, T, D], float32
  std::string what;
};

// What is special about the data: nothing; channels of K and V that are 30 times as large as the others; means so far
// from 0 that a float8 zero would be out of reach (in V the rotation spreads that of channel 0 over its block), a
// channel of K that is constant, a token whose V is 0 and one whose V is constant.
enum class Kind { kGaussian, kOutliers, kOffsets };
constexpr Kind kKinds[] = {Kind::kGaussian, Kind::kOutliers, Kind::kOffsets};

// Two rows, two kv heads, four query heads.
Data make_data(int64_t dim, int64_t tokens, Kind kind) {
  Data d{randn({2, 4, tokens, dim}, 1), randn({2, 2, tokens, dim}, 2), randn({2, 2, tokens, dim}, 3), "Gaussian"};
  if (kind == Kind::kOutliers) {
    d.k = outlier_keys({2, 2, tokens, dim}, 2);
    d.v.narrow(3, 5, 2) *= 30;
    d.q = unit_queries({2, 4, tokens, dim}, 1, 2.0);
    d.what = "outliers";
  } else if (kind == Kind::kOffsets) {
    d.k.narrow(3, 7, 4) += 40;
    d.v.narrow(3, 0, 1) += 200;
    d.k.select(3, 20).fill_(3.3);
    d.v.select(2, 50).zero_();
    d.v.select(2, 51).fill_(1.5);
    d.q = unit_queries({2, 4, tokens, dim}, 1, 2.0);
    d.what = "offsets";
  }
  d.what += ", D = " + std::to_string(dim);
  return d;
}

double rms(const at::Tensor& x) { return x.to(at::kDouble).square().mean().sqrt().item<double>(); }

// How far apart cache and reference are, over all that one test looks at.
class Apart {
 public:
  explicit Apart(std::string name) : name_(std::move(name)) {}
  ~Apart() {
    std::printf("%s: %.4f %% of the elements equal, errors within %.4f %%\n", name_.c_str(), 100 * equal_ / elements_,
                100 * error_);
    EXPECT_GE(equal_, kEqualShare * elements_) << name_;
    EXPECT_LE(std::abs(differences_ / compared_), kErrorTolerance) << name_;
  }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

  // Errors of the cache and of the reference against the exact numbers.
  void compare_errors(double cache, double want, const std::string& what) {
    ASSERT_GT(want, 0) << what;
    const double difference = std::abs(cache / want - 1);
    differences_ += cache / want - 1;
    compared_++;
    error_ = std::max(error_, difference);
    EXPECT_LE(difference, kErrorToleranceOfOne) << what << ": " << cache << " and " << want;
  }

  // `along`: an element's rounding is that of the largest one along this dimension.
  void compare(const at::Tensor& got, const at::Tensor& want, const at::Tensor& exact, int64_t along,
               const std::string& what) {
    ASSERT_EQ(got.sizes(), want.sizes()) << what;
    const at::Tensor limit = want.abs().amax(along, true) * 2e-6;
    const auto equal = ((got - want).abs() <= limit).sum().item<double>(), elements = static_cast<double>(got.numel());
    equal_ += equal, elements_ += elements;
    EXPECT_GE(equal, kEqualShareOfOne * elements) << what;
    compare_errors(rms(got - exact), rms(want - exact), what);
  }

 private:
  std::string name_;
  double equal_ = 0, elements_ = 0;
  double error_ = 0;                       // largest relative difference
  double differences_ = 0, compared_ = 0;  // sum of the relative differences, and how many
};

// What a cache holds after `tokens` of the data whose classes were chosen by the first `quantized` tokens after the
// sink and the first `asked` queries. Exact tokens are as they came.
struct Held {
  at::Tensor order, k, v;
};

Held reference_cache(const Data& d, const Recipe& r, int64_t chosen_by, int64_t asked) {
  const int64_t count = reference::quantized_count(d.k.size(2), kSink, kResidual, r.group_size);
  at::Tensor squares;
  if (asked > 0) squares = d.q.narrow(2, 0, asked).unflatten(1, {d.k.size(1), -1}).square().sum(at::IntArrayRef{2, 3});
  Held held{reference::key_order(d.k.narrow(2, kSink, chosen_by), squares, r), d.k.clone(), d.v.clone()};
  held.k.narrow(2, kSink, count).copy_(reference::fake_quantize_keys(d.k.narrow(2, kSink, count), r, held.order));
  held.v.narrow(2, kSink, count).copy_(reference::fake_quantize_values(d.v.narrow(2, kSink, count), r));
  return held;
}

void compare_held(const KVCache& cache, const Data& d, const Held& want, Apart& apart, const std::string& what) {
  if (cache.format().num_key_classes > 0) {
    EXPECT_TRUE(at::equal(cache.key_order(), want.order)) << what << ": order of the channels";
  }
  const int64_t count = cache.quantized_length();
  const auto part = [&](const at::Tensor& x) { return x.narrow(2, kSink, count); };
  const auto [k, v] = cache.dequantize();
  apart.compare(part(k), part(want.k), part(d.k), -2, what + ", K");
  apart.compare(part(v), part(want.v), part(d.v), -1, what + ", V");
  // The sink, the window and nothing else is exact.
  for (const auto& [got, exact] : {std::pair(k, d.k), std::pair(v, d.v)}) {
    EXPECT_TRUE(same_bits(got.narrow(2, 0, kSink), exact.narrow(2, 0, kSink))) << what;
    const int64_t newest = exact.size(2) - kSink - count;
    EXPECT_TRUE(same_bits(got.narrow(2, kSink + count, newest), exact.narrow(2, kSink + count, newest))) << what;
  }
}

// A prompt at once, with and without queries.
void check_at_once(const Twins& t, const Data& d, Apart& apart) {
  const int64_t count = reference::quantized_count(d.k.size(2), kSink, kResidual, t.recipe.group_size);
  KVCache plain(t.options), asked(t.options);
  plain.append(d.k, d.v);
  ASSERT_EQ(plain.quantized_length(), count) << d.what;
  compare_held(plain, d, reference_cache(d, t.recipe, count, 0), apart, d.what);
  asked.append(d.k, d.v, std::nullopt, d.q);
  compare_held(asked, d, reference_cache(d, t.recipe, count, d.q.size(2)), apart, d.what + ", with queries");
}

// Softmax in double of the scores of every query, which sees its own token and those before it: those that are
// quantised by then as `held` has them, the others exactly.
at::Tensor attention(const Data& d, const Held& held, int64_t group_size) {
  const int64_t tokens = d.k.size(2), repeat = d.q.size(1) / d.k.size(1);
  const auto heads = [&](const at::Tensor& x) { return x.to(at::kDouble).repeat_interleave(repeat, 1); };
  at::Tensor quantized = at::zeros({tokens, tokens}, at::kBool);
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t count = reference::quantized_count(t + 1, kSink, kResidual, group_size);
    quantized[t].narrow(0, std::min(kSink, tokens), count).fill_(true);
  }
  const at::Tensor q = d.q.to(at::kDouble) / std::sqrt(static_cast<double>(d.q.size(3)));
  const at::Tensor scores =
      at::where(quantized, at::matmul(q, heads(held.k).transpose(2, 3)), at::matmul(q, heads(d.k).transpose(2, 3)));
  const at::Tensor seen = at::ones({tokens, tokens}, at::kBool).tril();
  const at::Tensor weights = at::softmax(scores.masked_fill(seen.logical_not(), -INFINITY), -1);
  return at::matmul(weights * quantized, heads(held.v)) + at::matmul(weights * quantized.logical_not(), heads(d.v));
}

// Token by token: append, then attend. The classes are chosen when the first group is quantised, by it and by the
// queries so far.
void check_stepwise(const Twins& t, const Data& d, Apart& apart) {
  const int64_t tokens = d.k.size(2), group = t.recipe.group_size, first = kSink + kResidual + group;
  KVCache cache(t.options);
  std::vector<at::Tensor> outputs;
  for (int64_t i = 0; i < tokens; i++) {
    const at::Tensor q = d.q.narrow(2, i, 1);
    cache.append(d.k.narrow(2, i, 1), d.v.narrow(2, i, 1), std::nullopt, q);
    outputs.push_back(cache.attend(q));
  }
  const Held held = reference_cache(d, t.recipe, group, first);
  compare_held(cache, d, held, apart, d.what + ", step by step");
  const at::Tensor exact = attention(d, {at::Tensor(), d.k, d.v}, group);
  const at::Tensor want = attention(d, held, group), got = at::cat(outputs, 2).to(at::kDouble);
  // Before the first group is quantised there is no error to compare.
  const auto error = [&](const at::Tensor& out) {
    return rms((out - exact).narrow(2, first, tokens - first)) / rms(exact.narrow(2, first, tokens - first));
  };
  apart.compare_errors(error(got), error(want), d.what + ", attention");
  // And the outputs themselves are close: far closer to each other than to the exact ones.
  EXPECT_LE(rms(got - want), 0.05 * rms(want - exact)) << d.what;
}

class RecipeReference : public ::testing::TestWithParam<std::string> {};

TEST_P(RecipeReference, HoldsTheSame) {
  Apart apart(GetParam());
  for (const int64_t group : {32, 64}) {
    for (const int64_t dim : {64, 128, 80}) {
      for (const Kind kind : kKinds) {
        Data d = make_data(dim, kSink + kResidual + 6 * group + 7, kind);
        d.what += ", G = " + std::to_string(group);
        check_at_once(twins(GetParam(), 2, dim, group), d, apart);
      }
    }
  }
}

TEST_P(RecipeReference, AttendsTheSameStepByStep) {
  Apart apart(GetParam());
  for (const int64_t group : {32, 64}) {
    for (const int64_t dim : {64, 128, 80}) {
      for (const Kind kind : kKinds) {
        Data d = make_data(dim, kSink + kResidual + 3 * group + 7, kind);
        d.what += ", G = " + std::to_string(group);
        check_stepwise(twins(GetParam(), 2, dim, group), d, apart);
      }
    }
  }
}

// Keys, values and queries of a real model, as examples/notebook/capture.py writes them.
TEST_P(RecipeReference, AgreesOnARealModel) {
  const char* const named = std::getenv("KIVI_TEST_CAPTURE");
  const std::string file = named != nullptr ? named : KIVI_SOURCE_DIR "/../shared/data/smollm2_kv_capture.pt";
  std::ifstream in(file, std::ios::binary);
  if (!in)
    GTEST_SKIP() << "there is no " << file << "; KIVI_TEST_CAPTURE names another file of examples/notebook/capture.py";
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const auto capture = torch::jit::pickle_load(bytes).toGenericDict();
  Apart apart(GetParam());
  int layers = 0;
  for (const auto& entry : capture) {
    const std::string key = entry.key().toStringRef(), layer = key.substr(0, key.find('.'));
    if (key != layer + ".q") continue;
    const auto get = [&](const char* what) { return capture.at(layer + what).toTensor().to(at::kFloat); };
    layers++;
    for (const int64_t group : {32, 64}) {
      const Data d{get(".q"), get(".k"), get(".v"), layer + ", G = " + std::to_string(group)};
      const Twins t = twins(GetParam(), d.k.size(1), d.k.size(3), group);
      check_at_once(t, d, apart);
      check_stepwise(t, d, apart);
    }
  }
  EXPECT_GT(layers, 0);
}

const auto kName = [](const auto& p) {
  std::string name = p.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
};
INSTANTIATE_TEST_SUITE_P(Recipes, RecipeReference, ::testing::ValuesIn(kRecipes), kName);
INSTANTIATE_TEST_SUITE_P(Others, RecipeReference, ::testing::ValuesIn(kOthers), kName);

}  // namespace
}  // namespace kivi::test
