/* The AVX2 + FMA kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,no-avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,no-avx512f")
#pragma GCC optimize("no-unswitch-loops,no-split-loops") /* loops that matter are unrolled by hand */
#include <immintrin.h>
#endif
#define SA_ISA avx2
#include "simd/avx2.h"
#include "kernels/products/int8_avx2.h"
#include "kernels/products/gemv_avx2.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_avx2}, .int8 = {&sa_int8_avxvnni, &sa_int8_avx2}
#include "isa/both_types.h"
#include "isa/end.h"
#endif
