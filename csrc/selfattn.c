/* Functions of selfattn.h that kernels and drivers call: sizes. */
#include "selfattn.h"

bool sa_multiply(size_t a, size_t b, size_t *product) { return !__builtin_mul_overflow(a, b, product); }

size_t sa_itemsize(sa_dtype dtype) {
    static const size_t sizes[SA_DTYPES] = {2, 2, 4, 8, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    return sizes[dtype];
}
