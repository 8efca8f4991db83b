/* For all files of the binding: the stable ABI, NumPy's C API, the module's state, messages, and the reading of
 * Python's arguments as parameters, numbers and the core's tensors. Only this folder includes Python.h. In this folder
 * −1 or NULL means that an exception is set, and returned objects are new references, unless a comment says
 * otherwise. */
#ifndef SA_PYTHON_BINDING_H
#define SA_PYTHON_BINDING_H

/* ---- the stable ABI ---------------------------------------------------------------------------------------------- */

/* With it one built extension serves CPython 3.11 and all later versions. Macros of the whole API are functions here.
 * Free-threaded CPython has no such ABI, so there the macros stay. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
/* A Python.h that is limited to the stable ABI does not include these. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Locks an object if the GIL does not keep other threads from it.
 * With the GIL, and before 3.13, this is an empty block. */
#if !defined(Py_GIL_DISABLED)
#undef Py_BEGIN_CRITICAL_SECTION
#undef Py_END_CRITICAL_SECTION
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

#if defined(Py_LIMITED_API)
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_SET_ITEM (void)PyTuple_SetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyList_SET_ITEM (void)PyList_SetItem
#if defined(_WIN32) /* whose python3.dll exports these from 3.13 on */
#define PyMem_RawMalloc malloc
#define PyMem_RawCalloc calloc
#define PyMem_RawFree free
#elif Py_LIMITED_API + 0 < 0x030D0000 /* promised from 3.13 on, but present in 3.11 and 3.12 */
PyAPI_FUNC(void *) PyMem_RawMalloc(size_t size);
PyAPI_FUNC(void *) PyMem_RawCalloc(size_t nelem, size_t elsize);
PyAPI_FUNC(void) PyMem_RawFree(void *ptr);
#endif
#endif

/* ---- NumPy, and the module's state ------------------------------------------------------------------------------- */

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL selfattn_array_api /* with stack.c's key, the only global that is written */
#ifndef SA_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>

#include "selfattn.h"

#define SA_MAX_PARAMETERS 48
typedef uint64_t sa_parameter_set; /* bit n: parameter n */
#define SA_MAX_FUNCTIONS 16

/* A parameter of a family of functions. */
typedef struct {
    const char *name;
    const char *otherwise; /* the default as documentation prints it ("=None"); "": the parameter is required */
    uint32_t functions;    /* bit n: function n takes it */
    /* Reads a value into `to`, a field of the call. NULL: the call reads the value itself. */
    int (*read)(void *call, PyObject *value, const char *name, void *to);
    size_t to; /* the field's offset */
} sa_parameter;

typedef struct {
    const sa_parameter *parameters; /* a name of NULL ends it */
    struct {
        const char *name;
        int positional;
    } functions[SA_MAX_FUNCTIONS];
} sa_family;

/* A family in the module's state: interned names, bits for parameters. */
typedef struct {
    const sa_family *family;
    int count;
    PyObject *names[SA_MAX_PARAMETERS];
    sa_parameter_set optional; /* bits of parameters whose default is None */
    sa_parameter_set readable; /* bits of parameters that have a reader */
    sa_parameter_set takes[SA_MAX_FUNCTIONS], needs[SA_MAX_FUNCTIONS];
} sa_family_state;

/* Classes of named tuples that are read by the names of their fields (record.h). */
typedef enum {
    SA_PROJECTION_RECORD,
    SA_NORM_RECORD,
    SA_ROTARY_RECORD,
    SA_DROPOUT_RECORD,
    SA_LAYER_RECORD,
    SA_TRANSFORMER_RECORD,
    SA_CALL_RECORD,
    SA_UPDATE_RECORD,
    SA_RECORDS
} sa_record_kind;

#define SA_MAX_FIELDS 32

typedef struct {
    const struct sa_record *record;
    PyObject *type;                   /* NULL until the class is known */
    signed char place[SA_MAX_FIELDS]; /* where the tuple has each field of the table */
} sa_record_state;

#define SA_ARENA_SLOTS 8

typedef struct {
    sa_family_state attention, rows;
    sa_record_state records[SA_RECORDS];
    /* Kept memory, and the slot that is replaced next (run.c). */
    _Atomic(void *) arena[SA_ARENA_SLOTS];
    atomic_uint next_slot;
    atomic_bool malloc_keeps, frees_memory;
} sa_state;

static inline sa_state *sa_state_of(PyObject *module) { return (sa_state *)PyModule_GetState(module); }

int sa_import_numpy(void);

/* Returns an object of a Python module. A call of attention on plain arrays needs none. */
PyObject *sa_imported(const char *module_name, const char *name);

/* Returns what a call of CPython or NumPy returned; for NULL without an exception, as when memory fails,
 * raises MemoryError. */
static inline PyObject *sa_checked(PyObject *returned) {
    return returned != NULL || PyErr_Occurred() ? returned : PyErr_NoMemory();
}

/* Like PyErr_Format, but returns −1. */
int sa_error(PyObject *type, const char *format, ...);

/* The type of `value` with its module, such as `numpy.ndarray`, for a message; valid until the thread's next call.
 * Clears an exception that is set, since another will be raised. */
const char *sa_type_name(PyObject *value);

/* Messages start with `what`. */
int sa_py_choose_isa(const char *name, PyObject *error, const char *what);

/* Defines a method that calls `call(module, number, …)`. */
#define SA_FUNCTION(name, call, number)                                                                                \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {              \
        return call(module, number, args, nargs, kwnames);                                                             \
    }
#define SA_METHOD(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, doc}

/* Returns how many bytes of its stack this thread has left, or more if that is not known. */
ptrdiff_t sa_stack_left(void);

/* A RecursionError if the thread has less of its stack left. Arguments may be objects whose methods call selfattn. */
int sa_check_stack(ptrdiff_t needed);
enum { SA_STACK_OF_CALL = 112 << 10, SA_STACK_OF_RUN = 64 << 10 }; /* what a call needs, and what is left for its run */

/* ---- parameters -------------------------------------------------------------------------------------------------- */

int sa_family_start(sa_family_state *state, const sa_family *family);
void sa_family_clear(sa_family_state *state);

/* Sorts arguments into values[], borrowed. values[i] is NULL if parameter i was not given, or is None and None is its
 * default; for every other one bit i of *given is set. */
int sa_sort_arguments(const sa_family_state *state, int function, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames, PyObject **values, sa_parameter_set *given);

/* Reads values in the table's order. */
int sa_read_arguments(const sa_family_state *state, void *call, PyObject *const *values, sa_parameter_set given);

/* ---- numbers: exceptions that objects raise are passed on -------------------------------------------------------- */

/* Returns NULL without an exception for a bool, or for an object that is no integer. */
PyObject *sa_as_index(PyObject *value);

int sa_read_real(void *call, PyObject *value, const char *name, void *to);

/* Reads an int from 1 to 1024. */
int sa_read_threads(void *call, PyObject *value, const char *name, void *to);

/* Reads a bool; refuses strings and floats. */
int sa_read_flag(void *call, PyObject *value, const char *name, void *to);

/* ---- seeds ------------------------------------------------------------------------------------------------------- */

/* Reads dropout's seed from `rng`: an int modulo 2**64, one uint64 of a generator, or fresh entropy for None. If
 * `draws` is false, as without dropout, rng is only checked. */
int sa_seed_from_rng(PyObject *rng, bool draws, uint64_t *seed);

/* ---- arrays ------------------------------------------------------------------------------------------------------ */

static inline bool sa_is_integer(sa_dtype dtype) { return dtype >= SA_I8 && dtype < SA_DTYPES; }

/* The kinds of arrays that an argument takes. SA_NUMBERS and SA_MASK accept integers; callers refuse them if necessary.
 * With SA_ANY the dtype may be SA_DTYPES. */
typedef enum { SA_ANY, SA_NUMBERS, SA_FLOATS, SA_INTEGERS, SA_MASK } sa_kind;

/* Returns x, or what selfattn/_check.py makes of an object that is no plain array, and its dtype. */
PyArrayObject *sa_as_array(PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype);

/* True if the core can read x in place. ndim −1: any number of axes. */
static inline bool sa_is_plain(PyObject *x, int type, int ndim) {
    return PyArray_Check(x) && PyArray_TYPE((PyArrayObject *)x) == type && PyArray_ISCARRAY_RO((PyArrayObject *)x) &&
           (ndim < 0 || PyArray_NDIM((PyArrayObject *)x) == ndim);
}

/* x must be an array. */
static inline npy_intp sa_dim(PyObject *x, int axis) { return PyArray_DIM((PyArrayObject *)x, axis); }
static inline void *sa_data(PyObject *x) { return PyArray_DATA((PyArrayObject *)x); }

/* Element i as the caller passed it, for messages; its copy as int64 may have another sign. */
PyObject *sa_element(PyObject *x, npy_intp i);

/* The dtype of results. */
sa_dtype sa_promote(sa_dtype a, sa_dtype b);

/* Makes a C-contiguous array. SA_BF16 needs like_bf16, any bfloat16 array. */
PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros);
/* Makes an array of like's shape whose axes have the same order in memory. */
PyArrayObject *sa_new_array_like(PyArrayObject *like, sa_dtype dtype, PyArrayObject *like_bf16);

/* The last `core` (0, 1 or 2) axes become (rows, cols). Axes of length 1 have stride 0. */
void sa_fill_tensor(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, int n_lead, int core);

/* Returns x as float64 or int64, aligned and native. Integers are copied,
 * so that nobody changes them after the check. */
PyArrayObject *sa_as_small(PyObject *x, const char *name, bool integers);

/* Refuses arrays that overlap, or whose strides are too intricate to find out. */
int sa_check_overlap(PyArrayObject *out, PyArrayObject *array, const char *name);
int sa_check_self_overlap(PyArrayObject *out);

/* A shape as text, for messages; valid until the end of the caller's block. */
#define sa_shape_text(ndim, shape) sa_print_shape((char[SA_SHAPE_CHARS]){0}, ndim, shape)
#define sa_shape_of(array) sa_shape_text(PyArray_NDIM(array), PyArray_SHAPE(array))
#define SA_SHAPE_CHARS (24 * (NPY_MAXDIMS + 2))
const char *sa_print_shape(char *text, int ndim, const npy_intp *shape);

/* Raises ValueError with the message, followed by both shapes. */
int sa_shapes_error(const char *message, const char *name, PyArrayObject *array, const char *other_name,
                    PyArrayObject *other);

int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape);

const char *sa_dtype_name(sa_dtype dtype);

#endif
