/* The conversions that load.h declares. */

#define SA_IDENTITY(x) (x)
#define SA_OPEN_OR_CLOSED(x) ((x) ? (real)0 : -(real)INFINITY)
#define SA_LOAD_EACH(ctype, swap, convert)                                                                                     \
    for (ptrdiff_t i = 0; i < n; ++i) {                                                                                        \
        SA_KEEP_LOOP(); /* vectors of it would be large code, and no faster */                                                 \
        swap##_t x;                                                                                                            \
        memcpy(&x, src + i * stride, sizeof x);                                                                                \
        x = swapped ? sa_##swap##_swapped(x) : x;                                                                              \
        ctype y;                                                                                                               \
        memcpy(&y, &x, sizeof y);                                                                                              \
        dst[i] = (real)convert(y);                                                                                             \
    }                                                                                                                          \
    return;
#define SA_LOAD(ctype, swap, convert)                                                                                          \
    if (stride == (ptrdiff_t)sizeof(ctype) && !swapped) {                                                                      \
        for (ptrdiff_t i = 0; i < n; ++i) {                                                                                    \
            ctype x;                                                                                                           \
            memcpy(&x, src + i * (ptrdiff_t)sizeof(ctype), sizeof x);                                                          \
            dst[i] = (real)convert(x);                                                                                         \
        }                                                                                                                      \
        return;                                                                                                                \
    }                                                                                                                          \
    SA_LOAD_EACH(ctype, swap, convert)

SA_SHARED void FN(load_row)(real *restrict dst, const char *src, ptrdiff_t stride, ptrdiff_t n, sa_dtype dtype, bool swapped) {
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

#define SA_STORE(ctype, convert, via)                                                                                          \
    for (ptrdiff_t i = 0; i < n; ++i) {                                                                                        \
        ctype x = convert((via)src[i]);                                                                                        \
        memcpy(dst + i * stride, &x, sizeof x);                                                                                \
    }                                                                                                                          \
    return;

/* Floating dtypes only, native byte order. */
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
        FN(load_row)(dst + r * width, m->data + (first + r) * m->row_stride, m->col_stride, width, m->dtype, m->swapped);
    }
}
