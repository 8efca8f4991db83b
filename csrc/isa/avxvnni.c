/* Products of int8 by AVX-VNNI. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("avx2,fma,avxvnni,no-avx512f")
#include "kernels/products/int8_avxvnni.h"
SA_END_TARGET
#endif
