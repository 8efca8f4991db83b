/* Goes over the rows of an array, piece by piece. */
#include "drivers/elements.h"

#include <string.h>

#include "drivers/common.h"

#define SA_WALKED 512 /* elements of a piece, which stays in L1 */

typedef union {
    float f32[SA_WALKED];
    double f64[SA_WALKED];
    uint16_t narrow[SA_WALKED];
} piece;

static void store_element(char *to, const void *from, size_t size, bool swapped) {
    if (!swapped) {
        memcpy(to, from, size);
        return;
    }
    for (size_t i = 0; i < size; ++i) {
        to[i] = ((const char *)from)[size - 1 - i];
    }
}

static void store(const sa_strided *array, char *to, ptrdiff_t stride, const void *values, ptrdiff_t n) {
    const size_t size = sa_itemsize(array->dtype);
    piece rounded;
    if (size == 2) {
        sa_kernels_active()->narrow(values, n, array->dtype, rounded.narrow);
        values = rounded.narrow;
    }
    if (stride == (ptrdiff_t)size && !array->swapped) {
        memcpy(to, values, (size_t)n * size);
        return;
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        store_element(to + i * stride, (const char *)values + (size_t)i * size, size, array->swapped);
    }
}

static void scale(const sa_strided *array, char *x, ptrdiff_t stride, double factor, ptrdiff_t n) {
    const bool f64 = array->dtype == SA_F64;
    const sa_row_axis axis = {.n = n, .stride[SA_ROW_X] = stride};
    piece values;
    sa_kernels_for(f64)->gather(&values, x, array, SA_ROW_X, &axis, 1, n);
    for (ptrdiff_t i = 0; f64 && i < n; ++i) {
        values.f64[i] *= factor;
    }
    for (ptrdiff_t i = 0; !f64 && i < n; ++i) {
        values.f32[i] *= (float)factor;
    }
    store(array, x, stride, &values, n);
}

/* Writes `from` to the array, or, if from is NULL, multiplies the array by the factor. */
static void walk(const sa_elements *x, const char *from, double factor) {
    const int outer = x->ndim > 0 ? x->ndim - 1 : 0;
    const ptrdiff_t n = x->ndim > 0 ? x->shape[outer] : 1, stride = x->ndim > 0 ? x->array.stride[outer] : 0;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(x->array.dtype == SA_F64);
    ptrdiff_t index[SA_MAX_LEAD] = {0};
    char *row = x->array.data;
    for (int i = 0; i < x->ndim; ++i) {
        if (x->shape[i] == 0) {
            return;
        }
    }
    int axis; /* the axis along which rows follow one another */
    do {
        for (ptrdiff_t i = 0; i < n; i += SA_WALKED) {
            const ptrdiff_t count = sa_smaller(n - i, SA_WALKED);
            if (from == NULL) {
                scale(&x->array, row + i * stride, stride, factor, count);
            } else {
                store(&x->array, row + i * stride, stride, from, count);
                from += count * size;
            }
        }
        for (axis = outer - 1; axis >= 0; --axis) {
            row += x->array.stride[axis];
            if (++index[axis] < x->shape[axis]) {
                break;
            }
            row -= x->shape[axis] * x->array.stride[axis];
            index[axis] = 0;
        }
    } while (axis >= 0);
}

void sa_elements_write(const sa_elements *to, const void *from) { walk(to, from, 1); }

void sa_elements_scale(const sa_elements *x, double factor) {
    const char *from = NULL;
    walk(x, from, factor);
}
