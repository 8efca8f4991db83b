/* Loads elements of any dtype, stride, alignment and byte order to aligned rows of `real`, and stores them.
 * Comes after simd/real.h. */
#include "simd/bits.h"

/* True if the elements of a row are native and have no gaps. */
SA_INLINE bool FN(is_native)(const sa_matrix *m) {
    return m->dtype == SA_REAL_DTYPE && !m->swapped && m->col_stride == (ptrdiff_t)sizeof(real);
}

/* True if rows can be read in place as real[…][stride]. */
SA_INLINE bool FN(is_direct)(const sa_matrix *m) {
    return FN(is_native)(m) && m->row_stride % (ptrdiff_t)sizeof(real) == 0 && (uintptr_t)m->data % sizeof(real) == 0;
}

SA_INLINE real FN(sum_lanes)(vec v) {
    SA_UNROLL
    for (int lanes = SA_LANES; lanes > 1; lanes /= 2) {
        v = V(even)(v, v) + V(odd)(v, v);
    }
    return v[0];
}

/* A vector; if only n elements are left, these and zeros. */
SA_INLINE vec FN(load_up_to)(const real *x, ptrdiff_t n) { return n >= SA_LANES ? V(load)(x) : V(load_n)(x, (int)n); }

SA_INLINE void FN(store_up_to)(real *x, vec v, ptrdiff_t n) {
    if (n >= SA_LANES) {
        V(store)(x, v);
    } else {
        V(store_n)(x, v, (int)n);
    }
}

/* True if each x was finite; `check` is a sum of terms x − x or 0·x. */
SA_INLINE bool FN(is_finite)(vec check) { return !V(any)(V(not_lt)(check, V(set1)(1))); }

/* Stores a vector as neighbouring 16-bit floats, with the bits of store_row. */
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

/* Loads n elements, stride bytes apart. A boolean, which only masks have, becomes 0 (open) or −inf (closed). */
void FN(load_row)(real *restrict dst, const char *src, ptrdiff_t stride, ptrdiff_t n, sa_dtype dtype, bool swapped);

/* Loads n rows from `first` on to dst[n][width]. */
void FN(load_rows)(real *dst, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width);

#if !defined(SA_PRODUCTS_ALONE)

#define SA_IDENTITY(x) (x)
#define SA_OPEN_OR_CLOSED(x) ((x) ? (real)0 : -(real)INFINITY)
#define SA_LOAD_EACH(ctype, swap, convert)                                                                             \
    for (ptrdiff_t i = 0; i < n; ++i) {                                                                                \
        SA_KEEP_LOOP(); /* vector code would be large, and no faster */                                                \
        swap##_t x;                                                                                                    \
        memcpy(&x, src + i * stride, sizeof x);                                                                        \
        x = swapped ? sa_##swap##_swapped(x) : x;                                                                      \
        ctype y;                                                                                                       \
        memcpy(&y, &x, sizeof y);                                                                                      \
        dst[i] = (real)convert(y);                                                                                     \
    }                                                                                                                  \
    return;
#define SA_LOAD(ctype, swap, convert)                                                                                  \
    if (stride == (ptrdiff_t)sizeof(ctype) && !swapped) {                                                              \
        for (ptrdiff_t i = 0; i < n; ++i) {                                                                            \
            ctype x;                                                                                                   \
            memcpy(&x, src + i * (ptrdiff_t)sizeof(ctype), sizeof x);                                                  \
            dst[i] = (real)convert(x);                                                                                 \
        }                                                                                                              \
        return;                                                                                                        \
    }                                                                                                                  \
    SA_LOAD_EACH(ctype, swap, convert)

SA_SHARED void FN(load_row)(real *restrict dst, const char *src, ptrdiff_t stride, ptrdiff_t n, sa_dtype dtype,
                            bool swapped) {
    switch (dtype) {
    case SA_F32: SA_LOAD(float, uint32, SA_IDENTITY)
#if SA_REAL_IS_F64
    case SA_F64: SA_LOAD(double, uint64, SA_IDENTITY)
#else
    case SA_F64: SA_LOAD(double, uint64, sa_float_of_f64) /* only masks are wider than `real` */
#endif
    case SA_F16: SA_LOAD(uint16_t, uint16, sa_float_of_f16)
    case SA_BF16: SA_LOAD(uint16_t, uint16, sa_float_of_bf16)
    case SA_BOOL: SA_LOAD(uint8_t, uint8, SA_OPEN_OR_CLOSED)
    case SA_I8: SA_LOAD_EACH(int8_t, uint8, SA_IDENTITY)
    case SA_U8: SA_LOAD_EACH(uint8_t, uint8, SA_IDENTITY)
    case SA_I16: SA_LOAD_EACH(int16_t, uint16, SA_IDENTITY)
    case SA_U16: SA_LOAD_EACH(uint16_t, uint16, SA_IDENTITY)
    case SA_I32: SA_LOAD_EACH(int32_t, uint32, SA_IDENTITY)
    case SA_U32: SA_LOAD_EACH(uint32_t, uint32, SA_IDENTITY)
    case SA_I64: SA_LOAD_EACH(int64_t, uint64, SA_IDENTITY)
    case SA_U64: SA_LOAD_EACH(uint64_t, uint64, SA_IDENTITY)
    case SA_DTYPES: break;
    }
}
#undef SA_LOAD
#undef SA_LOAD_EACH

#define SA_STORE(ctype, convert, via)                                                                                  \
    for (ptrdiff_t i = 0; i < n; ++i) {                                                                                \
        ctype x = convert((via)src[i]);                                                                                \
        memcpy(dst + i * stride, &x, sizeof x);                                                                        \
    }                                                                                                                  \
    return;

/* For floating dtypes in native byte order. */
SA_ONCE void FN(store_row)(char *dst, ptrdiff_t stride, sa_dtype dtype, const real *restrict src, ptrdiff_t n) {
    switch (dtype) {
    case SA_F32:
        if (!SA_REAL_IS_F64 && stride == (ptrdiff_t)sizeof(real)) {
            memcpy(dst, src, (size_t)n * sizeof(real));
            return;
        }
        SA_STORE(float, SA_IDENTITY, float)
    case SA_F64: SA_STORE(double, SA_IDENTITY, double)
    case SA_F16: SA_STORE(uint16_t, sa_f16_of_float, float)
    case SA_BF16: SA_STORE(uint16_t, sa_bf16_of_float, float)
    default: return;
    }
}

#undef SA_STORE
#undef SA_IDENTITY
#undef SA_OPEN_OR_CLOSED

SA_SHARED void FN(load_rows)(real *dst, const sa_matrix *m, ptrdiff_t first, ptrdiff_t n, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < n; ++r) {
        FN(load_row)(dst + r * width, m->data + (first + r) * m->row_stride, m->col_stride, width, m->dtype,
                     m->swapped);
    }
}
#endif
