/* AMX with bfloat16, added to simd/avx512.h. There are eight tile registers of 16 rows of 64 bytes. dot multiplies a,
 * 16×32 bfloat16, by b, whose rows hold 16 pairs:
 *
 *     c[i][l] += Σ_k a[i][2k]·b[k][l].first + a[i][2k+1]·b[k][l].second
 *
 * Each of the two sums is fused, starts at zero, and is then added to c. Results below 2^−126 become 0.
 * Comes after simd/avx512.h. */
#define SA_HAS_TILES 1

#define SA_TILE_ZERO(t) _tile_zero(t)
#define SA_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define SA_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define SA_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

/* Compilers assume that tile instructions neither read nor write memory. */
#define SA_TILE_FENCE() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} sa_tile_shapes;

static const sa_tile_shapes sa_whole_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

SA_VERB void sa_start_tiles(void) {
    SA_TILE_FENCE();
    _tile_loadconfig(&sa_whole_tiles);
}
/* Configures the registers of kernels/decode/decode_amx.h, for 1, 2 or 4 queries. */
SA_VERB void sa_start_decode_tiles(int few) {
    const uint16_t words = (uint16_t)(4 * few);
    const uint8_t weights = (uint8_t)(4 * few);
    const sa_tile_shapes shapes = {.palette = 1,
                                   .row_bytes = {words, words, 64, 64, 64, 64, 64, 64},
                                   .rows = {16, 16, weights, 16, weights, weights, weights, weights}};
    SA_TILE_FENCE();
    _tile_loadconfig(&shapes);
}
SA_VERB void sa_end_tiles(void) { _tile_release(); }

/* The unit soon falls asleep and wakes slowly. Other long passes call this at times while the tiles hold nothing. */
SA_VERB void sa_tiles_stay_awake(void) { _tile_dpbf16ps(0, 4, 6); }

/* Makes slow subnormal results 0 from here on. Returns the state before. */
SA_VERB unsigned sa_flush_subnormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}
SA_VERB void sa_restore_subnormals(unsigned before) { _mm_setcsr(before); }

/* The upper half of the result is the nearest bfloat16, ties away from zero.
 * Here and below x is finite and below 2^127. */
SA_VERB vf32 vf32_bf16_half_up(vf32 x) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)));
}
/* Rounds to bfloat16, towards zero. */
SA_VERB vf32 vf32_bf16_towards_zero(vf32 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-0x10000)));
}
SA_VERB vf32 vf32_bf16_nearest(vf32 x) { return vf32_bf16_towards_zero(vf32_bf16_half_up(x)); }
/* Lanes that are neither 0 nor from 2^least to 2^most in magnitude; true for NaN. */
SA_VERB mf32 vf32_beyond(vf32 x, int least, int most) {
    const __m512i from = _mm512_set1_epi32((127 + least) << 23), span = _mm512_set1_epi32((most - least) << 23);
    const __m512i above = _mm512_sub_epi32(_mm512_castps_si512(_mm512_abs_ps(x)), from);
    return _mm512_mask_cmp_ps_mask(_mm512_cmpge_epu32_mask(above, span), x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
}
SA_VERB mf32 vf32_either(mf32 a, mf32 b) { return (mf32)(a | b); }

/* The first, or the second, elements of 16 pairs of float16. */
SA_VERB vf32 vf32_low_f16(vf32 pairs) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(pairs))); }
SA_VERB vf32 vf32_high_f16(vf32 pairs) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(pairs), 16)));
}
SA_VERB int vf32_f16_not_finite(vf32 pairs) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi16(0x7fff));
    return _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7c00)) != 0;
}

/* a·2^⌊n⌋; after sa_flush_subnormals 0 if below 2^−126. */
SA_VERB vf32 vf32_scalef(vf32 a, vf32 n) { return _mm512_scalef_ps(a, n); }

/* Stores 16 pairs (a[i], b[i]) as bfloat16, rounded towards zero. */
SA_VERB void vf32_store_bf16_pairs(char *to, vf32 a, vf32 b) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
    _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(b)));
}
