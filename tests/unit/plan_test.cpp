// The division of attention into items: every (query row, key) pair exactly once, independent of the batch, enough of
// them.
#include "cpu/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "test_data.h"

namespace kivi::cpu {
namespace {

// The parameters that a plan depends on.
struct PlanCase {
  Format format = make_format(2, 128, 128, 2, 2, 32);
  RecordLayout layout = record_layout(format);
  std::vector<int64_t> cached = {16384}, quantized, fresh;
  AttentionParams p{};
  int64_t floats = 0;

  std::vector<AttentionItem> plan() {
    quantized.clear();
    for (const int64_t n : cached) quantized.push_back(quantized_count(format, n));
    layout = record_layout(format);
    p.format = format;
    p.layout = layout;
    p.batch = static_cast<int64_t>(cached.size());
    p.lengths = cached.data();
    p.quantized_lengths = quantized.data();
    p.new_lengths = fresh.empty() ? nullptr : fresh.data();
    p.new_len = fresh.empty() ? 0 : *std::max_element(fresh.begin(), fresh.end());
    std::vector<AttentionItem> items(static_cast<size_t>(attention_plan(p, nullptr, &floats)));
    int64_t again = 0;
    EXPECT_EQ(attention_plan(p, items.data(), &again), static_cast<int64_t>(items.size()));
    EXPECT_EQ(again, floats);
    return items;
  }
};

void check_coverage(PlanCase& c, const std::vector<AttentionItem>& items) {
  const AttentionParams& p = c.p;
  const int64_t rows = group_heads(p) * p.q_len;
  // How often each (batch, kv head, row) meets each page and, last, the exact keys.
  int64_t max_pages = 0;
  for (const int64_t m : c.quantized) max_pages = std::max(max_pages, ceil_div(m, kPageTokens));
  const int64_t heads = c.format.num_kv_heads;
  std::vector<int> met(static_cast<size_t>(p.batch * heads * rows * (max_pages + 1)));
  std::vector<int> written(static_cast<size_t>(p.batch * heads * rows));
  const auto row_at = [&](int64_t b, int64_t h, int64_t r) { return static_cast<size_t>((b * heads + h) * rows + r); };
  const auto at_page = [&](int64_t b, int64_t h, int64_t r, int64_t page) {
    return row_at(b, h, r) * static_cast<size_t>(max_pages + 1) + static_cast<size_t>(page);
  };
  std::vector<std::pair<int64_t, int64_t>> cells;
  for (const AttentionItem& item : items) {
    EXPECT_GE(item.num_rows, 1);
    EXPECT_LE(item.num_rows, kMaxItemRows);
    EXPECT_LT(item.split, item.num_splits);
    EXPECT_EQ(item.partial < 0, item.num_splits == 1);
    if (item.partial >= 0) cells.push_back({item.partial, item.num_rows * partial_row_floats(p)});
    for (int64_t r = item.first_row; r < item.first_row + item.num_rows; r++) {
      EXPECT_LT(r, rows);
      if (item.split == 0) written[row_at(item.batch, item.kv_head, r)]++;
      for (int64_t page = item.first_page; page < item.first_page + item.num_pages; page++)
        met[at_page(item.batch, item.kv_head, r, page)]++;
      if (item.exact_keys) met[at_page(item.batch, item.kv_head, r, max_pages)]++;
    }
  }
  std::sort(cells.begin(), cells.end());
  int64_t at = 0;
  for (const auto& cell : cells) {
    EXPECT_EQ(cell.first, at);  // no two cells overlap, none is wasted
    at += cell.second;
  }
  EXPECT_EQ(at, c.floats);
  for (int64_t b = 0; b < p.batch; b++) {
    const KeyRanges ranges = key_ranges(p, b);
    const int64_t pages = ceil_div(ranges.quantized, kPageTokens);
    for (int64_t h = 0; h < c.format.num_kv_heads; h++) {
      for (int64_t r = 0; r < rows; r++) {
        EXPECT_EQ(written[row_at(b, h, r)], 1);
        const int64_t query = r % p.q_len;
        if (query >= ranges.rows) continue;
        const SeenKeys seen = seen_keys(p, ranges, query_position(ranges, query));
        EXPECT_EQ(met[at_page(b, h, r, max_pages)], 1);
        for (int64_t page = 0; page < pages; page++) {
          const int64_t begin = c.format.sink_length + page * kPageTokens;
          const int64_t end = std::min(begin + kPageTokens, c.format.sink_length + ranges.quantized);
          const int times = met[at_page(b, h, r, page)];
          EXPECT_LE(times, 1);
          if (seen.begin < end && begin < seen.end) {
            EXPECT_EQ(times, 1) << b << " " << h << " " << r << " " << page;
          }
        }
      }
    }
  }
  // Items of a run stand together, in the order of their splits.
  for (size_t i = 0; i < items.size(); i++) {
    if (items[i].split == 0) continue;
    ASSERT_GT(i, 0u);
    EXPECT_EQ(items[i - 1].split, items[i].split - 1);
    EXPECT_EQ(items[i - 1].first_row, items[i].first_row);
    EXPECT_EQ(items[i - 1].num_splits, items[i].num_splits);
    EXPECT_EQ(items[i].exact_keys, items[i].split == items[i].num_splits - 1);
  }
}

TEST(PlanTest, EveryPairOnce) {
  for (const int64_t num_heads : {2, 8, 64}) {
    for (const int64_t q_len : {1, 5, 32, 33, 100}) {
      for (const int64_t cached : {0, 3, 132, 300, 5000, 40000}) {
        for (const int64_t window : {0, 1, 200, 4096}) {
          for (const int64_t fresh : {0, 1, 100, 500}) {
            PlanCase c;
            c.p.num_heads = num_heads, c.p.q_len = q_len, c.p.window = window, c.p.causal = true;
            c.cached = {cached};
            if (fresh > 0) c.fresh = {fresh};
            check_coverage(c, c.plan());
          }
        }
      }
    }
  }
}

TEST(PlanTest, RaggedBatches) {
  for (const bool follow : {false, true}) {
    for (const int64_t window : {0, 300}) {
      PlanCase c;
      c.p.num_heads = 8, c.p.q_len = 40, c.p.causal = true, c.p.rows_follow_new = follow, c.p.window = window;
      c.cached = {0, 1000, 40, 20000, 132};
      c.fresh = {40, 0, 1, 17, 40};
      check_coverage(c, c.plan());
    }
  }
}

bool same_but_place(const AttentionItem& a, const AttentionItem& b) {
  return a.kv_head == b.kv_head && a.first_row == b.first_row && a.num_rows == b.num_rows &&
         a.first_page == b.first_page && a.num_pages == b.num_pages && a.exact_keys == b.exact_keys &&
         a.split == b.split && a.num_splits == b.num_splits;
}

TEST(PlanTest, ARowDoesNotDependOnTheBatch) {
  PlanCase all;
  all.p.num_heads = 8, all.p.q_len = 1;
  all.cached = {5000, 17, 16384, 0};
  const std::vector<AttentionItem> items = all.plan();
  for (size_t b = 0; b < all.cached.size(); b++) {
    PlanCase one;
    one.p.num_heads = 8, one.p.q_len = 1;
    one.cached = {all.cached[b]};
    const std::vector<AttentionItem> alone = one.plan();
    std::vector<AttentionItem> of_row;
    for (const AttentionItem& item : items) {
      if (item.batch == static_cast<int64_t>(b)) of_row.push_back(item);
    }
    ASSERT_EQ(alone.size(), of_row.size());
    for (size_t i = 0; i < alone.size(); i++) EXPECT_TRUE(same_but_place(alone[i], of_row[i]));
  }
}

TEST(PlanTest, OneSequenceOfOneHeadFeeds64Threads) {
  PlanCase c;
  c.format.num_kv_heads = 1;
  c.p.num_heads = 4, c.p.q_len = 1;
  EXPECT_GE(c.plan().size(), 64u);
  c.cached = {1 << 20};
  const auto items = c.plan();
  EXPECT_GE(items.size(), 64u);
  EXPECT_LE(items.size(), 65u);  // and the scratch memory stays bounded
}

// at::parallel_for gives each of T threads ceil(items / T) items in a row, the last ones fewer or none. How much of the
// time of T threads is work: the pages of all threads over T times those of the busiest.
double busy_share(const std::vector<AttentionItem>& items, size_t threads) {
  const size_t each = (items.size() + threads - 1) / threads;
  int64_t all = 0, busiest = 0;
  for (size_t from = 0; from < items.size(); from += each) {
    int64_t pages = 0;
    for (size_t i = from; i < std::min(from + each, items.size()); i++) {
      pages += items[i].num_pages + items[i].exact_keys;  // the exact window is about a page
    }
    all += pages;
    busiest = std::max(busiest, pages);
  }
  return static_cast<double>(all) / (static_cast<double>(busiest) * static_cast<double>(threads));
}

// One sequence, one query token: 2 to 64 cores have work, one kv head included.
TEST(PlanTest, KeepsTwoTo64ThreadsBusy) {
  for (const int64_t kv_heads : {1, 2, 4, 8, 32}) {
    for (const int64_t tokens : {16384, 32768, 131072}) {
      PlanCase c;
      c.format.num_kv_heads = kv_heads;
      c.p.num_heads = 4 * kv_heads, c.p.q_len = 1;
      c.cached = {tokens};
      const auto items = c.plan();
      for (size_t threads = 2; threads <= 64; threads++) {
        const double share = busy_share(items, threads);
        // Between powers of two the rounding of items per thread costs more: at worst 64 items over 33 to 63 threads.
        const bool power_of_two = (threads & (threads - 1)) == 0;
        EXPECT_GE(share, power_of_two ? 0.79 : 0.5) << kv_heads << " kv heads, " << tokens << " tokens, " << threads
                                                    << " threads, " << items.size() << " items";
      }
    }
  }
}

TEST(PlanTest, ManyRowsNeedNoScratch) {
  PlanCase c;
  c.p.num_heads = 8, c.p.q_len = 500;
  const auto items = c.plan();
  EXPECT_EQ(c.floats, 0);
  EXPECT_EQ(items.size(), 2u * 63u);
}

TEST(PlanTest, PagesBeforeTheWindowAreLeftOut) {
  PlanCase c;
  c.p.num_heads = 2, c.p.q_len = 1, c.p.window = 1000, c.p.causal = true;
  int64_t pages = 0;
  for (const AttentionItem& item : c.plan()) pages += item.num_pages;
  EXPECT_LE(pages, 2 * (1000 / 128 + 2));
  EXPECT_GE(pages, 2 * ((1000 - 160) / 128));
}

TEST(PlanTest, AShortCacheIsOneItem) {
  PlanCase c;
  c.p.num_heads = 8, c.p.q_len = 1;
  for (const int64_t n : {0, 1, 132, 4 + 256 + 128}) {
    c.cached = {n};
    EXPECT_EQ(c.plan().size(), 2u) << n;
  }
  c.fresh = {300};  // a long exact part beside pages stands alone
  EXPECT_EQ(c.plan().size(), 4u);
}

TEST(PlanTest, EmptyBatch) {
  PlanCase c;
  c.p.num_heads = 8, c.p.q_len = 1;
  c.cached = {};
  EXPECT_EQ(c.plan().size(), 0u);
  c.cached = {100};
  c.p.q_len = 0;
  EXPECT_EQ(c.plan().size(), 0u);
}

}  // namespace
}  // namespace kivi::cpu
