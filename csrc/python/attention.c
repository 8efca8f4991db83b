/* Attention's forward calls: makes outputs, runs the call, returns the results. attention_call.c reads the arguments. */
#include "python/attention_call.h"
#include "python/run.h"

/* Calls with fewer multiply-adds keep the GIL. */
#define SA_SMALL_WORK 65536.0

/* ---- outputs ------------------------------------------------------------------------------------------------------- */

/* A pullback reads these arrays again, so out may not overlap them. */
static int check_given(const sa_call *c, PyObject *given, const char *name) {
    sa_dtype dtype;
    PyArrayObject *array = given ? sa_as_array(c->state, given, name, SA_ANY, &dtype) : NULL;
    if (array == NULL) {
        return given ? -1 : 0;
    }
    const int status = sa_check_overlap(c->state, c->results[SA_OUT], array, name);
    Py_DECREF(array);
    return status;
}

static int check_overlaps(const sa_call *c) {
    for (int i = 0; i < c->owned_count; ++i) {
        if (sa_check_overlap(c->state, c->results[SA_OUT], c->owned[i], c->owned_names[i]) < 0) {
            return -1;
        }
    }
    for (ptrdiff_t s = 0; c->packed && c->mask_arrays && s < c->v.sequences; ++s) {
        if (c->mask_arrays[s] && sa_check_overlap(c->state, c->results[SA_OUT], c->mask_arrays[s], "attn_mask") < 0) {
            return -1;
        }
    }
    const bool fits = check_given(c, c->given.alibi_slopes, "alibi_slopes") == 0 &&
                      check_given(c, c->given.sinks, "sinks") == 0 &&
                      check_given(c, c->given.key_lengths, "key_lengths") == 0 &&
                      check_given(c, c->given.cu_seqlens_q, "cu_seqlens_q") == 0 &&
                      check_given(c, c->given.cu_seqlens_k, "cu_seqlens_k") == 0;
    return fits ? 0 : -1;
}

bool sa_call_takes_out(const sa_call *c, sa_dtype dtype) {
    return dtype == c->result || (dtype == SA_F32 && c->want_stats && !c->want_unrounded && sa_itemsize(c->result) == 2);
}

static int take_out(sa_call *c, int ndim, const npy_intp *shape, sa_dtype *dtype) {
    PyObject *given = c->given.out;
    if (!PyArray_Check(given)) {
        return sa_error(PyExc_TypeError, "out must be a NumPy array, got %s (numpy.asarray(out) of a tensor shares its memory)",
                        sa_type_name(given));
    }
    c->results[SA_OUT] = (PyArrayObject *)Py_NewRef(given);
    PyArrayObject *same = sa_as_array(c->state, given, "out", SA_ANY, dtype);
    if (same == NULL) {
        return -1;
    }
    Py_DECREF(same);
    if (!sa_call_takes_out(c, *dtype) || !PyArray_ISNOTSWAPPED(c->results[SA_OUT])) {
        return sa_error(PyExc_TypeError, "out must be of dtype %s%s in native byte order, got %S", sa_dtype_name(c->result),
                        c->result != SA_F32 && sa_call_takes_out(c, SA_F32) ? " or float32" : "",
                        (PyObject *)PyArray_DESCR(c->results[SA_OUT]));
    }
    if (sa_check_shape("out", c->results[SA_OUT], ndim, shape) < 0) {
        return -1;
    }
    if (!PyArray_ISWRITEABLE(c->results[SA_OUT])) {
        return sa_error(PyExc_ValueError, "out is read-only");
    }
    return sa_check_self_overlap(c->results[SA_OUT]) < 0 ? -1 : check_overlaps(c);
}

/* Returns a borrowed reference; the results own the array. */
static PyArrayObject *make(sa_call *c, int which, int ndim, const npy_intp *shape, sa_dtype dtype, bool zeros) {
    const sa_attention *a = &c->a;
    PyArrayObject *like = a->query.m.dtype == SA_BF16 ? c->query : a->key.m.dtype == SA_BF16 ? c->key : c->value;
    return c->results[which] = sa_new_array(ndim, shape, dtype, like, zeros);
}

/* Makes out, or takes the caller's. If UNROUNDED is wanted, the kernels write to that array. */
static int make_out(sa_call *c) {
    npy_intp shape[NPY_MAXDIMS + 2];
    const int ndim = sa_call_shape(c, c->lead, c->a.L, c->a.Dv, shape);
    sa_dtype dtype = c->result;
    if (c->given.out ? take_out(c, ndim, shape, &dtype) < 0 : make(c, SA_OUT, ndim, shape, dtype, false) == NULL) {
        return -1;
    }
    PyArrayObject *computed = c->results[SA_OUT];
    if (c->want_unrounded && sa_itemsize(dtype) == 2) {
        dtype = SA_F32;
        if ((computed = make(c, SA_UNROUNDED, ndim, shape, dtype, false)) == NULL) {
            return -1;
        }
    } else if (c->want_unrounded) {
        c->results[SA_UNROUNDED] = (PyArrayObject *)Py_NewRef((PyObject *)computed);
    }
    sa_call_fill(c, &c->a.out, computed, dtype);
    return 0;
}

static int make_outputs(sa_call *c) {
    sa_attention *a = &c->a;
    npy_intp shape[NPY_MAXDIMS + 2];
    if (make_out(c) < 0) {
        return -1;
    }
    if (c->want_lse) {
        PyArrayObject *lse = make(c, SA_LSE, sa_call_row_shape(c, 0, shape), shape, c->computes, false);
        if (lse == NULL) {
            return -1;
        }
        sa_call_fill_rows(c, &a->lse, lse, c->computes);
    }
    if (c->want_stats) {
        PyArrayObject *stats = make(c, SA_STATISTICS, sa_call_row_shape(c, 2, shape), shape, c->computes, true);
        if (stats == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->stats, stats, c->computes, a->n_lead, 2);
    }
    if (c->want_weights) {
        PyArrayObject *weights = make(c, SA_WEIGHTS, sa_call_shape(c, c->lead, a->L, a->S, shape), shape, c->result, true);
        if (weights == NULL) {
            return -1;
        }
        sa_call_fill(c, &a->weights, weights, c->result);
    }
    return 0;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

typedef struct {
    sa_call *c;
    sa_attention_plan plan;
    sa_varlen_plan packed_plan;
} forward_run;

static sa_status compute(void *call, char *scratch, char *partial) {
    const forward_run *r = call;
    return r->c->packed ? sa_varlen_forward(&r->c->v, &r->packed_plan, scratch, partial)
                        : sa_attention_forward(&r->c->a, &r->plan, scratch, partial);
}

static int run(sa_call *c, PyObject *module) {
    forward_run r;
    r.c = c;
    sa_job job = {.watch = &c->a.watch, .compute = compute, .call = &r};
    if (c->packed) {
        c->v.lower_right = c->lower_right;
        job.planned = sa_varlen_make_plan(&c->v, c->threads, c->items, &r.packed_plan);
        job.threads = r.packed_plan.threads;
        job.scratch_bytes = r.packed_plan.scratch_bytes;
        job.shared_bytes = r.packed_plan.partial_bytes;
    } else {
        job.planned = sa_attention_make_plan(&c->a, c->threads, &r.plan);
        job.threads = r.plan.threads;
        job.scratch_bytes = r.plan.scratch_bytes;
        job.shared_bytes = r.plan.partial_bytes;
        const double work = (double)r.plan.rows * (double)r.plan.groups * (double)c->a.S * (double)(c->a.E + c->a.Dv + 1);
        job.small = job.threads == 1 && work < SA_SMALL_WORK;
    }
    return sa_run_job(module, &job);
}

/* The result is made before anything is written, so that a call that raises does not change `out`. */
static PyObject *make_result(const sa_call *c) {
    Py_ssize_t n = 0;
    for (int i = 0; i < SA_RESULTS; ++i) {
        n += c->results[i] != NULL;
    }
    if (n == 1) {
        return Py_NewRef((PyObject *)c->results[SA_OUT]);
    }
    PyObject *tuple = PyTuple_New(n);
    for (int i = SA_RESULTS - 1; tuple != NULL && i >= 0; --i) {
        if (c->results[i] != NULL) {
            PyTuple_SET_ITEM(tuple, --n, Py_NewRef((PyObject *)c->results[i]));
        }
    }
    return tuple;
}

static PyObject *forward(PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *result = NULL;
    sa_call c;
    if (sa_call_read(&c, module, function, args, nargs, kwnames) == 0 && make_outputs(&c) == 0 && sa_call_read_seed(&c) == 0 &&
        (result = make_result(&c)) != NULL && run(&c, module) < 0) {
        Py_CLEAR(result);
    }
    sa_call_release(&c);
    return result;
}

SA_FUNCTION(attention, forward, SA_FN_ATTENTION)
SA_FUNCTION(cached, forward, SA_FN_CACHED)
SA_FUNCTION(forward_half, forward, SA_FN_FORWARD)
SA_FUNCTION(packed, forward, SA_FN_PACKED)
SA_FUNCTION(packed_forward_half, forward, SA_FN_PACKED_FORWARD)

static const char doc_attention[] =
    "scaled_dot_product_attention($module, /, query, key, value, attn_mask=None, dropout_p=0.0, "
    "is_causal=False, *, scale=None, enable_gqa=False, causal=None, window=None, softcap=None, "
    "alibi_slopes=None, sinks=None, key_lengths=None, block_mask=None, rng=None, return_lse=False, "
    "return_weights=False, out=None, num_threads=None)\n--\n\n"
    "Exact attention, softmax(scale * query @ key.T + mask) @ value, in memory linear in L and S.\n\n"
    "The scores are never stored: keys are taken in tiles with a running maximum and sum [2]_, [3]_. The\n"
    "arguments up to `enable_gqa` are those of ``torch.nn.functional.scaled_dot_product_attention``.\n\n"
    "Parameters\n----------\nquery : array_like, shape (..., L, E)\n"
    "    Queries. ``...`` are any leading dimensions (batches, then heads), which broadcast between `query`,\n"
    "    `key` and `value`; none is one head. Any strides, alignment and byte order.\n"
    "key : array_like, shape (..., S, E)\n"
    "    Keys.\n"
    "value : array_like, shape (..., S, Ev)\n"
    "    Values; Ev may differ from E.\n"
    "attn_mask : array_like of bool or float, optional\n"
    "    Broadcastable to (..., L, S) without enlarging it. Boolean: True = attend. Float: added to the\n"
    "    scores, -inf closes a pair as False does; its dtype does not affect the result's.\n"
    "dropout_p : float, default 0.0\n"
    "    Probability with which a weight is set to 0; the others are divided by ``1 - dropout_p``. As in\n"
    "    PyTorch's function it applies whenever it is given: there is no training mode.\n"
    "is_causal : bool, default False\n"
    "    Query i attends to keys j <= i (upper-left diagonal). Combines with `attn_mask`.\n"
    "scale : float, optional\n"
    "    Factor of the scores, 1/sqrt(E) by default.\n"
    "enable_gqa : bool, default False\n"
    "    Let each head of `key` and `value` serve H/H_kv heads of `query` in a row.\n"
    "causal : {None, 'upper_left', 'lower_right'}, optional\n"
    "    The causal rule with its diagonal: j <= i, or j <= i + S - L.\n"
    "window : (left, right), optional\n"
    "    Keys from i + o - left to i + o + right are open, where o is the offset of the causal rule's diagonal:\n"
    "    0 or S - L. Each is an int >= 0, or None for no bound. Costs the width of the window, not S.\n"
    "softcap : float, optional\n"
    "    Scaled scores s become softcap * tanh(s / softcap); > 0.\n"
    "alibi_slopes : array_like, optional\n"
    "    (H,) or broadcastable to the leading dimensions; adds -slope * abs(i + o - j), with the o of `window`.\n"
    "sinks : array_like, optional\n"
    "    (H,) or broadcastable likewise: a logit per head that takes part in the denominator only.\n"
    "key_lengths : array_like of int, optional\n"
    "    Broadcastable to the leading dimensions, each in 0...S: keys from there on do not exist.\n"
    "block_mask : BlockMask, optional\n"
    "    Closes pairs by documents, by a prefix or by a pattern of blocks, without an array of (L, S); what is\n"
    "    closed in blocks is skipped. See `BlockMask`.\n"
    "rng : int, numpy.random.Generator or TorchGenerator (`torch_rng`), optional\n"
    "    Where the dropout mask comes from: an int >= 0 is the seed (modulo 2**64), a generator draws one\n"
    "    uint64 per call. None takes fresh entropy. The mask does not depend on the number of threads.\n"
    "return_lse : bool, default False\n"
    "    Append the log-sum-exp of the scores of each row, natural log, `sinks` included, before dropout.\n"
    "return_weights : bool, default False\n"
    "    Append the weights after dropout. They take (..., L, S) of memory.\n"
    "out : ndarray, optional\n"
    "    Where to put the output: exact shape and dtype, native byte order, writable, without overlap\n"
    "    with an input. Returned.\n"
    "num_threads : int, optional\n"
    "    Threads of this call, at most; see `set_num_threads`. Small calls use fewer. The bits of the\n"
    "    result do not depend on it.\n\n"
    "Returns\n-------\nout : ndarray, shape (..., L, Ev)\n"
    "    The promoted dtype of the three inputs; integers count as float64. 16-bit inputs accumulate in\n"
    "    float32. New and C-contiguous, unless `out` was given. A row with nothing to attend to is 0.\n"
    "lse : ndarray, shape (..., L)\n"
    "    Only with `return_lse`: float64 for float64, else float32; -inf for a row with nothing to attend to.\n"
    "weights : ndarray, shape (..., L, S)\n"
    "    Only with `return_weights`.\n\n"
    "Raises\n------\nValueError\n"
    "    Shapes that do not fit, or an argument out of its range.\n"
    "TypeError\n"
    "    A dtype or type that is refused: boolean, complex and object arrays, masked arrays, integer masks.\n"
    "MemoryError\n"
    "    There is no memory for the output or the scratch.\n"
    "KeyboardInterrupt\n"
    "    Ctrl-C during the call, in Python's main thread. What `out` holds is then undefined.\n\n"
    "Notes\n-----\nA score is ``scale * q @ k``, then softcap, ALiBi, float mask, boolean mask, causal, window, key\n"
    "lengths and block mask, softmax (with sinks), dropout. A closed pair contributes exactly nothing, whatever its\n"
    "key or value holds, NaN included; NaN or inf in an open pair propagates.\n\n"
    "References\n----------\n.. [1] A. Vaswani et al., \"Attention is all you need\", 2017, equation 1.\n"
    ".. [2] M. Milakov and N. Gimelshein, \"Online normalizer calculation for softmax\", 2018, algorithm 3.\n"
    ".. [3] T. Dao et al., \"FlashAttention\", 2022, algorithm 1.\n\n"
    "Examples\n--------\n>>> import numpy as np\n"
    ">>> import selfattn as sa\n"
    ">>> q = np.array([[1.0, 0.0], [0.0, 1.0]])\n"
    ">>> k = np.array([[1.0, 0.0], [0.0, 1.0]])\n"
    ">>> v = np.array([[1.0, 2.0], [3.0, 4.0]])\n"
    ">>> sa.scaled_dot_product_attention(q, k, v).round(4)\n"
    "array([[1.6605, 2.6605],\n"
    "       [2.3395, 3.3395]])\n"
    ">>> out, weights = sa.scaled_dot_product_attention(q, k, v, is_causal=True, return_weights=True)\n"
    ">>> weights.round(4)\n"
    "array([[1.    , 0.    ],\n"
    "       [0.3302, 0.6698]])\n";

PyMethodDef sa_attention_methods[] = {
    SA_METHOD("scaled_dot_product_attention", attention, doc_attention),
    SA_METHOD("_cached_attention", cached, NULL),
    SA_METHOD("_attention_forward", forward_half, NULL),
    SA_METHOD("_varlen_attention", packed, NULL),
    SA_METHOD("_varlen_forward", packed_forward_half, NULL),
    {NULL, NULL, 0, NULL},
};
