// kivi::KVCache: the memory that it takes, torch's modes, and threads.
#include <c10/core/InferenceMode.h>

#include <thread>

#include "tests/ops/memory_watch.h"
#include "tests/ops/model.h"

namespace kivi::test {
namespace {

// ---------------------------------------------------------------------------------------------- memory

// C16
TEST(Cache, BytesPerTokenAreTheRecordsAndNothingElse) {
  struct Row {
    int64_t k_bits, v_bits, bytes;
  };
  for (const Row& row : {Row{2, 2, 96}, {4, 2, 128}, {4, 4, 160}, {1, 1, 64}, {3, 3, 128}, {8, 8, 288}}) {
    const CacheOptions o = options_of(8, 128, 32, 128, 0, row.k_bits, row.v_bits);
    const auto bytes_at = [&](int64_t tokens) {
      KVCache cache(o);
      const at::Tensor x = at::zeros({1, 8, tokens, 128}, at::kHalf);
      cache.append(x, x);
      return cache.nbytes();
    };
    // Page by page: 128 tokens and one entry of the table.
    EXPECT_EQ(bytes_at(128 + 640) - bytes_at(128 + 512), 128 * 8 * row.bytes + 4) << row.k_bits << " " << row.v_bits;
    // 896 quantised tokens and the exact window of R + G slots; the rest is 8-byte lengths, the table and a flag.
    EXPECT_EQ(bytes_at(1024), 896 * 8 * row.bytes + 160 * 8 * 512 + 7 * 4 + 8 + 8 + 4);
  }
}

TEST(Cache, NbytesIsWhatIsAllocatedAndThePromptIsReleased) {
  for (auto type : {at::kFloat, at::kHalf}) {
    const Watched memory;
    KVCache cache(options_of(4, 64, 32, 64, 4));
    at::Tensor prompt = at::zeros({2, 4, 3000, 192}, type);
    cache.append(prompt.narrow(3, 0, 64), prompt.narrow(3, 64, 64));
    EXPECT_EQ(prompt.storage().use_count(), 1u);
    prompt = at::Tensor();
    EXPECT_EQ(memory->live, cache.nbytes());
    for (int i = 0; i < 200; i++) {
      const at::Tensor x = at::zeros({2, 4, 1, 64}, type);
      cache.append(x, x);
    }
    EXPECT_EQ(memory->live, cache.nbytes());
    cache.repeat_interleave(2);
    EXPECT_EQ(memory->live, cache.nbytes());
    cache.truncate(100);
    cache.select(longs({3, 0}));
    EXPECT_EQ(memory->live, cache.nbytes());
    const auto copy = cache.clone();
    EXPECT_EQ(memory->live, cache.nbytes() + copy->nbytes());
    cache.reset();
    EXPECT_EQ(memory->live, copy->nbytes());
  }
}

TEST(Cache, NbytesAfter1000TokensIsBelowAThirdOfHalf) {
  const at::Tensor x = randn({1, 8, 1000, 128}, 61, at::kHalf);
  KVCache cache(options_of(8, 128, 32, 32, 4));
  for (int64_t t = 0; t < 1000; t += 10) append_range(cache, x, x, t, t + 10);
  EXPECT_LT(static_cast<double>(cache.nbytes()), 0.35 * 1000 * 8 * 512);
}

TEST(Cache, GrowthCopiesNothingPerStep) {
  KVCache cache(options_of(2, 32, 16, 16, 4));
  const at::Tensor x = randn({1, 2, 1, 32}, 62);
  const Watched memory;
  int64_t steps_that_allocate = 0;
  for (int i = 0; i < 8000; i++) {
    const int64_t calls = memory->calls;
    cache.append(x, x);
    steps_that_allocate += memory->calls != calls;
  }
  EXPECT_LT(steps_that_allocate, 60);
  EXPECT_LT(memory->allocated, 8 * cache.nbytes());
}

TEST(Cache, ADecodeStepAllocatesItsOutputAndNoCopyOfTheCache) {
  KVCache cache(options_of(8, 128, 32, 128, 4));
  const at::Tensor prompt = randn({1, 8, 4096, 128}, 63, at::kHalf);
  cache.append(prompt, prompt);
  const at::Tensor q = randn({1, 32, 1, 128}, 64), x = randn({1, 8, 1, 128}, 65, at::kHalf);
  for (int i = 0; i < 2; i++) {
    const Watched memory;
    cache.forward(q, x, x);
    EXPECT_LE(memory->largest, 2 * 32 * 128 * 4);
  }
}

// ---------------------------------------------------------------------------------------------- modes and threads

// C20
TEST(Cache, WorksAcrossInferenceModeAndNoGrad) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({2, 2, 200, 16}, 71), v = randn({2, 2, 200, 16}, 72);
  const auto steps = [&](KVCache& cache, int which) {
    switch (which) {
      case 0:
        append_range(cache, k, v, 0, 100);
        break;
      case 1:
        append_range(cache, k, v, 100, 190);
        break;
      case 2:
        cache.truncate(120);
        break;
      case 3:
        cache.reorder(longs({1, 0}));
        break;
      case 4:
        append_range(cache, k, v, 120, 170);
        break;
      case 5:
        cache.repeat_interleave(2);
        break;
      default:
        cache.append(k.repeat({2, 1, 1, 1}), v.repeat({2, 1, 1, 1}));
        break;
    }
  };
  KVCache plain(o);
  for (int i = 0; i < 7; i++) steps(plain, i);
  for (int modes = 0; modes < 128; modes += 3) {  // which of the steps run in inference mode
    KVCache cache(o);
    for (int i = 0; i < 7; i++) {
      const c10::InferenceMode mode((modes >> i & 1) != 0);
      steps(cache, i);
    }
    ASSERT_TRUE(same_state(cache.state(), plain.state())) << modes;
  }
  KVCache no_grad(o);
  for (int i = 0; i < 7; i++) {
    const at::NoGradGuard guard;
    steps(no_grad, i);
  }
  EXPECT_TRUE(same_state(no_grad.state(), plain.state()));
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = k.clone();
  }
  KVCache fed(o), want(o);
  fed.append(inference, inference);
  want.append(k, k);
  EXPECT_TRUE(same_state(fed.state(), want.state()));
}

TEST(Cache, RequiresGradIsDetachedAndBackwardRaises) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 100, 16}, 73).requires_grad_(), v = randn({1, 2, 100, 16}, 74).requires_grad_();
  const at::Tensor q = randn({1, 4, 1, 16}, 75).requires_grad_();
  KVCache cache(o), plain(o);
  cache.append(k, v);
  plain.append(k.detach(), v.detach());
  EXPECT_TRUE(same_state(cache.state(), plain.state()));
  const KVCache::State held = cache.state();
  for (const at::Tensor& t : std::get<2>(held)) {
    EXPECT_FALSE(t.requires_grad());
    EXPECT_FALSE(t.grad_fn());
  }
  EXPECT_EQ(k.use_count(), 1u);
  const at::Tensor out = cache.attend(q);
  EXPECT_TRUE(same_bits(out, plain.attend(q.detach())));
  expect_error([&] { out.sum().backward(); }, {"kivi::cache_attention"});
  const at::Tensor step = cache.forward(q, k.narrow(2, 0, 1), v.narrow(2, 0, 1));
  expect_error([&] { step.sum().backward(); }, {"kivi::cache_attention"});
  EXPECT_FALSE(q.grad().defined());
  EXPECT_FALSE(k.grad().defined());
}

// C21 b
TEST(Cache, DefaultDtypeChangesNothing) {
  const CacheOptions o = options_of(2, 16, 16, 5, 4);
  const at::Tensor k = randn({1, 2, 100, 16}, 76), v = randn({1, 2, 100, 16}, 77), q = randn({1, 4, 1, 16}, 78);
  KVCache plain(o);
  plain.append(k, v);
  for (auto type : {at::kDouble, at::kHalf}) {
    const DefaultDtype guard(type);
    KVCache cache(o);
    for (int64_t t = 0; t < 100; t++) append_range(cache, k, v, t, t + 1);
    EXPECT_TRUE(same_state(cache.state(), plain.state()));
    EXPECT_TRUE(same_bits(cache.attend(q), plain.attend(q)));
    EXPECT_TRUE(same_state(KVCache::from_state(cache.state())->state(), plain.state()));
  }
}

// C25
TEST(Cache, ThreadCountChangesNothing) {
  const CacheOptions o = options_of(6, 40, 32, 32, 4);
  const at::Tensor k = randn({2, 6, 1000, 40}, 79), v = randn({2, 6, 1000, 40}, 80);
  std::optional<KVCache::State> want;
  for (int count : {1, 2, 3, 8}) {
    const Threads guard(count);
    KVCache cache(o);
    append_range(cache, k, v, 0, 900), append_range(cache, k, v, 900, 1000);
    if (!want) want = cache.state();
    EXPECT_TRUE(same_state(cache.state(), *want)) << count << " threads";
  }
}

TEST(Cache, EachThreadItsOwnCache) {
  const CacheOptions o = options_of(2, 16, 16, 8, 4);
  const auto run = [&](uint64_t seed) {
    KVCache cache(o);
    for (uint64_t i = 0; i < 200; i++) {
      const at::Tensor x = randn({1, 2, 1, 16}, seed * 1000 + i);
      cache.forward(randn({1, 4, 1, 16}, i), x, x);
    }
    return cache.state();
  };
  std::vector<KVCache::State> got(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 8; i++) threads.emplace_back([&, i] { got[i] = run(i); });
  for (std::thread& t : threads) t.join();
  for (size_t i = 0; i < 8; i++) EXPECT_TRUE(same_state(got[i], run(i))) << i;
}

// C18: a batch stride of more than 2^31 elements; only the pages of the two rows are ever touched.
TEST(Cache, StridesBeyond31Bits) {
  const int64_t stride = (int64_t{1} << 31) + 64;
  KVCache far_away(options_of(1, 64, 32, 0, 0)), near_by(options_of(1, 64, 32, 0, 0));
  const at::Tensor big = at::empty({stride + 64 * 64}, at::kHalf);  // 4 GB of address space
  const at::Tensor x = big.as_strided({2, 1, 64, 64}, {stride, 64 * 64, 64, 1});
  x.copy_(randn({2, 1, 64, 64}, 81));
  far_away.append(x, x);
  near_by.append(x.contiguous(), x.contiguous());
  EXPECT_TRUE(same_state(far_away.state(), near_by.state()));
}

}  // namespace
}  // namespace kivi::test
