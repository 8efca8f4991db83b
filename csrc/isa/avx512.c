/* The AVX-512 kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(SA_EMULATED)
#elif defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#pragma GCC optimize("no-unswitch-loops,no-split-loops") /* loops that matter are unrolled by hand */
#include <immintrin.h>
#endif
#define SA_ISA avx512
#include "simd/avx512.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_avx512vnni, &sa_gemv_avx2}, .int8 = {&sa_int8_avx512vnni, &sa_int8_avx2}
#include "isa/both_types.h"
#include "isa/end.h"
#endif
