/* Owns the run of every operation: scratch (from arena.c), the GIL, Ctrl-C, the exception. */
#include "python/run.h"

#if defined(__linux__)
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <pthread.h>
#endif
#include <time.h>
#include <unistd.h>

/* On the stack up to here. */
#define SA_STACK_SCRATCH 32768

/* Nanoseconds between looks for signals: long next to the 5 ms that other threads may hold the GIL. */
#define SA_BETWEEN_LOOKS 50000000

typedef struct {
    sa_watch watch; /* first: the core points to it */
    PyThreadState *thread;
    int64_t next;
} unlocked;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Python handles signals in the main thread alone. Another has to stay away from the GIL while helpers work: once the program ends
 * Python ends a thread that asks for it, and with it the stack that they work on. */
static bool is_main_thread(void) {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#elif defined(__APPLE__)
    return pthread_main_np() != 0;
#else
    return true;
#endif
}

static void look_for_signals(sa_watch *watch) {
    unlocked *u = (unlocked *)(void *)watch;
    if (now() < u->next) {
        return;
    }
    PyEval_RestoreThread(u->thread);
    if (PyErr_CheckSignals() < 0) {
        __atomic_store_n(&watch->cancelled, 1, __ATOMIC_RELAXED);
    }
    u->thread = PyEval_SaveThread();
    u->next = now() + SA_BETWEEN_LOOKS;
}

static sa_status run_unlocked(const sa_job *job, char *scratch, char *shared) {
    unlocked u = {.watch.poll = is_main_thread() ? look_for_signals : NULL};
    if (job->watch != NULL) {
        u.next = now() + SA_BETWEEN_LOOKS;
        *job->watch = &u.watch;
    }
    u.thread = PyEval_SaveThread();
    const sa_status status = job->compute(job->call, scratch, shared);
    PyEval_RestoreThread(u.thread);
    return status;
}

int sa_run_job(PyObject *module, const sa_job *job) {
    _Alignas(64) char on_stack[SA_STACK_SCRATCH];
    size_t bytes = 0;
    if (job->planned != SA_OK || __builtin_mul_overflow((size_t)job->threads, job->scratch_bytes, &bytes) ||
        bytes > PTRDIFF_MAX / 4 || job->shared_bytes > PTRDIFF_MAX / 4) {
        return sa_error(PyExc_ValueError, "the sizes of this call do not fit the address space");
    }
    const bool fits = bytes + job->shared_bytes <= SA_STACK_SCRATCH;
    char *scratch = fits ? on_stack : sa_arena_take(module, bytes + job->shared_bytes);
    if (scratch == NULL) {
        return -1;
    }
    const sa_status status =
        job->small ? job->compute(job->call, scratch, scratch + bytes) : run_unlocked(job, scratch, scratch + bytes);
    if (!fits) {
        sa_arena_give(scratch);
    }
    return status == SA_OK ? 0 : -1; /* cancelled: a handler raised */
}
