/* Owns the way from Python objects to numbers. */
#include "python/scalars.h"

PyObject *sa_as_index(PyObject *value) {
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (index == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
    }
    return index;
}

int sa_read_real(PyObject *value, const char *name, double *x) {
    if (PyBool_Check(value) || PyArray_IsScalar(value, Bool) ||
        (PyArray_Check(value) && PyArray_TYPE((PyArrayObject *)value) == NPY_BOOL)) {
        PyErr_Format(PyExc_TypeError, "%s must be a real number, got a bool", name);
        return -1;
    }
    *x = PyFloat_AsDouble(value);
    if (*x == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be a real number, got %s", name, Py_TYPE(value)->tp_name);
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s is an integer too large for a float", name);
        }
        return -1;
    }
    return 0;
}

int sa_read_threads(PyObject *value, const char *name, int *threads) {
    PyObject *index = sa_as_index(value);
    int overflow = 0;
    const long n = index ? PyLong_AsLongAndOverflow(index, &overflow) : 0;
    if (index == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s must be an int from 1 to 1024 or None, got %R", name, value);
        }
        return -1;
    }
    Py_DECREF(index);
    if (overflow != 0 || n < 1 || n > 1024) {
        PyErr_Format(PyExc_ValueError, "%s must be an int from 1 to 1024 or None, got %R", name, value);
        return -1;
    }
    *threads = (int)n;
    return 0;
}
