/* What drivers and kernels share: the structs handed over, and the table of functions that each instruction set fills. */
#ifndef SA_KERNELS_H
#define SA_KERNELS_H

#include "drivers/rowops.h"
#include "selfattn.h"
#include "drivers/optimizer.h"

#define SA_MAX_BLOCK_ROWS 64
#define SA_KEYS_PER_TILE 64 /* a multiple of 4, for dropout; with as many queries, scores and V fit in L1 */

/* What a mask does to a tile of scores: nothing, closes some, adds to them, closes all. */
enum { SA_TILE_OPEN, SA_TILE_GATED, SA_TILE_BIASED, SA_TILE_CLOSED };

/* What a thread knows of a tile that it copies as bfloat16: nothing, all numbers fit, or some do not. */
enum { SA_CELL_UNKNOWN, SA_CELL_HOLDS, SA_CELL_BEYOND };

/* The rows of a block. They share a key head and nothing else; each has its own query, options and outputs. */
typedef struct {
    int count;
    bool clipped; /* some key of the block's range is closed to some row, by lo, hi or gaps */
    int gaps;     /* lists of runs that close keys between lo and hi */
    const char *query[SA_MAX_BLOCK_ROWS];
    const char *mask[SA_MAX_BLOCK_ROWS]; /* at key 0 */
    char *out[SA_MAX_BLOCK_ROWS];
    char *lse[SA_MAX_BLOCK_ROWS];
    char *weights[SA_MAX_BLOCK_ROWS];
    char *stats[SA_MAX_BLOCK_ROWS];
    ptrdiff_t lo[SA_MAX_BLOCK_ROWS], hi[SA_MAX_BLOCK_ROWS]; /* only keys lo … hi − 1 are open */
    ptrdiff_t open_from, open_to;                           /* keys open_from … open_to − 1 are within lo … hi of all rows */
    ptrdiff_t position[SA_MAX_BLOCK_ROWS];                  /* the key on the query's diagonal */
    ptrdiff_t index[SA_MAX_BLOCK_ROWS];                     /* of the query in its head */
    uint64_t head[SA_MAX_BLOCK_ROWS];                       /* flattened leading index, for dropout */
    double slope[SA_MAX_BLOCK_ROWS], sink[SA_MAX_BLOCK_ROWS];
    /* Row r sees a key of lo … hi − 1 if all its `gaps` lists hold it: list i is runs[i][r] … runs_end[i][r] − 1. */
    const sa_run *runs[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS], *runs_end[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS];
} sa_rows;

/* A block: some rows against keys begin … end − 1 of one key head. */
typedef struct {
    const sa_attention *a;
    sa_rows *rows;
    sa_matrix key, value;
    ptrdiff_t begin, end;
    ptrdiff_t open_end;     /* end of the keys open to its rows; the block may be a chunk of those */
    ptrdiff_t keys;         /* by key_lengths; no key behind them is read */
    ptrdiff_t cache_from;   /* the first key of the scratch's packed tiles, ≤ begin */
    bool cache_holds;       /* the packed tiles are the last block's, of the same keys and values */
    bool fetches;           /* fetch keys and values a tile ahead */
    bool far;               /* keys and values exceed all caches */
    bool mask_far;          /* the mask does */
    ptrdiff_t ahead;        /* bytes from a row's query to that of a row of the next block; 0: fetch none */
    ptrdiff_t keys_ahead;   /* bytes from the first key to the next head's; 0: fetch none */
    bool whole;             /* all rows of the group */
    bool first_chunk;       /* takes the sink */
    void *partial;          /* NULL: finish; else store (maximum, sum, unnormalised output) here */
    ptrdiff_t partial_rows; /* its capacity */
} sa_block;

/* For rows with gaps: the first key of the next tile from `from` on, and its number of keys; b->end if there is none. All
 * rows are closed between tiles. A tile begins and ends at multiples of 4, for dropout; `from` and b->begin are such. */
ptrdiff_t sa_next_open_tile(const sa_block *b, ptrdiff_t from, ptrdiff_t *n);

/* The first of runs … end − 1 that ends after `key`, or end. */
const sa_run *sa_find_run(const sa_run *runs, const sa_run *end, ptrdiff_t key);

/* The end of the rows from r on that have the same runs. */
int sa_same_runs(const sa_rows *rows, int r);

/* Gradients of the rows of a block, NULL where not wanted. All have the type that computes, but for grad_out and
 * grad_lse. */
typedef struct {
    const char *grad_out[SA_MAX_BLOCK_ROWS];
    const char *grad_lse[SA_MAX_BLOCK_ROWS];
    char *dquery[SA_MAX_BLOCK_ROWS], *dmask[SA_MAX_BLOCK_ROWS], *delta[SA_MAX_BLOCK_ROWS];
    char *dslope[SA_MAX_BLOCK_ROWS], *dsink[SA_MAX_BLOCK_ROWS];
} sa_row_gradients;

/* A block of the backward pass: its rows against keys b.begin … b.end − 1. */
typedef struct {
    sa_block b;
    const sa_attention_gradients *g;
    sa_row_gradients *rows;
    char *dkey, *dvalue;                  /* rows of the key head, or NULL */
    ptrdiff_t first_key;                  /* the key of their first row */
    ptrdiff_t dkey_stride, dvalue_stride; /* in elements */
    ptrdiff_t dmask_key;                  /* the key of the mask gradient's first column */
    bool mask_only;                       /* adds to no other gradient */
    bool with_mask;                       /* adds to the mask's gradient */
} sa_backward_block;

/* Whether to stop. Asked between tasks, and within a block each time it has read SA_ELEMENTS_AT_ONCE elements of keys and
 * values. */
bool sa_cancelled(const sa_attention *a);
#define SA_ELEMENTS_AT_ONCE ((ptrdiff_t)1 << 22)

#define SA_ROW_BLOCK 64    /* rows of a sa_row_block */
#define SA_ROW_COLUMNS 256 /* columns of a softmax down columns: four arrays of them fit in L1 */

/* Rows of a row operation: n elements each, or n × width for a softmax along another axis. */
typedef struct {
    const sa_row_call *call;
    const sa_row_plan *plan;
    int count;
    ptrdiff_t n, width;
    const char *x[SA_ROW_BLOCK], *dy[SA_ROW_BLOCK], *cos[SA_ROW_BLOCK], *sin[SA_ROW_BLOCK];
    char *out[SA_ROW_BLOCK];
    double *partial; /* adds up dweight[n] and dbias[n] of the chunk, or NULL */
} sa_row_block;

/* A product for one task: at most block_rows columns of C, or in matmul_tn SA_WEIGHT_ROWS rows with sums over
 * SA_SUM_ROWS. Strides count elements; sums have n terms. A matrix unit splits rows of at least splits_from elements:
 * then any number of columns will do, and `again` says that A, or B in matmul_tn, is the last product's in the same
 * scratch. */
#define SA_WEIGHT_ROWS 64
#define SA_SUM_ROWS 256
#define SA_SPLIT_COLUMNS 32 /* cut columns at multiples of this */
typedef struct {
    ptrdiff_t m, n, width;
    const void *a, *b;
    void *c;
    ptrdiff_t a_stride, b_stride, c_stride;
    const void *start; /* matmul_nt: (width,), added to every row of C */
    bool again;
    bool adds; /* matmul_tn adds to C */
} sa_product;

/* LayerNorm of the embedding model on rows of d elements: with s = x + attended, unit = (s − mean(s))·scale and y =
 * unit·weight + bias. The backward pass reads unit, scale and weight. */
typedef struct {
    ptrdiff_t rows, d;
    double eps;
    const void *weight, *bias, *x, *attended;
    void *unit, *scale, *y;
} sa_norm_rows;

/* What an optimiser does to each element; kernels/optimizer/update.h has the formulas. */
typedef struct {
    double shrink;      /* multiplies the parameter first */
    double added_decay; /* times the parameter, joins the gradient */
    double keep_mean, take_mean, keep_square, take_square;
    double rate, root, eps;
    bool nesterov, fresh; /* of SGD; fresh: no mean yet */
} sa_update_scalars;

/* The kernels of one type that computes. */
typedef struct {
    ptrdiff_t block_rows, backward_rows; /* the most rows of a block */
    size_t (*attention_scratch)(const sa_attention *a);
    size_t (*attention_partial)(const sa_attention *a, ptrdiff_t rows); /* bytes */
    void (*attention_forward)(const sa_block *b, void *scratch);
    /* Adds up a block's partial results, which lie one behind the other, in order, and finishes the block. */
    void (*attention_merge)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch);
    size_t (*backward_scratch)(const sa_attention_gradients *g);
    bool (*adds_by_lines)(const sa_attention *a); /* to dK and dV, whole cache lines */
    void (*attention_delta)(const sa_backward_block *b, void *scratch);
    void (*attention_backward)(const sa_backward_block *b, void *scratch);
    void (*rows[SA_ROW_KINDS])(const sa_row_block *b, void *scratch);
    void (*softmax_columns)(const sa_row_block *b, void *scratch); /* also log_softmax */
    void (*softmax_columns_backward)(const sa_row_block *b, void *scratch);
    void (*parameter_gradients)(const sa_row_call *c, const sa_row_plan *p, void *row);
    void (*gather)(void *dst, const char *src, const sa_strided *array, int which, const sa_row_axis *axis, int axes,
                   ptrdiff_t n);
    ptrdiff_t splits_from;
    size_t (*matmul_scratch)(ptrdiff_t rows, ptrdiff_t d); /* for products of `rows` rows with d × d weights */
    void (*matmul_nt)(const sa_product *p, void *scratch); /* C = start + A·Bᵀ */
    void (*matmul_nn)(const sa_product *p, void *scratch); /* C += A·B */
    void (*matmul_tn)(const sa_product *p, void *scratch); /* C = Aᵀ·B, or += */
    /* The embedding model: kernels/transformer/embedding.h. */
    void (*look_up)(const void *table, const void *positions, const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, void *x);
    void (*add_norm)(const sa_norm_rows *n);
    void (*norm_backward)(const sa_norm_rows *n, const void *dy, void *ds);
    void (*column_sums)(const void *x, const void *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width, double factor,
                        void *to);
    void (*spread)(const void *x, double factor, ptrdiff_t rows, ptrdiff_t d, void *to);
    void (*add_row)(const void *x, ptrdiff_t d, void *to);
    void (*update[SA_UPDATE_KINDS])(const sa_update_scalars *s, void *parameter, const void *gradient, void *mean, void *square,
                                    ptrdiff_t n);
    /* For tests and benchmarks. */
    void (*exp2_array)(const void *x, void *y, ptrdiff_t n);
    void (*exp_array)(const void *x, void *y, ptrdiff_t n);
    void (*tanh_array)(const void *x, void *y, ptrdiff_t n);
    double (*fma_loop)(ptrdiff_t rounds); /* returns FLOPs */
} sa_real_kernels;

typedef struct {
    const char *name;
    sa_real_kernels f32, f64;
    uint64_t (*checksum)(uint64_t h, const void *data, size_t bytes);
    void (*narrow)(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to);
    uint64_t (*read_loop)(const void *data, size_t bytes);
} sa_kernels;

extern const sa_kernels sa_kernels_amx, sa_kernels_avx512bf16, sa_kernels_avx512, sa_kernels_avx2, sa_kernels_baseline,
    sa_kernels_neon, sa_kernels_generic;

/* The table in use, owned by dispatch.c. It is set when the library loads, and by tests. */
const sa_kernels *sa_kernels_active(void);
const sa_kernels *sa_kernels_find(const char *name);

#endif
