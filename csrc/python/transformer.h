/* The methods of embedding.c: the embedding model's forward and backward pass. */
#ifndef SA_PYTHON_EMBEDDING_H
#define SA_PYTHON_EMBEDDING_H

#include "python/module.h"

extern PyMethodDef sa_embedding_methods[];

#endif
