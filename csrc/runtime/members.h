/* What both ways of running a team share (team.c): its members, who find it by a key. Only for runtime/team*.c. */
#ifndef SA_MEMBERS_H
#define SA_MEMBERS_H

#include "runtime/team.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

typedef struct {
    sa_team_work *work;
    void *call;
    int size;                           /* POSIX threads' alone, and the next: */
    _Alignas(64) atomic_int working;    /* other threads that have not ended */
    _Alignas(64) atomic_ptrdiff_t next; /* task of all that are shared by now, one after the other */
    _Alignas(64) atomic_int arrived;    /* at the barrier */
    atomic_uint barriers;               /* passed */
} sa_team;

/* What a thread does in a team. */
typedef struct {
    sa_team *team;
    bool helps;
    ptrdiff_t first; /* of the next tasks to be shared */
} sa_member;

/* Where a thread finds its sa_member; NULL: it is in no team, or alone in one. Variables of the kind _Thread_local would be allocated
 * where a thread first reads them, and without memory the system ends the process then. */
extern pthread_key_t sa_mine;
extern bool sa_has_key; /* false if other libraries took all keys: then each thread computes alone */

static inline sa_member *sa_me(void) { return sa_has_key ? pthread_getspecific(sa_mine) : NULL; }

/* Does the work of one thread of a team of `size`. */
static inline void sa_work_as(sa_member *m, sa_team *team, int number, int size) {
    m->team = team;
    m->first = 0;
    team->work(team->call, number, size);
}

/* Waits for memory where the key needs some: the 33rd of a process does. */
void sa_become_member(sa_member *m);

/* The n-th wait in a row. What is waited for comes in microseconds as a rule. After SA_SPINS the thread that is waited for may need
 * this processor; after SA_YIELDS (some milliseconds) it takes long. */
enum { SA_SPINS = 2000, SA_YIELDS = 10000, SA_PATIENCE = SA_SPINS + SA_YIELDS };
void sa_wait_more(int n);
static inline int sa_one_more(int n) { return n < SA_PATIENCE ? n + 1 : n; }

/* Between these no signal reaches this thread, nor ever a thread that it starts: signals are for others, but for those that say what
 * a thread did itself. */
void sa_block_signals(sigset_t *before);
static inline void sa_unblock_signals(const sigset_t *before) { pthread_sigmask(SIG_SETMASK, before, NULL); }

/* Each way's own (team_openmp.c, team_posix.c). */
int sa_team_threads(void); /* as many as the environment gives the calling thread */
bool sa_begin_teams(void); /* as the library is loaded; false: threads compute alone */

#endif
