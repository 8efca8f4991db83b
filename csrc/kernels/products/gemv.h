/* Quants (quant_kinds.h) times rows that are split into one to three digits. Sums of 32 numbers are exact integers,
 * scaled in a fixed order. Lanes are columns, that is rows of the weight; nothing is expanded to float32. Rows of three
 * digits, those of decoding, are multiplied as the quants are read. For prompts the words of the quants are first
 * written to a panel.
 *
 * Before including this, the ISA file defines SA_GEMV_LANES, SA_GEMV_ROWS (the rows that a panel multiplies at once),
 * the vectors sa_words, sa_ints and sa_floats, and these verbs:
 *     sa_gemv_pair(p)            words whose lower halves follow one another from p on, the upper ones
 *                                2·SA_GEMV_COLUMNS bytes later
 *     sa_gemv_half(x)            float32 of the float16 in the lower half of each word
 *     sa_gemv_dot(sum, q, x, b)  each lane of sum plus four products of unsigned q, of 6 bits, or of 8 with b,
 *                                and signed x
 *     sa_gemv_fma(a, b, c)
 *     sa_gemv_look_up(q)         bytes of sa_quant_values */
#include "kernels/kernels.h"

/* Up to this many bytes, the columns in use and the columns being fetched fit L1 together. */
#define SA_GEMV_NEAR 16384

/* Pieces of SA_GEMV_LANES columns. Without a second scale or offsets, these arrays are not touched. */
typedef struct {
    sa_words q[SA_PANEL_PIECES][8];
    sa_floats scale[2][SA_PANEL_PIECES], offset[2][SA_PANEL_PIECES];
} sa_gemv_panel;

SA_VERB sa_words sa_gemv_words(uint32_t x) { return x - (sa_words){0}; }

/* v[i] = word i of the 16 bytes of each column, `from` bytes on. */
SA_VERB void sa_gemv_gather(const char *at, ptrdiff_t from, sa_words *v) {
    SA_UNROLL
    for (int i = 0; i < 4; ++i) {
        v[i] = sa_gemv_pair(at + (from + 4 * i) * SA_GEMV_COLUMNS);
    }
}

#define SA_Q(name) sa_gemv_##name
#define SA_Q_WORDS sa_words
#define SA_Q_AT const char *
#include "kernels/quant_bits.h"

SA_VERB sa_floats sa_gemv_floats(sa_words x) { return __builtin_convertvector((sa_ints)x, sa_floats); }

/* What differs in how kinds are multiplied; `zero` is as in sa_quant_kind. */
typedef struct {
    int zero, halves;
    bool offsets, bytes;
} sa_gemv_way;

SA_VERB sa_gemv_way sa_gemv_way_of(const sa_quant_kind *k) {
    return (sa_gemv_way){k->zero, sa_quant_by_halves(k) ? 2 : 1, k->m >= 0, k->zero == 7};
}

/* Adds the products of the words from … end − 1 of a piece, all or half of it, to the sums of some rows; row r's piece
 * is sa_digits_at(x, r * stride). Rows take turns, as an accumulator waits for its last sum. */
SA_VERB void sa_gemv_add(sa_floats *sum, const sa_digits *x, ptrdiff_t stride, const int rows, const sa_words *q,
                         sa_floats scale, const sa_gemv_way way, const int digits, const int half, const int from,
                         const int end) {
    sa_words s[SA_GEMV_ROWS][SA_DIGITS];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        SA_UNROLL
        for (int i = 0; i < digits; ++i) {
            const uint32_t minus = (uint32_t)sa_digits_at(x, r * stride, digits)->of[i].minus[half];
            s[r][i] = way.offsets ? sa_gemv_words(0) : sa_gemv_words(minus) << way.zero;
        }
    }
    SA_UNROLL
    for (int n = from; n < end; ++n) {
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            SA_UNROLL
            for (int i = 0; i < digits; ++i) {
                uint32_t four;
                memcpy(&four, sa_digits_at(x, r * stride, digits)->of[i].digit + 4 * n, sizeof four);
                s[r][i] = sa_gemv_dot(s[r][i], q[n], sa_gemv_words(four), way.bytes);
            }
        }
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        sa_floats all;
        if (digits < 3) { /* exact in 32 bits */
            all = sa_gemv_floats(digits == 1 ? s[r][0] : s[r][0] + (s[r][1] << 8));
        } else {
            all = sa_gemv_fma(sa_gemv_floats(s[r][1]), 256 - (sa_floats){0}, sa_gemv_floats(s[r][0]));
            all = sa_gemv_fma(sa_gemv_floats(s[r][2]), 65536 - (sa_floats){0}, all);
        }
        sum[r] = sa_gemv_fma(all, scale * sa_digits_at(x, r * stride, digits)->scale, sum[r]);
    }
}

/* Adds a piece's products to the sums of some rows. */
SA_VERB void sa_gemv_add_piece(sa_floats *sum, const sa_digits *x, ptrdiff_t stride, const int rows, const sa_words *q,
                               const sa_floats *scale, const sa_floats *offset, const sa_gemv_way way,
                               const int digits) {
    SA_UNROLL
    for (int half = 0; half < way.halves; ++half) {
        const int from = half * 4, which = way.halves == 1 ? 2 : half;
        sa_gemv_add(sum, x, stride, rows, q, scale[half], way, digits, which, from, from + 8 / way.halves);
    }
    if (way.offsets) {
        SA_UNROLL
        for (int r = 0; r < rows; ++r) {
            SA_UNROLL
            for (int half = 0; half < way.halves; ++half) {
                const float total = sa_digits_at(x, r * stride, digits)->total[way.halves == 1 ? 2 : half];
                sum[r] = sa_gemv_fma(offset[half], total - (sa_floats){0}, sum[r]);
            }
        }
    }
}

/* Reads SA_GEMV_LANES columns from column c on, from piece `first` on: up to SA_PANEL_PIECES pieces to the panel; or
 * all pieces, and multiplies them by rows of three digits. */
enum { SA_MULTIPLIES, SA_TO_PANEL };
SA_VERB void sa_gemv_columns(const sa_gemv_tile *t, ptrdiff_t c, ptrdiff_t first, const sa_quant_kind *k,
                             const bool to_panel) {
    sa_gemv_panel *panel = t->panel;
    const sa_gemv_way way = sa_gemv_way_of(k);
    const int groups = k->numbers / SA_PIECE, bytes = k->bytes, halves = way.halves;
    const ptrdiff_t stride = t->row_bytes, pieces = t->pieces, rows = t->rows;
    const ptrdiff_t end = !to_panel || pieces - first < SA_PANEL_PIECES ? pieces : first + SA_PANEL_PIECES;
    const char *next = t->weights + (SA_GEMV_COLUMNS + c) * stride;
    const char *at = t->weights + 2 * c + first / groups * bytes * SA_GEMV_COLUMNS;
    const bool near = SA_GEMV_COLUMNS * stride <= SA_GEMV_NEAR;
    for (ptrdiff_t piece = first; piece < end; at += bytes * SA_GEMV_COLUMNS) {
        sa_words head[5], q[8];
        sa_gemv_head(at, k, head);
        const sa_floats d = sa_gemv_half(sa_gemv_half_word(head, k->d));
        for (int g = 0; g < groups; ++g, ++piece) {
            sa_floats scale[2], offset[2];
            sa_gemv_piece(at, head, k, g, q);
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
            if (to_panel) {
                memcpy(panel->q[piece - first], q, sizeof q);
                SA_UNROLL
                for (int half = 0; half < halves; ++half) {
                    panel->scale[half][piece - first] = scale[half];
                    panel->offset[half][piece - first] = offset[half];
                }
                continue;
            }
            const sa_digits *x = t->x + piece;
            float *sums = t->sums + c;
            for (ptrdiff_t r = 0; r < rows; ++r, x += pieces, sums += SA_GEMV_COLUMNS) {
                sa_floats sum;
                memcpy(&sum, sums, sizeof sum);
                sa_gemv_add_piece(&sum, x, 0, 1, q, scale, offset, way, SA_DIGITS);
                memcpy(sums, &sum, sizeof sum);
            }
        }
    }
}

/* ---- rows times a panel ------------------------------------------------------------------------------------------ */

/* Adds the products of n pieces of some rows; x is the first row's first piece, sums the first row's. */
SA_VERB void sa_gemv_multiply(const sa_gemv_tile *t, const sa_gemv_panel *panel, ptrdiff_t n, const sa_digits *x,
                              float *sums, const int rows, const sa_gemv_way way, const int digits) {
    sa_floats sum[SA_GEMV_ROWS];
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        memcpy(&sum[r], sums + r * SA_GEMV_COLUMNS, sizeof sum[r]);
    }
    for (ptrdiff_t piece = 0; piece < n; ++piece) {
        const sa_floats scale[2] = {panel->scale[0][piece], panel->scale[way.halves - 1][piece]};
        const sa_floats offset[2] = {panel->offset[0][piece], panel->offset[way.halves - 1][piece]};
        sa_gemv_add_piece(sum, sa_digits_at(x, piece, digits), t->pieces, rows, panel->q[piece], scale, offset, way,
                          digits);
    }
    SA_UNROLL
    for (int r = 0; r < rows; ++r) {
        memcpy(sums + r * SA_GEMV_COLUMNS, &sum[r], sizeof sum[r]);
    }
}

/* The same for all rows of a tile. */
SA_VERB void sa_gemv_all_rows(const sa_gemv_tile *t, const sa_gemv_panel *panel, ptrdiff_t first, ptrdiff_t c,
                              const sa_gemv_way way, const int digits) {
    const ptrdiff_t n = SA_SMALLER(t->pieces - first, SA_PANEL_PIECES);
    for (ptrdiff_t r = 0; r < t->rows;) {
        const sa_digits *x = sa_digits_at(t->x, r * t->pieces + first, digits);
        float *sums = t->sums + r * SA_GEMV_COLUMNS + c;
        if (t->rows - r >= SA_GEMV_ROWS) {
            sa_gemv_multiply(t, panel, n, x, sums, SA_GEMV_ROWS, way, digits);
            r += SA_GEMV_ROWS;
        } else {
            sa_gemv_multiply(t, panel, n, x, sums, 1, way, digits);
            ++r;
        }
    }
}

/* X(name, halves, offsets, bytes): the ways that are compiled, for each number of digits. */
#define SA_GEMV_WAYS(X)                                                                                                \
    X(plain, 1, false, false)                                                                                          \
    X(bytes, 1, false, true) X(offsets, 1, true, false) X(halves, 2, false, false) X(halves_offsets, 2, true, false)
#define SA_GEMV_ROWS_LEAF(name, halves, offsets, bytes)                                                                \
    SA_LEAF void sa_gemv_rows_##name(const sa_gemv_tile *t, const sa_gemv_panel *panel, ptrdiff_t first,               \
                                     ptrdiff_t c) {                                                                    \
        const sa_gemv_way way = {sa_quant_kinds[t->type].zero, halves, offsets, bytes};                                \
        if (t->digits == 1) {                                                                                          \
            sa_gemv_all_rows(t, panel, first, c, way, 1);                                                              \
        } else {                                                                                                       \
            sa_gemv_all_rows(t, panel, first, c, way, 2);                                                              \
        }                                                                                                              \
    }
#define SA_GEMV_ROWS_CASE(name, halves_, offsets_, bytes_)                                                             \
    if (way.halves == halves_ && way.offsets == offsets_ && way.bytes == bytes_) {                                     \
        sa_gemv_rows_##name(t, t->panel, first, c);                                                                    \
    }
SA_GEMV_WAYS(SA_GEMV_ROWS_LEAF)

#define SA_GEMV_LEAF(kind)                                                                                             \
    SA_LEAF void sa_gemv_##kind(const sa_gemv_tile *t, ptrdiff_t c) {                                                  \
        sa_gemv_columns(t, c, 0, &sa_quant_kinds[SA_QUANT_##kind], SA_MULTIPLIES);                                     \
    }                                                                                                                  \
    SA_LEAF void sa_gemv_panel_##kind(const sa_gemv_tile *t, ptrdiff_t c, ptrdiff_t first) {                           \
        sa_gemv_columns(t, c, first, &sa_quant_kinds[SA_QUANT_##kind], SA_TO_PANEL);                                   \
    }
#define SA_GEMV_CASE(kind)                                                                                             \
    case SA_QUANT_##kind: sa_gemv_##kind(t, c); break;
#define SA_GEMV_PANEL_CASE(kind)                                                                                       \
    case SA_QUANT_##kind: sa_gemv_panel_##kind(t, c, first); break;
SA_QUANTS(SA_GEMV_LEAF)

static void sa_gemv(const sa_gemv_tile *t) {
    const sa_gemv_way way = sa_gemv_way_of(&sa_quant_kinds[t->type]);
    memset(t->sums, 0, (size_t)(t->rows * SA_GEMV_COLUMNS) * sizeof *t->sums);
    for (ptrdiff_t c = 0; c < SA_GEMV_COLUMNS; c += SA_GEMV_LANES) {
        if (t->digits == SA_DIGITS) {
            switch ((int)t->type) { SA_QUANTS(SA_GEMV_CASE) }
            continue;
        }
        for (ptrdiff_t first = 0; first < t->pieces; first += SA_PANEL_PIECES) {
            switch ((int)t->type) { SA_QUANTS(SA_GEMV_PANEL_CASE) }
            SA_GEMV_WAYS(SA_GEMV_ROWS_CASE)
        }
    }
}
