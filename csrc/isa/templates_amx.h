/* The kernels that the matrix unit changes, float32's attention and products; all others are those of AVX-512. */
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
#include "kernels/transformer/matmul_amx.h"
#include "simd/real_end.h"

#undef SA_ISA
#define SA_ISA avx512
const sa_kernels sa_kernels_amx = {
    .name = "amx",
    .f32 = SA_REAL_TABLE(f32, amx, amx),
    .f64 = SA_REAL_TABLE(f64, avx512, avx512),
    .checksum = sa_checksum_avx512,
    .narrow = sa_narrow_avx512,
    .read_loop = sa_read_loop_avx512,
};
