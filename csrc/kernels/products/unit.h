/* The interface of multiply units other than multiply-adds: bf16dot.h (dot products of bfloat16 pairs) and amx_attention.h (a matrix
 * unit), float32 on AVX-512. A block points to one, or to NULL. A tile's numbers alone decide its way: what bfloat16
 * cannot hold goes by fma.h.
 *
 * Functions that return bool tell whether they did it; if not, nothing has changed. (1) to (6):
 * docs/theory/backward.md. */

/* Rows of Q and dO, in place or copied, and their factors: of Q the scale. NULL is a row of zeros. */
typedef struct {
    const real *query[FN(backward_rows)], *grad_out[FN(backward_rows)];
    real query_factor[FN(backward_rows)], grad_factor[FN(backward_rows)];
} FN(gradient_rows);

struct FN(unit) {
    bool replace_rows; /* cells replace copied keys and values; dK and dV grow by whole lines */
    bool know_top;     /* scores come with their maxima */
    int decode_rows;   /* the most rows of a decoded block */

    /* ---- wide blocks */
    bool (*take)(const sa_attention *a); /* whether the call's wide blocks may go this way */
    size_t (*lay_out)(const sa_attention *a, char *base, size_t used, FN(wide_state) * s);
    void (*open)(const sa_block *b, FN(wide_state) * s); /* sets s->terms if the block does */
    void (*close)(void);                                 /* after such a block, or a decoded one */
    void (*copy_queries)(const sa_block *b, FN(scratch) * s, int nv);
    /* Products of keys and queries to s->P; times s->factor they are scores. */
    bool (*scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    bool (*may_lag)(const sa_block *b, FN(scratch) * s, ptrdiff_t first); /* the running maximum, or NULL */
    /* Makes operands of scores or weights in P; s->tile_sum takes the sums of weights of scores. */
    bool (*weights)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv, bool scores);
    void (*values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int nv);
    void (*round_weights)(FN(scratch) * s, ptrdiff_t count); /* of a tile of multiply-adds, or NULL */

    /* ---- their gradients */
    size_t (*lay_out_gradients)(const sa_attention_gradients *g, char *base, size_t used, FN(gradient_state) * s);
    /* Forgets another block's cells, even if this block goes by multiply-adds. */
    void (*open_gradients)(const sa_block *b, FN(gradient_state) * g);
    void (*copy_gradients)(const sa_backward_block *b, const FN(scratch) * s, FN(gradient_state) * g, FN(gradient_rows) * x,
                           real *q_rows, real *do_rows, int nv);
    bool (*dweights)(const sa_block *b, FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first, ptrdiff_t n, real *dS,
                     int nv); /* (2), to dS */
    /* The tile's keys, finite, if its gradients go this way without rows of keys; else NULL. NULL: never. */
    const real *(*keys)(const sa_block *b, const FN(scratch) * s, const FN(gradient_state) * g, ptrdiff_t first);
    /* (1), (3) and (6) from the tile's key `done` on. plain: P holds scores, dS dP; keeps: dS is left in place. Returns
     * the key it came to; multiply-adds do the rest. */
    ptrdiff_t (*gradients)(const sa_backward_block *b, FN(scratch) * s, const FN(gradient_state) * g, real *P, real *dS,
                           const real *delta, real *dqT, ptrdiff_t first, ptrdiff_t done, ptrdiff_t n, int nv, bool plain,
                           bool keeps);

    /* ---- a few rows, R of them, rounded up */
    size_t (*lay_out_decode)(const sa_attention *a, char *base, size_t used, FN(decode_state) * s);
    void (*open_decode)(const sa_block *b, FN(scratch) * s);
    /* A longer tile, into maximum, sum and output, and the most keys of one; or NULL. */
    ptrdiff_t (*decode_keys)(const sa_block *b, const FN(scratch) * s, ptrdiff_t first);
    void (*decode_tile)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, int R);
    /* Or an ordinary tile's products while s->decode.use, and the order in which values leave columns; or NULL. */
    bool (*decode_queries)(const sa_block *b, FN(scratch) * s);
    void (*decode_scores)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_values)(const sa_block *b, FN(scratch) * s, ptrdiff_t first, ptrdiff_t n, ptrdiff_t p_stride, int R);
    void (*decode_order)(real *O, ptrdiff_t count);
};
