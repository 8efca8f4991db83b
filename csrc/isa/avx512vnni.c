/* Products of int8, and of quants in decoding, by AVX512_VNNI. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", "prefer-vector-width=512")
#include "kernels/products/int8_vnni.h"
#include "kernels/products/gemv_vnni.h"
SA_END_TARGET
#endif
