// Bad arguments: each throws a c10::Error that names the argument and the values that disagree, and changes nothing.
#include <functional>
#include <limits>
#include <utility>

#include "tests/ops/small_cache.h"

namespace kivi::test {
namespace {

at::Tensor on_meta(const at::Tensor& t) { return at::empty(t.sizes(), t.options().device(at::kMeta)); }

struct Case {
  std::string name;
  std::function<void()> call;
  std::vector<std::string> words;
};

// ---------------------------------------------------------------------------------------------- quantisation

TEST(Errors, Quantise) {
  const at::Tensor x = randn({4, 40}, 1);
  const auto [codes_, scale_, zero_] = quantize(x, 1, 3, 16);
  const at::Tensor codes = codes_, scale = scale_, zero = zero_;
  const auto back = [&](const at::Tensor& c, const at::Tensor& s, const at::Tensor& z, int64_t axis = 1,
                        int64_t bits = 3, int64_t group = 16, int64_t size = 40, at::ScalarType type = at::kFloat) {
    return [=] { dequantize(c, s, z, axis, bits, group, size, type); };
  };
  std::vector<Case> cases = {
      {"axis past the end", [&] { quantize(x, 2); }, {"axis", "2", "-2 to 1"}},
      {"axis before the start", [&] { quantize(x, -3); }, {"axis", "-3"}},
      {"a number has no axis", [&] { quantize(at::ones({}), 0); }, {"axis", "0 dimensions"}},
      {"group_size 0", [&] { quantize(x, 1, 2, 0); }, {"group_size", "0"}},
      {"group_size -4", [&] { fake_quantize(x, 1, 2, -4); }, {"group_size", "-4"}},
      {"codes of another dtype", back(codes.to(at::kLong), scale, zero), {"codes", "Byte", "Long"}},
      {"scale of another dtype", back(codes, scale.to(at::kDouble), zero), {"scale", "Float", "Double"}},
      {"zero of another dtype", back(codes, scale, zero.to(at::kHalf)), {"zero", "Float", "Half"}},
      {"3-bit codes read as 4 bits", back(codes, scale, zero, 1, 4), {"codes", "15", "20", "4 bits"}},
      {"wrong size", back(codes, scale, zero, 1, 3, 16, 60), {"scale", "3", "4"}},
      {"size with the groups but not the bytes", back(codes, scale, zero, 1, 3, 16, 47), {"codes", "15", "18"}},
      // 8 * 2^61 bits are 0 in 64 bits
      {"size whose bits overflow",
       back(codes.narrow(1, 0, 0), scale.narrow(1, 0, 1), zero.narrow(1, 0, 1), 1, 8, int64_t{1} << 62,
            int64_t{1} << 61),
       {"size", "2305843009213693952"}},
      {"negative size", back(codes, scale, zero, 1, 3, 16, -1), {"size", "-1"}},
      {"other group_size", back(codes, scale, zero, 1, 3, 8), {"scale", "3", "5"}},
      {"group_size 0", back(codes, scale, zero, 1, 3, 0), {"group_size", "0"}},
      {"axis", back(codes, scale, zero, 5), {"axis", "5"}},
      {"scale of other sizes", back(codes, scale.narrow(0, 0, 3), zero), {"scale", "3", "4"}},
      {"zero of other sizes", back(codes, scale, zero.narrow(1, 0, 2)), {"zero", "2", "3"}},
      {"rank of scale", back(codes, scale.unsqueeze(0), zero), {"scale", "3 dimensions", "2"}},
      {"rank of zero", back(codes, scale, zero.flatten()), {"zero", "1 dimensions", "2"}},
      {"dtype to give back", back(codes, scale, zero, 1, 3, 16, 40, at::kDouble), {"dtype", "Double"}},
      {"codes on meta", back(on_meta(codes), scale, zero), {"scale", "cpu", "meta"}},
      {"scale on meta", back(codes, on_meta(scale), zero), {"scale", "cpu", "meta"}},
      {"zero on meta", back(codes, scale, on_meta(zero)), {"zero", "cpu", "meta"}},
  };
  for (int64_t bits : {-4, 0, 5, 6, 7, 9, 16}) {
    const std::string text = std::to_string(bits);
    cases.push_back({"quantize at " + text, [=] { quantize(x, 1, bits); }, {"bits", text}});
    cases.push_back({"fake_quantize at " + text, [=] { fake_quantize(x, 1, bits); }, {"bits", text}});
    cases.push_back({"dequantize at " + text, back(codes, scale, zero, 1, bits), {"bits", text}});
  }
  for (auto type : {at::kDouble, at::kInt, at::kLong, at::kBool, at::kByte, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    const at::Tensor other = at::ones({4, 40}).to(type);
    cases.push_back({"x", [=] { quantize(other, 1); }, {"x", toString(type)}});
    cases.push_back({"x", [=] { fake_quantize(other, 1); }, {"x", toString(type)}});
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(c.call, c.words);
  }
}

// ---------------------------------------------------------------------------------------------- the class

TEST(Errors, Construction) {
  CacheOptions good;
  good.num_kv_heads = 2, good.head_dim = 16;
  KVCache{good};
  const auto with = [&](auto change) {
    return [=] {
      CacheOptions o = good;
      change(o);
      KVCache{o};
    };
  };
  std::vector<Case> cases = {
      {"no heads", with([](CacheOptions& o) { o.num_kv_heads = 0; }), {"num_kv_heads", "0"}},
      {"negative heads", with([](CacheOptions& o) { o.num_kv_heads = -2; }), {"num_kv_heads", "-2"}},
      {"too many heads", with([](CacheOptions& o) { o.num_kv_heads = 65537; }), {"num_kv_heads", "65537", "65536"}},
      {"head_dim 0", with([](CacheOptions& o) { o.head_dim = 0; }), {"head_dim", "0"}},
      {"head_dim 1025", with([](CacheOptions& o) { o.head_dim = 1025; }), {"head_dim", "1025", "1024"}},
      {"value_head_dim", with([](CacheOptions& o) { o.value_head_dim = -1; }), {"value_head_dim", "-1"}},
      {"residual_length", with([](CacheOptions& o) { o.residual_length = -1; }), {"residual_length", "-1"}},
      {"sink_length", with([](CacheOptions& o) { o.sink_length = -1; }), {"sink_length", "-1"}},
      {"precision", with([](CacheOptions& o) { o.precision = "double"; }), {"precision", "double", "exact", "fast"}},
      {"scale_dtype", with([](CacheOptions& o) { o.scale_dtype = "half"; }), {"scale_dtype", "half", "float16"}},
  };
  for (int64_t bits : {-4, 0, 5, 6, 7, 16}) {
    const std::string text = std::to_string(bits);
    cases.push_back({text, with([=](CacheOptions& o) { o.k_bits = bits; }), {"k_bits", text}});
    cases.push_back({text, with([=](CacheOptions& o) { o.v_bits = bits; }), {"v_bits", text}});
  }
  for (int64_t group : {-16, 0, 1, 8, 24, 256}) {
    const std::string text = std::to_string(group);
    cases.push_back({text, with([=](CacheOptions& o) { o.group_size = group; }), {"group_size", text, "16, 32, 64"}});
  }
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(c.call, c.words);
  }
  expect_error([] { KVCache(2, 16, std::nullopt, 5); }, {"k_bits", "5"});
}

// Options from a file or a network may be any integers; arithmetic with them must not come before they are checked.
TEST(Errors, OptionsAtTheLimitsOfIntegers) {
  using Set = void (*)(CacheOptions&, int64_t);
  const std::pair<const char*, Set> options[] = {
      {"num_kv_heads", [](CacheOptions& o, int64_t x) { o.num_kv_heads = x; }},
      {"head_dim", [](CacheOptions& o, int64_t x) { o.head_dim = x; }},
      {"value_head_dim", [](CacheOptions& o, int64_t x) { o.value_head_dim = x; }},
      {"k_bits", [](CacheOptions& o, int64_t x) { o.k_bits = x; }},
      {"v_bits", [](CacheOptions& o, int64_t x) { o.v_bits = x; }},
      {"group_size", [](CacheOptions& o, int64_t x) { o.group_size = x; }},
      {"residual_length", [](CacheOptions& o, int64_t x) { o.residual_length = x; }},
      {"sink_length", [](CacheOptions& o, int64_t x) { o.sink_length = x; }},
      {"k_classes",
       [](CacheOptions& o, int64_t x) {
         o.k_classes = {x, 4, 16, 2};
       }},
      {"k_classes",
       [](CacheOptions& o, int64_t x) {
         o.k_classes = {16, x, 16, 2};
       }},
  };
  using Limits = std::numeric_limits<int64_t>;
  for (const char* recipe : {"", "kivi", "compact", "balanced", "quality", "near-lossless"}) {
    for (const auto& [name, set] : options) {
      // 2^60 is the first whose product with a size of 8 and more leaves the range.
      for (int64_t x : {Limits::min(), Limits::min() + 189, -(int64_t{1} << 60), int64_t{1} << 60, Limits::max()}) {
        SCOPED_TRACE(std::string(name) + " = " + std::to_string(x) + ", recipe \"" + recipe + "\"");
        CacheOptions o;
        o.num_kv_heads = 2, o.head_dim = 32, o.recipe = recipe;
        set(o, x);
        expect_error([&o = std::as_const(o)] { KVCache{o}; }, {name});
      }
    }
  }
}

// Every bad call of append, forward and attend; `cache` may be empty or hold tokens.
std::vector<Case> bad_calls(KVCache& cache, bool started) {
  const auto k_of = [](int64_t b, int64_t h, int64_t t, int64_t d, at::ScalarType type = at::kFloat) {
    return randn({b, h, t, d}, 2, type);
  };
  const int64_t b = kBatch, h = kHeads, d = kDim, dv = kValueDim;
  const at::Tensor k = k_of(b, h, 3, d), v = k_of(b, h, 3, dv), q = k_of(b, 4, 3, d);
  std::vector<Case> cases;
  // k and v go wrong alike in append and forward.
  const auto add = [&](const std::string& name, const at::Tensor& bad_k, const at::Tensor& bad_v,
                       const std::optional<at::Tensor>& lengths, const std::vector<std::string>& words) {
    KVCache* c = &cache;
    cases.push_back({"append: " + name, [=] { c->append(bad_k, bad_v, lengths); }, words});
    cases.push_back({"forward: " + name, [=] { c->forward(q, bad_k, bad_v, {}, lengths); }, words});
  };
  add("rank of k", k[0], v, {}, {"k", "3 dimensions", "4 dimensions"});
  add("rank of v", k, v.unsqueeze(0), {}, {"v", "5 dimensions", "4 dimensions"});
  add("rank 0", at::ones({}), v, {}, {"k", "0 dimensions"});
  add("heads of k", k_of(b, 3, 3, d), v, {}, {"k", "head count 3", "2"});
  add("heads of v", k, k_of(b, 1, 3, dv), {}, {"v", "head count 1", "2"});
  add("size of k", k_of(b, h, 3, d + 1), v, {}, {"k", "17", "head_dim 16"});
  add("size of v", k, k_of(b, h, 3, d), {}, {"v", "16", "value_head_dim 20"});
  add("k and v swapped", v, k, {}, {"k", "20", "head_dim 16"});
  add("tokens of v", k, k_of(b, h, 4, dv), {}, {"v", "4", "3", "tokens"});
  add("batch of v", k, k_of(b + 1, h, 3, dv), {}, {"v", "batch size 3", "2"});
  add("dtype of v", k, v.to(at::kHalf), {}, {"v", "Half", "k", "Float"});
  for (auto type : {at::kDouble, at::kInt, at::kChar, at::kBool, at::kComplexFloat}) {
    add("dtype of k", k.to(type), v.to(type), {}, {"k", toString(type)});
  }
  add("k on meta", on_meta(k), v, {}, {"k", "meta"});
  add("v on meta", k, on_meta(v), {}, {"v", "meta"});
  add("both on meta", on_meta(k), on_meta(v), {}, {"k", "meta"});
  add("lengths on meta", k, v, on_meta(longs({1, 2})), {"lengths", "meta"});
  add("no k", at::Tensor(), v, {}, {"k must be a tensor"});
  add("no v", k, at::Tensor(), {}, {"v must be a tensor"});
  const at::Tensor nested = at::_nested_tensor_from_tensor_list({k[0], k[1]});
  add("nested k", nested, v, {}, {"k", "nested"});
  add("nested v", k, nested, {}, {"v", "nested"});
  add("sparse k", k.to_sparse(), v, {}, {"k", "Strided", "Sparse"});
  add("sparse v", k, v.to_sparse(), {}, {"v", "Strided", "Sparse"});
  add("sparse lengths", k, v, longs({1, 2}).to_sparse(), {"lengths", "Strided", "Sparse"});
  add("lengths too many", k, v, longs({1, 2, 3}), {"lengths", "3", "2"});
  add("rank of lengths", k, v, longs({1, 2}).unsqueeze(0), {"lengths", "2 dimensions"});
  add("dtype of lengths", k, v, longs({1, 2}).to(at::kInt), {"lengths", "Long", "Int"});
  add("lengths past the tokens", k, v, longs({1, 4}), {"lengths[1]", "4", "3"});
  add("lengths negative", k, v, longs({-1, 2}), {"lengths[0]", "-1"});
  if (started) {
    add("batch of both", k_of(3, h, 3, d), k_of(3, h, 3, dv), {}, {"k", "batch size 3", "2"});
    add("dtype of both", k.to(at::kHalf), v.to(at::kHalf), {}, {"k", "Half", "Float"});
  }

  // q and the options go wrong alike in forward and attend.
  const auto add_attention = [&](const std::string& name, const at::Tensor& bad_q, const AttentionOptions& o,
                                 const std::vector<std::string>& words) {
    KVCache* c = &cache;
    cases.push_back({"attend: " + name, [=] { c->attend(bad_q, o); }, words});
    cases.push_back({"attend_with_lse: " + name, [=] { c->attend_with_lse(bad_q, o); }, words});
    cases.push_back({"forward: " + name, [=] { c->forward(bad_q, k, v, o); }, words});
  };
  const auto option = [](auto change) {
    AttentionOptions o;
    change(o);
    return o;
  };
  add_attention("rank of q", q[0], {}, {"q", "3 dimensions"});
  add_attention("heads of q", k_of(b, 3, 3, d), {}, {"q", "head count 3", "2"});
  add_attention("no heads", k_of(b, 0, 3, d), {}, {"q", "head count 0", "2"});
  add_attention("size of q", k_of(b, 4, 3, d - 1), {}, {"q", "15", "head_dim 16"});
  for (auto type : {at::kDouble, at::kInt, at::kBool}) {
    add_attention("dtype of q", q.to(type), {}, {"q", toString(type)});
  }
  add_attention("no q", at::Tensor(), {}, {"q must be a tensor"});
  add_attention("nested q", at::_nested_tensor_from_tensor_list({q[0], q[1]}), {}, {"q", "nested"});
  add_attention("sparse q", q.to_sparse(), {}, {"q", "Strided", "Sparse"});
  add_attention("q on meta", on_meta(q), {}, {"q", "meta"});
  for (double bad : {std::nan(""), static_cast<double>(kInf)}) {
    add_attention("scale", q, option([=](auto& o) { o.scale = bad; }), {"scale", "finite"});
    add_attention("softcap", q, option([=](auto& o) { o.softcap = bad; }), {"softcap", "finite"});
  }
  add_attention("softcap", q, option([](auto& o) { o.softcap = -2.0; }), {"softcap", "-2"});
  add_attention("window", q, option([](auto& o) { o.window = -3; }), {"window", "-3"});
  add_attention("sinks", q, option([](auto& o) { o.sinks = at::ones({2}); }), {"sinks", "2", "4"});
  add_attention("sinks rank", q, option([](auto& o) { o.sinks = at::ones({1, 4}); }), {"sinks", "2 dimensions"});
  add_attention("sinks dtype", q, option([](auto& o) { o.sinks = longs({1, 2, 3, 4}); }), {"sinks", "Long"});
  add_attention("sinks device", q, option([](auto& o) { o.sinks = on_meta(at::ones({4})); }), {"sinks", "meta"});
  add_attention("slopes", q, option([](auto& o) { o.alibi_slopes = at::ones({5}); }), {"alibi_slopes", "5", "4"});
  add_attention("slopes", q, option([](auto& o) { o.alibi_slopes = at::ones({3, 4}); }), {"alibi_slopes", "3", "2"});
  add_attention("slopes", q, option([](auto& o) { o.alibi_slopes = at::ones({}); }), {"alibi_slopes", "0 dimensions"});
  add_attention("slopes", q, option([](auto& o) { o.alibi_slopes = on_meta(at::ones({4})); }),
                {"alibi_slopes", "meta"});
  add_attention("sparse sinks", q, option([](auto& o) { o.sinks = at::ones({4}).to_sparse(); }), {"sinks", "Sparse"});
  add_attention("sparse slopes", q, option([](auto& o) { o.alibi_slopes = at::ones({4}).to_sparse(); }),
                {"alibi_slopes", "Sparse"});
  add_attention("sparse mask", q, option([](auto& o) {
                  o.attn_mask = at::ones({3, 1}).to_sparse();
                }),
                {"attn_mask", "Sparse"});
  for (const at::Tensor& mask : {at::ones({3, 7}), at::ones({5, 1}), at::ones({2, 2, 1, 1}), at::ones({3, 1, 1, 1}),
                                 at::ones({1, 1, 1, 1, 1}), at::ones({})}) {
    std::ostringstream sizes;
    sizes << mask.sizes();
    add_attention("mask", q, option([=](auto& o) { o.attn_mask = mask; }), {"attn_mask", sizes.str(), "2, 4, 3, "});
  }
  add_attention("mask dtype", q, option([](auto& o) { o.attn_mask = longs({1}); }), {"attn_mask", "Long"});
  add_attention("mask device", q, option([](auto& o) { o.attn_mask = on_meta(at::ones({1})); }), {"attn_mask", "meta"});
  if (started) add_attention("batch of q", k_of(3, 4, 3, d), {}, {"q", "batch size 3", "2"});
  KVCache* c = &cache;
  cases.push_back({"forward: batch of q", [=] { c->forward(k_of(3, 4, 3, d), k, v); }, {"q", "batch size 3", "2"}});
  cases.push_back({"forward: rows of q", [=] { c->forward(k_of(b, 4, 2, d), k, v); }, {"q", "2", "3"}});
  cases.push_back({"truncate", [=] { c->truncate(-1); }, {"n ", "-1"}});
  cases.push_back({"reserve", [=] { c->reserve(-1); }, {"tokens", "-1"}});
  cases.push_back({"repeat_interleave", [=] { c->repeat_interleave(0); }, {"n ", "0"}});
  cases.push_back({"select of nothing", [=] { c->select(longs({})); }, {"rows", "0"}});
  cases.push_back({"select past the batch", [=] { c->select(longs({0, 2})); }, {"rows["}});
  cases.push_back({"select below 0", [=] { c->select(longs({-1})); }, {"rows[0]", "-1"}});
  cases.push_back({"select dtype", [=] { c->select(longs({0}).to(at::kInt)); }, {"rows", "Int", "Long"}});
  cases.push_back({"select rank", [=] { c->select(longs({0}).unsqueeze(0)); }, {"rows", "2 dimensions"}});
  cases.push_back({"select device", [=] { c->select(on_meta(longs({0}))); }, {"rows", "meta"}});
  cases.push_back({"select sparse", [=] { c->select(longs({0}).to_sparse()); }, {"rows", "Sparse"}});
  cases.push_back({"reorder of too few", [=] { c->reorder(longs({0})); }, {"rows", "1"}});
  cases.push_back({"reorder rank", [=] { c->reorder(longs({0, 1}).unsqueeze(0)); }, {"rows", "[1, 2]"}});
  if (started) {
    cases.push_back({"reorder past the batch", [=] { c->reorder(longs({0, 2})); }, {"rows[1]", "2"}});
    cases.push_back({"reorder sparse", [=] { c->reorder(longs({0, 1}).to_sparse()); }, {"rows", "Sparse"}});
    cases.push_back({"reorder dtype", [=] { c->reorder(longs({0, 1}).to(at::kFloat)); }, {"rows", "Float", "Long"}});
  }
  return cases;
}

TEST(Errors, BadCallsOfTheClassChangeNothing) {
  KVCache cache(cache_options());
  cache.append(randn({kBatch, kHeads, kTokens, kDim}, 3), randn({kBatch, kHeads, kTokens, kValueDim}, 4),
               longs({kTokens, 37}));
  const auto before = cache.state();
  const int64_t bytes = cache.nbytes();
  for (const Case& c : bad_calls(cache, true)) {
    SCOPED_TRACE(c.name);
    expect_error(c.call, c.words);
    EXPECT_TRUE(same_state(cache.state(), before));
    EXPECT_EQ(cache.nbytes(), bytes);
  }
}

TEST(Errors, BadCallsDoNotStartAnEmptyCache) {
  KVCache cache(cache_options());
  const auto before = cache.state();
  for (const Case& c : bad_calls(cache, false)) {
    SCOPED_TRACE(c.name);
    expect_error(c.call, c.words);
    EXPECT_TRUE(same_state(cache.state(), before));
    EXPECT_EQ(cache.batch_size(), 0);
  }
  cache.append(randn({3, kHeads, 2, kDim}, 5, at::kHalf), randn({3, kHeads, 2, kValueDim}, 6, at::kHalf));
  EXPECT_EQ(cache.batch_size(), 3);
}

// Sums of tokens and pages must not overflow. A tensor of one element, expanded, claims to be any size.
TEST(Errors, MoreTokensThanThereCanBe) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kRows = 200;
  CacheOptions options = cache_options();
  options.num_kv_heads = options.head_dim = 1, options.value_head_dim = 1;
  KVCache cache(options);
  const at::Tensor x = randn({kRows, 1, 60, 1}, 12);
  cache.append(x, x);
  const auto before = cache.state();
  expect_error([&] { cache.reserve(kMost); }, {"pages"});
  const auto format = cache_format(options);
  CacheTensors t = make_tensors(format, 1, 1);
  cache_append(t, x.narrow(0, 0, 1), x.narrow(0, 0, 1), format);
  for (const int64_t tokens : {kMost, kMost - 59, int64_t{1} << 62, int64_t{1} << 40}) {
    const at::Tensor one = at::zeros({1, 1, 1, 1}).expand({1, 1, tokens, 1});
    expect_error([&] { cache_append(t, one, one, format); }, {"row 0", "2^40", std::to_string(tokens)});
    KVCache single(options);
    single.append(x.narrow(0, 0, 1), x.narrow(0, 0, 1));
    expect_error([&] { single.append(one, one); }, {"row 0", "2^40", std::to_string(tokens)});
    EXPECT_EQ(single.length(), 60);
  }
  EXPECT_EQ(t.lengths.item<int64_t>(), 60);
  EXPECT_TRUE(same_state(cache.state(), before));
  // No row is right for any number of tokens.
  const auto [k, v] = cache_dequantize(make_tensors(format, 0, 0), format, int64_t{1} << 62);
  EXPECT_EQ(k.size(2), int64_t{1} << 62);
  EXPECT_EQ(v.numel(), 0);
  // Pages of no bytes cost none, however many there are.
  cache_copy_pages(at::empty({int64_t{1} << 61, 0}, at::kByte), longs({int64_t{1} << 60}), longs({3}));
  // No query looks at them.
  const at::Tensor one = at::zeros({1, 1, 1, 1}).expand({1, 1, kMost, 1});
  EXPECT_EQ(std::get<0>(cache_attention(at::zeros({1, 1, 0, 1}), t, format, one, one)).numel(), 0);
}

// ---------------------------------------------------------------------------------------------- the operators

// The operators that take a whole cache.
std::vector<std::pair<std::string, std::function<void(const CacheTensors&, at::IntArrayRef)>>> cache_calls() {
  return {{"cache_append",
           [](const CacheTensors& t, at::IntArrayRef f) {
             cache_append(t, randn({kBatch, kHeads, 1, kDim}, 9), randn({kBatch, kHeads, 1, kValueDim}, 10), f);
           }},
          {"cache_attention",
           [](const CacheTensors& t, at::IntArrayRef f) {
             cache_attention(randn({kBatch, 4, 1, kDim}, 11), t, f);
           }},
          {"cache_dequantize", [](const CacheTensors& t, at::IntArrayRef f) { cache_dequantize(t, f, kTokens); }},
          {"cache_truncate", [](const CacheTensors& t, at::IntArrayRef f) { cache_truncate(t, f, 30); }}};
}

void expect_unchanged(const CacheTensors& now, const CacheTensors& before) {
  for (size_t i = 0; i < kParts.size(); i++) {
    if (list(now)[i].is_meta()) continue;
    EXPECT_TRUE(same_bits(list(now)[i], list(before)[i])) << kParts[i];
  }
}

TEST(Errors, TensorsOfACacheThatDoNotFit) {
  const CacheTensors good = filled();
  for (const auto& [op, call] : cache_calls()) {
    call(copy(good), op_format());  // the good call is good
    for (size_t i = 0; i < kParts.size(); i++) {
      const at::Tensor t = list(good)[i];
      std::vector<std::pair<std::string, at::Tensor>> wrong = {
          {"rank", t.unsqueeze(0)},
          {"dtype", t.to(t.scalar_type() == at::kDouble ? at::kInt : at::kDouble)},
          {"device", on_meta(t)},
          {"strides",
           t.dim() > 1 ? t.transpose(0, 1).contiguous().transpose(0, 1) : t.repeat_interleave(2).slice(0, 0, 4, 2)}};
      if (kParts[i] != "block_table") wrong.push_back({"last size", at::cat({t, t}, -1)});
      if (kParts[i] != "pool" && kParts[i] != "lengths") wrong.push_back({"first size", at::cat({t, t}, 0)});
      for (const auto& [what, tensor] : wrong) {
        SCOPED_TRACE(op + " with " + kParts[i] + " of another " + what);
        if (what == "strides" && tensor.is_contiguous()) continue;
        std::vector<at::Tensor> parts = list(copy(good));
        parts[i] = tensor;
        const CacheTensors bad = from_list(parts), before = copy(bad);
        // Of two parts that disagree either may be named.
        const bool either = what == "last size" || what == "first size" || kParts[i] == "pool" ||
                            (kParts[i] == "window_k" && what == "dtype");
        expect_error([&, &c = call] { c(bad, op_format()); },
                     either ? std::vector<std::string>{} : std::vector<std::string>{kParts[i]});
        expect_unchanged(bad, before);
      }
    }
  }
}

TEST(Errors, LengthsAndTablesThatLie) {
  struct Lie {
    std::string name;
    std::function<void(CacheTensors&)> tell;
    std::vector<std::string> words;
    bool append_only = false;
  };
  const auto set = [](at::Tensor t, int64_t b, int64_t value) { t[b] = value; };
  const std::vector<Lie> lies = {
      {"negative length", [&](CacheTensors& t) { set(t.lengths, 1, -1); }, {"lengths[1]", "-1"}},
      {"huge length",
       [&](CacheTensors& t) { set(t.lengths, 0, int64_t{1} << 50); },
       {"lengths[0]", "1125899906842624"}},
      {"largest length",
       [&](CacheTensors& t) { set(t.lengths, 0, std::numeric_limits<int64_t>::max()); },
       {"lengths[0]"}},
      {"more tokens than the window holds", [&](CacheTensors& t) { set(t.lengths, 0, 200); }, {"lengths[0]", "200"}},
      {"negative quantised",
       [&](CacheTensors& t) { set(t.quantized_lengths, 0, -16); },
       {"quantized_lengths[0]", "-16"}},
      {"quantised off the group",
       [&](CacheTensors& t) { set(t.quantized_lengths, 0, 47); },
       {"quantized_lengths[0]", "47", "16"}},
      {"quantised past the length",
       [&](CacheTensors& t) { set(t.quantized_lengths, 0, 64); },
       {"quantized_lengths[0]", "64", "60"}},
      {"page past the pool", [](CacheTensors& t) { t.block_table[1][0] = 4; }, {"block_table[1][0]", "4"}},
      {"negative page", [](CacheTensors& t) { t.block_table[0][0] = -1; }, {"block_table[0][0]", "-1"}},
      {"largest page", [](CacheTensors& t) { t.block_table[0][0] = 2147483647; }, {"block_table[0][0]", "2147483647"}},
      {"no pages", [](CacheTensors& t) { t.pool = t.pool.narrow(0, 0, 0); }, {"block_table", "0"}},
      {"table without columns",
       [](CacheTensors& t) { t.block_table = t.block_table.narrow(1, 0, 0).clone(); },
       {"block_table", "0"}},
  };
  for (const Lie& lie : lies) {
    for (const auto& [op, call] : cache_calls()) {
      CacheTensors t = copy(filled());
      lie.tell(t);
      const CacheTensors before = copy(t);
      SCOPED_TRACE(op + ": " + lie.name);
      expect_error([&, &c = call] { c(t, op_format()); }, lie.words);
      expect_unchanged(t, before);
    }
  }
  // A table that suffices for what is held, and not for what an append adds.
  CacheTensors t = copy(filled());
  t.block_table[0][1] = 99;
  const CacheTensors before = copy(t);
  const at::Tensor k = randn({kBatch, kHeads, 100, kDim}, 12), v = randn({kBatch, kHeads, 100, kValueDim}, 13);
  expect_error([&] { cache_append(t, k, v, op_format()); }, {"block_table[0][1]", "99"});
  expect_unchanged(t, before);
  const at::Tensor k_long = randn({kBatch, kHeads, 300, kDim}, 12),
                   v_long = randn({kBatch, kHeads, 300, kValueDim}, 13);
  expect_error([&] { cache_append(t, k_long, v_long, op_format()); }, {"block_table", "2", "3"});
  expect_unchanged(t, before);
}

// What a call writes may lie beside its other arguments in one storage, and not in the same place.
TEST(Errors, MemoryThatACallWritesIsItsOwn) {
  const auto format = cache_format(kHeads, kDim, kDim, 2, 2, 16, 8, 4);
  CacheTensors good = make_tensors(format, kBatch, 2);
  const at::Tensor x = randn({kBatch, kHeads, kTokens, kDim}, 25);
  cache_append(good, x, x, format);
  const at::Tensor k = randn({kBatch, kHeads, 3, kDim}, 26);
  const auto first = [](const at::Tensor& t, int64_t n) { return t.view(-1).narrow(0, 0, n); };
  struct Call {
    std::string name;
    std::function<void(CacheTensors&)> call;
    std::vector<std::string> words;
  };
  const auto append_after = [&](auto change) {
    return [&, change](CacheTensors& t) {
      change(t);
      cache_append(t, k, k, format);
    };
  };
  const std::vector<Call> calls = {
      {"k of the window", [&](auto& t) { cache_append(t, t.window_k.narrow(2, 1, 3), k, format); }, {"k", "window_k"}},
      {"v of the window", [&](auto& t) { cache_append(t, k, t.window_k.narrow(2, 0, 3), format); }, {"v", "window_k"}},
      {"k of the sink",
       [&](auto& t) { cache_append(t, t.sink_k.narrow(2, 3, 1), k.narrow(2, 0, 1), format); },
       {"k", "sink_k"}},
      {"expanded k of the window",
       [&](auto& t) { cache_append(t, t.window_v.narrow(2, 0, 1).expand(k.sizes()), k, format); },
       {"k", "window_v"}},
      {"one window", append_after([](auto& t) { t.window_v = t.window_k; }), {"window_v", "window_k"}},
      {"one sink", append_after([](auto& t) { t.sink_v = t.sink_k; }), {"sink_v", "sink_k"}},
      {"one list of lengths",
       append_after([](auto& t) { t.lengths = t.quantized_lengths; }),
       {"quantized_lengths", "lengths"}},
      {"new lengths that are the lengths",
       [&](auto& t) {
         t.lengths.fill_(2), t.quantized_lengths.fill_(0);
         cache_append(t, k, k, format, t.lengths);
       },
       {"new_lengths", "lengths"}},
      {"overflow in the block table",
       [&](auto& t) { cache_append(t, k, k, format, {}, first(t.block_table, 1)); },
       {"block_table", "overflow"}},
      {"block table in the pool",
       [&](auto& t) {
         t.block_table = first(t.pool, t.block_table.nbytes()).zero_().view(at::kInt).view(t.block_table.sizes());
         cache_append(t, k, k, format);
       },
       {"block_table", "pool"}},
      {"truncate with one window",
       [&](auto& t) {
         t.window_v = t.window_k;
         cache_truncate(t, format, 30);
       },
       {"window_v", "window_k"}},
      {"truncate with a sink in the window",
       [&](auto& t) {
         t.sink_k = first(t.window_k, t.sink_k.numel()).view(t.sink_k.sizes());
         cache_truncate(t, format, 30);
       },
       {"sink_k", "window_k"}},
      {"pages named in the pool",
       [&](auto& t) { cache_copy_pages(t.pool, first(t.pool, 8).zero_().view(at::kLong), longs({1})); },
       {"source", "pool"}},
      {"pages to write named in the pool",
       [&](auto& t) { cache_copy_pages(t.pool, longs({1}), first(t.pool, 8).zero_().view(at::kLong)); },
       {"target", "pool"}},
  };
  for (const Call& c : calls) {
    SCOPED_TRACE(c.name);
    CacheTensors t = copy(good);
    CacheTensors changed = t;  // shares what the call does not replace
    expect_error([&] { c.call(changed); }, c.words);
    // What a call fills in beforehand apart, all is as it was.
    EXPECT_TRUE(same_bits(t.window_k, good.window_k));
    EXPECT_TRUE(same_bits(t.window_v, good.window_v));
    EXPECT_TRUE(same_bits(t.sink_k, good.sink_k));
    EXPECT_TRUE(same_bits(t.block_table, good.block_table));
  }
  // Side by side in one storage, the rows of the new tokens between those of something else.
  CacheTensors apart = copy(good), together = copy(good);
  const at::Tensor both = at::empty({2, together.window_k.numel()}, together.window_k.options());
  together.window_k = both[0].view_as(together.window_k).copy_(together.window_k);
  together.window_v = both[1].view_as(together.window_v).copy_(together.window_v);
  const at::Tensor qkv = randn({kBatch, 3, 3 * kHeads * kDim}, 27);
  const auto part = [&](int64_t i) {
    return qkv.narrow(2, i * kHeads * kDim, kHeads * kDim).view({kBatch, 3, kHeads, kDim}).transpose(1, 2);
  };
  cache_append(together, part(1), part(2), format);
  cache_append(apart, part(1).clone(), part(2).clone(), format);
  expect_unchanged(together, apart);
}

TEST(Errors, ArgumentsOfTheCacheOperators) {
  const CacheTensors t = filled();
  const CacheTensors before = copy(t);
  const auto format = op_format();
  const at::Tensor k = randn({kBatch, kHeads, 3, kDim}, 14), v = randn({kBatch, kHeads, 3, kValueDim}, 15),
                   q = randn({kBatch, 4, 3, kDim}, 16);
  const auto formatted = [&](size_t index, int64_t value) {
    auto f = format;
    f[index] = value;
    return f;
  };
  const at::Tensor big = at::full({kBatch, kHeads, 20, kDim}, 1e6).mul(at::arange(20, at::kFloat).view({1, 1, 20, 1}));
  const at::Tensor big_v = randn({kBatch, kHeads, 20, kValueDim}, 17);
  std::vector<Case> cases = {
      {"no k", [&] { cache_append(t, at::Tensor(), v, format); }, {"k must be a tensor"}},
      {"no q", [&] { cache_attention(at::Tensor(), t, format); }, {"q must be a tensor"}},
      {"k rank", [&] { cache_append(t, k[0], v, format); }, {"k", "3 dimensions"}},
      {"k dtype", [&] { cache_append(t, k.to(at::kHalf), v.to(at::kHalf), format); }, {"k", "Half", "Float"}},
      {"k on meta", [&] { cache_append(t, on_meta(k), v, format); }, {"k", "meta", "cpu"}},
      {"v on meta", [&] { cache_append(t, k, on_meta(v), format); }, {"v", "meta", "cpu"}},
      {"new_lengths on meta",
       [&] {
         cache_append(t, k, v, format, on_meta(longs({1, 1})));
       },
       {"new_lengths", "meta"}},
      {"new_lengths value",
       [&] {
         cache_append(t, k, v, format, longs({1, 9}));
       },
       {"new_lengths[1]", "9", "3"}},
      {"new_lengths one too many",
       [&] {
         cache_append(t, k, v, format, longs({1, 4}));
       },
       {"new_lengths[1]", "4", "3"}},
      {"new_lengths negative",
       [&] {
         cache_append(t, k, v, format, longs({-2, 1}));
       },
       {"new_lengths[0]", "-2"}},
      {"overflow dtype", [&] { cache_append(t, k, v, format, {}, at::zeros({1})); }, {"overflow", "Int", "Float"}},
      {"overflow size", [&] { cache_append(t, k, v, format, {}, at::zeros({2}, at::kInt)); }, {"overflow", "2"}},
      {"overflow empty", [&] { cache_append(t, k, v, format, {}, at::zeros({0}, at::kInt)); }, {"overflow", "0"}},
      {"overflow on meta",
       [&] { cache_append(t, k, v, format, {}, on_meta(at::zeros({1}, at::kInt))); },
       {"overflow", "meta"}},
      {"q on meta", [&] { cache_attention(on_meta(q), t, format); }, {"q", "meta", "cpu"}},
      {"new_k alone", [&] { cache_attention(q, t, format, k); }, {"new_k", "new_v"}},
      {"new_v alone", [&] { cache_attention(q, t, format, {}, v); }, {"new_k", "new_v"}},
      {"new_lengths alone",
       [&] {
         cache_attention(q, t, format, {}, {}, longs({1, 1}));
       },
       {"new_lengths", "new_k"}},
      {"new_k size", [&] { cache_attention(q, t, format, k.narrow(3, 0, 8), v); }, {"new_k", "8", "16"}},
      {"new_v on meta", [&] { cache_attention(q, t, format, k, on_meta(v)); }, {"new_v", "meta"}},
      {"new_lengths value",
       [&] {
         cache_attention(q, t, format, k, v, longs({4, 1}));
       },
       {"new_lengths[0]", "4", "3"}},
      {"new_lengths value",
       [&] {
         cache_attention(q, t, format, k, v, longs({0, -1}));
       },
       {"new_lengths[1]", "-1", "3"}},
      {"rows of q",
       [&] {
         cache_attention(q.narrow(2, 0, 2), t, format, k, v, longs({1, 1}));
       },
       {"q", "2", "3"}},
      {"negative length", [&] { cache_dequantize(t, format, -1); }, {"length", "-1"}},
      {"negative truncate", [&] { cache_truncate(t, format, -5); }, {"length", "-5"}},
      {"source past the pool", [&] { cache_copy_pages(t.pool, longs({4}), longs({0})); }, {"source[0]", "4"}},
      {"target past the pool", [&] { cache_copy_pages(t.pool, longs({0}), longs({-1})); }, {"target[0]", "-1"}},
      {"target twice",
       [&] {
         cache_copy_pages(t.pool, longs({0, 1}), longs({2, 2}));
       },
       {"target[1]", "2"}},
      {"source is target",
       [&] {
         cache_copy_pages(t.pool, longs({0, 1}), longs({1, 2}));
       },
       {"source[1]", "1"}},
      {"pages",
       [&] {
         cache_copy_pages(t.pool, longs({0, 1}), longs({2}));
       },
       {"target", "1", "2"}},
      {"dtype of pages", [&] { cache_copy_pages(t.pool, longs({0}).to(at::kInt), longs({1})); }, {"source", "Int"}},
      {"pages on meta", [&] { cache_copy_pages(t.pool, longs({0}), on_meta(longs({1}))); }, {"target", "meta"}},
      {"pool of floats",
       [&] {
         cache_copy_pages(at::zeros({2, 2}), longs({0}), longs({1}));
       },
       {"pool", "Byte", "Float"}},
      {"widen twice", [&] { cache_widen(t.pool, formatted(9, 48)); }, {"format", "48"}},
      {"widen of another format", [&] { cache_widen(t.pool, formatted(4, 8)); }, {"pool", "page size"}},
      {"short format",
       [&] {
         cache_page_bytes({2, 2, 3});
       },
       {"format", "18", "3"}},
      {"format version", [&] { cache_dequantize(t, formatted(0, 9), 1); }, {"version", "9", "2"}},
      {"format scale type", [&] { cache_dequantize(t, formatted(9, 9), 1); }, {"scale_type", "9"}},
      {"format k_bias_correction", [&] { cache_dequantize(t, formatted(10, 2), 1); }, {"k_bias_correction", "2"}},
      {"format v_gain_correction", [&] { cache_dequantize(t, formatted(11, -1), 1); }, {"v_gain_correction", "-1"}},
      {"format v_group_size", [&] { cache_dequantize(t, formatted(12, 24), 1); }, {"v_group_size", "24"}},
      {"format v_symmetric", [&] { cache_dequantize(t, formatted(13, 7), 1); }, {"v_symmetric", "7"}},
      {"format v_rotated", [&] { cache_dequantize(t, formatted(14, 2), 1); }, {"v_rotated", "2"}},
      {"format search", [&] { cache_dequantize(t, formatted(15, 17), 1); }, {"range search", "16", "17"}},
      {"format search too long", [&] { cache_dequantize(t, formatted(16, 1), 1); }, {"range search", "1", "0"}},
      {"format heads", [&] { cache_dequantize(t, formatted(1, -1), 1); }, {"num_kv_heads", "-1"}},
      {"format of the same page size", [&] { cache_dequantize(t, formatted(7, 24), 1); }, {"window_k", "32", "48"}},
      {"cache_format", [&] { cache_format(2, 16, 16, 6); }, {"k_bits", "6"}},
      {"cache_format", [&] { cache_format(2, 16, 16, 2, 2, 32, 0, 0, "int8"); }, {"scale_dtype", "int8"}},
      {"cache_window_capacity", [&] { cache_window_capacity(formatted(6, 8)); }, {"group_size", "8"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    expect_error(c.call, c.words);
    expect_unchanged(t, before);
  }
  // A group beyond float16 is found while it is encoded, into records and slots that hold no token yet: nothing that is
  // held changes. With `overflow` it is no error: the flag is set.
  const at::Tensor overflow = at::zeros({1}, at::kInt);
  const auto [kb, vb] = cache_dequantize(before, format, kTokens);
  for (bool flagged : {false, true}) {
    if (flagged) {
      cache_append(t, big, big_v, format, {}, overflow);
      EXPECT_EQ(overflow.item<int>(), 1);
    } else {
      expect_error([&] { cache_append(t, big, big_v, format); }, {"k or v", "65504", "float32"});
    }
    EXPECT_TRUE(same_bits(t.lengths, before.lengths));
    EXPECT_TRUE(same_bits(t.quantized_lengths, before.quantized_lengths));
    const auto [kd, vd] = cache_dequantize(t, format, kTokens);
    EXPECT_TRUE(same_bits(kd, kb));
    EXPECT_TRUE(same_bits(vd, vb));
  }
}

}  // namespace
}  // namespace kivi::test
