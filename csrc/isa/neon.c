/* The NEON kernels, for every aarch64. */
#include "simd/common.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#define SA_ISA neon
#define SA_VEC128_NEON
#define SA_VEC128_REGISTERS 32
#include "simd/vec128.h"
#include "isa/all.h"
#else
typedef int sa_no_neon_here;
#endif
