/* Driver of row operations: finds the axes of a row, cuts a call into tasks, and runs the parallel loop. */
#include <string.h>

#include "drivers/rowops.h"

#include "drivers/common.h"
#include "runtime/team.h"

#define SA_TASK_ELEMENTS 16384

#define SA_ELEMENTS_PER_THREAD 32768
#define SA_NARROWED_PER_THREAD 65536

static bool sums_parameters(const sa_row_call *c) { return c->dweight.data != NULL || c->dbias.data != NULL; }

/* The most chunks of dweight and dbias. They have many rows, so that their sums take little memory compared with x. */
#define SA_MOST_CHUNKS 32
#define SA_CHUNK_ROWS 16

/* Appends an axis, or merges it with the last one if every array has one stride for both. */
static int append(const sa_row_call *c, int axis, sa_row_axis *list, int count) {
    if (c->shape[axis] == 1) {
        return count;
    }
    sa_row_axis *next = &list[count], *last = next - 1;
    bool even = count > 0;
    next->n = c->shape[axis];
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        next->stride[i] = c->array[i].data != NULL ? c->array[i].stride[axis] : 0;
        even = even && last->stride[i] == next->n * next->stride[i];
    }
    if (!even) {
        return count + 1;
    }
    next->n *= last->n;
    *last = *next;
    return count;
}

/* True if rows are contiguous and of the type that computes. */
static bool is_direct(const sa_row_call *c, const sa_row_plan *plan, int which) {
    const sa_strided *array = &c->array[which];
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(c->f64);
    const sa_row_axis *inner = plan->by_columns ? &plan->column : &plan->row[plan->n_row - 1];
    bool direct = array->dtype == (c->f64 ? SA_F64 : SA_F32) && !array->swapped &&
                  (uintptr_t)array->data % (size_t)size == 0 && (inner->n == 1 || inner->stride[which] == size) &&
                  plan->n_row == 1 && (!plan->by_columns || plan->row[0].stride[which] % size == 0);
    for (int axis = 0; axis < plan->n_lead && direct; ++axis) {
        direct = plan->lead[axis].stride[which] % size == 0;
    }
    return direct;
}

/* Appends all axes, in the order that they have in the output's memory. */
static void append_by_stride(const sa_row_call *c, sa_row_plan *plan) {
    int order[SA_MAX_LEAD];
    const ptrdiff_t *stride = c->array[SA_ROW_OUT].stride;
    for (int axis = 0; axis < c->ndim; ++axis) {
        int at = axis;
        for (; at > 0 && stride[order[at - 1]] < stride[axis]; --at) {
            order[at] = order[at - 1];
        }
        order[at] = axis;
    }
    for (int i = 0; i < c->ndim; ++i) {
        plan->n_lead = append(c, order[i], plan->lead, plan->n_lead);
    }
}

static void sort_axes(const sa_row_call *c, sa_row_plan *plan) {
    const bool elements_alone = SA_IS_ELEMENTWISE(c->kind);
    plan->n_lead = plan->n_row = 0;
    plan->by_columns = false;
    if (elements_alone) {
        append_by_stride(c, plan);
        if (plan->n_lead > 0) { /* elementwise, so rows are as long as possible */
            plan->row[plan->n_row++] = plan->lead[--plan->n_lead];
        }
    } else {
        for (int axis = 0; axis < c->first; ++axis) {
            plan->n_lead = append(c, axis, plan->lead, plan->n_lead);
        }
        for (int axis = c->first; axis < c->last; ++axis) {
            plan->n_row = append(c, axis, plan->row, plan->n_row);
        }
        sa_row_axis after[SA_MAX_LEAD];
        int n_after = 0;
        for (int axis = c->last; axis < c->ndim; ++axis) {
            n_after = append(c, axis, after, n_after);
        }
        if (n_after > 0) {
            plan->by_columns = true;
            plan->column = after[--n_after];
        }
        for (int i = 0; i < n_after; ++i) {
            plan->lead[plan->n_lead++] = after[i];
        }
    }
    if (plan->n_row == 0) {
        plan->row[plan->n_row++] = (sa_row_axis){.n = 1};
    }
}

static void cut_rows(const sa_row_call *c, sa_row_plan *plan) {
    plan->n = plan->rows = 1;
    for (int i = 0; i < plan->n_row; ++i) {
        plan->n *= plan->row[i].n;
    }
    for (int axis = 0; axis < plan->n_lead; ++axis) {
        plan->rows *= plan->lead[axis].n;
    }
    const ptrdiff_t whole = plan->by_columns ? plan->column.n : plan->n;
    const ptrdiff_t most = plan->by_columns ? SA_ROW_COLUMNS : SA_IS_ELEMENTWISE(c->kind) ? SA_TASK_ELEMENTS : whole;
    plan->piece = sa_smaller(whole, most);
    plan->pieces = sa_ceil_div(whole, plan->piece);
    const ptrdiff_t elements = plan->by_columns ? plan->n * plan->piece : plan->piece;
    plan->block_rows = plan->pieces > 1 || elements >= SA_TASK_ELEMENTS ? 1 : SA_TASK_ELEMENTS / elements;
    plan->block_rows = sa_smaller(plan->block_rows, SA_ROW_TASK_ROWS);
    plan->tasks = sa_ceil_div(plan->rows, plan->block_rows) * plan->pieces;
    plan->chunks = plan->tasks;
    plan->chunk_tasks = 1;
    if (sums_parameters(c)) {
        const ptrdiff_t chunks = sa_smaller(plan->tasks / sa_ceil_div(SA_CHUNK_ROWS, plan->block_rows), SA_MOST_CHUNKS);
        plan->chunk_tasks = sa_ceil_div(plan->tasks, sa_larger(chunks, 1));
        plan->chunks = sa_ceil_div(plan->tasks, plan->chunk_tasks);
    }
}

static bool count_scratch(const sa_row_call *c, sa_row_plan *plan) {
    const size_t size = sa_element_size(c->f64), n = (size_t)(plan->by_columns ? 0 : plan->piece);
    size_t copied = 0;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        plan->direct[i] = c->array[i].data != NULL && is_direct(c, plan, i);
        const bool copies = c->array[i].data != NULL && !plan->direct[i];
        if (copies && (i == SA_ROW_WEIGHT || i == SA_ROW_BIAS)) {
            plan->shared_bytes += sa_whole_lines(n * size);
        } else if (copies && i != SA_ROW_X) { /* x is copied into the output's row */
            copied = 2 * n;
        }
    }
    if (c->kind >= SA_SOFTMAX_BACKWARD && !SA_IS_ELEMENTWISE(c->kind)) {
        copied = 2 * n; /* dy may have to be scaled */
    }
    if (sums_parameters(c)) {
        size_t sums;
        if (!sa_multiply((size_t)plan->chunks * 2 * sizeof(double), n, &sums) || sums > PTRDIFF_MAX / 4) {
            return false;
        }
        plan->shared_bytes += sa_whole_lines(sums);
        copied = 4 * n; /* for dx, dy, and a block's dweight and dbias */
    }
    plan->scratch_bytes = sa_whole_lines(copied * size);
    return true;
}

sa_status sa_row_make_plan(const sa_row_call *c, int max_threads, sa_row_plan *plan) {
    size_t elements = 1;
    bool fits = true;
    plan->threads = 1;
    plan->tasks = 0;
    plan->shared_bytes = plan->scratch_bytes = 0;
    plan->weight = plan->bias = NULL;
    plan->partial = NULL;
    for (int axis = 0; axis < c->ndim; ++axis) {
        if (c->shape[axis] == 0) {
            return SA_OK;
        }
        fits = fits && sa_multiply(elements, (size_t)c->shape[axis], &elements) && elements <= PTRDIFF_MAX / 64;
    }
    if (!fits) {
        return SA_TOO_LARGE;
    }
    sort_axes(c, plan);
    cut_rows(c, plan);
    if (!count_scratch(c, plan)) {
        return SA_TOO_LARGE;
    }
    plan->threads = sa_threads_for((double)elements, SA_ELEMENTS_PER_THREAD, (double)plan->chunks, max_threads);
    return SA_OK;
}

typedef struct {
    ptrdiff_t index[SA_MAX_LEAD], offset[SA_ROW_SIN + 1];
} row_place;

static void go_to_row(const sa_row_plan *plan, ptrdiff_t row, row_place *at) {
    for (int axis = plan->n_lead - 1; axis >= 0; --axis) {
        at->index[axis] = row % plan->lead[axis].n;
        row /= plan->lead[axis].n;
        for (int i = 0; i <= SA_ROW_SIN; ++i) {
            at->offset[i] += at->index[axis] * plan->lead[axis].stride[i];
        }
    }
}

static void go_to_next_row(const sa_row_plan *plan, row_place *at) {
    for (int axis = plan->n_lead - 1; axis >= 0; --axis) {
        const sa_row_axis *lead = &plan->lead[axis];
        const bool wraps = ++at->index[axis] == lead->n;
        for (int i = 0; i <= SA_ROW_SIN; ++i) {
            at->offset[i] += wraps ? (1 - lead->n) * lead->stride[i] : lead->stride[i];
        }
        if (!wraps) {
            return;
        }
        at->index[axis] = 0;
    }
}

/* Runs a piece of one row (or some columns), or a block of whole rows. */
static void run_task(const sa_row_call *c, const sa_row_plan *plan, const sa_real_kernels *kernels, ptrdiff_t t,
                     void *scratch, double *partial) {
    const ptrdiff_t first = t / plan->pieces * plan->block_rows, begin = t % plan->pieces * plan->piece;
    const sa_row_axis *cut = plan->by_columns ? &plan->column : &plan->row[plan->n_row - 1];
    const ptrdiff_t width = sa_smaller(cut->n - begin, plan->piece);
    sa_row_task b;
    b.call = c;
    b.plan = plan;
    b.partial = partial;
    b.count = (int)sa_smaller(plan->rows - first, plan->block_rows);
    b.n = plan->pieces > 1 && !plan->by_columns ? width : plan->n;
    b.width = width;
    row_place at;
    for (int i = 0; i <= SA_ROW_SIN; ++i) {
        at.offset[i] = begin * cut->stride[i];
    }
    go_to_row(plan, first, &at);
    const bool tables = c->kind == SA_ROTARY || c->kind == SA_ROTARY_INTERLEAVED,
               backward = c->kind >= SA_SOFTMAX_BACKWARD;
    for (int r = 0; r < b.count; ++r) {
        b.x[r] = c->array[SA_ROW_X].data + at.offset[SA_ROW_X];
        b.out[r] = c->array[SA_ROW_OUT].data + at.offset[SA_ROW_OUT];
        if (tables) {
            b.cos[r] = c->array[SA_ROW_COS].data + at.offset[SA_ROW_COS];
            b.sin[r] = c->array[SA_ROW_SIN].data + at.offset[SA_ROW_SIN];
        } else if (backward) {
            b.dy[r] = c->array[SA_ROW_DY].data + at.offset[SA_ROW_DY];
        }
        go_to_next_row(plan, &at);
    }
    if (plan->by_columns) {
        (backward ? kernels->softmax_columns_backward : kernels->softmax_columns)(&b, scratch);
    } else {
        kernels->rows[c->kind](&b, scratch);
    }
}

typedef struct {
    const sa_row_call *c;
    const sa_row_plan *plan;
    char *scratch;
} row_run;

/* Iterations are independent: a chunk writes its own outputs and sums. */
static void run_chunks(void *call, int thread, int team) {
    const row_run *run = call;
    const sa_row_plan *plan = run->plan;
    const sa_portion portion = sa_portion_of(plan->chunks, thread, team);
    char *scratch = run->scratch == NULL ? NULL : run->scratch + (size_t)thread * plan->scratch_bytes;
    for (ptrdiff_t chunk = portion.from; chunk < portion.end; ++chunk) {
        double *partial = plan->partial == NULL ? NULL : plan->partial + chunk * 2 * plan->n;
        if (partial != NULL) {
            memset(partial, 0, 2 * (size_t)plan->n * sizeof(double));
        }
        const ptrdiff_t end = sa_smaller((chunk + 1) * plan->chunk_tasks, plan->tasks);
        for (ptrdiff_t t = chunk * plan->chunk_tasks; t < end; ++t) {
            run_task(run->c, plan, sa_kernels_for(run->c->f64), t, scratch, partial);
        }
    }
}

/* Returns a parameter in the type that computes: in place, or gathered to *free_space, which then points after it. */
static const void *parameter(const sa_row_call *c, const sa_row_plan *plan, int which, char **free_space) {
    const sa_strided *array = &c->array[which];
    if (array->data == NULL || plan->direct[which]) {
        return array->data;
    }
    void *to = *free_space;
    sa_kernels_for(c->f64)->gather(to, array->data, array, which, plan->row, plan->n_row, plan->n);
    *free_space += sa_whole_lines((size_t)plan->n * sa_element_size(c->f64));
    return to;
}

void sa_row_run(const sa_row_call *c, sa_row_plan *plan, void *scratch) {
    if (plan->tasks == 0) {
        return;
    }
    char *mine = scratch;
    plan->weight = parameter(c, plan, SA_ROW_WEIGHT, &mine);
    plan->bias = parameter(c, plan, SA_ROW_BIAS, &mine);
    if (sums_parameters(c)) {
        plan->partial = (void *)mine;
        mine += sa_whole_lines((size_t)(plan->chunks * 2 * plan->n) * sizeof(double));
    }
    row_run run = {c, plan, mine};
    sa_run_team(plan->threads, run_chunks, &run);
    if (sums_parameters(c)) {
        sa_kernels_for(c->f64)->parameter_gradients(c, plan, mine);
    }
}

typedef struct {
    const float *from;
    ptrdiff_t n;
    sa_dtype dtype;
    uint16_t *to;
} narrow_call;

/* Iterations are independent: a thread writes its own elements. */
static void narrow_portion(void *call, int thread, int team) {
    const narrow_call *c = call;
    const sa_portion portion = sa_portion_of(c->n, thread, team);
    sa_kernels_active()->narrow(c->from + portion.from, portion.end - portion.from, c->dtype, c->to + portion.from);
}

void sa_narrow(const float *from, ptrdiff_t n, sa_dtype dtype, uint16_t *to, int max_threads) {
    narrow_call c = {from, n, dtype, to};
    sa_run_team(sa_threads_for((double)n, SA_NARROWED_PER_THREAD, (double)n, max_threads), narrow_portion, &c);
}
