/* What the drivers of the forward and of the backward pass share: counting, kernels, and describing a block. Internal. */
#ifndef SA_ATTENTION_H
#define SA_ATTENTION_H

#include "kernels/kernels.h"

/* No size of one axis may exceed this; products are checked one by one. It keeps i + o and every window bound far from
 * overflow. */
#define SA_MAX_LENGTH ((ptrdiff_t)1 << 48)
#define SA_MAX_WIDTH ((ptrdiff_t)1 << 40)

static inline ptrdiff_t sa_ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

const sa_real_kernels *sa_kernels_of(const sa_attention *a);

/* The number of heads and of query rows of a call; false when they do not fit. */
bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows);

/* Query heads that read the same keys and values: by GQA, or because trailing leading axes are broadcast there. */
ptrdiff_t sa_group_size(const sa_attention *a);

/* The leading index of flattened head number `head`, as the offset of one array. The last axis counts in key heads of
 * `gqa` query heads each for keys and values, singly for all others. */
ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa);

/* Describes at most `most` rows of group number `group`, of G heads, from row `from` on, and their block over all its keys.
 * Rows count positions first and heads of the group within a position, so that a causal block stays narrow whatever the
 * group. */
void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most, sa_rows *rows,
                       sa_block *b);

/* How many of a block's rows, from its first on, are best computed by themselves: those before the first row whose open keys begin
 * where the ones of the row before it have ended, as at the edge of two documents. Together, each would walk over both. */
ptrdiff_t sa_rows_together(const sa_rows *rows);

/* About how many of the pairs the block masks leave open, 0 … 1: no more than the strictest of them does. */
double sa_open_share(const sa_attention *a);

/* Between tasks: whether to stop. */
bool sa_cancelled(const sa_attention *a);

/* Task t of a forward plan, and the merge of block t where the keys are in chunks. *held says whose packed keys the scratch
 * holds: −1 when the scratch or the call is new. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       ptrdiff_t *held);
void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial);

/* The gradient of a mask that rows share, or that heads of a single block share. The work on it is cut by the mask's own elements,
 * so that each has one writer, who goes through the heads and rows in order: S and dP are computed a second time, but nothing
 * is held. */
typedef struct {
    ptrdiff_t owners, key_parts, keys, heads; /* keys of a part */
    ptrdiff_t tasks;                          /* 0 where the mask's gradient needs no pass of its own */
} sa_mask_plan;

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan);

/* The three kinds of work of a backward plan: delta of block t, task t of step `step` of the rotation, task t of the mask. */
void sa_backward_delta_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t t, char *scratch);
void sa_backward_part_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t,
                           char *scratch);
void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m, ptrdiff_t t,
                           char *scratch);
/* Tasks of a step of the rotation: 0 where nothing is asked for that it gives. */
ptrdiff_t sa_backward_part_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan);

#endif
