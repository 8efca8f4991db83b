/* The scratch of a thread that works on a block of attention: what is in it, and where. Both passes use it. */

/* A row's stride beyond this makes the tile worth packing: its lines fall on too few sets of the caches. */
#define SA_DIRECT_STRIDE 1024

/* Packed keys and values stay for the next block of the same head, up to this many bytes: 16 bits are converted once for each
 * head and thread, and rows that lie far apart are read once. */
#define SA_CACHE_BYTES ((size_t)4 << 20)

/* Keys or values of a head that had to be packed: `room` rows of it, tile by tile as they are asked for, and behind those
 * the place for one tile that is not kept. */
typedef struct {
    real *rows;
    unsigned char *filled; /* [room / SA_KEYS_PER_TILE] */
    ptrdiff_t room;
} FN(cache);

/* Tiles of keys or values in bfloat16, as products/bf16dot.h and products/amx.h multiply them. */
typedef struct {
    char *tiles; /* `room` cells, and behind them the place for one that is not kept */
    unsigned char *state;
    ptrdiff_t room;
    size_t bytes, part_bytes; /* of a cell, and of one row or one term of it */
} FN(cells);

/* Cells for `count` tiles of keys, as many of them as may be kept. */
SA_INLINE void FN(lay_out_cells)(FN(cells) * cells, size_t part_bytes, int parts, ptrdiff_t count) {
    cells->part_bytes = part_bytes;
    cells->bytes = part_bytes * (size_t)parts;
    const ptrdiff_t most = (ptrdiff_t)(SA_CACHE_BYTES / cells->bytes);
    cells->room = count < most ? count : most;
}

/* Operands in bfloat16 of a wide block. */
typedef struct {
    int terms; /* of bfloat16, that an element of keys and values is split into; 0: the block goes by multiply-adds */
    int query_terms, weight_terms;
    bool of_16_bits; /* what is_of_16_bits says of the call */
    FN(cells) keys, values;
    char *queries, *weights;         /* right operands */
    char *rows;                      /* [lanes] rows of pairs */
    const char *values_now;          /* the tile's cell */
    real *product;                   /* [32][32] */
    int from[SA_KEYS_PER_TILE / 32]; /* the first vector with weights, for each 32 keys of the tile */
    bool queries_fit;
} FN(wide_state);

/* The same of a block of a few rows. */
typedef struct {
    bool use, open;
    bool lost;               /* a score left float32's range without its factor */
    bool rounds;             /* its weights are of bfloat16, whether or not it can be held */
    char *queries, *weights; /* right, left operands */
    real *product;
    char *rows; /* a tile of keys or values, where they cannot be read in place */
} FN(decode_state);

/* The same of a block of the backward pass. Of bf16dot.h the rows are joined in twos, without the factors of grad_out. */
typedef struct {
    FN(cells) values, key_columns;
    char *grad_out;                 /* dOᵀ, right operand [Dv] by queries */
    char *query_rows, *grad_rows;   /* Q and dO, right operands [queries] by E and by Dv */
    char *weights, *dscores;        /* P and dS: left operands [keys of a step] by queries; of bf16dot.h dS by pairs of keys */
    real factor[FN(backward_rows)]; /* of the rows of dO */
    int terms;                      /* of each of these */
    bool fit;                       /* all of Q and dO */
    bool grad_out_fits;
} FN(gradient_state);

/* Keys any_from … any_to − 1 are open for some lane of a vector, all_from … all_to − 1 for all of its lanes. */
typedef struct {
    ptrdiff_t any_from, any_to, all_from, all_to;
} FN(open_bounds);

typedef struct FN(products) FN(products);

/* A number for each row of a block, on cache lines of its own. */
typedef real FN(per_row)[FN(backward_rows)] __attribute__((aligned(64)));

/* Scratch of one thread: numbers for each row of the block, and what is carved out of one allocation. W = block rows, or the
 * backward pass's. */
typedef struct {
    FN(per_row) top, maximum, sum, alpha, tile_sum, slope, position, lo, hi, ones;
    const FN(products) * products; /* those that are not by multiply-adds, or NULL */
    real *q;                       /* wide: qT[E][nv·lanes]; decode: [rows][E rounded up to pairs of vectors] */
    real *O;                       /* wide: [Dv][nv·lanes]; decode: [rows][Dv rounded up] */
    real *P;                       /* [keys][nv·lanes] */
    FN(cache) key, value;
    real *bias;                          /* mask rows [W][keys] */
    real *row;                           /* one row of E, Dv or keys elements, rounded up */
    uint32_t *index, *head_lo, *head_hi; /* [W rounded up to words' lanes] */
    uint32_t *words;                     /* [4][the same] */
    real *gain;                          /* [keys][nv·lanes], backward with softcap: its derivative; else NULL */
    const real *k;                       /* the tile's keys, as score_tile found them: [n][k_stride] */
    ptrdiff_t k_stride;
    real factor;                            /* what s->P is still to be multiplied with to be scores: 1 or scale·log2 e */
    bool empty;                             /* wide: O is still to be zeroed */
    FN(open_bounds) open[SA_BACKWARD_VECS]; /* where rows->clipped */
    bool scaled;                            /* wide: s->q holds the block's queries times scale·log2 e */
    sa_ahead ahead;
    FN(wide_state) wide;
    FN(decode_state) decode;
} FN(scratch);

/* A number in log2 units: what is finite stays finite. */
SA_INLINE real FN(in_log2)(double x) {
    const double y = x * SA_LOG2E;
    if (x - x != 0) {
        return (real)x;
    }
    return y > SA_REAL_MAX ? SA_REAL_MAX : y < -SA_REAL_MAX ? -SA_REAL_MAX : (real)y;
}

SA_INLINE real FN(factor_of)(const sa_attention *a) { return (real)(a->scale * SA_LOG2E); }

SA_INLINE size_t FN(round_up)(ptrdiff_t n) { return ((size_t)n + SA_LANES - 1) / SA_LANES * SA_LANES; }
