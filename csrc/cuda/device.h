// What kernels include: the CUDA toolkit under nvcc; under a host compiler the emulator of tests/cuda/emulator, which
// runs the threads of a block as fibers. Kernels must keep to what both offer: no <<<>>> (use launch), no inline
// assembly but in the wrappers below, shared memory by KIVI_SHARED and SharedCarver only, full masks.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#define KIVI_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define KIVI_DEVICE __device__ __forceinline__
#define KIVI_GRID_CONSTANT __grid_constant__

#else

#include <tuple>
#include <type_traits>

#include "emulator/tensor_core.h"

// A reference to this block's own copy of the array.
#define KIVI_SHARED(type, name, ...)                                                      \
  using name##_shared_type = type __VA_ARGS__;                                            \
  name##_shared_type& name = *static_cast<name##_shared_type*>(::emulator::static_shared( \
      [] {                                                                                \
        static char key;                                                                  \
        return static_cast<const void*>(&key);                                            \
      }(),                                                                                \
      sizeof(name##_shared_type), alignof(name##_shared_type)))
#define KIVI_DEVICE inline
#define KIVI_GRID_CONSTANT

#endif

namespace kivi::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
inline constexpr int kWarpThreads = 32;

// What a kernel cannot go on without, and the host could not check without waiting for the device: for example that the
// block table has a page for the tokens that a captured graph appends. Ends the kernel with an error of the launch.
KIVI_DEVICE void device_check(bool condition, const char* message) {
  if (condition) return;
#if defined(__CUDA_ARCH__)
  printf("Kivi: %s (block %u, %u, %u, thread %u)\n", message, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  __trap();
#elif !defined(__CUDACC__)
  ::emulator::fail("%s", message);
#else
  (void)message;
#endif
}

// Splits the dynamic shared allocation into arrays on 16 bytes. All threads must take the same pieces in order.
class SharedCarver {
 public:
  template <class T>
  KIVI_DEVICE T* take(size_t count) {
    offset_ = (offset_ + 15) / 16 * 16;
    const size_t begin = offset_;
    offset_ += count * sizeof(T);
#if defined(__CUDA_ARCH__)
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    return reinterpret_cast<T*>(dynamic_shared + begin);
#elif defined(__CUDACC__)
    return reinterpret_cast<T*>(begin);  // nvcc's host pass: never called
#else
    return static_cast<T*>(::emulator::carve_shared(index_++, begin, count * sizeof(T), 16));
#endif
  }

 private:
  size_t offset_ = 0;
#if !defined(__CUDACC__)
  unsigned index_ = 0;
#endif
};

// Launches a kernel; the error is the launch's own. `name` is for the emulator's messages.
template <class... KernelArgs, class... Args>
cudaError_t launch(void (*kernel)(KernelArgs...), const char* name, dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, const Args&... args) {
#if defined(__CUDACC__)
  (void)name;
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<KernelArgs>(args)...);
  return cudaGetLastError();
#else
  (void)stream;
  ::emulator::submit({name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes},
                     [kernel, kept = std::tuple<std::decay_t<KernelArgs>...>(static_cast<KernelArgs>(args)...)] {
                       std::apply(kernel, kept);
                     });
  return cudaSuccess;
#endif
}

// ---- registers and arithmetic --------------------------------------------------------------------

// 2^x to 2 ulp; results below 2^-126 are 0.
KIVI_DEVICE float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return exp2f(x);
#endif
}

// Keeps a value that the compiler would otherwise compute anew wherever it is used.
KIVI_DEVICE void keep_in_register(int& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(x));
#else
  (void)x;
#endif
}
KIVI_DEVICE void keep_in_register(float& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+f"(x));
#else
  (void)x;
#endif
}

// ---- cp.async ------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory; bytes from `valid` on are zeroed and not read.
KIVI_DEVICE void cp_async16(void* shared, const void* global, unsigned valid = 16) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(valid)
      : "memory");
#elif !defined(__CUDACC__)
  ::emulator::async_copy(shared, global, 16, valid);
#endif
}
KIVI_DEVICE void cp_async8(void* shared, const void* global, unsigned valid = 8) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(valid)
      : "memory");
#elif !defined(__CUDACC__)
  ::emulator::async_copy(shared, global, 8, valid);
#endif
}
KIVI_DEVICE void cp_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#elif !defined(__CUDACC__)
  ::emulator::async_commit();
#endif
}
// Waits until at most N of this thread's groups are pending.
template <int N>
KIVI_DEVICE void cp_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#elif !defined(__CUDACC__)
  ::emulator::async_wait(N);
#endif
}

// ---- tensor cores --------------------------------------------------------------------------------

#if defined(__CUDACC__)

// d = a * b + c, PTX ISA mma.m16n8k16; T is __half or __nv_bfloat16.
template <class T>
KIVI_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]);

#define KIVI_MMA(T, ptx_type)                                                                                        \
  template <>                                                                                                        \
  KIVI_DEVICE void mma_m16n8k16<T>(float(&d)[4], const uint32_t(&a)[4], const uint32_t(&b)[2], const float(&c)[4]) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ptx_type "." ptx_type                                               \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};\n"                                           \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),         \
          "f"(c[3]));                                                                                                \
  }
KIVI_MMA(__half, "f16")
KIVI_MMA(__nv_bfloat16, "bf16")
#undef KIVI_MMA

// Four 8x8 matrices of 16-bit numbers: lanes 8i to 8i+7 give the rows of matrix i, 16 bytes each.
KIVI_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}
KIVI_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

#else

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4], EMULATOR_SITE) {
  ::emulator::mma_m16n8k16<T>(d, a, b, c, site);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMULATOR_SITE) { ::emulator::ldmatrix(r, row, false, site); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMULATOR_SITE) {
  ::emulator::ldmatrix(r, row, true, site);
}

#endif

}  // namespace kivi::cuda
