/* From Python objects to numbers, as readers of parameters. What an object itself raises on the way is left as it is. */
#ifndef SA_PYTHON_SCALARS_H
#define SA_PYTHON_SCALARS_H

#include "python/module.h"

/* An int or what stands for one, but no bool, as an int: a new reference. NULL without an exception where it is none. */
PyObject *sa_as_index(PyObject *value);

/* To a double: a real number that is no bool. */
int sa_read_real(void *call, PyObject *value, const char *name, void *to);

/* To an int: a number of threads, from 1 to 1024. */
int sa_read_threads(void *call, PyObject *value, const char *name, void *to);

/* To a bool: what is true or false, None too; but strings and floats are mistakes. */
int sa_read_flag(void *call, PyObject *value, const char *name, void *to);

#endif
