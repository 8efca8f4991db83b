/* The optimisers against their formulas in double. Margins must survive. */
#include <math.h>
#include <stdlib.h>

#include "tests/test.h"

static double get(const array *a, ptrdiff_t i) { return array_get(a, 0, 1, 0, i); }

static void draw(array *a, ptrdiff_t n, sa_dtype dtype, double least, random_source *random) {
    const array_shape shape = {.rows = 1, .cols = n};
    array_make(a, &shape, dtype, 0, 0, true);
    for (ptrdiff_t i = 0; i < n; ++i) {
        element_set(array_at(a, 0, 1, 0, i), dtype, false, random_between(random, least, 1));
    }
}

/* The step in double: p, m and v change. */
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
    const sa_dtype dtype = f64 ? SA_F64 : SA_F32;
    array p, g, moments[2];
    draw(&p, n, dtype, -1, &random);
    draw(&g, n, dtype, -1, &random);
    draw(&moments[0], n, dtype, -1, &random);
    draw(&moments[1], n, dtype, 0, &random);
    const bool has_mean = u.kind == SA_ADAM || u.momentum > 0, has_square = u.kind == SA_ADAM;
    array *const arrays[3] = {&p, &moments[0], &moments[1]};
    double *expected = malloc(3 * (size_t)(n + 1) * sizeof *expected);
    for (ptrdiff_t i = 0; i < n; ++i) {
        double *to = expected + 3 * i;
        for (int part = 0; part < 3; ++part) {
            to[part] = get(arrays[part], i);
        }
        reference_step(&u, step, &to[0], get(&g, i), has_mean ? &to[1] : NULL, &to[2]);
    }
    sa_update_array one = {f64,
                           n,
                           step,
                           p.tensor.m.data,
                           g.tensor.m.data,
                           has_mean ? moments[0].tensor.m.data : NULL,
                           has_square ? moments[1].tensor.m.data : NULL};
    u.count = 1;
    u.arrays = &one;
    sa_update_run(&u, threads);
    double worst = 0;
    bool intact = array_margins_intact(&g);
    for (int part = 0; part < 3; ++part) {
        intact &= array_margins_intact(arrays[part]);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double error = fabs(get(arrays[part], i) - expected[3 * i + part]);
            worst = error <= worst ? worst : error; /* NaN counts */
        }
        array_free(arrays[part]);
    }
    array_free(&g);
    free(expected);
    /* some ten roundings of numbers up to 2; 1 − 0.999 is off by 1e-14 of itself */
    const double bound = 16 * (f64 ? 2.3e-16 : 1.2e-7);
    CHECK(worst <= bound && intact,
          "kind %d, n %td, float%d, step %ld, %d threads: off by %g, more than %g, or written beside the array", u.kind, n,
          f64 ? 64 : 32, (long)step, threads, worst, bound);
}

void test_update(void) {
    static const ptrdiff_t sizes[] = {0, 1, 3, 7, 8, 9, 15, 16, 17, 33, 8193, 100000};
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
