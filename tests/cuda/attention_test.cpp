// Attention of csrc/cuda, the path that takes every call, and the merge that all paths share: against a reference in
// double that works from the definition, against the scalar kernel of the CPU, and the rules that no comparison of sums
// shows.
#include "cuda/attention_check.h"

namespace kivi::cuda {
namespace {

// ---------------------------------------------------------------------------------------------- formats

TEST(GenericAttention, EveryBitPairAndGroupSize) {
  for (const int64_t k_bits : kBitWidths) {
    for (const int64_t v_bits : kBitWidths) {
      for (const int64_t group : kGroupSizes) {
        Format f = make_format(1, 48, 80, k_bits, v_bits, group);
        f.residual_length = 5;
        AttentionSpec s = attention_spec(f);
        s.cached = {300 + group};
        s.num_heads = 3;
        s.seed = static_cast<uint32_t>(100 * k_bits + 10 * v_bits + group);
        expect_close(s);
      }
    }
  }
}

// One line of values and 64 of them, units of keys in one chunk and in four, padding in both.
TEST(GenericAttention, HeadSizes) {
  const int64_t sizes[][2] = {{1, 1},   {8, 8},    {17, 5},    {64, 64},   {80, 80},   {96, 64},    {112, 112},
                              {13, 40}, {192, 96}, {256, 256}, {257, 129}, {576, 512}, {1000, 999}, {1024, 1024}};
  for (const auto& size : sizes) {
    for (const int64_t bits : {1, 2, 3, 8}) {
      const int64_t group = size[0] % 3 == 0 ? 16 : 32;
      Format f = make_format(1, size[0], size[1], bits, bits, group);
      f.residual_length = group - 1;
      AttentionSpec s = attention_spec(f);
      s.cached = {4 + 128 + 70};
      s.num_heads = size[0] > 256 ? 3 : 5;
      expect_close(s);
    }
  }
}

TEST(GenericAttention, ScaleTypes) {
  for (const ScaleType type :
       {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened, ScaleType::kWidened8}) {
    for (const int64_t bits : {2, 3, 8}) {
      AttentionSpec s = attention_spec(small_format(bits, bits));
      s.format.scale_type = type;
      expect_close(s);
    }
  }
}

// Every way to store a record: scales of each type, groups of V of each size, symmetric and rotated values.
TEST(GenericAttention, RecordOptions) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kWidened8}) {
    for (const int64_t bits : kBitWidths) {
      for (int64_t i = 0; i < 8; i++) {
        const int64_t dims[] = {64, 80, 37, 48}, groups[] = {32, 64, 16, 128};
        const int64_t d = dims[(i + bits) % 4], g = groups[(i / 2 + bits) % 4];
        Settings s = settings(test::make_format(1, d, d, bits, bits, g, 8, 4), {420, 280}, 4, i % 3 == 0 ? 3 : 1);
        s.format.scale_type = type;
        s.format.v_symmetric = (i & 1) != 0;
        s.format.v_rotated = (i & 2) != 0;
        if ((i & 4) != 0) s.format.v_group_size = round_up(d, g);
        s.mask = i % 2 == 0 ? MaskType::kNone : MaskType::kBool;
        s.new_len = s.q_len;
        s.new_lengths = {s.q_len, s.q_len};
        expect_close(s, limits::kCudaExactSizes,
                     "scales " + std::to_string(static_cast<int>(type)) + " bits " + std::to_string(bits) + " case " +
                         std::to_string(i));
      }
    }
  }
}

// Channels of K in classes, in an order of its own for each head.
TEST(GenericAttention, ClassesOfKeys) {
  const std::vector<std::vector<KeyClass>> lists = {
      {{16, 4}, {48, 2}},  {{16, 4}, {32, 3}, {16, 2}}, {{16, 8}, {64, 1}},  {{32, 3}, {16, 4}, {32, 2}},
      {{16, 4}, {4, 2}},   {{48, 2}, {16, 3}},          {{112, 2}, {16, 1}}, {{32, 1}, {32, 3}, {16, 8}, {17, 4}},
      {{96, 4}, {200, 2}},
  };
  int64_t turn = 0;
  for (const auto& list : lists) {
    for (const int64_t group : kGroupSizes) {
      int64_t dim = 0, widest = 0;
      for (const KeyClass& k : list) dim += k.channels, widest = std::max(widest, k.bits);
      const int64_t heads = 2 * (1 + turn++ % 5);
      Settings s = settings(test::make_format(2, dim, 48, widest, 2, group, 8, 4), {280}, heads, turn % 3 == 0 ? 3 : 1);
      for (const KeyClass& k : list) s.format.key_classes[s.format.num_key_classes++] = k;
      s.format.scale_type = turn % 2 == 0 ? ScaleType::kFloat8 : ScaleType::kFloat16;
      s.mask = turn % 4 == 0 ? MaskType::kBool : MaskType::kNone;
      expect_close(s, limits::kCudaExactSizes, "dim " + std::to_string(dim) + " group " + std::to_string(group));
    }
  }
}

TEST(GenericAttention, Recipes) {
  for (int recipe = 0; recipe < 5; recipe++) {
    for (const int64_t dim : {64, 128}) {
      const Format f = recipe_format(recipe, dim);
      int64_t value = 0;
      ASSERT_EQ(format_error(f, &value), nullptr) << value;
      Settings s = settings(f, {700, 131, 36}, 6, 2);
      s.sinks = true;
      s.new_len = 2;
      s.new_lengths = {2, 1, 2};
      s.rows_follow_new = true;
      expect_close(s, limits::kCudaExactSizes, "recipe " + std::to_string(recipe));
    }
  }
}

TEST(GenericAttention, ElementTypes) {
  for (const Element q_type : kElements) {
    for (const Element cache_type : kElements) {
      for (const Element new_type : kElements) {
        AttentionSpec s = attention_spec(small_format());
        s.format.head_dim = s.format.value_head_dim = 37;
        s.q_type = q_type, s.cache_type = cache_type, s.new_type = new_type;
        s.fresh = {2};
        s.q_len = 2;
        // Outputs are rounded to the type of the queries, half a step of which is 2^-11 or 2^-8 of numbers up to 2.
        expect_close(s, kLimit,
                     q_type == Element::kFloat32   ? 0
                     : q_type == Element::kFloat16 ? limits::kFloat16Output
                                                   : limits::kBFloat16Output);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- sizes

TEST(GenericAttention, Lengths) {
  for (const int64_t n : {0, 1, 31, 32, 33, 63, 64, 65, 129, 1000}) {
    for (const int64_t residual : {0, 32}) {
      for (const int64_t sink : {0, 4}) {
        for (const int64_t fresh : {0, 1}) {
          AttentionSpec s = attention_spec(small_format());
          s.format.residual_length = residual;
          s.format.sink_length = sink;
          s.cached = {n};
          if (fresh > 0) s.fresh = {fresh};
          expect_close(s);
        }
      }
    }
  }
}

// More exact tokens than a block takes at once: sink, window and new ones.
TEST(GenericAttention, ManyExactTokens) {
  for (const int64_t sink : {3, 150}) {
    for (const int64_t residual : {1, 131, 300}) {
      AttentionSpec s = attention_spec(small_format());
      s.format.sink_length = sink, s.format.residual_length = residual;
      s.cached = {700, 60};
      s.fresh = {260, 7};
      s.q_len = 260;
      s.num_heads = 2;
      s.rows_follow_new = true;
      expect_close(s);
    }
  }
}

TEST(GenericAttention, QueryHeadsPerKvHead) {
  for (int64_t group = 1; group <= 16; group++) {
    AttentionSpec s = attention_spec(small_format());
    s.num_heads = 2 * group;
    expect_close(s);
  }
}

TEST(GenericAttention, Queries) {
  for (int64_t q_len = 1; q_len <= 20; q_len++) {
    for (const bool fresh : {false, true}) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {290};
      s.num_heads = q_len % 2 == 0 ? 2 : 6;
      s.q_len = q_len;
      if (fresh) s.fresh = {q_len};
      expect_close(s);
    }
  }
  AttentionSpec s = attention_spec(small_format());
  s.cached = {290, 0, 40};
  s.fresh = {70, 70, 3};
  s.q_len = 70;
  s.window = 90;
  expect_close(s);
}

// K with outlier channels of 5 and 30 times, off centre, and scores up to +-40 and beyond.
TEST(GenericAttention, OutliersAndWideScores) {
  for (const float spread : {1.0f, 4.0f, 13.0f}) {
    for (uint32_t seed = 1; seed <= 4; seed++) {
      AttentionSpec s = attention_spec(make_format(2, 128, 128, 2, 2, 32));
      s.seed = seed;
      s.num_heads = 8;
      s.cached = {1000};
      s.outlier_step = 16;
      s.score_spread = spread;
      expect_close(s, spread < 10 ? limits::kExactScores : limits::kExactWide);
    }
  }
}

// Runs of 4, 8 and 16 pages.
TEST(GenericAttention, LongRows) {
  Format f = make_format(1, 8, 8, 2, 2, 128);
  f.residual_length = 1;
  AttentionSpec s = attention_spec(f);
  s.num_heads = 2;
  s.cached = {64 * 128 + 5, 65 * 128 + 5, 513 * 128 + 5};
  s.causal = true;
  expect_close(s);
}

// ---------------------------------------------------------------------------------------------- what a query sees

TEST(GenericAttention, CausalIsBottomRight) {
  for (const int64_t fresh : {0, 1, 3, 40}) {
    for (const int64_t cached : {0, 3, 40, 300}) {
      for (const bool causal : {true, false}) {
        AttentionSpec s = attention_spec(small_format());
        s.q_len = fresh == 0 ? 5 : fresh;
        s.cached = {cached};
        if (fresh > 0) s.fresh = {fresh};
        s.causal = causal;
        expect_close(s);
      }
    }
  }
}

// Whole parts are out of sight here, at both ends.
TEST(GenericAttention, SlidingWindow) {
  for (const int64_t window : {1, 2, 40, 128, 200, 1000, 5000}) {
    for (const bool causal : {true, false}) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {1500, 140};
      s.fresh = {6, 6};
      s.q_len = 6;
      s.window = window;
      s.causal = causal;
      expect_close(s);
    }
  }
}

// More queries than keys: the first ones stand before all keys and see none.
TEST(GenericAttention, QueriesBeforeTheFirstKey) {
  AttentionSpec s = attention_spec(small_format());
  s.cached = {3};
  s.q_len = 11;
  expect_close(s);
  s.sinks = true;
  expect_close(s);
}

TEST(GenericAttention, MasksOfEveryBroadcast) {
  for (const MaskType mask : {MaskType::kBool, MaskType::kFloat32}) {
    for (int broadcast = 0; broadcast < 16; broadcast++) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {300, 260};
      s.fresh = {3, 3};
      s.q_len = 3;
      s.mask = mask;
      for (int i = 0; i < 4; i++) s.mask_broadcast[i] = (broadcast >> i & 1) != 0;
      s.seed = static_cast<uint32_t>(broadcast + 1);
      expect_close(s);
    }
  }
}

TEST(GenericAttention, SoftcapAlibiAndSinkLogits) {
  for (int options = 0; options < 16; options++) {
    AttentionSpec s = attention_spec(small_format());
    s.cached = {300, 200};
    s.softcap = (options & 1) != 0 ? 5.0f : 0.0f;
    s.alibi = (options & 2) != 0;
    s.sinks = (options & 4) != 0;
    s.alibi_per_batch = (options & 8) != 0;
    s.score_spread = 4;
    s.q_len = 3;
    expect_close(s, limits::kCudaExactSizes);
  }
}

TEST(GenericAttention, RaggedRows) {
  for (const bool follow : {false, true}) {
    for (const bool sinks : {false, true}) {
      AttentionSpec s = attention_spec(small_format());
      s.cached = {0, 1, 37, 700, 300};
      s.fresh = {4, 0, 2, 1, 3};
      s.q_len = 4;
      s.rows_follow_new = follow;
      s.sinks = sinks;
      expect_close(s);
    }
  }
}

// Every key masked out: as an empty cache.
TEST(GenericAttention, NothingSeenGivesZero) {
  for (const MaskType mask : {MaskType::kBool, MaskType::kFloat32}) {
    for (const int64_t cached : {0, 3, 1300}) {
      for (const bool sinks : {false, true}) {
        AttentionSpec s = attention_spec(small_format());
        s.cached = {cached};
        s.mask = mask;
        s.sinks = sinks;
        AttentionCase c(s);
        std::fill(c.bool_mask().begin(), c.bool_mask().end(), static_cast<uint8_t>(0));
        std::fill(c.float_mask().begin(), c.float_mask().end(), -kInf);
        const AttentionOutput got = DeviceAttention(c.params()).run();
        for (const float x : got.out) EXPECT_EQ(x, 0.0f);
        for (size_t h = 0; h < got.lse.size(); h++) EXPECT_EQ(got.lse[h], sinks ? c.params().sinks[h] : -kInf);
      }
    }
  }
}

TEST(GenericAttention, OutputStaysFiniteInFloat16) {
  AttentionSpec s = attention_spec(small_format());
  s.q_type = Element::kFloat16;
  s.cached = {2};
  AttentionCase c(s);
  for (int64_t i = 0; i < c.sink_v().size(); i++) c.sink_v().set(i, i % 2 == 0 ? 65530.0f : -65530.0f);
  const AttentionOutput got = DeviceAttention(c.params()).run();
  for (size_t i = 0; i < got.out.size(); i++) EXPECT_EQ(got.out[i], i % 2 == 0 ? 65504.0f : -65504.0f);
}

// ---------------------------------------------------------------------------------------------- NaN

// What a query may not see has no part in its result, whatever stands there. The first two queries are cut off from the
// newest keys by causality, all of them from some keys by the mask.
TEST(GenericAttention, UnseenNaNsLeaveNoTrace) {
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
        // The last new token, which only the last query could see.
        const auto at = static_cast<size_t>(c.mask_at(0, 0, i, 302));
        if (mask == MaskType::kBool) c.bool_mask()[at] = 1;
        if (mask == MaskType::kFloat32) c.float_mask()[at] = 0.0f;
      }
    };
    AttentionCase clean(s), dirty(s);
    hide(clean);
    hide(dirty);
    const Format& f = dirty.spec().format;
    const int64_t capacity = window_capacity(f), dim = f.head_dim;
    for (int64_t h = 0; h < f.num_kv_heads; h++) {
      for (int64_t d = 0; d < dim; d++) {
        dirty.sink_k().set(h * 4 * dim + d, kNaN);
        dirty.sink_v().set(h * 4 * dim + d, kInf);
        dirty.window_k().set((h * capacity + (299 - 4) % capacity) * dim + d, kInf);
        dirty.window_v().set((h * capacity + (299 - 4) % capacity) * dim + d, kNaN);
        const int64_t at = h * dirty.params().new_k_strides[1] + 2 * dirty.params().new_k_strides[2] + d;
        dirty.new_k().set(at, kNaN);
        dirty.new_v().set(at, kNaN);
      }
      // Tokens 40 and 41 are the quantised tokens 36 and 37: V of these two alone becomes NaN.
      for (const int64_t t : {4, 5}) {
        const uint16_t nan = 0x7E00;
        std::memcpy(dirty.record(0, h, 1) + dirty.layout().v_zero + t * 2, &nan, 2);
      }
    }
    const AttentionOutput want = DeviceAttention(clean.params()).run(), got = DeviceAttention(dirty.params()).run();
    for (size_t i = 0; i < got.out.size(); i++) {
      if (static_cast<int64_t>(i) / dim % 3 == 2) {
        EXPECT_TRUE(std::isnan(got.out[i])) << i;
      } else {
        EXPECT_EQ(got.out[i], want.out[i]) << i;
      }
    }
  }
}

// A NaN that is seen reaches the output of its kv head, and nothing else.
TEST(GenericAttention, SeenNaNsShow) {
  for (const int where : {0, 1, 2, 3}) {
    for (const bool key : {true, false}) {
      AttentionSpec s = attention_spec(small_format());
      s.format.head_dim = s.format.value_head_dim = 64;
      s.cached = {300, 300};
      s.fresh = {1, 1};
      AttentionCase c(s);
      const AttentionOutput want = DeviceAttention(c.params()).run();
      const int64_t capacity = window_capacity(s.format), row = 1, head = 1, bh = row * 2 + head;
      if (where == 0) (key ? c.sink_k() : c.sink_v()).set((bh * 4 + 3) * 64 + 5, kNaN);
      if (where == 1) {  // one channel of a group of keys, one token of values
        const uint16_t nan = 0x7E00;
        std::memcpy(c.record(row, head, 2) + (key ? c.layout().k_zero : c.layout().v_zero) + 5 * 2, &nan, 2);
      }
      if (where == 2) (key ? c.window_k() : c.window_v()).set((bh * capacity + (290 - 4) % capacity) * 64 + 5, kNaN);
      if (where == 3) {
        const int64_t at = row * c.params().new_k_strides[0] + head * c.params().new_k_strides[1] + 5;
        (key ? c.new_k() : c.new_v()).set(at, kNaN);
      }
      const AttentionOutput got = DeviceAttention(c.params()).run();
      for (size_t i = 0; i < got.out.size(); i++) {
        const size_t h = i / 64 % 4, b = i / 64 / 4, d = i % 64;
        const bool hit = b == 1 && h / 2 == 1 && (key || (where == 1 ? d < 32 : d == 5));
        if (hit) {
          EXPECT_TRUE(std::isnan(got.out[i])) << where << " " << key << " " << i;
        } else {
          EXPECT_EQ(got.out[i], want.out[i]) << where << " " << key << " " << i;
        }
      }
    }
  }
}

// A record has room for a whole line of channels; what stands in that which is left over has no part in a result.
TEST(GenericAttention, PaddingOfRecordsDoesNotMatter) {
  Format f = make_format(1, 37, 21, 2, 2, 32);
  f.residual_length = 0;
  AttentionSpec s = attention_spec(f);
  s.cached = {4 + 160};
  AttentionCase clean(s), dirty(s);
  const RecordLayout& r = dirty.layout();
  for (int64_t group = 0; group < 5; group++) {
    uint8_t* const record = dirty.record(0, 0, group);
    for (const int64_t section : {r.k_scale, r.k_zero}) {
      std::memset(record + section + 37 * r.scale_bytes, 0xFF, static_cast<size_t>(11 * r.scale_bytes));
    }
    for (int64_t word = 0; word < r.v_words[0]; word++) {  // channels 21 to 31
      std::memset(record + r.v_codes[0] + (2 * word + 1) * kLineBytes + 5 * 4, 0xFF, 11 * 4);
    }
  }
  expect_same_bits(DeviceAttention(dirty.params()).run(), DeviceAttention(clean.params()).run());
}

// A key that counts for nothing beside the others is still seen: its NaN shows, whether the other rows of the block see
// all keys or not.
TEST(GenericAttention, NaNOfWeightZeroShows) {
  for (const int64_t q_len : {1, 3}) {
    for (const bool quantized : {true, false}) {
      const size_t bad = quantized ? 40 : 2;
      Settings s = settings(test::make_format(1, 32, 32, 2, 2, 32, 0, 4), {132}, 2, q_len);
      s.edit = [bad](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
        for (size_t t = 0; t < 132; t++) std::fill_n(&k[t * 32], 32, t / 32 == bad / 32 && t >= 4 ? -9.0f : 0.0f);
        if (bad < 4) std::fill_n(&k[bad * 32], 32, -9.0f);
        v[bad * 32 + 4] = kNaN;
      };
      s.edit_q = [](std::vector<float>& q) { std::fill(q.begin(), q.end(), 9.0f); };
      const Problem problem(s);
      const AttentionOutput got = DeviceAttention(problem.params).run();
      for (size_t i = 0; i < got.out.size(); i++) {
        EXPECT_EQ(std::isnan(got.out[i]), quantized || i % 32 == 4) << q_len << " " << quantized << " " << i;
      }
    }
  }
}

// A group of NaN that has no zero to say so, or one byte only, seen and masked out.
TEST(GenericAttention, NaNInEveryKindOfRecord) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32}) {
    for (int64_t i = 0; i < 8; i++) {
      Settings s = settings(test::make_format(1, 64, 64, 2, 2, 32, 32, 4), {310}, 4);
      s.format.scale_type = type;
      s.format.v_symmetric = (i & 1) != 0;
      s.format.v_rotated = (i & 2) != 0;
      if ((i & 4) != 0) s.format.v_group_size = 64;
      s.mask = MaskType::kBool;
      s.broadcast_mask = true;
      for (const bool in_key : {true, false}) {
        s.edit = [in_key](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
          in_key ? k[40 * 64 + 3] = NAN : v[40 * 64 + 4] = INFINITY;
        };
        Problem problem(s);
        auto* mask = static_cast<uint8_t*>(const_cast<void*>(problem.params.mask));
        const int64_t first = in_key ? 36 : 40, last = in_key ? 68 : 41;
        for (const bool seen : {false, true}) {
          for (int64_t t = first; t < last; t++) mask[t * problem.params.mask_strides[3]] = seen ? 1 : 0;
          const Problem::Result want = problem.oracle();
          const std::string what = "scales " + std::to_string(static_cast<int>(type)) + " case " + std::to_string(i);
          expect_result(DeviceAttention(problem.params).run(), floats(want.out), floats(want.lse),
                        limits::kCudaExactSizes, 0, what);
          EXPECT_EQ(std::isnan(want.out[0]), seen) << what;
        }
      }
    }
  }
}

TEST(GenericAttention, BadQueriesSpoilTheirOwnRowOnly) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    Settings s = settings(test::make_format(1, 64, 64, 2, 2, 32, 16, 4), {300}, 6, 2);
    // Of one sign in all keys, so that -Inf makes every score -Inf, which must not count as "no key seen".
    s.edit = [](int64_t, int64_t, std::vector<float>& k, std::vector<float>&) {
      for (size_t i = 17; i < k.size(); i += 64) k[i] = std::fabs(k[i]) + 0.1f;
    };
    const Problem good(s);
    s.edit_q = [bad](std::vector<float>& q) { q[3 * 64 + 17] = bad; };
    const Problem spoilt(s);
    const AttentionOutput want = DeviceAttention(good.params).run(), got = DeviceAttention(spoilt.params).run();
    for (size_t i = 0; i < got.out.size(); i++) {
      if (i / 64 == 3) {
        ASSERT_TRUE(std::isnan(got.out[i])) << "output " << i << " is " << got.out[i];
      } else {
        ASSERT_EQ(got.out[i], want.out[i]) << "output " << i;
      }
    }
  }
}

// Keys whose score is -Inf by overflow count for nothing beside others, though a whole page has no other.
TEST(GenericAttention, OverflowedScoresCountForNothing) {
  Settings s = settings(test::make_format(1, 64, 64, 2, 2, 32, 0, 4), {4 + 256}, 2);
  s.format.scale_type = ScaleType::kFloat32;
  s.edit = [](int64_t, int64_t, std::vector<float>& k, std::vector<float>&) {
    for (size_t t = 4; t < 132; t++) std::fill_n(k.begin() + static_cast<int64_t>(t) * 64, 64, -3e30f);
  };
  s.edit_q = [](std::vector<float>& q) { std::fill(q.begin(), q.end(), 1e8f); };
  Problem problem(s);
  std::vector<uint8_t> mask(260, 1);
  problem.params.mask_strides[0] = problem.params.mask_strides[1] = problem.params.mask_strides[2] = 0;
  problem.params.mask_strides[3] = 1;
  problem.params.mask = mask.data();
  problem.params.mask_type = MaskType::kBool;
  problem.params.mask_keys = 260;
  const AttentionOutput got = DeviceAttention(problem.params).run();
  std::fill(mask.begin() + 4, mask.begin() + 132, static_cast<uint8_t>(0));
  const AttentionOutput want = DeviceAttention(problem.params).run();
  for (const float x : want.out) EXPECT_TRUE(std::isfinite(x));
  expect_same_bits(got, want);
}

// A row of 268 million tokens has twice as many runs of pages as a grid has blocks along its second axis; their results
// would fit into the scratch memory.
TEST(GenericAttention, NoMorePartsThanAGridHas) {
  AttentionSpec s;
  s.format = make_format(1, 16, 16, 2, 2, 32);
  s.num_heads = 1;
  AttentionCase c(s);
  AttentionParams p = c.params();
  p.block_table_stride = int64_t{1} << 21;
  EXPECT_LE(attention_scratch_bytes(p), 1024);  // two parts of 18 floats
}

}  // namespace
}  // namespace kivi::cuda
