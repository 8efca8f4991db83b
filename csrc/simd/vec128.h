/* The verbs of kernels/README.md on 16-byte vectors of the compiler's extension, for SSE2, NEON, WebAssembly and plain
 * C. Verbs use an instruction set's own instructions only where these are better. */
#include "simd/macros.h"

#if defined(SA_VEC128_SSE2)
#include <emmintrin.h>
#elif defined(SA_VEC128_NEON)
#include <arm_neon.h>
#elif defined(SA_VEC128_WASM)
#include <wasm_simd128.h>
#endif

#define SA_VECTOR_REGISTERS SA_VEC128_REGISTERS

typedef float vf32 __attribute__((vector_size(16)));
typedef double vf64 __attribute__((vector_size(16)));
typedef int32_t mf32 __attribute__((vector_size(16)));
typedef int64_t mf64 __attribute__((vector_size(16)));
typedef uint32_t vu32 __attribute__((vector_size(16)));

/* Verbs with the same text for either type: t is f32 or f64. */
#define SA_VEC128_VERBS(t, real)                                                                                       \
    SA_VERB v##t v##t##_load(const real *p) {                                                                          \
        v##t a;                                                                                                        \
        memcpy(&a, p, sizeof a);                                                                                       \
        return a;                                                                                                      \
    }                                                                                                                  \
    SA_VERB void v##t##_store(real *p, v##t a) { memcpy(p, &a, sizeof a); }                                            \
    SA_VERB v##t v##t##_load_n(const real *p, int n) {                                                                 \
        v##t a = {0};                                                                                                  \
        for (int i = 0; i < n; ++i) {                                                                                  \
            a[i] = p[i];                                                                                               \
        }                                                                                                              \
        return a;                                                                                                      \
    }                                                                                                                  \
    SA_VERB void v##t##_store_n(real *p, v##t a, int n) {                                                              \
        for (int i = 0; i < n; ++i) {                                                                                  \
            p[i] = a[i];                                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    SA_VERB m##t v##t##_lt(v##t a, v##t b) { return (m##t)(a < b); }                                                   \
    SA_VERB m##t v##t##_not_lt(v##t a, v##t b) { return ~(m##t)(a < b); }                                              \
    SA_VERB m##t v##t##_eq(v##t a, v##t b) { return (m##t)(a == b); }                                                  \
    SA_VERB m##t v##t##_both(m##t a, m##t b) { return a & b; }                                                         \
    SA_VERB v##t v##t##_select(m##t m, v##t yes, v##t no) { return (v##t)((m & (m##t)yes) | (~m & (m##t)no)); }        \
    SA_VERB v##t v##t##_zero_unless(m##t m, v##t a) { return (v##t)(m & (m##t)a); }                                    \
    SA_VERB v##t v##t##_copysign(v##t a, v##t s) {                                                                     \
        const m##t sign = (m##t)v##t##_set1(-(real)0.0);                                                               \
        return (v##t)((~sign & (m##t)a) | (sign & (m##t)s));                                                           \
    }

#define SA_F32_LANES 4
SA_VERB vf32 vf32_set1(float x) { return (vf32){x, x, x, x}; }
SA_VEC128_VERBS(f32, float)
#if defined(SA_VEC128_WASM)
SA_VERB int vf32_any(mf32 m) { return wasm_v128_any_true((v128_t)m); }
SA_VERB int vf64_any(mf64 m) { return wasm_v128_any_true((v128_t)m); }
#else
SA_VERB int vf32_any(mf32 m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
SA_VERB int vf64_any(mf64 m) { return (m[0] | m[1]) != 0; }
#endif
SA_VERB vf32 vf32_abs(vf32 a) { return (vf32)((mf32)a & 0x7fffffff); }
#if defined(SA_VEC128_SSE2)
SA_VERB vf32 vf32_max(vf32 a, vf32 b) { return (vf32)_mm_max_ps((__m128)a, (__m128)b); }
SA_VERB vf32 vf32_min(vf32 a, vf32 b) { return (vf32)_mm_min_ps((__m128)a, (__m128)b); }
SA_VERB vf32 vf32_sqrt(vf32 a) { return (vf32)_mm_sqrt_ps((__m128)a); }
#elif defined(SA_VEC128_WASM) /* pmax(b, a) is a if b < a, else b */
SA_VERB vf32 vf32_max(vf32 a, vf32 b) { return (vf32)wasm_f32x4_pmax((v128_t)b, (v128_t)a); }
SA_VERB vf32 vf32_min(vf32 a, vf32 b) { return (vf32)wasm_f32x4_pmin((v128_t)b, (v128_t)a); }
SA_VERB vf32 vf32_sqrt(vf32 a) { return (vf32)wasm_f32x4_sqrt((v128_t)a); }
#else
SA_VERB vf32 vf32_max(vf32 a, vf32 b) { return vf32_select(vf32_lt(b, a), a, b); }
SA_VERB vf32 vf32_min(vf32 a, vf32 b) { return vf32_select(vf32_lt(a, b), a, b); }
SA_VERB vf32 vf32_sqrt(vf32 a) { return (vf32){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
#endif
#if defined(SA_VEC128_NEON)
#define SA_FMA_IS_FUSED 1
SA_VERB vf32 vf32_fma(vf32 a, vf32 b, vf32 c) {
    return (vf32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
#define SA_FMA_IS_FUSED 0
SA_VERB vf32 vf32_fma(vf32 a, vf32 b, vf32 c) { return a * b + c; }
#endif
SA_VERB mf32 vf32_words_ge(const uint32_t *w, uint32_t t) {
    vu32 a;
    memcpy(&a, w, sizeof a);
    return (mf32)(a >= t);
}
SA_VERB mf32 vf32_bit(const uint32_t *w, int i) {
    vu32 a;
    memcpy(&a, w, sizeof a);
    return (mf32)((a & (UINT32_C(1) << i)) != 0);
}
SA_VERB vf32 vf32_of_int32(const int32_t *p) {
    mf32 a;
    memcpy(&a, p, sizeof a);
    return __builtin_convertvector(a, vf32);
}
SA_VERB vf32 vf32_of_bits(const uint8_t *p, int shift, int mask) {
    const mf32 bits = {p[0], p[1], p[2], p[3]};
    return __builtin_convertvector(bits >> shift & mask, vf32);
}
/* Elements are from 0 to 255: adding 1.5·2^23 leaves the rounded number in the low bits. */
SA_VERB void vf32_store_bytes(uint8_t *p, vf32 a) {
    const vu32 bits = (vu32)(a + 0x1.8p23f);
    for (int i = 0; i < 4; ++i) {
        p[i] = (uint8_t)bits[i];
    }
}
SA_VERB vf32 vf32_power(vf32 t) { return (vf32)((vu32)t << 23); }
SA_ORDER_VERBS_4(vf32)
/* 16 bits to float32: in a little-endian word the even element is low */
#define SA_HAS_BF16_PAIRS (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
SA_VERB vf32 vf32_even_bf16(const void *p) {
    vu32 pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vf32)(pairs << 16);
}
SA_VERB vf32 vf32_odd_bf16(const void *p) {
    vu32 pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vf32)(pairs & 0xffff0000);
}
#if defined(SA_VEC128_NEON)
#define SA_HAS_F16_LOADS 1
SA_VERB vf32 vf32_load_f16(const void *p) {
    float16x4_t halves;
    memcpy(&halves, p, sizeof halves);
    return (vf32)vcvt_f32_f16(halves);
}
#endif

#define SA_F64_LANES 2
SA_VERB vf64 vf64_set1(double x) { return (vf64){x, x}; }
SA_VEC128_VERBS(f64, double)
SA_VERB vf64 vf64_abs(vf64 a) { return (vf64)((mf64)a & INT64_MAX); }
#if defined(SA_VEC128_SSE2)
SA_VERB vf64 vf64_max(vf64 a, vf64 b) { return (vf64)_mm_max_pd((__m128d)a, (__m128d)b); }
SA_VERB vf64 vf64_min(vf64 a, vf64 b) { return (vf64)_mm_min_pd((__m128d)a, (__m128d)b); }
SA_VERB vf64 vf64_sqrt(vf64 a) { return (vf64)_mm_sqrt_pd((__m128d)a); }
#elif defined(SA_VEC128_WASM)
SA_VERB vf64 vf64_max(vf64 a, vf64 b) { return (vf64)wasm_f64x2_pmax((v128_t)b, (v128_t)a); }
SA_VERB vf64 vf64_min(vf64 a, vf64 b) { return (vf64)wasm_f64x2_pmin((v128_t)b, (v128_t)a); }
SA_VERB vf64 vf64_sqrt(vf64 a) { return (vf64)wasm_f64x2_sqrt((v128_t)a); }
#else
SA_VERB vf64 vf64_max(vf64 a, vf64 b) { return vf64_select(vf64_lt(b, a), a, b); }
SA_VERB vf64 vf64_min(vf64 a, vf64 b) { return vf64_select(vf64_lt(a, b), a, b); }
SA_VERB vf64 vf64_sqrt(vf64 a) { return (vf64){sqrt(a[0]), sqrt(a[1])}; }
#endif
#if defined(SA_VEC128_NEON)
SA_VERB vf64 vf64_fma(vf64 a, vf64 b, vf64 c) {
    return (vf64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
SA_VERB vf64 vf64_fma(vf64 a, vf64 b, vf64 c) { return a * b + c; }
#endif
SA_VERB mf64 vf64_words_ge(const uint32_t *w, uint32_t t) {
    return (mf64){-(int64_t)(w[0] >= t), -(int64_t)(w[1] >= t)};
}
SA_VERB mf64 vf64_bit(const uint32_t *w, int i) { return (mf64){-(int64_t)(w[0] >> i & 1), -(int64_t)(w[1] >> i & 1)}; }
SA_VERB vf64 vf64_power(vf64 t) {
    typedef uint64_t bits __attribute__((vector_size(16)));
    return (vf64)((bits)t << 52);
}
SA_ORDER_VERBS_2(vf64)

#define SA_U32_LANES 4
SA_VERB vu32 vu32_load(const uint32_t *p) {
    vu32 a;
    memcpy(&a, p, sizeof a);
    return a;
}
SA_VERB void vu32_store(uint32_t *p, vu32 a) { memcpy(p, &a, sizeof a); }
SA_VERB vu32 vu32_set1(uint32_t x) { return (vu32){x, x, x, x}; }
SA_VERB uint32_t vu32_nonzero_bytes(const char *p) {
    uint32_t bits = 0;
#if defined(SA_VEC128_SSE2)
    for (int i = 0; i < 2; ++i) {
        const __m128i zero =
            _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)), _mm_setzero_si128());
        bits |= (~(uint32_t)_mm_movemask_epi8(zero) & 0xffff) << 16 * i;
    }
#else
    for (int i = 0; i < 32; ++i) {
        bits |= (uint32_t)(p[i] != 0) << i;
    }
#endif
    return bits;
}
SA_VERB vu32 vu32_xor(vu32 a, vu32 b) { return a ^ b; }
SA_VERB vu32 vu32_rotate(vu32 a, int n) { return a << n | a >> (32 - n); }
SA_VERB vu32 vu32_mul_lo(vu32 a, vu32 b) { return a * b; }
SA_VERB vu32 vu32_mul_hi(vu32 a, vu32 b) {
    vu32 hi;
    for (int i = 0; i < 4; ++i) {
        hi[i] = (uint32_t)(((uint64_t)a[i] * b[i]) >> 32);
    }
    return hi;
}
