/* The methods of update.c: one step of an optimiser over all parameters. */
#ifndef SA_PYTHON_UPDATE_H
#define SA_PYTHON_UPDATE_H

#include "python/module.h"

extern PyMethodDef sa_update_methods[];

#endif
