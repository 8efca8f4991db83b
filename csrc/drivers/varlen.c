/* Driver of attention over ragged batches. Each thread has a copy of the call, which is set to one sequence at a time:
 * an ordinary call, with the tasks of attention.c and attention_backward.c. Threads share one list of tasks, longest
 * first. */
#include "drivers/varlen.h"

#include <math.h>
#include <stdlib.h>

#include "drivers/attention.h"
#include "runtime/team.h"

static ptrdiff_t begin(const int64_t *offsets, ptrdiff_t s) { return (ptrdiff_t)offsets[s]; }

static void move_rows(sa_tensor *t, const sa_tensor *packed, ptrdiff_t rows) {
    if (packed->m.data) {
        t->m.data = packed->m.data + rows * packed->m.row_stride;
    }
}

/* Makes *a, a copy of v->packed, the call of sequence s. */
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

/* The same for gradients; g->a is the copy. */
static void set_gradients_to_sequence(const sa_varlen_gradients *vg, ptrdiff_t s, sa_attention_gradients *g) {
    const sa_attention_gradients *p = vg->packed;
    const ptrdiff_t row = begin(vg->v->begin_q, s), key = begin(vg->v->begin_k, s);
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(g->a->f64);
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
    g->only_turns = true;
}

/* Sequences with more turns come first, so the first sequences are those of a turn.
 * Among equals, longer tasks come first. */
static int compare_items(const void *x, const void *y) {
    const sa_varlen_item *a = x, *b = y;
    const double order[] = {(double)(b->turns - a->turns), b->cost - a->cost, (double)(a->sequence - b->sequence)};
    const double first = order[0] != 0 ? order[0] : order[1] != 0 ? order[1] : order[2];
    return first < 0 ? -1 : first > 0;
}

/* Sorts items, sums up their counts, and chooses threads for the tasks of kinds from `kind` on. */
static sa_status finish(sa_varlen_plan *plan, const sa_varlen *v, double work, ptrdiff_t rows, int kind,
                        int max_threads) {
    bool too_large = false;
    qsort(plan->items, (size_t)v->sequences, sizeof *plan->items, compare_items);
    for (ptrdiff_t i = 0; i < v->sequences; ++i) {
        sa_varlen_item *item = &plan->items[i];
        const sa_varlen_item own = *item;
        for (int k = 0; k < 3; ++k) {
            item->before[k] = plan->tasks[k];
            too_large |= __builtin_add_overflow(plan->tasks[k], own.before[k], &plan->tasks[k]);
        }
        item->partial = plan->partial_bytes;
        too_large |= __builtin_add_overflow(plan->partial_bytes, own.partial, &plan->partial_bytes);
    }
    ptrdiff_t most = 0;
    for (; kind < 3; ++kind) {
        most = sa_larger(most, plan->tasks[kind]);
    }
    plan->large = sa_is_large(v->packed, rows);
    plan->threads = sa_threads_for(work, SA_WORK_PER_THREAD, (double)most, max_threads);
    return too_large ? SA_TOO_LARGE : SA_OK;
}

/* The kinds of tasks that plans count. */
enum { BLOCKS, MERGES };
enum { DELTAS, RANGES, MASKS };

sa_status sa_varlen_make_plan(const sa_varlen *v, int max_threads, sa_varlen_item *items, sa_varlen_plan *plan) {
    sa_attention a = *v->packed;
    double work = 0;
    ptrdiff_t all_rows = 0;
    *plan = (sa_varlen_plan){.items = items};
    for (ptrdiff_t s = 0; s < v->sequences; ++s) {
        sa_attention_plan own;
        set_to_sequence(v, s, &a);
        const sa_status status = sa_attention_make_plan(&a, 1, &own);
        if (status != SA_OK) {
            return status;
        }
        const ptrdiff_t merges = own.chunks > 1 ? own.groups * own.blocks : 0;
        const double rows = fmin((double)own.rows, (double)own.block_rows);
        items[s] = (sa_varlen_item){.sequence = s,
                                    .before = {own.tasks, merges, 0},
                                    .partial = sa_whole_lines(own.partial_bytes),
                                    .cost = rows * fmin((double)a.S, (double)own.chunk_keys)};
        plan->scratch_bytes = sa_most(plan->scratch_bytes, own.scratch_bytes);
        work += (double)own.groups * (double)own.rows * (double)a.S * (double)(a.E + a.Dv + 16);
        all_rows += own.groups * own.rows;
    }
    return finish(plan, v, work, all_rows, BLOCKS, max_threads);
}

sa_status sa_varlen_plan_backward(const sa_varlen_gradients *vg, int max_threads, sa_varlen_item *items,
                                  sa_varlen_plan *plan) {
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
        const double at_once = (double)own.range_blocks * (double)own.turns_at_once * (double)own.block_rows;
        const double rows = fmin((double)own.rows, at_once);
        items[s] = (sa_varlen_item){
            .sequence = s,
            .turns = own.turns,
            .before = {own.groups * own.blocks, sa_backward_range_tasks(&g, &own), sa_plan_mask(&g, &own).tasks},
            .cost = rows * fmin((double)a.S, (double)own.range_keys)};
        plan->turns = sa_larger(plan->turns, own.turns);
        plan->scratch_bytes = sa_most(plan->scratch_bytes, own.scratch_bytes);
        work += (double)own.groups * (double)own.rows * (double)a.S * (double)(3 * a.E + 2 * a.Dv + 32);
        all_rows += own.groups * own.rows;
    }
    return finish(plan, v, work, all_rows, RANGES, max_threads);
}

typedef struct {
    const sa_varlen *v;
    const sa_varlen_gradients *vg; /* NULL in a forward call */
    const sa_varlen_plan *plan;
    char *scratch, *partial;
} varlen_run;

/* A thread's copy of the call. The copy seldom changes, because tasks of a sequence follow one another. */
typedef struct {
    const varlen_run *run;
    char *scratch;
    int kind;
    ptrdiff_t turn, sequence;
    sa_attention a;
    sa_attention_plan plan;
    sa_held held;
    sa_attention_gradients g;
    sa_backward_plan backward;
    sa_mask_plan mask;
} varlen_thread;

/* These plans cannot fail, as they succeeded before. */
static void begin_sequence(varlen_thread *at, ptrdiff_t sequence) {
    const varlen_run *run = at->run;
    at->sequence = sequence;
    set_to_sequence(run->v, sequence, &at->a);
    if (run->vg) {
        set_gradients_to_sequence(run->vg, sequence, &at->g);
        sa_attention_plan_backward(&at->g, 1, &at->backward);
        at->backward.large = run->plan->large;
        at->mask = sa_plan_mask(&at->g, &at->backward);
    } else {
        at->held = (sa_held){.chunk = -1};
        sa_attention_make_plan(&at->a, 1, &at->plan);
        at->plan.large = run->plan->large;
    }
}

static void forward_task(varlen_thread *at, ptrdiff_t t, char *partial) {
    if (at->kind == BLOCKS) {
        sa_attention_task(&at->a, &at->plan, t, at->scratch, partial, &at->held);
    } else {
        sa_attention_merge_task(&at->a, &at->plan, t, at->scratch, partial);
    }
}

static void backward_task(const varlen_thread *at, ptrdiff_t t) {
    switch (at->kind) {
    case DELTAS: sa_backward_delta_task(&at->g, &at->backward, t, at->scratch); break;
    case RANGES:
        sa_backward_range_task(&at->g, &at->backward, at->turn, t, at->scratch, SA_NOT_COUNTED, SA_NOT_COUNTED);
        break;
    default: sa_backward_mask_task(&at->g, &at->backward, &at->mask, t, at->scratch); break;
    }
}

/* The item of task t: the last item that has at most t tasks before it. */
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

static void run_task(void *call, ptrdiff_t t) {
    varlen_thread *at = call;
    const varlen_run *run = at->run;
    if (sa_cancelled(run->v->packed)) {
        return;
    }
    const sa_varlen_item *item = item_of(run->plan, run->v->sequences, at->kind, t);
    if (item->sequence != at->sequence) {
        begin_sequence(at, item->sequence);
    }
    t -= item->before[at->kind];
    if (run->vg) {
        backward_task(at, t);
    } else {
        forward_task(at, t, run->partial + item->partial);
    }
}

static void run_kind(varlen_thread *at, int team, int kind, ptrdiff_t tasks) {
    at->kind = kind;
    sa_take_tasks(team, tasks, run_task, at);
    sa_wait_for_team(team);
}

/* The number of tasks of a turn: only sequences with more turns have some. */
static ptrdiff_t tasks_of_turn(const sa_varlen_plan *plan, ptrdiff_t n, ptrdiff_t turn) {
    ptrdiff_t first = 0;
    while (first < n && plan->items[first].turns > turn) {
        ++first;
    }
    return first == n ? plan->tasks[RANGES] : plan->items[first].before[RANGES];
}

/* Tasks of a kind are independent: each writes its own rows, partial result or gradients (attention_backward.c), and
 * sequences share no output. Merges wait for all partial results. */
static void run_tasks(void *call, int thread, int team) {
    const varlen_run *run = call;
    const sa_varlen_plan *plan = run->plan;
    varlen_thread at;
    at.run = run;
    at.scratch = run->scratch + (size_t)thread * plan->scratch_bytes;
    at.sequence = -1;
    at.a = *run->v->packed;
    if (run->vg == NULL) {
        run_kind(&at, team, BLOCKS, plan->tasks[BLOCKS]);
        run_kind(&at, team, MERGES, plan->tasks[MERGES]);
        return;
    }
    at.g = *run->vg->packed;
    at.g.a = &at.a;
    run_kind(&at, team, DELTAS, plan->tasks[DELTAS]);
    for (at.turn = 0; at.turn < plan->turns; ++at.turn) {
        run_kind(&at, team, RANGES, tasks_of_turn(plan, run->v->sequences, at.turn));
    }
    run_kind(&at, team, MASKS, plan->tasks[MASKS]);
}

static sa_status run_team(varlen_run run) {
    sa_run_team(run.plan->threads, run_tasks, &run);
    return sa_cancelled(run.v->packed) ? SA_CANCELLED : SA_OK;
}

sa_status sa_varlen_forward(const sa_varlen *v, const sa_varlen_plan *plan, void *scratch, void *partial) {
    return run_team((varlen_run){.v = v, .plan = plan, .scratch = scratch, .partial = partial});
}

sa_status sa_varlen_backward(const sa_varlen_gradients *vg, const sa_varlen_plan *plan, void *scratch) {
    return run_team((varlen_run){.v = vg->v, .vg = vg, .plan = plan, .scratch = scratch});
}
