// The saved form of kivi::KVCache: it holds what is held, and no more; what was tampered with is refused.
#include <functional>

#include "tests/ops/model.h"
#include "tests/sealed.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- saved form

// C22
TEST(State, RoundTripAndTenMoreTokens) {
  for (int64_t k_bits : kAllBits) {
    for (int64_t v_bits : {2, 3}) {
      const CacheOptions o = options_of(2, 12, 16, 8, 4, k_bits, v_bits);
      for (int64_t tokens : {0, 1, 4, 5, 7, 8, 9, 27, 28, 29, 37, 170}) {
        const at::Tensor k = randn({2, 2, tokens + 10, 12}, 82), v = randn({2, 2, tokens + 10, 12}, 83);
        KVCache cache(o);
        append_range(cache, k, v, 0, tokens);
        const auto loaded = KVCache::from_state(cache.state());
        ASSERT_TRUE(same_state(loaded->state(), cache.state())) << tokens;
        ASSERT_EQ(loaded->length(), tokens);
        for (int64_t t = tokens; t < tokens + 10; t++) {
          append_range(cache, k, v, t, t + 1);
          append_range(*loaded, k, v, t, t + 1);
        }
        ASSERT_TRUE(same_state(loaded->state(), cache.state())) << tokens;
        ASSERT_TRUE(same_bits(std::get<0>(loaded->dequantize()), std::get<0>(cache.dequantize())));
      }
    }
  }
}

TEST(State, RoundTripAfterReorderTruncateAndRaggedRows) {
  CacheOptions o = options_of(2, 12, 16, 8, 4);
  o.precision = "exact";
  o.range_search = true;
  o.value_head_dim = 20;
  const at::Tensor k = randn({3, 2, 300, 12}, 84, at::kHalf), v = randn({3, 2, 300, 20}, 85, at::kHalf);
  KVCache cache(o);
  cache.append(k, v, longs({300, 17, 150}));
  cache.select(longs({0, 2, 2, 1, 0}));
  cache.truncate(141);
  const at::Tensor kn = randn({5, 2, 9, 12}, 86, at::kHalf), vn = randn({5, 2, 9, 20}, 87, at::kHalf);
  cache.append(kn, vn, longs({9, 1, 0, 3, 9}));
  const auto loaded = KVCache::from_state(cache.state());
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
  EXPECT_EQ(loaded->options().precision, "exact");
  EXPECT_TRUE(loaded->options().range_search);
  for (int i = 0; i < 40; i++) {
    cache.append(kn.narrow(2, i % 9, 1), vn.narrow(2, i % 9, 1));
    loaded->append(kn.narrow(2, i % 9, 1), vn.narrow(2, i % 9, 1));
  }
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
}

TEST(State, HoldsWhatIsHeldAndSharesNothing) {
  const at::Tensor k = randn({1, 2, 2000, 32}, 88);
  KVCache cache(options_of(2, 32, 32, 32, 4));
  for (int64_t t = 0; t < 2000; t += 100) append_range(cache, k, k, t, t + 100);
  cache.truncate(300);
  const auto state = cache.state();
  int64_t bytes = 0;
  for (const at::Tensor& t : std::get<2>(state)) bytes += static_cast<int64_t>(t.storage().nbytes());
  EXPECT_LT(bytes, cache.nbytes() / 3);
  const auto loaded = KVCache::from_state(state);
  for (const at::Tensor& t : std::get<2>(state)) t.zero_();
  EXPECT_TRUE(same_state(loaded->state(), cache.state()));
}

// Sizes that no other bit width shares.
KVCache::State sample_state() {
  CacheOptions o = options_of(2, 64, 32, 8, 4);
  o.value_head_dim = 48;
  KVCache cache(o);
  cache.append(randn({1, 2, 175, 64}, 89), randn({1, 2, 175, 48}, 90));
  return cache.state();
}

// What set_key_order gave waits for rows that have no order yet, also those to come.
TEST(State, KeepsTheGivenKeyOrder) {
  CacheOptions o = options_of(1, 20, 16, 0, 0);
  o.k_classes = {16, 4, 4, 2};
  const at::Tensor order = at::arange(19, -1, -1, at::kLong).unsqueeze(0), x = randn({2, 1, 16, 20}, 91);
  KVCache cache(o);
  cache.set_key_order(order);
  const auto fresh = KVCache::from_state(cache.state());
  fresh->append(x, x);
  EXPECT_TRUE(at::equal(fresh->key_order(), order.expand({2, 1, 20})));
  cache.append(x, x, longs({16, 3}));
  const auto begun = KVCache::from_state(cache.state());
  begun->append(x, x, longs({0, 13}));
  EXPECT_TRUE(at::equal(begun->key_order(), order.expand({2, 1, 20})));
  EXPECT_TRUE(same_state(KVCache::from_state(begun->state())->state(), begun->state()));

  KVCache::State bad = cache.state();
  std::get<2>(bad).back() = order.expand({2, 20}).to(at::kShort);
  expect_error([&] { KVCache::from_state(bad); }, {"given order", "[2, 20]"});
  bad = cache.state();
  std::get<2>(bad).back().fill_(3);
  expect_error([&] { KVCache::from_state(bad); }, {"order", "once"});
}

// A cache made of these would throw at its first use.
TEST(State, OrdersOfKeysThatAreNone) {
  CacheOptions o = options_of(2, 20, 16, 0, 0);
  o.k_classes = {16, 4, 4, 2};
  const at::Tensor x = randn({2, 2, 20, 20}, 92);
  KVCache cache(o);
  cache.append(x, x, longs({20, 3}));
  const KVCache::State good = cache.state();
  ASSERT_TRUE(same_state(KVCache::from_state(sealed(good))->state(), good));
  const auto with = [&](size_t i, const std::function<void(at::Tensor)>& change) {
    KVCache::State bad = good;
    std::get<2>(bad)[i] = std::get<2>(good)[i].clone();
    change(std::get<2>(bad)[i]);
    return sealed(bad);
  };
  for (const int64_t channel : {-1, 7, 20, -20}) {  // row 0 has an order: channel 7 stands in it already
    for (const int64_t place : {0, 19}) {
      if (std::get<2>(good)[4][0][1][place].item<int64_t>() == channel) continue;
      const auto bad = with(4, [&](const at::Tensor& t) { t[0][1][place] = channel; });
      expect_error([&] { KVCache::from_state(bad); }, {"k_order[0][1]", std::to_string(channel)});
    }
  }
  const auto begun = with(4, [](const at::Tensor& t) { t[1][0][0] = 3; });  // row 1 has none
  expect_error([&] { KVCache::from_state(begun); }, {"k_order[1][0]"});
  const auto rest = with(4, [](const at::Tensor& t) { t[1][1][5] = 3; });
  expect_error([&] { KVCache::from_state(rest); }, {"k_order[1][1]", "-1"});
  for (const float bad : {-1.0f, kNan}) {
    const auto squares = with(5, [&](const at::Tensor& t) { t[1][1][5] = bad; });
    expect_error([&] { KVCache::from_state(squares); }, {"query_squares"});
  }
}

// This library shares pages between rows that are alike in them. A state may share one between rows of which one has
// more of it, as long as what is there is there.
TEST(State, APageOfRowsThatFillItDifferently) {
  const CacheOptions o = options_of(2, 12, 16, 0, 0);
  const at::Tensor k = randn({1, 2, 60, 12}, 93), v = randn({1, 2, 60, 12}, 94);
  KVCache longer(o), shorter(o);
  append_range(longer, k, v, 0, 37);
  append_range(shorter, k, v, 0, 20);
  for (const bool longer_first : {true, false}) {
    const KVCache::State a = (longer_first ? longer : shorter).state(), b = (longer_first ? shorter : longer).state();
    KVCache::State both = a;
    auto& [header, ints, tensors] = both;
    const auto lengths = static_cast<int64_t>(ints.size()) - 2;
    ints[2] = 2;
    ints.insert(ints.begin() + lengths + 1, std::get<1>(b)[static_cast<size_t>(lengths)]);
    ints.push_back(std::get<1>(b).back());
    tensors[0] = std::get<2>(longer.state())[0];
    tensors[1] = at::zeros({2, 1}, at::kInt);
    for (const size_t i : {size_t{2}, size_t{3}}) tensors[i] = at::cat({std::get<2>(a)[i], std::get<2>(b)[i]}, 1);
    const auto loaded = KVCache::from_state(sealed(both));
    append_range(*loaded, k.expand({2, 2, 60, 12}), v.expand({2, 2, 60, 12}), 40, 60);
    for (const int64_t row : {0, 1}) {
      const auto alone = ((row == 0) == longer_first ? longer : shorter).clone();
      append_range(*alone, k, v, 40, 60);
      const auto [kr, vr] = loaded->dequantize();
      const auto [ka, va] = alone->dequantize();
      EXPECT_TRUE(same_bits(kr[row].narrow(1, 0, ka.size(2)), ka[0])) << row;
      EXPECT_TRUE(same_bits(vr[row].narrow(1, 0, va.size(2)), va[0])) << row;
    }
  }
}

TEST(State, TamperedTensorsAreRefused) {
  const KVCache::State good = sample_state();
  ASSERT_TRUE(same_state(KVCache::from_state(good)->state(), good));
  const size_t count = std::get<2>(good).size();
  ASSERT_EQ(count, 4u);
  for (size_t i = 0; i < count; i++) {
    const at::Tensor t = std::get<2>(good)[i];
    std::vector<at::Tensor> wrong = {at::Tensor(),
                                     t.to(at::kDouble),
                                     t.to(t.scalar_type() == at::kInt ? at::kLong : at::kShort),
                                     t.narrow(0, 0, 0),
                                     at::cat({t, t}, 0),
                                     t.unsqueeze(0),
                                     t.flatten(),
                                     t.narrow(t.dim() - 1, 0, t.size(-1) - 1),
                                     at::empty(t.sizes(), t.options().device(at::kMeta))};
    for (size_t w = 0; w < wrong.size(); w++) {
      KVCache::State bad = good;
      std::get<2>(bad)[i] = wrong[w];
      SCOPED_TRACE("tensor " + std::to_string(i) + ", change " + std::to_string(w));
      expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache"});
    }
    KVCache::State strided = good;
    std::get<2>(strided)[i] = t.transpose(0, t.dim() - 1).contiguous().transpose(0, t.dim() - 1);
    EXPECT_TRUE(same_state(KVCache::from_state(strided)->state(), good)) << "strides of tensor " << i;
  }
  for (size_t keep = 0; keep < count; keep++) {
    KVCache::State bad = good;
    std::get<2>(bad).resize(keep);
    expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache", "tensors"});
  }
  KVCache::State bad = good;
  std::get<2>(bad).push_back(at::zeros({1}));
  expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache", "tensors"});
  for (int32_t page : {-1, 2, 1 << 30}) {
    bad = good;
    std::get<2>(bad)[1] = std::get<2>(good)[1].clone();
    std::get<2>(bad)[1][0][1] = page;
    expect_error([&] { KVCache::from_state(bad); }, {"block_table", std::to_string(page)});
  }
}

TEST(State, TamperedIntegersAreRefused) {
  const KVCache::State good = sample_state();
  const auto& ints = std::get<1>(good);
  ASSERT_EQ(ints.size(), 26u);
  for (size_t i = 0; i < ints.size(); i++) {
    for (int64_t value : {ints[i] + 1, ints[i] - 1, ints[i] + 16, ints[i] * 2 + 3, int64_t{-1000}, int64_t{1} << 62,
                          std::numeric_limits<int64_t>::min()}) {
      KVCache::State bad = good;
      std::get<1>(bad)[i] = value;
      SCOPED_TRACE("integer " + std::to_string(i) + " is " + std::to_string(value));
      expect_error([&] { KVCache::from_state(bad); }, {});
    }
  }
  for (size_t keep = 0; keep < ints.size(); keep++) {
    KVCache::State bad = good;
    std::get<1>(bad).resize(keep);
    expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache"});
  }
  KVCache::State bad = good;
  std::get<0>(bad) = "another class";
  expect_error([&] { KVCache::from_state(bad); }, {"another class", "kivi.KVCache"});
  bad = good;
  for (const int64_t old : {1, 2}) {
    std::get<1>(bad)[0] = old;
    expect_error([&] { KVCache::from_state(bad); }, {"version", std::to_string(old), "3"});
  }
}

// Every bit of the integers, and bits all over the tensors.
TEST(State, EveryFlippedBitIsRefused) {
  const KVCache::State good = sample_state();
  EXPECT_TRUE(same_state(KVCache::from_state(good)->state(), good));
  for (size_t i = 0; i < std::get<1>(good).size(); i++) {
    for (int bit = 0; bit < 64; bit++) {
      KVCache::State bad = good;
      auto& x = std::get<1>(bad)[i];
      x = static_cast<int64_t>(static_cast<uint64_t>(x) ^ uint64_t{1} << bit);
      SCOPED_TRACE("bit " + std::to_string(bit) + " of integer " + std::to_string(i));
      expect_error([&] { KVCache::from_state(bad); }, {});
    }
  }
  for (size_t i = 0; i < std::get<2>(good).size(); i++) {
    const at::Tensor& t = std::get<2>(good)[i];
    const auto bits = static_cast<int64_t>(t.nbytes()) * 8;
    for (int64_t bit = 0; bit < bits; bit += 1 + bits / 997) {
      KVCache::State bad = good;
      std::get<2>(bad)[i] = t.clone();
      static_cast<uint8_t*>(std::get<2>(bad)[i].data_ptr())[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      SCOPED_TRACE("bit " + std::to_string(bit) + " of tensor " + std::to_string(i));
      expect_error([&] { KVCache::from_state(bad); }, {"saved KVCache"});
    }
  }
}

}  // namespace
}  // namespace kivi::test
