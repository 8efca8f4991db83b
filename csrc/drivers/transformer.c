/* Driver of the transformer's forward pass: phases of independent tasks. One thread takes a part of the sequences, which
 * fits its core's cache, through all layers. With few sequences threads share out every phase. */
#include <math.h>
#include <string.h>

#include "drivers/transformer_tasks.h"
#include "runtime/threads.h"

/* The fewest tokens of a part: weights are packed once for each. With less for two parts of each thread parts do not pay. */
#define SA_PART_TOKENS 384
#define SA_LEAST_PART_TOKENS 192

/* Weights of more bytes do not stay in a core's caches from call to call. */
#define SA_NEAR_BYTES 1e6

/* ---- sizes --------------------------------------------------------------------------------------------------------------- */

size_t sa_array_bytes(const sa_transformer *e, ptrdiff_t rows, ptrdiff_t columns) {
    return sa_whole_lines((size_t)rows * (size_t)columns * sa_element_size(e->f64));
}

static ptrdiff_t queries_of(const sa_layer *l) { return l->heads * l->width; }
static ptrdiff_t keys_of(const sa_layer *l) { return l->key_heads * l->width; }

bool sa_transformer_fits(const sa_transformer *e) {
    size_t most = (size_t)e->d, bytes;
    bool fits = e->d <= SA_MAX_WIDTH && e->longest <= SA_MAX_LENGTH;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        size_t width;
        fits = fits && sa_multiply((size_t)l->heads, (size_t)l->width, &width) && width <= SA_MAX_WIDTH &&
               l->hidden <= SA_MAX_WIDTH;
        most = fits && width > most ? width : most;
        most = fits && (size_t)l->hidden > most ? (size_t)l->hidden : most;
    }
    return fits && sa_multiply((size_t)e->tokens + 1, most, &bytes) && sa_multiply(bytes, 64 * sizeof(double), &bytes) &&
           sa_multiply(bytes, (size_t)e->layers + 1, &bytes) && bytes <= PTRDIFF_MAX / 1024;
}

/* The widest of all layers. */
static void widths_of(const sa_transformer *e, bool keep, ptrdiff_t width[SA_ARRAYS]) {
    memset(width, 0, SA_ARRAYS * sizeof *width);
    width[SA_X] = e->d;
    width[SA_UNIT] = e->d;
    width[SA_SCALE] = 1;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        width[SA_QUERIES] = sa_larger(width[SA_QUERIES], queries_of(l));
        width[SA_KEYS] = width[SA_VALUES] = sa_larger(width[SA_KEYS], keys_of(l));
        width[SA_ATTENDED] = width[SA_QUERIES];
        width[SA_STATS] = keep ? sa_larger(width[SA_STATS], 2 * l->heads) : 0;
        width[SA_NORMED] = l->norm_first ? e->d : width[SA_NORMED];
        if (sa_has_feed_forward(l)) {
            width[SA_S] = e->d;
            width[SA_WIDE] = sa_larger(width[SA_WIDE], l->hidden);
            width[SA_GATES] = l->weight[SA_GATE] == NULL ? width[SA_GATES] : sa_larger(width[SA_GATES], l->hidden);
        }
    }
    if (keep && width[SA_S] > 0) {
        width[SA_NORMED_S] = width[SA_NORMED];
        width[SA_ACTIVE] = width[SA_WIDE];
        width[SA_LAST_UNIT] = e->d;
        width[SA_LAST_SCALE] = 1;
    }
}

sa_layout sa_layout_of(const sa_transformer *e, ptrdiff_t rows, bool keep) {
    sa_layout layout = {.bytes = 0};
    ptrdiff_t width[SA_ARRAYS];
    widths_of(e, keep, width);
    for (int i = 0; i < SA_ARRAYS; ++i) {
        layout.at[i] = layout.bytes;
        layout.bytes += sa_array_bytes(e, rows, width[i]);
    }
    if (!keep) {
        layout.at[SA_NORMED_S] = layout.at[SA_NORMED];
        layout.at[SA_ACTIVE] = layout.at[SA_WIDE];
        layout.at[SA_LAST_UNIT] = layout.at[SA_UNIT];
        layout.at[SA_LAST_SCALE] = layout.at[SA_SCALE];
    }
    return layout;
}

sa_frame sa_frame_of(const sa_part *p) {
    const bool keep = p->plan->keep;
    char *base = p->frames + (keep ? (size_t)p->layer * p->plan->layout.bytes : 0);
    sa_frame f;
    for (int i = 0; i < SA_ARRAYS; ++i) {
        f.array[i] = base + p->plan->layout.at[i];
    }
    f.array[SA_STATS] = keep ? f.array[SA_STATS] : NULL;
    f.y = keep ? base + p->plan->layout.bytes : base;
    return f;
}

char *sa_outer_unit(const sa_part *p, int which, char **scale) {
    const sa_transformer *e = p->e;
    if (!p->plan->keep) {
        *scale = p->frames + p->plan->layout.at[SA_SCALE];
        return p->frames + p->plan->layout.at[SA_UNIT];
    }
    const size_t array = sa_array_bytes(e, p->capacity, e->d), each = array + sa_array_bytes(e, p->capacity, 1);
    char *unit = p->frames + (size_t)e->layers * p->plan->layout.bytes + array + (size_t)which * each;
    *scale = unit + array;
    return unit;
}

static size_t kept_bytes(const sa_transformer *e, const sa_layout *layout) {
    const size_t array = sa_array_bytes(e, e->tokens, e->d);
    return (size_t)e->layers * layout->bytes + 3 * array + 2 * sa_array_bytes(e, e->tokens, 1);
}

/* Of all layers' projections. */
static double count_weights(const sa_transformer *e) {
    double weights = 0;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        const ptrdiff_t output = l->weight[SA_OUTPUT] == NULL ? 0 : queries_of(l);
        const ptrdiff_t wide = l->hidden * (l->weight[SA_GATE] == NULL ? 2 : 3);
        weights += (double)e->d * (double)(queries_of(l) + 2 * keys_of(l) + output + wide);
    }
    return weights;
}

int sa_transformer_threads(const sa_transformer *e, double products, int max_threads) {
    const double rows = (double)e->tokens;
    double each = count_weights(e);
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        each += 2 * rows / (double)e->sequences * (double)queries_of(&e->layer[i]);
    }
    return sa_threads_for(products * rows * each, SA_TRANSFORMER_WORK_PER_THREAD, HUGE_VAL, max_threads);
}

/* ---- what a layer computes with ---------------------------------------------------------------------------------------- */

static void add_part(sa_linear *product, const sa_layer *l, int part, ptrdiff_t out, char *y) {
    product->out[product->parts] = out;
    product->weight[product->parts] = l->weight[part];
    product->bias[product->parts] = l->bias[part];
    product->y[product->parts++] = y;
}

/* Each kind has a seed of its own. */
sa_dropout sa_dropout_of(const sa_part *p, int kind, ptrdiff_t row) {
    const sa_layer *l = sa_layer_of(p);
    return (sa_dropout){l->dropout[kind], l->seed + (uint64_t)kind * UINT64_C(0x9E3779B97F4A7C15), p->origin + row, 0};
}

/* Where output's result replaces x, but x must join what is dropped from: it goes to the unit first. */
static bool needs_detour(const sa_part *p) {
    const sa_layer *l = sa_layer_of(p);
    const bool norm_after = !l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL;
    return !p->plan->keep && !norm_after && !sa_has_feed_forward(l) && l->dropout[SA_DROP_OUTPUT] > 0;
}

sa_linear sa_product_of(const sa_part *p, sa_product_kind kind, ptrdiff_t row, ptrdiff_t rows) {
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t d = p->e->d, at = sa_bytes(p->e, row), queries = queries_of(l), keys = keys_of(l), hidden = l->hidden;
    char *const *array = p->f.array;
    const bool first_normed = l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL;
    const bool last_normed = l->norm_first && l->weight[SA_LAST_NORM] != NULL;
    sa_linear product = {.f64 = p->e->f64, .far = p->plan->far, .rows = rows, .in = d};
    switch (kind) {
    case SA_PROJECT:
        product.x = (first_normed ? array[SA_NORMED] : array[SA_X]) + at * d;
        add_part(&product, l, SA_QUERY, queries, array[SA_QUERIES] + at * queries);
        add_part(&product, l, SA_KEY, keys, array[SA_KEYS] + at * keys);
        add_part(&product, l, SA_VALUE, keys, array[SA_VALUES] + at * keys);
        return product;
    case SA_PROJECT_OUTPUT: {
        const bool norm_after = !l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL;
        char *s = sa_has_feed_forward(l) ? array[SA_S] : p->f.y;
        product.in = queries;
        product.x = array[SA_ATTENDED] + at * queries;
        product.residual = array[SA_X] + at * d;
        product.dropout = sa_dropout_of(p, SA_DROP_OUTPUT, row);
        add_part(&product, l, SA_OUTPUT, d, (norm_after || needs_detour(p) ? array[SA_UNIT] : s) + at * d);
        return product;
    }
    case SA_PROJECT_DOWN: {
        const bool norm_after = !l->norm_first && l->weight[SA_LAST_NORM] != NULL;
        product.in = hidden;
        product.x = array[SA_ACTIVE] + at * hidden;
        product.residual = array[SA_S] + at * d;
        product.dropout = sa_dropout_of(p, SA_DROP_DOWN, row);
        add_part(&product, l, SA_DOWN, d, (norm_after ? array[SA_LAST_UNIT] : p->f.y) + at * d);
        return product;
    }
    default:
        product.x = (last_normed ? array[SA_NORMED_S] : array[SA_S]) + at * d;
        if (kind == SA_PROJECT_GATE) {
            add_part(&product, l, SA_GATE, hidden, array[SA_GATES] + at * hidden);
            return product;
        }
        add_part(&product, l, SA_UP, hidden, array[SA_WIDE] + at * hidden);
        if (kind == SA_PROJECT_BOTH) {
            if (l->weight[SA_GATE] != NULL) {
                add_part(&product, l, SA_GATE, hidden, array[SA_GATES] + at * hidden);
            }
            return product;
        }
        product.activation = l->activation;
        product.gate = l->weight[SA_GATE] == NULL ? NULL : array[SA_GATES] + at * hidden;
        product.active = array[SA_ACTIVE] + at * hidden;
        product.dropout = sa_dropout_of(p, SA_DROP_WIDE, row);
        return product;
    }
}

static sa_tensor matrix(const sa_transformer *e, char *data, ptrdiff_t stride) {
    return (sa_tensor){.m = {data, sa_bytes(e, stride), sa_bytes(e, 1), e->f64 ? SA_F64 : SA_F32, false}};
}

void sa_describe_head(const sa_part *p, ptrdiff_t sequence, ptrdiff_t row, ptrdiff_t length, ptrdiff_t head, sa_attention *a) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t queries = queries_of(l), keys = keys_of(l), key_head = head / (l->heads / l->key_heads);
    const ptrdiff_t at = sa_bytes(e, row * queries + head * l->width), key_at = sa_bytes(e, row * keys + key_head * l->width);
    *a = (sa_attention){.L = length,
                        .S = length,
                        .E = l->width,
                        .Dv = l->width,
                        .gqa = 1,
                        .f64 = e->f64,
                        .query = matrix(e, p->f.array[SA_QUERIES] + at, queries),
                        .key = matrix(e, p->f.array[SA_KEYS] + key_at, keys),
                        .value = matrix(e, p->f.array[SA_VALUES] + key_at, keys),
                        .out = matrix(e, p->f.array[SA_ATTENDED] + at, queries),
                        .scale = l->scale,
                        .softcap = l->softcap,
                        .causal = l->causal,
                        .window_left = l->window_left,
                        .window_right = l->window_right,
                        .dropout_p = l->dropout[SA_DROP_WEIGHTS],
                        .seed = l->seed,
                        .first_head = sequence * l->heads + head};
    if (e->mask.m.data != NULL) {
        a->mask.m = e->mask.m;
        a->mask.m.data += sequence * e->mask.lead_stride[0] + head * e->mask.lead_stride[1];
    }
    if (p->f.array[SA_STATS] != NULL) {
        a->stats = matrix(e, p->f.array[SA_STATS] + sa_bytes(e, (row * l->heads + head) * 2), 2 * l->heads);
    }
}

size_t sa_transformer_scratch(const sa_transformer *e, const sa_transformer_plan *plan, bool backward) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    size_t most = 0;
    sa_part p = {.e = e, .plan = plan};
    for (p.layer = 0; p.layer < e->layers; ++p.layer) {
        const sa_layer *l = sa_layer_of(&p);
        for (int kind = 0; kind < SA_PRODUCTS; ++kind) {
            if (kind >= SA_PROJECT_GATE ? l->hidden == 0 : kind == SA_PROJECT_OUTPUT && l->weight[SA_OUTPUT] == NULL) {
                continue;
            }
            const sa_linear product = sa_product_of(&p, kind, 0, plan->by_parts ? plan->part_rows : e->tokens);
            const size_t bytes = sa_linear_scratch(&product, plan->threads, plan->by_parts, backward);
            most = bytes > most ? bytes : most;
        }
        sa_attention a;
        sa_describe_head(&p, 0, 0, e->longest, 0, &a);
        const sa_attention_gradients g = {.a = &a};
        const size_t copies = 2 * sa_array_bytes(e, e->longest, a.E) + sa_array_bytes(e, e->longest, 1);
        const size_t bytes = backward ? kernels->backward_scratch(&g) + copies : kernels->attention_scratch(&a);
        most = bytes > most ? bytes : most;
    }
    return sa_whole_lines(most);
}

/* ---- phases -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const sa_part *p;
    sa_part_task *task;
} phase;

static void run_task(void *call, ptrdiff_t t) {
    const phase *run = call;
    run->task(run->p, t);
}

/* Independent: a task writes its own rows or columns. */
void sa_run_phase(const sa_part *p, ptrdiff_t tasks, sa_part_task *task, sa_order order) {
    phase run = {p, task};
    if (order == SA_BY_TURNS) {
        sa_share_tasks(p->team, tasks, run_task, &run);
    } else {
        const sa_share share = sa_share_of(tasks, p->thread, p->team);
        for (ptrdiff_t t = share.from; t < share.end; ++t) {
            task(p, t);
        }
    }
    if (order != SA_BY_ROWS_AND_ON) {
        sa_wait_for_team(p->team);
    }
}

static ptrdiff_t rows_of(const sa_part *p) { return p->e->starts[p->to] - p->e->starts[p->from]; }

static ptrdiff_t first_row(const sa_part *p) { return p->e->starts[p->from] - p->origin; }

static ptrdiff_t row_tasks(const sa_part *p) { return sa_ceil_div(rows_of(p), SA_NORM_ROWS); }

/* Rows of task t of row_tasks, from the frame's row *row on. */
static ptrdiff_t task_rows(const sa_part *p, ptrdiff_t t, ptrdiff_t *row) {
    *row = first_row(p) + t * SA_NORM_ROWS;
    return sa_smaller(rows_of(p) - t * SA_NORM_ROWS, SA_NORM_ROWS);
}

/* x = table[ids] + always + positions, or given rows; and the first norm. */
static void enter(const sa_part *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t start = e->starts[p->from + t], length = e->starts[p->from + t + 1] - start, row = start - p->origin;
    const ptrdiff_t at = sa_bytes(e, row * e->d);
    char *scale, *unit = sa_outer_unit(p, 0, &scale), *x = p->f.array[SA_X] + at;
    char *entered = e->first_norm.weight == NULL ? x : unit + at;
    if (e->table != NULL) {
        kernels->look_up(e->table, e->always, e->positions, e->ids + start, length, e->d, entered);
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

static void product_task(const sa_part *p, ptrdiff_t t) { sa_linear_task(&p->product, &p->cut, t, p->scratch); }

static void multiply(sa_part *p, sa_product_kind kind, sa_order order) {
    p->product = sa_product_of(p, kind, first_row(p), rows_of(p));
    p->cut = sa_cut_product(&p->product, p->product.in, p->plan->threads, p->plan->by_parts);
    sa_run_phase(p, sa_linear_tasks(&p->product, &p->cut), product_task, order);
}

/* Of a layer's norm: y = norm(x + added). */
static void norm_rows(const sa_part *p, ptrdiff_t t, int which, const char *x, const char *added, int unit, char *y) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const int part = which == 0 ? SA_ATTENTION_NORM : SA_LAST_NORM;
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(e, row * e->d);
    const sa_norm_rows n = {.rows = rows,
                            .d = e->d,
                            .rms = l->rms[which],
                            .eps = l->eps[which],
                            .weight = l->weight[part],
                            .bias = l->bias[part],
                            .x = x + at,
                            .added = added == NULL ? NULL : added + at,
                            .unit = p->f.array[unit] + at,
                            .scale = p->f.array[unit + 1] + sa_bytes(e, row),
                            .y = y + at};
    sa_kernels_for(e->f64)->add_norm(&n);
}

static void norm_x(const sa_part *p, ptrdiff_t t) {
    norm_rows(p, t, 0, p->f.array[SA_X], NULL, SA_UNIT, p->f.array[SA_NORMED]);
}

static void norm_s(const sa_part *p, ptrdiff_t t) {
    norm_rows(p, t, 1, p->f.array[SA_S], NULL, SA_LAST_UNIT, p->f.array[SA_NORMED_S]);
}

/* The product has left x + output(…) in the unit; without a product the heads are added here. */
static void norm_attended(const sa_part *p, ptrdiff_t t) {
    const sa_layer *l = sa_layer_of(p);
    char *s = sa_has_feed_forward(l) ? p->f.array[SA_S] : p->f.y;
    if (l->weight[SA_OUTPUT] == NULL) {
        norm_rows(p, t, 0, p->f.array[SA_X], p->f.array[SA_ATTENDED], SA_UNIT, s);
    } else {
        norm_rows(p, t, 0, p->f.array[SA_UNIT], NULL, SA_UNIT, s);
    }
}

static void norm_last(const sa_part *p, ptrdiff_t t) {
    norm_rows(p, t, 1, p->f.array[SA_LAST_UNIT], NULL, SA_LAST_UNIT, p->f.y);
}

static void rotate(const sa_part *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t start = e->starts[p->from + t], length = e->starts[p->from + t + 1] - start, row = start - p->origin;
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    kernels->rotate_heads(&l->rotary, p->f.array[SA_QUERIES] + sa_bytes(e, row * queries_of(l)), length, l->heads, l->width,
                          false);
    kernels->rotate_heads(&l->rotary, p->f.array[SA_KEYS] + sa_bytes(e, row * keys_of(l)), length, l->key_heads, l->width,
                          false);
}

static ptrdiff_t pieces_of(const sa_part *p) { return sa_ceil_div(p->e->longest, p->plan->attend_rows); }

static void attend(const sa_part *p, ptrdiff_t t) {
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

static void copy_unit(const sa_part *p, ptrdiff_t t) {
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(p->e, row * p->e->d);
    memcpy(p->f.y + at, p->f.array[SA_UNIT] + at, (size_t)sa_bytes(p->e, rows * p->e->d));
}

static void run_layer(sa_part *p) {
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t norms = row_tasks(p);
    p->f = sa_frame_of(p);
    if (l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) {
        sa_run_phase(p, norms, norm_x, SA_BY_ROWS);
    }
    multiply(p, SA_PROJECT, SA_BY_ROWS);
    if (l->rotary.rotated > 0) {
        sa_run_phase(p, p->to - p->from, rotate, SA_BY_ROWS);
    }
    sa_run_phase(p, (p->to - p->from) * l->heads * pieces_of(p), attend, SA_BY_TURNS);
    if (l->weight[SA_OUTPUT] != NULL) {
        multiply(p, SA_PROJECT_OUTPUT, SA_BY_ROWS);
    }
    if (needs_detour(p)) {
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
    if (l->weight[SA_GATE] != NULL) { /* the next product is cut alike: a thread needs its own gates alone */
        multiply(p, SA_PROJECT_GATE, SA_BY_ROWS_AND_ON);
    }
    multiply(p, SA_PROJECT_UP, SA_BY_ROWS);
    multiply(p, SA_PROJECT_DOWN, SA_BY_ROWS);
    if (!l->norm_first && l->weight[SA_LAST_NORM] != NULL) {
        sa_run_phase(p, norms, norm_last, SA_BY_ROWS);
    }
}

/* The final norm, to the output if every row leaves, else in place. */
static void norm_final(const sa_part *p, ptrdiff_t t) {
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

/* A sequence's rows, or the one that stands for it. */
static void leave(const sa_part *p, ptrdiff_t t) {
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

static void run_part(sa_part p) {
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

static ptrdiff_t most_heads(const sa_transformer *e) {
    ptrdiff_t most = 1;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        most = sa_larger(most, e->layer[i].heads);
    }
    return most;
}

sa_status sa_transformer_make_plan(const sa_transformer *e, bool keep, int max_threads, sa_transformer_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    *plan = (sa_transformer_plan){.keep = keep, .threads = 1};
    if (!sa_transformer_fits(e)) {
        return SA_TOO_LARGE;
    }
    if (e->sequences == 0) {
        return SA_OK;
    }
    plan->far = count_weights(e) * (double)sa_element_size(e->f64) > SA_NEAR_BYTES;
    plan->attend_rows = kernels->block_rows;
    if (e->sequences * most_heads(e) * sa_ceil_div(e->longest, kernels->block_rows) == 1 &&
        4 * e->longest > 3 * kernels->block_rows) {
        /* Leaves work for a second thread. Still fewer rows would leave the matrix unit: bits would depend on the batch. */
        plan->attend_rows /= 2;
    }
    plan->threads = sa_transformer_threads(e, 1, max_threads);
    const ptrdiff_t threads = plan->threads, few = threads == 1 ? 1 : 2 * threads;
    const ptrdiff_t turns = sa_ceil_div(sa_ceil_div(e->tokens, SA_PART_TOKENS), threads); /* as many parts for each */
    plan->part_tokens = sa_ceil_div(e->tokens, sa_larger(turns * threads, few));
    if (threads > 1) {
        plan->part_tokens = sa_larger(plan->part_tokens, SA_LEAST_PART_TOKENS);
    }
    plan->parts = sa_ceil_div(e->tokens, plan->part_tokens);
    plan->part_rows = sa_smaller(e->tokens, plan->part_tokens + e->longest);
    plan->by_parts = plan->threads == 1 || plan->parts >= 2 * plan->threads;
    plan->layout = sa_layout_of(e, plan->by_parts && !keep ? plan->part_rows : e->tokens, keep);
    const size_t frame = plan->layout.bytes;
    if (keep) {
        plan->saved_bytes = kept_bytes(e, &plan->layout);
    } else if (plan->by_parts) {
        plan->scratch_bytes = frame;
    } else {
        plan->shared_bytes = frame;
    }
    plan->scratch_bytes += sa_transformer_scratch(e, plan, false);
    return SA_OK;
}

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

/* Independent: a part writes only its own sequences. */
static void run_part_number(void *call, ptrdiff_t number) {
    sa_part p = *(const sa_part *)call;
    p.thread = 0;
    p.team = 1;
    p.from = sequence_from(p.e, number * p.plan->part_tokens);
    p.to = sequence_from(p.e, (number + 1) * p.plan->part_tokens);
    if (p.from == p.to) {
        return;
    }
    if (!p.plan->keep) { /* the thread's own frame, reused by all layers */
        p.frames = p.scratch;
        p.capacity = p.plan->part_rows;
        p.origin = p.e->starts[p.from];
        p.scratch += p.plan->layout.bytes;
    }
    run_part(p);
}

static void run(void *call, int thread, int team) {
    sa_part p = *(const sa_part *)call;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    if (p.plan->by_parts) {
        sa_share_tasks(team, p.plan->parts, run_part_number, &p);
    } else {
        run_part(p);
    }
}

void sa_transformer_forward(const sa_transformer *e, const sa_transformer_plan *plan, void *out, void *saved, void *scratch) {
    if (e->sequences == 0) {
        return;
    }
    sa_part all = {.e = e,
                   .plan = plan,
                   .out = out,
                   .to = e->sequences,
                   .frames = plan->keep ? saved : scratch,
                   .capacity = e->tokens,
                   .scratch = (char *)scratch + plan->shared_bytes};
    sa_run_team(plan->threads, run, &all);
}
