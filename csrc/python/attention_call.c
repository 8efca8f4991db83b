/* The arguments of an attention call: reads and checks every one and fills the core's struct. Nothing is written before
 * everything has been checked. */
#include "python/attention_call.h"

#include <math.h>

void sa_call_release(sa_call *c) {
    Py_XDECREF(c->query);
    Py_XDECREF(c->key);
    Py_XDECREF(c->value);
    Py_XDECREF(c->mask);
    Py_XDECREF(c->alibi);
    Py_XDECREF(c->sinks);
    Py_XDECREF(c->lengths);
    Py_XDECREF(c->query_lengths);
    Py_XDECREF(c->out);
    Py_XDECREF(c->lse);
    Py_XDECREF(c->weights);
    Py_XDECREF(c->stats);
    Py_XDECREF(c->unrounded);
    Py_XDECREF(c->tables);
}

int sa_shape_error(const char *message, const char *name_a, PyArrayObject *a, const char *name_b, PyArrayObject *b) {
    PyObject *shape_a = sa_shape_of(a), *shape_b = sa_shape_of(b);
    if (shape_a != NULL && shape_b != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: %s has shape %R, %s has shape %R", message, name_a, shape_a, name_b, shape_b);
    }
    Py_XDECREF(shape_a);
    Py_XDECREF(shape_b);
    return -1;
}

/* ---- scalars ------------------------------------------------------------------------------------------------------- */

/* True, False and what NumPy and others have for them; None is False. Not everything that Python takes for true: a string is a mistake. */
static int read_flag(PyObject *value, const char *name, bool *flag) {
    if (value != NULL && (PyUnicode_Check(value) || PyBytes_Check(value) || PyFloat_CheckExact(value))) {
        PyErr_Format(PyExc_TypeError, "%s must be a bool, got %R%s", name, value,
                     strcmp(name, "is_causal") == 0 ? " (which diagonal it is, causal='lower_right' says)" : "");
        return -1;
    }
    const int truth = value == NULL ? 0 : PyObject_IsTrue(value);
    *flag = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* One side of the window: None is open, an int ≥ 0 of any size is clamped to what no sequence reaches. */
static int read_bound(PyObject *value, PyObject *window, ptrdiff_t *bound) {
    *bound = SA_UNBOUNDED;
    if (value == Py_None) {
        return 0;
    }
    PyObject *index = sa_as_index(value);
    if (index == NULL) {
        if (PyErr_Occurred()) {
            return -1;
        }
        PyErr_Format(PyExc_TypeError, "window must be (left, right), each an int >= 0 or None, got %R", window);
        return -1;
    }
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow < 0 || (overflow == 0 && number < 0)) {
        PyErr_Format(PyExc_ValueError, "window bounds must be >= 0 or None, got %R", window);
        return -1;
    }
    if (overflow == 0 && number < (long long)1 << 50) {
        *bound = (ptrdiff_t)number;
    }
    return 0;
}

static int read_window(PyObject *window, sa_attention *a) {
    a->window_left = a->window_right = SA_UNBOUNDED;
    if (!sa_given(window)) {
        return 0;
    }
    const bool sequence = PyTuple_Check(window) || PyList_Check(window);
    PyObject *pair = sequence ? PySequence_Tuple(window) : NULL; /* own: a bound's __index__ might change the list */
    if (sequence && pair == NULL) {
        return -1;
    }
    int status = -1;
    if (!sequence || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(sequence ? PyExc_ValueError : PyExc_TypeError,
                     "window must be (left, right), each an int >= 0 or None, got %R", window);
    } else if (read_bound(PyTuple_GET_ITEM(pair, 0), window, &a->window_left) == 0) {
        status = read_bound(PyTuple_GET_ITEM(pair, 1), window, &a->window_right);
    }
    Py_XDECREF(pair);
    return status;
}

/* is_causal and causal: whether keys after the diagonal are closed, and which diagonal it is. */
static int read_causal(PyObject *is_causal, PyObject *causal, sa_call *c) {
    sa_attention *a = &c->a;
    c->lower_right = false;
    if (read_flag(is_causal, "is_causal", &a->causal) < 0) {
        return -1;
    }
    a->diagonal = 0;
    if (!sa_given(causal)) {
        return 0;
    }
    const bool text = PyUnicode_Check(causal);
    if (text && PyUnicode_CompareWithASCIIString(causal, "lower_right") == 0) {
        if (a->causal) {
            PyErr_SetString(PyExc_ValueError,
                            "is_causal=True means causal='upper_left', but causal='lower_right' was given too");
            return -1;
        }
        a->diagonal = a->S - a->L;
        c->lower_right = true;
    } else if (!text || PyUnicode_CompareWithASCIIString(causal, "upper_left") != 0) {
        PyErr_Format(text ? PyExc_ValueError : PyExc_TypeError, "causal must be None, 'upper_left' or 'lower_right', got %R",
                     causal);
        return -1;
    }
    a->causal = true;
    return 0;
}

/* rng as a seed: an int is taken modulo 2^64, a Generator draws one uint64, None is fresh entropy. Without `wanted`, when
 * there is no dropout, it is checked only. */
static int read_seed(PyObject *rng, bool wanted, uint64_t *seed) {
    PyObject *number;
    if (!sa_given(rng)) {
        if (!wanted) {
            return 0;
        }
        PyObject *os = PyImport_ImportModule("os");
        PyObject *bytes = os ? PyObject_CallMethod(os, "urandom", "i", 8) : NULL;
        Py_XDECREF(os);
        if (bytes == NULL) {
            return -1;
        }
        memcpy(seed, PyBytes_AS_STRING(bytes), 8);
        Py_DECREF(bytes);
        return 0;
    }
    if (PyObject_HasAttrString(rng, "integers")) {
        if (!wanted) {
            return 0;
        }
        PyObject *integers = PyObject_GetAttrString(rng, "integers");
        PyObject *args = integers ? Py_BuildValue("(iN)", 0, PyLong_FromString("18446744073709551616", NULL, 10)) : NULL;
        PyObject *kwargs = args ? Py_BuildValue("{s:s}", "dtype", "uint64") : NULL;
        PyObject *drawn = kwargs ? PyObject_Call(integers, args, kwargs) : NULL;
        Py_XDECREF(integers);
        Py_XDECREF(args);
        Py_XDECREF(kwargs);
        number = drawn ? PyNumber_Index(drawn) : NULL;
        Py_XDECREF(drawn);
        if (number == NULL) {
            return -1;
        }
    } else {
        number = sa_as_index(rng);
        if (number == NULL) {
            if (PyErr_Occurred()) {
                return -1;
            }
            PyErr_Format(PyExc_TypeError, "rng must be an int >= 0, a numpy.random.Generator or None, got %s",
                         Py_TYPE(rng)->tp_name);
            return -1;
        }
        PyObject *zero = PyLong_FromLong(0);
        const int negative = zero ? PyObject_RichCompareBool(number, zero, Py_LT) : -1;
        Py_XDECREF(zero);
        if (negative != 0) {
            if (negative > 0) {
                PyErr_Format(PyExc_ValueError, "rng must be an int >= 0, a numpy.random.Generator or None, got %R", number);
            }
            Py_DECREF(number);
            return -1;
        }
    }
    *seed = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    return *seed == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int read_scalars(sa_call *c, PyObject *const *values) {
    sa_attention *a = &c->a;
    a->scale = a->E > 0 ? 1 / sqrt((double)a->E) : 1;
    if (sa_given(values[SA_ARG_SCALE]) && sa_read_real(values[SA_ARG_SCALE], "scale", &a->scale) < 0) {
        return -1;
    }
    if (values[SA_ARG_DROPOUT_P] != NULL && sa_read_real(values[SA_ARG_DROPOUT_P], "dropout_p", &a->dropout_p) < 0) {
        return -1;
    }
    if (!(a->dropout_p >= 0 && a->dropout_p <= 1)) {
        PyErr_Format(PyExc_ValueError, "dropout_p must be between 0 and 1, got %R", values[SA_ARG_DROPOUT_P]);
        return -1;
    }
    if (sa_given(values[SA_ARG_SOFTCAP])) {
        if (sa_read_real(values[SA_ARG_SOFTCAP], "softcap", &a->softcap) < 0) {
            return -1;
        }
        if (!(a->softcap > 0 && isfinite(a->softcap))) {
            PyErr_Format(PyExc_ValueError, "softcap must be a finite float > 0 or None, got %R", values[SA_ARG_SOFTCAP]);
            return -1;
        }
    }
    if (read_causal(values[SA_ARG_IS_CAUSAL], values[SA_ARG_CAUSAL], c) < 0 || read_window(values[SA_ARG_WINDOW], a) < 0 ||
        read_flag(values[SA_ARG_RETURN_LSE], "return_lse", &c->want_lse) < 0 ||
        read_flag(values[SA_ARG_RETURN_WEIGHTS], "return_weights", &c->want_weights) < 0) {
        return -1;
    }
    c->threads = sa_get_num_threads();
    return sa_given(values[SA_ARG_NUM_THREADS]) ? sa_read_threads(values[SA_ARG_NUM_THREADS], "num_threads", &c->threads) : 0;
}

/* ---- arrays -------------------------------------------------------------------------------------------------------- */

/* Query, key and value: dtypes, ranks, and the shapes that must agree. */
static int read_inputs(sa_call *c, PyObject *const *values) {
    sa_dtype q, k, v;
    if ((c->query = sa_as_array(c->state, values[SA_ARG_QUERY], "query", SA_NUMBERS, &q)) == NULL ||
        (c->key = sa_as_array(c->state, values[SA_ARG_KEY], "key", SA_NUMBERS, &k)) == NULL ||
        (c->value = sa_as_array(c->state, values[SA_ARG_VALUE], "value", SA_NUMBERS, &v)) == NULL) {
        return -1;
    }
    c->result = sa_promote(sa_promote(q, k), v);
    c->a.f64 = c->result == SA_F64;
    PyArrayObject *const arrays[3] = {c->query, c->key, c->value};
    static const char *const names[3] = {"query", "key", "value"};
    static const char *const shapes[3] = {"(..., L, E)", "(..., S, E)", "(..., S, Ev)"};
    int n_lead = 0;
    for (int i = 0; i < 3; ++i) {
        const int ndim = PyArray_NDIM(arrays[i]);
        if (ndim < 2) {
            PyObject *shape = sa_shape_of(arrays[i]);
            if (shape != NULL) {
                PyErr_Format(PyExc_ValueError, "%s must have at least 2 dimensions, %s, got shape %R", names[i], shapes[i],
                             shape);
                Py_DECREF(shape);
            }
            return -1;
        }
        n_lead = ndim - 2 > n_lead ? ndim - 2 : n_lead;
    }
    sa_attention *a = &c->a;
    a->n_lead = n_lead;
    a->L = PyArray_DIM(c->query, PyArray_NDIM(c->query) - 2);
    a->E = PyArray_DIM(c->query, PyArray_NDIM(c->query) - 1);
    a->S = PyArray_DIM(c->key, PyArray_NDIM(c->key) - 2);
    a->Dv = PyArray_DIM(c->value, PyArray_NDIM(c->value) - 1);
    if (PyArray_DIM(c->key, PyArray_NDIM(c->key) - 1) != a->E) {
        return sa_shape_error("query and key must have the same last dimension", "query", c->query, "key", c->key);
    }
    if (PyArray_DIM(c->value, PyArray_NDIM(c->value) - 2) != a->S) {
        return sa_shape_error("key and value must have the same length (axis -2)", "key", c->key, "value", c->value);
    }
    a->gqa = 1;
    npy_intp key_heads = -1;
    if (c->enable_gqa) {
        if (PyArray_NDIM(c->query) < 3 || PyArray_NDIM(c->key) < 3 || PyArray_NDIM(c->value) < 3) {
            return sa_shape_error("enable_gqa=True needs a head axis before the length, in at least 3 dimensions", "query",
                                  c->query, "key", c->key);
        }
        const npy_intp heads = PyArray_DIM(c->query, PyArray_NDIM(c->query) - 3);
        key_heads = PyArray_DIM(c->key, PyArray_NDIM(c->key) - 3);
        if (PyArray_DIM(c->value, PyArray_NDIM(c->value) - 3) != key_heads) {
            return sa_shape_error("with enable_gqa=True key and value must have the same number of heads (axis -3)", "key",
                                  c->key, "value", c->value);
        }
        if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
            return sa_shape_error("with enable_gqa=True the heads of query must be a multiple of those of key (axis -3)",
                                  "query", c->query, "key", c->key);
        }
        a->gqa = heads == 0 || key_heads == 0 ? 1 : heads / key_heads;
    }
    for (int axis = 0; axis < n_lead; ++axis) {
        npy_intp length = 1;
        for (int i = 0; i < 3; ++i) {
            const int own = axis - n_lead + PyArray_NDIM(arrays[i]) - 2;
            npy_intp n = own >= 0 ? PyArray_DIM(arrays[i], own) : 1;
            if (i > 0 && c->enable_gqa && axis == n_lead - 1) {
                n = 1; /* checked above; the head axis is the query's */
            }
            if (length != 1 && n != 1 && n != length) {
                const char *hint = axis == n_lead - 1 && !c->enable_gqa
                                       ? "leading dimensions must broadcast (for grouped-query attention pass enable_gqa=True)"
                                       : "leading dimensions must broadcast";
                return i == 1 || PyArray_NDIM(c->query) < 3
                           ? sa_shape_error(hint, i == 1 ? "query" : "key", i == 1 ? c->query : c->key, names[i], arrays[i])
                           : sa_shape_error(hint, "query", c->query, names[i], arrays[i]);
            }
            length = n == 1 ? length : n;
        }
        a->lead[axis] = c->lead[axis] = length;
    }
    sa_fill_tensor(&a->query, c->query, q, n_lead, 2);
    sa_fill_tensor(&a->key, c->key, k, n_lead, 2);
    sa_fill_tensor(&a->value, c->value, v, n_lead, 2);
    /* a single column lies together, whatever stride NumPy gives it */
    if (a->E == 1) {
        a->query.m.col_stride = PyArray_ITEMSIZE(c->query);
        a->key.m.col_stride = PyArray_ITEMSIZE(c->key);
    }
    if (a->Dv == 1) {
        a->value.m.col_stride = PyArray_ITEMSIZE(c->value);
    }
    return 0;
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

static int lead_error(const sa_call *c, const char *name, PyArrayObject *array, const char *tail, npy_intp L, npy_intp S,
                      const char *hint) {
    npy_intp dims[NPY_MAXDIMS + 2];
    int n = 0;
    for (; n < c->a.n_lead; ++n) {
        dims[n] = c->lead[n];
    }
    if (L >= 0) {
        dims[n++] = L;
        dims[n++] = S;
    }
    PyObject *wanted = PyArray_IntTupleFromIntp(n, dims), *shape = sa_shape_of(array);
    if (wanted != NULL && shape != NULL) {
        PyErr_Format(PyExc_ValueError, "%s must broadcast to %s %R without enlarging it, got shape %R%s", name, tail, wanted,
                     shape, hint);
    }
    Py_XDECREF(wanted);
    Py_XDECREF(shape);
    return -1;
}

int sa_call_read_mask(sa_call *c, PyObject *value, const char *name) {
    sa_attention *a = &c->a;
    sa_dtype dtype;
    if (PyBool_Check(value)) { /* as a mask it would open or close everything */
        PyErr_Format(PyExc_TypeError, "%s must be an array, got %R (a causal mask is is_causal=True)", name, value);
        return -1;
    }
    if ((c->mask = sa_as_array(c->state, value, name, SA_MASK, &dtype)) == NULL) {
        return -1;
    }
    if (sa_is_integer(dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be boolean (True = attend) or float (added to the scaled scores), got %s; use "
                     "mask.astype(bool) if 1 means attend, mask.astype(numpy.float32) if the numbers are to be added",
                     name, sa_dtype_name(dtype));
        return -1;
    }
    const int ndim = PyArray_NDIM(c->mask), core = ndim < 2 ? ndim : 2;
    const npy_intp columns = ndim >= 1 ? PyArray_DIM(c->mask, ndim - 1) : 1;
    const npy_intp rows = ndim >= 2 ? PyArray_DIM(c->mask, ndim - 2) : 1;
    if ((columns != 1 && columns != a->S) || (rows != 1 && rows != a->L) || !sa_call_fits_lead(c, c->mask, core)) {
        return lead_error(c, name, c->mask, "(..., L, S) =", a->L, a->S,
                          ndim == 2 && rows == c->lead[0] && columns == a->S && a->n_lead == 2
                              ? " (one row for each batch entry is mask[:, None, None, :])"
                              : "");
    }
    sa_fill_tensor(&a->mask, c->mask, dtype, a->n_lead, core);
    return 0;
}

/* alibi_slopes, sinks, key_lengths: a number per leading index. */
static int read_per_head(sa_call *c, PyObject *value, const char *name, bool integers, PyArrayObject **owned, sa_tensor *t) {
    *owned = sa_as_small(c->state, value, name, integers);
    if (*owned == NULL) {
        return -1;
    }
    if (!sa_call_fits_lead(c, *owned, 0)) {
        const bool of_batch = integers && PyArray_NDIM(*owned) == 1 && c->a.n_lead == 2 && PyArray_DIM(*owned, 0) == c->lead[0];
        return lead_error(c, name, *owned, "the leading dimensions", -1, -1,
                          of_batch ? " (a length for each batch entry has shape (B, 1))" : "");
    }
    sa_fill_tensor(t, *owned, integers ? SA_I64 : SA_F64, PyArray_NDIM(*owned) > c->a.n_lead ? 0 : c->a.n_lead, 0);
    return 0;
}

static int check_lengths(PyArrayObject *lengths, PyObject *given, const char *name, const char *letter, ptrdiff_t most) {
    PyArrayObject *flat = (PyArrayObject *)PyArray_Ravel(lengths, NPY_CORDER);
    if (flat == NULL) {
        return -1;
    }
    const int64_t *length = (const int64_t *)PyArray_DATA(flat);
    for (npy_intp i = 0; i < PyArray_SIZE(flat); ++i) {
        if (length[i] < 0 || length[i] > most) {
            PyObject *got = sa_element(given, i);
            if (got != NULL) {
                PyErr_Format(PyExc_ValueError, "%s must be between 0 and %s = %zd, got %S", name, letter, (Py_ssize_t)most,
                             got);
                Py_DECREF(got);
            }
            Py_DECREF(flat);
            return -1;
        }
    }
    Py_DECREF(flat);
    return 0;
}

static int read_options(sa_call *c, PyObject *const *values) {
    sa_attention *a = &c->a;
    if (sa_given(values[SA_ARG_ATTN_MASK]) && sa_call_read_mask(c, values[SA_ARG_ATTN_MASK], "attn_mask") < 0) {
        return -1;
    }
    if (sa_given(values[SA_ARG_ALIBI_SLOPES]) &&
        read_per_head(c, values[SA_ARG_ALIBI_SLOPES], "alibi_slopes", false, &c->alibi, &a->alibi) < 0) {
        return -1;
    }
    if (sa_given(values[SA_ARG_SINKS]) && read_per_head(c, values[SA_ARG_SINKS], "sinks", false, &c->sinks, &a->sinks) < 0) {
        return -1;
    }
    if (sa_given(values[SA_ARG_KEY_LENGTHS])) {
        if (read_per_head(c, values[SA_ARG_KEY_LENGTHS], "key_lengths", true, &c->lengths, &a->key_lengths) < 0 ||
            check_lengths(c->lengths, values[SA_ARG_KEY_LENGTHS], "key_lengths", "S", a->S) < 0) {
            return -1;
        }
    }
    return 0;
}

int sa_call_read_query_lengths(sa_call *c, PyObject *value) {
    if (!sa_given(value)) {
        PyErr_SetString(PyExc_TypeError, "_cached_attention() missing required argument: 'query_lengths'");
        return -1;
    }
    return read_per_head(c, value, "query_lengths", true, &c->query_lengths, &c->a.query_lengths) < 0
               ? -1
               : check_lengths(c->query_lengths, value, "query_lengths", "L", c->a.L);
}

/* ---- the whole ----------------------------------------------------------------------------------------------------- */

void sa_call_start(sa_call *c, PyObject *module) {
    /* the strides' tails stay uninitialised: only n_lead of them are ever read */
    c->state = sa_state_of(module);
    c->query = c->key = c->value = c->mask = c->alibi = c->sinks = c->lengths = c->query_lengths = NULL;
    c->out = c->lse = c->weights = c->stats = c->unrounded = NULL;
    c->a.mask.m.data = c->a.alibi.m.data = c->a.sinks.m.data = c->a.key_lengths.m.data = NULL;
    c->a.lse.m.data = c->a.weights.m.data = c->a.stats.m.data = c->a.query_lengths.m.data = NULL;
    c->a.softcap = c->a.dropout_p = 0;
    c->a.seed = 0;
    c->a.first_head = 0;
    c->a.watch = NULL;
    c->a.block_masks = c->block_masks;
    c->a.block_mask_count = 0;
    c->tables = NULL;
}

int sa_call_read_options(sa_call *c, PyObject *const *values) {
    return read_scalars(c, values) < 0 || read_options(c, values) < 0 ? -1 : 0;
}

int sa_call_read(sa_call *c, PyObject *module, PyObject *const *values) {
    sa_call_start(c, module);
    return read_flag(values[SA_ARG_ENABLE_GQA], "enable_gqa", &c->enable_gqa) < 0 || read_inputs(c, values) < 0 ||
                   sa_call_read_options(c, values) < 0
               ? -1
           : sa_given(values[SA_ARG_BLOCK_MASK]) ? sa_call_read_block_mask(c, values[SA_ARG_BLOCK_MASK])
                                                 : 0;
}

int sa_call_read_fixed_seed(sa_call *c, PyObject *rng) {
    if (c->a.dropout_p > 0 && (!sa_given(rng) || PyObject_HasAttrString(rng, "integers"))) {
        PyErr_Format(PyExc_TypeError,
                     "with dropout_p > 0, rng must be an int here, the same forward and backward, got %s: another draw "
                     "would drop other weights",
                     rng == NULL ? "None" : Py_TYPE(rng)->tp_name);
        return -1;
    }
    return sa_call_read_seed(c, rng);
}

int sa_call_read_seed(sa_call *c, PyObject *rng) { return read_seed(rng, c->a.dropout_p > 0, &c->a.seed); }

PyArrayObject *sa_call_bf16_example(const sa_call *c) {
    return c->a.query.m.dtype == SA_BF16 ? c->query : c->a.key.m.dtype == SA_BF16 ? c->key : c->value;
}

int sa_read_float_array(const sa_state *state, PyObject *value, const char *name, int ndim, const npy_intp *shape,
                        PyArrayObject **array, sa_dtype *dtype) {
    if ((*array = sa_as_array(state, value, name, SA_FLOATS, dtype)) == NULL) {
        return -1;
    }
    if (sa_is_integer(*dtype)) {
        PyErr_Format(PyExc_TypeError, "%s must have a floating dtype, as the forward call's result has, got %s", name,
                     sa_dtype_name(*dtype));
        return -1;
    }
    return sa_check_shape(name, *array, ndim, shape);
}

int sa_read_gradient(const sa_call *c, PyObject *value, const char *name, const char *of, sa_dtype of_dtype, int ndim,
                     const npy_intp *shape, PyArrayObject **array, sa_dtype *dtype) {
    if (sa_read_float_array(c->state, value, name, ndim, shape, array, dtype) < 0) {
        return -1;
    }
    if (*dtype == SA_F64 && !c->a.f64) {
        PyErr_Format(PyExc_TypeError, "%s has dtype float64, but %s has dtype %s: it would be narrowed", name, of,
                     sa_dtype_name(of_dtype));
        return -1;
    }
    return 0;
}

int sa_read_statistics(sa_call *c, PyObject *value, int ndim, const npy_intp *shape) {
    const sa_dtype computes = c->a.f64 ? SA_F64 : SA_F32;
    sa_dtype dtype;
    if (sa_read_float_array(c->state, value, "statistics", ndim, shape, &c->stats, &dtype) < 0) {
        return -1;
    }
    if (dtype != computes || !PyArray_ISCARRAY_RO(c->stats)) {
        PyErr_Format(PyExc_TypeError, "statistics must be what the forward call returned, a C-contiguous %s array, got %s%s",
                     sa_dtype_name(computes), dtype != computes ? "" : "other strides or byte order of ", sa_dtype_name(dtype));
        return -1;
    }
    sa_fill_tensor(&c->a.stats, c->stats, dtype, c->a.n_lead, 2);
    return 0;
}

int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape) {
    bool fits = PyArray_NDIM(array) == ndim;
    for (int axis = 0; fits && axis < ndim; ++axis) {
        fits = PyArray_DIM(array, axis) == shape[axis];
    }
    if (!fits) {
        PyObject *wanted = PyArray_IntTupleFromIntp(ndim, shape), *got = sa_shape_of(array);
        if (wanted != NULL && got != NULL) {
            PyErr_Format(PyExc_ValueError, "%s must have shape %R, got %R", name, wanted, got);
        }
        Py_XDECREF(wanted);
        Py_XDECREF(got);
        return -1;
    }
    return 0;
}
