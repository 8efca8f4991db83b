/* Owns the extension module: state, initialisation, method table. */
#define SA_IMPORTS_NUMPY
#include "python/module.h"

#include <stdlib.h>

#include "python/run.h"

int sa_error(PyObject *type, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    return -1;
}

static int exec_module(PyObject *module) {
    sa_state *state = sa_state_of(module);
    static const char *const of_numpy[SA_FROM_NUMPY][2] = {[SA_MASKED_ARRAY] = {"numpy.ma", "MaskedArray"},
                                                           [SA_MATRIX] = {"numpy", "matrix"},
                                                           [SA_SHARES_MEMORY] = {"numpy", "shares_memory"},
                                                           [SA_TOO_HARD_ERROR] = {"numpy.exceptions", "TooHardError"},
                                                           [SA_AXIS_ERROR] = {"numpy.exceptions", "AxisError"}};
    if (PyArray_ImportNumPyAPI() < 0 || sa_family_start(&state->attention, &sa_attention_family) < 0 ||
        sa_family_start(&state->rows, &sa_row_family) < 0) {
        return -1;
    }
    for (int i = 0; i < SA_FROM_NUMPY; ++i) {
        PyObject *from = PyImport_ImportModule(of_numpy[i][0]);
        state->numpy[i] = from ? PyObject_GetAttrString(from, of_numpy[i][1]) : NULL;
        Py_XDECREF(from);
        if (state->numpy[i] == NULL) {
            return -1;
        }
    }
    PyMethodDef *const tables[] = {sa_attention_methods,   sa_attention_backward_methods,
                                   sa_checksum_methods,    sa_linear_methods,
                                   sa_transformer_methods, sa_narrow_methods,
                                   sa_proxy_methods,       sa_rows_methods,
                                   sa_runtime_methods,     sa_update_methods,
                                   sa_compact_methods};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; ++i) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    const char *isa = getenv("SELFATTN_ISA");
    return isa != NULL && isa[0] != 0 ? sa_py_choose_isa(isa, PyExc_ImportError, "SELFATTN_ISA=") : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    sa_state *state = sa_state_of(module);
    for (int i = 0; i < SA_FROM_NUMPY; ++i) {
        Py_VISIT(state->numpy[i]);
    }
    return 0;
}

static int clear(PyObject *module) {
    sa_state *state = sa_state_of(module);
    sa_family_clear(&state->attention);
    sa_family_clear(&state->rows);
    for (int i = 0; i < SA_FROM_NUMPY; ++i) {
        Py_CLEAR(state->numpy[i]);
    }
    sa_blocks_clear(state);
    return 0;
}

static void release_module(void *module) { clear((PyObject *)module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
#if defined(Py_mod_multiple_interpreters)
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* nor does NumPy */
#endif
#if defined(Py_mod_gil)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,      .m_name = "selfattn._core", .m_doc = "The C core of selfattn. Import selfattn instead.",
    .m_size = sizeof(sa_state), .m_slots = slots,           .m_traverse = traverse,
    .m_clear = clear,           .m_free = release_module,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
