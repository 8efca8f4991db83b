/* An attention call from Python: forward or backward, leading dims or packed sequences. */
#ifndef SA_PYTHON_ATTENTION_CALL_H
#define SA_PYTHON_ATTENTION_CALL_H

#include "python/arrays.h"

#include "drivers/varlen.h"

extern const sa_family sa_attention_family;

/* Its functions. */
enum {
    SA_FN_ATTENTION,
    SA_FN_CACHED,
    SA_FN_FORWARD, /* half of a vjp */
    SA_FN_BACKWARD,
    SA_FN_PACKED,
    SA_FN_PACKED_FORWARD,
    SA_FN_PACKED_BACKWARD
};

/* Results in their order. UNROUNDED: out before rounding to 16 bits, else out itself. */
enum { SA_OUT, SA_STATISTICS, SA_UNROUNDED, SA_LSE, SA_WEIGHTS, SA_RESULTS };

#define SA_MAX_OWNED 32

/* What was given: borrowed, or NULL. */
typedef struct {
#define SA_PARAMETER(name, otherwise, functions, read, to) PyObject *name;
#include "python/attention_parameters.h"
#undef SA_PARAMETER
} sa_attention_arguments;

/* A call under way: its references, and the core's structs that point into them. */
typedef struct {
    const sa_state *state;
    union {
        sa_attention_arguments given;
        PyObject *values[SA_MAX_PARAMETERS];
    };
    PyArrayObject *owned[SA_MAX_OWNED]; /* all arrays that it reads */
    const char *owned_names[SA_MAX_OWNED];
    int owned_count;
    PyArrayObject *query, *key, *value, *mask; /* borrowed; mask: the last one read, or NULL */
    PyArrayObject *results[SA_RESULTS];        /* owned; NULL: not asked for */
    sa_dtype result, computes;
    bool packed, enable_gqa, lower_right, want_lse, want_weights;
    bool want_stats, want_unrounded; /* for a vjp */
    int threads;
    npy_intp lead[NPY_MAXDIMS];
    sa_attention a;
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];

    /* For packed sequences: */
    sa_varlen v;
    PyArrayObject **mask_arrays; /* owned; NULL for sequences without a mask */
    sa_tensor *masks;            /* owned */
    sa_varlen_item *items;       /* owned */
} sa_call;

/* Reads all arguments but `out`, `rng` and those of backward calls. c may be uninitialised; release it even after an
 * error. */
int sa_call_read(sa_call *c, PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
void sa_call_release(sa_call *c);

/* Last of all, since drawing changes a generator. Halves of a vjp must agree, so they take no generator. */
int sa_call_read_seed(sa_call *c);

/* Takes over a reference. */
void sa_call_own(sa_call *c, PyArrayObject *array, const char *name);

int sa_call_read_block_mask(sa_call *c, PyObject *value);

/* Whether the axes before the last `core` broadcast to the leading dims without enlarging them. */
bool sa_call_fits_lead(const sa_call *c, PyArrayObject *array, int core);

/* The result's dtype, or float32 for 16 bits if statistics are kept. */
bool sa_call_takes_out(const sa_call *c, sa_dtype dtype);

/* (B…, rows, cols), or packed (rows, H, cols). Returns the number of axes. */
int sa_call_shape(const sa_call *c, const npy_intp *lead, npy_intp rows, npy_intp cols, npy_intp *shape);
/* A single column counts as contiguous. */
void sa_call_fill(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

/* (B…, L, cols), or packed (H, L, cols); no last axis if cols is 0. */
int sa_call_row_shape(const sa_call *c, npy_intp cols, npy_intp *shape);
/* (B…, L) as (…, L, 1). */
void sa_call_fill_rows(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

#endif
