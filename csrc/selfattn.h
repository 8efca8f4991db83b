/* The core's public face: plain structs, status codes and entry points. No Python, no SIMD, no OpenMP. README.md beside this file follows
 * a call.
 *
 * Shape letters, used everywhere: B… are the leading (batch and head) dims, L queries, S keys, E the width of a query and of a key, D the
 * same where both are meant, Dv the width of a value. Strides are in bytes. */
#ifndef SELFATTN_H
#define SELFATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SA_MAX_LEAD 64

typedef enum {
    SA_OK = 0,
    SA_NO_MEMORY, /* scratch could not be had; nothing was written */
    SA_TOO_LARGE, /* a size product does not fit; nothing was written */
    SA_BAD_ISA,   /* no such instruction set in this build, or not on this CPU */
    SA_CANCELLED  /* watch->cancelled was set; the outputs are undefined */
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

/* A matrix (rows, cols) somewhere in memory: any strides, any alignment, possibly in the other byte order. */
typedef struct {
    char *data;
    ptrdiff_t row_stride, col_stride;
    sa_dtype dtype;
    bool swapped;
} sa_matrix;

/* An array (B…, rows, cols); lead_stride is 0 where it is broadcast to the call's leading dims. data is NULL where an optional array is
 * absent. */
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

/* Which keys each query may see, in one of two ways.
 *
 * As runs: row i of a head is of class number classes[i / class_rows], and class c sees the keys of the runs starts[c] …
 * starts[c + 1] − 1. Those rise and do not touch; the last hi may lie beyond S. Classes are shared by all heads.
 * As a prefix, where prefix.m.data is not NULL: the keys before it, and those up to i + diagonal. */
typedef struct {
    sa_tensor classes; /* int64, (B…, ceil(L / class_rows), 1) */
    ptrdiff_t class_rows;
    const int64_t *starts;
    const sa_run *runs;
    bool gaps;        /* some class has more than one run */
    sa_tensor prefix; /* int64 scalars per leading index, each at least 0 */
    ptrdiff_t diagonal;
    double share; /* of the pairs that are open, about: how much work there is */
} sa_block_mask;

/* How a long call is stopped: any thread may set cancelled, atomically. Between tasks, the thread that made the call calls poll (unless
 * NULL), which may set it. */
typedef struct sa_watch {
    int cancelled;
    void (*poll)(struct sa_watch *);
} sa_watch;

/* Everything a forward call says. The caller has checked shapes, dtypes and ranges; the core trusts them. */
typedef struct {
    ptrdiff_t L, S, E, Dv;
    int n_lead;
    ptrdiff_t lead[SA_MAX_LEAD]; /* the broadcast leading dims */
    ptrdiff_t gqa;               /* query heads per key head on the last leading axis, 1 without GQA */
    bool f64;                    /* computes in float64, else in float32 */

    sa_tensor query, key, value;
    sa_tensor mask;        /* boolean or float, (B…, L, S); broadcast axes have stride 0 */
    sa_tensor alibi;       /* float64 scalars per leading index */
    sa_tensor sinks;       /* float64 scalars per leading index */
    sa_tensor key_lengths; /* int64 scalars per leading index, each in 0…S */
    sa_tensor out;         /* (B…, L, Dv) */
    sa_tensor lse;         /* (B…, L, 1), float32 or float64 */
    sa_tensor weights;     /* (B…, L, S); must come zero-filled */
    sa_tensor stats;       /* (B…, L, 2) of what computes, for the backward pass: what is subtracted from scores, in
                              log2 units (the maximum, or up to 8 less), and 1/sum */

    const sa_block_mask *block_masks; /* a pair is open if it is in all of them */
    int block_mask_count;             /* 0 … SA_MAX_BLOCK_MASKS */

    ptrdiff_t first_head;  /* dropout counts heads from here on: 0, but in a ragged batch */
    double scale, softcap; /* softcap 0: none */
    bool causal;
    ptrdiff_t diagonal;                  /* o: query i stands on key i + o */
    ptrdiff_t window_left, window_right; /* SA_UNBOUNDED where open */
    double dropout_p;
    uint64_t seed;
    sa_watch *watch; /* looked at between tasks when not NULL */
    /* Optional, sequences of different lengths in a cache: int64 scalars per leading index, each in 0…L. Queries from there on are padding
     * and see nothing; the last one before stands on the last key, so o is key_lengths − query_lengths. */
    sa_tensor query_lengths;
} sa_attention;

/* How a call is cut up. It follows from shape, options and instruction set alone: bits do not depend on the number of threads. */
typedef struct {
    ptrdiff_t group;      /* query heads that share a key head: their rows share blocks */
    ptrdiff_t groups;     /* key heads */
    ptrdiff_t rows;       /* rows of a group: group × L */
    ptrdiff_t block_rows; /* rows of a block: of a task */
    ptrdiff_t blocks;     /* of a group */
    ptrdiff_t chunks;     /* that the keys are split into */
    ptrdiff_t chunk_keys;
    ptrdiff_t tasks;      /* groups × blocks × chunks */
    size_t scratch_bytes; /* for each thread */
    size_t partial_bytes; /* for all chunks together */
    bool large;           /* more than the caches of the cores hold: what comes next is fetched ahead */
    bool far;             /* its keys and values are more than all caches hold */
    int threads;          /* how many pay, at most as many as were asked for */
} sa_attention_plan;

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan);

/* Runs the plan. scratch: plan.threads × plan.scratch_bytes; partial: plan.partial_bytes; both 64-byte aligned. Outputs may
 * not overlap inputs. */
sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial);

/* What a backward call says beyond its forward call, whose `out` and `stats` are now read. Gradients are of the type that computes, the
 * elements of a row together, and come zero-filled; data is NULL where one is not wanted. They are added to, in an order that depends on
 * shape and options alone. */
typedef struct {
    const sa_attention *a;
    sa_tensor grad_out;     /* (B…, L, Dv) */
    sa_tensor grad_lse;     /* (B…, L, 1), optional */
    sa_tensor dquery;       /* (B…, L, E) */
    sa_tensor dkey, dvalue; /* (B…, S, E), (B…, S, Dv); the last leading axis counts key heads; stride 0 along a group */
    /* (B…, L, S). Its strides are 0 where the mask is broadcast, and set for a float mask even where data is NULL: which heads share elements
     * decides on the order of additions. */
    sa_tensor dmask;
    sa_tensor
        dslope_rows;      /* (B…, L, 3): of x, y, z each row's share is x − y·z, to be summed over L: docs/theory/backward.md */
    sa_tensor dsink_rows; /* (B…, L, 1): each row's share */
    void *delta;          /* of the type that computes, one for each row of all heads */
    bool only_steps;      /* tasks of a step run in any order, and wait for nobody */
} sa_attention_gradients;

typedef struct {
    ptrdiff_t group, groups, rows, block_rows, blocks; /* as in the forward plan */
    ptrdiff_t key_ranges, row_ranges;                  /* that the keys and the rows of a group are cut into */
    ptrdiff_t range_keys, range_blocks;                /* the most of a range */
    ptrdiff_t unit_blocks;                             /* ranges of rows are made of so many blocks at once */
    ptrdiff_t sharing, together;                       /* groups that share a float mask; of those, so many at a time */
    ptrdiff_t steps, steps_at_once, tasks;             /* of the rotation; what a task does at once counts as one */
    ptrdiff_t delta_count;                             /* elements of delta */
    size_t scratch_bytes;                              /* for each thread */
    size_t gathered_at;  /* where in it dK and dV of a task's keys are brought together; 0: they are added to in place */
    size_t mask_sums_at; /* where in it elements of the mask's gradient are summed that rows share */
    size_t done_at;      /* where in it the steps, or rows, are counted that tasks have done */
    bool follow;         /* groups that share a mask follow one another through its rows */
    bool mask_apart;     /* the mask's gradient, if it is wanted, has a pass of its own */
    bool large;          /* as in the forward plan */
    int threads;
} sa_backward_plan;

sa_status sa_attention_plan_backward(const sa_attention_gradients *g, int max_threads, sa_backward_plan *plan);

/* Runs the plan. scratch: plan.threads × plan.scratch_bytes, 64-byte aligned. */
sa_status sa_attention_backward(const sa_attention_gradients *g, const sa_backward_plan *plan, void *scratch);

/* a × b, or false when it does not fit: every size goes through here before anything is allocated. */
bool sa_multiply(size_t a, size_t b, size_t *product);

/* Instruction sets, best first. */
const char *sa_isa_name(void);             /* the one in use */
const char *const *sa_isa_available(void); /* those this build has and this CPU and OS can run, NULL-terminated */
sa_status sa_isa_set(const char *name);    /* NULL: the best */

/* Threads: what a call without its own number uses. */
int sa_get_num_threads(void);
void sa_set_num_threads(int n); /* 0: back to OpenMP's own number */
const char *sa_threading_layer(void);

/* Limits of this machine, for the benchmarks: fused multiply-adds per second out of registers, and bytes per second of a
 * loop that only reads. */
double sa_measure_flops(bool f64, int threads, double seconds);
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds);

#endif
