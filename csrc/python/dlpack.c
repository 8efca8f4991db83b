/* Owns the reading of DLPack capsules, in which other libraries share arrays of bfloat16: NumPy, which reads capsules
 * of its own dtypes, has none (selfattn/_check.py). */
#include "python/binding.h"

#include <math.h>

typedef struct {
    void *data;
    int32_t device, device_number;
    int32_t ndim;
    uint8_t code, bits; /* of the dtype */
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements; without strides in C order */
    uint64_t byte_offset;
} dl_tensor;

/* What capsules hold: in version 1, and before there were versions. */
typedef struct {
    uint32_t major, minor;
    void *context;
    void (*release)(void *owner);
    uint64_t flags;
    dl_tensor tensor;
} dl_owner;

typedef struct {
    dl_tensor tensor;
    void *context;
    void (*release)(void *owner);
} dl_old_owner;

enum { CPU = 1, CUDA_HOST = 3, BFLOAT = 4, READ_ONLY = 1 };

/* The names of capsules, and of those that an array has taken over. */
static const char new_name[] = "dltensor_versioned", used_name[] = "used_dltensor_versioned";
static const char old_name[] = "dltensor", used_old_name[] = "used_dltensor";

/* Gives back the memory of an array that ends, which may be while an exception is set. */
static void end(PyObject *capsule) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    const bool is_old = PyCapsule_IsValid(capsule, used_old_name);
    void *owner = PyCapsule_GetPointer(capsule, is_old ? used_old_name : used_name);
    void (*release)(void *) = is_old ? ((dl_old_owner *)owner)->release : ((dl_owner *)owner)->release;
    if (release != NULL) {
        release(owner);
    }
    PyErr_Restore(type, value, traceback);
}

/* Returns the elements as uint16, in the capsule's memory: an impossible shape or address is an error,
 * others are trusted. */
static PyObject *read_bfloat16(PyObject *module, PyObject *capsule) {
    (void)module;
    const bool is_old = PyCapsule_IsValid(capsule, old_name);
    if (!is_old && !PyCapsule_IsValid(capsule, new_name)) {
        return PyErr_Format(PyExc_TypeError, "__dlpack__ must return a new capsule, not %R", capsule);
    }
    void *owner = PyCapsule_GetPointer(capsule, is_old ? old_name : new_name);
    const dl_owner *versioned = is_old ? NULL : owner;
    if (versioned != NULL && versioned->major != 1) {
        return PyErr_Format(PyExc_BufferError, "the capsule has version %u of DLPack, not 1", versioned->major);
    }
    const dl_tensor *t = is_old ? &((dl_old_owner *)owner)->tensor : &versioned->tensor;
    if ((t->device != CPU && t->device != CUDA_HOST) || t->code != BFLOAT || t->bits != 16 || t->lanes != 1) {
        return PyErr_Format(PyExc_BufferError,
                            "the capsule must hold bfloat16 on the CPU, not device %d, dtype (%u, %u, %u)", t->device,
                            t->code, t->bits, t->lanes);
    }
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    bool empty = false, fits = t->ndim >= 0 && t->ndim <= NPY_MAXDIMS && (t->ndim == 0 || t->shape != NULL);
    double reach = (double)t->byte_offset;
    for (int axis = 0; fits && axis < t->ndim; ++axis) {
        const double stride = t->strides ? 2 * (double)t->strides[axis] : 0;
        shape[axis] = (npy_intp)t->shape[axis];
        empty |= shape[axis] == 0;
        reach += fabs(stride) * ((double)shape[axis] + 1);
        fits = shape[axis] >= 0 && reach < 0x1p62;
        strides[axis] = fits && t->strides ? 2 * (npy_intp)t->strides[axis] : 0;
    }
    if (!fits || (t->data == NULL && !empty)) {
        return PyErr_Format(PyExc_BufferError, "the capsule has a shape, strides or an address that no array has");
    }
    const int flags = versioned != NULL && !(versioned->flags & READ_ONLY) ? NPY_ARRAY_WRITEABLE : 0;
    PyObject *array = sa_checked(PyArray_New(&PyArray_Type, t->ndim, shape, NPY_UINT16, t->strides ? strides : NULL,
                                             t->data ? (char *)t->data + t->byte_offset : NULL, 0, flags, NULL));
    if (array == NULL) {
        return NULL;
    }
    /* The array owns the capsule, and so its memory: a producer leaves a capsule alone whose name has changed. */
    if (PyCapsule_SetName(capsule, is_old ? used_old_name : used_name) < 0 ||
        PyCapsule_SetDestructor(capsule, end) < 0 ||
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(capsule)) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

PyMethodDef sa_dlpack_methods[] = {
    {"_read_bfloat16", read_bfloat16, METH_O,
     "The elements of a DLPack capsule of bfloat16 as uint16, in the same memory."},
    {NULL, NULL, 0, NULL},
};
