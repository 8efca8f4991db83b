/* Packs weights of 8 or 16 bits for their products, for selfattn/nn/_compact.py. Python holds them as capsules, whose numbers
 * nobody changes. */
#include "python/arrays.h"

#include <stdlib.h>

#include "python/compact.h"

static const char capsule_name[] = "selfattn._compact";

typedef struct {
    sa_compact weights;
    void *memory;
} packed;

const sa_compact *sa_compact_of(PyObject *x) {
    return PyCapsule_IsValid(x, capsule_name) ? &((packed *)PyCapsule_GetPointer(x, capsule_name))->weights : NULL;
}

static void release(PyObject *capsule) {
    packed *p = PyCapsule_GetPointer(capsule, capsule_name);
    free(p->memory);
    PyMem_Free(p);
}

static PyObject *pack(sa_weights kind, PyArrayObject *weight, const float *scale) {
    const npy_intp out = PyArray_DIM(weight, 0), in = PyArray_DIM(weight, 1);
    if (out > SA_MAX_WIDTH || in > SA_MAX_WIDTH) {
        return PyErr_Format(PyExc_ValueError, "weight has shape %s, which is too large", sa_shape_of(weight));
    }
    packed *p = PyMem_Calloc(1, sizeof *p);
    if (p == NULL) {
        return PyErr_NoMemory();
    }
    const size_t bytes = sa_whole_lines(sa_compact_bytes(kind, out, in));
    p->memory = aligned_alloc(SA_CACHE_LINE, bytes);
    PyObject *capsule = p->memory == NULL ? PyErr_NoMemory() : PyCapsule_New(p, capsule_name, release);
    if (capsule == NULL) {
        free(p->memory);
        PyMem_Free(p);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    p->weights = sa_compact_pack(kind, out, in, PyArray_DATA(weight), scale, p->memory);
    Py_END_ALLOW_THREADS;
    return capsule;
}

static PyObject *pack_int8(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *weight, *scale;
    if (!PyArg_ParseTuple(args, "OO:_pack_int8", &weight, &scale)) {
        return NULL;
    }
    if (!sa_is_plain(weight, NPY_INT8, 2) || !sa_is_plain(scale, NPY_FLOAT, 2) ||
        PyArray_DIM((PyArrayObject *)scale, 0) != PyArray_DIM((PyArrayObject *)weight, 0) ||
        PyArray_DIM((PyArrayObject *)scale, 1) != sa_ceil_div(PyArray_DIM((PyArrayObject *)weight, 1), SA_GROUP)) {
        return PyErr_Format(PyExc_TypeError,
                            "weight must be a contiguous 2-D array of int8, and scale one of float32 with an element for each "
                            "%d numbers of a row",
                            SA_GROUP);
    }
    return pack(SA_WEIGHTS_INT8, (PyArrayObject *)weight, PyArray_DATA((PyArrayObject *)scale));
}

static PyObject *pack_bfloat16(PyObject *module, PyObject *weight) {
    (void)module;
    if (!sa_is_plain(weight, NPY_UINT16, 2)) {
        return PyErr_Format(PyExc_TypeError, "weight must be a contiguous 2-D array of uint16, the bits of bfloat16");
    }
    return pack(SA_WEIGHTS_BF16, (PyArrayObject *)weight, NULL);
}

/* The instructions that multiply int8 (True) or bfloat16 (False) here, or None. */
static PyObject *compact_products(PyObject *module, PyObject *int8) {
    (void)module;
    const sa_compact_products *p = sa_compact_active(int8 == Py_True ? SA_WEIGHTS_INT8 : SA_WEIGHTS_BF16);
    return p == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(p->name);
}

PyMethodDef sa_compact_methods[] = {
    {"_pack_int8", pack_int8, METH_VARARGS, "Weights of int8 with a scale for each row, packed for their products."},
    {"_pack_bfloat16", pack_bfloat16, METH_O, "Weights of bfloat16, packed for their products."},
    {"_compact_products", compact_products, METH_O, "What multiplies int8 (True) or bfloat16 (False) here, or None."},
    {NULL, NULL, 0, NULL},
};
