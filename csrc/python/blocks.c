/* Owns the blocks of memory that calls take and give back. Slots are exchanged atomically: threads without a GIL get a block
 * each, and at worst a race frees one more. */
#include "python/run.h"

/* Larger blocks go back to the system at once: their arithmetic costs far more. */
#define SA_LARGEST_KEPT ((size_t)64 << 20)

/* glibc keeps no more free memory than twice the largest block it has freed, and heeds no block of 32 MB or more. */
#define SA_FREED_AT_FIRST ((size_t)31 << 20)

/* Lies before the block. */
typedef struct {
    void *memory; /* what malloc returned */
    size_t bytes;
    PyObject *module; /* owned while the block is in use */
    char padding[64 - sizeof(void *) - sizeof(size_t) - sizeof(PyObject *)];
} header;

static void free_block(header *h) {
    if (h != NULL) {
        PyMem_RawFree(h->memory);
    }
}

/* Lets malloc keep results too, the gradients of a call for instance. */
static void let_malloc_keep_results(sa_state *state) {
    if (!atomic_exchange(&state->malloc_keeps, true)) {
        PyMem_RawFree(PyMem_RawMalloc(SA_FREED_AT_FIRST));
    }
}

static header *new_block(size_t bytes) {
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

/* Puts a block into the slot if that is empty. */
static bool put(_Atomic(void *) *slot, header *h) {
    void *empty = NULL;
    return atomic_compare_exchange_strong(slot, &empty, h);
}

void *sa_block_take(PyObject *module, size_t bytes) {
    sa_state *state = sa_state_of(module);
    header *h = NULL;
    for (int i = 0; i < SA_KEPT_BLOCKS && h == NULL; ++i) {
        h = atomic_exchange(&state->blocks[i], NULL);
        if (h != NULL && (h->bytes < bytes || h->bytes / 4 > bytes + 4096)) { /* too small, or far too large */
            free_block(put(&state->blocks[i], h) ? NULL : h);
            h = NULL;
        }
    }
    if (h == NULL) {
        let_malloc_keep_results(state);
        if ((h = new_block(bytes)) == NULL) {
            return NULL;
        }
    }
    h->module = Py_NewRef(module);
    return h + 1;
}

void sa_block_give(void *block) {
    if (block == NULL) {
        return;
    }
    header *h = (header *)block - 1;
    PyObject *module = h->module;
    sa_state *state = sa_state_of(module);
    if (h->bytes <= SA_LARGEST_KEPT) {
        for (int i = 0; i < SA_KEPT_BLOCKS && h != NULL; ++i) {
            h = put(&state->blocks[i], h) ? NULL : h;
        }
        if (h != NULL) { /* all slots are taken: they make room in turn */
            h = atomic_exchange(&state->blocks[atomic_fetch_add(&state->block_turn, 1) % SA_KEPT_BLOCKS], h);
        }
    }
    free_block(h);
    Py_DECREF(module);
}

void sa_blocks_clear(sa_state *state) {
    for (int i = 0; i < SA_KEPT_BLOCKS; ++i) {
        free_block(atomic_exchange(&state->blocks[i], NULL));
    }
}
