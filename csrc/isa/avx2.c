/* The AVX2 + FMA kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("avx2,fma,f16c,no-avx512f")
SA_OPTIMIZE(SA_BY_HAND)
#define SA_ISA avx2
#include "simd/avx2.h"
#include "kernels/products/int8_avx2.h"
#include "kernels/products/gemv_avx2.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_avx2}, .int8 = {&sa_int8_avxvnni, &sa_int8_avx2}
#include "isa/table.h"
SA_END_TARGET
#endif
