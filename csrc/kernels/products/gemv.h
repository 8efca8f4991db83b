/* Quants (quant_kinds.h) times rows of decoding, which are split into digits. Sums of 32 numbers are exact integers,
 * scaled in a fixed order. Lanes are columns, that is rows of the weight; nothing is expanded to float32.
 *
 * Before including this, the ISA file defines SA_GEMV_LANES, the vectors sa_words, sa_ints and sa_floats, and these verbs:
 *     sa_gemv_join(p)            16 bytes from each of two or four pointers, in one vector
 *     sa_gemv_low(a, b), …_high  words of a and b in turn, from the lower or upper half of each 16 bytes; …_pairs: two at a time
 *     sa_gemv_half(x)            float32 of the float16 in the lower half of each word
 *     sa_gemv_dot(sum, q, x, b)  each lane of sum plus four products of unsigned q, of 6 bits, or of 8 with b, and signed x
 *     sa_gemv_fma(a, b, c)
 *     sa_gemv_look_up(q)         bytes of sa_quant_values */

/* Up to this many bytes, the columns in use and the columns being fetched fit L1 together. */
#define SA_GEMV_NEAR 16384

/* Pointers into every fourth column, and the distance to the next and to the third after it. */
typedef struct {
    const char *fourth[SA_GEMV_LANES / 4];
    ptrdiff_t one, three;
} sa_gemv_columns_at;

/* Keeps a pointer in a register, as GCC would keep one for each column. */
#define SA_GEMV_HOLD(p) __asm__("" : "+r"(p))

SA_VERB void sa_gemv_advance(sa_gemv_columns_at *at, ptrdiff_t bytes) {
    SA_UNROLL
    for (int j = 0; j < SA_GEMV_LANES / 4; ++j) {
        at->fourth[j] += bytes;
        SA_GEMV_HOLD(at->fourth[j]);
    }
}

SA_VERB sa_words sa_gemv_words(uint32_t x) { return x - (sa_words){0}; }

SA_VERB sa_words sa_gemv_load(const sa_gemv_columns_at *at, ptrdiff_t from) {
    const char *p[SA_GEMV_LANES / 4];
    SA_UNROLL
    for (int j = 0; j < SA_GEMV_LANES / 4; ++j) {
        p[j] = at->fourth[j] + from;
    }
    return sa_gemv_join(p);
}

/* Lane c of v[i] becomes word i of the 16 bytes of column c, `from` bytes on. */
SA_VERB void sa_gemv_gather(const sa_gemv_columns_at *at, ptrdiff_t from, sa_words *v) {
    const sa_words a = sa_gemv_load(at, from), b = sa_gemv_load(at, from + at->one);
    const sa_words c = sa_gemv_load(at, from + 2 * at->one), d = sa_gemv_load(at, from + at->three);
    const sa_words low = sa_gemv_low(a, b), low2 = sa_gemv_low(c, d), high = sa_gemv_high(a, b), high2 = sa_gemv_high(c, d);
    v[0] = sa_gemv_low_pairs(low, low2);
    v[1] = sa_gemv_high_pairs(low, low2);
    v[2] = sa_gemv_low_pairs(high, high2);
    v[3] = sa_gemv_high_pairs(high, high2);
}

#define SA_Q(name) sa_gemv_##name
#define SA_Q_WORDS sa_words
#define SA_Q_AT const sa_gemv_columns_at *
#include "kernels/quant_bits.h"

SA_VERB sa_floats sa_gemv_floats(sa_words x) { return __builtin_convertvector((sa_ints)x, sa_floats); }

/* Returns sum plus the products of the words from … end − 1 of a piece, all or half of it. */
SA_VERB sa_floats sa_gemv_add(sa_floats sum, const sa_digits *x, const sa_words *q, sa_floats scale, const sa_quant_kind *k,
                              const int half, const int from, const int end) {
    sa_words s[SA_DIGITS];
    SA_UNROLL
    for (int i = 0; i < SA_DIGITS; ++i) {
        s[i] = k->zero < 0 ? sa_gemv_words(0) : sa_gemv_words((uint32_t)x->minus[half][i]) << k->zero;
    }
    SA_UNROLL
    for (int n = from; n < end; ++n) {
        SA_UNROLL
        for (int i = 0; i < SA_DIGITS; ++i) {
            uint32_t four;
            memcpy(&four, x->digit[i] + 4 * n, sizeof four);
            s[i] = sa_gemv_dot(s[i], q[n], sa_gemv_words(four), k->zero == 7);
        }
    }
    const sa_floats one = sa_gemv_fma(sa_gemv_floats(s[1]), 256 - (sa_floats){0}, sa_gemv_floats(s[0]));
    const sa_floats all = sa_gemv_fma(sa_gemv_floats(s[2]), 65536 - (sa_floats){0}, one);
    return sa_gemv_fma(all, scale * x->scale, sum);
}

/* Multiplies SA_GEMV_LANES columns from column c on. */
SA_VERB void sa_gemv_columns(const sa_gemv_tile *t, ptrdiff_t c, const sa_quant_kind *k) {
    const int groups = k->numbers / SA_PIECE, bytes = k->bytes, halves = sa_quant_by_halves(k) ? 2 : 1;
    const ptrdiff_t stride = t->row_bytes, pieces = t->pieces, rows = t->rows;
    const char *next = t->weights + (SA_GEMV_COLUMNS + c) * stride;
    sa_gemv_columns_at at = {.one = stride, .three = 3 * stride};
    SA_UNROLL
    for (int j = 0; j < SA_GEMV_LANES / 4; ++j) {
        at.fourth[j] = t->weights + (c + 4 * j) * stride;
    }
    const bool near = SA_GEMV_COLUMNS * stride <= SA_GEMV_NEAR;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        memset(t->sums + r * SA_GEMV_COLUMNS + c, 0, sizeof(sa_floats));
    }
    for (ptrdiff_t piece = 0; piece < pieces; sa_gemv_advance(&at, bytes)) {
        sa_words head[5], q[8];
        sa_gemv_head(&at, k, head);
        const sa_floats d = sa_gemv_half(sa_gemv_half_word(head, k->d));
        for (int g = 0; g < groups; ++g, ++piece) {
            sa_floats scale[2], offset[2];
            sa_gemv_piece(&at, head, k, g, q);
            SA_UNROLL
            for (int half = 0; half < halves; ++half) {
                sa_words whole, factor;
                sa_gemv_scales(head, k, g * halves + half, &whole, &factor);
                scale[half] = d * sa_gemv_floats(whole);
                offset[half] = k->m < 0 ? d : sa_gemv_half(sa_gemv_half_word(head, k->m)) * sa_gemv_floats(factor);
            }
            SA_UNROLL
            for (int line = 0; line < (bytes * SA_GEMV_LANES / groups + 63) / 64; ++line) {
                if (near) {
                    __builtin_prefetch(next + piece * bytes * SA_GEMV_LANES / groups + 64 * line);
                } else {
                    __builtin_prefetch(next + piece * bytes * SA_GEMV_LANES / groups + 64 * line, 0, 2);
                }
            }
            const sa_digits *x = t->x + piece;
            float *sums = t->sums + c;
            for (ptrdiff_t r = 0; r < rows; ++r, x += pieces, sums += SA_GEMV_COLUMNS) {
                sa_floats sum;
                memcpy(&sum, sums, sizeof sum);
                SA_UNROLL
                for (int half = 0; half < halves; ++half) {
                    sum = sa_gemv_add(sum, x, q, scale[half], k, halves == 1 ? 2 : half, half * 4, half * 4 + 8 / halves);
                }
                if (k->m >= 0) {
                    SA_UNROLL
                    for (int half = 0; half < halves; ++half) {
                        sum = sa_gemv_fma(offset[half], x->total[halves == 1 ? 2 : half] - (sa_floats){0}, sum);
                    }
                }
                memcpy(sums, &sum, sizeof sum);
            }
        }
    }
}

#define SA_GEMV_LEAF(kind)                                                                                                     \
    SA_LEAF void sa_gemv_##kind(const sa_gemv_tile *t, ptrdiff_t c) { sa_gemv_columns(t, c, &sa_quant_kinds[SA_QUANT_##kind]); }
#define SA_GEMV_CASE(kind)                                                                                                     \
    case SA_QUANT_##kind: sa_gemv_##kind(t, c); break;
SA_QUANTS(SA_GEMV_LEAF)

static void sa_gemv(const sa_gemv_tile *t) {
    for (ptrdiff_t c = 0; c < SA_GEMV_COLUMNS; c += SA_GEMV_LANES) {
        switch ((int)t->type) { SA_QUANTS(SA_GEMV_CASE) }
    }
}
