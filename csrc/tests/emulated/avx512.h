/* Emulates with AVX2 the instructions of AVX-512, AVX512_BF16, AVX512_VNNI, AVX-VNNI and AMX that the kernels use (make
 * -C csrc emulate). The functions follow the pseudocode of the Intel SDM, volume 2. Rounding and flushing follow MXCSR.
 * The Makefile includes this before an ISA file. */
#define SA_EMULATED
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The headers of GCC's immintrin.h up to AVX2, in its order, so that later names are free. */
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef double __m512d __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64)));
typedef uint8_t __mmask8;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

/* Without inlining, this compiles faster. */
#define EMU static __attribute__((noinline, unused))
/* Functions that are called for every element are inlined. */
#define EMU_INLINE static inline __attribute__((always_inline, unused))

typedef union {
    __m512 ps;
    __m512d pd;
    __m512i si;
    __m256 half_ps[2];
    __m256d half_pd[2];
    __m256i half_si[2];
    float f32[16];
    double f64[8];
    uint8_t u8[64];
    uint16_t u16[32];
    uint32_t u32[16];
    uint64_t u64[8];
} emu_bits;

/* ---- instructions by halves -------------------------------------------------------------------------------------- */

#define EMU_HALVES(type, member, name, arguments, each)                                                                \
    EMU type _mm512_##name arguments {                                                                                 \
        emu_bits r;                                                                                                    \
        for (int i = 0; i < 2; ++i) {                                                                                  \
            r.half_##member[i] = each;                                                                                 \
        }                                                                                                              \
        return r.member;                                                                                               \
    }
#define EMU_PS(x) (((const emu_bits){.ps = (x)}).half_ps[i])
#define EMU_PD(x) (((const emu_bits){.pd = (x)}).half_pd[i])
#define EMU_SI(x) (((const emu_bits){.si = (x)}).half_si[i])
#define EMU_REALS(name)                                                                                                \
    EMU_HALVES(__m512, ps, name##_ps, (__m512 a, __m512 b), _mm256_##name##_ps(EMU_PS(a), EMU_PS(b)))                  \
    EMU_HALVES(__m512d, pd, name##_pd, (__m512d a, __m512d b), _mm256_##name##_pd(EMU_PD(a), EMU_PD(b)))
#define EMU_INTS(name) EMU_HALVES(__m512i, si, name, (__m512i a, __m512i b), _mm256_##name(EMU_SI(a), EMU_SI(b)))

EMU_REALS(max)
EMU_REALS(min)
EMU_REALS(and)
EMU_REALS(or)
EMU_REALS(unpacklo)
EMU_REALS(unpackhi)
EMU_INTS(unpacklo_epi16)
EMU_INTS(unpackhi_epi16)
EMU_INTS(shuffle_epi8)
EMU_INTS(add_epi32)
EMU_INTS(sub_epi32)
EMU_INTS(sub_epi16)
EMU_INTS(mullo_epi32)
EMU_INTS(mul_epu32)
EMU_HALVES(__m512, ps, fmadd_ps, (__m512 a, __m512 b, __m512 c), _mm256_fmadd_ps(EMU_PS(a), EMU_PS(b), EMU_PS(c)))
EMU_HALVES(__m512d, pd, fmadd_pd, (__m512d a, __m512d b, __m512d c), _mm256_fmadd_pd(EMU_PD(a), EMU_PD(b), EMU_PD(c)))
EMU_HALVES(__m512, ps, sqrt_ps, (__m512 a), _mm256_sqrt_ps(EMU_PS(a)))
EMU_HALVES(__m512d, pd, sqrt_pd, (__m512d a), _mm256_sqrt_pd(EMU_PD(a)))
EMU_HALVES(__m512, ps, abs_ps, (__m512 a), _mm256_andnot_ps(_mm256_set1_ps(-0.0f), EMU_PS(a)))
EMU_HALVES(__m512d, pd, abs_pd, (__m512d a), _mm256_andnot_pd(_mm256_set1_pd(-0.0), EMU_PD(a)))
EMU_HALVES(__m512i, si, and_si512, (__m512i a, __m512i b), _mm256_and_si256(EMU_SI(a), EMU_SI(b)))
EMU_HALVES(__m512i, si, or_si512, (__m512i a, __m512i b), _mm256_or_si256(EMU_SI(a), EMU_SI(b)))
EMU_HALVES(__m512i, si, xor_si512, (__m512i a, __m512i b), _mm256_xor_si256(EMU_SI(a), EMU_SI(b)))
EMU_HALVES(__m512i, si, slli_epi32, (__m512i a, int n), _mm256_slli_epi32(EMU_SI(a), n))
EMU_HALVES(__m512i, si, slli_epi64, (__m512i a, int n), _mm256_slli_epi64(EMU_SI(a), n))
EMU_HALVES(__m512i, si, srli_epi32, (__m512i a, int n), _mm256_srli_epi32(EMU_SI(a), n))
EMU_HALVES(__m512i, si, srli_epi64, (__m512i a, int n), _mm256_srli_epi64(EMU_SI(a), n))
EMU_HALVES(__m512, ps, cvtepi32_ps, (__m512i a), _mm256_cvtepi32_ps(EMU_SI(a)))
EMU_HALVES(__m512i, si, cvtps_epi32, (__m512 a), _mm256_cvtps_epi32(EMU_PS(a)))
EMU_HALVES(__m512i, si, rolv_epi32, (__m512i a, __m512i n),
           _mm256_or_si256(_mm256_sllv_epi32(EMU_SI(a), EMU_SI(n)),
                           _mm256_srlv_epi32(EMU_SI(a), _mm256_sub_epi32(_mm256_set1_epi32(32), EMU_SI(n)))))
#define EMU_PERMUTE(member, permute, a, low, high)                                                                     \
    ((emu_bits){.half_##member = {permute(((emu_bits){.member = (a)}).half_##member[0], low),                          \
                                  permute(((emu_bits){.member = (a)}).half_##member[1], high)}})                       \
        .member
#define _mm512_permute_ps(a, order) EMU_PERMUTE(ps, _mm256_permute_ps, a, order, order)
#define _mm512_permute_pd(a, order) EMU_PERMUTE(pd, _mm256_permute_pd, a, (order) & 15, (order) >> 4)
#define _mm512_permutex_pd(a, order) EMU_PERMUTE(pd, _mm256_permute4x64_pd, a, order, order)

/* ---- bits -------------------------------------------------------------------------------------------------------- */

EMU __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
EMU __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }
EMU __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
EMU __m512d _mm512_castsi512_pd(__m512i a) { return (__m512d)a; }
EMU __m512i _mm512_castps_si512(__m512 a) { return (__m512i)a; }
EMU __m512i _mm512_castpd_si512(__m512d a) { return (__m512i)a; }

EMU __m512i _mm512_cvtepu8_epi32(__m128i a) {
    return ((emu_bits){.half_si = {_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))}}).si;
}

EMU __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
EMU __m512i _mm512_setzero_si512(void) { return (__m512i){0}; }
EMU_HALVES(__m512, ps, set1_ps, (float x), _mm256_set1_ps(x))
EMU_HALVES(__m512d, pd, set1_pd, (double x), _mm256_set1_pd(x))
EMU_HALVES(__m512i, si, set1_epi32, (int x), _mm256_set1_epi32(x))
EMU_HALVES(__m512i, si, set1_epi16, (short x), _mm256_set1_epi16(x))

#define EMU_MEMORY(type, name)                                                                                         \
    EMU type _mm512_loadu_##name(const void *p) {                                                                      \
        type r;                                                                                                        \
        memcpy(&r, p, sizeof r);                                                                                       \
        return r;                                                                                                      \
    }                                                                                                                  \
    EMU void _mm512_storeu_##name(void *p, type a) { memcpy(p, &a, sizeof a); }
EMU_MEMORY(__m512, ps)
EMU_MEMORY(__m512d, pd)
EMU_MEMORY(__m512i, si512)
EMU void emu_must(int holds) { /* traps where the CPU would fault */
    if (!holds) {
        __builtin_trap();
    }
}
EMU void _mm512_store_si512(void *p, __m512i a) {
    emu_must((uintptr_t)p % 64 == 0);
    memcpy(p, &a, sizeof a);
}

/* ---- masked lanes: other lanes' memory is not accessed ----------------------------------------------------------- */

#define EMU_LANES(count, body)                                                                                         \
    for (int i = 0; i < (count); ++i) {                                                                                \
        body;                                                                                                          \
    }
#define EMU_MASKED(type, member, mask, name, lane, array, count)                                                       \
    EMU type _mm512_maskz_loadu_##name(mask m, const void *p) {                                                        \
        emu_bits r = {.si = {0}};                                                                                      \
        EMU_LANES(count, if (m >> i & 1) memcpy(&r.array[i], (const char *)p + i * sizeof(lane), sizeof(lane)))        \
        return r.member;                                                                                               \
    }                                                                                                                  \
    EMU void _mm512_mask_storeu_##name(void *p, mask m, type a) {                                                      \
        const emu_bits x = {.member = a};                                                                              \
        EMU_LANES(count, if (m >> i & 1) memcpy((char *)p + i * sizeof(lane), &x.array[i], sizeof(lane)))              \
    }                                                                                                                  \
    EMU type _mm512_mask_blend_##name(mask m, type no, type yes) {                                                     \
        const emu_bits a = {.member = no}, b = {.member = yes};                                                        \
        emu_bits r;                                                                                                    \
        EMU_LANES(count, r.array[i] = m >> i & 1 ? b.array[i] : a.array[i])                                            \
        return r.member;                                                                                               \
    }                                                                                                                  \
    EMU type _mm512_maskz_mov_##name(mask m, type a) { return _mm512_mask_blend_##name(m, (type){0}, a); }
EMU_MASKED(__m512, ps, __mmask16, ps, float, u32, 16)
EMU_MASKED(__m512d, pd, __mmask8, pd, double, u64, 8)
EMU_MASKED(__m512i, si, __mmask16, epi32, uint32_t, u32, 16)
EMU_MASKED(__m512i, si, __mmask32, epi16, uint16_t, u16, 32)
EMU __m256i _mm256_maskz_loadu_epi16(__mmask16 m, const void *p) {
    return ((emu_bits){.si = _mm512_maskz_loadu_epi16(m, p)}).half_si[0];
}

#define EMU_CMP(member, a, b, how, half)                                                                               \
    _mm256_movemask_##member(_mm256_cmp_##member(((emu_bits){.member = (a)}).half_##member[half],                      \
                                                 ((emu_bits){.member = (b)}).half_##member[half], how))
#define _mm512_cmp_ps_mask(a, b, how) ((__mmask16)(EMU_CMP(ps, a, b, how, 0) | EMU_CMP(ps, a, b, how, 1) << 8))
#define _mm512_cmp_pd_mask(a, b, how) ((__mmask8)(EMU_CMP(pd, a, b, how, 0) | EMU_CMP(pd, a, b, how, 1) << 4))
#define _mm512_mask_cmp_ps_mask(m, a, b, how) ((__mmask16)((m) & _mm512_cmp_ps_mask(a, b, how)))
#define EMU_TEST(mask, name, array, count, holds)                                                                      \
    EMU mask _mm512_##name(__m512i a, __m512i b) {                                                                     \
        const emu_bits x = {.si = a}, y = {.si = b};                                                                   \
        mask r = 0;                                                                                                    \
        EMU_LANES(count, r |= (mask)((mask)(x.array[i] holds y.array[i] ? 1 : 0) << i))                                \
        return r;                                                                                                      \
    }
EMU_TEST(__mmask16, cmpge_epu32_mask, u32, 16, >=)
EMU_TEST(__mmask16, test_epi32_mask, u32, 16, &)
EMU_TEST(__mmask32, cmpge_epu16_mask, u16, 32, >=)
EMU_TEST(__mmask32, test_epi16_mask, u16, 32, &)
EMU __m512i emu_low_half(__m256i a) { return ((emu_bits){.half_si = {a, _mm256_setzero_si256()}}).si; }
EMU __mmask8 _mm256_cmpge_epu32_mask(__m256i a, __m256i b) {
    return (__mmask8)_mm512_cmpge_epu32_mask(emu_low_half(a), emu_low_half(b));
}
EMU __mmask8 _mm256_test_epi32_mask(__m256i a, __m256i b) {
    return (__mmask8)_mm512_test_epi32_mask(emu_low_half(a), emu_low_half(b));
}
EMU __mmask32 _mm256_test_epi8_mask(__m256i a, __m256i b) {
    return ~(__mmask32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(a, b), _mm256_setzero_si256()));
}

/* ---- other widths ------------------------------------------------------------------------------------------------ */

EMU __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int order) {
    const emu_bits x = {.ps = a}, y = {.ps = b};
    emu_bits r;
    for (int i = 0; i < 4; ++i) {
        memcpy(&r.u32[4 * i], &(i < 2 ? x : y).u32[4 * (order >> 2 * i & 3)], 16);
    }
    return r.ps;
}
EMU __m512d _mm512_shuffle_f64x2(__m512d a, __m512d b, int order) {
    return (__m512d)_mm512_shuffle_f32x4((__m512)a, (__m512)b, order);
}
/* The higher bits are undefined: here ones, which are NaN. */
EMU __m512 _mm512_castps128_ps512(__m128 a) {
    emu_bits r;
    memset(&r, 0xff, sizeof r);
    memcpy(r.f32, &a, 16);
    return r.ps;
}
EMU __m512 _mm512_insertf32x4(__m512 a, __m128 b, int to) {
    emu_bits r = {.ps = a};
    memcpy(r.f32 + 4 * to, &b, 16);
    return r.ps;
}
EMU __m256i _mm512_cvtepi32_epi16(__m512i a) {
    const emu_bits x = {.si = a};
    emu_bits r;
    EMU_LANES(16, r.u16[i] = (uint16_t)x.u32[i])
    return r.half_si[0];
}
EMU __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const emu_bits x = {.si = a};
    emu_bits r;
    EMU_LANES(16, r.u8[i] = (uint8_t)x.u32[i])
    return _mm256_castsi256_si128(r.half_si[0]);
}
EMU __m512i _mm512_cvtepu16_epi32(__m256i a) {
    const emu_bits x = {.half_si = {a, a}};
    emu_bits r;
    EMU_LANES(16, r.u32[i] = x.u16[i])
    return r.si;
}
EMU __m512i _mm512_permutexvar_epi16(__m512i order, __m512i a) {
    const emu_bits x = {.si = order}, y = {.si = a};
    emu_bits r;
    EMU_LANES(32, r.u16[i] = y.u16[x.u16[i] & 31])
    return r.si;
}
EMU __m512i _mm512_broadcast_i32x4(__m128i a) {
    return ((emu_bits){.half_si = {_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a)}}).si;
}
EMU __m512 _mm512_cvtph_ps(__m256i a) {
    return ((emu_bits){.half_ps = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                   _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}})
        .ps;
}
#define _mm512_cvtps_ph(a, how)                                                                                        \
    _mm256_set_m128i(_mm256_cvtps_ph(((emu_bits){.ps = (a)}).half_ps[1], (how) & 7),                                   \
                     _mm256_cvtps_ph(((emu_bits){.ps = (a)}).half_ps[0], (how) & 7))

/* ---- powers of two ----------------------------------------------------------------------------------------------- */

/* VREDUCE to the nearest integer; an infinity leaves 0. */
EMU double emu_reduce(double x) { return isinf(x) ? 0.0 : x - rint(x); }
EMU __m512 _mm512_reduce_ps(__m512 a, int how) {
    emu_bits r = {.ps = a};
    (void)how;
    EMU_LANES(16, r.f32[i] = (float)emu_reduce((double)r.f32[i]))
    return r.ps;
}
EMU __m512d _mm512_reduce_pd(__m512d a, int how) {
    emu_bits r = {.pd = a};
    (void)how;
    EMU_LANES(8, r.f64[i] = emu_reduce(r.f64[i]))
    return r.pd;
}
/* VSCALEF: a·2^⌊n⌋, rounded once. For floats a double represents it exactly. */
EMU double emu_scalef(double a, double n) {
    if (isnan(a) && isinf(n)) {
        return n > 0 ? (double)INFINITY : 0;
    }
    if (isnan(a) || isnan(n) || (isinf(n) && (n > 0 ? a == 0 : isinf(a)))) {
        return a + n + (double)NAN;
    }
    return ldexp(a, (int)fmax(fmin(floor(n), 5000), -5000));
}
EMU __m512 _mm512_maskz_scalef_ps(__mmask16 m, __m512 a, __m512 b) {
    const emu_bits x = {.ps = a}, y = {.ps = b};
    emu_bits r;
    EMU_LANES(16, r.f32[i] = m >> i & 1 ? (float)emu_scalef((double)x.f32[i], (double)y.f32[i]) : 0)
    return r.ps;
}
EMU __m512d _mm512_maskz_scalef_pd(__mmask8 m, __m512d a, __m512d b) {
    const emu_bits x = {.pd = a}, y = {.pd = b};
    emu_bits r;
    EMU_LANES(8, r.f64[i] = m >> i & 1 ? emu_scalef(x.f64[i], y.f64[i]) : 0)
    return r.pd;
}
EMU __m512 _mm512_scalef_ps(__m512 a, __m512 b) { return _mm512_maskz_scalef_ps(0xffff, a, b); }

/* ---- products of bfloat16: rounded to nearest, subnormals are 0, MXCSR is ignored -------------------------------- */

EMU_INLINE float emu_bf16(uint32_t high) {
    float r;
    high <<= 16;
    memcpy(&r, &high, sizeof r);
    return fabsf(r) < 0x1p-126f ? copysignf(0, r) : r;
}
EMU_INLINE float emu_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
EMU __m512 emu_dpbf16(__m512 sum, __m512i a, __m512i b) { /* VDPBF16PS: adds products of second elements first */
    emu_bits r = {.ps = sum};
    const emu_bits x = {.si = a}, y = {.si = b};
    for (int i = 0; i < 16; ++i) {
        const float t = emu_flushed(fmaf(emu_bf16(x.u32[i] >> 16), emu_bf16(y.u32[i] >> 16), emu_flushed(r.f32[i])));
        r.f32[i] = emu_flushed(fmaf(emu_bf16(x.u32[i] & 0xffff), emu_bf16(y.u32[i] & 0xffff), t));
    }
    return r.ps;
}
#define _mm512_dpbf16_ps(sum, a, b) emu_dpbf16(sum, (__m512i)(a), (__m512i)(b))
EMU uint16_t emu_to_bf16(float x) {
    uint32_t bits;
    x = emu_flushed(x);
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((isnan(x) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EMU __m256i _mm512_cvtneps_pbh(__m512 a) {
    const emu_bits x = {.ps = a};
    emu_bits r;
    EMU_LANES(16, r.u16[i] = emu_to_bf16(x.f32[i]))
    return r.half_si[0];
}
EMU __m512i _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    const emu_bits x = {.ps = low}, y = {.ps = high};
    emu_bits r;
    EMU_LANES(16, r.u16[i] = emu_to_bf16(x.f32[i]))
    EMU_LANES(16, r.u16[16 + i] = emu_to_bf16(y.f32[i]))
    return r.si;
}

/* ---- products of int8: modulo 2^32 ------------------------------------------------------------------------------- */

EMU_INLINE uint32_t emu_dot_int8(uint32_t sum, uint32_t x, uint32_t w) { /* products of uint8 and int8 */
    for (int i = 0; i < 32; i += 8) {
        sum += (uint32_t)((int32_t)(x >> i & 0xff) * (int8_t)(w >> i & 0xff));
    }
    return sum;
}
EMU __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { /* VPDPBUSD */
    emu_bits r = {.si = sum};
    const emu_bits x = {.si = a}, y = {.si = b};
    EMU_LANES(16, r.u32[i] = emu_dot_int8(r.u32[i], x.u32[i], y.u32[i]))
    return r.si;
}
EMU __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
    return ((emu_bits){.si = _mm512_dpbusd_epi32(emu_low_half(sum), emu_low_half(a), emu_low_half(b))}).half_si[0];
}

/* ---- AMX --------------------------------------------------------------------------------------------------------- */

typedef struct {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape;
    uint32_t tile[8][16][16];
} emu_unit_state;

static _Thread_local emu_unit_state emu_unit;

EMU void _tile_loadconfig(const void *shape) {
    memcpy(&emu_unit.shape, shape, sizeof emu_unit.shape);
    memset(emu_unit.tile, 0, sizeof emu_unit.tile);
    for (int t = 0; t < 8; ++t) {
        emu_must(emu_unit.shape.rows[t] <= 16 && emu_unit.shape.row_bytes[t] <= 64);
    }
}
EMU void _tile_release(void) { memset(&emu_unit, 0, sizeof emu_unit); }
EMU void _tile_zero(int t) {
    emu_must(emu_unit.shape.palette == 1 && emu_unit.shape.rows[t] > 0);
    memset(emu_unit.tile[t], 0, sizeof emu_unit.tile[t]);
}
EMU void _tile_loadd(int t, const void *from, ptrdiff_t stride) {
    _tile_zero(t);
    for (int i = 0; i < emu_unit.shape.rows[t]; ++i) {
        memcpy(emu_unit.tile[t][i], (const char *)from + i * stride, emu_unit.shape.row_bytes[t]);
    }
}
EMU void _tile_stored(int t, void *to, ptrdiff_t stride) {
    emu_must(emu_unit.shape.palette == 1 && emu_unit.shape.rows[t] > 0);
    for (int i = 0; i < emu_unit.shape.rows[t]; ++i) {
        memcpy((char *)to + i * stride, emu_unit.tile[t][i], emu_unit.shape.row_bytes[t]);
    }
}
EMU void emu_must_fit(int c, int a, int b) {
    const uint8_t *const rows = emu_unit.shape.rows;
    const uint16_t *const bytes = emu_unit.shape.row_bytes;
    emu_must(emu_unit.shape.palette == 1 && rows[a] == rows[c] && bytes[b] == bytes[c] && bytes[a] == 4 * rows[b] &&
             rows[c] > 0 && a != b && b != c && a != c);
}
EMU void _tile_dpbf16ps(int c, int a, int b) { /* TDPBF16PS */
    const uint8_t *const rows = emu_unit.shape.rows;
    const uint16_t *const bytes = emu_unit.shape.row_bytes;
    float x[2][16][16], y[2][16][16]; /* first elements, second ones */
    emu_must_fit(c, a, b);
    for (int i = 0; i < 16; ++i) {
        for (int k = 0; k < 16; ++k) {
            x[0][i][k] = emu_bf16(emu_unit.tile[a][i][k] & 0xffff);
            x[1][i][k] = emu_bf16(emu_unit.tile[a][i][k] >> 16);
            y[0][i][k] = emu_bf16(emu_unit.tile[b][i][k] & 0xffff);
            y[1][i][k] = emu_bf16(emu_unit.tile[b][i][k] >> 16);
        }
    }
    for (int i = 0; i < rows[c]; ++i) {
        for (int l = 0; l < bytes[c] / 4; ++l) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < bytes[a] / 4; ++k) {
                even = emu_flushed(fmaf(x[0][i][k], y[0][k][l], even));
                odd = emu_flushed(fmaf(x[1][i][k], y[1][k][l], odd));
            }
            memcpy(&sum, &emu_unit.tile[c][i][l], sizeof sum);
            sum = emu_flushed(emu_flushed(sum) + emu_flushed(even + odd));
            memcpy(&emu_unit.tile[c][i][l], &sum, sizeof sum);
        }
    }
}
EMU void _tile_dpbusd(int c, int a, int b) { /* TDPBUSD */
    const uint8_t *const rows = emu_unit.shape.rows;
    const uint16_t *const bytes = emu_unit.shape.row_bytes;
    emu_must_fit(c, a, b);
    for (int i = 0; i < rows[c]; ++i) {
        for (int l = 0; l < bytes[c] / 4; ++l) {
            for (int k = 0; k < bytes[a] / 4; ++k) {
                emu_unit.tile[c][i][l] =
                    emu_dot_int8(emu_unit.tile[c][i][l], emu_unit.tile[a][i][k], emu_unit.tile[b][k][l]);
            }
        }
    }
}
