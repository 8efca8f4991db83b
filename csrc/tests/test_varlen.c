/* Ragged batches: every sequence has the bits of a call of its own, which the other tests hold against the definition. Every
 * array is an allocation of exactly its bytes, for the sanitizers; scratch comes full of NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/varlen.h"
#include "tests/test.h"

enum { MOST = 8, HEADS = 4 };

typedef struct {
    bool f64, causal, lower_right, masks, sinks, alibi;
    ptrdiff_t gqa, E, Dv, left;
    double softcap, dropout;
    int n;
    ptrdiff_t lengths_q[MOST], lengths_k[MOST];
} varlen_case;

/* The packed arrays of a case, as (rows, heads, cols), and what is computed from them. */
typedef struct {
    varlen_case t;
    sa_attention a;
    sa_attention_gradients g;
    int64_t begin_q[MOST + 1], begin_k[MOST + 1];
    sa_tensor masks[MOST], dmasks[MOST];
    double slopes[MOST][HEADS], sinks[MOST][HEADS];
    char *owned[64];
    int n_owned;
} ragged;

static size_t real_size(const varlen_case *t) { return t->f64 ? sizeof(double) : sizeof(float); }

static char *own(ragged *c, size_t bytes) {
    char *memory = malloc(bytes ? bytes : 1);
    memset(memory, 0, bytes);
    c->owned[c->n_owned++] = memory;
    return memory;
}

static void fill(char *memory, const varlen_case *t, ptrdiff_t n, random_source *r) {
    for (ptrdiff_t i = 0; i < n && r; ++i) {
        element_set(memory + i * (ptrdiff_t)real_size(t), t->f64 ? SA_F64 : SA_F32, false, random_between(r, -1.5, 1.5));
    }
}

/* (rows, heads, cols) where `inside`, else (heads, rows, cols). */
static void make(ragged *c, sa_tensor *tensor, ptrdiff_t rows, ptrdiff_t heads, ptrdiff_t cols, bool inside, random_source *r) {
    const ptrdiff_t size = (ptrdiff_t)real_size(&c->t);
    char *memory = own(c, (size_t)(rows * heads * cols * size));
    fill(memory, &c->t, rows * heads * cols, r);
    *tensor = (sa_tensor){.m = {memory, (inside ? heads * cols : cols) * size, size, c->t.f64 ? SA_F64 : SA_F32, false}};
    tensor->lead_stride[1] = (inside ? cols : rows * cols) * size;
}

/* One mask of every kind of shape: whole, shared by heads, by rows, and none. */
static void make_masks(ragged *c, random_source *r) {
    for (int s = 0; s < c->t.n && c->t.masks; ++s) {
        const ptrdiff_t heads = s % 4 == 0 ? HEADS : 1, rows = s % 4 == 2 ? 1 : c->t.lengths_q[s];
        if (s % 4 == 3) {
            continue;
        }
        make(c, &c->masks[s], rows, heads, c->t.lengths_k[s], false, r);
        make(c, &c->dmasks[s], rows, heads, c->t.lengths_k[s], false, NULL);
        for (int which = 0; which < 2; ++which) {
            sa_tensor *t = which ? &c->dmasks[s] : &c->masks[s];
            t->lead_stride[1] = heads == 1 ? 0 : t->lead_stride[1];
            t->m.row_stride = rows == 1 && c->t.lengths_q[s] != 1 ? 0 : t->m.row_stride;
        }
        for (ptrdiff_t j = 0; j < rows * heads * c->t.lengths_k[s]; j += 3) {
            element_set(c->masks[s].m.data + j * (ptrdiff_t)real_size(&c->t), c->masks[s].m.dtype, false, (double)-INFINITY);
        }
    }
}

static void build(ragged *c, const varlen_case *t, uint64_t seed) {
    random_source r = {seed};
    memset(c, 0, sizeof *c);
    c->t = *t;
    for (int s = 0; s < t->n; ++s) {
        c->begin_q[s + 1] = c->begin_q[s] + t->lengths_q[s];
        c->begin_k[s + 1] = c->begin_k[s] + t->lengths_k[s];
        for (int h = 0; h < HEADS; ++h) {
            c->slopes[s][h] = random_between(&r, 0, 0.2);
            c->sinks[s][h] = random_between(&r, -2, 2);
        }
    }
    sa_attention *a = &c->a;
    sa_attention_gradients *g = &c->g;
    const ptrdiff_t L = (ptrdiff_t)c->begin_q[t->n], S = (ptrdiff_t)c->begin_k[t->n], K = HEADS / t->gqa;
    *a = (sa_attention){.L = L,
                        .S = S,
                        .E = t->E,
                        .Dv = t->Dv,
                        .n_lead = 2,
                        .lead = {t->n, HEADS},
                        .gqa = t->gqa,
                        .f64 = t->f64,
                        .scale = t->E ? 1 / sqrt((double)t->E) : 1,
                        .softcap = t->softcap,
                        .causal = t->causal,
                        .window_left = t->left < 0 ? SA_UNBOUNDED : t->left,
                        .window_right = SA_UNBOUNDED,
                        .dropout_p = t->dropout,
                        .seed = UINT64_C(0x123456789abcdef)};
    make(c, &a->query, L, HEADS, t->E, true, &r);
    make(c, &a->key, S, K, t->E, true, &r);
    make(c, &a->value, S, K, t->Dv, true, &r);
    make(c, &a->out, L, HEADS, t->Dv, true, NULL);
    make(c, &a->lse, L, HEADS, 1, false, NULL);
    make(c, &a->stats, L, HEADS, 2, false, NULL);
    make(c, &g->grad_out, L, HEADS, t->Dv, true, &r);
    make(c, &g->grad_lse, L, HEADS, 1, false, &r);
    make(c, &g->dquery, L, HEADS, t->E, true, NULL);
    make(c, &g->dkey, S, K, t->E, true, NULL);
    make(c, &g->dvalue, S, K, t->Dv, true, NULL);
    make_masks(c, &r);
    if (t->alibi) { /* of every sequence its own; sinks are of all */
        a->alibi =
            (sa_tensor){.m = {(char *)c->slopes, 0, 0, SA_F64, false}, .lead_stride = {sizeof c->slopes[0], sizeof(double)}};
        make(c, &g->dslope_rows, L, HEADS, 3, false, NULL);
    }
    if (t->sinks) {
        a->sinks = (sa_tensor){.m = {(char *)c->sinks, 0, 0, SA_F64, false}, .lead_stride = {0, sizeof(double)}};
        make(c, &g->dsink_rows, L, HEADS, 1, false, NULL);
    }
    g->a = a;
    g->delta = own(c, (size_t)(L * HEADS) * real_size(t));
}

static void run_packed(ragged *c, int threads) {
    const bool masks = c->t.masks;
    const sa_varlen v = {&c->a, c->t.n, c->begin_q, c->begin_k, masks ? c->masks : NULL, c->t.lower_right};
    const sa_varlen_gradients g = {&v, &c->g, masks ? c->dmasks : NULL};
    sa_varlen_item items[MOST];
    sa_varlen_plan plan;
    CHECK(sa_varlen_make_plan(&v, threads, items, &plan) == SA_OK, "plan");
    plan.threads = threads;
    char *scratch = dirty_memory((size_t)threads * plan.scratch_bytes), *partial = dirty_memory(plan.partial_bytes);
    CHECK(sa_varlen_forward(&v, &plan, scratch, partial) == SA_OK, "forward");
    free(scratch);
    free(partial);
    CHECK(sa_varlen_plan_backward(&g, threads, items, &plan) == SA_OK, "backward plan");
    plan.threads = threads;
    scratch = dirty_memory((size_t)threads * plan.scratch_bytes);
    CHECK(sa_varlen_backward(&g, &plan, scratch) == SA_OK, "backward");
    free(scratch);
}

static void at_row(sa_tensor *t, int64_t row) { t->m.data += t->m.data ? row * t->m.row_stride : 0; }

/* The same by a call for each sequence. */
static void run_alone(ragged *c) {
    for (int s = 0; s < c->t.n; ++s) {
        sa_attention a = c->a;
        sa_attention_gradients g = c->g;
        const int64_t row = c->begin_q[s], key = c->begin_k[s];
        a.lead[0] = 1;
        a.L = c->t.lengths_q[s];
        a.S = c->t.lengths_k[s];
        a.diagonal = c->t.lower_right ? a.S - a.L : 0;
        a.first_head = s * HEADS;
        a.mask = c->masks[s];
        a.alibi.m.data = c->t.alibi ? (char *)c->slopes[s] : NULL;
        g.a = &a;
        g.dmask = c->dmasks[s];
        sa_tensor *const rows[8] = {&a.query, &a.out, &a.lse, &a.stats, &g.grad_out, &g.dquery, &g.dslope_rows, &g.dsink_rows};
        sa_tensor *const keys[4] = {&a.key, &a.value, &g.dkey, &g.dvalue};
        for (int n = 0; n < 8; ++n) {
            at_row(rows[n], row);
        }
        for (int n = 0; n < 4; ++n) {
            at_row(keys[n], key);
        }
        at_row(&g.grad_lse, row);
        sa_attention_plan plan;
        sa_backward_plan backward;
        CHECK(sa_attention_make_plan(&a, 1, &plan) == SA_OK && sa_attention_plan_backward(&g, 1, &backward) == SA_OK, "plans");
        char *scratch = dirty_memory(plan.scratch_bytes), *partial = dirty_memory(plan.partial_bytes);
        sa_attention_forward(&a, &plan, scratch, partial);
        free(scratch);
        free(partial);
        scratch = dirty_memory(backward.scratch_bytes);
        g.delta = dirty_memory((size_t)backward.delta_count * real_size(&c->t));
        sa_attention_backward(&g, &backward, scratch);
        free(g.delta);
        free(scratch);
    }
}

static bool same(const ragged *x, const ragged *y, const sa_tensor *tx, const sa_tensor *ty, ptrdiff_t elements) {
    return tx->m.data == NULL || (memcmp(tx->m.data, ty->m.data, (size_t)elements * real_size(&x->t)) == 0 && x->t.n == y->t.n);
}

static void try(const varlen_case *t, uint64_t seed, const char *title) {
    ragged *alone = malloc(sizeof *alone), *packed = malloc(sizeof *packed);
    build(alone, t, seed);
    run_alone(alone);
    for (int threads = 1; threads <= 3; ++threads) {
        build(packed, t, seed);
        run_packed(packed, threads);
        const ptrdiff_t L = packed->a.L * HEADS, S = packed->a.S * HEADS / t->gqa;
        bool right = true;
#define SAME(field, n) (right &= same(alone, packed, &alone->field, &packed->field, n))
        SAME(a.out, L * t->Dv);
        SAME(a.lse, L);
        SAME(a.stats, 2 * L);
        CHECK(right, "%s: forward differs with %d threads", title, threads);
        SAME(g.dquery, L * t->E);
        SAME(g.dkey, S * t->E);
        SAME(g.dvalue, S * t->Dv);
        SAME(g.dslope_rows, 3 * L);
        SAME(g.dsink_rows, L);
        for (int s = 0; s < t->n; ++s) {
            const ptrdiff_t heads = s % 4 == 0 ? HEADS : 1, rows = s % 4 == 2 ? 1 : t->lengths_q[s];
            SAME(dmasks[s], heads * rows * t->lengths_k[s]);
        }
#undef SAME
        CHECK(right, "%s: backward differs with %d threads", title, threads);
        for (int n = 0; n < packed->n_owned; ++n) {
            free(packed->owned[n]);
        }
    }
    for (int n = 0; n < alone->n_owned; ++n) {
        free(alone->owned[n]);
    }
    free(alone);
    free(packed);
}

void test_varlen(void) {
    const varlen_case plain = {.gqa = 1,
                               .E = 20,
                               .Dv = 33,
                               .left = -1,
                               .n = 7,
                               .lengths_q = {5, 0, 70, 1, 64, 3, 33},
                               .lengths_k = {7, 9, 0, 40, 130, 3, 65}};
    for (int f64 = 0; f64 < 2; ++f64) {
        varlen_case t = plain;
        t.f64 = f64;
        try(&t, 1, "plain");
        t.causal = true;
        try(&t, 2, "causal");
        t.lower_right = true;
        t.gqa = 2;
        try(&t, 3, "lower right, grouped");
        t.left = 11;
        t.alibi = t.sinks = true;
        try(&t, 4, "window, slopes, sinks");
        t.masks = true;
        t.softcap = 1.5;
        t.dropout = 0.3;
        try(&t, 5, "everything");
        t = plain;
        t.f64 = f64;
        t.masks = true;
        t.E = t.Dv = 1;
        try(&t, 6, "masks, narrow");
    }
    varlen_case t = plain; /* keys in chunks, and parts that take turns, beside a short sequence */
    t.n = 3;
    t.E = t.Dv = 8;
    t.lengths_q[0] = 2;
    t.lengths_k[0] = 2200;
    t.lengths_q[1] = t.lengths_k[1] = 20;
    t.lengths_q[2] = t.lengths_k[2] = 600;
    try(&t, 7, "chunks and parts");
    t.n = 0;
    try(&t, 8, "no sequence");
    t = plain;
    t.E = t.Dv = 0;
    try(&t, 9, "no width");
}
