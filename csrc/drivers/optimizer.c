/* Driver of the optimisers: each array's scalars, and the loop over pieces of all arrays. */
#include <math.h>

#include "drivers/optimizer.h"

#include "drivers/common.h"
#include "runtime/team.h"

/* Elements of a piece: worth a thread, and few enough to divide an embedding table among threads. */
#define SA_UPDATE_PIECE 8192

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

static ptrdiff_t pieces_of(const sa_update_array *array) { return sa_ceil_div(array->n, SA_UPDATE_PIECE); }

static ptrdiff_t count_pieces(const sa_update *u) {
    ptrdiff_t pieces = 0;
    for (ptrdiff_t i = 0; i < u->count; ++i) {
        pieces += pieces_of(&u->arrays[i]);
    }
    return pieces;
}

static void run_piece(const sa_update *u, ptrdiff_t t) {
    const sa_update_array *array = u->arrays;
    for (; t >= pieces_of(array); ++array) {
        t -= pieces_of(array);
    }
    const sa_update_scalars s = scalars_of(u, array);
    const size_t size = sa_element_size(array->f64);
    const ptrdiff_t from = t * SA_UPDATE_PIECE, left = array->n - from;
    const size_t at = (size_t)from * size;
    sa_kernels_for(array->f64)
        ->update[u->kind](&s, (char *)array->parameter + at, (const char *)array->gradient + at,
                          array->mean ? (char *)array->mean + at : NULL,
                          array->square ? (char *)array->square + at : NULL,
                          array->peak ? (char *)array->peak + at : NULL, sa_smaller(left, SA_UPDATE_PIECE));
}

/* Iterations are independent: a piece writes its own elements. */
static void run_portion(void *call, int thread, int team) {
    const sa_update *u = call;
    const sa_portion portion = sa_portion_of(count_pieces(u), thread, team);
    for (ptrdiff_t t = portion.from; t < portion.end; ++t) {
        run_piece(u, t);
    }
}

void sa_update_run(sa_update *u, int max_threads) {
    double elements = 0;
    for (ptrdiff_t i = 0; i < u->count; ++i) {
        elements += (double)u->arrays[i].n;
    }
    sa_run_team(sa_threads_for(elements, SA_UPDATES_PER_THREAD, (double)count_pieces(u), max_threads), run_portion, u);
}
