/* The kernels that products of bfloat16 change, attention of 32 bits and less; all others are those of AVX-512. */
#include "simd/philox.h"

#define SA_REAL_IS_F64 0
#include "simd/real.h"
#include "simd/exp.h"
#include "kernels/attention/pack.h"
#include "kernels/products/fma.h"
#include "kernels/attention/scores.h"
#include "kernels/attention/block.h"
#include "kernels/products/amx.h"
#include "kernels/products/bf16dot.h"
#include "kernels/decode/few_rows.h"
#include "kernels/attention/masks.h"
#include "kernels/attention/forward.h"
#include "kernels/products/backward_parts.h"
#include "kernels/attention/backward.h"
#include "kernels/attention/delta.h"
#include "simd/real_end.h"
#undef SA_HAS_BF16_PRODUCTS

#undef SA_ISA
#define SA_ISA avx512
const sa_kernels sa_kernels_avx512bf16 = {
    .name = "avx512bf16",
    .f32 = SA_REAL_TABLE(f32, avx512bf16, avx512),
    .f64 = SA_REAL_TABLE(f64, avx512, avx512),
    .checksum = sa_checksum_avx512,
    .narrow = sa_narrow_avx512,
    .read_loop = sa_read_loop_avx512,
};
