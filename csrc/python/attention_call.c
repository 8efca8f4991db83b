/* Owns an attention call: inputs, shapes, options and the table of options.
 * Nothing is written before all is checked. */
#include "python/attention_call.h"

#include <math.h>

_Static_assert(sizeof(sa_attention_arguments) <= SA_MAX_PARAMETERS * sizeof(PyObject *), "too many parameters");

void sa_call_own(sa_call *c, PyArrayObject *array, const char *name) {
    c->owned[c->owned_count] = array;
    c->owned_names[c->owned_count++] = name;
}

static void release_packed(sa_call *c) {
    for (ptrdiff_t s = 0; c->mask_arrays && s < c->v.sequences; ++s) {
        Py_XDECREF((PyObject *)c->mask_arrays[s]);
    }
    PyMem_RawFree(c->mask_arrays);
    PyMem_RawFree(c->masks);
    PyMem_RawFree(c->items);
}

void sa_call_release(sa_call *c) {
    for (int i = 0; i < c->owned_count; ++i) {
        Py_DECREF(c->owned[i]);
    }
    for (int i = 0; i < SA_RESULTS; ++i) {
        Py_XDECREF((PyObject *)c->results[i]);
    }
    if (c->packed) {
        release_packed(c);
    }
}

/* Strides of axes from n_lead on stay uninitialised, as they are never read. */
static void start(sa_call *c, int function) {
    c->owned_count = 0;
    c->mask = NULL;
    memset(c->results, 0, sizeof c->results);
    c->packed = function >= SA_FN_PACKED;
    c->looks_at_mask = function == SA_FN_ATTENTION;
    c->want_stats = function != SA_FN_ATTENTION && function != SA_FN_CACHED && function != SA_FN_PACKED;
    c->want_lse = c->want_weights = c->want_unrounded = c->enable_gqa = c->lower_right = c->has_bias = false;
    c->threads = sa_get_num_threads();
    sa_attention *a = &c->a;
    a->mask.m.data = a->key_bias.m.data = a->alibi.m.data = a->sinks.m.data = a->key_lengths.m.data =
        a->query_lengths.m.data = NULL;
    a->with_tangents = function == SA_FN_JVP || function == SA_FN_HVP;
    if (a->with_tangents) {
        a->query_tangent.m.data = a->key_tangent.m.data = a->value_tangent.m.data = a->mask_tangent.m.data =
            a->offset_bias_tangent.m.data = a->alibi_tangent.m.data = a->sink_tangent.m.data = NULL;
        c->want_lse = function == SA_FN_JVP;
    }
    a->gate.m.data = a->offset_bias.m.data = a->lse.m.data = a->weights.m.data = a->stats.m.data = NULL;
    a->softcap = a->dropout_p = 0;
    a->causal = false;
    a->diagonal = a->first_head = a->first_query = a->first_key = 0;
    a->window_left = a->window_right = SA_UNBOUNDED;
    a->seed = 0;
    a->watch = NULL;
    a->block_masks = c->block_masks;
    a->block_mask_count = 0;
    if (c->packed) {
        c->v = (sa_varlen){.packed = a};
        c->mask_arrays = NULL;
        c->masks = NULL;
        c->items = NULL;
    }
}

bool sa_call_fits_lead(const sa_call *c, PyArrayObject *array, int core) {
    const int ndim = PyArray_NDIM(array), n_lead = c->a.n_lead;
    for (int own = 0; own < ndim - core; ++own) {
        const int axis = own + n_lead - (ndim - core);
        const npy_intp n = PyArray_DIM(array, own);
        if (axis < 0 ? (n != 1 || core > 0 || n_lead > 0 || ndim > 1) : (n != 1 && n != c->lead[axis])) {
            return false;
        }
    }
    return true;
}

int sa_call_shape(const sa_call *c, const npy_intp *lead, npy_intp rows, npy_intp cols, npy_intp *shape) {
    const int n = c->packed ? 1 : c->a.n_lead;
    memcpy(shape, lead + c->packed, (size_t)n * sizeof *shape);
    shape[n] = rows;
    shape[n + 1] = cols;
    if (c->packed) {
        shape[0] = rows;
        shape[1] = lead[1];
    }
    return n + 2;
}

void sa_call_fill(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype) {
    const int ndim = PyArray_NDIM(array);
    if (c->packed) {
        t->m = (sa_matrix){.data = PyArray_BYTES(array), .dtype = dtype, .swapped = !PyArray_ISNOTSWAPPED(array)};
        t->m.row_stride = PyArray_DIM(array, 0) == 1 ? 0 : PyArray_STRIDE(array, 0);
        t->m.col_stride = PyArray_STRIDE(array, 2);
        t->lead_stride[0] = 0;
        t->lead_stride[1] = PyArray_DIM(array, 1) == 1 ? 0 : PyArray_STRIDE(array, 1);
    } else {
        sa_fill_tensor(t, array, dtype, c->a.n_lead, 2);
    }
    if (PyArray_DIM(array, ndim - 1) == 1) {
        t->m.col_stride = PyArray_ITEMSIZE(array);
    }
}

int sa_call_row_shape(const sa_call *c, npy_intp cols, npy_intp *shape) {
    const int n = c->a.n_lead - c->packed;
    memcpy(shape, c->lead + c->packed, (size_t)n * sizeof *shape);
    shape[n] = c->a.L;
    shape[n + 1] = cols;
    return n + 1 + (cols > 0);
}

void sa_call_fill_rows(const sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype) {
    sa_fill_tensor(t, array, dtype, c->a.n_lead, 1);
    t->m.row_stride = t->m.col_stride;
}

/* ---- query, key and value ---------------------------------------------------------------------------------------- */

/* Returns a borrowed reference. */
static PyArrayObject *take_input(sa_call *c, int which, const char *name, const char *dense, const char *packed,
                                 sa_dtype *dtype) {
    PyArrayObject *array = sa_as_array(c->values[which], name, SA_NUMBERS, dtype);
    if (array == NULL) {
        return NULL;
    }
    sa_call_own(c, array, name);
    if (c->packed ? PyArray_NDIM(array) != 3 : PyArray_NDIM(array) < 2) {
        sa_error(PyExc_ValueError, "%s must have %s dimensions, %s, got shape %s", name, c->packed ? "3" : "at least 2",
                 c->packed ? packed : dense, sa_shape_of(array));
        return NULL;
    }
    return array;
}

static int take_inputs(sa_call *c) {
    sa_attention *a = &c->a;
    if ((c->query = take_input(c, 0, "query", "(..., L, E)", "(total_q, H, E)", &a->query.m.dtype)) == NULL ||
        (c->key = take_input(c, 1, "key", "(..., S, E)", "(total_k, H, E)", &a->key.m.dtype)) == NULL ||
        (c->value = take_input(c, 2, "value", "(..., S, Ev)", "(total_k, H, Ev)", &a->value.m.dtype)) == NULL) {
        return -1;
    }
    c->result = sa_promote(sa_promote(a->query.m.dtype, a->key.m.dtype), a->value.m.dtype);
    a->f64 = c->result == SA_F64;
    a->by_rows = false;
    c->computes = a->f64 ? SA_F64 : SA_F32;
    return 0;
}

static int read_groups(sa_call *c) {
    c->a.gqa = 1;
    if (!c->enable_gqa) {
        return 0;
    }
    const int q = PyArray_NDIM(c->query), k = PyArray_NDIM(c->key), v = PyArray_NDIM(c->value);
    if (q < 3 || k < 3 || v < 3) {
        return sa_shapes_error("enable_gqa=True needs a head axis before the length, in at least 3 dimensions", "query",
                               c->query, "key", c->key);
    }
    const npy_intp heads = PyArray_DIM(c->query, q - 3), key_heads = PyArray_DIM(c->key, k - 3);
    if (PyArray_DIM(c->value, v - 3) != key_heads) {
        return sa_shapes_error("with enable_gqa=True key and value must have the same number of heads (axis -3)", "key",
                               c->key, "value", c->value);
    }
    if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
        return sa_shapes_error("with enable_gqa=True the heads of query must be a multiple of those of key (axis -3)",
                               "query", c->query, "key", c->key);
    }
    c->a.gqa = heads == 0 || key_heads == 0 ? 1 : heads / key_heads;
    return 0;
}

/* With enable_gqa the heads are the query's. */
static int read_lead(sa_call *c, int n_lead) {
    c->a.n_lead = n_lead;
    for (int axis = 0; axis < n_lead; ++axis) {
        const bool of_heads = axis == n_lead - 1;
        npy_intp length = 1;
        for (int i = 0; i < 3; ++i) {
            PyArrayObject *array = c->owned[i];
            const int own = axis - n_lead + PyArray_NDIM(array) - 2;
            const npy_intp n = own < 0 || (i > 0 && c->enable_gqa && of_heads) ? 1 : PyArray_DIM(array, own);
            if (length != 1 && n != 1 && n != length) {
                const int other = i == 2 && PyArray_NDIM(c->query) < 3 ? 1 : 0;
                return sa_shapes_error(
                    of_heads && !c->enable_gqa
                        ? "leading dimensions must broadcast (for grouped-query attention pass enable_gqa=True)"
                        : "leading dimensions must broadcast",
                    c->owned_names[other], c->owned[other], c->owned_names[i], array);
            }
            length = n == 1 ? length : n;
        }
        c->a.lead[axis] = c->lead[axis] = length;
    }
    return 0;
}

static int read_shapes(sa_call *c) {
    const int q = PyArray_NDIM(c->query), k = PyArray_NDIM(c->key), v = PyArray_NDIM(c->value);
    c->a.L = PyArray_DIM(c->query, q - 2);
    c->a.S = PyArray_DIM(c->key, k - 2);
    if (PyArray_DIM(c->value, v - 2) != c->a.S) {
        return sa_shapes_error("key and value must have the same length (axis -2)", "key", c->key, "value", c->value);
    }
    return read_groups(c) < 0 ? -1 : read_lead(c, (q > k ? q > v ? q : v : k > v ? k : v) - 2);
}

/* ---- packed sequences -------------------------------------------------------------------------------------------- */

static int read_packed_shapes(sa_call *c) {
    const npy_intp *q = PyArray_SHAPE(c->query), *k = PyArray_SHAPE(c->key), *v = PyArray_SHAPE(c->value);
    if (k[0] != v[0] || k[1] != v[1]) {
        return sa_shapes_error("key and value must have the same rows and heads (axes 0 and 1)", "key", c->key, "value",
                               c->value);
    }
    const bool multiple = k[1] == 0 ? q[1] == 0 : q[1] % k[1] == 0;
    if (c->enable_gqa ? !multiple : q[1] != k[1]) {
        return sa_shapes_error(
            c->enable_gqa ? "with enable_gqa=True the heads of query must be a multiple of those of key (axis 1)"
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

/* Checks that offsets go from 0 to `rows` and never fall. */
static int check_offsets(PyArrayObject *offsets, PyObject *value, const char *name, npy_intp rows,
                         const char *rows_of) {
    const int64_t *offset = PyArray_DATA(offsets);
    const npy_intp n = PyArray_SIZE(offsets);
    if (PyArray_NDIM(offsets) != 1 || n == 0) {
        return sa_error(PyExc_ValueError, "%s must have shape (n + 1,) for n sequences, got %s", name,
                        sa_shape_of(offsets));
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
        sa_error(PyExc_ValueError, "%s must end with the number of rows of %s, %zd, got %S", name, rows_of,
                 (Py_ssize_t)rows, got);
    } else {
        sa_error(PyExc_ValueError, "%s must not fall, but offset %zd is %S after %lld", name, (Py_ssize_t)wrong, got,
                 (long long)offset[wrong - 1]);
    }
    Py_DECREF(got);
    return -1;
}

/* Returns how many offsets there are. */
static npy_intp read_offsets(sa_call *c, PyObject *value, const char *name, npy_intp rows, const char *rows_of,
                             const int64_t **begin) {
    if (value == Py_None) {
        return sa_error(PyExc_TypeError, "%s must be an array of integers, got None", name);
    }
    PyArrayObject *offsets = sa_as_small(value, name, true);
    if (offsets == NULL) {
        return -1;
    }
    sa_call_own(c, offsets, name);
    *begin = PyArray_DATA(offsets);
    return check_offsets(offsets, value, name, rows, rows_of) < 0 ? -1 : PyArray_SIZE(offsets);
}

static int read_packed(sa_call *c) {
    npy_intp n_q, n_k;
    if (read_packed_shapes(c) < 0 ||
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
    c->a.lead[0] = c->lead[0] = n_q - 1; /* for slopes and sinks of shape (H,) or (n, H) */
    c->items = PyMem_RawMalloc((size_t)n_q * sizeof(sa_varlen_item));
    if (c->items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int read_inputs(sa_call *c) {
    sa_attention *a = &c->a;
    if (take_inputs(c) < 0) {
        return -1;
    }
    a->E = PyArray_DIM(c->query, PyArray_NDIM(c->query) - 1);
    a->Dv = PyArray_DIM(c->value, PyArray_NDIM(c->value) - 1);
    if (PyArray_DIM(c->key, PyArray_NDIM(c->key) - 1) != a->E) {
        return sa_shapes_error("query and key must have the same last dimension", "query", c->query, "key", c->key);
    }
    if ((c->packed ? read_packed : read_shapes)(c) < 0) {
        return -1;
    }
    sa_call_fill(c, &a->query, c->query, a->query.m.dtype);
    sa_call_fill(c, &a->key, c->key, a->key.m.dtype);
    sa_call_fill(c, &a->value, c->value, a->value.m.dtype);
    return 0;
}

/* ---- options: readers run in the order of the table, when shapes are known --------------------------------------- */

static int read_scale(void *call, PyObject *value, const char *name, void *to) {
    if (sa_read_real(call, value, name, to) < 0) {
        return -1;
    }
    return isnan(*(double *)to) ? sa_error(PyExc_ValueError, "%s must be a number, not NaN", name) : 0;
}

static int read_dropout(void *call, PyObject *value, const char *name, void *to) {
    const double *p = to;
    if (sa_read_real(call, value, name, to) < 0) {
        return -1;
    }
    return *p >= 0 && *p <= 1 ? 0 : sa_error(PyExc_ValueError, "dropout_p must be between 0 and 1, got %R", value);
}

static int read_positive(void *call, PyObject *value, const char *name, void *to) {
    const double *x = to;
    if (sa_read_real(call, value, name, to) < 0) {
        return -1;
    }
    return *x > 0 && isfinite(*x)
               ? 0
               : sa_error(PyExc_ValueError, "%s must be a finite float > 0 or None, got %R", name, value);
}

/* *to already has is_causal, which is read first. */
static int read_causal(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    bool *causal = to;
    const bool text = PyUnicode_Check(value);
    const bool lower_right = text && PyUnicode_CompareWithASCIIString(value, "lower_right") == 0;
    if (lower_right && *causal) {
        return sa_error(PyExc_ValueError,
                        "is_causal=True means causal='upper_left', but causal='lower_right' was given too");
    }
    if (!lower_right && !(text && PyUnicode_CompareWithASCIIString(value, "upper_left") == 0)) {
        return sa_error(text ? PyExc_ValueError : PyExc_TypeError,
                        "%s must be None, 'upper_left' or 'lower_right', got %R%s", name, value,
                        PyBool_Check(value) ? " (is_causal=True is the causal mask)" : "");
    }
    *causal = true;
    c->lower_right = lower_right;
    c->a.diagonal = lower_right ? c->a.S - c->a.L : 0;
    return 0;
}

/* A bound longer than any sequence means no bound, like None. */
static int read_bound(PyObject *value, PyObject *window, ptrdiff_t *bound) {
    if (value == Py_None) {
        return 0;
    }
    PyObject *index = sa_as_index(value);
    if (index == NULL) {
        return PyErr_Occurred() ? -1
                                : sa_error(PyExc_TypeError,
                                           "window must be (left, right), each an int >= 0 or None, got %R", window);
    }
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow < 0 || (overflow == 0 && number < 0)) {
        return sa_error(PyExc_ValueError, "window bounds must be >= 0 or None, got %R", window);
    }
    if (overflow == 0 && number < (long long)1 << 50) {
        *bound = (ptrdiff_t)number;
    }
    return 0;
}

static int read_window(void *call, PyObject *value, const char *name, void *to) {
    (void)name, (void)to;
    sa_attention *a = &((sa_call *)call)->a;
    const bool sequence = PyTuple_Check(value) || PyList_Check(value);
    /* A copy, as __index__ might change the list. */
    PyObject *pair = sequence ? PySequence_Tuple(value) : PyTuple_New(0);
    if (pair == NULL) {
        return -1;
    }
    int status = 0;
    if (PyTuple_GET_SIZE(pair) != 2) {
        status = sa_error(sequence ? PyExc_ValueError : PyExc_TypeError,
                          "window must be (left, right), each an int >= 0 or None, got %R", value);
    }
    for (int side = 0; status == 0 && side < 2; ++side) {
        status = read_bound(PyTuple_GET_ITEM(pair, side), value, side == 0 ? &a->window_left : &a->window_right);
    }
    Py_DECREF(pair);
    return status;
}

/* ---- masks, and numbers for each head ---------------------------------------------------------------------------- */

static int lead_error(const sa_call *c, const char *name, PyArrayObject *array, bool is_mask, const char *hint) {
    npy_intp dims[NPY_MAXDIMS + 2];
    const int n = c->a.n_lead;
    memcpy(dims, c->lead, (size_t)n * sizeof *dims);
    dims[n] = c->a.L;
    dims[n + 1] = c->a.S;
    return sa_error(PyExc_ValueError, "%s must broadcast to %s %s without enlarging it, got shape %s%s", name,
                    is_mask ? "(..., L, S) =" : "the leading dimensions", sa_shape_text(is_mask ? n + 2 : n, dims),
                    sa_shape_of(array), hint);
}

/* True for floats that are all 0 or 1, and both: 1 probably means "open". Reads the first numbers alone. */
static bool holds_zeros_and_ones(PyArrayObject *mask) {
    const int type = PyArray_TYPE(mask);
    if ((type != NPY_FLOAT && type != NPY_DOUBLE) || !PyArray_ISCARRAY_RO(mask)) {
        return false;
    }
    const npy_intp size = PyArray_SIZE(mask), n = size < 1024 ? size : 1024;
    npy_intp ones = 0;
    for (npy_intp i = 0; i < n; ++i) {
        const double x = type == NPY_FLOAT ? (double)((const float *)PyArray_DATA(mask))[i]
                                           : ((const double *)PyArray_DATA(mask))[i];
        if (x != 0 && x != 1) {
            return false;
        }
        ones += x == 1;
    }
    return ones > 0 && ones < n;
}

/* True if each query sees just the later keys: probably the mask says what is closed. Reads the first and last row. */
static bool opens_later_keys(PyArrayObject *mask) {
    const int ndim = PyArray_NDIM(mask);
    const npy_intp n = ndim < 2 ? 0 : PyArray_DIM(mask, ndim - 1);
    if (PyArray_TYPE(mask) != NPY_BOOL || !PyArray_ISCARRAY_RO(mask) || n < 2 || PyArray_DIM(mask, ndim - 2) != n ||
        PyArray_SIZE(mask) == 0) {
        return false;
    }
    const npy_bool *first = PyArray_DATA(mask), *last = first + (n - 1) * n;
    for (npy_intp j = 0; j < n; ++j) {
        if (first[j] != (j > 0) || last[j]) {
            return false;
        }
    }
    return true;
}

/* Warns, once in a process, of a mask that probably means something else. */
static int warn_of_mask(PyArrayObject *mask) {
    const bool zeros_and_ones = holds_zeros_and_ones(mask);
    if (!zeros_and_ones && !opens_later_keys(mask)) {
        return 0;
    }
    PyObject *warn = sa_imported("selfattn._check", "warn_once");
    PyObject *done =
        warn ? PyObject_CallFunction(
                   warn, "s",
                   zeros_and_ones
                       ? "attn_mask holds floats 0 and 1, which are added to the scores and close no key; "
                         "attn_mask.astype(bool) closes the keys with 0"
                       : "attn_mask is True where a key comes after the query. True means that the query attends to "
                         "the key, so the first sees all others and the last none; ~attn_mask is the causal mask, and "
                         "so is is_causal=True")
             : NULL;
    Py_XDECREF(warn);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Fills t from array, which must broadcast to the scores. */
static int fill_mask(sa_call *c, sa_tensor *t, PyArrayObject *array, sa_dtype dtype, const char *name) {
    const sa_attention *a = &c->a;
    const int ndim = PyArray_NDIM(array), core = ndim < 2 ? ndim : 2;
    const npy_intp columns = ndim >= 1 ? PyArray_DIM(array, ndim - 1) : 1;
    const npy_intp rows = ndim >= 2 ? PyArray_DIM(array, ndim - 2) : 1;
    if ((columns != 1 && columns != a->S) || (rows != 1 && rows != a->L) || !sa_call_fits_lead(c, array, core)) {
        return lead_error(c, name, array, true,
                          ndim == 2 && rows == c->lead[0] && columns == a->S && a->n_lead == 2
                              ? " (one row for each batch entry is mask[:, None, None, :])"
                              : "");
    }
    sa_fill_tensor(t, array, dtype, a->n_lead, core);
    return 0;
}

static int read_one_mask(sa_call *c, PyObject *value, const char *name) {
    sa_dtype dtype;
    if (PyBool_Check(value)) { /* a single bool would open or close all pairs */
        return sa_error(PyExc_TypeError, "%s must be an array, got %R (a causal mask is is_causal=True)", name, value);
    }
    if ((c->mask = sa_as_array(value, name, SA_MASK, &dtype)) == NULL) {
        return -1;
    }
    sa_call_own(c, c->mask, "attn_mask");
    if (sa_is_integer(dtype)) {
        return sa_error(
            PyExc_TypeError,
            "%s must be boolean (True = attend) or float (added to the scaled scores), got %s; use "
            "mask.astype(bool) if 1 means attend, mask.astype(numpy.float32) if the numbers are to be added",
            name, sa_dtype_name(dtype));
    }
    if (fill_mask(c, &c->a.mask, c->mask, dtype, name) < 0) {
        return -1;
    }
    return c->looks_at_mask ? warn_of_mask(c->mask) : 0;
}

/* Returns a borrowed reference to floats that are added to scores; the call owns the array. */
static PyArrayObject *take_bias(sa_call *c, PyObject *value, const char *name, sa_dtype *dtype) {
    PyArrayObject *array = sa_as_array(value, name, SA_MASK, dtype);
    if (array == NULL) {
        return NULL;
    }
    sa_call_own(c, array, name);
    if (*dtype == SA_BOOL || sa_is_integer(*dtype)) {
        sa_error(PyExc_TypeError, "%s must be float (it is added to the scaled scores), got %s%s", name,
                 sa_dtype_name(*dtype), *dtype == SA_BOOL ? "; a boolean mask is attn_mask" : "");
        return NULL;
    }
    return array;
}

/* The bias takes the place of a float mask, so a boolean mask moves to the gate. */
static int read_bias(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    sa_attention *a = &c->a;
    sa_dtype dtype;
    if (a->mask.m.data != NULL && a->mask.m.dtype != SA_BOOL) {
        return sa_error(PyExc_ValueError,
                        "attn_mask and %s are both float: give their sum as one of them, or a boolean attn_mask", name);
    }
    a->gate = a->mask;
    c->has_bias = true;
    c->mask = take_bias(c, value, name, &dtype);
    return c->mask == NULL ? -1 : fill_mask(c, to, c->mask, dtype, name);
}

/* Reads the tangent of query, key or value, which has the same shape. */
static int read_tangent(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    sa_dtype dtype;
    PyArrayObject *of = to == &c->a.query_tangent ? c->query : to == &c->a.key_tangent ? c->key : c->value;
    PyArrayObject *array = take_bias(c, value, name, &dtype);
    if (array == NULL || sa_check_shape(name, array, PyArray_NDIM(of), PyArray_SHAPE(of)) < 0) {
        return -1;
    }
    if (dtype == SA_F64 && !c->a.f64) {
        return sa_error(PyExc_TypeError, "%s has dtype float64, but the call computes in float32: it would be narrowed",
                        name);
    }
    sa_call_fill(c, to, array, dtype);
    return 0;
}

static int read_mask_tangent(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    sa_dtype dtype;
    PyArrayObject *array = take_bias(c, value, name, &dtype);
    if (array != NULL && (c->mask == NULL || c->a.mask.m.dtype == SA_BOOL)) {
        return sa_error(PyExc_ValueError, "%s was given without a float attn_mask or a bias", name);
    }
    return array == NULL ? -1 : fill_mask(c, to, array, dtype, name);
}

/* Row i of the scores gets elements L − 1 − i to L + S − 2 − i. */
static int read_offset_bias(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    const sa_attention *a = &c->a;
    sa_dtype dtype;
    sa_tensor *t = to;
    PyArrayObject *array = take_bias(c, value, name, &dtype);
    if (array == NULL) {
        return -1;
    }
    const bool empty = a->L == 0 || a->S == 0;
    const int ndim = PyArray_NDIM(array);
    const npy_intp length = empty ? 0 : a->L + a->S - 1;
    if (ndim < 1 || PyArray_DIM(array, ndim - 1) != length || !sa_call_fits_lead(c, array, 1)) {
        npy_intp dims[NPY_MAXDIMS + 2];
        memcpy(dims, c->lead, (size_t)a->n_lead * sizeof *dims);
        dims[a->n_lead] = length;
        return sa_error(PyExc_ValueError,
                        "%s must broadcast to (..., L + S - 1) = %s without enlarging it, got shape %s", name,
                        sa_shape_text(a->n_lead + 1, dims), sa_shape_of(array));
    }
    if (!empty) {
        sa_fill_tensor(t, array, dtype, a->n_lead, 1);
        t->m.data += (a->L - 1) * t->m.col_stride;
        t->m.row_stride = -t->m.col_stride;
    }
    return 0;
}

static int read_mask_of(sa_call *c, ptrdiff_t s, PyObject *value) {
    char name[40];
    PyOS_snprintf(name, sizeof name, "attn_mask[%zd]", (Py_ssize_t)s);
    c->a.L = (ptrdiff_t)(c->v.begin_q[s + 1] - c->v.begin_q[s]);
    c->a.S = (ptrdiff_t)(c->v.begin_k[s + 1] - c->v.begin_k[s]);
    const int status = read_one_mask(c, value, name);
    if (c->mask != NULL) {
        c->mask_arrays[s] = c->mask;
        c->mask = NULL;
        --c->owned_count;
    }
    c->masks[s] = c->a.mask;
    return status;
}

static int read_masks(sa_call *c, PyObject *value) {
    sa_attention *a = &c->a;
    const ptrdiff_t n = c->v.sequences, L = a->L, S = a->S;
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return sa_error(
            PyExc_TypeError,
            "attn_mask must be a list with a mask or None for each of the %zd sequences, since their shapes "
            "differ; got %s",
            (Py_ssize_t)n, sa_type_name(value));
    }
    PyObject *list = PySequence_Tuple(value); /* a copy, as reading a mask might change the list */
    if (list == NULL) {
        return -1;
    }
    int status = -1;
    c->mask_arrays = PyMem_RawCalloc((size_t)n + 1, sizeof(PyArrayObject *)); /* + 1: never 0 bytes */
    c->masks = PyMem_RawCalloc((size_t)n + 1, sizeof(sa_tensor));
    if (c->mask_arrays == NULL || c->masks == NULL) {
        PyErr_NoMemory();
    } else if (PyTuple_GET_SIZE(list) != n) {
        sa_error(PyExc_ValueError, "attn_mask must have a mask or None for each of the %zd sequences, got %zd",
                 (Py_ssize_t)n, PyTuple_GET_SIZE(list));
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

static int read_mask(void *call, PyObject *value, const char *name, void *to) {
    (void)to;
    sa_call *c = call;
    return c->packed ? read_masks(c, value) : read_one_mask(c, value, name);
}

static int read_numbers(sa_call *c, PyObject *value, const char *name, bool integers, sa_tensor *t) {
    PyArrayObject *array = sa_as_small(value, name, integers);
    if (array == NULL) {
        return -1;
    }
    sa_call_own(c, array, name);
    const int ndim = PyArray_NDIM(array), n_lead = c->a.n_lead;
    if (!sa_call_fits_lead(c, array, 0)) {
        const bool of_batch = integers && ndim == 1 && n_lead == 2 && PyArray_DIM(array, 0) == c->lead[0];
        return lead_error(c, name, array, false, of_batch ? " (a length for each batch entry has shape (B, 1))" : "");
    }
    sa_fill_tensor(t, array, integers ? SA_I64 : SA_F64, ndim > n_lead ? 0 : n_lead, 0);
    return 0;
}

static int read_per_head(void *call, PyObject *value, const char *name, void *to) {
    return read_numbers(call, value, name, false, to);
}

static int read_lengths(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    const bool of_keys = to == &c->a.key_lengths;
    const ptrdiff_t most = of_keys ? c->a.S : c->a.L;
    if (read_numbers(c, value, name, true, to) < 0) {
        return -1;
    }
    PyArrayObject *flat = (PyArrayObject *)PyArray_Ravel(c->owned[c->owned_count - 1], NPY_CORDER);
    if (flat == NULL) {
        return -1;
    }
    const int64_t *length = PyArray_DATA(flat);
    const npy_intp n = PyArray_SIZE(flat);
    npy_intp i = 0;
    while (i < n && length[i] >= 0 && length[i] <= most) {
        ++i;
    }
    PyObject *wrong = i < n ? sa_element(value, i) : NULL;
    if (wrong != NULL) {
        sa_error(PyExc_ValueError, "%s must be between 0 and %s = %zd, got %S", name, of_keys ? "S" : "L",
                 (Py_ssize_t)most, wrong);
        Py_DECREF(wrong);
    }
    Py_DECREF(flat);
    return i < n ? -1 : 0;
}

/* True if heads that share keys would have different biases. */
static bool differs_in_group(const sa_attention *a, const sa_tensor *bias) {
    bool differs = a->gqa != 1;
    for (int axis = 0; axis < a->n_lead; ++axis) {
        differs |= a->S > 0 && bias->lead_stride[axis] != 0 && a->key.lead_stride[axis] == 0 &&
                   a->value.lead_stride[axis] == 0;
    }
    return differs;
}

/* Reads key_bias, by which layers add a padding mask to another mask. */
static int read_key_bias(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(value, name, SA_MASK, &dtype);
    if (array == NULL) {
        return -1;
    }
    sa_call_own(c, array, "key_bias");
    const int ndim = PyArray_NDIM(array);
    sa_fill_tensor(to, array, dtype, c->a.n_lead, 1);
    if (dtype != c->computes || !PyArray_ISCARRAY_RO(array) || ndim < 1 || PyArray_DIM(array, ndim - 1) != c->a.S ||
        !sa_call_fits_lead(c, array, 1) || differs_in_group(&c->a, to)) {
        return sa_error(PyExc_ValueError,
                        "%s must be contiguous %s, (..., S) with one row for each key head, got %s of shape %s", name,
                        sa_dtype_name(c->computes), sa_dtype_name(dtype), sa_shape_of(array));
    }
    return 0;
}

/* ---- rng --------------------------------------------------------------------------------------------------------- */

/* Without dropout, rng is only checked. */
int sa_call_read_seed(sa_call *c) {
    PyObject *rng = c->given.rng ? c->given.rng : Py_None;
    const bool drops = c->a.dropout_p > 0;
    if (rng == Py_None && !drops) {
        return 0;
    }
    if (c->want_stats && drops && !PyIndex_Check(rng)) {
        return sa_error(
            PyExc_TypeError,
            "with dropout_p > 0, rng must be an int here, the same forward and backward, got %s: another draw "
            "would drop other weights",
            rng == Py_None ? "None" : sa_type_name(rng));
    }
    return sa_seed_from_rng(rng, drops, &c->a.seed);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define SA_PARAMETER(name, otherwise, functions, read, to) {#name, otherwise, functions, read, offsetof(sa_call, to)},
static const sa_parameter parameters[] = {SA_ATTENTION_PARAMETERS(SA_PARAMETER){NULL, NULL, 0, NULL, 0}};

const sa_family sa_attention_family = {parameters,
                                       {[SA_FN_ATTENTION] = {"scaled_dot_product_attention", 6},
                                        [SA_FN_CACHED] = {"_cached_attention", 3},
                                        [SA_FN_FORWARD] = {"_attention_forward", 6},
                                        [SA_FN_BACKWARD] = {"_attention_backward", 6},
                                        [SA_FN_JVP] = {"_attention_jvp", 6},
                                        [SA_FN_HVP] = {"_attention_hvp", 6},
                                        [SA_FN_PACKED] = {"varlen_attention", 3},
                                        [SA_FN_PACKED_FORWARD] = {"varlen_attention", 3},
                                        [SA_FN_PACKED_BACKWARD] = {"_varlen_backward", 3}}};

int sa_call_read(sa_call *c, PyObject *module, int function, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames) {
    sa_parameter_set given;
    start(c, function);
    const sa_family_state *family = &sa_state_of(module)->attention;
    if (sa_sort_arguments(family, function, args, nargs, kwnames, c->values, &given) < 0 ||
        (c->given.enable_gqa && sa_read_flag(c, c->given.enable_gqa, "enable_gqa", &c->enable_gqa) < 0) ||
        read_inputs(c) < 0 ||
        (c->given.place && !PyArg_ParseTuple(c->given.place, "nnnn", &c->a.diagonal, &c->a.first_head,
                                             &c->a.first_query, &c->a.first_key))) {
        return -1;
    }
    c->want_unrounded = c->given.unrounded == Py_True;
    c->a.scale = c->a.E > 0 ? 1 / sqrt((double)c->a.E) : 1;
    return sa_read_arguments(family, c, c->values, given);
}
