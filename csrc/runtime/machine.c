/* Runs the loops of kernels/runtime/limits.h, and products of compact weights on data in L1. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include <time.h>

#include "kernels/kernels.h"
#include "runtime/threads.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { SA_LOOP_STEPS = 64, SA_LOOP_ROWS = 32 };

/* Multiplies a tile again and again, and returns multiplications and additions. */
static double product_loop(sa_weights kind, ptrdiff_t rounds) {
    const sa_compact_products *products = sa_compact_active(kind);
    char x[2 * SA_LOOP_ROWS * SA_LOOP_STEPS * SA_WORD] __attribute__((aligned(64)));
    char panel[SA_PANEL_COLUMNS * SA_LOOP_STEPS * SA_WORD] __attribute__((aligned(64)));
    float sums[SA_LOOP_ROWS * SA_PANEL_COLUMNS] __attribute__((aligned(64)));
    if (products == NULL) {
        return 0;
    }
    for (size_t i = 0; i < sizeof x; ++i) { /* on zeros a CPU would clock higher; of bfloat16 these are from 1e-12 to 8 */
        x[i] = panel[i % sizeof panel] = (char)(i * i % 13 + 45);
    }
    const sa_compact_tile t = {
        products->most_rows, SA_LOOP_STEPS, x, SA_LOOP_STEPS * SA_WORD * (products->widened ? 2 : 1), panel, sums};
    if (products->open != NULL) {
        products->open();
    }
    for (ptrdiff_t i = 0; i < rounds; ++i) {
        products->leaf(&t);
    }
    if (products->close != NULL) {
        products->close();
    }
    const double numbers = SA_LOOP_STEPS * (kind == SA_WEIGHTS_INT8 ? 4 : 2);
    return 2.0 * (double)rounds * (double)products->most_rows * SA_PANEL_COLUMNS * numbers;
}

static double loop_of(sa_dtype dtype) {
    const sa_kernels *kernels = sa_kernels_active();
    switch (dtype) {
    case SA_I8: return product_loop(SA_WEIGHTS_INT8, 1000);
    case SA_BF16: return product_loop(SA_WEIGHTS_BF16, 1000);
    case SA_F64: return kernels->f64.fma_loop(1000000);
    default: return kernels->f32.fma_loop(1000000);
    }
}

/* Threads run apart for the same time: none waits. The best slice counts. */
double sa_measure_flops(sa_dtype dtype, int threads, double seconds) {
    double total = 0;
    sa_region_enter();
    threads = sa_threads_to_be_had(threads);
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        const double end = now() + seconds;
        double best = 0;
        for (double start = now(); start < end; start = now()) {
            const double flops = loop_of(dtype);
            const double rate = flops / (now() - start);
            best = rate > best ? rate : best;
        }
        total += best;
    }
    sa_region_leave();
    return total;
}

/* Each thread reads its own share; the best pass counts. */
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds) {
    const sa_kernels *kernels = sa_kernels_active();
    const size_t share = bytes / (size_t)threads;
    double best = 0;
    uint64_t all = 0;
    sa_region_enter();
    const int team = sa_threads_to_be_had(threads);
    (void)team; /* without OpenMP */
    const double end = now() + seconds;
    do {
        const double start = now();
#pragma omp parallel for num_threads(team) schedule(static, 1) reduction(^ : all)
        for (int t = 0; t < threads; ++t) { /* independent: own shares */
            all ^= kernels->read_loop((const char *)data + (size_t)t * share, share);
        }
        const double rate = (double)(share * (size_t)threads) / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    sa_region_leave();
    volatile uint64_t sink = all; /* keeps the reads */
    (void)sink;
    return best;
}
