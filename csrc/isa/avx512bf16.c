/* AVX-512 with dot products of bfloat16, for attention on bfloat16 arrays. All other kernels come from isa/avx512.c. */
#include "simd/macros.h"
#if defined(__x86_64__)
SA_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", "prefer-vector-width=512")
SA_OPTIMIZE(SA_BY_HAND)
#define SA_ISA avx512 /* its types and functions are used */
#include "simd/avx512.h"
#include "simd/avx512bf16.h"
#include "isa/avx512_unit.h"
#include "kernels/products/bf16dot.h"
#include "kernels/products/bf16dot_gradients.h"
#include "kernels/decode/decode_bf16dot.h"

static const FN(unit) bf16dot = {
    .know_top = true,
    .decode_rows = SA_DECODE_ROWS,
    .take = FN(bf16dot_take),
    .lay_out = FN(bf16dot_lay_out),
    .start = FN(bf16dot_start),
    .end = FN(bf16dot_end),
    .copy_queries = FN(bf16dot_queries),
    .scores = FN(bf16dot_scores),
    .weights = FN(bf16dot_weights),
    .values = FN(bf16dot_values),
    .round_weights = FN(bf16dot_round),
    .lay_out_gradients = FN(bf16dot_lay_out_gradients),
    .start_gradients = FN(bf16dot_start_gradients),
    .copy_gradients = FN(bf16dot_copy_gradients),
    .dweights = FN(bf16dot_dweights),
    .tile_keys = FN(bf16dot_tile_keys),
    .gradients = FN(bf16dot_gradients),
    .lay_out_decode = FN(bf16dot_lay_out_decode),
    .start_decode = FN(bf16dot_start_decode),
    .decode_queries = FN(bf16dot_decode_queries),
    .decode_scores = FN(bf16dot_decode_scores),
    .decode_values = FN(bf16dot_decode_values),
    .decode_order = FN(bf16dot_decode_order),
};
SA_ATTENTION_KERNELS(avx512bf16, &bf16dot)
#include "kernels/products/bf16_rows.h"

SA_DECLARE_TABLE(avx512, avx512bf16, avx512)
const sa_kernels sa_kernels_avx512bf16 = {
    .name = "avx512bf16",
    .f32 = SA_FILL_REAL(f32, avx512, avx512bf16, avx512, INT_MAX),
    .f64 = SA_FILL_REAL(f64, avx512, avx512, avx512, INT_MAX),
    SA_SINGLE_ENTRIES(SA_FILL_ENTRY, avx512).gemv = {&sa_gemv_avx512vnni, &sa_gemv_avx2},
    .int8 = {&sa_int8_avx512vnni, &sa_int8_avx2},
    .bf16 = {&sa_bf16_avx512bf16},
};
SA_END_TARGET
#endif
