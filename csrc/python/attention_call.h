/* An attention call from Python: forward or backward, leading dims or packed sequences. */
#ifndef SA_PYTHON_ATTENTION_CALL_H
#define SA_PYTHON_ATTENTION_CALL_H

#include "python/binding.h"

#include "drivers/varlen.h"

extern const sa_family sa_attention_family;

/* The functions that make such a call; those from SA_FN_PACKED on take packed sequences. */
enum {
    SA_FN_ATTENTION,
    SA_FN_CACHED,
    SA_FN_FORWARD, /* the forward half of a vjp */
    SA_FN_BACKWARD,
    SA_FN_JVP, /* with tangents, here and below */
    SA_FN_HVP,
    SA_FN_PACKED,
    SA_FN_PACKED_FORWARD,
    SA_FN_PACKED_BACKWARD
};

/* The results, in order. UNROUNDED is out before it is rounded to 16 bits, else out itself. */
enum { SA_OUT, SA_STATISTICS, SA_UNROUNDED, SA_LSE, SA_WEIGHTS, SA_RESULTS };

#define SA_MAX_OWNED 32

/* Sets of functions. */
#define SA_CACHED (1 << SA_FN_CACHED)
#define SA_TANGENTS (1 << SA_FN_JVP | 1 << SA_FN_HVP)
#define SA_DENSE_BACKWARD (1 << SA_FN_BACKWARD | 1 << SA_FN_HVP)
#define SA_DENSE (1 << SA_FN_ATTENTION | SA_CACHED | 1 << SA_FN_FORWARD | SA_DENSE_BACKWARD | 1 << SA_FN_JVP)
#define SA_PACKED (1 << SA_FN_PACKED | 1 << SA_FN_PACKED_FORWARD | 1 << SA_FN_PACKED_BACKWARD)
#define SA_BOTH_HALVES (1 << SA_FN_FORWARD | 1 << SA_FN_BACKWARD)
#define SA_BIASED (1 << SA_FN_ATTENTION | SA_BOTH_HALVES | SA_TANGENTS)
#define SA_ALL (SA_DENSE | SA_PACKED)
#define SA_FORWARD (1 << SA_FN_FORWARD | 1 << SA_FN_PACKED_FORWARD)
#define SA_BACKWARD (SA_DENSE_BACKWARD | 1 << SA_FN_PACKED_BACKWARD)

/* Every parameter of attention, in the order of the signatures.
 * Columns are the fields of sa_parameter; `to` is in sa_call. `place` is (diagonal, first head, first query, first
 * key): where the call's arrays lie in larger ones, of which others compute the rest. */
#define SA_ATTENTION_PARAMETERS(P)                                                                                     \
    P(query, "", SA_ALL, NULL, given)                                                                                  \
    P(key, "", SA_ALL, NULL, given)                                                                                    \
    P(value, "", SA_ALL, NULL, given)                                                                                  \
    P(cu_seqlens_q, "", SA_PACKED, NULL, given)                                                                        \
    P(cu_seqlens_k, "", SA_PACKED, NULL, given)                                                                        \
    P(attn_mask, "=None", SA_ALL, read_mask, a.mask)                                                                   \
    P(dropout_p, "=0.0", SA_ALL, read_dropout, a.dropout_p)                                                            \
    P(is_causal, "=False", SA_ALL, sa_read_flag, a.causal)                                                             \
    P(scale, "=None", SA_ALL, read_scale, a.scale)                                                                     \
    P(enable_gqa, "=False", SA_ALL, NULL, given)                                                                       \
    P(causal, "=None", SA_ALL, read_causal, a.causal)                                                                  \
    P(window, "=None", SA_ALL, read_window, a.window_left)                                                             \
    P(softcap, "=None", SA_ALL, read_positive, a.softcap)                                                              \
    P(alibi_slopes, "=None", SA_ALL, read_per_head, a.alibi)                                                           \
    P(sinks, "=None", SA_ALL, read_per_head, a.sinks)                                                                  \
    P(key_lengths, "=None", SA_DENSE, read_lengths, a.key_lengths)                                                     \
    P(block_mask, "=None", SA_DENSE, sa_call_read_block_mask, block_masks)                                             \
    P(rng, "=None", SA_ALL, NULL, given)                                                                               \
    P(return_lse, "=False", SA_ALL & ~SA_TANGENTS, sa_read_flag, want_lse)                                             \
    P(return_weights, "=False", SA_DENSE & ~SA_TANGENTS, sa_read_flag, want_weights)                                   \
    P(out, "=None", SA_ALL & ~(1 << SA_FN_JVP), NULL, given)                                                           \
    P(num_threads, "=None", SA_ALL, sa_read_threads, threads)                                                          \
    P(bias, "=None", SA_BIASED, read_bias, a.mask)                                                                     \
    P(offset_bias, "=None", SA_BIASED, read_offset_bias, a.offset_bias)                                                \
    P(query_tangent, "=None", SA_TANGENTS, read_tangent, a.query_tangent)                                              \
    P(key_tangent, "=None", SA_TANGENTS, read_tangent, a.key_tangent)                                                  \
    P(value_tangent, "=None", SA_TANGENTS, read_tangent, a.value_tangent)                                              \
    P(mask_tangent, "=None", SA_TANGENTS, read_mask_tangent, a.mask_tangent)                                           \
    P(offset_bias_tangent, "=None", SA_TANGENTS, read_offset_bias, a.offset_bias_tangent)                              \
    P(alibi_tangents, "=None", SA_TANGENTS, read_per_head, a.alibi_tangent)                                            \
    P(sink_tangents, "=None", SA_TANGENTS, read_per_head, a.sink_tangent)                                              \
    P(query_lengths, "", SA_CACHED, read_lengths, a.query_lengths)                                                     \
    P(place, "=None", SA_BOTH_HALVES, NULL, given)                                                                     \
    P(key_bias, "=None", SA_BOTH_HALVES, read_key_bias, a.key_bias)                                                    \
    P(unrounded, "=False", SA_FORWARD, NULL, given)                                                                    \
    P(grad_out, "=None", SA_BACKWARD, NULL, given)                                                                     \
    P(statistics, "=None", SA_BACKWARD, NULL, given)                                                                   \
    P(grad_lse, "=None", SA_BACKWARD, NULL, given)                                                                     \
    P(grad_out_tangent, "=None", 1 << SA_FN_HVP, NULL, given)                                                          \
    P(grad_lse_tangent, "=None", 1 << SA_FN_HVP, NULL, given)                                                          \
    P(wrt, "=7", SA_BACKWARD, NULL, given)

/* The given arguments: borrowed, or NULL. */
#define SA_ARGUMENT(name, otherwise, functions, read, to) PyObject *name;
typedef struct {
    SA_ATTENTION_PARAMETERS(SA_ARGUMENT)
} sa_attention_arguments;

/* A call: its references, and the core's structs that point into them. */
typedef struct {
    union {
        sa_attention_arguments given;
        PyObject *values[SA_MAX_PARAMETERS];
    };
    PyArrayObject *owned[SA_MAX_OWNED]; /* all arrays that the call reads */
    const char *owned_names[SA_MAX_OWNED];
    int owned_count;
    PyArrayObject *query, *key, *value; /* borrowed */
    PyArrayObject *mask;                /* borrowed: the mask or bias that was read last, or NULL */
    PyArrayObject *results[SA_RESULTS]; /* owned; NULL: not requested */
    sa_dtype result, computes;
    bool packed, enable_gqa, lower_right, want_lse, want_weights;
    bool has_bias;                   /* mask is the bias */
    bool want_stats, want_unrounded; /* a vjp needs these */
    bool looks_at_mask;              /* warns of a mask that probably means something else; only in the plain call */
    int threads;
    npy_intp lead[NPY_MAXDIMS];
    sa_attention a;
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];

    /* These are for packed sequences: */
    sa_varlen v;
    PyArrayObject **mask_arrays; /* owned; NULL for sequences without a mask */
    sa_tensor *masks;            /* owned */
    sa_varlen_item *items;       /* owned */
} sa_call;

/* Reads all arguments but `out`, `rng` and the arguments of backward calls.
 * c may be uninitialised; release it even after an error. */
int sa_call_read(sa_call *c, PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames);
void sa_call_release(sa_call *c);

/* Call it last, since drawing changes a generator. The halves of a vjp must drop the same weights,
 * so neither takes one. */
int sa_call_read_seed(sa_call *c);

/* Takes over a reference to array. */
void sa_call_own(sa_call *c, PyArrayObject *array, const char *name);

/* Reads `block_mask`; defined in block_mask.c. */
int sa_call_read_block_mask(void *call, PyObject *value, const char *name, void *to);

/* True if all axes but the last `core` broadcast to the leading dims without enlarging them. */
bool sa_call_fits_lead(const sa_call *c, PyArrayObject *array, int core);

/* Fills shape with (B…, rows, cols), or packed (rows, H, cols). Returns the number of axes. */
int sa_call_shape(const sa_call *c, const npy_intp *lead, npy_intp rows, npy_intp cols, npy_intp *shape);
/* Fills t from array. A single column counts as contiguous. */
void sa_call_fill(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

/* Fills shape with (B…, L, cols), or packed (H, L, cols), without the last axis if cols is 0. */
int sa_call_row_shape(const sa_call *c, npy_intp cols, npy_intp *shape);
/* Fills t with (B…, L), seen as (…, L, 1). */
void sa_call_fill_rows(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype);

#endif
