/* From Python objects to numbers. What an object itself raises on the way, be it KeyboardInterrupt, is left as it is. */
#ifndef SA_PYTHON_SCALARS_H
#define SA_PYTHON_SCALARS_H

#include "python/module.h"

static inline bool sa_given(PyObject *value) { return value != NULL && value != Py_None; }

/* An int or what stands for one, but no bool, as an int: a new reference. NULL without an exception where it is none. */
PyObject *sa_as_index(PyObject *value);

/* A real number that is no bool; −1 with an exception that names it. */
int sa_read_real(PyObject *value, const char *name, double *x);

/* num_threads, called `name` in the exception: from 1 to 1024. */
int sa_read_threads(PyObject *value, const char *name, int *threads);

#endif
