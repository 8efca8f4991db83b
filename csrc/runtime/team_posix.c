/* The number of threads, teams that compute together, fork(). The threads are POSIX's: there is no OpenMP, which macOS lacks, which ends
 * the process where no thread is to be had, and which hangs in a child of fork(). */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "runtime/team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "selfattn.h"

/* ------------------------------------------------------------------------------------------------------ how many */

static int cpus(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n < SA_MOST_THREADS ? (int)n : SA_MOST_THREADS;
}

/* OMP_NUM_THREADS, by which people limit all that computes: its first number, if there is one. Else the CPUs that this process may
 * use. */
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
    return cpus();
}

static int first_number; /* as the library was loaded */
static atomic_int chosen_number;

int sa_get_num_threads(void) {
    const int chosen = atomic_load_explicit(&chosen_number, memory_order_relaxed);
    return chosen > 0 ? chosen : first_number;
}

void sa_set_num_threads(int n) { atomic_store_explicit(&chosen_number, n, memory_order_relaxed); }

/* ------------------------------------------------------------------------------------------------------- waiting */

/* What is waited for comes in microseconds as a rule. After SPINS the thread that is waited for may need this processor; after YIELDS
 * (some milliseconds) it takes long. */
enum { SPINS = 2000, YIELDS = 10000, NAP = 50000 /* ns */ };

static void pause_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The n-th wait in a row. */
static void wait_more(int n) {
    if (n < SPINS) {
        pause_a_moment();
    } else if (n < SPINS + YIELDS) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
    }
}

static inline int one_more(int n) { return n < SPINS + YIELDS ? n + 1 : n; }

void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least) {
    for (int n = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; n = one_more(n)) {
        wait_more(n);
    }
}

void sa_raise(ptrdiff_t *count, ptrdiff_t to) { __atomic_store_n(count, to, __ATOMIC_RELEASE); }

/* -------------------------------------------------------------------------------------------------------- a team */

typedef struct {
    sa_team_work *work;
    void *call;
    int size;
    _Alignas(64) atomic_int working;    /* other threads that have not ended */
    _Alignas(64) atomic_ptrdiff_t next; /* task of all that are shared by now, one behind the other */
    _Alignas(64) atomic_int arrived;    /* at the barrier */
    atomic_uint barriers;               /* passed */
} sa_team;

/* What a thread does in a team. */
typedef struct {
    sa_team *team;
    bool helps;
    ptrdiff_t first; /* of the next tasks to be shared */
} sa_member;

/* Where a thread finds its own; none: it is in no team, or in one of it alone. Variables of the kind _Thread_local would be
 * allocated where a thread first reads them, and without memory the system ends the process then. */
static pthread_key_t mine;
static bool has_key; /* not behind a thousand of other libraries: then each thread computes alone */

static sa_member *me(void) { return has_key ? pthread_getspecific(mine) : NULL; }

bool sa_is_helper(void) {
    const sa_member *m = me();
    return m != NULL && m->helps;
}

#if defined(SA_TAKE_TURNS)
void sa_let_others_take(void) {
    if (me() != NULL) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}
#endif

/* A team of one may be inside another's: it must not take the tasks of that. */
void sa_share_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call) {
    if (team == 1) {
        for (ptrdiff_t t = 0; t < tasks; ++t) {
            task(call, t);
        }
        return;
    }
    /* All threads share the same tasks in the same order, and none gets here before all tasks until `first` are taken. */
    sa_member *m = me();
    const ptrdiff_t first = m->first, end = first + tasks;
    ptrdiff_t t = atomic_load_explicit(&m->team->next, memory_order_relaxed);
    while (t < end) {
        sa_let_others_take();
        if (atomic_compare_exchange_weak_explicit(&m->team->next, &t, t + 1, memory_order_relaxed, memory_order_relaxed)) {
            task(call, t - first);
            t = atomic_load_explicit(&m->team->next, memory_order_relaxed);
        }
    }
    m->first = end;
}

void sa_wait_for_team(int team) {
    if (team == 1) {
        return;
    }
    sa_team *t = me()->team;
    const unsigned passed = atomic_load_explicit(&t->barriers, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) == t->size - 1) {
        atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&t->barriers, passed + 1, memory_order_release);
        return;
    }
    for (int n = 0; atomic_load_explicit(&t->barriers, memory_order_acquire) == passed; n = one_more(n)) {
        wait_more(n);
    }
}

/* ------------------------------------------------------------------------------------------------------- workers */

/* Threads that help whoever computes. They stay, and sleep when nothing is to be done for a while. */
typedef struct worker {
    _Alignas(64) _Atomic(sa_team *) team; /* that it is given to; NULL: none, or it has begun there; ASLEEP: it must be woken */
    int number;                           /* in that team */
    struct worker *next;                  /* in a list */
    pthread_mutex_t lock;                 /* of falling asleep */
    pthread_cond_t woken;
} worker;

static sa_team asleep;
#define ASLEEP (&asleep)

static worker workers[SA_MOST_THREADS];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static int started;          /* of the workers */
static worker *free_workers; /* who worked last comes first: it is awake */

static void do_part(sa_member *m, sa_team *team, int number) {
    m->team = team;
    m->first = 0;
    team->work(team->call, number, team->size);
}

/* Whether the worker was still given to this team, and no longer is: it begins, or its part is taken from it. */
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
    while (pthread_setspecific(mine, &m) != 0) { /* for the 33rd key of a process it takes memory */
        wait_more(SPINS + YIELDS);
    }
    for (int n = 0;; ++n) {
        sa_team *team = atomic_load_explicit(&w->team, memory_order_acquire);
        if (team != NULL && take_from(w, team)) {
            do_part(&m, team, w->number);
            atomic_fetch_sub_explicit(&team->working, 1, memory_order_release); /* the team may be gone behind this */
            n = 0;
        } else if (n < SPINS + YIELDS) { /* calls of a loop in Python find it awake: to wake it takes time */
            wait_more(n);
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

/* A thread's stack, in bytes: no kernel needs a tenth of it; macOS and musl give a thread less than that. */
#define STACK ((size_t)1 << 20)

/* One more worker, or NULL if the system has no thread. The lock is held. */
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
    sigset_t all, before;
    sigfillset(&all); /* it inherits this: signals are for others, but for those that say what it did itself */
    const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    for (size_t i = 0; i < sizeof own / sizeof *own; ++i) {
        sigdelset(&all, own[i]);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool runs = pthread_create(&thread, &how, work_for_ever, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&how);
    started += runs;
    return runs ? w : NULL;
}

/* At most so many free workers, in a list. There are as many in all as the CPUs or the largest team keep busy: many Python threads
 * that compute at once share them. */
static worker *take_workers(int wanted, int *got) {
    worker *taken = NULL;
    pthread_mutex_lock(&pool_lock);
    for (*got = 0; *got < wanted; ++*got) {
        worker *w = free_workers;
        if (w != NULL) {
            free_workers = w->next;
        } else if ((started >= wanted && started >= cpus() - 1) || (w = start_worker()) == NULL) {
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

#if defined(SA_TAKE_TURNS)
enum { SPINS_BEFORE_TAKING = SPINS + YIELDS }; /* what one thread did alone shows no race */
#else
enum { SPINS_BEFORE_TAKING = 100 }; /* about a microsecond */
#endif

static bool others_work(sa_team *team) { return atomic_load_explicit(&team->working, memory_order_acquire) > 0; }

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    int got = 0;
    worker *taken = NULL;
    if (has_key && me() == NULL) { /* a handler of signals computes amid a team's work, and alone */
        taken = take_workers((threads < SA_MOST_THREADS ? threads : SA_MOST_THREADS) - 1, &got);
    }
    sa_member m = {.helps = false};
    if (got == 0 || pthread_setspecific(mine, &m) != 0) {
        give_back(taken);
        work(call, 0, 1);
        return;
    }
    sa_team team = {.work = work, .call = call, .size = got + 1, .working = got};
    int next = 1;
    for (worker *w = taken; w != NULL; w = w->next) {
        give_work(w, &team, next++);
    }
    do_part(&m, &team, 0);
    /* Who has not begun is not waited for long: it may be waking up, or have no processor. */
    for (int n = 0; n < SPINS_BEFORE_TAKING && others_work(&team); ++n) {
        wait_more(n);
    }
    for (worker *w = taken; others_work(&team) && w != NULL; w = w->next) {
        if (take_from(w, &team)) {
            do_part(&m, &team, w->number);
            atomic_fetch_sub_explicit(&team.working, 1, memory_order_relaxed);
        }
    }
    pthread_setspecific(mine, NULL);
    for (int n = 0; others_work(&team); n = one_more(n)) {
        wait_more(n);
    }
    give_back(taken);
}

/* ---------------------------------------------------------------------------------------------------------- fork */

/* A child has the forking thread alone, so its workers start anew. The parent's go on. */
static void before_fork(void) { pthread_mutex_lock(&pool_lock); }

static void after_fork_parent(void) { pthread_mutex_unlock(&pool_lock); }

static void after_fork_child(void) {
    started = 0;
    free_workers = NULL;
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pool_lock = fresh;
}

__attribute__((constructor)) static void begin(void) {
    first_number = first_number_of_threads();
    has_key = pthread_key_create(&mine, NULL) == 0;
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}
