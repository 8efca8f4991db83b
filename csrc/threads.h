/* Threads: how many, and entering a parallel region so that fork() stays safe. Internal to csrc/. */
#ifndef SA_THREADS_H
#define SA_THREADS_H

#include <stddef.h>

/* Around every parallel region. A fork waits until no region runs, and no region starts while a fork is under way. */
void sa_region_enter(void);
void sa_region_leave(void);

/* Returns when a count that another thread raises has come to `least`; what that thread wrote before is visible then. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count);

#endif
