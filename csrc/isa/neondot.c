/* Products of int8 by the dot products of ARMv8.2 (FEAT_DotProd). */
#include "simd/macros.h"
#if defined(__aarch64__)
#if defined(__clang__)
SA_TARGET("dotprod")
#elif defined(__ARM_FEATURE_DOTPROD) /* a newer -march of the user stays, as GCC would redefine its macros */
SA_PRAGMA(GCC push_options)
#else
SA_TARGET("arch=armv8.2-a+dotprod")
#endif
#include "kernels/products/int8_neondot.h"
SA_END_TARGET
#endif
