/* Owns the checksum of arrays in memory (kernels/transformer/checksum.h). */
#include "python/state.h"

#include "kernels/kernels.h"

/* Keeps the GIL: the sum is short next to what the caller does with the parameters. */
static PyObject *sum_of_arrays(PyObject *module, PyObject *arrays) {
    (void)module;
    if (!PyTuple_Check(arrays)) {
        return PyErr_Format(PyExc_TypeError, "expected a tuple of arrays, not %s", sa_type_name(arrays));
    }
    uint64_t h = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); ++i) {
        PyObject *item = PyTuple_GET_ITEM(arrays, i);
        if (!PyArray_Check(item) || PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)item))) {
            return PyErr_Format(PyExc_TypeError, "expected arrays of numbers, not %s", sa_type_name(item));
        }
        PyArrayObject *array = (PyArrayObject *)item;
        if (PyArray_IS_C_CONTIGUOUS(array) || PyArray_IS_F_CONTIGUOUS(array)) {
            Py_INCREF(item);
        } else if ((array = (PyArrayObject *)PyArray_NewCopy(array, NPY_CORDER)) == NULL) {
            return NULL;
        }
        h = sa_kernels_active()->checksum(h + 1, PyArray_DATA(array), (size_t)PyArray_NBYTES(array));
        Py_DECREF(array);
    }
    return PyLong_FromUnsignedLongLong(h);
}

PyMethodDef sa_checksum_methods[] = {
    {"_checksum", sum_of_arrays, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
