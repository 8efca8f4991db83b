/* Sums of uint8 times int8 by VNNI on vectors of 256 bits, of which there are 16: 6 rows × 16 columns of accumulators. */
#include "kernels/products/by_rows.h"

#define SA_VNNI_ROWS 6

SA_INLINE void sa_vnni_columns(const sa_compact_tile *t, ptrdiff_t c, const int rows) {
    const char *x = t->x, *panel = t->panel + c * SA_WORD;
    __m256i sum[SA_VNNI_ROWS][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    }
    for (ptrdiff_t k = 0; k < t->words; ++k, x += SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {
        const __m256i left = _mm256_loadu_si256((const __m256i *)(const void *)panel);
        const __m256i right = _mm256_loadu_si256((const __m256i *)(const void *)(panel + 32));
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            int32_t word;
            memcpy(&word, x + r * t->stride, sizeof word);
            const __m256i four = _mm256_set1_epi32(word);
            sum[r][0] = _mm256_dpbusd_avx_epi32(sum[r][0], four, left);
            sum[r][1] = _mm256_dpbusd_avx_epi32(sum[r][1], four, right);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        int32_t *to = (int32_t *)t->sums + r * SA_PANEL_COLUMNS + c;
        _mm256_storeu_si256((__m256i *)(void *)to, sum[r][0]);
        _mm256_storeu_si256((__m256i *)(void *)(to + 8), sum[r][1]);
    }
}

SA_INLINE void sa_vnni_tile(const sa_compact_tile *t, const int rows) {
    sa_vnni_columns(t, 0, rows);
    sa_vnni_columns(t, 16, rows);
}

SA_BY_ROWS(sa_vnni, sa_vnni_tile, SA_UP_TO_6)

const sa_compact_unit sa_int8_avxvnni = {.name = "avxvnni", .most_rows = SA_VNNI_ROWS, .leaf = sa_vnni};
