/* From float32 to 16 bits, as gradients leave. */
#ifndef SA_NARROW_H
#define SA_NARROW_H

#include "selfattn.h"

/* to[n] = the float16 or bfloat16 nearest to from[n], ties to even; what is beyond the largest becomes infinite. */
void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads);

#endif
