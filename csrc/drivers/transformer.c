/* Driver of the transformer's forward pass: phases of independent tasks. One thread takes a share of the sequences, which
 * fits its core's cache, through all layers. With few sequences threads share out every phase. */
#include <string.h>

#include "drivers/quants.h"
#include "drivers/transformer_tasks.h"
#include "runtime/team.h"

/* ---- phases -------------------------------------------------------------------------------------------------------------- */

static ptrdiff_t rows_of(const sa_token_share *p) { return p->e->starts[p->to] - p->e->starts[p->from]; }

static ptrdiff_t first_row(const sa_token_share *p) { return p->e->starts[p->from] - p->origin; }

static ptrdiff_t row_tasks(const sa_token_share *p) { return sa_ceil_div(rows_of(p), SA_NORM_ROWS); }

/* Rows of task t of row_tasks, from the frame's row *row on. */
static ptrdiff_t task_rows(const sa_token_share *p, ptrdiff_t t, ptrdiff_t *row) {
    *row = first_row(p) + t * SA_NORM_ROWS;
    return sa_smaller(rows_of(p) - t * SA_NORM_ROWS, SA_NORM_ROWS);
}

/* x = table[ids] + always + positions, or given rows; and the first norm. */
static void enter(const sa_token_share *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t start = e->starts[p->from + t], length = e->starts[p->from + t + 1] - start, row = start - p->origin;
    const ptrdiff_t at = sa_bytes(e, row * e->d), before = sa_bytes(e, sa_past_of(e, p->from + t) * e->d);
    const char *positions = e->positions == NULL ? NULL : (const char *)e->positions + before;
    char *scale, *unit = sa_outer_unit(p, 0, &scale), *x = p->f.array[SA_X] + at;
    char *entered = e->first_norm.weight == NULL ? x : unit + at;
    if (e->table != NULL) {
        if (e->table_kind == SA_WEIGHTS_QUANTS) {
            sa_quants_look_up(e->table, e->always, (const float *)(const void *)positions, e->ids + start, length,
                              (float *)(void *)entered);
        } else if (e->table_kind != SA_WEIGHTS_WHOLE) {
            sa_kernels_active()->look_up_compact(e->table, e->table_scale, e->always, (const float *)(const void *)positions,
                                                 e->ids + start, length, e->d, (float *)(void *)entered);
        } else {
            kernels->look_up(e->table, e->always, positions, e->ids + start, length, e->d, entered);
        }
    } else {
        memcpy(entered, (const char *)e->rows + sa_bytes(e, start * e->d), (size_t)sa_bytes(e, length * e->d));
    }
    if (e->first_norm.weight != NULL) {
        const sa_norm_rows n = {length,
                                e->d,
                                e->first_norm.rms,
                                e->first_norm.eps,
                                e->first_norm.weight,
                                e->first_norm.bias,
                                entered,
                                NULL,
                                entered,
                                scale + sa_bytes(e, row),
                                x};
        kernels->add_norm(&n);
    }
}

static void product_task(const sa_token_share *p, ptrdiff_t t) { sa_linear_task(&p->product, &p->cut, t, p->scratch); }

static void multiply(sa_token_share *p, sa_product_kind kind, sa_order order) {
    p->product = sa_product_of(p, kind, first_row(p), rows_of(p));
    p->cut = sa_cut_product(&p->product, p->product.in, p->plan->threads, p->plan->by_shares);
    sa_run_phase(p, sa_linear_tasks(&p->product, &p->cut), product_task, order);
}

/* Of a layer's norm: y = norm(x + added). */
static void norm_rows(const sa_token_share *p, ptrdiff_t t, int which, const char *x, const char *added, int unit, char *y) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const int parameter = which == 0 ? SA_ATTENTION_NORM : SA_LAST_NORM;
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(e, row * e->d);
    const sa_norm_rows n = {.rows = rows,
                            .d = e->d,
                            .rms = l->rms[which],
                            .eps = l->eps[which],
                            .weight = l->weight[parameter],
                            .bias = l->bias[parameter],
                            .x = x + at,
                            .added = added == NULL ? NULL : added + at,
                            .unit = p->f.array[unit] + at,
                            .scale = p->f.array[unit + 1] + sa_bytes(e, row),
                            .y = y + at};
    sa_kernels_for(e->f64)->add_norm(&n);
}

static void norm_x(const sa_token_share *p, ptrdiff_t t) {
    norm_rows(p, t, 0, p->f.array[SA_X], NULL, SA_UNIT, p->f.array[SA_NORMED]);
}

static void norm_s(const sa_token_share *p, ptrdiff_t t) {
    norm_rows(p, t, 1, p->f.array[SA_S], NULL, SA_LAST_UNIT, p->f.array[SA_NORMED_S]);
}

/* The product has left x + output(…) in the unit; without a product the heads are added here. */
static void norm_attended(const sa_token_share *p, ptrdiff_t t) {
    const sa_layer *l = sa_layer_of(p);
    char *s = sa_has_feed_forward(l) ? p->f.array[SA_S] : p->f.y;
    if (l->weight[SA_OUTPUT] == NULL) {
        norm_rows(p, t, 0, p->f.array[SA_X], p->f.array[SA_ATTENDED], SA_UNIT, s);
    } else {
        norm_rows(p, t, 0, p->f.array[SA_UNIT], NULL, SA_UNIT, s);
    }
}

static void norm_last(const sa_token_share *p, ptrdiff_t t) {
    norm_rows(p, t, 1, p->f.array[SA_LAST_UNIT], NULL, SA_LAST_UNIT, p->f.y);
}

static void rotate(const sa_token_share *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t start = e->starts[p->from + t], length = e->starts[p->from + t + 1] - start, row = start - p->origin;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    kernels->rotate_heads(&l->rotary, p->f.array[SA_QUERIES] + sa_bytes(e, row * sa_queries_of(l)), length, l->heads, l->width,
                          false);
    kernels->rotate_heads(&l->rotary, p->f.array[SA_KEYS] + sa_bytes(e, row * sa_keys_of(l)), length, l->key_heads, l->width,
                          false);
}

static ptrdiff_t pieces_of(const sa_token_share *p) { return sa_ceil_div(p->e->longest, p->plan->attend_rows); }

static void attend(const sa_token_share *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t pieces = pieces_of(p), heads = sa_layer_of(p)->heads, sequence = p->from + t / pieces / heads;
    const ptrdiff_t start = e->starts[sequence], length = e->starts[sequence + 1] - start;
    const ptrdiff_t from = t % pieces * p->plan->attend_rows;
    if (from >= length) {
        return;
    }
    sa_attention a;
    sa_rows rows;
    sa_block b;
    sa_describe_head(p, sequence, start - p->origin, length, t / pieces % heads, &a);
    sa_describe_block(&a, 1, 0, from, p->plan->attend_rows, &rows, &b);
    sa_kernels_for(e->f64)->attention_forward(&b, p->scratch);
}

static void attend_to_own(const sa_token_share *p) {
    const sa_layer *l = sa_layer_of(p);
    if (l->rotary.rotated > 0) {
        sa_run_phase(p, p->to - p->from, rotate, SA_BY_ROWS);
    }
    sa_run_phase(p, (p->to - p->from) * l->heads * pieces_of(p), attend, SA_BY_TURNS);
}

static void copy_unit(const sa_token_share *p, ptrdiff_t t) {
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(p->e, row * p->e->d);
    memcpy(p->f.y + at, p->f.array[SA_UNIT] + at, (size_t)sa_bytes(p->e, rows * p->e->d));
}

static void run_layer(sa_token_share *p) {
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t norms = row_tasks(p);
    p->f = sa_frame_of(p);
    if (l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) {
        sa_run_phase(p, norms, norm_x, SA_BY_ROWS);
    }
    multiply(p, SA_PROJECT, SA_BY_ROWS);
    if (p->e->cache.past != NULL) {
        sa_attend_with_cache(p);
    } else {
        attend_to_own(p);
    }
    if (l->weight[SA_OUTPUT] != NULL) {
        multiply(p, SA_PROJECT_OUTPUT, SA_BY_ROWS);
    }
    if (sa_needs_detour(p)) {
        sa_run_phase(p, norms, copy_unit, SA_BY_ROWS);
    }
    if (!l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) {
        sa_run_phase(p, norms, norm_attended, SA_BY_ROWS);
    }
    if (!sa_has_feed_forward(l)) {
        return;
    }
    if (l->norm_first && l->weight[SA_LAST_NORM] != NULL) {
        sa_run_phase(p, norms, norm_s, SA_BY_ROWS);
    }
    if (l->weight[SA_GATE] != NULL) { /* if the next product is cut alike, a thread needs its own gates alone */
        const sa_linear gate = sa_product_of(p, SA_PROJECT_GATE, 0, 1), up = sa_product_of(p, SA_PROJECT_UP, 0, 1);
        multiply(p, SA_PROJECT_GATE, sa_linear_gemv(&gate) == sa_linear_gemv(&up) ? SA_BY_ROWS_AND_ON : SA_BY_ROWS);
    }
    multiply(p, SA_PROJECT_UP, SA_BY_ROWS);
    multiply(p, SA_PROJECT_DOWN, SA_BY_ROWS);
    if (!l->norm_first && l->weight[SA_LAST_NORM] != NULL) {
        sa_run_phase(p, norms, norm_last, SA_BY_ROWS);
    }
}

/* The final norm, to the output if every row leaves, else in place. */
static void norm_final(const sa_token_share *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(e, row * e->d);
    char *scale, *unit = sa_outer_unit(p, 1, &scale), *x = p->f.array[SA_X] + at;
    char *y = e->pooling == SA_EACH_ROW ? p->out + sa_bytes(e, (p->origin + row) * e->d) : x;
    const sa_norm_rows n = {rows,
                            e->d,
                            e->final_norm.rms,
                            e->final_norm.eps,
                            e->final_norm.weight,
                            e->final_norm.bias,
                            x,
                            NULL,
                            unit + at,
                            scale + sa_bytes(e, row),
                            y};
    sa_kernels_for(e->f64)->add_norm(&n);
}

/* A sequence's rows, or the one that represents it. */
static void leave(const sa_token_share *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t sequence = p->from + t, start = e->starts[sequence], length = e->starts[sequence + 1] - start;
    const char *x = p->f.array[SA_X] + sa_bytes(e, (start - p->origin) * e->d);
    char *to = p->out + sa_bytes(e, (e->pooling == SA_EACH_ROW ? start : sequence) * e->d);
    if (e->pooling == SA_MEAN_ROW) {
        sa_kernels_for(e->f64)->column_sums(x, NULL, length, e->d, e->d, 1 / (double)length, to);
        return;
    }
    x += e->pooling == SA_LAST_ROW ? sa_bytes(e, (length - 1) * e->d) : 0;
    memcpy(to, x, (size_t)sa_bytes(e, (e->pooling == SA_EACH_ROW ? length : 1) * e->d));
}

static void run_share(sa_token_share p) {
    const ptrdiff_t sequences = p.to - p.from;
    p.layer = 0;
    p.f = sa_frame_of(&p);
    sa_run_phase(&p, sequences, enter, SA_BY_ROWS);
    for (; p.layer < p.e->layers; ++p.layer) {
        run_layer(&p);
    }
    p.f = sa_frame_of(&p); /* its x is the last layer's output */
    if (p.e->final_norm.weight != NULL) {
        sa_run_phase(&p, row_tasks(&p), norm_final, SA_BY_ROWS);
    }
    if (p.e->pooling != SA_EACH_ROW || p.e->final_norm.weight == NULL) {
        sa_run_phase(&p, sequences, leave, SA_BY_ROWS);
    }
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

/* The first that begins at `token` or later. */
static ptrdiff_t sequence_from(const sa_transformer *e, ptrdiff_t token) {
    ptrdiff_t low = 0, high = e->sequences;
    while (low < high) {
        const ptrdiff_t middle = low + (high - low) / 2;
        if (e->starts[middle] < token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Independent: a share writes only its own sequences. */
static void run_share_number(void *call, ptrdiff_t number) {
    sa_token_share p = *(const sa_token_share *)call;
    p.thread = 0;
    p.team = 1;
    p.from = sequence_from(p.e, number * p.plan->share_tokens);
    p.to = sequence_from(p.e, (number + 1) * p.plan->share_tokens);
    if (p.from == p.to) {
        return;
    }
    if (!p.plan->keep) { /* the thread's own frame, reused by all layers */
        p.frames = p.scratch;
        p.capacity = p.plan->share_rows;
        p.origin = p.e->starts[p.from];
        p.scratch += p.plan->layout.bytes;
    }
    run_share(p);
}

static void run(void *call, int thread, int team) {
    sa_token_share p = *(const sa_token_share *)call;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    if (p.plan->by_shares) {
        sa_share_tasks(team, p.plan->shares, run_share_number, &p);
    } else {
        run_share(p);
    }
}

void sa_transformer_forward(const sa_transformer *e, const sa_transformer_plan *plan, void *out, void *saved, void *scratch) {
    if (e->sequences == 0) {
        return;
    }
    sa_token_share all = {.e = e,
                          .plan = plan,
                          .out = out,
                          .to = e->sequences,
                          .frames = plan->keep ? saved : scratch,
                          .capacity = e->tokens,
                          .partial = (char *)scratch + plan->shared_bytes - (size_t)e->sequences * plan->partial_bytes,
                          .scratch = (char *)scratch + plan->shared_bytes};
    sa_run_team(plan->threads, run, &all);
}
