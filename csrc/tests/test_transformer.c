/* The embedding model: its products against plain loops; its results, of any way to run it, against those of plain C in
 * double, which Python's tests check. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/transformer_tasks.h"
#include "tests/test.h"

static double get(const void *x, bool f64, ptrdiff_t i) { return f64 ? ((const double *)x)[i] : (double)((const float *)x)[i]; }

static void put(void *x, bool f64, ptrdiff_t i, double value) {
    element_set((char *)x + i * (ptrdiff_t)sa_element_size(f64), f64 ? SA_F64 : SA_F32, false, value);
}

static void *draw(ptrdiff_t n, bool f64, random_source *random) {
    void *x = malloc((size_t)n * sa_element_size(f64) + (n == 0));
    for (ptrdiff_t i = 0; i < n; ++i) {
        put(x, f64, i, random_between(random, -1, 1));
    }
    return x;
}

/* ---- products ----------------------------------------------------------------------------------------------------------- */

enum { NT, NN, TN };

static void multiply(int kind, const sa_real_kernels *kernels, const sa_product *p, void *scratch) {
    (kind == NT ? kernels->matmul_nt : kind == NN ? kernels->matmul_nn : kernels->matmul_tn)(p, scratch);
}

/* An element from `sum` on, in double; terms have their size in all. */
static double product_at(int kind, const sa_product *p, bool f64, ptrdiff_t i, ptrdiff_t j, double sum, double *size) {
    *size = 0;
    for (ptrdiff_t k = 0; k < p->n; ++k) {
        const double a = get(p->a, f64, kind == TN ? k * p->a_stride + i : i * p->a_stride + k);
        const double b = get(p->b, f64, kind == NT ? j * p->b_stride + k : k * p->b_stride + j);
        sum += a * b;
        *size += fabs(a * b);
    }
    return sum;
}

static void try_product(int kind, ptrdiff_t m, ptrdiff_t n, ptrdiff_t width, bool f64) {
    const sa_real_kernels *kernels = sa_kernels_for(f64);
    const ptrdiff_t d = kind == TN ? width : n;
    if (kind == TN) {
        m = m < SA_WEIGHT_ROWS ? m : SA_WEIGHT_ROWS;
        n = n < SA_SUM_ROWS ? n : SA_SUM_ROWS;
    } else if (n < kernels->splits_from) {
        width = width < kernels->block_rows ? width : kernels->block_rows;
    }
    random_source random = {(uint64_t)(m * 1000 + n * 10 + width)};
    const ptrdiff_t a_rows = kind == TN ? n : m, a_columns = kind == TN ? m : n;
    const ptrdiff_t b_rows = kind == NT ? width : n, b_columns = kind == NT ? n : width, c_stride = width + 3;
    void *a = draw(a_rows * a_columns, f64, &random), *b = draw(b_rows * b_columns, f64, &random);
    void *c = draw(m * c_stride, f64, &random), *before = malloc((size_t)(m * c_stride) * sa_element_size(f64) + 1);
    void *start = draw(width, f64, &random), *scratch = dirty_memory(kernels->matmul_scratch(m, d));
    memcpy(before, c, (size_t)(m * c_stride) * sa_element_size(f64));
    const bool adds = kind == NN || (kind == TN && m % 2 == 1);
    const sa_product p = {m, n, width, a, b, c, a_columns, b_columns, c_stride, start, .adds = adds};
    multiply(kind, kernels, &p, scratch);
    double worst = 0;
    for (ptrdiff_t i = 0; i < m; ++i) {
        for (ptrdiff_t j = 0; j < c_stride; ++j) {
            double sum = get(before, f64, i * c_stride + j), size;
            if (j < width) {
                sum = product_at(kind, &p, f64, i, j, kind == NT ? get(start, f64, j) : adds ? sum : 0, &size);
            }
            const double error = fabs(get(c, f64, i * c_stride + j) - sum);
            worst = error <= worst ? worst : error; /* NaN counts */
        }
    }
    /* n + 2 terms up to 1 and their sum are rounded */
    const double bound = (double)(n + 2) * sqrt((double)(n + 2)) * (f64 ? 2.3e-16 : 1.2e-7);
    CHECK(worst <= bound, "product %d, %td x %td x %td, float%d: off by %g, more than %g", kind, m, n, width, f64 ? 64 : 32,
          worst, bound);
    free(a);
    free(b);
    free(c);
    free(before);
    free(start);
    free(scratch);
}

/* An operand still split in the scratch gives the same bits. Numbers that cannot be split spoil no other row or column. */
static void try_split(int kind, ptrdiff_t m, ptrdiff_t n, ptrdiff_t width, float odd) {
    const sa_real_kernels *kernels = sa_kernels_for(false);
    if ((kind == TN ? width : n) < kernels->splits_from) {
        return;
    }
    random_source random = {(uint64_t)(m + n + width)};
    const ptrdiff_t a_stride = kind == TN ? m : n, b_stride = kind == NT ? n : width;
    float *a = draw(m * n, false, &random), *b = draw(n * width, false, &random),
          *other = draw(n * (m + width), false, &random);
    float *start = draw(width, false, &random), *c[3];
    sa_product p = {m, n, width, a, b, NULL, a_stride, b_stride, width, start, .adds = false};
    void *scratch = dirty_memory(kernels->matmul_scratch(m, kind == TN ? width : n));
    const ptrdiff_t row = m / 2, column = width / 3, k = n / 2;
    for (int run = 0; run < 3; ++run) { /* plain, after another product, with odd numbers */
        if (run == 2) {
            a[kind == TN ? k * m + row : row * n + k] = odd;
            b[kind == NT ? column * n + k : k * width + column] = odd;
        }
        p.c = c[run] = calloc((size_t)(m * width), sizeof(float));
        p.again = run == 1;
        if (run == 1) {
            sa_product before = p;
            *(kind == TN ? &before.a : &before.b) = other;
            before.again = false;
            multiply(kind, kernels, &before, scratch);
            memset(p.c, 0, (size_t)(m * width) * sizeof(float));
        }
        multiply(kind, kernels, &p, scratch);
    }
    CHECK(memcmp(c[0], c[1], (size_t)(m * width) * sizeof(float)) == 0, "product %d of %td: an operand used again", kind, n);
    const double bound = (double)(n + 2) * sqrt((double)(n + 2)) * 1.2e-7;
    for (ptrdiff_t i = 0; i < m; ++i) {
        for (ptrdiff_t j = 0; j < width; ++j) {
            const float before = c[0][i * width + j], now = c[2][i * width + j];
            if (i == row || j == column) {
                double size;
                const double sum = product_at(kind, &p, false, i, j, kind == NT ? (double)start[j] : 0, &size);
                if (fabs(sum) < 3.3e38) { /* else NaN or overflow shows */
                    CHECK(fabs((double)now - sum) <= bound * size, "product %d at %td, %td: %g, not %g", kind, i, j,
                          (double)now, sum);
                } else if (!(fabs(sum) < 3.5e38)) {
                    CHECK(!isfinite(now), "product %d at %td, %td: %g, not %g", kind, i, j, (double)now, sum);
                }
            } else if (kind != TN && j / SA_SPLIT_COLUMNS != column / SA_SPLIT_COLUMNS) {
                CHECK(memcmp(&before, &now, sizeof now) == 0, "product %d: %td, %td beside an odd number", kind, i, j);
            } else {
                CHECK(fabsf(before - now) <= (float)bound, "product %d: %td, %td in the panel of an odd number", kind, i, j);
            }
        }
    }
    for (int run = 0; run < 3; ++run) {
        free(c[run]);
    }
    free(a);
    free(b);
    free(other);
    free(start);
    free(scratch);
}

/* ---- the model ---------------------------------------------------------------------------------------------------------- */

#define MOST_BLOCKS 3

typedef struct {
    ptrdiff_t d, heads, blocks, vocabulary, sentences;
    ptrdiff_t length[8];
} model_shape;

enum { MOST_PARAMETERS = 1 + 8 * MOST_BLOCKS };

/* In the order of gradients: table, then blocks. */
typedef struct {
    sa_embedding e;
    sa_embedding_block block[MOST_BLOCKS];
    void *parameter[MOST_PARAMETERS], *positions;
    ptrdiff_t size[MOST_PARAMETERS];
    int parameters;
    int64_t *ids, starts[9];
} model;

/* The same numbers in both types. */
static void *draw_float32(ptrdiff_t n, bool f64, random_source *random) {
    void *x = draw(n, f64, random);
    for (ptrdiff_t i = 0; i < n; ++i) {
        put(x, f64, i, (double)(float)get(x, f64, i));
    }
    return x;
}

static void model_make(model *m, const model_shape *shape, bool f64) {
    random_source random = {(uint64_t)shape->d};
    const ptrdiff_t d = shape->d;
    memset(m, 0, sizeof *m);
    m->e = (sa_embedding){.f64 = f64,
                          .d = d,
                          .vocabulary = shape->vocabulary,
                          .sentences = shape->sentences,
                          .blocks = shape->blocks,
                          .most_heads = shape->heads,
                          .block = m->block,
                          .starts = m->starts};
    for (ptrdiff_t s = 0; s < shape->sentences; ++s) {
        m->starts[s + 1] = m->starts[s] + shape->length[s];
        m->e.longest = shape->length[s] > m->e.longest ? shape->length[s] : m->e.longest;
    }
    m->e.tokens = (ptrdiff_t)m->starts[shape->sentences];
    m->ids = malloc((size_t)m->e.tokens * sizeof *m->ids + 1);
    for (ptrdiff_t i = 0; i < m->e.tokens; ++i) {
        m->ids[i] = random_below(&random, shape->vocabulary);
    }
    m->e.ids = m->ids;
    m->parameters = (int)(1 + 8 * shape->blocks);
    for (int i = 0; i < m->parameters; ++i) {
        m->size[i] = i == 0 ? shape->vocabulary * d : (i - 1) % 8 < 6 && (i - 1) % 2 == 0 ? d * d : d;
        m->parameter[i] = draw_float32(m->size[i], f64, &random);
    }
    m->positions = draw_float32(m->e.longest * d, f64, &random);
    m->e.table = m->parameter[0];
    m->e.positions = m->positions;
    for (ptrdiff_t b = 0; b < shape->blocks; ++b) {
        void **p = m->parameter + 1 + 8 * b;
        m->block[b] = (sa_embedding_block){{p[0], p[2], p[4]}, {p[1], p[3], p[5]}, p[6], p[7], shape->heads, 1e-5};
    }
}

static void model_free(model *m) {
    for (int i = 0; i < m->parameters; ++i) {
        free(m->parameter[i]);
    }
    free(m->positions);
    free(m->ids);
}

/* As many threads even for small cases, by parts or by tasks of phases. */
static void *run_forward(const model *m, int threads, bool by_parts, void **saved) {
    sa_embedding_plan plan;
    CHECK(sa_embedding_make_plan(&m->e, saved != NULL, 1, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    plan.by_parts = by_parts;
    plan.product_rows = by_parts ? plan.part_rows : SA_PRODUCT_ROWS;
    plan.product_shares = sa_embedding_splits(&m->e) ? threads : 0;
    if (!by_parts && saved == NULL) {
        plan.shared_bytes = sa_embedding_frame_bytes(&m->e, m->e.tokens, false);
    }
    void *out = dirty_memory((size_t)(m->e.sentences * m->e.d) * sa_element_size(m->e.f64));
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes), *memory = NULL;
    if (saved != NULL) {
        memory = *saved = dirty_memory(plan.saved_bytes);
    }
    sa_embedding_forward(&m->e, &plan, out, memory, scratch);
    free(scratch);
    return out;
}

static void run_backward(const model *m, const void *saved, const void *grad, int threads, void **gradient) {
    sa_embedding_block_gradients of_block[MOST_BLOCKS + 1];
    for (int i = 0; i < m->parameters; ++i) {
        gradient[i] = dirty_memory((size_t)m->size[i] * sa_element_size(m->e.f64));
    }
    for (ptrdiff_t b = 0; b < m->e.blocks; ++b) {
        void **g = gradient + 1 + 8 * b;
        of_block[b] = (sa_embedding_block_gradients){{g[0], g[2], g[4]}, {g[1], g[3], g[5]}, g[6], g[7]};
    }
    const sa_embedding_gradients g = {grad, gradient[0], of_block};
    sa_embedding_plan plan;
    CHECK(sa_embedding_plan_backward(&m->e, 1 << 10, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    plan.product_rows = 1 + plan.product_rows / 2;
    plan.product_shares = sa_embedding_splits(&m->e) ? threads : 0;
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes);
    sa_embedding_backward(&m->e, &g, &plan, saved, scratch);
    free(scratch);
}

/* Output, then gradients. */
typedef struct {
    void *array[1 + MOST_PARAMETERS];
} results;

static void run_both(const model *m, const void *grad, int threads, results *r) {
    void *saved;
    r->array[0] = run_forward(m, threads, threads == 1, &saved);
    run_backward(m, saved, grad, threads, r->array + 1);
    free(saved);
}

static void results_free(const model *m, results *r) {
    for (int i = 0; i <= m->parameters; ++i) {
        free(r->array[i]);
    }
}

/* Sums of d terms and a softmax per block; norms keep size 1. Gradients are sums of all tokens. That of the keys' bias
 * is 0 but for rounding, of the size of the weights' gradient. */
static void compare(const model *m, const results *got, const results *expected, int threads) {
    const bool f64 = m->e.f64;
    double size = 1, before;
    for (int i = 0; i <= m->parameters; ++i) {
        const ptrdiff_t n = i == 0 ? m->e.sentences * m->e.d : m->size[i - 1];
        double worst = 0;
        before = size;
        size = 1;
        for (ptrdiff_t j = 0; j < n; ++j) {
            const double right = get(expected->array[i], true, j), error = fabs(get(got->array[i], f64, j) - right);
            worst = error <= worst ? worst : error; /* NaN counts */
            size = i > 0 ? fmax(size, fabs(right)) : 1;
        }
        size = i > 1 && (i - 2) % 8 == 3 ? before : size;
        const double bound = (i == 0 ? 256 : 512) * (f64 ? 2.3e-16 : 1.2e-7) * size;
        CHECK(worst <= bound, "model of width %td, float%d, %d threads, array %d: off by %g, more than %g", m->e.d,
              f64 ? 64 : 32, threads, i, worst, bound);
    }
}

static void try_model(const model_shape *shape) {
    const char *isa = sa_isa_name();
    random_source random = {1};
    model m;
    results expected, got[2];
    const ptrdiff_t outputs = shape->sentences * shape->d;
    double *grad = draw_float32(outputs, true, &random);
    model_make(&m, shape, true);
    CHECK(sa_isa_set("generic") == SA_OK, "plain C");
    run_both(&m, grad, 1, &expected);
    CHECK(sa_isa_set(isa) == SA_OK, "and back");
    model_free(&m);
    for (int f64 = 0; f64 < 2; ++f64) {
        model_make(&m, shape, f64);
        void *own_grad = malloc((size_t)outputs * sa_element_size(f64));
        for (ptrdiff_t i = 0; i < outputs; ++i) {
            put(own_grad, f64, i, grad[i]);
        }
        for (int n = 0; n < 2; ++n) {
            run_both(&m, own_grad, 1 + 2 * n, &got[n]);
            compare(&m, &got[n], &expected, 1 + 2 * n);
        }
        void *others[] = {run_forward(&m, 1, true, NULL), run_forward(&m, 3, true, NULL), run_forward(&m, 3, false, NULL),
                          got[1].array[0]};
        for (int way = 0; way < 4; ++way) {
            CHECK(memcmp(got[0].array[0], others[way], (size_t)outputs * sa_element_size(f64)) == 0,
                  "model of width %td, float%d: the bits of way %d differ", shape->d, f64 ? 64 : 32, way);
            if (way < 3) {
                free(others[way]);
            }
        }
        results_free(&m, &got[0]);
        results_free(&m, &got[1]);
        free(own_grad);
        model_free(&m);
    }
    results_free(&m, &expected);
    free(grad);
}

void test_embedding(void) {
    static const ptrdiff_t rows[] = {0, 1, 2, 5, 6, 13, 64, 97}, depths[] = {0, 1, 7, 16, 17, 96, 128, 129, 270},
                           columns[] = {1, 2, 7, 8, 9, 16, 17, 33, 64, 97, 130};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
        for (size_t j = 0; j < sizeof depths / sizeof *depths; ++j) {
            for (size_t k = quick ? i % 2 : 0; k < sizeof columns / sizeof *columns; k += quick ? 2 : 1) {
                for (int kind = NT; kind <= TN; ++kind) {
                    try_product(kind, rows[i], depths[j], columns[k], false);
                    try_product(kind, rows[i], depths[j], columns[k], true);
                }
            }
        }
    }
    static const float odd[] = {NAN, -INFINITY, 3.4e38f, 2e38f, 1e-37f, 0};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i) {
        for (int kind = NT; kind <= TN; ++kind) {
            try_split(kind, 40, 100, 130, odd[i]);
            try_split(kind, 9, 129, 96, odd[i]);
        }
    }
    static const model_shape shapes[] = {
        {2, 1, 1, 3, 1, {1}},        {4, 2, 3, 5, 3, {3, 1, 4}},        {6, 3, 1, 40, 2, {17, 9}},
        {8, 1, 0, 7, 2, {2, 3}},     {18, 2, 2, 9, 4, {5, 66, 1, 30}},  {34, 1, 1, 9, 8, {40, 3, 60, 70, 1, 80, 30, 50}},
        {66, 3, 1, 11, 2, {12, 20}}, {100, 2, 2, 9, 4, {5, 66, 1, 30}}, {128, 1, 1, 9, 8, {40, 3, 60, 70, 1, 80, 30, 50}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) {
        try_model(&shapes[i]);
    }
}
