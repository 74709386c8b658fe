// Meta kernels: the sizes, dtypes and strides of the results equal those of the CPU kernels, for random arguments of
// every operator; bad arguments raise the same errors; no data is looked at.
#include <random>

#include "tests/ops/support.h"

namespace kivi::test {
namespace {

constexpr int kRounds = 60;

at::Tensor on_meta(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

std::optional<at::Tensor> on_meta(const std::optional<at::Tensor>& t) {
  return t ? std::optional(on_meta(*t)) : std::nullopt;
}

CacheTensors on_meta(const CacheTensors& t) {
  std::vector<at::Tensor> parts = list(t);
  for (at::Tensor& part : parts) part = on_meta(part);
  return from_list(parts);
}

void expect_like(const at::Tensor& meta, const at::Tensor& real, const std::string& what) {
  EXPECT_TRUE(meta.is_meta()) << what;
  EXPECT_EQ(meta.scalar_type(), real.scalar_type()) << what;
  EXPECT_EQ(meta.sizes(), real.sizes()) << what;
  EXPECT_EQ(meta.strides(), real.strides()) << what;
  EXPECT_EQ(meta.storage_offset(), real.storage_offset()) << what;
}

class Random {
 public:
  explicit Random(uint32_t seed) : rng_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }
  bool coin() { return below(2) == 0; }
  template <class T>
  T of(const std::vector<T>& values) {
    return values[static_cast<size_t>(below(static_cast<int64_t>(values.size())))];
  }
  at::ScalarType dtype() { return of<at::ScalarType>({at::kFloat, at::kHalf, at::kBFloat16}); }
  uint64_t seed() { return rng_(); }

  // A tensor of these sizes with random strides.
  at::Tensor tensor(const std::vector<int64_t>& sizes, at::ScalarType type) {
    const auto rank = static_cast<int64_t>(sizes.size());
    std::vector<int64_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    std::shuffle(order.begin(), order.end(), rng_);
    std::vector<int64_t> shuffled, back(sizes.size());
    for (int64_t i = 0; i < rank; i++) {
      shuffled.push_back(sizes[static_cast<size_t>(order[static_cast<size_t>(i)])]);
      back[static_cast<size_t>(order[static_cast<size_t>(i)])] = i;
    }
    return (coin() ? randn(sizes, seed()) : randn(shuffled, seed()).permute(back)).to(type);
  }

 private:
  std::mt19937 rng_;
};

TEST(Meta, QuantizeDequantizeAndFakeQuantize) {
  Random random(1);
  for (int round = 0; round < kRounds; round++) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0, rank = 1 + random.below(4); i < rank; i++)
      sizes.push_back(random.below(20) * (1 + random.below(3)));
    const at::Tensor x = random.tensor(sizes, random.dtype());
    const int64_t axis = random.below(2 * x.dim()) - x.dim(), bits = random.of(kAllBits), group = 1 + random.below(40);
    std::ostringstream what;
    what << x.sizes() << " axis " << axis << " bits " << bits << " group " << group;
    const auto [codes, scale, zero] = quantize(x, axis, bits, group);
    const auto [codes_m, scale_m, zero_m] = quantize(on_meta(x), axis, bits, group);
    expect_like(codes_m, codes, "codes of " + what.str());
    expect_like(scale_m, scale, "scale of " + what.str());
    expect_like(zero_m, zero, "zero of " + what.str());
    expect_like(fake_quantize(on_meta(x), axis, bits, group), fake_quantize(x, axis, bits, group), what.str());
    const auto type = random.dtype();
    expect_like(dequantize(codes_m, scale_m, zero_m, axis, bits, group, x.size(axis), type),
                dequantize(codes, scale, zero, axis, bits, group, x.size(axis), type), "dequantize of " + what.str());
    const at::Tensor turned = codes.transpose(0, -1).contiguous().transpose(0, -1);
    expect_like(dequantize(on_meta(turned), scale_m, zero_m, axis, bits, group, x.size(axis), type),
                dequantize(turned, scale, zero, axis, bits, group, x.size(axis), type),
                "strided codes of " + what.str());
  }
}

TEST(Meta, CacheOperators) {
  Random random(2);
  for (int round = 0; round < kRounds; round++) {
    const int64_t batch = 1 + random.below(3), heads = 1 + random.below(3), dim = 1 + random.below(40),
                  value_dim = 1 + random.below(40), query_heads = heads * (1 + random.below(3)),
                  tokens = random.below(150);
    const auto type = random.dtype(), query_type = random.dtype();
    const auto format = cache_format(heads, dim, value_dim, random.of(kAllBits), random.of(kAllBits),
                                     random.of<int64_t>({16, 32, 64, 128}), random.below(40), random.below(6));
    CacheTensors t = make_tensors(format, batch, 2, type);
    const CacheTensors m = on_meta(t);
    const std::string what = "round " + std::to_string(round);

    const at::Tensor k = random.tensor({batch, heads, tokens, dim}, type),
                     v = random.tensor({batch, heads, tokens, value_dim}, type);
    std::vector<int64_t> counts;
    for (int64_t b = 0; b < batch; b++) counts.push_back(random.below(tokens + 1));
    const std::optional<at::Tensor> new_lengths = random.coin() ? std::optional(longs(counts)) : std::nullopt;
    const std::optional<at::Tensor> overflow = random.coin() ? std::optional(at::zeros({1}, at::kInt)) : std::nullopt;
    cache_append(t, k, v, format, new_lengths, overflow);
    cache_append(m, on_meta(k), on_meta(v), format, on_meta(new_lengths), on_meta(overflow));
    for (size_t i = 0; i < list(t).size(); i++) expect_like(list(m)[i], list(t)[i], what + " after append");

    const int64_t length = random.below(200);
    const auto [kd, vd] = cache_dequantize(t, format, length);
    const auto [km, vm] = cache_dequantize(m, format, length);
    expect_like(km, kd, what);
    expect_like(vm, vd, what);

    const int64_t rows = random.below(5);
    const at::Tensor q = random.tensor({batch, query_heads, rows, dim}, query_type);
    const bool with_new = random.coin();
    std::optional<at::Tensor> new_k, new_v, lengths;
    if (with_new) {
      new_k = random.tensor({batch, heads, rows, dim}, type);
      new_v = random.tensor({batch, heads, rows, value_dim}, type);
      if (random.coin()) lengths = at::full({batch}, rows, at::kLong);
    }
    CacheAttentionOptions o, om;
    if (random.coin())
      o.attn_mask = random.coin() ? at::ones({1}, at::kBool) : random.tensor({batch, 1, rows, 1}, query_type);
    if (random.coin()) o.sinks = random.tensor({query_heads}, query_type);
    if (random.coin()) o.alibi_slopes = random.tensor({batch, query_heads}, at::kFloat);
    if (random.coin()) o.scale = 0.5;
    o.softcap = random.coin() ? 4.0 : 0.0;
    o.window = random.below(9);
    o.precision = random.coin() ? "fast" : "exact";
    om = o;
    om.attn_mask = on_meta(o.attn_mask), om.sinks = on_meta(o.sinks), om.alibi_slopes = on_meta(o.alibi_slopes);
    const auto [out, lse] = cache_attention(q, t, format, new_k, new_v, lengths, o);
    const auto [out_m, lse_m] =
        cache_attention(on_meta(q), m, format, on_meta(new_k), on_meta(new_v), on_meta(lengths), om);
    expect_like(out_m, out, what);
    expect_like(lse_m, lse, what);

    expect_like(cache_widen(m.pool, format), cache_widen(t.pool, format), what);
    cache_truncate(m, format, length);
    cache_copy_pages(m.pool, on_meta(longs({0})), on_meta(longs({1})));
    for (size_t i = 0; i < list(t).size(); i++) expect_like(list(m)[i], list(t)[i], what + " at the end");
  }
}

TEST(Meta, ShapesBeyondAnyMemory) {
  const at::Tensor x = at::empty({1, 1, 33554433, 64}, at::TensorOptions().device(at::kMeta).dtype(at::kHalf));
  const auto [codes, scale, zero] = quantize(x, 3, 1, 64);
  EXPECT_EQ(codes.sizes(), at::IntArrayRef({1, 1, 33554433, 8}));
  EXPECT_EQ(scale.sizes(), at::IntArrayRef({1, 1, 33554433, 1}));
  const at::Tensor wide = at::empty({1, int64_t{1} << 40}, at::TensorOptions().device(at::kMeta));
  EXPECT_EQ(std::get<0>(quantize(wide, 1, 3, 32)).size(1), (int64_t{3} << 40) / 8);
}

TEST(Meta, BadArgumentsRaiseTheSameErrors) {
  const auto format = cache_format(2, 16, 20, 2, 2, 16, 8, 4);
  const CacheTensors m = on_meta(make_tensors(format, 2, 1));
  const auto meta = [](at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
    return at::empty(sizes, at::TensorOptions().device(at::kMeta).dtype(type));
  };
  const at::Tensor k = meta({2, 2, 3, 16}), v = meta({2, 2, 3, 20}), q = meta({2, 4, 3, 16});
  expect_error([&] { quantize(meta({4, 40}), 2); }, {"axis", "2"});
  expect_error([&] { quantize(meta({4, 40}), 1, 5); }, {"bits", "5"});
  expect_error([&] { fake_quantize(meta({4, 40}, at::kLong), 1); }, {"x", "Long"});
  expect_error(
      [&] {
        dequantize(meta({4, 9}, at::kByte), meta({4, 2}), meta({4, 2}), 1, 2, 32, 40);
      },
      {"codes", "9", "10"});
  expect_error([&] { cache_append(m, k, meta({2, 3, 3, 20}), format); }, {"v", "head count 3", "2"});
  expect_error([&] { cache_append(m, k, v, format, at::zeros({2}, at::kLong)); }, {"new_lengths", "cpu", "meta"});
  expect_error([&] { cache_append(m, k, v, format, {}, meta({2}, at::kInt)); }, {"overflow", "2"});
  expect_error([&] { cache_attention(meta({2, 3, 3, 16}), m, format); }, {"q", "head count 3", "2"});
  expect_error([&] { cache_attention(at::zeros({2, 4, 3, 16}), m, format); }, {"q", "cpu", "meta"});
  expect_error([&] { cache_attention(q, m, format, k); }, {"new_k", "new_v"});
  expect_error([&] { cache_attention(q.narrow(2, 0, 2), m, format, k, v, meta({2}, at::kLong)); }, {"q", "2", "3"});
  expect_error([&] { cache_dequantize(m, format, -1); }, {"length", "-1"});
  expect_error([&] { cache_truncate(m, format, -1); }, {"length", "-1"});
  expect_error([&] { cache_copy_pages(m.pool, meta({2}, at::kLong), meta({1}, at::kLong)); }, {"target", "1", "2"});
  expect_error([&] { cache_widen(meta({1, 7}, at::kByte), format); }, {"pool", "7"});
}

TEST(Meta, TheClassRefusesMetaTensors) {
  KVCache cache(2, 16);
  const at::Tensor k = at::empty({1, 2, 3, 16}, at::TensorOptions().device(at::kMeta));
  expect_error([&] { cache.append(k, k); }, {"k", "meta"});
  EXPECT_EQ(cache.batch_size(), 0);
}

}  // namespace
}  // namespace kivi::test
