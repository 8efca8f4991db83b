/* In place of cpu.c: every x86-64 instruction set runs, some through avx512.h. */
#include "runtime/cpu.h"

#include <string.h>

bool sa_cpu_runs(const char *isa) { return strcmp(isa, "neon") != 0; }
