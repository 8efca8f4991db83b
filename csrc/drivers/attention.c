/* Driver of the attention forward pass: how a call is cut into tasks, the descriptors of a block's rows, and the parallel
 * loop. Arithmetic is left to the kernels, memory and checks to the caller. */
#if defined(_OPENMP)
#include <omp.h>
#endif
#include <math.h>
#include <string.h>

#include "drivers/attention.h"
#include "runtime/threads.h"

/* Keys are split into chunks where there are few tasks: up to so many as long as every chunk keeps 1024 keys, and up to four times as
 * many, for more cores than today's, as long as it keeps 2048. A chunk of decoding costs 0.3 us, of eight heads with 8192 keys in
 * bfloat16 2 to 4 % less with 2048 keys a chunk than with 1024. */
#define SA_ENOUGH_TASKS 16
#define SA_LEAST_CHUNK 1024
#define SA_MANY_TASKS (4 * SA_ENOUGH_TASKS)

/* Behind each thread's scratch lies how many tasks of its share are taken: a cache line of its own. */
#define SA_TAKEN_BYTES 64

/* From so many elements of queries and outputs on, of any size, a call is larger than the caches of its cores. Fetching ahead costs 2
 * to 3 % of one of 8×128×64 and 1 to 2 % of one of 8×512×64; it saves 2 % of one of 8×1024×64. */
#define SA_MANY_NUMBERS ((ptrdiff_t)1 << 20)

/* Bytes of keys and values, or of a mask, that come from memory, not from an L3 of 32 MB. */
#define SA_FAR_BYTES 24e6

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

bool sa_multiply(size_t a, size_t b, size_t *product) { return !__builtin_mul_overflow(a, b, product); }

size_t sa_itemsize(sa_dtype dtype) {
    static const size_t sizes[SA_DTYPES] = {2, 2, 4, 8, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    return sizes[dtype];
}

const sa_real_kernels *sa_kernels_of(const sa_attention *a) {
    const sa_kernels *k = sa_kernels_active();
    return a->f64 ? &k->f64 : &k->f32;
}

ptrdiff_t sa_lead_offset(const sa_attention *a, const sa_tensor *t, ptrdiff_t head, ptrdiff_t gqa) {
    ptrdiff_t offset = 0;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        ptrdiff_t index = head % a->lead[axis];
        head /= a->lead[axis];
        if (axis == a->n_lead - 1) {
            index /= gqa;
        }
        offset += index * t->lead_stride[axis];
    }
    return offset;
}

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
    return rows >= SA_MANY_NUMBERS / (a->E + a->Dv + 1); /* widths may be 0 */
}

static size_t key_bytes(const sa_attention *a) {
    return (size_t)a->E * sa_itemsize(a->key.m.dtype) + (size_t)a->Dv * sa_itemsize(a->value.m.dtype);
}

/* What a task's partial result has room for. */
static ptrdiff_t partial_rows(const sa_attention_plan *plan) { return smaller(plan->rows, plan->block_rows); }
static size_t partial_bytes(const sa_attention *a, const sa_attention_plan *plan) {
    return sa_kernels_of(a)->attention_partial(a, partial_rows(plan));
}

sa_status sa_attention_make_plan(const sa_attention *a, int max_threads, sa_attention_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_of(a);
    size_t heads, rows, tasks;
    if (!sa_count_rows(a, &heads, &rows)) {
        return SA_TOO_LARGE;
    }
    plan->group = plan->groups = plan->rows = plan->blocks = plan->tasks = 0; /* GCC clears a whole struct far more slowly */
    plan->block_rows = kernels->block_rows;
    plan->chunks = plan->threads = 1;
    plan->large = plan->far = false;
    plan->chunk_keys = a->S;
    plan->scratch_bytes = plan->partial_bytes = 0;
    const bool no_weights = a->weights.m.data == NULL || a->S == 0;
    if (rows == 0 || (a->Dv == 0 && a->lse.m.data == NULL && a->stats.m.data == NULL && no_weights)) {
        return SA_OK; /* no output has an element; the rows may be far too many to be walked over */
    }
    plan->group = sa_group_size(a);
    plan->groups = plan->group == 1 ? (ptrdiff_t)heads : (ptrdiff_t)heads / plan->group;
    plan->large = sa_is_large(a, (ptrdiff_t)rows);
    plan->far = (double)plan->groups * (double)a->S * (double)key_bytes(a) >= SA_FAR_BYTES;
    plan->rows = plan->group * a->L;
    plan->blocks = plan->rows <= plan->block_rows ? 1 : sa_ceil_div(plan->rows, plan->block_rows);
    const ptrdiff_t whole = plan->groups * plan->blocks;
    if (whole < SA_MANY_TASKS && a->S >= 2 * SA_LEAST_CHUNK) {
        const ptrdiff_t enough = smaller(a->S / SA_LEAST_CHUNK, sa_ceil_div(SA_ENOUGH_TASKS, whole));
        const ptrdiff_t many = smaller(a->S / (2 * SA_LEAST_CHUNK), sa_ceil_div(SA_MANY_TASKS, whole));
        const ptrdiff_t chunks = enough > many ? enough : many;
        plan->chunk_keys = sa_ceil_div(sa_ceil_div(a->S, chunks), SA_KEYS_PER_TILE) * SA_KEYS_PER_TILE;
        plan->chunks = sa_ceil_div(a->S, plan->chunk_keys);
    }
    if (!sa_multiply((size_t)whole, (size_t)plan->chunks, &tasks)) {
        return SA_TOO_LARGE;
    }
    plan->tasks = (ptrdiff_t)tasks;
    plan->scratch_bytes = (kernels->attention_scratch(a) + 63) / 64 * 64 + SA_TAKEN_BYTES;
    if (plan->chunks > 1 && !sa_multiply(tasks, partial_bytes(a, plan) + sizeof(ptrdiff_t), &plan->partial_bytes)) {
        return SA_TOO_LARGE;
    }
    const double work = (double)rows * (double)a->S * (double)(a->E + a->Dv + 16) * sa_open_share(a);
    if (work < SA_WORK_PER_THREAD) {
        return SA_OK;
    }
    double threads = work / SA_WORK_PER_THREAD;
    threads = threads < (double)tasks ? threads : (double)tasks;
    plan->threads = threads < max_threads ? (int)threads : max_threads;
    return SA_OK;
}

/* The open keys of the query that stands on key `at`: causal, window and length in one interval. */
static void open_keys(const sa_attention *a, ptrdiff_t at, ptrdiff_t length, ptrdiff_t *lo, ptrdiff_t *hi) {
    *lo = 0;
    *hi = length;
    if (a->causal && at + 1 < *hi) {
        *hi = at + 1;
    }
    if (a->window_left != SA_UNBOUNDED && at - a->window_left > 0) {
        *lo = at - a->window_left;
    }
    if (a->window_right != SA_UNBOUNDED && at + a->window_right + 1 < *hi) {
        *hi = at + a->window_right + 1;
    }
    if (*hi < *lo || *hi <= 0 || *lo >= length) {
        *lo = *hi = 0;
    }
}

/* What the block masks leave open of row r, which is row i of its head: narrows lo and hi to their hull, and notes the runs
 * where those have gaps. offset: of each mask's array for the head. */
static void narrow(const sa_attention *a, const ptrdiff_t *offset, ptrdiff_t i, sa_rows *rows, int r) {
    int lists = 0;
    for (int m = 0; m < a->block_mask_count; ++m) {
        const sa_block_mask *mask = &a->block_masks[m];
        int64_t from = 0, to;
        if (mask->prefix.m.data) {
            const int64_t prefix = *(const int64_t *)(const void *)(mask->prefix.m.data + offset[m]);
            to = i + mask->diagonal + 1 > prefix ? i + mask->diagonal + 1 : prefix;
        } else {
            const char *class = mask->classes.m.data + offset[m] + i / mask->class_rows * mask->classes.m.row_stride;
            const int64_t *start = mask->starts + *(const int64_t *)(const void *)class;
            const sa_run *runs = mask->runs + start[0], *end = mask->runs + start[1];
            from = runs < end ? runs[0].lo : 0;
            to = runs < end ? end[-1].hi : 0;
            if (mask->gaps) {
                rows->runs[lists][r] = runs;
                rows->runs_end[lists++][r] = end;
            }
        }
        rows->lo[r] = from > rows->lo[r] ? from : rows->lo[r];
        rows->hi[r] = to < rows->hi[r] ? to : rows->hi[r];
    }
    rows->gaps = lists;
    if (rows->lo[r] >= rows->hi[r]) {
        rows->lo[r] = rows->hi[r] = 0;
    }
}

double sa_open_share(const sa_attention *a) {
    double share = 1;
    for (int m = 0; m < a->block_mask_count; ++m) {
        share = a->block_masks[m].share < share ? a->block_masks[m].share : share;
    }
    return share;
}

ptrdiff_t sa_tiles_from(const sa_attention *a, ptrdiff_t key) { return a->dropout_p > 0 ? key / 4 * 4 : key; }

static ptrdiff_t key_length(const sa_attention *a, ptrdiff_t head) {
    if (!a->key_lengths.m.data) {
        return a->S;
    }
    return (ptrdiff_t)*(const int64_t *)(const void *)(a->key_lengths.m.data + sa_lead_offset(a, &a->key_lengths, head, 1));
}

/* Whether the mask's elements, each counted once, come from memory: only then it pays to fetch them. On a Zen 5 a mask of (L, S)
 * with 1024 keys takes 1 to 4 % of a call less without; one of each of 8 heads, 32 MB, 11 to 17 % more. */
static bool is_mask_far(const sa_attention *a) {
    const sa_tensor *mask = &a->mask;
    double elements = (mask->m.row_stride == 0 ? 1.0 : (double)a->L) * (mask->m.col_stride == 0 ? 1.0 : (double)a->S);
    for (int axis = 0; axis < a->n_lead; ++axis) {
        elements *= mask->lead_stride[axis] == 0 ? 1.0 : (double)a->lead[axis];
    }
    return elements * (double)sa_itemsize(mask->m.dtype) >= SA_FAR_BYTES;
}

void sa_describe_block(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most, sa_rows *rows,
                       sa_block *b) {
    const ptrdiff_t left = G * a->L - from;
    const int count = (int)(left < most ? left : most);
    const bool has_options = a->mask.m.data || a->lse.m.data || a->weights.m.data || a->stats.m.data || a->alibi.m.data ||
                             a->sinks.m.data || a->dropout_p > 0;
    rows->count = count;
    rows->gaps = 0;
    ptrdiff_t begin = PTRDIFF_MAX, end = 0, open_from = 0, open_to = PTRDIFF_MAX;
    for (int first = 0; first < count && first < G; ++first) {
        ptrdiff_t head, i = sa_divide(from + first, G, &head);
        head += group * G;
        const char *q = a->query.m.data + sa_lead_offset(a, &a->query, head, 1);
        const char *mask = a->mask.m.data ? a->mask.m.data + sa_lead_offset(a, &a->mask, head, 1) : NULL;
        char *out = a->out.m.data + sa_lead_offset(a, &a->out, head, 1);
        char *lse = a->lse.m.data ? a->lse.m.data + sa_lead_offset(a, &a->lse, head, 1) : NULL;
        char *weights = a->weights.m.data ? a->weights.m.data + sa_lead_offset(a, &a->weights, head, 1) : NULL;
        char *stats = a->stats.m.data ? a->stats.m.data + sa_lead_offset(a, &a->stats, head, 1) : NULL;
        const double slope =
            a->alibi.m.data ? *(const double *)(const void *)(a->alibi.m.data + sa_lead_offset(a, &a->alibi, head, 1)) : 0;
        const double sink =
            a->sinks.m.data ? *(const double *)(const void *)(a->sinks.m.data + sa_lead_offset(a, &a->sinks, head, 1)) : 0;
        const ptrdiff_t length = key_length(a, head);
        ptrdiff_t queries = a->L, diagonal = a->diagonal;
        if (a->query_lengths.m.data) {
            queries = (ptrdiff_t)*(const int64_t *)(const void *)(a->query_lengths.m.data +
                                                                  sa_lead_offset(a, &a->query_lengths, head, 1));
            diagonal = length - queries;
        }
        ptrdiff_t offset[SA_MAX_BLOCK_MASKS];
        for (int m = 0; m < a->block_mask_count; ++m) {
            const sa_block_mask *block_mask = &a->block_masks[m];
            offset[m] = sa_lead_offset(a, block_mask->prefix.m.data ? &block_mask->prefix : &block_mask->classes, head, 1);
        }
        for (ptrdiff_t r = first; r < count; r += G, ++i) {
            rows->query[r] = q + i * a->query.m.row_stride;
            rows->out[r] = out + i * a->out.m.row_stride;
            if (has_options) { /* as many stores as all the rest */
                rows->mask[r] = mask ? mask + i * a->mask.m.row_stride : NULL;
                rows->lse[r] = lse ? lse + i * a->lse.m.row_stride : NULL;
                rows->weights[r] = weights ? weights + i * a->weights.m.row_stride : NULL;
                rows->stats[r] = stats ? stats + i * a->stats.m.row_stride : NULL;
                rows->head[r] = (uint64_t)(a->first_head + head);
                rows->slope[r] = slope;
                rows->sink[r] = sink;
            }
            rows->index[r] = i;
            rows->position[r] = i + diagonal;
            open_keys(a, i + diagonal, i < queries ? length : 0, &rows->lo[r], &rows->hi[r]);
            if (a->block_mask_count > 0) {
                narrow(a, offset, i, rows, (int)r);
            }
            if (rows->lo[r] < rows->hi[r]) {
                begin = rows->lo[r] < begin ? rows->lo[r] : begin;
                end = rows->hi[r] > end ? rows->hi[r] : end;
            }
            open_from = rows->lo[r] > open_from ? rows->lo[r] : open_from;
            open_to = rows->hi[r] < open_to ? rows->hi[r] : open_to;
        }
    }
    begin = begin >= end ? end : rows->gaps > 0 ? begin / 4 * 4 : sa_tiles_from(a, begin);
    rows->open_from = open_from;
    rows->open_to = open_to;
    rows->clipped = rows->gaps > 0 || open_from > begin || open_to < end;
    b->a = a; /* field by field: GCC clears a whole struct far more slowly */
    b->rows = rows;
    b->key = a->key.m;
    b->value = a->value.m;
    b->begin = begin;
    b->end = b->open_end = end;
    b->keys = a->S;
    if (a->key_lengths.m.data) {
        b->keys = 0;
        for (ptrdiff_t g = 0; g < G; ++g) { /* of all heads of the group: blocks share what they pack of its keys */
            const ptrdiff_t length = key_length(a, group * G + g);
            b->keys = length > b->keys ? length : b->keys;
        }
    }
    b->cache_from = b->ahead = b->keys_ahead = 0;
    b->cache_holds = b->fetches = b->far = false;
    b->mask_far = a->mask.m.data && is_mask_far(a);
    b->whole = count == G * a->L;
    b->first_chunk = true;
    b->partial = NULL;
    b->key.data += sa_lead_offset(a, &a->key, group * G, a->gqa);
    b->value.data += sa_lead_offset(a, &a->value, group * G, a->gqa);
}

/* Of the rows that share entry `at` of a mask's classes. */
static int64_t class_of(const sa_stretches *s, ptrdiff_t at) {
    return *(const int64_t *)(const void *)(s->classes + at * s->mask->classes.m.row_stride);
}

static sa_run keys_of(const sa_stretches *s, ptrdiff_t at) {
    const int64_t *start = s->mask->starts + class_of(s, at);
    return start[0] < start[1] ? s->mask->runs[start[0]] : (sa_run){0, 0};
}

/* Whether a stretch goes on from entry at − 1 to entry `at`. */
static bool goes_on(const sa_stretches *s, ptrdiff_t at) {
    if (class_of(s, at - 1) == class_of(s, at)) {
        return true;
    }
    const sa_run before = keys_of(s, at - 1), here = keys_of(s, at);
    return before.lo < here.hi && here.lo < before.hi;
}

sa_stretches sa_find_stretches(const sa_attention *a, ptrdiff_t G, ptrdiff_t group) {
    for (int m = 0; m < a->block_mask_count; ++m) {
        const sa_block_mask *mask = &a->block_masks[m];
        bool one = mask->prefix.m.data == NULL && !mask->gaps;
        const ptrdiff_t offset = one ? sa_lead_offset(a, &mask->classes, group * G, 1) : 0;
        for (ptrdiff_t head = 1; one && head < G; ++head) {
            one = sa_lead_offset(a, &mask->classes, group * G + head, 1) == offset;
        }
        if (one) {
            return (sa_stretches){
                .mask = mask, .classes = mask->classes.m.data + offset, .class_rows = smaller(mask->class_rows, a->L) * G};
        }
    }
    return (sa_stretches){.mask = NULL};
}

ptrdiff_t sa_block_begin(sa_stretches *s, ptrdiff_t row, ptrdiff_t most, ptrdiff_t until, ptrdiff_t *key) {
    *key = 0;
    if (s->mask == NULL || row >= until) {
        return row;
    }
    ptrdiff_t at = row / s->class_rows;
    while (at > 0 && goes_on(s, at)) {
        at = at > s->known && at < s->until ? s->known : at - 1;
    }
    s->known = at;
    s->until = row / s->class_rows + 1;
    const ptrdiff_t begin = at * s->class_rows, next = smaller(begin + sa_ceil_div(row - begin, most) * most, until);
    const ptrdiff_t end = sa_block_end(s, row, next);
    *key = (ptrdiff_t)keys_of(s, end < next ? end / s->class_rows : at).lo;
    return end;
}

ptrdiff_t sa_block_end(const sa_stretches *s, ptrdiff_t from, ptrdiff_t until) {
    if (s->mask == NULL) {
        return until;
    }
    for (ptrdiff_t at = from / s->class_rows + 1; at * s->class_rows < until; ++at) {
        if (!goes_on(s, at)) {
            return at * s->class_rows;
        }
    }
    return until;
}

sa_run sa_block_keys(const sa_stretches *s, ptrdiff_t from, ptrdiff_t to, ptrdiff_t S) {
    if (s->mask == NULL) {
        return (sa_run){0, S};
    }
    sa_run all = keys_of(s, from / s->class_rows);
    for (ptrdiff_t at = from / s->class_rows + 1; at * s->class_rows < to; ++at) {
        const sa_run here = keys_of(s, at);
        all = (sa_run){here.lo < all.lo ? here.lo : all.lo, here.hi > all.hi ? here.hi : all.hi};
    }
    return all;
}

/* The query of row r of a group. */
static const char *query_of(const sa_attention *a, ptrdiff_t G, ptrdiff_t group, ptrdiff_t r) {
    return a->query.m.data + sa_lead_offset(a, &a->query, group * G + r % G, 1) + r / G * a->query.m.row_stride;
}

/* Where what the task after this one reads lies, seen from this one's. */
static void look_ahead(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, sa_block *b) {
    if (!plan->large || plan->chunks > 1 || t + 1 >= plan->tasks) {
        return;
    }
    ptrdiff_t here, next;
    const ptrdiff_t G = plan->group, group = sa_divide(t, plan->blocks, &here),
                    next_group = sa_divide(t + 1, plan->blocks, &next);
    b->ahead = (ptrdiff_t)((uintptr_t)query_of(a, G, next_group, (plan->blocks - 1 - next) * plan->block_rows) -
                           (uintptr_t)query_of(a, G, group, (plan->blocks - 1 - here) * plan->block_rows));
    if (next_group != group) {
        b->keys_ahead = sa_lead_offset(a, &a->key, next_group * G, a->gqa) - sa_lead_offset(a, &a->key, group * G, a->gqa);
    }
}

/* Groups outermost, so that threads share a head's keys; within a group the last rows first, which see the most keys when
 * causal. */
void sa_attention_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                       sa_held *held) {
    const sa_real_kernels *kernels = sa_kernels_of(a);
    ptrdiff_t chunk, block;
    const ptrdiff_t group = sa_divide(sa_divide(t, plan->chunks, &chunk), plan->blocks, &block), most = plan->block_rows;
    const ptrdiff_t first = (plan->blocks - 1 - block) * most, end = smaller(first + most, plan->rows);
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
        const ptrdiff_t to = sa_block_end(stretches, from, smaller(from + most, plan->rows));
        sa_describe_block(a, plan->group, group, from, to - from, &rows, &b);
        b.cache_from = plan->chunks > 1 ? chunk * plan->chunk_keys : smaller(sa_tiles_from(a, key), b.begin);
        b.cache_holds = held->from == b.cache_from;
        held->from = b.cache_from;
        b.fetches = plan->large && !b.cache_holds;
        b.far = plan->far;
        look_ahead(a, plan, t, &b);
        if (plan->chunks > 1) {
            const ptrdiff_t begin = chunk * plan->chunk_keys, until = begin + plan->chunk_keys;
            b.begin = b.begin > begin ? b.begin : begin;
            b.end = b.end < until ? b.end : until;
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
    const sa_real_kernels *kernels = sa_kernels_of(a);
    sa_rows rows;
    sa_block b;
    const ptrdiff_t block = plan->blocks - 1 - t % plan->blocks;
    sa_describe_block(a, plan->group, t / plan->blocks, block * plan->block_rows, plan->block_rows, &rows, &b);
    b.partial_rows = partial_rows(plan);
    kernels->attention_merge(&b, partial + (size_t)(t * plan->chunks) * partial_bytes(a, plan), plan->chunks, scratch);
}

static bool stopped(const sa_watch *watch) { return __atomic_load_n(&watch->cancelled, __ATOMIC_RELAXED) != 0; }

bool sa_cancelled(const sa_attention *a) {
    if (a->watch == NULL || stopped(a->watch)) {
        return a->watch != NULL;
    }
#if defined(_OPENMP)
    const bool called_by_caller = omp_get_thread_num() == 0;
#else
    const bool called_by_caller = true;
#endif
    if (called_by_caller && a->watch->poll != NULL) {
        a->watch->poll(a->watch);
    }
    return stopped(a->watch);
}

#if defined(_OPENMP)
static ptrdiff_t *tasks_taken(const sa_attention_plan *plan, void *scratch, int thread) {
    return (ptrdiff_t *)(void *)((char *)scratch + (size_t)(thread + 1) * plan->scratch_bytes - SA_TAKEN_BYTES);
}

/* The next task for a thread, or plan->tasks. First come those of its own share, neighbours, for which it packs keys that no other
 * thread then has to; then what others have not begun of theirs. */
static ptrdiff_t take_task(const sa_attention_plan *plan, void *scratch, int thread, int threads) {
    for (int i = 0; i < threads; ++i) {
        const int owner = (thread + i) % threads;
        const ptrdiff_t share = plan->tasks / threads, more = plan->tasks % threads;
        const ptrdiff_t from = owner * share + (owner < more ? owner : more), count = share + (owner < more);
        ptrdiff_t *taken = tasks_taken(plan, scratch, owner);
        if (__atomic_load_n(taken, __ATOMIC_RELAXED) < count) {
            const ptrdiff_t t = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (t < count) {
                return from + t;
            }
        }
    }
    return plan->tasks;
}
#endif

/* How many chunks of each block have ended; behind the partial results. */
static ptrdiff_t *chunks_ended(const sa_attention *a, const sa_attention_plan *plan, char *partial) {
    return (ptrdiff_t *)(void *)(partial + (size_t)plan->tasks * partial_bytes(a, plan));
}

/* The task; who ends the last chunk of a block merges them, in their order: nobody waits for anybody. */
static void run_task(const sa_attention *a, const sa_attention_plan *plan, ptrdiff_t t, char *scratch, char *partial,
                     sa_held *held) {
    sa_attention_task(a, plan, t, scratch, partial, held);
    if (plan->chunks > 1) {
        const ptrdiff_t block = t / plan->chunks;
        if (__atomic_add_fetch(&chunks_ended(a, plan, partial)[block], 1, __ATOMIC_ACQ_REL) == plan->chunks) {
            sa_attention_merge_task(a, plan, block, scratch, partial);
            held->keys = -1; /* the scratch was used for other things */
        }
    }
}

sa_status sa_attention_forward(const sa_attention *a, const sa_attention_plan *plan, void *scratch, void *partial) {
    if (plan->chunks > 1) {
        memset(chunks_ended(a, plan, partial), 0, (size_t)(plan->tasks / plan->chunks) * sizeof(ptrdiff_t));
    }
#if defined(_OPENMP)
    if (plan->threads > 1 && plan->tasks > 0) { /* a plan without tasks has no scratch */
        for (int thread = 0; thread < plan->threads; ++thread) {
            *tasks_taken(plan, scratch, thread) = 0;
        }
        sa_region_enter();
#pragma omp parallel num_threads(plan->threads)
        {
            const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
            char *mine = (char *)scratch + (size_t)thread * plan->scratch_bytes;
            sa_held held = {.keys = -1};
            /* Independent: a task writes its own rows of the outputs, or its own partial result, and its thread's scratch; a merge
             * begins when all that it reads has ended. */
            for (ptrdiff_t t; (t = take_task(plan, scratch, thread, threads)) < plan->tasks;) {
                if (!sa_cancelled(a)) {
                    run_task(a, plan, t, mine, partial, &held);
                }
            }
        }
        sa_region_leave();
        return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
    }
#endif
    /* Not even an OpenMP region of one thread: entering one costs as much as a small call. */
    sa_held held = {.keys = -1};
    for (ptrdiff_t t = 0; t < plan->tasks && !sa_cancelled(a); ++t) {
        run_task(a, plan, t, scratch, partial, &held);
    }
    return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
}
