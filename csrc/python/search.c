/* Search: the vectors that have the largest dot products with each query. */
#include "drivers/search.h"

#include "python/run.h"

#define SA_SMALL_WORK 100000.0

typedef struct {
    sa_search s;
    int threads;
} search_call;

static sa_status compute(void *call, char *scratch, char *shared) {
    const search_call *c = call;
    sa_search_run(&c->s, c->threads, scratch, shared);
    return sa_stops(c->s.watch) ? SA_CANCELLED : SA_OK;
}

/* Refuses what is not a contiguous array of a type, or of another type if `other` is not the same. */
static int check_array(const char *name, PyObject *x, int type, int other, int ndim, const char *expected) {
    if (sa_is_plain(x, type, ndim) || sa_is_plain(x, other, ndim)) {
        return 0;
    }
    if (!PyArray_Check(x)) {
        return sa_error(PyExc_TypeError, "%s must be %s, got %s", name, expected, sa_type_name(x));
    }
    PyArrayObject *array = (PyArrayObject *)x;
    return sa_error(PyExc_TypeError, "%s must be %s, got %S of shape %s%s", name, expected, (PyObject *)PyArray_DESCR(array),
                    sa_shape_of(array), PyArray_ISCARRAY_RO(array) ? "" : ", not contiguous");
}

/* Checks arrays that have a number for each vector. */
static int check_length(const char *name, PyObject *x, ptrdiff_t n) {
    return sa_dim(x, 0) == n ? 0
                             : sa_error(PyExc_ValueError, "%s must have a number for each of the %zd vectors, got %zd", name,
                                        (Py_ssize_t)n, (Py_ssize_t)sa_dim(x, 0));
}

static int read_search(sa_search *s, PyObject *queries, PyObject *vectors, PyObject *scales, PyObject *keep) {
    if (check_array("queries", queries, NPY_FLOAT, NPY_FLOAT, 2, "a contiguous 2-D array of float32") < 0 ||
        check_array("vectors", vectors, NPY_FLOAT, NPY_BYTE, 2, "a contiguous 2-D array of float32 or int8") < 0 ||
        (scales != Py_None &&
         check_array("scales", scales, NPY_FLOAT, NPY_FLOAT, 1, "a contiguous 1-D array of float32") < 0) ||
        (keep != Py_None && check_array("keep", keep, NPY_BOOL, NPY_UBYTE, 1, "a contiguous 1-D array of bool or uint8") < 0)) {
        return -1;
    }
    const bool bytes = PyArray_TYPE((PyArrayObject *)vectors) == NPY_BYTE;
    if (bytes != (scales != Py_None)) {
        return sa_error(PyExc_TypeError,
                        bytes ? "vectors of int8 need scales" : "scales are for vectors of int8, not of float32");
    }
    s->queries = sa_dim(queries, 0);
    s->n = sa_dim(vectors, 0);
    s->d = sa_dim(vectors, 1);
    if (sa_dim(queries, 1) != s->d) {
        return sa_shapes_error("queries and vectors must have as many columns", "queries", (PyArrayObject *)queries, "vectors",
                               (PyArrayObject *)vectors);
    }
    if (bytes && s->d > SA_SEARCH_COLUMNS) {
        return sa_error(PyExc_ValueError, "vectors of int8 may have %zd columns, got %zd", (Py_ssize_t)SA_SEARCH_COLUMNS,
                        (Py_ssize_t)s->d);
    }
    s->query = sa_data(queries);
    s->vectors = sa_data(vectors);
    s->scales = bytes ? sa_data(scales) : NULL;
    s->keep = keep == Py_None ? NULL : sa_data(keep);
    return (scales != Py_None && check_length("scales", scales, s->n) < 0) ||
                   (keep != Py_None && check_length("keep", keep, s->n) < 0)
               ? -1
               : 0;
}

static int run(PyObject *module, search_call *c) {
    sa_search *s = &c->s;
    sa_job job = {.planned = SA_TOO_LARGE, .watch = &s->watch, .compute = compute, .call = c};
    if (s->queries == 0 || s->k == 0) {
        return 0;
    }
    if (sa_search_memory(s, &job.scratch_bytes, &job.shared_bytes)) {
        job.planned = SA_OK;
        job.threads = c->threads = sa_search_threads(s, sa_get_num_threads());
        job.small = (double)s->queries * (double)s->n * (double)(s->d + 1) < SA_SMALL_WORK;
    }
    return sa_run_job(module, &job);
}

static PyObject *search(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"", "", "", "scales", "keep", NULL};
    PyObject *queries, *vectors, *scales = Py_None, *keep = Py_None;
    Py_ssize_t k;
    search_call c = {.threads = 1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|$OO:_search", names, &queries, &vectors, &k, &scales, &keep) ||
        read_search(&c.s, queries, vectors, scales, keep) < 0) {
        return NULL;
    }
    if (k < 0) {
        return PyErr_Format(PyExc_ValueError, "k must be at least 0, got %zd", k);
    }
    c.s.k = sa_smaller(k, c.s.keep == NULL ? c.s.n : sa_search_count(c.s.keep, c.s.n));
    const npy_intp shape[2] = {c.s.queries, c.s.k};
    PyObject *scores = PyArray_SimpleNew(2, shape, NPY_FLOAT), *positions = NULL, *result = NULL;
    if (scores != NULL && (positions = PyArray_SimpleNew(2, shape, NPY_INT64)) != NULL) {
        c.s.scores = sa_data(scores);
        c.s.positions = sa_data(positions);
        result = run(module, &c) < 0 ? NULL : PyTuple_Pack(2, scores, positions);
    }
    Py_XDECREF(scores);
    Py_XDECREF(positions);
    return result;
}

PyMethodDef sa_search_methods[] = {
    {"_search", (PyCFunction)(void (*)(void))search, METH_VARARGS | METH_KEYWORDS,
     "_search(queries, vectors, k, *, scales=None, keep=None)\n--\n\n"
     "The k vectors with the largest dot products with each query: scores (queries, min(k, n)), which descend, and "
     "positions.\n\n"
     "queries (queries, d) are float32, vectors (n, d) float32, or int8 with scales (n,). Then a query is rounded to int8 "
     "with\n"
     "the scale max|query|/127, and a score is the exact integer sum as float32 times the product of both scales. keep (n,)\n"
     "closes vectors; n is then the number of those that it leaves open. Equal scores are in the order of positions; NaN come\n"
     "last, and a query that is not finite has only NaN with int8. Results do not depend on the number of threads, nor on the\n"
     "other queries. Other similarities: for Euclidean distance give vectors one more column, -|x|**2/2, and queries a 1;\n"
     "Manhattan distance is no product."},
    {NULL, NULL, 0, NULL},
};
