/* Shared by the binding's files: module state, functions, NumPy's C API. Only this folder includes Python.h.
 * Everywhere here, −1 or NULL means that an exception is set, and objects returned are new references, unless said
 * otherwise. */
#ifndef SA_PYTHON_STATE_H
#define SA_PYTHON_STATE_H

#include "python/stable.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL selfattn_array_api /* the only global that is written */
#ifndef SA_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>

#include "python/parameters.h"
#include "selfattn.h"

#define SA_ARENA_SLOTS 8

/* What the binding has from NumPy's Python modules. */
enum { SA_MASKED_ARRAY, SA_MATRIX, SA_SHARES_MEMORY, SA_TOO_HARD_ERROR, SA_AXIS_ERROR, SA_FROM_NUMPY };

typedef struct {
    sa_family_state attention, rows;
    PyObject *numpy[SA_FROM_NUMPY];
    _Atomic(void *) arena[SA_ARENA_SLOTS];  /* kept memory: arena.c */
    atomic_uint next_slot;                  /* the slot replaced next */
    atomic_bool malloc_keeps, frees_memory; /* arena.c */
} sa_state;

static inline sa_state *sa_state_of(PyObject *module) { return (sa_state *)PyModule_GetState(module); }

/* Imports NumPy, and from it what the state holds. */
int sa_state_start(sa_state *state);

/* As PyErr_Format, but returns −1. */
int sa_error(PyObject *type, const char *format, ...);

/* The type of `value` for a message, with its module, as `numpy.ndarray`: until the thread's next. Clears what exception is
 * set, since the message is for another. */
const char *sa_type_name(PyObject *value);

/* Messages start with `what`. */
int sa_py_choose_isa(const char *name, PyObject *error, const char *what);

/* A method that calls `call(module, number, …)`. */
#define SA_FUNCTION(name, call, number)                                                                                        \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {                      \
        return call(module, number, args, nargs, kwnames);                                                                     \
    }
#define SA_METHOD(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, doc}

#endif
