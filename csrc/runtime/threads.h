/* How many threads, teams that compute together, and fork(). */
#ifndef SA_THREADS_H
#define SA_THREADS_H

#include <stddef.h>

/* Runs work(call, thread, team) once on each thread of a team of at most so many, and returns when all have. A team of
 * one makes a plain call, with no region. */
typedef void sa_team_work(void *call, int thread, int team);
void sa_run_team_of(int threads, sa_team_work *work, void *call);
static inline void sa_run_team(int threads, sa_team_work *work, void *call) {
    if (threads > 1) {
        sa_run_team_of(threads, work, call);
    } else {
        work(call, 0, 1);
    }
}

/* Runs independent tasks 0 … tasks − 1 on a team whose threads all call this. Whoever is free takes the next; nobody
 * waits at the end. */
typedef void sa_task(void *call, ptrdiff_t t);
void sa_share_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call);

/* Returns when the whole team has called it. */
void sa_wait_for_team(int team);

/* A thread's tasks from … end − 1, where all get equal shares of neighbours. */
typedef struct {
    ptrdiff_t from, end;
} sa_share;

static inline sa_share sa_share_of(ptrdiff_t tasks, int thread, int team) {
    if (team == 1) { /* a tiny call would feel the divisions */
        return (sa_share){0, tasks};
    }
    const ptrdiff_t each = tasks / team, more = tasks % team, from = thread * each + (thread < more ? thread : more);
    return (sa_share){from, from + each + (thread < more)};
}

int sa_thread_number(void);

/* A thread for each `enough` of the work, at most one per task and `most`. */
static inline int sa_threads_for(double work, double enough, double tasks, int most) {
    if (work < enough) {
        return 1;
    }
    double threads = work / enough;
    threads = threads < tasks ? threads : tasks;
    return threads < most ? (threads < 1 ? 1 : (int)threads) : most;
}

/* Around every parallel region: a fork waits for regions, and regions for a fork. */
void sa_region_enter(void);
void sa_region_leave(void);

/* Between pause and resume a thread amid a region lets forks pass: while it stops for long, or for a lock that a forking
 * thread may hold. The number goes to resume, which waits for a fork under way. */
int sa_region_pause(void);
void sa_region_resume(int paused);

/* Returns when a count that others raise has come to `least`; what they wrote before is visible then. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count, ptrdiff_t to);

#endif
