/* Byte order, float16 and bfloat16, without branches, so that loops over them vectorise. */
#ifndef SA_BITS_H
#define SA_BITS_H

#include "simd/macros.h"

SA_INLINE uint8_t sa_uint8_swapped(uint8_t x) { return x; }
SA_INLINE uint16_t sa_uint16_swapped(uint16_t x) { return __builtin_bswap16(x); }
SA_INLINE uint32_t sa_uint32_swapped(uint32_t x) { return __builtin_bswap32(x); }
SA_INLINE uint64_t sa_uint64_swapped(uint64_t x) { return __builtin_bswap64(x); }

SA_INLINE float sa_float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

SA_INLINE uint32_t sa_bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

SA_INLINE float sa_float_of_bf16(uint16_t h) { return sa_float_of_bits((uint32_t)h << 16); }

/* Exact. Multiplying by 2^112 moves the exponent, even that of subnormals. */
SA_INLINE float sa_float_of_f16(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t finite = sa_bits_of_float(sa_float_of_bits(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7f800000u;
    return sa_float_of_bits(sign | (magnitude >= 0x0f800000u ? special : finite));
}

/* Rounds, but keeps finite numbers finite: a mask of finfo(float64).min must not close. */
SA_INLINE float sa_float_of_f64(double x) {
    double y = x > FLT_MAX ? FLT_MAX : x;
    y = y < -FLT_MAX ? -FLT_MAX : y;
    return (float)(x - x == 0 ? y : x);
}

/* Rounds to nearest, ties to even; NaN stays a (quiet) NaN. */
SA_INLINE uint16_t sa_bf16_of_float(float x) {
    uint32_t bits = sa_bits_of_float(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

SA_INLINE uint16_t sa_f16_of_float(float x) {
    uint32_t bits = sa_bits_of_float(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x47800000u) { /* 65536 and above, inf, NaN */
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) { /* below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits */
        half = sa_bits_of_float(sa_float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
    }
    return (uint16_t)(sign | half);
}

#endif
