/* The AVX-512 kernels: names the instruction set, then includes the templates. Then AVX-512 with attention by products of bfloat16
 * where arrays are of that type, and with attention in float32 and 16 bits on the matrix unit of AMX. */
#include "simd/common.h"
#if defined(__x86_64__)
#if defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#include <immintrin.h> /* after the pragma: with -march=native before it, GCC would not inline its functions */
#endif
#define SA_ISA avx512
#include "simd/avx512.h"
#include "isa/templates.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))),           \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif
#undef SA_ISA
#define SA_ISA avx512bf16
#include "simd/avx512bf16.h"
#include "isa/templates_avx512bf16.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16"))),    \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16,prefer-vector-width=512")
#endif
#undef SA_ISA
#define SA_ISA amx
#include "simd/amx.h"
#include "isa/templates_amx.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
typedef int sa_no_avx512_here;
#endif
