/* Owns the pieces of memory that calls take and give back. Slots are exchanged atomically, for threads without a GIL. */
#include "python/run.h"

/* Larger pieces are freed: their arithmetic costs far more. */
#define SA_LARGEST_KEPT ((size_t)256 << 20)

/* Of pieces above SA_LARGE, the first slots keep two: a step of training takes one for what its forward pass keeps and one
 * to work in. The other slots keep smaller pieces alone. So at most 2·256 + 6·64 MB stay. */
#define SA_LARGE ((size_t)64 << 20)
#define SA_LARGE_SLOTS 2

/* glibc keeps twice the largest piece ever freed, but ignores 32 MB and more. */
#define SA_FREED_AT_FIRST ((size_t)31 << 20)

/* In front of the piece. */
typedef struct {
    void *memory; /* what malloc returned */
    size_t bytes;
    PyObject *module; /* owned while in use */
    char padding[64 - sizeof(void *) - sizeof(size_t) - sizeof(PyObject *)];
} header;

static void free_piece(header *h) {
    if (h != NULL) {
        PyMem_RawFree(h->memory);
    }
}

/* Results too, such as gradients. */
static void let_malloc_keep_results(sa_state *state) {
    if (!atomic_exchange(&state->malloc_keeps, true)) {
        PyMem_RawFree(PyMem_RawMalloc(SA_FREED_AT_FIRST));
    }
}

static header *new_piece(size_t bytes) {
    char *memory = bytes > PTRDIFF_MAX / 2 ? NULL : PyMem_RawMalloc(bytes + 2 * sizeof(header));
    if (memory == NULL) {
        sa_error(PyExc_MemoryError, "cannot allocate %zu bytes of memory to work in", bytes);
        return NULL;
    }
    header *h = (header *)(void *)(memory + (64 - (uintptr_t)memory % 64) % 64);
    h->memory = memory;
    h->bytes = bytes;
    return h;
}

typedef struct {
    _Atomic(void *) *slot;
    int n;
} slots;

static slots slots_for(sa_state *state, size_t bytes) {
    return bytes > SA_LARGE ? (slots){state->arena, SA_LARGE_SLOTS}
                            : (slots){state->arena + SA_LARGE_SLOTS, SA_ARENA_SLOTS - SA_LARGE_SLOTS};
}

/* False if the slot is full. */
static bool put(_Atomic(void *) *slot, header *h) {
    void *empty = NULL;
    return atomic_compare_exchange_strong(slot, &empty, h);
}

void *sa_arena_take(PyObject *module, size_t bytes) {
    sa_state *state = sa_state_of(module);
    const slots own = slots_for(state, bytes);
    header *h = NULL;
    for (int i = 0; i < own.n && h == NULL; ++i) {
        h = atomic_exchange(&own.slot[i], NULL);
        if (h != NULL && (h->bytes < bytes || h->bytes / 4 > bytes + 4096)) {
            free_piece(put(&own.slot[i], h) ? NULL : h);
            h = NULL;
        }
    }
    if (h == NULL) {
        let_malloc_keep_results(state);
        if ((h = new_piece(bytes)) == NULL) {
            return NULL;
        }
    }
    h->module = Py_NewRef(module);
    return h + 1;
}

void sa_arena_give(void *piece) {
    if (piece == NULL) {
        return;
    }
    header *h = (header *)piece - 1;
    PyObject *module = h->module;
    sa_state *state = sa_state_of(module);
    if (h->bytes <= SA_LARGEST_KEPT && !atomic_load(&state->frees_memory)) {
        const slots own = slots_for(state, h->bytes);
        for (int i = 0; i < own.n && h != NULL; ++i) {
            h = put(&own.slot[i], h) ? NULL : h;
        }
        if (h != NULL) { /* all full: replace each slot in turn */
            h = atomic_exchange(&own.slot[atomic_fetch_add(&state->next_slot, 1) % (unsigned)own.n], h);
        }
    }
    free_piece(h);
    Py_DECREF(module);
}

void sa_arena_clear(sa_state *state) {
    for (int i = 0; i < SA_ARENA_SLOTS; ++i) {
        free_piece(atomic_exchange(&state->arena[i], NULL));
    }
}

void sa_arena_keep(sa_state *state, bool keep) {
    atomic_store(&state->frees_memory, !keep);
    if (!keep) {
        sa_arena_clear(state);
    }
}
