/* Products of int8 by AVX-VNNI. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(SA_EMULATED) /* csrc/tests/emulated */
#elif defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni,no-avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni,no-avx512f")
#include <immintrin.h>
#endif
#include "isa/table.h"
#include "kernels/products/int8_avxvnni.h"
#include "isa/end.h"
#endif
