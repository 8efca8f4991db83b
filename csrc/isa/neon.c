/* The NEON kernels, for every aarch64 CPU. */
#include "simd/macros.h"
#if defined(__aarch64__)
#define SA_ISA neon
#define SA_VEC128_NEON
#define SA_VEC128_REGISTERS 32
#include "simd/vec128.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_neon}, .int8 = {&sa_int8_neondot, &sa_int8_neon}
#include "isa/table.h"
#include "kernels/products/int8_plain.h"
#include "kernels/products/gemv_vec128.h"
#endif
