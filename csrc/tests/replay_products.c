/* Vectors of products: matrices, compact weights, quants, and what is rounded or looked up for them. */
#include <stdio.h>
#include <string.h>

#include "drivers/compact.h"
#include "drivers/quants.h"
#include "tests/vectors.h"

#define NUMBER(name) (ptrdiff_t)find_number(c, name, 0)
static const float *floats(vector_case *c, const char *name) {
    return (const float *)(const void *)find_data(c, "%s", name);
}

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

#define PRODUCT(kind, member) FIELD(sa_product, kind, member)
static const field product_fields[] = {
    PRODUCT(SIZE, m),        PRODUCT(SIZE, n),    PRODUCT(SIZE, width),    PRODUCT(DATA, a),
    PRODUCT(DATA, b),        PRODUCT(DATA, c),    PRODUCT(SIZE, a_stride), PRODUCT(SIZE, b_stride),
    PRODUCT(SIZE, c_stride), PRODUCT(FLAG, adds), PRODUCT(DATA, bias),
};

enum { NT, NN, TN };

/* Products whose operands a matrix unit splits have the same bits if one is already in scratch. */
void replay_matmul(vector_case *c, int run) {
    const bool f64 = find_number(c, "f64", 0) != 0;
    const int kind = (int)find_number(c, "kind", 0);
    const sa_real_kernels *k = sa_kernels_for(f64);
    sa_product p = {.far = run == OTHERWISE};
    BIND(c, "", product_fields, &p);
    void (*multiply)(const sa_product *, void *) = kind == NT ? k->matmul_nt : kind == NN ? k->matmul_nn : k->matmul_tn;
    const ptrdiff_t split = kind == TN ? p.width : p.n, item = (ptrdiff_t)sa_element_size(f64), width = p.width;
    void *scratch = scratch_memory(k->matmul_scratch(p.m, split));
    const vector_array *other = find_array(c, kind == TN ? "a" : "b"), *result = find_array(c, "c");
    if (run == TEAM && split >= k->splits_from) {
        sa_product before = p;
        *(kind == TN ? &before.a : &before.b) = zero_memory((size_t)other->bytes);
        multiply(&before, scratch);
        memcpy(result->data - result->first, result->content, (size_t)result->bytes);
        p.again = true;
    }
    const ptrdiff_t most = kind == NN && p.n < k->splits_from ? k->block_rows : width;
    for (ptrdiff_t column = 0; column < width; column += most, p.b = (const char *)p.b + most * item) {
        p.width = sa_smaller(most, width - column);
        multiply(&p, scratch);
        p.c = (char *)p.c + most * item;
    }
}

/* ---- products with weights --------------------------------------------------------------------------------------- */

#define LINEAR(kind, member) FIELD(sa_linear, kind, member)
#define EACH(name, kind, type, member)                                                                                 \
    {name "0", kind, offsetof(type, member[0])}, {name "1", kind, offsetof(type, member[1])}, {                        \
        name "2", kind, offsetof(type, member[2])                                                                      \
    }
static const field linear_fields[] = {
    LINEAR(FLAG, f64),
    LINEAR(CODE, weights),
    LINEAR(FLAG, decoding),
    LINEAR(CODE, digits),
    LINEAR(SIZE, rows),
    LINEAR(SIZE, in),
    LINEAR(CODE, count),
    LINEAR(DATA, x),
    LINEAR(DATA, residual),
    LINEAR(CODE, activation),
    LINEAR(DATA, gate),
    LINEAR(DATA, active),
    LINEAR(REAL, dropout.p),
    LINEAR(WORD, dropout.seed),
    EACH("out", SIZE, sa_linear, out),
    EACH("weight", DATA, sa_linear, weight),
    EACH("bias", DATA, sa_linear, bias),
    EACH("y", DATA, sa_linear, y),
};
static const field linear_gradient_fields[] = {
    EACH("dy", DATA, sa_linear_gradients, dy),
    FIELD(sa_linear_gradients, DATA, dx),
    EACH("dweight", DATA, sa_linear_gradients, dweight),
    EACH("dbias", DATA, sa_linear_gradients, dbias),
};

/* One thread takes all rows, as it does for a share of the transformer. */
static void run_by_share(const sa_linear *l) {
    const sa_cut cut = sa_cut_product(l, 2, true);
    void *scratch = scratch_memory(sa_linear_scratch(l, 2, true, false));
    for (ptrdiff_t t = sa_linear_tasks(l, &cut) - 1; t >= 0; --t) {
        sa_linear_task(l, &cut, t, scratch);
    }
}

static void run_rows(const sa_linear *l, ptrdiff_t row, ptrdiff_t rows, int threads) {
    sa_linear some = *l;
    const ptrdiff_t item = (ptrdiff_t)sa_element_size(l->f64), at = row * l->out[0] * item;
    some.rows = rows;
    some.dropout.first_row += row;
    some.x += row * l->in * item;
    some.residual = l->residual ? l->residual + at : NULL;
    some.gate = l->gate ? l->gate + at : NULL;
    some.active = l->active ? l->active + at : NULL;
    for (int which = 0; which < l->count; ++which) {
        some.y[which] += row * l->out[which] * item;
    }
    sa_linear_forward(&some, threads,
                      scratch_memory((size_t)threads * sa_linear_scratch(&some, threads, false, false)));
}

void replay_linear(vector_case *c, int run) {
    sa_linear l = {0};
    sa_linear_gradients g = {.l = &l};
    sa_compact compact[SA_MOST_WEIGHTS];
    BIND(c, "", linear_fields, &l);
    BIND(c, "", linear_gradient_fields, &g);
    const sa_quant_type type = (sa_quant_type)find_number(c, "type", 0);
    const bool in_place = find_number(c, "in_place", 0) != 0, rounds = l.weights != SA_WEIGHTS_WHOLE;
    for (int which = 0; which < l.count && rounds; ++which) {
        const char *scale = find_data(c, "scale%d", which);
        if (l.weights == SA_WEIGHTS_QUANTS) {
            compact[which] = sa_quants_at(type, l.out[which], l.in, l.weight[which]);
            if (run == TEAM && sa_quant_kinds[type].numbers > 1) {
                const size_t bytes = (size_t)(l.out[which] * compact[which].row_bytes);
                sa_quants_fill(&(sa_copied_quants){&compact[which], dirty_memory(bytes)}, 1, 2);
            }
        } else if (sa_compact_active(l.weights)) {
            compact[which] =
                sa_compact_fill(l.weights, l.out[which], l.in, l.weight[which], (const float *)(const void *)scale,
                                dirty_memory(sa_compact_bytes(l.weights, l.out[which], l.in)));
        }
        l.weight[which] = (const char *)&compact[which];
    }
    if (rounds && l.weights != SA_WEIGHTS_QUANTS && !sa_compact_active(l.weights)) {
        skip_case(c);
        return;
    }
    if (l.activation != SA_ACT_NONE) {
        l.y[0] = in_place ? l.active : scratch_memory((size_t)(l.rows * l.out[0]) * sa_element_size(l.f64));
    } else if (in_place) {
        l.residual = l.y[0];
    }
    if (run == OTHERWISE && !rounds) {
        run_by_share(&l);
    } else {
        const ptrdiff_t piece = run == OTHERWISE ? 1 + l.in % 7 : l.rows;
        for (ptrdiff_t row = 0; row < l.rows || (row == 0 && l.rows == 0); row += sa_larger(piece, 1)) {
            run_rows(&l, row, sa_smaller(l.rows - row, piece), run == OTHERWISE ? 1 : threads_of(run));
        }
    }
    if (g.dy[0]) {
        const int threads = threads_of(run);
        sa_linear_backward(&g, threads, scratch_memory((size_t)threads * sa_linear_scratch(&l, threads, false, true)));
    }
}

/* ---- rounding, leaves, tables, quants ---------------------------------------------------------------------------- */

void replay_rounding(vector_case *c, int run) {
    (void)run;
    const vector_array *x = find_array(c, "x"), *q = find_array(c, "q");
    sa_kernels_active()->quantize_rows((const float *)(const void *)x->data, x->shape[0], x->shape[1],
                                       (uint8_t *)q->data, q->shape[1], (sa_rounded *)(void *)find_data(c, "groups"));
}

/* Each run takes another unit of those that this CPU has. Zeros follow a row; anything may follow the panel. */
void replay_leaf(vector_case *c, int run) {
    const bool int8 = find_number(c, "int8", 0) != 0;
    const vector_array *x = find_array(c, "x");
    const ptrdiff_t rows = x->shape[0], n = x->shape[1], words = NUMBER("words");
    const sa_compact_unit *units[8];
    int count = 0;
    for (const sa_compact_unit *const *u = int8 ? sa_kernels_active()->int8 : sa_kernels_active()->bf16; *u; ++u) {
        if (sa_cpu_runs((*u)->name) && rows <= (*u)->most_rows) {
            units[count++] = *u;
        }
        CHECK(!int8 || u[1] || sa_cpu_runs((*u)->name), "the last unit, %s, does not run", (*u)->name);
    }
    const char *panel = find_data(c, "panel");
    char *sums = find_data(c, "sums");
    if (count == 0) {
        skip_case(c);
        return;
    }
    const sa_compact_unit *u = units[run % count];
    const ptrdiff_t item = int8 && !u->widened ? 1 : 2, stride = (sa_ceil_div(n * item, 64) | 1) * 64;
    const size_t all = (size_t)(u->most_rows * SA_PANEL_COLUMNS * SA_WORD);
    char *own = scratch_memory((size_t)(u->most_rows * stride)), *own_sums = scratch_memory(all);
    char *own_panel = scratch_memory((size_t)find_array(c, "panel")->bytes);
    memcpy(own_panel, panel, (size_t)find_array(c, "panel")->bytes);
    memset(own, 0, (size_t)(rows * stride));
    for (ptrdiff_t r = 0; r < rows; ++r) {
        for (ptrdiff_t i = 0; i < n; ++i) {
            if (item == 1 || !int8) {
                memcpy(own + r * stride + i * item, x->data + (r * n + i) * item, (size_t)item);
            } else {
                own[r * stride + 2 * i] = x->data[r * n + i];
            }
        }
    }
    if (u->start) {
        u->start();
    }
    u->leaf(&(sa_compact_tile){rows, words, own, stride, own_panel, own_sums});
    if (u->end) {
        u->end();
    }
    memcpy(sums, own_sums, (size_t)(rows * SA_PANEL_COLUMNS * SA_WORD));
}

void replay_table(vector_case *c, int run) {
    (void)run;
    const vector_array *out = find_array(c, "out");
    sa_kernels_active()->look_up_compact(find_data(c, "table"), floats(c, "scale"), floats(c, "added"),
                                         floats(c, "positions"), (const int64_t *)(const void *)find_data(c, "ids"),
                                         out->shape[0], out->shape[1], (float *)(void *)out->data);
}

void replay_quants(vector_case *c, int run) {
    (void)run;
    const vector_array *out = find_array(c, "out"), *found = find_array(c, "found");
    const sa_compact w =
        sa_quants_at((sa_quant_type)find_number(c, "type", 0), out->shape[0], out->shape[1], find_data(c, "weight"));
    for (ptrdiff_t row = 0; row < w.out; ++row) {
        sa_quants_row(&w, row, (float *)(void *)out->data + row * w.in);
    }
    sa_quants_look_up(&w, floats(c, "added"), floats(c, "positions"),
                      (const int64_t *)(const void *)find_data(c, "ids"), found->shape[0],
                      (float *)(void *)found->data);
}
