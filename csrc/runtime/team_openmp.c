/* Runs a team as a parallel region of OpenMP, whose threads other libraries share, such as PyTorch. */
#if defined(_OPENMP)
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* dladdr */
#endif
#include "runtime/members.h"

#include <dlfcn.h>
#include <omp.h>
#include <stdlib.h>

#include "selfattn.h"

const char *sa_team_name(void) { return "OpenMP"; }

const char *sa_team_library(void) {
    Dl_info found;
    return dladdr((void *)(size_t)omp_get_max_threads, &found) != 0 && found.dli_fname != NULL ? found.dli_fname : "";
}

int sa_team_threads(void) {
    const int most = omp_get_thread_limit() < SA_MOST_THREADS ? omp_get_thread_limit() : SA_MOST_THREADS;
    return omp_get_max_threads() < most ? omp_get_max_threads() : most;
}

/* The threads that libgomp keeps for the calling thread, which is one of them. A smaller region would end the others, and the next
 * large one start new ones. So regions keep their size for a while, and the threads that a team does not need do nothing in them. */
typedef struct {
    int size;
    int calls, needed; /* calls since all of size was needed, and the most threads that one needed */
} pool;
enum { CALLS_BEFORE_SHRINKING = 100 };

static pthread_key_t kept; /* of a thread's pool, freed when the thread ends, as libgomp's is */

static pool *my_pool(void) {
    pool *p = pthread_getspecific(kept);
    if (p == NULL && (p = calloc(1, sizeof *p)) != NULL) {
        p->size = 1;
        if (pthread_setspecific(kept, p) != 0) {
            free(p);
            p = NULL;
        }
    }
    return p;
}

/* The size of a team's region. */
static int region_for(pool *p, int team) {
    if (team >= p->size) {
        p->calls = p->needed = 0;
        return team;
    }
    p->needed = team > p->needed ? team : p->needed;
    const int most = sa_get_num_threads(), size = p->size < most ? p->size : most;
    if (++p->calls <= CALLS_BEFORE_SHRINKING) {
        return size > team ? size : team;
    }
    const int needed = p->needed;
    p->calls = p->needed = 0;
    return needed;
}

/* libgomp ends the process if it cannot start a thread, where a container or ulimit has a limit or there is no memory. So as many
 * threads as it would start are started here first, all at once. */
#define MEMORY_FOR(threads) ((size_t)(threads) * 1024 + 16384) /* bytes; libgomp allocates less for a team */

static void *wait_for_lock(void *lock) {
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

/* How many of `wanted` threads the system has. */
static int threads_that_start(int wanted) {
    pthread_t started[SA_MOST_THREADS];
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int n = 0;
    pthread_mutex_lock(&lock);
    while (n < wanted && pthread_create(&started[n], NULL, wait_for_lock, &lock) == 0) {
        ++n;
    }
    void *volatile memory = malloc(MEMORY_FOR(wanted));
    const bool enough = memory != NULL;
    free(memory);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < n; ++i) {
        pthread_join(started[i], NULL);
    }
    pthread_mutex_destroy(&lock);
    return n == wanted && enough ? n : n > 0 ? n - 1 : 0;
}

static void run_region(pool *p, int threads, sa_team_work *work, void *call) {
    int size = region_for(p, threads);
    const bool grows = size > p->size;
    sigset_t before;
    if (grows) {
        sa_block_signals(&before);
        size = p->size + threads_that_start(size - p->size);
    }
    if (size == 1) {
        sa_unblock_signals(&before);
        work(call, 0, 1);
        return;
    }
    sa_team team = {.work = work, .call = call};
#pragma omp parallel num_threads(size)
    {
        const int number = omp_get_thread_num(), all = omp_get_num_threads(); /* OMP_DYNAMIC and limits may give fewer */
        const int n = threads < all ? threads : all;
        if (number == 0) {
            if (grows) {
                sa_unblock_signals(&before);
            }
            p->size = all;
        }
        if (number < n) {
            sa_member m = {.helps = number > 0};
            sa_become_member(&m);
            sa_work_as(&m, &team, number, n);
            pthread_setspecific(sa_mine, NULL);
        }
    }
}

/* Threads in teams, and those that had to compute alone. */
static atomic_int computing;

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    pool *p = sa_has_key && !omp_in_parallel() ? my_pool() : NULL;
    if (p == NULL) {
        work(call, 0, 1);
        return;
    }
    const int most = sa_most_threads(), wanted = threads < most ? threads : most;
    int others = atomic_load_explicit(&computing, memory_order_relaxed), n;
    do { /* a team has the CPUs that others leave, and alone all that it wants */
        n = wanted;
        if (others > 0) {
            const int cpus = omp_get_num_procs(), left = (cpus > wanted ? cpus : wanted) - others;
            n = left < 1 ? 1 : left < wanted ? left : wanted;
        }
    } while (
        !atomic_compare_exchange_weak_explicit(&computing, &others, others + n, memory_order_relaxed, memory_order_relaxed));
    if (n == 1) {
        work(call, 0, 1);
    } else {
        run_region(p, n, work, call);
    }
    atomic_fetch_sub_explicit(&computing, n, memory_order_relaxed);
}

/* A child has none of the pool's threads, and libgomp would wait for them: the forking thread ends its own before. Other threads'
 * continue. */
static void before_fork(void) {
    omp_pause_resource_all(omp_pause_hard);
    pool *p = pthread_getspecific(kept);
    if (p != NULL && !omp_in_parallel()) {
        p->size = 1;
    }
}

static void after_fork_child(void) { atomic_store(&computing, 0); }

/* LLVM's library, which alone has this function, handles a fork itself. */
int kmp_get_blocktime(void);
#pragma weak kmp_get_blocktime

bool sa_begin_teams(void) {
    return pthread_key_create(&kept, free) == 0 &&
           pthread_atfork(kmp_get_blocktime == NULL ? before_fork : NULL, NULL, after_fork_child) == 0;
}
#endif
