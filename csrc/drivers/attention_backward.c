/* Driver of the attention backward pass: how a call is cut into tasks so that every gradient has one writer at a time and one
 * order of additions. Arithmetic is left to the kernels, memory and checks to the caller.
 *
 * The keys of a group are cut into N parts, its rows into R, at least N. In step t the task (group, c) works on the keys of part
 * c against the rows of part (c + t) mod R: within a step no two tasks share a row or a key, so each adds to its own part of
 * dQ, dK and dV, and over the R steps every pair has had its turn.
 *
 * Groups that share a float mask share the elements of its gradient. The one of rank k takes the rows of part (k + c + t) mod R, and
 * at most R of them are worked on at a time: within a step no two tasks share an element of it either. The next R groups follow
 * when these are done. Elements that rows share, or keys of several parts, are left to a pass of their own. Where the mask's
 * gradient is not asked for, the order of the rows is the same, and so are the bits; but groups need not wait for each other, and
 * without parts of the keys a task does all steps at once.
 *
 * Where groups share a mask, keys are not in parts and a group has many blocks of rows, they follow one another instead: each goes
 * through all of its rows in order, and before a block waits until the group of the rank before has done with the block's rows of the
 * mask. A thread stays with its keys then, and a handful of groups is worked on at a time, which the caches hold: with heads in turns
 * all of them pass by in every step. It costs the time of a block for each thread but the first, once a call. Where nobody may wait
 * (packed sequences), the one of rank k takes part t − k of the rows in step t instead, which is the same order.
 *
 * A step does not wait for the whole one before it. In it task (group, c) of rank k waits for the steps before of three tasks: of its
 * own, of (group, c + 1), which had its rows in the step before, and of (rank k + 1, c), which had its elements of the mask. Those have
 * waited in turn, so whoever had them still earlier is done as well: rows and elements wander from task to task, and no more than
 * R of them work side by side, or in turns R exactly. Tasks are taken in the order of steps; what one waits for was taken before.
 *
 * No partial results, no memory beyond the gradients, and the same bits for any number of threads, since N and R follow from
 * the shapes alone. */
#if defined(_OPENMP)
#include <omp.h>
#endif
#include <string.h>

#include "drivers/attention.h"
#include "runtime/threads.h"

/* Parts are worth it while there are fewer tasks than this, if a part keeps so many rows and keys: every task packs its rows and
 * keys anew (eight heads of 512×64 in two parts each take 17 % longer on a matrix unit, 5 % by multiply-adds). */
#define SA_FEW_TASKS 8
#define SA_LEAST_PART 256
#define SA_MANY_TASKS 64
#define SA_LARGE_PART 1024

/* Groups that share a mask follow one another if each has so many blocks of rows, and their keys, values and both gradients take more
 * bytes together. Eight heads, gradients of a mask too, on a Zen 3 in two threads, with 12.7 and 16.8 MB: 777×128 in 51.8 → 42.8 ms,
 * 1024×128 in 91 → 73; with 8.4: 1024×64 in 42.4 → 39.9, 512×128 in 20.2 → 18.8; with 4.2, 512×64 in 9.3 → 9.6, where they stay in
 * turns. */
#define SA_BLOCKS_TO_FOLLOW 8
#define SA_BYTES_TO_FOLLOW (6 << 20)

/* Rows of dK or dV that lie further apart than this are brought together while a task adds to them, if its part takes no more
 * than so many bytes. They fall on few sets of the caches and on a page for every other row: packed sequences of eight heads
 * took a fifth longer. So are rows that do not begin at cache lines where the kernels load and store them a line at a time (a
 * matrix unit: 6 % faster at 1024 keys), if the part has as many blocks of rows. */
#define SA_FAR_APART 1024
#define SA_GATHERED_BYTES ((size_t)8 << 20)
#define SA_CACHE_LINE 64
#define SA_LEAST_BLOCKS_TO_GATHER 8

/* A mask's gradient that has a pass of its own is cut into tasks of so many keys. Where rows share elements, those are sums over all rows
 * of all heads: so many blocks of rows are added up in the scratch before that is added to the gradient. */
#define SA_MASK_KEYS ((ptrdiff_t)8 * SA_KEYS_PER_TILE)
#define SA_BLOCKS_IN_A_SUM 64

static ptrdiff_t smaller(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

static ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

static size_t size_of(const sa_attention *a) { return a->f64 ? sizeof(double) : sizeof(float); }

static ptrdiff_t count_parts(ptrdiff_t groups, ptrdiff_t length) {
    const ptrdiff_t few = smaller(sa_ceil_div(SA_FEW_TASKS, groups), length / SA_LEAST_PART);
    const ptrdiff_t many = smaller(sa_ceil_div(SA_MANY_TASKS, groups), length / SA_LARGE_PART);
    const ptrdiff_t parts = few > many ? few : many;
    return parts > 1 ? parts : 1;
}

/* How many groups lie along an axis; from the last axis on, *inside is what is left of a group's heads. */
static ptrdiff_t groups_along(const sa_attention *a, int axis, ptrdiff_t *inside) {
    const ptrdiff_t within = smaller(*inside, a->lead[axis]);
    *inside /= within;
    return a->lead[axis] / within;
}

/* The group of rank `rank` among those that share the mask's elements of number `owner`. */
static ptrdiff_t group_of(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t owner, ptrdiff_t rank) {
    ptrdiff_t group = 0, times = 1, inside = plan->group;
    for (int axis = g->a->n_lead - 1; axis >= 0; --axis) {
        const ptrdiff_t n = groups_along(g->a, axis, &inside);
        ptrdiff_t *number = plan->shares > 1 && g->dmask.lead_stride[axis] == 0 ? &rank : &owner;
        group += *number % n * times;
        *number /= n;
        times *= n;
    }
    return group;
}

static ptrdiff_t common_divisor(ptrdiff_t a, ptrdiff_t b) { return b == 0 ? a : common_divisor(b, a % b); }

/* How many groups share the elements of a float mask, whether or not its gradient is wanted. The heads of a group are neighbouring
 * rows, block by block: where they share a row of the mask, parts end with a block that ends with such a row. */
static void plan_shares(const sa_attention_gradients *g, sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const bool with_mask = a->mask.m.data && a->mask.m.dtype != SA_BOOL;
    ptrdiff_t inside = plan->group;
    plan->shares = plan->unit_blocks = 1;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        const ptrdiff_t n = groups_along(a, axis, &inside);
        plan->shares *= with_mask && g->dmask.lead_stride[axis] == 0 ? n : 1;
    }
    const ptrdiff_t unit = plan->group / common_divisor(plan->group, plan->block_rows);
    const bool rows_share = with_mask && a->L > 1 && g->dmask.m.row_stride == 0;
    const bool parts_share = with_mask && plan->parts > 1 && g->dmask.m.col_stride == 0;
    plan->mask_apart = rows_share || parts_share || (plan->shares > 1 && plan->blocks <= unit);
    plan->shares = plan->mask_apart ? 1 : plan->shares;
    if (plan->shares > 1) {
        plan->unit_blocks = unit;
        plan->parts = smaller(plan->parts, sa_ceil_div(plan->blocks, unit));
    }
}

static bool are_to_follow(const sa_attention *a, const sa_backward_plan *plan) {
    const double bytes = 2.0 * (double)plan->shares * (double)a->S * (double)(a->E + a->Dv) * (double)size_of(a);
    return plan->shares > 1 && plan->parts == 1 && plan->blocks >= SA_BLOCKS_TO_FOLLOW && bytes > (double)SA_BYTES_TO_FOLLOW;
}

/* Groups go through all rows, each behind the one before; in steps where nobody may wait. */
static void plan_following(const sa_attention_gradients *g, sa_backward_plan *plan, ptrdiff_t units) {
    plan->row_parts = g->only_steps ? smaller(units, SA_FEW_TASKS) : 1;
    plan->together = plan->shares;
    plan->tasks = plan->groups;
    plan->steps = g->only_steps ? plan->shares + plan->row_parts - 1 : 1;
    plan->steps_at_once = 1;
}

/* Parts of the keys, and groups that share a mask, take turns on parts of the rows. */
static void plan_turns(const sa_attention_gradients *g, sa_backward_plan *plan, ptrdiff_t units) {
    const ptrdiff_t turns = smaller(plan->shares, SA_FEW_TASKS);
    const bool wait = g->dmask.m.data && plan->shares > 1;
    plan->row_parts = plan->parts > turns ? plan->parts : smaller(turns, units);
    plan->together = wait ? smaller(plan->shares, plan->row_parts) : plan->shares;
    plan->tasks = plan->groups / plan->shares * plan->together * plan->parts;
    plan->steps_at_once = wait || plan->parts > 1 ? 1 : plan->row_parts;
    plan->steps = sa_ceil_div(plan->shares, plan->together) * plan->row_parts / plan->steps_at_once;
}

/* Cuts the rows and puts the tasks in steps (top of this file). */
static void plan_rotation(const sa_attention_gradients *g, sa_backward_plan *plan) {
    plan_shares(g, plan);
    const ptrdiff_t units = sa_ceil_div(plan->blocks, plan->unit_blocks);
    plan->follow = are_to_follow(g->a, plan);
    (plan->follow ? plan_following : plan_turns)(g, plan, units);
    plan->part_blocks = sa_ceil_div(units, plan->row_parts) * plan->unit_blocks;
}

/* The first block of a part of the rows. */
static ptrdiff_t first_block(const sa_backward_plan *plan, ptrdiff_t part) {
    const ptrdiff_t units = sa_ceil_div(plan->blocks, plan->unit_blocks);
    return smaller(part * units / plan->row_parts * plan->unit_blocks, plan->blocks);
}

/* Whether a gradient's rows of `width` elements are neither one behind the other nor close; with `lines`, also whether they
 * begin inside cache lines. */
static bool is_spread(const sa_attention *a, const sa_matrix *m, ptrdiff_t width, bool lines) {
    const ptrdiff_t stride = m->row_stride;
    const bool far = stride != width * (ptrdiff_t)size_of(a) && (stride > SA_FAR_APART || stride < -SA_FAR_APART);
    return m->data && (far || (lines && (uintptr_t)m->data % SA_CACHE_LINE != 0));
}

static size_t whole_lines(size_t bytes) { return (bytes + SA_CACHE_LINE - 1) / SA_CACHE_LINE * SA_CACHE_LINE; }

/* The bytes of a part's rows of dK and dV, laid one behind the other; 0 where they stay where they are. */
static size_t gathered_bytes(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const bool lines =
        plan->part_blocks * plan->steps_at_once >= SA_LEAST_BLOCKS_TO_GATHER && sa_kernels_of(a)->adds_by_lines(a);
    if (!is_spread(a, &g->dkey.m, a->E, lines) && !is_spread(a, &g->dvalue.m, a->Dv, lines)) {
        return 0;
    }
    const size_t row = (size_t)(a->E + a->Dv) * size_of(a), keys = (size_t)smaller(plan->part_keys, a->S);
    return row > 0 && keys <= SA_GATHERED_BYTES / row
               ? whole_lines(keys * (size_t)a->E * size_of(a)) + keys * (size_t)a->Dv * size_of(a)
               : 0;
}

/* Whether its rows share elements, so that they are summed in the scratch. */
static bool sums_mask_apart(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return g->dmask.m.data && plan->mask_apart && g->dmask.m.row_stride == 0;
}

/* Whether threads wait for what others have done. */
static bool waits(const sa_backward_plan *plan) { return plan->steps > 1 || plan->follow; }

sa_status sa_attention_plan_backward(const sa_attention_gradients *g, int max_threads, sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const sa_real_kernels *kernels = sa_kernels_of(a);
    size_t heads, rows;
    if (!sa_count_rows(a, &heads, &rows)) {
        return SA_TOO_LARGE;
    }
    *plan = (sa_backward_plan){.block_rows = kernels->backward_rows, .parts = 1, .threads = 1};
    /* Without keys a sink may still have a gradient: lse is the sink then. */
    if (rows == 0 || (a->S == 0 && !(g->dsink_rows.m.data && g->grad_lse.m.data))) {
        return SA_OK; /* every gradient is zero; the rows may be far too many to be walked over */
    }
    plan->large = sa_is_large(a, (ptrdiff_t)rows);
    plan->group = sa_group_size(a);
    plan->groups = (ptrdiff_t)heads / plan->group;
    plan->rows = plan->group * a->L;
    plan->blocks = sa_ceil_div(plan->rows, plan->block_rows);
    plan->parts = count_parts(plan->groups, smaller(plan->rows, a->S));
    plan_rotation(g, plan);
    plan->part_keys = sa_ceil_div(sa_ceil_div(a->S, plan->parts), SA_KEYS_PER_TILE) * SA_KEYS_PER_TILE;
    plan->delta_count = (ptrdiff_t)rows;
    plan->scratch_bytes = whole_lines(kernels->backward_scratch(g));
    const size_t gathered = gathered_bytes(g, plan);
    plan->gathered_at = gathered > 0 ? plan->scratch_bytes : 0;
    plan->scratch_bytes += whole_lines(gathered);
    plan->mask_sums_at = plan->scratch_bytes;
    plan->scratch_bytes += whole_lines(sums_mask_apart(g, plan) ? SA_MASK_KEYS * size_of(a) : 0);
    const double work = (double)rows * (double)a->S * (double)(3 * a->E + 2 * a->Dv + 32) * sa_open_share(a);
    double threads = work / SA_WORK_PER_THREAD;
    threads = threads < (double)plan->tasks || (g->dmask.m.data && plan->mask_apart) ? threads : (double)plan->tasks;
    plan->threads = threads < max_threads ? (threads < 1 ? 1 : (int)threads) : max_threads;
    if (plan->threads > 1 && waits(plan)) {
        plan->done_at = plan->scratch_bytes;
        plan->scratch_bytes += whole_lines((size_t)sa_ceil_div(plan->tasks, plan->threads) * sizeof(ptrdiff_t));
    }
    return SA_OK;
}

/* Describes a block as sa_describe_block does, and the gradients of its rows beside it. */
static void describe(const sa_attention_gradients *g, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from, ptrdiff_t most,
                     sa_rows *rows, sa_row_gradients *grads, sa_backward_block *b) {
    const sa_attention *a = g->a;
    const ptrdiff_t size = (ptrdiff_t)size_of(a);
    *b = (sa_backward_block){.g = g, .rows = grads, .with_mask = g->dmask.m.data != NULL};
    sa_describe_block(a, G, group, from, most, rows, &b->b);
    b->dkey_stride = g->dkey.m.row_stride / size;
    b->dvalue_stride = g->dvalue.m.row_stride / size;
    if (g->dkey.m.data) {
        b->dkey = g->dkey.m.data + sa_lead_offset(a, &g->dkey, group * G, a->gqa);
    }
    if (g->dvalue.m.data) {
        b->dvalue = g->dvalue.m.data + sa_lead_offset(a, &g->dvalue, group * G, a->gqa);
    }
#define SA_ROW_OF(tensor) (g->tensor.m.data ? g->tensor.m.data + sa_lead_offset(a, &g->tensor, head, 1) : NULL)
    for (int first = 0; first < rows->count && first < G; ++first) {
        const ptrdiff_t head = group * G + (from + first) % G;
        const char *grad_out = SA_ROW_OF(grad_out), *grad_lse = SA_ROW_OF(grad_lse);
        char *dquery = SA_ROW_OF(dquery), *dmask = SA_ROW_OF(dmask);
        char *dslope = SA_ROW_OF(dslope_rows), *dsink = SA_ROW_OF(dsink_rows);
        for (ptrdiff_t r = first; r < rows->count; r += G) {
            const ptrdiff_t i = rows->index[r];
            grads->grad_out[r] = grad_out ? grad_out + i * g->grad_out.m.row_stride : NULL;
            grads->grad_lse[r] = grad_lse ? grad_lse + i * g->grad_lse.m.row_stride : NULL;
            grads->dquery[r] = dquery ? dquery + i * g->dquery.m.row_stride : NULL;
            grads->dmask[r] = dmask ? dmask + i * g->dmask.m.row_stride : NULL;
            grads->dslope[r] = dslope ? dslope + i * g->dslope_rows.m.row_stride : NULL;
            grads->dsink[r] = dsink ? dsink + i * g->dsink_rows.m.row_stride : NULL;
            grads->delta[r] = (char *)g->delta + (head * a->L + i) * size;
        }
    }
#undef SA_ROW_OF
}

/* Leaves a block with the keys from … to − 1, from the first on that a row may see. */
static void keep_keys(sa_block *b, ptrdiff_t from, ptrdiff_t to) {
    b->begin = b->begin > from ? b->begin : from;
    b->end = smaller(b->end, to);
    if (b->rows->gaps > 0) {
        ptrdiff_t n;
        b->begin = sa_next_open_tile(b, b->begin, &n);
    }
}

void sa_backward_delta_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t t, char *scratch) {
    sa_rows rows;
    sa_row_gradients grads;
    sa_backward_block b;
    if (sa_cancelled(g->a)) {
        return;
    }
    describe(g, plan->group, t / plan->blocks, t % plan->blocks * plan->block_rows, plan->block_rows, &rows, &grads, &b);
    sa_kernels_of(g->a)->attention_delta(&b, scratch);
}

/* Rows of one gradient: in place, or one behind the other in the scratch. */
typedef struct {
    char *in_place, *together;
    ptrdiff_t stride, bytes; /* in place, from row to row; of a row */
} gathered_rows;

/* Lets b add to rows of the keys `key` … `end` − 1 that lie together in the scratch, and tells which those are. */
static void gather(const sa_backward_plan *plan, sa_backward_block *b, ptrdiff_t key, ptrdiff_t end, char *scratch,
                   gathered_rows rows[2]) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t size = (ptrdiff_t)size_of(a);
    char *dkey = scratch + plan->gathered_at, *dvalue = dkey + whole_lines((size_t)((end - key) * a->E * size));
    rows[0] = (gathered_rows){b->dkey, dkey, b->dkey_stride * size, a->E * size};
    rows[1] = (gathered_rows){b->dvalue, dvalue, b->dvalue_stride * size, a->Dv * size};
    b->dkey = b->dkey ? dkey : NULL;
    b->dvalue = b->dvalue ? dvalue : NULL;
    b->dkey_stride = a->E;
    b->dvalue_stride = a->Dv;
    b->first_key = key;
}

/* What was there before comes along, so that sums are those made in place: zeros in the first step. */
static void fill_gathered(const gathered_rows rows[2], ptrdiff_t key, ptrdiff_t n, bool zeros) {
    for (int i = 0; i < 2; ++i) {
        if (rows[i].in_place && zeros) {
            memset(rows[i].together, 0, (size_t)(n * rows[i].bytes));
        }
        for (ptrdiff_t r = 0; rows[i].in_place && !zeros && r < n; ++r) {
            memcpy(rows[i].together + r * rows[i].bytes, rows[i].in_place + (key + r) * rows[i].stride, (size_t)rows[i].bytes);
        }
    }
}

static void put_back_gathered(const gathered_rows rows[2], ptrdiff_t key, ptrdiff_t n) {
    for (int i = 0; i < 2; ++i) {
        for (ptrdiff_t r = 0; rows[i].in_place && r < n; ++r) {
            memcpy(rows[i].in_place + (key + r) * rows[i].stride, rows[i].together + r * rows[i].bytes, (size_t)rows[i].bytes);
        }
    }
}

static bool wants_rows_or_keys(const sa_attention_gradients *g) {
    return g->dquery.m.data || g->dkey.m.data || g->dvalue.m.data || g->dslope_rows.m.data;
}

/* Where the blocks of a group end. Groups in turns must not meet: their blocks have to be the same. */
static sa_stretches stretches_of(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t group) {
    bool alike = plan->unit_blocks == 1;
    for (int m = 0; m < g->a->block_mask_count; ++m) {
        for (int axis = 0; axis < g->a->n_lead; ++axis) {
            alike &= g->a->block_masks[m].classes.lead_stride[axis] == 0;
        }
    }
    return plan->shares == 1 || alike ? sa_find_stretches(g->a, plan->group, group) : (sa_stretches){.mask = NULL};
}

/* What a task is at: keys of one part, of one group. */
typedef struct {
    ptrdiff_t group, key, end;
    sa_stretches stretches;
    bool held;             /* the scratch holds gradients of these keys, if they are gathered, */
    ptrdiff_t packed_from; /* and packed keys from this one on */
    gathered_rows gathered[2];
    const ptrdiff_t *ahead; /* rows that the group before has done with, where one must wait for that; else NULL */
    ptrdiff_t *done;        /* rows of this one, or NULL */
} part_state;

/* All keys of a block, some at a time: a call of few rows and a million keys would not see Ctrl-C for seconds. All but the first some begin
 * with a tile as counted from cache_from: kernels of packed tiles begin with a whole one, and no key must come twice. (Where there are
 * gaps they pack none.) */
static void work_on_keys(sa_backward_block *b, char *scratch) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t tiles = SA_ELEMENTS_AT_ONCE / SA_KEYS_PER_TILE / larger(a->E + a->Dv, 1);
    const ptrdiff_t at_once = larger(tiles, 1) * SA_KEYS_PER_TILE, end = b->b.end;
    const ptrdiff_t into_tile = b->b.rows->gaps > 0 ? 0 : (b->b.begin - b->b.cache_from) % SA_KEYS_PER_TILE;
    for (ptrdiff_t next, key = b->b.begin; key < end && !sa_cancelled(a); key = next) {
        sa_backward_block some = *b;
        next = key + at_once - (key == b->b.begin ? into_tile : 0);
        keep_keys(&some.b, key, smaller(next, end));
        if (some.b.begin < some.b.end) {
            sa_kernels_of(a)->attention_backward(&some, scratch);
            b->b.cache_holds = true;
        }
    }
}

/* These keys against part number `part` of the rows. fresh: no step has added to the keys' gradients. */
static void work_on_rows(const sa_attention_gradients *g, const sa_backward_plan *plan, part_state *at, ptrdiff_t part,
                         bool fresh, char *scratch) {
    const ptrdiff_t most = plan->block_rows, end_row = smaller(first_block(plan, part + 1) * most, plan->rows);
    for (ptrdiff_t first_key, until, from = first_block(plan, part) * most;
         (from = sa_block_begin(&at->stretches, from, most, plan->rows, &first_key)) < end_row; from = until) {
        sa_rows rows;
        sa_row_gradients grads;
        sa_backward_block b;
        until = sa_block_end(&at->stretches, from, smaller(from + most, plan->rows));
        const sa_run keys = sa_block_keys(&at->stretches, from, until, g->a->S);
        if (keys.lo >= at->end || keys.hi <= at->key) {
            continue;
        }
        describe(g, plan->group, at->group, from, until - from, &rows, &grads, &b);
        b.with_mask &= !plan->mask_apart;
        b.mask_only = !wants_rows_or_keys(g);
        keep_keys(&b.b, at->key, at->end);
        b.b.cache_from = smaller(larger(sa_tiles_from(g->a, first_key), at->key), b.b.begin);
        b.b.cache_holds = at->packed_from == b.b.cache_from;
        b.b.fetches = plan->large && fresh && !b.b.cache_holds; /* in each step of a rotation: 2 to 4 % slower */
        if (at->ahead) { /* until all of a mask's row is done, which heads of a group share */
            sa_wait_for(at->ahead, smaller(sa_ceil_div(until, plan->group) * plan->group, plan->rows));
        }
        if (b.b.begin < b.b.end && !sa_cancelled(g->a)) {
            if (plan->gathered_at > 0) {
                gather(plan, &b, at->key, at->end, scratch, at->gathered);
                if (!at->held) {
                    fill_gathered(at->gathered, at->key, at->end - at->key, fresh);
                }
            }
            at->held = true;
            at->packed_from = b.b.cache_from;
            work_on_keys(&b, scratch);
        }
        if (at->done) {
            sa_raise(at->done, until);
        }
    }
}

/* Task t of a step, in the words from the top of this file: keys of part c = t mod N, of the group of rank k = t / N mod K, where
 * K groups are worked on together. ahead and done as in part_state. */
static void part_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t, char *scratch,
                      const ptrdiff_t *ahead, ptrdiff_t *done) {
    const ptrdiff_t c = t % plan->parts, k = t / plan->parts % plan->together, owner = t / plan->parts / plan->together;
    const ptrdiff_t turn = plan->follow ? 0 : step * plan->steps_at_once / plan->row_parts, rank = turn * plan->together + k;
    const ptrdiff_t late = plan->follow && g->only_steps ? k : 0;
    const ptrdiff_t begun = plan->follow ? step - late : step % plan->row_parts; /* parts of the rows that had their turn */
    if (rank >= plan->shares || begun < 0 || begun >= plan->row_parts) {         /* of the last turn, or not its step */
        return;
    }
    part_state at = {
        .group = group_of(g, plan, owner, rank), .key = c * plan->part_keys, .packed_from = -1, .ahead = ahead, .done = done};
    at.end = smaller(at.key + plan->part_keys, g->a->S);
    at.stretches = stretches_of(g, plan, at.group);
    for (ptrdiff_t i = 0; i < plan->steps_at_once; ++i) {
        const ptrdiff_t part = plan->follow ? begun : (rank + c + step + i) % plan->row_parts;
        work_on_rows(g, plan, &at, part, begun == 0, scratch);
    }
    if (at.held && plan->gathered_at > 0) {
        put_back_gathered(at.gathered, at.key, at.end - at.key);
    }
}

void sa_backward_part_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t,
                           char *scratch) {
    part_task(g, plan, step, t, scratch, NULL, NULL);
}

#if defined(_OPENMP)
/* The steps, or the rows, that task t has done: neighbours' counts lie in different threads' scratch, on lines of their own. */
static ptrdiff_t *steps_done(const sa_backward_plan *plan, char *scratch, ptrdiff_t t) {
    char *lines = scratch + (size_t)(t % plan->threads) * plan->scratch_bytes + plan->done_at;
    return (ptrdiff_t *)(void *)lines + t / plan->threads;
}

/* Task t of a step, after those that it follows on (top of this file). Also one without work of its own waits: others rely on it. */
static void part_task_in_order(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t step, ptrdiff_t t,
                               char *scratch, char *mine) {
    const ptrdiff_t N = plan->parts, K = plan->together, c = t % N, k = t / N % K, owner = t / N / K;
    if (plan->follow) {
        ptrdiff_t *done = steps_done(plan, scratch, t);
        part_task(g, plan, step, t, mine, k > 0 && g->dmask.m.data ? steps_done(plan, scratch, t - 1) : NULL, done);
        sa_raise(done, plan->rows); /* not all have keys here */
        return;
    }
    if (plan->steps > 1) {
        sa_wait_for(steps_done(plan, scratch, t), step);
        sa_wait_for(steps_done(plan, scratch, (owner * K + k) * N + (c + 1) % N), step);
        sa_wait_for(steps_done(plan, scratch, (owner * K + (k + 1) % K) * N + c), g->dmask.m.data ? step : 0);
    }
    sa_backward_part_task(g, plan, step, t, mine);
    if (plan->steps > 1) {
        sa_raise(steps_done(plan, scratch, t), step + 1);
    }
}
#endif

/* ---- the gradient of a mask that rows share --------------------------------------------------------------------------- */

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    if (!g->dmask.m.data || !plan->mask_apart) {
        return (sa_mask_plan){0};
    }
    sa_mask_plan m = {.owners = 1, .key_parts = 1, .keys = a->S, .heads = 1};
    for (int axis = 0; axis < a->n_lead; ++axis) {
        m.heads *= a->lead[axis];
        m.owners *= g->dmask.lead_stride[axis] != 0 ? a->lead[axis] : 1;
    }
    if (g->dmask.m.col_stride != 0) {
        m.keys = SA_MASK_KEYS;
        m.key_parts = sa_ceil_div(a->S, m.keys);
    }
    m.tasks = m.owners * m.key_parts;
    return m;
}

/* Whether head number `head` adds to the elements of owner number `owner`. */
static bool owns(const sa_attention_gradients *g, ptrdiff_t owner, ptrdiff_t head) {
    const sa_attention *a = g->a;
    ptrdiff_t own = 0, times = 1;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        if (g->dmask.lead_stride[axis] != 0) {
            own += head % a->lead[axis] * times;
            times *= a->lead[axis];
        }
        head /= a->lead[axis];
    }
    return own == owner;
}

/* to[n] += from[n]. */
static void add_sums(const sa_attention *a, char *to, const char *from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n && a->f64; ++i) {
        ((double *)(void *)to)[i] += ((const double *)(const void *)from)[i];
    }
    for (ptrdiff_t i = 0; i < n && !a->f64; ++i) {
        ((float *)(void *)to)[i] += ((const float *)(const void *)from)[i];
    }
}

/* The rows of one head, all blocks of it, to the elements from key `key` on. */
static void mask_of_head(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t head, ptrdiff_t key,
                         ptrdiff_t end, char *scratch) {
    const sa_attention *a = g->a;
    const ptrdiff_t step = g->dmask.m.col_stride, elements = step != 0 ? end - key : 1;
    const bool apart = sums_mask_apart(g, plan);
    char *sums = scratch + plan->mask_sums_at;
    bool held = false; /* the scratch holds packed keys of this head */
    ptrdiff_t summed = 0;
    for (ptrdiff_t row = 0; row < a->L && !sa_cancelled(a); row += plan->block_rows) {
        sa_rows rows;
        sa_row_gradients grads;
        sa_backward_block b;
        describe(g, 1, head, row, plan->block_rows, &rows, &grads, &b);
        char *to = grads.dmask[0] + key * step;
        if (apart && summed == 0) {
            memset(sums, 0, (size_t)elements * size_of(a));
        }
        for (int r = 0; r < rows.count && apart; ++r) {
            grads.dmask[r] = sums;
        }
        b.dmask_key = apart ? key : 0;
        b.mask_only = true;
        keep_keys(&b.b, key, end);
        b.b.cache_from = key;
        b.b.cache_holds = held;
        if (b.b.begin < b.b.end) {
            held = true;
            sa_kernels_of(a)->attention_backward(&b, scratch);
        }
        if (apart && (++summed == SA_BLOCKS_IN_A_SUM || row + plan->block_rows >= a->L)) {
            add_sums(a, to, sums, elements);
            summed = 0;
        }
    }
}

void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m, ptrdiff_t t,
                           char *scratch) {
    const ptrdiff_t owner = t / m->key_parts, key = t % m->key_parts * m->keys, end = smaller(key + m->keys, g->a->S);
    for (ptrdiff_t head = 0; head < m->heads; ++head) {
        if (owns(g, owner, head)) {
            mask_of_head(g, plan, head, key, end, scratch);
        }
    }
}

/* ---- running ---------------------------------------------------------------------------------------------------------- */

ptrdiff_t sa_backward_part_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return wants_rows_or_keys(g) || (g->dmask.m.data && !plan->mask_apart) ? plan->tasks : 0;
}

sa_status sa_attention_backward(const sa_attention_gradients *g, const sa_backward_plan *plan, void *scratch) {
    const sa_attention *a = g->a;
    const ptrdiff_t blocks = plan->groups * plan->blocks, tasks = sa_backward_part_tasks(g, plan);
    const sa_mask_plan m = sa_plan_mask(g, plan);
#if defined(_OPENMP)
    if (plan->threads > 1) {
        ptrdiff_t taken = 0;
        for (ptrdiff_t t = 0; waits(plan) && t < tasks; ++t) {
            *steps_done(plan, scratch, t) = 0;
        }
        sa_region_enter();
#pragma omp parallel num_threads(plan->threads)
        {
            char *mine = (char *)scratch + (size_t)omp_get_thread_num() * plan->scratch_bytes;
            /* Independent: a block writes delta and the sink's share of its own rows. */
#pragma omp for schedule(dynamic, 1)
            for (ptrdiff_t t = 0; t < blocks; ++t) {
                sa_backward_delta_task(g, plan, t, mine);
            }
            /* No two tasks add to the same at a time, or in another order than that of the steps (top of this file). Taken by hand:
             * a dynamic loop may give a thread later tasks before earlier ones. */
            for (ptrdiff_t i; (i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < plan->steps * tasks;) {
                part_task_in_order(g, plan, i / tasks, i % tasks, scratch, mine);
            }
            /* Independent: a task owns its elements of the mask's gradient, to which nobody else adds. */
#pragma omp for schedule(dynamic, 1)
            for (ptrdiff_t t = 0; t < m.tasks; ++t) {
                sa_backward_mask_task(g, plan, &m, t, mine);
            }
        }
        sa_region_leave();
        return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
    }
#endif
    for (ptrdiff_t t = 0; t < blocks; ++t) {
        sa_backward_delta_task(g, plan, t, scratch);
    }
    for (ptrdiff_t step = 0; step < plan->steps; ++step) {
        for (ptrdiff_t t = 0; t < tasks; ++t) {
            sa_backward_part_task(g, plan, step, t, scratch);
        }
    }
    for (ptrdiff_t t = 0; t < m.tasks; ++t) {
        sa_backward_mask_task(g, plan, &m, t, scratch);
    }
    return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
}
