/* The driver of search: the k rows with the largest dot products with a query, of all rows that are open. */
#ifndef SA_SEARCH_H
#define SA_SEARCH_H

#include "drivers/common.h"

#define SA_SEARCH_COLUMNS ((ptrdiff_t)1 << 17) /* sums of up to this many products of int8 fit int32 */

/* All arrays are contiguous. With int8 a query is rounded to 8 bits with a scale of its own; one that is not finite has
 * only NaN as scores. Scores descend, NaN come last, and equal ones are in the order of positions. */
typedef struct {
    ptrdiff_t queries, n, d, k; /* k ≤ the number of open rows */
    const float *query;         /* (queries, d) */
    const char *vectors;        /* (n, d): float32, or int8 if there are scales */
    const float *scales;        /* (n,), or NULL */
    const uint8_t *keep;        /* (n,): 0 closes a row; or NULL */
    float *scores;              /* (queries, k) */
    int64_t *positions;         /* (queries, k); −1 if another thread has closed rows meanwhile */
    int threads;
    sa_watch *watch;
} sa_search;

/* The bytes of scratch of a thread; SIZE_MAX if the sizes do not fit. */
size_t sa_search_scratch(const sa_search *s);
void sa_search_run(const sa_search *s, char *scratch);

#endif
