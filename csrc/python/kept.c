/* Owns the memory of split weights. A slot is exchanged atomically: a call has its memory alone, and a second one of the same
 * model at the same time begins afresh. Which memory a call gets changes no result: the core looks at the weights themselves. */
#include "python/kept.h"

#include <stdlib.h>

#include "kernels/kernels.h"

typedef struct {
    const sa_kernels *kernels;
    const void *weight; /* the first: tells models apart */
    ptrdiff_t d, blocks;
} origin;

typedef struct {
    origin of;
    char padding[64 - sizeof(origin)];
} header;

static bool is_of(const origin *a, const origin *b) {
    return a->kernels == b->kernels && a->weight == b->weight && a->d == b->d && a->blocks == b->blocks;
}

char *sa_kept_take(PyObject *module, const sa_embedding *e) {
    const size_t bytes = e->blocks > 0 ? sa_embedding_kept_bytes(e) : 0;
    if (bytes == 0 || bytes > PTRDIFF_MAX / 2) {
        return NULL;
    }
    sa_state *state = sa_state_of(module);
    const origin of = {sa_kernels_active(), e->block[0].weight[SA_QUERY], e->d, e->blocks};
    for (int i = 0; i < SA_KEPT_MODELS; ++i) {
        header *h = atomic_exchange(&state->kept[i], NULL);
        if (h != NULL && is_of(&h->of, &of)) {
            return (char *)(h + 1);
        }
        void *empty = NULL;
        if (h != NULL && !atomic_compare_exchange_strong(&state->kept[i], &empty, h)) {
            free(h);
        }
    }
    header *h = aligned_alloc(64, (sizeof *h + bytes + 63) / 64 * 64);
    if (h == NULL) { /* weights are split in every call then */
        return NULL;
    }
    memset(h, 0, sizeof *h + bytes);
    h->of = of;
    return (char *)(h + 1);
}

void sa_kept_give(PyObject *module, char *kept) {
    if (kept == NULL) {
        return;
    }
    sa_state *state = sa_state_of(module);
    header *h = (header *)(void *)kept - 1;
    for (int i = 0; i < SA_KEPT_MODELS; ++i) {
        void *empty = NULL;
        if (atomic_compare_exchange_strong(&state->kept[i], &empty, h)) {
            return;
        }
    }
    const unsigned slot = atomic_fetch_add(&state->kept_turn, 1) % SA_KEPT_MODELS; /* all are taken: they make room in turn */
    free(atomic_exchange(&state->kept[slot], h));
}

void sa_kept_clear(sa_state *state) {
    for (int i = 0; i < SA_KEPT_MODELS; ++i) {
        free(atomic_exchange(&state->kept[i], NULL));
    }
}
