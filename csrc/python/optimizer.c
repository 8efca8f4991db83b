/* A step of an optimiser over lists of arrays, and the clipping of gradients. selfattn/optim owns names, shapes and
 * conversions. Nothing is written before everything is checked and nothing can fail any more. */
#include "python/binding.h"

#include <math.h>

#include "drivers/elements.h"
#include "drivers/optimizer.h"
#include "python/record.h"
#include "python/run.h"

/* Lists of equal length, or None for moments that the optimiser does not have. They are read as tuples, which own the
 * arrays, because another thread may change the lists meanwhile. */
enum { PARAMETERS, GRADIENTS, MEANS, SQUARES, STEPS, TARGETS, LISTS };
static const char *const names[STEPS] = {"parameters", "gradients", "means", "squares"};

/* Returns a borrowed array, of the type and size of `like`, if that is given. */
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
                 "%s[%zd] must be a contiguous, aligned array of float32 or float64, of the parameter's dtype and size",
                 name, i);
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
    /* only an int, as any other __index__ runs Python, which could free the arrays */
    PyObject *step = i < PyTuple_GET_SIZE(lists[STEPS]) ? PyTuple_GET_ITEM(lists[STEPS], i) : Py_None;
    a->step = PyLong_Check(step) ? PyLong_AsLongLong(step) : 0;
    if (a->step < 1) {
        return PyErr_Occurred() ? -1 : sa_error(PyExc_ValueError, "steps[%zd] must be an int of at least 1", i);
    }
    return 0;
}

/* Reads an array, of any layout, that is written. */
static int read_elements(sa_elements *x, PyObject *value, const char *name, Py_ssize_t i) {
    if (!PyArray_Check(value) || !PyArray_ISWRITEABLE((PyArrayObject *)value)) {
        return sa_error(PyExc_TypeError, "%s[%zd] must be a writable array", name, i);
    }
    PyArrayObject *same = sa_as_array(value, name, SA_FLOATS, &x->array.dtype);
    if (same == NULL) {
        return -1;
    }
    Py_DECREF(same);
    if (sa_is_integer(x->array.dtype)) {
        return sa_error(PyExc_TypeError, "%s[%zd] must hold floats", name, i);
    }
    PyArrayObject *array = (PyArrayObject *)value;
    x->array.data = PyArray_BYTES(array);
    x->array.swapped = !PyArray_ISNOTSWAPPED(array);
    x->ndim = PyArray_NDIM(array);
    for (int axis = 0; axis < x->ndim; ++axis) {
        x->shape[axis] = PyArray_DIM(array, axis);
        x->array.stride[axis] = PyArray_STRIDE(array, axis);
    }
    return 0;
}

typedef struct {
    sa_update *update;
    sa_elements *targets; /* or NULL; ndim < 0: the parameter has no target */
} step_call;

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    const step_call *c = call;
    sa_update_run(c->update, sa_get_num_threads());
    for (ptrdiff_t i = 0; c->targets != NULL && i < c->update->count; ++i) {
        if (c->targets[i].ndim >= 0) {
            sa_elements_write(&c->targets[i], c->update->arrays[i].parameter);
        }
    }
    return SA_OK;
}

/* A parameter of another layout or of 16 bits is updated in a copy, which is then written to the parameter,
 * the target. */
static int read_target(sa_elements *target, Py_ssize_t i, PyObject *const *lists) {
    PyObject *parameter = PyTuple_GET_ITEM(lists[PARAMETERS], i);
    PyObject *value = i < PyTuple_GET_SIZE(lists[TARGETS]) ? PyTuple_GET_ITEM(lists[TARGETS], i) : Py_None;
    target->ndim = -1;
    if (value == Py_None) {
        return 0;
    }
    if (read_elements(target, value, "targets", i) < 0) {
        return -1;
    }
    const bool f64 = PyArray_TYPE((PyArrayObject *)parameter) == NPY_DOUBLE;
    return PyArray_SAMESHAPE((PyArrayObject *)value, (PyArrayObject *)parameter) &&
                   f64 == (target->array.dtype == SA_F64)
               ? 0
               : sa_error(PyExc_TypeError, "targets[%zd] must have the shape of the parameter, and its precision", i);
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
    PyObject *result = NULL;
    step_call c = {.update = u};
    sa_update_array *arrays = sa_arena_take(module, (size_t)count * sizeof *arrays);
    if (arrays == NULL ||
        (lists[TARGETS] != Py_None && (c.targets = sa_arena_take(module, (size_t)count * sizeof *c.targets)) == NULL)) {
        goto done;
    }
    npy_intp elements = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (read_array(&arrays[i], i, lists) < 0 || (c.targets && read_target(&c.targets[i], i, lists) < 0)) {
            goto done;
        }
        elements += arrays[i].n;
    }
    u->count = count;
    u->arrays = arrays;
    if (sa_run_job(module, &(sa_job){.small = elements < SA_SMALL_ELEMENTS, .compute = compute, .call = &c}) == 0) {
        result = Py_NewRef(Py_None);
    }
done:
    sa_arena_give(c.targets);
    sa_arena_give(arrays);
    return result;
}

static PyObject *run(PyObject *module, sa_update *u, PyObject *const *lists) {
    PyObject *tuples[LISTS] = {NULL}, *result = NULL;
    for (int n = 0; n < LISTS; ++n) {
        if (PyList_Check(lists[n])) {
            tuples[n] = PyList_AsTuple(lists[n]);
        } else if (lists[n] == Py_None && (n == MEANS || n == SQUARES || n == TARGETS)) {
            tuples[n] = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_TypeError, "arrays and steps must come in lists");
        }
        if (tuples[n] == NULL) {
            goto done;
        }
    }
    result = run_of_tuples(module, u, tuples);
done:
    for (int n = 0; n < LISTS; ++n) {
        Py_XDECREF(tuples[n]);
    }
    return result;
}

/* Python code of a number runs before arrays are read. */
static int read_real(void *call, PyObject *value, const sa_field *field, void *to) {
    return sa_read_real(call, value, field->name, to);
}

static int read_flag(void *call, PyObject *value, const sa_field *field, void *to) {
    return sa_read_flag(call, value, field->name, to);
}

_Static_assert(SA_SGD == 0 && SA_ADAM == 1, "the names of optimisers are in this order");

#define REAL(field) {#field, read_real, offsetof(sa_update, field), NULL}
#define FLAG(field) {#field, read_flag, offsetof(sa_update, field), NULL}
static const sa_field update_fields[] = {
    {"kind", sa_field_choice, offsetof(sa_update, kind), "sgd adam"},
    REAL(lr),
    REAL(weight_decay),
    REAL(momentum),
    REAL(dampening),
    FLAG(nesterov),
    REAL(beta1),
    REAL(beta2),
    REAL(eps),
    FLAG(decoupled),
};
const sa_record sa_update_record = SA_RECORD("Update", update_fields);

/* Adam needs both moments. */
static PyObject *update(PyObject *module, PyObject *args) {
    PyObject *settings, *lists[LISTS] = {[TARGETS] = Py_None};
    sa_update u;
    if (!PyArg_UnpackTuple(args, "_update", 6, 7, &settings, &lists[PARAMETERS], &lists[GRADIENTS], &lists[MEANS],
                           &lists[SQUARES], &lists[STEPS], &lists[TARGETS]) ||
        sa_record_read(sa_state_of(module), SA_UPDATE_RECORD, settings, "an update", NULL, &u) < 0) {
        return NULL;
    }
    if (u.kind == SA_ADAM && (lists[MEANS] == Py_None || lists[SQUARES] == Py_None)) {
        return PyErr_Format(PyExc_TypeError, "adam needs lists of means and of squares");
    }
    return run(module, &u, lists);
}

typedef struct {
    sa_elements *arrays;
    double *factors;
    Py_ssize_t count;
} scale_call;

static sa_status scale_all(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    const scale_call *c = call;
    for (Py_ssize_t i = 0; i < c->count; ++i) {
        sa_elements_scale(&c->arrays[i], c->factors[i]);
    }
    return SA_OK;
}

static PyObject *scale(PyObject *module, PyObject *args) {
    PyObject *values, *factors, *result = NULL;
    scale_call c = {.arrays = NULL};
    npy_intp elements = 0;
    if (!PyArg_ParseTuple(args, "O!O!:_scale", &PyTuple_Type, &values, &PyTuple_Type, &factors)) {
        return NULL;
    }
    c.count = PyTuple_GET_SIZE(values);
    if (PyTuple_GET_SIZE(factors) != c.count) {
        return PyErr_Format(PyExc_ValueError, "each array needs a factor");
    }
    c.arrays = sa_arena_take(module, (size_t)c.count * sizeof *c.arrays);
    c.factors = c.arrays == NULL ? NULL : sa_arena_take(module, (size_t)c.count * sizeof *c.factors);
    if (c.factors == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < c.count; ++i) {
        PyObject *factor = PyTuple_GET_ITEM(factors, i);
        if (!PyFloat_CheckExact(factor)) {
            sa_error(PyExc_TypeError, "factors[%zd] must be a float", i);
            goto done;
        }
        c.factors[i] = PyFloat_AsDouble(factor);
        if (read_elements(&c.arrays[i], PyTuple_GET_ITEM(values, i), "arrays", i) < 0) {
            goto done;
        }
        elements += PyArray_SIZE((PyArrayObject *)PyTuple_GET_ITEM(values, i));
    }
    if (sa_run_job(module, &(sa_job){.small = elements < SA_SMALL_ELEMENTS, .compute = scale_all, .call = &c}) == 0) {
        result = Py_NewRef(Py_None);
    }
done:
    sa_arena_give(c.factors);
    sa_arena_give(c.arrays);
    return result;
}

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
    {"_are_plain", are_plain, METH_VARARGS, "True if a step takes these parameters and gradients as they are."},
    {"_update", update, METH_VARARGS, "One step of an optimiser over all parameters; selfattn.optim calls it."},
    {"_scale", scale, METH_VARARGS,
     "Multiply all arrays in place, each by its factor, or none; optim.clip_grad_norm_ calls it."},
    {NULL, NULL, 0, NULL},
};
