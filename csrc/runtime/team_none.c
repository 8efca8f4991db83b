/* A team where there are no threads, as in a browser: the caller alone.
 * It replaces team.c and the other ways of running a team. */
#if defined(__wasm__)
#include "runtime/team.h"

#include "selfattn.h"

int sa_most_threads(void) { return 1; }

int sa_get_num_threads(void) { return 1; }

void sa_set_num_threads(int n) { (void)n; }

void sa_limit_num_threads(int n) { (void)n; }

const char *sa_team_name(void) { return "no threads"; }

const char *sa_team_library(void) { return ""; }

bool sa_is_helper(void) { return false; }

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    (void)threads;
    work(call, 0, 1);
}

void sa_take_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call) {
    (void)team;
    for (ptrdiff_t t = 0; t < tasks; ++t) {
        task(call, t);
    }
}

void sa_wait_for_team(int team) { (void)team; }

/* The only thread has raised the count before it waits for it. */
void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least) { (void)count, (void)least; }

void sa_raise(ptrdiff_t *count, ptrdiff_t to) { *count = to; }
#endif
