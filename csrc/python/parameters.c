/* Owns the sorting of arguments into parameters; readers say what values mean. Loops run over given arguments only, so
 * plain calls stay cheap. */
#include "python/state.h"

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

/* −1: none. Identity first: names in source code are interned. */
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
