/* Quants as float32. Products of d, scale and q are exact; the sum with m·least is rounded once.
 * Infinities and NaN in d and m propagate.
 * Comes after kernels/attention/load.h. */
#include "kernels/kernels.h"

#define SA_Q(name) FN(quant_##name)
#define SA_Q_WORDS uint32_t
#define SA_Q_AT const uint8_t *
SA_VERB void SA_Q(gather)(const uint8_t *at, int from, uint32_t *v) { memcpy(v, at + from, 16); }
SA_VERB uint32_t SA_Q(look_up)(uint32_t q) {
    const uint8_t *v = sa_quant_values;
    return v[q & 15] | (uint32_t)v[q >> 8 & 15] << 8 | (uint32_t)v[q >> 16 & 15] << 16 |
           (uint32_t)v[q >> 24 & 15] << 24;
}
#include "kernels/quant_bits.h"

SA_INLINE float FN(half_of)(uint32_t word) {
    const uint16_t h = (uint16_t)word;
#if defined(SA_HAS_HALVES)
    return sa_of_half(h);
#else
    return sa_float_of_f16(h);
#endif
}

SA_INLINE void FN(expand_quant)(const sa_quant_kind *k, const uint8_t *p, float *to) {
    uint32_t head[5], q[8], scale, factor;
    FN(quant_head)(p, k, head);
    const float d = FN(half_of)(FN(quant_half_word)(head, k->d));
    const float m = k->m < 0 ? 0 : FN(half_of)(FN(quant_half_word)(head, k->m));
    const float zero = k->zero < 0 ? 0 : (float)(1 << k->zero);
    const int plain = k->high.bits == 0 && !k->values && k->low.bits < 8; /* the bits are read where they are */
    for (int piece = 0; piece < k->numbers / SA_PIECE; ++piece) {
        int shift, from = sa_quant_place(k->low, piece, &shift);
        const bool halves = k->low.order == SA_BITS_HALVES;
        if (!plain) {
            FN(quant_piece)(p, head, k, piece, q);
        }
        for (int half = 0; half < 2; ++half, to += SA_PIECE / 2) {
            FN(quant_scales)(head, k, sa_quant_by_halves(k) ? 2 * piece + half : piece, &scale, &factor);
            const vec a = V(set1)(d * (float)(int32_t)scale), b = V(set1)(m * (float)(int32_t)factor);
            const uint8_t *bytes = plain ? p + from + (halves ? 0 : 16 * half) : (const uint8_t *)q + 16 * half;
            const int right = !plain ? 0 : halves ? 4 * half : shift, mask = plain ? (1 << k->low.bits) - 1 : 255;
            for (int i = 0; i < SA_PIECE / 2; i += SA_LANES) {
                V(store)(to + i, V(fma)(a, V(of_bits)(bytes + i, right, mask) - V(set1)(zero), b));
            }
        }
    }
}

SA_KERNEL void FN(expand_quants)(sa_quant_type type, const void *from, ptrdiff_t n, float *to) {
    const uint8_t *p = from;
    const float *end = to + n;
    switch (type) {
    case SA_QUANT_F32: memcpy(to, p, (size_t)n * sizeof *to); break;
    case SA_QUANT_F16:
#if defined(SA_HAS_F16_LOADS)
        for (; to + SA_LANES <= end; to += SA_LANES, p += 2 * SA_LANES) {
            V(store)(to, V(load_f16)(p));
        }
#endif
        for (; to < end; ++to, p += 2) {
            *to = FN(half_of)(p[0] | (uint32_t)p[1] << 8);
        }
        break;
    case SA_QUANT_BF16:
        for (; to < end; ++to, p += 2) {
            *to = sa_float_of_bf16((uint16_t)(p[0] | p[1] << 8));
        }
        break;
#define SA_EXPAND(kind)                                                                                                \
    case SA_QUANT_##kind:                                                                                              \
        for (; to < end; to += sa_quant_kinds[SA_QUANT_##kind].numbers, p += sa_quant_kinds[SA_QUANT_##kind].bytes) {  \
            FN(expand_quant)(&sa_quant_kinds[SA_QUANT_##kind], p, to);                                                 \
        }                                                                                                              \
        break;
        SA_QUANTS(SA_EXPAND)
#undef SA_EXPAND
    case SA_QUANT_TYPES: break;
    }
}

/* ---- rows as digits ---------------------------------------------------------------------------------------------- */

/* Below the least maximum, scales would be subnormal. */
#define SA_LEAST_MAXIMUM 1e-30f

/* The bits of the largest |x|: sizes of floats are ordered like their bits. */
SA_INLINE int32_t FN(largest_bits)(const float *x, ptrdiff_t n) {
    int32_t largest = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= INT32_MAX;
        largest = SA_LARGER(bits, largest);
    }
    return largest;
}

typedef int32_t FN(four_ints) __attribute__((vector_size(16)));

/* The sum of half a piece, added as vectors because compilers would add number by number. */
SA_INLINE int32_t FN(sum_of_half)(const int32_t *x) {
    FN(four_ints) v[4];
    memcpy(v, x, sizeof v);
    v[0] = (v[0] + v[1]) + (v[2] + v[3]);
    return (v[0][0] + v[0][1]) + (v[0][2] + v[0][3]);
}

/* `limit` is the most that the digits can represent; with three digits less a margin, as scales are rounded. */
SA_INLINE void FN(split_piece)(const float *x, const int digits, const float limit, sa_digits *to) {
    int32_t all[SA_PIECE], digit[SA_PIECE];
    const int32_t largest = FN(largest_bits)(x, SA_PIECE);
    float most;
    memcpy(&most, &largest, sizeof most);
    most = SA_LARGER(most, SA_LEAST_MAXIMUM);
    const float inverse = limit / most;
    for (int i = 0; i < SA_PIECE; ++i) {
        const float t = x[i] * inverse;
        all[i] = (int32_t)(t + (t < 0 ? -0.5f : 0.5f));
    }
    to->scale = most / limit;
    int32_t minus[3] = {0, 0, 0};
    for (int n = 0; n < digits; ++n) { /* loops that compilers vectorize */
        for (int i = 0; i < SA_PIECE; ++i) {
            digit[i] = n + 1 < digits ? ((all[i] + 128) & 255) - 128 : all[i];
        }
        for (int i = 0; i < SA_PIECE; ++i) {
            to->of[n].digit[i] = (int8_t)digit[i];
        }
        for (int i = 0; i < SA_PIECE; ++i) {
            all[i] = (all[i] - digit[i]) >> 8;
        }
        const int32_t first = FN(sum_of_half)(digit), second = FN(sum_of_half)(digit + SA_PIECE / 2);
        const int32_t own[3] = {-first, -second, -first - second};
        for (int i = 0; i < 3; ++i) {
            to->of[n].minus[i] = own[i];
            minus[i] += own[i] * (1 << 8 * n);
        }
    }
    for (int i = 0; i < 3; ++i) {
        to->total[i] = (float)-minus[i] * to->scale;
    }
}

SA_KERNEL void FN(split_digits)(const float *x, ptrdiff_t rows, ptrdiff_t n, int digits, sa_digits *to) {
    const ptrdiff_t bytes = sa_digits_bytes(digits);
    for (ptrdiff_t r = 0; r < rows; ++r, x += n) {
        const bool finite = FN(largest_bits)(x, n) < 0x7f800000;
        if (!finite) {
            memset(to, 0, (size_t)(n / SA_PIECE * bytes));
            to->scale = NAN;
        }
        for (ptrdiff_t k = 0; k < n; k += SA_PIECE, to = (sa_digits *)(void *)((char *)to + bytes)) {
            switch (finite ? digits : 0) {
            case 0: break;
            case 1: FN(split_piece)(x + k, 1, 127, to); break;
            case 2: FN(split_piece)(x + k, 2, 32639, to); break;
            default: FN(split_piece)(x + k, 3, 8355000, to); break;
            }
        }
    }
}
#undef SA_LEAST_MAXIMUM
