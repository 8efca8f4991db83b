/* scaled_dot_product_attention_backward as Python calls it: the low-level half of the vjp. Takes the forward call's arguments,
 * what it returned, and the gradient of that; returns the gradients in the precision that computes, over all leading dims, as
 * a tuple: in arrays of the caller's (`gradients`) where they are just such arrays, else in new ones. selfattn/functional/attention.py
 * brings them to the inputs' shapes and dtypes. */
#include "python/attention_call.h"
#include "python/run.h"

enum { GRAD_OUT = SA_ARG_NUM_THREADS + 1, STATISTICS, GRAD_LSE, WRT, TARGETS };

/* The gradients, in the order of the result and of the bits of `wrt`. */
enum { D_QUERY, D_KEY, D_VALUE, D_MASK, D_SLOPES, D_SINKS, GRADIENTS };

typedef struct {
    sa_call c;
    PyArrayObject *grad_out, *grad_lse;  /* owned */
    PyArrayObject *gradients[GRADIENTS]; /* owned */
    PyObject *targets;                   /* borrowed: a tuple of arrays and None, or NULL */
    sa_attention_gradients g;
    sa_backward_plan plan;
} backward_call;

static void release(backward_call *b) {
    Py_XDECREF(b->grad_out);
    Py_XDECREF(b->grad_lse);
    for (int i = 0; i < GRADIENTS; ++i) {
        Py_XDECREF(b->gradients[i]);
    }
    sa_call_release(&b->c);
}

/* What the forward call returned, and the gradients of it. */
static int read_results(backward_call *b, PyObject *const *values) {
    sa_call *c = &b->c;
    sa_attention *a = &c->a;
    const int n = a->n_lead;
    npy_intp shape[NPY_MAXDIMS + 2];
    sa_dtype dtype;
    if (!sa_given(values[SA_ARG_OUT]) || !sa_given(values[GRAD_OUT]) || !sa_given(values[STATISTICS])) {
        PyErr_SetString(PyExc_TypeError, "scaled_dot_product_attention_backward() needs grad_out, out and statistics");
        return -1;
    }
    memcpy(shape, c->lead, (size_t)n * sizeof shape[0]);
    shape[n] = a->L;
    shape[n + 1] = a->Dv;
    if (sa_read_float_array(c->state, values[SA_ARG_OUT], "out", n + 2, shape, &c->out, &dtype) < 0) {
        return -1;
    }
    sa_fill_tensor(&a->out, c->out, dtype, n, 2);
    if (!sa_call_takes_out(c, dtype)) {
        PyErr_Format(PyExc_TypeError, "out must have the dtype of the forward call's result, %s%s, got %s",
                     sa_dtype_name(c->result), sa_itemsize(c->result) == 2 ? " (or float32, not rounded)" : "",
                     sa_dtype_name(dtype));
        return -1;
    }
    if (sa_read_gradient(c, values[GRAD_OUT], "grad_out", "the output", c->result, n + 2, shape, &b->grad_out, &dtype) < 0) {
        return -1;
    }
    sa_fill_tensor(&b->g.grad_out, b->grad_out, dtype, n, 2);
    if (a->Dv == 1) {
        a->out.m.col_stride = PyArray_ITEMSIZE(c->out);
        b->g.grad_out.m.col_stride = PyArray_ITEMSIZE(b->grad_out);
    }
    if (sa_given(values[GRAD_LSE])) {
        if (sa_read_gradient(c, values[GRAD_LSE], "grad_lse", "lse", SA_F32, n + 1, shape, &b->grad_lse, &dtype) < 0) {
            return -1;
        }
        sa_fill_tensor(&b->g.grad_lse, b->grad_lse, dtype, n, 1);
        b->g.grad_lse.m.row_stride = b->g.grad_lse.m.col_stride; /* (…, L) seen as (…, L, 1) */
    }
    shape[n + 1] = 2;
    return sa_read_statistics(c, values[STATISTICS], n + 2, shape);
}

/* Whether it is an array of that shape, perhaps without leading 1s of it, that can be written as a new one would be. */
static bool can_be(PyObject *object, int ndim, const npy_intp *shape, sa_dtype dtype) {
    if (!PyArray_CheckExact(object)) {
        return false;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    const int missing = ndim - PyArray_NDIM(array);
    bool fits = missing >= 0 && PyArray_ISCARRAY(array) && PyArray_TYPE(array) == (dtype == SA_F64 ? NPY_DOUBLE : NPY_FLOAT);
    for (int i = 0; i < ndim && fits; ++i) {
        fits = shape[i] == (i < missing ? 1 : PyArray_DIM(array, i - missing));
    }
    return fits;
}

/* The caller's array, which is zeroed when nothing can go wrong any more, or a new one of zeros. */
static int place(backward_call *b, int which, const npy_intp *shape) {
    const sa_dtype dtype = b->c.a.f64 ? SA_F64 : SA_F32;
    const int ndim = b->c.a.n_lead + 2;
    const bool in_shares = which == D_SLOPES || which == D_SINKS; /* which are summed afterwards */
    PyObject *target = b->targets && !in_shares ? PyTuple_GET_ITEM(b->targets, which) : Py_None;
    if (can_be(target, ndim, shape, dtype)) {
        b->gradients[which] = (PyArrayObject *)Py_NewRef(target);
    } else {
        b->gradients[which] = sa_new_array(ndim, shape, dtype, NULL, true);
    }
    return b->gradients[which] ? 0 : -1;
}

/* One over the leading dims `lead`, then rows × cols. */
static int make(backward_call *b, int which, const npy_intp *lead, npy_intp rows, npy_intp cols, sa_tensor *t) {
    const int n = b->c.a.n_lead;
    npy_intp shape[NPY_MAXDIMS + 2];
    memcpy(shape, lead, (size_t)n * sizeof shape[0]);
    shape[n] = rows;
    shape[n + 1] = cols;
    if (place(b, which, shape) < 0) {
        return -1;
    }
    sa_fill_tensor(t, b->gradients[which], b->c.a.f64 ? SA_F64 : SA_F32, n, 2);
    t->m.row_stride = cols * PyArray_ITEMSIZE(b->gradients[which]);
    t->m.col_stride = PyArray_ITEMSIZE(b->gradients[which]);
    return 0;
}

/* The leading dims of dK and dV: those of the query, but key heads instead of heads, and 1 along a group's broadcast axes,
 * whose gradients add up in the kernel (attention.c, sa_group_size). */
static void key_lead(const sa_attention *a, npy_intp *lead) {
    int axis = a->n_lead - 1;
    for (int i = 0; i < a->n_lead; ++i) {
        lead[i] = a->lead[i];
    }
    if (axis >= 0 && a->gqa > 1) {
        lead[axis] /= a->gqa;
        if (lead[axis] > 1) {
            return;
        }
        --axis;
    }
    for (; axis >= 0 && a->key.lead_stride[axis] == 0 && a->value.lead_stride[axis] == 0; --axis) {
        lead[axis] = lead[axis] == 0 ? 0 : 1; /* no head at all stays none */
    }
}

/* Of a float mask: its own shape, seen in (B…, L, S), 1 where it is broadcast. Without `wanted` only the strides. */
static int make_mask(backward_call *b, bool wanted) {
    const sa_attention *a = &b->c.a;
    const sa_dtype dtype = a->f64 ? SA_F64 : SA_F32;
    const int n = a->n_lead, ndim = PyArray_NDIM(b->c.mask);
    npy_intp shape[NPY_MAXDIMS + 2];
    for (int i = 0; i < n + 2; ++i) {
        const int own = i - (n + 2) + ndim;
        shape[i] = own >= 0 ? PyArray_DIM(b->c.mask, own) : 1;
    }
    sa_fill_new(&b->g.dmask, shape, n + 2, dtype, n, 2);
    if (a->S == 1) { /* one column, not a broadcast one */
        b->g.dmask.m.col_stride = a->f64 ? sizeof(double) : sizeof(float);
    }
    if (wanted && place(b, D_MASK, shape) < 0) {
        return -1;
    }
    b->g.dmask.m.data = wanted ? PyArray_BYTES(b->gradients[D_MASK]) : NULL;
    return 0;
}

static int make_gradients(backward_call *b, long wrt) {
    const sa_attention *a = &b->c.a;
    npy_intp keys[NPY_MAXDIMS];
    key_lead(a, keys);
    if ((wrt & 1 << D_QUERY && make(b, D_QUERY, b->c.lead, a->L, a->E, &b->g.dquery) < 0) ||
        (wrt & 1 << D_KEY && make(b, D_KEY, keys, a->S, a->E, &b->g.dkey) < 0) ||
        (wrt & 1 << D_VALUE && make(b, D_VALUE, keys, a->S, a->Dv, &b->g.dvalue) < 0)) {
        return -1;
    }
    const bool float_mask = b->c.mask != NULL && a->mask.m.dtype != SA_BOOL;
    if (wrt & 1 << D_MASK && !float_mask) {
        PyErr_SetString(PyExc_ValueError, "wrt names attn_mask, which has a gradient only when it is a float mask");
        return -1;
    }
    if (float_mask && make_mask(b, wrt & 1 << D_MASK) < 0) {
        return -1;
    }
    if (wrt & 1 << D_SLOPES) {
        if (b->c.alibi == NULL) {
            PyErr_SetString(PyExc_ValueError, "wrt names alibi_slopes, which were not given");
            return -1;
        }
        if (make(b, D_SLOPES, b->c.lead, a->L, 3, &b->g.dslope_rows) < 0) {
            return -1;
        }
    }
    if (wrt & 1 << D_SINKS) {
        if (b->c.sinks == NULL) {
            PyErr_SetString(PyExc_ValueError, "wrt names sinks, which were not given");
            return -1;
        }
        if (make(b, D_SINKS, b->c.lead, a->L, 1, &b->g.dsink_rows) < 0) {
            return -1;
        }
    }
    return 0;
}

static void clear_targets(const backward_call *b) {
    for (int i = 0; i < GRADIENTS && b->targets; ++i) {
        if (b->gradients[i] && (PyObject *)b->gradients[i] == PyTuple_GET_ITEM(b->targets, i)) {
            memset(PyArray_DATA(b->gradients[i]), 0, (size_t)PyArray_NBYTES(b->gradients[i]));
        }
    }
}

static sa_status compute(void *call, char *scratch, char *delta) {
    backward_call *b = call;
    clear_targets(b);
    b->g.delta = delta;
    return sa_attention_backward(&b->g, &b->plan, scratch);
}

static int run(backward_call *b, PyObject *module) {
    sa_backward_plan *plan = &b->plan;
    const sa_status planned = sa_attention_plan_backward(&b->g, b->c.threads, plan);
    return sa_run_job(module,
                      &(sa_job){.planned = planned,
                                .threads = plan->threads,
                                .scratch_bytes = plan->scratch_bytes,
                                .shared_bytes = (size_t)plan->delta_count * (b->c.a.f64 ? sizeof(double) : sizeof(float)),
                                .watch = &b->c.a.watch,
                                .compute = compute,
                                .call = b});
}

PyObject *sa_py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    backward_call b;
    if (sa_parse(sa_state_of(module), SA_SIG_ATTENTION_BACKWARD, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    memset(&b.g, 0, sizeof b.g);
    b.g.a = &b.c.a;
    b.c.want_stats = true; /* as in the forward call */
    b.c.want_unrounded = false;
    b.grad_out = b.grad_lse = NULL;
    memset(b.gradients, 0, sizeof b.gradients);
    b.targets = values[TARGETS] && PyTuple_Check(values[TARGETS]) && PyTuple_GET_SIZE(values[TARGETS]) == GRADIENTS
                    ? values[TARGETS]
                    : NULL;
    const bool read = sa_call_read(&b.c, module, values) == 0;
    const long wrt = !read ? -1 : values[WRT] != NULL ? PyLong_AsLong(values[WRT]) : 7;
    if (read && !(wrt == -1 && PyErr_Occurred()) && read_results(&b, values) == 0 && make_gradients(&b, wrt) == 0 &&
        sa_call_read_fixed_seed(&b.c, values[SA_ARG_RNG]) == 0 && run(&b, module) == 0 &&
        (result = PyTuple_New(GRADIENTS)) != NULL) {
        for (int i = 0; i < GRADIENTS; ++i) {
            PyTuple_SET_ITEM(result, i, b.gradients[i] ? Py_NewRef(b.gradients[i]) : Py_NewRef(Py_None));
        }
    }
    release(&b);
    return result;
}
