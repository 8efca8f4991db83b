/* The method of checksum.c: whether arrays still hold what they held. */
#ifndef SA_PYTHON_CHECKSUM_H
#define SA_PYTHON_CHECKSUM_H

#include "python/module.h"

extern PyMethodDef sa_checksum_methods[];

#endif
