/* 2^x, e^x and tanh. csrc/tests/test_exp.c measures errors over every float32.
 *
 * exp2: 2^x = 2^n · p(f), x = n + f, n the nearest integer, f exact. p is minimax with p(0) = 1: degree 6 (relative
 * error 2.0e-9), float64 11 (3.4e-18). Within 1 ulp for results from FLT_MIN (DBL_MIN) on; smaller results are 0, as
 * for −inf. x must stay below 127.5 (1023.5): callers subtract a maximum. NaN stays NaN: "not less than" passes it, and
 * p is multiplied by 2^n, as adding n to the exponent could make a number of it.
 * Comes after simd/real.h. */

#if SA_REAL_IS_F64
#define SA_EXP2_LEAST (-1022.0)
/* 1.5·2^52: adding it leaves an integer, plus 1023, in the low bits. */
#define SA_ROUND_MAGIC (6755399441055744.0 + 1023)
#define SA_SPLIT_MAGIC 100663296.0 /* 1.5·2^26: adding it rounds to multiples of 2^−26 */
#define SA_LN2_HI 0x1.62e42feep-1  /* has 32 bits: n·hi is exact for |n| < 2^20 */
#define SA_LN2_LO 0x1.a39ef35793c76p-33
#define SA_EXP2_C1 0.69314718055994532581
#define SA_EXP2_C1_HI 0x1.62e42f8p-1 /* has 26 bits */
#else
#define SA_EXP2_LEAST (-126.0f)
#define SA_ROUND_MAGIC (12582912.0f + 127) /* 1.5·2^23 */
#define SA_SPLIT_MAGIC 3072.0f             /* 1.5·2^11: adding it rounds to multiples of 2^−12 */
#define SA_LN2_HI 0x1.62e4p-1f             /* has 15 bits: n·hi is exact for |n| < 2^9 */
#define SA_LN2_LO 0x1.7f7d1cp-20f
#define SA_EXP2_C1 0.69314720285509325707
#define SA_EXP2_C1_HI 0x1.62ep-1 /* has 12 bits */
#endif
#define SA_LOG2E 1.44269504088896340736

#define SA_C(x) V(set1)((real)(x))

/* Evaluates a polynomial with coefficients c, from the highest power down. */
SA_INLINE vec FN(polynomial)(vec x, const double *c, const int n) {
    vec p = SA_C(c[0]);
    SA_UNROLL
    for (int i = 1; i < n; ++i) {
        p = V(fma)(p, x, SA_C(c[i]));
    }
    return p;
}
#define SA_POLYNOMIAL(x, c) FN(polynomial)(x, c, sizeof(c) / sizeof *(c))

/* q = 1 + c1·f + q(f)·f² for f = x − whole in [−1/2, 1/2]. */
SA_INLINE void FN(exp2_polynomial)(const vec *x, const vec *whole, const vec *f, vec *q, const int n) {
    static const double c[] = {
#if SA_REAL_IS_F64
        4.434769663685358585e-10,   7.0737831617506186749e-9,  1.0178199582862336928e-7, 1.3215435282866306031e-6,
        0.000015252733493101852814, 0.00015403530457110889952, 0.0013333558146774644348, 0.0096181291075941210495,
        0.055504108664820083145,    0.24022650695910131258,
#else
        0.00015353421830532594765, 0.0013398874138954063687, 0.0096184371490820364303,
        0.055503324720404834021,   0.24022647915138082381,
#endif
    };
    enum { TERMS = sizeof c / sizeof *c };
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        q[i] = SA_C(c[0]);
    }
    SA_UNROLL
    for (int k = 1; k < TERMS; ++k) {
        SA_UNROLL
        for (int i = 0; i < n; ++i) {
            q[i] = V(fma)(q[i], f[i], SA_C(c[k]));
        }
    }
#if SA_FMA_IS_FUSED
    (void)x;
    (void)whole;
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        q[i] = V(fma)(V(fma)(q[i], f[i], SA_C(SA_EXP2_C1)), f[i], SA_C(1));
    }
#else
    /* Without a fused multiply-add, the error would exceed 1 ulp. So x is cut: products of its high bits and c1's are
     * exact, and the error of 1 + product is kept (Dekker). */
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        vec x_hi = (x[i] + SA_C(SA_SPLIT_MAGIC)) - SA_C(SA_SPLIT_MAGIC);
        vec product = (x_hi - whole[i]) * SA_C(SA_EXP2_C1_HI);
        vec sum = SA_C(1) + product;
        vec lost = product - (sum - SA_C(1));
        vec small = (x[i] - x_hi) * SA_C(SA_EXP2_C1_HI) + f[i] * SA_C(SA_EXP2_C1 - SA_EXP2_C1_HI) + f[i] * f[i] * q[i];
        q[i] = sum + (lost + small);
    }
#endif
}

/* n ≤ SA_VECS vectors. */
SA_INLINE void FN(exp2_each)(vec *x, const int n) {
    vec f[SA_VECS], whole[SA_VECS], p[SA_VECS];
#if defined(SA_HAS_SCALEF)
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        f[i] = V(fraction)(x[i]);
        whole[i] = x[i] - f[i];
    }
    FN(exp2_polynomial)(x, whole, f, p, n);
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        x[i] = V(scalef_unless_lt)(p[i], whole[i], x[i], SA_C(SA_EXP2_LEAST));
    }
#else
    vec t[SA_VECS];
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        t[i] = x[i] + SA_C(SA_ROUND_MAGIC);
        whole[i] = t[i] - SA_C(SA_ROUND_MAGIC);
        f[i] = x[i] - whole[i];
    }
    FN(exp2_polynomial)(x, whole, f, p, n);
    SA_UNROLL
    for (int i = 0; i < n; ++i) {
        x[i] = V(zero_unless)(V(not_lt)(x[i], SA_C(SA_EXP2_LEAST)), p[i] * V(power)(t[i]));
    }
#endif
}

SA_INLINE vec FN(exp2)(vec x) {
    FN(exp2_each)(&x, 1);
    return x;
}

#if defined(SA_HAS_TILES) && !SA_REAL_IS_F64
/* 2^x for weights of 17 bits: degree 4, p(0) = 1, relative error 2^−18.4. If subnormals are flushed, results below
 * FLT_MIN are 0. NaN stays NaN. */
SA_INLINE vec FN(exp2_short)(vec x) {
    static const double c[] = {0.009582853095199975, 0.05590642459716351, 0.24024098609910552, 0.6931241934177147, 1};
    const vec f = V(fraction)(x);
    return V(scalef)(SA_POLYNOMIAL(f, c), x - f);
}
#endif

/* e^x for x ≤ 88 (709), with x = n·ln 2 + r. Within 1 ulp for results ≥ FLT_MIN (DBL_MIN); smaller ones are 0. */
SA_INLINE vec FN(exp)(vec x) {
    vec t = V(fma)(x, SA_C(SA_LOG2E), SA_C(SA_ROUND_MAGIC));
    vec n = t - SA_C(SA_ROUND_MAGIC);
    vec exact = V(fma)(n, SA_C(-SA_LN2_HI), x);
    vec r = V(fma)(n, SA_C(-SA_LN2_LO), exact);
    vec r_lost = V(fma)(n, SA_C(-SA_LN2_LO), exact - r); /* keeps the rounding error, to stay within 1 ulp */
    static const double c[] = {
#if SA_REAL_IS_F64
        /* Taylor's series: the remainder is 4e-18 */
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
        1.0 / 5040.0,       1.0 / 720.0,       1.0 / 120.0,      1.0 / 24.0,      1.0 / 6.0,      0.5,
#else
        0.0013814267463783585055, 0.0083687803232603239207, 0.041668394177408809392,
        0.16666520109889508852,   0.49999993412992063892,
#endif
    };
    vec sum = SA_C(1) + r;
    /* With the rounding error of 1 + r. */
    vec p = sum + ((r - (sum - SA_C(1))) + V(fma)(r * r, SA_POLYNOMIAL(r, c), r_lost));
    p = p * V(power)(t);
    /* the limit is ln FLT_MIN (DBL_MIN), rounded up */
    return V(zero_unless)(V(not_lt)(x, SA_C(SA_REAL_IS_F64 ? -708.39641853226408 : -87.33654022216796875)), p);
}

/* An odd polynomial below 0.625 (relative error 4.1e-9, float64 3.5e-19), else 1 − 2/(e^2|x| + 1). Within 2 ulp; ±inf
 * becomes ±1, NaN and ±0 stay. */
SA_INLINE vec FN(tanh)(vec x) {
    vec a = V(abs)(x);
    vec z = x * x;
    static const double c[] = {
#if SA_REAL_IS_F64
        6.0556236704869269713e-6,  -0.000030217924882123391252, 0.000091589738998323160648, -0.00023703007134026732572,
        0.00058945859850511353363, -0.0014557276095123361579,   0.0035921142698470229513,   -0.0088632343413153384135,
        0.021869488470638567038,   -0.053968253966133662019,    0.13333333333329887642,     -0.33333333333333313788,
#else
        -0.0057170410619077475107, 0.020650583864982227263, -0.053743497119333888779,
        0.13331491277619494627,    -0.33333283925102841365,
#endif
    };
    /* tanh(9.02) rounds to 1; min keeps a NaN of its second operand. */
    vec capped = V(min)(SA_C(SA_REAL_IS_F64 ? 20 : 10), a);
    vec near = V(fma)(x * z, SA_POLYNOMIAL(z, c), x);
    vec far = SA_C(1) - SA_C(2) / (FN(exp2)(capped * SA_C(2 * SA_LOG2E)) + SA_C(1));
    return V(copysign)(V(select)(V(lt)(a, SA_C(0.625)), near, far), x); /* near(−0) would be +0 */
}

#undef SA_EXP2_LEAST
#undef SA_ROUND_MAGIC
#undef SA_SPLIT_MAGIC
#undef SA_EXP2_C1
#undef SA_EXP2_C1_HI
#undef SA_LN2_HI
#undef SA_LN2_LO
