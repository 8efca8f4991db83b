/* Writes, or multiplies, the elements of an array of any strides, dtype and byte order. Allocates nothing, so that it cannot
 * fail halfway. */
#ifndef SA_ELEMENTS_H
#define SA_ELEMENTS_H

#include "drivers/rowops.h"

/* An array of floats. */
typedef struct {
    sa_strided array;
    int ndim;
    ptrdiff_t shape[SA_MAX_LEAD];
} sa_elements;

/* `from`, in C order, is float64 if the elements are, else float32. Rounds as sa_narrow does. */
void sa_elements_write(const sa_elements *to, const void *from);

/* 16-bit elements are multiplied in float32, then rounded. */
void sa_elements_scale(const sa_elements *x, double factor);

#endif
