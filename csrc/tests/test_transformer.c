/* The transformer: its products against plain loops; its results, however it is run, against plain C in double, which Python's
 * tests check. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/compact.h"
#include "drivers/transformer.h"
#include "tests/test.h"

/* ---- products ----------------------------------------------------------------------------------------------------------- */

enum { NT, NN, TN };

static void multiply(int kind, const sa_real_kernels *kernels, const sa_product *p, void *scratch) {
    (kind == NT ? kernels->matmul_nt : kind == NN ? kernels->matmul_nn : kernels->matmul_tn)(p, scratch);
}

/* Adds an element's terms to `sum`, in double; *size becomes the sum of their magnitudes. */
static double product_at(int kind, const sa_product *p, bool f64, ptrdiff_t i, ptrdiff_t j, double sum, double *size) {
    *size = 0;
    for (ptrdiff_t k = 0; k < p->n; ++k) {
        const double a = real_get(p->a, f64, kind == TN ? k * p->a_stride + i : i * p->a_stride + k);
        const double b = real_get(p->b, f64, kind == NT ? j * p->b_stride + k : k * p->b_stride + j);
        sum += a * b;
        *size += fabs(a * b);
    }
    return sum;
}

static void try_product(int kind, ptrdiff_t m, ptrdiff_t n, ptrdiff_t width, bool f64) {
    FREES_AT_END;
    const sa_real_kernels *kernels = sa_kernels_for(f64);
    const ptrdiff_t d = kind == TN ? width : n;
    if (kind == TN) {
        m = m < SA_WEIGHT_ROWS ? m : SA_WEIGHT_ROWS;
        n = n < SA_SUM_ROWS ? n : SA_SUM_ROWS;
    } else if (kind == NN && n < kernels->splits_from) {
        width = width < kernels->block_rows ? width : kernels->block_rows;
    }
    random_source random = {(uint64_t)(m * 1000 + n * 10 + width)};
    const ptrdiff_t a_rows = kind == TN ? n : m, a_columns = kind == TN ? m : n;
    const ptrdiff_t b_rows = kind == NT ? width : n, b_columns = kind == NT ? n : width, c_stride = width + 3;
    void *a = draw_reals(a_rows * a_columns, f64, &random), *b = draw_reals(b_rows * b_columns, f64, &random);
    void *c = draw_reals(m * c_stride, f64, &random), *before = zero_memory((size_t)(m * c_stride) * sa_element_size(f64));
    void *scratch = dirty_memory(kernels->matmul_scratch(m, d));
    memcpy(before, c, (size_t)(m * c_stride) * sa_element_size(f64));
    const bool adds = m % 2 == 1;
    void *bias = kind == NT && m % 4 == 0 ? draw_reals(width, f64, &random) : NULL;
    const sa_product p = {m, n, width, a, b, c, a_columns, b_columns, c_stride, .adds = adds, .far = m % 3 == 1, .bias = bias};
    multiply(kind, kernels, &p, scratch);
    double worst = 0;
    for (ptrdiff_t i = 0; i < m; ++i) {
        for (ptrdiff_t j = 0; j < c_stride; ++j) {
            double sum = real_get(before, f64, i * c_stride + j), size;
            if (j < width) {
                sum = product_at(kind, &p, f64, i, j, adds ? sum : bias != NULL ? real_get(bias, f64, j) : 0, &size);
            }
            const double error = fabs(real_get(c, f64, i * c_stride + j) - sum);
            worst = error <= worst ? worst : error; /* true for NaN */
        }
    }
    /* n + 2 terms up to 1 and their sum are rounded */
    const double bound = (double)(n + 2) * sqrt((double)(n + 2)) * (f64 ? 2.3e-16 : 1.2e-7);
    CHECK(worst <= bound, "product %d, %td x %td x %td, float%d: off by %g, more than %g", kind, m, n, width, f64 ? 64 : 32,
          worst, bound);
}

/* An operand that is already split in scratch must yield the same bits. Numbers that cannot be split must change no other
 * sum. */
static void try_split(int kind, ptrdiff_t m, ptrdiff_t n, ptrdiff_t width, float odd) {
    FREES_AT_END;
    const sa_real_kernels *kernels = sa_kernels_for(false);
    if ((kind == TN ? width : n) < kernels->splits_from) {
        return;
    }
    random_source random = {(uint64_t)(m + n + width)};
    const ptrdiff_t a_stride = kind == TN ? m : n, b_stride = kind == NT ? n : width;
    float *a = draw_reals(m * n, false, &random), *b = draw_reals(n * width, false, &random),
          *other = draw_reals(n * (m + width), false, &random);
    float *c[3];
    sa_product p = {m, n, width, a, b, NULL, a_stride, b_stride, width, .adds = false};
    void *scratch = dirty_memory(kernels->matmul_scratch(m, kind == TN ? width : n));
    const ptrdiff_t row = m / 2, column = width / 3, k = n / 2;
    for (int run = 0; run < 3; ++run) { /* plain; with an operand in scratch; with special numbers */
        if (run == 2) {
            a[kind == TN ? k * m + row : row * n + k] = odd;
            b[kind == NT ? column * n + k : k * width + column] = odd;
        }
        p.c = c[run] = zero_memory((size_t)(m * width) * sizeof(float));
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
                const double sum = product_at(kind, &p, false, i, j, 0, &size);
                if (fabs(sum) < 3.3e38) { /* otherwise NaN or overflow shows */
                    CHECK(fabs((double)now - sum) <= bound * size, "product %d at %td, %td: %g, not %g", kind, i, j,
                          (double)now, sum);
                } else if (!(fabs(sum) < 3.5e38)) {
                    CHECK(!isfinite(now), "product %d at %td, %td: %g, not %g", kind, i, j, (double)now, sum);
                }
            } else if (kind != TN && j / SA_SPLIT_COLUMNS != column / SA_SPLIT_COLUMNS) {
                CHECK(memcmp(&before, &now, sizeof now) == 0, "product %d: %td, %td away from an odd number", kind, i, j);
            } else {
                CHECK(fabsf(before - now) <= (float)bound, "product %d: %td, %td in the panel of an odd number", kind, i, j);
            }
        }
    }
}

/* Without rows nothing is computed, but gradients of parameters must be zeros. */
static void try_no_rows(ptrdiff_t in, ptrdiff_t out, bool f64) {
    FREES_AT_END;
    random_source random = {1};
    void *weight = draw_reals(out * in, f64, &random), *dweight = dirty_memory((size_t)(out * in) * sa_element_size(f64));
    const sa_linear l = {.f64 = f64, .in = in, .count = 1, .out = {out}, .weight = {weight}, .x = weight, .y = {dweight}};
    const sa_linear_gradients g = {.l = &l, .dy = {weight}, .dx = dweight, .dweight = {dweight}};
    void *scratch = dirty_memory(sa_linear_scratch(&l, 1, false, true));
    sa_linear_forward(&l, 1, scratch);
    sa_linear_backward(&g, 1, scratch);
    double most = 0;
    for (ptrdiff_t i = 0; i < out * in; ++i) {
        most = fabs(real_get(dweight, f64, i)) <= most ? most : INFINITY;
    }
    CHECK(most == 0, "no rows, %td x %td: a gradient is not 0", out, in);
}

/* ---- the model ---------------------------------------------------------------------------------------------------------- */

#define MOST_LAYERS 3

/* Kinds of layers: the tutorial's; BERT's; a layer with the norms first, gates, grouped heads, rotary positions and RMSNorm,
 * also of heads and before the sums; GPT's, with a window; one with dropout. */
enum { PLAIN, BERT, GATED, GPT, DROPS };

typedef struct {
    int kind;
    ptrdiff_t d, heads, layers, vocabulary, sequences;
    ptrdiff_t length[8];
} model_shape;

enum { OF_LAYER = 2 * SA_LAYER_PARAMETERS, MOST_PARAMETERS = 5 + OF_LAYER * MOST_LAYERS };

/* The table, first norm, layers and final norm; absent ones have size 0. */
typedef struct {
    sa_transformer e;
    sa_layer layer[MOST_LAYERS];
    void *parameter[MOST_PARAMETERS], *positions, *angles;
    ptrdiff_t size[MOST_PARAMETERS];
    int parameters;
    int64_t *ids, starts[9];
} model;

/* Draws the same numbers for both types. */
static void *draw_float32(ptrdiff_t n, bool f64, random_source *random) {
    void *x = draw_reals(n, f64, random);
    for (ptrdiff_t i = 0; i < n; ++i) {
        real_set(x, f64, i, (double)(float)real_get(x, f64, i));
    }
    return x;
}

static void make_layer(sa_layer *l, const model_shape *shape, ptrdiff_t size[OF_LAYER]) {
    const int kind = shape->kind;
    const ptrdiff_t d = shape->d, width = d / shape->heads;
    *l = (sa_layer){.heads = shape->heads,
                    .key_heads = kind == GATED ? 1 : shape->heads,
                    .width = width,
                    .hidden = kind == PLAIN ? 0 : d + 3,
                    .norm_first = kind >= GATED,
                    .causal = kind == GATED || kind == GPT,
                    .window_left = kind == BERT || kind == GPT ? 20 : SA_UNBOUNDED,
                    .window_right = SA_UNBOUNDED,
                    .scale = 1 / sqrt((double)width),
                    .activation = kind == BERT    ? SA_ACT_GELU
                                  : kind == GATED ? SA_ACT_SILU
                                                  : SA_ACT_RELU,
                    .seed = 7};
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        l->eps[which] = which == SA_ATTENTION_NORM ? 1e-5 : 1e-6;
        l->rms[which] = kind == GATED;
    }
    for (int i = 0; i < SA_DROPOUTS; ++i) {
        l->dropout[i] = kind == DROPS ? 0.1 * (i + 1) : 0;
    }
    const ptrdiff_t keys = l->key_heads * width, h = l->hidden;
    const ptrdiff_t rows[SA_LAYER_PARAMETERS] = {d, keys, keys, d, d, h, h, d, d, width, width, d, d};
    const ptrdiff_t columns[SA_LAYER_PARAMETERS] = {d, d, d, d, 1, d, d, h, 1, 1, 1, 1, 1};
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        const bool gated = which == SA_GATE || which >= SA_QUERY_NORM;
        const bool absent = kind == PLAIN ? which == SA_OUTPUT || which >= SA_UP : gated && kind != GATED;
        const bool bias = !absent && kind != GATED;
        size[2 * which] = absent ? 0 : rows[which] * columns[which];
        size[2 * which + 1] = bias ? rows[which] : 0;
    }
}

static void model_make(model *m, const model_shape *shape, bool f64) {
    random_source random = {(uint64_t)shape->d};
    const ptrdiff_t d = shape->d;
    memset(m, 0, sizeof *m);
    m->e = (sa_transformer){.f64 = f64,
                            .d = d,
                            .vocabulary = shape->vocabulary,
                            .sequences = shape->sequences,
                            .layers = shape->layers,
                            .layer = m->layer,
                            .pooling = shape->kind == GATED || shape->kind == GPT ? SA_EACH_ROW
                                       : shape->kind == DROPS                     ? SA_LAST_ROW
                                                                                  : SA_MEAN_ROW,
                            .starts = m->starts};
    for (ptrdiff_t s = 0; s < shape->sequences; ++s) {
        m->starts[s + 1] = m->starts[s] + shape->length[s];
        m->e.longest = shape->length[s] > m->e.longest ? shape->length[s] : m->e.longest;
    }
    m->e.tokens = (ptrdiff_t)m->starts[shape->sequences];
    m->ids = zero_memory((size_t)m->e.tokens * sizeof *m->ids);
    for (ptrdiff_t i = 0; i < m->e.tokens; ++i) {
        m->ids[i] = random_below(&random, shape->vocabulary);
    }
    m->e.ids = m->ids;
    m->parameters = (int)(5 + OF_LAYER * shape->layers);
    m->size[0] = shape->vocabulary * d;
    m->size[1] = m->size[2] = shape->kind == BERT ? d : 0;
    for (ptrdiff_t i = 0; i < shape->layers; ++i) {
        make_layer(&m->layer[i], shape, m->size + 3 + OF_LAYER * i);
    }
    m->size[m->parameters - 2] = shape->kind >= GATED ? d : 0;
    for (int i = 0; i < m->parameters; ++i) {
        m->parameter[i] = m->size[i] == 0 ? NULL : draw_float32(m->size[i], f64, &random);
    }
    m->positions = draw_float32(m->e.longest * d, f64, &random);
    m->e.table = m->parameter[0];
    m->e.positions = shape->kind == GATED ? NULL : m->positions;
    m->e.first_norm = (sa_norm){m->parameter[1], m->parameter[2], 1e-5, false};
    m->e.final_norm = (sa_norm){m->parameter[m->parameters - 2], NULL, 1e-5, true};
    const ptrdiff_t half = d / shape->heads / 2;
    m->angles = draw_float32(m->e.longest * (half + 1), f64, &random); /* numbers that are no sines and cosines suffice */
    for (ptrdiff_t i = 0; i < shape->layers; ++i) {
        sa_layer *l = &m->layer[i];
        for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
            l->weight[which] = m->parameter[3 + OF_LAYER * i + 2 * which];
            l->bias[which] = m->parameter[4 + OF_LAYER * i + 2 * which];
        }
        if (shape->kind == GATED && half > 0) {
            l->rotary = (sa_rotary){m->angles, m->angles, 2 * half, i % 2 == 1};
        }
    }
}

static ptrdiff_t transformer_outputs(const sa_transformer *e) {
    return (e->pooling == SA_EACH_ROW ? e->tokens : e->sequences) * e->d;
}

/* Runs with this number of threads even in small cases, by shares or by tasks of phases. Returns the outputs. */
static void *transformer_run(const sa_transformer *e, int threads, bool by_shares, void **saved) {
    sa_transformer_plan plan;
    CHECK(sa_transformer_make_plan(e, saved != NULL, 1, &plan) == SA_OK, "a plan");
    const size_t attention = plan.scratch_bytes; /* with a cache, more than a task's scratch */
    plan.threads = threads;
    plan.by_shares = by_shares;
    plan.far = threads == 3;
    plan.layout = sa_layout_of(e, by_shares && saved == NULL ? plan.share_rows : e->tokens, saved != NULL);
    plan.scratch_bytes = plan.layout.bytes + attention + sa_transformer_scratch(e, &plan, false);
    plan.shared_bytes = plan.layout.bytes + (size_t)e->sequences * plan.partial_bytes;
    void *out = dirty_memory((size_t)transformer_outputs(e) * sa_element_size(e->f64));
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes);
    if (saved != NULL) {
        *saved = dirty_memory(plan.saved_bytes);
    }
    sa_transformer_forward(e, &plan, out, saved == NULL ? NULL : *saved, scratch);
    for (ptrdiff_t i = 0; i < transformer_outputs(e); ++i) {
        note_result(real_get(out, e->f64, i));
    }
    return out;
}

/* As transformer_run, with the weights of each layer's heads, (rows, keys): no row's bits change, and weights add up to 1. */
static void *run_with_weights(const sa_transformer *e, int threads, bool by_shares, ptrdiff_t rows, ptrdiff_t keys) {
    sa_transformer own = *e;
    const ptrdiff_t all = e->layers * e->sequences * e->layer[0].heads * rows;
    own.weights = zero_memory((size_t)(all * keys) * sa_element_size(e->f64));
    void *out = transformer_run(&own, threads, by_shares, NULL);
    for (ptrdiff_t row = 0; row < all; ++row) {
        double sum = 0;
        for (ptrdiff_t key = 0; key < keys; ++key) {
            sum += real_get(own.weights, e->f64, row * keys + key);
        }
        const bool padding = row % rows >= sa_length_of(e, row / rows / e->layer[0].heads % e->sequences);
        CHECK(fabs(sum - !padding) <= 1e-5, "weights of row %td add up to %g", row, sum);
    }
    return out;
}

static void run_backward(const model *m, const void *saved, const void *grad, int threads, void **gradient) {
    sa_layer_gradients of_layer[MOST_LAYERS + 1];
    for (int i = 0; i < m->parameters; ++i) {
        gradient[i] = m->size[i] == 0 ? NULL : dirty_memory((size_t)m->size[i] * sa_element_size(m->e.f64));
    }
    for (ptrdiff_t i = 0; i < m->e.layers; ++i) {
        for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
            of_layer[i].weight[which] = gradient[3 + OF_LAYER * i + 2 * which];
            of_layer[i].bias[which] = gradient[4 + OF_LAYER * i + 2 * which];
        }
    }
    const sa_transformer_gradients g = {.grad_out = grad,
                                        .table = gradient[0],
                                        .first_norm = {gradient[1], gradient[2]},
                                        .final_norm = {gradient[m->parameters - 2], NULL},
                                        .layer = of_layer};
    sa_transformer_plan plan;
    CHECK(sa_transformer_plan_backward(&m->e, 1 << 10, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    plan.scratch_bytes = sa_transformer_scratch(&m->e, &plan, true);
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes);
    sa_transformer_backward(&m->e, &g, &plan, saved, scratch);
    for (int i = 0; i < m->parameters; ++i) {
        for (ptrdiff_t n = 0; gradient[i] != NULL && n < m->size[i]; ++n) {
            note_result(real_get(gradient[i], m->e.f64, n));
        }
    }
}

/* The output, then the gradients. */
typedef struct {
    void *array[1 + MOST_PARAMETERS];
} results;

static void run_both(const model *m, const void *grad, int threads, results *r) {
    void *saved;
    r->array[0] = transformer_run(&m->e, threads, threads == 1, &saved);
    run_backward(m, saved, grad, threads, r->array + 1);
}

/* Returns the largest error of n numbers, NaN included; *most becomes the largest expected number. */
static double worst_of(const void *got, const void *expected, bool f64, bool expected_f64, ptrdiff_t n, double *most) {
    double worst = *most = 0;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double right = real_get(expected, expected_f64, i), error = fabs(real_get(got, f64, i) - right);
        worst = error <= worst ? worst : error;
        *most = fmax(*most, fabs(right));
    }
    return worst;
}

/* A layer has sums of d terms, a softmax and a feed-forward network; norms keep size 1. Gradients are sums over all tokens. The
 * gradient of the keys' bias is 0 but for rounding, at the scale of the weights' gradient. */
static void compare(const model *m, const results *got, const results *expected, int threads) {
    const bool f64 = m->e.f64;
    double size = 1, most;
    for (int i = 0; i <= m->parameters; ++i) {
        const ptrdiff_t n = i == 0 ? transformer_outputs(&m->e) : m->size[i - 1];
        const double worst = worst_of(got->array[i], expected->array[i], f64, true, n, &most);
        size = i > 3 && (i - 4) % OF_LAYER == 2 * SA_KEY + 1 ? size : fmax(1, most);
        const double bound = (i == 0 ? 256 : 512) * (f64 ? 2.3e-16 : 1.2e-7) * size;
        CHECK(worst <= bound, "model of width %td, float%d, %d threads, array %d: off by %g, more than %g", m->e.d,
              f64 ? 64 : 32, threads, i, worst, bound);
    }
}

static void try_model(const model_shape *shape) {
    FREES_AT_END;
    const char *isa = sa_isa_name();
    random_source random = {1};
    model m;
    results expected, got[2];
    model_make(&m, shape, true);
    const ptrdiff_t outputs = transformer_outputs(&m.e);
    double *grad = draw_float32(outputs, true, &random);
    CHECK(sa_isa_set("generic") == SA_OK, "plain C");
    run_both(&m, grad, 1, &expected);
    CHECK(sa_isa_set(isa) == SA_OK, "and back");
    for (int f64 = 0; f64 < 2; ++f64) {
        model_make(&m, shape, f64);
        void *own_grad = zero_memory((size_t)outputs * sa_element_size(f64));
        for (ptrdiff_t i = 0; i < outputs; ++i) {
            real_set(own_grad, f64, i, grad[i]);
        }
        for (int n = 0; n < 2; ++n) {
            run_both(&m, own_grad, 1 + 2 * n, &got[n]);
            compare(&m, &got[n], &expected, 1 + 2 * n);
        }
        for (int i = 1; i <= m.parameters; ++i) {
            CHECK(memcmp(got[0].array[i] == NULL ? "" : got[0].array[i], got[1].array[i] == NULL ? "" : got[1].array[i],
                         (size_t)m.size[i - 1] * sa_element_size(f64)) == 0,
                  "model of width %td, float%d: gradient %d differs between threads", shape->d, f64 ? 64 : 32, i);
        }
        void *others[] = {transformer_run(&m.e, 1, true, NULL), transformer_run(&m.e, 3, true, NULL),
                          shape->kind == DROPS ? transformer_run(&m.e, 3, false, NULL)
                                               : run_with_weights(&m.e, 3, false, m.e.longest, m.e.longest),
                          got[1].array[0]};
        for (int way = 0; way < 4; ++way) {
            CHECK(memcmp(got[0].array[0], others[way], (size_t)outputs * sa_element_size(f64)) == 0,
                  "model of width %td, float%d: the bits of way %d differ", shape->d, f64 ? 64 : 32, way);
        }
    }
}

/* ---- with a cache -------------------------------------------------------------------------------------------------------- */

/* Runs the sequences `first` … first + count − 1 with a cache, in three pieces: two thirds of the tokens, then all but the last,
 * then the last; or in one. out has the rows of all sequences. */
static void run_pieces(const model *m, ptrdiff_t first, ptrdiff_t count, int pieces, bool prompt, int threads, bool by_shares,
                       void *out) {
    model some = *m;
    const ptrdiff_t size = (ptrdiff_t)sa_element_size(m->e.f64), keys = m->layer[0].key_heads * m->layer[0].width;
    const ptrdiff_t capacity = m->e.longest + 2;
    const size_t bytes = (size_t)(m->e.layers * count * keys * capacity * size);
    int64_t past[8] = {0}, starts[9] = {0}, *ids = zero_memory((size_t)m->e.tokens * sizeof *ids);
    some.e.cache =
        (sa_cache){dirty_memory(bytes), dirty_memory(bytes), past, capacity, .narrow = m->e.cache.narrow, .dtype = SA_F16};
    some.e.sequences = count;
    some.e.layer = some.layer;
    some.e.ids = ids;
    some.e.starts = starts;
    for (int piece = 3 - pieces; piece < 3; ++piece) {
        some.e.cache.prompt = prompt || piece < 2; /* a sequence alone may have one token in the second piece */
        some.e.longest = 0;
        for (ptrdiff_t s = 0; s < count; ++s) {
            const ptrdiff_t begin = (ptrdiff_t)m->starts[first + s], n = (ptrdiff_t)m->starts[first + s + 1] - begin;
            const ptrdiff_t until = piece == 0 ? n - n / 3 - 1 : piece == 1 ? n - 1 : n;
            const ptrdiff_t length = until - (ptrdiff_t)past[s];
            memcpy(ids + starts[s], m->ids + begin + past[s], (size_t)length * sizeof *ids);
            starts[s + 1] = starts[s] + length;
            some.e.longest = length > some.e.longest ? length : some.e.longest;
        }
        some.e.tokens = (ptrdiff_t)starts[count];
        char *rows = count == 1
                         ? run_with_weights(&some.e, threads, by_shares, some.e.tokens, (ptrdiff_t)past[0] + some.e.tokens)
                         : transformer_run(&some.e, threads, by_shares, NULL);
        for (ptrdiff_t s = 0; s < count; ++s) {
            memcpy((char *)out + (m->starts[first + s] + past[s]) * m->e.d * size, rows + starts[s] * m->e.d * size,
                   (size_t)((starts[s + 1] - starts[s]) * m->e.d * size));
            past[s] += starts[s + 1] - starts[s];
        }
    }
}

/* Up to rounding, rows must be the same as without a cache. Bits must depend neither on other sequences nor on threads, and in
 * prompts not on how a prompt is cut. */
static void try_cache(const model_shape *shape, bool f64, bool narrow) {
    FREES_AT_END;
    model m;
    model_make(&m, shape, f64);
    const ptrdiff_t n = transformer_outputs(&m.e);
    const size_t bytes = (size_t)n * sa_element_size(f64);
    void *expected = transformer_run(&m.e, 1, true, NULL);
    m.e.cache.narrow = narrow;
    void *got[6];
    for (int way = 0; way < 6; ++way) { /* way 3 runs each sequence alone; ways 4 and 5 are prompts */
        got[way] = dirty_memory(bytes);
        for (ptrdiff_t s = 0; s < (way == 3 ? shape->sequences : 1); ++s) {
            run_pieces(&m, s, way == 3 ? 1 : shape->sequences, way == 4 ? 1 : 3, way > 3, way == 1 || way == 2 ? 3 : 1, way < 2,
                       got[way]);
        }
        CHECK(memcmp(got[way < 4 ? 0 : 4], got[way], bytes) == 0, "a cache, width %td, float%d: the bits of way %d differ",
              shape->d, f64 ? 64 : 32, way);
    }
    double most;
    const double worst = worst_of(got[0], expected, f64, f64, n, &most);
    const double bound = 256 * (f64 ? 2.3e-16 : narrow ? 4.9e-4 : 1.2e-7) * fmax(1, most); /* see compare */
    CHECK(worst <= bound, "a cache, width %td, float%d: off by %g, more than %g", shape->d, f64 ? 64 : 32, worst, bound);
}

/* ---- with compact weights ------------------------------------------------------------------------------------------------ */

/* A copy of a model with compact weights; the model's weights become the same numbers. */
typedef struct {
    sa_transformer e;
    sa_layer layer[MOST_LAYERS];
    sa_compact compact[MOST_LAYERS][SA_LAYER_PARAMETERS];
} compact_model;

/* Rounds x (rows, columns) to numbers of int8 or bfloat16. Returns these, and for int8 the scales. */
static char *round_numbers(sa_weights kind, float *x, ptrdiff_t rows, ptrdiff_t columns, float **scales) {
    const ptrdiff_t groups = sa_ceil_div(columns, SA_GROUP);
    char *to = dirty_memory((size_t)(rows * columns) * 2);
    *scales = dirty_memory((size_t)(rows * groups) * sizeof **scales);
    for (ptrdiff_t g = 0; g < rows * groups; ++g) {
        const ptrdiff_t row = g / groups * columns, from = row + g % groups * SA_GROUP;
        const ptrdiff_t end = sa_smaller(row + columns, from + SA_GROUP);
        float most = 0;
        for (ptrdiff_t i = from; i < end; ++i) {
            most = fmaxf(most, fabsf(x[i]));
        }
        const float scale = (*scales)[g] = most / 127;
        for (ptrdiff_t i = from; i < end; ++i) {
            if (kind == SA_WEIGHTS_INT8) {
                const int8_t q = (int8_t)rintf(x[i] / scale);
                to[i] = (char)q;
                x[i] = scale * (float)q;
            } else {
                element_set(to + 2 * i, SA_BF16, false, (double)x[i]);
                x[i] = (float)element_get(to + 2 * i, SA_BF16, false);
            }
        }
    }
    return to;
}

/* Reduces the model to attention without a norm after it, whose output replaces its input; two rows cannot be rounded. */
static void keep_attention_alone(model *m) {
    random_source random = {5};
    float *rows = dirty_memory((size_t)(m->e.tokens * m->e.d) * sizeof *rows);
    for (ptrdiff_t i = 0; i < m->e.tokens * m->e.d; ++i) {
        rows[i] = (float)random_between(&random, -1, 1) * (i / m->e.d == 7 ? 1e-33f : i / m->e.d == 8 ? 1e-42f : 1);
    }
    m->e.rows = rows;
    m->e.ids = NULL;
    m->e.table = m->e.positions = m->e.first_norm.weight = m->e.final_norm.weight = NULL;
    m->e.pooling = SA_EACH_ROW;
    for (ptrdiff_t i = 0; i < m->e.layers; ++i) {
        m->layer[i].norm_first = false;
        m->layer[i].hidden = 0;
        for (int which = SA_ATTENTION_NORM; which < SA_LAYER_PARAMETERS; ++which) {
            m->layer[i].weight[which] = m->layer[i].bias[which] = NULL;
        }
    }
}

static void compact_make(compact_model *c, model *m, sa_weights kind, bool alone) {
    float *scales;
    if (alone) {
        keep_attention_alone(m);
    }
    c->e = m->e;
    c->e.layer = c->layer;
    for (ptrdiff_t i = 0; i < m->e.layers; ++i) {
        c->layer[i] = m->layer[i];
        c->layer[i].weights = kind;
        for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
            if (m->layer[i].weight[which] == NULL || sa_is_norm(which)) {
                continue;
            }
            const int at = (int)(3 + OF_LAYER * i) + 2 * which;
            const ptrdiff_t columns = which == SA_DOWN ? m->layer[i].hidden : m->e.d, rows = m->size[at] / columns;
            float *x = m->parameter[at];
            for (ptrdiff_t k = 0; k < m->size[at]; ++k) {
                x[k] *= 2 / sqrtf((float)columns);
            }
            const char *numbers = round_numbers(kind, x, rows, columns, &scales);
            char *panels = dirty_memory(sa_compact_bytes(kind, rows, columns));
            c->compact[i][which] = sa_compact_fill(kind, rows, columns, numbers, scales, panels);
            c->layer[i].weight[which] = &c->compact[i][which];
        }
    }
    if (!alone) {
        c->e.table = round_numbers(kind, m->parameter[0], m->e.vocabulary, m->e.d, &scales);
        c->e.table_kind = kind;
        c->e.table_scale = kind == SA_WEIGHTS_INT8 ? scales : NULL;
    }
}

static float *run_alone(const sa_transformer *e, ptrdiff_t sequence) {
    const int64_t start = e->starts[sequence], starts[2] = {0, e->starts[sequence + 1] - start};
    sa_transformer one = *e;
    one.tokens = one.longest = (ptrdiff_t)starts[1];
    one.sequences = 1;
    one.starts = starts;
    one.ids = e->ids == NULL ? NULL : e->ids + start;
    one.rows = e->rows == NULL ? NULL : (const float *)e->rows + start * e->d;
    return transformer_run(&one, 1, true, NULL);
}

/* Results must be close to those with these weights in float32, with the same bits however the model runs, and for each
 * sequence alone. A product rounds its rows: to 1/255 of a range that is about 8 times the size of a number, or to 8 bits. The
 * errors of up to 7 products of a layer add up. */
static void try_compact(const model_shape *shape, sa_weights kind, bool alone) {
    FREES_AT_END;
    model m;
    compact_model c;
    model_make(&m, shape, false);
    compact_make(&c, &m, kind, alone);
    const ptrdiff_t outputs = transformer_outputs(&m.e), d = m.e.d;
    const double bound = sqrt(7.0 * (double)m.e.layers) * (kind == SA_WEIGHTS_INT8 ? 8.0 / 255 / sqrt(12.0) : 0x1p-9);
    float *got = transformer_run(&c.e, 1, true, NULL), *right = transformer_run(&m.e, 1, true, NULL);
    double difference = 0, size = 0;
    for (ptrdiff_t i = 0; i < outputs; ++i) {
        difference += pow((double)got[i] - (double)right[i], 2);
        size += pow((double)right[i], 2);
    }
    difference = sqrt(difference / size);
    CHECK(difference <= bound && difference > 0,
          "model %d, weights of kind %d, attention alone %d: a relative error of %g, more than %g", shape->kind, kind, alone,
          difference, bound);
    for (int way = 1; way < 4; ++way) {
        float *other = transformer_run(&c.e, way < 2 ? 1 : 3, way % 2 == 0, NULL);
        CHECK(memcmp(got, other, (size_t)outputs * sizeof *got) == 0, "model %d, weights of kind %d: way %d differs",
              shape->kind, kind, way);
    }
    for (ptrdiff_t s = 0; s < m.e.sequences && shape->kind != DROPS; ++s) { /* dropout depends on the row in the call */
        float *own_rows = run_alone(&c.e, s);
        const bool each = m.e.pooling == SA_EACH_ROW;
        const ptrdiff_t first = each ? (ptrdiff_t)m.starts[s] : s, rows = each ? (ptrdiff_t)m.starts[s + 1] - first : 1;
        CHECK(memcmp(got + first * d, own_rows, (size_t)(rows * d) * sizeof *got) == 0,
              "model %d, weights of kind %d: sequence %td differs alone", shape->kind, kind, s);
    }
}

void test_compact_models(void) {
    static const model_shape shapes[] = {{BERT, 144, 3, 2, 11, 5, {5, 66, 1, 30, 150}},
                                         {DROPS, 144, 3, 2, 11, 5, {5, 66, 1, 30, 150}},
                                         {GATED, 48, 3, 2, 11, 5, {5, 66, 1, 30, 150}}};
    for (int kind = SA_WEIGHTS_INT8; kind <= SA_WEIGHTS_BF16; ++kind) {
        for (int n = 0; n < 5 && sa_compact_active(kind) != NULL; ++n) {
            try_compact(&shapes[n % 3], kind, n >= 3);
        }
    }
}

void test_transformer(void) {
    static const ptrdiff_t rows[] = {0, 1, 2, 5, 6, 13, 64, 97}, depths[] = {0, 1, 7, 16, 17, 96, 128, 129, 268},
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
    for (int f64 = 0; f64 < 2; ++f64) {
        try_no_rows(3, 5, f64);
        try_no_rows(130, 97, f64);
    }
    static const float odd[] = {NAN, -INFINITY, 3.4e38f, 2e38f, 1e-37f, 0};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; ++i) {
        for (int kind = NT; kind <= TN; ++kind) {
            try_split(kind, 40, 100, 130, odd[i]);
            try_split(kind, 9, 129, 96, odd[i]);
        }
    }
    static const model_shape shapes[] = {
        {PLAIN, 2, 1, 1, 3, 1, {1}},
        {PLAIN, 4, 2, 3, 5, 3, {3, 1, 4}},
        {PLAIN, 6, 3, 1, 40, 2, {17, 9}},
        {PLAIN, 8, 1, 0, 7, 2, {2, 3}},
        {PLAIN, 18, 2, 2, 9, 4, {5, 66, 1, 30}},
        {PLAIN, 34, 1, 1, 9, 8, {40, 3, 60, 70, 1, 80, 30, 50}},
        {PLAIN, 66, 3, 1, 11, 2, {12, 20}},
        {PLAIN, 100, 2, 2, 9, 4, {5, 66, 1, 30}},
        {PLAIN, 128, 1, 1, 9, 8, {40, 3, 60, 70, 1, 80, 30, 50}},
        {BERT, 2, 1, 1, 3, 1, {1}},
        {BERT, 18, 2, 2, 9, 4, {5, 66, 1, 30}},
        {BERT, 100, 4, 2, 9, 3, {70, 3, 20}},
        {BERT, 100, 4, 2, 9, 0, {0}},
        {GATED, 6, 3, 1, 40, 2, {17, 9}},
        {GATED, 40, 2, 3, 7, 4, {30, 1, 67, 4}},
        {GATED, 100, 2, 1, 9, 2, {12, 20}},
        {GPT, 12, 3, 2, 7, 2, {3, 40}},
        {DROPS, 8, 2, 2, 7, 2, {2, 3}},
        {DROPS, 72, 3, 2, 9, 3, {5, 66, 30}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) {
        try_model(&shapes[i]);
    }
    /* The keys of the last model are cut into chunks. */
    static const model_shape cached[] = {
        {GATED, 6, 3, 1, 40, 2, {17, 9}},    {GATED, 40, 2, 3, 7, 4, {30, 3, 150, 4}}, {GPT, 12, 2, 2, 7, 3, {3, 4, 40}},
        {GPT, 100, 4, 2, 9, 3, {70, 3, 20}}, {GATED, 4, 1, 1, 5, 2, {2100, 40}},
    };
    for (size_t i = 0; i < sizeof cached / sizeof *cached; ++i) {
        try_cache(&cached[i], false, false);
        try_cache(&cached[i], false, true);
        try_cache(&cached[i], true, false);
    }
}
