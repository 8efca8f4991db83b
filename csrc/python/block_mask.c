/* The argument block_mask: has a selfattn.BlockMask make its tables for the call, and checks them, so that the core may read
 * them without looking: they come from Python code, of a class that may have been derived from. */
#include "python/attention_call.h"

static int not_tables(void) {
    PyErr_SetString(PyExc_TypeError, "block_mask has tables that selfattn.BlockMask does not make");
    return -1;
}

static bool is_table(PyObject *x) {
    return PyArray_CheckExact(x) && PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)x), NPY_INT64) &&
           PyArray_ISCARRAY_RO((PyArrayObject *)x);
}

/* A part's tables as they are now, in arrays that nobody else can change: other Python code runs before the core reads them. What
 * is no table stays what it is, and is refused. */
static PyObject *copied(PyObject *part) {
    PyObject *copy = PyTuple_New(PyTuple_GET_SIZE(part));
    for (Py_ssize_t i = 0; copy != NULL && i < PyTuple_GET_SIZE(part); ++i) {
        PyObject *item = PyTuple_GET_ITEM(part, i);
        item = is_table(item) ? PyArray_NewCopy((PyArrayObject *)item, NPY_CORDER) : Py_NewRef(item);
        if (item == NULL) {
            Py_CLEAR(copy);
        } else {
            PyTuple_SET_ITEM(copy, i, item);
        }
    }
    return copy;
}

/* What plans go by: NaN is none. */
static bool is_share(double share) { return share >= 0 && share <= 1; }

/* The numbers of an array are within least … most. */
static bool within(PyArrayObject *array, int64_t least, int64_t most) {
    const int64_t *x = PyArray_DATA(array);
    bool good = true;
    for (npy_intp i = 0; i < PyArray_SIZE(array); ++i) {
        good &= x[i] >= least && x[i] <= most;
    }
    return good;
}

/* (lengths, diagonal, share) */
static int read_prefix(const sa_call *c, PyObject *part, sa_block_mask *mask) {
    PyObject *lengths;
    Py_ssize_t diagonal;
    if (!PyArg_ParseTuple(part, "Ond", &lengths, &diagonal, &mask->share)) {
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)lengths;
    const Py_ssize_t far = (Py_ssize_t)1 << 60;
    if (!is_share(mask->share) || !is_table(lengths) || !sa_call_fits_lead(c, array, 0) || !within(array, 0, c->a.S) ||
        diagonal < -far || diagonal > far) {
        return not_tables();
    }
    sa_fill_tensor(&mask->prefix, array, SA_I64, c->a.n_lead, 0);
    mask->diagonal = diagonal;
    return 0;
}

/* Runs of every class rise and do not touch, and lie behind one another without a hole between classes. */
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

/* (classes, class_rows, starts, runs, share) */
static int read_runs(const sa_call *c, PyObject *part, sa_block_mask *mask) {
    PyObject *classes, *starts, *runs;
    Py_ssize_t rows;
    if (!PyArg_ParseTuple(part, "OnOOd", &classes, &rows, &starts, &runs, &mask->share)) {
        return -1;
    }
    if (!is_share(mask->share) || !is_table(classes) || !is_table(starts) || !is_table(runs) || rows < 1) {
        return not_tables();
    }
    PyArrayObject *const class = (PyArrayObject *)classes, *const start = (PyArrayObject *)starts;
    PyArrayObject *const run = (PyArrayObject *)runs;
    const int ndim = PyArray_NDIM(class);
    const npy_intp needed = c->a.L / rows + (c->a.L % rows != 0);
    if (ndim < 1 || PyArray_DIM(class, ndim - 1) != needed || !sa_call_fits_lead(c, class, 1) || PyArray_NDIM(start) != 1 ||
        PyArray_NDIM(run) != 2 || PyArray_DIM(run, 1) != 2 || !good_runs(start, run, &mask->gaps) ||
        !within(class, 0, PyArray_SIZE(start) - 2)) {
        return not_tables();
    }
    sa_fill_tensor(&mask->classes, class, SA_I64, c->a.n_lead, 1);
    mask->classes.m.row_stride = mask->classes.m.col_stride; /* (…, rows) seen as (…, rows, 1) */
    mask->class_rows = rows;
    mask->starts = PyArray_DATA(start);
    mask->runs = PyArray_DATA(run);
    return 0;
}

/* The tables as a tuple of tuples, or NULL with an exception. */
static PyObject *make_tables(const sa_call *c, PyObject *value) {
    PyObject *module = PyImport_ImportModule("selfattn.functional.block_mask"), *tables = NULL;
    PyObject *class = module ? PyObject_GetAttrString(module, "BlockMask") : NULL;
    PyObject *lead = class ? PyArray_IntTupleFromIntp(c->a.n_lead, c->lead) : NULL;
    const int is_one = lead ? PyObject_IsInstance(value, class) : -1;
    if (is_one > 0) {
        tables = PyObject_CallMethod(value, "_tables", "Onn", lead, (Py_ssize_t)c->a.L, (Py_ssize_t)c->a.S);
    } else if (is_one == 0) {
        PyErr_Format(PyExc_TypeError,
                     "block_mask must be a selfattn.BlockMask or None, got %s (arrays of True and False are for attn_mask)",
                     Py_TYPE(value)->tp_name);
    }
    Py_XDECREF(lead);
    Py_XDECREF(class);
    Py_XDECREF(module);
    return tables;
}

/* c->tables: a tuple of tuples, copied. */
static int take_tables(sa_call *c, PyObject *tables) {
    if (!PyTuple_CheckExact(tables) || PyTuple_GET_SIZE(tables) > SA_MAX_BLOCK_MASKS) {
        return not_tables();
    }
    c->tables = PyTuple_New(PyTuple_GET_SIZE(tables));
    for (Py_ssize_t n = 0; c->tables != NULL && n < PyTuple_GET_SIZE(tables); ++n) {
        PyObject *part = PyTuple_GET_ITEM(tables, n);
        if (!PyTuple_CheckExact(part)) {
            return not_tables();
        }
        if ((part = copied(part)) == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(c->tables, n, part);
    }
    return c->tables != NULL ? 0 : -1;
}

int sa_call_read_block_mask(sa_call *c, PyObject *value) {
    PyObject *tables = make_tables(c, value);
    const int taken = tables != NULL ? take_tables(c, tables) : -1;
    Py_XDECREF(tables);
    if (taken < 0) {
        return -1;
    }
    for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(c->tables); ++n) {
        PyObject *part = PyTuple_GET_ITEM(c->tables, n);
        sa_block_mask *mask = &c->block_masks[n];
        mask->prefix.m.data = mask->classes.m.data = NULL;
        mask->gaps = false;
        if ((PyTuple_GET_SIZE(part) == 3 ? read_prefix : read_runs)(c, part, mask) < 0) {
            return -1;
        }
        c->a.block_mask_count = (int)n + 1;
    }
    return 0;
}
