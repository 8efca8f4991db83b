/* The driver of search: of all rows that are open, the k with the largest dot products with a query. */
#ifndef SA_SEARCH_H
#define SA_SEARCH_H

#include "drivers/common.h"

/* Sums of int8 products fit int32 up to this many columns. */
#define SA_SEARCH_COLUMNS ((ptrdiff_t)1 << 17)

/* All arrays are contiguous. A query of int8 is rounded to 8 bits with a scale of its own; one that is not finite has only NaN
 * as scores. Scores descend, NaN come last, and equal ones are in the order of positions. */
typedef struct {
    ptrdiff_t queries, n, d, k; /* k ≤ the number of open rows */
    const float *query;         /* (queries, d) */
    const void *vectors;        /* (n, d): float32, or int8 if there are scales */
    const float *scales;        /* (n,), or NULL */
    const uint8_t *keep;        /* (n,): 0 closes a row; or NULL */
    float *scores;              /* (queries, k) */
    int64_t *positions;         /* (queries, k); −1 if rows were closed while the call ran */
    sa_watch *watch;
} sa_search;

ptrdiff_t sa_search_count(const uint8_t *keep, ptrdiff_t n);
int sa_search_threads(const sa_search *s, int max_threads);

/* False if the sizes do not fit. Each thread has `scratch` bytes, and all share `shared` bytes. */
bool sa_search_memory(const sa_search *s, size_t *scratch, size_t *shared);
void sa_search_run(const sa_search *s, int threads, char *scratch, char *shared);

#endif
