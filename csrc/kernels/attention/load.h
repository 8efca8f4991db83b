/* From elements of any dtype, stride, alignment and byte order to aligned rows of `real`, and back. convert.h has the
 * loops. */
#include "simd/bits.h"

/* Whether rows can be read in place as real[…][stride]. */
SA_INLINE bool FN(is_direct)(const sa_matrix *m) {
    return m->dtype == SA_REAL_DTYPE && !m->swapped && m->col_stride == (ptrdiff_t)sizeof(real) &&
           m->row_stride % (ptrdiff_t)sizeof(real) == 0 && (uintptr_t)m->data % sizeof(real) == 0;
}

/* n elements, stride bytes apart. A boolean, of masks only, becomes 0 (open) or −inf (closed). */
void FN(load_row)(real *restrict dst, const char *src, ptrdiff_t stride, ptrdiff_t n, sa_dtype dtype, bool swapped);

/* To dst[n][width]. */
void FN(load_rows)(real *dst, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width);

SA_INLINE real FN(sum_lanes)(vec v) {
    SA_UNROLL
    for (int lanes = SA_LANES; lanes > 1; lanes /= 2) {
        v = V(even)(v, v) + V(odd)(v, v);
    }
    return v[0];
}

/* A vector, or the n elements that are left of it, and zeros. */
SA_INLINE vec FN(load_up_to)(const real *x, ptrdiff_t n) { return n >= SA_LANES ? V(load)(x) : V(load_n)(x, (int)n); }

SA_INLINE void FN(store_up_to)(real *x, vec v, ptrdiff_t n) {
    if (n >= SA_LANES) {
        V(store)(x, v);
    } else {
        V(store_n)(x, v, (int)n);
    }
}

/* Of a sum of x − x or 0·x: whether each x was finite. */
SA_INLINE bool FN(is_finite)(vec check) { return !V(any)(V(not_lt)(check, V(set1)(1))); }

/* One vector to neighbouring 16-bit floats, with the bits of store_row. */
#if !SA_REAL_IS_F64 && defined(SA_HAS_16_BIT_STORES)
SA_INLINE void FN(store_16_bits)(char *dst, sa_dtype dtype, vec x) {
    if (dtype == SA_F16) {
        V(store_f16)(dst, x);
    } else {
        V(store_bf16)(dst, x);
    }
}
#else
SA_LEAF void FN(store_lanes_16_bits)(char *dst, sa_dtype dtype, const real *src) {
    uint16_t x[SA_LANES];
    if (dtype == SA_F16) {
        for (int i = 0; i < SA_LANES; ++i) {
            x[i] = sa_f16_of_float((float)src[i]);
        }
    } else {
        for (int i = 0; i < SA_LANES; ++i) {
            x[i] = sa_bf16_of_float((float)src[i]);
        }
    }
    memcpy(dst, x, sizeof x);
}
SA_INLINE void FN(store_16_bits)(char *dst, sa_dtype dtype, vec x) {
    real lanes[SA_LANES];
    V(store)(lanes, x);
    FN(store_lanes_16_bits)(dst, dtype, lanes);
}
#endif
