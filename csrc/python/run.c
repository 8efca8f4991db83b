/* Runs every operation: the GIL, Ctrl-C, exceptions. Owns the memory that calls take and return. */
#include "python/run.h"

#if defined(__linux__)
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <pthread.h>
#endif
#include <time.h>
#include <unistd.h>

/* ---- memory: slots are exchanged atomically, for threads without a GIL ------------------------------------------- */

/* Larger pieces are freed, as arithmetic in them takes far longer than allocating them. */
#define SA_LARGEST_KEPT ((size_t)256 << 20)

/* The first two slots keep pieces larger than SA_LARGE: a step of training needs one for what its forward pass keeps
 * and one for scratch. The other slots keep only smaller pieces, so at most 2·256 + 6·64 MB stay. */
#define SA_LARGE ((size_t)64 << 20)
#define SA_LARGE_SLOTS 2

/* glibc keeps twice the largest piece ever freed, but ignores 32 MB and more. */
#define SA_FREED_AT_FIRST ((size_t)31 << 20)

/* The header in front of a piece. */
typedef struct {
    void *memory; /* what malloc returned */
    size_t bytes;
    PyObject *module; /* owned while the piece is in use */
    char padding[64 - sizeof(void *) - sizeof(size_t) - sizeof(PyObject *)];
} header;

static void free_piece(header *h) {
    if (h != NULL) {
        PyMem_RawFree(h->memory);
    }
}

/* Lets malloc keep the memory of results too, such as gradients. */
static void let_malloc_keep_results(sa_state *state) {
    if (!atomic_exchange(&state->malloc_keeps, true)) {
        PyMem_RawFree(PyMem_RawMalloc(SA_FREED_AT_FIRST));
    }
}

static header *new_piece(size_t bytes) {
    char *memory = bytes > PTRDIFF_MAX / 2 ? NULL : PyMem_RawMalloc(bytes + 2 * sizeof(header));
    if (memory == NULL) {
        sa_error(PyExc_MemoryError, "cannot allocate %zu bytes of memory to work in", bytes);
        return NULL;
    }
    header *h = (header *)(void *)(memory + (64 - (uintptr_t)memory % 64) % 64);
    h->memory = memory;
    h->bytes = bytes;
    return h;
}

typedef struct {
    _Atomic(void *) *slot;
    int n;
} slots;

static slots slots_for(sa_state *state, size_t bytes) {
    return bytes > SA_LARGE ? (slots){state->arena, SA_LARGE_SLOTS}
                            : (slots){state->arena + SA_LARGE_SLOTS, SA_ARENA_SLOTS - SA_LARGE_SLOTS};
}

/* Puts a piece into a slot. False if the slot is full. */
static bool put(_Atomic(void *) *slot, header *h) {
    void *empty = NULL;
    return atomic_compare_exchange_strong(slot, &empty, h);
}

void *sa_arena_take(PyObject *module, size_t bytes) {
    sa_state *state = sa_state_of(module);
    const slots own = slots_for(state, bytes);
    header *h = NULL;
    for (int i = 0; i < own.n && h == NULL; ++i) {
        h = atomic_exchange(&own.slot[i], NULL);
        if (h != NULL && (h->bytes < bytes || h->bytes / 4 > bytes + 4096)) {
            free_piece(put(&own.slot[i], h) ? NULL : h);
            h = NULL;
        }
    }
    if (h == NULL) {
        let_malloc_keep_results(state);
        if ((h = new_piece(bytes)) == NULL) {
            return NULL;
        }
    }
    h->module = Py_NewRef(module);
    return h + 1;
}

void sa_arena_give(void *piece) {
    if (piece == NULL) {
        return;
    }
    header *h = (header *)piece - 1;
    PyObject *module = h->module;
    sa_state *state = sa_state_of(module);
    if (h->bytes <= SA_LARGEST_KEPT && !atomic_load(&state->frees_memory)) {
        const slots own = slots_for(state, h->bytes);
        for (int i = 0; i < own.n && h != NULL; ++i) {
            h = put(&own.slot[i], h) ? NULL : h;
        }
        if (h != NULL) { /* all slots are full: replaces the piece of the next slot */
            h = atomic_exchange(&own.slot[atomic_fetch_add(&state->next_slot, 1) % (unsigned)own.n], h);
        }
    }
    free_piece(h);
    Py_DECREF(module);
}

void sa_arena_clear(sa_state *state) {
    for (int i = 0; i < SA_ARENA_SLOTS; ++i) {
        free_piece(atomic_exchange(&state->arena[i], NULL));
    }
}

void sa_arena_keep(sa_state *state, bool keep) {
    atomic_store(&state->frees_memory, !keep);
    if (!keep) {
        sa_arena_clear(state);
    }
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Scratch of up to this many bytes is on the stack. */
#define SA_STACK_SCRATCH 32768

/* Nanoseconds between two checks for signals: ten times the 5 ms for which another thread may hold the GIL. */
#define SA_BETWEEN_LOOKS 50000000

typedef struct {
    sa_watch watch; /* the first field, as the core points to it */
    PyThreadState *thread;
    int64_t next;
} unlocked;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Python handles signals in the main thread alone. Other threads must not request the GIL while helpers work: when the
 * program ends, Python ends a thread that requests it, and with it the stack that its helpers use. */
static bool is_main_thread(void) {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#elif defined(__APPLE__)
    return pthread_main_np() != 0;
#else /* Windows does not tell */
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading ? PyObject_CallMethod(threading, "main_thread", NULL) : NULL;
    PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
    const bool is = ident != NULL && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();
    PyErr_Clear();
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(ident);
    return is;
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

static sa_status run_in(const sa_job *job, char *scratch, size_t bytes) {
    return job->small ? job->compute(job->call, scratch, scratch + bytes) : run_unlocked(job, scratch, scratch + bytes);
}

__attribute__((noinline)) static sa_status run_on_stack(const sa_job *job, size_t bytes) {
    _Alignas(64) char scratch[SA_STACK_SCRATCH];
    return run_in(job, scratch, bytes);
}

int sa_run_job(PyObject *module, const sa_job *job) {
    size_t bytes = 0;
    if (job->planned != SA_OK || __builtin_mul_overflow((size_t)job->threads, job->scratch_bytes, &bytes) ||
        bytes > PTRDIFF_MAX / 4 || job->shared_bytes > PTRDIFF_MAX / 4) {
        return sa_error(PyExc_ValueError, "the sizes of this call do not fit the address space");
    }
    if (sa_check_stack(SA_STACK_OF_RUN) < 0) {
        return -1;
    }
    sa_status status;
    if (bytes + job->shared_bytes <= SA_STACK_SCRATCH && sa_stack_left() >= SA_STACK_OF_RUN + SA_STACK_SCRATCH) {
        status = run_on_stack(job, bytes);
    } else {
        char *scratch = sa_arena_take(module, bytes + job->shared_bytes);
        if (scratch == NULL) {
            return -1;
        }
        status = run_in(job, scratch, bytes);
        sa_arena_give(scratch);
    }
    return status == SA_OK ? 0 : -1; /* cancelled: a signal handler raised an exception */
}
