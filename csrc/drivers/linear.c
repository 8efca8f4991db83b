/* Driver of products with weights. Every element is one sum in one order, whatever the tasks: docs/decisions/0003-fused-training.md. */
#include "drivers/linear.h"

#include <math.h>
#include <string.h>

#include "drivers/blocks.h"
#include "drivers/compact.h"
#include "runtime/team.h"

/* The most rows of a task: each packs the weights. */
#define SA_PRODUCT_ROWS 240

/* Of compact weights: rounded rows stay in L2. */
#define SA_COMPACT_ROWS 128

/* Likewise where operands are split: terms stay in L2. */
#define SA_SPLIT_ROWS 512

/* With fewer rows for each thread, threads share columns instead. */
#define SA_FEW_ROWS 48

#define SA_LINEAR_WORK_PER_THREAD 1000000.0
#define SA_ROWS_OF_PACKING 6

static ptrdiff_t bytes_of(const sa_linear *l, ptrdiff_t elements) { return elements * (ptrdiff_t)sa_element_size(l->f64); }

/* Whether sums of n terms, or rows of n columns in matmul_tn, split operands for a matrix unit. Then a task takes many
 * rows and a share of the columns, to split weights once; else one unit of columns. */
static bool splits(const sa_linear *l, ptrdiff_t n) { return n >= sa_kernels_for(l->f64)->splits_from; }

/* Compact weights need no packing: a task takes all columns, or with few rows a share of them, and rounds its rows. */
static sa_cut cut_compact(const sa_linear *l, int threads, bool by_part) {
    const ptrdiff_t rows = sa_larger(l->rows, 1);
    sa_cut cut = {.rows = sa_smaller(rows, SA_COMPACT_ROWS), .shares = 1, .unit = SA_PANEL_COLUMNS};
    if (!by_part && rows >= SA_FEW_ROWS * threads) {
        cut.rows = sa_ceil_div(rows, sa_ceil_div(sa_ceil_div(rows, SA_COMPACT_ROWS), threads) * threads);
    } else if (!by_part) {
        cut.shares = threads;
    }
    return cut;
}

/* Weights that sa_compact_pack packed. */
static bool is_packed(const sa_linear *l) { return l->weights == SA_WEIGHTS_INT8 || l->weights == SA_WEIGHTS_BF16; }

static const sa_compact *compact_of(const sa_linear *l, int part) { return (const sa_compact *)(const void *)l->weight[part]; }

bool sa_linear_steps(const sa_linear *l) {
    bool steps = l->steps && l->weights == SA_WEIGHTS_BLOCKS;
    for (int part = 0; part < l->parts && steps; ++part) {
        steps = l->weight[part] != NULL && sa_blocks_have_steps(compact_of(l, part)); /* scratch is planned for all kinds */
    }
    return steps;
}

sa_cut sa_cut_product(const sa_linear *l, ptrdiff_t n, int threads, bool by_part) {
    if (sa_linear_steps(l)) { /* every task splits its rows */
        return (sa_cut){.rows = sa_larger(l->rows, 1), .shares = by_part ? 1 : threads, .unit = SA_STEP_COLUMNS};
    }
    if (is_packed(l)) {
        return cut_compact(l, threads, by_part);
    }
    const bool split = splits(l, n);
    const ptrdiff_t most = split ? SA_SPLIT_ROWS : SA_PRODUCT_ROWS, rows = sa_larger(l->rows, 1);
    sa_cut cut = {.rows = rows, .unit = split ? SA_SPLIT_COLUMNS : sa_kernels_for(l->f64)->block_rows};
    if (by_part) {
        cut.rows = split ? sa_smaller(rows, most) : rows;
        cut.shares = split ? 1 : 0;
    } else if (split || rows >= SA_FEW_ROWS * threads) { /* with fewer, shares of columns: no weight is packed twice */
        const ptrdiff_t pieces = sa_ceil_div(rows, most), each = split ? 1 : threads;
        cut.rows = sa_ceil_div(rows, sa_ceil_div(pieces, each) * each); /* as many for each */
        cut.shares = !split ? 0 : pieces >= 2 * threads ? 1 : threads;
    }
    return cut;
}

sa_cut sa_cut_input(const sa_linear *l, int threads, bool by_part) {
    ptrdiff_t least = l->out[0];
    for (int part = 1; part < l->parts; ++part) {
        least = sa_smaller(least, l->out[part]);
    }
    return sa_cut_product(l, least, threads, by_part);
}

static ptrdiff_t shares_of(const sa_cut *cut, ptrdiff_t units) {
    return cut->shares > 0 && cut->shares < units ? cut->shares : units;
}

/* Of rows of decoding, in front of what else blocks need. */
static size_t steps_scratch(const sa_linear *l, ptrdiff_t rows) {
    size_t most = 0;
    for (int part = 0; part < l->parts && sa_linear_steps(l); ++part) {
        const size_t bytes = sa_step_scratch(rows, l->in, compact_of(l, part)->row_bytes);
        most = bytes > most ? bytes : most;
    }
    return most;
}

size_t sa_linear_scratch(const sa_linear *l, int threads, bool by_part, bool backward) {
    const sa_cut cut = sa_cut_product(l, l->in, threads, by_part);
    if (is_packed(l)) {
        return sa_whole_lines(sa_compact_scratch(l->weights, cut.rows, l->in));
    }
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    size_t most = kernels->matmul_scratch(cut.rows, l->in);
    if (l->weights == SA_WEIGHTS_BLOCKS) {
        return steps_scratch(l, cut.rows) + sa_whole_lines(most) + sa_blocks_scratch(cut.unit, l->in);
    }
    for (int i = 0; i < l->parts && backward; ++i) {
        const size_t input = kernels->matmul_scratch(sa_cut_input(l, threads, by_part).rows, l->out[i]);
        most = input > most ? input : most;
    }
    if (backward) {
        const size_t weights = kernels->matmul_scratch(0, l->in);
        most = weights > most ? weights : most;
    }
    return sa_whole_lines(most);
}

/* ---- forward ------------------------------------------------------------------------------------------------------------- */

static ptrdiff_t units_of(const sa_linear *l, const sa_cut *cut, int part) { return sa_ceil_div(l->out[part], cut->unit); }

static ptrdiff_t all_units(const sa_linear *l, const sa_cut *cut) {
    ptrdiff_t units = 0;
    for (int i = 0; i < l->parts; ++i) {
        units += units_of(l, cut, i);
    }
    return units;
}

ptrdiff_t sa_linear_tasks(const sa_linear *l, const sa_cut *cut) {
    return shares_of(cut, all_units(l, cut)) * sa_ceil_div(l->rows, cut->rows);
}

/* rows × width elements from (row, column) on, of rows of `stride`. */
static void drop(const sa_linear *l, const sa_dropout *dropout, char *x, ptrdiff_t row, ptrdiff_t column, ptrdiff_t stride,
                 ptrdiff_t rows, ptrdiff_t width, const char *residual) {
    sa_dropout own = *dropout;
    own.first_row += row;
    own.first_column = column;
    sa_kernels_for(l->f64)->drop_rows(&own, x, stride, rows, width, residual);
}

/* Of a product, behind its activation or before the residual joins. */
static void drop_columns(const sa_linear *l, int part, ptrdiff_t row, ptrdiff_t column, ptrdiff_t rows, ptrdiff_t width) {
    const ptrdiff_t at = bytes_of(l, row * l->out[part] + column);
    if (l->dropout.p > 0) {
        char *to = (l->activation == SA_ACT_NONE ? l->y[part] : l->active) + at;
        drop(l, &l->dropout, to, row, column, l->out[part], rows, width, l->residual == NULL ? NULL : l->residual + at);
    }
}

/* As kernels->matmul_nt, with weights in blocks: unit by unit of columns. */
static void multiply_blocks(const sa_linear *l, const sa_cut *cut, int part, ptrdiff_t column, const sa_product *all,
                            char *scratch) {
    scratch += steps_scratch(l, cut->rows);
    float *expanded = (float *)(void *)(scratch + sa_whole_lines(sa_kernels_for(false)->matmul_scratch(cut->rows, l->in)));
    for (ptrdiff_t c = 0; c < all->width; c += cut->unit) {
        sa_product product = *all;
        product.width = sa_smaller(all->width - c, cut->unit);
        product.c = (float *)all->c + c;
        product.again = all->again || c > 0;
        sa_blocks_multiply(compact_of(l, part), column + c, &product, scratch, expanded);
    }
}

/* Likewise, of decoding. Rows that cannot be split are multiplied as others. */
static void multiply_steps(const sa_linear *l, const sa_cut *cut, int part, ptrdiff_t column, const sa_product *all,
                           char *scratch) {
    const sa_step_rows rows = sa_step_split(all->a, all->m, l->in, all->again, scratch);
    sa_step_multiply(compact_of(l, part), column, &rows, all);
    for (ptrdiff_t r = 0; r < all->m; ++r) {
        if (sa_step_spoiled(&rows, r, l->in)) {
            sa_product row = *all;
            row.m = 1;
            row.a = (const float *)all->a + r * all->a_stride;
            row.c = (float *)all->c + r * all->c_stride;
            row.again = false;
            multiply_blocks(l, cut, part, column, &row, scratch);
        }
    }
}

/* Columns `column` … of one part, for the rows of a task. */
static void columns(const sa_linear *l, const sa_cut *cut, int part, ptrdiff_t row, ptrdiff_t column, ptrdiff_t width,
                    bool again, void *scratch) {
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t out = l->out[part], at = bytes_of(l, row * out + column);
    const bool blocks = l->weights == SA_WEIGHTS_BLOCKS;
    const sa_product product = {
        .m = sa_smaller(l->rows - row, cut->rows),
        .n = l->in,
        .width = width,
        .a = l->x + bytes_of(l, row * l->in),
        .b = blocks ? NULL : l->weight[part] + bytes_of(l, column * l->in),
        .c = l->y[part] + at,
        .a_stride = l->in,
        .b_stride = l->in,
        .c_stride = out,
        .again = again,
        .far = l->far && !blocks,
    };
    const char *residual = l->residual == NULL ? NULL : l->residual + at;
    kernels->begin_rows(product.c, out, product.m, width, l->bias[part] == NULL ? NULL : l->bias[part] + bytes_of(l, column),
                        l->dropout.p > 0 ? NULL : residual);
    if (sa_linear_steps(l)) {
        multiply_steps(l, cut, part, column, &product, scratch);
    } else if (blocks) {
        multiply_blocks(l, cut, part, column, &product, scratch);
    } else {
        kernels->matmul_nt(&product, scratch);
    }
    if (l->activation != SA_ACT_NONE) {
        const sa_active active = {l->activation, product.m, width, out, product.c, l->gate == NULL ? NULL : l->gate + at};
        kernels->activate(&active, l->active + at);
    }
    drop_columns(l, part, row, column, product.m, width);
}

void sa_linear_task(const sa_linear *l, const sa_cut *cut, ptrdiff_t t, void *scratch) {
    const ptrdiff_t units = all_units(l, cut), shares = shares_of(cut, units), share = t % shares, row = t / shares * cut->rows;
    const ptrdiff_t from = units * share / shares, to = units * (share + 1) / shares;
    const bool compact = is_packed(l);
    sa_compact_rows rounded = {.rows = sa_smaller(l->rows - row, cut->rows)};
    if (compact) {
        rounded = sa_compact_round(l, row, rounded.rows, scratch);
    }
    ptrdiff_t begin = 0;
    for (int part = 0; part < l->parts; ++part) {
        const ptrdiff_t end = begin + units_of(l, cut, part), first = sa_larger(from, begin), last = sa_smaller(to, end);
        if (first < last) {
            const ptrdiff_t column = (first - begin) * cut->unit;
            const ptrdiff_t width = sa_smaller(l->out[part] - column, (last - first) * cut->unit);
            if (compact) {
                sa_compact_columns(l, &rounded, part, column, width);
                drop_columns(l, part, row, column, rounded.rows, width);
            } else {
                columns(l, cut, part, row, column, width, first > from, scratch);
            }
        }
        begin = end;
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */

static ptrdiff_t input_units(const sa_linear *l, const sa_cut *cut) { return sa_ceil_div(l->in, cut->unit); }

ptrdiff_t sa_linear_input_tasks(const sa_linear_gradients *g, const sa_cut *cut) {
    return shares_of(cut, input_units(g->l, cut)) * sa_ceil_div(g->l->rows, cut->rows);
}

void sa_linear_input_task(const sa_linear_gradients *g, const sa_cut *cut, ptrdiff_t t, void *scratch) {
    const sa_linear *l = g->l;
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t units = input_units(l, cut), shares = shares_of(cut, units), share = t % shares,
                    row = t / shares * cut->rows;
    const ptrdiff_t column = units * share / shares * cut->unit, at = bytes_of(l, row * l->in + column);
    sa_product product = {.m = sa_smaller(l->rows - row, cut->rows),
                          .width = sa_smaller(units * (share + 1) / shares * cut->unit, l->in) - column,
                          .c = g->dx + at,
                          .b_stride = l->in,
                          .c_stride = l->in};
    if (!g->adds) {
        kernels->begin_rows(product.c, l->in, product.m, product.width, NULL, NULL);
    }
    for (int part = 0; part < l->parts; ++part) {
        product.n = product.a_stride = l->out[part];
        product.a = g->dy[part] + bytes_of(l, row * l->out[part]);
        product.b = l->weight[part] + bytes_of(l, column);
        kernels->matmul_nn(&product, scratch);
    }
    if (g->dropout.p > 0) {
        drop(l, &g->dropout, product.c, row, column, l->in, product.m, product.width, NULL);
    }
    if (g->activation != SA_ACT_NONE) {
        const sa_active active = {g->activation, product.m,   product.width,
                                  l->in,         g->pre + at, g->gate == NULL ? NULL : g->gate + at};
        kernels->activate_backward(&active, product.c, g->dgate == NULL ? NULL : g->dgate + at);
    }
}

static ptrdiff_t groups_of(const sa_linear *l) {
    ptrdiff_t groups = 0;
    for (int part = 0; part < l->parts; ++part) {
        groups += sa_ceil_div(l->out[part], SA_WEIGHT_ROWS);
    }
    return groups;
}

static ptrdiff_t weight_tasks(const sa_linear *l, int threads) {
    return splits(l, l->in) ? sa_smaller(threads, groups_of(l)) : groups_of(l);
}

/* One group of a weight's rows, from row `from` of x on. */
static void weight_gradient(const sa_linear_gradients *g, ptrdiff_t group, ptrdiff_t from, bool again, void *scratch) {
    const sa_linear *l = g->l;
    int part = 0;
    for (ptrdiff_t groups; group >= (groups = sa_ceil_div(l->out[part], SA_WEIGHT_ROWS)); ++part) {
        group -= groups;
    }
    const ptrdiff_t out = l->out[part], row = group * SA_WEIGHT_ROWS;
    const sa_product product = {.m = sa_smaller(out - row, SA_WEIGHT_ROWS),
                                .n = sa_smaller(l->rows - from, SA_SUM_ROWS),
                                .width = l->in,
                                .a = g->dy[part] + bytes_of(l, from * out + row),
                                .b = l->x + bytes_of(l, from * l->in),
                                .c = g->dweight[part] + bytes_of(l, row * l->in),
                                .a_stride = out,
                                .b_stride = l->in,
                                .c_stride = l->in,
                                .again = again,
                                .adds = from > 0};
    sa_kernels_for(l->f64)->matmul_tn(&product, scratch);
}

static ptrdiff_t bias_panels(const sa_linear *l, int part) {
    return l->bias[part] == NULL ? 0 : sa_ceil_div(l->out[part], sa_kernels_for(l->f64)->block_rows);
}

ptrdiff_t sa_linear_parameter_tasks(const sa_linear_gradients *g, int threads) {
    ptrdiff_t tasks = weight_tasks(g->l, threads);
    for (int part = 0; part < g->l->parts; ++part) {
        tasks += bias_panels(g->l, part);
    }
    return tasks;
}

void sa_linear_parameter_task(const sa_linear_gradients *g, int threads, ptrdiff_t t, void *scratch) {
    const sa_linear *l = g->l;
    const ptrdiff_t groups = groups_of(l), tasks = weight_tasks(l, threads);
    if (t < tasks) {
        const ptrdiff_t first = groups * t / tasks, end = groups * (t + 1) / tasks;
        ptrdiff_t from = 0;
        do {
            for (ptrdiff_t group = first; group < end; ++group) {
                weight_gradient(g, group, from, group > first, scratch);
            }
            from += SA_SUM_ROWS;
        } while (from < l->rows);
        return;
    }
    t -= tasks;
    int part = 0;
    for (ptrdiff_t panels; t >= (panels = bias_panels(l, part)); ++part) {
        t -= panels;
    }
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t column = t * kernels->block_rows, at = bytes_of(l, column);
    kernels->column_sums(g->dy[part] + at, NULL, l->rows, l->out[part], sa_smaller(l->out[part] - column, kernels->block_rows),
                         1, g->dbias[part] + at);
}

/* ---- one product alone --------------------------------------------------------------------------------------------------- */

int sa_linear_threads(const sa_linear *l, double products, int max_threads) {
    double out = 0;
    for (int part = 0; part < l->parts; ++part) {
        out += (double)l->out[part];
    }
    /* reading and packing the weights costs as much as a few rows */
    const double rows = (double)l->rows + SA_ROWS_OF_PACKING;
    return sa_threads_for(products * rows * (double)l->in * out, SA_LINEAR_WORK_PER_THREAD, HUGE_VAL, max_threads);
}

typedef struct {
    const sa_linear *l;
    const sa_linear_gradients *g;
    sa_cut cut;
    int threads;
    char *scratch;
    size_t scratch_bytes;
} product_call;

static void forward_task(void *call, ptrdiff_t t) {
    const product_call *p = call;
    if (!sa_stops(p->l->watch)) {
        sa_linear_task(p->l, &p->cut, t, p->scratch);
    }
}

/* Independent: a task writes its own rows and columns. */
static void run_forward(void *call, int thread, int team) {
    product_call p = *(const product_call *)call;
    p.scratch += (size_t)thread * p.scratch_bytes;
    sa_share_tasks(team, sa_linear_tasks(p.l, &p.cut), forward_task, &p);
}

void sa_linear_forward(const sa_linear *l, int threads, void *scratch) {
    product_call call = {.l = l,
                         .cut = sa_cut_product(l, l->in, threads, false),
                         .threads = threads,
                         .scratch = scratch,
                         .scratch_bytes = sa_linear_scratch(l, threads, false, false)};
    sa_run_team(threads, run_forward, &call);
}

static ptrdiff_t input_tasks(const product_call *p) { return p->g->dx == NULL ? 0 : sa_linear_input_tasks(p->g, &p->cut); }

static void backward_task(void *call, ptrdiff_t t) {
    const product_call *p = call;
    if (sa_stops(p->l->watch)) {
        return;
    }
    if (t < input_tasks(p)) {
        sa_linear_input_task(p->g, &p->cut, t, p->scratch);
    } else {
        sa_linear_parameter_task(p->g, p->threads, t - input_tasks(p), p->scratch);
    }
}

/* Independent, likewise. */
static void run_backward(void *call, int thread, int team) {
    product_call p = *(const product_call *)call;
    p.scratch += (size_t)thread * p.scratch_bytes;
    sa_share_tasks(team, input_tasks(&p) + sa_linear_parameter_tasks(p.g, p.threads), backward_task, &p);
}

void sa_linear_backward(const sa_linear_gradients *g, int threads, void *scratch) {
    product_call call = {.l = g->l,
                         .g = g,
                         .cut = sa_cut_input(g->l, threads, false),
                         .threads = threads,
                         .scratch = scratch,
                         .scratch_bytes = sa_linear_scratch(g->l, threads, false, true)};
    sa_run_team(threads, run_backward, &call);
}
