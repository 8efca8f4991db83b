/* One interface for products that are not by multiply-adds: bf16dot.h (dot products of pairs of bfloat16) and amx.h (a matrix
 * unit) fill it in, for float32 on AVX-512. A block holds a pointer to one of them, or NULL. Which way a tile goes depends on
 * its numbers and on nothing else: what bfloat16 cannot hold goes by the multiply-adds of fma.h.
 *
 * Functions that return bool tell whether they did it; if not, nothing has changed. Numbers are those of
 * docs/theory/backward.md. */

/* The block's rows of Q (all times the scale) and of dO (each times its factor), as they lie or packed. NULL stands for a row
 * of zeros. */
typedef struct {
    const real *query[FN(backward_rows)], *grad_out[FN(backward_rows)];
    real query_factor[FN(backward_rows)], grad_factor[FN(backward_rows)];
} FN(gradient_rows);

struct FN(products) {
    bool replace_rows; /* cells stand in for packed keys and values, and dK and dV are added to a cache line at a time */
    bool know_top;     /* scores come complete, with their maxima */
    int decode_rows;   /* the most rows of a block that is decoded */

    /* ---- wide blocks */
    bool (*take)(const sa_attention *a); /* whether wide blocks of the call may go this way */
    size_t (*lay_out)(const sa_attention *a, char *base, size_t used, FN(wide_state) * s);
    void (*open)(const sa_block *b, FN(wide_state) * s); /* sets s->terms if the block goes this way */
    void (*close)(void);                                 /* after a block that did, or one that was decoded */
    void (*pack_queries)(const sa_block *b, FN(scratch) * s, int nv);
    /* Leaves the products of the tile's keys in s->P, times s->factor to be scores. */
    bool (*scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    bool (*may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first); /* the running maximum of the tile, or NULL */
    /* Makes operands of P, which holds scores or already the weights; s->tile_sum takes the sums of the former. */
    bool (*weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores);
    void (*values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    void (*round_weights)(FN(scratch) * s, ptrdiff_t count); /* of a tile that goes by multiply-adds, or NULL */

    /* ---- their gradients */
    size_t (*lay_out_gradients)(const sa_attention_gradients *g, char *base, size_t used, FN(gradient_state) * s);
    void (*open_gradients)(const sa_block *b, FN(gradient_state) * g);
    void (*pack_gradients)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_state) * g, FN(gradient_rows) * x,
                           real *q_rows, real *do_rows, int nv);
    bool (*dweights)(const sa_block *b, FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first, ptrdiff_t n, real *dS,
                     int nv); /* (2), in dS */
    /* The tile's keys, finite, if its gradients go this way and need no rows of keys; else NULL. NULL: never. */
    const real *(*keys)(const sa_block *b, const FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first);
    /* (1), (3) and (6) of the tile's keys from `done` on. plain: P holds scores and dS holds dP as yet; keeps: dS is left in
     * its place. Returns the key that it came to: what is left goes by multiply-adds. */
    ptrdiff_t (*gradients)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_state) * g, real *P, real *dS,
                           const real *delta, real *dqT, ptrdiff_t first, ptrdiff_t done, ptrdiff_t n, int nv, bool plain,
                           bool keeps);

    /* ---- a few rows, R of them, rounded up */
    size_t (*lay_out_decode)(const sa_attention *a, char *base, size_t used, FN(decode_state) * s);
    void (*open_decode)(const sa_block *b, FN(scratch) * s);
    /* A longer tile in the running maximum, sum and output: how many keys it may have, and the tile. NULL: none. */
    ptrdiff_t (*decode_keys)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first);
    void (*decode_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R);
    /* Or the products of an ordinary tile, while s->decode.use: queries as they are, the order of columns that values leave
     * the output in. NULL: none. */
    bool (*decode_queries)(const sa_block *b, FN(scratch) * s);
    void (*decode_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_order)(real *O, ptrdiff_t count);
};
