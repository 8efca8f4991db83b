/* Driver of products with weights. Every element is one sum in one order, however tasks are cut:
 * docs/decisions/0003-fused-training.md. */
#include "drivers/linear.h"

#include <math.h>
#include <string.h>

#include "drivers/quants.h"
#include "drivers/compact.h"
#include "runtime/team.h"

/* The most rows of a task. Each task makes panels of the weights. */
#define SA_PRODUCT_ROWS 240

/* The most rows with compact weights, and as digits, so that rounded rows stay in L2. */
#define SA_COMPACT_ROWS 128
#define SA_DIGITS_ROWS 256

/* The most rows with split operands, so that terms stay in L2. */
#define SA_SPLIT_ROWS 512

/* With fewer rows for each thread, threads share columns instead. */
#define SA_FEW_ROWS 48

/* Numbers of y of a task that has more than one panel, so that they stay in L2 until they are activated. */
#define SA_TASK_NUMBERS 32768

/* Tasks of each thread for the gradients of weights, and the fewest rows of a task. */
#define SA_WEIGHT_TASKS 2
#define SA_LEAST_WEIGHT_ROWS 16

#define SA_LINEAR_WORK_PER_THREAD 1000000.0
#define SA_ROWS_OF_PANELS 6

static ptrdiff_t bytes_of(const sa_linear *l, ptrdiff_t elements) {
    return elements * (ptrdiff_t)sa_element_size(l->f64);
}

/* True if a matrix unit splits the operands, with sums of n terms, or in matmul_tn with rows of n columns. A task then
 * has many rows and a stripe of columns, to split weights once; otherwise it has one panel of columns. */
static bool splits(const sa_linear *l, ptrdiff_t n) { return n >= sa_kernels_for(l->f64)->splits_from; }

/* Compact weights are already in panels, and digits multiply quants in place. A task has all columns, or with few rows
 * a stripe, and rounds or splits its rows. */
static sa_cut cut_compact(const sa_linear *l, int threads, bool by_share, ptrdiff_t panel, ptrdiff_t most) {
    const ptrdiff_t rows = sa_larger(l->rows, 1);
    sa_cut cut = {.rows = sa_smaller(rows, most), .stripes = 1, .panel = panel};
    if (!by_share && rows >= SA_FEW_ROWS * threads) {
        cut.rows = sa_ceil_div(rows, sa_ceil_div(sa_ceil_div(rows, most), threads) * threads);
    } else if (!by_share) {
        cut.stripes = threads;
    }
    return cut;
}

/* True if weights are in the panels of sa_compact_fill. */
static bool has_panels(const sa_linear *l) { return l->weights == SA_WEIGHTS_INT8 || l->weights == SA_WEIGHTS_BF16; }

static const sa_compact *compact_of(const sa_linear *l, int which) { return (const void *)l->weight[which]; }

int sa_linear_digits(const sa_linear *l) {
    int digits = l->weights != SA_WEIGHTS_QUANTS ? 0 : l->decoding ? SA_DIGITS : l->digits;
    for (int which = 0; which < l->count && digits > 0; ++which) { /* a weight is NULL while scratch is planned */
        digits = l->weight[which] != NULL && sa_quants_have_gemv(compact_of(l, which)) ? digits : 0;
    }
    return digits;
}

static sa_cut cut_product(const sa_linear *l, ptrdiff_t n, int threads, bool by_share) {
    const int digits = sa_linear_digits(l);
    if (digits > 0 || has_panels(l)) {
        return digits > 0 ? cut_compact(l, threads, by_share, SA_GEMV_COLUMNS, SA_DIGITS_ROWS)
                          : cut_compact(l, threads, by_share, SA_PANEL_COLUMNS, SA_COMPACT_ROWS);
    }
    const bool split = splits(l, n);
    const ptrdiff_t most = split ? SA_SPLIT_ROWS : SA_PRODUCT_ROWS, rows = sa_larger(l->rows, 1);
    sa_cut cut = {.rows = rows, .panel = split ? SA_SPLIT_COLUMNS : sa_kernels_for(l->f64)->block_rows};
    if (by_share) {
        cut.rows = split ? sa_smaller(rows, most) : rows;
        cut.stripes = split ? 1 : 0;
    } else if (split || rows >= SA_FEW_ROWS * threads) {
        /* Fewer rows: stripes of columns, so that no weight is copied twice. */
        const ptrdiff_t pieces = sa_ceil_div(rows, most), each = split ? 1 : threads;
        cut.rows = sa_ceil_div(rows, sa_ceil_div(pieces, each) * each); /* the same number of tasks for each thread */
        cut.stripes = !split ? 0 : pieces >= 2 * threads ? 1 : threads;
    }
    return cut;
}

sa_cut sa_cut_input(const sa_linear *l, int threads, bool by_share) {
    ptrdiff_t least = l->out[0];
    for (int which = 1; which < l->count; ++which) {
        least = sa_smaller(least, l->out[which]);
    }
    return cut_product(l, least, threads, by_share);
}

static ptrdiff_t stripes_of(const sa_cut *cut, ptrdiff_t panels) {
    return cut->stripes > 0 && cut->stripes < panels ? cut->stripes : panels;
}

static ptrdiff_t panels_of(const sa_linear *l, const sa_cut *cut, int which) {
    return sa_ceil_div(l->out[which], cut->panel);
}

static ptrdiff_t all_panels(const sa_linear *l, const sa_cut *cut) {
    ptrdiff_t panels = 0;
    for (int i = 0; i < l->count; ++i) {
        panels += panels_of(l, cut, i);
    }
    return panels;
}

/* A forward task has as many panels as L2 allows, since each is copied while the one before it is multiplied. */
sa_cut sa_cut_product(const sa_linear *l, int threads, bool by_share) {
    sa_cut cut = cut_product(l, l->in, threads, by_share);
    if (cut.stripes == 0) {
        const ptrdiff_t team = by_share || cut.rows < l->rows ? 1 : threads, panels = all_panels(l, &cut);
        const ptrdiff_t most = sa_larger(SA_TASK_NUMBERS / (cut.panel * cut.rows), 1);
        cut.stripes = sa_ceil_div(sa_ceil_div(panels, most), team) * team;
    }
    return cut;
}

/* Scratch for rows as digits; the other scratch of quants follows it. */
static size_t gemv_scratch(const sa_linear *l, ptrdiff_t rows) {
    const int digits = sa_linear_digits(l);
    size_t most = 0;
    for (int which = 0; which < l->count && digits > 0; ++which) {
        most = sa_most(most, sa_gemv_scratch(rows, l->in, digits, compact_of(l, which)->row_bytes));
    }
    return most;
}

size_t sa_linear_scratch(const sa_linear *l, int threads, bool by_share, bool backward) {
    const sa_cut cut = sa_cut_product(l, threads, by_share);
    if (has_panels(l)) {
        return sa_whole_lines(sa_compact_scratch(l->weights, cut.rows, l->in));
    }
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    size_t most = kernels->matmul_scratch(cut.rows, l->in);
    if (l->weights == SA_WEIGHTS_QUANTS) {
        return gemv_scratch(l, cut.rows) + sa_whole_lines(most) + sa_quants_scratch(cut.panel, l->in);
    }
    for (int i = 0; i < l->count && backward; ++i) {
        most = sa_most(most, kernels->matmul_scratch(sa_cut_input(l, threads, by_share).rows, l->out[i]));
    }
    return sa_whole_lines(backward ? sa_most(most, kernels->matmul_scratch(0, l->in)) : most);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

ptrdiff_t sa_linear_tasks(const sa_linear *l, const sa_cut *cut) {
    return stripes_of(cut, all_panels(l, cut)) * sa_ceil_div(l->rows, cut->rows);
}

/* Applies dropout to rows × width elements from (row, column) on; rows are `stride` apart. */
static void drop(const sa_linear *l, const sa_dropout *dropout, char *x, ptrdiff_t row, ptrdiff_t column,
                 ptrdiff_t stride, ptrdiff_t rows, ptrdiff_t width, const char *residual) {
    sa_dropout own = *dropout;
    own.first_row += row;
    own.first_column = column;
    sa_kernels_for(l->f64)->drop_rows(&own, x, stride, rows, width, residual);
}

/* Applies dropout to a product, after its activation or before the residual is added. */
static void drop_columns(const sa_linear *l, int which, ptrdiff_t row, ptrdiff_t column, ptrdiff_t rows,
                         ptrdiff_t width) {
    const ptrdiff_t at = bytes_of(l, row * l->out[which] + column);
    if (l->dropout.p > 0) {
        char *to = (l->activation == SA_ACT_NONE ? l->y[which] : l->active) + at;
        drop(l, &l->dropout, to, row, column, l->out[which], rows, width,
             l->residual == NULL ? NULL : l->residual + at);
    }
}

/* Like kernels->matmul_nt, with weights in quants, panel by panel. */
static void multiply_quants(const sa_linear *l, const sa_cut *cut, int which, ptrdiff_t column, const sa_product *all,
                            char *scratch) {
    scratch += gemv_scratch(l, cut->rows);
    float *expanded =
        (float *)(void *)(scratch + sa_whole_lines(sa_kernels_active()->f32.matmul_scratch(cut->rows, l->in)));
    for (ptrdiff_t c = 0; c < all->width; c += cut->panel) {
        sa_product product = *all;
        product.width = sa_smaller(all->width - c, cut->panel);
        product.c = (float *)all->c + c;
        product.again = all->again || c > 0;
        sa_quants_multiply(compact_of(l, which), column + c, &product, scratch, expanded);
    }
}

/* Writes bias + residual + the product, for rows as digits. Rows that cannot be split go through multiply_quants. */
static void multiply_gemv(const sa_linear *l, const sa_cut *cut, int which, ptrdiff_t column, const float *residual,
                          const sa_product *all, char *scratch) {
    const sa_gemv_rows rows = sa_gemv_split(all->a, all->m, l->in, sa_linear_digits(l), all->again, scratch);
    sa_multiply_quants(compact_of(l, which), column, &rows, residual, all);
    for (ptrdiff_t r = 0; r < all->m && !rows.whole; ++r) {
        if (sa_gemv_is_unsplit(&rows, r, l->in)) {
            sa_product row = *all;
            row.m = 1;
            row.a = (const float *)all->a + r * all->a_stride;
            row.c = (float *)all->c + r * all->c_stride;
            row.again = false;
            sa_kernels_active()->f32.begin_rows(row.c, row.c_stride, row.m, row.width, row.bias,
                                                residual == NULL ? NULL : residual + r * all->c_stride, SA_NO_SUMS);
            multiply_quants(l, cut, which, column, &row, scratch);
        }
    }
}

/* Multiplies columns from `column` on of one weight, for the rows of a task. */
static void columns(const sa_linear *l, const sa_cut *cut, int which, ptrdiff_t row, ptrdiff_t column, ptrdiff_t width,
                    bool again, void *scratch) {
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t out = l->out[which], at = bytes_of(l, row * out + column);
    const bool quants = l->weights == SA_WEIGHTS_QUANTS;
    const void *residual = l->residual == NULL || l->dropout.p > 0 ? NULL : l->residual + at;
    const char *bias = l->bias[which] == NULL ? NULL : l->bias[which] + bytes_of(l, column);
    const sa_product product = {
        .m = sa_smaller(l->rows - row, cut->rows),
        .n = l->in,
        .width = width,
        .a = l->x + bytes_of(l, row * l->in),
        .b = quants ? NULL : l->weight[which] + bytes_of(l, column * l->in),
        .c = l->y[which] + at,
        .a_stride = l->in,
        .b_stride = l->in,
        .c_stride = out,
        .again = again,
        .adds = quants || residual != NULL,
        .far = l->far && !quants,
        .bias = bias,
    };
    if (sa_linear_digits(l) > 0) {
        multiply_gemv(l, cut, which, column, residual, &product, scratch);
    } else {
        if (product.adds) {
            kernels->begin_rows(product.c, out, product.m, width, bias, residual, SA_NO_SUMS);
        }
        if (quants) {
            multiply_quants(l, cut, which, column, &product, scratch);
        } else {
            kernels->matmul_nt(&product, scratch);
        }
    }
    if (l->activation != SA_ACT_NONE) {
        const sa_active active = {l->activation, product.m, width,
                                  out,           product.c, l->gate == NULL ? NULL : l->gate + at};
        kernels->activate(&active, l->active + at);
    }
    drop_columns(l, which, row, column, product.m, width);
}

void sa_linear_task(const sa_linear *l, const sa_cut *cut, ptrdiff_t t, void *scratch) {
    const ptrdiff_t panels = all_panels(l, cut), stripes = stripes_of(cut, panels), stripe = t % stripes,
                    row = t / stripes * cut->rows;
    const ptrdiff_t from = panels * stripe / stripes, to = panels * (stripe + 1) / stripes;
    const bool compact = has_panels(l);
    sa_compact_rows rounded = {.rows = sa_smaller(l->rows - row, cut->rows)};
    if (compact) {
        rounded = sa_compact_round(l, row, rounded.rows, scratch);
    }
    ptrdiff_t begin = 0;
    for (int which = 0; which < l->count; ++which) {
        const ptrdiff_t end = begin + panels_of(l, cut, which), first = sa_larger(from, begin),
                        last = sa_smaller(to, end);
        if (first < last) {
            const ptrdiff_t column = (first - begin) * cut->panel;
            const ptrdiff_t width = sa_smaller(l->out[which] - column, (last - first) * cut->panel);
            if (compact) {
                sa_compact_columns(l, &rounded, which, column, width);
                drop_columns(l, which, row, column, rounded.rows, width);
            } else {
                columns(l, cut, which, row, column, width, first > from, scratch);
            }
        }
        begin = end;
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static ptrdiff_t input_panels(const sa_linear *l, const sa_cut *cut) { return sa_ceil_div(l->in, cut->panel); }

ptrdiff_t sa_linear_input_tasks(const sa_linear_gradients *g, const sa_cut *cut) {
    return stripes_of(cut, input_panels(g->l, cut)) * sa_ceil_div(g->l->rows, cut->rows);
}

void sa_linear_input_task(const sa_linear_gradients *g, const sa_cut *cut, ptrdiff_t t, void *scratch) {
    const sa_linear *l = g->l;
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t panels = input_panels(l, cut), stripes = stripes_of(cut, panels), stripe = t % stripes,
                    row = t / stripes * cut->rows;
    const ptrdiff_t column = panels * stripe / stripes * cut->panel, at = bytes_of(l, row * l->in + column);
    sa_product product = {.m = sa_smaller(l->rows - row, cut->rows),
                          .width = sa_smaller(panels * (stripe + 1) / stripes * cut->panel, l->in) - column,
                          .c = g->dx + at,
                          .b_stride = l->in,
                          .c_stride = l->in};
    for (int which = 0; which < l->count; ++which) {
        product.adds = g->adds || which > 0;
        product.n = product.a_stride = l->out[which];
        product.a = g->dy[which] + bytes_of(l, row * l->out[which]);
        product.b = l->weight[which] + bytes_of(l, column);
        kernels->matmul_nn(&product, scratch);
    }
    if (g->dropout.p > 0) {
        drop(l, &g->dropout, product.c, row, column, l->in, product.m, product.width, SA_NO_RESIDUAL);
    }
    if (g->activation != SA_ACT_NONE) {
        const sa_active active = {g->activation, product.m,   product.width,
                                  l->in,         g->pre + at, g->gate == NULL ? NULL : g->gate + at};
        kernels->activate_backward(&active, product.c, g->dgate == NULL ? NULL : g->dgate + at);
    }
}

/* How the gradients of weights are cut: into strips of rows, and these into pieces of columns. */
typedef struct {
    ptrdiff_t rows, pieces, strips;
} weight_cut;

static ptrdiff_t strips_of(const sa_linear *l, ptrdiff_t rows) {
    ptrdiff_t strips = 0;
    for (int which = 0; which < l->count; ++which) {
        strips += sa_ceil_div(l->out[which], rows);
    }
    return strips;
}

/* Narrow weights have few strips; these are cut until each thread has SA_WEIGHT_TASKS tasks.
 * Split operands are kept for all strips of a task. */
static weight_cut cut_weights(const sa_linear *l, int threads) {
    weight_cut cut = {.rows = SA_WEIGHT_ROWS, .pieces = 1};
    cut.strips = strips_of(l, cut.rows);
    if (threads == 1 || splits(l, l->in)) {
        return cut;
    }
    const ptrdiff_t enough = SA_WEIGHT_TASKS * threads, panels = sa_ceil_div(l->in, sa_kernels_for(l->f64)->block_rows);
    cut.pieces = sa_larger(1, sa_smaller(panels, sa_ceil_div(enough, cut.strips)));
    while (cut.rows > SA_LEAST_WEIGHT_ROWS && cut.strips * cut.pieces < enough) {
        cut.rows /= 2;
        cut.strips = strips_of(l, cut.rows);
    }
    return cut;
}

static ptrdiff_t weight_tasks(const sa_linear *l, const weight_cut *cut, int threads) {
    return splits(l, l->in) ? sa_smaller(threads, cut->strips) : cut->strips * cut->pieces;
}

/* The gradient of a piece of a strip, summed from row `from` of x on. */
static void weight_gradient(const sa_linear_gradients *g, const weight_cut *cut, ptrdiff_t strip, ptrdiff_t piece,
                            ptrdiff_t from, bool again, void *scratch) {
    const sa_linear *l = g->l;
    int which = 0;
    for (ptrdiff_t strips; strip >= (strips = sa_ceil_div(l->out[which], cut->rows)); ++which) {
        strip -= strips;
    }
    const ptrdiff_t out = l->out[which], row = strip * cut->rows, panel = sa_kernels_for(l->f64)->block_rows;
    const ptrdiff_t panels = sa_ceil_div(l->in, panel), column = panels * piece / cut->pieces * panel;
    const sa_product product = {.m = sa_smaller(out - row, cut->rows),
                                .n = sa_smaller(l->rows - from, SA_SUM_ROWS),
                                .width = sa_smaller(panels * (piece + 1) / cut->pieces * panel, l->in) - column,
                                .a = g->dy[which] + bytes_of(l, from * out + row),
                                .b = l->x + bytes_of(l, from * l->in + column),
                                .c = g->dweight[which] + bytes_of(l, row * l->in + column),
                                .a_stride = out,
                                .b_stride = l->in,
                                .c_stride = l->in,
                                .again = again,
                                .adds = from > 0};
    sa_kernels_for(l->f64)->matmul_tn(&product, scratch);
}

static ptrdiff_t bias_panels(const sa_linear *l, int which) {
    return l->bias[which] == NULL ? 0 : sa_ceil_div(l->out[which], sa_kernels_for(l->f64)->block_rows);
}

ptrdiff_t sa_linear_parameter_tasks(const sa_linear_gradients *g, int threads) {
    const weight_cut cut = cut_weights(g->l, threads);
    ptrdiff_t tasks = weight_tasks(g->l, &cut, threads);
    for (int which = 0; which < g->l->count; ++which) {
        tasks += bias_panels(g->l, which);
    }
    return tasks;
}

void sa_linear_parameter_task(const sa_linear_gradients *g, int threads, ptrdiff_t t, void *scratch) {
    const sa_linear *l = g->l;
    const weight_cut cut = cut_weights(l, threads);
    const ptrdiff_t all = cut.strips * cut.pieces, tasks = weight_tasks(l, &cut, threads);
    if (t < tasks) {
        const ptrdiff_t first = all * t / tasks, end = all * (t + 1) / tasks;
        ptrdiff_t from = 0;
        do {
            for (ptrdiff_t n = first; n < end; ++n) {
                weight_gradient(g, &cut, n / cut.pieces, n % cut.pieces, from, n > first, scratch);
            }
            from += SA_SUM_ROWS;
        } while (from < l->rows);
        return;
    }
    t -= tasks;
    int which = 0;
    for (ptrdiff_t panels; t >= (panels = bias_panels(l, which)); ++which) {
        t -= panels;
    }
    const sa_real_kernels *kernels = sa_kernels_for(l->f64);
    const ptrdiff_t column = t * kernels->block_rows, at = bytes_of(l, column);
    kernels->column_sums(g->dy[which] + at, SA_NO_FACTORS, l->rows, l->out[which],
                         sa_smaller(l->out[which] - column, kernels->block_rows), 1, g->dbias[which] + at);
}

/* ---- a product that is a whole call ------------------------------------------------------------------------------ */

int sa_linear_threads(const sa_linear *l, double products, int max_threads) {
    double out = 0;
    for (int which = 0; which < l->count; ++which) {
        out += (double)l->out[which];
    }
    /* reading the weights and making panels takes as long as a few rows */
    const double rows = (double)l->rows + SA_ROWS_OF_PANELS;
    return sa_threads_for(products * rows * (double)l->in * out, SA_LINEAR_WORK_PER_THREAD, HUGE_VAL, max_threads);
}

typedef struct {
    const sa_linear *l;
    const sa_linear_gradients *g; /* NULL in a forward call */
    sa_cut cut;
    int threads;
    ptrdiff_t tasks;
    char *scratch;
    size_t scratch_bytes;
} product_call;

static void run_task(void *call, ptrdiff_t t) {
    const product_call *p = call;
    const ptrdiff_t inputs = p->g == NULL ? 0 : sa_linear_input_tasks(p->g, &p->cut);
    if (sa_stops(p->l->watch)) {
        return;
    }
    if (p->g == NULL) {
        sa_linear_task(p->l, &p->cut, t, p->scratch);
    } else if (t < inputs) {
        sa_linear_input_task(p->g, &p->cut, t, p->scratch);
    } else {
        sa_linear_parameter_task(p->g, p->threads, t - inputs, p->scratch);
    }
}

/* Iterations are independent: a task writes its own rows and columns. */
static void run_tasks(void *call, int thread, int team) {
    product_call p = *(const product_call *)call;
    p.scratch += (size_t)thread * p.scratch_bytes;
    sa_take_tasks(team, p.tasks, run_task, &p);
}

static void run_product(const sa_linear *l, const sa_linear_gradients *g, sa_cut cut, int threads, void *scratch) {
    product_call call = {.l = l, .g = g, .cut = cut, .threads = threads, .scratch = scratch};
    call.tasks =
        g == NULL ? sa_linear_tasks(l, &cut) : sa_linear_input_tasks(g, &cut) + sa_linear_parameter_tasks(g, threads);
    call.scratch_bytes = sa_linear_scratch(l, threads, SA_BY_TEAM, g != NULL);
    sa_run_team(threads, run_tasks, &call);
}

void sa_linear_forward(const sa_linear *l, int threads, void *scratch) {
    const sa_linear_gradients *none = NULL;
    run_product(l, none, sa_cut_product(l, threads, SA_BY_TEAM), threads, scratch);
}

void sa_linear_backward(const sa_linear_gradients *g, int threads, void *scratch) {
    run_product(g->l, g, sa_cut_input(g->l, threads, SA_BY_TEAM), threads, scratch);
}
