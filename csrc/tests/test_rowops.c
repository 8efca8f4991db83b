/* Gradients of softmax, norms and gelu against closed forms in double: dtypes, layouts, sizes around vectors, pieces,
 * chunks, threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

typedef struct {
    sa_row_kind kind;
    sa_dtype dtype, dy_dtype;
    ptrdiff_t rows, n;
    unsigned layout;
    bool by_columns, weight, bias;
} row_case;

typedef struct {
    row_case t;
    sa_row_call call;
    array x, dy, out, weight;
    char *dweight, *dbias;
} live_rows;

/* Describes an array, whose rows may be columns in memory. */
static void see(sa_strided *s, const array *a, bool by_columns) {
    s->data = a->tensor.m.data;
    s->dtype = a->tensor.m.dtype;
    s->swapped = a->tensor.m.swapped;
    s->stride[by_columns] = a->tensor.m.row_stride;
    s->stride[!by_columns] = a->tensor.m.col_stride;
}

static void rows_make(live_rows *c, const row_case *t, uint64_t seed) {
    random_source r = {seed};
    const array_shape shape = {.rows = t->rows, .cols = t->n}, row = {.rows = 1, .cols = t->n};
    memset(c, 0, sizeof *c);
    c->t = *t;
    array_make(&c->x, &shape, t->dtype, t->layout, 0, false);
    array_make(&c->dy, &shape, t->dy_dtype, t->layout, 0, false);
    array_make(&c->out, &shape, t->dtype, t->by_columns ? TRANSPOSED : 0, 0, true); /* contiguous for the call */
    array_make(&c->weight, &row, t->dtype, t->layout & SWAPPED, 0, false);
    array_draw(&c->x, -3, 3, &r);
    array_draw(&c->dy, -1, 1, &r);
    array_draw(&c->weight, -2, 2, &r);
    c->dweight = zero_memory((size_t)t->n * sa_itemsize(t->dtype));
    c->dbias = zero_memory((size_t)t->n * sa_itemsize(t->dtype));
    sa_row_call *call = &c->call;
    call->kind = t->kind;
    call->f64 = t->dtype == SA_F64;
    call->eps = 0.01;
    call->ndim = 2;
    call->first = t->by_columns ? 0 : 1;
    call->last = call->first + 1;
    call->shape[t->by_columns] = t->rows;
    call->shape[!t->by_columns] = t->n;
    see(&call->array[SA_ROW_X], &c->x, t->by_columns);
    see(&call->array[SA_ROW_DY], &c->dy, t->by_columns);
    see(&call->array[SA_ROW_OUT], &c->out, t->by_columns);
    if (t->weight) {
        see(&call->array[SA_ROW_WEIGHT], &c->weight, false);
        call->array[SA_ROW_WEIGHT].stride[0] = 0;
        call->dweight = (sa_row_gradient){c->dweight, c->t.dtype};
    }
    if (t->bias) {
        call->dbias = (sa_row_gradient){c->dbias, c->t.dtype};
    }
}

static void rows_run(live_rows *c, int threads) {
    sa_row_plan plan;
    CHECK(sa_row_make_plan(&c->call, threads, &plan) == SA_OK, "plan");
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)plan.threads * plan.scratch_bytes);
    memset(c->dweight, 0, (size_t)c->t.n * sa_itemsize(c->t.dtype));
    memset(c->dbias, 0, (size_t)c->t.n * sa_itemsize(c->t.dtype));
    sa_row_run(&c->call, &plan, scratch);
}

/* ---- the closed forms ---------------------------------------------------------------------------------------------- */

typedef struct {
    double *dx, *terms, *dweight, *dweight_terms, *dbias, *dbias_terms;
} row_truth;

static double get(const array *a, ptrdiff_t i, ptrdiff_t j) { return array_get(a, 0, 1, i, j); }

static double gelu_slope(double x, bool approximate, double *terms) {
    double normal = erfc(-x / sqrt(2)) / 2, bent = x * exp(-x * x / 2) / sqrt(2 * acos(-1));
    if (approximate) {
        const double c = 2 * sqrt(2 / acos(-1)), z = c * (x + 0.044715 * x * x * x);
        normal = 1 / (1 + exp(-z));
        bent = x * normal * (1 - normal) * c * (1 + 3 * 0.044715 * x * x);
    }
    *terms = fabs(normal) + fabs(bent) * (1 + x * x);
    return normal + bent;
}

/* Computes dx of row i and the magnitudes of its terms; adds to dweight and dbias. */
static void truth_row(const live_rows *c, ptrdiff_t i, const row_truth *to) {
    const sa_row_kind kind = c->t.kind;
    const ptrdiff_t n = c->t.n;
    const bool centred = kind == SA_LAYER_NORM_BACKWARD, is_log = kind == SA_LOG_SOFTMAX_BACKWARD;
    double mean = 0, top = -INFINITY, sum = 0, squares = 0, along = 0, along_terms = 0, g_sum = 0, g_terms = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        mean += centred ? get(&c->x, i, j) / (double)n : 0;
        top = fmax(top, get(&c->x, i, j));
    }
    for (ptrdiff_t j = 0; j < n; ++j) {
        sum += exp(get(&c->x, i, j) - top);
        squares += (get(&c->x, i, j) - mean) * (get(&c->x, i, j) - mean) / (double)n;
    }
    const double scale = 1 / sqrt(squares + c->call.eps);
    const bool norm = centred || kind == SA_RMS_NORM_BACKWARD;
    for (ptrdiff_t pass = 0; pass < 2; ++pass) {
        for (ptrdiff_t j = 0; j < n; ++j) {
            const double x = get(&c->x, i, j), dy = get(&c->dy, i, j);
            const double t = norm ? (x - mean) * scale : exp(x - top) / sum;
            const double size = norm ? fabs(t) + (centred ? fabs(x * scale) : 0) : t;
            const double g = c->t.weight ? dy * get(&c->weight, 0, j) : dy;
            if (pass == 0) {
                along += g * t;
                along_terms += fabs(g) * size;
                g_sum += g;
                g_terms += fabs(g);
                to->dweight[j] += dy * t;
                to->dweight_terms[j] += fabs(dy) * size;
                to->dbias[j] += dy;
                to->dbias_terms[j] += fabs(dy);
                continue;
            }
            double dx, terms;
            if (norm) {
                dx = scale * (g - (centred ? g_sum / (double)n : 0) - t * along / (double)n);
                terms = scale * (fabs(g) + (centred ? g_terms / (double)n : 0) + size * along_terms / (double)n);
            } else if (is_log) {
                dx = dy - t * g_sum;
                terms = fabs(dy) + t * g_terms;
            } else if (kind == SA_SOFTMAX_BACKWARD) {
                dx = t * (dy - along);
                terms = t * (fabs(dy) + along_terms);
            } else {
                dx = dy * gelu_slope(x, kind == SA_GELU_TANH_BACKWARD, &terms);
                terms *= fabs(dy);
            }
            to->dx[i * n + j] = dx;
            to->terms[i * n + j] = terms;
        }
    }
}

static bool within(double got, double exact, double terms, double few, sa_dtype dtype) {
    const double u = 2 * unit_roundoff(dtype == SA_F64 ? SA_F64 : SA_F32);
    return fabs(got - exact) <= few * u * terms + 2 * unit_roundoff(dtype) * fabs(exact) + 1e-7 * (dtype == SA_F16);
}

static void verify(const live_rows *c, const row_truth *to, const char *title) {
    const ptrdiff_t rows = c->t.rows, n = c->t.n;
    const sa_dtype dtype = c->t.dtype;
    ptrdiff_t wrong = 0, at = 0;
    /* roundings: sums of a row, exp's argument, of size 6, and a dozen more */
    const double few = 24 + sqrt((double)n), across = few + sqrt((double)rows);
    for (ptrdiff_t i = 0; i < rows * n; ++i) {
        if (!within(get(&c->out, i / n, i % n), to->dx[i], to->terms[i], few, dtype)) {
            at = wrong++ == 0 ? i : at;
        }
    }
    for (ptrdiff_t j = 0; j < n; ++j) {
        const size_t offset = (size_t)j * sa_itemsize(dtype);
        const double dweight = element_get(c->dweight + offset, dtype, false);
        const double dbias = element_get(c->dbias + offset, dtype, false);
        wrong += c->t.weight && !within(dweight, to->dweight[j], to->dweight_terms[j], across, dtype);
        wrong += c->t.bias && !within(dbias, to->dbias[j], to->dbias_terms[j], across, dtype);
    }
    CHECK(wrong == 0, "%s of kind %d, dtype %d, %td x %td, layout %u: %td wrong; dx[%td] is %g, should be %g", title, c->t.kind,
          (int)c->t.dtype, rows, n, c->t.layout, wrong, at, get(&c->out, at / n, at % n), to->dx[at]);
}

static void try_rows(const row_case *t, const char *title) {
    FREES_AT_END;
    live_rows c;
    const size_t all = (size_t)(t->rows * t->n), n = (size_t)t->n;
    rows_make(&c, t, 7);
    double *memory = zero_memory((2 * all + 4 * n) * sizeof *memory);
    const row_truth to = {
        memory, memory + all, memory + 2 * all, memory + 2 * all + n, memory + 2 * all + 2 * n, memory + 2 * all + 3 * n};
    for (ptrdiff_t i = 0; i < t->rows; ++i) {
        truth_row(&c, i, &to);
    }
    rows_run(&c, 1);
    verify(&c, &to, title);
    CHECK(array_margins_intact(&c.out), "%s: written outside the output", title);
    array_remember(&c.out);
    const size_t bytes = n * sa_itemsize(c.t.dtype);
    char *kept = memcpy(zero_memory(bytes), c.dweight, bytes);
    rows_run(&c, 3);
    CHECK(array_unchanged(&c.out) && memcmp(kept, c.dweight, bytes) == 0, "%s of kind %d: the threads change bits", title,
          t->kind);
}

void test_rows(void) {
    static const ptrdiff_t sizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 300, 2100};
    static const sa_dtype dtypes[] = {SA_F32, SA_F64, SA_F16, SA_BF16};
    static const unsigned layouts[] = {0, TRANSPOSED, STEPPED_COLS, FLIPPED_ROWS | FLIPPED_COLS, UNALIGNED, SWAPPED};
    for (sa_row_kind kind = SA_SOFTMAX_BACKWARD; kind < SA_ROW_KINDS; ++kind) {
        const bool norm = kind == SA_LAYER_NORM_BACKWARD || kind == SA_RMS_NORM_BACKWARD;
        row_case t = {.kind = kind, .dtype = SA_F32, .dy_dtype = SA_F32, .rows = 5, .n = 40, .weight = norm};
        t.bias = kind == SA_LAYER_NORM_BACKWARD;
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
            for (int d = 0; d < 2; ++d) {
                row_case sized = t;
                sized.n = sizes[s];
                sized.dtype = sized.dy_dtype = dtypes[d];
                try_rows(&sized, "sizes");
            }
        }
        for (size_t l = 0; l < sizeof layouts / sizeof *layouts; ++l) {
            for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; ++d) {
                row_case laid = t;
                laid.layout = layouts[l];
                laid.dtype = dtypes[d];
                laid.dy_dtype = dtypes[(d + l) % 4];
                try_rows(&laid, "layouts");
                laid.by_columns = kind == SA_SOFTMAX_BACKWARD || kind == SA_LOG_SOFTMAX_BACKWARD;
                laid.rows = 270; /* enough columns for two tasks */
                laid.weight = laid.bias = false;
                try_rows(&laid, laid.by_columns ? "columns" : "no parameters");
            }
        }
        t.rows = quick ? 700 : 3000; /* enough for several chunks */
        try_rows(&t, "many rows");
        t.n = 40000; /* enough for several pieces */
        t.rows = 3;
        try_rows(&t, "long rows");
    }
}
