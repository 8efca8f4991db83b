/* AVX-512 with bfloat16 dot products, for attention on bfloat16 arrays; all else is isa/avx512.c's. */
#include "simd/macros.h"
#if defined(__x86_64__)
#if defined(SA_EMULATED)
#elif defined(__clang__)
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))),           \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#pragma GCC optimize("no-unswitch-loops,no-split-loops") /* loops that matter are unrolled by hand */
#include <immintrin.h>
#endif
#define SA_ISA avx512 /* whose types and functions are used */
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
    .open = FN(bf16dot_open),
    .close = FN(bf16dot_close),
    .copy_queries = FN(bf16dot_queries),
    .scores = FN(bf16dot_scores),
    .weights = FN(bf16dot_weights),
    .values = FN(bf16dot_values),
    .round_weights = FN(bf16dot_round),
    .lay_out_gradients = FN(bf16dot_lay_out_gradients),
    .open_gradients = FN(bf16dot_open_gradients),
    .copy_gradients = FN(bf16dot_copy_gradients),
    .dweights = FN(bf16dot_dweights),
    .keys = FN(bf16dot_keys),
    .gradients = FN(bf16dot_gradients),
    .lay_out_decode = FN(bf16dot_lay_out_decode),
    .open_decode = FN(bf16dot_open_decode),
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
    SA_FILL_REST(avx512),
    .gemv = {&sa_gemv_avx512vnni, &sa_gemv_avx2},
    .int8 = {&sa_int8_avx512vnni, &sa_int8_avx2},
    .bf16 = {&sa_bf16_avx512bf16},
};
#include "isa/end.h"
#endif
