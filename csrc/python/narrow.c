/* Arrays of float32 rounded into arrays of 16 bits, for selfattn/functional/_gradients.py: NumPy rounds to float16 one by one. */
#include "python/narrow.h"

#include "drivers/narrow.h"

static bool fits(PyArrayObject *x, int itemsize) {
    return PyArray_IS_C_CONTIGUOUS(x) && PyArray_ISALIGNED(x) && PyArray_ISNOTSWAPPED(x) && PyArray_ITEMSIZE(x) == itemsize;
}

/* (from, to, number of threads or 0) */
static PyObject *narrow(PyObject *module, PyObject *args) {
    (void)module;
    PyArrayObject *from, *to;
    Py_ssize_t threads;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyArray_Type, &from, &PyArray_Type, &to, &threads)) {
        return NULL;
    }
    if (PyArray_TYPE(from) != NPY_FLOAT32 || !fits(from, 4) || !fits(to, 2) || !PyArray_ISWRITEABLE(to) ||
        PyArray_SIZE(from) != PyArray_SIZE(to)) {
        PyErr_SetString(PyExc_TypeError, "expected float32 and an array of 16 bits of as many elements, both contiguous");
        return NULL;
    }
    const float *data = PyArray_DATA(from);
    uint16_t *target = PyArray_DATA(to);
    const ptrdiff_t n = PyArray_SIZE(from);
    const sa_dtype dtype = PyArray_TYPE(to) == NPY_FLOAT16 ? SA_F16 : SA_BF16;
    const int most = threads < 1 ? sa_get_num_threads() : threads < INT_MAX ? (int)threads : INT_MAX;
    Py_BEGIN_ALLOW_THREADS;
    sa_narrow(data, n, dtype, target, most);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef sa_narrow_methods[] = {
    {"_narrow", narrow, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
