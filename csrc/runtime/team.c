/* Counts threads, and implements waiting, and the tasks and barriers of a team.
 * team_openmp.c or team_posix.c runs the team. */
#if !defined(__wasm__)
#include "runtime/members.h"

#include <sched.h>
#include <time.h>

#include "selfattn.h"

static int first_number; /* the number when the library was loaded */
static atomic_int chosen_number, limit = SA_MOST_THREADS;

int sa_most_threads(void) {
    const int now = sa_team_threads();
    return now < first_number ? now : SA_MOST_THREADS;
}

int sa_get_num_threads(void) {
    const int chosen = atomic_load_explicit(&chosen_number, memory_order_relaxed), most = sa_most_threads();
    const int n = chosen > 0 ? chosen : sa_at_most_limit(sa_team_threads());
    return n < most ? n : most;
}

int sa_at_most_limit(int n) {
    const int most = atomic_load_explicit(&limit, memory_order_relaxed);
    return n < most ? n : most;
}

void sa_limit_num_threads(int n) { atomic_store_explicit(&limit, n, memory_order_relaxed); }

void sa_set_num_threads(int n) { atomic_store_explicit(&chosen_number, n, memory_order_relaxed); }

enum { NAP = 50000 /* nanoseconds */ };

static void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void sa_wait_more(int n) {
    if (n < SA_SPINS) {
        pause_a_moment();
    } else if (n < SA_PATIENCE) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    }
}

void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least) {
    for (int n = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; n = sa_one_more(n)) {
        sa_wait_more(n);
    }
}

void sa_raise(ptrdiff_t *count, ptrdiff_t to) { __atomic_store_n(count, to, __ATOMIC_RELEASE); }

pthread_key_t sa_mine;
bool sa_has_key;

void sa_become_member(sa_member *m) {
    while (pthread_setspecific(sa_mine, m) != 0) {
        sa_wait_more(SA_PATIENCE);
    }
}

bool sa_is_helper(void) {
    const sa_member *m = sa_me();
    return m != NULL && m->helps;
}

#if !defined(_WIN32)
void sa_block_signals(sa_signals *before) {
    sigset_t all;
    sigfillset(&all);
    const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    for (size_t i = 0; i < sizeof own / sizeof *own; ++i) {
        sigdelset(&all, own[i]);
    }
    pthread_sigmask(SIG_SETMASK, &all, before);
}
#endif

#if defined(SA_SHOW_RACES)
void sa_let_others_take(void) {
    if (sa_me() != NULL) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}
#endif

void sa_take_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call) {
    if (team == 1) { /* the caller may be in a larger team, whose tasks it must leave alone */
        for (ptrdiff_t t = 0; t < tasks; ++t) {
            task(call, t);
        }
        return;
    }
    /* Tasks are in portions. A thread begins with its own, whose rows are often in its caches from the phase before,
     * and then takes what is left of others. All threads call this for the same tasks in the same order, and leave when
     * all are taken. */
    sa_member *m = sa_me();
    const int portions = team < SA_MOST_PORTIONS ? team : SA_MOST_PORTIONS, own = m->number * portions / team;
    /* The last portions may have a task less. */
    const ptrdiff_t before = m->taken, end = before + (tasks + portions - 1) / portions;
    for (int i = 0; i < portions; ++i) {
        const sa_portion portion = sa_portion_of(tasks, (own + i) % portions, portions);
        atomic_ptrdiff_t *taken = &m->team->portions[(own + i) % portions].taken;
        ptrdiff_t n = atomic_load_explicit(taken, memory_order_relaxed);
        while (n < end) {
            sa_let_others_take();
            if (atomic_compare_exchange_weak_explicit(taken, &n, n + 1, memory_order_relaxed, memory_order_relaxed)) {
                if (portion.from + n - before < portion.end) {
                    task(call, portion.from + n - before);
                }
                n = atomic_load_explicit(taken, memory_order_relaxed);
            }
        }
    }
    m->taken = end;
}

void sa_wait_for_team(int team) {
    if (team == 1) {
        return;
    }
    sa_team *t = sa_me()->team;
    const unsigned passed = atomic_load_explicit(&t->barriers, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == team - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->barriers, passed + 1, memory_order_release);
        return;
    }
    for (int n = 0; atomic_load_explicit(&t->barriers, memory_order_acquire) == passed; n = sa_one_more(n)) {
        sa_wait_more(n);
    }
}

__attribute__((constructor)) static void begin(void) {
    first_number = sa_team_threads();
    sa_has_key = pthread_key_create(&sa_mine, NULL) == 0 && sa_begin_teams();
}
#endif
