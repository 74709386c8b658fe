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
#include "cuda/attention_generic.h"

namespace kivi::cuda {
namespace {

using namespace generic;

// The query rows [first_row, first_row + R) of a kv head at work.
template <int R>
class Rows {
 public:
  KIVI_DEVICE Rows(const AttentionParams& p, const KeyRanges& ranges, int64_t batch, int64_t kv_head, int64_t first_row)
      : p_(p), shape_(p), thread_(static_cast<int>(threadIdx.x)) {
    SharedCarver shared;
    query_ = shared.take<float>(static_cast<size_t>(shape_.places * R));
    acc_ = shared.take<float>(static_cast<size_t>(shape_.splits() * shape_.channels * R));
    weights_ = shared.take<float>(kThreads * R);
    rows_ = shared.take<Row>(R);
    here_ = shared.take<Place>(1);
    staged_ = shared.take<Numbers>(static_cast<size_t>(shape_.staged_numbers(p)));
    if (thread_ == 0) *here_ = {batch, kv_head, ranges, {ranges.cached + ranges.fresh, 0}};
    for (int i = thread_; i < shape_.splits() * shape_.channels * R; i += kThreads) acc_[i] = 0.0f;
    __syncthreads();
    load_queries(first_row);
    if (thread_ < R) rows_[thread_] = make_row(first_row + thread_);
    __syncthreads();
    if (thread_ == 0) {
      for (int r = 0; r < R; r++) {
        if (rows_[r].begin >= rows_[r].end) continue;
        here_->seen.begin = smaller(here_->seen.begin, rows_[r].begin);
        here_->seen.end = larger(here_->seen.end, rows_[r].end);
      }
    }
    __syncthreads();
  }

  // Takes a run into the results: quantised tokens [first, last), in whole pages, or the exact ones, which are counted
  // from 0 through sink, window and new tokens. 128 at a time, of one element type, where some row sees one of them.
  // `cells`: the results of the first row.
  KIVI_DEVICE void add_run(bool exact, int64_t first, int64_t last, float* cells) {
    Tokens tokens{exact, first, 0};
#pragma unroll 1
    for (; tokens.first < last; tokens.first += tokens.count) {
      int64_t end = last;
      if (exact && p_.cache_type != p_.new_type) {
        const int64_t cached = here_->ranges.cached - here_->ranges.quantized;
        if (tokens.first < cached) end = cached;
      }
      tokens.count = static_cast<int>(smaller(end - tokens.first, kPageTokens));
      if (position_of(tokens, 0) < here_->seen.end && position_of(tokens, tokens.count - 1) >= here_->seen.begin) {
        add_tokens(tokens);
      }
    }
    end_run(cells);
  }

  KIVI_DEVICE void write_states(int64_t count, float* cells) const {
    if (thread_ >= count) return;
    float* const state = cells + thread_ * part_row_floats(p_) + shape_.channels;
    state[0] = rows_[thread_].all.max;
    state[1] = rows_[thread_].all.sum;
  }

 private:
  // ---- the beginning ---------------------------------------------------------------------------

  KIVI_DEVICE int64_t head_of(int64_t row) const { return here_->kv_head * group_heads(p_) + row / p_.q_len; }

  KIVI_DEVICE Row make_row(int64_t row) const {
    Row made{0, 0, 0, 0, 0.0f, false, SoftmaxState::empty(), SoftmaxState::empty(), 0.0f};
    const int64_t query = row % p_.q_len;
    if (row >= query_rows(p_) || query >= here_->ranges.rows) return made;
    const int64_t head = head_of(row);
    made.exists = true;
    made.position = query_position(here_->ranges, query);
    const SeenKeys seen = seen_keys(p_, here_->ranges, made.position);
    made.begin = seen.begin, made.end = seen.end;
    device_check(mask_covers(p_, seen), "attention: the mask is narrower than the keys of a row");
    if (p_.mask_type != MaskType::kNone) {
      made.mask = here_->batch * p_.mask_strides[0] + head * p_.mask_strides[1] + query * p_.mask_strides[2];
    }
    if (p_.alibi_slopes != nullptr) made.slope = p_.alibi_slopes[here_->batch * p_.alibi_batch_stride + head];
    return made;
  }

  // By the places that a record has the channels in, 0 where it has none.
  KIVI_DEVICE void load_queries(int64_t first_row) {
    const int16_t* const order = key_order();
#pragma unroll 1
    for (int r = 0; r < R; r++) {
      const int64_t row = first_row + r;
      const bool there = row < query_rows(p_);
      const int64_t at =
          here_->batch * p_.q_batch_stride + head_of(row) * p_.q_head_stride + row % p_.q_len * p_.q_row_stride;
      for (int place = thread_; place < shape_.places; place += kThreads) {
        float x = 0.0f;
        if (there && place < p_.format.head_dim) {
          x = load_element(p_.q, p_.q_type, at + (order != nullptr ? order[place] : place));
        }
        query_[place * R + r] = x;
      }
    }
  }

  // ---- 128 tokens ------------------------------------------------------------------------------

  struct Tokens {
    bool exact;
    int64_t first;  // counted as in add_run
    int count;
  };

  KIVI_DEVICE int64_t position_of(const Tokens& tokens, int token) const {
    const int64_t i = tokens.first + token;
    return !tokens.exact ? p_.format.sink_length + i : i < here_->ranges.sink ? i : i + here_->ranges.quantized;
  }

  KIVI_DEVICE void add_tokens(const Tokens& tokens) {
    const uint8_t* const records = tokens.exact ? nullptr : page_records(tokens.first / kPageTokens);
    float product[R] = {};
    if (tokens.exact) {
      __syncthreads();  // what is in shared memory is used up
      if (thread_ < tokens.count) {
        exact_tokens()[thread_] = exact_token(tokens.first + thread_, position_of(tokens, thread_));
      }
      __syncthreads();
      if (type_of(tokens) == Element::kFloat32) {
        multiply_exact_keys<float>(tokens, product);
      } else {
        multiply_exact_keys<uint16_t>(tokens, product);
      }
    } else {
      multiply_keys(records, tokens.count, product);
    }
#pragma unroll
    for (int r = 0; r < R; r++) weights_[thread_ * R + r] = product[r];
    __syncthreads();
    const bool all_seen = __syncthreads_or(weigh(tokens)) == 0;
    if (tokens.exact) {
      if (type_of(tokens) == Element::kFloat32) {
        add_exact_values<float>(tokens);
      } else {
        add_exact_values<uint16_t>(tokens);
      }
      return;
    }
    for (int line = 0; line < shape_.lines(); line += shape_.pass_lines) {
      if (line > 0) {
        __syncthreads();
        stage_values(records, tokens.count, line);
        __syncthreads();
      }
      add_values(records, tokens.count, line, all_seen);
    }
  }

  // From the products of queries and keys to weights, in place, with the state of the run moved on: a row for each warp
  // at a time. True if some row does not see some token.
  KIVI_DEVICE bool weigh(const Tokens& tokens) {
    constexpr int kEach = kThreads / kWarpThreads;
    const float none = -bits_float(kFloatInf);
    const int lane = thread_ % kWarpThreads;
    bool some_unseen = false;
#pragma unroll 1
    for (int r = thread_ / kWarpThreads; r < R; r += kWarps) {
      Row& row = rows_[r];
      float score[kEach], top = lane == 0 ? row.run.max : none;  // only lane 0 looks at the state
      bool kept[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int token = i * kWarpThreads + lane;
        const int64_t position = position_of(tokens, token);
        const bool there = token < tokens.count;
        kept[i] = there && position >= row.begin && position < row.end;
        const float mask = kept[i] ? mask_of(row, position) : none;
        kept[i] = kept[i] && mask != none;
        some_unseen = some_unseen || (there && row.exists && !kept[i]);
        score[i] = kept[i] ? score_of(row, weights_[token * R + r], position, mask) : none;
        // A NaN is passed over here and comes back in the weights. The lowest number instead of -inf: the row has seen
        // a key, if only one that counts for nothing.
        if (kept[i]) top = fmaxf(top, fmaxf(score[i], -FLT_MAX));
      }
#pragma unroll
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, distance));
      }
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const float weight = kept[i] ? exp2f(score[i] - top) : kNotSeen;
        if (kept[i]) sum += weight;
        weights_[(i * kWarpThreads + lane) * R + r] = weight;
      }
#pragma unroll
      for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
      }
      if (lane == 0) {
        const SoftmaxState before = row.run;
        row.factor = top > before.max ? exp2f(before.max - top) : 1.0f;
        row.run = {top, fmaf(before.sum, row.factor, sum)};
      }
    }
    return some_unseen;
  }

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

  // ---- pages -----------------------------------------------------------------------------------

  // Of the keys, null where there are no classes. A row without quantised tokens may not have one yet.
  KIVI_DEVICE const int16_t* key_order() const {
    return here_->ranges.quantized > 0 ? head_order(p_, here_->batch, here_->kv_head) : nullptr;
  }

  KIVI_DEVICE const uint8_t* page_records(int64_t page) const {
    device_check(page_is_there(p_, here_->batch, page), "attention: a page of the block table is not in the pool");
    return record_address(p_, here_->batch, here_->kv_head, page, 0);
  }
  KIVI_DEVICE const uint8_t* record_of(const uint8_t* records, int token) const {
    return records + (token >> shape_.group_shift) * p_.layout.bytes;
  }
  KIVI_DEVICE int token_in_group(int token) const { return token & ((1 << shape_.group_shift) - 1); }

  // The products of this thread's token. Scales and zeros of V are made ready on the way.
  KIVI_DEVICE void multiply_keys(const uint8_t* records, int count, float (&product)[R]) {
    for (int first = 0; first < shape_.places; first += kChunk) {
      __syncthreads();  // what is in shared memory is used up
      stage_keys(records, count, first);
      if (first == 0) stage_values(records, count, 0);
      __syncthreads();
      if (thread_ < count) multiply_chunk(record_of(records, thread_), first, product);
    }
  }

  // Scales and zeros of the places from `first` on, [group][place].
  KIVI_DEVICE void stage_keys(const uint8_t* records, int count, int first) {
    const int places = smaller(shape_.places - first, kChunk);
    const int groups = count >> shape_.group_shift;
#pragma unroll 1
    for (int i = thread_; i < places; i += kThreads) {
      const int place = first + i;
      const int64_t bits = bits_of_place(place);
#pragma unroll 1
      for (int group = 0; group < groups; group++) {
        const uint8_t* const record = records + group * p_.layout.bytes;
        Numbers n{0.0f, 0.0f};
        if (place < p_.format.head_dim) {
          const Quantizer q = load_group(p_.layout, bits, record + p_.layout.k_scale, record + p_.layout.k_zero, place);
          n = {q.scale, q.zero};
        }
        staged_[group * shape_.chunk() + i] = n;
      }
    }
  }
  KIVI_DEVICE int64_t bits_of_place(int place) const {
    int64_t c = p_.layout.num_key_classes - 1;
    while (c > 0 && place < p_.layout.key_classes[c].first) c--;
    return p_.layout.key_classes[c].bits;
  }

  KIVI_DEVICE Numbers* staged_values() const { return staged_ + shape_.key_numbers(); }
  // Those of the groups of V that have the lines from `line` on, [group][token].
  KIVI_DEVICE void stage_values(const uint8_t* records, int count, int line) {
    if (thread_ >= count) return;
    const uint8_t* const record = record_of(records, thread_);
    const uint8_t* const zeros = p_.format.v_symmetric ? nullptr : record + p_.layout.v_zero;
    const int end = group_of_line(smaller(line + shape_.pass_lines, shape_.lines()) - 1) + 1;
#pragma unroll 1
    for (int group = group_of_line(line), i = 0; group < end; group++, i++) {
      const int64_t at = group * p_.format.group_size + token_in_group(thread_);
      const Quantizer q = load_group(p_.layout, p_.format.v_bits, record + p_.layout.v_scale, zeros, at);
      staged_values()[i * kValueStride + thread_] = {q.scale, q.zero};
    }
  }
  KIVI_DEVICE int group_of_line(int line) const { return line * kUnit / static_cast<int>(p_.layout.v_group); }

  // Adds the channels of a chunk to the products.
  KIVI_DEVICE void multiply_chunk(const uint8_t* record, int first, float (&product)[R]) const {
    const int token = token_in_group(thread_);
    const int last = smaller(first + kChunk, shape_.places);
#pragma unroll 1
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
      const Numbers* const numbers = staged_ + (thread_ >> shape_.group_shift) * shape_.chunk() + (begin - first);
      const float* const query = query_ + begin * R;
      switch (k.bits) {
        case 1:
          multiply_units<1>(low, high, unit, units, numbers, query, product);
          break;
        case 2:
          multiply_units<2>(low, high, unit, units, numbers, query, product);
          break;
        case 3:
          multiply_units<3>(low, high, unit, units, numbers, query, product);
          break;
        case 4:
          multiply_units<4>(low, high, unit, units, numbers, query, product);
          break;
        default:
          multiply_units<8>(low, high, unit, units, numbers, query, product);
          break;
      }
    }
  }

  template <int Bits>
  static KIVI_DEVICE void multiply_units(const uint8_t* low, const uint8_t* high, int unit, int units,
                                         const Numbers* numbers, const float* query, float (&product)[R]) {
    Codes<Bits> next;
    next.load(low, high, kLineBytes, unit);
#pragma unroll 1
    for (int i = 0; i < units; i++, numbers += kUnit, query += kUnit * R) {
      const Codes<Bits> codes = next;
      if (i + 1 < units) next.load(low, high, kLineBytes, unit + i + 1);
      add_products([&](int e) { return dequantized(codes, numbers, e); }, query, product);
    }
  }

  // Number `e` of a unit. e is known when this is compiled, and numbers stand in pairs on 16 bytes.
  template <int Bits>
  static KIVI_DEVICE float dequantized(const Codes<Bits>& codes, const Numbers* numbers, int e) {
    const float4 pair = *reinterpret_cast<const float4*>(numbers + e / 2 * 2);
    return e % 2 == 0 ? fmaf(codes[e], pair.x, pair.y) : fmaf(codes[e], pair.z, pair.w);
  }

  // Adds the products of 16 channels. Their sum stands for itself before it joins: fewer roundings at the size of the
  // whole.
  template <class Key>
  static KIVI_DEVICE void add_products(Key key, const float* query, float (&product)[R]) {
    float sum[R] = {};
#pragma unroll
    for (int e = 0; e < kUnit; e += RowFloats<R>::kTogether) {
      RowFloats<R> q;
      q.load(query + e * R);
#pragma unroll
      for (int i = 0; i < RowFloats<R>::kTogether; i++) {
        const float x = key(e + i);
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = fmaf(q.get(i, r), x, sum[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) product[r] += sum[r];
  }

  KIVI_DEVICE int line_in_pass() const { return thread_ / kUnit % shape_.pass_lines; }
  KIVI_DEVICE int split() const { return thread_ / kUnit / shape_.pass_lines; }

  // Adds the values of the lines from `first_line` on.
  KIVI_DEVICE void add_values(const uint8_t* records, int count, int first_line, bool all_seen) {
    const int line = first_line + line_in_pass();
    if (line >= shape_.lines()) return;
    const int64_t place = line * kLineBytes + thread_ % kUnit * 4;
    const uint8_t* const low = records + p_.layout.v_codes[0] + place;
    const uint8_t* const high = records + p_.layout.v_codes[1] + place;
    const Numbers* const numbers = staged_values() + (group_of_line(line) - group_of_line(first_line)) * kValueStride;
    const int units = count / kUnit;
    float sum[R] = {};
    switch (p_.format.v_bits) {
      case 1:
        add_units<1>(low, high, units, numbers, all_seen, sum);
        break;
      case 2:
        add_units<2>(low, high, units, numbers, all_seen, sum);
        break;
      case 3:
        add_units<3>(low, high, units, numbers, all_seen, sum);
        break;
      case 4:
        add_units<4>(low, high, units, numbers, all_seen, sum);
        break;
      default:
        add_units<8>(low, high, units, numbers, all_seen, sum);
        break;
    }
    add_to_acc(line, sum);
  }

  template <int Bits>
  KIVI_DEVICE void add_units(const uint8_t* low, const uint8_t* high, int units, const Numbers* numbers, bool all_seen,
                             float (&sum)[R]) const {
    if (all_seen) {
      add_units<Bits, true>(low, high, units, numbers, sum);
    } else {
      add_units<Bits, false>(low, high, units, numbers, sum);
    }
  }
  template <int Bits, bool AllSeen>
  KIVI_DEVICE void add_units(const uint8_t* low, const uint8_t* high, int units, const Numbers* numbers,
                             float (&sum)[R]) const {
    const int64_t step = shape_.lines() * kLineBytes;
    const auto load = [&](Codes<Bits>& codes, int unit) {
      const int token = unit * kUnit;
      codes.load(record_of(low, token), record_of(high, token), step, token_in_group(token) / kUnit);
    };
    Codes<Bits> next;
    if (split() < units) load(next, split());
#pragma unroll 1
    for (int unit = split(); unit < units; unit += shape_.splits()) {
      const Codes<Bits> codes = next;
      if (unit + shape_.splits() < units) load(next, unit + shape_.splits());
      const Numbers* const own = numbers + unit * kUnit;
      add_values_of<AllSeen>([&](int e) { return dequantized(codes, own, e); }, weights_ + unit * kUnit * R, sum);
    }
  }

  // Adds one channel of 16 tokens with their weights. A row that does not see a token takes no part in it: the value
  // may be NaN.
  template <bool AllSeen, class Value>
  static KIVI_DEVICE void add_values_of(Value value, const float* weights, float (&sum)[R]) {
#pragma unroll
    for (int e = 0; e < kUnit; e += RowFloats<R>::kTogether) {
      RowFloats<R> w;
      w.load(weights + e * R);
#pragma unroll
      for (int i = 0; i < RowFloats<R>::kTogether; i++) {
        const float x = value(e + i);
#pragma unroll
        for (int r = 0; r < R; r++) {
          if (AllSeen || !(w.get(i, r) < 0.0f)) sum[r] = fmaf(w.get(i, r), x, sum[r]);
        }
      }
    }
  }

  // The sums of 128 tokens stand for themselves before they join those of the run.
  KIVI_DEVICE void add_to_acc(int line, const float (&sum)[R]) {
    float* const cell = acc_ + split() * R * shape_.channels + line * kUnit + thread_ % kUnit;
#pragma unroll
    for (int r = 0; r < R; r++) {
      cell[r * shape_.channels] = fmaf(cell[r * shape_.channels], rows_[r].factor, sum[r]);
    }
  }

  // ---- exact tokens ----------------------------------------------------------------------------

  struct ExactToken {
    const void *k, *v;
  };
  KIVI_DEVICE ExactToken exact_token(int64_t i, int64_t position) const {
    const int64_t row = here_->batch * p_.format.num_kv_heads + here_->kv_head;
    if (position >= here_->ranges.cached) {
      const int64_t t = position - here_->ranges.cached;
      const auto at = [&](const int64_t* strides) {
        return here_->batch * strides[0] + here_->kv_head * strides[1] + t * strides[2];
      };
      return {advance(p_.new_k, p_.new_type, at(p_.new_k_strides)),
              advance(p_.new_v, p_.new_type, at(p_.new_v_strides))};
    }
    const bool sink = i < here_->ranges.sink;
    const int64_t capacity = window_capacity(p_.format);
    const int64_t slot =
        sink ? row * p_.format.sink_length + i : row * capacity + (position - p_.format.sink_length) % capacity;
    return {advance(sink ? p_.sink_k : p_.window_k, p_.cache_type, slot * p_.format.head_dim),
            advance(sink ? p_.sink_v : p_.window_v, p_.cache_type, slot * p_.format.value_head_dim)};
  }
  KIVI_DEVICE Element type_of(const Tokens& tokens) const {
    return position_of(tokens, 0) >= here_->ranges.cached ? p_.new_type : p_.cache_type;
  }

  // In the place of scales and zeros: 16 channels of the tokens, so that rows are read along their channels, and where
  // the tokens are.
  KIVI_DEVICE float* exact_channels() const { return reinterpret_cast<float*>(staged_); }
  KIVI_DEVICE ExactToken* exact_tokens() const {
    return reinterpret_cast<ExactToken*>(exact_channels() + kThreads * kExactStride);
  }

  // Sixteen threads take the channels of a token, each of every eighth token; the next channels are on their way while
  // products are made.
  template <class T>
  KIVI_DEVICE void multiply_exact_keys(const Tokens& tokens, float (&product)[R]) {
    constexpr int kStep = kThreads / kUnit;
    const Element type = type_of(tokens);
    const int16_t* const order = key_order();
    float* const channels = exact_channels();
    const int e = thread_ % kUnit, first = thread_ / kUnit;
    T loaded[kUnit];
    const auto load = [&](int place) {
      const bool there = place + e < p_.format.head_dim;
      const int channel = there && order != nullptr ? order[place + e] : place + e;
#pragma unroll
      for (int i = 0; i < kUnit; i++) {
        const int token = first + i * kStep;
        loaded[i] = T(0);
        if (there && token < tokens.count) loaded[i] = static_cast<const T*>(exact_tokens()[token].k)[channel];
      }
    };
    load(0);
#pragma unroll 1
    for (int place = 0; place < shape_.places; place += kUnit) {
#pragma unroll
      for (int i = 0; i < kUnit; i++) channels[(first + i * kStep) * kExactStride + e] = number_of(loaded[i], type);
      __syncthreads();
      if (place + kUnit < shape_.places) load(place + kUnit);
      add_products([&](int i) { return channels[thread_ * kExactStride + i]; }, query_ + place * R, product);
      __syncthreads();
    }
  }

  template <class T>
  KIVI_DEVICE void add_exact_values(const Tokens& tokens) {
    const Element type = type_of(tokens);
#pragma unroll 1
    for (int line = line_in_pass(); line < shape_.lines(); line += shape_.pass_lines) {
      const int channel = line * kUnit + thread_ % kUnit;
      const bool there = channel < p_.format.value_head_dim;
      float sum[R] = {};
#pragma unroll 1
      for (int unit = split(); unit * kUnit < tokens.count; unit += shape_.splits()) {
        T loaded[kUnit];
#pragma unroll
        for (int i = 0; i < kUnit; i++) {
          const int token = unit * kUnit + i;
          loaded[i] = T(0);
          if (there && token < tokens.count) loaded[i] = static_cast<const T*>(exact_tokens()[token].v)[channel];
        }
        add_values_of<false>([&](int i) { return number_of(loaded[i], type); }, weights_ + unit * kUnit * R, sum);
      }
      add_to_acc(line, sum);
    }
  }

  // ---- the end ---------------------------------------------------------------------------------

  // The sums of the run join those of the runs before, the weighted ones in `cells`.
  KIVI_DEVICE void end_run(float* cells) {
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < R; r++) {
      const SoftmaxState before = rows_[r].all, run = rows_[r].run;
      const Join join(before, run);
      float* const cell = cells + r * part_row_floats(p_);
      for (int c = thread_; c < shape_.channels; c += kThreads) {
        float* const acc = acc_ + r * shape_.channels + c;
        float sum = 0.0f;
        for (int s = 0; s < shape_.splits(); s++) {
          sum += acc[s * R * shape_.channels];
          acc[s * R * shape_.channels] = 0.0f;
        }
        if (!run.is_empty()) cell[c] = join(before.is_empty() ? 0.0f : cell[c], sum);
      }
    }
    __syncthreads();
    if (thread_ < R) {
      Row& row = rows_[thread_];
      if (!row.run.is_empty()) row.all = Join(row.all, row.run).state;
      row.run = SoftmaxState::empty();
    }
  }

  const AttentionParams& p_;
  const Shape shape_;
  const int thread_;
  // Shared memory.
  float* query_;     // [place][row]
  float* acc_;       // [split][row][channel] of the run
  float* weights_;   // [token][row]
  Row* rows_;        // [row]
  Place* here_;      // in registers it would be in the way of the loops
  Numbers* staged_;  // of K, [group of tokens][place of the chunk], then of V, [group of channels of the pass][token]
};

// Block (x, y): R query rows of a kv head of a row of the batch; a part.
template <int R>
__global__ void __launch_bounds__(kThreads, R > 4 ? 3 : 4)
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
  const bool exact = part == 0;
  const int64_t run_tokens = exact ? ranges.cached - ranges.quantized + ranges.fresh : run_pages * kPageTokens;
  const int64_t tokens = exact ? run_tokens : ranges.quantized;
  const int64_t first_run = exact ? 0 : part - 1, last_run = exact ? 1 : part + 1 == parts ? runs : part;
#pragma unroll 1
  for (int64_t run = first_run; run < last_run; run++) {
    work.add_run(exact, run * run_tokens, smaller((run + 1) * run_tokens, tokens), cells);
  }
  work.write_states(rows, cells);
}

template <int R>
cudaError_t launch_rows(const AttentionParams& p, int64_t parts, float* scratch, cudaStream_t stream) {
  // Fewer rows where there are fewer, and where the shared memory has not room for more.
  if constexpr (R > 1) {
    if (query_rows(p) <= R / 2 || shared_bytes<R>(p) > kSharedLimit) {
      return launch_rows<R / 2>(p, parts, scratch, stream);
    }
  }
  const int64_t tiles = ceil_div(query_rows(p), R);
  const int64_t blocks = p.batch * p.format.num_kv_heads * tiles;
  if (blocks > INT32_MAX || parts > 65535) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  return launch(generic_parts_kernel<R>, "attention_generic", grid, dim3(kThreads), shared_bytes<R>(p), stream, p,
                tiles, scratch);
}

}  // namespace

cudaError_t launch_generic_parts(const AttentionParams& params, int64_t parts, float* scratch, cudaStream_t stream) {
  return launch_rows<8>(params, parts, scratch, stream);
}

}  // namespace kivi::cuda
