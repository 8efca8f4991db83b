/* The number of threads, parallel regions, and fork(). */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* the lock that prefers writers */
#endif
#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#if defined(_OPENMP)
#include <omp.h>
#define LAYER "OpenMP"
#else
#define LAYER "none"
static int omp_get_max_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
static int omp_get_active_level(void) { return 0; }
static int omp_get_max_active_levels(void) { return 0; }
#endif

#include "selfattn.h"

/* sa_set_num_threads's number (0: none), and OpenMP's at that time. */
static atomic_int chosen_threads, openmp_then;

/* The number set here, or OpenMP's if lowered since, as by threadpoolctl. */
int sa_get_num_threads(void) {
    const int chosen = atomic_load(&chosen_threads), now = omp_get_max_threads();
    if (chosen == 0) {
        return now;
    }
    return now < atomic_load(&openmp_then) && now < chosen ? now : chosen;
}

void sa_set_num_threads(int n) {
    atomic_store(&openmp_then, omp_get_max_threads());
    atomic_store(&chosen_threads, n);
}

const char *sa_threading_layer(void) { return LAYER; }

int sa_thread_number(void) { return omp_get_thread_num(); }

/* OpenMP ends the process where it cannot start a thread: a container or ulimit has a limit, or memory is used up. So threads
 * that it does not keep are first started here, all at once, and it is asked for no more than could be had. */
static _Thread_local int team_kept; /* by OpenMP for this thread, which is one of them */

static void *wait_for_lock(void *lock) {
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

/* How many of these could be started. */
static int try_threads(int wanted) {
    pthread_t started[SA_MOST_THREADS];
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    sigset_t all, before;
    int n = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* they inherit it: signals are for others */
    pthread_mutex_lock(&lock);
    while (n < wanted && pthread_create(&started[n], NULL, wait_for_lock, &lock) == 0) {
        ++n;
    }
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < n; ++i) {
        pthread_join(started[i], NULL);
    }
    pthread_mutex_destroy(&lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

/* Teams that grow and shrink in turn are not tried each time. */
#define TRIED_FOR 0.05 /* seconds */

int sa_threads_to_be_had(int threads) {
    static _Thread_local int tried;
    static _Thread_local double until;
    const int kept = team_kept > 1 ? team_kept : 1;
    if (threads <= kept || omp_get_active_level() >= omp_get_max_active_levels()) {
        return threads;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (threads <= tried && seconds < until) {
        return threads;
    }
    const int wanted = (threads < SA_MOST_THREADS ? threads : SA_MOST_THREADS) - kept, started = try_threads(wanted);
    if (started < wanted) { /* one less, which leaves OpenMP the memory for its own */
        return started > 0 ? kept + started - 1 : kept;
    }
    tried = threads;
    until = seconds + TRIED_FOR;
    return threads;
}

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    sa_region_enter();
    threads = sa_threads_to_be_had(threads);
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (thread == 0 && omp_get_active_level() <= 1) {
            team_kept = team;
        }
        work(call, thread, team);
    }
    sa_region_leave();
}

#if defined(SA_TAKE_TURNS)
void sa_let_others_take(void) {
    if (omp_get_num_threads() > 1) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}
#endif

/* A team of one may be inside another's region: it must not meet its barriers. */
void sa_share_tasks(int team, ptrdiff_t tasks, sa_task *task, void *call) {
    if (team > 1) {
#pragma omp for schedule(dynamic, 1) nowait
        for (ptrdiff_t t = 0; t < tasks; ++t) {
            sa_let_others_take();
            task(call, t);
        }
        return;
    }
    for (ptrdiff_t t = 0; t < tasks; ++t) {
        task(call, t);
    }
}

void sa_wait_for_team(int team) {
    if (team > 1) {
#pragma omp barrier
    }
}

/* libgomp's threads do not survive fork(): a child that expects them hangs. So the forking thread gives its pool back,
 * and waits for running regions, which may hold OpenMP's locks. In Python it holds the GIL: a region must pause before it
 * takes the GIL. */
#if defined(PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP)
#define FRESH_LOCK PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP /* or threads that compute in turn starve a fork */
#else
#define FRESH_LOCK PTHREAD_RWLOCK_INITIALIZER
#endif
static pthread_rwlock_t region_lock = FRESH_LOCK;

/* Regions this thread is in: several if a signal's handler computes. */
static _Thread_local int depth;

void sa_region_enter(void) {
    if (depth++ == 0) {
        pthread_rwlock_rdlock(&region_lock);
    }
}

void sa_region_leave(void) {
    if (--depth == 0) {
        pthread_rwlock_unlock(&region_lock);
    }
}

int sa_region_pause(void) {
    const int paused = depth;
    depth = 0;
    if (paused > 0) {
        pthread_rwlock_unlock(&region_lock);
    }
    return paused;
}

void sa_region_resume(int paused) {
    if (paused > 0) {
        pthread_rwlock_rdlock(&region_lock);
    }
    depth = paused;
}

#if defined(_OPENMP)
/* GCC 9's libgomp has omp_pause_resource_all, but _OPENMP says 4.5. */
#if _OPENMP < 201811 && (defined(__clang__) || __GNUC__ < 9)
#error "this compiler's OpenMP cannot give its threads back before fork(): GCC 9 or Clang 11, or later, is needed"
#endif

/* A C signal handler may fork amid a region: it must not wait for itself. Python's run while the region is paused. */
static void before_fork(void) {
    if (depth == 0) {
        pthread_rwlock_wrlock(&region_lock);
        omp_pause_resource_all(omp_pause_hard);
        team_kept = 0;
    }
}

static void after_fork_parent(void) {
    if (depth == 0) {
        pthread_rwlock_unlock(&region_lock);
    }
}

static void after_fork_child(void) {
    /* The lock's state may name the parent's thread. */
    static const pthread_rwlock_t fresh = FRESH_LOCK;
    region_lock = fresh;
}

/* LLVM's libomp, which alone has this function, has fork handlers that take locks before ours run: regions would wait for
 * ever. */
int kmp_get_blocktime(void);
#pragma weak kmp_get_blocktime

__attribute__((constructor)) static void register_fork_handlers(void) {
    if (kmp_get_blocktime == NULL) {
        pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    }
}
#endif

/* The thread that is waited for may need this processor. */
#define SPINS 2000

void sa_wait_for(const ptrdiff_t *count, ptrdiff_t least) {
    for (int spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; ++spins) {
        if (spins >= SPINS) {
            sched_yield();
            continue;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

void sa_raise(ptrdiff_t *count, ptrdiff_t to) { __atomic_store_n(count, to, __ATOMIC_RELEASE); }
