/* The embedding model's passes, for selfattn/nn/embedding_model.py. Ids and offsets are copied, then checked, so
 * that nobody changes them between. A capsule carries what the backward pass needs. */
#include "python/arrays.h"

#include "drivers/transformer.h"
#include "python/run.h"

#define SA_SMALL_WORK 100000.0

/* In order: table, positions, then weight and bias of query, key, value and LayerNorm, block by block. Positions have
 * no gradient. */
#define BLOCK_ARRAYS 8
enum { TABLE, POSITIONS, FIRST_OF_BLOCKS };

#define IN_BLOCK(field) offsetof(sa_embedding_block, field)
static const size_t places[BLOCK_ARRAYS] = {IN_BLOCK(weight[0]), IN_BLOCK(bias[0]), IN_BLOCK(weight[1]),   IN_BLOCK(bias[1]),
                                            IN_BLOCK(weight[2]), IN_BLOCK(bias[2]), IN_BLOCK(norm_weight), IN_BLOCK(norm_bias)};
_Static_assert(IN_BLOCK(bias) == offsetof(sa_embedding_block_gradients, bias) &&
                   IN_BLOCK(norm_weight) == offsetof(sa_embedding_block_gradients, norm_weight) &&
                   IN_BLOCK(norm_bias) == offsetof(sa_embedding_block_gradients, norm_bias),
               "a block and its gradients have their pointers in the same places");

static const char capsule_name[] = "selfattn._embedding_saved";

typedef struct {
    sa_embedding e;
    Py_ssize_t arrays;
    PyArrayObject **array; /* owned */
    sa_embedding_block *block;
    int64_t *numbers; /* ids, offsets: a block */
    void *saved;      /* a block; NULL without a backward pass */
    void *out;
    sa_embedding_gradients g;
    sa_embedding_plan plan;
} embedding_call;

static void release(embedding_call *c) {
    for (Py_ssize_t i = 0; c->array != NULL && i < c->arrays; ++i) {
        Py_XDECREF(c->array[i]);
    }
    PyMem_Free(c->array);
    PyMem_Free(c->block);
    sa_block_give(c->numbers);
    sa_block_give(c->saved);
    PyMem_Free(c);
}

static void release_capsule(PyObject *capsule) { release(PyCapsule_GetPointer(capsule, capsule_name)); }

static int type_of(const embedding_call *c) { return c->e.f64 ? NPY_DOUBLE : NPY_FLOAT; }

/* ---- the parameters ---------------------------------------------------------------------------------------------------- */

/* rows −1: any number; 0: a vector of d elements. */
static int take_array(embedding_call *c, Py_ssize_t i, PyObject *value, npy_intp rows) {
    if (!sa_is_plain(value, type_of(c), -1)) {
        return sa_error(PyExc_TypeError, "parameter %zd must be a contiguous, aligned array of %s as the table is, not %R", i,
                        c->e.f64 ? "float64" : "float32",
                        PyArray_Check(value) ? (PyObject *)PyArray_DESCR((PyArrayObject *)value) : (PyObject *)Py_TYPE(value));
    }
    PyArrayObject *array = (PyArrayObject *)value;
    const int ndim = rows == 0 ? 1 : 2;
    if (PyArray_NDIM(array) != ndim || PyArray_DIM(array, ndim - 1) != c->e.d || (rows > 0 && PyArray_DIM(array, 0) != rows)) {
        return sa_error(PyExc_ValueError, "parameter %zd has the wrong shape for a table with rows of %zd elements", i, c->e.d);
    }
    c->array[i] = (PyArrayObject *)Py_NewRef(value);
    return 0;
}

/* (eight arrays, number of heads, eps) */
static int take_block(embedding_call *c, Py_ssize_t b, PyObject *value) {
    PyObject *parameters = NULL;
    sa_embedding_block *block = &c->block[b];
    if (!PyTuple_Check(value)) {
        return sa_error(PyExc_TypeError, "blocks[%zd] must be a tuple (parameters, num_heads, eps)", b);
    }
    if (!PyArg_ParseTuple(value, "Ond", &parameters, &block->heads, &block->eps)) {
        return -1;
    }
    if (block->heads < 1 || c->e.d % block->heads != 0) {
        return sa_error(PyExc_ValueError, "num_heads must divide the width, %zd; %zd does not", c->e.d, block->heads);
    }
    if (!PyList_Check(parameters) || PyList_GET_SIZE(parameters) != BLOCK_ARRAYS) {
        return sa_error(PyExc_TypeError, "the parameters of blocks[%zd] must be a list of %d arrays", b, BLOCK_ARRAYS);
    }
    for (int i = 0; i < BLOCK_ARRAYS; ++i) {
        const bool is_matrix = i < 2 * SA_PROJECTIONS && i % 2 == 0;
        const Py_ssize_t number = FIRST_OF_BLOCKS + b * BLOCK_ARRAYS + i;
        if (take_array(c, number, PyList_GET_ITEM(parameters, i), is_matrix ? c->e.d : 0) < 0) {
            return -1;
        }
        *(const void **)(void *)((char *)block + places[i]) = PyArray_DATA(c->array[number]);
    }
    c->e.most_heads = block->heads > c->e.most_heads ? block->heads : c->e.most_heads;
    return 0;
}

/* A tuple of blocks, since reading a number may run Python, which could shrink a list. */
static int take_parameters(embedding_call *c, PyObject *table, PyObject *positions, PyObject *blocks) {
    if (!PyArray_Check(table) || PyArray_NDIM((PyArrayObject *)table) != 2 || PyArray_SIZE((PyArrayObject *)table) == 0 ||
        !PyTuple_Check(blocks)) {
        return sa_error(PyExc_TypeError, "table must be an array (vocab_size, d), blocks a tuple");
    }
    c->e.f64 = PyArray_TYPE((PyArrayObject *)table) == NPY_DOUBLE;
    c->e.vocabulary = PyArray_DIM((PyArrayObject *)table, 0);
    c->e.d = PyArray_DIM((PyArrayObject *)table, 1);
    c->e.blocks = PyTuple_GET_SIZE(blocks);
    c->e.most_heads = 1;
    c->arrays = FIRST_OF_BLOCKS + c->e.blocks * BLOCK_ARRAYS;
    c->array = PyMem_Calloc((size_t)c->arrays, sizeof *c->array);
    c->e.block = c->block = PyMem_Calloc((size_t)c->e.blocks + 1, sizeof *c->block);
    if (c->array == NULL || c->block == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_array(c, TABLE, table, -1) < 0 || take_array(c, POSITIONS, positions, -1) < 0) {
        return -1;
    }
    c->e.table = PyArray_DATA(c->array[TABLE]);
    c->e.positions = PyArray_DATA(c->array[POSITIONS]);
    for (Py_ssize_t b = 0; b < c->e.blocks; ++b) {
        if (take_block(c, b, PyTuple_GET_ITEM(blocks, b)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- ids and offsets ----------------------------------------------------------------------------------------------------- */

/* Copied before they are checked. */
static int take_numbers(embedding_call *c, PyObject *module, PyObject *ids, PyObject *starts) {
    PyObject *const given[2] = {ids, starts};
    for (int i = 0; i < 2; ++i) {
        if (!PyArray_Check(given[i]) || !PyArray_EquivTypenums(PyArray_TYPE((PyArrayObject *)given[i]), NPY_INT64) ||
            !sa_is_plain(given[i], PyArray_TYPE((PyArrayObject *)given[i]), 1)) {
            return sa_error(PyExc_TypeError, "%s must be a contiguous 1-D array of int64", i == 0 ? "ids" : "cu_seqlens");
        }
    }
    const npy_intp tokens = PyArray_SIZE((PyArrayObject *)ids), offsets = PyArray_SIZE((PyArrayObject *)starts);
    const npy_intp longest = PyArray_DIM(c->array[POSITIONS], 0);
    c->numbers = sa_block_take(module, (size_t)(tokens + offsets + 1) * sizeof *c->numbers);
    if (c->numbers == NULL) {
        return -1;
    }
    int64_t *own_ids = c->numbers, *own_starts = c->numbers + tokens;
    memcpy(own_ids, PyArray_DATA((PyArrayObject *)ids), (size_t)tokens * sizeof *own_ids);
    memcpy(own_starts, PyArray_DATA((PyArrayObject *)starts), (size_t)offsets * sizeof *own_starts);
    if (offsets < 1 || own_starts[0] != 0 || own_starts[offsets - 1] != tokens) {
        return sa_error(PyExc_ValueError, "cu_seqlens must go from 0 to the number of ids, %zd", tokens);
    }
    for (npy_intp s = 0; s + 1 < offsets; ++s) {
        /* hostile offsets overflow a difference */
        const bool rises = own_starts[s + 1] > own_starts[s] && own_starts[s + 1] <= tokens;
        const int64_t length = rises ? own_starts[s + 1] - own_starts[s] : 0;
        if (length < 1 || length > longest) {
            return sa_error(PyExc_ValueError, "sentence %zd must have 1 to %zd tokens, cu_seqlens goes from %lld to %lld", s,
                            longest, (long long)own_starts[s], (long long)own_starts[s + 1]);
        }
        c->e.longest = length > c->e.longest ? (ptrdiff_t)length : c->e.longest;
    }
    for (npy_intp i = 0; i < tokens; ++i) {
        if (own_ids[i] < 0 || own_ids[i] >= c->e.vocabulary) {
            return sa_error(PyExc_ValueError, "ids must be in 0...%zd, ids[%zd] is %lld", c->e.vocabulary - 1, i,
                            (long long)own_ids[i]);
        }
    }
    c->e.tokens = tokens;
    c->e.sentences = offsets - 1;
    c->e.ids = own_ids;
    c->e.starts = own_starts;
    return 0;
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

/* As if all sentences were the longest. */
static double work_of(const sa_embedding *e) {
    return (double)e->blocks * (double)e->tokens * (double)e->d * (3.0 * (double)e->d + 2.0 * (double)e->longest);
}

static int run(embedding_call *c, PyObject *module, sa_status planned, sa_status (*compute)(void *, char *, char *)) {
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
    const embedding_call *c = call;
    sa_embedding_forward(&c->e, &c->plan, c->out, c->saved, scratch);
    return SA_OK;
}

static PyObject *run_forward(embedding_call *c, PyObject *module, bool keep) {
    const npy_intp shape[2] = {c->e.sentences, c->e.d};
    const sa_status planned = sa_embedding_make_plan(&c->e, keep, sa_get_num_threads(), &c->plan);
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

static PyObject *embedding_forward(PyObject *module, PyObject *args) {
    PyObject *ids, *starts, *table, *positions, *blocks, *out = NULL, *result = NULL;
    int keep;
    if (!PyArg_ParseTuple(args, "OOOOOp:_embedding_forward", &ids, &starts, &table, &positions, &blocks, &keep)) {
        return NULL;
    }
    embedding_call *c = PyMem_Calloc(1, sizeof *c);
    if (c == NULL) {
        return PyErr_NoMemory();
    }
    if (take_parameters(c, table, positions, blocks) == 0 && take_numbers(c, module, ids, starts) == 0) {
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

static size_t gradient_bytes(const embedding_call *c, Py_ssize_t i) {
    return ((size_t)PyArray_NBYTES(c->array[i]) + 63) / 64 * 64;
}

/* In one block, owned by a capsule, their base. */
static PyObject *make_gradients(embedding_call *c, PyObject *module, sa_embedding_block_gradients *of_block) {
    size_t bytes = 0;
    for (Py_ssize_t i = 0; i < c->arrays; ++i) {
        bytes += gradient_bytes(c, i);
    }
    char *data = sa_block_take(module, bytes);
    PyObject *capsule = data == NULL ? NULL : PyCapsule_New(data, NULL, release_gradients);
    if (capsule == NULL) {
        sa_block_give(data);
        return NULL;
    }
    PyObject *gradients = PyList_New(1 + c->e.blocks * BLOCK_ARRAYS);
    for (Py_ssize_t i = 0; gradients != NULL && i < PyList_GET_SIZE(gradients); ++i) {
        const Py_ssize_t of = i == 0 ? TABLE : FIRST_OF_BLOCKS + i - 1;
        PyArrayObject *like = c->array[of];
        PyArray_Descr *descr = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(like));
        PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(like), PyArray_SHAPE(like), NULL, data,
                                               NPY_ARRAY_CARRAY, NULL);
        if (array == NULL || PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(capsule)) < 0) {
            Py_XDECREF(array);
            Py_CLEAR(gradients);
            break;
        }
        PyList_SET_ITEM(gradients, i, array);
        if (i == 0) {
            c->g.table = data;
        } else {
            *(void **)(void *)((char *)&of_block[(i - 1) / BLOCK_ARRAYS] + places[(i - 1) % BLOCK_ARRAYS]) = data;
        }
        data += gradient_bytes(c, of);
    }
    Py_DECREF(capsule);
    return gradients;
}

static sa_status backward(void *call, char *scratch, char *shared) {
    (void)shared;
    const embedding_call *c = call;
    sa_embedding_backward(&c->e, &c->g, &c->plan, c->saved, scratch);
    return SA_OK;
}

static PyObject *embedding_backward(PyObject *module, PyObject *args) {
    PyObject *capsule, *grad;
    if (!PyArg_ParseTuple(args, "OO!:_embedding_backward", &capsule, &PyArray_Type, &grad)) {
        return NULL;
    }
    const embedding_call *c = PyCapsule_GetPointer(capsule, capsule_name);
    if (c == NULL) {
        return NULL;
    }
    PyArrayObject *dy = (PyArrayObject *)grad;
    if (!sa_is_plain(grad, type_of(c), 2) || PyArray_DIM(dy, 0) != c->e.sentences || PyArray_DIM(dy, 1) != c->e.d) {
        return PyErr_Format(PyExc_ValueError, "the gradient must be a contiguous, aligned array of %s with shape (%zd, %zd)",
                            c->e.f64 ? "float64" : "float32", c->e.sentences, c->e.d);
    }
    /* a copy: pullbacks may run at the same time */
    embedding_call own = *c;
    PyObject *gradients = NULL;
    sa_embedding_block_gradients *of_block = PyMem_Calloc((size_t)c->e.blocks + 1, sizeof *of_block);
    if (of_block == NULL) {
        return PyErr_NoMemory();
    }
    own.g = (sa_embedding_gradients){.grad_out = PyArray_DATA(dy), .block = of_block};
    const sa_status planned = sa_embedding_plan_backward(&own.e, sa_get_num_threads(), &own.plan);
    gradients = make_gradients(&own, module, of_block);
    if (gradients != NULL && run(&own, module, planned, backward) < 0) {
        Py_CLEAR(gradients);
    }
    PyMem_Free(of_block);
    return gradients;
}

PyMethodDef sa_embedding_methods[] = {
    {"_pack_ids", pack_ids, METH_VARARGS, "The ids of lists one after the other, and where each list begins."},
    {"_embedding_forward", embedding_forward, METH_VARARGS,
     "The embeddings of packed sentences, and what the backward pass needs where that is wanted."},
    {"_embedding_backward", embedding_backward, METH_VARARGS, "The gradients of all parameters, from that of the embeddings."},
    {NULL, NULL, 0, NULL},
};
