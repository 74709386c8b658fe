// What the kernels that write and read records share: tiles of numbers in shared memory, and where the parts of a cache
// are. A block works on one tile at a time, always as fp32 and [token][channel]: the tokens of a group by some of its
// channels (keys, whose groups run along tokens), or some tokens by all channels. Loops over a tile that touch a number
// in global memory go along channels, those that work on groups take a group a thread.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "format/group.h"
#include "format/half.h"
#include "format/rotate.h"

namespace kivi::cuda {

inline constexpr int kStorageThreads = 128;
inline constexpr int kStorageWarps = kStorageThreads / kWarpThreads;
inline constexpr int64_t kTileNumbers = 8192;  // 32 KB: with the rest below the 48 KB that every device has

// Rows of a tile are an odd number of words apart, 1 more than a multiple of 32: then neither a warp that takes one
// channel of 32 tokens nor one that takes pieces of several rows (load_rows) meets two numbers in one bank.
constexpr int tile_stride(int64_t channels) { return static_cast<int>(round_up(channels, kWarpThreads)) + 1; }

// Tokens of a tile that holds all channels: a power of two, at most a group.
constexpr int tile_tokens(int64_t channels, int64_t group_size) {
  auto tokens = static_cast<int>(group_size);
  while (tokens * round_up(channels, kWarpThreads) > kTileNumbers) tokens /= 2;
  return tokens;
}

KIVI_DEVICE int log2_of(int64_t power_of_two) { return __ffs(static_cast<int>(power_of_two)) - 1; }

// ---- element types -------------------------------------------------------------------------------

// As format/half.h, in one instruction.
KIVI_DEVICE float half_number(uint16_t h) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(h));
#else
  return half_to_float(h);
#endif
}

template <Element kType>
KIVI_DEVICE float load_number(const void* array, int64_t i) {
  if constexpr (kType == Element::kFloat32) return static_cast<const float*>(array)[i];
  if constexpr (kType == Element::kFloat16) return half_number(static_cast<const uint16_t*>(array)[i]);
  if constexpr (kType == Element::kBFloat16) return bfloat16_to_float(static_cast<const uint16_t*>(array)[i]);
}

// The machine gives every NaN of a sum or product the same bits, which are not those of a CPU; here they become what
// CPUs make of the NaN of a lost group.
KIVI_DEVICE float canonical(float x) { return x != x ? bits_float(kFloatNaN) : x; }

// The bits of store_element for the 16-bit types.
template <Element kType>
KIVI_DEVICE uint16_t to_bits16(float number) {
  const float x = canonical(number);
  if constexpr (kType == Element::kBFloat16) return float_to_bfloat16(x);
#if defined(__CUDA_ARCH__)
  if (x != x) return 0x7E00;
  const float held = is_finite(x) ? fminf(fmaxf(x, -kLargestHalf), kLargestHalf) : x;
  return __half_as_ushort(__float2half_rn(held));
#else
  return float_to_half_finite(x);
#endif
}

template <Element kType>
KIVI_DEVICE void store_number(void* array, int64_t i, float x) {
  if constexpr (kType == Element::kFloat32) {
    static_cast<float*>(array)[i] = canonical(x);
  } else {
    static_cast<uint16_t*>(array)[i] = to_bits16<kType>(x);
  }
}

// Calls f with the type as a compile-time constant.
template <Element kType>
struct ElementConstant {
  static constexpr Element value = kType;
};
template <class F>
KIVI_DEVICE void with_element(Element type, F f) {
  if (type == Element::kFloat32) f(ElementConstant<Element::kFloat32>());
  if (type == Element::kFloat16) f(ElementConstant<Element::kFloat16>());
  if (type == Element::kBFloat16) f(ElementConstant<Element::kBFloat16>());
}

// 16 bytes of numbers to and from fp32.
template <Element kType>
inline constexpr int kNumbersOf16Bytes = static_cast<int>(16 / element_bytes(kType));

template <Element kType>
KIVI_DEVICE void unpack16(const uint4& bytes, float (&x)[kNumbersOf16Bytes<kType>]) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (kType == Element::kFloat32) {
      x[i] = bits_float(words[i]);
    } else if constexpr (kType == Element::kFloat16) {
      x[2 * i] = half_number(static_cast<uint16_t>(words[i]));
      x[2 * i + 1] = half_number(static_cast<uint16_t>(words[i] >> 16));
    } else {
      x[2 * i] = bits_float(words[i] << 16);
      x[2 * i + 1] = bits_float(words[i] & 0xFFFF0000u);
    }
  }
}

template <Element kType>
KIVI_DEVICE uint4 pack16(const float (&x)[kNumbersOf16Bytes<kType>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (kType == Element::kFloat32) {
      words[i] = float_bits(canonical(x[i]));
    } else {
      words[i] = to_bits16<kType>(x[2 * i]) | static_cast<uint32_t>(to_bits16<kType>(x[2 * i + 1])) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

KIVI_DEVICE bool on_16_bytes(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// ---- codes ---------------------------------------------------------------------------------------

// Quantizer::code, to the bit, without its division where a product with the inverse leaves no doubt: for positions
// below 1024 it is within 0.001 of the quotient, and above both are the outermost code. 1.5 * 2^23 added and taken away
// again is rint, and leaves the integer in the lowest bits.
class Coder {
 public:
  KIVI_DEVICE explicit Coder(const Quantizer& q) : q_(q), factor_(1.0f / q.scale) {
    if (!(q.scale > 0.0f)) factor_ = 0.0f;  // code 0
    by_product_ = is_finite(factor_);       // not so for the smallest subnormal scales
  }
  KIVI_DEVICE uint32_t code(float x) const {
    constexpr float kShift = 12582912.0f;
    const float position = fminf(fmaxf((x - q_.zero) * factor_, 0.0f), q_.top);
    const float shifted = position + kShift;
    if (by_product_ && fabsf(position - (shifted - kShift)) < 0.499f) return float_bits(shifted) & 0xFFu;
    return q_.code(x);
  }

 private:
  Quantizer q_;
  float factor_;
  bool by_product_;
};

// ---- tiles and global memory ---------------------------------------------------------------------

// Rows of tokens in global memory: the first ones in one place, the others in another.
struct TokenRows {
  const char* first;
  const char* rest;
  int64_t first_stride, rest_stride;  // bytes
  int64_t first_count;

  KIVI_DEVICE const char* row(int64_t token) const {
    return token < first_count ? first + token * first_stride : rest + (token - first_count) * rest_stride;
  }
};

// How the lanes of a warp divide a patch of rows by pieces of 16 bytes: in shared memory, lane l of a 16-bit type then
// writes number i to bank (l % 8 + 8 * (l / 8) + i) % 32, each to another one; in global memory every row gives whole
// sectors of 32 bytes.
template <Element kType>
struct Patches {
  static constexpr int kRows = kNumbersOf16Bytes<kType>, kPieces = kWarpThreads / kRows;
  int rows, pieces, across, count;

  KIVI_DEVICE Patches(int row_count, int channels) : rows(row_count), pieces(channels / kNumbersOf16Bytes<kType>) {
    across = (pieces + kPieces - 1) / kPieces;
    count = (rows + kRows - 1) / kRows * across;
  }
  KIVI_DEVICE int row(int patch) const { return patch / across * kRows + static_cast<int>(threadIdx.x) % kRows; }
  KIVI_DEVICE int piece(int patch) const {
    return patch % across * kPieces + static_cast<int>(threadIdx.x) % kWarpThreads / kRows;
  }
  KIVI_DEVICE bool valid(int patch) const { return patch < count && row(patch) < rows && piece(patch) < pieces; }
};

// Channels [begin, begin + channels) of `tokens` rows into a tile; with `order`, the channels that it names. `wide`:
// there is no order, and all rows and the length of a row are on 16 bytes.
template <Element kType>
KIVI_DEVICE void load_rows(float* tile, int stride, const TokenRows& source, int tokens, int begin, int channels,
                           const int16_t* order, int all_channels, bool wide) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  if (wide) {
    constexpr int kAtOnce = 4;  // loads in flight
    constexpr int kNumbers = kNumbersOf16Bytes<kType>;
    const Patches<kType> patches(tokens, channels);
    for (int first = warp; first < patches.count; first += kStorageWarps * kAtOnce) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int patch = first + u * kStorageWarps;
        bytes[u] = make_uint4(0, 0, 0, 0);
        if (!patches.valid(patch)) continue;
        const int channel = begin + patches.piece(patch) * kNumbers;
        bytes[u] = *reinterpret_cast<const uint4*>(source.row(patches.row(patch)) + channel * element_bytes(kType));
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        const int patch = first + u * kStorageWarps;
        if (!patches.valid(patch)) continue;
        float x[kNumbers];
        unpack16<kType>(bytes[u], x);
        float* const to = tile + patches.row(patch) * stride + patches.piece(patch) * kNumbers;
#pragma unroll
        for (int i = 0; i < kNumbers; i++) to[i] = x[i];
      }
    }
    return;
  }
  for (int c = lane; c < channels; c += kWarpThreads) {
    int channel = begin + c;
    if (order != nullptr) {
      channel = order[channel];
      device_check(channel >= 0 && channel < all_channels, "k_order names a channel that is not there");
    }
#pragma unroll 4
    for (int t = warp; t < tokens; t += kStorageWarps) {
      tile[t * stride + c] = load_number<kType>(source.row(t), channel);
    }
  }
}

// `tokens` rows of a tile to contiguous rows; `wide`: these and the length of a row are on 16 bytes.
template <Element kType>
KIVI_DEVICE void store_rows(const float* tile, int stride, char* target, int tokens, int channels, bool wide) {
  if (wide) {
    constexpr int kNumbers = kNumbersOf16Bytes<kType>;
    const Patches<kType> patches(tokens, channels);
    for (int patch = static_cast<int>(threadIdx.x) / kWarpThreads; patch < patches.count; patch += kStorageWarps) {
      if (!patches.valid(patch)) continue;
      float x[kNumbers];
      const int row = patches.row(patch), channel = patches.piece(patch) * kNumbers;
#pragma unroll
      for (int i = 0; i < kNumbers; i++) x[i] = tile[row * stride + channel + i];
      *reinterpret_cast<uint4*>(target + (row * channels + channel) * element_bytes(kType)) = pack16<kType>(x);
    }
    return;
  }
  for (int t = static_cast<int>(threadIdx.x) / kWarpThreads; t < tokens; t += kStorageWarps) {
    for (int c = static_cast<int>(threadIdx.x) % kWarpThreads; c < channels; c += kWarpThreads) {
      store_number<kType>(target, t * channels + c, tile[t * stride + c]);
    }
  }
}

// Bytes by the whole block; wide where both ends are on 16 bytes. Sizes are multiples of 2.
KIVI_DEVICE void copy_bytes(char* target, const char* source, int64_t bytes) {
  int64_t done = 0;
  if (on_16_bytes(target) && on_16_bytes(source)) {
    done = bytes / 16 * 16;
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kStorageThreads) {
      reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }
  }
  for (int64_t i = done / 2 + threadIdx.x; i < bytes / 2; i += kStorageThreads) {
    reinterpret_cast<uint16_t*>(target)[i] = reinterpret_cast<const uint16_t*>(source)[i];
  }
}

KIVI_DEVICE void zero_bytes(char* target, int64_t bytes) {
  int64_t done = 0;
  if (on_16_bytes(target)) {
    done = bytes / 16 * 16;
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kStorageThreads) {
      reinterpret_cast<uint4*>(target)[i] = make_uint4(0, 0, 0, 0);
    }
  }
  for (int64_t i = done + threadIdx.x; i < bytes; i += kStorageThreads) target[i] = 0;
}

// ---- rotation ------------------------------------------------------------------------------------

// `levels` steps of rotate_block, from neighbours at `distance` on, and then times `factor`. A thread takes the
// 2^levels numbers that these steps join.
template <int kLevels>
KIVI_DEVICE void rotate_levels(float* tile, int stride, int tokens, int channels, int distance, float factor) {
  constexpr int kNumbers = 1 << kLevels;
  const int token_bits = log2_of(tokens), distance_bits = log2_of(distance);
  const int units = channels / kNumbers * tokens;
  for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kStorageThreads) {
    const int token = unit & (tokens - 1), at = unit >> token_bits;
    const int low = at & (distance - 1), high = at >> distance_bits;
    float* const x = tile + token * stride + (high << (distance_bits + kLevels)) + low;
    float r[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; i++) r[i] = x[i * distance];
#pragma unroll
    for (int step = 1; step < kNumbers; step *= 2) {
#pragma unroll
      for (int i = 0; i < kNumbers; i++) {
        if ((i & step) != 0) continue;
        const float a = r[i], b = r[i + step];
        r[i] = a + b;
        r[i + step] = a - b;
      }
    }
#pragma unroll
    for (int i = 0; i < kNumbers; i++) x[i * distance] = r[i] * factor;
  }
}

// rotate_row (format/rotate.h) of every row of a tile, to the bit. All threads must come; the tile must be complete
// before, and is after.
KIVI_DEVICE void rotate_tile(float* tile, int stride, int tokens, int channels, bool back) {
  const auto size = static_cast<int>(rotation_size(channels));
  const float factor = rotation_factor(size, back);
  for (int distance = 1; distance < size;) {
    const int left = size / distance;
    if (left >= 8) {
      rotate_levels<3>(tile, stride, tokens, channels, distance, left == 8 ? factor : 1.0f);
      distance *= 8;
    } else if (left == 4) {
      rotate_levels<2>(tile, stride, tokens, channels, distance, factor);
      distance *= 4;
    } else {
      rotate_levels<1>(tile, stride, tokens, channels, distance, factor);
      distance *= 2;
    }
    __syncthreads();
  }
}

// ---- the cache -----------------------------------------------------------------------------------

// Record of the group that holds `token` (counted from the end of the sink) of a row that has at least that many.
KIVI_DEVICE uint8_t* cache_record(const CacheParams& c, int64_t batch, int64_t head, int64_t token) {
  const int64_t page = token / kPageTokens;
  device_check(page < c.max_pages, "the block table has too few pages for a row");
  const int64_t id = c.block_table[batch * c.max_pages + page];
  device_check(id >= 0 && id < c.pages, "a page of the block table is not in the pool");
  const int64_t index = head * (kPageTokens / c.format.group_size) + token % kPageTokens / c.format.group_size;
  return c.pool + id * c.page_bytes + index * c.layout.bytes;
}

// One of K and V.
struct ExactTokens {
  char* sink;    // [B][Hkv][S][channels]
  char* window;  // [B][Hkv][window_capacity][channels]
  int64_t sink_length, capacity, heads, row_bytes;

  KIVI_DEVICE char* sink_row(int64_t batch, int64_t head, int64_t token) const {
    return sink + ((batch * heads + head) * sink_length + token) * row_bytes;
  }
  KIVI_DEVICE char* window_row(int64_t batch, int64_t head, int64_t slot) const {
    return window + ((batch * heads + head) * capacity + slot) * row_bytes;
  }
};
KIVI_DEVICE ExactTokens exact_tokens(const CacheParams& c, bool keys) {
  return {static_cast<char*>(keys ? c.sink_k : c.sink_v),
          static_cast<char*>(keys ? c.window_k : c.window_v),
          c.format.sink_length,
          window_capacity(c.format),
          c.format.num_kv_heads,
          (keys ? c.format.head_dim : c.format.value_head_dim) * element_bytes(c.type)};
}

KIVI_DEVICE const int16_t* cache_order(const CacheParams& c, int64_t batch, int64_t head) {
  if (c.k_order == nullptr) return nullptr;
  return c.k_order + (batch * c.format.num_kv_heads + head) * c.format.head_dim;
}

// Tokens of a row of the batch: held, and of these quantised.
struct RowLengths {
  int64_t held, quantized;
};
KIVI_DEVICE RowLengths row_lengths(const CacheParams& c, int64_t batch) {
  const RowLengths r{c.lengths[batch], c.quantized_lengths[batch]};
  const int64_t exact = r.held - c.format.sink_length - r.quantized;
  device_check(r.held >= 0 && r.quantized >= 0 && r.quantized % c.format.group_size == 0 &&
                   (r.quantized == 0 || exact >= 0) && exact <= window_capacity(c.format),
               "the lengths of a row are not those of a cache");
  return r;
}

// Blocks for so many units of work that the kernel steps through.
inline unsigned grid_blocks(int64_t units) {
  constexpr int64_t kMost = 0x7FFFFFFF;
  return static_cast<unsigned>(units < kMost ? units : kMost);
}
// Whether a grid of one block a unit is possible.
inline bool fits_grid(int64_t units) { return units <= 0x7FFFFFFF; }

}  // namespace kivi::cuda
