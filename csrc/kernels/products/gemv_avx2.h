/* The verbs of gemv.h on 8 lanes: AVX2. */
#include "kernels/kernels.h"
#include "simd/macros.h"

#include <immintrin.h>

#define SA_GEMV_LANES 8
#define SA_GEMV_ROWS 2
typedef uint32_t sa_words __attribute__((vector_size(32)));
typedef int32_t sa_ints __attribute__((vector_size(32)));
typedef float sa_floats __attribute__((vector_size(32)));

SA_VERB sa_words sa_gemv_pair(const char *p) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)p);
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * SA_GEMV_COLUMNS));
    return (sa_words)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(low, high)),
                                             _mm_unpackhi_epi16(low, high), 1);
}
SA_VERB sa_floats sa_gemv_half(sa_words x) {
    const __m256i low = (__m256i)(x & 0xffff);
    return (sa_floats)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}

/* Pairs of products saturate at 16 bits. With 6 bits they stay below; numbers of 8 bits are split in halves. */
SA_VERB __m256i sa_gemv_pairs(sa_words q, sa_words x, short factor) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)q, (__m256i)x), _mm256_set1_epi16(factor));
}
SA_VERB sa_words sa_gemv_dot(sa_words sum, sa_words q, sa_words x, const bool bytes) {
    if (bytes) {
        sum += (sa_words)sa_gemv_pairs(q >> 4 & 0x0f0f0f0f, x, 16);
        q = q & 0x0f0f0f0f;
    }
    sum += (sa_words)sa_gemv_pairs(q, x, 1);
    __asm__("" : "+x"(sum)); /* keeps one register for each sum; GCC would keep all products, and add them in a tree */
    return sum;
}
SA_VERB sa_floats sa_gemv_fma(sa_floats a, sa_floats b, sa_floats c) {
    return (sa_floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
SA_VERB sa_words sa_gemv_look_up(sa_words q) {
    const __m128i values = _mm_load_si128((const __m128i *)(const void *)sa_quant_values);
    return (sa_words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)q);
}

#include "kernels/products/gemv.h"

const sa_gemv_unit sa_gemv_avx2 = {.name = "avx2", .leaf = sa_gemv};
