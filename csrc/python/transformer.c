/* The transformer's inputs and passes, for selfattn/engine/transformer.py. A capsule carries what the backward pass
 * needs. */
#include "python/transformer_call.h"

#include "python/run.h"

#define SA_SMALL_WORK 100000.0

static const char capsule_name[] = "selfattn._transformer_saved";

static void release_capsule(PyObject *capsule) { sa_transformer_release(PyCapsule_GetPointer(capsule, capsule_name)); }

/* ---- lists of ids ------------------------------------------------------------------------------------------------ */

/* True if all n elements are ids, and no other thread has made the list shorter. The caller holds the list's lock. */
static bool copy_locked(PyObject *list, npy_intp n, Py_ssize_t vocabulary, int64_t *to) {
    if (PyList_GET_SIZE(list) < n) {
        return false;
    }
    for (npy_intp i = 0; i < n; ++i) {
        PyObject *id = PyList_GET_ITEM(list, i);
        int overflow = 0;
        to[i] = PyLong_CheckExact(id) ? (int64_t)PyLong_AsLongLongAndOverflow(id, &overflow) : -1;
        if (overflow != 0 || to[i] < 0 || to[i] >= vocabulary) {
            return false;
        }
    }
    return true;
}

static bool copy_ids(PyObject *list, npy_intp n, Py_ssize_t vocabulary, int64_t *to) {
    bool are_ids;
    Py_BEGIN_CRITICAL_SECTION(list);
    are_ids = copy_locked(list, n, vocabulary, to);
    Py_END_CRITICAL_SECTION();
    return are_ids;
}

/* Writes where each list of a tuple begins, and the end, which it returns; −1 if one is empty or is no list. */
static npy_intp count_ids(PyObject *lists, int64_t *starts) {
    starts[0] = 0;
    for (Py_ssize_t s = 0; s < PyTuple_GET_SIZE(lists); ++s) {
        PyObject *list = PyTuple_GET_ITEM(lists, s);
        const Py_ssize_t n = PyList_CheckExact(list) ? PyList_Size(list) : 0;
        if (n == 0) {
            return -1;
        }
        starts[s + 1] = starts[s] + n;
    }
    return (npy_intp)starts[PyTuple_GET_SIZE(lists)];
}

/* Returns None if a list is empty or has an element that is no id; the caller finds out which. */
static PyObject *pack_ids(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *ids = NULL, *result = NULL;
    Py_ssize_t vocabulary;
    if (!PyArg_ParseTuple(args, "O!n:_pack_ids", &PyList_Type, &given, &vocabulary)) {
        return NULL;
    }
    PyObject *lists = PyList_AsTuple(given); /* a copy, as another thread might change the list */
    const npy_intp offsets = lists == NULL ? 0 : PyTuple_GET_SIZE(lists) + 1;
    PyObject *starts = lists == NULL ? NULL : PyArray_SimpleNew(1, &offsets, NPY_INT64);
    if (starts == NULL) {
        goto done;
    }
    int64_t *start = sa_data(starts);
    const npy_intp tokens = count_ids(lists, start);
    if (tokens < 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if ((ids = PyArray_SimpleNew(1, &tokens, NPY_INT64)) == NULL) {
        goto done;
    }
    int64_t *to = sa_data(ids);
    for (npy_intp s = 0; s + 1 < offsets; ++s) {
        if (!copy_ids(PyTuple_GET_ITEM(lists, s), (npy_intp)(start[s + 1] - start[s]), vocabulary, to + start[s])) {
            result = Py_NewRef(Py_None);
            goto done;
        }
    }
    result = PyTuple_Pack(2, ids, starts);
done:
    Py_XDECREF(lists);
    Py_XDECREF(ids);
    Py_XDECREF(starts);
    return result;
}

/* ---- inputs: ids or rows, offsets, the cache; numbers are copied and then checked, as others might change them --- */

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

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Counts multiply-adds as if all sequences were as long as the longest. */
static double work_of(const sa_transformer *e) {
    double each = 0;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        const double heads = (double)(l->heads * l->width);
        each += (double)e->d * (3 * heads + 3 * (double)l->hidden) + 2 * (double)e->longest * heads;
    }
    return (double)e->tokens * each;
}

static int run(sa_transformer_call *c, PyObject *module, sa_status planned,
               sa_status (*compute)(void *, char *, char *)) {
    c->e.watch = NULL;
    const int done = sa_run_job(module, &(sa_job){.planned = planned,
                                                  .threads = c->plan.threads,
                                                  .scratch_bytes = c->plan.scratch_bytes,
                                                  .shared_bytes = c->plan.shared_bytes,
                                                  .small = work_of(&c->e) < SA_SMALL_WORK,
                                                  .watch = &c->e.watch,
                                                  .compute = compute,
                                                  .call = c});
    c->e.watch = NULL; /* the watch belonged to that call */
    return done;
}

static sa_status status_of(const sa_transformer_call *c) { return sa_stops(c->e.watch) ? SA_CANCELLED : SA_OK; }

static sa_status forward(void *call, char *scratch, char *shared) {
    (void)shared; /* the driver lays out the whole piece itself, shared memory first (drivers/transformer.h) */
    const sa_transformer_call *c = call;
    sa_transformer_forward(&c->e, &c->plan, c->out, c->saved, scratch);
    return status_of(c);
}

static npy_intp output_rows(const sa_transformer_call *c) {
    return c->e.pooling == SA_EACH_ROW ? c->e.tokens : c->e.sequences;
}

static PyObject *run_forward(sa_transformer_call *c, PyObject *module, bool keep) {
    const npy_intp shape[2] = {output_rows(c), c->e.d};
    const sa_status planned = sa_transformer_make_plan(&c->e, keep, sa_get_num_threads(), &c->plan);
    if (planned == SA_OK && keep && (c->saved = sa_arena_take(module, c->plan.saved_bytes)) == NULL) {
        return NULL;
    }
    PyObject *result = PyArray_SimpleNew(2, shape, sa_transformer_type(c));
    if (result == NULL) {
        return NULL;
    }
    c->out = sa_data(result);
    if (run(c, module, planned, forward) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Refuses rounded weights, which have no gradients. */
static int check_whole(const sa_transformer_call *c) {
    bool whole = c->e.table_kind == SA_WEIGHTS_WHOLE;
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        whole = whole && c->layer[i].weights == SA_WEIGHTS_WHOLE;
    }
    return whole ? 0 : sa_error(PyExc_ValueError, "weights of less than 32 bits have no gradients");
}

static PyObject *transformer_forward(PyObject *module, PyObject *args) {
    PyObject *model, *inputs, *starts, *call, *cache = Py_None, *out = NULL, *result = NULL;
    int keep, prompt = 0;
    if (!PyArg_ParseTuple(args, "OOOOp|Op:_transformer_forward", &model, &inputs, &starts, &call, &keep, &cache,
                          &prompt)) {
        return NULL;
    }
    if (keep && cache != Py_None) {
        return PyErr_Format(PyExc_ValueError, "a call with a cache has no gradients");
    }
    sa_transformer_call *c = PyMem_Calloc(1, sizeof *c);
    if (c == NULL) {
        return PyErr_NoMemory();
    }
    c->e.cache.prompt = prompt;
    if (sa_transformer_read_model(c, module, model, call) == 0 && take_inputs(c, module, inputs, starts, cache) == 0 &&
        (!keep || check_whole(c) == 0)) {
        out = run_forward(c, module, keep);
    }
    PyObject *capsule = out && keep ? PyCapsule_New(c, capsule_name, release_capsule) : NULL;
    if (capsule == NULL) {
        sa_transformer_release(c);
    }
    if (!keep) {
        return out;
    }
    result = capsule ? PyTuple_Pack(2, out, capsule) : NULL;
    Py_XDECREF(out);
    Py_XDECREF(capsule);
    return result;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static void release_gradients(PyObject *capsule) { sa_arena_give(PyCapsule_GetPointer(capsule, NULL)); }

static size_t gradient_bytes(const sa_trained *parameter) {
    return ((size_t)PyArray_NBYTES(parameter->array) + 63) / 64 * 64;
}

/* If query's array also has key and value, which have no arrays of their own, so does its gradient. */
static void point_into_query(const sa_transformer_call *c, sa_layer_gradients *of_layer) {
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->e.f64);
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        const sa_layer *l = &c->layer[i];
        sa_layer_gradients *g = &of_layer[i];
        const bool together = g->weight[SA_KEY] == NULL;
        for (int which = SA_KEY; together && which <= SA_VALUE; ++which) {
            const ptrdiff_t row = (l->heads + (which == SA_VALUE ? l->key_heads : 0)) * l->width;
            g->weight[which] = (char *)g->weight[SA_QUERY] + row * c->e.d * size;
            g->bias[which] = g->bias[SA_QUERY] == NULL ? NULL : (char *)g->bias[SA_QUERY] + row * size;
        }
    }
}

/* Makes the gradients in one piece of memory. A capsule owns it, and is their base. */
static PyObject *make_gradients(sa_transformer_call *c, PyObject *module, sa_layer_gradients *of_layer) {
    size_t bytes = 0;
    for (Py_ssize_t i = 0; i < c->parameter_count; ++i) {
        bytes += gradient_bytes(&c->parameters[i]);
    }
    char *data = sa_arena_take(module, bytes);
    PyObject *capsule = data == NULL ? NULL : PyCapsule_New(data, NULL, release_gradients);
    if (capsule == NULL) {
        sa_arena_give(data);
        return NULL;
    }
    PyObject *gradients = PyList_New(c->parameter_count);
    for (Py_ssize_t i = 0; gradients != NULL && i < c->parameter_count; ++i) {
        const sa_trained *parameter = &c->parameters[i];
        PyArray_Descr *descr = (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(parameter->array));
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(parameter->array),
                                               PyArray_SHAPE(parameter->array), NULL, data, NPY_ARRAY_CARRAY, NULL);
        if (array == NULL || PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(capsule)) < 0) {
            Py_XDECREF(array);
            Py_CLEAR(gradients);
            break;
        }
        PyList_SET_ITEM(gradients, i, array);
        char *places = parameter->layer < 0 ? (char *)&c->g : (char *)&of_layer[parameter->layer];
        *(void **)(void *)(places + parameter->to) = data;
        data += gradient_bytes(parameter);
    }
    if (gradients != NULL) {
        point_into_query(c, of_layer);
    }
    Py_DECREF(capsule);
    return gradients;
}

static sa_status backward(void *call, char *scratch, char *shared) {
    (void)shared;
    const sa_transformer_call *c = call;
    sa_transformer_backward(&c->e, &c->g, &c->plan, c->saved, scratch);
    return status_of(c);
}

/* Makes the gradients of the input rows and of the mask, or None if they are not wanted. */
static PyObject *make_rows_gradient(sa_transformer_call *c, bool wanted) {
    const npy_intp shape[2] = {c->e.tokens, c->e.d};
    PyObject *rows = wanted ? PyArray_SimpleNew(2, shape, sa_transformer_type(c)) : Py_NewRef(Py_None);
    c->g.rows = rows == NULL || rows == Py_None ? NULL : sa_data(rows);
    return rows;
}

static PyObject *make_mask_gradient(sa_transformer_call *c, bool wanted) {
    if (!wanted) {
        return Py_NewRef(Py_None);
    }
    if (c->mask == NULL || PyArray_TYPE(c->mask) == NPY_BOOL || PyArray_DIM(c->mask, 0) != 1) {
        return PyErr_Format(PyExc_ValueError, "only a float mask that all sequences share has a gradient");
    }
    for (Py_ssize_t i = 0; i < c->e.layers; ++i) {
        if (c->layer[i].heads != PyArray_DIM(c->mask, 1) || c->layer[i].heads != c->layer[i].key_heads) {
            return PyErr_Format(PyExc_ValueError,
                                "only a mask for each head has a gradient, and without shared key heads");
        }
    }
    const npy_intp shape[3] = {PyArray_DIM(c->mask, 1), c->e.longest, c->e.longest};
    PyObject *mask = PyArray_ZEROS(3, (npy_intp *)(uintptr_t)shape, sa_transformer_type(c), 0);
    c->g.mask = mask == NULL ? NULL : sa_data(mask);
    return mask;
}

static PyObject *transformer_backward(PyObject *module, PyObject *args) {
    PyObject *capsule, *grad, *gradients = NULL, *rows = NULL, *mask = NULL, *result = NULL;
    int wants_rows, wants_mask, wants_parameters = 1;
    if (!PyArg_ParseTuple(args, "OO!pp|p:_transformer_backward", &capsule, &PyArray_Type, &grad, &wants_rows,
                          &wants_mask, &wants_parameters)) {
        return NULL;
    }
    const sa_transformer_call *c = PyCapsule_GetPointer(capsule, capsule_name);
    if (c == NULL) {
        return NULL;
    }
    PyArrayObject *dy = (PyArrayObject *)grad;
    if (!sa_is_plain(grad, sa_transformer_type(c), 2) || PyArray_DIM(dy, 0) != output_rows(c) ||
        PyArray_DIM(dy, 1) != c->e.d) {
        return PyErr_Format(PyExc_ValueError,
                            "the gradient must be a contiguous, aligned array of %s with shape (%zd, %zd)",
                            sa_transformer_type_name(c), output_rows(c), c->e.d);
    }
    /* a copy, as pullbacks may run at the same time */
    sa_transformer_call own = *c;
    sa_layer_gradients *of_layer = PyMem_Calloc((size_t)c->e.layers + 1, sizeof *of_layer);
    if (of_layer == NULL) {
        return PyErr_NoMemory();
    }
    own.g = (sa_transformer_gradients){.grad_out = PyArray_DATA(dy), .layer = of_layer};
    const sa_status planned = sa_transformer_plan_backward(&own.e, sa_get_num_threads(), &own.plan);
    gradients = wants_parameters ? make_gradients(&own, module, of_layer) : PyList_New(0);
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
     "The rows of packed sequences, and if wanted what the backward pass needs."},
    {"_transformer_backward", transformer_backward, METH_VARARGS,
     "The gradients of all parameters, of the input rows and of the mask, those that are wanted, "
     "from that of the output."},
    {NULL, NULL, 0, NULL},
};
