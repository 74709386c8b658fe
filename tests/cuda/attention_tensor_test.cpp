// The tensor-core parts of attention, joined on the host, against the scalar kernels of the CPU on the same records.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cpu/plan.h"
#include "cuda/attention.h"
#include "cuda/attention_tensor_configs.h"
#include "cuda/device_memory.h"
#include "format/rotate.h"
#include "tests/limits.h"
#include "tests/unit/attention_problem.h"

namespace kivi::cuda {
namespace {

using test::Problem;
using test::Settings;

std::vector<uint8_t> bytes_of(const void* data, int64_t count) {
  const auto* const p = static_cast<const uint8_t*>(data);
  return data == nullptr ? std::vector<uint8_t>() : std::vector<uint8_t>(p, p + count);
}

// A problem's arrays in device memory, each of exactly its size.
class DeviceProblem {
 public:
  AttentionParams params;

  explicit DeviceProblem(const Problem& problem) : params(problem.params) {
    const Format& f = problem.format;
    AttentionParams& p = params;
    const int64_t rows = p.batch * f.num_kv_heads, size = element_bytes(p.cache_type);
    int32_t pages = 0;
    for (int64_t i = 0; i < p.batch * p.block_table_stride; i++) pages = std::max(pages, p.block_table[i] + 1);
    move(p.pool, pages * p.page_bytes);
    move(p.k_order, rows * f.head_dim * 2);
    move(p.block_table, p.batch * p.block_table_stride * 4);
    move(p.lengths, p.batch * 8);
    move(p.quantized_lengths, p.batch * 8);
    move(p.sink_k, rows * f.sink_length * f.head_dim * size);
    move(p.sink_v, rows * f.sink_length * f.value_head_dim * size);
    move(p.window_k, rows * window_capacity(f) * f.head_dim * size);
    move(p.window_v, rows * window_capacity(f) * f.value_head_dim * size);
    move(p.new_k, rows * p.new_len * f.head_dim * element_bytes(p.new_type));
    move(p.new_v, rows * p.new_len * f.value_head_dim * element_bytes(p.new_type));
    move(p.new_lengths, p.batch * 8);
    move(p.q, p.batch * p.num_heads * p.q_len * f.head_dim * element_bytes(p.q_type));
    move(p.sinks, p.num_heads * 4);
    move(p.alibi_slopes, p.batch * p.num_heads * 4);
    move(p.mask, p.batch * p.mask_strides[0] * (p.mask_type == MaskType::kBool ? 1 : 4));
    p.out = nullptr, p.lse = nullptr;
  }

  // Other lengths, in the memory that the params point to.
  void set_lengths(const Problem& problem) {
    const auto size = static_cast<int64_t>(problem.lengths.size()) * 8;
    arrays_[lengths_at_].set(bytes_of(problem.lengths.data(), size));
    arrays_[lengths_at_ + 1].set(bytes_of(problem.quantized.data(), size));
  }

 private:
  template <class T>
  void move(const T*& pointer, int64_t bytes) {
    if (pointer == nullptr) return;
    if (reinterpret_cast<const void*>(&pointer) == &params.lengths) lengths_at_ = arrays_.size();
    arrays_.emplace_back(bytes_of(pointer, bytes));
    pointer = reinterpret_cast<const T*>(arrays_.back().data());
  }

  std::vector<DeviceArray<uint8_t>> arrays_;
  size_t lengths_at_ = 0;
};

// Joins parts as launch_merge does: out [B][Hq][Lq][Dv] in float, and lse.
Problem::Result join(const AttentionParams& p, const std::vector<int64_t>& quantized, int64_t parts,
                     const std::vector<float>& scratch, const std::vector<int64_t>& rows_of_batch) {
  Problem::Result result;
  const int64_t channels = p.layout.v_channels, dim = p.format.value_head_dim, group = group_heads(p);
  for (int64_t b = 0; b < p.batch; b++) {
    const int64_t own = 1 + quantized_parts(ceil_div(quantized[static_cast<size_t>(b)], kPageTokens));
    for (int64_t h = 0; h < p.num_heads; h++) {
      for (int64_t i = 0; i < p.q_len; i++) {
        const auto cell = [&](int64_t part) {
          return scratch.data() + part_offset(p, parts, b, h / group, part, h % group * p.q_len + i);
        };
        double max = -INFINITY, sum = 0;
        for (int64_t s = 0; s < parts; s++) {  // also of the empty ones
          const double part_max = static_cast<double>(cell(s)[channels]);
          if (s >= own || i >= rows_of_batch[static_cast<size_t>(b)]) {
            EXPECT_EQ(cell(s)[channels], -INFINITY) << "part " << s;
            EXPECT_EQ(cell(s)[channels + 1], 0.0f) << "part " << s;
          }
          max = std::max(max, part_max);
        }
        std::vector<double> acc(static_cast<size_t>(dim));
        for (int64_t s = 0; s < own; s++) {
          const float* const part = cell(s);
          if (part[channels + 1] == 0.0f) {
            EXPECT_EQ(part[channels], -INFINITY);
            continue;
          }
          const double factor =
              std::isnan(part[channels + 1]) ? 1 : std::exp2(static_cast<double>(part[channels]) - max);
          std::vector<float> row(part, part + dim);
          if (s > 0 && p.format.v_rotated) rotate_row(row.data(), dim, /*back=*/true);
          for (int64_t d = 0; d < dim; d++) {
            acc[static_cast<size_t>(d)] += factor * static_cast<double>(row[static_cast<size_t>(d)]);
          }
          sum += factor * static_cast<double>(part[channels + 1]);
        }
        const bool seen = i < rows_of_batch[static_cast<size_t>(b)] && sum != 0;
        if (p.sinks != nullptr && seen) {
          const double sink = static_cast<double>(p.sinks[h]) * static_cast<double>(kLog2E), top = std::max(max, sink);
          sum = sum * std::exp2(max - top) + std::exp2(sink - top);
          for (double& x : acc) x *= std::exp2(max - top);
          max = top;
        }
        for (const double x : acc) result.out.push_back(seen ? x / sum : 0.0);
        result.lse.push_back(seen ? (max + std::log2(sum)) * static_cast<double>(kLn2) : -INFINITY);
      }
    }
  }
  return result;
}

int64_t parts_of(const Problem& problem) { return most_parts(problem.params.block_table_stride); }

// A launch on scratch memory that holds anything, and what its parts give together.
class Launch {
 public:
  explicit Launch(const Problem& problem)
      : problem_(problem),
        device_(problem),
        parts_(parts_of(problem)),
        scratch_(static_cast<size_t>(part_offset(device_.params, parts_, device_.params.batch, 0, 0, 0))) {}

  DeviceProblem& device() { return device_; }
  bool supported() const { return tensor_parts_support(device_.params); }
  Problem::Result run() {
    EXPECT_TRUE(tensor_parts_support(device_.params));
    check(launch_tensor_parts(device_.params, parts_, scratch_.data(), nullptr));
    const AttentionParams& p = problem_.params;
    std::vector<int64_t> rows(problem_.lengths.size(), p.q_len);
    return join(p, problem_.quantized, parts_, scratch_.get(), p.rows_follow_new ? problem_.new_lengths : rows);
  }
  std::vector<float> scratch() const { return scratch_.get(); }

 private:
  const Problem& problem_;
  DeviceProblem device_;
  int64_t parts_;
  DeviceArray<float> scratch_;
};

struct Errors {
  double out = 0, lse = 0;
};

void expect_near(const Problem::Result& got, const Problem::Result& want, double limit, Errors* worst = nullptr) {
  ASSERT_EQ(got.out.size(), want.out.size());
  double most = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.out.size(); i++) {
    ASSERT_EQ(std::isnan(got.out[i]), std::isnan(want.out[i])) << "output " << i << " is " << got.out[i];
    if (std::isnan(want.out[i])) continue;
    const double e = std::fabs(got.out[i] - want.out[i]);
    if (!(e <= most)) most = e, at = i;
  }
  EXPECT_LE(most, limit) << "output " << at << " is " << got.out[at] << ", not " << want.out[at];
  double most_lse = 0;
  for (size_t i = 0; i < got.lse.size(); i++) {
    ASSERT_EQ(std::isnan(got.lse[i]), std::isnan(want.lse[i])) << "lse " << i << " is " << got.lse[i];
    if (std::isnan(want.lse[i]) || got.lse[i] == want.lse[i]) continue;
    most_lse = std::max(most_lse, std::fabs(got.lse[i] - want.lse[i]));
    EXPECT_NEAR(got.lse[i], want.lse[i], 2 * limit) << "lse " << i;
  }
  if (worst != nullptr) worst->out = std::max(worst->out, most), worst->lse = std::max(worst->lse, most_lse);
}

Settings settings(const Format& f, std::vector<int64_t> lengths, int64_t heads, int64_t q_len = 1) {
  Settings s;
  s.format = f;
  s.lengths = std::move(lengths);
  s.heads = heads;
  s.q_len = q_len;
  s.q_type = s.cache_type = s.new_type = Element::kFloat16;
  return s;
}

double limit_of(const Settings& s) {
  return s.q_type == Element::kFloat16 ? limits::kTensorFloat16 : limits::kTensorBFloat16;
}

void check_problem(const Settings& s, double size = 1, Errors* worst = nullptr) {
  const Problem problem(s);
  expect_near(Launch(problem).run(), problem.oracle(), limit_of(s) * size, worst);
}

Format plain(int64_t d, int64_t k_bits, int64_t v_bits, int64_t kv_heads = 1, int64_t residual = 5, int64_t sink = 3) {
  return test::make_format(kv_heads, d, d, k_bits, v_bits, 32, residual, sink);
}

std::string name_of(const Format& f) {
  std::string name =
      "D" + std::to_string(f.head_dim) + " K" + std::to_string(f.k_bits) + "V" + std::to_string(f.v_bits);
  if (f.num_key_classes > 0) name += " classes " + std::to_string(f.num_key_classes);
  return name + " G" + std::to_string(f.group_size) + " Gv" + std::to_string(value_group(f));
}

// balanced and quality of ops/options.cpp, without the rules that only quantisation knows.
Format balanced(int64_t d, int64_t kv_heads = 1) {
  Format f = plain(d, 4, 2, kv_heads);
  f.scale_type = ScaleType::kFloat8, f.v_rotated = true;
  f.num_key_classes = 2, f.key_classes[0] = {d / 4, 4}, f.key_classes[1] = {d / 4 * 3, 2};
  return f;
}
Format quality(int64_t d, int64_t kv_heads = 1) {
  Format f = plain(d, 4, 3, kv_heads);
  f.scale_type = ScaleType::kFloat8, f.v_rotated = true, f.v_group_size = d, f.v_symmetric = true;
  f.num_key_classes = 3, f.key_classes[0] = {d / 4, 4}, f.key_classes[1] = {d / 2, 3}, f.key_classes[2] = {d / 4, 2};
  return f;
}

Format near_lossless(int64_t d) {
  Format f = plain(d, 4, 4);
  f.scale_type = ScaleType::kFloat8, f.v_rotated = true, f.v_group_size = d, f.v_symmetric = true;
  return f;
}
Format compact(int64_t d) {
  Format f = balanced(d);
  f.v_group_size = d, f.v_symmetric = true;
  return f;
}

// One of everything that cuda/attention_tensor_configs.h lists.
std::vector<Format> formats() {
  std::vector<Format> all;
  for (const int64_t d : {128, 64}) {
    for (const int64_t k_bits : {2, 4}) {
      for (const int64_t v_bits : {2, 4}) all.push_back(plain(d, k_bits, v_bits));
    }
    all.push_back(compact(d));
    all.push_back(balanced(d));
    all.push_back(quality(d));
    all.push_back(near_lossless(d));
  }
  for (const int64_t bits : {2, 4}) {
    for (const int64_t group : {64, 128}) all.push_back(test::make_format(1, 128, 128, bits, bits, group, 5, 3));
    for (const int64_t d : {80, 96, 112, 192, 256}) all.push_back(plain(d, bits, bits));
  }
#if defined(KIVI_TENSOR_FEW_FORMATS)
  const auto has_none = [](const Format& f) {
    Problem problem(settings(f, {3}, 1));
    return !Launch(problem).supported();
  };
  all.erase(std::remove_if(all.begin(), all.end(), has_none), all.end());
#endif
  return all;
}

// A part is 512 tokens here; the second row of the batch has none in records.
TEST(AttentionTensor, EveryFormat) {
  Errors worst;
  for (const Format& f : formats()) {
    for (const Element type : {Element::kFloat16, Element::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << name_of(f) << (type == Element::kFloat16 ? " float16" : " bfloat16"));
      Settings s = settings(f, {700, 6}, 4);
      s.q_type = s.cache_type = s.new_type = type;
      check_problem(s, 1, &worst);
    }
  }
  RecordProperty("worst_out", std::to_string(worst.out));
}

TEST(AttentionTensor, EveryFormatInEveryOrder) {
  for (const Format& f : formats()) {
    SCOPED_TRACE(name_of(f));
    Settings s = settings(f, {820}, 5, 2);
    s.format.residual_length = 200;  // a warp has more than one tile of exact tokens
    s.new_lengths = {2}, s.new_len = 2;
    const Problem problem(s);
    const Problem::Result want = problem.oracle();
    std::vector<float> first;
    in_every_order([&] {
      Launch launch(problem);
      expect_near(launch.run(), want, limit_of(s));
      const std::vector<float> scratch = launch.scratch();
      if (first.empty()) first = scratch;
      ASSERT_EQ(std::memcmp(scratch.data(), first.data(), first.size() * 4), 0) << "not the same in every order";
    });
  }
}

TEST(AttentionTensor, Lengths) {
  for (const Format& f : formats()) {
    SCOPED_TRACE(name_of(f));
    Format bare = f;  // records only
    bare.num_kv_heads = 2, bare.residual_length = 0, bare.sink_length = 0;
    check_problem(settings(bare, {0, 1, 31, 32, 33, 63, 64, 65, 129, 1000}, 4));
    Format some = f;
    some.num_kv_heads = 2, some.residual_length = 32;
    check_problem(settings(some, {0, 1, 31, 32, 33, 63, 64, 65, 129, 1000, 100, 163, 131}, 4));
  }
}

// More pages than one length of run: 512 tokens, then 1024, then 2048.
TEST(AttentionTensor, LongRows) {
  check_problem(settings(plain(64, 2, 2), {8190, 8330, 70}, 4));
  check_problem(settings(plain(64, 4, 4), {9000}, 8));
  check_problem(settings(balanced(64), {8300}, 8));
  check_problem(settings(plain(64, 2, 2), {66000}, 2));
  check_problem(settings(plain(128, 2, 4), {66000}, 2));
}

TEST(AttentionTensor, HeadsPerKvHead) {
  for (const int64_t group : {1, 4, 5, 7, 8, 12, 16, 20}) {
    for (const Format& f : formats()) {
      SCOPED_TRACE(testing::Message() << name_of(f) << " group " << group);
      Format two = f;
      two.num_kv_heads = 2;
      check_problem(settings(two, {230}, 2 * group));
    }
  }
}

TEST(AttentionTensor, SeveralQueries) {
  for (const int64_t q_len : {2, 3, 5, 8, 16, 19}) {
    for (const bool causal : {true, false}) {
      for (const bool fresh : {true, false}) {
        SCOPED_TRACE(testing::Message() << q_len << " queries, causal " << causal << " new " << fresh);
        // Without new tokens some queries stand among the quantised tokens.
        Settings s = settings(plain(64, 2, 2, 2, 3), {200, 40, 2}, 6, q_len);
        s.causal = causal;
        if (fresh) s.new_len = q_len + 2, s.new_lengths = {q_len / 2, q_len, 1}, s.rows_follow_new = true;
        check_problem(s);
        s.format = quality(128, 2);
        check_problem(s);
      }
    }
  }
}

TEST(AttentionTensor, ExactSegments) {
  for (const int64_t sink : {0, 1, 5, 40}) {
    for (const int64_t residual : {0, 1, 31, 64, 200}) {
      for (const int64_t tokens : {0, 1, 3, 40, 41, 210, 333, 600}) {
        for (const int64_t fresh : {0, 1, 9}) {
          SCOPED_TRACE(testing::Message()
                       << "sink " << sink << " residual " << residual << " tokens " << tokens << " new " << fresh);
          Settings s = settings(plain(64, 2, 4, 1, residual, sink), {tokens}, 3, fresh > 0 ? fresh : 1);
          s.new_len = fresh > 0 ? fresh + 2 : 0;
          if (fresh > 0) s.new_lengths = {fresh};
          s.rows_follow_new = fresh > 0;
          check_problem(s);
        }
      }
    }
  }
}

TEST(AttentionTensor, Windows) {
  for (const int64_t window : {1, 7, 33, 64, 100, 250, 1000}) {
    for (const int64_t q_len : {1, 6}) {
      SCOPED_TRACE(testing::Message() << "window " << window << " queries " << q_len);
      Settings s = settings(plain(64, 2, 4, 1, 20, 4), {777, 300, 25}, 4, q_len);
      s.window = window;
      check_problem(s);
      s.format = quality(64);
      check_problem(s);
    }
  }
}

// A row that sees nothing of a part of which another row sees all or some.
TEST(AttentionTensor, RowsThatSeeNothingOfAPart) {
  const Format f = test::make_format(1, 64, 64, 2, 2, 32, 0, 0);
  for (int64_t window = 584; window <= 590; window++) {  // begins around token 512
    SCOPED_TRACE(testing::Message() << "window " << window);
    Settings s = settings(f, {1100}, 2, 4);
    s.window = window;
    check_problem(s);
  }
  check_problem(settings(f, {1100}, 1, 90));  // the first queries stand before the last part
}

TEST(AttentionTensor, Rules) {
  for (const Format& f : {plain(64, 2, 2), plain(128, 4, 4), balanced(128), quality(64)}) {
    for (int rule = 0; rule < 7; rule++) {
      for (const int64_t q_len : {1, 4}) {
        SCOPED_TRACE(testing::Message() << name_of(f) << " rule " << rule << " queries " << q_len);
        Settings s = settings(f, {333, 90}, 12, q_len);
        s.softcap = rule == 0 || rule == 6 ? 3.0f : 0.0f;
        s.alibi = rule == 1 || rule == 6;
        s.mask = rule == 2 || rule == 3 ? MaskType::kBool : rule >= 4 ? MaskType::kFloat32 : MaskType::kNone;
        s.broadcast_mask = rule == 3 || rule == 5;
        s.sinks = rule == 6;
        s.window = rule == 6 ? 200 : 0;
        check_problem(s);
      }
    }
  }
}

// Weights times scales may overflow float16: then a warp starts again. Tiny values keep their precision.
TEST(AttentionTensor, SizesOfValues) {
  for (const Format& f : formats()) {
    for (const float size : {0.01f, 1.0f, 300.0f, 2000.0f}) {
      SCOPED_TRACE(testing::Message() << name_of(f) << " values " << size);
      Settings s = settings(f, {400}, 4);
      s.edit = [&](int64_t, int64_t, std::vector<float>&, std::vector<float>& v) {
        for (float& x : v) x *= size;
      };
      const Problem problem(s);
      const Problem::Result got = Launch(problem).run(), want = problem.oracle();
      for (size_t i = 0; i < got.out.size(); i++) {
        ASSERT_NEAR(got.out[i], want.out[i], limits::kTensorFloat16 * static_cast<double>(size)) << i;
      }
    }
  }
}

TEST(AttentionTensor, SizesOfQueriesAndKeys) {
  for (const Format& f : formats()) {
    for (const double top_score : {1e-4, 1.0, 60.0}) {
      SCOPED_TRACE(testing::Message() << name_of(f) << " scores to " << top_score);
      Settings s = settings(f, {400}, 4);
      s.top_score = top_score;
      check_problem(s, top_score > 10 ? 10 : 1);  // an error of a score is relative to its size
    }
    for (const float size : {1e-3f, 300.0f}) {
      SCOPED_TRACE(testing::Message() << name_of(f) << " keys " << size);
      Settings s = settings(f, {400}, 4);
      s.edit = [&](int64_t, int64_t, std::vector<float>& k, std::vector<float>&) {
        for (float& x : k) x = std::min(std::max(x * size, -60000.0f), 60000.0f);
      };
      check_problem(s);
    }
  }
}

TEST(AttentionTensor, ScaleOfScores) {
  for (const float scale : {0.0f, -0.3f, 2.0f}) {
    SCOPED_TRACE(scale);
    const Settings s = settings(plain(64, 2, 2), {300}, 4);
    Problem problem(s);
    problem.params.scale = scale;
    expect_near(Launch(problem).run(), problem.oracle(),
                limits::kTensorFloat16 * (1 + 8 * static_cast<double>(std::fabs(scale))));
  }
}

#if !defined(KIVI_ON_DEVICE)
// A tensor core that keeps only 23 bits below the largest product.
TEST(AttentionTensor, TensorCoresThatTruncate) {
  emulator::mma_bits = 23;
  for (const Format& f : formats()) {
    SCOPED_TRACE(name_of(f));
    check_problem(settings(f, {700}, 4));
  }
  emulator::mma_bits = 0;
}
#endif

// NaN reaches the rows that see it, and no others: below a window, past a causal query, masked out.
TEST(AttentionTensor, NaNReachesOnlyWhoSeesIt) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Format& f : {plain(64, 2, 2), plain(64, 4, 4), plain(128, 2, 4), balanced(64), quality(64)}) {
    for (const bool in_keys : {true, false}) {
      for (const int64_t token : {1, 36, 258, 290, 299}) {
        for (int rule = 0; rule < 4; rule++) {
          SCOPED_TRACE(testing::Message()
                       << name_of(f) << (in_keys ? " key " : " value ") << token << " rule " << rule);
          Settings s = settings(f, {300, 80}, 3, 12);  // the first queries stand among the quantised tokens
          s.seed = static_cast<unsigned>(token);
          s.window = rule == 1 ? 40 : rule == 2 ? 230 : 0;
          s.mask = rule == 3 ? MaskType::kBool : MaskType::kNone;
          s.edit = [&](int64_t b, int64_t, std::vector<float>& k, std::vector<float>& v) {
            const int64_t d = f.head_dim;
            if (b == 0) (in_keys ? k : v)[static_cast<size_t>(token * d + d - 1)] = nan;
          };
          check_problem(s);
        }
      }
    }
  }
}

// Infinite new values beyond a query.
TEST(AttentionTensor, NewTokensThatAQueryDoesNotSee) {
  for (const Element type : {Element::kFloat16, Element::kBFloat16}) {
    Settings s = settings(plain(64, 2, 2), {100}, 2, 4);
    s.q_type = s.cache_type = s.new_type = type;
    s.new_len = 4, s.new_lengths = {4};
    s.edit = [](int64_t, int64_t, std::vector<float>&, std::vector<float>& v) {
      for (size_t i = v.size() - 64; i < v.size(); i++) v[i] = std::numeric_limits<float>::infinity();
    };
    const Problem problem(s);
    const Problem::Result got = Launch(problem).run(), want = problem.oracle();
    for (size_t i = 0; i < got.out.size(); i++) {
      if (std::isfinite(want.out[i])) {
        ASSERT_NEAR(got.out[i], want.out[i], limit_of(s)) << i;
      } else {
        ASSERT_EQ(std::isfinite(got.out[i]), false) << i;
      }
    }
  }
}

// One set of params and one scratch memory, lengths that change between launches: as in a captured graph.
TEST(AttentionTensor, LengthsChangeBetweenLaunches) {
  in_every_order([&] {
    Problem problem(settings(plain(64, 2, 2, 2, 40), {1200, 700}, 4));
    Launch launch(problem);
    const std::vector<int64_t> quantized = problem.quantized;
    for (const int64_t fewer : {0, 32, 640, 64, 0}) {
      SCOPED_TRACE(testing::Message() << fewer << " fewer");
      for (size_t b = 0; b < 2; b++) {
        // Without its window a row ends with its last record.
        problem.quantized[b] = quantized[b] - fewer;
        problem.lengths[b] = problem.totals[b] = problem.format.sink_length + problem.quantized[b];
      }
      launch.device().set_lengths(problem);
      expect_near(launch.run(), problem.oracle(), limits::kTensorFloat16);
    }
  });
}

// A row's results do not depend on what else is in the batch, to the bit.
TEST(AttentionTensor, RowsAreIndependent) {
  const Format f = plain(64, 2, 2);
  const Problem both(settings(f, {900, 1500}, 4)), first(settings(f, {900}, 4));
  const Problem::Result all = Launch(both).run();
  Problem alone(settings(f, {900, 1500}, 4));
  alone.quantized[1] = 0, alone.lengths[1] = alone.totals[1] = 2;
  const Problem::Result one = Launch(alone).run();
  const size_t count = one.out.size() / 2;
  for (size_t i = 0; i < count; i++) ASSERT_EQ(one.out[i], all.out[i]) << i;
}

TEST(AttentionTensor, SaysWhatItCannotDo) {
  const Settings s = settings(plain(64, 2, 2), {100}, 2);
  Problem problem(s);
  const AttentionParams good = problem.params;
  EXPECT_TRUE(tensor_parts_support(good));
  const auto without = [&](auto change) {
    AttentionParams p = good;
    change(p);
    return !tensor_parts_support(p);
  };
  EXPECT_TRUE(without([](AttentionParams& p) { p.q_type = Element::kFloat32; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.cache_type = Element::kBFloat16; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.new_len = 1, p.new_type = Element::kFloat32; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.k_bits = 8; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.v_bits = 1; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.group_size = 16; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.value_head_dim = 128; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.scale_type = ScaleType::kWidened; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.format.v_symmetric = true; }));
  EXPECT_TRUE(without([](AttentionParams& p) { p.window_k = static_cast<const uint8_t*>(p.window_k) + 2; }));
  alignas(16) const uint8_t fresh[64] = {};
  const auto with_new = [&](int64_t stride, int64_t offset) {
    AttentionParams p = good;
    p.new_len = 1, p.new_type = Element::kFloat16, p.new_k = fresh + offset, p.new_v = fresh;
    for (int i = 0; i < 3; i++) p.new_k_strides[i] = p.new_v_strides[i] = 64;
    p.new_v_strides[2] = stride;
    return tensor_parts_support(p);
  };
  EXPECT_TRUE(with_new(72, 0));
  EXPECT_FALSE(with_new(67, 0));
  EXPECT_FALSE(with_new(64, 2));
}

// ---- what tensor cores must do -------------------------------------------------------------------

// One product of 2^-24 in A and 2^10 in B, and sums of them.
__global__ void subnormal_kernel(float* out) {
  const uint32_t least = 0x00010001u, large = 0x64006400u;
  const uint32_t a[4] = {least, least, least, least}, b[2] = {large, large};
  float d[4] = {};
  mma_m16n8k16<__half>(d, a, b, d);
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + static_cast<unsigned>(i)] = d[i];
}

// The first thing to run on a new device: kernels rely on it. Where it fails, NormalCodes is to be used.
TEST(TensorCore, TakesSubnormals) {
  const DeviceArray<float> out(128);
  check(launch(subnormal_kernel, "subnormal", dim3(1), dim3(32), 0, nullptr, out.data()));
  for (const float x : out.get()) ASSERT_EQ(x, 16 * std::ldexp(1.0f, -14));
}

// The same results with codes as normal numbers, but for rounding.
template <class F>
void check_normal_codes(const Format& format) {
  for (const int64_t heads : {4, 12}) {
    const Problem problem(settings(format, {700, 90}, heads));
    const DeviceProblem device(problem);
    const int64_t parts = parts_of(problem);
    const DeviceArray<float> scratch(static_cast<size_t>(part_offset(device.params, parts, 2, 0, 0, 0)));
    check(tensor::TensorParts<F>::launch_parts(device.params, false, parts, scratch.data(), nullptr));
    expect_near(join(problem.params, problem.quantized, parts, scratch.get(), {1, 1}), problem.oracle(),
                limits::kTensorFloat16);
  }
}

TEST(AttentionTensor, NormalCodes) {
  using namespace tensor;
  check_normal_codes<NormalCodes<Plain<64, 2, 2>>>(plain(64, 2, 2));
  check_normal_codes<NormalCodes<Plain<64, 4, 4>>>(plain(64, 4, 4));
  check_normal_codes<NormalCodes<Quality<64>>>(quality(64));
}

// ---- shared memory ---------------------------------------------------------------------------------

// Wavefronts of one access of `bytes` bytes a lane: lanes are served 128 bytes at a time, and a bank has one word.
template <class PlaceOfLane>
int wavefronts(int bytes, PlaceOfLane place_of_lane) {
  const int at_once = 128 / bytes;
  int total = 0;
  for (int first = 0; first < 32; first += at_once) {
    std::vector<std::vector<int>> banks(32);
    for (int lane = first; lane < first + at_once; lane++) {
      for (int word = place_of_lane(lane) / 4; word < (place_of_lane(lane) + bytes) / 4; word++) {
        std::vector<int>& bank = banks[static_cast<size_t>(word % 32)];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
      }
    }
    size_t most = 0;
    for (const std::vector<int>& bank : banks) most = std::max(most, bank.size());
    total += static_cast<int>(most);
  }
  return total;
}

// No access of the main loop has a bank conflict. Copies may, where a copy ends one section and begins the next.
template <class F>
void check_banks() {
  for (int slot = 0; slot < F::kPlaneSlots; slot++) {
    if (slot % 2 >= num_planes(F::find_piece(slot / 2).bits)) continue;
    EXPECT_EQ(wavefronts(16, [&](int lane) { return F::k_code_place(slot, lane); }), 4) << "K codes " << slot;
  }
  for (int plane = 0; plane < F::kVPlanes; plane++) {
    EXPECT_EQ(wavefronts(16, [&](int lane) { return F::v_code_place(plane, lane); }), 4) << "V codes";
    EXPECT_EQ(wavefronts(8, [&](int lane) { return F::v_code_place(plane, lane) - lane / 4 * 8; }), 2)
        << "last V codes";
  }
  for (int part = 0; part < 2; part++) {
    for (int g = 0; g < F::kVGroups; g++) {
      EXPECT_EQ(wavefronts(16, [&](int lane) { return F::v_row_part(g, lane, part); }), 4) << "V scales";
    }
    const int constant = F::kVGroups * F::kVRow + 1024;
    EXPECT_LE(wavefronts(16,
                         [&](int lane) {
                           const int g = lane / 4;
                           return g < F::kVGroups ? F::v_row_part(g, lane, part)
                                                  : constant + (g > F::kVGroups ? 16 : 0);
                         }),
              5)
        << "V zeros";
    EXPECT_EQ(wavefronts(16, [&](int lane) { return F::weight_part(lane, part); }), 4) << "weights";
  }
  for (int j = 0; j < 2; j++) {
    EXPECT_EQ(wavefronts(8, [&](int lane) { return F::weight_place(2 * (lane % 4) + j, 4 * (lane / 4)); }), 2);
  }
}

TEST(AttentionTensor, NoBankConflicts) {
  using namespace tensor;
#define KIVI_CHECK_BANKS(...)   \
  {                             \
    SCOPED_TRACE(#__VA_ARGS__); \
    check_banks<__VA_ARGS__>(); \
  }
  KIVI_TENSOR_FORMATS(KIVI_CHECK_BANKS)
#undef KIVI_CHECK_BANKS
}

// Every byte of a chunk's sections is copied once, from where the record has it.
template <class F>
void check_copies() {
  for (int half = 0; half < 2; half++) {
    std::vector<int> targets(static_cast<size_t>(F::kStage / 16)), sources;
    for (int unit = 0; unit < F::kUnits; unit++) {
      const tensor::Move m = F::move(unit, half);
      ASSERT_EQ(m.to % 16, 0);
      ASSERT_EQ(m.from % 16, 0);
      ASSERT_LE(m.to + 16, F::kStage);
      ASSERT_EQ(targets[static_cast<size_t>(m.to / 16)]++, 0) << "target of unit " << unit;
      sources.push_back(m.from);
    }
    std::sort(sources.begin(), sources.end());
    ASSERT_TRUE(std::adjacent_find(sources.begin(), sources.end()) == sources.end());
    const int begin = F::kG == 128 ? 0 : half * F::kRecords * F::kRecordBytes;
    ASSERT_GE(sources.front(), begin);
    ASSERT_LE(sources.back() + 16, begin + F::kRecords * F::kRecordBytes);
  }
}

TEST(AttentionTensor, CopiesOfAChunk) {
  using namespace tensor;
#define KIVI_CHECK_COPIES(...)   \
  {                              \
    SCOPED_TRACE(#__VA_ARGS__);  \
    check_copies<__VA_ARGS__>(); \
  }
  KIVI_TENSOR_FORMATS(KIVI_CHECK_COPIES)
#undef KIVI_CHECK_COPIES
}

}  // namespace
}  // namespace kivi::cuda
