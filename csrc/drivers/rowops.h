/* Row operations: softmax, norms, GELU, rotary embeddings; gradients; rounding to 16 bits. The caller checks dtypes and
 * shapes. */
#ifndef SA_ROWOPS_H
#define SA_ROWOPS_H

#include "kernels/rowops/call.h"

sa_status sa_row_make_plan(const sa_row_call *c, int max_threads, sa_row_plan *plan);

/* scratch: plan.shared_bytes + plan.threads × plan.scratch_bytes bytes, 64-byte aligned, or NULL if that is 0. */
void sa_row_run(const sa_row_call *c, sa_row_plan *plan, void *scratch);

/* Rounds float32 to 16 bits: to nearest, ties to even; numbers that are too large become infinite. */
void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads);

#endif
