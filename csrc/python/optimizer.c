/* One step of an optimiser over lists of arrays. selfattn/optim/optimizers.py owns names, shapes and conversions. Nothing is
 * written before all is checked. */
#include "python/arrays.h"

#include <math.h>

#include "drivers/optimizer.h"
#include "python/run.h"

/* Lists of equal length; None for moments that the optimiser lacks. They are read as tuples, which own the arrays: another thread
 * may change the lists meanwhile. */
enum { PARAMETERS, GRADIENTS, MEANS, SQUARES, STEPS, LISTS };
static const char *const names[STEPS] = {"parameters", "gradients", "means", "squares"};

/* Borrowed; of the type and size of `like`, if that is given. */
static PyArrayObject *plain_array(PyObject *tuple, const char *name, Py_ssize_t i, PyArrayObject *like, bool written) {
    PyObject *item = i < PyTuple_GET_SIZE(tuple) ? PyTuple_GET_ITEM(tuple, i) : NULL;
    PyArrayObject *array = (PyArrayObject *)item;
    if (item == NULL || !PyArray_Check(item)) {
        sa_error(PyExc_TypeError, "%s[%zd] must be an array", name, i);
        return NULL;
    }
    const int type = PyArray_TYPE(like ? like : array);
    if ((type != NPY_FLOAT && type != NPY_DOUBLE) || !sa_is_plain(item, type, -1) ||
        (like != NULL && PyArray_SIZE(array) != PyArray_SIZE(like))) {
        sa_error(PyExc_TypeError,
                 "%s[%zd] must be a contiguous, aligned array of float32 or float64, of the parameter's dtype and size", name,
                 i);
        return NULL;
    }
    if (written && !PyArray_ISWRITEABLE(array)) {
        sa_error(PyExc_ValueError, "%s[%zd] is read-only", name, i);
        return NULL;
    }
    return array;
}

static int read_array(sa_update_array *a, Py_ssize_t i, PyObject *const *lists) {
    PyArrayObject *parameter = NULL;
    void *data[STEPS] = {NULL};
    for (int n = 0; n < STEPS; ++n) {
        if (lists[n] != Py_None) {
            PyArrayObject *array = plain_array(lists[n], names[n], i, parameter, n != GRADIENTS);
            if (array == NULL) {
                return -1;
            }
            parameter = n == PARAMETERS ? array : parameter;
            data[n] = PyArray_DATA(array);
        }
    }
    *a = (sa_update_array){.f64 = PyArray_TYPE(parameter) == NPY_DOUBLE,
                           .n = PyArray_SIZE(parameter),
                           .parameter = data[PARAMETERS],
                           .gradient = data[GRADIENTS],
                           .mean = data[MEANS],
                           .square = data[SQUARES]};
    /* an int alone: any other __index__ is Python, which could free the arrays */
    PyObject *step = i < PyTuple_GET_SIZE(lists[STEPS]) ? PyTuple_GET_ITEM(lists[STEPS], i) : Py_None;
    a->step = PyLong_Check(step) ? PyLong_AsLongLong(step) : 0;
    if (a->step < 1) {
        return PyErr_Occurred() ? -1 : sa_error(PyExc_ValueError, "steps[%zd] must be an int of at least 1", i);
    }
    return 0;
}

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    sa_update_run(call, sa_get_num_threads());
    return SA_OK;
}

static PyObject *run_of_tuples(PyObject *module, sa_update *u, PyObject *const *lists) {
    if (!(u->lr >= 0 && isfinite(u->lr) && u->weight_decay >= 0 && isfinite(u->weight_decay))) {
        PyObject *given = Py_BuildValue("(dd)", u->lr, u->weight_decay);
        if (given != NULL) {
            PyErr_Format(PyExc_ValueError, "lr and weight_decay must be at least 0 and finite, not %R", given);
            Py_DECREF(given);
        }
        return NULL;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(lists[PARAMETERS]);
    sa_update_array *arrays = sa_block_take(module, (size_t)count * sizeof *arrays);
    if (arrays == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    npy_intp elements = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (read_array(&arrays[i], i, lists) < 0) {
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
    sa_block_give(arrays);
    return result;
}

static PyObject *run(PyObject *module, sa_update *u, PyObject *const *lists) {
    PyObject *tuples[LISTS] = {NULL}, *result = NULL;
    for (int n = 0; n < LISTS; ++n) {
        if (PyList_Check(lists[n])) {
            tuples[n] = PyList_AsTuple(lists[n]);
        } else if (lists[n] == Py_None && (n == MEANS || n == SQUARES)) {
            tuples[n] = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_TypeError, "arrays and steps must come in lists");
        }
        if (tuples[n] == NULL) {
            goto fail;
        }
    }
    result = run_of_tuples(module, u, tuples);
fail:
    for (int n = 0; n < LISTS; ++n) {
        Py_XDECREF(tuples[n]);
    }
    return result;
}

static PyObject *sgd_step(PyObject *module, PyObject *args) {
    PyObject *lists[LISTS] = {[SQUARES] = Py_None};
    sa_update u = {.kind = SA_SGD};
    int nesterov;
    if (!PyArg_ParseTuple(args, "OOOOddddp:_sgd_step", &lists[PARAMETERS], &lists[GRADIENTS], &lists[MEANS], &lists[STEPS],
                          &u.lr, &u.momentum, &u.dampening, &u.weight_decay, &nesterov)) {
        return NULL;
    }
    u.nesterov = nesterov != 0;
    return run(module, &u, lists);
}

static PyObject *adam_step(PyObject *module, PyObject *args) {
    PyObject *lists[LISTS];
    sa_update u = {.kind = SA_ADAM};
    int decoupled;
    if (!PyArg_ParseTuple(args, "OOO!O!Odddddp:_adam_step", &lists[PARAMETERS], &lists[GRADIENTS], &PyList_Type, &lists[MEANS],
                          &PyList_Type, &lists[SQUARES], &lists[STEPS], &u.lr, &u.beta1, &u.beta2, &u.eps, &u.weight_decay,
                          &decoupled)) {
        return NULL;
    }
    u.decoupled = decoupled != 0;
    return run(module, &u, lists);
}

/* Whether a step takes these arrays as they are. */
static PyObject *are_plain(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *lists[2];
    if (!PyArg_ParseTuple(args, "O!O!:_are_plain", &PyList_Type, &lists[0], &PyList_Type, &lists[1])) {
        return NULL;
    }
    PyObject *parameters = PyList_AsTuple(lists[0]), *gradients = parameters ? PyList_AsTuple(lists[1]) : NULL;
    bool plain = gradients != NULL;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(parameters); ++i) {
        PyArrayObject *parameter = plain_array(parameters, "parameters", i, NULL, true);
        PyArrayObject *gradient = parameter ? plain_array(gradients, "gradients", i, parameter, false) : NULL;
        plain = gradient != NULL && PyArray_CheckExact(gradient) && PyArray_SAMESHAPE(parameter, gradient);
    }
    PyObject *result = NULL;
    if (gradients != NULL) {
        PyErr_Clear();
        result = Py_NewRef(plain ? Py_True : Py_False);
    }
    Py_XDECREF(parameters);
    Py_XDECREF(gradients);
    return result;
}

PyMethodDef sa_update_methods[] = {
    {"_are_plain", are_plain, METH_VARARGS, "Whether nothing has to be checked or converted before a step."},
    {"_sgd_step", sgd_step, METH_VARARGS, "One step of SGD over all parameters; optim.SGD calls it."},
    {"_adam_step", adam_step, METH_VARARGS, "One step of Adam or AdamW over all parameters; optim.Adam calls it."},
    {NULL, NULL, 0, NULL},
};
