/* AVX-512 with the matrix unit for attention and products in float32 and 16 bits.
 * All other kernels come from isa/avx512.c. */
#include "simd/macros.h"
#if defined(__x86_64__) && !defined(_WIN32) /* GCC's tile instructions need a long of 64 bits */
SA_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16,amx-int8", "prefer-vector-width=512")
SA_OPTIMIZE(SA_BY_HAND)
#define SA_ISA avx512 /* its types and functions are used */
#include "simd/avx512.h"
#include "simd/amx.h"
#include "isa/avx512_unit.h"
#include "kernels/products/amx_attention.h"
#include "kernels/products/amx_gradients.h"
#include "kernels/decode/decode_amx.h"

SA_DECLARE_TABLE(avx512, amx, amx)
#include "kernels/transformer/matmul_amx.h"
#include "kernels/products/compact_amx.h"

static const FN(unit) amx = {
    .replace_rows = true,
    .decode_rows = SA_AMX_DECODE_ROWS,
    .take = FN(amx_take),
    .lay_out = FN(amx_lay_out),
    .start = FN(amx_start),
    .end = FN(amx_end),
    .copy_queries = FN(amx_queries),
    .scores = FN(amx_scores),
    .may_lag = FN(amx_may_lag),
    .weights = FN(amx_weights),
    .values = FN(amx_values),
    .lay_out_gradients = FN(amx_lay_out_gradients),
    .start_gradients = FN(amx_start_gradients),
    .copy_gradients = FN(amx_copy_gradients),
    .dweights = FN(amx_dweights),
    .gradients = FN(amx_gradients),
    .lay_out_decode = FN(amx_lay_out_decode),
    .start_decode = FN(amx_start_decode),
    .decode_keys = FN(amx_decode_keys),
    .decode_tile = FN(amx_decode_tile),
};
SA_ATTENTION_KERNELS(amx, &amx)

const sa_kernels sa_kernels_amx = {
    .name = "amx",
    .f32 = SA_FILL_REAL(f32, avx512, amx, amx, SA_AMX(splits_from)),
    .f64 = SA_FILL_REAL(f64, avx512, avx512, avx512, INT_MAX),
    SA_SINGLE_ENTRIES(SA_FILL_ENTRY, avx512).gemv = {&sa_gemv_avx512vnni, &sa_gemv_avx2},
    .int8 = {&sa_int8_amx, &sa_int8_avx512vnni, &sa_int8_avx2},
    .bf16 = {&sa_bf16_amx},
};
SA_END_TARGET
#endif
