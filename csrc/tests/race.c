/* ThreadSanitizer must see the teams of runtime/team.h: it reports `race`, where two threads add to one number, and
 * does not report `race ordered`, where they add in order. */
#include <stdio.h>
#include <string.h>

#include "runtime/team.h"

static int shared;
static ptrdiff_t raised, taken[64];

static void add_at_once(void *call, int thread, int team) {
    (void)call, (void)thread, (void)team;
    ++shared;
}

static void take(void *call, ptrdiff_t t) {
    (void)call;
    taken[t] = t + shared;
}

/* Uses every way in which drivers order their threads: a count that is raised, a barrier, shared tasks,
 * the end of a team. */
static void add_in_order(void *call, int thread, int team) {
    (void)call;
    sa_wait_for(&raised, thread);
    ++shared;
    sa_raise(&raised, thread + 1);
    sa_wait_for_team(team);
    sa_take_tasks(team, 64, take, NULL);
}

int main(int argc, char **argv) {
    const int ordered = argc > 1 && strcmp(argv[1], "ordered") == 0;
    ptrdiff_t sum = 0;
    for (int round = 0; round < 20; ++round) {
        raised = 0;
        sa_run_team(2, ordered ? add_in_order : add_at_once, NULL);
        for (int t = 0; t < 64; ++t) {
            sum += taken[t];
        }
    }
    printf("%d %td\n", shared, sum);
    return 0;
}
