/* An attention call as Python makes it, forward or backward: its arguments read and checked into the core's struct. */
#ifndef SA_PYTHON_ATTENTION_CALL_H
#define SA_PYTHON_ATTENTION_CALL_H

#include "python/arrays.h"
#include "python/scalars.h"

/* The arguments, in the order of their signatures. */
enum {
    SA_ARG_QUERY,
    SA_ARG_KEY,
    SA_ARG_VALUE,
    SA_ARG_ATTN_MASK,
    SA_ARG_DROPOUT_P,
    SA_ARG_IS_CAUSAL,
    SA_ARG_SCALE,
    SA_ARG_ENABLE_GQA,
    SA_ARG_CAUSAL,
    SA_ARG_WINDOW,
    SA_ARG_SOFTCAP,
    SA_ARG_ALIBI_SLOPES,
    SA_ARG_SINKS,
    SA_ARG_KEY_LENGTHS,
    SA_ARG_BLOCK_MASK,
    SA_ARG_RNG,
    SA_ARG_RETURN_LSE,
    SA_ARG_RETURN_WEIGHTS,
    SA_ARG_OUT,
    SA_ARG_NUM_THREADS
};

/* An attention call under way: every reference it owns, and the core's struct that points into them. */
typedef struct {
    const sa_state *state;
    PyArrayObject *query, *key, *value, *mask, *alibi, *sinks, *lengths, *query_lengths; /* owned */
    PyArrayObject *out, *lse, *weights, *stats;                                          /* owned */
    PyArrayObject *unrounded; /* owned: what is computed in place of an out of 16 bits, or NULL */
    sa_dtype result;
    bool enable_gqa, lower_right, want_lse, want_weights, want_stats, want_unrounded;
    int threads;
    npy_intp lead[NPY_MAXDIMS];
    sa_attention a;
    PyObject *tables; /* owned: what block_masks points into */
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];
} sa_call;

/* Reads and checks all arguments but `out` and `rng` into c, which need not be initialised. Returns −1 with an exception set.
 * release is due in any case. */
int sa_call_read(sa_call *c, PyObject *module, PyObject *const *values);
int sa_call_read_seed(sa_call *c, PyObject *rng);
/* The same for one half of a vjp: what cannot be repeated in the other half is an error. */
int sa_call_read_fixed_seed(sa_call *c, PyObject *rng);
void sa_call_release(sa_call *c);

/* The parts of sa_call_read: an empty call; and all but query, key and value, for a call whose shapes are known. */
void sa_call_start(sa_call *c, PyObject *module);
int sa_call_read_options(sa_call *c, PyObject *const *values);
int sa_call_read_mask(sa_call *c, PyObject *value, const char *name);
/* How many queries of each sequence are no padding: sa_attention's query_lengths. */
int sa_call_read_query_lengths(sa_call *c, PyObject *value);
/* block_mask.c: the tables of a BlockMask, for a call whose shapes are known. */
int sa_call_read_block_mask(sa_call *c, PyObject *value);

/* Whether array, its last `core` axes taken off, broadcasts to the leading dims without enlarging them. Without leading
 * dims a single element in one axis is taken as well. */
bool sa_call_fits_lead(const sa_call *c, PyArrayObject *array, int core);

/* Whether out may have this dtype: the result's, or, where statistics are kept, float32 in place of 16 bits. */
bool sa_call_takes_out(const sa_call *c, sa_dtype dtype);

/* The call's out, of this shape: values[SA_ARG_OUT] (dtype, byte order, and no overlap with itself or an input are checked) or a new
 * one; and `unrounded` if that is wanted of 16 bits. Returns the one of both that is to be computed, borrowed, and its dtype, or NULL
 * with an exception. */
PyArrayObject *sa_call_make_out(sa_call *c, PyObject *const *values, int ndim, const npy_intp *shape, sa_dtype *dtype);
/* No overlap of out with what was given as an argument, where the call works on a copy of it. */
int sa_call_check_given(const sa_call *c, PyObject *given, const char *name);

/* The outputs that were asked for, one array or a tuple: out, statistics, unrounded (out itself where it is), lse, weights. */
PyObject *sa_call_result(const sa_call *c);

/* A floating array of this shape; −1 with an exception, and *array owned in any case. */
int sa_read_float_array(const sa_state *state, PyObject *value, const char *name, int ndim, const npy_intp *shape,
                        PyArrayObject **array, sa_dtype *dtype);

/* The same of what a backward call is given as `name`: never of more bits than what it belongs to, `of`, has. */
int sa_read_gradient(const sa_call *c, PyObject *value, const char *name, const char *of, sa_dtype of_dtype, int ndim,
                     const npy_intp *shape, PyArrayObject **array, sa_dtype *dtype);

/* The statistics that the forward call returned, of this shape, as the call's. */
int sa_read_statistics(sa_call *c, PyObject *value, int ndim, const npy_intp *shape);

/* 0 when `array` has this shape, else −1 with a ValueError. */
int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape);

/* −1 with a ValueError that has the shapes of two arrays at its end. */
int sa_shape_error(const char *message, const char *name_a, PyArrayObject *a, const char *name_b, PyArrayObject *b);

/* Any of query, key and value whose dtype is bfloat16: where the type object of the results comes from. */
PyArrayObject *sa_call_bf16_example(const sa_call *c);

#endif
