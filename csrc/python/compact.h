/* Compact weights and quants, in capsules. */
#ifndef SA_PYTHON_COMPACT_H
#define SA_PYTHON_COMPACT_H

#include "python/binding.h"

#include "drivers/attention.h"
#include "drivers/compact.h"

/* Returns NULL, without an exception, if x is no such capsule. The result lives as long as x. */
const sa_compact *sa_compact_of(PyObject *x);

/* Refuses weights that the instruction set in use does not multiply. */
int sa_compact_check(const sa_compact *weights);

#endif
