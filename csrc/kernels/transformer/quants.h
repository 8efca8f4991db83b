/* The numbers that the quants of a GGUF file mean, in float32. Little-endian: d and m are float16, q has 4, 6 or 8 bits.
 *
 *     Q4_0   d, 16 bytes               d·(q − 8)        the low halves of the bytes are numbers 0 … 15, the high ones 16 … 31
 *     Q4_1   d, m, 16 bytes            d·q + m          in the same order
 *     Q8_0   d, 32 bytes               d·q
 *     Q4_K   d, m, 12 bytes, 128 bytes d·scale·q − m·least; scale and least, 6 bits, are for 32 numbers; 32 bytes hold 64
 *     Q6_K   128 + 64 bytes, 16 scales, d    d·scale·(q − 32), a scale for 16 numbers; the low 4 bits of q, then the high 2
 *
 * Products are exact; a sum with m is rounded once. Infinities and NaN in d and m propagate. */

SA_INLINE float FN(half_at)(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
#if defined(SA_HAS_HALVES)
    return sa_of_half(h);
#else
    return sa_float_of_f16(h);
#endif
}

/* Expands n numbers, some bits of n bytes, to d·(q − zero) + m. */
SA_INLINE void FN(expand_bits)(const uint8_t *q, int n, int shift, float d, float zero, float m, float *to) {
    for (int i = 0; i < n; i += SA_LANES) {
        V(store)(to + i, V(fma)(V(set1)(d), V(of_bits)(q + i, shift, 15) - V(set1)(zero), V(set1)(m)));
    }
}

SA_INLINE void FN(expand_low_and_high)(const uint8_t *q, float d, float zero, float m, float *to) {
    FN(expand_bits)(q, 16, 0, d, zero, m, to);
    FN(expand_bits)(q, 16, 4, d, zero, m, to + 16);
}

/* The scale and least of the eight groups of a Q4_K quant, from their 12 bytes. */
SA_INLINE void FN(scales_of_q4_k)(const uint8_t *s, uint8_t *scale, uint8_t *least) {
    for (int i = 0; i < 4; ++i) {
        scale[i] = s[i] & 63;
        least[i] = s[4 + i] & 63;
        scale[4 + i] = (uint8_t)((s[8 + i] & 15) | (s[i] >> 6) << 4);
        least[4 + i] = (uint8_t)(s[8 + i] >> 4 | (s[4 + i] >> 6) << 4);
    }
}

SA_INLINE void FN(expand_q4_k)(const uint8_t *p, float *to) {
    const float d = FN(half_at)(p), m = FN(half_at)(p + 2);
    const uint8_t *q = p + 16;
    uint8_t scale[8], least[8];
    FN(scales_of_q4_k)(p + 4, scale, least);
    for (int g = 0; g < 8; g += 2, q += 32, to += 64) {
        FN(expand_bits)(q, 32, 0, d * (float)scale[g], 0, -(m * (float)least[g]), to);
        FN(expand_bits)(q, 32, 4, d * (float)scale[g + 1], 0, -(m * (float)least[g + 1]), to + 32);
    }
}

SA_INLINE void FN(expand_q6_k)(const uint8_t *p, float *to) {
    const float d = FN(half_at)(p + 208);
    const int8_t *scale = (const int8_t *)p + 192;
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        for (int part = 0; part < 4; ++part) {
            for (int i = 0; i < 32; i += SA_LANES, to += SA_LANES) {
                const vec low_bits = V(of_bits)(low + part % 2 * 32 + i, part / 2 * 4, 15);
                const vec q = V(fma)(V(of_bits)(high + i, part * 2, 3), V(set1)(16), low_bits - V(set1)(32));
                V(store)(to, V(set1)(d * (float)scale[8 * half + 2 * part + i / 16]) * q);
            }
        }
    }
}

SA_KERNEL void FN(expand_quants)(sa_quant_type type, const void *from, ptrdiff_t n, float *to) {
    const uint8_t *p = from;
    const float *end = to + n;
    switch (type) {
    case SA_QUANT_F16:
#if defined(SA_HAS_F16_LOADS)
        for (; to + SA_LANES <= end; to += SA_LANES, p += 2 * SA_LANES) {
            V(store)(to, V(load_f16)(p));
        }
#endif
        for (; to < end; ++to, p += 2) {
            *to = FN(half_at)(p);
        }
        break;
    case SA_QUANT_BF16:
        for (; to < end; ++to, p += 2) {
            uint16_t h;
            memcpy(&h, p, sizeof h);
            *to = sa_float_of_bf16(h);
        }
        break;
    case SA_QUANT_Q4_0:
        for (; to < end; to += 32, p += 18) {
            FN(expand_low_and_high)(p + 2, FN(half_at)(p), 8, 0, to);
        }
        break;
    case SA_QUANT_Q4_1:
        for (; to < end; to += 32, p += 20) {
            FN(expand_low_and_high)(p + 4, FN(half_at)(p), 0, FN(half_at)(p + 2), to);
        }
        break;
    case SA_QUANT_Q8_0:
        for (; to < end; to += 32, p += 34) {
            const float d = FN(half_at)(p);
            for (int i = 0; i < 32; ++i) {
                to[i] = d * (float)(int8_t)p[2 + i];
            }
        }
        break;
    case SA_QUANT_Q4_K:
        for (; to < end; to += 256, p += 144) {
            FN(expand_q4_k)(p, to);
        }
        break;
    case SA_QUANT_Q6_K:
        for (; to < end; to += 256, p += 210) {
            FN(expand_q6_k)(p, to);
        }
        break;
    default: memcpy(to, p, (size_t)n * sizeof *to); break;
    }
}

/* ---- rows of decoding ---------------------------------------------------------------------------------------------------- */

/* The most that three digits can represent, 127·65793, less a margin, as scales are rounded. Below the least maximum, scales
 * would be subnormal. */
#define SA_MOST_DIGITS 8355000.0f
#define SA_LEAST_MAXIMUM 1e-30f

SA_ONCE void FN(split_piece)(const float *x, sa_digits *to) {
    int32_t all[SA_PIECE];
    float most = SA_LEAST_MAXIMUM;
    for (int i = 0; i < SA_PIECE; ++i) {
        const float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    const float inverse = SA_MOST_DIGITS / most;
    for (int i = 0; i < SA_PIECE; ++i) {
        const float t = x[i] * inverse;
        all[i] = (int32_t)(t + (t < 0 ? -0.5f : 0.5f));
    }
    int32_t total = 0;
    for (int i = 0; i < SA_PIECE; ++i) {
        total += all[i];
    }
    to->scale = most / SA_MOST_DIGITS;
    to->total = (float)total * to->scale;
    for (int n = 0; n < SA_DIGITS; ++n) {
        int32_t half[2] = {0, 0};
        for (int i = 0; i < SA_PIECE; ++i) {
            const int32_t digit = ((all[i] + 128) & 255) - 128;
            to->digit[n][i] = (int8_t)digit;
            all[i] = (all[i] - digit) >> 8;
        }
        for (int i = 0; i < SA_PIECE / 2; ++i) {
            half[0] -= to->digit[n][i];
            half[1] -= to->digit[n][SA_PIECE / 2 + i];
        }
        to->minus[0][n] = half[0];
        to->minus[1][n] = half[1];
        to->minus[2][n] = half[0] + half[1];
    }
}

SA_KERNEL void FN(split_digits)(const float *x, ptrdiff_t rows, ptrdiff_t n, sa_digits *to) {
    for (ptrdiff_t r = 0; r < rows; ++r, x += n, to += n / SA_PIECE) {
        float check = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            check += x[i] * 0;
        }
        if (check != 0) { /* it is NaN */
            memset(to, 0, (size_t)(n / SA_PIECE) * sizeof *to);
            to->scale = NAN;
            continue;
        }
        for (ptrdiff_t k = 0; k < n / SA_PIECE; ++k) {
            FN(split_piece)(x + k * SA_PIECE, to + k);
        }
    }
}
#undef SA_MOST_DIGITS
#undef SA_LEAST_MAXIMUM
