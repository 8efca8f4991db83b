/* The methods of rows.c: softmax, norms, gelu and rotary embeddings. */
#ifndef SA_PYTHON_ROWS_H
#define SA_PYTHON_ROWS_H

#include "python/module.h"

extern PyMethodDef sa_rows_methods[];

#endif
