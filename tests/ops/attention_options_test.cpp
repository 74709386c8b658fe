// Attention of kivi::KVCache and kivi::cache_attention against a softmax in double precision: the rules of who sees
// what. Masks, limits and the other options, and rows of different lengths.
#include <random>

#include "tests/ops/attention_reference.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- masks and options

// C14: B = Hkv, so that a mask whose heads were mistaken for rows of the batch would be legal.
class Masks : public ::testing::TestWithParam<int64_t> {};

TEST_P(Masks, EveryShapeTypeAndStride) {
  const int64_t keys = GetParam(), rows = 3;
  KVCache cache(exact_options(2, 16, 16, 4, 0));
  cache.append(randn({2, 2, keys, 16}, 201), randn({2, 2, keys, 16}, 202));
  const at::Tensor q = randn({2, 4, rows, 16}, 203);
  uint64_t seed = 204;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{keys},
                                                                             {1},
                                                                             {rows, keys},
                                                                             {rows, 1},
                                                                             {1, keys},
                                                                             {4, rows, keys},
                                                                             {4, 1, 1},
                                                                             {1, 1, rows, keys},
                                                                             {2, 1, rows, keys},
                                                                             {2, 1, 1, keys},
                                                                             {1, 4, rows, keys},
                                                                             {1, 4, 1, keys},
                                                                             {2, 4, rows, keys},
                                                                             {2, 4, 1, 1}}) {
    const at::Tensor additive = randn(shape, seed++) * 2, keep = randn(shape, seed++) > -0.5;
    at::Tensor with_infinities = additive.masked_fill(keep.logical_not(), -INFINITY);
    // The same patterns as views with other strides.
    std::vector<int64_t> wide = shape;
    for (int64_t& n : wide) n = n * 2 + 1;
    at::Tensor sliced = at::full(wide, kNan);
    for (int64_t d = 0; d < sliced.dim(); d++) sliced = sliced.slice(d, 1, 1 + 2 * shape[static_cast<size_t>(d)], 2);
    sliced.copy_(additive);
    at::Tensor expanded = additive;
    if (shape.size() == 4) expanded = additive.expand({2, 4, rows, keys});
    const at::Tensor transposed =
        additive.dim() >= 2 ? additive.transpose(-1, -2).contiguous().transpose(-1, -2) : additive;
    for (const at::Tensor& mask : {additive, keep, with_infinities, sliced, expanded, transposed,
                                   additive.to(at::kHalf), additive.to(at::kBFloat16), keep.expand_as(keep)}) {
      for (bool causal : {true, false}) {
        AttentionOptions o;
        o.attn_mask = mask;
        o.is_causal = causal;
        std::ostringstream what;
        what << mask.scalar_type() << " " << mask.sizes() << " causal " << causal;
        expect_attends(cache, q, o, limits::kExact, what.str());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Keys, Masks, ::testing::Values(9, 40, 150),
                         [](const auto& p) { return "K" + std::to_string(p.param); });

TEST(Attention, MasksOfForwardCoverTheCacheAndTheNewTokens) {
  for (int64_t prefix : {0, 20, 60}) {
    KVCache cache(exact_options(2, 16, 16, 4, 0));
    if (prefix > 0) cache.append(randn({2, 2, prefix, 16}, 211), randn({2, 2, prefix, 16}, 212));
    const at::Tensor k = randn({2, 2, 5, 16}, 213), v = randn({2, 2, 5, 16}, 214), q = randn({2, 4, 5, 16}, 215);
    AttentionOptions o;
    o.attn_mask = randn({2, 4, 5, prefix + 5}, 216) > -0.7;
    const auto [kd, vd] = cache.dequantize();
    const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2), o) : reference(q, k, v, o);
    expect_near(cache.forward(q, k, v, o), want.out, limits::kExact, std::to_string(prefix));
  }
}

TEST(Attention, RowsThatSeeNothingGiveZero) {
  KVCache cache(exact_options(2, 16, 16, 4, 0));
  cache.append(randn({1, 2, 60, 16}, 221), randn({1, 2, 60, 16}, 222));
  at::Tensor keep = at::ones({2, 60}, at::kBool);
  keep[0].fill_(false);
  const at::Tensor additive = at::zeros({2, 60}).masked_fill(keep.logical_not(), -INFINITY);
  for (const at::Tensor& mask : {keep, additive}) {
    AttentionOptions o;
    o.attn_mask = mask;
    const auto [out, lse] = cache.attend_with_lse(randn({1, 4, 2, 16}, 223), o);
    EXPECT_EQ(out.select(2, 0).abs().max().item<double>(), 0.0);
    EXPECT_TRUE((lse.select(2, 0) == -INFINITY).all().item<bool>());
    EXPECT_GT(out.select(2, 1).abs().max().item<double>(), 0.0);
    o.sinks = at::ones({4});
    EXPECT_EQ(cache.attend(randn({1, 4, 2, 16}, 223), o).select(2, 0).abs().max().item<double>(), 0.0);
    EXPECT_TRUE(
        (std::get<1>(cache.attend_with_lse(randn({1, 4, 2, 16}, 223), o)).select(2, 0) == 1.0).all().item<bool>());
  }
}

TEST(Attention, SoftcapWindowSinksAlibiAndScale) {
  KVCache cache(exact_options(2, 32, 16, 8, 4));
  cache.append(randn({2, 2, 150, 32}, 231), randn({2, 2, 150, 32}, 232));
  std::mt19937 rng(1);
  for (int i = 0; i < 150; i++) {
    AttentionOptions o;
    if (rng() % 2 == 0) o.softcap = 0.5 + static_cast<double>(rng() % 30);
    if (rng() % 2 == 0) o.window = 1 + static_cast<int64_t>(rng() % (rng() % 2 == 0 ? 8 : 160));
    if (rng() % 2 == 0) o.sinks = randn({4}, rng());
    if (rng() % 2 == 0) o.alibi_slopes = (rng() % 2 == 0 ? randn({4}, rng()) : randn({2, 4}, rng())).abs() * 0.1;
    if (rng() % 2 == 0) o.scale = 0.05 + 0.01 * static_cast<double>(rng() % 30);
    if (rng() % 4 == 0) o.attn_mask = randn({2, 4, 1, 150}, rng()) > -0.5;
    o.is_causal = rng() % 4 != 0;
    const int64_t rows = 1 + static_cast<int64_t>(rng() % 5);
    std::ostringstream what;
    what << "softcap " << o.softcap << " window " << o.window << " sinks " << o.sinks.has_value() << " alibi "
         << o.alibi_slopes.has_value() << " causal " << o.is_causal << " rows " << rows;
    expect_attends(cache, randn({2, 4, rows, 32}, rng()), o, limits::kExactScores, what.str());
  }
}

// Found by fuzzing: positions less the window overflowed, and pages were left out.
TEST(Attention, TheLargestWindowIsNone) {
  KVCache cache(exact_options(1, 16, 16, 4, 20));
  cache.append(randn({1, 1, 300, 16}, 231), randn({1, 1, 300, 16}, 232));
  const at::Tensor q = randn({1, 1, 310, 16}, 233);
  for (const bool causal : {true, false}) {
    AttentionOptions o;
    o.is_causal = causal;
    const at::Tensor expected = cache.attend(q, o);
    for (const int64_t less : {0, 1, 9, 400}) {
      o.window = std::numeric_limits<int64_t>::max() - less;
      EXPECT_TRUE(same_bits(cache.attend(q, o), expected)) << less;
    }
  }
}

TEST(Attention, OptionsHoldForNewTokensToo) {
  std::mt19937 rng(2);
  for (int i = 0; i < 60; i++) {
    const int64_t prefix = static_cast<int64_t>(rng() % 3) * 37, count = 1 + static_cast<int64_t>(rng() % 20);
    KVCache cache(exact_options(2, 24, 16, 8, 4));
    if (prefix > 0) cache.append(randn({2, 2, prefix, 24}, rng()), randn({2, 2, prefix, 24}, rng()));
    AttentionOptions o;
    if (rng() % 2 == 0) o.softcap = 3.0;
    if (rng() % 2 == 0) o.window = 1 + static_cast<int64_t>(rng() % 30);
    if (rng() % 2 == 0) o.sinks = randn({4}, rng());
    if (rng() % 2 == 0) o.alibi_slopes = randn({2, 4}, rng()).abs() * 0.1;
    o.is_causal = rng() % 3 != 0;
    const at::Tensor k = randn({2, 2, count, 24}, rng()), v = randn({2, 2, count, 24}, rng()),
                     q = randn({2, 4, count, 24}, rng());
    const auto [kd, vd] = cache.dequantize();
    const Result want = prefix > 0 ? reference(q, at::cat({kd, k}, 2), at::cat({vd, v}, 2), o) : reference(q, k, v, o);
    expect_near(cache.forward(q, k, v, o), want.out, limits::kExact,
                std::to_string(prefix) + " + " + std::to_string(count));
  }
}

// C10 d
TEST(Attention, ALearnedSinkJoinsTheDenominator) {
  for (int64_t tokens : {3, 48}) {
    KVCache cache(exact_options(1, 16, 16, 0, 0));
    cache.append(at::zeros({1, 1, tokens, 16}), at::ones({1, 1, tokens, 16}));
    AttentionOptions o;
    o.sinks = at::zeros({2});
    const double want = static_cast<double>(tokens) / static_cast<double>(tokens + 1);
    EXPECT_LE(max_difference(cache.attend(at::zeros({1, 2, 1, 16}), o), at::full({1, 2, 1, 16}, want)), 1e-6);
  }
}

// ---------------------------------------------------------------------------------------------- ragged rows

TEST(Attention, RaggedRowsEqualRowsOfTheirOwn) {
  for (auto type : {at::kFloat, at::kBFloat16}) {
    const CacheOptions o = exact_options(2, 24, 16, 8, 4);
    KVCache cache(o);
    std::vector<std::unique_ptr<KVCache>> alone;
    for (int b = 0; b < 4; b++) alone.push_back(std::make_unique<KVCache>(o));
    std::mt19937 rng(3);
    for (int step = 0; step < 30; step++) {
      const int64_t width = step % 5 == 0 ? 40 : 3;
      at::Tensor k = randn({4, 2, width, 24}, rng(), type), v = randn({4, 2, width, 24}, rng(), type);
      at::Tensor q = randn({4, 4, width, 24}, rng(), type);
      std::vector<int64_t> counts;
      for (int64_t b = 0; b < 4; b++) {
        const int64_t count = step == 0 && b == 1 ? 0 : static_cast<int64_t>(rng() % static_cast<uint64_t>(width + 1));
        counts.push_back(count);
        for (const at::Tensor& t : {q, k, v}) t[b].narrow(1, count, width - count).fill_(kNan);
      }
      const at::Tensor out = cache.forward(q, k, v, {}, longs(counts));
      ASSERT_FALSE(out.isnan().any().item<bool>()) << "padding was read";
      for (int64_t b = 0; b < 4; b++) {
        const int64_t n = counts[static_cast<size_t>(b)];
        EXPECT_TRUE((out[b].narrow(1, n, width - n) == 0).all().item<bool>());
        // As wide as the batch, so that both run the same number of query rows.
        const auto mine = [&](const at::Tensor& t) { return t.narrow(0, b, 1); };
        KVCache& row = *alone[static_cast<size_t>(b)];
        const at::Tensor want = row.forward(mine(q), mine(k), mine(v), {}, longs({n}));
        ASSERT_TRUE(same_bits(out[b], want[0])) << "step " << step << " row " << b;
      }
      const at::Tensor q1 = randn({4, 4, 1, 24}, rng(), type);
      const at::Tensor attended = cache.attend(q1);
      expect_near(attended, reference(q1, cache).out, type == at::kFloat ? limits::kExact : 2e-2);
      for (int64_t b = 0; b < 4; b++) {
        ASSERT_TRUE(same_bits(attended[b], alone[static_cast<size_t>(b)]->attend(q1.narrow(0, b, 1))[0]));
      }
    }
    EXPECT_TRUE(cache.lengths().min().item<int64_t>() != cache.length());
  }
}

// How far a batch is padded depends on its other rows, and must not show in a row's bits.
TEST(Attention, PaddingDecidesNothing) {
  const at::Tensor k = randn({1, 2, 1500, 64}, 71), v = randn({1, 2, 1500, 64}, 72);
  const at::Tensor q = randn({1, 8, 64, 64}, 73), nk = randn({1, 2, 64, 64}, 74), nv = randn({1, 2, 64, 64}, 75);
  for (const int64_t window : {0, 700}) {
    for (const int64_t count : {1, 5, 8}) {
      AttentionOptions o;
      o.window = window;
      at::Tensor first;
      for (const int64_t padded : {8, 9, 33, 64}) {
        KVCache cache(2, 64);
        cache.append(k, v);
        const at::Tensor out =
            cache.forward(q.narrow(2, 0, padded), nk.narrow(2, 0, padded), nv.narrow(2, 0, padded), o, longs({count}));
        if (!first.defined()) first = out.narrow(2, 0, count);
        EXPECT_TRUE(same_bits(out.narrow(2, 0, count), first))
            << padded << " of which " << count << ", window " << window;
        EXPECT_EQ(out.narrow(2, count, padded - count).abs().sum().item<float>(), 0);
      }
    }
  }
}

// The first tokens go through torch's own attention where that says the same. Each option alone makes it say another
// thing.
TEST(Attention, TheFirstTokensWithEachOptionAlone) {
  const at::Tensor q = randn({2, 4, 30, 16}, 251), k = randn({2, 2, 30, 16}, 252), v = randn({2, 2, 30, 16}, 253);
  std::vector<AttentionOptions> all(7);
  all[1].is_causal = false;
  all[2].window = 5;
  all[3].softcap = 0.5;
  all[4].sinks = randn({4}, 254);
  all[5].alibi_slopes = randn({4}, 255).abs();
  all[6].attn_mask = randn({30, 30}, 256) > -1;
  for (size_t i = 0; i < all.size(); i++) {
    KVCache cache(exact_options(2, 16, 16, 100, 0));
    const at::Tensor first = cache.forward(q, k, v, all[i]);
    expect_near(first, reference(q, cache, all[i]).out, limits::kExact, "option " + std::to_string(i));
  }
}

TEST(Attention, MasksOfRaggedRowsCountKeysFromTheFirst) {
  KVCache cache(exact_options(2, 16, 16, 4, 0));
  cache.append(randn({3, 2, 70, 16}, 241), randn({3, 2, 70, 16}, 242), longs({70, 9, 33}));
  for (int64_t rows : {1, 2}) {
    AttentionOptions o;
    o.attn_mask = randn({3, 4, rows, 70}, 243) > -0.5;
    expect_attends(cache, randn({3, 4, rows, 16}, 244), o);
    o.attn_mask = randn({3, 4, rows, 70}, 245);
    o.window = 20;
    expect_attends(cache, randn({3, 4, rows, 16}, 244), o);
  }
}

}  // namespace
}  // namespace kivi::test
