/* Owns the argument block_mask. Derived classes may make any tables, and the core trusts them,
 * so they are all checked here. */
#include "python/attention_call.h"

static int not_tables(void) {
    return sa_error(PyExc_TypeError, "block_mask has tables that selfattn.BlockMask does not make");
}

/* Returns a borrowed copy, which the call owns, because other Python code runs before the core reads it. */
static PyArrayObject *take_table(sa_call *c, PyObject *x) {
    if (!PyArray_CheckExact(x) || !PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)x), NPY_INT64) ||
        !PyArray_ISCARRAY_RO((PyArrayObject *)x)) {
        not_tables();
        return NULL;
    }
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewCopy((PyArrayObject *)x, NPY_CORDER);
    if (copy != NULL) {
        sa_call_own(c, copy, "block_mask");
    }
    return copy;
}

static bool is_fraction(double fraction) { return fraction >= 0 && fraction <= 1; }

static bool within(PyArrayObject *array, int64_t least, int64_t most) {
    const int64_t *x = PyArray_DATA(array);
    bool good = true;
    for (npy_intp i = 0; i < PyArray_SIZE(array); ++i) {
        good &= x[i] >= least && x[i] <= most;
    }
    return good;
}

/* Reads (lengths, diagonal, open fraction). */
static int read_prefix(sa_call *c, PyObject *tuple, sa_block_mask *mask) {
    PyObject *given;
    Py_ssize_t diagonal;
    PyArrayObject *lengths;
    if (!PyArg_ParseTuple(tuple, "Ond", &given, &diagonal, &mask->open_fraction) ||
        (lengths = take_table(c, given)) == NULL) {
        return -1;
    }
    const Py_ssize_t far = (Py_ssize_t)1 << 60;
    if (!is_fraction(mask->open_fraction) || !sa_call_fits_lead(c, lengths, 0) || !within(lengths, 0, c->a.S) ||
        diagonal < -far || diagonal > far) {
        return not_tables();
    }
    sa_fill_tensor(&mask->prefix, lengths, SA_I64, c->a.n_lead, 0);
    mask->diagonal = diagonal;
    return 0;
}

/* Checks that the runs of a class ascend and do not touch, and that classes follow one another without holes. */
static bool good_runs(PyArrayObject *starts, PyArrayObject *runs, bool *gaps) {
    const int64_t *start = PyArray_DATA(starts);
    const sa_run *run = PyArray_DATA(runs);
    const npy_intp classes = PyArray_SIZE(starts) - 1, count = PyArray_DIM(runs, 0);
    if (classes < 0 || start[0] != 0 || start[classes] != count || !within(starts, 0, count)) {
        return false;
    }
    bool good = true;
    for (npy_intp c = 0; good && c < classes; ++c) {
        *gaps |= start[c + 1] - start[c] > 1;
        good = start[c + 1] >= start[c];
        int64_t end = -1;
        for (int64_t k = start[c]; good && k < start[c + 1]; ++k) {
            good = run[k].lo > end && run[k].hi > run[k].lo && run[k].hi <= (int64_t)1 << 60;
            end = run[k].hi;
        }
    }
    return good;
}

/* Reads (classes, class_rows, starts, runs, open fraction). */
static int read_runs(sa_call *c, PyObject *tuple, sa_block_mask *mask) {
    PyObject *given[3];
    Py_ssize_t rows;
    PyArrayObject *classes, *starts, *runs;
    if (!PyArg_ParseTuple(tuple, "OnOOd", &given[0], &rows, &given[1], &given[2], &mask->open_fraction) ||
        (classes = take_table(c, given[0])) == NULL || (starts = take_table(c, given[1])) == NULL ||
        (runs = take_table(c, given[2])) == NULL) {
        return -1;
    }
    const int ndim = PyArray_NDIM(classes);
    if (!is_fraction(mask->open_fraction) || rows < 1 || ndim < 1 ||
        PyArray_DIM(classes, ndim - 1) != c->a.L / rows + (c->a.L % rows != 0) || !sa_call_fits_lead(c, classes, 1) ||
        PyArray_NDIM(starts) != 1 || PyArray_NDIM(runs) != 2 || PyArray_DIM(runs, 1) != 2 ||
        !good_runs(starts, runs, &mask->gaps) || !within(classes, 0, PyArray_SIZE(starts) - 2)) {
        return not_tables();
    }
    sa_fill_tensor(&mask->classes, classes, SA_I64, c->a.n_lead, 1);
    mask->classes.m.row_stride = mask->classes.m.col_stride; /* (…, rows) is seen as (…, rows, 1) */
    mask->class_rows = rows;
    mask->starts = PyArray_DATA(starts);
    mask->runs = PyArray_DATA(runs);
    return 0;
}

/* Returns a tuple of tuples. */
static PyObject *make_tables(const sa_call *c, PyObject *value) {
    PyObject *class = sa_imported("selfattn.functional.block_mask", "BlockMask"), *tables = NULL;
    PyObject *lead = class ? PyArray_IntTupleFromIntp(c->a.n_lead, c->lead) : NULL;
    const int is_one = lead ? PyObject_IsInstance(value, class) : -1;
    if (is_one > 0) {
        tables = PyObject_CallMethod(value, "_tables", "Onn", lead, (Py_ssize_t)c->a.L, (Py_ssize_t)c->a.S);
    } else if (is_one == 0) {
        PyErr_Format(
            PyExc_TypeError,
            "block_mask must be a selfattn.BlockMask or None, got %s (arrays of True and False are for attn_mask)",
            sa_type_name(value));
    }
    Py_XDECREF(lead);
    Py_XDECREF(class);
    return tables;
}

int sa_call_read_block_mask(void *call, PyObject *value, const char *name, void *to) {
    (void)name, (void)to;
    sa_call *c = call;
    PyObject *tables = make_tables(c, value);
    int status = tables == NULL                                                                 ? -1
                 : !PyTuple_CheckExact(tables) || PyTuple_GET_SIZE(tables) > SA_MAX_BLOCK_MASKS ? not_tables()
                                                                                                : 0;
    for (Py_ssize_t n = 0; status == 0 && n < PyTuple_GET_SIZE(tables); ++n) {
        PyObject *tuple = PyTuple_GET_ITEM(tables, n);
        sa_block_mask *mask = &c->block_masks[n];
        *mask = (sa_block_mask){.gaps = false}; /* drivers read strides of parts that a mask does not have */
        status = !PyTuple_CheckExact(tuple) ? not_tables()
                                            : (PyTuple_GET_SIZE(tuple) == 3 ? read_prefix : read_runs)(c, tuple, mask);
        c->a.block_mask_count = (int)n + 1;
    }
    Py_XDECREF(tables);
    return status;
}
