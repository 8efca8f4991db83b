/* For ISA files with other products on AVX-512: the types and inline functions of attention in float32. Ordinary
 * functions come from isa/avx512.c.
 * Comes after simd/avx512.h. */
#define SA_PRODUCTS_ALONE
#include "kernels/entries.h"
#include "kernels/attention/prefetch.h"

#define SA_REAL_IS_F64 1 /* for the number of rows in a float64 block */
#include "simd/real.h"
#undef SA_REAL_IS_F64
#define SA_REAL_IS_F64 0
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/load.h"
#include "kernels/products/tiles.h"
#include "kernels/attention/block.h"
#include "kernels/decode/rows.h"
