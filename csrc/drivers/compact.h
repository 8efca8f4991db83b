/* Products with compact weights, int8 or bfloat16: docs/decisions/0010-int8.md. */
#ifndef SA_COMPACT_H
#define SA_COMPACT_H

#include "drivers/linear.h"

/* Returns the bytes of the panels of weights (out, in), which for int8 are followed by scales and offsets.
 * sa_compact_fill fills 64-byte aligned memory of that size from int8 and scales of groups (out, ceil(in / SA_GROUP)),
 * or from bfloat16. */
size_t sa_compact_bytes(sa_weights kind, ptrdiff_t out, ptrdiff_t in);
sa_compact sa_compact_fill(sa_weights kind, ptrdiff_t out, ptrdiff_t in, const void *weight, const float *scale,
                           char *memory);

/* A task rounds its rows, then multiplies them by its stripe of each weight's columns. */
typedef struct {
    ptrdiff_t row, rows; /* rows of the product that the task has */
    ptrdiff_t stride;    /* bytes of a rounded row */
    const sa_compact_unit *unit;
    char *x;
    sa_rounded *rounded;
    void *sums;
} sa_compact_rows;

size_t sa_compact_scratch(sa_weights kind, ptrdiff_t rows, ptrdiff_t in);
sa_compact_rows sa_compact_round(const sa_linear *l, ptrdiff_t row, ptrdiff_t rows, void *scratch);
void sa_compact_columns(const sa_linear *l, const sa_compact_rows *r, int which, ptrdiff_t column, ptrdiff_t width);

#endif
