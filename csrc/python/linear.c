/* Products with weights, for nn.Linear and all layers with projections. */
#include "python/binding.h"

#include "drivers/attention.h"
#include "drivers/linear.h"
#include "python/compact.h"
#include "python/run.h"

#define SA_SMALL_WORK 100000.0

typedef struct {
    sa_linear l;
    sa_linear_gradients g;
    int threads;
} linear_call;

static int take_compact(linear_call *c, PyObject *x, const sa_compact *weight) {
    if (!sa_is_plain(x, NPY_FLOAT, 2) || sa_dim(x, 1) != weight->in) {
        return sa_error(PyExc_TypeError, "x must be a contiguous 2-D array of float32 with %zd columns", weight->in);
    }
    if (sa_compact_check(weight) < 0) {
        return -1;
    }
    c->l = (sa_linear){.weights = weight->kind,
                       .rows = sa_dim(x, 0),
                       .in = weight->in,
                       .count = 1,
                       .out = {weight->out},
                       .weight = {(const char *)weight},
                       .x = sa_data(x)};
    return 0;
}

/* Takes x (rows, in) and weight (out, in), both contiguous and of one type. */
static int take_product(linear_call *c, PyObject *x, PyObject *weight) {
    const int type = PyArray_Check(x) && PyArray_TYPE((PyArrayObject *)x) == NPY_DOUBLE ? NPY_DOUBLE : NPY_FLOAT;
    if (!sa_is_plain(x, type, 2) || !sa_is_plain(weight, type, 2) || sa_dim(x, 1) != sa_dim(weight, 1)) {
        return sa_error(PyExc_TypeError,
                        "x and weight must be contiguous 2-D arrays of float32 or float64, with as many columns");
    }
    c->l = (sa_linear){.f64 = type == NPY_DOUBLE,
                       .rows = sa_dim(x, 0),
                       .in = sa_dim(x, 1),
                       .count = 1,
                       .out = {sa_dim(weight, 0)},
                       .weight = {sa_data(weight)},
                       .x = sa_data(x)};
    return 0;
}

static int type_of(const linear_call *c) { return c->l.f64 ? NPY_DOUBLE : NPY_FLOAT; }

static int run(linear_call *c, PyObject *module, double products, bool backward,
               sa_status (*compute)(void *, char *, char *)) {
    size_t bytes; /* an empty array may have any width */
    const bool fits = c->l.in <= SA_MAX_WIDTH && c->l.out[0] <= SA_MAX_WIDTH &&
                      sa_multiply((size_t)c->l.rows + 1, (size_t)(c->l.in + c->l.out[0] + 1) * 64, &bytes) &&
                      bytes < PTRDIFF_MAX / 64;
    c->threads = sa_linear_threads(&c->l, products, sa_get_num_threads());
    const double work = (double)c->l.rows * (double)c->l.in * (double)c->l.out[0];
    return sa_run_job(module, &(sa_job){.planned = fits ? SA_OK : SA_TOO_LARGE,
                                        .threads = c->threads,
                                        .scratch_bytes = sa_linear_scratch(&c->l, c->threads, false, backward),
                                        .small = work < SA_SMALL_WORK,
                                        .watch = &c->l.watch,
                                        .compute = compute,
                                        .call = c});
}

static sa_status forward(void *call, char *scratch, char *shared) {
    (void)shared;
    const linear_call *c = call;
    sa_linear_forward(&c->l, c->threads, scratch);
    return sa_stops(c->l.watch) ? SA_CANCELLED : SA_OK;
}

static PyObject *linear_forward(PyObject *module, PyObject *args) {
    PyObject *x, *weight, *bias;
    linear_call c = {.threads = 1};
    int decoding = 0, digits = 0;
    if (!PyArg_ParseTuple(args, "OOO|pi:_linear_forward", &x, &weight, &bias, &decoding, &digits)) {
        return NULL;
    }
    const sa_compact *compact = sa_compact_of(weight);
    if (compact != NULL ? take_compact(&c, x, compact) < 0 : take_product(&c, x, weight) < 0) {
        return NULL;
    }
    c.l.decoding = decoding;
    c.l.digits = digits;
    if (digits < 0 || digits > SA_DIGITS) {
        return PyErr_Format(PyExc_ValueError, "digits must be 0 to %d, not %d", SA_DIGITS, digits);
    }
    if (bias != Py_None) {
        if (!sa_is_plain(bias, type_of(&c), 1) || sa_dim(bias, 0) != c.l.out[0]) {
            return PyErr_Format(PyExc_TypeError, "bias must be a contiguous array of the type of weight, and as long");
        }
        c.l.bias[0] = sa_data(bias);
    }
    const npy_intp shape[2] = {c.l.rows, c.l.out[0]};
    PyObject *y = PyArray_SimpleNew(2, shape, type_of(&c));
    if (y == NULL) {
        return NULL;
    }
    c.l.y[0] = sa_data(y);
    if (run(&c, module, 1, false, forward) < 0) {
        Py_CLEAR(y);
    }
    return y;
}

static sa_status backward(void *call, char *scratch, char *shared) {
    (void)shared;
    linear_call *c = call;
    c->g.l = &c->l;
    sa_linear_backward(&c->g, c->threads, scratch);
    return sa_stops(c->l.watch) ? SA_CANCELLED : SA_OK;
}

static PyObject *linear_backward(PyObject *module, PyObject *args) {
    PyObject *dy, *x, *weight;
    int with_bias = 1;
    linear_call c = {.threads = 1};
    if (!PyArg_ParseTuple(args, "OOO|p:_linear_backward", &dy, &x, &weight, &with_bias) ||
        take_product(&c, x, weight) < 0) {
        return NULL;
    }
    if (!sa_is_plain(dy, type_of(&c), 2) || sa_dim(dy, 0) != c.l.rows || sa_dim(dy, 1) != c.l.out[0]) {
        return PyErr_Format(PyExc_TypeError,
                            "dy must be a contiguous array of the type of x, with a row for each row of x");
    }
    const npy_intp in[2] = {c.l.rows, c.l.in}, out[2] = {c.l.out[0], c.l.in};
    PyObject *dx = PyArray_SimpleNew(2, in, type_of(&c)), *dweight = PyArray_SimpleNew(2, out, type_of(&c));
    PyObject *dbias = with_bias ? PyArray_SimpleNew(1, out, type_of(&c)) : NULL, *result = NULL;
    if (dx != NULL && dweight != NULL && (dbias != NULL || !with_bias)) {
        c.g.dy[0] = sa_data(dy);
        c.g.dx = sa_data(dx);
        c.g.dweight[0] = sa_data(dweight);
        if (with_bias) {
            c.g.dbias[0] = sa_data(dbias);
            c.l.bias[0] = c.g.dbias[0]; /* never read; not NULL, as there is a bias */
        }
        result = run(&c, module, 2, true, backward) < 0 ? NULL : PyTuple_Pack(with_bias ? 3 : 2, dx, dweight, dbias);
    }
    Py_XDECREF(dx);
    Py_XDECREF(dweight);
    Py_XDECREF(dbias);
    return result;
}

PyMethodDef sa_linear_methods[] = {
    {"_linear_forward", linear_forward, METH_VARARGS,
     "x·weightᵀ + bias, or without a bias (None); of quants True says that these are rows of decoding; "
     "others are split into digits, 0 to 3, of which 0 expands the quants."},
    {"_linear_backward", linear_backward, METH_VARARGS,
     "The gradients of x, weight and, unless the fourth argument is False, bias, from that of the product."},
    {NULL, NULL, 0, NULL},
};
