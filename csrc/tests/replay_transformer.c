/* Vectors of transformers: forward and backward, in shares or in phases; with a cache, in pieces; with compact
 * weights. */
#include <stdio.h>
#include <string.h>

#include "drivers/compact.h"
#include "drivers/transformer.h"
#include "tests/vectors.h"

enum { MOST_LAYERS = 3, MOST_SEQUENCES = 8 };

/* ---- names ------------------------------------------------------------------------------------------------------- */

#define MODEL(kind, member) FIELD(sa_transformer, kind, member)
static const field model_fields[] = {
    MODEL(FLAG, f64),
    MODEL(SIZE, d),
    MODEL(SIZE, vocabulary),
    MODEL(SIZE, tokens),
    MODEL(SIZE, sequences),
    MODEL(SIZE, layers),
    MODEL(SIZE, longest),
    {"table.weight", DATA, offsetof(sa_transformer, table)},
    {"table.scale", DATA, offsetof(sa_transformer, table_scale)},
    MODEL(CODE, table_kind),
    MODEL(REAL, table_factor),
    MODEL(DATA, token_type_row),
    MODEL(DATA, positions),
    MODEL(DATA, ids),
    MODEL(DATA, rows),
    MODEL(DATA, starts),
    MODEL(TENSOR, mask),
    MODEL(TENSOR, key_bias),
    MODEL(CODE, pooling),
};
#define LAYER(kind, member) FIELD(sa_layer, kind, member)
static const field layer_fields[] = {
    LAYER(CODE, weights),    LAYER(SIZE, heads),          LAYER(SIZE, key_heads),
    LAYER(SIZE, width),      LAYER(SIZE, hidden),         LAYER(FLAG, norm_first),
    LAYER(FLAG, causal),     LAYER(SIZE, window_left),    LAYER(REAL, scale),
    LAYER(REAL, softcap),    LAYER(CODE, activation),     LAYER(DATA, rotary.cos),
    LAYER(DATA, rotary.sin), LAYER(SIZE, rotary.rotated), LAYER(FLAG, rotary.interleaved),
    LAYER(REAL, dropout[0]), LAYER(REAL, dropout[1]),     LAYER(REAL, dropout[2]),
    LAYER(REAL, dropout[3]), LAYER(WORD, seed),
};
#define GRADIENTS(member) {#member, DATA, offsetof(sa_transformer_gradients, member)}
static const field model_gradient_fields[] = {
    GRADIENTS(grad_out),
    {"table.weight", DATA, offsetof(sa_transformer_gradients, table)},
    GRADIENTS(rows),
    GRADIENTS(mask),
};
/* A norm; or a weight, which has no eps. */
#define NORM(kind, member) FIELD(sa_norm, kind, member)
static const field norm_fields[] = {NORM(DATA, weight), NORM(DATA, bias), NORM(REAL, eps), NORM(FLAG, rms)};

/* Finds an array's gradient, which the call changes. */
static void *find_gradient(vector_case *c, const char *name, const char *of) {
    return find_data(c, "d.%s.%s", name, of);
}

static const char *const parameters[SA_LAYER_PARAMETERS] = {[SA_QUERY] = "query",
                                                            [SA_KEY] = "key",
                                                            [SA_VALUE] = "value",
                                                            [SA_OUTPUT] = "output",
                                                            [SA_ATTENTION_NORM] = "attention_norm",
                                                            [SA_UP] = "up",
                                                            [SA_GATE] = "gate",
                                                            [SA_DOWN] = "down",
                                                            [SA_FEED_FORWARD_NORM] = "feed_forward_norm",
                                                            [SA_QUERY_NORM] = "query_norm",
                                                            [SA_KEY_NORM] = "key_norm",
                                                            [SA_ATTENTION_POST_NORM] = "attention_post_norm",
                                                            [SA_FEED_FORWARD_POST_NORM] = "feed_forward_post_norm"};

typedef struct {
    sa_transformer e;
    sa_layer layer[MOST_LAYERS + 1];
    sa_transformer_gradients g;
    sa_layer_gradients of_layer[MOST_LAYERS + 1];
    sa_compact compact[MOST_LAYERS][SA_LAYER_PARAMETERS];
} model;

/* False if this set has no product with the layer's kind of weights. */
static bool bind_layer(vector_case *c, model *m, int n) {
    sa_layer *l = &m->layer[n];
    char prefix[2 * NAME];
    snprintf(prefix, sizeof prefix, "%d.", n);
    l->window_left = l->window_right = SA_UNBOUNDED;
    BIND(c, prefix, layer_fields, l);
    for (int which = 0; which < SA_LAYER_PARAMETERS; ++which) {
        char name[NAME];
        snprintf(name, sizeof name, "%d.%s", n, parameters[which]);
        snprintf(prefix, sizeof prefix, "%s.", name);
        sa_norm norm = {0};
        BIND(c, prefix, norm_fields, &norm);
        l->weight[which] = norm.weight;
        l->bias[which] = norm.bias;
        l->eps[which] = norm.eps;
        l->rms[which] = norm.rms;
        m->of_layer[n].weight[which] = find_gradient(c, name, "weight");
        m->of_layer[n].bias[which] = find_gradient(c, name, "bias");
        const vector_array *w = find_array(c, "%s.weight", name);
        if (l->weights == SA_WEIGHTS_WHOLE || which == SA_ATTENTION_NORM || which >= SA_FEED_FORWARD_NORM ||
            w == NULL) {
            continue;
        }
        const float *scale = (const float *)(void *)find_data(c, "%s.scale", name);
        if (sa_compact_active(l->weights) == NULL) {
            return false;
        }
        m->compact[n][which] = sa_compact_fill(l->weights, w->shape[0], w->shape[1], w->data, scale,
                                               dirty_memory(sa_compact_bytes(l->weights, w->shape[0], w->shape[1])));
        l->weight[which] = &m->compact[n][which];
    }
    return true;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Also small models run with this number of threads, by shares or by tasks of phases. */
static void forward(const sa_transformer *e, int threads, bool by_shares, void **saved, void *out) {
    sa_transformer_plan plan;
    CHECK(sa_transformer_make_plan(e, saved != NULL, 1, &plan) == SA_OK, "a plan");
    const size_t attention = plan.scratch_bytes; /* with a cache, more than a task's scratch */
    plan.threads = threads;
    plan.by_shares = by_shares;
    plan.far = threads == 3;
    plan.layout = sa_layout_of(e, by_shares && saved == NULL ? plan.share_rows : e->tokens, saved != NULL);
    plan.scratch_bytes = plan.layout.bytes + attention + sa_transformer_scratch(e, &plan, false);
    plan.shared_bytes = plan.layout.bytes + (size_t)e->sequences * plan.partial_bytes;
    if (saved) {
        *saved = scratch_memory(plan.saved_bytes);
    }
    void *scratch = scratch_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes);
    sa_transformer_forward(e, &plan, out, saved ? *saved : NULL, scratch);
}

/* The same, with the weights of attention, which add up to 1. */
static void forward_with_weights(const sa_transformer *e, int threads, bool by_shares, void *out) {
    sa_transformer own = *e;
    const bool cached = e->cache.past != NULL;
    const ptrdiff_t rows = cached ? e->tokens : e->longest, keys = cached ? (ptrdiff_t)e->cache.past[0] + rows : rows;
    const ptrdiff_t all = e->layers * e->sequences * (e->layers ? e->layer[0].heads : 0) * rows;
    own.weights = zero_memory((size_t)(all * keys) * sa_element_size(e->f64));
    forward(&own, threads, by_shares, NULL, out);
    for (ptrdiff_t row = 0; row < all; ++row) {
        double sum = 0;
        for (ptrdiff_t key = 0; key < keys; ++key) {
            sum += real_get(own.weights, e->f64, row * keys + key);
        }
        const bool padding = row % rows >= sa_length_of(e, row / rows / e->layer[0].heads % e->sequences);
        CHECK(sum - !padding <= 1e-5 && !padding - sum <= 1e-5, "weights of row %td add up to %g", row, sum);
    }
}

static void backward(const model *m, int threads, const void *saved) {
    sa_transformer_plan plan;
    CHECK(sa_transformer_plan_backward(&m->e, 1 << 10, &plan) == SA_OK, "a plan of gradients");
    plan.threads = threads;
    plan.scratch_bytes = sa_transformer_scratch(&m->e, &plan, true);
    sa_transformer_backward(&m->e, &m->g, &plan, saved,
                            scratch_memory(plan.shared_bytes + (size_t)threads * plan.scratch_bytes));
}

/* Runs the sequences first … first + count − 1 with a cache, in three pieces: two thirds of the tokens, then all but
 * the last, then the last; or in one. out has the rows of all sequences. */
static void run_pieces(const sa_transformer *e, ptrdiff_t first, ptrdiff_t count, int pieces, int threads, char *out) {
    sa_transformer some = *e;
    const ptrdiff_t item = (ptrdiff_t)sa_element_size(e->f64), capacity = e->longest + 2;
    const size_t bytes = (size_t)(e->layers * count * sa_key_width(&e->layer[0]) * capacity * item);
    const bool prompt = e->cache.prompt;
    int64_t past[MOST_SEQUENCES] = {0}, starts[MOST_SEQUENCES + 1] = {0};
    int64_t *ids = zero_memory((size_t)e->tokens * sizeof *ids);
    some.cache = (sa_cache){scratch_memory(bytes),     scratch_memory(bytes), past, capacity,
                            .narrow = e->cache.narrow, .dtype = SA_F16};
    some.sequences = count;
    some.ids = ids;
    some.starts = starts;
    for (int piece = 3 - pieces; piece < 3; ++piece) {
        some.cache.prompt = prompt || piece < 2; /* a sequence alone may have one token in the second piece */
        some.longest = 0;
        for (ptrdiff_t s = 0; s < count; ++s) {
            const ptrdiff_t n = sa_length_of(e, first + s);
            const ptrdiff_t until = piece == 0 ? n - n / 3 - 1 : piece == 1 ? n - 1 : n;
            const ptrdiff_t length = until - (ptrdiff_t)past[s];
            memcpy(ids + starts[s], e->ids + e->starts[first + s] + past[s], (size_t)length * sizeof *ids);
            starts[s + 1] = starts[s] + length;
            some.longest = sa_larger(some.longest, length);
        }
        some.tokens = (ptrdiff_t)starts[count];
        char *rows = dirty_memory((size_t)(some.tokens * e->d * item));
        if (count == 1) {
            forward_with_weights(&some, threads, threads == 1, rows);
        } else {
            forward(&some, threads, threads == 1, NULL, rows);
        }
        for (ptrdiff_t s = 0; s < count; ++s) {
            memcpy(out + (e->starts[first + s] + past[s]) * e->d * item, rows + starts[s] * e->d * item,
                   (size_t)((starts[s + 1] - starts[s]) * e->d * item));
            past[s] += starts[s + 1] - starts[s];
        }
    }
}

static void run_sequence(const sa_transformer *e, ptrdiff_t s, char *out) {
    const int64_t starts[2] = {0, sa_length_of(e, s)};
    const ptrdiff_t row = e->pooling == SA_EACH_ROW ? sa_start_of(e, s) : s;
    sa_transformer one = *e;
    one.tokens = one.longest = sa_length_of(e, s);
    one.sequences = 1;
    one.starts = starts;
    one.ids = e->ids ? e->ids + e->starts[s] : NULL;
    one.rows = e->rows ? (const char *)e->rows + sa_bytes(e, sa_start_of(e, s) * e->d) : NULL;
    forward(&one, 1, true, NULL, out + sa_bytes(e, row * e->d));
}

void replay_transformer(vector_case *c, int run) {
    model m;
    memset(&m, 0, sizeof m);
    BIND(c, "", model_fields, &m.e);
    BIND(c, "embedding_norm.", norm_fields, &m.e.embedding_norm);
    BIND(c, "final_norm.", norm_fields, &m.e.final_norm);
    m.e.layer = m.layer;
    m.g.layer = m.of_layer;
    m.e.cache.narrow = find_number(c, "narrow", 0) != 0;
    m.e.cache.prompt = find_number(c, "prompt", 0) != 0;
    const bool cached = find_number(c, "cached", 0) != 0, drops = find_number(c, "drops", 0) != 0;
    char *out = find_data(c, "out");
    for (int n = 0; n < c->arrays && run == OTHERWISE; ++n) {
        c->array[n].left_out = strncmp(c->array[n].name, "d.", 2) == 0 && c->array[n].role != INPUT;
    }
    BIND(c, "d.", model_gradient_fields, &m.g);
    static const char *const of[2] = {"weight", "bias"};
    for (int n = 0; n < 2; ++n) {
        m.g.embedding_norm[n] = find_gradient(c, "embedding_norm", of[n]);
        m.g.final_norm[n] = find_gradient(c, "final_norm", of[n]);
    }
    for (int n = 0; n < m.e.layers; ++n) {
        if (!bind_layer(c, &m, n)) {
            skip_case(c);
            return;
        }
    }
    const int threads = run == TEAM ? 3 : 1;
    if (cached) {
        const int pieces = run == TEAM && m.e.cache.prompt ? 1 : 3;
        for (ptrdiff_t s = 0; s < (run == OTHERWISE ? m.e.sequences : 1); ++s) {
            run_pieces(&m.e, s, run == OTHERWISE ? 1 : m.e.sequences, pieces, threads, out);
        }
    } else if (m.g.grad_out && run != OTHERWISE) {
        void *saved;
        forward(&m.e, threads, run == ALONE, &saved, out);
        backward(&m, threads, saved);
    } else if (m.g.grad_out && !drops) {
        forward_with_weights(&m.e, 3, true, out);
        forward_with_weights(&m.e, 3, false, out);
    } else if (run == OTHERWISE && !drops) {
        for (ptrdiff_t s = 0; s < m.e.sequences; ++s) {
            run_sequence(&m.e, s, out);
        }
    } else {
        forward(&m.e, run == ALONE ? 1 : 3, run != TEAM, NULL, out);
    }
}
