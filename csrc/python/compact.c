/* Packs weights of 8 or 16 bits for their products, for selfattn/engine/weights.py, and points to those in blocks of a file, for
 * selfattn/engine/weights.py. Python holds them as capsules. */
#include "python/arrays.h"

#include <stdlib.h>

#include "drivers/blocks.h"
#include "python/compact.h"

static const char capsule_name[] = "selfattn._compact";

typedef struct {
    sa_compact weights;
    void *memory;    /* owned, or NULL */
    PyObject *array; /* of blocks: owned, or NULL */
} packed;

const sa_compact *sa_compact_of(PyObject *x) {
    return PyCapsule_IsValid(x, capsule_name) ? &((packed *)PyCapsule_GetPointer(x, capsule_name))->weights : NULL;
}

static void release(PyObject *capsule) {
    packed *p = PyCapsule_GetPointer(capsule, capsule_name);
    Py_XDECREF(p->array);
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

/* ---- blocks -------------------------------------------------------------------------------------------------------------- */

/* SA_BLOCK_TYPES: there is no such type. */
static sa_block_type type_of(const char *name) {
    sa_block_type type = 0;
    while (type < SA_BLOCK_TYPES && strcmp(name, sa_block_shape_of(type)->name) != 0) {
        ++type;
    }
    return type;
}

/* The numbers and the bytes of a block of each kind. */
static PyObject *block_shapes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *shapes = PyDict_New();
    for (int type = 0; shapes != NULL && type < SA_BLOCK_TYPES; ++type) {
        const sa_block_shape *s = sa_block_shape_of(type);
        PyObject *shape = Py_BuildValue("nn", s->numbers, s->bytes);
        if (shape == NULL || PyDict_SetItemString(shapes, s->name, shape) < 0) {
            Py_CLEAR(shapes);
        }
        Py_XDECREF(shape);
    }
    return shapes;
}

static PyObject *blocks_at(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *rows;
    const char *name;
    Py_ssize_t columns;
    if (!PyArg_ParseTuple(args, "Osn:_blocks", &rows, &name, &columns)) {
        return NULL;
    }
    const sa_block_type type = type_of(name);
    if (type == SA_BLOCK_TYPES || columns < 0 || columns > SA_MAX_WIDTH || columns % sa_block_shape_of(type)->numbers != 0) {
        return PyErr_Format(PyExc_ValueError, "there are no rows of %zd columns in blocks of %s", columns, name);
    }
    const sa_block_shape *shape = sa_block_shape_of(type);
    const npy_intp bytes = columns / shape->numbers * shape->bytes;
    PyArrayObject *array = (PyArrayObject *)rows;
    if (!sa_is_plain(rows, NPY_UINT8, 2) || PyArray_DIM(array, 1) != bytes || PyArray_DIM(array, 0) > SA_MAX_WIDTH) {
        return PyErr_Format(PyExc_TypeError, "%zd columns of %s must be a contiguous 2-D array of uint8 with %zd columns",
                            columns, name, bytes);
    }
    packed *p = PyMem_Calloc(1, sizeof *p);
    if (p == NULL) {
        return PyErr_NoMemory();
    }
    p->weights = sa_blocks_at(type, PyArray_DIM(array, 0), columns, PyArray_DATA(array));
    p->array = Py_NewRef(rows);
    PyObject *capsule = PyCapsule_New(p, capsule_name, release);
    if (capsule == NULL) {
        Py_DECREF(p->array);
        PyMem_Free(p);
    }
    return capsule;
}

/* Rows of what _blocks made, by an array of int64, as float32. */
static PyObject *expand_blocks(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *weights, *rows;
    if (!PyArg_ParseTuple(args, "OO:_expand_blocks", &weights, &rows)) {
        return NULL;
    }
    const sa_compact *w = sa_compact_of(weights);
    if (w == NULL || w->kind != SA_WEIGHTS_BLOCKS || !sa_is_plain(rows, NPY_INT64, 1)) {
        return PyErr_Format(PyExc_TypeError, "takes what _blocks made and a contiguous 1-D array of int64");
    }
    const npy_intp shape[2] = {PyArray_DIM((PyArrayObject *)rows, 0), w->in};
    PyObject *result = PyArray_SimpleNew(2, shape, NPY_FLOAT);
    if (result == NULL) {
        return NULL;
    }
    float *to = PyArray_DATA((PyArrayObject *)result);
    for (npy_intp i = 0; i < shape[0]; ++i) {
        const int64_t row = ((const int64_t *)PyArray_DATA((PyArrayObject *)rows))[i];
        if (row < 0 || row >= w->out) {
            Py_DECREF(result);
            return PyErr_Format(PyExc_IndexError, "row %lld is out of bounds for %zd rows", (long long)row, w->out);
        }
        sa_blocks_row(w, (ptrdiff_t)row, to + i * w->in);
    }
    return result;
}

PyMethodDef sa_compact_methods[] = {
    {"_block_shapes", block_shapes, METH_NOARGS,
     "The numbers and the bytes of a block of each kind that a GGUF file may hold."},
    {"_blocks", blocks_at, METH_VARARGS, "Weights in blocks, from rows of bytes, the kind, and the number of columns."},
    {"_expand_blocks", expand_blocks, METH_VARARGS, "Rows of weights in blocks as float32."},
    {"_pack_int8", pack_int8, METH_VARARGS, "Weights of int8 with a scale for each row, packed for their products."},
    {"_pack_bfloat16", pack_bfloat16, METH_O, "Weights of bfloat16, packed for their products."},
    {"_compact_products", compact_products, METH_O, "What multiplies int8 (True) or bfloat16 (False) here, or None."},
    {NULL, NULL, 0, NULL},
};
