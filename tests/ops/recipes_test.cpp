// Recipes, and the options that they are made of, through kivi::KVCache: what a plain cache promises holds for each.
#include <functional>
#include <map>

#include "tests/ops/attention_reference.h"
#include "tests/ops/support.h"

namespace kivi::test {
namespace {

using Set = void (*)(CacheOptions&);

// Options by name, for caches of any size.
const std::map<std::string, Set>& option_sets() {
  static const std::map<std::string, Set> sets = {
      {"near_lossless", [](CacheOptions& o) { o.recipe = "near-lossless"; }},
      {"compact", [](CacheOptions& o) { o.recipe = "compact"; }},
      {"balanced", [](CacheOptions& o) { o.recipe = "balanced"; }},
      {"quality", [](CacheOptions& o) { o.recipe = "quality"; }},
      {"two_classes",
       [](CacheOptions& o) {
         if (o.head_dim > 16) o.k_classes = {16, 8, o.head_dim - 16, 2};
         if (o.head_dim % 16 == 0 && o.head_dim > 32) o.k_classes = {32, 3, o.head_dim - 32, 1};
       }},
      {"float8", [](CacheOptions& o) { o.scale_dtype = "float8"; }},
      {"float8_K3V1", [](CacheOptions& o) { o.scale_dtype = "float8", o.k_bits = 3, o.v_bits = 1; }},
      {"rotated", [](CacheOptions& o) { o.v_rotated = true; }},
      {"symmetric", [](CacheOptions& o) { o.v_symmetric = true, o.k_bits = 4; }},
      {"one_group_per_token",
       [](CacheOptions& o) { o.v_group_size = o.value_head_dim.value_or(o.head_dim), o.v_bits = 8; }},
      {"corrected",
       [](CacheOptions& o) {
         o.k_bias_correction = o.v_gain_correction = true;
         o.k_search = {0.95, 0.9};
         o.v_search = {0.8, 0.7};
         o.scale_dtype = "float32";
       }},
      {"all_of_it",
       [](CacheOptions& o) {
         o.scale_dtype = "float8";
         o.v_group_size = o.value_head_dim.value_or(o.head_dim);
         o.v_symmetric = o.v_rotated = o.k_bias_correction = o.v_gain_correction = o.range_search = true;
         o.k_bits = 2, o.v_bits = 3;
       }},
  };
  return sets;
}

// One order for all heads of a cache with classes, so that how its tokens come makes no difference.
void give_order(KVCache& cache) {
  const Format& f = cache.format();
  if (f.num_key_classes == 0) return;
  const at::Generator generator = at::detail::createCPUGenerator(18);
  std::vector<at::Tensor> heads;
  for (int64_t h = 0; h < f.num_kv_heads; h++) heads.push_back(at::randperm(f.head_dim, generator, at::kLong));
  cache.set_key_order(at::stack(heads));
}

class Recipes : public ::testing::TestWithParam<std::string> {
 protected:
  static CacheOptions make(int64_t heads, int64_t dim, int64_t group, int64_t residual, int64_t sink,
                           std::optional<int64_t> value_dim = std::nullopt) {
    CacheOptions o = options_of(heads, dim, group, residual, sink);
    o.value_head_dim = value_dim;
    option_sets().at(GetParam())(o);
    return o;
  }
};

TEST_P(Recipes, StreamedEqualsChunksAndOneShot) {
  for (const int64_t group : {16, 32, 64, 128}) {
    for (const int64_t dim : {8, 20, 64}) {
      for (const auto type : {at::kFloat, at::kBFloat16}) {
        const int64_t tokens = 4 + 7 + 2 * group + 5;
        const at::Tensor k = randn({2, 2, tokens, dim}, 1, type), v = randn({2, 2, tokens, dim}, 2, type);
        const CacheOptions o = make(2, dim, group, 7, 4);
        KVCache once(o), streamed(o), chunked(o);
        for (KVCache* cache : {&once, &streamed, &chunked}) give_order(*cache);
        once.append(k, v);
        for (int64_t t = 0; t < tokens; t++) append_range(streamed, k, v, t, t + 1);
        for (int64_t t = 0, i = 0; t < tokens; i++) {
          const int64_t next = std::min(tokens, t + (i * 7 + 3) % 23);
          append_range(chunked, k, v, t, next);
          t = next;
        }
        ASSERT_TRUE(same_state(streamed.state(), once.state())) << group << " " << dim;
        ASSERT_TRUE(same_state(chunked.state(), once.state())) << group << " " << dim;
      }
    }
  }
}

// Attention over the cache is attention over what dequantize gives, in both precisions, for ragged rows and GQA.
TEST_P(Recipes, AttendsToWhatItHolds) {
  for (const int64_t dim : {20, 64, 128}) {
    for (const bool exact : {true, false}) {
      CacheOptions o = make(2, dim, 32, 40, 4);
      o.precision = exact ? "exact" : "fast";
      KVCache cache(o);
      const at::Tensor k = randn({3, 2, 400, dim}, 3), v = randn({3, 2, 400, dim}, 4);
      const at::Tensor lengths = longs({400, 3, 217});
      cache.append(k, v, lengths);
      const at::Tensor q = randn({3, 8, 3, dim}, 5) / 4;
      const at::Tensor got = cache.attend(q);
      const auto [kd, vd] = cache.dequantize();
      for (int64_t b = 0; b < 3; b++) {
        const int64_t n = lengths[b].item<int64_t>();
        const at::Tensor mask = at::ones({3, n}, at::kBool).tril(n - 3);
        const auto rows = [&](const at::Tensor& t) {
          return t[b].narrow(1, 0, n).to(at::kDouble).repeat_interleave(4, 0).unsqueeze(0);
        };
        const at::Tensor want =
            at::scaled_dot_product_attention(q[b].unsqueeze(0).to(at::kDouble), rows(kd), rows(vd), mask);
        EXPECT_LE(max_difference(got[b], want[0]), exact ? limits::kExact : limits::kFastUnitQueries)
            << dim << " row " << b;
      }
    }
  }
}

TEST_P(Recipes, ThreadsAndBatchChangeNoBit) {
  const CacheOptions o = make(2, 64, 32, 32, 4);
  const at::Tensor k = randn({2, 2, 700, 64}, 6), v = randn({2, 2, 700, 64}, 7), q = randn({2, 4, 1, 64}, 8);
  const int before = at::get_num_threads();
  std::vector<at::Tensor> outputs;
  std::vector<KVCache::State> states;
  for (const int threads : {1, 2, 3, 8}) {
    at::set_num_threads(threads);
    KVCache cache(o);
    cache.append(k, v);
    outputs.push_back(cache.attend(q));
    states.push_back(cache.state());
  }
  at::set_num_threads(before);
  for (size_t i = 1; i < outputs.size(); i++) {
    EXPECT_TRUE(same_bits(outputs[i], outputs[0]));
    EXPECT_TRUE(same_state(states[i], states[0]));
  }
  KVCache one(o);
  one.append(k.narrow(0, 1, 1), v.narrow(0, 1, 1));
  EXPECT_TRUE(same_bits(one.attend(q.narrow(0, 1, 1)), outputs[0].narrow(0, 1, 1)));
}

TEST_P(Recipes, SavedRowsAndCopies) {
  const CacheOptions o = make(2, 48, 16, 20, 4, 80);
  const at::Tensor k = randn({2, 2, 300, 48}, 9), v = randn({2, 2, 300, 80}, 10), q = randn({2, 2, 2, 48}, 11);
  KVCache cache(o);
  cache.append(k, v);
  const auto back = KVCache::from_state(cache.state());
  EXPECT_TRUE(same_state(back->state(), cache.state()));
  EXPECT_EQ(back->format(), cache.format());
  EXPECT_TRUE(same_bits(back->attend(q), cache.attend(q)));
  const auto copy = cache.clone();
  EXPECT_TRUE(same_bits(copy->attend(q), cache.attend(q)));
  // A truncated cache goes on as one that never held more.
  copy->truncate(200);
  const auto [kt, vt] = copy->dequantize();
  const auto [kd, vd] = cache.dequantize();
  EXPECT_TRUE(same_bits(kt, kd.narrow(2, 0, 200)));
  EXPECT_TRUE(same_bits(vt, vd.narrow(2, 0, 200)));
  // Rows are shared, then written to each for itself.
  const auto rows = cache.clone();
  rows->select(longs({1, 0, 1}));
  EXPECT_TRUE(
      same_bits(rows->attend(q.index_select(0, longs({1, 0, 1}))), cache.attend(q).index_select(0, longs({1, 0, 1}))));
  append_range(*rows, randn({3, 2, 100, 48}, 12), randn({3, 2, 100, 80}, 13), 0, 100);
  const auto [kr, vr] = rows->dequantize();
  EXPECT_TRUE(same_bits(kr.narrow(2, 0, 200), kd.index_select(0, longs({1, 0, 1})).narrow(2, 0, 200)));
  EXPECT_TRUE(same_bits(vr.narrow(2, 0, 200), vd.index_select(0, longs({1, 0, 1})).narrow(2, 0, 200)));
}

// NaN and Inf make their own group NaN: of K one channel of G tokens, of V the groups of channels that one rotation or
// one scale joins.
TEST_P(Recipes, NaNStaysInItsGroup) {
  const CacheOptions o = make(1, 64, 32, 0, 0);
  for (const float bad : {kNan, kInf}) {
    at::Tensor k = randn({1, 1, 64, 64}, 14), v = randn({1, 1, 64, 64}, 15);
    KVCache good(o), spoilt(o);
    for (KVCache* cache : {&good, &spoilt}) give_order(*cache);
    good.append(k, v);
    k[0][0][40][3] = bad;
    v[0][0][10][33] = bad;
    spoilt.append(k, v);
    const auto [kg, vg] = good.dequantize();
    const auto [ks, vs] = spoilt.dequantize();
    at::Tensor k_lost = at::zeros({1, 1, 64, 64}, at::kBool), v_lost = at::zeros({1, 1, 64, 64}, at::kBool);
    k_lost.narrow(2, 32, 32).narrow(3, 3, 1).fill_(true);
    const bool whole = good.format().v_rotated || good.format().v_group_size == 64;
    v_lost.narrow(2, 10, 1).narrow(3, whole ? 0 : 32, whole ? 64 : 32).fill_(true);
    EXPECT_TRUE(at::equal(ks.isnan(), k_lost));
    EXPECT_TRUE(at::equal(vs.isnan(), v_lost));
    EXPECT_TRUE(same_bits(ks.masked_fill(k_lost, 0), kg.masked_fill(k_lost, 0)));
    EXPECT_TRUE(same_bits(vs.masked_fill(v_lost, 0), vg.masked_fill(v_lost, 0)));
  }
}

// A group beyond the range of the scales widens them; nothing that was held changes, and streaming still equals one
// shot.
TEST_P(Recipes, WideningChangesNothingThatIsHeld) {
  const CacheOptions o = make(2, 32, 16, 8, 2);
  at::Tensor k = randn({1, 2, 120, 32}, 16), v = randn({1, 2, 120, 32}, 17);
  k[0][1][70] *= 1e7;
  KVCache before(o), once(o), streamed(o);
  for (KVCache* cache : {&before, &once, &streamed}) give_order(*cache);
  before.append(k.narrow(2, 0, 60), v.narrow(2, 0, 60));
  once.append(k, v);
  for (int64_t t = 0; t < 120; t++) append_range(streamed, k, v, t, t + 1);
  EXPECT_TRUE(same_state(streamed.state(), once.state()));
  const bool widens = once.format().scale_type != before.format().scale_type;
  EXPECT_EQ(widens, o.scale_dtype != "float32");
  const int64_t held = 2 + before.quantized_length();
  const auto [k0, v0] = before.dequantize();
  const auto [k1, v1] = once.dequantize();
  EXPECT_TRUE(same_bits(k1.narrow(2, 0, held), k0.narrow(2, 0, held)));
  EXPECT_TRUE(same_bits(v1.narrow(2, 0, held), v0.narrow(2, 0, held)));
  EXPECT_TRUE(k1.isfinite().all().item<bool>());
  const auto back = KVCache::from_state(once.state());
  EXPECT_TRUE(same_state(back->state(), once.state()));
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& set : option_sets()) all.push_back(set.first);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Options, Recipes, ::testing::ValuesIn(names()), [](const auto& p) { return p.param; });

TEST(Recipe, KiviIsTheDefault) {
  CacheOptions o = options_of(2, 64, 32, 32, 0);
  const KVCache plain(o);
  o.recipe = "kivi";
  const KVCache named(o);
  EXPECT_EQ(plain.format(), named.format());
  EXPECT_DOUBLE_EQ(plain.bits_per_element(), 3.0);
}

// A scale that is rounded down must not put the zero of a float8 group out of reach.
TEST(Recipe, AConstantGroupComesBackToWithinHalfOfItsRaisedScale) {
  for (const int64_t bits : kAllBits) {
    CacheOptions o = options_of(1, 64, 16, 0, 0, bits, bits);
    o.scale_dtype = "float8";
    KVCache cache(o);
    // K: a constant in each channel. V: one in each token.
    const at::Tensor constants = at::exp2(at::linspace(-2, 3, 64)) * (1 - 2 * at::remainder(at::arange(64), 2));
    const at::Tensor k = constants.expand({1, 1, 64, 64}), v = constants.view({64, 1}).expand({1, 1, 64, 64});
    cache.append(k, v);
    const auto [k_back, v_back] = cache.dequantize();
    const float limit = zero_steps(bits) / kZeroReach * 1.0625f / 2 + 1e-6f;
    EXPECT_LE(((k_back - k) / k).abs().max().item<float>(), limit) << bits;
    EXPECT_LE(((v_back - v) / v).abs().max().item<float>(), limit) << bits;
  }
}

TEST(Recipe, BitsPerElementCountAllThatIsStored) {
  const auto bits = [](const char* recipe, int64_t dim, int64_t group) {
    CacheOptions o = options_of(3, dim, group, 32, 4);
    o.recipe = recipe;
    const KVCache cache(o);
    EXPECT_DOUBLE_EQ(cache.bits_per_element(), 8.0 * static_cast<double>(cache_page_bytes(cache_format(o))) /
                                                   static_cast<double>(3 * 128 * 2 * dim));
    return cache.bits_per_element();
  };
  EXPECT_DOUBLE_EQ(bits("kivi", 128, 32), 3.0);
  EXPECT_DOUBLE_EQ(bits("compact", 64, 64), 2.4375);
  EXPECT_DOUBLE_EQ(bits("compact", 64, 32), 2.5625);
  EXPECT_DOUBLE_EQ(bits("compact", 128, 32), 2.53125);
  EXPECT_DOUBLE_EQ(bits("balanced", 64, 32), 2.75);
  EXPECT_DOUBLE_EQ(bits("quality", 64, 64), 3.1875);
  EXPECT_DOUBLE_EQ(bits("quality", 64, 32), 3.3125);
  EXPECT_DOUBLE_EQ(bits("quality", 128, 32), 3.28125);
  EXPECT_DOUBLE_EQ(bits("near-lossless", 64, 64), 4.1875);
  EXPECT_DOUBLE_EQ(bits("near-lossless", 64, 32), 4.3125);
  EXPECT_DOUBLE_EQ(bits("near-lossless", 128, 32), 4.28125);
}

// The choice of the classes does not depend on how queries and keys lie in memory: a model has them as [B, T, H, D],
// and sums in another order would be other sums.
TEST(Recipe, StridesDoNotChooseTheClasses) {
  CacheOptions o = options_of(2, 48, 16, 8, 4);
  o.k_classes = {16, 4, 32, 2};
  const at::Tensor q = randn({2, 4, 90, 48}, 61), k = randn({2, 2, 90, 48}, 62);
  const auto state = [&](const at::Tensor& queries, const at::Tensor& keys) {
    KVCache cache(o);
    cache.append(keys, keys, std::nullopt, queries);
    return cache.state();
  };
  for (const auto& [i, j] : {std::pair{0, 1}, {1, 2}, {2, 3}, {1, 3}}) {
    const auto lying = [&, i = i, j = j](const at::Tensor& t) {
      return t.transpose(i, j).contiguous().transpose(i, j);
    };
    EXPECT_TRUE(same_state(state(lying(q), k), state(q, k))) << "queries, axes " << i << " and " << j;
    EXPECT_TRUE(same_state(state(q, lying(k)), state(q, k))) << "keys, axes " << i << " and " << j;
  }
}

// A range whose square overflows costs nothing where no query looks at it: 0 times Inf is no rank.
TEST(Recipe, ChannelsThatNoQuerySeesComeLastHoweverWide) {
  CacheOptions o = options_of(1, 32, 16, 0, 0);
  o.k_classes = {16, 4, 16, 2};
  at::Tensor k = randn({1, 1, 16, 32}, 63), q = at::ones({1, 2, 16, 32});
  for (const int64_t channel : {0, 5, 31}) {
    k.select(3, channel).mul_(1e30);
    q.select(3, channel).zero_();
  }
  KVCache cache(o);
  cache.append(k, k, std::nullopt, q);
  const at::Tensor few_bits = cache.key_order()[0][0].narrow(0, 16, 16);
  for (const int64_t channel : {0, 5, 31}) EXPECT_TRUE((few_bits == channel).any().item<bool>()) << channel;
}

// The channels that matter most get the most bits: by range, and by the queries that `forward` saw.
TEST(Recipe, ClassesTakeTheChannelsThatMatter) {
  CacheOptions o = options_of(2, 64, 32, 32, 4);
  o.k_classes = {16, 4, 48, 2};
  at::Tensor k = randn({2, 2, 200, 64}, 20) * 0.1, v = randn({2, 2, 200, 64}, 21), q = at::ones({2, 4, 200, 64}) * 0.1;
  const at::Tensor wide = at::arange(3, 64, 4, at::kLong);  // 16 channels
  k.index_copy_(3, wide, k.index_select(3, wide) * 20);
  KVCache by_range(o), by_query(o), streamed(o);
  by_range.append(k, v);
  const at::Tensor order = by_range.key_order();
  EXPECT_EQ(order.sizes(), at::IntArrayRef({2, 2, 64}));
  EXPECT_TRUE(at::equal(order.narrow(2, 0, 16), wide.expand({2, 2, 16})));
  // Queries a thousand times as large in other channels outweigh that, in the heads that they belong to.
  const at::Tensor asked = at::arange(0, 64, 4, at::kLong);
  q.narrow(1, 0, 2).index_fill_(3, asked, 100.0);
  by_query.forward(q, k, v);
  EXPECT_TRUE(at::equal(by_query.key_order().select(1, 0).narrow(1, 0, 16), asked.expand({2, 16})));
  EXPECT_TRUE(at::equal(by_query.key_order().select(1, 1).narrow(1, 0, 16), wide.expand({2, 16})));
  // Queries given to append count as those of forward; one stands for many.
  KVCache told(o);
  told.append(k, v, std::nullopt, q.square().sum(2, true).sqrt());
  EXPECT_TRUE(at::equal(told.key_order(), by_query.key_order()));
  expect_error([&] { KVCache(o).append(k, v, std::nullopt, q.narrow(1, 0, 3)); }, {"q", "3", "num_kv_heads"});
  expect_error([&] { KVCache(o).append(k, v, longs({200, 9}), q.narrow(2, 0, 3)); }, {"q", "3", "200"});
  // Nothing is chosen before it is needed, and nothing changes afterwards.
  for (int64_t t = 0; t < 200; t++) {
    append_range(streamed, k, v, t, t + 1);
    if (streamed.quantized_length() == 0) EXPECT_TRUE((streamed.key_order() == -1).all().item<bool>()) << t;
  }
  EXPECT_TRUE(at::equal(streamed.key_order(), order));
  streamed.append(randn({2, 2, 100, 64}, 22), randn({2, 2, 100, 64}, 23));
  EXPECT_TRUE(at::equal(streamed.key_order(), order));
  streamed.truncate(10);
  EXPECT_TRUE(at::equal(streamed.key_order(), order));
  streamed.select(longs({1, 1, 0}));
  EXPECT_TRUE(at::equal(streamed.key_order(), order.index_select(0, longs({1, 1, 0}))));
  // The wide channels come back better than with two bits for all.
  o.k_classes = {};
  KVCache plain(o);
  plain.append(k, v);
  const auto error = [&](const KVCache& cache) {
    return (std::get<0>(cache.dequantize()) - k).index_select(3, wide).square().mean().item<double>();
  };
  EXPECT_LT(error(by_range), 0.1 * error(plain));
}

// Rows of one batch choose for themselves, when their own time comes.
TEST(Recipe, RowsChooseForThemselves) {
  CacheOptions o = options_of(1, 32, 16, 8, 0);
  o.k_classes = {16, 4, 16, 2};
  at::Tensor k = randn({2, 1, 60, 32}, 24), v = randn({2, 1, 60, 32}, 25);
  k[0].narrow(2, 16, 16) *= 9;
  KVCache cache(o);
  cache.append(k, v, longs({60, 20}));
  EXPECT_EQ(cache.key_order()[0][0][0].item<int64_t>(), 16);
  EXPECT_EQ(cache.key_order()[1][0][0].item<int64_t>(), -1);
  const auto back = KVCache::from_state(cache.state());
  append_range(cache, k, v, 0, 40);
  append_range(*back, k, v, 0, 40);
  EXPECT_NE(cache.key_order()[1][0][0].item<int64_t>(), -1);
  EXPECT_TRUE(same_state(back->state(), cache.state()));
}

TEST(Recipe, OrdersAreChecked) {
  CacheOptions o = options_of(2, 32, 16, 8, 0);
  KVCache plain(o);
  expect_error([&] { plain.key_order(); }, {"k_classes"});
  expect_error([&] { plain.set_key_order(longs({0})); }, {"k_classes"});
  o.k_classes = {16, 4, 16, 2};
  KVCache cache(o);
  const at::Tensor order = at::arange(32, at::kLong).expand({2, 32}).clone();
  expect_error([&] { cache.set_key_order(order.to(at::kInt)); }, {"order", "Int"});
  expect_error([&] { cache.set_key_order(order.narrow(0, 0, 1)); }, {"order", "1", "2"});
  expect_error([&] { cache.set_key_order(order.narrow(1, 0, 31)); }, {"order", "31", "32"});
  order[1][3] = 4;
  expect_error([&] { cache.set_key_order(order); }, {"order", "32"});
  for (const auto& [classes, words] : std::vector<std::pair<std::vector<int64_t>, std::vector<std::string>>>{
           {{16}, {"k_classes", "1"}},
           {{16, 4, 15, 2}, {"head_dim", "31"}},
           {{16, 5, 16, 2}, {"bits", "5"}},
           {{8, 4, 24, 2}, {"multiple of 16", "8"}},
           {{16, 3, 16, 2}, {"32", "16"}},
           {{16, 4, 0, 2, 16, 2}, {"channels", "0"}},
           {{24, 4}, {"24", "32"}},
           {{16, 4, 4, 2, 4, 2, 4, 2, 4, 2}, {"k_classes", "4", "10"}}}) {
    o.k_classes = classes;
    expect_error([&] { KVCache bad(o); }, words);
  }
}

// The operators on plain tensors: they take the order, equal the class, and refuse an order that is none.
TEST(Recipe, OperatorsTakeTheOrder) {
  CacheOptions o = options_of(2, 32, 16, 8, 4);
  o.k_classes = {16, 4, 16, 2};
  const auto format = cache_format(o);
  const at::Tensor k = randn({2, 2, 70, 32}, 30), v = randn({2, 2, 70, 32}, 31), q = randn({2, 4, 1, 32}, 32);
  KVCache cache(o);
  cache.append(k, v);
  CacheTensors t = make_tensors(format, 2, 2);
  t.k_order = cache.key_order().to(at::kShort);
  cache_append(t, k, v, format);
  EXPECT_TRUE(same_bits(std::get<0>(cache_attention(q, t, format)), cache.attend(q)));
  EXPECT_TRUE(same_bits(std::get<0>(cache_dequantize(t, format, 70)), std::get<0>(cache.dequantize())));
  cache_truncate(t, format, 45);
  cache.truncate(45);
  EXPECT_TRUE(same_bits(std::get<0>(cache_dequantize(t, format, 45)), std::get<0>(cache.dequantize())));

  const auto with = [&](const at::Tensor& order) {
    CacheTensors bad = t;
    bad.k_order = order;
    return bad;
  };
  expect_error([&] { cache_attention(q, with({}), format); }, {"k_order", "2 classes"});
  expect_error([&] { cache_attention(q, with(t.k_order.to(at::kInt)), format); }, {"k_order", "Int", "Short"});
  expect_error([&] { cache_dequantize(with(t.k_order.narrow(2, 0, 31).contiguous()), format, 1); },
               {"k_order", "31", "32"});
  expect_error([&] { cache_dequantize(with(t.k_order.narrow(0, 0, 1)), format, 1); }, {"k_order", "1", "2"});
  expect_error([&] { cache_truncate(with(t.k_order.transpose(1, 2).contiguous().transpose(1, 2)), format, 1); },
               {"k_order"});
  for (const int16_t channel : {int16_t{-1}, int16_t{32}, int16_t{7}}) {
    at::Tensor twice = t.k_order.clone();
    twice[1][1].fill_(channel);
    expect_error([&] { cache_append(with(twice), k, v, format); }, {"k_order[1][1]", std::to_string(channel)});
    expect_error([&] { cache_attention(q, with(twice), format); }, {"k_order[1][1]", std::to_string(channel)});
  }
  const auto plain = cache_format(options_of(2, 32, 16, 8, 4));
  CacheTensors none = make_tensors(plain, 2, 2);
  none.k_order = t.k_order;
  expect_error([&] { cache_append(none, k, v, plain); }, {"k_order", "0 classes"});
  const at::Tensor meta_q = q.to(at::kMeta);
  CacheTensors meta = t;
  for (at::Tensor* part : {&meta.pool, &meta.block_table, &meta.lengths, &meta.quantized_lengths, &meta.sink_k,
                           &meta.sink_v, &meta.window_k, &meta.window_v, &meta.k_order}) {
    *part = part->to(at::kMeta);
  }
  EXPECT_EQ(std::get<0>(cache_attention(meta_q, meta, format)).sizes(), q.sizes());
  meta.k_order = at::Tensor();
  expect_error([&] { cache_attention(meta_q, meta, format); }, {"k_order", "2 classes"});
}

TEST(Recipe, ErrorsNameWhatIsWrong) {
  CacheOptions o = options_of(2, 64, 32, 32, 0);
  o.recipe = "tiny";
  expect_error([&] { KVCache cache(o); }, {"recipe", "tiny", "near-lossless"});
  o.recipe = "near-lossless";
  const std::vector<std::pair<const char*, std::function<void(CacheOptions&)>>> set_by_recipes = {
      {"k_bits", [](CacheOptions& c) { c.k_bits = 3; }},
      {"v_bits", [](CacheOptions& c) { c.v_bits = 3; }},
      {"scale_dtype", [](CacheOptions& c) { c.scale_dtype = "float32"; }},
      {"range_search", [](CacheOptions& c) { c.range_search = true; }},
      {"k_search", [](CacheOptions& c) { c.k_search = {0.9}; }},
      {"v_search", [](CacheOptions& c) { c.v_search = {0.9}; }},
      {"k_bias_correction", [](CacheOptions& c) { c.k_bias_correction = true; }},
      {"v_gain_correction", [](CacheOptions& c) { c.v_gain_correction = true; }},
      {"v_group_size", [](CacheOptions& c) { c.v_group_size = 64; }},
      {"v_symmetric", [](CacheOptions& c) { c.v_symmetric = true; }},
      {"v_rotated", [](CacheOptions& c) { c.v_rotated = true; }},
      {"k_classes", [](CacheOptions& c) {
         c.k_classes = {32, 4, 32, 2};
       }}};
  for (const auto& [name, set] : set_by_recipes) {
    CacheOptions both = o;
    set(both);
    expect_error([&] { KVCache cache(both); }, {"near-lossless", name});
  }
  o = options_of(2, 64, 32, 32, 0);
  o.v_group_size = 48;
  expect_error([&] { KVCache cache(o); }, {"v_group_size", "48", "32"});
  o.v_group_size = 0;
  expect_error([&] { KVCache cache(o); }, {"v_group_size", "0"});
  o.v_group_size = std::nullopt;
  o.k_search = {1.5};
  expect_error([&] { KVCache cache(o); }, {"k_search", "1.5"});
  o.k_search = std::vector<double>(17, 0.9);
  expect_error([&] { KVCache cache(o); }, {"k_search", "16", "17"});
  o.k_search = {};
  o.v_search = {0.0};
  expect_error([&] { KVCache cache(o); }, {"v_search", "0"});
  o.v_search = {};
  o.scale_dtype = "int8";
  expect_error([&] { KVCache cache(o); }, {"scale_dtype", "int8", "float8"});
}

}  // namespace
}  // namespace kivi::test
