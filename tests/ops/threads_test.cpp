// kivi::KVCache and threads of the caller: own caches, and one cache that all of them use.
#include <atomic>
#include <thread>

#include "tests/ops/model.h"

namespace kivi::test {
namespace {

void run_threads(size_t count, const std::function<void(size_t)>& work) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; i++) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& t : threads) t.join();
}

// 10,000 steps of a cache of its own: decoding, reading, going back, branching, as a server does.
TEST(Threads, EightWithTheirOwnCachesEqualTheSerialRun) {
  const at::Tensor data = randn({1, 2, 4000, 16}, 1), queries = randn({1, 4, 4000, 16}, 2);
  const auto run = [&](size_t thread) {
    CacheOptions o = options_of(2, 16, 16, 16, 2, kAllBits[thread % 5], 2);
    o.v_rotated = thread >= 4;
    KVCache cache(o);
    at::Tensor sum = at::zeros({4, 16}, at::kDouble);
    for (int64_t i = 0; i < 10'000; i++) {
      const int64_t at = (i * 7 + static_cast<int64_t>(thread) * 501) % 4000;
      const at::Tensor x = data.narrow(2, at, 1), q = queries.narrow(2, at, 1);
      switch (i % 50) {
        case 30:
          cache.truncate(cache.length() - 3);
          break;
        case 40:
          sum += cache.attend(q)[0].squeeze(1);
          break;
        default:
          sum += cache.forward(q, x, x)[0].squeeze(1);
      }
      if (cache.length() > 150) cache.truncate(60);
    }
    return std::pair(cache.state(), sum);
  };
  std::vector<std::pair<KVCache::State, at::Tensor>> got(8);
  run_threads(8, [&](size_t i) { got[i] = run(i); });
  for (size_t i = 0; i < 8; i++) {
    const auto want = run(i);
    EXPECT_TRUE(same_state(got[i].first, want.first)) << i;
    EXPECT_TRUE(same_bits(got[i].second, want.second)) << i;
  }
}

// What each thread appends is told by its keys: 1000 * thread + n. Every token must be there once, those of a thread in
// their order, whatever the others did at the time; 8 bits over groups of equal channels keep the order told.
TEST(Threads, WritersOfOneCacheWaitForEachOther) {
  for (const int64_t residual : {10000, 16}) {
    CacheOptions o = options_of(1, 16, 16, residual, 2, 8, 8);
    o.scale_dtype = "float32";  // the numbers are too long for float16
    KVCache cache(o);
    run_threads(4, [&](size_t thread) {
      for (int64_t i = 0; i < 500; i++) {
        const at::Tensor x =
            at::full({1, 1, 1, 16}, static_cast<double>(1000 * thread) + static_cast<double>(i), at::kFloat);
        cache.append(x, x);
      }
    });
    EXPECT_EQ(cache.length(), 2000);
    EXPECT_TRUE(same_state(KVCache::from_state(cache.state())->state(), cache.state()));
    const auto [k, v] = cache.dequantize();
    // A value of constant channels comes back to the bit; a key group may span all threads: 4000 / 255 apart.
    const at::Tensor told = v[0][0].select(1, 0).contiguous();
    EXPECT_LE((k - v).abs().max().item<double>(), residual == 16 ? 8.0 : 0.0);
    std::vector<int64_t> next(4, 0);
    for (int64_t t = 0; t < 2000; t++) {
      const auto number = static_cast<int64_t>(told[t].item<float>());
      ASSERT_EQ(number % 1000, next[static_cast<size_t>(number / 1000)]++) << t;
    }
  }
}

// Readers see a cache between two calls of the writer, never within one.
TEST(Threads, ReadersSeeWholeSteps) {
  KVCache cache(options_of(2, 32, 16, 16, 2));
  const at::Tensor x = at::ones({1, 2, 7, 32}), q = at::zeros({1, 4, 1, 32});
  std::atomic<bool> done{false};
  std::atomic<int64_t> reads{0}, wrong{0};
  run_threads(4, [&](size_t thread) {
    if (thread == 0) {
      for (int i = 0; i < 400; i++) {
        switch (i % 20) {
          case 15:
            cache.truncate(cache.length() / 14 * 7);
            break;
          case 16:
            cache.repeat_interleave(1);
            break;
          case 17:
            cache.reserve(cache.length() + 1000);
            break;
          case 18:
            cache.reorder(longs({0}));
            break;
          default:
            cache.append(x, x);
        }
      }
      done = true;
      return;
    }
    do {
      const int64_t before = cache.length();
      if (before % 7 != 0) wrong++;
      const at::Tensor out = cache.attend(q);
      // All keys are equal and all values are 1, or there are none.
      if ((out - 1).abs().max().item<double>() > 1e-3 && out.abs().max().item<double>() != 0) wrong++;
      const auto [k, v] = cache.dequantize();
      if (k.size(2) % 7 != 0 || k.size(2) != v.size(2)) wrong++;
      const auto copy = thread == 1 ? cache.clone() : KVCache::from_state(cache.state());
      if (copy->length() % 7 != 0 || copy->nbytes() < 0) wrong++;
      if (cache.nbytes() < 0 || cache.batch_size() > 1) wrong++;
      reads++;
    } while (!done);
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_GE(reads, 3);  // once each at least
}

}  // namespace
}  // namespace kivi::test
