/* A checksum by which a pullback notices changed parameters; it does not resist attacks. All instruction sets agree.
 * Each round is a bijection, so one changed word changes the checksum. Without the rotation two changed signs would
 * cancel.
 * Comes after simd/real.h. */

#define SA_MIXED(h, word) vu32_rotate(vu32_mul_lo(vu32_xor(h, word), vu32_set1(0x9E3779B1u)), 15)

/* Mixes 32-bit words into h; zeros fill up the last 512 bytes. */
SA_KERNEL uint64_t FN(checksum)(uint64_t h, const void *data, size_t bytes) {
    /* This many vectors hide the latency of multiplications. */
    enum { VECTORS = 128 / SA_U32_LANES, FOLDED = 16 / SA_U32_LANES };
    const char *from = data;
    uint32_t words[128];
    vu32 lanes[VECTORS], folded[FOLDED];
    SA_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        lanes[v] = vu32_set1((uint32_t)h);
    }
    for (;; from += sizeof words, bytes -= sizeof words) {
        const uint32_t *p = (const uint32_t *)(const void *)from;
        if (bytes < sizeof words) {
            if (bytes == 0) {
                break;
            }
            memset(words, 0, sizeof words);
            memcpy(words, from, bytes);
            p = words;
        }
        SA_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            lanes[v] = SA_MIXED(lanes[v], vu32_load(p + v * SA_U32_LANES));
        }
        if (p == words) {
            break;
        }
    }
    for (int v = 0; v < VECTORS; ++v) { /* folds to 16 words on every instruction set */
        folded[v % FOLDED] = SA_MIXED(v < FOLDED ? vu32_set1((uint32_t)(h >> 32)) : folded[v % FOLDED], lanes[v]);
    }
    for (int v = 0; v < FOLDED; ++v) {
        vu32_store(words + v * SA_U32_LANES, folded[v]);
    }
    for (int i = 0; i < 16; i += 2) {
        h ^= words[i] | (uint64_t)words[i + 1] << 32;
        h = (h << 29 | h >> 35) * UINT64_C(0x9E3779B97F4A7C15);
    }
    return h;
}
#undef SA_MIXED
