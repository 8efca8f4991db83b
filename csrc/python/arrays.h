/* From Python objects to the core's tensors: which arrays are taken, their dtypes, their strides. */
#ifndef SA_PYTHON_ARRAYS_H
#define SA_PYTHON_ARRAYS_H

#include "python/module.h"

static inline bool sa_is_integer(sa_dtype dtype) { return dtype >= SA_I8 && dtype < SA_DTYPES; }

/* What an argument takes. Integers in place of floats or masks, and all of SA_ANY, are the caller's to refuse; the dtype of
 * SA_ANY may be SA_DTYPES. */
typedef enum { SA_ANY, SA_NUMBERS, SA_FLOATS, SA_INTEGERS, SA_MASK } sa_kind;

/* x as an array, a new reference, and its dtype. Lists and objects with the array protocol are converted; MaskedArray, matrix,
 * and dtypes without a place here are TypeErrors. */
PyArrayObject *sa_as_array(const sa_state *state, PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype);

/* Whether x is an array of this NumPy type and number of axes (−1: any) that the core reads as it lies in memory. */
static inline bool sa_is_plain(PyObject *x, int type, int ndim) {
    return PyArray_Check(x) && PyArray_TYPE((PyArrayObject *)x) == type && PyArray_ISCARRAY_RO((PyArrayObject *)x) &&
           (ndim < 0 || PyArray_NDIM((PyArrayObject *)x) == ndim);
}

/* Element number i of what the caller gave, for messages: as int64 it may have another sign. */
PyObject *sa_element(PyObject *x, npy_intp i);

/* What arrays of these dtypes compute and come out as: integers count as float64; float16 with bfloat16 gives float32. */
sa_dtype sa_promote(sa_dtype a, sa_dtype b);

/* A new C-contiguous array. like_bf16: any bfloat16 array, needed when dtype is SA_BF16. */
PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros);

/* The array as the core sees it: its last `core` (0, 1 or 2) axes are (rows, cols), those before broadcast to n_lead dims. Axes
 * of length 1 get stride 0. */
void sa_fill_tensor(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, int n_lead, int core);

/* The strides of a new array of float32 or float64, which need not exist: no data. */
void sa_fill_new(sa_tensor *t, const npy_intp *shape, int ndim, sa_dtype dtype, int n_lead, int core);

/* x as float64 or int64, aligned and native, a new reference. Integers are a copy, which nobody can change after they have been
 * checked. */
PyArrayObject *sa_as_small(const sa_state *state, PyObject *x, const char *name, bool integers);

/* −1 with a ValueError if out shares memory with the array, or if that cannot be told. */
int sa_check_overlap(const sa_state *state, PyArrayObject *out, PyArrayObject *array, const char *name);
/* −1 with a ValueError if two elements of out share memory. */
int sa_check_self_overlap(PyArrayObject *out);

/* For messages: a shape as Python prints it, in memory of the block that asks for it. */
#define sa_shape_text(ndim, shape) sa_print_shape((char[SA_SHAPE_CHARS]){0}, ndim, shape)
#define sa_shape_of(array) sa_shape_text(PyArray_NDIM(array), PyArray_SHAPE(array))
#define SA_SHAPE_CHARS (24 * (NPY_MAXDIMS + 2))
const char *sa_print_shape(char *text, int ndim, const npy_intp *shape);

/* −1 with a ValueError that has the shapes of two arrays at its end. */
int sa_shapes_error(const char *message, const char *name, PyArrayObject *array, const char *other_name, PyArrayObject *other);

/* −1 with a ValueError unless the array has this shape. */
int sa_check_shape(const char *name, PyArrayObject *array, int ndim, const npy_intp *shape);

const char *sa_dtype_name(sa_dtype dtype);

#endif
