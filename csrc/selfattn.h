/* Attention's structs, and the status codes and entry points of the core. README.md follows a call.
 *
 * Shape letters: B… are the leading dims (batch and heads), L counts queries, S keys. E is the width of queries and
 * keys, Dv the width of values, D either if both are equal. Strides are in bytes. */
#ifndef SELFATTN_H
#define SELFATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SA_MAX_LEAD 64

typedef enum {
    SA_OK = 0,
    SA_TOO_LARGE, /* a size overflows; nothing was written */
    SA_BAD_ISA,   /* not in this build, or not on this CPU */
    SA_CANCELLED  /* the outputs are undefined */
} sa_status;

typedef enum {
    SA_F16,
    SA_BF16,
    SA_F32,
    SA_F64,
    SA_BOOL,
    SA_I8,
    SA_U8,
    SA_I16,
    SA_U16,
    SA_I32,
    SA_U32,
    SA_I64,
    SA_U64,
    SA_DTYPES
} sa_dtype;

size_t sa_itemsize(sa_dtype dtype);

/* A matrix with any strides, any alignment and either byte order. */
typedef struct {
    char *data;
    ptrdiff_t row_stride, col_stride;
    sa_dtype dtype;
    bool swapped;
} sa_matrix;

/* An array (B…, rows, cols). lead_stride is 0 along a broadcast axis; data is NULL if an optional array is absent. */
typedef struct {
    sa_matrix m;
    ptrdiff_t lead_stride[SA_MAX_LEAD];
} sa_tensor;

#define SA_UNBOUNDED PTRDIFF_MAX

/* The keys lo … hi − 1. */
typedef struct {
    int64_t lo, hi;
} sa_run;

#define SA_MAX_BLOCK_MASKS 4

/* Which keys a query may see.
 *
 * As runs: row i of a head has class classes[i / class_rows], and class c sees the runs starts[c] … starts[c + 1] − 1.
 * Runs ascend and do not touch; the last may end beyond S. All heads have the same classes.
 * As a prefix, if prefix.m.data is not NULL: the keys before it, and those up to i + diagonal. */
typedef struct {
    sa_tensor classes; /* int64, (B…, ceil(L / class_rows), 1) */
    ptrdiff_t class_rows;
    const int64_t *starts;
    const sa_run *runs;
    bool gaps;        /* some class has more than one run */
    sa_tensor prefix; /* int64 scalars per leading index, ≥ 0 */
    ptrdiff_t diagonal;
    double open_fraction; /* roughly the fraction of pairs that are open */
} sa_block_mask;

/* Stops a long call. Any thread may set cancelled, atomically.
 * Between tasks the calling thread calls poll, if it is set. */
typedef struct sa_watch {
    int cancelled;
    void (*poll)(struct sa_watch *);
} sa_watch;

/* True if the call should stop; the calling thread polls to find out. False if watch is NULL. */
bool sa_stops(sa_watch *watch);

/* A forward call, which the caller has checked. "Scalars" have one number for each leading index. */
typedef struct {
    ptrdiff_t L, S, E, Dv;
    int n_lead;
    ptrdiff_t lead[SA_MAX_LEAD];
    ptrdiff_t gqa; /* query heads for each key head on the last leading axis */
    bool f64;
    bool by_rows; /* a row's bits depend on the keys that it may see, and neither on other rows nor on L or S */

    sa_tensor query, key, value;
    sa_tensor mask;        /* boolean or float, (B…, L, S) */
    sa_tensor gate;        /* a boolean mask beside a float mask */
    sa_tensor offset_bias; /* a second float mask, whose rows are the same numbers, shifted by one from row to row */
    sa_tensor key_bias; /* (B…, 1, S), contiguous, of the type that computes: added to scores; one for each key head */
    sa_tensor alibi;    /* float64 scalars */
    sa_tensor sinks;    /* float64 scalars */
    sa_tensor key_lengths; /* int64 scalars, each in 0…S */
    sa_tensor out;         /* (B…, L, Dv) */
    sa_tensor lse;         /* (B…, L, 1), float32 or float64 */
    sa_tensor weights;     /* (B…, L, S); must come zero-filled */
    sa_tensor stats; /* (B…, L, 2) for the backward pass: the number subtracted from scores, in log2 units, and 1/sum */

    const sa_block_mask *block_masks; /* a pair is open if all of them open it */
    int block_mask_count;

    ptrdiff_t first_head, first_query, first_key; /* where the call is in larger arrays, for dropout; a key's is 4·n */
    double scale, softcap;                        /* softcap 0: no cap */
    bool causal;
    ptrdiff_t diagonal;                  /* query i has the position of key i + diagonal */
    ptrdiff_t window_left, window_right; /* SA_UNBOUNDED: no bound */
    double dropout_p;
    uint64_t seed;
    sa_watch *watch;
    /* Optional int64 scalars in 0…L: queries from there on are padding and see nothing. The diagonal is then
     * key_lengths − query_lengths. */
    sa_tensor query_lengths;
    /* The call computes tangents too. Those of inputs have the shapes of their arrays and any strides; absent ones are
     * zeros. stats are (B…, L, 4): the third is the tangent of lse, the fourth with ALiBi the mean distance. */
    bool with_tangents;
    sa_tensor query_tangent, key_tangent, value_tangent, mask_tangent, offset_bias_tangent, alibi_tangent, sink_tangent;
    ptrdiff_t out_tangent, lse_tangent; /* bytes from a result to its tangent */
} sa_attention;

/* True if all heads along a leading axis have the same keys and values. */
bool sa_shares_keys(const sa_attention *a, int axis);

/* How a call is cut up. The plan depends on shape, options and instruction set, so bits do not depend on threads. */
typedef struct {
    ptrdiff_t group;  /* query heads that share a key head */
    ptrdiff_t groups; /* key heads */
    ptrdiff_t rows;   /* group × L */
    ptrdiff_t block_rows;
    ptrdiff_t blocks;
    ptrdiff_t chunks; /* chunks of a block's keys */
    ptrdiff_t chunk_keys;
    ptrdiff_t tasks; /* groups × blocks × chunks */
    size_t scratch_bytes;
    size_t partial_bytes;
    bool large;  /* queries and outputs exceed the cores' caches: rows are fetched ahead */
    bool far;    /* keys and values come from memory */
    int threads; /* as many as pay, at most max_threads */
} sa_attention_plan;

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan);

/* Here and below: scratch has plan.threads × plan.scratch_bytes bytes, partial has plan.partial_bytes, both 64-byte
 * aligned. Outputs overlap no input. */
sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial);

/* A backward call, which reads `out` and `stats` of its forward call. Gradients have the shapes of their arrays, the
 * type that computes and contiguous rows, and must come zero-filled; data is NULL for a gradient that is not wanted.
 * The order of additions depends on shape and options alone. */
typedef struct {
    const sa_attention *a;
    sa_tensor grad_out;
    sa_tensor grad_lse;
    sa_tensor dquery;
    sa_tensor dkey, dvalue; /* the last leading axis counts key heads; stride 0 along a group */
    /* Strides are 0 along broadcast axes. With a float mask they count even if data is NULL:
     * they order the additions. */
    sa_tensor dmask;
    sa_tensor doffset_bias; /* (B…, 1, L + S − 1), with all leading dims and without gaps: element j − i + L − 1 */
    /* With tangents: those of inputs, and the bytes from a gradient to its tangent. The tangent of doffset_bias follows
     * it. dslope_rows and dsink_rows are then (B…, L, 2), each with its tangent, to be summed over L. */
    sa_tensor grad_out_tangent, grad_lse_tangent;
    ptrdiff_t dquery_tangent, dkey_tangent, dvalue_tangent, dmask_tangent;
    sa_tensor dslope_rows; /* (B…, L, 3): x, y, z of x − y·z, to be summed over L */
    sa_tensor dsink_rows;  /* (B…, L, 1): the sinks' gradients, to be summed over L */
    void *delta;           /* plan.delta_count elements */
    void *diagonals;       /* plan.diagonal_count elements; may be NULL if there are none */
    bool only_turns;       /* tasks of a turn must not wait for each other */
} sa_attention_gradients;

/* drivers/attention_backward.c explains the rotation. */
typedef struct {
    ptrdiff_t group, groups, rows, block_rows, blocks;
    ptrdiff_t key_ranges, row_ranges;   /* ranges of a group's keys and rows */
    ptrdiff_t range_keys, range_blocks; /* the most keys and blocks of a range */
    ptrdiff_t grain_blocks;             /* a row range has a multiple of this many blocks */
    ptrdiff_t mask_groups, together;    /* groups that share a float mask, and how many of them work at the same time */
    ptrdiff_t turns, turns_at_once, tasks;
    ptrdiff_t delta_count;    /* one for each row of each head; with tangents two */
    ptrdiff_t diagonal_count; /* sums of tasks for the gradient of offset_bias */
    size_t scratch_bytes;
    size_t gathered_at;  /* offset in scratch of a task's dK and dV; 0: they are in place */
    size_t mask_sums_at; /* offset in scratch of the sums of a shared mask gradient */
    size_t done_at;      /* offset in scratch of the counts of finished turns or rows */
    bool follow;         /* groups pass through a shared mask one after the other */
    bool mask_has_pass;  /* the mask's gradient has its own pass */
    bool large;
    int threads;
} sa_backward_plan;

sa_status sa_attention_plan_backward(const sa_attention_gradients *g, int max_threads, sa_backward_plan *plan);

sa_status sa_attention_backward(const sa_attention_gradients *g, const sa_backward_plan *plan, void *scratch);

/* Sets *product to a × b. False on overflow. */
bool sa_multiply(size_t a, size_t b, size_t *product);

/* The instruction sets, best first. */
const char *sa_isa_name(void);
const char *const *sa_isa_available(void); /* for this build, CPU and OS; NULL-terminated */
sa_status sa_isa_set(const char *name);    /* NULL chooses the best */

int sa_get_num_threads(void);
void sa_set_num_threads(int n);   /* 0 restores the number at the start */
void sa_limit_num_threads(int n); /* for calls and programs that name no number, together */

/* For benchmarks: multiplications and additions (float32, float64, int8 or bfloat16) per second,
 * and bytes read per second. */
double sa_measure_flops(sa_dtype dtype, int threads, double seconds);
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds);

#endif
