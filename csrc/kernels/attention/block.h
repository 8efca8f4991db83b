/* For both passes over a block: a thread's scratch and its layout; a tile's rows, in place or copied; the keys of a
 * tile that the bounds of rows (causal, windows, lengths) leave open.
 * Comes after simd/exp.h and kernels/products/tiles.h. */
#include "kernels/kernels.h"

_Static_assert(FN(block_rows) <= FN(backward_rows) && FN(backward_rows) <= SA_MAX_BLOCK_ROWS, "rows of a block");

/* Rows with a larger stride, in bytes, are copied, because they would use too few sets of the caches. */
#define SA_DIRECT_STRIDE 1024

/* Up to this size, copied keys and values stay for the head's next block. */
#define SA_COPIED_BYTES ((size_t)4 << 20)

/* Copied rows of a head: `room` of them, followed by a tile that is not kept. */
typedef struct {
    real *rows;
    unsigned char *filled; /* [room / SA_KEYS_PER_TILE] */
    ptrdiff_t room;
} FN(copies);

/* Tiles of keys or values in bfloat16, each in a cell. */
typedef struct {
    char *tiles; /* `room` cells, followed by a cell that is not kept */
    unsigned char *state;
    ptrdiff_t room;
    size_t bytes, row_bytes; /* bytes of a cell, and of one of its rows of pairs or terms of tiles */
} FN(cells);

/* Lays out `count` cells, or as many as may be kept. Returns the new `used`. */
SA_ONCE size_t FN(lay_out_cells)(FN(cells) * s, size_t row_bytes, int rows, ptrdiff_t count, char *base, size_t used) {
    s->row_bytes = row_bytes;
    s->bytes = row_bytes * (size_t)rows;
    const ptrdiff_t most = (ptrdiff_t)(SA_COPIED_BYTES / s->bytes);
    s->room = SA_SMALLER(count, most);
    SA_TAKE(tiles, char, (size_t)(s->room + 1) * s->bytes);
    SA_TAKE(state, unsigned char, (size_t)s->room);
    return used;
}

SA_INLINE void FN(forget_cells)(const FN(cells) * cells) { memset(cells->state, SA_CELL_UNKNOWN, (size_t)cells->room); }

/* The unit's scratch for a wide block: operands in bfloat16. */
typedef struct {
    int terms; /* terms of an element of keys or values; 0: multiply-adds compute the block */
    int query_terms, weight_terms;
    bool of_16_bits; /* all arrays of the call have 16 bits */
    FN(cells) keys, values;
    char *queries, *weights;         /* right operands */
    char *rows;                      /* [lanes] rows of pairs */
    const char *values_now;          /* the tile's cell */
    real *product;                   /* [32][32] */
    int from[SA_KEYS_PER_TILE / 32]; /* for each 32 keys, the first vector with weights */
    bool queries_fit;
} FN(wide_state);

/* The unit's scratch for a block of few rows. */
typedef struct {
    bool use;                /* the unit computes the block's products */
    bool holds_unit;         /* unit->end must be called */
    bool lost;               /* a score without its factor exceeded float32's range */
    bool rounds;             /* weights are rounded to bfloat16 */
    char *queries, *weights; /* right operands, left operands */
    real *product;
    char *rows; /* a tile that cannot be read in place */
} FN(decode_state);

/* The unit's scratch for the backward pass. bf16dot.h joins rows in pairs, without the factors of grad_out. */
typedef struct {
    FN(cells) values, key_columns;
    char *grad_out;               /* dOᵀ, right operand [Dv] by queries */
    char *query_rows, *grad_rows; /* Q and dO, right operands [queries] by E and by Dv */
    char *weights, *dscores; /* left operands P, dS [keys of a slice] by queries; in bf16dot.h dS by pairs of keys */
    real factor[FN(backward_rows)]; /* the factors of dO's rows */
    int terms;                      /* terms of each of these operands */
    bool fit;                       /* these operands can represent all of Q and dO */
    bool grad_out_fits;
} FN(gradient_state);

/* Keys any_from … any_to − 1 are open in some lane, keys all_from … all_to − 1 in every lane. */
typedef struct {
    ptrdiff_t any_from, any_to, all_from, all_to;
} FN(open_bounds);

typedef struct FN(unit) FN(unit);

typedef real FN(per_row)[FN(backward_rows)] __attribute__((aligned(64)));

/* A thread's scratch. W is the most rows of a block: block_rows or backward_rows. */
typedef struct {
    FN(per_row) top, maximum, sum, alpha, tile_sum, slope, position, lo, hi, ones;
    const FN(unit) * unit; /* NULL: multiply-adds compute all products */
    real *q;               /* wide: qT[E][nv·lanes]; decode: [rows][E rounded up to 2 vectors] */
    real *O;               /* wide: [Dv][nv·lanes]; decode: [rows][Dv rounded up] */
    real *P;               /* [keys][nv·lanes] */
    FN(copies) key, value;
    real *mask_rows;                     /* [W][keys] */
    real *row;                           /* [SA_LANES][the largest of E, Dv and keys, each rounded up] */
    uint32_t *index, *head_lo, *head_hi; /* [W rounded up to words' lanes] */
    uint32_t *words;                     /* [4][W rounded up to words' lanes] */
    real *gain;                          /* [keys][nv·lanes], softcap's derivative or tanh, or NULL */
    bool holds_tanh;                     /* gain holds tanh */
    const real *k;                       /* the tile's keys [n][k_stride] */
    ptrdiff_t k_stride;
    real factor;                            /* scores are P times this factor */
    bool empty;                             /* wide: O is uninitialised, not even zeros */
    FN(open_bounds) open[SA_BACKWARD_VECS]; /* valid if rows->clipped */
    bool scaled;                            /* wide: s->q is copied */
    sa_ahead ahead;
    FN(wide_state) wide;
    FN(decode_state) decode;
} FN(scratch);

/* x·log2 e. A finite x stays finite. */
SA_INLINE real FN(in_log2)(double x) {
    const double y = x * SA_LOG2E;
    if (x - x != 0) {
        return (real)x;
    }
    return y > SA_REAL_MAX ? SA_REAL_MAX : y < -SA_REAL_MAX ? -SA_REAL_MAX : (real)y;
}

SA_INLINE real FN(factor_of)(const sa_attention *a) { return (real)(a->scale * SA_LOG2E); }

/* True if products of bfloat16 stay in range without the factor. */
SA_INLINE bool FN(factor_is_ordinary)(const sa_attention *a) {
    return FN(factor_of)(a) >= 0x1p-40f && FN(factor_of)(a) <= 0x1p40f;
}

SA_INLINE size_t FN(round_up)(ptrdiff_t n) { return SA_CEIL_DIV((size_t)n, SA_LANES) * SA_LANES; }

/* ---- sizes and places -------------------------------------------------------------------------------------------- */

#include "kernels/products/unit.h"

/* True if some tile of t, keys or values, must be copied. */
SA_INLINE bool FN(some_tile_is_copied)(const sa_attention *a, const sa_tensor *t) {
    bool copies = !FN(is_direct)(&t->m) || t->m.row_stride > SA_DIRECT_STRIDE || t->m.row_stride < -SA_DIRECT_STRIDE;
    for (int axis = 0; axis < a->n_lead; ++axis) { /* in a packed record some heads may be aligned and others not */
        copies |= t->lead_stride[axis] % (ptrdiff_t)sizeof(real) != 0;
    }
    return copies;
}

/* Returns the scratch's size, linear in E and Dv, and lays the scratch out from base on, unless base is NULL. */
SA_ONCE size_t FN(lay_out)(const sa_attention *a, char *base, FN(scratch) * s, size_t W, const FN(unit) * unit) {
    const bool in_cells = unit && unit->take(a);
    const size_t E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv);
    const size_t keys = a->S < SA_KEYS_PER_TILE && !in_cells ? FN(round_up)(a->S) : SA_KEYS_PER_TILE;
    const size_t longest = SA_LARGER(SA_LARGER(E, Dv), keys);
    const size_t cells = SA_CEIL_DIV((size_t)a->S, SA_KEYS_PER_TILE);
    const size_t words = SA_CEIL_DIV(W, SA_U32_LANES) * SA_U32_LANES;
    const bool copies_keys = FN(some_tile_is_copied)(a, &a->key), copies_values = FN(some_tile_is_copied)(a, &a->value);
    const size_t key_width = copies_keys ? (size_t)a->E : 0, value_width = copies_values ? (size_t)a->Dv : 0;
    const size_t width = key_width + value_width;
    const size_t most = width == 0 ? 0 : SA_COPIED_BYTES / (SA_KEYS_PER_TILE * sizeof(real) * (width + 1));
    const size_t kept = in_cells && unit->replace_rows ? 0 : SA_SMALLER(cells, most),
                 places = kept < cells ? kept + 1 : kept;
    size_t used = 0;
    s->key.room = copies_keys ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->value.room = copies_values ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->unit = unit;
    s->gain = NULL;
    s->holds_tanh = false;
    SA_TAKE(q, real, E * W);
    SA_TAKE(O, real, Dv * W);
    SA_TAKE(P, real, keys * W);
    SA_TAKE(row, real, longest * SA_LANES);
    if (copies_keys) {
        SA_TAKE(key.rows, real, places * SA_KEYS_PER_TILE * key_width);
        SA_TAKE(key.filled, unsigned char, kept);
    }
    if (copies_values) {
        SA_TAKE(value.rows, real, places * SA_KEYS_PER_TILE * value_width);
        SA_TAKE(value.filled, unsigned char, kept);
    }
    if (a->mask.m.data || a->offset_bias.m.data) {
        SA_TAKE(mask_rows, real, keys * W);
    }
    if (a->dropout_p > 0) {
        SA_TAKE(index, uint32_t, words);
        SA_TAKE(head_lo, uint32_t, words);
        SA_TAKE(head_hi, uint32_t, words);
        SA_TAKE(words, uint32_t, 4 * words);
    }
    s->factor = 1;
    s->scaled = false;
    s->ahead.now = s->ahead.count = 0;
    s->ahead.bytes = 0;
    s->wide.terms = 0;
    s->wide.queries_fit = false;
    s->decode.use = s->decode.holds_unit = s->decode.rounds = s->decode.lost = false;
    if (unit) {
        used = unit->lay_out_decode(a, base, used, &s->decode);
        used = in_cells ? unit->lay_out(a, base, used, &s->wide) : used;
    }
    return used;
}

/* ---- the rows of a tile ------------------------------------------------------------------------------------------ */

/* Copies nv vectors without memcpy, which would call the C library, as nv is not a literal. */
SA_INLINE void FN(copy_vectors)(real *to, const real *from, int nv) {
    for (int v = 0; v < nv; ++v) {
        V(store)(to + v * SA_LANES, V(load)(from + v * SA_LANES));
        SA_KEEP_LOOP();
    }
}
SA_INLINE void FN(clear_rows)(real *to) {
    SA_UNROLL
    for (int v = 0; v < SA_BACKWARD_VECS; ++v) {
        V(store)(to + v * SA_LANES, V(set1)(0));
    }
}

/* Spreads the planned fetches over the rounds of the next product, which has `rows` rows. On the matrix unit a product
 * has no rounds: everything is fetched now. */
SA_INLINE void FN(spread_ahead)(FN(scratch) * s, ptrdiff_t rows) {
    if (s->wide.terms && s->unit->replace_rows) {
        sa_fetch_rest(&s->ahead);
    }
    s->ahead.each = s->ahead.bytes / (rows / 8 + 1) + 1;
}

/* True if the rows are native, aligned and without gaps. */
SA_INLINE bool FN(rows_in_place)(const char *const *rows, int count, const sa_matrix *m) {
    bool direct = FN(is_native)(m);
    for (int r = 0; r < count && direct; ++r) {
        direct = (uintptr_t)rows[r] % sizeof(real) == 0;
    }
    return direct;
}

/* Points q at the queries of vector v, in place (`direct`) or in s->row. Returns their number. */
int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q);

/* The tile's rows as real[n][width]; copies them unless they are copied already. */
const real *FN(copied_rows)(const sa_block *b, const sa_matrix *m, FN(copies) * copies, ptrdiff_t first, ptrdiff_t n,
                            ptrdiff_t width);

/* The same rows as real[n][*stride], in place where that is possible and fast. */
SA_INLINE const real *FN(tile_rows)(const sa_block *b, const sa_matrix *m, FN(copies) * copies, ptrdiff_t first,
                                    ptrdiff_t n, ptrdiff_t width, ptrdiff_t *stride) {
    if (FN(is_direct)(m) && m->row_stride <= SA_DIRECT_STRIDE && m->row_stride >= -SA_DIRECT_STRIDE) {
        *stride = m->row_stride / (ptrdiff_t)sizeof(real);
        return (const void *)(m->data + first * m->row_stride);
    }
    *stride = width;
    return FN(copied_rows)(b, m, copies, first, n, width);
}

/* Zeroes O if nothing is stored there yet: the matrix unit stores its first product without adding to O. */
SA_INLINE void FN(start_output)(const sa_block *b, FN(scratch) * s, int nv) {
    if (s->empty) {
        memset(s->O, 0, (size_t)b->a->Dv * (size_t)nv * SA_LANES * sizeof(real));
        s->empty = false;
    }
}

/* ---- bounds of rows ---------------------------------------------------------------------------------------------- */

/* The key's index in the tile, clamped to 0 … n. */
SA_INLINE ptrdiff_t FN(in_tile)(ptrdiff_t key, ptrdiff_t first, ptrdiff_t n) {
    return key < first ? 0 : key - first > n ? n : key - first;
}

/* Passes over vector v need only the tile's first end[v] keys, a multiple of 4 or n: causal closes the later ones. Rows
 * are sorted by position; where lengths or block masks would let an end fall, it stays. */
SA_INLINE void FN(open_ends)(const sa_rows *rows, const FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv,
                             ptrdiff_t *end) {
    if (nv == 1 || !rows->clipped || first + n <= rows->open_to) {
        end[0] = n;
        for (int v = 1; v < nv; ++v) {
            SA_KEEP_LOOP();
            end[v] = n;
        }
        return;
    }
    ptrdiff_t most = 0;
    for (int v = 0; v < nv; ++v) {
        const ptrdiff_t open = s->open[v].any_to - first;
        most = SA_LARGER(open, most);
        end[v] = most > n ? n : SA_SMALLER((most + 3) / 4 * 4, n);
    }
}

/* If a row has no keys (0 … −1), no key is open to all rows. */
SA_INLINE FN(open_bounds) FN(open_rows)(const ptrdiff_t *lo, const ptrdiff_t *hi, int n) {
    FN(open_bounds) open = {.any_from = lo[0], .any_to = hi[0], .all_from = lo[0], .all_to = hi[0]};
    for (int r = 1; r < n; ++r) {
        SA_KEEP_LOOP();
        open.any_from = SA_SMALLER(lo[r], open.any_from);
        open.any_to = SA_LARGER(hi[r], open.any_to);
        open.all_from = SA_LARGER(lo[r], open.all_from);
        open.all_to = SA_SMALLER(hi[r], open.all_to);
    }
    return open;
}

/* Writes s->open. Whole vectors have a separate call, so that the compiler makes vector code of their loops. */
SA_ONCE void FN(open_vectors)(const sa_rows *rows, FN(scratch) * s, int nv) {
    for (int v = 0; v < nv; ++v) {
        const int at = v * SA_LANES, left = rows->count - at;
        if (left >= SA_LANES) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, SA_LANES);
        } else if (left > 0) {
            s->open[v] = FN(open_rows)(rows->lo + at, rows->hi + at, left);
        } else {
            s->open[v] = (FN(open_bounds)){.any_from = 0, .any_to = 0, .all_from = 0, .all_to = 0};
        }
    }
}

#if !defined(SA_PRODUCTS_ALONE)
/* ---- copies ------------------------------------------------------------------------------------------------------ */

SA_SHARED int FN(queries_of_vector)(const sa_block *b, FN(scratch) * s, bool direct, int v, const real **q) {
    const sa_matrix *m = &b->a->query.m;
    const int left = b->rows->count - v * SA_LANES, n = SA_SMALLER(left, SA_LANES);
    const size_t stride = FN(round_up)(b->a->E);
    for (int i = 0; i < n; ++i) {
        const char *row = b->rows->query[v * SA_LANES + i];
        q[i] = direct ? (const void *)row : s->row + (size_t)i * stride;
        if (!direct) {
            FN(load_row)(s->row + (size_t)i * stride, row, m->col_stride, b->a->E, m->dtype, m->swapped);
        }
    }
    return n;
}

/* Writes queries times scale·log2 e to s->q, with rows as lanes. */
SA_ONCE void FN(copy_queries)(const sa_block *b, FN(scratch) * s, int nv) {
    const sa_rows *rows = b->rows;
    const ptrdiff_t E = b->a->E;
    const sa_matrix *q = &b->a->query.m;
    const real factor = FN(factor_of)(b->a);
    const bool direct = FN(rows_in_place)(rows->query, rows->count, q);
    s->scaled = true;
    if (E < SA_LANES) {
        memset(s->q, 0, (size_t)E * (size_t)nv * SA_LANES * sizeof(real));
        for (int r = 0; r < rows->count; ++r) {
            const real *q_r = (const void *)rows->query[r];
            if (!direct) {
                FN(load_row)(s->row, rows->query[r], q->col_stride, E, q->dtype, q->swapped);
                q_r = s->row;
            }
            for (ptrdiff_t e = 0; e < E; ++e) {
                s->q[e * nv * SA_LANES + r] = q_r[e] * factor;
            }
        }
        return;
    }
    for (int v = 0; v < nv; ++v) {
        const real *q_i[SA_LANES];
        const int here = FN(queries_of_vector)(b, s, direct, v, q_i);
        for (ptrdiff_t e = 0; e < E; e += SA_LANES) {
            vec x[SA_LANES];
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                x[i] = V(set1)(0);
                if (i < here) {
                    x[i] = FN(load_up_to)(q_i[i] + e, E - e) * V(set1)(factor);
                }
            }
            FN(transpose)(x);
            SA_UNROLL
            for (int i = 0; i < SA_LANES; ++i) {
                if (e + i < E) {
                    V(store)(s->q + ((e + i) * nv + v) * SA_LANES, x[i]);
                }
            }
        }
    }
}

SA_ONCE void FN(copy_tile)(real *copied, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    if (!FN(is_direct)(m)) {
        FN(load_rows)(copied, m, first, n, width);
        return;
    }
    for (ptrdiff_t r = 0; r < n; ++r) {
        const real *from = (const void *)(m->data + (first + r) * m->row_stride);
        real *to = copied + r * width;
        for (ptrdiff_t i = 0; i < width; i += SA_LANES) {
            FN(store_up_to)(to + i, FN(load_up_to)(from + i, width - i), width - i);
        }
    }
}

SA_SHARED const real *FN(copied_rows)(const sa_block *b, const sa_matrix *m, FN(copies) * copies, ptrdiff_t first,
                                      ptrdiff_t n, ptrdiff_t width) {
    const ptrdiff_t at = first - b->copied_from, S = b->a->S;
    if (at + n > copies->room) {
        real *copied = copies->rows + copies->room * width;
        FN(copy_tile)(copied, m, first, n, width);
        return copied;
    }
    for (ptrdiff_t cell = at / SA_KEYS_PER_TILE; cell * SA_KEYS_PER_TILE < at + n; ++cell) {
        if (!copies->filled[cell]) {
            const ptrdiff_t row = cell * SA_KEYS_PER_TILE, from = b->copied_from + row;
            FN(copy_tile)(copies->rows + row * width, m, from, SA_SMALLER(S - from, SA_KEYS_PER_TILE), width);
            copies->filled[cell] = 1;
        }
    }
    return copies->rows + at * width;
}

/* A memset of 0 bytes would cost tiny calls time. */
SA_INLINE void FN(forget_tiles)(FN(copies) * copies) {
    if (copies->room > 0) {
        memset(copies->filled, 0, (size_t)copies->room / SA_KEYS_PER_TILE);
    }
}

/* Forgets tiles copied for other keys. */
SA_INLINE void FN(forget_copies)(const sa_block *b, FN(scratch) * s) {
    if (!b->holds_copies) {
        FN(forget_tiles)(&s->key);
        FN(forget_tiles)(&s->value);
    }
}
#endif
