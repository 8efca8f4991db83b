/* The core's tests without Python: test_core [--quick | --exhaustive] [--only=NAME] [isa …] <VECTORS
 *
 * VECTORS are files that vectors.py writes, one after the other.
 * --quick: fewer cases, for sanitizers and emulators. --exhaustive: every float32 in exp. --only: one of the tests of
 * run_all. Without isa: all of this CPU. The last line is "N passed, N failed"; the exit status is 1 if a test
 * failed. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/vectors.h"

bool quick, exhaustive;
static const char *only;
static long passed, failed;

bool check_that(bool ok, const char *file, int line, const char *format, ...) {
    if (ok) {
        ++passed;
        return true;
    }
    if (++failed <= 40) { /* more lines would hide the first ones */
        const char *name = strrchr(file, '/');
        va_list args;
        va_start(args, format);
        printf("FAILED [%s] %s:%d: ", sa_isa_name(), name ? name + 1 : file, line);
        vprintf(format, args);
        printf("\n");
        va_end(args);
    }
    return false;
}

static uint64_t results;

void note_result(double x) {
    uint64_t bits = 0;
    if (x == x) { /* the bits of NaN differ between CPUs */
        memcpy(&bits, &x, sizeof bits);
    }
    results = (results ^ bits) * UINT64_C(0x100000001b3);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs a test, or replays an operation. */
static void run(const char *name, void (*test)(void), replay_function *operation) {
    if (only != NULL && strcmp(name, only) != 0) {
        return;
    }
    const long failed_before = failed, passed_before = passed;
    const double start = now();
    results = UINT64_C(0xcbf29ce484222325);
    if (test) {
        test();
    } else {
        replay(name, operation);
    }
    printf("%-10s %-10s %6ld passed %4ld failed %7.1f s, results %016llx\n", sa_isa_name(), name,
           passed - passed_before, failed - failed_before, now() - start, (unsigned long long)results);
    fflush(stdout);
}

static void run_all(const char *isa) {
    if (!CHECK(sa_isa_set(isa) == SA_OK && strcmp(sa_isa_name(), isa) == 0, "%s: not in this build or not on this CPU",
               isa)) {
        return;
    }
#define RUN_TEST(name) run(#name, test_##name, NULL);
    ALL_TESTS(RUN_TEST)
#define REPLAY(name) run(#name, NULL, replay_##name);
    ALL_VECTORS(REPLAY)
}

int main(int argc, char **argv) {
    const char *chosen[16];
    int n = 0;
    for (int i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--quick") == 0) {
            quick = true;
        } else if (strcmp(argv[i], "--exhaustive") == 0) {
            exhaustive = true;
        } else if (strncmp(argv[i], "--only=", 7) == 0) {
            only = argv[i] + 7;
        } else if (n < 16) {
            chosen[n++] = argv[i];
        }
    }
    if (n == 0) {
        for (const char *const *name = sa_isa_available(); *name && n < 16; ++name) {
            chosen[n++] = *name;
        }
    }
    read_vectors();
    for (int i = 0; i < n; ++i) {
        run_all(chosen[i]);
    }
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}
