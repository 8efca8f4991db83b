/* softmax, log_softmax, layer_norm, rms_norm, gelu and apply_rotary_emb as Python calls them, and the gradients that
 * selfattn/functional/rowops.py makes pullbacks of: checks, the output, the run.
 * Nothing is computed before everything has been checked. */
#include "python/rowops.h"

#include <float.h>

#include "drivers/rowops.h"
#include "python/arrays.h"
#include "python/run.h"
#include "python/scalars.h"

/* Elements below which the GIL is kept. */
#define SA_SMALL_ELEMENTS 2048

typedef struct {
    PyArrayObject *array[SA_ROW_ARRAYS]; /* owned; the output is one of them */
    PyArrayObject *dweight, *dbias;      /* owned */
    PyObject *shape;                     /* owned: normalized_shape as a tuple */
    sa_dtype result;
    sa_row_call c;
    sa_row_plan plan;
} call;

static void start(call *k, sa_row_kind kind) {
    k->c.kind = kind;
    k->c.eps = 0;
    k->c.dweight.data = k->c.dbias.data = NULL;
    k->dweight = k->dbias = NULL;
    k->shape = NULL;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        k->array[i] = NULL;
        k->c.array[i].data = NULL;
    }
}

static void release(call *k) {
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        Py_XDECREF(k->array[i]);
    }
    Py_XDECREF(k->dweight);
    Py_XDECREF(k->dbias);
    Py_XDECREF(k->shape);
}

/* A ValueError whose format takes an array's name, its shape, and another object (a new reference, taken over). */
static int shape_error(const char *format, const char *name, PyArrayObject *array, PyObject *other) {
    PyObject *shape = sa_shape_of(array);
    if (shape != NULL && other != NULL) {
        PyErr_Format(PyExc_ValueError, format, name, shape, other);
    }
    Py_XDECREF(shape);
    Py_XDECREF(other);
    return -1;
}

/* Takes an array into the call; its dtype takes part in the result's. x comes first. */
static int take(call *k, const sa_state *state, int which, PyObject *value, const char *name) {
    sa_strided *s = &k->c.array[which];
    PyArrayObject *array = sa_as_array(state, value, name, SA_NUMBERS, &s->dtype);
    if (array == NULL) {
        return -1;
    }
    k->array[which] = array;
    k->result = sa_promote(which == SA_ROW_X ? s->dtype : k->result, s->dtype);
    s->data = PyArray_BYTES(array);
    s->swapped = !PyArray_ISNOTSWAPPED(array);
    if (which == SA_ROW_X) {
        k->c.ndim = PyArray_NDIM(array);
        memcpy(k->c.shape, PyArray_SHAPE(array), (size_t)k->c.ndim * sizeof(ptrdiff_t));
    }
    return 0;
}

/* Strides along the axes of x: those of the array's last axes, 0 where it is broadcast. With a gap, the axis before the last
 * two (the heads) is one that the array lacks. */
static void set_strides(call *k, int which, bool gap) {
    PyArrayObject *array = k->array[which];
    int own = PyArray_NDIM(array) - 1;
    for (int axis = k->c.ndim - 1; axis >= 0; --axis) {
        const bool has = own >= 0 && !(gap && axis == k->c.ndim - 3);
        k->c.array[which].stride[axis] = has && PyArray_DIM(array, own) != 1 ? PyArray_STRIDE(array, own) : 0;
        own -= has;
    }
}

static sa_dtype floating(sa_dtype dtype) { return sa_is_integer(dtype) ? SA_F64 : dtype; }

static sa_status compute(void *call_, char *scratch, char *shared) {
    (void)shared; /* behind the scratch: the core divides both */
    call *k = call_;
    sa_row_run(&k->c, &k->plan, scratch);
    return SA_OK;
}

/* Makes the output, runs, and returns it. A gradient has the dtype of x, whatever the result was promoted to. */
static PyObject *run(call *k, PyObject *module) {
    const sa_dtype dtype = k->c.kind >= SA_SOFTMAX_BACKWARD ? floating(k->c.array[SA_ROW_X].dtype) : k->result;
    PyArrayObject *bf16 = NULL;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        bf16 = k->array[i] != NULL && k->c.array[i].dtype == SA_BF16 ? k->array[i] : bf16;
    }
    sa_strided *out = &k->c.array[SA_ROW_OUT];
    k->array[SA_ROW_OUT] = sa_new_array(k->c.ndim, PyArray_SHAPE(k->array[SA_ROW_X]), dtype, bf16, false);
    if (k->array[SA_ROW_OUT] == NULL) {
        return NULL;
    }
    out->data = PyArray_BYTES(k->array[SA_ROW_OUT]);
    out->dtype = dtype;
    out->swapped = false;
    set_strides(k, SA_ROW_X, false);
    set_strides(k, SA_ROW_OUT, false);
    k->c.f64 = k->result == SA_F64;

    const sa_status planned = sa_row_make_plan(&k->c, sa_get_num_threads(), &k->plan);
    if (sa_run_job(module, &(sa_job){.planned = planned,
                                     .threads = k->plan.threads,
                                     .scratch_bytes = k->plan.scratch_bytes,
                                     .shared_bytes = k->plan.shared_bytes,
                                     .small = PyArray_SIZE(k->array[SA_ROW_OUT]) < SA_SMALL_ELEMENTS,
                                     .compute = compute,
                                     .call = k}) < 0) {
        return NULL;
    }
    return Py_NewRef(k->array[SA_ROW_OUT]);
}

/* ---- softmax ------------------------------------------------------------------------------------------------------- */

/* axis as the axis of a row. NumPy's AxisError when there is no such axis; a scalar is taken as one element. */
static int read_axis(call *k, PyObject *value) {
    PyObject *number = value ? sa_as_index(value) : PyLong_FromLong(-1);
    if (number == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "axis must be an int, got %s", Py_TYPE(value)->tp_name);
        }
        return -1;
    }
    const Py_ssize_t axis = PyNumber_AsSsize_t(number, NULL); /* clipped */
    const int ndim = k->c.ndim, most = ndim > 0 ? ndim : 1;
    if (axis < -most || axis >= most) {
        PyObject *module = PyImport_ImportModule("numpy.exceptions"), *shape = sa_shape_of(k->array[SA_ROW_X]);
        PyObject *error = module ? PyObject_GetAttrString(module, "AxisError") : NULL;
        if (error != NULL && shape != NULL) {
            PyErr_Format(error, "axis %R is out of bounds for x of shape %R", number, shape);
        }
        Py_XDECREF(module);
        Py_XDECREF(shape);
        Py_XDECREF(error);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    k->c.first = (int)(axis < 0 ? axis + most : axis);
    k->c.last = ndim > 0 ? k->c.first + 1 : 0;
    return 0;
}

static PyObject *any_softmax(sa_row_kind kind, sa_signature_id id, PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    const sa_state *state = sa_state_of(module);
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    call k;
    start(&k, kind);
    if (sa_parse(state, id, args, nargs, kwnames, values) == 0 && take(&k, state, SA_ROW_X, values[0], "x") == 0 &&
        read_axis(&k, values[1]) == 0) {
        result = run(&k, module);
    }
    release(&k);
    return result;
}

static PyObject *softmax(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return any_softmax(SA_SOFTMAX, SA_SIG_SOFTMAX, module, args, nargs, kwnames);
}

static PyObject *log_softmax(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return any_softmax(SA_LOG_SOFTMAX, SA_SIG_LOG_SOFTMAX, module, args, nargs, kwnames);
}

/* ---- norms --------------------------------------------------------------------------------------------------------- */

/* normalized_shape, an int or a sequence of them, must be the end of x's shape. */
static int read_normalized_shape(call *k, PyObject *value) {
    k->shape = PyIndex_Check(value) ? PyTuple_Pack(1, value) : PySequence_Tuple(value);
    if (k->shape == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "normalized_shape must be an int or a tuple of ints, got %s",
                         Py_TYPE(value)->tp_name);
        }
        return -1;
    }
    const Py_ssize_t axes = PyTuple_GET_SIZE(k->shape);
    bool fits = axes > 0 && axes <= k->c.ndim;
    for (Py_ssize_t i = 0; i < axes; ++i) {
        PyObject *number = sa_as_index(PyTuple_GET_ITEM(k->shape, i));
        if (number == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_TypeError, "normalized_shape must be an int or a tuple of ints, got %R", value);
            }
            return -1;
        }
        const Py_ssize_t n = PyNumber_AsSsize_t(number, NULL); /* clipped: fits nothing */
        Py_DECREF(number);
        fits = fits && k->c.shape[k->c.ndim - axes + i] == n;
    }
    if (!fits) {
        return shape_error("%s of shape %R does not end in normalized_shape %R", "x", k->array[SA_ROW_X], Py_NewRef(k->shape));
    }
    k->c.first = k->c.ndim - (int)axes;
    k->c.last = k->c.ndim;
    return 0;
}

static int read_parameter(call *k, const sa_state *state, int which, PyObject *value, const char *name) {
    if (!sa_given(value)) {
        return 0;
    }
    if (take(k, state, which, value, name) < 0) {
        return -1;
    }
    PyArrayObject *array = k->array[which];
    const int axes = k->c.last - k->c.first;
    if (PyArray_NDIM(array) != axes || !PyArray_CompareLists(PyArray_SHAPE(array), k->c.shape + k->c.first, axes)) {
        return shape_error("%s has shape %R, not normalized_shape %R", name, array, Py_NewRef(k->shape));
    }
    set_strides(k, which, false);
    return 0;
}

static PyObject *layer_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    const sa_state *state = sa_state_of(module);
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    call k;
    start(&k, SA_LAYER_NORM);
    k.c.eps = 1e-5;
    if (sa_parse(state, SA_SIG_LAYER_NORM, args, nargs, kwnames, values) == 0 &&
        take(&k, state, SA_ROW_X, values[0], "x") == 0 && read_normalized_shape(&k, values[1]) == 0 &&
        read_parameter(&k, state, SA_ROW_WEIGHT, values[2], "weight") == 0 &&
        read_parameter(&k, state, SA_ROW_BIAS, values[3], "bias") == 0 &&
        (values[4] == NULL || sa_read_real(values[4], "eps", &k.c.eps) == 0)) {
        result = run(&k, module);
    }
    release(&k);
    return result;
}

static PyObject *rms_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    const sa_state *state = sa_state_of(module);
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    call k;
    start(&k, SA_RMS_NORM);
    if (sa_parse(state, SA_SIG_RMS_NORM, args, nargs, kwnames, values) == 0 && take(&k, state, SA_ROW_X, values[0], "x") == 0 &&
        read_normalized_shape(&k, values[1]) == 0 && read_parameter(&k, state, SA_ROW_WEIGHT, values[2], "weight") == 0 &&
        (!sa_given(values[3]) || sa_read_real(values[3], "eps", &k.c.eps) == 0)) {
        if (!sa_given(values[3])) {
            k.c.eps = k.result == SA_F64 ? DBL_EPSILON : FLT_EPSILON;
        }
        result = run(&k, module);
    }
    release(&k);
    return result;
}

/* ---- gelu ---------------------------------------------------------------------------------------------------------- */

static int read_approximate(call *k, PyObject *value) {
    const bool text = value == NULL || PyUnicode_Check(value);
    if (text && value != NULL && PyUnicode_CompareWithASCIIString(value, "tanh") == 0) {
        k->c.kind = SA_GELU_TANH;
    } else if (!text || (value != NULL && PyUnicode_CompareWithASCIIString(value, "none") != 0)) {
        PyErr_Format(text ? PyExc_ValueError : PyExc_TypeError, "approximate must be 'none' or 'tanh', got %R", value);
        return -1;
    }
    return 0;
}

static PyObject *gelu(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    const sa_state *state = sa_state_of(module);
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    call k;
    start(&k, SA_GELU);
    k.c.first = k.c.last = 0;
    if (sa_parse(state, SA_SIG_GELU, args, nargs, kwnames, values) == 0 && take(&k, state, SA_ROW_X, values[0], "x") == 0 &&
        read_approximate(&k, values[1]) == 0) {
        result = run(&k, module);
    }
    release(&k);
    return result;
}

/* ---- rotary embeddings --------------------------------------------------------------------------------------------- */

/* A table (…, L, D/2). With one axis less than x, and three or more, it lacks the head axis. */
static int read_table(call *k, const sa_state *state, int which, PyObject *value, const char *name) {
    if (take(k, state, which, value, name) < 0) {
        return -1;
    }
    PyArrayObject *table = k->array[which];
    const int ndim = k->c.ndim, own_ndim = PyArray_NDIM(table);
    const bool gap = own_ndim == ndim - 1 && own_ndim >= 3;
    npy_intp half[NPY_MAXDIMS];
    memcpy(half, k->c.shape, (size_t)ndim * sizeof half[0]);
    half[ndim - 1] /= 2;
    bool fits = own_ndim <= ndim;
    for (int own = own_ndim - 1, axis = ndim - 1; own >= 0 && fits; --own, --axis) {
        axis -= gap && axis == ndim - 3;
        fits = PyArray_DIM(table, own) == 1 || PyArray_DIM(table, own) == half[axis];
    }
    if (!fits && gap) { /* never read as NumPy would instead: what a table means must not depend on which sizes are equal */
        half[ndim - 3] = half[ndim - 2];
        half[ndim - 2] = half[ndim - 1];
        return shape_error("%s of shape %R, one axis less than x and so without a head axis, does not broadcast to "
                           "(..., L, D / 2) = %R; a table that differs between heads needs all axes of x",
                           name, table, PyArray_IntTupleFromIntp(ndim - 1, half));
    }
    if (!fits) {
        return shape_error("%s of shape %R does not broadcast to (..., L, D / 2) = %R", name, table,
                           PyArray_IntTupleFromIntp(ndim, half));
    }
    set_strides(k, which, gap);
    return 0;
}

static PyObject *apply_rotary_emb(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    const sa_state *state = sa_state_of(module);
    PyObject *values[SA_MAX_PARAMETERS], *result = NULL;
    call k;
    start(&k, SA_ROTARY);
    if (sa_parse(state, SA_SIG_ROTARY, args, nargs, kwnames, values) < 0 || take(&k, state, SA_ROW_X, values[0], "x") < 0) {
        goto fail;
    }
    if (k.c.ndim < 2 || k.c.shape[k.c.ndim - 1] % 2 != 0) {
        shape_error("%s has shape %R, not %U", "x", k.array[SA_ROW_X], PyUnicode_FromString("(..., L, D) with an even D"));
        goto fail;
    }
    const int interleaved = values[3] == NULL ? 0 : PyObject_IsTrue(values[3]);
    if (interleaved < 0 || read_table(&k, state, SA_ROW_COS, values[1], "cos") < 0 ||
        read_table(&k, state, SA_ROW_SIN, values[2], "sin") < 0) {
        goto fail;
    }
    k.c.kind = interleaved ? SA_ROTARY_INTERLEAVED : SA_ROTARY;
    k.c.first = k.c.ndim - 1;
    k.c.last = k.c.ndim;
    result = run(&k, module);
fail:
    release(&k);
    return result;
}

/* ---- gradients ----------------------------------------------------------------------------------------------------- */

/* x and dy, which has its shape: what every gradient starts with. dy's dtype has no say in what computes. */
static int take_both(call *k, const sa_state *state, PyObject *const *args) {
    if (take(k, state, SA_ROW_X, args[0], "x") < 0) {
        return -1;
    }
    const sa_dtype result = k->result;
    if (take(k, state, SA_ROW_DY, args[1], "dy") < 0) {
        return -1;
    }
    k->result = result;
    PyArrayObject *dy = k->array[SA_ROW_DY];
    if (PyArray_NDIM(dy) != k->c.ndim || !PyArray_CompareLists(PyArray_SHAPE(dy), k->c.shape, k->c.ndim)) {
        return shape_error("%s has shape %R; the result that it is the gradient of has %R", "dy", dy,
                           sa_shape_of(k->array[SA_ROW_X]));
    }
    set_strides(k, SA_ROW_DY, false);
    return 0;
}

static bool has_arguments(const char *name, Py_ssize_t nargs, Py_ssize_t wanted) {
    if (nargs != wanted) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, wanted, nargs);
    }
    return nargs == wanted;
}

static PyObject *softmax_gradient(sa_row_kind kind, PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *result = NULL;
    call k;
    start(&k, kind);
    if (has_arguments("_softmax_backward", nargs, 3) && take_both(&k, sa_state_of(module), args) == 0 &&
        read_axis(&k, args[2]) == 0) {
        result = run(&k, module);
    }
    release(&k);
    return result;
}

static PyObject *softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return softmax_gradient(SA_SOFTMAX_BACKWARD, module, args, nargs);
}

static PyObject *log_softmax_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return softmax_gradient(SA_LOG_SOFTMAX_BACKWARD, module, args, nargs);
}

/* A zeroed gradient like the weight or bias, if there is one. */
static int make_gradient(const call *k, int which, PyArrayObject **owned, sa_row_gradient *to) {
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

/* (x, dy, normalized_shape, weight, bias, eps) to (dx, dweight, dbias), None for a parameter that is None. */
static PyObject *norm_gradient(sa_row_kind kind, PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const sa_state *state = sa_state_of(module);
    PyObject *dx = NULL, *result = NULL;
    call k;
    start(&k, kind);
    if (has_arguments("_norm_backward", nargs, 6) && take_both(&k, state, args) == 0 &&
        read_normalized_shape(&k, args[2]) == 0 && read_parameter(&k, state, SA_ROW_WEIGHT, args[3], "weight") == 0 &&
        read_parameter(&k, state, SA_ROW_BIAS, args[4], "bias") == 0 &&
        (!sa_given(args[5]) || sa_read_real(args[5], "eps", &k.c.eps) == 0) &&
        make_gradient(&k, SA_ROW_WEIGHT, &k.dweight, &k.c.dweight) == 0 &&
        make_gradient(&k, SA_ROW_BIAS, &k.dbias, &k.c.dbias) == 0) {
        if (!sa_given(args[5])) {
            k.c.eps = k.result == SA_F64 ? DBL_EPSILON : FLT_EPSILON;
        }
        k.c.array[SA_ROW_BIAS].data = NULL; /* its dtype counts, its numbers do not */
        dx = run(&k, module);
    }
    if (dx != NULL) {
        result = PyTuple_Pack(3, dx, k.dweight ? (PyObject *)k.dweight : Py_None, k.dbias ? (PyObject *)k.dbias : Py_None);
        Py_DECREF(dx);
    }
    release(&k);
    return result;
}

static PyObject *layer_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return norm_gradient(SA_LAYER_NORM_BACKWARD, module, args, nargs);
}

static PyObject *rms_norm_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    return norm_gradient(SA_RMS_NORM_BACKWARD, module, args, nargs);
}

static PyObject *gelu_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *result = NULL;
    call k;
    start(&k, SA_GELU);
    k.c.first = k.c.last = 0;
    if (has_arguments("_gelu_backward", nargs, 3) && take_both(&k, sa_state_of(module), args) == 0 &&
        read_approximate(&k, args[2]) == 0) {
        k.c.kind = k.c.kind == SA_GELU_TANH ? SA_GELU_TANH_BACKWARD : SA_GELU_BACKWARD;
        result = run(&k, module);
    }
    release(&k);
    return result;
}

/* ---- documentation; its examples run as doctests ------------------------------------------------------------------- */

#define SA_DTYPES_NOTE                                                                                                         \
    "    float16, bfloat16, float32, float64 or integers (which count as float64); any strides, alignment\n"                   \
    "    and byte order.\n"
#define SA_RETURNS(dtype)                                                                                                      \
    "Returns\n-------\nout : ndarray, the shape of `x`\n    New and C-contiguous, in " dtype ".\n"                             \
    "    16-bit inputs are computed in float32.\n"
#define SA_RAISES(which)                                                                                                       \
    "Raises\n------\nValueError\n    " which "\nTypeError\n"                                                                   \
    "    A boolean, complex, object or long double array, a masked array or a matrix.\n\n"

#define SA_METHOD(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, doc}

/* clang-format off: docstrings, laid out as they print */
PyMethodDef sa_rows_methods[] = {
    SA_METHOD(softmax, "softmax($module, /, x, axis=-1)\n--\n\n"
                       "Turn numbers into positive ones with sum 1 along an axis: ``exp(x) / sum(exp(x))``.\n\n"
                       "Parameters\n----------\nx : array_like\n" SA_DTYPES_NOTE "axis : int, default -1\n\n" SA_RETURNS(
                           "the dtype of `x`") "    A slice that is -inf throughout gives NaN, "
                                               "0/0; attention makes such rows "
                                               "zeros.\n\n" SA_RAISES("``numpy.exceptions.AxisError``: no such "
                                                                      "axis.") "See Also\n--------\nlog_softmax\n\n"
                                                                               "References\n----------\n"
                                                                               ".. [1] J. S. Bridle, "
                                                                               "\"Probabilistic interpretation of "
                                                                               "feedforward classification network "
                                                                               "outputs\",\n"
                                                                               "       1990.\n\n"
                                                                               "Examples\n--------\n>>> import "
                                                                               "selfattn as sa\n>>> sa.softmax([2, "
                                                                               "4, 4]).round(5)\n"
                                                                               "array([0.06338, 0.46831, "
                                                                               "0.46831])\n"),
    SA_METHOD(log_softmax, "log_softmax($module, /, x, axis=-1)\n--\n\n"
                           "Take the log of `softmax`, ``x - log(sum(exp(x)))``, accurate where softmax itself underflows.\n\n"
                           "Parameters\n----------\nx : array_like\n" SA_DTYPES_NOTE "axis : int, default -1\n\n" SA_RETURNS(
                               "the dtype of `x`") "    A slice that is -inf throughout gives "
                                                   "NaN.\n\n" SA_RAISES("``numpy.exceptions.AxisError``: no such "
                                                                        "axis.") "See Also\n--------\nsoftmax\n\n"
                                                                                 "Examples\n--------\n>>> import "
                                                                                 "selfattn as sa\n>>> "
                                                                                 "sa.log_softmax([0.0, -1000.0])\n"
                                                                                 "array([    0., -1000.])\n"),
    SA_METHOD(layer_norm,
              "layer_norm($module, /, x, normalized_shape, weight=None, bias=None, eps=1e-05)\n--\n\n"
              "Shift and scale to mean 0 and variance 1 over the last axes.\n\n"
              "``(x - mean) / sqrt(variance + eps) * weight + bias``, the variance being the biased one.\n\n"
              "Parameters\n----------\nx : array_like, shape (..., *normalized_shape)\n" SA_DTYPES_NOTE
              "normalized_shape : int or tuple of int\n    The last axes of `x`, over which mean and variance are taken.\n"
              "weight, bias : array_like, shape normalized_shape, optional\n    1 and 0 by default.\n"
              "eps : float, default 1e-5\n\n" SA_RETURNS("the dtype to which `x`, `weight` and `bias` promote") "\n" SA_RAISES(
                  "Shapes that do not fit `normalized_shape`.") "See Also\n--------\nrms_norm\n\n"
                                                                "References\n----------\n"
                                                                ".. [1] J. L. Ba, J. R. Kiros and G. E. Hinton, \"Layer "
                                                                "normalization\", 2016, equations 3 and 4.\n\n"
                                                                "Examples\n--------\n>>> import selfattn as sa\n>>> "
                                                                "sa.layer_norm([[1.0, 2.0, 3.0]], 3).round(4)\n"
                                                                "array([[-1.2247,  0.    ,  1.2247]])\n"),
    SA_METHOD(rms_norm,
              "rms_norm($module, /, x, normalized_shape, weight=None, eps=None)\n--\n\n"
              "Scale to mean square 1 over the last axes: ``x / sqrt(mean(x**2) + eps) * weight``.\n\n"
              "Parameters\n----------\nx : array_like, shape (..., *normalized_shape)\n" SA_DTYPES_NOTE
              "normalized_shape : int or tuple of int\n    The last axes of `x`, over which the mean is taken.\n"
              "weight : array_like, shape normalized_shape, optional\n    1 by default.\n"
              "eps : float, optional\n    By default the machine epsilon of the precision that is computed in: float64's for\n"
              "    float64, else float32's.\n\n" SA_RETURNS("the dtype to which `x` and `weight` promote") "\n" SA_RAISES(
                  "Shapes that do not fit `normalized_shape`.") "See Also\n--------\nlayer_norm\n\n"
                                                                "References\n----------\n"
                                                                ".. [1] B. Zhang and R. Sennrich, \"Root mean square layer "
                                                                "normalization\", 2019, equation 4.\n\n"
                                                                "Examples\n--------\n>>> import selfattn as sa\n>>> "
                                                                "sa.rms_norm([[3.0, 4.0]], 2).round(4)\n"
                                                                "array([[0.8485, 1.1314]])\n"),
    SA_METHOD(
        gelu,
        "gelu($module, /, x, approximate='none')\n--\n\n"
        "Multiply x by Phi(x), the distribution function of the standard normal: a smooth ``max(x, 0)``.\n\n"
        "Parameters\n----------\nx : array_like\n" SA_DTYPES_NOTE "approximate : {'none', 'tanh'}\n"
        "    'tanh': ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.\n\n" SA_RETURNS(
            "the dtype of `x`") "    Both tails keep their relative accuracy.\n\n" SA_RAISES("Another `approximate`.") "Referen"
                                                                                                                       "ces\n--"
                                                                                                                       "-------"
                                                                                                                       "-\n"
                                                                                                                       ".. [1] "
                                                                                                                       "D. "
                                                                                                                       "Hendryc"
                                                                                                                       "ks and "
                                                                                                                       "K. "
                                                                                                                       "Gimpel,"
                                                                                                                       " \"Gaus"
                                                                                                                       "sian "
                                                                                                                       "error "
                                                                                                                       "linear "
                                                                                                                       "units\""
                                                                                                                       ", "
                                                                                                                       "2016, "
                                                                                                                       "section"
                                                                                                                       " 2.\n\n"
                                                                                                                       "Example"
                                                                                                                       "s\n----"
                                                                                                                       "----\n>"
                                                                                                                       ">> "
                                                                                                                       "import "
                                                                                                                       "selfatt"
                                                                                                                       "n as "
                                                                                                                       "sa\n>>>"
                                                                                                                       " sa."
                                                                                                                       "gelu([-"
                                                                                                                       "1.0, "
                                                                                                                       "0.0, "
                                                                                                                       "1.0])."
                                                                                                                       "round("
                                                                                                                       "4)\n"
                                                                                                                       "array(["
                                                                                                                       "-0."
                                                                                                                       "1587,  "
                                                                                                                       "0.    "
                                                                                                                       ",  "
                                                                                                                       "0.8413]"
                                                                                                                       ")\n"),
    SA_METHOD(apply_rotary_emb,
              "apply_rotary_emb($module, /, x, cos, sin, interleaved=False)\n--\n\n"
              "Rotate pairs of columns by angles that grow with the position, so that dot products tell distances.\n\n"
              "The pair (a, b) becomes ``(a * cos - b * sin, a * sin + b * cos)``.\n\n"
              "Parameters\n----------\nx : array_like, shape (..., L, D), D even\n"
              "    Queries or keys, heads last among the leading dims: (B, H, L, D) for instance.\n" SA_DTYPES_NOTE
              "cos, sin : array_like, shape (L, D / 2) or (..., L, D / 2)\n"
              "    Tables of the angles. With one axis less than `x`, and three or more, they have no head axis,\n"
              "    (B, L, D / 2), and are the same for every head. Else they broadcast to (..., L, D / 2).\n"
              "interleaved : bool, default False\n"
              "    Pairs are neighbouring columns (2 n, 2 n + 1); by default column n goes with column n + D / "
              "2.\n\n" SA_RETURNS("the dtype to which `x`, `cos` and `sin` promote") "\n" SA_RAISES(
                  "An odd D, or tables that do not fit `x`.") "References\n----------\n"
                                                              ".. [1] J. Su et al., \"RoFormer: enhanced transformer with "
                                                              "rotary position embedding\", 2021,\n"
                                                              "       equation 34 (interleaved pairs).\n\n"
                                                              "Examples\n--------\nA quarter turn takes (1, 0) to (0, "
                                                              "1):\n\n>>> import selfattn as sa\n"
                                                              ">>> sa.apply_rotary_emb([[1.0, 0.0]], cos=[[0.0]], "
                                                              "sin=[[1.0]])\narray([[0., 1.]])\n"),
    {"_softmax_backward", (PyCFunction)(void (*)(void))softmax_backward, METH_FASTCALL, NULL},
    {"_log_softmax_backward", (PyCFunction)(void (*)(void))log_softmax_backward, METH_FASTCALL, NULL},
    {"_layer_norm_backward", (PyCFunction)(void (*)(void))layer_norm_backward, METH_FASTCALL, NULL},
    {"_rms_norm_backward", (PyCFunction)(void (*)(void))rms_norm_backward, METH_FASTCALL, NULL},
    {"_gelu_backward", (PyCFunction)(void (*)(void))gelu_backward, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
/* clang-format on */
