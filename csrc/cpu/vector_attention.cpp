// Attention over a cache with vectors: the items of a plan, their rows a few at a time, each past the pages (straight
// from the codes) and the exact tokens. Written once with Highway, compiled for AVX2, AVX-512 (with and without VNNI)
// and NEON.
#define HWY_TARGET_INCLUDE "cpu/vector_attention.cpp"
// Only what cpu/vector.h names. The baseline target is compiled too, but left empty (below).
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#include "hwy/foreach_target.h"
// After it, because it defines HWY_TARGET.
#include <algorithm>
#include <cstdint>

#include "cpu/plan.h"
#include "cpu/vector.h"
#include "hwy/highway.h"

#ifndef KIVI_CPU_VECTOR_ATTENTION_ONCE
#define KIVI_CPU_VECTOR_ATTENTION_ONCE
namespace kivi::cpu {
// At least `floats` floats that belong to this thread, 64-byte aligned.
float* attention_scratch(int64_t floats);
}  // namespace kivi::cpu
#endif

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
#include "cpu/vector_exact-inl.h"
#include "cpu/vector_pages-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kivi::cpu {
namespace HWY_NAMESPACE {

// All items of one call.
struct Job {
  const AttentionParams& params;
  const AttentionItem* items;
  int64_t end;  // of the items of this call
  float* partials;
  bool vnni;
};

// The part of page `page` that belongs to the item's kv head, as far as it is filled.
struct PagePart {
  const uint8_t* records;
  int64_t tokens;
};

inline PagePart page_part(const AttentionParams& p, const AttentionItem& item, int64_t page) {
  const int64_t tokens = std::min(p.quantized_lengths[item.batch] - page * kPageTokens, kPageTokens);
  return {record_address(p, item.batch, item.kv_head, page, 0), tokens};
}

// What to prefetch while page `page` is worked on: the next page of the item; at its end, if its rows are done, the
// first one of the next item, else its own first page again.
inline Fetch fetch_after(const Job& job, int64_t index, int64_t page, bool last_rows) {
  const AttentionParams& p = job.params;
  const AttentionItem* item = job.items + index;
  const uint8_t* const here = page_part(p, *item, page).records;
  const Fetch nothing{here, here};
  if (page + 1 < item->first_page + item->num_pages) {
    page++;
  } else {
    if (last_rows) {
      do {
        if (++index == job.end) return nothing;
        item = job.items + index;
      } while (item->num_pages == 0);
    }
    page = item->first_page;
  }
  const PagePart part = page_part(p, *item, page);
  return {part.records, part.records + part.tokens / p.format.group_size * p.layout.bytes - kLineBytes};
}

// Nothing came before the first page of a call that could have spread its prefetches.
inline void fetch_first_page(const Job& job, int64_t begin) {
  const AttentionItem& item = job.items[begin];
  if (item.num_pages == 0) return;
  const PagePart part = page_part(job.params, item, item.first_page);
  const int64_t bytes = part.tokens / job.params.format.group_size * job.params.layout.bytes;
  for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(part.records + at, 0, 2);
}

// Hands out pieces of the scratch buffer, or only counts them.
class Scratch {
 public:
  explicit Scratch(float* base) : base_(base) {}
  float* take(int64_t floats) {
    float* piece = base_ != nullptr ? base_ + used_ : nullptr;
    used_ += round_up(floats, 16);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

template <int kRows>
void lay_out(const AttentionParams& p, Rows<kRows>& rows, Pages<kRows>& pages, Scratch& scratch) {
  const int64_t slots = p.format.group_size == 16 ? 2 * kChunk : kChunk;
  // The last class of keys may end in the middle of a unit of 32 wherever it begins.
  rows.k_padded = round_up(p.layout.k_channels + (p.layout.num_key_classes > 1 ? kLine : 0), 32);
  rows.v_channels = p.layout.v_channels;
  rows.v_groups = p.layout.v_groups;
  rows.q = scratch.take(kRows * rows.k_padded);
  rows.acc = scratch.take(kRows * rows.v_channels);
  rows.zero_acc = scratch.take(kRows * rows.v_groups * kLanes);
  rows.score = scratch.take(kRows * kChunk);
  pages.q_scaled = scratch.take(kRows * rows.k_padded);
  pages.q_ordered = scratch.take(p.k_order != nullptr ? kRows * rows.k_padded : 0);
  pages.value_floats = kRows * std::max(rows.k_padded, slots);
  pages.k_values = scratch.take(pages.value_floats);
  pages.v_values = scratch.take(pages.value_floats);
}

// Rows [row, row + kRows) of item `index`.
template <int kRows>
HWY_NOINLINE void attend_rows(const Job& job, int64_t index, int64_t row) {
  const AttentionParams& p = job.params;
  const AttentionItem& item = job.items[index];
  const KeyRanges ranges = key_ranges(p, item.batch);
  Rows<kRows> rows;
  Pages<kRows> pages;
  Scratch size(nullptr);
  lay_out(p, rows, pages, size);
  Scratch scratch(attention_scratch(size.used()));
  lay_out(p, rows, pages, scratch);
  rows.begin(p, item, ranges, row);
  if (item.num_pages > 0) pages.begin(p, item, &rows, job.vnni);
  const bool last_rows = row + kRows >= item.num_rows;
  const int64_t stride = partial_row_floats(p);
  if (item.num_splits > 1) {
    // The partial results are written after all pages, and would miss the caches then.
    const auto* partial = reinterpret_cast<const uint8_t*>(job.partials + item.partial + row * stride);
    const int64_t bytes = kRows * stride * static_cast<int64_t>(sizeof(float));
    for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(partial + at, 1, 2);
  }
  for (int64_t page = item.first_page; page < item.first_page + item.num_pages; page++) {
    Fetch fetch = fetch_after(job, index, page, last_rows);
    const PagePart part = page_part(p, item, page);
    pages.page(part.records, part.tokens, p.format.sink_length + page * kPageTokens, fetch);
  }
  if (p.format.v_rotated && item.num_pages > 0) rows.rotate_back();
  if (item.exact_keys) exact_keys(p, item, ranges, rows);
  float* out[kRows];
  float sum[kRows];
  for (int r = 0; r < kRows; r++) {
    out[r] = item.num_splits == 1 ? rows.acc + r * rows.v_channels : job.partials + item.partial + (row + r) * stride;
  }
  rows.finish(out, sum);
  for (int r = 0; r < kRows; r++) {
    if (item.num_splits == 1) {
      finish_row(p, item, row + r, out[r], rows.max[r], sum[r]);
    } else {
      out[r][rows.v_channels] = rows.max[r];
      out[r][rows.v_channels + 1] = sum[r];
    }
  }
}

void attend_items(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                  float* partials, bool vnni) {
  const Job job{params, items, end, partials, vnni};
  if (begin < end) fetch_first_page(job, begin);
  for (int64_t index = begin; index < end; index++) {
    const int64_t num_rows = items[index].num_rows;
    for (int64_t row = 0; row < num_rows;) {
      const int64_t left = num_rows - row;
      if (left >= 6 || left == 4) {
        attend_rows<4>(job, index, row);
        row += 4;
      } else if (left == 5 || left == 3) {
        attend_rows<3>(job, index, row);
        row += 3;
      } else if (left == 2) {
        attend_rows<2>(job, index, row);
        row += 2;
      } else {
        attend_rows<1>(job, index, row);
        row += 1;
      }
    }
  }
}

void attention(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end, float* partials) {
  attend_items(params, items, begin, end, partials, false);
}

#if HWY_TARGET == HWY_AVX3
void attention_vnni(const AttentionParams& params, const AttentionItem* items, int64_t begin, int64_t end,
                    float* partials) {
  attend_items(params, items, begin, end, partials, true);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kivi::cpu
HWY_AFTER_NAMESPACE();
#endif  // targets

#if HWY_ONCE
#include <cstdlib>
#include <memory>
#include <new>

namespace kivi::cpu {

float* attention_scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local int64_t size = 0;
  if (floats > size) {
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(round_up(floats * 4, 64)))));
    size = buffer != nullptr ? floats : 0;
    if (buffer == nullptr) throw std::bad_alloc();
    std::fill(buffer.get(), buffer.get() + floats, 0.0f);
  }
  return buffer.get();
}

AttentionFn vector_attention(Isa isa) {
#if HWY_ARCH_X86
  const int64_t supported = hwy::SupportedTargets();
  if (isa == Isa::kAvx2 && (supported & HWY_AVX2) != 0) return N_AVX2::attention;
  if (isa == Isa::kAvx512 && (supported & HWY_AVX3) != 0) return N_AVX3::attention;
  if (isa == Isa::kAvx512Vnni && (supported & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512vnni")) {
    return N_AVX3::attention_vnni;
  }
#elif HWY_ARCH_ARM_A64
  if (isa == Isa::kNeon) return N_NEON::attention;
#endif
  (void)isa;
  return nullptr;
}

}  // namespace kivi::cpu
#endif  // HWY_ONCE
