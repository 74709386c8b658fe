// kivi::KVCache: rows of different lengths, truncate, and calls that move, share and copy rows, to the bit.
#include <random>
#include <set>

#include "tests/ops/memory_watch.h"
#include "tests/ops/model.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- ragged rows

TEST(Cache, RaggedRowsEqualRowsOfTheirOwnAndPaddingIsNeverRead) {
  for (auto type : {at::kFloat, at::kBFloat16}) {
    const CacheOptions o = options_of(2, 20, 16, 8, 3);
    KVCache cache(o);
    std::vector<std::unique_ptr<KVCache>> alone;
    Model model(o, 4, type);
    for (int b = 0; b < 4; b++) alone.push_back(std::make_unique<KVCache>(o));
    std::mt19937 rng(5);
    for (int step = 0; step < 60; step++) {
      const int64_t width = step == 0 ? 50 : static_cast<int64_t>(rng() % 9) + 1;
      at::Tensor k = randn({4, 2, width, 20}, rng(), type), v = randn({4, 2, width, 20}, rng(), type);
      std::vector<int64_t> counts;
      for (int64_t b = 0; b < 4; b++) {
        const int64_t count = static_cast<int64_t>(rng() % static_cast<uint64_t>(width + 1));
        counts.push_back(count);
        k[b].narrow(1, count, width - count).fill_(step % 2 == 0 ? kNan : kInf);
        v[b].narrow(1, count, width - count).fill_(kNan);
        alone[static_cast<size_t>(b)]->append(k.narrow(0, b, 1).narrow(2, 0, count),
                                              v.narrow(0, b, 1).narrow(2, 0, count));
      }
      cache.append(k, v, longs(counts));
      model.append(k, v, counts);
      ASSERT_TRUE(model.matches(cache)) << "step " << step;
      const auto [kd, vd] = cache.dequantize();
      ASSERT_TRUE(kd.isfinite().all().item<bool>() && vd.isfinite().all().item<bool>());
      for (int64_t b = 0; b < 4; b++) {
        const KVCache& row = *alone[static_cast<size_t>(b)];
        const int64_t n = row.length();
        ASSERT_EQ(cache.lengths()[b].item<int64_t>(), n);
        ASSERT_TRUE(same_bits(kd[b].narrow(1, 0, n), std::get<0>(row.dequantize())[0]));
        ASSERT_TRUE(same_bits(vd[b].narrow(1, 0, n), std::get<1>(row.dequantize())[0]));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- truncate and rows

// C12
TEST(Cache, TruncateToEveryLengthThenGoOn) {
  for (int64_t sink : {0, 4}) {
    for (int64_t residual : {0, 5, 16}) {
      const CacheOptions o = options_of(2, 8, 16, residual, sink, 2, 4);
      const at::Tensor k = randn({2, 2, 75, 8}, 31), v = randn({2, 2, 75, 8}, 32);
      const at::Tensor more_k = randn({2, 2, 40, 8}, 33), more_v = randn({2, 2, 40, 8}, 34);
      for (int64_t n = 0; n <= 76; n++) {
        KVCache cache(o);
        Model model(o, 2, at::kFloat);
        cache.append(k, v);
        model.append(k, v);
        const auto [k_before, v_before] = cache.dequantize();
        cache.truncate(n);
        model.truncate(n);
        ASSERT_EQ(cache.length(), std::min<int64_t>(n, 75));
        const auto [kd, vd] = cache.dequantize();
        ASSERT_TRUE(same_bits(kd, k_before.narrow(2, 0, cache.length()))) << "keys kept by " << n;
        ASSERT_TRUE(same_bits(vd, v_before.narrow(2, 0, cache.length()))) << "values kept by " << n;
        ASSERT_TRUE(model.matches(cache)) << n;
        for (int64_t t = 0; t < 40; t += 1 + n % 3 * 6) {
          const int64_t last = std::min<int64_t>(40, t + 1 + n % 3 * 6);
          append_range(cache, more_k, more_v, t, last);
          model.append(more_k.narrow(2, t, last - t), more_v.narrow(2, t, last - t));
        }
        ASSERT_TRUE(model.matches(cache)) << "after going on from " << n;
      }
    }
  }
  KVCache cache(options_of(1, 8, 16, 0, 0));
  expect_error([&] { cache.truncate(-1); }, {"n must not be negative", "-1"});
}

TEST(Cache, TruncateOfRaggedRowsCutsTheLongerOnesOnly) {
  const CacheOptions o = options_of(1, 8, 16, 0, 2);
  const at::Tensor k = randn({3, 1, 60, 8}, 35), v = randn({3, 1, 60, 8}, 36);
  KVCache cache(o);
  Model model(o, 3, at::kFloat);
  cache.append(k, v, longs({60, 10, 41}));
  model.append(k, v, {60, 10, 41});
  cache.truncate(40);
  model.truncate(40);
  EXPECT_TRUE(at::equal(cache.lengths(), longs({40, 10, 40})));
  EXPECT_TRUE(model.matches(cache));
}

TEST(Cache, RolledBackDraftsLeaveTheSameBits) {
  const CacheOptions o = options_of(2, 16, 16, 32, 4);
  const at::Tensor k = randn({1, 2, 200, 16}, 37), v = randn({1, 2, 200, 16}, 38);
  const at::Tensor draft = randn({1, 2, 5, 16}, 39);
  KVCache cache(o), plain(o);
  append_range(cache, k, v, 0, 100);
  append_range(plain, k, v, 0, 100);
  int64_t equal = 0;
  for (int64_t t = 100; t < 200; t++) {
    const bool flushes = plain.quantized_length() != std::max<int64_t>(0, t + 5 - 36) / 16 * 16;
    cache.append(draft, draft);
    cache.truncate(t);
    if (!flushes) {
      ASSERT_TRUE(same_state(cache.state(), plain.state())) << t;
      equal++;
    } else {
      // The draft pushed a group of accepted tokens out of the window: it stays quantised, as a token is quantised
      // once.
      ASSERT_EQ(cache.length(), t);
    }
    append_range(cache, k, v, t, t + 1);
    append_range(plain, k, v, t, t + 1);
  }
  EXPECT_GT(equal, 60);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
}

TEST(Cache, PagesAreReusedAfterTruncate) {
  const at::Tensor k = randn({1, 1, 1500, 16}, 40);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k, k);
  const int64_t bytes = cache.nbytes();
  for (int64_t n : {0, 700, 129, 1499}) {
    cache.truncate(n);
    append_range(cache, k, k, n, 1500);
    EXPECT_EQ(cache.nbytes(), bytes) << n;
  }
}

TEST(Cache, TruncatedPagesServeOtherRows) {
  const at::Tensor k = randn({2, 1, 2048, 16}, 48);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k.narrow(2, 0, 1024), k.narrow(2, 0, 1024));
  const int64_t bytes = cache.nbytes();
  cache.truncate(0);
  cache.append(k, k, longs({2048, 0}));
  // Row 0 needs the pages of both; only the block table may grow.
  EXPECT_LE(cache.nbytes(), bytes + 256);
}

TEST(Cache, RowsShareTheirPagesUntilTheyDiffer) {
  for (int64_t prompt : {40, 133, 300}) {  // the last page partly filled, just begun, and several pages
    const CacheOptions o = options_of(2, 16, 16, 5, 4);
    const at::Tensor k = randn({2, 2, prompt, 16}, 41), v = randn({2, 2, prompt, 16}, 42);
    KVCache cache(o);
    Model model(o, 2, at::kFloat);
    cache.append(k, v);
    model.append(k, v);
    const int64_t pool_bytes = cache_page_bytes(cache_format(2, 16, std::nullopt, 2, 2, 16, 5, 4));
    const int64_t pages = (cache.quantized_length() + 127) / 128 * 2;
    const int64_t rest = cache.nbytes() - pages * pool_bytes;
    cache.repeat_interleave(3);
    model.select({0, 0, 0, 1, 1, 1});
    ASSERT_TRUE(model.matches(cache));
    EXPECT_LE(cache.nbytes(), pages * pool_bytes + 3 * rest) << "repeating copied pages";
    std::mt19937 rng(7);
    for (int step = 0; step < 120; step++) {
      const at::Tensor kn = randn({6, 2, 1, 16}, rng()), vn = randn({6, 2, 1, 16}, rng());
      cache.append(kn, vn);
      model.append(kn, vn);
      if (step % 10 == 3) {
        std::vector<int64_t> rows;
        for (int i = 0; i < 6; i++) rows.push_back(static_cast<int64_t>(rng() % 6));
        cache.reorder(longs(rows));
        model.select(rows);
      }
      ASSERT_TRUE(model.matches(cache)) << "step " << step;
    }
    cache.select(longs({4}));
    model.select({4});
    ASSERT_TRUE(model.matches(cache));
  }
}

// A row that quantises nothing copies no page, and the last of the rows that write into a page keeps it.
TEST(Cache, SharedPagesAreCopiedOnlyWhereTheyMust) {
  const CacheOptions o = options_of(1, 16, 16, 0, 0);
  const int64_t page = cache_page_bytes(cache_format(1, 16, std::nullopt, 2, 2, 16, 0, 0));
  const at::Tensor k = randn({1, 1, 16, 16}, 49), more = randn({4, 1, 16, 16}, 50);
  KVCache cache(o);
  cache.append(k, k);
  cache.repeat_interleave(4);
  const int64_t bytes = cache.nbytes();
  append_range(cache, more, more, 0, 15);
  EXPECT_EQ(cache.nbytes(), bytes) << "nothing was quantised";
  append_range(cache, more, more, 15, 16);
  EXPECT_EQ(cache.nbytes(), bytes + 3 * page) << "four rows, four pages";
  Model model(o, 4, at::kFloat);
  const at::Tensor first = k.expand({4, 1, 16, 16});
  model.append(first, first);
  model.append(more, more);
  EXPECT_TRUE(model.matches(cache));
}

TEST(Cache, PagesThatNoRowNamesAreReused) {
  const at::Tensor k = randn({4, 1, 512, 16}, 43);
  KVCache cache(options_of(1, 16, 16, 0, 0));
  cache.append(k, k);
  cache.select(longs({2}));
  const int64_t bytes = cache.nbytes();
  // Three rows' pages are free: room for 1536 more tokens.
  const at::Tensor more = randn({1, 1, 1536, 16}, 44);
  cache.append(more, more);
  EXPECT_LE(cache.nbytes(), bytes + 64) << "the pool grew although it had free pages";
  EXPECT_TRUE(same_bits(std::get<0>(cache.dequantize()).narrow(2, 0, 0), k.narrow(0, 0, 1).narrow(2, 0, 0)));
}

// Any sequence of calls against the model.
TEST(Cache, RandomSequencesOfCallsMatchTheModel) {
  for (uint32_t seed = 0; seed < 24; seed++) {
    std::mt19937 rng(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
    const int64_t groups[] = {16, 32, 64, 128}, residuals[] = {0, 1, 15, 32, 128};
    CacheOptions o = options_of(1 + below(3), 1 + below(24), groups[below(4)], residuals[below(5)], below(2) * 4,
                                kAllBits[static_cast<size_t>(below(5))], kAllBits[static_cast<size_t>(below(5))]);
    o.value_head_dim = 1 + below(40);
    const auto type = seed % 3 == 0 ? at::kFloat : seed % 3 == 1 ? at::kHalf : at::kBFloat16;
    int64_t batch = 1 + below(3);
    auto cache = c10::make_intrusive<KVCache>(o);
    Model model(o, batch, type);
    for (int step = 0; step < 80; step++) {
      const int64_t what = below(10);
      std::string did = "append";
      if (what < 6 || cache->batch_size() == 0) {
        const int64_t count = what < 3 ? 1 : below(what < 5 ? 20 : 150);
        const at::Tensor k = randn({batch, o.num_kv_heads, count, o.head_dim}, rng(), type);
        const at::Tensor v = randn({batch, o.num_kv_heads, count, *o.value_head_dim}, rng(), type);
        std::vector<int64_t> counts;
        for (int64_t b = 0; b < batch; b++) counts.push_back(below(4) == 0 ? below(count + 1) : count);
        if (below(2) == 0) counts.clear();
        cache->append(k, v, counts.empty() ? std::optional<at::Tensor>() : longs(counts));
        model.append(k, v, counts);
      } else if (what == 6) {
        const int64_t n = below(cache->length() + 2);
        did = "truncate " + std::to_string(n);
        cache->truncate(n);
        model.truncate(n);
      } else if (what == 7) {
        std::vector<int64_t> rows;
        const int64_t count = below(3) == 0 ? 1 + below(4) : batch;
        for (int64_t i = 0; i < count; i++) rows.push_back(below(batch));
        did = "select";
        cache->select(longs(rows));
        model.select(rows);
        batch = count;
      } else if (what == 8) {
        did = "clone";
        const auto old = cache;
        cache = old->clone();
        const at::Tensor k = randn({batch, o.num_kv_heads, 40, o.head_dim}, rng(), type);
        const at::Tensor v = randn({batch, o.num_kv_heads, 40, *o.value_head_dim}, rng(), type);
        old->append(k, v);  // must not show in the clone
        old->truncate(3);
      } else {
        did = "save and load";
        cache = KVCache::from_state(cache->state());
      }
      ASSERT_TRUE(model.matches(*cache)) << "seed " << seed << " step " << step << " after " << did;
    }
  }
}

TEST(Cache, CloneSharesNothing) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 200, 16}, 45), v = randn({2, 2, 200, 16}, 46);
  KVCache cache(o);
  append_range(cache, k, v, 0, 150);
  const auto copy = cache.clone();
  const auto before = copy->state();
  EXPECT_TRUE(same_state(before, cache.state()));
  append_range(cache, k, v, 150, 200);
  EXPECT_TRUE(same_state(copy->state(), before));
  const auto grown = cache.state();
  copy->truncate(10);
  copy->append(-k, -v);
  EXPECT_TRUE(same_state(cache.state(), grown));
  EXPECT_EQ(copy->options().group_size, 16);
}

TEST(Cache, ReserveMakesRoomOnce) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 2000, 16}, 47);
  KVCache cache(o), plain(o);
  expect_error([&] { cache.reserve(100); }, {"reserve"});
  append_range(cache, k, k, 0, 1);
  append_range(plain, k, k, 0, 1);
  cache.reserve(2000);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  const int64_t bytes = cache.nbytes();
  {
    const Watched memory;
    for (int64_t t = 1; t < 2000; t++) append_range(cache, k, k, t, t + 1);
    EXPECT_EQ(memory->allocated, 0) << "an append allocated although there was room";
  }
  EXPECT_EQ(cache.nbytes(), bytes);
  append_range(plain, k, k, 1, 2000);
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  cache.reserve(5);
  EXPECT_EQ(cache.nbytes(), bytes);
  expect_error([&] { cache.reserve(-1); }, {"tokens", "-1"});
}

}  // namespace
}  // namespace kivi::test
