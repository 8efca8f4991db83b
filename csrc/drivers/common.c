/* Whether a call should stop. */
#include "drivers/common.h"

#include "runtime/team.h"

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
