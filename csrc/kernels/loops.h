/* For benchmarks: multiply-adds in registers, and a loop that only reads. For tests: simd/exp.h on arrays.
 * Comes after simd/exp.h and kernels/attention/load.h. */

/* Returns FLOPs. x ← x² − 1.9 is chaotic within [−1.9, 1.71]: if numbers did not change, a CPU would clock higher. */
SA_KERNEL double FN(fma_loop)(ptrdiff_t rounds) {
    enum { CHAINS = SA_VECTOR_REGISTERS == 32 ? 20 : 12 };
    vec sum[CHAINS];
    const vec c = V(set1)((real)-1.9);
    SA_UNROLL
    for (int i = 0; i < CHAINS; ++i) {
        sum[i] = V(set1)((real)i * (real)0.05);
    }
    for (ptrdiff_t round = 0; round < rounds; ++round) {
        SA_UNROLL
        for (int i = 0; i < CHAINS; ++i) {
            sum[i] = V(fma)(sum[i], sum[i], c);
        }
    }
    vec total = V(set1)(0);
    SA_UNROLL
    for (int i = 0; i < CHAINS; ++i) {
        total = total + sum[i];
    }
    real each[SA_LANES];
    V(store)(each, total);
    volatile real sink = each[0];
    (void)sink;
    return 2.0 * (double)(CHAINS * SA_LANES) * (double)rounds;
}

#if !SA_REAL_IS_F64
SA_KERNEL uint64_t FN(read_loop)(const void *data, size_t bytes) {
    const uint32_t *p = data;
    const size_t n = bytes / sizeof(uint32_t) / (8 * SA_U32_LANES) * (8 * SA_U32_LANES);
    vu32 all[8];
    SA_UNROLL
    for (int i = 0; i < 8; ++i) {
        all[i] = vu32_set1(0);
    }
    for (size_t k = 0; k < n; k += 8 * SA_U32_LANES) {
        SA_UNROLL
        for (int i = 0; i < 8; ++i) {
            all[i] = vu32_xor(all[i], vu32_load(p + k + (size_t)i * SA_U32_LANES));
        }
    }
    SA_UNROLL
    for (int i = 1; i < 8; ++i) {
        all[0] = vu32_xor(all[0], all[i]);
    }
    uint32_t words[SA_U32_LANES];
    vu32_store(words, all[0]);
    return words[0];
}
#endif

#if defined(SA_WITH_TESTS)
#define SA_ARRAY_OF(operation)                                                                                         \
    SA_KERNEL void FN(operation##_array)(const void *x_n, void *y_n, ptrdiff_t n) {                                    \
        const real *x = x_n;                                                                                           \
        real *y = y_n;                                                                                                 \
        for (ptrdiff_t i = 0; i < n; i += SA_LANES) {                                                                  \
            FN(store_up_to)(y + i, FN(operation)(FN(load_up_to)(x + i, n - i)), n - i);                                \
        }                                                                                                              \
    }
SA_ARRAY_OF(exp2)
SA_ARRAY_OF(exp)
SA_ARRAY_OF(tanh)
#undef SA_ARRAY_OF
#endif
