/* From Python objects to numbers. Exceptions that an object itself raises pass through. */
#ifndef SA_PYTHON_SCALARS_H
#define SA_PYTHON_SCALARS_H

#include "python/module.h"

/* A new reference to an int. NULL without an exception: value is a bool, or does not stand for an int. */
PyObject *sa_as_index(PyObject *value);

/* To a double; refuses bools. */
int sa_read_real(void *call, PyObject *value, const char *name, void *to);

/* To an int from 1 to 1024. */
int sa_read_threads(void *call, PyObject *value, const char *name, void *to);

/* To a bool; None is false, strings and floats are refused. */
int sa_read_flag(void *call, PyObject *value, const char *name, void *to);

#endif
