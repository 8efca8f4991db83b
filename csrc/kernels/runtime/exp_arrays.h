/* simd/exp.h over arrays, for tests. */

#define SA_ARRAY_OF(operation)                                                                                                 \
    SA_KERNEL void FN(operation##_array)(const void *x_n, void *y_n, ptrdiff_t n) {                                            \
        const real *x = x_n;                                                                                                   \
        real *y = y_n;                                                                                                         \
        ptrdiff_t i = 0;                                                                                                       \
        for (; i + SA_LANES <= n; i += SA_LANES) {                                                                             \
            V(store)(y + i, FN(operation)(V(load)(x + i)));                                                                    \
        }                                                                                                                      \
        if (i < n) {                                                                                                           \
            V(store_n)(y + i, FN(operation)(V(load_n)(x + i, (int)(n - i))), (int)(n - i));                                    \
        }                                                                                                                      \
    }
SA_ARRAY_OF(exp2)
SA_ARRAY_OF(exp)
SA_ARRAY_OF(tanh)
#undef SA_ARRAY_OF
