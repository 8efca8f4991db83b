/* For files with other products on AVX-512: types and inline functions of float32's attention. */
#include "isa/table.h"
#include "kernels/attention/prefetch.h"

#define SA_REAL_IS_F64 1 /* for the number of rows in a block */
#include "simd/real.h"
#include "simd/real_end.h"

#define SA_REAL_IS_F64 0
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/pack.h"
#include "kernels/attention/scratch.h"
#include "kernels/products/products.h"
#include "kernels/products/tiles.h"
#include "kernels/attention/block.h"
#include "kernels/decode/rows.h"
#include "kernels/attention/kernels.h"
