/* What the drivers of attention share: sizes, describing blocks (block.c), and the tasks of a plan. */
#ifndef SA_ATTENTION_H
#define SA_ATTENTION_H

#include "drivers/common.h"

/* The longest axis: diagonals and window bounds cannot overflow. Products of sizes are checked one by one. */
#define SA_MAX_LENGTH ((ptrdiff_t)1 << 48)
#define SA_MAX_WIDTH ((ptrdiff_t)1 << 40)

/* a / b and the rest. A division would cost a small call of one block something. */
static inline ptrdiff_t sa_divide(ptrdiff_t a, ptrdiff_t b, ptrdiff_t *rest) {
    *rest = b == 1 ? 0 : a % b;
    return b == 1 ? a : a / b;
}

/* The heads and query rows of a call; false on overflow. */
bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows);

/* Keys and values, or a mask, of this many bytes come from memory. */
#define SA_FAR_BYTES 24e6

/* Whether queries and outputs of so many rows exceed the caches of the cores. */
bool sa_is_large(const sa_attention *a, ptrdiff_t rows);

/* Query heads that read the same keys and values, by GQA or by broadcast trailing leading axes. */
ptrdiff_t sa_group_size(const sa_attention *a);

/* The offset of an array at a flattened head. gqa is a->gqa for keys, values and their gradients, else 1. */
ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa);

/* Where an array's head begins, or NULL for an absent array. */
static inline char *sa_at_head(const sa_attention *a, const sa_tensor *t, ptrdiff_t head) {
    return t->m.data ? t->m.data + sa_lead_offset(a, t, head, 1) : NULL;
}

/* Describes up to `most` rows from row `from` of a group, of G heads, and their block over all its keys. Heads of a group
 * are neighbouring rows: a causal block stays narrow. */
void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most, sa_rows *rows,
                       sa_block *b);

/* Where tiles may begin for rows that see keys from `key` on: dropout draws for four keys at a time. */
ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key);

/* Stretches: rows, as of one document, that share no key with the rows before. Blocks begin and end with stretches; tiles
 * of keys begin with a stretch's first key. */
typedef struct {
    const sa_block_mask *mask; /* NULL: one stretch */
    const char *classes;
    ptrdiff_t class_rows;   /* rows of the group that share an entry */
    ptrdiff_t known, until; /* a known stretch has the entries known … until − 1 of classes */
} sa_stretches;

sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group);

/* The first row from `row` to `until` that begins a block, when blocks have `most` rows or end with a stretch. *key is
 * the first key of its stretch. */
ptrdiff_t sa_stretch_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key);
static inline ptrdiff_t sa_block_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key) {
    *key = 0;
    return s->mask == NULL || row >= until ? row : sa_stretch_begin(s, row, most, until, key);
}

/* The end of the block that begins with row `from`, at most `until`. */
ptrdiff_t sa_stretch_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until);
static inline ptrdiff_t sa_block_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until) {
    return s->mask == NULL ? until : sa_stretch_end(s, from, until);
}

/* Rows from … to − 1 see no other of the S keys. */
sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S);

/* What a thread keeps from task to task: packed keys in its scratch, and stretches. */
typedef struct {
    ptrdiff_t keys, from; /* whose keys: the group (or its chunk) and the first key; −1 for none */
    sa_stretches stretches;
} sa_held;

/* Multiply-adds per thread from which a second thread pays. */
#define SA_WORK_PER_THREAD 98304.0

/* The share of open pairs under the strictest block mask. */
double sa_open_share(const sa_attention *a);

/* Task t of a forward plan: the blocks that begin with its rows. And the merge of block t, if keys are in chunks. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held);
void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial);

/* sa_describe_block, and the gradients of the rows. */
void sa_describe_backward_block(const sa_attention_gradients *g, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                                sa_rows *rows, sa_row_gradients *grads, sa_backward_block *b);

/* Leaves a block keys from … to − 1, from the first that a row sees. */
void sa_keep_keys(sa_block *b, ptrdiff_t from, ptrdiff_t to);

/* The pass of a mask's gradient (mask_gradient.c): its tasks have up to SA_MASK_KEYS keys. */
#define SA_MASK_KEYS ((ptrdiff_t)8 * SA_KEYS_PER_TILE)
typedef struct {
    ptrdiff_t owners, key_ranges, keys, heads; /* keys of a range */
    ptrdiff_t tasks;                           /* 0: no such pass */
} sa_mask_plan;

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan);

/* Whether rows share its elements and sum them in scratch. */
bool sa_sums_mask_apart(const sa_attention_gradients *g, const sa_backward_plan *plan);

/* Tasks of a backward plan: delta of block t, task t of a step of the rotation, task t of the mask. */
void sa_backward_delta_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t t, char *scratch);
void sa_backward_range_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t,
                            char *scratch);
void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m, ptrdiff_t t,
                           char *scratch);

/* Tasks of a step; 0 where no gradient of rows or keys is wanted. */
ptrdiff_t sa_backward_range_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan);

#endif
