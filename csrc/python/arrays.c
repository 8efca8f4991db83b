/* Owns the way from Python objects to the core's tensors. */
#include "python/arrays.h"

const char *sa_dtype_name(sa_dtype dtype) {
    static const char *const names[SA_DTYPES] = {"float16", "bfloat16", "float32", "float64", "bool",  "int8",  "uint8",
                                                 "int16",   "uint16",   "int32",   "uint32",  "int64", "uint64"};
    return names[dtype];
}

/* Of ml_dtypes: unless that is imported, no such array exists. */
static bool is_bfloat16(PyArray_Descr *descr) {
    PyObject *name = PyUnicode_FromString("ml_dtypes");
    PyObject *module = name ? PyImport_GetModule(name) : NULL;
    PyObject *type = module ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    const bool same = type != NULL && (PyObject *)descr->typeobj == type;
    Py_XDECREF(name);
    Py_XDECREF(module);
    Py_XDECREF(type);
    if (!PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear();
    }
    return same;
}

/* SA_DTYPES for one that is not known, or without memory to tell: then an exception is set. */
static sa_dtype dtype_of(PyArray_Descr *descr) {
    static const sa_dtype integers[9][2] = {
        [1] = {SA_U8, SA_I8}, [2] = {SA_U16, SA_I16}, [4] = {SA_U32, SA_I32}, [8] = {SA_U64, SA_I64}};
    switch (descr->type_num) {
    case NPY_FLOAT: return SA_F32;
    case NPY_DOUBLE: return SA_F64;
    case NPY_HALF: return SA_F16;
    case NPY_BOOL: return SA_BOOL;
    default: break;
    }
    if (PyTypeNum_ISINTEGER(descr->type_num)) {
        return integers[PyDataType_ELSIZE(descr)][PyTypeNum_ISSIGNED(descr->type_num)];
    }
    return PyTypeNum_ISUSERDEF(descr->type_num) && is_bfloat16(descr) ? SA_BF16 : SA_DTYPES;
}

static bool is_of_kind(sa_dtype dtype, sa_kind kind) {
    switch (kind) {
    case SA_INTEGERS: return sa_is_integer(dtype);
    case SA_MASK: return dtype != SA_DTYPES;
    case SA_ANY: return true;
    default: return dtype != SA_DTYPES && dtype != SA_BOOL;
    }
}

PyArrayObject *sa_as_array(const sa_state *state, PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype) {
    static const char *const kinds[] = {"", "of dtype float16, bfloat16, float32, float64 or an integer type",
                                        "of dtype float16, bfloat16, float32 or float64", "of an integer dtype",
                                        "of dtype bool, float16, bfloat16, float32 or float64"};
    if (PyArray_CheckExact(x)) {
        Py_INCREF(x);
    } else {
        int refused = PyArray_Check(x) ? PyObject_IsInstance(x, state->numpy[SA_MASKED_ARRAY]) : 0;
        refused = refused == 0 && PyArray_Check(x) ? PyObject_IsInstance(x, state->numpy[SA_MATRIX]) : refused;
        if (refused > 0) {
            sa_error(PyExc_TypeError,
                     "%s must be a plain array, got %s, whose arithmetic differs (use attn_mask for masks, and "
                     "numpy.asarray for the data)",
                     name, sa_type_name(x));
        }
        if (refused != 0 || (x = PyArray_FromAny(x, NULL, 0, 0, 0, NULL)) == NULL) {
            return NULL;
        }
    }
    PyArrayObject *array = (PyArrayObject *)x;
    *dtype = dtype_of(PyArray_DESCR(array));
    const bool empty_list = kind == SA_INTEGERS && *dtype == SA_F64 && PyArray_SIZE(array) == 0;
    if (!is_of_kind(*dtype, kind) && !empty_list) {
        if (!PyErr_Occurred()) {
            sa_error(PyExc_TypeError, "%s must be %s, got %S", name, kinds[kind], (PyObject *)PyArray_DESCR(array));
        }
        Py_CLEAR(array);
    }
    return array;
}

PyObject *sa_element(PyObject *x, npy_intp i) {
    PyObject *array = PyArray_FromAny(x, NULL, 0, 0, 0, NULL);
    PyObject *element = array ? PyObject_CallMethod(array, "item", "n", i) : NULL; /* IndexError if x has shrunk */
    Py_XDECREF(array);
    return element;
}

sa_dtype sa_promote(sa_dtype a, sa_dtype b) {
    a = sa_is_integer(a) ? SA_F64 : a;
    b = sa_is_integer(b) ? SA_F64 : b;
    if (a == b) {
        return a;
    }
    return a == SA_F64 || b == SA_F64 ? SA_F64 : SA_F32;
}

PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros) {
    PyArray_Descr *descr;
    if (dtype == SA_BF16) {
        descr = PyArray_DescrNewByteorder(PyArray_DESCR(like_bf16), NPY_NATIVE);
    } else {
        descr = PyArray_DescrFromType(dtype == SA_F64 ? NPY_DOUBLE : dtype == SA_F32 ? NPY_FLOAT : NPY_HALF);
    }
    if (descr == NULL) {
        return NULL;
    }
    return (PyArrayObject *)(zeros ? PyArray_Zeros(ndim, shape, descr, 0)
                                   : PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, NULL, 0, NULL));
}

void sa_fill_tensor(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, int n_lead, int core) {
    const int ndim = PyArray_NDIM(array);
    const npy_intp *shape = PyArray_SHAPE(array), *strides = PyArray_STRIDES(array);
    t->m.data = PyArray_BYTES(array);
    t->m.dtype = dtype;
    t->m.swapped = !PyArray_ISNOTSWAPPED(array);
    t->m.row_stride = t->m.col_stride = 0;
    if (core >= 1 && ndim >= 1 && shape[ndim - 1] != 1) {
        t->m.col_stride = strides[ndim - 1];
    }
    if (core >= 2 && ndim >= 2 && shape[ndim - 2] != 1) {
        t->m.row_stride = strides[ndim - 2];
    }
    for (int axis = 0; axis < n_lead; ++axis) {
        const int own = axis - n_lead + ndim - core;
        t->lead_stride[axis] = own >= 0 && shape[own] != 1 ? strides[own] : 0;
    }
}

PyArrayObject *sa_as_small(const sa_state *state, PyObject *x, const char *name, bool integers) {
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(state, x, name, integers ? SA_INTEGERS : SA_NUMBERS, &dtype);
    if (array == NULL) {
        return NULL;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(integers ? NPY_INT64 : NPY_DOUBLE);
    const int copy = integers ? NPY_ARRAY_ENSURECOPY : 0;
    PyArrayObject *small =
        (PyArrayObject *)PyArray_FromArray(array, descr, NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST | copy);
    Py_DECREF(array);
    return small;
}

const char *sa_print_shape(char *text, int ndim, const npy_intp *shape) {
    char *to = text;
    *to++ = '(';
    for (int axis = 0; axis < ndim; ++axis) {
        to += sprintf(to, axis > 0 ? ", %zd" : "%zd", (Py_ssize_t)shape[axis]);
    }
    strcpy(to, ndim == 1 ? ",)" : ")");
    return text;
}

int sa_shapes_error(const char *message, const char *name, PyArrayObject *array, const char *other_name, PyArrayObject *other) {
    return sa_error(PyExc_ValueError, "%s: %s has shape %s, %s has shape %s", message, name, sa_shape_of(array), other_name,
                    sa_shape_of(other));
}

int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape) {
    if (PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_SHAPE(array), shape, ndim)) {
        return 0;
    }
    return sa_error(PyExc_ValueError, "%s must have shape %s, got %s", name, sa_shape_text(ndim, shape), sa_shape_of(array));
}

/* The bytes that an array may touch; false without elements. */
static bool extent(PyArrayObject *array, const char **low, const char **high) {
    *low = *high = PyArray_BYTES(array);
    *high += PyArray_ITEMSIZE(array);
    for (int axis = 0; axis < PyArray_NDIM(array); ++axis) {
        const npy_intp n = PyArray_DIM(array, axis), stride = PyArray_STRIDE(array, axis);
        if (n == 0) {
            return false;
        }
        if (stride < 0) {
            *low += (n - 1) * stride;
        } else {
            *high += (n - 1) * stride;
        }
    }
    return true;
}

int sa_check_overlap(const sa_state *state, PyArrayObject *out, PyArrayObject *array, const char *name) {
    const char *out_low, *out_high, *low, *high;
    if (!extent(out, &out_low, &out_high) || !extent(array, &low, &high) || out_high <= low || high <= out_low) {
        return 0;
    }
    PyObject *shared = PyObject_CallFunction(state->numpy[SA_SHARES_MEMORY], "OOi", out, array, 10000);
    if (shared == NULL) {
        return !PyErr_ExceptionMatches(state->numpy[SA_TOO_HARD_ERROR])
                   ? -1
                   : sa_error(PyExc_ValueError,
                              "cannot tell whether out overlaps %s: their strides are too intricate; pass a plain out", name);
    }
    const int overlaps = PyObject_IsTrue(shared);
    Py_DECREF(shared);
    if (overlaps > 0) {
        PyErr_Format(PyExc_ValueError, "out overlaps %s in memory; results would be written over inputs still to be read",
                     name);
    }
    return overlaps == 0 ? 0 : -1;
}

int sa_check_self_overlap(PyArrayObject *out) {
    /* By growing stride, each step must be longer than all below it. That refuses interleaved strides too. */
    const int ndim = PyArray_NDIM(out);
    bool used[NPY_MAXDIMS] = {false};
    if (PyArray_SIZE(out) == 0) {
        return 0;
    }
    npy_intp reach = PyArray_ITEMSIZE(out);
    for (int pass = 0; pass < ndim; ++pass) {
        int next = -1;
        npy_intp least = 0;
        for (int axis = 0; axis < ndim; ++axis) {
            const npy_intp stride = PyArray_STRIDE(out, axis) < 0 ? -PyArray_STRIDE(out, axis) : PyArray_STRIDE(out, axis);
            if (!used[axis] && (next < 0 || stride < least)) {
                next = axis;
                least = stride;
            }
        }
        used[next] = true;
        const npy_intp n = PyArray_DIM(out, next);
        if (n > 1) {
            if (least < reach) {
                return sa_error(PyExc_ValueError, "out overlaps itself in memory: several of its elements are one");
            }
            reach += (n - 1) * least;
        }
    }
    return 0;
}
