/* For files with other products on AVX-512: types and inline functions of float32's attention. */
#include "isa/table.h"
#include "kernels/attention/prefetch.h"

#define SA_REAL_IS_F64 1 /* for the number of rows in a block */
#include "simd/real.h"
#include "simd/real_end.h"

#define SA_REAL_IS_F64 0
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/load.h"
#include "kernels/attention/scratch.h"
#include "kernels/products/unit.h"
#include "kernels/products/tiles.h"
#include "kernels/attention/tile.h"
#include "kernels/decode/rows.h"
#include "kernels/attention/exports.h"
