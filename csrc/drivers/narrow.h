/* Rounds gradients from float32 to 16 bits. */
#ifndef SA_NARROW_H
#define SA_NARROW_H

#include "selfattn.h"

/* To nearest, ties to even; too large becomes infinite. */
void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads);

#endif
