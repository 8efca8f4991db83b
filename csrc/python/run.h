/* Runs operations, and keeps their scratch memory. */
#ifndef SA_PYTHON_RUN_H
#define SA_PYTHON_RUN_H

#include "python/binding.h"

#define SA_SMALL_ELEMENTS 2048 /* calls with fewer elements keep the GIL */

/* A job that is planned: its arguments are checked, its outputs made. */
typedef struct {
    sa_status planned; /* the other fields are valid only if this is SA_OK */
    int threads;
    size_t scratch_bytes;                                          /* scratch of each thread */
    size_t shared_bytes;                                           /* bytes in one piece with all scratch */
    bool small;                                                    /* too little work to release the GIL */
    sa_watch **watch;                                              /* for Ctrl-C; NULL: the job cannot be stopped */
    sa_status (*compute)(void *call, char *scratch, char *shared); /* scratch and shared are 64-byte aligned */
    void *call;
} sa_job;

/* Fails before it computes, or because a signal handler raised an exception. */
int sa_run_job(PyObject *module, const sa_job *job);

/* Returns a piece of memory, 64-byte aligned, which holds a reference to the module. Calls reuse pieces, since fresh
 * pages take time (docs/decisions/0003-fused-training.md). */
void *sa_arena_take(PyObject *module, size_t bytes);

/* Accepts NULL. Needs the GIL. */
void sa_arena_give(void *piece);

void sa_arena_clear(sa_state *state);

/* If keep is false, each call allocates memory and frees it. */
void sa_arena_keep(sa_state *state, bool keep);

#endif
