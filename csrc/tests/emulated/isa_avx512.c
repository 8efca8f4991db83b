/* kernels/isa_avx512.c for CPUs without AVX-512: the same verbs and templates on the instructions of avx512.h. */
#pragma GCC target("avx2,fma,f16c")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "avx512.h"

#include "../../kernels/common.h"

#define SA_ISA avx512
#include "../../kernels/simd_avx512.h"
#include "../../kernels/templates.h"

#undef SA_ISA
#define SA_ISA avx512bf16
#include "../../kernels/simd_avx512bf16.h"
#include "../../kernels/templates_avx512bf16.h"

#undef SA_ISA
#define SA_ISA amx
#include "../../kernels/simd_amx.h"
#include "../../kernels/templates_amx.h"
