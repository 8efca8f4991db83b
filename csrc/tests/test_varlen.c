/* Ragged batches: each sequence must have the bits of a call of its own, which other tests check. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "drivers/varlen.h"
#include "tests/test.h"

enum { MOST = 8, HEADS = 4 };

/* The sequences alone and packed. Packed arrays are (rows, heads, cols), or (heads, rows, cols) for numbers of rows. */
typedef struct {
    int n;
    bool masks, lower_right;
    live_case alone[MOST];
    array arrays[ARRAYS], dmasks[MOST];
    sa_tensor mask_tensors[MOST], dmask_tensors[MOST];
    int64_t begin_q[MOST + 1], begin_k[MOST + 1];
    sa_attention a;
    sa_attention_gradients g;
} ragged;

static bool is_of_keys(int which) { return which == KEY || which == VALUE || which == D_KEY || which == D_VALUE; }

/* Heads' scalars and masks are not packed. */
static bool is_packed(int which) { return which != MASK && which != D_MASK && which != LENGTHS && which != WEIGHTS; }

static void make_packed(ragged *c, int which) {
    const array *own = &c->alone[0].arrays[which];
    if (!own->memory || !is_packed(which)) {
        return;
    }
    const bool scalars = which == ALIBI || which == SINKS;
    const bool inside = which == QUERY || which == OUT || which == GRAD_OUT || which == D_QUERY || is_of_keys(which);
    array_shape shape = own->shape;
    shape.lead[0] = scalars && c->n > 0 ? c->n : 1;
    shape.rows = scalars ? 1 : (ptrdiff_t)(is_of_keys(which) ? c->begin_k : c->begin_q)[c->n];
    array_make(&c->arrays[which], &shape, own->tensor.m.dtype, inside ? HEADS_INSIDE : 0, 0, which >= INPUTS);
}

static char *packed_at(const ragged *c, int which, int s, ptrdiff_t head, ptrdiff_t row, ptrdiff_t col) {
    const array *a = &c->arrays[which];
    const bool scalars = which == ALIBI || which == SINKS;
    const ptrdiff_t before = scalars ? 0 : (ptrdiff_t)(is_of_keys(which) ? c->begin_k : c->begin_q)[s];
    return array_at(a, head + (scalars ? s * a->shape.lead[1] : 0), 1, before + row, col);
}

/* Copies inputs into the packed arrays, or compares outputs. */
static bool copy_or_compare(ragged *c, int which, bool copies) {
    bool same = true;
    for (int s = 0; s < c->n && c->arrays[which].memory; ++s) {
        const array *own = &c->alone[s].arrays[which];
        const size_t item = sa_itemsize(own->tensor.m.dtype);
        const ptrdiff_t rows = own->shape.rows, cols = own->shape.cols;
        for (ptrdiff_t n = 0; n < own->shape.lead[1] * rows * cols; ++n) {
            char *to = packed_at(c, which, s, n / cols / rows, n / cols % rows, n % cols);
            const char *from = array_at(own, n / cols / rows, 1, n / cols % rows, n % cols);
            if (copies) {
                memcpy(to, from, item);
            }
            same &= memcmp(to, from, item) == 0;
        }
    }
    return same;
}

static void make_ragged(ragged *c, const test_case *spec, int n, const ptrdiff_t *lengths_q, const ptrdiff_t *lengths_k,
                        uint64_t seed) {
    c->n = n;
    c->masks = spec->mask != SA_DTYPES;
    for (int s = 0; s < (n > 0 ? n : 1); ++s) { /* the first sequence determines the widths even if n is 0 */
        test_case t = *spec;
        t.L = lengths_q[s];
        t.S = lengths_k[s];
        t.diagonal = c->lower_right ? t.S - t.L : 0;
        t.mask = s % 4 == 3 ? SA_DTYPES : t.mask; /* no mask; a whole mask; shared by heads; shared by rows */
        t.mask_broadcast = s % 4 == 1 ? 2 : s % 4 == 2 ? BROADCAST_ROWS : 0;
        case_make(&c->alone[s], &t, seed + (uint64_t)s);
        c->alone[s].call.first_head = s * HEADS;
        c->begin_q[s + 1] = c->begin_q[s] + t.L;
        c->begin_k[s + 1] = c->begin_k[s] + t.S;
    }
    c->a = c->alone[0].call;
    c->a.lead[0] = n;
    c->a.L = (ptrdiff_t)c->begin_q[n];
    c->a.S = (ptrdiff_t)c->begin_k[n];
    sa_tensor *tensors[ARRAYS];
    case_tensors(&c->a, &c->g, tensors);
    for (int which = 0; which < ARRAYS; ++which) {
        make_packed(c, which);
        *tensors[which] = c->arrays[which].tensor;
        if (which < INPUTS) {
            copy_or_compare(c, which, true);
        }
    }
    for (int s = 0; s < n && c->masks; ++s) {
        const array *dmask = &c->alone[s].arrays[D_MASK];
        c->mask_tensors[s] = c->alone[s].arrays[MASK].tensor;
        if (dmask->memory) {
            array_make(&c->dmasks[s], &dmask->shape, dmask->tensor.m.dtype, 0, c->alone[s].spec.mask_broadcast, true);
        }
        c->dmask_tensors[s] = c->dmasks[s].tensor;
    }
    c->g.a = &c->a;
    c->g.delta = dirty_memory((size_t)(c->a.L * HEADS) * sizeof(double));
}

static void run_packed(ragged *c, int threads) {
    const sa_varlen v = {&c->a, c->n, c->begin_q, c->begin_k, c->masks ? c->mask_tensors : NULL, c->lower_right};
    const sa_varlen_gradients g = {&v, &c->g, c->masks ? c->dmask_tensors : NULL};
    sa_varlen_item items[MOST];
    sa_varlen_plan plan;
    for (int which = OUT; which < ARRAYS; ++which) {
        array_fill(&c->arrays[which], 0);
    }
    for (int s = 0; s < c->n; ++s) {
        array_fill(&c->dmasks[s], 0);
    }
    CHECK(sa_varlen_make_plan(&v, threads, items, &plan) == SA_OK, "plan");
    plan.threads = threads;
    char *scratch = dirty_memory((size_t)threads * plan.scratch_bytes), *partial = dirty_memory(plan.partial_bytes);
    CHECK(sa_varlen_forward(&v, &plan, scratch, partial) == SA_OK, "forward");
    CHECK(sa_varlen_plan_backward(&g, threads, items, &plan) == SA_OK, "backward plan");
    plan.threads = threads;
    scratch = dirty_memory((size_t)threads * plan.scratch_bytes);
    CHECK(sa_varlen_backward(&g, &plan, scratch) == SA_OK, "backward");
}

static void try(const test_case *spec, int n, const ptrdiff_t *lengths_q, const ptrdiff_t *lengths_k, bool lower_right,
                uint64_t seed, const char *title) {
    FREES_AT_END;
    ragged *c = zero_memory(sizeof *c);
    c->lower_right = lower_right;
    make_ragged(c, spec, n, lengths_q, lengths_k, seed);
    for (int s = 0; s < n; ++s) {
        CHECK(case_run(&c->alone[s]) == SA_OK, "alone");
    }
    for (int threads = 1; threads <= 3; ++threads) {
        run_packed(c, threads);
        for (int which = OUT; which < ARRAYS; ++which) {
            CHECK(copy_or_compare(c, which, false), "%s: array %d has other bits with %d threads", title, which, threads);
            CHECK(!c->arrays[which].memory || array_margins_intact(&c->arrays[which]), "%s: written outside array %d", title,
                  which);
        }
        for (int s = 0; s < n; ++s) {
            const array *own = &c->alone[s].arrays[D_MASK];
            CHECK(!c->dmasks[s].memory || memcmp(c->dmasks[s].memory, own->memory, own->bytes) == 0,
                  "%s: the gradient of mask %d has other bits with %d threads", title, s, threads);
        }
    }
}

void test_varlen(void) {
    static const ptrdiff_t few_q[MOST] = {5, 0, 70, 1, 64, 3, 33}, few_k[MOST] = {7, 9, 0, 40, 130, 3, 65};
    static const ptrdiff_t mixed_q[MOST] = {2, 20, 600}, mixed_k[MOST] = {2200, 20, 600}; /* chunks, and ranges in turns */
    for (int way = 0; way < 12; ++way) {
        test_case t = plain_case(way % 2 ? SA_F64 : SA_F32, 1, 1, 20, 33);
        t.n_lead = 2;
        t.lead[0] = 1;
        t.lead[1] = HEADS;
        t.lse = t.backward = t.grad_lse = true;
        t.causal = way >= 2 && way < 8;
        t.gqa = way >= 4 && way < 8 ? 2 : 1;
        t.window_left = way >= 6 && way < 8 ? 11 : SA_UNBOUNDED;
        t.alibi = t.sinks = way >= 6 && way < 8;
        t.mask = way >= 6 && way < 10 ? t.out : SA_DTYPES;
        t.softcap = way >= 6 && way < 8 ? 1.5 : 0;
        t.dropout_p = way >= 6 && way < 8 ? 0.3 : 0;
        if (way >= 8) {
            t.E = t.Dv = way >= 10 ? 8 : 1;
        }
        try(&t, way >= 10 ? 3 : 7, way >= 10 ? mixed_q : few_q, way >= 10 ? mixed_k : few_k, way >= 4 && way < 8, (uint64_t)way,
            "sequences");
        if (way == 0) {
            try(&t, 0, few_q, few_k, false, 1, "no sequence");
            t.E = t.Dv = 0;
            try(&t, 7, few_q, few_k, false, 1, "no width");
        }
    }
}
