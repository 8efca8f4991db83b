/* Owns the way from Python objects to numbers. */
#include "python/scalars.h"

#include "runtime/team.h"

PyObject *sa_as_index(PyObject *value) {
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (index == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
    }
    return index;
}

int sa_read_real(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    const int type = PyArray_Check(value) ? PyArray_TYPE((PyArrayObject *)value) : NPY_NOTYPE;
    if (PyBool_Check(value) || PyArray_IsScalar(value, Bool) || type == NPY_BOOL) {
        return sa_error(PyExc_TypeError, "%s must be a real number, got a bool", name);
    }
    /* NumPy makes floats of these: it leaves out imaginary parts, and reads texts. */
    if (PyArray_IsScalar(value, ComplexFloating) || PyTypeNum_ISCOMPLEX(type) || PyTypeNum_ISDATETIME(type) ||
        type == NPY_OBJECT || type == NPY_STRING || type == NPY_UNICODE || type == NPY_VSTRING) {
        return sa_error(PyExc_TypeError, "%s must be a real number, not %R", name, value);
    }
    const double x = PyFloat_AsDouble(value);
    if (x == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            sa_error(PyExc_TypeError, "%s must be a real number, got %s", name, sa_type_name(value));
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            sa_error(PyExc_ValueError, "%s is an integer too large for a float", name);
        }
        return -1;
    }
    *(double *)to = x;
    return 0;
}

int sa_read_threads(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    PyObject *index = sa_as_index(value);
    int overflow = 0;
    const long n = index ? PyLong_AsLongAndOverflow(index, &overflow) : 0;
    if (index == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (index == NULL || overflow != 0 || n < 1 || n > SA_MOST_THREADS) {
        PyObject *type = index == NULL ? PyExc_TypeError : PyExc_ValueError;
        Py_XDECREF(index);
        return sa_error(type, "%s must be an int from 1 to 1024 or None, got %R", name, value);
    }
    Py_DECREF(index);
    *(int *)to = (int)n;
    return 0;
}

int sa_read_flag(void *call, PyObject *value, const char *name, void *to) {
    (void)call;
    if (PyUnicode_Check(value) || PyBytes_Check(value) || PyFloat_CheckExact(value)) {
        return sa_error(PyExc_TypeError, "%s must be a bool, got %R%s", name, value,
                        strcmp(name, "is_causal") == 0 ? " (which diagonal it is, causal='lower_right' says)" : "");
    }
    const int truth = PyObject_IsTrue(value);
    *(bool *)to = truth > 0;
    return truth < 0 ? -1 : 0;
}
