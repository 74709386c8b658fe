// Memory that cannot be had: whichever allocation of a call fails, the call raises an error, the cache is what it was
// before, and the same call succeeds when there is memory again. And the memory that calls take at their highest point.
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>

#include "tests/ops/model.h"

namespace {

// All memory of the process goes through here: that of tensors, and that of operator new.
struct Memory {
  std::atomic<int64_t> until_failure{-1};  // allocations before the one that fails; negative: none does
  std::atomic<int64_t> live{0}, peak{0};
  std::atomic<bool> objects_too{false};  // operator new fails as well

  bool fails() { return until_failure >= 0 && until_failure.fetch_sub(1) == 0; }
  void take(size_t bytes) {
    const int64_t now = live += static_cast<int64_t>(bytes);
    int64_t highest = peak;
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
  }
  void give_back(size_t bytes) { live -= static_cast<int64_t>(bytes); }
} g_memory;

// The size stands before what is handed out.
void* allocate(size_t bytes, size_t alignment) {
  const size_t before = std::max(alignment, 2 * sizeof(size_t));
  void* block = nullptr;
  if (posix_memalign(&block, before, before + bytes) != 0) return nullptr;
  auto* const data = static_cast<char*>(block) + before;
  reinterpret_cast<size_t*>(data)[-1] = bytes;
  reinterpret_cast<size_t*>(data)[-2] = before;
  g_memory.take(bytes);
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  const size_t* const header = static_cast<size_t*>(data);
  g_memory.give_back(header[-1]);
  std::free(static_cast<char*>(data) - header[-2]);
}

void* allocate_object(size_t bytes, size_t alignment) {
  void* const data = g_memory.objects_too && g_memory.fails() ? nullptr : allocate(bytes, alignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

// The memory of tensors.
class TensorAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    TORCH_CHECK(!g_memory.fails(), "no memory for a tensor of ", bytes, " bytes");
    void* const data = ::allocate(bytes, 64);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void* operator new(size_t bytes) { return allocate_object(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes) { return allocate_object(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate_object(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate_object(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, alignof(std::max_align_t));
}
void operator delete(void* data) noexcept { release(data); }
void operator delete[](void* data) noexcept { release(data); }
void operator delete(void* data, size_t) noexcept { release(data); }
void operator delete[](void* data, size_t) noexcept { release(data); }
void operator delete(void* data, std::align_val_t) noexcept { release(data); }
void operator delete[](void* data, std::align_val_t) noexcept { release(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { release(data); }
void operator delete[](void* data, size_t, std::align_val_t) noexcept { release(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { release(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { release(data); }

namespace kivi::test {
namespace {

class Allocation : public ::testing::Test {
 protected:
  void SetUp() override {
    usual_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&ours_, /*priority=*/100);
  }
  void TearDown() override { c10::SetCPUAllocator(usual_, /*priority=*/100); }

  c10::Allocator* usual_ = nullptr;
  TensorAllocator ours_;
};

using Cache = c10::intrusive_ptr<KVCache>;
using Action = std::function<std::vector<at::Tensor>(KVCache&)>;

struct Scene {
  const char* name;
  CacheOptions options;
  int64_t batch, tokens;  // held before the call
  Action action;
  int64_t copies = 1;  // of each row
};

std::vector<Scene> scenes() {
  const auto k_of = [](KVCache& c, int64_t tokens, double factor = 1) {
    return randn({std::max<int64_t>(c.batch_size(), 1), c.format().num_kv_heads, tokens, c.format().head_dim}, 5) *
           factor;
  };
  const auto appends = [=](int64_t tokens, double factor = 1) {
    return [=](KVCache& c) {
      const at::Tensor x = k_of(c, tokens, factor), q = x.repeat_interleave(2, 1);
      c.append(x, x, std::nullopt, q);
      return std::vector<at::Tensor>();
    };
  };
  const auto forwards = [=](int64_t tokens, bool ragged = false) {
    return [=](KVCache& c) {
      const at::Tensor x = k_of(c, tokens), q = x.repeat_interleave(2, 1);
      const auto lengths = ragged ? std::optional(at::arange(c.batch_size(), at::kLong)) : std::nullopt;
      std::vector<at::Tensor> out;
      out.reserve(1);  // nothing of the test's own may fail after the call
      out.push_back(c.forward(q, x, x, {}, lengths));
      return out;
    };
  };
  const auto reads = [](const auto& read) { return [=](KVCache& c) { return std::vector<at::Tensor>(read(c)); }; };
  const auto changes = [](const auto& change) {
    return [=](KVCache& c) {
      change(c);
      return std::vector<at::Tensor>();
    };
  };
  const CacheOptions plain = options_of(2, 32, 16, 8, 2);
  CacheOptions classes = plain, balanced;
  classes.k_classes = {16, 4, 16, 2};
  balanced.num_kv_heads = 2, balanced.head_dim = 64, balanced.residual_length = 8, balanced.recipe = "balanced";
  const std::string file =
      (std::filesystem::temp_directory_path() / ("kivi_allocation_" + std::to_string(getpid()))).string();
  return {
      {"the first tokens", plain, 0, 0, appends(300)},
      {"the first tokens, with classes", classes, 0, 0, appends(100)},
      {"the first tokens, of a recipe", balanced, 0, 0, appends(100)},
      {"a token", plain, 2, 100, appends(1)},
      {"a flush into a new page", plain, 1, 130 + 9, appends(20)},
      {"classes are chosen", classes, 2, 8, appends(30)},
      {"classes are chosen, of a recipe", balanced, 2, 8, appends(90)},
      {"queries before classes are chosen", classes, 2, 3, appends(2)},
      {"scales are widened", plain, 2, 40, appends(40, 1e5)},
      {"8-bit scales are widened", balanced, 2, 100, appends(90, 1e6)},
      {"a shared page is copied", plain, 1, 60, appends(40), 3},
      {"prefill", plain, 0, 0, forwards(100)},
      {"prefill of a recipe", balanced, 0, 0, forwards(100)},
      {"decode", plain, 2, 100, forwards(1)},
      {"decode of a recipe", balanced, 2, 200, forwards(1)},
      {"ragged rows", plain, 3, 50, forwards(2, true)},
      {"truncate", plain, 2, 100, changes([](KVCache& c) { c.truncate(37); })},
      {"truncate of a recipe", balanced, 2, 100, changes([](KVCache& c) { c.truncate(37); })},
      {"select", classes, 2, 100, changes([](KVCache& c) {
         c.select(longs({1, 1}));
       })},
      {"reserve", plain, 2, 100, changes([](KVCache& c) { c.reserve(5000); })},
      {"reset", plain, 2, 100, changes([](KVCache& c) { c.reset(); })},
      {"set_key_order", classes, 2, 5, changes([](KVCache& c) {
         c.set_key_order(at::arange(32, at::kLong).expand({2, 32}));
       })},
      {"attend", plain, 2, 100, reads([](KVCache& c) {
         return std::vector{c.attend(at::ones({2, 4, 3, 32}))};
       })},
      {"dequantize", balanced, 2, 100, reads([](KVCache& c) {
         return std::vector{std::get<0>(c.dequantize()), std::get<1>(c.dequantize())};
       })},
      {"clone", classes, 2, 100, reads([](KVCache& c) { return std::get<2>(c.clone()->state()); })},
      {"saved state", balanced, 2, 100,
       reads([](KVCache& c) { return std::get<2>(KVCache::from_state(c.state())->state()); })},
      {"file", classes, 2, 100, reads([=](KVCache& c) {
         save_caches({c.clone()}, file);
         const auto loaded = load_caches(file);
         std::filesystem::remove(file);
         return std::get<2>(loaded.at(0)->state());
       })},
  };
}

Cache build_scene(const Scene& scene) {
  auto cache = c10::make_intrusive<KVCache>(scene.options);
  if (scene.tokens == 0) return cache;
  const Format& f = cache->format();
  const at::Tensor x = randn({scene.batch, f.num_kv_heads, scene.tokens, f.head_dim}, 3);
  cache->append(x, x);
  cache->repeat_interleave(scene.copies);
  return cache;
}

// Lets one allocation of the scene's call after another fail. Returns how many there are.
int64_t fail_each(const Scene& scene, bool objects_too) {
  const Action& action = scene.action;
  const auto build = [&] { return build_scene(scene); };
  const bool shares_pages = scene.copies > 1;
  const Cache first = build();
  const std::vector<at::Tensor> want = action(*first);  // also takes what is taken once in a process
  const KVCache::State after = first->state();
  for (int64_t n = 0;; n++) {
    const Cache cache = build();
    const KVCache::State before = cache->state();
    const int64_t length = cache->length(), batch = cache->batch_size();
    const at::Tensor keys = std::get<0>(cache->dequantize());
    std::vector<at::Tensor> got;
    bool failed = false;
    g_memory.objects_too = objects_too;
    g_memory.until_failure = n;
    try {
      got = action(*cache);
    } catch (const std::exception&) {
      failed = true;
    }
    const bool reached = g_memory.until_failure < 0;
    g_memory.until_failure = -1;
    SCOPED_TRACE("allocation " + std::to_string(n));
    if (failed) {
      EXPECT_TRUE(reached) << "an error of its own";
      if (shares_pages) {  // rows may have got pages of their own, with the same tokens
        EXPECT_TRUE(same_bits(std::get<0>(cache->dequantize()), keys));
      } else {
        EXPECT_TRUE(same_state(cache->state(), before));
      }
      EXPECT_EQ(cache->length(), length);
      EXPECT_EQ(cache->batch_size(), batch);
      got = action(*cache);
    }
    // Otherwise there was none left, or torch did without what it asked for.
    EXPECT_TRUE(same_state(cache->state(), after));
    EXPECT_EQ(got.size(), want.size());
    for (size_t i = 0; i < std::min(got.size(), want.size()); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << i;
    if (::testing::Test::HasFailure()) return n;
    if (!reached) return n;
  }
}

// The same for every scene. Returns how many allocations there are in all.
int64_t fail_each_of_all(bool objects_too) {
  int64_t all = 0;
  for (const Scene& scene : scenes()) {
    SCOPED_TRACE(scene.name);
    all += fail_each(scene, objects_too);
    if (::testing::Test::HasFailure()) break;
  }
  std::cout << all << (objects_too ? " allocations of any kind" : " allocations of tensors") << ", each failed once\n";
  return all;
}

TEST_F(Allocation, AnyOfThoseOfTensorsMayFail) { EXPECT_GT(fail_each_of_all(false), 200); }

TEST_F(Allocation, AnyAllocationMayFail) { EXPECT_GT(fail_each_of_all(true), 1000); }

// Bytes above what was there before, at the highest point of `work`.
template <typename Work>
int64_t peak_of(const Work& work) {
  const int64_t before = g_memory.live;
  g_memory.peak = before;
  work();
  return g_memory.peak - before;
}

constexpr int64_t kScratch = 1 << 20;
constexpr int64_t kLayerHeads = 8, kQueryHeads = 32, kHeadDim = 128;

CacheOptions layer_options(const char* recipe) {
  CacheOptions o;
  o.num_kv_heads = kLayerHeads, o.head_dim = kHeadDim, o.recipe = recipe;
  return o;
}

// The bounds of the README. One decoded token: its output and a scratch that does not grow with the cache.
TEST_F(Allocation, PeakOfADecodeStep) {
  for (const char* recipe : {"kivi", "balanced"}) {
    for (const int64_t tokens : {1000, 16000}) {
      KVCache cache(layer_options(recipe));
      const at::Tensor prompt = randn({1, kLayerHeads, tokens, kHeadDim}, 1, at::kHalf);
      cache.append(prompt, prompt);
      cache.reserve(tokens + 500);
      const at::Tensor q = randn({1, kQueryHeads, 1, kHeadDim}, 2, at::kHalf), x = prompt.narrow(2, 0, 1);
      int64_t peak = 0;
      for (int i = 0; i < 200; i++) peak = std::max(peak, peak_of([&] { cache.forward(q, x, x); }));
      std::cout << recipe << ", decode over " << tokens << " tokens: " << peak << " bytes at most\n";
      EXPECT_LE(peak, kScratch);
    }
  }
}

// A chunk of a prompt over a cache: no scores of [T, T], no copy of the cache, dequantised or not.
TEST_F(Allocation, PeakOfAChunkOverACache) {
  constexpr int64_t kChunk = 256;
  for (const int64_t tokens : {2000, 8000}) {
    KVCache cache(layer_options("kivi"));
    const at::Tensor prompt = randn({1, kLayerHeads, tokens, kHeadDim}, 1, at::kHalf);
    cache.append(prompt, prompt);
    cache.reserve(tokens + kChunk);
    const at::Tensor q = randn({1, kQueryHeads, kChunk, kHeadDim}, 2, at::kHalf), x = prompt.narrow(2, 0, kChunk);
    const int64_t peak = peak_of([&] { cache.forward(q, x, x); });
    const int64_t output = kQueryHeads * kChunk * kHeadDim * 2;
    std::cout << "a chunk of " << kChunk << " over " << tokens << " tokens: " << peak << " bytes at most\n";
    EXPECT_LE(peak, output + kScratch);
  }
}

// The first prompt: the cache that it makes, its output, and what torch's own attention takes.
TEST_F(Allocation, PeakOfAPrefill) {
  for (const char* recipe : {"kivi", "balanced"}) {
    constexpr int64_t kTokens = 2048;
    const at::Tensor k = randn({1, kLayerHeads, kTokens, kHeadDim}, 1, at::kHalf);
    const at::Tensor q = randn({1, kQueryHeads, kTokens, kHeadDim}, 2, at::kHalf);
    KVCache alone(layer_options(recipe)), cache(layer_options(recipe));
    const int64_t appended = peak_of([&] { alone.append(k, k); }) - alone.nbytes();
    const int64_t peak = peak_of([&] { cache.forward(q, k, k); }) - cache.nbytes();
    const int64_t output = kQueryHeads * kTokens * kHeadDim * 2;
    std::cout << recipe << ", " << kTokens << " tokens: append " << appended << ", forward " << peak
              << " bytes beside the cache\n";
    EXPECT_LE(appended, kScratch);
    EXPECT_LE(peak, output + 2 * kScratch);  // the scores are 16 times the output
  }
}

}  // namespace
}  // namespace kivi::test
