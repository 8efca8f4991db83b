/* An attention call as Python makes it: forward, backward, over arrays with leading dims or over packed sequences. */
#ifndef SA_PYTHON_ATTENTION_CALL_H
#define SA_PYTHON_ATTENTION_CALL_H

#include "python/arrays.h"

#include "drivers/varlen.h"

/* The functions, by their number in sa_attention_family. */
enum {
    SA_FN_ATTENTION,
    SA_FN_CACHED,
    SA_FN_FORWARD, /* forward half of a vjp */
    SA_FN_BACKWARD,
    SA_FN_PACKED,
    SA_FN_PACKED_FORWARD,
    SA_FN_PACKED_BACKWARD
};

/* What the forward functions return, in this order. Unrounded is what an out of 16 bits was before, or else out itself. */
enum { SA_OUT, SA_STATISTICS, SA_UNROUNDED, SA_LSE, SA_WEIGHTS, SA_RESULTS };

#define SA_MAX_OWNED 32 /* more arrays than any function takes, three tables for each block mask included */

/* What was given, borrowed; NULL where nothing was. */
typedef struct {
#define SA_PARAMETER(name, otherwise, functions, read, to, doc) PyObject *name;
#define SA_INNER_PARAMETER(name, otherwise, functions, read, to) PyObject *name;
#define SA_KEYWORDS_ONLY
#include "python/attention_parameters.h"
#undef SA_PARAMETER
#undef SA_INNER_PARAMETER
#undef SA_KEYWORDS_ONLY
} sa_attention_arguments;

/* A call under way: every reference it owns, and the core's structs that point into them. */
typedef struct {
    const sa_state *state;
    union {
        sa_attention_arguments given;
        PyObject *values[SA_MAX_PARAMETERS];
    };
    PyArrayObject *owned[SA_MAX_OWNED]; /* all arrays that it reads, and what they are called */
    const char *owned_names[SA_MAX_OWNED];
    int owned_count;
    PyArrayObject *query, *key, *value, *mask; /* of those; the mask last read, or NULL */
    PyArrayObject *results[SA_RESULTS];        /* owned: NULL where they were not asked for */
    sa_dtype result, computes;
    bool packed, enable_gqa, lower_right, want_lse, want_weights;
    bool want_stats, want_unrounded; /* by the halves of a vjp */
    int threads;
    npy_intp lead[NPY_MAXDIMS];
    sa_attention a;
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];

    /* Of packed sequences alone. */
    sa_varlen v;                 /* `a` describes the packed arrays */
    PyArrayObject **mask_arrays; /* owned, one for each sequence, NULL where it has none; NULL without masks */
    sa_tensor *masks;            /* owned */
    sa_varlen_item *items;       /* owned */
} sa_call;

/* Reads and checks all arguments but `out`, `rng` and those of backward calls alone into c, which need not be initialised.
 * Release is due even after an error. */
int sa_call_read(sa_call *c, PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
void sa_call_release(sa_call *c);

/* Reads `rng`, last of all: drawing changes a generator. Halves of a vjp must draw the same and take a seed alone. */
int sa_call_read_seed(sa_call *c);

/* Hands an array over to the call. */
void sa_call_own(sa_call *c, PyArrayObject *array, const char *name);

int sa_call_read_mask(sa_call *c, PyObject *value, const char *name);

/* attention_packed.c: shapes and offsets; and the masks, once those are known. */
int sa_call_read_packed(sa_call *c);
int sa_call_read_packed_masks(sa_call *c, PyObject *value);
void sa_call_release_packed(sa_call *c);

/* block_mask.c: the tables of a BlockMask, for a call whose shapes are known. */
int sa_call_read_block_mask(sa_call *c, PyObject *value);

/* Whether the axes before the last `core` broadcast to the leading dims without enlarging them. Without leading dims an array
 * of one element is taken too. */
bool sa_call_fits_lead(const sa_call *c, PyArrayObject *array, int core);

/* Whether out may have this dtype: the result's, or, where statistics are kept, float32 in place of 16 bits. */
bool sa_call_takes_out(const sa_call *c, sa_dtype dtype);

/* The shape of an array with so many rows for each head: (B…, rows, cols), or (rows, H, cols) if packed. Returns its axes. */
int sa_call_shape(const sa_call *c, const npy_intp *lead, npy_intp rows, npy_intp cols, npy_intp *shape);
/* Such an array as the core sees it. A single column lies together, whatever stride NumPy gives it. */
void sa_call_fill(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

/* The shape of `cols` numbers for each query: (B…, L, cols), or (H, L, cols) if packed; with cols 0 there is no last axis. */
int sa_call_row_shape(const sa_call *c, npy_intp cols, npy_intp *shape);
/* An array (B…, L) seen as (…, L, 1). */
void sa_call_fill_rows(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

extern const char sa_doc_attention[];

#endif
