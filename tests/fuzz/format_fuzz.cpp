// Formats of any 64-bit fields: the check must judge them without overflowing, and what it accepts must have sizes that
// equal the same formulas in 128 bits, and sections that lie inside the record, on their alignment, apart from each
// other. No torch here: the presets asan and tsan replay it too.
#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "format/codes.h"
#include "format/keys.h"
#include "format/rotate.h"
#include "kivi/format.h"
#include "tests/fuzz/bytes.h"

namespace kivi::fuzz {
namespace {

__extension__ using Wide = __int128;

constexpr Wide ceil_div_wide(Wide a, Wide b) { return (a + b - 1) / b; }
constexpr Wide round_up_wide(Wide a, Wide b) { return ceil_div_wide(a, b) * b; }
bool fits(Wide x) { return x >= 0 && x <= std::numeric_limits<int64_t>::max(); }

void check_size_arithmetic(Bytes& in) {
  const int64_t a = in.any(), b = in.any();
  const CheckedSize sum = CheckedSize(a) + CheckedSize(b), product = CheckedSize(a) * CheckedSize(b);
  const bool valid = a >= 0 && b >= 0;
  KIVI_REQUIRE(sum.ok == (valid && fits(Wide{a} + b)));
  KIVI_REQUIRE(product.ok == (valid && fits(Wide{a} * b)));
  if (sum.ok) KIVI_REQUIRE(sum.value == Wide{a} + b);
  if (product.ok) KIVI_REQUIRE(product.value == Wide{a} * b);
  // A product that overflowed stays bad whatever follows.
  if (!product.ok) KIVI_REQUIRE(!(product * CheckedSize(0)).ok && !(CheckedSize(1) + product).ok);
  if (a >= 0 && b >= 1) KIVI_REQUIRE(ceil_div(a, b) == ceil_div_wide(a, b));
}

RangeSearch make_search(Bytes& in) {
  RangeSearch search;
  search.count = in.one_in(24) ? in.any() : in.number(0, RangeSearch::kMax);
  for (int16_t& part : search.thousandths) {
    part = static_cast<int16_t>(in.one_in(32) ? in.any() : 1 + 37 * in.number(0, 26));
  }
  return search;
}

// Fields that are mostly right, so that those which are not are each the first fault now and then.
Format make_format(Bytes& in) {
  Format f;
  f.num_kv_heads = in.one_in(12) ? in.any() : in.pick<int64_t>({1, 2, 8, 65536});
  f.head_dim = in.one_in(12) ? in.any() : in.number(0, 255) * 4 + 1;
  f.value_head_dim = in.one_in(12) ? in.any() : in.number(0, 255) * 4 + in.number(1, 4);
  f.k_bits = in.one_in(24) ? in.any() : in.pick<int64_t>({1, 2, 3, 4, 8});
  f.v_bits = in.one_in(24) ? in.any() : in.pick<int64_t>({1, 2, 3, 4, 8});
  f.group_size = in.one_in(24) ? in.any() : in.pick<int64_t>({16, 32, 64, 128});
  f.residual_length = in.one_in(6) ? in.any() : in.byte();
  f.sink_length = in.one_in(6) ? in.any() : in.byte();
  f.scale_type = in.one_in(24) ? static_cast<ScaleType>(in.byte())
                               : in.pick({ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32,
                                          ScaleType::kWidened8, ScaleType::kWidened});
  f.v_group_size = in.one_in(24) ? in.any() : in.number(0, 8) * 16;
  f.v_symmetric = in.flag();
  f.v_rotated = in.flag();
  f.k_search = make_search(in);
  f.v_search = make_search(in);
  if (!in.flag()) return f;
  // Classes: mostly some that add up to head_dim.
  f.num_key_classes = in.one_in(24) ? in.any() : in.number(2, kMaxKeyClasses);
  const int64_t count = f.num_key_classes >= 2 && f.num_key_classes <= kMaxKeyClasses ? f.num_key_classes : 2;
  int64_t left = f.head_dim, widest = 0;
  for (int64_t c = 0; c < kMaxKeyClasses; c++) {
    KeyClass& k = f.key_classes[c];
    k.bits = in.one_in(32) ? in.any() : in.pick<int64_t>({1, 2, 3, 4, 8});
    k.channels = in.one_in(16) ? in.any() : c + 1 == count ? left : 32 * in.number(1, 8);
    if (c < count) widest = std::max(widest, k.bits);
    if (k.channels > 0 && k.channels <= left) left -= k.channels;
  }
  f.k_bits = in.mostly(widest);
  return f;
}

struct Section {
  Wide begin, end;
};

// The record, computed anew in 128 bits; its sections in their order.
std::vector<Section> sections_of(const Format& f) {
  std::vector<Section> sections;
  Wide at = 0;
  const auto add = [&](Wide bytes) {
    sections.push_back({at, at + bytes});
    at += bytes;
  };
  const Wide width = f.scale_type == ScaleType::kFloat8 ? 1 : f.scale_type == ScaleType::kFloat16 ? 2 : 4;
  const Wide alignment = f.scale_type == ScaleType::kFloat8 ? 32 : 64;
  const auto planes = [](int64_t bits) { return bits == 3 ? std::vector<Wide>{2, 1} : std::vector<Wide>{Wide{bits}}; };
  const int64_t classes = std::max<int64_t>(f.num_key_classes, 1);
  for (int64_t c = 0; c < classes; c++) {
    const Wide channels = f.num_key_classes == 0 ? f.head_dim : f.key_classes[c].channels;
    for (const Wide bits : planes(f.num_key_classes == 0 ? f.k_bits : f.key_classes[c].bits)) {
      add(Wide{f.group_size} / 16 * ceil_div_wide(round_up_wide(channels, 16) * bits, 32) * 64);
    }
  }
  for (int i = 0; i < 2; i++) add(round_up_wide(round_up_wide(f.head_dim, 16) * width, alignment));
  for (const Wide bits : planes(f.v_bits)) {
    add(ceil_div_wide(Wide{f.group_size} * bits, 32) * (round_up_wide(f.value_head_dim, 16) / 16) * 64);
  }
  const Wide group = f.v_group_size == 0 ? f.group_size : f.v_group_size;
  const Wide scales = round_up_wide(ceil_div_wide(f.value_head_dim, group) * f.group_size * width, alignment);
  add(scales);
  if (!f.v_symmetric) add(scales);
  return sections;
}

void check_layout(const Format& f) {
  const RecordLayout r = record_layout(f);
  const std::vector<Section> sections = sections_of(f);
  KIVI_REQUIRE(r.bytes == sections.back().end);
  const int64_t alignment = record_alignment(f.scale_type);
  KIVI_REQUIRE(r.bytes % alignment == 0);
  std::vector<int64_t> starts;
  for (int64_t c = 0; c < r.num_key_classes; c++) {
    for (int p = 0; p < num_planes(r.key_classes[c].bits); p++) starts.push_back(r.key_classes[c].codes[p]);
  }
  starts.insert(starts.end(), {r.k_scale, r.k_zero});
  for (int p = 0; p < num_planes(f.v_bits); p++) starts.push_back(r.v_codes[p]);
  starts.push_back(r.v_scale);
  if (!f.v_symmetric) starts.push_back(r.v_zero);
  KIVI_REQUIRE(starts.size() == sections.size());
  for (size_t i = 0; i < starts.size(); i++) {
    KIVI_REQUIRE(starts[i] == sections[i].begin && starts[i] % alignment == 0);
    KIVI_REQUIRE(sections[i].begin < sections[i].end && (i == 0 || sections[i].begin == sections[i - 1].end));
  }
  const CheckedSize page = page_bytes(f);
  const Wide bytes = Wide{f.num_kv_heads} * (kPageTokens / f.group_size) * r.bytes;
  KIVI_REQUIRE(page.ok == fits(bytes) && (!page.ok || page.value == bytes));
}

// A code's word lies inside the section of its plane, its bits inside the word.
void check_codes(const Format& f, Bytes& in) {
  const RecordLayout whole = record_layout(f);
  for (int64_t c = 0; c < whole.num_key_classes; c++) {
    const Format one = key_class_format(f, whole, c);
    const RecordLayout r = key_class_layout(whole, c);
    const int64_t token = in.byte() % f.group_size, channel = static_cast<int64_t>(in.word() % 4096) % one.head_dim;
    for (int p = 0; p < num_planes(one.k_bits); p++) {
      const CodePlace at = code_place(Side::kKey, r, one.k_bits, p, token, channel);
      const int64_t end = r.k_codes[p] + f.group_size / kLineLanes * r.k_words[p] * kLineBytes;
      KIVI_REQUIRE(at.word >= r.k_codes[p] && at.word + 4 <= end && end <= whole.k_scale);
      KIVI_REQUIRE(at.bit >= 0 && at.bit + plane_bits(one.k_bits, p) <= 32);
    }
    KIVI_REQUIRE(r.k_scale + r.k_channels * r.scale_bytes <= whole.k_zero);
    KIVI_REQUIRE(r.k_zero + r.k_channels * r.scale_bytes <= whole.v_codes[0]);
  }
  const int64_t token = in.byte() % f.group_size, channel = static_cast<int64_t>(in.word() % 4096) % f.value_head_dim;
  for (int p = 0; p < num_planes(f.v_bits); p++) {
    const CodePlace at = code_place(Side::kValue, whole, f.v_bits, p, token, channel);
    KIVI_REQUIRE(at.word >= whole.v_codes[p] && at.word + 4 <= whole.v_scale);
    KIVI_REQUIRE(at.bit >= 0 && at.bit + plane_bits(f.v_bits, p) <= 32);
  }
  KIVI_REQUIRE(channel / whole.v_group < whole.v_groups);
}

// How many tokens are where, for a row of any length that the operators admit.
void check_counts(const Format& f, Bytes& in) {
  const int64_t capacity = window_capacity(f);
  KIVI_REQUIRE(capacity == round_up_wide(f.residual_length, f.group_size) + f.group_size);
  KIVI_REQUIRE(capacity % f.group_size == 0 && capacity >= f.residual_length + f.group_size);
  const int64_t tokens = std::max<int64_t>(in.any(), 0);
  const int64_t quantised = quantized_count(f, tokens);
  const Wide over = Wide{tokens} - f.sink_length - f.residual_length;
  KIVI_REQUIRE(quantised == (over > 0 ? over / f.group_size * f.group_size : 0));
  KIVI_REQUIRE(tokens - std::min(tokens, f.sink_length) - quantised < f.residual_length + f.group_size);
  const int64_t n = rotation_size(f.value_head_dim);
  KIVI_REQUIRE(n >= 1 && f.value_head_dim % n == 0 && (n & (n - 1)) == 0);
  KIVI_REQUIRE(rotation_factor(n, false) * rotation_factor(n, true) * static_cast<float>(n) == 1.0f);
  KIVI_REQUIRE(value_group(f) % f.group_size == 0 && value_group(f) > 0);
  KIVI_REQUIRE(narrow(widened(f.scale_type)) == narrow(f.scale_type));
}

// What a query sees, and the division of the work, for rows of up to 2^40 tokens and windows of any size.
void check_plan(const Format& f, Bytes& in) {
  constexpr int64_t kMaxTokens = int64_t{1} << 40;
  const int64_t batch = in.number(1, 3);
  std::vector<int64_t> lengths, quantised, fresh;
  AttentionParams p{};
  p.format = f;
  p.format.num_kv_heads = std::min<int64_t>(f.num_kv_heads, 8);
  p.layout = record_layout(f);
  p.batch = batch;
  p.num_heads = p.format.num_kv_heads * in.number(1, 4);
  p.q_len = in.number(1, 20);
  p.new_len = in.flag() ? p.q_len : 0;
  for (int64_t b = 0; b < batch; b++) {
    lengths.push_back(static_cast<int64_t>(static_cast<uint64_t>(in.any()) % kMaxTokens));
    quantised.push_back(quantized_count(f, lengths.back()));
    fresh.push_back(in.byte() % (p.new_len + 1));
  }
  p.lengths = lengths.data();
  p.quantized_lengths = quantised.data();
  if (p.new_len > 0 && in.flag()) p.new_lengths = fresh.data(), p.rows_follow_new = true;
  p.causal = in.flag();
  p.window = std::min(std::max<int64_t>(in.any(), 0), kMaxWindow);
  for (int64_t b = 0; b < batch; b++) {
    const KeyRanges r = key_ranges(p, b);
    KIVI_REQUIRE(0 <= r.sink && r.sink <= r.window_begin && r.window_begin <= r.cached);
    for (int64_t query = 0; query < r.rows; query++) {
      const SeenKeys seen = seen_keys(p, r, query_position(r, query));
      KIVI_REQUIRE(0 <= seen.begin && seen.begin <= seen.end && seen.end <= r.cached + r.fresh);
      if (p.window > 0 && p.causal) KIVI_REQUIRE(seen.end - seen.begin <= p.window);
    }
  }
  int64_t floats = 0, again = 0;
  const int64_t count = cpu::attention_plan(p, nullptr, &floats);
  KIVI_REQUIRE(count >= 0 && count < (int64_t{1} << 20) && floats >= 0);
  std::vector<cpu::AttentionItem> items(static_cast<size_t>(count));
  KIVI_REQUIRE(cpu::attention_plan(p, items.data(), &again) == count && again == floats);
  for (const cpu::AttentionItem& item : items) {
    KIVI_REQUIRE(item.batch >= 0 && item.batch < batch && item.num_pages >= 0 && item.first_page >= 0);
    KIVI_REQUIRE(item.first_page + item.num_pages <= ceil_div(quantised[static_cast<size_t>(item.batch)], kPageTokens));
    KIVI_REQUIRE(item.partial == -1 || (item.partial >= 0 && item.partial < floats));
  }
}

void run(Bytes in) {
  check_size_arithmetic(in);
  const Format f = make_format(in);
  int64_t value = 0;
  const char* const error = format_error(f, &value);
  if (error != nullptr) {
    KIVI_REQUIRE(error[0] != '\0');
    return;
  }
  KIVI_REQUIRE(f == f && !(f != f));
  check_layout(f);
  Format wide = f;
  wide.scale_type = widened(f.scale_type);
  KIVI_REQUIRE(format_error(wide, &value) == nullptr);
  check_layout(wide);
  check_codes(f, in);
  check_counts(f, in);
  check_plan(f, in);
}

}  // namespace
}  // namespace kivi::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kivi::fuzz::run({data, size});
  return 0;
}
