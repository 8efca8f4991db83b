/* Driver of the row operations: which axes a row is made of, how the rows are cut into tasks, and the parallel loop. */
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <string.h>

#include "kernels/kernels.h"
#include "runtime/threads.h"

/* About this many elements make a task: some 10 µs, so that starting one costs nothing and many threads find work. */
#define SA_TASK_ELEMENTS 16384

/* Elements per thread from which on another thread pays: measured, for the cheapest kinds. */
#define SA_ELEMENTS_PER_THREAD 32768

static bool is_elementwise(const sa_row_call *c) {
    return c->kind == SA_GELU || c->kind == SA_GELU_TANH || c->kind == SA_GELU_BACKWARD || c->kind == SA_GELU_TANH_BACKWARD;
}

static bool sums_parameters(const sa_row_call *c) { return c->dweight.data != NULL || c->dbias.data != NULL; }

static const sa_real_kernels *kernels_of(const sa_row_call *c) {
    const sa_kernels *k = sa_kernels_active();
    return c->f64 ? &k->f64 : &k->f32;
}

/* Sums for dweight and dbias are kept for at most so many chunks, of at least so many rows: what they take in float64 stays
 * small beside x, and adding them up costs little. */
#define SA_MOST_CHUNKS 32
#define SA_CHUNK_ROWS 16

static ptrdiff_t ceil_div(ptrdiff_t a, ptrdiff_t b) { return a / b + (a % b != 0); }

/* Appends an axis of the call to a list, merged with the one before where every array steps evenly from one to the next. */
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

/* Whether kernels can read (write) the array's rows in place, as neighbouring elements of the type that computes. */
static bool is_direct(const sa_row_call *c, const sa_row_plan *plan, int which) {
    const sa_strided *array = &c->array[which];
    const ptrdiff_t size = c->f64 ? (ptrdiff_t)sizeof(double) : (ptrdiff_t)sizeof(float);
    const sa_row_axis *inner = plan->by_columns ? &plan->column : &plan->row[plan->n_row - 1];
    bool direct = array->dtype == (c->f64 ? SA_F64 : SA_F32) && !array->swapped && (uintptr_t)array->data % (size_t)size == 0 &&
                  (inner->n == 1 || inner->stride[which] == size) && plan->n_row == 1 &&
                  (!plan->by_columns || plan->row[0].stride[which] % size == 0);
    for (int axis = 0; axis < plan->n_lead && direct; ++axis) {
        direct = plan->lead[axis].stride[which] % size == 0;
    }
    return direct;
}

/* Sorts the axes of the call into lead, row and column. */
static void sort_axes(const sa_row_call *c, sa_row_plan *plan) {
    const bool elements_alone = is_elementwise(c);
    plan->n_lead = plan->n_row = 0;
    plan->by_columns = false;
    for (int axis = 0; axis < (elements_alone ? c->ndim : c->first); ++axis) {
        plan->n_lead = append(c, axis, plan->lead, plan->n_lead);
    }
    if (elements_alone) {
        if (plan->n_lead > 0) { /* elements are rows of any length: as long as they can be had */
            plan->row[plan->n_row++] = plan->lead[--plan->n_lead];
        }
    } else {
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

sa_status sa_row_make_plan(const sa_row_call *c, int max_threads, sa_row_plan *plan) {
    const bool elements_alone = is_elementwise(c);
    const size_t size = c->f64 ? sizeof(double) : sizeof(float);
    size_t elements = 1;
    plan->threads = 1;
    plan->tasks = 0;
    plan->shared_bytes = plan->scratch_bytes = 0;
    plan->weight = plan->bias = NULL;
    plan->partial = NULL;
    for (int axis = 0; axis < c->ndim; ++axis) {
        if (c->shape[axis] == 0) {
            return SA_OK;
        }
    }
    for (int axis = 0; axis < c->ndim; ++axis) {
        if (!sa_multiply(elements, (size_t)c->shape[axis], &elements) || elements > PTRDIFF_MAX / 64) {
            return SA_TOO_LARGE;
        }
    }
    sort_axes(c, plan);
    plan->n = 1;
    for (int i = 0; i < plan->n_row; ++i) {
        plan->n *= plan->row[i].n;
    }
    plan->piece = plan->n;
    ptrdiff_t whole = plan->n;
    if (plan->by_columns) {
        whole = plan->column.n;
        plan->piece = whole < SA_ROW_COLUMNS ? whole : SA_ROW_COLUMNS;
    } else if (elements_alone && plan->n > SA_TASK_ELEMENTS) {
        plan->piece = SA_TASK_ELEMENTS;
    }
    plan->pieces = ceil_div(whole, plan->piece);
    plan->rows = 1;
    for (int axis = 0; axis < plan->n_lead; ++axis) {
        plan->rows *= plan->lead[axis].n;
    }
    const ptrdiff_t one = plan->by_columns ? plan->n * plan->piece : plan->piece;
    plan->block_rows = plan->pieces > 1 || one >= SA_TASK_ELEMENTS ? 1 : SA_TASK_ELEMENTS / one;
    plan->block_rows = plan->block_rows < SA_ROW_BLOCK ? plan->block_rows : SA_ROW_BLOCK;
    plan->tasks = ceil_div(plan->rows, plan->block_rows) * plan->pieces;

    size_t n = (size_t)(plan->by_columns ? 0 : plan->piece), scratch = 0;
    for (int i = 0; i < SA_ROW_ARRAYS; ++i) {
        plan->direct[i] = c->array[i].data != NULL && is_direct(c, plan, i);
        const bool packs = c->array[i].data != NULL && !plan->direct[i];
        if (packs && (i == SA_ROW_WEIGHT || i == SA_ROW_BIAS)) {
            plan->shared_bytes += (n * size + 63) / 64 * 64;
        } else if (packs && i != SA_ROW_X) { /* x is packed into the row of the output */
            scratch = 2 * n;
        }
    }
    plan->chunks = plan->tasks;
    plan->chunk_tasks = 1;
    if (sums_parameters(c)) {
        const ptrdiff_t most = plan->tasks / ceil_div(SA_CHUNK_ROWS, plan->block_rows);
        plan->chunk_tasks = ceil_div(plan->tasks, most < 1 ? 1 : most < SA_MOST_CHUNKS ? most : SA_MOST_CHUNKS);
        plan->chunks = ceil_div(plan->tasks, plan->chunk_tasks);
        size_t sums;
        if (!sa_multiply((size_t)plan->chunks * 2 * sizeof(double), n, &sums) || sums > PTRDIFF_MAX / 4) {
            return SA_TOO_LARGE;
        }
        plan->shared_bytes += (sums + 63) / 64 * 64;
        scratch = 4 * n; /* dx, dy, and a block's share of dweight and dbias */
    }
    plan->scratch_bytes = (scratch * size + 63) / 64 * 64;
    const ptrdiff_t threads = (ptrdiff_t)elements / SA_ELEMENTS_PER_THREAD;
    const ptrdiff_t useful = threads < plan->chunks ? threads : plan->chunks;
    plan->threads = useful < max_threads ? (useful < 1 ? 1 : (int)useful) : max_threads;
    return SA_OK;
}

/* Task t: a piece of one row (or of one stretch of columns), or a block of whole rows. */
static void run_task(const sa_row_call *c, const sa_row_plan *plan, const sa_real_kernels *kernels, ptrdiff_t t, void *scratch,
                     double *partial) {
    const ptrdiff_t piece = t % plan->pieces, first = t / plan->pieces * plan->block_rows;
    const ptrdiff_t begin = piece * plan->piece, left = plan->rows - first;
    const int last_axis = plan->n_row - 1;
    sa_row_block b;
    b.call = c;
    b.plan = plan;
    b.partial = partial;
    b.count = (int)(left < plan->block_rows ? left : plan->block_rows);
    b.n = plan->n;
    const sa_row_axis *cut = plan->by_columns ? &plan->column : &plan->row[last_axis];
    if (plan->by_columns) {
        b.width = cut->n - begin < plan->piece ? cut->n - begin : plan->piece;
    } else if (plan->pieces > 1) {
        b.n = cut->n - begin < plan->piece ? cut->n - begin : plan->piece;
    }
    ptrdiff_t index[SA_MAX_LEAD], offset[SA_ROW_SIN + 1] = {0}, rest = first;
    for (int i = 0; i <= SA_ROW_SIN; ++i) {
        offset[i] = plan->pieces > 1 ? begin * cut->stride[i] : 0;
    }
    for (int axis = plan->n_lead - 1; axis >= 0; --axis) {
        index[axis] = rest % plan->lead[axis].n;
        rest /= plan->lead[axis].n;
        for (int i = 0; i <= SA_ROW_SIN; ++i) {
            offset[i] += index[axis] * plan->lead[axis].stride[i];
        }
    }
    const bool tables = c->kind == SA_ROTARY || c->kind == SA_ROTARY_INTERLEAVED, backward = c->kind >= SA_SOFTMAX_BACKWARD;
    for (int r = 0; r < b.count; ++r) {
        b.x[r] = c->array[SA_ROW_X].data + offset[SA_ROW_X];
        b.out[r] = c->array[SA_ROW_OUT].data + offset[SA_ROW_OUT];
        if (tables) {
            b.cos[r] = c->array[SA_ROW_COS].data + offset[SA_ROW_COS];
            b.sin[r] = c->array[SA_ROW_SIN].data + offset[SA_ROW_SIN];
        } else if (backward) {
            b.dy[r] = c->array[SA_ROW_DY].data + offset[SA_ROW_DY];
        }
        for (int axis = plan->n_lead - 1; axis >= 0; --axis) {
            const sa_row_axis *lead = &plan->lead[axis];
            const bool wraps = ++index[axis] == lead->n;
            for (int i = 0; i <= SA_ROW_SIN; ++i) {
                offset[i] += wraps ? (1 - lead->n) * lead->stride[i] : lead->stride[i];
            }
            if (!wraps) {
                break;
            }
            index[axis] = 0;
        }
    }
    if (plan->by_columns) {
        (backward ? kernels->softmax_columns_backward : kernels->softmax_columns)(&b, scratch);
    } else {
        kernels->rows[c->kind](&b, scratch);
    }
}

static void run_chunk(const sa_row_call *c, const sa_row_plan *plan, const sa_real_kernels *kernels, ptrdiff_t chunk,
                      void *scratch) {
    const ptrdiff_t begin = chunk * plan->chunk_tasks, left = plan->tasks - begin;
    const ptrdiff_t end = begin + (left < plan->chunk_tasks ? left : plan->chunk_tasks);
    double *partial = plan->partial == NULL ? NULL : plan->partial + chunk * 2 * plan->n;
    if (partial != NULL) {
        memset(partial, 0, 2 * (size_t)plan->n * sizeof(double));
    }
    for (ptrdiff_t t = begin; t < end; ++t) {
        run_task(c, plan, kernels, t, scratch, partial);
    }
}

/* The weight (or bias) as elements of the type that computes: in place, or gathered to *free_space, which moves on. */
static const void *parameter(const sa_row_call *c, const sa_row_plan *plan, int which, char **free_space) {
    const sa_strided *array = &c->array[which];
    if (array->data == NULL || plan->direct[which]) {
        return array->data;
    }
    void *to = *free_space;
    kernels_of(c)->gather(to, array->data, array, which, plan->row, plan->n_row, plan->n);
    *free_space += ((size_t)plan->n * (c->f64 ? sizeof(double) : sizeof(float)) + 63) / 64 * 64;
    return to;
}

static void run_chunks(const sa_row_call *c, const sa_row_plan *plan, const sa_real_kernels *kernels, char *scratch) {
#if defined(_OPENMP)
    if (plan->threads > 1) {
        sa_region_enter();
        /* Independent: a chunk writes its own elements of the output, its own sums, and its thread's scratch. */
#pragma omp parallel for num_threads(plan->threads) schedule(static)
        for (ptrdiff_t chunk = 0; chunk < plan->chunks; ++chunk) {
            char *own = scratch == NULL ? NULL : scratch + (size_t)omp_get_thread_num() * plan->scratch_bytes;
            run_chunk(c, plan, kernels, chunk, own);
        }
        sa_region_leave();
        return;
    }
#endif
    for (ptrdiff_t chunk = 0; chunk < plan->chunks; ++chunk) {
        run_chunk(c, plan, kernels, chunk, scratch);
    }
}

void sa_row_run(const sa_row_call *c, sa_row_plan *plan, void *scratch) {
    const sa_real_kernels *kernels = kernels_of(c);
    if (plan->tasks == 0) {
        return;
    }
    char *mine = scratch;
    plan->weight = parameter(c, plan, SA_ROW_WEIGHT, &mine);
    plan->bias = parameter(c, plan, SA_ROW_BIAS, &mine);
    if (sums_parameters(c)) {
        plan->partial = (double *)(void *)mine;
        mine += ((size_t)(plan->chunks * 2 * plan->n) * sizeof(double) + 63) / 64 * 64;
    }
    run_chunks(c, plan, kernels, mine);
    if (sums_parameters(c)) {
        kernels->parameter_gradients(c, plan, mine);
    }
}
