// For functions that the CPU kernels and the CUDA kernels share. Functions that are constexpr need no mark: device code
// is compiled with --expt-relaxed-constexpr.
#pragma once

#if defined(__CUDACC__)
#define KIVI_HOST_DEVICE __host__ __device__
#else
#define KIVI_HOST_DEVICE
#endif
