/* Owns what all of the binding uses: NumPy's C API, the module's state, messages, and the reading of Python's arguments as
 * parameters, numbers and the core's tensors. */
#define SA_IMPORTS_NUMPY
#include "python/binding.h"

#include "runtime/team.h"

int sa_error(PyObject *type, const char *format, ...) {
    va_list arguments;
    PyErr_Clear();
    va_start(arguments, format);
    PyObject *message = sa_checked(PyUnicode_FromFormatV(format, arguments));
    va_end(arguments);
    /* Without a message MemoryError is raised. PyErr_FormatV of CPython 3.11 would set type alone, and an AxisError
     * without arguments is a TypeError. */
    if (message != NULL) {
        PyErr_SetObject(type, message);
        Py_DECREF(message);
    }
    return -1;
}

const char *sa_type_name(PyObject *value) {
    static _Thread_local char text[200];
    PyErr_Clear();
    PyObject *type = (PyObject *)Py_TYPE(value), *name = PyObject_GetAttrString(type, "__qualname__");
    PyObject *module = name ? PyObject_GetAttrString(type, "__module__") : NULL;
    PyObject *whole = module == NULL ? NULL
                      : PyUnicode_Check(module) && PyUnicode_CompareWithASCIIString(module, "builtins") != 0
                          ? PyUnicode_FromFormat("%U.%S", module, name)
                          : PyObject_Str(name);
    const char *found = whole ? PyUnicode_AsUTF8AndSize(whole, NULL) : NULL;
    PyErr_Clear();
    PyOS_snprintf(text, sizeof text, "%s", found ? found : "an object of a type without a name");
    Py_XDECREF(whole);
    Py_XDECREF(module);
    Py_XDECREF(name);
    return text;
}

int sa_state_start(sa_state *state) {
    static const char *const from[SA_IMPORTED][2] = {[SA_AS_ARRAY] = {"selfattn._check", "as_array"},
                                                     [SA_SEED] = {"selfattn._check", "seed_from_rng"},
                                                     [SA_SHARES_MEMORY] = {"numpy", "shares_memory"},
                                                     [SA_TOO_HARD_ERROR] = {"numpy.exceptions", "TooHardError"},
                                                     [SA_AXIS_ERROR] = {"numpy.exceptions", "AxisError"}};
    if (_import_array() < 0) { /* import_array() would make an ImportError of every exception, even of Ctrl-C */
        return -1;
    }
    for (int i = 0; i < SA_IMPORTED; ++i) {
        PyObject *module = PyImport_ImportModule(from[i][0]);
        state->imported[i] = module ? PyObject_GetAttrString(module, from[i][1]) : NULL;
        Py_XDECREF(module);
        if (state->imported[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* ---- parameters: loops run over given arguments only, so plain calls are fast -------------------------------------------- */

int sa_family_start(sa_family_state *state, const sa_family *family) {
    state->family = family;
    for (int i = 0; family->parameters[i].name != NULL; ++i) {
        const sa_parameter *parameter = &family->parameters[i];
        if ((state->names[i] = PyUnicode_InternFromString(parameter->name)) == NULL) {
            return -1;
        }
        const uint32_t bit = (uint32_t)1 << i;
        state->count = i + 1;
        state->optional |= strcmp(parameter->otherwise, "=None") == 0 ? bit : 0;
        state->readable |= parameter->read != NULL ? bit : 0;
        for (int function = 0; function < SA_MAX_FUNCTIONS; ++function) {
            const bool taken = parameter->functions >> function & 1;
            state->takes[function] |= taken ? bit : 0;
            state->needs[function] |= taken && parameter->otherwise[0] == 0 ? bit : 0;
        }
    }
    return 0;
}

void sa_family_clear(sa_family_state *state) {
    for (int i = 0; i < SA_MAX_PARAMETERS; ++i) {
        Py_CLEAR(state->names[i]);
    }
}

/* Returns −1 if there is none. Compares identity first, as names in source code are interned. */
static int find_name(const sa_family_state *state, uint32_t takes, PyObject *keyword) {
    for (int i = 0; i < state->count; ++i) {
        if (state->names[i] == keyword && takes >> i & 1) {
            return i;
        }
    }
    for (int i = 0; i < state->count; ++i) {
        if (takes >> i & 1 && PyUnicode_Compare(state->names[i], keyword) == 0) {
            return i;
        }
    }
    return -1;
}

int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **values, uint32_t *given) {
    const char *const name = state->family->functions[function].name;
    const int positional = state->family->functions[function].positional;
    if (nargs > positional) {
        return sa_error(PyExc_TypeError, "%s() takes at most %d positional arguments (%zd given)", name, positional, nargs);
    }
    const uint32_t takes = state->takes[function];
    uint32_t found = 0, left = takes;
    memset(values, 0, (size_t)state->count * sizeof *values);
    for (Py_ssize_t n = 0; n < nargs; ++n, left &= left - 1) {
        values[__builtin_ctz(left)] = args[n];
    }
    found = takes & ~left;
    const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t k = 0; k < keywords; ++k) {
        PyObject *keyword = PyTuple_GET_ITEM(kwnames, k);
        const int i = find_name(state, takes, keyword);
        if (i < 0) {
            return sa_error(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", name, keyword);
        }
        if (found >> i & 1) {
            return sa_error(PyExc_TypeError, "%s() got multiple values for argument '%U'", name, keyword);
        }
        values[i] = args[nargs + k];
        found |= (uint32_t)1 << i;
    }
    const uint32_t missing = state->needs[function] & ~found;
    if (missing != 0) {
        return sa_error(PyExc_TypeError, "%s() missing required argument: '%U'", name, state->names[__builtin_ctz(missing)]);
    }
    for (left = found & state->optional; left != 0; left &= left - 1) {
        const int i = __builtin_ctz(left);
        if (values[i] == Py_None) {
            values[i] = NULL;
            found &= ~((uint32_t)1 << i);
        }
    }
    *given = found;
    return 0;
}

int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, uint32_t given) {
    for (uint32_t left = given & state->readable; left != 0; left &= left - 1) {
        const int i = __builtin_ctz(left);
        const sa_parameter *parameter = &state->family->parameters[i];
        if (parameter->read(call, values[i], parameter->name, (char *)call + parameter->to) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- numbers -------------------------------------------------------------------------------------------------------- */

PyObject *sa_as_index(PyObject *value) {
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (index == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
    }
    return index;
}

int sa_read_real(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    const int type = PyArray_Check(value) ? PyArray_TYPE((PyArrayObject *)value) : NPY_NOTYPE;
    if (PyBool_Check(value) || PyArray_IsScalar(value, Bool) || type == NPY_BOOL) {
        return sa_error(PyExc_TypeError, "%s must be a real number, got a bool", name);
    }
    /* NumPy would make floats of these: it drops imaginary parts and parses strings. */
    if (PyArray_IsScalar(value, ComplexFloating) || PyTypeNum_ISCOMPLEX(type) || PyTypeNum_ISDATETIME(type) ||
        type == NPY_OBJECT || type == NPY_STRING || type == NPY_UNICODE || type == NPY_VSTRING) {
        return sa_error(PyExc_TypeError, "%s must be a real number, not %R", name, value);
    }
    const double x = PyFloat_AsDouble(value);
    if (x == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            sa_error(PyExc_TypeError, "%s must be a real number, got %s", name, sa_type_name(value));
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            sa_error(PyExc_ValueError, "%s is an integer too large for a float", name);
        }
        return -1;
    }
    *(double *)to = x;
    return 0;
}

int sa_read_threads(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    PyObject *index = sa_as_index(value);
    int overflow = 0;
    const long n = index ? PyLong_AsLongAndOverflow(index, &overflow) : 0;
    if (index == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (index == NULL || overflow != 0 || n < 1 || n > SA_MOST_THREADS) {
        PyObject *type = index == NULL ? PyExc_TypeError : PyExc_ValueError;
        Py_XDECREF(index);
        return sa_error(type, "%s must be an int from 1 to 1024 or None, got %R", name, value);
    }
    Py_DECREF(index);
    *(int *)to = (int)n;
    return 0;
}

int sa_read_flag(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    if (PyUnicode_Check(value) || PyBytes_Check(value) || PyFloat_CheckExact(value)) {
        return sa_error(PyExc_TypeError, "%s must be a bool, got %R%s", name, value,
                        strcmp(name, "is_causal") == 0 ? " (which diagonal it is, causal='lower_right' says)" : "");
    }
    const int truth = PyObject_IsTrue(value);
    *(bool *)to = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* ---- arrays --------------------------------------------------------------------------------------------------------- */

const char *sa_dtype_name(sa_dtype dtype) {
    static const char *const names[SA_DTYPES] = {"float16", "bfloat16", "float32", "float64", "bool",  "int8",  "uint8",
                                                 "int16",   "uint16",   "int32",   "uint32",  "int64", "uint64"};
    return names[dtype];
}

/* True for the bfloat16 of ml_dtypes. Unless that is imported, no such array exists. */
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

/* Returns SA_DTYPES for an unknown dtype, or if there is no memory; then an exception is set. */
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
    PyObject *found =
        PyArray_CheckExact(x) ? Py_NewRef(x) : sa_checked(PyObject_CallFunction(state->imported[SA_AS_ARRAY], "sO", name, x));
    if (found == NULL) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)found;
    *dtype = dtype_of(PyArray_DESCR(array));
    const bool empty_list = kind == SA_INTEGERS && *dtype == SA_F64 && PyArray_SIZE(array) == 0;
    if (*dtype == SA_DTYPES && PyErr_Occurred()) {
        Py_CLEAR(array);
    } else if (!is_of_kind(*dtype, kind) && !empty_list) {
        sa_error(PyExc_TypeError, "%s must be %s, got %S", name, kinds[kind], (PyObject *)PyArray_DESCR(array));
        Py_CLEAR(array);
    }
    return array;
}

PyObject *sa_element(const sa_state *state, PyObject *x, npy_intp i) {
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(state, x, "", SA_ANY, &dtype);
    PyObject *element = array ? PyObject_CallMethod((PyObject *)array, "item", "n", i) : NULL; /* IndexError: x has shrunk */
    Py_XDECREF((PyObject *)array);
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

/* Sets *low and *high to the bytes that an array may touch. False without elements. */
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
    PyObject *shared = PyObject_CallFunction(state->imported[SA_SHARES_MEMORY], "OOi", out, array, 10000);
    if (shared == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(state->imported[SA_TOO_HARD_ERROR])) {
        return sa_error(PyExc_ValueError,
                        "cannot tell whether out overlaps %s: their strides are too intricate; pass a plain out", name);
    }
    if (shared == NULL) { /* arrays give no other error, whatever NumPy raises */
        PyErr_NoMemory();
        return -1;
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
    /* In order of growing strides, each must exceed the extent of the axes before it. This refuses interleaved strides, too. */
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
