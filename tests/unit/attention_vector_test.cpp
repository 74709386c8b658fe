// The vector attention kernels of every instruction set that this CPU has, against a softmax in double over the
// dequantised cache, and against the scalar kernel. Every size and rule that the kernels know is in here: a new one
// needs a test here.
//
// The limits are those of tests/limits.h.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "tests/limits.h"
#include "tests/unit/attention_problem.h"

namespace kivi::test {
namespace {

using cpu::Isa;
using Result = Problem::Result;

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::kNeon, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni}) {
    if (cpu::kernels_for(isa) != nullptr) all.push_back(isa);
  }
  return all;
}

double fast_limit(const Problem& p) {
  return limits::fast(p.format.head_dim, p.format.k_bits, p.largest_scaled_query());
}

// Compares all outputs; NaN must stand where NaN is wanted and nowhere else.
void expect_near(const Result& got, const Result& want, double limit, const std::string& what) {
  ASSERT_EQ(got.out.size(), want.out.size());
  double worst = 0, squares = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.out.size(); i++) {
    ASSERT_EQ(std::isnan(got.out[i]), std::isnan(want.out[i])) << what << " output " << i << " is " << got.out[i];
    if (std::isnan(want.out[i])) continue;
    const double e = std::fabs(got.out[i] - want.out[i]);
    squares += e * e;
    if (e > worst) worst = e, at = i;
  }
  EXPECT_LE(worst, limit) << what << " output " << at << " is " << got.out[at] << ", not " << want.out[at];
  EXPECT_LE(std::sqrt(squares / static_cast<double>(got.out.size())), limit / 3) << what;
  for (size_t i = 0; i < got.lse.size(); i++) {
    ASSERT_EQ(std::isnan(got.lse[i]), std::isnan(want.lse[i])) << what << " lse " << i << " is " << got.lse[i];
    if (std::isnan(want.lse[i])) continue;
    if (std::isinf(want.lse[i])) {
      EXPECT_EQ(got.lse[i], want.lse[i]) << what << " lse " << i;
    } else {
      EXPECT_NEAR(got.lse[i], want.lse[i], limit * 2 + 1e-6 * std::fabs(want.lse[i])) << what << " lse " << i;
    }
  }
}

class AttentionVector : public testing::TestWithParam<Isa> {
 protected:
  const cpu::Kernels& kernels() const { return *cpu::kernels_for(GetParam()); }

  // Both precisions against double, "exact" against the scalar kernel too. `rounding`: of the output's type.
  void check(const Settings& s, double rounding = 0, const std::string& what = "") {
    const double exact_limit = s.top_score > 4 || s.softcap > 0 || s.alibi ? limits::kExactScores : limits::kExact;
    Problem problem(s);
    const Result want = problem.oracle();
    const Result exact = problem.run(kernels(), true);
    expect_near(exact, want, exact_limit + rounding, what + " exact");
    expect_near(exact, problem.run(*cpu::kernels_for(Isa::kScalar), true), 2 * (exact_limit + rounding),
                what + " exact, scalar");
    expect_near(problem.run(kernels(), false), want, fast_limit(problem) + rounding, what + " fast");
  }
};

TEST_P(AttentionVector, AllBitsAndGroupSizes) {
  for (const int64_t k_bits : {1, 2, 3, 4, 8}) {
    for (const int64_t v_bits : {1, 2, 3, 4, 8}) {
      for (const int64_t g : {16, 32, 64, 128}) {
        // One full page and one that ends in the middle.
        const Format f = make_format(1, 48, 80, k_bits, v_bits, g, 5, 3);
        check(settings(f, {300 + g}, 4), 0,
              "K" + std::to_string(k_bits) + "V" + std::to_string(v_bits) + " G" + std::to_string(g));
      }
    }
  }
}

TEST_P(AttentionVector, HeadSizes) {
  for (const int64_t d : {1, 8, 16, 20, 64, 80, 96, 112, 128, 192, 256, 576, 1024}) {
    for (const int64_t dv : {d, int64_t{24}, int64_t{128}}) {
      for (const int64_t bits : {1, 2, 8}) {
        check(settings(make_format(1, d, dv, bits, bits, 32, 7, 2), {180}, 2), 0,
              "D" + std::to_string(d) + " Dv" + std::to_string(dv) + " bits" + std::to_string(bits));
      }
    }
  }
}

TEST_P(AttentionVector, HeadsPerKvHeadAndQueries) {
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16}) {
    for (const int64_t q_len : {1, 4, 7, 40}) {
      for (const bool causal : {true, false}) {
        Settings s = settings(make_format(2, 32, 32, 2, 2, 32, 20, 4), {260}, 2 * group, q_len);
        s.causal = causal;
        check(s, 0, "group " + std::to_string(group) + " queries " + std::to_string(q_len));
      }
    }
  }
}

TEST_P(AttentionVector, ExactSegments) {
  for (const int64_t sink : {0, 1, 5, 40}) {
    for (const int64_t residual : {0, 1, 31, 64, 200}) {
      for (const int64_t tokens : {0, 1, 3, 40, 41, 210, 333, 600}) {
        for (const int64_t fresh : {0, 1, 9}) {
          Settings s = settings(make_format(1, 32, 48, 2, 4, 32, residual, sink), {tokens}, 3, fresh > 0 ? fresh : 1);
          s.new_len = fresh > 0 ? fresh + 2 : 0;
          if (fresh > 0) s.new_lengths = {fresh};
          s.rows_follow_new = fresh > 0;
          check(s, 0,
                "sink " + std::to_string(sink) + " residual " + std::to_string(residual) + " tokens " +
                    std::to_string(tokens) + " new " + std::to_string(fresh));
        }
      }
    }
  }
}

TEST_P(AttentionVector, RaggedBatch) {
  Settings s = settings(make_format(2, 64, 64, 2, 2, 32, 32, 4), {0, 3, 700, 131, 164, 421}, 8, 6);
  check(s, 0, "queries only");
  s.new_len = 6;
  s.new_lengths = {6, 1, 0, 5, 2, 6};
  s.rows_follow_new = true;
  check(s, 0, "rows follow the new tokens");
}

TEST_P(AttentionVector, ResultsOfARowDoNotDependOnTheOthers) {
  // One query of a kv head becomes huge, which must not cost the others a bit.
  Settings quiet = settings(make_format(1, 64, 64, 2, 2, 32, 32, 4), {500}, 4);
  Settings loud = quiet;
  loud.edit_q = [](std::vector<float>& q) {
    for (size_t i = 0; i < 64; i++) q[i] *= 1e4f;
  };
  Problem a(quiet), b(loud);
  for (const bool exact : {true, false}) {
    const Result x = a.run(kernels(), exact), y = b.run(kernels(), exact);
    for (size_t i = 64; i < x.out.size(); i++) ASSERT_EQ(x.out[i], y.out[i]) << "output " << i;
  }
  // A batch of two rows gives the bits that each gives alone: the second row's tensors are taken for a batch of one.
  Problem both(settings(make_format(2, 64, 64, 2, 2, 32, 32, 4), {131, 700}, 8, 3));
  for (const bool exact : {true, false}) {
    const Result all = both.run(kernels(), exact);
    const AttentionParams whole = both.params;
    AttentionParams& p = both.params;
    const Format& f = both.format;
    p.batch = 1;
    p.q = static_cast<const float*>(p.q) + p.q_batch_stride;
    p.block_table += p.block_table_stride;
    p.lengths++;
    p.quantized_lengths++;
    p.sink_k = static_cast<const float*>(p.sink_k) + f.num_kv_heads * f.sink_length * f.head_dim;
    p.sink_v = static_cast<const float*>(p.sink_v) + f.num_kv_heads * f.sink_length * f.value_head_dim;
    p.window_k = static_cast<const float*>(p.window_k) + f.num_kv_heads * window_capacity(f) * f.head_dim;
    p.window_v = static_cast<const float*>(p.window_v) + f.num_kv_heads * window_capacity(f) * f.value_head_dim;
    const Result one = both.run(kernels(), exact);
    both.params = whole;
    for (size_t i = 0; i < one.out.size(); i++) ASSERT_EQ(one.out[i], all.out[one.out.size() + i]) << "output " << i;
  }
}

TEST_P(AttentionVector, ItemRangesDoNotChangeABit) {
  Settings s = settings(make_format(2, 64, 64, 4, 2, 32, 32, 4), {1900, 300}, 8, 2);
  Problem problem(s);
  for (const bool exact : {true, false}) {
    const Result whole = problem.run(kernels(), exact);
    for (const auto& cuts : std::vector<std::vector<int64_t>>{{1}, {3, 5, 11}, {2, 4, 6, 8, 10, 12, 14, 16}}) {
      const Result parts = problem.run(kernels(), exact, cuts);
      EXPECT_EQ(whole.out, parts.out);
      EXPECT_EQ(whole.lse, parts.lse);
    }
  }
}

TEST_P(AttentionVector, Masks) {
  for (const MaskType type : {MaskType::kBool, MaskType::kFloat32}) {
    for (const bool broadcast : {false, true}) {
      for (const bool causal : {false, true}) {
        Settings s = settings(make_format(2, 32, 32, 2, 2, 16, 16, 4), {400, 150}, 4, 5);
        s.mask = type;
        s.broadcast_mask = broadcast;
        s.causal = causal;
        check(s, 0, "mask");
        s.new_len = 5;
        s.new_lengths = {5, 5};
        check(s, 0, "mask with new tokens");
      }
    }
  }
}

TEST_P(AttentionVector, SlidingWindow) {
  for (const int64_t window : {1, 2, 17, 100, 128, 300, 5000}) {
    for (const bool causal : {true, false}) {
      Settings s = settings(make_format(1, 32, 32, 2, 2, 32, 16, 4), {700}, 2, 9);
      s.window = window;
      s.causal = causal;
      check(s, 0, "window " + std::to_string(window));
    }
  }
}

TEST_P(AttentionVector, SoftcapAlibiAndSinkLogits) {
  for (const double top : {1.0, 40.0}) {
    for (const int rule : {1, 2, 4, 7}) {
      Settings s = settings(make_format(2, 64, 64, 2, 2, 32, 40, 4), {500, 60}, 6, 3);
      s.top_score = top;
      s.softcap = (rule & 1) != 0 ? 20.0f : 0.0f;
      s.alibi = (rule & 2) != 0;
      s.sinks = (rule & 4) != 0;
      check(s, 0, "rule " + std::to_string(rule) + " top " + std::to_string(top));
    }
  }
}

TEST_P(AttentionVector, SinkLogitsWithoutAKey) {
  Settings s = settings(make_format(1, 32, 32, 2, 2, 32, 40, 4), {0}, 2);
  s.sinks = true;
  check(s);
}

TEST_P(AttentionVector, ElementTypes) {
  for (const Element q : {Element::kFloat32, Element::kFloat16, Element::kBFloat16}) {
    for (const Element cache : {Element::kFloat32, Element::kFloat16, Element::kBFloat16}) {
      for (const Element fresh : {Element::kFloat32, Element::kFloat16, Element::kBFloat16}) {
        for (const int64_t d : {64, 37}) {
          Settings s = settings(make_format(2, d, d, 2, 2, 32, 40, 4), {300}, 4, 3);
          s.q_type = q, s.cache_type = cache, s.new_type = fresh;
          s.new_len = 3;
          s.new_lengths = {3};
          const double rounding = q == Element::kFloat32   ? 0
                                  : q == Element::kFloat16 ? limits::kFloat16Output
                                                           : limits::kBFloat16Output;
          check(s, rounding, "types");
        }
      }
    }
  }
}

TEST_P(AttentionVector, Float32Scales) {
  for (const ScaleType type : {ScaleType::kFloat32, ScaleType::kWidened}) {
    for (const float size : {1.0f, 3e5f, 1e-6f}) {
      for (const int64_t bits : {2, 3}) {
        Settings s = settings(make_format(1, 48, 48, bits, bits, 32, 8, 4), {300}, 4);
        s.format.scale_type = type;
        s.edit = [size](int64_t, int64_t, std::vector<float>& k, std::vector<float>&) {
          for (auto& x : k) x *= size;
        };
        check(s, 0, "size " + std::to_string(size));
      }
    }
  }
}

// Every way to store a record: scales of each type, groups of V of each size, symmetric and rotated values.
TEST_P(AttentionVector, RecordOptions) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kWidened8}) {
    for (const int64_t bits : {1, 2, 3, 4, 8}) {
      for (int64_t i = 0; i < 8; i++) {
        const int64_t dims[] = {64, 80, 128, 48}, groups[] = {32, 64, 16, 128};
        const int64_t d = dims[(i + bits) % 4], g = groups[(i / 2 + bits) % 4];
        Settings s = settings(make_format(2, d, d, bits, bits, g, 8, 4), {420, 900}, 8, i % 3 == 0 ? 3 : 1);
        s.format.scale_type = type;
        s.format.v_symmetric = (i & 1) != 0;
        s.format.v_rotated = (i & 2) != 0;
        if ((i & 4) != 0) s.format.v_group_size = round_up(d, g);
        s.mask = i % 2 == 0 ? MaskType::kNone : MaskType::kBool;
        s.new_len = s.q_len;
        s.new_lengths = {s.q_len, s.q_len};
        check(s, 0,
              "scales " + std::to_string(static_cast<int>(type)) + " bits " + std::to_string(bits) + " case " +
                  std::to_string(i));
      }
    }
  }
}

// Channels of K in classes, in an order of its own for each head; every number of rows, masks, both element sizes.
TEST_P(AttentionVector, ClassesOfKeys) {
  const std::vector<std::vector<KeyClass>> lists = {
      {{16, 4}, {48, 2}}, {{16, 4}, {32, 3}, {16, 2}}, {{16, 8}, {64, 1}},  {{32, 3}, {16, 4}, {32, 2}},
      {{16, 4}, {4, 2}},  {{48, 2}, {16, 3}},          {{112, 2}, {16, 1}}, {{32, 1}, {32, 3}, {16, 8}, {17, 4}},
      {{32, 4}, {96, 2}},
  };
  int64_t turn = 0;
  for (const auto& list : lists) {
    for (const int64_t group : {16, 32, 64, 128}) {
      int64_t dim = 0, widest = 0;
      for (const KeyClass& k : list) dim += k.channels, widest = std::max(widest, k.bits);
      const int64_t heads = 2 * (1 + turn++ % 5);
      Settings s = settings(make_format(2, dim, 48, widest, 2, group, 8, 4), {420, 900}, heads, turn % 3 == 0 ? 3 : 1);
      for (const KeyClass& k : list) s.format.key_classes[s.format.num_key_classes++] = k;
      s.format.scale_type = turn % 2 == 0 ? ScaleType::kFloat8 : ScaleType::kFloat16;
      s.mask = turn % 4 == 0 ? MaskType::kBool : MaskType::kNone;
      check(s, 0, "dim " + std::to_string(dim) + " group " + std::to_string(group) + " heads " + std::to_string(heads));
    }
  }
}

// The limits that the issue states: outliers of 5x and 30x, scores up to +-40.
TEST_P(AttentionVector, WideScores) {
  for (const int64_t bits : {1, 2, 3, 4, 8}) {
    for (const double top : {4.0, 15.0, 40.0}) {
      for (unsigned seed = 1; seed < 4; seed++) {
        Settings s = settings(make_format(2, 128, 128, bits, bits, 32, 128, 4), {1500}, 8);
        s.top_score = top;
        s.seed = seed;
        check(s, 0, "bits " + std::to_string(bits) + " top " + std::to_string(top));
      }
    }
  }
}

// The largest sums that int16 can give: all codes at their maximum, all of q' at its amplitude and of one sign.
TEST_P(AttentionVector, LargestSumsDoNotOverflow) {
  for (const int64_t d : {128, 146, 147, 256, 257, 576, 1024}) {
    for (const int64_t bits : {1, 2, 3, 4, 8}) {
      // 1 to 4 rows go through the positions of a code in different orders: 7 = 4 + 3, 6 = 4 + 2, 5 = 3 + 2, 1.
      for (const int64_t heads : {1, 5, 6, 7}) {
        Settings s = settings(make_format(1, d, 32, bits, bits, 32, 0, 0), {128}, heads);
        s.edit = [d](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
          for (size_t i = 0; i < k.size(); i++) k[i] = static_cast<int64_t>(i) / d % 2 == 0 ? 1.0f : 0.0f;
          for (size_t i = 0; i < v.size(); i++) v[i] = static_cast<int64_t>(i) / 32 % 2 == 0 ? 1.0f : -1.0f;
        };
        s.edit_q = [d](std::vector<float>& q) {
          for (auto& x : q) x = static_cast<float>(2.0 / std::sqrt(static_cast<double>(d)));
        };
        const std::string name =
            "D" + std::to_string(d) + " bits" + std::to_string(bits) + " heads " + std::to_string(heads);
        check(s, 0, name);
        if (d < 576 || (bits != 3 && bits != 4)) continue;
        // The same in classes: the queries' amplitude is that of the longest, wherever it stands. (All roundings are
        // equal here, and with a narrow class beside 8 bits too large for the limit of the root mean square.)
        for (const bool longest_first : {true, false}) {
          const KeyClass longest{d - 64, bits}, other{64, 8};
          s.format.key_classes[0] = longest_first ? longest : other;
          s.format.key_classes[1] = longest_first ? other : longest;
          s.format.num_key_classes = 2;
          s.format.k_bits = 8;
          check(s, 0, name + (longest_first ? " first" : " last"));
        }
      }
    }
  }
}

// A group of K with NaN makes NaN of every row that sees its tokens; a group of V only of its own channels.
TEST_P(AttentionVector, NaNGroupsReachTheRowsThatSeeThem) {
  for (const int64_t bits : {2, 3, 8}) {
    for (const bool in_key : {true, false}) {
      for (const int64_t window : {0, 60}) {
        Settings s = settings(make_format(1, 64, 96, bits, bits, 32, 16, 4), {320}, 2, 3);
        s.window = window;
        s.edit = [in_key](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
          if (in_key) {
            k[70 * 64 + 5] = NAN;
          } else {
            v[70 * 96 + 40] = INFINITY;
          }
        };
        Problem problem(s);
        const Result want = problem.oracle();
        for (const bool exact : {true, false}) {
          const Result got = problem.run(kernels(), exact);
          for (size_t i = 0; i < got.out.size(); i++) {
            const bool nan = window == 0 && (in_key || (i % 96 >= 32 && i % 96 < 64));
            ASSERT_EQ(std::isnan(got.out[i]), nan) << "output " << i << " bits " << bits << " key " << in_key;
            if (!nan) {
              ASSERT_NEAR(got.out[i], want.out[i], fast_limit(problem));
            }
          }
          for (const double x : got.lse) ASSERT_EQ(std::isnan(x), window == 0 && in_key);
        }
      }
    }
  }
}

// The same where single tokens are masked out within the chunk, quantised and exact.
TEST_P(AttentionVector, NaNBehindAMaskIsNotSeen) {
  for (const bool quantized : {true, false}) {
    const int64_t bad = quantized ? 40 : 300;
    Settings s = settings(make_format(1, 32, 32, 2, 2, 16, 32, 4), {310}, 4, 1);
    s.mask = MaskType::kBool;
    s.broadcast_mask = true;
    s.edit = [bad](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
      k[static_cast<size_t>(bad * 32 + 3)] = NAN;
      v[static_cast<size_t>(bad * 32 + 4)] = NAN;
    };
    Problem problem(s);
    auto* mask = static_cast<uint8_t*>(const_cast<void*>(problem.params.mask));
    const int64_t first = quantized ? 36 : bad, last = quantized ? 52 : bad + 1;  // its whole group
    for (int64_t t = first; t < last; t++) mask[t * problem.params.mask_strides[3]] = 0;
    for (const bool exact : {true, false}) {
      const Result got = problem.run(kernels(), exact);
      for (const double x : got.out) ASSERT_FALSE(std::isnan(x)) << "quantized " << quantized;
      for (int64_t t = first; t < last; t++) mask[t * problem.params.mask_strides[3]] = 1;
      for (const double x : problem.run(kernels(), exact).out) ASSERT_TRUE(std::isnan(x)) << "quantized " << quantized;
      for (int64_t t = first; t < last; t++) mask[t * problem.params.mask_strides[3]] = 0;
    }
  }
}

// A group of NaN that has no zero to say so, or one byte only, spoils no other token, seen or not.
TEST_P(AttentionVector, NaNInEveryKindOfRecord) {
  for (const ScaleType type : {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32}) {
    for (int64_t i = 0; i < 8; i++) {
      Settings s = settings(make_format(1, 64, 64, 2, 2, 32, 32, 4), {310}, 4, 1);
      s.format.scale_type = type;
      s.format.v_symmetric = (i & 1) != 0;
      s.format.v_rotated = (i & 2) != 0;
      if ((i & 4) != 0) s.format.v_group_size = 64;
      s.mask = MaskType::kBool;
      s.broadcast_mask = true;
      for (const bool in_key : {true, false}) {
        // The largest scale of the page stands in the place of the lost one, in the record before.
        s.edit = [in_key](int64_t, int64_t, std::vector<float>& k, std::vector<float>& v) {
          for (size_t t = 4; t < 36; t++) k[t * 64 + 3] *= in_key ? 200.0f : 1.0f;
          for (size_t d = 0; d < 64; d++) v[8 * 64 + d] *= in_key ? 1.0f : 200.0f;
          in_key ? k[40 * 64 + 3] = NAN : v[40 * 64 + 4] = INFINITY;
        };
        Problem problem(s);
        auto* mask = static_cast<uint8_t*>(const_cast<void*>(problem.params.mask));
        const int64_t first = in_key ? 36 : 40, last = in_key ? 68 : 41;
        for (const bool seen : {false, true}) {
          for (int64_t t = first; t < last; t++) mask[t * problem.params.mask_strides[3]] = seen ? 1 : 0;
          const Result want = problem.oracle();
          for (const bool exact : {true, false}) {
            const double values = in_key ? 4 : 800;  // their size
            expect_near(problem.run(kernels(), exact), want, fast_limit(problem) * values,
                        "scales " + std::to_string(static_cast<int>(type)) + " case " + std::to_string(i));
          }
          ASSERT_EQ(std::isnan(want.out[0]), seen) << i;
        }
      }
    }
  }
}

TEST_P(AttentionVector, BadQueriesSpoilTheirOwnRowOnly) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    Settings s = settings(make_format(1, 64, 64, 2, 2, 32, 16, 4), {300}, 6, 2);
    // Of one sign in all keys, so that -Inf makes every score -Inf, which must not count as "no key seen".
    s.edit = [](int64_t, int64_t, std::vector<float>& k, std::vector<float>&) {
      for (size_t i = 17; i < k.size(); i += 64) k[i] = std::fabs(k[i]) + 0.1f;
    };
    Problem good(s);
    s.edit_q = [bad](std::vector<float>& q) { q[3 * 64 + 17] = bad; };
    Problem spoilt(s);
    for (const bool exact : {true, false}) {
      const Result want = good.run(kernels(), exact), got = spoilt.run(kernels(), exact);
      for (size_t i = 0; i < got.out.size(); i++) {
        if (i / 64 == 3) {
          ASSERT_TRUE(std::isnan(got.out[i])) << "output " << i << " is " << got.out[i];
        } else {
          ASSERT_EQ(got.out[i], want.out[i]) << "output " << i;
        }
      }
    }
  }
}

TEST_P(AttentionVector, HugeQueriesGiveNoUndefinedBehaviour) {
  Settings s = settings(make_format(1, 64, 64, 2, 2, 32, 16, 4), {300}, 4);
  s.edit_q = [](std::vector<float>& q) {
    for (size_t i = 0; i < 64; i++) q[i] *= 1e30f;
    for (size_t i = 64; i < 128; i++) q[i] *= 1e-38f;
    for (size_t i = 128; i < 192; i++) q[i] = 0.0f;
  };
  Problem problem(s);
  const Result want = problem.oracle();
  for (const bool exact : {true, false}) {
    const Result got = problem.run(kernels(), exact);
    for (size_t i = 64; i < got.out.size(); i++) {
      ASSERT_NEAR(got.out[i], want.out[i], i >= 192 ? 2e-3 : 1e-5) << "output " << i;
    }
  }
}

std::string isa_name(const testing::TestParamInfo<Isa>& info) { return cpu::kernels_for(info.param)->name; }

INSTANTIATE_TEST_SUITE_P(Isa, AttentionVector, testing::ValuesIn(isas()), isa_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AttentionVector);

}  // namespace
}  // namespace kivi::test
