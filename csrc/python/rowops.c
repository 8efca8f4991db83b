/* The row operations and their gradients: parameters, outputs, runs. Nothing is computed before everything is checked.
 * There are also two functions over whole arrays: rounding to 16 bits, for functional/_gradients.py, and the checksum
 * of arrays. */
#include "python/binding.h"

#include <float.h>

#include "drivers/common.h"
#include "drivers/rowops.h"
#include "python/run.h"

typedef struct {
    PyArrayObject *array[SA_ROW_ARRAYS]; /* owned; one is the output */
    PyArrayObject *dweight, *dbias;      /* owned */
    sa_dtype result;
    bool has_eps;
    sa_row_call c;
    sa_row_plan plan;
} row_call;

static void start(row_call *k, int kind) {
    k->c.kind = (sa_row_kind)kind;
    k->c.eps = 0;
    k->c.dweight.data = k->c.dbias.data = NULL;
    k->dweight = k->dbias = NULL;
    k->has_eps = false;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        k->array[i] = NULL;
        k->c.array[i].data = NULL;
    }
}

static void release(row_call *k) {
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        Py_XDECREF((PyObject *)k->array[i]);
    }
    Py_XDECREF((PyObject *)k->dweight);
    Py_XDECREF((PyObject *)k->dbias);
}

/* ---- arrays ------------------------------------------------------------------------------------------------------ */

/* Takes an array; x comes first. The arrays' dtypes determine the result's. */
static int take(row_call *k, sa_strided *s, PyObject *value, const char *name) {
    const int which = (int)(s - k->c.array);
    PyArrayObject *array = sa_as_array(value, name, SA_NUMBERS, &s->dtype);
    if (array == NULL) {
        return -1;
    }
    k->array[which] = array;
    k->result = which == SA_ROW_X ? sa_promote(s->dtype, s->dtype) : sa_promote(k->result, s->dtype);
    s->data = PyArray_BYTES(array);
    s->swapped = !PyArray_ISNOTSWAPPED(array);
    return 0;
}

/* Sets strides along x's last axes. With a gap the array does not have the heads' axis. */
static void set_strides(row_call *k, int which, bool gap) {
    PyArrayObject *array = k->array[which];
    int own = PyArray_NDIM(array) - 1;
    for (int axis = k->c.ndim - 1; axis >= 0; --axis) {
        const bool has = own >= 0 && !(gap && axis == k->c.ndim - 3);
        k->c.array[which].stride[axis] = has && PyArray_DIM(array, own) != 1 ? PyArray_STRIDE(array, own) : 0;
        own -= has;
    }
}

/* Reads x, whose rows are the last axis, unless read_axis or read_normalized_shape chooses other axes. */
static int read_x(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    if (take(k, to, value, name) < 0) {
        return -1;
    }
    const bool elementwise = SA_IS_ELEMENTWISE(k->c.kind);
    const int ndim = k->c.ndim = PyArray_NDIM(k->array[SA_ROW_X]);
    for (int axis = 0; axis < ndim; ++axis) {
        k->c.shape[axis] = PyArray_DIM(k->array[SA_ROW_X], axis);
    }
    k->c.first = elementwise || ndim == 0 ? 0 : ndim - 1;
    k->c.last = elementwise ? 0 : ndim;
    return 0;
}

static int read_dy(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    const sa_dtype result = k->result;
    if (take(k, to, value, name) < 0) {
        return -1;
    }
    k->result = result; /* the dtype of this array does not count */
    PyArrayObject *dy = k->array[SA_ROW_DY];
    if (PyArray_NDIM(dy) != k->c.ndim || !PyArray_CompareLists(PyArray_SHAPE(dy), k->c.shape, k->c.ndim)) {
        return sa_error(PyExc_ValueError, "dy has shape %s; the result that it is the gradient of has %s",
                        sa_shape_of(dy), sa_shape_of(k->array[SA_ROW_X]));
    }
    set_strides(k, SA_ROW_DY, false);
    return 0;
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

static int read_axis(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    PyObject *number = sa_as_index(value);
    if (number == NULL) {
        return PyErr_Occurred() ? -1
                                : sa_error(PyExc_TypeError, "%s must be an int, got %s", name, sa_type_name(value));
    }
    const Py_ssize_t axis = PyNumber_AsSsize_t(number, NULL); /* clipped to the range of Py_ssize_t */
    const int most = k->c.ndim > 0 ? k->c.ndim : 1;
    const bool fits = axis >= -most && axis < most;
    if (fits) {
        int *first = to;
        *first = (int)(axis < 0 ? axis + most : axis);
        k->c.last = k->c.ndim > 0 ? *first + 1 : 0;
    } else {
        PyObject *error = sa_imported("numpy.exceptions", "AxisError");
        if (error != NULL) {
            sa_error(error, "axis %R is out of bounds for x of shape %s", number, sa_shape_of(k->array[SA_ROW_X]));
            Py_DECREF(error);
        }
    }
    Py_DECREF(number);
    return fits ? 0 : -1;
}

static int read_normalized_shape(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    PyObject *shape = PyIndex_Check(value) ? PyTuple_Pack(1, value) : PySequence_Tuple(value);
    const Py_ssize_t axes = shape ? PyTuple_GET_SIZE(shape) : 0;
    bool ints = shape != NULL, fits = axes > 0 && axes <= k->c.ndim;
    for (Py_ssize_t i = 0; ints && i < axes; ++i) {
        PyObject *number = sa_as_index(PyTuple_GET_ITEM(shape, i));
        ints = number != NULL;
        /* a number is clipped to the range of Py_ssize_t */
        fits = fits && ints && k->c.shape[k->c.ndim - axes + i] == PyNumber_AsSsize_t(number, NULL);
        Py_XDECREF(number);
    }
    if (!ints && (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear();
        sa_error(PyExc_TypeError, "%s must be an int or a tuple of ints, got %R", name, value);
    } else if (ints && !fits) {
        sa_error(PyExc_ValueError, "x of shape %s does not end in %s %R", sa_shape_of(k->array[SA_ROW_X]), name, shape);
    }
    Py_XDECREF(shape);
    *(int *)to = k->c.ndim - (int)axes;
    return ints && fits ? 0 : -1;
}

static int read_parameter(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    const int which = (int)((sa_strided *)to - k->c.array);
    if (take(k, to, value, name) < 0) {
        return -1;
    }
    PyArrayObject *array = k->array[which];
    const int axes = k->c.last - k->c.first;
    if (PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_SHAPE(array), k->c.shape + k->c.first, axes)) {
        return sa_error(PyExc_ValueError, "%s has shape %s, not normalized_shape %s", name, sa_shape_of(array),
                        sa_shape_text(axes, PyArray_SHAPE(k->array[SA_ROW_X]) + k->c.first));
    }
    set_strides(k, which, false);
    return 0;
}

static int read_eps(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    k->has_eps = true;
    return sa_read_real(call, value, name, to);
}

static int read_approximate(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    sa_row_kind *kind = to;
    const bool text = PyUnicode_Check(value);
    if (text && PyUnicode_CompareWithASCIIString(value, "tanh") == 0) {
        *kind = *kind == SA_GELU ? SA_GELU_TANH : SA_GELU_TANH_BACKWARD;
    } else if (!text || PyUnicode_CompareWithASCIIString(value, "none") != 0) {
        return sa_error(text ? PyExc_ValueError : PyExc_TypeError, "%s must be 'none' or 'tanh', got %R", name, value);
    }
    return 0;
}

/* Reads (…, L, D/2). With three axes or more, but one less than x, the heads' axis is missing. */
static int read_table(void *call, PyObject *value, const char *name, void *to) {
    row_call *k = call;
    const int which = (int)((sa_strided *)to - k->c.array);
    const int ndim = k->c.ndim;
    if (ndim < 2 || k->c.shape[ndim - 1] % 2 != 0) {
        return sa_error(PyExc_ValueError, "x has shape %s, not (..., L, D) with an even D",
                        sa_shape_of(k->array[SA_ROW_X]));
    }
    if (take(k, to, value, name) < 0) {
        return -1;
    }
    PyArrayObject *table = k->array[which];
    const int own_ndim = PyArray_NDIM(table);
    const bool gap = own_ndim == ndim - 1 && own_ndim >= 3;
    npy_intp half[NPY_MAXDIMS];
    memcpy(half, k->c.shape, (size_t)ndim * sizeof half[0]);
    half[ndim - 1] /= 2;
    bool fits = own_ndim <= ndim;
    for (int own = own_ndim - 1, axis = ndim - 1; own >= 0 && fits; --own, --axis) {
        axis -= gap && axis == ndim - 3;
        fits = PyArray_DIM(table, own) == 1 || PyArray_DIM(table, own) == half[axis];
    }
    if (!fits && gap) { /* unlike NumPy, as the meaning must not depend on which sizes are equal */
        half[ndim - 3] = half[ndim - 2];
        half[ndim - 2] = half[ndim - 1];
        return sa_error(PyExc_ValueError,
                        "%s of shape %s, one axis less than x and so without a head axis, does not broadcast to "
                        "(..., L, D / 2) = %s; a table that differs between heads needs all axes of x",
                        name, sa_shape_of(table), sa_shape_text(ndim - 1, half));
    }
    if (!fits) {
        return sa_error(PyExc_ValueError, "%s of shape %s does not broadcast to (..., L, D / 2) = %s", name,
                        sa_shape_of(table), sa_shape_text(ndim, half));
    }
    set_strides(k, which, gap);
    return 0;
}

static int read_interleaved(void *call, PyObject *value, const char *name, void *to) {
    (void)call, (void)name;
    const int interleaved = PyObject_IsTrue(value);
    *(sa_row_kind *)to = interleaved > 0 ? SA_ROTARY_INTERLEAVED : SA_ROTARY;
    return interleaved < 0 ? -1 : 0;
}

/* ---- the table, where the number of a function is its kind ------------------------------------------------------- */

#define AT(field) offsetof(row_call, field)
#define BIT(kind) ((uint32_t)1 << (kind))
#define SOFTMAXES (BIT(SA_SOFTMAX) | BIT(SA_LOG_SOFTMAX))
#define SOFTMAX_GRADIENTS (BIT(SA_SOFTMAX_BACKWARD) | BIT(SA_LOG_SOFTMAX_BACKWARD))
#define NORM_GRADIENTS (BIT(SA_LAYER_NORM_BACKWARD) | BIT(SA_RMS_NORM_BACKWARD))
#define NORMS (BIT(SA_LAYER_NORM) | BIT(SA_RMS_NORM) | NORM_GRADIENTS)
#define GRADIENTS (NORM_GRADIENTS | SOFTMAX_GRADIENTS | BIT(SA_GELU_BACKWARD))

/* Gradients of softmax and GELU have no defaults. */
static const sa_parameter parameters[] = {
    {"x", "", SOFTMAXES | NORMS | BIT(SA_GELU) | BIT(SA_ROTARY) | GRADIENTS, read_x, AT(c.array[SA_ROW_X])},
    {"dy", "", GRADIENTS, read_dy, AT(c.array[SA_ROW_DY])},
    {"axis", "=-1", SOFTMAXES, read_axis, AT(c.first)},
    {"axis", "", SOFTMAX_GRADIENTS, read_axis, AT(c.first)},
    {"normalized_shape", "", NORMS, read_normalized_shape, AT(c.first)},
    {"weight", "=None", NORMS, read_parameter, AT(c.array[SA_ROW_WEIGHT])},
    {"bias", "=None", NORMS & ~BIT(SA_RMS_NORM), read_parameter, AT(c.array[SA_ROW_BIAS])},
    {"eps", "=1e-05", BIT(SA_LAYER_NORM), read_eps, AT(c.eps)},
    {"eps", "=None", NORMS & ~BIT(SA_LAYER_NORM), read_eps, AT(c.eps)},
    {"approximate", "='none'", BIT(SA_GELU), read_approximate, AT(c.kind)},
    {"approximate", "", BIT(SA_GELU_BACKWARD), read_approximate, AT(c.kind)},
    {"cos", "", BIT(SA_ROTARY), read_table, AT(c.array[SA_ROW_COS])},
    {"sin", "", BIT(SA_ROTARY), read_table, AT(c.array[SA_ROW_SIN])},
    {"interleaved", "=False", BIT(SA_ROTARY), read_interleaved, AT(c.kind)},
    {NULL, NULL, 0, NULL, 0},
};

/* ---- outputs and the run ----------------------------------------------------------------------------------------- */

static sa_dtype floating(sa_dtype dtype) { return sa_is_integer(dtype) ? SA_F64 : dtype; }

/* Makes the output. A gradient has x's dtype. Where each element is computed alone, the output has x's order of axes in
 * memory, as NumPy's functions of elements have. */
static int make_output(row_call *k) {
    sa_strided *out = &k->c.array[SA_ROW_OUT];
    PyArrayObject *like_bf16 = NULL;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        like_bf16 = k->array[i] != NULL && k->c.array[i].dtype == SA_BF16 ? k->array[i] : like_bf16;
    }
    out->dtype = k->c.kind >= SA_SOFTMAX_BACKWARD ? floating(k->c.array[SA_ROW_X].dtype) : k->result;
    out->swapped = false;
    PyArrayObject *x = k->array[SA_ROW_X];
    k->array[SA_ROW_OUT] = SA_IS_ELEMENTWISE(k->c.kind)
                               ? sa_new_array_like(x, out->dtype, like_bf16)
                               : sa_new_array(k->c.ndim, PyArray_SHAPE(x), out->dtype, like_bf16, false);
    if (k->array[SA_ROW_OUT] == NULL) {
        return -1;
    }
    out->data = PyArray_BYTES(k->array[SA_ROW_OUT]);
    set_strides(k, SA_ROW_X, false);
    set_strides(k, SA_ROW_OUT, false);
    return 0;
}

/* Makes a zeroed gradient. */
static int make_gradient(const row_call *k, int which, PyArrayObject **owned, sa_row_gradient *to) {
    PyArrayObject *like = k->array[which];
    if (like == NULL) {
        return 0;
    }
    to->dtype = floating(k->c.array[which].dtype);
    *owned = sa_new_array(PyArray_NDIM(like), PyArray_SHAPE(like), to->dtype, like, true);
    if (*owned == NULL) {
        return -1;
    }
    to->data = PyArray_BYTES(*owned);
    return 0;
}

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)shared; /* `shared` follows the scratch */
    row_call *k = call;
    sa_row_run(&k->c, &k->plan, scratch);
    return SA_OK;
}

static int run(row_call *k, PyObject *module) {
    const sa_status planned = sa_row_make_plan(&k->c, sa_get_num_threads(), &k->plan);
    return sa_run_job(module, &(sa_job){.planned = planned,
                                        .threads = k->plan.threads,
                                        .scratch_bytes = k->plan.scratch_bytes,
                                        .shared_bytes = k->plan.shared_bytes,
                                        .small = PyArray_SIZE(k->array[SA_ROW_OUT]) < SA_SMALL_ELEMENTS,
                                        .compute = compute,
                                        .call = k});
}

/* Returns the output, or a norm's (dx, dweight, dbias), with None for parameters that were not given. */
static PyObject *row_function(PyObject *module, int kind, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    sa_parameter_set given;
    row_call k;
    start(&k, kind);
    const sa_family_state *family = &sa_state_of(module)->rows;
    if (sa_sort_arguments(family, kind, args, nargs, kwnames, values, &given) < 0 ||
        sa_read_arguments(family, &k, values, given) < 0) {
        goto done;
    }
    k.c.f64 = k.result == SA_F64;
    if (!k.has_eps) {
        k.c.eps = kind == SA_LAYER_NORM ? 1e-5 : k.c.f64 ? DBL_EPSILON : FLT_EPSILON;
    }
    const bool of_norm = kind == SA_LAYER_NORM_BACKWARD || kind == SA_RMS_NORM_BACKWARD;
    if (of_norm && (make_gradient(&k, SA_ROW_WEIGHT, &k.dweight, &k.c.dweight) < 0 ||
                    make_gradient(&k, SA_ROW_BIAS, &k.dbias, &k.c.dbias) < 0)) {
        goto done;
    }
    if (of_norm) {
        k.c.array[SA_ROW_BIAS].data = NULL; /* only the bias's dtype was needed */
    }
    if (make_output(&k) < 0 || run(&k, module) < 0) {
        goto done;
    }
    PyObject *const out = (PyObject *)k.array[SA_ROW_OUT];
    result = of_norm ? PyTuple_Pack(3, out, k.dweight ? (PyObject *)k.dweight : Py_None,
                                    k.dbias ? (PyObject *)k.dbias : Py_None)
                     : Py_NewRef(out);
done:
    release(&k);
    return result;
}

/* ---- whole arrays ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyArrayObject *from, *to;
    Py_ssize_t threads; /* 0: the number that is set */
} narrow_call;

static sa_status compute_narrow(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    const narrow_call *n = call;
    const int threads = n->threads < 1 ? sa_get_num_threads() : n->threads < INT_MAX ? (int)n->threads : INT_MAX;
    sa_narrow(PyArray_DATA(n->from), PyArray_SIZE(n->from), PyArray_TYPE(n->to) == NPY_FLOAT16 ? SA_F16 : SA_BF16,
              PyArray_DATA(n->to), threads);
    return SA_OK;
}

static PyObject *narrow(PyObject *module, PyObject *args) {
    narrow_call n;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyArray_Type, &n.from, &PyArray_Type, &n.to, &n.threads)) {
        return NULL;
    }
    if (!sa_is_plain((PyObject *)n.from, NPY_FLOAT32, -1) || !PyArray_ISCARRAY(n.to) || PyArray_ITEMSIZE(n.to) != 2 ||
        PyArray_SIZE(n.from) != PyArray_SIZE(n.to)) {
        return PyErr_Format(PyExc_TypeError,
                            "expected float32 and an array of 16 bits of as many elements, both contiguous");
    }
    return sa_run_job(module, &(sa_job){.compute = compute_narrow, .call = &n}) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Keeps the GIL, as the caller takes far longer with the parameters. */
static PyObject *checksum(PyObject *module, PyObject *arrays) {
    (void)module;
    if (!PyTuple_Check(arrays)) {
        return PyErr_Format(PyExc_TypeError, "expected a tuple of arrays, not %s", sa_type_name(arrays));
    }
    uint64_t h = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); ++i) {
        PyObject *item = PyTuple_GET_ITEM(arrays, i);
        if (!PyArray_Check(item) || PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)item))) {
            return PyErr_Format(PyExc_TypeError, "expected arrays of numbers, not %s", sa_type_name(item));
        }
        PyArrayObject *array = (PyArrayObject *)item;
        if (PyArray_IS_C_CONTIGUOUS(array) || PyArray_IS_F_CONTIGUOUS(array)) {
            Py_INCREF(item);
        } else if ((array = (PyArrayObject *)PyArray_NewCopy(array, NPY_CORDER)) == NULL) {
            return NULL;
        }
        h = sa_kernels_active()->checksum(h + 1, PyArray_DATA(array), (size_t)PyArray_NBYTES(array));
        Py_DECREF(array);
    }
    return PyLong_FromUnsignedLongLong(h);
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

#define FUNCTIONS(F)                                                                                                   \
    F(softmax, SA_SOFTMAX, 2)                                                                                          \
    F(log_softmax, SA_LOG_SOFTMAX, 2)                                                                                  \
    F(layer_norm, SA_LAYER_NORM, 5)                                                                                    \
    F(rms_norm, SA_RMS_NORM, 4)                                                                                        \
    F(gelu, SA_GELU, 2)                                                                                                \
    F(apply_rotary_emb, SA_ROTARY, 4)                                                                                  \
    F(_softmax_backward, SA_SOFTMAX_BACKWARD, 3)                                                                       \
    F(_log_softmax_backward, SA_LOG_SOFTMAX_BACKWARD, 3)                                                               \
    F(_layer_norm_backward, SA_LAYER_NORM_BACKWARD, 6)                                                                 \
    F(_rms_norm_backward, SA_RMS_NORM_BACKWARD, 6)                                                                     \
    F(_gelu_backward, SA_GELU_BACKWARD, 3)

#define ENTRY(name, kind, positional) SA_FUNCTION(call_##name, row_function, kind)
#define SIGNATURE(name, kind, positional) [kind] = {#name, positional},
#define METHOD(name, kind, positional) SA_METHOD(#name, call_##name, NULL),

FUNCTIONS(ENTRY)
const sa_family sa_row_family = {parameters, {FUNCTIONS(SIGNATURE)}};
PyMethodDef sa_rows_methods[] = {
    FUNCTIONS(METHOD){"_narrow", narrow, METH_VARARGS, NULL},
    {"_checksum", checksum, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
