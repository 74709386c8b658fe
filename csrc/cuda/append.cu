// Appends tokens to a cache: every group that leaves the window becomes a record, the rest joins sink and window. Two
// or three launches, because lengths may move on, and slots of the window be reused, only when no block reads them any
// more: encode writes records past the quantised lengths, which nobody sees yet; commit copies the exact tokens and
// sets the lengths. What a record holds is defined by cpu/kernels.h and format/scales.h. One thread makes one group, so
// that sums are added in the order of the definition; every number of the input is read once, and every word of a
// record is written once, whole.
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/storage.h"
#include "format/codes.h"
#include "format/scales.h"

namespace kivi::cuda {
namespace {

// ---- what an append does to a row ----------------------------------------------------------------

struct RowAppend {
  int64_t before, after;                      // tokens held
  int64_t quantized_before, quantized_after;  // of these, quantised
};
KIVI_DEVICE RowAppend row_append(const AppendParams& p, int64_t batch) {
  const RowLengths lengths = row_lengths(p.cache, batch);
  const int64_t count = p.new_lengths != nullptr ? p.new_lengths[batch] : p.tokens;
  device_check(count >= 0 && count <= p.tokens, "append: new_lengths must be 0 to the tokens that are given");
  RowAppend r{lengths.held, lengths.held + count, lengths.quantized, lengths.quantized};
  // A truncated row may hold more quantised tokens than its length asks for; they stay as they are.
  const int64_t wanted = quantized_count(p.cache.format, r.after);
  if (wanted > r.quantized_after) r.quantized_after = wanted;
  return r;
}

// ---- one group -----------------------------------------------------------------------------------

// The numbers of a group in a tile, which its codes replace (as the bits of a float).
struct TileNumbers {
  float* data;
  int step;
  int count;

  KIVI_DEVICE float operator[](int64_t i) const { return data[static_cast<int>(i) * step]; }
  KIVI_DEVICE void set_code(int i, uint32_t code) const { data[i * step] = bits_float(code); }
};

KIVI_DEVICE void make_codes(const GroupRules& g, const Quantizer& q, const TileNumbers& x) {
  if (!g.plain()) {
    for (int i = 0; i < x.count; i++) x.set_code(i, code_of(g, q, x[i]));
    return;
  }
  const Coder coder(q);
#pragma unroll 4
  for (int i = 0; i < x.count; i++) x.set_code(i, coder.code(x[i]));
}

// Replaces the numbers by codes and gives what is stored of the quantizer.
KIVI_DEVICE Choice encode_group(const GroupRules& g, const TileNumbers& x, int32_t* overflow) {
  Choice c = choose_quantizer(g, x);
  if (!c.fits) {
    if (overflow != nullptr) atomicExch(overflow, 1);
    c = saturated(g, x);
  }
  make_codes(g, c.coder, x);
  return c;
}

// `count` codes of a tile, `step` numbers apart, of which `kWidth` bits from `shift` on make a word.
template <int kWidth>
KIVI_DEVICE uint32_t pack_word(const float* codes, int step, int count, int shift) {
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < 32 / kWidth; e++) {
    if (e < count) word |= (float_bits(codes[e * step]) >> shift & ((1u << kWidth) - 1u)) << code_bit(kWidth, e);
  }
  return word;
}
KIVI_DEVICE uint32_t pack_word(int width, const float* codes, int step, int count, int shift) {
  switch (width) {
    case 1:
      return pack_word<1>(codes, step, count, shift);
    case 2:
      return pack_word<2>(codes, step, count, shift);
    case 4:
      return pack_word<4>(codes, step, count, shift);
    default:
      return pack_word<8>(codes, step, count, shift);
  }
}

// ---- tiles ---------------------------------------------------------------------------------------

// Where a tile of keys from place `begin` on ends: when it is full, but between words of every width.
KIVI_HOST_DEVICE inline int key_tile_end(const RecordLayout& layout, int most_places, int begin) {
  const int full = begin + most_places;
  if (full >= layout.k_channels) return static_cast<int>(layout.k_channels);
  int64_t first = 0;  // of the class that is cut
  for (int64_t c = 0; c < layout.num_key_classes; c++) {
    if (layout.key_classes[c].first <= full) first = layout.key_classes[c].first;
  }
  return full - static_cast<int>((full - first) % kWarpThreads);
}

// The work on one group of one kv head is divided into units, a block each: [B][Hkv][groups][key_units + value_units].
// They are tiles of keys, then runs of tokens of the values. A run is as long as the longest word; one that does not
// fit into a tile is done piece by piece.
struct EncodeArgs {
  AppendParams append;
  int64_t groups;  // blocks side by side for the groups of a row; each goes on to further ones
  int key_units, value_units;
  int most_places;   // of a tile of keys; a multiple of 32
  int key_stride;    // floats between the rows of a tile
  int value_tokens;  // of a tile of values
  int value_run;     // tokens of a unit of values
  int value_stride;
  bool wide_keys, wide_values;  // tokens can be read 16 bytes at a time
};

KIVI_HOST_DEVICE inline size_t tile_numbers(const EncodeArgs& a) {
  const int64_t keys = a.append.cache.format.group_size * a.key_stride;
  const int64_t values = int64_t{a.value_tokens} * a.value_stride;
  return static_cast<size_t>(keys > values ? keys : values);
}

// What a block is working on: one tile of one group of tokens. In shared memory, since it is needed between all
// barriers and would cost every thread its registers.
struct Job {
  int64_t batch, head;
  int64_t known;             // tokens, counted from the end of the sink, before this one are in the window
  int64_t token, end_token;  // the first one of the group; where the groups of the row end
  uint8_t* record;
  // A tile of one of K and V: `tokens` rows from token `first` of the group on, places or channels [begin, end).
  bool keys;
  int tokens, first, end_first;  // ... of the unit: further tiles up to token end_first
  int begin, end;
  int stride;
  TokenRows rows;

  KIVI_DEVICE int channels() const { return end - begin; }
};

// Tokens of the group from `first` on: from the window as far as they are there, then from the new ones.
KIVI_DEVICE TokenRows tile_rows(const AppendParams& p, const Job& job) {
  const ExactTokens exact = exact_tokens(p.cache, job.keys);
  const int64_t token = job.token + job.first;
  const int64_t in_window = job.known > token ? job.known - token : 0;
  const int64_t new_index = token + in_window - job.known;
  const int64_t* const strides = job.keys ? p.k_strides : p.v_strides;
  const int64_t size = element_bytes(p.cache.type);
  const auto* const fresh = static_cast<const char*>(job.keys ? p.k : p.v);
  return {exact.window_row(job.batch, job.head, token % exact.capacity),
          fresh + (job.batch * strides[0] + job.head * strides[1] + new_index * strides[2]) * size, exact.row_bytes,
          strides[2] * size, in_window};
}

KIVI_DEVICE void load_tile(const EncodeArgs& a, const Job& job, float* numbers) {
  const CacheParams& cache = a.append.cache;
  const auto channels = static_cast<int>(job.keys ? cache.format.head_dim : cache.format.value_head_dim);
  const int there = (job.end < channels ? job.end : channels) - job.begin;
  const int16_t* const order = job.keys ? cache_order(cache, job.batch, job.head) : nullptr;
  const bool wide = job.keys ? a.wide_keys : a.wide_values;
  with_element(cache.type, [&](auto type) {
    load_rows<decltype(type)::value>(numbers, job.stride, job.rows, job.tokens, job.begin, there, order, channels,
                                     wide);
  });
  const int added = job.channels() - there;  // of code 0
  for (int i = static_cast<int>(threadIdx.x); i < added * job.tokens; i += kStorageThreads) {
    numbers[i / added * job.stride + there + i % added] = 0.0f;
  }
}

// Scales and zeros of the tile's groups; its numbers become codes.
KIVI_DEVICE void encode_groups(const EncodeArgs& a, const Job& job, float* numbers) {
  const Format& f = a.append.cache.format;
  const RecordLayout& layout = a.append.cache.layout;
  GroupRules rules = job.keys ? key_rules(f) : value_rules(f);
  uint8_t* const scales = job.record + (job.keys ? layout.k_scale : layout.v_scale);
  uint8_t* const zeros = job.keys ? job.record + layout.k_zero : f.v_symmetric ? nullptr : job.record + layout.v_zero;
  const int token_bits = log2_of(job.tokens);
  const int groups = job.keys ? job.channels() : static_cast<int>(layout.v_groups) << token_bits;
  for (int i = static_cast<int>(threadIdx.x); i < groups; i += kStorageThreads) {
    TileNumbers x{};
    int at;
    if (job.keys) {
      at = job.begin + i;
      int c = 0;
      while (c + 1 < layout.num_key_classes && at >= layout.key_classes[c + 1].first) c++;
      rules.bits = layout.key_classes[c].bits;
      x = {numbers + i, job.stride, at < f.head_dim ? static_cast<int>(f.group_size) : 0};
    } else {
      const int token = i & (job.tokens - 1), group = i >> token_bits;
      const auto size = static_cast<int>(layout.v_group), begin = group * size;
      const int left = static_cast<int>(f.value_head_dim) - begin;
      at = group * static_cast<int>(f.group_size) + job.first + token;
      x = {numbers + token * job.stride + begin, 1, left < size ? left : size};
    }
    Choice choice;  // of an added channel: zeros
    if (x.count > 0) choice = encode_group(rules, x, a.append.overflow);
    store_group(layout, rules.bits, scales, zeros, at, choice);
  }
}

KIVI_DEVICE void zero_section_end(const Job& job, int64_t section, int64_t used, int64_t alignment) {
  uint8_t* const bytes = job.record + section;
  for (int64_t i = used + threadIdx.x; i < round_up(used, alignment); i += kStorageThreads) bytes[i] = 0;
}

KIVI_DEVICE void pack_keys(const RecordLayout& layout, const Job& job, const float* numbers) {
  const int token_bits = log2_of(job.tokens);
  for (int c = 0; c < static_cast<int>(layout.num_key_classes); c++) {
    const KeyClassLayout& k = layout.key_classes[c];
    const auto first = static_cast<int>(k.first),
               class_end = first + static_cast<int>(round_up(k.channels, kLineLanes));
    const int begin = first > job.begin ? first : job.begin, end = class_end < job.end ? class_end : job.end;
    if (begin >= end) continue;
    for (int plane = 0; plane < num_planes(k.bits); plane++) {
      const auto width = static_cast<int>(plane_bits(k.bits, plane));
      const int per_word = 32 / width, line_words = static_cast<int>(k.words[plane]);
      const int words = (end - begin + per_word - 1) / per_word << token_bits;
      auto* const out = reinterpret_cast<uint32_t*>(job.record + k.codes[plane]);
      for (int i = static_cast<int>(threadIdx.x); i < words; i += kStorageThreads) {
        const int token = i & (job.tokens - 1), word = i >> token_bits;
        const int place = begin + word * per_word, left = end - place;
        const uint32_t packed = pack_word(width, numbers + token * job.stride + (place - job.begin), 1,
                                          left < per_word ? left : per_word, 2 * plane);
        constexpr int kLanes = static_cast<int>(kLineLanes);
        out[(token / kLanes * line_words + (place - first) / per_word) * kLanes + token % kLanes] = packed;
      }
    }
  }
}

KIVI_DEVICE void pack_values(const EncodeArgs& a, const Job& job, const float* numbers) {
  const Format& f = a.append.cache.format;
  const RecordLayout& layout = a.append.cache.layout;
  const int channels = job.channels();
  for (int plane = 0; plane < num_planes(f.v_bits); plane++) {
    const auto width = static_cast<int>(plane_bits(f.v_bits, plane));
    const int per_word = 32 / width;
    const int codes = job.tokens < per_word ? job.tokens : per_word;  // of a word that are in this tile
    const int words = job.tokens / codes * channels;
    auto* const out = reinterpret_cast<uint32_t*>(job.record + layout.v_codes[plane]);
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kStorageThreads) {
      const int word = i / channels, channel = i % channels;
      uint32_t packed =
          pack_word(width, numbers + word * per_word * job.stride + channel, job.stride, codes, 2 * plane);
      const int at = (job.first / per_word + word) * channels + channel;
      if (job.first % per_word != 0) {
        // Pieces of a word that is longer than a tile come in turn, by the same thread. They begin at even elements.
        packed = out[at] | packed << code_bit(width, job.first % per_word);
      }
      out[at] = packed;
    }
  }
}

KIVI_DEVICE void encode_tile(const EncodeArgs& a, const Job& job, float* numbers) {
  const Format& f = a.append.cache.format;
  const RecordLayout& layout = a.append.cache.layout;
  load_tile(a, job, numbers);
  __syncthreads();
  if (!job.keys && f.v_rotated)
    rotate_tile(numbers, job.stride, job.tokens, static_cast<int>(f.value_head_dim), /*back=*/false);
  encode_groups(a, job, numbers);
  const int64_t alignment = record_alignment(f.scale_type);
  if (job.keys && job.end == layout.k_channels) {
    const int64_t used = layout.k_channels * layout.scale_bytes;
    zero_section_end(job, layout.k_scale, used, alignment);
    zero_section_end(job, layout.k_zero, used, alignment);
  } else if (!job.keys && job.first == 0) {
    const int64_t used = layout.v_groups * f.group_size * layout.scale_bytes;
    zero_section_end(job, layout.v_scale, used, alignment);
    if (!f.v_symmetric) zero_section_end(job, layout.v_zero, used, alignment);
  }
  __syncthreads();
  if (job.keys) {
    pack_keys(layout, job, numbers);
  } else {
    pack_values(a, job, numbers);
  }
}

// The first thread's part: what unit `index` is about, up to the first group; then one group and one tile after the
// other.
KIVI_DEVICE void begin_unit(const EncodeArgs& a, int64_t index, Job& job) {
  const Format& f = a.append.cache.format;
  const int64_t per_group = a.key_units + a.value_units;
  const auto unit = static_cast<int>(index % per_group);
  const int64_t first_group = index / per_group % a.groups, row = index / per_group / a.groups;
  job.batch = row / f.num_kv_heads, job.head = row % f.num_kv_heads;
  const RowAppend r = row_append(a.append, job.batch);
  job.known = r.before - f.sink_length;
  job.token = r.quantized_before + first_group * f.group_size, job.end_token = r.quantized_after;
  job.keys = unit < a.key_units;
  if (job.keys) {
    job.tokens = static_cast<int>(f.group_size), job.stride = a.key_stride;
    job.begin = 0, job.end = key_tile_end(a.append.cache.layout, a.most_places, 0);
    for (int i = 0; i < unit; i++) {
      job.begin = job.end;
      job.end = key_tile_end(a.append.cache.layout, a.most_places, job.begin);
    }
    job.first = 0, job.end_first = job.tokens;
  } else {
    job.tokens = a.value_tokens, job.stride = a.value_stride;
    job.begin = 0, job.end = static_cast<int>(a.append.cache.layout.v_channels);
    job.first = (unit - a.key_units) * a.value_run, job.end_first = job.first + a.value_run;
  }
}
KIVI_DEVICE void begin_tile(const EncodeArgs& a, Job& job) {
  if (job.token >= job.end_token) return;
  job.record = cache_record(a.append.cache, job.batch, job.head, job.token);
  job.rows = tile_rows(a.append, job);
}
KIVI_DEVICE void next_tile(const EncodeArgs& a, Job& job) {
  job.first += job.tokens;
  if (job.first == job.end_first) {
    job.first = job.keys ? 0 : job.end_first - a.value_run;
    job.token += a.groups * a.append.cache.format.group_size;
  }
  begin_tile(a, job);
}

// Six blocks of a multiprocessor at once: up to 80 registers a thread, which is enough without spills.
__global__ void __launch_bounds__(kStorageThreads, 6) encode_kernel(const KIVI_GRID_CONSTANT EncodeArgs a) {
  SharedCarver carver;
  Job& job = *carver.take<Job>(1);
  float* const numbers = carver.take<float>(tile_numbers(a));
  if (threadIdx.x == 0) {
    begin_unit(a, blockIdx.x, job);
    begin_tile(a, job);
  }
  __syncthreads();
  while (job.token < job.end_token) {
    encode_tile(a, job, numbers);
    __syncthreads();  // before tile and job change
    if (threadIdx.x == 0) next_tile(a, job);
    __syncthreads();
  }
}

// ---- exact tokens and lengths --------------------------------------------------------------------

struct CommitArgs {
  AppendParams append;
  int64_t blocks_per_row;
};

// The new tokens [begin, end) of a head, from token `at` on of sink or window.
KIVI_DEVICE void copy_tokens(const AppendParams& p, int64_t batch, bool keys, const RowAppend& r, int64_t first_warp,
                             int64_t warps) {
  const ExactTokens exact = exact_tokens(p.cache, keys);
  const int64_t sink = exact.sink_length;
  const int64_t sinks = (r.after < sink ? r.after : sink) - r.before;  // new tokens that join the sink
  const int64_t to_sink = sinks > 0 ? sinks : 0;
  // Of the others, those that stay exact, counted from the end of the sink.
  const int64_t begin = r.before - sink > r.quantized_after ? r.before - sink : r.quantized_after;
  const int64_t to_window = r.after - sink > begin ? r.after - sink - begin : 0;
  const int64_t tokens = to_sink + to_window;
  const int64_t* const strides = keys ? p.k_strides : p.v_strides;
  const int64_t size = element_bytes(p.cache.type);
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int64_t i = first_warp; i < tokens * exact.heads; i += warps) {
    const int64_t head = i / tokens, t = i % tokens;
    const int64_t token = begin + t - to_sink;  // if it joins the window
    const int64_t new_index = t < to_sink ? t : token + sink - r.before;
    const char* const from = static_cast<const char*>(keys ? p.k : p.v) +
                             (batch * strides[0] + head * strides[1] + new_index * strides[2]) * size;
    char* const to =
        t < to_sink ? exact.sink_row(batch, head, r.before + t) : exact.window_row(batch, head, token % exact.capacity);
    if (on_16_bytes(from) && on_16_bytes(to) && exact.row_bytes % 16 == 0) {
      for (int64_t b = lane; b < exact.row_bytes / 16; b += kWarpThreads) {
        reinterpret_cast<uint4*>(to)[b] = reinterpret_cast<const uint4*>(from)[b];
      }
    } else {
      for (int64_t b = lane; b < exact.row_bytes / 2; b += kWarpThreads) {
        reinterpret_cast<uint16_t*>(to)[b] = reinterpret_cast<const uint16_t*>(from)[b];
      }
    }
  }
}

KIVI_DEVICE void set_lengths(const AppendParams& p, int64_t batch, const RowAppend& r) {
  p.cache.lengths[batch] = r.after;
  p.cache.quantized_lengths[batch] = r.quantized_after;
}

// Sets the lengths of a row too where one block does all of the row.
__global__ void __launch_bounds__(kStorageThreads) commit_kernel(const KIVI_GRID_CONSTANT CommitArgs a) {
  if (a.append.overflow != nullptr && *a.append.overflow != 0) return;
  const int64_t batch = blockIdx.x / a.blocks_per_row;
  const RowAppend r = row_append(a.append, batch);
  const int64_t warp = blockIdx.x % a.blocks_per_row * kStorageWarps + threadIdx.x / kWarpThreads;
  copy_tokens(a.append, batch, true, r, warp, a.blocks_per_row * kStorageWarps);
  copy_tokens(a.append, batch, false, r, warp, a.blocks_per_row * kStorageWarps);
  if (a.blocks_per_row > 1) return;
  __syncthreads();  // all have read the lengths
  if (threadIdx.x == 0) set_lengths(a.append, batch, r);
}

__global__ void __launch_bounds__(kStorageThreads) set_lengths_kernel(const KIVI_GRID_CONSTANT AppendParams p) {
  if (p.overflow != nullptr && *p.overflow != 0) return;
  for (int64_t b = blockIdx.x * static_cast<int64_t>(kStorageThreads) + threadIdx.x; b < p.cache.batch;
       b += static_cast<int64_t>(gridDim.x) * kStorageThreads) {
    set_lengths(p, b, row_append(p, b));
  }
}

// Whether rows of one of K and V are on 16 bytes wherever they are read.
bool is_wide(const AppendParams& p, bool keys) {
  const int64_t size = element_bytes(p.cache.type), heads = p.cache.format.num_kv_heads;
  const auto on_16 = [](int64_t bytes) { return bytes % 16 == 0; };
  const int64_t* const strides = keys ? p.k_strides : p.v_strides;
  const int64_t channels = keys ? p.cache.format.head_dim : p.cache.format.value_head_dim;
  const auto address = [](const void* pointer) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)); };
  return on_16(address(keys ? p.k : p.v)) && on_16(address(keys ? p.cache.window_k : p.cache.window_v)) &&
         on_16(channels * size) && (p.cache.batch <= 1 || on_16(strides[0] * size)) &&
         (heads <= 1 || on_16(strides[1] * size)) && (p.tokens <= 1 || on_16(strides[2] * size));
}

cudaError_t launch_encode(const AppendParams& p, cudaStream_t stream) {
  const Format& f = p.cache.format;
  const RecordLayout& layout = p.cache.layout;
  EncodeArgs a{};
  a.append = p;
  a.most_places = static_cast<int>(kTileNumbers / f.group_size);
  for (int end = 0; end < layout.k_channels; end = key_tile_end(layout, a.most_places, end)) a.key_units++;
  a.key_stride = tile_stride(layout.k_channels < a.most_places ? layout.k_channels : a.most_places);
  a.value_tokens = tile_tokens(layout.v_channels, f.group_size);
  const int longest_word = f.group_size < kWarpThreads ? static_cast<int>(f.group_size) : kWarpThreads;
  a.value_run = a.value_tokens > longest_word ? a.value_tokens : longest_word;
  a.value_units = static_cast<int>(f.group_size) / a.value_run;
  a.value_stride = tile_stride(layout.v_channels);
  // As many groups may leave the window of a row as there are in the new tokens, and one more.
  a.groups = p.tokens <= f.group_size ? 1 : ceil_div(p.tokens, f.group_size);
  const int64_t units = p.cache.batch * f.num_kv_heads * a.groups * (a.key_units + a.value_units);
  if (!fits_grid(units)) return cudaErrorInvalidConfiguration;
  a.wide_keys = p.cache.k_order == nullptr && is_wide(p, true);
  a.wide_values = is_wide(p, false);
  const size_t bytes = round_up(sizeof(Job), 16) + tile_numbers(a) * sizeof(float);
  return launch(encode_kernel, "append_encode", dim3(static_cast<unsigned>(units)), dim3(kStorageThreads), bytes,
                stream, a);
}

cudaError_t launch_commit(const AppendParams& p, cudaStream_t stream) {
  // Rows of K or V that a row of the batch takes at most, and how many a block should move.
  constexpr int64_t kRowsOfBlock = 64, kAloneAtMost = 256;
  const int64_t exact = window_capacity(p.cache.format) + p.cache.format.sink_length;
  const int64_t rows = p.cache.format.num_kv_heads * (p.tokens < exact ? p.tokens : exact);
  const CommitArgs a{p, rows <= kAloneAtMost ? 1 : ceil_div(rows, kRowsOfBlock)};
  if (!fits_grid(p.cache.batch * a.blocks_per_row)) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      launch(commit_kernel, "append_commit", dim3(static_cast<unsigned>(p.cache.batch * a.blocks_per_row)),
             dim3(kStorageThreads), 0, stream, a);
  if (error != cudaSuccess || a.blocks_per_row == 1) return error;
  return launch(set_lengths_kernel, "append_set_lengths", dim3(grid_blocks(ceil_div(p.cache.batch, kStorageThreads))),
                dim3(kStorageThreads), 0, stream, p);
}

}  // namespace

cudaError_t append(const AppendParams& params, cudaStream_t stream) {
  if (params.cache.batch == 0) return cudaSuccess;
  const cudaError_t error = launch_encode(params, stream);
  return error != cudaSuccess ? error : launch_commit(params, stream);
}

}  // namespace kivi::cuda
