/* Products of int8, and of blocks in decoding, by AVX512_VNNI. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(SA_EMULATED)
#elif defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))),           \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#include <immintrin.h>
#endif
#include "isa/table.h"
#include "kernels/products/int8_vnni.h"
#include "kernels/products/gemv_vnni.h"
#include "isa/end.h"
#endif
