/* Threads: how many, the teams that compute together, and what fork() needs. Internal to csrc/. */
#ifndef SA_THREADS_H
#define SA_THREADS_H

#include <stddef.h>

/* Runs work(call, thread, team) for thread = 0 … team − 1 side by side, on at most so many threads, and returns when all have. One thread is
 * a plain call: a parallel region costs as much as a small call of the core. */
typedef void sa_team_work(void *call, int thread, int team);
void sa_run_team_of(int threads, sa_team_work *work, void *call);
static inline void sa_run_team(int threads, sa_team_work *work, void *call) {
    if (threads > 1) {
        sa_run_team_of(threads, work, call);
    } else {
        work(call, 0, 1);
    }
}

/* Tasks 0 … tasks − 1, independent, for a team whose threads all call this: whoever is free takes the next one. Nobody waits at the end. */
typedef void sa_task(void *call, ptrdiff_t t);
void sa_share_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call);

/* Returns when all threads of the team have called it. */
void sa_wait_for_team(int team);

/* The tasks from … end − 1 are a thread's own where each gets as many as the others, neighbours. */
typedef struct {
    ptrdiff_t from, end;
} sa_share;

static inline sa_share sa_share_of(ptrdiff_t tasks, int thread, int team) {
    if (team == 1) { /* without divisions, which a tiny call would feel */
        return (sa_share){0, tasks};
    }
    const ptrdiff_t each = tasks / team, more = tasks % team, from = thread * each + (thread < more ? thread : more);
    return (sa_share){from, from + each + (thread < more)};
}

/* 0 on the thread that made the call. */
int sa_thread_number(void);

/* A thread for each `enough` of the work, as long as there are tasks for them, and no more than `most`. */
static inline int sa_threads_for(double work, double enough, double tasks, int most) {
    if (work < enough) {
        return 1;
    }
    double threads = work / enough;
    threads = threads < tasks ? threads : tasks;
    return threads < most ? (threads < 1 ? 1 : (int)threads) : most;
}

/* Around every parallel region. A fork waits until no region runs, and no region starts while a fork is under way. */
void sa_region_enter(void);
void sa_region_leave(void);

/* A thread that stops amid its work, for long or for a lock that a forking thread may hold, lets forks pass: from pause on it is in no
 * region, as far as they can tell. The number goes to resume, which waits for a fork that is under way. */
int sa_region_pause(void);
void sa_region_resume(int paused);

/* Returns when a count that others raise, one at a time, has come to `least`; what they wrote before is visible then. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count, ptrdiff_t to);

#endif
