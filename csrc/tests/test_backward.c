/* The backward pass against its definition (docs/theory/backward.md), pair by pair in double: options, sizes around the vectors and
 * tiles, parts that take turns, and NaN behind a mask. Every array is an allocation of its own, for the sanitizers. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

enum { QUERY, KEY, VALUE, OUT, STATS, GRAD_OUT, D_QUERY, D_KEY, D_VALUE, MASK, D_MASK, D_SLOPE, D_SINK, LSE, GRAD_LSE, ARRAYS };

typedef struct {
    bool f64, bf16, causal, mask, softcap, alibi, sinks, poison, grad_lse;
    ptrdiff_t heads, gqa, L, S, E, Dv, diagonal, left;
    double dropout;
    int left_out;  /* bits QUERY, KEY, VALUE and MASK: their gradients are not asked for */
    ptrdiff_t nan; /* this key is NaN, if it is not 0 */
    bool behind;   /* no: it scores −inf, and its value is NaN */
    int block;     /* a block mask: its blocks have so many rows and keys, every third is closed */
} backward_case;

/* With bf16 what comes from outside is of bfloat16; gradients are summed in float32. */
static sa_dtype dtype_of(const backward_case *t, int which) {
    const bool given = which == QUERY || which == KEY || which == VALUE || which == OUT || which == GRAD_OUT;
    return t->bf16 && given ? SA_BF16 : t->f64 ? SA_F64 : SA_F32;
}

static ptrdiff_t size_of(const backward_case *t, int which) {
    const sa_dtype dtype = dtype_of(t, which);
    return dtype == SA_BF16 ? 2 : dtype == SA_F64 ? 8 : 4;
}

typedef struct {
    backward_case t;
    sa_attention a;
    sa_attention_gradients g;
    char *memory[ARRAYS];
    ptrdiff_t heads[ARRAYS], rows[ARRAYS], cols[ARRAYS];
    double slope[4], sink[4];
    sa_block_mask block_mask;
    int64_t *classes, *starts;
    sa_run *runs;
    double *dq, *dk, *dv, *dm, dslope[4], dsink[4]; /* the reference */
} backward_call;

static double *element_of(const backward_call *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col, double *x) {
    const ptrdiff_t at = (head % c->heads[which] * c->rows[which] + row) * c->cols[which] + col;
    *x = element_get(c->memory[which] + at * size_of(&c->t, which), dtype_of(&c->t, which), false);
    return x;
}

static double get(const backward_call *c, int which, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col) {
    double x;
    return *element_of(c, which, head, row, col, &x);
}

static void make(backward_call *c, int which, sa_tensor *tensor, ptrdiff_t heads, ptrdiff_t rows, ptrdiff_t cols,
                 random_source *r) {
    const ptrdiff_t size = size_of(&c->t, which), n = heads * rows * cols;
    c->memory[which] = calloc((size_t)n + (n == 0), (size_t)size);
    c->heads[which] = heads;
    c->rows[which] = rows;
    c->cols[which] = cols;
    for (ptrdiff_t i = 0; i < n && r; ++i) {
        element_set(c->memory[which] + i * size, dtype_of(&c->t, which), false, random_between(r, -1.5, 1.5));
    }
    tensor->m = (sa_matrix){c->memory[which], cols * size, size, dtype_of(&c->t, which), false};
    tensor->lead_stride[0] = heads == 1 ? 0 : rows * cols * size;
}

static bool open_pair(const backward_call *c, ptrdiff_t i, ptrdiff_t j) {
    const backward_case *t = &c->t;
    const ptrdiff_t at = i + t->diagonal;
    if (t->block && (i / t->block + j / t->block) % 3 == 0) {
        return false;
    }
    return (!t->causal || j <= at) && (t->left < 0 || j >= at - t->left) && (!t->mask || get(c, MASK, 0, i, j) != -INFINITY);
}

static bool kept(const backward_call *c, ptrdiff_t head, ptrdiff_t i, ptrdiff_t j) {
    const uint32_t counter[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)head, 0};
    const uint32_t key[2] = {(uint32_t)c->a.seed, (uint32_t)(c->a.seed >> 32)};
    uint32_t words[4];
    reference_philox(7, counter, key, words);
    return (double)words[j % 4] >= rint(c->t.dropout * 4294967296.0);
}

/* One row of the definition; its gradients are added to the reference's. */
static void reference_row_of(backward_call *c, ptrdiff_t head, ptrdiff_t i) {
    const backward_case *t = &c->t;
    const ptrdiff_t key_head = head / t->gqa, S = t->S, E = t->E, Dv = t->Dv;
    double *p = calloc((size_t)S + 1, sizeof *p), *gain = calloc((size_t)S + 1, sizeof *gain);
    double top = t->sinks ? c->sink[head] : -INFINITY, sum = 0, delta = 0;
    for (ptrdiff_t j = 0; j < S; ++j) {
        p[j] = -INFINITY;
        if (open_pair(c, i, j)) {
            double s = 0;
            for (ptrdiff_t e = 0; e < E; ++e) {
                s += get(c, QUERY, head, i, e) * get(c, KEY, key_head, j, e);
            }
            s *= c->a.scale;
            const double u = t->softcap ? tanh(s / c->a.softcap) : 0;
            gain[j] = 1 - u * u;
            s = t->softcap ? c->a.softcap * u : s;
            s -= t->alibi ? c->slope[head] * fabs((double)(i + t->diagonal - j)) : 0;
            p[j] = s + (t->mask ? get(c, MASK, 0, i, j) : 0);
            top = p[j] > top ? p[j] : top;
        }
    }
    for (ptrdiff_t j = 0; j < S; ++j) {
        p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - top);
        sum += p[j];
    }
    const double sink = t->sinks ? exp(c->sink[head] - top) : 0, keep = t->dropout < 1 ? 1 / (1 - t->dropout) : 0;
    sum += sink;
    double *dp = calloc((size_t)S + 1, sizeof *dp);
    for (ptrdiff_t j = 0; j < S && sum > 0; ++j) {
        p[j] /= sum;
        const double factor = t->dropout == 0 ? 1 : kept(c, head, i, j) ? keep : 0;
        if (!open_pair(c, i, j)) {
            continue;
        }
        for (ptrdiff_t d = 0; d < Dv; ++d) {
            dp[j] += factor * get(c, GRAD_OUT, head, i, d) * get(c, VALUE, key_head, j, d);
            c->dv[(key_head * S + j) * Dv + d] += factor * p[j] * get(c, GRAD_OUT, head, i, d);
        }
        delta += p[j] * dp[j];
    }
    delta -= t->grad_lse && sum > 0 ? get(c, GRAD_LSE, head, i, 0) : 0;
    c->dsink[head] -= sum > 0 ? sink / sum * delta : 0;
    for (ptrdiff_t j = 0; j < S && sum > 0; ++j) {
        if (!open_pair(c, i, j)) {
            continue;
        }
        double ds = p[j] * (dp[j] - delta);
        c->dm[i * S + j] += ds;
        c->dslope[head] -= ds * fabs((double)(i + t->diagonal - j));
        ds *= c->a.scale * (t->softcap ? gain[j] : 1);
        for (ptrdiff_t e = 0; e < E; ++e) {
            c->dq[(head * t->L + i) * E + e] += ds * get(c, KEY, key_head, j, e);
            c->dk[(key_head * S + j) * E + e] += ds * get(c, QUERY, head, i, e);
        }
    }
    free(p);
    free(gain);
    free(dp);
}

static void compare(const backward_call *c, int which, const double *expected, const char *name) {
    const backward_case *t = &c->t;
    /* Sums of at most a thousand terms of the size of 1, each off by a few dozen u: their scores and weights are. In bfloat16 δ is a
     * sum of Dv numbers of the output, each off by 2^−9 of 1; weights and dS may be off by that, of sums that are smaller. */
    const double limit = t->bf16 ? 0x1p-8 * sqrt((double)t->Dv)
                                 : (t->f64 ? DBL_EPSILON : (double)FLT_EPSILON) * 40 * sqrt((double)(t->L + t->S + 16)) * 4;
    double worst = 0;
    bool right = true;
    for (ptrdiff_t i = 0; i < c->heads[which] * c->rows[which] * c->cols[which]; ++i) {
        double x;
        element_of(c, which, 0, 0, i, &x);
        const double error = fabs(x - expected[i]);
        right &= error <= limit * (1 + fabs(expected[i]));
        worst = error > worst ? error : worst;
    }
    CHECK(right,
          "%s off by %g: f64 %d bf16 %d heads %td gqa %td L %td S %td E %td Dv %td causal %d o %td left %td mask %d softcap %d "
          "alibi %d sinks %d dropout %g poison %d block %d",
          name, worst, t->f64, t->bf16, t->heads, t->gqa, t->L, t->S, t->E, t->Dv, t->causal, t->diagonal, t->left, t->mask,
          t->softcap, t->alibi, t->sinks, t->dropout, t->poison, t->block);
}

/* NaN in the last keys, values, and queries and gradients of the last row, all closed by the mask. */
static void poison_closed(backward_call *c) {
    const backward_case *t = &c->t;
    for (ptrdiff_t i = 0; i < t->L; ++i) {
        for (ptrdiff_t j = 0; j < t->S; ++j) {
            if (i == t->L - 1 || j >= t->S - 3) {
                char *at = c->memory[MASK] + i * c->a.mask.m.row_stride + j * c->a.mask.m.col_stride;
                element_set(at, c->a.mask.m.dtype, false, -INFINITY);
            }
        }
    }
    const int arrays[4] = {QUERY, GRAD_OUT, KEY, VALUE};
    for (int n = 0; n < 4; ++n) {
        const int which = arrays[n];
        const ptrdiff_t size = size_of(t, which), first = c->rows[which] - (n < 2 ? 1 : 3);
        for (ptrdiff_t head = 0; head < c->heads[which]; ++head) {
            for (ptrdiff_t at = first * c->cols[which]; at < c->rows[which] * c->cols[which]; ++at) {
                element_set(c->memory[which] + (head * c->rows[which] * c->cols[which] + at) * size, dtype_of(t, which), false,
                            at % 2 ? (double)NAN : (double)INFINITY);
            }
        }
    }
}

/* A class for every row of blocks; a run for every block, where it is open: two neighbours are one run. */
static void make_block_mask(backward_call *c) {
    const backward_case *t = &c->t;
    const ptrdiff_t rows = (t->L + t->block - 1) / t->block, columns = (t->S + t->block - 1) / t->block;
    sa_block_mask *m = &c->block_mask;
    ptrdiff_t count = 0;
    c->classes = calloc((size_t)rows + (rows == 0), sizeof *c->classes);
    c->starts = calloc((size_t)rows + 1, sizeof *c->starts);
    c->runs = calloc((size_t)(rows * columns) + 1, sizeof *c->runs);
    for (ptrdiff_t row = 0; row < rows; ++row) {
        c->classes[row] = row;
        for (ptrdiff_t column = 0; column < columns; ++column) {
            if ((row + column) % 3 != 0) {
                const bool goes_on = column > 0 && (row + column - 1) % 3 != 0;
                count += !goes_on;
                c->runs[count - 1] = (sa_run){goes_on ? c->runs[count - 1].lo : column * t->block, (column + 1) * t->block};
            }
        }
        c->starts[row + 1] = count;
    }
    *m = (sa_block_mask){.class_rows = t->block, .starts = c->starts, .runs = c->runs, .gaps = true, .share = 0.7};
    m->classes.m = (sa_matrix){(char *)c->classes, sizeof *c->classes, 0, SA_I64, false};
    c->a.block_masks = m;
    c->a.block_mask_count = 1;
}

/* How often the last call looked whether to stop. */
static int looks;

static void count_looks(sa_watch *watch) {
    (void)watch;
    ++looks;
}

/* Forward and backward. */
static backward_call *run(const backward_case *t, uint64_t seed) {
    backward_call *c = calloc(1, sizeof *c);
    random_source r = {seed};
    c->t = *t;
    sa_attention *a = &c->a;
    sa_attention_gradients *g = &c->g;
    *a = (sa_attention){.L = t->L,
                        .S = t->S,
                        .E = t->E,
                        .Dv = t->Dv,
                        .n_lead = 1,
                        .lead = {t->heads},
                        .gqa = t->gqa,
                        .f64 = t->f64,
                        .scale = t->E ? 1 / sqrt((double)t->E) : 1,
                        .softcap = t->softcap ? 1.25 : 0,
                        .causal = t->causal,
                        .diagonal = t->diagonal,
                        .window_left = t->left < 0 ? SA_UNBOUNDED : t->left,
                        .window_right = SA_UNBOUNDED,
                        .dropout_p = t->dropout,
                        .seed = UINT64_C(0x123456789abcdef)};
    const ptrdiff_t H = t->heads, K = H / t->gqa;
    g->a = a;
    make(c, QUERY, &a->query, H, t->L, t->E, &r);
    make(c, KEY, &a->key, K, t->S, t->E, &r);
    make(c, VALUE, &a->value, K, t->S, t->Dv, &r);
    make(c, OUT, &a->out, H, t->L, t->Dv, NULL);
    make(c, STATS, &a->stats, H, t->L, 2, NULL);
    make(c, LSE, &a->lse, H, t->L, 1, NULL);
    make(c, GRAD_OUT, &g->grad_out, H, t->L, t->Dv, &r);
    if (!(t->left_out & 1 << QUERY)) {
        make(c, D_QUERY, &g->dquery, H, t->L, t->E, NULL);
    }
    if (!(t->left_out & 1 << KEY)) {
        make(c, D_KEY, &g->dkey, K, t->S, t->E, NULL);
    }
    if (!(t->left_out & 1 << VALUE)) {
        make(c, D_VALUE, &g->dvalue, K, t->S, t->Dv, NULL);
    }
    if (t->grad_lse) {
        make(c, GRAD_LSE, &g->grad_lse, H, t->L, 1, &r);
    }
    if (t->mask) { /* all heads share it, and take turns */
        make(c, MASK, &a->mask, 1, t->L, t->S, &r);
        make(c, D_MASK, &g->dmask, 1, t->L, t->S, NULL);
        g->dmask.m.data = t->left_out & 1 << MASK ? NULL : g->dmask.m.data;
    }
    for (ptrdiff_t h = 0; h < H; ++h) {
        c->slope[h] = 0.1 + 0.05 * (double)h;
        c->sink[h] = 0.5 - (double)h;
    }
    if (t->alibi) {
        a->alibi.m = (sa_matrix){(char *)c->slope, 0, 0, SA_F64, false};
        a->alibi.lead_stride[0] = sizeof(double);
        make(c, D_SLOPE, &g->dslope_rows, H, t->L, 3, NULL);
    }
    if (t->sinks) {
        a->sinks.m = (sa_matrix){(char *)c->sink, 0, 0, SA_F64, false};
        a->sinks.lead_stride[0] = sizeof(double);
        make(c, D_SINK, &g->dsink_rows, H, t->L, 1, NULL);
    }
    if (t->poison) {
        poison_closed(c);
    }
    for (ptrdiff_t head = 0; head < K && t->nan; ++head) {
        char *key = c->memory[KEY] + (head * t->S + t->nan) * a->key.m.row_stride,
             *value = c->memory[VALUE] + (head * t->S + t->nan) * a->value.m.row_stride;
        element_set(key, a->key.m.dtype, false, t->behind ? (double)-INFINITY : (double)NAN);
        if (t->behind) {
            element_set(value, a->value.m.dtype, false, (double)NAN);
        }
    }
    for (ptrdiff_t row = 0; row < H * t->L && t->behind; ++row) {
        element_set(c->memory[QUERY] + row * a->query.m.row_stride, a->query.m.dtype, false, 1);
    }
    if (t->block) {
        make_block_mask(c);
    }
    sa_attention_plan forward;
    sa_backward_plan plan;
    CHECK(sa_attention_make_plan(a, 2, &forward) == SA_OK && sa_attention_plan_backward(g, 2, &plan) == SA_OK, "plans");
    char *scratch = dirty_memory((size_t)forward.threads * forward.scratch_bytes),
         *partial = dirty_memory(forward.partial_bytes);
    CHECK(sa_attention_forward(a, &forward, scratch, partial) == SA_OK, "forward");
    free(scratch);
    free(partial);
    scratch = dirty_memory((size_t)plan.threads * plan.scratch_bytes);
    g->delta = calloc((size_t)plan.delta_count + 1, sizeof(double));
    sa_watch watch = {.poll = count_looks};
    a->watch = &watch;
    looks = 0;
    CHECK(sa_attention_backward(g, &plan, scratch) == SA_OK, "backward");
    a->watch = NULL;
    free(scratch);
    free(g->delta);
    return c;
}

static void release(backward_call *c) {
    for (int which = 0; which < ARRAYS; ++which) {
        free(c->memory[which]);
    }
    free(c->classes);
    free(c->starts);
    free(c->runs);
    free(c->dq);
    free(c->dk);
    free(c->dv);
    free(c->dm);
    free(c);
}

/* Gradients that are left out change no bit of those of queries, keys and values. */
static void try_without(const backward_case *given, int left_out, uint64_t seed) {
    backward_case t = *given;
    backward_call *all = run(&t, seed);
    t.left_out = left_out;
    backward_call *some = run(&t, seed);
    for (int which = D_QUERY; which <= D_VALUE; ++which) {
        const size_t bytes = (size_t)(all->heads[which] * all->rows[which] * all->cols[which]) * (t.f64 ? 8 : 4);
        CHECK(!some->memory[which] || memcmp(some->memory[which], all->memory[which], bytes) == 0,
              "gradient %d has other bits without %d: f64 %d causal %d mask %d dropout %g", which - D_QUERY, left_out, t.f64,
              t.causal, t.mask, t.dropout);
    }
    release(all);
    release(some);
}

static void try(const backward_case *t, uint64_t seed) {
    backward_call *c = run(t, seed);
    const ptrdiff_t H = t->heads, K = H / t->gqa;
    c->dq = calloc((size_t)(H * t->L * t->E) + 1, sizeof(double));
    c->dk = calloc((size_t)(K * t->S * t->E) + 1, sizeof(double));
    c->dv = calloc((size_t)(K * t->S * t->Dv) + 1, sizeof(double));
    c->dm = calloc((size_t)(t->L * t->S) + 1, sizeof(double));
    for (ptrdiff_t head = 0; head < H; ++head) {
        for (ptrdiff_t i = 0; i < t->L; ++i) {
            reference_row_of(c, head, i);
        }
    }
    compare(c, D_QUERY, c->dq, "dquery");
    compare(c, D_KEY, c->dk, "dkey");
    compare(c, D_VALUE, c->dv, "dvalue");
    if (t->mask) {
        compare(c, D_MASK, c->dm, "dmask");
    }
    for (int which = D_SLOPE; which <= D_SINK; ++which) {
        for (ptrdiff_t head = 0; head < H && c->memory[which]; ++head) {
            double sum = 0;
            for (ptrdiff_t i = 0; i < t->L; ++i) {
                sum += get(c, which, head, i, 0);
                sum -= which == D_SLOPE ? get(c, which, head, i, 1) * get(c, which, head, i, 2) : 0;
            }
            const double expected = which == D_SLOPE ? c->dslope[head] : c->dsink[head];
            const double u = t->bf16 ? 0x1p-16 : t->f64 ? DBL_EPSILON : (double)FLT_EPSILON;
            CHECK(fabs(sum - expected) <= u * 100 * (double)(t->L + 1) * (double)(which == D_SLOPE ? t->S + 1 : 1),
                  "%s %g is not %g", which == D_SLOPE ? "dslope" : "dsink", sum, expected);
        }
    }
    release(c);
}

static bool is_open(const backward_call *c, ptrdiff_t i, ptrdiff_t j) {
    const backward_case *t = &c->t;
    const ptrdiff_t at = i + t->diagonal;
    return !(t->causal && j > at) && !(t->left >= 0 && j < at - t->left) && !(t->mask && get(c, MASK, 0, i, j) == -INFINITY);
}

/* With a NaN in the last key that some row attends to, or behind its score of −inf: all gradients that come from such rows are NaN, and
 * no others. A weight of 0 leaves the values theirs. */
static void try_nan(const backward_case *given) {
    backward_case t = *given;
    t.nan = t.causal ? t.L - (t.poison ? 2 : 1) : t.S - 4;
    backward_call *c = run(&t, 3);
    bool right = true;
    for (ptrdiff_t head = 0; head < t.heads; ++head) {
        for (ptrdiff_t i = 0; i < t.L; ++i) {
            for (ptrdiff_t e = 0; e < t.E; ++e) {
                right &= isnan(get(c, D_QUERY, head, i, e)) == is_open(c, i, t.nan);
            }
        }
        for (ptrdiff_t j = 0; j < t.S; ++j) {
            bool reached = false;
            for (ptrdiff_t i = 0; i < t.L; ++i) {
                reached |= is_open(c, i, t.nan) && is_open(c, i, j);
            }
            for (ptrdiff_t e = 0; e < t.E; ++e) {
                right &= isnan(get(c, D_KEY, head, j, e)) == reached;
            }
            for (ptrdiff_t d = 0; d < t.Dv; ++d) {
                right &= isnan(get(c, D_VALUE, head, j, d)) == (reached && !t.behind);
            }
        }
    }
    CHECK(right, "a NaN in an attended key: behind -inf %d f64 %d causal %d left %td mask %d", t.behind, t.f64, t.causal,
          t.left, t.mask);
    release(c);
}

/* What products of pairs of bfloat16 cut into steps, vectors and tiles; elsewhere rows that are converted. */
static void test_bf16(void) {
    const backward_case plain = {.bf16 = true, .heads = 2, .gqa = 1, .L = 37, .S = 70, .E = 20, .Dv = 33, .left = -1};
    const ptrdiff_t rows[] = {16, 17, 33, 64, 65, 131}, keys[] = {31, 32, 33, 64, 129, 200}, widths[] = {16, 17, 33, 64, 80};
    for (int i = 0; i < 6; ++i) {
        for (int j = 0; j < 6; ++j) {
            backward_case t = plain;
            t.L = rows[i];
            t.S = keys[j];
            t.E = widths[(i + j) % 5];
            t.Dv = widths[(2 * i + j) % 5];
            t.causal = (i + j) % 2;
            try(&t, (uint64_t)(6 * i + j));
        }
    }
    for (int options = 0; options < 256; options += quick ? 7 : 1) {
        backward_case t = plain;
        t.causal = options & 1;
        t.mask = options & 2;
        t.softcap = options & 4;
        t.alibi = options & 8;
        t.sinks = options & 16;
        t.dropout = options & 32 ? 0.3 : 0;
        t.grad_lse = options & 64;
        t.gqa = options & 128 ? 2 : 1;
        t.poison = t.mask && options % 3 == 0;
        t.left = options % 5 == 0 ? 20 : -1;
        t.diagonal = options % 7 == 0 ? t.S - t.L : 0;
        t.block = options % 11 == 0 ? 33 : 0;
        try(&t, (uint64_t)options);
    }
    for (int options = 0; options < 8; ++options) {
        backward_case t = plain;
        t.causal = options & 1;
        t.left = options & 2 ? 20 : -1;
        t.mask = t.poison = options & 4;
        try_nan(&t);
        for (int left_out = 1; left_out < 7; ++left_out) {
            t.poison = false;
            try_without(&t, left_out << QUERY, (uint64_t)options);
        }
    }
}

/* A block of few rows goes over its keys some at a time, and looks whether it was cancelled between: here 2048 of them. */
static void test_long_keys(void) {
    backward_case t = {.heads = 1, .gqa = 1, .L = 3, .S = 2048, .E = 1024, .Dv = 1024, .left = -1, .mask = true, .alibi = true};
    try(&t, 11);
    const int once = looks;
    t.S = 2 * 2048 + 150;
    try(&t, 12);
    CHECK(looks == once + 2, "%d looks over %td keys, %d over 2048", looks, t.S, once);
    t.causal = true;
    t.diagonal = t.S - t.L;
    t.block = 100;
    try(&t, 13);
}

void test_backward(void) {
    test_bf16();
    test_long_keys();
    for (int d = 0; d < 2; ++d) {
        const backward_case plain = {.f64 = d == 1, .heads = 2, .gqa = 1, .L = 37, .S = 70, .E = 20, .Dv = 33, .left = -1};
        const ptrdiff_t sizes[] = {0, 1, 2, 3, 4, 7, 8, 16, 17, 33, 48, 64, 65, 80, 130};
        const int n = sizeof sizes / sizeof *sizes;
        for (int i = 0; i < n; ++i) {
            for (int j = 0; j < n; j += quick ? 4 : 1) {
                backward_case t = plain;
                t.L = sizes[i];
                t.S = sizes[(i + j) % n];
                t.E = sizes[(2 * i + j + 1) % n];
                t.Dv = sizes[(i + 2 * j) % n];
                t.causal = j % 2;
                try(&t, (uint64_t)(i * n + j));
            }
        }
        for (int options = 0; options < 256; options += quick ? 5 : 1) {
            backward_case t = plain;
            t.causal = options & 1;
            t.mask = options & 2;
            t.softcap = options & 4;
            t.alibi = options & 8;
            t.sinks = options & 16;
            t.dropout = options & 32 ? 0.3 : 0;
            t.grad_lse = options & 64;
            t.gqa = options & 128 ? 2 : 1;
            t.poison = t.mask && options % 3 == 0;
            t.left = options % 5 == 0 ? 20 : -1;
            t.diagonal = options % 7 == 0 ? t.S - t.L : 0;
            try(&t, (uint64_t)options);
            t.block = 1 + options % 40;
            try(&t, (uint64_t)options);
        }
        for (int options = 0; options < 8; ++options) {
            backward_case t = plain;
            t.L = t.S = 150;
            t.causal = options & 1;
            t.mask = options & 2;
            t.dropout = options & 4 ? 0.3 : 0;
            t.heads = t.mask ? 4 : 2;
            t.gqa = options & 4 ? 2 : 1;
            t.block = options & 1 ? 0 : 50;
            for (int left_out = 1; left_out < 15; ++left_out) {
                try_without(&t, (left_out & 7) << QUERY | (left_out & 8 ? 1 << MASK : 0), (uint64_t)options);
            }
        }
        for (int options = 0; options < 8; ++options) {
            backward_case t = plain;
            t.causal = options & 1;
            t.left = options & 2 ? 20 : -1;
            t.mask = t.poison = options & 4;
            try_nan(&t);
            t.behind = true;
            try_nan(&t);
        }
        backward_case blocks = plain; /* so many that dK and dV may be brought together in whole cache lines */
        blocks.L = 530;
        blocks.S = 90;
        for (int causal = 0; causal < 2; ++causal) {
            blocks.causal = causal;
            try(&blocks, 8);
        }
        backward_case parts = plain;
        parts.heads = 1;
        parts.L = quick ? 520 : 800;
        parts.S = quick ? 540 : 1100;
        parts.E = parts.Dv = 6;
        for (int causal = 0; causal < 2; ++causal) {
            parts.causal = causal;
            parts.block = 0;
            try(&parts, 9);
            parts.block = 64 + 36 * causal;
            try(&parts, 9);
        }
    }
}
