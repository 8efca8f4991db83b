/* A thread's scratch for a block of attention, in both passes. */

/* Rows further apart are copied: their lines share too few sets of the caches. */
#define SA_DIRECT_STRIDE 1024

/* Copied keys and values stay for the head's next block, up to this size. */
#define SA_CACHE_BYTES ((size_t)4 << 20)

/* `room` copied rows of a head, and behind them one tile that is not kept. */
typedef struct {
    real *rows;
    unsigned char *filled; /* [room / SA_KEYS_PER_TILE] */
    ptrdiff_t room;
} FN(cache);

/* Tiles in bfloat16. */
typedef struct {
    char *tiles; /* `room` cells, and behind them one that is not kept */
    unsigned char *state;
    ptrdiff_t room;
    size_t bytes, row_bytes; /* of a cell; of one of its rows, of pairs, or terms, of tiles */
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

/* bfloat16 operands of a wide block. */
typedef struct {
    int terms; /* of an element of keys or values; 0: the block goes by multiply-adds */
    int query_terms, weight_terms;
    bool of_16_bits; /* is_of_16_bits of the call */
    FN(cells) keys, values;
    char *queries, *weights;         /* right operands */
    char *rows;                      /* [lanes] rows of pairs */
    const char *values_now;          /* the tile's cell */
    real *product;                   /* [32][32] */
    int from[SA_KEYS_PER_TILE / 32]; /* of each 32 keys, the first vector with weights */
    bool queries_fit;
} FN(wide_state);

/* Of a block of a few rows. */
typedef struct {
    bool use, open;
    bool lost;               /* without its factor a score left float32's range */
    bool rounds;             /* weights are rounded to bfloat16 */
    char *queries, *weights; /* right, left operands */
    real *product;
    char *rows; /* a tile that cannot be read in place */
} FN(decode_state);

/* Of the backward pass. bf16dot.h joins rows in twos, without the factors of grad_out. */
typedef struct {
    FN(cells) values, key_columns;
    char *grad_out;                 /* dOᵀ, right operand [Dv] by queries */
    char *query_rows, *grad_rows;   /* Q and dO, right operands [queries] by E and by Dv */
    char *weights, *dscores;        /* left operands P, dS [keys of a slice] by queries; of bf16dot.h dS by pairs of keys */
    real factor[FN(backward_rows)]; /* of the rows of dO */
    int terms;                      /* of each of these */
    bool fit;                       /* all of Q and dO */
    bool grad_out_fits;
} FN(gradient_state);

/* Keys any_from … any_to − 1 are open in some lane, all_from … all_to − 1 in all. */
typedef struct {
    ptrdiff_t any_from, any_to, all_from, all_to;
} FN(open_bounds);

typedef struct FN(unit) FN(unit);

typedef real FN(per_row)[FN(backward_rows)] __attribute__((aligned(64)));

/* W = block rows, or the backward pass's. */
typedef struct {
    FN(per_row) top, maximum, sum, alpha, tile_sum, slope, position, lo, hi, ones;
    const FN(unit) * unit; /* beside the multiply-adds, or NULL */
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
    bool empty;                             /* wide: O is still to be zeroed */
    FN(open_bounds) open[SA_BACKWARD_VECS]; /* where rows->clipped */
    bool scaled;                            /* wide: s->q is copied */
    sa_ahead ahead;
    FN(wide_state) wide;
    FN(decode_state) decode;
} FN(scratch);

/* What is finite stays finite. */
SA_INLINE real FN(in_log2)(double x) {
    const double y = x * SA_LOG2E;
    if (x - x != 0) {
        return (real)x;
    }
    return y > SA_REAL_MAX ? SA_REAL_MAX : y < -SA_REAL_MAX ? -SA_REAL_MAX : (real)y;
}

SA_INLINE real FN(factor_of)(const sa_attention *a) { return (real)(a->scale * SA_LOG2E); }

/* Whether products of bfloat16 stay in range without it. */
SA_INLINE bool FN(factor_is_ordinary)(const sa_attention *a) {
    return FN(factor_of)(a) >= 0x1p-40f && FN(factor_of)(a) <= 0x1p40f;
}

SA_INLINE size_t FN(round_up)(ptrdiff_t n) { return ((size_t)n + SA_LANES - 1) / SA_LANES * SA_LANES; }
