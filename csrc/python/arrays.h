/* From Python objects to the core's tensors: which arrays are taken, their dtypes, their strides. */
#ifndef SA_PYTHON_ARRAYS_H
#define SA_PYTHON_ARRAYS_H

#include "python/module.h"

static inline bool sa_is_integer(sa_dtype dtype) { return dtype >= SA_I8 && dtype < SA_DTYPES; }

/* What an argument takes. Masks and floats of an integer dtype are left to the caller, who says more about them; so is all of
 * SA_ANY, whose dtype may come out as SA_DTYPES. */
typedef enum { SA_ANY, SA_NUMBERS, SA_FLOATS, SA_INTEGERS, SA_MASK } sa_kind;

/* x as an array and its dtype: a new reference, or NULL with an exception that names the argument. Lists and objects with
 * the array protocol are converted; MaskedArray, matrix, complex, object and longdouble arrays are TypeErrors. */
PyArrayObject *sa_as_array(const sa_state *state, PyObject *x, const char *name, sa_kind kind, sa_dtype *dtype);

/* Element number i of what the caller gave, for messages: as int64, numbers from 2^63 on are negative. */
PyObject *sa_element(PyObject *x, npy_intp i);

/* What arrays of these dtypes compute and come out as: integers count as float64; float16 with bfloat16 gives float32. */
sa_dtype sa_promote(sa_dtype a, sa_dtype b);

/* A new C-contiguous array. like_bf16: any bfloat16 array, needed when dtype is SA_BF16. */
PyArrayObject *sa_new_array(int ndim, const npy_intp *shape, sa_dtype dtype, PyArrayObject *like_bf16, bool zeros);

/* t as the core sees the array: the last core (0, 1 or 2) axes are (rows, cols), the ones before are leading and have been
 * checked to broadcast to n_lead dims. Axes of length 1 get stride 0, but for the two core ones, which keep a usable one. */
void sa_fill_tensor(sa_tensor *t, PyArrayObject *array, sa_dtype dtype, int n_lead, int core);

/* The same of a new array of this shape, float32 or float64, that there need not be: no data. */
void sa_fill_new(sa_tensor *t, const npy_intp *shape, int ndim, sa_dtype dtype, int n_lead, int core);

/* The array as float64 (or int64), aligned and native, for small per-head arguments: a new reference. Integers are a copy: they are
 * checked, and nobody may change them before they are used. */
PyArrayObject *sa_as_small(const sa_state *state, PyObject *x, const char *name, bool integers);

/* 0 when out shares no memory with the array, −1 with a ValueError when it does or when that cannot be told. */
int sa_check_overlap(const sa_state *state, PyArrayObject *out, PyArrayObject *array, const char *name);
/* 0 when no two elements of out share memory, else −1 with a ValueError. */
int sa_check_self_overlap(PyArrayObject *out);

/* The shape as a tuple, for messages: a new reference. */
PyObject *sa_shape_of(PyArrayObject *array);

const char *sa_dtype_name(sa_dtype dtype);

#endif
