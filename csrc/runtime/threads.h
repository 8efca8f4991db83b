/* Threads: how many, and entering a parallel region so that fork() stays safe. Internal to csrc/. */
#ifndef SA_THREADS_H
#define SA_THREADS_H

#include <stddef.h>

/* Around every parallel region. A fork waits until no region runs, and no region starts while a fork is under way. */
void sa_region_enter(void);
void sa_region_leave(void);

/* A thread that stops amid its work, for what may take a while or needs a lock that a forking thread holds, lets forks pass meanwhile: from
 * pause on it is in no region, as far as they can tell. The number goes to resume, which waits for a fork that is under way. */
int sa_region_pause(void);
void sa_region_resume(int paused);

/* Returns when a count that others raise, one at a time, has come to `least`; what they wrote before is visible then. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count, ptrdiff_t to);

#endif
