/* Describes blocks to the kernels: each row, the keys it may see, and where block masks let blocks end. */
#include "drivers/attention.h"

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

/* The keys that causal, window and length leave to the query on key `at`. */
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

/* Narrows row r, row i of its head, to the hull of what block masks open, and notes runs where they have gaps. */
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
        rows->lo[r] = from > rows->lo[r] ? from : rows->lo[r];
        rows->hi[r] = to < rows->hi[r] ? to : rows->hi[r];
    }
    rows->gaps = lists;
    if (rows->lo[r] >= rows->hi[r]) {
        rows->lo[r] = rows->hi[r] = 0;
    }
}

ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key) { return a->dropout_p > 0 ? key / 4 * 4 : key; }

/* Whether the mask's distinct elements come from memory: else fetching ahead does not pay. */
static bool is_mask_far(const sa_attention *a) {
    const sa_tensor *mask = &a->mask;
    double elements = (mask->m.row_stride == 0 ? 1.0 : (double)a->L) * (mask->m.col_stride == 0 ? 1.0 : (double)a->S);
    for (int axis = 0; axis < a->n_lead; ++axis) {
        elements *= mask->lead_stride[axis] == 0 ? 1.0 : (double)a->lead[axis];
    }
    return elements * (double)sa_itemsize(mask->m.dtype) >= SA_FAR_BYTES;
}

typedef struct {
    const char *query, *mask;
    char *out, *lse, *weights, *stats;
    double slope, sink;
    ptrdiff_t length, queries, diagonal; /* keys; queries that are not padding */
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
    h->out = sa_at_head(a, &a->out, head);
    h->lse = sa_at_head(a, &a->lse, head);
    h->weights = sa_at_head(a, &a->weights, head);
    h->stats = sa_at_head(a, &a->stats, head);
    h->slope = number_of(a, &a->alibi, head);
    h->sink = number_of(a, &a->sinks, head);
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
    if (has_options) { /* as many stores as all the rest */
        rows->mask[r] = h->mask ? h->mask + i * a->mask.m.row_stride : NULL;
        rows->lse[r] = row_of(h->lse, &a->lse, i);
        rows->weights[r] = row_of(h->weights, &a->weights, i);
        rows->stats[r] = row_of(h->stats, &a->stats, i);
        rows->head[r] = (uint64_t)(a->first_head + head);
        rows->slope[r] = h->slope;
        rows->sink[r] = h->sink;
    }
    rows->index[r] = i;
    rows->position[r] = i + h->diagonal;
    open_keys(a, i + h->diagonal, i < h->queries ? h->length : 0, &rows->lo[r], &rows->hi[r]);
    if (a->block_mask_count > 0) {
        narrow(a, h->block_mask, i, rows, r);
    }
}

/* Clearing the whole struct would be slower. */
static void describe_keys(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, sa_rows *rows, ptrdiff_t begin, ptrdiff_t end,
                          sa_block *b) {
    begin = begin >= end ? end : rows->gaps > 0 ? begin / 4 * 4 : sa_tiles_from(a, begin);
    rows->clipped = rows->gaps > 0 || rows->open_from > begin || rows->open_to < end;
    b->a = a;
    b->rows = rows;
    b->key = a->key.m;
    b->value = a->value.m;
    b->key.data += sa_lead_offset(a, &a->key, group * G, a->gqa);
    b->value.data += sa_lead_offset(a, &a->value, group * G, a->gqa);
    b->key_bias = a->key_bias.m.data ? a->key_bias.m.data + sa_lead_offset(a, &a->key_bias, group * G, a->gqa) : NULL;
    b->begin = begin;
    b->end = b->open_end = end;
    b->keys = a->key_lengths.m.data ? 0 : a->S;
    for (ptrdiff_t head = group * G; head < group * G + G && a->key_lengths.m.data; ++head) {
        b->keys = sa_larger(b->keys, count_of(a, &a->key_lengths, head, 0));
    }
    b->cache_from = b->ahead = b->keys_ahead = 0;
    b->cache_holds = b->fetches = b->far = false;
    b->mask_far = a->mask.m.data && is_mask_far(a);
    b->whole = rows->count == G * a->L;
    b->first_chunk = true;
    b->partial = NULL;
}

void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most, sa_rows *rows,
                       sa_block *b) {
    const int count = (int)sa_smaller(G * a->L - from, most);
    const bool has_options = a->mask.m.data || a->lse.m.data || a->weights.m.data || a->stats.m.data || a->alibi.m.data ||
                             a->sinks.m.data || a->dropout_p > 0;
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

static int64_t class_of(const sa_stretches *s, ptrdiff_t at) {
    return *(const int64_t *)(const void *)(s->classes + at * s->mask->classes.m.row_stride);
}

static sa_run keys_of(const sa_stretches *s, ptrdiff_t at) {
    const int64_t *start = s->mask->starts + class_of(s, at);
    return start[0] < start[1] ? s->mask->runs[start[0]] : (sa_run){0, 0};
}

/* Whether entries at − 1 and `at` share a stretch. */
static bool goes_on(const sa_stretches *s, ptrdiff_t at) {
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
            return (sa_stretches){
                .mask = mask, .classes = mask->classes.m.data + offset, .class_rows = sa_smaller(mask->class_rows, a->L) * G};
        }
    }
    return (sa_stretches){.mask = NULL};
}

ptrdiff_t sa_stretch_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key) {
    ptrdiff_t at = row / s->class_rows;
    while (at > 0 && goes_on(s, at)) {
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
        if (!goes_on(s, at)) {
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

void sa_describe_backward_block(const sa_attention_gradients *g, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                                sa_rows *rows, sa_row_gradients *grads, sa_backward_block *b) {
    const sa_attention *a = g->a;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(a->f64);
    *b = (sa_backward_block){.g = g, .grads = grads, .with_mask = g->dmask.m.data != NULL};
    sa_describe_block(a, G, group, from, most, rows, &b->b);
    b->dkey_stride = g->dkey.m.row_stride / size;
    b->dvalue_stride = g->dvalue.m.row_stride / size;
    if (g->dkey.m.data) {
        b->dkey = g->dkey.m.data + sa_lead_offset(a, &g->dkey, group * G, a->gqa);
    }
    if (g->dvalue.m.data) {
        b->dvalue = g->dvalue.m.data + sa_lead_offset(a, &g->dvalue, group * G, a->gqa);
    }
    for (int first = 0; first < rows->count && first < G; ++first) {
        const ptrdiff_t head = group * G + (from + first) % G;
        const char *grad_out = sa_at_head(a, &g->grad_out, head), *grad_lse = sa_at_head(a, &g->grad_lse, head);
        char *dquery = sa_at_head(a, &g->dquery, head), *dmask = sa_at_head(a, &g->dmask, head);
        char *dslope = sa_at_head(a, &g->dslope_rows, head), *dsink = sa_at_head(a, &g->dsink_rows, head);
        for (ptrdiff_t r = first; r < rows->count; r += G) {
            const ptrdiff_t i = rows->index[r];
            grads->grad_out[r] = grad_out ? grad_out + i * g->grad_out.m.row_stride : NULL;
            grads->grad_lse[r] = grad_lse ? grad_lse + i * g->grad_lse.m.row_stride : NULL;
            grads->dquery[r] = dquery ? dquery + i * g->dquery.m.row_stride : NULL;
            grads->dmask[r] = dmask ? dmask + i * g->dmask.m.row_stride : NULL;
            grads->dslope[r] = dslope ? dslope + i * g->dslope_rows.m.row_stride : NULL;
            grads->dsink[r] = dsink ? dsink + i * g->dsink_rows.m.row_stride : NULL;
            grads->delta[r] = (char *)g->delta + (head * a->L + i) * size;
        }
    }
}

void sa_keep_keys(sa_block *b, ptrdiff_t from, ptrdiff_t to) {
    b->begin = sa_larger(b->begin, from);
    b->end = sa_smaller(b->end, to);
    if (b->rows->gaps > 0) {
        ptrdiff_t n;
        b->begin = sa_next_open_tile(b, b->begin, &n);
    }
}
