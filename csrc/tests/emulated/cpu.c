/* In the place of cpu.c: every instruction set of x86-64 runs, some of them as tests/emulated/avx512.h has them. */
#include "runtime/cpu.h"

#include <string.h>

bool sa_cpu_runs(const char *isa) { return strcmp(isa, "neon") != 0; }
