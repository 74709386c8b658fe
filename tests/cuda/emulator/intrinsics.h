// The intrinsics of device code for a host compiler, with CUDA's own names. A kernel that needs another one does not
// compile; most are a line or two here. Types, conversions and arithmetic of half and bfloat16 are CUDA's own headers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "emulator/emulator.h"

using std::max;
using std::min;

// ---- synchronisation -----------------------------------------------------------------------------

inline void __syncthreads(EMULATOR_SITE) { emulator::block_collective("__syncthreads", site, nullptr, nullptr); }

inline int __syncthreads_count(int predicate, EMULATOR_SITE) {
  int value = predicate != 0;
  emulator::block_collective("__syncthreads_count", site, &value, [](void* const* args, unsigned count) {
    int sum = 0;
    for (unsigned i = 0; i < count; i++) {
      if (args[i] != nullptr) sum += *static_cast<int*>(args[i]);
    }
    for (unsigned i = 0; i < count; i++) {
      if (args[i] != nullptr) *static_cast<int*>(args[i]) = sum;
    }
  });
  return value;
}
inline int __syncthreads_or(int predicate, EMULATOR_SITE) { return __syncthreads_count(predicate, site) != 0; }
inline int __syncthreads_and(int predicate, EMULATOR_SITE) { return __syncthreads_count(!predicate, site) == 0; }

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  emulator::warp_collective("__syncwarp", mask, site, emulator::Fence::memory, nullptr, nullptr);
}
inline void __threadfence() { emulator::memory_fence(); }
inline void __threadfence_block() { emulator::memory_fence(); }
inline void __nanosleep(unsigned) { emulator::yield(); }

// ---- shuffles and votes of a warp ----------------------------------------------------------------

namespace emulator {

template <class T>
struct Shuffle {
  T value, result;
  unsigned source;
};

// Every lane gets the value of the lane `source`. Shuffles meet but do not order memory.
template <class T>
T shuffle(const char* what, unsigned mask, T value, unsigned source, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Shuffle<T> own{value, value, source};
  warp_collective(what, mask, site, Fence::none, &own, [](void* const* args, unsigned count) {
    for (unsigned lane = 0; lane < count; lane++) {
      auto* const to = static_cast<Shuffle<T>*>(args[lane]);
      if (to == nullptr) continue;
      const auto* const from = static_cast<const Shuffle<T>*>(args[to->source]);
      if (from != nullptr) {
        std::memcpy(static_cast<void*>(&to->result), &from->value, sizeof(T));
      } else if (config().strict_source) {
        fail("shuffle: lane %u reads lane %u, which does not take part", lane, to->source);
      } else {
        std::memset(static_cast<void*>(&to->result), 0xFF, sizeof(T));
      }
    }
  });
  return own.result;
}

// The first lane of the segment of `width` lanes (a power of two) that the lane is in.
inline unsigned segment_begin(unsigned lane, int width) { return lane & ~(static_cast<unsigned>(width) - 1); }
inline unsigned segment_end(unsigned lane, int width) {
  return segment_begin(lane, width) + static_cast<unsigned>(width);
}

struct Vote {
  int predicate;
  uint32_t ballot, active;  // lanes: those whose predicate holds, those that take part
};
inline Vote vote(const char* what, unsigned mask, int predicate, Site site) {
  Vote own{predicate, 0, 0};
  warp_collective(what, mask, site, Fence::none, &own, [](void* const* args, unsigned count) {
    uint32_t ballot = 0, active = 0;
    for (unsigned lane = 0; lane < count; lane++) {
      if (args[lane] == nullptr) continue;
      active |= uint32_t{1} << lane;
      if (static_cast<Vote*>(args[lane])->predicate != 0) ballot |= uint32_t{1} << lane;
    }
    for (unsigned lane = 0; lane < count; lane++) {
      if (args[lane] == nullptr) continue;
      static_cast<Vote*>(args[lane])->ballot = ballot;
      static_cast<Vote*>(args[lane])->active = active;
    }
  });
  return own;
}

}  // namespace emulator

// Where the source would lie outside of the segment, a lane keeps its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
  const unsigned in_segment = static_cast<unsigned>(source) & (static_cast<unsigned>(width) - 1);
  const unsigned from = emulator::segment_begin(emulator::lane_id(), width) + in_segment;
  return emulator::shuffle("__shfl_sync", mask, value, from, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_SITE) {
  const unsigned lane = emulator::lane_id(), from = lane ^ static_cast<unsigned>(lane_mask);
  const bool inside = from < emulator::segment_end(lane, width);
  return emulator::shuffle("__shfl_xor_sync", mask, value, inside ? from : lane, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  const unsigned lane = emulator::lane_id(), from = lane + delta;
  const bool inside = from < emulator::segment_end(lane, width);
  return emulator::shuffle("__shfl_down_sync", mask, value, inside ? from : lane, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  const unsigned lane = emulator::lane_id();
  const bool inside = lane - emulator::segment_begin(lane, width) >= delta;
  return emulator::shuffle("__shfl_up_sync", mask, value, inside ? lane - delta : lane, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote("__ballot_sync", mask, predicate, site).ballot;
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote("__any_sync", mask, predicate, site).ballot != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  const emulator::Vote result = emulator::vote("__all_sync", mask, predicate, site);
  return result.ballot == result.active;
}
inline unsigned __activemask() { return emulator::live_lanes(); }

// ---- atomics: relaxed, as on the device ----------------------------------------------------------

namespace emulator {

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

// *p = update(*p); returns what was there.
template <class T, class Update>
T atomic_update(T* p, Update update) {
  auto* const bits = reinterpret_cast<Bits<T>*>(p);
  before_atomic(p);
  Bits<T> old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
  T value;
  do {
    std::memcpy(static_cast<void*>(&value), &old, sizeof(T));
    const T updated = update(value);
    std::memcpy(&next, &updated, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &old, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(p);
  return value;
}

}  // namespace emulator

#define EMULATOR_ATOMIC(name, expression)                                          \
  template <class T>                                                               \
  T name(T* p, std::common_type_t<T> value) {                                      \
    return emulator::atomic_update(p, [value](T old) -> T { return expression; }); \
  }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicExch, (static_cast<void>(old), value))
EMULATOR_ATOMIC(atomicMin, std::min<T>(old, value))
EMULATOR_ATOMIC(atomicMax, std::max<T>(old, value))
EMULATOR_ATOMIC(atomicAnd, old& value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef EMULATOR_ATOMIC
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return emulator::atomic_update(p, [=](T old) -> T { return old == expected ? desired : old; });
}

// ---- bits and loads ------------------------------------------------------------------------------

namespace emulator {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

}  // namespace emulator

inline float __uint_as_float(unsigned v) { return emulator::bit_cast<float>(v); }
inline float __int_as_float(int v) { return emulator::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return emulator::bit_cast<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::bit_cast<int>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v != 0 ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
// Four bytes of the eight of x and y: each nibble of the selector names one, or with 8 added the spread of its sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; i++) {
    const unsigned nibble = selector >> (4 * i) & 15;
    const unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7))) & 255;
    const unsigned sign = byte >= 128 ? 255 : 0;
    result |= (nibble >= 8 ? sign : byte) << (8 * i);
  }
  return result;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}

// ---- arithmetic: where the device approximates, this is exact to float -------------------------------

inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }

// What cuda_fp16.h and cuda_bf16.h give the device only. a * b is exact in double, so only the sum can round twice.
inline __half __hfma(__half a, __half b, __half c) {
  const double product = double{__half2float(a)} * double{__half2float(b)};
  return __double2half(product + double{__half2float(c)});
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)),
                        __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
inline __half hexp2(__half v) { return __float2half_rn(std::exp2(__half2float(v))); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  const double product = double{__bfloat162float(a)} * double{__bfloat162float(b)};
  return __double2bfloat16(product + double{__bfloat162float(c)});
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(__low2bfloat16(a), __low2bfloat16(b), __low2bfloat16(c)),
                            __hfma(__high2bfloat16(a), __high2bfloat16(b), __high2bfloat16(c)));
}
