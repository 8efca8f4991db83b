/* simd/exp.h over arrays, for tests. */

#define SA_ARRAY_OF(operation)                                                                                                 \
    SA_KERNEL void FN(operation##_array)(const void *x_n, void *y_n, ptrdiff_t n) {                                            \
        const real *x = x_n;                                                                                                   \
        real *y = y_n;                                                                                                         \
        for (ptrdiff_t i = 0; i < n; i += SA_LANES) {                                                                          \
            FN(store_up_to)(y + i, FN(operation)(FN(load_up_to)(x + i, n - i)), n - i);                                        \
        }                                                                                                                      \
    }
SA_ARRAY_OF(exp2)
SA_ARRAY_OF(exp)
SA_ARRAY_OF(tanh)
#undef SA_ARRAY_OF
