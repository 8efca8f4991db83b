/* The kernels' exp2, exp and tanh against the C library in more precision. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "drivers/common.h"
#include "tests/test.h"

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* |y − right| in units of the last of `bits` places, or of 2^least for subnormals. */
static double ulps(long double y, long double right, int bits, int least) {
    const int exponent = ilogbl(right);
    return (double)(fabsl(y - right) / ldexpl(1, (exponent < least ? least : exponent) - bits + 1));
}

/* For small arguments a series, with error 1e-6 ulp, else the C library. */
static double right_exp2(double x) { return fabs(x) < 0x1p-20 ? 1 + x * 0.69314718055994530942 : exp2(x); }
static double right_exp(double x) { return fabs(x) < 0x1p-20 ? 1 + x : exp(x); }
static double right_tanh(double x) {
    return fabs(x) < 0x1p-12 ? x - x * x * x / 3 : fabs(x) > 20 ? copysign(1, x) : tanh(x);
}

typedef struct {
    const char *name;
    double (*right)(double);
    long double (*right_wide)(long double);
    double bound;                        /* the largest error, in ulp */
    double least, most, least64, most64; /* the arguments whose results are neither flushed nor too large */
} function;

/* Bounds and ranges as in simd/exp.h. exp32 starts at the first result ≥ FLT_MIN. */
static const function functions[3] = {
    {"exp2", right_exp2, exp2l, 1, -126, 127.5, -1022, 1023.5},
    {"exp", right_exp, expl, 1, -87.33654474, 88, -708.39641853226408, 709},
    {"tanh", right_tanh, tanhl, 2, -INFINITY, INFINITY, -INFINITY, INFINITY},
};

typedef void (*array_function)(const void *, void *, ptrdiff_t);

static array_function kernel_of(const sa_real_kernels *k, int which) {
    return which == 0 ? k->exp2_array : which == 1 ? k->exp_array : k->tanh_array;
}

/* True if y is right. Outside the range y may also be f(x). In the range, *worst becomes the largest error. */
static bool good(const function *f, bool f64, double x, double y, double *worst) {
    if (isnan(x)) {
        return isnan(y);
    }
    if (x < (f64 ? f->least64 : f->least)) {
        return y == 0; /* the result is below the smallest normal number */
    }
    if (x >= f->most && x > 0 && f->most < INFINITY && !f64) {
        return true; /* callers have no such arguments */
    }
    if (f->right == right_tanh && x == 0) {
        return y == 0 && signbit(x) == signbit(y);
    }
    const long double right = f64 ? f->right_wide((long double)x) : (long double)f->right(x);
    const double error = f64 ? ulps((long double)y, right, 53, -1022) : ulps((long double)y, right, 24, -126);
    *worst = error > *worst ? error : *worst;
    return error <= f->bound; /* false for NaN */
}

/* Draws arguments over the range, at its lower end and below, of small magnitude, and near integers and ends. */
static double sample64(const function *f, long n, random_source *r) {
    const double least = isinf(f->least64) ? -25 : f->least64, most = isinf(f->most64) ? 25 : f->most64;
    switch (n % 6) {
    case 0: return random_between(r, least, most);
    case 1: return random_between(r, -2, 2);
    case 2: return n % 4 == 0 ? least : nextafter(least, -INFINITY);
    case 3: return least - random_between(r, 0, 50);
    case 4: return (random_chance(r, 0.5) ? 1 : -1) * exp2(random_between(r, -60, 4));
    default: {
        const double x = rint(random_between(r, least, most)) / 2;
        return x + random_between(r, -1, 1) * 0x1p-40;
    }
    }
}

/* Tries floats in blocks of the same sign and exponent, all or some of each exponent; of doubles a sample. */
static void try_numbers(int which, bool f64) {
    enum { BLOCK = 1 << 11 };
    static double x[BLOCK], y[BLOCK]; /* or floats */
    const function *f = &functions[which];
    const int64_t blocks = f64 ? (quick ? 16 : 200) : (INT64_C(1) << 32) / BLOCK;
    const int64_t step = f64 || exhaustive ? 1 : quick ? 4099 : 499;
    double worst = 0;
    long bad = 0;
    for (int64_t block = 0; block < blocks; block += step) {
        random_source r = {(uint64_t)block};
        for (long i = 0; i < BLOCK; ++i) {
            real_set(x, f64, i, f64 ? sample64(f, i, &r) : (double)float_of((uint32_t)(block * BLOCK + i)));
        }
        kernel_of(sa_kernels_for(f64), which)(x, y, BLOCK);
        for (long i = 0; i < BLOCK; ++i) {
            bad += !good(f, f64, real_get(x, f64, i), real_get(y, f64, i), &worst);
        }
    }
    const char *dtype = f64 ? "float64" : "float32";
    CHECK(bad == 0, "%s: %ld %s are wrong; worst %.4f ulp", f->name, bad, dtype, worst);
    printf("%-10s %s %s: %.4f ulp%s\n", sa_isa_name(), f->name, dtype, worst, f64 || !exhaustive ? " (sample)" : "");
}

/* Tries special numbers in every lane and in the rest of a vector. */
static void special(int which) {
    const function *f = &functions[which];
    const bool bounded = f->right == right_tanh;
    const double x[] = {(double)NAN, (double)-INFINITY, 0.0, -0.0, -1e30, -1e300, (double)INFINITY};
    const double right[] = {(double)NAN,      bounded ? -1 : 0, !bounded, bounded ? -0.0 : 1,
                            bounded ? -1 : 0, bounded ? -1 : 0, 1};
    for (int n = 0; n < (bounded ? 7 : 6); ++n) {
        bool good = true;
        for (int length = 1; length <= 40; ++length) {
            for (int f64 = 0; f64 < 2; ++f64) {
                FREES_AT_END;
                void *from = zero_memory(41 * sizeof(double)), *to = dirty_memory(41 * sizeof(double));
                for (int i = 0; i <= length; ++i) {
                    real_set(from, f64, i, x[n]);
                }
                real_set(to, f64, length, 7);
                kernel_of(sa_kernels_for(f64), which)(from, to, length);
                good &= real_get(to, f64, length) == 7;
                for (int i = 0; i < length; ++i) {
                    const double y = real_get(to, f64, i);
                    good &= isnan(right[n]) ? isnan(y) : y == right[n] && signbit(y) == signbit(right[n]);
                }
            }
        }
        CHECK(good, "%s(%g) is not %g", f->name, x[n], right[n]);
    }
}

void test_exp(void) {
    for (int which = 0; which < 3; ++which) {
        special(which);
        try_numbers(which, false);
        try_numbers(which, true);
    }
}
