// The tensor-core parts of attention, joined on the host, against the scalar kernels of the CPU on the same records.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cpu/plan.h"
#include "cuda/attention.h"
#include "cuda/device_memory.h"
#include "emulator/tensor_core.h"
#include "format/rotate.h"
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

 private:
  template <class T>
  void move(const T*& pointer, int64_t bytes) {
    if (pointer == nullptr) return;
    arrays_.emplace_back(bytes_of(pointer, bytes));
    pointer = reinterpret_cast<const T*>(arrays_.back().data());
  }

  std::vector<DeviceArray<uint8_t>> arrays_;
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
          if (s >= own) EXPECT_EQ(cell(s)[channels + 1], 0.0f) << "part " << s;
          max = std::max(max, part_max);
        }
        std::vector<double> acc(static_cast<size_t>(dim));
        for (int64_t s = 0; s < own; s++) {
          const float* const part = cell(s);
          if (part[channels + 1] == 0.0f) {
            EXPECT_EQ(part[channels], -INFINITY);
            continue;
          }
          const double factor = std::isnan(part[channels + 1]) ? 1 : std::exp2(static_cast<double>(part[channels]) - max);
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

struct Run {
  Problem::Result result;
  std::vector<float> scratch;
};

int64_t parts_of(const Problem& problem) { return most_parts(problem.params.block_table_stride); }

std::vector<int64_t> rows_of_batch(const Problem& problem) {
  std::vector<int64_t> rows(problem.lengths.size(), problem.params.q_len);
  return problem.params.rows_follow_new ? problem.new_lengths : rows;
}

Run run(const Problem& problem) {
  const DeviceProblem device(problem);
  EXPECT_TRUE(tensor_parts_support(device.params));
  const int64_t parts = parts_of(problem);
  const DeviceArray<float> scratch(static_cast<size_t>(
      part_offset(device.params, parts, device.params.batch, 0, 0, 0)));
  check(launch_tensor_parts(device.params, parts, scratch.data(), nullptr));
  Run r;
  r.scratch = scratch.get();
  r.result = join(problem.params, problem.quantized, parts, r.scratch, rows_of_batch(problem));
  return r;
}

struct Errors {
  double out = 0, lse = 0;
};

// Limits relative to `size`, the largest |value| that is averaged.
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

double limit_of(const Settings& s) { return s.q_type == Element::kFloat16 ? 2e-3 : 1e-2; }

void check_problem(const Settings& s, Errors* worst = nullptr) {
  const Problem problem(s);
  const Problem::Result want = problem.oracle();
  expect_near(run(problem).result, want, limit_of(s), worst);
}

Format plain(int64_t d, int64_t k_bits, int64_t v_bits, int64_t kv_heads = 1, int64_t residual = 5, int64_t sink = 3) {
  return test::make_format(kv_heads, d, d, k_bits, v_bits, 32, residual, sink);
}

std::string name_of(const Format& f) {
  std::string name = "D" + std::to_string(f.head_dim) + " K" + std::to_string(f.k_bits) + "V" + std::to_string(f.v_bits);
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

std::vector<Format> formats() {
  std::vector<Format> all;
  for (const int64_t d : {128, 64}) {
    for (const int64_t k_bits : {2, 4}) {
      for (const int64_t v_bits : {2, 4}) all.push_back(plain(d, k_bits, v_bits));
    }
    all.push_back(balanced(d));
    all.push_back(quality(d));
  }
  return all;
}

TEST(AttentionTensor, EveryFormat) {
  for (const Format& f : formats()) {
    SCOPED_TRACE(name_of(f));
    Errors worst;
    check_problem(settings(f, {300}, 4), &worst);
    printf("%s: out %.1e lse %.1e\n", name_of(f).c_str(), worst.out, worst.lse);
  }
}

}  // namespace
}  // namespace kivi::cuda
