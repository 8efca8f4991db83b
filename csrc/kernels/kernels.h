/* The structs that drivers pass to kernels, and the table of functions that each instruction set fills. */
#ifndef SA_KERNELS_H
#define SA_KERNELS_H

#include "kernels/modes.h"
#include "kernels/quant_kinds.h"
#include "kernels/rowops/call.h"
#include "selfattn.h"

#define SA_MAX_BLOCK_ROWS 64
#define SA_KEYS_PER_TILE 64 /* a multiple of 4, for dropout; a tile's scores and V fit in L1 */

/* The state of a tile of scores: its mask leaves all pairs open, closes some, adds to scores, or closes all. Other bits
 * say that its keys have a bias, that a boolean mask beside a float one closes some pairs, and that the call has
 * offset_bias. */
enum { SA_TILE_OPEN, SA_TILE_GATED, SA_TILE_ADDS, SA_TILE_CLOSED };
enum { SA_TILE_OF_MASK = 3, SA_TILE_KEYS_BIASED = 4, SA_TILE_GATED_TOO = 8, SA_TILE_OFFSET = 16 };

/* The state of a tile copied as bfloat16: unknown, all numbers fit, or some do not. */
enum { SA_CELL_UNKNOWN, SA_CELL_HOLDS, SA_CELL_BEYOND };

/* The rows of a block. Each has a query, options and outputs; all have the same key head. */
typedef struct {
    int count;
    bool clipped; /* causal, windows, lengths or block masks close some key of the block to some row */
    int gaps;     /* number of lists of runs that close keys between lo and hi */
    const char *query[SA_MAX_BLOCK_ROWS];
    const char *mask[SA_MAX_BLOCK_ROWS];
    const char *gate[SA_MAX_BLOCK_ROWS], *offset_bias[SA_MAX_BLOCK_ROWS]; /* uninitialised if the call has none */
    char *out[SA_MAX_BLOCK_ROWS];
    char *lse[SA_MAX_BLOCK_ROWS];
    char *weights[SA_MAX_BLOCK_ROWS];
    char *stats[SA_MAX_BLOCK_ROWS];
    ptrdiff_t lo[SA_MAX_BLOCK_ROWS], hi[SA_MAX_BLOCK_ROWS]; /* only keys lo … hi − 1 are open */
    ptrdiff_t open_from, open_to;          /* keys open_from … open_to − 1 are in every row's lo … hi */
    ptrdiff_t position[SA_MAX_BLOCK_ROWS]; /* the key at the query's position */
    ptrdiff_t index[SA_MAX_BLOCK_ROWS];
    uint64_t head[SA_MAX_BLOCK_ROWS]; /* flattened head number, for dropout */
    double slope[SA_MAX_BLOCK_ROWS], sink[SA_MAX_BLOCK_ROWS];
    /* In a call with tangents, here and below: rows of tangents, or NULL. */
    const char *query_tangent[SA_MAX_BLOCK_ROWS];
    const char *mask_tangent[SA_MAX_BLOCK_ROWS], *offset_bias_tangent[SA_MAX_BLOCK_ROWS];
    double slope_tangent[SA_MAX_BLOCK_ROWS], sink_tangent[SA_MAX_BLOCK_ROWS];
    /* Each row has `gaps` lists, runs … runs_end − 1. A key from lo … hi − 1 is open if all lists have it. */
    const sa_run *runs[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS], *runs_end[SA_MAX_BLOCK_MASKS][SA_MAX_BLOCK_ROWS];
} sa_rows;

/* A block: some rows, and keys begin … end − 1 of one key head. */
typedef struct {
    const sa_attention *a;
    sa_rows *rows;
    sa_matrix key, value, key_tangent, value_tangent;
    const void *key_bias; /* the bias of key 0, or NULL */
    ptrdiff_t begin, end;
    ptrdiff_t open_end;    /* end of the keys that are open to the rows; a chunk may end earlier */
    ptrdiff_t keys;        /* number of keys by key_lengths; no key after them is read */
    ptrdiff_t copied_from; /* the first key of the copied tiles in scratch, ≤ begin */
    bool holds_copies;     /* the copied tiles belong to this head */
    bool fetches;          /* keys and values are fetched a tile ahead */
    bool far;              /* keys and values come from memory */
    bool mask_far;
    ptrdiff_t ahead;      /* bytes from a row's query to a query of the next block; 0: fetch nothing */
    ptrdiff_t keys_ahead; /* bytes to the next head's first key; 0: fetch nothing */
    bool whole;           /* the block has all rows of its group */
    bool first_chunk;     /* includes the sink */
    void *partial;        /* NULL: finish the block; else write maximum, sum and unnormalised output here */
    ptrdiff_t partial_rows;
} sa_block;

/* For blocks with gaps: returns the first key of the next tile from `from` on, or b->end, and the tile's length in *n.
 * Keys between tiles are closed to all rows. Tiles, `from` and b->begin are multiples of 4, for dropout. */
ptrdiff_t sa_next_open_tile(const sa_block *b, ptrdiff_t from, ptrdiff_t *n);

/* Returns the first of the runs … end − 1 that ends after `key`, or `end`. */
const sa_run *sa_find_run(const sa_run *runs, const sa_run *end, ptrdiff_t key);

/* Returns the first row after r that has other runs, or count. */
int sa_same_runs(const sa_rows *rows, int r);

/* For each row of a block, the output's gradient and the gradients to write; NULL for those not wanted. All but
 * grad_out and grad_lse have the type that computes. */
typedef struct {
    const char *grad_out[SA_MAX_BLOCK_ROWS];
    const char *grad_lse[SA_MAX_BLOCK_ROWS];
    const char *grad_out_tangent[SA_MAX_BLOCK_ROWS], *grad_lse_tangent[SA_MAX_BLOCK_ROWS];
    char *dquery[SA_MAX_BLOCK_ROWS], *dmask[SA_MAX_BLOCK_ROWS], *delta[SA_MAX_BLOCK_ROWS];
    char *dslope[SA_MAX_BLOCK_ROWS], *dsink[SA_MAX_BLOCK_ROWS];
    char *diagonals[SA_MAX_BLOCK_ROWS]; /* a row of the task's sums for offset_bias, from key first_diagonal on */
} sa_row_gradients;

#define SA_ELEMENTS_AT_ONCE ((ptrdiff_t)1 << 22)
typedef struct {
    sa_block b;
    const sa_attention_gradients *g;
    sa_row_gradients *grads;
    char *dkey, *dvalue;                  /* rows of the key head, or NULL */
    ptrdiff_t first_key;                  /* the key of the first row of dkey and dvalue */
    ptrdiff_t dkey_stride, dvalue_stride; /* in elements */
    ptrdiff_t dmask_key;                  /* the key of the mask gradient's first column */
    ptrdiff_t first_diagonal;             /* the key of the first column of the rows of `diagonals` */
    /* Bytes from a sum to its tangent. */
    ptrdiff_t dmask_tangent, diagonal_tangent;
    bool mask_only; /* adds to the mask's gradient alone */
    bool with_mask;
    bool (*cancelled)(const sa_attention *a); /* asked every SA_ELEMENTS_AT_ONCE elements of keys and values */
} sa_backward_block;

#define SA_ROW_TASK_ROWS 64
#define SA_ROW_COLUMNS 256 /* four arrays of this many columns fit L1 */

/* A task: rows of n elements, or n × width for a softmax along another axis. */
typedef struct {
    const sa_row_call *call;
    const sa_row_plan *plan;
    int count;
    ptrdiff_t n, width;
    const char *x[SA_ROW_TASK_ROWS], *dy[SA_ROW_TASK_ROWS], *cos[SA_ROW_TASK_ROWS], *sin[SA_ROW_TASK_ROWS];
    char *out[SA_ROW_TASK_ROWS];
    double *partial; /* sums dweight[n], dbias[n], or NULL */
} sa_row_task;

/* A task's product, with sums of n terms; strides count elements. In matmul_nn C has at most block_rows columns; in
 * matmul_tn it has at most SA_WEIGHT_ROWS rows, and n ≤ SA_SUM_ROWS. If rows have splits_from elements or more, a
 * matrix unit splits operands: then C may have any number of columns, and `again` says that A (in matmul_tn B) is
 * already in scratch. */
#define SA_WEIGHT_ROWS 64
#define SA_SUM_ROWS 256
#define SA_SPLIT_COLUMNS 32 /* columns are best cut at multiples of this */
typedef struct {
    ptrdiff_t m, n, width;
    const void *a, *b;
    void *c;
    ptrdiff_t a_stride, b_stride, c_stride;
    bool again;
    bool adds;        /* adds to C; else C begins with `bias`, or with zeros */
    bool far;         /* matmul_nt: B comes from memory, and the next product needs the rows after B */
    const void *bias; /* (width,), for matmul_nt; or NULL */
} sa_product;

/* The norm of s = x, or x + added: scaled = (s − mean(s))·scale, y = scaled·weight + bias + residual.
 * RMSNorm has no mean. */
typedef struct {
    ptrdiff_t rows, d;
    bool rms;
    double eps;
    const void *weight, *bias, *x, *added, *residual; /* bias, added and residual may be NULL */
    void *scaled, *scale, *y;
} sa_norm_rows;

typedef enum { SA_ACT_NONE, SA_ACT_RELU, SA_ACT_GELU, SA_ACT_GELU_TANH, SA_ACT_SILU } sa_activation;

/* The input of an activation: pre, and gate if there is one. Their rows are `stride` elements apart. */
typedef struct {
    sa_activation kind;
    ptrdiff_t rows, width, stride;
    const void *pre, *gate;
} sa_active;

/* Dropout of rows. Element (i, j) is kept if its word is at least round(p·2^32): word j % 64 / 16 of Philox with the
 * counter (i, j / 64·16 + j % 16, i / 2^32, 0). */
typedef struct {
    double p;
    uint64_t seed;
    ptrdiff_t first_row, first_column; /* where the rows are in the whole array */
} sa_dropout;

/* Cosines and sines of positions: (positions, rotated / 2). */
typedef struct {
    const void *cos, *sin;
    ptrdiff_t rotated; /* how many of a head's elements are rotated; 0: none */
    bool interleaved;
} sa_rotary;

typedef enum { SA_SGD, SA_ADAM, SA_UPDATE_KINDS } sa_update_kind;

/* The scalars of an optimiser step (kernels/optimizer/update.h). */
typedef struct {
    double shrink;      /* multiplies the parameter, first */
    double added_decay; /* times the parameter is added to the gradient */
    double keep_mean, take_mean, keep_square, take_square;
    double rate, root, eps;
    bool nesterov, fresh; /* for SGD; fresh: there is no mean yet */
} sa_update_scalars;

/* ---- compact weights: 8 or 16 bits (docs/decisions/0010-int8.md), or quants of a GGUF file ----------------------- */

typedef enum { SA_WEIGHTS_WHOLE, SA_WEIGHTS_INT8, SA_WEIGHTS_BF16, SA_WEIGHTS_QUANTS } sa_weights;

/* Panels of SA_PANEL_COLUMNS columns, [word][column]. A word of 4 bytes has four int8 or two bfloat16 that follow each
 * other in a row of the weight (out, in). Zeros fill the last word and panel.
 *
 * In int8, each group of SA_GROUP numbers of a row has a scale, in weights and in the rows that they multiply. The last
 * group of a row may be smaller. */
#define SA_PANEL_COLUMNS 32
#define SA_WORD 4
#define SA_GROUP 128
#define SA_GROUP_WORDS (SA_GROUP / SA_WORD)
typedef struct {
    sa_weights kind;
    ptrdiff_t out, in, words, groups;
    const char *panels;
    /* int8, [panel][group][column]: the scale, and the scale times the sum of the group's numbers. */
    const float *scale, *offset;
    /* Quants: panels points to the rows of a file, of any alignment. */
    sa_quant_type type;
    ptrdiff_t row_bytes;
    const char *strips; /* a copy for sa_gemv_tile, of whole strips of SA_GEMV_COLUMNS rows; or NULL */
} sa_compact;

/* x[i] ≈ least + scale·q[i] in a group of a row, q from 0 to 255. If a row is not finite, or a group's range is not a
 * normal number, the row's first scale is NaN and the row is multiplied without rounding. */
typedef struct {
    float least, scale;
} sa_rounded;

/* sums[r][c] = Σ_k row_r[k]·panel[k][c], for a tile of rows: for uint8 and int8 exact in int32,
 * for bfloat16 in float32. */
typedef struct {
    ptrdiff_t rows, words;
    const char *x; /* the rounded rows, `stride` bytes apart, with zeros up to a whole cache line */
    ptrdiff_t stride;
    const char *panel;
    void *sums; /* (rows, SA_PANEL_COLUMNS), aligned */
} sa_compact_tile;

typedef void sa_compact_leaf(const sa_compact_tile *t);

#define SA_MOST_TILE_ROWS 32
#define SA_GROUPS_AT_ONCE 4

/* How an instruction set multiplies one kind of compact weights. */
typedef struct {
    const char *name; /* the instructions that the CPU must have (sa_cpu_runs) */
    ptrdiff_t most_rows;
    bool widened; /* the leaf takes rows of uint8 that are widened to int16 */
    sa_compact_leaf *leaf;
    void (*start)(void), (*end)(void); /* called before and after the leaf; or NULL */
} sa_compact_unit;

/* 32 numbers of a row as integers of one to three digits in base 256, from −128 to 127: x[i] ≈ scale·Σ_n
 * of[n].digit[i]·256ⁿ. The largest of the 32 is 127, 32639 or 8355000; with three digits the error is at most float32's
 * error for the largest. Only as many digits are stored as there are. A row that is not finite has NaN as its first
 * scale, and is multiplied in float32. */
#define SA_DIGITS 3 /* the most */
#define SA_PIECE 32
typedef struct {
    float scale, total[3]; /* total: Σ x over the first half, the second half, and all */
    struct {
        int32_t minus[3]; /* −Σ of the digit, in the same order */
        int8_t digit[SA_PIECE];
    } of[SA_DIGITS];
} sa_digits;

static inline __attribute__((always_inline)) ptrdiff_t sa_digits_bytes(int digits) {
    return (ptrdiff_t)(offsetof(sa_digits, of) + (size_t)digits * sizeof(((sa_digits *)0)->of[0]));
}

/* Piece i of rows that follow one another. */
static inline __attribute__((always_inline)) const sa_digits *sa_digits_at(const sa_digits *x, ptrdiff_t i,
                                                                           int digits) {
    return (const void *)((const char *)x + i * sa_digits_bytes(digits));
}

/* sums[r][c] = Σ x_r[k]·w_c[k]. w_c is row c of the weights, in quants; the rows follow one another. */
#define SA_GEMV_COLUMNS 16
#define SA_PANEL_PIECES 32
#define SA_PANEL_BYTES (SA_PANEL_PIECES * SA_GEMV_COLUMNS * 12 * 4)
typedef struct {
    sa_quant_type type;
    int digits;
    ptrdiff_t rows, pieces; /* a piece has SA_PIECE numbers */
    const sa_digits *x;     /* (rows, pieces) */
    /* A strip, [row_bytes / 2][SA_GEMV_COLUMNS]: two bytes of each row in turn.
     * The leaf also fetches the bytes after it. */
    const char *weights;
    ptrdiff_t row_bytes;
    void *panel; /* SA_PANEL_BYTES, aligned */
    float *sums; /* (rows, SA_GEMV_COLUMNS), aligned */
} sa_gemv_tile;

typedef void sa_gemv_leaf(const sa_gemv_tile *t);

/* How an instruction set multiplies quants by digits. All leaves that fuse multiply-adds compute the same bits. */
typedef struct {
    const char *name; /* the instructions that the CPU must have */
    sa_gemv_leaf *leaf;
} sa_gemv_unit;

/* Makes numbers from the sums of a tile's groups: to[r][c] = y + Σ_g scale[r][g]·weight_scale[g][c]·sums[g][r][c] +
 * least[r][g]·offset[g][c], for bfloat16 y + sums. y is bias + residual, or with `adds` y[r][c] + residual. */
typedef struct {
    ptrdiff_t rows, width, groups;
    const void *sums;      /* (groups, SA_MOST_TILE_ROWS, SA_PANEL_COLUMNS) */
    const sa_rounded *row; /* [row][groups], rows `row_stride` apart; NULL: bfloat16 */
    ptrdiff_t row_stride;
    const float *scale, *offset, *bias, *residual; /* bias and residual may be NULL */
    bool adds, gelu;                               /* gelu: applies GELU to the result, with error 3e-5 */
    const float *y;
    float *to;
    ptrdiff_t stride; /* the row stride of y, to and residual */
} sa_compact_ends;

/* The kernels of one type that computes. */
typedef struct {
    ptrdiff_t block_rows, backward_rows;
    size_t (*attention_scratch)(const sa_attention *a);
    size_t (*attention_partial)(const sa_attention *a, ptrdiff_t rows);
    void (*attention_forward)(const sa_block *b, void *scratch);
    /* Adds up the partial results of a block, which follow one another, and finishes the block. */
    void (*attention_merge)(const sa_block *b, const char *partial, ptrdiff_t chunks, void *scratch);
    size_t (*backward_scratch)(const sa_attention_gradients *g);
    bool (*adds_by_lines)(const sa_attention *a); /* true if whole cache lines are added to dK and dV */
    void (*attention_delta)(const sa_backward_block *b, void *scratch);
    void (*attention_backward)(const sa_backward_block *b, void *scratch);
    /* The same with tangents. */
    size_t (*jvp_scratch_bytes)(const sa_attention *a);
    void (*attention_jvp)(const sa_block *b, void *scratch);
    size_t (*hvp_scratch_bytes)(const sa_attention_gradients *g);
    void (*attention_hvp_delta)(const sa_backward_block *b, void *scratch);
    void (*attention_hvp)(const sa_backward_block *b, void *scratch);
    void (*rows[SA_ROW_KINDS])(const sa_row_task *b, void *scratch);
    void (*softmax_columns)(const sa_row_task *b, void *scratch);
    void (*softmax_columns_backward)(const sa_row_task *b, void *scratch);
    void (*parameter_gradients)(const sa_row_call *c, const sa_row_plan *p, void *row);
    void (*gather)(void *dst, const char *src, const sa_strided *array, int which, const sa_row_axis *axis, int axes,
                   ptrdiff_t n);
    ptrdiff_t splits_from;
    size_t (*matmul_scratch)(ptrdiff_t rows, ptrdiff_t d);
    void (*matmul_nt)(const sa_product *p, void *scratch); /* C = bias + A·Bᵀ, or C += A·Bᵀ */
    void (*matmul_nn)(const sa_product *p, void *scratch); /* the same with A·B */
    void (*matmul_tn)(const sa_product *p, void *scratch); /* the same with Aᵀ·B */
    void (*look_up)(const void *table, const void *token_type_row, const void *positions, const int64_t *ids,
                    ptrdiff_t rows, ptrdiff_t d, void *x);
    void (*add_norm)(const sa_norm_rows *n);
    void (*norm_backward)(const sa_norm_rows *n, const void *dy, void *ds, bool adds);
    void (*begin_rows)(void *to, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t width, const void *bias,
                       const void *residual, const void *sums);
    void (*activate)(const sa_active *a, void *to);
    void (*activate_backward)(const sa_active *a, void *d, void *dgate);
    void (*drop_rows)(const sa_dropout *t, void *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t width,
                      const void *residual);
    void (*rotate_heads)(const sa_rotary *t, void *x, ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t width, bool back);
    void (*column_sums)(const void *x, const void *times, ptrdiff_t rows, ptrdiff_t stride, ptrdiff_t width,
                        double factor, void *to);
    void (*repeat_scaled)(const void *x, double factor, ptrdiff_t rows, ptrdiff_t d, void *to);
    void (*add_row)(const void *x, ptrdiff_t d, void *to);
    void (*update[SA_UPDATE_KINDS])(const sa_update_scalars *s, void *parameter, const void *gradient, void *mean,
                                    void *square, void *peak, ptrdiff_t n);
    double (*fma_loop)(ptrdiff_t rounds); /* for benchmarks */
#if defined(SA_WITH_TESTS)
    void (*exp2_array)(const void *x, void *y, ptrdiff_t n);
    void (*exp_array)(const void *x, void *y, ptrdiff_t n);
    void (*tanh_array)(const void *x, void *y, ptrdiff_t n);
#endif
} sa_real_kernels;

typedef struct {
    const char *name;
    sa_real_kernels f32, f64;
    uint64_t (*checksum)(uint64_t h, const void *data, size_t bytes);
    void (*narrow)(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to);
    uint64_t (*read_loop)(const void *data, size_t bytes);
    /* quantize_rows writes rows of uint8, `stride` bytes apart and followed by zeros,
     * and the scales of their groups. */
    void (*quantize_rows)(const float *x, ptrdiff_t rows, ptrdiff_t n, uint8_t *to, ptrdiff_t stride, sa_rounded *row);
    void (*compact_ends)(const sa_compact_ends *e);
    /* look_up in a table of int8, with a scale for each group of a row, or of bfloat16, if scale is NULL. */
    void (*look_up_compact)(const void *table, const float *scale, const float *token_type_row, const float *positions,
                            const int64_t *ids, ptrdiff_t rows, ptrdiff_t d, float *x);
    /* Expands n numbers, in whole quants. */
    void (*expand_quants)(sa_quant_type type, const void *from, ptrdiff_t n, float *to);
    /* n is a multiple of SA_PIECE */
    void (*split_digits)(const float *x, ptrdiff_t rows, ptrdiff_t n, int digits, sa_digits *to);
    /* For search: C = A·Bᵀ on vectors, never on a matrix unit; to[k][c] = b[c][k], whole vectors of c;
     * sums[r] = Σ x[r]·y. */
    void (*matmul_nt)(const sa_product *p, void *scratch);
    void (*fill_panel_transposed)(const float *b, ptrdiff_t b_stride, ptrdiff_t n, ptrdiff_t width, float *to,
                                  ptrdiff_t stride);
    void (*dot_bytes)(const int8_t *x, ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t n, const int16_t *y, uint32_t *sums);
    const sa_gemv_unit *gemv[3]; /* best first; NULL ends the list */
    /* Best first; the last for int8 runs wherever this table does. NULL ends a list. */
    const sa_compact_unit *int8[4], *bf16[2];
} sa_kernels;

extern const sa_compact_unit sa_int8_amx, sa_int8_avx512vnni, sa_int8_avxvnni, sa_int8_avx2, sa_int8_neondot,
    sa_int8_baseline, sa_int8_neon, sa_int8_wasm, sa_int8_generic, sa_bf16_amx, sa_bf16_avx512bf16;
extern const sa_gemv_unit sa_gemv_avx512vnni, sa_gemv_avx2, sa_gemv_baseline, sa_gemv_neon, sa_gemv_wasm,
    sa_gemv_generic;
extern const sa_kernels sa_kernels_amx, sa_kernels_avx512bf16, sa_kernels_avx512, sa_kernels_avx2, sa_kernels_baseline,
    sa_kernels_neon, sa_kernels_wasm, sa_kernels_generic;

#endif
