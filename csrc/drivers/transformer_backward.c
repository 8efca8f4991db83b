/* Driver of the embedding model's backward pass: the derivative of each phase in transformer.c, over all sentences. A
 * parameter's gradient is one task's sum in the order of tokens. */
#include <string.h>

#include "drivers/transformer_tasks.h"
#include "runtime/threads.h"

#define SA_TABLE_PARTS 16

static ptrdiff_t panels_of(const sa_embedding *e) { return sa_ceil_div(e->d, sa_kernels_for(e->f64)->block_rows); }

/* out = mean of the rows:  dy = dout/length */

static void spread(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t start = e->starts[t], length = e->starts[t + 1] - start;
    sa_kernels_for(e->f64)->spread((const char *)p->g->grad_out + sa_embedding_bytes(e, t * e->d), 1 / (double)length, length,
                                   e->d, p->dy + sa_embedding_bytes(e, start * e->d));
}

/* y = LayerNorm(s):  ds */

static void norm(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const sa_embedding_frame f = sa_embedding_frame_of(p);
    const ptrdiff_t row = t * SA_NORM_ROWS, at = sa_embedding_bytes(e, row * e->d);
    const sa_norm_rows n = {.rows = sa_smaller(e->tokens - row, SA_NORM_ROWS),
                            .d = e->d,
                            .weight = e->block[p->block].norm_weight,
                            .unit = f.unit + at,
                            .scale = f.scale + sa_embedding_bytes(e, row)};
    sa_kernels_for(e->f64)->norm_backward(&n, p->dy + at, p->ds + at);
}

/* The table's gradient begins with zeros. */

static ptrdiff_t count_table(const sa_embedding_part *p) {
    return sa_smaller(p->plan->threads == 1 ? 1 : SA_TABLE_PARTS, p->e->vocabulary);
}

static ptrdiff_t first_id(const sa_embedding_part *p, ptrdiff_t t) {
    return sa_smaller(t * sa_ceil_div(p->e->vocabulary, count_table(p)), p->e->vocabulary);
}

static void clear_table(const sa_embedding_part *p, ptrdiff_t t) {
    const ptrdiff_t row_bytes = sa_embedding_bytes(p->e, p->e->d), from = first_id(p, t), to = first_id(p, t + 1);
    memset((char *)p->g->table + from * row_bytes, 0, (size_t)((to - from) * row_bytes));
}

/* s = x + attention(q, k, v):  dq, dk, dv of one head of one sentence */

static ptrdiff_t attention_tasks(const sa_embedding_part *p) { return p->e->sentences * p->e->block[p->block].heads; }

/* Few sentences leave threads idle, which clear the table meanwhile. */
static ptrdiff_t count_attention(const sa_embedding_part *p) {
    return attention_tasks(p) + (p->block == 0 ? count_table(p) : 0);
}

static void attention(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    if (t >= attention_tasks(p)) {
        clear_table(p, t - attention_tasks(p));
        return;
    }
    const ptrdiff_t heads = e->block[p->block].heads, head = t % heads, start = e->starts[t / heads];
    const ptrdiff_t length = e->starts[t / heads + 1] - start, width = e->d / heads;
    const ptrdiff_t at = sa_embedding_bytes(e, start * e->d + head * width);
    const size_t row_bytes = (size_t)sa_embedding_bytes(e, width), rows_bytes = (size_t)length * row_bytes;
    const size_t taken = sa_embedding_array(e, length, width);
    char *dkey = p->scratch, *dvalue = dkey + taken; /* the kernel adds to contiguous rows */
    const sa_embedding_frame f = sa_embedding_frame_of(p);
    sa_attention a;
    sa_embedding_attention(e, p->block, &f, start, length, head, &a);
    sa_attention_gradients g = {.a = &a,
                                .grad_out = sa_embedding_matrix(e, p->ds + at, e->d),
                                .dquery = sa_embedding_matrix(e, p->dprojected[SA_QUERY] + at, e->d),
                                .dkey = sa_embedding_matrix(e, dkey, width),
                                .dvalue = sa_embedding_matrix(e, dvalue, width),
                                .delta = dvalue + taken};
    memset(dkey, 0, rows_bytes);
    memset(dvalue, 0, rows_bytes);
    for (ptrdiff_t r = 0; r < length; ++r) {
        memset(p->dprojected[SA_QUERY] + at + sa_embedding_bytes(e, r * e->d), 0, row_bytes);
    }
    sa_backward_plan plan;
    sa_attention_plan_backward(&g, 1, &plan);
    sa_attention_backward(&g, &plan, dvalue + taken + sa_embedding_array(e, length, 1));
    for (ptrdiff_t r = 0; r < length; ++r) {
        const ptrdiff_t to = at + sa_embedding_bytes(e, r * e->d);
        memcpy(p->dprojected[SA_KEY] + to, dkey + (size_t)r * row_bytes, row_bytes);
        memcpy(p->dprojected[SA_VALUE] + to, dvalue + (size_t)r * row_bytes, row_bytes);
    }
}

/* q = x·Wᵀ + b, likewise k, v:  dx = ds + Σ dq·W,  dW = dqᵀ·x,  db = Σ dq */

static ptrdiff_t input_shares(const sa_embedding_part *p) {
    return sa_embedding_shares(p->plan, sa_ceil_div(p->e->d, sa_embedding_unit(p->e)));
}

static ptrdiff_t count_input(const sa_embedding_part *p) {
    return input_shares(p) * sa_ceil_div(p->e->tokens, p->plan->product_rows);
}

static void input_gradient(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t unit = sa_embedding_unit(e), units = sa_ceil_div(e->d, unit), shares = input_shares(p);
    const ptrdiff_t share = t % shares, row = t / shares * p->plan->product_rows;
    const ptrdiff_t column = units * share / shares * unit, end = sa_smaller(units * (share + 1) / shares * unit, e->d);
    sa_product product = {.m = sa_smaller(e->tokens - row, p->plan->product_rows),
                          .n = e->d,
                          .width = end - column,
                          .c = p->ds + sa_embedding_bytes(e, row * e->d + column),
                          .a_stride = e->d,
                          .b_stride = e->d,
                          .c_stride = e->d};
    for (int which = 0; which < SA_PROJECTIONS; ++which) {
        product.a = p->dprojected[which] + sa_embedding_bytes(e, row * e->d);
        product.b = (const char *)e->block[p->block].weight[which] + sa_embedding_bytes(e, column);
        sa_kernels_for(e->f64)->matmul_nn(&product, p->scratch);
    }
}

static ptrdiff_t weight_groups(const sa_embedding *e) { return SA_PROJECTIONS * sa_ceil_div(e->d, SA_WEIGHT_ROWS); }

static ptrdiff_t weight_tasks(const sa_embedding_part *p) {
    const ptrdiff_t groups = weight_groups(p->e);
    return sa_embedding_splits(p->e) ? sa_smaller(p->plan->threads, groups) : groups;
}

/* One group, from token `from` on. */
static void weight_gradient(const sa_embedding_part *p, ptrdiff_t group, ptrdiff_t from, bool again) {
    const sa_embedding *e = p->e;
    const ptrdiff_t which = group % SA_PROJECTIONS, row = group / SA_PROJECTIONS * SA_WEIGHT_ROWS;
    const sa_product product = {.m = sa_smaller(e->d - row, SA_WEIGHT_ROWS),
                                .n = sa_smaller(e->tokens - from, SA_SUM_ROWS),
                                .width = e->d,
                                .a = p->dprojected[which] + sa_embedding_bytes(e, from * e->d + row),
                                .b = sa_embedding_frame_of(p).x + sa_embedding_bytes(e, from * e->d),
                                .c = (char *)p->g->block[p->block].weight[which] + sa_embedding_bytes(e, row * e->d),
                                .a_stride = e->d,
                                .b_stride = e->d,
                                .c_stride = e->d,
                                .again = again,
                                .adds = from > 0};
    sa_kernels_for(e->f64)->matmul_tn(&product, p->scratch);
}

static void weight_gradients(const sa_embedding_part *p, ptrdiff_t t) {
    const ptrdiff_t groups = weight_groups(p->e), tasks = weight_tasks(p);
    const ptrdiff_t first = groups * t / tasks, end = groups * (t + 1) / tasks;
    ptrdiff_t from = 0;
    do {
        for (ptrdiff_t group = first; group < end; ++group) {
            weight_gradient(p, group, from, group > first);
        }
        from += SA_SUM_ROWS;
    } while (from < p->e->tokens);
}

/* The LayerNorm's too, while dy is there:  d weight = Σ dy·unit,  d bias = Σ dy. */
static ptrdiff_t count_parameters(const sa_embedding_part *p) {
    return weight_tasks(p) + (SA_PROJECTIONS + 1) * panels_of(p->e);
}

static void parameter_gradients(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    if (t < weight_tasks(p)) {
        weight_gradients(p, t);
        return;
    }
    t -= weight_tasks(p);
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t which = t / panels_of(e), column = t % panels_of(e) * kernels->block_rows,
                    at = sa_embedding_bytes(e, column);
    const ptrdiff_t width = sa_smaller(e->d - column, kernels->block_rows);
    const sa_embedding_block_gradients *g = &p->g->block[p->block];
    if (which < SA_PROJECTIONS) {
        kernels->column_sums(p->dprojected[which] + at, NULL, e->tokens, e->d, width, 1, (char *)g->bias[which] + at);
    } else {
        const char *unit = sa_embedding_frame_of(p).unit + at;
        kernels->column_sums(p->dy + at, unit, e->tokens, e->d, width, 1, (char *)g->norm_weight + at);
        kernels->column_sums(p->dy + at, NULL, e->tokens, e->d, width, 1, (char *)g->norm_bias + at);
    }
}

/* x = table[ids] + positions:  a task adds up the rows of a range of ids. */

static void table(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t from = first_id(p, t), to = first_id(p, t + 1), row_bytes = sa_embedding_bytes(e, e->d);
    for (ptrdiff_t i = 0; i < e->tokens; ++i) {
        if (e->ids[i] >= from && e->ids[i] < to) {
            kernels->add_row(p->dy + i * row_bytes, e->d, (char *)p->g->table + e->ids[i] * row_bytes);
        }
    }
}

static void run(void *call, int thread, int team) {
    sa_embedding_part p = *(const sa_embedding_part *)call;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    sa_embedding_run(&p, p.e->sentences, spread, SA_BY_ROWS);
    for (p.block = p.e->blocks - 1; p.block >= 0; --p.block) {
        sa_embedding_run(&p, sa_ceil_div(p.e->tokens, SA_NORM_ROWS), norm, SA_BY_ROWS);
        sa_embedding_run(&p, count_attention(&p), attention, SA_BY_TURNS);
        sa_embedding_run(&p, count_input(&p), input_gradient, SA_BY_ROWS_AND_ON);
        sa_embedding_run(&p, count_parameters(&p), parameter_gradients, SA_BY_TURNS);
        char *dx = p.ds;
        p.ds = p.dy;
        p.dy = dx;
    }
    if (p.e->blocks == 0) {
        sa_embedding_run(&p, count_table(&p), clear_table, SA_BY_TURNS);
    }
    sa_embedding_run(&p, count_table(&p), table, SA_BY_TURNS);
}

sa_status sa_embedding_plan_backward(const sa_embedding *e, int max_threads, sa_embedding_plan *plan) {
    *plan = (sa_embedding_plan){.keep = true, .threads = 1};
    if (!sa_embedding_fits(e)) {
        return SA_TOO_LARGE;
    }
    plan->threads = e->sentences == 0 ? 1 : sa_embedding_threads(e, 2.5, max_threads);
    sa_embedding_cut_products(e, plan->threads, plan);
    plan->shared_bytes = 5 * sa_embedding_array(e, e->tokens, e->d);
    plan->scratch_bytes = sa_embedding_scratch(e, plan, true);
    return SA_OK;
}

void sa_embedding_backward(const sa_embedding *e, const sa_embedding_gradients *g, const sa_embedding_plan *plan,
                           const void *saved, void *scratch) {
    const size_t array = sa_embedding_array(e, e->tokens, e->d);
    char *shared = scratch;
    sa_embedding_part p = {.e = e,
                           .plan = plan,
                           .g = g,
                           .to = e->sentences,
                           .frames = (char *)(uintptr_t)saved, /* read only */
                           .capacity = e->tokens,
                           .dy = shared,
                           .ds = shared + array,
                           .dprojected = {shared + 2 * array, shared + 3 * array, shared + 4 * array},
                           .scratch = shared + plan->shared_bytes};
    sa_run_team(plan->threads, run, &p);
}
