/* Owns the checksum by which a pullback notices changed parameters; not against malice. */
#include "python/module.h"

/* A bijection for each word: one that changed shows. Without the rotation two changed signs would cancel. */
static uint64_t mixed(uint64_t h, uint64_t word) {
    h = (h ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return h << 29 | h >> 35;
}

/* Several lanes: a multiplication need not wait for the one before. Zeros fill up the last words. */
static uint64_t add_bytes(uint64_t h, const char *data, size_t bytes) {
    enum { LANES = 8 };
    uint64_t lanes[LANES], words[LANES] = {0};
    for (int i = 0; i < LANES; ++i) {
        lanes[i] = h;
    }
    for (; bytes >= sizeof words; data += sizeof words, bytes -= sizeof words) {
        memcpy(words, data, sizeof words);
        for (int i = 0; i < LANES; ++i) {
            lanes[i] = mixed(lanes[i], words[i]);
        }
    }
    memset(words, 0, sizeof words);
    memcpy(words, data, bytes);
    for (int i = 0; i < LANES; ++i) {
        h = mixed(h, mixed(lanes[i], words[i]));
    }
    return h;
}

/* Keeps the GIL: the sum is short beside what the caller does with the parameters. */
static PyObject *sum_of_arrays(PyObject *module, PyObject *arrays) {
    (void)module;
    if (!PyTuple_Check(arrays)) {
        return PyErr_Format(PyExc_TypeError, "expected a tuple of arrays, not %s", Py_TYPE(arrays)->tp_name);
    }
    uint64_t h = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); ++i) {
        PyObject *item = PyTuple_GET_ITEM(arrays, i);
        if (!PyArray_Check(item) || PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)item))) {
            return PyErr_Format(PyExc_TypeError, "expected arrays of numbers, not %s", Py_TYPE(item)->tp_name);
        }
        PyArrayObject *array = (PyArrayObject *)item;
        if (PyArray_IS_C_CONTIGUOUS(array) || PyArray_IS_F_CONTIGUOUS(array)) {
            Py_INCREF(array);
        } else if ((array = (PyArrayObject *)PyArray_NewCopy(array, NPY_CORDER)) == NULL) {
            return NULL;
        }
        h = add_bytes(h + 1, PyArray_DATA(array), (size_t)PyArray_NBYTES(array));
        Py_DECREF(array);
    }
    return PyLong_FromUnsignedLongLong(h);
}

PyMethodDef sa_checksum_methods[] = {
    {"_checksum", sum_of_arrays, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
