/* The transformer's attention with a cache: new keys and values are appended, and attention goes over all of a sequence's, as
 * in an ordinary call (attention.c). How that is cut depends on the sequence alone, and so do its bits. */
#include <string.h>

#include "drivers/transformer_tasks.h"

/* ---- a sequence ---------------------------------------------------------------------------------------------------------- */

static ptrdiff_t length_of(const sa_transformer *e, ptrdiff_t sequence) {
    return (ptrdiff_t)(e->starts[sequence + 1] - e->starts[sequence]);
}

/* Elements before a sequence's keys of a layer, or its values. */
static ptrdiff_t cache_at(const sa_token_share *p, ptrdiff_t sequence) {
    return (p->layer * p->e->sequences + sequence) * p->e->cache.capacity * sa_keys_of(sa_layer_of(p));
}

/* data may be NULL while a call is cut. */
static sa_tensor heads_tensor(const sa_transformer *e, char *data, ptrdiff_t at, ptrdiff_t row, ptrdiff_t group,
                              ptrdiff_t head) {
    return (sa_tensor){
        .m = {data == NULL ? NULL : data + sa_bytes(e, at), sa_bytes(e, row), sa_bytes(e, 1), e->f64 ? SA_F64 : SA_F32, false},
        .lead_stride = {sa_bytes(e, group), sa_bytes(e, head)}};
}

/* Attention of a sequence's new rows, from row `row` of the frame on: (key heads, heads of each). */
static void describe_sequence(const sa_token_share *p, ptrdiff_t sequence, ptrdiff_t row, sa_attention *a) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const ptrdiff_t group = l->heads / l->key_heads, queries = sa_queries_of(l), past = sa_past_of(e, sequence);
    const ptrdiff_t at = cache_at(p, sequence), of_head = e->cache.capacity * l->width;
    *a = (sa_attention){.L = length_of(e, sequence),
                        .S = past + length_of(e, sequence),
                        .E = l->width,
                        .Dv = l->width,
                        .n_lead = 2,
                        .lead = {l->key_heads, group},
                        .gqa = 1,
                        .f64 = e->f64,
                        .query = heads_tensor(e, p->f.array[SA_QUERIES], row * queries, queries, group * l->width, l->width),
                        .out = heads_tensor(e, p->f.array[SA_ATTENDED], row * queries, queries, group * l->width, l->width),
                        .key = heads_tensor(e, e->cache.keys, at, l->width, of_head, 0),
                        .value = heads_tensor(e, e->cache.values, at, l->width, of_head, 0),
                        .scale = l->scale,
                        .softcap = l->softcap,
                        .causal = true,
                        .diagonal = past,
                        .window_left = l->window_left,
                        .window_right = l->window_right};
}

/* ---- how attention is cut ------------------------------------------------------------------------------------------------ */

static bool are_alike(const sa_layer *a, const sa_layer *b) {
    return a->heads == b->heads && a->key_heads == b->key_heads && a->width == b->width;
}

/* Sizes are those of all layers and sequences. Returns a thread's scratch. */
size_t sa_plan_cache(const sa_transformer *e, sa_transformer_plan *plan) {
    sa_token_share p = {.e = e, .plan = plan};
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
            sa_attention_make_plan(&a, 1, &own); /* fits, as the transformer does */
            const ptrdiff_t merges = own.chunks > 1 ? own.groups * own.blocks : 0;
            plan->attend_tasks = sa_larger(plan->attend_tasks, own.tasks);
            plan->merge_tasks = sa_larger(plan->merge_tasks, merges);
            plan->joined = plan->joined && own.tasks == l->key_heads;
            const size_t partial = sa_whole_lines(own.partial_bytes);
            plan->partial_bytes = partial > plan->partial_bytes ? partial : plan->partial_bytes;
            scratch = own.scratch_bytes > scratch ? own.scratch_bytes : scratch;
        }
    }
    return sa_whole_lines(scratch);
}

/* ---- tasks --------------------------------------------------------------------------------------------------------------- */

/* Turns the queries and the keys of a key head, and appends its keys and values. */
static void append_head(const sa_token_share *p, ptrdiff_t sequence, ptrdiff_t key_head) {
    const sa_transformer *e = p->e;
    const sa_layer *l = sa_layer_of(p);
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    const ptrdiff_t group = l->heads / l->key_heads, row = (ptrdiff_t)e->starts[sequence] - p->origin;
    const ptrdiff_t past = sa_past_of(e, sequence), half = l->rotary.rotated / 2, bytes = sa_bytes(e, l->width);
    const ptrdiff_t to = sa_bytes(e, cache_at(p, sequence)) + (key_head * e->cache.capacity + past) * bytes;
    for (ptrdiff_t r = 0; r < length_of(e, sequence); ++r) {
        const ptrdiff_t key = sa_bytes(e, (row + r) * sa_keys_of(l)) + key_head * bytes;
        if (half > 0) {
            const ptrdiff_t angle = sa_bytes(e, (past + r) * half);
            const sa_rotary turn = {(const char *)l->rotary.cos + angle, (const char *)l->rotary.sin + angle, l->rotary.rotated,
                                    l->rotary.interleaved};
            const ptrdiff_t query = sa_bytes(e, (row + r) * sa_queries_of(l)) + key_head * group * bytes;
            kernels->rotate_heads(&turn, p->f.array[SA_QUERIES] + query, 1, group, l->width, false);
            kernels->rotate_heads(&turn, p->f.array[SA_KEYS] + key, 1, 1, l->width, false);
        }
        memcpy(e->cache.keys + to + r * bytes, p->f.array[SA_KEYS] + key, (size_t)bytes);
        memcpy(e->cache.values + to + r * bytes, p->f.array[SA_VALUES] + key, (size_t)bytes);
    }
}

static void append(const sa_token_share *p, ptrdiff_t t) {
    const ptrdiff_t heads = sa_layer_of(p)->key_heads;
    append_head(p, p->from + t / heads, t % heads);
}

static char *partial_of(const sa_token_share *p, ptrdiff_t sequence) {
    return p->partial + (size_t)sequence * p->plan->partial_bytes;
}

static ptrdiff_t row_of(const sa_token_share *p, ptrdiff_t sequence) { return (ptrdiff_t)p->e->starts[sequence] - p->origin; }

static void attend(const sa_token_share *p, ptrdiff_t t) {
    const ptrdiff_t sequence = p->from + t / p->plan->attend_tasks, task = t % p->plan->attend_tasks;
    sa_attention a;
    sa_attention_plan plan;
    describe_sequence(p, sequence, row_of(p, sequence), &a);
    sa_attention_make_plan(&a, 1, &plan);
    if (task >= plan.tasks) {
        return;
    }
    if (p->plan->joined) { /* a task for each key head */
        append_head(p, sequence, task);
    }
    sa_held held = {.keys = -1};
    sa_attention_task(&a, &plan, task, p->scratch, partial_of(p, sequence), &held);
}

static void merge(const sa_token_share *p, ptrdiff_t t) {
    const ptrdiff_t sequence = p->from + t / p->plan->merge_tasks, task = t % p->plan->merge_tasks;
    sa_attention a;
    sa_attention_plan plan;
    describe_sequence(p, sequence, row_of(p, sequence), &a);
    sa_attention_make_plan(&a, 1, &plan);
    if (plan.chunks > 1 && task < plan.groups * plan.blocks) {
        sa_attention_merge_task(&a, &plan, task, p->scratch, partial_of(p, sequence));
    }
}

/* Independent: tasks append and attend for rows of a key head, or for a chunk of its keys; merges wait for all chunks. */
void sa_attend_with_cache(const sa_token_share *p) {
    const ptrdiff_t sequences = p->to - p->from;
    if (!p->plan->joined) {
        sa_run_phase(p, sequences * sa_layer_of(p)->key_heads, append, SA_BY_ROWS);
    }
    sa_run_phase(p, sequences * p->plan->attend_tasks, attend, SA_BY_TURNS);
    if (p->plan->merge_tasks > 0) {
        sa_run_phase(p, sequences * p->plan->merge_tasks, merge, SA_BY_ROWS);
    }
}
