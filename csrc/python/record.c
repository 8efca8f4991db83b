/* Owns the reading of records: which class is which, where its fields are, and their simple readers. */
#include "python/record.h"

/* ---- the classes ------------------------------------------------------------------------------------------------- */

/* The number of a field, or −1. */
static int number_of(const sa_record *record, PyObject *name) {
    for (int n = 0; n < record->count; ++n) {
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, record->fields[n].name) == 0) {
            return n;
        }
    }
    return -1;
}

/* Finds the place of each field of the table in `names`, the class's _fields: each name has one. */
static int find_places(const sa_record *record, PyObject *names, sa_record_state *found) {
    if (!PyTuple_Check(names)) {
        return sa_error(PyExc_TypeError, "%s has no tuple of _fields", record->name);
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(names);
    memset(found->place, -1, sizeof found->place);
    for (Py_ssize_t i = 0; i < count; ++i) {
        const int n = number_of(record, PyTuple_GET_ITEM(names, i));
        if (n < 0) {
            return sa_error(PyExc_TypeError, "the core knows no field %R of %s", PyTuple_GET_ITEM(names, i),
                            record->name);
        }
        found->place[n] = (signed char)i;
    }
    for (int n = 0; n < record->count; ++n) {
        if (found->place[n] < 0) {
            return sa_error(PyExc_TypeError, "%s lacks the field %s", record->name, record->fields[n].name);
        }
    }
    return 0;
}

/* Keeps a class, a subclass of tuple, and compares its fields with the table of its name. */
static PyObject *record(PyObject *module, PyObject *type) {
    sa_state *state = sa_state_of(module);
    if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
        return PyErr_Format(PyExc_TypeError, "a record is a subclass of tuple, not %R", type);
    }
    PyObject *name = PyObject_GetAttrString(type, "__name__"), *names = NULL;
    int kind = 0;
    while (name != NULL && kind < SA_RECORDS &&
           PyUnicode_CompareWithASCIIString(name, state->records[kind].record->name) != 0) {
        ++kind;
    }
    sa_record_state found = {NULL, NULL, {0}};
    if (kind == SA_RECORDS) {
        PyErr_Format(PyExc_TypeError, "the core knows no record %S", name);
    } else if (name != NULL && (names = PyObject_GetAttrString(type, "_fields")) != NULL &&
               find_places(state->records[kind].record, names, &found) == 0) {
        found.record = state->records[kind].record;
        found.type = Py_NewRef(type);
        PyObject *before = state->records[kind].type;
        state->records[kind] = found;
        Py_XDECREF(before);
    }
    Py_XDECREF(name);
    Py_XDECREF(names);
    return found.type == NULL ? NULL : Py_NewRef(type);
}

PyMethodDef sa_record_methods[] = {
    {"_record", record, METH_O, "Decorate a named tuple that the core reads by the names of its fields."},
    {NULL, NULL, 0, NULL},
};

/* ---- reading ----------------------------------------------------------------------------------------------------- */

bool sa_is_record(const sa_state *state, sa_record_kind kind, PyObject *value) {
    return (PyObject *)Py_TYPE(value) == state->records[kind].type &&
           PyTuple_GET_SIZE(value) == state->records[kind].record->count;
}

PyObject *sa_record_field(const sa_state *state, sa_record_kind kind, PyObject *value, int n) {
    return PyTuple_GET_ITEM(value, state->records[kind].place[n]);
}

int sa_record_read(const sa_state *state, sa_record_kind kind, PyObject *value, const char *what, void *call,
                   void *to) {
    const sa_record *record = state->records[kind].record;
    if (!sa_is_record(state, kind, value)) {
        return sa_error(PyExc_TypeError, "%s must be a %s, not %s", what, record->name, sa_type_name(value));
    }
    for (int n = 0; n < record->count; ++n) {
        const sa_field *field = &record->fields[n];
        if (field->read(call, sa_record_field(state, kind, value, n), field, (char *)to + field->to) < 0) {
            return -1;
        }
    }
    return 0;
}

int sa_field_object(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call, (void)field;
    *(PyObject **)to = value;
    return 0;
}

int sa_field_size(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call;
    const Py_ssize_t n = PyLong_Check(value) ? PyLong_AsSsize_t(value) : -1;
    if (n < 0) {
        PyErr_Clear();
        return sa_error(PyExc_ValueError, "%s must be an int from 0 to %zd, not %R", field->name, PY_SSIZE_T_MAX,
                        value);
    }
    *(ptrdiff_t *)to = n;
    return 0;
}

int sa_field_real(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call;
    if (!PyFloat_Check(value) && !PyLong_CheckExact(value)) {
        return sa_error(PyExc_TypeError, "%s must be a float, not %s", field->name, sa_type_name(value));
    }
    *(double *)to = PyFloat_AsDouble(value);
    return PyErr_Occurred() ? -1 : 0;
}

int sa_field_flag(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call;
    *(bool *)to = value == Py_True;
    return PyBool_Check(value) ? 0 : sa_error(PyExc_TypeError, "%s must be a bool, not %R", field->name, value);
}

/* Enumerations are as wide as int. */
int sa_field_choice(void *call, PyObject *value, const sa_field *field, void *to) {
    (void)call;
    int n = 0;
    for (const char *name = field->of; *name != 0; ++n) {
        const size_t length = strcspn(name, " ");
        char word[16] = {0};
        memcpy(word, name, length < sizeof word ? length : sizeof word - 1);
        if (value == Py_None ? strcmp(word, "None") == 0
                             : PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, word) == 0) {
            *(int *)to = n;
            return 0;
        }
        name += length + (name[length] == ' ');
    }
    return sa_error(PyExc_ValueError, "%s must be one of %s, not %R", field->name, field->of, value);
}
