// Every operator of torch.ops.kivi, and the methods of kivi::KVCache, with arguments made from bytes: right ones that
// were changed in a few places (rank, sizes, strides, offset, dtype, device, layout, values, integers). A call must
// throw a c10::Error or succeed. What it does not mutate stays as it was; results look as the Meta kernels say; a
// KVCache is the same after an error.
#include <cmath>
#include <optional>

#include "tests/fuzz/tensors.h"

namespace kivi::fuzz {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Sizes that only a tensor expanded from one element can have, and that no allocation can.
int64_t huge(Bytes& in) {
  return in.pick<int64_t>({int64_t{1} << 48, int64_t{1} << 61, int64_t{1} << 62, std::numeric_limits<int64_t>::max()});
}

// ---------------------------------------------------------------------------------------------- arguments

// The same numbers with other strides, in a larger storage, from an offset on.
at::Tensor strided(Bytes& in, const at::Tensor& t) {
  if (t.dim() == 0) return t;
  const int64_t axis = in.byte() % t.dim(), last = t.dim() - 1;
  switch (in.byte() % 4) {
    case 0:
      return t.transpose(axis, last).contiguous().transpose(axis, last);
    case 1:
      return at::cat({t, t}, axis).narrow(axis, t.size(axis), t.size(axis));
    case 2:
      return at::stack({t, t}, axis + 1).select(axis + 1, 1);
    default:
      return t.size(axis) == 0 ? t : t.narrow(axis, 0, 1).expand(t.sizes());
  }
}

// One change that mostly makes the argument a wrong one.
at::Tensor changed(Bytes& in, const at::Tensor& t) {
  const int64_t axis = t.dim() == 0 ? 0 : in.byte() % t.dim();
  std::vector<int64_t> sizes = t.sizes().vec();
  switch (in.byte() % 14) {
    case 0:
      return {};
    case 1:
      return t.to(in.pick({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kByte, at::kShort, at::kInt,
                           at::kLong, at::kBool, at::kComplexFloat, at::kChar}));
    case 2:
      return t.unsqueeze(in.byte() % (t.dim() + 1));
    case 3:
      return t.dim() == 0 ? t : t.select(axis, 0);
    case 4:
      return t.dim() == 0 ? t : t.narrow(axis, 0, in.byte() % (t.size(axis) + 1));
    case 5:
      return t.dim() == 0 ? t : at::cat({t, t}, axis);
    case 6:
      return t.flatten();
    case 7:
      return t.to(at::kMeta);
    case 8:
      return t.to_sparse();
    case 9:
      if (t.dim() == 0) return t;
      sizes[static_cast<size_t>(axis)] = in.flag() ? huge(in) : 0;
      return at::zeros({1}, t.options()).expand(sizes);
    case 10:
      if (t.dim() < 2) return t;
      sizes.assign(sizes.size(), huge(in));
      sizes[static_cast<size_t>(axis)] = 0;
      return at::empty_strided(sizes, std::vector<int64_t>(sizes.size(), 0), t.options());
    case 11:
      return at::_neg_view(t);
    case 12:
      return at::isFloatingType(t.scalar_type()) ? t.clone().set_requires_grad(true) : t;
    default:
      return strided(in, t);
  }
}

// Remembers what a call was given, to see that it did not write to it.
class Arguments {
 public:
  explicit Arguments(Bytes& bytes) : in_(bytes) {}

  // `right`, now and then changed. Where torch cannot make such a tensor: `right`.
  at::Tensor add(const at::Tensor& right, bool mutated = false) {
    at::Tensor t = right;
    try {
      t = in_.one_in(20) ? changed(in_, right) : in_.one_in(10) ? strided(in_, right) : right;
    } catch (const c10::Error&) {
    }
    if (!mutated && is_readable(t) && t.numel() < (1 << 20)) before_.emplace_back(t, t.detach().clone());
    return t;
  }
  OptionalTensor add_optional(const at::Tensor& right) {
    return in_.flag() ? OptionalTensor(add(right)) : std::nullopt;
  }

  void check_unchanged() const {
    for (const auto& [t, copy] : before_) KIVI_REQUIRE(same_bits(t, copy));
  }

 private:
  Bytes& in_;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

// Whether `call` threw a c10::Error. Everything else that is thrown ends the program.
template <class Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

// ---------------------------------------------------------------------------------------------- what Meta says

at::Tensor on_meta(const at::Tensor& t) {
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).requires_grad(false));
}
OptionalTensor on_meta(const OptionalTensor& t) { return t ? OptionalTensor(on_meta(*t)) : std::nullopt; }

void require_alike(const at::Tensor& meta, const at::Tensor& real) {
  KIVI_REQUIRE(meta.scalar_type() == real.scalar_type() && meta.sizes() == real.sizes());
  KIVI_REQUIRE(real.numel() == 0 || meta.strides() == real.strides());
}

// ---------------------------------------------------------------------------------------------- dense operators

struct Dense {
  at::Tensor x;
  int64_t axis, bits, group;
};

Dense make_dense(Bytes& in, Arguments& arguments) {
  std::vector<int64_t> sizes;
  for (int64_t rank = in.number(0, 4); rank > 0; rank--) sizes.push_back(in.number(0, 9) * in.pick<int64_t>({1, 1, 7}));
  Dense d;
  d.x = arguments.add(numbers(in, sizes, float_type(in)));
  const auto rank = std::max<int64_t>(static_cast<int64_t>(sizes.size()), 1);
  d.axis = in.mostly(in.number(-rank, rank - 1));
  d.bits = in.mostly(in.pick<int64_t>({2, 1, 3, 4, 8}));
  d.group = in.mostly(in.pick<int64_t>({32, 1, 3, 16, 64}), 8);
  return d;
}

void run_quantize(Bytes& in) {
  Arguments arguments(in);
  const Dense d = make_dense(in, arguments);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> real;
  const bool failed = throws([&] { real = quantize(d.x, d.axis, d.bits, d.group); });
  arguments.check_unchanged();
  if (failed || d.x.is_meta()) return;
  const auto [codes, scale, zero] = real;
  const auto meta = quantize(on_meta(d.x), d.axis, d.bits, d.group);
  require_alike(std::get<0>(meta), codes);
  require_alike(std::get<1>(meta), scale);
  require_alike(std::get<2>(meta), zero);
  const at::Tensor once = fake_quantize(d.x, d.axis, d.bits, d.group);
  const at::Tensor twice = dequantize(codes, scale, zero, d.axis, d.bits, d.group, d.x.size(d.axis));
  KIVI_REQUIRE(same_bits(once, twice));
}

void run_fake_quantize(Bytes& in) {
  Arguments arguments(in);
  const Dense d = make_dense(in, arguments);
  at::Tensor real;
  const bool failed = throws([&] { real = fake_quantize(d.x, d.axis, d.bits, d.group); });
  arguments.check_unchanged();
  if (failed || d.x.is_meta()) return;
  require_alike(fake_quantize(on_meta(d.x), d.axis, d.bits, d.group), real);
}

void run_dequantize(Bytes& in) {
  Arguments arguments(in);
  const int64_t outer = in.number(0, 3), inner = in.number(0, 3), n = in.number(0, 40);
  const int64_t bits = in.pick<int64_t>({2, 1, 3, 4, 8}), group = in.pick<int64_t>({32, 1, 3, 16, 64});
  const int64_t size = in.mostly(n, 8), given_group = in.mostly(group, 8), given_bits = in.mostly(bits);
  const int64_t bytes = ceil_div(n * bits, 8), groups = ceil_div(n, group);
  const at::Tensor right = at::full({outer, bytes, inner}, in.byte(), at::kByte);
  const at::Tensor codes = arguments.add(right);
  const at::Tensor scale = arguments.add(numbers(in, {outer, groups, inner}, at::kFloat));
  const at::Tensor zero = arguments.add(numbers(in, {outer, groups, inner}, at::kFloat));
  const int64_t axis = in.mostly(in.pick<int64_t>({1, -2}));
  const at::ScalarType type = in.one_in(16) ? at::kDouble : float_type(in);
  const auto call = [&](const at::Tensor& c, const at::Tensor& s, const at::Tensor& z) {
    return dequantize(c, s, z, axis, given_bits, given_group, size, type);
  };
  at::Tensor real;
  const bool failed = throws([&] { real = call(codes, scale, zero); });
  arguments.check_unchanged();
  if (failed || codes.is_meta()) return;
  require_alike(call(on_meta(codes), on_meta(scale), on_meta(zero)), real);
}

// ---------------------------------------------------------------------------------------------- formats

std::vector<double> search_parts(Bytes& in) {
  std::vector<double> parts;
  for (int64_t count = in.one_in(4) ? in.number(0, 18) : 0; count > 0; count--) {
    parts.push_back(in.pick({0.9, 0.5, 1.0, 0.0, -1.0, 1.5, 1e300, std::nan("")}));
  }
  return parts;
}

CacheOptions any_options(Bytes& in) {
  CacheOptions o = small_options(in);
  o.num_kv_heads = in.mostly(o.num_kv_heads);
  o.head_dim = in.mostly(o.head_dim);
  if (in.flag()) o.value_head_dim = in.mostly(*o.value_head_dim, 8);
  o.k_bits = in.mostly(o.k_bits);
  o.v_bits = in.mostly(o.v_bits);
  o.group_size = in.mostly(o.group_size);
  o.residual_length = in.mostly(o.residual_length);
  o.sink_length = in.mostly(o.sink_length);
  if (in.one_in(16)) o.scale_dtype = "float7";
  if (in.one_in(16)) o.precision = "";
  if (in.one_in(8)) o.v_group_size = in.any();
  o.k_search = search_parts(in);
  o.v_search = search_parts(in);
  if (in.one_in(8)) {
    o.k_classes.clear();
    for (int64_t count = in.number(0, 10); count > 0; count--) o.k_classes.push_back(in.mostly(in.number(0, 64), 4));
  }
  if (in.one_in(4)) {
    o = CacheOptions();
    o.num_kv_heads = in.mostly(in.number(1, 3));
    o.head_dim = in.mostly(in.number(1, 255), 6);
    o.recipe = in.pick({"balanced", "compact", "quality", "near-lossless", "kivi", "none"});
    if (in.one_in(4)) o.value_head_dim = in.any();
  }
  return o;
}

std::vector<int64_t> changed_format(Bytes& in, std::vector<int64_t> format) {
  for (int64_t count = in.one_in(12) ? in.number(1, 3) : 0; count > 0; count--) {
    const size_t at = in.byte() % (format.size() + 1);
    if (at == format.size()) {
      format.push_back(in.any());
    } else if (in.one_in(8)) {
      format.resize(at);
    } else {
      format[at] = in.flag() ? in.any() : format[at] + in.number(-1, 1);
    }
  }
  return format;
}

void run_format(Bytes& in) {
  const CacheOptions o = any_options(in);
  std::vector<int64_t> format;
  if (throws([&] { format = cache_format(o); })) {
    KIVI_REQUIRE(throws([&] { KVCache cache(o); }));
    return;
  }
  const KVCache cache(o);
  const Format& f = cache.format();
  KIVI_REQUIRE(cache_page_bytes(format) == page_bytes(f).value);
  KIVI_REQUIRE(cache_window_capacity(format) == window_capacity(f));
  // The state of an empty cache holds the same integers, and they make the same format.
  const KVCache::State state = cache.state();
  const auto& ints = std::get<1>(state);
  KIVI_REQUIRE(std::vector<int64_t>(ints.end() - static_cast<int64_t>(format.size()), ints.end()) == format);
  KIVI_REQUIRE(KVCache::from_state(state)->format() == f);
  std::vector<int64_t> other = format;
  for (int64_t i = in.number(1, 3); i > 0; i--) other = changed_format(in, other);
  const bool wrong = throws([&] { cache_page_bytes(other); });
  KIVI_REQUIRE(wrong == throws([&] { cache_window_capacity(other); }));
}

// ---------------------------------------------------------------------------------------------- the cache as tensors

struct Plain {
  std::vector<int64_t> right_format, format;
  CacheOptions options;
  int64_t batch, length;
  at::ScalarType type;
  CacheTensors tensors;  // right ones
};

// A right cache of a few tokens.
Plain make_plain(Bytes& in) {
  Plain p;
  p.options = small_options(in);
  p.right_format = cache_format(p.options);
  p.batch = in.number(0, 2);
  p.type = float_type(in);
  const int64_t heads = p.options.num_kv_heads, pages = in.number(0, 2);
  const int64_t dim = p.options.head_dim, value_dim = *p.options.value_head_dim, sink = p.options.sink_length;
  const int64_t slots = cache_window_capacity(p.right_format);
  const auto exact = at::TensorOptions().dtype(p.type);
  CacheTensors& t = p.tensors;
  t.pool = at::zeros({p.batch * pages, cache_page_bytes(p.right_format)}, at::kByte);
  t.block_table = at::arange(p.batch * pages, at::kInt).view({p.batch, pages});
  t.lengths = at::zeros({p.batch}, at::kLong);
  t.quantized_lengths = at::zeros({p.batch}, at::kLong);
  t.sink_k = at::zeros({p.batch, heads, sink, dim}, exact);
  t.sink_v = at::zeros({p.batch, heads, sink, value_dim}, exact);
  t.window_k = at::zeros({p.batch, heads, slots, dim}, exact);
  t.window_v = at::zeros({p.batch, heads, slots, value_dim}, exact);
  if (!p.options.k_classes.empty()) {
    t.k_order = at::arange(dim - 1, -1, -1, at::kShort).expand({p.batch, heads, dim}).contiguous();
  }
  const int64_t tokens = in.byte() % (sink + p.options.residual_length + p.options.group_size + 128 * pages);
  p.length = 0;
  const at::Tensor k = numbers(in, {p.batch, heads, tokens, dim}, p.type);
  const at::Tensor v = numbers(in, {p.batch, heads, tokens, value_dim}, p.type);
  const at::Tensor overflow = at::zeros({1}, at::kInt);
  if (!throws([&] { cache_append(t, k, v, p.right_format, std::nullopt, overflow); }) && overflow.item<int>() == 0) {
    p.length = p.batch == 0 ? 0 : tokens;
  }
  if (in.one_in(4) && t.pool.numel() > 0) {  // records of any bytes
    auto* const data = t.pool.mutable_data_ptr<uint8_t>();
    for (int64_t i = 0; i < std::min<int64_t>(t.pool.numel(), 64); i++) {
      data[static_cast<int64_t>(in.word() % static_cast<uint64_t>(t.pool.numel()))] = in.byte();
    }
  }
  p.format = changed_format(in, p.right_format);
  return p;
}

// Values in lengths and tables that are wrong, or that name what is not there.
void change_values(Bytes& in, const CacheTensors& t) {
  if (!in.one_in(6)) return;
  const at::Tensor target = in.pick({t.lengths, t.quantized_lengths, t.block_table, t.k_order});
  if (!target.defined() || target.numel() == 0) return;
  at::Tensor flat = target.view({-1});
  const int64_t value = in.flag() ? in.any() : in.number(-2, 200);
  flat.select(0, in.byte() % flat.numel()).copy_(at::scalar_tensor(value, at::kLong));
}

CacheTensors add_all(Arguments& arguments, const CacheTensors& t, bool append, bool truncate) {
  const bool any = append || truncate;
  CacheTensors all;
  all.pool = arguments.add(t.pool, append);
  all.block_table = arguments.add(t.block_table);
  all.lengths = arguments.add(t.lengths, any);
  all.quantized_lengths = arguments.add(t.quantized_lengths, any);
  all.sink_k = arguments.add(t.sink_k, append);
  all.sink_v = arguments.add(t.sink_v, append);
  all.window_k = arguments.add(t.window_k, any);
  all.window_v = arguments.add(t.window_v, any);
  if (t.k_order.defined()) all.k_order = arguments.add(t.k_order);
  return all;
}

CacheTensors on_meta(const CacheTensors& t) {
  return {on_meta(t.pool),   on_meta(t.block_table), on_meta(t.lengths),  on_meta(t.quantized_lengths),
          on_meta(t.sink_k), on_meta(t.sink_v),      on_meta(t.window_k), on_meta(t.window_v),
          on_meta(t.k_order)};
}

// Tokens that fit the cache, and how many of them each row takes.
struct NewTokens {
  at::Tensor k, v;
  OptionalTensor lengths;
};

NewTokens add_new_tokens(Bytes& in, Arguments& arguments, const Plain& p, int64_t tokens) {
  NewTokens t;
  t.k = arguments.add(numbers(in, {p.batch, p.options.num_kv_heads, tokens, p.options.head_dim}, p.type));
  t.v = arguments.add(numbers(in, {p.batch, p.options.num_kv_heads, tokens, *p.options.value_head_dim}, p.type));
  std::vector<int64_t> counts;
  for (int64_t b = 0; b < p.batch; b++) counts.push_back(in.mostly(in.byte() % (tokens + 1), 12));
  t.lengths = arguments.add_optional(longs(counts));
  return t;
}

void run_append(Bytes& in) {
  const Plain p = make_plain(in);
  change_values(in, p.tensors);
  Arguments arguments(in);
  const CacheTensors t = add_all(arguments, p.tensors, true, false);
  const NewTokens fresh = add_new_tokens(in, arguments, p, in.byte() % 80);
  OptionalTensor overflow;
  if (in.flag()) {
    const at::Tensor flag = at::zeros({1}, at::kInt);
    overflow = arguments.add(flag, true);
  }
  const at::Tensor lengths = p.tensors.lengths.clone(), quantised = p.tensors.quantized_lengths.clone();
  const bool failed = throws([&] { cache_append(t, fresh.k, fresh.v, p.format, fresh.lengths, overflow); });
  arguments.check_unchanged();
  if (failed) {
    KIVI_REQUIRE(same_bits(lengths, p.tensors.lengths) && same_bits(quantised, p.tensors.quantized_lengths));
  } else if (!t.pool.is_meta()) {
    cache_append(on_meta(t), on_meta(fresh.k), on_meta(fresh.v), p.format, on_meta(fresh.lengths), on_meta(overflow));
    // What was appended can be read.
    cache_dequantize(t, p.format, t.lengths.numel() == 0 ? 0 : t.lengths.max().item<int64_t>());
  }
}

CacheAttentionOptions add_attention_options(Bytes& in, Arguments& arguments, const at::Tensor& q, int64_t keys) {
  CacheAttentionOptions o;
  const int64_t batch = q.size(0), heads = q.size(1), rows = q.size(2);
  o.is_causal = in.flag();
  if (in.flag()) o.scale = in.pick({0.25, 0.0, -1.0, 1e38, 1e300, std::nan("")});
  if (in.one_in(3)) o.softcap = in.pick({30.0, 1e-40, -1.0, 1e300, std::nan("")});
  if (in.one_in(3)) o.window = in.mostly(in.byte(), 4);
  if (in.one_in(3)) {
    const int64_t b = in.flag() ? batch : 1, h = in.flag() ? heads : 1, r = in.flag() ? rows : 1;
    const at::Tensor scores = numbers(in, {b, h, r, in.one_in(4) ? 1 : keys}, at::kFloat);
    o.attn_mask = arguments.add(in.flag() ? scores > 0 : scores.to(float_type(in)));
  }
  if (in.one_in(3)) o.sinks = arguments.add(numbers(in, {heads}, float_type(in)));
  if (in.one_in(3)) {
    o.alibi_slopes =
        arguments.add(in.flag() ? numbers(in, {heads}, at::kFloat) : numbers(in, {batch, heads}, at::kHalf));
  }
  o.precision = in.one_in(24) ? "slow" : in.flag() ? "exact" : "fast";
  return o;
}

// Attention over tokens that are 2^48 times the same one is right, and takes years.
bool takes_years(const NewTokens& fresh) { return fresh.k.defined() && fresh.k.dim() == 4 && fresh.k.size(2) > 4096; }

void run_attention(Bytes& in) {
  const Plain p = make_plain(in);
  change_values(in, p.tensors);
  Arguments arguments(in);
  const CacheTensors t = add_all(arguments, p.tensors, false, false);
  const int64_t rows = in.number(0, 5), heads = p.options.num_kv_heads * in.number(1, 3);
  const at::Tensor right_q = numbers(in, {p.batch, heads, rows, p.options.head_dim}, float_type(in));
  const at::Tensor q = arguments.add(right_q);
  NewTokens fresh;
  OptionalTensor k, v;
  int64_t keys = p.length;
  if (in.flag()) {
    const int64_t tokens = in.flag() ? rows : in.number(0, 5);
    fresh = add_new_tokens(in, arguments, p, tokens);
    if (takes_years(fresh)) return;
    keys += tokens;
    if (!in.one_in(16)) k = fresh.k;
    if (!in.one_in(16)) v = fresh.v;
  }
  const CacheAttentionOptions o = add_attention_options(in, arguments, right_q, keys);
  std::tuple<at::Tensor, at::Tensor> real;
  const bool failed = throws([&] { real = cache_attention(q, t, p.format, k, v, fresh.lengths, o); });
  arguments.check_unchanged();
  if (failed || t.pool.is_meta()) return;
  CacheAttentionOptions on = o;
  on.attn_mask = on_meta(o.attn_mask);
  on.sinks = on_meta(o.sinks);
  on.alibi_slopes = on_meta(o.alibi_slopes);
  const auto meta =
      cache_attention(on_meta(q), on_meta(t), p.format, on_meta(k), on_meta(v), on_meta(fresh.lengths), on);
  require_alike(std::get<0>(meta), std::get<0>(real));
  require_alike(std::get<1>(meta), std::get<1>(real));
}

void run_cache_dequantize(Bytes& in) {
  const Plain p = make_plain(in);
  change_values(in, p.tensors);
  Arguments arguments(in);
  const CacheTensors t = add_all(arguments, p.tensors, false, false);
  const int64_t length = in.one_in(4) ? in.pick({huge(in), in.number(-1, 100)}) : p.length;
  std::tuple<at::Tensor, at::Tensor> real;
  const bool failed = throws([&] { real = cache_dequantize(t, p.format, length); });
  arguments.check_unchanged();
  if (failed || t.pool.is_meta()) return;
  const auto meta = cache_dequantize(on_meta(t), p.format, length);
  require_alike(std::get<0>(meta), std::get<0>(real));
  require_alike(std::get<1>(meta), std::get<1>(real));
}

void run_truncate(Bytes& in) {
  const Plain p = make_plain(in);
  change_values(in, p.tensors);
  Arguments arguments(in);
  const CacheTensors t = add_all(arguments, p.tensors, false, true);
  const int64_t length = in.mostly(in.byte(), 6);
  const at::Tensor lengths = p.tensors.lengths.clone();
  const bool failed = throws([&] { cache_truncate(t, p.format, length); });
  arguments.check_unchanged();
  if (failed) {
    KIVI_REQUIRE(same_bits(lengths, p.tensors.lengths));
  } else if (!t.pool.is_meta()) {
    cache_truncate(on_meta(t), p.format, length);
    cache_dequantize(t, p.format, t.lengths.numel() == 0 ? 0 : t.lengths.max().item<int64_t>());
  }
}

void run_copy_pages(Bytes& in) {
  Arguments arguments(in);
  const int64_t pages = in.number(0, 6), count = in.number(0, 3);
  std::vector<int64_t> source, target;
  for (int64_t i = 0; i < count; i++) {
    source.push_back(in.mostly(in.number(-1, 6)));
    target.push_back(in.mostly(in.number(-1, 6)));
  }
  const at::Tensor pool = arguments.add(at::full({pages, in.number(0, 80)}, in.byte(), at::kByte), true);
  const at::Tensor from = arguments.add(longs(source)), to = arguments.add(longs(target));
  const bool failed = throws([&] { cache_copy_pages(pool, from, to); });
  arguments.check_unchanged();
  if (!failed && !pool.is_meta()) cache_copy_pages(on_meta(pool), on_meta(from), on_meta(to));
}

void run_widen(Bytes& in) {
  const Plain p = make_plain(in);
  Arguments arguments(in);
  const at::Tensor pool = arguments.add(p.tensors.pool);
  at::Tensor real;
  const bool failed = throws([&] { real = cache_widen(pool, p.format); });
  arguments.check_unchanged();
  if (!failed && !pool.is_meta()) require_alike(cache_widen(on_meta(pool), p.format), real);
}

// ---------------------------------------------------------------------------------------------- the class

AttentionOptions of_cache(const CacheAttentionOptions& o) {
  return {o.attn_mask, o.is_causal, o.scale, o.softcap, o.window, o.sinks, o.alibi_slopes};
}

// One call of a method, with arguments that mostly fit.
void call_method(Bytes& in, Arguments& arguments, KVCache& cache, at::ScalarType type) {
  const CacheOptions& o = cache.options();
  const int64_t batch = cache.batch_size() > 0 ? cache.batch_size() : in.number(0, 2), heads = o.num_kv_heads;
  const int64_t tokens = in.byte() % 70, query_heads = heads * in.number(1, 2);
  const auto rows = [&] {
    std::vector<int64_t> all;
    for (int64_t i = in.one_in(4) ? in.number(0, 3) : batch; i > 0; i--) all.push_back(in.byte() % (batch + 1));
    return arguments.add(longs(all));
  };
  const auto tokens_of = [&](int64_t h, int64_t count, int64_t channels) {
    return arguments.add(numbers(in, {batch, h, count, channels}, type));
  };
  const auto counts = [&] {
    std::vector<int64_t> all;
    for (int64_t b = 0; b < batch; b++) all.push_back(in.mostly(in.byte() % (tokens + 1), 12));
    return arguments.add_optional(longs(all));
  };
  switch (in.byte() % 12) {
    case 0:
    case 1:
    case 2: {
      const at::Tensor k = tokens_of(heads, tokens, o.head_dim), v = tokens_of(heads, tokens, *o.value_head_dim);
      const OptionalTensor lengths = counts();
      OptionalTensor q;
      if (in.one_in(3)) q = tokens_of(query_heads, tokens, o.head_dim);
      return cache.append(k, v, lengths, q);
    }
    case 3:
    case 4: {
      const at::Tensor q = tokens_of(query_heads, tokens, o.head_dim);
      const at::Tensor k = tokens_of(heads, tokens, o.head_dim), v = tokens_of(heads, tokens, *o.value_head_dim);
      CacheAttentionOptions options;
      if (in.flag() && q.defined() && q.dim() == 4) {
        options = add_attention_options(in, arguments, numbers(in, {batch, query_heads, tokens, 1}, type),
                                        cache.length() + tokens);
      }
      cache.forward(q, k, v, of_cache(options), counts());
      return;
    }
    case 5: {
      const int64_t count = in.number(0, 4);
      const at::Tensor q = tokens_of(query_heads, count, o.head_dim);
      // attend on an empty cache has room for every row; 2^48 rows have none.
      if (q.defined() && q.dim() > 0 && q.size(0) > 4096) return;
      const at::Tensor like = numbers(in, {batch, query_heads, count, 1}, type);
      cache.attend_with_lse(q, of_cache(add_attention_options(in, arguments, like, cache.length())));
      return;
    }
    case 6:
      return cache.truncate(in.mostly(in.byte(), 6));
    case 7:
      return in.flag() ? cache.reorder(rows()) : cache.select(rows());
    case 8:
      return cache.repeat_interleave(in.number(-1, 2));
    case 9: {
      const int64_t wanted = in.one_in(4) ? in.pick({huge(in), int64_t{-1}}) : in.byte();
      return cache.reserve(wanted);
    }
    case 10: {
      const at::Tensor order = at::arange(o.head_dim - 1, -1, -1, at::kLong).expand({heads, o.head_dim});
      return cache.set_key_order(arguments.add(order));
    }
    default:
      return cache.reset();
  }
}

void run_class(Bytes& in) {
  KVCache cache(small_options(in));
  const auto type = float_type(in);
  for (int64_t calls = in.number(1, 6); calls > 0 && !in.ended(); calls--) {
    if (cache.batch_size() > 8) return;
    Arguments arguments(in);
    const KVCache::State before = cache.state();
    if (throws([&] { call_method(in, arguments, cache, type); })) KIVI_REQUIRE(same_state(cache.state(), before));
    arguments.check_unchanged();
  }
  const auto loaded = KVCache::from_state(cache.state());
  KIVI_REQUIRE(same_state(loaded->state(), cache.state()));
  const auto copy = cache.clone();
  KIVI_REQUIRE(same_bits(std::get<0>(copy->dequantize()), std::get<0>(cache.dequantize())));
}

void run(Bytes in) {
  switch (in.byte() % 16) {
    case 0:
      return run_quantize(in);
    case 1:
      return run_fake_quantize(in);
    case 2:
      return run_dequantize(in);
    case 3:
      return run_format(in);
    case 4:
    case 5:
      return run_append(in);
    case 6:
    case 7:
    case 8:
      return run_attention(in);
    case 9:
      return run_cache_dequantize(in);
    case 10:
      return run_truncate(in);
    case 11:
      return run_copy_pages(in);
    case 12:
      return run_widen(in);
    default:
      return run_class(in);
  }
}

}  // namespace
}  // namespace kivi::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kivi::fuzz::run({data, size});
  return 0;
}
