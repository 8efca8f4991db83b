/* The one way in which operations compute: scratch, the GIL, Ctrl-C, and what is raised. */
#ifndef SA_PYTHON_RUN_H
#define SA_PYTHON_RUN_H

#include "python/module.h"

/* A computation that is planned: its outputs are made and all arguments checked. */
typedef struct {
    sa_status planned; /* what planning returned; what follows counts only where it is SA_OK */
    int threads;
    size_t scratch_bytes; /* for each thread */
    size_t shared_bytes;  /* once, behind the scratch of all threads */
    bool small;           /* so little work that the GIL is kept: letting go of it would cost as much */
    sa_watch **watch;     /* where the core finds out about Ctrl-C; NULL: it cannot be stopped */
    sa_status (*compute)(void *call, char *scratch, char *shared); /* both 64-byte aligned */
    void *call;
} sa_job;

/* Runs it. Returns −1 with an exception: nothing was computed, or a signal's handler raised it. */
int sa_run_job(PyObject *module, const sa_job *job);

/* A block of at least so many bytes, 64-byte aligned, or NULL with a MemoryError. Blocks are kept from call to call, since
 * fresh pages are dear (docs/decisions/0003-fused-training.md). A block holds on to the module. */
void *sa_block_take(PyObject *module, size_t bytes);

/* Takes a block back, or NULL. With the GIL. */
void sa_block_give(void *block);

/* Frees the blocks that are kept, when the module goes. */
void sa_blocks_clear(sa_state *state);

#endif
