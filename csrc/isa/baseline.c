/* The x86-64 baseline (SSE2) kernels. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("no-sse3,no-avx")
SA_OPTIMIZE("O2") /* -O3 makes larger code, no faster here */
#define SA_ISA baseline
#define SA_VEC128_SSE2
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_baseline}, .int8 = {&sa_int8_baseline}
#include "isa/table.h"
#include "kernels/products/int8_plain.h"
#include "kernels/products/gemv_vec128.h"
SA_END_TARGET
#endif
