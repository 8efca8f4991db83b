/* The verbs of gemv.h on 16 lanes: AVX-512 with VNNI. */
#include "kernels/kernels.h"
#include "simd/macros.h"

#include <immintrin.h>

#define SA_GEMV_LANES 16
#define SA_GEMV_ROWS 6
typedef uint32_t sa_words __attribute__((vector_size(64)));
typedef int32_t sa_ints __attribute__((vector_size(64)));
typedef float sa_floats __attribute__((vector_size(64)));

static const uint16_t sa_gemv_in_pairs[32]
    __attribute__((aligned(64))) = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
SA_VERB sa_words sa_gemv_pair(const char *p) {
    return (sa_words)_mm512_permutexvar_epi16(_mm512_loadu_si512(sa_gemv_in_pairs), _mm512_loadu_si512(p));
}
SA_VERB sa_floats sa_gemv_half(sa_words x) { return (sa_floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x)); }
SA_VERB sa_words sa_gemv_dot(sa_words sum, sa_words q, sa_words x, const bool bytes) {
    (void)bytes;
    return (sa_words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)x);
}
SA_VERB sa_floats sa_gemv_fma(sa_floats a, sa_floats b, sa_floats c) {
    return (sa_floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
SA_VERB sa_words sa_gemv_look_up(sa_words q) {
    const __m128i values = _mm_load_si128((const __m128i *)(const void *)sa_quant_values);
    return (sa_words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)q);
}

#include "kernels/products/gemv.h"

const sa_gemv_unit sa_gemv_avx512vnni = {.name = "avx512vnni", .leaf = sa_gemv};
