/* Driver of attention's backward pass: cuts a call so that each gradient has one writer at a time and one order of
 * additions, for any number of threads.
 *
 * A group's keys are cut into N ranges, its rows into R ≥ N. In turn t, task (group, c) works on key range c and row
 * range (c + t) mod R. Tasks of a turn share neither rows nor keys, and R turns cover every pair.
 *
 * Groups that share a float mask, and so its gradient, have ranks: in turn t a group of rank k works on row range
 * (k + c + t) mod R, and at most R groups work at a time. Without such a mask every rank is 0. If the mask's gradient
 * is not wanted, the order is the same, but groups do not wait.
 *
 * Large groups that share a mask follow one another through their rows, a block apart, so that a thread stays with one
 * group's keys. Packed sequences must not wait: in turn t rank k then has row range t − k, which is the same order.
 *
 * Task (group, c) of rank k waits for three tasks of the turn before, which have begun, as tasks are taken in order:
 * itself; (group, c + 1), which had its rows; (rank k + 1, c), which had its mask elements. */
#include <math.h>
#include <string.h>

#include "drivers/attention.h"
#include "runtime/team.h"

/* Keys and rows are cut into ranges until there are this many tasks.
 * A range has a least length, because each task copies its keys and rows. */
#define SA_FEW_TASKS 8
#define SA_LEAST_RANGE 256
#define SA_MANY_TASKS 64
#define SA_LARGE_RANGE 1024

/* Groups follow one another if they have this many blocks, and keys, values and their gradients exceed these bytes. */
#define SA_BLOCKS_TO_FOLLOW 8
#define SA_BYTES_TO_FOLLOW (6 << 20)

/* A task gathers its rows of dK and dV, up to this many bytes, if they are this far apart, as they would use few sets
 * of the caches. It also gathers them if rows begin inside cache lines, kernels add whole lines, and the task has this
 * many blocks. */
#define SA_FAR_APART 1024
#define SA_GATHERED_BYTES ((size_t)8 << 20)
#define SA_LEAST_BLOCKS_TO_GATHER 8

/* Sums of this many blocks of rows are added up in scratch first, which loses fewer digits. */
#define SA_BLOCKS_IN_A_SUM 64

#define SA_MASK_KEYS ((ptrdiff_t)8 * SA_KEYS_PER_TILE) /* keys of a task */

static ptrdiff_t count_ranges(ptrdiff_t groups, ptrdiff_t length) {
    const ptrdiff_t few = sa_smaller(sa_ceil_div(SA_FEW_TASKS, groups), length / SA_LEAST_RANGE);
    const ptrdiff_t many = sa_smaller(sa_ceil_div(SA_MANY_TASKS, groups), length / SA_LARGE_RANGE);
    return sa_larger(1, sa_larger(few, many));
}

/* The number of groups along an axis. Called from the last axis to the first;
 * *inside is the rest of a group's heads. */
static ptrdiff_t groups_along(const sa_attention *a, int axis, ptrdiff_t *inside) {
    const ptrdiff_t within = sa_smaller(*inside, a->lead[axis]);
    *inside /= within;
    return a->lead[axis] / within;
}

/* The group of rank `rank` among the groups that share the mask elements of `owner`. */
static ptrdiff_t group_of(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t owner,
                          ptrdiff_t rank) {
    ptrdiff_t group = 0, times = 1, inside = plan->group;
    for (int axis = g->a->n_lead - 1; axis >= 0; --axis) {
        const ptrdiff_t n = groups_along(g->a, axis, &inside);
        ptrdiff_t *number = plan->mask_groups > 1 && g->dmask.lead_stride[axis] == 0 ? &rank : &owner;
        group += *number % n * times;
        *number /= n;
        times *= n;
    }
    return group;
}

static ptrdiff_t common_divisor(ptrdiff_t a, ptrdiff_t b) { return b == 0 ? a : common_divisor(b, a % b); }

/* Counts groups that share a float mask. In a group, heads that share a mask row are neighbouring rows,
 * and a range must not separate them. */
static void plan_mask_groups(const sa_attention_gradients *g, sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const bool with_mask = a->mask.m.data && a->mask.m.dtype != SA_BOOL;
    ptrdiff_t inside = plan->group, mask_groups = 1;
    for (int axis = a->n_lead - 1; axis >= 0; --axis) {
        const ptrdiff_t n = groups_along(a, axis, &inside);
        mask_groups *= with_mask && g->dmask.lead_stride[axis] == 0 ? n : 1;
    }
    const ptrdiff_t grain = plan->group / common_divisor(plan->group, plan->block_rows);
    const bool rows_share = with_mask && a->L > 1 && g->dmask.m.row_stride == 0;
    const bool ranges_share = with_mask && plan->key_ranges > 1 && g->dmask.m.col_stride == 0;
    plan->mask_has_pass = rows_share || ranges_share || (mask_groups > 1 && plan->blocks <= grain);
    plan->mask_groups = plan->mask_has_pass ? 1 : mask_groups;
    plan->grain_blocks = plan->mask_groups > 1 ? grain : 1;
    plan->key_ranges = sa_smaller(plan->key_ranges, sa_ceil_div(plan->blocks, plan->grain_blocks));
}

static size_t mask_sums_bytes(const sa_attention *a) { return SA_MASK_KEYS * sa_element_size(a->f64); }

/* True if rows share elements of the mask's gradient, which are then summed in scratch. */
static bool sums_mask_in_scratch(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return g->dmask.m.data && plan->mask_has_pass && g->dmask.m.row_stride == 0;
}

static bool are_to_follow(const sa_attention *a, const sa_backward_plan *plan) {
    const double bytes =
        2.0 * (double)plan->mask_groups * (double)a->S * (double)(a->E + a->Dv) * (double)sa_element_size(a->f64);
    return plan->mask_groups > 1 && plan->key_ranges == 1 && plan->blocks >= SA_BLOCKS_TO_FOLLOW &&
           bytes > (double)SA_BYTES_TO_FOLLOW;
}

static void plan_rotation(const sa_attention_gradients *g, sa_backward_plan *plan) {
    plan_mask_groups(g, plan);
    const ptrdiff_t grains = sa_ceil_div(plan->blocks, plan->grain_blocks),
                    least_tasks = sa_smaller(plan->mask_groups, SA_FEW_TASKS);
    const bool wait = g->dmask.m.data && plan->mask_groups > 1;
    plan->together = plan->mask_groups;
    plan->turns_at_once = 1;
    plan->follow = are_to_follow(g->a, plan);
    if (plan->follow) {
        plan->row_ranges = g->only_turns ? sa_smaller(grains, SA_FEW_TASKS) : 1;
        plan->turns = g->only_turns ? plan->mask_groups + plan->row_ranges - 1 : 1;
    } else {
        plan->row_ranges = plan->key_ranges > least_tasks ? plan->key_ranges : sa_smaller(least_tasks, grains);
        plan->together = wait ? sa_smaller(plan->mask_groups, plan->row_ranges) : plan->mask_groups;
        plan->turns_at_once = wait || plan->key_ranges > 1 ? 1 : plan->row_ranges;
        plan->turns = sa_ceil_div(plan->mask_groups, plan->together) * plan->row_ranges / plan->turns_at_once;
    }
    plan->tasks = plan->groups / plan->mask_groups * plan->together * plan->key_ranges;
    plan->range_blocks = sa_ceil_div(grains, plan->row_ranges) * plan->grain_blocks;
    plan->range_keys = sa_ceil_div(sa_ceil_div(g->a->S, plan->key_ranges), SA_KEYS_PER_TILE) * SA_KEYS_PER_TILE;
}

static ptrdiff_t first_block(const sa_backward_plan *plan, ptrdiff_t range) {
    const ptrdiff_t grains = sa_ceil_div(plan->blocks, plan->grain_blocks);
    return sa_smaller(range * grains / plan->row_ranges * plan->grain_blocks, plan->blocks);
}

/* True if rows are far apart or, if `lines`, begin inside cache lines. */
static bool is_spread(const sa_attention *a, const sa_matrix *m, ptrdiff_t width, bool lines) {
    const ptrdiff_t stride = m->row_stride;
    const bool far =
        stride != width * (ptrdiff_t)sa_element_size(a->f64) && (stride > SA_FAR_APART || stride < -SA_FAR_APART);
    return m->data && (far || (lines && (uintptr_t)m->data % SA_CACHE_LINE != 0));
}

/* Bytes of gathered gradients; 0: nothing is gathered. */
static size_t gathered_bytes(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const bool lines = plan->range_blocks * plan->turns_at_once >= SA_LEAST_BLOCKS_TO_GATHER && !a->with_tangents &&
                       sa_kernels_for(a->f64)->adds_by_lines(a);
    if (!is_spread(a, &g->dkey.m, a->E, lines) && !is_spread(a, &g->dvalue.m, a->Dv, lines)) {
        return 0;
    }
    const size_t row = (size_t)(a->E + a->Dv) * sa_element_size(a->f64),
                 keys = (size_t)sa_smaller(plan->range_keys, a->S);
    return row > 0 && keys <= SA_GATHERED_BYTES / row ? sa_whole_lines(keys * (size_t)a->E * sa_element_size(a->f64)) +
                                                            keys * (size_t)a->Dv * sa_element_size(a->f64)
                                                      : 0;
}

static size_t take(sa_backward_plan *plan, size_t bytes) {
    const size_t at = plan->scratch_bytes;
    plan->scratch_bytes += sa_whole_lines(bytes);
    return at;
}

/* How many diagonals of the scores a task's keys cross. */
static ptrdiff_t diagonals_of(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return g->a->L + plan->range_keys - 1;
}

/* How many sums the tasks of all key ranges own. */
static ptrdiff_t diagonal_count(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return plan->groups * plan->key_ranges * plan->group * diagonals_of(g, plan);
}

/* The sums of diagonals of a head that the task of a key range owns. */
static char *task_diagonals(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t head,
                            ptrdiff_t range) {
    const ptrdiff_t number = (head / plan->group * plan->key_ranges + range) * plan->group + head % plan->group;
    return (char *)g->diagonals + number * diagonals_of(g, plan) * (ptrdiff_t)sa_element_size(g->a->f64);
}

sa_status sa_attention_plan_backward(const sa_attention_gradients *g, int max_threads, sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    const sa_real_kernels *kernels = sa_kernels_for(a->f64);
    size_t heads, rows;
    if (!sa_count_rows(a, &heads, &rows)) {
        return SA_TOO_LARGE;
    }
    *plan = (sa_backward_plan){.block_rows = kernels->backward_rows, .key_ranges = 1, .threads = 1};
    /* without keys lse is the sink, which may have a gradient */
    const bool of_lse = g->grad_lse.m.data || g->grad_lse_tangent.m.data;
    if (rows == 0 || (a->S == 0 && !(g->dsink_rows.m.data && of_lse))) {
        return SA_OK;
    }
    plan->large = sa_is_large(a, (ptrdiff_t)rows);
    plan->group = sa_group_size(a);
    plan->groups = (ptrdiff_t)heads / plan->group;
    plan->rows = plan->group * a->L;
    plan->blocks = sa_ceil_div(plan->rows, plan->block_rows);
    plan->key_ranges = count_ranges(plan->groups, sa_smaller(plan->rows, a->S));
    plan_rotation(g, plan);
    plan->delta_count = (ptrdiff_t)rows * (a->with_tangents ? 2 : 1);
    take(plan, (a->with_tangents ? kernels->hvp_scratch_bytes : kernels->backward_scratch)(g));
    const size_t gathered = gathered_bytes(g, plan);
    plan->gathered_at = gathered > 0 ? take(plan, gathered) : 0;
    plan->mask_sums_at =
        take(plan, sums_mask_in_scratch(g, plan) ? mask_sums_bytes(a) * (a->with_tangents ? 2 : 1) : 0);
    if (g->doffset_bias.m.data) {
        plan->diagonal_count = diagonal_count(g, plan) * (a->with_tangents ? 2 : 1);
    }
    const double work = (double)rows * (double)a->S * (double)(3 * a->E + 2 * a->Dv + 32) * sa_open_fraction(a);
    const double tasks = g->dmask.m.data && plan->mask_has_pass ? HUGE_VAL : (double)plan->tasks;
    plan->threads = sa_threads_for(work, SA_WORK_PER_THREAD, tasks, max_threads);
    plan->done_at =
        take(plan, plan->threads > 1 ? (size_t)sa_ceil_div(plan->tasks, plan->threads) * sizeof(ptrdiff_t) : 0);
    return SA_OK;
}

/* The rows of one gradient: in place, or one after the other in scratch. */
typedef struct {
    char *in_place, *together;
    ptrdiff_t stride, bytes; /* stride of the rows in place, and bytes of a row */
} gathered_rows;

/* Makes b add to gathered rows of keys `key` … `end` − 1. */
static void gather(const sa_backward_plan *plan, sa_backward_block *b, ptrdiff_t key, ptrdiff_t end, char *scratch,
                   gathered_rows rows[2]) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(a->f64);
    char *dkey = scratch + plan->gathered_at, *dvalue = dkey + sa_whole_lines((size_t)((end - key) * a->E * size));
    rows[0] = (gathered_rows){b->dkey, dkey, b->dkey_stride * size, a->E * size};
    rows[1] = (gathered_rows){b->dvalue, dvalue, b->dvalue_stride * size, a->Dv * size};
    b->dkey = b->dkey ? dkey : NULL;
    b->dvalue = b->dvalue ? dvalue : NULL;
    b->dkey_stride = a->E;
    b->dvalue_stride = a->Dv;
    b->first_key = key;
}

enum { TOGETHER, BACK };
static void move_gathered(const gathered_rows rows[2], ptrdiff_t key, ptrdiff_t n, bool back) {
    for (int i = 0; i < 2; ++i) {
        for (ptrdiff_t r = 0; rows[i].in_place && r < n; ++r) {
            char *here = rows[i].together + r * rows[i].bytes, *there = rows[i].in_place + (key + r) * rows[i].stride;
            memcpy(back ? there : here, back ? here : there, (size_t)rows[i].bytes);
        }
    }
}

static void describe_backward_block(const sa_attention_gradients *g, ptrdiff_t G, ptrdiff_t group, ptrdiff_t from,
                                    ptrdiff_t most, sa_rows *rows, sa_row_gradients *grads, sa_backward_block *b) {
    const sa_attention *a = g->a;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(a->f64);
    *b = (sa_backward_block){.g = g,
                             .grads = grads,
                             .with_mask = g->dmask.m.data != NULL,
                             .dmask_tangent = g->dmask_tangent,
                             .cancelled = sa_cancelled};
    sa_describe_block(a, G, group, from, most, rows, &b->b);
    b->dkey_stride = g->dkey.m.row_stride / size;
    b->dvalue_stride = g->dvalue.m.row_stride / size;
    if (g->dkey.m.data) {
        b->dkey = g->dkey.m.data + sa_lead_offset(a, &g->dkey, group * G, a->gqa);
    }
    if (g->dvalue.m.data) {
        b->dvalue = g->dvalue.m.data + sa_lead_offset(a, &g->dvalue, group * G, a->gqa);
    }
    for (int first = 0; first < rows->count && first < G; ++first) {
        const ptrdiff_t head = group * G + (from + first) % G;
        const char *grad_out = sa_at_head(a, &g->grad_out, head), *grad_lse = sa_at_head(a, &g->grad_lse, head);
        const char *out_tangent = sa_at_head(a, &g->grad_out_tangent, head),
                   *lse_tangent = sa_at_head(a, &g->grad_lse_tangent, head);
        char *dquery = sa_at_head(a, &g->dquery, head), *dmask = sa_at_head(a, &g->dmask, head);
        char *dslope = sa_at_head(a, &g->dslope_rows, head), *dsink = sa_at_head(a, &g->dsink_rows, head);
        for (ptrdiff_t r = first; r < rows->count; r += G) {
            const ptrdiff_t i = rows->index[r];
            grads->grad_out[r] = grad_out ? grad_out + i * g->grad_out.m.row_stride : NULL;
            grads->grad_lse[r] = grad_lse ? grad_lse + i * g->grad_lse.m.row_stride : NULL;
            if (a->with_tangents) {
                grads->grad_out_tangent[r] = out_tangent ? out_tangent + i * g->grad_out_tangent.m.row_stride : NULL;
                grads->grad_lse_tangent[r] = lse_tangent ? lse_tangent + i * g->grad_lse_tangent.m.row_stride : NULL;
            }
            grads->dquery[r] = dquery ? dquery + i * g->dquery.m.row_stride : NULL;
            grads->dmask[r] = dmask ? dmask + i * g->dmask.m.row_stride : NULL;
            grads->dslope[r] = dslope ? dslope + i * g->dslope_rows.m.row_stride : NULL;
            grads->dsink[r] = dsink ? dsink + i * g->dsink_rows.m.row_stride : NULL;
            grads->delta[r] = (char *)g->delta + (head * a->L + i) * size * (a->with_tangents ? 2 : 1);
        }
    }
}

/* Narrows a block to keys from … to − 1; if the block has gaps, it begins at the first key that a row sees. */
static void keep_keys(sa_block *b, ptrdiff_t from, ptrdiff_t to) {
    b->begin = sa_larger(b->begin, from);
    b->end = sa_smaller(b->end, to);
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
    describe_backward_block(g, plan->group, t / plan->blocks, t % plan->blocks * plan->block_rows, plan->block_rows,
                            &rows, &grads, &b);
    const sa_real_kernels *kernels = sa_kernels_for(g->a->f64);
    (g->a->with_tangents ? kernels->attention_hvp_delta : kernels->attention_delta)(&b, scratch);
}

static bool wants_rows_or_keys(const sa_attention_gradients *g) {
    return g->dquery.m.data || g->dkey.m.data || g->dvalue.m.data || g->dslope_rows.m.data || g->doffset_bias.m.data;
}

/* Blocks must end at the same rows in all groups that take turns,
 * so that no two groups add to the same rows of the mask. */
static sa_stretches stretches_of(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t group) {
    bool alike = plan->grain_blocks == 1;
    for (int m = 0; m < g->a->block_mask_count; ++m) {
        for (int axis = 0; axis < g->a->n_lead; ++axis) {
            alike &= g->a->block_masks[m].classes.lead_stride[axis] == 0;
        }
    }
    return plan->mask_groups == 1 || alike ? sa_find_stretches(g->a, plan->group, group) : (sa_stretches){.mask = NULL};
}

typedef struct {
    ptrdiff_t group, key, end;
    sa_stretches stretches;
    bool held;             /* scratch has the task's gathered gradients */
    ptrdiff_t copied_from; /* the first copied key in scratch */
    gathered_rows gathered[2];
    const ptrdiff_t *ahead; /* rows that the group before has done; NULL: the task need not wait */
    ptrdiff_t *done;
} range_state;

static void run_kernel(const sa_backward_block *b, char *scratch) {
    const sa_real_kernels *kernels = sa_kernels_for(b->g->a->f64);
    (b->g->a->with_tangents ? kernels->attention_hvp : kernels->attention_backward)(b, scratch);
}

/* Works on a block's keys in pieces, so that few rows with a million keys notice Ctrl-C. Kernels copy whole tiles from
 * copied_from on, so all pieces but the first begin with a tile; with gaps tiles begin anywhere. */
static void work_on_keys(sa_backward_block *b, char *scratch) {
    const sa_attention *a = b->g->a;
    const ptrdiff_t tiles = SA_ELEMENTS_AT_ONCE / SA_KEYS_PER_TILE / sa_larger(a->E + a->Dv, 1);
    const ptrdiff_t at_once = sa_larger(tiles, 1) * SA_KEYS_PER_TILE, end = b->b.end;
    const ptrdiff_t into_tile = b->b.rows->gaps > 0 ? 0 : (b->b.begin - b->b.copied_from) % SA_KEYS_PER_TILE;
    for (ptrdiff_t next, key = b->b.begin; key < end && !sa_cancelled(a); key = next) {
        sa_backward_block some = *b;
        next = key + at_once - (key == b->b.begin ? into_tile : 0);
        keep_keys(&some.b, key, sa_smaller(next, end));
        if (some.b.begin < some.b.end) {
            run_kernel(&some, scratch);
            b->b.holds_copies = true;
        }
    }
}

/* Row i of a head adds key j to element j − i + L − 1, where j counts from the task's first key. */
static void point_to_diagonals(const sa_backward_plan *plan, const range_state *at, sa_backward_block *b) {
    const sa_attention *a = b->g->a;
    const sa_rows *rows = b->b.rows;
    b->first_diagonal = at->key;
    b->diagonal_tangent = diagonal_count(b->g, plan) * (ptrdiff_t)sa_element_size(a->f64);
    for (int r = 0; r < rows->count; ++r) {
        const ptrdiff_t head = (ptrdiff_t)rows->head[r] - a->first_head, before = a->L - 1 - rows->index[r];
        b->grads->diagonals[r] =
            task_diagonals(b->g, plan, head, at->key / plan->range_keys) + before * (ptrdiff_t)sa_element_size(a->f64);
    }
}

/* first_key is the first of the stretch. fresh: no turn has added to these keys yet. */
static void work_on_block(const sa_attention_gradients *g, const sa_backward_plan *plan, range_state *at,
                          ptrdiff_t from, ptrdiff_t until, ptrdiff_t first_key, bool fresh, char *scratch) {
    sa_rows rows;
    sa_row_gradients grads;
    sa_backward_block b;
    describe_backward_block(g, plan->group, at->group, from, until - from, &rows, &grads, &b);
    b.with_mask &= !plan->mask_has_pass;
    b.mask_only = !wants_rows_or_keys(g);
    if (g->doffset_bias.m.data) {
        point_to_diagonals(plan, at, &b);
    }
    keep_keys(&b.b, at->key, at->end);
    b.b.copied_from = sa_smaller(sa_larger(sa_tiles_from(g->a, first_key), at->key), b.b.begin);
    b.b.holds_copies = at->copied_from == b.b.copied_from;
    b.b.fetches = plan->large && fresh && !b.b.holds_copies;
    if (b.b.begin >= b.b.end || sa_cancelled(g->a)) {
        return;
    }
    if (plan->gathered_at > 0) {
        gather(plan, &b, at->key, at->end, scratch, at->gathered);
        if (!at->held) {
            move_gathered(at->gathered, at->key, at->end - at->key, TOGETHER);
        }
    }
    at->held = true;
    at->copied_from = b.b.copied_from;
    work_on_keys(&b, scratch);
}

static void work_on_row_range(const sa_attention_gradients *g, const sa_backward_plan *plan, range_state *at,
                              ptrdiff_t range, bool fresh, char *scratch) {
    const ptrdiff_t most = plan->block_rows, end = sa_smaller(first_block(plan, range + 1) * most, plan->rows);
    ptrdiff_t first_key, until, from = first_block(plan, range) * most;
    for (; (from = sa_block_begin(&at->stretches, from, most, plan->rows, &first_key)) < end; from = until) {
        until = sa_block_end(&at->stretches, from, sa_smaller(from + most, plan->rows));
        const sa_run keys = sa_block_keys(&at->stretches, from, until, g->a->S);
        if (at->ahead) { /* the count includes all heads that share the mask row */
            sa_wait_for(at->ahead, sa_smaller(sa_ceil_div(until, plan->group) * plan->group, plan->rows));
        }
        if (keys.lo < at->end && keys.hi > at->key) {
            work_on_block(g, plan, at, from, until, first_key, fresh, scratch);
        }
        if (at->done) {
            sa_raise(at->done, until);
        }
    }
}

/* The task works on key range c = t mod N of the group of rank k = t / N mod K, where K groups work together. */
void sa_backward_range_task(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t turn, ptrdiff_t t,
                            char *scratch, const ptrdiff_t *ahead, ptrdiff_t *done) {
    const ptrdiff_t c = t % plan->key_ranges, k = t / plan->key_ranges % plan->together;
    const ptrdiff_t owner = t / plan->key_ranges / plan->together;
    ptrdiff_t rank = k, begun = turn - (g->only_turns ? k : 0);
    if (!plan->follow) {
        rank += turn * plan->turns_at_once / plan->row_ranges * plan->together;
        begun = turn % plan->row_ranges;
    }
    if (rank >= plan->mask_groups || begun < 0 || begun >= plan->row_ranges) { /* in this turn another group works */
        return;
    }
    range_state at = {.group = group_of(g, plan, owner, rank),
                      .key = c * plan->range_keys,
                      .copied_from = -1,
                      .ahead = ahead,
                      .done = done};
    at.end = sa_smaller(at.key + plan->range_keys, g->a->S);
    at.stretches = stretches_of(g, plan, at.group);
    for (ptrdiff_t i = 0; i < plan->turns_at_once; ++i) {
        const ptrdiff_t range = plan->follow ? begun : (rank + c + turn + i) % plan->row_ranges;
        work_on_row_range(g, plan, &at, range, begun == 0, scratch);
    }
    if (at.held && plan->gathered_at > 0) {
        move_gathered(at.gathered, at.key, at.end - at.key, BACK);
    }
}

ptrdiff_t sa_backward_range_tasks(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    return wants_rows_or_keys(g) || (g->dmask.m.data && !plan->mask_has_pass) ? plan->tasks : 0;
}

/* ---- a separate pass for a mask's gradient ----------------------------------------------------------------------- */

sa_mask_plan sa_plan_mask(const sa_attention_gradients *g, const sa_backward_plan *plan) {
    const sa_attention *a = g->a;
    if (!g->dmask.m.data || !plan->mask_has_pass) {
        return (sa_mask_plan){0};
    }
    sa_mask_plan m = {.owners = 1, .key_ranges = 1, .range_keys = a->S, .heads = 1};
    for (int axis = 0; axis < a->n_lead; ++axis) {
        m.heads *= a->lead[axis];
        m.owners *= g->dmask.lead_stride[axis] != 0 ? a->lead[axis] : 1;
    }
    if (g->dmask.m.col_stride != 0) {
        m.range_keys = SA_MASK_KEYS;
        m.key_ranges = sa_ceil_div(a->S, m.range_keys);
    }
    m.tasks = m.owners * m.key_ranges;
    return m;
}

/* True if a head adds to the elements of `owner`. */
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

static void add_sums(const sa_attention *a, char *to, const char *from, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n && a->f64; ++i) {
        ((double *)(void *)to)[i] += ((const double *)(const void *)from)[i];
    }
    for (ptrdiff_t i = 0; i < n && !a->f64; ++i) {
        ((float *)(void *)to)[i] += ((const float *)(const void *)from)[i];
    }
}

/* Adds all rows of one head to elements from key `key` on. */
static void mask_of_head(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t head, ptrdiff_t key,
                         ptrdiff_t end, char *scratch) {
    const sa_attention *a = g->a;
    const ptrdiff_t stride = g->dmask.m.col_stride, elements = stride != 0 ? end - key : 1;
    const bool in_scratch = sums_mask_in_scratch(g, plan);
    char *sums = scratch + plan->mask_sums_at;
    bool held = false; /* scratch has this head's copied keys */
    ptrdiff_t summed = 0;
    for (ptrdiff_t row = 0; row < a->L && !sa_cancelled(a); row += plan->block_rows) {
        sa_rows rows;
        sa_row_gradients grads;
        sa_backward_block b;
        describe_backward_block(g, 1, head, row, plan->block_rows, &rows, &grads, &b);
        char *to = grads.dmask[0] + key * stride;
        for (int which = 0; in_scratch && summed == 0 && which <= a->with_tangents; ++which) {
            memset(sums + which * mask_sums_bytes(a), 0, (size_t)elements * sa_element_size(a->f64));
        }
        b.dmask_tangent = in_scratch ? (ptrdiff_t)mask_sums_bytes(a) : g->dmask_tangent;
        for (int r = 0; r < rows.count && in_scratch; ++r) {
            grads.dmask[r] = sums;
        }
        b.dmask_key = in_scratch ? key : 0;
        b.mask_only = true;
        keep_keys(&b.b, key, end);
        b.b.copied_from = key;
        b.b.holds_copies = held;
        if (b.b.begin < b.b.end) {
            held = true;
            run_kernel(&b, scratch);
        }
        if (in_scratch && (++summed == SA_BLOCKS_IN_A_SUM || row + plan->block_rows >= a->L)) {
            add_sums(a, to, sums, elements);
            if (a->with_tangents) {
                add_sums(a, to + g->dmask_tangent, sums + mask_sums_bytes(a), elements);
            }
            summed = 0;
        }
    }
}

void sa_backward_mask_task(const sa_attention_gradients *g, const sa_backward_plan *plan, const sa_mask_plan *m,
                           ptrdiff_t t, char *scratch) {
    const ptrdiff_t owner = t / m->key_ranges, key = t % m->key_ranges * m->range_keys,
                    end = sa_smaller(key + m->range_keys, g->a->S);
    for (ptrdiff_t head = 0; head < m->heads; ++head) {
        if (owns(g, owner, head)) {
            mask_of_head(g, plan, head, key, end, scratch);
        }
    }
}
/* ---- the gradient of offset_bias --------------------------------------------------------------------------------- */

/* Adds up the sums of a head's tasks, in the order of their keys. */
static void diagonals_of_head(const sa_attention_gradients *g, const sa_backward_plan *plan, ptrdiff_t head) {
    const sa_attention *a = g->a;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(a->f64), all = a->L + a->S - 1,
                    heads = plan->groups * plan->group;
    for (ptrdiff_t which = 0; which < (a->with_tangents ? 2 : 1); ++which) {
        char *to = g->doffset_bias.m.data + (which * heads + head) * all * size;
        for (ptrdiff_t range = 0, key = 0; key < a->S; ++range, key += plan->range_keys) {
            add_sums(a, to + key * size, task_diagonals(g, plan, head, range) + which * diagonal_count(g, plan) * size,
                     sa_smaller(diagonals_of(g, plan), all - key));
        }
    }
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const sa_attention_gradients *g;
    const sa_backward_plan *plan;
    sa_mask_plan mask;
    char *scratch;
    ptrdiff_t tasks, taken; /* tasks of a turn; how many tasks of all turns are taken */
} backward_run;

typedef struct {
    backward_run *run;
    char *scratch;
} backward_thread;

static void delta_task(void *call, ptrdiff_t t) {
    const backward_thread *at = call;
    sa_backward_delta_task(at->run->g, at->run->plan, t, at->scratch);
}

static void diagonals_task(void *call, ptrdiff_t head) {
    const backward_thread *at = call;
    diagonals_of_head(at->run->g, at->run->plan, head);
}

static void mask_task(void *call, ptrdiff_t t) {
    const backward_thread *at = call;
    sa_backward_mask_task(at->run->g, at->run->plan, &at->run->mask, t, at->scratch);
}

/* How many turns, or rows, task t has done. Neighbours' counts are on different cache lines. */
static ptrdiff_t *done_of(const backward_run *run, ptrdiff_t t) {
    const sa_backward_plan *plan = run->plan;
    char *counts = run->scratch + (size_t)(t % plan->threads) * plan->scratch_bytes + plan->done_at;
    return (ptrdiff_t *)(void *)counts + t / plan->threads;
}

/* Waits for the tasks before task t, even if task t has no work, as others rely on that. */
static void task_in_order(const backward_run *run, ptrdiff_t turn, ptrdiff_t t, char *scratch) {
    const sa_backward_plan *plan = run->plan;
    const ptrdiff_t N = plan->key_ranges, K = plan->together, c = t % N, k = t / N % K, first = t / N / K * K;
    const bool with_mask = run->g->dmask.m.data != NULL;
    if (plan->follow) {
        sa_backward_range_task(run->g, plan, turn, t, scratch, with_mask && k > 0 ? done_of(run, t - 1) : NULL,
                               done_of(run, t));
        sa_raise(done_of(run, t), plan->rows); /* some blocks may have no keys here */
        return;
    }
    sa_wait_for(done_of(run, t), turn);
    sa_wait_for(done_of(run, (first + k) * N + (c + 1) % N), turn);
    sa_wait_for(done_of(run, (first + (k + 1) % K) * N + c), with_mask ? turn : 0);
    sa_backward_range_task(run->g, plan, turn, t, scratch, SA_NOT_COUNTED, SA_NOT_COUNTED);
    sa_raise(done_of(run, t), turn + 1);
}

static void run_tasks(void *call, int thread, int team) {
    backward_run *run = call;
    backward_thread at = {run, run->scratch + (size_t)thread * run->plan->scratch_bytes};
    /* Iterations are independent: a block writes its own rows' delta and sink gradients. */
    sa_take_tasks(team, run->plan->groups * run->plan->blocks, delta_task, &at);
    sa_wait_for_team(team);
    /* Writers of an element take turns. A counter numbers tasks: a shared loop could give a thread later tasks
     * first. */
    for (ptrdiff_t i; (i = __atomic_fetch_add(&run->taken, 1, __ATOMIC_RELAXED)) < run->plan->turns * run->tasks;) {
        const ptrdiff_t turn = i / run->tasks, t = i % run->tasks;
        sa_let_others_take();
        if (run->plan->threads > 1) {
            task_in_order(run, turn, t, at.scratch);
        } else {
            sa_backward_range_task(run->g, run->plan, turn, t, at.scratch, SA_NOT_COUNTED, SA_NOT_COUNTED);
        }
    }
    /* Iterations are independent: a task owns its elements of the mask. */
    sa_take_tasks(team, run->mask.tasks, mask_task, &at);
    if (run->g->doffset_bias.m.data) {
        sa_wait_for_team(team);
        /* Iterations are independent: a head's gradient is its own. */
        sa_take_tasks(team, run->plan->groups * run->plan->group, diagonals_task, &at);
    }
}

sa_status sa_attention_backward(const sa_attention_gradients *g, const sa_backward_plan *plan, void *scratch) {
    backward_run run = {g, plan, sa_plan_mask(g, plan), scratch, sa_backward_range_tasks(g, plan), 0};
    if (plan->diagonal_count > 0) {
        memset(g->diagonals, 0, (size_t)plan->diagonal_count * sa_element_size(g->a->f64));
    }
    for (ptrdiff_t t = 0; t < run.tasks && plan->threads > 1; ++t) {
        *done_of(&run, t) = 0;
    }
    sa_run_team(plan->threads, run_tasks, &run);
    return sa_cancelled(g->a) ? SA_CANCELLED : SA_OK;
}
