/* The number of threads, teams of threads that compute together, and fork(). */
#ifndef SA_TEAM_H
#define SA_TEAM_H

#include <stdbool.h>
#include <stddef.h>

/* Calls work on each thread of a team, whose first thread is the caller, and returns when all calls have ended. The
 * team has fewer threads than `threads` if the system has no more or if other teams compute. A team of one, or inside
 * another team, is a plain call. */
typedef void sa_team_work(void *call, int thread, int team);
#if defined(__wasm__)
#define SA_MOST_THREADS 1 /* team_none.c */
#else
#define SA_MOST_THREADS 1024
#endif
void sa_run_team_of(int threads, sa_team_work *work, void *call);
static inline void sa_run_team(int threads, sa_team_work *work, void *call) {
    if (threads > 1) {
        sa_run_team_of(threads, work, call);
    } else {
        work(call, 0, 1);
    }
}

/* Called before a thread takes a task. Small calls end before a second thread has begun;
 * for ThreadSanitizer the first thread waits. */
#if defined(SA_SHOW_RACES)
void sa_let_others_take(void);
#else
static inline void sa_let_others_take(void) {}
#endif

/* Every thread of the team calls this, and takes tasks: first of its own portion, then of others.
 * No thread waits at the end. */
typedef void sa_task(void *call, ptrdiff_t t);
void sa_take_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call);

void sa_wait_for_team(int team);

/* A thread's portion of the tasks, equal to the others': tasks from … end − 1. */
typedef struct {
    ptrdiff_t from, end;
} sa_portion;

static inline sa_portion sa_portion_of(ptrdiff_t tasks, int thread, int team) {
    if (team == 1) { /* a tiny call needs no divisions */
        return (sa_portion){0, tasks};
    }
    const ptrdiff_t each = tasks / team, more = tasks % team, from = thread * each + (thread < more ? thread : more);
    return (sa_portion){from, from + each + (thread < more)};
}

/* The most threads that the calling thread may use: OpenMP's number if somebody, such as threadpoolctl or PyTorch, has
 * lowered it after the library was loaded. */
int sa_most_threads(void);

/* The CPUs that this process may use, by affinity and by what sa_limit_num_threads was given. */
int sa_usable_cpus(void);

/* The name of the library or system that runs teams, and the library's file ("" if there is none). */
const char *sa_team_name(void);
const char *sa_team_library(void);

/* True if this thread is in a team and is not the caller. */
bool sa_is_helper(void);

/* Returns a thread for each `enough` of the work (see the constants SA_…_PER_THREAD),
 * at most `tasks` and at most `most`. */
static inline int sa_threads_for(double work, double enough, double tasks, int most) {
    if (work < enough) {
        return 1;
    }
    double threads = work / enough;
    threads = threads < tasks ? threads : tasks;
    return threads < most ? (threads < 1 ? 1 : (int)threads) : most;
}

/* Returns when other threads have raised a count to `least`. All that they wrote before is then visible. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least);
void sa_raise(ptrdiff_t *count, ptrdiff_t to);

#endif
