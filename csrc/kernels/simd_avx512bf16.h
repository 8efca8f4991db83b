/* The products of pairs of bfloat16 (AVX512_BF16), beside the verbs of simd_avx512.h. */
#define SA_HAS_BF16_PRODUCTS 1

/* sum + a.first·b.first + a.second·b.second, lane by lane: two fused steps. Subnormal numbers are taken for 0, and become 0. */
SA_VERB vf32 vf32_add_products(vf32 sum, vf32 a, vf32 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
