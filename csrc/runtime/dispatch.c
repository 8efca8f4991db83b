/* Chooses the kernel table: the best that can run, or the one that the user names. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "kernels/kernels.h"

/* Best first. */
static const sa_kernels *const built[] = {
#if defined(__x86_64__)
    &sa_kernels_amx,     &sa_kernels_avx512bf16, &sa_kernels_avx512, &sa_kernels_avx2, &sa_kernels_baseline,
#endif
#if defined(__aarch64__)
    &sa_kernels_neon,
#endif
    &sa_kernels_generic,
};
enum { BUILT = sizeof built / sizeof built[0] };

static _Atomic(const sa_kernels *) active;

static const sa_kernels *sa_kernels_find(const char *name) {
    for (size_t i = 0; i < BUILT; ++i) {
        if ((name == NULL || strcmp(built[i]->name, name) == 0) && sa_cpu_runs(built[i]->name)) {
            return built[i];
        }
    }
    return NULL;
}

const sa_kernels *sa_kernels_active(void) {
    const sa_kernels *k = atomic_load_explicit(&active, memory_order_relaxed);
    if (k == NULL) {
        k = sa_kernels_find(NULL);
        atomic_store(&active, k);
    }
    return k;
}

static size_t number_in_use(void) {
    const sa_kernels *k = sa_kernels_active();
    size_t table = 0;
    while (built[table] != k) {
        ++table;
    }
    return table;
}

/* Found once for each table: asking the CPU is slow where it is a virtual one. */
const sa_compact_unit *sa_compact_active(sa_weights kind) {
    static _Atomic(const sa_compact_unit *) found[BUILT][2];
    static atomic_bool known[BUILT][2];
    const bool int8 = kind == SA_WEIGHTS_INT8;
    const size_t table = number_in_use();
    if (!atomic_load(&known[table][int8])) {
        const sa_compact_unit *const *p = int8 ? built[table]->int8 : built[table]->bf16;
        while (*p != NULL && !sa_cpu_runs((*p)->name)) {
            ++p;
        }
        atomic_store(&found[table][int8], *p);
        atomic_store(&known[table][int8], true);
    }
    return atomic_load(&found[table][int8]);
}

const sa_gemv_unit *sa_gemv_active(void) {
    static _Atomic(const sa_gemv_unit *) found[BUILT];
    static atomic_bool known[BUILT];
    const size_t table = number_in_use();
    if (!atomic_load(&known[table])) {
        const sa_gemv_unit *const *p = built[table]->gemv;
        while (*p != NULL && !sa_cpu_runs((*p)->name)) {
            ++p;
        }
        atomic_store(&found[table], *p);
        atomic_store(&known[table], true);
    }
    return atomic_load(&found[table]);
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
    const sa_kernels *k = sa_kernels_find(name);
    if (k == NULL) {
        return SA_BAD_ISA;
    }
    atomic_store(&active, k);
    return SA_OK;
}
