// Case C18 for every operator and for kivi::KVCache: strides, offsets, pools, windows and positions past 2^31 and 2^32.
// Memory is an anonymous mapping of which only the pages that are touched exist; what an operator gives on far memory
// is compared to the bit with what it gives on a near copy. What takes more than a second or two, or gigabytes that
// exist, runs only if KIVI_HUGE is 1 (.ci/nightly sets it), and where there is memory for it.
#include <sys/mman.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "tests/ops/cases.h"

namespace kivi::test {
namespace {

constexpr int64_t kFar = (int64_t{1} << 31) + 64;  // elements

// A tensor over address space of its own, zero at first.
at::Tensor mapped(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, int64_t offset = 0) {
  int64_t elements = offset + 1;
  for (size_t i = 0; i < sizes.size(); i++) elements += (sizes[i] - 1) * strides[i];
  const auto bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no ", bytes, " bytes of address space");
  const auto unmap = [bytes](void* p) { munmap(p, bytes); };
  const at::Tensor whole = at::from_blob(memory, {elements}, unmap, at::TensorOptions(type));
  return whole.as_strided(sizes, strides, offset);
}

// Contiguous, over memory that need not exist.
at::Tensor mapped(at::IntArrayRef sizes, at::ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * sizes[i];
  return mapped(sizes, strides, type);
}

// A copy of t whose steps along `axis` are more than 2^31 elements.
at::Tensor far(const at::Tensor& t, int64_t axis) {
  std::vector<int64_t> strides(static_cast<size_t>(t.dim()), 1);
  int64_t step = 1;
  for (int64_t d = t.dim() - 1; d >= 0; d--) {
    strides[static_cast<size_t>(d)] = d == axis ? kFar : step;
    if (d != axis) step *= t.size(d);
  }
  return mapped(t.sizes(), strides, t.scalar_type()).copy_(t);
}

// A copy of t that begins more than 2^31 elements after its storage.
at::Tensor far_offset(const at::Tensor& t) {
  return mapped(t.sizes(), t.contiguous().strides(), t.scalar_type(), kFar).copy_(t);
}

// t in each of these ways; axes of size 1 have no steps.
std::vector<at::Tensor> far_ways(const at::Tensor& t) {
  std::vector<at::Tensor> all = {far_offset(t)};
  for (int64_t d = 0; d < t.dim(); d++) {
    if (t.size(d) > 1) all.push_back(far(t, d));
  }
  return all;
}

bool asked_for_huge() {
  const char* const value = std::getenv("KIVI_HUGE");
  return value != nullptr && std::string(value) == "1";
}

double available_gigabytes() {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  for (double kilobytes = 0; in >> name >> kilobytes; std::getline(in, unit)) {
    if (name == "MemAvailable:") return kilobytes / (1 << 20);
  }
  return 0;
}

#define KIVI_HUGE_ONLY(gigabytes)                                                                \
  if (!asked_for_huge()) GTEST_SKIP() << "takes seconds and " #gigabytes " GB: set KIVI_HUGE=1"; \
  if (available_gigabytes() < (gigabytes) + 1.0)                                                 \
  GTEST_SKIP() << "needs " #gigabytes " GB of memory, there are " << available_gigabytes() << " GB"

// ---------------------------------------------------------------------------------------------- quantize and its kin

TEST(C18_Huge, QuantizeAnyFarAxis) {
  for (const auto type : kTypes) {
    const at::Tensor x = randn({3, 40, 70}, 1, type);
    for (const at::Tensor& view : far_ways(x)) {
      for (int64_t axis = 0; axis < 3; axis++) {
        for (const int64_t bits : kAllBits) {
          const std::string what = std::to_string(bits) + " bits, axis " + std::to_string(axis);
          expect_same(quantized(view, axis, bits, 32), quantized(x, axis, bits, 32), what);
        }
      }
    }
  }
}

TEST(C18_Huge, DequantizeFarCodesScalesAndZeros) {
  const at::Tensor x = randn({3, 40, 70}, 2);
  for (int64_t axis = 0; axis < 3; axis++) {
    for (const int64_t bits : kAllBits) {
      const Quantized near = quantized(x, axis, bits, 16);
      const auto back = [&](const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero) {
        return dequantize(codes, scale, zero, axis, bits, 16, x.size(axis));
      };
      const std::string what = std::to_string(bits) + " bits, axis " + std::to_string(axis);
      for (const at::Tensor& t : far_ways(near.codes)) {
        EXPECT_TRUE(same_bits(back(t, near.scale, near.zero), near.back)) << what;
      }
      for (const at::Tensor& t : far_ways(near.scale)) {
        EXPECT_TRUE(same_bits(back(near.codes, t, near.zero), near.back)) << what;
      }
      for (const at::Tensor& t : far_ways(near.zero)) {
        EXPECT_TRUE(same_bits(back(near.codes, near.scale, t), near.back)) << what;
      }
    }
  }
}

// One axis of more than 2^31 elements, all of them one float; 0.27 GB of codes.
TEST(C18_Huge, QuantizeALongAxis) {
  KIVI_HUGE_ONLY(1);
  const int64_t n = kFar + 1, group = int64_t{1} << 20;
  const at::Tensor x = at::full({1}, 3.25f).expand({n});
  const auto [codes, scale, zero] = quantize(x, 0, 1, group);
  EXPECT_EQ(codes.numel(), ceil_div(n, 8));
  EXPECT_EQ(scale.numel(), ceil_div(n, group));
  EXPECT_EQ(codes.max().item<int64_t>(), 0);
  EXPECT_TRUE((zero == 3.25f).all().item<bool>());
}

// More than 2^31 results: along the axis, before it and after it. The codes repeat by strides of 0.
TEST(C18_Huge, DequantizeManyElements) {
  KIVI_HUGE_ONLY(4.5);
  const at::Tensor x = randn({1, 64}, 3);
  const auto [codes, scale, zero] = quantize(x, 1, 2, 32);
  const int64_t rows = kFar / 64 + 1;
  {
    const at::Tensor back = dequantize(codes.expand({rows, -1}), scale.expand({rows, -1}), zero.expand({rows, -1}), 1,
                                       2, 32, 64, at::kHalf);
    const at::Tensor want = dequantize(codes, scale, zero, 1, 2, 32, 64, at::kHalf);
    for (const int64_t row : {int64_t{0}, rows / 2, rows - 2, rows - 1})
      EXPECT_TRUE(same_bits(back[row], want[0])) << row;
    EXPECT_TRUE((back == want).all().item<bool>());
  }
  {
    const auto one = [&](const at::Tensor& t) { return t.narrow(1, 0, 1).expand({1, kFar}); };
    const at::Tensor back = dequantize(one(codes), one(scale), one(zero), 0, 2, 32, 1, at::kHalf);
    const at::Tensor want = dequantize(codes, scale, zero, 1, 2, 32, 64, at::kHalf)[0][0];
    EXPECT_TRUE((back == want).all().item<bool>());
  }
  {
    const at::Tensor ones = at::full({1}, 1.0f);
    const at::Tensor bytes = at::full({1}, 0xE4, at::kByte).expand({ceil_div(kFar, 4)});  // 0, 1, 2, 3, ...
    const at::Tensor back = dequantize(bytes, ones, ones, 0, 2, kFar, kFar, at::kHalf);
    EXPECT_TRUE((back.view({-1, 4}) == at::arange(1, 5).to(at::kHalf)).all().item<bool>());
  }
}

TEST(C18_Huge, FakeQuantizeManyElements) {
  KIVI_HUGE_ONLY(8.7);
  const at::Tensor x = randn({1, 64}, 4);
  const int64_t rows = kFar / 64 + 1;
  const at::Tensor got = fake_quantize(x.expand({rows, 64}), 1, 2, 32), want = fake_quantize(x, 1, 2, 32);
  for (const int64_t row : {int64_t{0}, rows / 2, rows - 2, rows - 1}) EXPECT_TRUE(same_bits(got[row], want[0])) << row;
  EXPECT_EQ((got.select(1, 63) == want[0][63]).sum().item<int64_t>(), rows);
}

// ---------------------------------------------------------------------------------------------- arguments far apart

constexpr int64_t kHeadCount = 2, kChannels = 16, kValueChannels = 20;

std::vector<int64_t> small_format(const std::string& scale_dtype = "float16") {
  return cache_format(kHeadCount, kChannels, kValueChannels, 2, 2, 16, 8, 4, scale_dtype);
}

at::Tensor keys(int64_t tokens, uint64_t seed) { return randn({2, kHeadCount, tokens, kChannels}, seed); }
at::Tensor values(int64_t tokens, uint64_t seed) { return randn({2, kHeadCount, tokens, kValueChannels}, seed); }

CacheTensors filled_cache() {
  CacheTensors t = make_tensors(small_format(), 2, 2);
  cache_append(t, keys(150, 11), values(150, 12), small_format(), longs({150, 97}));
  return t;
}

void expect_same_tensors(const CacheTensors& a, const CacheTensors& b, const std::string& what) {
  const std::vector<at::Tensor> x = list(a), y = list(b);
  for (size_t i = 0; i < x.size(); i++) EXPECT_TRUE(same_bits(x[i], y[i])) << what << ", tensor " << i;
}

TEST(C18_Huge, AppendsFarKeysAndValues) {
  const at::Tensor k = keys(60, 13), v = values(60, 14), count = longs({60, 33});
  const auto append = [&](const at::Tensor& new_k, const at::Tensor& new_v, const at::Tensor& lengths) {
    CacheTensors t = filled_cache();
    cache_append(t, new_k, new_v, small_format(), lengths);
    return t;
  };
  const CacheTensors want = append(k, v, count);
  for (const at::Tensor& t : far_ways(k)) expect_same_tensors(append(t, v, count), want, "k");
  for (const at::Tensor& t : far_ways(v)) expect_same_tensors(append(k, t, count), want, "v");
  for (const at::Tensor& t : far_ways(count)) expect_same_tensors(append(k, v, t), want, "new_lengths");
  CacheTensors far_flag = filled_cache();
  const at::Tensor overflow = far_offset(at::zeros({1}, at::kInt));
  cache_append(far_flag, k, v, small_format(), count, overflow);
  expect_same_tensors(far_flag, want, "overflow");
}

struct AttentionArguments {
  at::Tensor q = randn({2, 4, 3, kChannels}, 15), k = keys(3, 16), v = values(3, 17), new_lengths = longs({3, 2});
  at::Tensor mask = randn({2, 4, 3, 153}, 18), sinks = randn({4}, 19), slopes = randn({2, 4}, 20).abs() * 0.1;
};

TEST(C18_Huge, AttendsWithFarArguments) {
  const CacheTensors cache = filled_cache();
  for (const char* precision : {"exact", "fast"}) {
    const auto attend = [&](const AttentionArguments& a) {
      CacheAttentionOptions o;
      o.attn_mask = a.mask, o.sinks = a.sinks, o.alibi_slopes = a.slopes, o.precision = precision;
      return cache_attention(a.q, cache, small_format(), a.k, a.v, a.new_lengths, o);
    };
    const AttentionArguments near;
    const auto want = attend(near);
    const auto check = [&](at::Tensor AttentionArguments::*field, const char* name) {
      for (const at::Tensor& t : far_ways(near.*field)) {
        AttentionArguments a;
        a.*field = t;
        const auto got = attend(a);
        EXPECT_TRUE(same_bits(std::get<0>(got), std::get<0>(want))) << name << " " << t.strides();
        EXPECT_TRUE(same_bits(std::get<1>(got), std::get<1>(want))) << name << " " << t.strides();
      }
    };
    check(&AttentionArguments::q, "q");
    check(&AttentionArguments::k, "new_k");
    check(&AttentionArguments::v, "new_v");
    check(&AttentionArguments::new_lengths, "new_lengths");
    check(&AttentionArguments::mask, "mask");
    check(&AttentionArguments::sinks, "sinks");
    check(&AttentionArguments::slopes, "alibi_slopes");
    AttentionArguments bools;
    bools.mask = near.mask > -0.5;
    const auto want_bool = attend(bools);
    for (const at::Tensor& t : far_ways(near.mask > -0.5)) {
      bools.mask = t;
      EXPECT_TRUE(same_bits(std::get<0>(attend(bools)), std::get<0>(want_bool))) << "bool mask " << t.strides();
    }
  }
}

// The tensors of a cache are contiguous, so that they can only begin far from their storage.
TEST(C18_Huge, TensorsOfACacheWithFarOffsets) {
  const CacheTensors near = filled_cache();
  const AttentionArguments a;
  const auto run = [&](CacheTensors t) {
    cache_append(t, a.k, a.v, small_format(), a.new_lengths);
    std::vector<at::Tensor> results = list(t);
    const auto [out, lse] = cache_attention(a.q, t, small_format());
    const auto [k, v] = cache_dequantize(t, small_format(), 153);
    cache_truncate(t, small_format(), 83);
    for (const at::Tensor& x : {out, lse, k, v, t.lengths, t.quantized_lengths, t.window_k, t.window_v}) {
      results.push_back(x.clone());
    }
    return results;
  };
  const std::vector<at::Tensor> want = run(copy(near));
  for (size_t i = 0; i < list(near).size(); i++) {
    std::vector<at::Tensor> parts = list(copy(near));
    parts[i] = far_offset(parts[i]);
    const std::vector<at::Tensor> got = run(from_list(parts));
    for (size_t j = 0; j < want.size(); j++)
      EXPECT_TRUE(same_bits(got[j], want[j])) << "tensor " << i << " result " << j;
  }
}

// ---------------------------------------------------------------------------------------------- a pool past 2^32 bytes

// The cache with its pages moved to the pages `at` of a pool of so many bytes.
CacheTensors with_far_pages(const CacheTensors& near, int64_t bytes) {
  CacheTensors t = copy(near);
  const int64_t page = near.pool.size(1), count = bytes / page;
  t.pool = mapped({count, page}, at::kByte);
  // Around 2^31, around 2^32 if there is so much, and the last one.
  std::vector<int64_t> places = {(int64_t{1} << 31) / page, (int64_t{1} << 31) / page + 1, count - 2, count - 1};
  for (int64_t i = 0; i < near.pool.size(0); i++) {
    const int64_t place = places[static_cast<size_t>(i)];
    t.pool[place].copy_(near.pool[i]);
    t.block_table.masked_fill_(near.block_table == i, place);
  }
  return t;
}

TEST(C18_Huge, PagesPast32Bits) {
  const AttentionArguments a;
  for (const char* scale_dtype : {"float16", "float8", "float32"}) {
    const std::vector<int64_t> format = small_format(scale_dtype);
    CacheTensors near = make_tensors(format, 2, 2);
    cache_append(near, keys(150, 11), values(150, 12), format, longs({150, 97}));
    const CacheTensors away = with_far_pages(near, (int64_t{1} << 33) + (1 << 20));
    for (const char* precision : {"exact", "fast"}) {
      CacheAttentionOptions o;
      o.precision = precision;
      const auto want = cache_attention(a.q, near, format, a.k, a.v, a.new_lengths, o);
      const auto got = cache_attention(a.q, away, format, a.k, a.v, a.new_lengths, o);
      EXPECT_TRUE(same_bits(std::get<0>(got), std::get<0>(want))) << scale_dtype << " " << precision;
      EXPECT_TRUE(same_bits(std::get<1>(got), std::get<1>(want))) << scale_dtype << " " << precision;
    }
    const auto same_values = [&](int64_t length) {
      const auto want = cache_dequantize(near, format, length), got = cache_dequantize(away, format, length);
      EXPECT_TRUE(same_bits(std::get<0>(got), std::get<0>(want))) << scale_dtype << " " << length;
      EXPECT_TRUE(same_bits(std::get<1>(got), std::get<1>(want))) << scale_dtype << " " << length;
    };
    same_values(150);
    for (const CacheTensors* t : {static_cast<const CacheTensors*>(&near), &away})
      cache_append(*t, keys(60, 13), values(60, 14), format, longs({60, 33}));
    same_values(210);
    for (const CacheTensors* t : {static_cast<const CacheTensors*>(&near), &away}) cache_truncate(*t, format, 83);
    same_values(83);
    // From far to near, from near to far, from far to far.
    const int64_t last = away.pool.size(0) - 1, page = away.pool.size(1), far_page = (int64_t{1} << 31) / page;
    const at::Tensor whole = away.pool[last - 1].clone();
    EXPECT_GT(whole.max().item<int64_t>(), 0);
    cache_copy_pages(away.pool, far_offset(longs({last - 1, far_page})), far(longs({0, last - 3}), 0));
    EXPECT_TRUE(same_bits(away.pool[0], whole)) << scale_dtype;
    EXPECT_TRUE(same_bits(away.pool[last - 3], away.pool[far_page])) << scale_dtype;
    cache_copy_pages(away.pool, longs({0}), longs({last - 4}));
    EXPECT_TRUE(same_bits(away.pool[last - 4], whole)) << scale_dtype;
  }
}

TEST(C18_Huge, WidensFarPages) {
  for (const char* scale_dtype : {"float16", "float8"}) {
    const std::vector<int64_t> format = small_format(scale_dtype);
    CacheTensors near = make_tensors(format, 2, 2);
    cache_append(near, keys(150, 11), values(150, 12), format, longs({150, 97}));
    const at::Tensor want = cache_widen(near.pool, format);
    EXPECT_TRUE(same_bits(cache_widen(far(near.pool, 0), format), want)) << scale_dtype;
    EXPECT_TRUE(same_bits(cache_widen(far_offset(near.pool), format), want)) << scale_dtype;
  }
}

// A pool of more than 2^31 bytes becomes one of more than 2^32.
TEST(C18_Huge, WidensALargePool) {
  KIVI_HUGE_ONLY(6);
  const std::vector<int64_t> format = cache_format(1, 128, 128, 1, 1, 16, 0, 0, "float16");
  std::vector<int64_t> wide_format = format;
  wide_format[9] = 48;
  CacheTensors near = make_tensors(format, 1, 2);
  cache_append(near, randn({1, 1, 256, 128}, 21), randn({1, 1, 256, 128}, 22), format);
  const int64_t page = near.pool.size(1), wide_page = cache_page_bytes(wide_format), count = kFar * 2 / wide_page + 2;
  ASSERT_GT(count * page, kFar);
  ASSERT_GT(count * wide_page, kFar * 2);
  const at::Tensor pool = mapped({count, page}, at::kByte);
  pool[count - 1].copy_(near.pool[1]);
  pool[kFar / page].copy_(near.pool[0]);
  const at::Tensor wide = cache_widen(pool, format), want = cache_widen(near.pool, format);
  EXPECT_TRUE(same_bits(wide[count - 1], want[1]));
  EXPECT_TRUE(same_bits(wide[kFar / page], want[0]));
  EXPECT_EQ(wide[0].max().item<int64_t>(), 0);
  EXPECT_EQ(wide[count - 2].max().item<int64_t>(), 0);
}

// ---------------------------------------------------------------------------------------------- many exact tokens

// Sink and window of more than 2^31 elements, so that the rows of the last head are far from those of the first; a row
// of the batch gives what it gives alone.
TEST(C18_Huge, ExactTokensPast31Bits) {
  const int64_t dim = 64, slots = int64_t{1} << 22, batch = 5;
  for (const bool large_sink : {false, true}) {
    const std::vector<int64_t> format =
        cache_format(kHeadCount, dim, dim, 2, 2, 16, large_sink ? 8 : slots, large_sink ? slots : 4);
    const auto tensors = [&](int64_t rows) {
      CacheTensors t;
      t.pool = at::zeros({1, cache_page_bytes(format)}, at::kByte);
      t.block_table = at::zeros({rows, 1}, at::kInt);
      t.lengths = at::zeros({rows}, at::kLong), t.quantized_lengths = at::zeros({rows}, at::kLong);
      for (at::Tensor* x : {&t.sink_k, &t.sink_v}) *x = mapped({rows, kHeadCount, format[8], dim}, at::kHalf);
      for (at::Tensor* x : {&t.window_k, &t.window_v}) {
        *x = mapped({rows, kHeadCount, cache_window_capacity(format), dim}, at::kHalf);
      }
      return t;
    };
    const at::Tensor k = randn({batch, kHeadCount, 40, dim}, 23, at::kHalf),
                     v = randn({batch, kHeadCount, 40, dim}, 24, at::kHalf);
    const at::Tensor q = randn({batch, 4, 2, dim}, 25, at::kHalf);
    const CacheTensors all = tensors(batch), one = tensors(1);
    ASSERT_GT((large_sink ? all.sink_k : all.window_k).numel(), kFar);
    cache_append(all, k, v, format);
    const auto last = [&](const at::Tensor& t) { return t.narrow(0, batch - 1, 1); };
    cache_append(one, last(k), last(v), format);
    for (const int64_t length : {40, 29}) {
      const auto [held_k, held_v] = cache_dequantize(all, format, length);
      EXPECT_TRUE(same_bits(held_k, k.narrow(2, 0, length)));
      EXPECT_TRUE(same_bits(held_v, v.narrow(2, 0, length)));
      const auto got = cache_attention(q, all, format), want = cache_attention(last(q), one, format);
      EXPECT_TRUE(same_bits(last(std::get<0>(got)), std::get<0>(want))) << length;
      EXPECT_TRUE(same_bits(last(std::get<1>(got)), std::get<1>(want))) << length;
      cache_truncate(all, format, 29), cache_truncate(one, format, 29);
    }
  }
}

// ---------------------------------------------------------------------------------------------- many tokens

// A row of more than 2^31 tokens, of which all but the last are one page over and over, and one of 1000 with the same
// last tokens. A sliding window makes both attend to the same keys.
struct LongRow {
  static constexpr int64_t kTokens = 1000;
  int64_t more;  // a multiple of the page and of the window's ring
  std::vector<int64_t> format = cache_format(1, 16, 16, 2, 2, 32, 32, 0);
  CacheTensors near = make_tensors(format, 1, 12, at::kHalf), away;

  explicit LongRow(int64_t more_tokens) : more(more_tokens) {
    cache_append(near, randn({1, 1, kTokens, 16}, 26, at::kHalf), randn({1, 1, kTokens, 16}, 27, at::kHalf), format);
    away = copy(near);
    away.lengths.add_(more), away.quantized_lengths.add_(more);
    away.block_table = at::cat({at::zeros({1, more / kPageTokens}, at::kInt), near.block_table}, 1);
  }
};

// 2^28 tokens: more runs of pages than a grid of CUDA has blocks along its second axis, of results that fit.
class C18_HugeRow : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Tokens, C18_HugeRow, ::testing::Values(int64_t{1} << 28, int64_t{1} << 31));

TEST_P(C18_HugeRow, EndsAsAShortOne) {
  const int64_t more = GetParam();
  LongRow row(more);
  const auto compare = [&](const std::string& what) {
    EXPECT_TRUE(same_bits(row.near.pool, row.away.pool)) << what;
    EXPECT_TRUE(same_bits(row.near.window_k, row.away.window_k)) << what;
    EXPECT_TRUE(same_bits(row.near.window_v, row.away.window_v)) << what;
    EXPECT_TRUE(same_bits(row.near.lengths + more, row.away.lengths)) << what;
    EXPECT_TRUE(same_bits(row.near.quantized_lengths + more, row.away.quantized_lengths)) << what;
    for (const char* precision : {"exact", "fast"}) {
      CacheAttentionOptions o;
      o.precision = precision, o.window = 300, o.alibi_slopes = floats({0.01, 0.02});
      const at::Tensor q = randn({1, 2, 3, 16}, 28);
      const auto got = cache_attention(q, row.away, row.format, {}, {}, {}, o);
      const auto want = cache_attention(q, row.near, row.format, {}, {}, {}, o);
      // Runs of keys are cut elsewhere, which changes the order of sums; distances from a position are as far apart.
      const double limit = std::string(precision) == "exact" ? 4e-6 : 5e-4;
      EXPECT_LE(max_difference(std::get<0>(got), std::get<0>(want)), limit) << what << " " << precision;
      EXPECT_LE(max_difference(std::get<1>(got), std::get<1>(want)), limit) << what << " " << precision;
    }
  };
  compare("as filled");
  const at::Tensor k = randn({1, 1, 70, 16}, 29, at::kHalf);
  for (const CacheTensors* t : {&row.near, &row.away}) cache_append(*t, k, k, row.format);
  compare("appended");
  cache_truncate(row.near, row.format, 1001), cache_truncate(row.away, row.format, more + 1001);
  compare("truncated in a group");
  // A mask as wide as the row: one float everywhere, and one that is there.
  CacheAttentionOptions o;
  o.window = 300;
  const at::Tensor q = randn({1, 2, 1, 16}, 30);
  o.attn_mask = at::full({1}, 0.5f);
  const at::Tensor want = std::get<1>(cache_attention(q, row.near, row.format, {}, {}, {}, o));
  for (const at::Tensor& mask : {at::full({1}, 0.5f), mapped({1, 1, 1, more + 1001}, at::kFloat)}) {
    if (mask.numel() > 1) mask.narrow(3, more + 701, 300).fill_(0.5f);
    o.attn_mask = mask;
    EXPECT_LE(max_difference(std::get<1>(cache_attention(q, row.away, row.format, {}, {}, {}, o)), want), 5e-4);
  }
}

// Without a window: every one of more than 2^31 tokens counts.
TEST(C18_Huge, AttendsToMoreTokensThan31BitsCount) {
  KIVI_HUGE_ONLY(1);
  const std::vector<int64_t> format = cache_format(1, 16, 16, 1, 1, 128, 0, 0);
  CacheTensors t = make_tensors(format, 1, 1);
  const at::Tensor v = randn({1, 1, 128, 16}, 31);
  cache_append(t, at::zeros({1, 1, 128, 16}), v, format);
  const auto want = cache_attention(at::zeros({1, 1, 1, 16}), t, format);
  const int64_t pages = kFar / kPageTokens + 1;
  t.block_table = at::zeros({1, pages}, at::kInt);
  t.lengths.fill_(pages * 128), t.quantized_lengths.fill_(pages * 128);
  const auto got = cache_attention(at::zeros({1, 1, 1, 16}), t, format);
  // The 2^24 pages are equal, so fp32 sums of the hundreds of thousands in one run round alike: by up to 2^-25 for each
  // (measured: 6e-3). That no page is missed or read twice is what the sum of the weights shows.
  EXPECT_LE(max_difference(std::get<0>(got), std::get<0>(want)), 2e-2);
  EXPECT_NEAR(std::get<1>(got).item<double>(), std::log(static_cast<double>(pages) * 128), 1e-4);
}

// 2^31 elements of K and more, 4.3 GB, in one dequantised row.
TEST(C18_Huge, DequantizesALongRow) {
  KIVI_HUGE_ONLY(4.9);
  const std::vector<int64_t> format = cache_format(1, 16, 1, 2, 2, 32, 0, 0);
  CacheTensors t = make_tensors(format, 1, 1, at::kHalf);
  cache_append(t, randn({1, 1, 128, 16}, 32, at::kHalf), randn({1, 1, 128, 1}, 33, at::kHalf), format);
  const auto [want_k, want_v] = cache_dequantize(t, format, 128);
  const int64_t pages = kFar / 16 / kPageTokens + 2;
  t.block_table = at::zeros({1, pages}, at::kInt);
  t.lengths.fill_(pages * 128), t.quantized_lengths.fill_(pages * 128);
  const auto [k, v] = cache_dequantize(t, format, pages * 128);
  ASSERT_GT(k.numel(), kFar);
  EXPECT_TRUE((k.view({pages, 128, 16}) == want_k.view({1, 128, 16})).all().item<bool>());
  EXPECT_TRUE((v.view({pages, 128, 1}) == want_v.view({1, 128, 1})).all().item<bool>());
}

// ---------------------------------------------------------------------------------------------- kivi::KVCache

TEST(C18_Huge, CacheWithFarArguments) {
  const CacheOptions options = [] {
    CacheOptions o = case_options(kHeadCount, 48, 16, 8, 4);
    o.k_classes = {16, 4, 32, 2};
    return o;
  }();
  struct Arguments {
    at::Tensor q = randn({2, 4, 90, 48}, 41), k = randn({2, kHeadCount, 90, 48}, 42),
               v = randn({2, kHeadCount, 90, 48}, 43);
    at::Tensor lengths = longs({90, 71}), order = at::stack({at::arange(48).flip({0}), at::arange(48)});
    at::Tensor rows = longs({1, 0, 1}), mask = randn({3, 4, 2, 92}, 44), sinks = randn({4}, 45);
  };
  struct Results {
    at::Tensor prefill, out, k, v;
    KVCache::State state;
  };
  const auto run = [&](const Arguments& a) {
    Results r;
    KVCache cache(options);
    if (a.order.defined()) cache.set_key_order(a.order);
    r.prefill = cache.forward(a.q, a.k, a.v, {}, a.lengths);
    cache.append(a.k.narrow(2, 0, 2), a.v.narrow(2, 0, 2), longs({2, 2}), a.q.narrow(2, 0, 2));
    cache.select(a.rows);
    cache.reorder(a.rows);
    AttentionOptions o;
    o.attn_mask = a.mask, o.sinks = a.sinks;
    r.out = cache.attend(randn({3, 4, 2, 48}, 46), o);
    std::tie(r.k, r.v) = cache.dequantize();
    r.state = cache.state();
    return r;
  };
  const Arguments near;
  Arguments unordered;  // the cache chooses
  unordered.order = at::Tensor();
  const Results want = run(near), want_unordered = run(unordered);
  const auto check = [&](at::Tensor Arguments::*field, const char* name) {
    for (const at::Tensor& t : far_ways(near.*field)) {
      Arguments a;
      a.*field = t;
      const Results got = run(a);
      if (field != &Arguments::order) {
        a.order = at::Tensor();
        EXPECT_TRUE(same_state(run(a).state, want_unordered.state)) << name << ", order chosen";
      }
      EXPECT_TRUE(same_bits(got.prefill, want.prefill)) << name;
      EXPECT_TRUE(same_bits(got.out, want.out)) << name;
      EXPECT_TRUE(same_bits(got.k, want.k)) << name;
      EXPECT_TRUE(same_bits(got.v, want.v)) << name;
      EXPECT_TRUE(same_state(got.state, want.state)) << name;
    }
  };
  check(&Arguments::q, "q");
  check(&Arguments::k, "k");
  check(&Arguments::v, "v");
  check(&Arguments::lengths, "lengths");
  check(&Arguments::order, "order");
  check(&Arguments::rows, "rows");
  check(&Arguments::mask, "mask");
  check(&Arguments::sinks, "sinks");
  // A saved state whose tensors are far apart.
  KVCache::State state = want.state;
  for (at::Tensor& t : std::get<2>(state)) t = t.dim() > 1 && t.size(0) > 1 ? far(t, 0) : far_offset(t);
  EXPECT_TRUE(same_state(KVCache::from_state(state)->state(), want.state));
}

}  // namespace
}  // namespace kivi::test
