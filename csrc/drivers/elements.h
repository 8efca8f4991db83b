/* Writes, or multiplies, the elements of an array of any strides, dtype and byte order.
 * Allocates nothing, so that it cannot fail halfway. */
#ifndef SA_ELEMENTS_H
#define SA_ELEMENTS_H

#include "kernels/rowops/call.h"

typedef struct {
    sa_strided array;
    int ndim;
    ptrdiff_t shape[SA_MAX_LEAD];
} sa_elements;

/* Writes `from`, in C order: float64 if the elements are float64, else float32. Rounds like sa_narrow. */
void sa_elements_write(const sa_elements *to, const void *from);

/* Multiplies the elements by a factor; 16-bit elements in float32, and then rounds. */
void sa_elements_scale(const sa_elements *x, double factor);

#endif
