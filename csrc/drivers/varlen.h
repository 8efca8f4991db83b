/* Ragged batches: sequences of any lengths, packed one behind the other, each attending to itself alone. Internal but for the
 * binding and the tests. */
#ifndef SA_VARLEN_H
#define SA_VARLEN_H

#include "selfattn.h"

/* The packed arrays as one call with leading dims (1, H), whose L and S are the totals; scalars for each head may have a stride from
 * sequence to sequence. Sequence s has the rows begin_q[s] … begin_q[s + 1] − 1, keys likewise; the caller has checked the offsets.
 * Dropout counts rows and keys within the sequence, and head s·H + h. */
typedef struct {
    const sa_attention *packed;
    ptrdiff_t sequences;
    const int64_t *begin_q, *begin_k; /* sequences + 1 */
    const sa_tensor *masks;           /* one for each sequence, data NULL for none; NULL when no sequence has one */
    bool lower_right;                 /* the diagonal ends in the last corner of each sequence */
} sa_varlen;

/* A sequence's place in the order of work: how many tasks of each kind the sequences before it have. */
typedef struct {
    ptrdiff_t sequence, steps;
    ptrdiff_t before[3];
    size_t partial; /* bytes of partial results before this sequence's */
    double cost;    /* of its dearest task */
} sa_varlen_item;

/* Each sequence is cut up as a call of its own would be, so its results have the same bits as that call's. */
typedef struct {
    sa_varlen_item *items; /* the caller's, one for each sequence; the plan puts them in order */
    ptrdiff_t tasks[3];    /* forward: blocks, merges; backward: deltas, tasks of step 0, tasks of masks */
    ptrdiff_t steps;       /* backward: of the longest rotation */
    size_t scratch_bytes;  /* for each thread */
    size_t partial_bytes;
    bool large; /* as in the plan of one call */
    int threads;
} sa_varlen_plan;

sa_status sa_varlen_make_plan(const sa_varlen *v, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan);

/* Runs the plan. scratch: plan.threads × plan.scratch_bytes; partial: plan.partial_bytes; both 64-byte aligned. */
sa_status sa_varlen_forward(const sa_varlen *v, const sa_varlen_plan *plan, void *scratch, void *partial);

/* The gradients of the packed arrays: as sa_attention_gradients says, `a` being v->packed, delta with one element for each row
 * of each head. The gradients of the masks stand apart. */
typedef struct {
    const sa_varlen *v;
    const sa_attention_gradients *packed;
    const sa_tensor *dmasks; /* as v->masks; NULL where that is. Each data is NULL when not wanted */
} sa_varlen_gradients;

sa_status sa_varlen_plan_backward(const sa_varlen_gradients *g, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan);

/* Runs the plan. scratch: plan.threads × plan.scratch_bytes, 64-byte aligned. */
sa_status sa_varlen_backward(const sa_varlen_gradients *g, const sa_varlen_plan *plan, void *scratch);

#endif
