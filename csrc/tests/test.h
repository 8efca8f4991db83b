/* For all tests of the core, which test_core.c runs. */
#ifndef SA_TEST_H
#define SA_TEST_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "runtime/dispatch.h"

/* ---- checks (test_core.c) ---------------------------------------------------------------------------------------- */

/* CHECK(condition, "what", …) prints the rest if false. */
#define CHECK(...) CHECK_(__VA_ARGS__)
#define CHECK_(ok, ...) check_that((ok), __FILE__, __LINE__, __VA_ARGS__)
bool check_that(bool ok, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Adds a number to the hash of a test's results, which its line shows:
 * instruction sets without fused multiply-adds have the same. */
void note_result(double x);

extern bool quick;      /* for emulators and sanitizers */
extern bool exhaustive; /* tests every float32 */

/* ---- support (support.c) ----------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t state;
} random_source;

uint64_t random_bits(random_source *r); /* SplitMix64 */
bool random_chance(random_source *r, double p);
double random_between(random_source *r, double least, double most);

double element_get(const char *p, sa_dtype dtype);
double unit_roundoff(sa_dtype dtype);
double real_get(const void *x, bool f64, ptrdiff_t i);
void real_set(void *x, bool f64, ptrdiff_t i, double value);
void *dirty_memory(size_t size); /* 64-byte aligned; floats are NaN */
void *zero_memory(size_t size);

/* Whole pages, which cannot be read until they are opened. */
char *closed_pages(size_t bytes); /* NULL if there is no memory */
bool open_pages(char *pages, size_t bytes);
void free_pages(char *pages, size_t bytes);

/* In a block: memory that these functions allocate from here on is freed at the end of the block. Only the main thread
 * may call them. */
#define FREES_AT_END __attribute__((cleanup(memory_free), unused)) const size_t memory_before = memory_count()
size_t memory_count(void);
void memory_free(const size_t *before);

#define ALL_TESTS(T) T(exp) T(plan)
#define DECLARE_TEST(name) void test_##name(void);
ALL_TESTS(DECLARE_TEST)

#endif
