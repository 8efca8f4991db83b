/* Packed weights of 8 or 16 bits, in capsules. */
#ifndef SA_PYTHON_COMPACT_H
#define SA_PYTHON_COMPACT_H

#include "python/state.h"

#include "drivers/attention.h"
#include "drivers/compact.h"

/* NULL: x is no such capsule, and no error is set. Lives as long as x. */
const sa_compact *sa_compact_of(PyObject *x);

#endif
