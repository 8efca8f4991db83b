/* Search: the vectors that have the largest dot products with each query. */
#include "python/run.h"

#include "drivers/search.h"
#include "runtime/team.h"

static sa_status compute(void *call, char *scratch, char *shared) {
    (void)shared;
    const sa_search *s = call;
    sa_search_run(s, scratch);
    return sa_stops(s->watch) ? SA_CANCELLED : SA_OK;
}

/* Refuses all but contiguous arrays of one of two types, and None if it may be. */
static int check_array(const char *name, PyObject *x, int type, int other, int ndim, const char *types) {
    if (sa_is_plain(x, type, ndim) || sa_is_plain(x, other, ndim) || (ndim == 1 && x == Py_None)) {
        return 0;
    }
    PyObject *dtype = PyArray_Check(x) ? (PyObject *)PyArray_DESCR((PyArrayObject *)x) : (PyObject *)Py_TYPE(x);
    return sa_error(PyExc_TypeError, "%s must be a contiguous %d-D array of %s, got %S%s%s", name, ndim, types, dtype,
                    PyArray_Check(x) ? " of shape " : "", PyArray_Check(x) ? sa_shape_of((PyArrayObject *)x) : "");
}

static int read_search(sa_search *s, PyObject *queries, PyObject *vectors, PyObject *scales, PyObject *keep) {
    if (check_array("queries", queries, NPY_FLOAT, NPY_FLOAT, 2, "float32") < 0 ||
        check_array("vectors", vectors, NPY_FLOAT, NPY_BYTE, 2, "float32 or int8") < 0 ||
        check_array("scales", scales, NPY_FLOAT, NPY_FLOAT, 1, "float32") < 0 ||
        check_array("keep", keep, NPY_BOOL, NPY_UBYTE, 1, "bool or uint8") < 0) {
        return -1;
    }
    const bool bytes = PyArray_TYPE((PyArrayObject *)vectors) == NPY_BYTE;
    const npy_intp n = s->n = sa_dim(vectors, 0),
                   shape[2] = {s->queries = sa_dim(queries, 0), s->d = sa_dim(vectors, 1)};
    if (bytes != (scales != Py_None)) {
        return sa_error(PyExc_TypeError, bytes ? "vectors of int8 need scales" : "vectors of float32 have no scales");
    }
    if (s->k < 0 || (bytes && s->d > SA_SEARCH_COLUMNS)) {
        return sa_error(PyExc_ValueError, "k must be at least 0, got %zd, and int8 have at most %zd columns, got %zd",
                        (Py_ssize_t)s->k, (Py_ssize_t)SA_SEARCH_COLUMNS, (Py_ssize_t)s->d);
    }
    if (sa_check_shape("queries", (PyArrayObject *)queries, 2, shape) < 0 ||
        (bytes && sa_check_shape("scales", (PyArrayObject *)scales, 1, &n) < 0) ||
        (keep != Py_None && sa_check_shape("keep", (PyArrayObject *)keep, 1, &n) < 0)) {
        return -1;
    }
    s->query = sa_data(queries);
    s->vectors = sa_data(vectors);
    s->scales = bytes ? sa_data(scales) : NULL;
    s->keep = keep == Py_None ? NULL : sa_data(keep);
    ptrdiff_t kept = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        kept += s->keep == NULL || s->keep[i] != 0;
    }
    s->k = sa_smaller(s->k, kept);
    return 0;
}

static PyObject *search(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"", "", "", "scales", "keep", NULL};
    PyObject *queries, *vectors, *scales = Py_None, *keep = Py_None, *result = NULL;
    sa_search s = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|$OO:_search", names, &queries, &vectors, &s.k, &scales,
                                     &keep) ||
        read_search(&s, queries, vectors, scales, keep) < 0) {
        return NULL;
    }
    const npy_intp shape[2] = {s.queries, s.k};
    PyObject *scores = PyArray_SimpleNew(2, shape, NPY_FLOAT), *positions = PyArray_SimpleNew(2, shape, NPY_INT64);
    if (scores != NULL && positions != NULL) {
        const double work = (double)s.queries * (double)s.n * (double)(s.d + 1);
        s.scores = sa_data(scores);
        s.positions = sa_data(positions);
        /* The limit of tasks bounds the threads' hits. */
        s.threads = sa_threads_for(work, 1e6, 2 * (double)s.n / (double)s.k, sa_get_num_threads());
        const sa_job job = {SA_OK,   s.threads, sa_search_scratch(&s), 0, work < SA_SMALL_ELEMENTS, &s.watch,
                            compute, &s};
        result = s.queries > 0 && s.k > 0 && sa_run_job(module, &job) < 0 ? NULL : PyTuple_Pack(2, scores, positions);
    }
    Py_XDECREF(scores);
    Py_XDECREF(positions);
    return result;
}

PyMethodDef sa_search_methods[] = {
    {"_search", (PyCFunction)(void (*)(void))search, METH_VARARGS | METH_KEYWORDS,
     "_search(queries, vectors, k, /, *, scales=None, keep=None)\n--\n\n"
     "The k vectors with the largest dot products with each query: scores, which descend, and positions "
     "(queries, k).\n\n"
     "queries (queries, d) are float32; vectors (n, d) too, or int8 with scales (n,): "
     "then a query is rounded to int8 with\n"
     "scale max|query| / 127, and a score is the exact sum as float32 times the product of both scales. "
     "keep (n,) closes\n"
     "vectors. k is at most the number of open ones. Equal scores are in the order of positions, NaN last; "
     "of int8 all\n"
     "scores of a query that is not finite are NaN. Results depend neither on threads nor on other queries. "
     "For Euclidean\n"
     "distance give vectors one more column, -|x|**2 / 2, and queries a 1; Manhattan distance is no product."},
    {NULL, NULL, 0, NULL},
};
