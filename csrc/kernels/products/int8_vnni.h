/* Sums of uint8 times int8 by VNNI on vectors of 512 bits: accumulators for 14 rows × 32 columns,
 * which fit 32 registers. */
#include "kernels/kernels.h"
#include <immintrin.h>

#include "kernels/products/by_rows.h"

/* Adds four products to each lane of sum. This is assembly because GCC 12 spills around the intrinsic. */
#if defined(SA_EMULATED)
#define SA_DOT_INT8(sum, x, w) ((sum) = _mm512_dpbusd_epi32(sum, x, w))
#else
#define SA_DOT_INT8(sum, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#endif

#define sa_512_zero _mm512_setzero_si512
#define sa_512_load _mm512_loadu_si512
#define sa_512_store _mm512_storeu_si512
#define sa_512_word _mm512_set1_epi32
SA_WORDS_TILE(sa_vnni_columns, __m512i, sa_512, SA_DOT_INT8, 14, 4096)
SA_INLINE void sa_vnni_tile(const sa_compact_tile *t, const int rows) { sa_vnni_columns(t, 0, rows); }
SA_BY_ROWS(sa_vnni, sa_vnni_tile, SA_UP_TO_14)

const sa_compact_unit sa_int8_avx512vnni = {.name = "avx512vnni", .most_rows = 14, .leaf = sa_vnni};
