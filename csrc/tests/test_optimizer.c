/* The optimisers against their formulas in double, element by element, with margins that must survive. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

/* One array with a margin on either side; sizes go around the vectors of every instruction set and over the piece. */
#define MARGIN 16

typedef struct {
    ptrdiff_t n;
    bool f64;
    char *memory;
} numbers;

static size_t size_of(const numbers *a) { return a->f64 ? sizeof(double) : sizeof(float); }
static void *data_of(const numbers *a) { return a->memory + MARGIN * size_of(a); }
static double get(const numbers *a, ptrdiff_t i) {
    return a->f64 ? ((const double *)(const void *)a->memory)[MARGIN + i]
                  : (double)((const float *)(const void *)a->memory)[MARGIN + i];
}

static numbers make(ptrdiff_t n, bool f64, random_source *random, double least) {
    numbers a = {n, f64, NULL};
    a.memory = calloc((size_t)n + 2 * MARGIN, size_of(&a));
    for (ptrdiff_t i = 0; a.memory != NULL && i < n; ++i) {
        const double x = random_between(random, least, 1);
        if (f64) {
            ((double *)(void *)a.memory)[MARGIN + i] = x;
        } else {
            ((float *)(void *)a.memory)[MARGIN + i] = (float)x;
        }
    }
    return a;
}

static bool margins_are_clear(const numbers *a) {
    bool clear = true;
    for (ptrdiff_t i = 0; i < MARGIN; ++i) {
        clear &= get(a, -1 - i) == 0 && get(a, a->n + i) == 0;
    }
    return clear;
}

/* The same step in double: p, m and v become what they should be. */
static void reference_step(const sa_update *u, int64_t step, double *p, double g, double *m, double *v) {
    if (u->kind == SA_ADAM) {
        if (u->decoupled) {
            *p *= 1 - u->lr * u->weight_decay;
        } else {
            g += u->weight_decay * *p;
        }
        *m = u->beta1 * *m + (1 - u->beta1) * g;
        *v = u->beta2 * *v + (1 - u->beta2) * g * g;
        const double m_hat = *m / (1 - pow(u->beta1, (double)step)), v_hat = *v / (1 - pow(u->beta2, (double)step));
        *p -= u->lr * m_hat / (sqrt(v_hat) + u->eps);
        return;
    }
    g += u->weight_decay * *p;
    if (m != NULL) {
        *m = step == 1 ? g : u->momentum * *m + (1 - u->dampening) * g;
        g = u->nesterov ? g + u->momentum * *m : *m;
    }
    *p -= u->lr * g;
}

static void try_step(sa_update u, ptrdiff_t n, bool f64, int64_t step, int threads) {
    random_source random = {(uint64_t)n * 7 + (uint64_t)step};
    numbers p = make(n, f64, &random, -1), g = make(n, f64, &random, -1), m = make(n, f64, &random, -1),
            v = make(n, f64, &random, 0);
    const bool has_mean = u.kind == SA_ADAM || u.momentum > 0, has_square = u.kind == SA_ADAM;
    double *expected = malloc(3 * (size_t)(n + 1) * sizeof *expected);
    for (ptrdiff_t i = 0; i < n; ++i) {
        double *to = expected + 3 * i;
        to[0] = get(&p, i);
        to[1] = get(&m, i);
        to[2] = get(&v, i);
        reference_step(&u, step, &to[0], get(&g, i), has_mean ? &to[1] : NULL, &to[2]);
    }
    sa_update_array one = {
        f64, n, step, data_of(&p), data_of(&g), has_mean ? data_of(&m) : NULL, has_square ? data_of(&v) : NULL};
    u.count = 1;
    u.arrays = &one;
    sa_update_run(&u, threads);
    double worst = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double got[3] = {get(&p, i), get(&m, i), get(&v, i)};
        for (int part = 0; part < 3; ++part) {
            const double error = fabs(got[part] - expected[3 * i + part]);
            worst = error > worst ? error : worst;
        }
    }
    /* some ten roundings of numbers of at most 2; and 1 − 0.999 is off by 1e-14 of itself */
    const double bound = 16 * (f64 ? 2.3e-16 : 1.2e-7);
    CHECK(worst <= bound && margins_are_clear(&p) && margins_are_clear(&m) && margins_are_clear(&v),
          "kind %d, n %td, float%d, step %ld, %d threads: off by %g, more than %g, or written beside the array", u.kind, n,
          f64 ? 64 : 32, (long)step, threads, worst, bound);
    free(p.memory);
    free(g.memory);
    free(m.memory);
    free(v.memory);
    free(expected);
}

void test_update(void) {
    static const ptrdiff_t sizes[] = {0, 1, 3, 7, 8, 9, 15, 16, 17, 33, 8192, 8193, 500000};
    const sa_update rules[] = {
        {.kind = SA_SGD, .lr = 0.1},
        {.kind = SA_SGD, .lr = 0.1, .weight_decay = 0.3, .momentum = 0.9, .dampening = 0.2},
        {.kind = SA_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = true},
        {.kind = SA_ADAM, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
        {.kind = SA_ADAM, .lr = 0.1, .weight_decay = 0.3, .beta1 = 0.5, .beta2 = 0.8, .eps = 1e-3},
        {.kind = SA_ADAM, .lr = 0.1, .weight_decay = 0.3, .beta1 = 0, .beta2 = 0.8, .eps = 1e-3, .decoupled = true},
    };
    for (size_t rule = 0; rule < sizeof rules / sizeof *rules; ++rule) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            for (int f64 = 0; f64 < 2; ++f64) {
                try_step(rules[rule], sizes[i], f64, 1, 1);
                try_step(rules[rule], sizes[i], f64, 7, 3);
            }
        }
    }
}
