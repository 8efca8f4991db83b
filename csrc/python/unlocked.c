/* Computing without the GIL, and yet stopping on Ctrl-C. */
#include "python/unlocked.h"

#include <time.h>

#include "runtime/threads.h"

/* A person does not notice a twentieth of a second, and looking costs a few microseconds unless other threads compute in
 * Python: those may keep the GIL for their switch interval of 5 ms, in which only this thread waits. */
#define SA_BETWEEN_LOOKS 50000000

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Handlers run in Python's main thread alone; in others PyErr_CheckSignals does nothing. A thread that forks has the GIL and waits until
 * no region runs: so this one's is paused, as it is for handlers, which may fork or compute. */
static void look_for_signals(sa_watch *watch) {
    sa_unlocked *u = (sa_unlocked *)(void *)watch;
    if (now() < u->next) {
        return;
    }
    const int paused = sa_region_pause();
    PyEval_RestoreThread(u->thread);
    if (PyErr_CheckSignals() < 0) {
        __atomic_store_n(&watch->cancelled, 1, __ATOMIC_RELAXED);
    }
    u->thread = PyEval_SaveThread();
    sa_region_resume(paused);
    u->next = now() + SA_BETWEEN_LOOKS;
}

sa_watch *sa_unlock(sa_unlocked *u) {
    u->watch = (sa_watch){.poll = look_for_signals};
    u->next = now() + SA_BETWEEN_LOOKS;
    u->thread = PyEval_SaveThread();
    return &u->watch;
}

void sa_lock_again(sa_unlocked *u) { PyEval_RestoreThread(u->thread); }
