/* Transformers whose layers and tables have compact weights: close to the same with these weights in float32, and the same
 * bits of any way to run them and for each sequence alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/compact.h"
#include "drivers/transformer_tasks.h"
#include "tests/test.h"

enum { LAYERS = 2, SEQUENCES = 5, D = 48, WIDTH = 16, HIDDEN = 200, VOCABULARY = 11 };

/* BERT's layers; those with the norms first, gates, RMSNorm, rotary positions and grouped heads; and attention without a norm
 * behind it, whose output replaces its input. */
enum { NORMS_AFTER, GATED, ALONE, KINDS };

typedef struct {
    sa_transformer e;
    sa_layer layer[LAYERS];
    sa_compact compact[LAYERS][SA_LAYER_PARAMETERS];
    int64_t starts[SEQUENCES + 1];
    random_source random;
    void *owned[256];
    int count;
} model;

static void *own(model *m, size_t bytes) { return m->owned[m->count++] = dirty_memory(bytes); }

static float *draw(model *m, ptrdiff_t n, double size) {
    float *x = own(m, (size_t)n * sizeof *x);
    for (ptrdiff_t i = 0; i < n; ++i) {
        x[i] = (float)random_between(&m->random, -size, size);
    }
    return x;
}

/* Numbers that int8 or bfloat16 hold, compact and as float32. */
typedef struct {
    void *compact;
    float *scale, *whole;
} numbers;

static numbers draw_compact(model *m, sa_weights kind, ptrdiff_t rows, ptrdiff_t columns, double size) {
    const float *x = draw(m, rows * columns, size);
    const ptrdiff_t groups = sa_ceil_div(columns, SA_GROUP);
    numbers n = {own(m, (size_t)(rows * columns) * (kind == SA_WEIGHTS_INT8 ? 1 : 2)),
                 own(m, (size_t)(rows * groups) * sizeof(float)), own(m, (size_t)(rows * columns) * sizeof(float))};
    for (ptrdiff_t g = 0; g < rows * groups; ++g) {
        const ptrdiff_t row = g / groups * columns, from = row + g % groups * SA_GROUP;
        const ptrdiff_t end = sa_smaller(row + columns, from + SA_GROUP);
        float most = 0;
        for (ptrdiff_t i = from; i < end; ++i) {
            most = fmaxf(most, fabsf(x[i]));
        }
        n.scale[g] = most / 127;
        for (ptrdiff_t i = from; i < end; ++i) {
            if (kind == SA_WEIGHTS_INT8) {
                const int8_t q = (int8_t)rintf(x[i] / n.scale[g]);
                ((int8_t *)n.compact)[i] = q;
                n.whole[i] = n.scale[g] * (float)q;
            } else {
                char *half = (char *)n.compact + 2 * i;
                element_set(half, SA_BF16, false, (double)x[i]);
                n.whole[i] = (float)element_get(half, SA_BF16, false);
            }
        }
    }
    return n;
}

static void make_layer(model *m, ptrdiff_t i, int kind, sa_weights weights, bool compact, bool drops) {
    sa_layer *l = &m->layer[i];
    *l = (sa_layer){.weights = compact ? weights : SA_WEIGHTS_WHOLE,
                    .heads = D / WIDTH,
                    .key_heads = kind == GATED ? 1 : D / WIDTH,
                    .width = WIDTH,
                    .hidden = kind == ALONE ? 0 : HIDDEN,
                    .eps = {1e-5, 1e-5},
                    .rms = {kind == GATED, kind == GATED},
                    .norm_first = kind == GATED,
                    .causal = kind == GATED,
                    .window_left = SA_UNBOUNDED,
                    .window_right = SA_UNBOUNDED,
                    .scale = 0.25,
                    .activation = kind == GATED ? SA_ACT_SILU : SA_ACT_GELU,
                    .seed = 3};
    const ptrdiff_t keys = l->key_heads * WIDTH;
    const ptrdiff_t rows[SA_LAYER_PARAMETERS] = {D, keys, keys, D, D, HIDDEN, HIDDEN, D, D};
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        const bool norm = which == SA_ATTENTION_NORM || which == SA_LAST_NORM;
        if (kind == ALONE ? which >= SA_ATTENTION_NORM : which == SA_GATE && kind != GATED) {
            continue;
        }
        const ptrdiff_t columns = which == SA_DOWN ? HIDDEN : D;
        l->bias[which] = kind == GATED ? NULL : draw(m, rows[which], 0.1);
        if (norm) {
            l->weight[which] = draw(m, D, 2);
            continue;
        }
        const numbers n = draw_compact(m, weights, rows[which], columns, 2 / sqrt((double)columns));
        l->weight[which] = n.whole;
        if (compact) {
            char *memory = own(m, sa_compact_bytes(weights, rows[which], columns));
            m->compact[i][which] = sa_compact_fill(weights, rows[which], columns, n.compact, n.scale, memory);
            l->weight[which] = &m->compact[i][which];
        }
    }
    l->dropout[SA_DROP_OUTPUT] = drops ? 0.1 : 0;
    l->dropout[SA_DROP_WIDE] = drops && kind != ALONE ? 0.2 : 0;
}

static void model_make(model *m, int kind, sa_weights weights, bool compact, bool drops) {
    static const ptrdiff_t length[SEQUENCES] = {5, 66, 1, 30, 150};
    *m = (model){.e = {.d = D,
                       .vocabulary = VOCABULARY,
                       .sequences = SEQUENCES,
                       .layers = LAYERS,
                       .layer = m->layer,
                       .starts = m->starts,
                       .longest = 150,
                       .pooling = kind == NORMS_AFTER ? SA_MEAN_ROW : SA_EACH_ROW},
                 .random = {(uint64_t)kind}};
    for (int s = 0; s < SEQUENCES; ++s) {
        m->starts[s + 1] = m->starts[s] + length[s];
    }
    m->e.tokens = (ptrdiff_t)m->starts[SEQUENCES];
    for (ptrdiff_t i = 0; i < LAYERS; ++i) {
        make_layer(m, i, kind, weights, compact, drops);
        if (kind == GATED) {
            const float *angles = draw(m, m->e.longest * WIDTH / 2, 1); /* sines and cosines of no angle will do */
            m->layer[i].rotary = (sa_rotary){angles, angles, WIDTH, false};
        }
    }
    if (kind == ALONE) { /* two rows that are multiplied as they are */
        float *rows = draw(m, m->e.tokens * D, 1);
        for (ptrdiff_t i = 7 * D; i < 9 * D; ++i) {
            rows[i] *= i < 8 * D ? 1e-33f : 1e-42f;
        }
        m->e.rows = rows;
        return;
    }
    const numbers table = draw_compact(m, weights, VOCABULARY, D, 1);
    m->e.table = compact ? table.compact : table.whole;
    m->e.table_kind = compact ? weights : SA_WEIGHTS_WHOLE;
    m->e.table_scale = compact && weights == SA_WEIGHTS_INT8 ? table.scale : NULL;
    m->e.always = kind == NORMS_AFTER ? draw(m, D, 0.3) : NULL;
    m->e.positions = draw(m, m->e.longest * D, 0.5);
    m->e.first_norm = (sa_norm){kind == NORMS_AFTER ? draw(m, D, 2) : NULL, NULL, 1e-5, false};
    m->e.final_norm = (sa_norm){kind == GATED ? draw(m, D, 2) : NULL, NULL, 1e-5, true};
    int64_t *ids = own(m, (size_t)m->e.tokens * sizeof *ids);
    for (ptrdiff_t i = 0; i < m->e.tokens; ++i) {
        ids[i] = random_below(&m->random, VOCABULARY);
    }
    m->e.ids = ids;
}

static void model_free(model *m) {
    for (int i = 0; i < m->count; ++i) {
        free(m->owned[i]);
    }
}

static ptrdiff_t outputs_of(const sa_transformer *e) { return (e->pooling == SA_EACH_ROW ? e->tokens : e->sequences) * e->d; }

static float *run(const sa_transformer *e, int threads, bool by_shares) {
    sa_transformer_plan plan;
    CHECK(sa_transformer_make_plan(e, false, 1, &plan) == SA_OK, "a plan");
    plan.threads = threads;
    plan.by_shares = by_shares;
    plan.layout = sa_layout_of(e, by_shares ? plan.share_rows : e->tokens, false);
    plan.scratch_bytes = plan.layout.bytes + sa_transformer_scratch(e, &plan, false);
    plan.shared_bytes = plan.layout.bytes;
    float *out = dirty_memory((size_t)outputs_of(e) * sizeof *out);
    void *scratch = dirty_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes);
    sa_transformer_forward(e, &plan, out, NULL, scratch);
    free(scratch);
    return out;
}

/* Of a sequence alone. */
static float *run_alone(const sa_transformer *e, ptrdiff_t sequence) {
    const int64_t start = e->starts[sequence], starts[2] = {0, e->starts[sequence + 1] - start};
    sa_transformer one = *e;
    one.tokens = one.longest = (ptrdiff_t)starts[1];
    one.sequences = 1;
    one.starts = starts;
    one.ids = e->ids == NULL ? NULL : e->ids + start;
    one.rows = e->rows == NULL ? NULL : (const float *)e->rows + start * e->d;
    return run(&one, 1, true);
}

/* A product rounds its rows: to a step of 1/255 of a range that is some 8 times the size of a number, or to 8 bits. Up to 7
 * products of a layer add what they lost. */
static double bound_of(sa_weights kind) {
    return sqrt(7.0 * LAYERS) * (kind == SA_WEIGHTS_INT8 ? 8.0 / 255 / sqrt(12.0) : 0x1p-9);
}

static void try_model(int kind, sa_weights weights, bool drops) {
    model compact, whole;
    model_make(&compact, kind, weights, true, drops);
    model_make(&whole, kind, weights, false, drops);
    const ptrdiff_t outputs = outputs_of(&compact.e);
    float *got = run(&compact.e, 1, true), *right = run(&whole.e, 1, true);
    double difference = 0, size = 0;
    for (ptrdiff_t i = 0; i < outputs; ++i) {
        difference += pow((double)got[i] - (double)right[i], 2);
        size += pow((double)right[i], 2);
    }
    difference = sqrt(difference / size);
    CHECK(difference <= bound_of(weights) && difference > 0, "model %d, weights of kind %d: off by a share of %g, more than %g",
          kind, weights, difference, bound_of(weights));
    for (int way = 1; way < 4; ++way) {
        float *other = run(&compact.e, way < 2 ? 1 : 3, way % 2 == 0);
        CHECK(memcmp(got, other, (size_t)outputs * sizeof *got) == 0, "model %d, weights of kind %d: way %d differs", kind,
              weights, way);
        free(other);
    }
    for (ptrdiff_t s = 0; s < SEQUENCES && !drops; ++s) { /* dropout goes by the row of the call */
        float *alone = run_alone(&compact.e, s);
        const bool each = compact.e.pooling == SA_EACH_ROW;
        const ptrdiff_t first = each ? (ptrdiff_t)compact.starts[s] : s;
        const ptrdiff_t rows = each ? (ptrdiff_t)compact.starts[s + 1] - first : 1;
        CHECK(memcmp(got + first * D, alone, (size_t)(rows * D) * sizeof *got) == 0,
              "model %d, weights of kind %d: sequence %td differs alone", kind, weights, s);
        free(alone);
    }
    free(got);
    free(right);
    model_free(&compact);
    model_free(&whole);
}

void test_compact_models(void) {
    for (int weights = SA_WEIGHTS_INT8; weights <= SA_WEIGHTS_BF16; ++weights) {
        for (int kind = 0; sa_compact_active(weights) != NULL && kind < KINDS; ++kind) {
            try_model(kind, weights, false);
            try_model(kind, weights, true);
        }
    }
}
