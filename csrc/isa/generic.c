/* The kernels in plain C, for any CPU. */
#include "simd/common.h"
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(__clang__)
#pragma GCC optimize("Os") /* only for tests there: every such CPU has vectors */
#endif
#define SA_ISA generic
#define SA_VEC128_REGISTERS 16
#include "simd/vec128.h"
#include "isa/all.h"
