/* What the drivers of attention share: counting, kernels, describing blocks (block.c), and the tasks of a plan. Internal. */
#ifndef SA_ATTENTION_H
#define SA_ATTENTION_H

#include "drivers/common.h"

/* No axis may be longer: it keeps i + o and every window bound far from overflow. Products are checked one by one. */
#define SA_MAX_LENGTH ((ptrdiff_t)1 << 48)
#define SA_MAX_WIDTH ((ptrdiff_t)1 << 40)

/* a / b and what is left. Small calls have one block of one group, where a division costs something. */
static inline ptrdiff_t sa_divide(ptrdiff_t a, ptrdiff_t b, ptrdiff_t *rest) {
    *rest = b == 1 ? 0 : a % b;
    return b == 1 ? a : a / b;
}

/* The number of heads and of query rows of a call; false when they do not fit. */
bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows);

/* Bytes of keys and values, or of a mask, that come from memory, not from the caches. */
#define SA_FAR_BYTES 24e6

/* Whether queries and outputs of so many rows of all heads are more than the caches of the cores hold. */
bool sa_is_large(const sa_attention *a, ptrdiff_t rows);

/* Query heads that read the same keys and values: by GQA, or because trailing leading axes are broadcast there. */
ptrdiff_t sa_group_size(const sa_attention *a);

/* The offset of one array at flattened head number `head`. The last axis counts key heads of `gqa` query heads each; gqa is 1 for all
 * arrays but keys, values and their gradients. */
ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa);

/* Where its elements for a head begin; NULL where the array is absent. */
static inline char *sa_at_head(const sa_attention *a, const sa_tensor *t, ptrdiff_t head) {
    return t->m.data ? t->m.data + sa_lead_offset(a, t, head, 1) : NULL;
}

/* Describes at most `most` rows of group number `group`, of G heads, from row `from` on, and their block over all its keys. The heads of a
 * group are neighbouring rows, so that a causal block is narrow. */
void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most, sa_rows *rows,
                       sa_block *b);

/* Where tiles may begin for rows that see the keys from `key` on: dropout draws for four keys at a time. */
ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key);

/* Stretches of rows that a block mask gives keys of their own, as documents have: no row sees a key that the row before its stretch sees.
 * Blocks of rows begin and end with stretches, and tiles of keys begin with the first key of theirs. */
typedef struct {
    const sa_block_mask *mask; /* NULL: all rows are one stretch */
    const char *classes;       /* of the group's heads */
    ptrdiff_t class_rows;      /* of the group, that share an entry of classes */
    ptrdiff_t known, until;    /* a stretch that was found begins with entry `known` and has `until` - 1 as well */
} sa_stretches;

/* Of group number `group`, of G heads. */
sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group);

/* The first row from `row` on, at most `until`, that begins a block, when blocks have `most` rows or end with a stretch; *key is the first
 * key of its stretch. */
ptrdiff_t sa_stretch_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key);
static inline ptrdiff_t sa_block_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key) {
    *key = 0;
    return s->mask == NULL || row >= until ? row : sa_stretch_begin(s, row, most, until, key);
}

/* The row after the block that begins with row `from`: at most `until`. */
ptrdiff_t sa_stretch_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until);
static inline ptrdiff_t sa_block_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until) {
    return s->mask == NULL ? until : sa_stretch_end(s, from, until);
}

/* The keys, of S, beyond which the rows from … to − 1 see none. */
sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S);

/* What a thread keeps from task to task: whose packed keys its scratch holds, and the stretches of their group. */
typedef struct {
    ptrdiff_t keys, from; /* the group (or one chunk of its keys), and the first key; −1 when there are none */
    sa_stretches stretches;
} sa_held;

/* A second thread pays from about this many multiply-adds per thread on. */
#define SA_WORK_PER_THREAD 98304.0

/* About which share of the pairs the block masks leave open: no more than the strictest of them does. */
double sa_open_share(const sa_attention *a);

/* Task t of a forward plan, the blocks that begin with its rows; and the merge of block t where the keys are in chunks. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held);
void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial);

/* Describes a block as sa_describe_block does, and the gradients of its rows beside it. */
void sa_describe_backward_block(const sa_attention_gradients *g, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                                sa_rows *rows, sa_row_gradients *grads, sa_backward_block *b);

/* Leaves a block with the keys from … to − 1, from the first on that a row may see. */
void sa_keep_keys(sa_block *b, ptrdiff_t from, ptrdiff_t to);

/* A mask's gradient that has a pass of its own (mask_gradient.c), cut into tasks of so many keys. */
#define SA_MASK_KEYS ((ptrdiff_t)8 * SA_KEYS_PER_TILE)
typedef struct {
    ptrdiff_t owners, key_ranges, keys, heads; /* keys of a range */
    ptrdiff_t tasks;                           /* 0 where the mask's gradient needs no pass of its own */
} sa_mask_plan;

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan);

/* Whether rows share elements of it, so that they are summed in the scratch. */
bool sa_sums_mask_apart(const sa_attention_gradients *g, const sa_backward_plan *plan);

/* The three kinds of work of a backward plan: delta of block t, task t of step `step` of the rotation, task t of the mask. */
void sa_backward_delta_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t t, char *scratch);
void sa_backward_range_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t,
                            char *scratch);
void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m, ptrdiff_t t,
                           char *scratch);

/* Tasks of a step of the rotation: 0 where nothing is asked for that it gives. */
ptrdiff_t sa_backward_range_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan);

#endif
