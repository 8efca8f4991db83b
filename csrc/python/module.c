/* The extension module: its state, its initialisation and its method table. */
#define SA_IMPORTS_NUMPY
#include "python/module.h"

#include <stdlib.h>

#include "python/checksum.h"
#include "python/transformer.h"
#include "python/narrow.h"
#include "python/proxy.h"
#include "python/rowops.h"
#include "python/run.h"
#include "python/runtime.h"
#include "python/optimizer.h"

static int exec_module(PyObject *module) {
    sa_state *state = sa_state_of(module);
    PyObject *numpy = NULL, *ma = NULL, *exceptions = NULL;
    int status = -1;
    if (PyArray_ImportNumPyAPI() < 0) {
        goto fail;
    }
    for (int id = 0; id < SA_SIGNATURES; ++id) {
        for (int i = 0; i < SA_MAX_PARAMETERS && sa_signatures[id].names[i] != NULL; ++i) {
            state->names[id][i] = PyUnicode_InternFromString(sa_signatures[id].names[i]);
            if (state->names[id][i] == NULL) {
                goto fail;
            }
        }
    }
    if ((numpy = PyImport_ImportModule("numpy")) == NULL || (ma = PyImport_ImportModule("numpy.ma")) == NULL ||
        (exceptions = PyImport_ImportModule("numpy.exceptions")) == NULL ||
        (state->masked_array = PyObject_GetAttrString(ma, "MaskedArray")) == NULL ||
        (state->matrix = PyObject_GetAttrString(numpy, "matrix")) == NULL ||
        (state->shares_memory = PyObject_GetAttrString(numpy, "shares_memory")) == NULL ||
        (state->too_hard = PyObject_GetAttrString(exceptions, "TooHardError")) == NULL) {
        goto fail;
    }
    PyMethodDef *const tables[] = {sa_checksum_methods, sa_embedding_methods, sa_narrow_methods, sa_proxy_methods,
                                   sa_rows_methods,     sa_runtime_methods,   sa_update_methods};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; ++i) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            goto fail;
        }
    }
    const char *isa = getenv("SELFATTN_ISA");
    if (isa != NULL && isa[0] != 0 && sa_py_choose_isa(isa, PyExc_ImportError, "SELFATTN_ISA=") < 0) {
        goto fail;
    }
    status = 0;
fail:
    Py_XDECREF(numpy);
    Py_XDECREF(ma);
    Py_XDECREF(exceptions);
    return status;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    sa_state *state = sa_state_of(module);
    Py_VISIT(state->masked_array);
    Py_VISIT(state->matrix);
    Py_VISIT(state->shares_memory);
    Py_VISIT(state->too_hard);
    return 0;
}

static int clear(PyObject *module) {
    sa_state *state = sa_state_of(module);
    for (int id = 0; id < SA_SIGNATURES; ++id) {
        for (int i = 0; i < SA_MAX_PARAMETERS; ++i) {
            Py_CLEAR(state->names[id][i]);
        }
    }
    Py_CLEAR(state->masked_array);
    Py_CLEAR(state->matrix);
    Py_CLEAR(state->shares_memory);
    Py_CLEAR(state->too_hard);
    sa_blocks_clear(state);
    return 0;
}

static void release_module(void *module) { clear((PyObject *)module); }

static PyMethodDef methods[] = {
    {"scaled_dot_product_attention", (PyCFunction)(void (*)(void))sa_py_attention, METH_FASTCALL | METH_KEYWORDS,
     sa_doc_attention},
    {"_attention_forward", (PyCFunction)(void (*)(void))sa_py_attention_forward, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_attention_backward", (PyCFunction)(void (*)(void))sa_py_attention_backward, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_varlen_attention", (PyCFunction)(void (*)(void))sa_py_varlen, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_cached_attention", (PyCFunction)(void (*)(void))sa_py_attention_cached, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_varlen_forward", (PyCFunction)(void (*)(void))sa_py_varlen_forward, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"_varlen_backward", (PyCFunction)(void (*)(void))sa_py_varlen_backward, METH_FASTCALL | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
#if defined(Py_mod_multiple_interpreters)
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* NumPy is not either */
#endif
#if defined(Py_mod_gil)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,      .m_name = "selfattn._core", .m_doc = "The C core of selfattn. Import selfattn instead.",
    .m_size = sizeof(sa_state), .m_methods = methods,       .m_slots = slots,
    .m_traverse = traverse,     .m_clear = clear,           .m_free = release_module,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
