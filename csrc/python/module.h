/* What the binding's files share: the module's state, the table of signatures, and NumPy's C API. The only C that includes
 * Python.h lives in this folder. */
#ifndef SA_PYTHON_MODULE_H
#define SA_PYTHON_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL selfattn_array_api /* NumPy's table: the one global that is written, once */
#ifndef SA_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>

#include "selfattn.h"

#define SA_MAX_PARAMETERS 26
#define SA_KEPT_BLOCKS 8

/* One row per function that takes keywords: signatures.c. */
typedef enum {
    SA_SIG_ATTENTION,
    SA_SIG_ATTENTION_FORWARD,
    SA_SIG_ATTENTION_BACKWARD,
    SA_SIG_ATTENTION_CACHED,
    SA_SIG_VARLEN,
    SA_SIG_VARLEN_FORWARD,
    SA_SIG_VARLEN_BACKWARD,
    SA_SIG_SOFTMAX,
    SA_SIG_LOG_SOFTMAX,
    SA_SIG_LAYER_NORM,
    SA_SIG_RMS_NORM,
    SA_SIG_GELU,
    SA_SIG_ROTARY,
    SA_SIGNATURES
} sa_signature_id;

typedef struct {
    const char *function;
    int positional, required; /* how many may be given by position; how many must be given */
    const char *names[SA_MAX_PARAMETERS + 1];
} sa_signature;

extern const sa_signature sa_signatures[SA_SIGNATURES];

typedef struct {
    PyObject *names[SA_SIGNATURES][SA_MAX_PARAMETERS]; /* interned */
    PyObject *masked_array, *matrix;                   /* array types that are refused */
    PyObject *shares_memory, *too_hard;                /* numpy.shares_memory and its TooHardError */
    _Atomic(void *) blocks[SA_KEPT_BLOCKS];            /* memory for the next calls: blocks.c */
    atomic_uint block_turn;                            /* whose slot makes room next */
    atomic_bool malloc_keeps;                          /* has been told of large blocks: blocks.c */
} sa_state;

static inline sa_state *sa_state_of(PyObject *module) { return (sa_state *)PyModule_GetState(module); }

/* Sorts a fastcall's arguments into values[] in the order of the signature; NULL where one was not given. The references
 * are borrowed. Returns −1 with a TypeError set. */
int sa_parse(const sa_state *state, sa_signature_id id, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **values);

PyObject *sa_py_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_attention_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_attention_cached(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_varlen(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_varlen_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *sa_py_varlen_backward(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
extern const char sa_doc_attention[];

#endif
