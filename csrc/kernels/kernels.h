/* What the drivers know of the kernels: the structs they hand over and the table of function pointers that each
 * instruction set fills. Internal to csrc/. */
#ifndef SA_KERNELS_H
#define SA_KERNELS_H

#include "drivers/rowops.h"
#include "selfattn.h"
#include "drivers/optimizer.h"

#define SA_MAX_BLOCK_ROWS 64
#define SA_KEYS_PER_TILE 64 /* 64 queries × 64 scores and 64 rows of V at D = 64 fit a 48 kB L1; a multiple of 4, for dropout */

/* What a mask does to a tile of scores: nothing; closes some; adds something; closes all. */
enum { SA_TILE_OPEN, SA_TILE_GATED, SA_TILE_BIASED, SA_TILE_CLOSED };

/* What a thread knows of a tile of keys or values that it copies as bfloat16, whole or split into terms: nothing, that it was copied,
 * or that some number of it is out of range. */
enum { SA_CELL_UNKNOWN, SA_CELL_HOLDS, SA_CELL_BEYOND };

/* One row of a block: a query with everything that is its own. Rows of one block share a key head and nothing else. */
typedef struct {
    int count;
    bool clipped; /* some row has keys of the block's range closed, by lo, by hi or by gaps */
    int gaps;     /* lists of runs, of block masks that close keys between lo and hi */
    const char *query[SA_MAX_BLOCK_ROWS];
    const char *mask[SA_MAX_BLOCK_ROWS]; /* the row's mask at key 0 */
    char *out[SA_MAX_BLOCK_ROWS];
    char *lse[SA_MAX_BLOCK_ROWS];
    char *weights[SA_MAX_BLOCK_ROWS];
    char *stats[SA_MAX_BLOCK_ROWS];
    ptrdiff_t lo[SA_MAX_BLOCK_ROWS], hi[SA_MAX_BLOCK_ROWS]; /* keys lo … hi − 1 are open: causal, window and lengths in one */
    ptrdiff_t open_from, open_to;                           /* open_from … open_to − 1, if any, are so for all rows */
    ptrdiff_t position[SA_MAX_BLOCK_ROWS];                  /* the key that the query stands on, i + o */
    ptrdiff_t index[SA_MAX_BLOCK_ROWS];                     /* i */
    uint64_t head[SA_MAX_BLOCK_ROWS];                       /* flattened leading index, for dropout */
    double slope[SA_MAX_BLOCK_ROWS], sink[SA_MAX_BLOCK_ROWS];
    /* The first `gaps` lists of each row, runs … runs_end − 1: of the keys lo … hi − 1, those in every list are open. */
    const sa_run *runs[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS], *runs_end[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS];
} sa_rows;

/* A block: some rows, one key head, and the keys begin … end − 1 of it. */
typedef struct {
    const sa_attention *a;
    sa_rows *rows;
    sa_matrix key, value;
    ptrdiff_t begin, end;
    ptrdiff_t open_end; /* of the keys that are open to its rows, of which begin … end − 1 may be a chunk */
    ptrdiff_t
        keys; /* those of the key head that some query may attend to by key_lengths: what is behind them is not looked at */
    ptrdiff_t cache_from; /* the key at which the scratch's packed tiles begin, at most begin */
    bool cache_holds;     /* the scratch's packed tiles are of these keys and values: the last block's were the same */
    bool fetches;         /* keys and values are fetched a tile ahead: of a large call, and this thread begins with them */
    bool far;             /* keys and values of the call are more than all caches hold */
    bool mask_far;        /* so is its mask */
    ptrdiff_t ahead; /* from a row's query to that of a row of the block that probably comes next, in bytes; 0: fetch no rows */
    ptrdiff_t keys_ahead;   /* from the first key to that of the head that probably comes next, in bytes; or 0 */
    bool whole;             /* these are all rows of the group */
    bool first_chunk;       /* the sink belongs to exactly one chunk */
    void *partial;          /* NULL: finish; else leave (maximum, sum, unnormalised output) here for merge */
    ptrdiff_t partial_rows; /* how many rows that has room for */
} sa_block;

/* For a block whose rows have gaps: the first key of the next tile from `from` on, and its number of keys. The tile begins and
 * ends with keys that some row's runs hold, up to multiples of 4, since dropout draws for four keys at a time (from and
 * b->begin are such multiples); what lies between tiles is closed for all rows. b->end when there is no such key. */
ptrdiff_t sa_next_open_tile(const sa_block *b, ptrdiff_t from, ptrdiff_t *n);

/* The first run of those in runs … end − 1 that ends after `key`, or end. */
const sa_run *sa_find_run(const sa_run *runs, const sa_run *end, ptrdiff_t key);

/* The row after those from row r on that have the same runs as it. */
int sa_same_runs(const sa_rows *rows, int r);

/* What the backward pass has of each row of a block beyond sa_rows; pointers are to what computes, except grad_out and
 * grad_lse. NULL where it is not wanted. */
typedef struct {
    const char *grad_out[SA_MAX_BLOCK_ROWS];
    const char *grad_lse[SA_MAX_BLOCK_ROWS];
    char *dquery[SA_MAX_BLOCK_ROWS], *dmask[SA_MAX_BLOCK_ROWS], *delta[SA_MAX_BLOCK_ROWS];
    char *dslope[SA_MAX_BLOCK_ROWS], *dsink[SA_MAX_BLOCK_ROWS];
} sa_row_gradients;

/* A block of the backward pass: its rows against the keys b.begin … b.end − 1. */
typedef struct {
    sa_block b;
    const sa_attention_gradients *g;
    sa_row_gradients *rows;
    char *dkey, *dvalue;                  /* rows of the key head's gradients, NULL where not wanted */
    ptrdiff_t first_key;                  /* the key whose rows these are */
    ptrdiff_t dkey_stride, dvalue_stride; /* from row to row, in elements */
    ptrdiff_t dmask_key;                  /* the first key of the rows of the mask's gradient */
    bool mask_only;                       /* add to the mask's gradient and to nothing else */
    bool with_mask;                       /* add to the mask's gradient */
} sa_backward_block;

/* Whether to stop (attention.c): asked between tasks, and in a block each time that so many elements of keys and values, tens of
 * milliseconds, have gone by. */
bool sa_cancelled(const sa_attention *a);
#define SA_ELEMENTS_AT_ONCE ((ptrdiff_t)1 << 22)

#define SA_ROW_BLOCK 64    /* rows that a task of a row operation describes at a time */
#define SA_ROW_COLUMNS 256 /* neighbouring columns of a softmax down the columns: four arrays of them stay in L1 */

/* A block of rows of a row operation (kernels/rowops): n elements each, or for softmax along another axis n × width. */
typedef struct {
    const sa_row_call *call;
    const sa_row_plan *plan;
    int count;
    ptrdiff_t n, width;
    const char *x[SA_ROW_BLOCK], *dy[SA_ROW_BLOCK], *cos[SA_ROW_BLOCK], *sin[SA_ROW_BLOCK];
    char *out[SA_ROW_BLOCK];
    double *partial; /* the chunk's dweight[n] and dbias[n] so far, to add to; or NULL */
} sa_row_block;

/* A product of matrices for one task: at most block_rows columns of C, or in matmul_tn SA_WEIGHT_ROWS rows and a sum over
 * SA_SUM_ROWS. Strides count elements, n is the length of the sums. Where rows of d elements are split for a matrix unit
 * (d ≥ splits_from), the number of columns is free, and `again` says that A, or in matmul_tn B, is that of the last product in
 * the same scratch. */
#define SA_WEIGHT_ROWS 64
#define SA_SUM_ROWS 256
#define SA_SPLIT_COLUMNS 32 /* columns are best cut at multiples of this */
typedef struct {
    ptrdiff_t m, n, width;
    const void *a, *b;
    void *c;
    ptrdiff_t a_stride, b_stride, c_stride;
    const void *start; /* matmul_nt: what every row of C starts from, (width,) */
    bool again;
    bool adds; /* matmul_tn: to what C holds */
} sa_product;

/* Rows of d elements for the LayerNorm of the embedding model: y = unit·weight + bias, unit = (s − mean(s))·scale,
 * s = x + attended. The backward pass reads unit, scale and weight. */
typedef struct {
    ptrdiff_t rows, d;
    double eps;
    const void *weight, *bias, *x, *attended;
    void *unit, *scale, *y;
} sa_norm_rows;

/* What an optimiser does to every element of one array; kernels/optimizer/update.h has the formulas. */
typedef struct {
    double shrink;      /* of the parameter, first of all */
    double added_decay; /* times the parameter: added to the gradient */
    double keep_mean, take_mean, keep_square, take_square;
    double rate, root, eps;
    bool nesterov, fresh; /* of SGD; fresh: there is no mean yet */
} sa_update_scalars;

/* The kernels of one element type that computes. */
typedef struct {
    ptrdiff_t block_rows, backward_rows; /* the most rows of a block, forward and backward */
    size_t (*attention_scratch)(const sa_attention *a);
    size_t (*attention_partial)(const sa_attention *a, ptrdiff_t rows); /* bytes of a partial result of that many rows */
    void (*attention_forward)(const sa_block *b, void *scratch);
    /* Adds up the partial results of one block, chunk after chunk, and finishes it. partial: chunks in a row. */
    void (*attention_merge)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch);
    size_t (*backward_scratch)(const sa_attention_gradients *g);
    bool (*adds_by_lines)(const sa_attention *a); /* whether the backward pass adds to dK and dV a cache line at a time */
    void (*attention_delta)(const sa_backward_block *b, void *scratch);
    void (*attention_backward)(const sa_backward_block *b, void *scratch);
    void (*rows[SA_ROW_KINDS])(const sa_row_block *b, void *scratch);
    void (*softmax_columns)(const sa_row_block *b, void *scratch); /* and log_softmax */
    void (*softmax_columns_backward)(const sa_row_block *b, void *scratch);
    void (*parameter_gradients)(const sa_row_call *c, const sa_row_plan *p, void *row);
    void (*gather)(void *dst, const char *src, const sa_strided *array, int which, const sa_row_axis *axis, int axes,
                   ptrdiff_t n);
    ptrdiff_t splits_from;
    size_t (*matmul_scratch)(ptrdiff_t rows, ptrdiff_t d); /* for products of so many rows of A, d × d weights */
    void (*matmul_nt)(const sa_product *p, void *scratch); /* C = start + A·Bᵀ */
    void (*matmul_nn)(const sa_product *p, void *scratch); /* C += A·B */
    void (*matmul_tn)(const sa_product *p, void *scratch); /* C = Aᵀ·B, or += */
    /* Of the embedding model: kernels/embedding.h. */
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
    double (*fma_loop)(ptrdiff_t rounds); /* returns the FLOPs done */
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

/* The table in use; set once, when the library is loaded, and by tests. dispatch.c owns it. */
const sa_kernels *sa_kernels_active(void);
const sa_kernels *sa_kernels_find(const char *name);

#endif
