/* Sums over triplets of embeddings for selfattn/nn/proxy_task.py, in float64. For main, similar, other = y (3, n, d):
 *
 *     confidence = log σ(near) + log σ(−far),  near = main·similar,  far = main·other
 *
 * Keeps the GIL: the work is small next to the model's. */
#include "python/binding.h"

#include <math.h>

/* log σ(x), finite for every finite x. */
static double log_sigmoid(double x) { return (x < 0 ? x : 0) - log1p(exp(-fabs(x))); }

static double sigmoid(double x) {
    const double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

/* For rows of each type: a dot product, in four independent sums;
 * the products main·similar and main·other of triplet i; and
 *
 *     dmain = dnear·similar + dfar·other,  dsimilar = dnear·main,  dother = dfar·main */
#define FUNCTIONS_OF(type)                                                                                             \
    static double dot_product_of_##type(const type *a, const type *b, npy_intp n) {                                    \
        double sum[4] = {0};                                                                                           \
        npy_intp i = 0;                                                                                                \
        for (; i + 4 <= n; i += 4) {                                                                                   \
            for (int k = 0; k < 4; ++k) {                                                                              \
                sum[k] += (double)a[i + k] * (double)b[i + k];                                                         \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < n; ++i) {                                                                                           \
            sum[0] += (double)a[i] * (double)b[i];                                                                     \
        }                                                                                                              \
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);                                                                  \
    }                                                                                                                  \
    static void products_of_##type(const void *y, npy_intp n, npy_intp d, npy_intp i, double product[2]) {             \
        const type *main = (const type *)y + i * d;                                                                    \
        product[0] = dot_product_of_##type(main, main + n * d, d);                                                     \
        product[1] = dot_product_of_##type(main, main + 2 * n * d, d);                                                 \
    }                                                                                                                  \
    static void gradients_of_##type(const void *y, const void *products, npy_intp n, npy_intp d, void *dy) {           \
        for (npy_intp i = 0; i < n; ++i) {                                                                             \
            const type near = ((const type *)products)[i], far = ((const type *)products)[n + i];                      \
            const type *main = (const type *)y + i * d, *similar = main + n * d, *other = similar + n * d;             \
            type *dmain = (type *)dy + i * d, *dsimilar = dmain + n * d, *dother = dsimilar + n * d;                   \
            for (npy_intp k = 0; k < d; ++k) {                                                                         \
                dmain[k] = near * similar[k] + far * other[k];                                                         \
                dsimilar[k] = near * main[k];                                                                          \
                dother[k] = far * main[k];                                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }
FUNCTIONS_OF(float)
FUNCTIONS_OF(double)

/* Returns a borrowed reference. */
static PyArrayObject *as_triplets(PyObject *value) {
    if ((!sa_is_plain(value, NPY_FLOAT, 3) && !sa_is_plain(value, NPY_DOUBLE, 3)) || sa_dim(value, 0) != 3) {
        sa_error(PyExc_TypeError, "y must be a contiguous, aligned array (3, n, d) of float32 or float64");
        return NULL;
    }
    return (PyArrayObject *)value;
}

static void put(PyArrayObject *array, npy_intp i, double x) {
    if (PyArray_TYPE(array) == NPY_DOUBLE) {
        ((double *)PyArray_DATA(array))[i] = x;
    } else {
        ((float *)PyArray_DATA(array))[i] = (float)x;
    }
}

static PyObject *proxy_confidences(PyObject *module, PyObject *value) {
    (void)module;
    PyArrayObject *y = as_triplets(value);
    if (y == NULL) {
        return NULL;
    }
    npy_intp shape[2] = {2, PyArray_DIM(y, 1)};
    const npy_intp n = shape[1], d = PyArray_DIM(y, 2);
    PyObject *confidences = PyArray_SimpleNew(1, shape + 1, PyArray_TYPE(y)), *result = NULL;
    PyObject *slopes = PyArray_SimpleNew(2, shape, PyArray_TYPE(y));
    if (confidences == NULL || slopes == NULL) {
        goto done;
    }
    for (npy_intp i = 0; i < n; ++i) {
        double product[2];
        (PyArray_TYPE(y) == NPY_DOUBLE ? products_of_double : products_of_float)(PyArray_DATA(y), n, d, i, product);
        put((PyArrayObject *)confidences, i, log_sigmoid(product[0]) + log_sigmoid(-product[1]));
        put((PyArrayObject *)slopes, i, sigmoid(-product[0]));
        put((PyArrayObject *)slopes, n + i, -sigmoid(product[1]));
    }
    result = PyTuple_Pack(2, confidences, slopes);
done:
    Py_XDECREF(confidences);
    Py_XDECREF(slopes);
    return result;
}

static PyObject *proxy_gradients(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *value, *given;
    if (!PyArg_ParseTuple(args, "OO!:_proxy_gradients", &value, &PyArray_Type, &given)) {
        return NULL;
    }
    PyArrayObject *y = as_triplets(value), *products = (PyArrayObject *)given;
    if (y == NULL) {
        return NULL;
    }
    if (!sa_is_plain(given, PyArray_TYPE(y), 2) || PyArray_DIM(products, 0) != 2 ||
        PyArray_DIM(products, 1) != PyArray_DIM(y, 1)) {
        sa_error(PyExc_TypeError, "the gradients must be a contiguous, aligned array (2, n) of y's dtype");
        return NULL;
    }
    PyObject *dy = PyArray_SimpleNew(3, PyArray_DIMS(y), PyArray_TYPE(y));
    if (dy == NULL) {
        return NULL;
    }
    (PyArray_TYPE(y) == NPY_DOUBLE ? gradients_of_double : gradients_of_float)(
        PyArray_DATA(y), PyArray_DATA(products), PyArray_DIM(y, 1), PyArray_DIM(y, 2), sa_data(dy));
    return dy;
}

PyMethodDef sa_proxy_methods[] = {
    {"_proxy_confidences", proxy_confidences, METH_O,
     "The confidences of triplets of embeddings (n,), and their derivatives in near and far (2, n)."},
    {"_proxy_gradients", proxy_gradients, METH_VARARGS, "The gradients of triplets of embeddings."},
    {NULL, NULL, 0, NULL},
};
