// Which channels of K are in which class of a kivi::KVCache: chosen for each row and head when its first tokens are
// quantised. What a channel costs is its quantisation error times the queries that multiply it, so channels are ranked
// by the root mean square of their ranges in the groups, times that of the queries.
#include <algorithm>
#include <numeric>

#include "ops/cache_args.h"
#include "ops/cache_storage.h"

namespace kivi {
namespace {

// The keys of row b that are quantised tokens [first, last) once k was appended, counted from the end of the sink: some
// of them are in the window, the others in k.
at::Tensor keys_of(const CacheStorage& s, const at::Tensor& k, int64_t b, int64_t first, int64_t last) {
  const int64_t known = std::max<int64_t>(s.lengths[b] - s.format.sink_length, 0), capacity = window_capacity(s.format);
  std::vector<at::Tensor> parts;
  for (int64_t t = first; t < std::min(last, known); t++) {
    parts.push_back(s.tensors.window_k.select(0, b).narrow(1, t % capacity, 1));
  }
  const int64_t from = std::max(first, known);
  if (from < last) parts.push_back(k.select(0, b).narrow(1, from + s.format.sink_length - s.lengths[b], last - from));
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

// Sum over the groups of the squared ranges, [Hkv, D].
at::Tensor squared_ranges(const CacheStorage& s, const at::Tensor& k, int64_t b, int64_t count) {
  const int64_t group = s.format.group_size;
  const int64_t known = std::max<int64_t>(s.lengths[b] - s.format.sink_length, 0);
  at::Tensor sum = at::zeros({s.format.num_kv_heads, s.format.head_dim}, k.options().dtype(at::kFloat));
  // Groups that begin in the window one by one; the others without a copy.
  const int64_t mixed = std::min(count, round_up(known, group));
  const auto add = [&](const at::Tensor& keys) {  // [Hkv, n * G, D]
    const at::Tensor groups = keys.unflatten(1, {-1, group});
    const at::Tensor range = groups.amax(2).to(at::kFloat) - groups.amin(2).to(at::kFloat);
    sum += at::nan_to_num(range, 0.0, 0.0, 0.0).square().sum(1);
  };
  for (int64_t t = 0; t < mixed; t += group) add(keys_of(s, k, b, t, t + group));
  if (mixed < count) add(keys_of(s, k, b, mixed, count));
  return sum;
}

// The order that gives the highest scores the widest classes; channels of a class stand in their own order.
void fill_order(const Format& f, const float* score, int16_t* order) {
  std::vector<int64_t> ranked(static_cast<size_t>(f.head_dim)), classes(static_cast<size_t>(f.num_key_classes));
  std::iota(ranked.begin(), ranked.end(), 0);
  std::iota(classes.begin(), classes.end(), 0);
  std::stable_sort(ranked.begin(), ranked.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
  std::stable_sort(classes.begin(), classes.end(),
                   [&](int64_t a, int64_t b) { return f.key_classes[a].bits > f.key_classes[b].bits; });
  auto next = ranked.begin();
  for (const int64_t c : classes) {
    int64_t place = 0;
    for (int64_t before = 0; before < c; before++) place += f.key_classes[before].channels;
    const auto end = next + f.key_classes[c].channels;
    std::sort(next, end);
    for (; next != end; next++) order[place++] = static_cast<int16_t>(*next);
  }
}

}  // namespace

bool has_unordered_rows(const CacheStorage& s) {
  return std::any_of(s.ordered.begin(), s.ordered.end(), [](uint8_t ordered) { return ordered == 0; });
}

CacheStorage with_own_orders(const CacheStorage& s) {
  const PlainTensors guard;
  CacheStorage copy = s;
  CacheTensors& t = copy.tensors;
  for (at::Tensor* part : {&t.k_order, &copy.query_squares, &t.block_table, &copy.host_table}) {
    if (part->defined()) *part = part->clone();
  }
  return copy;
}

bool is_key_order(const at::Tensor& order) {
  const at::Tensor sorted = std::get<0>(order.to(at::kLong).sort(-1));
  return at::equal(sorted, at::arange(order.size(-1), at::kLong).expand_as(sorted));
}

void note_queries(CacheStorage& s, const at::Tensor& q, const std::vector<int64_t>& counts) {
  if (s.format.num_key_classes == 0) return;
  const PlainTensors guard;
  for (int64_t b = 0; b < s.batch; b++) {
    if (s.ordered[b] != 0 || counts[b] == 0) continue;
    const at::Tensor rows = q.detach().select(0, b).narrow(1, 0, counts[b]);  // [Hq, n, D]
    std::vector<at::Tensor> heads;
    for (int64_t h = 0; h < rows.size(0); h++) {
      // One by one, since torch makes a float32 copy of what it adds; contiguous, since it adds in an order that
      // depends on strides, and a sum must not.
      heads.push_back(at::linalg_vector_norm(rows[h].contiguous(), 2, at::IntArrayRef{0}, false, at::kFloat));
    }
    const at::Tensor squares = at::nan_to_num(at::stack(heads).square(), 0.0, 0.0, 0.0);
    s.query_squares.select(0, b) += squares.view({s.format.num_kv_heads, -1, s.format.head_dim}).sum(1);
  }
}

void choose_orders(CacheStorage& s, const at::Tensor& k_arg, const std::vector<int64_t>& after_quantized,
                   const at::Tensor& given) {
  if (s.format.num_key_classes == 0) return;
  const PlainTensors guard;
  const at::Tensor k = k_arg.detach();
  for (int64_t b = 0; b < s.batch; b++) {
    if (s.ordered[b] != 0 || after_quantized[b] == 0) continue;
    at::Tensor order = s.tensors.k_order.select(0, b);
    if (given.defined()) {
      order.copy_(given);
    } else {
      at::Tensor score = squared_ranges(s, k, b, after_quantized[b]);
      const at::Tensor squares = s.query_squares.select(0, b);
      if ((squares > 0).any().item<bool>()) score = score * squares;
      score = at::nan_to_num(score, 0.0);  // 0 times a range whose square overflowed: not an order otherwise
      score = score.cpu();
      const at::Tensor chosen = at::empty({s.format.num_kv_heads, s.format.head_dim}, at::kShort);
      for (int64_t h = 0; h < s.format.num_kv_heads; h++) {
        fill_order(s.format, score.const_data_ptr<float>() + h * s.format.head_dim,
                   chosen.mutable_data_ptr<int16_t>() + h * s.format.head_dim);
      }
      order.copy_(chosen);
    }
    s.ordered[b] = 1;
  }
}

}  // namespace kivi
