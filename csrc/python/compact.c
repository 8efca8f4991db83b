/* Copies weights of 8 or 16 bits to panels, and points to the quants of a file, for selfattn/engine/weights.py.
 * Python holds them as capsules. */
#include "python/binding.h"

#include <stdlib.h>

#include "drivers/quants.h"
#include "python/compact.h"

static const char capsule_name[] = "selfattn._compact";

typedef struct {
    sa_compact weights;
    void *memory;    /* panels: owned, or NULL */
    PyObject *array; /* quants: the array of rows, or a tuple of it and the strips; owned, or NULL */
} held;

const sa_compact *sa_compact_of(PyObject *x) {
    return PyCapsule_IsValid(x, capsule_name) ? &((held *)PyCapsule_GetPointer(x, capsule_name))->weights : NULL;
}

int sa_compact_check(const sa_compact *weights) {
    return weights->kind != SA_WEIGHTS_BF16 || sa_compact_active(weights->kind) != NULL
               ? 0
               : sa_error(PyExc_RuntimeError, "the instruction set in use, %s, does not multiply bfloat16",
                          sa_isa_name());
}

static void release(PyObject *capsule) {
    held *p = PyCapsule_GetPointer(capsule, capsule_name);
    Py_XDECREF(p->array);
    free(p->memory);
    PyMem_Free(p);
}

/* Returns a capsule of the weights. Takes over the memory, and makes a reference to the array. */
static PyObject *hold(sa_compact weights, void *memory, PyObject *array) {
    held *p = PyMem_Calloc(1, sizeof *p);
    PyObject *capsule = p == NULL ? PyErr_NoMemory() : PyCapsule_New(p, capsule_name, release);
    if (capsule == NULL) {
        free(memory);
        PyMem_Free(p);
        return NULL;
    }
    *p = (held){weights, memory, Py_XNewRef(array)};
    return capsule;
}

static PyObject *make_panels(sa_weights kind, PyArrayObject *weight, const float *scale) {
    const npy_intp out = PyArray_DIM(weight, 0), in = PyArray_DIM(weight, 1);
    if (out > SA_MAX_WIDTH || in > SA_MAX_WIDTH) {
        return PyErr_Format(PyExc_ValueError, "weight has shape %s, which is too large", sa_shape_of(weight));
    }
    char *memory = malloc(sa_compact_bytes(kind, out, in) + SA_CACHE_LINE); /* Windows has no aligned_alloc */
    if (memory == NULL) {
        return PyErr_NoMemory();
    }
    sa_compact weights;
    Py_BEGIN_ALLOW_THREADS;
    weights = sa_compact_fill(kind, out, in, PyArray_DATA(weight), scale,
                              memory + (SA_CACHE_LINE - (uintptr_t)memory % SA_CACHE_LINE) % SA_CACHE_LINE);
    Py_END_ALLOW_THREADS;
    return hold(weights, memory, NULL);
}

static PyObject *int8_panels(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *weight, *scale;
    if (!PyArg_ParseTuple(args, "OO:_int8_panels", &weight, &scale)) {
        return NULL;
    }
    if (!sa_is_plain(weight, NPY_INT8, 2) || !sa_is_plain(scale, NPY_FLOAT, 2) ||
        sa_dim(scale, 0) != sa_dim(weight, 0) || sa_dim(scale, 1) != sa_ceil_div(sa_dim(weight, 1), SA_GROUP)) {
        return PyErr_Format(
            PyExc_TypeError,
            "weight must be a contiguous 2-D array of int8, and scale one of float32 with an element for each "
            "%d numbers of a row",
            SA_GROUP);
    }
    return make_panels(SA_WEIGHTS_INT8, (PyArrayObject *)weight, sa_data(scale));
}

static PyObject *bfloat16_panels(PyObject *module, PyObject *weight) {
    (void)module;
    if (!sa_is_plain(weight, NPY_UINT16, 2)) {
        return PyErr_Format(PyExc_TypeError, "weight must be a contiguous 2-D array of uint16, the bits of bfloat16");
    }
    return make_panels(SA_WEIGHTS_BF16, (PyArrayObject *)weight, NULL);
}

static PyObject *compact_unit(PyObject *module, PyObject *int8) {
    (void)module;
    const sa_compact_unit *p = sa_compact_active(int8 == Py_True ? SA_WEIGHTS_INT8 : SA_WEIGHTS_BF16);
    return p == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(p->name);
}

/* ---- quants ------------------------------------------------------------------------------------------------------ */

/* Returns SA_QUANT_TYPES if there is no such type. */
static sa_quant_type type_of(const char *name) {
    sa_quant_type type = 0;
    while (type < SA_QUANT_TYPES && strcmp(name, sa_quant_kinds[type].name) != 0) {
        ++type;
    }
    return type;
}

static PyObject *quant_shapes(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *shapes = PyDict_New();
    for (int type = 0; shapes != NULL && type < SA_QUANT_TYPES; ++type) {
        const sa_quant_kind *s = &sa_quant_kinds[type];
        PyObject *shape = Py_BuildValue("ii", s->numbers, s->bytes);
        if (shape == NULL || PyDict_SetItemString(shapes, s->name, shape) < 0) {
            Py_CLEAR(shapes);
        }
        Py_XDECREF(shape);
    }
    return shapes;
}

/* Returns a capsule of the weights that the arguments describe, and in *copied where the copy is to be made,
 * or NULL. */
static PyObject *quants_of(PyObject *args, sa_copied_quants *copied) {
    PyObject *rows, *strips = Py_None;
    const char *name;
    Py_ssize_t columns;
    if (!PyTuple_Check(args)) {
        return PyErr_Format(PyExc_TypeError, "_quants takes tuples, not %R", args);
    }
    if (!PyArg_ParseTuple(args, "Osn|O:_quants", &rows, &name, &columns, &strips)) {
        return NULL;
    }
    const sa_quant_type type = type_of(name);
    if (type == SA_QUANT_TYPES || columns < 0 || columns > SA_MAX_WIDTH ||
        columns % sa_quant_kinds[type].numbers != 0) {
        return PyErr_Format(PyExc_ValueError, "there are no rows of %zd columns in quants of %s", columns, name);
    }
    const sa_quant_kind *shape = &sa_quant_kinds[type];
    const npy_intp bytes = columns / shape->numbers * shape->bytes;
    PyArrayObject *array = (PyArrayObject *)rows;
    if (!sa_is_plain(rows, NPY_UINT8, 2) || PyArray_DIM(array, 1) != bytes || PyArray_DIM(array, 0) > SA_MAX_WIDTH) {
        return PyErr_Format(PyExc_TypeError,
                            "%zd columns of %s must be a contiguous 2-D array of uint8 with %zd columns", columns, name,
                            bytes);
    }
    sa_compact weights = sa_quants_at(type, PyArray_DIM(array, 0), columns, PyArray_DATA(array));
    if (strips == Py_None) {
        return hold(weights, NULL, rows);
    }
    if (!sa_is_plain(strips, NPY_UINT8, 1) || !PyArray_ISWRITEABLE((PyArrayObject *)strips) ||
        shape->numbers % SA_PIECE != 0 || sa_dim(strips, 0) < PyArray_DIM(array, 0) * bytes) {
        return PyErr_Format(PyExc_TypeError,
                            "strips of %s must be a writable 1-D array of uint8 with as many bytes as the rows", name);
    }
    PyObject *both = PyTuple_Pack(2, rows, strips), *capsule = both == NULL ? NULL : hold(weights, NULL, both);
    Py_XDECREF(both);
    if (capsule != NULL) {
        *copied = (sa_copied_quants){(sa_compact *)sa_compact_of(capsule), sa_data(strips)};
    }
    return capsule;
}

static PyObject *quants(PyObject *module, PyObject *args) {
    (void)module;
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    sa_copied_quants *copied = PyMem_New(sa_copied_quants, (size_t)count + 1);
    PyObject *capsules = copied == NULL ? PyErr_NoMemory() : PyList_New(0);
    ptrdiff_t copies = 0;
    for (Py_ssize_t i = 0; capsules != NULL && i < count; ++i) {
        copied[copies].w = NULL;
        PyObject *capsule = quants_of(PyTuple_GET_ITEM(args, i), &copied[copies]);
        if (capsule == NULL || PyList_Append(capsules, capsule) < 0) {
            Py_CLEAR(capsules);
        } else {
            copies += copied[copies].w != NULL;
        }
        Py_XDECREF(capsule);
    }
    if (capsules != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        sa_quants_fill(copied, copies, copies > 0 ? sa_get_num_threads() : 1);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(copied);
    return capsules;
}

static PyObject *expand_quants(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *weights, *rows;
    if (!PyArg_ParseTuple(args, "OO:_expand_quants", &weights, &rows)) {
        return NULL;
    }
    const sa_compact *w = sa_compact_of(weights);
    if (w == NULL || w->kind != SA_WEIGHTS_QUANTS || !sa_is_plain(rows, NPY_INT64, 1)) {
        return PyErr_Format(PyExc_TypeError, "takes what _quants made and a contiguous 1-D array of int64");
    }
    const npy_intp shape[2] = {sa_dim(rows, 0), w->in};
    PyObject *result = PyArray_SimpleNew(2, shape, NPY_FLOAT);
    if (result == NULL) {
        return NULL;
    }
    float *to = sa_data(result);
    for (npy_intp i = 0; i < shape[0]; ++i) {
        const int64_t row = ((const int64_t *)sa_data(rows))[i];
        if (row < 0 || row >= w->out) {
            Py_DECREF(result);
            return PyErr_Format(PyExc_IndexError, "row %lld is out of bounds for %zd rows", (long long)row, w->out);
        }
        sa_quants_row(w, (ptrdiff_t)row, to + i * w->in);
    }
    return result;
}

PyMethodDef sa_compact_methods[] = {
    {"_quant_shapes", quant_shapes, METH_NOARGS,
     "The numbers and the bytes of a quant of each kind that a GGUF file may hold."},
    {"_quants", quants, METH_VARARGS,
     "A list of weights in quants, from tuples: rows of bytes, the kind, the number of columns, and, "
     "where digits are to multiply a copy, memory for it."},
    {"_expand_quants", expand_quants, METH_VARARGS, "Rows of what _quants made, by an array of int64, as float32."},
    {"_int8_panels", int8_panels, METH_VARARGS,
     "Weights of int8 with a scale for each 128 numbers of a row, in panels for their products."},
    {"_bfloat16_panels", bfloat16_panels, METH_O, "Weights of bfloat16, in panels for their products."},
    {"_compact_unit", compact_unit, METH_O,
     "The instructions that multiply int8 (True) or bfloat16 (False) here, or None."},
    {NULL, NULL, 0, NULL},
};
