/* Members of teams, for the files runtime/team*.c alone: both ways of running a team use them.
 * A thread-local key finds a member's team. */
#ifndef SA_MEMBERS_H
#define SA_MEMBERS_H

#include "runtime/team.h"

#include <pthread.h>
#if !defined(_WIN32)
#include <signal.h>
#endif
#include <stdatomic.h>

/* Counts the tasks of a portion that are taken, in all calls of sa_take_tasks so far. */
typedef struct {
    _Alignas(64) atomic_ptrdiff_t taken;
} sa_portion_count;
enum { SA_MOST_PORTIONS = 8 };

typedef struct {
    sa_team_work *work;
    void *call;
    int size;                        /* this field and the next are for POSIX threads */
    _Alignas(64) atomic_int working; /* other threads that have not ended */
    sa_portion_count portions[SA_MOST_PORTIONS];
    _Alignas(64) atomic_int arrived; /* threads that wait at the barrier */
    atomic_uint barriers;            /* barriers that the team has passed */
} sa_team;

/* A thread of a team. */
typedef struct {
    sa_team *team;
    bool helps;
    int number;
    ptrdiff_t taken; /* the tasks of each portion that calls of sa_take_tasks before the next one have */
} sa_member;

/* The key of a thread's sa_member; the member is NULL if the thread computes alone. A _Thread_local variable would be
 * allocated when a thread first reads it, and without memory the system would then end the process. */
extern pthread_key_t sa_mine;
extern bool sa_has_key; /* false if other libraries have taken all keys; then each thread computes alone */

static inline sa_member *sa_me(void) { return sa_has_key ? pthread_getspecific(sa_mine) : NULL; }

/* Does the work of thread `number` of a team of `size`. */
static inline void sa_work_as(sa_member *m, sa_team *team, int number, int size) {
    m->team = team;
    m->number = number;
    m->taken = 0;
    team->work(team->call, number, size);
}

/* Waits if the system has no memory for the key: the 33rd key of a process needs some. */
void sa_become_member(sa_member *m);

/* Waits for the n-th time in a row. Most waits take microseconds. After SA_SPINS waits the other thread may need this
 * processor; after SA_YIELDS more (some milliseconds) the wait will be long. */
enum { SA_SPINS = 2000, SA_YIELDS = 10000, SA_PATIENCE = SA_SPINS + SA_YIELDS };
void sa_wait_more(int n);
static inline int sa_one_more(int n) { return n < SA_PATIENCE ? n + 1 : n; }

/* Blocks all signals but a thread's own errors: here until sa_unblock_signals,
 * and for good in threads that start meanwhile. Windows runs the handler of Ctrl-C on a thread of its own. */
#if defined(_WIN32)
typedef int sa_signals;
static inline void sa_block_signals(sa_signals *before) { *before = 0; }
static inline void sa_unblock_signals(const sa_signals *before) { (void)before; }
#else
typedef sigset_t sa_signals;
void sa_block_signals(sa_signals *before);
static inline void sa_unblock_signals(const sa_signals *before) { pthread_sigmask(SIG_SETMASK, before, NULL); }
#endif

/* Returns n, or the number given to sa_limit_num_threads if that is less. */
int sa_at_most_limit(int n);

/* team_openmp.c and team_posix.c each define the following. */
int sa_team_threads(void); /* the number of threads that the environment sets for the calling thread */
bool sa_begin_teams(void); /* called when the library is loaded; false: threads compute alone */

#endif
