/* Owns what only packed sequences read: shapes, offsets, a mask for each. */
#include "python/attention_call.h"
#include "python/scalars.h"

void sa_call_release_packed(sa_call *c) {
    for (ptrdiff_t s = 0; c->mask_arrays && s < c->v.sequences; ++s) {
        Py_XDECREF((PyObject *)c->mask_arrays[s]);
    }
    PyMem_RawFree(c->mask_arrays);
    PyMem_RawFree(c->masks);
    PyMem_RawFree(c->items);
}

static int read_shapes(sa_call *c) {
    const npy_intp *q = PyArray_SHAPE(c->query), *k = PyArray_SHAPE(c->key), *v = PyArray_SHAPE(c->value);
    if (k[0] != v[0] || k[1] != v[1]) {
        return sa_shapes_error("key and value must have the same rows and heads (axes 0 and 1)", "key", c->key, "value",
                               c->value);
    }
    const bool multiple = k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0;
    if (c->enable_gqa ? !multiple : q[1] != k[1]) {
        return sa_shapes_error(c->enable_gqa
                                   ? "with enable_gqa=True the heads of query must be a multiple of those of key (axis 1)"
                                   : "query and key must have the same number of heads (axis 1); for grouped-query "
                                     "attention pass enable_gqa=True",
                               "query", c->query, "key", c->key);
    }
    c->a.L = q[0];
    c->a.S = k[0];
    c->a.gqa = q[1] == 0 ? 1 : q[1] / k[1];
    c->a.n_lead = 2;
    c->a.lead[1] = c->lead[1] = q[1];
    return 0;
}

/* Offsets go from 0 to `rows` and never fall. */
static int check_offsets(PyArrayObject *offsets, PyObject *value, const char *name, npy_intp rows, const char *rows_of) {
    const int64_t *offset = PyArray_DATA(offsets);
    const npy_intp n = PyArray_SIZE(offsets);
    if (PyArray_NDIM(offsets) != 1 || n == 0) {
        return sa_error(PyExc_ValueError, "%s must have shape (n + 1,) for n sequences, got %s", name, sa_shape_of(offsets));
    }
    npy_intp wrong = offset[0] != 0 ? 0 : offset[n - 1] != rows ? n - 1 : -1;
    for (npy_intp s = 1; wrong < 0 && s < n; ++s) {
        wrong = offset[s] < offset[s - 1] ? s : -1;
    }
    if (wrong < 0) {
        return 0;
    }
    PyObject *got = sa_element(value, wrong);
    if (got == NULL) {
        return -1;
    }
    if (offset[0] != 0) {
        sa_error(PyExc_ValueError, "%s must begin with 0, got %S", name, got);
    } else if (offset[n - 1] != rows) {
        sa_error(PyExc_ValueError, "%s must end with the number of rows of %s, %zd, got %S", name, rows_of, (Py_ssize_t)rows,
                 got);
    } else {
        sa_error(PyExc_ValueError, "%s must not fall, but offset %zd is %S after %lld", name, (Py_ssize_t)wrong, got,
                 (long long)offset[wrong - 1]);
    }
    Py_DECREF(got);
    return -1;
}

/* Returns the length. */
static npy_intp read_offsets(sa_call *c, PyObject *value, const char *name, npy_intp rows, const char *rows_of,
                             const int64_t **begin) {
    if (value == Py_None) {
        return sa_error(PyExc_TypeError, "%s must be an array of integers, got None", name);
    }
    PyArrayObject *offsets = sa_as_small(c->state, value, name, true);
    if (offsets == NULL) {
        return -1;
    }
    sa_call_own(c, offsets, name);
    *begin = PyArray_DATA(offsets);
    return check_offsets(offsets, value, name, rows, rows_of) < 0 ? -1 : PyArray_SIZE(offsets);
}

int sa_call_read_packed(sa_call *c) {
    npy_intp n_q, n_k;
    if (read_shapes(c) < 0 ||
        (n_q = read_offsets(c, c->given.cu_seqlens_q, "cu_seqlens_q", c->a.L, "query", &c->v.begin_q)) < 0 ||
        (n_k = read_offsets(c, c->given.cu_seqlens_k, "cu_seqlens_k", c->a.S, "key", &c->v.begin_k)) < 0) {
        return -1;
    }
    if (n_q != n_k) {
        return sa_error(PyExc_ValueError,
                        "cu_seqlens_q and cu_seqlens_k must have the same length: cu_seqlens_q has shape (%zd,), "
                        "cu_seqlens_k has shape (%zd,)",
                        n_q, n_k);
    }
    c->v.sequences = n_q - 1;
    c->a.lead[0] = c->lead[0] = n_q - 1; /* for slopes and sinks (H,) or (n, H) */
    c->items = PyMem_RawMalloc((size_t)n_q * sizeof(sa_varlen_item));
    if (c->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* Reads the mask as in a call of its own. */
static int read_mask_of(sa_call *c, ptrdiff_t s, PyObject *value) {
    char name[40];
    PyOS_snprintf(name, sizeof name, "attn_mask[%zd]", (Py_ssize_t)s);
    c->a.L = (ptrdiff_t)(c->v.begin_q[s + 1] - c->v.begin_q[s]);
    c->a.S = (ptrdiff_t)(c->v.begin_k[s + 1] - c->v.begin_k[s]);
    const int status = sa_call_read_mask(c, value, name);
    if (c->mask != NULL) {
        c->mask_arrays[s] = c->mask;
        c->mask = NULL;
        --c->owned_count;
    }
    c->masks[s] = c->a.mask;
    return status;
}

int sa_call_read_packed_masks(sa_call *c, PyObject *value) {
    sa_attention *a = &c->a;
    const ptrdiff_t n = c->v.sequences, L = a->L, S = a->S;
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return sa_error(PyExc_TypeError,
                        "attn_mask must be a list with a mask or None for each of the %zd sequences, since their shapes "
                        "differ; got %s",
                        (Py_ssize_t)n, sa_type_name(value));
    }
    PyObject *list = PySequence_Tuple(value); /* a copy: reading a mask might change the list */
    if (list == NULL) {
        return -1;
    }
    int status = -1;
    c->mask_arrays = PyMem_RawCalloc((size_t)n + 1, sizeof(PyArrayObject *)); /* never 0 bytes */
    c->masks = PyMem_RawCalloc((size_t)n + 1, sizeof(sa_tensor));
    if (c->mask_arrays == NULL || c->masks == NULL) {
        PyErr_NoMemory();
    } else if (PyTuple_GET_SIZE(list) != n) {
        sa_error(PyExc_ValueError, "attn_mask must have a mask or None for each of the %zd sequences, got %zd", (Py_ssize_t)n,
                 PyTuple_GET_SIZE(list));
    } else {
        status = 0;
    }
    a->lead[0] = c->lead[0] = 1;
    for (ptrdiff_t s = 0; status == 0 && s < n; ++s) {
        if (PyTuple_GET_ITEM(list, s) != Py_None) {
            status = read_mask_of(c, s, PyTuple_GET_ITEM(list, s));
        }
    }
    c->v.masks = c->masks;
    a->mask.m.data = NULL;
    a->lead[0] = c->lead[0] = n;
    a->L = L;
    a->S = S;
    Py_DECREF(list);
    return status;
}
