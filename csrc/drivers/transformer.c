/* Driver of the embedding model's forward pass: phases of independent tasks. One thread takes a part of the sentences,
 * which fits its core's cache, through all phases. With few sentences threads share out every phase. */
#include <math.h>

#include "drivers/transformer_tasks.h"
#include "runtime/threads.h"

/* The fewest tokens of a part. */
#define SA_PART_TOKENS 384

size_t sa_embedding_array(const sa_embedding *e, ptrdiff_t rows, ptrdiff_t columns) {
    return sa_whole_lines((size_t)rows * (size_t)columns * sa_element_size(e->f64));
}

bool sa_embedding_fits(const sa_embedding *e) {
    size_t bytes;
    return e->d <= SA_MAX_WIDTH && e->longest <= SA_MAX_LENGTH && sa_multiply((size_t)e->tokens + 1, (size_t)e->d, &bytes) &&
           sa_multiply(bytes, 64 * sizeof(double), &bytes) && sa_multiply(bytes, (size_t)e->blocks + 1, &bytes) &&
           bytes <= PTRDIFF_MAX / 1024;
}

size_t sa_embedding_frame_bytes(const sa_embedding *e, ptrdiff_t rows, bool keep) {
    return 6 * sa_embedding_array(e, rows, e->d) + sa_embedding_array(e, rows, 1) +
           (keep ? sa_embedding_array(e, rows, 2 * e->most_heads) : 0);
}

sa_embedding_frame sa_embedding_frame_of(const sa_embedding_part *p) {
    const sa_embedding *e = p->e;
    const bool keep = p->plan->keep;
    const size_t array = sa_embedding_array(e, p->capacity, e->d), bytes = sa_embedding_frame_bytes(e, p->capacity, keep);
    sa_embedding_frame f;
    f.x = p->frames + (keep ? (size_t)p->block * bytes : 0);
    for (int i = 0; i < SA_PROJECTIONS; ++i) {
        f.projected[i] = f.x + (size_t)(i + 1) * array;
    }
    f.attended = f.x + 4 * array;
    f.unit = f.x + 5 * array;
    f.scale = f.x + 6 * array;
    f.stats = keep ? f.scale + sa_embedding_array(e, p->capacity, 1) : NULL;
    f.y = keep ? f.x + bytes : f.x;
    return f;
}

ptrdiff_t sa_embedding_bytes(const sa_embedding *e, ptrdiff_t elements) {
    return elements * (ptrdiff_t)sa_element_size(e->f64);
}

sa_tensor sa_embedding_matrix(const sa_embedding *e, char *data, ptrdiff_t stride) {
    return (sa_tensor){.m = {data, sa_embedding_bytes(e, stride), sa_embedding_bytes(e, 1), e->f64 ? SA_F64 : SA_F32, false}};
}

void sa_embedding_attention(const sa_embedding *e, ptrdiff_t block, const sa_embedding_frame *f, ptrdiff_t row,
                            ptrdiff_t length, ptrdiff_t head, sa_attention *a) {
    const ptrdiff_t heads = e->block[block].heads, width = e->d / heads;
    const ptrdiff_t at = sa_embedding_bytes(e, row * e->d + head * width);
    *a = (sa_attention){.L = length,
                        .S = length,
                        .E = width,
                        .Dv = width,
                        .gqa = 1,
                        .f64 = e->f64,
                        .query = sa_embedding_matrix(e, f->projected[SA_QUERY] + at, e->d),
                        .key = sa_embedding_matrix(e, f->projected[SA_KEY] + at, e->d),
                        .value = sa_embedding_matrix(e, f->projected[SA_VALUE] + at, e->d),
                        .out = sa_embedding_matrix(e, f->attended + at, e->d),
                        .scale = 1 / sqrt((double)width),
                        .window_left = SA_UNBOUNDED,
                        .window_right = SA_UNBOUNDED};
    if (f->stats != NULL) {
        a->stats = sa_embedding_matrix(e, f->stats + sa_embedding_bytes(e, (row * heads + head) * 2), 2 * heads);
    }
}

size_t sa_embedding_scratch(const sa_embedding *e, const sa_embedding_plan *plan, bool backward) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    size_t most = kernels->matmul_scratch(plan->product_rows, e->d);
    for (ptrdiff_t b = 0; b < e->blocks; ++b) {
        sa_attention a;
        const sa_embedding_frame none = {0};
        sa_embedding_attention(e, b, &none, 0, e->longest, 0, &a);
        const sa_attention_gradients g = {.a = &a};
        const size_t copies = 2 * sa_embedding_array(e, e->longest, a.E) + sa_embedding_array(e, e->longest, 1);
        const size_t bytes = backward ? kernels->backward_scratch(&g) + copies : kernels->attention_scratch(&a);
        most = bytes > most ? bytes : most;
    }
    return sa_whole_lines(most);
}

int sa_embedding_threads(const sa_embedding *e, double products, int max_threads) {
    const double rows = (double)e->tokens, d = (double)e->d;
    const double work = products * (double)e->blocks * rows * d * (3 * d + 2 * rows / (double)e->sentences);
    return sa_threads_for(work, SA_EMBEDDING_WORK_PER_THREAD, HUGE_VAL, max_threads);
}

bool sa_embedding_splits(const sa_embedding *e) { return e->d >= sa_kernels_for(e->f64)->splits_from; }

void sa_embedding_cut_products(const sa_embedding *e, int threads, sa_embedding_plan *plan) {
    const bool splits = sa_embedding_splits(e);
    const ptrdiff_t most = splits ? SA_SPLIT_ROWS : SA_PRODUCT_ROWS, share = sa_ceil_div(e->tokens, splits ? 1 : threads);
    plan->product_rows = share < most ? (share > 0 ? share : 1) : most;
    plan->product_shares = !splits ? 0 : sa_ceil_div(e->tokens, most) >= 2 * threads ? 1 : threads;
}

ptrdiff_t sa_embedding_unit(const sa_embedding *e) {
    return sa_embedding_splits(e) ? SA_SPLIT_COLUMNS : sa_kernels_for(e->f64)->block_rows;
}

ptrdiff_t sa_embedding_shares(const sa_embedding_plan *plan, ptrdiff_t units) {
    return plan->product_shares > 0 && plan->product_shares < units ? plan->product_shares : units;
}

typedef struct {
    const sa_embedding_part *p;
    sa_embedding_task *task;
} phase;

static void run_task(void *call, ptrdiff_t t) {
    const phase *run = call;
    run->task(run->p, t);
}

/* Independent: a task writes its own rows or columns. */
void sa_embedding_run(const sa_embedding_part *p, ptrdiff_t tasks, sa_embedding_task *task, sa_embedding_order order) {
    phase run = {p, task};
    if (order == SA_BY_TURNS) {
        sa_share_tasks(p->team, tasks, run_task, &run);
    } else {
        const sa_share share = sa_share_of(tasks, p->thread, p->team);
        for (ptrdiff_t t = share.from; t < share.end; ++t) {
            task(p, t);
        }
    }
    if (order != SA_BY_ROWS_AND_ON) {
        sa_wait_for_team(p->team);
    }
}

static ptrdiff_t rows_of(const sa_embedding_part *p) { return p->e->starts[p->to] - p->e->starts[p->from]; }

static ptrdiff_t first_row(const sa_embedding_part *p) { return p->e->starts[p->from] - p->origin; }

static void look_up(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t start = e->starts[p->from + t], length = e->starts[p->from + t + 1] - start;
    char *x = sa_embedding_frame_of(p).x + sa_embedding_bytes(e, (start - p->origin) * e->d);
    sa_kernels_for(e->f64)->look_up(e->table, e->positions, e->ids + start, length, e->d, x);
}

/* Units of columns of query, key and value. */
static ptrdiff_t units_of(const sa_embedding *e) { return SA_PROJECTIONS * sa_ceil_div(e->d, sa_embedding_unit(e)); }

static ptrdiff_t count_projections(const sa_embedding_part *p) {
    return sa_embedding_shares(p->plan, units_of(p->e)) * sa_ceil_div(rows_of(p), p->plan->product_rows);
}

static void project_units(const sa_embedding_part *p, ptrdiff_t row, ptrdiff_t from, ptrdiff_t to) {
    const sa_embedding *e = p->e;
    const ptrdiff_t unit = sa_embedding_unit(e), units = units_of(e) / SA_PROJECTIONS;
    const ptrdiff_t at = sa_embedding_bytes(e, (first_row(p) + row) * e->d);
    const sa_embedding_frame f = sa_embedding_frame_of(p);
    for (ptrdiff_t first = from; first < to;) {
        const ptrdiff_t which = first / units, end = sa_smaller((which + 1) * units, to), column = first % units * unit;
        const sa_product product = {
            .m = sa_smaller(rows_of(p) - row, p->plan->product_rows),
            .n = e->d,
            .width = sa_smaller(e->d - column, (end - first) * unit),
            .a = f.x + at,
            .b = (const char *)e->block[p->block].weight[which] + sa_embedding_bytes(e, column * e->d),
            .c = f.projected[which] + at + sa_embedding_bytes(e, column),
            .a_stride = e->d,
            .b_stride = e->d,
            .c_stride = e->d,
            .start = (const char *)e->block[p->block].bias[which] + sa_embedding_bytes(e, column),
            .again = first > from,
        };
        sa_kernels_for(e->f64)->matmul_nt(&product, p->scratch);
        first = end;
    }
}

static void project(const sa_embedding_part *p, ptrdiff_t t) {
    const ptrdiff_t units = units_of(p->e), shares = sa_embedding_shares(p->plan, units), share = t % shares;
    project_units(p, t / shares * p->plan->product_rows, units * share / shares, units * (share + 1) / shares);
}

static ptrdiff_t pieces_of(const sa_embedding_part *p) { return sa_ceil_div(p->e->longest, p->plan->attend_rows); }

static ptrdiff_t count_attention(const sa_embedding_part *p) {
    return (p->to - p->from) * p->e->block[p->block].heads * pieces_of(p);
}

static void attend(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t pieces = pieces_of(p), heads = e->block[p->block].heads, sentence = p->from + t / pieces / heads;
    const ptrdiff_t start = e->starts[sentence], length = e->starts[sentence + 1] - start;
    const ptrdiff_t from = t % pieces * p->plan->attend_rows;
    if (from >= length) {
        return;
    }
    const sa_embedding_frame f = sa_embedding_frame_of(p);
    sa_attention a;
    sa_rows rows;
    sa_block b;
    sa_embedding_attention(e, p->block, &f, start - p->origin, length, t / pieces % heads, &a);
    sa_describe_block(&a, 1, 0, from, p->plan->attend_rows, &rows, &b);
    sa_kernels_for(e->f64)->attention_forward(&b, p->scratch);
}

static void add_norm(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t row = first_row(p) + t * SA_NORM_ROWS, at = sa_embedding_bytes(e, row * e->d);
    const sa_embedding_frame f = sa_embedding_frame_of(p);
    const sa_norm_rows n = {.rows = sa_smaller(rows_of(p) - t * SA_NORM_ROWS, SA_NORM_ROWS),
                            .d = e->d,
                            .eps = e->block[p->block].eps,
                            .weight = e->block[p->block].norm_weight,
                            .bias = e->block[p->block].norm_bias,
                            .x = f.x + at,
                            .attended = f.attended + at,
                            .unit = f.unit + at,
                            .scale = f.scale + sa_embedding_bytes(e, row),
                            .y = f.y + at};
    sa_kernels_for(e->f64)->add_norm(&n);
}

static void average(const sa_embedding_part *p, ptrdiff_t t) {
    const sa_embedding *e = p->e;
    const ptrdiff_t sentence = p->from + t;
    const ptrdiff_t start = e->starts[sentence], length = e->starts[sentence + 1] - start;
    const char *x = sa_embedding_frame_of(p).x + sa_embedding_bytes(e, (start - p->origin) * e->d);
    sa_kernels_for(e->f64)->column_sums(x, NULL, length, e->d, e->d, 1 / (double)length,
                                        p->out + sa_embedding_bytes(e, sentence * e->d));
}

static void run_part(sa_embedding_part p) {
    const ptrdiff_t sentences = p.to - p.from, norms = sa_ceil_div(rows_of(&p), SA_NORM_ROWS);
    p.block = 0;
    sa_embedding_run(&p, sentences, look_up, SA_BY_ROWS);
    for (; p.block < p.e->blocks; ++p.block) {
        sa_embedding_run(&p, count_projections(&p), project, SA_BY_ROWS);
        sa_embedding_run(&p, count_attention(&p), attend, SA_BY_TURNS);
        sa_embedding_run(&p, norms, add_norm, SA_BY_ROWS);
    }
    sa_embedding_run(&p, sentences, average, SA_BY_ROWS); /* its x is the last block's output */
}

sa_status sa_embedding_make_plan(const sa_embedding *e, bool keep, int max_threads, sa_embedding_plan *plan) {
    const sa_real_kernels *kernels = sa_kernels_for(e->f64);
    *plan = (sa_embedding_plan){.keep = keep, .threads = 1};
    if (!sa_embedding_fits(e)) {
        return SA_TOO_LARGE;
    }
    if (e->sentences == 0) {
        return SA_OK;
    }
    plan->parts = sa_ceil_div(e->tokens, SA_PART_TOKENS);
    plan->part_rows = sa_smaller(e->tokens, SA_PART_TOKENS + e->longest);
    plan->attend_rows = kernels->block_rows;
    if (e->sentences * e->most_heads * sa_ceil_div(e->longest, kernels->block_rows) == 1 &&
        4 * e->longest > 3 * kernels->block_rows) {
        /* Leaves work for a second thread. Still fewer rows would leave the matrix unit: bits would depend on the batch. */
        plan->attend_rows /= 2;
    }
    plan->threads = sa_embedding_threads(e, 1, max_threads);
    plan->by_parts = plan->threads == 1 || plan->parts >= 2 * plan->threads;
    sa_embedding_cut_products(e, plan->threads, plan);
    if (plan->by_parts) {
        plan->product_rows = sa_embedding_splits(e) ? sa_smaller(plan->part_rows, SA_SPLIT_ROWS) : plan->part_rows;
        plan->product_shares = sa_smaller(plan->product_shares, 1);
    }
    const size_t frame = sa_embedding_frame_bytes(e, plan->by_parts && !keep ? plan->part_rows : e->tokens, keep);
    if (keep) {
        plan->saved_bytes = (size_t)e->blocks * frame + sa_embedding_array(e, e->tokens, e->d);
    } else if (plan->by_parts) {
        plan->scratch_bytes = frame;
    } else {
        plan->shared_bytes = frame;
    }
    plan->scratch_bytes += sa_embedding_scratch(e, plan, false);
    return SA_OK;
}

/* The first that begins at `token` or later. */
static ptrdiff_t sentence_from(const sa_embedding *e, ptrdiff_t token) {
    ptrdiff_t low = 0, high = e->sentences;
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

/* Independent: a part writes only its own sentences. */
static void run_part_number(void *call, ptrdiff_t number) {
    sa_embedding_part p = *(const sa_embedding_part *)call;
    p.thread = 0;
    p.team = 1;
    p.from = sentence_from(p.e, number * SA_PART_TOKENS);
    p.to = sentence_from(p.e, (number + 1) * SA_PART_TOKENS);
    if (p.from == p.to) {
        return;
    }
    if (!p.plan->keep) { /* the thread's own frame, reused by all blocks */
        p.frames = p.scratch;
        p.capacity = p.plan->part_rows;
        p.origin = p.e->starts[p.from];
        p.scratch += sa_embedding_frame_bytes(p.e, p.capacity, false);
    }
    run_part(p);
}

static void run(void *call, int thread, int team) {
    sa_embedding_part p = *(const sa_embedding_part *)call;
    p.thread = thread;
    p.team = team;
    p.scratch += (size_t)thread * p.plan->scratch_bytes;
    if (p.plan->by_parts) {
        sa_share_tasks(team, p.plan->parts, run_part_number, &p);
    } else {
        run_part(p);
    }
}

void sa_embedding_forward(const sa_embedding *e, const sa_embedding_plan *plan, void *out, void *saved, void *scratch) {
    if (e->sentences == 0) {
        return;
    }
    sa_embedding_part all = {.e = e,
                             .plan = plan,
                             .out = out,
                             .to = e->sentences,
                             .frames = plan->keep ? saved : scratch,
                             .capacity = e->tokens,
                             .scratch = (char *)scratch + plan->shared_bytes};
    sa_run_team(plan->threads, run, &all);
}
