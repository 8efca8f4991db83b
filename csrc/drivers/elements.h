/* The elements of an array of any strides, dtype and byte order: written, or multiplied. Takes no memory, so that nothing stops
 * it half-way. */
#ifndef SA_ELEMENTS_H
#define SA_ELEMENTS_H

#include "drivers/rowops.h"

/* Floats. */
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
