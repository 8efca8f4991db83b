/* Sums of uint8 times int8 for CPUs without instructions for them: dot products of rows and columns,
 * widened to 16 bits.
 * Comes after simd/vec128.h. */
#include "kernels/kernels.h"

#define SA_PLAIN_DEPTH 256 /* numbers of a row at a time; a panel of this depth stays in L1 */
#define SA_PLAIN_ROWS 16

/* Widens a panel's columns, [SA_PANEL_COLUMNS][SA_PLAIN_DEPTH], from word `first` on. An odd number of words is
 * followed by a word of zeros. */
SA_ONCE void sa_widen_panel(const sa_compact_tile *t, ptrdiff_t first, ptrdiff_t words, int16_t *to) {
    const char *from = t->panel + first * SA_PANEL_COLUMNS * SA_WORD;
    for (ptrdiff_t k = 0; k < words; ++k) {
        for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS; c += 2, from += 2 * SA_WORD) {
            typedef signed char bytes __attribute__((vector_size(2 * SA_WORD)));
            typedef int16_t four __attribute__((vector_size(4 * SA_WORD)));
            bytes two;
            memcpy(&two, from, sizeof two);
            const four wide = __builtin_convertvector(two, four);
            memcpy(to + c * SA_PLAIN_DEPTH + k * SA_WORD, &wide, sizeof wide / 2);
            memcpy(to + (c + 1) * SA_PLAIN_DEPTH + k * SA_WORD, (const char *)&wide + sizeof wide / 2, sizeof wide / 2);
        }
    }
    for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS && words % 2 == 1; ++c) {
        memset(to + c * SA_PLAIN_DEPTH + words * SA_WORD, 0, SA_WORD * sizeof *to);
    }
}

/* Adds eight products of int16, in pairs, to four sums. */
#if defined(SA_VEC128_SSE2) /* GCC 12 would move sums out of their registers if this were not assembly */
#define SA_ADD_PRODUCTS(sum, a, b) __asm__("paddd %1, %0" : "+x"(sum) : "x"(_mm_madd_epi16((__m128i)(a), (__m128i)(b))))
#elif defined(SA_VEC128_WASM)
#define SA_ADD_PRODUCTS(sum, a, b) ((sum) += (sa_int32s)wasm_i32x4_dot_i16x8((v128_t)(a), (v128_t)(b)))
#endif
typedef int32_t sa_int32s __attribute__((vector_size(16)));

SA_VERB sa_int32s sa_int32s_load(const int16_t *p) {
    sa_int32s a;
    memcpy(&a, p, sizeof a);
    return a;
}

/* Sets sums[r][c], or adds to them, for rows from r on and columns c and c + 1, with n numbers each. */
SA_INLINE void sa_dot_products(const int16_t *x, ptrdiff_t stride, const int16_t *w, ptrdiff_t n, int32_t *sums,
                               bool adds, const int rows) {
#if defined(SA_ADD_PRODUCTS)
    sa_int32s sum[4][2];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sum[r][0] = sum[r][1] = (sa_int32s){0};
    }
    for (ptrdiff_t i = 0; i < n; i += 8) {
        const sa_int32s left = sa_int32s_load(w + i), right = sa_int32s_load(w + SA_PLAIN_DEPTH + i);
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            const sa_int32s eight = sa_int32s_load(x + r * stride + i);
            SA_ADD_PRODUCTS(sum[r][0], eight, left);
            SA_ADD_PRODUCTS(sum[r][1], eight, right);
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        const sa_int32s low = SA_SHUFFLE(sum[r][0], sum[r][1], 0, 4, 1, 5),
                        high = SA_SHUFFLE(sum[r][0], sum[r][1], 2, 6, 3, 7), two = low + high;
        sa_int32s all = two + SA_SHUFFLE(two, two, 2, 3, 2, 3), before = {0};
        int32_t *to = sums + r * SA_PANEL_COLUMNS;
        if (adds) {
            memcpy(&before, to, 2 * sizeof *to);
        }
        all += before;
        memcpy(to, &all, 2 * sizeof *to);
    }
#else
    for (int r = 0; r < rows; ++r) {
        int32_t left = 0, right = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            left += x[r * stride + i] * w[i];
            right += x[r * stride + i] * w[SA_PLAIN_DEPTH + i];
        }
        int32_t *to = sums + r * SA_PANEL_COLUMNS;
        to[0] = left + (adds ? to[0] : 0);
        to[1] = right + (adds ? to[1] : 0);
    }
#endif
}

SA_LEAF void sa_dot_products4(const int16_t *x, ptrdiff_t stride, const int16_t *w, ptrdiff_t n, int32_t *sums,
                              bool adds) {
    sa_dot_products(x, stride, w, n, sums, adds, 4);
}
SA_LEAF void sa_dot_products1(const int16_t *x, ptrdiff_t stride, const int16_t *w, ptrdiff_t n, int32_t *sums,
                              bool adds) {
    sa_dot_products(x, stride, w, n, sums, adds, 1);
}

static void sa_int8_plain(const sa_compact_tile *t) {
    int16_t w[SA_PANEL_COLUMNS * SA_PLAIN_DEPTH] __attribute__((aligned(64)));
    const ptrdiff_t most = SA_PLAIN_DEPTH / SA_WORD, stride = t->stride / (ptrdiff_t)sizeof(int16_t);
    ptrdiff_t k = 0;
    do { /* runs once even without words, to set the sums */
        const ptrdiff_t words = SA_SMALLER(t->words - k, most), n = (words + words % 2) * SA_WORD;
        const int16_t *x = (const int16_t *)(const void *)t->x + k * SA_WORD;
        sa_widen_panel(t, k, words, w);
        for (ptrdiff_t c = 0; c < SA_PANEL_COLUMNS; c += 2) {
            int32_t *sums = (int32_t *)t->sums + c;
            ptrdiff_t r = 0;
            for (; r + 4 <= t->rows; r += 4) {
                sa_dot_products4(x + r * stride, stride, w + c * SA_PLAIN_DEPTH, n, sums + r * SA_PANEL_COLUMNS, k > 0);
            }
            for (; r < t->rows; ++r) {
                sa_dot_products1(x + r * stride, stride, w + c * SA_PLAIN_DEPTH, n, sums + r * SA_PANEL_COLUMNS, k > 0);
            }
        }
        k += words;
    } while (k < t->words);
}

const sa_compact_unit SA_PASTE(sa_int8_, SA_ISA) = {
    .name = SA_STRING(SA_ISA), .most_rows = SA_PLAIN_ROWS, .widened = true, .leaf = sa_int8_plain};
