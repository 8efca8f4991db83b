/* The kernels in plain C, for any CPU. Where each CPU has vectors only tests use them,
 * so they are compiled to be small. */
#if (defined(__x86_64__) || defined(__aarch64__) || defined(__wasm_simd128__)) && !defined(SA_PARTS_APART)
#define SA_PARTS_APART
#endif
#include "simd/macros.h"
#if defined(SA_PARTS_APART) && !defined(__clang__)
#pragma GCC optimize("Os")
#endif
#define SA_ISA generic
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_generic}, .int8 = {&sa_int8_generic}
#include "isa/table.h"
#include "kernels/products/int8_plain.h"
#include "kernels/products/gemv_vec128.h"
