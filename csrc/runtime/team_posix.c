/* Runs a team on POSIX threads of its own: for compilers without OpenMP, such as Apple's, and for ThreadSanitizer,
 * which does not understand OpenMP's library. */
#if !defined(_OPENMP) && !defined(__wasm__)
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* for sched_getaffinity */
#endif
#include "runtime/members.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

const char *sa_team_name(void) { return "POSIX threads"; }

const char *sa_team_library(void) { return ""; }

int sa_usable_cpus(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return sa_at_most_limit(CPU_COUNT(&set));
    }
#endif
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return sa_at_most_limit(n < 1 ? 1 : n < SA_MOST_THREADS ? (int)n : SA_MOST_THREADS);
}

/* The first number of OMP_NUM_THREADS, by which people limit every library,
 * or else the number of this process's CPUs. */
static int first_number_of_threads(void) {
    const char *text = getenv("OMP_NUM_THREADS");
    if (text != NULL) {
        char *end;
        errno = 0;
        const long n = strtol(text, &end, 10);
        if (end != text && (*end == '\0' || *end == ',') && errno == 0 && n >= 1) {
            return n < SA_MOST_THREADS ? (int)n : SA_MOST_THREADS;
        }
    }
    return sa_usable_cpus();
}

int sa_team_threads(void) {
    static int number; /* the number when the library was loaded */
    if (number == 0) {
        number = first_number_of_threads();
    }
    return number;
}

/* A thread that helps any thread that computes. Workers do not end; they sleep if there is no work for a while. */
typedef struct worker {
    _Alignas(64) _Atomic(sa_team *) team; /* the team to join; NULL: none, or joined; ASLEEP: wake the worker first */
    int number;                           /* its number in that team */
    struct worker *next;                  /* the next in a list of workers */
    pthread_mutex_t lock;                 /* protects the change to ASLEEP */
    pthread_cond_t woken;
} worker;

static sa_team asleep;
#define ASLEEP (&asleep)

static worker workers[SA_MOST_THREADS];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static int started;          /* workers started so far */
static worker *free_workers; /* the one that worked last comes first, as it is still awake */

/* The worker takes the team to begin, or the caller takes it back to do that work itself.
 * True for the one that is first. */
static bool take_from(worker *w, sa_team *team) { return atomic_compare_exchange_strong(&w->team, &team, NULL); }

static void sleep_until_given(worker *w) {
    sa_team *team = NULL;
    if (atomic_compare_exchange_strong(&w->team, &team, ASLEEP)) {
        pthread_mutex_lock(&w->lock);
        while (atomic_load(&w->team) == ASLEEP) {
            pthread_cond_wait(&w->woken, &w->lock);
        }
        pthread_mutex_unlock(&w->lock);
    }
}

static void *work_for_ever(void *argument) {
    worker *w = argument;
    sa_member m = {.helps = true};
    sa_become_member(&m);
    for (int n = 0;; ++n) {
        sa_team *team = atomic_load_explicit(&w->team, memory_order_acquire);
        if (team != NULL && take_from(w, team)) {
            sa_work_as(&m, team, w->number, team->size);
            atomic_fetch_sub_explicit(&team->working, 1, memory_order_release); /* the team may be gone after this */
            n = 0;
        } else if (n < SA_PATIENCE) { /* stay awake for the next call of a loop in Python, as waking takes time */
            sa_wait_more(n);
        } else {
            sleep_until_given(w);
            n = 0;
        }
    }
    return NULL;
}

static void give_work(worker *w, sa_team *team, int number) {
    w->number = number;
    if (atomic_exchange(&w->team, team) == ASLEEP) {
        pthread_mutex_lock(&w->lock);
        pthread_cond_signal(&w->woken);
        pthread_mutex_unlock(&w->lock);
    }
}

/* The bytes of a thread's stack. Kernels need less than a tenth of it; the default of macOS and musl is smaller. */
#define STACK ((size_t)1 << 20)

/* Starts one more worker. Returns NULL if the system has no thread. The caller holds the lock. */
static worker *start_worker(void) {
    worker *w = &workers[started];
    atomic_store(&w->team, NULL);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->woken, NULL);
    pthread_attr_t how;
    if (pthread_attr_init(&how) != 0) {
        return NULL;
    }
    pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&how, STACK);
    sa_signals before;
    sa_block_signals(&before); /* the worker inherits the mask */
    pthread_t thread;
    const bool runs = pthread_create(&thread, &how, work_for_ever, w) == 0;
    sa_unblock_signals(&before);
    pthread_attr_destroy(&how);
    started += runs;
    return runs ? w : NULL;
}

/* Returns a list of at most `wanted` free workers. In all there are no more workers than the CPUs or the largest team
 * need: Python threads that compute at the same time divide the workers. */
static worker *take_workers(int wanted, int *got) {
    worker *taken = NULL;
    pthread_mutex_lock(&pool_lock);
    for (*got = 0; *got < wanted; ++*got) {
        worker *w = free_workers;
        if (w != NULL) {
            free_workers = w->next;
        } else if ((started >= wanted && started >= sa_usable_cpus() - 1) || (w = start_worker()) == NULL) {
            break;
        }
        w->next = taken;
        taken = w;
    }
    pthread_mutex_unlock(&pool_lock);
    return taken;
}

static void give_back(worker *taken) {
    pthread_mutex_lock(&pool_lock);
    while (taken != NULL) {
        worker *w = taken;
        taken = w->next;
        w->next = free_workers;
        free_workers = w;
    }
    pthread_mutex_unlock(&pool_lock);
}

#if defined(SA_SHOW_RACES)
enum { SPINS_BEFORE_TAKING = SA_PATIENCE }; /* one thread alone shows no race */
#else
enum { SPINS_BEFORE_TAKING = 100 }; /* takes about a microsecond */
#endif

static bool others_work(sa_team *team) { return atomic_load_explicit(&team->working, memory_order_acquire) > 0; }

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    int got = 0;
    worker *taken = NULL;
    if (sa_has_key && sa_me() == NULL) { /* a signal handler that computes during a team's work computes alone */
        taken = take_workers((threads < SA_MOST_THREADS ? threads : SA_MOST_THREADS) - 1, &got);
    }
    sa_member m = {.helps = false};
    if (got == 0 || pthread_setspecific(sa_mine, &m) != 0) {
        give_back(taken);
        work(call, 0, 1);
        return;
    }
    sa_team team = {.work = work, .call = call, .size = got + 1, .working = got};
    int next = 1;
    for (worker *w = taken; w != NULL; w = w->next) {
        give_work(w, &team, next++);
    }
    sa_work_as(&m, &team, 0, team.size);
    /* A worker that has not begun may still be waking up, or waiting for a processor. The caller soon does its work. */
    for (int n = 0; n < SPINS_BEFORE_TAKING && others_work(&team); ++n) {
        sa_wait_more(n);
    }
    for (worker *w = taken; others_work(&team) && w != NULL; w = w->next) {
        if (take_from(w, &team)) {
            sa_work_as(&m, &team, w->number, team.size);
            atomic_fetch_sub_explicit(&team.working, 1, memory_order_relaxed);
        }
    }
    pthread_setspecific(sa_mine, NULL);
    for (int n = 0; others_work(&team); n = sa_one_more(n)) {
        sa_wait_more(n);
    }
    give_back(taken);
}

/* A forked child has only the forking thread, and starts new workers. The parent's workers continue. */
static void before_fork(void) { pthread_mutex_lock(&pool_lock); }

static void after_fork_parent(void) { pthread_mutex_unlock(&pool_lock); }

static void after_fork_child(void) {
    started = 0;
    free_workers = NULL;
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pool_lock = fresh;
}

bool sa_begin_teams(void) { return pthread_atfork(before_fork, after_fork_parent, after_fork_child) == 0; }
#endif
