/* The methods of runtime.c, and the choice of the instruction set for module.c. */
#ifndef SA_PYTHON_RUNTIME_H
#define SA_PYTHON_RUNTIME_H

#include "python/module.h"

extern PyMethodDef sa_runtime_methods[];

/* Chooses the kernels by name; −1 with `error` set, which lists what there is, when that cannot be. */
int sa_py_choose_isa(const char *name, PyObject *error, const char *what);

#endif
