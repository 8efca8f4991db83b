/* A step of an optimiser over lists of arrays, and the clipping of gradients. selfattn/optim owns names, shapes and
 * conversions. Nothing is written before everything is checked and nothing can fail any more. */
#include "python/binding.h"

#include <math.h>
#include <string.h>

#include "drivers/elements.h"
#include "drivers/optimizer.h"
#include "python/record.h"
#include "python/run.h"

/* Lists of equal length, or None for moments that the optimiser does not have. They are read as tuples, which own the
 * arrays, because another thread may change the lists meanwhile. */
enum { PARAMETERS, GRADIENTS, MEANS, SQUARES, PEAKS, STEPS, TARGETS, LISTS };
static const char *const names[STEPS] = {"parameters", "gradients", "means", "squares", "peaks"};

/* Parameters that share their settings, and what the call gives back when it ends. */
typedef struct {
    sa_update update;
    sa_update_array *arrays;
    sa_elements *targets; /* or NULL; ndim < 0: the parameter has no target */
    PyObject *lists[LISTS];
} update_group;

typedef struct {
    update_group *groups;
    Py_ssize_t count;
} step_call;

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
                           .square = data[SQUARES],
                           .peak = data[PEAKS]};
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

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)scratch, (void)shared;
    const step_call *c = call;
    for (update_group *g = c->groups; g < c->groups + c->count; ++g) {
        sa_update_run(&g->update, sa_get_num_threads());
        for (ptrdiff_t i = 0; g->targets != NULL && i < g->update.count; ++i) {
            if (g->targets[i].ndim >= 0) {
                sa_elements_write(&g->targets[i], g->arrays[i].parameter);
            }
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

static int read_settings(PyObject *module, update_group *g, PyObject *given) {
    sa_update *u = &g->update;
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 1 + LISTS) {
        return sa_error(PyExc_TypeError, "a group must be a tuple of settings and %d lists", LISTS);
    }
    if (sa_record_read(sa_state_of(module), SA_UPDATE_RECORD, PyTuple_GET_ITEM(given, 0), "an update", NULL, u) < 0) {
        return -1;
    }
    if (u->lr >= 0 && isfinite(u->lr) && u->weight_decay >= 0 && isfinite(u->weight_decay)) {
        return 0;
    }
    PyObject *numbers = Py_BuildValue("(dd)", u->lr, u->weight_decay);
    if (numbers != NULL) {
        PyErr_Format(PyExc_ValueError, "lr and weight_decay must be at least 0 and finite, not %R", numbers);
        Py_DECREF(numbers);
    }
    return -1;
}

/* Adam needs both moments. */
static int read_lists(update_group *g, PyObject *given) {
    for (int n = 0; n < LISTS; ++n) {
        PyObject *list = PyTuple_GET_ITEM(given, 1 + n);
        if (PyList_Check(list)) {
            g->lists[n] = PyList_AsTuple(list);
        } else if (list == Py_None && (n == MEANS || n == SQUARES || n == PEAKS || n == TARGETS)) {
            g->lists[n] = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_TypeError, "arrays and steps must come in lists");
        }
        if (g->lists[n] == NULL) {
            return -1;
        }
    }
    return g->update.kind == SA_ADAM && (g->lists[MEANS] == Py_None || g->lists[SQUARES] == Py_None)
               ? sa_error(PyExc_TypeError, "adam needs lists of means and of squares")
               : 0;
}

/* Reads the arrays, and adds their elements to `elements`. */
static int read_arrays(PyObject *module, update_group *g, npy_intp *elements) {
    const Py_ssize_t count = PyTuple_GET_SIZE(g->lists[PARAMETERS]);
    g->arrays = sa_arena_take(module, (size_t)count * sizeof *g->arrays);
    if (g->arrays == NULL || (g->lists[TARGETS] != Py_None &&
                              (g->targets = sa_arena_take(module, (size_t)count * sizeof *g->targets)) == NULL)) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (read_array(&g->arrays[i], i, g->lists) < 0 ||
            (g->targets && read_target(&g->targets[i], i, g->lists) < 0)) {
            return -1;
        }
        *elements += g->arrays[i].n;
    }
    g->update.count = count;
    g->update.arrays = g->arrays;
    return 0;
}

static PyObject *update(PyObject *module, PyObject *groups) {
    step_call c = {.count = PyTuple_GET_SIZE(groups)};
    PyObject *result = NULL;
    npy_intp elements = 0;
    c.groups = sa_arena_take(module, (size_t)c.count * sizeof *c.groups);
    if (c.groups == NULL) {
        return NULL;
    }
    memset(c.groups, 0, (size_t)c.count * sizeof *c.groups);
    for (Py_ssize_t i = 0; i < c.count; ++i) {
        if (read_settings(module, &c.groups[i], PyTuple_GET_ITEM(groups, i)) < 0) {
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < c.count; ++i) {
        if (read_lists(&c.groups[i], PyTuple_GET_ITEM(groups, i)) < 0 ||
            read_arrays(module, &c.groups[i], &elements) < 0) {
            goto done;
        }
    }
    if (sa_run_job(module, &(sa_job){.small = elements < SA_SMALL_ELEMENTS, .compute = compute, .call = &c}) == 0) {
        result = Py_NewRef(Py_None);
    }
done:
    for (Py_ssize_t i = 0; i < c.count; ++i) {
        sa_arena_give(c.groups[i].targets);
        sa_arena_give(c.groups[i].arrays);
        for (int n = 0; n < LISTS; ++n) {
            Py_XDECREF(c.groups[i].lists[n]);
        }
    }
    sa_arena_give(c.groups);
    return result;
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
    {"_update", update, METH_VARARGS, "One step of an optimiser over groups of parameters; selfattn.optim calls it."},
    {"_scale", scale, METH_VARARGS,
     "Multiply all arrays in place, each by its factor, or none; optim.clip_grad_norm_ calls it."},
    {NULL, NULL, 0, NULL},
};
