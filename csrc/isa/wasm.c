/* The kernels of WebAssembly's 128-bit vectors. Their results have the bits of baseline's. */
#include "simd/macros.h"
#if defined(__wasm_simd128__)
#define SA_ISA wasm
#define SA_VEC128_WASM
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#define SA_COMPACT_UNITS .gemv = {&sa_gemv_wasm}, .int8 = {&sa_int8_wasm}
#include "isa/table.h"
#include "kernels/products/int8_plain.h"
#include "kernels/products/gemv_vec128.h"
#endif
