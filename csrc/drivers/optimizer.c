/* Driver of the optimisers: the scalars of every array, and the parallel loop over pieces of all arrays. */
#include <math.h>

#include "kernels/kernels.h"
#include "runtime/threads.h"

/* A piece of Adam takes some 10 µs: long enough to be handed to a thread, short enough to share an embedding table out. */
#define SA_UPDATE_PIECE 8192

/* Another thread pays from about this many elements per thread on, some 60 µs of Adam: it may have to be woken first. */
#define SA_UPDATES_PER_THREAD 65536

static sa_update_scalars scalars_of(const sa_update *u, const sa_update_array *array) {
    sa_update_scalars s = {.shrink = 1, .added_decay = u->weight_decay, .rate = u->lr};
    if (u->kind == SA_SGD) {
        s.keep_mean = u->momentum;
        s.take_mean = 1 - u->dampening;
        s.nesterov = u->nesterov;
        s.fresh = array->step == 1;
        return s;
    }
    if (u->decoupled) {
        s.shrink = 1 - u->lr * u->weight_decay;
        s.added_decay = 0;
    }
    s.keep_mean = u->beta1;
    s.take_mean = 1 - u->beta1;
    s.keep_square = u->beta2;
    s.take_square = 1 - u->beta2;
    s.rate = u->lr / (1 - pow(u->beta1, (double)array->step));
    s.root = 1 / sqrt(1 - pow(u->beta2, (double)array->step));
    s.eps = u->eps;
    return s;
}

static ptrdiff_t pieces_of(const sa_update_array *array) { return (array->n + SA_UPDATE_PIECE - 1) / SA_UPDATE_PIECE; }

/* Piece t of all arrays, counted through. */
static void run_piece(const sa_update *u, const sa_kernels *kernels, ptrdiff_t t) {
    const sa_update_array *array = u->arrays;
    for (; t >= pieces_of(array); ++array) {
        t -= pieces_of(array);
    }
    const sa_update_scalars s = scalars_of(u, array);
    const size_t size = array->f64 ? sizeof(double) : sizeof(float);
    const ptrdiff_t from = t * SA_UPDATE_PIECE, left = array->n - from;
    const size_t at = (size_t)from * size;
    const sa_real_kernels *real = array->f64 ? &kernels->f64 : &kernels->f32;
    real->update[u->kind](&s, (char *)array->parameter + at, (const char *)array->gradient + at,
                          array->mean ? (char *)array->mean + at : NULL, array->square ? (char *)array->square + at : NULL,
                          left < SA_UPDATE_PIECE ? left : SA_UPDATE_PIECE);
}

void sa_update_run(const sa_update *u, int max_threads) {
    const sa_kernels *kernels = sa_kernels_active();
    ptrdiff_t elements = 0, pieces = 0;
    for (ptrdiff_t i = 0; i < u->count; ++i) {
        elements += u->arrays[i].n;
        pieces += pieces_of(&u->arrays[i]);
    }
    ptrdiff_t threads = elements / SA_UPDATES_PER_THREAD;
    threads = threads < pieces ? threads : pieces;
    threads = threads < max_threads ? threads : max_threads;
#if defined(_OPENMP)
    if (threads > 1) {
        sa_region_enter();
        /* Independent: a piece writes its own elements. */
#pragma omp parallel for num_threads((int)threads) schedule(static)
        for (ptrdiff_t t = 0; t < pieces; ++t) {
            run_piece(u, kernels, t);
        }
        sa_region_leave();
        return;
    }
#endif
    for (ptrdiff_t t = 0; t < pieces; ++t) {
        run_piece(u, kernels, t);
    }
}
