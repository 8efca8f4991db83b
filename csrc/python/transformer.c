/* The transformer's passes, for selfattn/nn/_transformer.py, which says what the settings mean. Ids and offsets are copied,
 * then checked, so that nobody changes them between. A capsule carries what the backward pass needs. */
#include "python/arrays.h"

#include "drivers/attention.h"
#include "drivers/transformer.h"
#include "python/run.h"

#define SA_SMALL_WORK 100000.0

/* Of a model: the table, what is always added, positions, mask, weight and bias of the first norm; then of each layer weight and bias of each part
 * in the core's order, cosines and sines; then weight and bias of the final norm. Absent ones are NULL. */
enum { TABLE, ALWAYS, POSITIONS, MASK, FIRST_NORM, FIRST_OF_LAYERS = FIRST_NORM + 2, OWN_ARRAYS = FIRST_OF_LAYERS + 2 };
enum { COSINES = 2 * SA_LAYER_PARTS, SINES, LAYER_ARRAYS };

static const char *const part_names[SA_LAYER_PARTS] = {"query", "key",  "value", "output",           "attention_norm",
                                                       "up",    "gate", "down",  "feed_forward_norm"};

static const char capsule_name[] = "selfattn._transformer_saved";

typedef struct {
    sa_transformer e;
    npy_intp most; /* tokens of a sequence */
    Py_ssize_t arrays;
    PyArrayObject **array; /* owned, or NULL */
    PyArrayObject *rows;   /* owned, or NULL: the input */
    sa_layer *layer;
    int64_t *numbers; /* ids, offsets: a block */
    void *saved;      /* a block; NULL without a backward pass */
    void *out;
    sa_transformer_gradients g;
    sa_transformer_plan plan;
} transformer_call;

static void release(transformer_call *c) {
    for (Py_ssize_t i = 0; c->array != NULL && i < c->arrays; ++i) {
        Py_XDECREF(c->array[i]);
    }
    Py_XDECREF(c->rows);
    PyMem_Free(c->array);
    PyMem_Free(c->layer);
    sa_block_give(c->numbers);
    sa_block_give(c->saved);
    PyMem_Free(c);
}

static void release_capsule(PyObject *capsule) { release(PyCapsule_GetPointer(capsule, capsule_name)); }

static int type_of(const transformer_call *c) { return c->e.f64 ? NPY_DOUBLE : NPY_FLOAT; }

static const char *type_name(const transformer_call *c) { return c->e.f64 ? "float64" : "float32"; }

/* ---- the parameters ---------------------------------------------------------------------------------------------------- */

/* Keeps an array, contiguous and of the type of all. columns 0: a vector; rows −1: any number. NULL for None. */
static int take_array(transformer_call *c, Py_ssize_t i, PyObject *value, npy_intp rows, npy_intp columns, const char *name,
                      const void **to) {
    if (value == Py_None) {
        return 0;
    }
    if (!sa_is_plain(value, type_of(c), -1)) {
        return sa_error(PyExc_TypeError, "%s must be a contiguous, aligned array of %s as all others are, not %R", name,
                        type_name(c),
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

static npy_intp rows_of(const transformer_call *c, Py_ssize_t i) {
    return c->array[i] == NULL ? 0 : PyArray_DIM(c->array[i], 0);
}

/* What is missing at the end is None. */
static PyObject *item(PyObject *list, Py_ssize_t i) { return i < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, i) : Py_None; }

/* Weight and bias of a part of a layer: (rows, columns) and (rows,), or both (rows,). */
static int take_part(transformer_call *c, Py_ssize_t first, PyObject *arrays, int part, npy_intp rows, npy_intp columns,
                     sa_layer *l) {
    const Py_ssize_t i = first + 2 * part;
    PyObject *weight = item(arrays, 2 * part), *bias = item(arrays, 2 * part + 1);
    if (take_array(c, i, weight, rows, columns, part_names[part], &l->weight[part]) < 0) {
        return -1;
    }
    if (weight == Py_None) {
        return bias == Py_None ? 0 : sa_error(PyExc_ValueError, "%s has a bias, but no weight", part_names[part]);
    }
    return take_array(c, i + 1, bias, rows_of(c, i), 0, "a bias", &l->bias[part]);
}

/* Query's array holds those of query, key and value, one below the other. */
static void part_from_query(const transformer_call *c, sa_layer *l, int part, ptrdiff_t row) {
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->e.f64);
    l->weight[part] = (const char *)l->weight[SA_QUERY] + row * c->e.d * size;
    l->bias[part] = l->bias[SA_QUERY] == NULL ? NULL : (const char *)l->bias[SA_QUERY] + row * size;
}

static int take_parts(transformer_call *c, Py_ssize_t first, PyObject *arrays, sa_layer *l) {
    const npy_intp d = c->e.d;
    npy_intp queries = 0, keys = 0;
    if (l->heads < 1 || l->key_heads < 1 || l->width < 1 || l->heads % l->key_heads != 0 ||
        l->width > PY_SSIZE_T_MAX / 4 / l->heads) {
        return sa_error(PyExc_ValueError,
                        "num_key_heads must divide num_heads, and heads have at least one element; not %zd, %zd and %zd",
                        l->key_heads, l->heads, l->width);
    }
    queries = l->heads * l->width;
    keys = l->key_heads * l->width;
    const bool together = item(arrays, 2 * SA_KEY) == Py_None;
    if (take_part(c, first, arrays, SA_QUERY, together ? queries + 2 * keys : queries, d, l) < 0 ||
        take_part(c, first, arrays, SA_KEY, keys, d, l) < 0 || take_part(c, first, arrays, SA_VALUE, keys, d, l) < 0 ||
        take_part(c, first, arrays, SA_OUTPUT, d, queries, l) < 0 ||
        take_part(c, first, arrays, SA_ATTENTION_NORM, d, 0, l) < 0 || take_part(c, first, arrays, SA_UP, -1, d, l) < 0) {
        return -1;
    }
    l->hidden = rows_of(c, first + 2 * SA_UP);
    if (take_part(c, first, arrays, SA_GATE, l->hidden, d, l) < 0 ||
        take_part(c, first, arrays, SA_DOWN, d, l->hidden, l) < 0 || take_part(c, first, arrays, SA_LAST_NORM, d, 0, l) < 0) {
        return -1;
    }
    const bool own_value = l->weight[SA_VALUE] != NULL;
    if (together && l->weight[SA_QUERY] != NULL) {
        part_from_query(c, l, SA_KEY, queries);
        part_from_query(c, l, SA_VALUE, queries + keys);
    }
    if (l->weight[SA_OUTPUT] == NULL) {
        l->dropout[SA_DROP_OUTPUT] = 0;
    }
    const bool sums = l->weight[SA_OUTPUT] != NULL || (!l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL && queries == d);
    const bool whole = l->hidden > 0 ? l->weight[SA_DOWN] != NULL
                                     : l->weight[SA_UP] == NULL && l->weight[SA_DOWN] == NULL && l->weight[SA_GATE] == NULL &&
                                           l->weight[SA_LAST_NORM] == NULL;
    if (l->weight[SA_QUERY] == NULL || together == own_value || !sums || !whole) {
        return sa_error(PyExc_ValueError,
                        "a layer has query, key and value, or a query that holds all three; an output or a norm behind "
                        "the sum; and up and down, or nothing of a feed-forward network");
    }
    return 0;
}

static int take_angles(transformer_call *c, Py_ssize_t first, PyObject *arrays, sa_layer *l) {
    PyObject *cosines = item(arrays, COSINES), *sines = item(arrays, SINES);
    if (cosines == Py_None) {
        return 0;
    }
    const npy_intp half =
        PyArray_Check(cosines) && PyArray_NDIM((PyArrayObject *)cosines) == 2 ? PyArray_DIM((PyArrayObject *)cosines, 1) : 0;
    if (half < 1 || half > l->width / 2) {
        return sa_error(PyExc_ValueError, "angles must have shape (positions, rotated / 2) with 2 to %zd rotated elements",
                        l->width);
    }
    if (take_array(c, first + COSINES, cosines, -1, half, "cosines", &l->rotary.cos) < 0 ||
        take_array(c, first + SINES, sines, rows_of(c, first + COSINES), half, "sines", &l->rotary.sin) < 0) {
        return -1;
    }
    l->rotary.rotated = 2 * half;
    c->most = rows_of(c, first + COSINES) < c->most ? rows_of(c, first + COSINES) : c->most;
    return l->rotary.sin == NULL ? sa_error(PyExc_TypeError, "cosines need sines") : 0;
}

/* No sum with a row overflows. */
static ptrdiff_t take_bound(Py_ssize_t keys) { return keys < 0 || keys > SA_MAX_LENGTH ? SA_UNBOUNDED : keys; }

/* (arrays, numbers): nn/_transformer.py has their order. Numbers come first, since reading one may run Python. */
static int take_layer(transformer_call *c, Py_ssize_t number, PyObject *value) {
    PyObject *arrays = NULL, *numbers = NULL;
    sa_layer *l = &c->layer[number];
    const Py_ssize_t first = FIRST_OF_LAYERS + number * LAYER_ARRAYS;
    int rms[2], norm_first, causal, activation, interleaved;
    unsigned long long seed = 0;
    if (!PyTuple_Check(value) || !PyArg_ParseTuple(value, "O!O!", &PyList_Type, &arrays, &PyTuple_Type, &numbers)) {
        return PyErr_Occurred() ? -1 : sa_error(PyExc_TypeError, "layer %zd must be a tuple (arrays, numbers)", number);
    }
    if (!PyArg_ParseTuple(numbers, "nnnddppppnnddip|ddddK", &l->heads, &l->key_heads, &l->width, &l->eps[0], &l->eps[1],
                          &rms[0], &rms[1], &norm_first, &causal, &l->window_left, &l->window_right, &l->scale, &l->softcap,
                          &activation, &interleaved, &l->dropout[0], &l->dropout[1], &l->dropout[2], &l->dropout[3], &seed)) {
        return -1;
    }
    if (PyList_GET_SIZE(arrays) > LAYER_ARRAYS || activation < SA_ACT_NONE || activation > SA_ACT_SILU) {
        return sa_error(PyExc_ValueError, "layer %zd must have at most %d arrays and an activation from %d to %d", number,
                        LAYER_ARRAYS, SA_ACT_NONE, SA_ACT_SILU);
    }
    for (int i = 0; i < SA_DROPOUTS; ++i) {
        if (!(l->dropout[i] >= 0 && l->dropout[i] <= 1)) {
            return sa_error(PyExc_ValueError, "the dropouts of layer %zd must be between 0 and 1", number);
        }
    }
    l->seed = seed;
    l->rms[0] = rms[0];
    l->rms[1] = rms[1];
    l->norm_first = norm_first;
    l->causal = causal;
    l->window_left = take_bound(l->window_left);
    l->window_right = take_bound(l->window_right);
    l->activation = activation;
    l->rotary.interleaved = interleaved;
    if (take_parts(c, first, arrays, l) < 0 || take_angles(c, first, arrays, l) < 0) {
        return -1;
    }
    if (l->hidden > 0 && activation == SA_ACT_NONE) {
        return sa_error(PyExc_ValueError, "layer %zd has a feed-forward network without an activation", number);
    }
    return 0;
}

/* Arrays `from` and behind it. */
static int take_norm(transformer_call *c, Py_ssize_t i, PyObject *arrays, Py_ssize_t from, sa_norm *norm) {
    if (take_array(c, i, PyTuple_GET_ITEM(arrays, from), c->e.d, 0, "a norm's weight", &norm->weight) < 0 ||
        take_array(c, i + 1, PyTuple_GET_ITEM(arrays, from + 1), c->e.d, 0, "a norm's bias", &norm->bias) < 0) {
        return -1;
    }
    return norm->bias == NULL || norm->weight != NULL ? 0 : sa_error(PyExc_ValueError, "a norm has a bias, but no weight");
}

/* Floats or booleans (sequences or 1, heads or 1, longest, longest), any strides. */
static int take_mask(transformer_call *c, PyObject *value) {
    if (value == Py_None) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)value;
    if (!PyArray_Check(value) || (PyArray_TYPE(array) != NPY_BOOL && PyArray_TYPE(array) != type_of(c)) ||
        PyArray_NDIM(array) != 4 || PyArray_ISBYTESWAPPED(array) || !PyArray_ISALIGNED(array)) {
        return sa_error(PyExc_TypeError, "mask must be an aligned 4-D array of bool or %s", type_name(c));
    }
    const npy_intp *shape = PyArray_SHAPE(array), *strides = PyArray_STRIDES(array);
    if (shape[2] != shape[3]) {
        return sa_error(PyExc_ValueError, "mask must have as many rows as columns, not shape %s", sa_shape_of(array));
    }
    c->array[MASK] = (PyArrayObject *)Py_NewRef(value);
    c->e.mask.m = (sa_matrix){PyArray_BYTES(array), strides[2], strides[3],
                              PyArray_TYPE(array) == NPY_BOOL ? SA_BOOL
                              : c->e.f64                      ? SA_F64
                                                              : SA_F32,
                              false};
    c->e.mask.lead_stride[0] = shape[0] == 1 ? 0 : strides[0];
    c->e.mask.lead_stride[1] = shape[1] == 1 ? 0 : strides[1];
    c->most = shape[2] < c->most ? shape[2] : c->most;
    return 0;
}

static int check_mask(const transformer_call *c) {
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

/* (arrays, numbers, layers): tuples, which stay as they are while numbers are read. */
static int take_model(transformer_call *c, PyObject *model) {
    PyObject *arrays, *numbers, *layers;
    int first_rms, final_rms, pooling, f64;
    if (!PyArg_ParseTuple(model, "O!O!O!", &PyTuple_Type, &arrays, &PyTuple_Type, &numbers, &PyTuple_Type, &layers) ||
        !PyArg_ParseTuple(numbers, "npddppi", &c->e.d, &f64, &c->e.first_norm.eps, &c->e.final_norm.eps, &first_rms, &final_rms,
                          &pooling)) {
        return -1;
    }
    if (PyTuple_GET_SIZE(arrays) != OWN_ARRAYS || c->e.d < 1 || pooling < SA_EACH_ROW || pooling > SA_LAST_ROW) {
        return sa_error(PyExc_ValueError, "a model must have %d arrays of its own, a width, and a pooling from %d to %d",
                        OWN_ARRAYS, SA_EACH_ROW, SA_LAST_ROW);
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
    if (c->array == NULL || c->layer == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_array(c, TABLE, PyTuple_GET_ITEM(arrays, TABLE), -1, c->e.d, "table", &c->e.table) < 0 ||
        take_array(c, ALWAYS, PyTuple_GET_ITEM(arrays, ALWAYS), c->e.d, 0, "always", &c->e.always) < 0 ||
        take_array(c, POSITIONS, PyTuple_GET_ITEM(arrays, POSITIONS), -1, c->e.d, "positions", &c->e.positions) < 0 ||
        take_mask(c, PyTuple_GET_ITEM(arrays, MASK)) < 0 ||
        take_norm(c, FIRST_NORM, arrays, FIRST_NORM, &c->e.first_norm) < 0 ||
        take_norm(c, c->arrays - 2, arrays, FIRST_NORM + 2, &c->e.final_norm) < 0) {
        return -1;
    }
    if (c->e.table == NULL && (c->e.always != NULL || c->e.positions != NULL)) {
        return sa_error(PyExc_ValueError, "what is always added and positions need a table");
    }
    c->e.vocabulary = rows_of(c, TABLE);
    c->most = c->e.positions != NULL && rows_of(c, POSITIONS) < c->most ? rows_of(c, POSITIONS) : c->most;
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

static int check_starts(transformer_call *c, const int64_t *starts, npy_intp offsets, npy_intp tokens) {
    if (offsets < 1 || starts[0] != 0 || starts[offsets - 1] != tokens) {
        return sa_error(PyExc_ValueError, "cu_seqlens must go from 0 to the number of ids, %zd", tokens);
    }
    for (npy_intp s = 0; s + 1 < offsets; ++s) {
        /* hostile offsets overflow a difference */
        const bool rises = starts[s + 1] > starts[s] && starts[s + 1] <= tokens;
        const int64_t length = rises ? starts[s + 1] - starts[s] : 0;
        if (length < 1 || length > c->most) {
            return sa_error(PyExc_ValueError, "sentence %zd must have 1 to %zd tokens, cu_seqlens goes from %lld to %lld", s,
                            c->most, (long long)starts[s], (long long)starts[s + 1]);
        }
        c->e.longest = length > c->e.longest ? (ptrdiff_t)length : c->e.longest;
    }
    return 0;
}

/* Ids, or rows if there is no table. Numbers are copied before they are checked. */
static int take_inputs(transformer_call *c, PyObject *module, PyObject *inputs, PyObject *starts) {
    const bool by_ids = c->e.table != NULL;
    if (by_ids ? !are_int64(inputs) : !sa_is_plain(inputs, type_of(c), 2)) {
        return sa_error(PyExc_TypeError, "%s must be a contiguous %s", by_ids ? "ids" : "rows",
                        by_ids     ? "1-D array of int64"
                        : c->e.f64 ? "2-D array of float64"
                                   : "2-D array of float32");
    }
    if (!are_int64(starts)) {
        return sa_error(PyExc_TypeError, "cu_seqlens must be a contiguous 1-D array of int64");
    }
    const npy_intp tokens = PyArray_DIM((PyArrayObject *)inputs, 0), offsets = PyArray_SIZE((PyArrayObject *)starts);
    if (!by_ids && PyArray_DIM((PyArrayObject *)inputs, 1) != c->e.d) {
        return sa_error(PyExc_ValueError, "rows must have %zd columns, not shape %s", c->e.d,
                        sa_shape_of((PyArrayObject *)inputs));
    }
    const npy_intp ids = by_ids ? tokens : 0;
    c->numbers = sa_block_take(module, (size_t)(ids + offsets + 1) * sizeof *c->numbers);
    if (c->numbers == NULL) {
        return -1;
    }
    int64_t *own_ids = c->numbers, *own_starts = c->numbers + ids;
    memcpy(own_starts, PyArray_DATA((PyArrayObject *)starts), (size_t)offsets * sizeof *own_starts);
    if (by_ids) {
        memcpy(own_ids, PyArray_DATA((PyArrayObject *)inputs), (size_t)ids * sizeof *own_ids);
    } else {
        c->rows = (PyArrayObject *)Py_NewRef(inputs);
        c->e.rows = PyArray_DATA(c->rows);
    }
    if (check_starts(c, own_starts, offsets, tokens) < 0) {
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
    c->e.starts = own_starts;
    return check_mask(c);
}

/* −1: something is no id. */
static Py_ssize_t copy_ids(PyObject *list, Py_ssize_t vocabulary, int64_t *to) {
    const Py_ssize_t n = PyList_GET_SIZE(list);
    for (Py_ssize_t i = 0; i < n; ++i) {
        PyObject *id = PyList_GET_ITEM(list, i);
        int overflow = 0;
        to[i] = PyLong_CheckExact(id) ? (int64_t)PyLong_AsLongLongAndOverflow(id, &overflow) : -1;
        if (overflow != 0 || to[i] < 0 || to[i] >= vocabulary) {
            return -1;
        }
    }
    return n;
}

/* None where a list is empty or something is no id: the caller says what. */
static PyObject *pack_ids(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *lists, *result = NULL;
    Py_ssize_t vocabulary;
    if (!PyArg_ParseTuple(args, "O!n:_pack_ids", &PyList_Type, &lists, &vocabulary)) {
        return NULL;
    }
    npy_intp tokens = 0, offsets = PyList_GET_SIZE(lists) + 1;
    for (Py_ssize_t s = 0; s + 1 < offsets; ++s) {
        PyObject *list = PyList_GET_ITEM(lists, s);
        if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0) {
            Py_RETURN_NONE;
        }
        tokens += PyList_GET_SIZE(list);
    }
    PyObject *ids = PyArray_SimpleNew(1, &tokens, NPY_INT64), *starts = PyArray_SimpleNew(1, &offsets, NPY_INT64);
    if (ids == NULL || starts == NULL) {
        goto done;
    }
    int64_t *to = PyArray_DATA((PyArrayObject *)ids), *start = PyArray_DATA((PyArrayObject *)starts);
    start[0] = 0;
    for (Py_ssize_t s = 0; s + 1 < offsets; ++s) {
        const Py_ssize_t n = copy_ids(PyList_GET_ITEM(lists, s), vocabulary, to + start[s]);
        if (n < 0) {
            result = Py_NewRef(Py_None);
            goto done;
        }
        start[s + 1] = start[s] + n;
    }
    result = PyTuple_Pack(2, ids, starts);
done:
    Py_XDECREF(ids);
    Py_XDECREF(starts);
    return result;
}

/* ---- forward ------------------------------------------------------------------------------------------------------------- */

/* Multiply-adds, as if all sequences were the longest. */
static double work_of(const sa_transformer *e) {
    double each = 0;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        const double heads = (double)(l->heads * l->width);
        each += (double)e->d * (3 * heads + 3 * (double)l->hidden) + 2 * (double)e->longest * heads;
    }
    return (double)e->tokens * each;
}

static int run(transformer_call *c, PyObject *module, sa_status planned, sa_status (*compute)(void *, char *, char *)) {
    return sa_run_job(module, &(sa_job){.planned = planned,
                                        .threads = c->plan.threads,
                                        .scratch_bytes = c->plan.scratch_bytes,
                                        .shared_bytes = c->plan.shared_bytes,
                                        .small = work_of(&c->e) < SA_SMALL_WORK,
                                        .compute = compute,
                                        .call = c});
}

static sa_status forward(void *call, char *scratch, char *shared) {
    (void)shared; /* behind the scratch */
    const transformer_call *c = call;
    sa_transformer_forward(&c->e, &c->plan, c->out, c->saved, scratch);
    return SA_OK;
}

static npy_intp output_rows(const transformer_call *c) { return c->e.pooling == SA_EACH_ROW ? c->e.tokens : c->e.sequences; }

static PyObject *run_forward(transformer_call *c, PyObject *module, bool keep) {
    const npy_intp shape[2] = {output_rows(c), c->e.d};
    const sa_status planned = sa_transformer_make_plan(&c->e, keep, sa_get_num_threads(), &c->plan);
    if (planned == SA_OK && keep && (c->saved = sa_block_take(module, c->plan.saved_bytes)) == NULL) {
        return NULL;
    }
    PyObject *result = PyArray_SimpleNew(2, shape, type_of(c));
    if (result == NULL) {
        return NULL;
    }
    c->out = PyArray_DATA((PyArrayObject *)result);
    if (run(c, module, planned, forward) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *transformer_forward(PyObject *module, PyObject *args) {
    PyObject *inputs, *starts, *model, *out = NULL, *result = NULL;
    int keep;
    if (!PyArg_ParseTuple(args, "OOO!p:_transformer_forward", &inputs, &starts, &PyTuple_Type, &model, &keep)) {
        return NULL;
    }
    transformer_call *c = PyMem_Calloc(1, sizeof *c);
    if (c == NULL) {
        return PyErr_NoMemory();
    }
    if (take_model(c, model) == 0 && take_inputs(c, module, inputs, starts) == 0) {
        out = run_forward(c, module, keep);
    }
    PyObject *capsule = out && keep ? PyCapsule_New(c, capsule_name, release_capsule) : NULL;
    if (capsule == NULL) {
        release(c);
    }
    if (!keep) {
        return out;
    }
    result = capsule ? PyTuple_Pack(2, out, capsule) : NULL;
    Py_XDECREF(out);
    Py_XDECREF(capsule);
    return result;
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */

static void release_gradients(PyObject *capsule) { sa_block_give(PyCapsule_GetPointer(capsule, NULL)); }

/* Whether the array has a gradient. */
static bool is_parameter(const transformer_call *c, Py_ssize_t i) {
    const bool of_layer = i >= FIRST_OF_LAYERS && i < c->arrays - 2;
    return c->array[i] != NULL && i != ALWAYS && i != POSITIONS && i != MASK &&
           !(of_layer && (i - FIRST_OF_LAYERS) % LAYER_ARRAYS >= COSINES);
}

static size_t gradient_bytes(const transformer_call *c, Py_ssize_t i) {
    return ((size_t)PyArray_NBYTES(c->array[i]) + 63) / 64 * 64;
}

/* Where the core writes the gradient of array i. */
static void point_to(transformer_call *c, sa_layer_gradients *of_layer, Py_ssize_t i, char *data) {
    if (i == TABLE) {
        c->g.table = data;
    } else if (i < FIRST_OF_LAYERS) {
        c->g.first_norm[i - FIRST_NORM] = data;
    } else if (i >= c->arrays - 2) {
        c->g.final_norm[i - (c->arrays - 2)] = data;
    } else {
        sa_layer_gradients *g = &of_layer[(i - FIRST_OF_LAYERS) / LAYER_ARRAYS];
        const Py_ssize_t in_layer = (i - FIRST_OF_LAYERS) % LAYER_ARRAYS;
        *(in_layer % 2 == 0 ? &g->weight[in_layer / 2] : &g->bias[in_layer / 2]) = data;
    }
}

/* Where query's array holds key and value, its gradient does. */
static void point_into_query(const transformer_call *c, sa_layer_gradients *of_layer) {
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->e.f64);
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        const sa_layer *l = &c->layer[i];
        sa_layer_gradients *g = &of_layer[i];
        for (int part = SA_KEY; part <= SA_VALUE && c->array[FIRST_OF_LAYERS + i * LAYER_ARRAYS + 2 * SA_KEY] == NULL; ++part) {
            const ptrdiff_t row = l->heads * l->width + (part == SA_VALUE ? l->key_heads * l->width : 0);
            g->weight[part] = (char *)g->weight[SA_QUERY] + row * c->e.d * size;
            g->bias[part] = g->bias[SA_QUERY] == NULL ? NULL : (char *)g->bias[SA_QUERY] + row * size;
        }
    }
}

/* In one block, owned by a capsule, their base. */
static PyObject *make_gradients(transformer_call *c, PyObject *module, sa_layer_gradients *of_layer) {
    size_t bytes = 0;
    Py_ssize_t count = 0;
    for (Py_ssize_t i = 0; i < c->arrays; ++i) {
        bytes += is_parameter(c, i) ? gradient_bytes(c, i) : 0;
        count += is_parameter(c, i);
    }
    char *data = sa_block_take(module, bytes);
    PyObject *capsule = data == NULL ? NULL : PyCapsule_New(data, NULL, release_gradients);
    if (capsule == NULL) {
        sa_block_give(data);
        return NULL;
    }
    PyObject *gradients = PyList_New(count);
    for (Py_ssize_t i = 0, n = 0; gradients != NULL && i < c->arrays; ++i) {
        if (!is_parameter(c, i)) {
            continue;
        }
        PyArrayObject *like = c->array[i];
        PyArray_Descr *descr = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(like));
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(like), PyArray_SHAPE(like), NULL, data,
                                               NPY_ARRAY_CARRAY, NULL);
        if (array == NULL || PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(capsule)) < 0) {
            Py_XDECREF(array);
            Py_CLEAR(gradients);
            break;
        }
        PyList_SET_ITEM(gradients, n++, array);
        point_to(c, of_layer, i, data);
        data += gradient_bytes(c, i);
    }
    point_into_query(c, of_layer);
    Py_DECREF(capsule);
    return gradients;
}

static sa_status backward(void *call, char *scratch, char *shared) {
    (void)shared;
    const transformer_call *c = call;
    sa_transformer_backward(&c->e, &c->g, &c->plan, c->saved, scratch);
    return SA_OK;
}

/* The gradients of the input rows and of the mask, or None where not wanted. */
static PyObject *make_rows_gradient(transformer_call *c, bool wanted) {
    const npy_intp shape[2] = {c->e.tokens, c->e.d};
    PyObject *rows = wanted ? PyArray_SimpleNew(2, shape, type_of(c)) : Py_NewRef(Py_None);
    c->g.rows = rows == NULL || rows == Py_None ? NULL : PyArray_DATA((PyArrayObject *)rows);
    return rows;
}

static PyObject *make_mask_gradient(transformer_call *c, bool wanted) {
    if (!wanted) {
        return Py_NewRef(Py_None);
    }
    if (c->array[MASK] == NULL || PyArray_TYPE(c->array[MASK]) == NPY_BOOL || PyArray_DIM(c->array[MASK], 0) != 1) {
        return PyErr_Format(PyExc_ValueError, "only a float mask that all sequences share has a gradient");
    }
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        if (c->layer[i].heads != PyArray_DIM(c->array[MASK], 1) || c->layer[i].heads != c->layer[i].key_heads) {
            return PyErr_Format(PyExc_ValueError, "only a mask for each head has a gradient, and without shared key heads");
        }
    }
    const npy_intp shape[3] = {PyArray_DIM(c->array[MASK], 1), c->e.longest, c->e.longest};
    PyObject *mask = PyArray_ZEROS(3, (npy_intp *)(uintptr_t)shape, type_of(c), 0);
    c->g.mask = mask == NULL ? NULL : PyArray_DATA((PyArrayObject *)mask);
    return mask;
}

static PyObject *transformer_backward(PyObject *module, PyObject *args) {
    PyObject *capsule, *grad, *gradients = NULL, *rows = NULL, *mask = NULL, *result = NULL;
    int wants_rows, wants_mask;
    if (!PyArg_ParseTuple(args, "OO!pp:_transformer_backward", &capsule, &PyArray_Type, &grad, &wants_rows, &wants_mask)) {
        return NULL;
    }
    const transformer_call *c = PyCapsule_GetPointer(capsule, capsule_name);
    if (c == NULL) {
        return NULL;
    }
    PyArrayObject *dy = (PyArrayObject *)grad;
    if (!sa_is_plain(grad, type_of(c), 2) || PyArray_DIM(dy, 0) != output_rows(c) || PyArray_DIM(dy, 1) != c->e.d) {
        return PyErr_Format(PyExc_ValueError, "the gradient must be a contiguous, aligned array of %s with shape (%zd, %zd)",
                            type_name(c), output_rows(c), c->e.d);
    }
    /* a copy: pullbacks may run at the same time */
    transformer_call own = *c;
    sa_layer_gradients *of_layer = PyMem_Calloc((size_t)c->e.layers + 1, sizeof *of_layer);
    if (of_layer == NULL) {
        return PyErr_NoMemory();
    }
    own.g = (sa_transformer_gradients){.grad_out = PyArray_DATA(dy), .layer = of_layer};
    const sa_status planned = sa_transformer_plan_backward(&own.e, sa_get_num_threads(), &own.plan);
    gradients = make_gradients(&own, module, of_layer);
    rows = gradients == NULL ? NULL : make_rows_gradient(&own, wants_rows);
    mask = rows == NULL ? NULL : make_mask_gradient(&own, wants_mask);
    if (mask != NULL && run(&own, module, planned, backward) == 0) {
        result = PyTuple_Pack(3, gradients, rows, mask);
    }
    Py_XDECREF(gradients);
    Py_XDECREF(rows);
    Py_XDECREF(mask);
    PyMem_Free(of_layer);
    return result;
}

PyMethodDef sa_transformer_methods[] = {
    {"_pack_ids", pack_ids, METH_VARARGS, "The ids of lists one after the other, and where each list begins."},
    {"_transformer_forward", transformer_forward, METH_VARARGS,
     "The rows of packed sequences, and what the backward pass needs where that is wanted."},
    {"_transformer_backward", transformer_backward, METH_VARARGS,
     "The gradients of all parameters, of the input rows and of the mask, from that of the output."},
    {NULL, NULL, 0, NULL},
};
