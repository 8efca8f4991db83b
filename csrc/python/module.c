/* Owns the extension module: its functions, its initialisation and end. */
#include "python/run.h"

extern PyMethodDef sa_attention_methods[], sa_attention_backward_methods[], sa_compact_methods[], sa_dlpack_methods[],
    sa_linear_methods[], sa_proxy_methods[], sa_rows_methods[], sa_runtime_methods[], sa_search_methods[],
    sa_transformer_methods[], sa_update_methods[];
extern const sa_family sa_attention_family, sa_row_family;

static int exec_module(PyObject *module) {
    sa_state *state = sa_state_of(module);
    if (sa_state_start(state) < 0 || sa_family_start(&state->attention, &sa_attention_family) < 0 ||
        sa_family_start(&state->rows, &sa_row_family) < 0) {
        return -1;
    }
    PyMethodDef *const tables[] = {sa_attention_methods, sa_attention_backward_methods,
                                   sa_compact_methods,   sa_dlpack_methods,
                                   sa_linear_methods,    sa_proxy_methods,
                                   sa_rows_methods,      sa_runtime_methods,
                                   sa_search_methods,    sa_transformer_methods,
                                   sa_update_methods};
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
    for (int i = 0; i < SA_IMPORTED; ++i) {
        Py_VISIT(state->imported[i]);
    }
    return 0;
}

static int clear(PyObject *module) {
    sa_state *state = sa_state_of(module);
    sa_family_clear(&state->attention);
    sa_family_clear(&state->rows);
    for (int i = 0; i < SA_IMPORTED; ++i) {
        Py_CLEAR(state->imported[i]);
    }
    sa_arena_clear(state);
    return 0;
}

static void release_module(void *module) { clear((PyObject *)module); }

/* Slots that CPython 3.11 does not know come last; PyInit__core ends the list after the slots that this CPython knows. */
#if !defined(Py_mod_multiple_interpreters)
#define Py_mod_multiple_interpreters 3
#define Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED ((void *)0)
#endif
#if !defined(Py_mod_gil)
#define Py_mod_gil 4
#define Py_MOD_GIL_NOT_USED ((void *)1)
#endif

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)exec_module},
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* from 3.12 on; nor does NumPy support them */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},                                          /* from 3.13 on */
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,      .m_name = "selfattn._core", .m_doc = "The C core of selfattn. Import selfattn instead.",
    .m_size = sizeof(sa_state), .m_slots = slots,           .m_traverse = traverse,
    .m_clear = clear,           .m_free = release_module,
};

PyMODINIT_FUNC PyInit__core(void) {
    const int known = Py_Version >= 0x030D0000 ? 3 : Py_Version >= 0x030C0000 ? 2 : 1;
    slots[known] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&definition);
}
