/* Runs a phase of the transformer: independent tasks that the threads of a share take. */
#include "drivers/transformer_tasks.h"

#include "runtime/team.h"

typedef struct {
    const sa_token_share *p;
    sa_share_task *task;
} phase;

static void run_task(void *call, ptrdiff_t t) {
    const phase *run = call;
    if (!sa_stops(run->p->e->watch)) {
        run->task(run->p, t);
    }
}

/* Independent: a task writes its own rows or columns. Of a call that is cancelled, what is left falls out; all threads go on
 * to the end, and meet where they would have met. */
void sa_run_phase(const sa_token_share *p, ptrdiff_t tasks, sa_share_task *task, sa_order order) {
    phase run = {p, task};
    if (order == SA_BY_TURNS) {
        sa_share_tasks(p->team, tasks, run_task, &run);
    } else {
        const sa_share share = sa_share_of(tasks, p->thread, p->team);
        for (ptrdiff_t t = share.from; t < share.end && !sa_stops(p->e->watch); ++t) {
            task(p, t);
        }
    }
    if (order != SA_BY_ROWS_AND_ON) {
        sa_wait_for_team(p->team);
    }
}
