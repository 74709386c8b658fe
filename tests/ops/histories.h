// Histories: a list of calls on a kivi::KVCache, carried out beside the model of model.h and compared after every call.
// A call says what it does with four numbers, and all tensors come from its seed, so that a history can be printed,
// pasted into a test, and made smaller: each call means something whatever was dropped before it.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>

#include "tests/ops/attention_reference.h"
#include "tests/ops/model.h"
#include "tests/ops/recipe_reference.h"

namespace kivi::test {

enum class Do {
  kAppend,       // n tokens
  kForward,      // n tokens
  kAttend,       // n query rows
  kTruncate,     // to n tokens
  kReorder,      // the seed chooses the rows
  kSelect,       // n rows that the seed chooses
  kRepeat,       // n times, if that gives at most 8 rows
  kClone,        // and goes on with the copy if n is odd; both are held to their models from now on
  kSwitch,       // goes on with cache n of those that there are
  kSaveAndLoad,  // state, from_state
  kReset,        // the next tokens have another batch size and dtype
  kReserve,      // n tokens
  kGiveOrder,    // set_key_order, if the format has classes
};

// How a call is made, as bits.
enum With : uint32_t {
  kRagged = 1,
  kBoolMask = 2,
  kFloatMask = 4,
  kNotCausal = 8,
  kWindow = 16,
  kSoftcap = 32,
  kSinks = 64,
  kSlopes = 128,
  kScale = 256,
  kOtherType = 512,    // a query of another dtype than the cache
  kQueries = 1024,     // append takes queries too
  kHuge = 2048,        // a value beyond float16's range
  kConstant = 4096,    // all tokens are equal
  kTransposed = 8192,  // k, v and q as views of [B, T, H, D]
};
inline constexpr uint32_t kAllWith = 16383;

struct Step {
  Do what;
  int64_t n;
  uint32_t seed;
  uint32_t with;
};

struct History {
  CacheOptions options;
  int64_t batch = 1, queries_per_head = 1;
  at::ScalarType type = at::kFloat;
  std::vector<Step> steps;
};

// What the model can quantise itself.
inline bool is_plain(const History& h) {
  const CacheOptions& o = h.options;
  for (const Step& step : h.steps) {
    if ((step.with & kHuge) != 0) return false;
  }
  return o.recipe.empty() && !o.range_search && o.scale_dtype != "float8" && o.k_search.empty() && o.v_search.empty() &&
         !o.k_bias_correction && !o.v_gain_correction && !o.v_symmetric && !o.v_rotated && o.k_classes.empty();
}

// A cache and what it should be. (Hidden, as the pointer is.)
class [[gnu::visibility("hidden")]] Twin {
 public:
  explicit Twin(const History& h) : h_(&h), cache_(c10::make_intrusive<KVCache>(h.options)) {}

  // Carries out any call but kClone and kSwitch. Throws if the result of the call is wrong.
  void carry_out(const Step& step);
  Twin clone() const {
    Twin copy = *this;
    copy.cache_ = cache_->clone();
    if (model_) copy.select(all_rows(1));
    return copy;
  }
  // Throws if the cache is not what it should be.
  void check();

 private:
  // The choice of classes of key channels of one row.
  struct RowOrder {
    at::Tensor queries, first_keys, order;  // sum of squares [Hkv, D]; what the choice rests on; what was chosen
  };

  static void require(const ::testing::AssertionResult& good, const std::string& what) {
    if (!good) throw std::runtime_error(what + (*good.message() == '\0' ? "" : ": ") + good.message());
  }
  static void require(bool good, const std::string& what) {
    if (!good) throw std::runtime_error(what);
  }

  int64_t batch() const { return model_ ? model_->batch() : (h_->batch + resets_ - 1) % 4 + 1; }
  at::ScalarType type() const {
    const at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};
    const int64_t first = std::find(types, types + 3, h_->type) - types;
    return types[(first + resets_) % 3];
  }
  const Format& format() const { return cache_->format(); }
  bool has_classes() const { return format().num_key_classes > 0; }
  int64_t query_heads() const { return h_->options.num_kv_heads * h_->queries_per_head; }
  int64_t longest() const {
    int64_t n = 0;
    for (int64_t b = 0; model_ && b < batch(); b++) n = std::max(n, model_->row(b).length());
    return n;
  }
  std::vector<int64_t> all_rows(int64_t times) const {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < batch() * times; i++) rows.push_back(i / times);
    return rows;
  }

  at::Tensor data(int64_t heads, int64_t tokens, int64_t dim, uint64_t seed, at::ScalarType as, const Step& step,
                  bool values = false) const;
  at::Tensor queries(const Step& step, int64_t rows) const {
    const at::ScalarType as = (step.with & kOtherType) == 0 ? type() : type() == at::kFloat ? at::kHalf : at::kFloat;
    return data(query_heads(), rows, h_->options.head_dim, step.seed, at::kFloat, step).mul(0.5).to(as);
  }
  AttentionOptions attention_options(const Step& step, int64_t rows, int64_t keys) const;
  double limit(const at::Tensor& q, const at::Tensor& new_k, const at::Tensor& new_v, const AttentionOptions& o) const;
  Result wanted(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& counts,
                const AttentionOptions& o) const;
  void add_tokens(const Step& step);
  void attend(const Step& step) const;
  void note_pages(int64_t reserved_pages);
  void select(const std::vector<int64_t>& rows);
  void check_order(RowOrder & row, const at::Tensor& order, bool is_quantized, int64_t b) const;
  void check_quantized(const at::Tensor& x, const at::Tensor& back, const at::Tensor& bits, bool keys) const;
  void check_bytes() const;

  const History* h_;
  c10::intrusive_ptr<KVCache> cache_;
  std::optional<Model> model_;  // none before the first tokens
  std::vector<RowOrder> orders_;
  at::Tensor given_order_;
  int64_t resets_ = 0, most_pages_ = 0;
};

// Empty if all is well, else which call went wrong and how.
inline std::string what_breaks(const History& h) {
  std::string at = "the constructor";
  try {
    std::vector<Twin> twins = {Twin(h)};
    size_t current = 0;
    for (size_t i = 0; i < h.steps.size(); i++) {
      const Step& step = h.steps[i];
      at = "call " + std::to_string(i);
      if (step.what == Do::kClone) {
        if (twins.size() == 3)
          twins.erase(twins.begin() + (current == 0 ? 1 : 0)), current = current == 0 ? 0 : current - 1;
        twins.push_back(twins[current].clone());
        if (step.n % 2 == 1) current = twins.size() - 1;
      } else if (step.what == Do::kSwitch) {
        current = static_cast<size_t>(step.n) % twins.size();
      } else {
        twins[current].carry_out(step);
      }
      for (size_t t = 0; t < twins.size(); t++) {
        at = "call " + std::to_string(i) + ", cache " + std::to_string(t) + " of " + std::to_string(twins.size());
        twins[t].check();
      }
    }
  } catch (const c10::Error& error) {
    return at + ": c10::Error: " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return at + ": " + error.what();
  }
  return "";
}

// ------------------------------------------------------------------------------------------------------------- inputs

// Standard normal; keys and queries with channels of different sizes, some of them away from 0.
inline at::Tensor Twin::data(int64_t heads, int64_t tokens, int64_t dim, uint64_t seed, at::ScalarType as,
                             const Step& step, bool values) const {
  at::Tensor x = (step.with & kConstant) != 0 ? randn({batch(), heads, 1, dim}, seed).repeat({1, 1, tokens, 1})
                                              : randn({batch(), heads, tokens, dim}, seed);
  const at::Tensor channel = at::arange(dim, at::kFloat);
  if (!values) x = x * (0.5 + at::remainder(channel, 3) / 2) + (at::remainder(channel, 5) == 4).to(at::kFloat);
  if ((step.with & kTransposed) != 0) x = x.transpose(1, 2).contiguous().transpose(1, 2);
  return x.to(as);
}

inline AttentionOptions Twin::attention_options(const Step& step, int64_t rows, int64_t keys) const {
  std::mt19937 rng(step.seed + 1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
  const auto has = [&](With with) { return (step.with & with) != 0; };
  AttentionOptions o;
  std::vector<int64_t> shape = {batch(), query_heads(), rows, keys};
  for (int64_t& size : shape) size = below(4) == 0 ? 1 : size;
  for (int64_t cut = below(5); cut > 0 && shape.size() > 1 && shape[0] == 1; cut--) shape.erase(shape.begin());
  const at::Tensor keep = randn(shape, step.seed + 2) > -0.7, added = randn(shape, step.seed + 3);
  if (has(kBoolMask)) o.attn_mask = keep;
  if (has(kFloatMask)) o.attn_mask = has(kBoolMask) ? added.masked_fill(keep.logical_not(), -INFINITY) : added;
  o.is_causal = !has(kNotCausal);
  const int64_t window = 1 + below(std::min<int64_t>(keys, below(2) == 0 ? 8 : 300) + 1);
  if (has(kWindow)) o.window = window;
  if (has(kSoftcap)) o.softcap = 3.0;
  if (has(kScale)) o.scale = 0.7 / std::sqrt(static_cast<double>(h_->options.head_dim));
  if (has(kSinks)) o.sinks = randn({query_heads()}, step.seed + 4) * 2;
  const at::Tensor slopes = randn({batch(), query_heads()}, step.seed + 5).abs() * 0.05;
  if (has(kSlopes)) o.alibi_slopes = below(2) == 0 ? slopes : slopes[0];
  return o;
}

// ------------------------------------------------------------------------------------------------------------
// attention

// How far an output may be off: see tests/README.md.
inline double Twin::limit(const at::Tensor& q, const at::Tensor& new_k, const at::Tensor& new_v,
                          const AttentionOptions& o) const {
  const auto unit = [](at::ScalarType t) { return t == at::kFloat ? 0.0 : std::ldexp(1.0, t == at::kHalf ? -11 : -8); };
  std::vector<at::Tensor> all_k, all_v;
  for (int64_t b = 0; model_ && b < batch(); b++) all_k.push_back(model_->row(b).k), all_v.push_back(model_->row(b).v);
  if (new_k.defined()) all_k.push_back(new_k.transpose(0, 1).flatten(1, 2).to(at::kFloat));
  if (new_k.defined()) all_v.push_back(new_v.transpose(0, 1).flatten(1, 2).to(at::kFloat));
  if (all_k.empty() || q.numel() == 0) return limits::kExactScores;
  const at::Tensor k = at::cat(all_k, 1), v = at::cat(all_v, 1);
  if (k.numel() == 0) return limits::kExactScores;
  const auto dim = static_cast<double>(h_->options.head_dim);
  const double scale = o.scale.value_or(1 / std::sqrt(dim));
  const at::Tensor largest_q = q.to(at::kFloat).abs().amax({0, 1, 2}), reach = k.abs().amax({0, 1});
  const double largest_v = std::max(1.0, v.abs().max().item<double>() / 4);
  const auto constant = [](const Step& step) { return (step.with & kConstant) != 0; };
  const bool equal = std::any_of(h_->steps.begin(), h_->steps.end(), constant);
  const double page = static_cast<double>(std::min(k.size(1), kPageTokens));
  double limit = limits::kExactScores;
  // The errors of equal tokens are equal: a sum of n terms is off by up to n / 2 of its last places. Torch's attention,
  // which a first prompt takes, adds 512.
  const auto terms = static_cast<double>(std::min<int64_t>(k.size(1), 512));
  if (equal) limit += terms * std::ldexp(1.0, -25) * v.abs().max().item<double>() / largest_v;
  if (o.alibi_slopes) limit += 2e-7 * o.alibi_slopes->max().item<double>() * static_cast<double>(k.size(1));
  if (h_->options.precision == "fast") {
    // Scales of 8 bits are raised where the zero is far away. The widest class of channels has the most codes, any
    // class may have the largest scale.
    const at::Tensor range = at::maximum(k.amax({0, 1}) - k.amin({0, 1}), reach * 0.25);
    const Format& f = format();
    int64_t least = f.k_bits;
    for (int64_t c = 0; c < f.num_key_classes; c++) least = std::min(least, f.key_classes[c].bits);
    const double ratio = (std::exp2(f.k_bits) - 1) / (std::exp2(least) - 1);
    // An output is off by that times how far the values that share the weight lie apart: 2.
    limit +=
        limits::kFastWeights + 2 * std::sqrt(dim) * (largest_q * range).max().item<double>() * scale * ratio / 32767;
    // Weights are rounded by up to 1 / 65534 of the largest of a page. Half of each code is an offset that a rotation
    // gathers in the first channel of its block.
    const int64_t block = rotation_size(f.value_head_dim);
    const double gathered = f.v_rotated ? std::max(1.0, std::sqrt(static_cast<double>(block) * 2) / 2) : 1;
    limit += gathered * (equal ? page : std::sqrt(page)) * 3 * v.abs().max().item<double>() / largest_v / 4 / 32767;
  }
  // What the model took from the cache is rounded to its dtype, attention's is not.
  if (model_ && !model_->by_definition()) {
    const double length = q.to(at::kFloat).norm(2, {-1}).max().item<double>();
    limit += 4 * unit(type()) * (scale * length * reach.max().item<double>() + 1);
  }
  return limit * largest_v + unit(q.scalar_type()) * v.abs().max().item<double>();
}

// Row b has counts[b] query rows (all if there are none) and, where k is defined, as many new tokens.
inline Result Twin::wanted(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::vector<int64_t>& counts, const AttentionOptions& o) const {
  const Model model = model_ ? *model_ : Model(h_->options, batch(), type());
  at::Tensor mask;
  if (o.attn_mask) {
    mask = o.attn_mask->scalar_type() == at::kBool ? at::where(*o.attn_mask, 0.0, -INFINITY) : *o.attn_mask;
  }
  std::vector<at::Tensor> out, lse;
  for (int64_t b = 0; b < batch(); b++) {
    const ModelRow& r = model.row(b);
    const int64_t n = counts.empty() ? q.size(2) : counts[static_cast<size_t>(b)];
    const at::Tensor all_k = k.defined() ? at::cat({r.k, k[b].narrow(1, 0, n).to(at::kFloat)}, 1) : r.k;
    const at::Tensor all_v = v.defined() ? at::cat({r.v, v[b].narrow(1, 0, n).to(at::kFloat)}, 1) : r.v;
    at::Tensor row_mask, slopes;
    if (mask.defined()) {
      const int64_t keys = mask.size(-1) == 1 ? std::max<int64_t>(all_k.size(1), 1) : mask.size(-1);
      row_mask = mask.expand({batch(), q.size(1), q.size(2), keys})[b].narrow(1, 0, n).narrow(2, 0, all_k.size(1));
    }
    if (o.alibi_slopes) slopes = o.alibi_slopes->dim() == 2 ? (*o.alibi_slopes)[b] : *o.alibi_slopes;
    const Result row = reference_row(q[b].narrow(1, 0, n), all_k, all_v, row_mask, o, slopes);
    out.push_back(at::constant_pad_nd(row.out, {0, 0, 0, q.size(2) - n}));
    lse.push_back(at::constant_pad_nd(row.lse, {0, q.size(2) - n}));
  }
  // A finite output that float16 cannot hold is its largest number.
  const at::Tensor all = at::stack(out);
  return {q.scalar_type() == at::kHalf ? all.clamp(-65504, 65504) : all, at::stack(lse)};
}

inline ::testing::AssertionResult near(const at::Tensor& got, const at::Tensor& want, double limit) {
  if (got.sizes() != want.sizes()) return ::testing::AssertionFailure() << got.sizes() << ", not " << want.sizes();
  const at::Tensor difference = at::where(got == want, 0.0, (got.to(at::kDouble) - want).abs());
  if ((difference <= limit).all().item<bool>()) return ::testing::AssertionSuccess();
  const int64_t worst = at::nan_to_num(difference, 1e300).argmax().item<int64_t>();
  return ::testing::AssertionFailure() << got.flatten()[worst].item<double>() << ", not "
                                       << want.flatten()[worst].item<double>() << " within " << limit
                                       << ", at flat index " << worst << " of sizes " << got.sizes();
}

inline void Twin::attend(const Step& step) const {
  const int64_t rows = std::min<int64_t>(step.n, 12);
  const at::Tensor q = queries(step, rows);
  const AttentionOptions o = attention_options(step, rows, longest());
  const Result want = wanted(q, {}, {}, {}, o);
  const double most = limit(q, {}, {}, o);
  const at::Tensor out = cache_->attend(q, o);
  const auto [same, lse] = cache_->attend_with_lse(q, o);
  require(out.scalar_type() == q.scalar_type() && lse.scalar_type() == at::kFloat, "the dtype of attend");
  require(near(out, want.out, most), "attend");
  require(near(lse, want.lse, most * 5), "lse");
  require(same_bits(same, out), "attend_with_lse");
}

// -------------------------------------------------------------------------------------------------------------- calls

inline void Twin::add_tokens(const Step& step) {
  const CacheOptions& o = h_->options;
  const bool ragged = (step.with & kRagged) != 0, forward = step.what == Do::kForward;
  at::Tensor k = data(o.num_kv_heads, step.n, o.head_dim, step.seed + 6, type(), step);
  at::Tensor v = data(o.num_kv_heads, step.n, o.value_head_dim.value_or(o.head_dim), step.seed + 7, type(), step, true);
  if ((step.with & kHuge) != 0 && type() != at::kHalf && step.n > 0) v.select(2, step.n / 2).select(2, 0).fill_(3e5);
  std::mt19937 rng(step.seed);
  std::vector<int64_t> counts;
  for (int64_t b = 0; b < batch(); b++) {
    const int64_t some = static_cast<int64_t>(rng() % static_cast<uint64_t>(step.n + 1));
    counts.push_back(!ragged || rng() % 4 == 0 ? step.n : some);
    for (at::Tensor* t : {&k, &v}) (*t)[b].narrow(1, counts.back(), step.n - counts.back()).fill_(kNan);
  }
  const std::optional<at::Tensor> lengths = ragged ? std::optional<at::Tensor>(longs(counts)) : std::nullopt;
  at::Tensor q;
  if (forward) {
    q = queries(step, step.n);
    int64_t keys = 0;
    for (int64_t b = 0; b < batch(); b++) {
      keys = std::max(keys, (model_ ? model_->row(b).length() : 0) + counts[static_cast<size_t>(b)]);
    }
    const AttentionOptions options = attention_options(step, step.n, keys);
    const Result want = wanted(q, k, v, counts, options);
    double most = limit(q, at::nan_to_num(k), at::nan_to_num(v), options);
    // torch's own attention multiplies in the dtype of its inputs.
    if (longest() == 0 && type() != at::kFloat) most += (type() == at::kHalf ? 2e-3 : 1.6e-2) * (most < 1 ? 1 : most);
    const at::Tensor out = cache_->forward(q, k, v, options, lengths);
    require(out.scalar_type() == q.scalar_type(), "the dtype of forward");
    require(near(out, want.out, most), "forward");
  } else if ((step.with & kQueries) != 0) {
    q = queries(step, ragged ? step.n : 3);
    cache_->append(k, v, lengths, q);
  } else {
    cache_->append(k, v, lengths);
  }
  if (!model_) {
    orders_.assign(static_cast<size_t>(batch()), RowOrder());
    model_.emplace(o, batch(), type(), is_plain(*h_));
  }
  for (int64_t b = 0; b < batch() && has_classes(); b++) {
    RowOrder& r = orders_[static_cast<size_t>(b)];
    if (r.order.defined()) continue;
    if (!r.queries.defined()) r.queries = at::zeros({o.num_kv_heads, o.head_dim}, at::kDouble);
    if (!q.defined()) continue;
    const at::Tensor seen = q[b].narrow(1, 0, ragged ? counts[static_cast<size_t>(b)] : q.size(2)).to(at::kDouble);
    r.queries = r.queries + seen.square().sum(1).view({o.num_kv_heads, -1, o.head_dim}).sum(1);
  }
  for (int64_t b = 0; b < batch(); b++) {
    const int64_t n = counts[static_cast<size_t>(b)];
    const at::Tensor before = model_->row(b).k;
    model_->append(b, k[b].narrow(1, 0, n), v[b].narrow(1, 0, n));
    const int64_t quantized = model_->row(b).quantized;
    if (quantized > 0 && has_classes() && !orders_[static_cast<size_t>(b)].order.defined()) {
      const at::Tensor all = at::cat({before, k[b].narrow(1, 0, n).to(at::kFloat)}, 1);
      orders_[static_cast<size_t>(b)].first_keys = all.narrow(1, o.sink_length, quantized);
    }
  }
  note_pages(0);
}

inline void Twin::select(const std::vector<int64_t>& rows) {
  model_->select(rows);
  std::vector<RowOrder> chosen;
  for (const int64_t row : rows) chosen.push_back(orders_[static_cast<size_t>(row)]);
  orders_ = chosen;
}

inline void Twin::carry_out(const Step& step) {
  std::mt19937 rng(step.seed);
  const auto some_rows = [&](int64_t count) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < count; i++) rows.push_back(static_cast<int64_t>(rng() % static_cast<uint64_t>(batch())));
    return rows;
  };
  const bool needs_tokens = step.what == Do::kReorder || step.what == Do::kSelect || step.what == Do::kReserve;
  if (needs_tokens && !model_) return;
  switch (step.what) {
    case Do::kAppend:
    case Do::kForward:
      return add_tokens(step);
    case Do::kAttend:
      return attend(step);
    case Do::kTruncate:
      cache_->truncate(step.n);
      if (model_) model_->truncate(step.n);
      break;
    case Do::kReorder:
    case Do::kSelect: {
      const std::vector<int64_t> rows = some_rows(step.what == Do::kReorder ? batch() : std::max<int64_t>(1, step.n));
      if (step.what == Do::kReorder)
        cache_->reorder(longs(rows));
      else
        cache_->select(longs(rows));
      select(rows);
      break;
    }
    case Do::kRepeat:
      if (step.n < 1 || step.n * batch() > 8) return;
      cache_->repeat_interleave(step.n);
      if (model_) select(all_rows(step.n));
      break;
    case Do::kSaveAndLoad: {
      const KVCache::State state = cache_->state();
      cache_ = KVCache::from_state(state);
      require(same_state(cache_->state(), state), "the state of what was loaded");
      most_pages_ = 0;
      break;
    }
    case Do::kReset:
      cache_->reset();
      model_.reset();
      most_pages_ = 0;
      resets_++;
      return;
    case Do::kReserve:
      cache_->reserve(step.n);
      return note_pages((model_->rule(step.n) + kPageTokens - 1) / kPageTokens);
    case Do::kGiveOrder: {
      if (!has_classes()) return;
      const at::Tensor dice = randn({h_->options.num_kv_heads, h_->options.head_dim}, step.seed);
      given_order_ = dice.argsort(1, false);
      cache_->set_key_order(given_order_);
      return;
    }
    case Do::kClone:
    case Do::kSwitch:
      return;
  }
  if (model_) note_pages(0);
}

// ------------------------------------------------------------------------------------------------------------- checks

// The most pages that the rows ever needed, were none of them shared.
inline void Twin::note_pages(int64_t reserved) {
  int64_t pages = 0;
  for (int64_t b = 0; b < batch(); b++) {
    pages += std::max(reserved, (model_->row(b).quantized + kPageTokens - 1) / kPageTokens);
  }
  most_pages_ = std::max(most_pages_, pages);
}

inline void Twin::check_bytes() const {
  const Format& f = format();
  const int64_t token =
      f.num_kv_heads * (f.head_dim + f.value_head_dim) * static_cast<int64_t>(c10::elementSize(type()));
  int64_t most = 0;
  for (int64_t b = 0; b < batch(); b++) most = std::max(most, model_->row(b).quantized);
  const int64_t exact = batch() * (f.sink_length + window_capacity(f)) * token, page = page_bytes(f).value;
  const int64_t least = exact + (most + kPageTokens - 1) / kPageTokens * page;
  // A quarter of spare pages; the table, lengths, orders and the sums of the queries.
  const int64_t order = has_classes() ? batch() * f.num_kv_heads * f.head_dim * 6 : 0;
  const int64_t table = batch() * 4 * (most_pages_ * 3 / 2 + 1);
  const int64_t limit = exact + most_pages_ * 5 / 4 * page + order + table + batch() * 16 + 4;
  const int64_t bytes = cache_->nbytes();
  require(bytes >= least && bytes <= limit,
          "nbytes is " + std::to_string(bytes) + ", not " + std::to_string(least) + " to " + std::to_string(limit));
}

// What came back of groups is off by no more than their scales allow, in the mean square of a group: of all that the
// search tries, the plain range is the worst that it may take. x [H, m, D]; `bits` broadcasts to it.
inline void Twin::check_quantized(const at::Tensor& x_arg, const at::Tensor& back_arg, const at::Tensor& bits,
                                  bool keys) const {
  const Format& f = format();
  const bool float8 = narrow(f.scale_type) == ScaleType::kFloat8, symmetric = !keys && f.v_symmetric;
  const bool rotate = !keys && f.v_rotated;
  const at::Tensor x = rotate ? reference::rotated(x_arg, false) : x_arg;
  const at::Tensor back = rotate ? reference::rotated(back_arg, false) : back_arg;
  const int64_t group = keys ? f.group_size : value_group(f), axis = keys ? 1 : 2;
  const at::Tensor stored = x_arg.abs().amax(2, true) * (type() == at::kFloat  ? 1e-6
                                                         : type() == at::kHalf ? 1e-3
                                                                               : 8e-3);
  for (int64_t first = 0; first < x.size(axis); first += group) {
    const int64_t count = std::min(group, x.size(axis) - first);
    const auto part = [&](const at::Tensor& t) { return t.narrow(axis, first, count).to(at::kDouble); };
    const at::Tensor reach = part(x).abs().amax(axis, true), levels = at::exp2(bits.to(at::kDouble)) - 1;
    const at::Tensor range = symmetric ? 2 * reach : part(x).amax(axis, true) - part(x).amin(axis, true);
    // Steps of a zero of 8 bits in a scale.
    const at::Tensor steps = at::where(bits == 8, 0.125, at::exp2(5 - bits.to(at::kDouble)));
    at::Tensor scale = range / levels, rest = (range + reach) / 1024 + 1e-5 * levels;
    if (float8) {
      if (!symmetric) scale = at::maximum(scale, reach * steps / 119.5);
      scale = scale * 1.07 + 1e-5;
      // A scale is off by a sixteenth or 4e-6, which may put the zero out of reach.
      rest = range / 32 + 4e-6 * (levels + 127.5 / steps) + (symmetric ? at::zeros_like(scale) : scale / steps / 2);
    }
    const double gain = !keys && f.v_gain_correction ? 2 : 1;
    const at::Tensor rounding = keys ? stored.amax(1, true) : stored;
    const at::Tensor most = gain * (scale / 2 + rest) + 2 * rounding;
    const at::Tensor off = (part(back) - part(x)).square().mean(axis, true).sqrt();
    require((off <= most).all().item<bool>(), std::string(keys ? "keys" : "values") + " come back too far off, by " +
                                                  std::to_string((off / most).max().item<double>()) + " of the limit");
  }
}

inline void Twin::check_order(RowOrder& row, const at::Tensor& order, bool is_quantized, int64_t b) const {
  const std::string what = "the key order of row " + std::to_string(b);
  if (row.order.defined()) return require(at::equal(order, row.order), what + " changed");
  if (!is_quantized) return require((order == -1).all().item<bool>(), what + " came too early");
  row.order = order;
  if (given_order_.defined()) return require(at::equal(order, given_order_), what + " is not the given one");
  const Format& f = format();
  const at::Tensor groups = row.first_keys.to(at::kDouble).unflatten(1, {-1, f.group_size});
  at::Tensor score = (groups.amax(2) - groups.amin(2)).square().sum(1);
  if ((row.queries > 0).any().item<bool>()) score = score * row.queries;
  require(at::equal(std::get<0>(order.sort(1)), at::arange(f.head_dim, at::kLong).expand_as(order)), what + " is none");
  const at::Tensor in_order = score.gather(1, order);
  for (int64_t a = 0, first = 0; a < f.num_key_classes; first += f.key_classes[a++].channels) {
    for (int64_t c = 0, other = 0; c < f.num_key_classes; other += f.key_classes[c++].channels) {
      if (f.key_classes[a].bits <= f.key_classes[c].bits) continue;
      const at::Tensor least = in_order.narrow(1, first, f.key_classes[a].channels).amin(1);
      const at::Tensor most = in_order.narrow(1, other, f.key_classes[c].channels).amax(1);
      require((least >= most * (1 - 1e-4)).all().item<bool>(), what + " does not give the most bits where they matter");
    }
  }
}

inline void Twin::check() {
  if (!model_) {
    return require(cache_->batch_size() == 0 && cache_->empty() && cache_->length() == 0 && cache_->nbytes() == 0 &&
                       cache_->lengths().numel() == 0 && cache_->quantized_length() == 0,
                   "a cache without tokens is not empty");
  }
  require(cache_->batch_size() == batch(), "the batch size");
  const Format& f = format();
  const auto [k, v] = cache_->dequantize();
  require(k.scalar_type() == type() && v.scalar_type() == type(), "the dtype of the cache");
  const at::Tensor orders = has_classes() ? cache_->key_order() : at::Tensor();
  for (int64_t b = 0; b < batch(); b++) {
    at::Tensor k_bits = at::full({1}, f.k_bits, at::kLong);
    if (has_classes()) {
      RowOrder& row = orders_[static_cast<size_t>(b)];
      check_order(row, orders[b], model_->row(b).quantized > 0, b);
      std::vector<int64_t> bits;
      for (int64_t c = 0; c < f.num_key_classes; c++) {
        bits.insert(bits.end(), static_cast<size_t>(f.key_classes[c].channels), f.key_classes[c].bits);
      }
      const at::Tensor places = longs(bits).expand({f.num_kv_heads, f.head_dim});
      if (row.order.defined()) k_bits = at::empty_like(row.order).scatter_(1, row.order, places).unsqueeze(1);
    }
    if (k.size(2) < model_->row(b).length()) break;  // the model says below what is wrong
    model_->adopt_quantized(
        b, k[b], v[b],
        [&](const at::Tensor& kx, const at::Tensor& k_back, const at::Tensor& vx, const at::Tensor& v_back) {
          check_quantized(kx, k_back, k_bits, true);
          check_quantized(vx, v_back, at::full({1}, f.v_bits, at::kLong), false);
        });
  }
  require(model_->matches(*cache_), "the tokens");
  require(cache_->empty() == (longest() == 0), "empty");
  check_bytes();
}

}  // namespace kivi::test
