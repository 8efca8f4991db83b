/* Reads the transformer's settings, arrays and inputs; selfattn/engine/transformer.py says what they mean. Ids and offsets are
 * copied before they are checked, so that nobody changes them in between. */
#include "python/transformer_call.h"

#include "python/compact.h"
#include "python/run.h"

static const char *const parameter_names[] = {"query", "key",  "value", "output",           "attention_norm",
                                              "up",    "gate", "down",  "feed_forward_norm"};

static const char *name_of(int which) {
    return which > SA_LAST_NORM ? "the weight of a norm of heads or a post norm" : parameter_names[which];
}

void sa_transformer_release(sa_transformer_call *c) {
    for (Py_ssize_t i = 0; c->array != NULL && i < c->arrays; ++i) {
        Py_XDECREF((PyObject *)c->array[i]);
    }
    for (Py_ssize_t i = 0; c->compact != NULL && i < c->e.layers * SA_LAYER_PARAMETERS; ++i) {
        Py_XDECREF(c->compact[i]);
    }
    Py_XDECREF((PyObject *)c->rows);
    Py_XDECREF(c->table_owner);
    Py_XDECREF(c->cached[0]);
    Py_XDECREF(c->cached[1]);
    PyMem_Free(c->compact);
    PyMem_Free(c->array);
    PyMem_Free(c->layer);
    sa_arena_give(c->numbers);
    sa_arena_give(c->saved);
    PyMem_Free(c);
}

/* ---- the parameters ---------------------------------------------------------------------------------------------------- */

/* Keeps an array, contiguous and of the model's dtype. columns 0: a vector; rows −1: any number. Keeps NULL for None. */
static int take_array(sa_transformer_call *c, Py_ssize_t i, PyObject *value, npy_intp rows, npy_intp columns, const char *name,
                      const void **to) {
    if (value == Py_None) {
        return 0;
    }
    if (!sa_is_plain(value, sa_transformer_type(c), -1)) {
        return sa_error(PyExc_TypeError, "%s must be a contiguous, aligned array of %s as all others are, not %R", name,
                        sa_transformer_type_name(c),
                        PyArray_Check(value) ? (PyObject *)PyArray_DESCR((PyArrayObject *)value) : (PyObject *)Py_TYPE(value));
    }
    PyArrayObject *array = (PyArrayObject *)value;
    const int ndim = columns == 0 ? 1 : 2;
    if (PyArray_NDIM(array) != ndim || (rows >= 0 && PyArray_DIM(array, 0) != rows) ||
        (ndim == 2 && PyArray_DIM(array, 1) != columns)) {
        const npy_intp wanted[2] = {rows, columns};
        return sa_error(PyExc_ValueError, "%s must have shape %s, not %s", name, sa_shape_text(ndim, wanted),
                        sa_shape_of(array));
    }
    c->array[i] = (PyArrayObject *)Py_NewRef(value);
    *to = PyArray_DATA(array);
    return 0;
}

static npy_intp rows_of(const sa_transformer_call *c, Py_ssize_t i) {
    return c->array[i] == NULL ? 0 : PyArray_DIM(c->array[i], 0);
}

/* Item i of a tuple, or None after the end. */
static PyObject *item(PyObject *tuple, Py_ssize_t i) {
    return i < PyTuple_GET_SIZE(tuple) ? PyTuple_GET_ITEM(tuple, i) : Py_None;
}

static bool is_projection(int which) { return !sa_is_norm(which); }

/* Keeps panels or quants. All projections of a layer have one kind. */
static int take_panels(sa_transformer_call *c, PyObject *value, const sa_compact *w, int which, npy_intp rows, npy_intp columns,
                       sa_layer *l) {
    if (!is_projection(which) || c->e.f64 || (which != SA_QUERY && l->weights != w->kind) || (rows >= 0 && w->out != rows) ||
        w->in != columns) {
        const npy_intp wanted[2] = {rows, columns}, shape[2] = {w->out, w->in};
        return sa_error(PyExc_ValueError, "%s must have shape %s and the kind of all projections of its layer, not shape %s",
                        name_of(which), sa_shape_text(2, wanted), sa_shape_text(2, shape));
    }
    if (sa_compact_check(w) < 0) {
        return -1;
    }
    c->compact[(l - c->layer) * SA_LAYER_PARAMETERS + which] = Py_NewRef(value);
    l->weight[which] = w;
    l->weights = w->kind;
    return 0;
}

/* Takes a weight and its bias: (rows, columns) and (rows,), or both (rows,). */
static int take_parameter(sa_transformer_call *c, Py_ssize_t first, PyObject *arrays, int which, npy_intp rows,
                          npy_intp columns, sa_layer *l) {
    const Py_ssize_t i = first + 2 * which;
    PyObject *weight = item(arrays, 2 * which), *bias = item(arrays, 2 * which + 1);
    const sa_compact *compact = sa_compact_of(weight);
    if (compact != NULL) {
        return take_panels(c, weight, compact, which, rows, columns, l) < 0
                   ? -1
                   : take_array(c, i + 1, bias, compact->out, 0, "a bias", &l->bias[which]);
    }
    if (l->weights != SA_WEIGHTS_WHOLE && is_projection(which) && weight != Py_None) {
        return sa_error(PyExc_TypeError, "%s must have the kind of query", name_of(which));
    }
    if (take_array(c, i, weight, rows, columns, name_of(which), &l->weight[which]) < 0) {
        return -1;
    }
    if (weight == Py_None) {
        return bias == Py_None ? 0 : sa_error(PyExc_ValueError, "%s has a bias, but no weight", name_of(which));
    }
    return take_array(c, i + 1, bias, rows_of(c, i), 0, "a bias", &l->bias[which]);
}

/* The array of query has the rows of query, then key, then value. */
static void parameter_from_query(const sa_transformer_call *c, sa_layer *l, int which, ptrdiff_t row) {
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->e.f64);
    l->weight[which] = (const char *)l->weight[SA_QUERY] + row * c->e.d * size;
    l->bias[which] = l->bias[SA_QUERY] == NULL ? NULL : (const char *)l->bias[SA_QUERY] + row * size;
}

static int take_parameters(sa_transformer_call *c, Py_ssize_t first, PyObject *arrays, sa_layer *l) {
    const npy_intp d = c->e.d, w = l->width;
    if (l->heads < 1 || l->key_heads < 1 || l->width < 1 || l->heads % l->key_heads != 0 ||
        l->width > PY_SSIZE_T_MAX / 4 / l->heads) {
        return sa_error(PyExc_ValueError,
                        "num_key_heads must divide num_heads, and heads have at least one element; not %zd, %zd and %zd",
                        l->key_heads, l->heads, l->width);
    }
    const npy_intp query_width = l->heads * l->width, key_width = l->key_heads * l->width;
    const bool together = item(arrays, 2 * SA_KEY) == Py_None;
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        const npy_intp h = l->hidden, up = which == SA_UP ? -1 : h; /* the rows of up determine h */
        const npy_intp queries = together ? query_width + 2 * key_width : query_width;
        const npy_intp rows[] = {queries, key_width, key_width, d, d, up, h, d, d, w, w, d, d};
        const npy_intp columns[] = {d, d, d, query_width, 0, d, d, h, 0, 0, 0, 0, 0};
        if (take_parameter(c, first, arrays, which, rows[which], columns[which], l) < 0) {
            return -1;
        }
        if (which == SA_UP && l->weight[which] != NULL) {
            l->hidden =
                l->weights == SA_WEIGHTS_WHOLE ? rows_of(c, first + 2 * which) : ((const sa_compact *)l->weight[which])->out;
        }
    }
    const bool own_value = l->weight[SA_VALUE] != NULL;
    const bool post = l->weight[SA_ATTENTION_POST_NORM] != NULL || l->weight[SA_LAST_POST_NORM] != NULL;
    if (post && (!l->norm_first || l->weight[SA_OUTPUT] == NULL || l->weight[SA_DOWN] == NULL)) {
        return sa_error(PyExc_ValueError, "post norms need norm_first, an output and a feed-forward network");
    }
    if (together && l->weights != SA_WEIGHTS_WHOLE) {
        return sa_error(PyExc_ValueError, "compact weights of query, key and value must be apart");
    }
    if (together && l->weight[SA_QUERY] != NULL) {
        parameter_from_query(c, l, SA_KEY, query_width);
        parameter_from_query(c, l, SA_VALUE, query_width + key_width);
    }
    if (l->weight[SA_OUTPUT] == NULL) {
        l->dropout[SA_DROP_OUTPUT] = 0;
    }
    const bool sums =
        l->weight[SA_OUTPUT] != NULL || (!l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL && query_width == d);
    const bool whole = l->hidden > 0 ? l->weight[SA_DOWN] != NULL
                                     : l->weight[SA_UP] == NULL && l->weight[SA_DOWN] == NULL && l->weight[SA_GATE] == NULL &&
                                           l->weight[SA_LAST_NORM] == NULL;
    if (l->weight[SA_QUERY] == NULL || together == own_value || !sums || !whole) {
        return sa_error(PyExc_ValueError,
                        "a layer has query, key and value, or a query that holds all three; an output or a norm after "
                        "the sum; and up and down, or no feed-forward network");
    }
    return 0;
}

static int take_angles(sa_transformer_call *c, Py_ssize_t first, PyObject *arrays, sa_layer *l) {
    PyObject *cosines = item(arrays, COSINES), *sines = item(arrays, SINES);
    if (cosines == Py_None) {
        return 0;
    }
    const npy_intp half = PyArray_Check(cosines) && PyArray_NDIM((PyArrayObject *)cosines) == 2 ? sa_dim(cosines, 1) : 0;
    if (half < 1 || half > l->width / 2) {
        return sa_error(PyExc_ValueError, "angles must have shape (positions, rotated / 2) with 2 to %zd rotated elements",
                        l->width);
    }
    if (take_array(c, first + COSINES, cosines, -1, half, "cosines", &l->rotary.cos) < 0 ||
        take_array(c, first + SINES, sines, rows_of(c, first + COSINES), half, "sines", &l->rotary.sin) < 0) {
        return -1;
    }
    l->rotary.rotated = 2 * half;
    c->most = sa_smaller(c->most, rows_of(c, first + COSINES));
    return l->rotary.sin == NULL ? sa_error(PyExc_TypeError, "cosines need sines") : 0;
}

/* Limits a bound so that no sum with a row overflows. */
static ptrdiff_t take_bound(Py_ssize_t keys) { return keys < 0 || keys > SA_MAX_LENGTH ? SA_UNBOUNDED : keys; }

/* Takes (arrays, numbers), in the order of engine/transformer.py. Numbers are read first, since reading one may run Python. */
static int take_layer(sa_transformer_call *c, Py_ssize_t number, PyObject *value) {
    PyObject *arrays = NULL, *numbers = NULL;
    sa_layer *l = &c->layer[number];
    const Py_ssize_t first = FIRST_OF_LAYERS + number * LAYER_ARRAYS;
    int rms[SA_LAYER_PARAMETERS] = {0}, norm_first, causal, activation, interleaved;
    unsigned long long seed = 0;
    if (!PyTuple_Check(value) || !PyArg_ParseTuple(value, "O!O!", &PyTuple_Type, &arrays, &PyTuple_Type, &numbers)) {
        return PyErr_Occurred() ? -1 : sa_error(PyExc_TypeError, "layer %zd must be a tuple (arrays, numbers)", number);
    }
    double *eps = l->eps;
    if (!PyArg_ParseTuple(numbers, "nnnddppppnnddip|ddddKddddpppp", &l->heads, &l->key_heads, &l->width,
                          &eps[SA_ATTENTION_NORM], &eps[SA_LAST_NORM], &rms[SA_ATTENTION_NORM], &rms[SA_LAST_NORM], &norm_first,
                          &causal, &l->window_left, &l->window_right, &l->scale, &l->softcap, &activation, &interleaved,
                          &l->dropout[0], &l->dropout[1], &l->dropout[2], &l->dropout[3], &seed, &eps[SA_QUERY_NORM],
                          &eps[SA_KEY_NORM], &eps[SA_ATTENTION_POST_NORM], &eps[SA_LAST_POST_NORM], &rms[SA_QUERY_NORM],
                          &rms[SA_KEY_NORM], &rms[SA_ATTENTION_POST_NORM], &rms[SA_LAST_POST_NORM])) {
        return -1;
    }
    if (PyTuple_GET_SIZE(arrays) > LAYER_ARRAYS || activation < SA_ACT_NONE || activation > SA_ACT_SILU) {
        return sa_error(PyExc_ValueError, "layer %zd must have at most %d arrays and an activation from %d to %d", number,
                        LAYER_ARRAYS, SA_ACT_NONE, SA_ACT_SILU);
    }
    for (int i = 0; i < SA_DROPOUTS; ++i) {
        if (!(l->dropout[i] >= 0 && l->dropout[i] <= 1)) {
            return sa_error(PyExc_ValueError, "the dropouts of layer %zd must be between 0 and 1", number);
        }
    }
    l->seed = seed;
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        l->rms[which] = rms[which];
    }
    l->norm_first = norm_first;
    l->causal = causal;
    l->window_left = take_bound(l->window_left);
    l->window_right = take_bound(l->window_right);
    l->activation = activation;
    l->rotary.interleaved = interleaved;
    if (take_parameters(c, first, arrays, l) < 0 || take_angles(c, first, arrays, l) < 0) {
        return -1;
    }
    if (l->hidden > 0 && activation == SA_ACT_NONE) {
        return sa_error(PyExc_ValueError, "layer %zd has a feed-forward network without an activation", number);
    }
    return 0;
}

/* Takes arrays `from` and `from` + 1. */
static int take_norm(sa_transformer_call *c, Py_ssize_t i, PyObject *arrays, Py_ssize_t from, sa_norm *norm) {
    if (take_array(c, i, PyTuple_GET_ITEM(arrays, from), c->e.d, 0, "a norm's weight", &norm->weight) < 0 ||
        take_array(c, i + 1, PyTuple_GET_ITEM(arrays, from + 1), c->e.d, 0, "a norm's bias", &norm->bias) < 0) {
        return -1;
    }
    return norm->bias == NULL || norm->weight != NULL ? 0 : sa_error(PyExc_ValueError, "a norm has a bias, but no weight");
}

/* Takes floats or booleans (sequences or 1, heads or 1, longest, longest), of any dtype and layout. */
static int take_mask(sa_transformer_call *c, const sa_state *state, PyObject *value) {
    sa_dtype dtype;
    if (value == Py_None) {
        return 0;
    }
    PyArrayObject *array = c->array[MASK] = sa_as_array(state, value, "mask", SA_MASK, &dtype);
    if (array == NULL) {
        return -1;
    }
    const npy_intp *shape = PyArray_SHAPE(array);
    if (sa_is_integer(dtype) || PyArray_NDIM(array) != 4 || shape[2] != shape[3]) {
        return sa_error(PyExc_ValueError,
                        "mask must hold booleans or floats, in 4 axes, with as many rows as columns, not %s of %s",
                        sa_shape_of(array), sa_dtype_name(dtype));
    }
    sa_fill_tensor(&c->e.mask, array, dtype, 2, 2);
    c->most = sa_smaller(c->most, shape[2]);
    return 0;
}

/* Takes (sequences or 1, longest). */
static int take_key_bias(sa_transformer_call *c, PyObject *value) {
    const bool wide = PyArray_Check(value) && PyArray_NDIM((PyArrayObject *)value) == 2;
    const npy_intp columns = wide ? sa_dim(value, 1) : 1;
    const void *data = NULL;
    if (take_array(c, KEY_BIAS, value, -1, columns > 0 ? columns : 1, "key_bias", &data) < 0) {
        return -1;
    }
    if (data != NULL) {
        sa_tensor *bias = &c->e.key_bias;
        bias->m.data = PyArray_BYTES(c->array[KEY_BIAS]);
        bias->lead_stride[0] = rows_of(c, KEY_BIAS) == 1 ? 0 : PyArray_STRIDE(c->array[KEY_BIAS], 0);
        c->most = sa_smaller(c->most, columns);
    }
    return 0;
}

static int check_mask(const sa_transformer_call *c) {
    if (c->array[KEY_BIAS] != NULL && rows_of(c, KEY_BIAS) != 1 && rows_of(c, KEY_BIAS) != c->e.sequences) {
        return sa_error(PyExc_ValueError, "key_bias must have shape (1 or sequences, longest), not %s",
                        sa_shape_of(c->array[KEY_BIAS]));
    }
    if (c->array[MASK] == NULL) {
        return 0;
    }
    const npy_intp *shape = PyArray_SHAPE(c->array[MASK]);
    bool fits = shape[0] == 1 || shape[0] == c->e.sequences;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        fits = fits && (shape[1] == 1 || shape[1] == c->layer[i].heads);
    }
    return fits ? 0
                : sa_error(PyExc_ValueError, "mask must have shape (1 or sequences, 1 or heads, longest, longest), not %s",
                           sa_shape_of(c->array[MASK]));
}

/* Takes an array of the model's dtype, an array of the bits of bfloat16, a tuple (int8, scales of rows), or quants. */
static int take_table(sa_transformer_call *c, PyObject *value) {
    const sa_compact *quants = sa_compact_of(value);
    if (quants != NULL) {
        if (c->e.f64 || quants->kind != SA_WEIGHTS_QUANTS || quants->in != c->e.d) {
            return sa_error(PyExc_ValueError, "a table of quants must have %zd columns, not %zd; all else must be float32",
                            c->e.d, quants->in);
        }
        c->table_owner = Py_NewRef(value);
        c->e.table = quants;
        c->e.table_kind = SA_WEIGHTS_QUANTS;
        c->e.vocabulary = quants->out;
        return 0;
    }
    if (!c->e.f64 && sa_is_plain(value, NPY_UINT16, 2) && sa_dim(value, 1) == c->e.d) {
        c->array[TABLE] = (PyArrayObject *)Py_NewRef(value);
        c->e.table = sa_data(value);
        c->e.table_kind = SA_WEIGHTS_BF16;
        return 0;
    }
    if (!PyTuple_Check(value)) {
        return take_array(c, TABLE, value, -1, c->e.d, "table", &c->e.table);
    }
    PyObject *table, *scale;
    if (!PyArg_ParseTuple(value, "OO", &table, &scale)) {
        return -1;
    }
    if (c->e.f64 || !sa_is_plain(table, NPY_INT8, 2) || !sa_is_plain(scale, NPY_FLOAT, 2) || sa_dim(table, 1) != c->e.d ||
        sa_dim(scale, 1) != sa_ceil_div(c->e.d, SA_GROUP) || sa_dim(table, 0) != sa_dim(scale, 0)) {
        return sa_error(PyExc_ValueError,
                        "a table of int8 must be contiguous and have %zd columns, and scales of float32 for each %d numbers of "
                        "a row; all else must be float32",
                        c->e.d, SA_GROUP);
    }
    c->array[TABLE] = (PyArrayObject *)Py_NewRef(table);
    c->table_owner = Py_NewRef(scale);
    c->e.table = sa_data(table);
    c->e.table_kind = SA_WEIGHTS_INT8;
    c->e.table_scale = sa_data(scale);
    return 0;
}

/* Takes (arrays, numbers, layers): tuples, which do not change while numbers are read. */
static int take_model(sa_transformer_call *c, const sa_state *state, PyObject *model) {
    PyObject *arrays, *numbers, *layers;
    int first_rms, final_rms, pooling, f64;
    if (!PyArg_ParseTuple(model, "O!O!O!", &PyTuple_Type, &arrays, &PyTuple_Type, &numbers, &PyTuple_Type, &layers) ||
        !PyArg_ParseTuple(numbers, "npddppi|di", &c->e.d, &f64, &c->e.first_norm.eps, &c->e.final_norm.eps, &first_rms,
                          &final_rms, &pooling, &c->e.table_factor, &c->e.digits)) {
        return -1;
    }
    if (PyTuple_GET_SIZE(arrays) != OWN_ARRAYS || c->e.d < 1 || pooling < SA_EACH_ROW || pooling > SA_LAST_ROW) {
        return sa_error(PyExc_ValueError, "a model must have %d arrays of its own, a width, and a pooling from %d to %d",
                        OWN_ARRAYS, SA_EACH_ROW, SA_LAST_ROW);
    }
    if (c->e.digits < 0 || c->e.digits > SA_DIGITS) {
        return sa_error(PyExc_ValueError, "digits must be 0 to %d, not %d", SA_DIGITS, c->e.digits);
    }
    c->e.f64 = f64;
    c->e.first_norm.rms = first_rms;
    c->e.final_norm.rms = final_rms;
    c->e.pooling = pooling;
    c->e.layers = PyTuple_GET_SIZE(layers);
    c->most = NPY_MAX_INTP;
    c->arrays = OWN_ARRAYS + c->e.layers * LAYER_ARRAYS;
    c->array = PyMem_Calloc((size_t)c->arrays, sizeof *c->array);
    c->e.layer = c->layer = PyMem_Calloc((size_t)c->e.layers + 1, sizeof *c->layer);
    c->compact = PyMem_Calloc((size_t)c->e.layers * SA_LAYER_PARAMETERS + 1, sizeof *c->compact);
    if (c->array == NULL || c->layer == NULL || c->compact == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_table(c, PyTuple_GET_ITEM(arrays, TABLE)) < 0 ||
        take_array(c, ALWAYS, PyTuple_GET_ITEM(arrays, ALWAYS), c->e.d, 0, "always", &c->e.always) < 0 ||
        take_array(c, POSITIONS, PyTuple_GET_ITEM(arrays, POSITIONS), -1, c->e.d, "positions", &c->e.positions) < 0 ||
        take_mask(c, state, PyTuple_GET_ITEM(arrays, MASK)) < 0 || take_key_bias(c, PyTuple_GET_ITEM(arrays, KEY_BIAS)) < 0 ||
        take_norm(c, FIRST_NORM, arrays, FIRST_NORM, &c->e.first_norm) < 0 ||
        take_norm(c, c->arrays - 2, arrays, FIRST_NORM + 2, &c->e.final_norm) < 0) {
        return -1;
    }
    if (c->e.table == NULL && (c->e.always != NULL || c->e.positions != NULL)) {
        return sa_error(PyExc_ValueError, "what is always added and positions need a table");
    }
    if (c->e.table_factor != 0 && (c->e.table == NULL || c->e.always != NULL || c->e.positions != NULL)) {
        return sa_error(PyExc_ValueError, "a factor needs a table, and nothing that is added to its rows");
    }
    c->e.vocabulary = c->e.table_kind == SA_WEIGHTS_QUANTS ? c->e.vocabulary : rows_of(c, TABLE);
    c->most = c->e.positions == NULL ? c->most : sa_smaller(c->most, rows_of(c, POSITIONS));
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        if (take_layer(c, i, PyTuple_GET_ITEM(layers, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- ids and offsets ----------------------------------------------------------------------------------------------------- */

static bool are_int64(PyObject *x) {
    return PyArray_Check(x) && PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)x), NPY_INT64) &&
           sa_is_plain(x, PyArray_TYPE((PyArrayObject *)x), 1);
}

/* Checks starts, and past, (sequences,), unless it is NULL. */
static int check_starts(sa_transformer_call *c, const int64_t *starts, npy_intp offsets, npy_intp tokens, const int64_t *past) {
    if (offsets < 1 || starts[0] != 0 || starts[offsets - 1] != tokens) {
        return sa_error(PyExc_ValueError, "cu_seqlens must go from 0 to the number of ids, %zd", tokens);
    }
    for (npy_intp s = 0; s + 1 < offsets; ++s) {
        /* with arbitrary offsets a difference could overflow */
        const bool rises = starts[s + 1] > starts[s] && starts[s + 1] <= tokens;
        const int64_t length = rises ? starts[s + 1] - starts[s] : 0;
        if (length < 1 || length > c->most) {
            return sa_error(PyExc_ValueError, "sentence %zd must have 1 to %zd tokens, cu_seqlens goes from %lld to %lld", s,
                            c->most, (long long)starts[s], (long long)starts[s + 1]);
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

/* Takes (keys, values, past): writable arrays (layers, sequences, key heads, capacity, width) without overlap, and int64. With a
 * model of float32 keys and values may be float16, or uint16 that are the bits of bfloat16. */
static int take_cache(sa_transformer_call *c, PyObject *cache, npy_intp sequences, PyObject **past) {
    if (!PyTuple_Check(cache) || PyTuple_GET_SIZE(cache) != 3) {
        return sa_error(PyExc_TypeError, "a cache must be a tuple (keys, values, past)");
    }
    *past = PyTuple_GET_ITEM(cache, 2);
    if (!are_int64(*past) || sa_dim(*past, 0) != sequences) {
        return sa_error(PyExc_ValueError, "past must be a contiguous array of int64 with an element for each of %zd sequences",
                        sequences);
    }
    const sa_layer *first = c->layer;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        const sa_layer *l = &c->layer[i];
        if (!l->causal || l->key_heads != first->key_heads || l->width != first->width || l->dropout[SA_DROP_WEIGHTS] > 0 ||
            c->array[MASK] != NULL || c->array[KEY_BIAS] != NULL) {
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
        if (shape == NULL || !PyArray_ISWRITEABLE((PyArrayObject *)array) || shape[0] != c->e.layers || shape[1] != sequences ||
            (c->e.layers > 0 && (shape[2] != first->key_heads || shape[4] != first->width)) ||
            (i == 1 && shape[3] != c->e.cache.capacity)) {
            return sa_error(PyExc_ValueError,
                            "keys and values must be writable, contiguous arrays of %s with shape (%zd layers, %zd sequences, "
                            "key heads, capacity, width)",
                            sa_transformer_type_name(c), c->e.layers, sequences);
        }
        c->e.cache.capacity = shape[3];
        c->cached[i] = Py_NewRef(array);
        data[i] = sa_data(array);
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
    int64_t *own_ids = c->numbers, *own_starts = c->numbers + ids, *own_past = past == NULL ? NULL : own_starts + offsets;
    if (past != NULL) {
        memcpy(own_past, sa_data(past), (size_t)(offsets - 1) * sizeof *own_past);
    }
    memcpy(own_starts, sa_data(starts), (size_t)offsets * sizeof *own_starts);
    if (by_ids) {
        memcpy(own_ids, sa_data(inputs), (size_t)ids * sizeof *own_ids);
    } else {
        c->rows = (PyArrayObject *)Py_NewRef(inputs);
        c->e.rows = PyArray_DATA(c->rows);
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
    return check_mask(c);
}

int sa_transformer_read(sa_transformer_call *c, PyObject *module, PyObject *model, PyObject *inputs, PyObject *starts,
                        PyObject *cache) {
    return take_model(c, sa_state_of(module), model) < 0 || take_inputs(c, module, inputs, starts, cache) < 0 ? -1 : 0;
}
