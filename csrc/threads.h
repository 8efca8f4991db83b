/* Threads: how many, and entering a parallel region so that fork() stays safe. Internal to csrc/. */
#ifndef SA_THREADS_H
#define SA_THREADS_H

/* Around every parallel region. A fork waits until no region runs, and no region starts while a fork is under way. */
void sa_region_enter(void);
void sa_region_leave(void);

#endif
