/* The kernels that products of bfloat16 change, attention of 32 bits and less; all others are those of AVX-512. */
#include "philox.h"

#define SA_REAL_IS_F64 0
#include "real.h"
#include "exp.h"
#include "pack.h"
#include "tiles.h"
#include "scores.h"
#include "attention_block.h"
#include "attention_parts.h"
#include "attention_pairs.h"
#include "attention_few.h"
#include "attention_masks.h"
#include "attention_forward.h"
#include "attention_backward_parts.h"
#include "attention_backward.h"
#include "attention_delta.h"
#include "real_end.h"
#undef SA_HAS_BF16_PRODUCTS

#undef SA_ISA
#define SA_ISA avx512
const sa_kernels sa_kernels_avx512bf16 = {
    .name = "avx512bf16",
    .f32 = SA_REAL_TABLE(f32, avx512bf16, avx512, ),
    .f64 = SA_REAL_TABLE(f64, avx512, avx512, ),
    .checksum = sa_checksum_avx512,
    .narrow = sa_narrow_avx512,
    .read_loop = sa_read_loop_avx512,
};
