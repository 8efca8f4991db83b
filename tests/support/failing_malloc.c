/* Preloaded into a Python with PYTHONMALLOC=malloc: has the n-th allocation of a thread fail,
 * and counts what is not freed.
 *
 * Only allocations of Python, NumPy and selfattn fail: libgomp and Rust end the process when they get no memory. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static void *(*next_malloc)(size_t), *(*next_calloc)(size_t, size_t), *(*next_realloc)(void *, size_t);
static void *(*next_aligned)(size_t, size_t);
static void (*next_free)(void *);

/* Memory for dlsym itself before the functions are known; it is never freed. */
static char early[65536];
static size_t early_used;

static _Thread_local bool armed, for_good, core_alone;
static _Thread_local long left, seen;
static long live;

long allocations(void) { return seen; }

/* Python's os.getppid, which allocates nothing, switches failing on and off. */
pid_t getppid(void) {
    armed = !armed;
    return 1;
}

long live_blocks(void) { return __atomic_load_n(&live, __ATOMIC_RELAXED); }

__attribute__((constructor)) static void find(void) {
    static bool finding;
    if (finding || next_free != NULL) {
        return;
    }
    finding = true;
    next_malloc = dlsym(RTLD_NEXT, "malloc");
    next_calloc = dlsym(RTLD_NEXT, "calloc");
    next_realloc = dlsym(RTLD_NEXT, "realloc");
    next_aligned = dlsym(RTLD_NEXT, "aligned_alloc");
    next_free = dlsym(RTLD_NEXT, "free");
}

static bool is_early(const void *p) { return (const char *)p >= early && (const char *)p < early + sizeof early; }

static void *take_early(size_t size) {
    void *p = early + early_used;
    early_used += (size + 63) / 64 * 64;
    return early_used <= sizeof early ? p : NULL;
}

/* ---- whose allocation it is: by where the code lies -------------------------------------------------------------- */

typedef struct {
    const char *low, *high;
} range;

#define MOST_RANGES 16

static range core, evaluates, iterates, ending[MOST_RANGES];
static int endings;

static bool lies_in(const void *address, range r) {
    return (const char *)address >= r.low && (const char *)address < r.high;
}

static int look_at(struct dl_phdr_info *library, size_t size, void *unused) {
    static const char *const names[] = {"libgomp", "libomp", "tokenizers", "ld-linux"};
    (void)size, (void)unused;
    range all = {NULL, NULL};
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        if (library->dlpi_phdr[i].p_type == PT_LOAD) {
            const char *low = (const char *)library->dlpi_addr + library->dlpi_phdr[i].p_vaddr;
            all.low = all.low == NULL ? low : all.low;
            all.high = low + library->dlpi_phdr[i].p_memsz;
        }
    }
    if (strstr(library->dlpi_name, "selfattn/_core.") != NULL) {
        core = all;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
        if (strstr(library->dlpi_name, names[i]) != NULL && endings < MOST_RANGES) {
            ending[endings++] = all;
        }
    }
    return 0;
}

static range of_function(const char *name) {
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    void *function = dlsym(RTLD_DEFAULT, name);
    if (function == NULL || dladdr1(function, &info, (void **)&symbol, RTLD_DL_SYMENT) == 0 || symbol == NULL) {
        return (range){NULL, NULL};
    }
    return (range){function, (const char *)function + symbol->st_size};
}

/* More libraries may have been loaded since the last call. */
static void look_around(void) {
    endings = 0;
    dl_iterate_phdr(look_at, NULL);
    evaluates = of_function("_PyEval_EvalFrameDefault");
    iterates = of_function("PyObject_GetIter");
}

static bool ends_the_process(void *caller) {
    for (int i = 0; i < endings; ++i) {
        if (lies_in(caller, ending[i])) {
            return true;
        }
    }
    return false;
}

/* Returns whether selfattn's extension allocates, itself or through C functions that it calls; Python code that it
 * calls does not count, since NumPy crashes and leaks when it gets no memory there. Without this restriction, returns
 * whether anything but an iterator over a dictionary allocates: CPython 3.11 crashes for these. */
static bool counts(void) {
    void *frames[64];
    const int n = backtrace(frames, 64);
    for (int i = 0; i < n; ++i) {
        if (lies_in(frames[i], core)) {
            return true;
        }
        if (lies_in(frames[i], evaluates)) {
            return !core_alone;
        }
        if (lies_in(frames[i], iterates)) {
            return false;
        }
    }
    return !core_alone;
}

/* The n-th allocation from now on fails, and on request all after it. Returns whether the core was found. */
int fail_at(long n, int all_from_there, int in_the_core_alone) {
    look_around();
    core_alone = in_the_core_alone;
    left = n;
    seen = 0;
    for_good = all_from_there;
    return core.low != NULL && evaluates.low != NULL;
}

static bool fails(void *caller) {
    if (!armed) {
        return false;
    }
    armed = false; /* backtrace may allocate */
    const bool chosen = !ends_the_process(caller) && counts();
    armed = true;
    if (!chosen) {
        return false;
    }
    ++seen;
    if (seen == left || (for_good && seen > left)) {
        errno = ENOMEM;
        return true;
    }
    return false;
}

static void *counted(void *p) {
    __atomic_fetch_add(&live, p != NULL, __ATOMIC_RELAXED);
    return p;
}

void *malloc(size_t size) {
    find();
    if (next_malloc == NULL) {
        return take_early(size);
    }
    return fails(__builtin_return_address(0)) ? NULL : counted(next_malloc(size));
}

void *calloc(size_t count, size_t size) {
    find();
    if (next_calloc == NULL) {
        return take_early(count * size);
    }
    return fails(__builtin_return_address(0)) ? NULL : counted(next_calloc(count, size));
}

void *realloc(void *p, size_t size) {
    find();
    if (is_early(p)) {
        void *moved = malloc(size);
        return moved == NULL ? NULL : memcpy(moved, p, size < 64 ? size : 64);
    }
    if (fails(__builtin_return_address(0))) {
        return NULL;
    }
    void *moved = next_realloc(p, size);
    __atomic_fetch_add(&live, p == NULL && moved != NULL, __ATOMIC_RELAXED);
    return moved;
}

void *aligned_alloc(size_t alignment, size_t size) {
    find();
    return fails(__builtin_return_address(0)) ? NULL : counted(next_aligned(alignment, size));
}

void free(void *p) {
    if (p != NULL && !is_early(p)) {
        __atomic_fetch_sub(&live, 1, __ATOMIC_RELAXED);
        next_free(p);
    }
}
