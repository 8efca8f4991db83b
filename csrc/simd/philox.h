/* Philox4x32-7 (Salmon et al., SC'11), the counter-based generator for dropout. Lanes are queries, and four words are
 * for consecutive keys, as in a tile of scores.
 * Comes after simd/real.h. */

#define SA_PHILOX_ROUNDS 7 /* the fewest that pass BigCrush */

/* Fills words[w][lane] for keys 4·quad + w; rows have `count` lanes, a multiple of SA_U32_LANES. */
SA_ONCE void sa_philox(uint64_t seed, uint32_t quad, const uint32_t *index, const uint32_t *head_lo,
                       const uint32_t *head_hi, int count, uint32_t *words) {
    const vu32 m0 = vu32_set1(0xD2511F53u), m1 = vu32_set1(0xCD9E8D57u);
    for (int i = 0; i < count; i += SA_U32_LANES) {
        vu32 c0 = vu32_set1(quad), c1 = vu32_load(index + i), c2 = vu32_load(head_lo + i), c3 = vu32_load(head_hi + i);
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        SA_UNROLL
        for (int round = 0; round < SA_PHILOX_ROUNDS; ++round) {
            vu32 hi0 = vu32_mul_hi(c0, m0), lo0 = vu32_mul_lo(c0, m0);
            vu32 hi1 = vu32_mul_hi(c2, m1), lo1 = vu32_mul_lo(c2, m1);
            c0 = vu32_xor(vu32_xor(hi1, c1), vu32_set1(k0));
            c2 = vu32_xor(vu32_xor(hi0, c3), vu32_set1(k1));
            c1 = lo1;
            c3 = lo0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        vu32_store(words + i, c0);
        vu32_store(words + count + i, c1);
        vu32_store(words + 2 * count + i, c2);
        vu32_store(words + 3 * count + i, c3);
    }
}
