/* The low-level half of varlen_attention_vjp: takes the forward call's arguments, what it returned, and the gradient of that;
 * returns the gradients in the precision that computes, packed as the inputs are. selfattn/functional/varlen.py brings them to the inputs'
 * dtypes. */
#include "python/run.h"
#include "python/varlen_call.h"

enum { GRAD_OUT = SA_ARG_VARLEN_END, STATISTICS, GRAD_LSE, WRT };

/* The gradients, in the order of the result and of the bits of `wrt`. */
enum { D_QUERY, D_KEY, D_VALUE, D_MASK, D_SLOPES, D_SINKS, GRADIENTS };

typedef struct {
    sa_varlen_call call;
    PyArrayObject *grad_out, *grad_lse; /* owned */
    PyObject *gradients[GRADIENTS];     /* owned; that of the masks is a list */
    sa_tensor *dmasks;                  /* owned */
    sa_attention_gradients g;
    sa_varlen_gradients vg;
    sa_varlen_plan plan;
} backward_call;

static void release(backward_call *b) {
    Py_XDECREF(b->grad_out);
    Py_XDECREF(b->grad_lse);
    for (int i = 0; i < GRADIENTS; ++i) {
        Py_XDECREF(b->gradients[i]);
    }
    PyMem_RawFree(b->dmasks);
    sa_varlen_call_release(&b->call);
}

/* What the forward call returned, and the gradients of it. */
static int read_results(backward_call *b, PyObject *const *values) {
    sa_call *c = &b->call.c;
    sa_attention *a = &c->a;
    const npy_intp shape[3] = {a->L, a->lead[1], a->Dv}, rows[3] = {a->lead[1], a->L, 2};
    sa_dtype dtype;
    if (!sa_given(values[SA_ARG_OUT]) || !sa_given(values[GRAD_OUT]) || !sa_given(values[STATISTICS])) {
        PyErr_SetString(PyExc_TypeError, "varlen_attention_backward() needs grad_out, out and statistics");
        return -1;
    }
    if (sa_read_float_array(c->state, values[SA_ARG_OUT], "out", 3, shape, &c->out, &dtype) < 0) {
        return -1;
    }
    if (!sa_call_takes_out(c, dtype)) {
        PyErr_Format(PyExc_TypeError, "out must have the dtype of the forward call's result, %s%s, got %s",
                     sa_dtype_name(c->result), sa_itemsize(c->result) == 2 ? " (or float32, not rounded)" : "",
                     sa_dtype_name(dtype));
        return -1;
    }
    sa_fill_packed(&a->out, c->out, dtype, true);
    if (sa_read_gradient(c, values[GRAD_OUT], "grad_out", "the output", c->result, 3, shape, &b->grad_out, &dtype) < 0) {
        return -1;
    }
    sa_fill_packed(&b->g.grad_out, b->grad_out, dtype, true);
    if (sa_given(values[GRAD_LSE])) {
        if (sa_read_gradient(c, values[GRAD_LSE], "grad_lse", "lse", SA_F32, 2, rows, &b->grad_lse, &dtype) < 0) {
            return -1;
        }
        sa_fill_packed(&b->g.grad_lse, b->grad_lse, dtype, false);
    }
    return sa_read_statistics(c, values[STATISTICS], 3, rows);
}

/* A zeroed gradient of the packed arrays. */
static int make(backward_call *b, int which, npy_intp rows, npy_intp heads, npy_intp cols, sa_tensor *t) {
    const sa_dtype dtype = b->call.c.a.f64 ? SA_F64 : SA_F32;
    const npy_intp shape[3] = {rows, heads, cols};
    PyArrayObject *array = sa_new_array(3, shape, dtype, NULL, true);
    if (array == NULL) {
        return -1;
    }
    b->gradients[which] = (PyObject *)array;
    sa_fill_packed(t, array, dtype, true);
    return 0;
}

/* The gradient of each float mask in its own shape: a list with None for the sequences without one. Without `wanted` only the
 * strides. */
static int make_masks(backward_call *b, bool wanted) {
    sa_varlen_call *call = &b->call;
    const sa_attention *a = &call->c.a;
    const sa_dtype dtype = a->f64 ? SA_F64 : SA_F32;
    const ptrdiff_t n = call->v.sequences;
    b->dmasks = PyMem_RawCalloc((size_t)n + 1, sizeof(sa_tensor));
    if (b->dmasks == NULL || (wanted && (b->gradients[D_MASK] = PyList_New(n)) == NULL)) {
        PyErr_NoMemory();
        return -1;
    }
    for (ptrdiff_t s = 0; s < n; ++s) {
        PyArrayObject *mask = call->mask_arrays[s], *gradient = NULL;
        const bool boolean = mask != NULL && call->masks[s].m.dtype == SA_BOOL;
        sa_tensor *t = &b->dmasks[s];
        if (mask != NULL && !boolean) {
            const int ndim = PyArray_NDIM(mask);
            sa_fill_new(t, PyArray_SHAPE(mask), ndim, dtype, 2, ndim < 2 ? ndim : 2);
            if (ndim > 0 && call->v.begin_k[s + 1] - call->v.begin_k[s] == 1) { /* one column, not a broadcast one */
                t->m.col_stride = a->f64 ? sizeof(double) : sizeof(float);
            }
        }
        if (!wanted) {
            continue;
        }
        if (boolean) {
            PyErr_Format(PyExc_ValueError, "wrt names attn_mask, but attn_mask[%zd] is boolean and has no gradient",
                         (Py_ssize_t)s);
            return -1;
        }
        if (mask != NULL) {
            gradient = sa_new_array(PyArray_NDIM(mask), PyArray_SHAPE(mask), dtype, NULL, true);
            if (gradient == NULL) {
                return -1;
            }
            t->m.data = PyArray_BYTES(gradient);
        }
        PyList_SET_ITEM(b->gradients[D_MASK], s, gradient ? (PyObject *)gradient : Py_NewRef(Py_None));
    }
    b->vg.dmasks = b->dmasks;
    return 0;
}

static int make_gradients(backward_call *b, long wrt) {
    const sa_call *c = &b->call.c;
    const sa_attention *a = &c->a;
    const ptrdiff_t heads = a->lead[1], key_heads = PyArray_DIM(c->key, 1);
    if ((wrt & 1 << D_QUERY && make(b, D_QUERY, a->L, heads, a->E, &b->g.dquery) < 0) ||
        (wrt & 1 << D_KEY && make(b, D_KEY, a->S, key_heads, a->E, &b->g.dkey) < 0) ||
        (wrt & 1 << D_VALUE && make(b, D_VALUE, a->S, key_heads, a->Dv, &b->g.dvalue) < 0)) {
        return -1;
    }
    if (wrt & 1 << D_MASK && b->call.masks == NULL) {
        PyErr_SetString(PyExc_ValueError, "wrt names attn_mask, which was not given");
        return -1;
    }
    if (b->call.masks != NULL && make_masks(b, wrt & 1 << D_MASK) < 0) {
        return -1;
    }
    if ((wrt & 1 << D_SLOPES && c->alibi == NULL) || (wrt & 1 << D_SINKS && c->sinks == NULL)) {
        PyErr_Format(PyExc_ValueError, "wrt names %s, which were not given",
                     wrt & 1 << D_SLOPES && c->alibi == NULL ? "alibi_slopes" : "sinks");
        return -1;
    }
    if ((wrt & 1 << D_SLOPES && make(b, D_SLOPES, a->L, heads, 3, &b->g.dslope_rows) < 0) ||
        (wrt & 1 << D_SINKS && make(b, D_SINKS, a->L, heads, 1, &b->g.dsink_rows) < 0)) {
        return -1;
    }
    return 0;
}

static sa_status compute(void *call, char *scratch, char *delta) {
    backward_call *b = call;
    b->g.delta = delta;
    return sa_varlen_backward(&b->vg, &b->plan, scratch);
}

static int run(backward_call *b, PyObject *module) {
    const sa_attention *a = &b->call.c.a;
    sa_status planned = sa_varlen_plan_backward(&b->vg, b->call.c.threads, b->call.items, &b->plan);
    size_t delta = 0;
    if (!sa_multiply((size_t)a->L, (size_t)a->lead[1], &delta) ||
        !sa_multiply(delta, a->f64 ? sizeof(double) : sizeof(float), &delta)) {
        planned = SA_TOO_LARGE;
    }
    return sa_run_job(module, &(sa_job){.planned = planned,
                                        .threads = b->plan.threads,
                                        .scratch_bytes = b->plan.scratch_bytes,
                                        .shared_bytes = delta,
                                        .watch = &b->call.c.a.watch,
                                        .compute = compute,
                                        .call = b});
}

PyObject *sa_py_varlen_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    backward_call b;
    if (sa_parse(sa_state_of(module), SA_SIG_VARLEN_BACKWARD, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    memset(&b.g, 0, sizeof b.g);
    b.g.a = &b.call.c.a;
    b.call.c.want_stats = true; /* as in the forward call */
    b.call.c.want_unrounded = false;
    b.vg = (sa_varlen_gradients){.v = &b.call.v, .packed = &b.g};
    b.grad_out = b.grad_lse = NULL;
    b.dmasks = NULL;
    memset(b.gradients, 0, sizeof b.gradients);
    const bool read = sa_varlen_call_read(&b.call, module, values) == 0;
    const long wrt = !read ? -1 : values[WRT] != NULL ? PyLong_AsLong(values[WRT]) : 7;
    if (read && !(wrt == -1 && PyErr_Occurred()) && read_results(&b, values) == 0 && make_gradients(&b, wrt) == 0 &&
        sa_call_read_fixed_seed(&b.call.c, values[SA_ARG_RNG]) == 0 && run(&b, module) == 0 &&
        (result = PyTuple_New(GRADIENTS)) != NULL) {
        for (int i = 0; i < GRADIENTS; ++i) {
            PyTuple_SET_ITEM(result, i, Py_NewRef(b.gradients[i] ? b.gradients[i] : Py_None));
        }
    }
    release(&b);
    return result;
}
