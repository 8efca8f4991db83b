/* The verbs of gemv.h on 16 lanes: AVX-512 with VNNI. */
#define SA_GEMV_LANES 16
#define SA_GEMV_ROWS 6
typedef uint32_t sa_words __attribute__((vector_size(64)));
typedef int32_t sa_ints __attribute__((vector_size(64)));
typedef float sa_floats __attribute__((vector_size(64)));

SA_VERB __m256i sa_gemv_two(const char *p, const char *q) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p)),
                                   _mm_loadu_si128((const __m128i *)(const void *)q), 1);
}
SA_VERB sa_words sa_gemv_join(const char *const *p) {
    return (sa_words)_mm512_inserti64x4(_mm512_castsi256_si512(sa_gemv_two(p[0], p[1])), sa_gemv_two(p[2], p[3]), 1);
}
SA_VERB sa_words sa_gemv_low(sa_words a, sa_words b) { return (sa_words)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
SA_VERB sa_words sa_gemv_high(sa_words a, sa_words b) { return (sa_words)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
SA_VERB sa_words sa_gemv_low_pairs(sa_words a, sa_words b) { return (sa_words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
SA_VERB sa_words sa_gemv_high_pairs(sa_words a, sa_words b) { return (sa_words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
SA_VERB sa_floats sa_gemv_half(sa_words x) { return (sa_floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x)); }
SA_VERB sa_words sa_gemv_dot(sa_words sum, sa_words q, sa_words x, const bool bytes) {
    (void)bytes;
    return (sa_words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)x);
}
SA_VERB sa_floats sa_gemv_fma(sa_floats a, sa_floats b, sa_floats c) {
    return (sa_floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
SA_VERB sa_words sa_gemv_look_up(sa_words q) {
    const char *v = (const char *)sa_quant_values, *const each[4] = {v, v, v, v};
    return (sa_words)_mm512_shuffle_epi8((__m512i)sa_gemv_join(each), (__m512i)q);
}

#include "kernels/products/gemv.h"

const sa_gemv_unit sa_gemv_avx512vnni = {.name = "avx512vnni", .leaf = sa_gemv};
