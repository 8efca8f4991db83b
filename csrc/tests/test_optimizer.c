/* The optimisers must have the bits of plain C, which Python's tests check against formulas. Margins must not change. */
#include <string.h>

#include "tests/test.h"

enum { PARAMETER, GRADIENT, MEAN, SQUARE, UPDATE_ARRAYS };

static void take_step(sa_update u, ptrdiff_t n, bool f64, int64_t step, int threads, array *arrays) {
    random_source random = {(uint64_t)n * 7 + (uint64_t)step};
    const array_shape shape = {.rows = 1, .cols = n};
    const sa_dtype dtype = f64 ? SA_F64 : SA_F32;
    void *data[UPDATE_ARRAYS];
    for (int which = 0; which < UPDATE_ARRAYS; ++which) {
        array_make(&arrays[which], &shape, dtype, 0, 0, true);
        array_draw(&arrays[which], which == SQUARE ? 0 : -1, 1, &random);
        data[which] = arrays[which].tensor.m.data;
    }
    const bool has_mean = u.kind == SA_ADAM || u.momentum > 0, has_square = u.kind == SA_ADAM;
    sa_update_array one = {
        f64, n, step, data[PARAMETER], data[GRADIENT], has_mean ? data[MEAN] : NULL, has_square ? data[SQUARE] : NULL};
    u.count = 1;
    u.arrays = &one;
    sa_update_run(&u, threads);
}

static void try_step(const sa_update *u, ptrdiff_t n, bool f64, int64_t step, int threads) {
    FREES_AT_END;
    const char *isa = sa_isa_name();
    array expected[UPDATE_ARRAYS], got[UPDATE_ARRAYS];
    take_step(*u, n, f64, step, threads, got);
    CHECK(sa_isa_set("generic") == SA_OK, "plain C");
    take_step(*u, n, f64, step, 1, expected);
    CHECK(sa_isa_set(isa) == SA_OK, "and back");
    for (int which = 0; which < UPDATE_ARRAYS; ++which) {
        CHECK(array_margins_intact(&got[which]) && memcmp(got[which].memory, expected[which].memory, got[which].bytes) == 0,
              "kind %d, n %td, float%d, step %ld, %d threads: other bits in array %d, or written outside it", u->kind, n,
              f64 ? 64 : 32, (long)step, threads, which);
    }
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
                try_step(&rules[rule], sizes[i], f64, 1, 1);
                try_step(&rules[rule], sizes[i], f64, 7, 3);
            }
        }
    }
}
