/* Sums of products of bfloat16 (AVX512_BF16) in float32, for compact weights: 14 rows × 32 columns of accumulators. */
#include "kernels/products/by_rows.h"

#define SA_BF16_ROWS 14
#define SA_BF16_AHEAD 4096 /* bytes: the panel comes from L2, or from farther */

SA_INLINE void sa_bf16_tile(const sa_compact_tile *t, const int rows) {
    const char *x = t->x, *panel = t->panel;
    vf32 sum[SA_BF16_ROWS][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = vf32_set1(0);
    }
    for (ptrdiff_t k = 0; k < t->words; ++k, x += SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {
        const vf32 left = vf32_load((const float *)(const void *)panel),
                   right = vf32_load((const float *)(const void *)panel + 16);
        __builtin_prefetch(panel + SA_BF16_AHEAD);
        __builtin_prefetch(panel + SA_BF16_AHEAD + 64);
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            float pair;
            memcpy(&pair, x + r * t->stride, sizeof pair);
            sum[r][0] = vf32_add_products(sum[r][0], vf32_set1(pair), left);
            sum[r][1] = vf32_add_products(sum[r][1], vf32_set1(pair), right);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        float *to = (float *)t->sums + r * SA_PANEL_COLUMNS;
        vf32_store(to, sum[r][0]);
        vf32_store(to + 16, sum[r][1]);
    }
}

SA_BY_ROWS(sa_bf16, sa_bf16_tile, SA_UP_TO_14)

const sa_compact_unit sa_bf16_avx512bf16 = {.name = "avx512bf16", .most_rows = SA_BF16_ROWS, .leaf = sa_bf16};
