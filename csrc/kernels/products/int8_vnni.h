/* Sums of uint8 times int8 by VNNI on vectors of 512 bits: 14 rows × 32 columns of accumulators, and 32 registers suffice. */
#include "kernels/products/by_rows.h"

#define SA_VNNI_ROWS 14
#define SA_VNNI_AHEAD 4096 /* bytes: the panel comes from L2, or from farther */

/* Each lane of sum += four products. Assembly: GCC 12 spills around the intrinsic. */
#if defined(SA_EMULATED)
#define SA_DOT_INT8(sum, x, w) ((sum) = _mm512_dpbusd_epi32(sum, x, w))
#else
#define SA_DOT_INT8(sum, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#endif

SA_INLINE void sa_vnni_tile(const sa_compact_tile *t, const int rows) {
    const char *x = t->x, *panel = t->panel;
    __m512i sum[SA_VNNI_ROWS][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    }
    for (ptrdiff_t k = 0; k < t->words; ++k, x += SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {
        const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
        __builtin_prefetch(panel + SA_VNNI_AHEAD);
        __builtin_prefetch(panel + SA_VNNI_AHEAD + 64);
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            int32_t word;
            memcpy(&word, x + r * t->stride, sizeof word);
            const __m512i four = _mm512_set1_epi32(word);
            SA_DOT_INT8(sum[r][0], four, left);
            SA_DOT_INT8(sum[r][1], four, right);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        int32_t *to = (int32_t *)t->sums + r * SA_PANEL_COLUMNS;
        _mm512_storeu_si512(to, sum[r][0]);
        _mm512_storeu_si512(to + 16, sum[r][1]);
    }
}

SA_BY_ROWS(sa_vnni, sa_vnni_tile, SA_UP_TO_14)

const sa_compact_unit sa_int8_avx512vnni = {.name = "avx512vnni", .most_rows = SA_VNNI_ROWS, .leaf = sa_vnni};
