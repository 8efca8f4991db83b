/* The number of threads, teams that compute together, fork(). */
#ifndef SA_TEAM_H
#define SA_TEAM_H

#include <stdbool.h>
#include <stddef.h>

/* Runs work on each thread of a team, whose first thread is the caller, and returns when all are done. The team may have fewer
 * threads than `threads`, if the system has no more or other teams compute. A team of one is a plain call, and so is one inside
 * another. */
typedef void sa_team_work(void *call, int thread, int team);
#define SA_MOST_THREADS 1024
void sa_run_team_of(int threads, sa_team_work *work, void *call);
static inline void sa_run_team(int threads, sa_team_work *work, void *call) {
    if (threads > 1) {
        sa_run_team_of(threads, work, call);
    } else {
        work(call, 0, 1);
    }
}

/* Called before a thread takes a task. Small calls end before a second thread has begun; for the sanitizer of threads the first
 * waits. */
#if defined(SA_SHOW_RACES)
void sa_let_others_take(void);
#else
static inline void sa_let_others_take(void) {}
#endif

/* Every thread of the team calls this, and takes the next task when it is free. No thread waits at the end. */
typedef void sa_task(void *call, ptrdiff_t t);
void sa_share_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call);

void sa_wait_for_team(int team);

/* A thread's equal share of neighbouring tasks: from … end − 1. */
typedef struct {
    ptrdiff_t from, end;
} sa_share;

static inline sa_share sa_share_of(ptrdiff_t tasks, int thread, int team) {
    if (team == 1) { /* spares a tiny call the divisions */
        return (sa_share){0, tasks};
    }
    const ptrdiff_t each = tasks / team, more = tasks % team, from = thread * each + (thread < more ? thread : more);
    return (sa_share){from, from + each + (thread < more)};
}

/* The most threads that the calling thread may have: OpenMP's number if that was lowered after the library was loaded, as
 * threadpoolctl and PyTorch do. */
int sa_most_threads(void);

/* The name of what runs teams, and the library's file ("": none). */
const char *sa_team_name(void);
const char *sa_team_library(void);

/* True if this thread helps a team and is not the one that called. */
bool sa_is_helper(void);

/* One thread for each `enough` of the work (constants SA_…_PER_THREAD), but at most `tasks` and `most` threads. */
static inline int sa_threads_for(double work, double enough, double tasks, int most) {
    if (work < enough) {
        return 1;
    }
    double threads = work / enough;
    threads = threads < tasks ? threads : tasks;
    return threads < most ? (threads < 1 ? 1 : (int)threads) : most;
}

/* Returns when other threads have raised a count to `least`; all that they wrote before is visible then. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count, ptrdiff_t to);

#endif
