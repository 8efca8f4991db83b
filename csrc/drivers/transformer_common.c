/* For all passes of the transformer: sizes and offsets of activations,
 * descriptions of a layer's products and heads, and how a phase is run. */
#include <math.h>
#include <string.h>

#include "drivers/transformer.h"
#include "runtime/team.h"

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

size_t sa_array_bytes(const sa_transformer *e, ptrdiff_t rows, ptrdiff_t columns) {
    return sa_whole_lines((size_t)rows * (size_t)columns * sa_element_size(e->f64));
}

bool sa_transformer_fits(const sa_transformer *e, bool keep) {
    /* Arrays of frames and scratch together are less than twice a frame's, and each thread may have its own. */
    const size_t frames = keep ? (size_t)e->layers + 1 : 1, arrays = 2 * SA_ARRAYS * sa_element_size(e->f64);
    size_t most = (size_t)e->d, bytes;
    bool fits = e->d <= SA_MAX_WIDTH && e->longest <= SA_MAX_LENGTH;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        size_t width;
        fits = fits && sa_multiply((size_t)l->heads, (size_t)l->width, &width) && width <= (size_t)SA_MAX_WIDTH &&
               l->hidden <= SA_MAX_WIDTH;
        most = fits ? sa_most(most, sa_most(width, (size_t)l->hidden)) : most;
    }
    return fits && sa_multiply((size_t)e->tokens + 1, most, &bytes) && sa_multiply(bytes, arrays, &bytes) &&
           sa_multiply(bytes, frames, &bytes) && bytes <= PTRDIFF_MAX / SA_MOST_THREADS;
}

/* Makes room for a norm's scaled rows, if they are kept, and for its scales. */
static void widen(ptrdiff_t width[2], const void *weight, bool keep, ptrdiff_t scaled, ptrdiff_t scales) {
    width[0] = weight == NULL || !keep ? width[0] : sa_larger(width[0], scaled);
    width[1] = weight == NULL ? width[1] : sa_larger(width[1], scales);
}

/* True if the input of down overwrites up(m) even if it is kept: ReLU is positive where its result is. */
static bool overwrites_wide(const sa_layer *l) { return l->activation == SA_ACT_RELU && l->weight[SA_GATE] == NULL; }

/* Sets the width of each array to the largest of any layer. */
static void widths_of(const sa_transformer *e, bool keep, ptrdiff_t width[SA_ARRAYS]) {
    memset(width, 0, SA_ARRAYS * sizeof *width);
    width[SA_X] = e->d;
    width[SA_SCALED] = e->d;
    width[SA_SCALE] = 1;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        width[SA_QUERIES] = sa_larger(width[SA_QUERIES], sa_query_width(l));
        width[SA_KEYS] = width[SA_VALUES] = sa_larger(width[SA_KEYS], sa_key_width(l));
        width[SA_ATTENDED] = width[SA_QUERIES];
        width[SA_STATS] = keep ? sa_larger(width[SA_STATS], 2 * l->heads) : 0;
        width[SA_NORMED] = l->norm_first ? e->d : width[SA_NORMED];
        widen(&width[SA_QUERY_SCALED], l->weight[SA_QUERY_NORM], keep, sa_query_width(l), l->heads);
        widen(&width[SA_KEY_SCALED], l->weight[SA_KEY_NORM], keep, sa_key_width(l), l->key_heads);
        widen(&width[SA_POST_SCALED], l->weight[SA_ATTENTION_POST_NORM], keep, e->d, 1);
        widen(&width[SA_FEED_FORWARD_POST_SCALED], l->weight[SA_FEED_FORWARD_POST_NORM], keep, e->d, 1);
        if (sa_has_feed_forward(l)) {
            width[SA_S] = e->d;
            width[SA_WIDE] = sa_larger(width[SA_WIDE], keep && overwrites_wide(l) ? 0 : l->hidden);
            width[SA_ACTIVE] = keep ? sa_larger(width[SA_ACTIVE], l->hidden) : 0;
            width[SA_GATES] = l->weight[SA_GATE] == NULL ? width[SA_GATES] : sa_larger(width[SA_GATES], l->hidden);
        }
    }
    if (keep && width[SA_S] > 0) {
        width[SA_NORMED_S] = width[SA_NORMED];
        width[SA_FEED_FORWARD_SCALED] = e->d;
        width[SA_FEED_FORWARD_SCALE] = 1;
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
        layout.at[SA_FEED_FORWARD_SCALED] = layout.at[SA_SCALED];
        layout.at[SA_FEED_FORWARD_SCALE] = layout.at[SA_SCALE];
        layout.at[SA_POST_SCALED] = layout.at[SA_FEED_FORWARD_POST_SCALED] = layout.at[SA_SCALED];
        layout.at[SA_POST_SCALE] = layout.at[SA_FEED_FORWARD_POST_SCALE] = layout.at[SA_SCALE];
        layout.at[SA_QUERY_SCALED] = layout.at[SA_QUERIES];
        layout.at[SA_KEY_SCALED] = layout.at[SA_KEYS];
    }
    return layout;
}

sa_frame sa_frame_of(const sa_pass *p) {
    const bool keep = p->plan->keep;
    char *base = p->frames + (keep ? (size_t)p->layer * p->plan->layout.bytes : 0);
    sa_frame f;
    for (int i = 0; i < SA_ARRAYS; ++i) {
        f.array[i] = base + p->plan->layout.at[i];
    }
    f.array[SA_STATS] = keep ? f.array[SA_STATS] : NULL;
    if (keep && p->layer < p->e->layers && overwrites_wide(sa_layer_of(p))) {
        f.array[SA_WIDE] = f.array[SA_ACTIVE];
    }
    f.y = keep ? base + p->plan->layout.bytes : base;
    return f;
}

char *sa_outer_scaled(const sa_pass *p, int which, char **scale) {
    const sa_transformer *e = p->e;
    if (!p->plan->keep) {
        *scale = p->frames + p->plan->layout.at[SA_SCALE];
        return p->frames + p->plan->layout.at[SA_SCALED];
    }
    const size_t array = sa_array_bytes(e, p->capacity, e->d), each = array + sa_array_bytes(e, p->capacity, 1);
    char *scaled = p->frames + (size_t)e->layers * p->plan->layout.bytes + array + (size_t)which * each;
    *scale = scaled + array;
    return scaled;
}

double sa_count_weights(const sa_transformer *e) {
    double weights = 0;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        const sa_layer *l = &e->layer[i];
        const ptrdiff_t output = l->weight[SA_OUTPUT] == NULL ? 0 : sa_query_width(l);
        const ptrdiff_t wide = l->hidden * (l->weight[SA_GATE] == NULL ? 2 : 3);
        weights += (double)e->d * (double)(sa_query_width(l) + 2 * sa_key_width(l) + output + wide);
    }
    return weights;
}

int sa_transformer_threads(const sa_transformer *e, double products, int max_threads) {
    const double rows = (double)e->tokens;
    double each = sa_count_weights(e);
    double keys = rows;
    for (ptrdiff_t s = 0; s < e->sequences; ++s) {
        keys += (double)sa_past_of(e, s);
    }
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        each += 2 * keys / (double)e->sequences * (double)sa_query_width(&e->layer[i]);
    }
    return sa_threads_for(products * rows * each, SA_TRANSFORMER_WORK_PER_THREAD, HUGE_VAL, max_threads);
}

/* ---- descriptions of products and heads -------------------------------------------------------------------------- */

static void add_weight(sa_linear *product, const sa_layer *l, int which, ptrdiff_t out, char *y) {
    product->out[product->count] = out;
    product->weight[product->count] = l->weight[which];
    product->bias[product->count] = l->bias[which];
    product->y[product->count++] = y;
}

/* Each kind of dropout has its own seed. */
sa_dropout sa_dropout_of(const sa_pass *p, int kind, ptrdiff_t row) {
    const sa_layer *l = sa_layer_of(p);
    return (sa_dropout){l->dropout[kind], l->seed + (uint64_t)kind * UINT64_C(0x9E3779B97F4A7C15), p->origin + row, 0};
}

bool sa_needs_detour(const sa_pass *p) {
    const sa_layer *l = sa_layer_of(p);
    const bool norm_after =
        (!l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) || l->weight[SA_ATTENTION_POST_NORM] != NULL;
    return !p->plan->keep && !norm_after && !sa_has_feed_forward(l) && l->dropout[SA_DROP_OUTPUT] > 0;
}

sa_linear sa_product_of(const sa_pass *p, sa_product_kind kind, ptrdiff_t row, ptrdiff_t rows) {
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t d = p->e->d, at = sa_bytes(p->e, row), query_width = sa_query_width(l), key_width = sa_key_width(l),
                    hidden = l->hidden;
    char *const *array = p->f.array;
    const bool first_normed = l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL;
    const bool norm_before = l->norm_first && l->weight[SA_FEED_FORWARD_NORM] != NULL;
    sa_linear product = {.f64 = p->e->f64,
                         .weights = l->weights,
                         .far = p->plan->far,
                         .decoding = p->plan->decoding,
                         .digits = p->e->prompt_precision,
                         .rows = rows,
                         .in = d};
    switch (kind) {
    case SA_PROJECT:
        product.x = (first_normed ? array[SA_NORMED] : array[SA_X]) + at * d;
        add_weight(&product, l, SA_QUERY, query_width, array[SA_QUERIES] + at * query_width);
        add_weight(&product, l, SA_KEY, key_width, array[SA_KEYS] + at * key_width);
        add_weight(&product, l, SA_VALUE, key_width, array[SA_VALUES] + at * key_width);
        return product;
    case SA_PROJECT_OUTPUT: {
        const bool norm_after = !l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL;
        const bool post = l->weight[SA_ATTENTION_POST_NORM] != NULL;
        char *s = sa_has_feed_forward(l) ? array[SA_S] : p->f.y;
        product.in = query_width;
        product.x = array[SA_ATTENDED] + at * query_width;
        product.dropout = sa_dropout_of(p, SA_DROP_OUTPUT, row);
        product.residual = post ? NULL : array[SA_X] + at * d;
        s = post ? array[SA_POST_SCALED] : norm_after || sa_needs_detour(p) ? array[SA_SCALED] : s;
        add_weight(&product, l, SA_OUTPUT, d, s + at * d);
        return product;
    }
    case SA_PROJECT_DOWN: {
        const bool norm_after = !l->norm_first && l->weight[SA_FEED_FORWARD_NORM] != NULL,
                   post = l->weight[SA_FEED_FORWARD_POST_NORM] != NULL;
        product.in = hidden;
        product.x = array[SA_ACTIVE] + at * hidden;
        product.dropout = sa_dropout_of(p, SA_DROP_DOWN, row);
        product.residual = post ? NULL : array[SA_S] + at * d;
        char *y = post ? array[SA_FEED_FORWARD_POST_SCALED] : norm_after ? array[SA_FEED_FORWARD_SCALED] : p->f.y;
        add_weight(&product, l, SA_DOWN, d, y + at * d);
        return product;
    }
    default:
        product.x = (norm_before ? array[SA_NORMED_S] : array[SA_S]) + at * d;
        if (kind == SA_PROJECT_GATE) {
            add_weight(&product, l, SA_GATE, hidden, array[SA_GATES] + at * hidden);
            return product;
        }
        add_weight(&product, l, SA_UP, hidden, array[SA_WIDE] + at * hidden);
        if (kind == SA_PROJECT_BOTH) {
            if (l->weight[SA_GATE] != NULL) {
                add_weight(&product, l, SA_GATE, hidden, array[SA_GATES] + at * hidden);
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

void sa_describe_head(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t row, ptrdiff_t length, ptrdiff_t head,
                      sa_attention *a) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t query_width = sa_query_width(l), key_width = sa_key_width(l),
                    key_head = head / (l->heads / l->key_heads);
    const ptrdiff_t at = sa_bytes(e, row * query_width + head * l->width),
                    key_at = sa_bytes(e, row * key_width + key_head * l->width);
    *a = (sa_attention){.L = length,
                        .S = length,
                        .E = l->width,
                        .Dv = l->width,
                        .gqa = 1,
                        .f64 = e->f64,
                        .query = matrix(e, p->f.array[SA_QUERIES] + at, query_width),
                        .key = matrix(e, p->f.array[SA_KEYS] + key_at, key_width),
                        .value = matrix(e, p->f.array[SA_VALUES] + key_at, key_width),
                        .out = matrix(e, p->f.array[SA_ATTENDED] + at, query_width),
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
    if (e->key_bias.m.data != NULL) {
        a->key_bias.m = e->key_bias.m;
        a->key_bias.m.data += sequence * e->key_bias.lead_stride[0];
    }
    if (e->weights != NULL) {
        const ptrdiff_t number = (p->layer * e->sequences + sequence) * l->heads + head;
        a->weights = matrix(e, e->weights + sa_bytes(e, number * e->longest * e->longest), e->longest);
    }
    if (p->f.array[SA_STATS] != NULL) {
        a->stats = matrix(e, p->f.array[SA_STATS] + sa_bytes(e, (row * l->heads + head) * 2), 2 * l->heads);
    }
}

size_t sa_transformer_scratch(const sa_transformer *e, const sa_transformer_plan *plan, bool backward) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    size_t most = 0;
    sa_pass p = {.e = e, .plan = plan};
    for (p.layer = 0; p.layer < e->layers; ++p.layer) {
        const sa_layer *l = sa_layer_of(&p);
        for (int kind = 0; kind < SA_PRODUCTS; ++kind) {
            if (kind >= SA_PROJECT_GATE ? l->hidden == 0 : kind == SA_PROJECT_OUTPUT && l->weight[SA_OUTPUT] == NULL) {
                continue;
            }
            const sa_linear product = sa_product_of(&p, kind, 0, plan->by_shares ? plan->share_rows : e->tokens);
            most = sa_most(most, sa_linear_scratch(&product, plan->threads, plan->by_shares, backward));
        }
        if (e->cache.past != NULL) {
            continue;
        }
        sa_attention a;
        sa_describe_head(&p, 0, 0, e->longest, 0, &a);
        const sa_attention_gradients g = {.a = &a};
        const size_t copies = 2 * sa_array_bytes(e, e->longest, a.E) + sa_array_bytes(e, e->longest, 1);
        most = sa_most(most, backward ? kernels->backward_scratch(&g) + copies : kernels->attention_scratch(&a));
    }
    return sa_whole_lines(most);
}

/* ---- phases ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const sa_pass *p;
    sa_pass_task *task;
} phase;

static void run_task(void *call, ptrdiff_t t) {
    const phase *run = call;
    if (!sa_stops(run->p->e->watch)) {
        run->task(run->p, t);
    }
}

/* Iterations are independent: a task writes its own rows or columns. A cancelled call skips its remaining tasks; its
 * threads still wait for one another and reach the end. */
void sa_run_phase(const sa_pass *p, ptrdiff_t tasks, sa_pass_task *task, sa_order order) {
    phase run = {p, task};
    if (order == SA_BY_ANY_THREAD) {
        sa_take_tasks(p->team, tasks, run_task, &run);
    } else {
        const sa_portion portion = sa_portion_of(tasks, p->thread, p->team);
        for (ptrdiff_t t = portion.from; t < portion.end && !sa_stops(p->e->watch); ++t) {
            task(p, t);
        }
    }
    if (order != SA_BY_ROWS_AND_ON) {
        sa_wait_for_team(p->team);
    }
}
