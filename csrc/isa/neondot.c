/* Products of int8 by the dot products of ARMv8.2 (FEAT_DotProd). */
#include "simd/macros.h"
#if defined(__aarch64__)
#if defined(__clang__)
#include <arm_neon.h>
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#if !defined(__ARM_FEATURE_DOTPROD) /* a user's newer -march stays: GCC would redefine its macros */
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>
#endif
#include "isa/table.h"
#include "kernels/products/int8_neondot.h"
#include "isa/end.h"
#endif
