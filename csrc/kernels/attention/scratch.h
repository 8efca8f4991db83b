/* A thread's scratch for a block of attention, in both passes, and its layout. */

/* Rows with a larger stride, in bytes, are copied: their lines share too few sets of the caches. */
#define SA_DIRECT_STRIDE 1024

/* Copied keys and values stay for the head's next block, up to this size. */
#define SA_CACHE_BYTES ((size_t)4 << 20)

/* `room` copied rows of a head, and after them one tile that is not kept. */
typedef struct {
    real *rows;
    unsigned char *filled; /* [room / SA_KEYS_PER_TILE] */
    ptrdiff_t room;
} FN(cache);

/* Tiles in bfloat16. */
typedef struct {
    char *tiles; /* `room` cells, and after them one that is not kept */
    unsigned char *state;
    ptrdiff_t room;
    size_t bytes, row_bytes; /* of a cell; of one of its rows of pairs, or terms of tiles */
} FN(cells);

/* Returns `used` with room for `count` cells, or as many as may be kept. */
SA_ONCE size_t FN(lay_out_cells)(FN(cells) * s, size_t row_bytes, int rows, ptrdiff_t count, char *base, size_t used) {
    s->row_bytes = row_bytes;
    s->bytes = row_bytes * (size_t)rows;
    const ptrdiff_t most = (ptrdiff_t)(SA_CACHE_BYTES / s->bytes);
    s->room = count < most ? count : most;
    SA_TAKE(tiles, char, (size_t)(s->room + 1) * s->bytes);
    SA_TAKE(state, unsigned char, (size_t)s->room);
    return used;
}

SA_INLINE void FN(forget_cells)(const FN(cells) * cells) { memset(cells->state, SA_CELL_UNKNOWN, (size_t)cells->room); }

/* The unit's share of the scratch for a wide block: operands in bfloat16. */
typedef struct {
    int terms; /* of an element of keys or values; 0: multiply-adds take the block */
    int query_terms, weight_terms;
    bool of_16_bits; /* is_of_16_bits of the call */
    FN(cells) keys, values;
    char *queries, *weights;         /* right operands */
    char *rows;                      /* [lanes] rows of pairs */
    const char *values_now;          /* the tile's cell */
    real *product;                   /* [32][32] */
    int from[SA_KEYS_PER_TILE / 32]; /* the first vector with weights for each 32 keys */
    bool queries_fit;
} FN(wide_state);

/* The unit's share of the scratch for a block of few rows. */
typedef struct {
    bool use;                /* the block's products are the unit's */
    bool holds_unit;         /* until unit->end */
    bool lost;               /* without its factor a score left float32's range */
    bool rounds;             /* weights are rounded to bfloat16 */
    char *queries, *weights; /* right, left operands */
    real *product;
    char *rows; /* a tile that cannot be read in place */
} FN(decode_state);

/* The same for the backward pass. bf16dot.h joins rows in twos, without the factors of grad_out. */
typedef struct {
    FN(cells) values, key_columns;
    char *grad_out;                 /* dOᵀ, right operand [Dv] by queries */
    char *query_rows, *grad_rows;   /* Q and dO, right operands [queries] by E and by Dv */
    char *weights, *dscores;        /* left operands P, dS [keys of a slice] by queries; of bf16dot.h dS by pairs of keys */
    real factor[FN(backward_rows)]; /* of the rows of dO */
    int terms;                      /* of each of these operands */
    bool fit;                       /* these hold all of Q and dO */
    bool grad_out_fits;
} FN(gradient_state);

/* Keys any_from … any_to − 1 are open in some lane, all_from … all_to − 1 in all. */
typedef struct {
    ptrdiff_t any_from, any_to, all_from, all_to;
} FN(open_bounds);

typedef struct FN(unit) FN(unit);

typedef real FN(per_row)[FN(backward_rows)] __attribute__((aligned(64)));

/* W: the most rows of a block, block_rows or backward_rows. */
typedef struct {
    FN(per_row) top, maximum, sum, alpha, tile_sum, slope, position, lo, hi, ones;
    const FN(unit) * unit; /* NULL: multiply-adds do all products */
    real *q;               /* wide: qT[E][nv·lanes]; decode: [rows][E rounded up to 2 vectors] */
    real *O;               /* wide: [Dv][nv·lanes]; decode: [rows][Dv rounded up] */
    real *P;               /* [keys][nv·lanes] */
    FN(cache) key, value;
    real *bias;                          /* mask rows [W][keys] */
    real *row;                           /* SA_LANES rows of E, Dv or keys, rounded up */
    uint32_t *index, *head_lo, *head_hi; /* [W rounded up to words' lanes] */
    uint32_t *words;                     /* [4][the same] */
    real *gain;                          /* [keys][nv·lanes], softcap's derivative, or NULL */
    const real *k;                       /* the tile's keys [n][k_stride] */
    ptrdiff_t k_stride;
    real factor;                            /* s->P times this are scores */
    bool empty;                             /* wide: O holds nothing yet, not even zeros */
    FN(open_bounds) open[SA_BACKWARD_VECS]; /* where rows->clipped */
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

SA_INLINE size_t FN(round_up)(ptrdiff_t n) { return ((size_t)n + SA_LANES - 1) / SA_LANES * SA_LANES; }

/* ---- sizes and places ---------------------------------------------------------------------------------------------- */

#include "kernels/products/unit.h"

/* True if some tile of the keys or values t must be copied. */
SA_INLINE bool FN(some_tile_is_copied)(const sa_attention *a, const sa_tensor *t) {
    bool copies = !FN(is_direct)(&t->m) || t->m.row_stride > SA_DIRECT_STRIDE || t->m.row_stride < -SA_DIRECT_STRIDE;
    for (int axis = 0; axis < a->n_lead; ++axis) { /* in a packed record the first head may be aligned and others not */
        copies |= t->lead_stride[axis] % (ptrdiff_t)sizeof(real) != 0;
    }
    return copies;
}

/* Returns the scratch's size, linear in E and Dv, and lays it out from base on, unless that is NULL. */
SA_ONCE size_t FN(lay_out)(const sa_attention *a, char *base, FN(scratch) * s, size_t W, const FN(unit) * unit) {
    const bool in_cells = unit && unit->take(a);
    const size_t E = FN(round_up)(a->E), Dv = FN(round_up)(a->Dv);
    const size_t keys = a->S < SA_KEYS_PER_TILE && !in_cells ? FN(round_up)(a->S) : SA_KEYS_PER_TILE;
    const size_t longest = E > Dv ? (E > keys ? E : keys) : (Dv > keys ? Dv : keys);
    const size_t cells = ((size_t)a->S + SA_KEYS_PER_TILE - 1) / SA_KEYS_PER_TILE;
    const size_t words = (W + SA_U32_LANES - 1) / SA_U32_LANES * SA_U32_LANES;
    const bool copies_keys = FN(some_tile_is_copied)(a, &a->key), copies_values = FN(some_tile_is_copied)(a, &a->value);
    const size_t key_width = copies_keys ? (size_t)a->E : 0, value_width = copies_values ? (size_t)a->Dv : 0;
    const size_t width = key_width + value_width;
    const size_t most = width == 0 ? 0 : SA_CACHE_BYTES / (SA_KEYS_PER_TILE * sizeof(real) * (width + 1));
    const size_t kept = in_cells && unit->replace_rows ? 0
                        : cells < most                 ? cells
                                                       : most,
                 places = kept < cells ? kept + 1 : kept;
    size_t used = 0;
    s->key.room = copies_keys ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->value.room = copies_values ? (ptrdiff_t)(kept * SA_KEYS_PER_TILE) : 0;
    s->unit = unit;
    s->gain = NULL;
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
    if (a->mask.m.data) {
        SA_TAKE(bias, real, keys * W);
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
