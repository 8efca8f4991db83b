/* For the drivers of attention: sizes, descriptions of blocks, tasks. */
#ifndef SA_ATTENTION_H
#define SA_ATTENTION_H

#include "drivers/common.h"

/* Counts heads and rows. False on overflow. */
bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows);

/* Keys and values, or a mask, of this many bytes do not fit CPU caches and come from memory. */
#define SA_FAR_BYTES 24e6

/* True if queries and outputs of `rows` rows exceed the cores' caches. */
bool sa_is_large(const sa_attention *a, ptrdiff_t rows);

/* The number of query heads with the same keys and values, by GQA or because trailing leading axes are broadcast. */
ptrdiff_t sa_group_size(const sa_attention *a);

/* The offset of a flattened head in an array. gqa is a->gqa for keys, values and their gradients, else 1. */
ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa);

static inline char *sa_at_head(const sa_attention *a, const sa_tensor *t, ptrdiff_t head) {
    return t->m.data ? t->m.data + sa_lead_offset(a, t, head, 1) : NULL;
}

/* Describes up to `most` rows, from row `from` of a group of G heads, and their block with all keys of the group. Rows
 * of one query in all heads of a group are neighbours, so causal blocks are narrow. */
void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                       sa_rows *rows, sa_block *b);

/* The key at which tiles begin for keys from `key` on: dropout draws for four keys at a time, and
 * with by_rows tiles are the same for all rows. */
ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key);

/* Stretches are rows, such as a document's, that have no key in common with the rows before. A block does not cross the
 * end of a stretch, and tiles begin with a stretch's first key. */
typedef struct {
    const sa_block_mask *mask; /* NULL: one stretch */
    const char *classes;
    ptrdiff_t class_rows;   /* rows for each entry of classes */
    ptrdiff_t known, until; /* entries known … until − 1 are known to be one stretch */
} sa_stretches;

sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group);

/* The next row from `row` on, at most `until`, at which a block begins. Blocks have `most` rows, or fewer where a
 * stretch ends. *key becomes the first key of the row's stretch. */
ptrdiff_t sa_stretch_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key);
static inline ptrdiff_t sa_block_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until,
                                       ptrdiff_t *key) {
    *key = 0;
    return s->mask == NULL || row >= until ? row : sa_stretch_begin(s, row, most, until, key);
}

/* The end of the block that begins at row `from`, at most `until`. */
ptrdiff_t sa_stretch_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until);
static inline ptrdiff_t sa_block_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until) {
    return s->mask == NULL ? until : sa_stretch_end(s, from, until);
}

/* The keys that rows from … to − 1 may see. */
sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S);

/* What a thread keeps between tasks: copied keys and stretches. */
typedef struct {
    ptrdiff_t chunk, from; /* group × chunks + chunk, and the first key, of the copied keys; −1: there are none */
    sa_stretches stretches;
} sa_held;

#define SA_WORK_PER_THREAD 98304.0

/* The fraction of pairs that the strictest block mask opens. */
double sa_open_fraction(const sa_attention *a);

/* The first function runs task t: the blocks that begin in the task's rows. The second merges the chunks of block t. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held);
void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial);

/* A separate pass for a mask's gradient. */
typedef struct {
    ptrdiff_t owners, key_ranges, range_keys, heads; /* range_keys: keys of a range */
    ptrdiff_t tasks;
} sa_mask_plan;

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan);

void sa_backward_delta_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t t, char *scratch);
/* Waits until *ahead counts enough rows of the group before; counts the rows that it has done in *done.
 * Either may be SA_NOT_COUNTED. */
#define SA_NOT_COUNTED NULL
void sa_backward_range_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t turn, ptrdiff_t t,
                            char *scratch, const ptrdiff_t *ahead, ptrdiff_t *done);
void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m,
                           ptrdiff_t t, char *scratch);

/* The number of tasks of a turn; 0 if no gradient needs them. */
ptrdiff_t sa_backward_range_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan);

#endif
