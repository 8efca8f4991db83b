/* Rounds float32 arrays to 16 bits, faster than NumPy, for selfattn/functional/_gradients.py. */
#include "python/arrays.h"

#include "drivers/rowops.h"
#include "python/run.h"

typedef struct {
    PyArrayObject *from, *to;
    Py_ssize_t threads; /* 0: as set */
} narrow_call;

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    const narrow_call *n = call;
    const int threads = n->threads < 1 ? sa_get_num_threads() : n->threads < INT_MAX ? (int)n->threads : INT_MAX;
    sa_narrow(PyArray_DATA(n->from), PyArray_SIZE(n->from), PyArray_TYPE(n->to) == NPY_FLOAT16 ? SA_F16 : SA_BF16,
              PyArray_DATA(n->to), threads);
    return SA_OK;
}

static PyObject *narrow(PyObject *module, PyObject *args) {
    narrow_call n;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyArray_Type, &n.from, &PyArray_Type, &n.to, &n.threads)) {
        return NULL;
    }
    if (!sa_is_plain((PyObject *)n.from, NPY_FLOAT32, -1) || !PyArray_ISCARRAY(n.to) || PyArray_ITEMSIZE(n.to) != 2 ||
        PyArray_SIZE(n.from) != PyArray_SIZE(n.to)) {
        return PyErr_Format(PyExc_TypeError, "expected float32 and an array of 16 bits of as many elements, both contiguous");
    }
    return sa_run_job(module, &(sa_job){.compute = compute, .call = &n}) < 0 ? NULL : Py_NewRef(Py_None);
}

PyMethodDef sa_narrow_methods[] = {
    {"_narrow", narrow, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
