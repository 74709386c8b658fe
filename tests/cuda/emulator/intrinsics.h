// Device intrinsics for host compilation. Add what a kernel needs; each one is a line or two.
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
  emulator::block_collective("__syncthreads_count", site, &value, [](void* const* args, unsigned n) {
    int sum = 0;
    for (unsigned i = 0; i < n; ++i) sum += args[i] ? *static_cast<int*>(args[i]) : 0;
    for (unsigned i = 0; i < n; ++i)
      if (args[i]) *static_cast<int*>(args[i]) = sum;
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

// ---- warp shuffles and votes ---------------------------------------------------------------------

namespace emulator {

template <class T>
struct Shuffle {
  T value, result;
  unsigned source;
};

// `source` names the lane to read; every participating lane's value is in place when combine runs.
template <class T>
T shuffle(const char* what, unsigned mask, T value, unsigned source, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Shuffle<T> s{value, value, source};
  warp_collective(what, mask, site, Fence::none, &s, [](void* const* args, unsigned n) {
    for (unsigned i = 0; i < n; ++i) {
      auto* self = static_cast<Shuffle<T>*>(args[i]);
      if (!self) continue;
      auto* from = static_cast<const Shuffle<T>*>(args[self->source]);
      if (from)
        std::memcpy(static_cast<void*>(&self->result), &from->value, sizeof(T));
      else if (config().strict_source)
        fail("shuffle: lane %u reads lane %u, which does not take part", i, self->source);
      else
        std::memset(static_cast<void*>(&self->result), 0xff, sizeof(T));
    }
  });
  return s.result;
}
inline unsigned segment_base(unsigned lane, int width) { return lane & ~unsigned(width - 1); }

template <class R, class F>
R vote(const char* what, unsigned mask, int predicate, Site site, F result) {
  struct Vote {
    int predicate;
    uint32_t ballot, active;
  } v{predicate, 0, 0};
  warp_collective(what, mask, site, Fence::none, &v, [](void* const* args, unsigned n) {
    uint32_t ballot = 0, active = 0;
    for (unsigned i = 0; i < n; ++i)
      if (auto* a = static_cast<Vote*>(args[i])) {
        active |= 1u << i;
        ballot |= uint32_t(a->predicate != 0) << i;
      }
    for (unsigned i = 0; i < n; ++i)
      if (auto* a = static_cast<Vote*>(args[i])) a->ballot = ballot, a->active = active;
  });
  return result(v.ballot, v.active);
}

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
  unsigned base = emulator::segment_base(emulator::lane_id(), width);
  return emulator::shuffle("__shfl_sync", mask, value, base + (unsigned(source) & unsigned(width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_SITE) {
  unsigned lane = emulator::lane_id(), source = lane ^ unsigned(lane_mask);
  if (source >= emulator::segment_base(lane, width) + unsigned(width)) source = lane;
  return emulator::shuffle("__shfl_xor_sync", mask, value, source, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  unsigned lane = emulator::lane_id(), source = lane + delta;
  if (source >= emulator::segment_base(lane, width) + unsigned(width)) source = lane;
  return emulator::shuffle("__shfl_down_sync", mask, value, source, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  unsigned lane = emulator::lane_id(), base = emulator::segment_base(lane, width);
  return emulator::shuffle("__shfl_up_sync", mask, value, lane - base < delta ? lane : lane - delta, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote<unsigned>("__ballot_sync", mask, predicate, site, [](uint32_t b, uint32_t) { return b; });
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote<int>("__any_sync", mask, predicate, site, [](uint32_t b, uint32_t) { return b != 0; });
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::vote<int>("__all_sync", mask, predicate, site, [](uint32_t b, uint32_t a) { return b == a; });
}
inline unsigned __activemask() { return emulator::live_lanes(); }

// ---- atomics: relaxed, as on the device ----------------------------------------------------------

namespace emulator {
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
template <class T, class F>
T atomic_update(T* p, F update) {
  auto* bits = reinterpret_cast<Bits<T>*>(p);
  before_atomic(p);
  Bits<T> old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
  T value;
  do {
    std::memcpy(static_cast<void*>(&value), &old, sizeof(T));
    T updated = update(value);
    std::memcpy(&next, &updated, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &old, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(p);
  return value;
}
}  // namespace emulator

#define EMULATOR_ATOMIC(NAME, EXPRESSION)                                      \
  template <class T>                                                           \
  T NAME(T* p, std::common_type_t<T> v) {                                      \
    return emulator::atomic_update(p, [v](T old) -> T { return EXPRESSION; }); \
  }
EMULATOR_ATOMIC(atomicAdd, old + v)
EMULATOR_ATOMIC(atomicSub, old - v)
EMULATOR_ATOMIC(atomicExch, (void(old), v))
EMULATOR_ATOMIC(atomicMin, std::min<T>(old, v))
EMULATOR_ATOMIC(atomicMax, std::max<T>(old, v))
EMULATOR_ATOMIC(atomicAnd, old& v)
EMULATOR_ATOMIC(atomicOr, old | v)
EMULATOR_ATOMIC(atomicXor, old ^ v)
EMULATOR_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef EMULATOR_ATOMIC
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return emulator::atomic_update(p, [=](T old) -> T { return old == expected ? desired : old; });
}

// ---- bits, loads, math ---------------------------------------------------------------------------

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
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return unsigned((uint64_t(hi) << 32 | lo) >> (s & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned s = selector >> 4 * i & 15, b = unsigned(bytes >> 8 * (s & 7)) & 255;
    r |= (s & 8 ? (b & 128 ? 255u : 0u) : b) << 8 * i;
  }
  return r;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}

inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }

// cuda_fp16.h and cuda_bf16.h give the host conversions, comparisons, add, sub, mul and div, but not these.
// a*b is exact in double, so only the sum can round twice.
inline __half __hfma(__half a, __half b, __half c) {
  return __double2half(double(__half2float(a)) * double(__half2float(b)) + double(__half2float(c)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)),
                        __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
inline __half hexp2(__half v) { return __float2half_rn(std::exp2(__half2float(v))); }
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(double(__bfloat162float(a)) * double(__bfloat162float(b)) + double(__bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(__low2bfloat16(a), __low2bfloat16(b), __low2bfloat16(c)),
                            __hfma(__high2bfloat16(a), __high2bfloat16(b), __high2bfloat16(c)));
}
