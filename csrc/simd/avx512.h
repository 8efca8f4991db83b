/* The verbs of kernels/README.md for AVX-512 (F, BW, DQ, VL). */
#include "simd/macros.h"

#include <immintrin.h>

#define SA_FMA_IS_FUSED 1
#define SA_VECTOR_REGISTERS 32

typedef __m512 vf32;
typedef __m512d vf64;
typedef __mmask16 mf32;
typedef __mmask8 mf64;
typedef __m512i vu32;

/* Verbs that are one instruction for either type: t is f32 or f64, and the instruction's name ends in ps or pd. */
#define SA_AVX512_VERBS(t, real, ps)                                                                                   \
    SA_VERB v##t v##t##_load(const real *p) { return _mm512_loadu_##ps(p); }                                           \
    SA_VERB void v##t##_store(real *p, v##t a) { _mm512_storeu_##ps(p, a); }                                           \
    SA_VERB v##t v##t##_load_n(const real *p, int n) { return _mm512_maskz_loadu_##ps((m##t)((1u << n) - 1), p); }     \
    SA_VERB void v##t##_store_n(real *p, v##t a, int n) { _mm512_mask_storeu_##ps(p, (m##t)((1u << n) - 1), a); }      \
    SA_VERB v##t v##t##_set1(real x) { return _mm512_set1_##ps(x); }                                                   \
    SA_VERB v##t v##t##_fma(v##t a, v##t b, v##t c) { return _mm512_fmadd_##ps(a, b, c); }                             \
    SA_VERB v##t v##t##_max(v##t a, v##t b) { return _mm512_max_##ps(a, b); }                                          \
    SA_VERB v##t v##t##_min(v##t a, v##t b) { return _mm512_min_##ps(a, b); }                                          \
    SA_VERB v##t v##t##_abs(v##t a) { return _mm512_abs_##ps(a); }                                                     \
    SA_VERB v##t v##t##_sqrt(v##t a) { return _mm512_sqrt_##ps(a); }                                                   \
    SA_VERB v##t v##t##_copysign(v##t a, v##t s) {                                                                     \
        return _mm512_or_##ps(_mm512_abs_##ps(a), _mm512_and_##ps(s, _mm512_set1_##ps(-(real)0.0)));                   \
    }                                                                                                                  \
    SA_VERB m##t v##t##_lt(v##t a, v##t b) { return _mm512_cmp_##ps##_mask(a, b, _CMP_LT_OQ); }                        \
    SA_VERB m##t v##t##_not_lt(v##t a, v##t b) { return _mm512_cmp_##ps##_mask(a, b, _CMP_NLT_UQ); }                   \
    SA_VERB m##t v##t##_eq(v##t a, v##t b) { return _mm512_cmp_##ps##_mask(a, b, _CMP_EQ_OQ); }                        \
    SA_VERB m##t v##t##_both(m##t a, m##t b) { return (m##t)(a & b); }                                                 \
    SA_VERB v##t v##t##_select(m##t m, v##t yes, v##t no) { return _mm512_mask_blend_##ps(m, no, yes); }               \
    SA_VERB v##t v##t##_zero_unless(m##t m, v##t a) { return _mm512_maskz_mov_##ps(m, a); }                            \
    SA_VERB int v##t##_any(m##t m) { return m != 0; }

#define SA_F32_LANES 16
SA_AVX512_VERBS(f32, float, ps)
SA_VERB mf32 vf32_words_ge(const uint32_t *w, uint32_t t) {
    return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(w), _mm512_set1_epi32((int)t));
}
SA_VERB mf32 vf32_bit(const uint32_t *w, int i) {
    return _mm512_test_epi32_mask(_mm512_loadu_si512(w), _mm512_set1_epi32((int)(UINT32_C(1) << i)));
}
SA_VERB vf32 vf32_of_int32(const int32_t *p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
SA_VERB vf32 vf32_of_bits(const uint8_t *p, int shift, int mask) {
    const __m128i bits = _mm_srl_epi16(_mm_loadu_si128((const __m128i *)(const void *)p), _mm_cvtsi32_si128(shift));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(bits, _mm_set1_epi8((char)mask))));
}
#define SA_HAS_HALVES 1
SA_VERB float sa_of_half(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
SA_VERB void vf32_store_bytes(uint8_t *p, vf32 a) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
SA_VERB vf32 vf32_power(vf32 t) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23)); }
SA_ORDER_VERBS_16(vf32)
/* Shuffles inside quarters and then of quarters need no indices. */
#define SA_HAS_SUM_EACH 1
SA_VERB __m512 sa_add_quarters(__m512 a, __m512 b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}
SA_VERB vf32 vf32_sum_each(const vf32 *a) {
    __m512d two[8];
    __m512 four[4];
    SA_UNROLL
    for (int i = 0; i < 8; ++i) {
        two[i] =
            _mm512_castps_pd(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]) + _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        four[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(two[2 * i], two[2 * i + 1])) +
                  _mm512_castpd_ps(_mm512_unpackhi_pd(two[2 * i], two[2 * i + 1]));
    }
    return sa_add_quarters(sa_add_quarters(four[0], four[1]), sa_add_quarters(four[2], four[3]));
}
/* Transposes 4×4 in each quarter, and then the quarters. */
#define SA_HAS_TRANSPOSE 1
SA_VERB void vf32_transpose(vf32 *a) {
    vf32 b[16];
    SA_UNROLL
    for (int i = 0; i < 16; i += 4) {
        const __m512d x = _mm512_castps_pd(_mm512_unpacklo_ps(a[i], a[i + 1]));
        const __m512d y = _mm512_castps_pd(_mm512_unpackhi_ps(a[i], a[i + 1]));
        const __m512d z = _mm512_castps_pd(_mm512_unpacklo_ps(a[i + 2], a[i + 3]));
        const __m512d w = _mm512_castps_pd(_mm512_unpackhi_ps(a[i + 2], a[i + 3]));
        b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, z));
        b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, z));
        b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(y, w));
        b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(y, w));
    }
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m512 x = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), y = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        const __m512 z = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88),
                     w = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        a[i] = _mm512_shuffle_f32x4(x, z, 0x88);
        a[i + 4] = _mm512_shuffle_f32x4(y, w, 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(x, z, 0xdd);
        a[i + 12] = _mm512_shuffle_f32x4(y, w, 0xdd);
    }
}
/* Loads join quarters of four rows, so that only the 4×4 in each quarter must be transposed. */
#define SA_HAS_TRANSPOSED_LOADS 1
SA_VERB __m512 sa_four_quarters(const float *x, ptrdiff_t stride) {
    const __m512 first = _mm512_castps128_ps512(_mm_loadu_ps(x));
    const __m512 two = _mm512_insertf32x4(first, _mm_loadu_ps(x + 4 * stride), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(two, _mm_loadu_ps(x + 8 * stride), 2), _mm_loadu_ps(x + 12 * stride),
                              3);
}
SA_VERB void vf32_load_transposed(const float *x, ptrdiff_t stride, vf32 *to) {
    const __m512 a = sa_four_quarters(x, stride), b = sa_four_quarters(x + stride, stride);
    const __m512 c = sa_four_quarters(x + 2 * stride, stride), d = sa_four_quarters(x + 3 * stride, stride);
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    const __m512d ab_hi = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)),
                  cd_hi = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    to[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
    to[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    to[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_hi, cd_hi));
    to[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_hi, cd_hi));
}
#define SA_HAS_BF16_PAIRS 1
#define SA_HAS_F16_LOADS 1
SA_VERB vf32 vf32_even_bf16(const void *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
SA_VERB vf32 vf32_odd_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
SA_VERB vf32 vf32_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
/* rounds as sa_f16_of_float and sa_bf16_of_float do */
#define SA_HAS_16_BIT_STORES 1
SA_VERB void vf32_store_f16(char *p, vf32 x) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SA_VERB void vf32_store_bf16(char *p, vf32 x) {
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i nearest =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, nearest, quiet)));
}
/* n 16-bit numbers, then zeros, as 16 pairs of neighbours. */
SA_VERB vf32 vf32_load_pairs(const char *row, ptrdiff_t n) {
    return _mm512_castsi512_ps(n >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << n) - 1, row));
}
/* 16 pairs of a number of each row; rows have n and m numbers, then zeros. */
SA_VERB vf32 vf32_zip_pairs(const char *row, ptrdiff_t n, const char *other, ptrdiff_t m) {
    const __m512i a =
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)(n >= 16 ? 0xffff : (1 << n) - 1), row));
    const __m512i b =
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)(m >= 16 ? 0xffff : (1 << m) - 1), other));
    return _mm512_castsi512_ps(_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}
/* True if one of 32 bfloat16 is NaN, or neither 0 nor from 2^least to below 2^most in magnitude. */
SA_VERB int vf32_bf16_beyond(vf32 pairs, int least, int most) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi16(0x7fff));
    const __m512i above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16((short)((127 + least) << 7)));
    return (_mm512_cmpge_epu16_mask(above, _mm512_set1_epi16((short)((most - least) << 7))) &
            _mm512_test_epi16_mask(magnitude, magnitude)) != 0;
}

#define SA_F64_LANES 8
SA_AVX512_VERBS(f64, double, pd)
SA_VERB mf64 vf64_words_ge(const uint32_t *w, uint32_t t) {
    return _mm256_cmpge_epu32_mask(_mm256_loadu_si256((const __m256i *)w), _mm256_set1_epi32((int)t));
}
SA_VERB mf64 vf64_bit(const uint32_t *w, int i) {
    return _mm256_test_epi32_mask(_mm256_loadu_si256((const __m256i *)w), _mm256_set1_epi32((int)(UINT32_C(1) << i)));
}
SA_VERB vf64 vf64_power(vf64 t) { return _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_castpd_si512(t), 52)); }
SA_ORDER_VERBS_8(vf64)
SA_VERB vf64 vf64_sum_each(const vf64 *a) {
    vf64 two[4], four[2];
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        const vf64 x = _mm512_mask_blend_pd(0xaa, a[2 * i + 1], a[2 * i]);
        two[i] = _mm512_mask_blend_pd(0xaa, a[2 * i], a[2 * i + 1]) + _mm512_permute_pd(x, 0x55);
    }
    SA_UNROLL
    for (int i = 0; i < 2; ++i) {
        const vf64 x = _mm512_mask_blend_pd(0xcc, two[2 * i + 1], two[2 * i]);
        four[i] = _mm512_mask_blend_pd(0xcc, two[2 * i], two[2 * i + 1]) + _mm512_permutex_pd(x, 0x4e);
    }
    const vf64 x = _mm512_mask_blend_pd(0xf0, four[1], four[0]);
    return _mm512_mask_blend_pd(0xf0, four[0], four[1]) + _mm512_shuffle_f64x2(x, x, 0x4e);
}

/* VREDUCE returns x minus the nearest integer, VSCALEF multiplies by a power of two. */
#define SA_HAS_SCALEF 1
SA_VERB vf32 vf32_fraction(vf32 x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT); }
SA_VERB vf32 vf32_scalef_unless_lt(vf32 a, vf32 n, vf32 x, vf32 least) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a, n);
}
SA_VERB vf64 vf64_fraction(vf64 x) { return _mm512_reduce_pd(x, _MM_FROUND_TO_NEAREST_INT); }
SA_VERB vf64 vf64_scalef_unless_lt(vf64 a, vf64 n, vf64 x, vf64 least) {
    return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, least, _CMP_NLT_UQ), a, n);
}

#define SA_U32_LANES 16
SA_VERB vu32 vu32_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
SA_VERB void vu32_store(uint32_t *p, vu32 a) { _mm512_storeu_si512(p, a); }
SA_VERB vu32 vu32_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
SA_VERB uint32_t vu32_nonzero_bytes(const char *p) {
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return _mm256_test_epi8_mask(x, x);
}
SA_VERB vu32 vu32_xor(vu32 a, vu32 b) { return _mm512_xor_si512(a, b); }
SA_VERB vu32 vu32_rotate(vu32 a, int n) { return _mm512_rolv_epi32(a, _mm512_set1_epi32(n)); }
SA_VERB vu32 vu32_mul_lo(vu32 a, vu32 b) { return _mm512_mullo_epi32(a, b); }
SA_VERB vu32 vu32_mul_hi(vu32 a, vu32 b) {
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(a, b), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_blend_epi32(0xAAAA, even, odd);
}
