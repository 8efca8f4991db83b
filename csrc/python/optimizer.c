/* One step of an optimiser over all parameters, as selfattn/optim.py calls it: lists of arrays of equal length. Everything is
 * checked before anything is written; names, shapes and conversions are optim.py's. */
#include "python/optimizer.h"

#include <math.h>

#include "drivers/optimizer.h"
#include "python/run.h"

/* Elements below which the GIL is kept. */
#define SA_SMALL_ELEMENTS 2048
#define SA_ARRAYS_ON_STACK 64

/* Item i of a list: an aligned, contiguous, native float array, of the type and size of `like` unless that is NULL. */
static PyArrayObject *plain_array(PyObject *list, const char *name, Py_ssize_t i, PyArrayObject *like, bool written) {
    PyObject *item = i < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, i) : NULL;
    if (item == NULL || !PyArray_Check(item)) {
        PyErr_Format(PyExc_TypeError, "%s[%zd] must be an array", name, i);
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)item;
    const int type = PyArray_TYPE(array);
    if ((type != NPY_FLOAT && type != NPY_DOUBLE) || !PyArray_ISCARRAY_RO(array) ||
        (like != NULL && (type != PyArray_TYPE(like) || PyArray_SIZE(array) != PyArray_SIZE(like)))) {
        PyErr_Format(PyExc_TypeError,
                     "%s[%zd] must be a contiguous, aligned array of float32 or float64, of the parameter's dtype and size",
                     name, i);
        return NULL;
    }
    if (written && !PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s[%zd] is read-only", name, i);
        return NULL;
    }
    return array;
}

static int read_array(sa_update_array *a, Py_ssize_t i, PyObject *parameters, PyObject *gradients, PyObject *means,
                      PyObject *squares, PyObject *steps) {
    PyArrayObject *parameter = plain_array(parameters, "parameters", i, NULL, true), *gradient, *mean, *square;
    if (parameter == NULL || (gradient = plain_array(gradients, "gradients", i, parameter, false)) == NULL) {
        return -1;
    }
    *a = (sa_update_array){.f64 = PyArray_TYPE(parameter) == NPY_DOUBLE,
                           .n = PyArray_SIZE(parameter),
                           .parameter = PyArray_DATA(parameter),
                           .gradient = PyArray_DATA(gradient)};
    if (means != Py_None) {
        if ((mean = plain_array(means, "means", i, parameter, true)) == NULL) {
            return -1;
        }
        a->mean = PyArray_DATA(mean);
    }
    if (squares != Py_None) {
        if ((square = plain_array(squares, "squares", i, parameter, true)) == NULL) {
            return -1;
        }
        a->square = PyArray_DATA(square);
    }
    a->step = i < PyList_GET_SIZE(steps) ? PyLong_AsLongLong(PyList_GET_ITEM(steps, i)) : 0;
    if (a->step < 1) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "steps[%zd] must be at least 1", i);
        }
        return -1;
    }
    return 0;
}

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    sa_update_run(call, sa_get_num_threads());
    return SA_OK;
}

static PyObject *run(PyObject *module, sa_update *u, PyObject *parameters, PyObject *gradients, PyObject *means,
                     PyObject *squares, PyObject *steps) {
    if (!PyList_Check(parameters) || !PyList_Check(gradients) || !(means == Py_None || PyList_Check(means)) ||
        !(squares == Py_None || PyList_Check(squares)) || !PyList_Check(steps)) {
        PyErr_SetString(PyExc_TypeError, "arrays and steps must come in lists");
        return NULL;
    }
    if (!(u->lr >= 0 && isfinite(u->lr) && u->weight_decay >= 0 && isfinite(u->weight_decay))) {
        PyObject *given = Py_BuildValue("(dd)", u->lr, u->weight_decay);
        if (given != NULL) {
            PyErr_Format(PyExc_ValueError, "lr and weight_decay must be at least 0 and finite, not %R", given);
            Py_DECREF(given);
        }
        return NULL;
    }
    sa_update_array on_stack[SA_ARRAYS_ON_STACK], *arrays = on_stack;
    const Py_ssize_t count = PyList_GET_SIZE(parameters);
    if (count > SA_ARRAYS_ON_STACK) {
        arrays = PyMem_RawCalloc((size_t)count, sizeof *arrays);
        if (arrays == NULL) {
            return PyErr_NoMemory();
        }
    }
    PyObject *result = NULL;
    npy_intp elements = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (read_array(&arrays[i], i, parameters, gradients, means, squares, steps) < 0) {
            goto fail;
        }
        elements += arrays[i].n;
    }
    u->count = count;
    u->arrays = arrays;
    if (sa_run_job(module, &(sa_job){.small = elements < SA_SMALL_ELEMENTS, .compute = compute, .call = u}) == 0) {
        result = Py_NewRef(Py_None);
    }
fail:
    if (arrays != on_stack) {
        PyMem_RawFree(arrays);
    }
    return result;
}

static PyObject *sgd_step(PyObject *module, PyObject *args) {
    PyObject *parameters, *gradients, *means, *steps;
    sa_update u = {.kind = SA_SGD};
    int nesterov;
    if (!PyArg_ParseTuple(args, "OOOOddddp:_sgd_step", &parameters, &gradients, &means, &steps, &u.lr, &u.momentum,
                          &u.dampening, &u.weight_decay, &nesterov)) {
        return NULL;
    }
    u.nesterov = nesterov != 0;
    return run(module, &u, parameters, gradients, means, Py_None, steps);
}

static PyObject *adam_step(PyObject *module, PyObject *args) {
    PyObject *parameters, *gradients, *means, *squares, *steps;
    sa_update u = {.kind = SA_ADAM};
    int decoupled;
    if (!PyArg_ParseTuple(args, "OOO!O!Odddddp:_adam_step", &parameters, &gradients, &PyList_Type, &means, &PyList_Type,
                          &squares, &steps, &u.lr, &u.beta1, &u.beta2, &u.eps, &u.weight_decay, &decoupled)) {
        return NULL;
    }
    u.decoupled = decoupled != 0;
    return run(module, &u, parameters, gradients, means, squares, steps);
}

/* Whether the update takes these parameters and gradients as they are: arrays of one type and shape each. */
static PyObject *are_plain(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *parameters, *gradients;
    if (!PyArg_ParseTuple(args, "O!O!:_are_plain", &PyList_Type, &parameters, &PyList_Type, &gradients)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); ++i) {
        PyArrayObject *parameter = plain_array(parameters, "parameters", i, NULL, true), *gradient;
        if (parameter == NULL || (gradient = plain_array(gradients, "gradients", i, parameter, false)) == NULL ||
            !PyArray_SAMESHAPE(parameter, gradient)) {
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

PyMethodDef sa_update_methods[] = {
    {"_are_plain", are_plain, METH_VARARGS, "Whether nothing has to be checked or converted before a step."},
    {"_sgd_step", sgd_step, METH_VARARGS, "One step of SGD over all parameters; optim.SGD calls it."},
    {"_adam_step", adam_step, METH_VARARGS, "One step of Adam or AdamW over all parameters; optim.Adam calls it."},
    {NULL, NULL, 0, NULL},
};
