/* The method of narrow.c: float32 to 16 bits. */
#ifndef SA_PYTHON_NARROW_H
#define SA_PYTHON_NARROW_H

#include "python/module.h"

extern PyMethodDef sa_narrow_methods[];

#endif
