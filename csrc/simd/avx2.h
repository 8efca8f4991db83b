/* The verbs of kernels/README.md for AVX2 with FMA. In lane masks the bits of a lane are all ones or all zeros. */
#include "simd/macros.h"

#include <immintrin.h>

#define SA_FMA_IS_FUSED 1
#define SA_VECTOR_REGISTERS 16
/* Keeps a vector in its register: GCC would load it again. */
#define SA_HOLD(vector) __asm__("" : "+x"(vector))

typedef __m256 vf32;
typedef __m256d vf64;
typedef __m256 mf32;
typedef __m256d mf64;
typedef __m256i vu32;

static const int32_t sa_avx2_prefix_masks[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
SA_VERB __m256i sa_avx2_prefix_f32(int n) {
    return _mm256_loadu_si256((const __m256i *)(sa_avx2_prefix_masks + 8 - n));
}
SA_VERB __m256i sa_avx2_prefix_f64(int n) {
    return _mm256_loadu_si256((const __m256i *)(sa_avx2_prefix_masks + 8 - 2 * n));
}

/* Verbs that are one instruction for either type: t is f32 or f64, and the instruction's name ends in ps or pd. */
#define SA_AVX2_VERBS(t, real, ps)                                                                                     \
    SA_VERB v##t v##t##_load(const real *p) { return _mm256_loadu_##ps(p); }                                           \
    SA_VERB void v##t##_store(real *p, v##t a) { _mm256_storeu_##ps(p, a); }                                           \
    SA_VERB v##t v##t##_load_n(const real *p, int n) { return _mm256_maskload_##ps(p, sa_avx2_prefix_##t(n)); }        \
    SA_VERB void v##t##_store_n(real *p, v##t a, int n) { _mm256_maskstore_##ps(p, sa_avx2_prefix_##t(n), a); }        \
    SA_VERB v##t v##t##_set1(real x) { return _mm256_set1_##ps(x); }                                                   \
    SA_VERB v##t v##t##_fma(v##t a, v##t b, v##t c) { return _mm256_fmadd_##ps(a, b, c); }                             \
    SA_VERB v##t v##t##_max(v##t a, v##t b) { return _mm256_max_##ps(a, b); }                                          \
    SA_VERB v##t v##t##_min(v##t a, v##t b) { return _mm256_min_##ps(a, b); }                                          \
    SA_VERB v##t v##t##_abs(v##t a) { return _mm256_andnot_##ps(_mm256_set1_##ps(-(real)0.0), a); }                    \
    SA_VERB v##t v##t##_sqrt(v##t a) { return _mm256_sqrt_##ps(a); }                                                   \
    SA_VERB v##t v##t##_copysign(v##t a, v##t s) {                                                                     \
        const v##t sign = _mm256_set1_##ps(-(real)0.0);                                                                \
        return _mm256_or_##ps(_mm256_andnot_##ps(sign, a), _mm256_and_##ps(sign, s));                                  \
    }                                                                                                                  \
    SA_VERB m##t v##t##_lt(v##t a, v##t b) { return _mm256_cmp_##ps(a, b, _CMP_LT_OQ); }                               \
    SA_VERB m##t v##t##_not_lt(v##t a, v##t b) { return _mm256_cmp_##ps(a, b, _CMP_NLT_UQ); }                          \
    SA_VERB m##t v##t##_eq(v##t a, v##t b) { return _mm256_cmp_##ps(a, b, _CMP_EQ_OQ); }                               \
    SA_VERB m##t v##t##_both(m##t a, m##t b) { return _mm256_and_##ps(a, b); }                                         \
    SA_VERB v##t v##t##_select(m##t m, v##t yes, v##t no) { return _mm256_blendv_##ps(no, yes, m); }                   \
    SA_VERB v##t v##t##_zero_unless(m##t m, v##t a) { return _mm256_and_##ps(m, a); }                                  \
    SA_VERB int v##t##_any(m##t m) { return _mm256_movemask_##ps(m) != 0; }

#define SA_F32_LANES 8
SA_AVX2_VERBS(f32, float, ps)
SA_VERB mf32 vf32_words_ge(const uint32_t *w, uint32_t t) {
    __m256i a = _mm256_loadu_si256((const __m256i *)w);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(a, _mm256_set1_epi32((int)t)), a));
}
SA_VERB mf32 vf32_bit(const uint32_t *w, int i) {
    const __m256i bit = _mm256_set1_epi32((int)(UINT32_C(1) << i));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)w), bit), bit));
}
SA_VERB vf32 vf32_of_int32(const int32_t *p) {
    return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
SA_VERB vf32 vf32_of_bits(const uint8_t *p, int shift, int mask) {
    const __m128i bits = _mm_srl_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p), _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(bits, _mm_set1_epi8((char)mask))));
}
#define SA_HAS_HALVES 1
SA_VERB float sa_of_half(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
SA_VERB void vf32_store_bytes(uint8_t *p, vf32 a) {
    const __m256i x = _mm256_cvtps_epi32(a);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(words, words));
}
SA_VERB vf32 vf32_power(vf32 t) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)); }
SA_ORDER_VERBS_8(vf32)
#define SA_HAS_TRANSPOSE 1
SA_VERB void vf32_transpose(vf32 *a) {
    __m256 b[8];
    SA_UNROLL
    for (int i = 0; i < 8; i += 4) { /* transposes 4×4 in each half */
        const __m256 low = _mm256_unpacklo_ps(a[i], a[i + 1]), low2 = _mm256_unpacklo_ps(a[i + 2], a[i + 3]);
        const __m256 high = _mm256_unpackhi_ps(a[i], a[i + 1]), high2 = _mm256_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i] = _mm256_shuffle_ps(low, low2, 0x44);
        b[i + 1] = _mm256_shuffle_ps(low, low2, 0xEE);
        b[i + 2] = _mm256_shuffle_ps(high, high2, 0x44);
        b[i + 3] = _mm256_shuffle_ps(high, high2, 0xEE);
    }
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        a[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
/* Unlike even and odd, hadd does not move lanes between halves. */
#define SA_HAS_SUM_EACH 1
SA_VERB vf32 vf32_sum_each(const vf32 *a) {
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}
#define SA_HAS_BF16_PAIRS 1
#define SA_HAS_F16_LOADS 1
SA_VERB vf32 vf32_even_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
SA_VERB vf32 vf32_odd_bf16(const void *p) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), high));
}
SA_VERB vf32 vf32_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

#define SA_F64_LANES 4
SA_AVX2_VERBS(f64, double, pd)
SA_VERB mf64 vf64_words_ge(const uint32_t *w, uint32_t t) {
    __m128i a = _mm_loadu_si128((const __m128i *)w);
    return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_cmpeq_epi32(_mm_max_epu32(a, _mm_set1_epi32((int)t)), a)));
}
SA_VERB mf64 vf64_bit(const uint32_t *w, int i) {
    const __m128i bit = _mm_set1_epi32((int)(UINT32_C(1) << i));
    const __m128i set = _mm_cmpeq_epi32(_mm_and_si128(_mm_loadu_si128((const __m128i *)w), bit), bit);
    return _mm256_castsi256_pd(_mm256_cvtepi32_epi64(set));
}
SA_VERB vf64 vf64_power(vf64 t) { return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(t), 52)); }
SA_ORDER_VERBS_4(vf64)
SA_VERB vf64 vf64_sum_each(const vf64 *a) {
    const __m256d low = _mm256_hadd_pd(a[0], a[1]), high = _mm256_hadd_pd(a[2], a[3]);
    return _mm256_permute2f128_pd(low, high, 0x20) + _mm256_permute2f128_pd(low, high, 0x31);
}

#define SA_U32_LANES 8
SA_VERB vu32 vu32_load(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
SA_VERB void vu32_store(uint32_t *p, vu32 a) { _mm256_storeu_si256((__m256i *)p, a); }
SA_VERB vu32 vu32_set1(uint32_t x) { return _mm256_set1_epi32((int)x); }
SA_VERB uint32_t vu32_nonzero_bytes(const char *p) {
    const __m256i zero =
        _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)p), _mm256_setzero_si256());
    return ~(uint32_t)_mm256_movemask_epi8(zero);
}
SA_VERB vu32 vu32_xor(vu32 a, vu32 b) { return _mm256_xor_si256(a, b); }
SA_VERB vu32 vu32_rotate(vu32 a, int n) {
    return _mm256_or_si256(_mm256_slli_epi32(a, n), _mm256_srli_epi32(a, 32 - n));
}
SA_VERB vu32 vu32_mul_lo(vu32 a, vu32 b) { return _mm256_mullo_epi32(a, b); }
SA_VERB vu32 vu32_mul_hi(vu32 a, vu32 b) {
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(even, odd, 0xAA);
}
