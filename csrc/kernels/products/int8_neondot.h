/* Sums of uint8 times int8 by UDOT on aarch64. Weights with their sign bits flipped are unsigned, and larger by 128, so
 * each sum begins with −128·Σx, which is exact modulo 2^32. Accumulators for 8 rows × 8 columns: a vector has one word
 * of four columns, or four words of a row. Words are read in fours, as zeros follow each row and the last panel. */
#include "kernels/kernels.h"
#include <arm_neon.h>

#include "kernels/products/by_rows.h"

#define SA_DOT_ROWS 8

/* Adds to each lane of sum the products of four numbers of w and the four of a word of x. This is assembly because
 * Clang before 16 has the intrinsic only if a whole file may use it. */
#define SA_DOT(sum, w, x, word) __asm__("udot %0.4s, %1.16b, %2.4b[" #word "]" : "+w"(sum) : "w"(w), "w"(x))

SA_INLINE uint32_t sa_dot_start(const sa_compact_tile *t, int r) {
    const uint8_t *x = (const uint8_t *)t->x + r * t->stride;
    const uint8x16_t ones = vdupq_n_u8(1);
    uint32x4_t sum = vdupq_n_u32(0);
    for (ptrdiff_t k = 0; k < t->words; k += 4) {
        const uint8x16_t four = vld1q_u8(x + k * SA_WORD);
        SA_DOT(sum, four, ones, 0);
    }
    return 0 - 128 * vaddvq_u32(sum);
}

SA_INLINE void sa_dot_columns(const sa_compact_tile *t, ptrdiff_t c, const uint32_t *start, const int rows) {
    const uint8_t *x = (const uint8_t *)t->x, *panel = (const uint8_t *)t->panel + c * SA_WORD;
    const uint8x16_t flip = vdupq_n_u8(0x80);
    uint32x4_t sum[SA_DOT_ROWS][2];
    uint8x16_t four[SA_DOT_ROWS];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = vdupq_n_u32(start[r]);
    }
#define SA_DOT_WORD(word)                                                                                              \
    {                                                                                                                  \
        const uint8_t *at = panel + (word) * SA_PANEL_COLUMNS * SA_WORD;                                               \
        const uint8x16_t left = veorq_u8(vld1q_u8(at), flip), right = veorq_u8(vld1q_u8(at + 16), flip);               \
        SA_UNROLL                                                                                                      \
        for (int r = 0; r < rows; ++r) {                                                                               \
            SA_DOT(sum[r][0], left, four[r], word);                                                                    \
            SA_DOT(sum[r][1], right, four[r], word);                                                                   \
        }                                                                                                              \
    }
    for (ptrdiff_t k = 0; k < t->words; k += 4, x += 4 * SA_WORD, panel += 4 * SA_PANEL_COLUMNS * SA_WORD) {
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            four[r] = vld1q_u8(x + r * t->stride);
        }
        SA_DOT_WORD(0)
        SA_DOT_WORD(1)
        SA_DOT_WORD(2)
        SA_DOT_WORD(3)
    }
#undef SA_DOT_WORD
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        uint32_t *to = (uint32_t *)t->sums + r * SA_PANEL_COLUMNS + c;
        vst1q_u32(to, sum[r][0]);
        vst1q_u32(to + 4, sum[r][1]);
    }
}

SA_INLINE void sa_dot_tile(const sa_compact_tile *t, const int rows) {
    uint32_t start[SA_DOT_ROWS];
    for (int r = 0; r < rows; ++r) {
        start[r] = sa_dot_start(t, r);
    }
    for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS; c += 8) {
        sa_dot_columns(t, c, start, rows);
    }
}

SA_BY_ROWS(sa_dot, sa_dot_tile, SA_UP_TO_8)

const sa_compact_unit sa_int8_neondot = {.name = "neondot", .most_rows = SA_DOT_ROWS, .leaf = sa_dot};
