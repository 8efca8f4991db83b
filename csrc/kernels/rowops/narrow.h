/* To the nearest float16 or bfloat16, ties to even. */
#include "simd/bits.h"

SA_KERNEL void SA_PASTE(sa_narrow_, SA_ISA)(const float *restrict from, ptrdiff_t n, sa_dtype dtype, uint16_t *restrict to) {
    if (dtype == SA_BF16) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_bf16_of_float(from[i]);
        }
    } else {
        for (ptrdiff_t i = 0; i < n; ++i) {
            to[i] = sa_f16_of_float(from[i]);
        }
    }
}
