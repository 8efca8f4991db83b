/* Replaces cpu.c: every x86-64 instruction set runs. */
#include "runtime/dispatch.h"

#include <string.h>

bool sa_cpu_runs(const char *isa) { return strcmp(isa, "neon") != 0; }
