/* Products of bfloat16 pairs (AVX512_BF16), added to simd/avx512.h. Subnormals count as 0, and become 0.
 * Comes after simd/avx512.h. */
#define SA_HAS_BF16_PRODUCTS 1

/* sum + a.first·b.first + a.second·b.second, in two fused steps. */
SA_VERB vf32 vf32_add_products(vf32 sum, vf32 a, vf32 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
/* The pair (a, b), rounded to nearest, ties to even. If a is 0, it is b rounded. */
SA_VERB vf32 vf32_round_pairs(vf32 a, vf32 b) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)_mm512_cvtne2ps_pbh(b, a)));
}
/* Pairs of two rows' elements: the first (last) four of each quarter of 32.
 * first_quarters, last_quarters restore the order. */
SA_VERB vf32 vf32_zip_low_pairs(vf32 a, vf32 b) {
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
SA_VERB vf32 vf32_zip_high_pairs(vf32 a, vf32 b) {
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
SA_VERB vf32 vf32_first_quarters(vf32 low, vf32 high) {
    return SA_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
}
SA_VERB vf32 vf32_last_quarters(vf32 low, vf32 high) {
    return SA_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}
/* Stores 16 bfloat16, rounded in the same way. */
SA_VERB void vf32_store_rounded(char *to, vf32 a) {
    _mm256_storeu_si256((__m256i *)(void *)to, (__m256i)_mm512_cvtneps_pbh(a));
}
