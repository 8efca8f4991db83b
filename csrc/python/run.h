/* Runs every operation: scratch, the GIL, Ctrl-C, exceptions. Also the blocks of memory (blocks.c). */
#ifndef SA_PYTHON_RUN_H
#define SA_PYTHON_RUN_H

#include "python/module.h"

/* A planned computation: arguments are checked, outputs made. */
typedef struct {
    sa_status planned; /* the rest counts only if SA_OK */
    int threads;
    size_t scratch_bytes; /* of each thread */
    size_t shared_bytes;  /* once, behind all scratch */
    bool small;           /* keeps the GIL: too little work to let go of it */
    sa_watch **watch;     /* where the core looks for Ctrl-C; NULL: cannot be stopped */
    sa_status (*compute)(void *call, char *scratch, char *shared); /* 64-byte aligned */
    void *call;
} sa_job;

/* −1 with an exception: nothing was computed, or a signal's handler raised. */
int sa_run_job(PyObject *module, const sa_job *job);

/* At least so many bytes, 64-byte aligned, or NULL with a MemoryError. Calls reuse blocks, since fresh pages are dear
 * (docs/decisions/0003-fused-training.md). A block holds a reference to the module. */
void *sa_block_take(PyObject *module, size_t bytes);

/* Takes a block back, or NULL. Needs the GIL. */
void sa_block_give(void *block);

/* Frees kept blocks with the module. */
void sa_blocks_clear(sa_state *state);

#endif
