/* Attention's forward calls: makes outputs, runs the call, returns the results.
 * attention_call.c reads the arguments. */
#include "python/attention_call.h"
#include "python/run.h"

/* Calls with fewer multiply-adds keep the GIL. */
#define SA_SMALL_WORK 65536.0

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* A pullback reads these arrays again, so out may not overlap them. */
static int check_given(const sa_call *c, PyObject *given, const char *name) {
    sa_dtype dtype;
    PyArrayObject *array = given ? sa_as_array(given, name, SA_ANY, &dtype) : NULL;
    if (array == NULL) {
        return given ? -1 : 0;
    }
    const int status = sa_check_overlap(c->results[SA_OUT], array, name);
    Py_DECREF(array);
    return status;
}

static int check_overlaps(const sa_call *c) {
    for (int i = 0; i < c->owned_count; ++i) {
        if (sa_check_overlap(c->results[SA_OUT], c->owned[i], c->owned_names[i]) < 0) {
            return -1;
        }
    }
    for (ptrdiff_t s = 0; c->packed && c->mask_arrays && s < c->v.sequences; ++s) {
        if (c->mask_arrays[s] && sa_check_overlap(c->results[SA_OUT], c->mask_arrays[s], "attn_mask") < 0) {
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

static int take_out(sa_call *c, int ndim, const npy_intp *shape, sa_dtype *dtype) {
    PyObject *given = c->given.out;
    if (!PyArray_Check(given)) {
        return sa_error(PyExc_TypeError,
                        "out must be a NumPy array, got %s (numpy.asarray(out) of a tensor shares its memory)",
                        sa_type_name(given));
    }
    c->results[SA_OUT] = (PyArrayObject *)Py_NewRef(given);
    PyArrayObject *same = sa_as_array(given, "out", SA_ANY, dtype);
    if (same == NULL) {
        return -1;
    }
    Py_DECREF(same);
    if (*dtype != c->result || !PyArray_ISNOTSWAPPED(c->results[SA_OUT])) {
        return sa_error(PyExc_TypeError, "out must be of dtype %s in native byte order, got %S",
                        sa_dtype_name(c->result), (PyObject *)PyArray_DESCR(c->results[SA_OUT]));
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

/* Makes a result with a first axis of 2: the result and its tangent. */
static PyArrayObject *make_both(sa_call *c, int which, int ndim, npy_intp *shape, sa_dtype dtype) {
    memmove(shape + 1, shape, (size_t)ndim * sizeof *shape);
    shape[0] = 2;
    return make(c, which, ndim + 1, shape, dtype, false);
}

static int make_out_tangents(sa_call *c, int ndim, npy_intp *shape) {
    PyArrayObject *out = make_both(c, SA_OUT, ndim, shape, c->result);
    if (out == NULL) {
        return -1;
    }
    sa_fill_tensor(&c->a.out, out, c->result, c->a.n_lead, 2);
    c->a.out.m.col_stride = PyArray_ITEMSIZE(out);
    c->a.out_tangent = PyArray_NBYTES(out) / 2;
    return 0;
}

/* Makes out, or takes the caller's. If UNROUNDED is wanted, the kernels write to that array. */
static int make_out(sa_call *c) {
    npy_intp shape[NPY_MAXDIMS + 3];
    const int ndim = sa_call_shape(c, c->lead, c->a.L, c->a.Dv, shape);
    sa_dtype dtype = c->result;
    if (c->a.with_tangents) {
        return make_out_tangents(c, ndim, shape);
    }
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
    npy_intp shape[NPY_MAXDIMS + 3];
    if (make_out(c) < 0) {
        return -1;
    }
    if (c->want_lse) {
        const int ndim = sa_call_row_shape(c, 0, shape);
        PyArrayObject *lse = a->with_tangents ? make_both(c, SA_LSE, ndim, shape, c->computes)
                                              : make(c, SA_LSE, ndim, shape, c->computes, false);
        if (lse == NULL) {
            return -1;
        }
        sa_call_fill_rows(c, &a->lse, lse, c->computes);
        a->lse_tangent = PyArray_NBYTES(lse) / 2;
    }
    if (c->want_stats) {
        const int columns = a->with_tangents ? 4 : 2;
        PyArrayObject *stats = make(c, SA_STATISTICS, sa_call_row_shape(c, columns, shape), shape, c->computes, true);
        if (stats == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->stats, stats, c->computes, a->n_lead, 2);
    }
    if (c->want_weights) {
        PyArrayObject *weights =
            make(c, SA_WEIGHTS, sa_call_shape(c, c->lead, a->L, a->S, shape), shape, c->result, true);
        if (weights == NULL) {
            return -1;
        }
        sa_call_fill(c, &a->weights, weights, c->result);
    }
    return 0;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

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
        const double work =
            (double)r.plan.rows * (double)r.plan.groups * (double)c->a.S * (double)(c->a.E + c->a.Dv + 1);
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
    if (sa_call_read(&c, module, function, args, nargs, kwnames) == 0 && make_outputs(&c) == 0 &&
        sa_call_read_seed(&c) == 0 && (result = make_result(&c)) != NULL && run(&c, module) < 0) {
        Py_CLEAR(result);
    }
    sa_call_release(&c);
    return result;
}

SA_FUNCTION(attention, forward, SA_FN_ATTENTION)
SA_FUNCTION(cached, forward, SA_FN_CACHED)
SA_FUNCTION(forward_half, forward, SA_FN_FORWARD)
SA_FUNCTION(jvp, forward, SA_FN_JVP)
SA_FUNCTION(packed, forward, SA_FN_PACKED)
SA_FUNCTION(packed_forward_half, forward, SA_FN_PACKED_FORWARD)

/* Returns the parameters of scaled_dot_product_attention by name, with their defaults as documentation prints them. */
static PyObject *parameters(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *found = PyDict_New();
    for (const sa_parameter *p = sa_attention_family.parameters; found != NULL && p->name != NULL; ++p) {
        PyObject *text = p->functions >> SA_FN_ATTENTION & 1 ? PyUnicode_FromString(p->otherwise) : Py_NewRef(Py_None);
        if (text == NULL || (text != Py_None && PyDict_SetItemString(found, p->name, text) < 0)) {
            Py_CLEAR(found);
        }
        Py_XDECREF(text);
    }
    return found;
}

PyMethodDef sa_attention_methods[] = {
    SA_METHOD("scaled_dot_product_attention", attention, NULL),
    {"_attention_parameters", parameters, METH_NOARGS, "The parameters of attention, for Python's signatures."},
    SA_METHOD("_cached_attention", cached, NULL),
    SA_METHOD("_attention_forward", forward_half, NULL),
    SA_METHOD("_attention_jvp", jvp, NULL),
    SA_METHOD("_varlen_attention", packed, NULL),
    SA_METHOD("_varlen_forward", packed_forward_half, NULL),
    {NULL, NULL, 0, NULL},
};
