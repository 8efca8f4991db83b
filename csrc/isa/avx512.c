/* The AVX-512 kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl", "prefer-vector-width=512")
SA_OPTIMIZE(SA_BY_HAND)
#define SA_ISA avx512
#include "simd/avx512.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_avx512vnni, &sa_gemv_avx2}, .int8 = {&sa_int8_avx512vnni, &sa_int8_avx2}
#include "isa/table.h"
SA_END_TARGET
#endif
