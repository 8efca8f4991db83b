/* Driver of the embedding model's backward pass: phases over all sentences, each differentiating one of embedding.c. The
 * gradient of a parameter is one sum in the order of the tokens, by the one task that owns its rows or columns. */
#if defined(_OPENMP)
#include <omp.h>
#endif
#include <string.h>

#include "drivers/transformer_tasks.h"
#include "runtime/threads.h"

/* How many ranges of ids share out the table's gradient. */
#define SA_TABLE_PARTS 16

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static ptrdiff_t bytes_of(const sa_embedding *e, ptrdiff_t elements) { return elements * (ptrdiff_t)sa_embedding_size(e); }

static ptrdiff_t panels_of(const sa_embedding *e) { return sa_ceil_div(e->d, sa_embedding_kernels(e)->block_rows); }

/* ---- out = mean of the rows:  dy = dout/length --------------------------------------------------------------------------- */

static ptrdiff_t count_sentences(const sa_embedding_part *p, ptrdiff_t block) {
    (void)block;
    return p->e->sentences;
}

static void spread(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    (void)block;
    (void)scratch;
    const sa_embedding *e = p->e;
    const ptrdiff_t start = e->starts[t], length = e->starts[t + 1] - start;
    sa_embedding_kernels(e)->spread((const char *)p->g->grad_out + bytes_of(e, t * e->d), 1 / (double)length, length, e->d,
                                    p->dy + bytes_of(e, start * e->d));
}

/* ---- y = LayerNorm(s):  ds ---------------------------------------------------------------------------------------------- */

static ptrdiff_t count_norms(const sa_embedding_part *p, ptrdiff_t block) {
    (void)block;
    return sa_ceil_div(p->e->tokens, SA_NORM_ROWS);
}

static void norm(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    (void)scratch;
    const sa_embedding *e = p->e;
    const sa_embedding_frame f = sa_embedding_frame_of(p, block);
    const ptrdiff_t row = t * SA_NORM_ROWS, at = bytes_of(e, row * e->d);
    const sa_norm_rows n = {.rows = smaller(e->tokens - row, SA_NORM_ROWS),
                            .d = e->d,
                            .weight = e->block[block].norm_weight,
                            .unit = f.unit + at,
                            .scale = f.scale + bytes_of(e, row)};
    sa_embedding_kernels(e)->norm_backward(&n, p->dy + at, p->ds + at);
}

/* ---- the table's gradient begins with zeros ------------------------------------------------------------------------------ */

static ptrdiff_t count_table(const sa_embedding_part *p, ptrdiff_t block) {
    (void)block;
    return smaller(p->plan->threads == 1 ? 1 : SA_TABLE_PARTS, p->e->vocabulary);
}

/* Where range t of the ids begins. */
static ptrdiff_t first_id(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t) {
    return smaller(t * sa_ceil_div(p->e->vocabulary, count_table(p, block)), p->e->vocabulary);
}

static void clear_table(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    (void)scratch;
    const ptrdiff_t row_bytes = bytes_of(p->e, p->e->d), from = first_id(p, block, t), to = first_id(p, block, t + 1);
    memset((char *)p->g->table + from * row_bytes, 0, (size_t)((to - from) * row_bytes));
}

/* ---- s = x + attention(q, k, v):  dq, dk, dv of one head of one sentence ---------------------------------------------- */

static ptrdiff_t attention_tasks(const sa_embedding_part *p, ptrdiff_t block) {
    return p->e->sentences * p->e->block[block].heads;
}

/* Three sentences leave one of two threads waiting: it clears the table meanwhile. */
static ptrdiff_t count_attention(const sa_embedding_part *p, ptrdiff_t block) {
    return attention_tasks(p, block) + (block == 0 ? count_table(p, block) : 0);
}

static sa_tensor matrix(const sa_embedding *e, char *data, ptrdiff_t stride) {
    return (sa_tensor){.m = {data, bytes_of(e, stride), bytes_of(e, 1), e->f64 ? SA_F64 : SA_F32, false}};
}

static void attention(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    const sa_embedding *e = p->e;
    if (t >= attention_tasks(p, block)) {
        clear_table(p, block, t - attention_tasks(p, block), scratch);
        return;
    }
    const ptrdiff_t heads = e->block[block].heads, head = t % heads, start = e->starts[t / heads];
    const ptrdiff_t length = e->starts[t / heads + 1] - start, width = e->d / heads;
    const ptrdiff_t at = bytes_of(e, start * e->d + head * width);
    const size_t row_bytes = (size_t)bytes_of(e, width), rows_bytes = (size_t)length * row_bytes;
    const size_t taken = sa_embedding_array(e, length, width);
    char *dkey = scratch, *dvalue = dkey + taken; /* the kernel adds to rows that lie together */
    const sa_embedding_frame f = sa_embedding_frame_of(p, block);
    sa_attention a;
    sa_embedding_attention(e, block, &f, start, length, head, &a);
    sa_attention_gradients g = {.a = &a,
                                .grad_out = matrix(e, p->ds + at, e->d),
                                .dquery = matrix(e, p->dprojected[SA_QUERY] + at, e->d),
                                .dkey = matrix(e, dkey, width),
                                .dvalue = matrix(e, dvalue, width),
                                .delta = dvalue + taken};
    memset(dkey, 0, rows_bytes);
    memset(dvalue, 0, rows_bytes);
    for (ptrdiff_t r = 0; r < length; ++r) {
        memset(p->dprojected[SA_QUERY] + at + bytes_of(e, r * e->d), 0, row_bytes);
    }
    sa_backward_plan plan;
    sa_attention_plan_backward(&g, 1, &plan);
    sa_attention_backward(&g, &plan, dvalue + taken + sa_embedding_array(e, length, 1));
    for (ptrdiff_t r = 0; r < length; ++r) {
        const ptrdiff_t to = at + bytes_of(e, r * e->d);
        memcpy(p->dprojected[SA_KEY] + to, dkey + (size_t)r * row_bytes, row_bytes);
        memcpy(p->dprojected[SA_VALUE] + to, dvalue + (size_t)r * row_bytes, row_bytes);
    }
}

static size_t attention_scratch(const sa_embedding *e) {
    size_t most = 0;
    for (ptrdiff_t b = 0; b < e->blocks; ++b) {
        sa_attention a;
        const sa_embedding_frame none = {0};
        sa_embedding_attention(e, b, &none, 0, e->longest, 0, &a);
        const sa_attention_gradients g = {.a = &a};
        const size_t bytes = sa_embedding_kernels(e)->backward_scratch(&g) + 2 * sa_embedding_array(e, e->longest, a.E);
        most = bytes > most ? bytes : most;
    }
    return most + sa_embedding_array(e, e->longest, 1);
}

/* ---- q = x·Wᵀ + b, k and v likewise:  dx = ds + Σ dq·W,  dW = dqᵀ·x,  db = Σ dq --------------------------------------- */

static ptrdiff_t input_shares(const sa_embedding_part *p) {
    return sa_embedding_shares(p->plan, sa_ceil_div(p->e->d, sa_embedding_unit(p->e)));
}

static ptrdiff_t count_input(const sa_embedding_part *p, ptrdiff_t block) {
    (void)block;
    return input_shares(p) * sa_ceil_div(p->e->tokens, p->plan->product_rows);
}

/* ds becomes dx. */
static void input_gradient(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    const sa_embedding *e = p->e;
    const ptrdiff_t unit = sa_embedding_unit(e), units = sa_ceil_div(e->d, unit), shares = input_shares(p);
    const ptrdiff_t share = t % shares, row = t / shares * p->plan->product_rows;
    const ptrdiff_t column = units * share / shares * unit, end = smaller(units * (share + 1) / shares * unit, e->d);
    sa_product product = {.m = smaller(e->tokens - row, p->plan->product_rows),
                          .n = e->d,
                          .width = end - column,
                          .c = p->ds + bytes_of(e, row * e->d + column),
                          .a_stride = e->d,
                          .b_stride = e->d,
                          .c_stride = e->d};
    for (int which = 0; which < SA_PROJECTIONS; ++which) {
        product.a = p->dprojected[which] + bytes_of(e, row * e->d);
        product.b = (const char *)e->block[block].weight[which] + bytes_of(e, column);
        sa_embedding_kernels(e)->matmul_nn(&product, scratch);
    }
}

/* Groups of rows of the three weights' gradients. */
static ptrdiff_t weight_groups(const sa_embedding *e) { return SA_PROJECTIONS * sa_ceil_div(e->d, SA_WEIGHT_ROWS); }

static ptrdiff_t weight_tasks(const sa_embedding_part *p) {
    const ptrdiff_t groups = weight_groups(p->e);
    return sa_embedding_splits(p->e) ? smaller(p->plan->threads, groups) : groups;
}

/* The tokens from `from` on of group number `group`. */
static void weight_gradient(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t group, ptrdiff_t from, bool again,
                            char *scratch) {
    const sa_embedding *e = p->e;
    const ptrdiff_t which = group % SA_PROJECTIONS, row = group / SA_PROJECTIONS * SA_WEIGHT_ROWS;
    const sa_product product = {.m = smaller(e->d - row, SA_WEIGHT_ROWS),
                                .n = smaller(e->tokens - from, SA_SUM_ROWS),
                                .width = e->d,
                                .a = p->dprojected[which] + bytes_of(e, from * e->d + row),
                                .b = sa_embedding_frame_of(p, block).x + bytes_of(e, from * e->d),
                                .c = (char *)p->g->block[block].weight[which] + bytes_of(e, row * e->d),
                                .a_stride = e->d,
                                .b_stride = e->d,
                                .c_stride = e->d,
                                .again = again,
                                .adds = from > 0};
    sa_embedding_kernels(e)->matmul_tn(&product, scratch);
}

static void weight_gradients(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    const ptrdiff_t groups = weight_groups(p->e), tasks = weight_tasks(p);
    const ptrdiff_t first = groups * t / tasks, end = groups * (t + 1) / tasks;
    ptrdiff_t from = 0;
    do {
        for (ptrdiff_t group = first; group < end; ++group) {
            weight_gradient(p, block, group, from, group > first, scratch);
        }
        from += SA_SUM_ROWS;
    } while (from < p->e->tokens);
}

/* The LayerNorm's are here too, as the rows of dy are still there:  d weight = Σ dy·unit,  d bias = Σ dy. */
static ptrdiff_t count_parameters(const sa_embedding_part *p, ptrdiff_t block) {
    (void)block;
    return weight_tasks(p) + (SA_PROJECTIONS + 1) * panels_of(p->e);
}

static void parameter_gradients(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    const sa_embedding *e = p->e;
    if (t < weight_tasks(p)) {
        weight_gradients(p, block, t, scratch);
        return;
    }
    t -= weight_tasks(p);
    const sa_real_kernels *kernels = sa_embedding_kernels(e);
    const ptrdiff_t which = t / panels_of(e), column = t % panels_of(e) * kernels->block_rows, at = bytes_of(e, column);
    const ptrdiff_t width = smaller(e->d - column, kernels->block_rows);
    const sa_embedding_block_gradients *g = &p->g->block[block];
    if (which < SA_PROJECTIONS) {
        kernels->column_sums(p->dprojected[which] + at, NULL, e->tokens, e->d, width, 1, (char *)g->bias[which] + at);
    } else {
        const char *unit = sa_embedding_frame_of(p, block).unit + at;
        kernels->column_sums(p->dy + at, unit, e->tokens, e->d, width, 1, (char *)g->norm_weight + at);
        kernels->column_sums(p->dy + at, NULL, e->tokens, e->d, width, 1, (char *)g->norm_bias + at);
    }
}

/* ---- x = table[ids] + positions:  the rows of an id add up -------------------------------------------------------------- */

/* A task owns a range of ids. */
static void table(const sa_embedding_part *p, ptrdiff_t block, ptrdiff_t t, char *scratch) {
    (void)scratch;
    const sa_embedding *e = p->e;
    const sa_real_kernels *kernels = sa_embedding_kernels(e);
    const ptrdiff_t from = first_id(p, block, t), to = first_id(p, block, t + 1), row_bytes = bytes_of(e, e->d);
    for (ptrdiff_t i = 0; i < e->tokens; ++i) {
        if (e->ids[i] >= from && e->ids[i] < to) {
            kernels->add_row(p->dy + i * row_bytes, e->d, (char *)p->g->table + e->ids[i] * row_bytes);
        }
    }
}

/* ---- running --------------------------------------------------------------------------------------------------------- */

static const sa_embedding_phase spread_phase = {.count = count_sentences, .task = spread, .by_rows = true},
                                norm_phase = {.count = count_norms, .task = norm, .by_rows = true},
                                attention_phase = {.count = count_attention, .task = attention},
                                input_phase = {.count = count_input, .task = input_gradient, .by_rows = true, .goes_on = true},
                                parameters_phase = {.count = count_parameters, .task = parameter_gradients},
                                clear_phase = {.count = count_table, .task = clear_table},
                                table_phase = {.count = count_table, .task = table};

/* Each thread of a team has its own p, and all of them swap alike. */
static void run(sa_embedding_part p, char *scratch, bool team) {
    sa_embedding_run_phase(&spread_phase, &p, 0, scratch, team);
    for (ptrdiff_t b = p.e->blocks - 1; b >= 0; --b) {
        sa_embedding_run_phase(&norm_phase, &p, b, scratch, team);
        sa_embedding_run_phase(&attention_phase, &p, b, scratch, team);
        sa_embedding_run_phase(&input_phase, &p, b, scratch, team);
        sa_embedding_run_phase(&parameters_phase, &p, b, scratch, team);
        char *dx = p.ds;
        p.ds = p.dy;
        p.dy = dx;
    }
    if (p.e->blocks == 0) {
        sa_embedding_run_phase(&clear_phase, &p, 0, scratch, team);
    }
    sa_embedding_run_phase(&table_phase, &p, 0, scratch, team);
}

sa_status sa_embedding_plan_backward(const sa_embedding *e, int max_threads, sa_embedding_plan *plan) {
    *plan = (sa_embedding_plan){.keep = true, .threads = 1};
    if (!sa_embedding_fits(e)) {
        return SA_TOO_LARGE;
    }
    plan->threads = e->sentences == 0 ? 1 : sa_embedding_threads(e, 2.5, max_threads);
    sa_embedding_cut_products(e, plan->threads, plan);
    const size_t matmul = sa_embedding_kernels(e)->matmul_scratch(plan->product_rows, e->d), attended = attention_scratch(e);
    plan->shared_bytes = 5 * sa_embedding_array(e, e->tokens, e->d);
    plan->scratch_bytes = ((matmul > attended ? matmul : attended) + 63) / 64 * 64;
    return SA_OK;
}

void sa_embedding_backward(const sa_embedding *e, const sa_embedding_gradients *g, const sa_embedding_plan *plan,
                           const void *saved, void *scratch) {
    const size_t array = sa_embedding_array(e, e->tokens, e->d);
    char *shared = scratch, *own = shared + plan->shared_bytes;
    const sa_embedding_part p = {.e = e,
                                 .plan = plan,
                                 .g = g,
                                 .to = e->sentences,
                                 .frames = (char *)(uintptr_t)saved, /* read only */
                                 .capacity = e->tokens,
                                 .dy = shared,
                                 .ds = shared + array,
                                 .dprojected = {shared + 2 * array, shared + 3 * array, shared + 4 * array}};
#if defined(_OPENMP)
    if (plan->threads > 1) {
        sa_region_enter();
#pragma omp parallel num_threads(plan->threads)
        run(p, own + (size_t)omp_get_thread_num() * plan->scratch_bytes, true);
        sa_region_leave();
        return;
    }
#endif
    run(p, own, false);
}
