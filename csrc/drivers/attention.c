/* Driver of attention's forward pass: cuts a call into tasks and runs them. block.c describes blocks. */
#include <string.h>

#include "drivers/attention.h"
#include "runtime/team.h"

/* Keys are split into chunks of this many or more until there are enough tasks, of twice as many until there are many. */
#define SA_LEAST_CHUNK 1024
#define SA_ENOUGH_TASKS 16
#define SA_MANY_TASKS 64

#define SA_MANY_NUMBERS ((ptrdiff_t)1 << 20)

ptrdiff_t sa_group_size(const sa_attention *a) {
    ptrdiff_t group = a->gqa;
    int axis = a->n_lead - 1;
    if (axis >= 0 && a->gqa > 1) {
        if (a->gqa != a->lead[axis]) {
            return group;
        }
        --axis;
    }
    for (; axis >= 0 && a->key.lead_stride[axis] == 0 && a->value.lead_stride[axis] == 0; --axis) {
        group *= a->lead[axis];
    }
    return group;
}

bool sa_count_rows(const sa_attention *a, size_t *heads, size_t *rows) {
    if (a->L > SA_MAX_LENGTH || a->S > SA_MAX_LENGTH || a->E > SA_MAX_WIDTH || a->Dv > SA_MAX_WIDTH) {
        return false;
    }
    *heads = 1;
    for (int axis = 0; axis < a->n_lead; ++axis) {
        if (!sa_multiply(*heads, (size_t)a->lead[axis], heads)) {
            return false;
        }
    }
    return sa_multiply(*heads, (size_t)a->L, rows) && *rows <= PTRDIFF_MAX / 64;
}

bool sa_is_large(const sa_attention *a, ptrdiff_t rows) {
    return rows >= SA_MANY_NUMBERS / (a->E + a->Dv + 1); /* the sum may be 0 */
}

static size_t key_bytes(const sa_attention *a) {
    return (size_t)a->E * sa_itemsize(a->key.m.dtype) + (size_t)a->Dv * sa_itemsize(a->value.m.dtype);
}

static ptrdiff_t partial_rows(const sa_attention_plan *plan) { return sa_smaller(plan->rows, plan->block_rows); }
static size_t partial_bytes(const sa_attention *a, const sa_attention_plan *plan) {
    return sa_kernels_for(a->f64)->attention_partial(a, partial_rows(plan));
}

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    size_t heads, rows, tasks;
    if (!sa_count_rows(a, &heads, &rows)) {
        return SA_TOO_LARGE;
    }
    plan->group = plan->groups = plan->rows = plan->blocks = plan->tasks = 0; /* clearing the whole struct is slower */
    plan->block_rows = kernels->block_rows;
    plan->chunks = plan->threads = 1;
    plan->large = plan->far = false;
    plan->chunk_keys = a->S;
    plan->scratch_bytes = plan->partial_bytes = 0;
    const bool no_weights = a->weights.m.data == NULL || a->S == 0;
    if (rows == 0 || (a->Dv == 0 && a->lse.m.data == NULL && a->stats.m.data == NULL && no_weights)) {
        return SA_OK; /* rows without outputs may be too many to walk over */
    }
    plan->group = sa_group_size(a);
    plan->groups = plan->group == 1 ? (ptrdiff_t)heads : (ptrdiff_t)heads / plan->group;
    plan->large = sa_is_large(a, (ptrdiff_t)rows);
    plan->far = (double)plan->groups * (double)a->S * (double)key_bytes(a) >= SA_FAR_BYTES;
    plan->rows = plan->group * a->L;
    plan->blocks = plan->rows <= plan->block_rows ? 1 : sa_ceil_div(plan->rows, plan->block_rows);
    const ptrdiff_t whole = plan->groups * plan->blocks;
    if (whole < SA_MANY_TASKS && a->S >= 2 * SA_LEAST_CHUNK) {
        const ptrdiff_t enough = sa_smaller(a->S / SA_LEAST_CHUNK, sa_ceil_div(SA_ENOUGH_TASKS, whole));
        const ptrdiff_t many = sa_smaller(a->S / (2 * SA_LEAST_CHUNK), sa_ceil_div(SA_MANY_TASKS, whole));
        plan->chunk_keys = sa_ceil_div(sa_ceil_div(a->S, sa_larger(enough, many)), SA_KEYS_PER_TILE) * SA_KEYS_PER_TILE;
        plan->chunks = sa_ceil_div(a->S, plan->chunk_keys);
    }
    if (!sa_multiply((size_t)whole, (size_t)plan->chunks, &tasks)) {
        return SA_TOO_LARGE;
    }
    plan->tasks = (ptrdiff_t)tasks;
    plan->scratch_bytes = sa_whole_lines(kernels->attention_scratch(a)) + SA_CACHE_LINE;
    if (plan->chunks > 1 && !sa_multiply(tasks, partial_bytes(a, plan) + sizeof(ptrdiff_t), &plan->partial_bytes)) {
        return SA_TOO_LARGE;
    }
    const double work = (double)rows * (double)a->S * (double)(a->E + a->Dv + 16) * sa_open_share(a);
    plan->threads = sa_threads_for(work, SA_WORK_PER_THREAD, (double)tasks, max_threads);
    return SA_OK;
}

double sa_open_share(const sa_attention *a) {
    double share = 1;
    for (int m = 0; m < a->block_mask_count; ++m) {
        share = a->block_masks[m].share < share ? a->block_masks[m].share : share;
    }
    return share;
}

static const char *query_of(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t r) {
    return a->query.m.data + sa_lead_offset(a, &a->query, group * G + r % G, 1) + r / G * a->query.m.row_stride;
}

static void look_ahead(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, sa_block *b) {
    if (!plan->large || plan->chunks > 1 || t + 1 >= plan->tasks) {
        return;
    }
    ptrdiff_t here, next;
    const ptrdiff_t G = plan->group, last = plan->blocks - 1, most = plan->block_rows;
    const ptrdiff_t group = sa_divide(t, plan->blocks, &here), next_group = sa_divide(t + 1, plan->blocks, &next);
    b->ahead = (ptrdiff_t)((uintptr_t)query_of(a, G, next_group, (last - next) * most) -
                           (uintptr_t)query_of(a, G, group, (last - here) * most));
    if (next_group != group) {
        b->keys_ahead = sa_lead_offset(a, &a->key, next_group * G, a->gqa) - sa_lead_offset(a, &a->key, group * G, a->gqa);
    }
}

/* Groups are outermost, as threads then share a head's keys. The last rows come first: if causal, they see most keys. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    ptrdiff_t chunk, block;
    const ptrdiff_t group = sa_divide(sa_divide(t, plan->chunks, &chunk), plan->blocks, &block), most = plan->block_rows;
    const ptrdiff_t first = (plan->blocks - 1 - block) * most, end = sa_smaller(first + most, plan->rows);
    const ptrdiff_t keys = group * plan->chunks + chunk;
    sa_stretches *stretches = &held->stretches;
    if (held->keys != keys) {
        *stretches = plan->chunks == 1 ? sa_find_stretches(a, plan->group, group) : (sa_stretches){.mask = NULL};
        held->keys = keys;
        held->from = -1;
    }
    for (ptrdiff_t key, from = first; (from = sa_block_begin(stretches, from, most, plan->rows, &key)) < end;) {
        sa_rows rows;
        sa_block b;
        const ptrdiff_t to = sa_block_end(stretches, from, sa_smaller(from + most, plan->rows));
        sa_describe_block(a, plan->group, group, from, to - from, &rows, &b);
        b.cache_from = plan->chunks > 1 ? chunk * plan->chunk_keys : sa_smaller(sa_tiles_from(a, key), b.begin);
        b.cache_holds = held->from == b.cache_from;
        held->from = b.cache_from;
        b.fetches = plan->large && !b.cache_holds;
        b.far = plan->far;
        look_ahead(a, plan, t, &b);
        if (plan->chunks > 1) {
            b.begin = sa_larger(b.begin, chunk * plan->chunk_keys);
            b.end = sa_smaller(b.end, (chunk + 1) * plan->chunk_keys);
            b.first_chunk = chunk == 0;
            b.partial_rows = partial_rows(plan);
            b.partial = partial + (size_t)t * partial_bytes(a, plan);
        }
        kernels->attention_forward(&b, scratch);
        from = to;
    }
}

void sa_attention_merge_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch,
                             const char *partial) {
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    sa_rows rows;
    sa_block b;
    const ptrdiff_t block = plan->blocks - 1 - t % plan->blocks;
    sa_describe_block(a, plan->group, t / plan->blocks, block * plan->block_rows, plan->block_rows, &rows, &b);
    b.partial_rows = partial_rows(plan);
    kernels->attention_merge(&b, partial + (size_t)(t * plan->chunks) * partial_bytes(a, plan), plan->chunks, scratch);
}

typedef struct {
    const sa_attention *a;
    const sa_attention_plan *plan;
    char *scratch, *partial;
} forward_run;

/* Tasks taken of a thread's share, on a cache line after its scratch. */
static ptrdiff_t *tasks_taken(const forward_run *run, int thread) {
    return (ptrdiff_t *)(void *)(run->scratch + (size_t)(thread + 1) * run->plan->scratch_bytes - SA_CACHE_LINE);
}

/* The next task for a thread, or plan->tasks: first of its own share, whose copied keys it reuses, then of others'. */
static ptrdiff_t take_task(const forward_run *run, int thread, int team) {
    sa_let_others_take();
    for (int i = 0; i < team; ++i) {
        const int owner = (thread + i) % team;
        const sa_share share = sa_share_of(run->plan->tasks, owner, team);
        ptrdiff_t *taken = tasks_taken(run, owner);
        if (share.from + __atomic_load_n(taken, __ATOMIC_RELAXED) < share.end) {
            const ptrdiff_t t = share.from + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (t < share.end) {
                return t;
            }
        }
    }
    return run->plan->tasks;
}

/* Chunks of each block that have ended; stored after the partial results. */
static ptrdiff_t *chunks_ended(const sa_attention *a, const sa_attention_plan *plan, char *partial) {
    return (ptrdiff_t *)(void *)(partial + (size_t)plan->tasks * partial_bytes(a, plan));
}

/* Who ends the last chunk of a block merges them in order: nobody waits. */
static void run_task(const forward_run *run, ptrdiff_t t, char *scratch, sa_held *held) {
    const sa_attention_plan *plan = run->plan;
    if (sa_cancelled(run->a)) {
        return;
    }
    sa_attention_task(run->a, plan, t, scratch, run->partial, held);
    if (plan->chunks > 1) {
        const ptrdiff_t block = t / plan->chunks;
        if (__atomic_add_fetch(&chunks_ended(run->a, plan, run->partial)[block], 1, __ATOMIC_ACQ_REL) == plan->chunks) {
            sa_attention_merge_task(run->a, plan, block, scratch, run->partial);
            held->keys = -1; /* the scratch had other uses */
        }
    }
}

/* Independent: a task writes its own rows or partial result; a merge begins when all it reads has ended. */
static void run_tasks(void *call, int thread, int team) {
    const forward_run *run = call;
    char *scratch = run->scratch + (size_t)thread * run->plan->scratch_bytes;
    sa_held held = {.keys = -1};
    if (team == 1) { /* spares a tiny call the atomics */
        for (ptrdiff_t t = 0; t < run->plan->tasks; ++t) {
            run_task(run, t, scratch, &held);
        }
        return;
    }
    for (ptrdiff_t t; (t = take_task(run, thread, team)) < run->plan->tasks;) {
        run_task(run, t, scratch, &held);
    }
}

sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial) {
    forward_run run = {a, plan, scratch, partial};
    if (plan->chunks > 1) {
        memset(chunks_ended(a, plan, partial), 0, (size_t)(plan->tasks / plan->chunks) * sizeof(ptrdiff_t));
    }
    if (plan->tasks > 0) { /* else there is no scratch */
        for (int thread = 0; thread < plan->threads && plan->threads > 1; ++thread) {
            *tasks_taken(&run, thread) = 0;
        }
        sa_run_team(plan->threads, run_tasks, &run);
    }
    return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
}
