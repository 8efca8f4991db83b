/* Runs the loops of kernels/runtime/limits.h. */
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

/* Threads run apart for the same time: none waits. The best slice counts. */
double sa_measure_flops(bool f64, int threads, double seconds) {
    const sa_kernels *kernels = sa_kernels_active();
    double (*const loop)(ptrdiff_t) = f64 ? kernels->f64.fma_loop : kernels->f32.fma_loop;
    double total = 0;
    (void)threads;
    sa_region_enter();
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        const double end = now() + seconds;
        double best = 0;
        for (double start = now(); start < end; start = now()) {
            const double flops = loop(1000000);
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
    const double end = now() + seconds;
    do {
        const double start = now();
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(^ : all)
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
