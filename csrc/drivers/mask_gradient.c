/* The gradient of a mask whose elements are shared by rows, key ranges, or heads of a single block. A task owns elements
 * and goes through heads and rows in order: each element has one writer. S and dP are computed again. */
#include <string.h>

#include "drivers/attention.h"

/* So many blocks of rows are summed in scratch first, which loses fewer digits. */
#define SA_BLOCKS_IN_A_SUM 64

bool sa_sums_mask_apart(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return g->dmask.m.data && plan->mask_apart && g->dmask.m.row_stride == 0;
}

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    if (!g->dmask.m.data || !plan->mask_apart) {
        return (sa_mask_plan){0};
    }
    sa_mask_plan m = {.owners = 1, .key_ranges = 1, .keys = a->S, .heads = 1};
    for (int axis = 0; axis < a->n_lead; ++axis) {
        m.heads *= a->lead[axis];
        m.owners *= g->dmask.lead_stride[axis] != 0 ? a->lead[axis] : 1;
    }
    if (g->dmask.m.col_stride != 0) {
        m.keys = SA_MASK_KEYS;
        m.key_ranges = sa_ceil_div(a->S, m.keys);
    }
    m.tasks = m.owners * m.key_ranges;
    return m;
}

/* Whether a head adds to the elements of `owner`. */
static bool owns(const sa_attention_gradients *g, ptrdiff_t owner, ptrdiff_t head) {
    const sa_attention *a = g->a;
    ptrdiff_t own = 0, times = 1;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        if (g->dmask.lead_stride[axis] != 0) {
            own += head % a->lead[axis] * times;
            times *= a->lead[axis];
        }
        head /= a->lead[axis];
    }
    return own == owner;
}

static void add_sums(const sa_attention *a, char *to, const char *from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n && a->f64; ++i) {
        ((double *)(void *)to)[i] += ((const double *)(const void *)from)[i];
    }
    for (ptrdiff_t i = 0; i < n && !a->f64; ++i) {
        ((float *)(void *)to)[i] += ((const float *)(const void *)from)[i];
    }
}

/* All rows of one head, for elements from key `key` on. */
static void mask_of_head(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t head, ptrdiff_t key,
                         ptrdiff_t end, char *scratch) {
    const sa_attention *a = g->a;
    const ptrdiff_t stride = g->dmask.m.col_stride, elements = stride != 0 ? end - key : 1;
    const bool apart = sa_sums_mask_apart(g, plan);
    char *sums = scratch + plan->mask_sums_at;
    bool held = false; /* scratch has copied keys of this head */
    ptrdiff_t summed = 0;
    for (ptrdiff_t row = 0; row < a->L && !sa_cancelled(a); row += plan->block_rows) {
        sa_rows rows;
        sa_row_gradients grads;
        sa_backward_block b;
        sa_describe_backward_block(g, 1, head, row, plan->block_rows, &rows, &grads, &b);
        char *to = grads.dmask[0] + key * stride;
        if (apart && summed == 0) {
            memset(sums, 0, (size_t)elements * sa_element_size(a->f64));
        }
        for (int r = 0; r < rows.count && apart; ++r) {
            grads.dmask[r] = sums;
        }
        b.dmask_key = apart ? key : 0;
        b.mask_only = true;
        sa_keep_keys(&b.b, key, end);
        b.b.cache_from = key;
        b.b.cache_holds = held;
        if (b.b.begin < b.b.end) {
            held = true;
            sa_kernels_for(a->f64)->attention_backward(&b, scratch);
        }
        if (apart && (++summed == SA_BLOCKS_IN_A_SUM || row + plan->block_rows >= a->L)) {
            add_sums(a, to, sums, elements);
            summed = 0;
        }
    }
}

void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m, ptrdiff_t t,
                           char *scratch) {
    const ptrdiff_t owner = t / m->key_ranges, key = t % m->key_ranges * m->keys, end = sa_smaller(key + m->keys, g->a->S);
    for (ptrdiff_t head = 0; head < m->heads; ++head) {
        if (owns(g, owner, head)) {
            mask_of_head(g, plan, head, key, end, scratch);
        }
    }
}
