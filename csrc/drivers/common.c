/* Functions that all drivers use. */
#include "drivers/common.h"

#include "runtime/team.h"

bool sa_multiply(size_t a, size_t b, size_t *product) { return !__builtin_mul_overflow(a, b, product); }

size_t sa_itemsize(sa_dtype dtype) {
    static const size_t sizes[SA_DTYPES] = {2, 2, 4, 8, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    return sizes[dtype];
}

static bool stopped(const sa_watch *watch) { return __atomic_load_n(&watch->cancelled, __ATOMIC_RELAXED) != 0; }

bool sa_stops(sa_watch *watch) {
    if (watch == NULL || stopped(watch)) {
        return watch != NULL;
    }
    if (watch->poll != NULL && !sa_is_helper()) {
        watch->poll(watch);
    }
    return stopped(watch);
}

bool sa_cancelled(const sa_attention *a) { return sa_stops(a->watch); }
