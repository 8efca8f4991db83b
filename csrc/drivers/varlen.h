/* Ragged batches: packed sequences, each attending to itself alone. */
#ifndef SA_VARLEN_H
#define SA_VARLEN_H

#include "selfattn.h"

/* The packed arrays as one call with leading dims (1, H); L and S are totals. Sequence s has rows
 * begin_q[s] … begin_q[s + 1] − 1, and keys likewise; the caller has checked them. Scalars may differ between
 * sequences. Dropout counts rows and keys within the sequence, and uses head number s·H + h. */
typedef struct {
    const sa_attention *packed;
    ptrdiff_t sequences;
    const int64_t *begin_q, *begin_k;
    const sa_tensor *masks; /* one for each sequence, with data NULL if it has no mask; or NULL */
    bool lower_right;       /* the diagonal ends at the last query and key of each sequence */
} sa_varlen;

/* A sequence, in the order of work; `before` counts the tasks of each kind that come before the sequence's. */
typedef struct {
    ptrdiff_t sequence, turns;
    ptrdiff_t before[3];
    size_t partial; /* bytes of partial results before this sequence's */
    double cost;    /* the cost of the longest task */
} sa_varlen_item;

/* Sequences are cut like calls of their own, so they have the same bits. */
typedef struct {
    sa_varlen_item *items; /* the caller's memory, one for each sequence; the plan sorts them */
    ptrdiff_t tasks[3];    /* forward: blocks, merges; backward: deltas, first turn, masks */
    ptrdiff_t turns;
    size_t scratch_bytes;
    size_t partial_bytes;
    bool large;
    int threads;
} sa_varlen_plan;

sa_status sa_varlen_make_plan(const sa_varlen *v, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan);

sa_status sa_varlen_forward(const sa_varlen *v, const sa_varlen_plan *plan, void *scratch, void *partial);

/* Like sa_attention_gradients, for v->packed. Mask gradients are in dmasks. */
typedef struct {
    const sa_varlen *v;
    const sa_attention_gradients *packed;
    const sa_tensor *dmasks;
} sa_varlen_gradients;

sa_status sa_varlen_plan_backward(const sa_varlen_gradients *g, int max_threads, sa_varlen_item *items,
                                  sa_varlen_plan *plan);

sa_status sa_varlen_backward(const sa_varlen_gradients *g, const sa_varlen_plan *plan, void *scratch);

#endif
