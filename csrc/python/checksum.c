/* A checksum of the memory of arrays, with which a pullback notices that parameters have changed. Not against malice. */
#include "checksum.h"

#include <string.h>

enum { LANES = 8 }; /* independent, to hide the latency of a multiplication */

/* A step is a bijection of h and of word, so one changed word always shows. The rotation brings high bits down, where the
 * next multiplication spreads them: without it the sign bits of two float64 numbers would cancel. */
static uint64_t mixed(uint64_t h, uint64_t word) {
    h ^= word;
    h = h << 29 | h >> 35;
    return h * UINT64_C(0x9E3779B97F4A7C15);
}

static uint64_t checksum(uint64_t h, const unsigned char *bytes, size_t n) {
    uint64_t lanes[LANES], word;
    for (int l = 0; l < LANES; ++l) {
        lanes[l] = h + (uint64_t)l;
    }
    for (; n >= sizeof lanes; n -= sizeof lanes, bytes += sizeof lanes) {
        for (int l = 0; l < LANES; ++l) {
            memcpy(&word, bytes + sizeof word * (size_t)l, sizeof word);
            lanes[l] = mixed(lanes[l], word);
        }
    }
    for (int l = 0; n > 0; ++l) {
        size_t part = n < sizeof word ? n : sizeof word;
        word = 0;
        memcpy(&word, bytes, part);
        lanes[l] = mixed(lanes[l], word);
        bytes += part;
        n -= part;
    }
    for (int l = 0; l < LANES; ++l) {
        h = mixed(h, lanes[l]);
    }
    return h;
}

/* The GIL is kept: the caller's parameters are small beside what it does with them. */
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
        h = checksum(h, PyArray_DATA(array), (size_t)PyArray_NBYTES(array));
        Py_DECREF(array);
    }
    return PyLong_FromUnsignedLongLong(h);
}

PyMethodDef sa_checksum_methods[] = {
    {"_checksum", sum_of_arrays, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
