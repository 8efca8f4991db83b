/* Owns the options of attention: their table (attention_parameters.h) and readers, which run in its order, once shapes
 * are known. */
#include "python/attention_call.h"

#include <math.h>

#include "python/scalars.h"

static int read_dropout(void *call, PyObject *value, const char *name, void *to) {
    const double *p = to;
    if (sa_read_real(call, value, name, to) < 0) {
        return -1;
    }
    return *p >= 0 && *p <= 1 ? 0 : sa_error(PyExc_ValueError, "dropout_p must be between 0 and 1, got %R", value);
}

static int read_softcap(void *call, PyObject *value, const char *name, void *to) {
    const double *cap = to;
    if (sa_read_real(call, value, name, to) < 0) {
        return -1;
    }
    return *cap > 0 && isfinite(*cap) ? 0
                                      : sa_error(PyExc_ValueError, "softcap must be a finite float > 0 or None, got %R", value);
}

/* ---- causal and window ---------------------------------------------------------------------------------------------- */

/* *to holds is_causal, which is read first. */
static int read_causal(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    bool *causal = to;
    const bool text = PyUnicode_Check(value);
    const bool lower_right = text && PyUnicode_CompareWithASCIIString(value, "lower_right") == 0;
    if (lower_right && *causal) {
        return sa_error(PyExc_ValueError, "is_causal=True means causal='upper_left', but causal='lower_right' was given too");
    }
    if (!lower_right && !(text && PyUnicode_CompareWithASCIIString(value, "upper_left") == 0)) {
        return sa_error(text ? PyExc_ValueError : PyExc_TypeError, "%s must be None, 'upper_left' or 'lower_right', got %R",
                        name, value);
    }
    *causal = true;
    c->lower_right = lower_right;
    c->a.diagonal = lower_right ? c->a.S - c->a.L : 0;
    return 0;
}

/* What no sequence reaches is open, like None. */
static int read_bound(PyObject *value, PyObject *window, ptrdiff_t *bound) {
    if (value == Py_None) {
        return 0;
    }
    PyObject *index = sa_as_index(value);
    if (index == NULL) {
        return PyErr_Occurred()
                   ? -1
                   : sa_error(PyExc_TypeError, "window must be (left, right), each an int >= 0 or None, got %R", window);
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
    PyObject *pair = sequence ? PySequence_Tuple(value) : NULL; /* a copy: __index__ might change the list */
    if (sequence && pair == NULL) {
        return -1;
    }
    int status;
    if (!sequence || PyTuple_GET_SIZE(pair) != 2) {
        status = sa_error(sequence ? PyExc_ValueError : PyExc_TypeError,
                          "window must be (left, right), each an int >= 0 or None, got %R", value);
    } else {
        status = read_bound(PyTuple_GET_ITEM(pair, 0), value, &a->window_left) < 0
                     ? -1
                     : read_bound(PyTuple_GET_ITEM(pair, 1), value, &a->window_right);
    }
    Py_XDECREF(pair);
    return status;
}

/* ---- masks, and numbers for each head ------------------------------------------------------------------------------- */

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

static int read_one_mask(sa_call *c, PyObject *value, const char *name) {
    sa_attention *a = &c->a;
    sa_dtype dtype;
    if (PyBool_Check(value)) { /* one bool would open or close all */
        return sa_error(PyExc_TypeError, "%s must be an array, got %R (a causal mask is is_causal=True)", name, value);
    }
    if ((c->mask = sa_as_array(c->state, value, name, SA_MASK, &dtype)) == NULL) {
        return -1;
    }
    sa_call_own(c, c->mask, "attn_mask");
    if (sa_is_integer(dtype)) {
        return sa_error(PyExc_TypeError,
                        "%s must be boolean (True = attend) or float (added to the scaled scores), got %s; use "
                        "mask.astype(bool) if 1 means attend, mask.astype(numpy.float32) if the numbers are to be added",
                        name, sa_dtype_name(dtype));
    }
    const int ndim = PyArray_NDIM(c->mask), core = ndim < 2 ? ndim : 2;
    const npy_intp columns = ndim >= 1 ? PyArray_DIM(c->mask, ndim - 1) : 1;
    const npy_intp rows = ndim >= 2 ? PyArray_DIM(c->mask, ndim - 2) : 1;
    if ((columns != 1 && columns != a->S) || (rows != 1 && rows != a->L) || !sa_call_fits_lead(c, c->mask, core)) {
        return lead_error(c, name, c->mask, true,
                          ndim == 2 && rows == c->lead[0] && columns == a->S && a->n_lead == 2
                              ? " (one row for each batch entry is mask[:, None, None, :])"
                              : "");
    }
    sa_fill_tensor(&a->mask, c->mask, dtype, a->n_lead, core);
    return 0;
}

/* Reads the mask as in a call of its own. */
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

static int read_mask(void *call, PyObject *value, const char *name, void *to) {
    (void)to;
    sa_call *c = call;
    return c->packed ? read_masks(c, value) : read_one_mask(c, value, name);
}

static int read_block_mask(void *call, PyObject *value, const char *name, void *to) {
    (void)name, (void)to;
    return sa_call_read_block_mask(call, value);
}

static int read_numbers(sa_call *c, PyObject *value, const char *name, bool integers, sa_tensor *t) {
    PyArrayObject *array = sa_as_small(c->state, value, name, integers);
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

/* `letter` is what messages call `most`. */
static int read_lengths(sa_call *c, PyObject *value, const char *name, sa_tensor *t, const char *letter, ptrdiff_t most) {
    if (read_numbers(c, value, name, true, t) < 0) {
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
        sa_error(PyExc_ValueError, "%s must be between 0 and %s = %zd, got %S", name, letter, (Py_ssize_t)most, wrong);
        Py_DECREF(wrong);
    }
    Py_DECREF(flat);
    return i < n ? -1 : 0;
}

static int read_key_lengths(void *call, PyObject *value, const char *name, void *to) {
    return read_lengths(call, value, name, to, "S", ((sa_call *)call)->a.S);
}

static int read_query_lengths(void *call, PyObject *value, const char *name, void *to) {
    return read_lengths(call, value, name, to, "L", ((sa_call *)call)->a.L);
}

/* Whether heads that share keys would have biases of their own. */
static bool parts_groups(const sa_attention *a, const sa_tensor *bias) {
    bool parts = a->gqa != 1;
    for (int axis = 0; axis < a->n_lead; ++axis) {
        parts |= a->S > 0 && bias->lead_stride[axis] != 0 && a->key.lead_stride[axis] == 0 && a->value.lead_stride[axis] == 0;
    }
    return parts;
}

/* For layers, which add a padding mask to another mask. */
static int read_key_bias(void *call, PyObject *value, const char *name, void *to) {
    sa_call *c = call;
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(c->state, value, name, SA_MASK, &dtype);
    if (array == NULL) {
        return -1;
    }
    sa_call_own(c, array, "key_bias");
    const int ndim = PyArray_NDIM(array);
    sa_fill_tensor(to, array, dtype, c->a.n_lead, 1);
    if (dtype != c->computes || !PyArray_ISCARRAY_RO(array) || ndim < 1 || PyArray_DIM(array, ndim - 1) != c->a.S ||
        !sa_call_fits_lead(c, array, 1) || parts_groups(&c->a, to)) {
        return sa_error(PyExc_ValueError,
                        "%s must be contiguous %s, (..., S) with one row for each key head, got %s of shape %s", name,
                        sa_dtype_name(c->computes), sa_dtype_name(dtype), sa_shape_of(array));
    }
    return 0;
}

/* ---- rng ------------------------------------------------------------------------------------------------------------ */

static int read_entropy(uint64_t *seed) {
    PyObject *os = PyImport_ImportModule("os");
    PyObject *bytes = os ? PyObject_CallMethod(os, "urandom", "i", 8) : NULL;
    if (bytes != NULL) {
        memcpy(seed, PyBytes_AS_STRING(bytes), 8);
    }
    const int status = bytes != NULL ? 0 : -1;
    Py_XDECREF(os);
    Py_XDECREF(bytes);
    return status;
}

static PyObject *draw(PyObject *rng) {
    PyObject *most = PyLong_FromString("18446744073709551616", NULL, 10);
    PyObject *drawn = most ? PyObject_CallMethod(rng, "integers", "iOOs", 0, most, Py_None, "uint64") : NULL;
    Py_XDECREF(most);
    PyObject *number = drawn ? PyNumber_Index(drawn) : NULL;
    Py_XDECREF(drawn);
    return number;
}

/* Whether it is a generator. */
static int draws_integers(PyObject *rng) {
    PyObject *method = PyObject_GetAttrString(rng, "integers");
    if (method == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    Py_XDECREF(method);
    return method != NULL;
}

static PyObject *as_seed(PyObject *rng) {
    PyObject *number = sa_as_index(rng);
    if (number == NULL) {
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_TypeError, "rng must be an int >= 0, a numpy.random.Generator or None, got %s",
                                  sa_type_name(rng));
    }
    PyObject *zero = PyLong_FromLong(0);
    const int negative = zero ? PyObject_RichCompareBool(number, zero, Py_LT) : -1;
    Py_XDECREF(zero);
    if (negative > 0) {
        sa_error(PyExc_ValueError, "rng must be an int >= 0, a numpy.random.Generator or None, got %R", number);
    }
    if (negative != 0) {
        Py_CLEAR(number);
    }
    return number;
}

/* An int counts modulo 2^64. Without dropout, rng is only checked. */
int sa_call_read_seed(sa_call *c) {
    PyObject *rng = c->given.rng;
    const bool drops = c->a.dropout_p > 0;
    const int draws = rng == NULL ? 0 : draws_integers(rng);
    if (draws < 0) {
        return -1;
    }
    if (c->want_stats && drops && (rng == NULL || draws)) {
        return sa_error(PyExc_TypeError,
                        "with dropout_p > 0, rng must be an int here, the same forward and backward, got %s: another draw "
                        "would drop other weights",
                        rng == NULL ? "None" : sa_type_name(rng));
    }
    if (rng == NULL) {
        return drops ? read_entropy(&c->a.seed) : 0;
    }
    if (draws && !drops) {
        return 0;
    }
    PyObject *number = draws ? draw(rng) : as_seed(rng);
    if (number == NULL) {
        return -1;
    }
    c->a.seed = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    return c->a.seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* ---- the table ------------------------------------------------------------------------------------------------------ */

#define SA_CACHED (1 << SA_FN_CACHED)
#define SA_DENSE_BACKWARD (1 << SA_FN_BACKWARD)
#define SA_DENSE (1 << SA_FN_ATTENTION | SA_CACHED | 1 << SA_FN_FORWARD | SA_DENSE_BACKWARD)
#define SA_PACKED (1 << SA_FN_PACKED | 1 << SA_FN_PACKED_FORWARD | 1 << SA_FN_PACKED_BACKWARD)
#define SA_BOTH_HALVES (1 << SA_FN_FORWARD | SA_DENSE_BACKWARD)
#define SA_ALL (SA_DENSE | SA_PACKED)
#define SA_FORWARD (1 << SA_FN_FORWARD | 1 << SA_FN_PACKED_FORWARD)
#define SA_BACKWARD (SA_DENSE_BACKWARD | 1 << SA_FN_PACKED_BACKWARD)

static const sa_parameter parameters[] = {
#define SA_PARAMETER(name, otherwise, functions, read, to) {#name, otherwise, functions, read, offsetof(sa_call, to)},
#include "python/attention_parameters.h"
    {NULL, NULL, 0, NULL, 0}};

const sa_family sa_attention_family = {parameters,
                                       {[SA_FN_ATTENTION] = {"scaled_dot_product_attention", 6},
                                        [SA_FN_CACHED] = {"_cached_attention", 3},
                                        [SA_FN_FORWARD] = {"scaled_dot_product_attention_forward", 6},
                                        [SA_FN_BACKWARD] = {"scaled_dot_product_attention_backward", 6},
                                        [SA_FN_PACKED] = {"varlen_attention", 3},
                                        [SA_FN_PACKED_FORWARD] = {"varlen_attention", 3},
                                        [SA_FN_PACKED_BACKWARD] = {"varlen_attention_backward", 3}}};
