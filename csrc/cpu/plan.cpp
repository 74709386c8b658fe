// The fixed division of attention into items, and the merge of what the items of one row give. Nothing here depends on
// the number of threads, nor, for one row of the batch, on the other rows: results are the same bits whoever computes
// what.
#include "cpu/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "format/half.h"

namespace kivi::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A shorter run costs 0.5 to 1.6 cycles more per token and query head, in starting and merging; a single kv head still
// gets the shorter ones, so that 16k tokens of it feed 64 threads.
constexpr int64_t kMinRunPages = 4;
constexpr int64_t kMinRunPagesOneHead = 2;
constexpr int64_t kMaxRuns = 64;  // bounds the scratch memory, and feeds 64 threads with one sequence of one kv head
// So many items of one sequence feed 64 threads. Twice as many would cost 2 percent in starts and merges.
constexpr int64_t kItemsPerSequence = 64;
constexpr int64_t kMaxSharedExact = 256;  // more exact keys than this get an item of their own

// The quantised pages that some query from `first_query` on may see; pages that lie wholly before its window are left
// out.
struct Pages {
  int64_t first, count;
};

Pages seen_pages(const AttentionParams& p, const KeyRanges& ranges, int64_t first_query) {
  const int64_t pages = ceil_div(ranges.quantized, kPageTokens);
  if (p.window <= 0) return {0, pages};
  // The first quantised token in that query's window; the windows of later queries begin later.
  const int64_t begin = query_position(ranges, first_query) - p.window + 1 - p.format.sink_length;
  const int64_t first = std::min(std::max<int64_t>(begin, 0) / kPageTokens, pages);
  return {first, pages - first};
}

class Planner {
 public:
  Planner(const AttentionParams& params, AttentionItem* items) : p_(params), items_(items) {}

  void add_head(int64_t batch, int64_t kv_head) {
    const KeyRanges ranges = key_ranges(p_, batch);
    const int64_t rows = group_heads(p_) * p_.q_len;
    for (int64_t first_row = 0; first_row < rows; first_row += kMaxItemRows) {
      AttentionItem item{};
      item.batch = batch;
      item.kv_head = kv_head;
      item.first_row = first_row;
      item.num_rows = std::min(kMaxItemRows, rows - first_row);
      // Padding of the queries, which depends on the other rows of the batch, decides nothing.
      add_rows(item, ranges, group_heads(p_) * ranges.rows <= kMaxItemRows);
    }
  }

  int64_t count() const { return count_; }
  int64_t floats() const { return floats_; }

 private:
  void add_rows(AttentionItem item, const KeyRanges& ranges, bool may_split) {
    const int64_t last_row = item.first_row + item.num_rows - 1;
    const bool one_head = item.first_row / p_.q_len == last_row / p_.q_len;
    const int64_t first_query = one_head ? item.first_row % p_.q_len : 0;
    item.num_splits = 1;
    item.partial = -1;
    if (first_query >= ranges.rows) {  // none of these queries exists: the item only writes zeros
      put(item);
      return;
    }
    // The splits of one row of the batch are the same for all its items.
    const Pages pages = seen_pages(p_, ranges, may_split ? 0 : first_query);
    item.first_page = pages.first;
    item.num_pages = pages.count;
    item.exact_keys = true;
    const int64_t shortest = p_.format.num_kv_heads > 1 ? kMinRunPages : kMinRunPagesOneHead;
    const int64_t even = ceil_div(pages.count * p_.format.num_kv_heads, kItemsPerSequence);
    const int64_t run = std::max({shortest, even, ceil_div(pages.count, kMaxRuns)});
    const int64_t runs = ceil_div(pages.count, run);
    const int64_t exact = ranges.sink + (ranges.cached - ranges.window_begin) + ranges.fresh;
    const int64_t splits = std::max<int64_t>(runs, 1) + (runs > 0 && exact > kMaxSharedExact);
    if (!may_split || splits == 1) {
      put(item);
      return;
    }
    item.num_splits = splits;
    for (item.split = 0; item.split < splits; item.split++) {
      const int64_t done = std::min(item.split * run, pages.count);
      item.first_page = pages.first + done;
      item.num_pages = std::min(run, pages.count - done);
      item.exact_keys = item.split == splits - 1;
      item.partial = floats_;
      floats_ += item.num_rows * partial_row_floats(p_);
      put(item);
    }
  }

  void put(const AttentionItem& item) {
    if (items_ != nullptr) items_[count_] = item;
    count_++;
  }

  const AttentionParams& p_;
  AttentionItem* items_;
  int64_t count_ = 0, floats_ = 0;
};

}  // namespace

int64_t attention_plan(const AttentionParams& params, AttentionItem* items, int64_t* partial_floats) {
  Planner planner(params, items);
  for (int64_t b = 0; b < params.batch; b++) {
    for (int64_t h = 0; h < params.format.num_kv_heads; h++) planner.add_head(b, h);
  }
  *partial_floats = planner.floats();
  return planner.count();
}

void attention_merge(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                     const float* partials) {
  const int64_t channels = params.layout.v_channels;
  std::vector<float> acc(static_cast<size_t>(channels));
  for (int64_t i = begin; i < end; i++) {
    const AttentionItem* run = items + i;
    if (run->split != 0 || run->num_splits < 2) continue;
    for (int64_t row = 0; row < run->num_rows; row++) {
      const auto cell = [&](int64_t s) { return partials + run[s].partial + row * partial_row_floats(params); };
      float max = -kInfinity;
      for (int64_t s = 0; s < run->num_splits; s++) max = std::max(max, cell(s)[channels]);
      std::fill(acc.begin(), acc.end(), 0.0f);
      float sum = 0.0f;
      for (int64_t s = 0; s < run->num_splits; s++) {
        const float* part = cell(s);
        if (s + 1 < run->num_splits) {
          for (int64_t d = 0; d < channels + 2; d += 16) __builtin_prefetch(cell(s + 1) + d);
        }
        // Where the part has seen nothing its sums are 0, or NaN: multiplying keeps both.
        const float factor = part[channels] == -kInfinity ? 0.0f : std::exp2(part[channels] - max);
        for (int64_t d = 0; d < channels; d++) {
          const float product = part[d] * factor;
          acc[static_cast<size_t>(d)] += product;
        }
        const float product = part[channels + 1] * factor;
        sum += product;
      }
      finish_row(params, *run, row, acc.data(), max, sum);
    }
  }
}

void finish_row(const AttentionParams& params, const AttentionItem& item, int64_t row, const float* acc, float max,
                float sum) {
  const QueryRow r = query_row(params, item, row);
  const bool exists = r.query < key_ranges(params, item.batch).rows;
  const bool seen = exists && (max > -kInfinity || sum != 0.0f);  // sum may be NaN
  const float sink_logit = exists && params.sinks != nullptr ? params.sinks[r.head] : -kInfinity;
  float factor = 0.0f;
  float lse = sink_logit;
  if (seen) {
    const float sink = sink_logit * kLog2E;
    const float top = std::max(max, sink);
    const float shrink = max == -kInfinity ? 0.0f : std::exp2(max - top);
    const float own = sum * shrink;
    const float total = own + (sink == -kInfinity ? 0.0f : std::exp2(sink - top));
    factor = shrink / total;
    lse = (top + std::log2(total)) * kLn2;
  }
  const int64_t out_row = (item.batch * params.num_heads + r.head) * params.q_len + r.query;
  const int64_t channels = params.format.value_head_dim;
  for (int64_t d = 0; d < channels; d++) {
    store_element(params.out, params.q_type, out_row * channels + d, seen ? acc[d] * factor : 0.0f);
  }
  params.lse[out_row] = lse;
}

}  // namespace kivi::cpu
