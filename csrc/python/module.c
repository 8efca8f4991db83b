/* Owns the extension module: its functions, its initialisation and end. */
#include "python/record.h"
#include "python/run.h"

extern PyMethodDef sa_attention_methods[], sa_attention_backward_methods[], sa_compact_methods[], sa_dlpack_methods[],
    sa_linear_methods[], sa_proxy_methods[], sa_record_methods[], sa_rows_methods[], sa_runtime_methods[],
    sa_search_methods[], sa_transformer_methods[], sa_update_methods[];
extern const sa_family sa_attention_family, sa_row_family;
extern const sa_record sa_projection_record, sa_norm_record, sa_rotary_record, sa_dropout_record, sa_layer_record,
    sa_transformer_record, sa_call_record, sa_update_record;

static const sa_record *const records[SA_RECORDS] = {[SA_PROJECTION_RECORD] = &sa_projection_record,
                                                     [SA_NORM_RECORD] = &sa_norm_record,
                                                     [SA_ROTARY_RECORD] = &sa_rotary_record,
                                                     [SA_DROPOUT_RECORD] = &sa_dropout_record,
                                                     [SA_LAYER_RECORD] = &sa_layer_record,
                                                     [SA_TRANSFORMER_RECORD] = &sa_transformer_record,
                                                     [SA_CALL_RECORD] = &sa_call_record,
                                                     [SA_UPDATE_RECORD] = &sa_update_record};

static PyMethodDef *const tables[] = {
    sa_attention_methods,   sa_attention_backward_methods,
    sa_compact_methods,     sa_dlpack_methods,
    sa_linear_methods,      sa_proxy_methods,
    sa_record_methods,      sa_rows_methods,
    sa_runtime_methods,     sa_search_methods,
    sa_transformer_methods, sa_update_methods,
};
enum { TABLES = sizeof tables / sizeof *tables };

/* Gives a function the signature and docstring that Python has: CPython reads them from the function's table whenever
 * they are asked for. The copy lives as long as the table, which is forever. */
static PyObject *describe(PyObject *module, PyObject *args) {
    (void)module;
    const char *name, *text;
    if (!PyArg_ParseTuple(args, "ss:_describe", &name, &text)) {
        return NULL;
    }
    PyMethodDef *method = NULL;
    for (int i = 0; i < TABLES; ++i) {
        for (PyMethodDef *m = tables[i]; m->ml_name != NULL; ++m) {
            method = strcmp(m->ml_name, name) == 0 ? m : method;
        }
    }
    char *copy = method ? PyMem_RawMalloc(strlen(text) + 1) : NULL;
    if (copy == NULL) {
        return method ? PyErr_NoMemory() : PyErr_Format(PyExc_ValueError, "there is no function %s", name);
    }
    method->ml_doc = strcpy(copy, text);
    Py_RETURN_NONE;
}

static PyMethodDef own[] = {
    {"_describe", describe, METH_VARARGS, "Set the signature and docstring of a function, by its name."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module) {
    sa_state *state = sa_state_of(module);
    if (sa_import_numpy() < 0 || sa_family_start(&state->attention, &sa_attention_family) < 0 ||
        sa_family_start(&state->rows, &sa_row_family) < 0 || PyModule_AddFunctions(module, own) < 0) {
        return -1;
    }
    for (int i = 0; i < SA_RECORDS; ++i) {
        state->records[i].record = records[i];
    }
    for (int i = 0; i < TABLES; ++i) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    const char *isa = getenv("SELFATTN_ISA");
    return isa != NULL && isa[0] != 0 ? sa_py_choose_isa(isa, PyExc_ImportError, "SELFATTN_ISA=") : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    sa_state *state = sa_state_of(module);
    for (int i = 0; i < SA_RECORDS; ++i) {
        Py_VISIT(state->records[i].type);
    }
    return 0;
}

static int clear(PyObject *module) {
    sa_state *state = sa_state_of(module);
    for (int i = 0; i < SA_RECORDS; ++i) {
        Py_CLEAR(state->records[i].type);
    }
    return 0;
}

static void release(void *module) {
    sa_state *state = sa_state_of(module);
    clear((PyObject *)module);
    sa_family_clear(&state->attention);
    sa_family_clear(&state->rows);
    sa_arena_clear(state);
}

/* Slots that CPython 3.11 does not know come last; PyInit__core ends the list after the slots that this CPython
 * knows. */
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
    /* From 3.12 on; nor does NumPy support them. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* from 3.13 on */
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,      .m_name = "selfattn._core", .m_doc = "The C core of selfattn. Import selfattn instead.",
    .m_size = sizeof(sa_state), .m_slots = slots,           .m_traverse = traverse,
    .m_clear = clear,           .m_free = release,
};

PyMODINIT_FUNC PyInit__core(void) {
    const int known = Py_Version >= 0x030D0000 ? 3 : Py_Version >= 0x030C0000 ? 2 : 1;
    slots[known] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&definition);
}
