/* Sums of uint8 times int8 by VNNI with 16 registers of 256 bits: accumulators for 6 rows × 16 columns. */
#include "kernels/kernels.h"
#include <immintrin.h>

#include "kernels/products/by_rows.h"

#define SA_DOT_INT8(sum, x, w) ((sum) = _mm256_dpbusd_avx_epi32(sum, x, w))
SA_VERB __m256i sa_256_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
SA_VERB void sa_256_store(void *p, __m256i a) { _mm256_storeu_si256((__m256i *)p, a); }
#define sa_256_zero _mm256_setzero_si256
#define sa_256_word _mm256_set1_epi32
SA_WORDS_TILE(sa_vnni_columns, __m256i, sa_256, SA_DOT_INT8, 6, 0)
SA_INLINE void sa_vnni_tile(const sa_compact_tile *t, const int rows) {
    sa_vnni_columns(t, 0, rows);
    sa_vnni_columns(t, 16, rows);
}
SA_BY_ROWS(sa_vnni, sa_vnni_tile, SA_UP_TO_6)

const sa_compact_unit sa_int8_avxvnni = {.name = "avxvnni", .most_rows = 6, .leaf = sa_vnni};
