/* Arrays from Python as the core's tensors. */
#ifndef SA_PYTHON_ARRAYS_H
#define SA_PYTHON_ARRAYS_H

#include "python/state.h"

static inline bool sa_is_integer(sa_dtype dtype) { return dtype >= SA_I8 && dtype < SA_DTYPES; }

/* What an argument takes. SA_NUMBERS and SA_MASK let integers pass, which callers refuse where they must. SA_ANY may
 * give SA_DTYPES. */
typedef enum { SA_ANY, SA_NUMBERS, SA_FLOATS, SA_INTEGERS, SA_MASK } sa_kind;

/* x or a conversion of it, and its dtype. Refuses masked arrays and matrices. */
PyArrayObject *sa_as_array(const sa_state *state, PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype);

/* Whether the core can read x in place. ndim −1: any. */
static inline bool sa_is_plain(PyObject *x, int type, int ndim) {
    return PyArray_Check(x) && PyArray_TYPE((PyArrayObject *)x) == type && PyArray_ISCARRAY_RO((PyArrayObject *)x) &&
           (ndim < 0 || PyArray_NDIM((PyArrayObject *)x) == ndim);
}

/* Element i as the caller gave it, for messages: the copy as int64 may show another sign. */
PyObject *sa_element(PyObject *x, npy_intp i);

/* The dtype of results. */
sa_dtype sa_promote(sa_dtype a, sa_dtype b);

/* C-contiguous. SA_BF16 needs like_bf16, any bfloat16 array. */
PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros);

/* The last `core` (0, 1 or 2) axes become (rows, cols). Axes of length 1 get stride 0. */
void sa_fill_tensor(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, int n_lead, int core);

/* As float64 or int64, aligned and native. Integers are copied, so that nobody changes them after the check. */
PyArrayObject *sa_as_small(const sa_state *state, PyObject *x, const char *name, bool integers);

/* Refuses overlap, or strides too intricate to tell. */
int sa_check_overlap(const sa_state *state, PyArrayObject *out, PyArrayObject *array, const char *name);
int sa_check_self_overlap(PyArrayObject *out);

/* For messages; lives as long as the caller's block. */
#define sa_shape_text(ndim, shape) sa_print_shape((char[SA_SHAPE_CHARS]){0}, ndim, shape)
#define sa_shape_of(array) sa_shape_text(PyArray_NDIM(array), PyArray_SHAPE(array))
#define SA_SHAPE_CHARS (24 * (NPY_MAXDIMS + 2))
const char *sa_print_shape(char *text, int ndim, const npy_intp *shape);

/* Ends the message with both shapes. */
int sa_shapes_error(const char *message, const char *name, PyArrayObject *array, const char *other_name, PyArrayObject *other);

int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape);

const char *sa_dtype_name(sa_dtype dtype);

#endif
