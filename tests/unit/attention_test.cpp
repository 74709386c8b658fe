// Attention in fp32 on every instruction set against a reference in double that works from the definition, and the
// rules that no comparison of sums shows: masked keys, NaN, empty caches, threads.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention_case.h"
#include "isa.h"
#include "tests/limits.h"

namespace kivi::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class Attention : public IsaTest {
 public:
  // The error of out and lse against the reference.
  void expect_close(const AttentionSpec& spec, double limit) {
    AttentionCase c(spec);
    const AttentionResult got = c.run(kernels());
    const AttentionResult want = c.oracle();
    const std::string text = format_text(spec.format) + " seed " + std::to_string(spec.seed);
    EXPECT_LE(max_difference(got.out, want.out), limit) << text;
    EXPECT_LE(max_difference(got.lse, want.lse), limit + 1e-6 * spec.score_spread * 10) << text;
  }
};

Format small_format(int64_t k_bits = 2, int64_t v_bits = 2, int64_t group = 32) {
  Format f = make_format(2, 64, 64, k_bits, v_bits, group);
  f.residual_length = 32;
  return f;
}

TEST_P(Attention, EveryBitPair) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      AttentionSpec s = attention_spec(small_format(k_bits, v_bits, k_bits == 3 ? 16 : 32));
      s.seed = static_cast<uint32_t>(10 * k_bits + v_bits);
      expect_close(s, limits::kExact);
    }
  }
}

TEST_P(Attention, HeadSizesAndGroups) {
  const int64_t sizes[][2] = {{1, 1},     {8, 8},     {48, 48},   {80, 80},  {96, 64},
                              {128, 128}, {192, 128}, {256, 256}, {576, 512}};
  for (const auto& size : sizes) {
    for (const int64_t group : kGroupSizes) {
      Format f = make_format(1, size[0], size[1], 2, 2, group);
      f.residual_length = group - 1;
      AttentionSpec s = attention_spec(f);
      s.cached = {4 + 3 * 128 + 200};
      s.num_heads = 3;
      expect_close(s, limits::kExact);
    }
  }
}

// K with outlier channels of 5 and 30 times, off centre, and scores up to +-40 and beyond: there one rounding of a
// score is worth 2e-6 of its weight, and the outputs go up to 4.5, so the limit does too (worst measured: 1.8e-5, over
// 40 seeds).
TEST_P(Attention, OutliersAndWideScores) {
  for (const float spread : {1.0f, 4.0f, 13.0f}) {
    for (uint32_t seed = 1; seed <= 4; seed++) {
      Format f = make_format(2, 128, 128, 2, 2, 32);
      AttentionSpec s = attention_spec(f);
      s.seed = seed;
      s.num_heads = 8;
      s.cached = {1000};
      s.outlier_step = 16;
      s.score_spread = spread;
      expect_close(s, spread < 10 ? limits::kExact : limits::kExactWide);
    }
  }
}

TEST_P(Attention, QueryHeadsPerKvHead) {
  for (const int64_t group : {1, 2, 3, 4, 5, 8, 16, 33}) {
    AttentionSpec s = attention_spec(small_format());
    s.num_heads = 2 * group;
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, CausalIsBottomRight) {
  for (const int64_t fresh : {0, 1, 3, 40}) {
    for (const int64_t cached : {0, 3, 40, 300}) {
      AttentionSpec s = attention_spec(small_format());
      s.q_len = fresh == 0 ? 5 : fresh;
      s.cached = {cached};
      if (fresh > 0) s.fresh = {fresh};
      expect_close(s, limits::kExact);
      s.causal = false;
      expect_close(s, limits::kExact);
    }
  }
}

TEST_P(Attention, SlidingWindow) {
  for (const int64_t window : {1, 2, 40, 128, 200, 1000}) {
    for (const bool causal : {true, false}) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {700, 140};
      s.fresh = {6, 6};
      s.q_len = 6;
      s.window = window;
      s.causal = causal;
      expect_close(s, limits::kExact);
    }
  }
}

TEST_P(Attention, SoftcapAlibiAndSinkLogits) {
  for (int options = 0; options < 16; options++) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {300, 200};
    s.softcap = (options & 1) != 0 ? 5.0f : 0.0f;
    s.alibi = (options & 2) != 0;
    s.sinks = (options & 4) != 0;
    s.alibi_per_batch = (options & 8) != 0;
    s.score_spread = 4;
    s.q_len = 3;
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, MasksOfEveryBroadcast) {
  for (const MaskType mask : {MaskType::kBool, MaskType::kFloat32}) {
    for (int broadcast = 0; broadcast < 16; broadcast++) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {300, 260};
      s.fresh = {3, 3};
      s.q_len = 3;
      s.mask = mask;
      for (int i = 0; i < 4; i++) s.mask_broadcast[i] = (broadcast >> i & 1) != 0;
      s.seed = static_cast<uint32_t>(broadcast + 1);
      expect_close(s, limits::kExact);
    }
  }
}

TEST_P(Attention, RaggedRows) {
  for (const bool follow : {false, true}) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {0, 1, 37, 700, 300};
    s.fresh = {4, 0, 2, 1, 3};
    s.q_len = 4;
    s.rows_follow_new = follow;
    s.sinks = true;
    expect_close(s, limits::kExact);
    s.sinks = false;
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, ElementTypes) {
  for (const Element q_type : kElements) {
    for (const Element cache_type : kElements) {
      AttentionSpec s = attention_spec(small_format());
      s.q_type = q_type;
      s.cache_type = cache_type;
      s.new_type = cache_type;
      s.fresh = {2};
      s.q_len = 2;
      // The output is rounded to q's type.
      expect_close(s, limits::kExact + (q_type == Element::kFloat32   ? 0
                                        : q_type == Element::kFloat16 ? limits::kFloat16Output
                                                                      : limits::kBFloat16Output));
    }
  }
}

TEST_P(Attention, ScaleTypes) {
  for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened}) {
    AttentionSpec s = attention_spec(small_format());
    s.format.scale_type = type;
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, ManyRows) {  // more than one item takes
  for (const int64_t q_len : {17, 33, 100}) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {600};
    s.fresh = {q_len};
    s.q_len = q_len;
    s.window = q_len == 100 ? 150 : 0;
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, NoSinkTokensAndNoResidual) {
  AttentionSpec s = attention_spec(small_format());
  s.format.sink_length = 0;
  s.format.residual_length = 0;
  for (const int64_t n : {1, 31, 32, 128, 129, 640}) {
    s.cached = {n};
    expect_close(s, limits::kExact);
  }
}

TEST_P(Attention, EmptyCacheGivesZero) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {0};
  const AttentionResult plain = AttentionCase(s).run(kernels());
  for (const float x : plain.out) EXPECT_EQ(x, 0.0f);
  for (const float x : plain.lse) EXPECT_EQ(x, -kInf);
  s.sinks = true;
  AttentionCase with_sinks(s);
  const AttentionResult got = with_sinks.run(kernels());
  for (const float x : got.out) EXPECT_EQ(x, 0.0f);
  for (size_t h = 0; h < got.lse.size(); h++) EXPECT_EQ(got.lse[h], with_sinks.params().sinks[h]);
}

// Every key masked out, in one item and in many: as an empty cache.
TEST_P(Attention, AllMaskedGivesZero) {
  for (const MaskType mask : {MaskType::kBool, MaskType::kFloat32}) {
    for (const int64_t cached : {3, 300, 2000}) {
      for (const bool sinks : {false, true}) {
        AttentionSpec s = attention_spec(small_format());
        s.cached = {cached};
        s.mask = mask;
        s.sinks = sinks;
        AttentionCase c(s);
        std::fill(c.bool_mask().begin(), c.bool_mask().end(), static_cast<uint8_t>(0));
        std::fill(c.float_mask().begin(), c.float_mask().end(), -kInf);
        const AttentionResult got = c.run(kernels());
        for (const float x : got.out) EXPECT_EQ(x, 0.0f);
        for (size_t h = 0; h < got.lse.size(); h++) EXPECT_EQ(got.lse[h], sinks ? c.params().sinks[h] : -kInf);
      }
    }
  }
}

// 3 keys of score 0 and a sink logit of 0: 3/4 of the value (case C10 d).
TEST_P(Attention, SinkLogitTakesItsShare) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {3};
  s.sinks = true;
  AttentionCase c(s);
  for (int64_t i = 0; i < c.queries().size(); i++) c.queries().set(i, 0.0f);
  for (int64_t i = 0; i < c.sink_v().size(); i++) c.sink_v().set(i, 1.0f);
  const std::vector<float> zeros(static_cast<size_t>(s.num_heads), 0.0f);
  c.params().sinks = zeros.data();
  const AttentionResult got = c.run(kernels());
  for (const float x : got.out) EXPECT_NEAR(x, 0.75f, 1e-6f);
  for (const float x : got.lse) EXPECT_NEAR(x, std::log(4.0f), 1e-6f);
}

// Uniform weights count what is seen: 5 cached, 3 new, V[t] = t (case C13 a).
TEST_P(Attention, RowsSeeTheirOwnPrefix) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {5};
  s.fresh = {3};
  s.q_len = 3;
  AttentionCase c(s);
  for (int64_t i = 0; i < c.queries().size(); i++) c.queries().set(i, 0.0f);
  const Format& f = c.spec().format;
  for (int64_t h = 0; h < f.num_kv_heads; h++) {
    for (int64_t d = 0; d < f.value_head_dim; d++) {
      for (int64_t t = 0; t < 4; t++) c.sink_v().set((h * 4 + t) * f.value_head_dim + d, static_cast<float>(t));
      c.window_v().set(h * window_capacity(f) * f.value_head_dim + d, 4.0f);
    }
  }
  for (int64_t t = 0; t < 3; t++) {
    for (int64_t h = 0; h < f.num_kv_heads; h++) {
      const int64_t at = h * c.params().new_v_strides[1] + t * c.params().new_v_strides[2];
      for (int64_t d = 0; d < f.value_head_dim; d++) c.new_v().set(at + d, static_cast<float>(5 + t));
    }
  }
  const AttentionResult got = c.run(kernels());
  for (int64_t h = 0; h < s.num_heads; h++) {
    for (int64_t i = 0; i < 3; i++) {
      for (int64_t d = 0; d < f.value_head_dim; d++) {
        EXPECT_NEAR(got.out[static_cast<size_t>((h * 3 + i) * f.value_head_dim + d)],
                    2.5f + 0.5f * static_cast<float>(i), 1e-5f);
      }
    }
  }
}

// Several queries at once give what each gives alone: equal to 1e-6, since another order of sums is allowed.
TEST_P(Attention, SeveralRowsEqualOneByOne) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {500};
  s.q_len = 4;
  AttentionCase c(s);
  const AttentionResult all = c.run(kernels());
  for (int64_t i = 0; i < 4; i++) {
    AttentionParams p = c.params();
    std::vector<uint8_t> mask(500, 1);  // what causality would hide from row i
    for (int64_t j = 500 - 3 + i; j < 500; j++) mask[static_cast<size_t>(j)] = 0;
    p.q = advance(p.q, p.q_type, i * p.q_row_stride);
    p.q_len = 1;
    p.mask = mask.data();
    p.mask_type = MaskType::kBool;
    p.mask_strides[0] = p.mask_strides[1] = p.mask_strides[2] = 0;
    p.mask_strides[3] = 1;
    const AttentionResult one = AttentionCase::run(p, kernels());
    for (int64_t h = 0; h < s.num_heads; h++) {
      for (int64_t d = 0; d < 64; d++) {
        EXPECT_NEAR(one.out[static_cast<size_t>(h * 64 + d)], all.out[static_cast<size_t>((h * 4 + i) * 64 + d)],
                    1e-6f);
      }
    }
  }
}

// What a query may not see has no part in its result, whatever stands there. The first two queries are cut off from the
// newest keys by causality, all of them from some keys by the mask.
TEST_P(Attention, UnseenNaNsLeaveNoTrace) {
  for (const MaskType mask : {MaskType::kBool, MaskType::kFloat32}) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {300};
    s.fresh = {3};
    s.q_len = 3;
    s.mask = mask;
    s.mask_broadcast[1] = true;
    const auto hide = [&](AttentionCase& c) {
      for (int64_t i = 0; i < 3; i++) {
        for (const int64_t j : {0, 40, 41, 299}) {
          const auto at = static_cast<size_t>(c.mask_at(0, 0, i, j));
          if (mask == MaskType::kBool) c.bool_mask()[at] = 0;
          if (mask == MaskType::kFloat32) c.float_mask()[at] = -kInf;
        }
      }
    };
    AttentionCase clean(s);
    hide(clean);
    const AttentionResult want = clean.run(kernels());
    AttentionCase dirty(s);
    hide(dirty);
    const Format& f = dirty.spec().format;
    for (int64_t h = 0; h < f.num_kv_heads; h++) {
      for (int64_t d = 0; d < 64; d++) {
        dirty.sink_k().set(h * 4 * 64 + d, kNaN);
        dirty.sink_v().set(h * 4 * 64 + d, kInf);
        const int64_t slot = h * window_capacity(f) + (299 - 4) % window_capacity(f);
        dirty.window_k().set(slot * 64 + d, kInf);
        dirty.window_v().set(slot * 64 + d, kNaN);
        // The last new token: seen by the last query alone.
        dirty.new_k().set(h * dirty.params().new_k_strides[1] + 2 * dirty.params().new_k_strides[2] + d, kNaN);
        dirty.new_v().set(h * dirty.params().new_v_strides[1] + 2 * dirty.params().new_v_strides[2] + d, kNaN);
      }
      // Tokens 40 and 41 are the quantised tokens 36 and 37: V of these two alone becomes NaN.
      uint8_t* record = dirty.record(0, h, 1);
      for (const int64_t t : {4, 5}) {
        for (int64_t g = 0; g < 2; g++) {
          const uint16_t nan = 0x7E00;
          std::memcpy(record + dirty.layout().v_zero + (g * 32 + t) * 2, &nan, 2);
        }
      }
    }
    const AttentionResult got = dirty.run(kernels());
    for (int64_t h = 0; h < s.num_heads; h++) {
      for (int64_t i = 0; i < 3; i++) {
        for (int64_t d = 0; d < 64; d++) {
          const auto at = static_cast<size_t>((h * 3 + i) * 64 + d);
          if (i == 2) {
            EXPECT_TRUE(std::isnan(got.out[at])) << h << " " << d;
          } else {
            EXPECT_EQ(got.out[at], want.out[at]) << h << " " << i << " " << d;
          }
        }
      }
    }
  }
}

// A NaN that is seen reaches the output of its kv head, and nothing else.
TEST_P(Attention, SeenNaNsShow) {
  for (const int where : {0, 1, 2, 3}) {
    for (const bool key : {true, false}) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {300, 300};
      s.fresh = {1, 1};
      AttentionCase clean(s);
      const AttentionResult want = clean.run(kernels());
      AttentionCase c(s);
      const Format& f = c.spec().format;
      const int64_t capacity = window_capacity(f);
      const int64_t row = 1, head = 1, bh = row * 2 + head;
      if (where == 0) (key ? c.sink_k() : c.sink_v()).set((bh * 4 + 3) * 64 + 5, kNaN);
      if (where == 1) {  // one channel of a group of keys, one token of values
        const uint16_t nan = 0x7E00;
        const int64_t at = key ? c.layout().k_zero + 5 * 2 : c.layout().v_zero + 5 * 2;
        std::memcpy(c.record(row, head, 2) + at, &nan, 2);
      }
      if (where == 2) (key ? c.window_k() : c.window_v()).set((bh * capacity + (290 - 4) % capacity) * 64 + 5, kNaN);
      if (where == 3) {
        const int64_t at = row * c.params().new_k_strides[0] + head * c.params().new_k_strides[1] + 5;
        (key ? c.new_k() : c.new_v()).set(at, kNaN);
      }
      const AttentionResult got = c.run(kernels());
      for (int64_t i = 0; i < static_cast<int64_t>(got.out.size()); i++) {
        const int64_t h = i / 64 % 4, b = i / 64 / 4, d = i % 64;
        const bool hit = b == row && h / 2 == head && (key || (where == 1 ? d < 32 : d == 5));
        if (hit) {
          EXPECT_TRUE(std::isnan(got.out[static_cast<size_t>(i)])) << where << " " << key << " " << i;
        } else {
          EXPECT_EQ(got.out[static_cast<size_t>(i)], want.out[static_cast<size_t>(i)])
              << where << " " << key << " " << i;
        }
      }
    }
  }
}

// A row gives the same bits alone and in any batch.
TEST_P(Attention, RowsDoNotDependOnTheBatch) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {700, 5, 2000};
  s.q_len = 2;
  AttentionCase c(s);
  const AttentionResult all = c.run(kernels());
  const int64_t floats_per_row = static_cast<int64_t>(all.out.size()) / 3;
  for (int64_t b = 0; b < 3; b++) {
    AttentionParams p = c.params();
    const int64_t sinks = b * 2 * 4 * 64, window = b * 2 * window_capacity(p.format) * 64;
    p.batch = 1;
    p.q = advance(p.q, p.q_type, b * p.q_batch_stride);
    p.block_table += b * p.block_table_stride;
    p.lengths += b;
    p.quantized_lengths += b;
    p.sink_k = advance(p.sink_k, p.cache_type, sinks), p.sink_v = advance(p.sink_v, p.cache_type, sinks);
    p.window_k = advance(p.window_k, p.cache_type, window), p.window_v = advance(p.window_v, p.cache_type, window);
    const AttentionResult alone = AttentionCase::run(p, kernels());
    EXPECT_EQ(alone.out,
              std::vector<float>(all.out.begin() + b * floats_per_row, all.out.begin() + (b + 1) * floats_per_row));
  }
}

// Any division of the items between threads gives the same bits; under ThreadSanitizer this is also the test for races.
TEST_P(Attention, ThreadsGiveTheSameBits) {
  for (const int64_t q_len : {1, 7, 40}) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {1000, 333};
    s.q_len = q_len;
    AttentionCase c(s);
    const AttentionResult want = c.run(kernels(), 1);
    for (const int threads : {2, 3, 8}) {
      const AttentionResult got = c.run(kernels(), threads);
      EXPECT_EQ(got.out, want.out);
      EXPECT_EQ(got.lse, want.lse);
    }
  }
}

// The merge of splits against one item that takes all keys.
TEST_P(Attention, MergeEqualsUnsplit) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {3000};
  s.q_len = 2;
  s.sinks = true;
  s.score_spread = 3;
  AttentionCase c(s);
  const AttentionResult split = c.run(kernels());
  std::vector<AttentionItem> items;
  for (int64_t h = 0; h < 2; h++) {
    AttentionItem item{};
    item.kv_head = h;
    item.num_rows = 4;
    item.num_pages = ceil_div(c.params().quantized_lengths[0], kPageTokens);
    item.exact_keys = true;
    item.num_splits = 1;
    item.partial = -1;
    items.push_back(item);
  }
  const AttentionResult whole = AttentionCase::run(c.params(), kernels(), 1, items, 0);
  EXPECT_LE(max_difference(whole.out, split.out), kernels().isa == Isa::kScalar ? 1e-6 : 2e-6);
  EXPECT_LE(max_difference(whole.lse, split.lse), 2e-6);
}

// Values up to the ends of float16: an output that rounds to infinity becomes 65504.
TEST_P(Attention, OutputStaysFiniteInFloat16) {
  AttentionSpec s = attention_spec(small_format());
  s.q_type = Element::kFloat16;
  s.cached = {2};
  AttentionCase c(s);
  for (int64_t i = 0; i < c.sink_v().size(); i++) c.sink_v().set(i, 65530.0f);
  const AttentionResult got = c.run(kernels());
  for (const float x : got.out) EXPECT_EQ(x, 65504.0f);
}

TEST_P(Attention, FiniteWithSubnormalsFlushed) {
  if (!FlushDenormals::supported) GTEST_SKIP() << "no known switch for subnormals on this machine";
  AttentionSpec s = attention_spec(small_format());
  s.score_spread = 100;
  AttentionCase c(s);
  AttentionResult got;
  {
    const FlushDenormals flush;
    got = c.run(kernels());
  }
  for (const float x : got.out) EXPECT_TRUE(std::isfinite(x));
}

KIVI_TEST_EVERY_ISA(Attention);

}  // namespace
}  // namespace kivi::cpu
