/* Driver of the transformer's backward pass: the derivative of each phase in transformer.c, over all sequences. A
 * parameter's gradient is one task's sum in the order of tokens. */
#include <string.h>

#include "drivers/transformer.h"
#include "runtime/team.h"

#define SA_TABLE_TASKS 16

static ptrdiff_t row_tasks(const sa_pass *p) { return sa_ceil_div(p->e->tokens, SA_NORM_ROWS); }

/* ---- the output is every row of a sequence, or the mean of its rows, or one row ---------------------------------- */

static void leave_backward(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t start = sa_start_of(e, t), length = sa_length_of(e, t), row_bytes = sa_bytes(e, e->d);
    const bool each = e->pooling == SA_EACH_ROW;
    const char *from = (const char *)p->g->grad_out + (each ? start : t) * row_bytes;
    char *to = p->dy + start * row_bytes;
    if (e->pooling == SA_MEAN_ROW) {
        sa_kernels_for(e->f64)->repeat_scaled(from, 1 / (double)length, length, e->d, to);
        return;
    }
    if (!each) {
        memset(to, 0, (size_t)(length * row_bytes));
        to += e->pooling == SA_LAST_ROW ? (length - 1) * row_bytes : 0;
    }
    memcpy(to, from, (size_t)((each ? length : 1) * row_bytes));
}

/* ---- y = norm(s):  ds, d weight = Σ dy·scaled, d bias = Σ dy ----------------------------------------------------- */

static void norm_rows(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_norm_pullback *n = &p->norm;
    const ptrdiff_t row = t * SA_NORM_ROWS, at = sa_bytes(e, row * n->d);
    const sa_norm_rows rows = {.rows = sa_smaller(n->rows - row, SA_NORM_ROWS),
                               .d = n->d,
                               .rms = n->rms,
                               .weight = n->weight,
                               .scaled = n->scaled + at,
                               .scale = n->scale + sa_bytes(e, row)};
    sa_kernels_for(e->f64)->norm_backward(&rows, n->dy + at, n->ds + at, n->adds);
}

/* The gradients of a norm's parameters, for one panel of columns. */
static void norm_parameters(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_norm_pullback *n = &p->norm;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t column = t * kernels->block_rows, at = sa_bytes(e, column);
    const ptrdiff_t width = sa_smaller(n->d - column, kernels->block_rows);
    kernels->column_sums(n->dy + at, n->scaled + at, n->rows, n->d, width, 1, (char *)n->dweight + at);
    if (n->dbias != NULL) {
        kernels->column_sums(n->dy + at, SA_NO_FACTORS, n->rows, n->d, width, 1, (char *)n->dbias + at);
    }
}

static ptrdiff_t norm_panels(const sa_pass *p) {
    return p->norm.dweight == NULL ? 0 : sa_ceil_div(p->norm.d, sa_kernels_for(p->e->f64)->block_rows);
}

/* A norm of the layer, whose arrays in the frame are `scaled` and the next. */
static sa_norm_pullback layer_norm(const sa_pass *p, int which, int scaled, const char *dy, char *ds, bool adds) {
    const sa_layer *l = sa_layer_of(p);
    const sa_layer_gradients *g = &p->g->layer[p->layer];
    return (sa_norm_pullback){
        p->e->tokens, p->e->d, l->weight[which], l->rms[which], p->f.array[scaled], p->f.array[scaled + 1], dy,
        ds,           adds,    g->weight[which], g->bias[which]};
}

/* dy becomes the gradient of the norm's input. The norm's parameters get gradients with the next product,
 * so no thread is idle. */
static void back_through_norm(sa_pass *p, sa_norm_pullback norm) {
    p->norm = norm;
    sa_run_phase(p, row_tasks(p), norm_rows, SA_BY_ROWS);
    p->norm_waits = true;
    p->other = p->dy;
    p->dy = norm.ds;
}

/* For a norm before a sum: dy += the gradient of the norm's input; dn is the gradient of its output. */
static void add_through_norm(sa_pass *p, int which, int scaled) {
    p->norm = layer_norm(p, which, scaled, p->dn, p->dy, SA_ADDS);
    sa_run_phase(p, row_tasks(p), norm_rows, SA_BY_ROWS_AND_ON);
    sa_run_phase(p, norm_panels(p), norm_parameters, SA_BY_ANY_THREAD);
}

/* For a post norm, whose output is added to the residual: returns the gradient of its input, in dn,
 * or dy without a norm. */
static const char *back_through_post_norm(sa_pass *p, int which, int scaled) {
    if (sa_layer_of(p)->weight[which] == NULL) {
        return p->dy;
    }
    p->norm = layer_norm(p, which, scaled, p->dy, p->dn, SA_REPLACES);
    sa_run_phase(p, row_tasks(p), norm_rows, SA_BY_ROWS_AND_ON);
    sa_run_phase(p, norm_panels(p), norm_parameters, SA_BY_ANY_THREAD);
    return p->dn;
}

/* q = norm(heads of the product): dq becomes the gradient of the product, in place,
 * after the gradients of the parameters. */
static void back_through_head_norm(sa_pass *p, int which, int scaled, char *dq, ptrdiff_t heads) {
    if (sa_layer_of(p)->weight[which] == NULL) {
        return;
    }
    p->norm = layer_norm(p, which, scaled, dq, dq, SA_REPLACES);
    p->norm.rows = p->e->tokens * heads;
    p->norm.d = sa_layer_of(p)->width;
    sa_run_phase(p, norm_panels(p), norm_parameters, SA_BY_ANY_THREAD);
    sa_run_phase(p, sa_ceil_div(p->norm.rows, SA_NORM_ROWS), norm_rows, SA_BY_ROWS);
}

/* ---- y = x·weightᵀ + bias ---------------------------------------------------------------------------------------- */

static void input_task(const sa_pass *p, ptrdiff_t t) { sa_linear_input_task(&p->gradients, &p->cut, t, p->scratch); }

static ptrdiff_t product_parameters(const sa_pass *p) {
    return p->gradients.dweight[0] == NULL ? 0 : sa_linear_parameter_tasks(&p->gradients, p->plan->threads);
}

static void parameter_task(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t own = product_parameters(p);
    if (t < own) {
        sa_linear_parameter_task(&p->gradients, p->plan->threads, t, p->scratch);
    } else {
        norm_parameters(p, t - own);
    }
}

/* dn = the gradient of a product's result before dropout; it may hold the gradient after dropout. */
static void drop_task(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t row = t * SA_NORM_ROWS, at = sa_bytes(e, row * e->d),
                    rows = sa_smaller(e->tokens - row, SA_NORM_ROWS);
    sa_dropout own = p->dropout;
    own.first_row += row;
    if (p->dropped != p->dn) {
        memcpy(p->dn + at, p->dropped + at, (size_t)sa_bytes(e, rows * e->d));
    }
    sa_kernels_for(e->f64)->drop_rows(&own, p->dn + at, e->d, rows, e->d, SA_NO_RESIDUAL);
}

static const char *back_through_dropout(sa_pass *p, int kind, const char *dy) {
    p->dropout = sa_dropout_of(p, kind, 0);
    p->dropped = dy;
    if (p->dropout.p == 0) {
        return dy;
    }
    sa_run_phase(p, row_tasks(p), drop_task, SA_BY_ROWS);
    return p->dn;
}

/* `parameters` are the layer's, in the product's order. */
static void back_through_product(sa_pass *p, sa_product_kind kind, const int *parameters,
                                 const sa_linear_gradients *to) {
    const sa_layer_gradients *g = &p->g->layer[p->layer];
    p->product = sa_product_of(p, kind, 0, p->e->tokens);
    p->gradients = *to;
    p->gradients.l = &p->product;
    for (int i = 0; i < p->product.count; ++i) {
        p->gradients.dweight[i] = g->weight[parameters[i]];
        p->gradients.dbias[i] = g->bias[parameters[i]];
    }
    p->cut = sa_cut_input(&p->product, p->plan->threads, SA_BY_TEAM);
    sa_run_phase(p, sa_linear_input_tasks(&p->gradients, &p->cut), input_task, SA_BY_ROWS_AND_ON);
    sa_run_phase(p, product_parameters(p) + (p->norm_waits ? norm_panels(p) : 0), parameter_task, SA_BY_ANY_THREAD);
    p->norm_waits = false;
}

/* ---- the table's gradient begins with zeros ---------------------------------------------------------------------- */

static ptrdiff_t count_table(const sa_pass *p) {
    return p->g->table == NULL ? 0 : sa_smaller(p->plan->threads == 1 ? 1 : SA_TABLE_TASKS, p->e->vocabulary);
}

static ptrdiff_t first_id(const sa_pass *p, ptrdiff_t t) {
    return sa_smaller(t * sa_ceil_div(p->e->vocabulary, count_table(p)), p->e->vocabulary);
}

static void clear_table(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t row_bytes = sa_bytes(p->e, p->e->d), from = first_id(p, t), to = first_id(p, t + 1);
    memset((char *)p->g->table + from * row_bytes, 0, (size_t)((to - from) * row_bytes));
}

/* ---- attention(q, k, v):  dq, dk, dv of the heads of one key head in one sequence -------------------------------- */

static void head_gradients(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t key_head) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t group = l->heads / l->key_heads, start = sa_start_of(e, sequence),
                    length = sa_length_of(e, sequence);
    const ptrdiff_t width = l->width, query_width = sa_query_width(l), key_width = sa_key_width(l);
    const size_t row_bytes = (size_t)sa_bytes(e, width), taken = sa_array_bytes(e, length, width);
    char *dkey = p->scratch, *dvalue = dkey + taken; /* the kernel adds to contiguous rows */
    memset(dkey, 0, (size_t)length * row_bytes);
    memset(dvalue, 0, (size_t)length * row_bytes);
    for (ptrdiff_t head = key_head * group; head < (key_head + 1) * group; ++head) {
        const ptrdiff_t at = sa_bytes(e, start * query_width + head * width), stride = sa_bytes(e, query_width),
                        size = sa_bytes(e, 1);
        const sa_dtype dtype = e->f64 ? SA_F64 : SA_F32;
        sa_attention a;
        sa_describe_head(p, sequence, start, length, head, &a);
        sa_attention_gradients g = {.a = &a,
                                    .grad_out.m = {p->dattended + at, stride, size, dtype, false},
                                    .dquery.m = {p->dprojected[SA_QUERY] + at, stride, size, dtype, false},
                                    .dkey.m = {dkey, sa_bytes(e, width), size, dtype, false},
                                    .dvalue.m = {dvalue, sa_bytes(e, width), size, dtype, false},
                                    .delta = dvalue + taken};
        if (e->mask.m.data != NULL) {
            g.dmask.m = (sa_matrix){NULL, sa_bytes(e, e->longest), size, dtype, false};
            g.dmask.m.data =
                p->g->mask == NULL ? NULL : (char *)p->g->mask + sa_bytes(e, head * e->longest * e->longest);
        }
        for (ptrdiff_t r = 0; r < length; ++r) {
            memset(g.dquery.m.data + r * stride, 0, row_bytes);
        }
        sa_backward_plan plan;
        sa_attention_plan_backward(&g, 1, &plan);
        sa_attention_backward(&g, &plan, dvalue + taken + sa_array_bytes(e, length, 1));
    }
    for (ptrdiff_t r = 0; r < length; ++r) {
        const ptrdiff_t to = sa_bytes(e, (start + r) * key_width + key_head * width);
        memcpy(p->dprojected[SA_KEY] + to, dkey + (size_t)r * row_bytes, row_bytes);
        memcpy(p->dprojected[SA_VALUE] + to, dvalue + (size_t)r * row_bytes, row_bytes);
    }
}

/* A mask's gradient has one writer, so a task is then a head in all sequences. */
static ptrdiff_t head_tasks(const sa_pass *p) {
    return (p->g->mask == NULL ? p->e->sequences : 1) * sa_layer_of(p)->key_heads;
}

static void attention(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t heads = sa_layer_of(p)->key_heads;
    if (t >= head_tasks(p)) {
        clear_table(p, t - head_tasks(p));
    } else if (p->g->mask == NULL) {
        head_gradients(p, t / heads, t % heads);
    } else {
        for (ptrdiff_t s = 0; s < p->e->sequences; ++s) {
            head_gradients(p, s, t);
        }
    }
}

static void rotate_back(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t start = sa_start_of(e, t), length = sa_length_of(e, t);
    const ptrdiff_t query = sa_bytes(e, start * sa_query_width(l)), key = sa_bytes(e, start * sa_key_width(l));
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    kernels->rotate_heads(&l->rotary, p->dprojected[SA_QUERY] + query, length, l->heads, l->width, SA_BACKWARDS);
    kernels->rotate_heads(&l->rotary, p->dprojected[SA_KEY] + key, length, l->key_heads, l->width, SA_BACKWARDS);
}

/* ---- layers: dy is the gradient of a phase's output, and then of its input --------------------------------------- */

static void back_through_feed_forward(sa_pass *p) {
    const sa_layer *l = sa_layer_of(p);
    const bool normed = l->weight[SA_FEED_FORWARD_NORM] != NULL, before = normed && l->norm_first,
               gated = l->weight[SA_GATE] != NULL;
    if (normed && !before) {
        back_through_norm(p, layer_norm(p, SA_FEED_FORWARD_NORM, SA_FEED_FORWARD_SCALED, p->dy, p->other, SA_REPLACES));
    }
    const char *dy = back_through_post_norm(p, SA_FEED_FORWARD_POST_NORM, SA_FEED_FORWARD_POST_SCALED);
    dy = back_through_dropout(p, SA_DROP_DOWN, dy);
    back_through_product(p, SA_PROJECT_DOWN, (const int[]){SA_DOWN},
                         &(sa_linear_gradients){.dy = {dy},
                                                .dx = p->dwide,
                                                .activation = l->activation,
                                                .pre = p->f.array[SA_WIDE],
                                                .gate = gated ? p->f.array[SA_GATES] : NULL,
                                                .dgate = gated ? p->dgates : NULL,
                                                .dropout = sa_dropout_of(p, SA_DROP_WIDE, 0)});
    back_through_product(
        p, SA_PROJECT_BOTH, (const int[]){SA_UP, SA_GATE},
        &(sa_linear_gradients){.dy = {p->dwide, p->dgates}, .dx = before ? p->dn : p->dy, .adds = !before});
    if (before) {
        add_through_norm(p, SA_FEED_FORWARD_NORM, SA_FEED_FORWARD_SCALED);
    }
}

static void back_through_attention(sa_pass *p) {
    const sa_layer *l = sa_layer_of(p);
    const bool normed = l->weight[SA_ATTENTION_NORM] != NULL, before = normed && l->norm_first;
    if (normed && !before) {
        back_through_norm(p, layer_norm(p, SA_ATTENTION_NORM, SA_SCALED, p->dy, p->other, SA_REPLACES));
    }
    char *own = p->dattended;
    if (l->weight[SA_OUTPUT] != NULL) {
        const char *dy = back_through_post_norm(p, SA_ATTENTION_POST_NORM, SA_POST_SCALED);
        dy = back_through_dropout(p, SA_DROP_OUTPUT, dy);
        back_through_product(p, SA_PROJECT_OUTPUT, (const int[]){SA_OUTPUT},
                             &(sa_linear_gradients){.dy = {dy}, .dx = own});
    } else {
        p->dattended = p->dy;
    }
    /* With few sequences some threads would be idle; they clear the table. */
    sa_run_phase(p, head_tasks(p) + (p->layer == 0 ? count_table(p) : 0), attention, SA_BY_ANY_THREAD);
    p->dattended = own;
    if (l->rotary.rotated > 0) {
        sa_run_phase(p, p->e->sequences, rotate_back, SA_BY_ROWS);
    }
    back_through_head_norm(p, SA_QUERY_NORM, SA_QUERY_SCALED, p->dprojected[SA_QUERY], l->heads);
    back_through_head_norm(p, SA_KEY_NORM, SA_KEY_SCALED, p->dprojected[SA_KEY], l->key_heads);
    back_through_product(
        p, SA_PROJECT, (const int[]){SA_QUERY, SA_KEY, SA_VALUE},
        &(sa_linear_gradients){.dy = {p->dprojected[SA_QUERY], p->dprojected[SA_KEY], p->dprojected[SA_VALUE]},
                               .dx = before ? p->dn : p->dy,
                               .adds = !before});
    if (before) {
        add_through_norm(p, SA_ATTENTION_NORM, SA_SCALED);
    }
}

/* ---- x = factor·table[ids] + positions:  a task adds up the rows of a range of ids ------------------------------- */

static void table(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t from = first_id(p, t), to = first_id(p, t + 1), row_bytes = sa_bytes(e, e->d);
    for (ptrdiff_t i = 0; i < e->tokens; ++i) {
        if (e->ids[i] >= from && e->ids[i] < to) {
            kernels->add_row(p->dy + i * row_bytes, e->d, (char *)p->g->table + e->ids[i] * row_bytes);
        }
    }
    if (e->table_factor != 0) {
        char *own = (char *)p->g->table + from * row_bytes;
        kernels->repeat_scaled(own, e->table_factor, 1, (to - from) * e->d, own);
    }
}

static void copy_rows(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t at = sa_bytes(e, sa_start_of(e, t) * e->d);
    memcpy((char *)p->g->rows + at, p->dy + at, (size_t)sa_bytes(e, sa_length_of(e, t) * e->d));
}

/* Goes back through the norm SA_FIRST_NORM or SA_FINAL_NORM. */
static void run_outer_norm(sa_pass *p, int which) {
    const sa_norm *norm = which == SA_FIRST_NORM ? &p->e->embedding_norm : &p->e->final_norm;
    void *const *g = which == SA_FIRST_NORM ? p->g->embedding_norm : p->g->final_norm;
    char *scale, *scaled = sa_outer_scaled(p, which, &scale);
    const sa_norm_pullback n = {p->e->tokens, p->e->d,  norm->weight, norm->rms, scaled, scale,
                                p->dy,        p->other, false,        g[0],      g[1]};
    back_through_norm(p, n);
    sa_run_phase(p, norm_panels(p), norm_parameters, SA_BY_ANY_THREAD);
    p->norm_waits = false;
}

static void run(void *call, int thread, int team) {
    sa_pass p = *(const sa_pass *)call;
    const sa_transformer *e = p.e;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    sa_run_phase(&p, e->sequences, leave_backward, SA_BY_ROWS);
    if (e->final_norm.weight != NULL) {
        run_outer_norm(&p, SA_FINAL_NORM);
    }
    for (p.layer = e->layers - 1; p.layer >= 0; --p.layer) {
        p.f = sa_frame_of(&p);
        if (sa_has_feed_forward(sa_layer_of(&p))) {
            back_through_feed_forward(&p);
        }
        back_through_attention(&p);
    }
    if (e->embedding_norm.weight != NULL) {
        run_outer_norm(&p, SA_FIRST_NORM);
    }
    if (e->layers == 0) {
        sa_run_phase(&p, count_table(&p), clear_table, SA_BY_ANY_THREAD);
    }
    if (p.g->rows != NULL) {
        sa_run_phase(&p, e->sequences, copy_rows, SA_BY_ROWS_AND_ON);
    }
    sa_run_phase(&p, count_table(&p), table, SA_BY_ANY_THREAD);
}

/* Buffers for gradients of rows: three (rows, d), then buffers for a layer's other arrays. */
static size_t lay_out(const sa_transformer *e, const sa_layout *layout, sa_pass *p, char *base) {
    const size_t rows = sa_array_bytes(e, e->tokens, e->d);
    size_t used = 3 * rows;
    const int like[] = {SA_QUERIES, SA_KEYS, SA_VALUES, SA_ATTENDED, SA_ACTIVE, SA_GATES};
    char **to[] = {&p->dprojected[SA_QUERY],
                   &p->dprojected[SA_KEY],
                   &p->dprojected[SA_VALUE],
                   &p->dattended,
                   &p->dwide,
                   &p->dgates};
    p->dy = base;
    p->other = base + rows;
    p->dn = base + 2 * rows;
    for (int i = 0; i < 6; ++i) {
        *to[i] = base + used;
        used += (like[i] + 1 < SA_ARRAYS ? layout->at[like[i] + 1] : layout->bytes) - layout->at[like[i]];
    }
    return used;
}

sa_status sa_transformer_plan_backward(const sa_transformer *e, int max_threads, sa_transformer_plan *plan) {
    sa_pass unused;
    *plan = (sa_transformer_plan){.keep = true, .threads = 1};
    if (!sa_transformer_fits(e, plan->keep)) {
        return SA_TOO_LARGE;
    }
    plan->threads = e->sequences == 0 ? 1 : sa_transformer_threads(e, 2.5, max_threads);
    plan->layout = sa_layout_of(e, e->tokens, plan->keep);
    plan->shared_bytes = lay_out(e, &plan->layout, &unused, SA_NOWHERE);
    plan->scratch_bytes = sa_transformer_scratch(e, plan, SA_BACKWARD_PASS);
    return SA_OK;
}

void sa_transformer_backward(const sa_transformer *e, const sa_transformer_gradients *g,
                             const sa_transformer_plan *plan, const void *saved, void *scratch) {
    sa_pass p = {.e = e,
                 .plan = plan,
                 .g = g,
                 .to = e->sequences,
                 .frames = (char *)(uintptr_t)saved, /* read only */
                 .capacity = e->tokens,
                 .scratch = (char *)scratch + plan->shared_bytes};
    lay_out(e, &plan->layout, &p, scratch);
    sa_run_team(plan->threads, run, &p);
}
