// Attention over everything that AttentionParams can say, in fp32 and without tensor cores: fp32 queries, widths and
// head sizes that the tensor-core kernel does not take, any number of queries. The definition is
// csrc/cpu/reference.cpp.
//
// A block has up to 8 query rows of one kv head and the keys of one part, a page of 128 tokens at a time. For scores a
// thread is a token: it takes the codes of 16 channels from its words, makes each into a number once, and multiplies
// that with all query rows. For values a thread is a channel, in the same way over 16 tokens. Words lie in lines of 64
// bytes, 16 threads side by side, so loads are coalesced. Scales, zeros, queries and weights stand in shared memory,
// where the threads of a half-warp read the same address.
//
// No result depends on the other rows of a block: what only some of them see is left out for the others, not
// multiplied by 0.
#include <cfloat>
#include <cstdint>

#include "cuda/attention.h"
#include "cuda/attention_join.h"
#include "cuda/device.h"
#include "format/keys.h"
#include "format/scales.h"

namespace kivi::cuda {
namespace {

constexpr int kThreads = 128;  // one for each token of a page, or for each channel of eight lines
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kUnit = 16;          // channels of a key, or tokens of a channel, that are worked on together
constexpr int kChunk = 256;        // channels of K whose scales are in shared memory at once
constexpr int kPassLines = 8;      // lines of V channels that are worked on at once
constexpr int kValueStride = 129;  // of the scales of 128 tokens: the groups of two half-warps in different banks
constexpr int kExactStride = 17;   // of 16 channels of exact tokens, one token a thread: different banks
constexpr float kNotSeen = -1.0f;  // a weight that counts for nothing
constexpr size_t kSharedLimit = 48 * 1024;  // what every device gives a block
static_assert(kThreads == kPageTokens && kThreads == kPassLines * kLineLanes && kUnit == kLineLanes);

// By value: a reference to a constant of the host does not exist on the device.
KIVI_DEVICE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KIVI_DEVICE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KIVI_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
KIVI_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// One scale and zero.
struct alignas(8) Numbers {
  float scale, zero;
};

// Sizes that the shared memory follows from.
struct Shape {
  int places;       // channels of K as a record holds them
  int chunk;        // of these at once
  int page_groups;  // groups of tokens in a page
  int channels;     // of V as a record holds them
  int lines;        // of 16 channels of V
  int pass_lines;   // of these at once, a power of two
  int splits;       // where that is less than 8: the units of tokens are divided
  int pass_groups;  // groups of V in a pass, at most

  KIVI_HOST_DEVICE explicit Shape(const AttentionParams& p) {
    places = static_cast<int>(p.layout.k_channels);
    chunk = places < kChunk ? places : kChunk;
    page_groups = static_cast<int>(kPageTokens / p.format.group_size);
    channels = static_cast<int>(p.layout.v_channels);
    lines = channels / kUnit;
    pass_lines = 1;
    while (pass_lines < lines && pass_lines < kPassLines) pass_lines *= 2;
    splits = kPassLines / pass_lines;
    pass_groups = static_cast<int>(p.layout.v_groups) < pass_lines ? static_cast<int>(p.layout.v_groups) : pass_lines;
  }
  // Of scales and zeros, or of 16 channels of exact tokens and the addresses of their keys and values.
  KIVI_HOST_DEVICE int key_numbers() const { return page_groups * chunk; }
  KIVI_HOST_DEVICE int value_numbers() const { return pass_groups * kValueStride; }
  KIVI_HOST_DEVICE int exact_numbers() const {
    return kThreads * (kExactStride * 4 + 2 * static_cast<int>(sizeof(void*))) / static_cast<int>(sizeof(Numbers));
  }
  KIVI_HOST_DEVICE int staged_numbers() const {
    const int both = key_numbers() + value_numbers();
    return both > exact_numbers() ? both : exact_numbers();
  }
};

// A query row of the block.
struct Row {
  int64_t begin, end;  // the keys that it may see
  int64_t position;
  int64_t mask;  // where its mask starts, in elements
  float slope;   // ALiBi
  bool exists;
};

template <int R>
size_t shared_bytes(const Shape& s) {
  const size_t rows = R;
  const auto piece = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
  return piece(static_cast<size_t>(s.places) * rows * sizeof(float)) +
         piece(static_cast<size_t>(s.splits * s.channels) * rows * sizeof(float)) +
         piece(kThreads * rows * sizeof(float)) + piece(kWarps * rows * sizeof(float)) +
         piece(rows * sizeof(SoftmaxState)) + piece(rows * sizeof(Row)) +
         piece(static_cast<size_t>(s.staged_numbers()) * sizeof(Numbers));
}

// What all query rows have at one place of shared memory.
template <int R>
KIVI_DEVICE void load_rows(const float* from, float (&to)[R]) {
  if constexpr (R % 4 == 0) {
    for (int r = 0; r < R; r += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + r);
      to[r] = four.x, to[r + 1] = four.y, to[r + 2] = four.z, to[r + 3] = four.w;
    }
  } else {
    for (int r = 0; r < R; r++) to[r] = from[r];
  }
}

// As load_element, with the conversions that the hardware has.
KIVI_DEVICE float load_number(const void* array, Element type, int64_t i) {
  if (type == Element::kFloat16) return __half2float(static_cast<const __half*>(array)[i]);
  return load_element(array, type, i);
}

// The codes of 16 channels of one token, or of 16 tokens of one channel.
template <int Bits>
struct Codes {
  static constexpr int kWords = Bits == 3 ? 2 : Bits < 2 ? 1 : Bits / 2;
  uint32_t words[kWords];

  // The words of a plane are `step` bytes apart.
  KIVI_DEVICE void load(const uint8_t* low, const uint8_t* high, int64_t step, int unit) {
    if constexpr (Bits == 1) {
      words[0] = one_bit(low, step, unit);
    } else if constexpr (Bits == 3) {
      words[0] = word(low + unit * step);
      words[1] = one_bit(high, step, unit);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i++) words[i] = word(low + (unit * kWords + i) * step);
    }
  }
  // Number `e` is known when this is compiled. 2^23 + code is a float whose last bits are the code.
  KIVI_DEVICE float operator[](int e) const {
    uint32_t code;
    if constexpr (Bits == 3) {
      code = (words[0] >> code_bit(2, e) & 3u) | (words[1] >> code_bit(1, e) & 1u) << 2;
    } else {
      constexpr int kPerWord = Bits == 1 ? kUnit : 32 / Bits;
      code = words[e / kPerWord] >> code_bit(Bits, e % kPerWord) & ((1u << Bits) - 1u);
    }
    return bits_float(0x4B000000u | code) - 8388608.0f;
  }

 private:
  static KIVI_DEVICE uint32_t word(const uint8_t* at) { return __ldg(reinterpret_cast<const uint32_t*>(at)); }
  // The half of a word of 32: elements 16 to 31 stand 8 bits above the others.
  static KIVI_DEVICE uint32_t one_bit(const uint8_t* plane, int64_t step, int unit) {
    return word(plane + unit / 2 * step) >> (unit % 2 * 8);
  }
};

// The query rows [first_row, first_row + R) of a kv head at work.
template <int R>
class Rows {
 public:
  KIVI_DEVICE Rows(const AttentionParams& p, const KeyRanges& ranges, int64_t batch, int64_t kv_head, int64_t first_row)
      : p_(p), ranges_(ranges), batch_(batch), kv_head_(kv_head), shape_(p), thread_(static_cast<int>(threadIdx.x)) {
    SharedCarver shared;
    query_ = shared.take<float>(static_cast<size_t>(shape_.places * R));
    acc_ = shared.take<float>(static_cast<size_t>(shape_.splits * shape_.channels * R));
    weights_ = shared.take<float>(kThreads * R);
    warp_values_ = shared.take<float>(kWarps * R);
    totals_ = shared.take<SoftmaxState>(R);
    rows_ = shared.take<Row>(R);
    staged_ = shared.take<Numbers>(static_cast<size_t>(shape_.staged_numbers()));
    staged_values_ = staged_ + shape_.key_numbers();
    load_queries(first_row);
    for (int i = thread_; i < shape_.splits * shape_.channels * R; i += kThreads) acc_[i] = 0.0f;
    if (thread_ < R) {
      totals_[thread_] = SoftmaxState::empty();
      rows_[thread_] = make_row(first_row + thread_);
    }
    __syncthreads();
    seen_ = {ranges.cached + ranges.fresh, 0};
    for (int r = 0; r < R; r++) {
      if (rows_[r].begin >= rows_[r].end) continue;
      seen_.begin = smaller(seen_.begin, rows_[r].begin);
      seen_.end = larger(seen_.end, rows_[r].end);
    }
  }

  // Takes a run of quantised pages, or the exact tokens, into the totals. `cells`: the results of the first row.
  KIVI_DEVICE void add_pages(int64_t first, int64_t last, float* cells) {
    begin_run();
    const int64_t begin = larger(seen_.begin - p_.format.sink_length, int64_t{0});
    const int64_t end = larger(seen_.end - p_.format.sink_length, int64_t{0});
    first = larger(first, begin / kPageTokens);
    last = smaller(last, ceil_div(end, kPageTokens));
    for (int64_t page = first; page < last; page++) add_page(page);
    end_run(cells);
  }
  KIVI_DEVICE void add_exact(float* cells) {
    begin_run();
    const int64_t tokens = ranges_.sink + (ranges_.cached - ranges_.window_begin) + ranges_.fresh;
    for (int64_t first = 0; first < tokens; first += kThreads) {
      const int64_t last = smaller(first + kThreads, tokens) - 1;
      if (exact_position(first) < seen_.end && exact_position(last) >= seen_.begin) add_exact_tokens(first, last);
    }
    end_run(cells);
  }

  KIVI_DEVICE void write_totals(int64_t count, float* cells) const {
    if (thread_ >= count) return;
    float* const cell = cells + thread_ * part_row_floats(p_) + shape_.channels;
    cell[0] = totals_[thread_].max;
    cell[1] = totals_[thread_].sum;
  }

 private:
  // ---- the beginning ---------------------------------------------------------------------------

  KIVI_DEVICE int64_t head_of(int64_t row) const { return kv_head_ * group_heads(p_) + row / p_.q_len; }

  KIVI_DEVICE Row make_row(int64_t row) const {
    Row made{0, 0, 0, 0, 0.0f, false};
    const int64_t query = row % p_.q_len;
    if (row >= query_rows(p_) || query >= ranges_.rows) return made;
    const int64_t head = head_of(row);
    made.exists = true;
    made.position = query_position(ranges_, query);
    const SeenKeys seen = seen_keys(p_, ranges_, made.position);
    made.begin = seen.begin, made.end = seen.end;
    if (p_.mask_type != MaskType::kNone) {
      made.mask = batch_ * p_.mask_strides[0] + head * p_.mask_strides[1] + query * p_.mask_strides[2];
    }
    if (p_.alibi_slopes != nullptr) made.slope = p_.alibi_slopes[batch_ * p_.alibi_batch_stride + head];
    return made;
  }

  // By the places that a record has the channels in, 0 where it has none.
  KIVI_DEVICE void load_queries(int64_t first_row) {
    const int16_t* const order = head_order(p_, batch_, kv_head_);
    for (int r = 0; r < R; r++) {
      const int64_t row = first_row + r;
      const bool there = row < query_rows(p_);
      const int64_t at =
          batch_ * p_.q_batch_stride + head_of(row) * p_.q_head_stride + row % p_.q_len * p_.q_row_stride;
      for (int place = thread_; place < shape_.places; place += kThreads) {
        float x = 0.0f;
        if (there && place < p_.format.head_dim) {
          x = load_number(p_.q, p_.q_type, at + (order != nullptr ? order[place] : place));
        }
        query_[place * R + r] = x;
      }
    }
  }

  // ---- pages -----------------------------------------------------------------------------------

  KIVI_DEVICE const uint8_t* record_of(const uint8_t* records, int token) const {
    return records + token / p_.format.group_size * p_.layout.bytes;
  }

  KIVI_DEVICE void add_page(int64_t page) {
    device_check(p_.block_table[batch_ * p_.block_table_stride + page] >= 0,
                 "attention: a page of the block table is not set");
    const uint8_t* const records = record_address(p_, batch_, kv_head_, page, 0);
    const int64_t begin = page * kPageTokens;
    const auto count = static_cast<int>(smaller(kPageTokens, ranges_.quantized - begin));
    __syncthreads();  // what the last page has in shared memory is used up
    stage_keys(records, count, 0);
    stage_values(records, count, 0);
    __syncthreads();
    float score[R] = {};
    for (int first = 0; first < shape_.places; first += kChunk) {
      if (first > 0) {
        __syncthreads();
        stage_keys(records, count, first);
        __syncthreads();
      }
      if (thread_ < count) add_scores(record_of(records, thread_), first, score);
    }
    const bool all_seen = weigh(p_.format.sink_length + begin + thread_, thread_ < count, score);
    for (int line = 0; line < shape_.lines; line += shape_.pass_lines) {
      if (line > 0) {
        __syncthreads();
        stage_values(records, count, line);
        __syncthreads();
      }
      if (all_seen) {
        add_values<true>(records, count, line);
      } else {
        add_values<false>(records, count, line);
      }
    }
  }

  // Scales and zeros of the places from `first` on, [group][place].
  KIVI_DEVICE void stage_keys(const uint8_t* records, int count, int first) {
    const int places = smaller(shape_.places - first, kChunk);
    const int groups = count / static_cast<int>(p_.format.group_size);
    for (int group = 0; group < groups; group++) {
      const uint8_t* const record = records + group * p_.layout.bytes;
      for (int i = thread_; i < places; i += kThreads) {
        Numbers n{0.0f, 0.0f};
        if (first + i < p_.format.head_dim) {
          const Quantizer q = load_group(p_.layout, bits_of_place(first + i), record + p_.layout.k_scale,
                                         record + p_.layout.k_zero, first + i);
          n = {q.scale, q.zero};
        }
        staged_[group * shape_.chunk + i] = n;
      }
    }
  }
  KIVI_DEVICE int64_t bits_of_place(int place) const {
    int64_t c = p_.layout.num_key_classes - 1;
    while (c > 0 && place < p_.layout.key_classes[c].first) c--;
    return p_.layout.key_classes[c].bits;
  }

  // Those of the groups of V that have the lines from `line` on, [group][token].
  KIVI_DEVICE void stage_values(const uint8_t* records, int count, int line) {
    if (thread_ >= count) return;
    const uint8_t* const record = record_of(records, thread_);
    const uint8_t* const zeros = p_.format.v_symmetric ? nullptr : record + p_.layout.v_zero;
    const int end = group_of_line(smaller(line + shape_.pass_lines, shape_.lines) - 1) + 1;
    for (int group = group_of_line(line), i = 0; group < end; group++, i++) {
      const int64_t at = group * p_.format.group_size + thread_ % p_.format.group_size;
      const Quantizer q = load_group(p_.layout, p_.format.v_bits, record + p_.layout.v_scale, zeros, at);
      staged_values_[i * kValueStride + thread_] = {q.scale, q.zero};
    }
  }
  KIVI_DEVICE int group_of_line(int line) const { return line * kUnit / static_cast<int>(p_.layout.v_group); }

  // Adds the channels of a chunk to the products of this thread's token with all queries.
  KIVI_DEVICE void add_scores(const uint8_t* record, int first, float (&score)[R]) const {
    const auto group_size = static_cast<int>(p_.format.group_size);
    const int token = thread_ % group_size;
    const int last = smaller(first + kChunk, shape_.places);
    for (int64_t c = 0; c < p_.layout.num_key_classes; c++) {
      const KeyClassLayout& k = p_.layout.key_classes[c];
      const auto class_first = static_cast<int>(k.first);
      const int begin = larger(class_first, first);
      const int end = smaller(class_first + static_cast<int>(round_up(k.channels, kUnit)), last);
      if (begin >= end) continue;
      const int64_t line = token / kLineLanes, lane = token % kLineLanes * 4;
      const uint8_t* const low = record + k.codes[0] + line * k.words[0] * kLineBytes + lane;
      const uint8_t* const high = record + k.codes[1] + line * k.words[1] * kLineBytes + lane;
      const int unit = (begin - class_first) / kUnit, units = (end - begin) / kUnit;
      const Numbers* const numbers = staged_ + thread_ / group_size * shape_.chunk + (begin - first);
      const float* const query = query_ + begin * R;
      switch (k.bits) {
        case 1:
          add_units<1>(low, high, unit, units, numbers, query, score);
          break;
        case 2:
          add_units<2>(low, high, unit, units, numbers, query, score);
          break;
        case 3:
          add_units<3>(low, high, unit, units, numbers, query, score);
          break;
        case 4:
          add_units<4>(low, high, unit, units, numbers, query, score);
          break;
        default:
          add_units<8>(low, high, unit, units, numbers, query, score);
          break;
      }
    }
  }

  template <int Bits>
  static KIVI_DEVICE void add_units(const uint8_t* low, const uint8_t* high, int unit, int units,
                                    const Numbers* numbers, const float* query, float (&score)[R]) {
    Codes<Bits> next;
    next.load(low, high, kLineBytes, unit);
    for (int i = 0; i < units; i++, numbers += kUnit, query += kUnit * R) {
      const Codes<Bits> codes = next;
      if (i + 1 < units) next.load(low, high, kLineBytes, unit + i + 1);
      // Sums of 16 stand for themselves: fewer roundings at the size of the whole sum.
      float sum[R] = {};
#pragma unroll
      for (int e = 0; e < kUnit; e++) {
        const Numbers n = numbers[e];
        const float x = fmaf(codes[e], n.scale, n.zero);
        float q[R];
        load_rows(query + e * R, q);
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = fmaf(q[r], x, sum[r]);
      }
#pragma unroll
      for (int r = 0; r < R; r++) score[r] += sum[r];
    }
  }

  template <bool AllSeen>
  KIVI_DEVICE void add_values(const uint8_t* records, int count, int first_line) {
    switch (p_.format.v_bits) {
      case 1:
        add_line<1, AllSeen>(records, count, first_line);
        break;
      case 2:
        add_line<2, AllSeen>(records, count, first_line);
        break;
      case 3:
        add_line<3, AllSeen>(records, count, first_line);
        break;
      case 4:
        add_line<4, AllSeen>(records, count, first_line);
        break;
      default:
        add_line<8, AllSeen>(records, count, first_line);
        break;
    }
  }

  template <int Bits, bool AllSeen>
  KIVI_DEVICE void add_line(const uint8_t* records, int count, int first_line) {
    const int line = first_line + line_in_pass();
    if (line >= shape_.lines) return;
    const int64_t step = shape_.lines * kLineBytes, place = line * kLineBytes + thread_ % kUnit * 4;
    const Numbers* const numbers = staged_values_ + (group_of_line(line) - group_of_line(first_line)) * kValueStride;
    const auto load = [&](Codes<Bits>& codes, int unit) {
      const uint8_t* const record = record_of(records, unit * kUnit) + place;
      codes.load(record + p_.layout.v_codes[0], record + p_.layout.v_codes[1], step,
                 unit * kUnit % static_cast<int>(p_.format.group_size) / kUnit);
    };
    float sum[R] = {};
    const int units = count / kUnit;
    Codes<Bits> next;
    if (split() < units) load(next, split());
    for (int unit = split(); unit < units; unit += shape_.splits) {
      const Codes<Bits> codes = next;
      if (unit + shape_.splits < units) load(next, unit + shape_.splits);
#pragma unroll
      for (int e = 0; e < kUnit; e++) {
        const Numbers n = numbers[unit * kUnit + e];
        add_value<AllSeen>(fmaf(codes[e], n.scale, n.zero), weights_ + (unit * kUnit + e) * R, sum);
      }
    }
    add_to_acc(line, sum);
  }

  // ---- exact tokens ----------------------------------------------------------------------------

  // Number i of the sink, window and new tokens.
  KIVI_DEVICE int64_t exact_position(int64_t i) const { return i < ranges_.sink ? i : i + ranges_.quantized; }

  struct ExactToken {
    const void *k, *v;
  };
  KIVI_DEVICE ExactToken exact_token(int64_t i) const {
    const int64_t position = exact_position(i), row = batch_ * p_.format.num_kv_heads + kv_head_;
    if (position >= ranges_.cached) {
      const int64_t t = position - ranges_.cached;
      const auto at = [&](const int64_t* strides) {
        return batch_ * strides[0] + kv_head_ * strides[1] + t * strides[2];
      };
      return {advance(p_.new_k, p_.new_type, at(p_.new_k_strides)),
              advance(p_.new_v, p_.new_type, at(p_.new_v_strides))};
    }
    const bool sink = i < ranges_.sink;
    const int64_t capacity = window_capacity(p_.format);
    const int64_t slot =
        sink ? row * p_.format.sink_length + i : row * capacity + (position - p_.format.sink_length) % capacity;
    return {advance(sink ? p_.sink_k : p_.window_k, p_.cache_type, slot * p_.format.head_dim),
            advance(sink ? p_.sink_v : p_.window_v, p_.cache_type, slot * p_.format.value_head_dim)};
  }
  KIVI_DEVICE Element exact_type(int64_t i) const {
    return exact_position(i) >= ranges_.cached ? p_.new_type : p_.cache_type;
  }

  KIVI_DEVICE void add_exact_tokens(int64_t first, int64_t last) {
    const auto count = static_cast<int>(last - first + 1);
    const int16_t* const order = head_order(p_, batch_, kv_head_);
    auto* const channels = reinterpret_cast<float*>(staged_);
    auto* const tokens = reinterpret_cast<ExactToken*>(channels + kThreads * kExactStride);
    __syncthreads();
    if (thread_ < count) tokens[thread_] = exact_token(first + thread_);
    float score[R] = {};
    for (int place = 0; place < shape_.places; place += kUnit) {
      __syncthreads();
      for (int i = thread_; i < count * kUnit; i += kThreads) {
        const int token = i / kUnit, e = i % kUnit;
        float x = 0.0f;
        if (place + e < p_.format.head_dim) {
          const int channel = order != nullptr ? order[place + e] : place + e;
          x = load_number(tokens[token].k, exact_type(first + token), channel);
        }
        channels[token * kExactStride + e] = x;
      }
      __syncthreads();
      if (thread_ >= count) continue;
      float sum[R] = {};
#pragma unroll
      for (int e = 0; e < kUnit; e++) {
        const float x = channels[thread_ * kExactStride + e];
        float q[R];
        load_rows(query_ + (place + e) * R, q);
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = fmaf(q[r], x, sum[r]);
      }
#pragma unroll
      for (int r = 0; r < R; r++) score[r] += sum[r];
    }
    weigh(exact_position(first + thread_), thread_ < count, score);
    for (int line = line_in_pass(); line < shape_.lines; line += shape_.pass_lines) {
      const int channel = line * kUnit + thread_ % kUnit;
      float sum[R] = {};
      for (int unit = split(); unit * kUnit < count; unit += shape_.splits) {
        const int end = smaller((unit + 1) * kUnit, count);
#pragma unroll 4
        for (int token = unit * kUnit; token < end; token++) {
          float x = 0.0f;
          if (channel < p_.format.value_head_dim) x = load_number(tokens[token].v, exact_type(first + token), channel);
          add_value<false>(x, weights_ + token * R, sum);
        }
      }
      add_to_acc(line, sum);
    }
  }

  // ---- softmax ---------------------------------------------------------------------------------

  KIVI_DEVICE int line_in_pass() const { return thread_ / kUnit % shape_.pass_lines; }
  KIVI_DEVICE int split() const { return thread_ / kUnit / shape_.pass_lines; }

  // What the mask says about a key: what to add to its score, -inf if it is masked out.
  KIVI_DEVICE float mask_of(const Row& row, int64_t position) const {
    const int64_t at = row.mask + position * p_.mask_strides[3];
    if (p_.mask_type == MaskType::kNone) return 0.0f;
    if (p_.mask_type == MaskType::kFloat32) return static_cast<const float*>(p_.mask)[at];
    return static_cast<const uint8_t*>(p_.mask)[at] != 0 ? 0.0f : -bits_float(kFloatInf);
  }
  // In log2 units, the mask included.
  KIVI_DEVICE float score_of(const Row& row, float product, int64_t position, float mask) const {
    float s = product * p_.scale;
    if (p_.softcap > 0.0f) s = p_.softcap * tanhf(s / p_.softcap);
    if (p_.alibi_slopes != nullptr) s += row.slope * static_cast<float>(position - row.position);
    return (s + mask) * kLog2E;
  }

  // All threads: from the products of this thread's token, if it has one, to the weights of all tokens in shared
  // memory, with the running maximum and sums moved on. True if every row sees every token.
  KIVI_DEVICE bool weigh(int64_t position, bool has_token, float (&score)[R]) {
    const float none = -bits_float(kFloatInf);
    unsigned kept = 0;
    bool some_unseen = false;
    for (int r = 0; r < R; r++) {
      const Row& row = rows_[r];
      bool keep = has_token && position >= row.begin && position < row.end;
      const float mask = keep ? mask_of(row, position) : none;
      keep = keep && mask != none;
      score[r] = keep ? score_of(row, score[r], position, mask) : none;
      if (keep) kept |= 1u << r;
      some_unseen = some_unseen || (has_token && row.exists && !keep);
      // A NaN is passed over here and comes back in the weights. The lowest number instead of -inf: the row has seen a
      // key, and only a key that counts for nothing.
      float top = keep ? fmaxf(score[r], -FLT_MAX) : none;
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, distance));
      }
      if (thread_ % kWarpThreads == 0) warp_values_[thread_ / kWarpThreads * R + r] = top;
    }
    some_unseen = __syncthreads_or(some_unseen) != 0;
    for (int r = 0; r < R; r++) {
      float top = max_[r];
      for (int warp = 0; warp < kWarps; warp++) top = fmaxf(top, warp_values_[warp * R + r]);
      factor_[r] = top > max_[r] ? exp2f(max_[r] - top) : 1.0f;
      max_[r] = top;
      float weight = kNotSeen;
      if ((kept >> r & 1u) != 0) weight = exp2f(score[r] - top);
      sum_[r] *= factor_[r];
      if ((kept >> r & 1u) != 0) sum_[r] += weight;
      weights_[thread_ * R + r] = weight;
    }
    __syncthreads();
    return !some_unseen;
  }

  // Adds one value with the weights of its token. A row that does not see the token takes no part in it: the value may
  // be NaN.
  template <bool AllSeen>
  static KIVI_DEVICE void add_value(float value, const float* weights, float (&sum)[R]) {
    float w[R];
    load_rows(weights, w);
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (AllSeen || !(w[r] < 0.0f)) sum[r] = fmaf(w[r], value, sum[r]);
    }
  }

  // The sums of a page stand for themselves before they join those of the run.
  KIVI_DEVICE void add_to_acc(int line, const float (&sum)[R]) {
    float* const cell = acc_ + split() * R * shape_.channels + line * kUnit + thread_ % kUnit;
#pragma unroll
    for (int r = 0; r < R; r++) cell[r * shape_.channels] = fmaf(cell[r * shape_.channels], factor_[r], sum[r]);
  }

  // ---- runs ------------------------------------------------------------------------------------

  KIVI_DEVICE void begin_run() {
    for (int r = 0; r < R; r++) max_[r] = -bits_float(kFloatInf), sum_[r] = 0.0f;
  }

  // All threads: the sums of the run join the totals, in `cells` the weighted ones.
  KIVI_DEVICE void end_run(float* cells) {
    __syncthreads();  // the maxima of the warps are used up
    for (int r = 0; r < R; r++) {
      float sum = sum_[r];
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      if (thread_ % kWarpThreads == 0) warp_values_[thread_ / kWarpThreads * R + r] = sum;
    }
    __syncthreads();
    for (int r = 0; r < R; r++) {
      SoftmaxState run{max_[r], warp_values_[r]};
      for (int warp = 1; warp < kWarps; warp++) run.sum += warp_values_[warp * R + r];
      const SoftmaxState before = totals_[r];
      const Join join(before, run);
      float* const cell = cells + r * part_row_floats(p_);
      for (int c = thread_; c < shape_.channels; c += kThreads) {
        float* const acc = acc_ + r * shape_.channels + c;
        float sum = 0.0f;
        for (int s = 0; s < shape_.splits; s++) {
          sum += acc[s * R * shape_.channels];
          acc[s * R * shape_.channels] = 0.0f;
        }
        if (!run.is_empty()) cell[c] = join(before.is_empty() ? 0.0f : cell[c], sum);
      }
      factor_[r] = 0.0f;
      if (!run.is_empty()) max_[r] = join.state.max, sum_[r] = join.state.sum;
    }
    __syncthreads();
    if (thread_ == 0) {
      for (int r = 0; r < R; r++) totals_[r] = {max_[r], sum_[r]};
    }
    __syncthreads();
  }

  const AttentionParams& p_;
  const KeyRanges& ranges_;
  const int64_t batch_, kv_head_;
  const Shape shape_;
  const int thread_;
  SeenKeys seen_{0, 0};  // by any row
  // Shared memory.
  float* query_;            // [place][row]
  float* acc_;              // [split][row][channel] of the run
  float* weights_;          // [token][row]
  float* warp_values_;      // [warp][row]
  SoftmaxState* totals_;    // [row] of all runs
  Row* rows_;               // [row]
  Numbers* staged_;         // of K, [group of tokens][place of the chunk]
  Numbers* staged_values_;  // of V, [group of channels of the pass][token]
  // Of the run.
  float max_[R], factor_[R];
  float sum_[R];  // of the weights of this thread's tokens
};

// Block (x, y): R query rows of a kv head of a row of the batch; a part.
template <int R>
__global__ void __launch_bounds__(kThreads)
    generic_parts_kernel(const KIVI_GRID_CONSTANT AttentionParams p, int64_t tiles, float* scratch) {
  const int64_t parts = gridDim.y, part = blockIdx.y;
  const int64_t first_row = blockIdx.x % tiles * R, head = blockIdx.x / tiles;
  const int64_t batch = head / p.format.num_kv_heads, kv_head = head % p.format.num_kv_heads;
  const KeyRanges ranges = key_ranges(p, batch);
  device_check(ranges.quantized >= 0 && ranges.quantized <= p.block_table_stride * kPageTokens,
               "attention: a row has more quantised tokens than its block table has pages");
  device_check(ranges.cached >= ranges.window_begin &&
                   ranges.cached - ranges.window_begin <= window_capacity(p.format) && ranges.fresh >= 0 &&
                   ranges.fresh <= p.new_len,
               "attention: the lengths of a row do not fit together");
  const int64_t rows = smaller(query_rows(p) - first_row, int64_t{R});
  float* const cells = scratch + part_offset(p, parts, batch, kv_head, part, first_row);

  // The last part takes all runs that are left: one at most where there is a part for each.
  const int64_t pages = ceil_div(ranges.quantized, kPageTokens), runs = quantized_parts(pages);
  const int64_t run_pages = pages_per_part(pages);
  if (part > runs) {
    if (static_cast<int64_t>(threadIdx.x) < rows) {
      float* const state = cells + static_cast<int64_t>(threadIdx.x) * part_row_floats(p) + p.layout.v_channels;
      state[0] = SoftmaxState::empty().max;
      state[1] = SoftmaxState::empty().sum;
    }
    return;
  }
  Rows<R> work(p, ranges, batch, kv_head, first_row);
  if (part == 0) {
    work.add_exact(cells);
  } else {
    const int64_t last = part + 1 == parts ? runs : part;
    for (int64_t run = part - 1; run < last; run++) {
      work.add_pages(run * run_pages, smaller((run + 1) * run_pages, pages), cells);
    }
  }
  work.write_totals(rows, cells);
}

template <int R>
cudaError_t launch_rows(const AttentionParams& p, int64_t parts, float* scratch, cudaStream_t stream) {
  // Fewer rows where there are fewer, and where the shared memory has not room for more.
  if constexpr (R > 1) {
    if (query_rows(p) <= R / 2 || shared_bytes<R>(Shape(p)) > kSharedLimit) {
      return launch_rows<R / 2>(p, parts, scratch, stream);
    }
  }
  const int64_t tiles = ceil_div(query_rows(p), R);
  const int64_t blocks = p.batch * p.format.num_kv_heads * tiles;
  if (blocks > INT32_MAX || parts > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  return launch(generic_parts_kernel<R>, "attention_generic", grid, dim3(kThreads), shared_bytes<R>(Shape(p)), stream,
                p, tiles, scratch);
}

}  // namespace

cudaError_t launch_generic_parts(const AttentionParams& params, int64_t parts, float* scratch, cudaStream_t stream) {
  return launch_rows<8>(params, parts, scratch, stream);
}

}  // namespace kivi::cuda
