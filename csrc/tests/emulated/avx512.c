/* kernels/isa_avx512.c for CPUs without AVX-512: the same verbs and templates on the instructions of avx512.h. */
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "tests/emulated/avx512.h"

#include "simd/common.h"

#define SA_ISA avx512
#include "simd/avx512.h"
#include "isa/templates.h"

#undef SA_ISA
#define SA_ISA avx512bf16
#include "simd/avx512bf16.h"
#include "isa/templates_avx512bf16.h"

#undef SA_ISA
#define SA_ISA amx
#include "simd/amx.h"
#include "isa/templates_amx.h"
