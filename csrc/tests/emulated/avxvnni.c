/* isa/avxvnni.c on the instructions of avx512.h. */
#pragma GCC target("avx2,fma,f16c")
#include "tests/emulated/avx512.h"
#define SA_EMULATED
#include "isa/avxvnni.c"
