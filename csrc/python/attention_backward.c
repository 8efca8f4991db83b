/* Attention's backward calls. Gradients have all leading dims and the dtype that computes;
 * Python brings them to the inputs' shapes and dtypes. */
#include "python/attention_call.h"
#include "python/run.h"

/* The order of the results, and of the bits of `wrt`. */
enum { D_QUERY, D_KEY, D_VALUE, D_MASK, D_SLOPES, D_SINKS, D_BIAS, D_OFFSET_BIAS, GRADIENTS };

typedef struct {
    sa_call c;
    PyObject *gradients[GRADIENTS]; /* owned; for packed masks a list */
    sa_attention_gradients g;
    sa_backward_plan plan;

    /* For packed sequences: */
    sa_varlen_gradients vg;
    sa_varlen_plan packed_plan;
    sa_tensor *dmasks; /* owned */
} backward_call;

static void release(backward_call *b) {
    for (int i = 0; i < GRADIENTS; ++i) {
        Py_XDECREF(b->gradients[i]);
    }
    PyMem_RawFree(b->dmasks);
    sa_call_release(&b->c);
}

/* ---- the results of the forward call, and their gradients -------------------------------------------------------- */

/* Returns a borrowed reference; the call owns the array. */
static PyArrayObject *read_floats(sa_call *c, PyObject *value, const char *name, int ndim, const npy_intp *shape,
                                  sa_dtype *dtype) {
    PyArrayObject *array = sa_as_array(value, name, SA_FLOATS, dtype);
    if (array == NULL) {
        return NULL;
    }
    sa_call_own(c, array, name);
    if (sa_is_integer(*dtype)) {
        sa_error(PyExc_TypeError, "%s must have a floating dtype, as the forward call's result has, got %s", name,
                 sa_dtype_name(*dtype));
        return NULL;
    }
    return sa_check_shape(name, array, ndim, shape) < 0 ? NULL : array;
}

/* Reads the gradient of out or of lse, or its tangent. It may not have more bits than the result. */
static int take_gradient(sa_call *c, PyObject *value, const char *name, sa_tensor *t) {
    npy_intp shape[NPY_MAXDIMS + 2];
    sa_dtype dtype;
    const bool of_lse = strncmp(name, "grad_lse", 8) == 0;
    const int ndim = of_lse ? sa_call_row_shape(c, 0, shape) : sa_call_shape(c, c->lead, c->a.L, c->a.Dv, shape);
    PyArrayObject *array = read_floats(c, value, name, ndim, shape, &dtype);
    if (array == NULL) {
        return -1;
    }
    if (dtype == SA_F64 && !c->a.f64) {
        return sa_error(PyExc_TypeError, "%s has dtype float64, but %s has dtype %s: it would be narrowed", name,
                        of_lse ? "lse" : "the output", sa_dtype_name(of_lse ? SA_F32 : c->result));
    }
    (of_lse ? sa_call_fill_rows : sa_call_fill)(c, t, array, dtype);
    return 0;
}

static int read_statistics(sa_call *c) {
    npy_intp shape[NPY_MAXDIMS + 2];
    const int ndim = sa_call_row_shape(c, c->a.with_tangents ? 4 : 2, shape);
    sa_dtype dtype;
    PyArrayObject *statistics = read_floats(c, c->given.statistics, "statistics", ndim, shape, &dtype);
    if (statistics == NULL) {
        return -1;
    }
    if (dtype != c->computes || !PyArray_ISCARRAY_RO(statistics)) {
        return sa_error(PyExc_TypeError,
                        "statistics must be what the forward call returned, a C-contiguous %s array, got %s%s",
                        sa_dtype_name(c->computes), dtype != c->computes ? "" : "other strides or byte order of ",
                        sa_dtype_name(dtype));
    }
    sa_fill_tensor(&c->a.stats, statistics, dtype, c->a.n_lead, 2);
    return 0;
}

static int read_results(backward_call *b, const char *function) {
    sa_call *c = &b->c;
    npy_intp shape[NPY_MAXDIMS + 3];
    sa_dtype dtype;
    if (c->given.out == NULL || c->given.grad_out == NULL || c->given.statistics == NULL) {
        return sa_error(PyExc_TypeError, "%s() needs grad_out, out and statistics", function);
    }
    const int tangents = c->a.with_tangents; /* axes before those of out */
    shape[0] = 2;
    int ndim = sa_call_shape(c, c->lead, c->a.L, c->a.Dv, shape + tangents);
    PyArrayObject *array = read_floats(c, c->given.out, "out", ndim + tangents, shape, &dtype);
    if (array == NULL) {
        return -1;
    }
    c->a.out_tangent = tangents ? PyArray_STRIDE(array, 0) : 0;
    if (dtype != c->result && !(dtype == SA_F32 && sa_itemsize(c->result) == 2)) {
        return sa_error(PyExc_TypeError, "out must have the dtype of the forward call's result, %s%s, got %s",
                        sa_dtype_name(c->result), sa_itemsize(c->result) == 2 ? " (or float32, not rounded)" : "",
                        sa_dtype_name(dtype));
    }
    sa_call_fill(c, &c->a.out, array, dtype);
    if (take_gradient(c, c->given.grad_out, "grad_out", &b->g.grad_out) < 0 ||
        (c->given.grad_lse && take_gradient(c, c->given.grad_lse, "grad_lse", &b->g.grad_lse) < 0) ||
        (c->given.grad_out_tangent &&
         take_gradient(c, c->given.grad_out_tangent, "grad_out_tangent", &b->g.grad_out_tangent) < 0) ||
        (c->given.grad_lse_tangent &&
         take_gradient(c, c->given.grad_lse_tangent, "grad_lse_tangent", &b->g.grad_lse_tangent) < 0)) {
        return -1;
    }
    return read_statistics(c);
}

/* ---- the gradients ----------------------------------------------------------------------------------------------- */

/* Returns a borrowed reference; the call owns the array of zeros. */
static PyArrayObject *make_zeros(backward_call *b, int which, int ndim, const npy_intp *shape) {
    PyArrayObject *array = sa_new_array(ndim, shape, b->c.computes, NULL, true);
    b->gradients[which] = (PyObject *)array;
    return array;
}

/* With tangents the array has a first axis of 2: the gradient and its tangent. Returns a borrowed reference. */
static PyArrayObject *make_whole(backward_call *b, int which, int ndim, npy_intp *shape) {
    if (!b->c.a.with_tangents) {
        return make_zeros(b, which, ndim, shape);
    }
    memmove(shape + 1, shape, (size_t)ndim * sizeof *shape);
    shape[0] = 2;
    return make_zeros(b, which, ndim + 1, shape);
}

/* The tangent, if it is wanted, follows the gradient; dtangent becomes the bytes between them. */
static int make(backward_call *b, long wrt, int which, const npy_intp *lead, npy_intp rows, npy_intp cols, sa_tensor *t,
                ptrdiff_t *tangent) {
    npy_intp shape[NPY_MAXDIMS + 3];
    if (!(wrt & 1 << which)) {
        return 0;
    }
    const int ndim = sa_call_shape(&b->c, lead, rows, cols, shape);
    PyArrayObject *array = tangent ? make_whole(b, which, ndim, shape) : make_zeros(b, which, ndim, shape);
    if (array == NULL) {
        return -1;
    }
    if (b->c.packed) {
        sa_call_fill(&b->c, t, array, b->c.computes);
    } else {
        sa_fill_tensor(t, array, b->c.computes, b->c.a.n_lead, 2);
    }
    if (tangent) {
        *tangent = PyArray_NBYTES(array) / 2;
    }
    t->m.col_stride = PyArray_ITEMSIZE(array);
    t->m.row_stride = cols * PyArray_ITEMSIZE(array) * (b->c.packed ? lead[1] : 1);
    return 0;
}

/* dK and dV have key heads, and 1 along axes that are broadcast within a group,
 * over which the kernel sums (sa_group_size). */
static void key_lead(const sa_call *c, npy_intp *lead) {
    const sa_attention *a = &c->a;
    int axis = a->n_lead - 1;
    memcpy(lead, c->lead, (size_t)a->n_lead * sizeof *lead);
    if (c->packed) {
        lead[axis] = PyArray_DIM(c->key, 1);
        return;
    }
    if (axis >= 0 && a->gqa > 1) {
        lead[axis] /= a->gqa;
        if (lead[axis] > 1) {
            return;
        }
        --axis;
    }
    for (; axis >= 0 && sa_shares_keys(a, axis); --axis) {
        lead[axis] = lead[axis] == 0 ? 0 : 1;
    }
}

/* The kernels need the strides even if the gradient is not wanted. */
static void fill_mask_gradient(const sa_call *c, sa_tensor *t, const npy_intp *shape, int ndim, ptrdiff_t keys) {
    const int lead = c->a.n_lead + 2 - ndim;
    ptrdiff_t stride = (ptrdiff_t)sa_itemsize(c->computes);
    *t = (sa_tensor){.m.dtype = c->computes};
    for (int axis = ndim - 1, last = axis; axis >= 0; stride *= shape[axis--]) {
        ptrdiff_t *own = axis == last       ? &t->m.col_stride
                         : axis == last - 1 ? &t->m.row_stride
                                            : &t->lead_stride[lead + axis];
        *own = shape[axis] != 1 || (axis == last && keys == 1) ? stride : 0;
    }
}

/* The gradient of a float mask, or of the bias, has its shape, with leading axes of 1. */
static int make_mask(backward_call *b, long wrt) {
    const sa_call *c = &b->c;
    const int which = c->has_bias ? D_BIAS : D_MASK;
    const bool wanted = wrt & 1 << which;
    if (wrt & 1 << D_MASK && (which != D_MASK || c->mask == NULL || c->a.mask.m.dtype == SA_BOOL)) {
        return sa_error(PyExc_ValueError, "wrt names attn_mask, which has a gradient only when it is a float mask");
    }
    if (wrt & 1 << D_BIAS && which != D_BIAS) {
        return sa_error(PyExc_ValueError, "wrt names bias, which was not given");
    }
    if (c->mask == NULL || c->a.mask.m.dtype == SA_BOOL) {
        return 0;
    }
    const int ndim = c->a.n_lead + 2;
    npy_intp shape[NPY_MAXDIMS + 3] = {0};
    for (int i = 0; i < ndim; ++i) {
        const int own = i - ndim + PyArray_NDIM(c->mask);
        shape[i] = own >= 0 ? PyArray_DIM(c->mask, own) : 1;
    }
    fill_mask_gradient(c, &b->g.dmask, shape, ndim, c->a.S);
    PyArrayObject *array = wanted ? make_whole(b, which, ndim, shape) : NULL;
    if (array == NULL) {
        return wanted ? -1 : 0;
    }
    b->g.dmask.m.data = PyArray_BYTES(array);
    b->g.dmask_tangent = PyArray_NBYTES(array) / 2;
    return 0;
}

/* The gradient of offset_bias has all leading dims. */
static int make_offset_bias(backward_call *b, bool wanted) {
    const sa_call *c = &b->c;
    const int n = c->a.n_lead;
    npy_intp shape[NPY_MAXDIMS + 3];
    if (!wanted) {
        return 0;
    }
    if (c->given.offset_bias == NULL) {
        return sa_error(PyExc_ValueError, "wrt names offset_bias, which was not given");
    }
    memcpy(shape, c->lead, (size_t)n * sizeof *shape);
    shape[n] = c->a.L == 0 || c->a.S == 0 ? 0 : c->a.L + c->a.S - 1;
    PyArrayObject *array = make_whole(b, D_OFFSET_BIAS, n + 1, shape);
    if (array == NULL) {
        return -1;
    }
    b->g.doffset_bias.m = (sa_matrix){.data = PyArray_BYTES(array), .dtype = c->computes};
    return 0;
}

/* Appends the gradient of sequence s's mask, or None, to the list. */
static int make_mask_of(backward_call *b, ptrdiff_t s, bool wanted) {
    const sa_call *c = &b->c;
    PyArrayObject *mask = c->mask_arrays[s];
    PyObject *gradient = Py_None;
    const bool boolean = mask != NULL && c->masks[s].m.dtype == SA_BOOL;
    if (boolean && wanted) {
        return sa_error(PyExc_ValueError, "wrt names attn_mask, but attn_mask[%zd] is boolean and has no gradient",
                        (Py_ssize_t)s);
    }
    if (mask != NULL && !boolean) {
        fill_mask_gradient(c, &b->dmasks[s], PyArray_SHAPE(mask), PyArray_NDIM(mask),
                           (ptrdiff_t)(c->v.begin_k[s + 1] - c->v.begin_k[s]));
    }
    if (mask != NULL && wanted) {
        gradient = (PyObject *)sa_new_array(PyArray_NDIM(mask), PyArray_SHAPE(mask), c->computes, NULL, true);
        if (gradient == NULL || PyList_Append(b->gradients[D_MASK], gradient) < 0) {
            Py_XDECREF(gradient);
            return -1;
        }
        b->dmasks[s].m.data = sa_data(gradient);
        Py_DECREF(gradient);
        return 0;
    }
    return wanted ? PyList_Append(b->gradients[D_MASK], Py_None) : 0;
}

static int make_packed_masks(backward_call *b, long wrt) {
    const bool wanted = wrt & 1 << D_MASK;
    const ptrdiff_t n = b->c.v.sequences;
    if (b->c.masks == NULL) {
        return wanted ? sa_error(PyExc_ValueError, "wrt names attn_mask, which was not given") : 0;
    }
    b->dmasks = PyMem_RawCalloc((size_t)n + 1, sizeof(sa_tensor));
    if (b->dmasks == NULL || (wanted && (b->gradients[D_MASK] = PyList_New(0)) == NULL)) {
        PyErr_NoMemory();
        return -1;
    }
    for (ptrdiff_t s = 0; s < n; ++s) {
        if (make_mask_of(b, s, wanted) < 0) {
            return -1;
        }
    }
    b->vg.dmasks = b->dmasks;
    return 0;
}

static int make_gradients(backward_call *b, long wrt) {
    const sa_call *c = &b->c;
    const sa_attention *a = &c->a;
    npy_intp keys[NPY_MAXDIMS];
    key_lead(c, keys);
    if (make(b, wrt, D_QUERY, c->lead, a->L, a->E, &b->g.dquery, &b->g.dquery_tangent) < 0 ||
        make(b, wrt, D_KEY, keys, a->S, a->E, &b->g.dkey, &b->g.dkey_tangent) < 0 ||
        make(b, wrt, D_VALUE, keys, a->S, a->Dv, &b->g.dvalue, &b->g.dvalue_tangent) < 0 ||
        (c->packed ? make_packed_masks : make_mask)(b, wrt) < 0 || make_offset_bias(b, wrt & 1 << D_OFFSET_BIAS) < 0) {
        return -1;
    }
    if (wrt & 1 << D_SLOPES && c->a.alibi.m.data == NULL) {
        return sa_error(PyExc_ValueError, "wrt names alibi_slopes, which were not given");
    }
    if (wrt & 1 << D_SINKS && c->a.sinks.m.data == NULL) {
        return sa_error(PyExc_ValueError, "wrt names sinks, which were not given");
    }
    const int status = make(b, wrt, D_SLOPES, c->lead, a->L, a->with_tangents ? 2 : 3, &b->g.dslope_rows, NULL);
    return status < 0 ? -1 : make(b, wrt, D_SINKS, c->lead, a->L, a->with_tangents ? 2 : 1, &b->g.dsink_rows, NULL);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static sa_status compute(void *call, char *scratch, char *delta) {
    backward_call *b = call;
    b->g.delta = delta;
    b->g.diagonals = delta + (size_t)b->plan.delta_count * sa_itemsize(b->c.computes);
    return b->c.packed ? sa_varlen_backward(&b->vg, &b->packed_plan, scratch)
                       : sa_attention_backward(&b->g, &b->plan, scratch);
}

static int run(backward_call *b, PyObject *module) {
    sa_call *c = &b->c;
    sa_job job = {.watch = &c->a.watch, .compute = compute, .call = b};
    size_t delta_count;
    if (c->packed) {
        c->v.lower_right = c->lower_right;
        job.planned = sa_varlen_plan_backward(&b->vg, c->threads, c->items, &b->packed_plan);
        job.threads = b->packed_plan.threads;
        job.scratch_bytes = b->packed_plan.scratch_bytes;
        delta_count = (size_t)(c->a.L * c->a.lead[1]);
    } else {
        job.planned = sa_attention_plan_backward(&b->g, c->threads, &b->plan);
        job.threads = b->plan.threads;
        job.scratch_bytes = b->plan.scratch_bytes;
        delta_count = job.planned == SA_OK ? (size_t)(b->plan.delta_count + b->plan.diagonal_count) : 0;
    }
    if (!sa_multiply(delta_count, sa_itemsize(c->computes), &job.shared_bytes)) {
        job.planned = SA_TOO_LARGE;
    }
    return sa_run_job(module, &job);
}

static PyObject *backward(PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *result = NULL;
    backward_call b;
    memset(&b.g, 0, sizeof b.g);
    memset(b.gradients, 0, sizeof b.gradients);
    b.g.a = &b.c.a;
    b.plan = (sa_backward_plan){0};
    b.vg = (sa_varlen_gradients){.v = &b.c.v, .packed = &b.g};
    b.dmasks = NULL;
    if (sa_call_read(&b.c, module, function, args, nargs, kwnames) < 0) {
        goto done;
    }
    const long wrt = b.c.given.wrt != NULL ? PyLong_AsLong(b.c.given.wrt) : 7;
    if ((wrt == -1 && PyErr_Occurred()) || read_results(&b, sa_attention_family.functions[function].name) < 0 ||
        make_gradients(&b, wrt) < 0 || sa_call_read_seed(&b.c) < 0) {
        goto done;
    }
    result = PyTuple_New(GRADIENTS); /* made before anything is written */
    for (int i = 0; result != NULL && i < GRADIENTS; ++i) {
        PyTuple_SET_ITEM(result, i, Py_NewRef(b.gradients[i] ? b.gradients[i] : Py_None));
    }
    if (result != NULL && run(&b, module) < 0) {
        Py_CLEAR(result);
    }
done:
    release(&b);
    return result;
}

SA_FUNCTION(backward_half, backward, SA_FN_BACKWARD)
SA_FUNCTION(hvp, backward, SA_FN_HVP)
SA_FUNCTION(packed_backward_half, backward, SA_FN_PACKED_BACKWARD)

PyMethodDef sa_attention_backward_methods[] = {
    SA_METHOD("_attention_backward", backward_half, NULL),
    SA_METHOD("_attention_hvp", hvp, NULL),
    SA_METHOD("_varlen_backward", packed_backward_half, NULL),
    {NULL, NULL, 0, NULL},
};
