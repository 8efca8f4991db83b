/* Numbers from Python. Exceptions that objects raise pass through. */
#ifndef SA_PYTHON_SCALARS_H
#define SA_PYTHON_SCALARS_H

#include "python/state.h"

/* NULL without an exception: a bool, or no integer. */
PyObject *sa_as_index(PyObject *value);

int sa_read_real(void *call, PyObject *value, const char *name, void *to);

/* To an int, 1 … 1024. */
int sa_read_threads(void *call, PyObject *value, const char *name, void *to);

/* To a bool; refuses strings and floats. */
int sa_read_flag(void *call, PyObject *value, const char *name, void *to);

#endif
