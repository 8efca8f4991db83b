/* Sums of uint8 times int8 by AVX2. VPMADDUBSW would saturate, so both factors are widened to 16 bits, where VPMADDWD's
 * sums of two products are exact. The driver has widened the rows of x. Accumulators are for 6 rows × 8 columns: one
 * vector has a word (four bytes) of each of four columns, the other a row's word four times. A column's sum is in two
 * lanes until the end. */
#include "kernels/kernels.h"
#include <immintrin.h>

#include "kernels/products/by_rows.h"

#define SA_INT8_ROWS 6

/* sum += products, as assembly, which keeps sums in registers: GCC 12 spills half of them. */
#define SA_ADD_INT32(sum, products) __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products))

SA_INLINE void sa_int8_columns(const sa_compact_tile *t, ptrdiff_t c, const int rows) {
    const char *x = t->x, *panel = t->panel + c * SA_WORD;
    __m256i sum[SA_INT8_ROWS][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    }
    for (ptrdiff_t k = 0; k < t->words; ++k, x += 2 * SA_WORD, panel += SA_PANEL_COLUMNS * SA_WORD) {
        const __m256i left = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)panel));
        const __m256i right = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(panel + 16)));
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            long long word;
            memcpy(&word, x + r * t->stride, sizeof word);
            const __m256i four = _mm256_set1_epi64x(word);
            SA_ADD_INT32(sum[r][0], _mm256_madd_epi16(four, left));
            SA_ADD_INT32(sum[r][1], _mm256_madd_epi16(four, right));
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) { /* hadd returns columns 0 1 4 5 2 3 6 7 */
        const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[r][0], sum[r][1]), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)((int32_t *)t->sums + r * SA_PANEL_COLUMNS + c), both);
    }
}

SA_INLINE void sa_int8_tile(const sa_compact_tile *t, const int rows) {
    for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS; c += 8) {
        sa_int8_columns(t, c, rows);
    }
}

SA_BY_ROWS(sa_int8_widened, sa_int8_tile, SA_UP_TO_6)

const sa_compact_unit sa_int8_avx2 = {
    .name = "avx2", .most_rows = SA_INT8_ROWS, .widened = true, .leaf = sa_int8_widened};
