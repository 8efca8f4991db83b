/* Reads the inputs of a transformer's call: ids or rows, offsets, the cache. Ids and offsets are copied before they are
 * checked, so that nobody changes them in between. */
#include "python/transformer_call.h"

#include "python/run.h"

/* Compares a mask and a bias of keys with the sequences and heads. */
static int check_added(const sa_transformer_call *c) {
    if (c->key_bias != NULL && sa_rows_of(c->key_bias) != 1 && sa_rows_of(c->key_bias) != c->e.sequences) {
        return sa_error(PyExc_ValueError, "key_bias must have shape (1 or sequences, longest), not %s",
                        sa_shape_of(c->key_bias));
    }
    if (c->mask == NULL) {
        return 0;
    }
    const npy_intp *shape = PyArray_SHAPE(c->mask);
    bool fits = shape[0] == 1 || shape[0] == c->e.sequences;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        fits = fits && (shape[1] == 1 || shape[1] == c->layer[i].heads);
    }
    return fits ? 0
                : sa_error(PyExc_ValueError,
                           "a mask must have shape (1 or sequences, 1 or heads, longest, longest), not %s",
                           sa_shape_of(c->mask));
}

static bool are_int64(PyObject *x) {
    return PyArray_Check(x) && PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)x), NPY_INT64) &&
           sa_is_plain(x, PyArray_TYPE((PyArrayObject *)x), 1);
}

/* Checks starts, and past, (sequences,), unless it is NULL. */
static int check_starts(sa_transformer_call *c, const int64_t *starts, npy_intp offsets, npy_intp tokens,
                        const int64_t *past) {
    if (offsets < 1 || starts[0] != 0 || starts[offsets - 1] != tokens) {
        return sa_error(PyExc_ValueError, "cu_seqlens must go from 0 to the number of ids, %zd", tokens);
    }
    for (npy_intp s = 0; s + 1 < offsets; ++s) {
        /* with arbitrary offsets a difference could overflow */
        const bool rises = starts[s + 1] > starts[s] && starts[s + 1] <= tokens;
        const int64_t length = rises ? starts[s + 1] - starts[s] : 0;
        if (length < 1 || length > c->most) {
            return sa_error(PyExc_ValueError,
                            "sequence %zd must have 1 to %zd tokens, cu_seqlens goes from %lld to %lld", s, c->most,
                            (long long)starts[s], (long long)starts[s + 1]);
        }
        if (past != NULL && (past[s] < 0 || past[s] > c->most - length || past[s] > c->e.cache.capacity - length)) {
            return sa_error(PyExc_ValueError,
                            "sequence %zd has %lld tokens in the cache and %lld new ones; there is room for %zd", s,
                            (long long)past[s], (long long)length, sa_smaller(c->most, c->e.cache.capacity));
        }
        c->e.longest = length > c->e.longest ? (ptrdiff_t)length : c->e.longest;
    }
    return 0;
}

/* Takes (keys, values, past): writable arrays (layers, sequences, key heads, capacity, width) without overlap, and
 * int64. With a model of float32 keys and values may be float16, or uint16 that are the bits of bfloat16. */
static int take_cache(sa_transformer_call *c, PyObject *cache, npy_intp sequences, PyObject **past) {
    if (!PyTuple_Check(cache) || PyTuple_GET_SIZE(cache) != 3) {
        return sa_error(PyExc_TypeError, "a cache must be a tuple (keys, values, past)");
    }
    *past = PyTuple_GET_ITEM(cache, 2);
    if (!are_int64(*past) || sa_dim(*past, 0) != sequences) {
        return sa_error(PyExc_ValueError,
                        "past must be a contiguous array of int64 with an element for each of %zd sequences",
                        sequences);
    }
    const sa_layer *first = c->layer;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        const sa_layer *l = &c->layer[i];
        if (!l->causal || l->key_heads != first->key_heads || l->width != first->width ||
            l->dropout[SA_DROP_WEIGHTS] > 0 || c->mask != NULL || c->key_bias != NULL) {
            return sa_error(PyExc_ValueError,
                            "layers with a cache are causal, have as many key heads of one width, no mask and "
                            "no dropout of weights");
        }
    }
    char *data[2];
    PyObject *keys = PyTuple_GET_ITEM(cache, 0);
    const int given = PyArray_Check(keys) && !c->e.f64 ? PyArray_TYPE((PyArrayObject *)keys) : NPY_NOTYPE;
    c->e.cache.narrow = given == NPY_HALF || given == NPY_UINT16;
    c->e.cache.dtype = given == NPY_HALF ? SA_F16 : SA_BF16;
    for (int i = 0; i < 2; ++i) {
        PyObject *array = PyTuple_GET_ITEM(cache, i);
        const npy_intp *shape = sa_is_plain(array, c->e.cache.narrow ? given : sa_transformer_type(c), 5)
                                    ? PyArray_SHAPE((PyArrayObject *)array)
                                    : NULL;
        if (shape == NULL || !PyArray_ISWRITEABLE((PyArrayObject *)array) || shape[0] != c->e.layers ||
            shape[1] != sequences || (c->e.layers > 0 && (shape[2] != first->key_heads || shape[4] != first->width)) ||
            (i == 1 && shape[3] != c->e.cache.capacity)) {
            return sa_error(
                PyExc_ValueError,
                "keys and values must be writable, contiguous arrays of %s with shape (%zd layers, %zd sequences, "
                "key heads, capacity, width)",
                sa_transformer_type_name(c), c->e.layers, sequences);
        }
        c->e.cache.capacity = shape[3];
        data[i] = sa_data(sa_transformer_own(c, Py_NewRef(array)));
    }
    c->e.cache.keys = data[0];
    c->e.cache.values = data[1];
    return 0;
}

/* Takes ids, or rows if there is no table. Numbers are copied before they are checked. */
static int take_inputs(sa_transformer_call *c, PyObject *module, PyObject *inputs, PyObject *starts, PyObject *cache) {
    const bool by_ids = c->e.table != NULL;
    if (by_ids ? !are_int64(inputs) : !sa_is_plain(inputs, sa_transformer_type(c), 2)) {
        return sa_error(PyExc_TypeError, "%s must be a contiguous %s", by_ids ? "ids" : "rows",
                        by_ids     ? "1-D array of int64"
                        : c->e.f64 ? "2-D array of float64"
                                   : "2-D array of float32");
    }
    if (!are_int64(starts)) {
        return sa_error(PyExc_TypeError, "cu_seqlens must be a contiguous 1-D array of int64");
    }
    const npy_intp tokens = sa_dim(inputs, 0), offsets = PyArray_SIZE((PyArrayObject *)starts);
    if (!by_ids && sa_dim(inputs, 1) != c->e.d) {
        return sa_error(PyExc_ValueError, "rows must have %zd columns, not shape %s", c->e.d,
                        sa_shape_of((PyArrayObject *)inputs));
    }
    PyObject *past = NULL;
    if (cache != Py_None && take_cache(c, cache, offsets - 1, &past) < 0) {
        return -1;
    }
    const npy_intp ids = by_ids ? tokens : 0;
    c->numbers = sa_arena_take(module, (size_t)(ids + 2 * offsets + 1) * sizeof *c->numbers);
    if (c->numbers == NULL) {
        return -1;
    }
    int64_t *own_ids = c->numbers, *own_starts = c->numbers + ids,
            *own_past = past == NULL ? NULL : own_starts + offsets;
    if (past != NULL) {
        memcpy(own_past, sa_data(past), (size_t)(offsets - 1) * sizeof *own_past);
    }
    memcpy(own_starts, sa_data(starts), (size_t)offsets * sizeof *own_starts);
    if (by_ids) {
        memcpy(own_ids, sa_data(inputs), (size_t)ids * sizeof *own_ids);
    } else {
        c->e.rows = sa_data(sa_transformer_own(c, Py_NewRef(inputs)));
    }
    if (check_starts(c, own_starts, offsets, tokens, own_past) < 0) {
        return -1;
    }
    for (npy_intp i = 0; i < ids; ++i) {
        if (own_ids[i] < 0 || own_ids[i] >= c->e.vocabulary) {
            return sa_error(PyExc_ValueError, "ids must be in 0...%zd, ids[%zd] is %lld", c->e.vocabulary - 1, i,
                            (long long)own_ids[i]);
        }
    }
    c->e.tokens = tokens;
    c->e.sequences = offsets - 1;
    c->e.ids = own_ids;
    c->e.cache.past = own_past;
    c->e.starts = own_starts;
    return check_added(c);
}

int sa_transformer_read(sa_transformer_call *c, PyObject *module, PyObject *model, PyObject *call, PyObject *inputs,
                        PyObject *starts, PyObject *cache) {
    return sa_transformer_read_model(c, module, model, call) < 0 ? -1 : take_inputs(c, module, inputs, starts, cache);
}
