// Saved caches that were changed: from_state must refuse them with a c10::Error, or give a cache that works. An input
// chooses a small cache, what is done to its state, and whether the state is sealed again with the checksum that it
// then needs; without that no change would ever get past the checksum.
#include "tests/fuzz/tensors.h"
#include "tests/sealed.h"

namespace kivi::fuzz {
namespace {

using Loaded = c10::intrusive_ptr<KVCache>;

using test::checksum_of;
constexpr size_t kBatchAt = 2, kChecksumAt = test::kStateChecksumAt, kFormatSizeAt = 5, kFormatAt = 6;

Loaded make_cache(Bytes& in) {
  const CacheOptions options = small_options(in);
  auto cache = c10::make_intrusive<KVCache>(options);
  if (!options.k_classes.empty() && in.one_in(3)) {
    const at::Tensor order = at::arange(options.head_dim - 1, -1, -1, at::kLong);
    cache->set_key_order(order.expand({options.num_kv_heads, options.head_dim}));
  }
  if (in.one_in(8)) return cache;
  const int64_t batch = in.number(0, 3), heads = options.num_kv_heads;
  const auto type = float_type(in);
  for (int64_t calls = in.number(1, 2); calls > 0; calls--) {
    const int64_t tokens = in.byte() % 200;
    const at::Tensor k = numbers(in, {batch, heads, tokens, options.head_dim}, type);
    const at::Tensor v = numbers(in, {batch, heads, tokens, *options.value_head_dim}, type);
    std::optional<at::Tensor> lengths;
    if (in.flag()) {
      std::vector<int64_t> counts;
      for (int64_t b = 0; b < batch; b++) counts.push_back(in.byte() % (tokens + 1));
      lengths = longs(counts);
    }
    cache->append(k, v, lengths);
  }
  if (in.one_in(3) && batch > 0) cache->repeat_interleave(2);
  if (in.one_in(3)) cache->truncate(in.byte());
  return cache;
}

// ---- changes

at::Tensor changed_bytes(Bytes& in, const at::Tensor& t) {
  at::Tensor copy = t.clone(at::MemoryFormat::Contiguous);
  const auto size = copy.nbytes();
  if (size == 0) return copy;
  auto* const data = static_cast<uint8_t*>(copy.data_ptr());
  if (in.one_in(4)) {
    std::memset(data, in.byte(), size);
  } else {
    for (int64_t count = in.number(1, 8); count > 0; count--) data[in.word() % size] = in.byte();
  }
  return copy;
}

at::Tensor changed(Bytes& in, const at::Tensor& t) {
  const int64_t last = t.dim() - 1;
  switch (in.byte() % 16) {
    case 0:
      return {};
    case 1:
      return t.to(
          in.pick({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kByte, at::kShort, at::kInt, at::kLong}));
    case 2:
      return last < 0 || t.size(last) == 0 ? t : t.narrow(last, 0, t.size(last) - 1);
    case 3:
      return last < 0 ? t : at::cat({t, t}, in.byte() % t.dim());
    case 4:
      return t.unsqueeze(in.byte() % (t.dim() + 1));
    case 5:
      return last < 1 ? t : t.transpose(0, last);
    case 6:
      return last < 1 ? t : t.transpose(0, last).contiguous().transpose(0, last);  // the same with other strides
    case 7:
      return t.numel() == 0 ? t : t.flatten().narrow(0, 0, 1).expand(t.numel()).view(t.sizes());
    case 8:
      return t.to(at::kMeta);
    case 9:
      return t.to_sparse();
    case 10:
      return last < 0 || t.size(0) == 0 ? t : t.narrow(0, 0, t.size(0) - 1);
    default:
      return changed_bytes(in, t);
  }
}

void change_integers(Bytes& in, std::vector<int64_t>& ints) {
  const size_t at = in.byte() % (ints.size() + 1);
  switch (in.byte() % 8) {
    case 0:
      ints.insert(ints.begin() + static_cast<int64_t>(at), in.any());
      break;
    case 1:
      ints.resize(at);
      break;
    case 2:
      if (at < ints.size()) ints.erase(ints.begin() + static_cast<int64_t>(at));
      break;
    case 3:
      if (at < ints.size()) ints[at] = in.any();
      break;
    default:
      if (at < ints.size()) {
        ints[at] = static_cast<int64_t>(static_cast<uint64_t>(ints[at]) + static_cast<uint64_t>(in.number(-20, 20)));
      }
  }
}

void change(Bytes& in, KVCache::State& state) {
  auto& [header, ints, tensors] = state;
  const int kind = in.byte() % 16;
  if (kind == 0) {
    header += "x";
  } else if (kind < 6 || tensors.empty()) {
    change_integers(in, ints);
  } else {
    const size_t at = in.byte() % tensors.size();
    if (kind == 6) {
      tensors.erase(tensors.begin() + static_cast<int64_t>(at));
    } else if (kind == 7) {
      tensors.push_back(tensors[at]);
    } else if (kind == 8) {
      std::swap(tensors[at], tensors[in.byte() % tensors.size()]);
    } else if (is_readable(tensors[at])) {
      tensors[at] = changed(in, tensors[at]);
    }
  }
}

bool can_be_sealed(const KVCache::State& state) {
  bool readable = std::get<1>(state).size() > kChecksumAt;
  for (const at::Tensor& t : std::get<2>(state)) readable = readable && is_readable(t);
  return readable;
}

// A cache of 2^30 exact tokens is a right one, and too large to try here.
bool is_small(const KVCache::State& state) {
  const auto& ints = std::get<1>(state);
  if (ints.size() <= kFormatAt || ints[kFormatSizeAt] < 0) return true;
  const auto size = static_cast<size_t>(ints[kFormatSizeAt]);
  if (size > ints.size() - kFormatAt) return true;
  return fuzz::is_small(at::IntArrayRef(ints).slice(kFormatAt, size), std::max<int64_t>(ints[kBatchAt], 0));
}

// ---- what a loaded cache must do

Loaded load(const KVCache::State& state) { return KVCache::from_state(state); }

void check_round_trip(const KVCache& cache) {
  const KVCache::State state = cache.state();
  KIVI_REQUIRE(can_be_sealed(state) && checksum_of(state) == std::get<1>(state)[kChecksumAt]);
  const Loaded again = load(state);
  KIVI_REQUIRE(same_state(again->state(), state));
  const auto [k, v] = cache.dequantize();
  const auto [k_again, v_again] = again->dequantize();
  KIVI_REQUIRE(same_bits(k, k_again) && same_bits(v, v_again));
}

void check_works(Bytes& in, KVCache& cache) {
  check_round_trip(cache);
  const CacheOptions& o = cache.options();
  const int64_t batch = cache.batch_size(), heads = o.num_kv_heads, length = cache.length();
  const auto [k, v] = cache.dequantize();
  KIVI_REQUIRE(k.size(2) == length && v.size(2) == length && k.size(3) == o.head_dim);
  KIVI_REQUIRE(cache.quantized_length() <= length && cache.nbytes() >= 0 && cache.bits_per_element() > 0);
  if (!o.k_classes.empty()) cache.key_order();
  const int64_t rows = in.number(1, 3);
  const at::Tensor q = numbers(in, {batch, 2 * heads, rows, o.head_dim}, float_type(in));
  const at::Tensor out = cache.attend(q);
  KIVI_REQUIRE(out.size(0) == batch && out.size(3) == *o.value_head_dim && out.scalar_type() == q.scalar_type());
  const int64_t tokens = in.pick<int64_t>({1, 1, 40});
  const at::Tensor new_k = numbers(in, {batch, heads, tokens, o.head_dim}, k.scalar_type());
  cache.append(new_k, numbers(in, {batch, heads, tokens, *o.value_head_dim}, k.scalar_type()));
  KIVI_REQUIRE(batch == 0 || cache.length() == length + tokens);
  check_round_trip(cache);
  if (batch > 0) cache.repeat_interleave(in.number(1, 2));
  cache.truncate(in.byte());
  check_round_trip(cache);
}

void run(Bytes in) {
  const KVCache::State good = make_cache(in)->state();
  KVCache::State state = good;
  const int64_t changes = in.number(0, 3);
  for (int64_t i = 0; i < changes; i++) {
    try {
      change(in, state);
    } catch (const c10::Error&) {  // torch does not convert every tensor into every other
    }
  }
  if (!in.one_in(8) && can_be_sealed(state)) std::get<1>(state)[kChecksumAt] = checksum_of(state);
  if (!is_small(state)) return;
  Loaded cache;
  try {
    cache = load(state);
  } catch (const c10::Error&) {
    KIVI_REQUIRE(changes > 0);
    return;
  }
  KIVI_REQUIRE(can_be_sealed(state) && checksum_of(state) == std::get<1>(state)[kChecksumAt]);
  if (changes == 0) KIVI_REQUIRE(same_state(cache->state(), good));
  // An empty cache has no batch size yet.
  if (cache->batch_size() == 0) {
    check_round_trip(*cache);
    return;
  }
  check_works(in, *cache);
}

}  // namespace
}  // namespace kivi::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kivi::fuzz::run({data, size});
  return 0;
}
