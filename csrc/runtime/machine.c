/* Measures the limits of the machine: with the loops of kernels/loops.h, and with products of compact weights in L1. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include <time.h>

#include "runtime/dispatch.h"
#include "runtime/team.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { SA_LOOP_STEPS = 64, SA_LOOP_ROWS = 32 };

/* Multiplies a tile `rounds` times. Returns the number of multiplications and additions,
 * or 0 without a unit for them. */
static double product_loop(sa_weights kind, ptrdiff_t rounds) {
    const sa_compact_unit *unit = sa_compact_active(kind);
    char x[2 * SA_LOOP_ROWS * SA_LOOP_STEPS * SA_WORD] __attribute__((aligned(64)));
    char panel[SA_PANEL_COLUMNS * SA_LOOP_STEPS * SA_WORD] __attribute__((aligned(64)));
    float sums[SA_LOOP_ROWS * SA_PANEL_COLUMNS] __attribute__((aligned(64)));
    if (unit == NULL) {
        return 0;
    }
    for (size_t i = 0; i < sizeof x; ++i) { /* not zeros, which take less power; as bfloat16 from 1e-11 to 2e-4 */
        x[i] = panel[i % sizeof panel] = (char)(i * i % 13 + 45);
    }
    const sa_compact_tile t = {unit->most_rows, SA_LOOP_STEPS, x, SA_LOOP_STEPS * SA_WORD * (unit->widened ? 2 : 1),
                               panel,           sums};
    if (unit->start != NULL) {
        unit->start();
    }
    for (ptrdiff_t i = 0; i < rounds; ++i) {
        unit->leaf(&t);
    }
    if (unit->end != NULL) {
        unit->end();
    }
    const double numbers = SA_LOOP_STEPS * (kind == SA_WEIGHTS_INT8 ? 4 : 2);
    return 2.0 * (double)rounds * (double)unit->most_rows * SA_PANEL_COLUMNS * numbers;
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

typedef struct {
    sa_dtype dtype;
    double seconds, best[SA_MOST_THREADS];
} flops_of_threads;

/* Threads run for the same time and never wait. The best slice of each thread counts. */
static void measure_flops(void *call, int thread, int team) {
    (void)team;
    flops_of_threads *f = call;
    const double end = now() + f->seconds;
    for (double start = now(); start < end; start = now()) {
        const double flops = loop_of(f->dtype), rate = flops / (now() - start);
        f->best[thread] = rate > f->best[thread] ? rate : f->best[thread];
    }
}

double sa_measure_flops(sa_dtype dtype, int threads, double seconds) {
    flops_of_threads f = {.dtype = dtype, .seconds = seconds};
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
    uint64_t all; /* so that the compiler keeps the reads */
} reading;

static void read_portion(void *call, int thread, int team) {
    reading *r = call;
    const size_t portion = r->bytes / (size_t)team;
    const uint64_t sum = sa_kernels_active()->read_loop(r->data + (size_t)thread * portion, portion);
    __atomic_fetch_xor(&r->all, sum, __ATOMIC_RELAXED);
}

/* Each thread reads its portion of the bytes. The best pass counts. */
double sa_measure_read(const void *data, size_t bytes, int threads, double seconds) {
    reading r = {.data = data, .bytes = bytes};
    double best = 0;
    const double end = now() + seconds;
    do {
        const double start = now();
        sa_run_team(threads, read_portion, &r);
        const double rate = (double)bytes / (now() - start);
        best = rate > best ? rate : best;
    } while (now() < end);
    volatile uint64_t sink = r.all;
    (void)sink;
    return best;
}
