/* The x86-64 baseline (SSE2) kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(__clang__)
#include <emmintrin.h>
#pragma clang attribute push(__attribute__((target("no-sse3,no-avx"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("no-sse3,no-avx")
#pragma GCC optimize("O2") /* O3 is larger, and no faster here */
#include <emmintrin.h>
#endif
#define SA_ISA baseline
#define SA_VEC128_SSE2
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#define SA_COMPACT_UNITS .int8 = {&sa_int8_baseline}
#include "isa/both_types.h"
#include "kernels/products/int8_plain.h"
#include "isa/end.h"
#endif
