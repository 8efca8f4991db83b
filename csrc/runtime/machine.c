/* Measures the limits of the machine by the loops of kernels/loops.h. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include <time.h>

#include "kernels/kernels.h"
#include "runtime/team.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
    double (*loop)(ptrdiff_t rounds);
    double seconds, best[SA_MOST_THREADS];
} flops_of_threads;

/* Threads run for the same time and never wait. Each one's best slice counts. */
static void measure_flops(void *call, int thread, int team) {
    (void)team;
    flops_of_threads *f = call;
    const double end = now() + f->seconds;
    for (double start = now(); start < end; start = now()) {
        const double flops = f->loop(1000000), rate = flops / (now() - start);
        f->best[thread] = rate > f->best[thread] ? rate : f->best[thread];
    }
}

double sa_measure_flops(bool f64, int threads, double seconds) {
    const sa_kernels *kernels = sa_kernels_active();
    flops_of_threads f = {.loop = f64 ? kernels->f64.fma_loop : kernels->f32.fma_loop, .seconds = seconds};
    sa_run_team(threads, measure_flops, &f);
    double total = 0;
    for (int t = 0; t < SA_MOST_THREADS; ++t) {
        total += f.best[t];
    }
    return total;
}

typedef struct {
    const char *data;
    size_t bytes;
    uint64_t all; /* keeps the reads */
} reading;

static void read_share(void *call, int thread, int team) {
    reading *r = call;
    const size_t share = r->bytes / (size_t)team;
    const uint64_t sum = sa_kernels_active()->read_loop(r->data + (size_t)thread * share, share);
    __atomic_fetch_xor(&r->all, sum, __ATOMIC_RELAXED);
}

/* Each thread reads its own share; the best pass counts. */
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds) {
    reading r = {.data = data, .bytes = bytes};
    double best = 0;
    const double end = now() + seconds;
    do {
        const double start = now();
        sa_run_team(threads, read_share, &r);
        const double rate = (double)bytes / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    volatile uint64_t sink = r.all;
    (void)sink;
    return best;
}
