/* Runs a team as a parallel region of OpenMP, whose threads are shared with other libraries, such as PyTorch. */
#if defined(_OPENMP)
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* for dladdr */
#endif
#include "runtime/members.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "selfattn.h"

const char *sa_team_name(void) { return "OpenMP"; }

const char *sa_team_library(void) {
#if defined(_WIN32)
    return ""; /* it is linked in */
#else
    Dl_info found;
    return dladdr((void *)(size_t)omp_get_max_threads, &found) != 0 && found.dli_fname != NULL ? found.dli_fname : "";
#endif
}

int sa_team_threads(void) {
    const int most = omp_get_thread_limit() < SA_MOST_THREADS ? omp_get_thread_limit() : SA_MOST_THREADS;
    const int n = omp_get_max_threads(); /* libgomp's is negative if OMP_NUM_THREADS is above 2^31 */
    return 0 < n && n < most ? n : most;
}

/* True if OpenMP's other threads have too small stacks for a kernel: then each thread computes alone. */
static bool small_stacks;
enum { SMALLEST_STACK = 128 << 10 };

/* Reads a size as OpenMP does: a number, and its unit, which is K by default. */
static bool is_too_small(const char *size) {
    char *unit = NULL;
    const unsigned long long n = size ? strtoull(size, &unit, 10) : 0;
    if (size == NULL || unit == size) {
        return false;
    }
    unit += strspn(unit, " \t");
    const int letter = *unit | 32; /* in lower case */
    const int shift = letter == 'b' ? 0 : letter == 'm' ? 20 : letter == 'g' ? 30 : 10;
    return n < SMALLEST_STACK && n << shift < SMALLEST_STACK;
}

/* libgomp keeps threads for each calling thread. A smaller region would end some of them, and the next large region
 * would start new ones. So regions keep their size for a while, and threads that a team does not need do nothing in
 * them. */
typedef struct {
    int size;
    int calls, needed; /* calls since `size` threads were needed, and the most threads that one of these calls needed */
} pool;
enum { CALLS_BEFORE_SHRINKING = 100 };

static pthread_key_t kept; /* holds a thread's pool, which is freed when the thread ends, as libgomp's is */

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

/* Returns how many threads the region of a team has. */
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

/* libgomp ends the process if it cannot start a thread, because a container or ulimit has a limit or there is no
 * memory. So the same number of threads is first started here, all at once. */
#define MEMORY_FOR(threads) ((size_t)(threads) * 1024 + 16384) /* bytes; libgomp allocates less for a team */

static void *wait_for_lock(void *lock) {
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

/* Returns how many of `wanted` threads the system can start. */
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
    sa_signals before;
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
        const int number = omp_get_thread_num(), all = omp_get_num_threads(); /* fewer than asked for if limited */
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

int sa_usable_cpus(void) { return sa_at_most_limit(omp_get_num_procs()); }

/* The number of threads in teams, and of threads that had to compute alone. */
static atomic_int computing;

void sa_run_team_of(int threads, sa_team_work *work, void *call) {
    pool *p = sa_has_key && !small_stacks && !omp_in_parallel() ? my_pool() : NULL;
    if (p == NULL) {
        work(call, 0, 1);
        return;
    }
    const int most = sa_most_threads(), wanted = threads < most ? threads : most;
    int others = atomic_load_explicit(&computing, memory_order_relaxed), n;
    do { /* a team gets the CPUs that no other team uses, and all that it wants if it is the only team */
        n = wanted;
        if (others > 0) {
            const int cpus = sa_usable_cpus(), left = (cpus > wanted ? cpus : wanted) - others;
            n = left < 1 ? 1 : left < wanted ? left : wanted;
        }
    } while (!atomic_compare_exchange_weak_explicit(&computing, &others, others + n, memory_order_relaxed,
                                                    memory_order_relaxed));
    if (n == 1) {
        work(call, 0, 1);
    } else {
        run_region(p, n, work, call);
    }
    atomic_fetch_sub_explicit(&computing, n, memory_order_relaxed);
}

#if defined(_WIN32)
static bool begin_forks(void) { return true; } /* there is no fork */
#else
/* A forked child has none of the pool's threads, and libgomp would wait for them. So the forking thread ends its pool
 * before it forks. Pools of other threads continue in the parent. */
static void before_fork(void) {
    omp_pause_resource_all(omp_pause_hard);
    pool *p = pthread_getspecific(kept);
    if (p != NULL && !omp_in_parallel()) {
        p->size = 1;
    }
}

static void after_fork_child(void) { atomic_store(&computing, 0); }

/* Only LLVM's library has this function. It handles a fork itself. */
int kmp_get_blocktime(void);
#pragma weak kmp_get_blocktime

static bool begin_forks(void) {
    return pthread_atfork(kmp_get_blocktime == NULL ? before_fork : NULL, NULL, after_fork_child) == 0;
}
#endif

bool sa_begin_teams(void) {
    const char *size = getenv("OMP_STACKSIZE");
    small_stacks = is_too_small(size ? size : getenv("GOMP_STACKSIZE"));
    return pthread_key_create(&kept, free) == 0 && begin_forks();
}
#endif
