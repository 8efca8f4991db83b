/* What the C tests of the core share: a check macro, random numbers, arrays of any layout, cases, and the reference that
 * they are held against. See test_core.c for how to run them. */
#ifndef SA_TEST_H
#define SA_TEST_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* ---- checks (test_core.c) ------------------------------------------------------------------------------------------ */

/* CHECK(condition, "what", …): counts, and prints the formatted rest when the condition is false. */
#define CHECK(...) CHECK_(__VA_ARGS__)
#define CHECK_(ok, ...) check_that((ok), __FILE__, __LINE__, __VA_ARGS__)
bool check_that(bool ok, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

extern bool quick;      /* fewer cases: for emulators and sanitizers */
extern bool exhaustive; /* every float32 */

/* ---- random numbers (arrays.c) ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t state;
} random_source;

uint64_t random_bits(random_source *r);                /* SplitMix64 */
ptrdiff_t random_below(random_source *r, ptrdiff_t n); /* 0 … n − 1 */
bool random_chance(random_source *r, double p);        /* true with probability p */
double random_between(random_source *r, double least, double most);

/* ---- elements and arrays (arrays.c) -------------------------------------------------------------------------------- */

double element_get(const char *p, sa_dtype dtype, bool swapped);
void element_set(char *p, sa_dtype dtype, bool swapped, double x); /* rounds to nearest even, as far as the dtype can */
double unit_roundoff(sa_dtype dtype);                              /* eps/2 of a floating dtype */
void *dirty_memory(size_t size); /* 64-byte aligned, every byte 0xFF: floats read before they are written are NaN */

/* How an array lies in memory. Flags combine. */
enum {
    TRANSPOSED = 1,   /* rows are the fastest axis */
    FLIPPED_ROWS = 2, /* negative strides */
    FLIPPED_COLS = 4,
    FLIPPED_LEAD = 8,
    STEPPED_COLS = 16,   /* every third element of a longer row */
    UNALIGNED = 32,      /* the first element at an odd address */
    ODD_LEAD = 64,       /* as a field of a packed record: leading strides are odd, all else is aligned */
    ODD_ROWS = 128,      /* row strides are odd */
    SWAPPED = 256,       /* the other byte order */
    LONG_ROWS = 512,     /* a row stride above 8 kB */
    HEADS_INSIDE = 1024, /* (B, L, H, D) in memory */
    ALL_LAYOUTS = 2048
};

/* Axes that are broadcast (stride 0, one element): bit i is leading axis i. */
enum { BROADCAST_ROWS = 1 << 8, BROADCAST_COLS = 1 << 9 };

typedef struct {
    int n_lead;
    ptrdiff_t lead[SA_MAX_LEAD], rows, cols; /* sizes as the call sees them */
} array_shape;

/* One allocation of exactly the bytes the elements span, so that a sanitizer sees a read beside it; an output has margins
 * instead, and every byte that belongs to no element keeps a pattern that is looked at afterwards. */
typedef struct {
    sa_tensor tensor;
    array_shape shape;
    char *memory;
    size_t bytes;
    char *before; /* a copy, made by array_remember */
} array;

void array_make(array *a, const array_shape *shape, sa_dtype dtype, unsigned layout, unsigned broadcast, bool output);
void array_free(array *a);
void array_remember(array *a);
bool array_unchanged(const array *a);
bool array_margins_intact(const array *a);
/* The matrix of flattened leading index `head`; the last leading axis counts in groups of `gqa`. */
char *array_head(const array *a, ptrdiff_t head, ptrdiff_t gqa);
char *array_at(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col);
double array_get(const array *a, ptrdiff_t head, ptrdiff_t gqa, ptrdiff_t row, ptrdiff_t col);

/* ---- cases (cases.c) ----------------------------------------------------------------------------------------------- */

/* NaN and infinities: none; in keys and values that nobody sees, and in queries that see nothing; NaN in some keys and values;
 * keys that score −inf, with NaN in their values; NaN in some queries. */
enum { NOT_POISONED, POISON_CLOSED, POISON_SOME, POISON_BEHIND, POISON_QUERIES };

/* Kinds of block masks; they combine. */
enum { PREFIX = 1, ONE_RUN = 2, RUNS = 4, MORE_RUNS = 8 };

/* The arrays of a case: those that are read, then those that are written. */
enum { QUERY, KEY, VALUE, MASK, ALIBI, SINKS, LENGTHS, GRAD_OUT, GRAD_LSE, INPUTS };
enum { OUT = INPUTS, LSE, WEIGHTS, STATS, D_QUERY, D_KEY, D_VALUE, D_MASK, D_SLOPES, D_SINKS, ARRAYS };

/* A call in a few numbers. Zero means the plain thing, save where said. */
typedef struct {
    ptrdiff_t L, S, E, Dv;
    int n_lead;
    ptrdiff_t lead[8];
    ptrdiff_t gqa;                                                            /* 1 without */
    sa_dtype query, key, value, out, mask;                                    /* mask: SA_DTYPES for none */
    unsigned query_layout, key_layout, value_layout, mask_layout, out_layout; /* that of grad_out is the output's */
    unsigned query_broadcast, key_broadcast, value_broadcast, mask_broadcast, scalar_broadcast;
    bool alibi, sinks, lengths, lse, weights, causal;
    bool backward, grad_lse;                       /* gradients of all inputs as well, also with one of lse */
    unsigned without;                              /* but not those: bits 1 << D_QUERY … */
    ptrdiff_t diagonal, window_left, window_right; /* windows: SA_UNBOUNDED where open */
    double scale, softcap, dropout_p;
    uint64_t seed;
    double magnitude;   /* of queries and keys */
    double closed;      /* share of mask elements that are closed */
    double mask_finite; /* the magnitude of a float mask; INFINITY: finfo.min, and 0.5 here and there */
    int block_masks;    /* kinds of them */
    int poison;
    int threads;  /* 0: as many as the plan wants of 2 */
    bool unsplit; /* one chunk, whatever the plan wanted */
} test_case;

/* What a block mask of a case points into (block_masks.c). */
typedef struct {
    array array; /* its classes, or its prefixes */
    ptrdiff_t classes;
    int64_t *starts;
    sa_run *runs;
    char *open; /* [classes][S], what the runs say */
} test_block_mask;

typedef struct {
    test_case spec;
    sa_attention call;
    sa_block_mask block_masks[SA_MAX_BLOCK_MASKS];
    test_block_mask block_tables[SA_MAX_BLOCK_MASKS];
    sa_attention_gradients gradients;
    array arrays[ARRAYS];    /* without memory where the call has none */
    double *numbers[INPUTS]; /* [heads][rows][cols] of inputs, while the reference is computed; else NULL */
    ptrdiff_t heads;
    ptrdiff_t chunks; /* of the last run */
    int looks;        /* how often its backward pass looked whether to stop */
} live_case;

test_case plain_case(sa_dtype dtype, ptrdiff_t L, ptrdiff_t S, ptrdiff_t E, ptrdiff_t Dv);
void case_make(live_case *c, const test_case *spec, uint64_t seed);
void case_free(live_case *c);
sa_status case_run(live_case *c);                                                   /* clears the outputs, plans, runs */
void case_verify(live_case *c, const char *title);                                  /* against the reference; one CHECK */
void case_try(const test_case *spec, uint64_t seed, const char *title);             /* all of that */
void case_tensors(sa_attention *a, sa_attention_gradients *g, sa_tensor **tensors); /* of all arrays, in their order */
char *case_at(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col);
size_t case_index(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col); /* of an element, in memory */
double case_get(const live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col);
void case_set(live_case *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col, double x);
bool case_allows(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j);
bool case_same_bits(const live_case *c, const live_case *other); /* of all outputs that both have */

/* ---- block masks (block_masks.c) ------------------------------------------------------------------------------------ */

void block_masks_make(live_case *c, random_source *r); /* for a call whose shapes are set */
void block_masks_free(live_case *c);
bool block_masks_allow(const live_case *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j);

/* ---- the reference (reference.c) ----------------------------------------------------------------------------------- */

#if LDBL_MANT_DIG == 64
typedef long double wide;
#else
typedef double wide; /* where long double is emulated, or is double */
#endif

/* What the outputs should be, and how far from it a right result may be: for each array by case_index. */
typedef struct {
    wide *value;
    double *error;
    size_t count; /* 0 where the call has no such array */
} expected_array;

void reference_row(const live_case *c, ptrdiff_t head, ptrdiff_t i, expected_array *expected); /* adds its gradients */
void reference_philox(int rounds, const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

/* ---- the tests ----------------------------------------------------------------------------------------------------- */

void test_exp(void);
void test_pack(void);
void test_attention(void);
void test_varlen(void);
void test_rows(void);
void test_plan(void);
void test_random(void);
void test_update(void);
void test_embedding(void);

#endif
