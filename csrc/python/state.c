/* Owns what all of the binding uses: NumPy's C API, the module's state, messages. */
#define SA_IMPORTS_NUMPY
#include "python/state.h"

int sa_error(PyObject *type, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
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
    static const char *const of_numpy[SA_FROM_NUMPY][2] = {[SA_MASKED_ARRAY] = {"numpy.ma", "MaskedArray"},
                                                           [SA_MATRIX] = {"numpy", "matrix"},
                                                           [SA_SHARES_MEMORY] = {"numpy", "shares_memory"},
                                                           [SA_TOO_HARD_ERROR] = {"numpy.exceptions", "TooHardError"},
                                                           [SA_AXIS_ERROR] = {"numpy.exceptions", "AxisError"}};
    if (_import_array() < 0) { /* import_array() would make an ImportError of whatever comes up, of Ctrl-C too */
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
    return 0;
}
