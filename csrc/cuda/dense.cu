// Quantise and dequantise in the dense form (format/params.h), to the bit as the CPU does it. Codes are dealt with
// eight at a time: these fill whole bytes at every width, so that no byte has two owners.
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/storage.h"
#include "format/codes.h"

namespace kivi::cuda {
namespace {

constexpr int kChunk = 8;  // codes

struct Division {
  int64_t quotient, rest;
};
// 64-bit division is a long subroutine.
KIVI_DEVICE Division divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const auto quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return {quotient, static_cast<uint32_t>(a) - quotient * static_cast<uint32_t>(b)};
  }
  return {a / b, a % b};
}

// Numbers [0, count) of a chunk that begins at element `at`, `stride` apart; the others become 0.
KIVI_DEVICE void load_chunk(const void* data, Element type, int64_t at, int64_t stride, int count, float (&x)[kChunk]) {
  with_element(type, [&](auto constant) {
    constexpr Element kType = decltype(constant)::value;
    const void* const from = advance(data, kType, at);
    if (stride == 1 && count == kChunk && on_16_bytes(from)) {
      constexpr int kNumbers = kNumbersOf16Bytes<kType>;
#pragma unroll
      for (int i = 0; i < kChunk; i += kNumbers) {
        float some[kNumbers];
        unpack16<kType>(*reinterpret_cast<const uint4*>(advance(from, kType, i)), some);
#pragma unroll
        for (int e = 0; e < kNumbers; e++) x[i + e] = some[e];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[i] = i < count ? load_number<kType>(from, i * stride) : 0.0f;
  });
}

// Elements [at, at + count) of a contiguous array.
KIVI_DEVICE void store_chunk(void* data, Element type, int64_t at, int count, const float (&x)[kChunk]) {
  with_element(type, [&](auto constant) {
    constexpr Element kType = decltype(constant)::value;
    auto* const to = static_cast<char*>(data) + at * element_bytes(kType);
    if (count == kChunk && on_16_bytes(to)) {
      constexpr int kNumbers = kNumbersOf16Bytes<kType>;
#pragma unroll
      for (int i = 0; i < kChunk; i += kNumbers) {
        float some[kNumbers];
#pragma unroll
        for (int e = 0; e < kNumbers; e++) some[e] = x[i + e];
        *reinterpret_cast<uint4*>(to + i * element_bytes(kType)) = pack16<kType>(some);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      if (i < count) store_number<kType>(to, i, x[i]);
    }
  });
}

// The first `count` bytes of a chunk of codes, `stride` apart.
KIVI_DEVICE void store_code_bytes(uint8_t* to, int64_t stride, int count, uint64_t codes) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (stride == 1 && count == 8 && address % 8 == 0) {
    *reinterpret_cast<uint64_t*>(to) = codes;
  } else if (stride == 1 && count == 4 && address % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(codes);
  } else if (stride == 1 && count == 2 && address % 2 == 0) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes);
  } else {
    for (int i = 0; i < count; i++) to[i * stride] = static_cast<uint8_t>(codes >> (8 * i));
  }
}
KIVI_DEVICE uint64_t load_code_bytes(const uint8_t* from, int64_t stride, int count) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (stride == 1 && count == 8 && address % 8 == 0) return *reinterpret_cast<const uint64_t*>(from);
  if (stride == 1 && count == 4 && address % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  if (stride == 1 && count == 2 && address % 2 == 0) return *reinterpret_cast<const uint16_t*>(from);
  uint64_t codes = 0;
  for (int i = 0; i < count; i++) codes |= static_cast<uint64_t>(from[i * stride]) << (8 * i);
  return codes;
}

// ---- quantise -------------------------------------------------------------------------------------

// The extremes of some numbers; infinite if one of them is not finite. Groups of these join in any order.
struct Extremes {
  float lo = bits_float(kFloatInf), hi = -bits_float(kFloatInf);

  KIVI_DEVICE void add(float x) {
    const bool good = is_finite(x);
    lo = fminf(lo, good ? x : -bits_float(kFloatInf));
    hi = fmaxf(hi, good ? x : bits_float(kFloatInf));
  }
  KIVI_DEVICE Quantizer quantizer(float top) const {
    const float span = hi - lo;
    return is_finite(span) ? Quantizer{(span + 0.0f) / top, lo + 0.0f, top} : not_finite(top);
  }
};

// Groups whose numbers lie in a row (inner = 1). `lanes` threads of a warp take a run of groups whose codes fill whole
// bytes: one group, or the few that make a multiple of 8 numbers. They go through it in chunks, first for the extremes,
// then for the codes; where a chunk is all that a thread has, it is read once.
struct RowArgs {
  QuantizeParams p;
  int64_t groups;  // of a row
  int64_t run;     // groups of a run: 1, or (then lanes is 32) 2, 4 or 8
  int64_t runs;    // of a row
  int lanes;       // a power of two
};

__global__ void __launch_bounds__(kStorageThreads, 6) quantize_rows_kernel(const KIVI_GRID_CONSTANT RowArgs a) {
  const QuantizeParams& p = a.p;
  const float top = top_code(p.bits);
  const int lane = static_cast<int>(threadIdx.x) % a.lanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kStorageThreads / a.lanes);
  const int64_t units = p.outer * a.runs, row_bytes = dense_bytes(p.n, p.bits);
  // All threads of a warp make the same steps: those without a run take part in the shuffles.
  int64_t unit = blockIdx.x * static_cast<int64_t>(kStorageThreads / a.lanes) + threadIdx.x / a.lanes;
  const int64_t first_of_warp = unit - threadIdx.x % kWarpThreads / a.lanes;
  for (int64_t warp_unit = first_of_warp; warp_unit < units; warp_unit += step, unit += step) {
    const bool active = unit < units;
    const Division at = divide(active ? unit : 0, a.runs);
    const int64_t row = at.quotient, first_group = at.rest * a.run, start = first_group * p.group_size;
    const int64_t x_row = row * p.x_outer_stride;
    const int64_t rest = p.n - start, length = a.run * p.group_size;  // of the run: all but the last have `length`
    const int64_t count = !active ? 0 : rest < length ? rest : length;
    const bool one_chunk = length <= kChunk * a.lanes && a.run == 1;
    float held[kChunk];
    float scale = 0, zero = 0;  // of the group; of a run of several: lane g has those of group g
    for (int g = 0; g < static_cast<int>(a.run); g++) {
      const int64_t begin = g * p.group_size, end = begin + p.group_size < count ? begin + p.group_size : count;
      Extremes extremes;
      for (int64_t i = begin + lane * kChunk; i < end; i += a.lanes * kChunk) {
        const int some = static_cast<int>(end - i < kChunk ? end - i : kChunk);
        load_chunk(p.x, p.type, x_row + (start + i) * p.x_n_stride, p.x_n_stride, some, held);
#pragma unroll
        for (int e = 0; e < kChunk; e++) {
          if (e < some) extremes.add(held[e]);
        }
      }
      for (int distance = a.lanes / 2; distance > 0; distance /= 2) {
        extremes.lo = fminf(extremes.lo, __shfl_xor_sync(kFullWarp, extremes.lo, distance));
        extremes.hi = fmaxf(extremes.hi, __shfl_xor_sync(kFullWarp, extremes.hi, distance));
      }
      const Quantizer q = extremes.quantizer(top);
      if (a.run == 1 || lane == g) scale = q.scale, zero = q.zero;
      if (lane == 0 && begin < end) {
        const int64_t i = row * a.groups + first_group + g;
        if (p.scale != nullptr) p.scale[i] = q.scale;
        if (p.zero != nullptr) p.zero[i] = q.zero;
      }
    }
    const Coder coder({scale, zero, top});
    for (int64_t base = 0; base < count; base += a.lanes * kChunk) {
      const int64_t i = base + lane * kChunk, left = count - i;
      const int some = static_cast<int>(left < 0 ? 0 : left < kChunk ? left : kChunk);
      if (!one_chunk) load_chunk(p.x, p.type, x_row + (start + i) * p.x_n_stride, p.x_n_stride, some, held);
      uint64_t codes = 0;
      float values[kChunk];
#pragma unroll
      for (int e = 0; e < kChunk; e++) {
        Quantizer q{scale, zero, top};
        uint32_t code = 0;
        if (a.run > 1) {  // a warp for itself: all threads are here
          const auto g = static_cast<int>(e < some ? (i + e) / p.group_size : 0);
          q.scale = __shfl_sync(kFullWarp, scale, g);
          q.zero = __shfl_sync(kFullWarp, zero, g);
          if (e < some) code = q.code(held[e]);
        } else if (e < some) {
          code = coder.code(held[e]);
        }
        codes |= static_cast<uint64_t>(code) << (p.bits * e);
        values[e] = q.value(code);
      }
      if (some == 0) continue;
      if (p.codes != nullptr) {
        uint8_t* const to = p.codes + row * row_bytes + (start + i) / kChunk * p.bits;
        store_code_bytes(to, 1, static_cast<int>(dense_bytes(some, p.bits)), codes);
      }
      if (p.values != nullptr) store_chunk(p.values, Element::kFloat32, row * p.n + start + i, some, values);
    }
  }
}

// Groups whose numbers lie side by side with those of others (inner > 1): a thread takes a run of groups of one inner
// index.
__global__ void __launch_bounds__(kStorageThreads) quantize_columns_kernel(const KIVI_GRID_CONSTANT RowArgs a) {
  const QuantizeParams& p = a.p;
  const float top = top_code(p.bits);
  const int64_t row_bytes = dense_bytes(p.n, p.bits), units = p.outer * a.runs * p.inner;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kStorageThreads;
  for (int64_t unit = blockIdx.x * static_cast<int64_t>(kStorageThreads) + threadIdx.x; unit < units; unit += step) {
    const Division inner = divide(unit, p.inner), run = divide(inner.quotient, a.runs);
    const int64_t o = run.quotient, j = inner.rest;
    const int64_t begin = run.rest * a.run * p.group_size, wanted = begin + a.run * p.group_size;
    const int64_t end = wanted < p.n ? wanted : p.n;
    const int64_t column = o * p.x_outer_stride + j * p.x_inner_stride;
    uint8_t* const codes = p.codes == nullptr ? nullptr : p.codes + o * row_bytes * p.inner + j;
    Coder coder(not_finite(top));
    Quantizer q = not_finite(top);
    int64_t group = run.rest * a.run, group_end = begin;
    for (int64_t i = begin; i < end; i += kChunk) {
      const int some = static_cast<int>(end - i < kChunk ? end - i : kChunk);
      uint64_t packed = 0;
      for (int e = 0; e < some; e++) {
        if (i + e == group_end) {
          group_end = i + e + p.group_size < p.n ? i + e + p.group_size : p.n;
          Extremes extremes;
          with_element(p.type, [&](auto type) {
#pragma unroll 4
            for (int64_t t = i + e; t < group_end; t++) {
              extremes.add(load_number<decltype(type)::value>(p.x, column + t * p.x_n_stride));
            }
          });
          q = extremes.quantizer(top);
          coder = Coder(q);
          const int64_t at = (o * a.groups + group) * p.inner + j;
          if (p.scale != nullptr) p.scale[at] = q.scale;
          if (p.zero != nullptr) p.zero[at] = q.zero;
          group++;
        }
        float x = 0;
        with_element(p.type,
                     [&](auto type) { x = load_number<decltype(type)::value>(p.x, column + (i + e) * p.x_n_stride); });
        const uint32_t code = coder.code(x);
        packed |= static_cast<uint64_t>(code) << (p.bits * e);
        if (p.values != nullptr) p.values[(o * p.n + i + e) * p.inner + j] = canonical(q.value(code));
      }
      if (codes == nullptr) continue;
      store_code_bytes(codes + i / kChunk * p.bits * p.inner, p.inner, static_cast<int>(dense_bytes(some, p.bits)),
                       packed);
    }
  }
}

// ---- dequantise ------------------------------------------------------------------------------------

// A thread takes a chunk of one inner index.
__global__ void __launch_bounds__(kStorageThreads) dequantize_kernel(const KIVI_GRID_CONSTANT DequantizeParams p) {
  const int64_t chunks = ceil_div(p.n, kChunk), units = p.outer * chunks * p.inner;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kStorageThreads;
  const uint64_t mask = (uint64_t{1} << p.bits) - 1;
  for (int64_t unit = blockIdx.x * static_cast<int64_t>(kStorageThreads) + threadIdx.x; unit < units; unit += step) {
    const Division inner = divide(unit, p.inner), chunk = divide(inner.quotient, chunks);
    const int64_t o = chunk.quotient, j = inner.rest, begin = chunk.rest * kChunk;
    const int some = static_cast<int>(p.n - begin < kChunk ? p.n - begin : kChunk);
    const uint8_t* const from =
        p.codes + o * p.codes_strides[0] + chunk.rest * p.bits * p.codes_strides[1] + j * p.codes_strides[2];
    const uint64_t codes = load_code_bytes(from, p.codes_strides[1], static_cast<int>(dense_bytes(some, p.bits)));
    const Division group = divide(begin, p.group_size);
    const float* scale =
        p.scale + o * p.scale_strides[0] + group.quotient * p.scale_strides[1] + j * p.scale_strides[2];
    const float* zero = p.zero + o * p.zero_strides[0] + group.quotient * p.zero_strides[1] + j * p.zero_strides[2];
    int64_t left = p.group_size - group.rest;  // numbers of the group
    Quantizer q{*scale, *zero, 0};
    float x[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; e++) {
      if (e < some && left == 0) {
        scale += p.scale_strides[1], zero += p.zero_strides[1];
        q = {*scale, *zero, 0};
        left = p.group_size;
      }
      left--;
      x[e] = q.value(static_cast<uint32_t>(codes >> (p.bits * e) & mask));
    }
    if (p.inner == 1) {
      store_chunk(p.out, p.type, o * p.n + begin, some, x);
    } else {
      with_element(p.type, [&](auto type) {
#pragma unroll
        for (int e = 0; e < kChunk; e++) {
          if (e < some) store_number<decltype(type)::value>(p.out, (o * p.n + begin + e) * p.inner + j, x[e]);
        }
      });
    }
  }
}

}  // namespace

cudaError_t quantize(const QuantizeParams& params, cudaStream_t stream) {
  QuantizeParams p = params;
  if (p.outer == 0 || p.n == 0 || p.inner == 0) return cudaSuccess;
  p.group_size = std::min(p.group_size, p.n);  // several groups' numbers must be a number
  RowArgs a{p, ceil_div(p.n, p.group_size), 1, 0, kWarpThreads};
  while (a.run * p.group_size % kChunk != 0) a.run *= 2;
  a.runs = ceil_div(a.groups, a.run);
  if (p.inner > 1) {
    const int64_t blocks = ceil_div(p.outer * a.runs * p.inner, kStorageThreads);
    return launch(quantize_columns_kernel, "quantize_columns", dim3(grid_blocks(blocks)), dim3(kStorageThreads), 0,
                  stream, a);
  }
  while (a.run == 1 && a.lanes > 1 && p.group_size <= a.lanes / 2 * kChunk) a.lanes /= 2;
  const int64_t blocks = ceil_div(p.outer * a.runs, kStorageThreads / a.lanes);
  return launch(quantize_rows_kernel, "quantize_rows", dim3(grid_blocks(blocks)), dim3(kStorageThreads), 0, stream, a);
}

cudaError_t dequantize(const DequantizeParams& params, cudaStream_t stream) {
  const DequantizeParams& p = params;
  if (p.outer == 0 || p.n == 0 || p.inner == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(p.outer * ceil_div(p.n, kChunk) * p.inner, kStorageThreads);
  return launch(dequantize_kernel, "dequantize", dim3(grid_blocks(blocks)), dim3(kStorageThreads), 0, stream, p);
}

}  // namespace kivi::cuda
