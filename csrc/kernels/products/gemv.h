/* Quants (transformer/quants.h) times rows of decoding, which are split into digits. Sums of 32 numbers are exact integers,
 * scaled in a fixed order. Lanes are columns, that is rows of the weight; nothing is expanded to float32.
 *
 * Before including this, the ISA file defines SA_GEMV_LANES, the vectors sa_words, sa_ints and sa_floats, and these verbs:
 *     sa_gemv_join(p)            16 bytes from each of two or four pointers, in one vector
 *     sa_gemv_low(a, b), …_high  words of a and b in turn, from the lower or upper half of each 16 bytes; …_pairs: two at a time
 *     sa_gemv_half(x)            float32 of the float16 in the lower half of each word
 *     sa_gemv_dot(sum, q, x, b)  each lane of sum plus four products of unsigned q, of 6 bits, or of 8 with b, and signed x
 *     sa_gemv_fma(a, b, c) */

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

/* 32 numbers of each column, with their scales. */
typedef struct {
    sa_words q[8];
    sa_floats scale[2]; /* in Q6_K one for each 16 numbers; else scale[0] for all */
    sa_floats offset;   /* for Q4_1 and Q4_K */
} sa_gemv_piece;

SA_VERB sa_floats sa_gemv_floats(sa_words x) { return __builtin_convertvector((sa_ints)x, sa_floats); }

SA_VERB void sa_gemv_nibbles(const sa_gemv_columns_at *p, ptrdiff_t from, sa_gemv_piece *to) {
    sa_words v[4];
    sa_gemv_gather(p, from, v);
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        to->q[i] = v[i] & 0x0f0f0f0f;
        to->q[4 + i] = v[i] >> 4 & 0x0f0f0f0f;
    }
}

/* The 6-bit scale and least of group g of a Q4_K quant. Groups 0 to 3: the low 6 bits of byte g of words 1 and 2. Groups 4 to
 * 7: low 4 bits in a half of byte g − 4 of word 3, high 2 bits at the top of that byte of words 1 and 2. */
SA_VERB void sa_gemv_scales(const sa_words *head, int g, sa_words *scale, sa_words *least) {
    const int shift = g % 4 * 8;
    *scale = head[1] >> shift & 63;
    *least = head[2] >> shift & 63;
    if (g >= 4) {
        *scale = (head[3] >> shift & 15) | (head[1] >> shift >> 6 & 3) << 4;
        *least = (head[3] >> shift >> 4 & 15) | (head[2] >> shift >> 6 & 3) << 4;
    }
}

SA_VERB void sa_gemv_take_q4_k(const sa_gemv_columns_at *p, const sa_words *head, int g, sa_gemv_piece *to) {
    sa_words scale, least;
    sa_gemv_gather(p, 16 + g / 2 * 32, to->q);
    sa_gemv_gather(p, 32 + g / 2 * 32, to->q + 4);
    SA_UNROLL
    for (int i = 0; i < 8; ++i) {
        to->q[i] = to->q[i] >> g % 2 * 4 & 0x0f0f0f0f;
    }
    sa_gemv_scales(head, g, &scale, &least);
    to->scale[0] = sa_gemv_half(head[0]) * sa_gemv_floats(scale);
    to->offset = sa_gemv_half(head[0] >> 16) * (0 - sa_gemv_floats(least));
}

/* head has the 16 scales, and d in the upper half of the fifth word. */
SA_VERB void sa_gemv_take_q6_k(const sa_gemv_columns_at *p, const sa_words *head, int g, sa_gemv_piece *to) {
    const int half = g / 4, part = g % 4;
    sa_words high[8];
    SA_UNROLL
    for (int i = 0; i < 8; i += 4) {
        sa_gemv_gather(p, 64 * half + part % 2 * 32 + 4 * i, to->q + i);
        sa_gemv_gather(p, 128 + 32 * half + 4 * i, high + i);
    }
    SA_UNROLL
    for (int i = 0; i < 8; ++i) {
        to->q[i] = (to->q[i] >> part / 2 * 4 & 0x0f0f0f0f) | (high[i] >> part * 2 & 0x03030303) << 4;
    }
    const sa_words word = g / 2 == 0   ? head[0]
                          : g / 2 == 1 ? head[1]
                          : g / 2 == 2 ? head[2]
                                       : head[3],
                   pair = word >> g % 2 * 16;
    const sa_floats d = sa_gemv_half(head[4] >> 16);
    to->scale[0] = d * __builtin_convertvector((sa_ints)(pair << 24) >> 24, sa_floats);
    to->scale[1] = d * __builtin_convertvector((sa_ints)(pair << 16) >> 24, sa_floats);
}

/* Loads the words that a quant has once for all its numbers. */
SA_VERB void sa_gemv_head(const sa_gemv_columns_at *p, const sa_quant_type type, sa_words *head) {
    if (type == SA_QUANT_Q6_K) {
        sa_words last[4];
        sa_gemv_gather(p, 192, head);
        sa_gemv_gather(p, 194, last);
        head[4] = last[3];
    } else {
        sa_gemv_gather(p, 0, head);
    }
}

SA_VERB void sa_gemv_take(const sa_gemv_columns_at *p, const sa_words *head, int g, const sa_quant_type type,
                          sa_gemv_piece *to) {
    switch (type) {
    case SA_QUANT_Q4_0:
        sa_gemv_nibbles(p, 2, to);
        to->scale[0] = sa_gemv_half(head[0]);
        break;
    case SA_QUANT_Q4_1:
        sa_gemv_nibbles(p, 4, to);
        to->scale[0] = sa_gemv_half(head[0]);
        to->offset = sa_gemv_half(head[0] >> 16);
        break;
    case SA_QUANT_Q8_0:
        sa_gemv_gather(p, 2, to->q);
        sa_gemv_gather(p, 18, to->q + 4);
        SA_UNROLL
        for (int i = 0; i < 8; ++i) {
            to->q[i] ^= 0x80808080; /* makes q + 128, unsigned */
        }
        to->scale[0] = sa_gemv_half(head[0]);
        break;
    case SA_QUANT_Q4_K: sa_gemv_take_q4_k(p, head, g, to); break;
    default: sa_gemv_take_q6_k(p, head, g, to); break;
    }
}

/* log2 of the q that means zero; −1 if q = 0 does. */
SA_VERB int sa_gemv_zero(const sa_quant_type type) {
    return type == SA_QUANT_Q4_0 ? 3 : type == SA_QUANT_Q8_0 ? 7 : type == SA_QUANT_Q6_K ? 5 : -1;
}

/* Returns sum plus the products of the words from … end − 1. */
SA_VERB sa_floats sa_gemv_add(sa_floats sum, const sa_digits *x, const sa_gemv_piece *w, const sa_quant_type type,
                              const int half, const int from, const int end) {
    sa_words s[SA_DIGITS];
    SA_UNROLL
    for (int i = 0; i < SA_DIGITS; ++i) {
        s[i] = sa_gemv_zero(type) < 0 ? sa_gemv_words(0) : sa_gemv_words((uint32_t)x->minus[half][i]) << sa_gemv_zero(type);
    }
    SA_UNROLL
    for (int k = from; k < end; ++k) {
        SA_UNROLL
        for (int i = 0; i < SA_DIGITS; ++i) {
            uint32_t four;
            memcpy(&four, x->digit[i] + 4 * k, sizeof four);
            s[i] = sa_gemv_dot(s[i], w->q[k], sa_gemv_words(four), type == SA_QUANT_Q8_0);
        }
    }
    const sa_floats one = sa_gemv_fma(sa_gemv_floats(s[1]), 256 - (sa_floats){0}, sa_gemv_floats(s[0]));
    const sa_floats all = sa_gemv_fma(sa_gemv_floats(s[2]), 65536 - (sa_floats){0}, one);
    return sa_gemv_fma(all, w->scale[half == 1] * x->scale, sum);
}

SA_VERB int sa_gemv_bytes(const sa_quant_type type) {
    return type == SA_QUANT_Q4_0   ? 18
           : type == SA_QUANT_Q4_1 ? 20
           : type == SA_QUANT_Q8_0 ? 34
           : type == SA_QUANT_Q4_K ? 144
                                   : 210;
}

/* Multiplies SA_GEMV_LANES columns from column c on. */
SA_VERB void sa_gemv_columns(const sa_gemv_tile *t, ptrdiff_t c, const sa_quant_type type) {
    const int groups = type == SA_QUANT_Q4_K || type == SA_QUANT_Q6_K ? 8 : 1, bytes = sa_gemv_bytes(type);
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
    for (ptrdiff_t k = 0; k < pieces; sa_gemv_advance(&at, bytes)) {
        sa_words head[5];
        sa_gemv_head(&at, type, head);
        for (int g = 0; g < groups; ++g, ++k) {
            sa_gemv_piece w;
            sa_gemv_take(&at, head, g, type, &w);
            SA_UNROLL
            for (int line = 0; line < (bytes * SA_GEMV_LANES / groups + 63) / 64; ++line) {
                if (near) {
                    __builtin_prefetch(next + k * bytes * SA_GEMV_LANES / groups + 64 * line);
                } else {
                    __builtin_prefetch(next + k * bytes * SA_GEMV_LANES / groups + 64 * line, 0, 2);
                }
            }
            const sa_digits *x = t->x + k;
            float *sums = t->sums + c;
            for (ptrdiff_t r = 0; r < rows; ++r, x += pieces, sums += SA_GEMV_COLUMNS) {
                sa_floats sum;
                memcpy(&sum, sums, sizeof sum);
                if (type == SA_QUANT_Q6_K) {
                    sum = sa_gemv_add(sum, x, &w, type, 0, 0, 4);
                    sum = sa_gemv_add(sum, x, &w, type, 1, 4, 8);
                } else {
                    sum = sa_gemv_add(sum, x, &w, type, 2, 0, 8);
                }
                if (type == SA_QUANT_Q4_1 || type == SA_QUANT_Q4_K) {
                    sum = sa_gemv_fma(w.offset, x->total - (sa_floats){0}, sum);
                }
                memcpy(sums, &sum, sizeof sum);
            }
        }
    }
}

#define SA_GEMV_TYPES(X)                                                                                                       \
    X(q4_0, SA_QUANT_Q4_0) X(q4_1, SA_QUANT_Q4_1) X(q8_0, SA_QUANT_Q8_0) X(q4_k, SA_QUANT_Q4_K) X(q6_k, SA_QUANT_Q6_K)
#define SA_GEMV_LEAF(name, type)                                                                                               \
    SA_LEAF void sa_gemv_##name(const sa_gemv_tile *t, ptrdiff_t c) { sa_gemv_columns(t, c, type); }
#define SA_GEMV_CASE(name, type)                                                                                               \
    case type: sa_gemv_##name(t, c); break;
SA_GEMV_TYPES(SA_GEMV_LEAF)

static void sa_gemv(const sa_gemv_tile *t) {
    for (ptrdiff_t c = 0; c < SA_GEMV_COLUMNS; c += SA_GEMV_LANES) {
        switch ((int)t->type) { SA_GEMV_TYPES(SA_GEMV_CASE) }
    }
}
