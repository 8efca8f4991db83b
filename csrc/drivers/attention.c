/* Driver of attention's forward pass: cuts a call into tasks, describes blocks for the kernels, and runs the tasks. */
#include <string.h>

#include "drivers/attention.h"
#include "runtime/team.h"

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

/* Keys are split into chunks of this length or more until there are enough tasks,
 * of twice this length until there are many. */
#define SA_LEAST_CHUNK 1024
#define SA_ENOUGH_TASKS 16
#define SA_MANY_TASKS 64

#define SA_MANY_NUMBERS ((ptrdiff_t)1 << 20)

static bool is_shared(const sa_tensor *t, int axis) { return t->m.data == NULL || t->lead_stride[axis] == 0; }

bool sa_shares_keys(const sa_attention *a, int axis) {
    return a->key.lead_stride[axis] == 0 && a->value.lead_stride[axis] == 0 &&
           (!a->with_tangents || (is_shared(&a->key_tangent, axis) && is_shared(&a->value_tangent, axis)));
}

ptrdiff_t sa_group_size(const sa_attention *a) {
    ptrdiff_t group = a->gqa;
    int axis = a->n_lead - 1;
    if (axis >= 0 && a->gqa > 1) {
        if (a->gqa != a->lead[axis]) {
            return group;
        }
        --axis;
    }
    for (; axis >= 0 && sa_shares_keys(a, axis); --axis) {
        group *= a->lead[axis];
    }
    return group;
}

bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows) {
    if (a->L > SA_MAX_LENGTH || a->S > SA_MAX_LENGTH || a->E > SA_MAX_WIDTH || a->Dv > SA_MAX_WIDTH) {
        return false;
    }
    *heads = 1;
    for (int axis = 0; axis < a->n_lead; ++axis) {
        if (!sa_multiply(*heads, (size_t)a->lead[axis], heads)) {
            return false;
        }
    }
    return sa_multiply(*heads, (size_t)a->L, rows) && *rows <= PTRDIFF_MAX / 64;
}

bool sa_is_large(const sa_attention *a, ptrdiff_t rows) {
    return rows >= SA_MANY_NUMBERS / (a->E + a->Dv + 1); /* E + Dv may be 0 */
}

static size_t key_bytes(const sa_attention *a) {
    return (size_t)a->E * sa_itemsize(a->key.m.dtype) + (size_t)a->Dv * sa_itemsize(a->value.m.dtype);
}

static ptrdiff_t partial_rows(const sa_attention_plan *plan) { return sa_smaller(plan->rows, plan->block_rows); }
static size_t partial_bytes(const sa_attention *a, const sa_attention_plan *plan) {
    return sa_kernels_for(a->f64)->attention_partial(a, partial_rows(plan));
}

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    size_t heads, rows, tasks;
    if (!sa_count_rows(a, &heads, &rows)) {
        return SA_TOO_LARGE;
    }
    plan->group = plan->groups = plan->rows = plan->blocks = plan->tasks = 0; /* clearing the whole struct is slower */
    plan->block_rows = a->with_tangents ? kernels->backward_rows : kernels->block_rows;
    plan->chunks = plan->threads = 1;
    plan->large = plan->far = false;
    plan->chunk_keys = a->S;
    plan->scratch_bytes = plan->partial_bytes = 0;
    const bool no_weights = a->weights.m.data == NULL || a->S == 0;
    if (rows == 0 || (a->Dv == 0 && a->lse.m.data == NULL && a->stats.m.data == NULL && no_weights)) {
        return SA_OK; /* there may be too many rows without outputs to loop over */
    }
    plan->group = sa_group_size(a);
    plan->groups = plan->group == 1 ? (ptrdiff_t)heads : (ptrdiff_t)heads / plan->group;
    plan->large = sa_is_large(a, (ptrdiff_t)rows);
    plan->far = (double)plan->groups * (double)a->S * (double)key_bytes(a) >= SA_FAR_BYTES;
    plan->rows = plan->group * a->L;
    plan->blocks = plan->rows <= plan->block_rows ? 1 : sa_ceil_div(plan->rows, plan->block_rows);
    const ptrdiff_t whole = plan->groups * plan->blocks;
    if (whole < SA_MANY_TASKS && a->S >= 2 * SA_LEAST_CHUNK && !a->by_rows && !a->with_tangents) {
        const ptrdiff_t enough = sa_smaller(a->S / SA_LEAST_CHUNK, sa_ceil_div(SA_ENOUGH_TASKS, whole));
        const ptrdiff_t many = sa_smaller(a->S / (2 * SA_LEAST_CHUNK), sa_ceil_div(SA_MANY_TASKS, whole));
        plan->chunk_keys = sa_ceil_div(sa_ceil_div(a->S, sa_larger(enough, many)), SA_KEYS_PER_TILE) * SA_KEYS_PER_TILE;
        plan->chunks = sa_ceil_div(a->S, plan->chunk_keys);
    }
    if (!sa_multiply((size_t)whole, (size_t)plan->chunks, &tasks)) {
        return SA_TOO_LARGE;
    }
    plan->tasks = (ptrdiff_t)tasks;
    plan->scratch_bytes =
        sa_whole_lines(a->with_tangents ? kernels->jvp_scratch_bytes(a) : kernels->attention_scratch(a)) +
        SA_CACHE_LINE;
    if (plan->chunks > 1 && !sa_multiply(tasks, partial_bytes(a, plan) + sizeof(ptrdiff_t), &plan->partial_bytes)) {
        return SA_TOO_LARGE;
    }
    const double work = (double)rows * (double)a->S * (double)(a->E + a->Dv + 16) * sa_open_fraction(a);
    plan->threads = sa_threads_for(work, SA_WORK_PER_THREAD, (double)tasks, max_threads);
    return SA_OK;
}

double sa_open_fraction(const sa_attention *a) {
    double fraction = 1;
    for (int m = 0; m < a->block_mask_count; ++m) {
        fraction = a->block_masks[m].open_fraction < fraction ? a->block_masks[m].open_fraction : fraction;
    }
    return fraction;
}

/* ---- blocks: each row, and the keys that it may see -------------------------------------------------------------- */

ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa) {
    ptrdiff_t offset = 0;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        ptrdiff_t index = head % a->lead[axis];
        head /= a->lead[axis];
        if (axis == a->n_lead - 1) {
            index /= gqa;
        }
        offset += index * t->lead_stride[axis];
    }
    return offset;
}

/* The keys that causal, window and length leave open to the query at position `at`. */
static void open_keys(const sa_attention *a, ptrdiff_t at, ptrdiff_t length, ptrdiff_t *lo, ptrdiff_t *hi) {
    *lo = 0;
    *hi = length;
    if (a->causal && at + 1 < *hi) {
        *hi = at + 1;
    }
    if (a->window_left != SA_UNBOUNDED && at - a->window_left > 0) {
        *lo = at - a->window_left;
    }
    if (a->window_right != SA_UNBOUNDED && at + a->window_right + 1 < *hi) {
        *hi = at + a->window_right + 1;
    }
    if (*hi < *lo || *hi <= 0 || *lo >= length) {
        *lo = *hi = 0;
    }
}

/* Narrows row r, row i of its head, to the hull of the keys that block masks open;
 * notes their runs if they have gaps. */
static void narrow(const sa_attention *a, const ptrdiff_t *offset, ptrdiff_t i, sa_rows *rows, int r) {
    int lists = 0;
    for (int m = 0; m < a->block_mask_count; ++m) {
        const sa_block_mask *mask = &a->block_masks[m];
        int64_t from = 0, to;
        if (mask->prefix.m.data) {
            const int64_t prefix = *(const int64_t *)(const void *)(mask->prefix.m.data + offset[m]);
            to = i + mask->diagonal + 1 > prefix ? i + mask->diagonal + 1 : prefix;
        } else {
            const char *class = mask->classes.m.data + offset[m] + i / mask->class_rows * mask->classes.m.row_stride;
            const int64_t *start = mask->starts + *(const int64_t *)(const void *)class;
            const sa_run *runs = mask->runs + start[0], *end = mask->runs + start[1];
            from = runs < end ? runs[0].lo : 0;
            to = runs < end ? end[-1].hi : 0;
            if (mask->gaps) {
                rows->runs[lists][r] = runs;
                rows->runs_end[lists++][r] = end;
            }
        }
        from = from < rows->hi[r] ? from : rows->hi[r]; /* runs beyond the last key may not fit a ptrdiff_t */
        rows->lo[r] = from > rows->lo[r] ? (ptrdiff_t)from : rows->lo[r];
        rows->hi[r] = to < rows->hi[r] ? (ptrdiff_t)to : rows->hi[r];
    }
    rows->gaps = lists;
    if (rows->lo[r] >= rows->hi[r]) {
        rows->lo[r] = rows->hi[r] = 0;
    }
}

ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key) {
    const ptrdiff_t multiple = a->by_rows ? SA_KEYS_PER_TILE : a->dropout_p > 0 ? 4 : 1;
    return key / multiple * multiple;
}

/* True if the mask's elements, each counted once, come from memory. If not, fetching ahead does not pay. */
static bool is_mask_far(const sa_attention *a) {
    const sa_tensor *mask = &a->mask;
    double elements = (mask->m.row_stride == 0 ? 1.0 : (double)a->L) * (mask->m.col_stride == 0 ? 1.0 : (double)a->S);
    for (int axis = 0; axis < a->n_lead; ++axis) {
        elements *= mask->lead_stride[axis] == 0 ? 1.0 : (double)a->lead[axis];
    }
    return elements * (double)sa_itemsize(mask->m.dtype) >= SA_FAR_BYTES;
}

typedef struct {
    const char *query, *mask, *gate, *offset_bias;
    char *out, *lse, *weights, *stats;
    double slope, sink;
    const char *query_tangent, *mask_tangent, *offset_bias_tangent;
    double slope_tangent, sink_tangent;
    ptrdiff_t length, queries, diagonal; /* number of keys, and of queries that are not padding */
    ptrdiff_t block_mask[SA_MAX_BLOCK_MASKS];
} head_arrays;

static double number_of(const sa_attention *a, const sa_tensor *t, ptrdiff_t head) {
    return t->m.data ? *(const double *)(const void *)sa_at_head(a, t, head) : 0;
}

static ptrdiff_t count_of(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t otherwise) {
    return t->m.data ? (ptrdiff_t)*(const int64_t *)(const void *)sa_at_head(a, t, head) : otherwise;
}

static void find_head(const sa_attention *a, ptrdiff_t head, head_arrays *h) {
    h->query = sa_at_head(a, &a->query, head);
    h->mask = sa_at_head(a, &a->mask, head);
    h->gate = a->mask.m.data ? sa_at_head(a, &a->gate, head) : NULL; /* it is beside a float mask */
    h->offset_bias = sa_at_head(a, &a->offset_bias, head);
    h->out = sa_at_head(a, &a->out, head);
    h->lse = sa_at_head(a, &a->lse, head);
    h->weights = sa_at_head(a, &a->weights, head);
    h->stats = sa_at_head(a, &a->stats, head);
    h->slope = number_of(a, &a->alibi, head);
    h->sink = number_of(a, &a->sinks, head);
    if (a->with_tangents) {
        h->query_tangent = sa_at_head(a, &a->query_tangent, head);
        h->mask_tangent = sa_at_head(a, &a->mask_tangent, head);
        h->offset_bias_tangent = sa_at_head(a, &a->offset_bias_tangent, head);
        h->slope_tangent = number_of(a, &a->alibi_tangent, head);
        h->sink_tangent = number_of(a, &a->sink_tangent, head);
    }
    h->length = count_of(a, &a->key_lengths, head, a->S);
    h->queries = count_of(a, &a->query_lengths, head, a->L);
    h->diagonal = a->query_lengths.m.data ? h->length - h->queries : a->diagonal;
    for (int m = 0; m < a->block_mask_count; ++m) {
        const sa_block_mask *mask = &a->block_masks[m];
        h->block_mask[m] = sa_lead_offset(a, mask->prefix.m.data ? &mask->prefix : &mask->classes, head, 1);
    }
}

static char *row_of(char *array, const sa_tensor *t, ptrdiff_t i) { return array ? array + i * t->m.row_stride : NULL; }

/* Row r of the block is row i of the head. */
static void describe_row(const sa_attention *a, const head_arrays *h, ptrdiff_t head, ptrdiff_t i, bool has_options,
                         sa_rows *rows, int r) {
    rows->query[r] = h->query + i * a->query.m.row_stride;
    rows->out[r] = h->out + i * a->out.m.row_stride;
    if (has_options) { /* without options this is skipped: it is half of this function's stores */
        rows->mask[r] = h->mask ? h->mask + i * a->mask.m.row_stride : NULL;
        if (h->gate) {
            rows->gate[r] = h->gate + i * a->gate.m.row_stride;
        }
        if (h->offset_bias) {
            rows->offset_bias[r] = h->offset_bias + i * a->offset_bias.m.row_stride;
        }
        rows->lse[r] = row_of(h->lse, &a->lse, i);
        rows->weights[r] = row_of(h->weights, &a->weights, i);
        rows->stats[r] = row_of(h->stats, &a->stats, i);
        rows->head[r] = (uint64_t)(a->first_head + head);
        rows->slope[r] = h->slope;
        rows->sink[r] = h->sink;
        if (a->with_tangents) {
            rows->query_tangent[r] = h->query_tangent ? h->query_tangent + i * a->query_tangent.m.row_stride : NULL;
            rows->mask_tangent[r] = h->mask_tangent ? h->mask_tangent + i * a->mask_tangent.m.row_stride : NULL;
            rows->offset_bias_tangent[r] =
                h->offset_bias_tangent ? h->offset_bias_tangent + i * a->offset_bias_tangent.m.row_stride : NULL;
            rows->slope_tangent[r] = h->slope_tangent;
            rows->sink_tangent[r] = h->sink_tangent;
        }
    }
    rows->index[r] = i;
    rows->position[r] = i + h->diagonal;
    open_keys(a, i + h->diagonal, i < h->queries ? h->length : 0, &rows->lo[r], &rows->hi[r]);
    if (a->block_mask_count > 0) {
        narrow(a, h->block_mask, i, rows, r);
    }
}

/* The rows of keys or values of a head, or none. */
static sa_matrix at_group(const sa_attention *a, const sa_tensor *t, ptrdiff_t head) {
    sa_matrix m = t->m;
    m.data = m.data ? m.data + sa_lead_offset(a, t, head, a->gqa) : NULL;
    return m;
}

/* Describes the keys of a block. Clearing the whole struct would be slower. */
static void describe_keys(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, sa_rows *rows, ptrdiff_t begin,
                          ptrdiff_t end, sa_block *b) {
    begin = begin >= end ? end : rows->gaps > 0 ? begin / 4 * 4 : sa_tiles_from(a, begin);
    rows->clipped = rows->gaps > 0 || rows->open_from > begin || rows->open_to < end;
    b->a = a;
    b->rows = rows;
    b->key = at_group(a, &a->key, group * G);
    b->value = at_group(a, &a->value, group * G);
    if (a->with_tangents) {
        b->key_tangent = at_group(a, &a->key_tangent, group * G);
        b->value_tangent = at_group(a, &a->value_tangent, group * G);
    }
    b->key_bias = a->key_bias.m.data ? a->key_bias.m.data + sa_lead_offset(a, &a->key_bias, group * G, a->gqa) : NULL;
    b->begin = begin;
    b->end = b->open_end = end;
    b->keys = a->key_lengths.m.data ? 0 : a->S;
    for (ptrdiff_t head = group * G; head < group * G + G && a->key_lengths.m.data; ++head) {
        b->keys = sa_larger(b->keys, count_of(a, &a->key_lengths, head, 0));
    }
    b->copied_from = b->ahead = b->keys_ahead = 0;
    b->holds_copies = b->fetches = b->far = false;
    b->mask_far = a->mask.m.data && is_mask_far(a);
    b->whole = rows->count == G * a->L;
    b->first_chunk = true;
    b->partial = NULL;
}

void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                       sa_rows *rows, sa_block *b) {
    const int count = (int)sa_smaller(G * a->L - from, most);
    const bool has_options = a->mask.m.data || a->lse.m.data || a->weights.m.data || a->stats.m.data ||
                             a->alibi.m.data || a->sinks.m.data || a->dropout_p > 0 || a->offset_bias.m.data ||
                             a->with_tangents;
    ptrdiff_t begin = PTRDIFF_MAX, end = 0, open_from = 0, open_to = PTRDIFF_MAX;
    rows->count = count;
    rows->gaps = 0;
    for (int first = 0; first < count && first < G; ++first) {
        head_arrays h;
        ptrdiff_t head, i = sa_divide(from + first, G, &head);
        head += group * G;
        find_head(a, head, &h);
        for (ptrdiff_t r = first; r < count; r += G, ++i) {
            describe_row(a, &h, head, i, has_options, rows, (int)r);
            if (rows->lo[r] < rows->hi[r]) {
                begin = sa_smaller(begin, rows->lo[r]);
                end = sa_larger(end, rows->hi[r]);
            }
            open_from = sa_larger(open_from, rows->lo[r]);
            open_to = sa_smaller(open_to, rows->hi[r]);
        }
    }
    rows->open_from = open_from;
    rows->open_to = open_to;
    describe_keys(a, G, group, rows, begin, end, b);
}

/* ---- stretches: where block masks let blocks end ----------------------------------------------------------------- */

static int64_t class_of(const sa_stretches *s, ptrdiff_t at) {
    return *(const int64_t *)(const void *)(s->classes + at * s->mask->classes.m.row_stride);
}

static sa_run keys_of(const sa_stretches *s, ptrdiff_t at) {
    const int64_t *start = s->mask->starts + class_of(s, at);
    return start[0] < start[1] ? s->mask->runs[start[0]] : (sa_run){0, 0};
}

/* True if entries at − 1 and `at` are in one stretch. */
static bool continues(const sa_stretches *s, ptrdiff_t at) {
    if (class_of(s, at - 1) == class_of(s, at)) {
        return true;
    }
    const sa_run before = keys_of(s, at - 1), here = keys_of(s, at);
    return before.lo < here.hi && here.lo < before.hi;
}

sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group) {
    for (int m = 0; m < a->block_mask_count; ++m) {
        const sa_block_mask *mask = &a->block_masks[m];
        bool one = mask->prefix.m.data == NULL && !mask->gaps;
        const ptrdiff_t offset = one ? sa_lead_offset(a, &mask->classes, group * G, 1) : 0;
        for (ptrdiff_t head = 1; one && head < G; ++head) {
            one = sa_lead_offset(a, &mask->classes, group * G + head, 1) == offset;
        }
        if (one) {
            return (sa_stretches){.mask = mask,
                                  .classes = mask->classes.m.data + offset,
                                  .class_rows = sa_smaller(mask->class_rows, a->L) * G};
        }
    }
    return (sa_stretches){.mask = NULL};
}

ptrdiff_t sa_stretch_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key) {
    ptrdiff_t at = row / s->class_rows;
    while (at > 0 && continues(s, at)) {
        at = at > s->known && at < s->until ? s->known : at - 1;
    }
    s->known = at;
    s->until = row / s->class_rows + 1;
    const ptrdiff_t begin = at * s->class_rows, next = sa_smaller(begin + sa_ceil_div(row - begin, most) * most, until);
    const ptrdiff_t end = sa_stretch_end(s, row, next);
    *key = (ptrdiff_t)keys_of(s, end < next ? end / s->class_rows : at).lo;
    return end;
}

ptrdiff_t sa_stretch_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until) {
    for (ptrdiff_t at = from / s->class_rows + 1; at * s->class_rows < until; ++at) {
        if (!continues(s, at)) {
            return at * s->class_rows;
        }
    }
    return until;
}

sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S) {
    if (s->mask == NULL) {
        return (sa_run){0, S};
    }
    sa_run all = keys_of(s, from / s->class_rows);
    for (ptrdiff_t at = from / s->class_rows + 1; at * s->class_rows < to; ++at) {
        const sa_run here = keys_of(s, at);
        all = (sa_run){here.lo < all.lo ? here.lo : all.lo, here.hi > all.hi ? here.hi : all.hi};
    }
    return all;
}

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

static const char *query_of(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t r) {
    return a->query.m.data + sa_lead_offset(a, &a->query, group * G + r % G, 1) + r / G * a->query.m.row_stride;
}

static void look_ahead(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, sa_block *b) {
    if (!plan->large || plan->chunks > 1 || t + 1 >= plan->tasks) {
        return;
    }
    ptrdiff_t here, next;
    const ptrdiff_t G = plan->group, last = plan->blocks - 1, most = plan->block_rows;
    const ptrdiff_t group = sa_divide(t, plan->blocks, &here), next_group = sa_divide(t + 1, plan->blocks, &next);
    b->ahead = (ptrdiff_t)((uintptr_t)query_of(a, G, next_group, (last - next) * most) -
                           (uintptr_t)query_of(a, G, group, (last - here) * most));
    if (next_group != group) {
        b->keys_ahead =
            sa_lead_offset(a, &a->key, next_group * G, a->gqa) - sa_lead_offset(a, &a->key, group * G, a->gqa);
    }
}

/* Groups are the outer loop, so threads use one head's keys.
 * The last rows come first: in causal calls they see most keys. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    ptrdiff_t chunk, block;
    const ptrdiff_t group = sa_divide(sa_divide(t, plan->chunks, &chunk), plan->blocks, &block),
                    most = plan->block_rows;
    const ptrdiff_t first = (plan->blocks - 1 - block) * most, end = sa_smaller(first + most, plan->rows);
    const ptrdiff_t number = group * plan->chunks + chunk;
    sa_stretches *stretches = &held->stretches;
    if (held->chunk != number) {
        *stretches = plan->chunks == 1 ? sa_find_stretches(a, plan->group, group) : (sa_stretches){.mask = NULL};
        held->chunk = number;
        held->from = -1;
    }
    for (ptrdiff_t key, from = first; (from = sa_block_begin(stretches, from, most, plan->rows, &key)) < end;) {
        sa_rows rows;
        sa_block b;
        const ptrdiff_t to = sa_block_end(stretches, from, sa_smaller(from + most, plan->rows));
        sa_describe_block(a, plan->group, group, from, to - from, &rows, &b);
        b.copied_from = plan->chunks > 1 ? chunk * plan->chunk_keys : sa_smaller(sa_tiles_from(a, key), b.begin);
        b.holds_copies = held->from == b.copied_from;
        held->from = b.copied_from;
        b.fetches = plan->large && !b.holds_copies;
        b.far = plan->far;
        look_ahead(a, plan, t, &b);
        if (plan->chunks > 1) {
            b.begin = sa_larger(b.begin, chunk * plan->chunk_keys);
            b.end = sa_smaller(b.end, (chunk + 1) * plan->chunk_keys);
            b.first_chunk = chunk == 0;
            b.partial_rows = partial_rows(plan);
            b.partial = partial + (size_t)t * partial_bytes(a, plan);
        }
        (a->with_tangents ? kernels->attention_jvp : kernels->attention_forward)(&b, scratch);
        from = to;
    }
}

void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    sa_rows rows;
    sa_block b;
    const ptrdiff_t block = plan->blocks - 1 - t % plan->blocks;
    sa_describe_block(a, plan->group, t / plan->blocks, block * plan->block_rows, plan->block_rows, &rows, &b);
    b.partial_rows = partial_rows(plan);
    kernels->attention_merge(&b, partial + (size_t)(t * plan->chunks) * partial_bytes(a, plan), plan->chunks, scratch);
}

typedef struct {
    const sa_attention *a;
    const sa_attention_plan *plan;
    char *scratch, *partial;
} forward_run;

/* How many tasks of a thread's portion are taken, on a cache line after its scratch. */
static ptrdiff_t *tasks_taken(const forward_run *run, int thread) {
    return (ptrdiff_t *)(void *)(run->scratch + (size_t)(thread + 1) * run->plan->scratch_bytes - SA_CACHE_LINE);
}

/* Returns the next task, or plan->tasks: first from the thread's portion, whose copied keys it uses again,
 * then from others. */
static ptrdiff_t take_task(const forward_run *run, int thread, int team) {
    sa_let_others_take();
    for (int i = 0; i < team; ++i) {
        const int owner = (thread + i) % team;
        const sa_portion portion = sa_portion_of(run->plan->tasks, owner, team);
        ptrdiff_t *taken = tasks_taken(run, owner);
        if (portion.from + __atomic_load_n(taken, __ATOMIC_RELAXED) < portion.end) {
            const ptrdiff_t t = portion.from + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (t < portion.end) {
                return t;
            }
        }
    }
    return run->plan->tasks;
}

/* How many chunks of each block have ended; stored after the partial results. */
static ptrdiff_t *chunks_ended(const sa_attention *a, const sa_attention_plan *plan, char *partial) {
    return (ptrdiff_t *)(void *)(partial + (size_t)plan->tasks * partial_bytes(a, plan));
}

/* The thread that ends a block's last chunk merges all chunks in order, so no thread waits. */
static void run_task(const forward_run *run, ptrdiff_t t, char *scratch, sa_held *held) {
    const sa_attention_plan *plan = run->plan;
    if (sa_cancelled(run->a)) {
        return;
    }
    sa_attention_task(run->a, plan, t, scratch, run->partial, held);
    if (plan->chunks > 1) {
        const ptrdiff_t block = t / plan->chunks;
        if (__atomic_add_fetch(&chunks_ended(run->a, plan, run->partial)[block], 1, __ATOMIC_ACQ_REL) == plan->chunks) {
            sa_attention_merge_task(run->a, plan, block, scratch, run->partial);
            held->chunk = -1; /* the scratch has been used for other things */
        }
    }
}

/* Iterations are independent: a task writes its own rows or partial result,
 * and a merge begins after all that it reads. */
static void run_tasks(void *call, int thread, int team) {
    const forward_run *run = call;
    char *scratch = run->scratch + (size_t)thread * run->plan->scratch_bytes;
    sa_held held = {.chunk = -1};
    if (team == 1) { /* a tiny call needs no atomics */
        for (ptrdiff_t t = 0; t < run->plan->tasks; ++t) {
            run_task(run, t, scratch, &held);
        }
        return;
    }
    for (ptrdiff_t t; (t = take_task(run, thread, team)) < run->plan->tasks;) {
        run_task(run, t, scratch, &held);
    }
}

sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial) {
    forward_run run = {a, plan, scratch, partial};
    if (plan->chunks > 1) {
        memset(chunks_ended(a, plan, partial), 0, (size_t)(plan->tasks / plan->chunks) * sizeof(ptrdiff_t));
    }
    if (plan->tasks > 0) { /* without tasks there is no scratch */
        for (int thread = 0; thread < plan->threads && plan->threads > 1; ++thread) {
            *tasks_taken(&run, thread) = 0;
        }
        sa_run_team(plan->threads, run_tasks, &run);
    }
    return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
}
