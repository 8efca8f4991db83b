/* The kernels in use: the best that this CPU can run, or those that the user names. */
#ifndef SA_DISPATCH_H
#define SA_DISPATCH_H

#include "kernels/kernels.h"

/* True if this CPU and the operating system can run an instruction set (runtime/cpu.c). */
bool sa_cpu_runs(const char *isa);

/* The table in use. */
const sa_kernels *sa_kernels_active(void);

/* The unit by which the table in use multiplies compact weights on this CPU; NULL if there is none. */
const sa_compact_unit *sa_compact_active(sa_weights kind);

/* The unit by which it multiplies quants by digits; NULL: they are expanded. */
const sa_gemv_unit *sa_gemv_active(void);

#endif
