/* For all drivers: sizes, and the kernels of an element type. */
#ifndef SA_COMMON_H
#define SA_COMMON_H

#include "runtime/dispatch.h"

static inline ptrdiff_t sa_smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
static inline ptrdiff_t sa_larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }
static inline size_t sa_most(size_t a, size_t b) { return a > b ? a : b; }
static inline ptrdiff_t sa_ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

/* With axes no longer than this, diagonals and window bounds cannot overflow: 2^48 and 2^40, with 32 bits 2^28 and
 * 2^24. Products are checked one by one. */
#define SA_MAX_LENGTH (PTRDIFF_MAX / (sizeof(ptrdiff_t) > 4 ? 1 << 15 : 8) + 1)
#define SA_MAX_WIDTH (PTRDIFF_MAX / (sizeof(ptrdiff_t) > 4 ? 1 << 23 : 128) + 1)

/* Divides, without a division for b = 1, which would slow a tiny call. */
static inline ptrdiff_t sa_divide(ptrdiff_t a, ptrdiff_t b, ptrdiff_t *rest) {
    *rest = b == 1 ? 0 : a % b;
    return b == 1 ? a : a / b;
}

#define SA_CACHE_LINE 64
static inline size_t sa_whole_lines(size_t bytes) {
    return (bytes + SA_CACHE_LINE - 1) / SA_CACHE_LINE * SA_CACHE_LINE;
}

static inline size_t sa_element_size(bool f64) { return f64 ? sizeof(double) : sizeof(float); }

static inline const sa_real_kernels *sa_kernels_for(bool f64) {
    const sa_kernels *kernels = sa_kernels_active();
    return f64 ? &kernels->f64 : &kernels->f32;
}

/* True if the call should stop; asked between tasks, and in a block every SA_ELEMENTS_AT_ONCE elements of keys and
 * values. */
bool sa_cancelled(const sa_attention *a);

#endif
