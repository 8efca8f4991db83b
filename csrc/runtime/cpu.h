/* Which instruction sets this CPU and OS can run. Internal to csrc/. */
#ifndef SA_CPU_H
#define SA_CPU_H

#include <stdbool.h>

bool sa_cpu_runs(const char *isa);

#endif
