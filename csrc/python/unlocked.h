/* Computing without the GIL, and yet stopping on Ctrl-C: the GIL is taken back now and then to let Python handle signals. */
#ifndef SA_PYTHON_UNLOCKED_H
#define SA_PYTHON_UNLOCKED_H

#include "python/module.h"

typedef struct {
    sa_watch watch; /* first: the core hands out a pointer to it */
    PyThreadState *thread;
    int64_t next; /* when to look again, in nanoseconds */
} sa_unlocked;

/* Lets go of the GIL. The watch is for the core, and good until sa_lock_again. */
sa_watch *sa_unlock(sa_unlocked *u);
/* Takes the GIL back. If the core returned SA_CANCELLED, an exception is set. */
void sa_lock_again(sa_unlocked *u);

#endif
