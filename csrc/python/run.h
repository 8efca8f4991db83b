/* Runs operations, and keeps the memory that they work in. */
#ifndef SA_PYTHON_RUN_H
#define SA_PYTHON_RUN_H

#include "python/binding.h"

#define SA_SMALL_ELEMENTS 2048 /* below: too little work to let go of the GIL */

/* Planned: arguments are checked, outputs made. */
typedef struct {
    sa_status planned; /* the other fields count only if SA_OK */
    int threads;
    size_t scratch_bytes;                                          /* of each thread */
    size_t shared_bytes;                                           /* after all scratch */
    bool small;                                                    /* too little work to let go of the GIL */
    sa_watch **watch;                                              /* for Ctrl-C; NULL: cannot be stopped */
    sa_status (*compute)(void *call, char *scratch, char *shared); /* 64-byte aligned */
    void *call;
} sa_job;

/* It fails before it computes, or because a signal's handler raised. */
int sa_run_job(PyObject *module, const sa_job *job);

/* 64-byte aligned. Calls reuse memory, since fresh pages take time (docs/decisions/0003-fused-training.md). A piece
 * holds a reference to the module. */
void *sa_arena_take(PyObject *module, size_t bytes);

/* Accepts NULL. Needs the GIL. */
void sa_arena_give(void *piece);

void sa_arena_clear(sa_state *state);

/* If keep is false, each call takes fresh memory and frees it. */
void sa_arena_keep(sa_state *state, bool keep);

#endif
