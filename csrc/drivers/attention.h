/* What the drivers of the forward and of the backward pass share: counting, kernels, and describing a block. Internal. */
#ifndef SA_ATTENTION_H
#define SA_ATTENTION_H

#include "kernels/kernels.h"

/* No size of one axis may exceed this; products are checked one by one. It keeps i + o and every window bound far from
 * overflow. */
#define SA_MAX_LENGTH ((ptrdiff_t)1 << 48)
#define SA_MAX_WIDTH ((ptrdiff_t)1 << 40)

static inline ptrdiff_t sa_ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

/* a / b and what is left. Small calls have one block of one group: without these divisions, and without clearing whole structs, a
 * call of 3×4 takes 3 % less. */
static inline ptrdiff_t sa_divide(ptrdiff_t a, ptrdiff_t b, ptrdiff_t *rest) {
    *rest = b == 1 ? 0 : a % b;
    return b == 1 ? a : a / b;
}

const sa_real_kernels *sa_kernels_of(const sa_attention *a);

/* The number of heads and of query rows of a call; false when they do not fit. */
bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows);

/* Whether queries and outputs of so many rows of all heads are more than the caches of the cores hold. */
bool sa_is_large(const sa_attention *a, ptrdiff_t rows);

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

/* Where tiles may begin for rows that see the keys from `key` on: dropout draws for four keys at a time. */
ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key);

/* Stretches of rows that a block mask gives keys of their own, as documents have: no row sees a key that the row before its
 * stretch sees. Blocks of rows begin and end with stretches, and tiles of keys begin with the first key of theirs. */
typedef struct {
    const sa_block_mask *mask; /* NULL: all rows are one stretch */
    const char *classes;       /* of the group's heads */
    ptrdiff_t class_rows;      /* of the group, that share an entry of classes */
    ptrdiff_t known, until;    /* a stretch that was found begins with entry `known` and has `until` - 1 as well */
} sa_stretches;

/* Of group number `group`, of G heads. */
sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group);

/* The first row from `row` on, at most `until`, that begins a block, when blocks have `most` rows or end with a stretch; *key is
 * the first key of the stretch's. The beginning of a stretch is looked for once while rows follow each other, up or down. */
ptrdiff_t sa_block_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key);

/* The row after the block that begins with row `from`: at most `until`. */
ptrdiff_t sa_block_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until);

/* The keys that the rows from … to − 1 may see, and others perhaps: of S. */
sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S);

/* What a thread keeps from task to task: whose packed keys its scratch holds, and the stretches of their group. */
typedef struct {
    ptrdiff_t keys, from; /* the group (or one chunk of its keys), and the first key; −1 when there are none */
    sa_stretches stretches;
} sa_held;

/* A second thread pays from about this many multiply-adds per thread on (measured: docs/guide/benchmarks.md, "Small sizes"). */
#define SA_WORK_PER_THREAD 98304.0

/* About how many of the pairs the block masks leave open, 0 … 1: no more than the strictest of them does. */
double sa_open_share(const sa_attention *a);

/* Task t of a forward plan, the blocks that begin with its rows; and the merge of block t where the keys are in chunks. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held);
void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial);

/* The gradient of a mask that rows share, or parts of the keys, or heads of a single block. The work on it is cut by the mask's own
 * elements, so that each has one writer, who goes through the heads and rows in order: S and dP are computed a second time, but
 * nothing is held. */
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
