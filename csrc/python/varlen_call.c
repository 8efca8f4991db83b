/* The arguments of attention over packed sequences: shapes, offsets, and a mask for each sequence; the other options are read
 * where those of every attention call are. No element of an array is read before all has been checked. */
#include "python/varlen_call.h"

void sa_varlen_call_release(sa_varlen_call *call) {
    Py_XDECREF(call->offsets_q);
    Py_XDECREF(call->offsets_k);
    for (ptrdiff_t s = 0; call->mask_arrays && s < call->v.sequences; ++s) {
        Py_XDECREF(call->mask_arrays[s]);
    }
    PyMem_RawFree(call->mask_arrays);
    PyMem_RawFree(call->masks);
    PyMem_RawFree(call->items);
    sa_call_release(&call->c);
}

void sa_fill_packed(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, bool cols) {
    const int rows = cols ? 0 : 1, heads = cols ? 1 : 0;
    t->m = (sa_matrix){.data = PyArray_BYTES(array), .dtype = dtype, .swapped = !PyArray_ISNOTSWAPPED(array)};
    t->m.row_stride = PyArray_DIM(array, rows) == 1 ? 0 : PyArray_STRIDE(array, rows);
    t->m.col_stride = PyArray_ITEMSIZE(array);
    if (cols && PyArray_DIM(array, 2) != 1) { /* a single column lies together, whatever stride NumPy gives it */
        t->m.col_stride = PyArray_STRIDE(array, 2);
    }
    t->lead_stride[0] = 0;
    t->lead_stride[1] = PyArray_DIM(array, heads) == 1 ? 0 : PyArray_STRIDE(array, heads);
}

/* ---- query, key and value ---------------------------------------------------------------------------------------------- */

static int read_packed(sa_call *c, PyObject *const *values) {
    static const char *const names[3] = {"query", "key", "value"};
    static const char *const shapes[3] = {"(total_q, H, E)", "(total_k, H, E)", "(total_k, H, Ev)"};
    PyArrayObject **const arrays[3] = {&c->query, &c->key, &c->value};
    sa_dtype dtypes[3];
    for (int i = 0; i < 3; ++i) {
        if ((*arrays[i] = sa_as_array(c->state, values[i], names[i], SA_NUMBERS, &dtypes[i])) == NULL) {
            return -1;
        }
        if (PyArray_NDIM(*arrays[i]) != 3) {
            PyObject *shape = sa_shape_of(*arrays[i]);
            if (shape != NULL) {
                PyErr_Format(PyExc_ValueError, "%s must have 3 dimensions, %s, got shape %R", names[i], shapes[i], shape);
                Py_DECREF(shape);
            }
            return -1;
        }
    }
    const npy_intp *q = PyArray_SHAPE(c->query), *k = PyArray_SHAPE(c->key), *v = PyArray_SHAPE(c->value);
    if (q[2] != k[2]) {
        return sa_shape_error("query and key must have the same last dimension", "query", c->query, "key", c->key);
    }
    if (k[0] != v[0] || k[1] != v[1]) {
        return sa_shape_error("key and value must have the same rows and heads (axes 0 and 1)", "key", c->key, "value",
                              c->value);
    }
    const bool multiple = k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0;
    if (c->enable_gqa ? !multiple : q[1] != k[1]) {
        return sa_shape_error(c->enable_gqa
                                  ? "with enable_gqa=True the heads of query must be a multiple of those of key (axis 1)"
                                  : "query and key must have the same number of heads (axis 1); for grouped-query "
                                    "attention pass enable_gqa=True",
                              "query", c->query, "key", c->key);
    }
    sa_attention *a = &c->a;
    c->result = sa_promote(sa_promote(dtypes[0], dtypes[1]), dtypes[2]);
    a->f64 = c->result == SA_F64;
    a->L = q[0];
    a->S = k[0];
    a->E = q[2];
    a->Dv = v[2];
    a->gqa = q[1] == 0 ? 1 : q[1] / k[1];
    a->n_lead = 2;
    a->lead[1] = c->lead[1] = q[1];
    sa_fill_packed(&a->query, c->query, dtypes[0], true);
    sa_fill_packed(&a->key, c->key, dtypes[1], true);
    sa_fill_packed(&a->value, c->value, dtypes[2], true);
    return 0;
}

/* ---- offsets ------------------------------------------------------------------------------------------------------------- */

/* A copy as int64, and checked: from 0, never falling, to the number of rows. */
static PyArrayObject *read_offsets(const sa_state *state, PyObject *value, const char *name, npy_intp rows,
                                   const char *rows_of) {
    sa_dtype dtype;
    if (!sa_given(value)) {
        if (value == NULL) {
            PyErr_Format(PyExc_TypeError, "varlen_attention() missing required argument: '%s'", name);
        } else {
            PyErr_Format(PyExc_TypeError, "%s must be an array of integers, got None", name);
        }
        return NULL;
    }
    PyArrayObject *array = sa_as_array(state, value, name, SA_INTEGERS, &dtype);
    if (array == NULL) {
        return NULL;
    }
    PyArrayObject *copy = (PyArrayObject *)PyArray_FromArray(array, PyArray_DescrFromType(NPY_INT64),
                                                             NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_FORCECAST);
    Py_DECREF(array);
    if (copy == NULL) {
        return NULL;
    }
    const int64_t *offset = PyArray_DATA(copy);
    const npy_intp n = PyArray_SIZE(copy);
    if (PyArray_NDIM(copy) != 1 || n == 0) {
        PyObject *shape = sa_shape_of(copy);
        if (shape != NULL) {
            PyErr_Format(PyExc_ValueError, "%s must have shape (n + 1,) for n sequences, got %R", name, shape);
            Py_DECREF(shape);
        }
        Py_CLEAR(copy);
        return NULL;
    }
    npy_intp wrong = offset[0] != 0 ? 0 : offset[n - 1] != rows ? n - 1 : -1;
    for (npy_intp s = 1; wrong < 0 && s < n; ++s) {
        wrong = offset[s] < offset[s - 1] ? s : -1;
    }
    if (wrong < 0) {
        return copy;
    }
    PyObject *got = sa_element(value, wrong);
    if (got != NULL && offset[0] != 0) {
        PyErr_Format(PyExc_ValueError, "%s must begin with 0, got %S", name, got);
    } else if (got != NULL && offset[n - 1] != rows) {
        PyErr_Format(PyExc_ValueError, "%s must end with the number of rows of %s, %zd, got %S", name, rows_of,
                     (Py_ssize_t)rows, got);
    } else if (got != NULL) {
        PyErr_Format(PyExc_ValueError, "%s must not fall, but offset %zd is %S after %lld", name, (Py_ssize_t)wrong, got,
                     (long long)offset[wrong - 1]);
    }
    Py_XDECREF(got);
    Py_DECREF(copy);
    return NULL;
}

static int read_both_offsets(sa_varlen_call *call, PyObject *const *values) {
    sa_call *c = &call->c;
    call->offsets_q = read_offsets(c->state, values[SA_ARG_CU_SEQLENS_Q], "cu_seqlens_q", c->a.L, "query");
    if (call->offsets_q == NULL) {
        return -1;
    }
    call->offsets_k = read_offsets(c->state, values[SA_ARG_CU_SEQLENS_K], "cu_seqlens_k", c->a.S, "key");
    if (call->offsets_k == NULL) {
        return -1;
    }
    const npy_intp n = PyArray_SIZE(call->offsets_q) - 1;
    if (PyArray_SIZE(call->offsets_k) - 1 != n) {
        return sa_shape_error("cu_seqlens_q and cu_seqlens_k must have the same length", "cu_seqlens_q", call->offsets_q,
                              "cu_seqlens_k", call->offsets_k);
    }
    call->v.sequences = n;
    call->v.begin_q = PyArray_DATA(call->offsets_q);
    call->v.begin_k = PyArray_DATA(call->offsets_k);
    return 0;
}

/* ---- masks --------------------------------------------------------------------------------------------------------------- */

/* One mask or None for each sequence, each read as that of a call of its own. */
static int read_masks(sa_varlen_call *call, PyObject *value) {
    sa_call *c = &call->c;
    sa_attention *a = &c->a;
    const ptrdiff_t n = call->v.sequences, L = a->L, S = a->S;
    const size_t count = (size_t)n + 1; /* never 0 bytes */
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        PyErr_Format(
            PyExc_TypeError,
            "attn_mask must be a list with a mask or None for each of the %zd sequences, since their shapes differ; got %s",
            (Py_ssize_t)n, Py_TYPE(value)->tp_name);
        return -1;
    }
    PyObject *list = PySequence_Tuple(value); /* own: reading a mask might change the list */
    if (list == NULL) {
        return -1;
    }
    int status = -1;
    if (PyTuple_GET_SIZE(list) != n) {
        PyErr_Format(PyExc_ValueError, "attn_mask must have a mask or None for each of the %zd sequences, got %zd",
                     (Py_ssize_t)n, PyTuple_GET_SIZE(list));
        goto done;
    }
    call->mask_arrays = PyMem_RawCalloc(count, sizeof(PyArrayObject *));
    call->masks = PyMem_RawCalloc(count, sizeof(sa_tensor));
    if (call->mask_arrays == NULL || call->masks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    a->lead[0] = c->lead[0] = 1;
    for (ptrdiff_t s = 0; s < n; ++s) {
        PyObject *mask = PyTuple_GET_ITEM(list, s);
        char name[40];
        PyOS_snprintf(name, sizeof name, "attn_mask[%zd]", (Py_ssize_t)s);
        a->L = (ptrdiff_t)(call->v.begin_q[s + 1] - call->v.begin_q[s]);
        a->S = (ptrdiff_t)(call->v.begin_k[s + 1] - call->v.begin_k[s]);
        if (mask == Py_None) {
            continue;
        }
        const int read = sa_call_read_mask(c, mask, name);
        call->mask_arrays[s] = c->mask;
        c->mask = NULL;
        if (read < 0) {
            goto done;
        }
        call->masks[s] = a->mask;
    }
    call->v.masks = call->masks;
    status = 0;
done:
    a->mask.m.data = NULL;
    a->L = L;
    a->S = S;
    Py_DECREF(list);
    return status;
}

int sa_varlen_call_read(sa_varlen_call *call, PyObject *module, PyObject *const *values) {
    sa_call *c = &call->c;
    PyObject *options[SA_MAX_PARAMETERS];
    call->v = (sa_varlen){.packed = &c->a};
    call->offsets_q = call->offsets_k = NULL;
    call->mask_arrays = NULL;
    call->masks = NULL;
    call->items = NULL;
    sa_call_start(c, module);
    static const struct {
        int which;
        const char *name;
    } dense[3] = {{SA_ARG_KEY_LENGTHS, "key_lengths"},
                  {SA_ARG_BLOCK_MASK, "block_mask"},
                  {SA_ARG_RETURN_WEIGHTS, "return_weights"}}; /* of a dense call alone */
    for (int n = 0; n < 3; ++n) {
        if (values[dense[n].which] != NULL) {
            PyErr_Format(PyExc_TypeError, "varlen_attention() got an unexpected keyword argument '%s'", dense[n].name);
            return -1;
        }
    }
    const int gqa = values[SA_ARG_ENABLE_GQA] ? PyObject_IsTrue(values[SA_ARG_ENABLE_GQA]) : 0;
    c->enable_gqa = gqa > 0;
    if (gqa < 0 || read_packed(c, values) < 0 || read_both_offsets(call, values) < 0) {
        return -1;
    }
    if (sa_given(values[SA_ARG_ATTN_MASK]) && read_masks(call, values[SA_ARG_ATTN_MASK]) < 0) {
        return -1;
    }
    c->a.lead[0] = c->lead[0] = call->v.sequences; /* slopes and sinks: (H,) or (n, H) */
    memcpy(options, values, sizeof options);
    options[SA_ARG_ATTN_MASK] = NULL;
    if (sa_call_read_options(c, options) < 0) {
        return -1;
    }
    call->v.lower_right = c->lower_right;
    call->items = PyMem_RawMalloc(((size_t)call->v.sequences + 1) * sizeof(sa_varlen_item));
    if (call->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}
