// What is done with records once they are written: dequantised, for all of a cache or for the rest of a group that is
// cut, and widened. Values are those of the definition (cpu/kernels.h), to the bit: zero + code * scale, two roundings.
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/storage.h"
#include "format/codes.h"
#include "format/scales.h"

namespace kivi::cuda {
namespace {

// ---- one tile of a record --------------------------------------------------------------------------

// Some tokens of a record by all channels, of one of K and V. Shared memory: the tile, then scale and zero of every
// channel of K, or of every group of V ([group][token of the tile]).
struct DecodeShape {
  int tokens;  // a power of two, at most a group
  int stride;
  int groups;  // scales in shared memory, and as many zeros
};
KIVI_HOST_DEVICE inline DecodeShape decode_shape(const Format& f, const RecordLayout& layout, bool keys) {
  const int64_t channels = keys ? layout.k_channels : layout.v_channels;
  const int tokens = tile_tokens(channels, f.group_size);
  return {tokens, tile_stride(channels), static_cast<int>(keys ? layout.k_channels : layout.v_groups * tokens)};
}
// Floats of shared memory for tiles of both.
KIVI_HOST_DEVICE inline size_t decode_numbers(const Format& f, const RecordLayout& layout) {
  const DecodeShape k = decode_shape(f, layout, true), v = decode_shape(f, layout, false);
  const int keys = k.tokens * k.stride + 2 * k.groups, values = v.tokens * v.stride + 2 * v.groups;
  return static_cast<size_t>(keys > values ? keys : values);
}

KIVI_DEVICE uint32_t load_word32(const uint8_t* record, int64_t offset, int word) {
  return reinterpret_cast<const uint32_t*>(record + offset)[word];
}

// Element e of a pair of words: of the code's one plane or, at 3 bits, of its low 2 bits, with `high` the word of the
// high bit, moved so that the elements stand at the bits of the first half word.
template <int kBits>
KIVI_DEVICE float code_number(uint32_t low, uint32_t high, int e) {
  constexpr int kWidth = kBits == 3 ? 2 : kBits;
  uint32_t code = low >> code_bit(kWidth, e) & ((1u << kWidth) - 1u);
  if constexpr (kBits == 3) code |= (high >> code_bit(1, e) & 1u) << 2;
  return static_cast<float>(code);
}

// Tokens from `first` on of one class of keys. A thread takes a word: neighbours take neighbouring tokens.
template <int kBits>
KIVI_DEVICE void decode_key_class(const KeyClassLayout& k, const uint8_t* record, int first, const DecodeShape& shape,
                                  const int16_t* order, const float* scales, const float* zeros, float* numbers) {
  constexpr int kPerWord = static_cast<int>(codes_per_word(plane_bits(kBits, 0)));
  constexpr int kLanes = static_cast<int>(kLineLanes);
  const int token_bits = log2_of(shape.tokens);
  const int words = static_cast<int>(k.words[0]) << token_bits;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kStorageThreads) {
    const int row = i & (shape.tokens - 1), word = i >> token_bits;
    const int token = first + row, line = token / kLanes, lane = token % kLanes;
    const uint32_t low = load_word32(record, k.codes[0], (line * static_cast<int>(k.words[0]) + word) * kLanes + lane);
    uint32_t high = 0;
    if constexpr (kBits == 3) {
      high = load_word32(record, k.codes[1], (line * static_cast<int>(k.words[1]) + word / 2) * kLanes + lane) >>
             code_bit(1, word % 2 * kPerWord);
    }
    const int in_class = word * kPerWord;
#pragma unroll
    for (int e = 0; e < kPerWord; e++) {
      if (in_class + e >= k.channels) break;
      const int place = static_cast<int>(k.first) + in_class + e;
      const int channel = order != nullptr ? order[place] : place;
      numbers[row * shape.stride + channel] = zeros[place] + code_number<kBits>(low, high, e) * scales[place];
    }
  }
}

// Tokens from `first` on. A thread takes a word, or what of it is in the tile: neighbours take neighbouring channels.
template <int kBits>
KIVI_DEVICE void decode_value_words(const RecordLayout& layout, int channels, const uint8_t* record, int first,
                                    const DecodeShape& shape, const float* scales, const float* zeros, float* numbers) {
  constexpr int kPerWord = static_cast<int>(codes_per_word(plane_bits(kBits, 0)));
  const int codes = shape.tokens < kPerWord ? shape.tokens : kPerWord;
  const auto row_words = static_cast<int>(layout.v_channels), group_size = static_cast<int>(layout.v_group);
  const int words = shape.tokens / codes * channels;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kStorageThreads) {
    const int row = i / channels * kPerWord, channel = i % channels, token = first + row;
    const uint32_t low = load_word32(record, layout.v_codes[0], token / kPerWord * row_words + channel) >>
                         code_bit(plane_bits(kBits, 0), token % kPerWord);
    uint32_t high = 0;
    if constexpr (kBits == 3) {
      high = load_word32(record, layout.v_codes[1], token / 32 * row_words + channel) >> code_bit(1, token % 32);
    }
    const float* const scale = scales + channel / group_size * shape.tokens + row;
    const float* const zero = zeros + channel / group_size * shape.tokens + row;
#pragma unroll
    for (int e = 0; e < kPerWord; e++) {
      if (e >= codes) break;
      numbers[(row + e) * shape.stride + channel] = zero[e] + code_number<kBits>(low, high, e) * scale[e];
    }
  }
}

// Calls f with the width as a compile-time constant.
template <int kBits>
struct BitsConstant {
  static constexpr int value = kBits;
};
template <class F>
KIVI_DEVICE void with_bits(int64_t bits, F f) {
  if (bits == 1) f(BitsConstant<1>());
  if (bits == 2) f(BitsConstant<2>());
  if (bits == 3) f(BitsConstant<3>());
  if (bits == 4) f(BitsConstant<4>());
  if (bits == 8) f(BitsConstant<8>());
}

// Tokens [first, first + tokens of a tile) of a record into the tile. All threads must come; the tile is complete
// afterwards.
KIVI_DEVICE void decode_keys(const CacheParams& c, const uint8_t* record, int first, const int16_t* order,
                             float* numbers) {
  const RecordLayout& layout = c.layout;
  const DecodeShape shape = decode_shape(c.format, layout, true);
  float* const scales = numbers + shape.tokens * shape.stride;
  float* const zeros = scales + shape.groups;
  const auto channels = static_cast<int>(c.format.head_dim);
  for (int place = static_cast<int>(threadIdx.x); place < channels; place += kStorageThreads) {
    int k = 0;
    while (k + 1 < layout.num_key_classes && place >= layout.key_classes[k + 1].first) k++;
    const Quantizer q =
        load_group(layout, layout.key_classes[k].bits, record + layout.k_scale, record + layout.k_zero, place);
    scales[place] = q.scale, zeros[place] = q.zero;
    device_check(order == nullptr || (order[place] >= 0 && order[place] < channels),
                 "k_order names a channel that is not there");
  }
  __syncthreads();
  for (int k = 0; k < static_cast<int>(layout.num_key_classes); k++) {
    with_bits(layout.key_classes[k].bits, [&](auto bits) {
      decode_key_class<decltype(bits)::value>(layout.key_classes[k], record, first, shape, order, scales, zeros,
                                              numbers);
    });
  }
  __syncthreads();
}

KIVI_DEVICE void decode_values(const CacheParams& c, const uint8_t* record, int first, float* numbers) {
  const Format& f = c.format;
  const RecordLayout& layout = c.layout;
  const DecodeShape shape = decode_shape(f, layout, false);
  float* const scales = numbers + shape.tokens * shape.stride;
  float* const zeros = scales + shape.groups;
  const int token_bits = log2_of(shape.tokens);
  for (int i = static_cast<int>(threadIdx.x); i < shape.groups; i += kStorageThreads) {
    const int64_t at = (i >> token_bits) * f.group_size + first + (i & (shape.tokens - 1));
    const Quantizer q =
        load_group(layout, f.v_bits, record + layout.v_scale, f.v_symmetric ? nullptr : record + layout.v_zero, at);
    scales[i] = q.scale, zeros[i] = q.zero;
  }
  __syncthreads();
  const auto channels = static_cast<int>(f.value_head_dim);
  with_bits(f.v_bits, [&](auto bits) {
    decode_value_words<decltype(bits)::value>(layout, channels, record, first, shape, scales, zeros, numbers);
  });
  __syncthreads();
  if (f.v_rotated) rotate_tile(numbers, shape.stride, shape.tokens, channels, /*back=*/true);
}

// Tokens [token, token + count) of the quantised part of a row, of one of K and V, to contiguous rows at `target`; they
// are within one tile, whose first token `token` is. All threads must come.
KIVI_DEVICE void decode_tile(const CacheParams& c, int64_t batch, int64_t head, bool keys, int64_t token, int count,
                             char* target, float* numbers) {
  const uint8_t* const record = cache_record(c, batch, head, token);
  const auto first = static_cast<int>(token % c.format.group_size);
  const DecodeShape shape = decode_shape(c.format, c.layout, keys);
  const auto channels = static_cast<int>(keys ? c.format.head_dim : c.format.value_head_dim);
  if (keys) {
    decode_keys(c, record, first, cache_order(c, batch, head), numbers);
  } else {
    decode_values(c, record, first, numbers);
  }
  const bool wide = on_16_bytes(target) && channels * element_bytes(c.type) % 16 == 0;
  with_element(c.type, [&](auto type) {
    store_rows<decltype(type)::value>(numbers, shape.stride, target, count, channels, wide);
  });
  __syncthreads();  // before the tile is filled again
}

// ---- dequantize_cache -------------------------------------------------------------------------------

struct DequantizeArgs {
  CacheParams cache;
  int64_t length;
  char* k;  // [B][Hkv][length][D]
  char* v;
  int64_t key_units, value_units;  // of a head of a row: tiles of the sink, then of the tokens after it
  int64_t sink_units[2];           // of these, of the sink: of K, of V
};

__global__ void __launch_bounds__(kStorageThreads, 5) dequantize_kernel(const KIVI_GRID_CONSTANT DequantizeArgs a) {
  const CacheParams& c = a.cache;
  const int64_t sink = c.format.sink_length, heads = c.format.num_kv_heads;
  SharedCarver carver;
  float* const numbers = carver.take<float>(decode_numbers(c.format, c.layout));
  const int64_t per_head = a.key_units + a.value_units;
  const int64_t row = blockIdx.x / per_head, in_head = blockIdx.x % per_head;
  const bool keys = in_head < a.key_units;
  const int64_t unit = keys ? in_head : in_head - a.key_units, sinks = a.sink_units[keys ? 0 : 1];
  const int64_t batch = row / heads, head = row % heads;
  const int64_t tokens = decode_shape(c.format, c.layout, keys).tokens;
  const RowLengths lengths = row_lengths(c, batch);
  const ExactTokens exact = exact_tokens(c, keys);
  // Positions [begin, end) of the row, of which those before `held` exist.
  const bool in_sink = unit < sinks;
  const int64_t begin = in_sink ? unit * tokens : sink + (unit - sinks) * tokens;
  const int64_t limit = in_sink && sink < a.length ? sink : a.length;
  const int64_t end = begin + tokens < limit ? begin + tokens : limit;
  const int64_t held = lengths.held < begin ? begin : lengths.held < end ? lengths.held : end;
  char* const target = (keys ? a.k : a.v) + (row * a.length + begin) * exact.row_bytes;
  if (in_sink) {
    copy_bytes(target, exact.sink_row(batch, head, begin), (held - begin) * exact.row_bytes);
  } else if (begin - sink >= lengths.quantized) {
    const char* const source = exact.window_row(batch, head, (begin - sink) % exact.capacity);
    copy_bytes(target, source, (held - begin) * exact.row_bytes);
  } else if (held > begin) {
    decode_tile(c, batch, head, keys, begin - sink, static_cast<int>(held - begin), target, numbers);
  }
  zero_bytes(target + (held - begin) * exact.row_bytes, (end - held) * exact.row_bytes);
}

// ---- truncate --------------------------------------------------------------------------------------

struct TruncateArgs {
  CacheParams cache;
  int64_t length;
};

// One block for each row of the batch, whose first thread reads and changes the lengths.
__global__ void __launch_bounds__(kStorageThreads, 5) truncate_kernel(const KIVI_GRID_CONSTANT TruncateArgs a) {
  const CacheParams& c = a.cache;
  const int64_t group = c.format.group_size, over = a.length - c.format.sink_length;
  const int64_t kept = over > 0 ? over : 0;  // counted from the end of the sink
  const int64_t whole = kept / group * group;
  SharedCarver carver;
  float* const numbers = carver.take<float>(decode_numbers(c.format, c.layout));
  const int64_t batch = blockIdx.x;
  KIVI_SHARED(RowLengths, lengths);
  if (threadIdx.x == 0) lengths = row_lengths(c, batch);
  __syncthreads();
  const bool cut = whole < lengths.quantized;  // then the row holds more than `length`
  // The kept part of the group that is cut becomes exact: its dequantised values move into the window. That holds
  // nothing else that is kept, since it begins after the quantised tokens.
  for (int side = 0; cut && side < 2; side++) {
    const ExactTokens exact = exact_tokens(c, side == 0);
    const int64_t tokens = decode_shape(c.format, c.layout, side == 0).tokens;
    for (int64_t head = 0; head < c.format.num_kv_heads; head++) {
      for (int64_t token = whole; token < kept; token += tokens) {
        const int64_t count = kept - token < tokens ? kept - token : tokens;
        decode_tile(c, batch, head, side == 0, token, static_cast<int>(count),
                    exact.window_row(batch, head, token % exact.capacity), numbers);
      }
    }
  }
  if (threadIdx.x != 0) return;
  if (lengths.held > a.length) c.lengths[batch] = a.length;
  if (cut) c.quantized_lengths[batch] = whole;
}

// ---- widen -----------------------------------------------------------------------------------------

struct WidenArgs {
  Format from, to;
  RecordLayout old_layout, new_layout;
  const uint8_t* records;
  uint8_t* out;
  int64_t count;
};

// A section of scales, and the zeros beside it. Sections of float32 are full: 16 numbers are 64 bytes.
KIVI_DEVICE void widen_section(const WidenArgs& a, bool keys, const uint8_t* record, uint8_t* out) {
  const RecordLayout &x = a.old_layout, &y = a.new_layout;
  const bool has_zeros = keys || !a.from.v_symmetric;
  const uint8_t* const old_scales = record + (keys ? x.k_scale : x.v_scale);
  const uint8_t* const old_zeros = has_zeros ? record + (keys ? x.k_zero : x.v_zero) : nullptr;
  uint8_t* const scales = out + (keys ? y.k_scale : y.v_scale);
  uint8_t* const zeros = has_zeros ? out + (keys ? y.k_zero : y.v_zero) : nullptr;
  const int64_t count = keys ? x.k_channels : x.v_groups * a.from.group_size;
  for (int64_t i = threadIdx.x; i < count; i += kStorageThreads) {
    int64_t bits = a.from.v_bits;
    if (keys) {
      int k = 0;
      while (k + 1 < x.num_key_classes && i >= x.key_classes[k + 1].first) k++;
      bits = x.key_classes[k].bits;
    }
    const Quantizer q = load_group(x, bits, old_scales, old_zeros, i);
    Choice c;
    c.scale = q.scale, c.zero = q.zero;
    store_group(y, bits, scales, zeros, i, c);
  }
}

__global__ void __launch_bounds__(kStorageThreads) widen_kernel(const KIVI_GRID_CONSTANT WidenArgs a) {
  const RecordLayout &x = a.old_layout, &y = a.new_layout;
  for (int64_t i = blockIdx.x; i < a.count; i += gridDim.x) {
    const uint8_t* const record = a.records + i * x.bytes;
    uint8_t* const out = a.out + i * y.bytes;
    const auto copy = [&](int64_t to, int64_t from, int64_t bytes) {
      copy_bytes(reinterpret_cast<char*>(out) + to, reinterpret_cast<const char*>(record) + from, bytes);
    };
    copy(y.k_codes[0], x.k_codes[0], x.k_scale - x.k_codes[0]);
    copy(y.v_codes[0], x.v_codes[0], x.v_scale - x.v_codes[0]);
    widen_section(a, true, record, out);
    widen_section(a, false, record, out);
  }
}

}  // namespace

cudaError_t dequantize_cache(const CacheParams& cache, int64_t length, void* k, void* v, cudaStream_t stream) {
  const Format& f = cache.format;
  if (cache.batch == 0 || length == 0) return cudaSuccess;
  DequantizeArgs a{cache, length, static_cast<char*>(k), static_cast<char*>(v), 0, 0, {0, 0}};
  const int64_t sinks = length < f.sink_length ? length : f.sink_length;
  for (const bool keys : {true, false}) {
    const int64_t tokens = decode_shape(f, cache.layout, keys).tokens;
    a.sink_units[keys ? 0 : 1] = ceil_div(sinks, tokens);
    (keys ? a.key_units : a.value_units) = ceil_div(sinks, tokens) + ceil_div(length - sinks, tokens);
  }
  const int64_t units = cache.batch * f.num_kv_heads * (a.key_units + a.value_units);
  if (!fits_grid(units)) return cudaErrorInvalidConfiguration;
  return launch(dequantize_kernel, "dequantize_cache", dim3(static_cast<unsigned>(units)), dim3(kStorageThreads),
                decode_numbers(f, cache.layout) * sizeof(float), stream, a);
}

cudaError_t truncate(const CacheParams& cache, int64_t length, cudaStream_t stream) {
  if (cache.batch == 0) return cudaSuccess;
  if (!fits_grid(cache.batch)) return cudaErrorInvalidConfiguration;
  return launch(truncate_kernel, "truncate", dim3(static_cast<unsigned>(cache.batch)), dim3(kStorageThreads),
                decode_numbers(cache.format, cache.layout) * sizeof(float), stream, TruncateArgs{cache, length});
}

cudaError_t widen(const Format& from, const uint8_t* records, const Format& to, uint8_t* out, int64_t count,
                  cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return launch(widen_kernel, "widen", dim3(grid_blocks(count)), dim3(kStorageThreads), 0, stream,
                WidenArgs{from, to, record_layout(from), record_layout(to), records, out, count});
}

}  // namespace kivi::cuda
