// A cache on the device beside a model of it on the host. The model knows no ring and no tiles: it holds the exact
// tokens of every head in a list, takes new ones one by one, and makes a record with the scalar kernel when the list is
// long enough. What memory must hold then follows, to the byte: 0xFF where nothing was ever written.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/reference.h"
#include "cuda/device_memory.h"
#include "cuda/kernels.h"
#include "format/codes.h"
#include "format/scales.h"
#include "unit/test_data.h"

namespace kivi::cuda {

using cpu::Array;
using cpu::element_name;
using cpu::format_text;
using cpu::kBitWidths;
using cpu::kElements;
using cpu::kGroupSizes;
using cpu::make_format;
using cpu::Random;

// New tokens of all rows, [B][Hkv][T][D] with any strides.
struct NewTokens {
  NewTokens(const Format& f, Element type, int64_t batch, int64_t count, uint32_t seed) : tokens(count) {
    fill(k, k_strides, type, batch, f.num_kv_heads, f.head_dim, 0, 0);
    fill(v, v_strides, type, batch, f.num_kv_heads, f.value_head_dim, 0, 0);
    randomize(f, batch, seed);
  }
  // Tokens apart by `gap` elements more than they are long, beginning `offset` elements into the memory.
  NewTokens(const Format& f, Element type, int64_t batch, int64_t count, uint32_t seed, int64_t offset, int64_t gap)
      : tokens(count) {
    fill(k, k_strides, type, batch, f.num_kv_heads, f.head_dim, offset, gap);
    fill(v, v_strides, type, batch, f.num_kv_heads, f.value_head_dim, offset, gap);
    k_offset = v_offset = offset;
    randomize(f, batch, seed);
  }

  int64_t k_at(int64_t b, int64_t h, int64_t t) const {
    return k_offset + b * k_strides[0] + h * k_strides[1] + t * k_strides[2];
  }
  int64_t v_at(int64_t b, int64_t h, int64_t t) const {
    return v_offset + b * v_strides[0] + h * v_strides[1] + t * v_strides[2];
  }

  int64_t tokens;
  Array k, v;
  int64_t k_strides[3] = {0, 0, 0}, v_strides[3] = {0, 0, 0};
  int64_t k_offset = 0, v_offset = 0;

 private:
  void fill(Array& x, int64_t (&strides)[3], Element type, int64_t batch, int64_t heads, int64_t dim, int64_t offset,
            int64_t gap) {
    strides[2] = dim + gap, strides[1] = tokens * strides[2], strides[0] = heads * strides[1];
    x = Array(type, offset + batch * strides[0]);
  }
  void randomize(const Format& f, int64_t batch, uint32_t seed) {
    Random random(seed);
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t h = 0; h < f.num_kv_heads; h++) {
        for (int64_t t = 0; t < tokens; t++) {
          for (int64_t d = 0; d < f.head_dim; d++) {
            k.set(k_at(b, h, t) + d, random.normal() * (d % 16 == 3 ? 6.0f : 1.0f) + 0.3f * static_cast<float>(d % 3));
          }
          for (int64_t d = 0; d < f.value_head_dim; d++) v.set(v_at(b, h, t) + d, random.normal());
        }
      }
    }
  }
};

// The memory of a cache, on either machine.
template <template <class> class Memory>
struct CacheMemory {
  Memory<uint8_t> pool, sink_k, sink_v, window_k, window_v;
  Memory<int32_t> block_table;
  Memory<int64_t> lengths, quantized;
  Memory<int16_t> k_order;
};
template <class T>
using HostArray = std::vector<T>;
using HostMemory = CacheMemory<HostArray>;

class CacheModel {
 public:
  // pool_pages: less than the rows together need; their block table is then for the test to fill.
  CacheModel(const Format& format, Element element, int64_t rows, int64_t most_tokens, uint32_t seed = 1,
             int64_t pool_pages = 0)
      : f(format), layout(record_layout(format)), type(element), batch(rows) {
    int64_t value = 0;
    EXPECT_EQ(format_error(f, &value), nullptr) << value;
    max_pages = ceil_div(most_tokens, kPageTokens) + 1;
    pages = pool_pages > 0 ? pool_pages : batch * max_pages + 2;
    const int64_t heads = batch * f.num_kv_heads, size = element_bytes(type);
    const auto bytes = [&](int64_t tokens, int64_t dim) {
      return std::vector<uint8_t>(static_cast<size_t>(heads * tokens * dim * size), 0xFF);
    };
    m.pool.assign(static_cast<size_t>(pages * page_bytes(f).value), 0xFF);
    m.sink_k = bytes(f.sink_length, f.head_dim), m.sink_v = bytes(f.sink_length, f.value_head_dim);
    m.window_k = bytes(window_capacity(f), f.head_dim), m.window_v = bytes(window_capacity(f), f.value_head_dim);
    m.lengths.assign(static_cast<size_t>(batch), 0);
    m.quantized = m.lengths;
    exact_.resize(static_cast<size_t>(heads));
    Random random(seed);
    for (int64_t i = 0; i < pages; i++) m.block_table.push_back(static_cast<int32_t>(i));
    shuffle(m.block_table.begin(), pages, random);
    m.block_table.resize(static_cast<size_t>(batch * max_pages), -1);
    if (pool_pages > 0) std::fill(m.block_table.begin(), m.block_table.end(), -1);
    if (f.num_key_classes == 0) return;
    for (int64_t i = 0; i < heads; i++) {
      for (int64_t d = 0; d < f.head_dim; d++) m.k_order.push_back(static_cast<int16_t>(d));
      shuffle(m.k_order.end() - f.head_dim, f.head_dim, random);
    }
  }

  // counts: of each row; empty: all tokens. False: a scale or zero does not fit; the model is then of no further use.
  bool append(const NewTokens& x, const std::vector<int64_t>& counts = {}) {
    bool fits = true;
    for (int64_t b = 0; b < batch; b++) {
      const auto row = static_cast<size_t>(b);
      const int64_t count = counts.empty() ? x.tokens : counts[row], before = m.lengths[row], after = before + count;
      int64_t quantized = m.quantized[row];
      for (int64_t h = 0; h < f.num_kv_heads; h++) {
        quantized = m.quantized[row];
        std::vector<Token>& exact = exact_[static_cast<size_t>(b * f.num_kv_heads + h)];
        for (int64_t t = 0; t <= count; t++) {  // flushes before the first token too
          const int64_t held = before + t;
          while (quantized < quantized_count(f, held)) {
            fits &= encode(b, h, quantized, exact);
            exact.erase(exact.begin(), exact.begin() + f.group_size);
            quantized += f.group_size;
          }
          if (t == count) break;
          Token token{slice(x.k, x.k_at(b, h, t), f.head_dim), slice(x.v, x.v_at(b, h, t), f.value_head_dim)};
          if (held < f.sink_length) {
            put(m.sink_k, token.k, (b * f.num_kv_heads + h) * f.sink_length + held);
            put(m.sink_v, token.v, (b * f.num_kv_heads + h) * f.sink_length + held);
          } else {
            exact.push_back(std::move(token));
          }
        }
        // The new ones that stay exact.
        for (int64_t t = std::max({quantized, before - f.sink_length, int64_t{0}}); t < after - f.sink_length; t++) {
          put_window(b, h, t, exact[static_cast<size_t>(t - quantized)]);
        }
      }
      m.lengths[row] = after, m.quantized[row] = quantized;
    }
    return fits;
  }

  void truncate(int64_t length) {
    const int64_t kept = std::max<int64_t>(length - f.sink_length, 0), whole = kept / f.group_size * f.group_size;
    for (int64_t b = 0; b < batch; b++) {
      const auto row = static_cast<size_t>(b);
      if (m.lengths[row] <= length) continue;
      const bool cut = whole < m.quantized[row];
      for (int64_t h = 0; h < f.num_kv_heads; h++) {
        std::vector<Token>& exact = exact_[static_cast<size_t>(b * f.num_kv_heads + h)];
        if (cut) {
          exact.clear();
          for (int64_t t = whole; t < kept; t++) {
            exact.push_back(decoded(b, h, t));
            put_window(b, h, t, exact.back());
          }
        } else if (kept >= m.quantized[row]) {
          exact.resize(static_cast<size_t>(kept - m.quantized[row]));
        }
      }
      if (cut) m.quantized[row] = whole;
      m.lengths[row] = length;
    }
  }

  // Token n of a row and head, as the cache gives it back.
  struct Token {
    std::vector<uint8_t> k, v;
  };
  Token token(int64_t b, int64_t h, int64_t n) const {
    const auto row = static_cast<size_t>(b);
    const int64_t head = b * f.num_kv_heads + h, t = n - f.sink_length;
    if (t < 0) {
      const int64_t at = head * f.sink_length + n;
      return {get(m.sink_k, f.head_dim, at), get(m.sink_v, f.value_head_dim, at)};
    }
    if (t < m.quantized[row]) return decoded(b, h, t);
    return exact_[static_cast<size_t>(head)][static_cast<size_t>(t - m.quantized[row])];
  }

  uint8_t* record(int64_t b, int64_t h, int64_t token) {
    const int64_t page = m.block_table[static_cast<size_t>(b * max_pages + token / kPageTokens)];
    const int64_t index = h * (kPageTokens / f.group_size) + token % kPageTokens / f.group_size;
    return m.pool.data() + page * page_bytes(f).value + index * layout.bytes;
  }
  const int16_t* order(int64_t b, int64_t h) const {
    return m.k_order.empty() ? nullptr : m.k_order.data() + (b * f.num_kv_heads + h) * f.head_dim;
  }

  Format f;
  RecordLayout layout;
  Element type;
  int64_t batch, pages = 0, max_pages = 0;
  HostMemory m;

 private:
  template <class Iterator>
  static void shuffle(Iterator first, int64_t count, Random& random) {
    for (int64_t i = count - 1; i > 0; i--) std::swap(first[i], first[random.below(i + 1)]);
  }
  std::vector<uint8_t> slice(const Array& x, int64_t at, int64_t count) const {
    const int64_t size = element_bytes(type);
    return {x.bytes().begin() + at * size, x.bytes().begin() + (at + count) * size};
  }
  static void put(std::vector<uint8_t>& to, const std::vector<uint8_t>& row, int64_t index) {
    std::copy(row.begin(), row.end(), to.begin() + index * static_cast<int64_t>(row.size()));
  }
  std::vector<uint8_t> get(const std::vector<uint8_t>& from, int64_t dim, int64_t index) const {
    const int64_t size = dim * element_bytes(type);
    return {from.begin() + index * size, from.begin() + (index + 1) * size};
  }
  void put_window(int64_t b, int64_t h, int64_t t, const Token& token) {
    const int64_t slot = (b * f.num_kv_heads + h) * window_capacity(f) + t % window_capacity(f);
    put(m.window_k, token.k, slot);
    put(m.window_v, token.v, slot);
  }
  bool encode(int64_t b, int64_t h, int64_t token, const std::vector<Token>& exact) {
    std::vector<uint8_t> k, v;
    for (int64_t t = 0; t < f.group_size; t++) {
      const Token& x = exact[static_cast<size_t>(t)];
      k.insert(k.end(), x.k.begin(), x.k.end());
      v.insert(v.end(), x.v.begin(), x.v.end());
    }
    return cpu::scalar_encode(
        {&f, &layout, k.data(), v.data(), f.head_dim, f.value_head_dim, type, record(b, h, token), order(b, h)});
  }
  Token decoded(int64_t b, int64_t h, int64_t t) const {
    Array k(type, f.head_dim), v(type, f.value_head_dim);
    cpu::DecodeParams p{&f,
                        &layout,
                        const_cast<CacheModel*>(this)->record(b, h, t),
                        t % f.group_size,
                        1,
                        k.data(),
                        v.data(),
                        f.head_dim,
                        f.value_head_dim,
                        type};
    p.k_order = order(b, h);
    cpu::scalar_decode(p);
    return {k.bytes(), v.bytes()};
  }

  std::vector<std::vector<Token>> exact_;  // [B][Hkv]: the tokens after the quantised ones
};

// The same cache on the device, beginning as the model is.
class DeviceCache {
 public:
  explicit DeviceCache(const CacheModel& model) : f_(model.f), batch_(model.batch) {
    const HostMemory& m = model.m;
    memory_.pool = DeviceArray<uint8_t>(m.pool);
    memory_.sink_k = DeviceArray<uint8_t>(m.sink_k), memory_.sink_v = DeviceArray<uint8_t>(m.sink_v);
    memory_.window_k = DeviceArray<uint8_t>(m.window_k), memory_.window_v = DeviceArray<uint8_t>(m.window_v);
    memory_.block_table = DeviceArray<int32_t>(m.block_table);
    memory_.lengths = DeviceArray<int64_t>(m.lengths), memory_.quantized = DeviceArray<int64_t>(m.quantized);
    memory_.k_order = DeviceArray<int16_t>(m.k_order);
    params_ = {model.f,
               model.layout,
               model.batch,
               memory_.pool.data(),
               model.pages,
               page_bytes(model.f).value,
               memory_.block_table.data(),
               model.max_pages,
               memory_.lengths.data(),
               memory_.quantized.data(),
               m.k_order.empty() ? nullptr : memory_.k_order.data(),
               memory_.sink_k.data(),
               memory_.sink_v.data(),
               memory_.window_k.data(),
               memory_.window_v.data(),
               model.type};
  }

  CacheParams& params() { return params_; }
  CacheMemory<DeviceArray>& memory() { return memory_; }

  void append(const NewTokens& x, const std::vector<int64_t>& counts = {}, int32_t* overflow = nullptr) {
    const DeviceArray<uint8_t> k(x.k.bytes()), v(x.v.bytes());
    const DeviceArray<int64_t> lengths(counts);
    check(cuda::append(append_params(x, k, v, counts.empty() ? nullptr : lengths.data(), overflow), nullptr));
    check(cudaDeviceSynchronize());
  }
  AppendParams append_params(const NewTokens& x, const DeviceArray<uint8_t>& k, const DeviceArray<uint8_t>& v,
                             const int64_t* counts, int32_t* overflow) const {
    AppendParams p{};
    p.cache = params_;
    p.k = advance(k.data(), params_.type, x.k_offset), p.v = advance(v.data(), params_.type, x.v_offset);
    std::copy_n(x.k_strides, 3, p.k_strides);
    std::copy_n(x.v_strides, 3, p.v_strides);
    p.tokens = x.tokens;
    p.new_lengths = counts;
    p.overflow = overflow;
    return p;
  }

  // All of the memory, to the byte.
  void expect(const CacheModel& model) const {
    const HostMemory& m = model.m;
    EXPECT_EQ(memory_.lengths.get(), m.lengths) << format_text(f_);
    EXPECT_EQ(memory_.quantized.get(), m.quantized) << format_text(f_);
    EXPECT_EQ(memory_.block_table.get(), m.block_table);
    EXPECT_EQ(memory_.k_order.get(), m.k_order);
    expect_bytes("sink_k", memory_.sink_k.get(), m.sink_k, f_.head_dim * element_bytes(model.type));
    expect_bytes("sink_v", memory_.sink_v.get(), m.sink_v, f_.value_head_dim * element_bytes(model.type));
    expect_bytes("window_k", memory_.window_k.get(), m.window_k, f_.head_dim * element_bytes(model.type));
    expect_bytes("window_v", memory_.window_v.get(), m.window_v, f_.value_head_dim * element_bytes(model.type));
    expect_bytes("pool", memory_.pool.get(), m.pool, model.layout.bytes);
  }

 private:
  void expect_bytes(const char* name, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want,
                    int64_t unit) const {
    if (got == want) return;
    const auto at = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
    ADD_FAILURE() << name << ": byte " << at % unit << " of unit " << at / unit << " of " << unit << " bytes is "
                  << static_cast<int>(got[static_cast<size_t>(at)]) << ", not "
                  << static_cast<int>(want[static_cast<size_t>(at)]) << "; " << format_text(f_);
  }

  Format f_;
  int64_t batch_;
  CacheMemory<DeviceArray> memory_;
  CacheParams params_{};
};

// Options of a format by number, so that 64 in a row take all combinations of the six switches.
inline Format with_options(Format f, int64_t i) {
  constexpr ScaleType kTypes[] = {ScaleType::kFloat8, ScaleType::kFloat16, ScaleType::kFloat32, ScaleType::kWidened8,
                                  ScaleType::kWidened};
  constexpr RangeSearch kSearches[] = {
      kNarrowSearch,
      kRecipeKeySearch,
      kRecipeTokenSearch,
      {16, {1, 999, 998, 950, 900, 850, 800, 750, 700, 650, 600, 550, 500, 450, 400, 1000}}};
  f.scale_type = kTypes[(i + i / 5) % 5];
  f.k_bias_correction = (i & 1) != 0;
  f.v_gain_correction = (i & 2) != 0;
  f.v_symmetric = (i & 4) != 0;
  f.v_rotated = (i & 8) != 0;
  if ((i & 16) != 0) f.v_group_size = round_up(f.value_head_dim, f.group_size);
  if ((i & 32) != 0) f.k_search = kSearches[i % 4], f.v_search = kSearches[(i / 4) % 4];
  return f;
}

// Classes of keys for a head of `dim` channels, of several widths.
inline Format with_classes(Format f, std::initializer_list<KeyClass> classes) {
  f.head_dim = f.k_bits = 0;
  for (const KeyClass& k : classes) {
    f.key_classes[f.num_key_classes++] = k;
    f.head_dim += k.channels, f.k_bits = std::max(f.k_bits, k.bits);
  }
  return f;
}

}  // namespace kivi::cuda
