/* The methods of proxy.c: confidences of triplets of embeddings, and their gradients. */
#ifndef SA_PYTHON_PROXY_H
#define SA_PYTHON_PROXY_H

#include "python/module.h"

extern PyMethodDef sa_proxy_methods[];

#endif
