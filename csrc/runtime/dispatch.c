/* Chooses the kernel table: the best that this CPU can run, or the one that the user names. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "runtime/dispatch.h"

/* The best comes first. */
static const sa_kernels *const built[] = {
#if defined(SA_FEW_SETS) && defined(__x86_64__) /* for sanitizers, under which kernels compile slowly */
    &sa_kernels_avx2,
#elif defined(__x86_64__)
#if !defined(_WIN32)
    &sa_kernels_amx,
#endif
    &sa_kernels_avx512bf16, &sa_kernels_avx512, &sa_kernels_avx2, &sa_kernels_baseline,
#endif
#if defined(__aarch64__)
    &sa_kernels_neon,
#endif
#if defined(__wasm_simd128__)
    &sa_kernels_wasm,
#endif
#if !defined(SA_ONE_ISA)
    &sa_kernels_generic,
#endif
};
enum { BUILT = sizeof built / sizeof built[0] };

static atomic_int active; /* 1 + the index in `built`; 0: not chosen yet */

/* Returns 1 + the index in `built` of the named table, or of the best that runs if name is NULL; 0 if there is none. */
static int find(const char *name) {
    for (int i = 0; i < BUILT; ++i) {
        if ((name == NULL || strcmp(built[i]->name, name) == 0) && sa_cpu_runs(built[i]->name)) {
            return i + 1;
        }
    }
    return 0;
}

static int place_in_use(void) {
    int place = atomic_load_explicit(&active, memory_order_relaxed);
    if (place == 0) {
        place = find(NULL);
        atomic_store(&active, place);
    }
    return place - 1;
}

const sa_kernels *sa_kernels_active(void) { return built[place_in_use()]; }

/* Defines a function that returns the first unit of a table's list that this CPU runs. The answer is kept for each
 * table, as a virtual CPU answers slowly. */
#define FIRST_THAT_RUNS(linkage, function, type, list)                                                                 \
    linkage const type *function(void) {                                                                               \
        static _Atomic(const type *) found[BUILT];                                                                     \
        static atomic_bool known[BUILT];                                                                               \
        const int table = place_in_use();                                                                              \
        if (!atomic_load(&known[table])) {                                                                             \
            const type *const *p = built[table]->list;                                                                 \
            while (*p != NULL && !sa_cpu_runs((*p)->name)) {                                                           \
                ++p;                                                                                                   \
            }                                                                                                          \
            atomic_store(&found[table], *p);                                                                           \
            atomic_store(&known[table], true);                                                                         \
        }                                                                                                              \
        return atomic_load(&found[table]);                                                                             \
    }
FIRST_THAT_RUNS(static, int8_in_use, sa_compact_unit, int8)
FIRST_THAT_RUNS(static, bf16_in_use, sa_compact_unit, bf16)
FIRST_THAT_RUNS(, sa_gemv_active, sa_gemv_unit, gemv)

const sa_compact_unit *sa_compact_active(sa_weights kind) {
    return kind == SA_WEIGHTS_INT8 ? int8_in_use() : bf16_in_use();
}

const char *sa_isa_name(void) { return sa_kernels_active()->name; }

const char *const *sa_isa_available(void) {
    static _Thread_local const char *names[BUILT + 1];
    size_t n = 0;
    for (size_t i = 0; i < BUILT; ++i) {
        if (sa_cpu_runs(built[i]->name)) {
            names[n++] = built[i]->name;
        }
    }
    names[n] = NULL;
    return names;
}

sa_status sa_isa_set(const char *name) {
    const int place = find(name);
    if (place == 0) {
        return SA_BAD_ISA;
    }
    atomic_store(&active, place);
    return SA_OK;
}
