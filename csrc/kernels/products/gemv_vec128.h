/* The verbs of gemv.h on 4 lanes: vectors of 16 bytes (simd/vec128.h).
 * Comes after simd/vec128.h. */
#include "kernels/kernels.h"
#include "simd/bits.h"

#define SA_GEMV_LANES 4
#define SA_GEMV_ROWS 2
typedef vu32 sa_words;
typedef mf32 sa_ints;
typedef vf32 sa_floats;
typedef int16_t sa_shorts __attribute__((vector_size(16)));

SA_VERB sa_words sa_gemv_pair(const char *p) {
    typedef uint64_t sa_eights __attribute__((vector_size(16)));
    typedef uint16_t sa_unsigned __attribute__((vector_size(16)));
    uint64_t low, high;
    memcpy(&low, p, sizeof low);
    memcpy(&high, p + 2 * SA_GEMV_COLUMNS, sizeof high);
    const sa_unsigned a = (sa_unsigned)(sa_eights){low, 0}, b = (sa_unsigned)(sa_eights){high, 0};
    return (sa_words)SA_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
SA_VERB sa_floats sa_gemv_half(sa_words x) {
    sa_floats f;
    for (int i = 0; i < 4; ++i) {
        f[i] = sa_float_of_f16((uint16_t)x[i]);
    }
    return f;
}
SA_VERB sa_words sa_gemv_look_up(sa_words q) {
    uint8_t bytes[16];
    memcpy(bytes, &q, sizeof bytes);
    for (int i = 0; i < 16; ++i) {
        bytes[i] = sa_quant_values[bytes[i] & 15];
    }
    memcpy(&q, bytes, sizeof bytes);
    return q;
}
SA_VERB sa_floats sa_gemv_fma(sa_floats a, sa_floats b, sa_floats c) { return vf32_fma(a, b, c); }

/* Each lane: the sum of the products of two int16. */
SA_VERB sa_words sa_gemv_two_products(sa_shorts a, sa_shorts b) {
#if defined(SA_VEC128_SSE2)
    return (sa_words)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(SA_VEC128_WASM)
    return (sa_words)wasm_i32x4_dot_i16x8((v128_t)a, (v128_t)b);
#elif defined(SA_VEC128_NEON)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return (sa_words)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    const sa_ints x = (sa_ints)a, y = (sa_ints)b;
    return (sa_words)((x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16));
#endif
}
SA_VERB sa_words sa_gemv_dot(sa_words sum, sa_words q, sa_words x, const bool bytes) {
    typedef uint16_t sa_unsigned __attribute__((vector_size(16)));
    (void)bytes;
    const sa_shorts even = (sa_shorts)(q & 0x00ff00ff), odd = (sa_shorts)((sa_unsigned)q >> 8);
    sum += sa_gemv_two_products(even, (sa_shorts)((sa_unsigned)x << 8) >> 8);
    return sum + sa_gemv_two_products(odd, (sa_shorts)x >> 8);
}

#include "kernels/products/gemv.h"

const sa_gemv_unit SA_PASTE(sa_gemv_, SA_ISA) = {.name = SA_STRING(SA_ISA), .leaf = sa_gemv};
