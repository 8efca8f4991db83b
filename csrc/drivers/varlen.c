/* Driver of attention over ragged batches, forward and backward. A thread holds a copy of the call's description, set to one
 * sequence at a time: from there on that sequence is an ordinary call, and its tasks are those of attention.c and
 * attention_backward.c. All sequences' tasks make one list, sequences with the dearest tasks first, from which the threads
 * help themselves: no padding, and what is left for the end is cheap. */
#include "drivers/varlen.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <stdlib.h>

#include "drivers/attention.h"
#include "runtime/threads.h"

/* ---- one sequence ----------------------------------------------------------------------------------------------------- */

static ptrdiff_t begin(const int64_t *offsets, ptrdiff_t s) { return (ptrdiff_t)offsets[s]; }

static void move_rows(sa_tensor *t, const sa_tensor *packed, ptrdiff_t rows) {
    if (packed->m.data) {
        t->m.data = packed->m.data + rows * packed->m.row_stride;
    }
}

/* Makes *a, a copy of v->packed, describe sequence s. */
static void set_to_sequence(const sa_varlen *v, ptrdiff_t s, sa_attention *a) {
    const sa_attention *p = v->packed;
    const ptrdiff_t row = begin(v->begin_q, s), key = begin(v->begin_k, s);
    a->lead[0] = 1;
    a->L = begin(v->begin_q, s + 1) - row;
    a->S = begin(v->begin_k, s + 1) - key;
    a->diagonal = v->lower_right ? a->S - a->L : 0;
    a->first_head = s * p->lead[1];
    move_rows(&a->query, &p->query, row);
    move_rows(&a->key, &p->key, key);
    move_rows(&a->value, &p->value, key);
    move_rows(&a->out, &p->out, row);
    move_rows(&a->lse, &p->lse, row);
    move_rows(&a->stats, &p->stats, row);
    if (p->alibi.m.data) {
        a->alibi.m.data = p->alibi.m.data + s * p->alibi.lead_stride[0];
    }
    if (p->sinks.m.data) {
        a->sinks.m.data = p->sinks.m.data + s * p->sinks.lead_stride[0];
    }
    if (v->masks) {
        a->mask = v->masks[s];
    }
}

/* The same for the gradients, whose g->a is the copy above. */
static void set_gradients_to_sequence(const sa_varlen_gradients *vg, ptrdiff_t s, sa_attention_gradients *g) {
    const sa_attention_gradients *p = vg->packed;
    const ptrdiff_t row = begin(vg->v->begin_q, s), key = begin(vg->v->begin_k, s);
    const ptrdiff_t size = g->a->f64 ? sizeof(double) : sizeof(float);
    move_rows(&g->grad_out, &p->grad_out, row);
    move_rows(&g->grad_lse, &p->grad_lse, row);
    move_rows(&g->dquery, &p->dquery, row);
    move_rows(&g->dkey, &p->dkey, key);
    move_rows(&g->dvalue, &p->dvalue, key);
    move_rows(&g->dslope_rows, &p->dslope_rows, row);
    move_rows(&g->dsink_rows, &p->dsink_rows, row);
    if (p->delta) {
        g->delta = (char *)p->delta + row * g->a->lead[1] * size;
    }
    if (vg->dmasks) {
        g->dmask = vg->dmasks[s];
    }
    g->only_steps = true;
}

/* ---- the order of work -------------------------------------------------------------------------------------------------- */

/* More steps first, so that the sequences of each step of the rotation are the first ones; then the dearest tasks. */
static int compare_items(const void *x, const void *y) {
    const sa_varlen_item *a = x, *b = y;
    if (a->steps != b->steps) {
        return a->steps > b->steps ? -1 : 1;
    }
    if (a->cost != b->cost) {
        return a->cost > b->cost ? -1 : 1;
    }
    return a->sequence < b->sequence ? -1 : 1;
}

/* Sorts the items, whose `before` and `partial` hold their own counts, and adds those up. */
static bool put_in_order(sa_varlen_plan *plan, ptrdiff_t n) {
    qsort(plan->items, (size_t)n, sizeof *plan->items, compare_items);
    for (ptrdiff_t i = 0; i < n; ++i) {
        sa_varlen_item *item = &plan->items[i];
        for (int kind = 0; kind < 3; ++kind) {
            const ptrdiff_t own = item->before[kind];
            item->before[kind] = plan->tasks[kind];
            if (__builtin_add_overflow(plan->tasks[kind], own, &plan->tasks[kind])) {
                return false;
            }
        }
        const size_t own = item->partial;
        item->partial = plan->partial_bytes;
        if (__builtin_add_overflow(plan->partial_bytes, own, &plan->partial_bytes)) {
            return false;
        }
    }
    return true;
}

/* The item whose task of this kind number t is: the last one with no more than t before it. */
static const sa_varlen_item *item_of(const sa_varlen_plan *plan, ptrdiff_t n, int kind, ptrdiff_t t) {
    ptrdiff_t first = 0, end = n;
    while (end - first > 1) {
        const ptrdiff_t middle = first + (end - first) / 2;
        if (plan->items[middle].before[kind] <= t) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return &plan->items[first];
}

static int threads_for(double work, double tasks, int max_threads) {
    double threads = work / SA_WORK_PER_THREAD;
    threads = threads < tasks ? threads : tasks;
    return threads < max_threads ? (threads < 1 ? 1 : (int)threads) : max_threads;
}

static double smaller(double a, double b) { return a < b ? a : b; }

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

sa_status sa_varlen_make_plan(const sa_varlen *v, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan) {
    sa_attention a = *v->packed;
    double work = 0;
    ptrdiff_t all_rows = 0; /* no more than packed rows */
    *plan = (sa_varlen_plan){.items = items};
    for (ptrdiff_t s = 0; s < v->sequences; ++s) {
        sa_attention_plan own;
        set_to_sequence(v, s, &a);
        const sa_status status = sa_attention_make_plan(&a, 1, &own);
        if (status != SA_OK) {
            return status;
        }
        const ptrdiff_t merges = own.chunks > 1 ? own.groups * own.blocks : 0;
        const double rows = smaller((double)own.rows, (double)own.block_rows);
        items[s] = (sa_varlen_item){.sequence = s,
                                    .before = {own.tasks, merges, 0},
                                    .partial = (own.partial_bytes + 63) / 64 * 64,
                                    .cost = rows * smaller((double)a.S, (double)own.chunk_keys)};
        plan->scratch_bytes = own.scratch_bytes > plan->scratch_bytes ? own.scratch_bytes : plan->scratch_bytes;
        work += (double)own.groups * (double)own.rows * (double)a.S * (double)(a.E + a.Dv + 16);
        all_rows += own.groups * own.rows;
    }
    if (!put_in_order(plan, v->sequences)) {
        return SA_TOO_LARGE;
    }
    plan->large = sa_is_large(v->packed, all_rows);
    plan->threads = threads_for(work, (double)plan->tasks[0], max_threads);
    return SA_OK;
}

/* What a thread is at: tasks of one sequence follow one another, so it is set anew seldom. */
typedef struct {
    sa_attention a;
    sa_attention_plan plan;
    ptrdiff_t sequence;
    sa_held held;
} forward_state;

static void forward_task(const sa_varlen *v, const sa_varlen_plan *plan, forward_state *at, int kind, ptrdiff_t t,
                         char *scratch, char *partial) {
    if (sa_cancelled(v->packed)) {
        return;
    }
    const sa_varlen_item *item = item_of(plan, v->sequences, kind, t);
    if (item->sequence != at->sequence) {
        at->sequence = item->sequence;
        at->held = (sa_held){.keys = -1};
        set_to_sequence(v, item->sequence, &at->a);
        sa_attention_make_plan(&at->a, 1, &at->plan); /* went well before */
        at->plan.large = plan->large;
    }
    if (kind == 0) {
        sa_attention_task(&at->a, &at->plan, t - item->before[0], scratch, partial + item->partial, &at->held);
    } else {
        sa_attention_merge_task(&at->a, &at->plan, t - item->before[1], scratch, partial + item->partial);
    }
}

sa_status sa_varlen_forward(const sa_varlen *v, const sa_varlen_plan *plan, void *scratch, void *partial) {
#if defined(_OPENMP)
    if (plan->threads > 1) {
        sa_region_enter();
#pragma omp parallel num_threads(plan->threads)
        {
            char *mine = (char *)scratch + (size_t)omp_get_thread_num() * plan->scratch_bytes;
            forward_state at = {.a = *v->packed, .sequence = -1};
            for (int kind = 0; kind < 2; ++kind) {
                /* Independent: a task writes its own rows, or its own partial result, and a merge its own rows; all partial
                 * results are finished before the first merge. */
#pragma omp for schedule(dynamic, 1)
                for (ptrdiff_t t = 0; t < plan->tasks[kind]; ++t) {
                    forward_task(v, plan, &at, kind, t, mine, partial);
                }
            }
        }
        sa_region_leave();
        return sa_cancelled(v->packed) ? SA_CANCELLED : SA_OK;
    }
#endif
    forward_state at = {.a = *v->packed, .sequence = -1};
    for (int kind = 0; kind < 2; ++kind) {
        for (ptrdiff_t t = 0; t < plan->tasks[kind]; ++t) {
            forward_task(v, plan, &at, kind, t, scratch, partial);
        }
    }
    return sa_cancelled(v->packed) ? SA_CANCELLED : SA_OK;
}

/* ---- backward ----------------------------------------------------------------------------------------------------------- */

enum { DELTAS, PARTS, MASKS };

sa_status sa_varlen_plan_backward(const sa_varlen_gradients *vg, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan) {
    const sa_varlen *v = vg->v;
    sa_attention a = *v->packed;
    sa_attention_gradients g = *vg->packed;
    double work = 0;
    ptrdiff_t all_rows = 0;
    g.a = &a;
    *plan = (sa_varlen_plan){.items = items};
    for (ptrdiff_t s = 0; s < v->sequences; ++s) {
        sa_backward_plan own;
        set_to_sequence(v, s, &a);
        set_gradients_to_sequence(vg, s, &g);
        const sa_status status = sa_attention_plan_backward(&g, 1, &own);
        if (status != SA_OK) {
            return status;
        }
        const double at_once = (double)own.part_blocks * (double)own.steps_at_once * (double)own.block_rows;
        const double rows = smaller((double)own.rows, at_once);
        items[s] = (sa_varlen_item){
            .sequence = s,
            .steps = own.steps,
            .before = {own.groups * own.blocks, sa_backward_part_tasks(&g, &own), sa_plan_mask(&g, &own).tasks},
            .cost = rows * smaller((double)a.S, (double)own.part_keys)};
        plan->steps = own.steps > plan->steps ? own.steps : plan->steps;
        plan->scratch_bytes = own.scratch_bytes > plan->scratch_bytes ? own.scratch_bytes : plan->scratch_bytes;
        work += (double)own.groups * (double)own.rows * (double)a.S * (double)(3 * a.E + 2 * a.Dv + 32);
        all_rows += own.groups * own.rows;
    }
    if (!put_in_order(plan, v->sequences)) {
        return SA_TOO_LARGE;
    }
    const ptrdiff_t most = plan->tasks[PARTS] > plan->tasks[MASKS] ? plan->tasks[PARTS] : plan->tasks[MASKS];
    plan->large = sa_is_large(v->packed, all_rows);
    plan->threads = threads_for(work, (double)most, max_threads);
    return SA_OK;
}

typedef struct {
    sa_attention a;
    sa_attention_gradients g;
    sa_backward_plan plan;
    sa_mask_plan mask;
    ptrdiff_t sequence;
} backward_state;

static void backward_start(const sa_varlen_gradients *vg, backward_state *at) {
    at->a = *vg->v->packed;
    at->g = *vg->packed;
    at->g.a = &at->a;
    at->sequence = -1;
}

static void backward_task(const sa_varlen_gradients *vg, const sa_varlen_plan *plan, backward_state *at, int kind,
                          ptrdiff_t step, ptrdiff_t t, char *scratch) {
    const sa_varlen_item *item = item_of(plan, vg->v->sequences, kind, t);
    if (item->sequence != at->sequence) {
        at->sequence = item->sequence;
        set_to_sequence(vg->v, item->sequence, &at->a);
        set_gradients_to_sequence(vg, item->sequence, &at->g);
        sa_attention_plan_backward(&at->g, 1, &at->plan); /* went well before */
        at->plan.large = plan->large;
        at->mask = sa_plan_mask(&at->g, &at->plan);
    }
    t -= item->before[kind];
    switch (kind) {
    case DELTAS: sa_backward_delta_task(&at->g, &at->plan, t, scratch); break;
    case PARTS: sa_backward_part_task(&at->g, &at->plan, step, t, scratch); break;
    default: sa_backward_mask_task(&at->g, &at->plan, &at->mask, t, scratch); break;
    }
}

/* How many tasks step number `step` of the rotation has: those of the sequences with more steps, which come first. */
static ptrdiff_t tasks_of_step(const sa_varlen_plan *plan, ptrdiff_t n, ptrdiff_t step) {
    ptrdiff_t first = 0, end = n;
    while (first < end) {
        const ptrdiff_t middle = first + (end - first) / 2;
        if (plan->items[middle].steps > step) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return first == n ? plan->tasks[PARTS] : plan->items[first].before[PARTS];
}

sa_status sa_varlen_backward(const sa_varlen_gradients *vg, const sa_varlen_plan *plan, void *scratch) {
    const sa_attention *a = vg->v->packed;
    const ptrdiff_t n = vg->v->sequences;
#if defined(_OPENMP)
    if (plan->threads > 1) {
        sa_region_enter();
#pragma omp parallel num_threads(plan->threads)
        {
            char *mine = (char *)scratch + (size_t)omp_get_thread_num() * plan->scratch_bytes;
            backward_state at;
            backward_start(vg, &at);
            /* Independent, as in attention_backward.c: no two tasks of a sequence and step share what they write, and
             * sequences share nothing. */
#pragma omp for schedule(dynamic, 1)
            for (ptrdiff_t t = 0; t < plan->tasks[DELTAS]; ++t) {
                backward_task(vg, plan, &at, DELTAS, 0, t, mine);
            }
            for (ptrdiff_t step = 0; step < plan->steps; ++step) {
                const ptrdiff_t tasks = tasks_of_step(plan, n, step);
#pragma omp for schedule(dynamic, 1)
                for (ptrdiff_t t = 0; t < tasks; ++t) {
                    backward_task(vg, plan, &at, PARTS, step, t, mine);
                }
            }
#pragma omp for schedule(dynamic, 1)
            for (ptrdiff_t t = 0; t < plan->tasks[MASKS]; ++t) {
                backward_task(vg, plan, &at, MASKS, 0, t, mine);
            }
        }
        sa_region_leave();
        return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
    }
#endif
    backward_state at;
    backward_start(vg, &at);
    for (ptrdiff_t t = 0; t < plan->tasks[DELTAS]; ++t) {
        backward_task(vg, plan, &at, DELTAS, 0, t, scratch);
    }
    for (ptrdiff_t step = 0; step < plan->steps; ++step) {
        const ptrdiff_t tasks = tasks_of_step(plan, n, step);
        for (ptrdiff_t t = 0; t < tasks; ++t) {
            backward_task(vg, plan, &at, PARTS, step, t, scratch);
        }
    }
    for (ptrdiff_t t = 0; t < plan->tasks[MASKS]; ++t) {
        backward_task(vg, plan, &at, MASKS, 0, t, scratch);
    }
    return sa_cancelled(a) ? SA_CANCELLED : SA_OK;
}
