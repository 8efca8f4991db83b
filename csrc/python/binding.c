/* Owns what all of the binding uses: NumPy's C API, messages, and the reading of Python's arguments
 * as parameters, numbers and the core's tensors. */
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

int sa_import_numpy(void) {
    return _import_array(); /* import_array() would make an ImportError of every exception, even of Ctrl-C */
}

/* Takes over a reference to a module, or NULL. */
static PyObject *attribute_of(PyObject *module, const char *name) {
    PyObject *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return found;
}

PyObject *sa_imported(const char *module_name, const char *name) {
    PyObject *key = PyUnicode_FromString(module_name);
    PyObject *module = key ? PyDict_GetItemWithError(PyImport_GetModuleDict(), key) : NULL; /* borrowed */
    PyObject *found = attribute_of(Py_XNewRef(module), name);
    if (key != NULL && found == NULL) { /* it is not imported yet, or another thread is at it; this takes longer */
        PyErr_Clear();
        found = attribute_of(PyImport_Import(key), name);
    }
    Py_XDECREF(key);
    return sa_checked(found);
}

int sa_check_stack(ptrdiff_t needed) {
    const ptrdiff_t left = sa_stack_left();
    return left >= needed ? 0
                          : sa_error(PyExc_RecursionError,
                                     "a call needs %zd bytes of stack, but its thread has %zd left: the call is nested "
                                     "too deeply, or threading.stack_size() is too small",
                                     (Py_ssize_t)needed, (Py_ssize_t)left);
}

/* ---- parameters: loops run over given arguments only, so plain calls are fast ------------------------------------ */

int sa_family_start(sa_family_state *state, const sa_family *family) {
    state->family = family;
    for (int i = 0; family->parameters[i].name != NULL; ++i) {
        const sa_parameter *parameter = &family->parameters[i];
        if ((state->names[i] = PyUnicode_InternFromString(parameter->name)) == NULL) {
            return -1;
        }
        const sa_parameter_set bit = (sa_parameter_set)1 << i;
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
static int find_name(const sa_family_state *state, sa_parameter_set takes, PyObject *keyword) {
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

/* Names of other libraries for parameters, and the names here. */
static const char *const SYNONYMS[][2] = {
    {"mask", "attn_mask"}, {"attention_mask", "attn_mask"}, {"bool_mask", "attn_mask"},
    {"dim", "axis"},       {"dropout", "dropout_p"},        {"softmax_scale", "scale"},
    {"sm_scale", "scale"}, {"window_size", "window"},       {"logits_soft_cap", "softcap"}};

/* Always returns −1. The message names the parameter that is probably meant, if the function has it. */
static int refuse_name(const sa_family_state *state, sa_parameter_set takes, const char *function, PyObject *keyword) {
    for (size_t n = 0; n < sizeof SYNONYMS / sizeof *SYNONYMS; ++n) {
        for (int i = 0; i < state->count; ++i) {
            if (takes >> i & 1 && PyUnicode_CompareWithASCIIString(keyword, SYNONYMS[n][0]) == 0 &&
                PyUnicode_CompareWithASCIIString(state->names[i], SYNONYMS[n][1]) == 0) {
                return sa_error(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'; here its name is %U",
                                function, keyword, state->names[i]);
            }
        }
    }
    return sa_error(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, keyword);
}

int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames, PyObject **values, sa_parameter_set *given) {
    const char *const name = state->family->functions[function].name;
    const int positional = state->family->functions[function].positional;
    if (sa_check_stack(SA_STACK_OF_CALL) < 0) {
        return -1;
    }
    if (nargs > positional) {
        return sa_error(PyExc_TypeError, "%s() takes at most %d positional arguments (%zd given)", name, positional,
                        nargs);
    }
    const sa_parameter_set takes = state->takes[function];
    sa_parameter_set found = 0, left = takes;
    memset(values, 0, (size_t)state->count * sizeof *values);
    for (Py_ssize_t n = 0; n < nargs; ++n, left &= left - 1) {
        values[__builtin_ctzll(left)] = args[n];
    }
    found = takes & ~left;
    const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t k = 0; k < keywords; ++k) {
        PyObject *keyword = PyTuple_GET_ITEM(kwnames, k);
        const int i = find_name(state, takes, keyword);
        if (i < 0) {
            return refuse_name(state, takes, name, keyword);
        }
        if (found >> i & 1) {
            return sa_error(PyExc_TypeError, "%s() got multiple values for argument '%U'", name, keyword);
        }
        values[i] = args[nargs + k];
        found |= (sa_parameter_set)1 << i;
    }
    const sa_parameter_set missing = state->needs[function] & ~found;
    if (missing != 0) {
        return sa_error(PyExc_TypeError, "%s() missing required argument: '%U'", name,
                        state->names[__builtin_ctzll(missing)]);
    }
    for (left = found & state->optional; left != 0; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        if (values[i] == Py_None) {
            values[i] = NULL;
            found &= ~((sa_parameter_set)1 << i);
        }
    }
    *given = found;
    return 0;
}

int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, sa_parameter_set given) {
    for (sa_parameter_set left = given & state->readable; left != 0; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        const sa_parameter *parameter = &state->family->parameters[i];
        if (parameter->read(call, values[i], parameter->name, (char *)call + parameter->to) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

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
            const bool scales = strcmp(name, "scale") == 0 && type != NPY_NOTYPE;
            sa_error(PyExc_TypeError, "%s must be a real number, got %s%s", name, sa_type_name(value),
                     scales ? " (to scale by an array, multiply the query by it, and give scale=1)" : "");
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

/* ---- seeds ------------------------------------------------------------------------------------------------------- */

/* Calls integers(0, 2**64, dtype=numpy.uint64), a generator's method. */
static PyObject *draw(PyObject *integers) {
    PyObject *uint64 = (PyObject *)PyArray_TypeObjectFromType(NPY_UINT64), *drawn = NULL;
    PyObject *end = uint64 ? PyLong_FromString("18446744073709551616", NULL, 10) : NULL;
    PyObject *bounds = end ? Py_BuildValue("(iO)", 0, end) : NULL;
    PyObject *names = bounds ? Py_BuildValue("{sO}", "dtype", uint64) : NULL;
    if (names != NULL) {
        drawn = sa_checked(PyObject_Call(integers, bounds, names));
    }
    Py_XDECREF(names);
    Py_XDECREF(bounds);
    Py_XDECREF(end);
    Py_XDECREF(uint64);
    return drawn;
}

/* Takes over a reference to an integer, and keeps it modulo 2**64. */
static int take_seed(PyObject *integer, uint64_t *seed) {
    *seed = integer ? PyLong_AsUnsignedLongLongMask(integer) : 0;
    Py_XDECREF(integer);
    return PyErr_Occurred() ? -1 : 0;
}

/* Takes over a reference to a method `integers`. */
static int draw_seed(PyObject *integers, bool draws, uint64_t *seed) {
    PyObject *drawn = draws ? draw(integers) : NULL;
    Py_DECREF(integers);
    PyObject *integer = drawn ? sa_checked(PyNumber_Index(drawn)) : NULL;
    Py_XDECREF(drawn);
    return draws ? take_seed(integer, seed) : 0;
}

static int draw_entropy(uint64_t *seed) {
    PyObject *make = sa_imported("numpy.random", "default_rng");
    PyObject *generator = make ? sa_checked(PyObject_CallNoArgs(make)) : NULL;
    PyObject *integers = generator ? sa_checked(PyObject_GetAttrString(generator, "integers")) : NULL;
    Py_XDECREF(generator);
    Py_XDECREF(make);
    return integers ? draw_seed(integers, true, seed) : -1;
}

static int seed_from_integer(PyObject *rng, uint64_t *seed) {
    if (PyBool_Check(rng) || PyArray_IsScalar(rng, Bool) || !PyIndex_Check(rng)) {
        PyObject *type = PyType_GetName(Py_TYPE(rng));
        if (type != NULL) {
            sa_error(PyExc_TypeError, "rng must be an int, a numpy.random.Generator or None, not %U", type);
            Py_DECREF(type);
        }
        return -1;
    }
    PyObject *integer = sa_checked(PyNumber_Index(rng));
    int overflow = 0;
    const long long number = integer ? PyLong_AsLongLongAndOverflow(integer, &overflow) : 0;
    if (integer != NULL && (overflow < 0 || (overflow == 0 && number < 0))) {
        Py_DECREF(integer);
        return sa_error(PyExc_ValueError, "rng must not be negative, not %S", rng);
    }
    return take_seed(integer, seed);
}

int sa_seed_from_rng(PyObject *rng, bool draws, uint64_t *seed) {
    *seed = 0;
    if (rng == Py_None) {
        return draws ? draw_entropy(seed) : 0;
    }
    PyObject *integers = PyLong_CheckExact(rng) ? NULL : PyObject_GetAttrString(rng, "integers");
    if (integers != NULL) {
        return draw_seed(integers, draws, seed);
    }
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    return seed_from_integer(rng, seed);
}

/* ---- arrays ------------------------------------------------------------------------------------------------------ */

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

/* Calls Python: selfattn's _check.py makes an array of a list, a number, a tensor of another library or an array of a
 * derived class, or refuses it. */
static PyObject *convert_foreign(PyObject *x, const char *name) {
    PyObject *as_array = sa_imported("selfattn._check", "as_array");
    PyObject *array = as_array ? sa_checked(PyObject_CallFunction(as_array, "sO", name, x)) : NULL;
    Py_XDECREF(as_array);
    return array;
}

PyArrayObject *sa_as_array(PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype) {
    static const char *const kinds[] = {"", "of dtype float16, bfloat16, float32, float64 or an integer type",
                                        "of dtype float16, bfloat16, float32 or float64", "of an integer dtype",
                                        "of dtype bool, float16, bfloat16, float32 or float64"};
    PyObject *found = PyArray_CheckExact(x) ? Py_NewRef(x) : convert_foreign(x, name);
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

PyObject *sa_element(PyObject *x, npy_intp i) {
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(x, "", SA_ANY, &dtype);
    /* IndexError: x has shrunk. */
    PyObject *element = array ? PyObject_CallMethod((PyObject *)array, "item", "n", i) : NULL;
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

/* Returns a new reference to the descriptor of floats in native byte order. */
static PyArray_Descr *descr_of(sa_dtype dtype, PyArrayObject *like_bf16) {
    return dtype == SA_BF16 ? PyArray_DescrNewByteorder(PyArray_DESCR(like_bf16), NPY_NATIVE)
                            : PyArray_DescrFromType(dtype == SA_F64   ? NPY_DOUBLE
                                                    : dtype == SA_F32 ? NPY_FLOAT
                                                                      : NPY_HALF);
}

PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros) {
    PyArray_Descr *descr = descr_of(dtype, like_bf16);
    if (descr == NULL) {
        return NULL;
    }
    return (PyArrayObject *)(zeros ? PyArray_Zeros(ndim, shape, descr, 0)
                                   : PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, NULL, 0, NULL));
}

PyArrayObject *sa_new_array_like(PyArrayObject *like, sa_dtype dtype, PyArrayObject *like_bf16) {
    PyArray_Descr *descr = descr_of(dtype, like_bf16);
    return descr ? (PyArrayObject *)PyArray_NewLikeArray(like, NPY_KEEPORDER, descr, 0) : NULL;
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

PyArrayObject *sa_as_small(PyObject *x, const char *name, bool integers) {
    sa_dtype dtype;
    PyArrayObject *array = sa_as_array(x, name, integers ? SA_INTEGERS : SA_NUMBERS, &dtype);
    if (array == NULL) {
        return NULL;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(integers ? NPY_INT64 : NPY_DOUBLE);
    const int copy = integers ? NPY_ARRAY_ENSURECOPY : 0;
    PyArrayObject *small = (PyArrayObject *)PyArray_FromArray(
        array, descr, NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST | copy);
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

int sa_shapes_error(const char *message, const char *name, PyArrayObject *array, const char *other_name,
                    PyArrayObject *other) {
    return sa_error(PyExc_ValueError, "%s: %s has shape %s, %s has shape %s", message, name, sa_shape_of(array),
                    other_name, sa_shape_of(other));
}

int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape) {
    if (PyArray_NDIM(array) == ndim && PyArray_CompareLists(PyArray_SHAPE(array), shape, ndim)) {
        return 0;
    }
    return sa_error(PyExc_ValueError, "%s must have shape %s, got %s", name, sa_shape_text(ndim, shape),
                    sa_shape_of(array));
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

int sa_check_overlap(PyArrayObject *out, PyArrayObject *array, const char *name) {
    const char *out_low, *out_high, *low, *high;
    if (!extent(out, &out_low, &out_high) || !extent(array, &low, &high) || out_high <= low || high <= out_low) {
        return 0;
    }
    PyObject *shares_memory = sa_imported("numpy", "shares_memory");
    PyObject *too_hard = shares_memory ? sa_imported("numpy.exceptions", "TooHardError") : NULL;
    PyObject *shared = too_hard ? PyObject_CallFunction(shares_memory, "OOi", out, array, 10000) : NULL;
    const bool unknown = too_hard && shared == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(too_hard);
    Py_XDECREF(too_hard);
    Py_XDECREF(shares_memory);
    if (unknown) {
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
        PyErr_Format(PyExc_ValueError,
                     "out overlaps %s in memory; results would be written over inputs still to be read", name);
    }
    return overlaps == 0 ? 0 : -1;
}

int sa_check_self_overlap(PyArrayObject *out) {
    /* In order of growing strides, each must exceed the extent of the axes before it.
     * This refuses interleaved strides, too. */
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
            const npy_intp stride =
                PyArray_STRIDE(out, axis) < 0 ? -PyArray_STRIDE(out, axis) : PyArray_STRIDE(out, axis);
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
