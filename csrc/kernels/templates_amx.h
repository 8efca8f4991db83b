/* The kernels that the matrix unit changes, float32's attention and products; all others are those of AVX-512. */
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
#include "matmul_parts.h"
#include "real_end.h"

#undef SA_ISA
#define SA_ISA avx512
const sa_kernels sa_kernels_amx = {
    .name = "amx",
    .f32 = SA_REAL_TABLE(f32, amx, amx, .kept_bytes = sa_kept_bytes_f32_amx, .keep_panel = sa_keep_panel_f32_amx),
    .f64 = SA_REAL_TABLE(f64, avx512, avx512, ),
    .checksum = sa_checksum_avx512,
    .narrow = sa_narrow_avx512,
    .read_loop = sa_read_loop_avx512,
};
