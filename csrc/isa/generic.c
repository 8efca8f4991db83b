/* The kernels in plain C, for any CPU. */
#include "simd/common.h"
#define SA_ISA generic
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#include "isa/all.h"
