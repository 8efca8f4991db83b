/* scaled_dot_product_attention as Python calls it: makes the outputs, runs, and builds the result. The arguments are read in
 * attention_call.c. */
#include "python/attention_call.h"
#include "python/run.h"

/* Multiply-adds below which the GIL is kept. */
#define SA_SMALL_WORK 65536.0

/* Behind the parameters that all have: of sa_py_attention_cached alone, and of sa_py_attention_forward. */
enum { QUERY_LENGTHS = SA_ARG_NUM_THREADS + 1, UNROUNDED = SA_ARG_NUM_THREADS + 1 };

/* ---- outputs ------------------------------------------------------------------------------------------------------- */

int sa_call_check_given(const sa_call *c, PyObject *given, const char *name) {
    PyArrayObject *array = sa_given(given) ? (PyArrayObject *)PyArray_FROM_O(given) : NULL; /* a buffer's own memory */
    if (array == NULL) {
        return sa_given(given) ? -1 : 0;
    }
    const int status = sa_check_overlap(c->state, c->out, array, name);
    Py_DECREF(array);
    return status;
}

bool sa_call_takes_out(const sa_call *c, sa_dtype dtype) {
    return dtype == c->result || (dtype == SA_F32 && c->want_stats && !c->want_unrounded && sa_itemsize(c->result) == 2);
}

/* values[SA_ARG_OUT] as the call's out. */
static int take_out(sa_call *c, PyObject *const *values, int ndim, const npy_intp *shape, sa_dtype *dtype) {
    PyObject *value = values[SA_ARG_OUT];
    if (!PyArray_Check(value)) { /* sa_as_array refuses the subclasses that mean something else; a memmap will do */
        PyErr_Format(PyExc_TypeError, "out must be a NumPy array, got %s", Py_TYPE(value)->tp_name);
        return -1;
    }
    c->out = (PyArrayObject *)Py_NewRef(value);
    PyArrayObject *same = sa_as_array(c->state, value, "out", SA_ANY, dtype);
    if (same == NULL) {
        return -1;
    }
    Py_DECREF(same);
    if (!sa_call_takes_out(c, *dtype) || !PyArray_ISNOTSWAPPED(c->out)) {
        PyErr_Format(PyExc_TypeError, "out must be of dtype %s%s in native byte order, got %S", sa_dtype_name(c->result),
                     c->result != SA_F32 && sa_call_takes_out(c, SA_F32) ? " or float32" : "",
                     (PyObject *)PyArray_DESCR(c->out));
        return -1;
    }
    if (sa_check_shape("out", c->out, ndim, shape) < 0) {
        return -1;
    }
    if (!PyArray_ISWRITEABLE(c->out)) {
        PyErr_SetString(PyExc_ValueError, "out is read-only");
        return -1;
    }
    if (sa_check_self_overlap(c->out) < 0) {
        return -1;
    }
    PyArrayObject *const inputs[8] = {c->query, c->key, c->value, c->mask, c->alibi, c->sinks, c->lengths, c->query_lengths};
    static const char *const names[8] = {"query",        "key",   "value",       "attn_mask",
                                         "alibi_slopes", "sinks", "key_lengths", "query_lengths"};
    for (int i = 0; i < 8; ++i) {
        if (inputs[i] != NULL && sa_check_overlap(c->state, c->out, inputs[i], names[i]) < 0) {
            return -1;
        }
    }
    /* a pullback reads the arguments again */
    return sa_call_check_given(c, values[SA_ARG_ALIBI_SLOPES], "alibi_slopes") < 0 ||
                   sa_call_check_given(c, values[SA_ARG_SINKS], "sinks") < 0 ||
                   sa_call_check_given(c, values[SA_ARG_KEY_LENGTHS], "key_lengths") < 0
               ? -1
               : 0;
}

PyArrayObject *sa_call_make_out(sa_call *c, PyObject *const *values, int ndim, const npy_intp *shape, sa_dtype *dtype) {
    *dtype = c->result;
    if (sa_given(values[SA_ARG_OUT])) {
        if (take_out(c, values, ndim, shape, dtype) < 0) {
            return NULL;
        }
    } else if ((c->out = sa_new_array(ndim, shape, c->result, sa_call_bf16_example(c), false)) == NULL) {
        return NULL;
    }
    if (c->want_unrounded && sa_itemsize(c->result) == 2) {
        *dtype = SA_F32;
        return c->unrounded = sa_new_array(ndim, shape, SA_F32, NULL, false);
    }
    return c->out;
}

static int make_outputs(sa_call *c, PyObject *const *values) {
    sa_attention *a = &c->a;
    npy_intp shape[NPY_MAXDIMS + 2];
    const int n = a->n_lead;
    memcpy(shape, c->lead, (size_t)n * sizeof shape[0]);
    shape[n] = a->L;
    shape[n + 1] = a->Dv;
    sa_dtype dtype;
    PyArrayObject *out = sa_call_make_out(c, values, n + 2, shape, &dtype);
    if (out == NULL) {
        return -1;
    }
    sa_fill_tensor(&a->out, out, dtype, n, 2);
    if (a->Dv == 1) {
        a->out.m.col_stride = PyArray_ITEMSIZE(out);
    }
    if (c->want_lse) {
        dtype = a->f64 ? SA_F64 : SA_F32;
        if ((c->lse = sa_new_array(n + 1, shape, dtype, NULL, false)) == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->lse, c->lse, dtype, n, 1);
        a->lse.m.row_stride = a->lse.m.col_stride; /* (…, L) seen as (…, L, 1) */
    }
    if (c->want_stats) {
        dtype = a->f64 ? SA_F64 : SA_F32;
        shape[n + 1] = 2;
        if ((c->stats = sa_new_array(n + 2, shape, dtype, NULL, true)) == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->stats, c->stats, dtype, n, 2);
    }
    if (c->want_weights) {
        shape[n + 1] = a->S;
        if ((c->weights = sa_new_array(n + 2, shape, c->result, sa_call_bf16_example(c), true)) == NULL) {
            return -1;
        }
        sa_fill_tensor(&a->weights, c->weights, c->result, n, 2);
        a->weights.m.col_stride = PyArray_ITEMSIZE(c->weights);
    }
    return 0;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

typedef struct {
    sa_call *c;
    sa_attention_plan plan;
} forward_run;

static sa_status compute(void *call, char *scratch, char *partial) {
    const forward_run *r = call;
    return sa_attention_forward(&r->c->a, &r->plan, scratch, partial);
}

static int run(sa_call *c, PyObject *module) {
    forward_run r;
    sa_attention_plan *plan = &r.plan;
    r.c = c;
    const sa_status planned = sa_attention_make_plan(&c->a, c->threads, plan);
    const double work = (double)plan->rows * (double)plan->groups * (double)c->a.S * (double)(c->a.E + c->a.Dv);
    return sa_run_job(module, &(sa_job){.planned = planned,
                                        .threads = plan->threads,
                                        .scratch_bytes = plan->scratch_bytes,
                                        .shared_bytes = plan->partial_bytes,
                                        .small = plan->threads == 1 && work < SA_SMALL_WORK,
                                        .watch = &c->a.watch,
                                        .compute = compute,
                                        .call = &r});
}

PyObject *sa_call_result(const sa_call *c) {
    PyObject *results[5] = {(PyObject *)c->out};
    Py_ssize_t n = 1;
    if (c->want_stats) {
        results[n++] = (PyObject *)c->stats;
    }
    if (c->want_unrounded) {
        results[n++] = (PyObject *)(c->unrounded ? c->unrounded : c->out);
    }
    if (c->want_lse) {
        results[n++] = (PyObject *)c->lse;
    }
    if (c->want_weights) {
        results[n++] = (PyObject *)c->weights;
    }
    if (n == 1) {
        return Py_NewRef(c->out);
    }
    PyObject *result = PyTuple_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; ++i) {
        PyTuple_SET_ITEM(result, i, Py_NewRef(results[i]));
    }
    return result;
}

static PyObject *forward(PyObject *module, sa_signature_id id, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    sa_call c;
    if (sa_parse(sa_state_of(module), id, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    c.want_stats = id == SA_SIG_ATTENTION_FORWARD;
    c.want_unrounded = c.want_stats && values[UNROUNDED] == Py_True;
    const bool cached = id == SA_SIG_ATTENTION_CACHED;
    if (sa_call_read(&c, module, values) == 0 && (!cached || sa_call_read_query_lengths(&c, values[QUERY_LENGTHS]) == 0) &&
        make_outputs(&c, values) == 0 &&
        (c.want_stats ? sa_call_read_fixed_seed : sa_call_read_seed)(&c, values[SA_ARG_RNG]) == 0 && run(&c, module) == 0) {
        result = sa_call_result(&c);
    }
    sa_call_release(&c);
    return result;
}

PyObject *sa_py_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return forward(module, SA_SIG_ATTENTION, args, nargs, kwnames);
}

PyObject *sa_py_attention_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return forward(module, SA_SIG_ATTENTION_FORWARD, args, nargs, kwnames);
}

PyObject *sa_py_attention_cached(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return forward(module, SA_SIG_ATTENTION_CACHED, args, nargs, kwnames);
}
