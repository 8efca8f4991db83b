/* For all tests of the core, which test_core.c runs. Inputs are allocated to the byte and scratch starts as NaN, so that stray
 * reads show. */
#ifndef SA_TEST_H
#define SA_TEST_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "kernels/kernels.h"

/* ---- checks (test_core.c) */

/* CHECK(condition, "what", …) prints the rest if false. */
#define CHECK(...) CHECK_(__VA_ARGS__)
#define CHECK_(ok, ...) check_that((ok), __FILE__, __LINE__, __VA_ARGS__)
bool check_that(bool ok, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Adds a number to the hash of a test's results, which its line shows: instruction sets without fused multiply-adds have the same. */
void note_result(double x);

extern bool quick;      /* for emulators and sanitizers */
extern bool exhaustive; /* tests every float32 */

/* ---- random numbers (arrays.c) ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t state;
} random_source;

uint64_t random_bits(random_source *r); /* SplitMix64 */
ptrdiff_t random_below(random_source *r, ptrdiff_t n);
bool random_chance(random_source *r, double p);
double random_between(random_source *r, double least, double most);

/* ---- elements and arrays (arrays.c) -------------------------------------------------------------------------------- */

double element_get(const char *p, sa_dtype dtype, bool swapped);
void element_set(char *p, sa_dtype dtype, bool swapped, double x); /* to nearest even */
double unit_roundoff(sa_dtype dtype);
double real_get(const void *x, bool f64, ptrdiff_t i);
void real_set(void *x, bool f64, ptrdiff_t i, double value);
void *dirty_memory(size_t size); /* 64-byte aligned; floats are NaN */
void *zero_memory(size_t size);
void *draw_reals(ptrdiff_t n, bool f64, random_source *r); /* from −1 to 1 */

/* In a block: memory that these functions allocate from here on, also for arrays and cases, is freed at the end of the block.
 * Only the main thread may call them. */
#define FREES_AT_END __attribute__((cleanup(memory_free), unused)) const size_t memory_before = memory_count()
size_t memory_count(void);
void memory_free(const size_t *before);

/* Layouts; flags combine. */
enum {
    TRANSPOSED = 1, /* contiguous rows */
    FLIPPED_ROWS = 2,
    FLIPPED_COLS = 4,
    FLIPPED_LEAD = 8,
    STEPPED_COLS = 16,
    UNALIGNED = 32, /* elements at odd addresses */
    ODD_LEAD = 64,  /* odd strides, as in packed records */
    ODD_ROWS = 128,
    SWAPPED = 256,
    LONG_ROWS = 512,
    HEADS_INSIDE = 1024, /* (B, L, H, D) */
    ALL_LAYOUTS = 2048
};

/* Broadcast axes have stride 0. Bit i is leading axis i. */
enum { BROADCAST_ROWS = 1 << 8, BROADCAST_COLS = 1 << 9 };

typedef struct {
    int n_lead;
    ptrdiff_t lead[SA_MAX_LEAD], rows, cols; /* the leading dims of the call */
} array_shape;

/* The memory of an input ends with its elements. An output has margins, and a pattern in all bytes outside its elements. */
typedef struct {
    sa_tensor tensor;
    array_shape shape;
    char *memory;
    size_t bytes;
    char *before;
} array;

void array_make(array *a, const array_shape *shape, sa_dtype dtype, unsigned layout, unsigned broadcast, bool output);
void array_fill(array *a, double x);
void array_draw(array *a, double least, double most, random_source *r);
void array_remember(array *a);
bool array_unchanged(const array *a);
bool array_margins_intact(const array *a); /* notes its elements, too */
/* The matrix of a head, which `gqa` heads share. */
char *array_head(const array *a, ptrdiff_t head, ptrdiff_t gqa);
char *array_at(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col);
double array_get(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col);

/* ---- cases (cases.c) ----------------------------------------------------------------------------------------------- */

/* NaN and infinities are in rows that no query sees, or that see nothing; in some keys and values; in values of keys whose
 * scores are −inf; or in queries. */
enum { NOT_POISONED, POISON_CLOSED, POISON_SOME, POISON_WEIGHTLESS, POISON_QUERIES };

/* Block masks; flags combine. */
enum { PREFIX = 1, ONE_RUN = 2, RUNS = 4, MORE_RUNS = 8 };

/* Inputs first, then outputs. */
enum { QUERY, KEY, VALUE, MASK, KEY_BIAS, ALIBI, SINKS, LENGTHS, GRAD_OUT, GRAD_LSE, INPUTS };
enum { OUT = INPUTS, LSE, WEIGHTS, STATS, D_QUERY, D_KEY, D_VALUE, D_MASK, D_SLOPES, D_SINKS, ARRAYS };

/* Zero means plain or none, unless a comment says otherwise. */
typedef struct {
    ptrdiff_t L, S, E, Dv;
    int n_lead;
    ptrdiff_t lead[8];
    ptrdiff_t gqa;                                                            /* 1: no GQA */
    sa_dtype query, key, value, out, mask;                                    /* mask: SA_DTYPES if there is none */
    unsigned query_layout, key_layout, value_layout, mask_layout, out_layout; /* grad_out has the layout of out */
    unsigned query_broadcast, key_broadcast, value_broadcast, mask_broadcast, scalar_broadcast;
    bool key_bias, alibi, sinks, lengths, lse, weights, causal;
    bool backward, grad_lse;
    unsigned without;                              /* gradients that are not wanted: bits 1 << D_QUERY … */
    ptrdiff_t diagonal, window_left, window_right; /* SA_UNBOUNDED: no bound */
    double scale, softcap, dropout_p;
    uint64_t seed;
    double magnitude;   /* the magnitude of queries and keys */
    double closed;      /* the fraction of the mask that is closed */
    double mask_finite; /* the finite numbers of the mask; INFINITY: finfo.min, at times 0.5 */
    int block_masks;
    int poison;
    int threads; /* 0: the plan's, at most 2 */
    bool unsplit;
} test_case;

typedef struct {
    array array; /* the classes, or the prefixes */
    ptrdiff_t classes;
    char *open; /* [classes][S] */
} test_block_mask;

typedef struct {
    test_case spec;
    sa_attention call;
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];
    test_block_mask block_tables[SA_MAX_BLOCK_MASKS];
    sa_attention_gradients gradients;
    array arrays[ARRAYS];    /* an array that is not in the call has no memory */
    double *numbers[INPUTS]; /* [heads][rows][cols], for the reference */
    ptrdiff_t heads;
    ptrdiff_t chunks; /* chunks of the last run */
    int looks;        /* times that the backward pass checked for cancelling */
} live_case;

test_case plain_case(sa_dtype dtype, ptrdiff_t L, ptrdiff_t S, ptrdiff_t E, ptrdiff_t Dv);
void case_make(live_case *c, const test_case *spec, uint64_t seed);
sa_status case_run(live_case *c);
void case_verify(live_case *c, const char *title);                      /* compares with the reference, in one CHECK */
void case_try(const test_case *spec, uint64_t seed, const char *title); /* makes, runs, verifies */
void case_tensors(sa_attention *a, sa_attention_gradients *g, sa_tensor **tensors); /* in the order of arrays */
char *case_at(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col);
size_t case_index(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col); /* index in memory order */
double case_get(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col);
void case_set(live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col, double x);
bool case_allows(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j);
bool case_same_bits(const live_case *c, const live_case *other);

/* ---- block masks (block_masks.c) ------------------------------------------------------------------------------------ */

void block_masks_make(live_case *c, random_source *r);
bool block_masks_allow(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j);

/* ---- the reference (reference.c) ----------------------------------------------------------------------------------- */

#if LDBL_MANT_DIG == 64
typedef long double wide;
#else
typedef double wide; /* here long double is emulated, or is double */
#endif

/* The right outputs and their allowed errors, by case_index. */
typedef struct {
    wide *value;
    double *error;
    size_t count;
} expected_array;

void reference_row(const live_case *c, ptrdiff_t head, ptrdiff_t i, expected_array *expected); /* adds to gradients */

#define ALL_TESTS(T)                                                                                                           \
    T(exp) T(convert) T(attention) T(varlen) T(rows) T(plan) T(random) T(update) T(transformer) T(quants) T(compact)
#define DECLARE_TEST(name) void test_##name(void);
ALL_TESTS(DECLARE_TEST)
void test_compact_models(void); /* test_compact calls it */

#endif
