/* Products of bfloat16 (AVX512_BF16), summed in float32, for compact weights: accumulators for 14 rows × 32 columns.
 * Comes after simd/avx512bf16.h. */
#include "kernels/kernels.h"
#include "kernels/products/by_rows.h"

#define SA_DOT_BF16(sum, x, w) ((sum) = vf32_add_products(sum, x, w))
#define sa_pairs_zero _mm512_setzero_ps
#define sa_pairs_load _mm512_loadu_ps
#define sa_pairs_store _mm512_storeu_ps
#define sa_pairs_word(word) _mm512_castsi512_ps(_mm512_set1_epi32(word))
SA_WORDS_TILE(sa_bf16_columns, vf32, sa_pairs, SA_DOT_BF16, 14, 4096)
SA_INLINE void sa_bf16_tile(const sa_compact_tile *t, const int rows) { sa_bf16_columns(t, 0, rows); }
SA_BY_ROWS(sa_bf16, sa_bf16_tile, SA_UP_TO_14)

const sa_compact_unit sa_bf16_avx512bf16 = {.name = "avx512bf16", .most_rows = 14, .leaf = sa_bf16};
