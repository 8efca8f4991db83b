/* Structs, status codes and entry points of the core: no Python, SIMD or OpenMP. README.md follows a call through them.
 *
 * B… are the leading dims (batch and heads), L queries, S keys, E the width of queries and keys, Dv that of values. D
 * stands for E and Dv where they are the same. Strides are in bytes. */
#ifndef SELFATTN_H
#define SELFATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SA_MAX_LEAD 64

typedef enum {
    SA_OK = 0,
    SA_NO_MEMORY, /* no scratch; nothing was written */
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

/* A matrix (rows, cols) with any strides, any alignment, in either byte order. */
typedef struct {
    char *data;
    ptrdiff_t row_stride, col_stride;
    sa_dtype dtype;
    bool swapped;
} sa_matrix;

/* An array (B…, rows, cols). lead_stride is 0 along a broadcast axis; data is NULL for an absent optional array. */
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

/* Which keys each query may see.
 *
 * As runs: row i of a head has class classes[i / class_rows]; class c sees the keys of runs starts[c] … starts[c + 1] −
 * 1. Runs rise and do not touch; the last may end beyond S. All heads share the classes. As a prefix, if prefix.m.data is
 * not NULL: the keys before it, and those up to i + diagonal. */
typedef struct {
    sa_tensor classes; /* int64, (B…, ceil(L / class_rows), 1) */
    ptrdiff_t class_rows;
    const int64_t *starts;
    const sa_run *runs;
    bool gaps;        /* some class has more than one run */
    sa_tensor prefix; /* int64 scalars per leading index, ≥ 0 */
    ptrdiff_t diagonal;
    double share; /* roughly, of the pairs that are open */
} sa_block_mask;

/* Stops a long call. Any thread may set cancelled, atomically. Between tasks the calling thread calls poll, if not NULL. */
typedef struct sa_watch {
    int cancelled;
    void (*poll)(struct sa_watch *);
} sa_watch;

/* A forward call. The caller has checked shapes, dtypes and ranges. "Scalars" are one for each leading index. */
typedef struct {
    ptrdiff_t L, S, E, Dv;
    int n_lead;
    ptrdiff_t lead[SA_MAX_LEAD];
    ptrdiff_t gqa; /* query heads per key head on the last leading axis */
    bool f64;      /* computes in float64, else in float32 */

    sa_tensor query, key, value;
    sa_tensor mask;        /* boolean or float, (B…, L, S) */
    sa_tensor alibi;       /* float64 scalars */
    sa_tensor sinks;       /* float64 scalars */
    sa_tensor key_lengths; /* int64 scalars, each in 0…S */
    sa_tensor out;         /* (B…, L, Dv) */
    sa_tensor lse;         /* (B…, L, 1), float32 or float64 */
    sa_tensor weights;     /* (B…, L, S); must come zero-filled */
    sa_tensor stats;       /* (B…, L, 2) for the backward pass: what scores are reduced by, in log2 units, and 1/sum */

    const sa_block_mask *block_masks; /* a pair is open if it is in all of them */
    int block_mask_count;

    ptrdiff_t first_head;  /* dropout counts heads from here */
    double scale, softcap; /* softcap 0: none */
    bool causal;
    ptrdiff_t diagonal;                  /* query i stands on key i + diagonal */
    ptrdiff_t window_left, window_right; /* SA_UNBOUNDED where open */
    double dropout_p;
    uint64_t seed;
    sa_watch *watch; /* or NULL */
    /* Optional int64 scalars, each in 0…L: queries from there on are padding and see nothing. The diagonal is then
     * key_lengths − query_lengths: the last query stands on the last key. */
    sa_tensor query_lengths;
} sa_attention;

/* How a call is cut up. It depends on shape, options and instruction set alone, so bits do not depend on threads. */
typedef struct {
    ptrdiff_t group;      /* query heads that share a key head */
    ptrdiff_t groups;     /* key heads */
    ptrdiff_t rows;       /* of a group: group × L */
    ptrdiff_t block_rows; /* of a task */
    ptrdiff_t blocks;     /* of a group */
    ptrdiff_t chunks;     /* that the keys are split into */
    ptrdiff_t chunk_keys;
    ptrdiff_t tasks;      /* groups × blocks × chunks */
    size_t scratch_bytes; /* for each thread */
    size_t partial_bytes; /* in all */
    bool large;           /* exceeds the caches of the cores: fetch ahead */
    bool far;             /* keys and values exceed all caches */
    int threads;          /* that pay, at most those asked for */
} sa_attention_plan;

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan);

/* Runs the plan. scratch has plan.threads × plan.scratch_bytes, partial plan.partial_bytes; both are 64-byte aligned.
 * Outputs may not overlap inputs. */
sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial);

/* A backward call. It reads `out` and `stats` of its forward call. Gradients have the type that computes and contiguous
 * rows, and come zero-filled; data is NULL where none is wanted. Additions keep one order, set by shape and options
 * alone. */
typedef struct {
    const sa_attention *a;
    sa_tensor grad_out;     /* (B…, L, Dv) */
    sa_tensor grad_lse;     /* (B…, L, 1) or absent */
    sa_tensor dquery;       /* (B…, L, E) */
    sa_tensor dkey, dvalue; /* (B…, S, E), (B…, S, Dv); the last leading axis counts key heads; stride 0 along a group */
    /* (B…, L, S), with stride 0 where the mask is broadcast. Strides are set for every float mask, even if data is NULL:
     * they decide the order of additions. */
    sa_tensor dmask;
    sa_tensor dslope_rows; /* (B…, L, 3): x, y, z of x − y·z, to be summed over L */
    sa_tensor dsink_rows;  /* (B…, L, 1), to be summed over L */
    void *delta;           /* one element for each row of all heads */
    bool only_steps;       /* tasks of a step never wait for each other */
} sa_attention_gradients;

typedef struct {
    ptrdiff_t group, groups, rows, block_rows, blocks; /* as in the forward plan */
    ptrdiff_t key_ranges, row_ranges;                  /* of a group */
    ptrdiff_t range_keys, range_blocks;                /* the most of a range */
    ptrdiff_t unit_blocks;                             /* a row range is a multiple of these */
    ptrdiff_t sharing, together;                       /* groups that share a float mask; how many at a time */
    ptrdiff_t steps, steps_at_once, tasks;             /* of the rotation */
    ptrdiff_t delta_count;                             /* elements */
    size_t scratch_bytes;                              /* for each thread */
    size_t gathered_at;                                /* where in scratch dK and dV of a task are gathered; 0: in place */
    size_t mask_sums_at;                               /* where rows sum a shared mask gradient */
    size_t done_at;                                    /* where finished steps or rows are counted */
    bool follow;                                       /* groups that share a mask go through its rows one behind the other */
    bool mask_apart;                                   /* the mask's gradient has a pass of its own */
    bool large;                                        /* as in the forward plan */
    int threads;
} sa_backward_plan;

sa_status sa_attention_plan_backward(const sa_attention_gradients *g, int max_threads, sa_backward_plan *plan);

/* Runs the plan. scratch has plan.threads × plan.scratch_bytes, 64-byte aligned. */
sa_status sa_attention_backward(const sa_attention_gradients *g, const sa_backward_plan *plan, void *scratch);

/* a × b, or false on overflow. Every size goes through it before memory is allocated. */
bool sa_multiply(size_t a, size_t b, size_t *product);

/* Instruction sets, best first. */
const char *sa_isa_name(void);             /* the one in use */
const char *const *sa_isa_available(void); /* what this build, CPU and OS can run, NULL-terminated */
sa_status sa_isa_set(const char *name);    /* NULL: the best */

/* The number of threads of a call that names none. */
int sa_get_num_threads(void);
void sa_set_num_threads(int n); /* 0: back to OpenMP's own number */
const char *sa_threading_layer(void);

/* This machine's limits, for benchmarks: fused multiply-adds per second in registers, bytes read per second. */
double sa_measure_flops(bool f64, int threads, double seconds);
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds);

#endif
