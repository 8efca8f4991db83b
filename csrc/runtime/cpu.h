/* Which instruction sets this CPU and OS can run. */
#ifndef SA_CPU_H
#define SA_CPU_H

#include <stdbool.h>

bool sa_cpu_runs(const char *isa);

#endif
