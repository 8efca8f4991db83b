/* Driver of the transformer's forward pass: the plan, and phases of independent tasks. A thread takes a share of the
 * sequences, which fits its core's CPU cache, through all layers. With few sequences the threads divide every phase. */
#include <string.h>

#include "drivers/quants.h"
#include "drivers/transformer.h"
#include "runtime/team.h"

/* The most tokens of a share, so that its rows stay in CPU caches from phase to phase; and the fewest, as every share
 * makes panels of the weights again. Compact weights are already in panels, and shares can be smaller. */
#define SA_SHARE_TOKENS 384
#define SA_LEAST_SHARE_TOKENS 192
#define SA_COMPACT_SHARE_TOKENS 128
#define SA_LEAST_COMPACT_SHARE_TOKENS 64

/* The rows of a prompt that a task appends to the cache. */
#define SA_APPEND_ROWS 64

/* Weights of more bytes do not stay in a core's CPU caches from call to call. */
#define SA_NEAR_BYTES 1e6

/* ---- with a cache: attention.c's call for each sequence, whose bits depend on the sequence alone ----------------- */

/* Elements in the cache before a layer's keys, or values, of a sequence. */
static ptrdiff_t cache_at(const sa_pass *p, ptrdiff_t sequence) {
    return (p->layer * p->e->sequences + sequence) * p->e->cache.capacity * sa_key_width(sa_layer_of(p));
}

static sa_dtype cache_dtype(const sa_transformer *e) {
    return e->f64 ? SA_F64 : e->cache.narrow ? e->cache.dtype : SA_F32;
}

/* data may be NULL while a call is planned. */
static sa_tensor heads_tensor(sa_dtype dtype, char *data, ptrdiff_t at, ptrdiff_t row, ptrdiff_t group,
                              ptrdiff_t head) {
    const ptrdiff_t size = (ptrdiff_t)sa_itemsize(dtype);
    return (sa_tensor){.m = {data == NULL ? NULL : data + at * size, row * size, size, dtype, false},
                       .lead_stride = {group * size, head * size}};
}

/* Describes the attention of a sequence's new rows, from row `row` of the frame on: (key heads, query heads of
 * each). */
static void describe_sequence(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t row, sa_attention *a) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t group = l->heads / l->key_heads, query_width = sa_query_width(l), past = sa_past_of(e, sequence);
    const ptrdiff_t at = cache_at(p, sequence), of_head = e->cache.capacity * l->width;
    const ptrdiff_t length = sa_length_of(e, sequence), keys = past + length, pairs = length * keys;
    const sa_dtype own = e->f64 ? SA_F64 : SA_F32, cached = cache_dtype(e);
    *a = (sa_attention){
        .L = length,
        .S = keys,
        .E = l->width,
        .Dv = l->width,
        .n_lead = 2,
        .lead = {l->key_heads, group},
        .gqa = 1,
        .f64 = e->f64,
        .by_rows = !p->plan->decoding,
        .query = heads_tensor(own, p->f.array[SA_QUERIES], row * query_width, query_width, group * l->width, l->width),
        .out = heads_tensor(own, p->f.array[SA_ATTENDED], row * query_width, query_width, group * l->width, l->width),
        .key = heads_tensor(cached, e->cache.keys, at, l->width, of_head, 0),
        .value = heads_tensor(cached, e->cache.values, at, l->width, of_head, 0),
        .weights = heads_tensor(own, e->weights, p->layer * l->heads * pairs, keys, group * pairs, pairs),
        .scale = l->scale,
        .softcap = l->softcap,
        .causal = true,
        .diagonal = past,
        .window_left = l->window_left,
        .window_right = l->window_right};
}

static bool are_alike(const sa_layer *a, const sa_layer *b) {
    return a->heads == b->heads && a->key_heads == b->key_heads && a->width == b->width;
}

/* Sets sizes to the most of any layer and sequence. Returns a thread's scratch. */
static size_t plan_cache(const sa_transformer *e, sa_transformer_plan *plan) {
    sa_pass p = {.e = e, .plan = plan};
    size_t scratch = 0;
    plan->joined = true;
    for (; p.layer < e->layers; ++p.layer) {
        const sa_layer *l = sa_layer_of(&p);
        if (p.layer > 0 && are_alike(l, l - 1)) {
            continue;
        }
        for (ptrdiff_t sequence = 0; sequence < e->sequences; ++sequence) {
            sa_attention a;
            sa_attention_plan own;
            describe_sequence(&p, sequence, 0, &a);
            sa_attention_make_plan(&a, 1, &own); /* cannot overflow, as the transformer does not */
            const ptrdiff_t merges = own.chunks > 1 ? own.groups * own.blocks : 0;
            plan->attend_tasks = sa_larger(plan->attend_tasks, own.tasks);
            plan->merge_tasks = sa_larger(plan->merge_tasks, merges);
            plan->joined = plan->joined && own.tasks == l->key_heads;
            plan->partial_bytes = sa_most(plan->partial_bytes, sa_whole_lines(own.partial_bytes));
            scratch = sa_most(scratch, own.scratch_bytes);
        }
    }
    return sa_whole_lines(scratch);
}

/* ---- how a call is cut up ---------------------------------------------------------------------------------------- */

static size_t kept_bytes(const sa_transformer *e, const sa_layout *layout) {
    const size_t array = sa_array_bytes(e, e->tokens, e->d);
    return (size_t)e->layers * layout->bytes + 3 * array + 2 * sa_array_bytes(e, e->tokens, 1);
}

static ptrdiff_t most_heads(const sa_transformer *e) {
    ptrdiff_t most = 1;
    for (ptrdiff_t i = 0; i < e->layers; ++i) {
        most = sa_larger(most, e->layer[i].heads);
    }
    return most;
}

static bool all_decode(const sa_transformer *e) {
    bool decoding = e->tokens == e->sequences && !e->cache.prompt;
    for (ptrdiff_t s = 0; s < e->sequences; ++s) {
        decoding = decoding && sa_past_of(e, s) > 0;
    }
    return decoding;
}

sa_status sa_transformer_make_plan(const sa_transformer *e, bool keep, int max_threads, sa_transformer_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    *plan = (sa_transformer_plan){.keep = keep, .threads = 1};
    if (!sa_transformer_fits(e, keep)) {
        return SA_TOO_LARGE;
    }
    if (e->sequences == 0) {
        return SA_OK;
    }
    plan->decoding = all_decode(e);
    plan->far = sa_count_weights(e) * (double)sa_element_size(e->f64) > SA_NEAR_BYTES;
    plan->attend_rows = kernels->block_rows;
    if (e->sequences * most_heads(e) * sa_ceil_div(e->longest, kernels->block_rows) == 1 &&
        4 * e->longest > 3 * kernels->block_rows) {
        /* Leaves work for a second thread. Fewer rows would not use the matrix unit,
         * and bits would depend on the batch. */
        plan->attend_rows /= 2;
    }
    plan->threads = sa_transformer_threads(e, 1, max_threads);
    const ptrdiff_t threads = plan->threads, few = threads == 1 ? 1 : 2 * threads;
    const bool compact =
        e->layers > 0 && e->layer[0].weights != SA_WEIGHTS_WHOLE && e->layer[0].weights != SA_WEIGHTS_QUANTS;
    const ptrdiff_t most = compact ? SA_COMPACT_SHARE_TOKENS : SA_SHARE_TOKENS;
    const ptrdiff_t each = sa_ceil_div(sa_ceil_div(e->tokens, most), threads); /* shares of each thread */
    plan->share_tokens = sa_ceil_div(e->tokens, sa_larger(each * threads, few));
    if (threads > 1) {
        plan->share_tokens =
            sa_larger(plan->share_tokens, compact ? SA_LEAST_COMPACT_SHARE_TOKENS : SA_LEAST_SHARE_TOKENS);
    }
    plan->shares = sa_ceil_div(e->tokens, plan->share_tokens);
    plan->share_rows = sa_smaller(e->tokens, plan->share_tokens + e->longest);
    plan->by_shares = plan->threads == 1 || plan->shares >= 2 * plan->threads;
    plan->layout = sa_layout_of(e, plan->by_shares && !keep ? plan->share_rows : e->tokens, keep);
    const size_t frame = plan->layout.bytes;
    if (keep) {
        plan->saved_bytes = kept_bytes(e, &plan->layout);
    } else if (plan->by_shares) {
        plan->scratch_bytes = frame;
    } else {
        plan->shared_bytes = frame;
    }
    const size_t attention = e->cache.past == NULL ? 0 : plan_cache(e, plan);
    plan->scratch_bytes += sa_most(sa_transformer_scratch(e, plan, SA_FORWARD_PASS), attention);
    plan->shared_bytes += (size_t)e->sequences * plan->partial_bytes;
    return SA_OK;
}

/* ---- phases ------------------------------------------------------------------------------------------------------ */

static ptrdiff_t rows_of(const sa_pass *p) { return sa_start_of(p->e, p->to) - sa_start_of(p->e, p->from); }

/* The first row of a sequence in the frame. */
static ptrdiff_t row_of(const sa_pass *p, ptrdiff_t sequence) { return sa_start_of(p->e, sequence) - p->origin; }

static ptrdiff_t row_tasks(const sa_pass *p) { return sa_ceil_div(rows_of(p), SA_NORM_ROWS); }

/* Returns the number of rows of task t of row_tasks; *row becomes the first of them in the frame. */
static ptrdiff_t task_rows(const sa_pass *p, ptrdiff_t t, ptrdiff_t *row) {
    *row = row_of(p, p->from) + t * SA_NORM_ROWS;
    return sa_smaller(rows_of(p) - t * SA_NORM_ROWS, SA_NORM_ROWS);
}

/* Computes y = norm(x + added) + residual for rows from row `row` of n's arrays on, each of which begins with row 0. */
static void add_norm(const sa_pass *p, const sa_norm *norm, ptrdiff_t row, sa_norm_rows n) {
    const ptrdiff_t at = sa_bytes(p->e, row * n.d);
    n.rms = norm->rms;
    n.eps = norm->eps;
    n.weight = norm->weight;
    n.bias = norm->bias;
    n.x = (const char *)n.x + at;
    n.added = n.added == NULL ? NULL : (const char *)n.added + at;
    n.residual = n.residual == NULL ? NULL : (const char *)n.residual + at;
    n.scaled = (char *)n.scaled + at;
    n.scale = (char *)n.scale + sa_bytes(p->e, row);
    n.y = (char *)n.y + at;
    sa_kernels_for(p->e->f64)->add_norm(&n);
}

/* Computes x = factor·table[ids], or table[ids] + token_type_row + positions, or copies given rows; then the first
 * norm. */
static void enter(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t start = sa_start_of(e, p->from + t), length = sa_length_of(e, p->from + t), row = start - p->origin;
    const ptrdiff_t before = sa_bytes(e, sa_past_of(e, p->from + t) * e->d);
    const char *positions = e->positions == NULL ? NULL : (const char *)e->positions + before;
    char *scale, *scaled = sa_outer_scaled(p, SA_FIRST_NORM, &scale);
    char *entered = (e->embedding_norm.weight == NULL ? p->f.array[SA_X] : scaled) + sa_bytes(e, row * e->d);
    if (e->table == NULL) {
        memcpy(entered, (const char *)e->rows + sa_bytes(e, start * e->d), (size_t)sa_bytes(e, length * e->d));
    } else if (e->table_kind == SA_WEIGHTS_QUANTS) {
        sa_quants_look_up(e->table, e->token_type_row, (const void *)positions, e->ids + start, length,
                          (float *)(void *)entered);
    } else if (e->table_kind != SA_WEIGHTS_WHOLE) {
        sa_kernels_active()->look_up_compact(e->table, e->table_scale, e->token_type_row,
                                             (const float *)(const void *)positions, e->ids + start, length, e->d,
                                             (float *)(void *)entered);
    } else {
        sa_kernels_for(e->f64)->look_up(e->table, e->token_type_row, positions, e->ids + start, length, e->d, entered);
    }
    if (e->table_factor != 0) {
        sa_kernels_for(e->f64)->repeat_scaled(entered, e->table_factor, 1, length * e->d, entered);
    }
    if (e->embedding_norm.weight != NULL) {
        add_norm(p, &e->embedding_norm, row,
                 (sa_norm_rows){
                     .rows = length, .d = e->d, .x = scaled, .scaled = scaled, .scale = scale, .y = p->f.array[SA_X]});
    }
}

static void product_task(const sa_pass *p, ptrdiff_t t) { sa_linear_task(&p->product, &p->cut, t, p->scratch); }

static void multiply(sa_pass *p, sa_product_kind kind, sa_order order) {
    p->product = sa_product_of(p, kind, row_of(p, p->from), rows_of(p));
    p->cut = sa_cut_product(&p->product, p->plan->threads, p->plan->by_shares);
    sa_run_phase(p, sa_linear_tasks(&p->product, &p->cut), product_task, order);
}

/* Computes a norm of the layer: x, added and residual, each or NULL, are arrays of the frame,
 * and `scaled` is the number of one. */
static void norm_rows(const sa_pass *p, ptrdiff_t t, int which, int scaled, sa_norm_rows n) {
    const sa_norm norm = sa_norm_of(sa_layer_of(p), which);
    ptrdiff_t row;
    n.rows = task_rows(p, t, &row);
    n.d = p->e->d;
    n.scaled = p->f.array[scaled];
    n.scale = p->f.array[scaled + 1];
    add_norm(p, &norm, row, n);
}

static void norm_before_attention(const sa_pass *p, ptrdiff_t t) {
    norm_rows(p, t, SA_ATTENTION_NORM, SA_SCALED, (sa_norm_rows){.x = p->f.array[SA_X], .y = p->f.array[SA_NORMED]});
}

static void norm_before_feed_forward(const sa_pass *p, ptrdiff_t t) {
    norm_rows(p, t, SA_FEED_FORWARD_NORM, SA_FEED_FORWARD_SCALED,
              (sa_norm_rows){.x = p->f.array[SA_S], .y = p->f.array[SA_NORMED_S]});
}

static char *result_of_attention(const sa_pass *p) {
    return sa_has_feed_forward(sa_layer_of(p)) ? p->f.array[SA_S] : p->f.y;
}

/* The product has written x + output(…) to SA_SCALED; without a product the heads are added here. */
static void norm_after_attention(const sa_pass *p, ptrdiff_t t) {
    const bool product = sa_layer_of(p)->weight[SA_OUTPUT] != NULL;
    norm_rows(p, t, SA_ATTENTION_NORM, SA_SCALED,
              (sa_norm_rows){.x = p->f.array[product ? SA_SCALED : SA_X],
                             .added = product ? NULL : p->f.array[SA_ATTENDED],
                             .y = result_of_attention(p)});
}

static void norm_after_feed_forward(const sa_pass *p, ptrdiff_t t) {
    norm_rows(p, t, SA_FEED_FORWARD_NORM, SA_FEED_FORWARD_SCALED,
              (sa_norm_rows){.x = p->f.array[SA_FEED_FORWARD_SCALED], .y = p->f.y});
}

/* The product has written output(…) to SA_POST_SCALED. */
static void post_norm_attention(const sa_pass *p, ptrdiff_t t) {
    norm_rows(
        p, t, SA_ATTENTION_POST_NORM, SA_POST_SCALED,
        (sa_norm_rows){.x = p->f.array[SA_POST_SCALED], .residual = p->f.array[SA_X], .y = result_of_attention(p)});
}

static void post_norm_feed_forward(const sa_pass *p, ptrdiff_t t) {
    norm_rows(p, t, SA_FEED_FORWARD_POST_NORM, SA_FEED_FORWARD_POST_SCALED,
              (sa_norm_rows){.x = p->f.array[SA_FEED_FORWARD_POST_SCALED], .residual = p->f.array[SA_S], .y = p->f.y});
}

/* Normalises heads, of all queries or of all keys, from head `first` of the frame on, in place. */
enum { OF_QUERIES, OF_KEYS };
static void norm_heads(const sa_pass *p, bool keys, ptrdiff_t first, ptrdiff_t heads) {
    const sa_norm norm = sa_norm_of(sa_layer_of(p), keys ? SA_KEY_NORM : SA_QUERY_NORM);
    char *x = p->f.array[keys ? SA_KEYS : SA_QUERIES];
    if (norm.weight != NULL) {
        add_norm(p, &norm, first,
                 (sa_norm_rows){.rows = heads,
                                .d = sa_layer_of(p)->width,
                                .x = x,
                                .scaled = p->f.array[keys ? SA_KEY_SCALED : SA_QUERY_SCALED],
                                .scale = p->f.array[keys ? SA_KEY_SCALE : SA_QUERY_SCALE],
                                .y = x});
    }
}

static bool changes_heads(const sa_layer *l) {
    return l->rotary.rotated > 0 || l->weight[SA_QUERY_NORM] != NULL || l->weight[SA_KEY_NORM] != NULL;
}

static void norm_and_rotate(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t row = row_of(p, p->from + t), length = sa_length_of(e, p->from + t);
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    norm_heads(p, OF_QUERIES, row * l->heads, length * l->heads);
    norm_heads(p, OF_KEYS, row * l->key_heads, length * l->key_heads);
    if (l->rotary.rotated > 0) {
        kernels->rotate_heads(&l->rotary, p->f.array[SA_QUERIES] + sa_bytes(e, row * sa_query_width(l)), length,
                              l->heads, l->width, SA_FORWARDS);
        kernels->rotate_heads(&l->rotary, p->f.array[SA_KEYS] + sa_bytes(e, row * sa_key_width(l)), length,
                              l->key_heads, l->width, SA_FORWARDS);
    }
}

static ptrdiff_t pieces_of(const sa_pass *p) { return sa_ceil_div(p->e->longest, p->plan->attend_rows); }

static void attend(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t pieces = pieces_of(p), heads = sa_layer_of(p)->heads, sequence = p->from + t / pieces / heads;
    const ptrdiff_t length = sa_length_of(e, sequence), from = t % pieces * p->plan->attend_rows;
    if (from >= length) {
        return;
    }
    sa_attention a;
    sa_rows rows;
    sa_block b;
    sa_describe_head(p, sequence, row_of(p, sequence), length, t / pieces % heads, &a);
    sa_describe_block(&a, 1, 0, from, p->plan->attend_rows, &rows, &b);
    sa_kernels_for(e->f64)->attention_forward(&b, p->scratch);
}

static void attend_to_own(const sa_pass *p) {
    const sa_layer *l = sa_layer_of(p);
    if (changes_heads(l)) {
        sa_run_phase(p, p->to - p->from, norm_and_rotate, SA_BY_ROWS);
    }
    sa_run_phase(p, (p->to - p->from) * l->heads * pieces_of(p), attend, SA_BY_ANY_THREAD);
}

/* Copies a row of a head to the cache, from element `at` of it on. */
static void put(const sa_transformer *e, const char *row, ptrdiff_t width, char *cache, ptrdiff_t at) {
    char *to = cache + at * (ptrdiff_t)sa_itemsize(cache_dtype(e));
    if (e->cache.narrow && !e->f64) {
        sa_kernels_active()->narrow((const void *)row, width, e->cache.dtype, (void *)to);
    } else {
        memcpy(to, row, (size_t)sa_bytes(e, width));
    }
}

/* For new rows from … end − 1: normalises and rotates the queries and the keys of a key head,
 * and appends its keys and values. */
static void append_rows(const sa_pass *p, ptrdiff_t sequence, ptrdiff_t key_head, ptrdiff_t from, ptrdiff_t end) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t group = l->heads / l->key_heads, row = row_of(p, sequence);
    const ptrdiff_t past = sa_past_of(e, sequence), half = l->rotary.rotated / 2, bytes = sa_bytes(e, l->width);
    const ptrdiff_t to = cache_at(p, sequence) + (key_head * e->cache.capacity + past) * l->width;
    for (ptrdiff_t r = from; r < end; ++r) {
        const ptrdiff_t key = sa_bytes(e, (row + r) * sa_key_width(l)) + key_head * bytes;
        norm_heads(p, OF_QUERIES, (row + r) * l->heads + key_head * group, group);
        norm_heads(p, OF_KEYS, (row + r) * l->key_heads + key_head, 1);
        if (half > 0) {
            const ptrdiff_t angle = sa_bytes(e, (past + r) * half);
            const sa_rotary rotary = {(const char *)l->rotary.cos + angle, (const char *)l->rotary.sin + angle,
                                      l->rotary.rotated, l->rotary.interleaved};
            const ptrdiff_t query = sa_bytes(e, (row + r) * sa_query_width(l)) + key_head * group * bytes;
            kernels->rotate_heads(&rotary, p->f.array[SA_QUERIES] + query, 1, group, l->width, SA_FORWARDS);
            kernels->rotate_heads(&rotary, p->f.array[SA_KEYS] + key, 1, 1, l->width, SA_FORWARDS);
        }
        put(e, p->f.array[SA_KEYS] + key, l->width, e->cache.keys, to + r * l->width);
        put(e, p->f.array[SA_VALUES] + key, l->width, e->cache.values, to + r * l->width);
    }
}

/* A task has SA_APPEND_ROWS rows of a key head. */
static ptrdiff_t append_tasks(const sa_pass *p) {
    return sa_layer_of(p)->key_heads * sa_ceil_div(p->e->longest, SA_APPEND_ROWS);
}

static void append(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t each = append_tasks(p), heads = sa_layer_of(p)->key_heads, sequence = p->from + t / each;
    const ptrdiff_t from = t % each / heads * SA_APPEND_ROWS;
    append_rows(p, sequence, t % heads, from, sa_smaller(from + SA_APPEND_ROWS, sa_length_of(p->e, sequence)));
}

static char *partial_of(const sa_pass *p, ptrdiff_t sequence) {
    return p->partial + (size_t)sequence * p->plan->partial_bytes;
}

static void attend_cached(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t sequence = p->from + t / p->plan->attend_tasks, task = t % p->plan->attend_tasks;
    sa_attention a;
    sa_attention_plan plan;
    describe_sequence(p, sequence, row_of(p, sequence), &a);
    sa_attention_make_plan(&a, 1, &plan);
    plan.far = plan.far || p->plan->far; /* the other layers have been read since this one's keys */
    if (task >= plan.tasks) {
        return;
    }
    if (p->plan->joined) { /* there is a task for each key head */
        append_rows(p, sequence, task, 0, sa_length_of(p->e, sequence));
    }
    sa_held held = {.chunk = -1};
    sa_attention_task(&a, &plan, task, p->scratch, partial_of(p, sequence), &held);
}

static void merge(const sa_pass *p, ptrdiff_t t) {
    const ptrdiff_t sequence = p->from + t / p->plan->merge_tasks, task = t % p->plan->merge_tasks;
    sa_attention a;
    sa_attention_plan plan;
    describe_sequence(p, sequence, row_of(p, sequence), &a);
    sa_attention_make_plan(&a, 1, &plan);
    if (plan.chunks > 1 && task < plan.groups * plan.blocks) {
        sa_attention_merge_task(&a, &plan, task, p->scratch, partial_of(p, sequence));
    }
}

/* Tasks are independent: each appends and attends for rows of a key head or a chunk of its keys.
 * Merges wait for all chunks. */
static void attend_with_cache(const sa_pass *p) {
    const ptrdiff_t sequences = p->to - p->from;
    if (!p->plan->joined) {
        sa_run_phase(p, sequences * append_tasks(p), append, SA_BY_ROWS);
    }
    sa_run_phase(p, sequences * p->plan->attend_tasks, attend_cached, SA_BY_ANY_THREAD);
    if (p->plan->merge_tasks > 0) {
        sa_run_phase(p, sequences * p->plan->merge_tasks, merge, SA_BY_ROWS);
    }
}

static void copy_scaled(const sa_pass *p, ptrdiff_t t) {
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row), at = sa_bytes(p->e, row * p->e->d);
    memcpy(p->f.y + at, p->f.array[SA_SCALED] + at, (size_t)sa_bytes(p->e, rows * p->e->d));
}

static void run_layer(sa_pass *p) {
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t norms = row_tasks(p);
    p->f = sa_frame_of(p);
    if (l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) {
        sa_run_phase(p, norms, norm_before_attention, SA_BY_ROWS);
    }
    multiply(p, SA_PROJECT, SA_BY_ROWS);
    if (p->e->cache.past != NULL) {
        attend_with_cache(p);
    } else {
        attend_to_own(p);
    }
    if (l->weight[SA_OUTPUT] != NULL) {
        multiply(p, SA_PROJECT_OUTPUT, SA_BY_ROWS);
    }
    if (sa_needs_detour(p)) {
        sa_run_phase(p, norms, copy_scaled, SA_BY_ROWS);
    }
    if (!l->norm_first && l->weight[SA_ATTENTION_NORM] != NULL) {
        sa_run_phase(p, norms, norm_after_attention, SA_BY_ROWS);
    }
    if (l->weight[SA_ATTENTION_POST_NORM] != NULL) {
        sa_run_phase(p, norms, post_norm_attention, SA_BY_ROWS);
    }
    if (!sa_has_feed_forward(l)) {
        return;
    }
    if (l->norm_first && l->weight[SA_FEED_FORWARD_NORM] != NULL) {
        sa_run_phase(p, norms, norm_before_feed_forward, SA_BY_ROWS);
    }
    if (l->weight[SA_GATE] != NULL) {
        /* If the next product is cut in the same way, a thread needs only its own gates. */
        const sa_linear gate = sa_product_of(p, SA_PROJECT_GATE, 0, 1), up = sa_product_of(p, SA_PROJECT_UP, 0, 1);
        multiply(p, SA_PROJECT_GATE, sa_linear_digits(&gate) == sa_linear_digits(&up) ? SA_BY_ROWS_AND_ON : SA_BY_ROWS);
    }
    multiply(p, SA_PROJECT_UP, SA_BY_ROWS);
    multiply(p, SA_PROJECT_DOWN, SA_BY_ROWS);
    if (!l->norm_first && l->weight[SA_FEED_FORWARD_NORM] != NULL) {
        sa_run_phase(p, norms, norm_after_feed_forward, SA_BY_ROWS);
    }
    if (l->weight[SA_FEED_FORWARD_POST_NORM] != NULL) {
        sa_run_phase(p, norms, post_norm_feed_forward, SA_BY_ROWS);
    }
}

/* Computes the final norm, to the output if every row is output, else in place. */
static void norm_final(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    ptrdiff_t row;
    const ptrdiff_t rows = task_rows(p, t, &row);
    char *scale, *scaled = sa_outer_scaled(p, SA_FINAL_NORM, &scale), *x = p->f.array[SA_X];
    char *y = e->pooling == SA_EACH_ROW ? p->out + sa_bytes(e, p->origin * e->d) : x;
    add_norm(p, &e->final_norm, row,
             (sa_norm_rows){.rows = rows, .d = e->d, .x = x, .scaled = scaled, .scale = scale, .y = y});
}

/* Writes a sequence's output: its rows, or the row that represents it. */
static void leave(const sa_pass *p, ptrdiff_t t) {
    const sa_transformer *e = p->e;
    const ptrdiff_t sequence = p->from + t, length = sa_length_of(e, sequence);
    const char *x = p->f.array[SA_X] + sa_bytes(e, row_of(p, sequence) * e->d);
    char *to = p->out + sa_bytes(e, (e->pooling == SA_EACH_ROW ? (ptrdiff_t)e->starts[sequence] : sequence) * e->d);
    if (e->pooling == SA_MEAN_ROW) {
        sa_kernels_for(e->f64)->column_sums(x, SA_NO_FACTORS, length, e->d, e->d, 1 / (double)length, to);
        return;
    }
    x += e->pooling == SA_LAST_ROW ? sa_bytes(e, (length - 1) * e->d) : 0;
    memcpy(to, x, (size_t)sa_bytes(e, (e->pooling == SA_EACH_ROW ? length : 1) * e->d));
}

static void run_share(sa_pass p) {
    const ptrdiff_t sequences = p.to - p.from;
    p.layer = 0;
    p.f = sa_frame_of(&p);
    sa_run_phase(&p, sequences, enter, SA_BY_ROWS);
    for (; p.layer < p.e->layers; ++p.layer) {
        run_layer(&p);
    }
    p.f = sa_frame_of(&p); /* this frame's x is the last layer's output */
    if (p.e->final_norm.weight != NULL) {
        sa_run_phase(&p, row_tasks(&p), norm_final, SA_BY_ROWS);
    }
    if (p.e->pooling != SA_EACH_ROW || p.e->final_norm.weight == NULL) {
        sa_run_phase(&p, sequences, leave, SA_BY_ROWS);
    }
}

/* ---- the call ---------------------------------------------------------------------------------------------------- */

/* The first sequence that begins at `token` or later. */
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

/* Iterations are independent: a share writes only its own sequences. */
static void run_share_number(void *call, ptrdiff_t number) {
    sa_pass p = *(const sa_pass *)call;
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
        p.origin = sa_start_of(p.e, p.from);
        p.scratch += p.plan->layout.bytes;
    }
    run_share(p);
}

static void run(void *call, int thread, int team) {
    sa_pass p = *(const sa_pass *)call;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    if (p.plan->by_shares) {
        sa_take_tasks(team, p.plan->shares, run_share_number, &p);
    } else {
        run_share(p);
    }
}

void sa_transformer_forward(const sa_transformer *e, const sa_transformer_plan *plan, void *out, void *saved,
                            void *scratch) {
    if (e->sequences == 0) {
        return;
    }
    sa_pass all = {.e = e,
                   .plan = plan,
                   .out = out,
                   .to = e->sequences,
                   .frames = plan->keep ? saved : scratch,
                   .capacity = e->tokens,
                   .partial = (char *)scratch + plan->shared_bytes - (size_t)e->sequences * plan->partial_bytes,
                   .scratch = (char *)scratch + plan->shared_bytes};
    sa_run_team(plan->threads, run, &all);
}
